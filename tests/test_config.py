"""Strict YAML, overrides and binding: what is refused, under which key, and that nothing else ever escapes."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from effort import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from modelcenter.config import (
    DEPTH,
    NODES,
    SIZE,
    Layers,
    assignments,
    bind,
    describe,
    dump_yaml,
    find,
    merge,
    override,
    packaged,
    parse,
    read_recipe,
    to_dict,
)
from modelcenter.errors import InputError, MissingError, refuse


@dataclass(frozen=True)
class Inner:
    lr: float = field(default=0.1, metadata={"above": 0, "help": "the rate"})
    betas: tuple[float, float] = field(default=(0.9, 0.99), metadata={"min": 0, "below": 1})

    def __post_init__(self) -> None:
        if self.lr == 13:
            refuse(None, "lr", "13", "another number")


@dataclass(frozen=True)
class Outer:
    name: str = field(metadata={"min": 1})
    inner: Inner = field(default_factory=Inner)
    kind: Literal["a", "b"] = "a"
    steps: int | None = field(default=None, metadata={"min": 1, "max": 100})
    flag: bool = False
    free: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    note: str | None = None


# ---------------------------------------------------------------------------------------------------------------- YAML

REFUSED = {
    "anchor": ("a: &x 1", "line 1: the anchor &x"),
    "alias": ("a: 1\nb: *x", "line 2: the alias *x"),
    "alias as key": ("*x : 1", "line 1: the alias *x"),
    "merge key": ("a: 1\n<<: {b: 2}", "line 2: the merge key <<"),
    "tag": ("a: !!python/object:os.system x", "line 1: the tag tag:yaml.org,2002:python/object:os.system"),
    "tag on a mapping": ("a: !x {b: 1}", "line 1: the tag !x"),
    "tag !": ("a: ! x", "line 1: the tag !"),
    "documents": ("a: 1\n---\nb: 2", "line 2: a second document"),
    "directive": ("%YAML 1.1\n---\na: 1", "line 1: a % directive"),
    "tab": ("a:\n\tb: 1", "line 2: a tab"),
    "duplicate": ("a: 1\nb: 2\na: 3", "a: given on line 1 and on line 3"),
    "duplicate within": ("a:\n  b: 1\n  b: 1", "b: given on line 2 and on line 3"),
    "list as key": ("? [a]\n: b", "line 1: a key that is not a word"),
    "nan": ("a: nan", "line 1: 'nan'; a finite number"),
    ".NaN": ("a: .NaN", "line 1: '.NaN'; a finite number"),
    "-inf": ("a: [-.inf]", "line 1: '-.inf'; a finite number"),
    "1e999": ("a: 1e999", "line 1: '1e999'; a finite number"),
    "65 bits": ("a: 9223372036854775808", "line 1: '9223372036854775808'; an integer of at most 64 bits"),
    "half a surrogate pair": ('a: "\\ud800"', "line 1: "),
    "NUL": ('a: "\\0"', "line 1: "),
    "a bad escape": ('a: "\\UFFFFFFFF"', "cannot be read"),
    "control character": ("a: \x07", "character 3: U+0007"),
    "syntax": ("a: b: c", "line 1, column 5: mapping values are not allowed here; the indentation of the keys beside it, or "),
    "unclosed": ("a: [1, 2", "line 1, column 9: expected ',' or ']', but got '<stream end>'; correct the YAML"),
    "a star in a list": ("a: [*.bias]", "line 1, column 6: expected alphabetic or numeric character, but found '.'; quotes "),
    "no space": ("b: 1\na:8\n\nc: 2", "line 2, column 1: could not find expected ':'; a key, a colon, a space and a value"),
    "an open quote": ("b: 1\na: 'x\nc: 2", "line 2, column 4: found unexpected end of stream; a closing quote"),
    "indented less": ("a:\n  b: 1\n c: 2", "line 3, column 2: expected <block end>, but found '<block mapping start>'; the ind"),
    "an at": ("a: @x", "line 1, column 4: found character '@' that cannot start any token; quotes around text that begins so"),
    "deep": ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), f"line 1: nested more than {DEPTH} deep"),
    "very deep": ("[" * 100_000, f"line 1: nested more than {DEPTH} deep"),
    "deep blocks": ("- " * 50_000, f"line 1: nested more than {DEPTH} deep"),
    "many": ("a: [" + "1," * NODES + "]", f"line 1: more than {NODES} values"),
    "empty": ("# nothing\n", "empty"),
    "list": ("- a\n- b", "['a', 'b']; a mapping of `key: value` lines"),
    "text": ("hello", "'hello'; a mapping of `key: value` lines"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    text, found = REFUSED[case]
    file = tmp_path / "r.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError) as refused, at_most(200 * len(text) + 20_000):  # 71 a character, and 3,500, on Python 3.11
        read_recipe(file)
    assert str(refused.value).startswith(f"{file}: {found}")
    assert "\n" not in str(refused.value) and len(str(refused.value)) <= 300


def test_refused_bytes(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    for raw, found in ((b"a: \xff", "byte 3: not UTF-8"), (b"#" * (SIZE + 1), f"more than {SIZE} bytes")):
        file.write_bytes(raw)
        with pytest.raises(InputError, match=found):
            read_recipe(file)
    file.write_bytes(b"a: 1" + b" " * (SIZE - 4))
    assert read_recipe(file) == {"a": 1}


def test_refused_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingError, match="no such file"):
        read_recipe(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="not a regular file"):
        read_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("a: 1")
    with pytest.raises(InputError, match=r"run: not a regular file; .*run/recipe\.yaml, the recipe of this run"):
        read_recipe(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert find("run", "recipe", packaged()) == Path("run")  # to be told so too, and not of recipes of a like name
    with pytest.raises(InputError, match="null byte"):
        read_recipe("a\0b")
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(InputError, match="not a regular file"):  # and does not wait for a writer
        read_recipe(tmp_path / "fifo.yaml")


def test_scalars() -> None:
    """YAML 1.2's core schema: PyYAML alone reads 1e-5 as text, `no` as false, 010 as 8 and 1:30 as 90."""
    words = "3e-4, 1e-5, 1E5, .5, 5., -2, +3, 0, true, False, null, ~, no, on, 010, 1:30, 0x1F, 1_000, 2024-01-01"
    assert parse(f"[{words}, '1', \"true\"]") == [
        3e-4, 1e-5, 1e5, 0.5, 5.0, -2, 3, 0, True, False, None, None,
        "no", "on", "010", "1:30", "0x1F", "1_000", "2024-01-01", "1", "true",
    ]  # fmt: skip
    assert parse("a:\nb: |\n  x\n  y\n1: z") == {"a": None, "b": "x\ny\n", "1": "z"}
    assert parse("﻿a: 1") == {"a": 1} and parse("---\na: 1\n...\n") == {"a": 1}


@given(st.text() | st.text(alphabet="[]{}:,-?&*!|>'\"%@`#~ \n\tab1.e<=\\ux0F"))
@settings(max_examples=500)
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        value = parse(text, "fuzz.yaml")
    except InputError as error:
        assert str(error).startswith("fuzz.yaml: ")
    else:
        assert parse(dump_yaml({"k": value})) == {"k": value}


@given(st.binary(max_size=64))
@settings(max_examples=200)
def test_any_bytes_read_or_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "r.yaml").write_bytes(raw)
    with suppress(InputError):
        assert isinstance(read_recipe(tmp_path / "r.yaml"), dict)


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
TRAPS = ["no", "null", "true", "1e5", "-", "~", "a: b", "#", "nan", ".inf", "<<", "", "010", "it's", "- a", "? b"]
TREES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from(TRAPS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, TREES, max_size=5))
@settings(max_examples=100)
def test_dump_reads_back_exactly(tree: dict[str, Any]) -> None:
    back = parse(dump_yaml(tree))
    assert back == tree
    assert repr(back) == repr(tree)  # 1, 1.0 and True are equal to ==


# ----------------------------------------------------------------------------------------------------------- overrides


def test_override_wins_and_leaves_the_file_alone() -> None:
    file = {"name": "x", "inner": {"lr": 1.0, "betas": [0.5, 0.5]}, "steps": 3}
    over = override(file, ["inner.lr=3e-4", "steps=7", "flag=true", "free.layers=2", "sizes=[1, 2]"])
    assert file == {"name": "x", "inner": {"lr": 1.0, "betas": [0.5, 0.5]}, "steps": 3}
    wanted = Outer("x", Inner(3e-4, (0.5, 0.5)), steps=7, flag=True, free={"layers": 2}, sizes=(1, 2))
    assert bind(Outer, over) == wanted
    assert bind(Outer, override(file, {"inner.lr": 2, "name": "1"})).inner.lr == 2.0


@pytest.mark.parametrize("text", ["2024", "true", "1e5", "a: b", "[x", "*x", '"q"', "#1", "it's", "!", "a=b", ""])
def test_text_from_the_command_line_is_itself(text: str) -> None:
    """The shell has had its quotes already: what a text field is given is what it holds."""
    assert bind(Outer, override({"name": "x"}, [f"note={text}"])).note == text
    assert bind(Outer, override({"name": "x"}, ["note=null"])).note is None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["steps"], "command line: steps: no value"),
        (["a..b=1"], "command line: a..b: not a key"),
        (["=1"], "command line: : not a key"),
        (["steps=1", "steps=2"], "command line: steps: given twice"),
        (["inner=1", "inner.lr=1"], "command line: inner.lr: 'inner' is given as a whole too"),
        (["inner.lr=1", "inner=1"], "command line: inner: given twice"),
        ([".".join("a" * 40) + "=1"], "command line: " + ".".join("a" * 40) + ": not a key"),
        (["note=\udcff"], "command line: note: not UTF-8"),
    ],
)
def test_override_refuses(given: list[str], found: str) -> None:
    with pytest.raises(InputError) as refused:
        assignments(given)
    assert str(refused.value).startswith(found)


def test_text_in_a_locale_that_cannot_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may well be UTF-8: Python was told to read something else."""
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(InputError, match="note: more than ascii can hold, as which Python has read it; PYTHONUTF8=1"):
        assignments(["note=\udcc3\udca4"])


def test_assignments_leave_the_callers_sections_as_they_are() -> None:
    given: dict[str, Any] = {"inner": {"lr": 1, "deep": {"a": 1}}, "inner.betas": 2, "inner.deep.b": 3}
    assert assignments(given) == {"inner": {"lr": 1, "betas": 2, "deep": {"a": 1, "b": 3}}}
    assert given == {"inner": {"lr": 1, "deep": {"a": 1}}, "inner.betas": 2, "inner.deep.b": 3}


def test_merge_replaces_what_is_no_mapping() -> None:
    assert merge({"a": 1, "b": {"c": 1}}, {"a": {"x": 1}, "b": {"d": 2}}) == {"a": {"x": 1}, "b": {"c": 1, "d": 2}}


def test_an_empty_mapping_leaves_nothing_of_the_files_wherever_it_is_given() -> None:
    """`config={}` is the preset's own shape."""
    file = {"name": "x", "free": {"layers": 6, "dim": 8}}
    assert override(file, {"free": {}})["free"] == bind(Outer, override(file, ["free={}"])).free == {}
    assert override(file, {"free": {"dim": 9}})["free"] == {"layers": 6, "dim": 9}


# -------------------------------------------------------------------------------------------------------------- binding

BAD = {
    "nmae: x": "nmae: unknown key; did you mean 'name'?",
    "name: x\nouter.steps: 1": "outer.steps: unknown key; did you mean 'steps'?",
    "name: x\nlr: 1": "lr: unknown key; did you mean 'inner.lr'?",
    "name: x\ninner: {foo: 1}": "inner.foo: unknown key; known: betas, lr",
    "steps: 1": "name: missing; give text that is not empty",
    "name: ''": "name: ''; text that is not empty",
    "name: 1": "name: 1; text that is not empty: \"1\"",
    "name: true": "name: true; text that is not empty: \"true\"",
    "name: x\nsteps: 1.0": "steps: 1.0; an integer at least 1 and at most 100 or null",
    "name: x\nsteps: true": "steps: true; an integer",
    "name: x\nsteps: '3'": "steps: '3'; an integer",
    "name: x\nsteps: 0": "steps: 0; an integer at least 1",
    "name: x\nsteps: 101": "steps: 101; an integer at least 1 and at most 100",
    "name: x\nflag: 1": "flag: 1; true or false",
    "name: x\nflag: yes": "flag: 'yes'; true or false",
    "name: x\nkind: c": "kind: 'c'; a | b",
    "name: x\ninner: 3": "inner: 3; a mapping",
    "name: x\ninner: null": "inner: null; a mapping",
    "name: x\nfree: [1]": "free: [1]; a mapping",
    "name: x\ninner: {lr: 0}": "inner.lr: 0; a number above 0",
    "name: x\ninner: {lr: -1e-9}": "inner.lr: -1e-09; a number above 0",
    "name: x\ninner: {lr: fast}": "inner.lr: 'fast'; a number above 0",
    "name: x\ninner: {lr: false}": "inner.lr: false; a number above 0",
    "name: x\ninner: {betas: [0.9]}": "inner.betas: [0.9]; [a number",
    "name: x\ninner: {betas: 0.9}": "inner.betas: 0.9; [a number",
    "name: x\ninner: {betas: [0.9, 1]}": "inner.betas.1: 1; a number at least 0 and below 1",
    "name: x\nsizes: [1, x]": "sizes.1: 'x'; an integer",
    "name: x\ninner: {lr: 13}": "inner.lr: 13; another number",
}


@pytest.mark.parametrize("text", BAD)
def test_bind_refuses(text: str) -> None:
    with pytest.raises(InputError) as refused:
        bind(Outer, parse(text), "r.yaml")
    assert str(refused.value).startswith(f"r.yaml: {BAD[text]}")


def layered(mapping: dict[str, Any], overrides: list[str]) -> tuple[dict[str, Any], Layers]:
    return override(mapping, overrides), Layers("r.yaml", assignments(overrides), "command line")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("steps=x", "steps: 'x'; an integer"),
        ("inner.lr=nan", "inner.lr: 'nan'; a number above 0"),
        ("inner.lr=1e999", "inner.lr: '1e999'; a number above 0"),
        ("inner.lrr=1", "inner.lrr: unknown key; did you mean 'inner.lr'?"),
        ("iner.lr=1", "iner: unknown key; did you mean 'inner'?"),
        ("inner.betas=[0.9", "inner.betas: '[0.9'; [a number"),
        ("inner.betas=[.9, 7]", "inner.betas.1: 7; a number"),
        ("steps={a: 1}", "steps: a mapping; an integer"),
        ("inner.lr=13", "inner.lr: 13; another number"),
        ("flag=on", "flag: 'on'; true or false"),
        ("flag=m.yaml", "flag: 'm.yaml'; true or false; what is not for --flag goes before it"),
    ],
)
def test_bind_names_the_command_line(given: str, found: str) -> None:
    with pytest.raises(InputError) as refused:
        bind(Outer, *layered({"name": "x", "inner": {"lr": 1}}, [given]))
    assert str(refused.value).startswith(f"command line: {found}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, 2**63])
def test_python_values_are_held_to_the_same(value: float) -> None:
    with pytest.raises(InputError, match=r"inner\.lr: "):
        bind(Outer, override({"name": "x"}, {"inner.lr": value}))


def test_an_integer_will_do_for_a_float() -> None:
    lr = bind(Inner, parse("lr: 2")).lr
    assert lr == 2 and type(lr) is float


@given(
    st.builds(
        Outer,
        name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        inner=st.builds(
            Inner,
            lr=st.floats(0, exclude_min=True, allow_infinity=False).filter(lambda x: x != 13),
            betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
        ),
        kind=st.sampled_from(["a", "b"]),
        steps=st.none() | st.integers(1, 100),
        flag=st.booleans(),
        free=st.dictionaries(TEXTS, TREES, max_size=3),
        sizes=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(tuple),
        note=st.none() | TEXTS,
    )
)
@settings(max_examples=80)
def test_settings_survive_dump_and_bind(outer: Outer) -> None:
    assert bind(Outer, parse(dump_yaml(to_dict(outer)))) == outer


KEYS = ["name", "inner", "kind", "steps", "flag", "free", "sizes", "note"]


@given(st.dictionaries(st.sampled_from([*KEYS, "x"]), TREES))
@settings(max_examples=100)
def test_any_tree_binds_or_is_refused(tree: dict[str, Any]) -> None:
    try:
        assert isinstance(bind(Outer, tree, "r.yaml"), Outer)
    except InputError as error:
        assert str(error).startswith("r.yaml: ")


@given(st.sampled_from([*KEYS, "inner.lr", "inner.betas", "free.x"]), st.text())
@settings(max_examples=300)
def test_any_override_binds_or_is_refused(key: str, text: str) -> None:
    try:
        assert isinstance(bind(Outer, *layered({"name": "x"}, [f"{key}={text}"])), Outer)
    except InputError as error:
        assert str(error).startswith("command line: ")


def test_describe() -> None:
    keys = {key.name: key for key in describe(Outer)}
    assert list(keys) == ["name", "inner.lr", "inner.betas", "kind", "steps", "flag", "free", "sizes", "note"]
    assert keys["name"].default is None and keys["inner.lr"] == ("inner.lr", "a number above 0", "0.1", "the rate")


def test_settings_need_no_torch() -> None:
    modules = "modelcenter.__main__, modelcenter.train.recipe, modelcenter.parallel.machine"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
