"""Batches without padding, where a recipe leaves that open: when, how large, and with the same result."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelcenter.parallel.machine import Machine
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


@pytest.mark.parametrize(("changes", "here", "there"), [
    ({}, True, False), ({"precision": "bf16"}, True, True), ({"precision": "bf16", "data.padding_free": True}, False, False),
    ({"precision": "bf16", "objective": "contrastive", "model": "bert-base-uncased", "data.pair_key": "pair"}, True, False),
], ids=["fp32", "bf16", "given", "compared"])  # fmt: skip
def test_on_a_gpu_only_what_is_filled_up_is_unpadded(tmp_path: Path, changes: dict[str, Any], here: bool, there: bool) -> None:
    recipe = recipe_of(tmp_path, **{**PROMPTED, **changes} if "objective" not in changes else changes)
    assert (may_pack(recipe, False), may_pack(recipe, True)) == (here, there)
    job = job_there(recipe, MACHINE, torch.device("cpu"), True)  # a plan for one, made here
    assert ("cu_seq_lens_q" in job.batch(2)) == (there or recipe.data.padding_free is True)
