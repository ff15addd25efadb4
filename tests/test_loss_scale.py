"""Training in fp16: the loss scale and what is trained under it, step by step against torch.amp.GradScaler, and a resume."""

import importlib
import itertools
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import MACHINE, STILL, TINY, bytes_of, poison, recipe_of, rows

import modelcenter as mc
from modelcenter.errors import InputError
from modelcenter.optim import loss_scale
from modelcenter.optim.loss_scale import LossScale
from modelcenter.optim.schedules import lr_factor
from modelcenter.train import loop, paper
from modelcenter.train import step as stepping
from modelcenter.train.evaluate import count_targets
from modelcenter.train.loop import train
from modelcenter.train.prepare import prepare, restrict
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.resolve import automatic_precision, resolve
from modelcenter.train.state import Position

HALF = {"precision": "fp16", "logging_steps": 1, "eval_steps": None, "config": {**TINY, **STILL}}


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, int], None]:
    """Another first scale, and another number of updates until it grows."""

    def change(first: float, every: int) -> None:
        monkeypatch.setattr(loop, "FIRST", first)
        monkeypatch.setattr(loss_scale, "EVERY", every)

    return change


def plain(recipe: Recipe, folder: Path, first: float, every: int, bad: set[int]) -> list[dict[str, float]]:
    """The run in torch's own words: autocast, GradScaler, AdamW, and a gradient that is not finite at the steps `bad`."""
    resolved, device = resolve(recipe, MACHINE)
    steps = prepare(resolved, MACHINE, device).loader.steps(micro_batch=resolved.micro_batch)
    model = mc.load(folder, dtype=torch.float32).train()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    adamw = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], weight_decay=0.01)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=every), []
    for step in range(recipe.max_steps or 0):
        _, batches = next(steps)
        targets, total = sum(count_targets(batch, "lm") for batch in batches), 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.float16):
                loss = model(**batch, num_items_in_batch=targets).loss
            scaler.scale(loss).backward()
            total += float(loss.detach())
        if step + 1 in bad:
            next(model.parameters()).grad[0, 0] = math.nan
        for group in adamw.param_groups:
            group["lr"] = recipe.optimizer.lr * lr_factor(recipe.schedule, step, recipe.max_steps or 0)
        scaler.unscale_(adamw)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm))
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        found.append({"loss": total, "grad_norm": norm, "loss_scale": scaler.get_scale()})
    return found


@pytest.mark.parametrize("first", [2.0**16, 2.0**34], ids=["usual", "far too large"])
def test_the_scale_is_that_of_torch(first: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: Any) -> None:
    """Overflows of its own at the beginning, two that are planted, and growth in between: the same factor after every step."""
    scaling(first, 6)
    bad = {17, 26}
    poison(monkeypatch, bad)
    recipe = recipe_of(tmp_path, **{**HALF, "max_steps": 40, "save_steps": None, "max_grad_norm": 0.4})
    start, device = resolve(recipe, MACHINE)
    prepare(start, MACHINE, device).model.save_pretrained(tmp_path / "start")
    run = train(recipe, MACHINE)
    ours = [row for row in rows(tmp_path / "out") if "loss" in row]
    wanted = plain(recipe, tmp_path / "start", first, 6, bad)
    assert [row["loss_scale"] for row in ours] == [row["loss_scale"] for row in wanted]
    overflows = [step for step, row in enumerate(wanted, 1) if not math.isfinite(row["grad_norm"])]
    assert bad < set(overflows) and (overflows[:6] == list(range(1, 7)) or first == 2.0**16)
    assert [row["step"] for row in ours if row["grad_norm"] is None] == overflows
    assert ours[-1]["skipped"] == len(overflows)
    assert any(b["loss_scale"] > a["loss_scale"] for a, b in itertools.pairwise(ours))
    for a, b in zip(ours, wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=2e-3)
        assert a["grad_norm"] is None or a["grad_norm"] == pytest.approx(b["grad_norm"], rel=2e-2)
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.5
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_an_overflow_is_no_bad_step(tmp_path: Path, scaling: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Sixteen overflows in a row do not end a run; their losses count."""
    scaling(2.0**40, 2000)
    train(recipe_of(tmp_path, **{**HALF, "max_steps": 24, "save_steps": None}), MACHINE)
    found = [row for row in rows(tmp_path / "out") if "loss" in row]
    assert 16 <= found[-1]["skipped"] < 24 and all(row["loss"] > 1 for row in found)
    assert "step 3: a gradient overflows fp16; no update, and the loss scale falls to 1.37439e+11" in capsys.readouterr().err


def test_gradients_that_no_scale_mends_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: Any) -> None:
    scaling(4.0, 2000)
    poison(monkeypatch, set(range(1, 20)))
    with pytest.raises(InputError, match="step 7: 5 gradients in a row were not finite"):  # the first two halve it to 1
        train(recipe_of(tmp_path, **{**HALF, "save_steps": None}), MACHINE)


def test_it_begins_and_grows_as_torchs() -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert theirs.get_scale() == loop.FIRST and theirs.get_growth_interval() == loss_scale.EVERY
    assert Position().scale.value == 1  # where none is needed


def test_a_loss_that_is_not_finite_is_not_the_scales_fault() -> None:
    scale = LossScale(8.0, 3)
    assert [scale.judge(1.0, math.nan), scale.judge(math.nan, math.nan), scale.judge(1.0, 2.0)] == [True, False, False]
    assert scale == LossScale(2.0, 1)
    assert not LossScale(1.0).judge(1.0, math.nan)


def test_the_scale_comes_back_to_the_bit(tmp_path: Path, scaling: Any) -> None:
    scaling(2.0**30, 4)
    recipe = recipe_of(tmp_path, **HALF)
    train(recipe, MACHINE)
    out, scales = tmp_path / "out", {row["loss_scale"] for row in rows(tmp_path / "out") if "loss" in row}
    state, before = bytes_of(out / "step-20"), rows(out)
    assert len(scales) > 4
    for name in ("step-15", "step-20", "model"):
        shutil.rmtree(out / name)
    train(recipe, MACHINE)
    assert (bytes_of(out / "step-20"), rows(out)) == (state, before)


@pytest.mark.parametrize(("name", "lr"), [("lion", 2e-3), ("muon", 2e-3), ("adafactor", 2e-2)])
def test_every_optimizer_divides_by_the_scale(name: str, lr: float, tmp_path: Path, scaling: Any) -> None:
    """A run at one scale is that at another, but for what fp16 rounds away."""
    found, norms = [], []
    for first in (2.0**4, 2.0**12):
        scaling(first, 2000)
        (folder := tmp_path / str(first)).mkdir()
        changes = {**HALF, "optimizer.name": name, "optimizer.lr": lr, "max_steps": 8, "save_steps": None}
        train(recipe_of(folder, **changes), MACHINE)
        logged = [row for row in rows(folder / "out") if "loss" in row]
        found.append([row["loss"] for row in logged])
        norms.append([row["grad_norm"] for row in logged])
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    assert found[0] == pytest.approx(found[1], abs=2e-2) and found[0][-1] < found[0][0] - 0.05


def test_t5_is_refused(tmp_path: Path) -> None:
    config = {"dim": 32, "hidden": 64, "heads": 2, "head_dim": 16, "layers": 1, "decoder_layers": 1}
    (tmp_path / "pairs.jsonl").write_text('{"source": "a", "target": "b"}\n' * 8)
    changes = {**HALF, "model": "t5-small", "config": config, "objective": "seq2seq", "tokenizer": "roberta:270",
               "data.path": str(tmp_path / "pairs.jsonl")}
    with pytest.raises(InputError, match="precision: fp16 with T5, whose feed-forward layers overflow it; bf16, or fp32"):
        train(recipe_of(tmp_path, **changes), MACHINE)
    model = mc.build("t5-small", config=config, device="meta")
    model.__class__ = type("FSDPT5", (type(model),), {})  # as it is called where FSDP has divided it
    with pytest.raises(InputError, match="precision: fp16 with T5, whose"):
        restrict(model, recipe_of(tmp_path, **changes))


def test_the_precision_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for able, wanted in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, it=able: it or including_emulation)
        assert automatic_precision(torch.device("cuda")) == wanted


@pytest.mark.parametrize("units", [True, False])
def test_the_precision_of_a_cpu(units: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model gains little, and a test of one should not depend on the processor; of a hub's model nothing is known yet."""
    module = importlib.import_module("modelcenter.train.resolve")
    monkeypatch.setattr(module, "has_low_units", lambda dtype: units and dtype == torch.bfloat16)
    cpu, wide = torch.device("cpu"), "bf16" if units else "fp32"
    assert [automatic_precision(cpu, width) for width in (None, 768, 256, 255, 32)] == [wide, wide, wide, "fp32", "fp32"]
    (tmp_path / "text.txt").write_text("a text\n")
    for model, config, wanted in (("gpt2", {}, wide), ("gpt2", {"dim": 64, "heads": 2}, "fp32"), ("somebody/model", {}, wide)):
        recipe = load_recipe("finetune", {"model": model, "config": config, "data.path": str(tmp_path / "text.txt")})
        assert resolve(recipe, MACHINE)[0].precision == wanted
        assert resolve(replace(recipe, precision="fp32"), MACHINE)[0].precision == "fp32"
    mc.build("gpt2", config={**TINY, "vocab": 10}).save_pretrained(tmp_path / "model")
    assert resolve(replace(recipe, model=str(tmp_path / "model")), MACHINE)[0].precision == "fp32"
    for config, wanted in (({}, wide), ({**TINY, "vocab": 10}, "fp32")):  # a plan says the same
        alone = replace(recipe, model="gpt2", config=config, data=replace(recipe.data, seq_len=8), batch=1, micro_batch=1)
        assert f", {wanted}, " in paper.on_paper(alone, MACHINE, 1, None, bare=True)[1][0]


@pytest.mark.parametrize("parts", [{1: math.inf}, {2: -math.inf}, {1: math.inf, 2: -math.inf}], ids=["first", "last", "both"])
def test_an_overflow_of_one_micro_batch_is_the_steps(
    parts: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: Any
) -> None:
    """What the others add makes it no number at all, but never a finite one: the scale is halved and the state is the same as where
    the whole step's gradient is not finite."""
    scaling(4.0, 5)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    changes = {**HALF, "max_steps": 6, "save_steps": 6}
    whole = recipe_of(tmp_path / "whole", **changes)
    with monkeypatch.context() as patch:
        poison(patch, {3})
        train(whole, MACHINE)
    real, calls = stepping.forward_and_backward, itertools.count()

    def spoiled(model: Any, *rest: Any) -> Any:
        number, loss = next(calls), real(model, *rest)
        if number // 2 == 2 and number % 2 + 1 in parts:  # two in each step
            next(model.parameters()).grad[0, 0] += parts[number % 2 + 1]
        return loss

    monkeypatch.setattr(stepping, "forward_and_backward", spoiled)
    train(replace(recipe_of(tmp_path / "parts", **changes), data=whole.data), MACHINE)
    assert next(calls) == 12
    found, wanted = (tmp_path / name / "out" for name in ("parts", "whole"))
    assert bytes_of(found / "step-6") == bytes_of(wanted / "step-6") and rows(found)[1:] == rows(wanted)[1:]
    assert [row["loss_scale"] for row in rows(found) if "loss_scale" in row] == [4.0, 4.0, 2.0, 2.0, 2.0, 2.0]
