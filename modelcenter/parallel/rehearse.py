"""A training step taken on tensors without storage: which memory is alive when, and what is computed and moved.

The step is rehearsed on a twin of the model under torch's FakeTensorMode: shapes, dtypes and lifetimes are those of the real
step, nothing is computed and nothing allocated. Every storage that appears is counted from its birth to its death, and every
call with the arithmetic that it does and the bytes that it reads and writes: so what holds at the peak, and what takes time,
follows from the code that will run. Recompute, packing, adapters, quantised layers, low precision and every optimizer are in
it. What is not: what the process holds besides tensors.

Blocks of a stack are alike, so that of a deep model a few are rehearsed: each moment's memory, and the work, is a linear function
of their number (`Deep`). A rank of tensor parallelism is rehearsed by itself: its layers are those of a smaller model.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import ceil, prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..layers import Adapted, Block, Stack
from ..ops._op import rehearsal
from .blocks import blocks
from .blocks import recompute as recompute_blocks
from .machine import Recompute

Kind = Literal["weights", "optimizer", "gradients", "activations", "loss", "temporary", "gathered", "fragments"]
KINDS: dict[Kind, str] = {
    "weights": "weights and buffers", "optimizer": "optimizer: moments, copies, averages", "gradients": "gradients",
    "activations": "activations and the batch", "loss": "logits and loss", "temporary": "temporary, in backward and update",
    "gathered": "weights and gradients of other ranks", "fragments": "allowance for fragments",
}  # fmt: skip
LASTING: tuple[Kind, ...] = ("weights", "optimizer", "gradients")  # there whatever the batch
SEEN: tuple[Kind, ...] = (*LASTING, "activations", "loss", "temporary")  # what a rehearsal sees
Arguments = Mapping[str, Any]
Compute = Callable[[], AbstractContextManager[Any]]
Build = Callable[[nn.Module], tuple[Optimizer, Any]]

CUT = {"column": 0, "logits": 0, "vocab": 0, "row": 1, "heads": 1}  # the dimension of a weight that the words of `tp` tables cut
AHEAD = 2  # blocks of a stack that are rehearsed: the first and the last, and then one between


class Work(NamedTuple):
    """One call: arithmetic in a dtype, and bytes that it must read and write; of a `sum`, those that tensor-parallel ranks add."""

    kind: Literal["matmul", "attention", "move", "sum"]
    dtype: str
    flops: int
    bytes: int


class Tally(FakeTensorMode):
    """Tensors without storage; the bytes of those that are alive, by kind, at the moments of each phase, and the work done.

    `chosen`: of a mask of so many elements, how many are not zero; of any other, all. Another number that only values would tell
    is 1, and a condition on one does not hold.
    """

    def __init__(self, chosen: Mapping[int, int] | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.chosen = chosen or {}
        self.known: dict[int, tuple[Any, int, Kind]] = {}
        self.now: Counter[Kind] = Counter()
        self.kind: Kind = "weights"
        self.phase = "before"
        self.moments: dict[str, list[tuple[int, ...]]] = {}
        self.work: Counter[Work] = Counter()
        self.calls = 0  # that a host makes
        self.inside = False  # of a call: how torch finds its shapes is of no interest

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch's compiler would be imported, for two seconds, and asked at every call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # two calls of three
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if kwargs and "out" in kwargs:  # nothing is made; torch does not know all of them
            self.did(func, args, kwargs, kwargs["out"])
            return kwargs["out"]
        if func is torch.ops.aten.nonzero.default:
            size = args[0].numel()
            out = args[0].new_empty((self.chosen.get(size, size), args[0].dim()), dtype=torch.int64)
        elif func.overloadpacket in PRODUCTS and func._overloadname == "dtype":  # torch 2.11 takes it for the one without
            left, right = args[PRODUCTS[func.overloadpacket]], args[PRODUCTS[func.overloadpacket] + 1]
            out = left.new_empty((*left.shape[:-1], right.size(-1)), dtype=args[-1])
        else:
            inside, self.inside = self.inside, True
            try:
                out = self.dispatch(func, types, args, kwargs or {})  # FakeTensorMode's own imports torch's compiler
            finally:
                self.inside = inside
        if self.inside or func.namespace == "prim":
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        self.did(func, args, kwargs, out)
        return out

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            size = storage.nbytes()
            self.known[key] = (weakref.ref(storage, partial(self.forget, key)), size, self.kind)
            self.now[self.kind] += size
            self.look()

    def look(self) -> None:
        """Remember this moment; one in which all was less is not needed after it."""
        moment, seen = tuple(self.now[kind] for kind in SEEN), self.moments.setdefault(self.phase, [])
        if seen and all(a <= b for a, b in zip(seen[-1], moment, strict=True)):
            seen.pop()
        seen.append(moment)

    def enter(self, phase: str, kind: Kind | None = None) -> None:
        """From now on it is that phase; what appears is of that kind."""
        self.phase = phase
        self.kind = kind or self.kind
        self.look()

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

    def did(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator of torch's."""
        name, packet = func._schema.name, func.overloadpacket
        self.calls += 1
        if func.is_view or "empty" in name or name in NOTHING:
            return
        if packet in PRODUCTS:
            left = args[PRODUCTS[packet]]
            self.work[Work("matmul", named(left), 2 * out.numel() * left.size(-1), bytes_of((args, out)))] += 1
        elif "scaled_dot_product" in name or "_efficient_attention" in name:
            back = "backward" in name
            q, k, v = args[back : 3 + back]
            given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
            self.attended(q, k, v, bool(given.get("is_causal")), back, bytes_of((args, out)))
        elif any("embedding" in part or "index" in part or "gather" in part for part in (name,)):
            self.work[Work("move", named(out), 0, 2 * bytes_of(out))] += 1  # of a table only rows are read
        else:
            size = bytes_of((args, kwargs, None if func._schema.is_mutable else out))
            self.work[Work("move", "", 0, size * (1 + func._schema.is_mutable))] += 1

    def kernel(self, name: str, args: Sequence[Any]) -> None:
        """Count a call of one of our kernels."""
        self.calls += 1
        size = bytes_of(args)
        if name in ("attention", "attention_backward"):
            q, k, v = (x.transpose(1, 2) for x in args[:3])
            self.attended(q, k, v, bool(args[7]), name != "attention", size, args[4:6])
            return
        if name == "adamw":  # what is updated is read and written, gradients are read
            size = 2 * size - bytes_of(args[2])
        elif name == "embedding":
            size = 2 * bytes_of(args[2])
        elif name == "cross_entropy_both":
            size *= 2  # in place
        self.work[Work("move", "", 0, size)] += 1

    def attended(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, back: bool, size: int, ends: Sequence[Any] = ()) -> None:
        """Count attention of q (b h s d) to k and v: two products forward, five backward; half of each if causal."""
        pairs = q.size(-2) * k.size(-2)
        if ends and ends[0] is not None:
            pairs = sum((b - a) * (d - c) for (a, b), (c, d) in zip(*(pairwise(e.tolist()) for e in ends), strict=True))
        flops = 2 * prod(q.shape[:-2]) * pairs * (q.size(-1) + v.size(-1))
        self.work[Work("attention", named(q), int(flops * (2.5 if back else 1) * (0.5 if causal else 1)), size)] += 1


NOTHING = {"aten::detach", "aten::_unsafe_view", "aten::alias", "aten::lift_fresh", "aten::resize_"}
PRODUCTS = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.bmm: 0, torch.ops.aten.baddbmm: 1}  # where a matrix is


def named(tensor: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(tensor.dtype, "fp32")


def bytes_of(tree: Any) -> int:
    """Of all tensors in it, each once; of one that is spread out, what is there."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors.values())


@dataclass(frozen=True)
class Rehearsal:
    """What was alive at the moments of each phase, in the order of `SEEN`; the work of a micro-batch, that of an update; and how
    many calls the host made for each."""

    moments: Mapping[str, Sequence[tuple[int, ...]]]
    work: Counter[Work] = field(default_factory=Counter)
    update: Counter[Work] = field(default_factory=Counter)
    calls: int = 0
    update_calls: int = 0


@dataclass(frozen=True, eq=False)
class Deep:
    """A sum of rehearsals, each so many times, which is that of a deeper model."""

    parts: Sequence[tuple[int, Rehearsal]]

    def peak(self, factors: Mapping[Kind, float] | None = None) -> Counter[Kind]:
        """The bytes of each kind at the moment with most, where each kind counts `factors` times (1, if it is not named)."""
        of = [(factors or {}).get(kind, 1.0) for kind in SEEN]

        def most(moments: Sequence[tuple[int, ...]]) -> list[float]:
            scaled = ([x * f for x, f in zip(moment, of, strict=True)] for moment in moments)
            return max(scaled, key=sum)

        found: list[list[float]] = []
        for phase in self.parts[0][1].moments:
            if len(self.parts) > 1 and phase.endswith("between"):
                continue  # linear from the first to the last
            each = [(times, most(part.moments[phase])) for times, part in self.parts]
            found.append([sum(times * row[i] for times, row in each) for i in range(len(SEEN))])
        best = max(found, key=sum)
        return Counter({kind: round(x) for kind, x in zip(SEEN, best, strict=True) if x})

    def work(self, update: bool = False) -> Counter[Work]:
        total: Counter[Work] = Counter()
        for times, part in self.parts:
            for work, count in (part.update if update else part.work).items():
                total[work] += times * count
        return total

    def calls(self, update: bool = False) -> int:
        return sum(times * (part.update_calls if update else part.calls) for times, part in self.parts)


def rehearse_deep(model: nn.Module, how: Callable[..., Rehearsal]) -> Deep:
    """What `how(model, keep=...)` finds, from rehearsals of a few blocks of each stack where these are alike."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    deep = [i for i, stack in enumerate(stacks) if len(stack.blocks) > AHEAD + 1 and alike(list(stack.blocks)[1:-1])]  # type: ignore[arg-type]
    if not deep:
        return Deep([(1, how(model, keep={}))])
    keep = dict.fromkeys(deep, AHEAD)
    more = {i: len(stacks[i].blocks) - AHEAD for i in deep}
    parts = [(1 - sum(more.values()), how(model, keep=keep))]
    return Deep([*parts, *((times, how(model, keep={**keep, i: AHEAD + 1})) for i, times in more.items())])


def alike(some: Sequence[Block]) -> bool:
    """Whether blocks have the same parts of the same shapes, trained or not."""

    def signature(block: Block) -> Any:
        tensors = (*block.named_parameters(), *block.named_buffers())
        parts = [(name, type(module)) for name, module in block.named_modules()]
        return parts, [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]

    return all(signature(block) == signature(some[0]) for block in some[1:])


def twin(model: nn.Module, device: torch.device, fake: FakeTensorMode, *, keep: Mapping[int, int] | None = None, ranks: int = 1,
         dtype: torch.dtype | None = None) -> Any:
    """The model with tensors of `fake` on `device` in place of its own, tied where these are, not compiled. `keep`: how many blocks
    of which stacks; `ranks`: those of which one has this part of each layer; `dtype`: of the floating-point parameters."""
    memo: dict[int, Any] = {}
    cut = dict(shards(model, ranks)) if ranks > 1 else {}
    out: set[int] = set()
    kept: dict[int, list[nn.Module]] = {}
    for i, stack in enumerate(m for m in model.modules() if isinstance(m, Stack)):
        if keep and i in keep:
            all_ = list(stack.blocks)
            kept[i] = [*all_[: keep[i] - 1], all_[-1]]
            left = {id(block) for block in kept[i]}
            out |= {id(t) for block in all_ if id(block) not in left for t in (*block.parameters(), *block.buffers())}
    with fake:
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) in out:
                continue
            shape = cut.get(id(tensor), tensor.shape)
            kind = dtype if dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype
            stride = tensor.stride() if shape == tensor.shape else torch.empty(shape, device="meta").stride()
            new = torch.empty_strided(shape, stride, dtype=kind, device=device)
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    for i, stack in enumerate(m for m in model.modules() if isinstance(m, Stack)):
        if i in kept:
            memo[id(stack.blocks)] = nn.ModuleList(copy.deepcopy(kept[i], memo))
    other = copy.deepcopy(model, memo)
    for block in blocks(other):
        vars(block).pop("forward", None)  # what the model recomputes is no matter of the twin's
    return other


def shards(model: nn.Module, ranks: int) -> Iterator[tuple[int, torch.Size]]:
    """By id the shape that a tensor has on one of `ranks`, by the layers' own `tp` tables."""
    for module, child, style in tables(model):
        part = getattr(module, child)
        if isinstance(part, Tensor):
            yield id(part), torch.Size((ceil(part.size(0) / ranks), *part.shape[1:]))
            continue
        for p in part.parameters(recurse=False):
            if p.dim() > CUT[style]:
                yield id(p), torch.Size(ceil(n / ranks) if i == CUT[style] else n for i, n in enumerate(p.shape))


def tables(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, child, word) of all `tp` tables; of an adapted layer its parts that are cut."""
    for module in model.modules():
        for child, style in getattr(module, "tp", {}).items():
            part = getattr(module, child, None)
            if isinstance(part, Adapted):
                yield from ((part, inner, style) for inner in ("base", "b" if style == "column" else "a"))
            elif part is not None:
                yield module, child, style


def sum_up(model: nn.Module, tally: Tally) -> None:
    """Count the sums over tensor-parallel ranks: what a layer cut by rows returns, and the gradient of what one cut by columns was
    given."""

    def count(tensor: Tensor) -> None:
        tally.work[Work("sum", named(tensor), 0, tensor.numel() * tensor.itemsize)] += 1

    def given(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].requires_grad:
            count(args[0])

    for module, child, style in tables(model):
        part = getattr(module, child)
        if isinstance(part, nn.Module) and style in ("row", "vocab"):
            part.register_forward_hook(lambda _, args, out: count(out))
        elif isinstance(part, nn.Module) and style == "column":
            part.register_forward_pre_hook(given)
        elif style == "logits":
            module.register_forward_pre_hook(given)  # the loss is formed where the logits are: no hook on the layer itself


def mark(model: nn.Module, tally: Tally) -> None:
    """Let the first and the last block of a stack say when they begin, forward and backward."""
    for i, stack in enumerate(m for m in model.modules() if isinstance(m, Stack)):
        for j, block in enumerate(stack.blocks):
            place = "first" if j == 0 else "last" if j == len(stack.blocks) - 1 else "between"

            def begin(module: nn.Module, args: Any, phase: str = f"forward {i} {place}") -> None:
                tally.enter(phase)

            def end(module: nn.Module, args: Any, out: Any, phase: str = f"backward {i} {place}") -> None:
                if out.requires_grad:
                    out.register_hook(lambda grad: tally.enter(phase))

            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end)


def rehearse(
    model: nn.Module,
    batch: Arguments,
    build: Build,
    compute: Compute,
    device: torch.device,
    *,
    forwards: int = 1,
    share: float = 1.0,
    recompute: Recompute = "none",
    evaluates: bool = False,
    keep: Mapping[int, int] | None = None,
    ranks: int = 1,
    dtype: torch.dtype | None = None,
    gpu: bool = False,
) -> Rehearsal:
    """A step of `forwards` micro-batches like `batch` on `device`.

    `model`: on any device, meta included; it is left as it is. `build` makes the optimizer of its twin, and what else is kept for
    each weight. `compute`: where a forward runs (autocast). `share`: of the labels that are not ignored. `recompute`: what blocks
    do not keep. `evaluates`: evaluations of such batches follow, whose logits are there whole. `keep`, `ranks`: as of `twin`.
    With a `dtype`, in which other ranks send the weights, one micro-batch alone is rehearsed: no update. `gpu`: the CPU stands for
    one.
    """
    tally = Tally({(labels := batch["labels"].numel()): round(share * labels)})
    other = twin(model, device, tally, keep=keep, ranks=ranks, dtype=dtype).train()
    recompute_blocks(other, recompute)
    mark(other, tally)
    if ranks > 1:
        sum_up(other, tally)
    trained = [p for p in other.parameters() if p.requires_grad]
    for p in trained:
        p.register_post_accumulate_grad_hook(lambda p: tally.name(p.grad, "gradients"))
    other.head.register_forward_pre_hook(lambda *_: tally.enter("head", "loss"))
    optimizer: Any = None
    work, calls = Counter[Work](), 0
    with tally, rehearsal(tally.kernel, gpu):
        if dtype is None:
            tally.kind = "gradients"
            for p in trained:
                p.grad = torch.empty_like(p)
            tally.kind = "optimizer"
            optimizer, kept = build(other)
            optimizer.step()  # the first one makes the moments; the peak is that of another
            if forwards == 1:
                optimizer.zero_grad(set_to_none=True)  # else a micro-batch meets the gradients of those before
        tally.moments.clear()
        tally.work.clear()
        tally.calls = 0

        tally.enter("before", "activations")
        here = {key: value.to(device, copy=True) if fakes(value) else value for key, value in batch.items()}
        with compute():
            loss = other(**here, num_items_in_batch=1).loss
        tally.enter("backward", "temporary")
        loss.backward()
        del loss
        work, tally.work, calls, tally.calls = tally.work, Counter(), tally.calls, 0
        if dtype is None:
            tally.enter("update")
            clip = optimizer.clip(1.0)
            optimizer.step(clip=clip)
            optimizer.zero_grad(set_to_none=True)
            del clip
        update, update_calls = tally.work.copy(), tally.calls
        if evaluates:
            other.eval()
            tally.enter("evaluation", "activations")
            with torch.no_grad(), compute():
                other(**here, num_items_in_batch=1)
        if dtype is None:
            del kept
    return Rehearsal(tally.moments, work, update, calls, update_calls)


def rehearse_update(model: nn.Module, build: Build, device: torch.device, *, keep: Mapping[int, int], ranks: int = 1,
                    gpu: bool = False) -> Rehearsal:
    """An update with all gradients there."""
    tally = Tally()
    other = twin(model, device, tally, keep=keep, ranks=ranks)
    with tally, rehearsal(tally.kernel, gpu):
        tally.kind = "gradients"
        for p in other.parameters():
            if p.requires_grad:
                p.grad = torch.empty_like(p)
        tally.kind = "optimizer"
        optimizer: Any
        optimizer, kept = build(other)
        optimizer.step()
        tally.moments.clear()
        tally.work.clear()
        tally.calls = 0
        tally.enter("update", "temporary")
        optimizer.step(clip=optimizer.clip(1.0))
        del kept
    return Rehearsal(tally.moments, update=tally.work, update_calls=tally.calls)


def fakes(value: Any) -> bool:
    """Whether a batch's value goes to the device; bounds of sequences are read, so they stay what they are."""
    return isinstance(value, Tensor) and value.dim() > 1
