"""A training state written out as a model: what the run would have written, had it ended there."""

import json
import shutil
from pathlib import Path

import pytest

from modelcenter.__main__ import main

SMALL = ["config.layers=1", "config.dim=16", "config.heads=2", "config.positions=16"]
DATA = ["data.path=a.txt", "data.seq_len=16", "batch=4"]
LONG = ["schedule.name=constant", "schedule.warmup_steps=0", "save_steps=2", "save_total_limit=null", "precision=fp32"]
HERE = ["--machine", "cpu", "machine.threads=1"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 60)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("more", [[], ["ema=0.9"]], ids=["weights", "averages"])
def test_a_state_is_the_model_of_a_run_that_ends_there(here: Path, more: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    pretrain = ["train", "pretrain", "tokenizer=bpe:300", *SMALL, *DATA, *LONG, *HERE, *more]
    for steps in (2, 4):
        assert main([*pretrain, f"max_steps={steps}", "--output-dir", f"run{steps}"]) == 0
    for state, same in (("run4/step-2", "run2/model"), ("run4/step-4", "run4/model")):
        assert main(["convert", state, state.replace("/", "-")]) == 0
        assert files(here / state.replace("/", "-")) == files(here / same)
    assert files(here / "run2/model")["model.safetensors"] != files(here / "run4/model")["model.safetensors"]
    assert main(["convert", "run4/step-2", "half", "--dtype", "bf16", "--max-shard-size", "8KB"]) == 0
    assert len(list((here / "half").glob("model-*.safetensors"))) > 1
    assert main(["generate", "half", "the cat", "max_new_tokens=2"]) == 0


def test_a_state_is_written_out_by_any_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretrain = ["train", "pretrain", "tokenizer=char", *SMALL, *DATA, *LONG, *HERE, f"data.path={here}/a.txt", "max_steps=2"]
    assert main([*[word for word in pretrain if word != DATA[0]], "--output-dir", "run"]) == 0
    (here / "link").symlink_to("run/step-2")
    assert main(["convert", "link", "by-link"]) == 0
    monkeypatch.chdir(here / "run" / "step-2")
    assert main(["convert", ".", "../../by-dot"]) == 0
    assert files(here / "by-link") == files(here / "by-dot") == files(here / "run" / "model")


def test_the_state_of_an_adapter(here: Path) -> None:
    assert main(["train", "pretrain", "tokenizer=char", *SMALL, *DATA, *HERE, "max_steps=1", "--output-dir", "base"]) == 0
    lora = ["train", "lora", "model=base/model", *DATA, *LONG, *HERE]
    assert main([*lora, "max_steps=2", "--output-dir", "run"]) == 0
    assert main(["convert", "run/step-2", "out"]) == 0
    assert files(here / "out") == files(here / "run/model") and "adapter_model.safetensors" in files(here / "out")


def test_the_state_of_ranks_with_a_pair_in_each_forward(here: Path) -> None:
    """A process of its own trains on nothing so, and writes the model all the same."""
    (here / "p.jsonl").write_text("".join(json.dumps({"a": f"the cat {n}", "b": f"a mat {n}"}) + "\n" for n in range(8)))
    pairs = ["objective=contrastive", "data.path=p.jsonl", "data.text_key=a", "data.pair_key=b", "data.eval_fraction=0"]
    pretrain = ["train", "pretrain-bert", "tokenizer=roberta:270", *SMALL, "config.hidden=16", *DATA[1:], *LONG, *HERE, *pairs]
    assert main([*pretrain, "micro_batch=2", "max_steps=2", "--output-dir", "run"]) == 0
    recipe = here / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("micro_batch: 2", "micro_batch: 1"))
    assert main(["convert", "run/step-2", "out"]) == 0
    assert (here / "out" / "model.safetensors").read_bytes() == (here / "run" / "model" / "model.safetensors").read_bytes()


def test_a_run_that_has_not_ended_is_judged_by_its_states(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pretrain = ["train", "pretrain", "tokenizer=char", *SMALL, *DATA, *LONG, *HERE, "data.eval_fraction=0.2", "eval_steps=2"]
    assert main([*pretrain, "max_steps=4", "--output-dir", "run"]) == 0
    rows = [json.loads(line) for line in (here / "run/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    for step, loss in losses.items():
        capfd.readouterr()
        assert main(["evaluate", f"run/step-{step}", *HERE, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert losses[2] != losses[4]
    (here / "b.txt").write_text("the mat sat on a cat. " * 40)  # all of it, as with the run's model
    found = []
    for judged in ("run", "run/step-4"):
        assert main(["evaluate", judged, *HERE, "data.path=b.txt", "--json"]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0]["eval_targets"] == found[1]["eval_targets"]
    shutil.rmtree(here / "run/model")
    go_on = "run/model: not there: the run has not ended; the command that began it goes on; modelcenter convert run/step-4 OUT"
    convert, average = ["convert", "run/model", "out"], ["average", "run", "run", "out"]
    whole = ["generate", "run", "the"], ["convert", "run", "out"], ["merge", "run", "out"]  # by the run's folder
    for asked in (["evaluate", "run"], ["generate", "run/model", "the"], average, convert, *whole):
        assert main(asked) == 2 and go_on in capfd.readouterr().err
    for state in (here / "run").glob("step-*"):
        shutil.rmtree(state)
    assert main(["evaluate", "run"]) == 2 and capfd.readouterr().err.endswith("the command that began it goes on\n")


def test_what_is_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pretrain = ["train", "pretrain", "tokenizer=char", *SMALL, *DATA, *HERE, *LONG]
    assert main([*pretrain, "max_steps=2", "--output-dir", "run"]) == 0
    capfd.readouterr()

    def said(*args: str) -> str:
        assert main(["convert", *args]) == 2
        assert not (here / "out").exists()
        return capfd.readouterr().err

    assert "task: 'mlm'; leave it out" in said("run/step-2", "out", "task=mlm")
    assert "revision: 'main'; leave it out" in said("run/step-2", "out", "revision=main")
    assert "dtype: 'fp12'" in said("run/step-2", "out", "dtype=fp12")
    (here / "a.txt").rename(here / "b.txt")
    assert "data.path" in said("run/step-2", "out")
    (here / "run/recipe.yaml").unlink()
    assert "run/recipe.yaml: missing; the recipe of the run that wrote step-2" in said("run/step-2", "out")
    state = next((here / "run/step-2").glob("model*.safetensors"))
    state.write_bytes(state.read_bytes()[:-1] + b"!")
    assert "run/step-2" in said("run/step-2", "out")
