"""Predictions beside measurements, and what is learned from past runs."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_ranks import run_of

from modelcenter.parallel.machine import Machine
from modelcenter.plan.chips import CHIPS
from modelcenter.plan.estimate import Estimate
from modelcenter.train import calibrate, choose, loop, paper, session
from modelcenter.train.calibrate import Learned, Run, explained, learn, rate, read, remember
from modelcenter.train.fit import Verdict
from modelcenter.train.read import load_recipe
from modelcenter.train.summary import beside

SPENT = {"compute": 1.2, "memory": 0.5, "link": 0.0, "host": 0.3}
ESTIMATE = Estimate(Machine(), 4, 2, {"forward": [Counter(weights=8, activations=2)]}, 100, 2.0, SPENT, 2.0, 1e12, 8000, 1e13, 8)
X = CHIPS["h200"]
FORESEEN = {"chip": X.name, "precision": "bf16", "several": False, "device": 2.0, "host": 1.0, "tokens": 4000}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MODELCENTER_CALIBRATION")
    return tmp_path / "modelcenter" / "plan.json"


def rows_at(*rates: float, tokens: int = 4000) -> list[dict[str, Any]]:
    """Rows of a run whose steps are of so many tokens."""
    return [{"step": n, "tokens_per_second": r, "memory_gb": 2.5, "tokens": tokens * n} for n, r in enumerate(rates, 1)]


def run(device: float, host: float, measured: float, precision: str = "bf16", several: bool = False) -> Run:
    return Run(precision, several, device, host, measured)


def took(learned: Learned, device: float, host: float) -> float:
    return max(device * learned.device, host * learned.host)


def test_a_run_that_waited_for_the_host_tells_of_the_host(cache: Path) -> None:
    """And one that waited for the device of the device: the next one, of another layout, is foreseen right."""
    remember(FORESEEN | {"device": 1.0, "host": 0.9}, rows_at(1, 2000, 2000))  # 2 s: more than any device is off by
    first = learn(X, "bf16", False)
    assert first.runs == 1 and first.device == pytest.approx(1, abs=0.05) and first.host == pytest.approx(2 / 0.9, rel=0.05)
    remember(FORESEEN | {"device": 3.0, "host": 0.1}, rows_at(1, 1212, 1212))
    both = learn(X, "bf16", False)
    assert both.runs == 2 and both.device == pytest.approx(1.1, rel=0.05) and both.host == pytest.approx(2 / 0.9, rel=0.05)
    chip = both.of(X)
    assert chip.call == pytest.approx(X.call * both.host) and chip.slower == both.device and chip.bf16 == X.bf16
    assert learn(CHIPS["h100"], "bf16", False) == Learned()


def test_a_host_is_one_for_all_and_a_device_is_not() -> None:
    """Rates of another precision, or of several ranks, may be off by something else; calls are made by the same host."""
    runs = [run(1.0, 0.9, 2.0), run(3.0, 0.1, 3.6, "fp32"), run(3.0, 0.1, 3.3, several=True)]
    found = {(kind, several): explained(runs, kind, several, True) for kind in ("bf16", "fp32") for several in (False, True)}
    assert [round(one.device, 1) for one in found.values()] == [1.0, 1.1, 1.2, 1.0]
    assert len({one.host for one in found.values()}) == 1


def test_a_run_that_was_disturbed_moves_little() -> None:
    runs = [run(2.0, 0.2, 2.1), run(3.0, 0.1, 3.1), run(1.0, 0.1, 1.05), run(1.0, 0.1, 4.0)]
    assert took(explained(runs, "bf16", False, True), 1.0, 0.1) == pytest.approx(1.05, rel=0.06)


def test_where_the_host_does_not_run_ahead_both_count() -> None:
    """As on a CPU."""
    runs = [run(1.0, 1.0, 3.0), run(1.0, 0.2, 1.4), run(3.0, 0.1, 3.2)]
    found = explained(runs, "bf16", False, False)
    assert found.device == pytest.approx(1, abs=0.05) and found.host == pytest.approx(2, rel=0.06)


def test_what_was_learned_does_not_add_up(cache: Path) -> None:
    """What is kept is foreseen by the rates as they are: a run that took what was foreseen changes nothing."""
    learned = Learned(1.25, 2.0, 3)
    verdict = Verdict(None, "", (), ESTIMATE, 1, learned, X.name, "bf16")  # type: ignore[arg-type]  # no memory is asked for
    foreseen: Any = verdict.foreseen
    assert (foreseen["device"], foreseen["host"]) == (pytest.approx(1.7 / 1.25), pytest.approx(1.0))
    assert (foreseen["seconds"], foreseen["tokens_per_second"], foreseen["tokens"]) == (2.0, 4000.0, 8000)
    said = "corrected by 3 earlier runs on this machine: arithmetic x 1.25, calls on the host x 2.00"
    assert str(learned) == said
    remember(foreseen, rows_at(1, 4000, 4000, tokens=8000))
    assert read(cache) == {X.name: [run(1.36, 1.0, 2.0)]}


def test_a_plan_of_all_layouts_learns_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the machine here; one that is named may be anybody's."""
    monkeypatch.setattr(paper, "chip_here", lambda device: replace(X, apart=False))
    small = {"layers": 2, "dim": 64, "heads": 2, "vocab": 100, "positions": 64}
    keys = {"model": "gpt2", "config": small, "data.seq_len": 16, "data.path": "x", "batch": 4, "precision": "bf16"}
    recipe = load_recipe("finetune", keys)

    def plan(device: str | None) -> tuple[float, float, str]:
        survey, lines = paper.on_paper(recipe, Machine(device="cpu"), 2, device, bare=True)
        return survey.costs.chip.call, survey.costs.chip.slower, lines[-1]

    assert plan(None) == (X.call, 1.0, f"host: 8.5 µs for each call of torch, {X.host}")
    for device, host, seconds in ((1.0, 0.1, 1.3), (0.1, 1.0, 2.1)):
        remember(FORESEEN | {"device": device, "host": host, "several": True}, rows_at(1, 4000 / seconds, 4000 / seconds))
    call, slower, line = plan(None)
    assert call == pytest.approx(2 * X.call, rel=0.1) and slower == pytest.approx(1.1, rel=0.05)
    assert line.startswith("corrected by 2 earlier runs on this machine: ")
    assert plan("h200")[:2] == (X.call, 1.0)


def test_a_layout_is_chosen_by_what_was_learned(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "chip_of", lambda device: X)
    monkeypatch.setattr(choose, "job_there", lambda *_: SimpleNamespace(model=torch.nn.Linear(1, 1), precision="bf16"))
    monkeypatch.setattr(choose, "survey", lambda costs, *_, **__: costs)
    recipe = load_recipe("finetune", {"model": "gpt2", "data.path": "x", "precision": "bf16"})
    remember(FORESEEN | {"device": 0.1, "several": True}, rows_at(1, 2000, 2000))
    found: Any = choose.surveyed(recipe, Machine(), torch.device("cuda"), 2, None)
    assert found.chip.call == pytest.approx(2 * X.call, rel=0.1)


@pytest.mark.parametrize(("tokens", "kept"), [(4000, True), (3300, True), (2000, False)])
def test_batches_that_were_much_shorter_say_nothing(cache: Path, tokens: int, kept: bool) -> None:
    """Of padding and of calls for few tokens no plan knows; where few are missing the device alone has less to do."""
    remember(FORESEEN, [{"step": 1, "eval_loss": 3.0}, *rows_at(1, 1000, 1000, tokens=tokens)])
    assert cache.exists() == kept
    if kept:
        assert read(cache)[X.name] == [run(2.0 * tokens / 4000, 1.0, tokens / 1000)]


def test_only_this_process_s_own_steps_are_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on may have begun on another, whose rows are there too."""
    kept: list[list[int]] = []
    monkeypatch.setattr(loop, "plot_loss", lambda folder: "not drawn")
    monkeypatch.setattr(session, "remember", lambda foreseen, rows: kept.append([row["step"] for row in rows if "loss" in row]))
    for steps in (3, 5):
        changes = {"max_steps": steps, "logging_steps": 1, "eval_steps": None, "schedule.name": "constant"}
        loop.train(run_of(tmp_path, **changes), Machine(device="cpu", threads=1))
    assert kept == [[1, 2, 3], [4, 5]]


def test_it_can_be_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(FORESEEN, rows_at(9, 2000, 2000))
    monkeypatch.setenv("MODELCENTER_CALIBRATION", "0")
    before = cache.read_text()
    remember(FORESEEN, rows_at(9, 1000, 1000))
    assert cache.read_text() == before and learn(X, "bf16", False) == Learned()


def test_who_has_no_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user whom its passwd does not know."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("MODELCENTER_CALIBRATION")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert calibrate.file() is None and learn(X, "bf16", False) == Learned()
    remember(FORESEEN, rows_at(9, 2000, 2000))


@pytest.mark.parametrize("rows", [[], rows_at(5.0), rows_at(5.0, 6.0), rows_at(9, 1e-3, 1e-3), rows_at(9, 1e9, 1e9)])
def test_what_says_nothing_is_not_kept(cache: Path, rows: list[dict[str, Any]]) -> None:
    """Runs of a moment, and times that cannot be."""
    remember(FORESEEN, rows)
    remember(None, rows_at(9, 2000, 2000))
    assert not cache.exists()


WRONG = [["x"], [None], 3.0, ["bf16", False, 1.0, 1.0, 1e9], ["bf16", False, -1.0, 1.0, 1.0], ["bf16", 0, 1.0, 1.0, 1.0],
         ["bf16", False, 1.0, "1.0", 1.0], ["bf16", False, 1.0, float("nan"), 1.0], {"a": 1.0}]  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", "{", pytest.param("[" * 10**5, id="deep"), '{"a": 3}',
                                  pytest.param(json.dumps({X.name: WRONG}), id="wrong"),
                                  json.dumps({X.name: [2.0, 1.25]})])  # fmt: skip
def test_a_broken_file_is_none(cache: Path, text: str) -> None:
    """One of an older release too."""
    cache.parent.mkdir()
    cache.write_text(text)
    assert learn(X, "bf16", False) == Learned()
    remember(FORESEEN, rows_at(9, 2000, 2000))
    assert json.loads(cache.read_text())[X.name] == [["bf16", False, 2.0, 1.0, 2.0]]


def test_only_so_many_are_kept_and_a_disk_may_refuse(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(calibrate.KEPT + 3):
        remember(FORESEEN | {"host": 1.0 + n / 100}, rows_at(9, 1000, 1000))
    assert len(read(cache)[X.name]) == calibrate.KEPT and read(cache)[X.name][0].host == 1.03
    rows = read(cache)[X.name]
    cache.write_text(json.dumps({X.name: [run(1.0, 1.0, 9.0)] * 100 + rows}))  # by hand: each would be explained at every start
    assert read(cache)[X.name] == rows

    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(calibrate, "atomic_write", full)
    remember(FORESEEN, rows_at(9, 1000, 1000))


def test_a_summary_puts_them_side_by_side() -> None:
    foreseen = {"seconds": 2.0, "tokens_per_second": 4000.0, "memory_gb": 2.0}
    process = {"foreseen": foreseen, "device": "cuda"}
    assert beside(process, rows_at(9, 3000, 3000)) == [
        ("predicted", "2 s a step of full sequences, 4,000 tokens a second; measured 3,000 (-25%)"),
        ("predicted memory", "2.0 GB; measured 2.5 GB (+25%)"),
    ]
    few = {"foreseen": {**foreseen, "memory_gb": 0.0021}, "device": "cuda"}
    assert beside(few, rows_at(9))[1] == ("predicted memory", "2.1 MB; measured 2.5 GB (+118948%)")
    told = "2 s a step of full sequences, 4,000 tokens a second"
    assert beside({**process, "device": "cpu"}, rows_at(9)) == [("predicted", told)]
    assert beside({}, rows_at(9)) == [] and rate(rows_at(9, 3, 5)) == 4
