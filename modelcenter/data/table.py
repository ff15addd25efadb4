"""Records from Arrow tables: parquet files, and what the `datasets` library saves or downloads.

Both libraries are imported where they are used. Of a parquet file one row group at a time is in memory; a dataset is memory-mapped.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import nearest, refuse, refuse_missing
from .record import ClassName, Part, Record, class_names
from .source import make_room

PREFIX = "datasets:"


class Parquet(Part):
    """The rows of a parquet file."""

    def __init__(self, file: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            refuse_missing(file, None, "pyarrow, which reads parquet, is not installed", "pip install pyarrow")
        self.name = str(file)
        try:
            os.close(free := os.open(file, os.O_RDONLY))  # the number that the library will get
            make_room(free)
            self.file = pyarrow.parquet.ParquetFile(file)
        except (pyarrow.ArrowException, OSError) as e:
            refuse(file, None, f"not a parquet file ({first_line(e)})", "a whole .parquet file")
        names = self.file.schema_arrow.names
        if len(set(names)) < len(names):
            refuse(file, "schema", f"the columns {str(names)[:80]} name a field twice", "distinct names")
        told = (self.file.schema_arrow.metadata or {}).get(b"huggingface")  # what `datasets` and the hub write beside the columns
        try:
            kinds = json.loads(told)["info"]["features"] if told else {}
            self.classes = classes_of({key: kinds[key] for key in names if key in kinds})
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            refuse(file, "schema", f"its metadata of datasets cannot be read ({first_line(e)})", "as Dataset.to_parquet writes it")
        meta = self.file.metadata
        self.ends = np.cumsum([meta.row_group(k).num_rows for k in range(meta.num_row_groups)], dtype=np.int64)
        self.group, self.rows = -1, None

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def at(self, index: int) -> Record:
        group = int(np.searchsorted(self.ends, index, "right"))
        if group != self.group:
            self.rows = None  # before the next one is read
            try:
                self.rows = self.file.read_row_group(group)
            except Exception as e:  # each codec and each type has its own
                refuse(self.name, f"row group {group}", f"cannot be read ({first_line(e)})", "a whole .parquet file")
            self.group = group
        assert self.rows is not None
        place = index - (int(self.ends[group - 1]) if group else 0)
        return Record(named(row_of(self.rows, place), self.classes), self.name, index + 1, unit="row")


class Dataset(Part):
    """The rows of a `datasets.Dataset`."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data.with_format("arrow"), name  # one that was saved in numpy's gives some columns alone
        self.classes = classes_of(data.features.to_dict())
        self.kinds = type(data.features)(unopened(data.features))

    def __len__(self) -> int:
        return len(self.data)

    def at(self, index: int) -> Record:
        fields = self.kinds.decode_example(row_of(self.data[index], 0))
        return Record(named(fields, self.classes), self.name, index + 1, unit="row")


def row_of(table: Any, place: int) -> dict[str, Any]:
    """The fields of the row at `place`. One for which Python has no value, such as a date beyond the year 9999, is the error that
    says so, which is refused where the field is asked for."""

    def value(cell: Any) -> Any:
        try:
            return cell.as_py()
        except Exception as e:  # each type has its own
            return e.with_traceback(None)

    return {key: value(column[place]) for key, column in zip(table.column_names, table.columns, strict=True)}


def unopened(kind: Any) -> Any:
    """A dataset's features, in which images, sounds and the like stay bytes: no objective asks for them, and some may be broken."""
    if isinstance(kind, dict | list):
        return {key: unopened(inner) for key, inner in kind.items()} if isinstance(kind, dict) else [unopened(kind[0])]
    if hasattr(kind, "feature"):
        return replace(kind, feature=unopened(kind.feature))
    opens = getattr(kind, "decode", None) is True and type(kind).__name__ != "Json"
    return replace(kind, decode=False) if opens else kind


def classes_of(kinds: Mapping[str, Any]) -> dict[str, list[ClassName]]:
    """The names of the classes that columns number, out of the dict of a dataset's features; of a list, those of what it holds."""
    found = {}
    for key, kind in kinds.items():
        inner = kind[0] if isinstance(kind, list) else kind.get("feature", kind)  # a list before datasets 4
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel":
            found[key] = class_names(inner["names"])
    return found


def named(fields: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`fields` in which the number of a class stands as its name, in a list of them too."""
    for key, names in classes.items():
        value = fields[key]
        fields[key] = [name_of(one, names) for one in value] if isinstance(value, list) else name_of(value, names)
    return fields


def name_of(value: Any, names: Sequence[str]) -> Any:
    """The name of the class of that number; what has none stays: -1, in hidden test sets."""
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    names = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
    return "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names


def read_saved(folder: Path, key: str) -> Dataset:
    """A folder that `Dataset.save_to_disk` wrote."""
    library = import_datasets(folder)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(f.name for f in folder.iterdir() if f.is_dir())
        refuse(folder, key, f"a dataset of the splits {', '.join(splits)}", f"one of them: {folder / (splits or ['train'])[0]}")
    try:
        return Dataset(library.load_from_disk(str(folder)), str(folder))
    except IndexError:  # the library takes the first of its files, and of a dataset without rows there is none
        refuse(folder, key, "no record", "data with at least one record")
    except Exception as e:  # whatever the library meets in a broken folder
        refuse(folder, key, f"cannot be read ({first_line(e)})", "a folder of Dataset.save_to_disk")


def read_named(path: str, key: str) -> Dataset:
    """`datasets:NAME[,CONFIG][:SPLIT]`, NAME as `datasets.load_dataset` takes it; the split is train if none is named."""
    library = import_datasets(path)
    name, _, split = path.removeprefix(PREFIX).partition(":")
    name, _, config = name.partition(",")
    if not name:
        refuse(None, key, repr(path), "datasets:NAME[,CONFIG][:SPLIT]")
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)  # it tells each time that it tries again; what comes of it is told below, in one line
    try:
        found = library.load_dataset(name, config or None)
    except Exception as e:  # the hub's errors, the library's and those of the file formats
        wanted = f"datasets:NAME[,CONFIG][:SPLIT] that the hub or its cache has, or files: {key}=FILE"
        refuse(None, key, f"{path} cannot be loaded ({first_line(e)})", wanted)
    finally:
        client.setLevel(level)
    if (split or "train") not in found:
        refuse(None, key, f"{path} has no split {split or 'train'!r}", nearest(split or "train", found))
    return Dataset(found[split or "train"], path)


def import_datasets(name: str | Path) -> Any:
    try:
        import datasets
    except ImportError:
        refuse_missing(name, None, "the datasets library is not installed", "pip install datasets")
    datasets.disable_progress_bars()
    return datasets


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:120]
