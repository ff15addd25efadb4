"""Batches in an order that can be resumed from one number: the position, counted in samples since the start of training.

The example at a position is a pure function of that position (data/order.py), and so is the end of the batch that begins there. So
a batch is a range of positions, however many ranks or micro-batches share it, and continuing from any position is exact.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops.cross_entropy import ignored
from .collate import Batch
from .examples import Examples, Packable
from .order import Order, Shuffled, Straight

MOST = 2**20  # samples of a step: its micro-batches are all made before the first is computed


class Blank(Batch):
    """One sample whose labels are all ignored: it adds nothing to a loss, and its tokens are not counted."""


class Chain(Examples):
    """The examples of several sources of one kind, one source after the other."""

    def __init__(self, sources: Sequence[Examples]) -> None:
        self.sources, self.padded = sources, sources[0].padded
        self.ends = np.cumsum([len(source) for source in sources])
        self.lengths = np.concatenate([source.lengths for source in sources])
        self.written = sum(source.written for source in sources)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def size(self) -> int:
        """The most tokens that an example may have, if the sources can be packed."""
        return max(cast(Packable, source).size for source in self.sources)

    def at(self, epoch: int, index: int) -> Any:
        return self.several([(epoch, index)])[0]

    def several(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """Those of each source at once."""
        epochs, index = np.array(places).T
        of = np.searchsorted(self.ends, index, "right")
        index = index - np.concatenate([[0], self.ends])[of]
        found: list[Any] = [None] * len(places)
        for source in np.unique(of).tolist():
            here = np.flatnonzero(of == source)
            theirs = list(zip(epochs[here].tolist(), index[here].tolist(), strict=True))
            for k, example in zip(here.tolist(), self.sources[source].several(theirs), strict=True):
                found[k] = example
        return found

    def collate(self, examples: list[Any]) -> Batch:
        return self.sources[0].collate(examples)

    def pack(self, examples: list[Any]) -> Batch:
        """One row of them, if the sources can be packed."""
        return cast(Packable, self.sources[0]).pack(examples)


@dataclass(frozen=True)
class Budget:
    """Batches counted in tokens instead of samples: as many samples as fit into `batch` tokens (absent: as many samples as the
    loader says), with at most `forward` tokens per forward. Padding counts in a forward, if samples are `padded`; otherwise
    forwards are about equal. A single sample may exceed both. Without `forward` a rank's share of a batch is one forward, whatever
    padding adds."""

    batch: int | None
    forward: int | None
    padded: bool = True

    @property
    def even(self) -> bool:
        """Whether forwards are about equal, and not of so many samples."""
        return self.forward is not None and not self.padded


@dataclass(frozen=True)
class Loader:
    """Batches of `batch` samples over all ranks, or of the tokens of `budget`; this rank's share is a contiguous slice of each.

    `collate` makes one batch from a list of examples. The share of a rank is `batch / world`; if there is a remainder, the first
    ranks take one more each. All ranks see the same number of micro-batches, because otherwise their collectives would hang: a rank
    that has no sample left gets a `Blank`.
    """

    examples: Examples
    collate: Callable[[list[Any]], Batch]
    batch: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    shuffle: bool = True
    order: Order | None = None  # absent: by `shuffle`
    budget: Budget | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world or (not self.by_tokens and self.batch < self.world):
            raise ValueError(f"rank {self.rank} of {self.world} cannot share batches of {self.batch} samples")
        if not len(self.examples):
            raise ValueError("a loader needs at least one example")

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self.examples)

    @property
    def by_tokens(self) -> bool:
        """Whether a batch is as many samples as fit into so many tokens."""
        return self.budget is not None and self.budget.batch is not None

    @cached_property
    def places(self) -> Order:
        return self.order or (Shuffled(len(self), self.seed) if self.shuffle else Straight(len(self)))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return self.examples.lengths

    def index(self, position: int) -> tuple[int, int]:
        """The (epoch, example) of the sample at `position`."""
        return self.places.place(position)

    def length(self, position: int) -> int:
        """Tokens of the sample at `position`."""
        return int(self.lengths[self.index(position)[1]])

    def end(self, start: int) -> int:
        """Where the batch that begins at `start` ends."""
        if self.budget is None or self.budget.batch is None:
            return start + self.batch
        stop, tokens = start, 0
        while stop - start < MOST:
            tokens += self.length(stop)
            if tokens > self.budget.batch and stop > start:
                break
            stop += 1
        return stop

    def count(self, limit: int, most: int | None = None) -> int:
        """Steps from the beginning until `limit` samples are read; at most `most`, beyond which the caller does not look."""
        if not self.by_tokens:
            return -(-limit // self.batch)
        steps = start = 0
        while start < limit and (most is None or steps < most):
            start, steps = self.end(start), steps + 1
        return steps

    def share(self, start: int, stop: int, rank: int | None = None) -> range:
        """The positions in [start, stop) that belong to this rank."""
        rank = self.rank if rank is None else rank
        each, rest = divmod(stop - start, self.world)
        first = start + rank * each + min(rank, rest)
        return range(first, first + each + (rank < rest))

    def cuts(self, positions: range) -> list[range]:
        """The micro-batches of a share, by the tokens of a forward; a share without samples gives one empty micro-batch."""
        assert self.budget is not None
        lengths = np.array([self.length(position) for position in positions], np.int64)
        if self.budget.forward is None or not len(lengths):
            return [positions]
        ends = (even if self.budget.even else filled)(lengths, self.budget.forward)
        return [positions[start:stop] for start, stop in pairwise([0, *ends])]

    def steps(self, start: int = 0, limit: int | None = None, micro_batch: int | None = None
              ) -> Iterator[tuple[int, list[Batch]]]:
        """(position after, micro-batches) of each global batch from `start` on; for ever, or up to position `limit`.

        An epoch's last, incomplete batch is filled from the next epoch. With `limit` the last batch is what is left.
        """
        while limit is None or start < limit:
            stop = self.end(start) if limit is None else min(self.end(start), limit)
            mine, most = self.share(start, stop), -(-(stop - start) // self.world)
            if self.budget is not None and (micro_batch is None or self.budget.even):
                every = [self.cuts(self.share(start, stop, rank)) for rank in range(self.world)]
                cuts = every[self.rank] + [range(0)] * (max(map(len, every)) - len(every[self.rank]))
            else:
                size = micro_batch or most
                cuts = [mine[k : k + size] for k in range(0, most, size)]
            yield stop, [self.gather(cut) if cut else self.blank(start) for cut in cuts]
            start = stop

    def gather(self, positions: Iterable[int]) -> Batch:
        """One batch of the samples at `positions`."""
        return self.collate(self.examples.several([self.index(p) for p in positions]))

    def blank(self, position: int) -> Blank:
        """The placeholder for a micro-batch when no sample is left."""
        batch = self.gather([position])
        return Blank(batch, labels=torch.full_like(batch["labels"], ignored(batch["labels"])))

    def once(self) -> Iterator[Batch]:
        """Every example once, in its own order, for an evaluation. The batches, of `batch / world`, are dealt out to the ranks:
        they are the same however many ranks there are, and each rank has as many. The last batch may be smaller."""
        plain, size = replace(self, shuffle=False, order=None), self.batch // self.world
        rounds = -(-len(self) // (self.world * size))
        cuts = (range(len(self))[k * size : (k + 1) * size] for k in range(self.rank, rounds * self.world, self.world))
        return (plain.gather(cut) if cut else plain.blank(0) for cut in cuts)


def filled(lengths: NDArray[np.int64], most: int) -> list[int]:
    """Where micro-batches end that have at most `most` tokens with their padding, each as large as may be."""
    ends, first, longest = list[int](), 0, 0
    for k, length in enumerate(lengths.tolist()):
        if (longest := max(longest, length)) * (k + 1 - first) > most and k > first:
            ends.append(k)
            first, longest = k, length
    return [*ends, len(lengths)]


def even(lengths: NDArray[np.int64], most: int) -> list[int]:
    """Where micro-batches end that have at most `most` tokens without padding: as few as may be, of about as many tokens each, so
    that they are of few shapes."""
    stops = lengths.cumsum()
    many = -(-stops[-1] // most)
    while True:
        of = ((2 * stops - lengths) * many - 1) // (2 * stops[-1])  # by the middle of each sample
        ends = np.flatnonzero(np.diff(of, append=many)) + 1
        if all((np.diff(stops[ends - 1], prepend=0) <= most) | (np.diff(ends, prepend=0) == 1)):
            return ends.tolist()
        many += 1
