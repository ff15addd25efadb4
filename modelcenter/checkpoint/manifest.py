"""manifest.json: size and sha256 of every file of a folder, and of itself, so that no changed bit goes unnoticed."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ..errors import InputError, refuse, refuse_missing
from ..parallel.watch import beat
from .atomic import disk_errors, write_new
from .strict_json import parse_json

FORMAT = 1  # of manifest.json; a reader refuses what is newer than itself
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 256 * 2**20  # bytes: a row for each tensor of the largest models is far below
PIECE = 64 * 2**20  # bytes hashed and written at a time

Files = dict[str, dict[str, Any]]  # file name -> {"size": bytes, "sha256": hex}
SOUND: dict[Path, tuple[Any, ...]] = {}  # folders verified in this process, and what would change if a file did


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> Files:
    """Create `path` and flush it; returns its row of the manifest."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    size = write_new(path, hashed())
    return {path.name: {"size": size, "sha256": digest.hexdigest()}}


def seal(folder: Path, step: int, files: Files, recipe_hash: Any) -> None:
    """Write the manifest, the last file of a checkpoint."""
    body = {"format": FORMAT, "step": step, "versions": versions(), "recipe_hash": recipe_hash, "files": files}
    write_new(folder / MANIFEST, [sealed(body)])


@cache
def versions() -> dict[str, str]:
    """Of what wrote the files; reading them anew would be half the time of a small save."""
    found = {"python": platform.python_version()}
    for package in ("modelcenter", "torch", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def sealed(body: Mapping[str, Any]) -> bytes:
    """The text of a manifest, in one fixed layout and with its own hash."""
    return dump({**body, "sha256": hashlib.sha256(dump(body)).hexdigest()})


def dump(value: Any) -> bytes:
    """JSON laid out in one way."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """`manifest.json`, checked for all that later code relies on."""
    file = path / MANIFEST
    if not path.is_dir() or path.is_symlink():
        refuse_missing(path, None, "not a folder", "a checkpoint folder step-N")
    if not os.path.lexists(file):
        refuse_missing(path, None, f"no {MANIFEST}", "a checkpoint that was saved to the end")
    if not S_ISREG(os.lstat(file).st_mode):
        refuse(file, None, "not a regular file", "a plain file")
    with open(file, "rb") as stream:
        data = stream.read(MANIFEST_LIMIT)
    body = parse_json(file, data)
    if not isinstance(body, dict) or type(body.get("format")) is not int:
        refuse(file, "format", "no format version", str(FORMAT))
    if body["format"] > FORMAT:
        refuse(file, "format", f"{body['format']}, newer than this modelcenter reads", f"{FORMAT}; update")
    own = body.pop("sha256", None)
    if data != sealed(body):
        refuse(file, "sha256", f"{str(own)[:12]}... does not fit the content", "a manifest as it was written")
    files = body.get("files")
    if not isinstance(files, dict) or not all(
            isinstance(row, dict) and type(row.get("size")) is int and isinstance(row.get("sha256"), str)
            for row in files.values()):
        refuse(file, "files", type(files).__name__, "a table of sizes and sha256")
    if path.name != f"step-{body.get('step')}":
        refuse(file, "step", f"{body.get('step')} in {path.name}", "the folder under its own name")
    return body


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, after every file was hashed. Errors: `InputError` naming the file."""
    path = Path(path)
    SOUND.pop(path.resolve(), None)
    with disk_errors(path):
        manifest, stamp = read_manifest(path), fingerprint(path)
        files: Files = manifest["files"]
        present = set(os.listdir(path)) - {MANIFEST}
        for name in sorted(present - set(files)):
            refuse(path / name, None, "an extra file", f"only what {MANIFEST} lists belongs here")
        for name, row in sorted(files.items()):
            if name not in present:
                refuse_missing(path / name, None, "missing", f"{MANIFEST} lists it")
            check_file(path / name, row)
        SOUND[path.resolve()] = stamp
    return manifest


def check_file(file: Path, row: Mapping[str, Any]) -> None:
    """Refuse a file of a checkpoint that is not as its row of the manifest says."""
    entry = os.lstat(file)
    if not S_ISREG(entry.st_mode):
        refuse(file, None, "not a regular file", "a plain file")
    if entry.st_size != row["size"]:
        refuse(file, None, f"{entry.st_size} bytes", f"{MANIFEST} says {row['size']}")
    found = sha256_of(file)
    if found != row["sha256"]:
        refuse(file, None, f"its sha256 is {found[:12]}...", f"{MANIFEST} says {row['sha256'][:12]}...")


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(PIECE):
            digest.update(data)
            beat()
    return digest.hexdigest()


def trust(path: Path) -> None:
    """Count a folder that has just been written, and hashed on the way, as verified."""
    with suppress(OSError):
        SOUND[path.resolve()] = fingerprint(path)


def is_sound(path: Path) -> bool:
    """Whether it was verified in this process and not touched since: pruning must not hash every checkpoint at every save."""
    with suppress(OSError):
        return SOUND.get(path.resolve()) == fingerprint(path)
    return False


def valid(path: Path) -> bool:
    """Whether it is as it was written."""
    try:
        return is_sound(path) or bool(verify(path))
    except InputError:
        return False


def fingerprint(path: Path) -> tuple[Any, ...]:
    """What changes when a file does; cheap, unlike a hash."""
    rows = []
    for name in sorted(os.listdir(path)):
        entry = os.lstat(path / name)
        rows.append((name, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns))
    return tuple(rows)
