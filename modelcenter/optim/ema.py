"""An exponential moving average of the weights. Polyak and Juditsky, 1992; Tarvainen and Valpola, 2017."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import refuse
from .adamw import local


class EMA:
    """average = decay average + (1 - decay) weight, after each update, starting from the first weights; in fp32, for all
    trained parameters."""

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay <= 1:
            refuse("EMA", "decay", repr(decay), "a number from 0 to 1")
        self.decay = decay
        self.weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        kinds = {name: torch.promote_types(p.dtype, torch.float32) for name, p in self.weights.items()}
        self.averages = {name: p.detach().to(kinds[name], copy=True) for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the averages."""
        averages = [local(a) for a in self.averages.values()]
        weights = [local(p.detach()).to(a.dtype) for p, a in zip(self.weights.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages. Doing it twice changes nothing, if the weights are fp32."""
        for name, p in self.weights.items():
            weight = p.detach().to(self.averages[name].dtype, copy=True)
            p.copy_(self.averages[name])
            self.averages[name] = weight

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the model has the averages as its weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()
