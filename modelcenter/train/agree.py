"""Checks before the first step that all ranks are about to do the same, and that each can write its part of a state.

A rank with another recipe, an older checkout or half the data would train without an error, and the result would be useless. Each
rank sends a hash of what it has. Only if the hashes differ do the ranks send everything, and the first difference is named. A rank
on a machine that has not mounted the output folder would otherwise be noticed only at the first save, after hours of lost work.
"""

import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.manifest import MANIFEST, read_manifest, sha256_of
from ..config import to_dict
from ..data.tokenizer import Tokenizer
from ..errors import InputError, MissingError, refuse
from ..identify import find
from ..parallel.machine import Machine
from ..parallel.ranks import OtherRankError, Ranks, named
from .environment import HASHED, describe_data, paths, versions
from .folder import flat
from .recipe import Recipe

PACKAGE = Path(__file__).resolve().parents[1]
READERS = ("numpy", "tokenizers", "transformers")  # packages that draw the order of examples, and cut texts into tokens
APPEARS = 60.0  # seconds after which others see what one machine has made: so long NFS believes that a name is not there
LOOK = 0.1  # seconds between two looks


def agree(recipe: Recipe, machine: Machine, ranks: Ranks, free: Collection[str] = ()) -> None:
    """Refuse to start if the ranks' `recipe` (resolved), `machine`, code, model folder or data differ, and name the first key that
    does; not those that are `free`."""
    compare(lambda: {key: value for key, value in facts(recipe, machine).items() if key not in free}, ranks)


def agree_on_copies(recipe: Recipe, tokenizer: Tokenizer, ranks: Ranks) -> None:
    """Refuse to go on if a hub id stands for different commits in the ranks' caches, of which each machine may have its own. Called
    when the model is loaded: before that a cache may have an older commit, or none."""
    compare(lambda: commits(recipe, tokenizer), ranks)


def agree_on_state(start: Path, ranks: Ranks) -> None:
    """Refuse to continue from the state `start` if ranks find different ones there."""

    def work() -> dict[str, Any]:
        read_manifest(start)
        return {f"resume: {start / MANIFEST}: sha256": sha256_of(start / MANIFEST)[:12]}

    compare(work, ranks)


def compare(work: Callable[[], Mapping[str, Any]], ranks: Ranks) -> None:
    """Refuse if what `work` returns is not the same on all ranks, and name the first key that differs."""
    if ranks.size == 1:
        return
    text = ""

    def hashed() -> str:
        nonlocal text
        text = json.dumps(work(), default=str)
        return sha256(text.encode()).hexdigest()

    try:
        hashes = ranks.together(hashed, (InputError, OSError))
    except OtherRankError as error:
        refuse(None, None, str(error), "the same files for every rank")
    if len(set(hashes)) > 1:
        key, found = difference([json.loads(said) for said in ranks.agree(text)])
        refuse(None, key, found, "the same for every rank")


def check_output(folder: Path, ranks: Ranks) -> None:
    """Refuse a `folder`, claimed by the first rank, in which some rank could not write a state."""
    if ranks.size == 1:
        return
    place = Path(ranks.tell(str(folder.resolve() / f".tmp-ranks-{secrets.token_hex(4)}")))
    try:
        said = ranks.agree(unwritable(place, ranks))
    finally:
        if ranks.first:
            shutil.rmtree(place, ignore_errors=True)
    if failed := [rank for rank, why in enumerate(said) if why]:
        found = f"{named(failed)} cannot write to {place.parent} ({said[failed[0]]})"
        refuse(folder, "output_dir", found, "a folder of a file system that every machine mounts at that path")


def unwritable(place: Path, ranks: Ranks) -> str:
    """Why this rank cannot create a file in `place`, a folder that the first rank makes, and on which machine; "" if it can."""
    until = time.monotonic() + APPEARS
    while True:
        try:
            if ranks.first:
                place.mkdir()
            os.close(os.open(place / str(ranks.rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            return ""
        except OSError as error:
            if ranks.first or not isinstance(error, FileNotFoundError) or time.monotonic() > until:
                return f"{error.strerror or error}, on {platform.node()}"
        time.sleep(LOOK)


def facts(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What must be the same on all ranks, in the order of comparison. Times and paths of files may differ, because machines may
    have copies."""
    read = {name: version for name, version in versions().items() if name in READERS}
    found = {"modelcenter": __version__, "code": code(), **read, **flat(to_dict(recipe)), **flat(to_dict(machine), "machine.")}
    for path in paths(recipe.data):
        said = describe_data(path, recipe.data)
        found |= {f"data {path}: {key}": said[key] for key in ("files", "bytes", "sha256_of_contents") if key in said}
        found |= {f"data {path}: {Path(file['name']).name}": file["bytes"] for file in said.get("list", ())}
    for key, name in (("model", recipe.model), ("tokenizer", recipe.tokenizer)):
        found |= held(key, Path(os.path.expanduser(name or os.devnull)))
    return found


def commits(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Of which commits the tokenizer and the model are, and the base of an adapter, if they are in the hub's cache; what is in the
    folder of a base that is elsewhere."""
    found: dict[str, Any] = {"tokenizer: commit": commit_of(tokenizer.name)}
    if recipe.init == "pretrained":
        with suppress(MissingError):  # a cache that may not be written has the files, but does not say for which branch
            source = find(recipe.model, None, True, None)
            if source.saved is not None:
                found["model: commit"] = commit_of(source.saved.folder)
            key = "model" if source.saved is None else "base"
            found[f"{key}: commit"] = commit_of(source.path)
            found |= held(key, source.path) if source.saved is not None and commit_of(source.path) is None else {}
    return found


def commit_of(path: str | Path) -> str | None:
    """The commit to which a file or a folder in the hub's cache belongs; None for one that is elsewhere."""
    found = re.search(r"/snapshots/([0-9a-f]{40})(/|$)", str(path))
    return found[1] if found is not None else None


def held(key: str, folder: Path) -> dict[str, str]:
    """The files in a folder, if it is one."""
    files = sorted(folder.iterdir()) if folder.is_dir() else ()
    return {f"{key} {file.name}": contents(file) for file in files if file.is_file()}


def contents(file: Path) -> str:
    """The size of a file, and a hash of it if it is small, as a tokenizer's are."""
    size = file.stat().st_size
    return f"{size} bytes{f', sha256 {sha256(file.read_bytes()).hexdigest()[:12]}' if size <= HASHED else ''}"


def code() -> str:
    """A hash of this package's own files."""
    whole = sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        whole.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    return whole.hexdigest()[:12]


def difference(all_of_them: list[dict[str, Any]]) -> tuple[str, str]:
    """The first key whose values are not the same on all ranks, and which ranks have which value."""
    keys = list(dict.fromkeys(key for one in all_of_them for key in one))
    for key in keys:
        held: dict[str, list[int]] = {}
        for rank, one in enumerate(all_of_them):
            held.setdefault(repr(one.get(key)), []).append(rank)
        if len(held) > 1:
            return key, " and ".join(f"{value} on {named(ranks)}" for value, ranks in held.items())
    return "", "hashes differ"
