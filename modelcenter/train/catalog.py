"""Lists the packaged recipes, and writes a copy of one with all its keys, to be edited. Torch-free.

A packaged recipe holds only what differs from the defaults, each setting with its reason after ` # `; its first line says what the
recipe is for. These comments are read line by line, and our own files are written for that; the settings come from the YAML.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import describe, find, flow, names, packaged, read_recipe
from ..data.config import DataConfig
from ..data.objective import COMMON, Objective, find_objective
from .read import open_recipe, value_at
from .recipe import Recipe

LINE = re.compile(r"( *)([\w-]+):(?: .*?)??(?:  # (.*))?")
COLUMN = 26  # two before the comments of a copy, unless a value is longer


def listing() -> list[dict[str, str]]:
    """The name of every packaged recipe, its variants one by one, with what it is for."""
    rows = []
    for name in names(packaged()):
        file = find(name, "recipe", packaged())
        why = reasons(file)
        variants = read_recipe(file).get("variants", {})
        rows += [{"name": f"{name}/{one}", "what": why[f"variants.{one}"]} for one in variants]
        rows += [{"name": name, "what": first_line(file)}] if not variants else []
    return rows


def first_line(file: Path) -> str:
    """The comment at the top of a YAML file of ours."""
    return file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def reasons(file: Path) -> dict[str, str]:
    """The comment behind each setting, by its dotted key."""
    found, sections = {}, [""]
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := LINE.fullmatch(line):
            indent, key, reason = match.groups()
            sections[len(indent) // 2 :] = [key]
            if reason:
                found[".".join(sections)] = reason
    return found


def commented(name: str) -> str:
    """The recipe of that name with every key that its objective reads: value, type, default and meaning, and above what it sets,
    why."""
    file, tree = open_recipe(name)
    why = reasons(file)
    variant = why.get(f"variants.{name.rpartition('/')[2]}")
    unread = {f"data.{f.name}" for f in fields(DataConfig)} - {f"data.{key}" for key in (*COMMON, *objective_of(tree).keys)}
    lines, section = [f"# {first_line(file)}", *([f"# {variant}"] if variant else [])], ""
    for key in (key for key in describe(Recipe) if key.name not in unread):
        above, _, leaf = key.name.rpartition(".")
        if above != section:
            section = above
            lines += [f"{above}:"] if above else []
        value = value_at(tree, key.name)
        indent = "  " if above else ""
        reason = why.get(key.name)
        lines += [f"{indent}# {reason}"] if reason else []
        shown = f"{indent}{leaf}: {key.default if value is None else flow(value)}"
        default = "required" if key.default is None else f"default {key.default}"
        lines.append(f"{shown:<{COLUMN}}  # {key.help} ({key.type}; {default})")
    return "\n".join(lines) + "\n"


def objective_of(tree: Mapping[str, Any]) -> Objective:
    """The objective that a recipe trains."""
    return find_objective(tree.get("objective", "lm"))
