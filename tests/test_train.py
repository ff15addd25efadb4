"""The training loop: gradients by tokens, exact resume, what a bad gradient may do, and transformers' own losses."""

import copy
import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

import modelcenter as mc
from modelcenter import create
from modelcenter.__main__ import main
from modelcenter.adapter.config import AdapterConfig
from modelcenter.checkpoint.manifest import verify
from modelcenter.config import dump_yaml, to_dict
from modelcenter.data.config import DataConfig
from modelcenter.data.objective import find_objective, objectives
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.errors import InputError
from modelcenter.optim.adafactor import Adafactor
from modelcenter.optim.config import OptimizerConfig, ScheduleConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.watch import PARENT, TORCHRUN, beat
from modelcenter.train import loop, plot, session
from modelcenter.train import prepare as preparing
from modelcenter.train import state as states
from modelcenter.train import step as stepping
from modelcenter.train.evaluate import count_targets, count_tokens, evaluate
from modelcenter.train.folder import WATCHING, check, claim
from modelcenter.train.interrupt import Interrupt
from modelcenter.train.loop import train
from modelcenter.train.metrics import TIMINGS, Metrics, read_rows
from modelcenter.train.opening import few_divisors, unknown
from modelcenter.train.prepare import prepare, restrict
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.resolve import resolve
from modelcenter.train.session import Session
from modelcenter.train.state import Position, restore, save
from modelcenter.train.step import accumulate, update

MACHINE = Machine(device="cpu", threads=1)
TINY = {"layers": 2, "dim": 32, "heads": 2, "positions": 32}
TINY_BERT = {"layers": 2, "dim": 32, "heads": 2, "hidden": 64, "positions": 32, "vocab": 50}
STILL = {"dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0, "head_dropout": 0.0}
TEXT = "\n".join(f"def f{n}(x):\n    return x * {n} + {n * n}" for n in range(120))


def tiny(task: str = "lm", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A GPT of 2 layers over 50 words, in training mode, without dropout unless `changes` say otherwise."""
    return mc.build("gpt2", config={**TINY, **STILL, "vocab": 50, **changes}, task=task, dtype=dtype).train()


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    """20 steps of a tiny GPT with dropout over a little text, states every 5."""
    (folder / "text.txt").write_text(TEXT)
    base = {
        "model": "gpt2", "init": "random", "config": TINY, "tokenizer": "char", "data.path": str(folder / "text.txt"),
        "data.seq_len": 16, "data.eval_fraction": 0.1, "optimizer.lr": 1e-2, "schedule.name": "cosine",
        "schedule.warmup_steps": 3, "batch": 4, "micro_batch": 2, "precision": "fp32", "max_steps": 20,
        "logging_steps": 3, "eval_steps": 10, "save_steps": 5, "output_dir": str(folder / "out"), "resume": "auto",
    }  # fmt: skip
    (folder / "base.yaml").write_text("{}\n")
    return load_recipe(folder / "base.yaml", {**base, **changes})


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run without what differs between two runs of one recipe."""
    kept = list(read_rows(folder / "metrics.jsonl"))
    assert len(kept) == len((folder / "metrics.jsonl").read_text().splitlines())  # each line is whole
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in kept]


def bytes_of(state: Path) -> dict[str, str]:
    """A training state, byte for byte: as digests, because pytest under CI=true spends minutes on a diff of megabytes."""
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(state.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run = train(recipe_of(folder), MACHINE)
    assert (run.step, run.stopped) == (20, False)
    return folder / "out"


# --------------------------------------------------------------------------------------------- accumulation, by tokens


def uneven(rows: int = 4, words: int = 50) -> dict[str, torch.Tensor]:
    """A batch whose rows have very different numbers of targets."""
    ids = torch.randint(words, (rows, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row, start in enumerate([0, 3, 9, 11][:rows]):
        labels[row, :start] = -100
    return {"input_ids": ids, "labels": labels}


def cut(batch: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    pieces = zip(*(value.chunk(parts) for value in batch.values()), strict=True)
    return [dict(zip(batch, piece, strict=True)) for piece in pieces]


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_batches_are_ready_before_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the host does for a batch is done by the thread that reads ahead, while the device is at work."""
    counted: list[str] = []
    count = stepping.count_targets
    monkeypatch.setattr(stepping, "count_targets", lambda *of: (counted.append(threading.current_thread().name), count(*of))[1])
    train(recipe_of(tmp_path, max_steps=3), MACHINE)
    assert set(counted) == {"prefetch"} and 2 * 3 <= len(counted) <= 2 * (3 + 3)  # of two micro-batches a step; three steps ahead


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_accumulation_equals_one_batch(parts: int) -> None:
    model, batch = tiny(dtype=torch.float64), uneven()
    loss = model(**batch).loss  # the model's own mean over one batch
    loss.backward()
    wanted, loss = gradients(model), float(loss.detach())
    model.zero_grad()
    heard: list[Any] = []
    found, targets = accumulate(model, cut(batch, parts), "lm", told=lambda *said: heard.append(said))
    assert targets == 11 + 9 + 3 + 1 and [said[:2] for said in heard] == [(number, parts) for number in range(1, parts + 1)]
    for part, (_, _, own) in zip(cut(batch, parts), heard, strict=True):
        assert abs(float(own) - float(model(**part).loss.detach())) < 1e-12
    assert abs(found - loss) < 1e-12
    assert (gradients(model) - wanted).abs().max() < 1e-10 * wanted.abs().max()


def test_a_mean_over_micro_batches_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predecessor's bug, planted: each micro-batch's own mean, divided by their number."""
    model, batch = tiny(dtype=torch.float64), uneven()
    accumulate(model, [batch], "lm")
    wanted = gradients(model)
    model.zero_grad()
    for part in cut(batch, 2):
        (model(**part).loss / 2).backward()
    assert (gradients(model) - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_no_target_gives_zero_and_no_nan() -> None:
    model, batch = tiny(), uneven()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    assert accumulate(model, cut(batch, 2), "lm") == (0.0, 0)
    assert gradients(model).abs().max() == 0


def packed() -> dict[str, Any]:
    ids = torch.arange(12)[None] % 50
    labels = ids.clone()
    labels[0, [0, 5]] = -100
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions,
            "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


@pytest.mark.parametrize(("task", "batch", "targets"), [
    ("lm", uneven(), 24), ("lm", packed(), 10),
    ("classify", {"input_ids": uneven()["input_ids"], "labels": torch.tensor([0, 1, -100, 1])}, 3),
])  # fmt: skip
def test_targets_are_what_the_model_counts(task: str, batch: dict[str, Any], targets: int) -> None:
    model = tiny(task).eval()
    assert count_targets(batch, task) == targets
    total, mean = model(**batch, num_items_in_batch=1).loss.item(), model(**batch).loss.item()
    assert total / mean == pytest.approx(targets, rel=1e-5)


def test_tokens_read_leave_out_padding() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    batch = {"input_ids": mask, "attention_mask": mask, "labels": torch.tensor([[5, -100], [6, 7]])}
    assert (count_tokens(batch, "lm"), count_tokens(batch, "seq2seq"), count_tokens(uneven(), "lm")) == (4, 7, 48)


# ---------------------------------------------------------------------------------------------------------- the update


def test_clipping_scales_the_gradient_to_the_norm() -> None:
    for limit in (0.0, 0.01):
        model = tiny()
        optimizer = build_optimizer(model, OptimizerConfig())
        loss, _ = accumulate(model, [uneven()], "lm")
        wanted = float(gradients(model).double().norm())
        found = update(model, optimizer, loss, 1e-2, limit)  # before clipping, and a sum of thousands of squares in fp32
        assert found == pytest.approx(wanted, rel=1e-5)
        moments = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in model.parameters()])
        assert float(moments.norm()) == pytest.approx(0.1 * (limit or wanted), rel=1e-3)  # 1 - beta1 of what was used
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = tiny()
    optimizer = build_optimizer(model, OptimizerConfig())
    loss, _ = accumulate(model, [uneven()], "lm")
    assert math.isfinite(update(model, optimizer, loss, 1e-2, 1.0))
    state = [t.clone() for s in optimizer.state.values() for t in s.values()]
    weights = [p.detach().clone() for p in model.parameters()]
    loss, _ = accumulate(model, [uneven()], "lm")
    next(model.parameters()).grad[0, 0] = bad
    assert math.isnan(update(model, optimizer, loss, 1e-2, 1.0))
    assert math.isnan(update(model, optimizer, bad, 1e-2, 1.0))  # the loss alone
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_the_norm_is_asked_for_before_the_update_and_read_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU is not waited for while it updates."""
    model, calls = tiny(), list[str]()
    optimizer = build_optimizer(model, OptimizerConfig())
    loss, _ = accumulate(model, [uneven()], "lm")
    step, clear = optimizer.step, optimizer.zero_grad

    def asked(number: torch.Tensor) -> Callable[[], float]:
        calls.append("asked")
        return lambda: calls.append("read") or float(number)

    monkeypatch.setattr(stepping, "soon", asked)
    monkeypatch.setattr(optimizer, "step", lambda **options: (calls.append("step"), step(**options)))
    monkeypatch.setattr(optimizer, "zero_grad", lambda **options: (calls.append("clear"), clear(**options)))
    assert update(model, optimizer, loss, 1e-2, 1.0) > 0
    assert calls == ["asked", "step", "clear", "read"]


def test_a_run_asks_for_its_loss_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = session.update

    def asked(number: torch.Tensor) -> Callable[[], float]:
        calls.append("asked")
        return lambda: calls.append("read") or float(number)

    monkeypatch.setattr(session, "soon", asked)
    monkeypatch.setattr(session, "update", lambda *args: calls.append("update") or real(*args))
    train(recipe_of(tmp_path, max_steps=2, save_steps=None, eval_steps=None), MACHINE)
    assert calls == ["asked", "update", "read"] * 2


def test_batches_read_ahead_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that goes back, that is stopped when the next batch is there, and goes on."""
    recipes = [recipe_of(folder, on_spike="rollback") for folder in (tmp_path / "now", tmp_path / "ahead") if not folder.mkdir()]
    seen: list[int] = []
    fetch, accumulate, calls = session.Session.fetch, session.accumulate, itertools.count(1)
    monkeypatch.setattr(session.Session, "fetch", lambda self, *rest: seen.append(self.at.step + 1) or fetch(self, *rest))

    def ill(*rest: Any) -> Any:
        loss, targets = accumulate(*rest)
        return (loss * math.nan if 7 <= next(calls) < 12 else loss), targets

    monkeypatch.setattr(session, "accumulate", ill)
    train(recipes[0], MACHINE)
    assert seen == [*range(1, 12), *range(6, 21)]  # it went back
    seen.clear()
    calls = itertools.count(1)
    log, asked = session.Session.log, []

    def stopped(self: Any, step: Any) -> None:
        log(self, step)
        if len(seen) == 18:
            asked.append(self.at.step)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(session, "AT_ONCE", ())
    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "log", stopped)
        half = train(recipes[1], MACHINE)
    assert half.stopped and asked == [half.step] and seen[:2] == [1, 1]  # the first is read in its step, others in the one before
    train(recipes[1], MACHINE)
    assert seen[-1] == 19  # nothing is read behind the last
    assert rows(tmp_path / "now" / "out") == rows(tmp_path / "ahead" / "out")
    weights = [(tmp_path / name / "out" / "model" / "model.safetensors").read_bytes() for name in ("now", "ahead")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_the_next_batch_is_there_before_a_step_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Adafactor waits before it updates."""
    calls: list[str] = []
    fetch, step = session.Session.fetch, Adafactor.step
    monkeypatch.setattr(Adafactor, "step", lambda *args, **options: calls.append("waits") or step(*args, **options))
    monkeypatch.setattr(session, "AT_ONCE", ())
    monkeypatch.setattr(session.Session, "fetch", lambda *args: calls.append("batch") or fetch(*args))
    monkeypatch.setattr(stepping, "soon", lambda number: lambda: calls.append("norm") or float(number))
    train(recipe_of(tmp_path, max_steps=3, save_steps=None, eval_steps=None, **{"optimizer.name": name}), MACHINE)
    waits = ["waits"] * (name == "adafactor")
    begin = calls.index("batch")  # a rehearsal may have stepped before
    assert calls[begin:] == ["batch", *["batch", *waits, "norm"] * 2, *waits, "norm"]


def test_an_error_of_a_batch_read_ahead_is_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, count = session.Session.batches, itertools.count(1)

    def batches(self: Any) -> Any:
        for found in made(self):
            if next(count) == 4:
                raise InputError("text.txt: gone")
            yield found

    monkeypatch.setattr(session, "AT_ONCE", ())
    monkeypatch.setattr(session.Session, "batches", batches)
    with pytest.raises(InputError, match=r"^text\.txt: gone$"):
        train(recipe_of(tmp_path, logging_steps=1, eval_steps=None, save_steps=3), MACHINE)
    assert [row["step"] for row in rows(tmp_path / "out") if "loss" in row] == [1, 2, 3] and (tmp_path / "out" / "step-3").is_dir()


@pytest.mark.gpu
def test_a_number_of_a_gpu_is_there_before_what_is_called_later() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.cuda._sleep(20_000_000)
    x = torch.full((2,), 3.5, device="cuda", dtype=torch.float64)
    known = stepping.soon(x[1])
    x.zero_()
    torch.cuda._sleep(400_000_000)  # a fifth of a second
    end = torch.cuda.current_stream().record_event()
    assert known() == 3.5 and not end.query()
    end.synchronize()
    assert known() == 3.5


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_an_update_is_called_while_the_gpu_still_forms_gradients(scale: float) -> None:
    """What waited for them, for the loss scale, left the GPU idle for as long as the host takes to call an update."""
    model = mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 64}, device="cuda").train()
    optimizer, ids = build_optimizer(model, OptimizerConfig()), torch.randint(64, (2, 8))
    busy: list[bool] = []
    for _ in range(2):  # memory is pinned, and kernels are loaded, in the first
        loss, _ = stepping.accumulate(model, [{"input_ids": ids, "labels": ids}], "lm", scale=scale)
        torch.cuda._sleep(1_000_000_000)  # half a second
        formed = torch.cuda.current_stream().record_event()
        stepping.update(model, optimizer, loss, 1e-4, 1.0, scale, meanwhile=lambda end=formed: busy.append(not end.query()))
    assert busy[1]


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> list[int]:
    """Put a NaN into the gradients of these steps; the list counts the steps."""
    count: list[int] = []
    real = session.accumulate

    def poisoned(model: Any, *rest: Any) -> Any:
        out = real(model, *rest)
        count.append(1)
        if len(count) in steps:
            next(model.parameters()).grad[0, 0] = math.nan
        return out

    monkeypatch.setattr(session, "accumulate", poisoned)
    return count


def test_a_bad_step_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2, 4})
    run = train(recipe_of(tmp_path, **{"max_steps": 5, "logging_steps": 1, "eval_steps": None}), MACHINE)
    logged = [row for row in rows(tmp_path / "out") if "loss" in row]
    assert [row["skipped"] for row in logged] == [0, 1, 1, 2, 2]
    assert [row["grad_norm"] is None for row in logged] == [False, True, False, True, False]
    assert [row["loss"] is None for row in logged] == [False, True, False, True, False]  # no NaN among the losses
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_five_bad_steps_in_a_row_stop_a_run_without_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = poison(monkeypatch, {3, 5, 6, 7, 8, 9})
    with pytest.raises(InputError, match=r"step 9: 5 gradients in a row were not finite, and no state .*; a lower optimizer.lr"):
        train(recipe_of(tmp_path, save_steps=None), MACHINE)
    assert len(count) == 9
    assert not (tmp_path / "out" / "model").exists()


# -------------------------------------------------------------------------------------------------------------- resume


def killed(recipe: Recipe, step: int) -> None:
    """A run that is killed in that step; in a process of its own."""
    real, steps = session.update, itertools.count(1)

    def update(*rest: Any) -> float:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*rest)

    session.update = update
    train(recipe, MACHINE)


def same_run(a: Path, b: Path) -> None:
    """Two finished runs are one: rows of metrics, last state and model, to the last bit."""
    assert rows(a) == rows(b)
    assert bytes_of(a / "step-20") == bytes_of(b / "step-20")
    assert bytes_of(a / "model") == bytes_of(b / "model")


def write_file(recipe: Recipe, path: Path) -> Path:

    path.write_text(dump_yaml(to_dict(recipe)))
    return path


def test_resume_after_kill_is_bitwise(tmp_path: Path, whole: Path) -> None:
    """Killed in step 14: the states of 5 and 10 are there and rows up to 12; the window of losses was half full."""
    recipe, context = recipe_of(tmp_path), multiprocessing.get_context("fork")
    run = context.Process(target=killed, args=(recipe, 14))
    run.start()
    run.join(250)
    assert run.exitcode == -signal.SIGKILL
    out = tmp_path / "out"
    assert sorted(p.name for p in out.glob("step-*")) == ["step-10", "step-5"]
    assert max(row["step"] for row in rows(out)[1:]) == 12
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # and a row cut short
    torch.manual_seed(999)  # what the process did before must not matter
    assert train(recipe, MACHINE).step == 20
    same_run(out, whole)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_saves_and_resume_goes_on(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch,
                                           number: signal.Signals) -> None:
    recipe, real = recipe_of(tmp_path), session.update

    def update(*rest: Any) -> float:
        if not (tmp_path / "out" / "step-5").exists():
            update.calls = getattr(update, "calls", 0) + 1  # type: ignore[attr-defined]
            if update.calls == 4:  # type: ignore[attr-defined]
                os.kill(os.getpid(), number)
        return real(*rest)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(session, "update", update)
        run = train(recipe, MACHINE)
    assert (run.step, run.stopped, signal.getsignal(number)) == (4, True, before)
    assert sorted(p.name for p in (tmp_path / "out").glob("step-*")) == ["step-4"]
    assert not (tmp_path / "out" / "model").exists()
    assert train(recipe, MACHINE).stopped is False
    same_run(tmp_path / "out", whole)


def test_a_signal_that_comes_while_it_begins_to_listen_leaves_nobody_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that it sets, one is heard before the last: who calls from a notebook would be ended by the next Ctrl-C."""
    from modelcenter.train.interrupt import SIGNALS

    before, real = [signal.getsignal(number) for number in SIGNALS], signal.signal

    def listen(number: Any, handler: Any) -> Any:
        found = real(number, handler)
        if number == signal.SIGINT and handler not in before:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", listen)
        with pytest.raises(KeyboardInterrupt), Interrupt():
            pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


TWICE = """
import time
from modelcenter.train.interrupt import Interrupt
with Interrupt() as interrupt:
    interrupt.begin()
    print("ready", flush=True)
    while not interrupt:
        time.sleep(0.01)
    print("asked", flush=True)
    while True:  # a signal just before a long sleep would not end it
        time.sleep(0.01)
"""


def test_a_second_signal_ends_at_once() -> None:
    command, pipe = [sys.executable, "-c", TWICE], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        for word in ("ready", "asked"):
            assert run.stdout.readline() == f"{word}\n"
            run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=250) == 128 + signal.SIGTERM
        assert "SIGTERM: finishing the step" in run.stderr.read()


@pytest.mark.usefixtures("terminal")
def test_a_terminal_that_ends_is_asked_for_the_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends SIGHUP more than once, and takes its screen along; under nohup it ends nothing."""
    ended: list[int] = []

    def gone(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, Interrupt() as interrupt:
        patch.setattr(os, "write", gone)
        patch.setattr(os, "_exit", ended.append)
        interrupt.begin()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt and not ended
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_has_nothing_to_save_ends(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """At once, with the status of the signal, a line and nothing left; and the same command goes on as if nothing had been."""
    recipe = recipe_of(tmp_path, max_steps=2, eval_steps=None, save_steps=None)

    def prepare(*rest: Any, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        raise AssertionError("it goes on")

    words, before = ["train", str(write_file(recipe, tmp_path / "r.yaml"))], signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "prepare", prepare)
        assert main(words) == 128 + number
    said = capfd.readouterr()
    assert said.err == f"\n{number.name}: ending; once more ends it now\n" and not said.out
    assert not (tmp_path / "out").exists() and signal.getsignal(number) == before
    assert main(words) == 0 and (tmp_path / "out" / "model").exists()


READING = """
import os, sys, threading
sys.path.insert(0, os.getcwd())
from modelcenter.train.interrupt import Interrupt
with Interrupt():
    import swallows
print("went on")
"""


def test_a_module_that_passes_over_an_exception_does_not_go_on(tmp_path: Path) -> None:
    """Some do while they are read; and what is raised in the middle of a C library's beginning leaves it half begun."""
    (tmp_path / "swallows.py").write_text("import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    while True: pass\n"
                                          "except BaseException:\n    pass\n")
    done = subprocess.run([sys.executable, "-c", READING], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (130, "") and done.stderr == "\nSIGINT: ending; once more ends it now\n"


def test_one_inside_another_is_asked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's word comes after the signal that the whole job was sent, by then perhaps to the outer one."""
    with Interrupt() as outer:
        with Interrupt() as inner:
            inner.begin()
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner and not outer
        assert outer


@pytest.mark.parametrize("launcher", [PARENT, TORCHRUN])
def test_a_rank_is_asked_for_its_end_once(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ends a job may tell each of its processes, of which one is the launcher, that tells the ranks: they save all the same."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv(launcher, "1")
    with Interrupt() as interrupt:
        interrupt.begin()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt and not ended
    monkeypatch.delenv(launcher)
    with Interrupt() as interrupt:
        interrupt.begin()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]


def test_a_log_that_nobody_reads_any_more_loses_nothing(tmp_path: Path) -> None:
    """`2>&1 | head`, then a signal: what it says about that goes nowhere, and the step is saved."""
    recipe = recipe_of(tmp_path, max_steps=10**6, logging_steps=1, eval_steps=None, save_steps=None)
    command = [sys.executable, "-m", "modelcenter", "train", str(write_file(recipe, tmp_path / "r.yaml"))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as run:
        assert run.stderr is not None
        while not (line := run.stderr.readline()).startswith("step 1/"):
            assert line or run.poll() is None, "it ended before the first step"
        run.stderr.close()
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=250) == 0
    assert len(list((tmp_path / "out").glob("step-*"))) == 1


FETCHING = """
import time
from modelcenter.checkpoint import download
from modelcenter.train.interrupt import Interrupt
with Interrupt(), download.under_way():
    try:
        print("ready", flush=True)  # here, or the signal comes before there is anything to tidy
        while True:  # a signal just before a long sleep would not end it
            time.sleep(0.01)
    finally:
        print("tidied", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_download_is_not_waited_for(number: signal.Signals) -> None:
    """Whoever asks for the end while weights come is not kept for an hour; and the client removes the half that it has."""
    command, pipe = [sys.executable, "-c", FETCHING], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(number)
        assert run.wait(timeout=250) in (-number, 128 + number)  # by itself, Ctrl-C is a traceback and its signal
        assert run.stdout.read() == "tidied\n"
        assert f"{number.name}: the download ends, what came whole is kept" in run.stderr.read()


def test_the_command_line_stops_with_status_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    recipe = recipe_of(tmp_path, max_steps=10**6, logging_steps=10**6, eval_steps=None, save_steps=None)
    real = session.update

    def update(*rest: Any) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest)

    monkeypatch.setattr(session, "update", update)
    assert main(["train", str(write_file(recipe, tmp_path / "r.yaml")), "--machine", "cpu"]) == 0
    said = capfd.readouterr()
    assert [state.name for state in (tmp_path / "out").glob("step-*")] == ["step-1"]
    assert "stopped after step 1 of 1000000; the same command continues" in said.err
    assert said.out == f"{tmp_path / 'out'}: step 1\n"  # no row of metrics yet, and no comma before nothing


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, max_steps=4, save_steps=2, eval_steps=None)
    train(recipe, MACHINE)
    before = rows(tmp_path / "out"), bytes_of(tmp_path / "out" / "model")
    assert train(recipe, MACHINE).step == 4
    assert (rows(tmp_path / "out"), bytes_of(tmp_path / "out" / "model")) == before


def test_resume_from_another_folder(tmp_path: Path, whole: Path) -> None:
    """From step 10 of another run's folder the rest is the same, bit for bit."""
    recipe = replace(recipe_of(tmp_path), data=load_recipe(whole / "recipe.yaml").data, resume=str(whole / "step-10"))
    train(recipe, MACHINE)
    assert bytes_of(tmp_path / "out" / "step-20") == bytes_of(whole / "step-20")
    assert rows(tmp_path / "out")[1:] == [row for row in rows(whole)[1:] if row["step"] > 10]


@pytest.mark.parametrize("given", ["link", "."])
def test_a_state_is_resumed_from_by_any_path(given: str, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose run it is of is known too: with other data it is refused."""
    (tmp_path / "link").symlink_to(whole / "step-15")
    monkeypatch.chdir(tmp_path if given == "link" else whole / "step-15")
    recipe = replace(recipe_of(tmp_path), data=load_recipe(whole / "recipe.yaml").data, resume=given)
    train(recipe, MACHINE)
    assert bytes_of(tmp_path / "out" / "step-20") == bytes_of(whole / "step-20")
    text = whole.parent / "text.txt"
    text.write_text(TEXT.replace("return", "re_urn"))
    try:
        with pytest.raises(InputError, match=r"text.txt: data: not what it was when the run began"):
            train(replace(recipe, output_dir=str(tmp_path / "other")), MACHINE)
    finally:
        text.write_text(TEXT)


def test_a_state_under_another_name_is_refused_in_one_line(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole / "step-10", tmp_path / "kept")
    with pytest.raises(InputError, match=r"kept/manifest.json: step: 10 in kept; the folder under its own name"):
        train(recipe_of(tmp_path, resume=str(tmp_path / "kept")), MACHINE)


@pytest.mark.parametrize("resume", ["never", "step-10"])
def test_what_a_run_says_goes_on_does(resume: str, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it has begun: its own recipe.yaml, and the command with what the last line adds to it."""
    given = resume if resume == "never" else str(whole / resume)
    recipe = replace(recipe_of(tmp_path), data=load_recipe(whole / "recipe.yaml").data, resume=given)
    real = Session.log

    def stop(self: Session, step: Any) -> None:
        real(self, step)
        if self.at.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "log", stop)
        assert train(recipe, MACHINE).stopped
    assert "stopped after step 12 of 20; the same command with resume=auto continues\n" in capsys.readouterr().err
    with pytest.raises(InputError, match="resume=auto"):
        train(recipe, MACHINE)
    assert train(tmp_path / "out" / "recipe.yaml", MACHINE).step == 20
    assert bytes_of(tmp_path / "out" / "step-20") == bytes_of(whole / "step-20")


def test_a_run_whose_states_are_all_broken_does_not_begin_again_by_itself(tmp_path: Path, capsys: Any) -> None:
    recipe = recipe_of(tmp_path, max_steps=2, save_steps=1, eval_steps=None)
    train(recipe, MACHINE)
    out = tmp_path / "out"
    for state in ("step-1", "step-2"):
        (out / state / "model.safetensors").write_bytes(b"x")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    capsys.readouterr()
    with pytest.raises(InputError, match="out: resume: auto, and step-2, step-1 broken, as said above; move them away"):
        train(recipe, MACHINE)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(f"step-{n}/model.safetensors: 1 bytes" in line for n, line in zip((2, 1), said, strict=True))
    for state in ("step-1", "step-2"):
        (out / state).rename(tmp_path / state)
    assert train(recipe, MACHINE).step == 2


def test_the_random_states_of_torch_and_python_come_back(tmp_path: Path) -> None:
    model = tiny()
    optimizer = build_optimizer(model, OptimizerConfig())
    torch.manual_seed(3), random.seed(4)
    path = save(tmp_path, Position(step=1), model, optimizer, None)
    wanted = torch.rand(3).tolist(), random.random(), random.gauss(0, 1)
    torch.manual_seed(5), random.seed(6)
    assert restore(path, model, optimizer) == Position(step=1)
    assert (torch.rand(3).tolist(), random.random(), random.gauss(0, 1)) == wanted


def test_random_states_of_devices_that_are_not_here_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the other GPUs of a machine that wrote the state, on a machine of one."""
    model, real = tiny(), states.random_states
    optimizer, asked = build_optimizer(model, OptimizerConfig()), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(states, "random_states", lambda: {**real(), "cuda:77": torch.zeros(16, dtype=torch.uint8)})
        path = save(tmp_path, Position(step=1), model, optimizer, None)
    here = torch.accelerator.current_accelerator()
    monkeypatch.setattr(torch, "get_device_module", asked.append)
    if here is None:
        assert restore(path, model, optimizer) == Position(step=1) and not asked


@pytest.mark.parametrize("mesh", [{"replicate": 2, "fsdp": 1}, {"replicate": 2}])
def test_a_side_of_one_makes_no_other_mesh(mesh: dict[str, int]) -> None:
    """Whether it was written or is there now; else ranks would draw anew."""
    torch.manual_seed(3)
    then = {"0/cpu": torch.get_rng_state()}
    wanted = torch.rand(3).tolist()
    torch.manual_seed(5)
    saved: dict[str, Any] = {"python": random.getstate(), "mesh": {"replicate": 2}}
    states.restore_random(then, saved, 1, SimpleNamespace(rank=0, size=2, degrees=mesh))  # type: ignore[arg-type]  # what is asked
    assert torch.rand(3).tolist() == wanted


# ---------------------------------------------------------------------------------------------------------- the folder


def test_what_a_run_leaves(whole: Path) -> None:
    assert sorted(p.name for p in whole.iterdir()) == [
        ".lock", "environment.json", "loss.png", "machine.yaml", "metrics.jsonl", "model", "recipe.yaml", "step-10", "step-15",
        "step-20", "step-5", "summary.md",
    ]  # fmt: skip
    first, *rest = rows(whole)
    assert first["environment"]["precision"] == "fp32" and first["environment"]["steps"] == 20
    losses, evaluations = [r for r in rest if "loss" in r], [r for r in rest if "eval_loss" in r]
    assert [r["step"] for r in losses] == [3, 6, 9, 12, 15, 18, 20]
    assert [r["step"] for r in evaluations] == [10, 20]
    assert losses[-1]["loss"] < losses[0]["loss"] - 0.5
    assert losses[-1]["tokens"] == 20 * 4 * 16
    assert evaluations[-1]["best_eval_loss"] == min(r["eval_loss"] for r in evaluations)
    assert evaluations[-1]["eval_perplexity"] == pytest.approx(math.exp(evaluations[-1]["eval_loss"]))
    resolved = load_recipe(whole / "recipe.yaml")
    assert (resolved.precision, resolved.task, resolved.micro_batch) == ("fp32", "lm", 2)


@pytest.mark.parametrize(
    ("device", "shape", "precision", "gigabytes", "rows"),
    [
        ("cuda", (768, 12), "bf16", 11, 16), ("cuda", (768, 12), "bf16", 24, 32), ("cuda", (768, 12), "bf16", 80, 64),
        ("cuda", (768, 12), "fp32", 80, 16), ("cuda", (1024, 24), "bf16", 80, 32), ("cuda", (1024, 24), "bf16", 141, 64),
        ("cuda", (1600, 48), "bf16", 80, 16), ("cuda", (256, 12), "fp32", 11, 48), ("cuda", (256, 12), "bf16", 80, 48),
        ("cpu", (256, 12), "bf16", 80, 2),
    ],
)  # fmt: skip
def test_how_many_tokens_a_forward_has(device: str, shape: tuple[int, int], precision: str, gigabytes: int, rows: int,
                                       tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 tokens of 768 hidden states are as large as 24,576 of 256, and 32,768 want memory for twelve layers."""
    monkeypatch.setattr("modelcenter.train.resolve.device_of", lambda machine: torch.device(device))
    monkeypatch.setattr("modelcenter.train.resolve.memory_of", lambda device: (0, gigabytes * 10**9))
    config = {**TINY, "dim": shape[0], "layers": shape[1], "positions": 512}
    recipe = recipe_of(tmp_path, batch=192, micro_batch=None, precision=precision, config=config, **{"data.seq_len": 512})
    assert resolve(recipe, Machine(device=device))[0].micro_batch == rows


@pytest.mark.parametrize(
    ("batch", "micro", "shares", "said"),
    [(127, 1, 1, "batch: 127, which divides into forwards of 1 sequence alone; batch=128 has forwards of 16"),
     (34, 2, 1, "batch: 34, which divides into forwards of 2 sequences alone; batch=48 has forwards of 16"),
     (127, 1, 16, "batch: 127, which divides into forwards of 1 sequence alone; batch=128 has forwards of 8"),
     (128, 16, 1, ""), (100, 10, 1, ""), (7, 7, 1, ""), (34, 1, 1, ""), (127, 1, 127, "")],
)  # fmt: skip
def test_a_batch_with_few_divisors_is_said(batch: int, micro: int, shares: int, said: str) -> None:
    """Where the micro-batch is their largest and far below what a forward may have: not where somebody chose a smaller one."""
    assert few_divisors(batch, micro, 16, shares) == [said] * bool(said)


def test_the_model_opens_in_transformers(whole: Path) -> None:
    theirs = transformers.GPT2LMHeadModel.from_pretrained(whole / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole / "model")
    ours, text = mc.load(str(whole / "model")), "def f7(x):"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert ids[0].tolist() == mc.load_tokenizer(whole / "model").encode(text)
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-5
    assert theirs.config.eos_token_id is None  # a tokenizer of characters has none, and 50256 is no word of it


def test_a_pretrained_model_goes_on_in_training_mode(tmp_path: Path, whole: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """What `load` gives is in evaluation mode, and an evaluation in the middle switches dropout off."""
    changes = {"model": str(whole / "model"), "tokenizer": None, "init": "pretrained", "config": {}, "save_steps": None}
    modes, real = [], session.accumulate

    def spy(model: Any, *rest: Any) -> Any:
        modes.append(all(module.training for module in model.modules()))
        return real(model, *rest)

    monkeypatch.setattr(session, "accumulate", spy)
    train(recipe_of(tmp_path, **changes, **{"max_steps": 4, "eval_steps": 2, "logging_steps": 1}), MACHINE)
    assert modes == [True] * 4
    assert rows(tmp_path / "out")[1]["loss"] < 2.7  # where the other run ended, not at the log of 25 words, 3.2


@pytest.mark.parametrize(("change", "message"), [
    ({"optimizer.lr": 0.5}, r"recipe.yaml: optimizer.lr: 0.01 there, 0.5 here; the same recipe, or another"),
    ({"seed": 3}, "recipe.yaml: seed: 0 there, 3 here"),
    ({"max_steps": 40}, "max_steps: 20 there, 40 here; the same .*; schedule.name=cosine goes by the number of steps"),
    ({"resume": "never"}, r"output_dir: holds a run already \(recipe.yaml\); resume=auto goes on"),
    ({"resume": "nowhere"}, r"resume: .*nowhere, but step-20 is here"),
])  # fmt: skip
def test_another_runs_folder_is_refused(whole: Path, change: dict[str, Any], message: str) -> None:
    before = bytes_of(whole / "model"), (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=message):
        train(recipe_of(whole.parent, **change), MACHINE)
    assert before == (bytes_of(whole / "model"), (whole / "metrics.jsonl").read_bytes())


def test_what_is_watched_may_change_and_a_constant_schedule_may_go_on(tmp_path: Path) -> None:
    base = {"schedule.name": "constant", "max_steps": 3, "save_steps": 3, "eval_steps": None}
    train(recipe_of(tmp_path, **base), MACHINE)
    assert {"logging_steps", "save_steps"} <= set(WATCHING)
    longer = recipe_of(tmp_path, **{**base, "max_steps": 6, "logging_steps": 1})
    assert train(longer, MACHINE).step == 6
    assert [row["step"] for row in rows(tmp_path / "out") if "loss" in row] == [3, 4, 5, 6]


def test_a_run_ends_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With as many steps as are done it is judged and written; fewer would be another run's, and are refused, in epochs too."""
    base = {"schedule.name": "constant", "max_steps": 6, "save_steps": 3, "eval_steps": None}
    real = Session.log

    def stop(self: Session, step: Any) -> None:
        real(self, step)
        if self.at.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "log", stop)
        assert train(recipe_of(tmp_path, **base), MACHINE).stopped
    for fewer, said in ({"max_steps": 3}, "max_steps: 3 steps"), ({"num_epochs": 0.04}, "num_epochs: 0.04, which are 3 steps"):
        with pytest.raises(InputError, match=rf"^{said}, and .*step-4 has done more; 4 steps end the run there"):
            train(recipe_of(tmp_path, **{**base, **fewer}), MACHINE)
    assert "max_steps: 6" in (tmp_path / "out" / "recipe.yaml").read_text()
    for _ in range(2):  # the second time everything is there
        run = train(recipe_of(tmp_path, **{**base, "max_steps": 4}), MACHINE)
        assert (run.step, run.stopped) == (4, False) and (tmp_path / "out" / "model" / "model.safetensors").is_file()
        assert "step 4 of 4, the last: no training is left to do" in capsys.readouterr().err
        assert [row["step"] for row in rows(tmp_path / "out") if "eval_loss" in row] == [4]


@pytest.mark.parametrize("objective", ["lm", "contrastive"])
def test_what_memory_asks_for_may_change(tmp_path: Path, objective: str) -> None:
    """A smaller micro-batch goes on with a run that ran out of memory; not where the loss is of the whole forward."""
    made = {"objective": "contrastive", "data.text_key": "a", "data.pair_key": "b", "data.eval_fraction": 0.0,
            "data.path": str(tmp_path / "pairs.jsonl")}  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"a": f"the cat {n}", "b": f"a mat {n}"}) + "\n" for n in range(16)))
    more = {} if objective == "lm" else made
    base = {"max_steps": 4, "save_steps": 2, "eval_steps": None, "batch": 8, "micro_batch": 8, **more}
    recipe = recipe_of(tmp_path, **base)
    real = session.accumulate

    def full(*rest: Any) -> Any:
        if (tmp_path / "out" / "step-2").exists():
            raise RuntimeError("out of memory")
        return real(*rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "accumulate", full)
        with pytest.raises(InputError) as error:
            train(recipe, MACHINE)
    advice = str(error.value).partition("; ")[2].split(" or ")
    assert advice == [*(["micro_batch=4"] if objective == "lm" else []), "machine.recompute=full"]  # no other key may change now
    smaller = recipe_of(tmp_path, **{**base, "micro_batch": 4})
    if objective == "lm":
        assert train(smaller, MACHINE).step == 4
    else:
        with pytest.raises(InputError, match="micro_batch: 8 there, 4 here"):
            train(smaller, MACHINE)


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, **{"output_dir": str(tmp_path / "a" / "b"), "data.seq_len": 64})
    with pytest.raises(InputError, match=r"data.seq_len: 64; at most 32, the model's positions"):
        train(recipe, MACHINE)
    assert not (tmp_path / "a").exists()


def test_a_model_of_few_positions_cuts_texts_where_no_length_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default is the model's, which is said and kept; a length of one's own is refused instead (above)."""
    recipe = recipe_of(tmp_path, **{"max_steps": 1, "schedule.warmup_steps": 0, "data.seq_len": DataConfig.seq_len})
    train(recipe, MACHINE)
    assert "at most 32 tokens each, as many as the model has positions" in capsys.readouterr().err
    assert "seq_len: 32" in (tmp_path / "out" / "recipe.yaml").read_text()
    folder = replace(recipe, model=str(tmp_path / "out" / "model"), init="pretrained", config={}, tokenizer=None)
    assert [resolve(r, MACHINE)[0].data.seq_len for r in (recipe, folder)] == [32, 32]
    assert resolve(replace(recipe, model="nobody/has-this", init="pretrained"), MACHINE)[0].data.seq_len == DataConfig.seq_len


# ------------------------------------------------------------------------------------------------------------- numbers


def test_losses_equal_transformers(tmp_path: Path) -> None:
    """20 steps over the same weights and batches: GPT2LMHeadModel with torch's AdamW and transformers' schedule."""
    changes = {"config": {**TINY, **STILL}, "logging_steps": 1, "eval_steps": None, "save_steps": None}
    optimizer = {"optimizer.weight_decay": 0.1, "optimizer.lr": 3e-3}
    recipe = recipe_of(tmp_path, **changes, **optimizer, **{"data.eval_fraction": 0.0})
    seen: list[Any] = []
    real = session.accumulate
    with pytest.MonkeyPatch.context() as patch:
        def spy(model: Any, batches: Any, *rest: Any) -> Any:
            if not seen:
                model.save_pretrained(tmp_path / "start")
            seen.append(torch.cat([batch["input_ids"] for batch in batches]))
            return real(model, batches, *rest)

        patch.setattr(session, "accumulate", spy)
        train(recipe, MACHINE)
    ours = [row["loss"] for row in rows(tmp_path / "out") if "loss" in row]

    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "start").train()
    plain = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in theirs.parameters() if p.ndim > 1]}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    schedule = transformers.get_cosine_schedule_with_warmup(adamw, 3, 20)
    losses = []
    for ids in seen:
        loss = theirs(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        losses.append(float(loss.detach()))
    assert len(ours) == 20 and losses[-1] < losses[0] - 0.3
    assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < 1e-4


def test_evaluation_is_a_mean_over_tokens() -> None:
    model, batch = tiny(dtype=torch.float64), uneven()
    model.train()
    results = evaluate(model, cut(batch, 4), "lm")
    assert model.training
    assert results["eval_loss"] == pytest.approx(float(model(**batch).loss.detach()), abs=1e-12)
    assert results["eval_targets"] == 24
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))


def test_evaluation_counts_what_is_right() -> None:
    model, ids = tiny("classify"), uneven()["input_ids"]
    with torch.no_grad():
        best = model.eval()(ids).logits.argmax(-1)
    labels = torch.stack([best[0], 1 - best[1], best[2], torch.tensor(-100)])
    results = evaluate(model, cut({"input_ids": ids, "labels": labels}, 2), "classify")
    assert results["eval_accuracy"] == pytest.approx(2 / 3) and not model.training


def test_dropout_is_on_in_training_and_off_in_evaluation(tmp_path: Path) -> None:
    model, batch = tiny(dropout=0.5), [uneven()]
    assert accumulate(model, batch, "lm") != accumulate(model, batch, "lm")
    assert evaluate(model, batch, "lm") == evaluate(model, batch, "lm")


def test_bf16_computes_in_bf16_over_fp32_weights(tmp_path: Path) -> None:
    changes = {"eval_steps": None, "save_steps": None, "max_steps": 6, "logging_steps": 1, "config": {**TINY, **STILL}}
    losses = {}
    for precision in ("fp32", "bf16"):
        (folder := tmp_path / precision).mkdir()
        run = train(recipe_of(folder, precision=precision, **changes), MACHINE)
        assert {p.dtype for p in run.model.parameters()} == {torch.float32}
        losses[precision] = [row["loss"] for row in rows(folder / "out") if "loss" in row]
    gaps = [abs(a - b) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)]
    assert 0 < max(gaps) < 0.05


OBJECTIVES = {
    "classify": ("gpt2", TINY, "char", {"text": "f(x)", "label": "yes"}, "eval_accuracy"),
    "mlm": ("bert-base-uncased", TINY, "roberta:300", {"text": "f of x is y"}, "eval_accuracy"),
    "seq2seq": ("t5-small", {"dim": 32, "hidden": 64, "heads": 2, "head_dim": 16, "layers": 2, "decoder_layers": 2},
                "roberta:300", {"source": "f of x", "target": "y"}, "eval_perplexity"),
    "regress": ("bert-base-uncased", TINY, "roberta:300", {"text": "f of x", "label": 0.5}, "eval_pearson"),
    "qa": ("bert-base-uncased", TINY, "roberta:300", {"question": "x?", "answers": {"text": ["y"], "answer_start": [8]}},
           "eval_squad_f1"),
    "chat": ("gpt2", TINY, "roberta:300", {"conversations": [{"from": "human", "value": "f?"}, {"from": "gpt", "value": "y"}]},
             "eval_perplexity"),
    "contrastive": ("bert-base-uncased", TINY, "roberta:300", {"pair": "f is"}, "eval_accuracy"),
    "similarity": ("bert-base-uncased", TINY, "roberta:300", {"pair": "x is", "label": 0.5}, "eval_spearman"),
    "fim": ("gpt2", TINY, "fim:300", {"text": "f of x is y"}, "eval_perplexity"),
    "prefix_lm": ("gpt2", TINY, "bpe:300", {"text": "f of x is y"}, "eval_perplexity"),
    "multilabel": ("bert-base-uncased", TINY, "roberta:300", {}, "eval_f1_micro"),
    "tag": ("bert-base-uncased", TINY, "roberta:300", {"tokens": ["f", "of", "x"], "tags": ["B-F", "O", "B-X"]}, "eval_span_f1"),
}  # fmt: skip


def test_no_objective_is_without_a_run() -> None:
    assert set(objectives()) == {*OBJECTIVES, "lm", "span", "choice", "coreference"}  # these have runs of their own or of a recipe


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains(tmp_path: Path, objective: str) -> None:
    model, config, tokenizer, record, measure = OBJECTIVES[objective]
    pairs: dict[str, Any] = {}
    records = [{**record, "text": f"{n} {record.get('text')}"} for n in range(40)]
    if objective == "classify":
        records = [{**r, "label": "yes" if n % 2 else "no"} for n, r in enumerate(records)]
    if objective == "multilabel":
        records = [{**r, "label": ["odd", "three"][: n % 3]} for n, r in enumerate(records)]
    if objective in ("contrastive", "similarity"):
        records = [{**r, "pair": f"{n} {r['pair']}", "label": n / 40} for n, r in enumerate(records)]
        pairs = {"data.pair_key": "pair"}
    if objective == "qa":
        records = [{**r, "context": "f of x, y."} for r in records]
    if objective == "regress":
        records = [{**r, "text": "up up" if n % 3 else "down", "label": float(n % 3)} for n, r in enumerate(records)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    changes = {"objective": objective, "model": model, "config": config, "tokenizer": tokenizer, "save_steps": None}
    pairs |= {"data.stride": 2} if objective == "qa" else {}
    changes |= {**pairs, **({"data.chat_template": "plain", "data.seq_len": 32} if objective == "chat" else {})}
    changes |= {"batch": 36, "micro_batch": 36, "logging_steps": 1, "optimizer.lr": 3e-3}  # all in each step: losses of one thing
    run = train(recipe_of(tmp_path, **changes, **{"data.path": str(tmp_path / "data.jsonl"), "max_steps": 8}), MACHINE)
    losses = [row["loss"] for row in rows(tmp_path / "out") if "loss" in row]
    assert min(losses[-3:]) < losses[0]  # one step may be too long
    assert run.metrics["loss"] > 0 and measure in run.metrics and run.metrics["skipped"] == 0
    task = find_objective(objective).task
    assert mc.load(str(tmp_path / "out" / "model"), task=task).load_report.new == []


@pytest.mark.parametrize("model", ["bert-base-uncased", "gpt2"])
def test_a_model_of_pairs_is_asked_in_transformers_with_what_it_was_trained_with(tmp_path: Path, model: str) -> None:
    """Whose tokenizer gives segments to BERT, and none to GPT-2, which would take them for words."""
    (tmp_path / "bert").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words) + "\n")
    lines = [json.dumps({"text": "a b", "pair": "c d e"[: 1 + 2 * (n % 3)], "label": "yes" if n % 2 else "no"}) for n in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    changes = {"objective": "classify", "model": model, "tokenizer": str(tmp_path / "bert"), "data.pair_key": "pair"}
    train(recipe_of(tmp_path, **changes, **{"data.path": str(tmp_path / "data.jsonl"), "max_steps": 1}), MACHINE)
    folder = tmp_path / "out" / "model"
    asked = transformers.AutoTokenizer.from_pretrained(folder)("a b", "c d", return_tensors="pt")
    assert ("token_type_ids" in asked) == (model != "gpt2")
    recipe, device = resolve(recipe_of(tmp_path, **changes, **{"data.path": str(tmp_path / "data.jsonl")}), MACHINE)
    batch = next(prepare(recipe, MACHINE, device).loader.steps())[1][0]
    assert ("token_type_ids" in batch) == ("token_type_ids" in asked)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids, segments = mc.load_tokenizer(folder).encode_pair("a b", "c d")
    given = {} if model == "gpt2" else {"token_type_ids": torch.tensor([segments])}
    assert torch.allclose(mc.load(folder)(torch.tensor([ids]), **given).logits, theirs(**asked).logits, atol=1e-6)


def test_labels_that_a_model_has_learned_keep_their_places(tmp_path: Path) -> None:
    """Whatever the alphabet says: a classifier is judged, and goes on, by its own order. Other names are said."""
    model = mc.build("bert-base-uncased", config={**TINY, "vocab": 300}, task="classify", id2label={0: "pos", 1: "neg"})
    with torch.no_grad():
        model.head.out.bias.copy_(torch.tensor([9.0, -9.0]))
    model.save_pretrained(tmp_path / "model")
    open_tokenizer("roberta:300", [TEXT]).save(tmp_path / "model")
    changes = {"objective": "classify", "model": str(tmp_path / "model"), "init": "pretrained", "config": {}, "tokenizer": None,
               "data.path": str(tmp_path / "data.jsonl")}  # fmt: skip
    for names, right in ((("neg", "pos"), 0.75), (("bad", "good"), 0.25)):
        lines = [json.dumps({"text": f"f {n}", "label": names[n % 4 > 0]}) + "\n" for n in range(40)]
        (tmp_path / "data.jsonl").write_text("".join(lines))
        recipe, device = resolve(recipe_of(tmp_path, **changes, **{"data.eval_path": str(tmp_path / "data.jsonl")}), MACHINE)
        setup = prepare(recipe, MACHINE, device)
        assert setup.evaluation is not None and setup.evaluation(setup.model)["eval_accuracy"] == right
        assert any("have learned pos, neg" in line for line in setup.lines) == ("bad" in names)
    assert setup.model.config.labels == ("bad", "good")


@pytest.mark.parametrize("model", ["gpt2", "llama-7b", "bloom-560m"])
def test_a_classifier_by_the_last_token_takes_texts_of_any_length_in_transformers(tmp_path: Path, model: str) -> None:
    """Which finds the last token by what config.json says pads."""
    transformers = pytest.importorskip("transformers")
    lines = [json.dumps({"text": f"{n} f of x", "label": "yes" if n % 2 else "no"}) + "\n" for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    sizes = {name: size for name, size in TINY.items() if model == "gpt2" or name != "positions"}
    changes = {"objective": "classify", "model": model, "config": sizes, "tokenizer": "roberta:300", "max_steps": 2}
    train(recipe_of(tmp_path, **changes, **{"data.path": str(tmp_path / "data.jsonl")}), MACHINE)
    ours, raw = mc.load(tmp_path / "out" / "model"), mc.load_tokenizer(tmp_path / "out" / "model")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").eval()
    short, long = raw.encode("f"), raw.encode("12 f of x is y")
    assert theirs.config.pad_token_id is not None and len(short) < len(long)
    ids = torch.tensor([short + [theirs.config.pad_token_id] * (len(long) - len(short)), long])
    mask = torch.tensor([[1] * len(short) + [0] * (len(long) - len(short)), [1] * len(long)])
    assert ours.task == "classify"
    assert torch.allclose(ours(ids, mask).logits, theirs(ids, attention_mask=mask).logits, atol=1e-5)
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


@pytest.mark.parametrize(("how", "said"), [("sorted", True), ("packed", True), ("mixed", False), ("rare", False), ("apart", False)])
def test_data_in_the_order_of_its_labels_is_told_of(tmp_path: Path, how: str, said: bool) -> None:
    """What is held out of it, the last part, would judge one class alone. A rare one is absent by chance."""
    kinds = {"mixed": "ab" * 30, "rare": "c" + "ab" * 30}.get(how, "a" * 30 + "b" * 30)
    files = [tmp_path / f"{name}.jsonl" for name in ("data", "more")]
    for file in files:
        file.write_text("".join(json.dumps({"text": f"{n} f of x", "label": kind}) + "\n" for n, kind in enumerate(kinds)))
    changes = {"objective": "classify", "tokenizer": "roberta:300", "data.path": str(files[0]), "data.packing": how == "packed",
               "data.eval_path": str(files[1]) if how == "apart" else None}  # fmt: skip
    recipe, device = resolve(recipe_of(tmp_path, **changes), MACHINE)
    lines = prepare(recipe, MACHINE, device).lines
    assert not any("all from" in line for line in lines)
    both = replace(recipe.data, path=(str(files[0]), str(files[1])), eval_path=None)
    told = f"held out: all from {files[1]}, the end of data.path's list; for other data give data.eval_path"
    assert how == "apart" or told in prepare(replace(recipe, data=both), MACHINE, device).lines
    wanted = "held out: the last 6 have no a: data.path seems sorted by its labels; shuffle it, or give data.eval_path"
    assert [line for line in lines if line.startswith("held out")] == [wanted] * said


def test_splits_that_are_all_trained_on_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, told in (("train", []), ("test", ["data.path: train.jsonl and test.jsonl are all trained on; give data.path="])):
        (tmp_path / "in" / f"{name}.jsonl").write_text('{"text": "some text"}\n' * 9)
        recipe, device = resolve(recipe_of(tmp_path, **{"data.path": str(tmp_path / "in")}), MACHINE)
        said = [line for line in prepare(recipe, MACHINE, device).lines if "all trained on" in line]
        assert [line.partition(str(tmp_path))[0] for line in said] == told


def test_an_evaluation_on_what_is_trained_on_is_told_of(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "some text"}\n' * 9)
    for held, told in ((None, []), ("b.jsonl", []), ("../" + tmp_path.name + "/a.jsonl", ["evaluation: on 1 file of data.path ("])):
        changes = {"data.path": f"{tmp_path}/a.jsonl", "data.eval_path": held and f"{tmp_path}/{held}"}
        recipe, device = resolve(recipe_of(tmp_path, **changes), MACHINE)
        said = [line for line in prepare(recipe, MACHINE, device).lines if line.startswith("evaluation: on")]
        assert [line.partition("/")[0] for line in said] == told


@pytest.mark.parametrize(("objective", "many", "said"), [
    ("classify", 2, "labels: 2: a, b"), ("classify", 14, "labels: 14: a, b, c, d, e, f, g, h, i, j, k, l, ..."), ("lm", 2, ""),
])  # fmt: skip
def test_labels_are_said_before_a_run(tmp_path: Path, objective: str, many: int, said: str) -> None:
    """Where another column was meant, that is seen at once."""
    rows = [{"text": f"{n} f of x", "label": "abcdefghijklmn"[n % many]} for n in range(42)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"objective": objective, "tokenizer": "roberta:300", "data.path": str(tmp_path / "data.jsonl")}
    recipe, device = resolve(recipe_of(tmp_path, **changes), MACHINE)
    lines = prepare(recipe, MACHINE, device).lines
    assert [line for line in lines if line.startswith("labels: ")] == [said] * bool(said)
    assert not said or (lines[1].startswith("data: ") and lines[2] == said)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_an_adapter_on_a_classifier_says_what_pads(tmp_path: Path) -> None:
    """Of a base that does not: here, merged, and in peft, whose base is told so by the config.json beside the adapter."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    for name in ("base", "lora"):
        (tmp_path / name).mkdir()
    train(recipe_of(tmp_path / "base", config=TINY, tokenizer="roberta:300", max_steps=1), MACHINE)
    base, folder = tmp_path / "base" / "out" / "model", tmp_path / "lora" / "out" / "model"
    said = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({key: value for key, value in said.items() if key != "pad_token_id"}))
    lines = [json.dumps({"text": f"{n} f of x", "label": "yes" if n % 2 else "no"}) + "\n" for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    changes = {"objective": "classify", "model": str(base), "init": "pretrained", "tokenizer": None, "config": {}, "max_steps": 2,
               "data.path": str(tmp_path / "data.jsonl"), "adapter.name": "lora"}  # fmt: skip
    train(recipe_of(tmp_path / "lora", **changes), MACHINE)
    pad = mc.load_tokenizer(folder).pad_id
    ours = mc.load(folder)
    assert ours.config.get("pad_token_id") == pad
    config = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(base, config=config)
    theirs = peft.PeftModel.from_pretrained(theirs, str(folder)).eval()
    ids, mask = torch.tensor([[5, 6, pad, pad], [7, 8, 9, 10]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.allclose(ours(ids, mask).logits, theirs(ids, attention_mask=mask).logits, atol=1e-5)


def test_span_corruption_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tokenizer that has sentinels; the sample shows what stands behind each."""
    tokenizer = open_tokenizer("roberta:300", [TEXT])
    tokenizer.raw.add_special_tokens([f"<extra_id_{k}>" for k in range(10)])
    tokenizer.save(tmp_path / "tokenizer")
    changes = {"objective": "span", "model": "t5-small", "config": OBJECTIVES["seq2seq"][1], "data.seq_len": 32, "save_steps": None}
    run = train(recipe_of(tmp_path, **changes, tokenizer=str(tmp_path / "tokenizer"), max_steps=12), MACHINE)
    losses = [row["loss"] for row in rows(tmp_path / "out") if "loss" in row]
    assert losses[-1] < losses[0] - 0.3 and "eval_perplexity" in run.metrics
    source, target = capsys.readouterr().err.partition("sample (")[2].split("  target: [[")
    marks = [re.findall(r"<extra_id_\d+>", side) for side in (source, target.partition("]]")[0])]
    assert marks[0] == marks[1] != []


# ----------------------------------------------------------------------------------------------------------- reporting


def test_metrics_drop_what_comes_after_the_state(tmp_path: Path) -> None:
    first = Metrics(tmp_path, {"torch": "x"})
    for step in range(1, 6):
        first.write({"step": step, "loss": math.nan if step == 2 else 1.0 / step})
    first.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[:-7])  # the last row is cut short
    second = Metrics(tmp_path, {"torch": "another"}, step=3)
    second.write({"step": 4, "loss": 0.0})
    second.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kept[0] == {"environment": {"torch": "x"}}
    assert [(row["step"], row["loss"]) for row in kept[1:]] == [(1, 1.0), (2, None), (3, 1 / 3), (4, 0.0)]


def test_the_schedule_reaches_the_optimizer(whole: Path) -> None:
    from modelcenter.optim.schedules import lr_factor

    config = ScheduleConfig(name="cosine", warmup_steps=3)
    for row in rows(whole):
        if "lr" in row:
            assert row["lr"] == 1e-2 * lr_factor(config, row["step"] - 1, 20)  # step n was made at the rate of n - 1


# ---- what else a recipe can ask of the loop ---------------------------------------------------------------------------

MEANS = {
    "ema": {"ema": 0.9}, "adafactor": {"optimizer.name": "adafactor"}, "lion": {"optimizer.name": "lion", "optimizer.lr": 1e-3},
    "muon": {"optimizer.name": "muon"}, "layers": {"optimizer.layer_decay": 0.7, "freeze": ["transformer.wpe"]},
    "loss": {"loss.label_smoothing": 0.1, "loss.z_loss": 1e-3}, "wsd": {"schedule.name": "wsd", "schedule.decay_steps": 8},
}  # fmt: skip


@pytest.mark.parametrize("changes", MEANS.values(), ids=list(MEANS))
def test_every_means_learns_and_resumes_to_the_bit(changes: dict[str, Any], tmp_path: Path, whole: Path) -> None:
    (tmp_path / "a").mkdir()
    run = train(recipe_of(tmp_path / "a", **changes), MACHINE)
    found = [row["eval_loss"] for row in rows(tmp_path / "a" / "out") if "eval_loss" in row]
    usual = [row["eval_loss"] for row in rows(whole) if "eval_loss" in row]
    assert found != usual and found[-1] < found[0]
    state, model = bytes_of(tmp_path / "a" / "out" / "step-20"), sha256(model_file(tmp_path / "a")).hexdigest()
    for name in ("step-15", "step-20", "model"):
        shutil.rmtree(tmp_path / "a" / "out" / name)
    train(recipe_of(tmp_path / "a", **changes), MACHINE)
    assert bytes_of(tmp_path / "a" / "out" / "step-20") == state
    assert sha256(model_file(tmp_path / "a")).hexdigest() == model and run.step == 20


def model_file(folder: Path) -> bytes:
    return (folder / "out" / "model" / "model.safetensors").read_bytes()


def test_averaged_weights_are_evaluated_and_written(tmp_path: Path, whole: Path) -> None:
    """Training is that of a run without; what is judged and written is the average."""
    run = train(recipe_of(tmp_path, ema=0.9), MACHINE)
    for step in (5, 20):
        raw, before = (load_file(f / f"step-{step}" / "model.safetensors") for f in (tmp_path / "out", whole))
        assert all(torch.equal(raw[n], before[n]) for n in before)
    average = load_file(tmp_path / "out" / "step-20" / "ema.safetensors")
    written = mc.load(tmp_path / "out" / "model")
    for name, p in written.named_parameters():
        assert torch.equal(p, average[name]) and torch.equal(p, run.model.get_parameter(name)) and not torch.equal(p, raw[name])
    judge = prepare(*resolved(tmp_path)).evaluation
    assert judge is not None
    found = judge(written)["eval_loss"]
    assert found == pytest.approx(run.metrics["eval_loss"], rel=1e-6)
    with pytest.raises(InputError, match=r"recipe\.yaml: ema: 0\.9 there, None here"):
        train(recipe_of(tmp_path), MACHINE)


def resolved(folder: Path) -> tuple[Recipe, Machine, torch.device]:
    recipe, device = resolve(recipe_of(folder, ema=0.9), MACHINE)
    return recipe, MACHINE, device


@pytest.mark.parametrize("task", ["lm", "classify"])
def test_label_smoothing_equals_transformers(task: str) -> None:
    """Loss and gradients of transformers' own LabelSmoother; evaluation is without."""
    from transformers.trainer_pt_utils import LabelSmoother

    ours, args = tiny(task, torch.float64), uneven()
    if task == "classify":
        args = {"input_ids": args["input_ids"], "labels": torch.tensor([0, 1, -100, 1])}
    theirs = copy.deepcopy(ours)
    ours.head.smoothing = 0.3
    loss = ours(**args).loss
    loss.backward()
    outputs = {"logits": theirs(**{k: v for k, v in args.items() if k != "labels"}).logits}
    wanted = LabelSmoother(epsilon=0.3)(outputs, args["labels"], shift_labels=task == "lm")
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)  # theirs is summed in fp32
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=1e-9)
    assert not torch.isclose(ours.eval()(**args).loss, loss)
    torch.testing.assert_close(ours(**args).loss, theirs.eval()(**args).loss)


@pytest.mark.parametrize("items", [None, 5])
def test_r_drop_is_torchs_formula(items: int | None) -> None:
    """The mean cross entropy of both passes and the mean of their divergences, of the rows that have a label, and its gradients;
    evaluation is without."""
    ours = mc.build("bert-base-uncased", config={**TINY_BERT, "dropout": 0.3}, task="classify", dtype=torch.float64).train()
    with torch.no_grad():
        ours.head.out.weight.mul_(100)
    ids = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    args = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, -100, 1])}
    theirs, count = copy.deepcopy(ours), items or 3

    torch.manual_seed(7)
    logits = theirs(**{name: torch.cat((value, value)) for name, value in args.items()}).logits
    first, second = logits.log_softmax(-1).chunk(2)
    real = args["labels"] != -100
    apart = [F.kl_div(q[real], p[real], log_target=True, reduction="sum") for p, q in ((first, second), (second, first))]
    entropies = [F.cross_entropy(p, args["labels"], label_smoothing=0.1, reduction="sum") for p in (first, second)]
    wanted = (sum(entropies) / 2 + 0.7 * sum(apart) / 2) / count
    wanted.backward()
    assert sum(apart) > 0.01

    ours.head.r_drop, ours.head.smoothing = 0.7, 0.1
    torch.manual_seed(7)
    out = ours(**args, num_items_in_batch=items)
    out.loss.backward()
    torch.testing.assert_close(out.loss, wanted)
    torch.testing.assert_close(out.logits, logits[:4])
    torch.testing.assert_close(gradients(ours), gradients(theirs))
    torch.testing.assert_close(ours.eval()(**args).loss, theirs.eval()(**args).loss)


def test_a_head_that_is_new_is_not_frozen(tmp_path: Path) -> None:
    """As it was drawn it would make noise of what is trained before it."""
    mc.build("bert-base-uncased", config=TINY_BERT, task="mlm").save_pretrained(tmp_path / "words")
    model = mc.load(str(tmp_path / "words"), task="classify")
    made = {"objective": "classify", "init": "pretrained", "config": {}}
    with pytest.raises(InputError, match=r"freeze: head\.\S+, which the weights lack, and which would stay as it was drawn"):
        restrict(model, recipe_of(tmp_path, **made, freeze=["*.weight"]))
    restrict(mc.load(str(tmp_path / "words"), task="classify"), recipe_of(tmp_path, **made, freeze=["encoder"]))


@pytest.mark.filterwarnings("ignore:head")
def test_an_adapter_goes_on_as_what_it_was_trained_for(tmp_path: Path) -> None:
    """Beside it nothing is trained but what it has: no new head, which its folder would not hold, and nothing is to be frozen."""
    mc.build("gpt2", config=TINY | {"vocab": 50}).save_pretrained(tmp_path / "base")
    mc.load(tmp_path / "base", adapter=AdapterConfig(name="lora")).save_pretrained(tmp_path / "lora")
    made = {"model": str(tmp_path / "lora"), "init": "pretrained", "config": {}}
    restrict(mc.load(tmp_path / "lora"), recipe_of(tmp_path, **made))
    with pytest.raises(InputError, match=r"^freeze: given, and \S+lora is an adapter, which freezes all but what it trains"):
        restrict(mc.load(tmp_path / "lora"), recipe_of(tmp_path, **made, freeze=["embed"]))
    with pytest.raises(InputError, match=r"lora: adapter: head\.out\.weight, which the weights lack, .* modelcenter merge makes"):
        restrict(mc.load(tmp_path / "lora", task="classify"), recipe_of(tmp_path, **made, objective="classify"))
    own = mc.load(tmp_path / "base", task="classify", adapter=AdapterConfig(name="lora"))  # which trains its head
    restrict(own, recipe_of(tmp_path, **made, objective="classify"))


def test_r_drop_wants_a_sequence_a_row() -> None:
    ours = mc.build("bert-base-uncased", config=TINY_BERT, task="classify").train()
    ours.head.r_drop = 1.0
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    with pytest.raises(InputError, match=r"loss\.r_drop: packed sequences"):
        ours(torch.full((1, 7), 5), labels=torch.tensor([0, 1]), **packed)


@pytest.mark.parametrize(("changes", "found"), [
    ({"loss.r_drop": 1.0}, r"loss\.r_drop: 1\.0 with objective lm"),
    ({"loss.r_drop": 1.0, "objective": "classify", "data.padding_free": True}, r"data\.padding_free: true with loss\.r_drop 1\.0"),
    ({"freeze": ["wtf"]}, r"freeze: 'wtf' matches no parameter"),
    ({"freeze": ["*"]}, r"freeze: all parameters of the model; one at least is to be trained"),
    ({"loss.z_loss": 1e-4, "objective": "classify"}, r"loss\.z_loss: 0\.0001 with objective classify"),
    ({"adapter.name": "lora", "init": "pretrained", "freeze": ["embed"]}, r"freeze: with adapter\.name lora"),
    ({"schedule.name": "wsd", "schedule.decay_steps": 18}, r"schedule\.decay_steps: 18 after 3 of warm-up, in 20 steps"),
    ({"ema": 1.0}, r"ema: 1\.0"),
    ({"loss.label_smoothing": 1.0}, r"loss\.label_smoothing: 1\.0"),
    ({"optimizer.layer_decay": 0}, r"optimizer\.layer_decay: 0"),
])  # fmt: skip
def test_what_cannot_be_is_refused(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=found):
        train(recipe_of(tmp_path, **changes), MACHINE)


@pytest.mark.parametrize(("changes", "found"), [
    ({"data.seq_len": 33}, r"data\.seq_len: 33; at most 32, the model's positions"),
    ({"objective": "mlm"}, r"task: 'mlm' is none of GPT's"),
    ({"objective": "chat", "data.chat_template": "chatlm"}, r"data\.chat_template: 'chatlm'; did you mean 'chatml'"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_file_is_opened(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=found):
        train(recipe_of(tmp_path, **changes, **{"data.path": str(tmp_path / "none")}), MACHINE)


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    """Not even with those of the same size; a copy of them is the same."""
    first = recipe_of(tmp_path, max_steps=5)
    text = Path(str(first.data.path))
    train(first, MACHINE)
    rest = recipe_of(tmp_path, max_steps=5)
    os.utime(text, (1, 1))
    assert train(rest, MACHINE).step == 5
    for other, said in ((TEXT.swapcase(), "sha256_of_contents [0-9a-f]{12} then"), (TEXT + "\n", "bytes 4433 then, 4434 now")):
        text.write_text(other)
        with pytest.raises(InputError, match=rf"text\.txt: data: not what it was when the run began \({said}.*; the data as they"):
            train(rest, MACHINE)
        with pytest.raises(InputError, match=r"text\.txt: data: not what"):
            train(replace(rest, output_dir=str(tmp_path / "new"), resume=str(tmp_path / "out" / "step-5")), MACHINE)


def test_another_runs_states_want_the_same_recipe(tmp_path: Path) -> None:
    """`resume` names it, in a folder of another name: what helps is to begin with its weights."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "recipe.yaml").write_text(dump_yaml(to_dict(recipe_of(tmp_path, output_dir=str(tmp_path / "first")))))
    with pytest.raises(InputError, match=r"optimizer\.lr: .*; the same recipe; or no resume, and model=OUT, which "):
        check(tmp_path / "second", recipe_of(tmp_path, resume=str(tmp_path / "first"), **{"optimizer.lr": 0.5}))


def test_a_run_goes_on_with_data_that_have_moved(tmp_path: Path) -> None:
    """By their contents, with the result of a run whose data stayed; other contents, or another kind of file, are refused."""
    steps: dict[str, Any] = {"schedule.name": "constant", "schedule.warmup_steps": 0, "save_steps": 2}
    whole = train(recipe_of(tmp_path, max_steps=4, output_dir=str(tmp_path / "whole"), **steps), MACHINE)
    train(recipe_of(tmp_path, max_steps=2, **steps), MACHINE)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "text.txt").rename(tmp_path / "elsewhere" / "book.txt")
    for other, text in (("book.jsonl", moved.read_text()), ("other.txt", TEXT.swapcase())):
        (tmp_path / other).write_text(text)
        with pytest.raises(InputError, match=r"recipe\.yaml: data\.path: .*; the same recipe, or another output_dir$"):
            train(recipe_of(tmp_path, max_steps=4, **steps, **{"data.path": str(tmp_path / other), "data.format": "text"}), MACHINE)
    recipe = recipe_of(tmp_path, max_steps=4, **steps, **{"data.path": str(moved)})
    run = train(recipe, MACHINE)
    assert bytes_of(run.output_dir / "model") == bytes_of(whole.output_dir / "model")
    moved.write_text(TEXT.swapcase())  # under its new name it is known too
    with pytest.raises(InputError, match=r"book\.txt: data: not what it was when the run began"):
        train(replace(recipe, max_steps=6), MACHINE)


@pytest.mark.parametrize("change", [{}, {"best": "loss", "eval_steps": 1, "save_steps": 50}])
@pytest.mark.parametrize("another", [False, True], ids=["gone", "another"])
def test_a_folder_that_is_moved_ends_the_run_in_one_line(
    another: bool, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later states, or its model, would be in a new folder of its name, and its metrics where it is; from there it goes on."""
    recipe, log, moved = recipe_of(tmp_path, **{"save_steps": 2, "max_steps": 6, **change}), Session.log, tmp_path / "elsewhere"

    def move(self: Session, step: Any) -> None:
        log(self, step)
        if self.at.step == 3:
            self.folder.rename(moved)
            if another:
                self.folder.mkdir()

    with monkeypatch.context() as patch:
        patch.setattr(Session, "log", move)
        with pytest.raises(InputError, match=r"out: output_dir: moved or removed before step [34], .*goes on after step [02]$"):
            train(recipe, MACHINE)
    assert not [path for path in (tmp_path / "out").glob("*") if path.is_dir()]
    there = replace(recipe, output_dir=str(moved))
    assert train(there, MACHINE).step == 6
    again = replace(recipe, output_dir=str(tmp_path / "whole"))
    train(again, MACHINE)
    assert rows(moved)[1:] == rows(tmp_path / "whole")[1:]


@pytest.mark.parametrize("how", ["moved", "another", "gone", "replaced"])
def test_a_run_without_states_leaves_its_model_where_its_folder_is(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no state to go on from: to refuse would be to lose all. In a folder that took its name another run may be."""
    recipe, log, moved = recipe_of(tmp_path, save_steps=None, eval_steps=None, max_steps=4), Session.log, tmp_path / "elsewhere"

    def move(self: Session, step: Any) -> None:
        log(self, step)
        if self.at.step == 3:
            self.folder.rename(moved)
            if how in ("another", "replaced"):
                self.folder.mkdir()
            if how in ("gone", "replaced"):
                shutil.rmtree(moved)

    monkeypatch.setattr(Session, "log", move)
    if how == "replaced":
        with pytest.raises(InputError, match=r"out: output_dir: moved or removed before step 4, as the run went on;"):
            train(recipe, MACHINE)
        assert not (tmp_path / "out" / "model").exists()
        return
    run = train(recipe, MACHINE)
    assert run.output_dir == (tmp_path / "out" if how == "gone" else moved) and mc.load(run.output_dir / "model") is not None
    assert how == "gone" or (not (tmp_path / "out" / "model").exists() and run.metrics["step"] == 4)
    assert how == "gone" or (run.output_dir / "summary.md").is_file()
    assert how != "another" or not list((tmp_path / "out").iterdir())


def test_data_that_have_moved_in_a_list(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "one.txt").write_text(TEXT)
    (tmp_path / "b" / "two.txt").write_text(TEXT.swapcase())
    steps: dict[str, Any] = {"schedule.name": "constant", "schedule.warmup_steps": 0, "max_steps": 2}
    train(recipe_of(tmp_path, **steps, **{"data.path": [str(tmp_path / "a"), str(tmp_path / "b/two.txt")]}), MACHINE)
    (tmp_path / "b/two.txt").rename(tmp_path / "c/two.txt")
    rest = {**steps, "max_steps": 3}
    with pytest.raises(InputError, match=r"data\.path"):  # in another order
        train(recipe_of(tmp_path, **rest, **{"data.path": [str(tmp_path / "c/two.txt"), str(tmp_path / "a")]}), MACHINE)
    moved = recipe_of(tmp_path, **rest, **{"data.path": [str(tmp_path / "a"), str(tmp_path / "c/two.txt")]})
    assert train(moved, MACHINE).step == 3


def test_what_cannot_be_drawn_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(folder: Path) -> str:
        raise ImportError("no memory to\nmap it into")

    monkeypatch.setattr(plot, "draw", draw)
    assert plot.plot_loss(tmp_path) == "loss.png: not drawn: no memory to\\nmap it into"


def test_metrics_without_data_for_them_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else nobody would miss them before the run has ended."""
    line = "evaluation: none, because there is no data for {}; set data.eval_path=FILE or data.eval_fraction=0.05\n"
    for metrics, every, fraction, said in ((("perplexity",), None, 0.0, "perplexity"), ((), 5, 0.0, "eval_steps 5"),
                                           (("perplexity",), None, 0.1, ""), ((), None, 0.0, "")):  # fmt: skip
        changes = {"metrics": metrics, "eval_steps": every, "data.eval_fraction": fraction}
        recipe = recipe_of(tmp_path, **{**changes, "max_steps": 1, "output_dir": str(tmp_path / f"out {said} {fraction}")})
        train(recipe, MACHINE)
        told = capsys.readouterr().err
        assert line.format(said) in told if said else "evaluation: none" not in told
        assert "; tokenizer char of " in told and re.search(r"; tokenizer char of \d+ tokens\n", told)


@pytest.mark.parametrize(("changes", "line"), [
    ({"save_total_limit": 2, "save_steps": None}, "save_total_limit: 2 without save_steps counts only "),
    ({"data.shuffle": False, "data.group_by_length": True}, "data.shuffle: false, but data.group_by_length "),
])
def test_what_is_set_for_nothing_is_said(
    changes: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file it may be, so that it is not refused. Either setting alone is nothing to be told of."""
    for k, some in enumerate((changes, *({key: value} for key, value in changes.items()))):
        both = {"save_total_limit": None, "save_steps": 1, **some, "max_steps": 1, "output_dir": str(tmp_path / str(k))}
        train(recipe_of(tmp_path, **both), MACHINE)
        assert (line in capsys.readouterr().err) == (some == changes)


@pytest.mark.parametrize(("name", "dim", "least"), [("adamw", 16, True), ("adamw", 32, False), ("muon", 32, True)])
def test_moments_of_8_bits_for_no_matrix_are_said(
    name: str, dim: int, least: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest rows are those of a feed-forward layer, four times as long; and in Muon no matrix of a layer has any."""
    config = {"config": {**TINY, "dim": dim}, "optimizer.name": name, "optimizer.moments": "int8"}
    train(recipe_of(tmp_path, **config, max_steps=1), MACHINE)
    assert ("optimizer.moments: int8, but for no matrix: " in capsys.readouterr().err) == least


def test_a_header_of_lines_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not refused: runs had it, which go on and are evaluated."""
    for header in (False, True):
        train(recipe_of(tmp_path, **{"data.header": header}, max_steps=1, output_dir=str(tmp_path / str(header))), MACHINE)
        assert ("data.header: false, but no data are csv or tsv; " in capsys.readouterr().err) != header


def test_offload_on_a_cpu_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not refused: a profile of GPUs is tried on a CPU, which computes the same with it."""
    for offload in (False, True):
        train(recipe_of(tmp_path, max_steps=1, output_dir=str(tmp_path / str(offload))), replace(MACHINE, offload=offload))
        assert ("machine.offload: true, but on a CPU the host's memory " in capsys.readouterr().err) == offload


def test_a_share_of_an_epoch_is_a_step_at_least(tmp_path: Path) -> None:
    assert train(recipe_of(tmp_path, num_epochs=1e-300), MACHINE).step == 1


@pytest.mark.parametrize("changes", [{"warmup_steps": 19}, {"warmup_steps": 5, "decay_steps": 7}], ids=["tenth", "epoch"])
def test_a_decay_too_long_is_refused_before_the_first_step(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where it is a tenth of the run, or the run as long as an epoch."""
    settings = {f"schedule.{key}": value for key, value in {"name": "wsd", **changes}.items()}
    ends = {"max_steps": None, "num_epochs": 0.1} if "decay_steps" in changes else {}
    with pytest.raises(InputError, match=r"schedule\.decay_steps: [27] after (19|5) of warm-up, in a run of"):
        train(recipe_of(tmp_path, **settings, **ends), MACHINE)
    assert not (tmp_path / "out").exists()


def test_a_warm_up_that_never_ends_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, said in ((20, "in a run of 20: the learning rate never reaches its peak;"), (21, ""),
                        (1, "in a run of 1: its learning rate is 0, so nothing is trained; schedule.warmup_steps=0")):  # fmt: skip
        train(recipe_of(tmp_path, max_steps=steps, output_dir=str(tmp_path / str(steps)), **{"schedule.warmup_steps": 20}), MACHINE)
        told = capsys.readouterr().err
        assert f"schedule: 20 steps of warm-up {said}" in told if said else "schedule:" not in told


@pytest.mark.parametrize("objective", ["lm", "seq2seq"])
@pytest.mark.parametrize("known", [0, 45, 100])
def test_a_tokenizer_that_does_not_know_the_text_is_told_of(
    known: int, objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of lm by what is read; of seq2seq also by what is to be written, here in letters of which the vocabulary has `known` %."""
    letters = [chr(0x4E00 + i) for i in range(20)]
    words = {"[UNK]": 0, "[EOS]": 1, "[PAD]": 2, "a": 3} | {letter: 4 + i for i, letter in enumerate(letters[: known // 5])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    (tmp_path / "words").mkdir()
    raw.save(str(tmp_path / "words" / "tokenizer.json"))
    special = {"unk_token": "[UNK]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    (tmp_path / "words" / "tokenizer_config.json").write_text(json.dumps(special))
    text, data = " ".join(letters), tmp_path / "data.jsonl"
    row = {"text": text} if objective == "lm" else {"source": "a a a a", "target": text}
    data.write_text((json.dumps(row) + "\n") * 40)
    more: dict[str, Any] = {} if objective == "lm" else {"model": "t5-small", "config": OBJECTIVES["seq2seq"][1]}
    train(recipe_of(tmp_path, objective=objective, max_steps=1, tokenizer=str(tmp_path / "words"), eval_steps=None, save_steps=None,
                    **{"data.path": str(data), "data.seq_len": 32, **more}), MACHINE)
    told = capsys.readouterr().err
    found = re.findall(r"tokenizer: (\d+)% of what the first step (.*) is \[UNK\], which says nothing about a text; use", told)
    assert [side for _, side in found] == ["reads" if objective == "lm" else "is to write"] * (known < 80)
    assert all(abs(int(share) - (100 - known)) <= 5 for share, _ in found)


def test_an_unknown_token_that_ends_texts_too_says_nothing_of_them(tmp_path: Path) -> None:
    """As GPT-2's: in short texts it is half of what is read."""
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    raw.save(str(tmp_path / "tokenizer.json"))
    for ends, found in ((None, [2, 3]), ("<end>", [0, 1])):
        special = {"unk_token": "<end>"} | ({"eos_token": ends} if ends else {})
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
        assert [*unknown([{"input_ids": torch.tensor([[0, 1, 0]])}], open_tokenizer(str(tmp_path), None), False)][:2] == found


def test_steps_without_targets_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    for texts, none in (("a", True), ("ab", False)):
        data.write_text((json.dumps({"text": texts}) + "\n") * 40)
        rows: dict[str, Any] = {"data.path": str(data), "data.seq_len": 8, "data.packing": True}
        train(recipe_of(tmp_path, objective="lm", max_steps=1, tokenizer="char", eval_steps=None, save_steps=None, config=TINY,
                        output_dir=str(tmp_path / texts), **rows), MACHINE)
        assert ("targets: none in the first step, which trains nothing; " in capsys.readouterr().err) == none


def test_a_run_without_states_says_that_it_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for again in (False, True):
        train(recipe_of(tmp_path, max_steps=1, eval_steps=None, save_steps=None), MACHINE)
        said = f"no state in {tmp_path / 'out'}: trained anew from step 0, over {tmp_path / 'out' / 'model'}; save_steps=500"
        assert (said in capsys.readouterr().err) == again


def test_max_steps_that_the_epochs_end_before_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever gives max_steps to a recipe of epochs."""
    for steps, ends in ((1000, True), (2, False)):
        train(recipe_of(tmp_path, max_steps=steps, num_epochs=1, output_dir=str(tmp_path / str(steps))), MACHINE)
        said = f"max_steps: {steps:,}, but num_epochs=1 ends the run earlier; num_epochs=null to run all steps"
        assert (said in capsys.readouterr().err) == ends


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_an_output_dir_that_can_be_no_folder(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a result of something else")
    with pytest.raises(InputError, match=r"file.*: output_dir: .*; a folder"), claim(tmp_path / where, recipe_of(tmp_path)):
        pytest.fail("claimed")
    assert (tmp_path / "file").read_text() == "a result of something else"


def test_a_run_among_its_own_data_is_refused(tmp_path: Path) -> None:
    """When it goes on its metrics would be data; where those are of another format, or hidden files, they are not."""
    text, rows = str(tmp_path / "text.txt"), str(tmp_path)
    for key, found in (({"data.path": rows}, "data.path"), ({"data.path": {rows: 1, text: 2}}, "data.path"),
                       ({"data.eval_path": [rows]}, "data.eval_path")):
        for out in (tmp_path / "out", tmp_path / "a" / "b", tmp_path):
            with pytest.raises(InputError, match=rf"output_dir: in {rows}, which is {found}: .*; a folder beside it, or a glob"):
                check(out, recipe_of(tmp_path, **{"data.format": "text", **key}))
    for settings in ({"data.format": "csv"}, {"data.path": f"{rows}/*.txt"}, {"output_dir": str(tmp_path.parent / "beside")}):
        recipe = recipe_of(tmp_path, **{"data.path": rows, **settings})
        check(Path(recipe.output_dir), recipe)
    check(tmp_path / ".runs" / "out", recipe_of(tmp_path, **{"data.path": rows}))


def test_data_whose_name_begins_as_that_of_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's own name; or somebody who has none, which is one line."""
    monkeypatch.chdir(tmp_path)
    base = {"max_steps": 1, "eval_steps": None, "save_steps": None, "schedule.warmup_steps": 0}
    recipe = recipe_of(tmp_path, **base)
    (tmp_path / "text.txt").rename(tmp_path / "~text.txt")
    assert train(replace(recipe, data=replace(recipe.data, path="~text.txt")), MACHINE).step == 1
    with pytest.raises(InputError, match=r"~nobody-is-this/text.txt: data.path: no such file"):
        train(recipe_of(tmp_path, **base, **{"data.path": "~nobody-is-this/text.txt", "output_dir": str(tmp_path / "b")}), MACHINE)


def test_a_run_where_another_writes_its_model_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    (tmp_path / "first").mkdir()
    check(tmp_path / "first" / "model", recipe)
    (tmp_path / "first" / "recipe.yaml").write_text(dump_yaml(to_dict(recipe)))
    with pytest.raises(InputError, match=r"first/model: output_dir: where the run in .*first writes its model; a folder"):
        check(tmp_path / "first" / "model", recipe)


def test_a_run_in_a_training_state_is_refused(tmp_path: Path) -> None:
    """With other files in it a state counts as broken."""
    run = train(recipe_of(tmp_path, max_steps=5, **{"schedule.warmup_steps": 0}), MACHINE)
    state = run.output_dir / "step-5"
    with pytest.raises(InputError, match=r"step-5: output_dir: a training state; \S+out goes on with its run; or a folder of"):
        train(recipe_of(tmp_path, max_steps=5, output_dir=str(state), **{"schedule.warmup_steps": 0}), MACHINE)
    verify(state)


def test_half_a_file_of_a_run_that_was_killed_is_removed(tmp_path: Path) -> None:
    """What a small file was to become, and nothing else."""
    recipe = recipe_of(tmp_path)
    out = Path(recipe.output_dir)
    out.mkdir()
    kept = [".tmp-environment.json-0123abc", "tmp-a-0123abcd", "notes.txt"]
    for name in (*kept, ".tmp-environment.json-0123abcd"):
        (out / name).write_text("{")
    with claim(out, recipe):
        assert sorted(p.name for p in out.iterdir()) == sorted([*kept, ".lock"])


@pytest.mark.parametrize("objective", ["lm", "classify", "chat", "tag", "qa", "choice", "seq2seq", "contrastive"])
def test_a_field_that_is_not_there_is_named_before_anything_is_fetched(objective: str, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*rest: Any, **more: Any) -> None:
        raise AssertionError("fetched")

    for name in ("find_tokenizer", "find_model"):
        monkeypatch.setattr(f"modelcenter.train.prepare.{name}", fetch)
    (tmp_path / "rows.jsonl").write_text('{"nothing": "of use"}\n' * 3)
    changes = {"data.path": str(tmp_path / "rows.jsonl"), "data.eval_fraction": 0.0}
    changes |= {"data.pair_key": "other"} if objective == "contrastive" else {}
    changes |= {"model": "t5-small", "config": {}} if objective == "seq2seq" else {}
    recipe = recipe_of(tmp_path, objective=objective, **changes)
    with pytest.raises(InputError, match=r"rows\.jsonl: line 1: "):
        prepare(*resolve(recipe, MACHINE)[:1], MACHINE, torch.device("cpu"))
    if objective == "lm":
        changes = {"data.eval_path": changes["data.path"]}
        with pytest.raises(InputError, match=r"rows\.jsonl: line 1: "):
            prepare(*resolve(recipe_of(tmp_path, **changes), MACHINE)[:1], MACHINE, torch.device("cpu"))


# -------------------------------------------------------------------------------------------------------- the first step soon


def test_a_run_imports_no_compiler(tmp_path: Path) -> None:
    """Nor FSDP: torch's own optimizers and FakeTensorMode would. Who compiles after the run finds all of the compiler."""
    recipe_of(tmp_path)
    over = {"model": "gpt2", "init": "random", "config": TINY, "tokenizer": "char", "data.path": str(tmp_path / "text.txt"),
            "data.seq_len": 16, "batch": 4, "max_steps": 2, "save_steps": 1, "output_dir": str(tmp_path / "out")}  # fmt: skip
    code = f"""
import json, sys
from modelcenter.train.read import load_recipe
from modelcenter.train.loop import train
run = train(load_recipe({str(tmp_path / "base.yaml")!r}, {over!r}))
found = [name for name in ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp") if name in sys.modules]
import torch
import torch._dynamo
same = torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(2))
kept = [name for name in ("zero_grad", "add_param_group") if hasattr(getattr(torch.optim.Optimizer, name), "__wrapped__")]
print(json.dumps([found, run.step, same.tolist(), torch._dynamo.utils.counters["stats"]["unique_graphs"], kept]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found, step, same, graphs, kept = json.loads(done.stdout.splitlines()[-1])
    assert (found, step, graphs, kept) == ([], 2, 1, ["zero_grad", "add_param_group"])
    assert same == pytest.approx([math.sin(1) + 1] * 2)
    assert "memory: about" in done.stderr  # it was rehearsed


def test_weights_that_are_read_beside_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mc.build("gpt2", config={**TINY, "vocab": 60}, seed=3)
    model.save_pretrained(tmp_path / "model")
    jobs: list[Any] = []
    late = create.load(tmp_path / "model", put_off=jobs.append)
    assert len(jobs) == 1
    jobs[0]()
    whole = create.fill_all

    def slow(*args: Any) -> None:
        time.sleep(0.3)
        whole(*args)

    monkeypatch.setattr(create, "fill_all", slow)
    recipe = recipe_of(tmp_path, model=str(tmp_path / "model"), init="pretrained", config={})
    recipe, device = resolve(recipe, MACHINE)
    setup = prepare(recipe, MACHINE, device)
    for found in (late, setup.model):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


def test_weights_that_are_read_beside_are_not_waited_for_when_all_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C waits for no more than the part of a file that is being read."""
    mc.build("gpt2", config={**TINY, "vocab": 60}).save_pretrained(tmp_path / "model")
    begun, finished = threading.Event(), list[bool]()

    def long(*_: Any) -> None:
        begun.set()
        for _ in range(1000):
            beat()
            time.sleep(0.01)
        finished.append(True)

    def pressed(*_: Any) -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(create, "fill_all", long)
    monkeypatch.setattr(preparing, "opening", pressed)
    recipe, device = resolve(recipe_of(tmp_path, model=str(tmp_path / "model"), init="pretrained", config={}), MACHINE)
    with pytest.raises(KeyboardInterrupt):
        prepare(recipe, MACHINE, device)
    assert not finished


@pytest.mark.parametrize(("tokenizer", "said"), [("char", True), ("tk", False)])
def test_weights_that_have_learned_other_ids_are_told_of(tmp_path: Path, tokenizer: str, said: bool) -> None:
    mc.build("gpt2", config={**TINY, "vocab": 60}).save_pretrained(tmp_path / "model")
    if tokenizer == "tk":
        open_tokenizer("char", [TEXT]).save(tmp_path / "tk")
        tokenizer = str(tmp_path / "tk")
    recipe = recipe_of(tmp_path, model=str(tmp_path / "model"), init="pretrained", config={}, tokenizer=tokenizer)
    recipe, device = resolve(recipe, MACHINE)
    lines = prepare(recipe, MACHINE, device).lines
    assert any("char is made from this text, but the weights have learned other ids" in line for line in lines) == said


def test_a_file_that_fails_while_it_is_read_beside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mc.build("gpt2", config={**TINY, "vocab": 60}).save_pretrained(tmp_path / "model")

    def fail(*_: Any) -> None:
        raise InputError("model.safetensors: the disk failed")

    monkeypatch.setattr(create, "fill_all", fail)
    recipe = recipe_of(tmp_path, model=str(tmp_path / "model"), init="pretrained", config={})
    recipe, device = resolve(recipe, MACHINE)
    with pytest.raises(InputError, match="the disk failed"):
        prepare(recipe, MACHINE, device)
