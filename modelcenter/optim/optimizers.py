"""From a model and a recipe's section to an optimizer."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..errors import nearest, refuse
from ..layers import Block
from ..layers.position import RelativeBias
from .adamw import AdamW
from .clipped import Adafactor, Clipped, Lion, Muon
from .config import OptimizerConfig

NAMES = ("adamw", "adafactor", "lion", "muon")


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW | Clipped:
    """The optimizer over the parameters that train, in groups: matrices with `config.weight_decay`, norms and biases without; one
    for each depth where rates differ (`lr_scale`); the matrices of blocks apart for Muon. Parameters carry their names into the
    optimizer's state. Refuses a model in which nothing trains."""
    if config.name not in NAMES:
        refuse(None, "optimizer.name", repr(config.name), nearest(config.name, NAMES))
    parameters = list(trainable(model))
    if not parameters:
        refuse(None, "model", "every parameter is frozen", "leave requires_grad on where the training is to happen")
    scales = lr_scales(model, config.layer_decay)
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Block))
    members: dict[tuple[float, bool, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter, decays in parameters:
        matrix = config.name == "muon" and parameter.ndim == 2 and decays and name.startswith(blocks)
        members.setdefault((scales[name], matrix, decays), []).append((name, parameter))
    groups: list[dict[str, Any]] = []
    for key in sorted(members, key=lambda key: (key[0], not key[1], not key[2])):
        scale, matrix, decays = key
        rates = {"lr": config.lr * scale, "lr_scale": scale, "weight_decay": config.weight_decay if decays else 0.0}
        groups.append({"params": members[key], **rates, **({"muon": matrix} if config.name == "muon" else {})})
    beta1, beta2 = config.betas
    if config.name == "adafactor":
        return Adafactor(groups, lr=config.lr)
    if config.name == "lion":
        return Lion(groups, lr=config.lr, betas=(beta1, beta2))
    options: dict[str, Any] = {"lr": config.lr, "betas": (beta1, beta2), "eps": config.eps, "moments": config.moments}
    return Muon(groups, momentum=config.momentum, **options) if config.name == "muon" else AdamW(groups, **options)


def set_lr(optimizer: AdamW | Clipped, lr: float) -> None:
    """Give every group the rate `lr`, times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def lr_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Each parameter's rate over the full one: decay^(n + 1 - depth), where the k-th of n blocks has depth k, what comes before the
    first 0, what comes after the last n + 1; an encoder is under its decoder. ELECTRA (Clark et al., 2020), BEiT (Bao et al.,
    2021)."""
    blocks = [f"{name}." for name, module in model.named_modules() if isinstance(module, Block)]
    if decay != 1 and not blocks:
        refuse(None, "optimizer.layer_decay", f"{decay}, and the model has no blocks", "a model of blocks, or 1")
    scales, depth = {}, 0
    for name, _ in model.named_parameters():
        mine = next((k for k, block in enumerate(blocks, 1) if name.startswith(block)), None)
        if mine is None and depth == len(blocks):
            depth += 1
        depth = depth if mine is None else mine
        scales[name] = 1.0 if decay == 1 else decay ** (len(blocks) + 1 - depth)
    return scales


def trainable(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, parameter, whether weight decay applies) for each parameter that trains; a tied one once, by its first
    name. Decay is for matrices: not for a norm's parameters, nor for biases, whatever their shape, tables of them included."""
    seen: set[Tensor] = set()
    tables = {part for module in model.modules() if isinstance(module, RelativeBias) for part in module.modules()}
    for path, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm")  # torch's norms, ours, and those of a user's own module
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                exempt = is_norm or leaf == "bias" or module in tables
                yield f"{path}.{leaf}".lstrip("."), parameter, parameter.ndim > 1 and not exempt
