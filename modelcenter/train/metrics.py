"""The numbers of a run: metrics.jsonl.

It holds one JSON object a line. The first row is the run's environment; then a row with `loss` for each logged step and a row
with `eval_loss` for each evaluation. Every value but `TIMINGS` follows from the recipe: a run that was killed and resumed writes
the same rows as one that was not.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import atomic_write
from .report import Reports

TIMINGS = ("tokens_per_second", "memory_gb")  # what differs between two runs of one recipe

Row = dict[str, Any]


class Metrics:
    """The rows of one run, sent to `reports` too. Rows past `step`, which a run that was killed wrote and its successor will write
    again, are dropped when it opens, with a last line that was cut short. A number that is not finite is written as null."""

    def __init__(self, folder: Path, environment: Mapping[str, Any], step: int = 0, reports: Reports | None = None):
        self.path, self.reports = folder / "metrics.jsonl", reports
        kept = [row for row in read_rows(self.path) if row.get("step", 0) <= step] if step else []
        text = "".join(map(to_line, kept)) or to_line({"environment": dict(environment)})
        atomic_write(self.path, text.encode())
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append a row, which must hold `step`, and hand it to the operating system."""
        self.file.write(to_line(row))
        self.file.flush()
        if self.reports is not None:
            self.reports.write(row)

    def sync(self) -> None:
        """Every row so far is on the disk when this returns: called before a training state is."""
        os.fsync(self.file.fileno())
        if self.reports is not None:
            self.reports.flush()

    def close(self) -> None:
        self.sync()
        self.file.close()
        if self.reports is not None:
            self.reports.close()


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
