"""A model without storage: every parameter has its shape and dtype, and is on the meta device."""

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from .errors import refuse

if TYPE_CHECKING:
    from .model import Model


class Undrawn(TorchFunctionMode):
    """Leaves torch.nn's initial weights out: a skeleton has no storage to fill, and `normal_` on a meta tensor would spend seconds
    on importing torch's compiler first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def skeleton(family: "type[Model]", config: Any, task: str, dtype: torch.dtype) -> "Model":
    """The model of a family with this config and the head of this task. Errors: `InputError` for a task it does not offer."""
    check_task(family, task)
    if family.wide and dtype == torch.float16:
        warnings.warn(f"{family.__name__} in fp16: activations of the published weights overflow; use bf16 or fp32", stacklevel=3)
    try:
        with torch.device("meta"), Undrawn():
            model = family(config)
            model.head = family.tasks[task].head(config)
            for part in family.tasks[task].without:
                setattr(model, part, None)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        refuse(None, "config", "sizes whose product does not fit 64 bits", "a model that a machine can hold")
    model.task = task
    model.encoder_decoder = family.encoder_decoder and "decoder" not in family.tasks[task].without
    model.companions = {}
    model.to(dtype)
    model.tie()
    model.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    named = {name for entry in model.table.entries(model.shapes) for name in entry.ours}
    if strange := next((name for name in model.shapes if name not in named), None):
        wanted = "a row for it; or the model inside a module of your own that has what is added"
        refuse(None, f"{family.__name__}.names", f"no row for {strange}, which no file could hold", wanted)
    return model


def check_task(family: "type[Model]", task: str) -> None:
    """Refuse a head that the family does not offer."""
    if task not in family.tasks:
        heads = ", ".join(family.tasks)
        wanted = f"{heads} (in a recipe its objective says which; see modelcenter list recipes)"
        refuse(None, "task", f"{task!r} is none of {family.__name__}'s", wanted)
