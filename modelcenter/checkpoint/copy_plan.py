"""The copy plan: which rows of which stored tensors each rank reads or writes, and which rank each part of them belongs to.

A stored tensor is cut into runs of whole rows, which are contiguous bytes of its file. Each run is assigned to one rank. That rank
reads it in one piece, and passes to each rank the block that belongs to that rank's part of a parameter. When a folder is written,
it assembles the run from such blocks. So every byte of a file is touched once, in long pieces, however the parameters are sharded:
along rows, along columns, head by head, transposed. Nothing here reads, sends or knows about devices. Ranks that plan from the same
tables get the same plan.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from ..names import Lazy, Region, Shape, trace

ALIGN = 16  # bytes: where a tensor of any dtype may begin


class Stored(Protocol):
    """A tensor of a file."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Want(NamedTuple):
    """`region` of a stored tensor belongs at `place` in a rank's part of the parameter `name`, transposed if `turned`."""

    name: str
    region: Region
    place: Region
    turned: bool


class Run(NamedTuple):
    """Rows `start` to `stop` of a stored tensor; in their rank's buffer they begin at byte `at`."""

    source: Stored
    start: int
    stop: int
    at: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start, *self.source.shape[1:]) if self.source.shape else ()

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.source.dtype.itemsize


class Block(NamedTuple):
    """`region` of a run's rows, which belongs at `place` in a rank's part of a parameter, transposed if `turned`."""

    run: Run
    region: Region
    name: str
    place: Region
    turned: bool

    @property
    def shape(self) -> Shape:
        return tuple(r.stop - r.start for r in self.region)

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.run.source.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """The stored tensors in the order of their files, and which part of each tensor each rank needs."""

    sources: Sequence[Stored]
    wants: Sequence[Mapping[int, Sequence[Want]]]  # by rank: the number of a source -> wants

    @cached_property
    def numbers(self) -> dict[int, int]:
        return {id(source): number for number, source in enumerate(self.sources)}

    def turns(self, size: int) -> Iterator[list[list[Run]]]:
        """The runs of each rank, as many at a time as fill each rank's buffer of `size` bytes, which holds the largest row."""
        turn: list[list[Run]] = [[] for _ in self.wants]
        rank, filled = 0, 0
        for number, source in enumerate(self.sources):
            row = row_of(source)
            for start, stop in self.spans(number):
                while start < stop:
                    rows = min(stop - start, (size - filled) // row)
                    if rows > 0:
                        turn[rank].append(Run(source, start, start + rows, filled))
                        start, filled = start + rows, aligned(filled + rows * row)
                    if start < stop:
                        rank, filled = rank + 1, 0
                        if rank == len(turn):
                            yield turn
                            turn, rank = [[] for _ in self.wants], 0
        if any(turn):
            yield turn

    def spans(self, number: int) -> list[tuple[int, int]]:
        """The rows of a source that any rank needs, as (start, stop) without overlap."""
        found: list[tuple[int, int]] = []
        for start, stop in sorted({rows_of(want.region) for wants in self.wants for want in wants.get(number, ())}):
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(stop, found[-1][1]))
            else:
                found.append((start, stop))
        return found

    def blocks(self, runs: Sequence[Run], rank: int) -> Iterator[Block]:
        """What `rank` needs from `runs`, in an order that is the same for every caller."""
        for run in runs:
            for want in self.wants[rank].get(self.numbers[id(run.source)], ()):
                first, last = rows_of(want.region)
                start, stop = max(first, run.start), min(last, run.stop)
                if start < stop:
                    yield cut(want, run, start, stop)


def row_of(source: Stored) -> int:
    """Bytes of a row; a tensor without dimensions is one."""
    return math.prod(source.shape[1:]) * source.dtype.itemsize


def cut(want: Want, run: Run, start: int, stop: int) -> Block:
    """The rows `start` to `stop` of a stored tensor, which are in `run`, of what is wanted."""
    if not want.region:
        return Block(run, (), want.name, (), False)
    begin = start - want.region[0].start
    axis = len(want.place) - 1 if want.turned else 0  # of the parameter, along which their rows lie
    place = list(want.place)
    place[axis] = slice(place[axis].start + begin, place[axis].start + begin + stop - start)
    return Block(run, (slice(start - run.start, stop - run.start), *want.region[1:]), want.name, tuple(place), want.turned)


def rows_of(region: Region) -> tuple[int, int]:
    return (region[0].start, region[0].stop) if region else (0, 1)


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def plan(sources: Mapping[str, Lazy], regions: Sequence[Mapping[str, Region]], order: Sequence[Stored], *,
         once: bool = False) -> Plan:
    """The plan for parameters that are stored as `sources`, of which each rank holds `regions`. `order`: all stored tensors, in
    order. What several ranks hold is wanted by all of them, or, with `once`, only by the first."""
    numbers = {id(source): number for number, source in enumerate(order)}
    wants: list[dict[int, list[Want]]] = []
    seen: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    for mine in regions:
        wants.append({})
        for name, region in mine.items():
            key = name, tuple((r.start, r.stop) for r in region)
            if once and key in seen:
                continue
            seen.add(key)
            inside = within(region, sources[name].shape)
            if any(r.start == r.stop for r in inside):
                continue
            for part in trace(sources[name], inside):
                sizes = [r.stop - r.start for r in part.region]
                place = tuple(slice(a, a + n) for a, n in zip(part.at, sizes[::-1] if part.turned else sizes, strict=True))
                wants[-1].setdefault(numbers[id(part.source)], []).append(Want(name, part.region, place, part.turned))
    return Plan(order, wants)


def within(region: Region, shape: Shape) -> Region:
    """The part of `region` that lies in a tensor of `shape`; rows that only pad it belong to nobody."""
    return tuple(slice(r.start, max(r.start, min(r.stop, n))) for r, n in zip(region, shape, strict=True))
