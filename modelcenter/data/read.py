"""The records of a recipe's data: which files a path means, and their records, split for training and evaluation.

A path is a file, a folder or a glob; several paths are read one after the other, or mixed by weights. Nothing here imports torch.
"""

import glob
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..errors import counted, refuse, refuse_missing
from .config import DataConfig, Format
from .formats import READERS, Csv, Documents, Tsv, read_tsv, refuse_rows
from .indexed import TokenFile, Tokens, without
from .record import Few, Mixture, Part, Records, Slice
from .table import PREFIX, is_saved, read_named, read_saved

ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".bin": "tokens", ".idx": "tokens",
}  # fmt: skip

SPLIT = re.compile(r"(?:^|[-_.])(train|val|dev|eval|test)(?:ing|id|idation|uation)?[-_.]", re.IGNORECASE)  # in a file's name


def find_files(path: str, format: Format = "auto", key: str = "data.path") -> list[Path]:
    """The files that `path` (a file, a folder or a glob) names, sorted. Of a folder, hidden files and other formats are left out.
    `key` is the recipe's, for the message. Errors: `InputError`, `MissingError`."""
    if not path or "\0" in path:  # an empty path would be the current folder
        refuse(None, key, repr(path), "a file, a folder or a glob")
    path = os.path.expanduser(path)
    here = Path(path)
    if here.is_dir():
        found = [f for f in within(here, key) if not hidden(f.relative_to(here)) and is_file(f, key) and not beside(f)]
        if format == "auto":
            kinds = sorted({format_of(f) for f in found})
            if len(kinds) > 1:
                option = {"path": "format or ", "prompts": ""}.get(key, "data.format or ")  # as the verb calls it
                refuse(path, key, f"a folder of {' and '.join(kinds)} files", f"{option}a glob")
        else:
            found = [f for f in found if format_of(f) == format or (format_of(f), format) == ("json", "jsonl")]
    elif here.exists():
        found = [here] if here.is_file() else []
    else:
        found = [f for f in map(Path, glob.glob(path, recursive=True)) if is_file(f, key)]
    if not found:
        if "://" in path:  # of which only the scheme is said: the rest may hold a password
            what = f"an address ({path.partition('://')[0]}://...), and none is fetched from"
            refuse_missing(None, key, what, "download it, and name the file; datasets:NAME is one of the hub")
        if "," in path:
            refuse_missing(path, key, "no such file", f"of several files a list: {key}=[{path}]")
        absent = "no such file" if here.is_absolute() else f"no such file, seen from {os.getcwd()}"
        what = absent if not here.exists() else "no data file in it" if here.is_dir() else "not a regular file"
        tokens = f"{path}.bin"  # `modelcenter tokenize` was given the name without it
        wanted = tokens if Path(tokens).is_file() else "a file, a folder or a glob; datasets:NAME is one of the hub"
        refuse_missing(path, key, what, wanted)
    return sorted(found)


def within(folder: Path, key: str) -> list[Path]:
    """Every file below `folder`, through links too, but each folder once, and none that is hidden. A folder that cannot be read is
    refused, because its data would be missing silently."""
    found, seen = list[Path](), set[str]()

    def no(error: OSError) -> NoReturn:
        refuse(error.filename, key, error.strerror or str(error), "a folder that can be read, or a glob of those that can")

    for place, folders, names in os.walk(folder, onerror=no, followlinks=True):
        once = (real := os.path.realpath(place)) not in seen
        seen.add(real)
        found += [Path(place, name) for name in names if once]
        folders[:] = sorted(name for name in folders if once and not name.startswith("."))
    return found


def is_file(file: Path, key: str) -> bool:
    """Whether it is a file. A dangling link is refused: its data have not been fetched yet."""
    if file.is_symlink() and not file.exists():
        refuse(file, key, "a link to what is not there", "the data that it stands for, or a glob of those that are there")
    return file.is_file()


def hidden(path: Path) -> bool:
    """Whether any part of a relative path starts with a dot, as .git and .cache do."""
    return any(part.startswith(".") for part in path.parts)


def beside(file: Path) -> bool:
    """Whether a file only belongs to a token file: its .idx or .json."""
    return file.suffix in (".idx", ".json") and file.with_suffix(".bin").is_file() and file.with_suffix(".idx").is_file()


def format_of(file: Path) -> Format:
    """The format by the file's ending, .gz left out. An unknown ending means text."""
    return ENDINGS.get(Path(file.name.removesuffix(".gz")).suffix.lower(), "text")


def read_records(path: str, format: Format = "auto", key: str = "data.path", header: bool = True) -> Part:
    """The records of every file of `path`, in order; none at all are refused. `key` is the recipe's, for the message. `header`:
    whether the first row of CSV and TSV names the fields; if not, it is a record like the others."""
    folder = Path(os.path.expanduser(path)) if "\0" not in path else None
    if path.startswith(PREFIX):
        parts: list[Part] = [read_named(path, key)]
    elif folder is not None and is_saved(folder):
        parts = [read_saved(folder, key)]
    else:
        files = find_files(path, format, key)
        if "tokens" in (kinds := {format} if format != "auto" else {format_of(file) for file in files}):
            if len(kinds) > 1 and (odd := [file for file in files if format_of(file) != "tokens" and not beside(file)]):
                refuse(path, key, f"token files, and {odd[0].name}", "one kind, or a mapping of each to its weight")
            tokens = Tokens([TokenFile(file) for file in sorted({file.with_suffix(".bin") for file in files})])
            return tokens if len(tokens) else refuse(path, key, "no token", "data with at least one document")
        readers = dict(READERS)
        if not header:
            readers |= {"csv": partial(Csv, header=False), "tsv": partial(read_tsv, header=False)}
        parts = [readers[format_of(file) if format == "auto" else format](file) for file in files]
        if format == "auto":
            for part in parts:
                refuse_rows(part)
    records = Records(parts)
    if not len(records):
        refuse(path, key, "no record", "data with at least one record")
    return records


def read_split(data: DataConfig) -> tuple[Part, Part]:
    """The training and the evaluation records that a recipe names; the latter are empty if it names none."""
    if data.path is None:
        refuse_missing(None, "data.path", "absent", "a file, a folder or a glob")
    train = read_sources(data.path, data)
    if data.eval_path is not None:
        return train, read_sources(data.eval_path, data, "data.eval_path")
    if isinstance(train, Mixture):
        parts = [split(source, data.eval_fraction) for source in train.sources]
        return Mixture([part for part, _ in parts], train.weights), Mixture([part for _, part in parts])
    return split(train, data.eval_fraction)


def in_both(data: DataConfig) -> list[str]:
    """The files of `data.eval_path` that `data.path` has too, under whichever names."""
    held = names_of(data.eval_path, data.format, "data.eval_path")
    seen = {os.path.realpath(name) for name in names_of(data.path, data.format)} if held else ()
    return [name for name in held if os.path.realpath(name) in seen]


def splits_in(data: DataConfig) -> list[str]:
    """If a folder or a glob for `data.path` holds files named for training and others for a validation or a test, one of each, the
    first to train on."""
    found = dict[str, str]()
    for name in names_of(data.path, data.format) if isinstance(data.path, str) else ():
        if split := SPLIT.search(Path(name).name):
            found.setdefault(split[1].lower(), name)
    return [found.pop("train"), *found.values()] if "train" in found and len(found) > 1 else []


def names_of(path: str | tuple[str, ...] | dict[str, float] | None, format: Format, key: str = "data.path") -> list[str]:
    """The files that a path or several mean; what the `datasets` library reads goes by its own name."""
    found = list[str]()
    for one in () if path is None else (path,) if isinstance(path, str) else path:
        whole = one.startswith(PREFIX) or is_saved(Path(os.path.expanduser(one)))
        found += [os.path.expanduser(one)] if whole else map(str, find_files(one, format, key))
    return found


def has_tables(records: Part) -> bool:
    """Whether some of the records are rows of CSV or TSV, the only ones that `data.header` is of."""
    if isinstance(records, Records):
        return any(map(has_tables, records.parts))
    return has_tables(records.records) if isinstance(records, Slice) else isinstance(records, Csv | Tsv)


def held_of_one(data: DataConfig, held: Part) -> str:
    """The file from which all held-out records come, if `data.path` lists several files; empty otherwise."""
    if not isinstance(data.path, tuple) or len(data.path) == 1 or data.eval_path is not None or not len(held):
        return ""
    if isinstance(held, Tokens):
        files = [str(file.file) for file, end in zip(held.files, held.ends.tolist(), strict=True) if end > held.first]
    else:
        files = [str(held[0].file), str(held[len(held) - 1].file)]
    return files[0] if files[0] == files[-1] else ""


def read_sources(path: str | tuple[str, ...] | dict[str, float], data: DataConfig, key: str = "data.path") -> Part:
    """The records of one path, of a list of paths one after the other, or of a mapping as a mixture with these weights."""
    if isinstance(path, str):
        return read_records(path, data.format, key, data.header)
    if not path:
        refuse(None, key, "no path in it", "a file, a folder or a glob")
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
    """`records` without their last `fraction`, and that fraction: of the characters for documents, of the count for rows.

    A document on the border is cut in two, so that the last tenth of a single file can be held out too.
    """
    if not fraction:
        return records, Records([])
    if isinstance(records, Tokens):
        return records.split(fraction)
    parts: tuple[Part, Part]
    if not isinstance(records, Records) or not all(isinstance(part, Documents) for part in records.parts):
        cut = without(len(records), fraction)
        parts = records[:cut], records[cut:]
    else:
        ends = np.cumsum([len(record.fields["text"]) for record in records])
        left = min(without(int(ends[-1]), fraction), int(ends[-1]) - 1)
        border = int(np.searchsorted(ends, left, "right"))  # the document that holds the first character held out
        text, at = records[border].fields["text"], left - int(ends[border] - len(records[border].fields["text"]))
        here = records[border]
        head = [replace(here, fields={"text": text[:at]})] if at > 0 else []
        tail = replace(here, fields={"text": text[at:]}, start=here.start + at)
        parts = Records([records[:border], Few(head)]), Records([Few([tail]), records[border + 1 :]])
    if not all(map(len, parts)):
        told = len(records) == 1 and "text" not in records[0].fields  # it may be an object around the rows
        one = f", whose fields are {', '.join(records[0].names()[:4])}," if told else ""
        found = f"of {counted(len(records), 'record')}{one} none is left on one side of the split"
        refuse(records[0].file, "data.eval_fraction", found, "more data, another fraction, or 0 for no evaluation")
    return parts
