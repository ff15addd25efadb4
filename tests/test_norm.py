"""A norm that hands on what it is of: values and gradients of the norm and of its input, met in one pass of the kernel."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from modelcenter import ops
from modelcenter.layers import FFN, Attention, Batch, LayerNorm, Parallel, PreNorm, RMSNorm
from modelcenter.ops import _norm, _op

pytestmark = pytest.mark.skipif(_op._C is None, reason="without kernels there is nothing to be had")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_norm = pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each backward of a norm, whether it was given the stream's gradient too."""
    seen: list[bool] = []
    backward = _norm.norm_backward

    def watched(grad: Tensor, total: Tensor, more: Tensor | None, *rest: Any) -> Any:
        seen.append(more is not None)
        return backward(grad, total, more, *rest)

    monkeypatch.setattr(_norm, "norm_backward", watched)
    yield seen


def norm_of(kind: Any, device: str, dtype: torch.dtype) -> Any:
    norm = kind(24, 1e-5).to(device, dtype)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.linspace(-0.3, 0.4, 24, device=device))
    return norm


@each_norm
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("used", ["both", "norm", "input"])
def test_both_gradients(kind: Any, device: str, dtype: torch.dtype, used: str, met: list[bool]) -> None:
    source = torch.Generator().manual_seed(0)
    x, g, k = (torch.randn(3, 5, 24, generator=source).to(device, dtype) for _ in range(3))
    norm, results = norm_of(kind, device, dtype), []
    for exact in (False, True):
        layer = norm_of(kind, device, dtype).double() if exact else norm
        leaf = (x.double() if exact else x.clone()).requires_grad_()
        out, same = (layer(leaf), leaf * 1) if exact else layer.beside(leaf)
        ends = [(out, g)] * (used != "input") + [(same, k)] * (used != "norm")
        torch.autograd.backward([end for end, _ in ends], [grad.to(out.dtype) for _, grad in ends])
        results.append([out, same, leaf.grad, *(p.grad for p in layer.parameters())])
    assert met == [used != "norm"]
    for found, wanted in zip(*results, strict=True):
        if wanted is None:  # of an unused norm's weights
            assert not found.any()
        else:
            assert (found.double() - wanted).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * wanted.norm()


def test_the_input_lies_where_it_lay() -> None:
    x = torch.randn(2, 24, requires_grad=True) * 2
    _, same = LayerNorm(24, 1e-5).beside(x)
    assert same is not x and same.data_ptr() == x.data_ptr()


@each_norm
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [PreNorm, Parallel])
def test_blocks_add_no_gradients_of_the_stream_on_a_gpu(kind: Any, device: str, block: Any, met: list[bool]) -> None:
    torch.manual_seed(0)
    made = block(lambda: kind(32, 1e-5), Attention(32, 4), FFN(32, 64, ops.relu)).to(device)
    x = torch.randn(2, 5, 32, device=device, requires_grad=True)
    made(x, Batch(x).view(causal=True)).sum().backward()
    assert met == ([device == "cuda"] if block is Parallel else [True, device == "cuda"])


@each_norm
def test_where_there_is_no_kernel_or_no_gradient_it_is_the_norm(kind: Any) -> None:
    norm, x = norm_of(kind, "cpu", torch.float32), torch.randn(2, 24, requires_grad=True)
    with torch.no_grad():
        out, same = norm.beside(x)
        assert same is x and torch.equal(out, norm(x))
    with FlopCounterMode(display=False):  # a dispatch mode, which is to see the operator
        assert norm.beside(x)[1] is x
    assert norm.beside(x.detach())[1].grad_fn is None
    wide = x.detach().double().requires_grad_()
    assert norm.double().beside(wide)[1] is wide


def test_a_second_gradient_is_refused() -> None:
    x = torch.randn(2, 24, requires_grad=True)
    out, same = LayerNorm(24, 1e-5).beside(x)
    (dx,) = torch.autograd.grad((out * same).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
