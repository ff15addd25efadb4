"""What the pages of docs/ say of this package is there, and what they say is missing is not."""

import re
import shlex
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import transformers

import modelcenter as mc
from modelcenter.__main__ import VERBS
from modelcenter.config import describe
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.parallel.machine import Machine
from modelcenter.registry import families
from modelcenter.train.catalog import listing
from modelcenter.train.recipe import ALIASES, PARTIAL, Recipe, load_recipe

PAGE = Path(__file__).parents[1] / "docs" / "from-modelcenter.md"
SPAN = re.compile(r"`([^`]+)`")
KEYS = {key.name for key in (*describe(Recipe), *describe(Machine, "machine."))}


def section(title: str) -> list[tuple[str, str]]:
    """The rows (theirs, ours) of the tables in a section."""
    text = PAGE.read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `") or line.startswith("| Open")]
    return [(theirs.strip(), ours.strip()) for theirs, ours in rows]


SCRIPTS = "The arguments of their scripts"
MODELS = "Models of transformers"


def ours() -> list[str]:
    titles = "BMTrain", "ModelCenter", SCRIPTS, MODELS, "Trainer"
    return [span for title in titles for _, text in section(title) for span in SPAN.findall(text)]


def test_every_section_has_rows() -> None:
    assert [len(section(title)) > 15 for title in ("BMTrain", "ModelCenter", "Trainer")] == [True] * 3


def test_public_names_are_there() -> None:
    found = {match[1] for span in ours() for match in re.finditer(r"\bmc\.(\w+)", span)}
    assert len(found) > 8
    for name in found:
        assert getattr(mc, name) is not None


def test_commands_are_there() -> None:
    recipes = {row["name"] for row in listing()}
    found = [span.split() for span in ours() if span.startswith("modelcenter ")]
    assert len(found) > 8
    for _, verb, *rest in found:
        assert verb in VERBS
        assert verb != "train" or not rest or rest[0] in recipes


def test_calls_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of the page is made, with what stands for its names."""
    monkeypatch.chdir(tmp_path)
    small = {"layers": 1, "dim": 64, "heads": 2, "vocab": 40, "positions": 32}
    model = mc.build("gpt2", config=small)
    model.save_pretrained("folder")
    mc.build("bert-base-uncased", config={**small, "hidden": 128}).save_pretrained("bert-base-uncased")
    open_tokenizer("char", ["a text"]).save("folder")
    names = {"mc": mc, "model": model, "name": "folder", "machine": mc.Machine(threads=1), "ids": torch.arange(4)[None]}
    found = [span for span in ours() if re.match(r"(mc|model|sum)\b.*[(.]", span) and not re.fullmatch(r"mc\.\w+", span)]
    assert len(found) > 14
    for span in found:
        eval(span, dict(names))  # noqa: S307  # what a reader would paste


def test_recipes_take_the_settings(tmp_path: Path) -> None:
    found = [shlex.split(span)[2:] for span in ours() if span.startswith("modelcenter train ") and " " in span[18:]]
    assert len(found) > 2
    for recipe, *settings in found:
        load_recipe(recipe, ["data.path=DATA", "data.eval_path=HELD", f"output_dir={tmp_path}", *settings])


def test_keys_are_there() -> None:
    dotted = {key.partition("=")[0] for span in ours() for key in [span.split()[0]] if re.fullmatch(r"[a-z_]+\.[a-z_]+(=.*)?", key)}
    dotted = {key for key in dotted if not key.startswith(("mc.", "model.", "modelcenter."))}
    assert len(dotted) > 20 and dotted <= KEYS


def test_every_argument_of_their_scripts_has_a_key() -> None:
    """All that their get_args parses, but `--local_rank`, which a launcher sets."""
    arguments = {span for theirs, _ in section(SCRIPTS) for span in SPAN.findall(theirs)}
    assert len(arguments) == 23 and all(argument.startswith("--") for argument in arguments)
    found = {span.partition("=")[0] for _, text in section(SCRIPTS) for span in SPAN.findall(text) if not span.startswith("--")}
    assert {*KEYS, "wsd"} >= found and len(found) > 18


def test_fields_of_a_config_are_there() -> None:
    table = [row for row in section("ModelCenter") if re.fullmatch(r"`\w+`", row[1]) and not row[1].startswith("`mc.")]
    known = {f.name for family in families().values() for f in fields(family.Config)}  # type: ignore[arg-type]
    assert len(table) > 10 and {row[1].strip("`") for row in table} <= known


def test_what_is_missing_is_missing() -> None:
    missing = next(theirs for theirs, text in section("ModelCenter") if "`Roberta`" in theirs)
    kinds = {family.__name__.lower() for family in families().values()}
    for name in SPAN.findall(missing):
        assert name.lower() not in kinds and not hasattr(mc, name), f"{name} is there: say so"


def test_the_table_of_aliases_is_whole() -> None:
    told = {alias: SPAN.findall(text) for theirs, text in section("Trainer") for alias in SPAN.findall(theirs)}
    assert set(told) == {*ALIASES, *PARTIAL}
    assert all(key in told[alias] for alias, key in ALIASES.items())


def test_a_model_trains_in_trainer_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = PAGE.read_text("utf-8").split("## Trainer")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    model = mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 40, "positions": 16})
    before = model.embed.tokens.weight.clone()
    ids = torch.arange(16) % 7
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        exec(code.replace("max_steps=3", "max_steps=3, use_cpu=True, disable_tqdm=True"), {  # noqa: S102  # what a reader would paste
            "torch": torch, "transformers": transformers, "model": model, "examples": [{"input_ids": ids, "labels": ids}] * 8})
    found = mc.load("out").embed.tokens.weight
    assert torch.equal(found, model.embed.tokens.weight) and not torch.equal(found, before)


def test_what_is_spelled_alike_is() -> None:
    text = PAGE.read_text("utf-8").split("## Trainer")[1].split("are spelled alike")[0]
    alike = SPAN.findall(text)
    arguments = {f.name for f in fields(transformers.TrainingArguments)}
    assert len(alike) > 6 and set(alike) <= KEYS and set(alike) <= arguments


def test_names_of_trainer_are_trainers() -> None:
    arguments = {f.name for f in fields(transformers.TrainingArguments)}
    scripts = {"model_name_or_path", "tokenizer_name", "train_file", "validation_file", "max_seq_length", "packing"}
    older = {"group_by_length", "warmup_ratio"}  # gone, or going, from transformers 5
    assert {*ALIASES, *PARTIAL} - scripts - older <= arguments


def test_the_chinese_readme_has_the_same_commands_and_as_many_figures() -> None:
    def told(name: str) -> tuple[list[str], list[int]]:
        text = (PAGE.parents[1] / name).read_text()
        commands = [line.partition(" #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
        tables = [len(block.splitlines()) for block in re.findall(r"(?:^\|.*\n)+", text, re.M)]
        return commands, tables

    assert told("README-zh.md") == told("README.md")
