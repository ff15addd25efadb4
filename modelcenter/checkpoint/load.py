"""Fills a model's parameters, each with its own part of a tensor."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import refuse
from ..names import Lazy, Region, Shape, everything
from ..parallel.watch import beat
from .copy_plan import within
from .exchange import read, stored
from .group import Group
from .intake import Intake

if TYPE_CHECKING:
    from ..model import Model


def fill(model: nn.Module, sources: Mapping[str, Lazy], group: Group | None = None, begun: Intake | None = None) -> None:
    """Copy into every parameter its own part of its source, casting to the parameter's dtype. The ranks of `group` read stored
    tensors together, each a share of the bytes; reading may have `begun` before. Random tensors are drawn by each rank for itself,
    its part of one tensor at a time."""
    held = {name: local(parameter) for name, parameter in model.named_parameters()}
    files = {name: part for name, part in held.items() if stored(sources[name])}
    if files:
        read(files, sources, group or Group(), begun)
    for name, parameter in model.named_parameters():
        if name not in files:
            put(parameter, sources[name])


@torch.no_grad()
def put(parameter: Tensor, source: Lazy) -> None:
    """Copy into `parameter` its own part of `source`; rows beyond the source become zero."""
    region, target = local(parameter)
    if target.numel():
        part = source[within(region, source.shape)]
        if part.shape != target.shape:  # rows that pad the vocabulary: nobody's values
            target.zero_()
            target = target[tuple(slice(0, n) for n in part.shape)]
        target.copy_(part)
        beat()


def taken(model: "Model", values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`values` by the names of the model's parameters. Values that are whole, but of which this process holds a part, are copied
    into the parameter, which then replaces them: torch copies no plain tensor into a DTensor, or the other way."""
    out = dict(values)
    for name, p in model.named_parameters(remove_duplicate=False):
        value, cut = values.get(name), hasattr(p, "placements")
        if not isinstance(value, Tensor) or p.is_meta or hasattr(value, "placements") == cut:
            continue
        if not cut:
            refuse(None, f"state_dict: {name}", "of a sharded model, a part of it", "its full_tensor(), which all ranks call")
        if tuple(value.shape) in (tuple(p.shape), model.shapes.get(name)):  # of any other torch says so
            put(p, value)
            out[name] = p
    return out


@torch.no_grad()
def local(parameter: Tensor) -> tuple[Region, Tensor]:
    """The region of the whole parameter that this process holds, and the tensor that holds it."""
    sharded: Any = parameter
    if not hasattr(sharded, "placements"):  # it would be a DTensor, whose module takes a second to import
        return everything(tuple(parameter.shape)), parameter
    mesh = sharded.device_mesh
    return region_of(tuple(sharded.shape), mesh, tuple(mesh.get_coordinate()), sharded.placements), sharded.to_local()


def cut_as(like: Tensor, part: Tensor, shape: Shape) -> Tensor:
    """A tensor of `shape` that is cut as `like` is, of which this process holds `part`. It stays where it is, which may be the host
    while the ranks' devices are others: torch's own `from_local` would move it there."""
    if not hasattr(like, "placements"):
        return part
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), strides, part.dtype)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]  # a DTensor, as was asked above
    return DTensor(part, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def whole(parameter: Tensor, shape: Shape | None = None) -> Tensor:
    """The whole of a parameter; with `shape`, without the rows that only pad it. Every rank calls it."""
    mine: Any = parameter.detach()
    full: Tensor = mine.full_tensor() if hasattr(mine, "full_tensor") else mine  # a DTensor, whose module takes a second to import
    return full if shape is None or shape == full.shape else full[tuple(slice(0, n) for n in shape)]


@lru_cache(maxsize=4096)
def region_of(shape: Shape, mesh: Any, here: tuple[int, ...], placements: Any) -> Region:
    """The region that the rank at `here` in a mesh holds of a tensor. It is kept, because a model has few different shapes and
    torch is slow."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
