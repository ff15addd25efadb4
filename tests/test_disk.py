"""A disk that fails while a run writes: the run goes on, nothing that was saved is harmed, and what can be made up for is.

Every call of a run that changes its folder fails in turn, once and for a while; a real file system that is too small comes last.
"""

import errno
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_train import MACHINE, recipe_of, rows

from modelcenter.checkpoint.atomic import sync
from modelcenter.checkpoint.manifest import verify
from modelcenter.checkpoint.state import SaveError, steps
from modelcenter.errors import InputError
from modelcenter.train import loop, session
from modelcenter.train.loop import train
from modelcenter.train.metrics import Metrics, read_rows

RUN = {"max_steps": 6, "save_steps": 2, "eval_steps": 3, "logging_steps": 1, "best": "loss", "save_total_limit": 2}
CALLS = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "replace", "link", "ftruncate")


@pytest.fixture(autouse=True, scope="module")
def bare() -> Iterator[None]:
    """What fits into memory is no matter of the disk's, nor is a picture, and these would take three quarters of runs so short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "verdict", lambda *args: "memory: not asked")
        patch.setattr(loop, "plot_loss", lambda folder: "not drawn")
        yield


class Disk:
    """Counts the calls that write below `folder` from `begin` on, and lets `many` fail from the one numbered `at`."""

    def __init__(self, folder: Path, at: int, code: int, many: int) -> None:
        self.folder, self.at, self.code, self.many = os.path.realpath(folder), at, code, many
        self.count, self.on = 0, False

    def fails(self, target: Any) -> bool:
        if not self.on or not self.within(target):
            return False
        self.count += 1
        return self.at <= self.count < self.at + self.many

    def within(self, target: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(os.fspath(target))
        except OSError:
            return False
        return path.startswith(self.folder)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *rest: Any, **more: Any) -> Any:
            reads = name == "open" and not (rest and rest[0] & os.O_CREAT)
            if not reads and self.fails(target):
                if name in ("write", "pwrite") and len(rest[0]) > 1:  # half of it arrives
                    real(target, rest[0][: len(rest[0]) // 2], *rest[1:])
                raise OSError(self.code, os.strerror(self.code))
            return real(target, *rest, **more)

        return call


@contextmanager
def failing(disk: Disk) -> Iterator[None]:
    """From the first step to the end of training; what fails before that, before any work is done, is refused."""
    real = session.accumulate

    def begin(*args: Any) -> Any:
        disk.on = True
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "accumulate", begin)
        for name in CALLS:
            patch.setattr(os, name, disk.wrap(name, getattr(os, name)))
        yield


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The folder of a run on a good disk, and how many calls it makes."""
    folder = tmp_path_factory.mktemp("clean")
    disk = Disk(folder, 10**9, 0, 0)
    with failing(disk):
        train(recipe_of(folder, **RUN), MACHINE)
    return folder, disk.count


def attempt(folder: Path, clean: Path, at: int, code: int, many: int, capsys: pytest.CaptureFixture[str]) -> bool:
    """One run whose calls fail from number `at` on; whether it came to its end. Either way nothing is torn."""
    folder.mkdir()
    (folder / "text.txt").write_bytes((clean / "text.txt").read_bytes())
    recipe = replace(recipe_of(folder, **RUN), data=recipe_of(clean, **RUN).data)
    disk = Disk(folder / "out", at, code, many)
    capsys.readouterr()
    with failing(disk):
        try:
            ended = train(recipe, MACHINE).step == 6
        except InputError as error:  # the model, which is all that is left to write, cannot be
            ended = False
            assert os.strerror(code) in str(error) and "\n" not in str(error)
    said = capsys.readouterr().err
    assert disk.count >= at
    out = folder / "out"
    for path in steps(out):
        verify(path)
        assert (path / "model.safetensors").read_bytes() == whole(clean, path.name) or path.name in ("step-2",)
    left = [str(p) for p in out.rglob(".tmp*")]
    assert not left or many > 1 or "rename" in said, (at, left)
    assert ended == ((out / "model").is_dir() and "\nmodel: " in said)
    assert os.strerror(code) in said or not ended or many == 1, (at, said)  # a close or a lock that fails may be no harm
    if many == 1 and ended:
        assert rows(out)[1:] == rows(clean / "out")[1:] or "best model is not written" in said
    train(recipe, MACHINE)  # on a good disk again: the same command makes up for it
    assert (out / "step-6").is_dir() and (out / "model" / "model.safetensors").is_file()
    assert (out / "step-6" / "model.safetensors").read_bytes() == whole(clean, "step-6")
    assert not list(out.rglob(".tmp*"))
    return ended


def whole(clean: Path, name: str) -> bytes:
    path = clean / "out" / name / "model.safetensors"
    return path.read_bytes() if path.exists() else b""


@pytest.mark.parametrize(
    ("code", "many"),
    [pytest.param(errno.EIO, 1, id="once", marks=pytest.mark.slow), pytest.param(errno.ENOSPC, 25, id="for a while")],
)
def test_some_calls_fail(code: int, many: int, clean: tuple[Path, int], tmp_path: Path, capsys: Any) -> None:
    folder, count = clean
    ends = [attempt(tmp_path / str(at), folder, at, code, many, capsys) for at in range(3, count, count // 4)]
    assert sum(ends) > len(ends) // 2


@pytest.mark.slow
@pytest.mark.timeout(5000)  # 1,276 times two runs, a third of a CPU second together, on a machine that may do other things
@pytest.mark.parametrize(("code", "many"), [(errno.EIO, 1), (errno.ENOSPC, 25)], ids=["once", "for a while"])
def test_every_call_fails(code: int, many: int, clean: tuple[Path, int], tmp_path: Path, capsys: Any) -> None:
    folder, count = clean
    assert count > 150
    ends = [attempt(tmp_path / str(at), folder, at, code, many, capsys) for at in range(1, count)]
    assert sum(ends) > len(ends) // 2


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_flush_a_folder(
    code: int, clean: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems and shared folders of virtual machines; a file that it cannot flush is not safe anywhere."""
    real, asked = os.fsync, set[int]()

    def fsync(fd: int) -> None:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        asked.add(kind)
        if kind == unable:
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    unable = stat.S_IFDIR
    recipe = recipe_of(tmp_path, **RUN)
    assert train(recipe, MACHINE).step == 6 and asked == {stat.S_IFDIR, stat.S_IFREG}
    assert (tmp_path / "out" / "step-6" / "model.safetensors").read_bytes() == whole(clean[0], "step-6")
    unable = stat.S_IFREG
    with pytest.raises(OSError, match=os.strerror(code)):
        sync(tmp_path / "text.txt")


def test_rows_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a row arrives, then nothing for a while: it is said once, and afterwards every row is there, once and whole."""
    said: list[str] = []
    metrics, real, left = Metrics(tmp_path, {}, say=said.append), os.pwrite, [3]

    def full(fd: int, data: bytes, offset: int) -> int:
        if left[0]:
            left[0] -= 1
            real(fd, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: max(1, len(data) // 2)], offset)  # and short writes from then on

    monkeypatch.setattr(os, "pwrite", full)
    for step in range(1, 7):
        metrics.write({"step": step, "loss": step / 3})
        there = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if "step" in row]
        assert there == list(range(1, (step if step > 3 else len(there)) + 1))  # never torn; all of them once there is room
    metrics.rewind(4)
    metrics.write({"step": 5, "loss": 0.5})
    metrics.close()
    found = list(read_rows(tmp_path / "metrics.jsonl"))[1:]
    assert [(row["step"], row["loss"]) for row in found] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 4 / 3), (5, 0.5)]
    assert len(said) == 1 and said[0].endswith("metrics.jsonl: No space left on device; its rows wait for room")


def test_a_stop_that_cannot_be_saved_is_an_error(clean: tuple[Path, int], tmp_path: Path, capsys: Any) -> None:
    recipe = replace(recipe_of(clean[0], **RUN), output_dir=str(tmp_path / "out"))

    def fails(folder: Path, at: Any, *rest: Any) -> Path:
        if at.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            return real(folder, at, *rest)
        raise SaveError(f"step {at.step} not saved: {folder}: No space left on device; the older ones are intact")

    real = session.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "save", fails)
        assert train(recipe, MACHINE).stopped  # at step 2, which is saved
        patch.setattr(session, "update", lambda *a: os.kill(os.getpid(), signal.SIGTERM) or 1.0)
        with pytest.raises(InputError, match=r"out: stopped after step 3, not saved; the same command goes on after step 2"):
            train(recipe, MACHINE)
    assert "step 3 not saved: " in capsys.readouterr().err and [p.name for p in steps(tmp_path / "out")] == ["step-2"]


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes at `place`, where this machine lets us make one."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def fill(place: Path, size: int, clean: Path, capsys: Any) -> str:
    """A run on a disk that is too small, then with room again; how the first one ended."""
    with small_disk(place / "disk", size):
        recipe = replace(recipe_of(clean, **RUN), output_dir=str(place / "disk" / "out"))
        capsys.readouterr()
        try:
            train(recipe, MACHINE)
            end = "ended"
        except InputError as error:
            end = str(error)
            assert "\n" not in end and ("No space left on device" in end or " free, " in end)
        out = place / "disk" / "out"
        for path in steps(out):
            verify(path)
        assert not list((place / "disk").rglob(".tmp*"))
        subprocess.run(["mount", "-o", "remount,size=64m", place / "disk"], check=True)
        assert train(recipe, MACHINE).step == 6
        assert (out / "step-6" / "model.safetensors").read_bytes() == whole(clean, "step-6")
    return end


@pytest.mark.parametrize("sizes", [
    [1200, 2600], pytest.param(range(20, 4020, 20), marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
], ids=["two", "200"])  # fmt: skip
def test_a_disk_that_is_too_small(sizes: Any, clean: tuple[Path, int], tmp_path: Path, capsys: Any) -> None:
    """200 sizes, from hardly a page to enough for all."""
    ends = [fill(tmp_path, size << 10, clean[0], capsys) for size in sizes]
    assert ends.count("ended") == len(ends) if len(ends) < 9 else 0 < ends.count("ended") < len(ends)
