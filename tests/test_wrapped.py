"""torch's own DistributedDataParallel and fully_shard, put around a model by hand: losses and weights of one process."""

from typing import Any

import mesh
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import modelcenter as mc
from modelcenter.layers.block import Block

SIZES = {"layers": 2, "dim": 32, "heads": 2, "vocab": 52}
KINDS = {"gpt2": {"positions": 16}, "t5-small": {"decoder_layers": 2, "hidden": 64, "head_dim": 16}}
WHOLE = StateDictOptions(full_state_dict=True)


def fresh(kind: str) -> mc.Model:
    return mc.build(kind, config={**SIZES, **KINDS[kind]}, seed=1).eval()


def sharded(model: mc.Model) -> mc.Model:
    for block in [part for part in model.modules() if isinstance(part, Block)]:
        fully_shard(block)
    return fully_shard(model)


def train(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def equals(rank: int, kind: str, way: str) -> None:
    ids = torch.randint(5, 50, (4, 9), generator=torch.Generator().manual_seed(3))
    alone = fresh(kind)
    wanted, weights = torch.stack(train(alone, ids)), alone.state_dict()
    model: Any = DistributedDataParallel(fresh(kind)) if way == "ddp" else sharded(fresh(kind))
    losses = torch.stack(train(model, ids[2 * rank : 2 * rank + 2]))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / 2, wanted, rtol=1e-6, atol=1e-6)
    held = get_model_state_dict(model, options=WHOLE)
    assert held.keys() == weights.keys() and "head.out.weight" not in held  # a tied weight has one name
    for name, weight in weights.items():
        torch.testing.assert_close(held[name], weight, rtol=1e-5, atol=1e-6)
    other: Any = DistributedDataParallel(fresh(kind)) if way == "ddp" else sharded(fresh(kind))
    other.load_state_dict(model.state_dict())
    again: Any = fresh(kind) if way == "ddp" else sharded(fresh(kind))
    set_model_state_dict(again, dict(held), options=WHOLE)  # which puts shards in their places into what it is given
    plain = fresh(kind)
    plain.load_state_dict(held)
    best = alone(input_ids=ids, labels=ids).loss
    for copy in (other, again, plain):
        torch.testing.assert_close(copy(input_ids=ids, labels=ids).loss, best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["ddp", "fully_shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(kind: str, way: str) -> None:
    mesh.spawn(2, equals, kind, way)
