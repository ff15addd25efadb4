"""Records out of files: text, JSON lines, CSV and TSV, each also gzipped, and tables, named by file, folder or glob.

A text file is one document, or several of `DOCUMENT` bytes. The first row of CSV and TSV names the fields; TSV has no
quoting, as in GLUE. Where records stand is found at once, what they hold is read when it is asked for; every refusal
names the file and the line. Nothing here imports torch.
"""

import csv
import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..errors import counted, refuse, refuse_missing
from .config import DataConfig, Format
from .indexed import TokenFile, Tokens
from .record import Few, Mixture, Part, Record, Records
from .source import LONGEST_LINE, Source
from .table import PREFIX, Parquet, is_saved, read_named, read_saved

DOCUMENT = 4 << 20  # bytes: a tokenizer takes some hundred times as much memory for a text
ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".bin": "tokens", ".idx": "tokens",
}  # fmt: skip


def find_files(path: str, format: Format = "auto", key: str = "data.path") -> list[Path]:
    """The files that `path` (file, folder or glob) names, sorted; of a folder, no hidden ones and no other formats."""
    if not path or "\0" in path:  # nothing would be the folder that one is in
        refuse(None, key, repr(path), "a file, a folder or a glob is wanted")
    path = os.path.expanduser(path)
    here = Path(path)
    if here.is_dir():
        found = [f for f in within(here, key) if f.is_file() and not hidden(f.relative_to(here)) and not beside(f)]
        if format == "auto":
            kinds = sorted({format_of(f) for f in found})
            if len(kinds) > 1:
                refuse(path, key, f"a folder of {' and '.join(kinds)} files", "data.format or a glob is wanted")
        else:
            found = [f for f in found if format_of(f) == format or (format_of(f), format) == ("json", "jsonl")]
    elif here.exists():
        found = [here] if here.is_file() else []
    else:
        found = [f for f in map(Path, glob.glob(path, recursive=True)) if f.is_file()]
    if not found:
        what = "no such file" if not here.exists() else "no data file in it" if here.is_dir() else "not a regular file"
        refuse_missing(path, key, what, "a file, a folder or a glob is wanted")
    return sorted(found)


def within(folder: Path, key: str) -> list[Path]:
    """Every file below `folder`; a folder that cannot be looked into is refused: its data would be missing without a word."""

    def no(error: OSError) -> NoReturn:
        refuse(error.filename, key, error.strerror or str(error), "a folder that can be read, or a glob of those that can")

    return [Path(place, name) for place, _, names in os.walk(folder, onerror=no) for name in names]


def hidden(path: Path) -> bool:
    """Whether any part of a relative path starts with a dot, as .git and .cache do."""
    return any(part.startswith(".") for part in path.parts)


def beside(file: Path) -> bool:
    """Whether a file only describes a token file."""
    return file.suffix in (".idx", ".json") and file.with_suffix(".bin").is_file() and file.with_suffix(".idx").is_file()


def format_of(file: Path) -> Format:
    """The format that the ending says, .gz set aside; anything unknown is text."""
    return ENDINGS.get(Path(file.name.removesuffix(".gz")).suffix.lower(), "text")


def read_records(path: str, format: Format = "auto", key: str = "data.path", header: bool = True) -> Part:
    """The records of every file of `path` in order; an empty set is refused. `key` is the recipe's, for the message; without a
    `header` the first row of CSV and TSV is a record too."""
    folder = Path(os.path.expanduser(path)) if "\0" not in path else None
    if path.startswith(PREFIX):
        parts: list[Part] = [read_named(path, key)]
    elif folder is not None and is_saved(folder):
        parts = [read_saved(folder, key)]
    else:
        files = find_files(path, format, key)
        if format == "tokens" or (format == "auto" and format_of(files[0]) == "tokens"):
            tokens = Tokens([TokenFile(file) for file in sorted({file.with_suffix(".bin") for file in files})])
            return tokens if len(tokens) else refuse(path, key, "no token", "data with at least one document is wanted")
        readers = dict(READERS)
        if not header:
            readers |= {"csv": partial(Csv, header=False), "tsv": partial(Tsv, header=False)}
        parts = [readers[format_of(file) if format == "auto" else format](file) for file in files]
        if format == "auto":
            for part in parts:
                refuse_rows(part)
    records = Records(parts)
    if not len(records):
        refuse(path, key, "no record", "data with at least one record is wanted")
    return records


def read_split(data: DataConfig) -> tuple[Part, Part]:
    """The training and the evaluation records that a recipe names; the latter is empty where it names none."""
    if data.path is None:
        refuse_missing(None, "data.path", "absent", "a file, a folder or a glob is wanted")
    train = read_sources(data.path, data)
    if data.eval_path is not None:
        return train, read_sources(data.eval_path, data, "data.eval_path")
    if isinstance(train, Mixture):
        parts = [split(source, data.eval_fraction) for source in train.sources]
        return Mixture([part for part, _ in parts], train.weights), Mixture([part for _, part in parts])
    return split(train, data.eval_fraction)


def read_sources(path: str | tuple[str, ...] | dict[str, float], data: DataConfig, key: str = "data.path") -> Part:
    """The records of one path; of a list of them, one after the other; of a mapping, a mixture by the weights."""
    if isinstance(path, str):
        return read_records(path, data.format, key, data.header)
    if not path:
        refuse(None, key, "no path in it", "a file, a folder or a glob is wanted")
    if isinstance(path, dict):
        sources = [read_records(source, data.format, f"{key}.{source}", data.header) for source in path]
        return Mixture(sources, list(path.values()))
    parts = [read_records(source, data.format, f"{key}.{k}", data.header) for k, source in enumerate(path)]
    if all(isinstance(part, Tokens) for part in parts):
        return Tokens([file for part in parts if isinstance(part, Tokens) for file in part.files])
    if any(isinstance(part, Tokens) for part in parts):
        refuse(None, key, "token files and texts in one list", "one kind, or a mapping of each to its weight")
    return Records([one for part in parts for one in (part.parts if isinstance(part, Records) else [part])])


def split(records: Part, fraction: float) -> tuple[Part, Part]:
    """`records` without and with their last `fraction`: of the characters for documents, of the count for rows.

    A document on the border is cut in two, so that the last tenth of one file is held out as of many.
    """
    if not fraction:
        return records, Records([])
    if isinstance(records, Tokens):
        return records.split(fraction)
    parts: tuple[Part, Part]
    if not isinstance(records, Records) or not all(isinstance(part, Documents) for part in records.parts):
        cut = int(len(records) * (1 - fraction))
        parts = records[:cut], records[cut:]
    else:
        ends = np.cumsum([len(record.fields["text"]) for record in records])
        left = min(int(ends[-1] * (1 - fraction)), int(ends[-1]) - 1)
        border = int(np.searchsorted(ends, left, "right"))  # the document that holds the first character held out
        text, at = records[border].fields["text"], left - int(ends[border] - len(records[border].fields["text"]))
        here = records[border]
        head = [replace(here, fields={"text": text[:at]})] if at > 0 else []
        tail = replace(here, fields={"text": text[at:]}, start=here.start + at)
        parts = Records([records[:border], Few(head)]), Records([Few([tail]), records[border + 1 :]])
    if not all(map(len, parts)):
        found = f"of {counted(len(records), 'record')} none is left on one side of the split"
        refuse(records[0].file, "data.eval_fraction", found, "more data, another fraction, or 0 for no evaluation is wanted")
    return parts


class Documents(Part):
    """A text file: one document as it stands, or, of a long one, documents that end with a line."""

    def __init__(self, file: Path) -> None:
        self.source, self.bounds, self.starts = Source(file), [0], [0]
        size = self.source.size
        while (start := self.bounds[-1]) < size:
            stop = min(start + DOCUMENT, size)
            data = self.source.read(start, stop)
            stop = start + (data.rfind(b"\n") + 1 or self.line(start)) if stop < size else stop
            self.starts.append(self.starts[-1] + characters(self.source.read(start, stop)))
            self.bounds.append(stop)

    def line(self, start: int) -> int:
        """The bytes of the line that starts at `start`."""
        data = self.source.read(start, min(start + LONGEST_LINE + 1, self.source.size))
        end = data.find(b"\n") + 1 or len(data)
        if end > LONGEST_LINE:
            line = 1 + sum(self.source.read(a, b).count(b"\n") for a, b in pairwise(self.bounds))
            refuse(self.source.file, f"line {line}", "longer than 16 MiB", "text in lines is wanted")
        return end

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def at(self, index: int) -> Record:
        text = self.source.text(*self.bounds[index : index + 2])
        return Record({"text": text}, str(self.source.file), None, self.starts[index])


def refuse_rows(part: Part) -> None:
    """Refuse JSON lines under another name, before a model learns to write their braces."""
    if not isinstance(part, Documents) or not len(part):
        return
    line = part.source.text(0, min(part.bounds[1], DOCUMENT)).lstrip().partition("\n")[0]
    try:
        row = json.loads(line) if line[:1] == "{" else None
    except (ValueError, RecursionError):
        return
    if isinstance(row, dict) and row:
        refuse(part.source.file, "data.format", "its first line is a JSON object", "data.format=jsonl, or text if that is meant")


def characters(data: bytes) -> int:
    """The characters of UTF-8: every byte but those that go on with one, and no byte-order mark."""
    codes = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((codes & 0xC0) != 0x80)) - data.startswith(b"\xef\xbb\xbf")


class Lines(Part):
    """Lines of a file but the blank ones, each a record that a subclass makes of it."""

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


class JsonLines(Lines):
    """One object a line."""

    def at(self, index: int) -> Record:
        number, line = self.line(index)
        fields = parse(line, self.source.file, f"line {number}", "one JSON object a line is wanted")
        if not isinstance(fields, dict):
            more = "; data.format=json reads a list of them" if isinstance(fields, list) and number == 1 else ""
            refuse(self.source.file, f"line {number}", f"a JSON {type(fields).__name__}", f"one JSON object a line is wanted{more}")
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
    """Rows of comma-separated values, quoted as RFC 4180 says; a record's line is the one on which its row ends."""

    def __init__(self, file: Path, header: bool = True) -> None:
        csv.field_size_limit(LONGEST_LINE)  # the module's own limit, 128 KiB, is shorter than a document
        self.source, self.header = Source(file), list[str]()
        bounds, places, seen = self.source.lines().tolist(), [], 0
        texts = (self.source.text(a, b, k + 1) for k, (a, b) in enumerate(pairwise(bounds)))
        reader = csv.reader(texts, strict=True)
        try:
            for row in reader:
                first = bool(row) and not self.header
                if first:
                    self.header = names_of(file, reader.line_num, row, header)
                if row and not (first and header):
                    places.append((bounds[seen], bounds[reader.line_num], reader.line_num))
                seen = reader.line_num
        except csv.Error as e:
            wanted = "comma-separated values with closed quotes are wanted"
            refuse(file, f"line {reader.line_num}", f"not CSV ({e})", wanted)
        self.places = np.array(places, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.places)

    def at(self, index: int) -> Record:
        start, stop, number = self.places[index].tolist()
        text = self.source.text(start, stop, number)
        (row,) = csv.reader(io.StringIO(text, newline="\n"), strict=True)
        return named(self.source.file, self.header, number, row)


def names_of(file: Path, number: int, row: list[str], header: bool) -> list[str]:
    """The names of the fields: what the first row says, or, where it is a record like the others, numbers from 0 on."""
    if not header:
        return [str(k) for k in range(len(row))]
    if len(set(row)) < len(row):
        refuse(file, f"line {number}", f"the header {row} names a field twice", "distinct names are wanted")
    return row


def named(file: Path, names: list[str], number: int, row: list[str]) -> Record:
    """A record of a row whose fields have names; a row of another length is refused."""
    if len(row) != len(names):
        found = f"{len(row)} fields where the header has {len(names)}"
        refuse(file, f"line {number}", found, f"the fields {', '.join(names)} are wanted")
    return Record(dict(zip(names, row, strict=True)), str(file), number)


def read_json(file: Path) -> Part:
    """A list of objects, or one object over several lines, which are read as a whole, or one object a line. Of a file in SQuAD's
    nesting, one object, each article is a record, so that a part of them can be held out."""
    source = Source(file)
    begin = source.read(0, min(64, source.size)).removeprefix(b"\xef\xbb\xbf").lstrip()
    spread = begin.partition(b"\n")[0].strip() == b"{"  # as SQuAD's layout is often written: a line of its own is no object
    if not begin.startswith(b"[") and not spread and (len(lines := JsonLines(file)) != 1 or articles(lines[0].fields) is None):
        return lines
    items = parse(source.text(0, source.size), file, None, "a JSON list of objects, or one object a line, is wanted")
    if isinstance(items, dict):
        items = articles(items) or [items]
    if odd := [k for k, item in enumerate(items) if not isinstance(item, dict)]:
        refuse(file, f"item {odd[0] + 1}", f"a JSON {type(items[odd[0]]).__name__}", "an object is wanted")
    return Few([Record(item, str(file), k + 1, unit="item") for k, item in enumerate(items)])


def articles(fields: dict[str, Any]) -> list[Any] | None:
    """What SQuAD's nesting holds under `data`; None of any other object."""
    found = fields.get("data")
    return found if isinstance(found, list) and found and isinstance(found[0], dict) and "paragraphs" in found[0] else None


def parse(text: str, file: Path, place: str | None, wanted: str) -> Any:
    """What a JSON text says. Half a surrogate pair, which an escape can say and UTF-8 cannot, is refused wherever it stands."""
    try:
        value = json.loads(text)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as e:
        half = json.dumps(e.object[e.start])[1:-1]
        refuse(file, place, f"holds half a surrogate pair ({half})", "valid Unicode is wanted")
    except (ValueError, RecursionError) as e:
        what = getattr(e, "msg", "") or ("nested too deeply" if isinstance(e, RecursionError) else str(e))
        refuse(file, place or f"line {getattr(e, 'lineno', 1)}", f"not JSON ({what})", wanted)


HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair, whose other half may be there
READERS: dict[str, Callable[[Path], Part]] = {
    "text": Documents, "jsonl": JsonLines, "json": read_json, "csv": Csv, "tsv": Tsv, "parquet": Parquet,
}  # fmt: skip
