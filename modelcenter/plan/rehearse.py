"""A training step taken on tensors without storage: which memory is alive when, and what is computed and moved.

The step is rehearsed on a twin of the model (`twin.py`) under torch's FakeTensorMode: shapes, dtypes and lifetimes are those of the
real step, but nothing is computed and nothing is allocated. So what is alive at the peak, and what takes time, follows from the
code that will run; `tally.py` counts it. Recompute, packing, adapters, quantised layers, low precision and every optimizer are
included. Memory that the process holds besides tensors is not. `deep.py` infers a deep model's step from a few blocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..layers import Block, Stack
from ..layers.block import pair
from ..ops._mode import rehearsal
from ..parallel.blocks import recompute as recompute_blocks
from ..parallel.machine import Recompute
from ..parallel.sequence import norms
from .tally import Tally, Work, compiler_left_out, named
from .twin import tables, twin

Arguments = Mapping[str, Any]
Compute = Callable[[], AbstractContextManager[Any]]
Build = Callable[[nn.Module], tuple[Optimizer, Any]]


@dataclass(frozen=True)
class Conditions:
    """What all rehearsals of one job have in common, whatever the batch and the layout."""

    build: Build  # makes the optimizer, and what else is kept for each weight
    compute: Compute  # the context of a forward (autocast)
    device: torch.device  # on which the rehearsal is made
    share: float = 1.0  # of the labels that are not ignored
    evaluates: bool = False  # evaluations on such batches follow, whose logits are kept whole
    gpu: bool = False  # `device` is a CPU that stands for a GPU


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal has found out."""

    moments: Mapping[str, Sequence[tuple[int, ...]]]  # phase -> at each of its moments, bytes of each kind of `tally.SEEN`
    work: Counter[Work] = field(default_factory=Counter)  # of a micro-batch
    update: Counter[Work] = field(default_factory=Counter)
    calls: int = 0  # that the host makes for a micro-batch
    update_calls: int = 0
    scratch: float = math.inf  # bytes that an update takes at most beside its state, but for a parameter that needs more alone


def sum_up(model: nn.Module, tally: Tally, sequence: bool) -> None:
    """Make the twin do, and the tally count, the sums over tensor-parallel ranks: of what a layer cut by rows returns, and of the
    gradient of what a layer cut by columns was given. With `sequence` those of blocks are left to `spread`."""
    import torch.distributed._functional_collectives  # noqa: F401  # says of which shape a sum is that no ranks make

    count = partial(counted, tally)

    def given(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args[0].requires_grad:
            count(args[0])

    def returned(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        count(out)
        return Sum.apply(out)  # type: ignore[no-untyped-call, no-any-return]  # torch has no types there

    for module, child, style in tables(model):
        part = getattr(module, child)
        if sequence and style in ("row", "column"):
            continue
        if isinstance(part, nn.Module) and style in ("row", "vocab"):
            part.register_forward_hook(returned)
        elif isinstance(part, nn.Module) and style == "column":
            part.register_forward_pre_hook(given)
        elif style == "logits":
            module.register_forward_pre_hook(given)  # the loss is formed where the logits are: no hook on the layer itself


def counted(tally: Tally, tensor: Tensor) -> None:
    """Count a sum of a tensor over the tensor-parallel ranks."""
    tally.work[Work("sum", named(tensor), 0, tensor.numel() * tensor.itemsize)] += 1


def spread(model: nn.Module, tally: Tally, ranks: int) -> None:
    """Have the twin's ranks hold parts of sequences between the layers that are cut, as parallel/sequence.py does."""

    def change(x: Tensor, length: int) -> Tensor:
        return Moved.apply(x, length, tally)  # type: ignore[no-untyped-call, no-any-return]  # torch has no types there

    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        lengths = {"whole": 0, "part": 0}

        def begin(stack: nn.Module, args: tuple[Any, ...], lengths: dict[str, int] = lengths) -> tuple[Any, ...]:
            length = args[0].size(1)
            lengths.update(whole=length, part=length if length % ranks else length // ranks)
            x = change(args[0], lengths["part"])
            x.part = True  # type: ignore[attr-defined]  # a DTensor in the step itself
            return x, *args[1:]

        def gather(layer: nn.Module, args: tuple[Any, ...], lengths: dict[str, int] = lengths) -> tuple[Any, ...]:
            return change(args[0], lengths["whole"]), *args[1:]

        def scatter(layer: nn.Module, args: Any, out: Tensor, lengths: dict[str, int] = lengths) -> Tensor:
            return change(out, lengths["part"])

        def join(stack: nn.Module, args: Any, out: Tensor, lengths: dict[str, int] = lengths) -> Tensor:
            return change(out, lengths["whole"])

        stack.register_forward_pre_hook(begin)
        stack.register_forward_hook(join)
        for norm in norms(stack):
            for p in norm.parameters(recurse=False):
                if p.requires_grad:
                    p.register_hook(partial(counted, tally))
        for block in [m for m in stack.modules() if isinstance(m, Block)]:
            for layer in (block.attn, block.cross, block.ffn):
                if layer is not None:
                    layer.register_forward_pre_hook(gather)
                    layer.register_forward_hook(scatter)


class Moved(torch.autograd.Function):
    """A part of each sequence of the whole, or the whole of the parts; and so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, tally: Tally) -> Tensor:
        ctx.length, ctx.tally = x.size(1), tally
        return moved(x, length, tally)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return moved(grad, ctx.length, ctx.tally), None, None


def moved(x: Tensor, length: int, tally: Tally) -> Tensor:
    """`x` with sequences of that length, by way of a copy in the order in which ranks send them: half a sum of what is whole."""
    ranks = max(length, x.size(1)) // min(length, x.size(1))
    if length > x.size(1):
        out = torch.cat(x.new_empty(ranks * x.size(0), *x.shape[1:]).chunk(ranks), 1)
    else:
        out = torch.cat(x.chunk(ranks, 1)).new_empty(x.size(0), length, *x.shape[2:])
    whole = max(x.numel(), out.numel()) * x.itemsize
    tally.work[Work("sum", named(x), 0, whole // 2)] += 1
    return out


class Sum(torch.autograd.Function):
    """A tensor of its own, which selective recompute keeps beside the summand; its gradient is the summand's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "none"))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def mark(model: nn.Module, tally: Tally) -> None:
    """Have every block tell the tally when its forward and its backward begin, and whether it is the first or last of its stack."""
    for i, stack in enumerate(m for m in model.modules() if isinstance(m, Stack)):
        for j, block in enumerate(stack.blocks):
            place = "first" if j == 0 else "last" if j == len(stack.blocks) - 1 else "between"

            def begin(module: nn.Module, args: Any, phase: str = f"forward {i} {place}") -> None:
                tally.enter(phase)

            def end(module: nn.Module, args: Any, out: Any, phase: str = f"backward {i} {place}") -> None:
                if (one := pair(out)[0]).requires_grad:
                    one.register_hook(lambda grad: tally.enter(phase))

            block.register_forward_pre_hook(begin)
            block.register_forward_hook(end)


@compiler_left_out()
def rehearse(model: nn.Module, batch: Arguments, how: Conditions, *, forwards: int = 1, recompute: Recompute = "none",
             keep: Mapping[int, int] | None = None, ranks: int = 1, dtype: torch.dtype | None = None,
             records: bool = False, sequence: bool = False) -> Rehearsal:
    """Rehearse a step of `forwards` micro-batches like `batch`.

    `model`: on any device, meta included; it is left as it is. `recompute`: what blocks compute again instead of keeping it.
    `keep`, `ranks`: see `twin`. `dtype`: if given, the weights come from other ranks in it, and a forward and backward are
    rehearsed without an update. `records`: forward and backward are a CUDA graph, which keeps what it cannot draw again.
    """
    tally = Tally({(labels := batch["labels"].numel()): max(1, round(how.share * labels))})
    other = twin(model, how.device, tally, keep=keep, ranks=ranks, dtype=dtype).train()
    recompute_blocks(other, recompute)
    mark(other, tally)
    if ranks > 1:
        sum_up(other, tally, sequence)
    if sequence:
        spread(other, tally, ranks)
    trained = [p for p in other.parameters() if p.requires_grad]
    for p in trained:
        p.register_post_accumulate_grad_hook(lambda p: tally.name(p.grad, "gradients"))
    other.head.register_forward_pre_hook(lambda *_: tally.enter("head", "loss"))
    optimizer: Any = None
    work, calls = Counter[Work](), 0
    scratch = math.inf
    with tally, rehearsal(tally.kernel, how.gpu, records):
        if dtype is None:
            tally.kind = "gradients"
            for p in trained:
                p.grad = torch.empty_like(p)
            tally.kind = "optimizer"
            optimizer, kept = how.build(other)
            optimizer.step()  # the first one makes the moments; the peak is that of another
            if forwards == 1:
                optimizer.zero_grad(set_to_none=True)  # else a micro-batch meets the gradients of those before
        tally.moments.clear()
        tally.work.clear()
        tally.calls = 0

        tally.enter("before", "activations")
        here = {key: value.to(how.device, copy=True) if fakes(key, value) else value for key, value in batch.items()}
        with how.compute():
            loss = other(**here, num_items_in_batch=1).loss
        tally.enter("backward", "temporary")
        loss.backward()
        tally.enter("end")  # what blocks needed is gone
        del loss
        work, tally.work, calls, tally.calls = tally.work, Counter(), tally.calls, 0
        if dtype is None:
            tally.enter("update")
            clip = optimizer.clip(1.0)
            optimizer.step(clip=clip)
            scratch = getattr(optimizer, "scratch", scratch)
            optimizer.zero_grad(set_to_none=True)
            del clip
            if kept is not None:
                kept.update()
        update, update_calls = tally.work.copy(), tally.calls
        if how.evaluates:
            other.eval()
            tally.enter("evaluation", "activations")
            with torch.no_grad(), how.compute():
                other(**here, num_items_in_batch=1)
        if dtype is None:
            del kept
    return Rehearsal(tally.moments, work, update, calls, update_calls, scratch)


@compiler_left_out()
def rehearse_update(model: nn.Module, how: Conditions, *, keep: Mapping[int, int], ranks: int = 1) -> Rehearsal:
    """Rehearse an update alone, with all gradients there."""
    tally = Tally()
    other = twin(model, how.device, tally, keep=keep, ranks=ranks)
    with tally, rehearsal(tally.kernel, how.gpu):
        tally.kind = "gradients"
        for p in other.parameters():
            if p.requires_grad:
                p.grad = torch.empty_like(p)
        tally.kind = "optimizer"
        optimizer: Any
        optimizer, kept = how.build(other)
        optimizer.step()
        tally.moments.clear()
        tally.work.clear()
        tally.calls = 0
        tally.enter("update", "temporary")
        optimizer.step(clip=optimizer.clip(1.0))
        scratch = getattr(optimizer, "scratch", math.inf)
        if kept is not None:
            kept.update()
    return Rehearsal(tally.moments, update=tally.work, update_calls=tally.calls, scratch=scratch)


def fakes(key: str, value: Any) -> bool:
    """Whether a value of a batch becomes a tensor without storage. The lengths of packed sequences are read, so they stay real."""
    return isinstance(value, Tensor) and (value.dim() > 1 or key == "labels")
