"""Initial weights: every parameter is drawn from the seed and its own name, so they do not depend on the mesh or on the order
of building."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..names import Lazy, Region, Shape
from .norm import LayerNorm, RMSNorm


@dataclass(frozen=True)
class Constant:
    """A tensor of one value."""

    shape: Shape
    value: float

    def __getitem__(self, region: Region) -> Tensor:
        return torch.full([s.stop - s.start for s in region], self.value)


@dataclass(frozen=True)
class Normal:
    """Normal noise of a standard deviation. A part is cut out of the whole draw: the same on every mesh."""

    shape: Shape
    std: float
    seed: int
    name: str

    def __getitem__(self, region: Region) -> Tensor:
        return torch.empty(self.shape).normal_(0.0, self.std, generator=source_of(self.seed, self.name))[region]


@dataclass(frozen=True)
class Uniform:
    """Noise between -bound and bound, otherwise as `Normal`."""

    shape: Shape
    bound: float
    seed: int
    name: str

    def __getitem__(self, region: Region) -> Tensor:
        return torch.empty(self.shape).uniform_(-self.bound, self.bound, generator=source_of(self.seed, self.name))[region]


def source_of(seed: int, name: str) -> torch.Generator:
    """The generator of a parameter's values."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initial(
    model: nn.Module, shapes: Mapping[str, Shape], seed: int, std: Callable[[str, Shape], float]
) -> dict[str, Lazy]:
    """Where the first value of each parameter in `shapes` comes from: norms one, biases zero, the rest normal of `std`."""
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, LayerNorm | RMSNorm)}
    return {
        name: Constant(shape, float(name in norms))
        if name in norms or name.endswith(".bias")
        else Normal(shape, std(name, shape), seed, name)
        for name, shape in shapes.items()
    }
