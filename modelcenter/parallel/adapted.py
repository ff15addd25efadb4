"""Tensor parallelism for layers with an adapter and for quantised layers: each rank has its rows or columns of them.

An adapter is split like its base, on the side that is not of low rank. DoRA needs the lengths of whole rows; if rows are split, the
squares of the parts are summed over the ranks. Quantised codes are split as they are, between groups that share a scale, so that
each rank has the same codes as a single process.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import refuse
from ..layers import Adapted, Linear, QuantizedLinear
from ..ops.quantize import GROUP

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    Styles = Callable[[bool], dict[str, Callable[[], ParallelStyle]]]


def cut_adapted(layer: Adapted, style: str, mesh: "DeviceMesh", sequence: bool, styles: "Styles") -> "dict[str, ParallelStyle]":
    """Cut what torch's styles do not, and return the styles in which they cut the rest. With `sequence`, sums over ranks are left
    to sequence.py, except those that DoRA multiplies, which are taken at once."""
    check_adapted(layer, style)
    dora = layer.magnitude is not None
    late = sequence and not (dora and style == "row")
    plan = {"b" if style == "column" else "a": styles(False)[style]()}
    if isinstance(layer.base, QuantizedLinear):
        cut_codes(layer.base, style, mesh, late)
    else:
        plan["base"] = styles(late)[style]()
    if late:
        sequence_parallel_adapter(layer, style, mesh)
    elif sequence:
        layer.register_forward_hook(partial(whole, mesh))
    if dora:
        cut_lengths(layer, style, mesh)
    return plan


def check_adapted(layer: Adapted, style: str) -> None:
    """Refuse an adapter on a head: its rows would be those of a padded vocabulary."""
    if style not in ("column", "row"):
        refuse(None, "tensor_parallel", "an adapter on a head", "targets outside the head, or tensor_parallel=1")


def check_codes(model: nn.Module, kind: str, ranks: int) -> None:
    """Refuse a model, not yet sharded, with matrices whose codes cannot be divided among so many ranks."""
    for name, module in model.named_modules():
        for child, style in getattr(module, "tp", {}).items():
            part = getattr(module, child, None)
            layer = part.base if isinstance(part, Adapted) else part
            if not isinstance(layer, Linear | QuantizedLinear) or style not in ("column", "row") or name.startswith("head"):
                continue
            count, what = (layer.out_features, "rows") if style == "column" else (layer.in_features, "columns")
            group = GROUP if kind == "nf4" and style == "row" else 1
            if count % (group * ranks):
                by = f" in groups of {group}" if group > 1 else ""
                found = f"{kind} with tensor_parallel={ranks}, for {count} {what}{by} of {name}.{child}"
                refuse(None, "adapter.quantize", found, "a tensor_parallel that divides them, int8 (which has no groups), or none")


def cut_codes(layer: QuantizedLinear, style: str, mesh: "DeviceMesh", sequence: bool = False) -> None:
    """Keep this rank's rows or columns, and let their products be made as torch's styles make them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    ranks, me = mesh.size(), mesh.get_local_rank()
    if style == "column":
        layer.codes, layer.scales = (t.chunk(ranks)[me].clone() for t in (layer.codes, layer.scales))
    else:
        layer.codes = layer.codes.chunk(ranks, 1)[me].clone()
        layer.scales = layer.scales.chunk(ranks, 1)[me].clone() if layer.scales.dim() > 1 else layer.scales
        layer.in_features //= ranks
    if layer.bias is not None:
        placement = [Shard(0)] if style == "column" else [Replicate()]
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, placement, src_data_rank=None), requires_grad=False)

    def given(x: Any) -> Tensor:
        """Each rank's part of the gradient is one of a sum."""
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        found: Tensor = x.to_local(grad_placements=[Partial()])
        return found

    def summed(out: Tensor) -> Any:
        parts = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        return parts if sequence else parts.redistribute(placements=[Replicate()]).to_local()

    if style == "column":
        layer.given = given
    else:
        layer.summed = summed


def cut_lengths(layer: Adapted, style: str, mesh: "DeviceMesh") -> None:
    """Cut DoRA's magnitudes along with the rows; if columns are cut, sum the squares over the ranks."""
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.tensor import Shard, distribute_tensor

    assert layer.magnitude is not None
    if style == "column":
        mine = distribute_tensor(layer.magnitude.detach(), mesh, [Shard(0)], src_data_rank=None)
        layer.magnitude = nn.Parameter(mine, requires_grad=layer.magnitude.requires_grad)
        return
    group = mesh.get_group()

    def joined(lengths: Tensor) -> Tensor:
        found: Tensor = all_reduce(lengths.square(), "sum", group).sqrt()
        return found

    layer.joined = joined


def whole(mesh: "DeviceMesh", layer: nn.Module, args: Any, out: Tensor) -> Any:
    """What all ranks have alike, for a stack that cuts sequences."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(out, mesh, [Replicate()], run_check=False)


def sequence_parallel_adapter(layer: Adapted, style: str, mesh: "DeviceMesh") -> None:
    """The style of an adapted layer under sequence parallelism: what is of low rank is whole on every rank, as are the weights on
    that side of it."""

    def local(a: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.to_local() if hasattr(x, "to_local") else x for x in args)

    if style == "column":  # the gathered sequence comes, and parts of what `b` makes of it are added to parts
        layer.a.register_forward_pre_hook(local)
    else:  # a sum over ranks is added to one that the stack has yet to form
        layer.b.register_forward_hook(partial(whole, mesh))
