"""What a machine profile may ask of each block, on one device or many: recompute in the backward, and torch.compile."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..layers import Block
from ..ops import _graph
from ..ops._mode import on_gpu
from .machine import Machine, Recompute

# Operators whose results selective recompute keeps: what costs most to do again for the memory it takes. Products of batches are
# not among them: those are attention's scores, in torch's attention without a kernel. Of a sum over ranks the summand is kept too.
KEPT = frozenset(
    {"aten::mm", "aten::addmm", "aten::_addmm_activation", "modelcenter::linear_nf4_forward", "modelcenter::linear_int8_forward",
     "modelcenter::attention_forward", "modelcenter::relative_attention_forward", "aten::_flash_attention_forward",
     "aten::_scaled_dot_product_flash_attention",
     "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
     "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_fused_attention_overrideable",
     "_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor"}
)  # fmt: skip


def blocks(model: nn.Module) -> list[Block]:
    return [m for m in model.modules() if isinstance(m, Block)]


def units(model: nn.Module) -> list[nn.Module]:
    """The modules that ranks gather separately from the rest of the model: the blocks, and a head with its own table that is as
    large as a block. Its gradients are sent, and its memory is freed, while the blocks compute. What is left to the root stays
    gathered from the first block to the last."""
    head, own = getattr(model, "head", None), blocks(model)
    if not isinstance(head, nn.Module) or not own:
        return [*own]
    mine = set(head.parameters())
    alone = mine.isdisjoint(p for child in model.children() if child is not head for p in child.parameters())
    large = sum(p.numel() for p in mine) >= max(sum(p.numel() for p in block.parameters()) for block in own)
    return [*own, head] if alone and large else [*own]


def fit_blocks(model: nn.Module, machine: Machine) -> None:
    """Apply recompute and then compile, as `machine` says: the recomputation is compiled too. With tensor parallelism blocks are
    compiled for each shape anew, and from the ninth on not at all: of DTensors whose shapes vary torch's compiler never ends to
    make symbols (a RecursionError in torch 2.13)."""
    recompute(model, machine.recompute)
    if machine.compile:
        for block in blocks(model):
            block.compile(dynamic=False if machine.tensor_parallel > 1 else None)


def recompute(model: nn.Module, how: Recompute) -> None:
    """`full`: keep only the inputs of blocks, and compute the rest again in the backward, with the same dropout. `selective`: also
    keep the results of the operators in `KEPT` (Korthikanti et al., 2022, "Reducing Activation Recomputation")."""
    if how == "none":
        return
    for block in blocks(model):
        run = selected if how == "selective" else whole
        block.forward = partial(run, block.forward)  # type: ignore[method-assign]  # of this one block


def again(block: nn.Module) -> bool:
    """Whether a block is recomputed in the backward."""
    run = vars(block).get("forward")
    return isinstance(run, partial) and run.func in (whole, selected)


def recomputed(model: nn.Module) -> bool:
    return any(again(block) for block in blocks(model))


def kept(model: nn.Module) -> None:
    """Undo `recompute`."""
    for block in filter(again, blocks(model)):
        inner = vars(block).pop("forward").args[0]
        if inner != block.forward:  # something else stood there before
            block.forward = inner  # type: ignore[method-assign]  # of this one block


# Functions of ours, not partials of torch's: torch's compiler looks into a frame of ours alone, and without one compiles nothing.


def whole(forward: Callable[..., Any], *args: Any) -> Any:
    if not torch.compiler.is_compiling() and _graph.taping():  # a generator that is recorded cannot be put back
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_graph.tape)
    return checkpoint(forward, *args, use_reentrant=False)


def selected(forward: Callable[..., Any], *args: Any) -> Any:
    if not torch.compiler.is_compiling() and _graph.taping():  # as above
        context = partial(create_selective_checkpoint_contexts, keep_drawn)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=context)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep))


def keep_drawn(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """As `keep`, and all that is drawn: seeds, and the results of what draws its dropout by itself."""
    return CheckpointPolicy.MUST_SAVE if op._schema.name in KEPT else _graph.drawing(context, op)


def keep(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Whether the result of a call is kept. Attention that draws its dropout by itself is computed again: if it were skipped, what
    is drawn after it would differ from what the forward drew."""
    kept = op._schema.name in KEPT and not draws(op, args, options)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def draws(op: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether this call of attention draws dropout by itself. On a CPU it is drawn beforehand. In a rehearsal where a CPU stands
    for a GPU, it is torch's attention that draws."""
    if op._schema.name == "modelcenter::attention_forward":
        return on_gpu(args[0]) and args[-2] is not None
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | options
    return bool(given.get("dropout_p", 0.0))
