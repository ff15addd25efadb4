"""What a run prints while it works: messages, and a progress line with the time that remains.

On a terminal the progress line is redrawn in place. Elsewhere (a log, a pipe) there is a plain line for each logged step, without a
carriage return.
"""

import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import Any, SupportsFloat, TextIO

from ..errors import printable, size

RECENT = 100  # steps whose mean is the pace
SLOW = 2.0  # seconds after which the first step says how far it is
OFTEN = 0.1  # seconds between two drawings of the line
MINUTE = 60.0  # seconds between two lines of a log that say how far one piece of work is

Row = Mapping[str, Any]


class Pace:
    """The time to the end of a run of `total` steps, from the recent pace of steps and the pace of each other kind of work.

    `every`: another kind of work -> how many steps apart it is done, None if once, at the end. Work before this process began does
    not count; the first step, which is slow, counts only until there is another.
    """

    def __init__(self, total: int, every: Mapping[str, int | None]):
        self.total, self.every = total, every
        self.steps: deque[float] = deque(maxlen=RECENT)
        self.others: dict[str, list[float]] = {}
        self.mark, self.aside, self.first = time.perf_counter(), 0.0, True

    def step(self) -> None:
        """Note that a step has ended."""
        now = time.perf_counter()
        if self.first and self.steps:
            self.steps.clear()
            self.first = False
        self.steps.append(now - self.mark - self.aside)
        self.mark, self.aside = now, 0.0

    def other(self, kind: str, seconds: float) -> None:
        """Note how long work between two steps has taken."""
        self.others.setdefault(kind, []).append(seconds)
        self.aside += seconds

    def left(self, step: int) -> float:
        """Seconds from the end of `step`, with its other work still to come, to the end of the run. Kinds of work that have not
        been done yet count as nothing."""
        seconds = sum(self.steps) / max(1, len(self.steps)) * (self.total - step)
        for kind, took in self.others.items():
            seconds += sum(took) / len(took) * self.times(kind, step)
        return seconds

    def times(self, kind: str, step: int) -> int:
        """How often a kind of work will be done from `step` on; it is also done at the end, whatever its rhythm."""
        every = self.every.get(kind) or self.total
        return -(-self.total // every) - (step - 1) // every


class Progress:
    """Prints for a run. A `silent` one prints nothing; a terminal that is gone is no longer written to."""

    def __init__(self, total: int, every: Mapping[str, int | None] | None = None, stream: TextIO | None = None, *,
                 silent: bool = False) -> None:
        self.total, self.stream, self.silent = total, stream or sys.stderr, silent
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.pace, self.drawn, self.steps = Pace(total, every or {}), -math.inf, 0

    def say(self, text: str) -> None:
        """Print one or several permanent lines. Control characters in them are shown, not executed."""
        text = "\n".join(map(printable, text.split("\n")))
        self.print(f"\r\x1b[K{text}\n" if self.live else f"{text}\n")

    def show(self, row: Callable[[], Row], stays: bool) -> None:
        """Show the state of the run after a step, for which `row` is then asked. If nothing can be redrawn it is printed only if it
        `stays` or is the first: nobody should wait for a log's first number longer than a step takes."""
        self.pace.step()
        self.steps += 1
        if not self.live:
            if stays or self.steps == 1:
                self.say(self.line(row()))
        elif stays or time.perf_counter() - self.drawn > OFTEN:
            self.draw(self.line(row(), self.width() - 1))  # a line that wraps cannot be redrawn in place

    def forward(self, number: int, of: int, loss: SupportsFloat) -> None:
        """A step has done `number` `of` so many forwards and backwards, the last with that loss. The very first gets a line, if it
        took long."""
        if self.steps or number > 1 or of == 1:
            return
        read, seconds = float(loss), time.perf_counter() - self.pace.mark  # the loss first: it waits for the device
        if seconds > SLOW:
            self.say(f"the first of a step's {of} forwards took {seconds:.0f} s, loss {read:.4f}")

    @contextmanager
    def aside(self, kind: str, step: int) -> Iterator[None]:
        """A context for work other than steps, whose time does not count as theirs."""
        began = self.drawn = time.perf_counter()
        if self.live:
            self.draw(f"step {step}/{self.total} | {kind} ..."[: self.width() - 1])
        try:
            yield
        finally:
            self.pace.other(kind, time.perf_counter() - began)

    def part(self, what: str, done: int, of: int) -> None:
        """Show the progress of some other work: redrawn if possible, elsewhere a line per minute."""
        now = time.perf_counter()
        if now - self.drawn > (OFTEN if self.live else MINUTE):
            text = f"{done:,} of {of:,} {what}"
            self.draw(text[: self.width() - 1]) if self.live else self.say(text)
            self.drawn = now

    def line(self, row: Row, width: int | None = None) -> str:
        """`step 20/100 | loss 3.2104 | lr 3.0e-04 | norm 1.02 | 12,345 tok/s | 1.2 GB | 0:40 left`, in `width` columns without
        what matters least."""
        step = int(row["step"])
        loss, norm = (f"{v:.{n}f}" if v is not None and math.isfinite(v) else "not finite"
                      for v, n in ((row["loss"], 4), (row["grad_norm"], 2)))
        parts = {  # with their ranks
            f"step {step}/{self.total}": 0, f"loss {loss}": 1, f"lr {row['lr']:.2e}": 7, f"norm {norm}": 6,
            f"{row['tokens_per_second']:,.0f} tok/s": 3, size(int(row["memory_gb"] * 1e9)): 5,
            f"{clock(self.pace.left(step))} left": 2,
        }  # fmt: skip
        if row.get("skipped"):
            parts[f"{row['skipped']} skipped"] = 4
        while width is not None and len(" | ".join(parts)) > width and len(parts) > 1:
            del parts[max(parts, key=lambda part: parts[part])]
        return " | ".join(parts)[:width]

    def width(self) -> int:
        """Columns of the terminal: of this stream, whatever the others are."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError, AttributeError):
            columns = 0
        return columns or get_terminal_size().columns

    def draw(self, text: str) -> None:
        self.drawn = time.perf_counter()
        self.print(f"\r\x1b[K{text}")

    def print(self, text: str) -> None:
        if self.silent:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # hung up, or closed
            self.silent = True


def peak_memory_gb(kind: str) -> float:
    """The most memory this process has held on a device of that kind: the accelerator's, or for `cpu` the host's."""
    import torch

    if kind != "cpu":
        return torch.accelerator.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9  # Linux counts in KiB, macOS in bytes


def clock(seconds: float) -> str:
    """`1d 2:03:04`, `h:mm:ss` under a day, `m:ss` under an hour."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not days and not hours:
        return f"{minutes}:{seconds_left:02d}"
    return f"{f'{days}d ' if days else ''}{hours}:{minutes:02d}:{seconds_left:02d}"
