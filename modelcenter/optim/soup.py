"""The mean of the weights of several models that were trained from the same one. Wortsman et al., 2022."""

from collections.abc import Iterable

import torch

from ..errors import refuse
from ..model import Model


@torch.no_grad()
def soup(models: Iterable[Model], dtype: torch.dtype | None = None) -> Model:
    """The first of `models`, with the mean of all their weights, added up in at least fp32 and rounded once, to `dtype` or that of
    the first. Of each later model only the weights are used, and no two need be in memory at once. Errors: `InputError`, naming the
    first model that is of another family, head, size or labels, or that has an adapter."""
    rest = iter(models)
    first = next(rest)
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
    if first.adapter is not None or other.adapter is not None:
        refuse(other.source, None, "an adapter", "modelcenter merge puts it into its base's weights")
    for what, mine, its in (
        ("family", type(first).__name__, type(other).__name__), ("head", first.task, other.task),
        *((name, value, getattr(other.config, name, None)) for name, value in vars(first.config).items() if name != "file"),
    ):  # fmt: skip
        if mine != its:
            refuse(other.source, None, f"{what} {its}", f"{mine}, as {first.source} has")
    return other
