"""The packaged recipes as text: each binds, says why it differs from the defaults, and is copied out with every key."""

import re
from pathlib import Path

import pytest

from modelcenter.__main__ import main
from modelcenter.config import bind, describe, find, names, packaged, read_recipe
from modelcenter.data.objective import COMMON, find_objective
from modelcenter.errors import InputError, MissingError, message
from modelcenter.metrics.suites import SUITES
from modelcenter.parallel.machine import Machine, load_machine
from modelcenter.train.catalog import LINE, commented, listing, reasons, value_at
from modelcenter.train.read import load_recipe, open_recipe
from modelcenter.train.recipe import Recipe

NAMES = [row["name"] for row in listing()]
DATA = ["data.path=a.txt", "data.eval_path=b.txt"]
FILES = [f"{name}.yaml" for name in names(packaged())] + [f"machines/{name}.yaml" for name in names(packaged("machines"))]


def test_packaged() -> None:
    assert names(packaged()) == [
        "classify", "classify-zh", "embed", "finetune", "glue", "instruct", "lora", "mlm", "pretrain", "pretrain-bert",
        "pretrain-cpm", "pretrain-t5", "qlora", "seq2seq", "squad", "summarize", "superglue", "tag", "translate",
    ]  # fmt: skip
    assert names(packaged("machines")) == ["auto", "cpu", "gpu11", "gpu24", "gpu80", "node8"]
    assert load_machine("cpu") == Machine(device="cpu") and load_machine("gpu80") == Machine(device="cuda")
    assert load_machine("gpu11") == load_machine("gpu24") == Machine(device="cuda", recompute=True)
    assert load_machine("node8") == Machine(device="cuda", fsdp=8)


@pytest.mark.parametrize("name", NAMES)
def test_binds(name: str) -> None:
    recipe = load_recipe(name, DATA)
    assert recipe.output_dir == f"runs/{name}" and recipe.resume == "auto" and recipe.save_steps and recipe.save_total_limit
    given = "datasets:" in str(open_recipe(name)[1].get("data"))
    if given:
        assert load_recipe(name).data.eval_path is not None
    else:
        with pytest.raises(InputError, match=r"data\.path: missing|data\.eval_path: missing, and best"):
            load_recipe(name)


@pytest.mark.parametrize("name", [name for name in NAMES if "datasets:" in str(open_recipe(name)[1].get("data"))])
@pytest.mark.parametrize("key", ["data.path", "train_file"])
def test_data_of_ones_own_is_not_judged_on_the_recipes(name: str, key: str) -> None:
    recipe = load_recipe(name, [f"{key}=a.txt", "data.eval_path=b.txt"])
    assert (recipe.data.path, recipe.data.eval_path) == ("a.txt", "b.txt")
    if recipe.best:
        with pytest.raises(InputError, match=r"data\.eval_path: missing, and best .* asks for an evaluation; data\.eval_path=FILE"):
            load_recipe(name, [f"{key}=a.txt"])
    assert load_recipe(name, [f"{key}=a.txt", "best=null"]).data.eval_path is None
    assert load_recipe(name, ["data.eval_path=b.txt"]).data.path == load_recipe(name).data.path


@pytest.mark.parametrize("file", FILES)
def test_a_packaged_file_says_only_what_differs_and_why(file: str) -> None:
    """Every line is a comment, a section or a setting with its reason; what repeats a default has none."""
    path = Path(str(packaged() / file))
    keys = {key.name: key for key in describe(Machine if "machines" in file else Recipe)}
    tree, why = read_recipe(path), reasons(path)
    text, _, variants = path.read_text().partition("variants:\n")
    lines = text.splitlines()
    assert lines[0].startswith("# ") and not any(line.lstrip().startswith("#") for line in lines[1:])
    for line in lines[1:]:
        match = LINE.fullmatch(line)
        assert match and (match[3] or line.endswith(":")), f"no reason: {line}"
    defaults = {name: key.default for name, key in keys.items()}
    for name in why:
        if not name.startswith("variants."):
            assert name in keys, f"{name} is no key"
            assert value_at(tree, name) != bound(defaults[name]), f"{name} is at its default"
    assert all(f"variants.{variant}" in why for variant in tree.get("variants", {})) and bool(variants) == ("variants" in tree)


def bound(default: str | None) -> object:
    from modelcenter.config import parse

    return None if default is None else parse(default)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_every_key_and_means_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["copy", name]) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == f"{name.replace('/', '-')}.yaml"
    assert load_recipe(file, DATA) == load_recipe(name, DATA)
    keys = {key.name: key for key in describe(Recipe)}
    section, seen = "", []
    for line in file.read_text().splitlines():
        if line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"( *)(\w+):(?: .*? *# (.*))?", line)
        assert match, line
        indent, key, comment = match.groups()
        section = section if indent else ""
        if comment is None:
            section = f"{key}."
            continue
        known = keys[section + key]
        default = "required" if known.default is None else f"default {known.default}"
        assert comment == f"{known.help} ({known.type}; {default})"
        seen.append(known.name)
    read = {*COMMON, *find_objective(load_recipe(file, DATA).objective).keys}
    assert seen == [key for key in keys if not key.startswith("data.") or key.removeprefix("data.") in read]


def test_a_copy_says_why(tmp_path: Path) -> None:
    text = commented("lora")
    assert text.startswith("# Train an adapter")
    assert "  # Hu et al., 2021" in text and text.index("Hu et al.") < text.index("  lr: 0.0002 ") < text.index("  betas:")
    head = commented("glue/rte").splitlines()[:2]
    assert head[0].startswith("# GLUE's tasks") and head[1].startswith("# GLUE's RTE")


def test_a_recipe_of_ones_own_with_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("mine.yaml")
    base = "model: m\noutput_dir: o\nmax_steps: 5\ndata: {path: a, seq_len: 9}\n"
    file.write_text(f"{base}variants: {{x: {{data: {{seq_len: 8}}}}, y: {{}}}}\n")
    x = load_recipe(f"{file}/x", ["max_steps=6"])
    assert (x.data.path, x.data.seq_len, x.max_steps) == ("a", 8, 6) and load_recipe(f"{file}/y").data.seq_len == 9
    with pytest.raises(InputError, match=f"^{file}: several recipes; one of {file}/x, {file}/y$"):
        load_recipe(file)
    file.write_text(f"{base}variants: [x]\n")
    with pytest.raises(InputError, match="variants: not a mapping of mappings"):
        load_recipe(file)


@pytest.mark.parametrize(("name", "found"), [
    ("glue", "glue: several recipes; one of glue/cola, glue/sst2"),
    ("glue/rtee", "glue/rtee: no such recipe; did you mean 'glue/rte'?"),
    ("finetune/rte", "finetune/rte: no such recipe; finetune has none"),
    ("glu/rte", "glu/rte: no such file"),
    ("qa", "qa: no such recipe but an objective; recipes that have it: squad/v1, squad/v2"),
    ("regress", "regress: no such recipe but an objective; recipes that have it: glue/stsb"),
    ("fim", "fim: no such recipe but an objective; objective=fim goes with another recipe"),
])  # fmt: skip
def test_variants_are_checked(name: str, found: str) -> None:
    with pytest.raises(InputError) as refused:
        load_recipe(name, DATA)
    assert str(refused.value).startswith(found)
    if name != "glue":
        assert isinstance(refused.value, MissingError)


@pytest.mark.parametrize("name", [name for name in NAMES if name.split("/")[0] in SUITES])
def test_a_task_is_judged_as_its_benchmark_does(name: str) -> None:
    suite, _, task = name.partition("/")
    recipe = load_recipe(name, DATA)
    assert {*find_objective(recipe.objective).metrics, *recipe.metrics} >= set(SUITES[suite][task])
    assert recipe.best in SUITES[suite][task]


def test_every_task_of_glue_is_there() -> None:
    assert {name.partition("/")[2] for name in NAMES if name.startswith("glue/")} == set(SUITES["glue"])


def test_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES and all(len(line.split()) > 3 for line in lines)
    for row in listing():  # what a line tells one to type is this recipe
        for word in re.findall(r"modelcenter train (\S+)", row["what"]):
            assert word == row["name"]


def test_bind_knows_no_variants() -> None:
    with pytest.raises(InputError, match="variants: unknown key"):
        bind(Recipe, read_recipe(find("glue", "recipe", packaged())))


def test_a_long_remedy_ends_with_a_word() -> None:
    """Of two remedies that do not fit one line the first words; of a word that does not, its letters."""
    assert message(None, "x", "odd", f"known: {', '.join(['recipe'] * 40)}").endswith("recipe, recipe, ...")
    assert message(None, "x", "odd", "y" * 400) == f"x: odd; {'y' * 146} ..."
    assert message(None, "x", "odd", "y" * 150) == f"x: odd; {'y' * 150}"
