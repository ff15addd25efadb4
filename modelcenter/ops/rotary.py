"""Rotary position: rotate pairs of channels by the position's angles. Su et al., 2021 (RoFormer), section 3.4.

x is b s h d, as a projection leaves it. `cos` and `sin` hold one angle per pair (1|b s 1 r/2, at least fp32); the first r of d
channels rotate, the rest stay as they are. Pairs are (i, i + r/2) in the half layout (LLaMA) and (2i, 2i + 1) in the interleaved
one (GPT-J). The gradient is rotated back.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import refuse
from ._kernels import call, expect
from ._mode import once, plain, unseen
from ._op import Kernel, op, raw, wide


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    expect("rotary", "y", x)
    pairs, channels = cos.size(-1), x.size(-1)
    if 2 * pairs > channels:
        refuse(None, "rotary: cos", f"angles of {pairs} pairs for {channels} channels", f"those of {channels // 2} at most")
    a, b = apart(x, pairs, interleaved)
    p, q = a * cos - b * sin, b * cos + a * sin
    turned = (torch.stack((p, q), -1).flatten(-2) if interleaved else torch.cat((p, q), -1)).to(x.dtype)
    return torch.cat((turned, x[..., 2 * pairs :]), -1) if channels > 2 * pairs else turned


def apart(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channel of every pair."""
    turn = wide(x[..., : 2 * pairs])
    return (turn[..., 0::2], turn[..., 1::2]) if interleaved else (turn[..., :pairs], turn[..., pairs:])


@raw("(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor")
def rotary_turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """x rotated by the angles, or, with `back`, by their negatives, which is how a gradient is."""
    x = x.contiguous()
    y = torch.empty_like(x)
    call("rotary", y, x, cos.contiguous(), sin.contiguous(), interleaved, back)
    return y


@raw("(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor")
def rotary_forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned: Tensor = rotary_turn.direct(x, cos, sin, interleaved, False)
    return turned


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    x, cos, sin, interleaved = args
    return x if cos.requires_grad or sin.requires_grad else None, cos, sin, interleaved


def backward(grad: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool) -> Sequence[Tensor | None]:
    dx = rotary_turn(grad, cos, sin, interleaved, True)
    if x is None:
        return dx, None, None, None
    (a, b), (p, q) = (apart(t, cos.size(-1), interleaved) for t in (x, grad))
    return dx, (p * a + q * b).sum_to_size(cos.shape), (q * a - p * b).sum_to_size(sin.shape), None


def takes(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> bool:
    if x.dim() != 4 or cos.dim() != 4 or cos.shape != sin.shape or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return False
    return cos.size(0) in (1, x.size(0)) and cos.shape[1:3] == (x.size(1), 1) and 2 * cos.size(-1) <= x.size(-1)


def rotary_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`rotary`, in the memory of x if possible: nothing else may use x. This holds if a matrix product has just made it, because
    that saves its factors and not its result."""
    kernel = rotary.kernel
    assert kernel is not None
    fits = plain(x) and plain(cos) and plain(sin) and unseen() and rotary.fast(x) and takes(x, cos, sin, interleaved)
    if not fits or not x.is_contiguous() or (x.requires_grad and x.is_leaf) or cos.requires_grad or sin.requires_grad:
        out: Tensor = rotary(x, cos, sin, interleaved)
    else:
        out = InPlace.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]  # torch has no types there
    return out


class InPlace(torch.autograd.Function):
    """To autograd an ordinary op, whose result happens to share memory with its input. Nothing is marked as modified: a projection
    is often a view, and autograd would copy the whole tensor to keep track."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = x.detach()
        call("rotary", out, None, cos.contiguous(), sin.contiguous(), interleaved, False)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotary_turn(grad, cos, sin, ctx.interleaved, True), None, None, None


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    kind = torch.promote_types(dtype, torch.float32)
    sizes = (
        ((1, 1, 1, 2), 1), ((1, 1, 1, 1), 0), ((2, 5, 3, 8), 4), ((2, 5, 3, 9), 2), ((0, 3, 2, 4), 2),
        ((2, 3, 2, 50), 21), ((1, 33, 4, 128), 64),
    )  # fmt: skip
    for (b, s, h, d), pairs in sizes:
        angle = torch.rand(1 if s == 3 else b, s, 1, pairs, device=device, dtype=kind) * 6
        for interleaved in (False, True):
            yield torch.randn(b, s, h, d, device=device, dtype=dtype), angle.cos(), angle.sin(), interleaved


rotary = op("rotary", reference, cases, Kernel(rotary_forward, saved, backward, takes=takes))
