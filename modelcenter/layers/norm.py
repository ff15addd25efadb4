"""Normalisation over the last axis, alone and after the addition to the residual stream.

`dtype` is the dtype of the norm, if it should differ from that of its input. A norm that has a hook or another `forward`, or that
was replaced by another module, is called separately.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import Op, _norm
from ..ops._mode import autocast_dtype
from .dropout import added, dropping
from .linear import watched


class Norm(nn.Module, ABC):
    """A norm over the last axis, as two ops: `op` alone, and `add` after an addition."""

    op: ClassVar[Op]
    add: ClassVar[Op]

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    @property
    @abstractmethod
    def arguments(self) -> tuple[Any, ...]:
        """What both ops take behind what is normed."""

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = self.op(x, *self.arguments, dtype)
        return out


class LayerNorm(Norm):
    """Centre, scale by the standard deviation, then weight and bias. Ba et al., 2016."""

    op, add = ops.layer_norm, ops.add_layer_norm

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.zeros(dim))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.eps


class RMSNorm(Norm):
    """Scale by the root mean square, then weight; no centring, no bias. Zhang & Sennrich, 2019."""

    op, add = ops.rms_norm, ops.add_rms_norm

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.weight, self.eps


def own(norm: nn.Module) -> TypeGuard[Norm]:
    """Whether a call of the norm is its class's op and nothing else, so that another op of the class may replace it."""
    return isinstance(norm, Norm) and type(norm).forward is Norm.forward and not watched(norm)


def normed(norm: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """norm(x) in that dtype, of which modules that are not ours need not know."""
    out: Tensor = norm(x, dtype) if isinstance(norm, Norm) else norm(x)
    return out if dtype is None else out.to(dtype)


def beside(norm: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The norm of x, and x itself for the addition that follows."""
    return _norm.beside(norm.op, x, *norm.arguments, dtype) if own(norm) else (normed(norm, x, dtype), x)


def add(
    norm: nn.Module, x: Tensor, residual: Tensor, dropout: nn.Module, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of residual + dropout(x), and that sum."""
    if own(norm):
        x, *drop = dropping(dropout, x)
        out, total = norm.add(x, residual, *norm.arguments, *drop, dtype)
        return out, total
    total = added(dropout, x, residual)
    return normed(norm, total, dtype), total


def twice(norm: nn.Module, x: Tensor, residual: Tensor, dropout: nn.Module) -> tuple[Tensor, Tensor]:
    """The norm of residual + dropout(x), twice: for a layer, and for the addition that follows."""
    if own(norm):
        x, *drop = dropping(dropout, x)
        return _norm.twice(norm.add, x, residual, *norm.arguments, *drop)
    return (normed(norm, added(dropout, x, residual)),) * 2


def factors(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast multiplies matrices. A norm that only matrix products read is written in it, once, instead of
    being cast by each of them."""
    return None if x.dtype == torch.float64 else autocast_dtype(x.device)


def stream(x: Tensor) -> torch.dtype | None:
    """The dtype of the residual stream under autocast. With bf16 it is bf16, which has the range of fp32, so that norms and
    additions move half the bytes. With fp16 it stays wide, because the sum over many layers can exceed fp16."""
    low = factors(x)
    return low if low == torch.bfloat16 else None
