"""Dotted assignments, of a command line or from Python, put over what a file says.

A value from the command line stays `Text` until `bind` knows the wanted type: `model=2024` is a name, `max_steps=2024`
a number. Its type is also its origin, which errors name.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import refuse
from .document import DEPTH, encodable

COMMAND_LINE = "command line"
KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


class Text(str):
    """A value as it was typed on the command line, not yet read."""


def override(mapping: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with `["a.b=v", ...]` (or `{"a.b": v}` from Python) put over it; an override wins over the file."""
    return merge(mapping, assignments(overrides))


def assignments(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted assignments as one nested mapping whose strings from a command line are still `Text`."""
    tree: dict[str, Any] = {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else [_split(o) for o in overrides]
    for dotted, value in pairs:
        if not KEY.fullmatch(dotted) or dotted.count(".") >= DEPTH:
            refuse(COMMAND_LINE, dotted, "not a key", "write key=value or section.key=value")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                refuse(COMMAND_LINE, dotted, f"{section!r} is given as a whole too", "keep one of them")
        if key in at:
            refuse(COMMAND_LINE, dotted, "given twice", "keep one of them")
        at[key] = value
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `over` replaced, section by section; neither argument changes."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict):
            value = merge(below if isinstance(below, dict) else {}, value)
        merged[key] = value
    return merged


def _split(assignment: str) -> tuple[str, Text]:
    key, equals, value = assignment.partition("=")
    if not equals:
        refuse(COMMAND_LINE, assignment, "no value", "write key=value")
    if "\0" in value or not encodable(value):
        refuse(COMMAND_LINE, key, "not UTF-8", "text that UTF-8 can hold")
    return key, Text(value)
