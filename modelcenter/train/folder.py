"""The folder of a run: which run it belongs to, whether this run may use it, and from which state it continues. Torch-free."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import atomic_write, sweep_files
from ..checkpoint.lock import lock
from ..checkpoint.manifest import MANIFEST, verify
from ..checkpoint.state import check_there, find_state, step_of, steps
from ..config import bind, dump_yaml, read_recipe, to_dict
from ..data.objective import find_objective
from ..data.read import hidden
from ..data.table import is_saved
from ..errors import refuse, refuse_missing
from ..parallel.machine import Machine
from ..parallel.ranks import ALONE, Ranks
from .read import recipe_of
from .recipe import Recipe

RECIPE, MACHINE = "recipe.yaml", "machine.yaml"
WATCHING = ("output_dir", "resume", "logging_steps", "eval_steps", "metrics", "save_steps", "save_total_limit", "report_to")
STEPS = ("max_steps", "num_epochs")
MIXED = ("auto", "text", "json", "jsonl")  # formats of data that a run's own files have, too


@contextmanager
def claim(folder: Path, recipe: Recipe, ranks: Ranks = ALONE) -> Iterator[None]:
    """Hold `folder` for a run of `recipe` (resolved), or refuse; the first rank does this for all. A folder that was made for a run
    which then fails before it has written anything is removed again.

    A folder that holds a run is refused with `resume: never`, and otherwise unless its recipe is the same: a recipe determines the
    result, so the first key that differs is named. Three kinds of keys may differ: those in `WATCHING`, which say what is logged
    and kept; under a schedule that is `timeless` the number of steps, because no step depends on it; and the micro-batch, if the
    loss does not depend on it, because the memory may be another.
    """
    if not ranks.first:
        yield
        return
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    check(folder, recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(folder, "output_dir", error.strerror or str(error), "a folder that can be made and written")
    with lock(folder):
        sweep_files(folder)
        try:
            yield
        except BaseException:
            with suppress(OSError):  # stops at the first folder that holds anything else
                if made and [p.name for p in folder.iterdir()] == [".lock"]:
                    (folder / ".lock").unlink()
                    for path in made:
                        path.rmdir()
            raise


def check(folder: Path, recipe: Recipe) -> None:
    """Refuse a folder that is another run's, or that `recipe.resume` does not allow to continue."""
    if folder.exists() and not folder.is_dir():
        refuse(folder, "output_dir", "a file", "a folder, or a name that is free")
    ran = [name for name in (RECIPE, "model") if (folder / name).exists()] + [path.name for path in steps(folder)]
    if recipe.resume == "never" and ran:
        refuse(folder, "output_dir", f"holds a run already ({ran[0]})", "resume=auto goes on; or another output_dir")
    if not ran and Path(os.path.expanduser(recipe.model)).resolve() == folder.resolve():
        refuse(folder, "output_dir", "model names it, too", f"a folder of the run's own, such as runs/{folder.name}")
    if not ran and folder.name == "model" and (folder.parent / RECIPE).exists():
        refuse(folder, "output_dir", f"where the run in {folder.parent} writes its model", "a folder of the run's own")
    if not ran and (folder / MANIFEST).is_file():  # which would be whole no more
        run = folder.resolve().parent
        refuse(folder, "output_dir", "a training state", f"{run} goes on with its run; or a folder of the run's own")
    for key, path in (("data.path", recipe.data.path), ("data.eval_path", recipe.data.eval_path)):
        for one in [path] if isinstance(path, str) else path or ():
            if recipe.data.format in MIXED and reads(Path(os.path.expanduser(one)), folder):
                found = f"in {one}, which is {key}: what the run writes would be read as data when it goes on"
                refuse(folder, "output_dir", found, f"a folder beside it, or a glob for {key}")
    if ran and ran[0] == "model":
        refuse(folder, "output_dir", f"holds a model that no run of it made: there is no {RECIPE}", "another output_dir")
    if (folder / RECIPE).exists() and len(ran) > 1:  # else it ended before it had anything that another could spoil
        same_recipe(folder / RECIPE, recipe)
    if recipe.resume not in ("never", "auto"):
        source = Path(recipe.resume).resolve()
        newest = next(iter(steps(folder.resolve())), None)
        if newest is not None and source not in (folder.resolve(), newest):  # its later states would be in the way
            refuse(folder, "resume", f"{source}, but {newest.name} is here", "resume=auto, or another output_dir")
        run = source.parent if (source / MANIFEST).exists() else source
        if (run / RECIPE).exists():
            wanted = "the same recipe; or no resume, and model=OUT, which modelcenter convert makes of a state"
            same_recipe(run / RECIPE, recipe, wanted)


def reads(data: Path, folder: Path) -> bool:
    """Whether `folder` is in a folder of data, where it would not be passed over."""
    if not data.is_dir() or is_saved(data) or not folder.resolve().is_relative_to(data.resolve()):
        return False
    return not hidden(folder.resolve().relative_to(data.resolve()))


def same_recipe(file: Path, recipe: Recipe, wanted: str = "the same recipe, or another output_dir") -> None:
    """Refuse if the recipe in `file` gives another result than `recipe`, and name the first key that differs."""
    free = {*WATCHING, "data.padding_free", *(STEPS if recipe.schedule.timeless else ())}
    if not find_objective(recipe.objective).together:
        free.add("micro_batch")
    theirs, ours = flat(to_dict(recipe_of(file))), flat(to_dict(recipe))
    for key in ours | theirs:
        if not {key, key.partition(".")[0]} & free and ours.get(key) != theirs.get(key):
            if key in ("data.path", "data.eval_path") and elsewhere(file.parent, theirs.get(key), ours.get(key), recipe):
                continue
            found = f"{theirs.get(key)!r} there, {ours.get(key)!r} here"
            why = f"; schedule.name={recipe.schedule.name} goes by the number of steps from the first on" if key in STEPS else ""
            refuse(file, key, found, f"{wanted}{why}")


def elsewhere(run: Path, then: Any, here: Any, recipe: Recipe) -> bool:
    """Whether the data that the run found at `then` when it began have only been moved, and are now at `here`."""
    from .environment import same_bytes  # which needs torch

    if isinstance(then, str) and isinstance(here, str):
        return same_bytes(run, then, here, recipe.data)
    lists = isinstance(then, list) and isinstance(here, list) and len(then) == len(here)
    return lists and all(a == b or same_bytes(run, a, b, recipe.data) for a, b in zip(then, here, strict=True))


def check_steps(start: Path, recipe: Recipe, steps: int) -> None:
    """Refuse to continue from the state `start` if it is past the end of a run of so many steps."""
    if step_of(start) > steps:
        key, value = ("max_steps", "") if steps == recipe.max_steps else ("num_epochs", f"{recipe.num_epochs:g}, which are ")
        found = f"{value}{steps} steps, and {start} has done more"
        refuse(None, key, found, f"{step_of(start)} steps end the run there")


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def find_start(resume: str, folder: Path, ranks: Ranks = ALONE) -> Path | None:
    """The step-N folder to continue from; None to begin. The first rank looks, for all. Errors: `MissingError` for a path without a
    valid state; `InputError` for a run whose own states are all broken, because it is for the user to decide to begin again."""
    return Path(told) if (told := ranks.tell(str(found_start(resume, folder) or "") if ranks.first else "")) else None


def found_start(resume: str, folder: Path) -> Path | None:
    if resume == "never":
        return None
    source = folder if resume == "auto" else Path(resume)
    if resume != "auto" and (source / MANIFEST).exists():
        source = source.resolve()  # a link to it, or `.`, says neither its step nor whose run it is of
        verify(source)
        return source
    found = find_state(source)
    if found is None and resume != "auto":
        check_there(source)
        if (source / "trainer_state.json").is_file():
            wanted = f"model={source}, which begins with its weights; its optimizer and its place in the data are not read"
            refuse_missing(source, "resume", "a checkpoint of Trainer", wanted)
        refuse_missing(source, "resume", "no valid training state", "a run's folder, a step-N in one, auto or never")
    if found is None and (broken := [path.name for path in steps(folder)]):
        refuse(folder, "resume", f"auto, and {', '.join(broken[:3])} broken, as said above", "move them away to begin again")
    return None if found is None else found[0]


def write_recipe(folder: Path, recipe: Recipe, machine: Machine) -> None:
    """Write the resolved recipe and the machine beside the results, ready to be run again: it goes on from what is there then,
    wherever the run has begun."""
    atomic_write(folder / RECIPE, dump_yaml(to_dict(replace(recipe, resume="auto"))).encode())
    atomic_write(folder / MACHINE, dump_yaml(to_dict(machine)).encode())


def ran(recipe: Recipe) -> tuple[Recipe, Machine] | None:
    """The recipe and the machine of the run that `recipe` would continue; None if it begins, or if no machine was kept."""
    source = Path(recipe.output_dir if recipe.resume == "auto" else recipe.resume).resolve()
    run = source.parent if (source / MANIFEST).exists() else source
    files = run / RECIPE, run / MACHINE
    if recipe.resume == "never" or not all(file.exists() for file in files):
        return None
    return recipe_of(files[0]), bind(Machine, read_recipe(files[1]), files[1])
