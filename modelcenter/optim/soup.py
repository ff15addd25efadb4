"""The mean of the weights of several models that were trained from the same start. Wortsman et al., 2022."""

from collections.abc import Iterable
from typing import Any

import torch

from ..checkpoint.strict_json import parse_json
from ..errors import refuse
from ..layers import EmbedHead
from ..layers.pick import POOLINGS
from ..model import Model


@torch.no_grad()
def soup(models: Iterable[Model], dtype: torch.dtype | None = None) -> Model:
    """The first of `models`, with the mean of all their weights, added up in at least fp32 and rounded once, to `dtype` or that of
    the first. Of each later model only the weights are used, and no two need be in memory at once. Errors: `InputError`, naming the
    first model that is of another family, head, size, labels or words, or that has an adapter."""
    rest = iter(models)
    first = next(rest, None)
    if first is None:
        refuse("soup", "models", "none", "one at least")
    alike(first, first)
    sums = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in first.named_parameters()}
    count = 1
    for model in rest:
        count += 1
        for name, p in alike(first, model).named_parameters():
            sums[name] += p.to(sums[name])
    for name, p in first.to(dtype).named_parameters():
        p.copy_(sums[name] / count)
    return first


def alike(first: Model, other: Model) -> Model:
    """`other`, if its weights stand where those of `first` stand and mean the same."""
    if not isinstance(other, Model):
        refuse("soup", "models", f"a {type(other).__name__}", "models, as modelcenter.load gives")
    if first.adapter is not None or other.adapter is not None:
        refuse(other.source, None, "an adapter", "modelcenter merge puts it into its base's weights")
    mine, its = meaning(first), meaning(other)
    for what, value in mine.items():
        if its.get(what) != value:
            refuse(other.source, None, f"{what} {its.get(what)}", f"{value}, as {first.source} has")
    if None not in (said := [words(model) for model in (first, other)]) and said[0] != said[1]:
        refuse(other.source, "tokenizer.json", f"other words than {first.source} has", "models whose rows are the same words")
    return other


def meaning(model: Model) -> dict[str, Any]:
    """What a model's weights stand for: its family and head, its sizes, how it reads a prompt, what its labels are, and how a
    vector is made of a sentence. Rates of dropout say only how it was trained."""
    file, alone = model.config.file, model.config.num_labels == 1
    found = {"family": type(model).__name__, "head": model.task, **vars(model.config), "prefix_lm": file.get("prefix_lm") is True}
    if model.task == "classify":  # as transformers reads it where it is absent
        found["problem_type"] = file.get("problem_type") or ("regression" if alone else "single_label_classification")
    if isinstance(model.head, EmbedHead):  # what becomes of the tokens' vectors stands in files of its own
        found["pooling"] = next((name for name, pick in POOLINGS.items() if pick is model.head.pick), None)
        found["dense layers"] = ", ".join(map(str, model.head.dense or ())) or "none"
    del found["file"]
    return {key: value for key, value in found.items() if not key.endswith("dropout")}


def words(model: Model) -> Any:
    """The words of the rows of the vocabulary, with their scores if they have any; None if no tokenizer.json says them."""
    found = parse_json("tokenizer.json", model.companions.get("tokenizer.json", b"{}"))
    inner = found.get("model") if isinstance(found, dict) else None
    return inner.get("vocab") if isinstance(inner, dict) else None
