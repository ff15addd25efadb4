"""Orders: pure functions of the position; mixtures in proportion at every length, batches of one length, budgets of tokens."""

import json
import shutil
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelcenter.data import order as module
from modelcenter.data.collate import IGNORED
from modelcenter.data.config import DataConfig
from modelcenter.data.examples import Examples
from modelcenter.data.loader import Budget, Chain, Loader
from modelcenter.data.objective import make_examples
from modelcenter.data.order import Blended, Grouped, Shuffled, order
from modelcenter.data.read import read_split
from modelcenter.data.record import Mixture
from modelcenter.data.tokenizer import CharTokenizer
from modelcenter.errors import InputError
from modelcenter.train import state
from modelcenter.train.loop import train
from modelcenter.train.read import load_recipe

WEIGHTS = st.lists(st.integers(1, 400).map(lambda n: n / 100), min_size=1, max_size=6)


class Ragged(Examples):
    """Examples of known lengths that say which they are."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def at(self, epoch: int, index: int) -> tuple[int, int]:
        return epoch, index

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        return {"input_ids": torch.tensor(examples), "labels": torch.tensor([0] * len(examples))}


def real(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch["input_ids"][batch["labels"] != IGNORED].tolist()]


# ------------------------------------------------------------------------------------------------------------- mixtures


@given(weights=WEIGHTS, length=st.integers(1, 400))
def test_every_prefix_has_its_shares(weights: list[float], length: int) -> None:
    blend, seen = Blended([7] * len(weights), weights, 0, True), [0] * len(weights)
    for position in range(length):
        source, sample = blend.source(position)
        assert sample == seen[source], "a source's samples are counted one by one"
        seen[source] += 1
        for k, weight in enumerate(weights):
            far = abs(seen[k] - (position + 1) * weight / sum(weights))
            assert far < 2 and (len(weights) > 2 or far <= 0.5 + 1e-9)


def test_shares_hold_far_out() -> None:
    blend = Blended([10, 10, 10], [0.7, 0.2, 0.1], 0, True)
    far = 10**15
    assert Counter(blend.source(far + k)[0] for k in range(1000)) == {0: 700, 1: 200, 2: 100}
    first, second = (next(blend.source(p) for p in range(start, start + 99) if blend.source(p)[0] == 0) for start in (0, far))
    assert first[1] == 0 and abs(second[1] - 0.7 * far) <= 2


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4), seed=st.integers(0, 2))
def test_each_source_has_epochs_of_its_own(sizes: list[int], seed: int) -> None:
    blend = Blended(sizes, [1.0 + k for k in range(len(sizes))], seed, True)
    found: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for position in range(200):
        epoch, index = blend.place(position)
        source = int(np.searchsorted(np.cumsum(sizes), index, "right"))
        found[source].append((epoch, index - sum(sizes[:source])))
    for k, (size, places) in enumerate(zip(sizes, found, strict=True)):
        for epoch in range(len(places) // size):
            assert sorted(places[epoch * size : (epoch + 1) * size]) == [(epoch, k) for k in range(size)]
        assert [index for _, index in places[:size]] == order(size, seed, 0, sizes[:k].count(size)).tolist()


def test_an_order_is_drawn_once_an_epoch_and_kept_no_longer_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mixture of more than 16 sources it was drawn for each sample; of one source the last 16 epochs stayed in memory."""
    drawn: list[tuple[int, int]] = []

    def counted(size: int, seed: int, epoch: int, twin: int = 0) -> Any:
        drawn.append((size, epoch))
        return order(size, seed, epoch, twin)

    monkeypatch.setattr(module, "order", counted)
    blend = Blended(range(40, 60), [1.0] * 20, 0, True)
    for position in range(20 * 40 * 3):
        blend.place(position)
    assert sorted(drawn) == [(size, epoch) for size in range(40, 60) for epoch in range(3)]
    drawn.clear()
    for one in (Shuffled(8, 0), Grouped(np.arange(8), 0, 3)):
        for position in (*range(70), *range(68, 62, -1)):  # and back: each rank's share of a batch is looked at
            one.place(position)
            assert len(one.epochs) <= 2
    assert drawn == [(8, epoch) for epoch in range(9)] * 2


def test_rows_of_sources_of_one_size_do_not_come_together() -> None:
    """Of 1000 rows in an order of their own one would be expected to; in each epoch, and of each two of three sources."""
    blend = Blended([1000, 1000, 1000], [1, 1, 1], 0, True)
    for epoch in range(3):
        found = [[blend.orders[k].place(epoch * 1000 + p)[1] for p in range(1000)] for k in range(3)]
        assert found[0] == order(1000, 0, epoch).tolist()
        assert all(sorted(rows) == list(range(1000)) for rows in found)
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert sum(a == b for a, b in zip(found[one], found[other], strict=True)) < 10
            assert found[other] != [blend.orders[one].place((epoch + 1) * 1000 + p)[1] for p in range(1000)]


def test_a_state_from_before_they_had_orders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name * (k % 5 + 3)}"}}\n' for k in range(12)))
    (tmp_path / "base.yaml").write_text("{}\n")
    recipe = {
        "model": "gpt2", "init": "random", "config": {"layers": 1, "dim": 16, "heads": 2, "positions": 16}, "tokenizer": "char",
        "data.path": {str(tmp_path / f"{name}.jsonl"): 1.0 for name in ("a", "b")}, "data.seq_len": 8, "batch": 4,
        "precision": "fp32", "max_steps": 2, "save_steps": 1, "schedule.name": "constant", "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    train(load_recipe(tmp_path / "base.yaml", recipe))
    more = load_recipe(tmp_path / "base.yaml", {**recipe, "max_steps": 3})
    with monkeypatch.context() as patch:
        patch.setattr(state, "VERSION", 2)
        with pytest.raises(InputError, match=r"step-2: data.path: sources of one size, .*; another output_dir, to begin again$"):
            train(more)
    assert train(more).step == 3


def mixture(folder: Path) -> dict[str, float]:
    for name, count in (("a", 40), ("b", 9)):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{name * (k % 5 + 3)}"}}\n' for k in range(count)))
    return {str(folder / "a.jsonl"): 1.0, str(folder / "b.jsonl"): 3.0}


@pytest.mark.parametrize("options", [{}, {"packing": True}], ids=["blocks", "packed"])
def test_a_mixture_of_files(tmp_path: Path, options: dict[str, Any]) -> None:
    records, held = read_split(DataConfig(path=mixture(tmp_path), eval_fraction=0.25))
    assert isinstance(records, Mixture) and isinstance(held, Mixture)
    assert Counter(r.fields["text"][0] for r in held) == {"a": 10, "b": 3} and len(records) == 36
    tokenizer = CharTokenizer.train(r.fields["text"] for r in records)
    examples = make_examples("lm", records, tokenizer, DataConfig(seq_len=9, **options))
    assert isinstance(examples, Chain) and records.weights is not None
    sizes = [len(source) for source in examples.sources]
    loader = Loader(examples, examples.collate, 4, order=Blended(sizes, records.weights, 0, True))
    ids = [batch["input_ids"].flatten().tolist() for _, (batch,) in islice(loader.steps(), 50)]
    letters = [tokenizer.decode(row).replace(" ", "") for row in ids]
    assert all("b" in text and len(set(text)) <= 2 for text in letters)
    picked = [loader.index(p)[1] < sizes[0] for p in range(400)]
    assert sum(picked) == 100


def test_a_list_is_one_after_the_other_and_each_key_is_named(tmp_path: Path) -> None:
    paths = list(mixture(tmp_path))
    records, _ = read_split(DataConfig(path=tuple(paths)))
    assert [r.fields["text"][0] for r in records] == ["a"] * 40 + ["b"] * 9
    for path, said in (((paths[0], "none.txt"), "none.txt: data.path.1: no such file"), ((), "data.path: no path in it"),
                       ({paths[0]: 1.0, "none.txt": 1.0}, "none.txt: data.path.none.txt: no such file")):
        with pytest.raises(InputError, match=said):
            read_split(DataConfig(path=path))  # type: ignore[arg-type]
    recipe = ["output_dir=out", "max_steps=1"]
    assert load_recipe("finetune", [*recipe, "data.path={a.jsonl: 3, b.jsonl: 0.5}"]).data.path == {"a.jsonl": 3.0, "b.jsonl": 0.5}
    assert load_recipe("finetune", [*recipe, "data.path=[a.jsonl, b.jsonl]"]).data.path == ("a.jsonl", "b.jsonl")
    assert load_recipe("finetune", [*recipe, "data.path=2024"]).data.path == "2024"
    for value, said in {"{a.jsonl: 0}": "data.path.a.jsonl: 0; a number above 0", "{a: b}": "data.path.a: 'b'; a number above 0",
                        "[1]": "data.path.0: 1; text"}.items():  # fmt: skip
        with pytest.raises(InputError, match=f"command line: {said}"):
            load_recipe("finetune", [*recipe, f"data.path={value}"])


# -------------------------------------------------------------------------------------------------------------- lengths


@given(lengths=st.lists(st.integers(1, 99), min_size=1, max_size=90), batch=st.integers(1, 9), seed=st.integers(0, 2))
def test_grouped_epochs_hold_each_example_once(lengths: list[int], batch: int, seed: int) -> None:
    grouped, size = Grouped(np.array(lengths), seed, batch), len(lengths)
    places = [grouped.place(p) for p in range(3 * size)]
    for epoch in range(3):
        assert sorted(places[epoch * size : (epoch + 1) * size]) == [(epoch, k) for k in range(size)]
    again = Grouped(np.array(lengths), seed, batch)
    assert [again.place(p) for p in reversed(range(3 * size))] == places[::-1], "the order depends on where one begins"


def test_batches_are_of_about_one_length_in_every_epoch() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 1003)
    grouped, plain = Grouped(lengths, 0, 8), Shuffled(1003, 0)

    def waste(places: Any, start: int) -> float:
        batches = [[lengths[places.place(p)[1]] for p in range(k, k + 8)] for k in range(start, start + 960, 8)]
        return 1 - sum(map(sum, batches)) / sum(8 * max(b) for b in batches)

    for start in (0, 1008, 2008):  # the batch that straddles two epochs included: 1003 is no multiple of 8
        assert waste(plain, start) > 0.4 and waste(grouped, start) < 0.08
    firsts = [float(np.mean([lengths[grouped.place(p)[1]] for p in range(k, k + 8)])) for k in range(0, 960, 8)]
    assert abs(np.corrcoef(firsts, range(120))[0, 1]) < 0.3, "short batches come first"


budgets = {"lengths": st.lists(st.integers(1, 30), min_size=1, max_size=40), "most": st.integers(1, 90),
           "forward": st.integers(1, 60)}  # fmt: skip


@given(**budgets, world=st.sampled_from([1, 2, 4]), padded=st.booleans(), start=st.integers(0, 70), kind=st.integers(0, 2),
       counted=st.booleans())
def test_a_budget_of_tokens_whatever_the_ranks(lengths: list[int], most: int, forward: int, world: int, padded: bool,
                                               start: int, kind: int, counted: bool) -> None:
    examples, half = Ragged(lengths), len(lengths) // 2

    def loader_of(rank: int, world: int) -> Loader:
        order: Any = None
        if kind == 1:
            order = Grouped(examples.lengths, 1, 3)
        if kind == 2 and half:
            order = Blended([half, len(lengths) - half], [1, 2.5], 1, True)
        budget = Budget(most if counted else None, forward, padded)
        return Loader(examples, examples.collate, 4, 1, rank, world, order=order, budget=budget)

    def taken(sizes: list[int]) -> int:
        return len(sizes) * max(sizes) if padded else sum(sizes)

    ranks = [list(islice(loader_of(rank, world).steps(start), 6)) for rank in range(world)]
    position = start
    for step in zip(*ranks, strict=True):
        assert len({after for after, _ in step}) == 1 and len({len(pieces) for _, pieces in step}) == 1
        after = step[0][0]
        loader = loader_of(0, 1)
        wanted = [loader.index(p) for p in range(position, after)]
        assert [s for _, pieces in step for piece in pieces for s in real(piece)] == wanted, "ranks share one order"
        sizes = [lengths[index] for _, index in wanted]
        assert len(sizes) == 4 if not counted else sum(sizes) <= most or len(sizes) == 1
        assert not counted or sum(sizes) + loader.length(after) > most, "another would have fitted"
        for _, pieces in step:
            for piece in pieces:
                own = [lengths[index] for _, index in real(piece)]
                assert len(own) <= 1 or taken(own) <= forward
            held = [[lengths[index] for _, index in real(piece)] for piece in pieces if real(piece)]
            for own, behind in pairwise(held) if padded else ():
                assert taken([*own, behind[0]]) > forward, "another would have fitted into this forward"
            if not padded and held:
                sums, longest = [sum(own) for own in held], max(map(max, held))
                assert max(sums) - min(sums) <= 2 * longest, "forwards are about equal"
                assert len(held) == 1 or sum(sums) > forward, "one forward would have done"
        position = after
    if world == 1:
        middle = ranks[0][2][0]
        resumed = [(after, [real(b) for b in pieces]) for after, pieces in islice(loader_of(0, 1).steps(middle), 3)]
        assert resumed == [(after, [real(b) for b in pieces]) for after, pieces in ranks[0][3:]]


@given(**budgets, limit=st.integers(1, 99))
def test_steps_are_counted_before_they_are_made(lengths: list[int], most: int, forward: int, limit: int) -> None:
    examples = Ragged(lengths)
    loader = Loader(examples, examples.collate, 4, budget=Budget(most, forward))
    ends = [after for after, _ in islice(loader.steps(), loader.count(limit))]
    assert ends[-1] >= limit and (len(ends) == 1 or ends[-2] < limit)
    assert Loader(examples, examples.collate, 4).count(limit) == -(-limit // 4)


# ---------------------------------------------------------------------------------------------------------- as a recipe

TINY = ["tokenizer=char", "config.layers=1", "config.dim=16", "config.heads=2", "data.seq_len=12", "max_steps=8", "num_epochs=null",
        "save_steps=3", "logging_steps=1", "data.eval_fraction=0.2"]  # fmt: skip


MIXED, LISTED = "data.path={a.jsonl: 1, b.jsonl: 2.5}", "data.path=[a.jsonl, b.jsonl]"
PROMPTED = ("data.prompt_key=p", "data.response_key=r")


@pytest.mark.parametrize("options", [
    [MIXED, "data.packing=true", "micro_batch=1", "batch=3"], [MIXED, "data.packing=true", "batch_tokens=40"],
    [LISTED, *PROMPTED, "batch_tokens=30", "data.group_by_length=true"], [MIXED, *PROMPTED, "data.padding_free=true", "batch=5"],
], ids=["mixed-packed", "mixed-packed-budget", "grouped-budget", "mixed-padding-free"])  # fmt: skip
def test_runs_resume_exactly(tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        rows = ({"text": name * (k % 9 + 1), "p": name * (k % 4 + 1), "r": name * (k % 7 + 1)} for k in range(30))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe("pretrain", [*TINY, *options, "output_dir=run"])
    whole = train(recipe)
    weights = {name: tensor.clone() for name, tensor in whole.model.state_dict().items()}
    for name in ("step-6", "step-8", "model"):
        shutil.rmtree(tmp_path / "run" / name)
    again = train(recipe)
    assert whole.step == again.step == 8
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.model.state_dict().items())
    assert again.metrics["loss"] == whole.metrics["loss"] and again.metrics["tokens"] == whole.metrics["tokens"]


def test_a_mixture_has_an_order_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.group_by_length: true with a mixture"):
        load_recipe("finetune", [MIXED, "data.group_by_length=true"])
