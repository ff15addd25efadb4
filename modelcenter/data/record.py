"""A record, which knows where it comes from, and sequences of records that are read on demand."""

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np

from ..errors import nearest, refuse
from ..parallel.watch import beat

NAME = 40  # characters of a field's name at most
FIELD = re.compile(r"\{([^{}]+)\}")
LIST = re.compile(r"""\s*\[(?:\s*["'].*["']\s*|[\d\s,]*)\]\s*""", re.DOTALL)  # of texts, or of numbers
CHATS, PAIRS = "the recipe instruct", "finetune with data.prompt_key and data.response_key"
ROWS = {  # what rows of these fields are for, where another field is looked for in vain
    ("messages",): CHATS, ("conversations",): CHATS, ("instruction", "output"): CHATS,
    ("prompt", "response"): PAIRS, ("prompt", "completion"): PAIRS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """Fields, with the place from which they came: a line, or, for a whole document, the character where it starts."""

    fields: dict[str, Any]
    file: str
    line: int | None
    start: int = 0
    unit: str = "line"  # what `line` counts: a table has rows

    def get(self, key: str, option: str) -> Any:
        """The field `key`, or `outer.inner` inside a field that is a mapping, to any depth. `option` is the recipe's key that named
        it. A record without it is refused."""
        for value in reached(self.fields, key):
            return value
        if self.unit == "document":
            self.refuse_ids(key, option)
        other = next((what for names, what in ROWS.items() if self.fields.keys() >= {*names}), None)
        told = f"; such rows are for {other}" if other and option in ("data.text_key", "data.messages_key") else ""
        whole = nearest(key, self.fields)  # a field before what is in one: answers as a whole are wanted
        said = whole if whole.startswith("did") else nearest(key, self.names())
        odd = [name for name in self.fields if name.isdigit() or len(name) > NAME]
        table = self.file.removesuffix(".gz").endswith((".csv", ".tsv"))
        if table and 0 < len(odd) < len(self.fields):  # values in place of names; all are numbers where data.header=false
            said = f"data.header=false, if the first row is a record: {odd[0][:NAME]!r} is no name"
        alone = next(iter(self.fields)) if table and len(self.fields) == 1 else ""  # of all the names one was made
        if apart := next((mark for mark in ";|,\t" if key in alone.split(mark)), None):
            said = f"{'tabs' if '.tsv' in Path(self.file).suffixes else 'commas'} between fields, and not {apart!r}"
            if (kind := {"\t": "tsv", ",": "csv"}.get(apart)) and option.startswith("data."):
                said = f"data.format={kind}, as {apart!r} is between its fields"
        self.refuse(f"no field {key!r}", f"{said} ({option} names the field{told})")

    def refuse_ids(self, key: str, option: str) -> NoReturn:
        """Refuse the request for a field if a token file has only ids: usually for text on which to train a tokenizer."""
        from .indexed import TokenFile  # which imports this file

        made = str(TokenFile(Path(self.file)).made_by.get("tokenizer", ""))
        named = (os.path.dirname(made) if os.path.isfile(made) else made) or "NAME"
        reads = "an objective that reads them, such as lm"
        wanted = f"tokenizer={named}, which has made them; and {reads}" if option == "data.text_key" else reads
        self.refuse(f"ids of tokens, and no field {key!r}", wanted)

    def names(self) -> list[str]:
        """The names by which a key may ask for its fields."""
        return list(dotted(self.fields))

    def text(self, key: str, option: str) -> str:
        """The field `key`, which must be text. If `key` is not a field, it may be a text that names fields in braces."""
        if key not in self.fields and FIELD.search(key):
            return FIELD.sub(lambda field: self.part(field[1], option), key)
        value = self.get(key, option)
        if not isinstance(value, str):
            inside = f", such as {next(dotted(value, f'{key}.'))}" if isinstance(value, dict) and value else ""
            found = json.dumps(value, default=str, ensure_ascii=False)[:60]
            self.refuse(f"{key} is {found}", f"text{inside} ({option} names the field)")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            self.refuse(f"{key} holds half a surrogate pair at character {e.start}", "valid Unicode")
        return value

    def part(self, key: str, option: str) -> str:
        """The field `key`, for a text that names it in braces: text, or a number as a table has it."""
        value = self.get(key, option)
        return str(value) if type(value) in (int, float) else self.text(key, option)

    def unfolded(self, key: str, value: Any, looks: re.Pattern[str] = LIST) -> Any:
        """`value`, or the list whose JSON it is: the only way in which a table can hold a list. Anything else that `looks` like a
        list is refused."""
        listed = isinstance(value, str) and looks.fullmatch(value)
        return self.loaded(key, value, "its JSON, as json.dumps writes it") if listed else value

    def loaded(self, key: str, value: Any, wanted: str) -> Any:
        """`value`, or the value of its JSON, for a field that is never text itself; None for an empty cell."""
        if not isinstance(value, str):
            return value
        if not value:
            return None
        try:
            found = json.loads(value)
            if "\\ud" in value.lower():
                json.dumps(found, ensure_ascii=False).encode()  # which half a surrogate pair has no bytes for
            return found
        except (ValueError, RecursionError) as e:
            self.refuse(f"{key} is {value[:60]}, text that is not JSON ({e})", wanted)

    def refuse(self, found: str, wanted: str, offset: int = 0) -> NoReturn:
        """Refuse this record by file and line; for a document by character, `offset` counted from its start."""
        refuse(self.file, self.place(offset), found, wanted)

    def place(self, offset: int = 0) -> str:
        """Where it stands in its file: the line, or, of a document, a character, `offset` counted from its start."""
        return f"character {self.start + offset}" if self.line is None else f"{self.unit} {self.line}"


def reached(fields: dict[str, Any], key: str) -> Iterator[Any]:
    """What `key` names: a field, or, after a dot, one within a field that is a mapping; names may contain dots themselves."""
    if key in fields:
        yield fields[key]
    for dot in (place for place, letter in enumerate(key) if letter == "."):
        if isinstance(within := fields.get(key[:dot]), dict):
            yield from reached(within, key[dot + 1 :])


def dotted(fields: dict[str, Any], before: str = "") -> Iterator[str]:
    """The names of fields, with those inside mappings after dots; below the fourth dot they are not listed."""
    for name, value in fields.items():
        if isinstance(value, dict) and value and before.count(".") < 4:
            yield from dotted(value, f"{before}{name}.")
        else:
            yield f"{before}{name}"


class ClassName(str):
    """The name of a class in data that numbers its classes; `among`: the names of all classes, in the order of their numbers."""

    among: tuple[str, ...]


def class_names(names: Iterable[str]) -> list[ClassName]:
    """The names of all classes, in the order of their numbers."""
    made = [ClassName(name) for name in names]
    for name in made:
        name.among = tuple(map(str, made))
    return made


def declared(values: Iterable[Any]) -> tuple[str, ...] | None:
    """The names of all classes in the order of their numbers, if each of `values` is one of the same. Some need not occur."""
    found = {getattr(value, "among", None) for value in values}
    return found.pop() if len(found) == 1 else None


class Part(ABC, Sequence[Record]):
    """Records by number; slicing reads nothing."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def at(self, index: int) -> Record:
        """The record at `index`, from 0 on."""

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> "Part": ...
    def __getitem__(self, index: int | slice) -> "Record | Part":
        if isinstance(index, slice):
            return Slice(self, range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.at(index % len(self))

    def __iter__(self) -> Iterator[Record]:
        for index in range(len(self)):
            beat()  # reading, labelling, encoding, training a tokenizer: all of them go through the records
            yield self.at(index)


class Slice(Part):
    """Some of other records, in order."""

    def __init__(self, records: Part, places: range) -> None:
        self.records, self.places = records, places

    def __len__(self) -> int:
        return len(self.places)

    def at(self, index: int) -> Record:
        return self.records.at(self.places[index])


class Few(Part):
    """Records that are in memory."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def at(self, index: int) -> Record:
        return self.records[index]


class Records(Part):
    """Parts one after the other."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = [part for part in parts if len(part)]
        self.ends = np.cumsum([len(part) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.parts else 0

    def at(self, index: int) -> Record:
        part = int(np.searchsorted(self.ends, index, "right"))
        return self.parts[part].at(index - (int(self.ends[part - 1]) if part else 0))

    def __iter__(self) -> Iterator[Record]:
        return (record for part in self.parts for record in part)


class Mixture(Records):
    """Sources that are drawn from in the proportions of their weights; without weights, one after the other."""

    def __init__(self, sources: Sequence[Part], weights: Sequence[float] | None = None) -> None:
        super().__init__(sources)
        self.sources, self.weights = sources, weights
