"""Position-wise feed-forward layers."""

from torch import Tensor, nn

from ..ops import Op
from ..ops.gated_linear import gated_linear
from .dropout import Dropout, rate
from .linear import Linear, activated, alone, together


class FFN(nn.Module):
    """down(act(up(x))), with dropout on the hidden layer where the paper has it (T5)."""

    tp = {"up": "column", "down": "row"}

    def __init__(self, dim: int, hidden: int, act: Op, *, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        self.act = act
        self.up = Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(activated(self.act, self.up, x)))
        return out


class GatedFFN(nn.Module):
    """down(act(gate(x)) * up(x)), where `act` is an op that takes both. Shazeer, 2020."""

    tp = {"gate": "column", "up": "column", "down": "row"}

    def __init__(self, dim: int, hidden: int, act: Op, *, bias: bool = False, dropout: float = 0.0):
        super().__init__()
        self.act = act
        self.gate = Linear(dim, hidden, bias=bias)
        self.up = Linear(dim, hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = together(x, self.gate, self.up)
        if all(map(alone, (self.gate, self.up, self.down))) and rate(self.dropout) == 0:
            return gated_linear(self.act, gate, up, self.down.weight, self.down.bias)
        out: Tensor = self.down(self.dropout(self.act(gate, up)))
        return out
