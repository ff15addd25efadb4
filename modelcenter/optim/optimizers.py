"""From a model and a recipe's section to an optimizer."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..errors import nearest, refuse
from .adamw import AdamW
from .config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW (Loshchilov and Hutter, 2017: decay decoupled from the gradient; optim/adamw.py) over the parameters that
    train, in at most two groups: matrices with `config.weight_decay`, norms and biases without. Parameters carry their
    names into the optimizer's state. Refuses a model in which nothing trains."""
    if config.name != "adamw":
        refuse(None, "optimizer.name", repr(config.name), nearest(config.name, ["adamw"]))
    parameters = list(trainable(model))
    if not parameters:
        refuse(None, "model", "every parameter is frozen", "leave requires_grad on where the training is to happen")
    groups: list[dict[str, Any]] = []
    for decay in (True, False):
        if members := [(name, parameter) for name, parameter, decays in parameters if decays == decay]:
            groups.append({"params": members, "weight_decay": config.weight_decay if decay else 0.0})
    beta1, beta2 = config.betas
    return AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, moments=config.moments)


def trainable(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, parameter, whether weight decay applies) for each parameter that trains; a tied one once, by its first
    name. Decay is for matrices: not for a norm's parameters, nor for biases, whatever their shape."""
    seen: set[Tensor] = set()
    for path, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm")  # torch's norms, ours, and those of a user's own module
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                yield f"{path}.{leaf}".lstrip("."), parameter, parameter.ndim > 1 and not is_norm and leaf != "bias"
