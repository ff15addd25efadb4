"""Prefix LM: what stands before the first label is read in both directions, as by transformers under an explicit mask."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from test_train import MACHINE, TINY, recipe_of

import modelcenter as mc
from modelcenter.adapter.attach import merge_adapter
from modelcenter.data.collate import IGNORED
from modelcenter.data.config import DataConfig
from modelcenter.data.objective import make_examples
from modelcenter.data.record import Record
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError
from modelcenter.layers import batch as batching
from modelcenter.layers import view
from modelcenter.layers.batch import Batch, context_of
from modelcenter.train.loop import train
from modelcenter.train.prepare import prepare
from modelcenter.train.resolve import resolve

KINDS = ("gpt2", "llama", "bloom")
GIVEN = (5, 1, 8)  # tokens of the prompts
REAL = (11, 9, 11)  # tokens of the rows


def flagged(kind: str, task: str = "lm") -> tuple[Any, Any]:
    theirs, ours = zoo.pair(zoo.Case(kind, "default", task))
    ours.config = replace(ours.config, file={**ours.config.file, "prefix_lm": True})
    return theirs, ours


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, labels, attention mask), padded on the right."""
    ids = torch.randint(3, 90, (3, 11), generator=torch.Generator().manual_seed(0))
    at = torch.arange(11)[None]
    real = at < torch.tensor(REAL)[:, None]
    return ids, ids.masked_fill((at < torch.tensor(GIVEN)[:, None]) | ~real, IGNORED), real.long()


def seen() -> torch.Tensor:
    """(b s t): the query sees the key, written out by hand."""
    out = torch.zeros(3, 11, 11, dtype=torch.bool)
    for b, (given, real) in enumerate(zip(GIVEN, REAL, strict=True)):
        for q in range(11):
            for k in range(real):
                out[b, q, k] = k <= q or k < given
    return out


def test_each_length_of_what_is_given_is_as_likely() -> None:
    """A token at least is given, and one is left to predict."""
    examples = make_examples("prefix_lm", [Record({"text": "abcde"}, "f", 1)], train_tokenizer([], 270, "bpe"), DataConfig())
    given, times = np.unique([(examples.at(epoch, 0)[1] == IGNORED).sum() for epoch in range(2000)], return_counts=True)
    assert given.tolist() == list(range(1, len(examples.at(0, 0)[0])))
    assert ((times - 400) ** 2 / 400).sum() < 18.5  # chi-squared with 4 degrees of freedom: 1 in 1000


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_mask_is_that_of_transformers_with_four_dimensions(kind: str) -> None:
    theirs, ours = flagged(kind)
    ids, labels, real = rows()
    mask = torch.zeros(3, 1, 11, 11, dtype=torch.float64).masked_fill(~seen()[:, None], torch.finfo(torch.float64).min)
    with zoo.wide(torch.float64):
        wanted = theirs(ids, attention_mask=mask, position_ids=torch.arange(11)[None].expand(3, -1), labels=labels)
        wanted.loss.backward()
    found = ours(ids, real, labels=labels)
    found.loss.backward()
    for b, n in enumerate(REAL):
        assert (found.logits[b, :n] - wanted.logits[b, :n]).abs().max() < 1e-10 * wanted.logits.abs().max()
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-12)
    reference = {k: p.grad for k, p in theirs.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in reference.values())
    for name, grad in zoo.gradients_like_theirs(ours).items():
        assert (grad - reference[name]).abs().max() <= 1e-10 * largest, name


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_token_depends_on(kind: str) -> None:
    """By derivatives, in every family: its past, and the whole prompt; and with a prompt of one token nothing else than usual."""
    _, ours = flagged(kind)
    ids, labels, real = rows()
    x = ours.get_input_embeddings()(ids).detach().requires_grad_()
    logits = ours(inputs_embeds=x, attention_mask=real, labels=labels).logits
    for q in range(11):
        (grad,) = torch.autograd.grad(logits[:, q].square().sum(), x, retain_graph=True)
        found = grad.abs().amax(-1) > 0
        for b, n in enumerate(REAL):
            if q < n:
                assert torch.equal(found[b], seen()[b, q]), (b, q)
    _, plain = zoo.pair(zoo.Case(kind, "default", "lm"))
    with torch.no_grad():
        one = labels.clone()
        one[:, 1:] = ids[:, 1:]
        assert torch.equal(ours(ids, labels=one).logits, plain(ids, labels=one).logits)


LABELS = {"classify": torch.tensor([1, 0, 2]), "tag": rows()[1] % 3, "qa": torch.tensor([[1, 2], [0, 3], [4, 8]]),
          "embed": torch.tensor([0])}  # fmt: skip


@pytest.mark.parametrize("task", LABELS)
def test_labels_that_are_no_words_leave_both_directions(task: str) -> None:
    """A head put on what was pretrained so reads in training what it reads afterwards."""
    _, ours = flagged("gpt2", task)
    ids, _, real = rows()
    x = ours.get_input_embeddings()(ids).detach().requires_grad_()
    out = ours(inputs_embeds=x, attention_mask=real, labels=LABELS[task], output_hidden_states=True)
    (grad,) = torch.autograd.grad(out.hidden_states[-1][0, 0].square().sum(), x)
    assert out.loss.isfinite() and (grad[0, : REAL[0]].abs().amax(-1) > 0).all()
    plain = ours(ids, real, output_hidden_states=True)
    assert torch.equal(out.hidden_states[-1], plain.hidden_states[-1])


def judged(ours: Any, packed: bool, device: str = "cpu") -> list[torch.Tensor]:
    """The logits of real tokens, and every gradient, of rows that are padded on the left or lie side by side."""
    ids, labels, real = (x.to(device) for x in rows())
    if not packed:
        ids, labels, real = (torch.stack([row.roll(11 - n) for row, n in zip(x, REAL, strict=True)]) for x in (ids, labels, real))
    if packed:
        ends = torch.tensor([0, *REAL], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        kept, first = real.bool(), torch.tensor(REAL[:-1]).cumsum(0)
        ids, labels = ids[kept][None], labels[kept][None].index_fill(1, first.to(device), IGNORED)
        args = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11,
                "position_ids": torch.cat([torch.arange(n) for n in REAL])[None].to(device)}  # fmt: skip
    else:
        args = {"attention_mask": real}
    ours.zero_grad()
    out = ours(ids, labels=labels, **args)
    out.loss.backward()
    return [out.logits if packed else out.logits[real.bool()], *(p.grad for p in ours.parameters() if p.grad is not None)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_by_a_kernel_that_knows_the_prompt(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one no mask is made, and what is computed is the same; where it does not take the heads, one is, once."""
    _, ours = flagged(kind)
    wanted, calls = judged(ours, packed), []
    real, masked = view.View.by_lengths, Batch.masked
    monkeypatch.setattr(batching, "on_gpu", lambda x: True)
    monkeypatch.setattr(Batch, "masked", lambda self, *rest: calls.append("mask") or masked(self, *rest))
    for said, taken in ((lambda *_: True, ["kernel"] * 2), (lambda *_: False, ["mask"])):
        calls.clear()
        monkeypatch.setattr(view, "covers", said)
        monkeypatch.setattr(view.View, "by_lengths", lambda *args: calls.append("kernel") or real(*args))
        found = judged(ours, packed)
        assert calls == taken
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() <= 1e-10 * other.abs().max().clamp(min=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_by_a_kernel_on_a_gpu(kind: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near to fp64 as the road that makes a mask."""
    name, more = ("gpt2", {}) if kind == "gpt2" else ("llama-3.2-1b", {"kv_heads": 2, "hidden": 256, "head_dim": 32})
    sizes = {"layers": 2, "dim": 128, "heads": 4, "vocab": 90, **more}
    found, roads = [], []
    real = view.View.by_lengths
    monkeypatch.setattr(view.View, "by_lengths", lambda self, *rest: roads.append(found) or real(self, *rest))
    for dtype, open_ in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        ours = mc.build(name, config=sizes, dtype=torch.float32, device="cuda").to(dtype).eval()
        ours.config = replace(ours.config, file={**ours.config.file, "prefix_lm": True})
        monkeypatch.setattr(batching, "on_gpu", lambda x, open_=open_: open_)
        found.append([x.double() for x in judged(ours, packed, "cuda")])
        assert bool(roads) is open_
    for wanted, masked, one in zip(*found, strict=True):
        assert (one - wanted).norm() <= 2 * (masked - wanted).norm() + 2e-3 * wanted.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_generated_from_as_it_is_trained_on(kind: str) -> None:
    """With the cache and padding on the left, each token is the best under the mask that training has."""
    _, ours = flagged(kind)
    ids, _, _ = rows()
    prompt, mask = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)
    for b, n in enumerate((6, 4)):
        prompt[b, 6 - n :], mask[b, 6 - n :] = ids[b, :n], 1
    out = ours.generate(prompt, mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        for b, n in enumerate((6, 4)):
            row = ids[b : b + 1, :n]
            for k in range(5):
                labels = row.masked_fill(torch.arange(row.size(1)) < n, IGNORED) if k else None
                row = torch.cat((row, ours(row, labels=labels).logits[:, -1:].argmax(-1)), 1)
            assert out[b, 6:].tolist() == row[0, n:].tolist()


def test_context_ends_at_the_first_label() -> None:
    labels = torch.tensor([[-100, -100, 4, -100, 5], [7, 7, 7, 7, 7], [-100] * 5, [3, -100, -100, 2, 2]])
    assert context_of(labels)[:, 0].tolist() == [2, 1, 5, 3]
    ends = [0, 5, 10, 15, 20]
    packed = context_of(labels.reshape(1, -1), view.Packing.of(ends, ends, labels.device))
    assert torch.equal(packed, context_of(labels).reshape(1, -1))


def test_documents_are_cut_in_two_anew_each_epoch() -> None:
    tokenizer = train_tokenizer([], 257, "bpe")
    records = [Record({"text": "x" * n}, "f", n) for n in range(1, 40)]
    data = DataConfig(seq_len=30)
    one, two = (make_examples("prefix_lm", records, tokenizer, data, seed=seed) for seed in (1, 2))
    cuts = [[sum(labels == IGNORED) for _, labels in (examples.at(epoch, k) for k in range(len(one)))]
            for examples, epoch in ((one, 0), (one, 0), (one, 1), (two, 0))]  # fmt: skip
    assert cuts[0] == cuts[1] and len({tuple(row) for row in cuts}) == 3
    assert all(1 <= cut <= max(n - 1, 1) for cut, n in zip(cuts[0], one.lengths, strict=True))
    shares = [cut / n for epoch in range(30) for k, n in enumerate(one.lengths) if n == 30
              for cut in [sum(one.at(epoch, k)[1] == IGNORED)]]  # fmt: skip
    assert 0.42 < sum(shares) / len(shares) < 0.58 and min(shares) < 0.1 and max(shares) > 0.9


def test_a_run_says_in_config_json_what_it_was(tmp_path: Path) -> None:
    changes = {"objective": "prefix_lm", "tokenizer": "bpe:300", "config": TINY, "eval_steps": None, "save_steps": None}
    run = train(recipe_of(tmp_path, **changes), MACHINE)
    model = mc.load(tmp_path / "out" / "model")
    assert model.config.file["prefix_lm"] is True and run.metrics["eval_perplexity"] > 0
    ids = torch.arange(5, 13)[None]
    with torch.no_grad():
        whole = model(ids).logits
        assert not torch.allclose(whole[:, 2], model(ids, labels=ids).logits[:, 2])
    with pytest.raises(InputError, match="'lm' is none of BERT's"):
        train(recipe_of(tmp_path, **{**changes, "model": "bert-base-uncased", "output_dir": str(tmp_path / "b")}), MACHINE)


def test_an_adapter_says_it_too_and_its_base_does_not(tmp_path: Path) -> None:
    """What the run evaluates is what the folder evaluates, on a base that reads in one direction, and merged."""
    for name in ("base", "lora"):
        (tmp_path / name).mkdir()
    changes = {"tokenizer": "bpe:300", "config": TINY, "eval_steps": None, "save_steps": None, "max_steps": 4}
    train(recipe_of(tmp_path / "base", **changes), MACHINE)
    base = tmp_path / "base" / "out" / "model"
    tuned = {"objective": "prefix_lm", "init": "pretrained", "model": str(base), "tokenizer": None, "config": {},
             "optimizer.lr": 0.05, "adapter.name": "lora", "adapter.targets": ["all-linear"]}  # fmt: skip
    run = train(recipe_of(tmp_path / "lora", **{**changes, **tuned}), MACHINE)
    folder, ids = tmp_path / "lora" / "out" / "model", torch.arange(5, 13)[None]
    adapted, plain = mc.load(folder), mc.load(base)
    assert adapted.config.file["prefix_lm"] is True and "prefix_lm" not in plain.config.file
    with torch.no_grad():
        assert not torch.allclose(adapted(ids).logits[:, 2], adapted(ids, labels=ids).logits[:, 2])
        merge_adapter(adapted).save_pretrained(tmp_path / "merged")
        merged = mc.load(tmp_path / "merged")
        torch.testing.assert_close(merged(ids).logits, mc.load(folder)(ids).logits, rtol=1e-4, atol=1e-5)
    del tuned["adapter.targets"]
    said = evaluation_of(tmp_path / "lora", changes | tuned)
    assert run.metrics["eval_loss"] == pytest.approx(said, rel=1e-5)


def evaluation_of(folder: Path, changes: dict[str, Any]) -> float:
    """The loss of what the folder of the run holds, read anew."""
    asked = recipe_of(folder, **{**changes, "model": str(folder / "out" / "model"), "adapter.name": "none"})
    recipe, device = resolve(asked, MACHINE)
    setup = prepare(recipe, MACHINE, device)
    assert setup.evaluation is not None
    return setup.evaluation(setup.model)["eval_loss"]
