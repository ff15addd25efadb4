"""Normalisation over the last axis, alone and after the addition to the residual stream.

`dtype` is that of the norm, where it should not be that of what is normed. A norm that somebody watches, by a hook, or has given
another `forward`, or put another module in the place of, is called as it is, by itself.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import _norm
from ..ops._mode import autocast_dtype
from .dropout import Dropout
from .linear import watched


class LayerNorm(nn.Module):
    """Centre, scale by the standard deviation, then weight and bias. Ba et al., 2016."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = ops.layer_norm(x, self.weight, self.bias, self.eps, dtype)
        return out


class RMSNorm(nn.Module):
    """Scale by the root mean square, then weight; no centring, no bias. Zhang & Sennrich, 2019."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = ops.rms_norm(x, self.weight, self.eps, dtype)
        return out


def parts(norm: nn.Module) -> tuple[Any, Any, Tensor, Tensor | None, float] | None:
    """The op of a norm, that of an addition with it behind, weight, bias, eps; None where a call of it is more than that."""
    if isinstance(norm, LayerNorm) and type(norm).forward is LayerNorm.forward and not watched(norm):
        return ops.layer_norm, ops.add_layer_norm, norm.weight, norm.bias, norm.eps
    if isinstance(norm, RMSNorm) and type(norm).forward is RMSNorm.forward and not watched(norm):
        return ops.rms_norm, ops.add_rms_norm, norm.weight, None, norm.eps
    return None


def normed(norm: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """norm(x) in that dtype, which another module than ours need not know of."""
    out: Tensor = norm(x, dtype) if isinstance(norm, LayerNorm | RMSNorm) else norm(x)
    return out if dtype is None else out.to(dtype)


def beside(norm: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The norm of x, and x itself for the addition that follows."""
    if (own := parts(norm)) is None:
        return normed(norm, x, dtype), x
    op, _, weight, bias, eps = own
    return _norm.beside(op, x, weight, bias, eps, dtype)


def add(norm: nn.Module, x: Tensor, residual: Tensor, dropout: Dropout, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The norm of residual + dropout(x), and that sum."""
    if (own := parts(norm)) is None:
        total = dropout.add(x, residual)
        return normed(norm, total, dtype), total
    _, op, weight, bias, eps = own
    out, total = op(x, residual, weight, *(() if bias is None else (bias,)), eps, dropout.seed(x), dropout.p, dtype)
    return out, total


def twice(norm: nn.Module, x: Tensor, residual: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """The norm of residual + dropout(x), twice: for a layer, and for the addition that follows."""
    if (own := parts(norm)) is None:
        return (normed(norm, dropout.add(x, residual)),) * 2
    _, op, weight, bias, eps = own
    return _norm.twice(op, x, residual, weight, bias, eps, dropout.seed(x), dropout.p)


def factors(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast multiplies matrices. A norm that only matrix products read is written in it, once, instead of
    being cast by each of them."""
    return None if x.dtype == torch.float64 else autocast_dtype(x.device)


def stream(x: Tensor) -> torch.dtype | None:
    """The dtype of the residual stream under autocast. With bf16 it is bf16, which has the range of fp32, so that norms and
    additions move half the bytes. With fp16 it stays wide, because the sum over many layers can exceed fp16."""
    low = factors(x)
    return low if low == torch.bfloat16 else None
