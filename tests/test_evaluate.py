"""Evaluation of a run's model: bits per byte, texts, the best evaluation kept, and the end for want of a better one."""

import json
import math
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from test_train import MACHINE, TINY, recipe_of, rows

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.cli.evaluate import check_objective
from modelcenter.config import dump_yaml, to_dict
from modelcenter.data.objective import objectives
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.errors import InputError
from modelcenter.metrics.table import METRICS
from modelcenter.train import evaluate
from modelcenter.train.evaluate import stream_bytes
from modelcenter.train.loop import train
from modelcenter.train.metrics import read_rows
from modelcenter.train.recipe import Recipe
from modelcenter.train.state import Position


def told(folder: Path, key: str, values: list[float]) -> Callable[..., dict[str, float]]:
    """An evaluation that says `values` in turn; which is next stands in the run's own metrics, so that a resumed run goes on."""

    def evaluate(*_: Any) -> dict[str, float]:
        seen = sum("eval_loss" in row for row in read_rows(folder / "metrics.jsonl"))
        return {"eval_loss": 9.0, "eval_targets": 1, key: values[seen]}

    return evaluate


@pytest.mark.parametrize(("best", "values", "kept", "last"),
                         [("loss", [3, 1, 2, 1.5, 0], 4, 8), ("perplexity", [3, 4, 2, 2, 2], 6, 10), (None, [3, 1, 2, 2, 0], 8, 8)],
                         ids=["loss", "perplexity", "only-patience"])  # fmt: skip
def test_the_best_is_kept_and_a_run_without_a_better_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], best: str | None, values: list[float],
    kept: int, last: int
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(evaluate, "evaluate", told(out, f"eval_{best or 'loss'}", values))
    recipe = recipe_of(tmp_path, eval_steps=2, save_steps=2, best=best, patience=2)
    run = train(recipe, MACHINE)
    assert (run.step, run.stopped) == (last, False)
    model, state = load_file(out / "model" / "model.safetensors"), load_file(out / f"step-{kept}" / "model.safetensors")
    ours = mc.load(out / "model")
    assert all(torch.equal(ours.get_parameter(name), state[name]) for name in ours.shapes) and model
    evaluations = [r for r in rows(out) if "eval_loss" in r]
    assert [r["best_step"] for r in evaluations][-1] == (kept if best else last - 4)
    assert evaluations[-1][f"best_eval_{best or 'loss'}"] == min(values[: last // 2])
    capsys.readouterr()
    assert train(recipe, MACHINE).step == last and [r for r in rows(out) if "eval_loss" in r] == evaluations
    assert f"step {last} of 20, where patience=2 has ended it: no training is left to do\n" in capsys.readouterr().err
    for step in range(6, last + 1, 2):
        shutil.rmtree(out / f"step-{step}")
    again = train(recipe, MACHINE)
    assert (again.step, again.stopped) == (last, False) and [r for r in rows(out) if "eval_loss" in r] == evaluations
    after = load_file(out / "model" / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in model.items())


def test_evaluations_that_are_not_finite_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of which none is the best; the model is that of the last step."""
    monkeypatch.setattr(evaluate, "evaluate", told(tmp_path / "out", "eval_loss", [math.nan] * 4))
    run = train(recipe_of(tmp_path, eval_steps=2, save_steps=2, best="loss", patience=2), MACHINE)
    assert run.step == 4 and run.metrics["best_step"] is None and (tmp_path / "out" / "model").is_dir()
    assert "step 4: eval_loss is not finite; the run ends\n" in capsys.readouterr().err


def test_of_nothing_there_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of one token, packed: none is predicted, and 0 would read as a result."""
    (tmp_path / "short.jsonl").write_text('{"text": "d"}\n' * 3)
    run = train(recipe_of(tmp_path, **{"data.eval_path": str(tmp_path / "short.jsonl"), "data.packing": True}, max_steps=2,
                          eval_steps=None, best="loss"), MACHINE)  # fmt: skip
    assert run.metrics["eval_targets"] == 0 and run.metrics["best_step"] is None
    assert all(run.metrics[key] is None for key in ("eval_loss", "eval_perplexity"))  # as in metrics.jsonl
    assert "step 2: no targets: nothing in the evaluation data is to be predicted" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "out")]) == 0
    line = capsys.readouterr().out
    assert line.startswith("no targets: ") and "loss nan, targets 0, perplexity nan" in line
    assert main(["evaluate", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["eval_loss"] is None  # NaN is no JSON
    monkeypatch.setattr("modelcenter.train.launch.launch", lambda *_: {"eval_loss": None, "eval_targets": 0})  # as ranks answer
    assert main(["evaluate", str(tmp_path / "out"), "machine.replicate=2", "machine.device=cpu"]) == 0
    assert capsys.readouterr().out == line.partition("\n")[0] + "\nloss nan, targets 0\n"
    model = mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="classify", num_labels=2)
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.full((2,), -100)}
    found = evaluate.evaluate(model, [batch], "classify", ["f1", "mcc"])
    assert found.pop("eval_targets") == 0 and all(map(math.isnan, found.values())) and "eval_f1" in found


def test_a_run_that_ends_early_tells_of_its_last_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand between two rows, and none comes any more."""
    monkeypatch.setattr(evaluate, "evaluate", told(tmp_path / "out", "eval_loss", [1, 2]))
    run = train(recipe_of(tmp_path, eval_steps=2, logging_steps=3, patience=1), MACHINE)
    steps = [row for row in rows(tmp_path / "out") if "loss" in row]
    assert run.step == 4 and [row["step"] for row in steps] == [3, 4] and steps[1]["tokens"] > steps[0]["tokens"]
    assert run.metrics["loss"] == steps[1]["loss"] != steps[0]["loss"]
    assert [row["step"] for row in rows(tmp_path / "out") if "eval_loss" in row] == [2, 4]


def test_a_best_that_is_not_there_is_looked_for_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state of another folder knows a best step, whose model stayed there."""
    monkeypatch.setattr(evaluate, "evaluate", told(tmp_path / "out", "eval_loss", [1, 2, 4, 3, 5]))
    recipe = recipe_of(tmp_path, eval_steps=4, save_steps=4, best="loss")
    train(recipe, MACHINE)
    there = replace(recipe, resume=str(tmp_path / "out" / "step-8"), output_dir=str(tmp_path / "there"))
    monkeypatch.setattr(evaluate, "evaluate", told(tmp_path / "there", "eval_loss", [4, 3, 5]))
    train(there, MACHINE)
    assert "there/model: missing; it held the best model so far, of step 4; the search starts again" in capsys.readouterr().err
    model, state = tmp_path / "there" / "model", load_file(tmp_path / "there" / "step-16" / "model.safetensors")
    assert model.is_dir()
    written = mc.load(model)
    assert all(torch.equal(written.get_parameter(name), state[name]) for name in written.shapes)
    assert [r["best_step"] for r in rows(tmp_path / "there") if "eval_loss" in r] == [12, 16, 16]


def pressed(at: int) -> Callable[..., Any]:
    """`count_targets`, called for each batch; SIGTERM comes in the one of that number."""
    real, calls = evaluate.count_targets, count(1)

    def call(*rest: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest)

    return call


@pytest.mark.parametrize(("step", "patience", "last"), [(4, 4, 10), (14, None, 14)], ids=["between", "last"])
def test_an_evaluation_that_is_given_up_comes_first(
    step: int, patience: int | None, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if it is given up twice, or done and the run killed before it has saved another state: all is as if nobody had asked it
    to end."""
    recipes = []
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        changes = {"best": "loss", "patience": patience, "ema": 0.5, "optimizer.lr": 0.3 if patience else 0.01}
        changes["schedule.name"] = "constant"
        recipes.append(recipe_of(tmp_path / name, eval_steps=2, save_steps=8, max_steps=14, **changes))
    whole, out = tmp_path / "whole" / "out", tmp_path / "parts" / "out"
    assert train(recipes[0], MACHINE).step == last
    batches = 15  # of an evaluation
    for number in ((step // 2 - 1) * batches + 2, 1):
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "count_targets", pressed(number))
            run = train(recipes[1], MACHINE)
        assert (run.stopped, run.step) == (True, step)
        assert [r["step"] for r in rows(out) if "eval_loss" in r] == list(range(2, step, 2))
    for _ in range(2):
        run = train(recipes[1], MACHINE)
        assert (run.stopped, run.step) == (False, last) and rows(out) == rows(whole)
        for file in ("model/model", *(f"step-{last}/{name}" for name in ("model", "ema", "random", "optimizer"))):
            assert (out / f"{file}.safetensors").read_bytes() == (whole / f"{file}.safetensors").read_bytes(), file
        for state in {*out.glob("step-*")} - {out / f"step-{step}"}:
            shutil.rmtree(state)
    if step == last:  # its state says that the evaluation is owed, and stays as it is
        monkeypatch.setattr(evaluate, "count_targets", pressed(1))
        assert not train(recipes[1], MACHINE).stopped, "nothing is evaluated again"
        assert f"parts/out/model, of step {run.metrics['best_step']}\n" in capsys.readouterr().err.rpartition("resumed")[2]


def test_more_is_better_or_less() -> None:
    at = Position()
    judged = [at.judge(value, True) for value in (0.5, 0.5, math.nan, 0.6)]
    assert judged == [True, False, False, True] and (at.best, at.waited) == (0.6, 0)
    at = Position()
    assert [at.judge(value, False) for value in (0.5, 0.6, 0.4, 0.7, math.nan)] == [True, False, True, False, False]
    assert (at.best, at.waited) == (0.4, 2)


def test_bits_per_byte_of_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the nats of every character but the first, over ln 2 and the bytes of the text without it."""
    run = train(recipe_of(tmp_path, max_steps=2, eval_steps=None, save_steps=None), MACHINE)
    text = "def f7(x):\n    return x + 7\n" * 3
    (tmp_path / "eval.txt").write_text(text)
    bits = run.metrics["eval_loss"] / math.log(2)
    assert run.metrics["eval_bits_per_byte"] == pytest.approx(bits, rel=1e-6)  # ASCII: a byte a token
    model, tokenizer = mc.load(tmp_path / "out" / "model"), mc.load_tokenizer(tmp_path / "out" / "model")
    ids = torch.tensor([tokenizer.encode(text)])
    nats = 0.0
    for start in range(0, ids.size(1) - 1, 15):
        nats += float(model(ids[:, start : start + 16], labels=ids[:, start : start + 16], num_items_in_batch=1).loss.detach())
    given = [f"data.path={tmp_path / 'eval.txt'}", "data.seq_len=16", "precision=fp32"]
    command = ["evaluate", str(tmp_path / "out" / "model"), *given]
    before = sorted(tmp_path.rglob("*"))
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_targets"] == len(text) - 1 and found["eval_examples"] == math.ceil((len(text) - 1) / 15)
    assert found["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / (len(text) - 1), rel=1e-5)
    assert main(command) == 0 and sorted(tmp_path.rglob("*")) == before
    line = capsys.readouterr().out
    assert line.startswith(f"examples {found['eval_examples']}, loss ") and line.count("\n") == 1
    assert f"bits_per_byte {found['eval_bits_per_byte']:.6g}" in line


@pytest.mark.parametrize("name", ["model", "gpt2"], ids=["folder", "named as a preset"])
def test_a_recipe_that_begins_with_random_weights_judges_those_of_the_model_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(recipe_of(tmp_path, eval_steps=None, save_steps=None), MACHINE)
    (tmp_path / "out" / "model").rename(name)
    given = [f"model={name}", "data.path=text.txt", "data.seq_len=16", "data.eval_fraction=0.1", "precision=fp32"]
    for more in ([], ["tokenizer=char", "config.dropout=0", "machine.threads=1"]):
        assert main(["evaluate", "pretrain", *given, *more, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(run.metrics["eval_loss"], rel=1e-5)
    for asked in (given[1:], [*given, "init=random"]):
        assert main(["evaluate", "pretrain", *asked]) == 2
        assert "error: init: random, where training begins, and nothing to judge; model=FOLDER, " in capsys.readouterr().err
    if name == "model":
        for verb in ("train", "plan"):
            assert main([verb, "pretrain", *given]) == 2
            said = capsys.readouterr().err
            assert "error: model: model, a folder with weights, and init is random; init=pretrained config={}" in said


def test_bytes_are_utf_8_and_without_the_first_token() -> None:
    tokenizer = open_tokenizer("char", ["é中ab"])
    assert stream_bytes(["", "é中", "ab"], tokenizer) == 2 + 3 + 2 - 2
    pieces = open_tokenizer("bpe:300", ["the cat sat on the mat. " * 20])
    first = pieces.decode(pieces.encode("the cat")[:1])
    assert 1 < len(first) < 7 and stream_bytes(["the cat"], pieces) == len("the cat") - len(first)


SHORT = {"config": {"dim": 32, "hidden": 64, "heads": 2, "head_dim": 16, "layers": 1, "decoder_layers": 1}, "model": "t5-small",
         "objective": "seq2seq", "tokenizer": "roberta:270", "save_steps": None, "data.eval_fraction": 0.25, "data.target_len": 6,
         "max_steps": 2, "eval_steps": None, "metrics": ["chrf"]}  # fmt: skip


def short(folder: Path, generation: dict[str, Any], **changes: Any) -> Recipe:
    pairs = [{"source": "x" * (n % 5 + 1), "target": "ab" if n % 2 else "b"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs))
    return recipe_of(folder, **{**SHORT, "data.path": str(folder / "pairs.jsonl"), "generation": generation, **changes})


def test_texts_that_are_drawn_are_the_same_again(tmp_path: Path) -> None:
    """By the recipe's seed: each rank would draw its own, and one alone think its model the best."""
    found = []
    for name, changes in (("a", {}), ("b", {}), ("c", {"generation": {"do_sample": True, "seed": 5}})):
        (tmp_path / name).mkdir()
        found.append(train(short(tmp_path / name, **{"generation": {"do_sample": True}, **changes}), MACHINE).metrics["eval_chrf"])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("generation", "words"), [
    ({"num_beams": 2, "num_return_sequences": 2}, r"generation\.num_return_sequences: 2; 1: one text for each example is judged"),
    ({"length_penalty": 0.6}, r"length_penalty: 0\.6, which does nothing without num_beams from 2"),
], ids=["texts", "penalty"])  # fmt: skip
def test_generation_that_cannot_be_judged_is_refused_before_the_first_step(
    generation: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        train(short(tmp_path, generation), MACHINE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("generation", "most"), [({}, 6), ({"max_length": 3}, 2), ({"max_new_tokens": 4}, 4)],
                         ids=["targets", "length", "new"])  # fmt: skip
def test_texts_are_as_long_as_is_said(generation: dict[str, Any], most: int, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    widths = set[int]()
    generate = mc.T5.generate

    def watched(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = generate(self, *args, **options)
        widths.add(out.size(1) - 1)
        return out

    monkeypatch.setattr(mc.T5, "generate", watched)
    train(short(tmp_path, {**generation, "eos_token_id": -1}), MACHINE)
    assert widths == {most}


def test_texts_end_at_a_text(tmp_path: Path) -> None:
    assert train(short(tmp_path, {"stop_strings": "b"}), MACHINE).step == 2


def test_texts_are_written_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"dim": 32, "hidden": 64, "heads": 2, "head_dim": 16, "layers": 2, "decoder_layers": 2}
    pairs = [{"source": "x" * (n % 5 + 1), "target": "ab" if n % 2 else "b"} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs))
    changes = {"objective": "seq2seq", "model": "t5-small", "config": config, "tokenizer": "roberta:270", "save_steps": None,
               "data.path": str(tmp_path / "data.jsonl"), "data.eval_fraction": 0.25, "max_steps": 30, "eval_steps": None,
               "metrics": ["exact_match", "chrf", "squad_em"], "generation": {"num_beams": 2}, "data.target_len": 6,
               "micro_batch": 4}  # fmt: skip
    beats = list[bool]()
    monkeypatch.setattr(evaluate, "beat", lambda step: beats.append(step))
    run = train(recipe_of(tmp_path, **changes), MACHINE)
    model, tokenizer = mc.load(tmp_path / "out" / "model"), mc.load_tokenizer(tmp_path / "out" / "model")
    right = 0
    for pair in pairs[30:]:
        ids = tokenizer.encode(pair["source"])
        ids = ids if ids[-1:] == [tokenizer.eos_id] else [*ids, tokenizer.eos_id]
        out = model.generate(torch.tensor([ids]), max_new_tokens=6, num_beams=2)
        right += tokenizer.decode(out[0, 1:].tolist()) == pair["target"]
    assert 0 < right < 10 and run.metrics["eval_exact_match"] == right / 10 and 0 < run.metrics["eval_chrf"] < 100
    assert run.metrics["eval_squad_em"] == right / 10
    assert beats == 2 * 3 * [True]  # 10 texts are 3 batches, read and then written: ranks that only write stand not still
    assert main(["evaluate", str(tmp_path / "out"), "metrics=[rougel]", "generation.num_beams=1", "--json"]) in (0, 2)
    said = capsys.readouterr()
    assert "eval_rougel" in said.out or "rouge-score" in said.err
    assert main(["evaluate", str(tmp_path / "out" / "model"), f"data.path={tmp_path}/data.jsonl", "generation.num_beams=1"]) == 2
    assert "generation.num_beams: given with no metric for which texts are written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"metrics": ["acuracy"]}, "metrics: 'acuracy'; did you mean 'accuracy'"), ({"metrics": ["bleu"]}, "bleu with objective lm"),
     ({"best": "mcc"}, "best: mcc with objective lm"),
     ({"best": "eval_mcc"}, "best: 'eval_mcc'; did you mean 'mcc'"),
     ({"generation": {"num_beam": 2}}, "generation.num_beam: unknown key"),
     ({"generation": {"num_beams": 2}}, "generation.num_beams: 2 with objective lm, which writes no text; leave it out"),
     ({"patience": 2, "data.eval_fraction": 0.0}, "data.eval_path: missing, and patience 2 asks for an evaluation"),
     ({"data.packing": True, "metrics": ["bits_per_byte"]}, "bits_per_byte of packed")],
    ids=["unknown", "of texts", "best", "a row's name", "generation", "no texts", "nothing to wait for", "packed"],
)  # fmt: skip
def test_refusals(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        train(recipe_of(tmp_path, **changes), MACHINE)


def test_a_benchmark_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rte").mkdir()
    (tmp_path / "rte" / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 1, "eval_accuracy": 0.625}\n')
    assert main(["evaluate", str(tmp_path), "--suite", "superglue"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("superglue 62.5 (the mean of what is there; missing: boolq, cb") and said.endswith(": rte 62.5\n")


@pytest.mark.parametrize("names", [("neg", "neu", "pos"), ("LABEL_0", "LABEL_1", "LABEL_2")], ids=["named", "numbered"])
def test_a_classifier_is_judged_where_some_of_its_classes_do_not_occur(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...]
) -> None:
    """By its own labels, by name or by number; what they leave undefined is said. Trained on such a file it is not."""
    model = mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="classify", id2label=dict(enumerate(names)))
    with torch.no_grad():
        model.head.out.bias.copy_(torch.tensor([0.0, 0.0, 90.0]))
    model.save_pretrained(tmp_path / "model")
    open_tokenizer("roberta:300", ["some text " * 40]).save(tmp_path / "model")
    file, asked = tmp_path / "file.jsonl", ["metrics=[mcc]"]
    undefined = "mcc: 0, because undefined: all 3 labels are"
    for labels, right, lines in (([names[2]] * 3, 1, [f"{undefined} {names[2]}\n"]), ([2, 2, 0], 2 / 3, []),
                                 ([1, 1, 1], 0, [f"{undefined} {names[1]}\n"]), ([0, 1, 1], 0, [])):
        file.write_text("".join(json.dumps({"text": f"t {n}", "label": label}) + "\n" for n, label in enumerate(labels)))
        assert main(["evaluate", str(tmp_path / "model"), f"data.path={file}", *asked]) == 0
        said = capsys.readouterr().out
        assert "examples 3, loss " in said and f"accuracy {right:.6g}" in said and all(line in said for line in lines), said
        assert said.count(": 0, because") == len(lines), said
    assert main(["evaluate", str(tmp_path / "model"), f"data.path={file}", "metrics=[f1]"]) == 2
    assert "metrics: f1, which is that of class 1, of 3 classes; f1_macro or f1_micro" in capsys.readouterr().err
    if names[0] == "neg":  # a class that the model has none of is the row's fault, and no reason for another head
        for first, line in (("neg", 2), ("bad", 1)):
            file.write_text(f'{{"text": "t", "label": "{first}"}}\n{{"text": "t", "label": "bad"}}\n')
            assert main(["evaluate", str(tmp_path / "model"), f"data.path={file}"]) == 2
            found = f"file.jsonl: line {line}: label: 'bad' is no label that was trained; known: neg, neu, pos"
            assert found in capsys.readouterr().err
    else:  # names would be numbered as the alphabet has them
        file.write_text("".join(f'{{"text": "t", "label": "{label}"}}\n' for label in ("bad", "neu", "good")))
        assert main(["evaluate", str(tmp_path / "model"), f"data.path={file}"]) == 2
        found = "file.jsonl: line 1: label has 'bad'; a number: this model's classes are the numbers 0 to 2"
        assert found in capsys.readouterr().err
    file.write_text('{"text": "t", "label": 2}\n' * 4)
    given = [f"model={tmp_path / 'model'}", f"data.path={file}", "data.seq_len=8", f"output_dir={tmp_path / 'out'}"]
    assert main(["train", "classify", *given]) == 2
    assert "numbers from 0 on without a gap" in capsys.readouterr().err


def test_f1_says_of_which_class_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="classify", id2label={0: "no", 1: "yes"})
    model.save_pretrained(tmp_path / "model")
    open_tokenizer("roberta:300", ["some text " * 40]).save(tmp_path / "model")
    (tmp_path / "file.jsonl").write_text('{"text": "t", "label": "no"}\n' * 3)
    assert main(["evaluate", str(tmp_path / "model"), f"data.path={tmp_path}/file.jsonl", "metrics=[f1]"]) == 0
    assert "f1: 0, because no label is yes," in capsys.readouterr().out


def test_nothing_is_encoded_to_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that nothing is said of the training data, nor twice of those that are judged."""
    model = mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="classify", id2label={0: "no", 1: "yes"})
    model.save_pretrained(tmp_path / "model")
    open_tokenizer("roberta:300", ["some text " * 40]).save(tmp_path / "model")
    for name, texts in (("train", ["some text " * 9, "more " * 9]), ("held", ["some text", "more " * 9])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}", "label": "no"}}\n' for text in texts))
    for keys in (["data.path=train.jsonl", "data.eval_path=held.jsonl"], ["data.path=held.jsonl"]):
        paths = [key.replace("=", f"={tmp_path}/") for key in keys]
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert main(["evaluate", str(tmp_path / "model"), *paths, "data.seq_len=6"]) == 0
        told = capsys.readouterr()
        assert told.out.startswith("examples 2, ")
        assert told.err == "modelcenter: warning: 1 of 2 texts are longer than data.seq_len 6: what lies beyond is not judged\n"


@pytest.mark.parametrize(("kind", "labels", "objective"), [
    ("multi_label_classification", 3, "multilabel"), ("regression", 1, "regress"), (None, 1, "regress"), (None, 3, "classify"),
    ("single_label_classification", 3, "classify")])  # fmt: skip
def test_a_classifiers_objective_is_what_its_config_says(kind: str | None, labels: int, objective: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    model = mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="classify", num_labels=labels)
    model.save_pretrained(tmp_path / "model")
    open_tokenizer("roberta:300", ["some text " * 40]).save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **({"problem_type": kind} if kind else {})}))
    label = {"multilabel": ["LABEL_0", "LABEL_2"], "regress": 0.5, "classify": "LABEL_1"}[objective]
    (tmp_path / "file.jsonl").write_text(json.dumps({"text": "t", "label": label}) + "\n")
    assert main(["evaluate", str(tmp_path / "model"), f"data.path={tmp_path}/file.jsonl", "--json"]) == 0
    expected = {"multilabel": "f1_micro", "regress": "pearson", "classify": "accuracy"}[objective]
    assert f"eval_{expected}" in capsys.readouterr().out


def test_a_head_that_is_not_there_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One would be drawn at random, as training does, and its accuracy told as the model's."""
    mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="mlm").save_pretrained(tmp_path / "words")
    open_tokenizer("roberta:300", ["some text " * 40]).save(tmp_path / "words")
    rows = [json.dumps({"text": "some text" * n, "pair": "text", "label": n % 2}) for n in range(1, 5)]
    (tmp_path / "file.jsonl").write_text("\n".join(rows) + "\n")
    command = ["evaluate", str(tmp_path / "words"), f"data.path={tmp_path}/file.jsonl", "data.seq_len=16"]
    assert main([*command, "objective=classify"]) == 2
    said = capsys.readouterr().err
    assert "words: model: no head.out.weight, and with numbers drawn at random" in said and "objective=classify\n" in said
    for rest in ([], ["objective=similarity", "data.pair_key=pair"]):  # vectors are made of what is there
        assert main([*command, *rest]) == 0


@pytest.mark.parametrize(("asked", "trained", "fits"), [
    ("classify", "classify", True), ("multilabel", "classify", False), ("regress", "multilabel", False), ("seq2seq", "span", True),
    ("choice", "classify", True), ("tag", "classify", False), ("chat", "lm", True), ("similarity", "contrastive", True),
    ("contrastive", "similarity", True)])  # fmt: skip
def test_a_run_is_judged_by_an_objective_of_its_head(asked: str, trained: str, fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(InputError, match=f"objective: {asked}, where the run has trained for {trained}"):
        check_objective(asked, trained)


@pytest.mark.parametrize(("asked", "found"), [
    ("tag", "objective: tag, where the run has trained for lm; leave it out"),
    ("lmm", "objective: 'lmm'; did you mean 'lm'?"),
], ids=["tag", "lmm"])  # fmt: skip
def test_a_run_has_its_head_and_says_so(asked: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its `task`, which its recipe has resolved, nobody has said anything."""
    (tmp_path / "recipe.yaml").write_text(dump_yaml(to_dict(replace(recipe_of(tmp_path), task="lm"))))
    assert main(["evaluate", str(tmp_path), f"objective={asked}"]) == 2
    assert capsys.readouterr().err == f"modelcenter: error: {found}\n"


def test_a_run_is_judged_otherwise_whatever_its_best_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is of another objective, and not to be given where nothing is trained."""
    pairs = [{"text": f"a b {n}", "pair": f"c {n}", "label": n / 20} for n in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    changes = {"objective": "contrastive", "model": "bert-base-uncased", "config": {**TINY, "hidden": 64}, "data.pair_key": "pair",
               "tokenizer": "roberta:270", "data.path": str(tmp_path / "data.jsonl"), "micro_batch": None, "max_steps": 2,
               "eval_steps": 1, "save_steps": None, "best": "accuracy", "schedule.warmup_steps": 0}  # fmt: skip
    assert train(recipe_of(tmp_path, **changes), MACHINE).step == 2
    assert main(["evaluate", str(tmp_path / "out"), "objective=similarity", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval_targets"] == 2 and "eval_spearman" in found and "eval_accuracy" not in found


@pytest.mark.parametrize("setting", ["optimizer.lr=1e-3", "save_steps=5", "num_epochs=2"])
def test_what_only_training_reads_is_refused(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), "data.path=x.jsonl", setting]) == 2
    assert f"{setting.split('=')[0].split('.')[0]}: given, where nothing is trained; leave it out" in capsys.readouterr().err


def test_every_objective_has_its_metrics() -> None:
    known = objectives()
    assert list(known) == list(get_args(Recipe.__dataclass_fields__["objective"].type))
    for name, objective in known.items():
        assert objective.name == name and objective.metrics
        assert all(set(METRICS[metric].of) & set(objective.of) for metric in objective.metrics)


@pytest.mark.parametrize(("task", "said"), [("embed", "contrastive or similarity"), ("backbone", "NAME")])
def test_a_head_of_several_objectives_asks_for_one(task: str, said: str, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    model = mc.build("bert-base-uncased", config={"layers": 1, "dim": 8, "heads": 2, "hidden": 8, "vocab": 9}, task="backbone")
    model.save_pretrained(tmp_path / "model")
    if task == "embed":
        (tmp_path / "model" / "modules.json").write_text(json.dumps([
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
            for n, (name, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling")))]))  # fmt: skip
        (tmp_path / "model" / "1_Pooling").mkdir()
        pooling = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
        (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert main(["evaluate", str(tmp_path / "model"), "data.path=a.jsonl"]) == 2
    line = f"model: objective: missing, of a model with the task '{task}'; give objective={said}\n"
    assert capsys.readouterr().err.endswith(line)
