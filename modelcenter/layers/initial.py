"""Initial weights. Every parameter is drawn from the seed and its own name, so the values depend neither on the mesh nor on the
order in which a model is built.

A tensor is drawn piece by piece, and a rank keeps its part of each piece: the values are those of a single draw of the whole
tensor.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..names import Lazy, Region, Shape
from .norm import Norm

LANES = 16  # values that torch draws together: pieces of whole groups of them are those of one draw
PIECE = 2**18  # values drawn at a time
HERE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever is the default: the values are the seed's


@dataclass(frozen=True)
class Constant:
    """A tensor of one value."""

    shape: Shape
    value: float

    def __getitem__(self, region: Region) -> Tensor:
        return torch.full([s.stop - s.start for s in region], self.value, **HERE)


@dataclass(frozen=True)
class Normal:
    """Normal noise of a standard deviation. A part is taken from the draw of the whole tensor, so that it is the same on every
    mesh."""

    shape: Shape
    std: float
    seed: int
    name: str

    def __getitem__(self, region: Region) -> Tensor:
        source = source_of(self.seed, self.name)
        return part(self.shape, region, source, lambda piece: piece.normal_(0.0, self.std, generator=source))


@dataclass(frozen=True)
class Uniform:
    """Noise between -bound and bound, otherwise as `Normal`."""

    shape: Shape
    bound: float
    seed: int
    name: str

    def __getitem__(self, region: Region) -> Tensor:
        source = source_of(self.seed, self.name)
        return part(self.shape, region, source, lambda piece: piece.uniform_(-self.bound, self.bound, generator=source))


def part(shape: Shape, region: Region, source: torch.Generator, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """The part `region` of the tensor of `shape` that `draw` would fill from `source`, without making the rest of it."""
    rows, width = region[0], math.prod(shape[1:])
    group = LANES // math.gcd(width, LANES)  # rows
    step = max(1, PIECE // (group * width)) * group
    out = torch.empty([r.stop - r.start for r in region], **HERE)
    cut = out.shape[1:] != torch.Size(shape[1:])
    stop = 0
    while stop < rows.stop:
        start, stop = stop, stop + step
        if (shape[0] - stop) * width < LANES:  # a rest that is no group: torch draws the last of a tensor anew, with those before
            stop = shape[0]
        first, last = max(start, rows.start), min(stop, rows.stop)
        mine = out[max(0, first - rows.start) : max(0, last - rows.start)]
        if len(mine) == stop - start and not cut:
            draw(mine)
            continue
        piece = torch.empty((stop - start, *shape[1:]), **HERE)
        if len(mine):
            mine.copy_(draw(piece)[(slice(first - start, last - start), *region[1:])])
        else:
            piece.uniform_(generator=source)  # takes as much from the source as any draw, and less time
    return out


def source_of(seed: int, name: str) -> torch.Generator:
    """The generator of a parameter's values."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initial(
    model: nn.Module, shapes: Mapping[str, Shape], seed: int, std: Callable[[str, Shape], float]
) -> dict[str, Lazy]:
    """The source of each parameter's first value, for the parameters in `shapes`: norms one, biases zero, the rest normal with
    `std`."""
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, Norm)}
    return {
        name: Constant(shape, float(name in norms))
        if name in norms or name.endswith(".bias")
        else Normal(shape, std(name, shape), seed, name)
        for name, shape in shapes.items()
    }
