"""What the pages of docs/ say of this package is there, and what they say is missing is not."""

import re
import shlex
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import stub
import torch
import transformers
from test_house import FLOORS

import modelcenter as mc
from modelcenter.__main__ import VERBS
from modelcenter.config import describe
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.parallel.machine import Machine, load_machine
from modelcenter.registry import families
from modelcenter.theirs import FIELDS
from modelcenter.train.catalog import listing
from modelcenter.train.launch import check_ranks
from modelcenter.train.read import ALIASES, PARTIAL, load_recipe
from modelcenter.train.recipe import Recipe

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
        given = {setting.partition("=")[0] for setting in settings}
        rest = {"data.path": "DATA", "data.eval_path": "HELD", "output_dir": str(tmp_path)}
        load_recipe(recipe, [*settings, *(f"{key}={value}" for key, value in rest.items() if key not in given)])


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
    for theirs, text in section(SCRIPTS):
        for argument in SPAN.findall(theirs):
            key = argument[2:].replace("-", "_")
            if key not in {*KEYS, *ALIASES, *PARTIAL}:
                with pytest.raises(mc.InputError) as refused:
                    load_recipe("finetune", [f"{key}=1"])
                told = [span.partition("=")[0] for span in SPAN.findall(text)]
                assert any(name in str(refused.value).partition("; ")[2] for name in told), argument


def test_fields_of_a_config_are_there() -> None:
    table = [row for row in section("ModelCenter") if re.fullmatch(r"`\w+`", row[1]) and not row[1].startswith("`mc.")]
    known = {f.name for family in families().values() for f in fields(family.Config)}  # type: ignore[arg-type]
    assert len(table) > 10 and {row[1].strip("`") for row in table} <= known
    assert {name: ours.strip("`") for names, ours in table for name in SPAN.findall(names)} == FIELDS


def test_what_is_missing_is_missing() -> None:
    missing = next(theirs for theirs, text in section("ModelCenter") if "`Roberta`" in theirs)
    kinds = {family.__name__.lower() for family in families().values()}
    for name in SPAN.findall(missing):
        assert name.lower() not in kinds and not hasattr(mc, name), f"{name} is there: say so"


def test_the_table_of_aliases_is_whole() -> None:
    told = {alias: SPAN.findall(text) for theirs, text in section("Trainer") for alias in SPAN.findall(theirs)}
    assert set(told) == {*ALIASES, *PARTIAL}
    assert all(key in told[alias] for alias, key in ALIASES.items())


def test_the_loop_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head learns which token stands in every place, and no weight of BERT is without a part in it."""
    code = PAGE.read_text("utf-8").split("## A loop of your own")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    small = {"layers": 1, "dim": 32, "heads": 2, "vocab": 40, "positions": 16, "hidden": 64}
    mc.build("bert-base-uncased", config=small, task="backbone").save_pretrained("bert-base-uncased")
    labels = torch.arange(4) % 2
    ids = (labels + 5)[:, None].expand(4, 8)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    names: dict[str, Any] = {"batches": [batch] * 30}
    exec(code.replace("lr=1e-5", "lr=1e-2"), names)  # noqa: S102  # what a reader would paste
    assert names["loss"] < 0.1 and all(p.grad is not None for p in names["model"].parameters())


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


def test_the_chinese_readme_has_the_same_commands_links_and_figures() -> None:
    def told(name: str) -> tuple[list[str], list[int], set[str], list[list[str]]]:
        text = (PAGE.parents[1] / name).read_text()
        commands = [line.partition(" #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
        tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
        links = set(re.findall(r"\]\(([^)\s]+)\)", text)) - {"README.md", "README-zh.md"}
        figures = [sorted(re.findall(r"\d+(?:[.,]\d+)*", line)) for table in tables[2:] for line in table.splitlines()]
        return commands, [table.count("\n") for table in tables], links, figures

    assert told("README-zh.md") == told("README.md")


@pytest.mark.parametrize("name", ["README.md", "README-zh.md"])
def test_the_table_of_families_is_the_registrys(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \| ([\w, ]+) \| ([\w, ]+) \|", (PAGE.parents[1] / name).read_text("utf-8"), re.M)
    told = {kind: {*heads.split(", ")} for *_, kinds, heads in rows for kind in kinds.split(", ")}
    assert told == {kind: set(family.tasks) for kind, family in families().items()}
    assert all(hasattr(mc, family) for first, second, *_ in rows for family in (first, second) if family)


HOUSE = PAGE.parents[1]
PAGES = sorted(page for folder in (".", "docs", "benchmarks", "modelcenter/recipes") for page in (HOUSE / folder).glob("*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(HOUSE))


def anchors(text: str) -> list[str]:
    """Of each heading, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


def test_anchors_are_as_on_github() -> None:
    assert anchors("# `a_b`: c, d's\n\n```\n# no heading\n```\n\n## E/F (g-h)\n") == ["a_b-c-ds", "ef-g-h"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
        if not link.startswith("https://"):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchors(target.read_text("utf-8")).count(anchor) == 1, f"{link}: no heading, or several"


PATHS = re.compile(r"(?<!/)`((?:[\w.-]+/)*[\w*-]+\.(?:py|cpp|cuh?|h|yaml|pyi|toml|md))(?:: ([\w.]+))?[^`\n]*`")
PLACES = [HOUSE / place for place in ("", "modelcenter", "csrc", "modelcenter/models")]
MADE = {"recipe.yaml", "machine.yaml", "summary.md", "my16.yaml", "train.yaml"}  # by a run, or by you


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_what_is_in_them_are_there(page: Path) -> None:
    """`layers/view.py: View`: the file, and in it what is named."""
    for path, name in PATHS.findall(page.read_text("utf-8")):
        if path in MADE or "NAME" in path or "MODEL_TYPE" in path or re.fullmatch(r"(data|model|machine|_C)\.\w+", path):
            continue  # a key (`machine.cuda_graphs`), not a file
        found = [file for place in PLACES for file in place.glob(path)]
        assert found, path
        last = name.split(".")[-1]
        meant = re.compile(rf"\b(def|class) {last}\b|^\s*{last}\b.*=|^#define {last}\b", re.M)
        assert not last or meant.search(found[0].read_text("utf-8")), f"{path}: no {last}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    for file, words in re.findall(r"pytest (?:-m gpu )?(tests/\w+\.py) -k \"?([\w ]+)", page.read_text("utf-8")):
        text = (HOUSE / file).read_text("utf-8")
        for word in {*words.split()} - {"and", "or", "not", "MODEL_TYPE"}:
            assert re.search(rf"def test_\w*{word}|\"{word}|{word}\"|ids=|\b{word}\b", text), f"{file} has no {word}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_keys_are_there(page: Path) -> None:
    """Lines to be typed: the verb, and of those that train the recipe and each key."""
    text = re.sub(r" \\\n\s*", " ", page.read_text("utf-8"))
    recipes = {row["name"] for row in listing()}
    for line in re.findall(r"^    (?:\w+=\S+ )*modelcenter (.+)$", text, re.M):
        verb, *rest = line.partition("  #")[0].replace("[ALL]", "").split()
        assert verb in {*VERBS, "--help"}, line
        if verb == "train" and not re.search(r"[A-Z.=]", rest[0]):
            assert rest[0] in recipes, line
        if verb == "train" and rest[0] in recipes and "node8" in rest:  # which has a sequence for each of its ranks
            settings = [part for part in rest[1:] if "=" in part and not part.startswith("machine.")]
            check_ranks(load_recipe(rest[0], settings), load_machine("node8"))
        if verb in ("train", "plan"):
            keys = {key for part in rest for key, equals, _ in [part.partition("=")] if equals and not part.startswith("-")}
            assert {k for k in keys if not k.startswith(("config.", "generation."))} <= {*KEYS, *ALIASES, *PARTIAL}, line


REFUSE = {
    "load", "build", "parallelize", "load_tokenizer", "add_adapter", "merge_adapter", "AdapterConfig", "Machine", "Recipe",
}  # fmt: skip


def test_public_names_have_docstrings_of_their_own() -> None:
    """Not those that dataclasses write, which are signatures, nor a base class's."""
    for name in stub.names():
        text = getattr(mc, name).__doc__
        assert text and len(text) > 60 and not text.startswith(f"{name}("), name
        assert name not in REFUSE or "Errors: `InputError`" in text, f"{name} does not say what it raises"
    for family in families().values():
        assert family.__doc__ != mc.Model.__doc__ and "defaults" in str(family.Config.__doc__)


BENCHMARKS = HOUSE / "benchmarks"
FIGURE = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?![\w])")


def tables(page: Path) -> list[list[list[str]]]:
    """Each table of a page: its rows without the head, each of its cells."""
    found = re.findall(r"(?:^\|.*\n)+", page.read_text("utf-8"), re.M)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]] for table in found]


def test_figures_of_the_readme_are_those_of_the_pages_that_measure() -> None:
    measured = "\n## Measured\n"
    text = (HOUSE / "README.md").read_text("utf-8").split(measured)[1].split("\n## ")[0]
    recipes = (HOUSE / "modelcenter/recipes/README.md").read_text("utf-8").split(measured)[1]
    ops, glue = [(BENCHMARKS / name).read_text("utf-8") for name in ("README.md", "glue.md")]
    reached, speed = re.findall(r"(?:^\|.*\n)+", text, re.M)
    tasks = re.findall(r"(?:^\|.*\n)+", recipes.split("\n### GLUE's")[1], re.M)[0]
    for table, page in ((reached, recipes), (speed, ops), (tasks, glue)):
        there = set(FIGURE.findall(page.replace(",", "")))
        for row in table.splitlines()[2:]:
            cells = re.sub(r"\| 20\d\d-.*", "", row.strip("|").partition("|")[2])  # neither what it is nor its date
            told = FIGURE.findall(re.sub(r"(?<=\d),(?=\d)", "", cells))
            assert told and not set(told) - there, f"{row}: {set(told) - there}"


def seconds(cell: str) -> float | None:
    match = re.match(r"([\d.]+) (µs|ms)$", cell)
    return float(match[1]) * {"µs": 1, "ms": 1000}[match[2]] if match else None


def test_ratios_of_ops_are_those_of_their_times() -> None:
    rows = [row for table in tables(BENCHMARKS / "README.md") for row in table if len(row) == 10 and seconds(row[3])]
    assert len(rows) > 50
    for _, _, _, mine, eager, compiled, *_, ratio in rows:
        peers = [time for time in (seconds(eager), seconds(compiled)) if time]
        assert abs(min(peers) / (seconds(mine) or 0) - float(ratio)) < 0.03, (mine, eager, compiled, ratio)


def test_plans_are_counted_as_their_points_say() -> None:
    points = [[row for row in table if len(row) >= 10 and row[0] in "124"] for table in tables(BENCHMARKS / "plans.md")]
    counted = [(len(rows), *(sum(abs(float(row[off].rstrip(" %"))) < most for row in rows) for off, most in ((6, 8), (9, 15))))
               for rows in points if rows]  # fmt: skip
    told = next(table for table in tables(BENCHMARKS / "README.md") if table[-1][0] == "all" and len(table[-1]) == 7)
    found = [tuple(int(row[place].split()[0].rstrip(":,")) for place in (2, 4, 5)) for row in told[:-1]]
    assert sorted(counted) == sorted(found)
    assert [sum(column) for column in zip(*found, strict=True)] == [int(told[-1][place].split(":")[0]) for place in (2, 4, 5)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_make_is_asked_for_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (HOUSE / "Makefile").read_text("utf-8"), re.M))
    asked = re.findall(r"(?:`|^    )make ([a-z][a-z -]*[a-z])(?=[` ])", page.read_text("utf-8"), re.M)
    assert {target for words in asked for target in words.split()} <= targets


def test_the_architecture_lists_every_part_and_its_floor() -> None:
    text = (HOUSE / "ARCHITECTURE.md").read_text("utf-8")
    tree = text.split("```")[1].split("\ncsrc/")[0]
    parts = re.findall(r"^  ((?:\w+(?:/|\.py) +)+)", tree, re.M)
    listed = {name.rstrip("/") for names in parts for name in names.split()}
    there = {part.name for part in (HOUSE / "modelcenter").iterdir() if part.suffix == ".py" or (part / "__init__.py").is_file()}
    assert listed - {"recipes"} == there - {"__init__.py"}
    line = next(line for line in text.splitlines() if line.startswith("    errors < "))
    assert [set(floor.split(", ")) for floor in line.strip().split(" < ")] == [set(floor) for floor in FLOORS]
