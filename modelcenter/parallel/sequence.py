"""Sequence parallelism: between the layers that tensor parallelism splits, each rank has a part of every sequence.

Without it, all ranks of a layer compute the same norms, dropout and residual stream. With it, a stack splits its input along the
sequence and gathers its output again. Attention and feed-forward all-gather their input and reduce-scatter their output. That sends
as many bytes as before, and divides the memory of activations between layers by the number of ranks (Korthikanti et al., 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2). Dropout there differs from rank to rank, by the
seed of its shard. Sequences whose length is not divisible by the number of ranks, such as a single new token in generation, stay
whole.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..layers import Block, Stack
from ..layers.norm import Norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def sequence_parallel(model: nn.Module, mesh: "DeviceMesh") -> None:
    """Apply it to a model whose layers leave their sums over ranks to it (`styles`)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole, part = [Replicate()], [Shard(1)]

    def cut(x: Any) -> Any:
        return x.redistribute(placements=whole if x.shape[1] % mesh.size() else part)

    def spread(stack: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for parameter in replicated(stack):
            if parameter.requires_grad and summed not in (parameter._backward_hooks or {}).values():
                parameter.register_hook(summed)
            parameter._backward_hooks = parameter._backward_hooks  # which torch does not call after a cast (averaging.py: watch)
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
        """Sum the gradient of a norm's weight, which has seen only a part of the sequence."""
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
    return (m for m in stack.modules() if isinstance(m, Norm))


def replicated(stack: nn.Module) -> Iterator[torch.Tensor]:
    return (p for module in norms(stack) for p in module.parameters(recurse=False))
