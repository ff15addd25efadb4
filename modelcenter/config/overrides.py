"""Dotted assignments, from a command line or from Python, that override what a file says.

A value from the command line stays `Text` until `bind` knows the type it should have: `model=2024` is a name, `max_steps=2024` a
number.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import refuse
from .document import DEPTH, encodable

COMMAND_LINE = "command line"
KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


class Text(str):
    """A value as it was typed on the command line, not yet read."""


class Whole(dict[str, Any]):
    """A mapping that was given as one value rather than key by key."""


@dataclass(frozen=True)
class Layers:
    """Where settings come from: `over`, nested as `assignments` makes it and given at `name`, was put over those of `file`.
    `fixed`: what a file says that users do not edit."""

    file: str | Path | None
    over: Mapping[str, Any]
    name: str
    fixed: Mapping[str, Any] | None = None

    def of(self, key: str) -> str | Path | None:
        """The source of a dotted key, for error messages; for a missing key, where it can be given."""
        absent = self.fixed is not None and not says_key(self.fixed, key)
        return self.name if absent or says_key(self.over, key) else self.file


def says_key(tree: Mapping[str, Any], key: str) -> bool:
    """Whether nested settings have a dotted key, or one of its sections as a whole."""
    here: Any = tree
    while isinstance(here, Mapping) and key not in here:  # what is no section may have dots in it
        section, _, key = key.partition(".")
        if section not in here:
            return False
        here = here[section]
    return True


def override(mapping: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with `["a.b=v", ...]` (or `{"a.b": v}` from Python) applied to it; an override takes precedence over the file."""
    return merge(mapping, assignments(overrides))


def assignments(overrides: Iterable[str] | Mapping[str, Any], where: str = COMMAND_LINE) -> dict[str, Any]:
    """Dotted assignments as one nested mapping, in which strings from a command line are still `Text`. Errors name `where`."""
    if isinstance(overrides, str):
        refuse(where, overrides, "one text", "a list of them, or a mapping of keys to values")
    tree: dict[str, Any] = {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else [_split(o, where) for o in overrides]
    for dotted, value in pairs:
        if not isinstance(dotted, str) or not KEY.fullmatch(dotted) or dotted.count(".") >= DEPTH:
            refuse(where, str(dotted), "not a key", "write key=value or section.key=value")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                refuse(where, dotted, f"{section!r} is given as a whole too", "keep one of them")
        if key in at:
            refuse(where, dotted, "given twice", "keep one of them")
        # a section may be given whole, and then more of it: that is not put into the caller's own
        at[key] = Whole(merge({}, value)) if isinstance(value, dict) else value
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `over` replaced, section by section; neither argument changes. An empty mapping is a leaf: it
    empties a section, as `key={}` does on the command line."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict) and value:
            value = merge(below if isinstance(below, dict) else {}, value)
        merged[key] = value
    return merged


def _split(assignment: str, where: str) -> tuple[str, Text]:
    key, equals, value = assignment.partition("=")
    if not equals:
        refuse(where, assignment, "no value", "write key=value")
    if "\0" in value or not encodable(value):
        spoken = sys.getfilesystemencoding()  # in which Python has read the command line
        if spoken != "utf-8":
            refuse(where, key, f"more than {spoken} can hold, as which Python has read it", "PYTHONUTF8=1, or a locale of UTF-8")
        refuse(where, key, "not UTF-8", "text that UTF-8 can hold")
    return key, Text(value)
