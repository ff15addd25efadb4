"""Converts an optimizer's state to flat tables by parameter name, and back."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import refuse
from .shards import spread_like, whole

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from .shards import Spread


SAME = "the same trainable parameters, split alike into groups"


def flatten_optimizer(optimizer: "Optimizer", model: "nn.Module") -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """The optimizer's state by parameter name: tensors `<slot>/<parameter>`, and JSON for the rest.

    torch's own state_dict numbers the parameters, so that freezing one or splitting a group would silently shift every moment.
    """
    names = _names(optimizer, model)
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{slot}/{names[parameter]}"] = value
            else:
                scalars.setdefault(names[parameter], {})[slot] = value
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        row: dict[str, Any] = {"params": [names[p] for p in group["params"]]}
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                tensors[f"group {index}/{key}"] = value
            elif key != "params":
                row[key] = value
        groups.append(row)
    shapes = {names[p]: list(_shape(model, names[p], p)) for group in optimizer.param_groups for p in group["params"]}
    return tensors, {"class": type(optimizer).__name__, "shapes": shapes, "groups": groups, "scalars": scalars}


def restore_optimizer(optimizer: "Optimizer", model: "nn.Module", tensors: "Mapping[str, Tensor | Spread]",
                      content: Mapping[str, Any]) -> None:
    """Restore, bit for bit, what `flatten_optimizer` returned; tensors are copied to their parameter's device.

    Groups must hold the same parameters, in any order, with the same settings except for the rate. Nothing changes unless all fits.
    `load_state_dict` is not used, because it casts the moments to the parameter's dtype: fp32 moments of bf16 weights would be
    lost. Errors: `InputError` naming the first parameter that differs.
    """
    names = _names(optimizer, model)
    if content.get("class") != type(optimizer).__name__:
        refuse("optimizer state", "class", f"{content.get('class')!r}", f"this run uses {type(optimizer).__name__!r}")
    matched = _matched(optimizer, names, content)
    by_name = {name: parameter for parameter, name in names.items()}
    for name, shape in content["shapes"].items():
        if shape != (own := list(_shape(model, name, by_name[name]))):
            refuse("optimizer state", name, f"saved with shape {shape}", f"this run has {own}")

    state: dict[Tensor, dict[str, Any]] = {}
    uncut = getattr(optimizer, "whole", ())  # what each rank has all of
    on_device = {p for g in optimizer.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    for key, value in tensors.items():
        slot, _, name = key.partition("/")
        if slot.startswith("group "):
            continue
        if name not in content["shapes"]:
            refuse("optimizer state", name, "not among the saved parameters", SAME)
        parameter = by_name[name]
        home = torch.device("cpu") if slot == "step" and parameter not in on_device else parameter.device
        cut = type(parameter.data) is not torch.Tensor and len(value.shape) == parameter.dim() and slot not in uncut
        state.setdefault(parameter, {})[slot] = spread_like(parameter, value) if cut else whole(value).to(home, copy=True)
    for name, slots in content["scalars"].items():
        state.setdefault(by_name[name], {}).update(slots)

    optimizer.state.clear()
    optimizer.state.update(state)
    for group, index, row in matched:
        for key, value in row.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        for key, value in tensors.items():
            if key.startswith(f"group {index}/"):
                group[key.partition("/")[2]] = whole(value).clone()


def _matched(optimizer: "Optimizer", names: "Mapping[Tensor, str]", content: Mapping[str, Any]
             ) -> list[tuple[dict[str, Any], int, dict[str, Any]]]:
    """Each group of the optimizer with the saved one of the same parameters and settings, and that one's number."""
    saved = {frozenset(row["params"]): (index, row) for index, row in enumerate(content["groups"])}
    matched = []
    for group in optimizer.param_groups:
        mine = frozenset(names[p] for p in group["params"])
        if mine not in saved:
            closest = max(saved, key=lambda other: len(other & mine), default=frozenset())
            refuse("optimizer state", min(mine ^ closest, default=None), "in another group, or in one run only", SAME)
        matched.append((group, *saved.pop(mine)))
    for left in saved:
        refuse("optimizer state", min(left, default=None), "saved, but not trained in this run", SAME)

    for group, _, row in matched:
        for key in sorted(row.keys() & group.keys() - {"params", "lr"}):  # the rate is the schedule's
            was, now = (list(value) if isinstance(value, tuple) else value for value in (row[key], group[key]))
            if was != now:
                refuse("optimizer state", key, f"saved with {was!r}, this run has {now!r}", "the same, or a new run")
    return matched


def _shape(model: "nn.Module", name: str, parameter: "Tensor") -> tuple[int, ...]:
    """Of a parameter without the rows that only pad it: such rows depend on the number of ranks."""
    shapes: dict[str, tuple[int, ...]] = getattr(model, "shapes", {})
    return shapes.get(name, tuple(parameter.shape))


def _names(optimizer: "Optimizer", model: "nn.Module") -> "dict[Tensor, str]":
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(f"the optimizer's parameter of shape {list(parameter.shape)} is not in the model")
    return names
