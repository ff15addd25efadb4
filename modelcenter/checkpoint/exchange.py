"""Executes the copy plan: reads files into the parts of parameters that ranks hold, and writes files from them.

Each rank reads its runs (`intake.py`). The rest happens on the device of the parameters: blocks are cut out, sent in one all-to-all
for one turn or a few (`group.py`), and transposed and cast while they are copied into place. GPUs of a node that can access each
other's memory send nothing: each fetches its blocks from the others' buffers. A single rank does the same without sending. Writing
is the same in reverse.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..names import Lazy, Region, Shape, everything, trace
from ..parallel.peers import reach
from ..parallel.watch import beat
from .copy_plan import Block, Plan, Run, plan, row_of, within
from .folder import BinSlice, FileSlice, raw
from .group import Group, neighbours, typed
from .intake import Intake, buffer_size

ROOM = 2**33  # bytes of a rank's buffers on an accelerator, if it has twice as many to spare


def stored(source: Lazy) -> bool:
    """Whether all of a parameter's values come from files."""
    return all(isinstance(part.source, FileSlice | BinSlice) for part in trace(source, everything(source.shape)))


def set_out(sources: Mapping[str, Lazy], device: torch.device, share: int) -> Intake | None:
    """Begin to read what the ranks of one node will need, before it is known which of them holds what: together they hold
    everything. None with several nodes, whose ranks need only parts. `share`: the bytes that this rank's parameters will take. All
    ranks must call it, and communicate nothing else meanwhile."""
    group = neighbours()
    wholes = {name: everything(source.shape) for name, source in sources.items() if stored(source)}
    if group.size < dist.get_world_size() or not wholes:
        return None
    room = 0
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
        room = group.least(max(0, min(ROOM, (torch.cuda.mem_get_info(device)[0] - share) // 2)), device)
    todo = plan(sources, [wholes, *({} for _ in range(1, group.size))], in_order(sources, wholes))
    intake = Intake(todo, group, device, room)
    intake.mapped = reach(group.group, device.type, intake.bytes)
    return intake


@torch.no_grad()
def read(parameters: Mapping[str, tuple[Region, Tensor]], sources: Mapping[str, Lazy], group: Group,
         begun: Intake | None = None) -> None:
    """Fill this rank's part of each parameter (its region of the whole, and its tensor) from `sources`, casting to its dtype.
    All ranks of `group` must call it with the same names. `begun`: reading that was begun for the same sources. Errors:
    `InputError`, on all ranks if on one."""
    device = next(iter(parameters.values()))[1].device
    for name, (region, tensor) in parameters.items():
        if within(region, sources[name].shape) != region:
            tensor.zero_()  # rows that pad the vocabulary: nobody's values
    todo = planned(parameters, sources, group, device)
    failure: Exception | None = None

    def store(block: Block, values: Tensor) -> None:
        parameters[block.name][1][block.place].copy_(values.mT if block.turned else values)

    with nullcontext(begun) if begun is not None else Intake(todo, group, device) as intake:
        for turns, chunks, fault in intake:
            failure = failure or fault  # the others wait for this rank's blocks, whatever is in them
            pairs = [(turn[r], chunk) for turn, come in zip(turns, chunks, strict=True) for r, chunk in come.items()]
            chunk_of = {id(run): chunk for runs, chunk in pairs for run in runs}
            load = partial(part_of, chunk_of)
            take = [[b for turn in turns for b in todo.blocks(turn[rank], group.rank)] for rank in range(group.size)]
            if intake.mapped is not None:
                group.collect(take, load, store, intake.mapped.handle)
            else:
                give = [[b for turn in turns for b in todo.blocks(turn[group.rank], rank)] for rank in range(group.size)]
                group.trade(give, take, load, store, device)
            beat()
    group.agree(failure, device)


def open_roads(device: torch.device) -> None:
    """Connect the ranks in advance: at the first all-to-all NCCL connects each rank of a node with every other one, which takes a
    fifth of a second. All ranks must call it, and communicate nothing else meanwhile."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)  # of this thread
    group = neighbours()
    row = torch.zeros(group.size, dtype=torch.uint8, device=device)
    dist.all_to_all_single(torch.empty_like(row), row, group=group.group)


@dataclass(frozen=True, eq=False)
class Slot:
    """The place of a tensor in a file that is to be written, where its data begin at byte `start`."""

    shape: Shape
    dtype: torch.dtype
    file: Path
    start: int

    def __getitem__(self, region: Region) -> Tensor:
        raise TypeError("a place to write to has no values")


@torch.no_grad()
def write(parameters: Mapping[str, tuple[Region, Tensor]], sources: Mapping[str, Lazy], group: Group) -> None:
    """Write what the ranks hold of each parameter into files, which exist and have their final length; `sources` are made of the
    `Slot`s to which it belongs. What this rank has written is on disk when it returns. All ranks of `group` must call it with the
    same names. Errors: `InputError`, on all ranks if on one."""
    device = next(iter(parameters.values()))[1].device
    todo = planned(parameters, sources, group, device, once=True)
    size = buffer_size(todo.sources, group)
    hosts = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda") for _ in range(2)]
    files: dict[Path, int] = {}
    failure: Exception | None = None

    def load(block: Block) -> Tensor:
        part = parameters[block.name][1][block.place]
        return part.mT if block.turned else part

    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        written: Future[None] = pool.submit(lambda: None)
        for number, turn in enumerate(todo.turns(size)):
            mine, host = turn[group.rank], hosts[number % 2]
            chunk = host if device.type == "cpu" else torch.empty_like(host, device=device)
            give = [list(todo.blocks(runs, group.rank)) for runs in turn]
            take = [list(todo.blocks(mine, rank)) for rank in range(group.size)]
            group.trade(give, take, load, partial(put_part, dict.fromkeys(map(id, mine), chunk)), device)
            if chunk is not host:
                host.copy_(chunk)
            failure = failure or faulted(written)  # the others wait for this rank's blocks, whatever becomes of its own
            written = pool.submit(put_runs, mine, host, files, stack)
            beat()
        failure = failure or faulted(written)
        for file in files.values():
            failure = failure or faulted(pool.submit(os.fsync, file))
            beat()
    group.agree(failure, device)


def faulted(job: Future[Any]) -> Exception | None:
    """The error of the disk that ended a job, if there is one."""
    try:
        job.result()
    except OSError as error:
        return error
    return None


def put_runs(runs: Iterable[Run], host: Tensor, files: dict[Path, int], stack: ExitStack) -> None:
    """Write `runs` from a buffer to their places; each file is opened once, and closed by `stack`."""
    for run in runs:
        slot: Any = run.source
        if slot.file not in files:
            files[slot.file] = os.open(slot.file, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, files[slot.file])
        rest, at = raw(host[run.at : run.at + run.size]), slot.start + run.start * row_of(slot)
        while len(rest):  # a write may be short
            done = os.pwrite(files[slot.file], rest, at)
            if done == 0:
                raise OSError(errno.EIO, "the disk took no bytes", str(slot.file))
            rest, at = rest[done:], at + done


def planned(parameters: Mapping[str, tuple[Region, Tensor]], sources: Mapping[str, Lazy], group: Group, device: torch.device, *,
            once: bool = False) -> Plan:
    """The plan of all ranks, with the files' tensors in their order."""
    regions = group.regions({name: region for name, (region, _) in parameters.items()}, device)
    return plan(sources, regions, in_order(sources, parameters), once=once)


def in_order(sources: Mapping[str, Lazy], names: Iterable[str]) -> Any:
    """The files' tensors of which the parameters with these names are made, in order."""
    found = {id(p.source): p.source for n in names for p in trace(sources[n], everything(sources[n].shape))}
    return sorted(found.values(), key=position)


def part_of(chunk_of: Mapping[int, Tensor], block: Block) -> Tensor:
    """The block, in the buffer that holds its run."""
    run = block.run
    return typed(chunk_of[id(run)], run.at, run.size, run.source.dtype).view(run.shape)[block.region]


def put_part(chunk_of: Mapping[int, Tensor], block: Block, values: Tensor) -> None:
    part_of(chunk_of, block).copy_(values)


def position(source: Any) -> tuple[str, int]:
    """Where a tensor stands in the folder's files."""
    return str(source.file), source.start
