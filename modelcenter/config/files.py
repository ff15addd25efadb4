"""The files of recipes: those that come with the package have bare names."""

import stat
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..errors import InputError, nearest, refuse, refuse_missing
from .document import parse, short

SIZE = 256 * 1024  # bytes of a recipe


def packaged(*folders: str) -> Traversable:
    """The recipes that come with the package, or a folder among them."""
    return files("modelcenter").joinpath("recipes", *folders)


def find(name: str | Path, what: str, folder: Traversable) -> Path:
    """The file of a bare name in a packaged `folder`, or the path itself if it looks like one."""
    known = names(folder)
    if str(name) in known:
        return Path(str(folder / f"{name}.yaml"))
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or (path / "recipe.yaml").is_file():  # the last is a run's
        return path
    near = nearest(name, known)
    model = f"a model is given after one: finetune model={name}; " if what == "recipe" and name and near.startswith("known") else ""
    refuse_missing(None, str(name) or "''", f"no such {what}", f"{model}{near} (or a path ending in .yaml)")


def names(folder: Traversable) -> list[str]:
    """The bare names of the YAML files in a folder, sorted."""
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. An `InputError` names the file and the line of anything that a recipe must not hold."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # before opening: opening a FIFO waits for its writer
            own = Path(path) / "recipe.yaml"
            wanted = f"{own}, the recipe of this run, with which it goes on" if own.is_file() else "a recipe is a YAML file"
            refuse(path, None, "not a regular file", wanted)
        with open(path, "rb") as f:
            raw = f.read(SIZE + 1)
    except FileNotFoundError:
        refuse_missing(path, None, "no such file", "name an existing YAML file")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, InputError):
            raise
        refuse(path, None, str(getattr(error, "strerror", None) or error), "a readable YAML file")
    if len(raw) > SIZE:
        refuse(path, None, f"more than {SIZE} bytes", f"a recipe has at most {SIZE}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(path, f"byte {error.start}", "not UTF-8", "save the recipe as UTF-8 text")
    value = parse(text, path)
    if not isinstance(value, dict):
        refuse(path, None, "empty" if value is None else short(value), "a mapping of `key: value` lines")
    return value
