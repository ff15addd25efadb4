"""The losses of heads, which are sums over targets divided by the number of targets, and the labels that they refuse."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import refuse
from ..ops.cross_entropy import IGNORE, ignored
from .batch import Batch


def mean(total: Tensor, labels: Tensor, items: int | Tensor | None) -> Tensor:
    """A sum over targets divided by their number; zero if there are no targets."""
    items = (labels != ignored(labels)).sum() if items is None else items
    return total / (items + (items == 0))


def label_loss(logits: Tensor, labels: Tensor, items: int | Tensor | None, smoothing: float) -> Tensor:
    """Cross entropy of integer labels."""
    return mean(ops.cross_entropy(logits.flatten(0, -2), labels.flatten(), smoothing), labels, items)


def drift_loss(logits: Tensor, labels: Tensor, items: int | Tensor | None) -> Tensor:
    """The divergence of two passes over the same rows: the mean of their two Kullback-Leibler divergences (Liang et al., 2021,
    equation 1). logits 2b n, labels 2b: the first pass, then the second."""
    p, q = ops.wide(logits).log_softmax(-1).chunk(2)
    first = labels.chunk(2)[0]
    apart = ((p.exp() - q.exp()) * (p - q)).sum(-1) / 2
    return mean(apart.masked_fill(first == IGNORE, 0).sum(), first, items)


def place_loss(scores: Tensor, real: Tensor | None, labels: Tensor, smoothing: float) -> Tensor:
    """The summed cross entropy of positions in sequences: scores b s, labels b. Padding is not a possible position, so that the
    loss does not depend on the other sequences of the batch; transformers' loss does."""
    scores = ops.wide(scores)
    real = torch.ones_like(scores, dtype=torch.bool) if real is None else real
    logs = scores.masked_fill(~real, torch.finfo(scores.dtype).min).log_softmax(1)
    found = logs.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    even = logs.masked_fill(~real, 0).sum(1) / real.sum(1).clamp(min=1)
    losses = (smoothing - 1) * found - smoothing * even
    return losses.masked_fill(labels == IGNORE, 0).sum()


def value_loss(logits: Tensor, labels: Tensor, items: int | Tensor | None) -> Tensor:
    """The loss for labels that are numbers: for one output the squared error (labels b); for several outputs, each a label that is
    present or not, the mean of their binary cross entropies (labels b n)."""
    logits = ops.wide(logits)
    labels = labels.to(logits.dtype).view_as(logits)
    none = labels == ignored(labels)
    known = labels.masked_fill(none, 0)  # a gradient times zero is to be zero
    if logits.size(-1) == 1:
        losses = (logits - known).square()
    else:
        losses = nn.functional.binary_cross_entropy_with_logits(logits, known, reduction="none")
    total = losses.masked_fill(none, 0).sum() / logits.size(-1)
    return mean(total, labels[..., :1], items)


def sequences(batch: Batch) -> int:
    """The number of sequences: of rows, or of sequences packed into one row."""
    return batch.x.size(0) if batch.packing is None else batch.packing.q.there.numel() - 1


def classes(labels: Tensor, shape: Sequence[int], each: str) -> None:
    """Refuse labels that are not integers (int64), or not of this shape."""
    if labels.dtype not in (torch.int64, torch.uint8):
        refuse(None, "labels", f"of {str(labels.dtype).removeprefix('torch.')}", f"classes, of int64 (labels.long()), {each}")
    if labels.numel() != math.prod(shape) or (len(shape) > 1 and labels.shape != tuple(shape)):
        refuse(None, "labels", f"shape {list(labels.shape)}", f"{list(shape)}, {each}")
