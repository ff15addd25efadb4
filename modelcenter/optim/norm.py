"""The norm of gradients on any mesh, for your own training loop; `modelcenter train` clips by itself."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refuse
from .adamw import gradient, local, squares


@torch.no_grad()
def clip_grad_norm_(parameters: nn.Module | Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False) -> Tensor:
    """Scale the gradients of `parameters` (a model, tensors, or one tensor) in place, so that their total 2-norm is at most
    `max_norm`, and return the norm before scaling (float32), as torch.nn.utils.clip_grad_norm_ does.

    torch's version needs parameters that are all sharded over one mesh; this one also accepts models of which tensor parallelism
    has split only some parameters, and offloaded ones. All ranks must call it. With `error_if_nonfinite` a norm that is not finite
    raises RuntimeError and scales nothing. Errors: `InputError` for a `norm_type` other than 2, and for a limit below 0.
    """
    if norm_type != 2:
        refuse("clip_grad_norm_", "norm_type", repr(norm_type), "2: no other is offered")
    if not max_norm >= 0:
        refuse("clip_grad_norm_", "max_norm", repr(max_norm), "a number from 0; inf: nothing is clipped")
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    found = [g for p in ([given] if isinstance(given, Tensor) else list(given)) if (g := gradient(p)) is not None]
    if not found:
        return torch.zeros(())
    norm = total(found).sqrt().float()
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(norm)}; nothing was scaled")
    if max_norm < math.inf:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for device in dict.fromkeys(g.device for g in found):
            torch._foreach_mul_([local(g) for g in found if g.device == device], factor.to(device))
    return norm


def total(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of all squares (float64), of the parts that other ranks have too. A collective."""
    lists: dict[tuple[Any, tuple[int, ...], torch.device, torch.dtype], list[Tensor]] = {}
    for g in gradients:
        sharded: Any = g
        cut = tuple(k for k, place in enumerate(getattr(sharded, "placements", ())) if not place.is_replicate())
        key = sharded.device_mesh if cut else None, cut, g.device, g.dtype
        lists.setdefault(key, []).append(local(g).contiguous())
    parts = []
    for (mesh, cut, _, _), some in lists.items():
        part = squares(some)
        for dimension in cut:
            torch.distributed.all_reduce(part, group=mesh.get_group(dimension))
        parts.append(part)
    return torch.stack([part.view(()).to(parts[0].device) for part in parts]).sum()
