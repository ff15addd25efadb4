"""`modelcenter list` and `copy`: what there is to choose from."""

from pathlib import Path
from typing import Any

from ..checkpoint.atomic import atomic_write
from ..config import COMMAND_LINE, describe, find, names, packaged
from ..errors import nearest, refuse
from .arguments import Answer, Arguments, take


def list_(args: Arguments) -> Answer:
    """List the models, the recipes, the machine profiles, or the keys of recipes and machine profiles.

    modelcenter list models|recipes|machines|keys

    modelcenter copy RECIPE writes all keys that one recipe reads, with its settings.
    """
    kinds = {"models": list_models, "recipes": list_recipes, "machines": list_machines, "keys": list_keys}
    if args.names[:1] == ["keys"] and len(args.names) > 1:
        wanted = f"modelcenter list keys, which are any recipe's; modelcenter copy {args.names[1]} writes out those that it reads"
        refuse(COMMAND_LINE, args.names[1], "not wanted here", wanted)
    (kind,) = take(args, ["models|recipes|machines|keys"])
    if kind not in kinds:
        refuse(COMMAND_LINE, f"list {kind}", "unknown", nearest(kind, kinds))
    rows = kinds[kind]()
    widths = [min(40, max((len(str(row[column])) for row in rows), default=0)) for column in (rows[0] if rows else {})]
    lines = ["  ".join(str(v).ljust(w) for v, w in zip(row.values(), widths, strict=True)).rstrip() for row in rows]
    return Answer("\n".join(lines), rows)


def list_models() -> list[dict[str, Any]]:
    """Every preset with its family, size and hub id."""
    from ..registry import presets

    return [
        {"name": name, "family": family.__name__, "parameters": f"{preset.parameters:,}", "hub": preset.hub or "-"}
        for name, (family, preset) in presets().items()
    ]


def list_recipes() -> list[dict[str, Any]]:
    """Every packaged recipe, and what it is for."""
    from ..train.catalog import listing

    return list(listing())


def list_machines() -> list[dict[str, Any]]:
    """Every packaged machine profile with its first line."""
    from ..train.catalog import first_line

    folder = packaged("machines")
    return [{"name": name, "what": first_line(find(name, "machine profile", folder))} for name in names(folder)]


def list_keys() -> list[dict[str, Any]]:
    """Every key of a recipe, then every key of a machine profile."""
    from ..parallel.machine import Machine
    from ..train.recipe import Recipe

    keys = [*describe(Recipe), *describe(Machine, "machine.")]
    return [key._asdict() | {"default": "(required)" if key.default is None else key.default} for key in keys]


def copy(args: Arguments) -> Answer:
    """Copy a recipe into this folder, to be edited: every key with its type, default and meaning.

    modelcenter copy RECIPE
    """
    from ..train.catalog import commented

    (name,) = take(args, ["RECIPE"])
    text = commented(name)
    target = Path(Path(name).name if Path(name).suffix else f"{name.replace('/', '-')}.yaml")
    if target.exists():
        refuse(target, None, "exists", "move it away, or go to another folder")
    atomic_write(target, text.encode())
    return Answer(f"{target} written; next: modelcenter train {target}", {"file": str(target)})
