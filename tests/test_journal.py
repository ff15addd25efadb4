"""What a run leaves for other people: environment.json, summary.md, loss.png."""

import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelcenter.__main__ import main
from modelcenter.config import dump_yaml, read_recipe, to_dict
from modelcenter.errors import InputError, MissingError
from modelcenter.parallel.machine import Machine
from modelcenter.train import environment, loop, session
from modelcenter.train.environment import check_data, commit, describe_data, paths, read_processes, redacted, write_processes
from modelcenter.train.journal import Journal
from modelcenter.train.plot import keys, plot_loss, runs
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.summary import compare, summarise

MACHINE = Machine(device="cpu", threads=1)


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    """4 steps of a tiny GPT."""
    (folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    (folder / "base.yaml").write_text("{}\n")
    return load_recipe(folder / "base.yaml", {
        "model": "gpt2", "init": "random", "config": {"layers": 1, "dim": 16, "heads": 2, "positions": 32}, "tokenizer": "char",
        "data.path": str(folder / "text.txt"), "data.seq_len": 16, "data.eval_fraction": 0.2, "batch": 4, "precision": "fp32",
        "max_steps": 4, "logging_steps": 2, "eval_steps": 2, "save_steps": 2, "output_dir": str(folder / "out"), **changes,
    })  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    loop.train(recipe_of(folder), MACHINE)
    return folder / "out"


def code(text: str, kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    return str(found)


def test_a_summary_says_what_a_colleague_asks(whole: Path) -> None:
    text = (whole / "summary.md").read_text()
    start = f"# out\n\n`gpt2` trained from random weights on `{whole.parent}/text.txt`, objective lm: finished, step 4 of 4."
    assert text.startswith(start)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()[1:]]
    last = [row for row in rows if "eval_loss" in row][-1]
    assert f"| loss, evaluation | {rows[1]['eval_loss']:.6g} | {last['eval_loss']:.6g} | " in text
    assert f"| {4 * 4 * 16:,} tokens in " in text and "| 4 sequences of at most 16 tokens; adamw, linear from 5e-05 |" in text
    assert "![curves](loss.png)" in text and (whole / "loss.png").is_file()
    assert f"| data `{whole.parent}/text.txt` | {24 * 60:,} bytes in 1 file |" in text
    assert f"modelcenter train {whole}/recipe.yaml" in text


def test_what_a_summary_tells_to_type_works(whole: Path) -> None:
    """Its Python opens the model, in this package and in transformers; its commands are the verbs'."""
    text, space = (whole / "summary.md").read_text(), dict[str, Any]()
    exec(code(text, "python"), space)  # noqa: S102  # what we have just written
    assert type(space["model"]).__name__ == "GPT2LMHeadModel" and space["tokenizer"]("cat")["input_ids"]
    from modelcenter.__main__ import main

    for command in code(text, "").strip().splitlines():
        words = command.partition("    #")[0].replace('"..."', "cat").split()[1:]
        assert main(words) == 0


def test_an_evaluation_needs_data(whole: Path) -> None:
    from modelcenter.config import read_recipe
    from modelcenter.train.summary import usage

    recipe = dict(read_recipe(whole / "recipe.yaml"))
    assert f"modelcenter evaluate {whole}\n" in usage(whole, recipe)
    spaced = whole.rename(whole.with_name("a run"))
    commands = [line for line in usage(spaced, recipe).splitlines() if line.startswith("modelcenter ")]
    spaced.rename(whole)
    assert commands and all(shlex.split(line)[2].startswith(str(spaced)) for line in commands)
    alone = {**recipe, "data": {**recipe["data"], "eval_fraction": 0.0}}
    assert f"modelcenter evaluate {whole} data.eval_path=FILE\n" in usage(whole, alone)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
def test_an_adapter_is_opened_by_peft(whole: Path, tmp_path: Path) -> None:
    changes = {"model": str(whole / "model"), "tokenizer": None, "init": "pretrained", "config": {}, "adapter.name": "lora"}
    loop.train(recipe_of(tmp_path, **changes), MACHINE)
    text, space = (tmp_path / "out" / "summary.md").read_text(), dict[str, Any]()
    assert "trained by lora of rank 8 from pretrained weights" in text and "modelcenter merge" in text
    exec(code(text, "python"), space)  # noqa: S102  # what we have just written
    assert type(space["model"]).__name__ == "PeftModelForCausalLM" and space["tokenizer"]("cat")["input_ids"]


def test_interruptions_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed, went on and was left without an end, went on again; and an update that was left out."""
    real, count = session.update, [0]

    def update(model: Any, optimizer: Any, loss: float, *rest: Any) -> float:
        count[0] += 1
        if count[0] == 4:
            raise InputError("the disk is on fire")
        return real(model, optimizer, math.nan if count[0] == 1 else loss, *rest)

    monkeypatch.setattr(session, "update", update)
    with pytest.raises(InputError, match="on fire"):
        loop.train(recipe_of(tmp_path), MACHINE)
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "failed: InputError: the disk is on fire, step 2 of 4" in text and "There is no model yet." in text
    journal = Journal(tmp_path / "out", recipe_of(tmp_path))  # of a process that is then killed
    journal.begin({"steps": 4}, 2, print)
    journal.note("step 3: something odd")
    assert loop.train(recipe_of(tmp_path), MACHINE).step == 4
    first, second, third = read_processes(tmp_path / "out")
    assert first["run"] == second["run"] == third["run"] and [p["from_step"] for p in (first, second, third)] == [0, 2, 2]
    text = (tmp_path / "out" / "summary.md").read_text()
    happened = text.partition("## What happened\n\n")[2].splitlines()
    assert re.fullmatch(r"- \S+: began on \S+, failed: InputError: the disk is on fire \S+", happened[0])
    assert "resumed after step 2" in happened[1] and "no end was written: killed, or still running" in happened[1]
    assert happened[2] == "- step 3: something odd" and "finished" in happened[3]
    assert happened[4] == "- steps 1 to 2: 1 without an update, the gradient was not finite"
    before = (tmp_path / "out" / "environment.json").read_bytes()
    loop.train(recipe_of(tmp_path), MACHINE)  # it is finished
    assert (tmp_path / "out" / "environment.json").read_bytes() == before


def test_a_run_that_was_killed_behind_its_last_state_is_told_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is left to the process that then writes its model, but all that is told of it."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "write_model", lambda *rest: os._exit(9))
        run = multiprocessing.get_context("fork").Process(target=loop.train, args=(recipe_of(tmp_path), MACHINE))
        run.start()
        run.join(100)
    out = tmp_path / "out"
    assert run.exitcode == 9 and (out / "step-4").is_dir() and not (out / "model").exists()
    loop.train(recipe_of(tmp_path), MACHINE)
    assert "finished, step 4 of 4." in (out / "summary.md").read_text() and len(read_processes(out)) == 2


@pytest.mark.parametrize("text", ["{", "[3]", "[{}]", '[{"data": 3, "started": 1}]'])
def test_an_environment_that_says_nothing_ends_no_run(text: str, tmp_path: Path, whole: Path) -> None:
    """Which somebody else has written there."""
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out" / environment.FILE).write_text(text)
    for state in ("step-4", "model"):
        shutil.rmtree(tmp_path / "out" / state)
    loop.train(recipe_of(tmp_path, **{"data.path": str(whole.parent / "text.txt")}), MACHINE)
    assert "finished, step 4 of 4." in (tmp_path / "out" / "summary.md").read_text()


def test_a_refused_run_leaves_no_journal(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        loop.train(recipe_of(tmp_path, **{"data.seq_len": 64}), MACHINE)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(environment, "atomic_write", full)
    said: list[str] = []
    with Journal(tmp_path, recipe_of(tmp_path)) as journal:
        journal.begin({"steps": 4}, 0, said.append)
        journal.end(4, "finished")
    assert said[0] == "environment.json: not written: [Errno 28] No space left on device" and "summary.md: not written" in said[-1]


def test_a_folder_that_was_removed_beneath_its_run_is_taken_for_no_other(tmp_path: Path) -> None:
    """A name that is typed may be meant for one that is there; a run knows its own."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "recipe.yaml").write_text("model: gpt2\n")
    with pytest.raises(MissingError, match=r"gone: no recipe\.yaml; the output folder of a run$"):
        summarise(tmp_path / "gone")
    with pytest.raises(MissingError, match=r"gone: no such folder; of the runs in .*: known: first$"):
        compare([tmp_path / "gone"])


def test_a_silent_journal_writes_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    before = sorted(tmp_path.iterdir())
    with Journal(tmp_path, recipe, silent=True) as journal:
        journal.begin({"steps": 4}, 0, print)
        journal.note("a")
        journal.end(4, "finished")
    assert sorted(tmp_path.iterdir()) == before


# --------------------------------------------------------------------------------------------------------- environment


def test_the_environment_is_written(whole: Path) -> None:
    (process,) = read_processes(whole)
    assert torch.__version__.startswith(process["packages"]["torch"])
    assert process["device"] == "cpu" and process["how"] == "finished"
    assert process["command"] == sys.argv and (process["from_step"], process["to_step"]) == (0, 4)
    (data,) = process["data"].values()
    assert data["bytes"] == 24 * 60 and len(data["sha256_of_contents"]) == 64 and data["list"][0]["name"].endswith("text.txt")


SECRETS = {"HF_TOKEN": "hf_canaryAAAA1", "WANDB_API_KEY": "canaryBBBB2", "AWS_SECRET_ACCESS_KEY": "canary/CC\\CC3",
           "DB_PASSWORD": "canaryDDDD4"}  # fmt: skip
OTHERS = {"UNRELATED": "canaryEEEE5"}


def test_no_secret_reaches_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries in the environment, and one of them on the command line; the whole run, TensorBoard besides."""
    (tmp_path / "r.yaml").write_text(dump_yaml(to_dict(recipe_of(tmp_path))))
    command = ["train", str(tmp_path / "r.yaml"), "report_to=[tensorboard]", f"output_dir={tmp_path}/with-{SECRETS['HF_TOKEN']}"]
    for name, value in {**SECRETS, **OTHERS}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["modelcenter", *command])
    assert main(command) == 0
    (out,) = tmp_path.glob("with-*")
    files = [f for f in out.rglob("*") if f.is_file()]
    assert len(files) > 10 and any("tfevents" in f.name for f in files)
    for file in files:
        text = file.read_bytes()
        for name, value in {**SECRETS, **OTHERS}.items():
            if (file.name, name) != ("recipe.yaml", "HF_TOKEN"):  # there the user has put it himself, as a folder's name
                assert value.encode() not in text and json.dumps(value)[1:-1].encode() not in text, (file, name)
    assert "$HF_TOKEN" in (out / "environment.json").read_text()


def test_redaction(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MY_TOKEN", "1")  # too short to be one
    assert redacted(json.dumps(["a", "canary/CC\\CC3", "1"])) == '["a", "$AWS_SECRET_ACCESS_KEY", "1"]'
    assert redacted("https://me:pw@host/x canaryBBBB2") == "https://***@host/x $WANDB_API_KEY"


def test_digits_of_a_secret_leave_a_file_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_TOKENS", "100000")
    told = {"started": "today", "from_step": 0, "data": {"x": {"bytes": 1000000}}, "command": ["train", "max_steps=100000"]}
    write_processes(tmp_path, [told])
    (found,) = read_processes(tmp_path)
    assert found["data"]["x"]["bytes"] == 1000000 and found["command"][1] == "max_steps=$MAX_TOKENS"


def test_data_are_compared_where_their_path_has_a_secret_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be none: the names of many variables look as if."""
    (place := tmp_path / "shelf7").mkdir()
    monkeypatch.setenv("GIT_AUTHOR_NAME", "shelf7")
    data = replace(recipe_of(place).data, eval_path=None)
    write_processes(tmp_path, [{"started": "today", "from_step": 0, "data": {data.path: describe_data(str(data.path), data)}}])
    assert "shelf7" not in (tmp_path / environment.FILE).read_text()
    check_data(tmp_path, data)
    shutil.copytree(place, tmp_path / "there")
    assert environment.same_bytes(tmp_path, str(data.path), str(tmp_path / "there" / "text.txt"), data)
    (place / "text.txt").write_text("another text")
    with pytest.raises(InputError, match=r"shelf7/text.txt: data: not what it was when the run began"):
        check_data(tmp_path, data)


def test_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the folder that one stands in; -dirty; no program that the repository's configuration names is run; None elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None
    run = lambda *a: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *a], check=True, capture_output=True)  # noqa: E731
    run("init", "-q")
    (tmp_path / "a").write_text("1")
    run("add", "a")
    run("commit", "-q", "-m", "a")
    (tmp_path / "hook").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "hook").chmod(0o755)
    run("config", "core.fsmonitor", str(tmp_path / "hook"))
    found = commit()
    assert found is not None and re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "a").write_text("2")
    assert commit() == f"{found}-dirty" and not (tmp_path / "ran").exists()
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_data_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    assert paths(recipe.data) == [str(tmp_path / "text.txt")]
    (tmp_path / "more").mkdir()
    for name in "ab":
        (tmp_path / "more" / f"{name}.txt").write_text(name * 10)
    folder = str(tmp_path / "more")
    first = describe_data(folder, recipe.data)
    assert (first["files"], first["bytes"], len(first["list"])) == (2, 20, 2)
    (tmp_path / "more" / "a.txt").write_text("c" * 10)
    assert describe_data(folder, recipe.data)["sha256_of_contents"] != first["sha256_of_contents"]
    monkeypatch.setattr(environment, "HASHED", 19)
    second = describe_data(folder, recipe.data)
    os.utime(tmp_path / "more" / "a.txt", (1, 1))
    third = describe_data(folder, recipe.data)
    assert second["sha256_of_names_sizes_times"] != third["sha256_of_names_sizes_times"] and "sha256_of_contents" not in third
    assert describe_data("datasets:org/name:train", recipe.data) == {"name": "org/name:train"}


# --------------------------------------------------------------------------------------------------------------- curves

SAME = {"lr": 1e-3, "tokens": 5, "tokens_per_second": 9.0, "memory_gb": 1.0}
ROWS = [{"step": 1, "loss": 3.0, **SAME, "grad_norm": 1.0, "skipped": 0}, {"step": 2, "loss": None, **SAME, "grad_norm": None},
        {"step": 2, "eval_loss": 2.5, "eval_targets": 9, "eval_accuracy": 0.5, "best_eval_loss": 2.5, "best_step": 2},
        {"step": 3, "loss": 2.0, **SAME, "grad_norm": 1.0, "skipped": 1}]  # fmt: skip


def test_what_is_drawn() -> None:
    assert keys(ROWS) == ["eval_accuracy", "lr", "tokens_per_second", "grad_norm"]
    assert runs(ROWS, "loss") == [[(1, 3.0)], [(3, 2.0)]]  # a gap, and no line through it
    assert keys([]) == [] and runs([], "loss") == []


@pytest.mark.parametrize("rows", [ROWS, [{**SAME, "step": 1, "loss": 0.0, "grad_norm": 0.0}], [], [{"environment": {}}]])
def test_it_is_drawn(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_loss(tmp_path) == f"loss.png: {tmp_path / 'loss.png'}"
    named = tmp_path.rename(tmp_path.with_name("a run 输出"))  # letters that the font lacks are nobody's concern
    assert plot_loss(named) == f"loss.png: {named / 'loss.png'}"
    named = named.rename(tmp_path.with_name("lr$_$batch"))  # which is no formula
    assert plot_loss(named) == f"loss.png: {named / 'loss.png'}"
    named.rename(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_runs_are_compared(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.train(recipe_of(tmp_path, **{"optimizer.lr": 1e-2, "data.path": str(whole.parent / "text.txt")}), MACHINE)
    text, rows = compare([whole, tmp_path / "out"])
    assert list(rows[0])[:2] == ["run", "optimizer.lr"] and [row["optimizer.lr"] for row in rows] == [5e-5, 1e-2]
    assert rows[0]["eval_loss"] > rows[1]["eval_loss"] and text.splitlines()[1].split() == ["optimizer.lr", "5e-05", "0.01"]
    from modelcenter.__main__ import main

    shutil.copytree(tmp_path / "out", tmp_path / "adapted")
    recipe: Any = read_recipe(tmp_path / "out" / "recipe.yaml")
    recipe["adapter"] |= {"name": "lora", "rank": 4}
    (tmp_path / "adapted" / "recipe.yaml").write_text(dump_yaml(recipe))
    said = [line.split() for line in compare([tmp_path / "out", tmp_path / "adapted"])[0].splitlines()]
    assert said[1:4] == [["adapter.name", "none", "lora"], ["adapter.rank", "-", "4"], ["adapter.alpha", "-", "16"]]

    assert main(["compare", str(whole), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == text + "\n"
    at = max(int(path.name[5:]) for path in whole.glob("step-*"))
    for other, said in ((tmp_path, "no recipe.yaml; the output folder of a run"),
                        (whole / "step-1", "no such training state; step-"),
                        (whole / f"step-{at}", f"no recipe.yaml; {whole}, the run of this state")):
        assert main(["compare", str(whole), str(other)]) == 2
        assert said in capsys.readouterr().err
    assert summarise(whole) == (whole / "summary.md").read_text()
