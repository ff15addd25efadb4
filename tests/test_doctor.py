"""What `modelcenter doctor` says of installations of every kind, each put in place of the present one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelcenter import doctor
from modelcenter.__main__ import main
from modelcenter.ops import _kernels
from modelcenter.train.opening import slow_choices


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["doctor", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == len(found) - 1 + len(found["advice"]) and max(map(len, text.splitlines())) < 400
    return found


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU of 2018, as far as torch says."""
    one = SimpleNamespace(name="RTX 2080 Ti", major=7, minor=5, total_memory=11 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: one)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys)
    if _kernels._C is None:
        assert found["extension"].endswith("references only") and found["advice"]
    else:
        assert found["extension"] == "built" and found["cpu_kernels"].endswith(": they run")
    assert found["precision_auto"]["cpu"] == ("bf16" if doctor.has_low_units(torch.bfloat16) else "fp32")
    assert ("in hardware" in found["bf16_on_cpu"]) == doctor.has_low_units(torch.bfloat16)


def test_switched_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "WANTED", False)
    found = said(capsys)
    told = [line for line in found["advice"] if not line.startswith("the ")]  # of GPUs that are hidden, if there are any
    assert "MODELCENTER_KERNELS=0" in found["extension"] and told == ["kernels: unset MODELCENTER_KERNELS"]


@pytest.mark.parametrize("compiler", [True, False])
def test_not_built(compiler: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "_C", None)
    monkeypatch.setitem(sys.modules, "modelcenter._C", None)  # the import of it fails
    monkeypatch.setattr(doctor, "__file__", "/nowhere/doctor.py")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if compiler else None)
    monkeypatch.setattr(_kernels, "WANTED", True)
    found = said(capsys)
    assert found["extension"].startswith("not built") and "cpu_kernels" not in found
    assert ("install a C++ compiler" in found["advice"][0]) is not compiler and "pip install" in found["advice"][0]


@pytest.mark.parametrize(("cxx", "there", "advice"), [
    ("", "c++", "kernels: pip install"), ("", "clang++", "kernels: pip install"), (" c++ -m64", "c++", "kernels: pip install"),
    ("/nowhere/g++", "c++", "kernels: unset CXX, which names one that is not there (/nowhere/g++), then pip install"),
    ("/nowhere/g++", "", "kernels: install a C++ compiler (g++, c++, clang++: none is on the PATH) and unset CXX, which names"),
    ("", "", "kernels: install a C++ compiler (g++, c++, clang++: none is on the PATH), then pip install"),
], ids=["none", "clang", "that", "another", "nor-another", "nothing"])  # fmt: skip
def test_the_compiler_is_the_one_that_is_asked_for(cxx: str, there: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """setup.py takes CXX or none, although another is there; without CXX the first that is."""
    monkeypatch.setattr(_kernels, "_C", None)
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setitem(sys.modules, "modelcenter._C", None)  # the import of it fails
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}" if name == there else None)
    monkeypatch.setenv("CXX", cxx)
    assert doctor.extension()[2][0].startswith(advice)


def test_why_kernels_were_not_built(card: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                    tmp_path: Path) -> None:
    """Is told as setup.py has left it, of all of them and of those for GPUs."""
    (tmp_path / "not_built.txt").write_text("nvcc made no norm.cu.o: killed by signal 9")
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "doctor.py"))
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setattr(_kernels, "_C", None)
    monkeypatch.setitem(sys.modules, "modelcenter._C", None)  # the import of it fails
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(doctor, "automatic_precision", lambda device: "fp32")
    assert said(capsys)["extension"] == "not built (nvcc made no norm.cu.o: killed by signal 9): references only"
    monkeypatch.setattr(doctor, "runs", lambda device: "they run")
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(version="", cpu_level="avx2", cuda_architectures=""))
    found = said(capsys)
    assert found["cuda_kernels"] == "none (they were not built: nvcc made no norm.cu.o: killed by signal 9)"
    assert found["advice"][0].startswith("kernels for GPUs: mend why they were not built: pip install -v ")


@pytest.mark.parametrize(("build", "visible", "lists", "says"), [
    (None, None, "GPU 0: RTX 2080 Ti\nGPU 1: RTX 2080 Ti\n", "the 2 GPUs that nvidia-smi lists: a build of torch for CUDA"),
    ("13.0", None, "GPU 0: RTX 2080 Ti\n", "the 1 GPU that nvidia-smi lists: a driver for CUDA 13.0 or newer, or"),
    ("13.0", "", "GPU 0: RTX 2080 Ti\n", "the 1 GPU that nvidia-smi lists: unset CUDA_VISIBLE_DEVICES, which is ''"),
    (None, None, "No devices found.\n", None),
    (None, None, None, None),
], ids=["of the CPU", "driver", "hidden", "no GPU", "no program"])  # fmt: skip
def test_gpus_that_torch_does_not_see(build: str | None, visible: str | None, lists: str | None, says: str | None, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own program lists them, or fails, or is missing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if lists is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 9\nprintf '{lists}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    lines = [line for line in said(capsys)["advice"] if "nvidia-smi" in line]
    assert [line.startswith(str(says)) for line in lines] == [True] * (says is not None)


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """Half of an extension: the first half of one of numpy's."""
    whole = Path(importlib.import_module("numpy._core._multiarray_umath").__file__ or "").read_bytes()
    file = tmp_path / "_C.so"
    file.write_bytes(whole[: len(whole) // 2])
    return file


def test_a_copy_of_the_kernels_that_broke_off_is_refused(torn: Path) -> None:
    """Loaded it would end Python, with SIGBUS."""
    env = os.environ | {"MODELCENTER_KERNELS": str(torn), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "modelcenter", "doctor"], env=env, capture_output=True, text=True)
    wanted = rf"modelcenter: error: environment: MODELCENTER_KERNELS: .*_C.so: {torn.stat().st_size:,} of [\d,]+ bytes, a copy .*\n"
    assert done.returncode == 2 and re.fullmatch(wanted, done.stderr), (done.returncode, done.stderr)


def test_installed_kernels_that_broke_off_are_not_loaded(torn: Path, capsys: pytest.CaptureFixture[str],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "_C", None)
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setattr(_kernels, "FILE", "1")
    monkeypatch.delitem(sys.modules, "modelcenter._C", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(torn)))
    monkeypatch.setattr(importlib, "import_module", None)
    assert _kernels.load() is None and doctor.extension()[1].startswith(f"does not load: {torn.stat().st_size:,} of ")


def test_of_another_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "_C", None)
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setitem(sys.modules, "modelcenter._C", SimpleNamespace(version="0.0.1"))  # type: ignore[arg-type]
    found = said(capsys)
    assert "0.0.1" in found["extension"] and "pip install" in found["advice"][0]


def test_what_a_variable_leaves_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor is not said to lack what it was told not to use."""
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setattr(_kernels, "LEVEL", "base")
    monkeypatch.setattr(doctor, "runs", lambda device: "they run")
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(version="", cpu_level="none", cuda_architectures=""))
    found = said(capsys)
    assert "MODELCENTER_CPU=base leaves out" in found["cpu_kernels"] and "unset MODELCENTER_CPU" in found["advice"][0]
    monkeypatch.setattr(_kernels, "LEVEL", "avx2")
    there = SimpleNamespace(version="", cpu_level="avx2", cuda_architectures="", __file__="/there/_C.so")
    monkeypatch.setattr(_kernels, "_C", there)
    found = said(capsys)
    assert found["cpu_kernels"].startswith("avx2 by MODELCENTER_CPU=avx2, ") and found["extension"] == "built, from /there/_C.so"


def test_a_kernel_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no kernel image is available")

    kernel = SimpleNamespace(forward=SimpleNamespace(direct=broken))
    monkeypatch.setattr(doctor, "dropout", SimpleNamespace(kernel=kernel))
    assert doctor.runs(torch.device("cpu")) == "they do not run: no kernel image is available"


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SimpleNamespace(forward=SimpleNamespace(direct=lambda x, *rest: x))
    monkeypatch.setattr(doctor, "dropout", SimpleNamespace(kernel=wrong, reference=doctor.dropout.reference))
    assert "DIFFER" in doctor.runs(torch.device("cpu"))


@pytest.mark.parametrize(("built", "device", "warned"), [
    (None, "cpu", True), (("none", "80 90"), "cpu", False), (("avx2", ""), "cuda", False), (("avx2", "80 90"), "cuda", True),
])  # fmt: skip
def test_a_run_says_once_that_there_are_no_kernels(
    built: tuple[str, str] | None, device: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a warning or else a line, if nothing is built, or nothing for the processor, for GPUs, for this GPU."""
    module = built and SimpleNamespace(version="", cpu_level=built[0], cuda_architectures=built[1])
    for name, value in {"WANTED": True, "_C": module, "_warned": False, "COVERED": {}}.items():
        monkeypatch.setattr(_kernels, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    recipe: Any = SimpleNamespace(precision="fp32", batch_tokens=None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        lines = slow_choices(recipe, torch.device(device), 8, 1)
    assert (len(seen), len(lines)) == ((1, 0) if warned else (0, 1))
    assert "`modelcenter doctor`" in str(seen[0].message) if warned else "modelcenter doctor" in lines[0]


def test_a_run_says_that_it_has_more_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe: Any = SimpleNamespace(precision="fp32", batch_tokens=None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 4}, raising=False)
    for threads, said in ((2, []), (3, ["3 threads on 2 cores, where they take turns; machine.threads=2"])):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert [line for line in slow_choices(recipe, torch.device("cpu"), 8, 1) if "turns" in line] == said


@pytest.mark.parametrize("nvcc", [True, False])
def test_a_gpu_without_kernels(nvcc: bool, card: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(version="", cpu_level="avx2", cuda_architectures=""))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvcc" if nvcc else None)
    monkeypatch.setattr(doctor, "runs", lambda device: "they run")
    monkeypatch.setattr(doctor, "automatic_precision", lambda device: "fp32")
    monkeypatch.setattr(doctor.Path, "exists", lambda path: False)
    found = said(capsys)
    assert found["cuda_kernels"] == "none" and "gpu_kernels" not in found and "sm_75" in found["devices"][0]
    assert ("/bin/nvcc is there" in found["advice"][0]) is nvcc and ("install CUDA's compiler" in found["advice"][0]) is not nvcc


@pytest.mark.parametrize("built, says", [
    ("75 90", "kernels built for it"), ("80 90", "no kernels"), ("60", "compiled by the driver"), ("70 90", "kernels built for it"),
])  # fmt: skip
def test_a_gpu_with_kernels(
    built: str, says: str, card: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(version="", cpu_level="avx2", cuda_architectures=built))
    monkeypatch.setattr(doctor, "runs", lambda device: "they run")
    monkeypatch.setattr(doctor, "automatic_precision", lambda device: "bf16" if device.type == "cuda" else "fp32")
    found = said(capsys)
    assert says in found["gpu_kernels"][0] and found["precision_auto"] == {"cpu": "fp32", "cuda": "bf16"}
    assert any("MODELCENTER_CUDA_ARCHS='75'" in line for line in found["advice"]) is (says == "no kernels")


def test_what_reaches_what() -> None:
    """A cubin runs on its own generation from its own number on; PTX on everything later."""
    assert doctor.reach((9, 0), "75 80 86 89 90 100 120") == "kernels built for it"
    assert doctor.reach((8, 7), "80") == "kernels built for it"
    assert doctor.reach((8, 0), "86") == doctor.NOT
    assert doctor.reach((12, 1), "90") == "kernels compiled by the driver at their first use"
    assert doctor.reach((9, 0), "80 100") == doctor.NOT
    assert doctor.reach((9, 0), "75") == f"{doctor.reach((12, 1), '90')}, none in bf16 (they were built for GPUs before sm_80)"
    assert [_kernels.newest(chip, "75 80 90") for chip in ((7, 0), (8, 6), (9, 0), (12, 0))] == [0, 80, 90, 90]


def test_a_gpu_that_runs_what_was_built_for_older_ones(
    card: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops in bf16 are left to the references there; the advice names the architecture that would have kernels."""
    new = SimpleNamespace(name="New", major=9, minor=0, total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: new)
    monkeypatch.setattr(_kernels, "WANTED", True)
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(version="", cpu_level="avx2", cuda_architectures="75"))
    monkeypatch.setattr(doctor, "runs", lambda device: "they run")
    monkeypatch.setattr(doctor, "automatic_precision", lambda device: "bf16" if device.type == "cuda" else "fp32")
    found = said(capsys)
    assert found["gpu_kernels"] == [f"New: {doctor.reach((9, 0), '75')}: they run"] and "none in bf16" in found["gpu_kernels"][0]
    assert any("MODELCENTER_CUDA_ARCHS='90'" in line for line in found["advice"])
