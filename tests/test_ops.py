"""Every op: its reference on its own cases against the formula written out here in double precision, values and gradients."""

import itertools
import math
import multiprocessing
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import floating, leaves, results
from torch import Tensor

from modelcenter import ops
from modelcenter.ops import OPS, _kernels
from modelcenter.ops.cross_entropy import IGNORE

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 2e-2}  # of the largest value; fp64 tells meanings apart


def erf_gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def tanh_gelu(x: Tensor, constant: float = math.sqrt(2 / math.pi)) -> Tensor:
    return x * (1 + torch.tanh(constant * (x + 0.044715 * x**3))) / 2


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def normed(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return normed(x - x.sum(-1, keepdim=True) / x.shape[-1], eps) * weight + bias


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Each pair is a complex number, its angle another of length one: rotation is their product."""
    pairs = cos.shape[-1]
    apart = x[..., : 2 * pairs].unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    z = torch.complex(*apart.unbind(-1 if interleaved else -2)) * torch.complex(cos, sin)
    out = torch.stack((z.real, z.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((out, x[..., 2 * pairs :]), -1)


def looked_up(ids: Tensor, table: Tensor, pad: int | None) -> Tensor:
    """A product with one row of zeros and a one for each token; what is at `pad` is a constant."""
    chosen = (ids[..., None] == torch.arange(len(table))).to(table.dtype)
    trained = torch.where(torch.arange(len(table))[:, None] == (-1 if pad is None else pad), table.detach(), table)
    return chosen @ trained


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0, z: float = 0.0) -> Tensor:
    total = logits.sum() * 0
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label != IGNORE:
            whole = torch.exp(row).sum()
            nats = -torch.log(torch.exp(row) / whole)
            total = total + (1 - smoothing) * nats[label] + smoothing * nats.sum() / len(row) + z * torch.log(whole) ** 2
    return total


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, scale: float = 1.0, *how: float) -> Tensor:
    logits = (x[:, None] * weight * scale).sum(-1)
    return cross_entropy(logits if bias is None else logits + bias, labels, *how)


def philox(counter: int, seed: int) -> list[int]:
    """Philox4x32 with 7 rounds, as the paper writes it (Salmon et al., 2011)."""
    a, b, c, d = counter % 2**32, counter >> 32, 0, 0
    k, l = seed % 2**32, seed % 2**64 >> 32
    for _ in range(7):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q % 2**32, (p >> 32) ^ d ^ l, p % 2**32
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def dropped(x: Tensor, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    drop = round(p * 65536)
    halves = [w >> shift & 0xFFFF for i in range(-(-x.numel() // 8)) for w in philox(i, int(seed)) for shift in (0, 16)]
    keep = torch.tensor([h >= drop for h in halves[: x.numel()]]).view(x.shape)
    out = x * keep * (65536 / (65536 - drop) if drop < 65536 else 0)
    return out if residual is None else out + residual


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    total = residual + x if seed is None else dropped(x, residual, seed, p)
    return layer_norm(total, weight, bias, eps), total


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, seed: Tensor | None, p: float) -> tuple[Tensor, Tensor]:
    total = residual + x if seed is None else dropped(x, residual, seed, p)
    return normed(total, eps) * weight, total


def nf4_weight(codes: Tensor, scales: Tensor, cols: int) -> Tensor:
    level = (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    )  # fmt: skip
    rows = [[level[row[k // 2] >> 4 if k % 2 == 0 else row[k // 2] % 16] for k in range(cols)] for row in codes.tolist()]
    return torch.tensor(rows).to(scales).view(len(rows), cols) * scales[:, torch.arange(cols) // 64]


def attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lengths_q: Tensor | None, lengths_k: Tensor | None,
    scale: float, causal: bool, seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """One query and one head at a time."""
    (b, s, h), (t, kv) = q.shape[:3], k.shape[1:3]
    ends = [([0, n] if x is None else x.tolist()) for x, n in ((lengths_q, s), (lengths_k, t))]
    lengths = [[b - a for a, b in itertools.pairwise(e)] for e in ends]
    span = -(-max(lengths[1]) // 128) * 128
    keep = None if seed is None else dropped(q.new_ones(b, h, s, span), None, seed, p)
    out = torch.zeros_like(q) + sum(x.sum() * 0 for x in (q, k, v, mask) if x is not None and x.dtype != torch.bool)
    for one, head, sequence in itertools.product(range(b), range(h), range(len(lengths[0]))):
        (q0, k0), (queries, keys) = [e[sequence] for e in ends], [n[sequence] for n in lengths]
        own = head // (h // kv)
        for i in range(queries):
            see = torch.arange(keys) <= (i + keys - queries if causal else keys)
            score = (k[one, k0 : k0 + keys, own] * q[one, q0 + i, head]).sum(-1) * scale
            if mask is not None:
                row = mask[one % len(mask), head % mask.shape[1], i % mask.shape[2], :keys]
                see, score = (see & row, score) if mask.dtype == torch.bool else (see, score + row)
            if see.any():
                weight = torch.exp(score[see] - score[see].max().detach())
                weight = weight / weight.sum() * (1 if keep is None else keep[one, head, q0 + i, :keys][see])
                out[one, q0 + i, head] += (weight[:, None] * v[one, k0 : k0 + keys, own][see]).sum(0)
    return out


def attended_by_distance(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, lengths_q: Tensor | None, lengths_k: Tensor | None,
    context: Tensor | None, longest_q: int, longest_k: int, prompt: int, reach: int, scale: float, causal: bool,
    seed: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """One query and one head at a time."""
    (b, s, h), t = q.shape[:3], k.shape[1]
    ends = [([0, n] if x is None else x.tolist()) for x, n in ((lengths_q, s), (lengths_k, t))]
    keep = None if seed is None else dropped(q.new_ones(b, h, s, -(-longest_k // 128) * 128), None, seed, p)
    out = torch.zeros_like(q) + sum(x.sum() * 0 for x in (q, k, v, bias) if x is not None)
    sequences = [*enumerate(zip(*map(itertools.pairwise, ends), strict=True))]
    for one, head, (i, ((q0, q1), (k0, k1))) in itertools.product(range(b), range(h), sequences):
        for row in range(q0, q1):
            position = row - q0 + (k1 - k0) - (q1 - q0)
            distance = torch.arange(k1 - k0) - position
            see = (distance <= 0) if causal else torch.ones(k1 - k0, dtype=torch.bool)
            if context is not None:
                see[: int(context[one, i])] = True
            see = see if seen is None else see & seen[one, k0:k1]
            if not see.any():
                continue
            score = (k[one, k0:k1, head] * q[one, row, head]).sum(-1) * scale
            if bias is not None:
                at = [max(-reach, min(reach, x)) + longest_k - 1 if reach else x + longest_k - 1 for x in distance.tolist()]
                for key in range(k1 - k0 if prompt else 0):
                    if (key < prompt) != (position < prompt):
                        at[key] = longest_q + longest_k - 1 + (position >= prompt)
                score = score + bias[head, at]
            score = score[see]
            weight = torch.exp(score - score.max().detach())
            weight = weight / weight.sum() * (1 if keep is None else keep[one, head, row, : k1 - k0][see])
            out[one, row, head] += (weight[:, None] * v[one, k0:k1, head][see]).sum(0)
    return out


LOSSES = ("cross_entropy", "linear_cross_entropy")  # in fp32 whatever goes in

FORMULAS: dict[str, Callable[..., Any]] = {  # a tensor, or a tuple of them
    "gelu": lambda x, bias: erf_gelu(biased(x, bias)),
    "gelu_tanh": lambda x, bias: tanh_gelu(biased(x, bias)),
    "gelu_cut": lambda x, bias: tanh_gelu(biased(x, bias), 0.79788456),
    "relu": lambda x, bias: relu(biased(x, bias)),
    "silu": lambda x, bias: silu(biased(x, bias)),
    "geglu": lambda gate, up: erf_gelu(gate) * up,
    "geglu_tanh": lambda gate, up: tanh_gelu(gate) * up,
    "reglu": lambda gate, up: relu(gate) * up,
    "swiglu": lambda gate, up: silu(gate) * up,
    "layer_norm": layer_norm,
    "rms_norm": lambda x, weight, eps: normed(x, eps) * weight,
    "add_layer_norm": add_layer_norm,
    "add_rms_norm": add_rms_norm,
    "dropout": dropped,
    "linear_nf4": lambda x, codes, scales, bias: x @ nf4_weight(codes, scales, x.shape[-1]).t() + (0 if bias is None else bias),
    "linear_int8": lambda x, codes, scales, bias: x @ (codes * scales[:, None] / 127).t() + (0 if bias is None else bias),
    "rotary": turned,
    "embedding": looked_up,
    "attention": attended,
    "relative_attention": attended_by_distance,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
}


def cases(name: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    return list(OPS[name].cases("cpu", dtype))


def run(function: Callable[..., Any], args: tuple[Any, ...], weights: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The values, and the gradients of their sum weighted by `weights`."""
    outs = results(function(*args))
    return outs, list(torch.autograd.grad(outs, floating(args), [w.to(out) for w, out in zip(weights, outs, strict=True)]))


def test_every_op_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(OPS)
    assert {name for name in ops.__all__ if isinstance(getattr(ops, name), ops.Op)} == set(OPS)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_the_formulas(name: str, dtype: torch.dtype) -> None:
    rough = 1 if _kernels.available("cpu") else 5  # torch's own functions, of which the references are made, round oftener
    tried = cases(name, dtype)
    assert any(a.numel() == 1 for a in tried[0] if isinstance(a, Tensor)), "size 1 is a case"
    for args in tried:
        shapes = [out.shape for out in results(FORMULAS[name](*leaves(args, torch.float64)))]
        direction = [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in shapes]
        wanted, wanted_grads = run(FORMULAS[name], leaves(args, torch.float64), direction)
        found, found_grads = run(OPS[name], leaves(args, torch.float64 if dtype == torch.float64 else None), direction)
        assert {out.dtype for out in found} == {torch.float32 if name in LOSSES and dtype == torch.bfloat16 else dtype}
        for ours, theirs in zip((*found, *found_grads), (*wanted, *wanted_grads), strict=True):
            assert ours.shape == theirs.shape and ours.isfinite().all()
            if not ours.numel():
                continue
            worst = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1)
            assert worst <= ROUNDING[dtype] * rough, f"{name} {[getattr(a, 'shape', a) for a in args]}: {worst:.1e}"


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_differences(name: str) -> None:
    for args in cases(name, torch.float64):
        if sum(a.numel() for a in args if isinstance(a, Tensor)) < 200:
            assert torch.autograd.gradcheck(OPS[name], leaves(args, torch.float64))


@pytest.mark.parametrize("name", [n for n in FORMULAS if n not in LOSSES])
def test_low_precision_is_computed_high(name: str) -> None:
    """In bf16 the only rounding is the result's (and where a product is formed last, one more)."""
    for args in cases(name, torch.bfloat16):
        for exact, found in zip(results(FORMULAS[name](*leaves(args, torch.float64))), results(OPS[name](*args)), strict=True):
            off = (found.double() - exact.detach()).abs()
            assert not off.numel() or (off <= 2**-7 * exact.abs() + 1e-2 * exact.abs().max()).all()


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gelu", "silu", "relu", "gelu_tanh"])
def test_torch_agrees(name: str) -> None:
    """A second witness where torch has the op."""
    witness: dict[str, Callable[..., Tensor]] = {
        "rms_norm": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
        "layer_norm": lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
        "gelu": lambda x, bias: F.gelu(biased(x, bias)), "silu": lambda x, bias: F.silu(biased(x, bias)),
        "relu": lambda x, bias: F.relu(biased(x, bias)), "gelu_tanh": lambda x, bias: F.gelu(biased(x, bias), approximate="tanh"),
    }  # fmt: skip
    for args in cases(name, torch.float32):
        torch.testing.assert_close(OPS[name](*args), witness[name](*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 5])
def test_no_label_is_no_loss(dtype: torch.dtype, rows: int) -> None:
    logits = torch.randn(rows, 7, dtype=dtype, requires_grad=True)
    loss = ops.cross_entropy(logits, torch.full((rows,), IGNORE))
    loss.backward()
    assert loss.item() == 0 and torch.equal(logits.grad, torch.zeros_like(logits))


def test_cross_entropy_survives_large_logits() -> None:
    for size in (1e4, 1e30):
        logits = torch.tensor([[size, 0.0, -size]], requires_grad=True)
        loss = ops.cross_entropy(logits, torch.tensor([1]))
        loss.backward()
        assert loss.item() == pytest.approx(size) and logits.grad.isfinite().all()


def test_rms_norm_takes_large_half_precision_inputs() -> None:
    """x^2 overflows fp16 from 256 on, and the eps vanishes in bf16: both are computed in fp32."""
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)
    for norm in (ops.rms_norm, ops.rms_norm.reference):
        assert norm(x, torch.ones(8, dtype=torch.float16), 1e-6).eq(1).all()


def test_rotary_angles_are_not_rounded_to_the_input() -> None:
    """A predecessor cast the angles to half precision: at position 2048 the error was 0.5."""
    x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.bfloat16)
    angle = torch.tensor([[[[2047.3]]]])
    expected = torch.tensor([math.cos(2047.3), math.sin(2047.3)])
    assert (ops.rotary(x, angle.cos(), angle.sin(), False).flatten().float() - expected).abs().max() < 4e-3


@pytest.mark.skipif(_kernels._C is None, reason="the reference is torch's, which rounds the mean")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layer_norm_keeps_a_large_mean_apart(device: str) -> None:
    """The mean of a thousand has an error of 3e-5 in fp32; what is left of it is subtracted too."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(64, 768) + 1000, torch.ones(768), torch.zeros(768)
    exact = layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    found = ops.layer_norm(*(t.to(device) for t in (x, weight, bias)), 1e-5)
    assert (found.cpu() - exact).abs().max() < 2e-6


ONES = torch.ones(1, 6, 2, 4)


@pytest.mark.parametrize(("change", "words"), [
    ({"lengths_q": [0, 6]}, "lengths_q and lengths_k go together"),
    ({"lengths_q": [0, 2, 6], "lengths_k": [0, 6]}, "lengths_q and lengths_k: one more than there are sequences, in both"),
    ({"lengths_q": [0, 2, 5], "lengths_k": [0, 2, 6]}, "cumulative lengths must go from 0 to 6"),
    ({"lengths_q": [0, 2, 6], "lengths_k": [1, 2, 6]}, "cumulative lengths must go from 0 to 6"),
    ({"lengths_q": [0, 4, 2, 6], "lengths_k": [0, 2, 4, 6]}, "cumulative lengths must not fall"),
    ({"q": ONES.expand(2, 6, 2, 4), "k": ONES.expand(2, 6, 2, 4), "v": ONES.expand(2, 6, 2, 4), "lengths_q": [0, 6],
      "lengths_k": [0, 6]}, "packed sequences are one row; this is a batch of 2"),
    ({"v": ONES[:, :1]}, r"v: shape \(1, 1, 2, 4\); wanted \(1, 6, 2, 4\)"),
    ({"q": ONES.expand(2, 6, 2, 4)}, "q and k differ in their batch or head dim"),
    ({"q": ONES[:, :, :1]}, "1 heads are no multiple of 2"),
    ({"mask": torch.ones(1, 1, 7, 6)}, r"the mask does not fit: wanted \(1\|b, 1\|heads, 1\|s, t\)"),
], ids=["alone", "counts", "short", "late", "falling", "rows", "values", "batch", "heads", "mask"])  # fmt: skip
def test_attention_refuses_what_does_not_belong_together(change: dict[str, Any], words: str) -> None:
    """Torch's functions would broadcast it or leave it out; the reference and the kernel say it in the same words."""
    given = {"q": ONES, "k": ONES, "v": ONES, "mask": None, "lengths_q": None, "lengths_k": None} | change
    args = [torch.tensor(a, dtype=torch.int32) if isinstance(a, list) else a for a in given.values()]
    for attend in (OPS["attention"], OPS["attention"].reference):
        with pytest.raises(ValueError, match=f"attention: {words}"):
            attend(*args, 0.5, False, None, 0.0)


@pytest.mark.skipif(not _kernels.available("cpu"), reason="the kernels are compiled")
@pytest.mark.parametrize("odd", [1, 3, 5])
def test_a_share_between_two_thresholds_is_rounded_up(odd: int) -> None:
    """16 bits decide what is dropped; kernels for the CPU once took the even one of two that are as near."""
    x, seed, p = torch.ones(100_000), torch.tensor([7]), odd * 2.0**-17
    assert torch.equal(ops.dropout(x, None, seed, p), OPS["dropout"].reference(x, None, seed, p))


X, ROW, SEED = torch.ones(3, 4), torch.ones(4), torch.tensor([7])
CODES, SCALES = torch.zeros(5, 4, dtype=torch.int8), torch.ones(5)
KINDS = "wanted float32 or float16 or bfloat16"
REFUSED: list[tuple[str, tuple[Any, ...], str]] = [
    ("dropout", (X, torch.ones(1, 4), SEED, 0.5), "dropout: residual: shape (1, 4); wanted (3, 4)"),
    ("dropout", (X, torch.ones(4, 3), SEED, 0.5), "dropout: residual: shape (4, 3); wanted (3, 4)"),
    ("dropout", (X.int(), None, SEED, 0.5), f"dropout: x: torch.int32; {KINDS}"),
    ("dropout", (X, X.long(), SEED, 0.5), f"dropout: residual: torch.int64; {KINDS}"),
    ("dropout", (X, None, torch.tensor([7, 8]), 0.5), "dropout: seed: shape (2); wanted (1)"),
    ("dropout", (X, None, torch.tensor(7), 0.5), "dropout: seed: shape (); wanted (1)"),
    ("dropout", (X, None, SEED.int(), 0.5), "dropout: seed: torch.int32; wanted int64"),
    ("rms_norm", (X, torch.ones(1), 1e-6), "norm: weight: shape (1); wanted (4)"),
    ("rms_norm", (X, torch.ones(3, 4), 1e-6), "norm: weight: shape (3, 4); wanted (4)"),
    ("rms_norm", (X, ROW, math.nan), "norm: eps: nan; wanted a finite number"),
    ("rms_norm", (X[0, 0], ROW, 1e-6), "norm: weight: shape (4); wanted ()"),
    ("rms_norm", (X.bool(), ROW, 1e-6), f"norm: x: torch.bool; {KINDS}"),
    ("layer_norm", (X, torch.ones(3, 4), torch.ones(3, 4), 1e-6), "norm: weight: shape (3, 4); wanted (4)"),
    ("layer_norm", (X, ROW, torch.ones(5), 1e-6), "norm: bias: shape (5); wanted (4)"),
    ("add_rms_norm", (X, X[:1], ROW, 1e-6, None, 0.0), "norm: residual: shape (1, 4); wanted (3, 4)"),
    ("add_rms_norm", (X[:1], X, ROW, 1e-6, SEED, 0.1), "norm: residual: shape (3, 4); wanted (1, 4)"),
    ("add_layer_norm", (X, X, ROW, ROW, 1e-6, torch.tensor([[7]]), 0.1), "norm: seed: shape (1, 1); wanted (1)"),
    ("gelu", (X.int(), ROW), f"activation: x: torch.int32; {KINDS}"),
    ("relu", (X.long(), ROW), f"activation: x: torch.int64; {KINDS}"),
    ("swiglu", (X.int(), X.int()), f"gated: gate: torch.int32; {KINDS}"),
    ("rotary", (X.int()[None, :, None], *[torch.ones(1, 3, 1, 2)] * 2, False), f"rotary: y: torch.int32; {KINDS}"),
    ("embedding", (torch.tensor([[0, 1], [2, 3]]), X, None), "embedding: id 3; the table has 3 rows"),
    ("embedding", (torch.tensor([0, -1, 9]), X, 0), "embedding: id -1; the table has 3 rows"),
    ("embedding", (torch.tensor([0]), X.int(), None), f"embedding: table: torch.int32; {KINDS}"),
    ("cross_entropy", (X, torch.tensor([0, IGNORE, 4])), "cross_entropy: labels[2] is 4; wanted 0 to 3, or -100 to ignore it"),
    ("cross_entropy", (X, torch.tensor([-1, 1, 4]), 0.1), "cross_entropy: labels[0] is -1; wanted 0 to 3, or -100 to ignore it"),
    ("cross_entropy", (X, torch.tensor([0, 1, 2]), 0.0, math.inf), "cross_entropy: z: inf; wanted a finite number"),
    ("linear_int8", (X, CODES.short(), SCALES, None), "linear_int8: codes: torch.int16; wanted int8"),
    ("linear_int8", (X[:, :3], CODES, SCALES, None), "linear_int8: codes: shape (5, 4); wanted (rows, 3) for x of 3 columns"),
    ("linear_int8", (X, CODES, SCALES[:1], None), "linear_int8: scales: shape (1); wanted (5)"),
    ("linear_int8", (X, CODES, SCALES, torch.ones(1)), "linear_int8: bias: shape (1); wanted (5)"),
    ("linear_nf4", (X, CODES.view(torch.uint8), SCALES[:, None], None), "linear_nf4: codes: shape (5, 4); wanted (rows, 2) for x"),
    ("linear_nf4", (X, CODES.view(torch.uint8)[:, :2], SCALES, None), "linear_nf4: scales: shape (5); wanted (5, 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "words"), REFUSED, ids=[words.partition(";")[0] for *_, words in REFUSED])
def test_what_the_kernel_refuses_the_reference_refuses(name: str, args: tuple[Any, ...], words: str) -> None:
    """In one sentence: torch's functions would broadcast, round, or say it in their own. In float64 there is no kernel."""
    op, kind = OPS[name], torch.float64
    wider = [a.to(kind) if isinstance(a, Tensor) and a.dtype == torch.float32 and a is not SCALES else a for a in args]
    for way, given in ((op, args), (op.reference, args), (op, wider)):
        with pytest.raises(ValueError, match=re.escape(words)):
            way(*given)


MASKS = [
    (ONES[:, :5, :1, :].bool().transpose(1, 3), "the mask does not fit: wanted (1|b, 1|heads, 1|s, t)"),
    (torch.ones(2, 1, 6, 6), "the mask does not fit: wanted (1|b, 1|heads, 1|s, t)"),
    (torch.ones(1, 3, 6, 6), "the mask does not fit: wanted (1|b, 1|heads, 1|s, t)"),
    (torch.ones(6, 6), "the mask has 2 dimensions; wanted 4"),
    (torch.ones(1, 1, 6, 6).int(), f"mask: torch.int32; {KINDS} or bool"),
]


@pytest.mark.parametrize(("mask", "words"), MASKS, ids=[f"{tuple(mask.shape)} {mask.dtype}" for mask, _ in MASKS])
def test_a_mask_that_does_not_fit(mask: Tensor, words: str) -> None:
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=re.escape(f"attention: {words}")):
            ops.attention(*[ONES.to(dtype)] * 3, mask, None, None, 1.0, False, None, 0.0)


def test_scales_and_seeds_of_attention() -> None:
    for dtype in (torch.float32, torch.float64):
        for scale, seed, words in (
            (math.nan, None, "scale: nan; wanted a finite number"), (1.0, SEED.int(), "seed: torch.int32; wanted int64"),
            (1.0, torch.tensor([7, 8]), "seed: shape (2); wanted (1)"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=re.escape(f"attention: {words}")):
                ops.attention(*[ONES.to(dtype)] * 3, None, None, None, scale, False, seed, 0.5)


def headless() -> None:
    q, k = torch.ones(1, 3, 0, 4, requires_grad=True), torch.ones(1, 5, 2, 4, requires_grad=True)
    out = ops.attention(q, k, k * 1, None, None, None, 1.0, False, None, 0.0)
    grads = torch.autograd.grad(out, (q, k), torch.ones_like(out))
    assert out.shape == q.shape and grads[0].shape == q.shape and not grads[1].any()


def test_queries_without_heads() -> None:
    """The kernel's backward divided by their number, which ended Python: each head of the keys gets a gradient of zeros."""
    process = multiprocessing.get_context("fork").Process(target=headless)
    process.start()
    process.join(100)
    assert process.exitcode == 0
