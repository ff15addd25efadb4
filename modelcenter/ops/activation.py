"""Activations of a feed-forward layer, plain and gated.

gelu(x) = x * Phi(x) (Hendrycks & Gimpel, 2016); gelu_tanh is the same paper's tanh approximation, which GPT-2 and T5
v1.1 use, and gelu_cut is Megatron-LM's spelling of that, which BLOOM uses. A gated activation is act(gate) * up
(Shazeer, 2020: "GLU Variants Improve Transformer").
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._op import Op, op


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def tanh_gelu_cut(x: Tensor) -> Tensor:
    """tanh_gelu with sqrt(2 / pi) cut to eight digits: up to 3e-10 away; in fp32 the same number and kernel."""
    if x.dtype != torch.float64:
        return tanh_gelu(x)
    return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


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
gelu_cut = op("gelu_cut", tanh_gelu_cut, cases)
relu = op("relu", F.relu, cases)
silu = op("silu", F.silu, cases)
geglu = gated("geglu", F.gelu)
geglu_tanh = gated("geglu_tanh", tanh_gelu)
reglu = gated("reglu", F.relu)
swiglu = gated("swiglu", F.silu)
