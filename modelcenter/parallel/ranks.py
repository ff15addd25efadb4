"""The processes of a run, and the few things that they communicate.

A single process is not special: `ALONE` communicates with nobody, so callers need not ask how many ranks there are. Texts are sent
as bytes; nothing is pickled. Every method that returns something from other ranks is a collective: all ranks must call it, or none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from .machine import whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from .offload import Aside

SHARES = ("replicate", "fsdp")  # the dimensions of the mesh along which ranks have different data; inside them is `tp`
STEP = 0x9E3779B97F4A7C15  # odd, so that no two shares of the data have one seed


class OtherRankError(RuntimeError):
    """An error on another rank, with its message."""


@dataclass(frozen=True)
class Ranks:
    """All processes of a run, as a mesh (replicate, fsdp, tp). Along the first two dimensions each has its own share of the data;
    ranks along `tp` have the same share. `zero` is the machine's. `channel`: separate connections for messages."""

    mesh: "DeviceMesh | None" = None
    zero: int = 3
    channel: Any = None

    @property
    def rank(self) -> int:
        return self.mesh.get_rank() if self.mesh is not None else 0

    @property
    def size(self) -> int:
        return self.mesh.size() if self.mesh is not None else 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0

    @property
    def degrees(self) -> dict[str, int]:
        """The size of each dimension of the mesh."""
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)) if self.mesh is not None else {}

    @property
    def share(self) -> int:
        """The number of this rank's share of the data."""
        return self.rank * self.shares // self.size

    @property
    def shares(self) -> int:
        """Into how many shares the data is divided."""
        return math.prod(self.degrees.get(name, 1) for name in SHARES)

    @property
    def averages(self) -> bool:
        """Whether each share has a replica of the model, whose gradients are averaged (averaging.py), and not a shard."""
        return self.shares > 1 and "fsdp" not in self.degrees

    @property
    def leads(self) -> bool:
        """Whether this is the first of the ranks that have its share."""
        return self.rank % (self.size // self.shares) == 0

    def seed(self, seed: int) -> int:
        """The seed for random numbers in training: different for each share, the same for all ranks with one share."""
        return (seed + self.share * STEP) % 2**63

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def cuts(self, tensor: "Tensor") -> set[str]:
        """The dimensions of the mesh along which a tensor of the model is sharded; along the others every rank has the same."""
        placements = getattr(tensor, "placements", ())
        names = tensor.device_mesh.mesh_dim_names if placements else ()  # type: ignore[attr-defined]  # a DTensor's
        return {name for name, place in zip(names or (), placements, strict=True) if not place.is_replicate()}

    def copies(self, tensor: "Tensor") -> int:
        """How many ranks hold the same part of a tensor as this one."""
        return math.prod([n for name, n in self.degrees.items() if name not in self.cuts(tensor)])

    def owns(self, tensor: "Tensor") -> bool:
        """Whether this rank is the first of those that hold the same part."""
        return all(self.mesh.get_local_rank(name) == 0 for name in self.degrees.keys() - self.cuts(tensor)) if self.mesh else True

    def alike(self, cuts: set[str]) -> list[list[int]]:
        """The groups of ranks that hold the same part of a tensor that is divided along the dimensions `cuts`."""
        if self.mesh is None:
            return [[0]]
        names = list(self.degrees)
        order = sorted(range(len(names)), key=lambda k: names[k] not in cuts)
        parts = math.prod(n for name, n in self.degrees.items() if name in cuts)
        groups: list[list[int]] = self.mesh.mesh.permute(order).reshape(parts, -1).tolist()
        return groups

    def whole(self, forwards: int) -> bool:
        """Whether each of a step's `forwards` begins and ends as the step does (machine.py: whole)."""
        degrees = self.degrees
        return whole(forwards, self.zero, degrees.get("fsdp", 1), degrees.get("replicate", 1))

    def reduce(self, model: "nn.Module", last: bool, alone: bool = False) -> None:
        """Called before a backward, to say whether it is the last of a step; after the last, gradients are summed over all ranks.
        Before that, zero 1 keeps whole gradients and sends nothing, zero 2 and 3 keep shards of gradients, and zero 1 and 2 keep
        whole weights. Replicas, also of shards, are averaged in the last one only. `alone`: the communication of this micro-batch
        ends with its backward, so that the next one does not wait for it."""
        if self.averages:
            from .averaging import wait

            wait(model, not last)
        elif hasattr(model, "set_is_last_backward"):  # FSDP has it, on one rank too if weights are on the host
            if (aside := kept(model)) is not None:
                aside.take()
            sharded: Any = model
            # or FSDP does not wait for gradients that are on their way, to the host or to other ranks
            sharded.set_is_last_backward(last or alone or aside is not None)
            sharded.set_requires_gradient_sync(last or self.zero > 1)
            sharded.set_requires_all_reduce(last)
            sharded.set_reshard_after_backward(last or self.zero == 3)

    def reduced(self, model: "nn.Module") -> None:
        """Called after the last backward of a step: gradients are where optimizers look for them."""
        if (aside := kept(model)) is not None:
            aside.give()

    def verdict(self, squares: "Tensor", loss: "Tensor") -> "tuple[Tensor, Tensor]":
        """The sum of the squares (float64, 1; from `AdamW.squares` with `copies`) and the mean of the losses. What is not finite on
        one rank is then finite on none, so that all do the same."""
        if self.mesh is None:
            return squares, loss
        import torch
        import torch.distributed as dist

        both = torch.cat((squares, loss.to(squares).view(1) / self.size))
        dist.all_reduce(both)
        return both[:1], both[1]

    def added(self, parts: "Sequence[Tensor]", of: "Sequence[Tensor]") -> "list[Tensor]":
        """Each of `parts`, the contribution of this rank's part of one of the parameters `of`, summed over the whole parameter."""
        out, cut = list(parts), [k for k, p in enumerate(of) if self.cuts(p)]
        if cut:
            import torch
            import torch.distributed as dist

            flat = torch.cat([parts[k].double().flatten() * self.owns(of[k]) for k in cut])
            dist.all_reduce(flat)
            for k, total in zip(cut, flat.split([parts[k].numel() for k in cut]), strict=True):
                out[k] = total.to(parts[k].dtype).view_as(parts[k])
        return out

    def exchanged(self, parts: "Sequence[Tensor]", sizes: Sequence[int]) -> "list[Tensor]":
        """Send part r of `parts` to rank r, and receive `sizes` elements of the same dtype from each rank."""
        import torch
        import torch.distributed as dist

        kind, flat = parts[0].dtype, torch.cat(list(parts))
        out = flat.new_empty(sum(sizes))
        come, go = ([n * kind.itemsize for n in side] for side in (sizes, [part.numel() for part in parts]))
        dist.all_to_all_single(out.view(torch.uint8), flat.view(torch.uint8), come, go)  # bytes: gloo lacks some kinds of numbers
        return list(out.split(list(sizes)))

    # ---- numbers and texts -------------------------------------------------------------------------------------------

    def sum(self, *numbers: float) -> Sequence[Any]:
        """Each number, summed over the shares of the data. Integers stay integers. A boolean is about the rank itself: the result
        is the number of ranks, among all, that say True."""
        if self.mesh is None:
            return numbers
        import torch
        import torch.distributed as dist

        mine = [float(n) if self.leads or isinstance(n, bool) else 0.0 for n in numbers]
        total = torch.tensor(mine, dtype=torch.float64, device=self.home)
        dist.all_reduce(total)
        found: list[float] = total.tolist()
        return [int(f) if isinstance(n, int) else f for n, f in zip(numbers, found, strict=True)]

    def tell(self, text: str) -> str:
        """The text of the first rank, on all ranks; the `text` of the others is ignored."""
        return self.agree(text if self.first else "")[0]

    def agree(self, text: str) -> list[str]:
        """The text of every rank, in the order of the ranks."""
        if self.mesh is None:
            return [text]
        import torch

        said = self.gathered(torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8))
        return [bytes(part.tolist())[:-1].decode() for part in said]

    def joined(self, batches: "Sequence[Sequence[Tensor]]") -> "list[Tensor]":
        """The rows (n ..., on the host) of all batches, in the order of the batches, which the shares have in turn. They may differ
        only in n. With several shares they are float64."""
        import torch

        rows = [row for batch in batches for row in batch]
        if self.mesh is None:
            return rows
        counts = self.gathered(torch.tensor([len(batch) for batch in batches], dtype=torch.int64))
        lengths = self.gathered(torch.tensor([row.numel() for row in rows], dtype=torch.int64))
        shapes = self.gathered(torch.tensor(rows[0].shape[1:] if rows else (), dtype=torch.int64))
        values = self.gathered(torch.cat([torch.empty(0, dtype=torch.float64), *(row.double().flatten() for row in rows)]))
        leads = range(0, self.size, self.size // self.shares)
        shape = max((said.tolist() for said in shapes), key=len)  # a rank without rows knows none
        found = {rank: (row.view(-1, *shape) for row in values[rank].split(lengths[rank].tolist())) for rank in leads}
        return [row for k in range(len(batches)) for rank in leads for row in islice(found[rank], int(counts[rank][k]))]

    def gathered(self, values: "Tensor") -> "list[Tensor]":
        """The values (n, which may differ) of every rank, in the order of the ranks, on the host."""
        import torch
        import torch.distributed as dist

        values = values.to(self.home)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.home) for _ in range(self.size)]
        dist.all_gather(sizes, sizes[0].new_tensor([len(values)]), group=self.channel)
        lengths = [int(n) for n in sizes]
        found = [values.new_empty(max(lengths)) for _ in lengths]
        dist.all_gather(found, torch.nn.functional.pad(values, (0, max(lengths) - len(values))), group=self.channel)
        return [row[:n].cpu() for row, n in zip(found, lengths, strict=True)]

    @property
    def home(self) -> str:
        """The device through which numbers are exchanged: the host, if ranks are connected there."""
        import torch.distributed as dist

        assert self.mesh is not None
        return "cpu" if self.channel is not None or "cpu" in dist.get_backend_config() else self.mesh.device_type

    def apart(self) -> "Ranks":
        """The same ranks with separate connections from host to host, so that another thread may `agree` and work `together`
        whatever else is being sent. All ranks must call this, or none."""
        if self.mesh is None:
            return self
        import torch.distributed as dist

        return replace(self, channel=dist.new_group(backend="gloo", timeout=timedelta(days=1)))  # `watch.py` speaks first

    def together(self, work: "Callable[[], str]", kinds: tuple[type[Exception], ...]) -> list[str]:
        """What `work` returns on each rank. If it fails on one rank with an error of `kinds`, it has failed on all: that rank
        raises its error, the others an `OtherRankError`."""
        if self.mesh is None:
            return [work()]
        failure: Exception | None = None
        try:
            said = f"+{work()}"
        except kinds as error:
            failure, said = error, f"-{error}"
        answers = self.agree(said)
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            if answer.startswith("-"):
                raise OtherRankError(f"rank {rank}: {answer[1:]}")
        return [answer[1:] for answer in answers]


ALONE = Ranks()


def kept(model: "nn.Module") -> "Aside | None":
    """The host's part of offload, for a model whose weights are in host memory."""
    from .offload import aside_of

    return aside_of(model)


def settle(model: "nn.Module") -> None:
    """Make every parameter this rank's shard again, as FSDP2 keeps it. After a forward without a backward, the gathered weights are
    in its place, whole and perhaps in low precision; saving those would save rounded weights. Also waits for an update under
    way."""
    if (aside := kept(model)) is not None:
        aside.finish()
    for module in model.modules():
        sharded: Any = module
        if hasattr(sharded, "reshard"):  # FSDP's class would have to be imported, for a second
            sharded.reshard()


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 5`; of many only the first eight."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


class Silent:
    """Takes the place, on all ranks but the first, of an object through which the first one speaks."""

    def __getattr__(self, name: str) -> "Callable[..., None]":
        return lambda *args, **options: None
