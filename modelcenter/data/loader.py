"""Batches in an order that one number restarts: the position, counted in samples since the start of training.

Sample p of the run is the `p % n`-th of epoch `p // n`, whose order is a permutation drawn from (seed, epoch) alone. So
a batch is a range of positions, however many ranks or micro-batches share it, and going on from any position is exact.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from modelcenter.data.collate import IGNORED, Batch


class Examples(Protocol):
    """What a loader draws from; an example depends on (epoch, index) alone."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every example."""

    def at(self, epoch: int, index: int) -> Any: ...

    def collate(self, examples: list[Any]) -> Batch:
        """One batch of some examples."""


@dataclass(frozen=True)
class Loader:
    """Batches of `batch` samples over all ranks; this rank's share is a contiguous slice of each.

    `collate` makes one batch of a list of examples. The share of a rank is `batch / world`, the first ones taking one
    more where that leaves a rest. All ranks see the same number of micro-batches, or their collectives would hang: one
    that has no sample left (only ever in the last piece of a step) gets a sample whose labels are all ignored.
    """

    examples: Examples
    collate: Callable[[list[Any]], Batch]
    batch: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world or self.batch < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} cannot share batches of {self.batch} samples")
        if not len(self.examples):
            raise ValueError("a loader needs at least one example")

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self.examples)

    def index(self, position: int) -> tuple[int, int]:
        """The (epoch, example) of the sample at `position`."""
        epoch, place = divmod(position, len(self))
        return epoch, int(order(len(self), self.seed, epoch)[place]) if self.shuffle else place

    def share(self, start: int, stop: int) -> range:
        """The positions in [start, stop) that belong to this rank."""
        each, rest = divmod(stop - start, self.world)
        first = start + self.rank * each + min(self.rank, rest)
        return range(first, first + each + (self.rank < rest))

    def steps(self, start: int = 0, limit: int | None = None, micro_batch: int | None = None
              ) -> Iterator[tuple[int, list[Batch]]]:
        """(position after, micro-batches) of each global batch from `start` on; for ever, or up to position `limit`.

        An epoch's last, incomplete batch is filled from the next epoch. With `limit` the last batch is what is left.
        """
        while limit is None or start < limit:
            stop = start + self.batch if limit is None else min(start + self.batch, limit)
            mine, most = self.share(start, stop), -(-(stop - start) // self.world)
            size = micro_batch or most
            cuts = [mine[k : k + size] for k in range(0, most, size)]
            yield stop, [self.gather(cut) if cut else self.blank(start) for cut in cuts]
            start = stop

    def gather(self, positions: Iterable[int]) -> Batch:
        """One batch of the samples at `positions`."""
        return self.collate([self.examples.at(*self.index(p)) for p in positions])

    def blank(self, position: int) -> Batch:
        """A batch of one sample that adds nothing to a loss: every label is ignored."""
        batch = self.gather([position])
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}

    def batches(self, start: int = 0, limit: int | None = None) -> Iterator[tuple[int, Batch]]:
        """(position after, this rank's batch), as `steps` with each share in one piece."""
        for after, pieces in self.steps(start, limit):
            yield from ((after, piece) for piece in pieces)

    def once(self) -> Iterator[Batch]:
        """Every example once, in its own order: an evaluation. The last batch may be smaller."""
        plain = Loader(self.examples, self.collate, self.batch, self.seed, self.rank, self.world, shuffle=False)
        return (batch for _, batch in plain.batches(limit=len(self)))


@lru_cache(maxsize=4)  # a batch may straddle two epochs, and training and evaluation take turns
def order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of an epoch; numpy's PCG64, so that no other use of randomness moves it."""
    return np.random.default_rng((seed, epoch, 0)).permutation(size)
