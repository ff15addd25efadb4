"""Draws the curves of a run, loss.png: small panels over the steps, from metrics.jsonl."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import groupby
from pathlib import Path

from ..checkpoint.atomic import atomic_write
from ..errors import LIMIT, InputError, printable
from .metrics import Row, read_rows

LEFT_OUT = (
    "step", "tokens", "skipped", "spikes", "rollbacks", "eval_targets", "best_step", "memory_gb", "eval_perplexity",
)  # fmt: skip
TITLES = {"lr": "learning rate", "grad_norm": "gradient's norm, before clipping", "tokens_per_second": "tokens per second"}
LOG = ("grad_norm",)


def plot_loss(folder: Path) -> str:
    """Draw `folder`/metrics.jsonl into loss.png: the losses, each other metric of evaluations, rate, norm and speed. Errors become
    a line for the log, which is returned: a picture is no reason to lose a run, nor its last message."""
    if find_spec("matplotlib") is None:
        return "loss.png: not drawn, because matplotlib is not installed (pip install matplotlib)"
    try:
        return draw(folder)
    except Exception as error:  # where memory has run out its parts cannot even be imported
        return f"loss.png: not drawn: {printable(str(error) or type(error).__name__)[:LIMIT]}"


def draw(folder: Path) -> str:
    """`plot_loss` without catching errors."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(read_rows(folder / "metrics.jsonl"))
    panels = [("loss", "eval_loss"), *((key,) for key in keys(rows))]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)  # the backend by hand: pyplot would choose one by the display and keep every figure
    figure.suptitle(folder.resolve().name, parse_math=False)  # two dollars in it are no formula
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, number + 1, xlabel="step")
        axes.set_title("loss per target token" if number == 0 else TITLES.get(panel[0], panel[0]), fontsize=10)
        for key in panel:
            label = {"loss": "training", "eval_loss": "evaluation"}.get(key, "last")
            color = None
            for points in runs(rows, key):  # a gap stays one
                marker = "o" if key.startswith("eval_") else "." if len(points) == 1 else ""
                (line,) = axes.plot(*zip(*points, strict=True), linewidth=1.0, marker=marker, markersize=4, color=color)
                color = line.get_color()
            if color is not None:
                line.set_label(f"{label} {points[-1][1]:.4g}")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
        if panel[0] in LOG and any((row.get(panel[0]) or 0) > 0 for row in rows):  # zeros alone have no logarithm
            axes.set_yscale("log")
    picture = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a folder's name may have letters that its font lacks
        figure.savefig(picture, format="png")
    try:
        atomic_write(folder / "loss.png", picture.getvalue())
    except InputError as error:
        return f"loss.png: not written: {error}"
    return f"loss.png: {folder / 'loss.png'}"


def keys(rows: Sequence[Row]) -> list[str]:
    """What gets a panel besides the losses: an evaluation's metrics first."""
    found = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, int | float))
    rest = [key for key in found if key not in (*LEFT_OUT, "loss", "eval_loss") and not key.startswith("best_")]
    return sorted(rest, key=lambda key: not key.startswith("eval_"))


def runs(rows: Sequence[Row], key: str) -> list[list[tuple[int, float]]]:
    """The points (step, value) of a curve, cut where a value is not finite."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [list(part) for there, part in groupby(points, lambda point: point[1] is not None) if there]
