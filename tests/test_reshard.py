"""A run that goes on on other ranks at each of its steps: what is restored is what was saved, to the bit, and the end that of one
process."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh import spawn
from test_adapter import WIDE
from test_ranks import Rows, full, gpt, padded

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.checkpoint.optimizer import flatten_optimizer
from modelcenter.checkpoint.shards import whole
from modelcenter.checkpoint.state import load_state
from modelcenter.data.loader import Loader
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.ranks import ALONE
from modelcenter.train.evaluate import count_targets
from modelcenter.train.state import Position, restore, save, weights
from modelcenter.train.step import accumulate, update

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")

CHAIN: tuple[dict[str, int], ...] = (
    {}, {"replicate": 2, "fsdp": 2, "zero": 2}, {"fsdp": 3}, {"tensor_parallel": 2}, {"fsdp": 2, "zero": 1},
)  # fmt: skip


CODED: tuple[dict[str, int], ...] = ({"fsdp": 4}, {"fsdp": 2}, {"replicate": 2, "fsdp": 2}, {"tensor_parallel": 2})
QLORA = AdapterConfig(name="lora", rank=2, targets=("all-linear",), quantize="nf4")


def life(rank: int, folder: Path, step: int, degrees: dict[str, int], base: str | None = None) -> None:
    """One step more, on such ranks, from the state before it and to the state after; of an adapter on the codes of `base`."""
    machine = mc.Machine(device="cpu", threads=1, **degrees)  # type: ignore[arg-type]
    ranks = join(machine) if machine.ranks > 1 else ALONE
    model = (gpt(machine) if base is None else mc.load(base, dtype="fp64", adapter=QLORA, machine=machine, seed=3)).train()
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1), ranks)
    if step:
        at = restore(folder / f"step-{step}", model, optimizer, None, ranks)
        assert at.step == step
        tensors, _ = load_state(folder / f"step-{step}")
        tables: dict[str, dict[str, Any]] = {"model": dict(weights(model)), "optimizer": flatten_optimizer(optimizer, model)[0]}
        for group, table in tables.items():
            assert table.keys() == tensors[group].keys()
            for name, tensor in table.items():
                wanted = whole(tensors[group][name])
                found = full(tensor.detach())[tuple(slice(0, n) for n in wanted.shape)]
                moved = bool(found.any()) or (base is not None and step == 1)  # behind a B of zeros an A learns nothing
                assert torch.equal(found, wanted) and moved, f"{degrees}, {group}: {name}"
    loader = Loader(Rows(padded, "lm"), padded, 8, 1, ranks.share, ranks.shares)
    _, batches = next(islice(loader.steps(), step, None))
    (targets,) = ranks.sum(sum(count_targets(b, "lm") for b in batches))
    loss, _ = accumulate(model, batches, "lm", targets=int(targets), ranks=ranks)
    squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
    update(model, optimizer, loss, 1e-2, 0.1, 1.0, squares)
    save(folder, Position(step=step + 1), model, optimizer, None, None, ranks)


@pytest.mark.parametrize("coded", [False, True])
def test_ranks_change_at_every_step(coded: bool, tmp_path: Path) -> None:
    """Of a whole model, and of an adapter on weights in 4 bits, which every rank makes for itself of the same base."""
    base, chain_of = (str(tmp_path / "base"), CODED) if coded else (None, CHAIN)
    if base is not None:
        mc.build("gpt2", config={**WIDE, "vocab": 131}, seed=3).save_pretrained(base)
    for step, degrees in enumerate(chain_of):
        life(0, tmp_path / "alone", step, {}, base)
        count = mc.Machine(**degrees).ranks  # type: ignore[arg-type]
        if count == 1:
            life(0, tmp_path / "chain", step, degrees, base)
        else:
            spawn(count, life, tmp_path / "chain", step, degrees, base)
    last = f"step-{len(chain_of)}"
    (alone, _), (chain, _) = load_state(tmp_path / "alone" / last), load_state(tmp_path / "chain" / last)
    for group in ("model", "optimizer"):
        assert alone[group].keys() == chain[group].keys()
        for name, tensor in alone[group].items():
            found, wanted = whole(chain[group][name]), whole(tensor)
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
