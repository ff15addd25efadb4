"""A matrix product with an optional bias."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as watched_all

from ..ops._mode import autocast_dtype, on_gpu, plain, transformed
from ..ops.linear import LOW, linear, linears, rounded


class Linear(nn.Linear):
    """nn.Linear, computed by `ops.linear`. Called with `bias=False` it leaves the bias to the caller, who can add it more
    cheaply."""

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        return linear(x, self.weight, self.bias if bias else None)


def together(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """layer(x) for each layer. If the layers are plain, or have plain adapters, this is one op whose gradient costs less."""
    if all(map(alone, layers)):
        return linears(x, [layer.weight for layer in layers], [layer.bias for layer in layers])  # type: ignore[misc]  # of `Linear`
    joint, made = getattr(layers[0], "joint", None), None
    if joint is not None and all(type(layer) is type(layers[0]) and not watched(layer) for layer in layers):
        made = joint(x, layers)
    return [layer(x) for layer in layers] if made is None else made


def unshared(layer: nn.Module) -> bool:
    """Whether what a plain layer returns, with or without an adapter, is seen by its caller alone."""
    return alone(layer) or (hasattr(layer, "joint") and not watched(layer))


def rounding(block: nn.Module, x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the trained weights of the block's plain layers are rounded, once, to the dtype that autocast multiplies
    in on a GPU."""
    if not (on_gpu(x) and torch.is_grad_enabled()) or torch.compiler.is_compiling() or transformed():
        return nullcontext()
    low = autocast_dtype(x.device)
    if low not in LOW:
        return nullcontext()
    layers = [layer for layer in block.modules() if alone(layer)]
    factors = [p for layer in layers for p in layer._parameters.values() if p is not None and p.requires_grad]
    return rounded([p for p in factors if p.dtype == torch.float32], low)


def alone(layer: nn.Module, kind: type[nn.Module] = Linear) -> bool:
    """Whether a call of the layer runs the `forward` of its class on plain parameters, and nothing else."""
    return type(layer) is kind and not watched(layer) and all(p is None or plain(p) for p in layer._parameters.values())


def watched(layer: nn.Module) -> bool:
    """Whether a call of the layer does more than its class's `forward`: there is a hook, or a replaced forward. A global hook
    counts only for modules with weights: a dropout remains part of the op that adds or attends, because otherwise attention would
    have to compute its probabilities, several times the work, just for a hook that counts calls (torch's FlopCounterMode)."""
    hooks: Any = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    hooks = hooks or (watched_all() and layer._parameters)
    return bool(hooks) or "forward" in vars(layer) or layer._compiled_call_impl is not None
