"""Gathers rows from all data-parallel ranks, for losses that compare the rows of a batch with one another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._mode import once
from .ranks import Ranks


class Gathered(torch.autograd.Function):
    """All-gather whose backward sums the gradients that a row gets from the losses of all shares."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks) -> Tensor:
        counts = [int(n) for n in ranks.gathered(torch.tensor([len(rows)]))]
        alike = ranks.size // ranks.shares  # ranks of one share, each with what the others have
        column = range(ranks.rank % alike, ranks.size, alike)
        ctx.counts, ctx.rank = counts, ranks.rank
        ctx.order = [ranks.rank, *(rank for rank in column if rank != ranks.rank)]
        found = [rows.new_empty(max(counts), *rows.shape[1:]) for _ in counts]
        padded = rows.new_zeros(found[0].shape)
        padded[: len(rows)] = rows
        dist.all_gather(found, padded)
        return torch.cat([found[rank][: counts[rank]] for rank in ctx.order])

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        whole = grad.new_zeros(len(ctx.counts), max(ctx.counts), *grad.shape[1:])
        for rank, part in zip(ctx.order, grad.split([ctx.counts[rank] for rank in ctx.order]), strict=True):
            whole[rank, : len(part)] = part
        dist.all_reduce(whole)
        return whole[ctx.rank, : ctx.counts[ctx.rank]], None


@dataclass(frozen=True)
class Gather:
    """The rows (n ...) of this share, followed by those of the others. Every rank must call it."""

    ranks: Ranks

    def __call__(self, rows: Tensor) -> Tensor:
        out: Tensor = Gathered.apply(rows, self.ranks)  # type: ignore[no-untyped-call]  # torch has no types there
        return out

    def __deepcopy__(self, memo: Any) -> Callable[[Tensor], Tensor]:
        """A copy, made for the rehearsal of a step (plan/rehearse.py), communicates with nobody."""
        return alone


def alone(rows: Tensor) -> Tensor:
    """Of one share there are no others."""
    return rows
