"""Training on several ranks against one process: losses, norms, weights, evaluations, states, and what happens when one fails."""

import errno
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # imported where a model is sharded: here once, and not in each rank
import torch.distributed.fsdp
import zoo
from mesh import DEVICE, full, spawn
from safetensors.torch import load_file
from torch import Tensor
from zoo import cases

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.checkpoint import state
from modelcenter.checkpoint.optimizer import flatten_optimizer
from modelcenter.checkpoint.shards import whole
from modelcenter.checkpoint.state import load_state
from modelcenter.data.collate import pack, pad
from modelcenter.data.examples import Examples
from modelcenter.data.loader import Loader
from modelcenter.data.order import Grouped
from modelcenter.errors import InputError
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.ema import EMA
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train import evaluate, loop, session
from modelcenter.train.evaluate import count_targets
from modelcenter.train.loop import train
from modelcenter.train.metrics import TIMINGS, read_rows
from modelcenter.train.opening import slow_choices
from modelcenter.train.prepare import enter, prepare
from modelcenter.train.read import load_recipe
from modelcenter.train.resolve import resolve
from modelcenter.train.state import restore, weights
from modelcenter.train.step import accumulate, update

MESHES = {"fsdp2": (2, 1), "tp2": (1, 2), "fsdp2xtp2": (2, 2), "fsdp4": (4, 1)}
STEPS = 3  # the last in another epoch

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
    pytest.mark.foreseen("test_a_run_equals_one_process[fsdp2]"),
]


def machine_of(shape: tuple[int, int]) -> mc.Machine:
    return mc.Machine(device=DEVICE, threads=1, fsdp=shape[0], tensor_parallel=shape[1])


class Rows(Examples):
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
BASE = "MODELCENTER_TEST_BASE"  # the environment's: the folder of a pretrained model


def gpt(machine: mc.Machine | None) -> Any:
    return mc.build("gpt2", config=GPT, dtype="fp64", machine=machine, seed=3)


def bert(machine: mc.Machine | None) -> Any:
    names = dict(enumerate("abc"))
    return mc.build("bert-base-uncased", config=BERT, task="classify", dtype="fp64", machine=machine, seed=3, id2label=names)


class Drops(torch.nn.Module):
    """In place of dropout: of two passes over the same rows each leaves out others of the columns, whatever shares a batch."""

    def forward(self, x: Tensor) -> Tensor:
        first, columns = torch.arange(len(x), device=x.device) < len(x) // 2, torch.arange(x.size(1), device=x.device)
        return x * 1.5 * torch.where(first[:, None], columns % 3 != 0, columns % 3 != 1)


def r_drop(machine: mc.Machine | None, recompute: str = "none") -> Any:
    model = bert(machine if machine is None else replace(machine, recompute=recompute))
    model.head.dropout, model.head.r_drop, model.head.smoothing = Drops(), 0.7, 0.1
    with torch.no_grad():
        model.head.out.weight.mul_(30)  # else the two hardly differ
    return model


def t5(machine: mc.Machine | None) -> Any:
    return mc.build("t5-small", config=T5, dtype="fp64", machine=machine, seed=3)


def lora(machine: mc.Machine | None) -> Any:
    if BASE not in os.environ:  # made in the parent: all ranks read one folder
        case = next(case for case in cases(all_tasks=False, all_variants=False) if case.kind == "gpt2")
        os.environ[BASE] = zoo.reference(case)[1]
    return mc.load(os.environ[BASE], dtype="fp64", machine=machine, adapter=LORA, seed=3, config=STILL)


CASES: dict[str, tuple[Callable[..., Any], str, Callable[[list[Any]], Any]]] = {
    "causal": (gpt, "lm", padded),
    "packed": (gpt, "lm", packed),
    "encoder": (bert, "classify", classes),
    "r_drop": (r_drop, "classify", classes),
    "r_drop, recompute=full": (partial(r_drop, recompute="full"), "classify", classes),
    "r_drop, recompute=selective": (partial(r_drop, recompute="selective"), "classify", classes),
    "seq2seq": (t5, "seq2seq", padded),
    "lora": (lora, "lm", padded),
    "lion": (gpt, "lm", padded),
}


def steps_of(case: str, machine: mc.Machine | None, ranks: Ranks, batch: int, micro: int | None) -> Iterator[tuple[Any, ...]]:
    """The loss and the norm of each step, then the parameters."""
    make, task, collate = CASES[case]
    model = make(machine).train()
    optimizer = build_optimizer(model, OptimizerConfig(name="lion" if case == "lion" else "adamw", lr=1e-2, weight_decay=0.1))
    rows = Rows(collate, task)
    order = Grouped(rows.lengths, 1, 8) if case.startswith("r_drop") else None  # of similar length: others are padded less
    loader = Loader(rows, collate, batch, 1, ranks.share, ranks.shares, order=order)
    device = "cpu" if ranks is ALONE else DEVICE
    for (_, micros), _ in zip(loader.steps(micro_batch=micro), range(STEPS), strict=False):
        batches = [{key: value.to(device) if isinstance(value, Tensor) else value for key, value in b.items()} for b in micros]
        (targets,) = ranks.sum(sum(count_targets(b, task) for b in batches))
        loss, _ = accumulate(model, batches, task, targets=int(targets), ranks=ranks)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        norm = update(model, optimizer, loss, 1e-2, 0.1, 1.0, squares)
        yield float(loss), norm
    yield {name: full(p.detach()) for name, p in model.named_parameters()}


@cache  # in the parent, whose memory the ranks share
def one_process(case: str, batch: int) -> list[Any]:
    return list(steps_of(case, None, ALONE, batch, None))


def cuts_of(shape: tuple[int, int]) -> dict[str, tuple[tuple[int, int], ...]]:
    """The cases on a mesh, with the batches and micro-batches to try: one to four forwards a rank."""
    if shape == (2, 1):
        return {case: ((8, 4), (7, 2), (6, 1), (8, 1)) if case in ("causal", "r_drop") else ((7, 2),) for case in CASES}
    if shape == (1, 2):  # halves of as many rows: most of DTensor's time is spent on a call's first inputs of some shape
        return dict.fromkeys(CASES, ((8, 4),))
    return dict.fromkeys(("causal", "seq2seq"), ((7, 2 * shape[1]),))


def equal(rank: int, shape: tuple[int, int]) -> None:
    machine = machine_of(shape)
    ranks = join(machine)
    for case, cuts in cuts_of(shape).items():
        for batch, micro in cuts:
            what = f"{case}, batch {batch}, micro-batch {micro}"
            *alone, wanted = one_process(case, batch)
            *many, found = steps_of(case, machine, ranks, batch, micro)
            for (a, b), (loss, norm) in zip(alone, many, strict=True):
                assert abs(loss - a) < 1e-10 and a > 0, f"{what}: loss {loss}, alone {a}"
                assert abs(norm - b) < 2e-6 * b and b > 0.1, f"{what}: norm {norm}, alone {b}"  # the norm is a float32
            assert len(many) == STEPS and wanted.keys() == found.keys()
            for name, p in wanted.items():
                if case == "lion" and name.endswith("k.bias"):
                    continue  # its gradient is zero but for rounding, whose sign is nobody's
                q = found[name][tuple(slice(0, n) for n in p.shape)]
                torch.testing.assert_close(q, p, rtol=1e-7, atol=1e-8, msg=lambda m, n=name, w=what: f"{w}, {n}: {m}")


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if m in ("fsdp2", "tp2") else pytest.mark.slow) for m in MESHES])
def test_steps_equal_one_process(mesh: str) -> None:
    for case, cuts in cuts_of(MESHES[mesh]).items():
        for batch, _ in cuts:
            one_process(case, batch)
    spawn(MESHES[mesh][0] * MESHES[mesh][1], equal, MESHES[mesh])


def dropped(rank: int) -> None:
    """Tensor-parallel ranks have one dropout, and what is computed again has the same: all is as in one process with that seed."""
    ids = torch.randint(3, 40, (4, 9), generator=torch.Generator().manual_seed(2), device="cpu")
    batch = {"input_ids": ids, "attention_mask": (ids > 5).long(), "labels": torch.tensor([0, 2, -100, 1])}
    known: dict[str, Tensor] = {}
    for tp, recompute in ((1, "none"), (1, "full"), (1, "selective"), (2, "none"), (2, "full"), (2, "selective")):
        machine = mc.Machine(device=DEVICE, threads=1, tensor_parallel=tp, recompute=recompute)
        config = {**BERT, "dropout": 0.3}
        model = mc.build("bert-base-uncased", config=config, task="classify", dtype="fp64", machine=machine, seed=3,
                         id2label=dict(enumerate("abc"))).train()
        assert model.head.dropout.p == 0.3
        model.head.r_drop = 0.7
        torch.manual_seed(7)
        loss = model(**{name: value.to(DEVICE) for name, value in batch.items()}).loss
        loss.backward()
        found = {"loss": full(loss.detach()), **{n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}}
        known = known or found
        assert found.keys() == known.keys() and len(known) > 20
        for name, wanted in known.items():
            torch.testing.assert_close(found[name][tuple(slice(0, n) for n in wanted.shape)], wanted, rtol=1e-9, atol=1e-12,
                                       msg=lambda m, w=f"tp {tp}, recompute {recompute}: {name}": f"{w}: {m}")  # fmt: skip


def test_r_drops_two_passes_drop_the_same_on_ranks_and_again() -> None:
    spawn(2, dropped)


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
    if "batch_tokens" in changes:
        del base["batch"]  # one of the two
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
    mine, theirs = (load_file(next((folder / "model").glob("*model.safetensors"))) for folder in (a, b))
    assert mine.keys() == theirs.keys() and mine
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    loop.train(run_of(folder), machine_of((1, 1)))
    return folder / "out"


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_an_adapter_the_best_and_what_is_frozen(mesh: str, alone: Path, tmp_path: Path) -> None:
    """Each as in one process: what is trained, what is kept and what is written."""
    lora = {"init": "pretrained", "model": str(alone / "model"), "config": {}, "tokenizer": None, "adapter.name": "lora",
            "adapter.rank": 2}  # fmt: skip
    frozen = {"freeze": ["embed.positions.weight", "decoder.blocks.0"], "best": "loss", "patience": 3, "eval_steps": 2}
    for kind, changes in (("lora", lora), ("frozen", frozen)):
        folders = [tmp_path / f"{kind}-{what}" for what in ("one", "many")]
        for folder in folders:
            folder.mkdir()
        loop.train(run_of(folders[0], **changes), machine_of((1, 1)))
        spawn(2, runs, MESHES[mesh], run_of(folders[1], **changes))
        same(folders[1] / "out", folders[0] / "out")


@pytest.mark.parametrize("objective", ["lm", "classify"])
def test_a_step_of_so_many_tokens_has_the_samples_of_one_process(objective: str, tmp_path: Path) -> None:
    """Also where they are fewer than the ranks, of which one then learns nothing; and none of its tokens is counted."""
    changes = {"objective": objective, "batch_tokens": 12, "micro_batch": None, "eval_steps": 8}
    if objective == "classify":
        rows = ({"text": "abcdefgh"[n % 5 :] * 2, "label": n % 2} for n in range(30))
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        changes |= {"data.path": str(tmp_path / "rows.jsonl"), "data.packing": False}
    folders = [tmp_path / what for what in ("one", "many")]
    for folder in folders:
        folder.mkdir()
    loop.train(run_of(folders[0], **changes), machine_of((1, 1)))
    spawn(2, runs, (2, 1), run_of(folders[1], **changes))
    same(folders[1] / "out", folders[0] / "out")
    assert "1 sequence in batch_tokens=12, for 2 shares" in slow_choices(run_of(tmp_path, **changes), torch.device("cpu"), 1, 2)[-1]


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_what_is_added_to_a_loss_and_who_learns_faster(mesh: str, alone: Path, tmp_path: Path) -> None:
    """Label smoothing, z-loss, averages and rates by depth: each as in one process, and each does something."""
    changes = {"loss.label_smoothing": 0.2, "loss.z_loss": 1e-2, "ema": 0.5, "optimizer.layer_decay": 0.5}
    folders = [tmp_path / what for what in ("one", "many")]
    for folder in folders:
        folder.mkdir()
    loop.train(run_of(folders[0], **changes), machine_of((1, 1)))
    spawn(2, runs, MESHES[mesh], run_of(folders[1], **changes))
    same(folders[1] / "out", folders[0] / "out")
    with pytest.raises(AssertionError):
        same(folders[0] / "out", alone)


@pytest.mark.parametrize("mesh", ["fsdp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_a_run_equals_one_process(mesh: str, alone: Path, tmp_path: Path) -> None:
    spawn(MESHES[mesh][0] * MESHES[mesh][1], runs, MESHES[mesh], run_of(tmp_path))
    same(tmp_path / "out", alone)


def copy_to(source: Path, folder: Path, step: int) -> None:
    """The run of `source` as it was after the state of `step`, in `folder`."""
    shutil.copytree(source, folder, ignore=lambda _, names: {n for n in names if n == "model" or n.startswith("step-")})
    shutil.copytree(source / f"step-{step}", folder / f"step-{step}")


def restored(rank: int, shape: tuple[int, int], recipe: Any, path: Path) -> None:
    """What `path` holds is there again, to the bit, whoever wrote it."""
    machine = machine_of(shape)
    recipe, device = resolve(recipe, machine)
    ranks = enter(recipe, machine)
    model = prepare(recipe, machine, device, ranks).model
    optimizer, ema = build_optimizer(model, recipe.optimizer), EMA(model, recipe.ema)
    assert restore(path, model, optimizer, ema, ranks).step == 4
    tensors, _ = load_state(path)
    moments, _ = flatten_optimizer(optimizer, model)
    for group, table in (("model", dict(weights(model))), ("optimizer", moments), ("ema", ema.averages)):
        assert table.keys() == tensors[group].keys()
        for name, tensor in table.items():
            wanted = whole(tensors[group][name])
            found = full(tensor.detach(), wanted.shape)
            assert torch.equal(found, wanted) and (group != "model" or wanted.any()), f"{group}: {name}"


ODD = {"config": {**GPT, "vocab": 15}, "ema": 0.8}  # a vocabulary that two ranks do not divide


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("averaged")
    loop.train(run_of(folder, **ODD), machine_of((1, 1)))
    return folder / "out"


@pytest.mark.parametrize(("before", "after"), [
    ((2, 1), (1, 1)), ((1, 1), (2, 1)),
    pytest.param((1, 2), (2, 1), marks=pytest.mark.slow), pytest.param((4, 1), (1, 2), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_other_ranks_go_on(before: tuple[int, int], after: tuple[int, int], averaged: Path, tmp_path: Path) -> None:
    source = averaged
    if before != (1, 1):
        (tmp_path / "first").mkdir()
        spawn(before[0] * before[1], runs, before, run_of(tmp_path / "first", **ODD))
        source = tmp_path / "first" / "out"
        same(source, averaged)
    copy_to(source, tmp_path / "out", 4)
    recipe = replace(run_of(tmp_path, **ODD), data=load_recipe(source / "recipe.yaml").data)
    spawn(after[0] * after[1], restored, after, recipe, source / "step-4")
    spawn(after[0] * after[1], runs, after, recipe)
    same(tmp_path / "out", averaged)


def test_the_same_ranks_go_on_to_the_bit(tmp_path: Path) -> None:
    changes = {"config": {**GPT, "vocab": 15, "dropout": 0.2, "attn_dropout": 0.2}, "logging_steps": 3}
    (tmp_path / "first").mkdir()
    first = run_of(tmp_path / "first", **changes)
    spawn(2, runs, (2, 1), first)
    copy_to(tmp_path / "first" / "out", tmp_path / "out", 4)
    spawn(2, runs, (2, 1), replace(run_of(tmp_path, **changes), data=first.data))
    assert told(tmp_path / "out") == told(tmp_path / "first" / "out")
    for part in ("step-8", "model"):
        files = {file.name: file.read_bytes() for file in (tmp_path / "first" / "out" / part).iterdir()}
        assert files == {file.name: file.read_bytes() for file in (tmp_path / "out" / part).iterdir()} and len(files) > 2


# ----------------------------------------------------------------------------------------------------- one rank's trouble


def trouble(rank: int, recipe: Any, at_once: tuple[str, ...]) -> None:
    """On rank 1 alone: a gradient that is no number in step 2, a loss in step 3, a full disk at step 4, a signal in step 6."""
    loop.plot_loss, session.AT_ONCE = lambda folder: "not drawn", at_once
    real, write, count, before = session.accumulate, state.write_group, [0], []

    def accumulate(model: Any, *rest: Any) -> Any:
        loss, targets = real(model, *rest)
        count[0] += 1
        if rank == 1 and count[0] == 2:
            next(model.parameters()).grad.to_local().view(-1)[0] = math.nan
        if count[0] in (2, 3, 4):
            before.append([p.detach().to_local().clone() for p in model.parameters()])
        if rank == 1 and count[0] == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return (loss * math.nan if rank == 1 and count[0] == 3 else loss), targets

    def write_group(*rest: Any) -> Any:
        if rank == 1 and count[0] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*rest)

    session.accumulate, state.write_group = accumulate, write_group
    run = train(recipe, machine_of((2, 1)))
    assert run.stopped and run.step == 6
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*before, strict=True)), "a bad step changed weights"


@pytest.mark.parametrize("at_once", [("cpu",), ()], ids=["each batch in its step", "read ahead, as with a GPU"])
def test_one_ranks_trouble_is_everybodys(tmp_path: Path, at_once: tuple[str, ...]) -> None:
    spawn(2, trouble, run_of(tmp_path, logging_steps=1, max_steps=20, save_steps=4), at_once)
    logged = [row for row in told(tmp_path / "out") if "loss" in row]
    assert [row["step"] for row in logged if row["grad_norm"] is None] == [2, 3] and logged[-1]["skipped"] == 2
    assert sorted(path.name for path in (tmp_path / "out").glob("*step-*")) == ["step-6"]


def broken(rank: int, recipe: Any, at_once: tuple[str, ...]) -> None:
    """Rank 1 alone, in the batch behind the evaluation."""
    loop.plot_loss, session.AT_ONCE = lambda folder: "not drawn", at_once
    real = session.Session.batches

    def batches(self: Any) -> Any:
        for number, found in enumerate(real(self), 1):
            if rank == 1 and number == 5:
                raise InputError("data.jsonl: gone")
            yield found

    session.Session.batches = batches  # type: ignore[method-assign]
    train(recipe, machine_of((2, 1)))


@pytest.mark.parametrize("at_once", [("cpu",), ()], ids=["each batch in its step", "read ahead, as with a GPU"])
def test_a_batch_that_one_rank_cannot_read_ends_all(tmp_path: Path, at_once: tuple[str, ...]) -> None:
    """In its step: what ranks do together before, as an evaluation, is as it would have been."""
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
    changes = {"logging_steps": 1, "save_steps": 4, "eval_steps": 4, "max_steps": 8}
    with pytest.raises(AssertionError, match=r"rank 1:(?s:.*)InputError: data\.jsonl: gone"):
        spawn(2, broken, run_of(tmp_path / "broken", **changes), at_once)
    spawn(2, runs, (2, 1), run_of(tmp_path / "whole", **changes))
    rows = told(tmp_path / "broken" / "out")
    assert rows[-1]["step"] == 4 and "eval_loss" in rows[-1] and (tmp_path / "broken" / "out" / "step-4").is_dir()
    assert rows == told(tmp_path / "whole" / "out")[: len(rows)]


def asked(rank: int, recipe: Any) -> None:
    """Rank 1 alone, in the second batch of the second evaluation."""
    loop.plot_loss = lambda folder: "not drawn"
    real, calls = evaluate.count_targets, count(1)

    def count_targets(*rest: Any) -> int:
        if rank == 1 and any("eval_loss" in row for row in told(Path(recipe.output_dir))) and next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*rest)

    evaluate.count_targets = count_targets
    run = train(recipe, machine_of((2, 1)))
    assert run.stopped and run.step == 4
    evaluate.count_targets = real


def test_an_evaluation_is_given_up_by_all(tmp_path: Path) -> None:
    """And comes first in the next life, as if nobody had asked."""
    for name in ("parts", "whole"):
        (tmp_path / name).mkdir()
    parts, whole = (run_of(tmp_path / name, best="loss", patience=3, eval_steps=2) for name in ("parts", "whole"))
    spawn(2, asked, parts)
    assert [row["step"] for row in told(tmp_path / "parts" / "out") if "eval_loss" in row] == [2]
    spawn(2, runs, (2, 1), parts)
    spawn(2, runs, (2, 1), whole)
    assert told(tmp_path / "parts" / "out") == told(tmp_path / "whole" / "out")
    files = [file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole" / "out").glob("*/*")]
    assert {file.parent.name for file in files} >= {"model", "step-8"}
    for file in files:
        if file.parent.name in ("model", "step-8"):
            assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def at_odds(rank: int, recipe: Any) -> None:
    """From the second evaluation on rank 1 comes to another result, by which it would not have a better model to write."""
    loop.plot_loss = lambda folder: "not drawn"
    real, calls = evaluate.Evaluation.__call__, count()

    def call(*rest: Any) -> dict[str, float]:
        number = next(calls)
        return {**real(*rest), "eval_loss": 9.0 + number if rank == 1 else 9.0 - number}

    evaluate.Evaluation.__call__ = call  # type: ignore[method-assign]  # in this process alone
    assert train(recipe, machine_of((2, 1))).step == 8
    evaluate.Evaluation.__call__ = real  # type: ignore[method-assign]  # likewise


def test_ranks_that_have_written_other_texts_keep_one_best(tmp_path: Path) -> None:
    """Each judges the texts that it has written itself. All go by what the first finds, or some would wait for others for ever."""
    spawn(2, at_odds, run_of(tmp_path, best="loss", patience=2, eval_steps=2))
    assert [row["best_step"] for row in told(tmp_path / "out") if "eval_loss" in row] == [2, 4, 6, 8]


def signalled(rank: int, recipe: Any) -> None:
    """In step 2 and, in the next life, in the evaluation of step 4, rank 1 alone, whose share of the data is that of rank 0."""
    loop.plot_loss = lambda folder: "not drawn"
    for module, name, moment, last in ((session, "accumulate", 2, 2), (evaluate, "count_targets", 1, 4)):
        real, calls = getattr(module, name), count(1)

        def call(*rest: Any, real: Any = real, calls: Any = calls, moment: int = moment) -> Any:
            if next(calls) == moment and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*rest)

        setattr(module, name, call)
        run = train(recipe, machine_of((1, 2)))
        setattr(module, name, real)
        assert run.stopped and run.step == last


def test_every_rank_of_a_share_is_heard(tmp_path: Path) -> None:
    spawn(2, signalled, run_of(tmp_path, save_steps=None))
    assert not any("eval_loss" in row for row in told(tmp_path / "out"))


def killed(rank: int, recipe: Any) -> None:
    """Rank 1 is killed while it writes its part of the second state."""
    loop.plot_loss = lambda folder: "not drawn"
    write, saves = state.write_group, set()

    def write_group(temp: Path, *rest: Any) -> Any:
        saves.add(temp)
        if rank == 1 and len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(temp, *rest)

    state.write_group = write_group
    train(recipe, machine_of((2, 1)))


def test_a_rank_killed_in_a_save_costs_no_state(tmp_path: Path) -> None:
    for name in ("first", "whole"):
        (tmp_path / name).mkdir()
    recipes = [run_of(tmp_path / name, eval_steps=None) for name in ("first", "whole")]
    with pytest.raises((AssertionError, EOFError)):
        spawn(2, killed, recipes[0])
    out = tmp_path / "first" / "out"
    assert [path.name for path in out.glob("step-*")] == ["step-4"]
    for _ in range(100):  # the other rank is about to find out
        try:
            spawn(2, runs, (2, 1), recipes[0])
            break
        except AssertionError as error:
            assert "in use by a live run" in str(error)
            time.sleep(0.1)
    assert not list(out.glob(".tmp-*"))
    spawn(2, runs, (2, 1), recipes[1])
    for file in (out / "step-8").iterdir():
        assert file.read_bytes() == (tmp_path / "whole" / "out" / "step-8" / file.name).read_bytes(), file.name


DISK = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "replace", "ftruncate", "truncate", "unlink", "rmdir")


def killed_at(rank: int, recipe: Any, victim: int, at: int, names: Path) -> None:
    """One rank is killed before the call of that number to the disk from its second state on; it writes down their names until
    the state is there."""
    loop.plot_loss = lambda folder: "not drawn"
    save, saves, calls = session.save, [0], list[str]()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if saves[0] == 2 and rank == victim:
                calls.append(name)
                if len(calls) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)

        return call

    def second(*args: Any, **more: Any) -> Any:
        saves[0] += 1
        found = save(*args, **more)
        if saves[0] == 2 and rank == victim and not names.exists():
            names.write_text(" ".join(calls))
        return found

    for name in DISK:
        setattr(os, name, counted(name, getattr(os, name)))
    session.save = second
    train(recipe, machine_of((2, 1)))


def sampled(names: list[str]) -> list[int]:
    """The numbers, from 1 on, of the first, middle and last call of each name, and of eight spread over where the name changes."""
    turns = [k for k in range(len(names)) if k == 0 or names[k] != names[k - 1]]
    chosen = {turns[k * (len(turns) - 1) // 7] for k in range(8)}
    for name in dict.fromkeys(names):
        where = [k for k, other in enumerate(names) if other == name]
        chosen |= {where[0], where[len(where) // 2], where[-1]}
    return [k + 1 for k in sorted(chosen)]


def goes_on(recipe: Any) -> None:
    for _ in range(100):  # the rank that was left is about to find out
        try:
            spawn(2, runs, (2, 1), recipe)
            return
        except AssertionError as error:
            assert "in use by a live run" in str(error)
            time.sleep(0.1)
    raise AssertionError("the run is in use for ever")


def equal_states(one: Path, other: Path) -> None:
    files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (one, other)]
    assert files[0].keys() == files[1].keys() and len(files[0]) > 2
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_at_any_call_of_a_save(victim: int, tmp_path: Path) -> None:
    """The state before is whole, what is half written is swept away, and the run ends as if nobody had been killed.

    Of the calls a sample, the same each time: a save makes one to three hundred, nearly all of them writes of the next few bytes of
    one file, a kill costs two runs of two ranks, and what may differ is the file, the kind of the call and which of them was last.
    """
    (tmp_path / "whole").mkdir()
    plain, names = run_of(tmp_path / "whole", eval_steps=None), tmp_path / "names"
    spawn(2, killed_at, plain, victim, 0, names)
    chosen = sampled(names.read_text().split())
    assert 8 < len(chosen) < 25
    for at in chosen:
        (folder := tmp_path / str(at)).mkdir()
        recipe = replace(run_of(folder, eval_steps=None), data=plain.data)
        with pytest.raises((AssertionError, EOFError)):
            spawn(2, killed_at, recipe, victim, at, names)
        assert {path.name for path in (folder / "out").glob("step-*")} - {"step-8"} == {"step-4"}, at
        goes_on(recipe)
        assert not list((folder / "out").glob(".tmp-*")), at
        equal_states(folder / "out" / "step-8", tmp_path / "whole" / "out" / "step-8")
        shutil.rmtree(folder)


def spoiled(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_a_broken_part_of_a_state_is_passed_over_by_all(tmp_path: Path) -> None:
    """One bit of any file of the newest state, its end or the whole of it: all ranks go on from the state before."""
    (tmp_path / "first").mkdir()
    first = run_of(tmp_path / "first", eval_steps=None)
    spawn(2, runs, (2, 1), first)
    whole_ = tmp_path / "first" / "out"
    names = sorted(file.name for file in (whole_ / "step-8").iterdir())
    parts = [name for name in names if name.startswith("model")]
    assert len(parts) > 1 or len(names) > 3
    trials = [(parts[-1], "bit"), (parts[0], "gone"), (parts[0], "cut"), ("manifest.json", "bit")]
    for number, (name, how) in enumerate(trials):
        folder = tmp_path / str(number)
        shutil.copytree(whole_, folder / "out", ignore=shutil.ignore_patterns("model"))
        spoiled(folder / "out" / "step-8" / name, how)
        spawn(2, runs, (2, 1), replace(run_of(folder, eval_steps=None), data=first.data))
        equal_states(folder / "out" / "step-8", whole_ / "step-8")
        assert [row["step"] for row in told(folder / "out") if "loss" in row][-2:] == [6, 8], name


def no_numbers(rank: int, recipe: Any, victim: int, steps: range) -> None:
    """A loss that is no number on one rank alone, in those steps, as one process counts them that goes back."""
    loop.plot_loss = lambda folder: "not drawn"
    real, count = session.accumulate, [0]

    def accumulate(*rest: Any) -> Any:
        loss, targets = real(*rest)
        count[0] += 1
        return (loss * math.nan if rank == victim and count[0] in steps else loss), targets

    session.accumulate = accumulate
    run = train(recipe, machine_of((2, 1) if victim else (1, 1)))
    assert run.step == recipe.max_steps and count[0] == recipe.max_steps + 6


def test_all_ranks_go_back_from_one_ranks_bad_steps(tmp_path: Path) -> None:
    """Five in a row: to the state before the last good update, and on past the data that was read since, as one process."""
    folders = [tmp_path / what for what in ("one", "many")]
    for folder in folders:
        folder.mkdir()
    recipes = [run_of(folder, eval_steps=None, logging_steps=1, save_steps=2, max_steps=12) for folder in folders]
    spawn(1, no_numbers, recipes[0], 0, range(6, 11))
    spawn(2, no_numbers, recipes[1], 1, range(6, 11))
    same(folders[1] / "out", folders[0] / "out")
    assert [row["rollbacks"] for row in told(folders[1] / "out") if "loss" in row][-1] == 1


def seeds(rank: int, recipe: Any) -> None:
    loop.plot_loss = lambda folder: "not drawn"
    found = []
    real = session.accumulate

    def accumulate(*rest: Any) -> Any:
        ranks = next(given for given in rest if isinstance(given, Ranks))
        found.append(ranks.agree(str(torch.initial_seed())))
        return real(*rest)

    session.accumulate = accumulate
    train(recipe, machine_of((2, 2)))
    a, b, c, d = found[0]
    assert a == b != c == d, "dropout differs where the data does, and there alone"


def test_dropout_differs_between_shares_alone(tmp_path: Path) -> None:
    spawn(4, seeds, run_of(tmp_path, max_steps=1, eval_steps=None, save_steps=None))


# ------------------------------------------------------------------------------------------------- evaluations, refusals


def evaluations(rank: int, recipes: list[Any]) -> None:
    for recipe in recipes:
        results = []
        for machine in (machine_of((2, 1)), machine_of((1, 1))):
            settled, device = resolve(recipe, machine)
            ranks = enter(settled, machine) if machine.ranks > 1 else ALONE
            setup = prepare(settled, machine, device, ranks)
            results.append(setup.evaluation(setup.model))  # type: ignore[misc]
        assert results[0].keys() == results[1].keys()
        for key, value in results[1].items():
            sums = key in ("eval_loss", "eval_perplexity", "eval_bits_per_byte")
            assert results[0][key] == (pytest.approx(value, rel=1e-14) if sums else value), f"{recipe.objective}: {key}"


def test_evaluations_equal_one_process(tmp_path: Path) -> None:
    def recipe(objective: str, model: str, config: dict[str, Any], lines: list[Any], **changes: Any) -> Any:
        file = tmp_path / f"{objective}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "base.yaml").write_text("{}\n")
        base = {"model": model, "init": "random", "config": config, "objective": objective, "tokenizer": "char", "batch": 4,
                "micro_batch": 2, "data.path": str(file), "data.eval_path": str(file), "data.seq_len": 16, "max_steps": 1,
                "precision": "fp32", "output_dir": str(tmp_path / "out"), **changes}  # fmt: skip
        return load_recipe(tmp_path / "base.yaml", base)

    small = {key: value for key, value in BERT.items() if key != "vocab"}
    words = ["ab cd", "b", "cab dab", "dd", "a b c"]
    labelled = [{"text": w, "label": "xy"[k % 2]} for k, w in enumerate(words)]
    several = [{"text": w, "label": ["x", "y", "z"][: k % 4]} for k, w in enumerate(words)]
    pairs = [{"source": w, "target": w[::-1]} for w in words]
    tagged = [{"tokens": w.split(), "tags": ["B-x", "I-x", "O"][: len(w.split())]} for w in words]
    two = {"data.text_key": "source", "data.pair_key": "target"}
    asked = [{"question": "where?", "context": f"{w} here {w}", "answers": {"text": ["here"], "answer_start": [len(w) + 1]}}
             for w in words]  # fmt: skip
    judged = [{"question": "what?", "context": w, "answers": [{"text": t, "label": (k + n) % 2} for n, t in enumerate(words[:3])]}
              for k, w in enumerate(words)]  # fmt: skip
    spawn(2, evaluations, [
        recipe("lm", "gpt2", {k: v for k, v in GPT.items() if k != "vocab"}, labelled, metrics=["bits_per_byte"]),
        recipe("qa", "bert-base-uncased", small, asked, tokenizer="bpe:300", **{"data.stride": 4}),
        recipe("choice", "bert-base-uncased", small, judged, tokenizer="bpe:300", metrics=["question_em", "squad_f1"]),
        recipe("contrastive", "bert-base-uncased", small, pairs, **two),
        recipe("classify", "bert-base-uncased", small, labelled, metrics=["mcc"]),
        recipe("multilabel", "bert-base-uncased", small, several, metrics=["accuracy"]),
        recipe("regress", "bert-base-uncased", small, [{"text": w, "label": k / 3} for k, w in enumerate(words)]),
        recipe("tag", "bert-base-uncased", small, tagged, tokenizer="bpe:300"),
        recipe("seq2seq", "t5-small", {k: v for k, v in T5.items() if k != "vocab"}, pairs, metrics=["chrf"], tokenizer="bpe:300",
               **{"data.target_len": 8}),
    ])  # fmt: skip


@pytest.mark.parametrize(("changes", "shape", "text"), [
    ({"batch": 2}, (4, 1), r"batch: 2 sequences for 4 ranks"),
])  # fmt: skip
def test_refusals_before_anything_is_allocated(changes: dict[str, Any], shape: tuple[int, int], text: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # as a launcher would have it
    with pytest.raises(mc.InputError, match=text):
        train(run_of(tmp_path, **changes), machine_of(shape))
    assert not (tmp_path / "out").exists()
