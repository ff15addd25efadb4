"""What sentence-transformers' files say about vectors, where a model here forms them otherwise."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import refuse
from .files import read_json

KNOWN = ("Transformer", "Pooling", "Normalize")  # a vector's length is no matter of cosines
PREFIX, NAMES = "pooling_mode_", {"mean_tokens": "mean", "lasttoken": "last"}


def otherwise(folder: Path, pooling: str) -> Iterator[str]:
    """Each module of `folder`/modules.json that is left out, and a pooling other than `pooling` (mean or last)."""
    if not (folder / "modules.json").is_file():
        return
    modules: Any = read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        refuse(folder / "modules.json", None, "not a list of modules", "what sentence-transformers writes, or no such file")
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            yield from pooled(folder, f"{module.get('path')}/config.json", pooling)
        elif kind not in KNOWN:
            yield f"{module.get('path')} ({kind}) is not read: vectors are those before it"


def pooled(folder: Path, file: str, pooling: str) -> Iterator[str]:
    """What the file of a pooling says, if it is another one."""
    said = read_json(folder / file) if (folder / file).is_file() else {}
    if not isinstance(said, dict):
        refuse(folder / file, None, f"a JSON {type(said).__name__}", "an object is wanted")
    used = [key.removeprefix(PREFIX) for key, value in said.items() if key.startswith(PREFIX) and value is True]
    if said.get("pooling_mode") is not None:  # which wins over the others
        used = [str(said["pooling_mode"])]
    if used and [NAMES.get(name, name) for name in used] != [pooling]:
        yield f"{file} says {' and '.join(used)}: vectors here are the {pooling} of the tokens'"
