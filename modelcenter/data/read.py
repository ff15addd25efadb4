"""Records out of files: text, JSON lines, CSV and TSV, each also gzipped, named by file, folder or glob.

A text file is one record, its document. The first row of CSV and TSV names the fields; TSV has no quoting, as in GLUE.
Every refusal names the file and the line. Nothing here imports torch.
"""

import csv
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from modelcenter.data.config import DataConfig, Format
from modelcenter.errors import nearest, refuse, refuse_missing

LONGEST_LINE = 16 << 20  # bytes; beyond it a file is binary or hostile
EXPANSION = 100  # a .gz that grows by more is a bomb: text rarely compresses by more than ten
ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """Fields with the place that they came from: a line, or, of a whole document, the character where it starts."""

    fields: dict[str, Any]
    file: str
    line: int | None
    start: int = 0

    def get(self, key: str, option: str) -> Any:
        """The field `key`; `option` is the recipe's key that named it. A record without it is refused."""
        if key not in self.fields:
            self.refuse(f"no field {key!r}", f"{nearest(key, self.fields)} ({option} names the field)")
        return self.fields[key]

    def text(self, key: str, option: str) -> str:
        """The field `key` where it must be text."""
        value = self.get(key, option)
        if not isinstance(value, str):
            self.refuse(f"{key} is {json.dumps(value)[:60]}", f"text is wanted ({option} names the field)")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            self.refuse(f"{key} holds half a surrogate pair at character {e.start}", "valid Unicode is wanted")
        return value

    def refuse(self, found: str, wanted: str, offset: int = 0) -> NoReturn:
        """Refuse this record by file and line; by character where it is a document, `offset` counted from its start."""
        place = f"character {self.start + offset}" if self.line is None else f"line {self.line}"
        refuse(self.file, place, found, wanted)


def find_files(path: str, format: Format = "auto", key: str = "data.path") -> list[Path]:
    """The files that `path` (file, folder or glob) names, sorted; of a folder, no hidden ones and no other formats."""
    if "\0" in path:
        refuse(None, key, repr(path), "a file, a folder or a glob is wanted")
    path = os.path.expanduser(path)
    here = Path(path)
    if here.is_dir():
        found = [f for f in here.rglob("*") if f.is_file() and not hidden(f.relative_to(here))]
        if format == "auto":
            kinds = sorted({format_of(f) for f in found})
            if len(kinds) > 1:
                refuse(path, key, f"a folder of {' and '.join(kinds)} files", "data.format or a glob is wanted")
        else:
            found = [f for f in found if format_of(f) == format]
    elif here.exists():
        found = [here] if here.is_file() else []
    else:
        found = [f for f in map(Path, glob.glob(path, recursive=True)) if f.is_file()]
    if not found:
        what = "no such file" if not here.exists() else "no data file in it" if here.is_dir() else "not a regular file"
        refuse_missing(path, key, what, "a file, a folder or a glob is wanted")
    return sorted(found)


def hidden(path: Path) -> bool:
    """Whether any part of a relative path starts with a dot, as .git and .cache do."""
    return any(part.startswith(".") for part in path.parts)


def format_of(file: Path) -> Format:
    """The format that the ending says, .gz set aside; anything unknown is text."""
    return ENDINGS.get(Path(file.name.removesuffix(".gz")).suffix.lower(), "text")


def read_records(path: str, format: Format = "auto", key: str = "data.path") -> Iterator[Record]:
    """The records of every file of `path` in order; an empty set is refused. `key` is the recipe's, for the message."""
    count = 0
    for file in find_files(path, format, key):
        reader = READERS[format_of(file) if format == "auto" else format]
        for record in reader(file):
            count += 1
            yield record
    if not count:
        refuse(path, key, "no record", "data with at least one record is wanted")


def read_split(data: DataConfig) -> tuple[list[Record], list[Record]]:
    """The training and the evaluation records that a recipe names; the latter is empty where it names none."""
    if data.path is None:
        refuse_missing(None, "data.path", "absent", "a file, a folder or a glob is wanted")
    train = list(read_records(data.path, data.format))
    if data.eval_path is not None:
        return train, list(read_records(data.eval_path, data.format, "data.eval_path"))
    return split(train, data.eval_fraction)


def split(records: list[Record], fraction: float) -> tuple[list[Record], list[Record]]:
    """`records` without and with their last `fraction`: of the characters for documents, of the count for rows.

    A document on the border is cut in two, so that the last tenth of one file is held out as of many.
    """
    if not fraction:
        return records, []
    if any(record.line is not None for record in records):
        cut = int(len(records) * (1 - fraction))
        parts = records[:cut], records[cut:]
    else:
        left = int(sum(len(r.fields["text"]) for r in records) * (1 - fraction))
        parts = [], []
        for record in records:
            text = record.fields["text"]
            head, tail = text[:left], text[left:]
            if head:
                parts[0].append(replace(record, fields={"text": head}))
            if tail:
                parts[1].append(replace(record, fields={"text": tail}, start=len(head)))
            left -= len(head)
    if not all(parts):
        found = f"{len(records)} records leave nothing on one side of the split"
        refuse(records[0].file, "data.eval_fraction", found, "more data or another fraction is wanted")
    return parts


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends as they stand (a leading byte-order mark is dropped), decoded strictly."""
    gzipped = file.name.endswith(".gz")
    try:
        limit = max(EXPANSION * file.stat().st_size, LONGEST_LINE)
        number = total = 0
        with gzip.open(file, "rb") if gzipped else open(file, "rb") as stream:
            while line := stream.readline(LONGEST_LINE + 1):
                number, total = number + 1, total + len(line)
                if len(line) > LONGEST_LINE:
                    refuse(file, f"line {number}", "longer than 16 MiB", "text in lines is wanted")
                if gzipped and total > limit:
                    refuse(file, f"line {number}", f"grew over {EXPANSION}-fold", "if that is right, unpack it first")
                try:
                    text = line.decode()
                except UnicodeDecodeError as e:
                    found = f"byte {e.start} (0x{line[e.start]:02x}) is not UTF-8"
                    refuse(file, f"line {number}", found, "UTF-8 text is wanted")
                yield number, text.removeprefix("\ufeff") if number == 1 else text
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        refuse(file, f"line {number + 1}", f"damaged gzip data ({e})", "a whole .gz file is wanted")
    except OSError as e:
        refuse_missing(file, None, f"cannot be read ({e.strerror})", "a readable file is wanted")


def read_text(file: Path) -> Iterator[Record]:
    """The whole file as one document; nothing where it is empty."""
    if text := "".join(line for _, line in read_lines(file)):
        yield Record({"text": text}, str(file), None)


def read_jsonl(file: Path) -> Iterator[Record]:
    """One object a line; blank lines are passed over."""
    for number, line in read_lines(file):
        if line.isspace():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as e:
            what = getattr(e, "msg", "") or ("nested too deeply" if isinstance(e, RecursionError) else str(e))
            refuse(file, f"line {number}", f"not JSON ({what})", "one JSON object a line is wanted")
        if not isinstance(fields, dict):
            refuse(file, f"line {number}", f"a JSON {type(fields).__name__}", "one JSON object a line is wanted")
        yield Record(fields, str(file), number)


def read_csv(file: Path) -> Iterator[Record]:
    """Rows of comma-separated values, quoted as RFC 4180 says; a record's line is the one on which its row ends."""
    csv.field_size_limit(LONGEST_LINE)  # the module's own limit, 128 KiB, is shorter than a document
    rows = csv.reader((line for _, line in read_lines(file)), strict=True)
    numbered = ((rows.line_num, row) for row in rows)
    try:
        yield from named_rows(file, numbered)
    except csv.Error as e:
        refuse(file, f"line {rows.line_num}", f"not CSV ({e})", "comma-separated values with closed quotes are wanted")


def read_tsv(file: Path) -> Iterator[Record]:
    """Rows of tab-separated values without quoting: a quote is a character like any other."""
    rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in read_lines(file))
    return named_rows(file, ((number, row) for number, row in rows if row != [""]))


def named_rows(file: Path, rows: Iterable[tuple[int, list[str]]]) -> Iterator[Record]:
    """Records from rows whose first names the fields; a row of another length is refused."""
    header: list[str] = []
    for number, row in rows:
        if not row:
            continue
        if not header:
            header = row
            if len(set(header)) < len(header):
                refuse(file, f"line {number}", f"the header {header} names a field twice", "distinct names are wanted")
        elif len(row) != len(header):
            found = f"{len(row)} fields where the header has {len(header)}"
            refuse(file, f"line {number}", found, f"the fields {', '.join(header)} are wanted")
        else:
            yield Record(dict(zip(header, row, strict=True)), str(file), number)


READERS = {"text": read_text, "jsonl": read_jsonl, "csv": read_csv, "tsv": read_tsv}
