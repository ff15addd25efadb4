"""Ranks that stay for one test after the other: what goes wrong in one is told apart, and the next one finds all as it was."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mesh
import pytest
import torch
import torch.distributed as dist

from modelcenter.parallel.watch import outwards
from modelcenter.train import loop


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks that know no more than these tests need, and that are gone after each."""
    monkeypatch.setattr(mesh, "KNOWN", ["torch.distributed", "modelcenter.train.loop"])
    yield
    while mesh.staying:
        mesh.staying.popitem()[1].end()


def notes(rank: int, file: Path) -> None:
    """The process that does this, if all ranks do."""
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    with Path(f"{file}.{rank}").open("a") as out:
        out.write(f"{os.getpid()}\n")


def changes(rank: int) -> None:
    assert os.environ["MODELCENTER_TEST_TOLD"] == "by the test"
    assert not hasattr(loop.plot_loss, "planted") and "PLANTED" not in os.environ and torch.get_num_threads() == 1
    loop.plot_loss = planted
    os.environ["PLANTED"] = "1"
    torch.set_num_threads(2)
    torch.compile = planted  # type: ignore[assignment]  # to be noticed
    assert loop.plot_loss is planted


def planted(folder: Path) -> str:
    return "planted"


def unchanged(rank: int) -> None:
    assert loop.plot_loss is not planted and torch.compile is not planted
    assert "PLANTED" not in os.environ and torch.get_num_threads() == 1


def fails(rank: int) -> None:
    """On one rank, for which the other waits."""
    if rank == 1:
        raise KeyError("what rank 1 lacks")
    dist.barrier()


def ends(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    asleep()


def hangs(rank: int, folder: Path) -> None:
    """A thread of each says so in `folder` as soon as the rank is where it stays."""
    main, place = threading.get_ident(), "asleep" if rank else "barrier"

    def look() -> None:
        while all(frame.f_code.co_name != place for frame in outwards(sys._current_frames()[main])):
            time.sleep(0.01)
        (folder / str(rank)).touch()

    threading.Thread(target=look, daemon=True).start()
    if rank == 0:
        dist.barrier()
    asleep()


def asleep() -> None:
    time.sleep(600)  # longer than any test may take


def test_one_set_of_ranks_does_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        mesh.stay(2, notes, (tmp_path / "pids",))
    monkeypatch.setenv("MODELCENTER_TEST_TOLD", "by the test")
    mesh.stay(2, changes, ())
    mesh.stay(2, unchanged, ())
    seen = [(tmp_path / f"pids.{rank}").read_text().split() for rank in range(2)]
    assert [len(pids) for pids in seen] == [3, 3] and len({*seen[0], *seen[1]}) == 2


def test_what_fails_is_said_and_the_next_has_new_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.stay(2, notes, (tmp_path / "pids",))
    with pytest.raises(AssertionError, match=r"rank 1:\n(.|\n)*in fails(.|\n)*what rank 1 lacks"):
        mesh.stay(2, fails, ())
    with pytest.raises(AssertionError, match=r"rank 1 has ended, with -9"):
        mesh.stay(2, ends, ())
    mesh.stay(2, unchanged, ())
    real = mesh.wait

    def wait(pipes: Any, limit: float) -> Any:
        """As if the ranks had come there in no time."""
        while not all((tmp_path / str(rank)).exists() for rank in range(2)) and not real(pipes, 0):
            time.sleep(0.01)
        return real(pipes, limit)

    with monkeypatch.context() as patch:
        patch.setattr(mesh, "wait", wait)
        with pytest.raises(AssertionError, match=r"ranks \[0, 1\] said nothing for 1 s(.|\n)*rank 1:(.|\n)*in asleep") as caught:
            mesh.stay(2, hangs, (tmp_path,), 1)
    assert "in barrier" in str(caught.value).partition("rank 1:")[0]
    mesh.stay(2, notes, (tmp_path / "pids",))
    seen = [(tmp_path / f"pids.{rank}").read_text().split() for rank in range(2)]
    assert len({*seen[0], *seen[1]}) == 4
