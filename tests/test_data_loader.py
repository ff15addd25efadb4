"""The loader: its order is a function of the position, however it is shared and wherever it starts."""

import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelcenter.data.collate import IGNORED
from modelcenter.data.examples import Examples
from modelcenter.data.loader import Blank, Budget, Loader
from modelcenter.data.order import order
from modelcenter.train.evaluate import count_tokens


class Numbers(Examples):
    """Examples that say which they are."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def at(self, epoch: int, index: int) -> tuple[int, int]:
        return epoch, index


def together(examples: list[Any]) -> dict[str, Any]:
    return {"input_ids": torch.tensor(examples), "labels": torch.tensor([0] * len(examples))}


def real(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """The samples of a batch that count."""
    kept = batch["input_ids"][batch["labels"] != IGNORED].tolist()
    return [(epoch, index) for epoch, index in kept]


def samples(loader: Loader, start: int = 0, limit: int | None = None, steps: int = 9) -> list[tuple[int, Any]]:
    return [(after, real(batch)) for after, (batch,) in islice(loader.steps(start, limit), steps)]


sizes = {"size": st.integers(1, 40), "batch": st.integers(1, 12), "seed": st.integers(0, 3)}


@given(**sizes, world=st.integers(1, 4), micro=st.integers(1, 5), start=st.integers(0, 90), limit=st.integers(0, 120))
def test_ranks_and_micro_batches_share_a_batch(size: int, batch: int, seed: int, world: int, micro: int, start: int,
                                               limit: int) -> None:
    batch = max(batch, world)
    whole = samples(Loader(Numbers(size), together, batch, seed), start, limit, 10**6)
    assert sum(len(s) for _, s in whole) == max(limit - start, 0)
    parts = [list(Loader(Numbers(size), together, batch, seed, rank, world).steps(start, limit, micro))
             for rank in range(world)]
    for step, (after, wanted) in enumerate(whole):
        assert {part[step][0] for part in parts} == {after}
        assert len({len(part[step][1]) for part in parts}) == 1, "ranks disagree on the number of forwards"
        assert [s for part in parts for piece in part[step][1] for s in real(piece)] == wanted


@given(**sizes)
def test_resume_at_every_position(size: int, batch: int, seed: int) -> None:
    loader = Loader(Numbers(size), together, batch, seed)
    run = samples(loader, steps=8)
    flat = [s for _, part in run for s in part]
    for k, (after, _) in enumerate(run[:-1]):
        again = pickle.loads(pickle.dumps(loader))  # noqa: S301
        assert samples(again, after, steps=7 - k) == run[k + 1 :]
    for start in range(batch):  # not only where a batch ended: the batch size may change
        assert samples(loader, start, steps=1)[0][1] == flat[start : start + batch]


@given(**sizes)
def test_an_epoch_holds_each_example_once(size: int, batch: int, seed: int) -> None:
    loader = Loader(Numbers(size), together, batch, seed)
    flat = [s for _, part in samples(loader, limit=3 * size, steps=10**6) for s in part]
    assert len(flat) == 3 * size
    for epoch in range(3):
        assert sorted(flat[epoch * size : (epoch + 1) * size]) == [(epoch, k) for k in range(size)]
    assert [s for b in loader.once() for s in real(b)] == [(0, k) for k in range(size)]
    straight = Loader(Numbers(size), together, batch, seed, shuffle=False)
    assert [straight.index(p) for p in range(size)] == [(0, k) for k in range(size)]


def test_an_evaluation_by_ranks_counts_every_sample_once() -> None:
    loaders = [Loader(Numbers(9), together, 4, 0, rank, 4) for rank in range(4)]
    rounds = list(zip(*(loader.once() for loader in loaders), strict=True))
    assert len(rounds) == 3
    assert sorted(s for batches in rounds for b in batches for s in real(b)) == [(0, k) for k in range(9)]


def test_epochs_and_seeds_differ_and_other_randomness_does_not_matter() -> None:
    torch.manual_seed(1)
    first = order(50, 0, 0).tolist()
    torch.manual_seed(2)
    np.random.seed(3)
    assert order(50, 0, 0).tolist() == first
    assert first not in (order(50, 0, 1).tolist(), order(50, 1, 0).tolist(), list(range(50)))


def test_the_order_is_pinned() -> None:
    """A change here breaks the resume of every run that is under way."""
    assert order(8, 0, 0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]


def test_refusals() -> None:
    for arguments in ((4, 0, 2, 2), (1, 0, 0, 2), (4, 0, -1, 2)):
        with pytest.raises(ValueError, match="cannot share"):
            Loader(Numbers(3), together, *arguments)
    with pytest.raises(ValueError, match="at least one example"):
        Loader(Numbers(0), together, 1)


def test_fewer_samples_than_ranks() -> None:
    """A budget counts in tokens, and a batch is what one process makes of it: the ranks without a sample have nothing to learn."""
    numbers: Any = Numbers(40)
    numbers.lengths = np.full(40, 5)
    steps = [next(Loader(numbers, together, 8, 0, rank, 10, budget=Budget(20, 20)).steps()) for rank in range(10)]
    alone, pieces = next(Loader(numbers, together, 8, budget=Budget(20, 20)).steps())
    assert {after for after, _ in steps} == {alone} == {4} and {len(pieces) for _, pieces in steps} == {1}
    assert [sample for _, (piece,) in steps for sample in real(piece)] == real(pieces[0])
    assert [type(piece) is Blank for _, (piece,) in steps] == [False] * 4 + [True] * 6 and count_tokens(steps[-1][1][0], "lm") == 0


def test_a_step_is_one_forward_where_none_has_a_limit() -> None:
    """Texts that are told from each other stand in one forward, however unequal: padding counts there alone where a forward has a
    limit."""
    numbers: Any = Numbers(40)
    numbers.lengths = np.array([1, 9] * 20)
    for world in (1, 2):
        for limit, forwards in ((None, {1}), (20, {2})):
            loader = Loader(numbers, together, 8, world=world, shuffle=False, budget=Budget(world * 20, limit))
            pieces = [pieces for _, pieces in islice(loader.steps(), 4)]
            assert {len(each) for each in pieces} == forwards
            assert limit or [len(real(each)) for (each,) in pieces] == [4] * 4


def test_steps_behind_the_last_are_not_counted() -> None:
    """A limit of samples that never comes is one, too, where the number of steps has a limit: a recipe may have both."""
    numbers: Any = Numbers(40)
    numbers.lengths = np.full(40, 5)
    loader = Loader(numbers, together, 8, budget=Budget(20, 20))
    assert (loader.count(40), loader.count(41), loader.count(10**15, 7)) == (10, 11, 7)
