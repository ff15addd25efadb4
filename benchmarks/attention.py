"""Times attention with a learned bias for each distance beside what else can do it, and beside torch's flash without a bias.

    python benchmarks/attention.py [--out DIR] [--only T5-large,CPM-Ant] [--rounds 9] [--dtype bf16]
    python benchmarks/attention.py --tiny           # the same on any machine, at sizes that say nothing

Forward and backward apart, the contenders in turn, another order every round; a median and half the spread. What takes a whole
mask is given it ready made, and its gradient is the mask's: to make one of the bias, or the bias' gradient of its, is not timed.
Errors are norms, relative to float64 of the same inputs on some of the heads; `bits`: whether two runs have the same. DIR gets
table.md and rows.jsonl. A contender that fails says so in its row.
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ops as benchmark  # benchmarks/ops.py: the clock and the ceilings
import torch
import torch.nn.functional as F
from page import machine, stamp, today
from torch import Tensor

from modelcenter.ops import OPS, _kernels
from modelcenter.ops.relative_attention import relative_attention, spread

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    dim: int
    biased: bool = True
    causal: bool = False
    prompt: int = 0  # positions that are a segment of their own, and seen by all
    reach: int = 0  # a distance from which on the bias is one number, either way

    def __str__(self) -> str:
        kind = ("causal" if self.causal else "both ways") if self.queries == self.keys else "across"
        kind += ("" if self.biased else ", no bias") + (f", prompt of {self.prompt}" if self.prompt else "")
        return f"{self.name} {self.batch} x {self.queries} x {self.heads} x {self.dim} {kind}"

    @property
    def numbers(self) -> int:
        """Of a head's bias."""
        return self.queries + self.keys - 1 + 2 * (self.prompt > 0)

    def rest(self, like: Tensor) -> tuple[Any, ...]:
        """The op's arguments after the bias."""
        context = torch.full((like.shape[0], 1), self.prompt, dtype=torch.int32, device=like.device) if self.prompt else None
        return None, None, None, context, self.queries, self.keys, self.prompt, self.reach, self.dim**-0.5, self.causal, None, 0.0

    @property
    def flops(self) -> float:
        """Of the forward's two products; the backward has five of the same size."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.dim / (1 + self.causal)


def shapes(tiny: bool) -> list[Shape]:
    if tiny:
        return [Shape("tiny", 2, 33, 33, 2, 16), Shape("tiny", 2, 33, 33, 2, 16, causal=True),
                Shape("tiny", 2, 16, 40, 2, 16, biased=False), Shape("tiny", 2, 33, 33, 2, 16, causal=True, prompt=8)]  # fmt: skip
    t5 = [
        Shape("T5-large", batch, s, s, 16, 64, biased, causal)
        for batch, s in ((32, 512), (8, 2048)) for biased, causal in ((True, False), (True, True), (False, False))
    ]  # fmt: skip
    cpm = [Shape("CPM-Ant", 8, 1024, 1024, 32, 80), *(Shape("CPM-Ant", 8, 1056, 1056, 32, 80, True, c, 32) for c in (False, True))]
    return [*t5, *cpm, *(Shape("wide", 8, 1024, 1024, 16, dim) for dim in (96, 128))]


# --- the contenders: of q, k, v (b s h d) and a bias in the form that each takes


class Absent(Exception):
    """What cannot do this."""


def scale(shape: Shape) -> float:
    return shape.dim**-0.5


def ours(shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = relative_attention(q, k, v, bias, *shape.rest(q))
    return out


def sdpa(backend: str) -> Callable[..., Tensor]:
    """torch's, by one backend."""

    def attend(shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if backend == "FLASH_ATTENTION":
            mask = None  # it takes none: what attention costs without
        heads = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(getattr(SDPBackend, backend)):
            causal = shape.causal and mask is None
            a, b, c = heads
            return F.scaled_dot_product_attention(a, b, c, mask, is_causal=causal, scale=scale(shape)).transpose(1, 2)

    return attend


@cache
def compiled_flex(shape: Shape) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = None
    if shape.causal:
        blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, shape.queries, shape.keys, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Any:
        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score if bias is None else score + bias[h, j - i + shape.queries - 1]

        return flex_attention(q, k, v, score_mod=add, block_mask=blocks, scale=scale(shape))

    return torch.compile(attend, dynamic=False)


def flex(shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    if shape.prompt:
        raise Absent("not written for segments")
    out: Tensor = compiled_flex(shape)(*(x.transpose(1, 2) for x in (q, k, v)), bias).transpose(1, 2)
    return out


def eager(shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    score = q @ k.mT * scale(shape)
    if mask is not None:
        score = score + mask
    return (score.float().softmax(-1).to(q.dtype) @ v).transpose(1, 2)


CONTENDERS: dict[str, tuple[Callable[..., Tensor], bool]] = {  # and whether it takes a mask
    "ours": (ours, False), "efficient": (sdpa("EFFICIENT_ATTENTION"), True), "cudnn": (sdpa("CUDNN_ATTENTION"), True),
    "flex": (flex, False), "eager": (eager, True), "flash, no bias": (sdpa("FLASH_ATTENTION"), True),
}  # fmt: skip


# --- their inputs and what is said of them


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor | None]:
    """q, k, v and the vector of each head, random leaves."""
    sizes = [(shape.batch, n, shape.heads, shape.dim) for n in (shape.queries, shape.keys, shape.keys)]
    qkv: list[Tensor | None] = [torch.randn(size, device=device, dtype=dtype).requires_grad_() for size in sizes]
    bias = torch.randn(shape.heads, shape.numbers, device=device).requires_grad_() if shape.biased else None
    return [*qkv, bias]


def hidden(shape: Shape, device: torch.device) -> Tensor:
    blind = torch.ones(shape.queries, shape.keys, dtype=torch.bool, device=device).triu(1 + shape.keys - shape.queries)
    blind[:, : shape.prompt] = False
    return blind


def masked(shape: Shape, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """The bias as a leaf of 1 h s t; with no bias a mask is there only where it hides something."""
    if bias is None:
        return torch.zeros(1, 1, *hidden(shape, like.device).shape, device=like.device, dtype=like.dtype).masked_fill(
            hidden(shape, like.device), float("-inf")) if shape.causal else None  # fmt: skip
    mask = spread(bias.detach(), shape.queries, shape.keys, shape.keys, shape.prompt)[None].to(like.dtype)
    mask = mask.masked_fill(hidden(shape, like.device), float("-inf")) if shape.causal else mask
    return mask.contiguous().requires_grad_()


def diagonals(shape: Shape, grad: Tensor) -> Tensor:
    """The vectors' gradient, of a mask's."""
    at = torch.arange(shape.keys, device=grad.device) - torch.arange(shape.queries, device=grad.device)[:, None]
    at = at + shape.queries - 1
    if shape.prompt:
        own, other = (torch.arange(n, device=grad.device) < shape.prompt for n in (shape.queries, shape.keys))
        at = torch.where(own[:, None] == other, at, shape.numbers - 1 - own[:, None].long())
    sums = grad.new_zeros(shape.heads, shape.numbers, dtype=torch.float64)
    return sums.index_add_(1, at.flatten(), grad[0].double().flatten(1))


def given(name: str, shape: Shape, args: list[Tensor | None]) -> list[Tensor | None]:
    q, bias = args[0], args[3]
    assert q is not None
    return [*args[:3], masked(shape, bias, q) if CONTENDERS[name][1] and name != "flash, no bias" else bias]


def gradients(name: str, shape: Shape, args: list[Tensor | None], direction: Tensor) -> list[Tensor]:
    """The result, then the gradients of q, k, v and of the bias where it has one."""
    out = CONTENDERS[name][0](shape, *args)
    wanted = [a for a in args if a is not None and a.requires_grad]
    found = torch.autograd.grad(out, wanted, direction, allow_unused=True)
    return [out.detach(), *(g for g in found if g is not None)]


def exact(shape: Shape, args: list[Tensor | None], direction: Tensor) -> list[Tensor]:
    wide = [None if a is None else a.detach().double().requires_grad_() for a in args]
    out = OPS["relative_attention"].reference(*wide, *shape.rest(direction))
    return [out.detach(), *torch.autograd.grad(out, [a for a in wide if a is not None], direction.double())]


def judge(name: str, shape: Shape, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Errors, and whether two runs have the same bits, on some of the heads of one entry of the batch."""
    few = Shape(shape.name, 1, shape.queries, shape.keys, min(2, shape.heads), shape.dim, shape.biased, shape.causal, shape.prompt)
    torch.manual_seed(1)
    args = inputs(few, device, dtype)
    direction = torch.randn(1, few.queries, few.heads, few.dim, device=device, dtype=dtype)
    if name == "flash, no bias":
        args[3] = None
    truth = exact(few, args, direction)
    mine = given(name, few, args)
    found, again = (gradients(name, few, mine, direction) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    if few.biased and CONTENDERS[name][1] and len(found) == 5:
        found[4] = diagonals(few, found[4])
    off = [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, truth, strict=True)]
    return {"errors": dict(zip(("out", "dq", "dk", "dv", "dbias"), off, strict=False)), "bits": same}


@dataclass
class Runner:
    name: str
    shape: Shape
    device: str
    args: list[Tensor | None]
    direction: Tensor
    uses: int = 1

    def call(self) -> Tensor:
        return CONTENDERS[self.name][0](self.shape, *self.args)

    def leaves(self) -> list[Tensor]:
        return [a for a in self.args if a is not None and a.requires_grad]

    def forward(self) -> float:
        return benchmark.clock(self.device, lambda: [self.call() for _ in range(self.uses)], 1e-3 * self.uses) / self.uses

    def backward(self) -> float:
        out = self.call()

        def work() -> None:
            torch.autograd.grad(out, self.leaves(), self.direction, retain_graph=False, allow_unused=True)

        return benchmark.clock(self.device, work)

    def extra(self) -> float | None:
        """MiB beyond arguments, gradients and result at the worst moment of a forward and backward."""
        if self.device != "cuda":
            return None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = self.call()
        grads = torch.autograd.grad(out, self.leaves(), self.direction, allow_unused=True)
        torch.cuda.synchronize()
        # a mask and its gradient count as extra: a vector would do
        bias = self.args[3]
        mask = bias.numel() * bias.element_size() if bias is not None and CONTENDERS[self.name][1] else 0
        kept = out.numel() * out.element_size() + sum(g.numel() * g.element_size() for g in grads[:3] if g is not None)
        return (torch.cuda.max_memory_allocated() - before - kept + mask) / 2**20


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def measure(shape: Shape, device: str, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """A row a contender. Those that fail are left out of the rounds."""
    torch.manual_seed(0)
    args = inputs(shape, device, dtype)
    direction = torch.randn(shape.batch, shape.queries, shape.heads, shape.dim, device=device, dtype=dtype)
    rows: dict[str, dict[str, Any]] = {}
    runners: list[Runner] = []
    for name in CONTENDERS:
        row = rows[name] = {"shape": str(shape), "contender": name, "dtype": str(dtype), "flops": shape.flops}
        try:
            if name == "ours" and not (device == "cuda" and _kernels.available("cuda") and takes(shape, args)):
                row["note"] = "by its reference: no kernel here"
            row.update(judge(name, shape, device, dtype))
            runner = Runner(name, shape, device, given(name, shape, args), direction)
            runner.forward(), runner.backward()  # compile, load
            row["extra_mib"] = runner.extra()
            runners.append(runner)
        except Exception as error:
            row["note"] = said(error)
            with contextlib.suppress(Exception):
                benchmark.sync(device)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    for direction_name in ("forward", "backward"):
        times: dict[str, list[float]] = {r.name: [] for r in runners}
        for turn in range(rounds + 1):
            for i in range(len(runners)):
                runner = runners[(i + turn) % len(runners)]
                try:
                    seconds = getattr(runner, direction_name)()
                except Exception as error:
                    rows[runner.name]["note"] = said(error)
                    continue
                if turn:
                    times[runner.name].append(seconds)
        for name, measured in times.items():
            if measured:
                middle = statistics.median(measured)
                rows[name][direction_name] = middle
                rows[name][f"{direction_name}_spread"] = (max(measured) - min(measured)) / middle
                rows[name][f"{direction_name}_times"] = measured
    return list(rows.values())


def takes(shape: Shape, args: list[Tensor | None]) -> bool:
    kernel = OPS["relative_attention"].kernel
    assert kernel is not None and kernel.takes is not None
    assert args[0] is not None
    return kernel.takes(*args, *shape.rest(args[0]))


def cells(row: dict[str, Any]) -> list[str]:
    found = [row["shape"], row["contender"]]
    for direction, products in (("forward", 1.0), ("backward", 2.5)):
        if direction in row:
            rate = products * row["flops"] / row[direction] / 1e12
            found += [f"{row[direction] * 1e3:.3f} ms ±{row[direction + '_spread'] / 2:.0%}", f"{rate:.3g}"]
        else:
            found += ["-", "-"]
    extra = row.get("extra_mib")
    found.append("-" if extra is None else f"{extra:.0f}")
    errors = row.get("errors", {})
    found += [f"{errors[name]:.1e}" if name in errors else "-" for name in ("out", "dq", "dk", "dv", "dbias")]
    return [*found, {True: "same", False: "differ", None: "-"}[row.get("bits")], row.get("note", "")]


def table(rows: list[dict[str, Any]]) -> str:
    rates = ["forward", "TFLOP/s", "backward", "TFLOP/s", "extra MiB"]
    head = ["shape", "contender", *rates, "out", "dq", "dk", "dv", "dbias", "bits", ""]
    lines = [f"| {' | '.join(head)} |", "|---|---" + "|---:" * (len(head) - 4) + "|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells(row))} |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the folder for table.md and rows.jsonl")
    parser.add_argument("--only", default="", help="shapes by name, with commas between them")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tiny", action="store_true", help="sizes for any machine, to try this file itself")
    options = parser.parse_args()
    device, dtype, began = "cuda" if torch.cuda.is_available() else "cpu", DTYPES[options.dtype], time.perf_counter()
    if device == "cpu" and not options.tiny:
        print("no GPU here: --tiny tries this file on a processor", file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore", module="torch")
    only = [name for name in options.only.split(",") if name]
    heading = f"# Attention with a bias for each distance, {today()}, {machine(device)}"
    rate = "" if options.tiny else f"matrix product {benchmark.ceilings(device, dtype)[1] / 1e12:.3g} TFLOP/s, {options.dtype}"
    rows: list[dict[str, Any]] = []
    for shape in shapes(options.tiny):
        if only and shape.name not in only:
            continue
        torch._dynamo.reset()
        compiled_flex.cache_clear()
        rows += measure(shape, device, dtype, options.rounds)
        print(f"{time.perf_counter() - began:6.1f} s  {shape}", file=sys.stderr, flush=True)
        if options.out:  # what is there is kept, whatever comes
            options.out.mkdir(parents=True, exist_ok=True)
            about = {**stamp(device), "ceiling": rate}
            (options.out / "rows.jsonl").write_text("".join(json.dumps({**row, **about}) + "\n" for row in rows))
            (options.out / "table.md").write_text(f"{heading}\n\n{rate}\n\n{table(rows)}\n")
    print(f"{heading}\n\n{rate}\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
