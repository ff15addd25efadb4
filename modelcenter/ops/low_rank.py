"""Frozen linear layers with the same input, each with a trained addition of low rank: x W^T + bias + scale dropout(x) A^T B^T.
Hu et al., 2021, "LoRA".

Composed of products and sums, the addition costs little arithmetic and much traffic: a tensor as large as the layer's result is
written, scaled, rounded and added to it, and in the backward the same is done to the gradient of x. Here the thin product is added
to the result as it is formed, and the gradients of x are summed within the products, as in linear.py. The layers draw one mask for
their input, which the backward repeats from its seed: x is kept once, as it came, and nothing else of its size. If x is a gated
activation, not even that is kept: it is computed again as in gated_linear.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import linear as products
from ._mode import autocast_dtype, one_by_one, plain, real, transformed, unseen
from ._op import Op
from .activation import GATED
from .dropout import draw, dropout
from .gated_linear import gradients, writable
from .linear import formed_in, lowered, multiply, summed, unrounded
from .quantize import even, linear_int8_forward, linear_nf4_forward, taken, weight_int8, weight_nf4

CODED = {"nf4": (linear_nf4_forward, weight_nf4), "int8": (linear_int8_forward, weight_int8)}


@dataclass(frozen=True)
class Frozen:
    """A frozen linear layer: its weight (out in), or, of a `kind` in `CODED`, its codes and scales; and its bias."""

    kind: str
    factors: tuple[Tensor, ...]
    bias: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.factors if self.bias is None else (*self.factors, self.bias)

    @property
    def rounded(self) -> tuple[Tensor, ...]:
        """Those that a product in low precision rounds."""
        return self.tensors[2:] if self.kind in CODED else self.tensors

    def fits(self, cols: int, dtype: torch.dtype) -> bool:
        """Whether kernels make a weight of these codes that needs no filling up."""
        if self.kind not in CODED:
            return True
        codes, scales = self.factors
        return scales.dtype == torch.float32 and taken(dtype, codes, scales) and even(codes, cols, dtype) == (len(codes), cols)

    def weight(self, cols: int, dtype: torch.dtype) -> Tensor:
        """out in."""
        if self.kind in CODED:
            codes, scales = self.factors
            made: Tensor = CODED[self.kind][1](codes, scales, cols, dtype)
            return made
        return lowered(self.factors, dtype)[0]

    def product(self, x: Tensor) -> Tensor:
        """x (.. in) times the weight, and the bias: .. out, in the dtype of x."""
        if self.kind in CODED:
            made: Tensor = CODED[self.kind][0].direct(x, *self.factors, self.bias)
            return made
        weight, *bias = lowered(self.tensors, x.dtype)
        return F.linear(x, weight, *bias)


@dataclass(frozen=True)
class Gated:
    """An input act(gate, up), with dropout if there is a seed. As for `gated_linear`, nothing else may use gate and up."""

    act: Op
    gate: Tensor
    up: Tensor
    seed: Tensor | None
    p: float

    def fits(self, kind: torch.dtype) -> bool:
        """Whether kernels compute it, and may write gradients over gate and up."""
        gate, up = self.gate, self.up
        known = self.act.name in GATED and self.act.kernel is not None and self.act.fast(gate)
        trained = gate.requires_grad and up.requires_grad and products.trained_low(gate, (up,)) == kind
        return known and trained and gate.dtype == up.dtype == kind and writable(gate, up)


def low_rank(x: Tensor | Gated, layers: Sequence[Frozen], a: Sequence[Tensor], b: Sequence[Tensor], scale: float, p: float = 0.0
             ) -> tuple[Tensor, ...] | None:  # fmt: skip
    """The result of each layer (.. out), in the dtype of x, or autocast's: x is .. in, and each layer has its `a` (rank in), which
    several may share, and `b` (out rank). None where torch's own functions must do it, layer by layer."""
    inputs = (x.gate, x.up) if isinstance(x, Gated) else (x,)
    first, trained, frozen = inputs[0], (*a, *b), [t for layer in layers for t in layer.tensors]
    if not (all(map(plain, (*inputs, *trained, *frozen))) and real(first) and unseen()) or transformed():
        return None
    low = autocast_dtype(first.device)
    kind = low or first.dtype
    kinds = {t.dtype for t in (*inputs, *trained, *(t for layer in layers for t in layer.rounded))}
    if formed_in(first, kind) != kind or (torch.float64 in kinds if low is not None else kinds != {kind}):
        return None
    if any(t.requires_grad or t.device != first.device for t in frozen):
        return None
    if not all(layer.fits(first.size(-1), kind) for layer in layers) or (isinstance(x, Gated) and not x.fits(kind)):
        return None
    own = list({id(t): t for t in a}.values())
    which = [next(i for i, t in enumerate(own) if t is mine) for mine in a]
    seed = draw(first.device) if p > 0 else None
    how, before = Sum(layers, which, scale, p), None
    if isinstance(x, Gated):
        how, before = replace(how, act=x.act, q=x.p), x.seed
    # ignored: as in linears
    out: tuple[Tensor, ...] = LowRank.apply(kind, how, seed, before, *inputs, *own, *b)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Sum:
    """The layers, and of each the number of its `a`; what the addition is scaled by, and how much of its input is dropped. Of a
    gated input also the activation, and how much of that is dropped for the layer itself, too."""

    layers: Sequence[Frozen]
    which: Sequence[int]
    scale: float
    p: float
    act: Op | None = None
    q: float = 0.0

    def kept(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """dropout(x) as a matrix (n in)."""
        rows = x.reshape(-1, x.size(-1))
        return rows if seed is None else dropout(rows, None, seed, self.p)

    def parted(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Those of the inputs, of every `a`, of every `b`."""
        first, last = 1 if self.act is None else 2, len(tensors) - len(self.layers)
        return tensors[:first], tensors[first:last], tensors[last:]

    def composed(self, seed: Tensor | None, before: Tensor | None, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All of it by functions that have gradients of any order."""
        inputs, a, b = self.parted(tensors)
        x = inputs[0] if self.act is None else self.act(*inputs)
        x = x if before is None else dropout(x, None, before, self.q)
        kept, shape = self.kept(x, seed), (*x.shape[:-1], -1)
        changes = [F.linear(F.linear(kept, a[at]) * self.scale, up) for at, up in zip(self.which, b, strict=True)]
        weights = [layer.weight(x.size(-1), x.dtype) for layer in self.layers]
        return tuple(F.linear(x, w) + change.view(shape) for w, change in zip(weights, changes, strict=True))


class LowRank(torch.autograd.Function):
    """Of an input, or gate and up, every `a` once, and the `b` of each layer."""

    @staticmethod
    def forward(ctx: Any, kind: torch.dtype, how: Sum, seed: Tensor | None, before: Tensor | None, *tensors: Tensor
                ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.how, ctx.kinds = how, (None, None, None, None, *(t.dtype for t in tensors))
        ctx.set_materialize_grads(False)  # a result of no use adds nothing
        inputs, own, ups = how.parted(tensors)
        inputs, factors = [t.to(kind) for t in inputs], lowered((*own, *ups), kind)
        with torch.autocast(inputs[0].device.type, enabled=False):
            x, a = inputs[0], torch.cat(factors[: len(own)])
            if how.act is not None:
                assert how.act.kernel is not None
                x = how.act.kernel.forward.direct(*inputs, before, how.q)
            outs, kept = [layer.product(x) for layer in how.layers], how.kept(x, seed)
            thin = kept.new_empty(len(kept), len(a))
            multiply(thin, kept, a.t(), 0.0, how.scale)
            parts = thin.split([len(f) for f in own], 1)
            for out, at, up in zip(outs, how.which, factors[len(own) :], strict=True):
                multiply(out.view(-1, out.size(-1)), parts[at], up.t(), 1.0)
        ctx.save_for_backward(seed, before, thin, *inputs, *factors)
        return tuple(outs)

    @staticmethod
    @one_by_one
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        seed, before, thin, *tensors = ctx.saved_tensors
        gs = {i: g.reshape(-1, g.size(-1)) for i, g in enumerate(grads) if g is not None}
        wanted, found = ctx.needs_input_grad[4:], list[Tensor | None]([None] * len(tensors))
        if gs and torch.is_grad_enabled():  # a graph of the gradients is wanted
            unrounded(ctx, None, None, None, None, *tensors)
            outs, at = ctx.how.composed(seed, before, tensors), [i for i, w in enumerate(wanted) if w]
            made = torch.autograd.grad([outs[i] for i in gs], [tensors[i] for i in at], [grads[i] for i in gs],
                                       create_graph=True, allow_unused=True)  # fmt: skip
            for i, g in zip(at, made, strict=True):
                found[i] = g
        elif gs:
            found = LowRank.gradients(ctx.how, gs, seed, before, thin, tensors, wanted, ctx.kinds[4:])
        return None, None, None, None, *found

    @staticmethod
    def gradients(how: Sum, gs: dict[int, Tensor], seed: Tensor | None, before: Tensor | None, thin: Tensor,
                  tensors: Sequence[Tensor], wanted: Sequence[bool], kinds: Sequence[torch.dtype]) -> list[Tensor | None]:
        """Those of `tensors`, as far as they are wanted; `gs` are of the results that have one (n out)."""
        inputs, own, ups = how.parted(tensors)
        of_inputs, of_own, of_ups = how.parted(range(len(tensors)))
        found, sizes = list[Tensor | None]([None] * len(tensors)), [len(f) for f in own]
        back, begun = torch.zeros_like(thin), set[int]()  # the gradient of the thin products
        of_parts = list(zip(back.split(sizes, 1), thin.split(sizes, 1), strict=True))
        for i, g in gs.items():
            of_part, part = of_parts[at := how.which[i]]
            multiply(of_part, g, ups[i], float(at in begun), how.scale)
            begun.add(at)
            if wanted[of_ups[i]]:
                found[of_ups[i]] = summed([(g.t(), part)], kinds[of_ups[i]])
        x = inputs[0]
        if any(wanted[i] for i in of_inputs):
            dx, a = back.new_empty(len(back), x.size(-1)), torch.cat(tuple(own))
            for n, (i, g) in enumerate(gs.items()):
                multiply(dx, g, how.layers[i].weight(x.size(-1), g.dtype), float(n > 0))
            if seed is None:
                multiply(dx, back, a, 1.0)
            else:
                dx = dropout(back @ a, dx, seed, how.p)
            dx = dx.view(x.shape)
            if how.act is None:
                found[0] = dx.to(kinds[0])
            else:
                found[:2], x = gradients(GATED[how.act.name], inputs[0], inputs[1], dx, before, how.q), dx
        if any(wanted[i] for i in of_own):
            parts = summed([(back.t(), how.kept(x, seed))], kinds[of_own[0]]).split(sizes)
            for at, (i, part) in enumerate(zip(of_own, parts, strict=True)):
                found[i] = part if wanted[i] and at in begun else None
        return found
