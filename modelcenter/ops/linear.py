"""x @ weight^T + bias, in the arithmetic that the device is good at.

torch's product of bf16 or fp16 matrices is 5 to 50 times slower than fp32's on a CPU without matrix units for them (measured:
51 and 17 against 256 GFLOP/s on two cores with AVX-512 alone). There the product is formed in fp32 and rounded once: the same or
a better result, because the weights of a mixed-precision run are then not rounded at all.

On a GPU the product is torch's, and the gradients of weight and bias are formed by products whose sums leave them in the
parameter's own dtype: in fp32 under autocast, neither rounded on the way nor cast in a pass of their own. torch adds up the rows of
a bias' gradient at a third of the memory's rate, a product with ones at all of it (16384 x 1600, one H200: 41 and 18 microseconds).
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._op import on_gpu, plain, transformed

LOW = (torch.bfloat16, torch.float16)


@cache
def has_low_units(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` in hardware."""
    if dtype == torch.bfloat16:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return dtype != torch.float16 or bool(torch.cpu._is_amx_fp16_supported())


def low_dtype(x: Tensor) -> torch.dtype | None:
    """The low precision that a product with `x` would be formed in on a CPU without units for it; None anywhere else."""
    if x.device.type != "cpu" or on_gpu(x):
        return None
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return low if low in LOW and x.dtype != torch.float64 and not has_low_units(low) else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (.. in), weight (out in), bias (out): .. out, in the dtype F.linear would give, autocast included."""
    if not (plain(x) and plain(weight)) or torch.compiler.is_compiling() or transformed():
        return F.linear(x, weight, bias)
    out: Tensor
    if (low := low_dtype(x)) is not None:
        out = Wide.apply(x, weight, bias, low)  # type: ignore[no-untyped-call]  # torch has no types there
    elif (low := trained_low(x, weight)) is not None:
        out = Summed.apply(x, weight, bias, low)  # type: ignore[no-untyped-call]  # nor there
    else:
        out = F.linear(x, weight, bias)
    return out


def trained_low(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The low precision of a product on a GPU whose weight will have a gradient; None for any other."""
    if not (x.is_cuda and torch.is_grad_enabled() and weight.requires_grad):
        return None
    low = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype if x.dtype == weight.dtype else None
    return low if low in LOW and torch.float64 not in (x.dtype, weight.dtype) else None


class Wide(torch.autograd.Function):
    """The product in fp32; what is kept for the backward is in the low precision."""

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
        g = grad.reshape(-1, grad.size(-1)).float()
        dx = (g @ weight.float()).to(of_x).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = (g.t() @ x.reshape(-1, x.size(-1)).float()).to(of_weight) if ctx.needs_input_grad[1] else None
        dbias = g.sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


class Summed(torch.autograd.Function):
    """The product in low precision, as torch has it, with gradients of weight and bias in the parameters' own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: torch.dtype) -> Tensor:
        ctx.kinds = x.dtype, weight.dtype, None if bias is None else bias.dtype
        x, weight = x.to(low), weight.to(low)
        ctx.save_for_backward(x, weight)
        with torch.autocast("cuda", enabled=False):
            return F.linear(x, weight, None if bias is None else bias.to(low))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.kinds
        g = grad.reshape(-1, grad.size(-1))
        dx = (g @ weight).to(of_x).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = product(g.t(), x.reshape(-1, x.size(-1)), of_weight) if ctx.needs_input_grad[1] else None
        dbias = product(g.new_ones(1, len(g)), g, torch.float32)[0].to(of_bias) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b (n m) as `dtype`, theirs or fp32."""
    return a @ b if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype)
