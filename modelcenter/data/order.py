"""The example at each position of a run: a pure function of the seed and the position, counted in samples from 0 on.

Sample p of n examples is the `p % n`-th of epoch `p // n`. Nothing here depends on ranks, micro-batches or where a run began.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

VERSION = 1  # of what stands where, which each training state tells; before, sources of one size shared each epoch's permutation
GROUP = 64  # batches that are sorted by length together
Tree = int | tuple[int, int, "Tree", "Tree"]  # a source, or how a node's samples are shared


class Order(Protocol):
    """The (epoch, example) of every position."""

    def place(self, position: int) -> tuple[int, int]: ...


class Straight:
    """Every example in its turn."""

    def __init__(self, size: int) -> None:
        self.size = size

    def place(self, position: int) -> tuple[int, int]:
        return divmod(position, self.size)


class Shuffled(Straight):
    """A permutation that is drawn anew each epoch. `twin`: how many sources of the same size and seed were before this one."""

    def __init__(self, size: int, seed: int, twin: int = 0) -> None:
        super().__init__(size)
        self.seed, self.twin = seed, twin
        self.epochs: dict[int, NDArray[np.int64]] = {}  # the last two: a batch may straddle them

    def place(self, position: int) -> tuple[int, int]:
        epoch, place = divmod(position, self.size)
        if epoch not in self.epochs:
            self.epochs = {e: o for e, o in self.epochs.items() if e == epoch - 1} | {epoch: self.of(epoch)}
        return epoch, int(self.epochs[epoch][place])

    def of(self, epoch: int) -> NDArray[np.int64]:
        """The whole order of an epoch."""
        return order(self.size, self.seed, epoch, self.twin)


class Grouped(Shuffled):
    """A permutation in which the examples of a batch have about the same length. `GROUP` batches' worth of examples are sorted, and
    their batches are drawn in any order. What completes the last batch of the epoch before comes first."""

    def __init__(self, lengths: NDArray[np.int64], seed: int, batch: int) -> None:
        super().__init__(len(lengths), seed)
        self.lengths, self.batch = lengths, batch

    def of(self, epoch: int) -> NDArray[np.int64]:
        drawn = order(self.size, self.seed, epoch)
        head = min(-epoch * self.size % self.batch, self.size)
        body = drawn[head:]
        full = len(body) // self.batch
        wide = GROUP * self.batch
        parts = [body[k : k + wide] for k in range(0, full * self.batch, wide)]
        if parts:
            parts[-1] = parts[-1][: full * self.batch - wide * (len(parts) - 1)]
        batches = np.concatenate([np.zeros(0, np.int64), *(p[np.argsort(self.lengths[p], kind="stable")] for p in parts)])
        mixed = batches.reshape(full, self.batch)[np.random.default_rng((self.seed, epoch, 3)).permutation(full)]
        return np.concatenate([drawn[:head], mixed.ravel(), body[full * self.batch :]])


class Blended:
    """Sources mixed in the proportions of their weights, each with epochs of its own.

    The sources are the leaves of a Huffman tree over their weights. At a node with the weights a and b, the first side has had
    round(i a / (a + b)) of the node's first i samples. These are exact integers, so that any position is found at once. At every
    point of the run each source has had its share, within two samples (with two sources, within a half).
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self.starts = np.cumsum([0, *sizes])
        twins = [list(sizes[:k]).count(n) for k, n in enumerate(sizes)]
        self.twins = shuffle and any(twins)  # whether two sources of one size must not draw the same
        self.orders = [Shuffled(n, seed, twin) if shuffle else Straight(n) for n, twin in zip(sizes, twins, strict=True)]
        exact = [Fraction(str(w)) for w in weights]
        number = count()
        nodes: list[tuple[Fraction, int, Tree]] = [(w, next(number), leaf) for leaf, w in enumerate(exact)]
        heapify(nodes)
        while len(nodes) > 1:
            (a, _, first), (b, _, second) = heappop(nodes), heappop(nodes)
            share = a / (a + b)
            heappush(nodes, (a + b, next(number), (share.numerator, share.denominator, first, second)))
        self.tree = nodes[0][2]

    def source(self, position: int) -> tuple[int, int]:
        """Which source stands at a position, and which of its samples it is, counted from 0."""
        node = self.tree
        while not isinstance(node, int):
            a, whole, first, second = node
            before, after = ((2 * i * a + whole) // (2 * whole) for i in (position, position + 1))
            node, position = (first, before) if after > before else (second, position - before)
        return node, position

    def place(self, position: int) -> tuple[int, int]:
        source, sample = self.source(position)
        epoch, index = self.orders[source].place(sample)
        return epoch, int(self.starts[source]) + index


def order(size: int, seed: int, epoch: int, twin: int = 0) -> NDArray[np.int64]:
    """The permutation of an epoch; numpy's PCG64, so that no other use of randomness moves it."""
    return np.random.default_rng((seed, epoch, 0, 0, twin) if twin else (seed, epoch, 0)).permutation(size)
