"""A run that stands still ends with every rank's stacks, and the rank at fault is named."""

import ctypes
import errno
import gzip
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch._dynamo  # imported where a model is sharded: here once, and not in each rank
import torch.distributed.fsdp
from mesh import DEVICE, enter, spawn
from test_launch import ENDLESS, command, once_it_steps, one_thread  # noqa: F401
from test_ranks import machine_of, run_of

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.checkpoint import state
from modelcenter.checkpoint.atomic import write_new
from modelcenter.data import formats, packing, source
from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Loader
from modelcenter.data.objective import find_objective, make_examples, texts_of
from modelcenter.data.read import read_records
from modelcenter.data.record import Few, Record, Records
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.parallel import watch
from modelcenter.parallel.apply import join
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.ranks import ALONE
from modelcenter.train import launch, loop, setup
from modelcenter.train.loop import train

TIMEOUT = 2.0 if DEVICE == "cpu" else 3.0  # seconds without progress
LATE = 90.0  # seconds in which everybody is gone after that, however busy this machine is: a first step alone may take 60
pytestmark = pytest.mark.foreseen("test_the_others_of_a_stopped_rank_end")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, the ranks come to their first step."""
    monkeypatch.setattr(watch, "FIRST", 30)


def ends_of(ranks: int, folder: Path, work: Any, *args: Any, stopped: int | None = None) -> list[int | None]:
    """The exit statuses of ranks that do `work` and are not expected to come back; `stopped` cannot end by itself."""
    context = multiprocessing.get_context("fork")
    ours, pipe = context.Pipe()
    jobs = [context.Process(target=enter, args=(n, ranks, str(folder), pipe, work, args), daemon=True) for n in range(ranks)]
    for job in jobs:
        job.start()
    multiprocessing.connection.wait([job.sentinel for job in jobs], 2 * LATE)
    for rank, job in enumerate(jobs):
        if rank != stopped:
            job.join(LATE)
    for job in jobs:
        job.kill()
        job.join()
    ours.close()
    return [job.exitcode for job in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_stopped_rank_ends_the_run(victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    began: list[float] = []
    processes: list[Any] = []

    def act(ranks: list[Any]) -> None:
        processes.extend(ranks)
        began.append(time.monotonic())
        os.kill(ranks[victim].pid, signal.SIGSTOP)

    once_it_steps(tmp_path / "out", monkeypatch, act)
    assert main([*command(tmp_path, **ENDLESS), "machine.timeout=15"]) == watch.STALLED
    assert time.monotonic() - began[0] < 15 + LATE and all(process.poll() is not None for process in processes)
    said = capfd.readouterr().err
    other = 1 - victim
    assert said.count("modelcenter: error:") == 1 and "Traceback" not in said
    error = f"modelcenter: error: no progress for 15 s: rank {victim}: says nothing, it is stopped or its machine is gone, "
    assert error in said and f"rank {other}: waits for others at " in said, said
    text = (tmp_path / "out" / "ranks" / f"{other}.txt").read_text()
    assert "thread MainThread:" in text and "train/loop.py" in text and "torch/distributed" in text


def asleep(rank: int, recipe: Any, how: str) -> None:
    """From its sixth step on rank 1 makes no more batches: it sleeps, lets no other thread of it run, or is stopped."""
    loop.plot_loss = lambda folder: "not drawn"
    real = Loader.steps

    def steps(self: Any, *rest: Any, **options: Any) -> Any:
        for n, item in enumerate(real(self, *rest, **options)):
            if rank == 1 and n == 6:  # of which two wait in the prefetch, so that some steps are done
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                ctypes.PyDLL(None).sleep(600) if how == "held" else time.sleep(600)
            yield item

    Loader.steps = steps  # type: ignore[method-assign]
    train(recipe, Machine(device="cpu", threads=1, fsdp=recipe.batch // 2, timeout=TIMEOUT))


def test_a_loader_that_sleeps_is_named(tmp_path: Path) -> None:
    assert ends_of(3, tmp_path, asleep, run_of(tmp_path, **{**ENDLESS, "batch": 6}), "asleep") == [watch.STALLED] * 3
    out = tmp_path / "out" / "ranks"
    first = {rank: (out / f"{rank}.txt").read_text().partition("\n")[0] for rank in range(3)}
    assert first[1].startswith("rank 1: stands at data/prefetch.py:") and "its thread prefetch stands at " in first[1], first
    assert all(first[rank].startswith(f"rank {rank}: waits for others at parallel/ranks.py:") for rank in (0, 2)), first
    assert "test_watch.py" in (out / "1.txt").read_text()  # where the loader sleeps


def test_the_others_of_a_stopped_rank_end(tmp_path: Path) -> None:
    ends = ends_of(2, tmp_path, asleep, run_of(tmp_path, **{**ENDLESS, "batch": 4}), "stopped", stopped=1)
    assert ends == [watch.STALLED, -signal.SIGKILL], "it stays stopped, until it is killed here"
    folder = tmp_path / "out" / "ranks"
    # wherever it is: the loader's thread stops the process in the middle of a step
    assert (folder / "0.txt").read_text().startswith("rank 0: waits for others at ") and not (folder / "1.txt").exists()
    with pytest.raises(launch.RankError, match=r"rank 1: says nothing, .* rank 0: waits for others at"):
        launch.stalled(folder, range(2), TIMEOUT, {})


def importing() -> None:
    """Stands in for a module of torch.distributed that imports another."""
    frame = sys._getframe()
    where.append(watch.clause(frame))


where: list[str] = []


@pytest.mark.parametrize(("files", "verb"), [
    (("a/torch/distributed/c10d.py",), "waits for others"),
    (("<frozen importlib._bootstrap>", "a/torch/distributed/fsdp.py"), "stands"),
    (("a/torch/nn/module.py",), "stands"),
])  # fmt: skip
def test_who_waits_for_others(files: tuple[str, ...], verb: str) -> None:
    """Innermost file first; a module that is being read waits for nobody."""
    scope: dict[str, Any] = {"call": importing}
    for file in files:
        exec(compile("def call(inner=call): inner()", file, "exec"), scope)  # noqa: S102  a file is a name here
    scope["call"]()
    assert where.pop().startswith(f"{verb} at ")


def late(rank: int, folder: Path, machine: Machine) -> None:
    """Rank 1 has made progress just now: it hears of the end from rank 0 alone, which does not wait for it."""
    ranks = join(machine)
    with watch.Watch(folder, ranks, 1.0 if rank == 0 else 60.0):
        watch.beat(step=True)
        time.sleep(600)


def test_one_that_gives_up_tells_the_others(tmp_path: Path) -> None:
    assert ends_of(2, tmp_path, late, tmp_path / "ranks", machine_of((2, 1))) == [watch.STALLED] * 2
    first = (tmp_path / "ranks" / "1.txt").read_text().split("\n")
    assert first[0].startswith("rank 1: stands at ") and first[1] == "no progress for 1 s", first[:2]


def test_a_rank_that_keeps_the_interpreter_ends(tmp_path: Path, capfd: Any) -> None:
    """Its watch cannot run; faulthandler's can."""
    assert ends_of(2, tmp_path, asleep, run_of(tmp_path, **{**ENDLESS, "batch": 4}), "held") == [watch.STALLED, 1]
    assert "rank 0: waits for others" in (tmp_path / "out" / "ranks" / "0.txt").read_text()
    said = capfd.readouterr().err
    assert "Timeout (" in said and "in steps" in said, said


def test_the_first_step_may_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_run", watch.Pulse())
    guard = watch.Watch(tmp_path, ALONE, 10)
    watch.beat()
    assert guard.limit == 300, "a file that is written is no step"
    watch.beat(step=True)
    assert guard.limit == 10


class Counted(watch.Pulse):
    """How often there was progress."""

    beats = -1  # the beginning is none

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)[name] = value
        vars(self)["beats"] = self.beats + (name == "last")


@pytest.fixture
def pulse(monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setattr(watch, "_run", Counted())
    return watch._run  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
def test_an_indexed_file_is_progress(name: str, tmp_path: Path, pulse: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus takes hours to be indexed, and a rank that does so does not stand still."""
    for module, what in ((source, "CHUNK"), (formats, "DOCUMENT")):
        monkeypatch.setattr(module, what, 64)
    data = b'{"text": "abc"}\n' * 100
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    read_records(str(tmp_path / name), "text" if ".txt" in name else "auto")
    assert pulse.beats >= len(data) // 64 * (2 if name.endswith(".gz") else 1)  # unpacked, then read


@pytest.mark.parametrize("what", ["char", "bpe:300", "labels", "examples"])
def test_each_record_that_is_worked_on_is_progress(what: str, pulse: Counted) -> None:
    """Also of those in memory, for which no file is read."""
    records = Records([Few([Record({"text": "ab cd", "label": "xy"[k % 2]}, "a.json", k) for k in range(50)])])
    if what == "labels":
        assert find_objective("classify").names(records, DataConfig()) == ("x", "y")
    elif what == "examples":
        tokenizer = open_tokenizer("char", ["abcd "])
        before = pulse.beats
        make_examples("classify", records, tokenizer, DataConfig(seq_len=8), names=("x", "y"))
        assert pulse.beats - before >= 50
    else:
        open_tokenizer(what, texts_of("lm", records, DataConfig()))
    assert pulse.beats >= 50


def test_packing_is_progress(pulse: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "WINDOW", 10)
    packing.Packed(SimpleNamespace(lengths=np.full(95, 3), size=8, written=0))  # type: ignore[arg-type]  # all that is asked of examples
    assert pulse.beats == 10


@pytest.mark.parametrize("beams", [1, 2])
def test_each_token_generated_is_progress(beams: int, pulse: Counted) -> None:
    """An evaluation that writes long texts takes longer than the limit for one batch of them."""
    config = {"layers": 1, "dim": 8, "heads": 2, "vocab": 11, "positions": 32}
    model = mc.build("gpt2", config=config)
    pulse.beats = 0
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=9, min_new_tokens=9, num_beams=beams, eos_token_id=10, pad_token_id=0)
    assert 8 <= pulse.beats <= 9


def steady(rank: int, recipe: Any) -> None:
    """Each step takes longer than a third of the limit, and an evaluation of several batches longer than the limit itself."""
    loop.plot_loss = lambda folder: "not drawn"
    real, once = Loader.steps, Loader.once

    def steps(self: Any, *rest: Any, **options: Any) -> Any:
        for item in real(self, *rest, **options):
            time.sleep(0.9)
            yield item

    def batches(self: Any) -> Any:
        for batch in once(self):
            time.sleep(0.9)
            yield batch

    Loader.steps, Loader.once = steps, batches  # type: ignore[method-assign]
    began = time.monotonic()
    run = train(recipe, Machine(device="cpu", threads=1, fsdp=2, timeout=3))
    assert run.step == recipe.max_steps and time.monotonic() - began > 4


@pytest.mark.slow
def test_a_slow_run_is_left_alone(tmp_path: Path) -> None:
    spawn(2, steady, run_of(tmp_path, max_steps=5, eval_steps=5, save_steps=None, batch=4))
    assert not (tmp_path / "out" / "ranks").exists()


def told_often(rank: int, folder: Path, machine: Machine) -> None:
    """Ranks look a hundred times, in which all have moved, and then a hundred times in which none has."""
    ranks, sizes = join(machine), []
    guard = watch.Watch(folder / "ranks", ranks, 60.0)
    guard.pause = 0.01
    with guard:
        ranks.agree("begun")
        store = Path(guard.store.path)
        for moves in (True, False):
            sizes.append(store.stat().st_size)
            for _ in range(100):
                if moves:
                    watch.beat(step=True)
                time.sleep(0.01)
            ranks.agree("done")
        sizes.append(store.stat().st_size)
    assert guard.heard > 0, "the other has moved"
    a, b, c = sizes
    assert 0 < b - a < 200 and c - b < 200, sizes


def test_a_store_in_a_file_is_not_told_of_each_look(tmp_path: Path) -> None:
    spawn(2, told_often, tmp_path, machine_of((2, 1)))


def pieces(seconds: float) -> Iterator[bytes]:
    """A file that a slow disk takes for so long."""
    for _ in range(round(seconds / 0.25)):
        time.sleep(0.25)
        yield b"piece"


def saving(rank: int, folder: Path, machine: Machine, how: str) -> None:
    """The first rank's share of a save takes twice the limit or more. It comes along; or its disk stops to take any; or it is
    written in the background, waited for by the run's thread, or while that stands still elsewhere."""
    ranks = join(machine)
    with watch.Watch(folder / "ranks", ranks, 1.5):
        watch.beat(step=True)
        if rank == 0:
            seconds, pulse = {"stands": 0.5, "beside": 60.0}.get(how, 3.0), watch.Pulse()

            def work() -> None:
                with watch.apart(pulse) if how in ("awaited", "beside") else nullcontext():
                    write_new(folder / "file", pieces(seconds))
                    time.sleep(600 if how == "stands" else 0)

            if how in ("awaited", "beside"):
                with ThreadPoolExecutor(1) as pool:
                    job = pool.submit(work)
                    time.sleep(600) if how == "beside" else watch.wait_for(job, pulse)
            else:
                work()
        ranks.agree("written")  # where the others wait all the time
    os._exit(0)


@pytest.mark.parametrize(("how", "ends"), [("comes", 0), ("awaited", 0), ("stands", watch.STALLED), ("beside", watch.STALLED)])
def test_a_long_save_is_no_stall_as_long_as_it_comes_along(how: str, ends: int, tmp_path: Path) -> None:
    assert ends_of(2, tmp_path, saving, tmp_path, machine_of((2, 1)), how) == [ends] * 2
    written = (tmp_path / "file").stat().st_size // len(b"piece")
    assert written < 200 if how == "beside" else written == (2 if how == "stands" else 12), "when it stood, and not before"


def slow_disk(rank: int, recipe: Any, later: bool) -> None:
    """Every state takes the first rank longer than the limit: a tensor is written in bits, and each of those takes a while."""
    loop.plot_loss = lambda folder: "not drawn"
    watch.FIRST = 30  # as `patient` has it, for ranks that are no children of the test
    state.PIECE = 4096
    real, begun = state.write_hashed, []

    def write_hashed(path: Path, chunks: Any) -> Any:
        def slowly() -> Any:
            for n, chunk in enumerate(chunks):
                time.sleep(TIMEOUT / 10 if rank == 0 and n < 12 and path.name.startswith("optimizer") else 0)
                yield chunk

        begun.append(time.monotonic())
        return real(path, slowly())

    state.write_hashed = write_hashed
    run = train(recipe, Machine(device=DEVICE, threads=1, fsdp=2, timeout=TIMEOUT, async_save=later))
    assert run.step == recipe.max_steps and time.monotonic() - begun[0] > TIMEOUT
    assert len(list(Path(recipe.output_dir).glob("step-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_a_run_whose_saves_are_long(later: bool, tmp_path: Path) -> None:
    spawn(2, slow_disk, run_of(tmp_path, max_steps=3, eval_steps=None, save_steps=3, batch=4), later)
    assert not (tmp_path / "out" / "ranks").exists()


def without_room(rank: int, recipe: Any, victim: int) -> None:
    """/tmp, where the tokenizer's files are made, is full on one rank's machine for the first evaluation."""
    loop.plot_loss = lambda folder: "not drawn"
    real = setup.tempfile

    def full(*args: Any, **options: Any) -> Any:
        setup.tempfile = real
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == victim:
        setup.tempfile = SimpleNamespace(TemporaryDirectory=full)  # type: ignore[assignment]
    train(recipe, replace(machine_of((2, 1)), timeout=10))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_without_room_for_the_tokenizer_holds_nobody_up(victim: int, tmp_path: Path, capfd: Any) -> None:
    """The rank that writes it says so, and all go on; the others need none."""
    recipe = run_of(tmp_path, best="loss", eval_steps=1, max_steps=2, save_steps=None)
    assert ends_of(2, tmp_path, without_room, recipe, victim) == [0, 0]
    assert (tmp_path / "out" / "model" / "tokenizer.json").exists()
    assert capfd.readouterr().err.count("the best model is not written: ") == (victim == 0)


def test_who_stands_and_who_waits(tmp_path: Path) -> None:
    """The line names those at fault first, and those that left no stacks before all; stacks of a run before count for nothing."""
    (tmp_path / "0.txt").write_text("rank 0: waits for others at parallel/ranks.py:1 (sum)\n")
    (tmp_path / "1.txt").write_text("rank 1: stands at data/loader.py:7 (rows)\n")
    (tmp_path / "2.txt").write_text("rank 2: waits for others at parallel/ranks.py:1 (sum)\n")
    (tmp_path / "3.txt").write_text("rank 3: of a run before\n")
    before = {"3.txt": launch.stamps(tmp_path)["3.txt"], "2.txt": 7}
    os.utime(tmp_path / "1.txt", (0, 0))  # the clock was set back in the run
    with pytest.raises(launch.RankError) as caught:
        launch.stalled(tmp_path, range(4), 9, before)
    line = str(caught.value)
    assert line.startswith("no progress for 9 s: rank 3: says nothing"), line
    assert ", rank 1: stands at data/loader.py:7 (rows), ranks 0, 2: waits for others at " in line, line
    assert caught.value.status == watch.STALLED and caught.value.passing and machine_of((2, 1)).timeout == 600
