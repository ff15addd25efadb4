"""What a machine asks of each block, on one device or on many: to be computed again in the backward, to be compiled."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from ..layers import Block
from .machine import Machine


def blocks(model: nn.Module) -> list[Block]:
    return [m for m in model.modules() if isinstance(m, Block)]


def fit_blocks(model: nn.Module, machine: Machine) -> None:
    """Recompute, then compile, as `machine` says: what is computed again is compiled too."""
    if machine.recompute:
        recompute(model)
    if machine.compile:
        for block in blocks(model):
            block.compile()


def recompute(model: nn.Module) -> None:
    """Keep only the blocks' inputs; their insides are computed again in the backward, with the same dropout."""
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
