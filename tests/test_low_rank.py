"""Adapters as one op: the values and gradients of the layers that are composed of torch's functions, rounded no more than theirs;
and what is kept for the backward."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelcenter import ops
from modelcenter.layers import GatedFFN, Linear, ffn
from modelcenter.layers.adapter import Adapted
from modelcenter.layers.linear import together
from modelcenter.layers.quantized import Int8Linear, NF4Linear
from modelcenter.ops import linear as products
from modelcenter.ops import low_rank as module
from modelcenter.ops._mode import rehearsal
from modelcenter.plan.tally import Tally

KERNELS = ops.swiglu.fast(torch.zeros(1))
KINDS = {"plain": lambda layer: layer.requires_grad_(False), "nf4": NF4Linear.of, "int8": Int8Linear.of}
SEED = 11
IN, OUTS, RANK = 128, (64, 32, 64), 4


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dropout draws the same one, so that what is composed drops what the op does; and products in low precision are torch's
    on any CPU, as on a GPU."""
    monkeypatch.setattr(module, "draw", lambda device: torch.tensor([SEED], device=device))
    for place in (ops, ffn):
        monkeypatch.setattr(place, "draw", lambda device: torch.tensor([SEED], device=device))
    monkeypatch.setattr(products, "has_low_units", lambda dtype: True)


def layers_of(kind: str, p: float, *, shared: bool = False, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[Adapted]:
    """Three with the same input, whose `a` may be one."""
    torch.manual_seed(0)
    made, a = list[Adapted](), None
    for out in OUTS:
        layer = Adapted(KINDS[kind](Linear(IN, out, bias=bias)), RANK, 0.5, a=a, dropout=p)
        a = layer.a if shared else None
        nn.init.normal_(layer.b.weight)
        made.append(layer.to(dtype))
    return made


def composed(x: Tensor, layers: Sequence[Adapted]) -> list[Tensor]:
    """The same of torch's functions, as a hook makes each layer do it."""
    outs = []
    for layer in layers:
        handle = layer.a.register_forward_hook(lambda *_: None)
        outs.append(layer(x))
        handle.remove()
    return outs


def trained(layers: Sequence[nn.Module]) -> list[Tensor]:
    return list(dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad))


def gradients(outs: Sequence[Tensor], x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    gs = [torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape).to(out.dtype) for out in outs]
    return list(torch.autograd.grad(list(outs), [x, *trained(layers)], gs))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[module.Sum]:
    """What each call of the op is told, which makes all that is not composed."""
    calls, real = list[module.Sum](), module.LowRank.apply

    def apply(*args: Any) -> Any:
        calls.append(args[1])
        return real(*args)  # type: ignore[no-untyped-call]  # of torch's

    monkeypatch.setattr(module.LowRank, "apply", apply)
    return calls


def compare(ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor], chance: float = 1.05) -> None:
    """No result is farther from that of fp64 than torch's functions' is, but by `chance`."""
    for i, (mine, other, true) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        off = [((t.double() - true).norm() / true.norm()).item() for t in (mine, other)]
        assert off[0] <= max(chance * off[1], 2e-6), (i, off)


CASES = [(*case, *how) for case in product(KINDS, ("fp32", "bf16", "autocast")) for how in ((0.0, False), (0.25, True))]


@pytest.mark.parametrize(("kind", "how", "p", "shared"), CASES)
def test_equal_to_torch_and_no_farther_from_the_truth(kind: str, how: str, p: float, shared: bool, monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:  # fmt: skip
    check(kind, how, p, shared, "cpu", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "how", "p", "shared"), CASES)
def test_on_a_gpu(kind: str, how: str, p: float, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    check(kind, how, p, shared, "cuda", monkeypatch)


def check(kind: str, how: str, p: float, shared: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    layers = [layer.to(device) for layer in layers_of(kind, p, shared=shared)]
    exact = [copy.deepcopy(layer).double() for layer in layers]
    if shared:
        for layer in exact:
            layer.a = exact[0].a
    for layer in layers:
        layer.to(dtype)
    x = torch.randn(2, 9, IN, device=device).to(torch.float32 if how == "fp32" else torch.bfloat16)
    if how == "autocast" and kind == "plain":
        for layer in layers:  # as a run holds them
            layer.base.weight.data = layer.base.weight.bfloat16()
    calls, results = counted(monkeypatch), []
    for function in (together, lambda x, *layers: composed(x, layers)):
        mine = x.clone().requires_grad_()
        with torch.autocast(device, torch.bfloat16) if how == "autocast" else nullcontext():
            outs = function(mine, *layers)
        results.append([*outs, *gradients(outs, mine, layers)])
    assert [len(how.layers) for how in calls] == [3]
    mine = x.double().requires_grad_()
    outs = composed(mine, exact)
    compare(*results, [*outs, *gradients(outs, mine, exact)])


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_one_layer_and_its_bias_left_out(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    (layer, *_), calls = layers_of("plain", p), counted(monkeypatch)
    x = torch.randn(5, IN)
    torch.testing.assert_close(layer(x), composed(x, [layer])[0])
    torch.testing.assert_close(layer(x, bias=False), layer(x) - layer.base.bias)
    assert len(calls) == 3


def test_layers_of_one_input_draw_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[int]()
    monkeypatch.setattr(module, "draw", lambda device: drawn.append(1) or torch.tensor([SEED]))
    together(torch.randn(5, IN), *layers_of("plain", 0.25))
    assert drawn == [1]


@pytest.mark.parametrize("used", ["the first", "the last two"])
@pytest.mark.parametrize("shared", [False, True])
def test_results_of_no_use_add_nothing(used: str, shared: bool) -> None:
    """Also to the gradients of an `a` that they share with others."""
    layers, some = layers_of("plain", 0.25, shared=shared), slice(0, 1) if used == "the first" else slice(1, 3)
    results = []
    for function in (together, lambda x, *layers: composed(x, layers)):
        x = torch.ones(5, IN).requires_grad_()
        torch.autograd.backward([out.square().sum() for out in function(x, *layers)[some]])
        results.append([x.grad, *(p.grad for p in trained(layers))])
        for p in trained(layers):
            p.grad = None
    for mine, other in zip(*results, strict=True):
        assert (mine is None) is (other is None)
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4)


def test_what_needs_no_gradient_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer, *_), calls = layers_of("plain", 0.25), counted(monkeypatch)
    x, wanted = torch.randn(5, IN), []
    for frozen in (layer.a, layer.b):
        layer.requires_grad_(False)
        (other,) = {layer.a, layer.b} - {frozen}
        other.requires_grad_(True)
        layer(x).sum().backward()
        wanted.append(other.weight.grad)
        assert frozen.weight.grad is None
        other.weight.grad = None
    assert all(g is not None and g.any() for g in wanted) and len(calls) == 2
    layer.requires_grad_(False)
    y = x.clone().requires_grad_()
    layer(y).sum().backward()
    assert y.grad is not None and not layer(x).requires_grad


def test_gradients_have_gradients() -> None:
    found = []
    for function in (together, lambda x, *layers: composed(x, layers)):
        layers = layers_of("plain", 0.0)
        x = torch.linspace(-1, 1, 3 * IN).view(3, IN).requires_grad_()
        inputs = [x, *trained(layers)]
        first = torch.autograd.grad([out.square().sum() for out in function(x, *layers)], inputs, create_graph=True)
        found.append(torch.autograd.grad([g.square().sum() for g in first], inputs))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


def test_gradients_of_dropout_or_of_rounded_copies_have_none() -> None:
    (layer, *_), x = layers_of("plain", 0.25), torch.randn(3, IN, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True, and a kernel's gradient has no gradient"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (layer, *_), x = layers_of("plain", 0.0), torch.randn(3, IN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    with pytest.raises(RuntimeError, match=r"create_graph=True, and a product in torch\.bfloat16 has kept a rounded copy"):
        torch.autograd.grad(out.float().square().sum(), x, create_graph=True)


def test_an_empty_input() -> None:
    layers, x = layers_of("int8", 0.25), torch.randn(0, IN, requires_grad=True)
    outs = together(x, *layers)
    assert [out.shape for out in outs] == [(0, n) for n in OUTS]
    assert all(not g.any() for g in gradients(outs, x, layers)[1:])


def composers(layers: list[Adapted]) -> Iterator[str]:
    """Ways in which layers must be called, or composed, each undone after it."""
    first = layers[0]
    for name, part in {"the layer": first, "its base": first.base, "a": first.a, "its dropout": first.dropout}.items():
        handle = part.register_forward_hook(lambda *_: None)
        yield f"a hook on {name}"
        handle.remove()
    first.dropout = nn.Dropout1d(0.0)
    yield "another dropout"
    first.dropout = layers[1].dropout
    first.scale = 0.25
    yield "another scale"
    first.scale = layers[1].scale
    first.base.weight.requires_grad_(True)
    yield "a base that is trained"
    first.base.weight.requires_grad_(False)
    first.b.bias = nn.Parameter(torch.ones(OUTS[0]))
    yield "a bias of b"
    first.b.bias = None
    first.magnitude = nn.Parameter(torch.ones(OUTS[0]))
    yield "DoRA"


def test_what_a_layer_does_beside_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches a part sees it called, and a layer that is more than LoRA is that."""
    layers, calls, x, ways = layers_of("plain", 0.25), counted(monkeypatch), torch.randn(5, IN), list[str]()
    for way in composers(layers):
        calls.clear()
        found, ways = together(x, *layers), [*ways, way]
        assert [len(how.layers) for how in calls] == [1] * (3 if way in ("a hook on the layer", "another scale") else 2), way
        for mine, other in zip(found, composed(x, layers), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert len(ways) == 9


# ---- behind a gated activation


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on a GPU in low precision, done here in any."""
    monkeypatch.setattr(products, "trained_low", lambda x, weights: x.dtype if torch.is_grad_enabled() else None)


def ffn_of(kind: str, p: float, q: float, dtype: torch.dtype = torch.float32) -> GatedFFN:
    torch.manual_seed(0)
    layer = GatedFFN(64, 128, ops.swiglu, dropout=q)
    for name in ("gate", "up", "down"):
        made = Adapted(KINDS[kind](getattr(layer, name)), RANK, 0.5, dropout=p)
        nn.init.normal_(made.b.weight)
        setattr(layer, name, made)
    return layer.to(dtype)


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("p", "q"), [(0.0, 0.0), (0.25, 0.0), (0.25, 0.1)])
def test_behind_a_gated_activation(kind: str, p: float, q: float, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gated_check(kind, p, q, "cpu", torch.float32, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("p", "q"), [(0.0, 0.0), (0.25, 0.0), (0.25, 0.1)])
def test_behind_a_gated_activation_on_a_gpu(kind: str, p: float, q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gated_check(kind, p, q, "cuda", torch.bfloat16, monkeypatch)


def gated_check(kind: str, p: float, q: float, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and once more where gate and up must be left for another backward."""
    layer, calls = ffn_of(kind, p, q, dtype).to(device), counted(monkeypatch)
    exact, x = copy.deepcopy(layer).double(), torch.randn(2, 9, 64, device=device).to(dtype)
    down, results = layer.down, []
    assert isinstance(down, Adapted)
    for again in (False, True, None):
        mine = x.clone().requires_grad_()
        hook = None if again is not None else down.a.register_forward_hook(lambda *_: None)
        out = layer(mine)
        if again:
            torch.autograd.grad(out.sum(), mine, retain_graph=True)
        results.append([out, *gradients([out], mine, [layer])])
        if hook is not None:
            hook.remove()
    assert [how.act for how in calls] == [None, ops.swiglu] * 2 + [None]
    mine = x.double().requires_grad_()
    out = exact(mine)
    wanted = [out, *gradients([out], mine, [exact])]
    compare(results[0], results[2], wanted, 1.05 if dtype == torch.float32 else 1.4)  # few values, each rounded in turn
    assert all(map(torch.equal, results[0], results[1]))


@pytest.mark.skipif(not KERNELS, reason="no compiled kernels")
def test_what_a_hook_has_seen_is_not_written_over(as_on_gpu: None) -> None:
    for name in ("gate", "up", "down", "gate.base", "up.a", "down.dropout"):
        layer, seen = ffn_of("plain", 0.25, 0.0), list[Tensor]()
        layer.get_submodule(name).register_forward_hook(lambda layer, args, out, seen=seen: seen.extend((*args, out)))
        out = layer(torch.randn(2, 8, 64).requires_grad_())
        before = [t.detach().clone() for t in seen]
        out.sum().backward()
        assert len(seen) == 2 and all(torch.equal(ours, as_it_was) for ours, as_it_was in zip(seen, before, strict=True)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_gated_layer_keeps_two_hidden_tensors(kind: str, p: float) -> None:
    """Of what is wide nothing but the results of gate and up is kept."""
    with Tally() as tally, rehearsal(tally.kernel, gpu=True):
        layer = GatedFFN(64, 960, ops.swiglu)
        for name in ("gate", "up", "down"):
            setattr(layer, name, Adapted(KINDS[kind](getattr(layer, name)), RANK, 0.5, dropout=p))
        x = torch.empty(1000, 64, dtype=torch.bfloat16, requires_grad=True)
        before = sum(tally.now.values())
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        kept = sum(tally.now.values()) - before
    assert out.requires_grad
    assert 2 <= kept / (1000 * 960 * 2) < 2.2


def test_an_input_is_kept_as_it_came() -> None:
    """Neither what is left of it by dropout is kept, nor a copy for each layer."""
    kept = list[Tensor]()
    x = torch.randn(200, IN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        together(x, *layers_of("plain", 0.25))
    assert [t.data_ptr() == x.data_ptr() for t in kept if t.numel() >= x.numel()] == [True]
