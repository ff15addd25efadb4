"""Random calls of everything that has a kernel, under sanitizers or not: `make fuzz`.

    python tests/fuzz_ops.py --cases 100000 [--device cuda] [--seed 0] [--only NAME,NAME] [--compare 0.1] [--large] ... (--help)

A case draws sizes (none, one, odd, past a block), dtypes, a mixture of them, layouts and values, runs forward and backward, and of
a share of them (--compare) holds values and gradients to the reference. It is a function of the seed and its own number, which is
said of a case that goes wrong, whatever went wrong: --first N --cases 1 is that case again. A case that no kernel saw does not
count.

On CUDA, under compute-sanitizer, torch's allocator is switched off so that every tensor has its own bounds:

    export PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/fuzz_ops.py --device cuda --cases 1000 --compare 0 --seed 1
    compute-sanitizer --tool racecheck python tests/fuzz_ops.py --device cuda --cases 1000 --compare 0 --seed 2

A run ends by saying which case took longest, and one that is ended from outside says where it stood; --verbose says each case
beforehand.
"""

import argparse
import faulthandler
import math
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, cycle
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from contract import DTYPES, LAYOUTS, LOW, OPS, each, error, floating, kernel_backed, kernels_called, run, shown
from torch import Tensor, nn

from modelcenter.ops import _kernels, _norm, draw, quantize
from modelcenter.ops._kernels import call
from modelcenter.ops.activation import GATED, gated_backward
from modelcenter.ops.cross_entropy import IGNORE
from modelcenter.ops.dropout import dropped
from modelcenter.ops.gated_linear import gated_linear
from modelcenter.ops.rotary import rotary_
from modelcenter.optim import adafactor, adamw

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130, 255, 257, 300)
WIDTHS = (  # of a row, past blocks
    *SIZES, 136, 264, 392, 520, 513, 1000, 1023, 1025, 2056, 4096, 4100, 8192, 8200, 10001, 12280, 12296, 16408,
)  # fmt: skip
LENGTHS = (*SIZES, 1024, 4095, 8191, 8192, 8193, 16400, 32768, 33000)  # of a parameter: past AdamW's chunks and pieces
MOST = 20_000  # elements of a tensor
LARGE = (0, 1, 1, 2, 3, 5, 17, 32771, 40000, 65601)  # --large: one axis of a tensor past what 15 and what 16 bits count
WRONG = 20  # cases, after which it is plain enough

Maker = Callable[[random.Random, str], tuple[Any, ...]]


class Unfit(Exception):
    """What the reference refuses too, or what is too large: no case."""


# ---- what arguments are made of


def numbers(rng: random.Random, device: str, dtype: torch.dtype, *shape: int, most: float = 0) -> Tensor:
    """Normal numbers of some size; now and then one that is none, or of the largest."""
    if math.prod(shape) > (most or MOST):
        raise Unfit
    x = torch.randn(shape, device=device) * rng.choice((1, 1, 1, 1, 0, 1e-3, 30))
    if x.numel() and rng.random() < 0.02:
        x.view(-1)[rng.randrange(x.numel())] = rng.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-40))
    return x.to(dtype)


def some_shape(rng: random.Random, last: int, least: int = 0) -> tuple[int, ...]:
    """Up to three axes before the last, so many elements at most as a tensor may have."""
    shape: tuple[int, ...] = (last,)
    for _ in range(rng.choice((1, 1, 1, 2, 3)) if least or rng.random() < 0.95 else 0):
        shape = (rng.choice([n for n in SIZES if n * math.prod(max(1, m) for m in shape) <= MOST]), *shape)
    return shape


def mixed(rng: random.Random, dtype: torch.dtype) -> torch.dtype:
    """Mostly the same, sometimes as autocast or an fp32 stream would have it."""
    return rng.choice((dtype, dtype, dtype, dtype, torch.float32, *DTYPES))


def sliced(a: Tensor) -> Tensor:
    """The same values within the rows of a wider tensor, not at their beginning."""
    out = torch.full((*a.shape[:-1], a.shape[-1] + 4), 77, dtype=a.dtype, device=a.device)[..., 1 : a.shape[-1] + 1]
    out.copy_(a.detach())
    return out.requires_grad_(a.requires_grad)


def expanded(a: Tensor) -> Tensor:
    """The first row everywhere, once in memory."""
    return a.detach()[:1].expand(a.shape).requires_grad_(a.requires_grad) if a.is_floating_point() and a.shape[0] else a


APART = (*LAYOUTS.values(), sliced)  # the same values
STRANGE = (*APART, expanded)


def laid_out(
    rng: random.Random, share: float = 0.4, ways: Sequence[Callable[[Tensor], Tensor]] = STRANGE
) -> Callable[[Tensor], Tensor]:
    return lambda a: rng.choice(ways)(a) if a.dim() and rng.random() < share else a


# ---- the arguments of each op


def activation(rng: random.Random, device: str) -> tuple[Any, ...]:
    dtype, last = rng.choice(DTYPES), rng.choice(WIDTHS)
    bias = numbers(rng, device, rng.choice((dtype, torch.float32)), last) if rng.random() < 0.6 or device == "cuda" else None
    return numbers(rng, device, dtype, *some_shape(rng, last)), bias


def gated(rng: random.Random, device: str) -> tuple[Any, ...]:
    dtype, shape = rng.choice(DTYPES), some_shape(rng, rng.choice(WIDTHS))
    return numbers(rng, device, dtype, *shape), numbers(rng, device, dtype, *shape)


def of_dropout(rng: random.Random, device: str) -> tuple[Any, ...]:
    dtype, shape = rng.choice(DTYPES), some_shape(rng, rng.choice(WIDTHS))
    residual = numbers(rng, device, mixed(rng, dtype), *shape) if rng.random() < 0.5 else None
    return numbers(rng, device, dtype, *shape), residual, draw(torch.device(device)), rng.choice((0.0, 1.0, rng.random()))


def norm(biased: bool, adds: bool) -> Maker:
    def make(rng: random.Random, device: str) -> tuple[Any, ...]:
        dtype, last = rng.choice(DTYPES), rng.choice(WIDTHS)
        shape, of_weight = some_shape(rng, last), mixed(rng, dtype)
        xs = [numbers(rng, device, dtype, *shape)]
        if adds:
            xs.append(numbers(rng, device, mixed(rng, dtype), *shape))
        weights = [numbers(rng, device, of_weight, last) for _ in range(1 + biased)]
        seed = draw(torch.device(device)) if rng.random() < 0.5 else None
        rest = (seed, 0.0 if seed is None else rng.choice((0.1, 0.5, 1.0))) if adds else ()
        return *xs, *weights, rng.choice((1e-5, 1e-12, 0.5)), *rest, rng.choice((None, None, torch.float32, *LOW))

    return make


def on_gpu(device: str) -> bool:
    return device == "cuda" or _kernels._C.cpu_level == "emulated"


def outside(rng: random.Random, count: int) -> int:
    """No number of a row or a column, for a GPU's kernels: a CPU's say an exception, these NaN, and train nothing."""
    return rng.choice((-1, count, 2**31, 2**32 + count // 2, -(2**32), 2**63 - 1, -(2**63)))


def labels_for(rng: random.Random, device: str, n: int, vocab: int) -> Tensor:
    labels = torch.randint(vocab, (n,), device=device)
    labels = labels.masked_fill(torch.rand(n, device=device) < rng.choice((0, 0.3, 0.3, 1)), IGNORE)
    if on_gpu(device) and n and rng.random() < 0.1:
        labels[rng.randrange(n)] = outside(rng, vocab)
    return labels


def of_cross_entropy(rng: random.Random, device: str) -> tuple[Any, ...]:
    vocab = rng.choice(WIDTHS[1:])
    n = rng.choice([n for n in SIZES if n * vocab <= MOST])
    rest = rng.choice(((), (0.1,), (0.0, 1e-2), (0.1, 1e-4), (1.0, 0.0)))
    return numbers(rng, device, rng.choice(DTYPES), n, vocab), labels_for(rng, device, n, vocab), *rest


def of_linear_cross_entropy(rng: random.Random, device: str) -> tuple[Any, ...]:
    dtype, n, dim = rng.choice(DTYPES), rng.choice(SIZES[:17]), rng.choice(SIZES[1:15])
    vocab = rng.choice(SIZES[1:] if n > 5 else (*SIZES[1:], 1000, 4100))  # in 4100 several warps of a block have a part
    bias = numbers(rng, device, dtype, vocab) if rng.random() < 0.5 else None
    rest = rng.choice(((), (0.5,), (1.0, 0.1), (2.0, 0.1, 1e-3)))
    if n * vocab > 1 << 20:
        raise Unfit
    weight = numbers(rng, device, dtype, vocab, dim) / dim**0.5
    return numbers(rng, device, dtype, n, dim), weight, bias, labels_for(rng, device, n, vocab), *rest


def of_embedding(rng: random.Random, device: str) -> tuple[Any, ...]:
    dim = rng.choice(WIDTHS[1:])
    vocab = rng.choice([n for n in (*SIZES[1:], 1000) if n * dim <= MOST])
    *shape, _ = some_shape(rng, dim, 1)
    ids = torch.randint(rng.choice((1, min(3, vocab), vocab)), shape, device=device)
    if on_gpu(device) and ids.numel() and rng.random() < 0.2:
        ids.view(-1)[: rng.choice((1, ids.numel()))] = outside(rng, vocab)
    return ids, numbers(rng, device, rng.choice(DTYPES), vocab, dim), rng.choice((None, None, 0, vocab - 1))


def of_rotary(rng: random.Random, device: str) -> tuple[Any, ...]:
    b, s, h, d = (rng.choice(SIZES[:n]) for n in (7, 19, 9, 23))
    pairs = rng.randint(0, d // 2)
    x = numbers(rng, device, rng.choice(DTYPES), b, s, h, d)  # first, as it may be too large
    angle = torch.rand(rng.choice((1, b)), s, 1, pairs, device=device) * 6
    return x, angle.cos(), angle.sin(), rng.random() < 0.5


def of_attention(rng: random.Random, device: str) -> tuple[Any, ...]:
    dtype = rng.choice(DTYPES)
    b, s, t, kv, d = (rng.choice((1, 1, 2)), rng.choice(SIZES[:17]), rng.choice(SIZES), rng.choice((1, 2)), rng.choice(SIZES[1:17]))
    h = kv * rng.choice((1, 2, 3))
    seed = draw(torch.device(device)) if rng.random() < 0.4 else None
    lengths: list[Tensor | None] = [None, None]
    longest_s, longest_t = s, t
    if rng.random() < 0.3:
        longest = 70 if MOST < 1 << 17 else 20_000
        parts = [(rng.randrange(0, 40), rng.randrange(0, longest)) for _ in range(rng.randrange(1, 5))]
        b, s, t = 1, sum(p[0] for p in parts), sum(p[1] for p in parts)
        longest_s, longest_t = max(p[0] for p in parts), max(p[1] for p in parts)
        ends = [[0], [0]]
        for part in parts:
            for k in (0, 1):
                ends[k].append(ends[k][-1] + part[k])
        kind = rng.choice((torch.int32, torch.int64))
        lengths = [torch.tensor(e, dtype=kind) for e in ends]
    if b * h * s * t > 1 << 20:
        raise Unfit
    mask = None
    if rng.random() < 0.5:
        shape = (rng.choice((1, b)), rng.choice((1, h)), rng.choice((1, longest_s)), longest_t)
        mask = torch.rand(shape, device=device) < 0.7 if rng.random() < 0.5 else numbers(rng, device, mixed(rng, dtype), *shape)
    q, k, v = (numbers(rng, device, dtype, *shape) for shape in ((b, s, h, d), (b, t, kv, d), (b, t, kv, d)))
    return q, k, v, mask, *lengths, 1 / math.sqrt(d), rng.random() < 0.5, seed, 0.0 if seed is None else rng.choice((0.1, 0.5, 1.0))


def of_relative_attention(rng: random.Random, device: str) -> tuple[Any, ...]:
    dtype, b, h = rng.choice(LOW), rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3))
    s, t, d = rng.choice(SIZES[:20]), rng.choice(SIZES), rng.choice((8, 16, 24, 40, 64, 64, 80, 96, 120, 128))
    longest_q, longest_k, lengths = s, t, [None, None]
    if rng.random() < 0.4:
        parts = [(rng.choice((0, 1, 8, 30, 70)), rng.choice((0, 1, 9, 64, 130))) for _ in range(rng.randrange(1, 5))]
        b, (s, t), (longest_q, longest_k) = 1, map(sum, zip(*parts, strict=True)), map(max, zip(*parts, strict=True))
        lengths = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in zip(*parts, strict=True)]
    if max(s, t) >= 1 << 15:
        raise Unfit  # a square of scores, in the reference
    kind = torch.float32 if rng.random() < 0.95 else rng.choice(LOW)
    prompt = rng.choice((0, 0, 1, 8, 32, 63, 100))
    reach = rng.choice((0, 0, 1, 30, 2 + (t - s) % 64, 2 + (s - t) % 64, 128))  # 2 + ...: of some tiles all but one are further
    count = max(0, longest_q + longest_k - 1) + 2 * (prompt > 0)
    bias = numbers(rng, device, kind, h, count) if rng.random() < 0.8 else None
    of_a_row = 1 if lengths[0] is None else len(lengths[0]) - 1
    context = torch.randint(longest_k + 2, (b, of_a_row), dtype=torch.int32, device=device) if rng.random() < 0.3 else None
    seen = torch.rand(b, t, device=device) < rng.choice((0.9, 0.5, 0.0)) if rng.random() < 0.3 else None
    seed, p = (draw(torch.device(device)), rng.choice((0.1, 0.5, 1.0))) if rng.random() < 0.4 else (None, 0.0)
    q, k, v = (numbers(rng, device, dtype, b, n, h, d) for n in (s, t, t))
    given = (bias, seen, *lengths, context, longest_q, longest_k, prompt, reach)
    return q, k, v, *given, 1 / math.sqrt(d), rng.random() < 0.5, seed, p


def of_attention_in_crowds(rng: random.Random, device: str) -> tuple[Any, ...]:
    """What Hopper has kernels of its own for where there is a block for every multiprocessor: forward a block takes 128 queries,
    backward a head of 320 queries and more, without a bias."""
    emulated = os.environ.get("MODELCENTER_EMULATE", "3")  # tests/emulate/runtime.cpp
    crowd = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else int(emulated.split()[0])
    dtype, h, d = rng.choice(LOW), rng.choice((1, 2, 3)), rng.choice((8, 8, 16, 40, 64))
    if heads := rng.random() < 0.5:
        s, t, n = rng.choice((321, 330, 384, 400, 512)), rng.choice((128, 129, 140, 200, 256)), -(-crowd // h)
    else:
        s, t = rng.choice(SIZES[1:20]), rng.choice((*SIZES[1:20], *(2100, 4096) * (rng.random() < 0.1)))
        n = -(-crowd * rng.choice((1, 1, 2)) // (h * -(-s // 128))) + rng.choice((0, 1))
    biased, causal = not heads and rng.random() < 0.5, not heads and rng.random() < 0.5
    reach = rng.choice((0, 1, 2 + (t - s) % 64, 2 + (s - t) % 64, 128))  # as above
    context = torch.randint(t + 2, (n, 1), dtype=torch.int32, device=device) if causal and rng.random() < 0.3 else None
    b, ends, wide, long = n, (None, None), s, t
    if rng.random() < 0.3:  # the first sequence is the longest
        lengths = [[m, *(rng.choice((0, 1, m // 2, m)) for _ in range(n - 1))] for m in (s, t)]
        b, (s, t), context = 1, (sum(part) for part in lengths), None
        ends = tuple(torch.tensor([0, *accumulate(part)], dtype=torch.int32, device=device) for part in lengths)
    q, k, v = (numbers(rng, device, dtype, b, m, h, d, most=math.inf) for m in (s, t, t))
    bias = numbers(rng, device, torch.float32, h, wide + long - 1, most=math.inf) if biased else None
    return q, k, v, bias, None, *ends, context, wide, long, 0, reach, 1 / math.sqrt(d), causal, None, 0.0


def linear(kind: str) -> Maker:
    def make(rng: random.Random, device: str) -> tuple[Any, ...]:
        cols, dtype = rng.choice(WIDTHS[1:]), rng.choice(DTYPES)
        rows = rng.choice([n for n in SIZES[1:] if n * cols <= MOST])
        if _kernels._C.cpu_level == "emulated" and rng.random() < 0.1:
            rows, cols = 300, rng.choice((264, 513))  # of such rows blocks have several, and of such columns warps
        codes, scales = getattr(quantize, f"quantize_{kind}")(torch.randn(rows, cols, device=device))
        *lead, _ = some_shape(rng, max(cols, rows))
        bias = numbers(rng, device, mixed(rng, dtype), rows) if rng.random() < 0.5 else None
        return numbers(rng, device, dtype, *lead, cols), codes, scales, bias

    return make


MAKERS: dict[str, Maker] = {
    "attention": of_attention, "cross_entropy": of_cross_entropy, "dropout": of_dropout, "embedding": of_embedding,
    "linear_cross_entropy": of_linear_cross_entropy, "linear_int8": linear("int8"), "linear_nf4": linear("nf4"),
    "relative_attention": of_relative_attention, "rotary": of_rotary,
    "rms_norm": norm(False, False), "add_rms_norm": norm(False, True),
    "layer_norm": norm(True, False), "add_layer_norm": norm(True, True),
    **dict.fromkeys(("gelu", "gelu_tanh", "gelu_cut", "relu", "silu"), activation),
    **dict.fromkeys(("geglu", "geglu_tanh", "reglu", "swiglu"), gated),
}  # fmt: skip


def doubled(args: Sequence[Any]) -> tuple[Any, ...]:
    return each(args, lambda a: a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a)


def rows_there(ids: Tensor, table: Tensor, pad: int | None) -> Tensor:
    """The embedding's reference, and NaN for ids that the table does not have."""
    there = (ids >= 0) & (ids < len(table))
    return OPS["embedding"].reference(ids * there, table, pad).where(there[..., None], math.nan)  # type: ignore[no-any-return]


def compare(name: str, args: tuple[Any, ...], found: list[Tensor], seed: int) -> None:
    if name.endswith("cross_entropy"):
        labels, vocab = (args[1], args[0].shape[1]) if name == "cross_entropy" else (args[3], len(args[1]))
        if bool(((labels != IGNORE) & ((labels < 0) | (labels >= vocab))).any()):
            assert found[0].isnan(), "the loss of a label that there is not"
            return
    sizes = [float(a.detach().abs().max()) for a in floating(args) if a.numel()]
    if not all(size < 1e18 for size in sizes):
        return  # a square overflows, or what is not finite meets a zero: who computes in which order decides
    loud = max([1.0, *sizes])
    reference = rows_there if name == "embedding" else OPS[name].reference
    exact = run(reference, doubled(args), seed)
    peer = run(reference, each(args, lambda a: a.detach().clone().requires_grad_(a.requires_grad)), seed)
    if name == "embedding":
        assert torch.equal(found[0].nan_to_num(7), peer[0].nan_to_num(7)), "result 0"
    finite = [t for t, p in zip(exact, peer, strict=True) if t.numel() and t.isfinite().all() and p.isfinite().all()]
    most = max([float(t.abs().max()) for t in finite], default=1.0)  # of all: a difference of large numbers may be a small one
    for i, (ours, theirs, truth) in enumerate(zip(found, peer, exact, strict=True)):
        assert ours.shape == truth.shape, f"result {i} has the shape {ours.shape} and not {truth.shape}"
        if not truth.isfinite().all() or not theirs.isfinite().all():
            continue  # out of the dtype's range, there as here
        rough = max((torch.finfo(a.dtype).eps for a in [*floating(args), ours]), default=1e-7)
        bound = 4 * error(theirs, truth) + 32 * rough * max(most, 1) * loud
        if name.endswith("_norm") and args[0].shape[-1:].numel() <= 2:
            eps = next(a for a in args if isinstance(a, float))
            bound *= 1 + 4 / math.sqrt(eps)  # times a difference that cancels
            bound *= max(1, args[0].numel() / 256)  # what rounds all rows alike, where they are, adds up
        assert error(ours, truth) <= bound, f"result {i}: {error(ours, truth):.1e} beside {error(theirs, truth):.1e} of {most:.1e}"


def of_op(name: str, rng: random.Random, device: str, compared: bool, make: Maker | None = None) -> list[Any]:
    """One call of an op, forward and backward. Returns the arguments, as `shown`."""
    op, lay = OPS[name], laid_out(rng)
    wants = [rng.random() < 0.8 for _ in range(12)]
    args = each((make or MAKERS[name])(rng, device), lay)
    args = tuple(a.requires_grad_(w) if isinstance(a, Tensor) and a.is_floating_point() else a
                 for a, w in zip(args, cycle(wants), strict=False))  # fmt: skip
    assert op.kernel is not None
    autocast = rng.random() < 0.1
    if op.kernel.takes is not None and not autocast and not op.kernel.takes(*args):
        raise Unfit
    said, seed, of_results = shown(args), rng.getrandbits(31), laid_out(rng, 0.3, APART if compared else STRANGE)
    around = torch.autocast(device, rng.choice(LOW)) if autocast else nullcontext()
    try:
        with around:
            found = run(op, args, seed, lambda t: of_results(t).detach())
    except Exception as refusal:
        try:  # a case for nobody, if the reference does not want it either
            with around:
                run(op.reference, each(args, lambda a: a.detach().clone().requires_grad_(a.requires_grad)), seed)
        except Exception:
            raise Unfit from None
        raise AssertionError(f"{said}: refused") from refusal
    if compared and not autocast:
        compare(name, args, found, seed)
    return said


# ---- what is no op


def of_quantize(kind: str, rng: random.Random, device: str, compared: bool) -> list[Any]:
    """Codes and scales, and the weights out of them: all to the bit."""
    x = laid_out(rng)(numbers(rng, device, rng.choice(DTYPES), *some_shape(rng, rng.choice(WIDTHS))))
    dtype, cols = rng.choice(DTYPES), (x.shape[-1],) if kind == "nf4" else ()
    codes, scales = getattr(quantize, f"quantize_{kind}")(x)
    codes, scales = (laid_out(rng, 0.3, APART)(t) for t in (codes, scales))
    y = getattr(quantize, f"dequantize_{kind}")(codes, scales, *cols, dtype)
    if compared:
        for found, wanted in ((codes, 0), (scales, 1)):
            assert torch.equal(found.nan_to_num(7), getattr(quantize, f"quantize_{kind}_reference")(x)[wanted].nan_to_num(7))
        again = getattr(quantize, f"dequantize_{kind}_reference")(codes, scales, *cols, dtype)
        assert torch.equal(y.nan_to_num(7), again.nan_to_num(7)), "dequantised"
    return [*shown([x, codes, scales]), dtype]


def of_resize(rng: random.Random, device: str, compared: bool) -> list[Any]:
    """Rows that are cut or have zeros behind them, and rows that are not there: bytes as they are."""
    dtype, cols = rng.choice((*DTYPES, torch.uint8, torch.int8)), rng.choice(WIDTHS[1:])
    rows = rng.choice([n for n in SIZES if n * cols <= MOST])
    wide, many = max(1, cols + rng.randint(-40, 40)), rows + rng.choice((0, 0, rng.randint(-3, 9)))
    x = laid_out(rng)(torch.randint(0, 128, (rows, cols), device=device).to(dtype))
    out = quantize.resized(x, wide, max(0, many))
    if compared:
        wanted = F.pad(x.cpu(), (0, wide - cols, 0, max(0, many) - rows))
        assert torch.equal(out.cpu(), wanted), "result"
    return [*shown([x]), wide, many]


def of_rotary_in_place(rng: random.Random, device: str, compared: bool) -> list[Any]:
    x, cos, sin, interleaved = each(of_rotary(rng, device), laid_out(rng, 0.2))
    out = rotary_(x.clone(), cos, sin, interleaved)
    if compared:
        wanted = OPS["rotary"].reference(x, cos, sin, interleaved)
        torch.testing.assert_close(out, wanted, rtol=1e-5 if x.dtype == torch.float32 else 1e-2, atol=1e-5, equal_nan=True)
    return [*shown([x, cos, sin]), interleaved]


def of_gated_over(rng: random.Random, device: str, compared: bool) -> list[Any]:
    """A gated activation's gradients where its arguments were, its result where its gradient was: to the bit those apart."""
    drop = (torch.tensor([rng.getrandbits(62)], device=device), rng.choice((0.1, 0.5, 1.0))) if rng.random() < 0.5 else (None, 0.0)
    name, (over, whole) = rng.choice([*GATED]), rng.choice(((True, True), (True, False), (False, True)))
    gate, up = (t.clone(memory_format=torch.contiguous_format) for t in each(gated(rng, device), laid_out(rng)))
    grad, lay = torch.randn_like(gate), laid_out(rng, ways=APART)
    one, two, made = (t.clone() for t in (gate, up, grad))
    if not over:
        one, two = (lay(torch.randn_like(gate)).contiguous() for _ in range(2))
    given = (None, None) if over else (gate, up)
    call("gated_backward", one, two, made if whole else None, None if whole else grad, *given, GATED[name], *drop)
    if compared:
        dtype = gate.dtype  # in fp32, where both round once a step
        apart = grad if drop[0] is None else dropped(grad, *drop).to(dtype)
        if drop[0] is None or dtype == torch.float32:
            out = OPS[name](gate, up)
            out = out if drop[0] is None else dropped(out, *drop)
            wanted = *gated_backward(apart, gate, up, GATED[name]), out if whole else grad
            for i, (a, b) in enumerate(zip((one, two, made), wanted, strict=True)):
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), f"{name}: result {i}"
    return [name, over, whole, drop, *shown([gate, up])]


def of_gated_linear(rng: random.Random, device: str, compared: bool) -> list[Any]:
    """A gated activation and the projection behind it, backward over gate and up, or twice, before which these are wanted still."""
    name, low = rng.choice([*GATED]), rng.choice(LOW)
    dim, rows, outs = rng.choice((8, 16, 33, 64, 130)), rng.choice(SIZES[:17]), rng.choice((8, 9, 16, 32))
    gate, up, grad = (torch.randn(rows, n, device=device, dtype=low) for n in (dim, dim, outs))
    weight = (torch.randn(outs, dim, device=device) / dim**0.5).to(rng.choice((low, torch.float32)))
    bias = torch.randn(outs, device=device, dtype=weight.dtype) if rng.random() < 0.5 else None
    leaves = [t.requires_grad_() for t in (gate, up, weight, bias) if t is not None]
    drop = (torch.tensor([rng.getrandbits(62)], device=device), rng.choice((0.1, 0.5))) if rng.random() < 0.5 else ()
    found = []
    for again in (True, False):
        one, two = gate * 1, up * 1  # of no use to anybody else
        with torch.autocast(device, low):
            out = gated_linear(OPS[name], one, two, weight, bias, *drop)
        if again:
            torch.autograd.grad(out, leaves, grad, retain_graph=True)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    if compared:
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            assert torch.equal(a, b), f"{name}: result {i} depends on whether there is another backward"
        exact = [t.detach().double().requires_grad_() for t in leaves]
        hidden = OPS[name].reference(exact[0], exact[1])
        wide = torch.nn.functional.linear(dropped(hidden, *drop) if drop else hidden, exact[2], *exact[3:])
        for i, (a, b) in enumerate(zip(found[0], (wide.detach(), *torch.autograd.grad(wide, exact, grad.double())), strict=True)):
            most = float(b.abs().max()) if b.numel() else 0.0
            assert error(a, b) <= 8 * torch.finfo(low).eps * (1 + most), f"{name}: result {i}"
    return [name, *shown([gate, up, weight, bias])]


def of_norm_twice(rng: random.Random, device: str, compared: bool) -> list[Any]:
    """A norm for two who read it, beside the op whose two gradients are added in a pass of their own."""
    biased = rng.random() < 0.5
    norm_of, lay = OPS["add_layer_norm" if biased else "add_rms_norm"], laid_out(rng)
    args = each(norm(biased, True)(rng, device)[:-1], lay)
    x, residual, weight, *rest = args
    bias = rest.pop(0) if biased else None
    if not _norm.takes(x, residual, weight, bias, None):
        raise Unfit
    said, found, ways = shown(args), [], laid_out(rng, 0.3, APART if compared else STRANGE)
    grads = [ways(torch.randn_like(residual, memory_format=torch.contiguous_format)).detach() for _ in range(2)]
    for both in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in (x, residual, weight, bias) if t is not None]
        if both:
            outs = _norm.twice(norm_of, *leaves, *rest)
        else:
            outs = (norm_of(*leaves, *rest)[0],) * 2
        torch.autograd.backward(outs, grads)
        found.append([outs[0].detach(), *(t.grad for t in leaves)])
    if compared and all(t.isfinite().all() and (t.abs() < 1e4).all() for t in found[1]):
        rough = 8 * max(torch.finfo(t.dtype).eps for t in (residual, weight))
        for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
            added = residual.numel() / max(1, ours.numel())  # rows, of a weight's gradient
            most = float(theirs.abs().max()) if theirs.numel() else 0.0
            assert ((ours - theirs).abs() <= rough * (1 + most) * math.sqrt(added)).all(), f"result {i}"
    return said


def of_adamw(rng: random.Random, device: str, compared: bool) -> list[Any]:
    """Some steps of tensors of several sizes. The reference agrees to the bit."""
    dtype, count = rng.choice(DTYPES), rng.choice((1, 1, 2, 3, 5, 12, 41))
    options = dict(lr=rng.choice((0.0, 1e-3, 0.1)), betas=rng.choice(((0.9, 0.999), (0.0, 0.0), (0.8, 0.95))),
                   eps=rng.choice((1e-8, 0.1)), weight_decay=rng.choice((0.0, 0.1)), moments=rng.choice(("fp32", "bf16", "int8")),
                   master=rng.random() < 0.4, stochastic=rng.random() < 0.6, seed=rng.getrandbits(60))  # fmt: skip
    kind = rng.choice((dtype, dtype, *DTYPES))
    lay, max_norm = laid_out(rng), rng.choice((None, 0.0, 1e-3, 1.0))
    scale = torch.full((), rng.choice((1.0, 2.0**-10)), device=device) if rng.random() < 0.5 else None
    sizes = [rng.choice(LENGTHS if count < 10 else SIZES) for _ in range(count)]
    starts = [torch.randn(n, device=device).to(dtype) for n in sizes]
    grads = [[None if rng.random() < 0.05 else lay(torch.randn(n, device=device).to(kind)) for n in sizes] for _ in range(2)]
    if rng.random() < 0.1 and (g := grads[1][0]) is not None and g.numel():
        where = torch.rand(g.shape, device=device) < rng.choice((0.0, 0.01, 1.0))  # none: what is left out or in is one element
        where.view(-1)[rng.randrange(g.numel())] = True
        strange = torch.tensor(rng.choice((math.nan, math.inf, -math.inf, 3e38, 1e-30)), device=device)
        grads[rng.randrange(2)][0] = g.masked_fill(where, strange.to(kind))
    at = [rng.choice((torch.Tensor.clone, LAYOUTS["misaligned"])) for _ in sizes]

    clips: list[Tensor] = []  # of the kernel's run, for the reference's: sums of squares are not to the bit

    def stepped() -> list[Tensor]:
        given_clips = list(clips)
        params = [nn.Parameter(place(start)) for place, start in zip(at, starts, strict=True)]
        optimizer = adamw.AdamW(params, **options)  # type: ignore[arg-type]
        for given in grads:
            for p, g in zip(params, given, strict=True):
                p.grad_dtype = None  # type: ignore[attr-defined]
                p.grad = g
            clip = None if max_norm is None else optimizer.clip(max_norm, scale)
            if clip is not None and given_clips:
                torch.testing.assert_close(clip, given_clips[0], rtol=1e-5, atol=0, equal_nan=True)
                clip = given_clips.pop(0)
            elif clip is not None:
                clips.append(clip)
            optimizer.step(clip=clip)
            for state in optimizer.state.values():  # a state that was loaded lies anywhere
                state.update({name: LAYOUTS["misaligned"](t) for name, t in state.items() if name != "step"})
        return [t.detach() for p in params for t in (p, *optimizer.state[p].values())]

    found = stepped()
    if compared:
        with mock.patch.object(adamw, "usable", lambda x: False):
            wanted = stepped()
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)), f"result {i} of {options}"
    return [dtype, kind, sizes, options, max_norm, scale]


def of_adafactor(rng: random.Random, device: str, compared: bool) -> list[Any]:
    """Some steps of matrices of one shape, beside the same in torch."""
    dtype, lay = rng.choice(DTYPES), laid_out(rng)
    far = [n for n in LENGTHS if n <= MOST]  # past the bands that there are
    rows, columns = rng.choice(far if rng.random() < 0.2 else SIZES), rng.choice(far if rng.random() < 0.2 else WIDTHS)
    if rows * columns > 2 * MOST:
        rows = max(1, 2 * MOST // columns)
    count = rng.choice((1, 1, 2, 3, 241 if rows * columns < 20 else 5))
    options = dict(lr=rng.choice((0.0, 1e-3, 0.1)), weight_decay=rng.choice((0.0, 0.1)))
    size = rng.choice((1.0, 1.0, 1e-4, 1e-12, 1e-25)) if dtype != torch.float16 else 1.0
    max_norm = rng.choice((None, 0.0, 1e-3, 1.0))
    starts = [torch.randn(rows, columns, device=device).to(dtype) for _ in range(count)]
    grads = [[lay((size * torch.randn(rows, columns, device=device)).to(dtype)) for _ in range(count)] for _ in range(2)]
    if rng.random() < 0.2 and rows * columns:
        where = torch.rand(rows, columns, device=device) < rng.choice((0.0, 0.01, 0.9))
        where[rng.randrange(rows), rng.randrange(columns)] = True
        strange = torch.tensor(rng.choice((math.nan, math.inf, 3e4, 0.0, 0.0)), device=device).to(dtype)
        of_step = rng.choice(grads)
        of_step[0] = of_step[0].masked_fill(where, strange)
    at = [rng.choice((torch.Tensor.clone, LAYOUTS["misaligned"])) for _ in starts]

    def stepped(wide: bool = False) -> list[Tensor]:
        """`wide`: in fp32, where clipping rounds no gradient, and with weights that are rounded after each step."""
        params = [nn.Parameter(place(start.float() if wide else start)) for place, start in zip(at, starts, strict=True)]
        optimizer = adafactor.Adafactor(params, **options)
        for given in grads:
            for p, g in zip(params, given, strict=True):
                p.grad = g.to(p.dtype, copy=True)
            optimizer.step(clip=None if max_norm is None else optimizer.clip(max_norm))
            for p in params:
                p.data.copy_(p.data.to(dtype))
        return [t.detach().float() for p in params for t in (p, *optimizer.state[p].values())]

    found = stepped()
    if compared:
        with mock.patch.object(adafactor, "has_kernels", lambda p: False):
            wanted = stepped(wide=True)
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            most = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0  # what a step nearly undid is rough
            of_weight = torch.finfo(dtype).eps if i % 4 == 0 else 0.0
            near = torch.allclose(a, b, rtol=max(1e-4, of_weight), atol=max(1e-5, of_weight) * most, equal_nan=True)
            assert near, f"result {i} of {options}"
    return [dtype, rows, columns, count, options, max_norm, size]


# ---- the run


def matrix(device: str) -> Tensor:
    """With a gradient."""
    p = nn.Parameter(torch.ones(1, 1, device=device))
    p.grad = torch.ones_like(p)
    return p


def subjects(device: str) -> dict[str, tuple[str, Callable[[random.Random, str, bool], list[Any]]]]:
    """By name: a kernel without which a case does not count, or "" for any, and what makes and runs a case."""

    def bound(function: Callable[..., list[Any]], name: str) -> Callable[[random.Random, str, bool], list[Any]]:
        return lambda *rest: function(name, *rest)

    def in_crowds(rng: random.Random, device: str, compared: bool) -> list[Any]:
        return of_op("relative_attention", rng, device, compared, of_attention_in_crowds)

    return {
        **{name: ("", bound(of_op, name)) for name in kernel_backed(device)},
        **{f"quantize_{kind}": (f"dequantize_{kind}", bound(of_quantize, kind)) for kind in ("nf4", "int8")},
        "resize": ("resize", of_resize), "rotary_": ("rotary", of_rotary_in_place), "gated_over": ("gated_backward", of_gated_over),
        "norm_twice": ("norm_backward", of_norm_twice), "adamw": ("adamw", of_adamw),
        **({"adafactor": ("adafactor_step", of_adafactor)} if adafactor.has_kernels(matrix(device)) else {}),
        **({"relative_attention_in_crowds": ("relative_attention", in_crowds), "gated_linear": ("gated_backward", of_gated_linear)}
           if "relative_attention" in kernel_backed(device) else {}),
    }  # fmt: skip


def fuzz(
    count: int, device: str, seed: int, first: int, only: Sequence[str], share: float, verbose: bool, seconds: float
) -> tuple[Counter[str], int, tuple[float, str]]:
    """Runs until `count` cases were seen by a kernel, or for so long; how many of each there were, how many were wrong, and the
    seconds of the slowest with its name."""
    known = subjects(device)
    names = [name for name in known if not only or name in only]
    done, wrong, number, began, slowest = Counter[str](), 0, first, time.monotonic(), (0.0, "none")
    with kernels_called() as seen:
        while sum(done.values()) < count and wrong < WRONG and time.monotonic() - began < seconds:
            name, here, at = names[number % len(names)], number, time.monotonic()
            this = f"--seed {seed} --first {here}: {name}"
            kernel, make = known[name]
            rng = random.Random(f"{seed} {number}")
            number += 1
            torch.manual_seed(rng.getrandbits(63))
            seen.clear()
            if verbose:
                print(this, file=sys.stderr, flush=True)
            try:
                said = make(rng, device, rng.random() < share)
                if device == "cuda":
                    torch.cuda.synchronize()  # so that what a kernel did wrong is said of its case
            except Unfit:
                continue
            except Exception:
                wrong += 1
                print(f"WRONG: {this}\n{traceback.format_exc()}", flush=True)
                continue
            finally:
                slowest = max(slowest, (time.monotonic() - at, this))
            if any(not kernel or kernel == called for called, _ in seen):
                done[name] += 1
                if verbose:
                    print(said, file=sys.stderr, flush=True)
                if sum(done.values()) % 1000 == 0:
                    print(f"{sum(done.values())} cases in {time.monotonic() - began:.0f} s, the last --first {here}", flush=True)
            seen.clear()
    return done, wrong, slowest


def main() -> int:
    global SIZES, WIDTHS, LENGTHS, MOST
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long, with what was done by then")
    parser.add_argument("--only", default="")
    parser.add_argument("--compare", type=float, default=0.1)
    parser.add_argument("--large", action="store_true", help="an axis of more than 32767 or 65535 in most cases")
    parser.add_argument("--most", type=int, default=MOST, help="elements of a tensor, without --large; at least 513")
    parser.add_argument("--verbose", action="store_true", help="say each case before it runs: for a process that is killed in one")
    o = parser.parse_args()
    assert _kernels.available(o.device), f"no kernels for {o.device}"
    faulthandler.register(signal.SIGTERM, chain=True)
    MOST, WIDTHS = o.most, tuple(width for width in WIDTHS if width <= o.most)
    if o.large:
        SIZES = WIDTHS = LENGTHS = LARGE
        MOST = 5 * max(LARGE)
    began = time.monotonic()
    done, wrong, slowest = fuzz(
        o.cases, o.device, o.seed, o.first, [n for n in o.only.split(",") if n], o.compare, o.verbose, o.seconds
    )
    each_one = ", ".join(f"{name} {n}" for name, n in sorted(done.items()))
    level = _kernels._C.cpu_level if o.device == "cpu" else torch.cuda.get_device_name()
    print(f"{sum(done.values())} cases on {level} in {time.monotonic() - began:.0f} s, {wrong or 'none'} wrong: {each_one}")
    print(f"the slowest took {slowest[0]:.1f} s, {slowest[1]}")
    return int(wrong > 0 or not done)  # a run that saw no kernel proves nothing


if __name__ == "__main__":
    sys.exit(main())
