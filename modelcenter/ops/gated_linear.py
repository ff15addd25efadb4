"""dropout(act(gate, up)) @ weight^T + bias, which saves gate and up for the backward, and nothing else of their size.

The gradient of the weight needs the activation once more. The kernel that computes the gradients of gate and up has it at hand: it
writes it over the activation's own gradient, and those two over gate and up. So a layer of three projections saves two hidden
tensors instead of three, and its backward needs room for one (benchmarks/README.md has the figure for LLaMA-3B). Dropout costs no
extra pass: both kernels mask what they compute.
"""

from typing import Any

import torch
from torch import Tensor

from . import linear as products
from ._kernels import call
from ._mode import fake, kept_graph, once, plain, transformed, unseen
from ._op import Op
from .activation import GATED
from .dropout import dropout
from .linear import formed, narrowed, summed


def gated_linear(
    act: Op, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """linear(act(gate, up), weight, bias) for a gated activation, with dropout before the product if there is a seed. Nothing else
    may use gate and up: this holds if matrix products have just made them, because these save their factors and not their
    results."""
    factors = (weight,) if bias is None else (weight, bias)
    fits = act.name in GATED and all(map(plain, (gate, up, *factors))) and unseen() and not transformed() and act.fast(gate)
    low = products.trained_low(gate, factors) if fits and all(t.requires_grad for t in (gate, up, weight)) else None
    out: Tensor
    if act.kernel is None or low is None or not (gate.dtype == up.dtype == low and writable(gate, up)):
        hidden = act(gate, up)
        out = products.linear(hidden if seed is None else dropout(hidden, None, seed, p), weight, bias)
    else:
        given = GATED[act.name], act.kernel.forward.direct, low, seed, p
        out = GatedLinear.apply(*given, gate, up, weight, bias)  # type: ignore[no-untyped-call]  # torch has no types there
    return out


def writable(gate: Tensor, up: Tensor) -> bool:
    """Whether a kernel may write their gradients over them."""
    return gate.shape == up.shape and all(x.is_contiguous() and (fake(x) or x.data_ptr() % 16 == 0) for x in (gate, up))


class GatedLinear(torch.autograd.Function):
    """The op on a GPU, or on what is treated as one."""

    @staticmethod
    def forward(
        ctx: Any, kind: int, act: Any, low: torch.dtype, seed: Tensor | None, p: float,
        gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.kinds = kind, p, weight.dtype, None if bias is None else bias.dtype
        narrow, shift = narrowed((weight, bias), low)
        assert narrow is not None
        ctx.save_for_backward(gate, up, narrow, seed)
        with torch.autocast(gate.device.type, enabled=False):
            return formed(act(gate, up, seed, p), narrow, shift)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight, seed = ctx.saved_tensors
        kind, p, of_weight, of_bias = ctx.kinds
        g = grad.reshape(-1, grad.size(-1))
        y = summed([(g, weight)], gate.dtype).view(gate.shape)  # its gradient, and then itself
        dgate, dup = gradients(kind, gate, up, y, seed, p)
        dweight, dbias = summed([(g.t(), y.view(-1, y.size(-1)))], of_weight), None
        if ctx.needs_input_grad[8]:
            dbias = summed([(g.new_ones(1, len(g)), g)], torch.promote_types(g.dtype, torch.float32))[0].to(of_bias)
        return None, None, None, None, None, dgate, dup, dweight, dbias


def gradients(kind: int, gate: Tensor, up: Tensor, y: Tensor, seed: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    """Those of gate and up, written over them. `y`, which is that of the activation, becomes the activation."""
    gate, up = gate.detach(), up.detach()
    if kept_graph():  # another backward will read gate and up
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        call("gated_backward", dgate, dup, y, None, gate, up, kind, seed, p)
        return dgate, dup
    call("gated_backward", gate, up, y, None, None, None, kind, seed, p)
    torch.autograd.graph.increment_version((gate, up))  # who has kept them after all is told so
    return gate, up
