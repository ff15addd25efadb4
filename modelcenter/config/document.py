"""One strict YAML document as plain values, and back.

YAML is read from PyYAML's event stream in pure Python, never through a loader: nothing is constructed, nothing recurses deeper than
`DEPTH`, and what recipes do not use (tags, anchors, aliases, merge keys, several documents, tabs) is refused by name. Plain scalars
mean what YAML 1.2's core schema says, so `3e-4` is a number and `no` is text.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ..errors import InputError, refuse

DEPTH = 32  # levels of nesting; libyaml overflows the stack far beyond, Python's recursion somewhat before
NODES = 10_000  # values of a recipe: keeps the refusal of a hostile file under a second


HINTS = {  # what PyYAML says, and what helps
    "expected alphabetic or numeric": "quotes around text that begins with * or &",
    "cannot start any token": "quotes around text that begins so",
    "mapping values are not allowed": "the indentation of the keys beside it, or quotes around text with a colon in it",
    "could not find expected ':'": "a key, a colon, a space and a value",
    "<block end>, but found '<block mapping start>'": "the indentation of the keys beside it",
    "unexpected end of stream": "a closing quote",
}
LATE = "could not find expected ':'", "found unexpected end of stream"  # told of where it noticed, not of where that begins


def parse(text: str, file: str | Path | None = None) -> Any:
    """One strict YAML document as dicts (with text keys), lists, text, finite numbers, booleans and None."""
    if "\t" in text:
        refuse(file, f"line {text[: text.index(chr(9))].count(chr(10)) + 1}", "a tab", "indent with spaces")
    try:
        return _Composer(text, file).document()
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        found = error.problem or error.context or "cannot be read"
        wanted = next((hint for said, hint in HINTS.items() if said in found), "correct the YAML")
        marks = error.problem_mark, error.context_mark
        mark = next(filter(None, reversed(marks) if found in LATE else marks), None)
        refuse(file, f"line {mark.line + 1}, column {mark.column + 1}" if mark else None, found, wanted)
    except yaml.reader.ReaderError as error:
        refuse(file, f"character {error.position}", f"U+{error.character:04X}", "remove the control character")
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:  # PyYAML on `"\UFFFFFFFF"`, `%YAML 1.` ...
        refuse(file, None, f"cannot be read ({error})", "correct the YAML")


class _Composer:
    """Builds Python values from YAML events, and refuses what is not allowed."""

    def __init__(self, text: str, file: str | Path | None) -> None:
        self.file = file
        self.events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self.nodes = 0

    def refuse(self, event: yaml.Event, found: str, wanted: str) -> NoReturn:
        refuse(self.file, f"line {_line(event)}", found, wanted)

    def document(self) -> Any:
        value: Any = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.refuse(event, "a second document", "one document in a file")
                if event.version or event.tags:
                    self.refuse(event, "a % directive", "leave it out")
                value = self.value(next(self.events), 0)
        return value

    def value(self, event: yaml.Event, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > NODES:
            self.refuse(event, f"more than {NODES} values", f"a recipe has at most {NODES}")
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"the alias *{event.anchor}", "write the value out")
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if event.anchor is not None:
            self.refuse(event, f"the anchor &{event.anchor}", "write the value out where it is used")
        if event.tag is not None:
            self.refuse(event, f"the tag {event.tag}", "plain values only")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if depth >= DEPTH:
            self.refuse(event, f"nested more than {DEPTH} deep", "a flatter recipe")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(depth)
        values = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self.value(event, depth + 1))
        return values

    def mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.value(event, depth + 1)  # an alias, anchor or tag is refused under its own name
                self.refuse(event, "a key that is not a word", "a key is plain text")
            if event.value == "<<" and event.style is None:
                self.refuse(event, "the merge key <<", "write the values out")
            self.value(event, depth + 1)
            key, line = event.value, _line(event)
            if key in lines:
                refuse(self.file, key, f"given on line {lines[key]} and on line {line}", "keep one of them")
            lines[key] = line
            values[key] = self.value(next(self.events), depth + 1)
        return values

    def scalar(self, event: yaml.ScalarEvent) -> Any:
        text = event.value
        if "\0" in text or not encodable(text):
            self.refuse(event, f"{short(text)} with a NUL or half a surrogate pair", "text that UTF-8 can hold")
        if event.style is not None:
            return text
        try:
            return resolve(text)
        except ValueError as error:
            self.refuse(event, short(text), str(error))


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")  # 010 is eight to some: text
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
          "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}  # fmt: skip


def resolve(text: str) -> Any:
    """What a plain scalar means: None, a boolean, an integer, a finite number, or itself. A ValueError says what to write instead
    of nan, an infinity or an integer beyond 64 bits."""
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("a finite number; text goes in quotes")
    if _INT.fullmatch(text):
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise ValueError("an integer of at most 64 bits; text goes in quotes")
        return int(text)
    if _FLOAT.fullmatch(text):
        if math.isinf(number := float(text)):
            raise ValueError("a finite number; text goes in quotes")
        return number
    return text


# ------------------------------------------------------------------------------------------------------------ and back


def dump_yaml(mapping: Mapping[str, Any], indent: str = "") -> str:
    """YAML text that `parse` reads back exactly: text is quoted wherever it would mean something else."""
    lines = []
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{flow(str(key))}:\n{dump_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{flow(str(key))}: {flow(value)}\n")
    return "".join(lines) or "{}\n"


_SAFE = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)


def flow(value: Any) -> str:
    """`value` on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(v) for v in value) + "]"
    if isinstance(value, str):
        is_plain = _SAFE.fullmatch(value) and value not in _WORDS and not _NOT_FINITE.fullmatch(value)
        return value if is_plain else '"' + "".join(_escaped(c) for c in value) + '"'
    return _constant(value) or repr(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def short(value: Any) -> str:
    """`value` as messages show it."""
    if isinstance(value, Mapping):
        return "a mapping"
    text = _constant(value) or repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _constant(value: Any) -> str | None:
    return next((word for known, word in ((None, "null"), (True, "true"), (False, "false")) if value is known), None)


def encodable(text: str) -> bool:
    """Whether UTF-8 can encode `text`, which it cannot if there is half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
