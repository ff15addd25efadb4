"""Finds the labels in the data and numbers them: classes, sets of labels and tags of words alike."""

import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import counted, nearest, refuse
from .objective import Names
from .record import Record, declared

MOST = 10_000_000  # classes that go by number: what has more are no classes, and a name for each would take all memory
MISSING = (  # what stands for no value where pandas reads or writes a table, and SNLI's mark for a pair without a label
    "", "-", "#N/A", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip


class Sorted(str):
    """The name of a label whose number is its place in the alphabet: nobody who numbers labels means that."""


def label_names(
    records: Sequence[Record], labels: Callable[[Record], Iterable[Any]], key: str, known: Names = (), *, gaps: bool = True
) -> tuple[str, ...]:
    """The names of the labels of `records`, which `labels` finds in one, in the order of their numbers: those `known`, if all that
    occur are among them; those of a data set that numbers its labels, whether they occur or not, in its order (class 1, which F1 is
    about, is then the data set's); LABEL_0 ... for numbers, up to the highest, each of which must occur unless there may be `gaps`;
    else the names that occur, sorted. `key`: the field that holds them, for what is refused: names beside numbers, or where those
    `known` are numbers, numbers below 0, fewer than two labels."""
    values = {label for record in records for label in labels(record)}
    if among(values, known):
        return known
    numbers = {label_number(value) for value in values}
    if (own := declared(values)) is not None:
        names = own
    elif None in numbers:
        unnamed = known[:1] == ("LABEL_0",)  # then sorted names would get the numbers of any classes
        for record in records:
            if unnamed and (odd := [label for label in labels(record) if label not in known and label_number(label) is None]):
                record.refuse(f"{key} has {odd[0]!r}", f"a number: this model's classes are the numbers 0 to {len(known) - 1}")
            if odd := [label for label in labels(record) if not isinstance(label, str)]:
                record.refuse(f"{key} has {odd[0]!r}", "a name, as elsewhere in the data")
        names = tuple(map(Sorted, sorted(values)))
        tell_alike(records[0].file, key, names)
        for name in MISSING:
            if name in names:
                tell_missing([record for record in records for label in labels(record) if label == name], key, name)
    else:
        there = sorted(n for n in numbers if n is not None)
        if there and (there[0] < 0 or there[-1] >= (MOST if gaps else len(there))):
            wanted = f"numbers from 0 on, below {MOST:,}" if gaps else "numbers from 0 on without a gap"
            refuse(records[0].file, key, f"the labels {str(there)[:80]}", wanted)
        names = tuple(f"LABEL_{n}" for n in range(max(there, default=-1) + 1))
    if len(names) < 2:
        refuse(records[0].file, key, f"only the label {names[0]}" if names else "no label", "two labels at least")
    return names


def tell_alike(file: str, key: str, names: Names) -> None:
    """Warn of labels that are likely to be one, written in several ways."""
    alike: dict[str, list[str]] = {}
    for name in names:
        seen = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf")  # which has no width
        alike.setdefault(" ".join(seen.casefold().split()), []).append(name)
    if same := [group for group in alike.values() if len(group) > 1]:
        group = same[0][:4]
        differ = len({unicodedata.normalize("NFC", name) for name in group}) == len(group)  # else they would be shown as one
        first = " and ".join((repr if differ else ascii)(name)[:60] for name in group)
        more = ", as do others" if len(same) > 1 else ""
        said = f"{first} differ in spaces, capitals or Unicode spelling alone{more}: each is a label of its own"
        warnings.warn(f"{file}: {key}: {said}", stacklevel=3)


def tell_missing(records: Sequence[Record], key: str, name: str) -> None:
    """Warn of a label that is likely to stand for none. `records`: those that have it, once for each time."""
    times = f"{counted(len(records), 'time')}, first in {records[0].place()}"
    said = f"{name!r} ({times}) is a label of its own: leave it out of the data if it stands for none"
    warnings.warn(f"{records[0].file}: {key}: {said}", stacklevel=3)


def index_of(record: Record, label: Any, names: Sequence[str], key: str) -> int:
    """The place among `names` of a label that a record names, or numbers."""
    if label in names:
        return names.index(label)
    number = label_number(label)
    if number is None or not 0 <= number < len(names):
        known = nearest(label, names) if number is None else f"0 to {len(names) - 1} are known"
        record.refuse(f"{key}: {label!r} is no label that was trained", known)
    if isinstance(names[number], Sorted):
        record.refuse(f"{key}: {label!r} is a number, where the data to train on have names", nearest(label, names))
    return number


def among(values: Iterable[Any], known: Names) -> bool:
    """Whether each label is one of those `known`, by its name, or each by its number, as the data set's own numbers are not."""
    values = list(values)
    numbers = [label_number(value) for value in values]
    by_number = declared(values) is None and all(n is not None and 0 <= n < len(known) for n in numbers)
    return bool(known) and (all(value in known for value in values) or by_number)


def label_number(label: Any) -> int | None:
    """A label given by number, which in CSV and TSV is text; false is 0 and true 1."""
    if isinstance(label, int):
        return int(label)
    text = label.removeprefix("-") if isinstance(label, str) else ""
    return int(label) if text.isascii() and text.isdigit() and len(text) < 10 else None
