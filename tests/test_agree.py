"""Ranks that would not do the same are found before the first step, and named."""

import errno
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # here once, and not in each rank
from mesh import spawn
from test_ranks import machine_of, run_of

import modelcenter as mc
from modelcenter.checkpoint.state import steps
from modelcenter.cli.evaluate import evaluated
from modelcenter.parallel.apply import join
from modelcenter.train import agree, loop, prepare
from modelcenter.train.agree import difference, facts


def seen(rank: int, recipe: Any, cases: dict[str, Any]) -> None:
    """On rank 1 alone something is another."""
    machine = machine_of((2, 1))
    ranks = join(machine)
    agree.agree(recipe, machine, ranks)
    for text, act in cases.items():
        other = act(recipe) if rank == 1 else recipe
        with pytest.raises(mc.InputError) as caught:
            agree.agree(other, machine, ranks)
        assert text in str(caught.value), f"{caught.value}: not {text}"
    agree.code = lambda: f"code of {rank}"
    with pytest.raises(mc.InputError, match=r"code: 'code of 0' on rank 0 and 'code of 1' on rank 1; the same for every rank"):
        agree.agree(recipe, machine, ranks)


def elsewhere(change: Any) -> Any:
    """The same recipe where the data, found by a relative path, is another."""

    def act(recipe: Any) -> Any:
        folder = Path("other")
        folder.mkdir()
        os.chdir(folder)
        change(Path("text.txt"))
        return recipe

    return act


def test_what_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = run_of(tmp_path, **{"data.path": "text.txt"})
    size = (tmp_path / "text.txt").stat().st_size
    cases = {
        "seed: 0 on rank 0 and 1 on rank 1": lambda r: replace(r, seed=1),
        "optimizer.lr: 0.01 on rank 0 and 0.02 on rank 1": lambda r: replace(r, optimizer=replace(r.optimizer, lr=0.02)),
        f"data text.txt: bytes: {size} on rank 0 and 3 on rank 1": elsewhere(lambda file: file.write_text("a b")),
    }
    spawn(2, seen, recipe, cases)


def missing(rank: int, recipe: Any) -> None:
    if rank == 1:
        Path("empty").mkdir()
        os.chdir("empty")
    with pytest.raises(mc.InputError, match=r"text\.txt"):
        agree.agree(recipe, machine_of((2, 1)), join(machine_of((2, 1))))


def test_data_that_one_rank_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spawn(2, missing, run_of(tmp_path, **{"data.path": "text.txt"}))


def judged(rank: int, recipe: Any) -> None:
    """By ranks of which each has its own folder for stacks, and one cuts texts sooner. Nothing may be prepared."""
    prepare.prepare = None  # type: ignore[assignment]
    data = replace(recipe.data, seq_len=8) if rank else recipe.data
    with pytest.raises(mc.InputError, match=r"data\.seq_len: \d+ on rank 0 and 8 on rank 1; the same for every rank"):
        evaluated(replace(recipe, data=data, output_dir=f"{recipe.output_dir}{rank}"), machine_of((2, 1)))


def test_an_evaluation_asks_too(tmp_path: Path) -> None:
    spawn(2, judged, run_of(tmp_path))


def refused(rank: int, recipe: Any) -> None:
    loop.plot_loss = lambda folder: "not drawn"
    agree.code = lambda: str(rank)
    with pytest.raises(mc.InputError, match="code: '0' on rank 0"):
        loop.train(recipe, machine_of((2, 1)))


def test_a_run_asks_before_anything_is_written(tmp_path: Path) -> None:
    spawn(2, refused, run_of(tmp_path))
    assert not steps(tmp_path / "out") and not (tmp_path / "out").exists() and torch._dynamo


def unmounted(rank: int, recipe: Any, how: str) -> None:
    """Rank 1 runs on a machine where the folder is not there, or may not be written, or comes to be seen late."""
    loop.plot_loss = lambda folder: "not drawn"
    agree.APPEARS = 0.0 if how == "missing" else 250.0
    real, looks = os.open, count()

    def opened(path: Any, *rest: Any, **options: Any) -> int:
        if rank == 1 and ".tmp-ranks-" in str(path):
            if how == "read-only":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            if how == "missing" or next(looks) < 3:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real(path, *rest, **options)

    os.open = opened  # type: ignore[assignment]
    if how == "late":
        assert loop.train(recipe, machine_of((2, 1))).step == 1
        return
    why = "Read-only file system" if how == "read-only" else "No such file or directory"
    with pytest.raises(mc.InputError, match=rf"output_dir: rank 1 cannot write to .*out \({why}, on "):
        loop.train(recipe, machine_of((2, 1)))


@pytest.mark.parametrize("how", ["missing", "read-only", "late"])
def test_an_output_that_one_machine_has_not_mounted(how: str, tmp_path: Path) -> None:
    """Said before the first step, by all ranks, and nothing is left; what only takes a while to be seen is waited for."""
    spawn(2, unmounted, run_of(tmp_path, max_steps=1, eval_steps=None, save_steps=None), how)
    assert (tmp_path / "out").exists() == (how == "late") and not list(tmp_path.glob("out/.tmp-*"))


def test_contents_count_and_times_do_not(tmp_path: Path) -> None:
    recipe, machine = run_of(tmp_path), machine_of((2, 1))
    before, file = facts(recipe, machine), tmp_path / "text.txt"
    os.utime(file, (1, 1))
    assert facts(recipe, machine) == before
    text = file.read_text()
    file.write_text(text.replace("1", "2", 1))  # as long as before
    key, found = difference([before, facts(recipe, machine), before])
    assert key.endswith("text.txt: sha256_of_contents") and "on ranks 0, 2 and " in found and found.endswith("on rank 1")


@pytest.mark.parametrize("key", ["model", "tokenizer"])
def test_another_tokenizer_of_the_same_size_is_found(key: str, tmp_path: Path) -> None:
    """Ranks that cut the same texts into other tokens would train without an error."""
    file = tmp_path / "folder" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text('{"a": 0, "b": 1}')
    recipe, machine = run_of(tmp_path, **{key: str(file.parent)}), machine_of((2, 1))
    before = facts(recipe, machine)
    file.write_text('{"b": 0, "a": 1}')
    name, found = difference([before, facts(recipe, machine)])
    assert name == f"{key} tokenizer.json" and found.startswith("'16 bytes, sha256 ") and found.endswith("' on rank 1")


@pytest.mark.parametrize("package", agree.READERS)
def test_another_reader_of_the_data_is_found(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, machine = run_of(tmp_path), machine_of((2, 1))
    before, known = facts(recipe, machine), agree.versions()
    monkeypatch.setattr(agree, "versions", lambda: known | {package: "0.1"})
    assert difference([before, facts(recipe, machine)]) == (package, f"{known[package]!r} on rank 0 and '0.1' on rank 1")
