"""NF4 and int8: which code a weight gets, what comes back, and the products that read codes, on every device there is."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import modelcenter as mc
from modelcenter import ops
from modelcenter.errors import InputError
from modelcenter.layers import Attention, Int8Linear, NF4Linear, QuantizedLinear
from modelcenter.ops import linear
from modelcenter.ops import quantize as q
from modelcenter.ops._kernels import available
from modelcenter.ops._mode import rehearsal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1), (3, 5), (7, 64), (2, 3, 65), (5, 191), (33, 256), (0, 9), (4, 0), (300,), (2, 4097))
LEVELS = torch.tensor(q.LEVELS, dtype=torch.float64)
MIDDLES = (LEVELS[1:] + LEVELS[:-1]) / 2


def weights(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    loud = torch.exp2(torch.randint(-8, 8, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * loud).to(device, dtype)


def apart(x: Tensor) -> Tensor:
    """The same numbers where no 16 bytes begin."""
    place = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return place.copy_(x)


def roads(kind: str) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """To codes and back: by what is installed, and by the references."""
    if kind == "nf4":
        return [(ops.quantize_nf4, ops.dequantize_nf4), (q.quantize_nf4_reference, q.dequantize_nf4_reference)]
    return [
        (ops.quantize_int8, lambda codes, scales, cols, dtype: ops.dequantize_int8(codes, scales, dtype)),
        (q.quantize_int8_reference, lambda codes, scales, cols, dtype: q.dequantize_int8_reference(codes, scales, dtype)),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_and_references_agree_to_the_bit(kind: str, dtype: torch.dtype, device: str) -> None:
    (to, back), (slow_to, slow_back) = roads(kind)
    for shape in SHAPES:
        x = weights(shape, dtype, device)
        codes, scales = to(x)
        for found in (slow_to(x), to(apart(x)), to(x.t().contiguous().t() if x.dim() == 2 else x)):
            assert torch.equal(found[0], codes) and torch.equal(found[1], scales)
        for out in DTYPES:
            wanted = slow_back(codes, scales, shape[-1], out)
            assert wanted.dtype == out and wanted.shape == x.shape
            assert torch.equal(back(codes, scales, shape[-1], out), wanted)
            assert torch.equal(back(apart(codes), apart(scales), shape[-1], out), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nf4_takes_the_nearest_level(dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        x = weights(shape, dtype, device)
        codes, scales = (t.cpu() for t in ops.quantize_nf4(x))
        x = x.cpu().double()
        halves = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).long()
        assert (halves[..., shape[-1] :] == 7).all()  # what no weight uses is 0
        scale = scales.double().repeat_interleave(64, -1)[..., : shape[-1]]
        relative = (x.float() / scale.float()).double()
        nearest = (relative[..., None] - LEVELS).abs().amin(-1)
        assert ((relative - LEVELS[halves[..., : shape[-1]]]).abs() == nearest).all()
        off = (ops.dequantize_nf4(codes, scales, shape[-1], torch.float32).double() - x).abs()
        assert (off <= (nearest + 1e-6) * scale).all() and (nearest <= LEVELS.diff().max() / 2).all()


@pytest.mark.parametrize("device", DEVICES)
def test_nf4_ties_take_the_lower_level(device: str) -> None:
    """The middles themselves are no fp32 numbers: the floats on both sides of each."""
    below = MIDDLES.float()
    below = torch.where(below.double() > MIDDLES, torch.nextafter(below, torch.tensor(-2.0)), below)
    above = torch.nextafter(below, torch.tensor(2.0))
    for x, wanted in ((below, torch.arange(15)), (above, torch.arange(1, 16))):
        for sign in (1.0, -1.0):  # what sets the scale
            codes, _ = ops.quantize_nf4(torch.cat((torch.tensor([sign]), x)).to(device))
            found = torch.stack((codes >> 4, codes & 15), -1).flatten().cpu()
            assert found.tolist() == [15 if sign > 0 else 0, *wanted.tolist()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_rounds_to_nearest(dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        x = weights(shape, dtype, device)
        codes, scales = ops.quantize_int8(x)
        assert codes.numel() == 0 or codes.abs().max() <= 127
        back = ops.dequantize_int8(codes, scales, torch.float32).double()
        assert ((back - x.double()).abs() <= scales[..., None].double() / 254 * (1 + 1e-5)).all()
    codes, _ = ops.quantize_int8(torch.tensor([127.0, 0.5, 1.5, -0.5, -1.5, 2.5], device=device))
    assert codes.tolist() == [127, 0, 2, 0, -2, 2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_quantised_once_is_not_changed_again(kind: str, dtype: torch.dtype, device: str) -> None:
    to, back = roads(kind)[0]
    for shape in SHAPES:
        codes, scales = to(weights(shape, dtype, device))
        for out in {dtype, torch.float32}:
            again = to(back(codes, scales, shape[-1], out))
            assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_groups_of_zeros_tiny_numbers_and_none(kind: str, device: str) -> None:
    """Zeros stay zeros, what is too small to have a scale becomes zero, what is not finite is not hidden."""
    for to, back in roads(kind):
        for value in (0.0, -0.0, 1e-45, 1e-38, 1.4e-36):
            codes, scales = to(torch.full((2, 70), value, device=device))
            assert scales.eq(0).all() and back(codes, scales, 70, torch.float32).eq(0).all()
        for value in (1e-35, 3e38, -3e38):
            x = torch.full((2, 70), value, device=device)
            assert torch.equal(back(*to(x), 70, torch.float32), x)
        for value in (float("nan"), float("inf"), -float("inf")):
            x = torch.ones(2, 70, device=device)
            x[1, 3] = value
            codes, scales = to(x)
            out = back(codes, scales, 70, torch.float32)
            sick = out[1, :64] if kind == "nf4" else out[1]
            assert not sick.isfinite().any() and out[0].eq(1).all() and (kind == "int8" or out[1, 64:].eq(1).all())
    (to, _), (slow, _) = roads(kind)
    x = torch.tensor([[1.0, float("inf"), -float("inf"), float("nan"), -2.0]], device=device)
    for row in (x, x[:, :3], x[:, 4:]):
        assert torch.equal(to(row)[0], slow(row)[0]) and torch.equal(to(row)[1].isnan(), slow(row)[1].isnan())


def test_nf4_bytes_are_those_of_bitsandbytes() -> None:
    """A digest of what bitsandbytes 0.50.2 makes of these 65536 weights in groups of 64 without double quantisation."""
    x = ((torch.arange(65536) * 2654435761) % 2**32).double().div(2**31).sub(1).float().pow(3).view(256, 256)
    codes, scales = ops.quantize_nf4(x)
    assert hashlib.sha256(codes.numpy().tobytes()).hexdigest()[:16] == "e5d2fc2c51591e52"
    assert hashlib.sha256(scales.numpy().tobytes()).hexdigest()[:16] == "459a343b1db91bc5"


def packed(kind: str, rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and the weight they stand for in double."""
    to, back = roads(kind)[0]
    codes, scales = to(weights((rows, cols), torch.float32, device))
    return codes, scales, back(codes, scales, cols, torch.float32).double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_any_size(kind: str, dtype: torch.dtype, device: str) -> None:
    """Of up to 8 rows no weight is rounded, so the result's rounding is all there is; more rows are torch's product."""
    linear = getattr(ops, f"linear_{kind}")
    for rows, cols in ((1, 1), (5, 64), (3, 77), (9, 200), (130, 1031), (4, 4096), (0, 8), (6, 0)):
        codes, scales, weight = packed(kind, rows, cols, device)
        for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 40):
            x, bias = weights((n, cols), torch.float32, device) / 2**12, weights((1, rows), dtype, device).view(rows)
            x = x.to(dtype)  # small: the results must be within fp16
            wanted = F.linear(x.double(), weight, bias.double())
            size = F.linear(x.double().abs(), weight.abs(), bias.double().abs())
            found = linear(x, codes, scales, bias)
            assert found.dtype == dtype and found.shape == (n, rows)
            rounding = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
            if n <= 8:
                for road in (found, linear.reference(x, codes, scales, bias)):
                    assert ((road.double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 2e-6 * size).all()
                spread = torch.stack((x, x), -1)[..., 0]
                for other in (linear(apart(x), apart(codes), apart(scales), apart(bias)), linear(spread, codes, scales, bias)):
                    # a reference has torch's product, whose sums may be cut by how memory is aligned
                    assert torch.equal(other, found) or not available(device)
                    assert ((other.double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 2e-6 * size).all()
            if device == "cuda" and dtype == torch.float16:
                rounding *= 4  # torch's own product, for which a GPU may add parts of a sum in fp16
            tiny = 2.0**-24 if dtype == torch.float16 else 0.0  # what is subnormal in fp16 has no more digits
            assert ((found.double() - wanted).abs() <= rounding * size + tiny * cols).all()
            without = linear(x, codes, scales, None)
            assert ((without.double() - F.linear(x.double(), weight)).abs() <= rounding * size + tiny * cols).all()
    assert linear(torch.ones(2, 3, 4, device=device, dtype=dtype), *packed(kind, 5, 4, device)[:2], None).shape == (2, 3, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_few_rows_rounds_no_weight(
    kind: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own rounding is all there is, as in their product; on a CPU with units for low precision too."""
    monkeypatch.setattr(linear, "has_low_units", lambda dtype: True)
    codes, scales, weight = packed(kind, 33, 200, device)
    for n in (1, 8):
        x = torch.zeros(n, 200, device=device, dtype=dtype, requires_grad=True)
        grad = (weights((n, 33), torch.float32, device) / 2**6).to(dtype)  # within fp16
        (found,) = torch.autograd.grad(getattr(ops, f"linear_{kind}")(x, codes, scales, None), x, grad)
        wanted, size = grad.double() @ weight, grad.double().abs() @ weight.abs()
        tiny = 2.0**-24 if dtype == torch.float16 else 0.0  # as above
        assert ((found.double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs() + 2e-6 * size + tiny).all()


class Marked(Tensor):
    """A subclass that says nothing of its memory."""


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_what_a_kernel_does_not_take_is_left_to_the_reference(kind: str) -> None:
    """A subclass, and many at once under vmap: the same codes, scales and weights."""
    to, back = roads(kind)[0]
    x = weights((3, 5, 70), torch.float32, "cpu")
    codes, scales = to(x)
    whole = back(codes, scales, 70, torch.bfloat16)
    for found in (to(x.as_subclass(Marked)), torch.func.vmap(to)(x)):
        assert torch.equal(found[0].as_subclass(Tensor), codes) and torch.equal(found[1].as_subclass(Tensor), scales)
    for given in ((codes.as_subclass(Marked), scales), (codes, scales.as_subclass(Marked))):
        assert torch.equal(back(*given, 70, torch.bfloat16).as_subclass(Tensor), whole)
    assert torch.equal(torch.func.vmap(lambda codes, scales: back(codes, scales, 70, torch.bfloat16))(codes, scales), whole)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_threads_change_nothing(kind: str) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            codes, scales, weight = packed(kind, 257, 640, "cpu")
            out = getattr(ops, f"linear_{kind}")(weights((3, 640), torch.float32, "cpu"), codes, scales, None)
            found.append((codes, scales, weight, out))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_autocast_does_not_reach_inside(kind: str) -> None:
    codes, scales, _ = packed(kind, 6, 64, "cpu")
    linear = getattr(ops, f"linear_{kind}")
    for n in (2, 20):
        x = weights((n, 64), torch.float32, "cpu").requires_grad_()
        plain = linear(x, codes, scales, None)
        with torch.autocast("cpu", torch.bfloat16):
            found = linear(x, codes, scales, None)
        with torch.autocast("cpu", torch.bfloat16, enabled=available("cpu")):  # it reaches torch's own backward, of a reference
            (grad,) = torch.autograd.grad(found.sum(), x)
        assert torch.equal(found, plain) and torch.equal(grad, torch.autograd.grad(plain.sum(), x)[0])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_only_what_asks_has_a_gradient(kind: str) -> None:
    codes, scales, _ = packed(kind, 6, 64, "cpu")
    linear, bias = getattr(ops, f"linear_{kind}"), torch.zeros(6)
    for n in (3, 20):
        x = torch.randn(n, 64, requires_grad=True)
        linear(x, codes, scales, bias).sum().backward()
        assert x.grad is not None and scales.grad is None and bias.grad is None
    assert not linear(torch.randn(3, 64), codes, scales, bias).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_compiler_sees_one_operator_each(kind: str, device: str) -> None:
    if not available(device):
        pytest.skip("no kernels here")
    to, back = roads(kind)[0]

    def both(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = to(w)
        return back(codes, scales, 65, torch.bfloat16), getattr(ops, f"linear_{kind}")(x, codes, scales, None)

    w, x = weights((7, 65), torch.float32, device), weights((12, 65), torch.float32, device)
    for found, wanted in zip(torch.compile(both, fullgraph=True, backend="aot_eager")(w, x), both(w, x), strict=True):
        assert torch.equal(found, wanted)
    codes, scales = to(w)
    forward = getattr(q, f"dequantize_{kind}_forward").operator
    torch.library.opcheck(getattr(q, f"quantize_{kind}_forward").operator, (w,))
    torch.library.opcheck(forward, (codes, scales, 65, torch.float16) if kind == "nf4" else (codes, scales, torch.float16))
    torch.library.opcheck(getattr(q, f"linear_{kind}_backward").operator, (torch.randn(3, 7, device=device), codes, scales, 65))
    for n in (2, 12):
        args = (weights((n, 65), torch.float32, device).requires_grad_(), codes, scales, torch.randn(7, device=device))
        torch.library.opcheck(getattr(q, f"linear_{kind}_forward").operator, args)


def test_wrong_shapes_are_said() -> None:
    if not available("cpu"):
        pytest.skip("no kernels here")
    codes, scales, _ = packed("nf4", 6, 64, "cpu")
    for n in (3, 20):
        with pytest.raises(ValueError, match="codes"):
            ops.linear_nf4(torch.randn(n, 70), codes, scales, None)
    with pytest.raises(ValueError, match="scales"):
        ops.dequantize_nf4(codes, scales[:5], 64, torch.float32)
    with pytest.raises(ValueError, match="scales"):
        ops.dequantize_int8(codes.view(torch.int8), scales, torch.float32)


def test_references_say_wrong_shapes_in_the_same_words() -> None:
    """The kernels' sentence too, where there are kernels: float64 is the references' in any installation."""
    codes, scales = q.quantize_nf4_reference(torch.randn(6, 65))
    whole, of_rows = q.quantize_int8_reference(torch.randn(6, 65))
    calls: list[tuple[Callable[..., Tensor], tuple[Any, ...], str]] = [
        (ops.dequantize_nf4, (codes, scales, 64), r"dequantize_nf4: codes: wanted \(.., cols / 2\), rounded up"),
        (ops.dequantize_nf4, (codes, scales, 67), r"dequantize_nf4: codes: wanted \(.., cols / 2\), rounded up"),
        (ops.dequantize_nf4, (codes, scales[:, :1], 65), r"dequantize_nf4: scales: shape \(6, 1\); wanted \(6, 2\)"),
        (ops.dequantize_nf4, (codes[0, 0], scales, 2), "dequantize_nf4: codes: a number; wanted a tensor"),
        (ops.dequantize_int8, (whole, of_rows[:5]), r"dequantize_int8: scales: shape \(5\); wanted \(6\)"),
        (ops.dequantize_int8, (whole[0, 0], of_rows), "dequantize_int8: codes: a number; wanted a tensor"),
    ]  # fmt: skip
    for call, args, words in calls:
        for dtype in (torch.float64, torch.bfloat16):
            with pytest.raises(ValueError, match=words):
                call(*args, dtype)
    for op, args in ((ops.linear_nf4, (codes, scales[:, :1])), (ops.linear_int8, (whole, of_rows[:5]))):
        for n in (3, 20):
            with pytest.raises(ValueError, match="scales"):
                op.reference(torch.randn(n, 65), *args, None)
    for n in (3, 20):
        for way in (ops.linear_int8, ops.linear_int8.reference):
            with pytest.raises(ValueError, match=r"bias: shape \(1\); wanted \(6\)"):
                way(torch.randn(n, 65), whole, of_rows, torch.zeros(1))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_another_length(device: str, dtype: torch.dtype) -> None:
    """Cut, or with zeros behind, from any address; shorter than what is moved at once, too."""
    if not available(device):
        pytest.skip("no kernels here")
    sizes = (37, 413, 40, 416), (5, 416, 5, 413), (9, 3, 16, 8), (9, 40, 7, 3), (3, 1, 8, 8), (0, 5, 4, 5), (4, 5, 0, 5)
    for rows, cols, many, wide in sizes:
        whole = torch.randint(1, 120, (16 + rows * cols,), device=device).to(dtype)
        for first in range(9):
            x = whole[first : first + rows * cols].view(rows, cols)
            assert torch.equal(q.resized(x, wide, many), F.pad(x, (0, wide - cols, 0, many - rows)))
    x = torch.randn(2, 3, 411, device=device).to(dtype)
    assert torch.equal(q.resized(x, 416), F.pad(x, (0, 5))) and torch.equal(q.resized(x[..., ::2], 8), x[..., :16:2])
    assert torch.equal(q.resized(x[0, 0], 416), F.pad(x[0, 0], (0, 5))) and q.resized(x, 411) is x


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(("rows", "cols"), [(360, 411), (363, 416), (365, 413)])
def test_a_gpus_product_has_whole_rows(kind: str, rows: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 bits, at multiples of 16 bytes: the same product, forward and backward, with a bias and without."""
    if not available("cpu"):
        pytest.skip("no kernels here")
    op, (codes, scales, weight) = getattr(ops, f"linear_{kind}"), packed(kind, rows, cols, "cpu")
    x, grad = weights((20, cols), torch.bfloat16, "cpu").requires_grad_(), weights((20, rows), torch.bfloat16, "cpu")
    monkeypatch.setattr(linear, "has_low_units", lambda dtype: True)
    seen: list[tuple[int, ...]] = []
    product = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.extend((tuple(x.shape[1:]), tuple(weight.shape)))
        return product(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    for bias in (None, 100 * weights((1, rows), torch.bfloat16, "cpu")[0]):
        found = []
        for gpu in (False, True):
            monkeypatch.setattr(q, "on_gpu", lambda x, gpu=gpu: gpu)
            seen.clear()
            out = op(x, codes, scales, bias)
            found.append((out, *torch.autograd.grad(out, x, grad)))
            assert all(n % 8 == 0 for shape in seen for n in shape) == gpu and len(seen) == 4
            assert all(t.is_contiguous() for t in found[-1])
        wanted = product(x.detach().double(), weight, None if bias is None else bias.double())
        for ours, exact, size in ((0, wanted, weight.abs().sum(1).max()), (1, grad.double() @ weight, weight.abs().sum(0).max())):
            plain, whole = found[0][ours].double(), found[1][ours].double()
            assert whole.shape == exact.shape
            assert (whole - exact).abs().max() <= 1.1 * (plain - exact).abs().max() + 1e-6 * size
        with pytest.raises(ValueError, match=r"columns|codes"):
            op(torch.zeros(20, cols - 2, dtype=torch.bfloat16), codes, scales, bias)


KINDS = [NF4Linear, Int8Linear]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_the_linear_layer_of_its_weight(kind: type[QuantizedLinear], dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(193, 65, bias=bias, dtype=dtype)
    layer = kind.of(plain)
    assert (layer.in_features, layer.out_features, layer.weight.dtype, layer.weight.shape) == (193, 65, dtype, (65, 193))
    assert not any(p.requires_grad for p in layer.parameters())
    near = 0.152 if kind is NF4Linear else 0.005  # half of the widest gap between levels; half of 1 / 127
    worst = (layer.weight.double() - plain.weight.double()).abs().max(-1).values / plain.weight.double().abs().max(-1).values
    assert (worst <= near + torch.finfo(dtype).eps).all()
    again = layer.linear()
    assert again.weight.requires_grad and torch.equal(again.weight, layer.weight) and (again.bias is not None) == bias
    assert torch.equal(kind.of(again).codes, layer.codes) and torch.equal(kind.of(again).scales, layer.scales)
    for rows in (2, 24):
        x = torch.randn(rows, 193, dtype=dtype, requires_grad=True)
        out = layer(x)
        direction = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, x, direction)
        exact = x.detach().double().requires_grad_()
        wanted = F.linear(exact, layer.weight.double(), layer.bias.double() if layer.bias is not None else None)
        (wanted_grad,) = torch.autograd.grad(wanted, exact, direction.double())
        for ours, theirs in ((out, wanted), (grad, wanted_grad)):
            assert ours.dtype == dtype
            assert (ours.double() - theirs).abs().max() <= 8 * torch.finfo(dtype).eps * theirs.abs().max()
        assert torch.equal(layer(x, bias=False), layer.product(x, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_weighs_what_it_says(kind: type[QuantizedLinear]) -> None:
    layer = kind.of(torch.nn.Linear(1024, 512, bias=False))
    bits = 8 * sum(b.numel() * b.element_size() for b in layer.buffers())
    assert bits == (4.5 * 1024 * 512 if kind is NF4Linear else 8 * 1024 * 512 + 32 * 512)
    assert not list(layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_casting_a_model_does_not_round_the_scales(kind: type[QuantizedLinear]) -> None:
    layer = kind.of(torch.nn.Linear(70, 6))
    scales, weight = layer.scales.clone(), layer.weight.clone()
    layer = torch.nn.Sequential(layer).bfloat16()[0]
    assert layer.bias.dtype == layer.weight.dtype == torch.bfloat16 and torch.equal(layer.scales, scales)
    assert torch.equal(layer.weight, weight.bfloat16()) and torch.equal(layer.float().weight, weight)
    assert torch.nn.Sequential(layer).to("meta")[0].scales.device.type == "meta"


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_read_back_and_copied(kind: type[QuantizedLinear]) -> None:
    one, two = kind.of(torch.nn.Linear(70, 6)), kind.of(torch.nn.Linear(70, 6))
    assert list(one.state_dict()) == ["bias", "codes", "scales"]
    two.load_state_dict(one.state_dict())
    x = torch.randn(3, 70)
    assert torch.equal(one(x), two(x)) and torch.equal(copy.deepcopy(one)(x), one(x))


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_a_layer_is_in_low_precision(kind: type[QuantizedLinear]) -> None:
    layer, x = kind.of(torch.nn.Linear(70, 6)), torch.randn(12, 70)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, layer(x.bfloat16()))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_layer_learns_what_the_layer_lacks(kind: type[QuantizedLinear]) -> None:
    """LoRA (Hu et al., 2021): the frozen weight plus B A. What was asked of it is the layer's own weight and a matrix of rank 2."""
    torch.manual_seed(0)
    layer = kind.of(torch.nn.Linear(64, 16, bias=False))
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    target = layer.weight + torch.randn(16, 2) @ torch.randn(2, 64) / 8
    front = torch.nn.Linear(64, 64, bias=False)  # so that a gradient has to pass through
    torch.nn.init.eye_(front.weight)
    a, b = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 16, bias=False)
    torch.nn.init.zeros_(b.weight)
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters(), *front.parameters()], lr=1e-2)
    losses = []
    for _ in range(60):
        x = torch.randn(128, 64)
        h = front(x)
        loss = F.mse_loss(layer(h) + b(a(h)), F.linear(x, target))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.05 * losses[0] and not torch.equal(front.weight, torch.eye(64))
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_a_rehearsal_of_a_gpu_dequantises_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor on which a plan is made multiplies in hardware."""
    monkeypatch.setattr(linear, "has_low_units", lambda dtype: False)
    seen: list[torch.dtype] = []
    with FakeTensorMode(), rehearsal(lambda name, args: seen.append(args[-1].dtype), gpu=True):
        codes, scales = torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 1)
        ops.linear_nf4(torch.zeros(q.FEW + 1, 64, dtype=torch.bfloat16), codes, scales, None)
    assert seen == [torch.bfloat16]


def test_a_folder_with_whole_weights_is_refused(tmp_path: Path) -> None:
    config = {"layers": 1, "dim": 64, "heads": 4, "vocab": 100, "positions": 32}
    model = mc.build("gpt2", config=config).eval()
    attn = next(m for m in model.modules() if isinstance(m, Attention))
    x = torch.arange(8)[None]
    attn.q = NF4Linear.of(attn.q)
    with torch.no_grad():
        found = model(x).logits
    with pytest.raises(InputError, match=r"attn\.q\.weight: not a parameter; .*linear\(\)"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    attn.q = attn.q.linear()
    model.save_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(mc.GPT.from_pretrained(str(tmp_path / "out")).eval()(x).logits, found, rtol=1e-4, atol=1e-5)
