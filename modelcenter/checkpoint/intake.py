"""How a rank reads its part of the files: with several threads, turn by turn, ahead of the consumer.

The bytes go into one of two buffers on the host or, if the parameters are on an accelerator, through pinned memory into as many
buffers there as fit.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import InputError
from ..parallel.peers import Mapped
from .copy_plan import Plan, Run, Stored, aligned, row_of
from .folder import raw
from .group import Group

LEAST, MOST = 2**20, 2**26  # bytes of a rank's buffer
TURNS = 64  # into which a folder is cut, where the buffers are between the two
THREADS = 4, 16  # of a rank that read, at least and at most
# Turns that are sent at once, and turns that are being read at once: through as many pinned buffers, so that what is read into one
# is no hurry of what is copied from another.
PACE = {"cpu": (1, 1), "cuda": (4, 3)}
PIECE = 2**23  # bytes that a thread reads at a time, at least


class Buffer:
    """Bytes for one turn where the parameters are: on the host, or on a device to which they come by a road of their own."""

    def __init__(self, there: Tensor, road: "torch.cuda.Stream | None") -> None:
        self.there, self.road = there, road
        if road is not None:
            self.come, self.used = torch.cuda.Event(), torch.cuda.Event()
            self.done()

    def take(self, host: Tensor, size: int) -> None:
        """Bring the first `size` bytes from the host's pinned memory, once nobody uses what was here."""
        if self.road is not None:
            self.road.wait_event(self.used)
            with torch.cuda.stream(self.road):
                self.there[:size].copy_(host[:size], non_blocking=True)
            self.come.record(self.road)

    def ready(self) -> Tensor:
        """The bytes, for the stream that is current."""
        if self.road is not None:
            torch.cuda.current_stream(self.there.device).wait_event(self.come)
        return self.there

    def done(self) -> None:
        """What comes next may take the place of what has come, once the stream that is current is so far."""
        if self.road is not None:
            self.used.record(torch.cuda.current_stream(self.there.device))


Told = SimpleQueue[BaseException | None]  # of each piece what was wrong with it


class Readers:
    """Threads that read pieces of files, first told first read. To tell them takes a millionth of a second: thousands of futures
    took as long as the tenth part of what they read."""

    def __init__(self, count: int) -> None:
        self.pieces: SimpleQueue[tuple[Callable[..., object], int, int, memoryview, Told] | None] = SimpleQueue()
        self.threads = [Thread(target=self.work, daemon=True) for _ in range(count)]

    def work(self) -> None:
        while (piece := self.pieces.get()) is not None:
            read, start, stop, into, told = piece
            try:
                read(start, stop, into)
                told.put(None)
            except BaseException as error:  # it is raised where it is waited for
                told.put(error)

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(len(self.threads)):
            self.pieces.put(None)
        for thread in self.threads:  # nothing is written into a buffer that is gone
            thread.join()


@dataclass(frozen=True, eq=False)
class Reading:
    """What is being read into one buffer, in so many pieces."""

    pieces: int
    told: Told

    def wait(self) -> Exception | None:
        """Until all is there; what a file had against it. Any other error is raised."""
        failure: Exception | None = None
        for _ in range(self.pieces):
            error = self.told.get()
            if isinstance(error, InputError | OSError):
                failure = failure or error
            elif error is not None:
                raise error
        return failure


class Intake:
    """What a rank reads of stored tensors, turn by turn; a thread sees to it, as far ahead of who asks as there are buffers."""

    def __init__(self, todo: Plan, group: Group, device: torch.device, room: int = 0) -> None:
        self.device, self.rank, size = device, group.rank, buffer_size(todo.sources, group)
        self.turns = list(todo.turns(size))
        self.together, self.ahead = PACE.get(device.type, PACE["cpu"])
        self.count, self.size = min(len(self.turns), max(self.together + self.ahead, room // size)), size
        self.mapped: Mapped | None = None  # where the buffers are, if other ranks reach them
        self.threads = readers(group)
        self.free: SimpleQueue[Buffer | None] = SimpleQueue()
        self.come: SimpleQueue[tuple[Buffer, Exception | None] | BaseException] = SimpleQueue()
        self.thread, self.over = Thread(target=self.work, daemon=True), False

    @property
    def step(self) -> int:
        """Bytes from one buffer to the next."""
        return aligned(self.size)

    @property
    def bytes(self) -> int:
        """Of all buffers."""
        return self.count * self.step

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over = True
        self.free.put(None)
        self.thread.join()  # nothing is read from files that are closed then
        self.free, self.come = SimpleQueue(), SimpleQueue()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is mapped goes at once
            self.mapped = None
            torch.cuda.empty_cache()  # of gigabytes that nobody needs in one piece again

    def work(self) -> None:
        try:
            self.fetch()
        except BaseException as error:  # it is raised where the turn is asked for
            self.come.put(error)

    def fetch(self) -> None:
        """Read all turns, each into a buffer that is free."""
        road, hosts = None, [torch.empty(0, device="cpu")]
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
            road = torch.cuda.Stream(self.device)
            count = min(self.ahead, len(self.turns))
            hosts = [torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(count)]
        own = None if self.mapped is None else self.mapped.buffer
        for there in (torch.empty(self.bytes, dtype=torch.uint8, device=self.device) if own is None else own).split(self.step):
            self.free.put(Buffer(there, road))
        under_way: deque[tuple[Buffer, Tensor, int, Reading]] = deque()
        with Readers(self.threads) as threads:
            for number, turn in enumerate(self.turns):
                if len(under_way) == self.ahead:
                    self.hand_on(*under_way.popleft())
                buffer, mine = self.free.get(), turn[self.rank]
                if buffer is None or self.over:
                    break
                host = buffer.there if road is None else hosts[number % self.ahead]
                under_way.append((buffer, host, end_of(mine), begin(mine, host, threads)))
            while under_way:
                self.hand_on(*under_way.popleft())
        if road is not None:
            road.synchronize()

    def hand_on(self, buffer: Buffer, host: Tensor, size: int, reading: "Reading") -> None:
        """Wait for what is being read, and give it to who asks."""
        failure = reading.wait()
        buffer.take(host, size)
        if buffer.road is not None:
            buffer.come.synchronize()  # the next turn is read into this host's memory
        self.come.put((buffer, failure))

    def __iter__(self) -> Iterator[tuple[list[list[list[Run]]], list[Mapping[int, Tensor]], Exception | None]]:
        """A few turns at a time, of each the bytes of this rank's runs, or of each rank's where they are mapped, and what a file
        had against one."""
        for first in range(0, len(self.turns), self.together):
            turns = self.turns[first : first + self.together]
            buffers, failure = [], None
            for _ in turns:
                buffer, fault = self.next()
                buffers.append(buffer)
                failure = failure or fault
            mine = [buffer.ready() for buffer in buffers]
            yield turns, [{self.rank: there} | self.others(first + k) for k, there in enumerate(mine)], failure
            for buffer in buffers:
                buffer.done()
                self.free.put(buffer)

    def others(self, number: int) -> dict[int, Tensor]:
        """The buffers of other ranks for the turn of that number: all take theirs in one order and give them back in it."""
        if self.mapped is None:
            return {}
        at, group = number % self.count * self.step, self.mapped.group
        return {r: self.mapped.handle.get_buffer(r, (self.size,), torch.uint8, at) for r in range(group.size()) if r != self.rank}

    def next(self) -> tuple[Buffer, Exception | None]:
        """What was read in the next turn, and what a file had against it."""
        found = self.come.get()
        if isinstance(found, BaseException):
            raise found
        return found


def end_of(runs: Sequence[Run]) -> int:
    """Bytes that runs take of a buffer."""
    return max((run.at + run.size for run in runs), default=0)


def begin(runs: Iterable[Run], host: Tensor, threads: Readers) -> Reading:
    """Start to read `runs` into the host's memory, in pieces."""
    told: Told = SimpleQueue()
    pieces, into = 0, raw(host)
    for run in runs:
        source: Any = run.source
        row = run.size // (run.stop - run.start)
        step = max(1, PIECE // max(1, row))
        for start in range(run.start, run.stop, step):
            stop = min(run.stop, start + step)
            at = run.at + (start - run.start) * row
            threads.pieces.put((source.read, start, stop, into[at : at + (stop - start) * row], told))
            pieces += 1
    return Reading(pieces, told)


def readers(group: Group) -> int:
    """Threads of a rank that read: its share of the cores, within `THREADS`. A thread copies out of the page cache at the rate of
    one core, far below what a GPU takes."""
    least, most = THREADS
    return min(most, max(least, (os.cpu_count() or 1) // group.size))


def buffer_size(sources: Sequence[Stored], group: Group) -> int:
    """Bytes of a rank's buffer: a small part of what it reads of the folder, and a row at least."""
    share = sum(row_of(source) * (source.shape[0] if source.shape else 1) for source in sources) // group.size
    return max(1, min(MOST, max(LEAST, share // TURNS), share), *map(row_of, sources))
