"""Multi-head attention. b batch, s queries, t keys, h heads, d head dim.

Head counts are read off the tensors, never stored, so a tensor-parallel shard needs no fix-up.
"""

from torch import Tensor, nn

from .linear import Linear, alone
from .position import Angles
from .view import View


class Attention(nn.Module):
    """Self-attention, or cross-attention when the view has a memory; grouped when kv_heads < heads (Ainslie et al., 2023)."""

    tp = {"q": "column", "k": "column", "v": "column", "o": "row"}

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ):
        """`scale` multiplies the scores; None means 1 / sqrt(head_dim)."""
        super().__init__()
        self.head_dim = head_dim or dim // heads
        self.scale, self.dropout = scale, dropout
        self.q = Linear(dim, heads * self.head_dim, bias=bias)
        self.k = Linear(dim, (kv_heads or heads) * self.head_dim, bias=bias)
        self.v = Linear(dim, (kv_heads or heads) * self.head_dim, bias=bias)
        self.o = Linear(heads * self.head_dim, dim, bias=bias if out_bias is None else out_bias)

    def forward(self, x: Tensor, view: View) -> Tensor:
        q = self.heads(self.q, x, view.angles)
        k, v = self.pair(x, view)
        out = view.attend(q, k, v, self.scale, self.dropout if self.training else 0.0)
        merged: Tensor = self.o(out.transpose(1, 2).flatten(2))  # b h s d -> b s (h d)
        return merged

    def pair(self, x: Tensor, view: View) -> tuple[Tensor, Tensor]:
        """Keys and values (b h t d): of x and what the cache holds before it, or of the memory, projected once."""
        cache, source = view.cache, x if view.memory is None else view.memory
        if cache is not None and view.memory is not None and self in cache.across:
            return cache.across[self]
        k, v = self.heads(self.k, source, view.angles), self.heads(self.v, source, None)
        if cache is None:
            return k, v
        if view.memory is None:
            return cache.extend(self, k, v)
        cache.across[self] = (k, v)
        return k, v

    def heads(self, projection: nn.Module, x: Tensor, angles: Angles | None) -> Tensor:
        """The projection's heads (b h s d), rotated where they are: before they are transposed, and in place if nobody sees it."""
        apart: Tensor = projection(x).unflatten(-1, (-1, self.head_dim))  # b s (h d) -> b s h d
        if angles is not None:
            apart = angles.rotate(apart, spare=alone(projection))
        return apart.transpose(1, 2)
