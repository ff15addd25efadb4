"""Runs that are killed and stopped (kill_run.py): a few times here, 200 times each with the slow tests; of several ranks fewer."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import kill_run
import pytest
import torch._dynamo  # imported where a model is sharded: here once, and not in each rank
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401
from test_connect import Called
from torch.distributed import device_mesh

from modelcenter.checkpoint.atomic import staging
from modelcenter.cli import evaluate as judging
from modelcenter.parallel import connect
from modelcenter.parallel.rollcall import RollCall
from modelcenter.parallel.watch import Watch, stacks
from modelcenter.registry import families
from modelcenter.train import evaluate, launch, loop

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.foreseen("swept")  # a life of others would pass with it


def run(kind: str, count: int, plant: str = "pass", settings: tuple[str, ...] = ()) -> str:
    """What the script says; `plant` is run in its process first."""
    code = f"import sys; sys.path.insert(0, 'tests'); import kill_run; {plant}; sys.exit(kill_run.main())"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, kind, *settings, "--count", str(count)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.stdout


BEHIND = ("machine.async_save=true",)


@pytest.mark.parametrize(("kind", "settings", "more"), [
    ("kills", (), ""), ("signals", (), ""), ("kills", BEHIND, ""), pytest.param("signals", BEHIND, "", marks=pytest.mark.slow),
    ("kills", (), kill_run.BEST), pytest.param("signals", (), kill_run.BEST, marks=pytest.mark.slow),
])  # fmt: skip
def test_nothing_is_lost(kind: str, settings: tuple[str, ...], more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_run.loop, "plot_loss", lambda folder: "not drawn")
    families()  # imported here once, and not in each life
    finished, wrong = kill_run.KINDS[kind](kill_run.Trial(tmp_path, 3, steps=100, settings=settings, more=more))
    assert finished and not wrong


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["kills", "signals"])
@pytest.mark.parametrize("settings", [(), BEHIND, ("--best",)], ids=["", "behind", "best"])
def test_nothing_is_lost_in_200(kind: str, settings: tuple[str, ...]) -> None:
    said = run(kind, 200, settings=settings)
    assert re.match(rf"200 {kind} over \d+ runs of 300 steps in \d+ s: 0 wrong\n", said), said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("settings", [
    ("machine.fsdp=2",), ("machine.fsdp=2", "machine.zero=1"), ("machine.tensor_parallel=2",), ("machine.replicate=2", *BEHIND),
    ("machine.fsdp=2", "machine.tensor_parallel=2", *BEHIND),
])  # fmt: skip
def test_nothing_is_lost_of_ranks(settings: tuple[str, ...]) -> None:
    """Each kind of end twice."""
    said = run("ranks", 2 * len(kill_run.ENDS), settings=(*settings, "--steps", "40"))
    assert f"{2 * len(kill_run.ENDS)} ranks over " in said and ": 0 wrong\n" in said, said


def test_what_a_killed_launcher_has_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one does, and leaves nothing itself; what a living one has stays."""
    families()
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(kill_run.tempfile, "tempdir", str(place))

    def there() -> set[Path]:
        return set(place.glob(".tmp-*"))

    def kill(process: int) -> None:
        while not kill_run.children(process):
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)

    with staging(place / launch.PLACE) as living:
        folder = kill_run.fresh(kill_run.Trial(tmp_path, 1, steps=2), "run")
        assert kill_run.live(folder, [(0.0, kill)], ["machine.fsdp=2"], kill_run.forked).code == 137
        (left,) = there() - {living}
        assert left.stat().st_mode & 0o777 == 0o700
        life = kill_run.live(folder, [], ["machine.fsdp=2"], kill_run.forked)
        assert life.code == 0 and there() == {living}, life.said.decode()


PLACES = {"connect": (dist, "init_process_group"), "group": (device_mesh, "init_device_mesh"), "agree": (loop, "agree"),
          "evaluate": (evaluate, "evaluate")}  # fmt: skip


def in_their_midst(number: int, victim: int, place: str) -> None:
    """Ranks are forked, one is given a signal where ranks connect, compare or evaluate, and the others have a second for that, from
    when they wait for it. No other thread of it asks the store, so that it does not hold the lock of the file in which they met."""
    kill_run.forked()
    real = getattr(*PLACES[place])

    def struck() -> bool:
        return os.environ["RANK"] == str(victim)

    def there() -> Path:
        return Path(os.environ[launch.STORE]).with_name("struck")

    def call(*rest: Any, **options: Any) -> Any:
        if struck():
            there().touch()
            os.kill(os.getpid(), number)
        return real(*rest, **options)

    class Listens(Called):
        def listen(self) -> None:
            if not struck():
                super().listen()

    class Watches(Watch):
        def listen(self) -> None:
            if not struck():
                super().listen()

        @property
        def limit(self) -> float:
            return 1.0 if there().exists() and "waits" in stacks()[0] else 1e6

    setattr(*PLACES[place], call)
    connect.RollCall = lambda *who: Listens(Path(), victim, *who[:3], 1.0)  # type: ignore[assignment,misc]
    Listens.end = RollCall.end  # type: ignore[method-assign]  # a file does not go with the first rank
    connect.FIRST = 0  # torch's own limit: a minute, for mutants
    loop.Watch = judging.Watch = lambda *who: Watches(*who[:2], 1.0)  # type: ignore[assignment,misc]


SILENT = r"environment: WORLD_SIZE: \d, but rank {} does not answer, \d+ s after all had come; start all of them again; .*"


@pytest.mark.parametrize(("number", "victim", "place", "tp", "code", "line"), [
    (signal.SIGSTOP, 1, "connect", 1, 75, SILENT.format(1)),
    (signal.SIGSTOP, 0, "connect", 1, 75, SILENT.format(0)),
    pytest.param(signal.SIGSTOP, 3, "group", 2, 75, SILENT.format(3), marks=pytest.mark.slow),
    (signal.SIGSTOP, 1, "agree", 1, 76, r"no progress for \d+ s: rank 1: says nothing, .* rank 0: waits for others at .*"),
    (signal.SIGKILL, 1, "connect", 1, 137, "rank 1 was ended by signal 9"),
], ids=["stopped", "first", "group", "agree", "killed"])  # fmt: skip
def test_a_rank_that_is_lost_where_ranks_connect(number: int, victim: int, place: str, tp: int, code: int, line: str,
                                                 tmp_path: Path) -> None:
    """One line, nothing left of the run, and the status that lets a cluster try again."""
    families()
    folder = kill_run.fresh(kill_run.Trial(tmp_path, 1, steps=5), "run")
    machine = ["machine.fsdp=2", f"machine.tensor_parallel={tp}", "machine.timeout=20"]
    life = kill_run.live(folder, [], machine, partial(in_their_midst, number, victim, place))
    said = life.said.decode()
    assert (life.code, said.count("\n")) == (code, 1) and re.fullmatch(f"modelcenter: error: {line}\n", said), (life.code, said)


def test_an_evaluation_does_not_wait_for_a_rank_that_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as training does, and leaves the run's folder as it was."""
    monkeypatch.setattr(kill_run.loop, "plot_loss", lambda folder: "not drawn")
    monkeypatch.setattr(kill_run.tempfile, "tempdir", str(tmp_path))
    families()
    folder = kill_run.fresh(kill_run.Trial(tmp_path, 1, steps=2), "run")
    machine, words = ["machine.fsdp=2", "machine.timeout=20"], ["evaluate", "out"]
    assert kill_run.live(folder, []).code == 0
    before = sorted(folder.rglob("*"))
    life = kill_run.live(folder, [], machine, kill_run.forked, words)
    assert life.code == 0 and b" loss " in life.said, life.said.decode()
    life = kill_run.live(folder, [], machine, partial(in_their_midst, signal.SIGSTOP, 1, "evaluate"), words)
    line = f"no progress for 20 s: rank 1: says nothing, .*, rank 0: .*; ({tmp_path}/modelcenter-evaluate-.*)/ranks has every stack"
    said = re.fullmatch(f"modelcenter: error: {line}\n", life.said.decode())
    assert said and life.code == 76, (life.code, life.said.decode())
    assert sorted(folder.rglob("*")) == before and [p.name for p in (Path(said[1]) / "ranks").iterdir()] == ["0.txt"]


@pytest.mark.parametrize("step", [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]), 16])
def test_a_kill_in_writing_the_model(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call, or at one of some, by which the model's folder is made, of which there are more than fifty."""
    monkeypatch.setattr(kill_run.loop, "plot_loss", lambda folder: "not drawn")
    families()
    trial = kill_run.Trial(tmp_path, 0, steps=10)
    untouched = kill_run.fresh(trial, "untouched")
    assert kill_run.live(untouched, []).code == 0
    for number in range(1, 1000, step):
        folder = kill_run.fresh(trial, f"run-{number}")
        first = kill_run.live(folder, [], first=partial(kill_run.killed_at, number)).code
        assert kill_run.live(folder, []).code == 0
        assert kill_run.result(folder) == kill_run.result(untouched), number
        assert sorted(p.name for p in (folder / "out").iterdir()) == sorted(p.name for p in (untouched / "out").iterdir()), number
        if first == 0:
            break
    assert number > 48


PLANTS = {
    "the position of the data": "kills; import modelcenter.train.loop as l, dataclasses; r = l.restore; "
                                "l.restore = lambda *a: dataclasses.replace(p := r(*a), sample=p.sample + 4)",
    "the random states": "kills; import torch; torch.set_rng_state = lambda state: None",
    "the state of a stop": "signals; import modelcenter.train.session as s; k = s.save; "
                           "s.save = lambda folder, at, *a: k(folder, at, *a) if at.step % 10 == 0 else folder",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", PLANTS)
def test_what_is_lost_is_noticed(what: str) -> None:
    kind, _, plant = PLANTS[what].partition("; ")
    assert " 0 wrong" not in run(kind, 12, plant)
