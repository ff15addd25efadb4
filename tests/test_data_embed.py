"""Sentence embeddings: losses and gradients as sentence-transformers computes them, packed or not, and Spearman on pairs."""

import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
import zoo
from test_train import MACHINE, recipe_of

from modelcenter.data.config import DataConfig
from modelcenter.data.objective import find_objective, make_examples, texts_of
from modelcenter.data.packing import Packed
from modelcenter.data.record import Few, Mixture, Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError
from modelcenter.train.evaluate import count_targets, evaluate
from modelcenter.train.prepare import prepare
from modelcenter.train.resolve import most_of, resolve
from modelcenter.train.step import accumulate

pytestmark = pytest.mark.filterwarnings("ignore:.* pairs have a text of another:UserWarning")  # as in most tests, to be short

CASE = zoo.Case("bert", "default", "embed")
PAIR: dict[str, Any] = {"text_key": "a", "pair_key": "b"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "contrastive": ("contrastive", PAIR), "negatives": ("contrastive", {**PAIR, "negative_key": "far"}),
    "symmetric": ("contrastive", {**PAIR, "negative_key": "far"}), "similarity": ("similarity", {**PAIR, "score_max": 5.0}),
}  # fmt: skip


def records(count: int = 8) -> list[Record]:
    draw = np.random.default_rng(0)

    def text() -> str:
        return "".join(draw.choice(list("abcdef"), draw.integers(1, 9)))

    return [Record({"a": text(), "b": text(), "far": [text(), text()], "label": float(n % 6)}, "f", n) for n in range(1, count + 1)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([], 270, "roberta")


def low(batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` with ids that the tiny model has, none of them padding's."""
    return {**batch, "input_ids": batch["input_ids"] % 90 + 2}


def embedded(theirs: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The mean of a row's real tokens, as sentence-transformers' Pooling."""
    hidden = theirs(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def published(columns: tuple[torch.Tensor, ...], labels: torch.Tensor, kind: str) -> torch.Tensor:
    """MultipleNegativesRankingLoss, its symmetric kind, CosineSimilarityLoss: by their documentation, scale 20."""
    if kind == "similarity":
        return F.mse_loss(F.cosine_similarity(columns[0], columns[1]), labels)
    near = F.cosine_similarity(columns[0][:, None], torch.cat(columns[1:])[None], dim=-1) * 20
    own = torch.arange(len(near))
    back = near[:, : len(near)].T
    return (F.cross_entropy(near, own) + F.cross_entropy(back, own)) / 2 if kind == "symmetric" else F.cross_entropy(near, own)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_of_the_published_formulas(kind: str, tokenizer: Tokenizer) -> None:
    name, keys = KINDS[kind]
    theirs, ours = zoo.pair(CASE)
    ours.head.symmetric = kind == "symmetric"
    examples = make_examples(name, records(), tokenizer, DataConfig(seq_len=12, **keys))
    rows = [examples.at(0, k) for k in range(len(examples))]
    batch = low(examples.collate(rows))
    assert not batch["attention_mask"].all() and len(batch["input_ids"]) == 8 * len(rows[0][0])
    whole = examples.collate(rows)
    firsts = [whole["input_ids"][k, : int(whole["attention_mask"][k].sum())].tolist() for k in range(8)]
    assert firsts == [tokenizer.encode(record.fields["a"]) for record in records()]
    sides = [list(column) for column in zip(*(texts for texts, _ in rows), strict=True)]  # of the rows, column by column
    assert [list(tokenizer.encode(r.fields["b"])) for r in records()] == [ids.tolist() for ids in sides[1]]
    labels = torch.tensor([r.fields["label"] / 5 for r in records()]).double()  # of fp32, as a batch has them
    wanted = published(embedded(theirs, batch).split(8), labels, kind)
    wanted.backward()
    batch["labels"] = batch["labels"].double() if kind == "similarity" else batch["labels"]
    found = ours(**batch)
    assert abs(float(found.loss.detach()) - float(wanted.detach())) < 1e-10 * float(wanted.detach())
    assert torch.allclose(ours(**batch, num_items_in_batch=16).loss, found.loss / 2, rtol=1e-12)
    found.loss.backward()
    for parameter in ours.head.pooler.parameters():  # has no part in a sentence's vector
        assert parameter.grad is None
        parameter.grad = torch.zeros_like(parameter)
    reference = {k: p.grad for k, p in theirs.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in reference.values())
    for key, grad in zoo.gradients_like_theirs(ours).items():
        assert (grad - reference.get(key, 0)).abs().max() <= 1e-10 * largest, key
    if kind == "similarity":
        cosines = F.cosine_similarity(*embedded(theirs, batch).split(8)).detach()
        judged = evaluate(ours, [batch], "similarity")
        assert judged["eval_spearman"] == pytest.approx(scipy.stats.spearmanr(cosines, labels).statistic)
        assert judged["eval_loss"] == pytest.approx(float(wanted.detach()), rel=1e-6) and judged["eval_targets"] == 8


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_gradients_of_padded_ones(kind: str, tokenizer: Tokenizer) -> None:
    name, keys = KINDS[kind]
    _, ours = zoo.pair(CASE)
    packed = make_examples(name, records(20), tokenizer, DataConfig(seq_len=12, packing=True, **keys))
    assert isinstance(packed, Packed)
    bins = [packed.at(0, k) for k in range(len(packed))]
    inner: Any = packed.examples
    assert max(map(len, bins)) > 1 and sum(map(len, bins)) == 20
    assert all(sum(len(ids) for texts, _ in bin for ids in texts) <= 12 * len(bins[0][0][0]) for bin in bins)
    grads = []
    for batch in (packed.collate(bins[:3]), inner.collate([example for bin in bins[:3] for example in bin])):
        out = ours(**low(batch))
        out.loss.backward()
        grads.append([out.loss.detach(), *(p.grad.clone() for p in ours.parameters() if p.grad is not None)])
        ours.zero_grad()
    assert len(grads[0]) == len(grads[1]) > 10
    for one, other in zip(*grads, strict=True):
        assert (one - other).abs().max() <= 1e-9 * max(1.0, float(other.abs().max()))


def test_the_loss_is_a_mean_over_the_pairs_of_a_step(tokenizer: Tokenizer) -> None:
    """Whatever their micro-batches: each pair counts the same, among the pairs of its own forward."""
    _, ours = zoo.pair(CASE)
    examples = make_examples("contrastive", records(), tokenizer, DataConfig(seq_len=12, **PAIR))
    rows = [examples.at(0, k) for k in range(8)]
    parts = [low(examples.collate(rows[:3])), low(examples.collate(rows[3:]))]
    with torch.no_grad():
        sums = [float(ours(**part, num_items_in_batch=1).loss) for part in parts]
    assert accumulate(ours, parts, "contrastive") == (pytest.approx(sum(sums) / 8), 8)
    blank = {**parts[0], "labels": torch.full((3,), -100)}
    assert count_targets(blank, "contrastive") == 0 and float(ours(**blank).loss.detach()) == 0


def test_a_forward_holds_the_whole_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the recipe says otherwise, and then the run says what that means."""
    (tmp_path / "data.jsonl").write_text('{"a": "of x", "b": "is x"}\n' * 16)
    changes = {"objective": "contrastive", "model": "bert-base-uncased", "tokenizer": "roberta:300", "micro_batch": None,
               "data.seq_len": 32, "data.path": str(tmp_path / "data.jsonl"), "data.text_key": "a", "data.pair_key": "b",
               "data.eval_fraction": 0.0}  # fmt: skip
    for micro, forwards in ((None, 1), (4, 2)):
        asked = recipe_of(tmp_path, **changes)
        recipe, _ = resolve(replace(asked, batch=4096, micro_batch=micro), MACHINE)  # of more tokens than other forwards have
        assert recipe.micro_batch == (micro or 4096) and recipe.task == "embed"
        setup = prepare(*resolve_as(asked, micro))
        assert any(line.startswith("negatives: ") for line in setup.lines) == (forwards > 1)
        assert f" in {forwards} forward{'s' * (forwards > 1)}: " in setup.lines[2]
        assert "sample:\n  <s>of x</s>\n  near: <s>is x</s>" in setup.lines[3]
    (tmp_path / "data.jsonl").write_text('{"a": "of", "b": "is"}\n{"a": "of all that is", "b": "is"}\n' * 8)
    recipe, device = resolve(replace(asked, batch=8, batch_tokens=60), MACHINE)  # padding has no part in it
    assert most_of(recipe, device, {}) == 2
    setup = prepare(recipe, MACHINE, device)
    assert all(len(forwards) == 1 for _, forwards in islice(setup.loader.steps(), 6))


def resolve_as(asked: Any, micro: int | None) -> tuple[Any, ...]:
    recipe, device = resolve(replace(asked, batch=8, micro_batch=micro), MACHINE)
    return recipe, MACHINE, device


def test_rows_and_what_is_shown(tokenizer: Tokenizer) -> None:
    data = DataConfig(text_key="query: {a}", pair_key="b", negative_key="far", seq_len=20)
    row = Record({"a": "ab", "b": "cd", "far": "ef", "label": 4}, "f", 1)
    assert list(texts_of("contrastive", [row], data)) == ["query: ab", "cd", "ef"]
    table = Record({**row.fields, "far": '["ef", "[1]"]'}, "f", 1)
    assert list(texts_of("contrastive", [table], data)) == ["query: ab", "cd", "ef", "[1]"]
    for far in ("ef", ["ef"]):
        inner = Record({**row.fields, "far": {"hard": far}}, "f", 1)
        assert list(texts_of("contrastive", [inner], replace(data, negative_key="far.hard"))) == ["query: ab", "cd", "ef"]
    for packing in (False, True):
        examples = make_examples("contrastive", [row, row], tokenizer, replace(data, packing=packing))
        shown = find_objective("contrastive").sample(examples.collate([examples.at(0, 0)]), tokenizer, None)
        assert shown == "<s>query: ab</s>\n  near: <s>cd</s>\n  far: <s>ef</s>"
    scored = make_examples("similarity", [row], tokenizer, replace(data, negative_key=None, score_max=5.0))
    shown = find_objective("similarity").sample(scored.collate([scored.at(0, 0)]), tokenizer, None)
    assert shown == "<s>query: ab</s>\n  to: <s>cd</s>\n  score: 0.8"


@pytest.mark.parametrize(("some", "again"), [
    (["ab", "cd"], None), (["ab", "cd", "ae"], "2 of 3 .*line 1"), (["ab", "cd", "eb", "fg"], "2 of 4 .*line 1"),
    (["ab", "ba"], None), (["abx", "cdb"], "1 of 2 .*line 1"), (["abx", "cdx"], None), (["ab", "cd", "cd"], "2 of 3 .*line 2"),
])  # fmt: skip
def test_texts_that_are_near_to_one_and_far_from_another_are_told(some: list[str], again: str | None, tokenizer: Tokenizer) -> None:
    """Letters of a row: the text, the one near it, one that is far. A text that is far from several is as it should be."""
    rows = [Record(dict(zip(("a", "b", "far"), row, strict=False)), "f", n) for n, row in enumerate(some, 1)]
    data = DataConfig(**PAIR, seq_len=9, negative_key="far" if len(some[0]) > 2 else None)
    with pytest.warns(UserWarning, match=rf"^{again}\): what is near") if again else warnings.catch_warnings(action="error"):
        make_examples("contrastive", rows, tokenizer, data)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("first", [1, 2])
def test_sources_of_a_mixture_have_as_many_negatives(first: int, packing: bool, tokenizer: Tokenizer) -> None:
    """A batch of both took as many as the first source has, or broke off at one that has fewer."""
    data = DataConfig(**PAIR, negative_key="far", seq_len=20, packing=packing)
    sources = [Few([Record({"a": "ab", "b": "cd", "far": ["e"] * many}, "f", 1)]) for many in (first, 3 - first)]
    with pytest.raises(InputError, match=r"^data\.negative_key: 1 negatives in one source, 2 in another; as many in each"):
        make_examples("contrastive", Mixture(sources, [1.0, 1.0]), tokenizer, data)
    assert len(make_examples("contrastive", Mixture(sources[:1] * 2, [1.0, 1.0]), tokenizer, data)) == 2


@pytest.mark.parametrize(("objective", "fields", "keys", "said"), [
    ("contrastive", {}, {"pair_key": None}, "data.pair_key: absent with objective contrastive"),
    ("contrastive", {}, {"negative_key": "none"}, "line 1: no field 'none'"),
    ("contrastive", {"far": ["a"]}, {"negative_key": "far"}, "line 2: 1 negatives where the first record has 2; as many"),
    ("similarity", {"label": 10**400}, {}, "label is 1000"),
    ("contrastive", {"far": ["a", 2]}, {"negative_key": "far"}, "line 2: far holds 2"),
    ("similarity", {"label": "good"}, {"score_max": 5.0}, "line 2: label is 'good'; a number of -5 to 5"),
    ("similarity", {"label": 5.5}, {"score_max": 5.0}, r"line 2: label is 5.5; .*data\.score_max"),
    ("similarity", {"label": 0.5, "a": ""}, {}, "line 2: a has no"),
])  # fmt: skip
def test_refusals(objective: str, fields: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    bare = train_tokenizer([], 257, "bpe")
    first = {"a": "a", "b": "b", "far": ["c", "d"], "label": 0.5}
    with pytest.raises(InputError, match=said.replace("a has no", "no token in its text")):
        make_examples(objective, [Record(first, "f", 1), Record({**first, **fields}, "f", 2)], bare, DataConfig(**{**PAIR, **keys}))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bloom"])
def test_a_causal_models_vector_is_that_of_its_last_token(kind: str) -> None:
    """transformers' backbone and last-token pooling, padded on either side, packed or alone."""
    case = zoo.Case(kind, "default", "embed")
    theirs, ours = zoo.pair(case)
    for side in ("none", "right", "left"):
        args = zoo.inputs(case, side)
        mask = args.get("attention_mask", torch.ones_like(args["input_ids"]))
        with zoo.wide(torch.float64), torch.no_grad():
            hidden = theirs(**zoo.theirs_only(case, theirs, args)).last_hidden_state
        found = ours(**args).embeddings.detach()
        last = [int(row.nonzero().max()) for row in mask]
        wanted = F.normalize(hidden[torch.arange(2), last], dim=-1)
        assert found.shape == wanted.shape and (found - wanted).abs().max() < 1e-10, side
    row, alone = zoo.packed(case)
    with torch.no_grad():
        assert torch.allclose(ours(**row).embeddings, torch.cat([ours(**a).embeddings for a in alone]), rtol=0, atol=1e-10)
