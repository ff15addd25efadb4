"""How long a step of a run takes as `modelcenter train` does it, with its data, its clipping and its optimizer.

    python benchmarks/loop.py pretrain-t5 data.path=corpus.txt data.eval_fraction=0 [key=value ...] [--steps 150] [--traced 10]
    torchrun --nproc-per-node 2 benchmarks/loop.py pretrain data.path=corpus.txt machine.replicate=2 ...

RECIPE and keys are those of `modelcenter train`; nothing is evaluated or saved before the end, and the run's folder is thrown away.
The other drivers give a step batches that are there: this one sees what happens between two steps. A clock is read at the
beginning of each; the figure is the median from step 30 on. `--traced`: for how long kernels run in each of the last so many steps,
which tracing makes longer, but not them.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from save import busy
from torch.profiler import ProfilerActivity, profile

from modelcenter.cli.arguments import Arguments
from modelcenter.cli.recipe import run_of
from modelcenter.train.loop import train
from modelcenter.train.session import Session

WARM = 30  # steps until shapes have been seen, graphs recorded and what reads ahead is ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--traced", type=int, default=0, help="of these steps, the last")
    options = parser.parse_intermixed_args()
    began: list[float] = []
    step, first = Session.step, os.environ.get("RANK", "0") == "0"
    cuda = torch.cuda.is_available()
    tracer = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])

    def timed(self: Session, *rest: Any) -> Any:
        if first and options.traced and len(began) == options.steps - options.traced:
            tracer.start()
        began.append(time.perf_counter())
        done = step(self, *rest)
        if first and options.traced and len(began) == options.steps:
            if cuda:
                torch.cuda.synchronize()
            tracer.stop()
        return done

    Session.step = timed  # type: ignore[method-assign]  # the clock
    job = os.getppid() if "RANK" in os.environ else os.getpid()  # torchrun's, the same for all ranks
    folder = f"{tempfile.gettempdir()}/modelcenter-loop-{job}"
    usual = [f"max_steps={options.steps}", f"logging_steps={options.steps}", "eval_steps=null", "save_steps=null",
             f"output_dir={folder}"]  # fmt: skip
    run = train(*run_of(Arguments([options.recipe], [*usual, *options.settings])))
    if not first:
        return
    shutil.rmtree(folder)
    kept = began[min(WARM, options.steps // 2) : options.steps - options.traced]
    each = [1e3 * (b - a) for a, b in pairwise(kept)]
    low, median, high = statistics.quantiles(each, n=4)
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{device}: {median:.2f} ms a step (a half within {low:.2f} and {high:.2f}), {len(each)} of {run.step} steps")
    if options.traced:
        print(f"kernels run for {busy(tracer)[0] / 1e3 / options.traced:.2f} ms of each of the last {options.traced} steps")


if __name__ == "__main__":
    main()
