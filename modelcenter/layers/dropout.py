"""Dropout, alone and with the addition that follows it."""

from torch import Tensor, nn

from .. import ops


class Dropout(nn.Dropout):
    """In training, zero each element with probability p and scale the rest by 1 / (1 - p). Srivastava et al., 2014."""

    def __init__(self, p: float):
        super().__init__(p)

    @property
    def drops(self) -> bool:
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        seed = self.seed(x)
        return x if seed is None else ops.dropout(x, None, seed, self.p)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + dropout(x), in the residual's dtype."""
        seed = self.seed(x)
        return (residual + x).to(residual.dtype) if seed is None else ops.dropout(x, residual, seed, self.p)

    def seed(self, x: Tensor) -> Tensor | None:
        """A new seed for dropout on `x`; None where nothing is dropped."""
        return ops.draw(x.device) if self.drops else None
