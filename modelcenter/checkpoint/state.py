"""Training state on disk: folders `step-N` that are whole or not there, and the newest valid one wins.

    output_dir/.lock                          held by the live run (lock.py)
    output_dir/step-N/<group>.safetensors     "model", "optimizer", ...: flat tables of tensors
    output_dir/step-N/<group>-00001-of-00004.safetensors     of several ranks each writes a file with its parts of them
    output_dir/step-N/state.json              step, tokens, data position, RNGs, best metric, ...
    output_dir/step-N/manifest.json           written last: size and sha256 of every other file, and of itself
    output_dir/.tmp-step-N-<nonce>            a save or a removal under way; its maker holds a lock on it

Nothing names the newest: a pointer is one more thing that can be wrong. Each process writes, hashes and flushes its own
files (`write_group`), one of them seals the folder with the manifest and renames it. Plain files and JSON up to the
tensors themselves, so that a launcher can look for a checkpoint before torch is imported.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from ..errors import InputError, printable, refuse, refuse_missing, tell
from ..parallel.ranks import ALONE, OtherRankError, Ranks
from ..parallel.watch import beat
from .atomic import check_space, commit_folder, disk_errors, staging, sync, write_new
from .files import parse_json, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from .shards import Piece, Spread

FORMAT = 1  # of manifest.json; a reader refuses what is newer than itself
MANIFEST, STATE = "manifest.json", "state.json"
MANIFEST_LIMIT = 256 * 2**20  # bytes: a row for each tensor of the largest models is far below
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
TEMP = re.compile(r"\.tmp-.+-[0-9a-f]{8}")
GROUP = re.compile(r"[a-z][a-z0-9_]*")
FILE = re.compile(r"([a-z][a-z0-9_]*)(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
PIECE = 64 * 2**20  # bytes hashed and written at a time
SLACK = 2**20  # bytes kept free beside the tensors, for the two JSON files and the file system's own tables

Files = dict[str, dict[str, Any]]  # file name -> {"size": bytes, "sha256": hex}


class SaveError(RuntimeError):
    """A checkpoint could not be written. The older ones are as they were and training can go on. One line."""


def save_state(output_dir: str | os.PathLike[str], step: int, tensors: "Mapping[str, Mapping[str, Tensor | Piece]]",
               state: Mapping[str, Any], keep: int | None = None, ranks: Ranks = ALONE) -> Path:
    """Write `step-N` under `output_dir`; when this returns, it is on the disk and survives loss of power.

    `tensors` holds a flat table per group, each written as `<group>.safetensors`, one tensor on the host at a time;
    `state` is anything JSON can hold (its "recipe_hash", if any, is copied into the manifest). Of several `ranks` each writes
    the pieces that it gives, and the first one the rest; a fault on one is a fault on all. Afterwards all but the
    newest `keep` verified checkpoints are removed (None: none are; less than two: two are kept).
    Errors: `SaveError` for the disk's faults, `InputError` for a `step-N` that exists.
    """
    folder = Path(output_dir)
    final = folder / f"step-{step}"
    if not STEP.fullmatch(final.name) or not all(GROUP.fullmatch(group) for group in tensors):
        raise ValueError(f"a step from 0 and plain group names are wanted, not {step!r} and {sorted(tensors)}")
    content, faults = _dump(state), (InputError, OSError)
    size = sum(_tensor(entry).nbytes for table in tensors.values() for entry in table.values())
    mine: os.stat_result | None = None

    def prepare() -> str:
        if ranks.first:
            make_way(final)
        return str(size)

    try:
        sizes = map(int, ranks.together(prepare, (InputError, SaveError)))
    except OtherRankError as error:
        raise SaveError(str(error)) from error
    try:
        with ExitStack() as stack:

            def begin() -> str:
                if not ranks.first:
                    return ""
                check_space(folder, SLACK + len(content) + sum(sizes))
                return str(stack.enter_context(staging(final)))

            temp = Path(ranks.together(begin, faults)[0])

            def write() -> str:
                files: Files = {}
                for group, table in tensors.items():
                    files |= write_group(temp, group, table, ranks)
                return json.dumps(files)

            rows = ranks.together(write, faults)

            def end() -> str:
                nonlocal mine
                if ranks.first:
                    files: Files = {name: row for text in rows for name, row in json.loads(text).items()}
                    files |= write_hashed(temp / STATE, [content])
                    seal(temp, step, files, state.get("recipe_hash"))
                    mine = os.stat(temp)
                    commit_folder(temp, final)
                return ""

            ranks.together(end, faults)
    except (InputError, OSError, OtherRankError) as error:
        with suppress(OSError):  # renamed, and then the rename could not be flushed: what is not promised must not stay
            if mine is not None and os.path.samestat(mine, os.stat(final)):
                _discard(final)
        raise SaveError(f"step {step} not saved: {printable(str(error))}; the older ones are intact") from error
    with suppress(OSError):
        _sound[final.resolve()] = _fingerprint(final)  # hashed as it was written
    if keep is not None and ranks.first:
        prune(folder, keep, newest=final)
    return final


def find_state(output_dir: str | os.PathLike[str], before: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest `step-N`, of those with N below `before`, whose every byte matches its manifest, and the manifest; None
    where there is none.

    One line on stderr says why a folder was passed over.
    """
    for path in steps(output_dir):
        if before is not None and int(path.name[5:]) >= before:
            continue
        try:
            return path, verify(path)
        except InputError as error:
            _say(f"passed over: {error}")
    return None


def load_state(path: str | os.PathLike[str],
               ranks: Ranks = ALONE) -> "tuple[dict[str, dict[str, Tensor | Spread]], dict[str, Any]]":
    """The tensors by group (views of the mapped files: copy what must outlive or change them) and the state. What several ranks
    have written in pieces is there to be read in parts.

    A folder that `find_state` or `save_state` of this process has not already verified is verified here, by the first rank.
    """
    from safetensors.torch import load_file

    from .shards import Piece, Spread

    path = Path(path)
    if ranks.first and not _is_sound(path):
        verify(path)
    ranks.tell("sound")
    files: Files = _manifest(path)["files"]
    found: dict[str, dict[str, list[Piece]]] = {}
    for name in sorted(files):
        if (group := FILE.fullmatch(name)) is not None:
            for key, tensor in load_file(path / name).items():
                row = files[name]["tensors"][key]
                piece = Piece(tensor, tuple(row.get("start", [0] * tensor.dim())), tuple(row.get("whole", tensor.shape)))
                found.setdefault(group[1], {}).setdefault(key, []).append(piece)
            found.setdefault(group[1], {})
    tensors = {group: {key: parts[0].tensor if parts[0].whole == tuple(parts[0].tensor.shape) else
                       Spread(parts[0].whole, parts[0].tensor.dtype, parts) for key, parts in table.items()}
               for group, table in found.items()}  # fmt: skip
    return tensors, read_json(path / STATE, MANIFEST_LIMIT)


def step_of(path: Path) -> int:
    """N of a `step-N`."""
    return int(path.name.removeprefix("step-"))


def steps(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Every `step-N` under `output_dir`, newest first, valid or not."""
    folder = Path(output_dir)
    with disk_errors(folder):
        names = os.listdir(folder) if folder.is_dir() else []
    return [folder / name for name in sorted(filter(STEP.fullmatch, names), key=lambda n: -int(n[5:]))]


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, after every file was hashed. Errors: `InputError` naming the file."""
    path = Path(path)
    _sound.pop(path.resolve(), None)
    with disk_errors(path):
        manifest, stamp = _manifest(path), _fingerprint(path)
        files: Files = manifest["files"]
        present = set(os.listdir(path)) - {MANIFEST}
        for name in sorted(present - set(files)):
            refuse(path / name, None, "an extra file", f"only what {MANIFEST} lists belongs here")
        for name, row in sorted(files.items()):
            if name not in present:
                refuse_missing(path / name, None, "missing", f"{MANIFEST} lists it")
            entry = os.lstat(path / name)
            if not S_ISREG(entry.st_mode):
                refuse(path / name, None, "not a regular file", "a plain file is wanted")
            if entry.st_size != row["size"]:
                refuse(path / name, None, f"{entry.st_size} bytes", f"{MANIFEST} says {row['size']}")
            found = sha256_of(path / name)
            if found != row["sha256"]:
                refuse(path / name, None, f"its sha256 is {found[:12]}...", f"{MANIFEST} says {row['sha256'][:12]}...")
        _sound[path.resolve()] = stamp
    return manifest


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(PIECE):
            digest.update(data)
            beat()
    return digest.hexdigest()


def prune(output_dir: str | os.PathLike[str], keep: int, newest: Path | None = None) -> None:
    """Remove all but the newest `keep` verified checkpoints, two at least, and never `newest`.

    Broken ones are neither counted nor removed: they may be all that is left of something. A fault of the disk is one
    line on stderr.
    """
    good = [path for path in steps(output_dir) if _valid(path)]
    for path in good[max(keep, 2) :]:
        if newest is None or path != newest:
            _remove(path)


def remove_states(output_dir: str | os.PathLike[str], after: int) -> None:
    """Remove every `step-N` with N above `after`. A fault of the disk is one line on stderr."""
    for path in steps(output_dir):
        if int(path.name[5:]) > after:
            _remove(path)


def sweep(output_dir: str | os.PathLike[str]) -> None:
    """Remove the temporary folders of dead processes; a living writer holds a lock on its own."""
    for name in os.listdir(output_dir):
        path = Path(output_dir) / name
        if not TEMP.fullmatch(name) or path.is_symlink() or not path.is_dir():
            continue
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def make_way(final: Path) -> None:
    """Refuse to overwrite a valid checkpoint; one that is broken is set aside, since resuming passed over it."""
    if not os.path.lexists(final):
        return
    if _valid(final):
        refuse(final, None, "exists already and is a valid checkpoint", "a checkpoint is never overwritten; "
               "resume from it, remove it or give another output_dir")
    aside = final.with_name(f"broken-{final.name}-{secrets.token_hex(4)}")
    try:
        os.rename(final, aside)
    except OSError as error:
        raise SaveError(f"{final.name} not saved: a broken one is in the way ({error.strerror})") from error
    _say(f"{final} was broken; it is now {aside.name}")


# ---- writing -----------------------------------------------------------------------------------------------------


def write_group(folder: Path, group: str, table: "Mapping[str, Tensor | Piece]", ranks: Ranks = ALONE) -> Files:
    """Write `<group>.safetensors`, or this rank's, as safetensors would, hashing on the way; the file's row of the manifest."""
    from .write import DTYPE_NAMES, DTYPE_ORDER, Item, shard_header, tensor_bytes

    whole = {name: _tensor(entry) for name, entry in table.items()}
    items = [Item(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in whole.items()]  # type: ignore[misc]  # t is bound
    path = folder / f"{group}{f'-{ranks.rank + 1:05d}-of-{ranks.size:05d}' if ranks.size > 1 else ''}.safetensors"
    for item in items:
        if item.dtype not in DTYPE_NAMES:
            refuse(path, item.name, str(item.dtype), f"one of {', '.join(map(str, DTYPE_NAMES))}")

    def chunks() -> Iterator[bytes | memoryview]:
        yield shard_header(items)
        for item in sorted(items, key=lambda item: (-DTYPE_ORDER[DTYPE_NAMES[item.dtype]], item.name)):
            data = tensor_bytes(path, item)
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]

    rows = write_hashed(path, chunks())
    rows[path.name]["tensors"] = {i.name: {"dtype": DTYPE_NAMES[i.dtype], "shape": list(i.shape)} for i in items}
    for name, entry in table.items():
        if isinstance(entry, tuple):
            rows[path.name]["tensors"][name] |= {"start": list(entry.start), "whole": list(entry.whole)}
    return rows


def _tensor(entry: "Tensor | Piece") -> "Tensor":
    return entry.tensor if isinstance(entry, tuple) else entry


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> Files:
    """Create `path` and flush it; its row of the manifest."""
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            digest.update(chunk)
            yield chunk

    size = write_new(path, hashed())
    return {path.name: {"size": size, "sha256": digest.hexdigest()}}


def seal(folder: Path, step: int, files: Files, recipe_hash: Any) -> None:
    """Write the manifest, the last file of a checkpoint."""
    body = {"format": FORMAT, "step": step, "versions": _versions(), "recipe_hash": recipe_hash, "files": files}
    write_new(folder / MANIFEST, [_sealed(body)])


@cache
def _versions() -> dict[str, str]:
    """Of what wrote the files; reading them anew would be half the time of a small save."""
    found = {"python": platform.python_version()}
    for package in ("modelcenter", "torch", "safetensors"):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _sealed(body: Mapping[str, Any]) -> bytes:
    """The one text of a manifest: laid out in one way and with its own hash, so that no bit changes unseen."""
    return _dump({**body, "sha256": hashlib.sha256(_dump(body)).hexdigest()})


def _dump(value: Any) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


# ---- reading -----------------------------------------------------------------------------------------------------


def _manifest(path: Path) -> dict[str, Any]:
    """`manifest.json`, checked for all that later code relies on."""
    file = path / MANIFEST
    if not path.is_dir() or path.is_symlink():
        refuse_missing(path, None, "not a folder", "a checkpoint folder step-N is wanted")
    if not os.path.lexists(file):
        refuse_missing(path, None, f"no {MANIFEST}", "a checkpoint that was saved to the end is wanted")
    if not S_ISREG(os.lstat(file).st_mode):
        refuse(file, None, "not a regular file", "a plain file is wanted")
    with open(file, "rb") as stream:
        data = stream.read(MANIFEST_LIMIT)
    body = parse_json(file, data)
    if not isinstance(body, dict) or type(body.get("format")) is not int:
        refuse(file, "format", "no format version", f"{FORMAT} is wanted")
    if body["format"] > FORMAT:
        refuse(file, "format", f"{body['format']}, newer than this modelcenter reads", f"{FORMAT} is wanted; update")
    own = body.pop("sha256", None)
    if data != _sealed(body):
        refuse(file, "sha256", f"{str(own)[:12]}... does not fit the content", "a manifest as it was written is wanted")
    files = body.get("files")
    if not isinstance(files, dict) or not all(
            isinstance(row, dict) and type(row.get("size")) is int and isinstance(row.get("sha256"), str)
            for row in files.values()):
        refuse(file, "files", type(files).__name__, "a table of sizes and sha256 is wanted")
    if path.name != f"step-{body.get('step')}":
        refuse(file, "step", f"{body.get('step')} in {path.name}", "the folder under its own name is wanted")
    return body


def _fingerprint(path: Path) -> tuple[Any, ...]:
    """What changes when a file does; cheap, unlike a hash."""
    rows = []
    for name in sorted(os.listdir(path)):
        entry = os.lstat(path / name)
        rows.append((name, entry.st_ino, entry.st_size, entry.st_mtime_ns, entry.st_ctime_ns))
    return tuple(rows)


def _is_sound(path: Path) -> bool:
    """Verified in this process and not touched since: pruning must not hash every checkpoint at every save."""
    with suppress(OSError):
        return _sound.get(path.resolve()) == _fingerprint(path)
    return False


def _valid(path: Path) -> bool:
    try:
        return _is_sound(path) or bool(verify(path))
    except InputError:
        return False


def _discard(path: Path) -> None:
    """Remove a checkpoint, renamed first: a kill in the middle of the removal must not leave a torn `step-N`."""
    temp = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    os.rename(path, temp)
    try:
        sync(path.parent)
    finally:
        shutil.rmtree(temp)


def _remove(path: Path) -> None:
    try:
        _discard(path)
    except OSError as error:
        _say(f"{path}: not removed ({error.strerror}); remove it by hand")


def _say(line: str) -> None:
    tell(f"modelcenter: {printable(line)}")


_sound: dict[Path, tuple[Any, ...]] = {}
