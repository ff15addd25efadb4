"""Adafactor: the second moment of a matrix as a row and a column. Shazeer and Stern, 2018.

At step t, of a gradient g, with b = 1 - t^-0.8 and s = g^2 + 1e-30:

    R = b R + (1 - b) mean of s over a row          C = b C + (1 - b) mean of s over a column
    V = R C / mean(R)                               of what is no matrix, V = b V + (1 - b) s
    u = g / sqrt(V)                                 u = u / max(1, rms(u))
    p = p (1 - lr decay) - max(0.001, rms(p)) min(lr, 1 / sqrt(t)) u

transformers' Adafactor computes this, and torch.optim.Adafactor with eps=(1e-30, 1e-3). Without, torch takes no mean(R) below
1.2e-7 (in fp32). The gradients of a large model are smaller than its root, 3e-4: u is then too long before it is cut to rms 1.

R and C are of the whole matrix, and every rank has all of them, which are few numbers. What each rank's part of a matrix adds to
them is summed over the ranks, once a step for all parameters, and so are the sizes of the updates.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import local as part_of
from ..names import Region, Shape, everything
from ..parallel.ranks import ALONE, Ranks
from .adamw import evaluated, gradient, local
from .clipped import Clipped, scaled

DECAY, LEAST = -0.8, 1e-3  # the exponent of t, and the size of a weight that counts as this at least
TINY = 1e-30  # is added to squares: of rows without a gradient too there is a root to divide by


class Adafactor(Clipped):
    """State as torch's: `step`, and `row_var` and `col_var`, or `variance`. A step leaves the update in place of each gradient.

    `shapes`: of parameters that have rows which only pad them, the shape without; such rows are no part of a mean."""

    whole = ("row_var", "col_var")  # what every rank has all of

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, *, shapes: Mapping[Tensor, Shape] | None = None,
                 ranks: Ranks = ALONE) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.shapes, self.ranks = shapes or {}, ranks
        self.regions: dict[Tensor, Region] = {}

    def region(self, p: Tensor) -> Region:
        """Where this rank's part of a parameter stands in it, without rows that only pad it."""
        if p not in self.regions:
            ends = self.shapes.get(p, tuple(p.shape))
            self.regions[p] = tuple(slice(min(r.start, n), min(r.stop, n)) for r, n in zip(part_of(p)[0], ends, strict=True))
        return self.regions[p]

    def mine(self, p: Tensor, x: Tensor | None) -> Tensor:
        """Of `x`, which is cut as `p` is, what this rank has, without such rows; to be changed in place."""
        assert x is not None
        return local(x)[tuple(slice(0, r.stop - r.start) for r in self.region(p))]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None) -> Any:
        loss = evaluated(closure)
        if clip is not None and not scaled(self.param_groups, clip):
            return loss
        each = [(p, group) for group in self.param_groups for p in group["params"] if gradient(p) is not None]
        params = [p for p, _ in each]
        found = self.ranks.added([self.sums(p) for p in params], params)
        sizes = [self.update(p, sums) for p, sums in zip(params, found, strict=True)]
        lengths = torch.stack(self.ranks.added(sizes, params)).tolist() if params else []
        weights = torch.stack([sums[0] for sums in found]).tolist() if params else []
        for (p, group), size, weight in zip(each, lengths, weights, strict=True):
            many = max(1, torch.Size(self.shapes.get(p, p.shape)).numel())
            rate = min(group["lr"], float(self.state[p]["step"]) ** -0.5) * max(LEAST, (weight / many) ** 0.5)
            x = self.mine(p, p)
            x.mul_(1 - group["lr"] * group["weight_decay"])
            x.add_(self.mine(p, p.grad), alpha=-rate / max(1.0, (size / many) ** 0.5))
        return loss

    def sums(self, p: Tensor) -> Tensor:
        """What this part adds to the sum of the squares of `p`, and, of a matrix, to those of its gradient by row and by column."""
        kind = torch.promote_types(p.dtype, torch.float32)
        out = [torch.linalg.vector_norm(self.mine(p, p), dtype=kind).square().view(1)]
        if p.dim() > 1:
            region, shape = self.region(p), self.shapes.get(p, tuple(p.shape))
            squares = self.mine(p, p.grad).to(kind).square()
            for at, dim in ((region[:-1], -1), ((*region[:-2], region[-1]), -2)):
                total = squares.new_zeros(shape[:-1] if dim == -1 else (*shape[:-2], shape[-1]))
                total[at] = squares.sum(dim)
                out.append(total.flatten())
        return torch.cat(out)

    def update(self, p: Tensor, sums: Tensor) -> Tensor:
        """Take the squares into the moments and put the update in place of the gradient; the sum of its squares."""
        state, g, shape = self.state[p], self.mine(p, p.grad), self.shapes.get(p, tuple(p.shape))
        if not state:
            state["step"] = torch.zeros(())
            if p.dim() > 1:
                state["row_var"] = sums.new_zeros((*shape[:-1], 1))
                state["col_var"] = sums.new_zeros((*shape[:-2], 1, shape[-1]))
            else:
                state["variance"] = torch.zeros_like(p, dtype=sums.dtype)
        state["step"] += 1
        new = float(state["step"]) ** DECAY
        if p.dim() > 1:
            rows, columns = sums[1:].split((state["row_var"].numel(), state["col_var"].numel()))
            row, col = state["row_var"], state["col_var"]
            row.lerp_(rows.view_as(row) / shape[-1] + TINY, new)
            col.lerp_(columns.view_as(col) / shape[-2] + TINY, new)
            region, every = self.region(p), everything((1,))
            share = row[(*region[:-1], *every)] / row.mean(-2, keepdim=True)[region[:-2]]
            u = share.rsqrt() * col[(*region[:-2], *every, region[-1])].rsqrt() * g  # a root of each: fp32 may lack their product
        else:
            own = self.mine(p, state["variance"])
            u = own.lerp_(g.to(own.dtype).square() + TINY, new).rsqrt().mul_(g)
        g.copy_(u)
        size: Tensor = torch.linalg.vector_norm(u).square()
        return size
