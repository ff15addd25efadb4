"""Rotation in the memory of a fresh projection: the same numbers, and only where nobody else can see it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelcenter import ops
from modelcenter.errors import InputError
from modelcenter.layers import Attention, Batch, Rotary
from modelcenter.layers.rope import Plain
from modelcenter.ops.rotary import rotary_

IN_PLACE = ops.rotary.fast(torch.zeros(1))


def angles(s: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(1, s, 1, pairs) * 6
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_in_place_equals_out_of_place(interleaved: bool, bias: bool) -> None:
    layer, x, (cos, sin) = nn.Linear(16, 24, bias=bias), torch.randn(2, 5, 16, requires_grad=True), angles(5, 3)
    found = []
    for turn in (ops.rotary, rotary_):
        h = layer(x).unflatten(-1, (3, 8))
        out = turn(h, cos, sin, interleaved)
        assert (out.data_ptr() == h.data_ptr()) == (turn is rotary_ and IN_PLACE)
        grads = torch.autograd.grad((out.transpose(1, 2) ** 3).sum(), [x, *layer.parameters()])
        found.append([out.clone(), *grads])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_for_channels_that_are_not_there(interleaved: bool) -> None:
    for turn in (ops.rotary, rotary_, ops.rotary.reference):
        with pytest.raises(InputError, match=r"^rotary: cos: angles of 3 pairs for 4 channels; those of 2 at most$"):
            turn(torch.randn(2, 5, 3, 4), *angles(5, 3), interleaved)


def test_what_others_hold_is_left_alone() -> None:
    (cos, sin), leaf = angles(5, 4), torch.randn(2, 5, 3, 8, requires_grad=True)
    strided = torch.randn(2, 3, 5, 8).transpose(1, 2)
    for x in (leaf, strided):
        before = x.detach().clone()
        rotary_(x, cos, sin, False)
        assert torch.equal(x, before)


@pytest.mark.parametrize("change", ["hook", "wrapped"])
def test_a_projection_that_is_watched_keeps_its_result(change: str) -> None:
    attn, seen = Attention(16, 2), []

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            seen.append(self.inner(x))
            return seen[-1]

    if change == "hook":
        attn.q.register_forward_hook(lambda module, args, out: seen.append(out))
    else:
        attn.q = Wrapped(attn.q)  # type: ignore[assignment]
    x = torch.randn(1, 6, 16)
    batch = Batch(x)
    attn(x, batch.view(causal=True, angles=Rotary(8, Plain())(batch.at, x.dtype)))
    layer = attn.q.inner if change == "wrapped" else attn.q
    assert torch.equal(seen[0], nn.functional.linear(x, layer.weight, layer.bias))
