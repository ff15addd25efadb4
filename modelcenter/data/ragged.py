"""Stores rows of token ids end to end, of any number and length, in little memory."""

import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .source import scratch

Ids = NDArray[np.int32]
HELD = 64 << 20  # ids in memory; what is beyond waits in a temporary file


class Ragged:
    """Rows of int32: appended one by one, then read by number, or as the one stream that they are."""

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self.ends, self.held = array("q", [0]), array("i")
        self.filed, self.fd = 0, -1  # ids in the file, and its descriptor
        for row in rows:
            self.append(row)

    def append(self, row: Sequence[int]) -> None:
        """Add a row at the end."""
        self.held.extend(row)
        self.ends.append(self.ends[-1] + len(row))
        if len(self.held) >= HELD:
            if self.fd < 0:
                self.fd = scratch()
                weakref.finalize(self, os.close, self.fd)
            rest = memoryview(self.held).cast("B")
            while len(rest):  # Linux writes at most 2 GiB at once
                rest = rest[os.write(self.fd, rest) :]
            self.filed, self.held = self.total, array("i")

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Ids:
        return self.flat(self.ends[index], self.ends[index + 1])

    @property
    def total(self) -> int:
        """Ids of all rows."""
        return self.ends[-1]

    @property
    def bounds(self) -> NDArray[np.int64]:
        """Where each row starts, and the end of the last."""
        return np.array(self.ends, np.int64)

    def flat(self, start: int, stop: int) -> Ids:
        """The ids [start, stop) of the stream."""
        here = np.array(self.held[max(start - self.filed, 0) : max(stop - self.filed, 0)], np.int32)
        if start >= self.filed:
            return here
        there = np.empty(min(stop, self.filed) - start, np.int32)
        rest, at = there.view(np.uint8).data, 4 * start
        while len(rest):  # nor does it read more
            done = os.preadv(self.fd, [rest], at)
            rest, at = rest[done:], at + done
        return np.concatenate([there, here])

    def __getstate__(self) -> dict[str, Any]:
        """To be sent to another process: as it would be in memory."""
        return {"ends": self.ends, "held": array("i", self.flat(0, self.total).tobytes()), "filed": 0, "fd": -1}
