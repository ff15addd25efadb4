"""Micro-batches filled up to shapes that come again: what is learned from them is the same, for every family and objective."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_data_packing import CASES, OBJECTIVES, examples_of, gradients, tiny
from test_data_packing import tokenizer as tokenizer  # a fixture
from torch import Tensor

import modelcenter as mc
from modelcenter.data.collate import pack, pad
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.layers import Rotary
from modelcenter.ops.cross_entropy import IGNORE
from modelcenter.train import shapes
from modelcenter.train.graphs import Graphs
from modelcenter.train.shapes import filled, fills, up
from modelcenter.train.step import accumulate, ready

TINY = {"layers": 1, "dim": 16, "heads": 2, "vocab": 300}


def same(model: Any, batches: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    """`batches` filled up, which teach `model` the same."""
    others: Any = [filled(model, batch) for batch in batches]
    loss, wanted = gradients(model, batches, task)
    found_loss, found = gradients(model, others, task)
    assert found.keys() == wanted.keys() and abs(loss - found_loss) <= 1e-10 * abs(loss)
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() <= 1e-10 * largest, name
    return others


def shape(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v.shape) if isinstance(v, Tensor) else v for name, v in batch.items()}


@pytest.mark.parametrize("kind, what", CASES, ids=lambda x: str(x))
def test_losses_and_gradients_stay(kind: str, what: str, tokenizer: Tokenizer) -> None:
    examples, model = examples_of(what, tokenizer), tiny(kind, what)
    inner, task = examples.examples, OBJECTIVES.get(what, what)
    cuts = [range(start, min(start + 5, len(inner))) for start in range(0, len(inner), 5)]
    pieces = [[inner.at(0, k) for k in cut] for cut in cuts]
    rows = same(model, [inner.pack(piece) for piece in pieces], task)
    if kind != "cpmant":
        assert all(row["input_ids"].size(1) % 64 == 0 == (len(row["cu_seq_lens_q"]) - 1) % 8 for row in rows)
    short = [inner.collate(piece) for piece in pieces]
    padded, most = same(model, short, task), vars(model.config).get("positions") or 10**6
    for batch, other in zip(short, padded, strict=True):
        assert other["input_ids"].size(1) in (up(batch["input_ids"].size(1), 8, 16), most)


@given(st.integers(1, 10**6), st.sampled_from([(8, 16), (64, 16), (8, 4), (128, 8)]))
def test_few_numbers_none_much_greater(n: int, how: tuple[int, int]) -> None:
    least, parts = how
    found = up(n, *how)
    assert n <= found < n + max(least, n / parts) and found % least == 0
    power = 2 ** (n - 1).bit_length()  # from half of it on
    assert len({up(k, *how) for k in (power // 2 + 1 + i * max(1, power // 512) for i in range(256)) if k <= power}) <= parts


def gpt(**more: Any) -> Any:
    return mc.build("gpt2", config={**TINY, "positions": 20, **more}).train()


def test_no_row_is_longer_than_the_positions() -> None:
    batch = pad([[5] * 17, [5] * 3], [[5] * 17, [5] * 3], 0)
    assert filled(gpt(), batch)["input_ids"].shape == (2, 20)
    assert filled(gpt(positions=17), batch)["input_ids"].shape == (2, 17)
    assert filled(gpt(positions=200), batch)["input_ids"].shape == (2, 24)


def test_blocks_stay_what_they_are() -> None:
    batch = {"input_ids": torch.ones(2, 19, dtype=torch.long), "labels": torch.ones(2, 19, dtype=torch.long)}
    assert filled(gpt(), batch) is batch


def test_a_packed_batch_is_of_few_shapes() -> None:
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(40):
        lengths = torch.randint(2, 40, (int(torch.randint(20, 24, (), generator=generator)),), generator=generator).tolist()
        found.append(filled(gpt(), pack([[7] * n for n in lengths])))
    assert len({str(shape(batch)) for batch in found}) <= 6
    for batch in found:
        ends, total = batch["cu_seq_lens_q"], batch["input_ids"].size(1)
        assert ends.dtype == torch.int32 and ends[-1] == total == batch["labels"].size(1) and (ends.diff() >= 0).all()
        assert ends.diff().max() <= batch["max_length_q"] <= total and batch["position_ids"].max() < 40
        behind = batch["input_ids"] == 0
        assert (batch["labels"][behind] == IGNORE).all() and torch.equal(ends, batch["cu_seq_lens_k"])


def test_no_filling_is_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short sequences: more tokens are missing than the longest may have, so several fill up."""
    monkeypatch.setattr(shapes, "LONGEST", (8, 8))
    monkeypatch.setattr(shapes, "TOKENS", (64, 8))
    batch = filled(gpt(), pack([[7] * 5] * 9))  # 45 tokens, 64 wanted
    assert batch["max_length_q"] == 8 and batch["cu_seq_lens_q"].tolist() == [*range(0, 46, 5), 53, 61, *[64] * 5]


def test_what_is_counted_is_the_loaders() -> None:
    """Tokens that only fill up are none of a run's."""
    batch = ready(gpt(), pack([[7] * 5] * 9), "lm", torch.device("cpu"), fill=True)
    assert (batch["input_ids"].numel(), batch.tokens, batch.targets) == (256, 45, 44)


def test_vectors_that_are_compared_get_no_others() -> None:
    model = mc.build("bert-base-uncased", task="embed", config=TINY | {"hidden": 16}).train()
    row = pack([[5] * 4, [6] * 9]) | {"labels": torch.tensor([0.5])}
    assert filled(model, row) is row
    padded = pad([[5] * 4, [6] * 9], [[5] * 4, [6] * 9], 0) | {"labels": torch.tensor([0.5])}
    assert shape(filled(model, padded)) == shape(padded) | {"input_ids": (2, 16), "attention_mask": (2, 16)}


def test_where_the_length_says_what_positions_mean_it_stays() -> None:
    config = {**TINY, "kv_heads": 2, "head_dim": 8, "hidden": 16}
    model = mc.build("llama-3.2-1b", config=config).train()
    batch = pad([[5] * 9, [5] * 3], [[5] * 9, [5] * 3], 0)

    def computed() -> torch.Size:
        """The shape of what a run's graphs see of the batch."""
        graphs, seen = Graphs(model, SimpleNamespace()), []  # type: ignore[arg-type]  # nothing is recorded
        graphs.run = lambda work, given, *rest: seen.append(given["input_ids"].shape) or torch.zeros(())  # type: ignore[assignment]
        graphs.attempt = lambda step: step()  # type: ignore[method-assign]
        accumulate(model, [batch], "lm", graphs=graphs)
        return seen[0]

    assert fills(model) and computed() == (2, 16)
    for module in model.modules():
        if isinstance(module, Rotary):
            from modelcenter.layers.rope import Dynamic

            module.frequencies = Dynamic(factor=2.0, positions=4)
    assert not fills(model) and computed() == (2, 9)


def test_a_bound_below_the_longest_is_refused() -> None:
    row = pack([[5] * 4, [6] * 9])
    with pytest.raises(mc.errors.InputError, match="max_length_q: 8; at least the longest sequence of cu_seq_lens_q, 9"):
        gpt()(**row | {"max_length_q": 8})
