"""Tokens a second of training, ours beside transformers eager: the same weights, batch, threads and run, the steps in turn.

    python benchmarks/train.py [--models gpt2,bert,t5] [--precision fp32,bf16] [--dropout default,0] [--steps 5] [--quick]
                               [--profile] [--device cpu] [--threads N] [--out DIR]

A step is forward, backward, clip and update. Ours is what modelcenter.train does: precision=bf16 is included, and on a CPU that
freed memory is kept. Theirs is transformers with its default attention and torch's fused AdamW; in bf16 the better of autocast and
of bf16 weights. The median of the steps.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from page import leave, stamp

import modelcenter as mc
from modelcenter.data.prefetch import prefetch
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.machine import Machine
from modelcenter.train.graphs import graphs_of
from modelcenter.train.heap import kept
from modelcenter.train.step import accumulate, autocast, ready, soon, update

Step = Callable[[], Any]
SMALL = {"layers": 2, "dim": 128, "heads": 4, "vocab": 2000}
MODELS = {  # preset, task, transformers' class, batch, length, fields of a small one
    "gpt2": ("gpt2", "lm", "GPT2LMHeadModel", 2, 512, SMALL),
    "bert": ("bert-base-uncased", "mlm", "BertForMaskedLM", 2, 512, SMALL | {"hidden": 512}),
    "t5": ("t5-small", "seq2seq", "T5ForConditionalGeneration", 2, 512, SMALL | {"hidden": 512}),
}


def batch_of(task: str, size: int, length: int, vocab: int, device: str) -> dict[str, torch.Tensor]:
    """Random ids; MLM labels 15 % of them."""
    ids = torch.randint(5, vocab, (size, length), device=device)
    if task == "mlm":
        return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape, device=device) < 0.15, ids, -100)}
    labels = torch.randint(5, vocab, (size, length), device=device) if task == "seq2seq" else ids.clone()
    return {"input_ids": ids, "labels": labels}


def our_step(model: Any, batch: dict[str, torch.Tensor], task: str, precision: str, device: torch.device, *,
             moments: Any = "fp32", graphed: bool = True) -> Step:  # fmt: skip
    """`batch` on the host, where a loader leaves it, and made ready by a thread that reads ahead, as in a run; `graphed`: as a CUDA
    graph, where the device has them."""
    model.train()
    optimizer, compute = build_optimizer(model, OptimizerConfig(moments=moments)), partial(autocast, precision, device)
    graphs = graphs_of(model, Machine(cuda_graphs=graphed), device, lambda line: None)
    batches = prefetch(ready(model, batch, task, device, graphs is not None) for _ in count())

    def step() -> float:
        loss, _ = accumulate(model, [next(batches)], task, compute, graphs=graphs)
        known = soon(loss)
        update(model, optimizer, loss, 5e-5, 1.0)
        return known()

    return step


def their_step(model: Any, batch: dict[str, torch.Tensor], compute: Callable[[], Any] = nullcontext) -> Step:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01, fused=True)

    def step() -> float:
        with compute():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def contenders(name: str, precision: str, dropout: str, device: torch.device, small: bool) -> tuple[dict[str, Step], int]:
    """By name a function that makes one step; and the tokens in it."""
    import transformers

    transformers.logging.set_verbosity_error()
    preset, task, theirs, size, length, fields = MODELS[name]
    length = 64 if small else length
    config = dict(fields) if small else {}
    plain = mc.build(preset, task=task, dtype=torch.float32, config=config)
    if dropout != "default":
        rates = [key for key in vars(plain.config) if "dropout" in key]
        config |= dict.fromkeys(rates, float(dropout))
        plain = mc.build(preset, task=task, dtype=torch.float32, config=config)
    batch = batch_of(task, size, length, plain.config.vocab, device.type)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        load = partial(getattr(transformers, theirs).from_pretrained, folder)
        models = {"eager": load(dtype=torch.float32).to(device)}
        if precision == "bf16":
            models = {"autocast": models["eager"], "bf16 weights": load(dtype=torch.bfloat16).to(device)}
    steps = {"ours": our_step(plain.to(device), {key: value.cpu() for key, value in batch.items()}, task, precision, device)}
    for kind, model in models.items():
        compute = partial(autocast, "bf16" if kind == "autocast" else "fp32", device)
        steps[f"transformers {kind}"] = their_step(model, batch, compute)
    return steps, size * length * (2 if task == "seq2seq" else 1)


def measure(steps: dict[str, Step], rounds: int, device: torch.device) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each step, the contenders in turn, and their first losses."""
    first = {name: step() for name, step in steps.items()}  # warms up, too
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            with kept(device) if name == "ours" else nullcontext():
                if name == "ours" and device.type == "cpu":
                    steps[name]()  # what one of our steps frees the next one finds: as in a run, and not after others' steps
                if device.type == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                steps[name]()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - began)
    return times, first


def profile(step: Step) -> str:
    """The operators that a step of ours spends its time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with record(activities=kinds) as profiler:
        step()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=60))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,bert,t5")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--dropout", default="default,0")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="the folder for train.md and train.jsonl")
    parser.add_argument("--quick", action="store_true", help="small models of the same kinds")
    parser.add_argument("--profile", action="store_true", help="the top operators of our step, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch|transformers")
    os.environ.setdefault("TQDM_DISABLE", "1")
    torch.set_flush_denormal(True)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows, profiles = [], []
    for name in options.models.split(","):
        for precision in options.precision.split(","):
            for dropout in options.dropout.split(","):
                torch.manual_seed(0)
                try:
                    steps, tokens = contenders(name, precision, dropout, device, options.quick)
                    times, losses = measure(steps, options.steps, device)
                except Exception as error:
                    print(f"{name} {precision} dropout {dropout}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    continue
                rates = {kind: tokens / statistics.median(taken) for kind, taken in times.items()}
                best = max(rate for kind, rate in rates.items() if kind != "ours")
                spread = (max(times["ours"]) - min(times["ours"])) / statistics.median(times["ours"]) / 2
                rows.append({
                    "model": name, "precision": precision, "dropout": dropout, "tokens": tokens, "rates": rates, "times": times,
                    "losses": losses, "ratio": rates["ours"] / best, "spread": spread, **stamp(device.type),
                })  # fmt: skip
                said = ", ".join(f"{kind} {rate:.0f}" for kind, rate in rates.items())
                print(f"{name} {precision} dropout {dropout}: tok/s {said}: {rows[-1]['ratio']:.2f}x", file=sys.stderr, flush=True)
                if options.profile:
                    profiles.append(f"{name} {precision} dropout {dropout}\n\n{profile(steps['ours'])}")
                del steps
                gc.collect()
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["rates"]))
    text = [f"| model | precision | dropout | {' | '.join(kinds)} | ratio to the best of theirs |"]
    text.append("|---|---|---" + "|---:" * (len(kinds) + 1) + "|")
    for row in rows:
        cells = [f"{row['rates'][kind]:.0f}" if kind in row["rates"] else "-" for kind in kinds]
        cells[0] += f" ±{row['spread']:.0%}"
        text.append(f"| {row['model']} | {row['precision']} | {row['dropout']} | {' | '.join(cells)} | {row['ratio']:.2f} |")
    text += ["", *(f"```\n{table}\n```\n" for table in profiles)] if profiles else []
    leave("Training, tokens a second", device.type, text, rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
