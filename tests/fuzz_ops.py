"""Random cases of every op with a kernel, under sanitizers or not: `make fuzz`.

    python tests/fuzz_ops.py --cases 100000 [--device cuda] [--seed 0] [--only NAME,NAME] [--compare 0.1]

A case is one of the op's own with its sizes, dtypes, layouts and values changed. Forward and backward run on it; of a share of
them (--compare) the values and gradients are held to the reference in double precision. On CUDA, under compute-sanitizer, the
Python allocator is switched off so that every tensor has its own bounds:

    export PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/fuzz_ops.py --device cuda --cases 10000 --compare 0
    compute-sanitizer --tool racecheck python tests/fuzz_ops.py --device cuda --cases 10000 --compare 0
"""

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from contract import DTYPES, LAYOUTS, OPS, each, error, floating, kernel_backed, run, shown
from torch import Tensor

from modelcenter.ops import _op, quantize

SIZES = (0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 130, 255, 257, 300)
MOST = 20_000  # elements of a tensor


class Unfit(Exception):
    """What the reference refuses too: no case."""


def resized(rng: random.Random, args: Sequence[Any]) -> list[Any]:
    """Every size that occurs becomes another one, the same wherever it occurs; values anew, whole numbers within what they were."""
    sizes: dict[int, int] = {1: 1}
    for a in args:
        for n in a.shape if isinstance(a, Tensor) else ():
            sizes.setdefault(n, rng.choice(SIZES))
    out: list[Any] = []
    for a in args:
        if not isinstance(a, Tensor):
            out.append(a)
            continue
        shape = [sizes[n] for n in a.shape]
        if math.prod(shape) > MOST:
            raise Unfit
        if a.is_floating_point():
            out.append(torch.randn(shape, device=a.device).to(a.dtype) * rng.choice((1, 1, 1, 1e-3, 30)))
        elif a.numel() == 1 and a.dtype == torch.int64:
            out.append(torch.full_like(a, rng.getrandbits(63)) if a.dim() == 1 else a.clone())
        else:
            low, high = (int(a.min()), int(a.max())) if a.numel() else (0, 0)
            out.append(torch.randint(low, high + 1, shape, device=a.device).to(a.dtype))
    return out


def attention(rng: random.Random, device: str, dtype: torch.dtype) -> list[Any]:
    b, s, t, kv, d = (rng.choice((1, 1, 2)), rng.choice(SIZES[:17]), rng.choice(SIZES), rng.choice((1, 2)), rng.choice(SIZES[1:17]))
    h = kv * rng.choice((1, 2, 3))
    seed = torch.full((1,), rng.getrandbits(63), device=device) if rng.random() < 0.4 else None
    lengths: list[Tensor | None] = [None, None]
    longest_s, longest_t = s, t
    if rng.random() < 0.3:
        parts = [(rng.randrange(0, 40), rng.randrange(0, 70)) for _ in range(rng.randrange(1, 5))]
        b, s, t = 1, sum(p[0] for p in parts), sum(p[1] for p in parts)
        longest_s, longest_t = max(p[0] for p in parts), max(p[1] for p in parts)
        ends = [[0], [0]]
        for part in parts:
            for k in (0, 1):
                ends[k].append(ends[k][-1] + part[k])
        lengths = [torch.tensor(e, dtype=rng.choice((torch.int32, torch.int64))) for e in ends]
        lengths[1] = lengths[1].to(lengths[0].dtype)  # type: ignore[union-attr]
    mask = None
    if rng.random() < 0.5:
        shape = (rng.choice((1, b)), rng.choice((1, h)), rng.choice((1, longest_s)), longest_t)
        mask = torch.rand(shape, device=device) < 0.7 if rng.random() < 0.5 else torch.randn(shape, device=device).to(dtype)
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in ((b, s, h, d), (b, t, kv, d), (b, t, kv, d)))
    p = rng.choice((0.1, 0.5, 1.0)) if seed is not None else 0.0
    return [q, k, v, mask, *lengths, 1 / math.sqrt(d), rng.random() < 0.5, seed, p]


def quantized(kind: str) -> Any:
    def draw(rng: random.Random, device: str, dtype: torch.dtype) -> list[Any]:
        rows, cols = rng.choice(SIZES[1:]), rng.choice(SIZES[1:])
        codes, scales = getattr(quantize, f"quantize_{kind}")(torch.randn(rows, cols, device=device))
        x = torch.randn(*(rng.choice(SIZES[:9]) for _ in range(rng.choice((1, 2)))), cols, device=device).to(dtype)
        return [x, codes, scales, torch.randn(rows, device=device).to(dtype) if rng.random() < 0.5 else None]

    return draw


DRAW = {"attention": attention, "linear_nf4": quantized("nf4"), "linear_int8": quantized("int8")}


def case(rng: random.Random, name: str, device: str, own: dict[torch.dtype, list[tuple[Any, ...]]]) -> tuple[Any, ...]:
    dtype = rng.choice(DTYPES)
    args = DRAW[name](rng, device, dtype) if name in DRAW else resized(rng, rng.choice(own[dtype]))
    if rng.random() < 0.2:  # a mixture, as autocast makes it
        at = rng.randrange(len(args))
        if isinstance(args[at], Tensor) and args[at].is_floating_point():
            args[at] = args[at].to(rng.choice(DTYPES))
    args = [LAYOUTS[rng.choice(list(LAYOUTS))](a) if isinstance(a, Tensor) and rng.random() < 0.4 else a for a in args]
    wanted = [rng.random() < 0.8 for _ in args]
    return tuple(
        a.requires_grad_(w) if isinstance(a, Tensor) and a.is_floating_point() else a for a, w in zip(args, wanted, strict=True)
    )


def compare(name: str, args: tuple[Any, ...], found: list[Tensor]) -> None:
    exact = run(OPS[name].reference, each(args, lambda a: a.detach().double().requires_grad_(a.requires_grad)
                                          if a.is_floating_point() else a))  # fmt: skip
    peer = run(OPS[name].reference, each(args, lambda a: a.detach().clone().requires_grad_(a.requires_grad)))
    for i, (ours, theirs, truth) in enumerate(zip(found, peer, exact, strict=True)):
        assert ours.shape == truth.shape, f"result {i} has the shape {ours.shape} and not {truth.shape}"
        most = float(truth.abs().max()) if truth.numel() else 0.0
        if not math.isfinite(most) or not theirs.isfinite().all():
            continue  # out of the dtype's range, there as here
        rough = max((torch.finfo(a.dtype).eps for a in floating(args)), default=1e-7)
        bound = 4 * error(theirs, truth) + 32 * rough * max(most, 1)
        if name.endswith("_norm") and args[0].shape[-1:].numel() <= 2:
            bound *= 1000  # up to 1 / sqrt(eps) times a difference that cancels
        assert error(ours, truth) <= bound, f"result {i}: {error(ours, truth):.1e} beside {error(theirs, truth):.1e} of {most:.1e}"


def fuzz(count: int, device: str, seed: int, only: Sequence[str], share: float) -> Counter[str]:
    names = [name for name in kernel_backed(device) if not only or name in only]
    torch.manual_seed(seed)
    own = {name: {dtype: list(OPS[name].cases(device, dtype)) for dtype in DTYPES} for name in names}
    rng, done, began = random.Random(seed), Counter[str](), time.monotonic()
    while sum(done.values()) < count:
        name = names[sum(done.values()) % len(names)]
        try:
            args = case(rng, name, device, own[name])
            kernel = OPS[name].kernel
            if kernel is None or (kernel.takes is not None and not kernel.takes(*args)):
                continue
        except Unfit:
            continue
        try:
            found = run(OPS[name], args)
        except (ValueError, RuntimeError, IndexError) as refusal:
            try:  # a case for nobody, if the reference does not want it either
                run(OPS[name].reference, each(args, lambda a: a.detach().clone().requires_grad_(a.requires_grad)))
            except (ValueError, RuntimeError, IndexError):
                continue
            raise AssertionError(f"{name} {shown(args)}") from refusal
        if rng.random() < share:
            try:
                compare(name, args, found)
            except AssertionError as wrong:
                raise AssertionError(f"{name} {shown(args)}: {wrong}") from wrong
        done[name] += 1
        if sum(done.values()) % 10_000 == 0:
            print(f"{sum(done.values())} cases in {time.monotonic() - began:.0f} s", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--compare", type=float, default=0.1)
    options = parser.parse_args()
    assert _op.available(options.device), f"no kernels for {options.device}"
    done = fuzz(options.cases, options.device, options.seed, [n for n in options.only.split(",") if n], options.compare)
    print(f"{sum(done.values())} cases, none wrong: " + ", ".join(f"{name} {n}" for name, n in sorted(done.items())))


if __name__ == "__main__":
    main()
