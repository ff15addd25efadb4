"""Where a run's numbers go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio.

Each is a package that only this file imports. `report_to` selects it, and its own environment variables say where to send the
numbers (WANDB_MODE=offline, WANDB_PROJECT, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, TRACKIO_DIR, TRACKIO_PROJECT ...). None of
them can harm a run: at the first failure the run prints a line, and sends nothing more there.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..errors import printable, refuse_missing

PROJECT = "modelcenter"  # where a service wants one and the environment names none


@dataclass(frozen=True)
class About:
    """What a service is told about a run. `id` is the same in every process of the run. `step`: where this process begins."""

    folder: Path
    id: str
    step: int
    recipe: Mapping[str, Any]  # flat: dotted keys

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Service(Protocol):
    """A destination for numbers; whatever it raises is caught by `Reports`."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Events in `folder`/tensorboard. Events past the step at which this process begins are forgotten, also those of a process that
    was killed before its first state."""

    def __init__(self, about: About) -> None:
        self.folder = about.folder / "tensorboard"
        self.begin(about.step)

    def begin(self, step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer: Any = SummaryWriter(str(self.folder), purge_step=step + 1)
        self.flush, self.close = self.writer.flush, self.writer.close

    def rewind(self, step: int) -> None:
        self.close()
        self.begin(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)


class Logged:
    """A run that takes rows through `log` and sends them by itself. Rows that it already has stay as they are."""

    run: Any

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """What it has it keeps."""

    def flush(self) -> None:
        """It writes by itself."""

    def close(self) -> None:
        self.run.finish()


class WandB(Logged):
    """A run of Weights & Biases, its files in `folder`/wandb."""

    def __init__(self, about: About) -> None:
        import wandb

        self.run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=about.name, id=about.id, resume="allow",
                              dir=about.folder, config=dict(about.recipe))  # fmt: skip


class MLflow:
    """A run of an MLflow experiment, found again by a tag."""

    def __init__(self, about: About) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self.metric, self.client = Metric, mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(name)
        found = self.client.search_runs([experiment], f"tags.`modelcenter.run` = '{about.id}'")
        run = found[0] if found else self.client.create_run(experiment, run_name=about.name, tags={"modelcenter.run": about.id})
        self.run = run.info.run_id
        if not found:
            params = [Param(key, str(value)[:500]) for key, value in about.recipe.items()]
            for start in range(0, len(params), 100):  # at most, says its REST interface
                self.client.log_batch(self.run, params=params[start : start + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 10**6
        self.client.log_batch(self.run, metrics=[self.metric(key, value, now, step) for key, value in values.items()])

    def rewind(self, step: int) -> None:
        """What it has it keeps."""

    def flush(self) -> None:
        """Each call is a request that was answered."""

    def close(self) -> None:
        self.client.set_terminated(self.run)


class Trackio(Logged):
    """A run of a Trackio project."""

    def __init__(self, about: About) -> None:
        import trackio

        self.run = trackio.init(os.environ.get("TRACKIO_PROJECT", PROJECT), name=f"{about.name}-{about.id}", resume="allow",
                                config=dict(about.recipe), embed=False)  # fmt: skip


SERVICES: dict[str, Callable[[About], Service]] = {
    "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip


def check_installed(names: Iterable[str]) -> None:
    """Refuse a service whose package, of the same name, is not installed."""
    for name in names:
        if find_spec(name) is None:
            refuse_missing(None, "report_to", f"{name} is not installed", f"pip install {name}, or leave it out")


class Reports:
    """The services of a run. `say` prints what went wrong."""

    def __init__(self, names: Iterable[str], about: About, say: Callable[[str], None]) -> None:
        self.say, self.open = say, dict[str, Service]()
        for name in names:
            self.attempt(name, partial(self.begin, name, about))

    def begin(self, name: str, about: About) -> None:
        self.open[name] = SERVICES[name](about)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of a row of metrics, under `train/` or `eval/`."""
        values = {f"{'eval' if key.startswith(('eval_', 'best_')) else 'train'}/{key}": float(value) for key, value in row.items()
                  if key != "step" and isinstance(value, int | float) and math.isfinite(value)}  # fmt: skip
        for name, service in list(self.open.items()):
            self.attempt(name, partial(service.write, row["step"], values))

    def rewind(self, step: int) -> None:
        """The run returns to `step`."""
        for name, service in list(self.open.items()):
            self.attempt(name, partial(service.rewind, step))

    def flush(self) -> None:
        for name, service in list(self.open.items()):
            self.attempt(name, service.flush)

    def close(self) -> None:
        for name, service in list(self.open.items()):
            self.attempt(name, service.close)
        self.open = {}

    def attempt(self, name: str, act: Callable[[], Any]) -> None:
        """Do it; if that fails, print so and give the service up."""
        try:
            act()
        except (Exception, SystemExit) as error:  # of a package of others: it may raise anything
            self.open.pop(name, None)
            text = printable(" ".join(str(error).split()))[:200]
            self.say(f"report_to: {name}: {type(error).__name__}: {text}; nothing more is sent to it")
