"""Which part of a tensor a rank writes, and how any number of ranks reads a state, however many ranks wrote it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..names import Region, Shape, everything
from ..parallel.ranks import Ranks
from .load import cut_as, local, put


class Piece(NamedTuple):
    """A part of a tensor of the shape `whole`: its first element stands at `start`."""

    tensor: Tensor
    start: Shape
    whole: Shape


def pieces(table: Mapping[str, Tensor], shapes: Mapping[str, Shape], ranks: Ranks) -> dict[str, Piece]:
    """What this rank writes of `table`: its part of sharded tensors, and whole tensors if it is the first rank that has them.
    `shapes`: the shapes without rows that only pad a tensor, where they differ from the tensor's; such rows are left out."""
    out = {}
    for name, tensor in table.items():
        region, part = local(tensor)
        start, whole = tuple(r.start for r in region), shapes.get(name, tuple(tensor.shape))
        part = part[tuple(slice(0, max(0, n - s)) for s, n in zip(start, whole, strict=True))]
        if ranks.owns(tensor) and (part.numel() or not any(start)):
            out[name] = Piece(part, start, whole)
    return out


@dataclass(frozen=True)
class Spread:
    """A tensor stored in pieces, read part by part."""

    shape: Shape
    dtype: torch.dtype
    pieces: list[Piece]

    def __getitem__(self, region: Region) -> Tensor:
        out, found = torch.empty([r.stop - r.start for r in region], dtype=self.dtype, device="cpu"), 0
        for piece in self.pieces:
            both = [(max(r.start, s), min(r.stop, s + n)) for r, s, n in zip(region, piece.start, piece.tensor.shape, strict=True)]
            if all(a < b for a, b in both):
                into = tuple(slice(a - r.start, b - r.start) for (a, b), r in zip(both, region, strict=True))
                part = piece.tensor[tuple(slice(a - s, b - s) for (a, b), s in zip(both, piece.start, strict=True))]
                out[into], found = part, found + part.numel()
        if found != out.numel():
            raise ValueError(f"{out.numel() - found} of {out.numel()} numbers are in none of the files that this rank reads")
        return out


def whole(source: "Tensor | Spread") -> Tensor:
    """All of it."""
    return source if isinstance(source, Tensor) else source[everything(source.shape)]


def spread_like(parameter: Tensor, source: "Tensor | Spread") -> Tensor:
    """A new tensor with the values of `source`, divided as `parameter` is. `source` has a value for each element, or for each of
    the blocks that rows consist of."""
    out = zeros_like(parameter, source.dtype, max(1, parameter.shape[-1] // source.shape[-1]))
    put(out, source)
    return out


def zeros_like(parameter: Tensor, dtype: torch.dtype, block: int = 1) -> Tensor:
    """Zeros cut as `parameter` is, one for each `block` elements of a row."""
    _, part = local(parameter)
    zeros = torch.zeros((*part.shape[:-1], part.shape[-1] // block), dtype=dtype, device=part.device)
    return cut_as(parameter, zeros, (*parameter.shape[:-1], parameter.shape[-1] // block))
