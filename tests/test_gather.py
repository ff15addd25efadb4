"""Contrastive losses of a batch that several ranks share: each text is to be found among those of all, as in one process."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from mesh import spawn
from test_data_embed import records
from test_ranks import BERT, MESHES, full, machine_of

import modelcenter as mc
from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Loader
from modelcenter.data.objective import make_examples
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.gather import Gather
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train.evaluate import count_targets, evaluate
from modelcenter.train.step import accumulate, update

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view:UserWarning", "ignore:.* pairs have a text of another:UserWarning"
)

# batch, micro-batch of a rank, symmetric, with negatives; of two ranks the last has no row left in the third forward of the second
# case, and in the last a pair has none to be told from but those of other ranks
CASES = ((7, None, False, True), (5, 1, True, True), (4, 1, False, False))
STEPS = 3


@cache
def examples(far: bool) -> Any:
    data = DataConfig(seq_len=12, text_key="a", pair_key="b", negative_key="far" if far else None)
    return make_examples("contrastive", records(23), train_tokenizer([], 270, "roberta"), data)


def steps_of(machine: mc.Machine | None, ranks: Ranks, batch: int, micro: int | None, symmetric: bool, far: bool,
             shares: int = 1) -> Iterator[Any]:
    """The loss and the norm of each step, then the weights. One process forms the forwards that `shares` have together."""
    config = {**BERT, "vocab": 300, "positions": 24}
    model = mc.build("bert-base-uncased", config=config, task="embed", dtype="fp64", machine=machine, seed=3).train()
    model.head.symmetric = symmetric
    if ranks.shares > 1:
        model.head.gather = Gather(ranks)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1), ranks)
    loaders = [Loader(examples(far), examples(far).collate, batch, 1, k, shares) for k in range(shares)]
    mine = Loader(examples(far), examples(far).collate, batch, 1, ranks.share, ranks.shares)
    for start in range(0, STEPS * batch, batch):
        _, batches = next(mine.steps(start, micro_batch=micro))
        if shares > 1:
            parts = [loader.share(start, start + batch) for loader in loaders]
            size = micro or batch
            rounds = range(0, len(parts[0]), size)
            batches = [mine.gather([p for part in parts for p in part[k : k + size]]) for k in rounds]
        (targets,) = ranks.sum(sum(count_targets(b, "contrastive") for b in batches))
        loss, _ = accumulate(model, batches, "contrastive", targets=int(targets), ranks=ranks)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        yield float(loss), update(model, optimizer, loss, 1e-2, 0.0, 1.0, squares)
    yield evaluate(model, [mine.gather(range(4))], "contrastive"), {n: full(p.detach()) for n, p in model.named_parameters()}


@cache  # in the parent, whose memory the ranks share
def one_process(shares: int, *case: Any) -> list[Any]:
    return list(steps_of(None, ALONE, *case, shares))


def cases_of(shares: int) -> tuple[Any, ...]:
    return CASES if shares > 1 else CASES[:-1]


def equal(rank: int, shape: tuple[int, int]) -> None:
    machine = machine_of(shape)
    for case in cases_of(shape[0]):
        *alone, (judged, wanted) = one_process(shape[0], *case)
        *many, (said, found) = steps_of(machine, join(machine), *case)
        for (a, b), (loss, norm) in zip(alone, many, strict=True):
            assert abs(loss - a) < 1e-10 and abs(norm - b) < 2e-6 * b and b > 0.1, f"{case}: {loss}, {norm}; alone {a}, {b}"
        assert said == pytest.approx(judged, rel=1e-9), "an evaluation is of a rank's own batches"
        for name, p in wanted.items():
            if not name.endswith("k.bias"):  # has no part in it
                own = found[name][tuple(slice(0, n) for n in p.shape)]
                torch.testing.assert_close(own, p, rtol=0, atol=1e-9, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}")


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if m == "fsdp2" else pytest.mark.slow) for m in MESHES])
def test_steps_equal_one_process(mesh: str) -> None:
    for case in cases_of(MESHES[mesh][0]):
        one_process(MESHES[mesh][0], *case)
    spawn(MESHES[mesh][0] * MESHES[mesh][1], equal, MESHES[mesh])
