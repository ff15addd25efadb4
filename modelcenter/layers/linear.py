"""A matrix product with an optional bias."""

from torch import Tensor, nn

from ..ops.linear import linear


class Linear(nn.Linear):
    """nn.Linear, formed by `ops.linear`. `bias=False` in a call leaves the bias to whoever takes it along for less."""

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        return linear(x, self.weight, self.bias if bias else None)
