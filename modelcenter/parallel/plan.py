"""How much memory a training step needs, found out by taking one on tensors without storage.

The step is rehearsed on a twin of the model under torch's FakeTensorMode: shapes, dtypes and lifetimes are those of the real
step, nothing is computed and nothing allocated. Every storage that appears is counted from its birth to its death, so that what
holds at the peak follows from the code that will run and from no formula: recompute, packing, adapters, quantised layers, low
precision and every optimizer are in it. What is not: what the process holds besides tensors.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..ops._op import rehearsal
from .blocks import blocks
from .blocks import recompute as recompute_blocks
from .machine import Recompute

Kind = Literal["weights", "optimizer", "gradients", "activations", "loss", "temporary", "fragments"]
KINDS: dict[Kind, str] = {
    "weights": "weights and buffers", "optimizer": "optimizer: moments, copies, averages", "gradients": "gradients",
    "activations": "activations and the batch", "loss": "logits and loss", "temporary": "temporary, in backward and update",
    "fragments": "allowance for fragments",
}  # fmt: skip
LASTING: tuple[Kind, ...] = ("weights", "optimizer", "gradients")  # there whatever the batch
Arguments = Mapping[str, Any]


class Tally(FakeTensorMode):
    """Tensors without storage; the bytes of those that are alive, by `kind`, and of the moment with most.

    `chosen`: of a mask of so many elements, how many are not zero; of any other, all. Another number that only values would tell
    is 1, and a condition on one does not hold.
    """

    def __init__(self, chosen: Mapping[int, int] | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.chosen = chosen or {}
        self.known: dict[int, tuple[Any, int, Kind]] = {}
        self.now: Counter[Kind] = Counter()
        self.peak: Counter[Kind] = Counter()
        self.kind: Kind = "weights"
        self.inside = False  # of a call: how torch finds its shapes is of no interest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if kwargs and "out" in kwargs:  # nothing is made; torch does not know all of them
            return kwargs["out"]
        if func is torch.ops.aten.nonzero.default:
            size = args[0].numel()
            out = args[0].new_empty((self.chosen.get(size, size), args[0].dim()), dtype=torch.int64)
        else:
            inside, self.inside = self.inside, True
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.inside = inside
        if self.inside or func.namespace == "prim":
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            size = storage.nbytes()
            self.known[key] = (weakref.ref(storage, partial(self.forget, key)), size, self.kind)
            self.now[self.kind] += size
            if self.now.total() > self.peak.total():
                self.peak = self.now.copy()

    def name(self, tensor: Tensor | None, kind: Kind) -> None:
        """What a storage is for has turned out only now."""
        if tensor is not None and (key := tensor.untyped_storage()._cdata) in self.known:
            reference, size, before = self.known[key]
            self.known[key] = (reference, size, kind)
            self.now[before] -= size
            self.now[kind] += size

    def forget(self, key: int, _: Any) -> None:
        _, size, kind = self.known.pop(key)
        self.now[kind] -= size


def twin(model: nn.Module, device: torch.device, fake: FakeTensorMode) -> Any:
    """The model with tensors of `fake` on `device` in place of its own, tied where these are, not compiled."""
    memo: dict[int, Any] = {}
    with fake:
        for tensor in (*model.parameters(), *model.buffers()):
            new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return copy.deepcopy(model, memo)


def rehearse(
    model: nn.Module,
    batch: Arguments,
    build: Callable[[nn.Module], tuple[Optimizer, Any]],
    compute: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    *,
    forwards: int = 1,
    share: float = 1.0,
    recompute: Recompute = "none",
    evaluates: bool = False,
) -> Counter[Kind]:
    """The bytes of each kind that are alive on `device` at the peak of a step of `forwards` micro-batches like `batch`.

    `model`: on any device, meta included; it is left as it is. `build` makes the optimizer of its twin, and what else is kept for
    each weight. `compute`: where a forward runs (autocast). `share`: of the labels that are not ignored.
    `recompute`: what blocks do not keep. `evaluates`: evaluations of such batches follow, whose logits are there whole.
    """
    labels = batch["labels"].numel()
    tally = Tally({labels: round(share * labels)})
    other = twin(model, device, tally).train()
    if not any("forward" in vars(block) for block in blocks(other)):
        recompute_blocks(other, recompute)
    trained = [p for p in other.parameters() if p.requires_grad]
    for p in trained:
        p.register_post_accumulate_grad_hook(lambda p: tally.name(p.grad, "gradients"))
    other.head.register_forward_pre_hook(lambda *_: setattr(tally, "kind", "loss"))
    with tally, rehearsal():
        tally.kind = "gradients"
        for p in trained:
            p.grad = torch.empty_like(p)
        tally.kind = "optimizer"
        optimizer, kept = build(other)
        optimizer.step()  # the first one makes the moments; the peak is that of another
        if forwards == 1:
            optimizer.zero_grad(set_to_none=True)  # else a micro-batch meets the gradients of those before
        tally.peak = tally.now.copy()

        tally.kind = "activations"
        here = {key: value.to(device, copy=True) if fakes(value) else value for key, value in batch.items()}
        with compute():
            loss = other(**here, num_items_in_batch=1).loss
        tally.kind = "temporary"
        loss.backward()
        del loss
        clip = optimizer.clip(1.0)  # type: ignore[attr-defined]  # ours has it
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del clip
        if evaluates:
            other.eval()
            tally.kind = "activations"
            with torch.no_grad(), compute():
                other(**here, num_items_in_batch=1)
        del kept
    return tally.peak


def fakes(value: Any) -> bool:
    """Whether a batch's value goes to the device; bounds of sequences are read, so they stay what they are."""
    return isinstance(value, Tensor) and value.dim() > 1


@dataclass(frozen=True)
class Plan:
    """The bytes at the peak of a step, by kind, on a device that has `total` of them, `free` for this process."""

    parts: Mapping[Kind, int]
    free: int
    total: int

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.need <= self.free

    @property
    def lasting(self) -> int:
        """What is there whatever the batch."""
        return sum(self.parts.get(kind, 0) for kind in LASTING)

    @property
    def hopeless(self) -> bool:
        """Whether no batch is small enough."""
        return self.lasting > self.total

    def table(self) -> str:
        """A line for each kind."""
        rows = [(KINDS[kind], self.parts[kind]) for kind in KINDS if self.parts.get(kind)] + [("at the peak of a step", self.need)]
        return "\n".join(f"{name:<36}{size(count):>10}" for name, count in rows)

    def __str__(self) -> str:
        there = f"{size(self.free)} of {size(self.total)}" if self.free < self.total else size(self.total)
        return f"about {size(self.need)} at the peak, {there} there: {'fits' if self.fits else 'does not fit'}"


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 100 * unit else 0}f} {name}"
    return f"{count} B"
