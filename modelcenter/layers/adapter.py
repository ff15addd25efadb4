"""A frozen linear layer with a trained addition of low rank. Hu et al., 2021, "LoRA"; Liu et al., 2024, "DoRA"."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import Op, dropout
from ..ops._mode import autocast_dtype
from ..ops.low_rank import Frozen, Gated, low_rank
from .dropout import Dropout, rate
from .linear import Linear, alone
from .quantized import QuantizedLinear


class Adapted(nn.Module):
    """base(x) + scale b(a(dropout(x))), with weights a (rank in) and b (out rank). The base may be held in 4 or 8 bits (QLoRA).

    With a `magnitude` (out) this is DoRA: the rows of W' = W + scale b a are scaled to the lengths in `magnitude`; the lengths that
    they had are constants to the gradient (section 4.3). `a` may be shared by layers that other programs hold as one matrix,
    because one adapter for that matrix has one `a`. The adapter's weights are fp32 over a base in half precision.
    """

    magnitude: nn.Parameter | None
    joined: Callable[[Tensor], Tensor] | None = None  # of the lengths of parts of rows those of whole rows (parallel/adapted.py)

    def __init__(self, base: Linear | QuantizedLinear, rank: int, scale: float, *, a: Linear | None = None, dropout: float = 0.0,
                 dora: bool = False):
        super().__init__()
        kept, kind = (base.codes, base.dtype) if isinstance(base, QuantizedLinear) else (base.weight, base.weight.dtype)
        made: Any = {"device": kept.device, "dtype": torch.promote_types(kind, torch.float32)}
        self.base, self.scale = base, scale
        self.dropout = Dropout(dropout)
        self.a = Linear(base.in_features, rank, bias=False, **made) if a is None else a
        self.b = Linear(rank, base.out_features, bias=False, **made)
        self.magnitude = nn.Parameter(torch.empty(base.out_features, **made)) if dora else None

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        if (made := self.joint(x, (self,), bias)) is not None:
            return made[0]
        out: Tensor = self.base(x, bias=bias)
        kept = self.dropout(x)
        low = kept.to(self.a.weight.dtype) if autocast_dtype(x.device) is None else kept
        change = self.b(self.a(low) * self.scale).to(out.dtype)
        if self.magnitude is None:
            return out.add(change)
        if kept is x:
            plain = out - local(self.base.bias) if bias and self.base.bias is not None else out
        else:
            plain = self.base(kept, bias=False)
        factor = (local(self.magnitude) / self.lengths()).to(out.dtype)
        return out.add((factor - 1) * plain + factor * change)

    def gated(self, act: Op, gate: Tensor, up: Tensor, seed: Tensor | None, p: float) -> Tensor:
        """The layer behind a gated activation, with dropout if there is a seed. Nothing else may use gate and up."""
        if (made := self.joint(Gated(act, gate, up, seed, p), (self,))) is not None:
            return made[0]
        hidden = act(gate, up)
        out: Tensor = self(hidden if seed is None else dropout(hidden, None, seed, p))
        return out

    @staticmethod
    def joint(x: Tensor | Gated, layers: Sequence["Adapted"], bias: bool = True) -> Sequence[Tensor] | None:
        """layer(x) for each layer by one op, which draws one dropout for all of them; None if they must be called."""
        first, p = layers[0], rate(layers[0].dropout)
        if p is None or not all(layer.simple() and rate(layer.dropout) == p and layer.scale == first.scale for layer in layers):
            return None
        a, b = ([part.weight for part in parts] for parts in zip(*((layer.a, layer.b) for layer in layers), strict=True))
        return low_rank(x, [layer.frozen(bias) for layer in layers], a, b, first.scale, p)

    def simple(self) -> bool:
        """Whether this is LoRA, and calls of its parts do nothing but what their classes do."""
        base, thin = self.base, all(alone(part) and part.bias is None for part in (self.a, self.b))
        coded = isinstance(base, QuantizedLinear) and base.given is None and base.summed is None
        return thin and self.magnitude is None and (alone(base, type(base)) if coded else alone(base))

    def frozen(self, bias: bool) -> Frozen:
        """What the base multiplies by, and adds."""
        base, shift = self.base, self.base.bias if bias else None
        if isinstance(base, QuantizedLinear):
            return Frozen(base.kind, (base.codes, base.scales), shift)
        return Frozen("", (base.weight,), shift)

    @torch.no_grad()
    def summed(self) -> Tensor:
        """W + scale b a (out in) in the adapter's dtype; on a tensor-parallel rank, its part of it."""
        a, b = local(self.a.weight), local(self.b.weight)
        w = self.base.dequantized(b.dtype) if isinstance(self.base, QuantizedLinear) else local(self.base.weight).to(b.dtype)
        return w.add(b @ a, alpha=self.scale)

    @torch.no_grad()
    def lengths(self) -> Tensor:
        """The lengths of the rows of W + scale b a (out)."""
        lengths: Tensor = torch.linalg.vector_norm(self.summed(), dim=1)
        return lengths if self.joined is None else self.joined(lengths)

    @torch.no_grad()
    def merged(self) -> Linear:
        """A plain layer that computes what this one does, in the dtype of the base's weight."""
        weight, whole = self.summed(), self.base.linear() if isinstance(self.base, QuantizedLinear) else self.base
        if self.magnitude is not None:
            weight *= (self.magnitude / self.lengths())[:, None]
        layer = Linear(whole.in_features, whole.out_features, bias=whole.bias is not None, device="meta")
        layer.weight, layer.bias = nn.Parameter(weight.to(whole.weight.dtype)), whole.bias
        return layer

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def extra_repr(self) -> str:
        return f"rank={self.a.out_features}, scale={self.scale:g}, dora={self.magnitude is not None}"


def local(x: Any) -> Tensor:
    """This rank's part of a DTensor, with its gradient."""
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return found


def adapted(model: nn.Module) -> dict[str, Adapted]:
    """The adapted layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def current_names(model: nn.Module) -> dict[str, str]:
    """The names of parameters before some layers were wrapped in adapters -> their names now."""
    inside = {f"{name}.base." for name in adapted(model)}
    out = {}
    for name, _ in model.named_parameters():
        layer, _, leaf = name.rpartition(".")
        out[f"{layer.removesuffix('.base')}.{leaf}" if f"{layer}." in inside else name] = name
    return out
