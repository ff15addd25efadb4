"""Prefetches offloaded weights from the host to the device, for a single rank.

With several ranks FSDP gathers the weights of the next block on its own streams, while the current block computes. With one rank
there is nothing to gather, and FSDP (torch 2.11 to 2.13) copies weights from the host only when they are needed, on the computing
stream. Here they are copied, and rounded, on another stream as soon as FSDP would gather them, so that it finds them on the device.
In a forward FSDP is told which block comes next. Prefetching never waits for an update: weights that are still being updated are
copied when they are needed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class Ahead:
    """The weights of a model's `units`, in the order of the forward, that are being copied. `idle`: whether a unit, by its number,
    is not being updated."""

    def __init__(self, units: Sequence[nn.Module], idle: Callable[[int], bool]) -> None:
        self.idle = idle
        self.begun: dict[int, tuple[list[Tensor], Any]] = {}  # the weights of units, and the event that they have come
        self.stream: Any = None
        self.used: Any = None  # the event that those of the last unit have been taken over: their memory may be used again
        each: list[Any] = list(units)
        for unit, following in pairwise(each):
            unit.set_modules_to_forward_prefetch([following])
        for number, unit in enumerate(each):
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.unshard = partial(self.begin, number, group, group.unshard)
                group.wait_for_unshard = partial(self.end, number, group, group.wait_for_unshard)

    def begin(self, number: int, group: Any, unshard: Callable[[bool], None], async_op: bool = False) -> None:
        """Called when FSDP begins to gather."""
        waiting = group._all_gather_result is not None
        unshard(async_op)
        if waiting or group._all_gather_result is None or not self.idle(number):
            return
        device = torch.get_device_module(group.device)
        if self.stream is None:
            self.stream = device.Stream()
        with device.stream(self.stream):
            if self.used is not None:
                self.stream.wait_event(self.used)
            self.begun[number] = [p.all_gather_inputs[0] for p in group.fsdp_params], self.stream.record_event()

    def end(self, number: int, group: Any, wait: Callable[[], None]) -> None:
        """Called when FSDP takes over what it has gathered: with one rank its own weights, for which the copies stand in
        meanwhile."""
        if number not in self.begun or group._all_gather_result is None:
            wait()
            return
        here, (parts, come) = torch.get_device_module(group.device).current_stream(), self.begun.pop(number)
        here.wait_event(come)
        own = [p._sharded_param_data for p in group.fsdp_params]
        try:
            for p, part in zip(group.fsdp_params, parts, strict=True):
                p._sharded_param_data = part
            wait()
        finally:
            for p, data in zip(group.fsdp_params, own, strict=True):
                p._sharded_param_data = data
        self.used = here.record_event()

    def forget(self) -> None:
        """Drop copies that nobody has taken, as after a forward that was aborted or skipped blocks: the weights may change before
        they are needed, or already have. FSDP, which believes that they are being copied, then fetches them itself."""
        self.begun.clear()
