"""Normalisation over the last axis, alone and after the addition to the residual stream.

`dtype` is that of the norm, where it should not be that of what is normed. A norm that somebody watches, by a hook, or has given
another `forward`, is called as it is, by itself.
"""

import torch
from torch import Tensor, nn

from .. import ops
from ..ops._mode import autocast_dtype
from ..ops._norm import beside, twice
from .dropout import Dropout
from .linear import watched


def itself(norm: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of the norm is its own `forward` and no more."""
    return type(norm).forward is kind.forward and not watched(norm)


class LayerNorm(nn.Module):
    """Centre, scale by the standard deviation, then weight and bias. Ba et al., 2016."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = ops.layer_norm(x, self.weight, self.bias, self.eps, dtype)
        return out

    def beside(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The norm of x, and x itself for the addition that follows."""
        if not itself(self, LayerNorm):
            return self(x, dtype), x
        return beside(ops.layer_norm, x, self.weight, self.bias, self.eps, dtype)

    def add(self, x: Tensor, residual: Tensor, dropout: Dropout, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The norm of residual + dropout(x), and that sum."""
        if not itself(self, LayerNorm):
            total = dropout.add(x, residual)
            return self(total, dtype), total
        out, total = ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps, dropout.seed(x), dropout.p, dtype)
        return out, total

    def twice(self, x: Tensor, residual: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
        """The norm of residual + dropout(x), twice: for a layer, and for the addition that follows."""
        if not itself(self, LayerNorm):
            return (self(dropout.add(x, residual)),) * 2
        return twice(ops.add_layer_norm, x, residual, self.weight, self.bias, self.eps, dropout.seed(x), dropout.p)


class RMSNorm(nn.Module):
    """Scale by the root mean square, then weight; no centring, no bias. Zhang & Sennrich, 2019."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        out: Tensor = ops.rms_norm(x, self.weight, self.eps, dtype)
        return out

    def beside(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The norm of x, and x itself for the addition that follows."""
        if not itself(self, RMSNorm):
            return self(x, dtype), x
        return beside(ops.rms_norm, x, self.weight, None, self.eps, dtype)

    def add(self, x: Tensor, residual: Tensor, dropout: Dropout, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The norm of residual + dropout(x), and that sum."""
        if not itself(self, RMSNorm):
            total = dropout.add(x, residual)
            return self(total, dtype), total
        out, total = ops.add_rms_norm(x, residual, self.weight, self.eps, dropout.seed(x), dropout.p, dtype)
        return out, total

    def twice(self, x: Tensor, residual: Tensor, dropout: Dropout) -> tuple[Tensor, Tensor]:
        """The norm of residual + dropout(x), twice: for a layer, and for the addition that follows."""
        if not itself(self, RMSNorm):
            return (self(dropout.add(x, residual)),) * 2
        return twice(ops.add_rms_norm, x, residual, self.weight, None, self.eps, dropout.seed(x), dropout.p)


def factors(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast multiplies matrices. A norm that only matrix products read is written in it, once, instead of
    being cast by each of them."""
    return None if x.dtype == torch.float64 else autocast_dtype(x.device)


def stream(x: Tensor) -> torch.dtype | None:
    """The dtype of the residual stream under autocast. With bf16 it is bf16, which has the range of fp32, so that norms and
    additions move half the bytes. With fp16 it stays wide, because the sum over many layers can exceed fp16."""
    low = factors(x)
    return low if low == torch.bfloat16 else None
