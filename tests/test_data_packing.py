"""Packing: full bins, every token once, and for every family and objective the gradients of the same sequences padded."""

import os
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

from modelcenter.data import packing
from modelcenter.data.collate import IGNORED, describe_sample
from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Loader
from modelcenter.data.objective import find_objective, make_examples
from modelcenter.data.packing import Packed, any_number, best_fit, exact_fit, fill
from modelcenter.data.ragged import Ragged
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_open import load_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.model import Model
from modelcenter.registry import families
from modelcenter.skeleton import skeleton
from modelcenter.train.evaluate import count_targets, count_tokens

KEYS = {"prompt_key": "prompt", "response_key": "response"}
OPTIONS: dict[str, dict[str, Any]] = {
    "lm": {}, "rows": KEYS, "mlm": {}, "seq2seq": {"target_len": 11}, "classify": {"pair_key": "response"},
    "regress": {}, "tag": {}, "chat": {}, "multilabel": {"label_key": "several"},
    "prefix_lm": KEYS, "halves": {},
}  # fmt: skip
OBJECTIVES = {"rows": "lm", "halves": "prefix_lm"}  # where they are called otherwise
HEADS = {**dict.fromkeys(("rows", "chat", "prefix_lm", "halves"), "lm"), "regress": "classify", "multilabel": "classify"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_tokenizer([], 270, "roberta")
    made.chat_template = ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
                          "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}")
    return made


def ragged_records(count: int = 23) -> list[Record]:
    """Records that serve every objective."""
    random = np.random.default_rng(0)

    def text() -> str:
        return "".join(random.choice(list("abcdef "), random.integers(1, 19))).replace(" ", "a", 1)  # white space alone is told of

    def words(k: int) -> dict[str, Any]:
        return {"tokens": [(text() + "a")[:3] for _ in range(k % 5 + 1)], "tags": ["BIO"[(k + n) % 3] for n in range(k % 5 + 1)]}

    texts = ("text", "prompt", "response", "source", "target")
    every = [{**{key: text() for key in texts}, "label": k % 3, "several": [*range(3)][k % 3 :], **words(k)} for k in range(count)]
    talks = [[{"role": who, "content": row[key]} for who, key in (("user", "prompt"), ("assistant", "response"))] for row in every]
    return [Record({**row, "messages": talk}, "a.jsonl", k) for k, (row, talk) in enumerate(zip(every, talks, strict=True), 1)]


def examples_of(what: str, tokenizer: Tokenizer, **more: Any) -> Any:
    objective: Any = OBJECTIVES.get(what, what)
    return make_examples(objective, ragged_records(), tokenizer, DataConfig(seq_len=24, packing=True, **OPTIONS[what], **more))


CASES = [(kind, what) for kind, family in sorted(families().items()) for what in OPTIONS
         if HEADS.get(what, what) in family.tasks]


def tiny(kind: str, what: str) -> Model:
    config = zoo.tiny(kind)
    still = {f.name: 0.0 for f in fields(config) if "dropout" in f.name}
    config = replace(config, **still, vocab=271, labels=("LABEL_0",) if what == "regress" else zoo.LABELS)
    if what == "regress":
        config = replace(config, file={**config.to_dict(), "problem_type": "regression"})
    if what in ("prefix_lm", "halves"):
        config = replace(config, file={**config.to_dict(), "prefix_lm": True})
    if what == "multilabel":
        config = replace(config, file={**config.to_dict(), "problem_type": "multi_label_classification"})
    model = skeleton(families()[kind], config, HEADS.get(what, what), torch.float64)
    model.to_empty(device="cpu")
    model.tie()
    zoo.loud(model)
    return model.train()


def gradients(model: Model, batches: list[dict[str, Any]], task: str) -> tuple[float, dict[str, torch.Tensor]]:
    targets = sum(count_targets(batch, task) for batch in batches)
    loss = torch.stack([model(**above_zero(batch, task), num_items_in_batch=targets).loss for batch in batches]).sum()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), grads


def above_zero(batch: dict[str, Any], task: str) -> dict[str, Any]:
    """`batch` without the id 0, which some family takes for padding wherever it stands."""
    ids, labels = batch["input_ids"] + 1, batch["labels"]
    if find_objective(task).task in ("lm", "mlm", "seq2seq"):
        labels = torch.where(labels == IGNORED, labels, labels + 1)
    return {**batch, "input_ids": ids, "labels": labels.double() if labels.is_floating_point() else labels}


@pytest.mark.parametrize("kind, what", CASES, ids=lambda x: str(x))
def test_gradients_are_those_of_the_same_sequences_padded(kind: str, what: str, tokenizer: Tokenizer) -> None:
    packed, model = examples_of(what, tokenizer), tiny(kind, what)
    inner, task = packed.examples, OBJECTIVES.get(what, what)
    every = [packed.at(0, k) for k in range(len(packed))]
    assert max(map(len, every)) > 1
    rows = [packed.collate(every[k : k + 2]) for k in range(0, len(every), 2)]
    cuts = [range(start, min(start + 5, len(inner))) for start in range(0, len(inner), 5)]
    padded = [inner.collate([inner.at(0, k) for k in cut]) for cut in cuts]
    assert any(not batch["attention_mask"].all() for batch in padded) and not any("attention_mask" in row for row in rows)
    assert sum(count_tokens(b, task) for b in rows) == sum(count_tokens(b, task) for b in padded) == int(packed.lengths.sum())
    loss, wanted = gradients(model, padded, task)
    found_loss, found = gradients(model, rows, task)
    assert found.keys() == wanted.keys() and abs(loss - found_loss) <= 1e-10 * abs(loss)
    largest = max(float(g.abs().max()) for g in wanted.values())
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max() <= 1e-10 * largest, name


@pytest.mark.parametrize("what", OPTIONS)
def test_every_sequence_stands_in_one_bin(what: str, tokenizer: Tokenizer) -> None:
    packed = examples_of(what, tokenizer)
    assert isinstance(packed, Packed)
    inner = packed.examples
    assert sorted(k for bin in range(len(packed)) for k in packed.bins[bin].tolist()) == list(range(len(inner.lengths)))
    assert packed.lengths.tolist() == [int(inner.lengths[packed.bins[k]].sum()) for k in range(len(packed))]
    assert packed.lengths.max() <= inner.size == (24 if what != "seq2seq" else 35)
    for batch in Loader(packed, packed.collate, batch=2).once():
        q, k = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"]
        assert batch["input_ids"].shape == batch["position_ids"].shape == (1, int(k[-1])) and q.dtype == k.dtype == torch.int32
        assert (batch["max_length_q"], batch["max_length_k"]) == (int(q.diff().max()), int(k.diff().max()))
        assert [batch["position_ids"][0, a:b].tolist() for a, b in pairwise(k.tolist())] == [
            list(range(b - a)) for a, b in pairwise(k.tolist())]
        if what in ("classify", "regress", "multilabel"):
            assert batch["labels"].shape[0] == len(k) - 1 and "token_type_ids" not in batch
        elif what == "seq2seq":
            assert batch["labels"].shape == (1, int(q[-1])) and (batch["labels"][0, (q[1:] - 1).long()] == tokenizer.eos_id).all()
        else:
            assert batch["labels"].shape == batch["input_ids"].shape and torch.equal(q, k)
        if what in ("lm", "rows"):
            assert (batch["labels"][0, k[:-1].long()] == IGNORED).all(), "a sequence predicted from the one before"


def test_segments_are_packed_too(tmp_path: Path) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef", *(f"##{c}" for c in "abcdef")]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    packed = examples_of("classify", load_tokenizer(tmp_path))
    bin = packed.at(0, 0)
    batch = packed.collate([bin])
    assert batch["token_type_ids"][0].tolist() == [s for _, segments, _ in bin for s in segments.tolist()]
    assert len(set(batch["token_type_ids"][0].tolist())) == 2 and batch["labels"].tolist() == [label for *_, label in bin]


def test_masked_documents_stand_apart(tokenizer: Tokenizer) -> None:
    packed = examples_of("mlm", tokenizer)
    for index in range(len(packed.examples)):
        ids, labels = packed.examples.at(3, index)
        whole = np.where(labels == IGNORED, ids, labels).tolist()
        assert whole[0] == tokenizer.cls_id and whole.index(tokenizer.sep_id) == len(whole) - 1 <= 23
    assert packed.examples.at(3, 0)[0].tolist() != packed.examples.at(4, 0)[0].tolist() or len(packed.examples.at(3, 0)[0]) < 9


@pytest.mark.parametrize("what", OPTIONS)
def test_what_is_shown_of_a_packed_batch_is_its_first_sequence(what: str, tokenizer: Tokenizer) -> None:
    packed = examples_of(what, tokenizer)
    inner, bin = packed.examples, packed.at(0, 0)
    assert describe_sample(packed.collate([bin, packed.at(0, 1)]), tokenizer) == describe_sample(inner.collate(bin[:1]), tokenizer)


@pytest.mark.parametrize("what", OPTIONS)
def test_padding_free_batches_hold_the_same_examples(what: str, tokenizer: Tokenizer) -> None:
    objective: Any = OBJECTIVES.get(what, what)
    apart, free = (make_examples(objective, ragged_records(), tokenizer, DataConfig(seq_len=24, padding_free=free, **OPTIONS[what]))
                   for free in (False, True))
    assert len(apart) == len(free) and apart.lengths.tolist() == free.lengths.tolist()
    padded, row = (e.collate([e.at(0, k) for k in range(3)]) for e in (apart, free))
    real = padded["input_ids"][padded["attention_mask"].bool()] if "attention_mask" in padded else padded["input_ids"].flatten()
    assert row["input_ids"][0].tolist() == real.tolist() and "attention_mask" not in row
    assert row["cu_seq_lens_k"].diff().tolist() == [len(e[0]) for e in (apart.at(0, k) for k in range(3))]


# ------------------------------------------------------------------------------------------------------------- the bins


@pytest.mark.parametrize("count", [1, 7, 8, 30])
def test_each_window_is_packed_by_itself(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences than are packed at a time: each stands in one bin, beside others of its window."""
    monkeypatch.setattr(packing, "WINDOW", 7)
    lengths = np.random.default_rng(0).integers(1, 12, count)
    packed = Packed(SimpleNamespace(lengths=lengths, size=11, written=0))  # type: ignore[arg-type]  # all that is asked of examples
    bins = [packed.bins[k].tolist() for k in range(len(packed))]
    assert sorted(k for bin in bins for k in bin) == list(range(count))
    assert all(len({k // 7 for k in bin}) == 1 for bin in bins)
    assert packed.lengths.tolist() == [int(lengths[bin].sum()) for bin in bins] and packed.lengths.max() <= 11


@given(lengths=st.lists(st.integers(1, 30), max_size=60), size=st.integers(30, 50))
def test_bins_hold_every_item_once(lengths: list[int], size: int) -> None:
    for way in (best_fit, exact_fit, third := partial(exact_fit, complete=any_number)):
        bins = way(lengths, size)
        assert sorted(k for b in bins for k in b) == list(range(len(lengths)))
        assert all(sum(lengths[k] for k in b) <= size for b in bins)
        # No bin could take in another: neither way opens one needlessly.
        loads = sorted(sum(lengths[k] for k in b) for b in bins)
        assert all(a + b > size for a, b in pairwise(loads[:2]))
        assert way(lengths, size) == bins
    two = min(len(best_fit(lengths, size)), len(exact_fit(lengths, size)))
    enough = sum(lengths) >= 0.99 * two * size or two == -(-sum(lengths) // size)
    assert len(fill(lengths, size)) == (two if enough else min(two, len(third(lengths, size))))


@given(counts=st.lists(st.integers(0, 3), min_size=1, max_size=7), room=st.integers(0, 30))
def test_what_leaves_least_of_the_room_free(counts: list[int], room: int) -> None:
    """Against every choice there is."""
    have = np.zeros(31, np.int64)
    have[2 : 2 + len(counts)] = counts
    found = any_number(have, room)
    assert all(found.count(k) <= have[k] for k in found)
    every = product(*(range(n + 1) for n in counts))
    sums = {sum(k * n for k, n in enumerate(some, 2)) for some in every}
    assert sum(found) == max(s for s in sums if s <= room)


def test_ragged_lengths_fill_99_percent() -> None:
    random = np.random.default_rng(0)
    for mean, spread, size in ((4, 1, 512), (3.6, 0.35, 256), (3.9, 0.35, 512)):  # documents; pairs of sentences; two sentences
        lengths = random.lognormal(mean, spread, 3000).astype(int).clip(1, size).tolist()
        assert sum(lengths) / (size * len(fill(lengths, size))) >= 0.99
    forms = random.choice(np.array([33, 44, 62, 100]), 3000, p=[0.2, 0.3, 0.3, 0.2])  # of poems, whose lengths are nearly fixed
    lengths = (forms + random.integers(-1, 2, 3000)).tolist()
    two = min(len(best_fit(lengths, 512)), len(exact_fit(lengths, 512)))
    assert sum(lengths) / (512 * two) < 0.99 <= sum(lengths) / (512 * len(fill(lengths, 512)))


# ------------------------------------------------------------------------------------------------------ rows end to end


@given(rows=st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12), held=st.integers(1, 20))
def test_rows_wait_in_a_file(rows: list[list[int]], held: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modelcenter.data.ragged.HELD", held)
        found = Ragged(rows)
    assert [found[k].tolist() for k in range(len(found))] == rows and found.total == sum(map(len, rows))
    flat = [i for row in rows for i in row]
    for start in range(0, len(flat) + 1, 3):
        assert found.flat(start, len(flat)).tolist() == flat[start:] and found.flat(start, start).tolist() == []
    with pytest.MonkeyPatch.context() as patch:  # as Linux does with more than 2 GiB
        read = os.preadv
        patch.setattr("os.preadv", lambda fd, buffers, at: read(fd, [buffers[0][:6]], at))
        assert found.flat(0, len(flat)).tolist() == flat
    assert found.__getstate__()["held"].tolist() == flat


@pytest.mark.parametrize(("lengths", "much"), [([10] * 9, False), ([9, 10, 10], False), ([9, 9, 10], True), ([1, 2, 30], True)])
def test_padding_is_much_where_a_sixteenth_of_rows_of_the_longest_is(lengths: list[int], much: bool) -> None:
    assert packing.much_padding(SimpleNamespace(lengths=np.array(lengths))) is much  # type: ignore[arg-type]
