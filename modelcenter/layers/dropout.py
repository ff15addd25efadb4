"""Dropout, alone and with the addition that follows it.

The op that adds, or attends, also applies the dropout. A dropout that has a hook, or that was replaced by another module, is called
separately instead.
"""

from torch import Tensor, nn

from .. import ops
from .linear import watched


class Dropout(nn.Dropout):
    """In training, zero each element with probability p and scale the rest by 1 / (1 - p). Srivastava et al., 2014."""

    def __init__(self, p: float):
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, None, ops.draw(x.device), self.p) if self.training and self.p > 0 else x


KNOWN = Dropout, nn.Dropout, nn.Identity


def rate(dropout: nn.Module) -> float | None:
    """The probability with which the module zeroes an element; None if it does anything else and so must be called."""
    if type(dropout) not in KNOWN or watched(dropout):
        return None
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


def dropping(dropout: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, float]:
    """The arguments for an op that adds dropout(x): x, or the module's output if it must be called; a new seed, or None if the op
    is to drop nothing; the probability."""
    p = rate(dropout)
    if p is None:
        return dropout(x), None, 0.0
    return x, ops.draw(x.device) if p > 0 else None, p


def added(dropout: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """residual + dropout(x), in the residual's dtype."""
    x, seed, p = dropping(dropout, x)
    return (residual + x).to(residual.dtype) if seed is None else ops.dropout(x, residual, seed, p)
