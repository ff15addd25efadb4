"""Cross entropy of logits against labels, summed over the labels that are not `IGNORE`; in at least fp32.

loss = sum_i (logsumexp(logits_i) - logits_i[label_i]). No label at all gives zero and a zero gradient, never NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._op import op, wide

IGNORE = -100  # as torch and transformers


def reference(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(wide(logits), labels, ignore_index=IGNORE, reduction="sum")


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for n, vocab in ((1, 1), (3, 7), (64, 1000)):
        labels = torch.randint(vocab, (n,), device=device)
        yield torch.randn(n, vocab, device=device, dtype=dtype), labels
        yield torch.randn(n, vocab, device=device, dtype=dtype), labels.masked_fill(labels % 2 == 0, IGNORE)


cross_entropy = op("cross_entropy", reference, cases)
