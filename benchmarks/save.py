"""What a state written in the background costs a run: how long training stands still, and how fast it goes on meanwhile.

    torchrun --nproc-per-node 4 benchmarks/save.py [--preset gpt2-13b] [--layers 20] [--batch 8] [--limit 20] --out DIR

Steps alone, then a state begun (`machine.async_save`), then steps while it is written: for `--limit` seconds, after which what is
not written is left. What is held on the host is pinned by a first copy, as the first state of a run does. Two of the later steps
are traced: OUT/trace.json is for chrome://tracing or Perfetto, and the table says which share of their time the GPU computes and
what the processes hand to the disk meanwhile (psutil).
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from plan import noisy
from torch.profiler import ProfilerActivity, profile
from train import batch_of

import modelcenter as mc
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.train.background import Background
from modelcenter.train.state import Position, save
from modelcenter.train.step import accumulate, autocast, update


def busy(found: Any) -> tuple[float, float]:
    """Of a trace the microseconds in which a kernel runs, and those from the first to the last."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if "CUDA" in str(e.device_type))
    total = end = 0.0
    for a, b in spans:
        total, end = total + max(0.0, b - max(a, end)), max(end, b)
    return total, end - spans[0][0] if spans else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="gpt2-13b")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--dim", type=int, help="another width: 64 is for a try on a CPU")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of writing")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    cuda, size = options.device == "cuda", int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    wide = {"dim": options.dim, "hidden": 4 * options.dim, "heads": 2, "vocab": 512} if options.dim else {}
    plain = mc.build(options.preset, task="lm", config={"layers": options.layers, **wide}, device="meta")
    machine = mc.Machine(device=options.device, fsdp=size)
    ranks, model = join(machine), noisy(plain, machine, "bf16", device)
    optimizer: Any = build_optimizer(model, OptimizerConfig())
    batch = batch_of("lm", options.batch, options.length, int(model.config.vocab), str(device))
    compute = partial(autocast, "bf16", device)

    def step() -> float:
        began = time.perf_counter()
        loss, _ = accumulate(model, [batch], "lm", compute, targets=batch["labels"].numel() * size, ranks=ranks)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-5, 1.0, 1.0, squares)
        return time.perf_counter() - began

    for _ in range(3):
        step()
    alone = [step() for _ in range(6)]
    background, folder = Background(ranks), Path(tempfile.mkdtemp(prefix="save-"))
    folder = Path(ranks.tell(str(folder)))
    began = time.perf_counter()

    def pin(place: Path, number: int, tensors: Any, *rest: Any) -> None:
        for group, table in tensors.items():
            for name, entry in table.items():
                background.copy(f"{group}/{name}", entry)

    save(folder, Position(), model, optimizer, None, ranks=ranks, write=pin)
    first = time.perf_counter() - began
    held = sum(t.nbytes for t in background.copies.values())
    step()
    save(folder, Position(step=1), model, optimizer, None, ranks=ranks, write=background.write)
    stall, began = background.stall, time.perf_counter()
    assert background.pending is not None
    beside, me = [step() for _ in range(4)], psutil.Process()
    handed, then = me.io_counters().write_chars, time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        step()
        step()
        if cuda:
            torch.cuda.synchronize()
        rate = (me.io_counters().write_chars - handed) / (time.perf_counter() - then)
    traced, rate = not background.pending.done(), ranks.sum(rate)[0]
    while ranks.sum(float(time.perf_counter() - began < options.limit and not background.pending.done()))[0] == ranks.shares:
        beside.append(step())
    written = background.pending.done()
    if ranks.first:
        options.out.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(options.out / "trace.json"))
        computes, span = busy(found)
        said = {"ranks": size, "gb": held / 1e9, "first": first, "stall": stall, "alone": statistics.median(alone),
                "beside": statistics.median(beside), "steps": len(beside), "written": written, "took": background.took,
                "traced while writing": traced, "busy": computes / max(span, 1), "handed to the disk, B/s": rate}  # fmt: skip
        (options.out / "save.json").write_text(json.dumps(said))
        end = f"written in {background.took:.1f} s" if written else f"not yet written after {time.perf_counter() - began:.0f} s"
        print("| ranks | GB a rank | first copy, pinning | stall | GB/s a rank | step alone | step beside | the GPU computes | |")
        print("|---:|---:|---:|---:|---:|---:|---:|---:|---|")
        share = f"{said['busy']:.0%} of the traced{f', {rate / 1e9:.2f} GB/s to the disk' if traced else ', when all was written'}"
        print(f"| {size} | {held / 1e9:.1f} | {first:.2f} s | {stall:.3f} s | {held / 1e9 / stall:.0f} | {said['alone']:.3f} s | "
              f"{said['beside']:.3f} s ({len(beside)}) | {share} | {end} |", flush=True)  # fmt: skip
    if written:
        background.settled(True)
    ranks.sum(1.0)
    if ranks.first:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # what is still being written is not waited for


if __name__ == "__main__":
    main()
