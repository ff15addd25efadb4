"""Installations of every kind, built from this checkout in a temporary folder: no compiler, broken ones, g++ alone, two builds."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent
PARTS = ("csrc", "modelcenter", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
SMOKE = """
import json, sys, warnings
# an editable installation's finder would lend us its kernels
sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
import torch
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from modelcenter import ops
    x = torch.randn(3, 100, requires_grad=True)
    ops.dropout(x, None, ops.draw(x.device), 0.5).sum().backward()
from modelcenter.doctor import examine
print(json.dumps({"said": [str(w.message) for w in said], **examine()}))
"""


def copy(to: Path, *, few: bool = True) -> Path:
    """A checkout without what was built in it; `few`: with the sources of one kernel alone, for the time they take."""
    to.mkdir(parents=True)
    for part in PARTS:
        source = HOUSE / part
        skip = shutil.ignore_patterns("_C*", "__pycache__")
        shutil.copytree(source, to / part, ignore=skip) if source.is_dir() else shutil.copy(source, to / part)
    for file in [*(to / "csrc").glob("*.cpp"), *(to / "csrc").glob("*.cu")]:
        if few and file.stem not in ("module", "device", "dropout"):
            file.unlink()
    return to


def build(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = command or ("build_ext", "--inplace")
    env = {**os.environ, "MODELCENTER_CUDA": "0", "MAX_JOBS": "2", "CFLAGS": "-O0", **variables}
    line = [sys.executable, "setup.py", "-q", *command]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def smoke(folder: Path) -> dict[str, object]:
    """What an op and the doctor say in a process that has this installation."""
    import json

    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SMOKE], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("compiler", ["/nonexistent/g++", "false"])
def test_without_a_compiler(compiler: str, tmp_path: Path) -> None:
    """None, or one that does not work: an installation with the references, which says so once."""
    folder = copy(tmp_path / "a")
    done = build(folder, CXX=compiler)
    assert done.returncode == 0, done.stderr
    assert "the references will do the work" in done.stderr and not list((folder / "modelcenter").glob("_C*"))
    found = smoke(folder)
    assert str(found["extension"]).startswith("not built") and found["advice"]
    assert len([s for s in found["said"] if "no compiled kernels" in s]) == 1  # type: ignore[attr-defined]


@pytest.mark.slow
def test_with_an_nvcc_that_fails(tmp_path: Path) -> None:
    """Then there are the CPU's kernels still."""
    folder, nvcc = copy(tmp_path / "a"), tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\ncase $1 in --version) echo release 13.0;; --list-gpu-arch) echo compute_90;; *) exit 1;; esac\n")
    nvcc.chmod(0o755)
    library = tmp_path / "cuda" / "lib64" / "libcudart_static.a"
    library.parent.mkdir()
    library.touch()
    done = build(folder, MODELCENTER_CUDA="1", CUDA_HOME=str(tmp_path / "cuda"), MODELCENTER_LEVELS="0")
    assert done.returncode == 0 and "the CPU's kernels alone" in done.stderr
    assert smoke(folder)["extension"] == "built"


@pytest.mark.slow
def test_with_a_compiler_alone(tmp_path: Path) -> None:
    folder = copy(tmp_path / "a")
    done = build(folder)
    assert done.returncode == 0 and list((folder / "modelcenter").glob("_C*")), done.stderr
    found = smoke(folder)
    assert found["extension"] == "built" and str(found["cpu_kernels"]).endswith("they run") and found["cuda_kernels"] == "none"
    assert not found["said"]


@pytest.mark.slow
def test_with_a_compiler_that_knows_no_instruction_sets(tmp_path: Path) -> None:
    """As those for other processors: kernels in plain C++, and the doctor does not claim more."""
    compiler = tmp_path / "c++"
    real = shutil.which("g++") or shutil.which("c++")
    refuse = 'for a in "$@"; do case $a in -m*) echo "unknown $a" >&2; exit 1;; esac; done'
    compiler.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    folder = copy(tmp_path / "a")
    done = build(folder, CXX=str(compiler))
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = smoke(folder)
    assert found["extension"] == "built" and str(found["cpu_kernels"]).startswith("base, "), found
    assert str(found["cpu_kernels"]).endswith("they run") and not found["said"]


@pytest.mark.slow
def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    """Wherever they are made; CUDA's part too where there is an nvcc."""
    digests = set()
    for name in ("one", "two/deeper"):
        folder = copy(tmp_path / name)
        scratch = tmp_path / name.replace("/", "-")
        scratch.mkdir(exist_ok=True)
        done = build(folder, "bdist_wheel", "-d", "made", SOURCE_DATE_EPOCH="1700000000", MODELCENTER_CUDA="1",
                     MODELCENTER_CUDA_ARCHS="90", MODELCENTER_LEVELS="0", TMPDIR=str(scratch))  # fmt: skip
        assert done.returncode == 0, done.stderr
        (wheel,) = (folder / "made").glob("*.whl")
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(digests) == 1
