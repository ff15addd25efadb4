"""The states an installation can be in: no kernels, kernels of another version, an older processor's instruction sets."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modelcenter import __version__
from modelcenter.ops import _kernels

HERE = Path(__file__).parent
QUICK = "(formulas and float32) or exact or twice or misaligned"  # what differs between instruction sets
REFERENCES = "formulas and float32 and not relative_attention"  # which takes as long as the rest; `make references` has it


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which does not know of the workers that pytest has here."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | environment
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=550, cwd=HERE, env=mine)


TESTS = """
import sys, pytest
ended = pytest.main(sys.argv[1:])
from modelcenter.ops import _kernels
print(_kernels._C and _kernels._C.cpu_level)
sys.exit(ended)
"""


@pytest.mark.parametrize(
    "state", ["MODELCENTER_KERNELS=0", pytest.param("MODELCENTER_CPU=base", marks=pytest.mark.slow), "MODELCENTER_CPU=avx2"]
)
def test_ops_are_right_in_every_state(state: str) -> None:
    name, value = state.split("=")
    if not _kernels.available("cpu") or _kernels._C.cpu_level in (value, "none"):
        pytest.skip("the state that is here: the rest of the suite is this test")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu", "-k"]
    tests = [QUICK, "test_ops.py", "test_kernels.py"] if value != "0" else [REFERENCES, "test_ops.py"]
    done = python("-c", TESTS, *options, *tests, **{name: value})
    assert done.returncode == 0, done.stdout[-3000:]
    levels = {"0": ["None"], "base": ["base", "none"], "avx2": ["avx2", "base", "none"]}  # where the processor has more, and less
    assert done.stdout.splitlines()[-1] in levels[value], done.stdout


TINY = """
import torch
from modelcenter.ops.attention import attention
v = torch.full((1, 1, 1, 32), 1e-39, dtype=torch.bfloat16)
print(attention(torch.ones_like(v), torch.ones_like(v), v, None, None, None, 1.0, False, None, 0.0).equal(v))
"""


@pytest.mark.skipif(not _kernels.available("cpu") or _kernels._C.cpu_level != "avx512", reason="no instruction set with such units")
def test_an_instruction_set_by_name_is_without_units_for_bf16() -> None:
    """Those of AMX take what is subnormal for 0."""
    assert python("-c", TINY, MODELCENTER_CPU="avx512").stdout == "True\n"
    amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()  # and it may be asked for
    assert python("-c", TINY, MODELCENTER_CPU="").stdout == f"{not amx}\n"


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
    level = python("-c", "from modelcenter.ops import _kernels; print(_kernels._C.cpu_level)", MODELCENTER_KERNELS=str(kernels))
    assert level.stdout == "base\n", level.stderr
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", QUICK, "-m", "not gpu"]
    done = python("-m", "pytest", *options, "test_ops.py", "test_kernels.py", MODELCENTER_KERNELS=str(kernels))
    assert done.returncode == 0, done.stdout[-3000:]


FORKS = """
import json, os, sys, torch
for number, (code, environment) in enumerate(json.loads(sys.argv[1])):
    if (child := os.fork()) == 0:
        os.environ.update(environment)
        for stream in (1, 2):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        try:
            exec(code, {})
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
MISSING = """
import sys
sys.modules["modelcenter._C"] = None
import torch
from modelcenter import ops
for _ in range(3):
    ops.dropout(torch.ones(2), None, ops.draw(torch.device("cpu")), 0.5)
    ops.gelu(torch.ones(2), torch.ones(2))
"""
OTHER = """
import sys, types, warnings
warnings.filterwarnings("ignore", "modelcenter has no compiled")
sys.modules["modelcenter._C"] = types.SimpleNamespace(version="0.0.0")
from modelcenter.ops import _kernels
assert _kernels._C is None and not _kernels.available("cpu")
"""
DOCTOR = "from modelcenter.__main__ import main; print(main(['doctor']))"
NAMED = "from modelcenter.ops import _kernels; print(_kernels._C.__file__)"


def forked(asked: list[tuple[str, dict[str, str]]], folder: Path) -> list[tuple[str, str]]:
    """What each code prints and what it says on stderr, in a process of its own with these variables that has imported torch and
    nothing of ours."""
    done = python("-c", FORKS, json.dumps(asked), str(folder))
    assert done.returncode == 0, done.stderr
    return [((folder / f"{number}.1").read_text(), (folder / f"{number}.2").read_text()) for number in range(len(asked))]


def test_a_variable_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """In a line, by the doctor too."""
    wrong = [
        ("MODELCENTER_CPU", "sse9", "environment: MODELCENTER_CPU: sse9; base, avx2, avx512"),
        ("MODELCENTER_KERNELS", "yes", "environment: MODELCENTER_KERNELS: yes; 0, 1 or the file of an extension"),
        ("MODELCENTER_KERNELS", "/nowhere/_C.so", "environment: MODELCENTER_KERNELS: /nowhere/_C.so: "),
    ]
    for (_, _, wanted), (ended, said) in zip(wrong, forked([(DOCTOR, {n: v}) for n, v, _ in wrong], tmp_path), strict=True):
        assert ended == "2\n" and said.startswith(f"modelcenter: error: {wanted}") and said.count("\n") == 1, said


def test_what_an_installation_without_its_kernels_says(tmp_path: Path) -> None:
    """Missing kernels are told once, and not to one who asked for it; those of another version are refused; a file may be named."""
    file = _kernels._C.__file__ if _kernels.available("cpu") and _kernels.FILE == "1" else None
    looked, not_wanted = {"MODELCENTER_KERNELS": "1"}, {"MODELCENTER_KERNELS": "0"}
    asked = [(MISSING, looked), (MISSING.replace("sys.modules", "#"), not_wanted), (OTHER, looked),
             ("import modelcenter.ops", {"MODELCENTER_KERNELS": "true"})]
    asked += [(NAMED, {"MODELCENTER_KERNELS": file})] if file else []
    found = forked(asked, tmp_path)
    missing, unasked, other, wrong = (said for _, said in found[:4])
    assert missing.count("no compiled kernels") == 1 and "UserWarning" in missing and "modelcenter doctor" in missing, missing
    assert not unasked, "nobody is warned of what he asked for"
    assert other.count("Warning") == 1 and f"built for 0.0.0 and not for {__version__}" in other and "Error" not in other, other
    assert "true; 0, 1 or the file" in wrong
    assert file is None or found[4][0].strip() == file
