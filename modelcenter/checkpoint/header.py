"""The header of a safetensors file, checked in full before a byte of weights is read.

A safetensors file is 8 bytes (n, little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}, "__metadata__": {str: str}},
then the data without a hole. Source: https://github.com/huggingface/safetensors (the format, and the order of the dtypes below).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import refuse
from .regular import open_regular
from .strict_json import JSON_LIMIT, no_collection, parse

TENSOR_LIMIT = 200_000
NAME_LIMIT = 512  # bytes
RANK_LIMIT = 8
SIZE_LIMIT = 2**63
# Bits of one element, in the order in which safetensors sorts dtypes (a file is written from the last to the first).
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
FIELDS = {"dtype", "shape", "data_offsets"}
KINDS = (
    (b"version https://git-lfs", "a git-lfs pointer", "the file itself (git lfs pull)"),
    (b"PK\x03\x04", "a zip file, probably a PyTorch .bin", "safetensors"),
    (b"\x1f\x8b", "a gzip file", "the unpacked file"),
    (b"GGUF", "a GGUF file", "safetensors"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "safetensors"),
    (b"<", "an HTML or XML page", "the file itself (was the download an error page?)"),
    (b"{", "a JSON text", "safetensors"),
    *((bytes([0x80, protocol]), "a Python pickle", "safetensors") for protocol in (2, 3, 4, 5)),
)


class Entry(NamedTuple):
    """One tensor of a file: safetensors' dtype name, the shape, and its bytes [start, stop) counted from byte 0."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A checked safetensors header: `tensors` in file order, `metadata` as written, `size` of the data in bytes."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file, with every number in it checked against every other and against the file.

    Stricter than the format, but only in ways that no honest writer would notice: names, number of dimensions, number of tensors
    and header size are limited, and there are no unknown fields. Errors: `InputError`, `MissingError`.
    """
    with open_regular(path) as file, no_collection():
        total = os.fstat(file.fileno()).st_size
        head = file.read(64)
        length = int.from_bytes(head[:8], "little")
        if total < 8 or length > min(JSON_LIMIT, total - 8) or head[8:9] != b"{":
            refuse_kind(path, head)
        if total < 8:
            refuse(path, "byte 0", f"a file of {total} bytes", "a safetensors file, at least 8 bytes")
        if length == 0 or length > JSON_LIMIT:
            refuse(path, "byte 0", f"a header of {length} bytes", f"1 to {JSON_LIMIT}")
        if length > total - 8:
            refuse(path, "byte 0", f"a header of {length} bytes in a file of {total}", "the whole file")
        data = head[8 : 8 + length] + file.read(max(0, length - len(head) + 8))
        if len(data) != length:
            refuse(path, None, "the file shrank while it was read", "a file that nothing changes meanwhile")
        if data[:1] != b"{":
            refuse(path, "byte 8", f"a header that begins with {data[:8]!r}", "a JSON object from the first byte on")
        return header_of(Path(path), parse(path, data), 8 + length, total)


def refuse_kind(path: str | os.PathLike[str], head: bytes) -> None:
    """Refuse a file whose first bytes tell that it is something else, and say what it is."""
    for magic, kind, wanted in KINDS:
        if head.lstrip().startswith(magic):
            refuse(path, "byte 0", kind, wanted)


def header_of(path: Path, table: dict[str, Any], base: int, total: int) -> Header:
    """The checked header of a file of `total` bytes whose data begins at byte `base`."""
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(path, "__metadata__", "not a table of strings", '{"format": "pt"} or the like')
    if len(table) > TENSOR_LIMIT:
        refuse(path, None, f"{len(table)} tensors", f"at most {TENSOR_LIMIT}")
    tensors = {name: entry_of(path, name, info, base, total - base) for name, info in table.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    end = base
    for name, entry in tensors.items():
        if entry.start != end:
            kind = "a hole" if entry.start > end else "an overlap"
            refuse(path, name, f"{kind} before byte {entry.start}", f"data from byte {end} on")
        end = entry.stop
    if end != total:
        refuse(path, f"byte {end}", f"{total - end} bytes after the last tensor", "the end of the file")
    return Header(tensors, metadata, total - base)


def entry_of(path: Path, name: str, info: Any, base: int, room: int) -> Entry:
    """One tensor's checked entry, in a file with `room` bytes of data from byte `base` on."""
    check_name(path, name)
    if type(info) is not dict or info.keys() != FIELDS:
        refuse(path, name, f"{info!r}", "dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    bits = BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        refuse(path, name, f"dtype {dtype!r}", f"one of {', '.join(BITS)}")
    if type(shape) is not list or len(shape) > RANK_LIMIT:
        refuse(path, name, f"shape {shape!r}", f"a list of at most {RANK_LIMIT} sizes")
    for size in shape:
        if type(size) is not int or size < 0:
            refuse(path, name, f"shape {shape!r}", "whole numbers, not negative")
        bits *= size
        if bits >= SIZE_LIMIT or size >= SIZE_LIMIT:
            refuse(path, name, f"shape {shape!r}", "a size that fits 64 bits")
    if type(offsets) is not list or len(offsets) != 2 or type(offsets[0]) is not int or type(offsets[1]) is not int:
        refuse(path, name, f"data_offsets {offsets!r}", "two whole numbers")
    start, stop = offsets
    if not 0 <= start <= stop <= room:
        wanted = "0 <= begin <= end" if stop <= room else f"the whole file; it holds {room} bytes of data"
        refuse(path, name, f"data_offsets {offsets}", wanted)
    if bits != 8 * (stop - start):
        refuse(path, name, f"{stop - start} bytes", f"{bits / 8:.10g} bytes for {dtype} {shape}")
    return Entry(dtype, tuple(shape), base + start, base + stop)


def check_name(path: str | os.PathLike[str], name: str) -> None:
    """Refuse a tensor name that no honest writer makes and that could lead a careless reader astray."""
    if name.isascii() and name.isprintable() and 0 < len(name) <= NAME_LIMIT and name[0] != "/" and ".." not in name:
        return
    if not name:
        refuse(path, "''", "an empty tensor name", "a name")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        refuse(path, repr(name), "half of a surrogate pair in a name", "characters that UTF-8 can write")
    if size > NAME_LIMIT:
        refuse(path, name[:40] + "...", f"a name of {size} bytes", f"at most {NAME_LIMIT}")
    if name[0] == "/" or ".." in name:
        refuse(path, name, "a name that looks like a path", "a dotted name, no leading / and no ..")
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        refuse(path, repr(name), "a control character in a name", "printable characters")
