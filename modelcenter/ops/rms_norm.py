"""RMS norm: x / sqrt(mean(x^2) + eps) * weight over the last axis. Zhang & Sennrich, 2019.

`add_rms_norm` normalises residual + dropout(x), and returns that total too. `dtype` is that of the norm, as for layer_norm.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _norm
from ._norm import Forward
from ._op import Kernel, op, raw, wide
from .dropout import share


def reference(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    _norm.check(x, weight, None, eps)
    h = wide(x)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight).to(dtype or x.dtype)


@raw("(Tensor x, Tensor weight, float eps, ScalarType? dtype=None) -> (Tensor, Tensor)")
def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return _norm.forward(x, None, weight, None, eps, None, 0.0, dtype)[::2]


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    return args[0], args[1], outs[1]


def backward(grad: Tensor, x: Tensor, weight: Tensor, stats: Tensor) -> Sequence[Tensor | None]:
    _, dx, dweight, _ = _norm.backward(grad, None, x, weight, stats, False, None, 0.0, x.dtype)
    return dx, dweight, None, None


def takes(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> bool:
    return _norm.takes(x, x, weight, None, dtype)


def add_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, seed: Tensor | None, p: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    total = _norm.add(x, residual, seed, p)
    return reference(total, weight, eps, dtype), total


@raw(
    "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor? seed, float p, ScalarType? dtype=None)"
    " -> (Tensor, Tensor, Tensor)"
)
def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, seed: Tensor | None, p: float, dtype: torch.dtype | None = None
) -> Forward:
    return _norm.forward(x, residual, weight, None, eps, seed, p, dtype)


def add_saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    x, _, weight, _, seed, p, *_ = args
    return outs[1], weight, outs[2], seed, p, x.dtype


def add_backward(
    grad: Tensor | None, more: Tensor | None, total: Tensor, weight: Tensor, stats: Tensor, seed: Tensor | None, p: float,
    branch: torch.dtype,
) -> Sequence[Tensor | None]:  # fmt: skip
    dx, dresidual, dweight, _ = _norm.backward(grad, more, total, weight, stats, False, seed, p, branch)
    return dx, dresidual, dweight, None, None, None, None


def add_takes(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, seed: Tensor | None, p: float, dtype: torch.dtype | None = None
) -> bool:
    return share(p) and _norm.takes(x, residual, weight, None, dtype)


rms_norm = op(
    "rms_norm", reference, partial(_norm.cases, False, 1e-6),
    Kernel(rms_norm_forward, saved, backward, takes=takes),
)  # fmt: skip
add_rms_norm = op(
    "add_rms_norm", add_reference, partial(_norm.add_cases, False, 1e-6),
    Kernel(add_rms_norm_forward, add_saved, add_backward, takes=add_takes, results=2, streams=2),
)
