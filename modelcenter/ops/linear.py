"""x @ weight^T + bias, in the arithmetic that the device is fast at.

torch's product of bf16 or fp16 matrices is 5 to 50 times slower than fp32's on a CPU without matrix units for them (measured: 51
and 17 against 256 GFLOP/s on two cores with AVX-512 alone). There the product is computed in fp32 and rounded once: the result is
the same or better, because the weights of a mixed-precision run are then not rounded at all. One or a few tokens in generation are
an exception.

On a GPU the product is torch's, and the gradients of weight and bias are computed by products that write their sums in the
parameter's own dtype: in fp32 under autocast, neither rounded in between nor cast in an extra pass. torch sums the rows of a bias's
gradient at a third of the memory bandwidth, a product with ones at all of it (16384 x 1600, one H200: 41 and 18 microseconds).

If x is multiplied by several weights, its gradient is a sum of products. Each is added to the sum as it is computed, which reads
the sum once more; a separate addition would read two tensors and write a third. relu is applied before the product leaves the chip
(16384 x 1024 x 4096, one H200: 232 microseconds, and 285 with an extra pass).

fp32 weights are rounded anew in every forward, so that all changes to them are seen: those of a block by one call (`rounded`),
because a few small ones leave most of the chip idle (one H200, three of 1024 x 1024: 18 microseconds, a quarter of the memory's
rate; the copies of a step of T5-large 3.4 ms layer by layer, and 1.7).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._mode import TWICE, autocast_dtype, fake, on_gpu, one_by_one, plain, transformed
from .activation import relu
from .dropout import dropout, factor

LOW = (torch.bfloat16, torch.float16)
FEW = 4  # rows
BESIDE = 128 << 20  # bytes of gradients up to which a copy costs less than it wins
APART = 64  # elements: what cuBLAS multiplies fastest begins at a multiple of 128 bytes
PIECE = 8 << 20  # bytes of a product on a CPU that is added to fp32 at a time: that is in its cache, and memory freed is kept


@cache
def has_low_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` in hardware."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return dtype != torch.float16 or bool(torch.cpu._is_amx_fp16_supported())


def formed_in(x: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of products with x, if autocast's is `dtype`: fp32 on a CPU without units for low precision."""
    kind = dtype or x.dtype
    here = x.device.type == "cpu" and not on_gpu(x) and x.dtype != torch.float64
    return torch.float32 if here and kind in LOW and not has_low_units(kind) else kind


def low_dtype(x: Tensor) -> torch.dtype | None:
    """The low precision in which a product with `x` would be computed on a CPU without units for it; otherwise None."""
    if x.device.type != "cpu" or on_gpu(x):
        return None
    low = autocast_dtype(x.device) or x.dtype
    return low if low in LOW and x.dtype != torch.float64 and not has_low_units(low) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (.. in), weight (out in), bias (out): .. out, in the dtype that F.linear would return, autocast included."""
    return linears(x, (weight,), (bias,))[0]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`linear` of x with each weight and its bias. On a GPU it is one op, and the gradient of x is summed within the products."""
    empty = x.is_meta
    for weight in weights:
        if weight.is_meta is not empty:  # torch's product would be whatever was in memory
            raise ValueError(f"a product's tensors are on {x.device.type} and {weight.device.type}; all have values, or none has"
                             " (accelerate's offload takes weights away that no call brings back here)")
    if not intercepted(x, *weights):
        if (low := low_dtype(x)) is not None and not few(x, weights, low):
            # ignored: torch has no types for apply
            return tuple(Wide.apply(x, w, b, low) for w, b in zip(weights, biases, strict=True))  # type: ignore[no-untyped-call]
        if (low := trained_low(x, weights)) is not None:
            out: tuple[Tensor, ...] = Summed.apply(x, low, *weights, *biases)  # type: ignore[no-untyped-call]  # as above
            return out
    factors: list[Sequence[Tensor | None]] = [weights, biases]
    if x.dtype == torch.float32 and autocast_dtype(x.device) is None:
        factors = [list(map(widened, some)) for some in factors]
    return tuple(map(partial(F.linear, x), *factors))


def widened(factor: Tensor | None) -> Tensor | None:
    """A frozen factor that a run holds in its precision (adapter/attach.py), for a product with x in fp32 outside of the run."""
    return factor if factor is None or factor.requires_grad or factor.dtype not in LOW else factor.float()


def intercepted(*tensors: Tensor) -> bool:
    """Whether a product of these must be made of torch's own functions."""
    return not all(map(plain, tensors)) or torch.compiler.is_compiling() or transformed()


def few(x: Tensor, weights: Sequence[Tensor], low: torch.dtype) -> bool:
    """Whether so few rows are multiplied, without a gradient, that a product takes as long as reading its weight: in low precision
    that is half the bytes, and no copy of it is made. One row by 3072 x 768: 0.24 ms, and 1.3 in fp32; four 0.8, and 1.7; eight are
    no faster (one core of an EPYC, oneDNN kept from its bf16 units, 2026-11-21)."""
    return x.numel() <= FEW * x.size(-1) and not torch.is_grad_enabled() and all(t.dtype == low for t in (x, *weights))


def rectified(x: Tensor, weight: Tensor, seed: Tensor | None = None, p: float = 0.0) -> Tensor:
    """relu(x weight^T) for x (.. in) and weight (out in): .. out, with dropout if there is a seed. On a GPU, in training, relu is
    part of the product, and dropout's backward is part of the next products."""
    out: Tensor
    if intercepted(x, weight) or weight.is_meta or (low := trained_low(x, (weight,))) is None:
        out = relu(linear(x, weight))
        out = out if seed is None else dropout(out, None, seed, p)
    else:
        out = Rectified.apply(x, low, weight, seed, p)  # type: ignore[no-untyped-call]  # torch has no types there
    return out


def trained_low(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
    """The low precision of products on a GPU if a weight gets a gradient, or x one from several products; otherwise None."""
    if not (on_gpu(x) and torch.is_grad_enabled()):
        return None
    if not any(w.requires_grad for w in weights) and not (len(weights) > 1 and x.requires_grad):
        return None
    kinds = {x.dtype, *(w.dtype for w in weights)}
    low = autocast_dtype(x.device) or (x.dtype if len(kinds) == 1 else None)
    return low if low in LOW and torch.float64 not in kinds else None


class Wide(torch.autograd.Function):
    """The product in fp32; what is saved for the backward is in the low precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: torch.dtype) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x = x.to(low)
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        unrounded(ctx, x if ctx.needs_input_grad[1] else None)
        g = grad.reshape(-1, grad.size(-1)).float()
        dx = (g @ weight.float()).to(of_x).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = (g.t() @ x.reshape(-1, x.size(-1)).float()).to(of_weight) if ctx.needs_input_grad[1] else None
        dbias = g.sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


class Summed(torch.autograd.Function):
    """Products of x in low precision, as torch computes them; each gradient has the dtype of its tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype, *factors: Tensor | None) -> tuple[Tensor, ...]:
        """`factors`: the weights, then as many biases."""
        ctx.shape, ctx.kinds = x.shape, (x.dtype, None, *(None if f is None else f.dtype for f in factors))
        x, factors, n = x.to(low), narrowed(factors, low), len(factors) // 2
        of_x, _, *of_factors = ctx.needs_input_grad
        ctx.save_for_backward(x if any(of_factors[:n]) else None, *(f if of_x else None for f in factors[:n]))
        ctx.set_materialize_grads(False)  # a product of no use adds nothing
        with torch.autocast(x.device.type, enabled=False):
            return tuple(map(partial(formed, x), factors[:n], factors[n:]))

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        unrounded(ctx, x, None, *weights)
        found: list[Tensor | None] = [None] * len(ctx.kinds)
        gs = {i: g.reshape(-1, g.size(-1)) for i, g in enumerate(grads) if g is not None}
        if not gs:
            return tuple(found)
        whole, stack = joined(list(gs.values()), 1), joined([weights[i] for i in gs], 0) if ctx.needs_input_grad[0] else None
        if whole is None and stack is not None:
            whole = laid(list(gs.values()))
        if ctx.needs_input_grad[0]:
            pairs = [(g, weights[i]) for i, g in gs.items()] if whole is None or stack is None else [(whole, stack)]
            found[0] = summed(pairs, ctx.kinds[0]).view(ctx.shape)
        one, ones = next(iter(gs.values())), None
        if any(ctx.needs_input_grad[2 + len(grads) :]):
            ones = one.new_ones(1, len(one))

        def of_weights(g: Tensor, kind: torch.dtype) -> Tensor:
            return summed([(g.t(), x.reshape(-1, x.size(-1)))], kind)

        def of_biases(g: Tensor, kind: torch.dtype) -> Tensor:
            assert ones is not None
            return summed([(ones, g)], torch.promote_types(g.dtype, torch.float32))[0].to(kind)

        for first, formed_of in ((2, of_weights), (2 + len(grads), of_biases)):
            wanted = {first + i: g for i, g in gs.items() if ctx.needs_input_grad[first + i]}
            kinds = {ctx.kinds[at] for at in wanted}
            if whole is not None and len(wanted) == len(gs) and len(kinds) == 1:
                parts = formed_of(whole, *kinds).split([g.size(1) for g in gs.values()])
                for at, part in zip(wanted, parts, strict=True):
                    found[at] = part
            else:
                for at, g in wanted.items():
                    found[at] = formed_of(g, ctx.kinds[at])
        return tuple(found)


class Rectified(torch.autograd.Function):
    """relu of a product in low precision, followed by dropout. The result, which the next layer saves anyway, is above zero where
    the product was and dropout kept it: this gives the derivative, except for dropout's factor, which is left to the products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype, weight: Tensor, seed: Tensor | None, p: float) -> Tensor:
        ctx.kinds = x.dtype, None, weight.dtype
        ctx.factor = 1.0 if seed is None else factor(p)
        of_x, _, of_weight, *_ = ctx.needs_input_grad
        x, (weight,) = x.to(low), lowered((weight,), low)
        with torch.autocast(x.device.type, enabled=False):
            out = formed(x, weight, None, True)
            out = out if seed is None else dropout(out, None, seed, p)
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, out)
        return out

    @staticmethod
    @one_by_one
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        of_x, _, of_weight = ctx.kinds
        unrounded(ctx, x, None, weight)
        g = torch.ops.aten.threshold_backward(grad, out, 0).reshape(-1, out.size(-1))
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = summed([(g, weight)], of_x, ctx.factor).view(*grad.shape[:-1], weight.size(1))
        if ctx.needs_input_grad[2]:
            dweight = summed([(g.t(), x.reshape(-1, x.size(-1)))], of_weight, ctx.factor)
        return dx, None, dweight, None, None


def unrounded(ctx: Any, *kept: Tensor | None) -> None:
    """In a backward that will itself be differentiated: require that `kept`, the saved factors, one per argument, are those
    arguments, or need no gradient. A rounded copy has lost its connection to the original: autograd would take it for a constant,
    and the second derivative would be a wrong number."""
    if torch.is_grad_enabled():
        for factor, kind, wanted in zip(kept, ctx.kinds, ctx.needs_input_grad, strict=False):
            if wanted and factor is not None and factor.dtype != kind:
                raise RuntimeError(f"create_graph=True, and a product in {factor.dtype} has kept a rounded copy; {TWICE}")


def formed(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """x weight^T + bias, in their dtype, with relu if asked for."""
    if not relu:
        return F.linear(x, weight, bias)
    bias = weight.new_zeros(len(weight)) if bias is None else bias  # what has torch do both at once
    return torch._addmm_activation(bias, x.reshape(-1, x.size(-1)), weight.t()).view(*x.shape[:-1], len(weight))


class Rounded(threading.local):
    """Copies in low precision of the weights and biases of the current block, each with the version of its original."""

    def __init__(self) -> None:
        self.copies: dict[Tensor, tuple[int, Tensor]] = {}

    def of(self, factor: Tensor, low: torch.dtype) -> Tensor | None:
        """`factor` itself if it is in that precision, or an up-to-date copy; otherwise None."""
        if factor.dtype == low:
            return factor
        version, copy = self.copies.get(factor, (-1, factor))
        return copy if copy.dtype == low and version == factor._version else None


HERE = Rounded()


@contextmanager
def rounded(factors: Sequence[Tensor], low: torch.dtype) -> Iterator[None]:
    """A context in which products in the low precision find these weights and biases rounded: one call rounds them at its start."""
    before = HERE.copies
    HERE.copies = {f: (f._version, copy) for f, copy in zip(factors, lowered(factors, low), strict=True)}
    try:
        yield
    finally:
        HERE.copies = before


@torch.no_grad()
def lowered(factors: Sequence[Tensor], low: torch.dtype) -> list[Tensor]:
    """Each tensor in the low precision; one call rounds those that are not yet."""
    found = [HERE.of(f, low) for f in factors]
    wide = [f for f, known in zip(factors, found, strict=True) if known is None]
    made = side_by_side(wide, low) if len(wide) > 1 else [f.to(low) for f in wide]
    if len(wide) > 1:
        torch._foreach_copy_(made, wide)
    rest = iter(made)
    return [next(rest) if known is None else known for known in found]


def side_by_side(factors: Sequence[Tensor], low: torch.dtype) -> list[Tensor]:
    """Memory for each tensor in the low precision, on one device: matrices first, so that those of the same input form one matrix
    (`joined`)."""
    order = sorted(range(len(factors)), key=lambda i: -factors[i].dim())
    sizes = [-(-factors[i].numel() // APART) * APART for i in order]
    pieces = factors[0].new_empty(sum(sizes), dtype=low).split(sizes)
    found = {i: piece[: factors[i].numel()].view(factors[i].shape) for i, piece in zip(order, pieces, strict=True)}
    return [found[i] for i in range(len(factors))]


def joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The matrix whose rows (`dim` 0) or columns (1) are those of `parts`, if they lie so in memory; None if they do not, or if a
    graph of it is needed."""
    first = parts[0]
    if len(parts) < 2 or torch.is_grad_enabled() or any(fake(p) or p.is_meta for p in parts):
        return None
    size, memory, at = list(first.shape), first.untyped_storage().data_ptr(), first.data_ptr()
    size[dim] = sum(p.size(dim) for p in parts)
    for p in parts:
        if p.stride() != first.stride() or p.data_ptr() != at or p.untyped_storage().data_ptr() != memory:
            return None
        at += p.size(dim) * p.stride(dim) * p.element_size()
    return None if dim and size[1] > first.stride(0) else first.as_strided(size, first.stride())


def laid(parts: Sequence[Tensor]) -> Tensor | None:
    """A copy of `parts` as the columns of one matrix, if that costs less than a product with each; otherwise None. cuDNN's
    attention, which drops, leaves the gradients of q, k and v apart (4096 x 768, one H200: 86 microseconds, 65 so)."""
    small = len(parts) > 2 and sum(p.numel() * p.element_size() for p in parts) <= BESIDE
    return torch.cat(list(parts), 1) if small and len({p.dtype for p in parts}) == 1 else None


def narrowed(factors: Sequence[Tensor | None], low: torch.dtype) -> tuple[Tensor | None, ...]:
    """`lowered`, for factors some of which may be missing."""
    found = iter(lowered([f for f in factors if f is not None], low))
    return tuple(None if f is None else next(found) for f in factors)


def summed(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, alpha: float = 1.0) -> Tensor:
    """The sum of a @ b * alpha (n m) over the pairs, computed in their dtype or in fp32."""
    if torch.is_grad_enabled():  # a graph of it is wanted, which a product into a given tensor does not have
        return reduce(torch.add, ((a @ b).to(dtype) for a, b in pairs)) * alpha
    (a, b), *_ = pairs
    out = a.new_empty(len(a), b.size(1), dtype=dtype if dtype == torch.float32 else a.dtype)
    for i, (a, b) in enumerate(pairs):
        multiply(out, a, b, float(i > 0), alpha)
    return out.to(dtype)


def multiply(out: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> None:
    """out = out * beta + a @ b * alpha. Autocast does not affect products into a given tensor."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif on_gpu(out):
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        rows = max(1, PIECE // max(1, out.size(1) * a.element_size()))
        for some, factor in zip(out.split(rows), a.split(rows), strict=True):
            part = torch.addmm(some.new_empty(some.shape, dtype=a.dtype), factor, b, beta=0.0, alpha=alpha)
            some.copy_(part) if beta == 0 else some.add_(part)
