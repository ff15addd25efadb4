"""The mean of the weights of several models that were trained from the same one. Wortsman et al., 2022."""

from collections.abc import Iterable

import torch

from ..errors import refuse
from ..model import Model


@torch.no_grad()
def soup(models: Iterable[Model]) -> Model:
    """The first of `models`, its weights the mean of all, added up in at least fp32; of each later one only its weights are looked
    at, and no two need be held at once. Errors: `InputError`, naming the first that is of another family, head, size or labels, or
    that has an adapter."""
    rest = iter(models)
    first = next(rest)
    alike(first, first)
    kept = {name: p.dtype for name, p in first.named_parameters()}
    sums = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for name, p in first.named_parameters()}
    count = 1
    for model in rest:
        count += 1
        for name, p in alike(first, model).named_parameters():
            sums[name] += p.to(sums[name])
    for name, p in first.named_parameters():
        p.copy_((sums[name] / count).to(kept[name]))
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
