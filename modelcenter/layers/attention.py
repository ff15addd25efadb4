"""Multi-head attention. b batch, s queries, t keys, h heads, d head dim.

The number of heads is read from the tensors and never stored, so a tensor-parallel shard needs no fix-up.
"""

from torch import Tensor, nn

from ..ops._mode import autocast_dtype
from .dropout import Dropout, rate
from .linear import Linear, alone, together
from .position import Angles
from .view import View


class Attention(nn.Module):
    """Self-attention, or cross-attention if the view has a memory. With kv_heads < heads it is grouped (Ainslie et al., 2023)."""

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
        self.scale, self.dropout = scale, Dropout(dropout)
        self.q = Linear(dim, heads * self.head_dim, bias=bias)
        self.k = Linear(dim, (kv_heads or heads) * self.head_dim, bias=bias)
        self.v = Linear(dim, (kv_heads or heads) * self.head_dim, bias=bias)
        self.o = Linear(heads * self.head_dim, dim, bias=bias if out_bias is None else out_bias)

    def forward(self, x: Tensor, view: View) -> Tensor:
        asked = self.asked(x, view)
        if asked is None:
            q, k, v = self.project(x, view)
        else:
            (q,), (k, v) = self.heads(view.chosen(x), None, self.q), self.heads(x.flatten(0, 1)[None], None, self.k, self.v)
        p = rate(self.dropout)
        out = view.shown(q, k, v, self.scale, self.dropout) if p is None else (asked or view).attend(q, k, v, self.scale, p)
        merged = out.transpose(1, 2).flatten(2)  # b h s d -> b s (h d)
        made: Tensor = self.o(view.chosen(merged) if asked is None else merged)
        return made

    def asked(self, x: Tensor, view: View) -> View | None:
        """The view of only those queries that are wanted, if no others need be computed."""
        if view.wanted is None or view.memory is not None or not all(map(alone, (self.q, self.k, self.v))):
            return None
        if rate(self.dropout) is None:  # who watches the probabilities sees all of them
            return None
        return view.asked(x, autocast_dtype(x.device) or x.dtype, self.head_dim)

    def project(self, x: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (b h s d), and keys and values (b h t d). These are of x, behind those in the cache; or of the memory, projected
        once."""
        cache = view.cache
        if view.memory is None:
            q, k, v = self.heads(x, view.angles, self.q, self.k, self.v)
            return q, *((k, v) if cache is None else cache.extend(self, k, v))
        (q,) = self.heads(x, view.angles, self.q)
        if cache is not None and self in cache.across:
            return q, *cache.across[self]
        k, v = self.heads(view.memory, view.angles, self.k, self.v)
        if cache is not None:
            cache.across[self] = (k, v)
        return q, k, v

    def heads(self, x: Tensor, angles: Angles | None, *projections: nn.Module) -> list[Tensor]:
        """Each projection's heads (b h s d), with queries and keys rotated. They are rotated before they are transposed, and in
        place if nobody else sees the tensor."""
        heads = []
        for projection, made in zip(projections, together(x, *projections), strict=True):
            apart = made.unflatten(-1, (-1, self.head_dim))  # b s (h d) -> b s h d
            if angles is not None and projection is not self.v:
                apart = angles.rotate(apart, spare=alone(projection))
            heads.append(apart.transpose(1, 2))
        return heads
