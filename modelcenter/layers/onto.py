"""Moves numbers from the host to a device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import _graph


def onto(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. A copy from the host to a GPU does not wait for the GPU's pending work. While a CUDA graph is recorded this
    raises a RuntimeError, because a replay would read host memory that by then holds something else."""
    if device.type == "cuda" and x.device.type == "cpu":
        if _graph.recording():
            raise RuntimeError("numbers of the host cannot be a part of a CUDA graph")
        if not torch._C._len_torch_dispatch_stack():  # a rehearsal's tensors have no memory to pin
            return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def kept(known: dict[Any, Tensor], name: Any, make: Callable[[], Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """`make()`, numbers that never change, on `device`. On a GPU they are kept in `known`: copying them in each forward would make
    the host wait, and could not be part of a CUDA graph."""
    if device.type != "cuda" or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return make().to(device, dtype)
    key = name, device, dtype
    if key not in known:
        known[key] = make().to(device, dtype)
    return known[key]
