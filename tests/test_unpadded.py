"""Batches without padding, where a recipe leaves that open: when, how large, and with the same result."""

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelcenter.layers.view import Packing, View
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.ranks import ALONE
from modelcenter.train import loop
from modelcenter.train.compiled import KINDS
from modelcenter.train.fit import job_of
from modelcenter.train.loop import train
from modelcenter.train.metrics import read_rows
from modelcenter.train.paper import job_there
from modelcenter.train.prepare import prepare
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.resolve import may_pack, resolve

MACHINE = Machine(device="cpu", threads=1)
BERT = {"layers": 1, "dim": 32, "heads": 2, "hidden": 64, "positions": 64, "dropout": 0.0, "attn_dropout": 0.0, "head_dropout": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    "bert-base-uncased": BERT, "gpt2": {"layers": 1, "dim": 32, "heads": 2, "positions": 64},
    "t5-small": {"layers": 1, "decoder_layers": 1, "dim": 32, "heads": 2, "head_dim": 16, "hidden": 64},
    "cpm-ant-10b": {"layers": 1, "dim": 32, "heads": 2, "head_dim": 16, "hidden": 64},
}  # fmt: skip
PROMPTED = {"data.prompt_key": "text", "data.response_key": "pair"}
PAIRS = {"data.source_key": "text", "data.target_key": "pair"}
CLASSES = {"objective": "classify", "model": "bert-base-uncased"}


def recipe_of(folder: Path, **changes: Any) -> Recipe:
    """Of 48 texts, most of them short."""
    made = [{"text": "to be " * (1 + n % 2 + 6 * (n % 8 == 0)), "pair": "or not" * (1 + n % 2), "label": "ab"[n % 2]}
            for n in range(48)]  # fmt: skip
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (folder / "base.yaml").write_text("{}\n")
    settings = {
        "model": (model := changes.get("model", "gpt2")), "init": "random", "config": SIZES[model], "tokenizer": "char",
        "data.path": str(folder / "data.jsonl"), "data.seq_len": 48, "data.eval_fraction": 0, "batch": 12, "micro_batch": 2,
        "precision": "fp32", "max_steps": 4, "logging_steps": 1, "output_dir": str(folder / "out"), **changes,
    }  # fmt: skip
    return load_recipe(folder / "base.yaml", {key: value for key, value in settings.items() if value is not None or "." in key})


@pytest.mark.filterwarnings("ignore:.* pairs have a text of another:UserWarning")
@pytest.mark.parametrize(("changes", "free"), [
    (CLASSES, True), ({"objective": "seq2seq", "model": "t5-small", "tokenizer": "bpe:270", **PAIRS}, True),
    ({**CLASSES, "data.padding_free": False}, False), ({**CLASSES, "loss.r_drop": 1.0}, False), (PROMPTED, True),
    ({}, False),  # blocks, all of one length
    ({**PROMPTED, "data.path": ["data.jsonl", "data.jsonl"]}, True), ({**PROMPTED, "model": "cpm-ant-10b"}, False),
    ({"objective": "contrastive", "model": "bert-base-uncased", "data.pair_key": "pair"}, True),
], ids=["classes", "pairs", "wanted", "twice", "prompted", "blocks", "mixed", "prefixed", "compared"])  # fmt: skip
def test_batches_are_unpadded_where_padding_would_be_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any],
                                                          free: bool) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    recipe, device = resolve(recipe_of(tmp_path, **changes), MACHINE)
    setup = prepare(recipe, MACHINE, device, meta=True)
    _, batches = next(setup.loader.steps(micro_batch=recipe.micro_batch))
    assert all(("cu_seq_lens_q" in batch) == free for batch in batches) and setup.loader.examples.padded != free


@pytest.mark.parametrize("changes", [CLASSES, PROMPTED, {**PROMPTED, "batch_tokens": 300, "batch": None}],
                         ids=["classes", "prompted", "counted"])
def test_a_forward_has_as_many_tokens_as_so_many_of_the_longest(tmp_path: Path, changes: dict[str, Any]) -> None:
    """And not as few sequences: 12, most of them short, are 3 or 4 forwards instead of 6, of about as many tokens each."""
    recipe, device = resolve(recipe_of(tmp_path, **changes), MACHINE)
    loader = prepare(recipe, MACHINE, device, meta=True).loader
    for _, (_, batches) in zip(range(8), loader.steps(micro_batch=recipe.micro_batch), strict=False):
        tokens = [batch["input_ids"].numel() for batch in batches]
        assert max(tokens) <= 2 * 48 and -(-sum(tokens) // 96) <= len(tokens) < 6
        assert max(tokens) - min(tokens) <= 2 * 48


@pytest.mark.parametrize("changes", [CLASSES, {**PROMPTED, "config": {**SIZES["gpt2"], **dict.fromkeys(
    ("dropout", "embed_dropout", "attn_dropout"), 0.0)}}], ids=["classify", "lm"])  # fmt: skip
def test_a_run_learns_the_same_and_a_padded_one_goes_on(tmp_path: Path, changes: dict[str, Any]) -> None:
    losses = {}
    for free in (None, False):
        (folder := tmp_path / str(free)).mkdir()
        train(recipe_of(folder, **changes, **{"data.padding_free": free}), MACHINE)
        losses[free] = [row["loss"] for row in read_rows(folder / "out" / "metrics.jsonl") if "loss" in row]
    assert len(losses[None]) == 4 and losses[None] == pytest.approx(losses[False], rel=1e-5)
    more = {**changes, "max_steps": 5, "data.padding_free": None, "schedule.name": "constant"}
    (folder := tmp_path / "on").mkdir()
    train(recipe_of(folder, **{**more, "max_steps": 3, "data.padding_free": False, "save_steps": 3}), MACHINE)
    assert train(recipe_of(folder, **more), MACHINE).step == 5


@pytest.mark.filterwarnings("ignore:.* pairs have a text of another:UserWarning")
@pytest.mark.parametrize(("changes", "here", "there"), [
    ({}, True, False), ({"precision": "bf16"}, True, True), ({"precision": "bf16", "data.padding_free": True}, False, False),
    ({"precision": "bf16", "objective": "contrastive", "model": "bert-base-uncased", "data.pair_key": "pair"}, True, False),
], ids=["fp32", "bf16", "given", "compared"])  # fmt: skip
def test_on_a_gpu_only_what_is_filled_up_is_unpadded(tmp_path: Path, changes: dict[str, Any], here: bool, there: bool) -> None:
    recipe = recipe_of(tmp_path, **{**PROMPTED, **changes} if "objective" not in changes else changes)
    assert (may_pack(recipe, False), may_pack(recipe, True)) == (here, there)
    job = job_there(recipe, MACHINE, torch.device("cpu"), True)  # a plan for one, made here
    assert ("cu_seq_lens_q" in job.batch(2)) == (there or recipe.data.padding_free is True)


def test_what_no_kernel_takes_is_compiled_once_and_not_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "tiles_pay", lambda *args: False)  # as without kernels
    torch._dynamo.reset()
    monkeypatch.setitem(torch._dynamo.utils.counters, "stats", Counter())
    run = torch.compile(View.attend, backend="eager")
    for ends in ([0, 3, 9], [0, 2, 3, 12], [0, 7, 8, 10, 20], [0, 1, 30], [0, 2, 4, 6, 8, 31]):
        q, k, v = torch.randn(3, 1, 2, ends[-1], 8)
        view = View(packing=Packing.of(ends, ends, q.device), causal=True)
        assert torch.equal(run(view, q, k, v, None, 0.0), view.attend(q, k, v, None, 0.0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize(("changes", "most"), [({"compile": True}, KINDS), ({}, 8), ({"compile": True, "tensor_parallel": 2}, 8)],
                         ids=["blocks", "none", "cut"])  # fmt: skip
def test_blocks_are_compiled_for_more_kinds_than_torch_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              changes: dict[str, Any], most: int) -> None:  # fmt: skip
    found = []

    def begin(*args: Any) -> Any:
        found.append(torch._dynamo.config.recompile_limit)
        raise KeyError

    monkeypatch.setattr(loop, "begin", begin)
    monkeypatch.setattr(loop, "to_launch", lambda machine: False)
    monkeypatch.setattr(loop, "enter", lambda recipe, machine: ALONE)
    with pytest.raises(KeyError):
        train(recipe_of(tmp_path, **CLASSES), replace(MACHINE, **changes))
    assert found == [most] and torch._dynamo.config.recompile_limit == 8


def test_a_plan_covers_forwards_of_long_targets(tmp_path: Path) -> None:
    """Which have more of the tokens of a forward than those of the longest pairs, and keep more memory each."""
    changes = {**PAIRS, "objective": "seq2seq", "model": "t5-small", "tokenizer": "bpe:270", "data.padding_free": True}
    recipe = recipe_of(tmp_path, **changes, **{"micro_batch": 6, "data.target_len": 4})
    (tmp_path / "data.jsonl").write_text('{"text": "to", "pair": "or not to be"}\n' * 48)
    recipe, device = resolve(recipe, MACHINE)
    setup = prepare(recipe, MACHINE, device, meta=True)
    job = job_of(recipe, device, setup, nullcontext, MACHINE)
    _, (batch, *_) = next(setup.loader.steps(micro_batch=recipe.micro_batch))
    planned = job.batch(6)
    assert planned["labels"].numel() >= batch["labels"].numel() > 6 * 4
    assert planned["input_ids"].numel() + planned["labels"].numel() == 6 * job.tokens


def test_a_plan_has_targets_of_spans_as_long_as_they_are(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, objective="span", model="t5-small", tokenizer="span:370", batch=2)
    recipe, device = resolve(recipe, MACHINE)
    setup = prepare(recipe, MACHINE, device, meta=True)
    _, (batch, *_) = next(setup.loader.steps(micro_batch=2))
    planned = job_of(recipe, device, setup, nullcontext, MACHINE).batch(2)
    assert planned["labels"].shape == batch["labels"].shape and planned["input_ids"].shape == batch["input_ids"].shape


@pytest.mark.parametrize(("changes", "said"), [
    ({}, "data.padding_free=false"), ({"data.packing": True}, "data.packing=false"), ({"data.padding_free": False}, ""),
], ids=["free", "packed", "padded"])  # fmt: skip
def test_grouping_by_length_what_has_no_padding_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    for grouped in (True, False):
        recipe, device = resolve(recipe_of(tmp_path, **CLASSES, **changes, **{"data.group_by_length": grouped}), MACHINE)
        lines = [line for line in prepare(recipe, MACHINE, device, meta=True).lines if "data.group_by_length" in line]
        assert len(lines) == (grouped and bool(said)) and all(line.endswith(f"or set {said}") for line in lines)
