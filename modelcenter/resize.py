"""Another size of the vocabulary, for a model that has its weights."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from .checkpoint.config import changed
from .errors import refuse
from .layers.adapter import current_names
from .layers.initial import initial
from .ops._mode import PLAIN
from .parallel.averaging import watch
from .skeleton import skeleton

if TYPE_CHECKING:
    from .model import Model


def resize(model: "Model", vocab: int, seed: int) -> None:
    """Implements `Model.resize_token_embeddings`. For a model on the meta device only the shapes change."""
    if vocab == model.config.vocab:
        return  # or an adapter's folder would hold, and train, what is the base's
    if any(type(p) not in PLAIN for p in model.parameters()):
        way = "resize before parallelize, or in one process, and load what that saves with machine="
        refuse(None, "resize_token_embeddings", "the model is sharded already", way)
    words, now = vocabulary(model), current_names(model)
    if odd := [name for name in words if now[name] != name]:
        refuse(None, "resize_token_embeddings", f"an adapter on {odd[0].rpartition('.')[0]}", "resize first, then the adapter")
    old = {name: model.get_parameter(name) for name in words}
    full = changed(model.config, {"vocab": vocab})
    fresh = skeleton(type(model), full, model.task, next(iter(old.values())).dtype)
    drawn = initial(fresh, {n: fresh.shapes[n] for n in old}, seed, model.init_std)
    for name, before in old.items():
        if before.is_meta:
            weight = before.new_empty(fresh.shapes[name])
        else:
            weight = drawn[name][tuple(slice(0, n) for n in fresh.shapes[name])].to(before)
            kept = min(len(weight), len(before))
            weight[:kept] = before.detach()[:kept]
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(weight, requires_grad=before.requires_grad))
    model.config, model.shapes, model.resized = full, fresh.shapes, frozenset(words)
    for part in model.modules():
        if hasattr(part, "vocab"):
            part.vocab = vocab  # type: ignore[assignment]  # nn.Module types every attribute as a tensor or a module
    model.tie()
    for part in model.modules():  # attributes in which torch's modules repeat their sizes, and which other tools read
        if isinstance(part, nn.Embedding):
            part.num_embeddings = len(part.weight)
        elif isinstance(part, nn.Linear):
            part.out_features = len(part.weight)
    watch(model)


def vocabulary(model: "Model") -> list[str]:
    """The parameters with a row for every word: those whose shape changes when the vocabulary does."""
    other = skeleton(type(model), replace(model.config, vocab=model.config.vocab + 1), model.task, torch.float32)
    return [name for name, shape in model.shapes.items() if other.shapes[name] != shape]
