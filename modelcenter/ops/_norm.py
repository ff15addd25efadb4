"""What the norms share: the calls of csrc/norm.cpp and norm.cu, and inputs to try.

Each norm may first add a residual: total = residual + dropout(x), in the residual's dtype, and out is the norm of that. Both are
results: the total is the stream that the next layer adds to. A seed of None adds x as it is. The references normalise the total as
it is stored; kernels normalise it before it is rounded, which is closer to the formula. In both, gradients are those of the stored
total.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._kernels import call, expect, finite
from ._mode import once, plain, unseen
from ._op import Op, raw
from .dropout import draw, dropout

UNALIGNED = 4586  # columns of a row that is not aligned, at most, of which four fit into an H200's shared memory with all they need
ROWS, CHUNKS = 32, 256  # on the CPU: rows of a partial sum for weight and bias, and how many sums at most
Forward = tuple[Tensor, Tensor, Tensor]


def add(x: Tensor, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """The total, as the references compute it."""
    expect("norm", "x", x)
    expect("norm", "residual", residual, x.shape)
    return (residual + x).to(residual.dtype) if seed is None else dropout.reference(x, residual, seed, p, "norm")


def check(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """A ValueError, in the kernel's words, if torch's functions would have to broadcast, or to norm several axes."""
    expect("norm", "x", x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            expect("norm", name, parameter, x.shape[-1:], (parameter.dtype,))
    finite("norm", "eps", eps)


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, seed: Tensor | None, p: float,
            dtype: torch.dtype | None) -> Forward:  # fmt: skip
    """The norm (centred where there is a bias) in `dtype` or that of what is normed; the total, empty without a residual; and the
    rows' statistics (3 rows of them, or 1: csrc/norm.h)."""
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    total = None if residual is None else torch.empty_like(residual)
    normed = x if total is None else total
    out = torch.empty_like(normed, dtype=dtype or normed.dtype)
    stats = x.new_empty((1 if bias is None else 3, math.prod(x.shape[:-1])), dtype=torch.float32)
    weight, bias = narrow(weight), None if bias is None else narrow(bias)
    call("norm", x, residual, weight, bias, eps, bias is not None, seed, p, out, total, stats)
    return out, x.new_empty(0) if total is None else total, stats


def takes(x: Tensor, total: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> bool:
    """Whether there is a kernel for these dtypes; not every combination has one (csrc/norm.h: known). On CUDA, rows that are not
    aligned use it if everything is in half precision and no row is too long; otherwise it is slower than torch
    (benchmarks/README.md)."""
    if not total.dim():
        return False
    out, dim = dtype or total.dtype, total.size(-1)
    if total.dtype != torch.float32:
        fits = x.dtype == total.dtype == out
    else:
        fits = torch.float32 in (x.dtype, out) or x.dtype == out
    fits = fits and weight.is_floating_point() and (bias is None or bias.dtype == weight.dtype)  # a gradient has one dtype for both
    if not fits or not x.is_cuda:
        return fits
    return dim % 8 == 0 or (torch.float32 not in (x.dtype, total.dtype, out) and dim <= UNALIGNED)


def narrow(parameter: Tensor) -> Tensor:
    """The weights as the kernel reads them: in fp32 on the CPU."""
    return parameter.contiguous() if parameter.is_cuda else parameter.float().contiguous()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if torch.cuda.is_available() else 1


def lines(total: Tensor, rows: int) -> int:
    """How many partial sums the backward has room for: it depends only on the sizes and the chip, so that results repeat."""
    if not total.is_cuda or not total.numel():
        return min(max(rows // ROWS, 1), CHUNKS)
    beside = max(640 // max(-(-total.size(-1) // 64) * 8, 32), 1)  # groups on a multiprocessor, at most: csrc/norm_ring.h
    return max(min(multiprocessors(total.device) * beside, rows), 1)


@raw(
    "(Tensor grad, Tensor? also, Tensor total, Tensor? more, Tensor weight, Tensor stats, bool centred, Tensor? seed, float p,"
    " ScalarType? branch) -> (Tensor, Tensor, Tensor, Tensor)"
)
def norm_backward(
    grad: Tensor, also: Tensor | None, total: Tensor, more: Tensor | None, weight: Tensor, stats: Tensor, centred: bool,
    seed: Tensor | None, p: float, branch: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the total, of the branch in that dtype, of weight and bias; empty if there is none. `grad` and `also`: the
    gradients from two readers of the norm. `more`: the gradient of the total from elsewhere."""
    total = total.contiguous()
    stream = torch.empty_like(total)
    apart = None if branch is None else torch.empty_like(total, dtype=branch)
    scale = narrow(weight)
    dweight, dbias = torch.empty_like(scale), torch.empty_like(scale) if centred else None
    partial = scale.new_empty((lines(total, stats.size(1)), 2 if centred else 1, weight.size(0)), dtype=torch.float32)
    also, more = (None if g is None else g.contiguous() for g in (also, more))
    call("norm_backward", grad.contiguous(), also, total, more, scale, stats, seed, p, stream, apart, dweight, dbias, partial)
    none = total.new_empty(0)
    dweight = dweight.to(weight.dtype)
    return stream, none if apart is None else apart, dweight, none.clone() if dbias is None else dbias.to(weight.dtype)


def backward(
    grad: Tensor | None, more: Tensor | None, total: Tensor, weight: Tensor, stats: Tensor, centred: bool, seed: Tensor | None,
    p: float, branch: torch.dtype, also: Tensor | None = None,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Gradients of the branch (in its dtype), the total, weight and bias, from those of the norm and of the total."""
    grad = torch.zeros_like(total) if grad is None else grad
    same = seed is None and branch == total.dtype
    found = norm_backward(grad, also, total, more, weight, stats, centred, seed, p, None if same else branch)
    stream, apart, dweight, dbias = found
    return stream if same else apart, stream, dweight, dbias if centred else None


def beside(norm: Op, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The norm of x, and x for what adds to the stream. To autograd, the latter is a separate tensor, so that the kernel adds its
    gradient to that of the norm, without another pass over both. `rest`: the op's arguments after x."""
    if not straight(norm, x, *rest) or not x.requires_grad:
        return norm(x, *rest), x
    out: tuple[Tensor, Tensor] = Beside.apply(norm, x, *rest)  # type: ignore[no-untyped-call]  # torch has no types there
    return out


def twice(norm: Op, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The norm of residual + dropout(x), for two readers. To autograd these are two tensors, whose gradients the kernel adds in
    fp32 as it reads them, without another pass over both. `norm`: a norm that adds; `rest`: its arguments after the residual,
    without a dtype."""
    alike = not x.is_cuda or (x.dtype == residual.dtype and x.size(-1) % 8 == 0)  # csrc/norm_backward.cu: TWO
    if not alike or not straight(norm, x, residual, *rest):
        out = norm(x, residual, *rest)[0]
        return out, out
    both: tuple[Tensor, Tensor] = Twice.apply(norm, x, residual, *rest)  # type: ignore[no-untyped-call]  # as above
    return both


def straight(norm: Op, *args: Any) -> bool:
    """Whether a norm will be differentiated by a kernel and nothing intercepts calls: then it may use another Function than the
    op's."""
    kernel: Any = norm.kernel
    fits = all(plain(a) for a in args if isinstance(a, Tensor)) and unseen() and norm.fast(args[0]) and kernel.takes(*args)
    return fits and torch.is_grad_enabled()


class Beside(torch.autograd.Function):
    """A norm and its argument, which stays in the same memory."""

    @staticmethod
    def forward(ctx: Any, norm: Any, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, stats = norm.kernel.forward.direct(x, weight, *rest)
        ctx.save_for_backward(x, weight, stats)
        ctx.centred = isinstance(rest[0], Tensor)  # the bias; eps where there is none
        ctx.set_materialize_grads(False)
        return out, x.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        _, dx, *affine = backward(grad, more, x, weight, stats, ctx.centred, None, 0.0, x.dtype)
        return None, dx, *affine[: 1 + ctx.centred], None, None


class Twice(torch.autograd.Function):
    """A norm after an addition, as two tensors that share memory."""

    @staticmethod
    def forward(ctx: Any, norm: Any, x: Tensor, residual: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out, total, stats = norm.kernel.forward.direct(x, residual, weight, *rest)
        *_, seed, p = rest
        ctx.save_for_backward(total, weight, stats, seed)
        ctx.rest = isinstance(rest[0], Tensor), p, x.dtype
        ctx.set_materialize_grads(False)
        return out, out.detach()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, also: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, stats, seed = ctx.saved_tensors
        centred, p, branch = ctx.rest
        if grad is None:
            grad, also = also, None
        dx, dresidual, *affine = backward(grad, None, total, weight, stats, centred, seed, p, branch, also)
        return None, dx, dresidual, *affine[: 1 + centred], None, None, None


def cases(biased: bool, eps: float, device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """x, weight, perhaps bias, and the eps, which is each norm's own."""
    for shape in ((1, 1), (3, 7), (2, 5, 64), (0, 8), (97, 130), (4, 4096)):
        weights = (torch.rand(shape[-1], device=device, dtype=dtype) + 0.5 for _ in range(2 if biased else 1))
        yield torch.randn(shape, device=device, dtype=dtype) + 0.5, *weights, eps


def add_cases(biased: bool, eps: float, device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for x, *rest in cases(biased, eps, device, dtype):
        yield x, torch.randn_like(x), *rest, None, 0.0
        yield x, torch.randn_like(x), *rest, draw(x.device), 0.1
    yield x, torch.randn_like(x), *rest, draw(x.device), 1.0
