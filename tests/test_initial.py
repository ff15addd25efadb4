"""Initial weights: a rank's part of a tensor is that of one draw of the whole, and it never holds the rest."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once here, and not in each rank
from mesh import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import modelcenter as mc
from modelcenter.data.config import DataConfig
from modelcenter.layers import initial
from modelcenter.layers.initial import Normal, Uniform, source_of
from modelcenter.train.resolve import sizes_of


@pytest.mark.parametrize("kind", ["normal_", "uniform_"])
def test_a_part_is_that_of_one_draw(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's, of the whole tensor at once."""
    rng = random.Random(1)
    for trial in range(300):
        shape = tuple(rng.randint(1, n) for n in rng.choice([(200,), (40, 9), (70, 33), (64, 32), (5, 4, 9)]))
        starts = [rng.randrange(n) for n in shape]
        region = tuple(slice(a, rng.randint(a + 1, n)) for a, n in zip(starts, shape, strict=True))
        monkeypatch.setattr(initial, "PIECE", rng.choice([1, 16, 64, 100]))
        lazy: Any = Normal(shape, 0.3, trial, "w") if kind == "normal_" else Uniform(shape, 0.3, trial, "w")
        bounds = (0.0, 0.3) if kind == "normal_" else (-0.3, 0.3)
        whole = getattr(torch.empty(shape), kind)(*bounds, generator=source_of(trial, "w"))
        assert torch.equal(lazy[region], whole[region]), (shape, region)


class Largest(TorchDispatchMode):
    """The most elements of a tensor on the host that an operator has made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.most = max(self.most, (t.to_local() if hasattr(t, "to_local") else t).numel())
        return out


SIZES = {"vocab": 2000, "positions": 16, "dim": 32, "heads": 2, "layers": 1}


def build(rank: int) -> None:
    initial.PIECE = 2048
    for key in ("fsdp", "tensor_parallel"):
        with Largest() as seen:
            mc.build("gpt2", config=SIZES, machine=mc.Machine(device="cpu", **{key: 2}))
        assert seen.most == 1000 * 32, f"{key}: {seen.most} values at once; half of the table of words is {1000 * 32}"


def test_a_rank_never_holds_more_than_its_share() -> None:
    spawn(2, build)


def test_a_folder_s_config_gives_the_shape(tmp_path: Path) -> None:
    """Of any family, with the task of the class that it names; there need be no weights, and those that are there are not read."""
    sizes = {"layers": 1, "vocab": 64, "dim": 32, "heads": 2, "positions": 16}
    for task in ("lm", "classify"):
        folder = tmp_path / task
        mc.build("gpt2", config=sizes, task=task, seed=1).save_pretrained(folder)
        read, wanted = mc.build(folder), mc.build("gpt2", config=sizes, task=task)
        assert read.task == task and read.config.layers == 1
        for p, q in zip(read.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(p, q), "the seed's, and not the file's"
        (folder / "model.safetensors").unlink()
        assert mc.build(str(folder), config={"layers": 2}).config.layers == 2
    said = json.loads((tmp_path / "lm" / "config.json").read_text())
    (tmp_path / "lm" / "config.json").write_text(json.dumps(said | {"model_type": "gtp2"}))
    for name, found in ((tmp_path / "lm", "model_type: 'gtp2'; one of the families"), (tmp_path, "a preset, or a folder with a c")):
        with pytest.raises(mc.InputError, match=found):
            mc.build(name)


def test_a_folder_comes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a model is made as where it is loaded, and where a run begins; one without a config.json, such as a run's, is none. A
    run at random changes fields of that as it does a preset's."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert mc.build("gpt2", device="meta").config.layers == 12
    mc.build("gpt2", config=SIZES | {"layers": 3}).save_pretrained("gpt2")
    assert mc.build("gpt2", device="meta").config == mc.load("gpt2").config and mc.load("gpt2").config.layers == 3
    recipe = mc.Recipe(model="gpt2", init="random", output_dir="out", max_steps=1, data=DataConfig(path="a"))
    assert sizes_of(recipe)["layers"] == 3
    assert sizes_of(replace(recipe, config={"layers": 2}))["layers"] == 2


def test_a_run_begins_from_a_config_alone(tmp_path: Path) -> None:
    """Not from a folder with weights, of which a run that begins at random would make nothing, nor with sizes beside the file's."""
    model, text = tmp_path / "model", tmp_path / "a.txt"
    mc.build("gpt2", config={"layers": 1, "vocab": 64, "dim": 16, "heads": 2, "positions": 16}).save_pretrained(model)
    text.write_text("the cat sat on the mat. " * 40)

    def run(**over: Any) -> Any:
        data, out = DataConfig(path=str(text), seq_len=16), str(tmp_path / "out")
        given = {"model": str(model), "init": "random", "tokenizer": "char", "data": data, "batch": 4, "max_steps": 1}
        return mc.train(mc.Recipe(**given, output_dir=out, **over), mc.Machine(device="cpu"))

    with pytest.raises(mc.InputError, match="a folder with weights, and init is random; init=pretrained"):
        run()
    (model / "model.safetensors").rename(model / "adapter_config.json")
    with pytest.raises(mc.InputError, match="a folder with weights, and init is random; init=pretrained"):
        run()
    (model / "adapter_config.json").unlink()
    with pytest.raises(mc.InputError, match=r"config: layers beside the config\.json of .*; config=\{\}"):
        run(config={"layers": 2})
    run()
    made = mc.load(tmp_path / "out" / "model")
    assert (made.config.dim, made.config.layers) == (16, 1) and made.config.vocab < 64, "the tokenizer's"
