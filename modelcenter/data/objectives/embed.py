"""Sentence embeddings: pairs that belong together, against all others of a forward; or pairs with a score.

A batch holds the first texts of all examples, then all second texts, then all third ones: as many of each as there are labels.
"""

import math
import warnings
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import refuse
from ..collate import Batch, nth, pack, shortened, stack, stack_mask, tensor
from ..config import DataConfig
from ..examples import Examples, Packable
from ..objective import Objective, register
from ..ragged import Ids, Ragged
from ..record import Record, reached
from ..sequence import filler

if TYPE_CHECKING:
    from torch import Tensor

    from ..encode import Reader
    from ..tokenizer import Tokenizer


class Embed(Objective):
    """Rows of texts whose vectors are compared."""

    task = "embed"
    classes = False

    def verify(self, data: DataConfig) -> None:
        if data.pair_key is None:
            refuse(None, "data.pair_key", f"absent with objective {self.name}", "the field of the second text")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        return iter(texts_of_row(record, data))

    def mixed(self, sources: Sequence[Examples]) -> None:
        whole = [getattr(source, "examples", source) for source in sources]  # packed
        if len(many := sorted({one.many - 2 for one in whole if isinstance(one, Texts)})) > 1:
            refuse(None, "data.negative_key", f"{many[0]} negatives in one source, {many[-1]} in another", "as many in each")


@register
class Contrastive(Embed):
    """A text, one that is near it, and texts that are not: the near one is to be found among all of the forward. van den Oord et
    al., 2018 (InfoNCE); Henderson et al., 2017, section 4.4."""

    name = "contrastive"
    keys = ("text_key", "pair_key", "negative_key")
    metrics = ("accuracy",)
    of = ("loss", "classes")
    together = True

    def sample(self, batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None) -> str:
        return told(batch, tokenizer, ("near", "far"))

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Texts":
        made = Texts(records, read, data)
        made.tell_again(records)
        return made


@register
class Similarity(Embed):
    """Two texts and how alike they are: the cosine of their vectors should be the score."""

    name = "similarity"
    keys = ("text_key", "pair_key", "label_key", "score_max")
    metrics = ("pearson", "spearman")
    of = ("loss", "values")

    def told(self, logits: "Tensor") -> "Tensor":
        return logits

    def sample(self, batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None) -> str:
        return f"{told(batch, tokenizer, ('to',))}\n  score: {float(batch['labels'][0]):g}"

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Texts":
        return Scored(records, read, data)


class Texts(Packable):
    """Rows of two texts or more, of `seq_len` tokens each at most. The length of a row is that of its texts together."""

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        self.fill, self.ids, self.scores = filler(read.tokenizer), Ragged(), array("d")
        self.many = 0  # texts of a row

        def rows() -> Iterator[tuple[Record, str, None]]:
            for record in records:
                texts = texts_of_row(record, data)
                self.many = self.many or len(texts)
                if len(texts) != self.many:
                    record.refuse(f"{len(texts) - 2} negatives where the first record has {self.many - 2}", "as many for each")
                self.scores.append(self.score(record, data))
                yield from ((record, text, None) for text in texts)

        for ids, _ in read.encode_pairs(rows(), data.seq_len):
            self.ids.append(ids)
        self.size = self.many * data.seq_len
        self.lengths = np.diff(self.ids.bounds).reshape(-1, self.many).sum(1)

    def tell_again(self, records: Sequence[Record]) -> None:
        """Warn of rows whose text, or the one near it, is that of another row: what is near to the one counts as far from the
        other."""
        texts = np.array([hash(self.ids[k].tobytes()) for k in range(len(self.ids))]).reshape(-1, self.many)
        again = np.zeros(len(texts), bool)
        for column, among in ((texts[:, 0], texts[:, 0]), (texts[:, 1], texts[:, 1:])):
            values, counts = np.unique(among, return_counts=True)
            again |= counts[np.searchsorted(values, column)] > 1
        if again.any():
            first = records[int(again.argmax())]
            said = f"{again.sum():,} of {len(again):,} pairs have a text of another (first: {first.file}, {first.place()})"
            warnings.warn(f"{said}: what is near to the one counts as far from the other, where a forward has both", stacklevel=3)

    def score(self, record: Record, data: DataConfig) -> float:
        """The label of a record; here all say the same, and where the pair of a row stands is known when a batch is made."""
        return 0

    def __len__(self) -> int:
        return len(self.scores)

    def at(self, epoch: int, index: int) -> tuple[list[Ids], float]:
        """(the ids of each text, score)."""
        return [self.ids[self.many * index + k] for k in range(self.many)], self.scores[index]

    def rows(self, examples: list[tuple[list[Ids], float]]) -> list[Ids]:
        """The texts in the order of a batch."""
        return [texts[k] for k in range(self.many) for texts, _ in examples]

    def labels(self, examples: list[tuple[list[Ids], float]]) -> "Tensor":
        """(n): where the near text of each first one stands behind these."""
        return tensor(range(len(examples)))

    def collate(self, examples: list[tuple[list[Ids], float]]) -> Batch:
        """input_ids and attention_mask (k n, s) of n rows of k texts; labels (n)."""
        rows = self.rows(examples)
        return {"input_ids": stack(rows, self.fill), "attention_mask": stack_mask(rows), "labels": self.labels(examples)}

    def pack(self, examples: list[tuple[list[Ids], float]]) -> Batch:
        """As `collate.pack`; labels (n)."""
        return pack(self.rows(examples)) | {"labels": self.labels(examples)}


class Scored(Texts):
    """Two texts and a score in place of a place."""

    def score(self, record: Record, data: DataConfig) -> float:
        value = record.get(data.label_key, "data.label_key")
        try:
            number = math.nan if isinstance(value, bool) else float(value) / data.score_max
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not -1 <= number <= 1:
            wanted = f"a number of -{data.score_max:g} to {data.score_max:g} (data.score_max)"
            record.refuse(f"{data.label_key} is {value!r}", wanted)
        return number

    def labels(self, examples: list[tuple[list[Ids], float]]) -> "Tensor":
        """(n), fp32: the score of each pair."""
        return tensor([score for _, score in examples])


def texts_of_row(record: Record, data: DataConfig) -> list[str]:
    """The text, its partner and its negatives: one text, or a list of them."""
    found = [record.text(data.text_key, "data.text_key"), record.text(str(data.pair_key), "data.pair_key")]
    if data.negative_key is None:
        return found
    negatives = record.unfolded(data.negative_key, next(reached(record.fields, data.negative_key), None))
    if not isinstance(negatives, list):
        return [*found, record.text(data.negative_key, "data.negative_key")]
    if odd := [text for text in negatives if not isinstance(text, str)]:
        record.refuse(f"{data.negative_key} holds {odd[0]!r}", "texts")
    return [*found, *negatives]


def told(batch: Batch, tokenizer: "Tokenizer", words: Sequence[str]) -> str:
    """The texts of the first row, a line each; the last of `words` stands before all that have no other."""
    n = len(batch["labels"])
    sequences = len(batch["input_ids"]) if "attention_mask" in batch else len(batch["cu_seq_lens_q"]) - 1
    lines = [shortened(tokenizer.decode(nth(batch, k), special=True)) for k in range(0, sequences, n)]
    said = [*words, *[words[-1]] * len(lines)]
    return "\n".join([lines[0], *(f"  {word}: {line}" for word, line in zip(said, lines[1:], strict=False))])
