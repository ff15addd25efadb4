"""Whole runs of `modelcenter train` on machines of several kinds against one process: what they log, write and go on from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # imported where a model is sharded, for seconds: here once, and not in each rank
import torch.distributed.fsdp
from mesh import spawn
from safetensors.torch import load_file
from test_ranks import run_of

import modelcenter as mc
from modelcenter.checkpoint.shards import whole
from modelcenter.checkpoint.state import load_state
from modelcenter.train import loop
from modelcenter.train.metrics import TIMINGS, read_rows

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
    pytest.mark.foreseen("zero2-bf16"),
]
ODD = {"config": {"layers": 2, "dim": 16, "heads": 2, "positions": 16, "vocab": 15, "dropout": 0.0, "embed_dropout": 0.0,
                  "attn_dropout": 0.0}, "ema": 0.8, "max_steps": 6, "save_steps": 3, "eval_steps": 3}  # fmt: skip
EXACT, CLOSE = (2e-4, 2e-3, 2e-4), (3e-2, 1.0, 2e-2)  # of what is logged, relative; of weights, relative and absolute


def machine_of(changes: dict[str, Any]) -> mc.Machine:
    return mc.Machine(device="cpu", threads=1, **changes)


def run(rank: int, recipe: Any, changes: dict[str, Any]) -> None:
    loop.plot_loss = lambda folder: "not drawn"  # type: ignore[attr-defined]
    loop.train(recipe, machine_of(changes))


def told(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in read_rows(folder / "metrics.jsonl")][1:]


def same(a: Path, b: Path, tolerance: tuple[float, float, float]) -> None:
    """Two runs are one, but for rounding."""
    logged, relative, absolute = tolerance
    assert len(told(a)) == len(told(b)) > 3
    for one, other in zip(told(a), told(b), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], rel=logged, abs=1e-6), f"{key} of step {one['step']}"
    mine, theirs = (load_file(next((folder / "model").glob("*model.safetensors"))) for folder in (a, b))
    assert mine.keys() == theirs.keys() and mine
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=relative, atol=absolute, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run in one process, by precision."""
    out = {}
    for precision in ("fp32", "bf16", "fp16"):
        folder = tmp_path_factory.mktemp(precision)
        with pytest.MonkeyPatch.context() as patch:  # as conftest.py has it for tests
            patch.setattr(loop, "plot_loss", lambda folder: "not drawn")
            patch.setattr(loop, "verdict", lambda *rest, **options: "memory: not asked")
            loop.train(run_of(folder, precision=precision, **ODD), machine_of({}))
        out[precision] = folder / "out"
    return out


MACHINES = {
    "sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "copies": {"replicate": 2}, "zero1": {"fsdp": 2, "zero": 1}, "zero2": {"fsdp": 2, "zero": 2}, "tp": {"tensor_parallel": 2},
    "hybrid": {"replicate": 2, "fsdp": 2}, "copies x tp": {"replicate": 2, "tensor_parallel": 2},
    "host": {"offload": True}, "host x fsdp": {"fsdp": 2, "zero": 2, "offload": True},
}  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), [
    ("copies", "fp32"), ("zero1", "fp16"), ("zero2", "bf16"), ("host", "fp32"),
    *(pytest.param(name, precision, marks=pytest.mark.slow) for name, precision in (
        ("copies", "bf16"), ("copies", "fp16"), ("zero1", "bf16"), ("tp", "bf16"), ("tp", "fp16"), ("hybrid", "fp32"),
        ("hybrid", "bf16"), ("hybrid", "fp16"), ("copies x tp", "fp32"), ("sequence", "fp32"), ("sequence", "bf16"),
        ("host", "bf16"), ("host", "fp16"), ("host x fsdp", "fp32"))),
])  # fmt: skip
def test_a_run_on_a_machine(name: str, precision: str, alone: dict[str, Path], tmp_path: Path) -> None:
    """As in one process; its states hold every tensor once, and another machine goes on from one."""
    machine, tolerance = MACHINES[name], EXACT if precision == "fp32" else CLOSE
    ranks = machine_of(machine).ranks
    spawn(ranks, run, run_of(tmp_path, precision=precision, **ODD), machine)
    same(tmp_path / "out", alone[precision], tolerance)
    wanted, _ = load_state(alone[precision] / "step-3")
    found, _ = load_state(tmp_path / "out" / "step-3")
    assert wanted.keys() == found.keys() >= {"model", "optimizer", "ema"}
    for group in ("model", "optimizer", "ema"):
        table = wanted[group]
        assert table.keys() == found[group].keys(), group
        for key, tensor in table.items():
            a, b = whole(tensor), whole(found[group][key])
            assert a.shape == b.shape and a.dtype == b.dtype
            if group == "model":
                torch.testing.assert_close(b, a, rtol=tolerance[1], atol=tolerance[2], msg=lambda m, n=key: f"{n}: {m}")
    if precision == "fp32":
        shutil.rmtree(tmp_path / "out" / "step-6")
        shutil.rmtree(tmp_path / "out" / "model")
        spawn(2, run, run_of(tmp_path, **ODD), {"fsdp": 2})  # rows of its second half are written again
        same(tmp_path / "out", alone[precision], tolerance)


def scaled(rank: int, recipe: Any, changes: dict[str, Any]) -> None:
    loop.FIRST = 2.0**24  # type: ignore[attr-defined]
    run(rank, recipe, changes)


def test_the_loss_scale_is_that_of_any_number_of_shares(tmp_path: Path) -> None:
    """It falls as often, and the same steps have no update, into however many shares the data is divided."""
    some = {"precision": "fp16", "batch": 8, "micro_batch": 1, "max_steps": 9, "logging_steps": 1, "eval_steps": None,
            "save_steps": None}  # fmt: skip
    found = {}
    for ranks in (2, 4):
        (folder := tmp_path / str(ranks)).mkdir()
        spawn(ranks, scaled, run_of(folder, **some), {"fsdp": ranks})
        found[ranks] = [(row["skipped"], row["loss_scale"]) for row in told(folder / "out") if "loss" in row]
    assert found[2] == found[4]
    assert 2 < found[2][-1][0] < 8, "some overflow, and not all"
