"""A norm that hands on what it is of, or itself a second time: values, and gradients that meet in one pass of the kernel."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from modelcenter import ops
from modelcenter.layers import FFN, Attention, Batch, LayerNorm, Parallel, PostNorm, PreNorm, RMSNorm, Stack, block
from modelcenter.layers.block import pair
from modelcenter.layers.dropout import Dropout
from modelcenter.layers.norm import add, beside, twice
from modelcenter.ops import _kernels, _norm

pytestmark = pytest.mark.skipif(_kernels._C is None, reason="without kernels there is nothing to be had")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_norm = pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each backward of a norm, whether it was given another gradient too: the stream's, or a second one of the norm."""
    seen: list[bool] = []
    backward = _norm.norm_backward

    def watched(grad: Tensor, also: Tensor | None, total: Tensor, more: Tensor | None, *rest: Any) -> Any:
        seen.append(more is not None or also is not None)
        return backward(grad, also, total, more, *rest)

    monkeypatch.setattr(_norm, "norm_backward", watched)
    yield seen


def norm_of(kind: Any, device: str, dtype: torch.dtype, dim: int = 24) -> Any:
    norm = kind(dim, 1e-5).to(device, dtype)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.linspace(-0.3, 0.4, dim, device=device))
    return norm


@each_norm
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("used", ["both", "norm", "input"])
@pytest.mark.parametrize("dim", [24, 12280, 12296, 16408])  # on a GPU three, four columns' packs a thread, and too wide for that
def test_both_gradients(kind: Any, device: str, dtype: torch.dtype, used: str, dim: int, met: list[bool]) -> None:
    source = torch.Generator().manual_seed(0)
    shape = (3, 5, dim) if device == "cpu" or dim == 24 else (40, 30, dim)
    x, g, k = (torch.randn(shape, generator=source).to(device, dtype) for _ in range(3))
    norm, results = norm_of(kind, device, dtype, dim), []
    for exact in (False, True):
        layer = norm_of(kind, device, dtype, dim).double() if exact else norm
        leaf = (x.double() if exact else x.clone()).requires_grad_()
        out, same = (layer(leaf), leaf * 1) if exact else beside(layer, leaf)
        ends = [(out, g)] * (used != "input") + [(same, k)] * (used != "norm")
        torch.autograd.backward([end for end, _ in ends], [grad.to(out.dtype) for _, grad in ends])
        results.append([out, same, leaf.grad, *(p.grad for p in layer.parameters())])
    assert met == [used != "norm"]
    for found, wanted in zip(*results, strict=True):
        if wanted is None:  # of an unused norm's weights
            assert not found.any()
        else:
            assert (found.double() - wanted).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * wanted.norm()


@each_norm
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_two_read_a_norm(kind: Any, device: str, dtype: torch.dtype, p: float, used: str, met: list[bool]) -> None:
    source = torch.Generator().manual_seed(0)
    x, residual, *grads = (torch.randn(3, 5, 24, generator=source).to(device, dtype) for _ in range(4))
    norm, dropout, results = norm_of(kind, device, dtype), Dropout(p), []
    for exact in (False, True):
        layer = norm_of(kind, device, dtype).double() if exact else norm
        leaves = [(t.double() if exact else t.clone()).requires_grad_() for t in (x, residual)]
        torch.manual_seed(3)  # what is dropped
        outs = (add(layer, *leaves, dropout)[0],) * 2 if exact else twice(layer, *leaves, dropout)
        ends = [(o, g.to(o.dtype)) for o, g, name in zip(outs, grads, ("first", "second"), strict=True) if used in ("both", name)]
        torch.autograd.backward(*zip(*ends, strict=True))
        results.append([*outs, *(t.grad for t in leaves), *(t.grad for t in layer.parameters())])
    assert met == [used == "both"]
    assert results[0][0] is not results[0][1] and results[0][0].data_ptr() == results[0][1].data_ptr()
    for found, wanted in zip(*results, strict=True):
        assert (found.double() - wanted).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_stack_of_post_norms_adds_no_gradients_on_a_gpu(device: str, met: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last norm, which one reads, and the stack's input, which is no norm's."""
    torch.manual_seed(0)
    blocks = [PostNorm(lambda: LayerNorm(32, 1e-5), Attention(32, 4), FFN(32, 64, ops.relu)) for _ in range(2)]
    stack, found = Stack(blocks).to(device), []
    x, towards = (torch.randn(2, 5, 32, device=device) for _ in range(2))
    for as_gpu in (False, True):
        monkeypatch.setattr(block, "on_gpu", lambda x, as_gpu=as_gpu: as_gpu)
        stack.zero_grad()
        leaf = x.clone().requires_grad_()
        (stack(leaf, Batch(x).view()) * towards).sum().backward()
        assert met == [False] + [as_gpu] * 3
        met.clear()
        found.append([leaf.grad, *(p.grad for p in stack.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [1, 24, 771])
def test_the_gradient_of_a_row_of_equal_numbers_is_that_of_zeros(device: str, dim: int) -> None:
    """Normalised both are zeros, whatever what rounds is multiplied by: 1e6 at BERT's eps."""
    source = torch.Generator().manual_seed(0)
    weight, grad = ((torch.randn(n, generator=source) * size).to(device, torch.float16) for n, size in ((dim, 1), (3 * dim, 1e-2)))
    found = []
    for level in (0.0, 31.984375):  # of as many digits as there are
        x = torch.full((3, dim), level, dtype=torch.float16, device=device).requires_grad_()
        out = ops.layer_norm(x, weight, weight, 1e-12)
        assert torch.equal(out, weight.expand(3, dim))
        found += torch.autograd.grad(out, x, grad.view(3, dim))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=10)


@each_norm
def test_read_twice_where_there_is_no_kernel_or_no_gradient(kind: Any) -> None:
    norm, x = norm_of(kind, "cpu", torch.float32), torch.randn(2, 24, requires_grad=True)
    with torch.no_grad():
        first, second = twice(norm, x, x, Dropout(0.0))
    assert first is second and torch.equal(first, add(norm, x, x, Dropout(0.0))[0])
    with FlopCounterMode(display=False):
        first, second = twice(norm, x, x, Dropout(0.0))
    assert first is second
    wide = x.detach().double().requires_grad_()
    first, second = twice(norm.double(), wide, wide, Dropout(0.0))
    assert first is second


def test_the_input_lies_where_it_lay() -> None:
    x = torch.randn(2, 24, requires_grad=True) * 2
    _, same = beside(LayerNorm(24, 1e-5), x)
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
        out, same = beside(norm, x)
        assert same is x and torch.equal(out, norm(x))
    with FlopCounterMode(display=False):  # a dispatch mode, which is to see the operator
        assert beside(norm, x)[1] is x
    assert beside(norm, x.detach())[1].grad_fn is None
    wide = x.detach().double().requires_grad_()
    assert beside(norm.double(), wide)[1] is wide


@pytest.mark.parametrize("compiled", [False, True])
@each_norm
def test_the_stream_needs_a_gradient_only_where_one_goes(kind: Any, compiled: bool) -> None:
    """Not where the weights alone are trained: it is not made of them."""
    norm = norm_of(kind, "cpu", torch.float32)
    for x_wants, wants in ((False, False), (True, False), (False, True)):
        x, residual = torch.randn(2, 24, requires_grad=x_wants), torch.randn(2, 24, requires_grad=wants)
        args = x, residual, *norm.arguments, None, 0.0
        op = torch.compile(lambda *args: norm.add(*args), backend="aot_eager", fullgraph=True) if compiled else norm.add
        (out, total), (right, stream) = op(*args), norm.add.reference(*args)
        assert out.requires_grad and total.requires_grad is (x_wants or wants)
        leaves = [t for t in (x, residual, norm.weight) if t.requires_grad]
        found, wanted = (torch.autograd.grad((o * t).sum(), leaves) for o, t in ((out, total), (right, stream)))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_second_gradient_is_refused() -> None:
    x = torch.randn(2, 24, requires_grad=True)
    out, same = beside(LayerNorm(24, 1e-5), x)
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.autograd.grad((out * same).sum(), x, create_graph=True)


class Wrapper(nn.Module):
    """What a program puts around a module: it asks the module for all that it has not itself, and changes what comes out."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("inner", "_modules") else getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


@pytest.mark.parametrize("kind", [PreNorm, PostNorm, Parallel])
def test_a_module_in_the_place_of_a_norm_is_called(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of the norm it lets through: a norm of twice the weights says what is wanted."""
    layer = kind(partial(LayerNorm, 24, 1e-5), Attention(24, 2), FFN(24, 48, ops.gelu)).eval()
    other, x = copy.deepcopy(layer), torch.randn(2, 7, 24)
    names = [name for name, module in layer.named_children() if isinstance(module, LayerNorm)]
    for name in names:
        setattr(layer, name, Wrapper(getattr(layer, name)))
        for p in getattr(other, name).parameters():
            p.data *= 2
    for on_gpu in (False, True):
        monkeypatch.setattr(block, "on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
        view = Batch(x).view(causal=True)
        torch.testing.assert_close(pair(layer(x, view))[0], pair(other(x, view))[0])
    assert len(names) == (1 if kind is Parallel else 2)


@pytest.mark.parametrize("kind", [PreNorm, PostNorm, Parallel])
def test_a_norm_whose_bias_was_taken_away_is_one_with_zeros(kind: Any) -> None:
    torch.manual_seed(0)
    layer, x = kind(partial(LayerNorm, 24, 1e-5), Attention(24, 2), FFN(24, 48, ops.gelu)), torch.randn(2, 7, 24)
    wanted, view = pair(layer(x, Batch(x).view()))[0], Batch(x).view()
    for module in layer.modules():
        if isinstance(module, LayerNorm):
            module.bias = None
    torch.testing.assert_close(pair(layer(x, view))[0], wanted)
