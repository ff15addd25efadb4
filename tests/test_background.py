"""States written while training goes on: the bytes of a run that waits, an error that is heard, and nothing said too early."""

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mesh import spawn
from test_ranks import machine_of, run_of, told

from modelcenter.checkpoint import state
from modelcenter.checkpoint.manifest import verify
from modelcenter.checkpoint.state import steps
from modelcenter.errors import InputError
from modelcenter.train import background, loop, progress, session
from modelcenter.train.loop import train
from modelcenter.train.progress import Progress

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

SAID = re.compile(r"^saved: (.*/step-\d+) \(stall (\d+\.\d\d) s, written in (\d+\.\d) s\)$", re.MULTILINE)
PATIENCE = 200  # seconds until one thread gives the other up, on however busy a machine
EVERY = {"save_steps": 2, "logging_steps": 1, "eval_steps": None, "ema": 0.9}


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each file takes so long, before its bytes are looked at."""
    real = state.write_group

    def write_group(*rest: Any) -> Any:
        time.sleep(seconds)
        return real(*rest)

    monkeypatch.setattr(state, "write_group", write_group)


def behind(shape: tuple[int, int] = (1, 1)) -> Any:
    return replace(machine_of(shape), async_save=True)


def files(out: Path) -> dict[str, dict[str, bytes]]:
    return {path.name: {file.name: file.read_bytes() for file in path.iterdir()} for path in steps(out)}


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, Path]:
    """A run that waits for its states."""
    (tmp_path / "waits").mkdir()
    recipe = run_of(tmp_path / "waits", **EVERY)
    train(recipe, machine_of((1, 1)))
    return recipe, tmp_path / "waits" / "out"


def test_the_bytes_of_a_run_that_waits(
    waited: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    slowly(monkeypatch, 0.1)  # updates come before the bytes are looked at, and a save is due before the last has ended
    real, early = Progress.say, []

    def say(self: Progress, text: str) -> None:
        if text.startswith("saved: "):
            verify(SAID.match(text)[1])  # type: ignore[index]
            early.extend(re.findall(r"\.tmp-\S*", " ".join(os.listdir(tmp_path / "out"))))
        real(self, text)

    monkeypatch.setattr(progress.Progress, "say", say)
    capsys.readouterr()
    train(replace(waited[0], output_dir=str(tmp_path / "out")), behind())
    assert files(tmp_path / "out") == files(waited[1]) and len(files(waited[1])) == 4 and not early
    assert told(tmp_path / "out") == told(waited[1])
    said = SAID.findall(capsys.readouterr().err)
    assert [path[-6:] for path, _, _ in said] == ["step-2", "step-4", "step-6", "step-8"]
    assert all(float(took) >= 0.4 for _, _, took in said), "four files of a tenth of a second each"


def test_steps_go_on_while_a_state_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Its first file waits for the last step, however fast or slow the two threads are, and that step for the file; twelve seconds
    pass there, by a clock that stands still else."""
    real, write, begun, over, now = Progress.say, state.write_group, threading.Event(), threading.Event(), [1000.0]

    def say(self: Progress, text: str) -> None:
        real(self, text)
        if text.startswith("step 5/5"):
            assert begun.wait(PATIENCE), "nobody writes"
            now[0] += 12
            over.set()

    def write_group(*rest: Any) -> Any:
        begun.set()
        assert over.wait(PATIENCE), "the run has waited for all of it"
        return write(*rest)

    monkeypatch.setattr(background, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(progress.Progress, "say", say)
    monkeypatch.setattr(state, "write_group", write_group)
    train(run_of(tmp_path, **{**EVERY, "save_steps": 3, "max_steps": 5}), behind())
    said = capsys.readouterr().err
    assert said.index("step 5/5") < said.index("saved: ") < said.index("\nmodel (averaged weights): ")
    assert SAID.findall(said)[0][1:] == ("0.00", "12.0"), "the seconds of the last step are no stall of the run"


def failing(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """The files of some saves, by their number, have no room."""
    real, seen = state.write_group, []

    def write_group(folder: Path, *rest: Any) -> Any:
        seen.extend([folder] if folder not in seen else [])
        if bad(len(seen)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, *rest)

    monkeypatch.setattr(state, "write_group", write_group)


def test_a_fault_is_heard_and_costs_one_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    failing(monkeypatch, lambda save: save in (2, 4))  # the last, too: it is heard at the end
    train(run_of(tmp_path, **EVERY), behind())
    said = capsys.readouterr().err
    assert [path.name for path in steps(tmp_path / "out")] == ["step-6", "step-2"]
    for step in (4, 8):
        assert re.search(rf"^step {step} not saved: .*No space left on device.*; the older ones are intact$", said, re.MULTILINE)
    assert len(SAID.findall(said)) == 2 and "\nmodel (averaged weights): " in said and not list((tmp_path / "out").glob(".tmp-*"))


def test_what_the_disk_had_against_it_is_raised_whatever_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(state, "write_group", lambda *rest: {}["a bug of ours"])  # type: ignore[index]
    with pytest.raises(KeyError, match="a bug of ours"):
        train(run_of(tmp_path, **EVERY), behind())


@pytest.mark.parametrize("bad", [False, True])
def test_a_run_that_is_stopped_waits_for_its_state(bad: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was asked in a step whose state is being written; if that fails it is an error, as of a run that waits."""
    slowly(monkeypatch, 0.2)
    failing(monkeypatch, lambda save: bad and save > 1)
    real, asked = session.save, []

    def stopped(folder: Path, at: Any, *rest: Any) -> Any:
        if at.step == 4 and not asked:
            os.kill(os.getpid(), signal.SIGTERM)
            asked.append(at.step)
        return real(folder, at, *rest)

    monkeypatch.setattr(session, "save", stopped)
    if bad:
        with pytest.raises(InputError, match="stopped after step 4, not saved; the same command goes on after step 2"):
            train(run_of(tmp_path, **EVERY), behind())
    else:
        assert train(run_of(tmp_path, **EVERY), behind()).step == 4
    assert steps(tmp_path / "out")[0].name == ("step-2" if bad else "step-4")


def test_a_stop_between_two_states_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slowly(monkeypatch, 0.2)
    real, done = session.accumulate, []

    def accumulate(*rest: Any) -> Any:
        done.append(1)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest)

    monkeypatch.setattr(session, "accumulate", accumulate)
    assert train(run_of(tmp_path, **{**EVERY, "save_steps": 4}), behind()).stopped
    assert [path.name for path in steps(tmp_path / "out")] == ["step-3"]


@pytest.mark.gpu
def test_an_accelerator_goes_on_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Copies go through pinned memory, and are whole before the next update."""
    slowly(monkeypatch, 0.1)
    for name, asynchronous in (("waits", False), ("behind", True)):
        (tmp_path / name).mkdir()
        train(run_of(tmp_path / name, **EVERY), replace(machine_of((1, 1)), device="cuda", async_save=asynchronous))
    first, second = (files(tmp_path / name / "out") for name in ("waits", "behind"))
    for step, table in first.items():
        assert {n: b for n, b in table.items() if n.endswith("safetensors")} == {
            n: b for n, b in second[step].items() if n.endswith("safetensors")
        }
    assert len(first) == len(second) == 4


# ------------------------------------------------------------------------------------------------------------ several ranks


def ranked(rank: int, recipe: Any, shape: tuple[int, int], asynchronous: bool) -> None:
    """The second rank is slow to write, and has no room for the second state."""
    loop.plot_loss = lambda folder: "not drawn"
    real, seen = state.write_group, []

    def write_group(folder: Path, *rest: Any) -> Any:
        seen.extend([folder] if folder not in seen else [])
        if asynchronous and rank == 1:
            time.sleep(0.1)
        if rank == 1 and len(seen) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, *rest)

    state.write_group = write_group
    train(recipe, behind(shape) if asynchronous else machine_of(shape))


@pytest.mark.parametrize("shape", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_ranks_write_the_bytes_of_ranks_that_wait(shape: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "waits").mkdir()
    recipe = run_of(tmp_path / "waits", **EVERY)
    spawn(shape[0] * shape[1], ranked, recipe, shape, False)
    spawn(shape[0] * shape[1], ranked, replace(recipe, output_dir=str(tmp_path / "out")), shape, True)
    wanted = files(tmp_path / "waits" / "out")
    assert list(wanted) == ["step-8", "step-6", "step-2"] and files(tmp_path / "out") == wanted
