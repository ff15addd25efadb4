"""RMS norm: x / sqrt(mean(x^2) + eps) * weight over the last axis. Zhang & Sennrich, 2019."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import op, wide


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = wide(x)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (4, 4096)):
        yield torch.randn(shape, device=device, dtype=dtype), torch.rand(shape[-1], device=device, dtype=dtype) + 0.5, 1e-6


rms_norm = op("rms_norm", reference, cases)
