"""Every key of a recipe and of a machine, walked: misspelt, of another type, out of its bounds, not a number, given twice.

Each is refused in one line that names the key, before torch is imported. What fits a type is decided here once more, so that the
code that reads recipes is not its own judge.
"""

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from effort import at_most

from modelcenter.config import bind, dump_yaml
from modelcenter.errors import InputError
from modelcenter.parallel.machine import Machine
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe

BASE: dict[str, Any] = {"model": "gpt2", "output_dir": "out", "max_steps": 10, "data": {"path": "a.txt"}}
ALL = ["word", "", 0, 1, -1, 1.5, True, None, [], ["word"], [1, "a"], {"k": 1}, {"k": "v"}, {"k": [1]}, 2**63, -(2**70)]
NUMBERS = ["nan", ".nan", "inf", "-inf", ".inf", "1e999", "word", "", "0x10", "1_000", "1,5", "--5", "½", "[1]", "{a: 1}", "9" * 30]


class Leaf(NamedTuple):
    key: str
    hint: Any
    bounds: Mapping[str, Any]

    @property
    def kinds(self) -> tuple[Any, ...]:
        return kinds(self.hint)


def leaves(cls: type, section: str = "") -> Iterator[Leaf]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{section}{field.name}.")  # type: ignore[arg-type]
        else:
            yield Leaf(section + field.name, hint, field.metadata)


LEAVES = list(leaves(Recipe))
MACHINES = list(leaves(Machine))
SECTIONS = sorted({leaf.key.rpartition(".")[0] for leaf in LEAVES} - {""})


def fits(value: Any, kind: Any, bounds: Mapping[str, Any]) -> bool:
    """Whether a value may be what a key of that type is given, as far as type and bounds go."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if kind in (NoneType, bool):
        return type(value) is kind
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) < 2**63 and inside(value, bounds)
    if kind is str:
        return type(value) is str and len(value) >= bounds.get("min", 0)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in args)
    if origin is dict:
        return isinstance(value, dict) and all(any(fits(v, k, bounds) for k in kinds(args[1])) for v in value.values())
    assert origin is tuple, kind
    if not isinstance(value, list) or (args[-1] is not Ellipsis and len(value) != len(args)):
        return False
    return all(any(fits(v, k, bounds) for k in kinds(args[0])) for v in value)


def kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def inside(value: float, bounds: Mapping[str, Any]) -> bool:
    return (bounds.get("min", value) <= value <= bounds.get("max", value)
            and value > bounds.get("above", -math.inf) and value < bounds.get("below", math.inf))  # fmt: skip


def tree(key: str, value: Any) -> dict[str, Any]:
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in BASE.items()}
    *sections, leaf = key.split(".")
    at = out
    for section in sections:
        at = at.setdefault(section, {})
    at[leaf] = value
    return out


def line(error: pytest.ExceptionInfo[InputError], key: str) -> str:
    """The one line, which names the key."""
    text = str(error.value)
    assert "\n" not in text and text.isprintable() and len(text) <= 300 and "; " in text and key in text, text
    return text


def ids(leaves: list[Leaf]) -> list[Any]:
    return [pytest.param(leaf, id=leaf.key) for leaf in leaves]


def test_the_walk_sees_every_key() -> None:
    assert len(LEAVES) > 60 and len(MACHINES) >= 6 and {"optimizer", "schedule", "data", "loss", "adapter"} <= set(SECTIONS)


@pytest.mark.parametrize("leaf", ids(LEAVES))
def test_another_type_or_size(leaf: Leaf) -> None:
    wrong = [value for value in ALL if not any(fits(value, kind, leaf.bounds) for kind in leaf.kinds)]
    assert len(wrong) >= 6 or dict in map(get_origin, leaf.kinds) or Any in leaf.kinds
    for value in wrong:
        with pytest.raises(InputError) as error:
            bind(Recipe, tree(leaf.key, value), "r.yaml")
        assert line(error, leaf.key).startswith(f"r.yaml: {leaf.key}"), value


@pytest.mark.parametrize("leaf", ids(LEAVES))
def test_a_letter_too_many_or_too_few(leaf: Leaf) -> None:
    known = {other.key for other in LEAVES}
    section, _, name = leaf.key.rpartition(".")
    for odd in (f"{name}x", name[:-1], name[1:] + name[:1], name.upper(), name.replace("_", "-") if "_" in name else f" {name}"):
        key = f"{section}.{odd}" if section else odd
        if key in known or not odd or key in SECTIONS:
            continue
        with pytest.raises(InputError) as error:
            bind(Recipe, tree(key, 1), "r.yaml")
        text = line(error, key.strip() if " " in key else key)
        assert "unknown key" in text
        if odd == f"{name}x" and len(name) > 3:
            assert f"did you mean '{key.removesuffix('x')}'?" in text


@pytest.mark.parametrize("leaf", ids([leaf for leaf in LEAVES if {int, float} & set(leaf.kinds)]))
def test_no_number_at_all(leaf: Leaf, tmp_path: Path) -> None:
    """From the command line and from a file, and as Python's own nan."""
    file = tmp_path / "r.yaml"
    file.write_text(dump_yaml(BASE))
    for text in NUMBERS:
        if text == "" and NoneType in leaf.kinds:
            continue  # absent
        if str in leaf.kinds or any(get_origin(kind) is not None for kind in leaf.kinds):
            continue  # may be a word, too
        with pytest.raises(InputError) as error:
            load_recipe(file, [f"{leaf.key}={text}"])
        assert line(error, leaf.key).startswith(f"command line: {leaf.key}: "), text
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(InputError) as error:
            bind(Recipe, tree(leaf.key, number))
        line(error, leaf.key)
    section, _, name = leaf.key.rpartition(".")
    for text in (".nan", "-.inf", "1e999"):
        (tmp_path / "bad.yaml").write_text(f"{section}:\n  {name}: {text}\n" if section else f"{name}: {text}\n")
        with pytest.raises(InputError, match=r"bad\.yaml: line \d: .*finite number"):
            load_recipe(tmp_path / "bad.yaml")


@pytest.mark.parametrize("leaf", ids([leaf for leaf in LEAVES if {int, float} & set(leaf.kinds) and leaf.bounds.keys() & {
    "min", "max", "above", "below"}]))  # fmt: skip
def test_just_beyond_a_bound(leaf: Leaf) -> None:
    b, whole = leaf.bounds, int in leaf.kinds and float not in leaf.kinds
    beyond = [b[k] for k in ("above", "below") if k in b]
    for k, sign in (("min", -1), ("max", 1)):
        if k in b:
            beyond += [b[k] + sign] if whole else [b[k] + sign, math.nextafter(b[k], sign * math.inf)]
    for value in beyond:
        with pytest.raises(InputError) as error:
            bind(Recipe, tree(leaf.key, value), "r.yaml")
        assert line(error, leaf.key).startswith(f"r.yaml: {leaf.key}: "), value


@pytest.mark.parametrize("leaf", ids(LEAVES))
def test_given_twice(leaf: Leaf, tmp_path: Path) -> None:
    """In a file, where YAML would take the last one; and on the command line."""
    section, _, name = leaf.key.rpartition(".")
    text = f"{section}:\n  {name}: 1\n  {name}: 1\n" if section else f"{name}: 1\n{name}: 1\n"
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(InputError, match=r"given on line \d and on line \d; keep one") as error:
        load_recipe(tmp_path / "r.yaml")
    line(error, name)
    (tmp_path / "r.yaml").write_text(dump_yaml(BASE))
    with pytest.raises(InputError, match="given twice; keep one") as error:
        load_recipe(tmp_path / "r.yaml", [f"{leaf.key}=1", f"{leaf.key}=1"])
    line(error, leaf.key)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_is_none(section: str) -> None:
    for value in (1, "word", True, None, ["a"], []):
        with pytest.raises(InputError) as error:
            bind(Recipe, tree(section, value), "r.yaml")
        assert line(error, section).startswith(f"r.yaml: {section}: ")


@pytest.mark.parametrize("leaf", ids(MACHINES))
def test_a_machine(leaf: Leaf) -> None:
    for value in [*ALL, math.nan, math.inf]:
        if not any(fits(value, kind, leaf.bounds) for kind in leaf.kinds):
            with pytest.raises(InputError) as error:
                bind(Machine, {leaf.key: value}, "m.yaml", "machine.")
            assert line(error, leaf.key).startswith(f"m.yaml: machine.{leaf.key}"), value
    with pytest.raises(InputError, match=f"machine.{leaf.key}x: unknown key; did you mean"):
        bind(Machine, {f"{leaf.key}x": 1}, "m.yaml", "machine.")


def test_all_of_them_take_no_time() -> None:
    for leaf in LEAVES:
        with pytest.raises(InputError), at_most(50_000):  # 9,545 on Python 3.11
            bind(Recipe, tree(f"{leaf.key}x", 1), "r.yaml")


CHECK = """
import sys
from modelcenter.__main__ import main
codes = [main(["train", "pretrain", "data.path=a.txt", setting]) for setting in sys.argv[1:]]
print(codes, "torch" in sys.modules)
"""


def test_status_and_stream_of_the_command_line(tmp_path: Path) -> None:
    """Nothing on stdout but what this test prints, nothing left behind, no torch, which would take longer than all the rest."""
    settings = [f"{leaf.key}x=1" for leaf in LEAVES[::7]] + ["output_dir=/", "optimizer.lr=nan", "batch=0", "on_spike=maybe"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", CHECK, *settings], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.stdout == f"{[2] * len(settings)} False\n", done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(settings) and all(row.startswith("modelcenter: error: ") and len(row) < 320 for row in said)
    assert not list(tmp_path.iterdir())


def test_a_misspelt_key_of_a_section_is_named_whole() -> None:
    for key, wanted in {"data.pth": "data.path", "pth": "data.path", "optimizer.weigth_decay": "optimizer.weight_decay"}.items():
        with pytest.raises(InputError, match=f"{key}: unknown key; did you mean '{wanted}'") as error:
            bind(Recipe, tree(key, 1), "r.yaml")
        assert f"'{wanted}'" in str(error.value)


def test_a_key_with_a_dot_in_a_file_is_told_how_it_is_written_there(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: gpt2\noptimizer.lr: 1.0e-4\n")
    with pytest.raises(InputError, match=r"optimizer\.lr: unknown key; in a file it is optimizer: \{lr: \.\.\.\}"):
        load_recipe(tmp_path / "mine.yaml", ["data.path=a.txt"])
