"""One update of a model: the gradients of a batch, accumulated over micro-batches, their norm, and the optimizer's step."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import Head
from ..optim.adamw import AdamW
from ..optim.clipped import Clipped, at_once
from ..optim.optimizers import set_lr
from ..parallel.device import LOW, home_of
from ..parallel.offload import aside_of
from ..parallel.ranks import ALONE, Ranks
from ..parallel.watch import beat
from .evaluate import Arguments, count_targets, count_tokens, on_device
from .graphs import Graphs
from .shapes import filled


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward: bf16 and fp16 compute with copies of the fp32 weights that live as long as the forward."""
    low = LOW.get(precision)
    return torch.autocast(device.type, low) if low is not None else nullcontext()


def accumulate(model: nn.Module, batches: Sequence[Arguments], task: str,
               compute: Callable[[], AbstractContextManager[Any]] = nullcontext, scale: float = 1.0, targets: int | None = None,
               ranks: Ranks = ALONE, told: Callable[[int, int, Tensor], None] | None = None,
               graphs: Graphs | None = None) -> tuple[Tensor, int]:
    """Add the gradients of `scale` times the mean loss over all target tokens of `batches`, however these are cut into
    micro-batches. Returns the loss (float64, on the device, not waited for) and the number of targets. Without any target the loss
    is 0 and the gradients are zeros.

    On several ranks `batches` are this rank's share and `targets` those of all; the gradients are complete when it returns, and the
    loss is the mean over the ranks of what each returns. `told` is called for each micro-batch with its number, how many there are,
    and its own mean loss. `graphs`: the model's graphs, with which forward and backward may be recorded and batches are filled up
    to shapes that recur. A batch that is not `ready` is made so.
    """
    device = home_of(model)
    ours = [ready(model, batch, task, device, graphs is not None and graphs.fills) for batch in batches]
    targets = sum(batch.targets for batch in ours) if targets is None else targets
    each = max(1, targets) / ranks.shares  # of a share, in the mean: gradients are means over the shares too
    items, factor = number_on(each, device), None if scale == 1 else number_on(scale, device)
    work = partial(forward_and_backward, model, compute)
    records = graphs if graphs is not None and ranks.whole(len(ours)) else None

    def added_up() -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device)
        try:
            for number, batch in enumerate(ours, 1):
                last = number == len(ours)
                ranks.reduce(model, last, records is not None and not records.ended)
                given = {**on_device(batch, device), "num_items_in_batch": items}
                if records is not None:
                    loss = records.run(work, given, factor, last and ranks.averages)
                else:  # perhaps beside records of steps that are whole
                    loss = work(given, factor) if graphs is None else graphs.by_calls(work, given, factor)
                total = total + loss.to(total)
                beat(step=True)
                if told is not None:
                    told(number, len(ours), loss * (each / max(1, batch.targets)))
        finally:  # of a step that breaks off too: nothing of it is kept aside, for the next
            ranks.reduced(model)
        return total

    return added_up() if graphs is None else graphs.attempt(added_up), targets


def forward_and_backward(model: nn.Module, compute: Callable[[], AbstractContextManager[Any]], given: Arguments,
                         scale: Tensor | float | None) -> Tensor:
    """The loss of a micro-batch, after adding the gradients of `scale` times it."""
    with compute():
        loss: Tensor = model(**given).loss
    (loss if scale is None else loss * scale).backward()
    return loss.detach()


class Ready(dict[str, Any]):
    """A batch for which the host's work is done: the arguments of a forward, and how many tokens of the loader's batch count as
    `targets` and as `tokens`."""

    targets: int
    tokens: int

    def on(self, device: torch.device) -> "Ready":
        """The same on `device`."""
        there = Ready(on_device(self, device))
        there.targets, there.tokens = self.targets, self.tokens
        return there


def ready(model: nn.Module, batch: Arguments, task: str, device: torch.device, fill: bool) -> Ready:
    """`batch` of the loader, made ready for a model that trains on `device`; one that is ready stays as it is. No device is
    involved, so that another thread may do this while the device works. `fill`: up to shapes that recur. Which labels the head will
    look for is found here, on the host, so that no device has to be waited for."""
    if isinstance(batch, Ready):
        return batch
    found = Ready(filled(model, batch) if fill else batch)
    found.targets, found.tokens = count_targets(batch, task), count_tokens(batch, task)
    labels, head = found.get("labels"), getattr(model, "head", None)
    if device.type == "cuda" and isinstance(head, Head) and isinstance(labels, Tensor) and labels.is_cpu:
        labelled = head.labelled_of(labels)
        if labelled is not None:
            found["target_places"] = labelled
    return found


def number_on(value: float, device: torch.device) -> Tensor | float:
    """A number for a device to compute with. A GPU reads it from its memory, so its value is not baked into a CUDA graph."""
    return torch.full((), value, device=device) if device.type == "cuda" else value


def update(model: nn.Module, optimizer: AdamW | Clipped, loss: Tensor | float, lr: float, max_norm: float,
           scale: float = 1.0, squares: Tensor | None = None, meanwhile: Callable[[], object] = lambda: None,
           graphs: Graphs | None = None, late: bool = False) -> float:
    """Divide the gradients by `scale`, clip them to `max_norm` (0: never), step at the rate `lr` and drop them; returns their norm
    before clipping. If the norm or the loss is not finite NaN is returned, and no weight or moment has changed. `squares`: the sum
    of the squared gradients of all ranks, if there are several. `meanwhile`: what else to do while the device is at work.
    `graphs`: the model's, which may record the update too. `late`: weights that are kept on the host may still be changing when it
    returns; forwards wait for what they need, and who else reads them calls `settle` first.

    The host waits for the device only at the end, and only until the norm is known; while the device updates, the next step may be
    prepared. Optimizers other than AdamW wait for the norm before they update: then the host waits until then.
    """
    set_lr(optimizer, lr)
    unscale = None if scale == 1 else torch.full((), 1 / scale, device=next(model.parameters()).device)  # nothing to wait for
    squares = optimizer.squares() if squares is None else squares
    clip = optimizer.clip(max_norm, unscale, squares + 0 * torch.as_tensor(loss, device=squares.device))  # 0 x NaN, 0 x inf: NaN
    known = soon(clip[0])
    if isinstance(optimizer, Clipped):
        meanwhile()
        optimizer.step(clip=clip, run=at_once if graphs is None else graphs.update)
    else:
        aside = aside_of(model) if late else None
        later = None if aside is None else aside.later
        optimizer.step(clip=clip, later=later)  # nothing, if the norm is not finite: the device finds out by itself
        meanwhile()
    optimizer.zero_grad(set_to_none=True)
    norm = known()
    return norm if math.isfinite(norm) else math.nan


def soon(number: Tensor) -> Callable[[], float]:
    """A number on a device, requested now. Calling the result waits for it, but for nothing that the device does later."""
    if number.device.type != "cuda":
        return partial(float, number)
    here, stream = torch.empty_like(number, device="cpu", pin_memory=True), torch.cuda.current_stream(number.device)
    here.copy_(number, non_blocking=True)
    there = stream.record_event()

    def value() -> float:
        there.synchronize()
        return float(here)

    return value
