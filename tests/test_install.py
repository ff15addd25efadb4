"""Installations of every kind, built from this checkout in a temporary folder: no compiler, broken ones, g++ alone, two builds."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from modelcenter import doctor
from modelcenter.ops._kernels import reach

HOUSE = Path(__file__).parent.parent
ALL = ["75", "80", "90", "100", "120"]
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


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_wheel_needs_nothing_that_develops(tmp_path: Path) -> None:
    """Neither torch nor what tests take; an environment that has all that has what it needs."""
    command = ["make", "-n", "wheel", f"VENV={tmp_path}"]
    said = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=True).stdout
    asked = [line.rpartition("constraints.txt ")[2] for line in said.splitlines() if " pip install " in line]
    assert asked == ["build setuptools pybind11"] and " -m build --no-isolation " in said
    for name in ("installed", "builds"):
        (tmp_path / name).touch()
    assert " pip install " not in subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, check=True).stdout


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


def build(folder: Path, *command: str, umask: int = -1, first: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """By setup.py, in a process that runs `first` before it."""
    command = command or ("build_ext", "--inplace")
    env = {**os.environ, "MODELCENTER_CUDA": "0", "MAX_JOBS": "2", "CFLAGS": "-O0", **variables}
    start = f"import runpy, sys\n{first}\nsys.argv[0] = 'setup.py'\nrunpy.run_path('setup.py', run_name='__main__')"
    line = [sys.executable, *(["-c", start] if first else ["setup.py"]), "-q", *command]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=550, umask=umask)


def smoke(folder: Path) -> dict[str, object]:
    """What an op and the doctor say in a process that has this installation."""
    import json

    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "MODELCENTER_KERNELS": "1"}
    done = subprocess.run([sys.executable, "-c", SMOKE], cwd=folder, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def tool(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\ncat <<END\n{says}\nEND\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.mark.parametrize("wanted, cards, found", [
    (None, "9.0\n9.0\n7.5", ["75", "90"]), (None, "10.3", ALL), (None, "[N/A]", ALL), ("all", "9.0", ALL),
    ("86;75", "9.0", ["75", "86"]),
])  # fmt: skip
def test_which_gpus_are_built_for(
    wanted: str | None, cards: str, found: list[str], setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are asked for, or those of the machine, or all; as far as nvcc knows them (this one does not know sm_103)."""
    nvcc = tool(tmp_path, "nvcc", "\n".join(f"compute_{arch}" for arch in (75, 80, 86, 89, 90, 100, 120)))
    tool(tmp_path, "nvidia-smi", cards)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("MODELCENTER_CUDA_ARCHS", raising=False)
    if wanted:
        monkeypatch.setenv("MODELCENTER_CUDA_ARCHS", wanted)
    assert setup["architectures"](str(nvcc)) == found


def test_an_nvcc_that_knows_none_of_them(setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is said, as one too old to be asked is; the CPU's kernels are built then."""
    nvcc = tool(tmp_path, "nvcc", "compute_75 compute_90")
    monkeypatch.setenv("MODELCENTER_CUDA_ARCHS", "sm90")
    with pytest.raises(OSError, match=r"MODELCENTER_CUDA_ARCHS: sm90: .*nvcc knows 75 90"):
        setup["architectures"](str(nvcc))
    monkeypatch.delenv("MODELCENTER_CUDA_ARCHS")
    with pytest.raises(OSError, match="knows no architecture by number, being too old"):
        setup["architectures"](str(tool(tmp_path, "nvcc", "nvcc fatal: Unknown option")))


def test_what_a_compiler_prints_may_be_any_bytes(setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper's greeting in Latin-1 once ended the installation; what a compiler says of its failure is passed on."""
    nvcc = tool(tmp_path / "bin", "nvcc", "")
    nvcc.write_text('#!/bin/sh\nprintf "gr\\374n release 13.0"\nprintf "Gr\\374nde" >&2\n[ $# = 1 ]\n')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MODELCENTER_CUDA", "1")
    assert setup["find_nvcc"]() == str(nvcc)
    with pytest.raises(OSError, match="Gr\N{REPLACEMENT CHARACTER}nde"):
        setup["run"]([str(nvcc), "-c", "x.cu"])


def test_every_gpu_since_turing_is_reached(setup: dict[str, Any]) -> None:
    """By machine code where NVIDIA promises that it runs: on later numbers of the same generation."""
    every = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert {reach(chip, setup["ARCHITECTURES"]) for chip in every} == {"kernels built for it"}
    assert setup["gencode"](["75", "80", "90"]) == ["-gencode=arch=compute_75,code=[sm_75]",
                                                    "-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]"]  # fmt: skip
    assert setup["gencode"](["80", "90"], True) == ["-gencode=arch=compute_80,code=[sm_80,compute_80]",
                                                     "-gencode=arch=compute_90a,code=sm_90a"]  # fmt: skip
    assert setup["gencode"](["75"]) == ["-gencode=arch=compute_75,code=[sm_75,compute_75]"]


def test_the_doctor_looks_for_the_same_compilers(setup: dict[str, Any]) -> None:
    assert setup["COMPILERS"] == doctor.COMPILERS and setup["REASON"] == doctor.REASON


def test_an_object_is_made_once(setup: dict[str, Any], tmp_path: Path) -> None:
    """And again if its source, a file that this includes, or the command is another; not because the folder is."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\necho >> "$0.log"\nfor a; do :; done\necho object > "$a"\n')
    compiler.chmod(0o755)

    def compiled(house: str, *flags: str) -> int:
        folder = tmp_path / house
        scope = setup["compile_one"].__globals__
        scope["ROOT"], scope["CSRC"] = folder, folder / "csrc"
        setup["compile_one"](folder / "csrc" / "norm.cu", [str(compiler), f"-Dhere={folder}", *flags], tmp_path / "norm.o")
        return len((tmp_path / "cc.log").read_text())

    other = "-I\udcf6"  # a folder whose name is no UTF-8
    for house in ("one", "two"):
        shutil.copytree(HOUSE / "csrc", tmp_path / house / "csrc")
    assert {file.name for file in setup["included"](HOUSE / "csrc" / "norm.cu")} == {
        "norm.cu", "norm.h", "norm_ring.h", "norm_rows.h", "cuda.h", "half.h", "kernel.h", "philox.h", "ptx.h"
    }  # fmt: skip
    assert [compiled("one"), compiled("one"), compiled("two"), compiled("two", other)] == [1, 1, 1, 2]
    for count, file in enumerate(("norm.cu", "philox.h"), 3):
        with (tmp_path / "two" / "csrc" / file).open("a") as text:
            text.write("// more\n")
        assert compiled("two", other) == count
    (tmp_path / "two" / "csrc" / "adamw.h").write_text("")
    assert compiled("two", other) == 4


@pytest.mark.parametrize("compiler", ["/nonexistent/g++", "false"])
def test_without_a_compiler(compiler: str, tmp_path: Path) -> None:
    """None, or one that does not work: an installation with the references, which says so once, and not with what an earlier build
    has left, which may have been one of other sources."""
    folder = copy(tmp_path / "a")
    for left in (folder / "modelcenter", folder / "lib" / "modelcenter"):
        left.mkdir(parents=True, exist_ok=True)
        (left / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    done = build(folder, "build_ext", "--inplace", "--build-lib", "lib", CXX=compiler)
    assert done.returncode == 0, done.stderr
    assert "the references will do the work" in done.stderr and not list(folder.rglob("_C.*"))
    if compiler == "false":  # what is there is the same
        found = smoke(folder)
        assert str(found["extension"]).startswith("not built") and found["advice"]
        assert len([s for s in found["said"] if "no compiled kernels" in s]) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("does", "says"), [
    ("exit 3", "status 3"), ("kill -9 $$", "killed by signal 9"), ("exit 0", "status 0"),
    ("echo In file included >&2; echo 'x.h:1: error: unknown' >&2; exit 1", "status 1: x.h:1: error: unknown"),
])  # fmt: skip
def test_a_compiler_that_makes_nothing(does: str, says: str, tmp_path: Path) -> None:
    """Is named with how it ended, for the doctor too; the next build that has nothing to say takes that back."""
    folder, compiler = copy(tmp_path / "a"), tmp_path / "clang++"
    compiler.write_text(f"#!/bin/sh\n[ $1 != --version ] || {{ echo 1; exit; }}\n{does}\n")
    compiler.chmod(0o755)
    done = build(folder, "build_ext", "--inplace", "--build-lib", "lib", PATH=str(tmp_path), CXX="")  # the only one there
    assert done.returncode == 0 and not list(folder.rglob("_C.*")), done.stderr
    said = (folder / "modelcenter/not_built.txt").read_text()
    assert re.fullmatch(rf"{re.escape(str(compiler))} made no \w+(\.\d)?\.o: {re.escape(says)}", said), said
    assert f"the references will do the work: {said[:60]}" in done.stderr and f"{compiler} -O2 " in done.stderr
    compiler.write_text('#!/bin/sh\nfor file; do :; done\necho made > "$file"\necho 1\n')
    assert build(folder, "build_ext", "--inplace", "--build-lib", "lib", CXX=str(compiler)).returncode == 0
    assert not list(folder.rglob("not_built.txt")) and len(list(folder.rglob("_C.*"))) == 2


def test_flags_that_no_shell_would_take(tmp_path: Path) -> None:
    """Setuptools, which reads the same variables, ended the installation with a traceback."""
    done = build(copy(tmp_path / "a"), CFLAGS="-O0 'open")
    assert done.returncode == 0 and "the references will do the work: CFLAGS: -O0 'open: No closing quotation" in done.stderr


def test_a_setuptools_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a line, where pip was told to use what is there."""
    monkeypatch.setattr("setuptools.__version__", "65.5.0")
    with pytest.raises(SystemExit, match=r"^modelcenter: setuptools 65\.5\.0; 77 or newer: pip install -U setuptools, or "):
        runpy.run_path(str(HOUSE / "setup.py"))


def test_a_source_that_cannot_be_written(tmp_path: Path) -> None:
    """Somebody else's checkout, or a read-only disk: nothing is left there, nor elsewhere."""
    folder, scratch = copy(tmp_path / "a"), tmp_path / "scratch"
    scratch.mkdir()
    before = set(folder.rglob("*"))
    done = build(folder, "bdist_wheel", "-d", str(tmp_path / "made"), first="import os; os.access = lambda *_: False",
                 CXX="/nonexistent/g++", TMPDIR=str(scratch), PYTHONDONTWRITEBYTECODE="1")  # fmt: skip
    assert done.returncode == 0 and len(list((tmp_path / "made").glob("*.whl"))) == 1, done.stderr
    assert set(folder.rglob("*")) == before and not list(scratch.iterdir())


@pytest.mark.parametrize("free", [0, 2**30])
def test_a_disk_that_compiling_fills(free: int, tmp_path: Path) -> None:
    """Has no room for the package before the objects go; where it has, they are kept for the next build."""
    folder, compiler = copy(tmp_path / "a"), tmp_path / "c++"
    compiler.write_text('#!/bin/sh\necho 1\nfor file; do :; done\n[ $1 = --version ] || ! echo object > "$file"\n')
    compiler.chmod(0o755)
    usage = f"import shutil, types; shutil.disk_usage = lambda _: types.SimpleNamespace(free={free})"
    done = build(folder, "build_ext", "--build-lib", "lib", "--build-temp", "objects", first=usage, CXX=str(compiler))
    assert done.returncode == 0 and "the references will do the work" in done.stderr
    assert bool(list(folder.glob("objects/*.o"))) is (free > 0)


def test_with_a_pybind11_that_does_not_load(tmp_path: Path) -> None:
    """Nor does anything else that nobody has thought of end an installation."""
    folder = copy(tmp_path / "a")
    (folder / "pybind11").mkdir()
    (folder / "pybind11" / "__init__.py").write_text("raise RuntimeError('made for another one')")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert "the references will do the work: made for another one" in done.stderr and not list(folder.rglob("_C.*"))


def test_what_is_gone_is_not_installed(tmp_path: Path) -> None:
    """A checkout keeps its build folder from one `pip install .` to the next, and a `git pull` between the two may delete files."""
    folder = copy(tmp_path / "a")
    for there in (True, False):
        done = build(folder, "build", "--build-lib", "lib", CXX="/nonexistent/g++")
        assert done.returncode == 0, done.stderr
        assert (folder / "lib/modelcenter/models/gpt.py").exists()
        for name in ("recipes/tag.yaml", "models/bloom.py"):
            assert (folder / "lib/modelcenter" / name).exists() is there
            (folder / "modelcenter" / name).unlink(missing_ok=True)
    assert build(folder, "build_py", "--build-lib", ".").returncode == 0  # in place, nothing goes
    assert (folder / "modelcenter/models/gpt.py").exists()


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
    """In a folder with a space in its name, beside variables that say nothing."""
    folder = copy(tmp_path / "a b")
    done = build(folder, MAX_JOBS="many", MODELCENTER_LEVELS="1 avx9")
    assert "MAX_JOBS: many; a number\n" in done.stderr and "MODELCENTER_LEVELS: avx9; 0, 1 and 2" in done.stderr
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
    """Wherever they are made, and whoever may write there; CUDA's part too where there is an nvcc."""
    digests = set()
    for name, umask in (("one", 0o022), ("two/deeper", 0o002)):
        folder = copy(tmp_path / name)
        for file in folder.rglob("*"):
            file.chmod(0o777 & ~umask if file.is_dir() else 0o666 & ~umask)
        scratch = tmp_path / name.replace("/", "-")
        scratch.mkdir(exist_ok=True)
        done = build(folder, "bdist_wheel", "-d", "made", umask=umask, SOURCE_DATE_EPOCH="1700000000", MODELCENTER_CUDA="1",
                     MODELCENTER_CUDA_ARCHS="90", MODELCENTER_LEVELS="0", TMPDIR=str(scratch))  # fmt: skip
        assert done.returncode == 0, done.stderr
        (wheel,) = (folder / "made").glob("*.whl")
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(digests) == 1
