"""What every test file shares."""

import inspect
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The suite runs on the CPU, whatever the host has: processes are forked, and torch's threads for a GPU do not survive that.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["MODELCENTER_CALIBRATION"] = "0"  # predictions neither read nor change what the user's own runs took

# The same examples each time, however busy the machine is: what a run of the suite says depends on the code alone.
UNASKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]  # examples may share a folder
settings.register_profile("house", derandomize=True, deadline=None, suppress_health_check=UNASKED)
settings.load_profile("house")
ASKED: set[Any] = set()  # files one of whose runs had its memory and time foreseen


def pytest_configure(config: pytest.Config) -> None:
    """A folder for the models of zoo.py, whichever process of the session makes them: a worker, or a rank that was forked, ends
    without cleaning up behind it."""
    if "ZOO" not in os.environ:
        os.environ["ZOO"] = folder = tempfile.mkdtemp(prefix="zoo-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop("ZOO", None))


def pytest_sessionstart(session: pytest.Session) -> None:
    """No GPU where none is tested, also if a scheduler gave one."""
    if "not gpu" in session.config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test and its fixtures draw without a seed of their own is the same each time, whatever ran before in this process:
    torch begins a process with a number of the system's. Tests on a GPU are as they are."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules and item.get_closest_marker("gpu") is None:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Training flushes denormals to zero for the whole process, and hypothesis rightly refuses to draw floats there; and it
    decides on threads, by whose number sums differ in their last bits."""
    threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A test leaves no process group behind, in which a later one would find itself, or that its own forks would have already."""
    there = "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()
    yield
    if not there and "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        sys.modules["torch.distributed"].destroy_process_group()


@pytest.fixture(autouse=True)
def unrehearsed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second before each of some hundred runs: it is asked once in each file, where it must have an answer.
    Processes that were forked forget that it was: where runs are theirs, the file's `foreseen` names the one test that asks."""
    if only := request.node.get_closest_marker("foreseen"):
        (ASKED.discard if only.args[0] in request.node.name else ASKED.add)(request.module)
    if "modelcenter.train.loop" not in sys.modules or request.module.__name__ == "test_plan":
        return
    from modelcenter.train.loop import verdict

    def asked(*args: Any, **options: Any) -> str:
        inspect.signature(verdict).bind(*args, **options)
        if request.module not in ASKED:
            ASKED.add(request.module)
            found = str(verdict(*args, **options))
            assert "not estimated" not in found, found
        return "memory: not asked"

    monkeypatch.setattr("modelcenter.train.loop.verdict", asked)


@pytest.fixture
def terminal() -> Iterator[None]:
    """SIGHUP as a process has it that was not started by nohup, whose tests ignore it as it does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture of the losses, which takes as long as a short run: half a second. tests/test_journal.py has some drawn."""
    if "modelcenter.train.loop" in sys.modules:
        monkeypatch.setattr("modelcenter.train.loop.plot_loss", lambda folder: "not drawn")


@pytest.fixture
def tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of models that are smaller than what cuBLAS takes beside them."""
    monkeypatch.setattr("modelcenter.plan.costs.WORKSPACES", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many planted bugs (mutants.py) the tests noticed."""
    ends = [r for kind in ("passed", "failed", "error") for r in terminalreporter.getreports(kind)]
    mine = [r.passed for r in ends if "::test_mutant[" in r.nodeid]
    if mine:
        terminalreporter.write_line(f"{sum(mine)} of {len(mine)} mutants killed")


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py defines."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path(str(Path(__file__).parent.parent / "setup.py"))
