"""The states an installation can be in: no kernels, kernels of another version, an older processor's instruction sets."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelcenter import __version__
from modelcenter.ops import _op

HERE = Path(__file__).parent
QUICK = "(formulas and float32) or exact or twice or misaligned"  # what differs between instruction sets


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which does not know of the workers that pytest has here."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=280, cwd=HERE, env=mine)


TESTS = """
import sys, pytest
ended = pytest.main(sys.argv[1:])
from modelcenter.ops import _op
print(_op._C and _op._C.cpu_level)
sys.exit(ended)
"""


@pytest.mark.parametrize(
    "state", ["MODELCENTER_KERNELS=0", pytest.param("MODELCENTER_CPU=base", marks=pytest.mark.slow), "MODELCENTER_CPU=avx2"]
)
def test_ops_are_right_in_every_state(state: str) -> None:
    if not _op.available("cpu"):
        pytest.skip("no compiled kernels: the rest of the suite is this test")
    name, value = state.split("=")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu", "-k"]
    tests = [QUICK, "test_ops.py", "test_kernels.py"] if value != "0" else ["formulas and float32", "test_ops.py"]
    done = python("-c", TESTS, *options, *tests, **{name: value})
    assert done.returncode == 0, done.stdout[-3000:]
    levels = {"0": ["None"], "base": ["base", "none"], "avx2": ["avx2", "base", "none"]}  # where the processor has more, and less
    assert done.stdout.splitlines()[-1] in levels[value], done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_kernels_without_an_instruction_set(tmp_path: Path) -> None:
    """As they are built for aarch64 and macOS, and for a processor from before AVX2 where that is asked for."""
    build = ["setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    env = {**os.environ, "MODELCENTER_CUDA": "0", "MODELCENTER_LEVELS": "0"}
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True, timeout=500, cwd=HERE.parent, env=env)
    (kernels,) = (tmp_path / "modelcenter").glob("_C*")
    assert done.returncode == 0, done.stderr
    level = python("-c", "from modelcenter.ops import _op; print(_op._C.cpu_level)", MODELCENTER_KERNELS=str(kernels))
    assert level.stdout == "base\n", level.stderr
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", QUICK, "-m", "not gpu"]
    done = python("-m", "pytest", *options, "test_ops.py", "test_kernels.py", MODELCENTER_KERNELS=str(kernels))
    assert done.returncode == 0, done.stdout[-3000:]


MISSING = """
import sys
sys.modules["modelcenter._C"] = None
import torch
from modelcenter import ops
for _ in range(3):
    ops.dropout(torch.ones(2), None, ops.draw(torch.device("cpu")), 0.5)
    ops.gelu(torch.ones(2), torch.ones(2))
"""


def test_missing_kernels_are_told_once() -> None:
    done = python("-c", MISSING)
    assert done.returncode == 0 and done.stderr.count("no compiled kernels") == 1, done.stderr
    assert "UserWarning" in done.stderr and "modelcenter doctor" in done.stderr
    asked = python("-c", MISSING.replace("sys.modules", "#"), MODELCENTER_KERNELS="0")
    assert not asked.stderr, "nobody is warned of what he asked for"


OTHER = """
import sys, types
sys.modules["modelcenter._C"] = types.SimpleNamespace(version="0.0.0")
from modelcenter.ops import _op
assert _op._C is None and not _op.available("cpu")
"""


def test_kernels_of_another_version_are_refused() -> None:
    done = python("-W", "ignore:modelcenter has no compiled", "-c", OTHER)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Warning") == 1 and f"built for 0.0.0 and not for {__version__}" in done.stderr


def test_a_file_may_be_named() -> None:
    if not _op.available("cpu") or _op.FILE != "1":
        pytest.skip("no compiled kernels")
    said = python("-c", "from modelcenter.ops import _op; print(_op._C.__file__)", MODELCENTER_KERNELS=_op._C.__file__)
    assert said.stdout.strip() == _op._C.__file__, said.stderr
    assert "wanted 0, 1 or the file" in python("-c", "import modelcenter.ops", MODELCENTER_KERNELS="true").stderr
