"""Position-wise feed-forward layers."""

from torch import Tensor, nn

from ..ops import Op, draw, relu
from ..ops.gated_linear import gated_linear
from ..ops.linear import rectified
from .adapter import Adapted
from .dropout import Dropout, rate
from .linear import Linear, alone, together, unshared


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
        """The activation adds the bias if it has a kernel for that; relu of a product without a bias is part of the product, and
        dropout of it of those that follow. Both only if the layer is plain: no hook of tensor parallelism, no sharded or quantised
        parameter, no adapter."""
        up, p = self.up, rate(self.dropout)
        if alone(up) and up.bias is None and self.act is relu and p is not None:
            hidden = rectified(x, up.weight, draw(x.device) if p > 0 else None, p)
        elif alone(up) and up.bias is not None and self.act.fast(x):
            hidden = self.dropout(self.act(up(x, bias=False), up.bias))
        else:
            hidden = self.dropout(self.act(up(x)))
        out: Tensor = self.down(hidden)
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
        p, layers = rate(self.dropout), (self.gate, self.up, self.down)
        if p is None or not all(map(unshared, layers)):
            out: Tensor = self.down(self.dropout(self.act(gate, up)))
            return out
        seed = draw(x.device) if p > 0 else None
        if isinstance(self.down, Adapted):
            return self.down.gated(self.act, gate, up, seed, p)
        return gated_linear(self.act, gate, up, self.down.weight, self.down.bias, seed, p)
