"""A label for one text or for two: a class, or a number."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import nearest, refuse
from ..collate import IGNORED, Batch, join, nth, pack, shortened, stack, stack_mask, tensor
from ..config import DataConfig
from ..examples import Examples, Packable
from ..objective import Names, Objective, register
from ..ragged import Ids, Ragged
from ..record import ClassName, Record, declared
from ..sequence import filler

if TYPE_CHECKING:
    from torch import Tensor

    from ..encode import Reader
    from ..tokenizer import Tokenizer

CHANCE = 0.01  # below which a class is not absent by chance


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
        return label_names(records, data, known)

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
        return set_names(records, data, known)

    def settle(self, config: Any) -> Mapping[str, Any]:
        config.numbers()
        return {"problem_type": "multi_label_classification"}

    def targets(self, labels: "Tensor") -> "Tensor":
        return labels[..., 0]  # one an example, as the loss is a mean over the labels

    def told(self, logits: "Tensor") -> "Tensor":
        return logits > 0  # where a probability is above a half

    def sample(self, batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None) -> str:
        there = [name for name, value in zip(names or (), batch["labels"][0].tolist(), strict=True) if value]
        return f"{shortened(tokenizer.decode(nth(batch, 0), special=True))}\n  labels: {', '.join(there) or 'none'}"

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

        for ids, segments in read.encode_pairs(texts(), data.seq_len):
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
        return self.number(record, record.get(key, "data.label_key"), key)

    def tensor(self, labels: Sequence[Any]) -> "Tensor":
        """(b): the labels of a batch."""
        return tensor(labels)

    def number(self, record: Record, value: Any, key: str) -> int:
        """The number of a class that a record names, or numbers."""
        if value in self.names:
            return self.names.index(value)
        number = class_number(value)
        if number is None or not 0 <= number < len(self.names):
            known = nearest(value, self.names) if number is None else f"0 to {len(self.names) - 1} are known"
            record.refuse(f"{key} is {value!r}, which is no label that was trained", known)
        return number

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

    def holder(self) -> Any:
        return Ragged()

    def label(self, record: Record, key: str) -> list[int]:
        return sorted({self.number(record, value, key) for value in labels_of(record, key)})

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
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number == IGNORED:
            record.refuse(f"{key} is {value!r}", f"a number other than {IGNORED}")
        return number


def label_names(records: Sequence[Record], data: DataConfig, known: Names = ()) -> tuple[str, ...]:
    """The classes of `records`: names in sorted order; or, if the data set numbers its classes, all of them in its order (class 1,
    which F1 is about, is then the data set's); or LABEL_0 ... for numbers, which must run from 0 on. If all that occur are among
    those `known`, these are the classes."""
    values = [record.get(data.label_key, "data.label_key") for record in records]
    for record, value in zip(records, values, strict=True):
        if not isinstance(value, str | int) or (isinstance(value, str) and not value.strip()):  # a cell that nobody filled in
            wanted = "the name or the number of a class; objective=regress is for values, multilabel for lists"
            record.refuse(f"{data.label_key} is {value!r}", wanted)
    if among(values, known):
        return known
    numbers = {class_number(value) for value in values}
    if (own := declared(values)) is not None:
        names = list(own)
    elif None not in numbers:
        there = sorted(n for n in numbers if n is not None)
        if there != list(range(len(there))):
            found = f"the labels {str(there)[:80]}"
            refuse(records[0].file, data.label_key, found, "numbers from 0 on without a gap")
        names = [f"LABEL_{n}" for n in there]
    else:
        for record, value in zip(records, values, strict=True):
            if not isinstance(value, str):
                record.refuse(f"{data.label_key} is {value!r}", "a name, as elsewhere in the data")
        names = sorted(set(values))
    if len(names) < 2:
        refuse(records[0].file, data.label_key, f"only the class {names[0]}", "two classes at least")
    return tuple(names)


def set_names(records: Sequence[Record], data: DataConfig, known: Names = ()) -> tuple[str, ...]:
    """The labels that occur: names in sorted order; or, if the data set numbers its labels, all of them in its order; or LABEL_0
    ... for numbers, up to the highest. If all that occur are among those `known`, these are the labels."""
    values = {value for record in records for value in labels_of(record, data.label_key)}
    if among(values, known):
        return known
    numbers = {class_number(value) for value in values}
    if (own := declared(values)) is not None:
        names = list(own)
    elif None in numbers:
        if odd := [value for value in values if not isinstance(value, str)]:
            refuse(records[0].file, data.label_key, f"{odd[0]!r} beside names", "names, or numbers, throughout")
        names = sorted(values)
    else:
        names = [f"LABEL_{n}" for n in range(max((n for n in numbers if n is not None), default=-1) + 1)]
    if len(names) < 2:
        refuse(records[0].file, data.label_key, f"only the labels {names}", "two labels at least")
    return tuple(names)


def among(values: Iterable[Any], known: Names) -> bool:
    """Whether each label is one of those `known`, by its name, or each by its number, as the data set's own numbers are not."""
    values = list(values)
    numbers = [class_number(value) for value in values]
    by_number = declared(values) is None and all(n is not None and 0 <= n < len(known) for n in numbers)
    return bool(known) and (all(value in known for value in values) or by_number)


def labels_of(record: Record, key: str) -> list[Any]:
    """The labels of a record: a list, or text separated by commas; an empty list means none."""
    value = record.get(key, "data.label_key")
    if isinstance(value, str):
        return [label.strip() for label in value.split(",") if label.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(label, str | int) for label in value):
        record.refuse(f"{key} is {str(value)[:60]!r}", "a list of labels (data.label_key names the field)")
    return list(value)


def class_number(value: Any) -> int | None:
    """A class given by number, which in CSV and TSV is text; false is 0 and true 1."""
    if isinstance(value, int):
        return int(value)
    text = value.removeprefix("-") if isinstance(value, str) else ""
    return int(value) if text.isascii() and text.isdigit() and len(text) < 10 else None
