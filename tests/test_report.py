"""Optional services: each against a fake of its package that has the real one's signatures, TensorBoard and what is installed of
the others against the real one; and that none can hurt a run."""

import importlib
import math
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from modelcenter.errors import InputError
from modelcenter.train.metrics import Metrics
from modelcenter.train.report import SERVICES, About, Reports, check_installed

ROWS = [{"step": 2, "loss": 3.5, "grad_norm": math.nan, "lr": 1e-3, "skipped": 0}, {"step": 4, "loss": None, "lr": 5e-4},
        {"step": 4, "eval_loss": 3.25, "best_step": 4}]  # fmt: skip
SENT = [(2, {"train/loss": 3.5, "train/lr": 1e-3, "train/skipped": 0.0}), (4, {"train/lr": 5e-4}),
        (4, {"eval/eval_loss": 3.25, "eval/best_step": 4.0})]  # fmt: skip


def about(folder: Path, step: int = 0) -> About:
    return About(folder, "abcd1234", step, {"optimizer.lr": 1e-3, **{f"key{n}": "v" * n for n in range(250)}})


def report(name: str, folder: Path, said: list[str], rows: Any = ROWS, step: int = 0) -> None:
    reports = Reports([name], about(folder, step), said.append)
    for row in rows:
        reports.write(row)
    reports.flush()
    reports.close()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(content)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)


class FakeRun:
    """wandb's and trackio's run."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((step, data))

    def finish(self) -> None:
        self.calls.append("finish")


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(project: str | None = None, *, name: str, id: str, dir: Path, config: dict[str, Any], resume: str) -> FakeRun:
        calls.append((project, name, id, dir, config["optimizer.lr"], resume))
        return FakeRun(calls)

    install(monkeypatch, "wandb", init=init)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    said: list[str] = []
    report("wandb", tmp_path, said)
    assert calls == [("mine", tmp_path.name, "abcd1234", tmp_path, 1e-3, "allow"), *SENT, "finish"] and not said


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(project: str, name: str | None = None, *, config: dict[str, Any], resume: str, embed: bool = True) -> FakeRun:
        calls.append((project, name, config["optimizer.lr"], resume, embed))
        return FakeRun(calls)

    install(monkeypatch, "trackio", init=init)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    said: list[str] = []
    report("trackio", tmp_path, said)
    assert calls == [("modelcenter", f"{tmp_path.name}-abcd1234", 1e-3, "allow", False), *SENT, "finish"] and not said


class FakeMlflow:
    """MlflowClient on a dictionary that outlives it."""

    store: dict[str, Any]

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id="7") if name in self.store else None

    def create_experiment(self, name: str) -> str:
        self.store[name] = {}
        return "7"

    def search_runs(self, experiment_ids: list[str], filter_string: str = "") -> list[Any]:
        (tag, value) = filter_string.split(" = ")
        assert (experiment_ids, tag) == (["7"], "tags.`modelcenter.run`")
        return [run for run in self.store.get("runs", []) if run.tags["modelcenter.run"] == value.strip("'")]

    def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
        info = types.SimpleNamespace(run_id=f"run{len(self.store.get('runs', []))}")
        self.store.setdefault("runs", []).append(types.SimpleNamespace(info=info, tags=tags, name=run_name, params={}, metrics=[]))
        return self.store["runs"][-1]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        run = self.store["runs"][int(run_id[3:])]
        assert not {p.key for p in params} & set(run.params)
        run.params |= {p.key: p.value for p in params}
        run.metrics += [(m.step, m.key, m.value) for m in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.store.setdefault("ended", []).append(run_id)


def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMlflow.store = {}
    entity = type("Entity", (), {"__init__": lambda self, key, value, timestamp=0, step=0: self.__dict__.update(
        key=key, value=value, timestamp=timestamp, step=step)})  # fmt: skip
    install(monkeypatch, "mlflow", MlflowClient=FakeMlflow)
    install(monkeypatch, "mlflow.entities", Metric=entity, Param=entity)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    said: list[str] = []
    report("mlflow", tmp_path, said, ROWS[:1])
    report("mlflow", tmp_path, said, ROWS[1:], step=2)
    (run,) = FakeMlflow.store["runs"]
    assert run.name == tmp_path.name and len(run.params) == 251 and run.params["optimizer.lr"] == "0.001"
    assert run.metrics == [(step, key, value) for step, values in SENT for key, value in values.items()]
    assert FakeMlflow.store["ended"] == ["run0", "run0"] and "modelcenter" in FakeMlflow.store and not said


def test_tensorboard_forgets_what_comes_after_the_state(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    report("tensorboard", tmp_path, said, [{"step": step, "loss": -1.0} for step in (2, 4)])  # killed before it had a state
    report("tensorboard", tmp_path, said, [{"step": step, "loss": float(step)} for step in (2, 4, 6)])
    report("tensorboard", tmp_path, said, [{"step": step, "loss": 10.0 * step} for step in (4, 6)], step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(2, 2.0), (4, 40.0), (6, 60.0)] and not said


def test_tensorboard_forgets_what_a_run_goes_back_from(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    metrics = Metrics(tmp_path, {}, 0, Reports(["tensorboard"], About(tmp_path, "abcd1234", 0, {}), said.append), said.append)
    for step in (2, 4, 6):
        metrics.write({"step": step, "loss": float(step)})
    metrics.rewind(3)
    for step in (4, 6):
        metrics.write({"step": step, "loss": 10.0 * step})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(2, 2.0), (4, 40.0), (6, 60.0)] and not said


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    said: list[str] = []
    report("wandb", tmp_path, said)
    assert not said and len(list(tmp_path.glob("wandb/offline-run-*-abcd1234/*.wandb"))) == 1


@pytest.mark.skipif(find_spec("mlflow") is None or find_spec("sqlalchemy") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
def test_mlflow_itself_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    said: list[str] = []
    report("mlflow", tmp_path, said, ROWS[:1])
    report("mlflow", tmp_path, said, ROWS[1:], step=2)
    import mlflow

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("modelcenter").experiment_id])
    assert not said and run.info.status == "FINISHED" and run.data.params["optimizer.lr"] == "0.001"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/lr")] == [(2, 1e-3), (4, 5e-4)]


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
def test_trackio_itself_on_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    said: list[str] = []
    report("trackio", tmp_path, said)
    assert not said
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("modelcenter", f"{tmp_path.name}-abcd1234")
    assert [(row["step"], row["train/lr"]) for row in logs if "train/lr" in row] == [(2, 1e-3), (4, 5e-4)]


# ------------------------------------------------------------------------------------------------- nothing kills a run


@pytest.mark.parametrize("when", ["open", "write", "flush", "close"])
@pytest.mark.parametrize("error", [RuntimeError, OSError, SystemExit, ImportError])
def test_a_failure_is_a_line_and_then_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str,
                                              error: type[BaseException]) -> None:
    calls: list[str] = []

    class Broken:
        def __init__(self, _: About) -> None:
            self.act("open")

        def act(self, what: str) -> None:
            calls.append(what)
            if what == when:
                raise error("no\nroute \x1b[2J to host")

        def write(self, step: int, values: dict[str, float]) -> None:
            self.act("write")

        def flush(self) -> None:
            self.act("flush")

        def close(self) -> None:
            self.act("close")

    monkeypatch.setitem(SERVICES, "broken", Broken)
    said: list[str] = []
    report("broken", tmp_path, said)
    wanted = f"report_to: broken: {error.__name__}: no route \\x1b[2J to host; nothing more is sent to it"
    assert said == [wanted]
    assert calls == {"open": ["open"], "write": ["open", "write"], "flush": ["open", *["write"] * 3, "flush"],
                     "close": ["open", *["write"] * 3, "flush", "close"]}[when]  # fmt: skip


def test_ctrl_c_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: About) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setitem(SERVICES, "broken", stop)
    with pytest.raises(KeyboardInterrupt):
        Reports(["broken"], about(tmp_path), print)


def test_what_is_not_installed_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelcenter.train import loop, report
    from modelcenter.train.read import load_recipe

    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "mlflow" else 1)
    check_installed(["wandb"])
    changes = {"data.path": "absent.txt", "output_dir": str(tmp_path / "a"), "report_to": ["wandb", "mlflow"]}
    recipe = load_recipe("finetune", changes)
    with pytest.raises(InputError, match="report_to: mlflow is not installed; pip install mlflow, or leave it out"):
        loop.train(recipe)
    assert not (tmp_path / "a").exists()
