"""The layout that `--machine auto` takes: the plan's best, said, recorded, and taken again by a resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan import recipe_of

from modelcenter.config import bind, read_recipe
from modelcenter.errors import InputError
from modelcenter.parallel.machine import Machine, load_machine
from modelcenter.plan.chips import CHIPS
from modelcenter.plan.estimate import Estimate
from modelcenter.train import choose as module
from modelcenter.train.choose import choose
from modelcenter.train.folder import write_recipe
from modelcenter.train.loop import train

AUTO = Machine(devices="all")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as anybody is told."""
    chip = replace(CHIPS["4090"], node=8)
    for name, said in {"device_of": torch.device("cuda", 0), "count_of": 2, "chip_of": chip}.items():
        monkeypatch.setattr(module, name, lambda *_, said=said: said)
    monkeypatch.setattr(module, "resolve", lambda recipe, machine: (replace(recipe, precision="bf16"), None))


def test_the_fastest_that_fits_is_taken_and_said(gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """Slower than none that fits of all that were tried, those that the plan's own command lists."""
    seen: list[Any] = []
    surveyed = module.surveyed
    monkeypatch.setattr(module, "surveyed", lambda *given: seen.append(surveyed(*given)) or seen[-1])
    recipe, machine = choose(replace(recipe_of(tmp_path), micro_batch=None), load_machine("auto"))
    tried: list[Estimate] = list(seen[0].estimates)
    assert {e.machine.ranks for e in tried} == {2} and len(tried) == 5 and all(e.fits for e in tried)
    best = min(tried, key=lambda e: e.seconds)
    assert (machine, recipe.micro_batch) == (best.machine, best.rows) and machine.ranks == 2 and machine.devices is None
    assert recipe.micro_batch is not None and 8 % recipe.micro_batch == 0
    said = capsys.readouterr().err
    assert said.startswith("machine: 2 x NVIDIA GeForce RTX 4090: machine.") and said.count("\n") == 1
    assert f"the fastest of 5 layouts that fit: {best.seconds:.3g} s a step, predicted, bound by " in said
    assert "; next machine." in said


def test_a_resume_takes_what_was_taken(gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On as many devices; on another number the micro-batch alone, which fixes how sums are rounded."""
    recipe = replace(recipe_of(tmp_path), micro_batch=None)
    (tmp_path / "out").mkdir()
    write_recipe(tmp_path / "out", replace(recipe, micro_batch=2), Machine(tensor_parallel=2, recompute="selective", threads=3))
    asked: list[Any] = []
    surveyed = module.surveyed
    monkeypatch.setattr(module, "surveyed", lambda *given: asked.append(given) or surveyed(*given))
    again, machine = choose(recipe, AUTO)
    assert machine == Machine(tensor_parallel=2, recompute="selective") and again.micro_batch == 2 and not asked
    monkeypatch.setattr(module, "count_of", lambda machine: 4)
    again, machine = choose(recipe, AUTO)
    assert machine.ranks == 4 and again.micro_batch == 2 and [given[-1] for given in asked] == [2]
    monkeypatch.setattr(module, "surveyed", None)
    monkeypatch.setattr(module, "count_of", lambda machine: 2)
    with pytest.raises(TypeError):
        choose(replace(recipe, resume="never"), AUTO)  # another run: there is something to choose


def test_what_cannot_be_chosen_is_refused(gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    with pytest.raises(InputError, match=r"machine.fsdp: given beside devices=all, which chooses it; one of the two"):
        choose(recipe, Machine(devices="all", fsdp=2))
    monkeypatch.setattr(module, "chip_of", lambda device: replace(CHIPS["4090"], memory=4e5))
    monkeypatch.setattr(module, "beside", lambda chip, machine, ranks: replace(chip, host_memory=4e4))
    lacking = r"needs least, .* of 400 kB a rank, with 423 kB of 40.0 kB in the host's memory; more devices"
    with pytest.raises(InputError, match=rf"machine.devices: nothing fits 2 x NVIDIA .* {lacking}"):
        choose(recipe, AUTO)
    monkeypatch.setattr(module, "count_of", lambda machine: 32)
    with pytest.raises(InputError, match=r"batch: 8 sequences for 32 devices; a multiple of the devices, or fewer of them"):
        choose(replace(recipe, micro_batch=None), AUTO)
    monkeypatch.setenv("NNODES", "2")  # it would be shared out among the GPUs of one, half of which are then idle
    with pytest.raises(InputError, match=r"on one of 2 machines \(NNODES\); the command alone, or the degrees"):
        choose(recipe, AUTO)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="in a process that a launcher has started; the command alone"):
        choose(recipe, AUTO)


def test_shares_need_not_be_as_large(gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, three and two of eight sequences, as a run takes them by its degrees, too."""
    monkeypatch.setattr(module, "count_of", lambda machine: 3)
    recipe, machine = choose(replace(recipe_of(tmp_path), micro_batch=None), AUTO)
    assert machine.shares == 3 and recipe.micro_batch == 4


def test_parts_of_sequences_are_for_layouts_that_cut_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused as what the one rank of a plan's own rehearsals cannot do."""
    monkeypatch.setattr(module, "count_of", lambda machine: 2)
    parted = Machine(devices=2, device="cpu", sequence_parallel=True)
    recipe = replace(recipe_of(tmp_path), micro_batch=None)
    assert choose(recipe, parted)[1] == Machine(device="cpu", tensor_parallel=2, sequence_parallel=True)
    monkeypatch.setattr(module, "count_of", lambda machine: 3)
    with pytest.raises(InputError, match=r"^machine\.sequence_parallel: true, and no layout of 3 devices that can be run"):
        choose(recipe, parted)


def test_one_cpu_leaves_nothing_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data is read for it and no step rehearsed."""
    monkeypatch.setattr(module, "surveyed", None)
    recipe = recipe_of(tmp_path, **{"eval_steps": None, "data.eval_fraction": 0.0, "max_steps": 1})
    assert choose(recipe, Machine(devices="all", device="cpu", threads=1)) == (recipe, Machine(device="cpu", threads=1))
    ended = train(recipe, Machine(devices="all", device="cpu", threads=1))
    file = ended.output_dir / "machine.yaml"
    assert bind(Machine, read_recipe(file), file) == Machine(device="cpu", threads=1)


def test_ranks_of_a_cpu_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = replace(CHIPS["4090"], name="CPU", memory=6e6, apart=False)
    monkeypatch.setattr(module, "chip_of", lambda device: chip)
    seen: list[Any] = []
    surveyed = module.surveyed
    monkeypatch.setattr(module, "surveyed", lambda *given: seen.append(surveyed(*given)) or seen[-1])
    recipe, machine = choose(replace(recipe_of(tmp_path), micro_batch=None), Machine(devices=2, device="cpu"))
    assert seen[0].costs.limit == 3e6 and machine.ranks == 2 and recipe.micro_batch is None  # as one process would compute it
    assert "fragments" not in seen[0].choice.parts and {e.rows for e in seen[0].estimates} <= {4, 8}


def test_it_is_for_training_alone() -> None:
    import modelcenter as mc

    with pytest.raises(InputError, match=r"machine.devices: all, where nothing is trained; machine.fsdp=N, or leave it out"):
        mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 64, "positions": 16}, machine="auto")


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_as_it_began(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command: the layout is chosen, started, recorded, and not chosen again."""
    from modelcenter.__main__ import main

    recipe = recipe_of(tmp_path)
    file = tmp_path / "run.yaml"
    from modelcenter.config import dump_yaml, to_dict

    file.write_text(dump_yaml(to_dict(replace(recipe, schedule=replace(recipe.schedule, name="constant"), save_steps=2))))
    start = ["train", str(file), "machine.devices=2", "machine.device=cpu", "machine.threads=1", "--json"]
    assert main([*start, "max_steps=2"]) == 0
    first = capsys.readouterr()
    assert json.loads(first.out)["step"] == 2 and first.err.startswith("machine: 2 x CPU: machine.")
    kept = (tmp_path / "out" / "machine.yaml").read_text()
    assert main([*start, "max_steps=4"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out)["step"] == 4 and again.err.startswith("machine: 2 x cpu, as before")
    assert (tmp_path / "out" / "machine.yaml").read_text() == kept
