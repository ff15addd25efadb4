"""Tagging: one label for each word, trained and evaluated at the word's first token. w words, s tokens."""

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import refuse
from ..collate import IGNORED, Batch, nth, shortened
from ..config import DataConfig
from ..labels import index_of, label_names
from ..objective import Names, Objective, register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import Sequences, filler

if TYPE_CHECKING:
    from ..encode import Reader
    from ..tokenizer import Tokenizer


@register
class Tag(Objective):
    name = task = "tag"
    named = True
    keys = ("words_key", "tags_key")
    metrics = ("accuracy", "span_f1")
    of = ("loss", "classes", "tags")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        yield " ".join(sentence(record, data)[0])

    def names(self, records: Sequence[Record], data: DataConfig, known: Names = ()) -> Names | None:
        names = label_names(records, lambda record: sentence(record, data)[1], data.tags_key, known)
        if names is not known and names[0] == "LABEL_0":
            said = "tags by number: span_f1 takes each for a span of one word; names (B-PER, I-PER, O) say which words form one"
            warnings.warn(said, stacklevel=2)
        return names

    def sample(self, batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None) -> str:
        """A token that is trained on stands as [[seen / tag]]."""
        pairs = zip(nth(batch, 0), batch["labels"][0].tolist(), strict=False)
        said = [(tokenizer.decode([i], special=True), names[t] if names and t != IGNORED else str(t), t) for i, t in pairs]
        return shortened(" ".join(text if t == IGNORED else f"[[{text} / {tag}]]" for text, tag, t in said))

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        return Tagged(records, read, data)


class Tagged(Sequences):
    """Words and a label for each; `read.names` are the labels. What does not fit of a sentence is left out, and told of."""

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        self.size, self.fill, self.ids, self.labels = data.seq_len, filler(read.tokenizer), Ragged(), Ragged()
        total = lost = 0
        for record in records:
            words, tags = sentence(record, data)
            with read.naming(record):
                ids, where = read.tokenizer.encode_words(words, data.seq_len)
            total += len(words)
            lost += len(words) - len({*where} - {None})
            if not read.holds(ids):
                read.refuse(record, ids)
            numbers = [index_of(record, tag, read.names, data.tags_key) for tag in tags]
            firsts = [w if w is not None and (k == 0 or where[k - 1] != w) else None for k, w in enumerate(where)]
            self.ids.append(ids)
            self.labels.append([IGNORED if w is None else numbers[w] for w in firsts])
        if not self.ids.total:
            refuse(records[0].file, data.words_key, "no token in all sentences", "words")
        if lost:
            use = "learned" if read.train else "judged"
            said = f"{lost:,} of {total:,} words have no token within data.seq_len {data.seq_len}: their tags are not {use}"
            warnings.warn(said, stacklevel=2)
        self.lengths = np.diff(self.ids.bounds)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of a sentence."""
        return self.ids[index], self.labels[index]


def sentence(record: Record, data: DataConfig) -> tuple[list[str], list[Any]]:
    """The words and the tags of a record; if they are text, they are separated by spaces, or the JSON of lists."""
    found = []
    words, tags = record.get(data.words_key, "data.words_key"), record.get(data.tags_key, "data.tags_key")
    if not isinstance(tags := record.unfolded(data.tags_key, tags), str):  # else `[ 1 ]` is three words
        words = record.unfolded(data.words_key, words)
    for key, option, value in ((data.words_key, "data.words_key", words), (data.tags_key, "data.tags_key", tags)):
        value = value.split() if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not value:
            record.refuse(f"{key} is {str(value)[:60]!r}", f"a list that is not empty ({option} names the field)")
        found.append(list(value))
    words, tags = found
    if len(words) != len(tags):
        record.refuse(f"{len(words)} words and {len(tags)} tags", "a tag for each word")
    if odd := [word for word in words if not isinstance(word, str)]:
        record.refuse(f"the word {repr(odd[0])[:60]}", "text")
    if odd := [tag for tag in tags if not isinstance(tag, str | int)]:
        record.refuse(f"{data.tags_key} has {repr(odd[0])[:60]}", "the name or the number of a tag")
    return words, tags
