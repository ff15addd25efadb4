"""Ranks that would not do the same are found before the first step, and named."""

import errno
import os
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # here once, and not in each rank
from huggingface_hub import constants
from mesh import spawn
from test_ranks import machine_of, run_of, runs

import modelcenter as mc
from modelcenter.checkpoint import manifest, state
from modelcenter.checkpoint.shards import Piece, Spread
from modelcenter.checkpoint.state import steps
from modelcenter.cli.evaluate import evaluated
from modelcenter.parallel.apply import join
from modelcenter.train import agree, loop, prepare
from modelcenter.train.agree import difference, facts
from modelcenter.train.loop import train


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


def published(folder: Path, commit: str, files: Path) -> None:
    """The hub's cache in `folder`, whose branch of a model is that commit: what is in `files`."""
    repo = folder / "models--someone--tiny"
    shutil.copytree(files, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def apart(rank: int, recipe: Any, folder: Path, work: Any, found: str) -> None:
    """Each rank is on a machine with a cache of its own, and offline."""
    loop.plot_loss = lambda folder: "not drawn"
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(folder / str(rank)), True
    with pytest.raises(mc.InputError, match=f"{found} on rank 0 and .* on rank 1; the same for every rank"):
        work(recipe if work is loop.train else replace(recipe, output_dir=f"{recipe.output_dir}{rank}"), machine_of((2, 1)))


@pytest.mark.parametrize(("work", "adapts", "key"), [
    (loop.train, False, "tokenizer"), (evaluated, False, "tokenizer"), (loop.train, True, "base"),
], ids=["train", "evaluate", "adapter"])  # fmt: skip
def test_a_cache_that_holds_another_commit_is_found(work: Any, adapts: bool, key: str, tmp_path: Path) -> None:
    """The files have the sizes that they have on the other machine. An adapter in a shared folder names a base, which is cached."""
    recipe = run_of(tmp_path, max_steps=1, eval_steps=None, save_steps=None)
    train(recipe)
    files, commits = tmp_path / "out" / "model", ["a" * 40, "b" * 40]
    for rank, commit in enumerate(commits):
        published(tmp_path / str(rank), commit, files)
    name = "someone/tiny"
    if adapts:
        model = mc.load(files, adapter=mc.AdapterConfig(name="lora", rank=2))
        model.source = name
        model.save_pretrained(tmp_path / "adapter")
        for file in files.glob("tok*"):
            shutil.copy(file, tmp_path / "adapter")
        name = str(tmp_path / "adapter")
    recipe = replace(recipe, model=name, init="pretrained", config={}, tokenizer=None, output_dir=str(tmp_path / "next"))
    spawn(2, apart, recipe, tmp_path, work, f"{key}: commit: '{commits[0]}'")
    assert not list(tmp_path.glob("next/step-*"))


def copied(rank: int, recipe: Any, folder: Path) -> None:
    """Each rank's machine has a copy of the state at that path; that of rank 1 is of another run."""
    loop.plot_loss = lambda folder: "not drawn"
    real = agree.read_manifest, agree.sha256_of
    agree.sha256_of = lambda path: real[1](folder / "other" / path.relative_to(folder) if rank == 1 else path)
    with pytest.raises(mc.InputError, match=r"resume: .*step-1/manifest\.json: sha256: '\w+' on rank 0 and '\w+' on rank 1; the "):
        loop.train(recipe, machine_of((2, 1)))

    def missing(path: Path) -> Any:
        return real[0](folder / "nowhere" / path.name if rank == 1 else path)

    agree.read_manifest = missing
    with pytest.raises(mc.InputError, match=r"nowhere/step-1: not a folder; a checkpoint folder step-N"):
        loop.train(recipe, machine_of((2, 1)))


def test_another_state_at_the_path_of_a_run_is_found(tmp_path: Path) -> None:
    for folder, seed in ((tmp_path, 0), (tmp_path / "other", 1)):
        folder.mkdir(exist_ok=True)
        train(run_of(folder, max_steps=1, eval_steps=None, save_steps=1, seed=seed))
    recipe = run_of(tmp_path, max_steps=1, eval_steps=None, save_steps=1, resume=str(tmp_path / "out" / "step-1"))
    spawn(2, copied, replace(recipe, output_dir=str(tmp_path / "next")), tmp_path)


def on_machines(rank: int, recipe: Any, per: int, spoiled: str, reads: dict[int, str]) -> None:
    """So many ranks on each machine. What one reads of the file `spoiled` is damaged on all but the first."""
    loop.plot_loss = lambda folder: "not drawn"
    state.machine = lambda: str(rank // per)
    real, hashed = manifest.sha256_of, list[str]()

    def sha256_of(path: Path) -> str:
        hashed.append(path.name)
        return "0" * 64 if rank >= per and path.name == spoiled else real(path)

    manifest.sha256_of = sha256_of
    if not spoiled:
        assert loop.train(recipe, machine_of((recipe.batch, 1))).step == 2
    else:
        with pytest.raises(mc.InputError, match=rf"(rank \d: )?.*{spoiled}: its sha256 is 000000000000\.\.\.; manifest.json says "):
            loop.train(recipe, machine_of((recipe.batch, 1)))
    if rank:
        parts = [name.partition(".")[0].replace("-of-00004", "").replace("-0000", "") for name in hashed]
        assert " ".join(sorted(parts)) == reads[rank], f"{rank}: {sorted(parts)}"


def test_ranks_of_another_machine_verify_what_they_read(tmp_path: Path) -> None:
    """Each of its files once, shared out by their sizes. What is damaged as they read it is refused by all."""
    recipe = run_of(tmp_path, max_steps=2, eval_steps=None, save_steps=1, batch=4)
    spawn(4, runs, (4, 1), replace(recipe, max_steps=1))
    shutil.copytree(tmp_path / "out" / "step-1", tmp_path / "state" / "step-1")
    recipe = replace(recipe, resume=str(tmp_path / "state" / "step-1"))
    for number, (per, spoiled, reads) in enumerate([
        (4, "", dict.fromkeys(range(4), "")),  # the first rank has verified all that is read there
        (2, "", {1: "", 2: "model3 optimizer1 random3 state", 3: "model4 optimizer3 optimizer4 random4"}),
        (1, "model-00003-of-00004.safetensors", {
            1: "model2 optimizer1 optimizer2 random2 state", 2: "model3 optimizer1 optimizer3 state",
            3: "model4 optimizer1 optimizer4 random4 state"}),
    ]):  # fmt: skip
        spawn(4, on_machines, replace(recipe, output_dir=str(tmp_path / str(number))), per, spoiled, reads)
        assert (tmp_path / str(number) / "step-2").exists() is not bool(spoiled)


@pytest.mark.parametrize(("rank", "found"), [(0, []), (1, []), (2, ["b"]), (3, ["c", "a"]), (4, ["c"])])
def test_who_verifies_what(rank: int, found: list[str]) -> None:
    """Ranks 0 and 1 are on one machine, 2 and 3 on another, 4 on the first, where it sees other files."""
    said = [("x", "1", ["a", "b"]), ("x", "1", ["b", "c"]), ("y", "1", ["a", "b"]), ("y", "1", ["c"]), ("x", "2", ["c"])]
    assert state.dealt(said, rank, {"a": {"size": 1}, "b": {"size": 9}, "c": {"size": 7}}) == found


def test_a_part_that_is_in_no_file_is_refused() -> None:
    """What is read would else be whatever was in memory."""
    half = Spread((4, 2), torch.float32, [Piece(torch.ones(2, 2), (2, 0), (4, 2))])
    assert torch.equal(half[slice(2, 4), slice(0, 2)], torch.ones(2, 2))
    with pytest.raises(ValueError, match="2 of 6 numbers are in none of the files that this rank reads"):
        half[slice(1, 4), slice(0, 2)]
