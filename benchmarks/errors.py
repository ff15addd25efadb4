"""How far each op is from the truth, beside its peers: values and gradients against the reference in double precision.

    python benchmarks/errors.py [--device cuda] [--only layer_norm,gelu] [--dtype fp32,fp16,bf16] [--part 0/4] [--out DIR]

Every op that has a kernel for the device, on what benchmarks/ops.py times on a CPU, or on the largest of the op's own cases; the
peers of benchmarks/ops.py, as far as they are installed, on the same numbers of the same dtype. An error is the root of the mean
square over that of the truth; a loss is one number, of which chance alone would say who comes nearer, and is drawn several times.
A cell is our error over the least of the eager peers', and of all of them with torch.compile; of the result or gradient for which
it is most; where both are below a quarter of a rounding of the result's dtype, 1.
"""

import argparse
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ops import DTYPES, Absent, Bench, benches, results
from page import leave, stamp
from torch import Tensor

from modelcenter.ops import OPS, Op, _kernels
from modelcenter.ops.relative_attention import spread

HALVES = ("forward", "backward")
DRAWS = {"cuda": 48, "cpu": 6}  # of what has one number as its result
ALIKE = 1.02  # errors that are so near count as one: another order of a sum


def with_a_mask(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    """Torch's attention, whose bias is a mask of the queries' dtype."""
    seen, _, _, context, _, longest_k, prompt, reach, scale, causal, seed, _ = rest
    if any(given is not None for given in (seen, context, seed)) or prompt or reach:
        raise Absent("no such mask")
    mask = spread(bias, q.shape[1], k.shape[1], longest_k).to(q.dtype)
    if causal:
        mask = mask.masked_fill(torch.ones(mask.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None], scale=scale).transpose(1, 2)


def lines(device: str, dtype: torch.dtype) -> Iterator[Bench]:
    """A line an op and a size; an op that benchmarks/ops.py has none of has its own largest case."""
    here = {name for name, op in OPS.items() if op.kernel is not None and device in op.kernel.devices}
    seen = set()
    for bench in benches(device, dtype, real=False):
        if bench.op in here:
            seen.add(bench.op)
            yield bench
    for name in sorted(here - seen):
        cases = [args for args in OPS[name].cases(device, dtype) if taken(OPS[name], args)]
        if cases:
            args = max(cases, key=lambda args: sum(a.numel() for a in args if isinstance(a, Tensor)))
            peers = {}
            if name == "relative_attention":  # what torch has takes no dropout of ours
                q, k, v = (torch.randn(2, 512, 8, 64, device=device, dtype=dtype) for _ in range(3))
                args = (q, k, v, torch.randn(8, 1023, device=device), *[None] * 4, 512, 512, 0, 0, 0.125, False, None, 0.0)
                peers = {"torch": with_a_mask}
            said = " x ".join(map(str, next(a for a in args if isinstance(a, Tensor)).shape))
            wanting = tuple(a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
            yield Bench(name, said, lambda args=wanting: args, peers=peers)


def taken(op: Op, args: Sequence[Any]) -> bool:
    return op.kernel is not None and (op.kernel.takes is None or bool(op.kernel.takes(*args)))


def learning(args: Sequence[Any], dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """The arguments anew, in `dtype` if one is given; who wanted a gradient wants one again."""
    return tuple(
        a.detach().to(dtype or a.dtype, copy=True).requires_grad_(a.requires_grad)
        if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    )  # fmt: skip


def run(function: Callable[..., Any], args: Sequence[Any], like: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and gradients for a random direction; `like`: rounded as for these results."""
    outs = results(function(*args))
    generator = torch.Generator().manual_seed(7)
    directions = []
    for i, out in enumerate(outs):
        drawn = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        drawn = drawn if out.dim() else torch.ones_like(drawn)  # a loss's
        directions.append(drawn.to((like[i] if like else out).dtype).to(out))
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return [o.detach() for o in outs], list(torch.autograd.grad(outs, wanted, directions))


def error(found: Tensor, truth: Tensor) -> float:
    size = truth.double().square().mean().sqrt()
    return float((found.double() - truth).square().mean().sqrt() / size) if size else float(found.double().abs().max())


def drawn(
    bench: Bench, functions: dict[str, Callable[..., Any]], said: Callable[[str, Exception], None]
) -> tuple[dict[str, list[list[float]]], list[list[Tensor]]]:
    """The errors by contender on arguments of one draw, values' and gradients'; and what is ours."""
    op, args = OPS[bench.op], bench.args()
    ours = run(op, learning(args))
    exact = run(op.reference, learning(args, torch.float64), ours[0])
    found = {"ours": ours}
    for name, function in list(functions.items()):
        try:
            theirs = run(function, learning(args), ours[0])
        except Exception as failed:
            said(name, failed)
            del functions[name]  # it would fail again
            continue
        if [t.shape for t in (*theirs[0], *theirs[1])] == [t.shape for t in (*ours[0], *ours[1])]:
            found[name] = theirs
    return {
        name: [[error(a, t) for a, t in zip(half, truth, strict=True)] for half, truth in zip(both, exact, strict=True)]
        for name, both in found.items()
    }, list(ours)


def row(bench: Bench, dtype: torch.dtype, notes: list[str]) -> dict[str, Any] | None:
    """The errors of one line by contender: forward, and backward of each gradient."""
    op = OPS[bench.op]
    if not taken(op, bench.args()):
        return None

    def said(name: str, failed: Exception) -> None:
        if not isinstance(failed, Absent):
            notes.append(f"{bench.op} {bench.size} {dtype}: {name}: {type(failed).__name__}: {' '.join(str(failed).split())[:120]}")

    functions: dict[str, Callable[..., Any]] = {"reference": op.reference}
    if bench.reference is not None:
        functions["whole"] = bench.reference
    functions["compile"] = torch.compile(op.reference, dynamic=False)
    functions |= {name: peer for name, peer in bench.peers.items() if "p=0.1" not in bench.size}
    first, ours = drawn(bench, functions, said)
    single = all(out.dim() == 0 for out in ours[0])
    draws = [first, *(drawn(bench, functions, said)[0] for _ in range(DRAWS[ours[0][0].device.type] - 1 if single else 0))]
    every = {
        name: [[math.sqrt(statistics.fmean(e * e for e in each)) for each in zip(*halves, strict=True)]
               for halves in zip(*(draw[name] for draw in draws), strict=True)]
        for name in first if all(name in draw for draw in draws)
    }  # fmt: skip
    eps = [[torch.finfo(t.dtype).eps / 4 for t in half] for half in ours]
    def worst(half: int, without: Sequence[str]) -> tuple[float, float, float, str]:
        """The ratio, our error, the least of the peers', and whose; of the result for which the ratio is most."""
        rivals = [name for name in every if name not in ("ours", *without)]
        said = []
        for i, mine in enumerate(every["ours"][half]):
            best, whose = min((every[name][half][i], name) for name in rivals)
            least = eps[half][i]
            said.append((max(mine, least) / max(best, least), mine, best, whose))
        return max(said)

    halves = {name: [worst(half, ("compile",)), worst(half, ())] for half, name in enumerate(("forward", "backward"))}
    return {"op": bench.op, "size": bench.size, **halves, "errors": every}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--dtype", default="fp32,fp16,bf16")
    parser.add_argument("--part", default="0/1", help="every Nth line from the Kth on, K/N: for several processes")
    parser.add_argument("--out", type=Path, help="the folder for errors.md and errors.jsonl")
    options = parser.parse_args()
    only, (part, parts) = [name for name in options.only.split(",") if name], map(int, options.part.split("/"))
    warnings.filterwarnings("ignore", module="torch")
    assert _kernels.available(options.device), f"no kernels for {options.device}"
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    number = 0
    for kind in options.dtype.split(","):
        torch.manual_seed(0)
        for bench in lines(options.device, DTYPES[kind]):
            number += 1
            if (only and bench.op not in only) or number % parts != part:
                continue
            try:
                made = row(bench, DTYPES[kind], notes)
            except Exception as failed:
                notes.append(f"{bench.op} {bench.size} {kind}: {type(failed).__name__}: {' '.join(str(failed).split())[:200]}")
                continue
            finally:
                torch._dynamo.reset()
            if made is not None:
                rows.append({"dtype": kind, **made, **stamp(options.device)})
                both = [f"{r:.3f} ({mine:.1e}, {whose} {best:.1e})" for half in HALVES for r, mine, best, whose in made[half]]
                print(f"{made['op']} {made['size']} {kind}: {', '.join(both)}", file=sys.stderr, flush=True)
    text = ["| op | size | dtype | forward, of eager's | of all | backward, of eager's | of all |", "|---|---|---|" + "---:|" * 4]
    for r in rows:
        text.append(f"| {r['op']} | {r['size']} | {r['dtype']} | {' | '.join(f'{c[0]:.2f}' for half in HALVES for c in r[half])} |")
    above = [sum(max(r[half][i][0] for half in HALVES) > ALIKE for r in rows) for i in range(2)]
    text += ["", f"{len(rows)} lines, {above[0]} with an error above eager's best, {above[1]} above the best of all"]
    text += [f"* {note}" for note in notes]
    leave("Errors", options.device, text, rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
