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

An update reads its gradients three times: for sums of squares, for the size of u, and for u itself. On a GPU each of these passes
over matrices is a kernel (csrc/adafactor.cu).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import local as part_of
from ..names import Region, Shape
from ..ops._kernels import FLOATS, call, served
from ..ops._mode import on_gpu
from ..parallel.ranks import ALONE, Ranks
from .adamw import local
from .clipped import Clipped, Some, gradients, shifted, wide
from .stacks import SCRATCH, stacks

DECAY, LEAST = -0.8, 1e-3  # the exponent of t, and the size of a weight that counts as this at least
TINY = 1e-30  # is added to squares: of rows without a gradient too there is a root to divide by
WIDTH, BAND, BANDS = 512, 64, 256  # csrc/adafactor.cu
ROOM = {True: 64 * SCRATCH[True], False: 0}  # kernels take less than a 64th of what passes in torch do


class Adafactor(Clipped):
    """State as torch's: `step`, and `row_var` and `col_var`, or `variance`. Settings other than `fixed`, such as the eps that torch
    takes where none is given, are refused.

    `shapes`: of parameters that have rows which only pad them, the shape without; such rows are no part of a mean."""

    whole = ("row_var", "col_var")  # what every rank has all of
    beside = ("shapes", "regions")
    fixed = {**Clipped.fixed, "beta2_decay": DECAY, "d": 1.0, "eps": (TINY, LEAST)}

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, *, shapes: Mapping[Tensor, Shape] | None = None,
                 ranks: Ranks = ALONE) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "foreach": None})  # as torch's
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
        quick = set(filter(has_kernels, some))
        yield from stacks([p for p in some if p in quick], self.ranks, self.shape, ROOM)
        yield from stacks([p for p in some if p not in quick], self.ranks, self.shape)

    def numbers(self, some: list[Tensor], group: dict[str, Any]) -> list[float]:
        steps = [float(self.state[p]["step"]) + 1 for p in some]
        return [1 - group["lr"] * group["weight_decay"], *(t**DECAY for t in steps), *(-min(group["lr"], t**-0.5) for t in steps)]

    def apply(self, each: list[Some], lengths: list[int], numbers: Tensor, factor: Tensor | None = None) -> None:
        """Kernels multiply by `factor` what they read."""
        plain = [some for some, _ in each if not has_kernels(some[0])]
        if factor is not None and plain:
            torch._foreach_mul_([grad for some in plain for grad in gradients(some)], factor)
        self.work(each, list(numbers.split(lengths)), factor)

    def work(self, each: list[Some], numbers: list[Tensor], factor: Tensor | None = None) -> None:
        cut = [bool(self.ranks.cuts(some[0])) for some, _ in each]
        for one, its, parts in zip(each, numbers, cut, strict=True):
            if not parts:
                self.updated([one], [its], factor)
        if any(cut):  # what ranks have parts of, whose sums are sent once for all
            self.updated(list(compress(each, cut)), list(compress(numbers, cut)), factor)

    def updated(self, each: list[Some], numbers: list[Tensor], factor: Tensor | None) -> None:
        """Update these stacks."""
        ones = [some[0] for some, _ in each]
        kinds = [partial(Kernels, factor=factor) if has_kernels(one) else partial(Passes, keeps=len(each) == 1) for one in ones]
        passes = [kind(self.mine(some[0], some), self.mine(some[0], [p.grad for p in some if p.grad is not None]))
                  for kind, (some, _) in zip(kinds, each, strict=True)]  # fmt: skip
        mine = [(n[0], *n[1:].chunk(2)) for n in numbers]
        sums = self.ranks.added([self.placed(one, its.sums()) for one, its in zip(ones, passes, strict=True)], ones)
        roots = [self.moved(some, its, total, new)
                 for (some, _), its, total, (_, new, _) in zip(each, passes, sums, mine, strict=True)]  # fmt: skip
        lengths = self.ranks.added([its.length(by) for its, by in zip(passes, roots, strict=True)], ones)
        for one, (_, group), its, total, by, length, (decay, _, rates) in zip(
            ones, each, passes, sums, roots, lengths, mine, strict=True
        ):
            many = max(1, torch.Size(self.shape(one)).numel())
            size, long = ((of / many).sqrt() for of in (total[:, 0], length))
            its.step(by, rates.to(size.dtype) * size.clamp(min=LEAST) / long.clamp(min=1), decay.to(size.dtype), group)

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

    def placed(self, one: Tensor, sums: list[Tensor]) -> Tensor:
        """What these parts add to the sum of the squares of each parameter (k) and, of a matrix, to those of its gradient by row
        and by column, (k, 1 + rows + columns) in all."""
        weights, *others = sums
        out = [weights[:, None]]
        for found, dim in zip(others, (-1, -2), strict=False):  # none of what is no matrix
            region, shape = list(self.region(one)), list(self.shape(one))
            del region[dim], shape[dim]
            total = found.new_zeros((len(found), *shape)) if tuple(shape) != found.shape[1:] else found
            if total is not found:
                total[:, *region] = found
            out.append(total.flatten(1))
        return torch.cat(out, 1)

    def moved(self, some: Sequence[Tensor], passes: "Passes", sums: Tensor, new: Tensor) -> list[Tensor]:
        """Take the squares into the moments, of which they are a share of `new` (k) then: what the gradients (k ...) are to be
        multiplied by, one factor after the other."""
        one, states = some[0], [self.state[p] for p in some]
        if one.dim() < 2:
            kept = self.mine(one, [state["variance"] for state in states])
            return [taken(kept, passes.squares() + TINY, new).rsqrt()]
        found, region, shape = [], self.region(one), self.shape(one)
        rows, columns = sums[:, 1:].split([states[0][name].numel() for name in self.whole], 1)
        for name, total, many in (("row_var", rows, shape[-1]), ("col_var", columns, shape[-2])):
            kept = [state[name] for state in states]
            found.append(taken(kept, total.view(-1, *kept[0].shape) / many + TINY, new))
        row, col = found
        share = row[:, *region[:-1]] / row.mean(-2, keepdim=True)[:, *region[:-2]]
        return [share.rsqrt(), col[:, *region[:-2], :, region[-1]].rsqrt()]  # a root of each: fp32 may lack their product


class Passes:
    """Those of an update over parameters of one shape, and their gradients (k ...), which are not changed. `keeps`: gradients are
    gathered once, and become the steps; without, as often as they are needed, for of all stacks at once they were as much memory
    again as gradients are."""

    def __init__(self, params: list[Tensor], grads: list[Tensor], keeps: bool) -> None:
        self.params, self.grads, self.keeps = params, grads, keeps
        self.kind = wide(params[0])
        self.kept: Tensor | None = None

    def gathered(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        grads = (torch.stack(self.grads) if len(self.grads) > 1 else self.grads[0][None]).to(self.kind)
        self.kept = grads if self.keeps else None
        return grads

    def squares(self) -> Tensor:
        return self.gathered().square()

    def sums(self) -> list[Tensor]:
        """Of the squares of each parameter (k) and, of matrices, of their gradients by row (k, rows) and by column (k, columns)."""
        found = [torch.stack(torch._foreach_norm(self.params, dtype=self.kind))]
        if self.params[0].dim() > 1:
            grads = self.gathered()
            found += [torch.linalg.vector_norm(grads, dim=dim) for dim in (-1, -2)]
        return [x.square() for x in found]

    def steps(self, by: Sequence[Tensor]) -> Tensor:
        """The gradients times all of `by`."""
        found = self.gathered() * by[0]
        for more in by[1:]:
            found.mul_(more)
        return found

    def length(self, by: Sequence[Tensor]) -> Tensor:
        """The sum of the squares of each step (k)."""
        steps = self.steps(by)
        self.kept = steps if self.keeps else None
        found: Tensor = torch.linalg.vector_norm(steps.reshape(len(steps), steps[0].numel()), dim=1)
        return found.square()

    def step(self, by: Sequence[Tensor], scale: Tensor, decay: Tensor, group: dict[str, Any]) -> None:
        """Take the steps, each times its `scale` (k)."""
        steps = self.steps(by) if self.kept is None else self.kept
        shifted(self.params, steps.unbind(), group, decay, upright(scale, self.params[0]).unbind())


class Kernels(Passes):
    """Of matrices, by kernels; gradients are times `factor`."""

    def __init__(self, params: list[Tensor], grads: list[Tensor], factor: Tensor | None) -> None:
        super().__init__(params, [g.contiguous() for g in grads], keeps=False)
        self.factor = factor if factor is None else factor.float()
        rows, columns = params[0].shape
        self.bands, self.across = min(max(-(-rows // BAND), 1), BANDS), max(-(-columns // WIDTH), 1)

    def numbers(self, *shape: int) -> Tensor:
        return torch.empty(len(self.params), *shape, dtype=self.kind, device=self.params[0].device)

    def sums(self) -> list[Tensor]:
        rows, columns = self.params[0].shape
        found = self.numbers(1 + rows + columns)
        scratch = self.numbers(self.across * rows + self.bands * columns + self.bands * self.across)
        call("adafactor_sums", found, self.grads, self.params, rows, columns, scratch, self.factor)
        return [found[:, 0], *found[:, 1:].split([rows, columns], 1)]

    def length(self, by: Sequence[Tensor]) -> Tensor:
        found = self.numbers()
        call("adafactor_length", found, self.grads, *flat(by), self.numbers(self.bands * self.across), self.factor)
        return found

    def step(self, by: Sequence[Tensor], scale: Tensor, decay: Tensor, group: dict[str, Any]) -> None:
        call("adafactor_step", decay, self.params, self.grads, *flat(by), scale, self.factor)


def has_kernels(p: Tensor) -> bool:
    """Whether there are kernels for an update of `p`, which has a gradient; the same on all ranks."""
    own, grad = local(p), p.grad
    alike = grad is not None and grad.dtype == p.dtype and p.dtype in FLOATS
    return alike and p.dim() == 2 and on_gpu(own) and served(own, p.dtype) and own.is_contiguous()


def flat(by: Sequence[Tensor]) -> list[Tensor]:
    """(k, rows, 1) and (k, 1, columns) as (k, rows) and (k, columns)."""
    return [x.flatten(1).contiguous() for x in by]


def upright(x: Tensor, one: Tensor) -> Tensor:
    """A number each (k) for a stack (k ...) of tensors like `one`."""
    return x.view(-1, *(1,) * one.dim())


def taken(kept: list[Tensor], come: Tensor, share: Tensor) -> Tensor:
    """Means (k ...) that go on in `kept`: a `share` (k) of each is of what has come (k ...)."""
    found = torch.stack(kept)
    found.lerp_(come, upright(share.to(found.dtype), kept[0]))
    torch._foreach_copy_(kept, list(found.unbind()))
    return found
