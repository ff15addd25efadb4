"""Tagging: one label a word, learned and judged at the word's first token. w words, s tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modelcenter.data.collate import IGNORED, Batch, pack, pad
from modelcenter.data.config import DataConfig
from modelcenter.data.ragged import Ids, Ragged
from modelcenter.data.record import Record
from modelcenter.errors import nearest, refuse

if TYPE_CHECKING:
    from modelcenter.data.tokenizer import Tokenizer


class Tagged:
    """tag: words and a label for each; `names` are the labels in order. What of a sentence has no room is left out."""

    def __init__(self, records: Sequence[Record], tokenizer: "Tokenizer", vocab: int | None, data: DataConfig,
                 names: Sequence[str], fill: int) -> None:
        self.size, self.fill, self.ids, self.labels = data.seq_len, fill, Ragged(), Ragged()
        for record in records:
            words, tags = sentence(record, data)
            ids, where = tokenizer.encode_words(words, data.seq_len)
            if vocab is not None and max(ids, default=-1) >= vocab:
                record.refuse(f"a token has id {max(ids)}, the model {vocab} tokens", "the tokenizer of this model is wanted")
            numbers = [number(record, tag, names, data.tags_key) for tag in tags]
            firsts = [w if w is not None and (k == 0 or where[k - 1] != w) else None for k, w in enumerate(where)]
            self.ids.append(ids)
            self.labels.append([IGNORED if w is None else numbers[w] for w in firsts])
        if not self.ids.total:
            refuse(records[0].file, data.words_key, "no token in all sentences", "words are wanted")
        self.lengths: NDArray[np.int64] = np.diff(self.ids.bounds)

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of a sentence."""
        return self.ids[index], self.labels[index]

    def collate(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """input_ids, attention_mask, labels: (b, s)."""
        ids, labels = zip(*examples, strict=True)
        return pad(ids, labels, self.fill)

    def pack(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """One row, as `collate.pack` says."""
        ids, labels = zip(*examples, strict=True)
        return pack(ids, labels)


def sentence(record: Record, data: DataConfig) -> tuple[list[str], list[Any]]:
    """The words and the tags of a record; as text they are parted by spaces."""
    found = []
    for key, option in ((data.words_key, "data.words_key"), (data.tags_key, "data.tags_key")):
        value = record.get(key, option)
        value = value.split() if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not value:
            record.refuse(f"{key} is {str(value)[:60]!r}", f"a list is wanted ({option} names the field)")
        found.append(list(value))
    words, tags = found
    if len(words) != len(tags):
        record.refuse(f"{len(words)} words and {len(tags)} tags", "a tag for each word is wanted")
    if odd := [word for word in words if not isinstance(word, str)]:
        record.refuse(f"the word {odd[0]!r}", "text is wanted")
    return words, tags


def number(record: Record, tag: Any, names: Sequence[str], key: str) -> int:
    if tag in names:
        return names.index(tag)
    if isinstance(tag, int) and 0 <= tag < len(names):
        return tag
    record.refuse(f"{key} has {tag!r}", nearest(tag, names))


def tag_names(records: Sequence[Record], data: DataConfig) -> tuple[str, ...]:
    """The tags of `records`: names in sorted order, or LABEL_0 ... for numbers, up to the highest."""
    known = {tag for record in records for tag in sentence(record, data)[1]}
    if all(isinstance(tag, int) for tag in known):
        return tuple(f"LABEL_{n}" for n in range(max(known) + 1))
    if odd := [tag for tag in known if not isinstance(tag, str)]:
        refuse(records[0].file, data.tags_key, f"{odd[0]!r} beside names", "names, or numbers, throughout")
    return tuple(sorted(known))
