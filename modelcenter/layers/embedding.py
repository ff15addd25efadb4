"""Token, position and segment embeddings."""

import torch
from torch import Tensor, nn

from .dropout import Dropout


class Embedding(nn.Module):
    """Sum of a token table and optional position and segment tables, then an optional norm and dropout."""

    tp = {"tokens": "vocab"}

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        positions: int = 0,
        segments: int = 0,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
        pad: int | None = None,
    ):
        """`pad`: a token whose row of the table is not trained by being read."""
        super().__init__()
        self.pad = pad
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(positions, dim) if positions else None
        self.segments = nn.Embedding(segments, dim) if segments else None
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """`x`: token ids (b s) or vectors ready made (b s dim); `positions` and `segments` (1|b s). Returns b s dim."""
        x = self.look_up(x) if x.dim() == 2 else x
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.segments is not None:
            x = x + self.segments(segments)
        out: Tensor = self.dropout(x if self.norm is None else self.norm(x))
        return out

    def look_up(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids)
        if self.pad is None or not torch.is_grad_enabled():
            return x
        # not nn.Embedding's padding_idx: sharded by rows, it would silence that row of every shard
        return torch.where((ids == self.pad)[..., None], x.detach(), x)
