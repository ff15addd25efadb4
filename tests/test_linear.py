"""The linear layer on a CPU without units for low precision, and on a GPU: the values and gradients of F.linear, rounded once."""

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


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_on_a_gpu(low: torch.dtype, dtype: torch.dtype, bias: bool) -> None:
    """torch's values to the bit; gradients of fp32 weights in fp32, ten times nearer the truth than torch's; all twice the same."""
    results, g = [], torch.rand(3, 2000, 72, device="cuda").to(low)
    torch.ones(1, device="cuda", requires_grad=True).sin().backward()  # or the backward's thread warns of its first product
    for function in (module.linear, F.linear, module.linear):
        torch.manual_seed(0)
        x, w, b = (torch.randn(shape, device="cuda", dtype=kind).requires_grad_()
                   for shape, kind in (((3, 2000, 96), dtype), ((72, 96), torch.float32), ((72,), torch.float32)))  # fmt: skip
        with torch.autocast("cuda", low):
            out = function(x, w, b if bias else None)
        out.backward(g)
        results.append([out, x.grad, w.grad, *([b.grad] if bias else [])])
    ours, theirs, again = results
    assert all(torch.equal(p, q) for p, q in zip(ours, again, strict=True))
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    g = g.double().view(-1, 72)
    rounded = x.detach().to(low).double().view(-1, 96)
    for found, other, true in zip(ours[2:], theirs[2:], (g.t() @ rounded, g.sum(0)), strict=False):
        assert found.dtype == torch.float32
        off, torchs = ((t.double() - true).norm() / true.norm() for t in (found, other))
        assert off < max(torchs / 10, 1e-6)


@pytest.mark.gpu
def test_on_a_gpu_weights_in_low_precision_and_frozen_ones() -> None:
    x, w, b = (t.detach().cuda().requires_grad_() for t in leaves(torch.bfloat16, torch.bfloat16))
    module.linear(x, w, b).sum().backward()
    other = [t.detach().requires_grad_() for t in (x, w, b)]
    F.linear(*other).sum().backward()
    for found, expected in zip((x, w, b), other, strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=2e-2, atol=1e-2)
    frozen = w.detach()
    assert module.trained_low(x, frozen) is None
    with torch.no_grad():
        assert module.trained_low(x, w) is None
