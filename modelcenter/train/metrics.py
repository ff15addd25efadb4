"""The numbers of a run: metrics.jsonl.

It holds one JSON object per line. The first row is the run's environment; then come a row with `loss` for each logged step and a
row with `eval_loss` for each evaluation. Every value except `TIMINGS` is determined by the recipe: a run that was killed and
resumed writes the same rows as one that was not.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import atomic_write
from .report import Reports

TIMINGS = ("tokens_per_second", "memory_gb")  # what differs between two runs of one recipe

Row = dict[str, Any]


class Metrics:
    """The rows of one run, which go to `reports` too. When it opens, rows past `step`, which a killed run wrote and its successor
    will write again, are dropped, and so is a last line that was cut short. A number that is not finite is written as null.

    Rows that the disk refuses wait for the next row; `say` gets a line when that begins, and the run goes on.
    """

    def __init__(self, folder: Path, environment: Mapping[str, Any], step: int = 0, reports: Reports | None = None,
                 say: Callable[[str], None] = print):
        self.path, self.reports, self.say, self.failing = folder / "metrics.jsonl", reports, say, False
        rows = upto(self.path, step) if step else []
        data = b"".join(map(to_line, rows or [{"environment": dict(environment)}]))
        atomic_write(self.path, data)
        self.size, self.waiting = len(data), list[Row]()  # bytes that are in the file, and rows that are not
        self.file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self.left: Path | None = folder  # where it was when the run ended
        self.home = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)  # kept open, so that no other folder gets its number

    def write(self, row: Row) -> None:
        """Append a row, which must hold `step`, and hand it to the operating system."""
        self.waiting.append(row)
        with self.survived("its rows wait for room"):
            self.append()
        if self.reports is not None:
            self.reports.write(row)

    def append(self) -> None:
        """Write the rows that wait. If that fails half-way, the next call begins again at the same place."""
        data = b"".join(map(to_line, self.waiting))
        done = 0
        while done < len(data):
            done += os.pwrite(self.file, data[done:], self.size + done)
        self.size, self.failing = self.size + len(data), False
        self.waiting.clear()

    def rewind(self, step: int) -> None:
        """Drop the rows past `step`, to which the run returns."""
        self.waiting = [row for row in self.waiting if row["step"] <= step]
        with self.survived("rows past the state stay in it"):
            size = sum(len(to_line(row)) for row in upto(self.path, step))
            os.ftruncate(self.file, size)
            self.size = size
        if self.reports is not None:
            self.reports.rewind(step)

    def at_home(self) -> bool:
        """Whether the folder still has the name under which it was opened."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.home), os.stat(self.path.parent))
        return False

    def whereabouts(self) -> Path | None:
        """The folder, by its current name. One that was removed is to be made again; None if another folder has its name."""
        if self.at_home():
            return self.path.parent
        with suppress(OSError):
            now = Path(os.readlink(f"/proc/self/fd/{self.home}"))
            if os.path.samestat(os.fstat(self.home), os.stat(now)):
                return now
        return None if self.path.parent.exists() else self.path.parent

    def sync(self) -> None:
        """Flush every row so far to the disk; called before a training state is written."""
        with self.survived("its rows wait for room"):
            self.append()
            os.fsync(self.file)
        if self.reports is not None:
            self.reports.flush()

    def close(self) -> None:
        self.sync()
        self.left = self.whereabouts()
        for held in (self.file, self.home):
            with suppress(OSError):
                os.close(held)
        if self.waiting:
            self.say(f"{self.path}: the last {len(self.waiting)} rows are not written")
        if self.reports is not None:
            self.reports.close()

    @contextmanager
    def survived(self, what: str) -> Iterator[None]:
        """A context in which a disk failure is not an error. It is reported once for as long as it lasts."""
        try:
            yield
        except OSError as error:
            if not self.failing:
                self.say(f"{self.path}: {error.strerror or error}; {what}")
            self.failing = True


def to_line(row: Mapping[str, Any]) -> bytes:
    """`row` as one line of strict JSON."""
    return (json.dumps(finite(row), allow_nan=False) + "\n").encode()


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with None for what is nan or infinite, which JSON has not."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


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


def upto(path: Path, step: int) -> list[Row]:
    """The rows of a metrics.jsonl that are not past `step`."""
    return [row for row in read_rows(path) if row.get("step", 0) <= step]
