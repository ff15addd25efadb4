"""Layer norm: (x - mean) / sqrt(var + eps) * weight + bias over the last axis. Ba et al., 2016."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._op import op


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)  # torch accumulates in fp32 for fp16 and bf16


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (4, 4096)):
        weight, bias = (torch.rand(shape[-1], device=device, dtype=dtype) + 0.5 for _ in range(2))
        yield torch.randn(shape, device=device, dtype=dtype), weight, bias, 1e-5


layer_norm = op("layer_norm", reference, cases)
