"""Sequence parallelism: between the layers that tensor parallelism cuts, each rank has a part of every sequence.

What lies there, norms, dropout and the residual stream, is else the same on all ranks of a layer. A stack cuts its input along the
sequence and puts its output together; attention and feed-forward gather what they read, and their sums over ranks are scattered:
as many bytes as before, and activations between layers by the number of ranks smaller (Korthikanti et al., 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2.2). Dropout differs from rank to rank there, by its shard's seed.
Sequences whose length the ranks do not divide, a new token of a generation among them, stay whole.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..layers import Block, LayerNorm, RMSNorm, Stack

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sequence_parallel(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Of a model whose layers leave the sums over ranks to whoever takes them (`styles`)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole, part = [Replicate()], [Shard(1)]

    def cut(x: Any) -> Any:
        return x.redistribute(placements=whole if x.shape[1] % mesh.size() else part)

    def spread(stack: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for parameter in replicated(stack):
            if parameter.requires_grad and not parameter._backward_hooks:
                parameter.register_hook(summed)
        x, *rest = args
        return cut(DTensor.from_local(x, mesh, whole, run_check=False)), *rest

    def gather(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return x.redistribute(placements=whole), *rest

    def scatter(layer: nn.Module, args: Any, out: Any) -> Any:
        return cut(out)

    def join(stack: nn.Module, args: Any, out: Any) -> Tensor:
        found: Tensor = out.redistribute(placements=whole).to_local()
        return found

    def summed(grad: Any) -> Any:
        """A norm has seen a part of the sequence alone."""
        return grad.redistribute(placements=whole)

    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        stack.register_forward_pre_hook(spread)
        stack.register_forward_hook(join)
        for module in norms(stack):
            for name, p in list(module.named_parameters(recurse=False)):
                shared = DTensor.from_local(p.detach(), mesh, whole, run_check=False)
                setattr(module, name, nn.Parameter(shared, requires_grad=p.requires_grad))
        for block in [m for m in stack.modules() if isinstance(m, Block)]:
            for layer in (block.attn, block.cross, block.ffn):
                if layer is not None:
                    layer.register_forward_pre_hook(gather)
                    layer.register_forward_hook(scatter)


def norms(stack: nn.Module) -> Iterator[nn.Module]:
    return (m for m in stack.modules() if isinstance(m, LayerNorm | RMSNorm))


def replicated(stack: nn.Module) -> Iterator[torch.Tensor]:
    return (p for module in norms(stack) for p in module.parameters(recurse=False))
