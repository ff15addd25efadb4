"""Predictions beside measurements, and what is learned from past runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelcenter.parallel.layout import Estimate
from modelcenter.parallel.machine import Machine
from modelcenter.train import calibrate
from modelcenter.train.calibrate import calibrated, kind_of, rate, read, remember
from modelcenter.train.summary import beside

SPENT = {"compute": 1.2, "memory": 0.5, "link": 0.0, "host": 0.3}
ESTIMATE = Estimate(Machine(), 4, 2, {"weights": 8, "activations": 2}, 100, 2.0, SPENT, 1e12, 8000, 1e13)
KIND = "X, bf16, one rank: compute 2/4, memory 1/4, link 0/4, host 1/4"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MODELCENTER_CALIBRATION")
    return tmp_path / "modelcenter" / "plan.json"


def rows_at(*rates: float) -> list[dict[str, Any]]:
    return [{"step": n, "tokens_per_second": r, "memory_gb": 2.5} for n, r in enumerate(rates)]


def test_a_prediction_learns_from_runs(cache: Path) -> None:
    """The median of three, applied to time and to its parts; ratios are of the uncalibrated figure, so that they do not drift."""
    kind = kind_of(ESTIMATE, "X", "bf16")
    assert kind == KIND and calibrated(ESTIMATE, kind) == (ESTIMATE, 0)
    foreseen = {"uncalibrated": 4000.0, "tokens_per_second": 3000.0, "kind": kind, "seconds": 2.0, "memory_gb": 2.0}
    for speed in (2000.0, 3200.0, 2500.0):
        remember(foreseen, rows_at(1.0, speed, speed, speed))
    assert read(cache) == {kind: [2.0, 1.25, 1.6]}
    found, runs = calibrated(ESTIMATE, kind)
    assert runs == 3 and found.seconds == pytest.approx(3.2) and found.spent["memory"] == pytest.approx(0.8)
    assert found.parts == ESTIMATE.parts and found.rate == pytest.approx(2500)
    assert calibrated(ESTIMATE, "another") == (ESTIMATE, 0)


def test_it_can_be_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen = {"uncalibrated": 4000.0, "kind": KIND}
    remember(foreseen, rows_at(9, 2000, 2000))
    monkeypatch.setenv("MODELCENTER_CALIBRATION", "0")
    before = cache.read_text()
    remember(foreseen, rows_at(9, 1000, 1000))
    assert cache.read_text() == before and calibrated(ESTIMATE, KIND) == (ESTIMATE, 0)


@pytest.mark.parametrize("rows", [[], rows_at(5.0), rows_at(5.0, 6.0), rows_at(9, 1e-3, 1e-3), rows_at(9, 1e9, 1e9)])
def test_what_says_nothing_is_not_kept(cache: Path, rows: list[dict[str, Any]]) -> None:
    """Runs of a moment, and ratios that cannot be."""
    remember({"uncalibrated": 4000.0, "kind": KIND}, rows)
    remember(None, rows_at(9, 2000, 2000))
    assert not cache.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', json.dumps({KIND: ["x", None, 1e9]})])
def test_a_broken_file_is_none(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert calibrated(ESTIMATE, KIND) == (ESTIMATE, 0)
    remember({"uncalibrated": 4000.0, "kind": KIND}, rows_at(9, 2000, 2000))
    assert json.loads(cache.read_text())[KIND] == [2.0]


def test_only_so_many_are_kept_and_a_disk_may_refuse(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(calibrate.KEPT + 3):
        remember({"uncalibrated": 1000.0 + n, "kind": KIND}, rows_at(9, 1000, 1000))
    assert len(read(cache)[KIND]) == calibrate.KEPT and read(cache)[KIND][0] == 1.003

    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(calibrate, "atomic_write", full)
    remember({"uncalibrated": 1.0, "kind": KIND}, rows_at(9, 1, 1))


def test_a_summary_puts_them_side_by_side() -> None:
    foreseen = {"seconds": 2.0, "tokens_per_second": 4000.0, "memory_gb": 2.0}
    process = {"foreseen": foreseen, "device": "cuda"}
    assert beside(process, rows_at(9, 3000, 3000)) == [
        ("foreseen", "2 s a step, 4,000 tokens a second; measured 3,000 (-25%)"),
        ("memory foreseen", "2.00 GB; measured 2.50 (+25%)"),
    ]
    assert beside({**process, "device": "cpu"}, rows_at(9)) == [("foreseen", "2 s a step, 4,000 tokens a second")]
    assert beside({}, rows_at(9)) == [] and rate(rows_at(9, 3, 5)) == 4
