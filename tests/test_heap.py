"""Memory that a CPU's steps free stays with the process for as long as they go on, and no longer."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import recipe_of

from modelcenter.__main__ import main
from modelcenter.model import Model
from modelcenter.train import heap, loop
from modelcenter.train.heap import kept
from modelcenter.train.loop import train

CPU = torch.device("cpu")
ALONE = """
import resource, sys
import torch
from modelcenter.train.heap import kept

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def left(size, count):  # MiB that stay in memory of so many blocks of so many
    before = resident()
    blocks = [torch.ones(size << 20, dtype=torch.uint8) for _ in range(count)]
    del blocks
    return resident() - before

found = []
try:
    with kept(torch.device("cpu")):
        found += [left(256, 1), left(16, 16)]
        there = resident()
        raise ZeroDivisionError
except ZeroDivisionError:
    found += [there - resident()]
print(*found)
"""


class Libc:
    """glibc, as far as it is asked."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in names:
            setattr(self, name, lambda *rest, said=name: self.calls.append((said, *rest)))


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> Libc:
    for name in (*heap.VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    made = Libc("gnu_get_libc_version", "mallopt", "malloc_trim")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: made)
    return made


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_it_is_kept_while_it_lasts_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*heap.VARIABLES, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=250, check=True)
    large, within, back = map(int, done.stdout.split())
    assert large < 100, "large blocks are the system's own: a heap of ragged ones would be full of holes"
    assert within > 200, "what is freed is there for the next step"
    assert back > 100, "and at the end the system's again"


def test_glibc_is_told(libc: Libc) -> None:
    begun = [("mallopt", heap.MMAP_THRESHOLD, 2**25), ("mallopt", heap.TRIM_THRESHOLD, -1)]
    with kept(CPU):
        assert libc.calls == begun
    assert libc.calls == [*begun, ("mallopt", heap.TRIM_THRESHOLD, 2**26), ("malloc_trim", 0)]


@pytest.mark.parametrize("name", [*heap.VARIABLES, "GLIBC_TUNABLES"])
def test_whoever_has_said_how_is_obeyed(name: str, libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "glibc.malloc.mmap_max=7")
    with kept(CPU):
        pass
    assert not libc.calls


def test_nothing_for_an_accelerator_or_another_library(libc: Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept(torch.device("cuda")):
        pass
    other = Libc("mallopt", "malloc_trim")
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: other)
    with kept(CPU):
        pass
    assert not libc.calls and not other.calls


def test_a_run_and_an_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        calls.append(f"{device} begins")
        yield
        calls.append("ends")

    real = Model.forward

    def forward(self: Any, *rest: Any, **options: Any) -> Any:
        calls.append("forward")
        return real(self, *rest, **options)

    monkeypatch.setattr(loop, "kept", noted)
    monkeypatch.setattr(heap, "kept", noted)  # which an evaluation imports
    monkeypatch.setattr(Model, "forward", forward)
    train(recipe_of(tmp_path, max_steps=2, eval_steps=None))
    began = calls.index("cpu begins")
    assert "forward" in calls[began:] and calls[-1] == "ends"
    calls.clear()
    assert main(["evaluate", str(tmp_path / "out")]) == 0
    assert "forward" in calls[calls.index("cpu begins") :] and calls[-1] == "ends"
