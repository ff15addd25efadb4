"""Every optimizer on several ranks against one process: weights after five steps, states saved on some ranks and read on others.
Lion's steps and AdamW's are in test_ranks.py."""

import copy
import math
import pickle
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh import spawn
from test_ranks import BERT, MESHES, STILL, Rows, full, machine_of, padded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import modelcenter as mc
from modelcenter.checkpoint.load import put
from modelcenter.checkpoint.optimizer import flatten_optimizer
from modelcenter.checkpoint.shards import whole
from modelcenter.checkpoint.state import load_state
from modelcenter.data.loader import Loader
from modelcenter.errors import InputError
from modelcenter.optim import stacks
from modelcenter.optim.adafactor import Adafactor
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.muon import Muon
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train.evaluate import count_targets
from modelcenter.train.state import Position, restore, save
from modelcenter.train.step import accumulate, update

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

WIDE = {"layers": 1, "dim": 256, "heads": 2, "hidden": 256, "positions": 16, "vocab": 41, **STILL}  # rows of two blocks of 128
SMALL = {"layers": 1, "dim": 16, "heads": 2, "positions": 16, "vocab": 41, **STILL}  # a vocabulary that two ranks do not divide
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {  # optimizer, config, dtype, model
    "adafactor": ("gpt2", SMALL, "fp64", {"name": "adafactor"}),
    "adafactor-bias": ("bert-base-uncased", {k: v for k, v in BERT.items() if k != "head_dropout"}, "fp64", {"name": "adafactor"}),
    "muon": ("gpt2", SMALL, "fp64", {"name": "muon", "momentum": 0.9}),
    "int8": ("gpt2", WIDE, "fp32", {"name": "adamw", "moments": "int8"}),
}
LR, STEPS = 1e-2, 5


def cases_of(ranks: int) -> list[str]:
    """All of four ranks; of two those without which a planted bug would live."""
    return [case for case in CASES if ranks > 2 or case != "adafactor-bias"]


class Run:
    """A model, its optimizer and steps of uneven shares."""

    def __init__(self, case: str, machine: mc.Machine | None, ranks: Ranks) -> None:
        name, config, dtype, settings = CASES[case]
        self.task = "mlm" if name.startswith("bert") else "lm"
        self.ranks, self.model = ranks, mc.build(name, config=config, dtype=dtype, machine=machine, seed=3).train()
        self.optimizer = build_optimizer(self.model, OptimizerConfig(lr=LR, weight_decay=0.1, **settings), ranks)
        for group in self.optimizer.param_groups:
            if "stochastic" in group:
                group["stochastic"] = False  # random bits are a rank's own
        self.loader = Loader(Rows(padded, "lm"), padded, 7, 1, ranks.share, ranks.shares)

    def steps(self, first: int, last: int) -> Iterator[tuple[float, float]]:
        for number, (_, batches) in enumerate(self.loader.steps()):
            if number == last:
                return
            if number < first:
                continue
            (targets,) = self.ranks.sum(sum(count_targets(b, self.task) for b in batches))
            loss, _ = accumulate(self.model, batches, self.task, targets=int(targets), ranks=self.ranks)
            squares, loss = self.ranks.verdict(self.optimizer.squares(self.ranks.copies), loss)
            yield float(loss), update(self.model, self.optimizer, loss, LR, 0.0, 1.0, squares)

    def found(self) -> dict[str, torch.Tensor]:
        return {name: full(p.detach()).clone() for name, p in self.model.named_parameters()}


@cache  # in the parent, whose memory the ranks share
def one_process(case: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    run = Run(case, None, ALONE)
    return list(run.steps(0, STEPS)), run.found()


def compare(case: str, run: Run, told: list[tuple[float, float]], first: int = 0) -> None:
    losses, wanted = one_process(case)
    near, off = (1e-10, 1e-10) if CASES[case][2] == "fp64" else (2e-5, LR)  # of 8 bits a code here and there is the next one
    for (a, b), (loss, norm) in zip(losses[first:], told, strict=True):
        assert abs(loss - a) < near * a and abs(norm - b) < max(near, 2e-6) * b, f"{case}: loss {loss}, norm {norm}; alone {a}, {b}"
    for name, q in run.found().items():
        if name.endswith("k.bias"):
            continue  # its gradient is zero but for rounding, whose size is nobody's
        p = wanted[name]
        own = q[tuple(slice(0, n) for n in p.shape)]
        torch.testing.assert_close(own, p, rtol=0, atol=off, msg=lambda m, n=name: f"{case}, {n}: {m}")
        assert float((own - p).abs().mean()) <= near, f"{case}, {name}: not near in the mean"


def equal(rank: int, machine: mc.Machine, cases: list[str]) -> None:
    ranks = join(machine)
    for room in (0, 2**20):  # each parameter alone, and those of one shape together, as on a GPU
        stacks.SCRATCH[False] = stacks.PRODUCTS[False] = room
        for case in cases:
            run = Run(case, machine, ranks)
            compare(case, run, list(run.steps(0, STEPS)))


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if m in ("fsdp2", "tp2") else pytest.mark.slow) for m in MESHES])
def test_five_steps_equal_one_process(mesh: str) -> None:
    machine = machine_of(MESHES[mesh])
    for case in cases_of(machine.ranks):
        one_process(case)
    spawn(machine.ranks, equal, machine, cases_of(machine.ranks))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"replicate": 2, "fsdp": 2}, {"fsdp": 2, "zero": 1}, {"fsdp": 2, "zero": 2}], ids=str)
def test_copies_and_stages_equal_one_process(degrees: dict[str, Any]) -> None:
    for case in CASES:
        one_process(case)
    machine = mc.Machine(device="cpu", threads=1, **degrees)
    spawn(machine.ranks, equal, machine, list(CASES))


# -------------------------------------------------------------------------------------------------------------- states


def stop(rank: int, shape: tuple[int, int], folder: Path, cases: list[str]) -> None:
    machine = machine_of(shape)
    ranks = join(machine)
    for case in cases:
        run = Run(case, machine, ranks)
        assert len(list(run.steps(0, 2))) == 2
        save(folder / case, Position(step=2), run.model, run.optimizer, None, ranks=ranks)


def go_on(rank: int, shape: tuple[int, int], folder: Path, cases: list[str]) -> None:
    """What was saved is there again, to the bit, and the next steps are those of one process."""
    machine = machine_of(shape)
    ranks = join(machine)
    for case in cases:
        run, path = Run(case, machine, ranks), folder / case / "step-2"
        assert restore(path, run.model, run.optimizer, ranks=ranks).step == 2
        saved, (moments, _) = load_state(path)[0]["optimizer"], flatten_optimizer(run.optimizer, run.model)
        assert moments.keys() == saved.keys() and len(saved) > 20
        for name, tensor in moments.items():
            wanted = whole(saved[name])
            found = full(tensor)[tuple(slice(0, n) for n in wanted.shape)]
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), f"{case}: {name}"
        compare(case, run, list(run.steps(2, STEPS)), 2)


@pytest.mark.parametrize(("before", "after"), [
    ((2, 1), (1, 1)),
    pytest.param((1, 1), (1, 2), marks=pytest.mark.slow), pytest.param((2, 1), (4, 1), marks=pytest.mark.slow),
    pytest.param((1, 2), (2, 2), marks=pytest.mark.slow), pytest.param((2, 2), (2, 1), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_other_ranks_go_on(before: tuple[int, int], after: tuple[int, int], tmp_path: Path) -> None:
    cases = cases_of(max(math.prod(before), math.prod(after)))
    for case in cases:
        one_process(case)
    for shape, work in ((before, stop), (after, go_on)):
        many = math.prod(shape)
        work(0, shape, tmp_path, cases) if many == 1 else spawn(many, work, shape, tmp_path, cases)


# -------------------------------------------------------------------------------------------------------- moments in 8 bits


def noise(name: str, shape: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def given(run: Run) -> dict[str, torch.Tensor]:
    """The state after two steps of gradients that every rank has the same."""
    for step in range(2):
        for name, p in run.model.named_parameters():
            g = noise(f"{name}{step}", run.model.shapes[name])
            p.grad = torch.zeros_like(p)
            put(p.grad, g)
        run.optimizer.step()
    moments, _ = flatten_optimizer(run.optimizer, run.model)
    return {name: full(t) for name, t in moments.items()}


def bits(rank: int, shape: tuple[int, int]) -> None:
    machine = machine_of(shape)
    found, wanted = given(Run("int8", machine, join(machine))), given(Run("int8", None, ALONE))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name][tuple(slice(0, n) for n in tensor.shape)], tensor), name
    kinds = {name.partition("/")[2]: t.dtype for name, t in wanted.items() if name.startswith("exp_avg/")}
    assert kinds["decoder.blocks.0.attn.o.weight"] == torch.int8 and kinds["decoder.blocks.0.attn.o.bias"] == torch.float32


@pytest.mark.parametrize("mesh", ["fsdp2", "tp2", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_blocks_of_8_bit_moments_are_those_of_one_process(mesh: str) -> None:
    spawn(MESHES[mesh][0] * MESHES[mesh][1], bits, MESHES[mesh])


def refused(rank: int) -> None:
    machine = machine_of((1, 2))
    model = mc.build("gpt2", config={**SMALL, "dim": 128}, machine=machine, seed=3)
    said = r"optimizer\.moments: int8 with decoder\.blocks\.0\.attn\.o\.weight, whose rows of 128 are cut in 2"
    with pytest.raises(InputError, match=said):
        build_optimizer(model, OptimizerConfig(moments="int8"), join(machine))
    build_optimizer(mc.build("gpt2", config=SMALL, machine=machine, seed=3), OptimizerConfig(moments="int8"), join(machine))


def test_rows_that_tensor_parallel_cuts_within_a_block_are_refused() -> None:
    spawn(2, refused)


def whole_gradient(rank: int) -> None:
    join(machine_of((1, 2)))
    mesh = init_device_mesh("cpu", (2,))
    start, grad = torch.arange(32.0).view(8, 4), torch.linspace(-1, 1, 32).view(8, 4)
    for name in ("adamw", "lion"):
        p = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        p.grad = distribute_tensor(grad, mesh, [Replicate()])
        alone = torch.nn.Parameter(start.clone())
        alone.grad = grad
        for one in (p, alone):
            build_optimizer(torch.nn.ParameterList([one]), OptimizerConfig(name=name)).step()
        assert torch.equal(p.full_tensor(), alone), name


def test_a_gradient_that_is_whole_is_cut_as_its_parameter_is() -> None:
    """What a user's own use of a weight may leave, in the type of a parameter in parts."""
    spawn(2, whole_gradient)


def copied(rank: int) -> None:
    ranks = join(machine_of((2, 1)))
    mesh, generator = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), torch.Generator().manual_seed(0)
    grads = [torch.randn(n, 4, generator=generator) for n in (6, 6, 5)]

    def step(params: list[torch.nn.Parameter], optimizer: Muon | Adafactor) -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = distribute_tensor(g, mesh, [Shard(0)])
        optimizer.step()

    kinds: list[type[Muon | Adafactor]] = [Muon, Adafactor]
    for kind in kinds:
        alone = [torch.nn.Parameter(g + 1) for g in grads]
        one = kind(alone, lr=0.1)
        for _ in range(2):
            for p, g in zip(alone, grads, strict=True):
                p.grad = g
            one.step()
        params = [torch.nn.Parameter(distribute_tensor(g + 1, mesh, [Shard(0)])) for g in grads]
        both = (params, kind(params, lr=0.1, ranks=ranks))
        step(*both)
        for peer in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):  # noqa: S301
            step(*peer)
            for p, wanted in zip(peer[0], alone, strict=True):
                torch.testing.assert_close(full(p), wanted, rtol=0, atol=1e-6)


def test_a_copy_and_a_pickle_know_the_ranks() -> None:
    """Two steps, the second by a copy, are those of one process."""
    spawn(2, copied)
