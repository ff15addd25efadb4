"""The linear layer on a CPU without units for low precision, and on a GPU: the values and gradients of F.linear, rounded once; and
several products of one input, whose gradient is formed without additions."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelcenter import ops
from modelcenter.layers import FFN, Attention, Batch, Embedding, GatedFFN, Linear, PreNorm, RMSNorm, Rotary, Stack, View
from modelcenter.layers.linear import rounding, together
from modelcenter.layers.rope import PLAIN
from modelcenter.ops import gated_linear as gated
from modelcenter.ops import linear as module
from modelcenter.ops._kernels import available
from modelcenter.ops._mode import rehearsal
from modelcenter.parallel.blocks import recompute
from modelcenter.plan.tally import Tally

KERNELS = ops.swiglu.fast(torch.zeros(1))


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
        pytest.skip("torch refuses two dtypes")
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


def test_few_rows_of_generation_need_no_wide_copy_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those, without a gradient, the only product is one of bf16; of more, or with one, one of fp32."""
    seen: list[torch.dtype] = []
    plain = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(x.dtype) or plain(x, *rest))
    w = torch.randn(32, 48, dtype=torch.bfloat16)
    for rows, kind in ((1, torch.bfloat16), (4, torch.bfloat16), (5, torch.float32)):
        x = torch.randn(rows, 1, 48, dtype=torch.bfloat16)
        with torch.no_grad():
            found = module.linear(x, w)
            assert seen.pop() == kind and found.dtype == torch.bfloat16
        torch.testing.assert_close(found, module.linear(x, w), rtol=2e-2, atol=1e-1)
        assert seen.pop() == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        module.linear(torch.randn(1, 48), w.float())
        assert seen.pop() == torch.float32  # its weight would be copied either way


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


# ---- several products of one input

WIDTHS = (7, 5, 3)
Many = Sequence[Tensor | None]


def separate(x: Tensor, weights: Sequence[Tensor], biases: Many) -> tuple[Tensor, ...]:
    return tuple(map(partial(F.linear, x), weights, biases))


def one_op(x: Tensor, weights: Sequence[Tensor], biases: Many) -> tuple[Tensor, ...]:
    """As on a GPU."""
    out: tuple[Tensor, ...] = module.Summed.apply(x, x.dtype, *weights, *biases)
    return out


def several(dtype: torch.dtype, shape: tuple[int, ...] = (2, 4, 6)) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """An input, weights, biases, the gradients of the products."""
    source = torch.Generator().manual_seed(0)
    shapes = shape, *((n, 6) for n in WIDTHS), *((n,) for n in WIDTHS), *((*shape[:-1], n) for n in WIDTHS)
    x, *rest = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    return x, rest[:3], rest[3:6], rest[6:]


@pytest.mark.parametrize("used", ["001", "010", "100", "011", "101", "110", "111"])
def test_whatever_is_used_frozen_or_left_out(used: str) -> None:
    """Exactly torch's gradients, and None where torch has None."""
    for wants_x, wants, bias in product((False, True), product((False, True), repeat=3), ("none", "frozen", "trained", "mixed")):
        if not wants_x and not any(wants) and bias in ("none", "frozen"):
            continue
        results = []
        for function in (one_op, separate):
            x, weights, biases, grads = several(torch.float64)
            x.requires_grad_(wants_x)
            for w, wanted in zip(weights, wants, strict=True):
                w.requires_grad_(wanted)
            for i, b in enumerate(biases):
                b.requires_grad_(bias == "trained" or (bias == "mixed" and i == 1))
            given = [None if bias == "none" or (bias == "mixed" and i == 0) else b for i, b in enumerate(biases)]
            outs = function(x, weights, given)
            ends = [(o, g) for o, g, use in zip(outs, grads, used, strict=True) if use == "1" and o.requires_grad]
            if ends:
                torch.autograd.backward([out for out, _ in ends], [g for _, g in ends])
            results.append([*outs, *(t.grad for t in (x, *weights, *biases))])
        for found, expected in zip(*results, strict=True):
            assert (found is None) == (expected is None), (wants_x, wants, bias)
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_their_gradients_have_gradients() -> None:
    x, weights, biases, _ = several(torch.float64, (2, 6))
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    assert torch.autograd.gradcheck(lambda x, *rest: one_op(x, rest[:3], rest[3:]), leaves)
    assert torch.autograd.gradgradcheck(lambda x, *rest: one_op(x, rest[:3], rest[3:]), leaves)


ROADS: dict[str, Any] = {
    "wide": lambda x, w, low: module.Wide.apply(x, w, None, low),
    "summed": lambda x, w, low: module.Summed.apply(x, low, w, None)[0],
    "rectified": lambda x, w, low: module.Rectified.apply(x, low, w, None, 0.0),
}


@pytest.mark.parametrize("road", ROADS)
def test_a_gradient_of_rounded_copies_has_none(road: str) -> None:
    """To autograd they are constants: refused, but where nobody asks what they were made of. Then it is torch's under autocast."""
    for of_x, of_weight, x_wants, w_wants, right in (
        (torch.float32, torch.float32, True, True, False), (torch.float32, torch.bfloat16, True, True, False),
        (torch.bfloat16, torch.bfloat16, True, True, True), (torch.float32, torch.float32, True, False, True),
        (torch.float32, torch.float32, False, True, True), (torch.bfloat16, torch.float32, True, True, road == "wide"),
    ):  # fmt: skip
        made: list[Any] = []
        for ours in (True, False):
            source = torch.Generator().manual_seed(0)
            x, w = torch.randn(8, 4, generator=source).to(of_x), torch.randn(5, 4, generator=source).to(of_weight)
            x.requires_grad_(x_wants)
            w.requires_grad_(w_wants)
            wanted = [t for t in (x, w) if t.requires_grad]
            with torch.autocast("cpu", torch.bfloat16):
                out = ROADS[road](x, w, torch.bfloat16) if ours else F.linear(x, w)
            out = out.relu() if road == "rectified" and not ours else out
            if ours and not right:
                with pytest.raises(RuntimeError, match=r"^create_graph=True, and a product in torch\.bfloat16 has kept a"):
                    torch.autograd.grad(out.float().square().sum(), wanted, create_graph=True)
                break
            first = torch.autograd.grad(out.float().square().sum(), wanted, create_graph=True)
            again = torch.autograd.grad(sum(g.float().square().sum() for g in first), wanted)
            made.append([*first, *again])
        for found, expected in zip(*made, strict=True) if right else ():
            torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2 * expected.abs().max().item())


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_product_is_added_to_fp32_by_pieces(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row once, whatever of the last piece is left; no tensor of the size of the whole is made."""
    monkeypatch.setattr(module, "PIECE", 4 * 2 * 24)  # four rows of 24
    out, a, b = torch.randn(11, 24), torch.randn(6, 11).bfloat16().t(), torch.randn(6, 24).bfloat16()
    wanted, seen = out * beta + (a.float() @ b.float()) * 0.5, []
    product = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *args, **options: seen.append(len(args[1])) or product(*args, **options))
    module.multiply(out, a, b, beta, 0.5)
    assert seen == [4, 4, 3]
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("road", ["summed", "rectified"])
def test_many_gradients_of_a_product_are_right_or_refused(road: str) -> None:
    many = torch.randn(3, 8, 5).bfloat16()
    for kind in (torch.float32, torch.bfloat16):
        x, w = torch.randn(8, 4, dtype=kind).requires_grad_(), torch.randn(5, 4, dtype=kind).requires_grad_()
        out = ROADS[road](x, w, torch.bfloat16)
        if kind == torch.bfloat16:
            with pytest.raises(RuntimeError, match=r"^is_grads_batched=True"):
                torch.autograd.grad(out, (x, w), many, is_grads_batched=True)
            continue
        found = torch.autograd.grad(out, (x, w), many, is_grads_batched=True, retain_graph=True)
        for i, one in enumerate(many):
            wanted = torch.autograd.grad(out, (x, w), one, retain_graph=True)
            assert all(torch.equal(ours[i], alone) for ours, alone in zip(found, wanted, strict=True))


@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_the_sum_is_rounded_no_more_than_by_additions(of_x: torch.dtype) -> None:
    x, weights, biases, grads = several(torch.bfloat16, (64, 6))
    errors = []
    for function in (one_op, separate):
        leaf = x.to(of_x).requires_grad_()
        low = leaf.to(torch.bfloat16) if function is separate else leaf
        if function is one_op:
            outs = module.Summed.apply(low, torch.bfloat16, *weights, *biases)
        else:
            outs = separate(low, weights, biases)
        torch.autograd.backward(outs, grads)
        exact = sum(g.double() @ w.double() for g, w in zip(grads, weights, strict=True))
        assert leaf.grad.dtype == of_x
        errors.append((leaf.grad.double() - exact).norm() / exact.norm())
    assert errors[0] <= errors[1]


def test_an_empty_input() -> None:
    x, weights, biases, _ = several(torch.float64, (0, 4, 6))
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    outs = one_op(x, weights, biases)
    assert [tuple(out.shape) for out in outs] == [(0, 4, n) for n in WIDTHS]
    torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in leaves)


@pytest.mark.parametrize(("wants_x", "wants_weight", "kept"), [(True, True, "x w w w"), (True, False, "w w w"), (False, True, "x")])
def test_only_what_the_backward_reads_is_kept(wants_x: bool, wants_weight: bool, kept: str) -> None:
    x, weights, biases, _ = several(torch.float64)
    x.requires_grad_(wants_x)
    weights[1].requires_grad_(wants_weight)
    seen: list[str] = []

    def pack(t: Tensor) -> Tensor:
        seen.append("x" if t.shape == x.shape else "w")
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        one_op(x, weights, biases)
    assert " ".join(seen) == kept


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What is done on a GPU, done here; how many products each op was of."""
    sizes: list[int] = []

    def low(x: Tensor, weights: Sequence[Tensor]) -> torch.dtype | None:
        sizes.append(len(weights))
        return x.dtype if torch.is_grad_enabled() else None

    monkeypatch.setattr(module, "low_dtype", lambda x: None)
    monkeypatch.setattr(module, "trained_low", low)
    return sizes


def layer_of(kind: str, dim: int = 32) -> tuple[nn.Module, tuple[Any, ...]]:
    """A layer, and what it is called with beside its input."""
    torch.manual_seed(0)
    batch = Batch(torch.zeros(2, 8, dim))
    view = batch.view(causal=True, angles=Rotary(8, PLAIN)(batch.at, torch.float32))
    ffn = GatedFFN(dim, 48, ops.swiglu)
    attn = Attention(dim, 4, kv_heads=2)
    made: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "ffn": (ffn, ()), "attention": (attn, (view,)), "across": (attn, (View(memory=torch.randn(2, 5, dim).requires_grad_()),)),
        "block": (PreNorm(lambda: RMSNorm(dim, 1e-5), attn, ffn), (view,)),
    }  # fmt: skip
    return made[kind]


def gradients(layer: nn.Module, rest: tuple[Any, ...], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, *rest)
    wanted = [x, *layer.parameters(), *(v.memory for v in rest if v.memory is not None)]
    return [out.detach(), *torch.autograd.grad(out, wanted, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))]


class Additions(TorchDispatchMode):
    """How many tensors of a shape are added: by us, or by autograd, which says so to nobody else."""

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        self.shape, self.seen = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


def additions(layer: nn.Module, rest: tuple[Any, ...], x: Tensor) -> int:
    with Additions(x.shape) as counted:
        gradients(layer, rest, x)
    return counted.seen


def of_one_input(device: str, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], Tensor, int]]:
    """Layers, and the additions that must be: a block's to the residual stream, forward and backward."""
    for kind, must in (("ffn", 0), ("attention", 0), ("block", 2)):
        layer, rest = layer_of(kind)
        yield kind, layer.to(device, dtype), rest, torch.randn(2, 8, 32).to(device, dtype), must


def test_layers_with_several_products_of_one_input(as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, sizes in (("ffn", [2, 1]), ("attention", [3, 1]), ("across", [1, 2, 1]), ("block", [3, 1, 2, 1])):
        layer, rest = layer_of(kind)
        x = torch.randn(2, 8, 32)
        as_on_gpu.clear()
        found = gradients(layer, rest, x)
        assert as_on_gpu == sizes
        with monkeypatch.context() as m:
            m.setattr(module, "trained_low", lambda x, weights: None)
            expected = gradients(layer, rest, x)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_no_additions_of_activations(as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, layer, rest, x, must in of_one_input("cpu", torch.float32):
        found = additions(layer, rest, x)
        assert found == must or not available("cpu"), kind  # a norm without a kernel adds the residual stream by itself
        with monkeypatch.context() as m:
            m.setattr(module, "trained_low", lambda x, weights: None)
            assert additions(layer, rest, x) > found, kind


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recompute_of_several_products(as_on_gpu: list[int], how: Any) -> None:
    layer, rest = layer_of("block")
    x = torch.randn(2, 8, 32)
    plain = gradients(layer, rest, x)
    again = nn.ModuleList([layer])
    recompute(again, how)
    for found, expected in zip(gradients(layer, rest, x), plain, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_layer_that_is_watched_is_called_by_itself(as_on_gpu: list[int]) -> None:
    x, layers = torch.randn(3, 6), [Linear(6, n) for n in WIDTHS]
    seen: list[Tensor] = []
    layers[1].register_forward_hook(lambda layer, args, out: seen.append(out))
    outs = together(x, *layers)
    assert as_on_gpu == [1, 1, 1] and seen[0] is outs[1]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("way", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_hook_of_all_modules_sees_each_layer(as_on_gpu: list[int], way: str) -> None:
    """Those too that an op does together with what stands beside them; and what is computed stays what it was."""
    layer, _ = layer_of("block")
    embed, x, seen = Embedding(3, 32), torch.tensor([[0, 1, 2, 1]] * 2), list[nn.Module]()
    quiet = gradients(layer, (View(causal=True),), embed(x).detach())
    handle = getattr(torch.nn.modules.module, f"register_module_{way}_hook")(lambda module, *given: seen.append(module))
    try:
        h = embed(x)
        found = gradients(layer, (View(causal=True),), h.detach())
        h.sum().backward()
    finally:
        handle.remove()
    weighty = [m for whole in (layer, embed) for m in whole.modules() if any(True for _ in m.parameters(recurse=False))]
    assert len(weighty) == 10 and [name for name, m in layer.named_modules() if m in weighty and m not in seen] == []
    assert embed.tokens in seen
    for ours, theirs in zip(found, quiet, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_a_hook_has_seen_is_not_rotated_under_it(as_on_gpu: list[int]) -> None:
    layer, rest = layer_of("attention")
    seen: list[Tensor] = []
    layer.k.register_forward_hook(lambda layer, args, out: seen.append(out))
    x = torch.randn(2, 8, 32)
    layer(x, *rest)
    torch.testing.assert_close(seen[0], F.linear(x, layer.k.weight, layer.k.bias))


# ---- products of gated activations


def of_gated(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gate and up as products leave them, weight and bias, the gradient of the result."""
    source, shapes = torch.Generator().manual_seed(0), ((2, 9, 40), (2, 9, 40), (24, 40), (24,), (2, 9, 24))
    gate, up, weight, bias, grad = (torch.randn(shape, generator=source).to(dtype) for shape in shapes)
    return [gate.requires_grad_() * 1, up.requires_grad_() * 1], [weight.requires_grad_(), bias.requires_grad_()], grad


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels")
@pytest.mark.parametrize("act", ["geglu", "geglu_tanh", "reglu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_a_gated_activation(as_on_gpu: list[int], dtype: torch.dtype, act: str) -> None:
    """The bits of the two ops; the gradients of gate and up lie where these did, but where another backward will read them."""
    hidden, factors, grad = of_gated(dtype)
    out = module.linear(ops.OPS[act](*hidden), *factors)
    wanted = torch.autograd.grad(out, (*hidden, *factors), grad)
    made = gated.gated_linear(ops.OPS[act], *hidden, *factors)
    assert torch.equal(made, out)
    for again in (True, True, False):
        found = torch.autograd.grad(made, (*hidden, *factors), grad, retain_graph=again)
        assert all(torch.equal(ours, theirs) and ours.dtype == theirs.dtype for ours, theirs in zip(found, wanted, strict=True))
        assert all((ours.data_ptr() == at.data_ptr()) is not again for ours, at in zip(found, hidden, strict=False))


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels")
@pytest.mark.parametrize("act", ["geglu", "geglu_tanh", "reglu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_a_gated_activation_with_dropout(as_on_gpu: list[int], dtype: torch.dtype, act: str) -> None:
    """The bits of the ops in fp32; in bf16, where the ops round twice, nothing that is farther from fp64 than theirs."""
    hidden, (weight, bias), grad = of_gated(dtype)
    seed, p = torch.tensor([7]), 0.3
    leaves = (*hidden, weight, bias)
    ours = gated.gated_linear(ops.OPS[act], *hidden, weight, bias, seed, p)
    theirs = module.linear(ops.dropout(ops.OPS[act](*hidden), None, seed, p), weight, bias)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wide = F.linear(ops.dropout(ops.OPS[act](*exact[:2]), None, seed, p), *exact[2:])
    wanted = [wide, *torch.autograd.grad(wide, exact, grad.double())]
    expected = [theirs, *torch.autograd.grad(theirs, leaves, grad)]
    for again in (True, False):
        found = [ours, *torch.autograd.grad(ours, leaves, grad, retain_graph=again)]
        for a, b, c in zip(found, expected, wanted, strict=True):
            if dtype == torch.float32:
                assert torch.equal(a, b)
            else:
                assert (a.double() - c).norm() <= 1.02 * (b.double() - c).norm()


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels")
def test_the_operator_of_a_gated_activation_drops_in_both_directions() -> None:
    """In fp32, with the bits of the two ops."""
    (gate, up), _, _ = of_gated()
    seed, p, grad = torch.tensor([5]), 0.3, torch.randn_like(gate)
    made = [torch.ops.modelcenter.swiglu_forward(gate, up, seed, p), ops.dropout(ops.swiglu(gate, up), None, seed, p)]
    for found, wanted in zip(*((out, *torch.autograd.grad(out, (gate, up), grad)) for out in made), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels")
def test_who_has_kept_what_is_written_over_is_told(as_on_gpu: list[int]) -> None:
    (gate, up), factors, grad = of_gated()
    square, out = gate * gate, gated.gated_linear(ops.swiglu, gate, up, *factors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward((out, square), (grad, torch.ones_like(square)))


def test_gate_and_up_that_cannot_be_written_over(as_on_gpu: list[int]) -> None:
    """They lie askew, in another order, no kernel takes them; or one of them, or the weight, is frozen."""
    (gate, up), (weight, bias), grad = of_gated()
    askew = [torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape) for x in (gate, up)]
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (gate, up)]
    given = [(*askew, weight), (*turned, weight), (gate.double(), up.double(), weight.double()), (gate, up.detach(), weight)]
    for a, b, w in (*given, (gate, up, weight.detach())):
        before, wants = a.clone(), [t for t in (a, b, w) if t.requires_grad]
        results = []
        for function in (gated.gated_linear, lambda act, gate, up, w, b: F.linear(act(gate, up), w, b)):
            out = function(ops.swiglu, a, b, w, bias.to(w.dtype))
            results.append([out, *torch.autograd.grad(out, wants, grad.to(out.dtype))])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(a, before)


HIDDEN = 1000 * 96 * 2  # bytes of what is hidden in `rehearsed`


def rehearsed(layer: nn.Module) -> tuple[float, float, dict[int, int]]:
    """Of a forward and a backward in bf16 as on a GPU, in tensors of what is hidden: how many are kept between them; how many there
    are at most in the backward, beside what was there before; and how often a kernel reads and writes so many, if two at least."""
    with Tally() as tally, rehearsal(tally.kernel, gpu=True):
        x = torch.empty(1000, 8, dtype=torch.bfloat16, requires_grad=True)
        before = sum(tally.now.values())
        out = layer.to(torch.bfloat16)(x).sum()
        kept = sum(tally.now.values()) - before
        tally.enter("backward", "temporary")
        out.backward()
    moved = {round(work.bytes / HIDDEN): n for work, n in tally.work.items() if work.kind == "move" and work.bytes > 1.5 * HIDDEN}
    return kept / HIDDEN, (max(map(sum, tally.moments["backward"])) - before) / HIDDEN, moved


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_gated_layer_keeps_two_hidden_tensors(p: float) -> None:
    """And its backward takes room for a third. Its kernel reads and writes all three; dropout none once more."""
    kept, most, moved = rehearsed(GatedFFN(8, 96, ops.swiglu, dropout=p))
    assert 2 <= kept < 2.2 and most < 3.4 and moved == {3: 1, 6: 1}


def test_a_layer_with_relu_and_dropout_keeps_one_hidden_tensor() -> None:
    """Beside its input; and its backward has no pass for dropout."""
    kept, _, moved = rehearsed(FFN(8, 96, ops.relu, bias=False, dropout=0.1))
    assert 1 <= kept < 1.2 and moved == {2: 1, 3: 1}, "dropout forward; relu's slope"


def test_a_gated_layer_drops_of_its_hidden_layer() -> None:
    layer, x = GatedFFN(8, 24, ops.swiglu, dropout=1.0), torch.randn(2, 8)
    assert not layer(x).any() and layer.eval()(x).all()


def test_what_a_hook_has_seen_is_not_written_over(as_on_gpu: list[int]) -> None:
    def watch(name: str) -> tuple[nn.Module, list[Tensor]]:
        layer, seen = layer_of("ffn")[0], list[Tensor]()
        getattr(layer, name).register_forward_hook(lambda layer, args, out: seen.extend((*args, out)))
        return layer, seen

    for name in ("gate", "up", "down"):
        layer, seen = watch(name)
        out = layer(torch.randn(2, 8, 32).requires_grad_())
        before = [t.detach().clone() for t in seen]
        out.sum().backward()
        assert len(seen) == 2 and all(torch.equal(ours, as_it_was) for ours, as_it_was in zip(seen, before, strict=True)), name


# ---- relu of a product


def of_relu(dtype: torch.dtype, shape: tuple[int, ...] = (2, 5, 6)) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight, the gradient of relu of their product."""
    source = torch.Generator().manual_seed(0)
    shapes = shape, (7, 6), (*shape[:-1], 7)
    x, w, g = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    return x, w, g


@pytest.mark.parametrize(("wants_x", "wants_weight"), [(True, True), (True, False), (False, True)])
def test_relu_of_a_product(as_on_gpu: list[int], wants_x: bool, wants_weight: bool) -> None:
    for shape in ((2, 5, 6), (0, 6), (6,)):
        results = []
        for function in (module.rectified, lambda x, w: F.linear(x, w).relu()):
            x, w, g = of_relu(torch.float64, shape)
            out = function(x.requires_grad_(wants_x), w.requires_grad_(wants_weight))
            out.backward(g)
            results.append((out, x.grad, w.grad))
        assert as_on_gpu and "Rectified" in str(module.rectified(x, w).grad_fn)
        for found, expected in zip(*results, strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_relu_of_a_product_with_dropout(as_on_gpu: list[int], p: float) -> None:
    seed, results = torch.tensor([3]), []
    for function in (module.rectified, lambda x, w, seed, p: ops.dropout(F.linear(x, w).relu(), None, seed, p)):
        x, w, g = of_relu(torch.float64, (2, 50, 6))
        out = function(x.requires_grad_(), w.requires_grad_(), seed, p)
        out.backward(g)
        results.append((out, x.grad, w.grad))
        if function is module.rectified:
            assert "Rectified" in str(out.grad_fn)
            few = x.detach()[:, :3].requires_grad_()
            assert torch.autograd.gradgradcheck(lambda x, w: module.rectified(x, w, seed, p), (few, w))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_relu_of_a_product_has_gradients_of_gradients(as_on_gpu: list[int]) -> None:
    x, w, _ = (t.requires_grad_() for t in of_relu(torch.float64))
    assert torch.autograd.gradcheck(module.rectified, (x, w))
    assert torch.autograd.gradgradcheck(module.rectified, (x, w))


def test_relu_without_a_gradient_is_the_op(as_on_gpu: list[int]) -> None:
    x, w, _ = of_relu(torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(module.rectified(x, w), F.linear(x, w).relu())
    x[0, 0] = torch.nan
    assert module.rectified(x, w.requires_grad_())[0, 0].isnan().all(), "what is no number stays none"


def test_a_layer_does_relu_within_its_product(as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is nothing but itself and has no bias."""
    taken: list[Tensor] = []
    function = module.rectified
    monkeypatch.setattr("modelcenter.layers.ffn.rectified", lambda x, w, *drop: taken.append(w) or function(x, w, *drop))
    x = torch.randn(2, 3, 8)
    for act, bias, hooked in ((ops.relu, False, False), (ops.relu, True, False), (ops.gelu, False, False), (ops.relu, False, True)):
        ffn = FFN(8, 16, act, bias=bias)
        if hooked:
            ffn.up.register_forward_hook(lambda layer, args, out: None)
        taken.clear()
        found = gradients(ffn, (), x)
        assert len(taken) == (act is ops.relu and not bias and not hooked)
        with monkeypatch.context() as m:
            m.setattr(module, "trained_low", lambda x, weights: None)
            for ours, theirs in zip(found, gradients(ffn, (), x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recompute_of_relu_in_a_product(as_on_gpu: list[int], how: Any) -> None:
    torch.manual_seed(0)
    block = PreNorm(lambda: RMSNorm(16, 1e-5), Attention(16, 2), FFN(16, 32, ops.relu, bias=False))
    x, view = torch.randn(2, 4, 16), View(causal=True)
    plain = gradients(block, (view,), x)
    recompute(nn.ModuleList([block]), how)
    products: list[str] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            products.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Watched():
        again = gradients(block, (view,), x)
    for found, expected in zip(again, plain, strict=True):
        torch.testing.assert_close(found, expected)
    assert products.count("aten::_addmm_activation") == (2 if how == "full" else 1), "what selective recompute keeps"


# ---- weights in fp32, rounded by one call for all layers of a block


class Casts:
    """What is rounded by one call, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[Tensor]] = []
        together = torch._foreach_copy_
        monkeypatch.setattr(torch, "_foreach_copy_", lambda made, wide: (self.calls.append(list(wide)), together(made, wide)))


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Casts:
    """What is done on a GPU under autocast, done here."""
    monkeypatch.setattr("modelcenter.layers.linear.on_gpu", lambda x: True)
    monkeypatch.setattr(module, "low_dtype", lambda x: None)
    monkeypatch.setattr(module, "trained_low", lambda x, weights: torch.bfloat16 if torch.is_grad_enabled() else None)
    return Casts(monkeypatch)


def stack_of(blocks: int = 2) -> Stack:
    torch.manual_seed(0)
    norm = partial(RMSNorm, 16, 1e-5)
    ffns = FFN(16, 24, ops.relu, bias=False), GatedFFN(16, 24, ops.swiglu)
    return Stack(PreNorm(norm, Attention(16, 2), ffns[i % 2]) for i in range(blocks))


def trained(stack: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        out = stack(x, View(causal=True))
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [p for p in stack.parameters() if p.requires_grad])]


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_weights_of_a_block_are_rounded_by_one_call(casts: Casts, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """To the same numbers as each by itself, recompute or not; what has changed since is seen, however it changed."""
    stack, x = stack_of(), torch.randn(2, 5, 16)
    recompute(stack, how)
    for change in range(2):
        found = trained(stack, x)
        for block, call in zip(stack.blocks, casts.calls, strict=False):
            layers = [layer for layer in block.modules() if isinstance(layer, Linear)]
            assert {id(p) for layer in layers for p in layer.parameters()} == set(map(id, call))
        assert len(casts.calls) == (2 if how == "none" else 4)
        with monkeypatch.context() as m:
            m.setattr("modelcenter.layers.block.rounding", lambda block, x: nullcontext())
            casts.calls.clear()
            for ours, theirs in zip(found, trained(stack, x), strict=True):
                assert torch.equal(ours, theirs)
            assert len(casts.calls) > 2
        casts.calls.clear()
        stack.blocks[change].attn.q.weight.data.mul_(2)
        assert not module.HERE.copies


def test_what_is_not_rounded_ahead(casts: Casts, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not train, layers that are more than themselves, weights that are not fp32; none without autocast or a gradient."""
    stack = stack_of(1)
    block = stack.blocks[0]
    block.attn.q.requires_grad_(False)
    block.attn.v.register_forward_hook(lambda layer, args, out: None)
    block.attn.o.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        with rounding(block, torch.randn(1)):
            named = {name for name, p in block.named_parameters() if p in module.HERE.copies}
        assert named == {"attn.k.weight", "attn.k.bias", "ffn.up.weight", "ffn.down.weight"}
        with torch.no_grad(), rounding(block, torch.randn(1)):
            assert not module.HERE.copies
        with monkeypatch.context() as m:
            m.setattr("torch.compiler.is_compiling", lambda: True)
            with rounding(block, torch.randn(1)):
                assert not module.HERE.copies
    with rounding(block, torch.randn(1)):
        assert not module.HERE.copies
    with torch.autocast("cpu", torch.float16), rounding(block, torch.randn(1)):
        assert all(copy.dtype == torch.float16 for _, copy in module.HERE.copies.values()) and len(module.HERE.copies) == 4


def test_a_weight_that_changes_while_its_block_is_at_work(casts: Casts) -> None:
    """By a hook, say: it is rounded again. A block that fails leaves no copies, and one within another gives them back."""
    w, v = torch.randn(4, 4).requires_grad_(), torch.randn(4, 4).requires_grad_()
    low = torch.bfloat16
    with module.rounded([w, v], low):
        first = module.lowered([w, v], low)
        assert module.lowered([w], low)[0] is first[0] and module.lowered([w], torch.float16)[0].dtype == torch.float16
        with torch.no_grad():
            w.mul_(3)
        assert torch.equal(module.lowered([w], low)[0], w.detach().to(low)) and module.lowered([v], low)[0] is first[1]
        with pytest.raises(KeyError), module.rounded([v], low):
            assert w not in module.HERE.copies
            raise KeyError
        assert module.lowered([v], low)[0] is first[1]
    assert not module.HERE.copies
    with ThreadPoolExecutor(1) as other, module.rounded([w], low):
        assert not other.submit(lambda: module.HERE.copies).result()


def test_factors_are_cast_together() -> None:
    factors = [torch.randn(3, 4), None, torch.randn(5).bfloat16(), torch.randn(2, 2, dtype=torch.float64), torch.randn(0)]
    found = module.narrowed(factors, torch.bfloat16)
    assert found[1] is None and found[2] is factors[2]
    for a, b in zip(found, factors, strict=True):
        assert a is None or b is None or (a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16()))
    assert module.narrowed((factors[0],), torch.float32)[0] is factors[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS", "ignore:.*Profiler clears events")
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_relu_of_a_product_on_a_gpu(low: torch.dtype) -> None:
    """As near the truth as torch's, twice the same, in one product; what is no number stays none."""
    from torch.profiler import ProfilerActivity, profile

    runs, g = [], torch.randn(3, 2000, 256, device="cuda").to(low)
    for function in (module.rectified, lambda x, w: F.linear(x, w).relu(), module.rectified):
        torch.manual_seed(0)
        x, w = (torch.randn(s, device="cuda").requires_grad_() for s in ((3, 2000, 96), (256, 96)))
        with torch.autocast("cuda", low):
            out = function(x, w)
        out.backward(g)
        runs.append([out, x.grad, w.grad])
    assert all(torch.equal(p, q) for p, q in zip(runs[0], runs[2], strict=True))
    h, v = x.detach().to(low).double(), w.detach().to(low).double()
    slope = (out > 0) * g.double()
    exact = (h @ v.t()).relu(), slope @ v, slope.flatten(0, 1).t() @ h.flatten(0, 1)
    for found, other, true in zip(*runs[:2], exact, strict=True):
        off, torchs = ((t.double() - true).norm() / true.norm() for t in (found, other))
        assert found.dtype == other.dtype and off <= torchs * 1.05
    with torch.autocast("cuda", low), profile(activities=[ProfilerActivity.CUDA]) as kernels:
        module.rectified(x, w)
    assert not any("clamp" in row.key for row in kernels.key_averages())
    with torch.no_grad():
        x[0, 0, 0] = torch.nan
    with torch.autocast("cuda", low):
        assert module.rectified(x, w)[0, 0].isnan().all()


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
    assert torch.equal(ours[0], theirs[0]) and (dtype == torch.float32 or torch.equal(ours[1], theirs[1]))
    g = g.double().view(-1, 72)
    rounded, w = x.detach().to(low).double().view(-1, 96), w.detach().to(low).double()
    exact = (g @ w).view(x.shape), g.t() @ rounded, g.sum(0)
    for found, other, true in zip(ours[1:], theirs[1:], exact, strict=False):
        if found is ours[1] and dtype == torch.bfloat16:
            continue
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
    assert module.trained_low(x, (frozen,)) is None
    with torch.no_grad():
        assert module.trained_low(x, (w,)) is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the backward's thread of its first product
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_several_products_on_a_gpu(of_x: torch.dtype, autocast: bool) -> None:
    """torch's values to the bit; gradients as near the truth as torch's, twice the same; one of the products is not used."""
    if not autocast and of_x == torch.float32:
        pytest.skip("products of low precision alone are ours")
    torch.manual_seed(0)
    shapes = (3, 2000, 96), (72, 96), (40, 96), (48, 96), (72,), (48,)
    made = [torch.randn(s, device="cuda", dtype=of_x if i == 0 or not autocast else torch.float32) for i, s in enumerate(shapes)]
    grads = [torch.randn(3, 2000, n, device="cuda").bfloat16() for n in (72, 40)]
    runs = []
    for function in (module.linears, separate, module.linears):
        x, *rest = leaves_ = [t.clone().requires_grad_() for t in made]
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            outs = function(x, rest[:3], (rest[3], None, rest[4]))
        torch.autograd.backward(outs[:2], grads)
        runs.append([*outs, *(t.grad for t in leaves_)])
    ours, theirs, again = runs
    for p, q in zip(ours, again, strict=True):
        assert p is q is None or torch.equal(p, q)
    assert all(torch.equal(p, q) for p, q in zip(ours[:3], theirs[:3], strict=True))
    (g, h), low = (t.double().view(-1, t.size(-1)) for t in grads), [t.bfloat16().double() for t in made]
    flat = low[0].view(-1, 96)
    exact = (g @ low[1] + h @ low[2]).view(3, 2000, 96), g.t() @ flat, h.t() @ flat, None, g.sum(0), None
    for found, other, true, leaf in zip(ours[3:], theirs[3:], exact, made, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            assert found.dtype == leaf.dtype
            off, torchs = ((t.double() - true).norm() / true.norm() for t in (found, other))
            assert off <= torchs * 1.05


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_no_additions_of_activations_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, layer, rest, x, must in of_one_input("cuda", torch.bfloat16):
        view = tuple(View(causal=True) for _ in rest)
        found = gradients(layer, view, x)
        assert all(torch.equal(p, q) for p, q in zip(found, gradients(layer, view, x), strict=True)), kind
        assert additions(layer, view, x) == must, kind
        with monkeypatch.context() as m:
            m.setattr(module, "trained_low", lambda x, weights: None)
            for ours, theirs in zip(found, gradients(layer, view, x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=2e-2)
            assert additions(layer, view, x) > must, kind


class Beside(torch.autograd.Function):
    """The sum of three products, whose gradients lie side by side, as attention's do, or (`apart`) anywhere."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, apart: bool) -> Tensor:
        ctx.apart = apart
        return a + 2 * b + 3 * c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.stack([grad, 2 * grad, 3 * grad], -2)
        found = whole.unbind(-2)
        return *([g.clone() for g in found] if ctx.apart else found), None


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_side_by_side_are_one_matrix(bias: bool, as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One product each for the gradients of inputs, weights and biases, where the weights, too, lie one behind the other."""
    torch.manual_seed(0)
    layers, x, calls = [Linear(8, 8, bias=bias) for _ in range(3)], torch.randn(2, 5, 8), list[int]()
    real, found, factors = module.multiply, [], [p for layer in layers for p in layer.parameters()]
    monkeypatch.setattr(module, "trained_low", lambda x, weights: torch.bfloat16)
    monkeypatch.setattr(module, "multiply", lambda out, *rest: calls.append(out.numel()) or real(out, *rest))
    for apart, most in ((True, 0), (True, 3 * 10 * 8 * 2), (False, 0)):
        monkeypatch.setattr(module, "BESIDE", most)
        calls.clear()
        leaf, one = x.clone().requires_grad_(), most > 0 or not apart
        with torch.autocast("cpu", torch.bfloat16), module.rounded(factors, torch.bfloat16):
            out = Beside.apply(*together(leaf, *layers), apart)
        out.float().square().sum().backward()
        assert len(calls) == (1 if one else 3) * (3 if bias else 2)
        weights = [layer.weight.grad for layer in layers]
        with torch.no_grad():
            assert (module.joined(weights, 0) is None) is not one  # torch has taken them over, and copied nothing
        found.append([leaf.grad, *(p.grad for p in factors)])
        for p in factors:
            p.grad = None
    by_three, *by_one = found
    for other in by_one:
        for p, q in zip(by_three, other, strict=True):
            assert (p - q).abs().max() <= 2e-2 * q.abs().max()
    assert all(map(torch.equal, *by_one))


def test_what_is_laid_side_by_side() -> None:
    """Three gradients or more, together no larger than a copy pays for. Those of a gate and of what is gated are wider, and their
    products large enough."""
    parts = [torch.full((4, n), float(n), dtype=torch.bfloat16) for n in (3, 1, 2)]
    assert torch.equal(module.laid(parts), torch.cat(parts, 1))
    assert module.laid(parts[:2]) is None and module.laid([*parts, parts[0].float()]) is None
    large = torch.empty(2**20, 32, dtype=torch.bfloat16)
    assert module.laid([large, large[:, :16], large[:, :16]]) is not None
    assert module.laid([large, large[:, :16], large[:, :17]]) is None


def test_what_is_joined_lies_so_in_memory() -> None:
    whole = torch.arange(24.0).view(4, 6)
    with torch.no_grad():
        assert torch.equal(module.joined([whole[:, :2], whole[:, 2:5]], 1), whole[:, :5])
        assert torch.equal(module.joined([whole[1:2], whole[2:]], 0), whole[1:])
        for parts in ([whole], [whole[:, :2], whole[:, 3:]], [whole[:, 2:], whole[:, :2]], [whole[:2], whole[2:].clone()],
                      [whole[:, :2], whole[:, 2:].clone()]):  # fmt: skip
            assert module.joined(parts, 1) is None and module.joined(parts, 0) is None
        assert module.joined([whole[:1], whole[1:]], 1) is None  # rows are no columns
    assert module.joined([whole[:, :2], whole[:, 2:5]], 1) is None  # a graph of it would be of the first alone
