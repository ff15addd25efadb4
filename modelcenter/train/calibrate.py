"""Records how long runs took and how long they were predicted to take, for the next prediction on the same device.

Two predictions about a machine may be off: the time of the device, compared with its rates, and the time that the host takes for a
call, compared with what was timed. Each run tells only about the one that limited it. So the last runs on a device are explained
together, by the most likely pair of the two factors. A plan made with this pair is valid for other layouts and models as well.

$XDG_CACHE_HOME/modelcenter/plan.json (~/.cache without that variable) holds for each run its device, its precision, whether it had
one rank or several, and the seconds of a step: predicted for the device and for the host, and measured. It contains no model, path
or text. With MODELCENTER_CALIBRATION=0 it is neither read nor written.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ..checkpoint.atomic import atomic_write
from ..errors import InputError
from ..plan.chips import Chip, together
from ..plan.estimate import Estimate
from .metrics import Row

KEPT = 32  # runs of a device
LEAST = 3  # rows of metrics that a measurement takes; the first, of the start, is left out
SOUND = (0.05, 20.0)  # ratios beyond these are of a machine that was doing something else
FULL = 0.8  # of the tokens foreseen: shorter batches cost padding and calls that no plan knows of
# Standard deviations of logarithms: of a run, of a device whose rates are known, of a host timed by a chain of small calls.
RUN, DEVICE, HOST = 0.04, 0.15, 0.5
STEPS = 16  # tried between a number and its double


class Run(NamedTuple):
    """Seconds of a step: predicted of the device and of the host at their nominal rates, and measured."""

    precision: str
    several: bool
    device: float
    host: float
    measured: float


@dataclass(frozen=True)
class Learned:
    """By which factors the device and a call of the host take longer than predicted, from so many runs."""

    device: float = 1.0
    host: float = 1.0
    runs: int = 0

    def __str__(self) -> str:
        runs = f"corrected by {self.runs} earlier run{'s' * (self.runs > 1)} on this machine"
        return f"{runs}: arithmetic x {self.device:.2f}, calls on the host x {self.host:.2f}"

    def of(self, chip: Chip) -> Chip:
        """The chip with these factors applied."""
        return replace(chip, slower=chip.slower * self.device, call=chip.call * self.host)

    def plain(self, e: Estimate) -> tuple[float, float]:
        """Seconds of the device and of the host in an estimate for that chip, without these factors."""
        return (e.seconds - e.spent["host"]) / self.device, e.host / self.host


NOTHING: Learned = Learned()


def file() -> Path | None:
    """The file in which runs are kept; None if they are not kept, or there is no place for it."""
    if os.environ.get("MODELCENTER_CALIBRATION") == "0":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if cache.startswith("~") else Path(cache) / "modelcenter" / "plan.json"  # of a container's user, who has no home


def read(path: Path) -> dict[str, list[Run]]:
    """The last runs by device; none if there is no such file, or it holds something else."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: [Run(*row) for row in rows if sound(row)][-KEPT:] for name, rows in found.items() if isinstance(rows, list)}


def sound(row: Any) -> bool:
    """Whether a row, of the file or about to go into it, has sensible values."""
    if not isinstance(row, list | tuple) or len(row) != len(Run._fields):
        return False
    kinds = (str, bool, float, float, float)
    if not all(type(x) is kind for x, kind in zip(row, kinds, strict=True)) or not all(x > 0 for x in row[2:]):  # NaN is not
        return False
    return bool(SOUND[0] < row[4] / max(row[2:4]) < SOUND[1])


def learn(chip: Chip, precision: str, several: bool) -> Learned:
    """What earlier runs on this device tell about the next one."""
    path = file()
    runs = read(path).get(chip.name, []) if path is not None else []
    return explained(runs, precision, several, chip.apart)


def explained(runs: Sequence[Run], precision: str, several: bool, apart: bool) -> Learned:
    """The likeliest factors: one of the host for all runs, one of the device for each precision, and for one rank and several.
    `apart`: the host runs ahead of the device, and the slower of them counts most; if not, one waits for the other."""
    if not runs:
        return NOTHING
    kinds: dict[tuple[str, bool], list[Run]] = {(precision, several): []}
    for run in runs:
        kinds.setdefault((run.precision, run.several), []).append(run)
    tries = [2 ** (k / STEPS) for k in range(-2 * STEPS, 4 * STEPS + 1)]
    tries.sort(key=lambda x: abs(log(x)))  # the nearest to what was known, of those that are as likely
    best = {}
    for host in tries:
        pairs = []
        for mine in kinds.values():
            costs = {device: sum(odd(run, device, host, apart) for run in mine) + unlikely(device, DEVICE) for device in tries}
            device = min(costs, key=lambda device: costs[device])
            pairs.append((device, costs[device]))
        best[host] = pairs[0][0], sum(cost for _, cost in pairs) + unlikely(host, HOST)
    host = min(best, key=lambda host: best[host][1])
    return Learned(best[host][0], host, len(runs))


def unlikely(ratio: float, deviation: float) -> float:
    return (log(ratio) / deviation) ** 2 / 2


def odd(run: Run, device: float, host: float, apart: bool) -> float:
    """How badly a pair of factors explains a run. A run that was disturbed is odd under every pair, and hardly moves the result."""
    return abs(log(run.measured / together(run.device * device, run.host * host, apart))) / RUN


def rate(rows: Sequence[Row]) -> float | None:
    """Tokens a second of a run: the median of its rows without the first; None if the run is too short to tell."""
    rates = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    return median(rates[1:]) if len(rates) >= LEAST else None


def remember(foreseen: Mapping[str, Any] | None, rows: Sequence[Row]) -> None:
    """Keep the outcome of a prediction, if the batches were about as long as predicted. A disk that refuses is ignored."""
    path, measured = file(), rate(rows)
    if path is None or foreseen is None or measured is None or foreseen.get("offload"):  # which waits for other memory too
        return
    logged = [row for row in rows if row.get("tokens_per_second")]
    first, last = logged[0], logged[-1]
    tokens = (last["tokens"] - first["tokens"]) / max(1, last["step"] - first["step"])
    full = tokens / foreseen["tokens"]
    run = Run(foreseen["precision"], foreseen["several"], *(float(f"{x:.4g}") for x in (
        foreseen["device"] * full, foreseen["host"], tokens / measured)))  # fmt: skip
    if full >= FULL and sound(run):
        known: dict[str, list[Run]] = read(path)
        known[foreseen["chip"]] = [*known.get(foreseen["chip"], []), run][-KEPT:]
        with suppress(OSError, InputError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(known, indent=1).encode())
