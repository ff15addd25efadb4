"""A Hugging Face folder opened for reading: which tensors it holds, and any part of one without reading the rest.

Nothing is memory-mapped and nothing is cached. A part of a safetensors tensor is read directly into the tensor that is returned
(`pread`), so the only memory needed beyond the model itself is that of the largest part requested. Old `.bin` shards are mapped by
torch (`weights_only`, `mmap`).
"""

import math
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..errors import InputError, refuse
from .files import find_weights, read_config, read_index
from .header import TENSOR_LIMIT, Entry, check_name, read_header, refuse_kind
from .regular import open_regular

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "C64": torch.complex64,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
READ_LIMIT = 2**30  # bytes of one read; Linux stops at 2 GiB
TRIES = 10  # to open a folder that others replace


class Slice(Protocol):
    """A tensor of a file. `[...]` reads the requested part into a new tensor; only slices of step 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    start: int  # what orders the tensors of a file as they stand there

    def __getitem__(self, index: Any) -> Tensor: ...

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """Put the rows `start` to `stop` (a tensor without dimensions is one row) into as many bytes."""


class Folder:
    """A folder with `model.safetensors`, shards and an index, or the same as `pytorch_model.bin`, in that order.

    Use it in a `with`: it holds the files open. Headers and index are checked in full here, before any weight is read. They belong
    to one save: if another one replaces the folder meanwhile, that is opened. Errors: `InputError`, `MissingError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._slices: dict[str, FileSlice | BinSlice] = {}
        self._open: list[int] = []
        self.over: dict[str, Any] = {}  # what the caller has put over config.json's sizes, to be named in refusals
        for left in reversed(range(TRIES)):
            before = self._stamp()
            try:
                self._read()
                with suppress(InputError):  # what is to be refused of it is refused where it is asked for
                    _ = self.config
            except BaseException as error:
                self.close()
                if self._stamp() == before or not left or not isinstance(error, Exception):
                    raise
                continue
            if self._stamp() == before or not left:  # somebody may be writing other files there, without end
                break
            self.close()

    def _stamp(self) -> tuple[int, int, int] | None:
        """What tells a folder from one that has taken its place; None where there is none. Its number alone is soon used again."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def _read(self) -> None:
        """Open the files."""
        weights = find_weights(self.path)
        if weights.name.endswith(".safetensors"):
            self._add(read_header(weights).tensors, weights)
        elif weights.name.endswith(".safetensors.index.json"):
            for file, header in read_index(weights).headers.items():
                self._add(header.tensors, self.path / file)
        elif weights.name.endswith(".bin"):
            self._add_bin(read_bin(weights), weights)
        else:
            index = read_index(weights)
            for name in sorted(index.promised):
                held = read_bin(self.path / name)
                index.check(name, held.keys())
                self._add_bin(held, self.path / name)

    def _add(self, tensors: Mapping[str, Entry], file: Path) -> None:
        with open_regular(file) as opened:
            fd = os.dup(opened.fileno())
        self._open.append(fd)
        for name, entry in tensors.items():
            if entry.dtype not in DTYPES:
                refuse(file, name, f"dtype {entry.dtype}", f"one of {', '.join(DTYPES)}")
            self._slices[name] = FileSlice(entry, file, name, fd)

    def _add_bin(self, tensors: Mapping[str, Tensor], file: Path) -> None:
        for number, (name, tensor) in enumerate(tensors.items()):
            self._slices[name] = BinSlice(tensor, file, number)

    def keys(self) -> frozenset[str]:
        """The names of all tensors, as the files spell them."""
        return frozenset(self._slices)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of `key`; a name that is not there is refused."""
        return self.slice(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """The dtype of `key` in the file."""
        return self.slice(key).dtype

    def file(self, key: str) -> str:
        """The path of the file that holds `key`, for messages."""
        return str(self._slices[key].file) if key in self._slices else str(self.path)

    def slice(self, key: str) -> Slice:
        """`key`, not read yet: index it to read, `[...]` for all of it."""
        if key not in self._slices:
            refuse(self.path, key, "no such tensor", f"one of the {len(self._slices)} tensors there")
        return self._slices[key]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; code from elsewhere and quantised saves are refused by name."""
        return read_config(self.path)

    def close(self) -> None:
        """Close the files; slices read no more."""
        while self._open:
            os.close(self._open.pop())
        self._slices = {}
        vars(self).pop("config", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._slices)


class FileSlice:
    """A tensor in a safetensors file, read by byte ranges."""

    def __init__(self, entry: Entry, file: Path, name: str, fd: int) -> None:
        self.shape, self.dtype, self.file = entry.shape, DTYPES[entry.dtype], file
        self.start, self._name, self._fd = entry.start, name, fd

    def __getitem__(self, index: Any) -> Tensor:
        ranges = _ranges(index, self.shape)
        sizes = [stop - start for start, stop in ranges]
        out = torch.empty(sizes, dtype=self.dtype, device="cpu")
        buffer = raw(out)
        # The dimensions after `cut` are taken whole: together with `cut` they are one run of bytes in the file.
        cut = max((d for d, size in enumerate(sizes) if size != self.shape[d]), default=0)
        strides = [math.prod(self.shape[d + 1 :]) * self.dtype.itemsize for d in range(len(self.shape))]
        run = sizes[cut] * strides[cut] if sizes else self.dtype.itemsize
        if not len(buffer):
            return out
        for i, outer in enumerate(product(*(range(*r) for r in ranges[:cut]))):
            at = self.start + sum(p * s for p, s in zip((*outer, *(r[0] for r in ranges[cut:])), strides, strict=True))
            self._read(buffer[i * run : (i + 1) * run], at)
        return out

    def read(self, start: int, stop: int, into: memoryview) -> None:
        self._read(into, self.start + start * math.prod(self.shape[1:]) * self.dtype.itemsize)

    def _read(self, buffer: memoryview, at: int) -> None:
        while len(buffer):
            done = os.preadv(self._fd, [buffer[:READ_LIMIT]], at)
            if done == 0:
                refuse(self.file, self._name, f"the file ends at byte {at}", "a file that nothing shortens meanwhile")
            buffer, at = buffer[done:], at + done


class BinSlice:
    """A tensor of a `.bin` file, mapped by torch. Its order among the others is that in which they were saved; addresses cannot
    tell it for a file that had to be read, and several ranks must agree on it."""

    def __init__(self, tensor: Tensor, file: Path, number: int) -> None:
        self.shape, self.dtype, self.file = tuple(tensor.shape), tensor.dtype, file
        self._tensor, self.start = tensor, number
        self.place = tensor.data_ptr(), tensor.stride()

    def __getitem__(self, index: Any) -> Tensor:
        picked = tuple(slice(*r) for r in _ranges(index, self.shape))
        return self._tensor[picked].clone(memory_format=torch.contiguous_format)

    def read(self, start: int, stop: int, into: memoryview) -> None:
        into[:] = raw(self[start:stop] if self.shape else self[...])


def read_bin(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a PyTorch `.bin` file. Nothing in it is executed (`weights_only`), and its bytes are mapped, not read.

    Files of torch before 1.6 are not zip files and cannot be mapped; they are read whole. Errors: `InputError`.
    """
    path = Path(path)
    with open_regular(path) as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    mapped = head.startswith(b"PK\x03\x04")
    if not mapped and head[:1] != b"\x80":
        refuse_kind(path, head)
    try:
        if mapped:
            with zipfile.ZipFile(path) as archive:
                if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
                    refuse(path, None, "compressed entries", "a file that torch.save wrote")
        with warnings.catch_warnings():  # of formats that it is about to refuse
            warnings.simplefilter("ignore")
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except InputError:
        raise
    except Exception as error:  # torch raises a dozen kinds for broken pickles
        text = str(error) or type(error).__name__
        if isinstance(error, (zipfile.BadZipFile, EOFError, IndexError)) or "corrupted" in text:
            refuse(path, None, f"cut off, at {size} bytes, or damaged", "the whole file: fetch it, or save it, again")
        reason = re.search(r"(?:WeightsUnpickler error:|Trying to load) (.+)", text) or re.search(r"(.+)", text)
        found = reason[1][:120] if reason else text
        refuse(path, None, f"not readable as tensors only ({found})", "a state dict that torch.save wrote")
    if not isinstance(held, dict) or not held:
        refuse(path, None, f"{type(held).__name__} {str(held)[:40]!r}", "a table of tensors")
    if len(held) > TENSOR_LIMIT:
        refuse(path, None, f"{len(held)} tensors", f"at most {TENSOR_LIMIT}")
    for key, value in held.items():
        if not isinstance(key, str):
            refuse(path, repr(key), "a name that is not a string", "tensors by name")
        check_name(path, key)
        if not isinstance(value, Tensor):
            refuse(path, key, f"a {type(value).__name__}", "tensors only")
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            refuse(path, key, f"a {value.layout} tensor of {value.dtype} on {value.device}", "a plain dense tensor")
        stored = value.untyped_storage().nbytes()
        if value.numel() * value.itemsize > min(size, stored):
            refuse(path, key, f"shape {tuple(value.shape)} from {stored} bytes", "a tensor stored whole")
    return {key: value.detach() for key, value in held.items()}


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _ranges(index: Any, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """(start, stop) of each dimension for an index of slices; `...` or missing dimensions are taken whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[slice(None)] * (len(shape) - len(parts) + 1), *parts[at + 1 :])
    if len(parts) > len(shape) or not all(isinstance(p, slice) and p.step in (None, 1) for p in parts):
        raise IndexError(f"{index!r} on shape {shape}: slices of step 1 only, one a dimension")
    spans = [p.indices(n) for p, n in zip(parts, shape, strict=False)] + [(0, n, 1) for n in shape[len(parts) :]]
    return [(start, max(start, stop)) for start, stop, _ in spans]
