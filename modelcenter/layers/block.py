"""One transformer block in its three arrangements, and a stack of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from .attention import Attention
from .view import View


class Block(nn.Module, ABC):
    """Attention, optional cross-attention and feed-forward around a residual stream: the unit that is sharded, recomputed and
    compiled. Subclasses say where the norms stand; dropout acts on what is added to the stream."""

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attn: Attention,
        ffn: nn.Module,
        *,
        cross: Attention | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.attn, self.attn_norm = attn, norm()
        self.cross, self.cross_norm = cross, norm() if cross is not None else None
        self.ffn, self.ffn_norm = ffn, norm()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, view: View, cross: View | None = None) -> Tensor:
        """x and the result: b s dim; `view` for self-attention, `cross` for cross-attention."""
        x = self.residual(x, self.attn_norm, lambda h: self.attn(h, view))
        if self.cross is not None and self.cross_norm is not None:
            attend = self.cross
            x = self.residual(x, self.cross_norm, lambda h: attend(h, cross))
        return self.residual(x, self.ffn_norm, self.ffn)

    @abstractmethod
    def residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Add what `layer` makes of the stream to the stream."""


class PreNorm(Block):
    """x + layer(norm(x)), as GPT-2, T5, LLaMA."""

    def residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = x + self.dropout(layer(norm(x)))
        return out


class PostNorm(Block):
    """norm(x + layer(x)), as the original transformer and BERT."""

    def residual(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = norm(x + self.dropout(layer(x)))
        return out


class Parallel(PreNorm):
    """x + attn(norm(x)) + ffn(norm(x)) with one norm, as GPT-J."""

    def __init__(self, norm: Callable[[], nn.Module], attn: Attention, ffn: nn.Module, *, dropout: float = 0.0):
        super().__init__(norm, attn, ffn, dropout=dropout)
        del self.ffn_norm

    def forward(self, x: Tensor, view: View, cross: View | None = None) -> Tensor:
        h = self.attn_norm(x)
        out: Tensor = x + self.dropout(self.attn(h, view)) + self.dropout(self.ffn(h))
        return out


class Stack(nn.Module):
    """Blocks in order, then an optional final norm."""

    def __init__(self, blocks: Iterable[Block], *, norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, x: Tensor, view: View, cross: View | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, view, cross)
        return x if self.norm is None else self.norm(x)
