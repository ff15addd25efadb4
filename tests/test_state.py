"""Training state: bitwise round trips, kills, faults of the disk and of the bytes, and mutants of the protocol."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from modelcenter.checkpoint import atomic, manifest, state
from modelcenter.checkpoint.hub import resolve
from modelcenter.checkpoint.lock import lock
from modelcenter.checkpoint.manifest import verify
from modelcenter.checkpoint.optimizer import flatten_optimizer, restore_optimizer
from modelcenter.checkpoint.state import (
    SaveError,
    find_state,
    load_state,
    save_state,
    steps,
)
from modelcenter.cli.arguments import take_apart
from modelcenter.cli.evaluate import evaluate
from modelcenter.data.tokenizer_open import load_tokenizer
from modelcenter.errors import InputError, MissingError
from modelcenter.train.folder import found_start


def tables(seed: int = 0, size: int = 50) -> dict[str, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (7, 3), generator=g, dtype=torch.int16)  # every pattern, NaNs too
    return {
        "model": {
            "w": torch.randn(size, 3, generator=g), "b16": bits.view(torch.bfloat16), "f16": bits.view(torch.float16),
            "t": torch.randn(4, 6, generator=g).t(), "none": torch.empty(0, 4), "yes": torch.tensor([True, False]),
            "f64": torch.rand(3, generator=g, dtype=torch.float64),
        },
        "optimizer": {"step/w": torch.tensor(float(seed)), "rng": g.get_state(), "n": torch.tensor(2**62 + seed)},
    }


def test_a_state_that_was_removed_is_told_by_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")  # two parts in all, as a hub id has
    for step in (2, 4, 6):
        put(run, step, keep=2)
    said = r"^run/step-2: no such training state; step-6, step-4: those kept in run$"
    asked: list[Callable[[str], object]] = [
        lambda name: resolve(name, presets={}), load_tokenizer, lambda name: found_start(name, Path("other")),
        lambda name: evaluate(take_apart([name])),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(MissingError, match=said):
            ask("run/step-2")
    (run / "recipe.yaml").write_text("model: gpt2\n")
    outside = Path("runs")
    outside.mkdir()
    run.rename(outside / "first")
    for ask in asked:
        with pytest.raises(MissingError, match=r"^runs/frist: no such folder; of the runs in runs: did you mean 'first'\?$"):
            ask("runs/frist")
    (outside / "first").rename(run)
    state.check_there("frist")  # a name of one part is a preset's, perhaps
    state.check_there(run / "step-4")
    state.check_there("nowhere/step-2")  # what is said of any folder is said of it


def same(a: Tensor, b: Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def put(folder: Path, step: int, keep: int | None = None) -> Path:
    return save_state(folder, step, tables(step), {"step": step, "loss": 0.1 * step, "recipe_hash": "abc"}, keep)


def check(path: Path, step: int) -> None:
    """The checkpoint at `path` holds exactly what `put` gave for `step`."""
    tensors, values = load_state(path)
    wanted = tables(step)
    assert values == {"step": step, "loss": 0.1 * step, "recipe_hash": "abc"}
    assert {g: set(t) for g, t in tensors.items()} == {g: set(t) for g, t in wanted.items()}
    assert all(same(tensors[g][n], t) for g, table in wanted.items() for n, t in table.items())


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".tmp")]


# ---- what a checkpoint is


def test_round_trip(tmp_path: Path) -> None:
    values = {"step": 3, "rng": "00ff" * 20, "best": None, "lr": 0.1 + 0.2, "position": [1, {"k": 2**60}]}
    given = tables(3)
    path = save_state(tmp_path / "deep" / "out", 3, given, values)
    assert path == tmp_path / "deep" / "out" / "step-3"
    found = find_state(tmp_path / "deep" / "out")
    assert found is not None and found[0] == path
    tensors, back = load_state(path)
    assert back == values
    assert {g: set(t) for g, t in tensors.items()} == {g: set(t) for g, t in given.items()}
    assert all(same(tensors[g][n], t) for g, table in given.items() for n, t in table.items())
    maps = Path("/proc/self/maps").read_text()
    assert str(path / "model.safetensors") in maps  # mapped, not read into memory


def test_manifest_says_what_is_there(tmp_path: Path) -> None:
    path = put(tmp_path, 7)
    manifest = json.loads((path / "manifest.json").read_text())
    assert verify(path) == {k: v for k, v in manifest.items() if k != "sha256"}
    assert (manifest["format"], manifest["step"], manifest["recipe_hash"]) == (1, 7, "abc")
    assert set(manifest["versions"]) >= {"python", "torch", "safetensors"}
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert manifest["files"]["model.safetensors"]["tensors"]["b16"] == {"dtype": "BF16", "shape": [7, 3]}
    ours = {name: t.clone().contiguous() for name, t in tables(7)["model"].items()}
    path = save_state(tmp_path, 8, {"model": ours}, {})
    assert (path / "model.safetensors").read_bytes() == safetensors.torch.save(ours, metadata={"format": "pt"})


def test_umask_decides_the_modes(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        path = put(tmp_path, 1)
    finally:
        os.umask(old)
    assert {(path / name).stat().st_mode & 0o777 for name in os.listdir(path)} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750


def test_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, 5)
    with pytest.raises(InputError, match="step-5: exists already"):
        put(tmp_path, 5)
    check(path, 5)
    flip(path / "model.safetensors", 100, 1)  # resuming passes over it, so the run comes by here again
    check(put(tmp_path, 5), 5)
    aside = [name for name in os.listdir(tmp_path) if name.startswith("broken-step-5-")]
    assert len(aside) == 1 and aside[0] in capsys.readouterr().err


def test_refused_before_anything_is_written(tmp_path: Path) -> None:
    for step in (-1, 10**18):
        with pytest.raises(ValueError):
            save_state(tmp_path, step, {}, {})
    with pytest.raises(ValueError):
        save_state(tmp_path, 1, {"../model": {}}, {})
    with pytest.raises(ValueError):
        save_state(tmp_path, 1, {}, {"best": float("nan")})
    with pytest.raises(SaveError, match="complex128"):
        save_state(tmp_path, 1, {"model": {"z": torch.zeros(1, dtype=torch.complex128)}}, {})
    assert os.listdir(tmp_path) == []


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 2**20})())
    with pytest.raises(SaveError, match=r"step 2 not saved.*: 1\.0 MB free, 1\.1 MB needed.*; the older ones are intact$"):
        put(tmp_path, 2)
    with pytest.raises(SaveError, match=r"step 1 not saved.*; none is there yet$"):
        put(tmp_path / "new", 1)
    assert os.listdir(tmp_path) == ["step-1"]


def test_keep(tmp_path: Path) -> None:
    for step in range(1, 7):
        put(tmp_path, step, keep=3)
        assert [p.name for p in steps(tmp_path)] == [f"step-{n}" for n in range(step, max(step - 3, 0), -1)]
    put(tmp_path, 7, keep=1)  # never below two
    assert [p.name for p in steps(tmp_path)] == ["step-7", "step-6"]
    flip(tmp_path / "step-7" / "state.json", 3, 2)
    put(tmp_path, 8, keep=2)  # a broken one is not counted, nor removed
    assert [p.name for p in steps(tmp_path)] == ["step-8", "step-7", "step-6"]
    put(tmp_path, 3, keep=2)  # the one just saved stays, whatever its number
    assert (tmp_path / "step-3").is_dir() and leftovers(tmp_path) == []


# ---- faults in the bytes


def flip(path: Path, byte: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte % len(data)] ^= mask
    path.write_bytes(data)


def fault(folder: Path, other: Path, rng: random.Random) -> str:
    """Damage the checkpoint `folder` in one random way (`other` is a valid one); the file that must be named."""
    names = sorted(os.listdir(folder))
    name = rng.choice(names)
    path, kind = folder / name, rng.randrange(8)
    if kind <= 1:
        flip(path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8))
    elif kind == 2:
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif kind == 3:
        with open(path, "ab") as file:
            file.write(rng.randbytes(rng.randrange(1, 9)))
    elif kind == 4:
        path.unlink()
    elif kind == 5:
        name = rng.choice(["extra", "model-2.safetensors", ".hidden", "state.json.bak"])
        (folder / name).write_bytes(b"")
    elif kind == 6:  # stale: the same file of another step
        shutil.copyfile(other / name, path)
    else:  # swapped
        a, b = rng.sample([n for n in names if n != "manifest.json"], 2)
        (folder / a).rename(folder / "x"), (folder / b).rename(folder / a), (folder / "x").rename(folder / b)
        name = min(a, b)
    return name


def faults(base: Path, count: int, seed: int) -> list[str]:
    """Violations in `count` random faults: not found, not named, or the previous checkpoint not used, bit for bit."""
    rng, wrong = random.Random(seed), []
    source = base / "source"
    put(source, 2), put(source, 3)
    for number in range(count):
        out = base / f"case-{number}"
        for step in ("step-2", "step-3"):
            shutil.copytree(source / step, out / step)
        name = fault(out / "step-3", source / "step-2", rng)
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state, "_say", said.append)
            found = state.find_state(out)
        if found is None or found[0].name != "step-2":
            wrong.append(f"{number}: {name} not found")
        elif len(said) != 1 or name not in said[0] or "\n" in said[0]:
            wrong.append(f"{number}: {name} not named in {said}")
        else:
            check(found[0], 2)
        shutil.rmtree(out)
    return wrong


def test_faults(tmp_path: Path) -> None:
    assert faults(tmp_path, 300, seed=0) == []


@pytest.mark.slow
def test_ten_thousand_faults(tmp_path: Path) -> None:
    assert faults(tmp_path, 10_000, seed=1) == []


def test_whole_folder_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9")  # an old one under a newer name
    (tmp_path / "step-8").mkdir()
    (tmp_path / "step-7").symlink_to(tmp_path / "step-1")
    (tmp_path / "step-6").write_text("a file")
    newer = put(tmp_path, 5)
    body = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps({**body, "format": 2}))
    for name in ("step-01", "step-x", "step--1", "xstep-4", "step-4 "):
        (tmp_path / name).mkdir()
    linked = put(tmp_path, 4)
    (linked / "state.json").rename(tmp_path / "elsewhere")
    (linked / "state.json").symlink_to(tmp_path / "elsewhere")
    found = find_state(tmp_path)
    assert found is not None and found[0].name == "step-1"
    lines = capsys.readouterr().err.splitlines()
    wanted = ["step: 1 in step-9", "step-8: no manifest.json", "step-7: not a folder", "step-6: not a folder",
              "format: 2, newer", "state.json: not a regular file"]  # fmt: skip
    for line, says in zip(lines, wanted, strict=True):
        assert says in line
    assert find_state(tmp_path / "nowhere") is None


def test_forged_manifests_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    body = verify(path)
    outside = {"files": {"../step-1/state.json": {"size": 1, "sha256": "x"}}}
    text = {"files": {"a": {"size": "1", "sha256": ""}}}
    for wrong in ({}, {"files": []}, {"files": {"a": 1}}, text, {"format": True}, {"step": None}, {"step": 2}, outside):
        (path / "manifest.json").write_bytes(manifest.sealed({**body, **wrong} if wrong else {}))
        with pytest.raises(InputError):
            verify(path)
    for text in (b"", b"[]", b"{", b"\xff", b"null", b"[" * 10_000):
        (path / "manifest.json").write_bytes(text)
        with pytest.raises(InputError, match=r"manifest\.json"):
            verify(path)


def test_load_verifies(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    flip(path / "model.safetensors", -1, 1)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_state(path)
    with pytest.raises(MissingError):
        load_state(tmp_path / "step-2")


# ---- faults of the disk

CALLS = ["open", "write", "fsync", "mkdir", "rename", "stat", "close"]


@contextmanager
def failing(at: int, code: int, forever: bool) -> Iterator[list[int]]:
    """Make the call number `at` of those that touch the disk fail, and every later write too when `forever`."""
    count = [0]

    def wrap(name: str, real: Callable) -> Callable:
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            count[0] += 1
            if count[0] == at or (forever and count[0] > at and name in ("write", "fsync", "mkdir")):
                if name == "close":  # a close that fails has closed
                    real(*args, **kwargs)
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield count


@pytest.mark.parametrize(("code", "forever"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_every_call_that_fails(tmp_path: Path, code: int, forever: bool) -> None:
    put(tmp_path, 1), put(tmp_path, 2)
    before = sorted(os.listdir(tmp_path))
    at, failed, unharmed = 0, 0, 0
    while True:
        at += 1
        with failing(at, code, forever) as count:
            try:
                put(tmp_path, 3)
            except SaveError as error:
                assert not (tmp_path / "step-3").exists()
                assert "\n" not in str(error) and os.strerror(code) in str(error)
        if (tmp_path / "step-3").exists():  # a fault that did not matter, such as that of a lock
            verify(tmp_path / "step-3")
            shutil.rmtree(tmp_path / "step-3")
            unharmed += 1
        else:
            failed += 1
        assert sorted(os.listdir(tmp_path)) == before
        check(tmp_path / "step-1", 1), check(tmp_path / "step-2", 2)
        if count[0] < at:
            break
    assert failed > 20 and unharmed < 20
    check(put(tmp_path, 3), 3)  # and training goes on


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 2)]))
    check(put(tmp_path, 1), 1)


def test_pruning_that_fails_is_only_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 1), put(tmp_path, 2)

    real = os.rename

    def broken(source: Path, target: Path) -> None:
        if Path(source).name == "step-1":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", broken)
    check(put(tmp_path, 3, keep=2), 3)
    assert "step-1: not removed (Input/output error)" in capsys.readouterr().err


# ---- kills


def saver(out: Path, first: int, ack: int, save: Callable[..., Path]) -> None:
    """The child: save step after step, and tell the parent of each one that `save` says is saved."""
    with lock(out):
        os.write(ack, struct.pack("q", 0))
        for step in range(first, first + 10_000):
            save(out, step, 2)
            os.write(ack, struct.pack("q", step))


def kills(out: Path, rounds: int, seed: int, save: Callable[..., Path] = put) -> list[str]:
    """Violations in `rounds` children that save all the time and are killed at a random moment."""
    rng, wrong, last, acked = random.Random(seed), [], 0, 0
    began = time.perf_counter()
    put(out.parent / "timing", 1), put(out.parent / "timing", 2)
    pace = (time.perf_counter() - began) / 2
    shutil.rmtree(out.parent / "timing")
    for number in range(rounds):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(read)
                saver(out, last + 1, write, save)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        os.close(write)
        stream = os.fdopen(read, "rb")
        assert stream.read(8) == bytes(8)
        time.sleep(rng.uniform(0, 4 * pace))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with stream:
            told = [n for (n,) in struct.iter_unpack("q", stream.read())]
        pace *= 2 if not told else 0.5 if len(told) > 6 else 1  # a child's saves are slower or faster than its parent's were
        if not os.WIFSIGNALED(status):
            wrong.append(f"{number}: the child ended by itself")
        last, acked = max([last, *told]), acked + len(told)
        good = []
        for path in steps(out):
            try:
                verify(path)
                good.append(path)
            except InputError as error:
                wrong.append(f"{number}: torn: {error}")
                shutil.rmtree(path)
        newest = int(good[0].name[5:]) if good else 0
        if newest < last:
            wrong.append(f"{number}: step {last} was acknowledged, the newest is {newest}")
        if acked >= 2 and len(good) < 2:
            wrong.append(f"{number}: {len(good)} checkpoints left")
        last = max(last, newest)
    return wrong


def test_kills(tmp_path: Path) -> None:
    assert kills(tmp_path / "out", 60, seed=0) == []
    assert int(steps(tmp_path / "out")[0].name[5:]) > 30  # the children did save
    with lock(tmp_path / "out"):  # held by none of the dead, and what they left is swept
        assert leftovers(tmp_path / "out") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_kills(tmp_path: Path) -> None:
    assert kills(tmp_path / "out", 1000, seed=1) == []


def in_place(out: Path, step: int, keep: int) -> Path:
    """A mutant: write under the final name."""

    @contextmanager
    def staging(final: Path) -> Iterator[Path]:
        final.mkdir()
        yield final

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "staging", staging)
        patch.setattr(state, "commit_folder", lambda temp, final: None)
        return put(out, step, keep)


def prune_first(out: Path, step: int, keep: int) -> Path:
    """A mutant: make room before the new one is there."""
    for old in steps(out)[keep - 1 :]:
        state._discard(old)
    return put(out, step)


def tear_down(out: Path, step: int, keep: int) -> Path:
    """A mutant: remove an old one file by file, without renaming it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_discard", shutil.rmtree)
        return put(out, step, keep)


def early_word(out: Path, step: int, keep: int) -> Path:
    """A mutant: say "saved" and rename later."""
    late = put(out, step, None).rename(out / f".late-{step}")
    if (out / f".late-{step - 1}").exists():  # after the next one's writing: the word is early for as long as that takes
        (out / f".late-{step - 1}").rename(out / f"step-{step - 1}")
    return late


@pytest.mark.parametrize("mutant", [in_place, prune_first, tear_down, early_word])
def test_kills_catch_mutants(tmp_path: Path, mutant: Callable[..., Path]) -> None:
    for seed in range(60):  # a kill must hit the window: tried until one does
        if kills(tmp_path / str(seed), 5, seed, mutant):
            return
    pytest.fail(f"{mutant.__name__} survived 300 kills")


STOPS = [*CALLS, "replace", "unlink", "rmdir", "link"]


def stopped_at(at: int, after: bool, out: Path, save: Callable[..., Path]) -> tuple[bool, bool]:
    """Save step 3 in a child that is killed just before or just after its call number `at` of those that touch the disk; whether it
    was, and whether it had said that step 3 is saved."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def wrap(real: Callable) -> Callable:
            def call(*args, **kwargs):  # type: ignore[no-untyped-def]
                nonlocal count
                count += 1
                if count == at and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                mine = count
                try:
                    return real(*args, **kwargs)
                finally:
                    if mine == at:
                        os.kill(os.getpid(), signal.SIGKILL)

            return call

        code, told = 1, os.write  # the real one, which is not counted
        try:
            for name in STOPS:
                setattr(os, name, wrap(getattr(os, name)))
            save(out, 3, 2)
            told(write, b"saved")
            code = 0
        except BaseException as error:
            told(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        said = stream.read() == b"saved"
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), said


def stops(base: Path, save: Callable[..., Path] = put, after: bool = False) -> list[str]:
    """Violations of saves that are killed before, or `after`, each of their calls in turn; the first that is not killed is the
    last."""
    wrong: list[str] = []
    put(base / "whole", 1), put(base / "whole", 2)
    for at in range(1, 1000):
        shutil.copytree(base / "whole", out := base / "out")
        killed, said = stopped_at(at, after, out, save)
        good = []
        for path in steps(out):
            try:
                verify(path)
                good.append(int(path.name[5:]))
            except InputError as error:
                wrong.append(f"{at}: torn: {error}")
        if len(good) < 2 or good not in ([3, 2], [3, 2, 1], [2, 1]):
            wrong.append(f"{at}: left are {good}")
        if said and 3 not in good:
            wrong.append(f"{at}: step 3 was acknowledged")
        if not killed and not said:
            wrong.append(f"{at}: the child ended by itself")
        for step in good:
            check(out / f"step-{step}", step)
        with lock(out):
            if leftovers(out):
                wrong.append(f"{at}: {leftovers(out)} stay")
        if 3 not in good and not wrong:
            check(put(out, 3, 2), 3)
        shutil.rmtree(out)
        if wrong:
            return wrong
        if not killed:
            assert at > 40  # it did count
            return []
    raise AssertionError("a save never ends")


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"])
def test_a_kill_at_every_call(tmp_path: Path, after: bool) -> None:
    """What is there after a call is what is there before the next one, but where a call does more than it seems to."""
    assert stops(tmp_path, after=after) == []


def broken_commit(out: Path, step: int, keep: int) -> Path:
    """A mutant: the manifest after the rename."""
    real = state.seal

    def late(temp: Path, final: Path) -> None:
        os.rename(temp, final)
        real(final, step, kept[0], "abc")

    kept: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "seal", lambda folder, step, files, recipe: kept.append(files))
        patch.setattr(state, "commit_folder", late)
        return put(out, step, keep)


@pytest.mark.parametrize(
    "mutant", [in_place, prune_first, *(pytest.param(m, marks=pytest.mark.slow) for m in (tear_down, broken_commit))]
)
def test_stops_catch_mutants(tmp_path: Path, mutant: Callable[..., Path]) -> None:
    assert stops(tmp_path, mutant)


def no_hash(patch: pytest.MonkeyPatch) -> None:
    rows = lambda path: json.loads((path.parent / "manifest.json").read_text())["files"]  # noqa: E731
    patch.setattr(manifest, "sha256_of", lambda path: rows(path)[path.name]["sha256"])


def no_manifest_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(state, "verify", lambda path: {"step": 1})


def no_seal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manifest, "sealed", lambda body: next(
        data for path in [state._now] for data in [(path / "manifest.json").read_bytes()]))
    real = manifest.read_manifest

    def read_manifest(path: Path):  # type: ignore[no-untyped-def]
        state._now = path  # type: ignore[attr-defined]
        return real(path)

    patch.setattr(manifest, "read_manifest", read_manifest)


def no_extra_check(patch: pytest.MonkeyPatch) -> None:
    real = os.listdir
    listed = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    patch.setattr(os, "listdir", lambda p: [n for n in real(p) if not Path(p).name.startswith("step-") or n in listed])


@pytest.mark.parametrize("mutant", [no_hash, no_manifest_check, no_seal, no_extra_check])
def test_faults_catch_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable) -> None:
    source = tmp_path / "source"  # saved by the true protocol
    put(source, 1), put(source, 2), put(source, 3)
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "put", lambda folder, step: folder / f"step-{step}")
        mutant(patch)
        assert faults(tmp_path, 100, seed=0)


# ---- the order of the system calls


def recorded(out: Path, step: int, **mutations: Callable) -> list[tuple[str, str]]:
    """(call, path relative to `out`) of one save, in order."""
    log: list[tuple[str, str]] = []
    paths: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "close", "mkdir")}

    def short(path: object) -> str:
        return os.path.relpath(os.fspath(path), out.resolve())  # type: ignore[call-overload]

    def opened(path, flags, *rest, **more):  # type: ignore[no-untyped-def]
        fd = real["open"](path, flags, *rest, **more)
        if "dir_fd" not in more:
            paths[fd] = short(path)
            if flags & os.O_CREAT:
                log.append(("create" if flags & os.O_EXCL else "overwrite", paths[fd]))
        return fd

    def on_fd(name: str) -> Callable:
        def call(fd: int, *rest):  # type: ignore[no-untyped-def]
            if fd in paths:
                log.append((name, paths[fd]))
            return real[name](fd, *rest)

        return call

    def renamed(a, b, **more):  # type: ignore[no-untyped-def]
        log.append(("rename", f"{short(a)} > {short(b)}"))
        return real["rename"](a, b, **more)

    with pytest.MonkeyPatch.context() as patch:
        calls = {"open": opened, "write": on_fd("write"), "fsync": on_fd("fsync"), "rename": renamed}
        for name, value in calls.items():
            patch.setattr(os, name, value)
        for name, value in mutations.items():
            for module in (state, manifest, atomic):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        put(out, step)
        log.append(("said", ""))
    return log


def order(log: list[tuple[str, str]]) -> list[str]:
    """What is wrong with the order: each file flushed after its last write, the manifest last, the folder flushed,
    renamed, and the parent flushed before anything is said."""
    wrong = []
    renames = [i for i, (call, path) in enumerate(log) if call == "rename" and path.endswith("> step-1")]
    if len(renames) != 1:
        return [f"{len(renames)} renames"]
    at = renames[0]
    temp = log[at][1].partition(" > ")[0]
    if not temp.startswith(".tmp-step-1-") or "/" in temp:
        wrong.append(f"the temporary folder is {temp}")
    made = [path for call, path in log[:at] if call == "create" and path.startswith(temp + "/")]
    if [p for call, p in log if call == "overwrite"]:
        wrong.append("a file was not created exclusively")
    if not made or made[-1] != f"{temp}/manifest.json":
        wrong.append("the manifest is not the last file")
    manifest_made = next((i for i, row in enumerate(log) if row == ("create", f"{temp}/manifest.json")), at)
    for path in made:
        writes = [i for i, row in enumerate(log) if row == ("write", path)]
        limit = at if path.endswith("manifest.json") else manifest_made
        if not any(max(writes) < i < limit for i, row in enumerate(log) if row == ("fsync", path)):
            wrong.append(f"{path} is not flushed in time")
    if not any(manifest_made < i < at for i, row in enumerate(log) if row == ("fsync", temp)):
        wrong.append("the folder is not flushed before the rename")
    said = log.index(("said", ""))
    if not any(at < i < said for i, row in enumerate(log) if row == ("fsync", ".")):
        wrong.append("the parent is not flushed before it is said")
    return wrong


def test_order_of_calls(tmp_path: Path) -> None:
    assert order(recorded(tmp_path, 1)) == []


def careless(temp: Path, final: Path) -> None:
    os.rename(temp, final)


def test_order_catches_mutants(tmp_path: Path) -> None:
    real_write, real_sync, real_seal, real_staging = atomic.write_new, atomic.sync, state.seal, atomic.staging

    def unflushed(path, chunks):  # type: ignore[no-untyped-def]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            return real_write(path, chunks)

    def overwriting(path, chunks):  # type: ignore[no-untyped-def]
        with open(path, "wb") as file:
            return sum(file.write(chunk) for chunk in chunks)

    def not_the_parent(path):  # type: ignore[no-untyped-def]
        if Path(path).resolve() != (tmp_path / "d").resolve():
            real_sync(path)

    def seal_early(folder, step, files, recipe):  # type: ignore[no-untyped-def]
        real_seal(folder, step, files, recipe)
        real_write(folder / "late", [b"x"])

    def aside(final):  # type: ignore[no-untyped-def]
        return real_staging(final.parent / "elsewhere" / final.name)

    mutants = {"a": {"commit_folder": careless}, "b": {"write_new": unflushed}, "c": {"write_new": overwriting},
               "d": {"sync": not_the_parent}, "e": {"seal": seal_early}, "f": {"staging": aside}}  # fmt: skip
    for name, mutation in mutants.items():
        assert order(recorded(tmp_path / name, 1, **mutation)), f"{name} survived"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_order_of_calls_by_strace(tmp_path: Path) -> None:
    """The kernel's view of the same, free of what Python's layer may hide."""
    import re

    program = ("import os, sys, torch; from modelcenter.checkpoint.state import save_state; os.mkdir('begin')\n"
               "save_state('.', 1, {'model': {'w': torch.ones(9)}}, {'step': 1}); os.mkdir('said')")
    env = {**os.environ, "PYTHONPATH": str(Path(state.__file__).parents[2])}
    trace = ["strace", "-f", "-y", "-o", "trace", "-e", "trace=openat,write,fsync,rename,mkdir"]
    command = [*trace, sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    if "ptrace" in done.stderr:
        pytest.skip("no right to trace")
    assert done.returncode == 0, done.stderr
    root, log = re.escape(str(tmp_path.resolve())), []
    for line in (tmp_path / "trace").read_text().splitlines():
        if 'mkdir("said"' in line:
            log.append(("said", ""))
        elif found := re.search(rf'(write|fsync)\(\d+<{root}(?:/([^>]*))?>', line):
            log.append((found[1], found[2] or "."))
        elif found := re.search(rf'openat\(.*"{root}/([^"]*)", (\S+O_CREAT\S*),', line):
            log.append(("create" if "O_EXCL" in found[2] else "overwrite", found[1]))
        elif found := re.search(rf'rename\("{root}/([^"]*)", "{root}/([^"]*)"\)', line):
            log.append(("rename", f"{found[1]} > {found[2]}"))
    assert order(log) == []


# ---- one run at a time


def test_lock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with lock(out):
        since = r"since 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
        with pytest.raises(InputError, match=rf"in use by a live run \(process {os.getpid()} on \S+ {since}\)"), lock(out):
            pass
        with pytest.raises(InputError), lock(out):  # the refusal did not let go of it
            pass
    with lock(out):
        pass


def test_without_locks_the_name_in_the_file_must_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """As on a network file system: a live process of this machine is refused, one of another is named, a dead one taken over."""

    def none(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", none)
    with lock(tmp_path):
        line = (tmp_path / ".lock").read_text()
        assert line.startswith(f"process {os.getpid()} on ")
    assert (tmp_path / ".lock").read_text() == ""  # it ended by itself
    assert "has no locks" in capsys.readouterr().err
    living = os.fork()
    if living == 0:
        time.sleep(600)  # longer than any test may take
        os._exit(0)
    (tmp_path / ".lock").write_text(line.replace(str(os.getpid()), str(living), 1))
    try:
        with pytest.raises(InputError, match=rf"in use by a live run \(process {living} .*remove .*\.lock"), lock(tmp_path):
            pass
    finally:
        os.kill(living, signal.SIGKILL)
        os.waitpid(living, 0)
    for owner in (line.replace(str(os.getpid()), str(living), 1), f"process {os.getppid()} on elsewhere since 2026-01-01", "\xff"):
        (tmp_path / ".lock").write_text(owner)
        with lock(tmp_path):
            said = capsys.readouterr().err
            assert "has no locks" in said and said.count("\n") == 1 and "did not end by itself: " in said


def test_lock_is_not_inherited(tmp_path: Path) -> None:
    """A loader's worker, forked while the lock is held, outlives the run."""
    read, write = os.pipe()
    run = os.fork()
    if run == 0:
        held = lock(tmp_path)
        held.__enter__()
        worker = os.fork()
        if worker == 0:
            time.sleep(600)  # longer than any test may take
            os._exit(0)
        os.write(write, struct.pack("q", worker))
        time.sleep(600)
        os._exit(0)
    (worker,) = struct.unpack("q", os.read(read, 8))
    try:
        with pytest.raises(InputError, match=f"process {run} "), lock(tmp_path):
            pass
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        with lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read), os.close(write)


def test_sweep_spares_the_living(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-4-0123abcd").mkdir()
    (tmp_path / ".tmp-step-4-0123abcd" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-notes").mkdir()
    (tmp_path / ".tmp-link-0123abcd").symlink_to(tmp_path / ".tmp-notes")
    with atomic.staging(tmp_path / "step-5") as temp:
        reader, writer = multiprocessing.Pipe()
        other = os.fork()
        if other == 0:
            atomic.sweep(tmp_path)
            writer.send("done")
            os._exit(0)
        assert reader.recv() == "done"
        os.waitpid(other, 0)
        assert temp.is_dir() and not (tmp_path / ".tmp-step-4-0123abcd").exists()
        assert (tmp_path / ".tmp-notes").is_dir() and (tmp_path / ".tmp-link-0123abcd").is_symlink()
        atomic.sweep(tmp_path)
        assert temp.is_dir()


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError), lock(tmp_path / "file" / "out"):
        pass
    with pytest.raises(SaveError):
        put(tmp_path / "file" / "out", 1)


# ---- the optimizer


class Net(torch.nn.Module):
    def __init__(self, seed: int, order: tuple[str, ...] = ("a", "b", "c"), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = {n: torch.nn.Linear(4, 4, dtype=dtype) for n in "abc"}
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[operator]


def adamw(net: torch.nn.Module, swap: bool = False, **options: object) -> torch.optim.AdamW:
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if swap else groups, lr=1e-2, betas=(0.8, 0.99), **options)  # type: ignore[arg-type]


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(5, 4, generator=g).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("options", "dtype"), [
    ({}, torch.float32), ({"amsgrad": True}, torch.float32),
    ({"foreach": True}, torch.bfloat16), ({"fused": True}, torch.float32),
])  # fmt: skip
def test_optimizer_resumes_bitwise(tmp_path: Path, options: dict, dtype: torch.dtype) -> None:
    whole, part = Net(0, dtype=dtype), Net(0, dtype=dtype)
    a, b = adamw(whole, **options), adamw(part, **options)
    train(whole, a, 3, 1), train(part, b, 3, 1)
    b.param_groups[0]["lr"] = a.param_groups[0]["lr"] = 0.003  # a schedule was at work
    tensors, content = flatten_optimizer(b, part)
    path = save_state(tmp_path, 3, {"model": part.state_dict(), "optimizer": tensors}, {"optimizer": content})
    assert "exp_avg_sq/b.weight" in tensors and "step/a.bias" in tensors

    loaded, values = load_state(path)
    again = Net(9, order=("c", "a", "b"), dtype=dtype)  # another order of creation: names decide
    again.load_state_dict(loaded["model"])
    c = adamw(again, swap=True, **options)
    restore_optimizer(c, again, loaded["optimizer"], values["optimizer"])
    assert {g["lr"] for g in c.param_groups} == {0.003, 0.01}
    assert all(isinstance(g["betas"], tuple) for g in c.param_groups)
    shutil.rmtree(path)  # nothing of the restored optimizer is a view of the file
    train(whole, a, 3, 2), train(again, c, 3, 2)
    assert all(same(p, dict(again.named_parameters())[n]) for n, p in whole.named_parameters())
    tensors, _ = flatten_optimizer(a, whole)
    back, _ = flatten_optimizer(c, again)
    assert set(tensors) == set(back) and all(same(tensors[k], back[k]) for k in tensors)


def test_moments_keep_their_dtype() -> None:
    """load_state_dict would round fp32 moments of bf16 weights."""
    net = Net(0, dtype=torch.bfloat16)
    optimizer = adamw(net)
    train(net, optimizer, 1, 0)
    for slots in optimizer.state.values():
        slots["exp_avg"] = slots["exp_avg"].float() + 1e-6
    tensors, content = flatten_optimizer(optimizer, net)
    fresh = adamw(net)
    restore_optimizer(fresh, net, tensors, content)
    assert all(same(fresh.state[p]["exp_avg"], slots["exp_avg"]) for p, slots in optimizer.state.items())


def test_restored_tensors_are_copies() -> None:
    net = Net(0)
    optimizer = adamw(net)
    train(net, optimizer, 1, 0)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.003, dtype=torch.float64)
    tensors, content = json_round(flatten_optimizer(optimizer, net))
    fresh = adamw(net)
    restore_optimizer(fresh, net, tensors, content)
    assert same(fresh.param_groups[0]["lr"], tensors["group 0/lr"]) and fresh.param_groups[1]["lr"] == 1e-2
    given = {t.data_ptr() for t in tensors.values()}
    assert not given & {t.data_ptr() for slots in fresh.state.values() for t in slots.values()}
    assert fresh.param_groups[0]["lr"].data_ptr() not in given


def test_optimizer_refusals() -> None:
    net = Net(0)
    optimizer = adamw(net)
    train(net, optimizer, 1, 0)
    tensors, content = json_round(flatten_optimizer(optimizer, net))
    before = flatten_optimizer(optimizer, net)[0]

    def refusal(model: torch.nn.Module, fresh: torch.optim.Optimizer, rows: dict = content) -> str:
        with pytest.raises(InputError) as caught:
            restore_optimizer(fresh, model, tensors, rows)
        return str(caught.value)

    assert "'AdamW'; this run uses 'SGD'" in refusal(net, torch.optim.SGD(net.parameters(), lr=1))
    assert "group" in refusal(net, torch.optim.AdamW(net.parameters()))
    less = Net(0)
    less.a.weight.requires_grad_(False)  # type: ignore[union-attr]
    frozen = torch.optim.AdamW([{"params": [p for p in less.parameters() if p.requires_grad and p.dim() > 1]},
                                {"params": [p for p in less.parameters() if p.dim() < 2]}])
    assert "a.weight" in refusal(less, frozen)
    wide = Net(0)
    wide.b.weight = torch.nn.Parameter(torch.zeros(8, 4))  # type: ignore[union-attr]
    assert "b.weight: saved with shape [4, 4]; this run has [8, 4]" in refusal(wide, adamw(wide))
    with pytest.raises(ValueError, match="not in the model"):
        flatten_optimizer(optimizer, Net(0))
    after = flatten_optimizer(optimizer, net)[0]
    assert all(same(before[k], after[k]) for k in before)


def json_round(pair: tuple[dict[str, Tensor], dict]) -> tuple[dict[str, Tensor], dict]:
    return pair[0], json.loads(json.dumps(pair[1]))
