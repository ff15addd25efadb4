"""What a run does in trouble: updates that are not finite, losses that leap, and the way back to a state from before."""

import math
import os
import signal
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_train import MACHINE, TINY, bytes_of, recipe_of, rows

from modelcenter.errors import InputError
from modelcenter.train import evaluate, loop, session
from modelcenter.train.loop import train
from modelcenter.train.state import Position, restore

# Micro-batches and layers say nothing here: one of each.
BASE = {"eval_steps": None, "logging_steps": 1, "data.eval_fraction": 0.0, "micro_batch": 4, "config": {**TINY, "layers": 1}}


def key(batches: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(int(i) for batch in batches for i in batch["input_ids"].flatten())


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What is read at each of the first 90 steps."""
    setup, _ = loop.resolve(recipe_of(folder := tmp_path_factory.mktemp("order"), **BASE), MACHINE)
    assert folder.is_dir()
    steps = loop.prepare(setup, MACHINE, loop.torch.device("cpu")).loader.steps(micro_batch=4)
    return [key(next(steps)[1]) for _ in range(90)]


def change(monkeypatch: pytest.MonkeyPatch, which: Callable[[tuple[Any, ...]], str | None]) -> list[tuple[Any, ...]]:
    """Spoil the steps for whose data `which` says how: "gradient" (a NaN in it), "loss" (a NaN for it) or "leap" (ten times it).
    The list is of what was read."""
    read: list[tuple[Any, ...]] = []
    real = session.accumulate

    def spoiled(model: Any, batches: Any, *rest: Any) -> Any:
        loss, targets = real(model, batches, *rest)
        read.append(key(batches))
        how = which(read[-1])
        if how == "gradient":
            next(model.parameters()).grad[0, 0] = math.nan
        return {"loss": math.nan * loss, "leap": 10 * loss}.get(str(how), loss), targets

    monkeypatch.setattr(session, "accumulate", spoiled)
    return read


def at_steps(order: list[tuple[Any, ...]], **steps: Iterable[int]) -> Callable[[tuple[Any, ...]], str | None]:
    """Spoil the data of these steps, counted from 1."""
    table = {order[step - 1]: how for how, numbers in steps.items() for step in numbers}
    return table.get


def test_five_bad_steps_go_back_and_on_past_their_data(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """The state of step 10 was written after the update that may be to blame, so the one of 5 it is. From there on all is as in a
    run that resumes from that state at the later place of the data."""
    with monkeypatch.context() as patch:
        read = change(patch, at_steps(order, gradient=(11, 12, 14), loss=(13, 15)))
        run = train(recipe_of(tmp_path, **BASE), MACHINE)
    assert run.step == 20 and read == order[: 15 + 15]
    said = capsys.readouterr().err
    assert "step 15: back to step 5; the data read since, samples 20 to 59, is skipped\n" in said
    found = rows(tmp_path / "out")
    assert [row["step"] for row in found[1:]] == list(range(1, 21))
    assert [row["rollbacks"] for row in found[1:]] == [0] * 5 + [1] * 15
    assert found[-1]["skipped"] == 5 and found[-1]["tokens"] == 30 * 4 * 16

    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr(loop, "restore", lambda *a: replace(restore(*a), sample=60))
    recipe = replace(recipe_of(other, **BASE), data=recipe_of(tmp_path, **BASE).data, resume=str(tmp_path / "out" / "step-5"))
    train(recipe, MACHINE)
    for name in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        assert (tmp_path / "out" / "step-20" / name).read_bytes() == (other / "out" / "step-20" / name).read_bytes()


@pytest.mark.parametrize("best", [None, "loss"])
def test_the_best_of_steps_that_are_gone_back_over(
    best: str | None, tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is forgotten with them, for its row is gone; unless its model is what model/ holds, which is said."""
    values = iter([1.0, 2.5, 2.0])  # after step 7 and, once back at 5, after 7 and 14
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: {"eval_loss": next(values), "eval_targets": 1})
    change(monkeypatch, at_steps(order, gradient=range(9, 14)))
    judged = {"data.eval_path": str(tmp_path / "text.txt"), "eval_steps": 7, "best": best}
    train(recipe_of(tmp_path, **BASE | judged | {"max_steps": 14}), MACHINE)
    found = [(row["step"], row["best_eval_loss"], row["best_step"]) for row in rows(tmp_path / "out") if "eval_loss" in row]
    assert found == ([(7, 1.0, 7), (14, 1.0, 7)] if best else [(7, 2.5, 7), (14, 2.0, 14)])
    said = f"{tmp_path / 'out' / 'model'} is of step 7 from before going back, by loss 1; it stays until a better one comes"
    assert (said in capsys.readouterr().err) is (best is not None)
    assert (said in (tmp_path / "out" / "summary.md").read_text()) is (best is not None)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_states_of_bad_steps_displace_no_state_to_go_back_to(
    every: int, tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two are kept, and two and more are written from the last good update, which may be to blame, to the fifth bad one."""
    change(monkeypatch, at_steps(order, gradient=range(13, 18)))
    run = train(recipe_of(tmp_path, **{**BASE, "save_steps": every, "save_total_limit": 2}), MACHINE)
    assert run.step == 20 and f"step 17: back to step {11 // every * every};" in capsys.readouterr().err
    assert len(list((tmp_path / "out").glob("step-*"))) == 2  # with the next good state the others go


def test_steps_in_which_the_scale_falls_belong_to_the_trouble(
    tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp16 the first bad steps halve the scale, from 4 to 1, and only then five are counted. The weights are those of the last
    update throughout, which may be to blame: no state since then is gone back to, nor displaces one from before."""
    monkeypatch.setattr(loop, "FIRST", 4.0)
    change(monkeypatch, at_steps(order, gradient=range(11, 18)))
    train(recipe_of(tmp_path, **{**BASE, "precision": "fp16", "save_steps": 1, "save_total_limit": 2}), MACHINE)
    assert "step 17: back to step 9; " in capsys.readouterr().err


def test_a_leap_after_a_bad_step_goes_back_before_both(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    change(monkeypatch, at_steps(order, gradient=[54], leap=[55]))
    train(recipe_of(tmp_path, **{**LONG, "save_steps": 1}, on_spike="rollback"), MACHINE)
    assert "step 55: back to step 52; " in capsys.readouterr().err  # 53 was the last good update


def test_trouble_that_stays_ends_the_run(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 5 is gone back to once, although three good updates came before the next bad ones."""
    read = change(monkeypatch, at_steps(order, gradient=[*range(8, 13), *range(16, 21)]))
    with pytest.raises(InputError, match=r"step 13: 5 gradients in a row were not finite, after going back to step 5 too; a lower"):
        train(recipe_of(tmp_path, **BASE), MACHINE)
    assert read == order[: 12 + 8]


def test_a_broken_state_is_passed_over(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(data: Any) -> str | None:
        if data == order[12]:
            (tmp_path / "out" / "step-10" / "model.safetensors").write_bytes(b"x")
        return "gradient" if data in order[13:18] else None

    change(monkeypatch, spoil)
    train(recipe_of(tmp_path, **BASE), MACHINE)
    said = capsys.readouterr().err
    assert "passed over: " in said and "step-10/model.safetensors: 1 bytes" in said and "step 18: back to step 5; " in said
    assert not list((tmp_path / "out").glob("broken-*"))  # it is one of those that are removed


@pytest.fixture(scope="module")
def whole(order: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The recipe of a run that goes back behind step 15, and that nobody ends."""
    recipe = recipe_of(tmp_path_factory.mktemp("whole"), **BASE)
    with pytest.MonkeyPatch.context() as patch:  # the last two as conftest.py has them for tests
        change(patch, at_steps(order, gradient=range(11, 16)))
        patch.setattr(loop, "verdict", lambda *rest, **options: "memory: not asked")
        patch.setattr(loop, "plot_loss", lambda folder: "not drawn")
        train(recipe, MACHINE)
    return recipe


@pytest.mark.parametrize("stops", [[3], [12], [13, 14], [5, 10, 15]])
def test_a_run_that_goes_back_is_interrupted_without_a_trace(stops: list[int], tmp_path: Path, order: list[Any], whole: Any,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before the trouble, in it, when it goes back and afterwards: the last state is the same to the bit."""
    change(monkeypatch, at_steps(order, gradient=range(11, 16)))
    recipe, real, wanted = replace(recipe_of(tmp_path, **BASE), data=whole.data), session.update, Path(whole.output_dir)
    left = list(stops)

    def update(*rest: Any) -> float:
        update.calls += 1  # type: ignore[attr-defined]
        if left and update.calls == left[0]:  # type: ignore[attr-defined]
            left.pop(0)
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest)

    update.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(session, "update", update)
    runs = 1
    while train(recipe, MACHINE).stopped:
        runs += 1
    assert runs == len(stops) + 1 and not left
    assert bytes_of(wanted / "step-20") == bytes_of(tmp_path / "out" / "step-20")
    there = [{int(path.name[5:]) for path in folder.glob("step-*")} for folder in (wanted, tmp_path / "out")]
    assert there[1] == there[0] | {step for step in stops if step <= 5}  # none of those that were gone back past
    assert rows(wanted)[1:] == rows(tmp_path / "out")[1:]


@pytest.mark.parametrize("kills", [[16], [16, 32], [18, 21, 42]])
def test_a_run_that_is_killed_behind_its_way_back_goes_it_again(
    kills: list[int], tmp_path: Path, order: list[Any], whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the killed process knew, that it had gone back and behind which data, the next finds out as that had: from the
    state to which it returned all goes the same way, to the bit. So a kill costs the way back once more."""
    change(monkeypatch, at_steps(order, gradient=range(11, 16)))
    recipe, real, wanted = replace(recipe_of(tmp_path, **BASE), data=whole.data), session.update, Path(whole.output_dir)
    left, calls = list(kills), list[int]()

    def update(*rest: Any) -> float:
        calls.append(1)
        if left and len(calls) == left[0]:
            left.pop(0)
            raise RuntimeError("killed")
        return real(*rest)

    monkeypatch.setattr(session, "update", update)
    for _ in kills:
        with pytest.raises(RuntimeError, match="killed"):
            train(recipe, MACHINE)
    assert train(recipe, MACHINE).step == 20 and not left
    for path in wanted.glob("step-*"):
        assert bytes_of(path) == bytes_of(tmp_path / "out" / path.name)
    assert rows(wanted)[1:] == rows(tmp_path / "out")[1:]


LONG = {**BASE, "max_steps": 60, "save_steps": 20, "save_total_limit": 2}


def test_a_leap_is_reported_and_changes_nothing(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    for name, spoilt in (("a", ()), ("b", (50, 51, 53))):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            change(patch, at_steps(order, leap=spoilt))
            train(recipe_of(tmp_path / name, **LONG), MACHINE)
    said = capsys.readouterr().err
    assert said.count("the loss leaps to") == 2  # the second step of one spike is no news
    assert "step 50: the loss leaps to" in said and "step 53: the loss leaps to" in said
    assert [row["spikes"] for row in rows(tmp_path / "b" / "out")[-12:]] == [0, 1, 2, 2, 3] + [3] * 7
    weights = [(tmp_path / name / "out" / "step-60" / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]


def test_a_leap_rolls_back_if_asked(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    read = change(monkeypatch, at_steps(order, leap=[55]))
    train(recipe_of(tmp_path, **LONG, on_spike="rollback"), MACHINE)
    said = capsys.readouterr().err
    assert "step 55: the loss leaps to" in said and "step 55: back to step 40; the data read since, samples 160 to 219, " in said
    assert read == order[: 55 + 20]
    last = rows(tmp_path / "out")[-1]
    assert (last["step"], last["spikes"], last["rollbacks"], last["skipped"]) == (60, 1, 1, 0)


def test_a_leap_with_nothing_to_go_back_to_is_reported(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    change(monkeypatch, at_steps(order, leap=[45, 57]))
    train(recipe_of(tmp_path, **{**LONG, "save_steps": 44}, on_spike="rollback"), MACHINE)
    said = capsys.readouterr().err
    assert "step 45: no state to go back to: none was saved before the trouble began" in said and "step 57: back to step 44" in said


def test_nobody_looks_at_losses_with_off(tmp_path: Path, order: list[Any], monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    change(monkeypatch, at_steps(order, leap=[50]))
    train(recipe_of(tmp_path, **LONG, on_spike="off"), MACHINE)
    assert "leaps" not in capsys.readouterr().err and rows(tmp_path / "out")[-1]["spikes"] == 0


def test_going_back_without_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"on_spike: rollback without save_steps; give save_steps"):
        recipe_of(tmp_path, on_spike="rollback", save_steps=None)


def test_a_real_run_raises_no_alarm(tmp_path: Path) -> None:
    """The library's own source by characters: a loss that falls from 4.6 to below 3 at once, then slowly."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n".join((folder / name).read_text("utf-8") for name in ("argparse.py", "ast.py", "typing.py"))
    recipe = recipe_of(tmp_path, **{**BASE, "max_steps": 300, "save_steps": None, "batch": 8, "micro_batch": 8,
                                   "config": TINY})
    (tmp_path / "text.txt").write_text(text[:200_000])
    run = train(recipe, MACHINE)
    losses = [row["loss"] for row in rows(tmp_path / "out")[1:]]
    assert losses[0] > 4.4 and min(losses[:60]) < 3.2 and min(losses) < 2.5
    assert run.metrics["spikes"] == 0


def test_positions_of_older_states_are_read() -> None:
    from modelcenter.config import bind

    assert bind(Position, {"step": 3, "sample": 12}) == Position(step=3, sample=12)
