"""Ranks that stay for one test after the other: what goes wrong in one is told apart, and the next one finds all as it was."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import mesh
import pytest
import torch
import torch.distributed as dist

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
    time.sleep(60)


def hangs(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    asleep()


def asleep() -> None:
    time.sleep(60)


def test_one_set_of_ranks_does_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        mesh.stay(2, notes, (tmp_path / "pids",))
    monkeypatch.setenv("MODELCENTER_TEST_TOLD", "by the test")
    mesh.stay(2, changes, ())
    mesh.stay(2, unchanged, ())
    seen = [(tmp_path / f"pids.{rank}").read_text().split() for rank in range(2)]
    assert [len(pids) for pids in seen] == [3, 3] and len({*seen[0], *seen[1]}) == 2


def test_what_fails_is_said_and_the_next_has_new_ranks(tmp_path: Path) -> None:
    mesh.stay(2, notes, (tmp_path / "pids",))
    with pytest.raises(AssertionError, match=r"rank 1:\n(.|\n)*in fails(.|\n)*what rank 1 lacks"):
        mesh.stay(2, fails, ())
    with pytest.raises(AssertionError, match=r"rank 1 has ended, with -9"):
        mesh.stay(2, ends, ())
    mesh.stay(2, unchanged, ())
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] said nothing for 3 s(.|\n)*rank 1:(.|\n)*in asleep") as caught:
        mesh.stay(2, hangs, (), 3)
    assert "in barrier" in str(caught.value).partition("rank 1:")[0] and time.monotonic() - began < 50
    mesh.stay(2, notes, (tmp_path / "pids",))
    seen = [(tmp_path / f"pids.{rank}").read_text().split() for rank in range(2)]
    assert len({*seen[0], *seen[1]}) == 4
