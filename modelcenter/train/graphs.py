"""Forward and backward of a micro-batch as one CUDA graph: recorded once, then launched by a single call of the host.

A step of a small model has thousands of kernels, and the host takes longer to launch them than the GPU to run them. If the shapes
of a micro-batch recur, so do the calls, and a record of them can be replayed: the kernels, their arguments, and the memory they
use, which the record reserves. What changes from one micro-batch to the next is copied to where the recorded kernels read it: the
batch, the number of targets and the loss scale. What dropout draws depends on the generator's position, which torch passes to a
graph at each replay and advances as the calls themselves would. So a run with graphs has the same bits as one without, and a
resumed run the same as an uninterrupted one, as far as the kernels themselves are deterministic.

Gradients. The first micro-batch of a step finds none: its backward creates them in the memory of the record, and they are assigned
to the parameters each time. Further micro-batches add to them. These are two records. The gradients of other shapes are copied to
where those of the first shapes are, so that any micro-batch may follow any other.

Several GPUs. A record includes their communication: the all-reduces of tensor parallelism; FSDP's all-gathers and reduce-scatters
(parallel/shards.py); and the averaging of gradients over replicas in the backward of a step's last micro-batch
(parallel/averaging.py), which is a separate record. Each rank records when its own shapes recur: to the other ranks a replay sends
what the calls would have sent.

The update of optimizers that wait for the norm and then make some hundred calls (optim/clipped.py) is recorded too, provided that
the gradients are where the records have them: not under tensor parallelism, where the update itself sums those of norms elsewhere.

shapes.py pads micro-batches to shapes that recur. What cannot be recorded runs as ordinary calls: packed sequences in fp32, which
the host cuts apart; what waits for the device or copies from the host; and what does not fit into memory. If a run then lacks
memory, it drops the records and repeats its step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..errors import printable
from ..ops._graph import recorded
from ..parallel.averaging import last
from ..parallel.machine import ROOM, Machine
from ..parallel.shards import replayed, within
from .shapes import fills

WARM = 3  # micro-batches of the same shapes before the first are recorded: libraries are there then, and have chosen their kernels
AGAIN = 1  # of other shapes
MOST = 64  # shapes that are recorded: as many of BERT-base's, of 65 to 128 tokens, took 1.2 GiB more than calls (one H200)
WORTH = 32  # micro-batches of a shape after which it may take the place of the one that was not used for longest
SEEN = 1024  # shapes that are counted
FAILURES = 3  # after which nothing is recorded any more

Arguments = Mapping[str, Any]
Scale = Tensor | float | None  # of the loss; a number where the host computes
Work = Callable[[Arguments, Scale], Tensor]  # forward and backward: arguments, loss scale -> the loss
T = TypeVar("T")
Kind = tuple[Literal["first", "later"], bool]  # of a step's micro-batches, and whether its backward averages over ranks


class Recorder(Protocol):
    """Records calls: `GPU`, or a stand-in for it in tests."""

    def room(self) -> bool:
        """Whether there is memory for a record."""

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """The calls of `work`, none of which is done: a function that does them, and where the result will be."""

    def drawn(self) -> Tensor:
        """The position of the device's random generator."""

    def rewind(self, drawn: Tensor) -> None:
        """Set the generator back to that position."""

    def tight(self) -> bool:
        """Whether other work may lack the memory that records hold."""

    def lacks(self, times: float) -> bool:
        """Whether work may run out of memory that needs so many times the peak so far."""

    def wait(self) -> None:
        """Wait for work that was started and whose memory is to be reused."""

    def close(self) -> None:
        """After a failure: leave torch as it was."""


class GPU:
    """Records on a GPU. All records share one pool of memory, because they are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()

    def room(self) -> bool:
        torch.cuda.empty_cache()  # what micro-batches that were not recorded have left
        free, _ = torch.cuda.mem_get_info(self.device)
        now, most = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        kept = torch.cuda.memory_reserved(self.device) - now  # what other records keep serves this one too
        return free + kept >= ROOM * (most - now)

    def drawn(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device)

    def rewind(self, drawn: Tensor) -> None:
        torch.cuda.set_rng_state(drawn, self.device)

    def tight(self) -> bool:
        free, total = torch.cuda.mem_get_info(self.device)
        return free < total / 2

    def lacks(self, times: float) -> bool:
        need = times * (torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device))
        if torch.cuda.mem_get_info(self.device)[0] >= need:
            return False
        torch.cuda.empty_cache()  # what other work has left serves this too
        return torch.cuda.mem_get_info(self.device)[0] < need

    def wait(self) -> None:
        # where segments can grow (train/launch.py), torch takes them back when the stream that recorded is idle; it is another one
        # that replays, and updates
        torch.cuda.synchronize(self.device)

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        return recorded(work, self.device, self.pool, watched=True)

    def close(self) -> None:
        """Torch's generator may believe that it is still being recorded, and would refuse to draw: it is given a new state, at the
        same place."""
        self.wait()
        generator = torch.cuda.default_generators[torch.cuda.current_device() if self.device.index is None else self.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        self.pool = torch.cuda.graph_pool_handle()


@dataclass
class Record:
    """The recorded calls of one kind of micro-batch, and where they leave the loss."""

    launch: Callable[[], object]
    loss: Tensor


@dataclass
class Shapes:
    """What is known about micro-batches of the same shapes; `inputs` and `scale` are what their records read."""

    seen: int = 0
    refused: bool = False
    inputs: dict[str, Any] = field(default_factory=dict)
    scale: Scale = None
    records: dict[Kind, Record] = field(default_factory=dict)


@dataclass
class Updates:
    """What is known about updates: how many were `seen` whose gradients were in the records. If there is a record of the update,
    what it reads, and the addresses of what it changes."""

    seen: int = 0
    launch: Callable[[], object] | None = None
    given: list[Tensor] = field(default_factory=list)
    places: list[int] = field(default_factory=list)


class Graphs:
    """The records of one model's micro-batches, valid while its parameters stay where they are. `tell` is called with a line about
    the first one, and about what could not be recorded. `repeats`: whether a step may be done again, for which no other rank
    waits."""

    def __init__(self, model: nn.Module, recorder: Recorder, tell: Callable[[str], object] = lambda line: None,
                 repeats: bool = True) -> None:
        self.model, self.recorder, self.tell, self.repeats = model, recorder, tell, repeats
        self.fills = fills(model)  # whether micro-batches are filled up, so that shapes recur
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.all = [*model.parameters(), *model.buffers()]
        self.shapes: OrderedDict[tuple[Any, ...], Shapes] = OrderedDict()  # the last used at the end
        self.gradients: dict[Tensor, Tensor] = {}  # the memory of all records' gradients; empty without a record
        self.updates = Updates()  # with these gradients
        self.places: list[int] = []  # of parameters and buffers, as the records know them
        self.ended = self.told = self.short = False  # `told`, `short`: it has been said that there is a record, or no room for one
        self.failures = 0
        self.largest = 1  # elements of the micro-batches that were done by calls

    def run(self, work: Work, arguments: Arguments, scale: Scale, averaging: bool = False) -> Tensor:
        """Do what `work` does with `arguments` and `scale`: return the loss, with its gradients added to those that are there; if
        it is `averaging`, these are then the mean over ranks."""
        key = None if self.ended else key_of(self.model, arguments, scale)
        first = all(p.grad is None for p in self.trained)
        kind: Kind = ("first" if first else "later", averaging)
        if first and self.gradients and self.places != self.here():
            self.drop()
        if key is None or not (first or self.held()):
            return self.by_calls(work, arguments, scale)
        shapes = self.known(key)
        record = shapes.records.get(kind)
        if record is None:
            shapes.seen += 1
            if shapes.refused or shapes.seen <= (AGAIN if self.gradients else WARM) or not self.free(shapes, arguments):
                return self.by_calls(work, arguments, scale)
            record = self.record(shapes, kind, work, arguments, scale)
            if record is None:
                return self.by_calls(work, arguments, scale)
        put(shapes, arguments, scale)
        record.launch()
        for p, gradient in self.gradients.items():
            p.grad = gradient
        replayed(self.model)
        return record.loss.clone()

    def by_calls(self, work: Work, arguments: Arguments, scale: Scale) -> Tensor:
        """Do what `work` does without a record. If other ranks wait for this one, no step can be repeated: then the records are
        dropped before their memory could be missing."""
        size = sum(v.numel() for v in arguments.values() if isinstance(v, Tensor))
        if self.gradients and not self.repeats and self.recorder.lacks(max(1.0, size / self.largest)):
            self.recorder.wait()
            self.end()
            self.tell("there is too little memory beside CUDA graphs: the run continues without them")
        self.largest = max(self.largest, size)
        return work(arguments, scale)

    def update(self, work: Callable[..., None], given: Sequence[Tensor], state: Iterable[Mapping[str, Any]]) -> None:
        """Do `work`, an update that reads the tensors `given` and changes those of `state`, beside gradients and parameters."""
        if not self.ended and self.held():
            self.updates.seen += 1
            here = places_of(value for each in state for value in each.values() if isinstance(value, Tensor))
            launch = self.updates.launch if self.updates.places == here else self.record_update(work, given, here)
            if launch is not None:
                for read, value in zip(self.updates.given, given, strict=True):
                    read.copy_(value)
                launch()
                return
        work(*given)

    def record_update(self, work: Callable[..., None], given: Sequence[Tensor], places: list[int]) -> Callable[[], object] | None:
        """Record `work`. If it cannot be, return None and leave everything as it was."""
        if self.updates.seen <= AGAIN:
            return None
        read = [value.clone() for value in given]
        self.updates = Updates(self.updates.seen, None, read, places)
        if not self.recorder.room():
            self.tell("there is too little memory for a CUDA graph of updates")
            return None
        try:
            self.updates.launch, _ = self.recorder(lambda: work(*read))
        except Exception as error:
            self.failed(error, "updates")
            self.updates.places = places  # so that it is not tried again
        return self.updates.launch

    def attempt(self, step: Callable[[], T]) -> T:
        """The result of `step`. If it runs out of memory while there are records, they are dropped and it is tried again."""
        if self.ended or not self.repeats or any(p.grad is not None for p in self.trained):
            return step()
        drawn = self.recorder.drawn()
        try:
            return step()
        except torch.OutOfMemoryError:
            if not self.gradients:
                raise
        # what the error held is let go
        self.end()
        self.tell("out of memory beside CUDA graphs: the step is repeated, and the run continues, without them")
        for p in self.trained:
            p.grad = None
        self.recorder.rewind(drawn)
        return step()

    def held(self) -> bool:
        """Whether the current gradients are those of the records."""
        return bool(self.gradients) and all(p.grad is self.gradients.get(p) for p in self.trained)

    def here(self) -> list[int]:
        return places_of(self.all)

    def known(self, key: tuple[Any, ...]) -> Shapes:
        """What is known about the shapes `key`, which become the last used. Shapes that were unused for longest and have no record
        are forgotten."""
        if key not in self.shapes:
            self.shapes[key] = Shapes()
            if len(self.shapes) > MOST + SEEN:
                del self.shapes[next(key for key, shapes in self.shapes.items() if not shapes.records)]
        self.shapes.move_to_end(key)
        return self.shapes[key]

    def free(self, shapes: Shapes, arguments: Arguments) -> bool:
        """Whether `shapes` may have another record: there is memory, and a free slot; shapes that recur often take slots from
        others."""
        with_records = [key for key, other in self.shapes.items() if other.records]
        full = not shapes.records and len(with_records) >= MOST
        if full and shapes.seen <= WORTH:
            return False
        if not self.recorder.room():
            shapes.seen = -WORTH  # to ask costs time
            if not self.short:
                self.tell(f"there is too little memory for a CUDA graph of {said(arguments)}")
            self.short = True
            return False
        if full:
            del self.shapes[with_records[0]]
        return True

    def record(self, shapes: Shapes, kind: Kind, work: Work, arguments: Arguments, scale: Scale) -> Record | None:
        """Record `work`. If that is impossible, return None and leave everything as it was."""
        before = {p: p.grad for p in self.trained}
        hooks = []
        try:
            if not shapes.inputs:
                shapes.inputs = {key: v.clone() if isinstance(v, Tensor) else v for key, v in arguments.items()}
                shapes.scale = scale.clone() if isinstance(scale, Tensor) else scale
            if kind[0] == "first" and self.gradients:
                hooks = [p.register_post_accumulate_grad_hook(self.bring) for p in self.trained]
                last(self.model)  # what is sent is what was brought
            launch, loss = self.recorder(lambda: within(self.model, lambda: work(shapes.inputs, shapes.scale)))
            found: dict[Tensor, Tensor] = {p: p.grad for p in self.trained if p.grad is not None}
            others = found.keys() ^ (self.gradients or found).keys()
            if others or any(g is not self.gradients.get(p, g) for p, g in found.items()):
                raise ValueError("it has gradients of other parameters")
        except Exception as error:
            shapes.refused = True
            self.failed(error, said(arguments))
            return None
        finally:
            for hook in hooks:
                hook.remove()
            for p, gradient in before.items():
                p.grad = gradient
        if not self.gradients:
            self.gradients, self.places = found, self.here()
        shapes.records[kind] = record = Record(launch, loss)
        if not self.told:
            self.tell(f"forward and backward of {said(arguments)} run as a CUDA graph from here on")
            self.told = True
        return record

    @torch.no_grad()
    def bring(self, p: Tensor) -> None:
        """Copy the gradients of other shapes' backward to where those of the first shapes are."""
        if p.grad is not None and p in self.gradients:
            p.grad = self.gradients[p].copy_(p.grad)

    def failed(self, error: Exception, what: str) -> None:
        """Note that `what` could not be recorded. All records are given up, because the generator that they use may be broken."""
        self.drop()
        self.recorder.close()
        self.failures += 1
        self.ended = self.failures >= FAILURES
        why = printable(" ".join(str(error).split()))[:160]
        self.tell(f"{what} cannot be a CUDA graph and run without one: {type(error).__name__}: {why}")

    def drop(self) -> None:
        """Drop all records and free their memory."""
        for shapes in self.shapes.values():
            shapes.records, shapes.inputs, shapes.scale = {}, {}, None
        self.gradients, self.places = {}, []
        self.updates = Updates()

    def make_room(self) -> None:
        """Before work of another kind, whose memory was not measured: drop the records if little memory is left."""
        if self.gradients and self.recorder.tight():
            self.recorder.wait()
            self.drop()

    def end(self) -> None:
        """Record nothing any more."""
        self.drop()
        self.ended = True


def places_of(tensors: Iterable[Tensor]) -> list[int]:
    """The addresses of tensors in this process's memory."""
    return [getattr(x, "_local_tensor", x).data_ptr() for x in tensors]  # a DTensor's own is 0


def key_of(model: nn.Module, arguments: Arguments, scale: Scale) -> tuple[Any, ...] | None:
    """What micro-batches with the same record have in common; None for those that have none."""
    if "cu_seq_lens_q" in arguments and (getattr(model, "prefixed", False) or "max_length_q" not in arguments):
        return None
    each = ((name, (v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v) for name, v in sorted(arguments.items()))
    return (model.training, isinstance(scale, Tensor) or scale, *each)


def put(shapes: Shapes, arguments: Arguments, scale: Scale) -> None:
    """Copy what a record reads to where it reads it."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            shapes.inputs[name].copy_(value)
    if isinstance(scale, Tensor) and isinstance(shapes.scale, Tensor):
        shapes.scale.copy_(scale)


def said(arguments: Arguments) -> str:
    """Arguments in words."""
    ids = arguments.get("input_ids")
    return f"batches of {' x '.join(map(str, ids.shape))} tokens" if isinstance(ids, Tensor) else "batches"


def graphs_of(model: nn.Module, machine: Machine, device: torch.device, tell: Callable[[str], object]) -> Graphs | None:
    """The graphs of a run, if it may have any: not if the loss needs other ranks' texts (parallel/gather.py), for which a rank that
    records alone would wait in vain. Without `cuda_graphs` nothing is recorded, but batches are padded in the same way, so that the
    bits are the same."""
    gathers = any(getattr(module, "gather", None) is not None for module in model.modules())
    if not replace(machine, cuda_graphs=True).graphs or device.type != "cuda" or gathers:
        return None
    graphs = Graphs(model, GPU(device), tell, repeats=machine.ranks == 1)
    if not machine.cuda_graphs:
        graphs.end()
    return graphs
