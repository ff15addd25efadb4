"""How far kernels are from double precision, where they once rounded more than their peers (benchmarks/errors.py has all)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contract import Calls
from torch import Tensor

from modelcenter.ops import OPS, _kernels

pytestmark = pytest.mark.skipif(not _kernels.available("cpu"), reason="without kernels the references are all there is")
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def leaf(a: Any, exact: bool) -> Any:
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return a
    return a.detach().to(torch.float64 if exact else a.dtype).requires_grad_()


def errors(name: str, args: Sequence[Any]) -> list[float]:
    """Of values and gradients for a random direction, as parts of their sizes; all floating arguments want a gradient."""
    found = []
    for exact in (False, True):
        given = [leaf(a, exact) for a in args]
        outs = (OPS[name].reference if exact else OPS[name])(*given)
        outs = outs if isinstance(outs, tuple) else (outs,)
        source = torch.Generator().manual_seed(7)
        grads = [torch.randn(out.shape, generator=source, dtype=torch.float64).to(args[0].dtype).to(out) for out in outs]
        wanted = [a for a in given if isinstance(a, Tensor) and a.is_floating_point()]
        found.append([t.double() for t in (*outs, *torch.autograd.grad(outs, wanted, grads))])
    return [float(((ours - truth).norm() / truth.norm()).detach()) for ours, truth in zip(*found, strict=True)]


def normal(device: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=source).to(device, dtype) for shape in shapes]


@each_device
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_an_activation_errs_by_about_a_rounding(name: str, device: str) -> None:
    value, slope, bias = errors(name, normal(device, (1024, 256), (256,)))
    assert value < 5e-8 and slope < 5.2e-8, (value, slope)
    assert bias < 1.1e-7, "the sum over rows rounds more than its numbers are off"


@each_device
@pytest.mark.parametrize("name", ["geglu", "geglu_tanh", "swiglu"])
def test_so_does_a_gated_one(name: str, device: str) -> None:
    value, gate, up = errors(name, normal(device, (1024, 256), (1024, 256)))
    assert max(value, up) < 6e-8 and gate < 5.4e-8, (value, gate, up)  # the gate's 5.6e-8 on a GPU where its slope was rounded too


@each_device
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [768, 771, 1600])
def test_the_norm_of_a_sum_is_rounded_once(name: str, dtype: torch.dtype, dim: int, device: str) -> None:
    x, residual, weight, bias = normal(device, (256, dim), (256, dim), (dim,), (dim,), dtype=dtype)
    weights = (weight, bias) if name == "add_layer_norm" else (weight,)
    alone = errors(name.removeprefix("add_"), (x, *weights, 1e-5))[0]
    for seed, p in ((None, 0.0), (torch.tensor([5], device=device), 0.25)):
        value = errors(name, (x, residual, *weights, 1e-5, seed, p))[0]
        assert value < 1.05 * alone, (value, alone)  # 1.2 to 1.5 of it where the total was rounded first


@each_device
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_the_gradient_of_a_branch_is_rounded_once(name: str, device: str) -> None:
    x, residual, weight, bias = normal(device, (256, 768), (256, 768), (768,), (768,), dtype=torch.bfloat16)
    weights = (weight, bias) if name == "add_layer_norm" else (weight,)
    seed = torch.tensor([5], device=device)
    _, _, branch, stream, *_ = errors(name, (x, residual, *weights, 1e-5, seed, 0.25))
    assert branch < 1.08 * stream, (branch, stream)  # 1.2 of it where the stream's gradient was rounded first


@each_device
@pytest.mark.parametrize(("name", "most"), [("add_layer_norm", 4.15e-8), ("add_rms_norm", 3.9e-8)])
def test_the_gradient_of_the_norm_of_a_sum_is_rounded_with_what_is_added(name: str, most: float, device: str) -> None:
    x, residual, weight, bias = normal(device, (256, 768), (256, 768), (768,), (768,))
    weights = (weight, bias) if name == "add_layer_norm" else (weight,)
    _, _, branch, stream, *_ = errors(name, (x, residual, *weights, 1e-6, None, 0.0))
    assert branch == stream < most, stream  # 4.4e-8 and 4.3e-8 where every product and every sum was rounded


def test_attention_adds_up_sums_of_few() -> None:
    q, k, v = normal("cpu", (1, 2048, 2, 64), (1, 2048, 2, 64), (1, 2048, 2, 64))
    found = errors("attention", (q, k, v, None, None, None, 0.125, False, None, 0.0))
    most = 4.5e-7 if _kernels._C.cpu_level == "base" else 3.2e-7  # where a product is rounded before it is added
    assert max(found) < most, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_in_16_bits_rounds_its_results_alone(dtype: torch.dtype) -> None:
    """Neither probabilities, which are multiplied, nor out, which the gradients of scores could be found from."""
    q, k, v, grad = normal("cpu", (1, 560, 4, 64), (1, 600, 2, 64), (1, 600, 2, 64), (1, 560, 4, 64), dtype=dtype)
    found = []
    for function, exact in ((OPS["attention"], False), (OPS["attention"].reference, True)):
        given = [leaf(x, exact) for x in (q, k, v)]
        out = function(*given, None, None, None, 0.125, True, torch.tensor([5]), 0.1)
        found.append([t.detach().double() for t in (out, *torch.autograd.grad(out, given, grad.to(out)))])
    for ours, truth in zip(*found, strict=True):
        rounded = (truth.to(dtype).double() - truth).norm()
        assert (ours - truth).norm() < 1.02 * rounded  # 1.13 to 1.21 of it from a rounded out, more from rounded probabilities


@pytest.mark.parametrize("hides", [False, float("-inf"), -92.0])  # e^-92 is subnormal
def test_hidden_keys_weigh_nothing(hides: bool | float) -> None:
    """Not even as little as a product with a large number, or a subnormal's time, would show."""
    q, k, v = normal("cpu", (1, 7, 2, 16), (1, 33, 2, 16), (1, 33, 2, 16))
    v[:, 5, :, 0] = 3e38
    seen = (torch.arange(33) != 5).expand(1, 1, 7, 33)
    hidden = seen if hides is False else torch.zeros(1, 1, 7, 33).masked_fill(~seen, hides)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = OPS["attention"](*leaves, hidden, None, None, 0.25, False, None, 0.0)
    assert out.abs().max() < 10
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad[:, 5].eq(0).all() for grad in grads[1:])


@each_device
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_a_gradient_around_a_residual_in_fp32_is_dropped_and_rounded_by_one_kernel(low: torch.dtype, device: str) -> None:
    (x,), (residual, grad) = normal(device, (33, 257), dtype=low), normal(device, (33, 257), (33, 257))
    seed, found = torch.tensor([5], device=device), []
    leaves = [t.requires_grad_() for t in (x, residual)]
    for function in (OPS["dropout"], OPS["dropout"].reference):
        out = function(*leaves, seed, 0.3)
        with Calls() as calls:
            found.append(torch.autograd.grad(out, leaves, grad))
        if function is OPS["dropout"]:
            assert [(str(call), args[-1]) for call, args in calls.seen] == [("modelcenter.dropout_backward.default", low)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
