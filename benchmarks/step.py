"""A whole training step on one GPU at published sizes: ours beside transformers', each alone on the card.

    python benchmarks/step.py [--cases bert-large,gpt2-xl,t5-large,llama-3b,llama-8b,cpm-ant-2b,gpt2,gpt2-medium,bert-base]
                              [--contenders ours,...] [--batch 0] [--steps 6] [--layers N] [--limit SECONDS] [--out DIR]

A step is forward, backward, clip and update on random ids, without dropout but in the last three, which are small. Contenders:
`ours` is what `precision=bf16` of modelcenter.train does (fp32 weights and moments), `ours bf16` has weights and moments in bf16,
`eager` is without CUDA graphs; theirs are transformers with torch's fused AdamW, `amp` autocast over fp32 weights, `bf16` weights
and moments in bf16, each with its torch.compile, `reduce` that of mode="reduce-overhead", which makes CUDA graphs, and with
liger-kernel's patches where it has them. Each case names the batch of each; `--batch` sets one for all.

FLOPs are the model's: 6 for a weight of a matrix and token, and 12 x layers x width x length a token for attention, half of it
where that is causal; the share is of a product of 8192^3 in bf16, measured before each case. Energy and clock are what the card's
driver tells of the timed steps: at the limit of its power a step takes its energy over that limit.
"""

import argparse
import ctypes
import gc
import math
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from page import leave, stamp
from torch import nn
from train import Step, batch_of, our_step, their_step

import modelcenter as mc
from modelcenter.layers import Block
from modelcenter.train.step import autocast

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its sizes; `batches`: of each contender, those at which it is at its best or that compare."""

    preset: str
    task: str
    auto: str  # transformers' class
    length: int
    batches: dict[str, tuple[int, ...]]
    config: dict[str, Any] = field(default_factory=dict)


WARM = 4.0  # seconds, beside the first steps, after which compilers are done and the card is as hot as it gets
STILL = {"dropout": 0.0, "attn_dropout": 0.0, "embed_dropout": 0.0}
SMALL = ("ours", "ours eager", "hf amp", "hf amp compile", "hf amp reduce")
CASES = {
    "bert-large": Case(
        "bert-large-uncased", "mlm", "AutoModelForMaskedLM", 512,
        {"ours": (64, 256), "ours bf16": (256,), "hf amp": (64,), "hf bf16": (256,), "hf bf16 compile": (128,)},
        {"dropout": 0.0, "attn_dropout": 0.0},
    ),
    "gpt2-xl": Case(
        "gpt2-xl", "lm", "AutoModelForCausalLM", 1024,
        {"ours": (16, 32), "ours bf16": (16,), "hf amp compile": (16,), "hf bf16 compile": (16,)}, STILL,
    ),
    "t5-large": Case(
        "t5-large", "seq2seq", "AutoModelForSeq2SeqLM", 512,
        {"ours": (32, 128)} | dict.fromkeys(("ours eager", "ours bf16", "hf amp compile", "hf bf16 compile"), (32,)),
        {"dropout": 0.0},
    ),
    "llama-3b": Case(
        "llama-3.2-3b", "lm", "AutoModelForCausalLM", 4096,
        {"ours": (2,), "ours bf16": (8, 12), "hf bf16 compile": (4,), "hf bf16 liger": (8,)},
    ),
    "llama-8b": Case(
        "llama-3.1-8b", "lm", "AutoModelForCausalLM", 4096,
        {"ours bf16": (2, 4, 6), "hf bf16 compile": (2,), "hf bf16 liger": (4,)},
    ),
    # Transformers' class lets all tokens see all, those that they are to predict too. Ours hides what follows, as the model's own
    # training does: half of the scores, 3 % of a step's FLOPs. Both have a prompt of 32 positions beside the text.
    "cpm-ant-2b": Case(
        "cpm-ant-10b", "lm", "AutoModelForCausalLM", 1024,
        {"ours": (8, 16), "ours bf16": (8, 16), "hf amp": (8,), "hf bf16": (8, 16)},
        {"dim": 2560, "head_dim": 80, "hidden": 6400, "layers": 24},
    ),
    # Small ones, as they are fine-tuned: with their dropout, and few tokens a step.
    "gpt2": Case("gpt2", "lm", "AutoModelForCausalLM", 1024, dict.fromkeys(SMALL, (4,))),
    "gpt2-medium": Case("gpt2-medium", "lm", "AutoModelForCausalLM", 1024, dict.fromkeys(SMALL, (4,))),
    "bert-base": Case("bert-base-uncased", "mlm", "AutoModelForMaskedLM", 128, dict.fromkeys(SMALL, (32,))),
}  # fmt: skip


def build(case: Case, dtype: torch.dtype, layers: int | None, device: Any = "meta") -> Any:
    """Our model with random weights; `layers` cuts it for a trial."""
    fields = ("layers", "decoder_layers") if case.task == "seq2seq" else ("layers",)
    config = dict(case.config) | (dict.fromkeys(fields, layers) if layers else {})
    return mc.build(case.preset, task=case.task, dtype=dtype, config=config, device=device)


def ours(case: Case, batch: Batch, device: torch.device, kind: str, layers: int | None) -> tuple[nn.Module, Step]:
    low, graphed = "bf16" in kind.split(), "eager" not in kind.split()
    model = build(case, torch.bfloat16 if low else torch.float32, layers, device)
    moments = "bf16" if low else "fp32"
    return model, our_step(model, batch, case.task, "fp32" if low else "bf16", device, moments=moments, graphed=graphed)


def theirs(case: Case, batch: Batch, device: torch.device, kind: str, layers: int | None) -> tuple[nn.Module, Step]:
    import transformers

    config = transformers.AutoConfig.for_model(**build_config(case, layers))
    config.use_cache = False
    words = kind.split()
    if "liger" in words:
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(config.model_type)
    dtype = torch.float32 if "amp" in words else torch.bfloat16
    with device:
        model = getattr(transformers, case.auto).from_config(config, dtype=dtype)
    if "compile" in words:
        model.compile()
    if "reduce" in words:
        model.compile(mode="reduce-overhead")
    batch = {key: value.to(device) for key, value in batch.items()}
    return model, their_step(model, batch, partial(autocast, "bf16" if "amp" in words else "fp32", device))


def build_config(case: Case, layers: int | None) -> dict[str, Any]:
    """Transformers' configuration of the same model."""
    found: dict[str, Any] = build(case, torch.float32, layers).config.to_dict()
    return found


def flops(model: Any, case: Case, batch: Batch) -> float:
    """Of a step of the model on this batch: of the last block of masked words, but for keys and values, of labelled ones."""
    sizes, tokens = model.config, batch["input_ids"].numel()
    matrices = sum(p.numel() for m in model.modules() if isinstance(m, Block) for p in m.parameters() if p.dim() == 2)
    labelled = int((batch["labels"] != -100).sum()) / tokens if case.task == "mlm" else 1.0
    last = [m for m in model.modules() if isinstance(m, Block)][-1]
    behind = sum(p.numel() for part in (last.attn.q, last.attn.o, last.ffn) for p in part.parameters() if p.dim() == 2)
    matrices -= (1 - labelled) * behind
    width = sizes.heads * (getattr(sizes, "head_dim", None) or sizes.dim // sizes.heads)
    # of an encoder, of a decoder on itself and on the other
    seen = 2.5 if case.task == "seq2seq" else 0.5 if case.task == "lm" else 1.0
    attention = 12 * (sizes.layers - (1 - labelled)) * width * batch["input_ids"].size(1) * seen
    return tokens * (6 * (matrices + labelled * sizes.vocab * sizes.dim) + attention)


def ceiling(device: torch.device) -> float:
    """FLOP/s of a large product in bf16 on random numbers."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(8):
        times.append(seconds(lambda: [a @ b for _ in range(10)], device) / 10)
    return 2 * 8192**3 / statistics.median(times)


def seconds(f: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    f()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def run(name: str, kind: str, size: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One contender at one batch: tokens a second, seconds, memory."""
    case = CASES[name]
    torch.manual_seed(0)
    plain = build(case, torch.float32, options.layers)
    length = options.length or case.length
    batch = batch_of(case.task, size, length, plain.config.vocab, "cpu")
    model, step = (ours if kind.startswith("ours") else theirs)(case, batch, device, kind, options.layers)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, began = [step() for _ in range(3)], time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - began < WARM:
        step()
    meter, times, clocks = Meter(device), list[float](), list[float]()
    step()
    before, mark = meter.joules(), time.perf_counter()
    for _ in range(options.steps):  # each from the end of the one before, as in training: nothing but its loss is waited for
        step()
        mark, before_it = time.perf_counter(), mark
        times.append(mark - before_it)
        clocks.append(meter.clock())
    joules = (meter.joules() - before) / options.steps
    work, taken = flops(plain, case, batch), statistics.median(times)
    tokens = batch["input_ids"].numel() * (2 if case.task == "seq2seq" else 1)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    if options.profile:
        print(f"\n{name} {kind} B{size}\n{profile(step)}", file=sys.stderr, flush=True)
    return {"case": name, "contender": kind, "batch": size, "length": length, "seconds": times, "tokens": tokens / taken,
            "samples": size / taken, "flops": work / taken, "peak": peak, "loss": losses[0],
            "joules": joules, "clock": statistics.mean(clocks),
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


# Of kernels by words in their names; ours that are called `forward` and `backward` are among the others, by their types.
KINDS = {"attention": "fmha|flash|sdpa|cudnn|of_keys|of_queries", "products": "nvjet|gemm|gemv|cutlass|splitK", "norms": "norm",
         "activations": "gated|gelu|threshold", "optimizer": "update_all|squares", "rotary": "rotate",
         "embeddings": "embedding|gather", "copies": "[Cc]opy|Memcpy|Memset", "additions": "[Aa]dd"}  # fmt: skip


def profile(step: Step, steps: int = 3) -> str:
    """The kernels that a step spends its time in, and where the GPU has none."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch.autograd has it, and does not say so
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda e: e.time_range.start)
    kinds, names, gaps, end = Counter[str](), Counter[str](), list[tuple[float, int]](), found[0].time_range.start
    for i, e in enumerate(found):
        if e.time_range.start > end:
            gaps.append((e.time_range.start - end, i))
        end = max(end, e.time_range.end)
        kinds[next((kind for kind, words in KINDS.items() if re.search(words, e.name)), "others")] += e.time_range.elapsed_us()
        names[short(e.name)] += e.time_range.elapsed_us()
    calls, each = Counter(short(e.name) for e in found), 1e3 * steps
    taken, idle, near = (end - found[0].time_range.start, sum(gap for gap, _ in gaps), sum(gap for gap, _ in gaps if gap < 3))
    by_kind = ", ".join(f"{kind} {us / each:.1f}" for kind, us in kinds.most_common())
    lines = [f"{taken / each:9.2f} ms a step, of which kernels {kinds.total() / each:.2f}: {by_kind}",
             f"{idle / each:9.2f} ms between {len(found) // steps} kernels, {near / each:.2f} by less than 3 us; the longest:"]
    for gap, i in sorted(gaps)[-6:]:
        lines.append(f"{gap / 1e3:9.2f} ms before {short(found[i].name, 56)} after {short(found[i - 1].name, 56)}")
    lines += [f"{us / each:9.2f} ms {calls[name] / steps:5.0f} x {name}" for name, us in names.most_common(40)]
    return "\n".join(lines)


def short(name: str, most: int = 100) -> str:
    """A kernel's name without what all have, and without its arguments' types."""
    for part in ("(anonymous namespace)::", "at::native::", "void "):
        name = name.replace(part, "")
    return re.sub(r"\(.*", "", name)[:most]


class Meter:
    """The energy that the GPU has taken, in joules, and its clock, in MHz, as its driver tells them; NaN where it does not."""

    def __init__(self, device: torch.device) -> None:
        self.library, self.card = None, ctypes.c_void_p()
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            identity = str(torch.cuda.get_device_properties(device).uuid)
            name = identity if identity.startswith("GPU-") else f"GPU-{identity}"
            found = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self.card))
        except (OSError, AttributeError):
            return
        self.library = None if found else library

    def joules(self) -> float:
        taken = ctypes.c_ulonglong()
        known = self.library is not None and not self.library.nvmlDeviceGetTotalEnergyConsumption(self.card, ctypes.byref(taken))
        return taken.value / 1e3 if known else math.nan

    def clock(self) -> float:
        found = ctypes.c_uint()
        known = self.library is not None and not self.library.nvmlDeviceGetClockInfo(self.card, 1, ctypes.byref(found))
        return float(found.value) if known else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--contenders", default="", help="with commas; all of a case")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a trial")
    parser.add_argument("--length", type=int, help="shorter than the case's, for a trial")
    parser.add_argument("--profile", action="store_true", help="the kernels of each, too")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="the folder for step.md and step.jsonl")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device, began = torch.device(options.device), time.monotonic()
    rows = []
    for name in options.cases.split(","):
        top = ceiling(device) if device.type == "cuda" else float("nan")
        for kind, sizes in CASES[name].batches.items():
            if options.contenders and kind not in options.contenders.split(","):
                continue
            for size in (options.batch,) if options.batch else sizes:
                if time.monotonic() - began > options.limit:
                    print(f"{name} {kind} B{size}: no time left", file=sys.stderr)
                    continue
                try:
                    row = run(name, kind, size, options, device) | {"ceiling": top, **stamp(device.type)}
                except Exception as error:
                    print(f"{name} {kind} B{size}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
                    continue
                finally:
                    gc.collect()
                    if device.type == "cuda":
                        torch._dynamo.reset()
                        torch.cuda.empty_cache()
                rows.append(row)
                said = f"{row['tokens']:.0f} tok/s, {row['flops'] / 1e12:.0f} TFLOP/s, {row['peak']:.1f} GiB"
                print(f"{name} {kind} B{size}: {said}", file=sys.stderr, flush=True)
    text = ["| case | contender | batch | tok/s | samples/s | TFLOP/s | of the product's | peak GiB | J a step | MHz |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        spread = (max(row["seconds"]) - min(row["seconds"])) / 2 / statistics.median(row["seconds"])
        rates = f"{row['tokens']:.0f} ±{spread:.0%} | {row['samples']:.1f} | {row['flops'] / 1e12:.0f}"
        share = f"{row['flops'] / row['ceiling']:.0%} | {row['peak']:.1f} | {row['joules']:.0f} | {row['clock']:.0f}"
        text.append(f"| {row['case']} S{row['length']} | {row['contender']} | {row['batch']} | {rates} | {share} |")
    leave("Training steps", device.type, text, rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
