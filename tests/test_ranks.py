"""Training on several ranks against one process: losses, norms, weights, evaluations, states, and what happens when one fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from mesh import spawn
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from zoo import cases

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.data.collate import pack, pad
from modelcenter.data.loader import Loader
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train import loop
from modelcenter.train.evaluate import count_targets
from modelcenter.train.loop import accumulate, train, update
from modelcenter.train.metrics import TIMINGS, read_rows
from modelcenter.train.recipe import load_recipe

MESHES = {"fsdp2": (2, 1), "tp2": (1, 2), "fsdp2xtp2": (2, 2), "fsdp4": (4, 1)}
STEPS = 5

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def machine_of(shape: tuple[int, int]) -> mc.Machine:
    return mc.Machine(device="cpu", threads=1, fsdp=shape[0], tensor_parallel=shape[1])


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


class Rows:
    """Examples of very different numbers of targets: none in the first two, so that a rank of four has none at all."""

    def __init__(self, collate: Callable[[list[Any]], Any], kind: str) -> None:
        self.collate, self.kind = collate, kind

    def __len__(self) -> int:
        return 23

    @property
    def lengths(self) -> Any:
        return np.array([len(self.at(0, k)[0]) for k in range(len(self))])

    def at(self, epoch: int, index: int) -> tuple[Any, Any]:
        draw = np.random.default_rng(index)
        ids = draw.integers(3, 40, int(draw.integers(6, 13)))
        if self.kind == "classify":
            return ids, [-100 if index % 8 < 2 else index % 3]
        labels = draw.integers(3, 40, int(draw.integers(6, 9))) if self.kind == "seq2seq" else ids.copy()
        labels[: len(labels) if index % 8 < 2 else 1 + index % 4] = -100  # packed, the first is no target
        return ids, labels


def padded(rows: list[Any]) -> Any:
    ids, labels = zip(*rows, strict=True)
    return pad(ids, labels, 0)


def classes(rows: list[Any]) -> Any:
    return {**padded(rows), "labels": torch.tensor([labels for _, labels in rows])[:, 0]}


def packed(rows: list[Any]) -> Any:
    ids, labels = zip(*rows, strict=True)
    return pack(ids, labels)


STILL = {"dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0, "head_dropout": 0.0}
GPT = {"layers": 2, "dim": 16, "heads": 2, "positions": 16, "vocab": 41, **STILL}
BERT = {"layers": 1, "dim": 16, "hidden": 32, "heads": 2, "positions": 16, "vocab": 41, "dropout": 0.0, "attn_dropout": 0.0}
T5 = {"layers": 1, "decoder_layers": 1, "dim": 16, "hidden": 32, "heads": 2, "head_dim": 8, "vocab": 41, "dropout": 0.0}
LORA = AdapterConfig(name="lora", rank=2, targets=("all-linear",))


def gpt(machine: mc.Machine | None) -> Any:
    return mc.build("gpt2", config=GPT, dtype="fp64", machine=machine, seed=3)


def bert(machine: mc.Machine | None) -> Any:
    names = dict(enumerate("abc"))
    return mc.build("bert-base-uncased", config=BERT, task="classify", dtype="fp64", machine=machine, seed=3, id2label=names)


def t5(machine: mc.Machine | None) -> Any:
    return mc.build("t5-small", config=T5, dtype="fp64", machine=machine, seed=3)


def lora(machine: mc.Machine | None) -> Any:
    case = next(case for case in cases(all_tasks=False, all_variants=False) if case.kind == "gpt2")
    return mc.load(zoo.reference(case)[1], dtype="fp64", machine=machine, adapter=LORA, seed=3, config=STILL)


CASES: dict[str, tuple[Callable[..., Any], str, Callable[[list[Any]], Any]]] = {
    "causal": (gpt, "lm", padded),
    "packed": (gpt, "lm", packed),
    "encoder": (bert, "classify", classes),
    "seq2seq": (t5, "seq2seq", padded),
    "lora": (lora, "lm", padded),
}


def steps_of(case: str, machine: mc.Machine | None, ranks: Ranks, batch: int, micro: int | None) -> Iterator[tuple[Any, ...]]:
    """The loss and the norm of each step, then the parameters."""
    make, task, collate = CASES[case]
    model = make(machine).train()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    loader = Loader(Rows(collate, task), collate, batch, 1, ranks.share, ranks.shares)
    for (_, batches), _ in zip(loader.steps(micro_batch=micro), range(STEPS), strict=False):
        (targets,) = ranks.sum(sum(count_targets(b, task) for b in batches))
        loss, _ = accumulate(model, batches, task, targets=int(targets), ranks=ranks)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        norm = update(model, optimizer, loss, 1e-2, 0.1, 1.0, squares)
        yield loss, norm
    yield {name: full(p.detach()) for name, p in model.named_parameters()}


def equal(rank: int, shape: tuple[int, int]) -> None:
    machine = machine_of(shape)
    ranks = join(machine)
    for case in CASES:
        for batch, micro in ((8, None), (7, 2), (6, 1), (8, 1)) if case == "causal" and shape[1] == 1 else ((7, 2 * shape[1]),):
            what = f"{case}, batch {batch}, micro-batch {micro}"
            *alone, wanted = steps_of(case, None, ALONE, batch, None)
            *many, found = steps_of(case, machine, ranks, batch, micro)
            for (a, b), (loss, norm) in zip(alone, many, strict=True):
                assert abs(loss - a) < 1e-10 and a > 0, f"{what}: loss {loss}, alone {a}"
                assert abs(norm - b) < 2e-6 * b and b > 0.1, f"{what}: norm {norm}, alone {b}"  # the norm is a float32
            assert len(many) == STEPS and wanted.keys() == found.keys()
            for name, p in wanted.items():
                q = found[name][tuple(slice(0, n) for n in p.shape)]
                torch.testing.assert_close(q, p, rtol=1e-7, atol=1e-8, msg=lambda m, n=name, w=what: f"{w}, {n}: {m}")


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_equal_one_process(mesh: str) -> None:
    lora(None)  # its folder is written once, here
    spawn(MESHES[mesh][0] * MESHES[mesh][1], equal, MESHES[mesh])


# ---------------------------------------------------------------------------------------------------------- whole runs


def run_of(folder: Path, **changes: Any) -> Any:
    (folder / "text.txt").write_text("\n".join(f"{n} and {n * n}" * (n % 7 + 1) for n in range(60)))
    (folder / "base.yaml").write_text("{}\n")
    base = {
        "model": "gpt2", "init": "random", "config": {**GPT, "vocab": 16}, "tokenizer": "char",
        "data.path": str(folder / "text.txt"), "data.seq_len": 12, "data.packing": False, "data.eval_fraction": 0.2,
        "optimizer.lr": 1e-2, "batch": 6, "micro_batch": 2, "precision": "fp32", "max_steps": 8, "logging_steps": 2,
        "eval_steps": 4, "save_steps": 4, "output_dir": str(folder / "out"),
    }  # fmt: skip
    return load_recipe(folder / "base.yaml", {**base, **changes})


def told(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMINGS} for row in read_rows(folder / "metrics.jsonl")][1:]


def runs(rank: int, shape: tuple[int, int], recipe: Any) -> None:
    loop.plot_loss = lambda folder: "not drawn"
    run = train(recipe, machine_of(shape))
    assert run.metrics["step"] == run.step == recipe.max_steps and not run.stopped


def same(a: Any, b: Any) -> None:
    """Two runs are one, but for rounding."""
    for one, other in zip(told(a), told(b), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == pytest.approx(other[key], rel=2e-4, abs=1e-6), f"{key} of step {one['step']}"
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (a, b))
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    loop.train(run_of(folder), machine_of((1, 1)))
    return folder / "out"


@pytest.mark.parametrize("mesh", ["fsdp2", "fsdp2xtp2"])
def test_a_run_equals_one_process(mesh: str, alone: Path, tmp_path: Path) -> None:
    spawn(MESHES[mesh][0] * MESHES[mesh][1], runs, MESHES[mesh], run_of(tmp_path))
    same(tmp_path / "out", alone)
