"""One vector for each sequence: one of its tokens, or their mean. `pick(x, batch)` turns hidden states (b s dim) into (b dim)."""

from collections.abc import Callable

import torch
from torch import Tensor

from .batch import Batch


def first_token(x: Tensor, batch: Batch) -> Tensor:
    """The first token of every sequence: b dim, or n dim if n sequences are packed."""
    return x[:, 0] if batch.packing is None else x[0, batch.packing.q.there[:-1].clamp(max=x.size(1) - 1)]


def last_token(x: Tensor, batch: Batch) -> Tensor:
    """The last real token of every sequence, wherever the padding is."""
    if batch.packing is not None:
        return x[0, batch.packing.q.there[1:] - 1]
    if batch.mask is None:
        return x[:, -1]
    at = torch.arange(x.size(1), device=x.device)
    return x[torch.arange(x.size(0), device=x.device), (batch.mask * at).argmax(1)]


def mean_token(x: Tensor, batch: Batch) -> Tensor:
    """The mean of every sequence's real tokens; zero for a row that is only padding."""
    if batch.packing is not None:
        ends, at = batch.packing.q.there, torch.arange(x.size(1), device=x.device)
        own = (at >= ends[:-1, None]) & (at < ends[1:, None])
        return own.to(x.dtype) @ x[0] / own.sum(1, keepdim=True).clamp(min=1)
    real = x.new_ones(x.shape[:2]) if batch.mask is None else batch.mask.to(x.dtype)
    return torch.einsum("bsd,bs->bd", x, real) / real.sum(1, keepdim=True).clamp(min=1)


def places(pick: Callable[[Tensor, Batch], Tensor], batch: Batch) -> Tensor | None:
    """The positions that `pick` reads, as indices into the flattened b s; None if it reads all."""
    if pick not in (first_token, last_token):
        return None
    b, s = batch.x.shape[:2]
    at = torch.arange(b * s, device=batch.x.device).view(b, s, 1)
    return pick(at, batch).flatten()


POOLINGS = {"mean": mean_token, "last": last_token, "cls": first_token}  # as sentence-transformers calls them
