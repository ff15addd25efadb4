"""The records of one file, in each format: text, JSON lines, JSON, CSV and TSV, all of them possibly gzipped, and parquet.

A text file is one document, or several of `DOCUMENT` bytes; a carriage return before a newline is left out, as Python does. The
first row of CSV and TSV names the fields; TSV has no quoting, as in GLUE, unless it is sure that a program has quoted it. The
positions of records are found at once; their contents are read on demand. Every refusal names the file and the line. Nothing here
imports torch.
"""

import csv
import io
import json
import re
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import refuse
from .record import Few, Part, Record
from .source import LONGEST_LINE, Source
from .table import Parquet

DOCUMENT = 4 << 20  # bytes: a tokenizer takes some hundred times as much memory for a text


class Documents(Part):
    """A text file as one document; a long one as several, each of which ends with a whole line."""

    def __init__(self, file: Path) -> None:
        self.source, self.bounds, self.starts = Source(file), [0], [0]
        size = self.source.size
        while (start := self.bounds[-1]) < size:
            stop = min(start + DOCUMENT, size)
            data = self.source.read(start, stop)
            stop = start + (data.rfind(b"\n") + 1 or self.line(start)) if stop < size else stop
            self.starts.append(self.starts[-1] + characters(self.source.read(start, stop), start == 0))
            self.bounds.append(stop)

    def line(self, start: int) -> int:
        """The number of bytes of the line that starts at byte `start`."""
        data = self.source.read(start, min(start + LONGEST_LINE + 1, self.source.size))
        end = data.find(b"\n") + 1 or len(data)
        if end > LONGEST_LINE:
            line = 1 + sum(self.source.read(a, b).count(b"\n") for a, b in pairwise(self.bounds))
            refuse(self.source.file, f"line {line}", "longer than 16 MiB", "text in lines")
        return end

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def at(self, index: int) -> Record:
        text = self.source.text(*self.bounds[index : index + 2])
        return Record({"text": text.replace("\r\n", "\n")}, str(self.source.file), None, self.starts[index])


def refuse_rows(part: Part) -> None:
    """Refuse text that is really JSON lines, before a model learns to write their braces."""
    if not isinstance(part, Documents) or not len(part):
        return
    line = part.source.text(0, part.bounds[1]).lstrip().partition("\n")[0]
    try:
        row = json.loads(line) if line[:1] == "{" else None
    except (ValueError, RecursionError):
        return
    if isinstance(row, dict) and row:
        refuse(part.source.file, "data.format", "its first line is a JSON object", "data.format=jsonl, or text if that is meant")


def characters(data: bytes, first: bool) -> int:
    """The number of characters in UTF-8 data: bytes that do not continue a character, without a carriage return before a newline,
    and, at the start of a file (`first`), without a byte-order mark."""
    codes = np.frombuffer(data, np.uint8)
    begun = int(np.count_nonzero((codes & 0xC0) != 0x80))
    return begun - data.count(b"\r\n") - (first and data.startswith(b"\xef\xbb\xbf"))


class Lines(Part):
    """The lines of a file that are not blank. A subclass makes a record of each."""

    def __init__(self, file: Path) -> None:
        self.source = Source(file)
        self.bounds = bounds = self.source.lines()
        first = np.frombuffer(b"".join(self.heads(bounds)), np.uint8)
        blank = np.isin(first, np.frombuffer(b" \t\r\n\v\f\x1c\x1d\x1e\x1f\xc2\xe1\xe2\xe3", np.uint8))
        blank[:1] = True  # a byte-order mark may stand alone; what may be blank is looked at
        for place in np.flatnonzero(blank):
            blank[place] = self.blank(self.text(int(place)))
        self.places = np.flatnonzero(~blank)

    def heads(self, bounds: Any) -> Iterator[bytes]:
        """The first byte of every line."""
        starts = bounds[:-1]
        for offset, chunk in self.source.chunks():
            here = starts[np.searchsorted(starts, offset) : np.searchsorted(starts, offset + len(chunk))] - offset
            yield np.frombuffer(chunk, np.uint8)[here].tobytes()

    def blank(self, line: str) -> bool:
        return line.isspace()

    def __len__(self) -> int:
        return len(self.places)

    def text(self, place: int) -> str:
        """The line at `place`, counted from 0."""
        start, stop = self.bounds[place : place + 2].tolist()
        return self.source.text(start, stop, place + 1)

    def line(self, index: int) -> tuple[int, str]:
        """The number, counted from 1 in the file, and the text of the line that record `index` is made of."""
        place = int(self.places[index])
        return place + 1, self.text(place)


class Texts(Lines):
    """A text a line, in the field `key`."""

    def __init__(self, file: Path, key: str) -> None:
        super().__init__(file)
        self.key = key

    def at(self, index: int) -> Record:
        number, line = self.line(index)
        return Record({self.key: line.rstrip("\r\n")}, str(self.source.file), number)


class JsonLines(Lines):
    """One object a line."""

    def at(self, index: int) -> Record:
        number, line = self.line(index)
        fields = parse(line, self.source.file, f"line {number}", "one JSON object a line")
        if not isinstance(fields, dict):
            more = "; data.format=json reads a list of them" if isinstance(fields, list) and number == 1 else ""
            refuse(self.source.file, f"line {number}", f"a JSON {type(fields).__name__}", f"one JSON object a line{more}")
        return Record(fields, str(self.source.file), number)


class Tsv(Lines):
    """Rows of tab-separated values without quoting: a quote is a character like any other."""

    def __init__(self, file: Path, header: bool = True) -> None:
        super().__init__(file)
        self.header = names_of(file, *self.row(0), header) if len(self.places) else []
        self.places = self.places[int(header) :]

    def blank(self, line: str) -> bool:
        return not line.rstrip("\r\n")

    def row(self, index: int) -> tuple[int, list[str]]:
        number, line = self.line(index)
        return number, line.rstrip("\r\n").split("\t")

    def at(self, index: int) -> Record:
        return named(self.source.file, self.header, *self.row(index))


class Csv(Part):
    """Rows of comma-separated values, quoted as RFC 4180 says. A row may have several lines; its record names the last of them. Of
    a `quoted` TSV the same, separated by tabs."""

    def __init__(self, file: Path, header: bool = True, quoted: Tsv | None = None) -> None:
        csv.field_size_limit(LONGEST_LINE)  # the module's own limit, 128 KiB, is shorter than a document
        self.source, self.header = Source(file) if quoted is None else quoted.source, list[str]()
        self.read = partial(csv.reader, delimiter="," if quoted is None else "\t", strict=True)
        bounds, places, seen = array("q", self.source.lines().tobytes()), array("q"), 0  # a list takes ten times the memory
        texts = (self.source.text(a, b, k + 1) for k, (a, b) in enumerate(pairwise(bounds)))
        reader = self.read(texts)
        try:
            for row in reader:
                first = bool(row) and not self.header
                if first:
                    self.header = names_of(file, reader.line_num, row, header)
                if row and not (first and header):
                    places.extend((bounds[seen], bounds[reader.line_num], reader.line_num))
                seen = reader.line_num
        except csv.Error as e:
            wanted = "comma-separated values with closed quotes"
            until = f" in line {reader.line_num}" if reader.line_num > seen + 1 else ""  # a quote that is open swallows lines
            refuse(file, f"line {seen + 1}", f"not CSV ({e}{until})", wanted)
        self.places = np.array(places, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.places)

    def at(self, index: int) -> Record:
        start, stop, number = self.places[index].tolist()
        text = self.source.text(start, stop, number)
        (row,) = self.read(io.StringIO(text, newline="\n"))
        return named(self.source.file, self.header, number, row)


INSIDE = r'[^"]*(?:""[^"]*)*'
FIELD = rf'(?:[^"\t\r\n]*|"{INSIDE}")'
ROW = re.compile(rf"{FIELD}(?:\t{FIELD})*")
BEGUN = re.compile(rf'(?:{FIELD}\t)*"{INSIDE}')  # a row up to the middle of a quoted field
QUOTED = re.compile(rf'"({INSIDE})"')


def read_tsv(file: Path, header: bool = True) -> Part:
    """The rows of a TSV, without quoting or with it."""
    found = Tsv(file, header)
    return Csv(file, header, found) if is_quoted(found, header) else found


def is_quoted(table: Tsv, header: bool) -> bool:
    """Whether each field that holds a quote is quoted as a whole, with the quotes inside it doubled, and it is sure that a program
    did that: one of these fields had to be quoted, or the names of all fields are. That a row has several lines does not tell, if
    each has all fields: then a text may begin with a quote, and one in a later line end with it."""
    if not any(b'"' in chunk for _, chunk in table.source.chunks()):
        return False
    sure = header and all(map(QUOTED.fullmatch, table.header))
    row, open_, size = list[str](), False, 0  # the lines of a row so far
    for line in map(table.text, range(len(table.bounds) - 1)):
        row.append(line)
        size += len(line)
        open_ ^= line.count('"') % 2 == 1
        if open_:
            if size > LONGEST_LINE or (len(row) == 1 and not BEGUN.fullmatch(line)):
                return False
            continue
        text = "".join(row).rstrip("\r\n")
        if not ROW.fullmatch(text):
            return False
        if len(row) == 1 or any(line.count("\t") != len(table.header) - 1 for line in row):
            sure |= any(re.search(r'""|[\t\r\n]', inside) for inside in QUOTED.findall(text))
        row, size = [], 0
    return sure and not open_


def names_of(file: Path, number: int, row: list[str], header: bool) -> list[str]:
    """The names of the fields: those in the first row, or numbers from 0 on if the first row is a record."""
    if not header:
        return [str(k) for k in range(len(row))]
    if len(set(row)) < len(row):
        refuse(file, f"line {number}", f"the header {row} names a field twice", "distinct names")
    return row


def named(file: Path, names: list[str], number: int, row: list[str]) -> Record:
    """The record of a row whose fields have these names. A row of another length is refused, and the names themselves are."""
    if len(row) != len(names):
        found = f"{len(row)} fields where the header has {len(names)}"
        refuse(file, f"line {number}", found, f"the fields {', '.join(names)}")
    if row == names and len(names) > 1:  # a name alone may be a text, too
        refuse(file, f"line {number}", "the header once more, as of files that were joined", "a header in the first line alone")
    return Record(dict(zip(names, row, strict=True)), str(file), number)


def read_json(file: Path) -> Part:
    """The records of a JSON file: a list of objects, one object over several lines or in a long one, or one object a line. An
    object with SQuAD's nesting gives a record for each article, so that some of them can be held out."""
    source = Source(file)
    head = source.read(0, min(LONGEST_LINE + 1, source.size))
    begin = head[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    spread = begin.partition(b"\n")[0].strip() == b"{"  # as SQuAD's layout is often written: a line of its own is no object
    long = begin.startswith(b"{") and len(head) > LONGEST_LINE and b"\n" not in head and b"\r" not in head  # as SQuAD's own file is
    whole = begin.startswith(b"[") or spread or long
    if not whole and (len(lines := JsonLines(file)) != 1 or articles(lines[0].fields) is None):
        return lines
    items = parse(source.text(0, source.size), file, None, "a JSON list of objects, or one object a line")
    if isinstance(items, dict):
        items = articles(items) or [items]
    if odd := [k for k, item in enumerate(items) if not isinstance(item, dict)]:
        refuse(file, f"item {odd[0] + 1}", f"a JSON {type(items[odd[0]]).__name__}", "an object")
    return Few([Record(item, str(file), k + 1, unit="item") for k, item in enumerate(items)])


def articles(fields: dict[str, Any]) -> list[Any] | None:
    """The articles of an object with SQuAD's nesting; None for any other object."""
    found = fields.get("data")
    return found if isinstance(found, list) and found and isinstance(found[0], dict) and "paragraphs" in found[0] else None


def parse(text: str, file: Path, place: str | None, wanted: str) -> Any:
    """The value of a JSON text. Half a surrogate pair, which an escape can express and UTF-8 cannot, is refused anywhere in it."""
    try:
        value = json.loads(text)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as e:
        half = json.dumps(e.object[e.start])[1:-1]
        refuse(file, place, f"holds half a surrogate pair ({half})", "valid Unicode")
    except (ValueError, RecursionError) as e:
        what = getattr(e, "msg", "") or ("nested too deeply" if isinstance(e, RecursionError) else str(e))
        refuse(file, place or f"line {getattr(e, 'lineno', 1)}", f"not JSON ({what})", wanted)


HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair, whose other half may be there
READERS: dict[str, Callable[[Path], Part]] = {
    "text": Documents, "jsonl": JsonLines, "json": read_json, "csv": Csv, "tsv": read_tsv, "parquet": Parquet,
}  # fmt: skip
