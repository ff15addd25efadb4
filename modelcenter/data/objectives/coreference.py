"""Whether two spans of a text refer to the same thing: a class for a text in which both are marked.

A record has a text, a label and `target`, which gives each span by its text and by the number of its first word (from 0, words
separated by spaces), as SuperGLUE's WSC does (Levesque et al., 2012; Wang et al., 2019), or of its first character, as CLUE's does
(Xu et al., 2020). The marks are those of T5's authors: * around the first span, # around the second.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config import DataConfig
from ..objective import register
from ..record import Record
from .classify import Classify, Labelled

if TYPE_CHECKING:
    from ..encode import Reader

MARKS = {"span1": "*", "span2": "#"}
WORD = re.compile(r"\w+")
INSIDE = re.compile(r"(?<=[^\W_])(?=[^\W_])", re.ASCII)  # between two letters of a word; Chinese has no spaces to tell


@register
class Coreference(Classify):
    name = "coreference"
    keys = ("text_key", "label_key", "spans_key")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        yield marked(record, data)

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Marked":
        return Marked(records, read, data)


class Marked(Labelled):
    """A text with two spans marked, and a class."""

    def rows(self, record: Record, data: DataConfig) -> Iterator[tuple[str, str | None, Any]]:
        yield marked(record, data), None, self.label(record, data.label_key)


def marked(record: Record, data: DataConfig) -> str:
    """The text of a record with marks around its spans."""
    text, spans = record.text(data.text_key, "data.text_key"), record.get(data.spans_key, "data.spans_key")
    places: list[tuple[int, str]] = []
    for span, mark in MARKS.items():
        try:
            said, first = str(spans[f"{span}_text"]), int(spans[f"{span}_index"])
        except (KeyError, TypeError, ValueError, OverflowError):  # the last: a number may be Infinity
            record.refuse(f"{data.spans_key} is {str(spans)[:60]}", f"{span}_index and {span}_text (data.spans_key names them)")
        place = find(text, said, first)
        if place is None:
            found = f"{span} is {said[:40]!r} at {first}, where it does not stand"
            record.refuse(found, "words of the text, and the number of the first")
        places += [(place[0], f"{mark} "), (place[1], f" {mark}")]
    for at, mark in sorted(places, reverse=True):
        text = text[:at] + mark + text[at:]
    return text


def find(text: str, said: str, first: int) -> tuple[int, int] | None:
    """The range of characters in which `said` stands in `text`, by its letters, from word `first` on; or else from character
    `first` on, or from the next word on, because some of the published indices are one too low. Where other words stand between its
    own (`Kamenev and Zinoviev` for Lev Kamenev and Grigory Zinoviev), as many words of the text as it has. None elsewhere."""
    words = [word.span() for word in re.finditer(r"\S+", text)]
    letters = re.findall(r"[^\W_]", said)
    if not letters or first < 0:
        return None
    pattern = re.compile(r"[\W_]*(" + r"[\W_]*".join(map(re.escape, letters)) + r")(?![^\W_])", re.IGNORECASE)
    by_word, by_next = (pattern.match(text, words[k][0]) if k < len(words) else None for k in (first, first + 1))
    ends = first, first + len(said)
    if by_word is None and text.startswith(said, first) and not any(INSIDE.match(text, end) for end in ends):
        return ends
    if found := by_word or by_next:
        return found.span(1)
    taken = words[first : first + len(said.split())]
    common = {*WORD.findall(said)} & {word for a, b in taken for word in WORD.findall(text, a, b)}
    return (taken[0][0], taken[-1][1]) if len(common) > 1 else None
