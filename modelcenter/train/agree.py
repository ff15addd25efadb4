"""Before the first step: are all ranks about to do the same?

A rank with another recipe, an older checkout or half the data would train all the same, and the result would be nobody's. Each says
what it has as one hash; only where these differ do they say it all, and the first thing that differs is named.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import to_dict
from ..errors import InputError, refuse
from ..parallel.machine import Machine
from ..parallel.ranks import OtherRankError, Ranks, named
from .environment import describe_data, paths
from .folder import flat
from .recipe import Recipe

PACKAGE = Path(__file__).resolve().parents[1]


def agree(recipe: Recipe, machine: Machine, ranks: Ranks) -> None:
    """Refuse ranks whose `recipe` (resolved), `machine`, code, model folder or data differ, by the first key that does."""
    if ranks.size == 1:
        return
    text = ""

    def work() -> str:
        nonlocal text
        text = json.dumps(facts(recipe, machine), default=str)
        return sha256(text.encode()).hexdigest()

    try:
        hashes = ranks.together(work, (InputError, OSError))
    except OtherRankError as error:
        refuse(None, None, str(error), "the same files for every rank")
    if len(set(hashes)) > 1:
        key, found = difference([json.loads(said) for said in ranks.agree(text)])
        refuse(None, key, found, "the same for every rank")


def facts(recipe: Recipe, machine: Machine) -> dict[str, Any]:
    """What has to be the same, in the order in which it is compared. Times and places of files may differ: machines have copies."""
    found = {"modelcenter": __version__, "code": code(), **flat(to_dict(recipe)), **flat(to_dict(machine), "machine.")}
    for path in paths(recipe.data):
        said = describe_data(path, recipe.data)
        found |= {f"data {path}: {key}": said[key] for key in ("files", "bytes", "sha256_of_contents") if key in said}
        found |= {f"data {path}: {Path(file['name']).name}": file["bytes"] for file in said.get("list", ())}
    folder = Path(recipe.model).expanduser()
    if folder.is_dir():
        found |= {f"model {file.name}": file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    return found


def code() -> str:
    """A hash of this package's own files."""
    whole = sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        whole.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    return whole.hexdigest()[:12]


def difference(all_of_them: list[dict[str, Any]]) -> tuple[str, str]:
    """The first key whose values are not the same on all ranks, and who has which."""
    keys = list(dict.fromkeys(key for one in all_of_them for key in one))
    for key in keys:
        held: dict[str, list[int]] = {}
        for rank, one in enumerate(all_of_them):
            held.setdefault(repr(one.get(key)), []).append(rank)
        if len(held) > 1:
            return key, " and ".join(f"{value} on {named(ranks)}" for value, ranks in held.items())
    return "", "hashes differ"
