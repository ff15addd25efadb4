"""Makes the optimizer from a model and the recipe's `optimizer` section."""

import math
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from ..errors import refuse
from ..layers import Block
from ..layers.position import RelativeBias
from ..parallel.ranks import ALONE, Ranks, settle
from .adafactor import Adafactor
from .adamw import BLOCK, AdamW
from .clipped import Clipped, Lion
from .config import OptimizerConfig
from .muon import Muon


def build_optimizer(model: nn.Module, config: OptimizerConfig, ranks: Ranks = ALONE) -> AdamW | Clipped:
    """The optimizer of the parameters that are trained, in groups: matrices with `config.weight_decay`, norms and biases without;
    one group for each depth if rates differ (`lr_scale`); separate groups for the matrices of blocks with Muon, and for parameters
    without 8-bit moments (`blocked`). Parameters carry their names into the optimizer's state. `ranks`: those over which `model` is
    spread; together they do what one process does. A model in which nothing is trained is refused."""
    settle(model)
    parameters = list(trainable(model))
    if not parameters:
        refuse(None, "model", "every parameter is frozen", "requires_grad on what is to be trained")
    scales = lr_scales(model, config.layer_decay)
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Block))
    members: dict[tuple[float, bool, bool, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter, decays in parameters:
        matrix = config.name == "muon" and parameter.ndim == 2 and decays and name.startswith(blocks)
        wide = config.moments == "int8" and not matrix and not blocked(name, parameter)
        members.setdefault((scales[name], matrix, decays, wide), []).append((name, parameter))
    groups: list[dict[str, Any]] = []
    for key in sorted(members, key=lambda key: (key[0], not key[1], not key[2], key[3])):
        scale, matrix, decays, wide = key
        rates = {"lr": config.lr * scale, "lr_scale": scale, "weight_decay": config.weight_decay if decays else 0.0}
        groups.append({"params": members[key], **rates, **({"muon": matrix} if config.name == "muon" else {}),
                       **({"moments": "fp32"} if wide else {})})  # fmt: skip
    beta1, beta2 = config.betas
    if config.name == "adafactor":
        shapes = getattr(model, "shapes", {})
        return Adafactor(groups, lr=config.lr, shapes={p: shapes[n] for n, p, _ in parameters if n in shapes}, ranks=ranks)
    if config.name == "lion":
        return Lion(groups, lr=config.lr, betas=(beta1, beta2))
    options: dict[str, Any] = {"lr": config.lr, "betas": (beta1, beta2), "eps": config.eps, "moments": config.moments}
    return Muon(groups, momentum=config.momentum, ranks=ranks, **options) if config.name == "muon" else AdamW(groups, **options)


def blocked(name: str, parameter: Tensor) -> bool:
    """Whether the moments of a parameter have 8 bits. Those of a matrix do, if its rows are whole blocks, so that the blocks are
    the same on any mesh. Vectors, and matrices with narrow rows, keep 4 bytes: they are few."""
    sharded, last, width = cast(Any, parameter), parameter.dim() - 1, parameter.shape[-1]
    if last == 0 or width % BLOCK:
        return False
    cuts = zip(sharded.device_mesh.shape, sharded.placements, strict=True) if hasattr(parameter, "placements") else ()
    across = math.prod(n for n, place in cuts if not place.is_replicate() and place.dim == last)
    if width % (BLOCK * across):
        refuse(None, "optimizer.moments", f"int8 with {name}, whose rows of {width} are cut in {across}",
               f"rows cut into multiples of {BLOCK}: fp32 or bf16, or a smaller tensor_parallel")
    return True


def set_lr(optimizer: AdamW | Clipped, lr: float) -> None:
    """Give every group the rate `lr`, times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def lr_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Each parameter's rate over the full one: decay^(n + 1 - depth), where the k-th of n blocks has depth k, what comes before the
    first 0, what comes after the last n + 1; an encoder is under its decoder. Modules come in the order in which the family
    makes them, which is that of the computation. ELECTRA (Clark et al., 2020), BEiT (Bao et al., 2021)."""
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
    """(name, parameter, whether weight decay applies) for each parameter that is trained; a tied one once, by its first name.
    Matrices decay; norms' parameters and biases do not, whatever their shape, nor do tables of biases."""
    seen: set[Tensor] = set()
    tables = {part for module in model.modules() if isinstance(module, RelativeBias) for part in module.modules()}
    for path, module in model.named_modules():
        is_norm = type(module).__name__.endswith("Norm")  # torch's norms, ours, and those of a user's own module
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                exempt = is_norm or leaf == "bias" or module in tables
                yield f"{path}.{leaf}".lstrip("."), parameter, parameter.ndim > 1 and not exempt
