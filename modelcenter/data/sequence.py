"""Examples that consist of a sequence of ids and one of labels, and the documents from which they are cut."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import refuse
from .collate import Batch, pack, pad
from .config import DataConfig
from .examples import Packable
from .indexed import Tokens
from .objective import Frame
from .ragged import Ids, Ragged
from .record import Record

if TYPE_CHECKING:
    from .encode import Reader
    from .tokenizer import Tokenizer

Lengths = NDArray[np.int64]


class Sequences(Packable, ABC):
    """Examples that are (ids, labels) of one sequence, or of a source and its target."""

    fill: int

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]: ...

    def collate(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """input_ids and attention_mask (b, s), labels (b, s), those of targets (b, t): filled up on the right."""
        ids, labels = zip(*examples, strict=True)
        return pad(ids, labels, self.fill)

    def pack(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """One row, as `collate.pack` says."""
        ids, labels = zip(*examples, strict=True)
        return pack(ids, labels)


def documents(records: Sequence[Record], read: "Reader", data: DataConfig, frame: Frame) -> Ragged | Tokens:
    """The ids of every document that is not empty, in its frame: read, or as `modelcenter tokenize` has left them."""
    if isinstance(records, Tokens):
        return records.checked(read.tokenizer, read.vocab)
    rows = Ragged(read.documents(records, data.text_key, frame))
    if not rows.total:
        refuse(records[0].file, data.text_key, "no token in all texts", "a text")
    if empty := len(records) - len(rows):
        use = "trained on" if read.train else "judged"
        warnings.warn(f"{empty:,} of {len(records):,} texts ({data.text_key}) are empty: left out of what is {use}", stacklevel=2)
    return rows


def behind(tokens: Ragged | Tokens, stop: int, tail: list[int]) -> int:
    """The length of `tail` if it stands before `stop`: token files of other tools may lack it."""
    return len(tail) if stop > len(tail) and tokens.flat(stop - len(tail), stop).tolist() == tail else 0


def pieces(bounds: Lengths, size: int, drop: int = 0) -> tuple[Lengths, Lengths]:
    """(starts, stops) of rows cut into pieces of `size`, each row without its last `drop`."""
    lengths = np.diff(bounds) - drop
    counts = -(-lengths // size)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of the piece within its row
    starts = np.repeat(bounds[:-1], counts) + size * number
    return starts, np.minimum(starts + size, np.repeat(bounds[:-1] + lengths, counts))


def filler(tokenizer: "Tokenizer") -> int:
    """What fills up a row; never seen nor trained on, so any id will do where the tokenizer has none."""
    return next((i for i in (tokenizer.pad_id, tokenizer.eos_id) if i is not None), 0)
