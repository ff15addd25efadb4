"""A label for one text or a pair of texts: a class, or a number."""

import math
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..collate import Batch, join, pack, stack, stack_mask, tensor
from ..config import DataConfig
from ..examples import Examples, Packable
from ..labels import index_of, label_names, label_number
from ..objective import Names, Objective, register
from ..ragged import Ids, Ragged
from ..record import ClassName, Record
from ..sequence import filler

if TYPE_CHECKING:
    from torch import Tensor

    from ..encode import Reader

LARGEST = float(np.finfo(np.float32).max)
CHANCE = 0.01  # below which a class is not absent by chance
SET = re.compile(r"""\s*[\[({](?:\s*["'].*["'][\s,]*|[\d\s,]*)[\])}]\s*""", re.DOTALL)  # a list, a tuple or a set


class Judged(Objective):
    """A label of one text or two."""

    task = "classify"
    keys = ("text_key", "pair_key", "label_key")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        yield record.text(data.text_key, "data.text_key")
        if data.pair_key is not None:
            yield record.text(data.pair_key, "data.pair_key")


@register
class Classify(Judged):
    name = "classify"
    named = True
    metrics = ("accuracy",)
    of = ("loss", "classes")

    def names(self, records: Sequence[Record], data: DataConfig, known: Names = ()) -> Names | None:
        return label_names(records, partial(class_of, key=data.label_key), data.label_key, known, gaps=False)

    def settle(self, config: Any) -> Mapping[str, Any]:
        config.single_label()
        return {}

    def unlike(self, found: Examples, held_out: Examples) -> str:
        found = getattr(found, "examples", found)  # packed
        if not isinstance(found, Labelled) or not isinstance(held_out, Labelled):
            return ""
        often, there = Counter(found.labels), set(held_out.labels)
        absent = [found.names[k] for k, n in sorted(often.items())
                  if k not in there and (1 - n / len(found)) ** len(held_out) < CHANCE]  # fmt: skip
        return f"no {' and no '.join(absent[:3])}" if absent else ""

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Labelled":
        return Labelled(records, read, data)


@register
class Regress(Judged):
    name = "regress"
    metrics = ("pearson", "spearman")
    of = ("loss", "values")
    classes = False

    def names(self, records: Sequence[Record], data: DataConfig, known: Names = ()) -> Names | None:
        return ("LABEL_0",)  # transformers' name of the one output

    def settle(self, config: Any) -> Mapping[str, Any]:
        config.numbers()
        return {"problem_type": "regression"}

    def told(self, logits: "Tensor") -> "Tensor":
        return logits.squeeze(-1)

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Labelled":
        return Valued(records, read, data)


@register
class Multilabel(Judged):
    """Several labels, any number of which may apply."""

    name = "multilabel"
    named = True
    metrics = ("f1_micro", "f1_macro")
    of = ("loss", "sets")
    classes = False

    def names(self, records: Sequence[Record], data: DataConfig, known: Names = ()) -> Names | None:
        names = label_names(records, partial(labels_of, key=data.label_key), data.label_key, known)
        if joined := {name for name in names if ";" in name or "|" in name}:
            tell_joined(records, data.label_key, joined)
        return names

    def settle(self, config: Any) -> Mapping[str, Any]:
        config.numbers()
        return {"problem_type": "multi_label_classification"}

    def targets(self, labels: "Tensor") -> "Tensor":
        return labels[..., 0]  # one an example, as the loss is a mean over the labels

    def told(self, logits: "Tensor") -> "Tensor":
        return logits > 0  # where a probability is above a half

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Labelled":
        return Several(records, read, data)


class Labelled(Packable):
    """One text or two, and a class; `read.names` are the classes in order."""

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        self.names, self.fill, self.size = read.names, filler(read.tokenizer), data.seq_len
        self.ids, self.segments, self.labels = Ragged(), Ragged(), self.holder()
        paired = False

        def texts() -> Iterator[tuple[Record, str, str | None]]:
            nonlocal paired
            for record in records:
                for first, second, label in self.rows(record, data):
                    self.labels.append(label)
                    paired |= second is not None
                    yield record, first, second

        for ids, segments in read.encode_pairs(texts(), data.seq_len, "texts" if data.pair_key is None else "pairs"):
            self.ids.append(ids)
            self.segments.append(segments)
        self.lengths = np.diff(self.ids.bounds)
        # Decided once, so that every batch has the same keys; families without segments get none to refuse.
        self.segmented = paired and read.segmented

    def rows(self, record: Record, data: DataConfig) -> Iterator[tuple[str, str | None, Any]]:
        """The examples of a record, which is one: (text, the one of its pair, label)."""
        first = record.text(data.text_key, "data.text_key")
        second = None if data.pair_key is None else record.text(data.pair_key, "data.pair_key")
        yield first, second, self.label(record, data.label_key)

    def holder(self) -> Any:
        """What labels are kept in."""
        return array("q")

    def label(self, record: Record, key: str) -> Any:
        """The number of a record's class."""
        return index_of(record, record.get(key, "data.label_key"), self.names, key)

    def tensor(self, labels: Sequence[Any]) -> "Tensor":
        """(b): the labels of a batch."""
        return tensor(labels)

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids, int]:
        """(ids, segments, class)."""
        return self.ids[index], self.segments[index], self.labels[index]

    def collate(self, examples: list[tuple[Ids, Ids, int]]) -> Batch:
        """input_ids, attention_mask and, for pairs, token_type_ids: (b, s); labels: (b)."""
        ids, segments, labels = zip(*examples, strict=True)
        batch = {"input_ids": stack(ids, self.fill), "attention_mask": stack_mask(ids), "labels": self.tensor(labels)}
        return batch | ({"token_type_ids": stack(segments, 0)} if self.segmented else {})

    def pack(self, examples: list[tuple[Ids, Ids, int]]) -> Batch:
        """As `pack`; labels: (n), one a sequence."""
        ids, segments, labels = zip(*examples, strict=True)
        batch = pack(ids) | {"labels": self.tensor(labels)}
        return batch | ({"token_type_ids": join(segments)} if self.segmented else {})


class Several(Labelled):
    """One text or two, and any number of the labels `names`."""

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        key = data.label_key
        vectors = ([*map(label_number, labels_of(record, key))] in ([0, 1], [1, 0]) for record in records)
        if len(read.names) == 2 and all(vectors):  # else both labels would apply everywhere
            refuse_vector(records[0], key, labels_of(records[0], key))
        super().__init__(records, read, data)

    def holder(self) -> Any:
        return Ragged()

    def label(self, record: Record, key: str) -> list[int]:
        return sorted({index_of(record, value, self.names, key) for value in labels_of(record, key)})

    def tensor(self, labels: Sequence[Any]) -> "Tensor":
        """(b, names), fp32: 1 where a label is there."""
        return tensor([[float(k in there) for k in range(len(self.names))] for there in labels])


class Valued(Labelled):
    """One text or two, and a number; labels are fp32."""

    def holder(self) -> Any:
        return array("d")

    def label(self, record: Record, key: str) -> float:
        """The number that is wanted; of a class that the data set numbers (stars), its number."""
        value = record.get(key, "data.label_key")
        value = value.among.index(value) if isinstance(value, ClassName) else value
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):  # the last: an integer may have any length
            number = math.nan
        if not abs(number) <= LARGEST:
            record.refuse(f"{key} is {value!r}", f"a number, at most {LARGEST:.1e} from 0")
        return number


def class_of(record: Record, key: str) -> list[Any]:
    """The class of a record, which is one label."""
    value = record.get(key, "data.label_key")
    if not isinstance(value, str | int) or (isinstance(value, str) and not value.strip()):  # a cell that nobody filled in
        wanted = "the name or the number of a class; objective=regress is for values, multilabel for lists"
        record.refuse(f"{key} is {'null' if value is None else repr(value)[:60]}", wanted)
    return [value]


def labels_of(record: Record, key: str) -> list[Any]:
    """The labels of a record: a list or its JSON, or text separated by commas; an empty list means none. One that says 0 or 1 of
    each label is refused."""
    value = record.unfolded(key, record.get(key, "data.label_key"), SET)
    if isinstance(value, str):
        value = [label.strip() for label in value.split(",") if label.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(label, str | int) for label in value):
        record.refuse(f"{key} is {str(value)[:60]!r}", "a list of labels (data.label_key names the field)")
    if len(numbers := {label_number(label) for label in value}) < len(value) and numbers <= {0, 1}:
        refuse_vector(record, key, value)
    return list(value)


def tell_joined(records: Sequence[Record], key: str, joined: set[str]) -> None:
    """Warn of a text that is likely to be several labels with another mark between them; in a list it is meant."""
    for record in records:
        value = record.get(key, "data.label_key")
        if isinstance(value, str) and value.strip() in joined:
            said = f"{value.strip()!r} is one label: commas part labels, and no other mark"
            warnings.warn(f"{record.file}: {record.place()}: {key}: {said}", stacklevel=3)
            return


def refuse_vector(record: Record, key: str, value: Sequence[Any]) -> NoReturn:
    record.refuse(f"{key} is {str(value)[:60]}, a 0 or a 1 for each label", "the names or the numbers of those that apply")
