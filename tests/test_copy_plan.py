"""The copy plan carried out on arrays in memory: every part of every rank, from and to files of any layout."""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from modelcenter.checkpoint.copy_plan import ALIGN, Plan, plan, row_of
from modelcenter.names import SPLIT, Names, PerHead, Region, Shape, T, everything, trace

EMPTY = 7e7  # what nobody has written


@dataclass(frozen=True, eq=False)
class Memory:
    """A stored tensor."""

    values: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __getitem__(self, region: Region) -> Tensor:
        return self.values[region]


def parts(shape: Shape, ranks: int, rng: random.Random) -> list[Region]:
    """A tensor cut among ranks along one dimension or two, or whole on each; the last may have less, nothing, or rows too many."""
    if not shape or rng.random() < 0.2:
        return [everything(shape)] * ranks
    split = [1] * len(shape)
    split[rng.randrange(len(shape))] = ranks
    if len(shape) == 2 and ranks == 4 and rng.random() < 0.4:
        split = [2, 2]
    step = [-(-n // s) for n, s in zip(shape, split, strict=True)]
    out = []
    for rank in range(ranks):
        at = (rank // split[1], rank % split[1]) if len(shape) == 2 else (rank,)
        out.append(tuple(slice(min(i * s, n), max(min(i * s, n), (i + 1) * s if k == 0 else min((i + 1) * s, n)))
                         for k, (i, s, n) in enumerate(zip(at, step, shape, strict=True))))  # fmt: skip
    return out


def case(seed: int) -> tuple[list[Memory], dict[str, Any], list[dict[str, Region]]]:
    """Stored tensors in all layouts and dtypes, views of them by our names, and who holds what."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ranks = rng.choice([1, 2, 3, 4])
    heads, dim, hidden = 2, rng.choice([4, 6, 8]), rng.choice([5, 12])
    names = Names([("fused", ("q", "k", "v"), T), ("heads", ("hq", "hk", "hv"), PerHead(heads)), ("plain", "plain"),
                   ("stacked", ("a", "b"), SPLIT), ("turned", "turned", T), ("vector", "vector"), ("number", "number")])
    ours = {**dict.fromkeys(("q", "k", "v", "hq", "hk", "hv"), (dim, hidden)), "plain": (hidden, dim), "a": (3, dim), "b": (7, dim),
            "turned": (dim, hidden), "vector": (dim,), "number": ()}  # fmt: skip
    ours = {f"{name}.weight": shape for name, shape in ours.items()}
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    table = {e.theirs: Memory(torch.randn(e.verb.shape([ours[n] for n in e.ours])).to(rng.choice(kinds)))
             for e in names.entries(ours)}  # fmt: skip
    sources = names.load(table.__getitem__, ours)
    held = {name: parts(shape, ranks, rng) for name, shape in ours.items()}
    regions = [{name: held[name][rank] for name in ours} for rank in range(ranks)]
    return list(table.values()), sources, regions


def check_runs(todo: Plan, size: int, turns: list[Any]) -> None:
    """Each row once, within the buffers, in the order of the files."""
    seen = [(n, row) for turn in turns for runs in turn for run in runs for n in [todo.numbers[id(run.source)]]
            for row in range(run.start, run.stop)]  # fmt: skip
    assert len(seen) == len(set(seen)) and seen == sorted(seen)
    wanted = sum(math.prod(s.shape[:1]) for s in todo.sources)
    assert len(seen) == wanted
    for turn in turns:
        for runs in turn:
            ends = [0, *(run.at + run.size for run in runs)]
            assert all(run.at % ALIGN == 0 and run.at >= end for run, end in zip(runs, ends, strict=False)) and ends[-1] <= size


@pytest.mark.parametrize("seed", range(60))
def test_what_is_read_is_what_is_wanted(seed: int) -> None:
    stored, sources, regions = case(seed)
    todo = plan(sources, regions, stored)
    size = max(random.Random(seed).choice([0, 64, 300, 10**6]), *map(row_of, stored))
    turns = list(todo.turns(size))
    check_runs(todo, size, turns)
    for rank, mine in enumerate(regions):
        found = {n: torch.full([r.stop - r.start for r in region], EMPTY, dtype=torch.float64) for n, region in mine.items()}
        for runs in (runs for turn in turns for runs in turn):
            for block in todo.blocks(runs, rank):
                run: Any = block.run
                values = run.source.values[run.start : run.stop] if run.source.shape else run.source.values
                part = values[block.region]
                assert part.shape == block.shape and block.size == part.numel() * part.itemsize
                place = found[block.name][block.place]
                assert bool((place == EMPTY).all()), "written twice"
                found[block.name][block.place] = (part.mT if block.turned else part).double()
        for name, region in mine.items():
            inside = tuple(slice(r.start, max(r.start, min(r.stop, n))) for r, n in zip(region, sources[name].shape, strict=True))
            wanted = sources[name][inside].double()
            assert torch.equal(found[name][tuple(slice(0, n) for n in wanted.shape)], wanted), name
            assert int((found[name] == EMPTY).sum()) == found[name].numel() - wanted.numel()


@pytest.mark.parametrize("seed", range(60))
def test_what_is_written_is_the_whole(seed: int) -> None:
    """The other way, of what several ranks hold from one of them alone."""
    stored, sources, regions = case(seed)
    todo = plan(sources, regions, stored, once=True)
    size = max(random.Random(seed).choice([0, 64, 300]), *map(row_of, stored))
    turns = list(todo.turns(size))
    check_runs(todo, size, turns)
    files = {id(s): torch.full(s.shape, EMPTY, dtype=torch.float64) for s in stored}
    for rank, mine in enumerate(regions):
        for block in (block for turn in turns for runs in turn for block in todo.blocks(runs, rank)):
            whole = mine[block.name]
            region = tuple(slice(r.start + p.start, r.start + p.stop) for r, p in zip(whole, block.place, strict=True))
            values = sources[block.name][region].double()
            run = block.run
            file = files[id(run.source)]
            place = (file[run.start : run.stop] if run.source.shape else file)[block.region]
            assert bool((place == EMPTY).all()), "from two ranks"
            place.copy_(values.mT if block.turned else values)
    for source in stored:
        assert torch.equal(files[id(source)], source.values.double())


def test_views_are_traced_to_what_is_stored() -> None:
    for seed in range(5):
        _, sources, _ = case(seed)
        for name, source in sources.items():
            region = tuple(slice(n // 3, n) for n in source.shape)
            out = torch.zeros([r.stop - r.start for r in region], dtype=torch.float64)
            for part in trace(source, region):
                values = part.source[part.region]
                values = values.mT if part.turned else values
                out[tuple(slice(a, a + n) for a, n in zip(part.at, values.shape, strict=True))] = values.double()
            assert torch.equal(out, source[region].double()), name
