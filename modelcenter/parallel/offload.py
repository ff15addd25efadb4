"""Offload: what the host does, while the device computes, for a model whose weights are in host memory.

FSDP copies the weights of a block to the device and its gradients back (`apply.py: shard`; for a single rank `ahead.py`). Two tasks
are left, and a thread does both:

* It accumulates the gradients of several micro-batches. FSDP would add them itself, inside the backward, which would then wait for
  every copy: a step of GPT-2 XL in four micro-batches took 19 s, of which only 2 were computation. So each backward starts without
  gradients, and the thread adds those that it leaves to the others while the device runs the next micro-batch.
* It updates the weights. An update depends on all gradients (whether they are finite, and their norm), so it cannot begin before
  the backward has ended. But it need not end before the next forward begins: the outermost layers are updated first, then one block
  after another, and the forward of each waits only for its own update. The results have the same bits as with a forward that waits
  for the whole update.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn

from .ahead import Ahead
from .averaging import local
from .blocks import units

Job = tuple[Tensor, Callable[[], None]]  # a parameter, and what updates it
ALIGN = 256  # bytes; torch's allocators do so


class Aside:
    """The gradients of a model that are being accumulated, and the updates under way. `model`: already wrapped by FSDP."""

    def __init__(self, model: nn.Module, alone: bool) -> None:
        self.model = ref(model)
        self.pool = beside()
        self.kept: list[nn.Parameter] = []  # the parameters on the host
        self.sums: dict[Tensor, Tensor] = {}  # of the micro-batches so far, by the parameter
        self.adding: Future[None] | None = None
        self.updates: dict[int, Future[None]] = {}  # by the number of the unit
        # hooks of what is compiled are compiled too, and cannot wait
        self.at_once = any(getattr(unit, "_compiled_call_impl", None) is not None for unit in units(model))
        self.unit_of: dict[Tensor, int] = {}
        for number, unit in enumerate((model, *units(model))):
            unit.register_forward_pre_hook(partial(arrived, ref(self), number), prepend=True)  # before FSDP's, which sends weights
        self.ahead = Ahead((model, *units(model)), partial(idle, ref(self))) if alone else None

    def take(self) -> None:
        """Take the gradients that a micro-batch has left, and have them added to the earlier ones."""
        model = self.model()
        now: list[Any] = list(model.parameters()) if model is not None else []
        # where zero=1 and 2 keep weights on the device, FSDP shows these in their place, of which tensor parallelism has parts
        if all(hasattr(p, "placements") and "fsdp" in p.device_mesh.mesh_dim_names for p in now):
            self.kept = now
        left = [(p, p.grad) for p in self.kept if p.grad is not None]
        for p, _ in left:
            p.grad = None
        if left:
            self.added()
            self.adding = self.pool.submit(self.add, left)

    @torch.no_grad()
    def add(self, left: Sequence[tuple[Tensor, Tensor]]) -> None:
        known = [(local(self.sums[p]), local(grad)) for p, grad in left if p in self.sums]
        if known:
            torch._foreach_add_([total for total, _ in known], [grad for _, grad in known])
        self.sums.update((p, grad) for p, grad in left if p not in self.sums)

    def added(self) -> None:
        """Wait until no gradients are being added. Errors of the thread are raised here."""
        adding, self.adding = self.adding, None
        if adding is not None:
            adding.result()

    def give(self) -> None:
        """Put the sums where optimizers look for gradients."""
        if self.ahead is not None:
            self.ahead.forget()
        if self.adding is not None:
            self.take()
            self.added()
            for p, total in self.sums.items():
                p.grad = total
            self.sums = {}

    def later(self, jobs: Sequence[Job]) -> None:
        """Do `jobs` in the order in which a forward needs their parameters. The updated values may be read after `finish`, or in a
        forward."""
        self.finish()
        model, mine = self.model(), dict[int, list[Callable[[], None]]]()
        if model is not None and any(p not in self.unit_of for p, _ in jobs):  # parameters have come since
            self.unit_of = dict.fromkeys(model.parameters(), 0)
            self.unit_of |= {p: number for number, unit in enumerate(units(model), 1) for p in unit.parameters()}
        for p, work in jobs:
            mine.setdefault(self.unit_of[p], []).append(work)
        self.updates = {number: self.pool.submit(one_by_one, mine[number]) for number in sorted(mine)}

    def arrived(self, number: int) -> None:
        """Wait until a unit is updated. Errors of the thread are raised here."""
        if number == 0 and self.ahead is not None:
            self.ahead.forget()  # what is on its way is of an earlier forward
        if self.at_once and number == 0:
            self.finish()
        update = self.updates.pop(number, None)
        if update is not None:
            update.result()

    def finish(self) -> None:
        """Wait until all is updated."""
        while self.updates:
            self.updates.pop(min(self.updates)).result()


def beside() -> ThreadPoolExecutor:
    """A thread with most of this process's threads for what it computes. Two of sixteen are left to issue the device's calls
    meanwhile: steps that wait for these are 5 to 15 % faster so (benchmarks/README.md)."""
    threads = torch.get_num_threads()

    def prepare() -> None:
        torch.set_flush_denormal(True)
        torch.set_num_threads(threads - threads // 8)

    pool = ThreadPoolExecutor(1, "offload", initializer=prepare)
    pool.submit(torch.get_num_threads).result()
    torch.set_num_threads(threads)  # of threads that start later too
    return pool


class Room:
    """Memory of the host that `device` reaches by itself, for tensors of so many bytes in all (`ALIGN` more for each). torch's own
    comes in powers of two, which for the weights of GPT-2 XL are half as many bytes again."""

    def __init__(self, size: int, device: torch.device) -> None:
        import numpy as np

        self.memory, self.at = np.empty(size, np.uint8), 0
        if device.type == "cuda":
            torch.from_numpy(self.memory).zero_()  # by all threads: one alone would find the pages one by one
            address, cuda = self.memory.ctypes.data, torch.cuda.cudart()
            if int(cuda.cudaHostRegister(address, size, 0)) == 0:
                finalize(self.memory, cuda.cudaHostUnregister, address).atexit = False
            else:  # FSDP pins weights in memory of torch's
                with suppress(RuntimeError):
                    torch.ones((), device=device)  # CUDA keeps an error for the next kernel that is launched: this one

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor there, its values unset."""
        start, size = self.at, prod(shape) * dtype.itemsize
        self.at += -(-size // ALIGN) * ALIGN
        # a storage of its own, or torch.save would write all of the room; and of a DTensor whose part begins in one, not even that
        return torch.from_numpy(self.memory[start : start + size]).view(dtype).view(tuple(shape))


def one_by_one(jobs: list[Callable[[], None]]) -> None:
    while jobs:
        jobs.pop(0)()  # which lets go of its gradient


def arrived(aside: "ref[Aside]", number: int, unit: nn.Module, args: Any) -> None:
    """Before the forward of a unit."""
    here = aside() if not torch.compiler.is_compiling() else None
    if here is not None:
        here.arrived(number)


def idle(aside: "ref[Aside]", number: int) -> bool:
    """Whether a unit is not being updated."""
    update = here.updates.get(number) if (here := aside()) is not None else None
    return update is None or update.done()


KNOWN: WeakKeyDictionary[nn.Module, Aside] = WeakKeyDictionary()  # no copy that is made of a model is in it


def aside_of(model: nn.Module) -> Aside | None:
    return KNOWN.get(model)


def keep(model: nn.Module, alone: bool) -> None:
    """From now on add up gradients aside, and let updates be finished later, of `model`, whose weights are on the host; all of
    them on that of one rank, if it is `alone`."""
    KNOWN[model] = Aside(model, alone)
