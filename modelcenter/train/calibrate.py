"""What runs took against what was foreseen of them: kept for the next prediction on the same device.

$XDG_CACHE_HOME/modelcenter/plan.json (~/.cache without that variable) holds the last ratios of measured to foreseen time of
runs of one kind: the device, the precision, one rank or several, and in which quarters a step's time goes to arithmetic, memory,
links and host. No model, path or text is in it. MODELCENTER_CALIBRATION=0 neither reads nor writes it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..checkpoint.atomic import atomic_write
from ..errors import InputError
from ..parallel.layout import Estimate
from .metrics import Row

KEPT = 16  # ratios of a kind
LEAST = 3  # rows of metrics that a measurement takes; the first, of the start, is left out
SOUND = (0.05, 20.0)  # ratios beyond these are of a machine that was doing something else


def file() -> Path | None:
    """Where ratios are kept; None if they are not."""
    if os.environ.get("MODELCENTER_CALIBRATION") == "0":
        return None
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "modelcenter" / "plan.json"


def kind_of(e: Estimate, device: str, precision: str) -> str:
    """Which runs are alike."""
    mix = ", ".join(f"{what} {round(4 * seconds / e.seconds)}/4" for what, seconds in e.spent.items())
    return f"{device}, {precision}, {'one rank' if e.machine.ranks == 1 else 'several'}: {mix}"


def read(path: Path) -> dict[str, list[float]]:
    """The ratios by kind; none where there is no such file, or another."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {kind: [x for x in ratios if isinstance(x, float) and SOUND[0] < x < SOUND[1]]
            for kind, ratios in found.items() if isinstance(ratios, list)}  # fmt: skip


def calibrated(e: Estimate, kind: str) -> tuple[Estimate, int]:
    """The estimate with its time as runs of this kind took, in the median, and how many these were."""
    path = file()
    ratios = read(path).get(kind, []) if path is not None else []
    if not ratios:
        return e, 0
    times = median(ratios)
    return replace(e, seconds=e.seconds * times, spent={what: s * times for what, s in e.spent.items()}), len(ratios)


def rate(rows: Sequence[Row]) -> float | None:
    """Tokens a second of a run, the median of its rows without the first; None of a run that is too short to say."""
    rates = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    return median(rates[1:]) if len(rates) >= LEAST else None


def remember(foreseen: Mapping[str, Any] | None, rows: Sequence[Row]) -> None:
    """Keep what came of a prediction. A disk that refuses is no matter."""
    path, measured = file(), rate(rows)
    if path is None or foreseen is None or measured is None:
        return
    ratio = foreseen["uncalibrated"] / measured
    if SOUND[0] < ratio < SOUND[1]:
        known = read(path)
        known[foreseen["kind"]] = [*known.get(foreseen["kind"], []), round(ratio, 4)][-KEPT:]
        with suppress(OSError, InputError):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(known, indent=1).encode())
