"""Layer norm: (x - mean) / sqrt(var + eps) * weight + bias over the last axis. Ba et al., 2016.

`add_layer_norm` normalises residual + dropout(x), and returns that total too. `dtype` is that of the norm, if it should not be that
of x or of the residual: under autocast the matrix products read it in half precision, and writing it so saves a pass. Without a
bias (None) the reference runs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _norm
from ._norm import Forward
from ._op import Kernel, op, raw, wide
from .dropout import share


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    _norm.check(x, weight, bias, eps)
    return F.layer_norm(wide(x), weight.shape, wide(weight), None if bias is None else wide(bias), eps).to(dtype or x.dtype)


@raw("(Tensor x, Tensor weight, Tensor bias, float eps, ScalarType? dtype=None) -> (Tensor, Tensor)")
def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return _norm.forward(x, None, weight, bias, eps, None, 0.0, dtype)[::2]


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    return args[0], args[1], outs[1]


def backward(grad: Tensor, x: Tensor, weight: Tensor, stats: Tensor) -> Sequence[Tensor | None]:
    _, dx, dweight, dbias = _norm.backward(grad, None, x, weight, stats, True, None, 0.0, x.dtype)
    return dx, dweight, dbias, None, None


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> bool:
    return bias is not None and _norm.takes(x, x, weight, bias, dtype)  # the kernel of none is RMS norm's


def add_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, seed: Tensor | None, p: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    total = _norm.add(x, residual, seed, p)
    return reference(total, weight, bias, eps, dtype), total


@raw(
    "(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps, Tensor? seed, float p, ScalarType? dtype=None)"
    " -> (Tensor, Tensor, Tensor)"
)
def add_layer_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, seed: Tensor | None, p: float,
    dtype: torch.dtype | None = None,
) -> Forward:  # fmt: skip
    return _norm.forward(x, residual, weight, bias, eps, seed, p, dtype)


def add_saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    x, _, weight, _, _, seed, p, *_ = args
    return outs[1], weight, outs[2], seed, p, x.dtype


def add_backward(
    grad: Tensor | None, more: Tensor | None, total: Tensor, weight: Tensor, stats: Tensor, seed: Tensor | None, p: float,
    branch: torch.dtype,
) -> Sequence[Tensor | None]:  # fmt: skip
    dx, dresidual, dweight, dbias = _norm.backward(grad, more, total, weight, stats, True, seed, p, branch)
    return dx, dresidual, dweight, dbias, None, None, None, None


def add_takes(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, seed: Tensor | None, p: float,
    dtype: torch.dtype | None = None,
) -> bool:  # fmt: skip
    return bias is not None and share(p) and _norm.takes(x, residual, weight, bias, dtype)


layer_norm = op(
    "layer_norm", reference, partial(_norm.cases, True, 1e-5),
    Kernel(layer_norm_forward, saved, backward, takes=takes),
)  # fmt: skip
add_layer_norm = op(
    "add_layer_norm", add_reference, partial(_norm.add_cases, True, 1e-5),
    Kernel(add_layer_norm_forward, add_saved, add_backward, takes=add_takes, results=2, streams=2),
)  # fmt: skip
