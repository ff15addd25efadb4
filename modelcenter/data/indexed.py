"""Token files: the documents of a corpus as ids, read by offset, in the form of Megatron-LM's indexed datasets.

NAME.bin holds the ids of all sequences end to end. NAME.idx, little-endian: nine bytes `MMIDIDX\\0\\0`, the version as 8 bytes (1),
the type of an id as one (8: uint16, 4: int32, ...), the number of sequences and of document bounds as 8 bytes each, then the
length of every sequence (int32), where it starts in NAME.bin in bytes (int64), and the bounds of the documents, counted in
sequences, from 0 on (int64). (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.) If no document was ended, as in files
of OpenBMB's ModelCenter, the bounds are a single 0: then each sequence is a document. NAME.json is ours: it says which tokenizer
made the files, and from what.
"""

import json
import struct
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import counted, refuse, refuse_missing
from .ragged import Ids
from .record import Part, Record
from .source import CHUNK, Source

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MAGIC, VERSION = b"MMIDIDX\0\0", 1
HEAD = struct.Struct("<9sQBQQ")
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
SMALL = 65500  # ids of a vocabulary below it are written as uint16, as there


class TokenFile:
    """One NAME.bin with its NAME.idx: documents of ids, none of which is held."""

    def __init__(self, file: Path) -> None:
        """`file`: either of the two."""
        self.file, index = file.with_suffix(".bin"), file.with_suffix(".idx")
        for part in (self.file, index):
            if not part.is_file():
                refuse_missing(part, None, "no such file", "a .bin and its .idx")
        self.source, source = Source(self.file), Source(index)
        if source.size < HEAD.size:
            refuse(index, f"byte {source.size}", "the file ends in its header", "a whole .idx")
        magic, version, code, count, bounds = HEAD.unpack(source.read(0, HEAD.size))
        if magic != MAGIC:
            refuse(index, "byte 0", f"{magic!r}", f"{MAGIC!r}, with which an index starts")
        if version != VERSION:
            refuse(index, "byte 9", f"version {version}", "version 1")
        if TYPES.get(code, "<f4")[1] not in "ui":
            refuse(index, "byte 17", f"ids of type {code}", "integers")
        self.dtype = np.dtype(TYPES[code])
        size = HEAD.size + 12 * count + 8 * bounds
        if source.size != size:
            refuse(index, f"byte {min(size, source.size)}", f"{source.size} bytes for {count} sequences and {bounds} bounds",
                   f"{size} bytes")  # fmt: skip
        self.total, where = 0, HEAD.size
        ends = [np.zeros(1, np.int64)]
        for start in range(0, count, CHUNK):
            stop = min(start + CHUNK, count)
            lengths = np.frombuffer(source.read(where + 4 * start, where + 4 * stop), "<i4").astype(np.int64)
            begins = np.frombuffer(source.read(where + 4 * count + 8 * start, where + 4 * count + 8 * stop), "<i8")
            sums = self.total + lengths.cumsum()
            if len(odd := np.flatnonzero((lengths < 0) | (begins != (sums - lengths) * self.dtype.itemsize))):
                found = f"sequence {start + odd[0]}: {lengths[odd[0]]} ids from byte {begins[odd[0]]} on"
                refuse(index, f"byte {where + 4 * count + 8 * (start + int(odd[0]))}", found, "sequences end to end")
            ends.append(sums)
            self.total = int(sums[-1])
        if self.total * self.dtype.itemsize != self.source.size:
            refuse(self.file, f"byte {self.source.size}", f"the file ends here, and its index says {self.total} ids",
                   f"{self.total * self.dtype.itemsize} bytes")  # fmt: skip
        documents = np.frombuffer(source.read(where + 12 * count, size), "<i8")
        if bounds == 1 and documents[0] == 0:
            documents = np.arange(count + 1)
        if bounds < 1 or documents[0] != 0 or documents[-1] != count or (np.diff(documents) < 0).any():
            wanted = f"numbers that rise from 0 to {count}"
            refuse(index, f"byte {where + 12 * count}", "the bounds of documents", wanted)
        self.bounds: NDArray[np.int64] = np.concatenate(ends)[documents]

    def flat(self, start: int, stop: int) -> NDArray[Any]:
        """The ids [start, stop) of the file."""
        size = self.dtype.itemsize
        return np.frombuffer(self.source.read(start * size, stop * size), self.dtype)

    @property
    def made_by(self) -> dict[str, Any]:
        """What NAME.json says; empty if Megatron's tools have made the file."""
        try:
            content = json.loads(self.file.with_suffix(".json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


class Tokens(Part):
    """The ids of some token files end to end, or a part of them; a document at the border is cut."""

    def __init__(self, files: Sequence[TokenFile], first: int = 0, last: int | None = None, vocab: int | None = None) -> None:
        self.files, self.ends = files, np.cumsum([file.total for file in files])
        self.first, self.last = first, int(self.ends[-1]) if last is None else last
        self.vocab = vocab

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def at(self, index: int) -> Record:
        start, stop = self.bounds[index : index + 2].tolist()
        return Record({"ids": self.flat(start, stop)}, str(self.files[0].file), index + 1, unit="document")

    @property
    def total(self) -> int:
        return self.last - self.first

    @property
    def bounds(self) -> NDArray[np.int64]:
        """Where each document starts, and the end of the last; none is empty."""
        starts = self.ends - [file.total for file in self.files]
        every = np.concatenate([file.bounds + start for file, start in zip(self.files, starts, strict=True)])
        every = every.clip(self.first, self.last) - self.first
        return every[np.diff(every, prepend=-1) > 0]  # they rise: np.unique, which does not know it, takes 24 s for 20 million

    def flat(self, start: int, stop: int) -> Ids:
        """The ids [start, stop); one that the model lacks is refused by its place."""
        start, stop, found = start + self.first, stop + self.first, [np.zeros(0, np.int32)]
        first, last = np.searchsorted(self.ends, (start, stop - 1), "right").tolist()  # there may be thousands of files
        for file, end in zip(self.files[first : last + 1], self.ends[first : last + 1].tolist(), strict=True):
            begin = end - file.total
            a, b = max(start - begin, 0), min(stop - begin, file.total)
            ids = file.flat(a, b)
            odd = np.flatnonzero((ids < 0) | (ids >= (2**31 if self.vocab is None else self.vocab)))
            if len(odd):
                place = f"byte {(a + int(odd[0])) * file.dtype.itemsize}"
                refuse(file.file, place, f"token {a + odd[0]} has id {ids[odd[0]]}, the model {self.vocab} tokens",
                       "the tokenizer of this model")  # fmt: skip
            found.append(ids.astype(np.int32))
        return np.concatenate(found)

    def split(self, fraction: float) -> "tuple[Tokens, Tokens]":
        """The ids without and with their last `fraction`."""
        cut = self.first + without(self.total, fraction)
        if not self.first < cut < self.last:
            found = f"of {counted(self.total, 'token')} none is left on one side of the split"
            refuse(self.files[0].file, "data.eval_fraction", found, "more data, another fraction, or 0 for no evaluation")
        return Tokens(self.files, self.first, cut), Tokens(self.files, cut, self.last)

    def checked(self, tokenizer: "Tokenizer", vocab: int | None) -> "Tokens":
        """The same tokens for a model of `vocab` tokens. Refused if another tokenizer than `tokenizer` made the files."""
        for file in self.files:
            if (made := file.made_by.get("vocabulary")) not in (None, tokenizer.fingerprint):
                found = f"made by {file.made_by.get('tokenizer')}, and this is {tokenizer.name}"
                refuse(file.file, "tokenizer", f"{found}, another vocabulary ({str(made)[:8]})", "one tokenizer for both")
        return Tokens(self.files, self.first, self.last, vocab)


def without(count: int, fraction: float) -> int:
    """How many of `count` are left without their last `fraction`, rounded up: of 10 without 0.9 it is one, though 10 * (1 - 0.9) is
    less."""
    return count - ceil(count * Fraction(str(fraction)))


def index_head(dtype: np.dtype[Any], sequences: int) -> bytes:
    """The header of an index over that many sequences, each a document."""
    code = next(code for code, name in TYPES.items() if np.dtype(name) == dtype)
    return HEAD.pack(MAGIC, VERSION, code, sequences, sequences + 1)


def dtype_of(vocab: int) -> np.dtype[Any]:
    """The dtype in which ids of such a vocabulary are written."""
    return np.dtype("<u2" if vocab < SMALL else "<i4")
