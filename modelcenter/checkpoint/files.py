"""What the files of a Hugging Face folder say about themselves, checked in full before a byte of weights is read.

No torch here: a hostile or broken file is refused in well under a second. A safetensors file is 8 bytes (little-endian
length n), n bytes of JSON {name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}, then the data, without a
hole. Source: https://github.com/huggingface/safetensors (the format, and the order of the dtypes below).
"""

import gc
import json
import math
import os
import re
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from ..errors import InputError, refuse, refuse_missing

JSON_LIMIT = 16 * 2**20  # bytes of a JSON file or of a safetensors header
DEPTH_LIMIT = 32
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
    (b"\x1f\x8b", "a gzip file", "it unpacked"),
    (b"GGUF", "a GGUF file", "safetensors"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "safetensors"),
    (b"<", "an HTML or XML page", "the file itself (was the download an error page?)"),
    (b"{", "a JSON text", "safetensors"),
    *((bytes([0x80, protocol]), "a Python pickle", "safetensors") for protocol in (2, 3, 4, 5)),
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")


class Entry(NamedTuple):
    """One tensor of a file: safetensors' dtype name, the shape, and its bytes [start, stop) counted from byte 0."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A checked safetensors header: `tensors` in file order, `metadata` as written, `size` of the data in bytes."""

    file: Path
    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Index:
    """A checked index.json: tensor name -> file name, and for safetensors the header of each file."""

    file: Path
    weight_map: Mapping[str, str]
    headers: Mapping[str, Header] = field(default_factory=dict)


def read_json(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> Any:
    """The content of a JSON file, read strictly.

    Refused: larger than `limit` bytes, not UTF-8, a byte-order mark, duplicate keys, NaN and infinities, depth over 32,
    half surrogates, anything but a regular file. Errors: `InputError`, `MissingError`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            refuse(path, None, f"{size} bytes", f"at most {limit}")
        data = file.read(limit + 1)
    return parse_json(path, data)


def parse_json(path: str | os.PathLike[str], data: bytes) -> Any:
    """`data` as JSON, as strictly as `read_json`; `path` is named in errors."""
    value = _loads(path, data)
    level, depth = [value], 0
    while level := [c for v in level if isinstance(v, dict | list) for c in (v.values() if isinstance(v, dict) else v)]:
        depth += 1
        if depth > DEPTH_LIMIT:
            refuse(path, None, "nested too deeply", f"at most {DEPTH_LIMIT} levels")
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            refuse(path, None, "half of a surrogate pair", "characters that UTF-8 can write")
    return value


def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file, every number in it checked against every other and against the file.

    Stricter than the format where a writer of good faith never goes: limits on names, rank, number and header size, no
    unknown fields. Errors: `InputError`, `MissingError`.
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
            refuse(path, None, "the file shrank while it was read", "a file at rest")
        if data[:1] != b"{":
            refuse(path, "byte 8", f"a header that begins with {data[:8]!r}", "a JSON object from the first byte on")
        return _header(Path(path), _loads(path, data), 8 + length, total)


def refuse_kind(path: str | os.PathLike[str], head: bytes) -> None:
    """Refuse a file by what it is when its first bytes tell."""
    for magic, kind, wanted in KINDS:
        if head.lstrip().startswith(magic):
            refuse(path, "byte 0", kind, wanted)


def _header(path: Path, table: dict[str, Any], base: int, total: int) -> Header:
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(path, "__metadata__", "not a table of strings", '{"format": "pt"} or the like')
    if len(table) > TENSOR_LIMIT:
        refuse(path, None, f"{len(table)} tensors", f"at most {TENSOR_LIMIT}")
    tensors: dict[str, Entry] = {}
    room = total - base
    for name, info in table.items():
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
        tensors[name] = Entry(dtype, tuple(shape), base + start, base + stop)
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    end = base
    for name, entry in tensors.items():
        if entry.start != end:
            kind = "a hole" if entry.start > end else "an overlap"
            refuse(path, name, f"{kind} before byte {entry.start}", f"data from byte {end} on")
        end = entry.stop
    if end != total:
        refuse(path, f"byte {end}", f"{total - end} bytes after the last tensor", "the end of the file")
    return Header(path, tensors, metadata, total - base)


def read_index(path: str | os.PathLike[str]) -> Index:
    """An index.json and everything that it promises about the files beside it.

    Refused: a file name that leads elsewhere, a file that is missing, unlisted, lacks a tensor or holds one that
    another file holds too. Files of `.bin` are checked by name only: their keys cost unpickling, see `folder.py`.
    A wrong `total_size` is a warning. Errors: `InputError`, `MissingError`.
    """
    path = Path(path)
    table = read_json(path)
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(path, "weight_map", "absent or empty", "a table of tensor name: file name")
    if len(weight_map) > TENSOR_LIMIT:
        refuse(path, "weight_map", f"{len(weight_map)} tensors", f"at most {TENSOR_LIMIT}")
    safe = path.name.endswith(".safetensors.index.json")
    suffix = ".safetensors" if safe else ".bin"
    promised: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        check_name(path, name)
        if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*", file) or ".." in file:
            refuse(path, name, f"the file name {file!r}", "a plain name of a file in the same folder")
        if not file.endswith(suffix):
            refuse(path, name, f"the file name {file!r}", f"a name that ends in {suffix}")
        promised.setdefault(file, set()).add(name)
    for file in sorted(promised):
        check_inside(path.parent / file)
    pattern = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?" + re.escape(suffix))
    for file in sorted(os.listdir(path.parent)):
        if pattern.fullmatch(file) and file not in promised:
            refuse(path.parent / file, None, f"a file that {path.name} does not list", "the files of one save only")
    headers = {file: read_header(path.parent / file) for file in sorted(promised)} if safe else {}
    for file, header in headers.items():
        for name in sorted(promised[file] - header.tensors.keys()):
            refuse(path.parent / file, name, f"no such tensor, though {path.name} places it here", "a matching pair")
        for name in sorted(header.tensors.keys() - promised[file]):
            other = weight_map.get(name)
            found = f"held here and in {other}" if other else f"a tensor that {path.name} does not list"
            refuse(path.parent / file, name, found, "each tensor once")
    size, said = sum(h.size for h in headers.values()), table.get("metadata")
    said = said.get("total_size") if isinstance(said, dict) else None
    if headers and said is not None and said != size:
        warnings.warn(f"{path}: total_size: {said}; the tensors hold {size} bytes", stacklevel=2)
    return Index(path, weight_map, headers)


def find_weights(folder: str | os.PathLike[str]) -> Path:
    """The file that the weights of `folder` start from, safetensors before `.bin`; that it is a file is checked."""
    folder = Path(folder)
    if not folder.is_dir():
        refuse_missing(folder, None, "no such folder", "a folder with config.json and weights")
    for name in WEIGHTS:
        if os.path.lexists(folder / name):
            check_inside(folder / name)
            return folder / name
    others = [n for n in sorted(os.listdir(folder)) if n.endswith(FOREIGN)][:3]
    found = f"no weights, only {', '.join(others)}" if others else "no weights"
    if (folder / "model" / "config.json").is_file() or (folder / "model" / ADAPTER[0]).is_file():  # a run's
        refuse_missing(folder, None, found, f"what was trained there is {folder / 'model'}")
    refuse_missing(folder, None, found, " or ".join(WEIGHTS))


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of config.json; code from elsewhere and quantised saves are refused by name."""
    path = Path(folder) / "config.json"
    if not os.path.lexists(path) and (path.parent / "manifest.json").is_file():
        wanted = f"modelcenter convert {folder} OUT makes one of it; the run's own, model/, is written when it ends"
        refuse_missing(folder, None, "a training state, and no model", wanted)
    if not os.path.lexists(path) and (path.parent / "training_args.bin").is_file():
        wanted = "model.load_state_dict(safetensors.torch.load_file(...)) of the model that was trained, then its save_pretrained"
        refuse_missing(folder, None, "Trainer's weights, by names of ours; no config.json", wanted)
    check_inside(path)
    config = read_json(path)
    if not isinstance(config, dict):
        refuse(path, None, f"a {type(config).__name__}", "a JSON object")
    if config.get("quantization_config"):
        refuse(path, "quantization_config", "a quantised save", "a save in fp32, fp16 or bf16")
    if config.get("auto_map"):
        refuse(path, "auto_map", "a model with code of its own, which is never run here", "a known architecture")
    return config


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse what can be refused of a model's or an adapter's folder by its headers and JSON alone, before torch is imported."""
    if os.path.isfile(Path(folder) / ADAPTER[0]):
        read_json(Path(folder) / ADAPTER[0])
        read_header(Path(folder) / ADAPTER[1])
        return
    weights = find_weights(folder)
    read_config(folder)
    if weights.name.endswith(".safetensors"):
        read_header(weights)
    elif weights.name.endswith(".json"):
        read_index(weights)


def check_name(path: str | os.PathLike[str], name: str) -> None:
    """Refuse a tensor name that no writer of good faith makes and that could lead a careless reader astray."""
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


def check_inside(path: str | os.PathLike[str]) -> None:
    """Refuse what is missing, is no regular file, or is a link out of its folder.

    The hub cache's own layout is fine: snapshots/<revision>/<file> is a link to ../../blobs/<hash>.
    """
    path = Path(path)
    here = path.parent.resolve()
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError:
        refuse_missing(path, None, "a link to nothing" if path.is_symlink() else "no such file", "the file")
    except (OSError, RuntimeError) as error:
        refuse(path, None, getattr(error, "strerror", None) or "a loop of links", "a readable file")
    if not stat.S_ISREG(mode):
        refuse(path, None, _kind(mode), "a regular file")
    cache = here.parent.name == "snapshots" and real.parent == here.parent.parent / "blobs"
    if not real.is_relative_to(here) and not cache:
        refuse(path, None, f"a link out of its folder, to {real}", "a file inside it")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; a folder, FIFO, socket or device is refused without waiting on it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        refuse_missing(path, None, "no such file", "an existing file")
    except (OSError, ValueError) as error:
        refuse(path, None, getattr(error, "strerror", None) or str(error), "a readable file")
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        refuse(path, None, _kind(mode), "a regular file")
    return os.fdopen(fd, "rb")


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's collector off: it finds nothing in a table of 200,000 rows, and costs as much as parsing it (1 s); nor in a model
    that is being made, for which it looks at all that torch has."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _loads(path: str | os.PathLike[str], data: bytes) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: list[str] = []
            for key, _ in pairs:
                if key in seen:
                    refuse(path, key, "the key stands twice", "each key once")
                seen.append(key)
        return found

    def fraction(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text)

    def constant(text: str) -> NoReturn:
        refuse(path, None, f"the number {text}", "finite numbers")

    whole = (lambda text: -0.0 if text == "-0" else int(text)) if b"-0" in data else None  # no size, as in the format
    try:
        return json.loads(
            data.decode(), object_pairs_hook=once, parse_int=whole, parse_float=fraction, parse_constant=constant
        )
    except InputError:
        raise
    except UnicodeDecodeError as error:
        refuse(path, f"byte {error.start}", f"0x{data[error.start]:02x}, not UTF-8", "JSON in UTF-8")
    except json.JSONDecodeError as error:
        refuse(path, f"line {error.lineno} column {error.colno}", error.msg, "valid JSON")
    except RecursionError:
        refuse(path, None, "nested too deeply", f"at most {DEPTH_LIMIT} levels")
    except ValueError:
        refuse(path, None, "an integer of thousands of digits", "numbers that a machine can hold")
