"""What a loader draws from, and which examples may share a row."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .collate import Batch


class Examples(Protocol):
    """Examples by number; one depends on (epoch, index) alone."""

    lengths: NDArray[np.int64]  # tokens of every example
    padded: bool = True  # whether the shorter examples of a batch are filled up
    written: int = 0  # tokens of all targets, where these are texts of their own: a part of the lengths

    def __len__(self) -> int: ...

    def at(self, epoch: int, index: int) -> Any: ...

    def several(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """The examples at some (epoch, index): one by one, or at once where that is quicker."""
        return [self.at(*place) for place in places]

    def collate(self, examples: list[Any]) -> Batch:
        """One batch of some examples."""


class Packable(Examples, Protocol):
    """Examples that may stand side by side; `size` is the most tokens that one may have."""

    size: int

    def pack(self, examples: list[Any]) -> Batch:
        """One row of some examples, as `collate.pack` says."""
