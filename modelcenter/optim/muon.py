"""Muon: momentum, made orthogonal, for the matrices of blocks. Jordan et al., 2024, as torch.optim.Muon computes it.

    m = momentum m + (1 - momentum) g
    p = p (1 - lr decay) - lr 0.2 sqrt(max(out, in)) orthogonal((1 - momentum) g + momentum m)

Steps are as long as AdamW's (Liu et al., 2025, "Muon is Scalable"), so that one rate serves both.

An iteration needs the whole matrix. On several ranks each matrix is made orthogonal on one of them: its parts are sent there in
bf16, in which the iteration begins anyway, and the parts of the result are sent back.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import local as part_of
from ..names import Region
from ..parallel.ranks import ALONE, Ranks
from .adamw import AdamW, evaluated, gradient, local
from .clipped import scaled

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's: steepest at zero, and no singular value ends far from one
ITERATIONS = 5


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, roughly, in bf16: Newton's and Schulz' iteration."""
    a, b, c = QUINTIC
    tall = x.size(0) > x.size(1)
    y = x.bfloat16()
    y = y.T if tall else y
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


class Muon(AdamW):
    """Momentum made orthogonal for groups that say `muon`, AdamW for the others."""

    def __init__(self, params: Any, *, momentum: float = 0.95, ranks: Ranks = ALONE, **options: Any):
        super().__init__(params, **options)
        self.ranks = ranks
        self.regions: dict[Tensor, list[tuple[Region, bool]]] = {}
        for group in self.param_groups:
            if group["muon"]:
                group["momentum"] = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None) -> Any:
        loss = evaluated(closure)
        both = self.param_groups  # of this moment: a state dict that is loaded makes them anew
        mine = [group for group in both if group["muon"]]
        if clip is not None and not scaled(mine, clip):
            return loss
        try:
            self.param_groups = [group for group in both if not group["muon"]]
            super().step(clip=clip)
        finally:
            self.param_groups = both
        groups = {p: group for group in mine for p in group["params"] if gradient(p) is not None}
        for p, direction in self.orthogonal({p: self.moved(p, group["momentum"]) for p, group in groups.items()}):
            lr, x = groups[p]["lr"], local(p)
            x.mul_(1 - lr * groups[p]["weight_decay"])
            x.add_(direction, alpha=-lr * 0.2 * max(p.shape) ** 0.5)
        return loss

    def moved(self, p: Tensor, momentum: float) -> Tensor:
        """Nesterov's momentum of this rank's part, the gradient taken in."""
        state, g = self.state[p], local(p.grad).to(p.dtype)  # type: ignore[arg-type]  # one without a gradient is left out before
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        m = local(state["momentum_buffer"]).lerp_(g, 1 - momentum)
        return g.lerp(m, momentum)

    def orthogonal(self, parts: dict[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, this rank's part of its matrix made orthogonal), of the parts of all matrices."""
        cut = sorted((p for p in parts if self.ranks.cuts(p)), key=lambda p: -p.numel())  # those of one round are alike
        yield from ((p, orthogonal(part)) for p, part in parts.items() if not self.ranks.cuts(p))
        if not self.regions.keys() >= set(cut):
            self.regions |= self.held(cut)
        for start in range(0, len(cut), self.ranks.size):
            some = cut[start : start + self.ranks.size]
            yield from zip(some, self.round(some, [parts[p].bfloat16() for p in some]), strict=True)

    def held(self, cut: Sequence[Tensor]) -> dict[Tensor, list[tuple[Region, bool]]]:
        """Of each parameter by rank: the part of it that is there, and whether that rank is the first of those that have it."""
        told = [[*(n for r in part_of(p)[0] for n in (r.start, r.stop)), int(self.ranks.owns(p))] for p in cut]
        ranks = [row.view(len(cut), 5).tolist() for row in self.ranks.gathered(torch.tensor(told).flatten())]
        return {p: [((slice(row[k][0], row[k][1]), slice(row[k][2], row[k][3])), bool(row[k][4])) for row in ranks]
                for k, p in enumerate(cut)}

    def round(self, some: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """One matrix for each rank at most: the parts (bf16) are sent to who has the matrix, those of the result come back."""
        me, size = self.ranks.rank, self.ranks.size
        held = [self.regions[p] for p in some]
        none = parts[0].new_empty(0)
        own = held[me] if me < len(some) else []
        come = [extent(region) if first else 0 for region, first in own] or [0] * size
        sent = [part.flatten() if held[k][me][1] else none for k, part in enumerate(parts)]
        found = self.ranks.exchanged(sent + [none] * (size - len(some)), come)
        back = [none] * size
        if own:
            matrix = none.new_empty(some[me].shape)
            for (region, first), piece in zip(own, found, strict=True):
                if first:
                    matrix[region] = piece.view_as(matrix[region])
            matrix = orthogonal(matrix)
            back = [matrix[region].flatten() for region, _ in own]
        mine = [extent(held[k][me][0]) if k < len(some) else 0 for k in range(size)]
        return [piece.view_as(part) for piece, part in zip(self.ranks.exchanged(back, mine), parts, strict=False)]


def extent(region: Region) -> int:
    """How many elements a part has."""
    return torch.Size(r.stop - r.start for r in region).numel()
