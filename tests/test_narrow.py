"""Indices are of 64 bits: a build in which an `int` has 16 computes the same, and more than 2^31 elements are computed at all."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from modelcenter import ops
from modelcenter.ops import _kernels

HERE = Path(__file__).parent
LEVELS = {"base": "0", "avx2": "1", "avx512": "2"}
# Sums of two such ints are ints of 32 bits again: those that overflow are a trap.
NARROW = f"-O1 -include {HERE}/narrow.h -fsanitize=signed-integer-overflow -fsanitize-undefined-trap-on-error"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _kernels.available("cpu") or not shutil.which("g++"), reason="no compiled kernels"),
]


def narrow(folder: Path, **planted: tuple[str, str]) -> Path:
    """The kernels with ints of 16 bits, for the best instruction set that there is here alone; `planted`: with these alone, in each
    of which the first text became the second."""
    source = folder / "source"
    skip = shutil.ignore_patterns("_C*", "__pycache__", *(["*.cu"] if planted else []))
    for part in ("csrc", "modelcenter", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        place = HERE.parent / part
        shutil.copytree(place, source / part, ignore=skip) if place.is_dir() else shutil.copy(place, source / part)
    for file in (source / "csrc").glob("*.cpp") if planted else ():
        if file.stem in planted:
            text = file.read_text()
            assert text.count(planted[file.stem][0]) == 1
            file.write_text(text.replace(*planted[file.stem]))
        elif file.stem != "module":
            file.unlink()
    env = {**os.environ, "MODELCENTER_CUDA": "0", "CFLAGS": NARROW, "MODELCENTER_LEVELS": LEVELS[_kernels._C.cpu_level]}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(folder / "temp"), "--build-lib", str(folder)]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=800)
    made = list((folder / "modelcenter").glob("_C*"))
    assert done.returncode == 0 and made, done.stderr
    return made[0]


def fuzzed(kernels: Path, cases: int, *more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MODELCENTER_KERNELS": str(kernels), "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "fuzz_ops.py"), "--large", "--compare", "1", "--cases", str(cases), *more]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)


def test_no_int_grows_with_a_tensor(tmp_path: Path) -> None:
    done = fuzzed(narrow(tmp_path), 300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "none wrong" in done.stdout


def test_kernels_of_gpus_compile_with_such_ints(setup: dict[str, Any], tmp_path: Path) -> None:
    """Whether they compute the same is for a GPU to say (narrow.h); what is handed to another as its int is not one of these."""
    if (nvcc := setup["find_nvcc"]()) is None:
        pytest.skip("no nvcc")

    def compiled(file: Path) -> str:
        flags = f"-O0 -std=c++17 -include {HERE}/narrow.h -DMC_CUDA -DMC_HOPPER -DMC_LEVEL=100 -ptx -arch=sm_90a".split()
        command = [nvcc, *flags, '-DMC_ARCHITECTURES="90"', str(file), "-o", str(tmp_path / f"{file.stem}.ptx")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
        return "" if done.returncode == 0 else f"{file.name}: {done.stdout}{done.stderr}"

    with ThreadPoolExecutor(2) as pool:
        failed = [said for said in pool.map(compiled, sorted((HERE.parent / "csrc").glob("*.cu"))) if said]
    assert not failed, "\n".join(failed)


@pytest.mark.slow
@pytest.mark.parametrize("file, old, new", [
    ("embedding", "for (int64_t row = begin; row < end; row++) rows_of", "for (int row = begin; row < end; row++) rows_of"),
    ("dropout", "const int64_t at = block * BLOCK, left", "const int at = block * BLOCK; const int64_t left"),
])  # fmt: skip
def test_one_that_does_is_found(file: str, old: str, new: str, tmp_path: Path) -> None:
    done = fuzzed(narrow(tmp_path, **{file: (old, new)}), 40, "--only", file)
    assert "WRONG" in done.stdout or done.returncode < 0, done.stdout + done.stderr  # a wrong number, or a signal


@pytest.mark.slow
@pytest.mark.skipif(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 10 << 30, reason="wants 9 GiB of free memory")
def test_more_than_2_to_the_31_elements() -> None:
    """Counted in 32 bits the last ones would lie before the first. In bf16, 4 GiB there and 4 back; by rows, and as one."""
    rows, dim = (1 << 31) // 4096 + 3, 4096
    x = torch.zeros(rows, dim, dtype=torch.bfloat16)
    x[-1] = torch.arange(dim, dtype=torch.bfloat16) / dim
    assert x.numel() > 1 << 31
    weight = torch.ones(dim, dtype=torch.bfloat16)
    seed = torch.ones(1, dtype=torch.int64)
    for op in (
        ops.gelu, lambda t: ops.rms_norm(t, weight, 1e-6), lambda t: ops.dropout(t, None, seed, 0.0),
        lambda t: ops.quantize_int8(t)[0],
    ):  # fmt: skip
        y = op(x)
        assert y.shape == x.shape and torch.equal(y[-1], op(x[-1:])[0]) and y[-1].any()
        assert not y[:3].any() and not y[rows // 2].any()
        del y
