"""Data parallelism with replicas: averages their gradients over the ranks while the backward still runs.

Gradients are sent in buckets, each as soon as its last gradient is computed, and always in the same order, so that all ranks send
the same bucket at the same time (Li et al., 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
section 3.2). torch's DistributedDataParallel does this too, but wraps the model and keeps gradients in its own buckets. Here they
stay where the backward put them, so that backward and all-reduces together can be a CUDA graph (train/graphs.py).

As with FSDP, every backward does this, also in your own loop, unless it is told to wait for the last one of a step. If a backward
adds to gradients that were averaged before, the sum is averaged again; that does no harm, because the earlier part is the same on
all ranks.

A copy of such a model (`copy.deepcopy`, torch's `AveragedModel`) averages its own gradients over the same ranks. An unpickled one
does not, because the process that reads it may be alone.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops._mode import exporting
from .device import LOW

BUCKET = 64 * 2**20  # bytes; 340 GB/s for all of a 13B's gradients at once on eight H200s are 290 for parts of this size


NUMBERS = count()
LOOKED: WeakValueDictionary[str, "Averaging"] = WeakValueDictionary()  # by their names


class Averaging:
    """Averages the gradients of `model` over the ranks of `group`, each of which has a replica of it.

    Gradients in low precision are summed in fp32. `waits`: the next backward leaves gradients as they are.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.model, self.group, self.waits, self.compiled = ref(model), group, False, False
        self.name = str(next(NUMBERS))
        LOOKED[self.name] = self
        self.hooks: dict[Tensor, Any] = {}  # of each trained parameter
        self.idle: set[Tensor] = set()  # without a gradient in the backward before: nobody waits for them
        self.forget()

    def forget(self) -> None:
        """No backward is under way."""
        self.missing: list[set[Tensor]] = []  # of each bucket
        self.formed: set[Tensor] = set()
        self.sent: set[Tensor] = set()
        self.under_way: list[Callable[[], None]] = []  # of each bucket that is sent

    def __call__(self, model: nn.Module, args: Any) -> None:
        """Before a forward: parameters may have been added, frozen or thawed. A compiler watches once, while it traces this; the
        list makes it trace again when other parameters are trained (torch 2.11 does not)."""
        if torch.is_grad_enabled() and not exporting():
            if torch.compiler.is_compiling():
                _ = [id(p) for p in model.parameters() if p.requires_grad]
                looked(self.name)
            else:
                self.watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """That of the copy of the model, of whose hooks this is one. The copy is there, and has nothing yet; its parameters are
        made here, because it may never see a forward that is not compiled."""
        model = self.model()
        if model is None or id(model) not in memo:
            return watch  # of a shallow copy, whose parameters are the model's
        copy = memo[id(model)]
        made = KNOWN[copy] = Averaging(copy, self.group)
        made.take(deepcopy([p for p in model.parameters() if p.requires_grad], memo))
        return made

    def __reduce__(self) -> Any:
        return partial, (watch,)  # which does not know the model that is read

    def watch(self) -> None:
        """Find out which parameters are trained now."""
        self.forget()  # of a backward that has failed
        model = self.model()
        trained: list[Any] = [p for p in model.parameters() if self.trains(p)] if model is not None else []
        if len(trained) != len(self.hooks) or not all(p in self.hooks for p in trained):
            self.take(trained)
        for p in trained:  # torch swaps what is below a DTensor that is cast or moved, and then calls no hook of before
            p._post_accumulate_grad_hooks = p._post_accumulate_grad_hooks

    def trains(self, p: Tensor) -> bool:
        """Whether a gradient may be formed; of a compiled model, also where one is only after a change that nobody here sees."""
        return p.requires_grad or (self.compiled and p.is_leaf and p.is_floating_point())

    def take(self, trained: Sequence[Tensor]) -> None:
        self.idle, self.buckets = set(), buckets_of(trained)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.hook(trained)

    def hook(self, trained: Sequence[Tensor]) -> None:
        """Register for their gradients, after all hooks that exist so far."""
        heard = WeakMethod(self.hear)  # Python does not see that a tensor holds its hooks, and would never let go of both

        def formed(p: Tensor) -> None:
            hear = heard()
            if hear is not None:
                hear(p)

        for hook in self.hooks.values():
            hook.remove()
        self.hooks = {}
        for p in trained:
            frozen = not p.requires_grad  # then torch registers none
            self.hooks[p] = p.requires_grad_().register_post_accumulate_grad_hook(formed)
            if frozen:
                p.requires_grad_(False)

    def hear(self, p: Tensor) -> None:
        """A backward has computed a gradient: send each bucket that is complete, if all before it were sent."""
        if self.waits:
            return
        if not self.missing:  # the first of this backward
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self.missing = [set(bucket) - self.idle for bucket in self.buckets]
        self.formed.add(p)
        self.missing[self.bucket_of[p]].discard(p)
        while len(self.under_way) < len(self.buckets) and not self.missing[len(self.under_way)]:
            self.send(p for p in self.buckets[len(self.under_way)] if p not in self.idle)

    def send(self, some: Iterable[Tensor]) -> None:
        some = [p for p in some if p.grad is not None and p not in self.sent]
        self.under_way.append(send([p.grad for p in some if p.grad is not None], self.group))
        self.sent.update(some)

    def finish(self) -> None:
        """At the end of a backward: send the buckets that waited for gradients which were not computed, then gradients that were
        not expected."""
        for bucket in self.buckets[len(self.under_way) :]:
            self.send(bucket)
        self.send([*self.hooks, *self.unwatched()])
        for done in self.under_way:
            done()
        self.idle = self.hooks.keys() - self.formed
        self.forget()

    def unwatched(self) -> list[Tensor]:
        """Trained parameters of a compiled model that came after the compiler had traced it."""
        model = self.model() if self.compiled else None
        return [] if model is None else [p for p in model.parameters() if p.requires_grad and p not in self.hooks]


def looked(name: str) -> None:
    """`watch` of a compiled model, which a compiler calls while it traces, and which is no part of what it compiles. torch 2.11's
    passes on nothing but constants, which a number that varies is not."""
    LOOKED[name].compiled = True
    LOOKED[name].watch()


looked._dynamo_marked_constant = True  # type: ignore[attr-defined]  # by torch.compiler.assume_constant_result, which imports it
KNOWN: WeakKeyDictionary[nn.Module, Averaging] = WeakKeyDictionary()


def average(model: nn.Module, group: dist.ProcessGroup) -> None:
    """From now on average the gradients of `model` over the ranks of `group`."""
    KNOWN[model] = Averaging(model, group)
    watch(model)
    model.register_forward_pre_hook(KNOWN[model])


def watch(model: nn.Module, args: Any = None) -> None:
    """Know which parameters of `model` are trained now, if its gradients are averaged."""
    if model in KNOWN:
        KNOWN[model].watch()


def last(model: nn.Module) -> None:
    """From now on average gradients after what hooks, registered until now, do with them."""
    if model in KNOWN:
        KNOWN[model].hook(list(KNOWN[model].hooks))


def wait(model: nn.Module, waits: bool) -> None:
    """Whether the next backward leaves the gradients of `model` as they are, because it is not the last of its step."""
    KNOWN[model].waits = waits


def buckets_of(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of one dtype that are sent together. A backward begins with the last."""
    buckets: list[list[Tensor]] = []
    size = BUCKET
    for p in reversed(parameters):
        if size >= BUCKET or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += local(p).nbytes
    return buckets


def send(some: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to sum gradients. Calling the result waits for the sums and leaves the means in their place."""
    gradients = [local(g) for g in some]
    wide = [g.float() if g.dtype in LOW.values() else g for g in gradients]
    if not wide:
        return lambda: None
    work = group.allreduce_coalesced(wide, dist.AllreduceCoalescedOptions())  # a sum

    def finish() -> None:
        work.wait()
        torch._foreach_div_(wide, group.size())
        for g, w in zip(gradients, wide, strict=True):
            if g is not w:
                g.copy_(w)

    return finish


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that tensor parallelism has split."""
    spread: Any = tensor
    part: Tensor = spread.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()
