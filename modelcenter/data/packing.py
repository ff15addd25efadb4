"""Packs sequences into one row without padding, none of which sees another: a few in a row of fixed size, or all of a batch.

A model finds the sequences by their bounds (`cu_seq_lens_q` and `_k`), and their positions restart. Bins are made once, from
lengths alone: epochs change the order of bins, but not what each bin contains.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..parallel.watch import beat
from .collate import Batch
from .examples import Examples, Packable
from .ragged import Ragged

WINDOW = 1 << 20  # sequences that are packed at a time: two seconds, and a bound on the memory
FULL = 0.99  # of the bins: what is wanted
MUCH = 1 / 16  # of rows as long as the longest: with less padding rows are as quick, and have one shape


class Unpadded(Examples):
    """The same examples, their batches without padding."""

    padded = False

    def __init__(self, examples: Packable) -> None:
        self.examples, self.lengths, self.size, self.written = examples, examples.lengths, examples.size, examples.written

    def __len__(self) -> int:
        return len(self.lengths)

    def at(self, epoch: int, index: int) -> Any:
        return self.examples.at(epoch, index)

    def several(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        return self.examples.several(places)

    def collate(self, examples: list[Any]) -> Batch:
        """One row (1, total) of the examples, as their `pack` says."""
        return self.examples.pack(examples)


def much_padding(examples: Examples) -> bool:
    """Whether more than MUCH of batches would be padding, if all examples were as long as the longest."""
    return bool(examples.lengths.mean() < (1 - MUCH) * examples.lengths.max())


class Packed(Examples):
    """Bins of examples that have at most `examples.size` tokens together."""

    padded = False

    def __init__(self, examples: Packable) -> None:
        lengths = examples.lengths
        self.examples, self.size, self.written, self.bins = examples, examples.size, examples.written, Ragged()
        for start in range(0, len(lengths), WINDOW):
            beat()
            for found in fill(lengths[start : start + WINDOW].tolist(), examples.size):
                self.bins.append([start + item for item in found])
        order = self.bins.flat(0, self.bins.total)
        self.lengths: NDArray[np.int64] = np.add.reduceat(lengths[order], self.bins.bounds[:-1]) if len(order) else lengths

    def __len__(self) -> int:
        return len(self.bins)

    def at(self, epoch: int, index: int) -> list[Any]:
        """The examples of a bin."""
        return self.several([(epoch, index)])[0]

    def several(self, places: Sequence[tuple[int, int]]) -> list[list[Any]]:
        bins = [[(epoch, k) for k in self.bins[index].tolist()] for epoch, index in places]
        found = iter(self.examples.several([place for bin in bins for place in bin]))
        return [list(islice(found, len(bin))) for bin in bins]

    def collate(self, examples: list[list[Any]]) -> Batch:
        """One row (1, total) of the examples of all these bins, as their `pack` says."""
        return self.examples.pack([example for bin in examples for example in bin])


def fill(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Bins of items whose lengths sum to at most `size`: the better result of two methods, neither of which is always better when a
    bin holds two or three items. If both leave more than a hundredth free, and more than necessary, a third, slower method is tried
    too."""
    found = min(best_fit(lengths, size), exact_fit(lengths, size), key=len)
    if sum(lengths) >= FULL * size * len(found) or len(found) == -(-sum(lengths) // size):
        return found
    return min(found, exact_fit(lengths, size, any_number), key=len)


Completion = Callable[[NDArray[np.int64], int], list[int]]  # how many of each length, to use up; the room -> lengths for it


def one_or_two(have: NDArray[np.int64], room: int) -> list[int]:
    """Fill each bin with what fits exactly, one item or two, or otherwise with the longest item that fits, and so on."""
    found: list[int] = []
    while True:
        fits = np.flatnonzero(have[: room + 1])
        pairs = fits[(have[room - fits] > (2 * fits == room)) & (2 * fits >= room)]
        item = room if have[room] else int(pairs[-1]) if len(pairs) else int(fits[-1]) if len(fits) else 0
        if not item:
            return found
        found.append(item)
        have[item] -= 1
        room -= item


def any_number(have: NDArray[np.int64], room: int) -> list[int]:
    """The items that leave the least room free, and of such sets the one whose first item is longest (Gupta and Ho, 1999: minimum
    bin slack, here by the set of reachable sums, one bit each)."""
    lengths = np.flatnonzero(have[: room + 1]).tolist()
    reached, most = [1], (2 << room) - 1  # bit s: some of the lengths so far sum to s
    for length in lengths:
        sums, left, step = reached[-1], min(int(have[length]), room // length), 1
        while left:  # 1, 2, 4 ... of it at once
            sums |= sums << length * (step := min(step, left)) & most
            left, step = left - step, 2 * step
        reached.append(sums)
    found: list[int] = []
    target = reached[-1].bit_length() - 1
    for length, shorter in zip(lengths[::-1], reached[-2::-1], strict=True):
        times = min(int(have[length]), target // length)
        while not shorter >> target - times * length & 1:
            times -= 1
        found += [length] * times
        target -= times * length
    return found


def exact_fit(lengths: Sequence[int], size: int, complete: Completion = one_or_two) -> list[list[int]]:
    """Bins filled one at a time: the longest item, then what `complete` says. What fits once is done as often as there are such
    lengths (Krell et al., 2021): the work depends on `size` alone."""
    order = np.argsort(lengths, kind="stable")
    count = np.bincount(lengths, minlength=size + 1)
    ends = np.cumsum(count)  # the items of a length that are left are the last `count` before its end
    bins: list[list[int]] = []
    while len(left := np.flatnonzero(count)):
        item = int(left[-1])
        have = count.copy()
        have[item] -= 1
        found = [item, *complete(have, size - item)]
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
