"""Products in pairs of bf16 (csrc/product.cpp), and the layers and the head that are trained by them: the product of what is
rounded to bf16, whatever the sizes, layouts and threads; gradients in the dtype of what they are of."""

from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from contract import kernels_called
from torch import Tensor, nn

from modelcenter import ops
from modelcenter.layers import FFN, Attention, Batch, LayerNorm, PreNorm
from modelcenter.ops import _op
from modelcenter.ops import linear as module
from modelcenter.ops._op import call
from modelcenter.parallel.blocks import recompute

HERE = _op.available("cpu") and hasattr(_op._C.cpu, "product") and torch.cpu._is_avx512_bf16_supported()

pytestmark = pytest.mark.skipif(not HERE, reason="no products in pairs: no kernels, or a processor without AVX512-BF16")


@pytest.fixture(autouse=True)
def in_pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "in_pairs", lambda: True)  # though tiles be faster here
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def product(c: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, *, turned: tuple[bool, bool] = (False, False),
            add: bool = False, scale: float = 1.0) -> Tensor:  # fmt: skip
    """a and b are given as they are multiplied, and laid out here."""
    laid = [x.t().contiguous() if turn else x for x, turn in zip((a, b), turned, strict=True)]
    call("product", c, *laid, bias, b.size(1), b.size(0), *turned, add, scale)
    return c


SIZES = [(1, 1, 1), (3, 5, 7), (8, 48, 2), (17, 33, 65), (130, 100, 301), (5, 50, 9001), (1100, 60, 40), (40, 1600, 33), (4, 3, 0)]


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_of_what_is_rounded(sizes: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    m, n, k = sizes
    torch.manual_seed(0)
    for i, kinds in enumerate([(x, y, z) for x in module.PAIRED for y in module.PAIRED for z in module.PAIRED]):
        of_a, of_b, of_c = kinds
        a, b, bias, before = torch.randn(m, k).to(of_a), torch.randn(k, n).to(of_b), torch.randn(n), torch.randn(m, n).to(of_c)
        add, scale = bool(i & 1), 0.5 if i & 2 else 1.0
        true = a.bfloat16().double() @ b.bfloat16().double() * scale + bias + (before.double() if add else 0)
        found = product(before.clone(), a, b, bias, turned=turned, add=add, scale=scale)
        error = (found.double() - true).abs().max() / true.abs().max()
        assert error < (2**-8 if of_c == torch.bfloat16 else 1e-6), (kinds, error)


def test_rows_longer_than_what_is_read() -> None:
    torch.manual_seed(0)
    a, b, room = torch.randn(70, 33), torch.randn(33, 50), torch.full((70, 64), 7.0)
    longer = torch.full((70, 40), torch.nan)
    longer[:, :33] = a
    call("product", room, longer, b, None, 50, 33, False, False, False, 1.0)
    assert torch.equal(room[:, :50], product(torch.empty(70, 50), a, b)) and bool((room[:, 50:] == 7).all())
    held = torch.full((33, 90), torch.nan)  # of which 70 columns are the factor, turned
    held[:, :70] = a.t()
    call("product", room, held, b, None, 50, 33, True, False, False, 1.0)
    assert torch.equal(room[:, :50], product(torch.empty(70, 50), a, b))


def test_threads_change_nothing() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 5000), torch.randn(5000, 700)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(product(torch.empty(300, 700), a, b))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_sizes_that_do_not_belong_together() -> None:
    c, a, b = torch.zeros(4, 5), torch.zeros(4, 6), torch.zeros(6, 5)
    for wrong in ((c, a, b, None, 6, 6), (c, a, b, None, 5, 7), (c, a, b, None, 5, 5), (c, a, b.t().contiguous(), None, 5, 6)):
        with pytest.raises(ValueError, match="product: c, a and b: sizes"):
            call("product", *wrong, False, False, False, 1.0)
    with pytest.raises(ValueError, match="product: bias"):
        call("product", c, a, b, torch.zeros(4), 5, 6, False, False, False, 1.0)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_errs_no_more_than_torchs(dtype: torch.dtype, weights: torch.dtype) -> None:
    torch.manual_seed(0)
    given = (torch.randn(3, 50, 96).to(dtype), torch.randn(70, 96).to(weights), torch.randn(70).to(weights))
    grad = torch.randn(3, 50, 70)
    results = []
    for function in (module.linear, F.linear):
        x, w, b = (t.detach().clone().requires_grad_() for t in given)
        with torch.autocast("cpu", torch.bfloat16), kernels_called() as seen:
            out = function(x, w, b)
            out.backward(grad.to(out.dtype))
        assert [name for name, _ in seen] == ["product"] * (3 if function is module.linear else 0)
        results.append((out.detach(), x.grad, w.grad, b.grad))
    x, w, b = (t.detach().double().requires_grad_() for t in given)
    true = F.linear(x, w, b)
    true.backward(grad.bfloat16().double())
    for ours, theirs, exact in zip(*results, (true.detach(), x.grad, w.grad, b.grad), strict=True):
        assert ours is not None and theirs is not None and exact is not None
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        off = [float((t.detach().double() - exact).norm() / exact.norm()) for t in (ours, theirs)]
        assert off[0] <= max(off[1] * 1.02, 1e-6), off


def test_torch_forms_the_products_of_few_rows_and_those_that_nobody_trains() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 32).bfloat16()
    for rows, grad in ((module.MANY - 1, True), (module.MANY, False)):
        x = torch.randn(rows, 32).bfloat16().requires_grad_()
        with torch.set_grad_enabled(grad), kernels_called() as seen:
            assert torch.equal(module.linear(x, weight), F.linear(x, weight))
        assert not seen
    half = torch.randn(80, 32).half().requires_grad_()
    with kernels_called() as seen:
        module.linear(half, weight.half()).sum().backward()
    assert not seen


def test_a_gradient_of_a_gradient() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(70, 9).bfloat16().requires_grad_(), torch.randn(5, 9).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        (dx,) = torch.autograd.grad(module.linear(x, w).float().pow(2).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.float().sum(), w)
    double, rows = w.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    (true,) = torch.autograd.grad(F.linear(rows, double).pow(2).sum(), rows, create_graph=True)
    (expected,) = torch.autograd.grad(true.sum(), double)
    assert (again - expected).norm() < 0.02 * expected.norm()


def trained(how: str) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    norm = partial(LayerNorm, 32, 1e-5)
    block = PreNorm(norm, Attention(32, 2), FFN(32, 64, ops.gelu), dropout=0.1)
    model = nn.ModuleList([block])
    recompute(model, how)  # type: ignore[arg-type]  # a word of them
    x = torch.randn(2, 48, 32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), kernels_called() as seen:
        torch.manual_seed(1)
        out = block(x, Batch(x).view(causal=True))
        out.float().pow(2).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], [name for name, _ in seen if name == "product"]  # type: ignore[list-item]


def test_recompute_repeats_no_product_that_it_keeps_and_changes_no_bit() -> None:
    grads, products = trained("none")
    assert len(products) == 3 * 6
    for how, repeated in (("selective", 0), ("full", 6)):
        again, more = trained(how)
        assert all(map(torch.equal, grads, again)), how
        assert len(more) <= len(products) + repeated, how


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_head_in_several_chunks(weights: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    n, dim, vocab = 300, 40, 131
    given = (torch.randn(n, dim), torch.randn(vocab, dim).to(weights) / dim**0.5, torch.randn(vocab).to(weights) if bias else None)
    labels = torch.randint(vocab, (n,)).masked_fill(torch.rand(n) < 0.3, -100)
    head = __import__("modelcenter.ops.linear_cross_entropy", fromlist=["BYTES"])

    def of(dtype: torch.dtype | None) -> list[Tensor | None]:
        x, w, b = (None if t is None else t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in given)
        assert x is not None and w is not None
        if dtype is not None:
            loss = F.cross_entropy(F.linear(x, w, b), labels, ignore_index=-100, reduction="sum")
        else:
            with torch.autocast("cpu", torch.bfloat16), mock.patch.dict(head.BYTES, cpu=100 * 192 * 2):
                loss = ops.linear_cross_entropy(x, w, b, labels)
        (loss / n).backward()
        return [loss.detach(), x.grad, w.grad, None if b is None else b.grad]

    with kernels_called() as seen:
        found = of(None)
    assert [name for name, _ in seen].count("product") >= 6  # of two chunks or more
    for ours, true in zip(found, of(torch.float64), strict=True):
        if ours is not None and true is not None:
            assert (ours.double() - true).norm() < 0.01 * true.norm()
