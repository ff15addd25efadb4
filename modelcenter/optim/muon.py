"""Muon: orthogonalised momentum, for the matrices of blocks. Jordan et al., 2024, as torch.optim.Muon computes it.

    m = momentum m + (1 - momentum) g
    p = p (1 - lr decay) - lr 0.2 sqrt(max(out, in)) orthogonal((1 - momentum) g + momentum m)

Steps are as long as AdamW's (Liu et al., 2025, "Muon is Scalable"), so that one learning rate serves both.

Matrices of one shape are orthogonalised together, in batched products. An iteration needs the whole matrix. On several ranks each
matrix is orthogonalised on one of them: its parts are sent there in bf16, in which the iteration begins anyway, and the parts of
the result are sent back.
"""

from collections.abc import Callable, Iterable, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import local as part_of
from ..errors import refuse
from ..names import Region
from ..parallel.ranks import ALONE, Ranks
from .adamw import AdamW, Later, evaluated, local
from .clipped import Clipped, Run, Some, at_once, gradients, shifted, wide
from .stacks import PRODUCTS, stacks

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at zero, and no singular value ends far from one
ITERATIONS = 5


def orthogonal(x: Tensor) -> Tensor:
    """For matrices (k m n), approximately the nearest ones with orthogonal rows or columns, in bf16: Newton-Schulz iteration."""
    a, b, c = QUINTIC
    tall = x.size(1) > x.size(2)
    y = x.bfloat16()
    y = y.mT if tall else y
    y = y / torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


class Muon(Clipped, AdamW):
    """Orthogonalised momentum for groups of matrices, AdamW for groups with `muon=False`."""

    room = PRODUCTS
    beside = ("held",)
    limits = {**AdamW.limits, "momentum": 1.0}
    fixed = {**AdamW.fixed, "adjust_lr_fn": "match_rms_adamw", "nesterov": True, "ns_steps": ITERATIONS, "ns_coefficients": QUINTIC}

    def __init__(self, params: Any, *, momentum: float = 0.95, ranks: Ranks = ALONE, **options: Any):
        self.own = {"muon": True, "momentum": momentum}
        AdamW.__init__(self, params, **options)
        self.ranks = ranks
        self.held: dict[Tensor, list[tuple[Region, bool]]] = {}

    def checked(self, group: dict[str, Any]) -> dict[str, Any]:
        for p in group["params"]:
            if group["muon"] and p.dim() != 2:
                wanted = "matrices; what else there is in a group with muon=False, whose steps are AdamW's"
                refuse(type(self).__name__, "params", f"one of shape {list(p.shape)}", wanted)
        return super().checked(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None, later: Later | None = None,
             run: Run = at_once) -> Any:
        loss, both = evaluated(closure), self.param_groups  # of this moment: a state dict that is loaded makes them anew
        try:
            self.param_groups = [group for group in both if not group["muon"]]
            unwrap(AdamW.step)(self, clip=clip, later=later)  # which torch makes call an optimizer's hooks: they have been called
        finally:
            self.param_groups = both
        super().step(clip=clip, run=run)
        return loss

    def groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["muon"]]

    def stacks(self, some: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        return stacks(some, self.ranks, room=self.room, dealt=self.ranks.size > 1)

    def make(self, p: Tensor) -> None:
        self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def numbers(self, some: list[Tensor], group: dict[str, Any]) -> list[float]:
        return [1 - group["lr"] * group["weight_decay"], -group["lr"] * 0.2 * max(some[0].shape) ** 0.5]

    def work(self, each: list[Some], numbers: list[Tensor]) -> None:
        for (some, group), mine in zip(each, numbers, strict=True):
            self.turned(some, group, *mine.to(wide(some[0])).unbind())

    def turned(self, some: list[Tensor], group: dict[str, Any], decay: Tensor, rate: Tensor) -> None:
        """Update matrices of one shape."""
        found = self.moved(some, group["momentum"])
        found = self.exchanged(some, found) if self.ranks.size > 1 else orthogonal(found)
        steps = found.to(rate.dtype, memory_format=torch.contiguous_format).mul_(rate)
        shifted([local(p) for p in some], steps.unbind(), group, decay)

    def moved(self, some: Sequence[Tensor], momentum: float) -> Tensor:
        """Nesterov's momentum (k m n, bf16) of this rank's parts of parameters of one shape, the gradients taken in."""
        grads = [g.to(some[0].dtype) for g in gradients(some)]
        moments = [local(self.state[p]["momentum_buffer"]) for p in some]
        torch._foreach_lerp_(moments, grads, 1 - momentum)
        out = grads[0].new_empty((len(some), *grads[0].shape), dtype=torch.bfloat16)
        torch._foreach_copy_(out.unbind(), torch._foreach_lerp(grads, moments, momentum))
        return out

    def exchanged(self, some: Sequence[Tensor], parts: Tensor) -> Tensor:
        """The parts (k ..., bf16) of matrices of one shape that are sharded alike, orthogonalised: the ranks take the matrices in
        turn, the parts are sent to the rank that has the matrix, and those of the result come back."""
        me, size = self.ranks.rank, self.ranks.size
        held = self.held.get(some[0]) or self.holders(some[0])
        many = [len(some[rank::size]) for rank in range(size)]
        sent = [parts[rank::size].flatten()[: None if held[me][1] else 0] for rank in range(size)]
        come = [many[me] * extent(region) * first for region, first in held]
        matrices = parts.new_empty((many[me], *some[0].shape))
        for (region, first), piece in zip(held, self.ranks.exchanged(sent, come), strict=True):
            if first:
                matrices[:, *region] = piece.view_as(matrices[:, *region])
        matrices = orthogonal(matrices)
        back = [matrices[:, *region].flatten() for region, _ in held]
        for rank, piece in enumerate(self.ranks.exchanged(back, [n * extent(held[me][0]) for n in many])):
            parts[rank::size] = piece.view_as(parts[rank::size])
        return parts

    def holders(self, p: Tensor) -> list[tuple[Region, bool]]:
        """For each rank: the part of a parameter that it has, and whether it is the first rank with that part."""
        told = [*(n for r in part_of(p)[0] for n in (r.start, r.stop)), int(self.ranks.owns(p))]
        rows = [row.tolist() for row in self.ranks.gathered(torch.tensor(told, device="cpu"))]
        self.held[p] = [((slice(a, b), slice(c, d)), bool(first)) for a, b, c, d, first in rows]
        return self.held[p]


def extent(region: Region) -> int:
    """The number of elements of a part."""
    return torch.Size(r.stop - r.start for r in region).numel()
