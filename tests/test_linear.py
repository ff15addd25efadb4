"""The linear layer on a CPU without units for low precision: the values and gradients of F.linear, rounded once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modelcenter.layers import Linear
from modelcenter.ops import linear as module


@pytest.fixture(autouse=True)
def no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_low_units", lambda dtype: False)


def leaves(dtype: torch.dtype, weights: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    made = (torch.randn(2, 5, 48).to(dtype), torch.randn(32, 48).to(weights), torch.randn(32).to(weights))
    return [t.requires_grad_() for t in made]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_equal_to_torch_and_closer_to_the_truth(dtype: torch.dtype, weights: torch.dtype, autocast: bool) -> None:
    if not autocast and dtype != weights:
        return
    results = []
    for function in (module.linear, F.linear):
        x, w, b = leaves(dtype, weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = function(x, w, b)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
        results.append((out, x.grad, w.grad, b.grad))
    x, w, b = (t.detach().double().requires_grad_() for t in leaves(dtype, weights))
    exact = F.linear(x, w, b)
    exact.backward(torch.linspace(-1, 1, exact.numel(), dtype=torch.float64).view(exact.shape))
    for ours, theirs, true in zip(*results, (exact, x.grad, w.grad, b.grad), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        off = [(t.double() - true).norm() / true.norm() for t in (ours, theirs)]
        assert off[0] <= max(off[1] * 1.05, 1e-6)


def test_the_product_is_formed_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in bf16, which is what makes it fast: the only product seen is one of fp32 matrices."""
    seen = []
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(x.dtype) or plain(x, *rest))
    layer = Linear(48, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(torch.randn(3, 48))
    assert seen == [torch.float32] and out.dtype == torch.bfloat16
    layer(torch.randn(3, 48))
    assert seen == [torch.float32] * 2


def test_frozen_weights_get_no_gradient() -> None:
    x, w, b = leaves(torch.bfloat16, torch.bfloat16)
    w.requires_grad_(False)
    module.linear(x, w, None).sum().backward()
    assert w.grad is None and b.grad is None and x.grad is not None


def test_the_bias_can_be_left_out() -> None:
    layer = Linear(4, 3)
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x, bias=False) + layer.bias, layer(x))
