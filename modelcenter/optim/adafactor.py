"""Adafactor: the second moment of a matrix as a row and a column. Shazeer and Stern, 2018.

At step t, of a gradient g, with b = 1 - t^-0.8 and s = g^2 + 1e-30:

    R = b R + (1 - b) mean of s over a row          C = b C + (1 - b) mean of s over a column
    V = R C / mean(R)                               of what is no matrix, V = b V + (1 - b) s
    u = g / sqrt(V)                                 u = u / max(1, rms(u))
    p = p (1 - lr decay) - max(0.001, rms(p)) min(lr, 1 / sqrt(t)) u

torch.optim.Adafactor with eps=(1e-30, 1e-3) computes this. Without, torch takes no mean(R) below 1.2e-7 (in fp32). The gradients of
a large model are smaller than its root, 3e-4: u is then too long before it is cut to rms 1. transformers' Adafactor with
relative_step=False and scale_parameter=True computes it where nothing decays and lr is at most 1 / sqrt(t): its rate has no such
bound, and its decay is lr max(0.001, rms(p)) as well.

R and C are of the whole matrix, and every rank has all of them, which are few numbers. What each rank's part of a matrix adds to
them is summed over the ranks, once a step for all parameters, and so are the sizes of the updates. Parameters of one shape are
updated together. No number is waited for: the sizes are of the device, which alone needs them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import local as part_of
from ..names import Region, Shape
from ..ops._mode import on_gpu
from ..parallel.ranks import ALONE, Ranks
from .adamw import local
from .clipped import Clipped, Some, shifted, wide
from .stacks import stacks

DECAY, LEAST = -0.8, 1e-3  # the exponent of t, and the size of a weight that counts as this at least
TINY = 1e-30  # is added to squares: of rows without a gradient too there is a root to divide by


class Adafactor(Clipped):
    """State as torch's: `step`, and `row_var` and `col_var`, or `variance`.

    `shapes`: of parameters that have rows which only pad them, the shape without; such rows are no part of a mean."""

    whole = ("row_var", "col_var")  # what every rank has all of
    fixed = {**Clipped.fixed, "beta2_decay": DECAY, "d": 1.0}

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, *, shapes: Mapping[Tensor, Shape] | None = None,
                 ranks: Ranks = ALONE) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "eps": (TINY, LEAST), "foreach": None})  # as torch's
        self.shapes, self.ranks = shapes or {}, ranks
        self.regions: dict[Tensor, Region] = {}

    def region(self, p: Tensor) -> Region:
        """Where this rank's part of a parameter stands in it, without rows that only pad it."""
        if p not in self.regions:
            ends = self.shape(p)
            self.regions[p] = tuple(slice(min(r.start, n), min(r.stop, n)) for r, n in zip(part_of(p)[0], ends, strict=True))
        return self.regions[p]

    def shape(self, p: Tensor) -> Shape:
        return self.shapes.get(p, tuple(p.shape))

    def mine(self, one: Tensor, each: Sequence[Tensor]) -> list[Tensor]:
        """Of `each`, which are of the shape of the parameter `one` and cut as it is, what this rank has, without such rows; to be
        changed in place."""
        parts, ends = [local(x) for x in each], tuple(r.stop - r.start for r in self.region(one))
        return parts if parts[0].shape == ends else [part[tuple(slice(0, n) for n in ends)] for part in parts]

    def stacks(self, some: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        return stacks(some, self.ranks, self.shape)

    def numbers(self, some: list[Tensor], group: dict[str, Any]) -> list[float]:
        steps = [float(self.state[p]["step"]) + 1 for p in some]
        return [1 - group["lr"] * group["weight_decay"], *(t**DECAY for t in steps), *(-min(group["lr"], t**-0.5) for t in steps)]

    def work(self, each: list[Some], numbers: list[Tensor]) -> None:
        cut = [bool(self.ranks.cuts(some[0])) for some, _ in each]
        for one, its, parts in zip(each, numbers, cut, strict=True):
            if not parts:
                self.updated([one], [its])
        if any(cut):  # what ranks have parts of, whose sums are sent once for all
            self.updated(list(compress(each, cut)), list(compress(numbers, cut)))

    def updated(self, each: list[Some], numbers: list[Tensor]) -> None:
        """Update these stacks. Of one alone the gradients are gathered once, and become the steps; of several, which would take
        as much memory as there are gradients, each time they are needed."""
        ones, alone, mine = [some[0] for some, _ in each], len(each) == 1, [(n[0], *n[1:].chunk(2)) for n in numbers]
        kept = [self.gradients(some) for some, _ in each if alone]

        def grads(some: Sequence[Tensor]) -> Tensor:
            return kept[0] if alone else self.gradients(some)

        sums = self.ranks.added([self.sums(some, grads(some)) for some, _ in each], ones)
        roots = [self.moved(some, grads(some), total, new)
                 for (some, _), total, (_, new, _) in zip(each, sums, mine, strict=True)]  # fmt: skip
        lengths = []
        for (some, _), by in zip(each, roots, strict=True):
            steps, rest = product(grads(some), by)
            lengths.append(squares(steps, *rest))
        lengths = self.ranks.added(lengths, ones)
        for (some, group), total, by, length, (decay, _, rates) in zip(each, sums, roots, lengths, mine, strict=True):
            one, weights = some[0], self.mine(some[0], some)
            many = max(1, torch.Size(self.shape(one)).numel())
            size, long = ((of / many).sqrt() for of in (total[:, 0], length))
            scale = upright(rates.to(size.dtype) * size.clamp(min=LEAST) / long.clamp(min=1), one)
            steps, rest = (steps, rest) if alone else product(grads(some), by)
            shifted(weights, steps.unbind(), group, decay.to(size.dtype), (rest[0] * scale if rest else scale).unbind())

    def kind(self, p: Tensor) -> torch.dtype:
        return wide(p)

    def stepped(self, some: list[Tensor]) -> None:
        torch._foreach_add_([self.state[p]["step"] for p in some], 1)

    def make(self, p: Tensor) -> None:
        state, shape, kind = self.state[p], self.shape(p), self.kind(p)
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")  # read at each step
        if p.dim() > 1:
            state["row_var"] = torch.zeros((*shape[:-1], 1), dtype=kind, device=p.device)
            state["col_var"] = torch.zeros((*shape[:-2], 1, shape[-1]), dtype=kind, device=p.device)
        else:
            state["variance"] = torch.zeros_like(p, dtype=kind)

    def gradients(self, some: Sequence[Tensor]) -> Tensor:
        """This rank's part of those of parameters of one shape (k ...); not to be changed."""
        grads = self.mine(some[0], [p.grad for p in some if p.grad is not None])
        return (torch.stack(grads) if len(grads) > 1 else grads[0][None]).to(wide(some[0]))

    def sums(self, some: Sequence[Tensor], grads: Tensor) -> Tensor:
        """What these parts (k ...) add to the sum of the squares of each parameter and, of a matrix, to those of its gradient by
        row and by column."""
        one = some[0]
        out = [torch.stack(torch._foreach_norm(self.mine(one, some), dtype=wide(one))).square()[:, None]]
        if one.dim() > 1:
            region, shape = self.region(one), self.shape(one)
            for at, dim in ((region[:-1], -1), ((*region[:-2], region[-1]), -2)):
                total = grads.new_zeros((len(some), *(shape[:-1] if dim == -1 else (*shape[:-2], shape[-1]))))
                total[:, *at] = torch.linalg.vector_norm(grads, dim=dim).square()
                out.append(total.flatten(1))
        return torch.cat(out, 1)

    def moved(self, some: Sequence[Tensor], grads: Tensor, sums: Tensor, new: Tensor) -> list[Tensor]:
        """Take the squares into the moments, of which they are a share of `new` (k) then: what the gradients (k ...) are to be
        multiplied by, one factor after the other."""
        one, states = some[0], [self.state[p] for p in some]
        if one.dim() < 2:
            kept = self.mine(one, [state["variance"] for state in states])
            return [taken(kept, grads.square() + TINY, new).rsqrt()]
        found, region, shape = [], self.region(one), self.shape(one)
        rows, columns = sums[:, 1:].split([states[0][name].numel() for name in self.whole], 1)
        for name, total, many in (("row_var", rows, shape[-1]), ("col_var", columns, shape[-2])):
            kept = [state[name] for state in states]
            found.append(taken(kept, total.view(-1, *kept[0].shape) / many + TINY, new))
        row, col = found
        share = row[:, *region[:-1]] / row.mean(-2, keepdim=True)[:, *region[:-2]]
        return [share.rsqrt(), col[:, *region[:-2], :, region[-1]].rsqrt()]  # a root of each: fp32 may lack their product


def upright(x: Tensor, one: Tensor) -> Tensor:
    """A number each (k) for a stack (k ...) of tensors like `one`."""
    return x.view(-1, *(1,) * one.dim())


def taken(kept: list[Tensor], come: Tensor, share: Tensor) -> Tensor:
    """Means (k ...) that go on in `kept`: a `share` (k) of each is of what has come (k ...)."""
    found = torch.stack(kept)
    found.lerp_(come, upright(share.to(found.dtype), kept[0]))
    torch._foreach_copy_(kept, list(found.unbind()))
    return found


def product(grads: Tensor, by: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Gradients (k ...) times the first of `by`, and those that they are still to be multiplied by: on a GPU, where each pass over
    a matrix counts. A CPU goes down columns slowly."""
    out, rest = grads * by[0], by[1:]
    if on_gpu(out):
        return out, rest
    for more in rest:
        out.mul_(more)
    return out, ()


def squares(steps: Tensor, columns: Tensor | None = None) -> Tensor:
    """The sum of the squares of each of a stack (k ...), times a number for each column if there are such."""
    by_column = steps if columns is None else torch.linalg.vector_norm(steps, dim=-2, keepdim=True) * columns
    found: Tensor = torch.linalg.vector_norm(by_column.reshape(len(by_column), by_column[0].numel()), dim=1)
    return found.square()
