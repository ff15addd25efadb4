"""The mean of the weights of several models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.adapter.config import AdapterConfig
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError
from modelcenter.layers.pick import first_token
from modelcenter.optim.soup import soup

TINY: dict[str, Any] = {"layers": 1, "dim": 16, "heads": 2, "hidden": 32, "positions": 16, "vocab": 300}
NAMES = {0: "no", 1: "yes"}


def made(seed: int, dtype: torch.dtype = torch.float32, model: str = "bert-base-uncased", task: str = "classify",
         **other: Any) -> Any:
    labels = {"id2label": NAMES} if task == "classify" else {}
    return mc.build(model, task=task, seed=seed, dtype=dtype, **{"config": TINY, **labels, **other})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "task"), [("bert-base-uncased", "classify"), ("gpt2", "lm")])
def test_each_weight_is_the_mean(dtype: torch.dtype, model: str, task: str) -> None:
    """Rounded once, however many there are: in 16 bits sums of 16 bits would be further off."""
    models = [made(seed, dtype, model, task) for seed in range(5)]
    means = {name: torch.stack([m.get_parameter(name).double() for m in models]).mean(0) for name in models[0].shapes}
    found = soup(iter(models))
    assert found is models[0] and set(means) == set(found.shapes)
    for name, mean in means.items():
        got = found.get_parameter(name)
        assert got.dtype == dtype and got.requires_grad
        near = 1e-6 if dtype == torch.float32 else 2**-8
        assert torch.allclose(got.double(), mean.to(dtype).double(), rtol=near, atol=1e-9), name
    if dtype == torch.bfloat16:
        wrong = sum(int((found.get_parameter(name) != mean.to(dtype)).sum()) for name, mean in means.items())
        assert wrong < 0.01 * sum(mean.numel() for mean in means.values())
    if task == "lm":
        assert found.head.out.weight is found.embed.tokens.weight


def test_a_mean_is_rounded_once(tmp_path: Path) -> None:
    """Not each part and then their mean, whatever the folders are stored in and whichever comes first."""
    kinds = (torch.bfloat16, torch.float32, torch.float32)
    models = [made(seed, kind) for seed, kind in enumerate(kinds)]
    means = {name: sum(m.get_parameter(name).double() for m in models) / 3 for name in models[0].shapes}
    for folder, model in zip("abc", models, strict=True):
        model.save_pretrained(tmp_path / folder)
    for dtype, near in (("fp32", 1e-6), ("bf16", 2**-8)):
        assert main(["average", *(str(tmp_path / folder) for folder in "abc"), str(tmp_path / dtype), f"dtype={dtype}"]) == 0
        found = mc.load(tmp_path / dtype)
        for name, mean in means.items():
            torch.testing.assert_close(found.get_parameter(name).detach().double(), mean, rtol=near, atol=1e-8, msg=name)


@pytest.mark.parametrize(("other", "words"), [
    ({"model": "gpt2", "task": "classify"}, "family GPT; BERT, as"), ({"task": "mlm"}, "head mlm; classify, as"),
    ({"id2label": {0: "yes", 1: "no"}}, r"labels \('yes', 'no'\); \('no', 'yes'\), as"),
], ids=["family", "head", "labels"])  # fmt: skip
def test_what_has_no_mean_is_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        soup([made(0), made(1), made(2, **other)])


def test_runs_may_differ_in_dropout() -> None:
    """A setting of the training, which no weight depends on; the mean keeps those of the first."""
    first, other = made(0), made(1, config={**TINY, "dropout": 0.3, "head_dropout": 0.5})
    mean = (first.head.out.weight + other.head.out.weight) / 2
    assert soup([first, other]) is first and torch.equal(first.head.out.weight, mean) and first.config.dropout == 0.1


@pytest.mark.parametrize(("models", "words"), [
    ([], "^soup: models: none; one at least$"), (["a folder"], "^soup: models: a str; models, as modelcenter.load gives$"),
], ids=["none", "folder"])  # fmt: skip
def test_what_is_no_model_is_refused(models: list[Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        soup(models)


@pytest.mark.parametrize(("task", "key", "value", "words"), [
    ("lm", "prefix_lm", True, "prefix_lm True; False, as"),
    ("classify", "problem_type", "multi_label_classification", "multi_label_classification; single_label_classification, as"),
], ids=["prefix_lm", "problem_type"])  # fmt: skip
def test_what_is_said_of_equal_shapes_alone_is_refused(tmp_path: Path, task: str, key: str, value: Any, words: str) -> None:
    """Which words a prompt's first one sees, and what a label is, stand in config.json."""
    for seed, folder in enumerate("abc"):
        made(seed, model="gpt2", task=task).save_pretrained(tmp_path / folder)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {key: value}))
    (tmp_path / "c" / "config.json").write_text(json.dumps(config | {"problem_type": "single_label_classification"}))
    a, b, c = (mc.load(tmp_path / folder) for folder in "abc")
    with pytest.raises(InputError, match=words):
        soup([a, b])
    assert soup([a, c]) is a  # the other's says what absence means


def test_a_number_is_what_one_label_means(tmp_path: Path) -> None:
    """Where the file does not say what its one label is, as transformers takes it."""
    for seed, folder in enumerate("ab"):
        made(seed, id2label={0: "score"}).save_pretrained(tmp_path / folder)
        config = json.loads((tmp_path / folder / "config.json").read_text())
        config.pop("problem_type", None)
        said = {"problem_type": "regression"} if folder == "b" else {}
        (tmp_path / folder / "config.json").write_text(json.dumps(config | said))
    for order in ("ab", "ba"):
        first, other = (mc.load(tmp_path / folder) for folder in order)
        assert soup([first, other]) is first


@pytest.mark.parametrize("dense", [0, 1])
def test_vectors_that_are_made_otherwise_have_no_mean(dense: int) -> None:
    """By another pooling, or by dense layers in one of the models alone, whichever comes first."""
    models = [made(seed, task="embed") for seed in range(2)]
    assert soup(models) is models[0]
    models[1].head.pick = first_token
    with pytest.raises(InputError, match="pooling cls; mean, as"):
        soup(models)
    models[1].head.pick = models[0].head.pick
    models[dense].head.dense = torch.nn.Sequential(torch.nn.Linear(16, 8))
    with pytest.raises(InputError, match=r"dense layers .*Linear\(in_features=16, out_features=8"):
        soup(models)


def test_other_words_have_no_mean(tmp_path: Path) -> None:
    """Two runs that trained a tokenizer each, on other texts: their rows are as many, and of other words."""
    for folder, text in (("a", "to be or not to be "), ("b", "to be or not to be "), ("c", "the quick brown fox ")):
        made(0, model="gpt2", task="lm").save_pretrained(tmp_path / folder)
        train_tokenizer([text * 9], 270, "bpe").save(tmp_path / folder)
    a, b, c = (mc.load(tmp_path / folder) for folder in "abc")
    assert soup([a, b]) is a
    with pytest.raises(InputError, match=r"tokenizer\.json: other words than"):
        soup([a, c])


@pytest.mark.parametrize("at", [0, 1])
def test_an_adapter_is_merged_first(at: int) -> None:
    """The mean of two products is not the product of their means."""
    models = [made(0), made(1)]
    models[at].adapter = AdapterConfig(name="lora")
    with pytest.raises(InputError, match="an adapter; modelcenter merge"):
        soup(models)


def test_runs_and_folders_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, folder in enumerate(("a", "b/model", "c")):
        made(seed).save_pretrained(tmp_path / folder)
        train_tokenizer(["some text"] * 9, 300, "roberta").save(tmp_path / folder)
    (tmp_path / "b" / "recipe.yaml").write_text("model: a run's\n")
    a, b, c, out = (str(tmp_path / name) for name in ("a", "b", "c", "out"))
    assert main(["average", a, b, c, out]) == 0 and "the mean of 3 models" in capsys.readouterr().out
    mean, parts = mc.load(out), [mc.load(folder) for folder in (a, f"{b}/model", c)]
    for name in mean.shapes:
        assert torch.allclose(mean.get_parameter(name), sum(p.get_parameter(name) for p in parts) / 3, atol=1e-7), name
    assert mean.config.labels == ("no", "yes") and (tmp_path / "out" / "tokenizer.json").is_file()
    lora = str(tmp_path / "lora")
    mc.add_adapter(mc.load(a), mc.AdapterConfig(name="lora")).save_pretrained(lora)
    for words, said in (([a, lora, "x"], f"{lora}: an adapter; "),
                        ([a, "x"], "command line: MODEL MODEL ... OUT: 2 given; two models, or more, and "),
                        ([a, b, out], "exists"), ([a, b, "x", "dtyp=bf16"], "did you mean 'dtype'")):
        assert main(["average", *words]) == 2
        assert said in capsys.readouterr().err
