"""What counts as a target, and how well a model does on a set of examples.

Shapes: b sequences, s tokens, v vocabulary or labels.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.cross_entropy import IGNORE

Arguments = Mapping[str, Any]  # a batch of the loader: the model's keyword arguments, tensors and a few numbers


def on_device(batch: Arguments, device: torch.device) -> dict[str, Any]:
    """`batch` with its tensors on `device`."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}


def count_tokens(batch: Arguments, task: str) -> int:
    """How many tokens the model reads: padding is none, and what a decoder is to write counts too."""
    tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
    return int(tokens) + (int((batch["labels"] != IGNORE).sum()) if task == "seq2seq" else 0)


def target_labels(labels: Tensor, task: str) -> Tensor:
    """The labels that predictions stand against: for `lm` (b s) position i predicts label i + 1, so the first label of
    a row is nobody's target; elsewhere each label has its own prediction."""
    return labels[..., 1:] if task == "lm" else labels


def count_targets(batch: Arguments, task: str) -> int:
    """How many predictions the model's loss on `batch` sums over."""
    return int((target_labels(batch["labels"], task) != IGNORE).sum())


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Arguments], task: str) -> dict[str, float]:
    """`eval_loss`, the mean over all target tokens of `batches`, `eval_targets`, their number, and `eval_perplexity`
    (lm, seq2seq) or `eval_accuracy` (classify: of sequences; mlm: of masked tokens). Leaves the model in the mode that
    it was in; a set without targets has loss 0."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, targets, right = 0.0, 0, 0
    try:
        for batch in batches:
            here = on_device(batch, device)
            out = model(**here, num_items_in_batch=1)  # one item: the sum over targets, whatever their number
            total += float(out.loss)
            targets += count_targets(batch, task)
            if task in ("classify", "mlm"):
                right += int((out.logits.argmax(-1) == here["labels"]).sum())  # an ignored label equals no class
    finally:
        model.train(was_training)
    loss, count = total / max(1, targets), max(1, targets)
    results = {"eval_loss": loss, "eval_targets": targets}
    if task in ("lm", "seq2seq"):
        results["eval_perplexity"] = math.exp(min(loss, 700.0))  # beyond e^709 a float overflows
    if task in ("classify", "mlm"):
        results["eval_accuracy"] = right / count
    return results
