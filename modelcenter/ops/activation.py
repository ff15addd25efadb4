"""Activations of a feed-forward layer, plain and gated.

gelu(x) = x * Phi(x) (Hendrycks & Gimpel, 2016); gelu_tanh is the same paper's tanh approximation, which GPT-2, T5 v1.1 and
BLOOM use. A gated activation is act(gate) * up (Shazeer, 2020: "GLU Variants Improve Transformer").
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._op import Op, op


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (4, 4096)):
        yield (torch.randn(shape, device=device, dtype=dtype),)


def gated_cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (4, 4096)):
        gate, up = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        yield gate, up


def gated(name: str, act: Callable[[Tensor], Tensor]) -> Op:
    return op(name, lambda gate, up: act(gate) * up, gated_cases)


gelu = op("gelu", F.gelu, cases)
gelu_tanh = op("gelu_tanh", tanh_gelu, cases)
relu = op("relu", F.relu, cases)
silu = op("silu", F.silu, cases)
geglu = gated("geglu", F.gelu)
geglu_tanh = gated("geglu_tanh", tanh_gelu)
reglu = gated("reglu", F.relu)
swiglu = gated("swiglu", F.silu)
