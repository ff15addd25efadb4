"""Writes Hugging Face folders: shards are planned from shapes alone and written one tensor at a time; a folder appears all at once.

The files are byte for byte those of `safetensors.torch.save_file(..., metadata={"format": "pt"})`, and the split and the file names
are those of transformers' `save_pretrained`, for huggingface_hub decides both.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import refuse
from .atomic import check_space, commit_folder, disk_errors, replace_folder, staging, write_new
from .files import ADAPTER, PLACE, only_words
from .folder import DTYPES, raw
from .header import BITS, RANK_LIMIT, TENSOR_LIMIT, check_name

UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}} | {
    f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPE_ORDER = {name: i for i, name in enumerate(BITS)}
FORMAT = {"format": "pt"}  # what transformers looks for in a file's metadata
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"  # says that a model gives vectors of texts: one that goes in its place and does not has none
STALE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


class Item(NamedTuple):
    """A tensor to be saved. Its shape and dtype are known beforehand; `read()` makes it when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(folder: Path, files: Mapping[str, Sequence[Item]]) -> None:
    """Write each file into `folder`, one tensor after the other."""
    for name, part in files.items():
        write_shard(folder / name, part)


def write_shard(path: str | os.PathLike[str], items: Iterable[Item], metadata: Mapping[str, str] = FORMAT) -> None:
    """Write one safetensors file, which must not exist, and flush it; one tensor is in memory at a time."""
    write_new(path, shard_chunks(path, items, metadata))


def shard_chunks(path: str | os.PathLike[str], items: Iterable[Item], metadata: Mapping[str, str] = FORMAT
                 ) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, its header and then a tensor at a time; `path` is for what is refused."""
    items = sorted(items, key=_order)
    yield shard_header(items, metadata)
    for item in items:
        yield tensor_bytes(path, item)


def save_folder(
    path: str | os.PathLike[str],
    items: Sequence[Item],
    *,
    max_shard_size: int | str = "5GB",
    extra_files: Mapping[str, bytes],
    write: Callable[[Path, Mapping[str, Sequence[Item]]], None] = write_shards,
) -> None:
    """Write the tensors `items` and `extra_files` (config.json and the like) as the folder `path`.

    `path` may be absent, empty, a tokenizer's, a new repository, or a model folder (one with config.json), whose weights are then
    replaced while its other files stay. Each `read` is called once, and its tensor released before the next. The folder changes in
    one step at the very end. `write` puts the items of each file into the folder that it is given, which is a temporary one.
    Errors: `InputError`; `path` is then unchanged and nothing else is left behind.
    """
    with disk_errors(path):
        target = Path(path).resolve()
        limit = parse_size(max_shard_size)
        _check_items(target, items)
        _check_extras(target, extra_files)
        _check_target(target)
        parts = arranged(items, limit)
        extras = dict(extra_files) if len(parts) == 1 else {**extra_files, INDEX: index_json(parts)}
        headers = sum(len(shard_header(part)) for part in parts.values())
        check_space(target, sum(item.size for item in items) + headers + sum(map(len, extras.values())))
        with staging(target) as temp:
            write(temp, parts)
            for file, data in extras.items():
                (temp / file).parent.mkdir(exist_ok=True)
                write_new(temp / file, [data])
            _check_target(target)  # again: a save takes minutes, and the name may have become somebody else's
            if target.is_dir() and any(target.iterdir()):
                replace_folder(temp, target, drop=lambda name: name == MODULES or STALE.fullmatch(name) is not None)
            else:
                commit_folder(temp, target)


def arranged(items: Iterable[Item], limit: int) -> dict[str, list[Item]]:
    """The tensors by the file that they belong into. In their order, a file is filled up to `limit` bytes; a larger tensor has one
    of its own."""
    from huggingface_hub import split_state_dict_into_shards_factory

    named = {item.name: item for item in items}
    split = split_state_dict_into_shards_factory(
        named, get_storage_size=attrgetter("size"), filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    return {file: [named[name] for name in names] for file, names in split.filename_to_tensors.items()}


def layout(files: Mapping[str, Sequence[Item]]) -> Iterator[tuple[str, bytes, dict[str, int], int]]:
    """For each file its name, its first bytes, where each tensor begins in it, and its size."""
    for name, part in files.items():
        header = shard_header(part)
        starts, end = {}, len(header)
        for item in sorted(part, key=_order):
            starts[item.name], end = end, end + item.size
        yield name, header, starts, end


def shard_header(items: Iterable[Item], metadata: Mapping[str, str] = FORMAT) -> bytes:
    """The first bytes of the file that holds `items`: length and JSON, padded with spaces to 8 bytes."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for item in sorted(items, key=_order):
        start, end = end, end + item.size
        table[item.name] = {"dtype": DTYPE_NAMES[item.dtype], "shape": item.shape, "data_offsets": (start, end)}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(path: str | os.PathLike[str], item: Item) -> memoryview:
    """The bytes of `item`, read now; a tensor that is not what was announced is refused."""
    tensor = item.read()
    if tuple(tensor.shape) != item.shape or tensor.dtype != item.dtype or tensor.layout != torch.strided:
        found = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
        refuse(path, item.name, found, f"{item.dtype} {item.shape}, as announced")
    if tensor.is_meta:
        refuse(path, item.name, "a meta tensor, which holds no values", "a tensor with values")
    return raw(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())


def index_json(files: Mapping[str, Sequence[Item]]) -> bytes:
    """The content of model.safetensors.index.json, where these files hold these tensors."""
    items = [item for part in files.values() for item in part]
    metadata = {
        "total_parameters": sum(math.prod(item.shape) for item in items),
        "total_size": sum(item.size for item in items),
    }
    weight_map = {item.name: file for file, part in files.items() for item in part}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
    return f"{text}\n".encode()


def parse_size(size: int | str) -> int:
    """Bytes of `5000000`, "5GB", "500 MB" (powers of 1000) or "1GiB" (of 1024)."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Z]*)", str(size).strip().upper(), re.ASCII)
    if isinstance(size, bool) or not found or found[2] not in UNITS:
        refuse(None, "max_shard_size", repr(size), "a size such as 5GB, 500MB or 1GiB")
    value = int(float(found[1]) * UNITS[found[2]]) if "." in found[1] else int(found[1]) * UNITS[found[2]]
    if not 0 < value < 2**63:
        refuse(None, "max_shard_size", repr(size), "at least 1 byte, below 2**63")
    return value


def _order(item: Item) -> tuple[int, str]:
    return -DTYPE_ORDER[DTYPE_NAMES[item.dtype]], item.name


def _check_items(target: Path, items: Sequence[Item]) -> None:
    if sys.byteorder != "little":
        refuse(target, None, "a big-endian machine", "a little-endian one: safetensors is little-endian")
    if not 0 < len(items) <= TENSOR_LIMIT:
        refuse(target, None, f"{len(items)} tensors to save", f"1 to {TENSOR_LIMIT}")
    seen: set[str] = set()
    for item in items:
        check_name(target, item.name)
        if item.name in seen or item.name == "__metadata__":
            refuse(target, item.name, "a name that is taken", "each tensor under its own name")
        seen.add(item.name)
        if item.dtype not in DTYPE_NAMES:
            refuse(target, item.name, f"{item.dtype}", f"one of {', '.join(map(str, DTYPE_NAMES))}")
        if len(item.shape) > RANK_LIMIT:
            refuse(target, item.name, f"shape {item.shape}", f"at most {RANK_LIMIT} dimensions")


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        refuse(target, None, "a file", "a folder, or a name that is free")
    if (target / ADAPTER[0]).is_file():  # whoever loads the folder would have that on its base, and not this model
        refuse(target, None, "an adapter's folder", "an empty folder, a model's or a new name")
    if target.is_dir() and not only_words(target) and not (target / "config.json").is_file():
        refuse(target, None, "a folder with other files and no config.json", "an empty folder, a model's or a new name")
    if target.is_dir() and not os.access(target, os.W_OK):  # though it could be swapped for another
        refuse(target, None, "a folder that may not be written", "another folder, or chmod u+w")
    if target == Path.cwd() or target == Path(target.anchor) or target.is_mount():
        refuse(target, None, "the current folder, or a mount point", "a folder inside it, which can be swapped whole")


def _check_extras(target: Path, extras: Mapping[str, bytes]) -> None:
    for name in extras:
        plain = re.fullmatch(rf"(?:{PLACE.pattern}/)?([^/\\\x00-\x1f]{{1,255}})", name, re.ASCII)
        if plain is None or plain[1] in (".", "..") or STALE.fullmatch(name):
            refuse(target, repr(name), "the name of an extra file", "a plain file name that is no weight file's, or MODULE/FILE")
