"""Whether two spans of a text refer to the same thing: a class for a text in which both are marked.

A record has a text, a label and `target`, which gives each span by its text and by the number of its first word (from 0, words
separated by spaces), as SuperGLUE's WSC does (Levesque et al., 2012; Wang et al., 2019), or of its first character, as CLUE's does
(Xu et al., 2020). The marks are those of T5's authors: * around the first span, # around the second.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..config import DataConfig
from ..objective import Names, register
from ..record import Record
from .classify import Classify, Labelled

if TYPE_CHECKING:
    from ..encode import Reader

MARKS = {"span1": "*", "span2": "#"}


@register
class Coreference(Classify):
    name = "coreference"
    keys = ("text_key", "label_key", "spans_key")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        yield marked(record, data)

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig, *, seed: int, train: bool, names: Names
                 ) -> "Marked":
        return Marked(records, read, data, names)


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
            record.refuse(f"{span} is {said[:40]!r} at {first}", "words of the text, and the number of the first, are wanted")
        places += [(place[0], f"{mark} "), (place[1], f" {mark}")]
    for at, mark in sorted(places, reverse=True):
        text = text[:at] + mark + text[at:]
    return text


def find(text: str, said: str, first: int) -> tuple[int, int] | None:
    """The range of characters in which `said` stands in `text`, from word `first` on; from character `first` on, if the text has
    fewer words. The published files sometimes differ from their texts in case and full stops; then whole words are compared."""
    words, parts = [word.span() for word in re.finditer(r"\S+", text)], said.split()
    if parts and 0 <= first <= len(words) - len(parts):
        begin, end = words[first][0], words[first + len(parts) - 1][1]
        found = re.search(r"\s+".join(map(re.escape, parts)), text[begin:end], re.IGNORECASE)
        return (begin + found.start(), begin + found.end()) if found else (begin, end)
    return (first, first + len(said)) if said and first >= 0 and text.startswith(said, first) else None
