"""Sequence to sequence: a source, and the target to be generated from it."""

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import refuse
from ..config import DataConfig
from ..objective import Objective, register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import Sequences, filler

if TYPE_CHECKING:
    from ..encode import Reader


@register
class Seq2Seq(Objective):
    name = task = "seq2seq"
    keys = ("source_key", "target_key", "source_prefix", "target_len")
    metrics = ("perplexity",)
    of = ("loss", "texts")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        yield record.text(data.source_key, "data.source_key")
        yield record.text(data.target_key, "data.target_key")

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        return Pairs(records, read, data)


class Pairs(Sequences):
    """A source and a target, each ending in the end of text; the model makes the decoder's input of labels.

    The length of a pair is that of both together, and so is the room of a packed row.
    """

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        if not read.eos:
            refuse(read.tokenizer.name, "objective", "seq2seq with a tokenizer without an end of text", "one that has it")
        read.tokenizer.end_texts()
        self.fill, self.sources, self.targets = filler(read.tokenizer), Ragged(), Ragged()
        wide, long = data.seq_len, data.target_len or data.seq_len
        sources = ((r, data.source_prefix + r.text(data.source_key, "data.source_key"), None) for r in records)
        targets = ((r, r.text(data.target_key, "data.target_key")) for r in records)
        empty = cut = 0
        encoded = read.encode_pairs(sources, wide, f"sources ({data.source_key})")
        for (ids, _), (_, target) in zip(encoded, read.encode_all(targets), strict=True):
            if ids[-1:] != read.eos:
                ids = ids[: wide - 1] + read.eos
            self.sources.append(ids)
            self.targets.append(target[: long - 1] + read.eos)
            empty, cut = empty + (not target), cut + (len(target) >= long)
        if empty:
            use = "taught to write nothing" if read.train else "judged as they are"
            warnings.warn(f"{empty:,} of {len(records):,} targets ({data.target_key}) are empty: {use}", stacklevel=2)
        key = "data.target_len" if data.target_len else "data.seq_len"
        read.tell_long(cut, len(records), f"targets ({data.target_key})", key, long)
        self.size, self.lengths = wide + long, np.diff(self.sources.bounds) + np.diff(self.targets.bounds)
        self.written = self.targets.total

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(source ids, target ids)."""
        return self.sources[index], self.targets[index]
