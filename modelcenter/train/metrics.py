"""What a run reports: metrics.jsonl, TensorBoard events, loss.png and the progress line.

metrics.jsonl holds one JSON object a line. The first row is the run's environment; then a row with `loss` for each
logged step and a row with `eval_loss` for each evaluation. Every value but `TIMINGS` follows from the recipe: a
run that was killed and resumed writes the same rows as one that was not.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO

from ..checkpoint.atomic import atomic_write
from ..errors import refuse_missing

TIMINGS = ("tokens_per_second", "memory_gb")  # what differs between two runs of one recipe

Row = dict[str, Any]


class Metrics:
    """The files of one run. Rows past `step`, which a run that was killed wrote and its successor will write again, are
    dropped when it opens, with a last line that was cut short. A number that is not finite is written as null."""

    def __init__(self, folder: Path, environment: Mapping[str, Any], step: int = 0, report_to: tuple[str, ...] = ()):
        self.path = folder / "metrics.jsonl"
        kept = [row for row in read_rows(self.path) if row.get("step", 0) <= step] if step else []
        text = "".join(map(to_line, kept)) or to_line({"environment": dict(environment)})
        atomic_write(self.path, text.encode())
        self.file = self.path.open("a", encoding="utf-8")
        self.events = open_events(folder, step) if "tensorboard" in report_to else None

    def write(self, row: Row) -> None:
        """Append a row, which must hold `step`, and hand it to the operating system."""
        self.file.write(to_line(row))
        self.file.flush()
        for key, value in row.items():
            if self.events is not None and key != "step" and value is not None:
                self.events.add_scalar(f"{'eval' if key.startswith('eval') else 'train'}/{key}", value, row["step"])

    def sync(self) -> None:
        """Every row so far is on the disk when this returns: called before a training state is."""
        os.fsync(self.file.fileno())
        if self.events is not None:
            self.events.flush()

    def close(self) -> None:
        self.sync()
        self.file.close()
        if self.events is not None:
            self.events.close()


def to_line(row: Mapping[str, Any]) -> str:
    """`row` as one line of strict JSON."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a metrics.jsonl up to the first line that is not whole; nothing where there is no file."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict):
            return
        yield row


def open_events(folder: Path, step: int) -> Any:
    """A TensorBoard writer in `folder`/tensorboard that forgets what was written past `step`."""
    if find_spec("tensorboard") is None:
        refuse_missing(None, "report_to", "tensorboard is not installed", "pip install tensorboard, or leave it out")
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)


def plot_loss(folder: Path) -> str:
    """Draw the training and evaluation losses of `folder`/metrics.jsonl into loss.png; returns a line for the log."""
    if find_spec("matplotlib") is None:
        return "loss.png: not drawn, because matplotlib is not installed (pip install matplotlib)"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(read_rows(folder / "metrics.jsonl"))
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # the backend by hand: pyplot would choose one by the display and keep every figure
    axes = figure.add_subplot(xlabel="step", ylabel="loss per target token", title=folder.name)
    for key, label, style in (("loss", "training", {"linewidth": 1.0}), ("eval_loss", "evaluation", {"marker": "o"})):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=f"{label} (last {points[-1][1]:.3f})", markersize=4, **style)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    temporary = folder / ".loss.tmp.png"
    figure.savefig(temporary)
    os.replace(temporary, folder / "loss.png")
    return f"loss.png: {folder / 'loss.png'}"


class Progress:
    """What the terminal shows: one line redrawn in place, or, where stderr is not a terminal, a line a logged step."""

    def __init__(self, step: int, total: int, stream: TextIO | None = None):
        self.first, self.total, self.stream = step, total, stream or sys.stderr
        self.live, self.started = self.stream.isatty(), time.perf_counter()

    def say(self, text: str) -> None:
        """A line that stays."""
        print(f"\r\x1b[K{text}" if self.live else text, file=self.stream, flush=True)

    def show(self, row: Row, stays: bool) -> None:
        """The state of the run after `row["step"]`; where nothing can be redrawn, only if it `stays`."""
        if not self.live:
            if stays:
                self.say(self.line(row))
            return
        width = get_terminal_size().columns  # a line that wraps cannot be redrawn in place
        print(f"\r\x1b[K{self.line(row)[: width - 1]}", end="", file=self.stream, flush=True)

    def line(self, row: Row) -> str:
        """`step 20/100 | loss 3.2104 | lr 3.0e-04 | norm 1.02 | 12,345 tok/s | 1.2 GB | 0:40 left`"""
        step = int(row["step"])
        left = (time.perf_counter() - self.started) / max(1, step - self.first) * (self.total - step)
        loss, norm = (f"{v:.{n}f}" if v is not None and math.isfinite(v) else "not finite"
                      for v, n in ((row["loss"], 4), (row["grad_norm"], 2)))
        parts = [f"step {step}/{self.total}", f"loss {loss}", f"lr {row['lr']:.2e}", f"norm {norm}",
                 f"{row['tokens_per_second']:,.0f} tok/s", f"{row['memory_gb']:.2f} GB", f"{clock(left)} left"]
        return " | ".join(parts + ([f"{row['skipped']} skipped"] if row.get("skipped") else []))


def peak_memory_gb(kind: str) -> float:
    """The most memory this process has held on a device of that kind: the accelerator's, or for `cpu` the host's."""
    import torch

    if kind != "cpu":
        return torch.accelerator.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # Linux counts in KiB, macOS in bytes


def clock(seconds: float) -> str:
    """`h:mm:ss`, or `m:ss` under an hour."""
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
