"""Storage for a model's parameters: on which device, and on several ranks sharded as the machine says."""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .adapter.config import AdapterConfig
from .checkpoint.load import cut_as, local
from .errors import refuse, size
from .model import Model
from .parallel.blocks import fit_blocks
from .parallel.check import check
from .parallel.device import check_device, check_precision, device_of, memory_of
from .parallel.machine import Machine

if TYPE_CHECKING:
    from .parallel.offload import Room


def place(model: Model, device: str | torch.device | None, machine: Machine | None, precision: str | None = None,
          meanwhile: Callable[[torch.device], object] = lambda home: None) -> None:
    """Give the parameters storage on `device`, or on the machine's own, sharded as the machine says.

    On several ranks a thread calls `meanwhile` with the device that the weights will be on, as soon as FSDP begins to wrap.
    """
    check_precision(precision)
    with ThreadPoolExecutor(1) as thread:
        jobs: list[Future[object]] = []
        kept: torch.device | None = None  # where weights are, if not where they are computed with
        if machine is not None:
            where = partial(device_of, machine)
            if machine.meshed:
                from .parallel.apply import parallelize  # FSDP and DTensor take seconds to import

                kept = torch.device("cpu") if machine.offload else None
                parallelize(model, machine, precision, quiet=lambda: jobs.append(thread.submit(meanwhile, kept or where())))
            else:
                check(machine)
                fit_blocks(model, machine)
            device = device or where()
        home = torch.device(device or "cpu")
        check_memory(model, kept or home)
        room = None
        if kept is not None:
            from .parallel.offload import ALIGN, Room

            room = Room(sum(local(p)[1].nbytes + ALIGN for p in model.parameters()), home)
        model._apply(partial(stored, home=home, room=room))
        model.tie()
        if machine is not None and machine.ranks > 1:
            from .parallel.averaging import watch

            watch(model)  # the parameters with storage
    for job in jobs:
        job.result()


def stored(t: Tensor, home: torch.device, room: "Room | None") -> Tensor:
    """`t` with storage on `home`, or in `room` on the host if FSDP has it, its values unset. A quantised layer's tensor has its
    values already, and keeps them; a tied parameter comes twice."""
    aside = room is not None and hasattr(t, "placements")
    if not t.is_meta:
        return t if aside else t.to(home)
    # `empty_like` of what has no storage imports torch's compiler first, and of a DTensor takes a thousandth of a second
    shape = local(t)[1].shape
    out = room.empty(shape, t.dtype) if room is not None and aside else torch.empty(shape, dtype=t.dtype, device=home)
    return cut_as(t, out, tuple(t.shape))


def check_memory(model: Model, device: torch.device) -> None:
    """Refuse a model whose weights alone exceed the memory of `device`, before any of it is allocated."""
    if (there := memory_of(device)) is None:
        return
    have = there[1]
    need = sum(math.prod(r.stop - r.start for r in local(p)[0]) * p.itemsize for p in model.parameters())
    if need > have:
        room, aside = f"at most {size(have)}, the memory of {device}", " machine.offload," * (device.type != "cpu")
        refuse(None, "model", f"{size(need)} of weights", f"{room}: bf16, an adapter on nf4,{aside} or more ranks (fsdp)")


def check_adapter(model: Model, adapter: AdapterConfig, machine: Machine | None) -> None:
    """Refuse, before any weight is read, weights in 4 or 8 bits that cannot be divided among the tensor-parallel ranks."""
    if machine is not None and machine.tensor_parallel > 1 and adapter.quantize != "none":
        from .parallel.adapted import check_codes

        check_codes(model, adapter.quantize, machine.tensor_parallel)


def is_meta(device: str | torch.device | None) -> bool:
    """Whether nothing is to be allocated; a device that is not here is refused."""
    if device is None:
        return False
    check_device(device)
    return torch.device(device).type == "meta"
