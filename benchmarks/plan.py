"""Predictions against measurements: memory at the peak and seconds of a step, written down before each is measured.

    python benchmarks/plan.py [--quick] [--steps 8] [--out DIR]                    # one device
    torchrun --nproc-per-node 4 benchmarks/plan.py [--steps 8] [--out DIR]         # layouts of so many

All predictions come first, in plan.jsonl with the time they were made; then every point runs what `modelcenter train` runs of a
step: forward, backward, clip, update. No calibration from past runs is used. Memory is the allocator's peak (on a CPU the
profiler's record of allocations), beside what is foreseen without the allowance for fragments; time is the median of the steps
after two.
"""

import argparse
import datetime
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import modelcenter as mc
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.chips import CHIPS, chip_here
from modelcenter.parallel.layout import Costs, Job
from modelcenter.parallel.machine import Machine
from modelcenter.train.step import accumulate, autocast, update

LIMIT = 330  # seconds after which no further point is begun


class Point(NamedTuple):
    """`rows` a micro-batch of `length` tokens, `forwards` of them a step on each rank."""

    name: str
    task: str
    config: dict[str, Any]
    rows: int
    length: int
    forwards: int = 1
    degrees: dict[str, Any] = {}  # of the machine
    precision: str = "bf16"


TINY = {"layers": 6, "dim": 128, "heads": 4, "vocab": 2000}
SMALL = [  # for a CPU, to see that it works
    Point("gpt2", "lm", TINY, 4, 64), Point("gpt2", "lm", TINY, 4, 64, 2, {"recompute": "full"}, "fp32"),
    Point("bert-base-uncased", "mlm", {**TINY, "hidden": 512}, 4, 64, precision="fp32"),
]  # fmt: skip
ONE = [
    Point("gpt2", "lm", {}, 16, 1024), Point("gpt2-xl", "lm", {}, 8, 1024),
    Point("gpt2-xl", "lm", {}, 16, 1024, 1, {"recompute": "full"}),
    Point("gpt2-medium", "lm", {}, 8, 1024, 4), Point("bert-large-uncased", "mlm", {}, 64, 512),
    Point("bert-large-uncased", "mlm", {}, 32, 512, 1, {"recompute": "selective"}), Point("t5-large", "seq2seq", {}, 16, 512),
    Point("llama-3.2-1b", "lm", {}, 4, 2048), Point("llama-3.2-3b", "lm", {}, 2, 4096, 1, {"recompute": "selective"}),
    Point("bloom-560m", "lm", {}, 8, 1024), Point("gpt2-medium", "lm", {}, 8, 1024, precision="fp32"),
]  # fmt: skip
WIDE = {"layers": 10}  # a quarter of 13B, of the same blocks


def several(size: int) -> list[Point]:
    """Layouts of so many ranks."""
    stages = ((3, 1), (3, 2), (2, 2), (1, 2))
    points = [Point("gpt2-13b", "lm", WIDE, 8, 512, m, {"fsdp": size, "zero": zero}) for zero, m in stages]
    points += [Point("gpt2-xl", "lm", {}, 8, 1024, 1, {"replicate": size}),
               Point("gpt2-13b", "lm", WIDE, 16, 512, 1, {"fsdp": size, "recompute": "full"}),
               Point("gpt2-13b", "lm", WIDE, 8, 512, 1, {"tensor_parallel": size})]
    if size == 4:
        points += [Point("gpt2-13b", "lm", WIDE, 8, 512, 1, {"tensor_parallel": 2, "fsdp": 2}),
                   Point("llama-3.2-3b", "lm", {}, 2, 2048, 1, {"replicate": 2, "fsdp": 2})]
    return points


def batch_of(point: Point, rows: int, vocab: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random ids; of masked models 15 % are targets."""
    ids = torch.randint(5, vocab, (rows, point.length), device=device)
    if point.task == "mlm":
        return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape, device=device) < 0.15, ids, -100)}
    return {"input_ids": ids, "labels": ids.clone()}


def adamw(model: Any) -> tuple[Any, None]:
    return build_optimizer(model, OptimizerConfig()), None


def machine_of(point: Point, device: torch.device) -> Machine:
    kind: Any = device.type
    return Machine(device=kind, **point.degrees)


def predict(point: Point, device: torch.device) -> dict[str, Any]:
    """What is foreseen."""
    model = mc.build(point.name, task=point.task, config=point.config, device="meta")
    machine, vocab = machine_of(point, device), int(model.config.vocab)
    tokens = point.length * (2 if point.task == "seq2seq" else 1)
    job = Job(model, lambda rows: batch_of(point, rows, vocab), adamw, partial(autocast, point.precision, device), device,
              point.precision, point.rows * point.forwards * machine.shares, tokens, 0.15 if point.task == "mlm" else 1.0)
    e = Costs(job, chip_here(device) or CHIPS["h200"]).exact(machine, point.rows)
    return {**point._asdict(), "bytes": e.need - e.parts.get("fragments", 0), "seconds": e.seconds, "spent": dict(e.spent),
            "bottleneck": e.bottleneck, "tokens": tokens * point.rows * point.forwards * machine.shares,
            "made": datetime.datetime.now(datetime.UTC).isoformat()}  # fmt: skip


def measure(point: Point, device: torch.device, steps: int) -> tuple[int, float]:
    """Bytes at the peak of this rank, seconds of a step."""
    machine = machine_of(point, device)
    ranks = join(machine)
    model = mc.build(point.name, task=point.task, config=point.config, machine=machine, precision=point.precision).train()
    optimizer: Any = build_optimizer(model, OptimizerConfig())
    vocab: Any = model.config
    batches = [batch_of(point, point.rows, int(vocab.vocab), device.type) for _ in range(point.forwards)]
    compute, times = partial(autocast, point.precision, device), []

    def step() -> None:
        loss, _ = accumulate(model, batches, point.task, compute, targets=point.rows * point.length * machine.shares, ranks=ranks)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-5, 1.0, 1.0, squares)

    for number in range(steps + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        if number == 2 and sum(times) > 60:
            break
    most = torch.cuda.max_memory_allocated() if device.type == "cuda" else recorded(step, model, optimizer, batches)
    return most, statistics.median(times[2:] or times)


def recorded(step: Any, model: Any, optimizer: Any, batches: list[Any]) -> int:
    """The peak of a step on a CPU."""
    kept = [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values()),
            *(t for one in batches for t in one.values())]  # fmt: skip
    storages = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in kept if isinstance(t, torch.Tensor)]
    now = most = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events: Any = found.profiler
    for event in sorted((e for e in events.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table."""
    yield "| model | layout | batch | GB foreseen | measured | error | s foreseen | measured | error | bound by |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---|"
    for row in rows:
        layout = ", ".join(f"{key} {value}" for key, value in row["degrees"].items()) or "-"
        size = f"{row['rows']} x {row['forwards']} x {row['length']} {row['precision']}"
        if "error" in row:
            foreseen = f"{row['bytes'] / 1e9:.3g} | {row['error']} | | {row['seconds']:.3g}"
            yield f"| {row['name']} | {layout} | {size} | {foreseen} | | | |"
            continue
        memory, speed = row["bytes"] / row["real_bytes"] - 1, row["seconds"] / row["real_seconds"] - 1
        yield (f"| {row['name']} | {layout} | {size} | {row['bytes'] / 1e9:.3g} | {row['real_bytes'] / 1e9:.3g} | {memory:+.1%} | "
               f"{row['seconds']:.3g} | {row['real_seconds']:.3g} | {speed:+.1%} | {row['bottleneck']} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny models, whatever the device")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default="", help="points whose model's name holds this")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    began, size = time.perf_counter(), int(os.environ.get("WORLD_SIZE", "1"))
    first = os.environ.get("RANK", "0") == "0"
    small = options.quick or not torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    points = several(size) if size > 1 else ONE
    if small:
        points = [point._replace(degrees={"fsdp": size}) if size > 1 else point for point in SMALL]
    points = [point for point in points if options.only in point.name]
    rows = [predict(point, device) for point in points]
    options.out.mkdir(parents=True, exist_ok=True)
    if first:
        (options.out / "plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} predictions in {options.out / 'plan.jsonl'} after {time.perf_counter() - began:.0f} s", flush=True)
    for point, row in zip(points, rows, strict=True):
        if size == 1 and time.perf_counter() - began > LIMIT:
            row["error"] = "no time left"
            continue
        try:
            row["real_bytes"], row["real_seconds"] = measure(point, device, options.steps)
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if first:
            print(list(lines([row]))[-1], flush=True)
    if first:
        (options.out / "plan.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        text = "\n".join([f"# Foreseen and measured, {size} x {name}, torch {torch.__version__}", "", *lines(rows), ""])
        (options.out / "plan.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
