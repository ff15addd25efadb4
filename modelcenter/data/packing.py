"""Sequences side by side in one row without padding, none seeing another: a few to a row of fixed size, or all of a batch.

A model finds the sequences by their bounds (`cu_seq_lens_q` and `_k`), and their positions restart. Bins are made of
lengths alone, once: an epoch changes their order and not what lies beside what.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from modelcenter.data.collate import Batch
from modelcenter.data.ragged import Ragged

WINDOW = 1 << 20  # sequences that are packed at a time: two seconds, and a bound on the memory


class Packable(Protocol):
    """Examples that may stand side by side; `size` is the most tokens that one may have."""

    size: int
    lengths: NDArray[np.int64]

    def __len__(self) -> int: ...

    def at(self, epoch: int, index: int) -> Any: ...

    def collate(self, examples: list[Any]) -> Batch: ...

    def pack(self, examples: list[Any]) -> Batch: ...


class Unpadded:
    """The same examples, their batches without padding."""

    def __init__(self, examples: Packable) -> None:
        self.examples, self.lengths = examples, examples.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def at(self, epoch: int, index: int) -> Any:
        return self.examples.at(epoch, index)

    def collate(self, examples: list[Any]) -> Batch:
        """One row (1, total) of the examples, as their `pack` says."""
        return self.examples.pack(examples)


class Packed:
    """Bins of examples that have `examples.size` tokens at most together."""

    def __init__(self, examples: Packable) -> None:
        lengths = examples.lengths
        self.examples, self.bins = examples, Ragged()
        for start in range(0, len(lengths), WINDOW):
            for found in fill(lengths[start : start + WINDOW].tolist(), examples.size):
                self.bins.append([start + item for item in found])
        order = self.bins.flat(0, self.bins.total)
        self.lengths: NDArray[np.int64] = np.add.reduceat(lengths[order], self.bins.bounds[:-1]) if len(order) else lengths

    def __len__(self) -> int:
        return len(self.bins)

    def at(self, epoch: int, index: int) -> list[Any]:
        """The examples of a bin."""
        return [self.examples.at(epoch, k) for k in self.bins[index].tolist()]

    def collate(self, examples: list[list[Any]]) -> Batch:
        """One row (1, total) of the examples of all these bins, as their `pack` says."""
        return self.examples.pack([example for bin in examples for example in bin])


def fill(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Bins of items whose lengths sum to at most `size`. Of two ways the better: neither is, where a bin holds two or three."""
    return min(best_fit(lengths, size), exact_fit(lengths, size), key=len)


def exact_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Bins filled one at a time: the longest item, then what fills the rest exactly, one item or two, or else the longest that
    fits. What fits once is done as often as there are such lengths (Krell et al., 2021): the work depends on `size` alone."""
    order = np.argsort(lengths, kind="stable")
    count = np.bincount(lengths, minlength=size + 1)
    ends = np.cumsum(count)  # the items of a length that are left are the last `count` before its end
    bins: list[list[int]] = []
    while len(left := np.flatnonzero(count)):
        have, found, room, item = count.copy(), [], size, int(left[-1])
        while item:
            found.append(item)
            have[item] -= 1
            room -= item
            fits = np.flatnonzero(have[: room + 1])
            pairs = fits[(have[room - fits] > (2 * fits == room)) & (2 * fits >= room)]
            item = room if have[room] else int(pairs[-1]) if len(pairs) else int(fits[-1]) if len(fits) else 0
        which, often = np.unique(found, return_counts=True)
        times = int((count[which] // often).min())
        columns = []
        for length, n in zip(which, often, strict=True):
            stop = ends[length]
            columns.append(order[stop - n * times : stop].reshape(times, n))
            ends[length] -= n * times
            count[length] -= n * times
        bins += np.hstack(columns).tolist()
    return bins


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Bins of items whose lengths sum to at most `size`: longest first, each into the fullest bin with room for it.

    Best-fit decreasing (Johnson 1973: at most 11/9 of the optimal number); O(n log size). No length may exceed `size`.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = defaultdict(list)  # room left -> bins
    rooms: list[int] = []  # the rooms that some bin has, in order
    for item in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        length = lengths[item]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            bins.append([])
            room, target = size, len(bins) - 1
        else:
            room = rooms[place]
            target = by_room[room].pop()
            if not by_room[room]:
                del rooms[place]
        bins[target].append(item)
        if not by_room[room - length]:
            insort(rooms, room - length)
        by_room[room - length].append(target)
    return bins
