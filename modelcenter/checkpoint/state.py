"""Training states on disk: folders `step-N` that are complete or absent; the newest valid one wins.

    output_dir/.lock                          held by the live run (lock.py)
    output_dir/step-N/<group>.safetensors     "model", "optimizer", ...: flat tables of tensors
    output_dir/step-N/<group>-00001-of-00004.safetensors     with several ranks: each writes a file with its parts
    output_dir/step-N/state.json              step, tokens, data position, RNGs, best metric, ...
    output_dir/step-N/manifest.json           written last: size and sha256 of every other file, and of itself
    output_dir/.tmp-step-N-<nonce>            a save or a removal under way; its maker holds a lock on it

Nothing points to the newest state: a pointer is one more thing that can be wrong. Each process writes, hashes and flushes its own
files (`write_group`); one of them seals the folder with the manifest and renames it. The first rank verifies a state before all go
on from it, and the ranks of other machines what they read of it (`verify_together`). Everything but the tensors is plain files and
JSON, so that a launcher can look for a checkpoint before torch is imported.
"""

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, nearest, printable, refuse, refuse_missing, tell
from ..parallel.ranks import ALONE, OtherRankError, Ranks
from .atomic import check_space, commit_folder, disk_errors, hidden, staging, sync
from .manifest import (
    MANIFEST_LIMIT,
    PIECE,
    Files,
    check_file,
    dump,
    fingerprint,
    is_sound,
    read_manifest,
    seal,
    trust,
    valid,
    verify,
    write_hashed,
)
from .strict_json import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from .shards import Piece, Spread

STATE = "state.json"
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
GROUP = re.compile(r"[a-z][a-z0-9_]*")
FILE = re.compile(r"([a-z][a-z0-9_]*)(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
Reads = Callable[[Files], Iterable[str]]
SLACK = 2**20  # bytes kept free beside the tensors, for the two JSON files and the file system's own tables


class SaveError(RuntimeError):
    """A checkpoint could not be written. Older ones are unchanged, and training can continue. One line."""


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
    content, faults = dump(state), (InputError, OSError)
    size = sum(tensor_of(entry).nbytes for table in tensors.values() for entry in table.values())
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
        older = "the older ones are intact"
        with suppress(InputError):  # of a folder that cannot be listed
            older = older if steps(folder) else "none is there yet"
        raise SaveError(f"step {step} not saved: {printable(str(error))}; {older}") from error
    trust(final)
    if keep is not None and ranks.first:
        prune(folder, keep, final)
    return final


def find_state(output_dir: str | os.PathLike[str], before: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest `step-N`, with N below `before`, whose every byte matches its manifest, and that manifest; None if there is none.

    One line on stderr says why a folder was passed over.
    """
    for path in steps(output_dir):
        if before is not None and step_of(path) >= before:
            continue
        try:
            return path, verify(path)
        except InputError as error:
            _say(f"passed over: {error}")
    return None


def load_state(path: str | os.PathLike[str], ranks: Ranks = ALONE,
               reads: Reads = list) -> "tuple[dict[str, dict[str, Tensor | Spread]], dict[str, Any]]":
    """The tensors by group (views of the mapped files: copy what must outlive or change them) and the state. What several ranks
    have written in pieces is there to be read in parts. `reads`: of a state's files those that this rank reads anything of.

    A folder that `find_state` or `save_state` of this process has not already verified is verified here, by the first rank; on
    every other machine the ranks verify what they read.
    """
    from safetensors.torch import load_file

    from .folder import DTYPES
    from .shards import Piece, Spread

    path = Path(path)
    files, own = verify_together(path, ranks, reads)
    tensors: dict[str, dict[str, Tensor | Spread]] = {}
    for name, file in sorted(files.items()):
        if (group := FILE.fullmatch(name)) is not None:
            held, table = load_file(path / name) if name in own else {}, tensors.setdefault(group[1], {})
            for key, row in file["tensors"].items():
                start, whole = row.get("start", [0] * len(row["shape"])), tuple(row.get("whole", row["shape"]))
                if key in held and whole == tuple(row["shape"]):
                    table[key] = held[key]
                    continue
                spread = table.setdefault(key, Spread(whole, DTYPES[row["dtype"]], []))
                if key in held:
                    spread.pieces.append(Piece(held[key], tuple(start), whole))  # type: ignore[union-attr]  # no tensor is in pieces
    return tensors, read_json(path / STATE, MANIFEST_LIMIT)


def verify_together(path: Path, ranks: Ranks, reads: Reads) -> tuple[Files, set[str]]:
    """The files of a checkpoint by its manifest, and those that this rank `reads`, of which all are as they were written. The first
    rank has verified the folder, for its machine; what the ranks of another one read, each file once, they share out. A fault on
    one is one on all. Errors: `InputError`."""
    files, own = Files(), set[str]()

    def look() -> str:
        nonlocal files, own
        with disk_errors(path):
            if ranks.first and not is_sound(path):
                verify(path)
            files = read_manifest(path)["files"]
            own = set(reads(files))
            return json.dumps([machine(), hashlib.sha256(repr(fingerprint(path)).encode()).hexdigest(), sorted(own)])

    def check() -> str:
        with disk_errors(path):
            for name in dealt([json.loads(text) for text in said], ranks.rank, files):
                check_file(path / name, files[name])
        return ""

    try:
        said = ranks.together(look, (InputError,))
        ranks.together(check, (InputError,))
    except OtherRankError as error:
        refuse(None, None, str(error), "the same files for every rank")
    return files, own


def dealt(said: Sequence[tuple[str, str, Sequence[str]]], rank: int, files: Files) -> list[str]:
    """The files that a rank verifies, where each rank says on which machine it is, what it sees there and which files it reads."""
    mates = [other for other, (*place, _) in enumerate(said) if place == list(said[rank][:2])]
    if 0 in mates:
        return []
    load, mine = dict.fromkeys(mates, 0), []
    for name in sorted({name for mate in mates for name in said[mate][2]}, key=lambda name: (-files[name]["size"], name)):
        who = min(mates, key=load.__getitem__)
        load[who] += files[name]["size"]
        if who == rank:
            mine.append(name)
    return mine


def machine() -> str:
    """This machine, whatever it is called."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return platform.node()


def step_of(path: Path) -> int:
    """N of a `step-N`."""
    return int(path.name.removeprefix("step-"))


def steps(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Every `step-N` under `output_dir`, newest first, valid or not."""
    folder = Path(output_dir)
    with disk_errors(folder):
        names = os.listdir(folder) if folder.is_dir() else []
    return sorted((folder / name for name in filter(STEP.fullmatch, names)), key=step_of, reverse=True)


def check_there(name: str | os.PathLike[str]) -> None:
    """Refuse what is not there by what is, in a run's folder or in one of runs: two parts of a path look like a hub id, too."""
    path = Path(name)
    if os.path.exists(path) or path.parent == Path():  # of a name too long for a path this one says no
        return
    if STEP.fullmatch(path.name) and (left := [other.name for other in steps(path.parent)]):
        refuse_missing(name, None, "no such training state", f"{', '.join(left[:5])}: those kept in {path.parent}")
    if runs := sorted(recipe.parent.name for recipe in path.parent.glob("*/recipe.yaml")):
        refuse_missing(name, None, "no such folder", f"of the runs in {path.parent}: {nearest(path.name, runs)}")


def prune(output_dir: str | os.PathLike[str], keep: int, newest: Path) -> None:
    """Remove all but the newest `keep` verified checkpoints, at least two, and never `newest`.

    Broken ones are neither counted nor removed: they may be all that is left. A fault of the disk is one line on stderr.
    """
    good = [path for path in steps(output_dir) if valid(path)]
    for path in good[max(keep, 2) :]:
        if path != newest:
            _remove(path)


def remove_states(output_dir: str | os.PathLike[str], after: int) -> None:
    """Remove every `step-N` with N above `after`. A fault of the disk is one line on stderr."""
    for path in steps(output_dir):
        if step_of(path) > after:
            _remove(path)


def make_way(final: Path) -> None:
    """Refuse to overwrite a valid checkpoint. A broken one is set aside, because resuming has passed over it."""
    if not os.path.lexists(final):
        return
    if valid(final):
        refuse(final, None, "exists already and is a valid checkpoint", "a checkpoint is never overwritten; "
               "resume from it, remove it or give another output_dir")
    aside = final.with_name(f"broken-{final.name}-{secrets.token_hex(4)}")
    try:
        os.rename(final, aside)
    except OSError as error:
        raise SaveError(f"{final.name} not saved: a broken one is in the way ({error.strerror})") from error
    _say(f"{final} was broken; it is now {aside.name}")


def write_group(folder: Path, group: str, table: "Mapping[str, Tensor | Piece]", ranks: Ranks) -> Files:
    """Write `<group>.safetensors`, or this rank's, as safetensors would, hashing on the way; the file's row of the manifest."""
    from .write import DTYPE_NAMES, Item, shard_chunks

    whole = {name: tensor_of(entry) for name, entry in table.items()}
    items = [Item(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in whole.items()]  # type: ignore[misc]  # t is bound
    path = folder / f"{group}{f'-{ranks.rank + 1:05d}-of-{ranks.size:05d}' if ranks.size > 1 else ''}.safetensors"
    for item in items:
        if item.dtype not in DTYPE_NAMES:
            refuse(path, item.name, str(item.dtype), f"one of {', '.join(map(str, DTYPE_NAMES))}")

    def chunks() -> Iterator[bytes | memoryview]:
        for data in shard_chunks(path, items):
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]

    rows = write_hashed(path, chunks())
    rows[path.name]["tensors"] = {i.name: {"dtype": DTYPE_NAMES[i.dtype], "shape": list(i.shape)} for i in items}
    for name, entry in table.items():
        if isinstance(entry, tuple):
            rows[path.name]["tensors"][name] |= {"start": list(entry.start), "whole": list(entry.whole)}
    return rows


def tensor_of(entry: "Tensor | Piece") -> "Tensor":
    """The tensor of an entry of a table, whole or this rank's part."""
    return entry.tensor if isinstance(entry, tuple) else entry


def _discard(path: Path) -> None:
    """Remove a checkpoint, renamed first: a kill in the middle of the removal must not leave a torn `step-N`."""
    temp = hidden(path)
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
