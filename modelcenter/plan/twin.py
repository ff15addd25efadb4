"""A stand-in for a model in a rehearsal: the same modules with other tensors, with fewer blocks, or as on one tensor-parallel
rank."""

import copy
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layers import Adapted, QuantizedLinear, Stack
from ..parallel.blocks import blocks

CUT = {"column": 0, "logits": 0, "vocab": 0, "row": 1, "heads": 1}  # the dimension of a weight that the words of `tp` tables cut


def twin(model: nn.Module, device: torch.device, fake: FakeTensorMode, *, keep: Mapping[int, int] | None = None, ranks: int = 1,
         dtype: torch.dtype | None = None) -> Any:
    """The model with tensors of `fake` on `device` in place of its own, tied like these, and not compiled. `keep`: how many blocks
    of which stacks to keep. `ranks`: make it the model of one of this many tensor-parallel ranks. `dtype`: that of its
    floating-point parameters."""
    memo: dict[int, Any] = {}
    cut = dict(shards(model, ranks)) if ranks > 1 else {}
    words = [getattr(module, child) for module, child, _ in tables(model)] if ranks > 1 else []
    numbers = [part for part in words if isinstance(part, Tensor)]  # ALiBi's slopes are neither parameter nor buffer
    out: set[int] = set()
    kept: dict[int, list[nn.Module]] = {}
    for i, stack in enumerate(m for m in model.modules() if isinstance(m, Stack)):
        if keep and i in keep:
            all_ = list(stack.blocks)
            kept[i] = [*all_[: keep[i] - 1], all_[-1]]
            left = {id(block) for block in kept[i]}
            out |= {id(t) for block in all_ if id(block) not in left for t in (*block.parameters(), *block.buffers())}
    with fake:
        for tensor in dict.fromkeys((*model.parameters(), *model.buffers(), *numbers)):
            if id(tensor) in out:
                continue
            shape = cut.get(id(tensor), tensor.shape)
            kind = dtype if dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else tensor.dtype
            stride = tensor.stride() if shape == tensor.shape else torch.empty(shape, device="meta").stride()
            new = torch.empty_strided(shape, stride, dtype=kind, device=device)
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
            memo[id(tensor)].part = id(tensor) in cut
    for i, stack in enumerate(m for m in model.modules() if isinstance(m, Stack)):
        if i in kept:
            memo[id(stack.blocks)] = nn.ModuleList(copy.deepcopy(kept[i], memo))
    other = copy.deepcopy(model, memo)
    for block in blocks(other):
        vars(block).pop("forward", None)  # what the model recomputes is no matter of the twin's
    for module, child, style in tables(other) if ranks > 1 else ():
        part = getattr(module, child)
        if style == "row" and isinstance(part, QuantizedLinear):
            part.in_features //= ranks
    return other


def shards(model: nn.Module, ranks: int) -> Iterator[tuple[int, torch.Size]]:
    """The shape that each tensor has on one of `ranks`, by the tensor's id, according to the layers' `tp` tables."""
    for module, child, style in tables(model):
        part = getattr(module, child)
        if isinstance(part, Tensor):
            yield id(part), torch.Size((ceil(part.size(0) / ranks), *part.shape[1:]))
            continue
        codes = (part.codes, part.scales) if isinstance(part, QuantizedLinear) else ()
        for p in (*part.parameters(recurse=False), *codes):
            if p.dim() > CUT[style]:
                yield id(p), torch.Size(ceil(n / ranks) if i == CUT[style] else n for i, n in enumerate(p.shape))


def tables(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, child, word) for each row of all `tp` tables; for an adapted layer, for each of its sharded parts."""
    for module in model.modules():
        for child, style in getattr(module, "tp", {}).items():
            part = getattr(module, child, None)
            if isinstance(part, Adapted):
                inside = ("base", "b", "magnitude") if style == "column" else ("base", "a")
                yield from ((part, inner, style) for inner in inside if getattr(part, inner) is not None)
            elif part is not None:
                yield module, child, style
