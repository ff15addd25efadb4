"""Times each op's kernel beside its reference, torch's own fused op, torch.compile(reference) and the peers that are installed.

    python benchmarks/ops.py [--device cuda] [--only layer_norm,gelu] [--dtype bf16] [--quick] [--out DIR] [--limit SECONDS]

Forward and backward apart, on random data, the contenders in turn, in another order each time (who comes next pays for what one has
left unwritten in the caches: up to 5 % of a pass on an H200), each turn over inputs larger than the caches; a median and its spread
over the rounds. A time is held against the fewest bytes that the op must move, over the copy rate (or its floating-point operations
over the matrix rate) measured in the same run. DIR gets table.md, rows.jsonl and picture.png. Whatever fails or is absent is a note
under the table and not the end.
"""

import argparse
import gc
import importlib
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from page import machine, stamp, today
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modelcenter import ops
from modelcenter.ops import OPS, _kernels

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CACHE = {"cuda": 256 << 20, "cpu": 128 << 20}  # the sets of inputs exceed this together
TURN = {"cuda": 0.01, "cpu": 0.05}  # seconds that a contender computes before the next one has its turn
LINE = {"cuda": 4.0, "cpu": 12.0}  # seconds after which a line has had enough rounds, if there were three
CONTENDERS = ("ours", "reference", "torch", "compile", "kept", "liger", "cudnn", "cce")
EAGER = ("reference", "torch")
Function = Callable[..., Any]


@dataclass(frozen=True)
class Bench:
    """One line: an op at a size. `args` makes fresh random arguments; a floating tensor with requires_grad gets a gradient.

    `bytes`: what the forward and the backward must move. `flops` instead, where arithmetic is the floor. `directions`: ("whole",)
    times forward and backward as one, for losses that form their gradient early; ("step",) is for what has no arguments, and
    `peers` and `ours` then make the function to time. `peers`: by contender's name, a function of the same arguments; `torch` is
    torch's own fused op, and `kept` what keeps more for the backward than the op may. `reference`: in place of the op's. `own`:
    contenders that overwrite their arguments, and so get their own.
    """

    op: str
    size: str
    args: Callable[[], tuple[Any, ...]]
    bytes: tuple[float, float] = (0, 0)
    peers: dict[str, Function] = field(default_factory=dict)
    flops: tuple[float, float] = (0, 0)
    ours: Function | None = None
    reference: Function | None = None
    quick: bool = False
    directions: Sequence[str] = ("forward", "backward")
    own: Sequence[str] = ("liger",)


class Absent(Exception):
    """A contender that is not there."""


# --- the peers: a function of the op's own arguments each ------------------------------------------------------------------------


def peer(module: str, name: str) -> Function:
    """A function of an optional package, imported when it is called first."""

    def call(*args: Any, **options: Any) -> Any:
        package = module.split(".")[0]
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise Absent("not installed" if error.name == package else f"does not import: {error}") from error
        return found(*args, **options)

    return call


def liger(name: str) -> Function:
    return peer("liger_kernel.transformers.functional", f"liger_{name}")


def cudnn(name: str) -> Function:
    return peer("cudnn.ops.norm", name)


def on_cuda(device: str, **peers: Function) -> dict[str, Function]:
    return peers if device == "cuda" else {}


# --- the sizes -------------------------------------------------------------------------------------------------------------------


def tensor(*shape: int, device: str, dtype: torch.dtype, odd: bool = False, grad: bool = True, scale: float = 1.0) -> Tensor:
    """Normal numbers; `odd`: one element past an aligned address."""
    flat = torch.randn(math.prod(shape) + odd, device=device, dtype=dtype) * scale
    return flat[int(odd) :].view(shape).detach().requires_grad_(grad)


def benches(device: str, dtype: torch.dtype, real: bool = True) -> Iterator[Bench]:
    """Every line for a device, at the sizes of GPT-2 (base on CPU, XL and 13B on GPU), BERT, T5 and LLaMA-8B, and odd ones; `real`:
    at a GPU's sizes on a GPU."""
    gpu, each = real and device == "cuda", dtype.itemsize

    def new(*shape: int, **options: Any) -> Tensor:
        return tensor(*shape, device=device, **{"dtype": dtype, **options})

    def passes(rows: int, dim: int, forward: float, backward: float) -> tuple[float, float]:
        return rows * dim * forward * each, rows * dim * backward * each

    def seed() -> Tensor:
        return ops.draw(torch.device(device))

    # norms: read x, write y; read x and dy, write dx
    def norm_sizes(large: list[tuple[str, int, int]], small: list[tuple[str, int, int]]) -> list[tuple[str, int, int, bool]]:
        return [(name, rows, dim, "odd" in name) for name, rows, dim in (large if gpu else small)]

    sizes = norm_sizes(
        [("13B", 32768, 5120), ("GPT-2 XL", 98304, 1600), ("BERT-large", 131072, 1024), ("odd", 32768, 4099)],
        [("GPT-2", 1024, 768), ("odd", 1024, 771)],
    )
    for name, rows, dim, odd in sizes:
        yield Bench(
            "layer_norm", f"{name} {rows} x {dim}",
            lambda rows=rows, dim=dim, odd=odd: (new(rows, dim, odd=odd), new(dim), new(dim), 1e-5),
            passes(rows, dim, 2, 3),
            {"torch": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
             **on_cuda(device, liger=liger("layer_norm"), cudnn=lambda x, w, b, eps: cudnn("layer_norm")(x, w.shape, w, b, eps))},
            quick=name in ("13B", "GPT-2"),
        )  # fmt: skip
    sizes = norm_sizes(
        [("LLaMA-8B", 32768, 4096), ("T5-large", 131072, 1024), ("odd", 32768, 4099)],
        [("T5-small", 1024, 512), ("odd", 1024, 771)],
    )
    for name, rows, dim, odd in sizes:
        yield Bench(
            "rms_norm", f"{name} {rows} x {dim}",
            lambda rows=rows, dim=dim, odd=odd: (new(rows, dim, odd=odd), new(dim), 1e-6),
            passes(rows, dim, 2, 3),
            {"torch": lambda x, w, eps: F.rms_norm(x, w.shape, w, eps),
             **on_cuda(device, liger=lambda x, w, eps: liger("rms_norm")(x, w, eps, in_place=False),
                       cudnn=lambda x, w, eps: cudnn("rms_norm")(x, w, None, eps))},
            quick=name in ("LLaMA-8B", "T5-small"),
        )  # fmt: skip

    # residual + dropout + norm: read x and the residual, write the sum and y; backward reads the sum and both gradients and writes
    # dx, and with dropout the residual's gradient apart
    sizes = norm_sizes([("13B", 16384, 5120), ("odd", 16384, 4099)], [("GPT-2", 1024, 768), ("odd", 1024, 771)])
    for name, rows, dim, odd in sizes:
        for p in (0.0, 0.1) if not odd else (0.1,):

            def args(rows: int = rows, dim: int = dim, odd: bool = odd, p: float = p) -> tuple[Any, ...]:
                x, residual = new(rows, dim, odd=odd), new(rows, dim, odd=odd)
                return x, residual, new(dim), new(dim), 1e-5, seed() if p else None, p

            def plain(x: Tensor, r: Tensor, w: Tensor, b: Tensor, eps: float, seed: Any, p: float) -> tuple[Tensor, Tensor]:
                total = r + (F.dropout(x, p) if p else x)
                return F.layer_norm(total, w.shape, w, b, eps), total

            yield Bench(
                "add_layer_norm", f"{name} {rows} x {dim} p={p}", args, passes(rows, dim, 4, 5 if p else 4), {"torch": plain},
                quick=name in ("13B", "GPT-2") and p == 0.0,
            )  # fmt: skip
    sizes = norm_sizes([("LLaMA-8B", 32768, 4096), ("odd", 16384, 4099)], [("T5-small", 1024, 512), ("odd", 1024, 771)])
    for name, rows, dim, odd in sizes:
        for p in (0.0, 0.1) if not odd else (0.1,):

            def args(rows: int = rows, dim: int = dim, odd: bool = odd, p: float = p) -> tuple[Any, ...]:
                x, residual = new(rows, dim, odd=odd), new(rows, dim, odd=odd)
                return x, residual, new(dim), 1e-6, seed() if p else None, p

            def plain(x: Tensor, r: Tensor, w: Tensor, eps: float, seed: Any, p: float) -> tuple[Tensor, Tensor]:
                total = r + (F.dropout(x, p) if p else x)
                return F.rms_norm(total, w.shape, w, eps), total

            fused = {"liger": lambda x, r, w, eps, seed, p: liger("fused_add_rms_norm")(x, r, w, eps, in_place=False)}
            yield Bench(
                "add_rms_norm", f"{name} {rows} x {dim} p={p}", args, passes(rows, dim, 4, 5 if p else 4),
                {"torch": plain, **(on_cuda(device, **fused) if not p else {})}, quick=not p,
            )  # fmt: skip

    # activations
    rows, dim = (16384, 20480) if gpu else (1024, 3072)
    tanh = partial(F.gelu, approximate="tanh")
    plain: dict[str, Function] = {"gelu": F.gelu, "gelu_tanh": tanh, "relu": F.relu, "silu": F.silu}
    alone = (("gelu", 1, 0), ("gelu", 0, 0), ("gelu_tanh", 1, 0), ("gelu_tanh", 1, 3), ("relu", 0, 0), ("relu", 1, 0),
             ("silu", 0, 0), ("silu", 1, 0))  # fmt: skip
    for name, biased, odd in alone:

        def args(biased: int = biased, odd: int = odd) -> tuple[Any, ...]:
            return new(rows, dim + odd, odd=bool(odd)), new(dim + odd) if biased else None

        def fused(x: Tensor, bias: Tensor | None, act: Function = plain[name]) -> Any:
            return act(x if bias is None else x + bias)

        size = f"{'odd ' if odd else ''}{'+ bias ' if biased else ''}{rows} x {dim + odd}"
        yield Bench(name, size, args, passes(rows, dim + odd, 2, 3), {"torch": fused}, quick=(name, biased) == ("gelu", 1))
    rows, dim = (16384, 14336) if gpu else (1024, 1024)
    pairs = (("swiglu", "silu", "swiglu", 0), ("swiglu", "silu", "swiglu", 3), ("geglu_tanh", "gelu_tanh", "geglu", 0),
             ("geglu", "gelu", "", 0), ("reglu", "relu", "", 0))  # fmt: skip
    for name, act, theirs, odd in pairs:

        def args(odd: int = odd) -> tuple[Any, ...]:
            return new(rows, dim + odd, odd=bool(odd)), new(rows, dim + odd, odd=bool(odd))

        def fused(gate: Tensor, up: Tensor, act: Function = plain[act]) -> Any:
            return act(gate) * up

        yield Bench(
            name, f"{'odd ' if odd else ''}{rows} x {dim + odd}", args, passes(rows, dim + odd, 3, 5),
            {"torch": fused, **(on_cuda(device, liger=liger(theirs)) if theirs else {})}, quick=name == "swiglu" and not odd,
        )  # fmt: skip

    # dropout: x and the residual in, the sum out; backward reads and writes a gradient
    rows, dim = (32768, 5120) if gpu else (1024, 768)
    for odd, beside in ((0, True), (3, False)):

        def args(odd: int = odd, beside: bool = beside) -> tuple[Any, ...]:
            x = new(rows, dim + odd, odd=bool(odd))
            return x, new(rows, dim + odd) if beside else None, seed(), 0.1

        def fused(x: Tensor, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
            return F.dropout(x, p) if residual is None else residual + F.dropout(x, p)

        size = f"{'odd ' if odd else ''}{'+ residual ' if beside else ''}{rows} x {dim + odd} p=0.1"
        yield Bench("dropout", size, args, passes(rows, dim + odd, 3 if beside else 2, 2), {"torch": fused}, quick=beside)

    # rotary: in place at best
    large = [("LLaMA-8B", 4, 32, 8192, 128, False), ("GPT-J", 8, 16, 8192, 64, True),
             ("OpenLLaMA-3B, odd", 8, 32, 4096, 100, False)]  # fmt: skip
    small = [("LLaMA", 2, 12, 512, 64, False), ("odd", 2, 12, 512, 50, False)]
    for name, b, h, s, d, interleaved in large if gpu else small:

        def args(b: int = b, h: int = h, s: int = s, d: int = d, interleaved: bool = interleaved) -> tuple[Any, ...]:
            angle = torch.rand(1, s, 1, d // 2, device=device) * 6
            return new(b, s, h, d), angle.cos(), angle.sin(), interleaved

        yield Bench(
            "rotary", f"{name} {b} x {s} x {h} x {d}", args, passes(b * h * s, d, 2, 2), quick=name.startswith("LLaMA"),
        )  # fmt: skip

    # embedding: the rows looked up are read and written; backward reads their gradients and writes the table's
    large = [("LLaMA-8B", 128256, 4096, 32768), ("BERT", 30522, 1024, 131072), ("odd", 50257, 1603, 65536)]
    for name, vocab, dim, count in large if gpu else [("GPT-2", 50257, 768, 1024), ("odd", 50257, 771, 1024)]:

        def args(vocab: int = vocab, dim: int = dim, count: int = count, odd: bool = name == "odd") -> tuple[Any, ...]:
            return words(count, vocab, device), new(vocab, dim, odd=odd), None

        yield Bench(
            "embedding", f"{name} {count} of {vocab} x {dim}", args, (2 * count * dim * each, (count + vocab) * dim * each),
            {"torch": lambda ids, table, pad: F.embedding(ids, table)}, quick=name in ("LLaMA-8B", "GPT-2"),
        )  # fmt: skip

    # losses: a logit is read once and its gradient written once
    for name, rows, vocab in [("LLaMA-8B", 8192, 131072), ("GPT-2, odd", 8192, 50257)] if gpu else [("GPT-2, odd", 256, 50257)]:

        def args(rows: int = rows, vocab: int = vocab) -> tuple[Any, ...]:
            return new(rows, vocab), words(rows, vocab, device)

        yield Bench(
            "cross_entropy", f"{name} {rows} x {vocab}", args,
            (2 * rows * vocab * each, 0),
            {"torch": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
             **on_cuda(device, liger=lambda x, y: liger("cross_entropy")(x, y, reduction="sum"))},
            quick=vocab == 50257, directions=("whole",),
        )  # fmt: skip
    heads = [("LLaMA-8B", 8192, 4096, 131072), ("GPT-2 XL, odd", 16384, 1600, 50257)] if gpu else [("GPT-2", 256, 768, 50257)]
    for name, rows, dim, vocab in heads:

        def args(rows: int = rows, dim: int = dim, vocab: int = vocab) -> tuple[Any, ...]:
            return new(rows, dim), new(vocab, dim, scale=dim**-0.5), None, words(rows, vocab, device)

        fused = {
            "liger": lambda x, w, b, y: liger("fused_linear_cross_entropy")(x, w, y, reduction="sum"),
            "cce": lambda x, w, b, y: peer("cut_cross_entropy", "linear_cross_entropy")(x, w, y, reduction="sum"),
        }

        def whole_logits(x: Tensor, w: Tensor, b: None, y: Tensor) -> Tensor:
            return F.cross_entropy((x @ w.t()).float(), y, reduction="sum")

        yield Bench(
            "linear_cross_entropy", f"{name} {rows} x {dim} x {vocab}", args, flops=(6 * rows * dim * vocab, 0),
            peers={"torch": lambda x, w, b, y: F.cross_entropy(x @ w.t(), y, reduction="sum"), **on_cuda(device, **fused)},
            reference=whole_logits, quick=name in ("LLaMA-8B", "GPT-2"), directions=("whole",),
        )  # fmt: skip


    # attention: two products forward and five backward, half of each where causal
    if not gpu:
        b, s, h, d = 2, 512, 12, 64
        for name, causal, p in (("BERT", False, 0.0), ("GPT-2", True, 0.0), ("GPT-2", True, 0.1)):

            def args(causal: bool = causal, p: float = p) -> tuple[Any, ...]:
                q, k, v = (new(b, s, h, d) for _ in range(3))
                return q, k, v, None, None, None, d**-0.5, causal, seed() if p else None, p

            def fused(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
                heads, (scale, causal, _, p) = (x.transpose(1, 2) for x in (q, k, v)), rest[3:]
                return F.scaled_dot_product_attention(*heads, dropout_p=p, is_causal=causal, scale=scale).transpose(1, 2)

            product = 2 * b * h * s * s * d / (1 + causal)
            yield Bench(
                "attention", f"{name} {b} x {s} x {h} x {d} p={p}", args, peers={"torch": fused}, flops=(2 * product, 5 * product),
                quick=name == "GPT-2",
            )  # fmt: skip

    # frozen weights in 4 and 8 bits: a product of many tokens is arithmetic, of few it reads the codes
    rows, width = (14336, 4096) if gpu else (3072, 768)
    for name, bits in (("nf4", 4), ("int8", 8)):
        for tokens, odd in ((8192 if gpu else 512, 0), (4, 0), (8192 if gpu else 512, 3), (4, 3)):
            cols = width + odd

            def args(name: str = name, tokens: int = tokens, cols: int = cols, odd: int = odd) -> tuple[Any, ...]:
                codes, scales = getattr(ops, f"quantize_{name}")(torch.randn(rows, cols, device=device))
                return new(tokens, cols, odd=bool(odd)), codes, scales, None

            whole = OPS[f"linear_{name}"].reference

            def again(*args: Any, whole: Function = whole) -> Any:  # as ours: the dequantised weight is not there meanwhile
                return checkpoint(whole, *args, use_reentrant=False)

            product = 2.0 * tokens * rows * cols
            floor: dict[str, Any] = {"flops": (product, product)} if tokens > 64 else {"bytes": (rows * cols * bits / 8, 0)}
            yield Bench(
                f"linear_{name}", f"{'odd ' if odd else ''}{tokens} x {cols} x {rows}", args, quick=tokens > 64 and not odd,
                directions=("forward", "backward") if tokens > 64 else ("forward",), **floor,
                **({"reference": again, "peers": {"kept": torch.compile(whole, dynamic=False)}} if tokens > 64 else {}),
            )  # fmt: skip

    # AdamW: the gradients' norm, clip, update and cast. Half: bf16 parameters and gradients, with an fp32 master or without.
    # Before the update: the gradients of a scaled loss, as fp16's is, are unscaled, and all are clipped
    count = 1_000_000_000 if gpu else 32_000_000
    for half, master, moments, before in (
        (True, True, "fp32", "clip"), (True, True, "fp32", "clip, odd"), (True, True, "bf16", "clip"),
        (True, True, "bf16", "unscale, clip"), (True, True, "int8", "clip"), (True, False, "bf16", "clip"),
        (True, False, "int8", "clip"), (False, False, "fp32", "clip"), (False, False, "fp32", "alone"),
    ):  # fmt: skip
        if not gpu and half != (dtype == torch.bfloat16):
            continue
        each_moment = {"fp32": 4, "bf16": 2, "int8": 1}[moments]
        wide = master or not half
        moved = count * ((8 if wide else 4) + 4 * each_moment + (2 * 2 if half else 2 * 4) + 2 * master)
        name = "fp32" if not half else "bf16 + master" if master else "bf16"
        yield Bench(
            "adamw", f"{count / 1e6:.0f} M, {name}, {moments} moments, {before}", tuple, (moved, 0),
            {"torch": partial(torch_adamw, count, device, half, master, before)},
            ours=partial(our_adamw, count, device, half, master, moments, before),
            directions=("step",), quick=moments != "int8" and (half or not gpu) and "odd" not in before,
        )  # fmt: skip

    # Adafactor: gradients clipped, then read for squares, for the steps' size and for the steps. A GPU alone has kernels
    for half, odd in ((False, False), (True, False), (False, True)) if gpu else ():
        name = f"{count / 1e6:.0f} M, {'bf16' if half else 'fp32'}, clip{', 4095 columns' if odd else ''}"
        of_all = partial(adafactor, shapes_of(count, 4096 - odd), device, half)
        yield Bench("adafactor", name, tuple, (count * (14 if half else 28), 0), {"torch": partial(of_all, theirs=True)},
                    ours=partial(of_all, theirs=False), directions=("step",), quick=False)  # fmt: skip


def shapes_of(count: int, columns: int = 4096) -> list[tuple[int, ...]]:
    """Matrices, a remainder and some vectors: together `count` parameters."""
    vectors = [(4096,)] * 32
    matrices, left = divmod(count - 4096 * 32, 4096 * columns)
    return [*[(4096, columns)] * matrices, (left,), *vectors]


def our_adamw(count: int, device: str, half: bool, master: bool, moments: str, before: str) -> Function:
    from modelcenter.optim.adamw import AdamW

    dtype = torch.bfloat16 if half else torch.float32
    each = {"device": device, "dtype": dtype, "odd": "odd" in before}
    params = [tensor(*shape, **each) for shape in shapes_of(count)]
    for p in params:
        p.grad = tensor(*p.shape, grad=False, **each)
    optimizer = AdamW(params, lr=1e-4, moments=moments, master=master)
    scale = torch.full((), 2.0**-10, device=device) if "unscale" in before else None

    def step() -> None:
        optimizer.step(clip=optimizer.clip(1.0, scale) if "clip" in before else None)

    return step


def torch_adamw(count: int, device: str, half: bool, master: bool, before: str) -> Function:
    """The same in torch's passes: with a master gradients to fp32, unscale, clip, fused update, parameters to bf16. Its moments are
    of the parameters' dtype, fp32 beside a master."""
    dtype = torch.bfloat16 if half and not master else torch.float32
    each = {"device": device, "dtype": dtype, "odd": "odd" in before}
    params = [tensor(*shape, **each) for shape in shapes_of(count)]
    for p in params:
        p.grad = tensor(*p.shape, grad=False, **each)
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    copies = [p.detach().bfloat16() for p in params] if master else []
    grads = [torch.randn_like(copy) for copy in copies]

    def step() -> None:
        if master:
            torch._foreach_copy_([p.grad for p in params], grads)
        if "unscale" in before:
            torch._foreach_mul_([p.grad for p in params], 2.0**-10)
        if "clip" in before:
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        if master:
            torch._foreach_copy_(copies, [p.detach() for p in params])

    return step


def adafactor(shapes: Sequence[tuple[int, ...]], device: str, half: bool, theirs: bool) -> Function:
    from modelcenter.optim.adafactor import LEAST, TINY, Adafactor

    params = [torch.randn(shape, device=device, dtype=torch.bfloat16 if half else None).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    if not theirs:
        ours = Adafactor(params, lr=1e-4)
        return lambda: ours.step(clip=ours.clip(1.0))
    optimizer = torch.optim.Adafactor(params, lr=1e-4, weight_decay=0.0, eps=(TINY, LEAST), foreach=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return step


def words(count: int, vocab: int, device: str) -> Tensor:
    """Ids as text has them: the n-th most frequent one n times rarer than the first (Zipf), spread over the table."""
    rank = (vocab ** torch.rand(count, device=device)).long() - 1
    return (rank * 7919 % vocab).clamp(0, vocab - 1)


# --- the clock -------------------------------------------------------------------------------------------------------------------


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def clock(device: str, work: Callable[[], Any], ahead: float = 1e-3) -> float:
    """Seconds that `work` takes on the device, whose launches take `ahead` seconds at most."""
    if device != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * ahead))  # the launches queue up meanwhile: they are not what is measured
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def leaves(args: Sequence[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


def results(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor) and o.requires_grad]


@dataclass
class Contender:
    name: str
    function: Function
    sets: list[tuple[Any, ...]]
    refill: bool = False
    uses: int = 1  # sets a turn
    begun: int = 0

    def turn(self) -> list[tuple[Any, ...]]:
        """The next sets of arguments, in a circle."""
        taken = [self.sets[(self.begun + i) % len(self.sets)] for i in range(self.uses)]
        self.begun += self.uses
        return taken

    def forward(self, device: str) -> float:
        taken = self.turn()

        def work() -> None:
            for args in taken:
                self.function(*args)

        return clock(device, work, 1e-3 * len(taken)) / len(taken)

    def backward(self, device: str) -> float:
        taken = self.turn()
        outs = [results(self.function(*args)) for args in taken]
        grads = [[torch.randn_like(o) if o.dim() else torch.ones_like(o) for o in out] for out in outs]

        def work() -> None:
            while outs:
                torch.autograd.grad(outs.pop(), leaves(taken[len(outs)]), grads.pop(), allow_unused=True)

        return clock(device, work, 1e-3 * len(taken)) / len(taken)

    def whole(self, device: str) -> float:
        taken = self.turn()

        def work() -> None:
            for args in taken:
                out = results(self.function(*args))
                torch.autograd.grad(out, leaves(args), [torch.ones_like(o) for o in out], allow_unused=True)

        return clock(device, work, 1e-3 * len(taken)) / len(taken)

    step = forward

    def fresh(self) -> None:
        """Random numbers again where a contender writes over its arguments."""
        if self.refill:
            with torch.no_grad():
                for args in self.sets:
                    for leaf in leaves(args):
                        leaf.normal_()


def extra(contender: Contender) -> float:
    """MiB beyond arguments, gradients and result at the worst moment of a forward and backward (CUDA)."""
    args = contender.sets[0]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = results(contender.function(*args))
    grads = torch.autograd.grad(out, leaves(args), [torch.ones_like(o) for o in out], allow_unused=True)
    kept = sum(g.numel() * g.element_size() for g in grads if g is not None)
    return (torch.cuda.max_memory_allocated() - before - kept) / 2**20


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second of a copy (read and written) and floating-point operations a second of a matrix product."""
    n = (1 << 30) // dtype.itemsize if device == "cuda" else (128 << 20) // dtype.itemsize
    source, target = torch.randn(n, device=device).to(dtype), torch.empty(n, device=device, dtype=dtype)
    k = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(k, k, device=device, dtype=dtype) for _ in range(2))

    def best(work: Callable[[], Any]) -> float:
        work()
        return statistics.median(clock(device, lambda: [work() for _ in range(4)]) / 4 for _ in range(5))

    return 2 * n * dtype.itemsize / best(lambda: target.copy_(source)), 2 * k**3 / best(lambda: a @ b)


# --- one line --------------------------------------------------------------------------------------------------------------------


def contenders(bench: Bench, device: str, notes: list[str]) -> list[Contender]:
    """All that run, with their arguments: the same sets, but for those that write over theirs."""
    op, first = OPS.get(bench.op), bench.args()
    functions: dict[str, Function] = {}
    if bench.ours is not None:
        functions["ours"] = bench.ours
    elif op is not None and op.kernel is not None and _kernels.available(device):
        fits = op.kernel.takes is None or op.kernel.takes(*first)
        functions["ours"] = op if fits and device in op.kernel.devices else op.straight
        if functions["ours"] is not op:
            notes.append(f"{bench.op} {bench.size}: the kernel is not selected here")
    else:
        notes.append(f"{bench.op}: no kernel for {device}")
        return []
    if "step" not in bench.directions:
        reference = bench.reference or (op.reference if op is not None else None)
        if reference is not None:
            functions |= {"reference": reference, "compile": torch.compile(reference, dynamic=False)}
    functions.update(bench.peers)
    size = sum(a.numel() * a.element_size() for a in first if isinstance(a, Tensor))
    number = max(1, min(64, CACHE[device] // size if size < CACHE[device] else 2 if size < 4 << 30 else 1)) if size else 1
    shared = [first, *(bench.args() for _ in range(number - 1))]
    found = []
    for name in CONTENDERS:
        if name in functions:
            sets = [bench.args() for _ in range(number)] if name in bench.own else shared
            try:
                if "step" in bench.directions:
                    functions[name] = functions[name]()
                contender = Contender(name, functions[name], sets, refill=name in bench.own)
                for args in sets[:2]:  # compile, load, tune
                    made = functions[name](*args)
                    if bench.directions[-1] in ("backward", "whole"):
                        out = results(made)
                        torch.autograd.grad(out, leaves(args), [torch.ones_like(o) for o in out], allow_unused=True)
                        del out
                    del made
                sync(device)
                found.append(contender)
            except Absent as error:
                notes.append(f"{name}: {error}")
            except Exception as error:
                notes.append(f"{bench.op} {bench.size}, {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                if name == "ours":
                    return []
    return found


def apart(found: list[Contender], bench: Bench) -> dict[str, float]:
    """Each contender's distance from the reference, |theirs - its| / |its|, on the first result."""
    it = next((c for c in found if c.name == "reference"), None)
    if it is None or "p=0.1" in bench.size:
        return {}
    seen = {}
    for c in found:
        if c is not it:
            c.fresh()
            args = c.sets[0]
            wanted = results(it.function(*args))[0].detach().float()
            copies = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
            mine = results(c.function(*copies))[0].detach().float()
            seen[c.name] = float((mine - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return seen


def measure(bench: Bench, device: str, rounds: int, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of one line: a direction and a contender each."""
    found = contenders(bench, device, notes)
    different = apart(found, bench)
    for name, distance in different.items():
        if not distance < 0.05:
            notes.append(f"{bench.op} {bench.size}: {name} differs from the reference by {distance:.2g}")
    order = random.Random(0)
    for direction in bench.directions:
        times: dict[str, list[float]] = {c.name: [] for c in found}
        began = time.perf_counter()
        for turn in range(rounds + 1):
            if turn > 3 and time.perf_counter() - began > LINE[device]:
                break
            for contender in order.sample(found, len(found)):
                contender.fresh()
                seconds = getattr(contender, direction)(device)
                if turn:
                    times[contender.name].append(seconds)
                else:  # warms up
                    contender.uses = max(1, min(len(contender.sets), int(TURN[device] / seconds)))
            gc.collect()
        for contender in found:
            measured = times[contender.name]
            middle = statistics.median(measured)
            yield {
                "op": bench.op, "size": bench.size, "direction": direction, "contender": contender.name, "seconds": middle,
                "spread": (max(measured) - min(measured)) / middle, "times": measured, "sets": len(contender.sets),
                "bytes": bench.bytes[direction == "backward"], "flops": bench.flops[direction == "backward"],
                "distance": different.get(contender.name),
                **({"extra_mib": extra(contender)} if direction == "whole" and device == "cuda" else {}),
            }  # fmt: skip


# --- what is said ----------------------------------------------------------------------------------------------------------------


def span(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def lines_of(rows: list[dict[str, Any]], copy: float, product: float) -> Iterator[dict[str, Any]]:
    """The rows of a table: an op, a size and a direction each, with its contenders side by side."""
    for key in dict.fromkeys((r["dtype"], r["op"], r["size"], r["direction"]) for r in rows):
        here = {r["contender"]: r for r in rows if (r["dtype"], r["op"], r["size"], r["direction"]) == key}
        ours = here.get("ours")
        rivals = [r["seconds"] for name, r in here.items() if name in (*EAGER, "compile")]
        line: dict[str, Any] = {"dtype": key[0], "op": key[1], "size": key[2], "direction": key[3], "all": here, "ours": ours}
        if ours is not None:
            rate = (ours["flops"] or ours["bytes"]) / ours["seconds"]
            unit = "FLOP/s" if ours["flops"] else "B/s"
            line["rate"] = f"{rate / 1e12:.3g} T{unit}" if rate > 1e12 else f"{rate / 1e9:.3g} G{unit}"
            line["share"] = rate / (product if ours["flops"] else copy)
            line["ratio"] = min(rivals) / ours["seconds"] if rivals else None
        yield line


def markdown(lines: list[dict[str, Any]], heading: str, notes: list[str]) -> str:
    shown = [name for name in CONTENDERS if any(name in line["all"] for line in lines)]
    out = [heading, "", f"| dtype | op | size | | {' | '.join(shown)} | rate | of the limit | ratio |"]
    out.append("|---|---|---|---" + "|---:" * (len(shown) + 3) + "|")
    for line in lines:
        cells = []
        for name in shown:
            row = line["all"].get(name)
            spread = f" ±{row['spread'] / 2:.0%}" if row is not None and name == "ours" else ""
            cells.append("-" if row is None else span(row["seconds"]) + spread)
        ratio = line.get("ratio")
        tail = [line.get("rate", "-"), f"{line['share']:.0%}" if "share" in line else "-", f"{ratio:.2f}" if ratio else "-"]
        extras = {name: row["extra_mib"] for name, row in line["all"].items() if "extra_mib" in row}
        if extras:
            notes.append(f"{line['op']} {line['size']}, extra memory: " + ", ".join(f"{n} {m:.0f} MiB" for n, m in extras.items()))
        out.append(f"| {line['dtype']} | {line['op']} | {line['size']} | {line['direction']} | {' | '.join((*cells, *tail))} |")
    out += [
        "", "ratio: the better of reference, torch and compile over ours. of the limit: the bytes that must be moved over the copy "
        "rate, or the floating-point operations over the matrix rate.", "", *(f"* {note}" for note in dict.fromkeys(notes)), "",
    ]  # fmt: skip
    return "\n".join(out)


def picture(lines: list[dict[str, Any]], heading: str, file: Path) -> str | None:
    """A bar a line: how many times faster than the better of eager and compile."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [line for line in lines if line.get("ratio")]
    figure, axes = plt.subplots(1, 2, figsize=(15, 1.5 + 0.26 * len(lines)), sharey=True)
    names = [f"{line['op']} {line['size']} {line['direction']} {line['dtype']}" for line in lines]
    for axis, key, title in ((axes[0], "ratio", "times the better of eager and compile"), (axes[1], "share", "of the limit")):
        values = [line[key] for line in lines]
        axis.barh(names, values, color=["#2a7" if key == "share" or v >= 1 else "#c43" for v in values])
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set_title(title)
    axes[0].invert_yaxis()
    figure.suptitle(heading.lstrip("# "))
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--dtype", default="", help="fp32, fp16, bf16, with commas (default: bf16 on GPU, fp32,bf16 on CPU)")
    parser.add_argument("--out", type=Path, help="the folder for table.md, rows.jsonl, picture.png")
    parser.add_argument("--quick", action="store_true", help="one size an op, fewer rounds")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further line is begun")
    options = parser.parse_args()
    device, began, rounds = options.device, time.perf_counter(), 5 if options.quick else 9
    only = [name for name in options.only.split(",") if name]
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(0)

    rows: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    rates = []
    for dtype in (options.dtype or ("bf16" if device == "cuda" else "fp32,bf16")).split(","):
        copy, product = ceilings(device, DTYPES[dtype])
        rates.append(f"{dtype}: copy {copy / 1e9:.0f} GB/s, matrix product {product / 1e12:.3g} TFLOP/s")
        mine: list[dict[str, Any]] = []
        for bench in benches(device, DTYPES[dtype]):
            if (only and bench.op not in only) or (options.quick and not bench.quick):
                continue
            if bench.op not in OPS and bench.ours is None:
                notes.append(f"{bench.op}: not there")
                continue
            if time.perf_counter() - began > options.limit:
                notes.append(f"{bench.op} {bench.size} {dtype}: left out, the time was up")
                continue
            try:
                mine += ({"dtype": dtype, **row} for row in measure(bench, device, rounds, notes))
            except Exception as error:
                notes.append(f"{bench.op} {bench.size} {dtype}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            gc.collect()
            torch._dynamo.reset()  # or the references of one function count as its recompilations
            if device == "cuda":
                torch.cuda.empty_cache()
            print(f"{time.perf_counter() - began:6.1f} s  {dtype} {bench.op} {bench.size}", file=sys.stderr, flush=True)
        lines += lines_of(mine, copy, product)
        rows += mine

    heading = f"# Ops, {today()}, {machine(device)}"
    text = markdown(lines, f"{heading}\n\n`python benchmarks/ops.py {' '.join(sys.argv[1:])}`\n\n{'; '.join(rates)}", notes)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {**stamp(device), "rates": rates}
        (options.out / "rows.jsonl").write_text("".join(json.dumps({**row, **about}) + "\n" for row in rows))
        said = picture(lines, heading, options.out / "picture.png") if lines else None
        (options.out / "table.md").write_text(text + (f"* {said}\n" if said else ""))
    print(text)
    slow = [line for line in lines if (line.get("ratio") or 1) < 1]
    for line in slow:
        print(f"slower: {line['dtype']} {line['op']} {line['size']} {line['direction']}: {line['ratio']:.2f}")
    print(f"{len(lines)} lines, {len(slow)} slower than eager or compile, {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
