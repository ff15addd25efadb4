"""Builds modelcenter._C, the fused kernels, out of csrc/; everything else about the package is in pyproject.toml.

No install can fail here. With nvcc there are CUDA and CPU kernels, with a C++ compiler alone CPU kernels, without one none, and
the package then computes with its references; `modelcenter doctor` says which of the three it is, and why. torch is not needed:
the kernels take plain pointers, so one build serves every torch.

    MODELCENTER_CUDA=0              leave CUDA out, though nvcc is there
    MODELCENTER_CUDA_ARCHS="90"     machine code for these architectures; PTX, for later ones, comes with it. Default: for the GPUs
                                    that are here, or without any "all": 75 80 90 100 120, as far as nvcc knows them
    MODELCENTER_LEVELS="1"          only these instruction sets of LEVELS, for builds that are only tested
    MODELCENTER_OBJECTS=folder      keeps what is compiled; another build of the same sources by the same commands takes it over
    CUDA_HOME, CXX, CFLAGS, NVCCFLAGS, LDFLAGS, MAX_JOBS      as everywhere
    SOURCE_DATE_EPOCH=seconds       also keep out of the kernels what differs from build to build (make wheel)
"""

import atexit
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # with pip's --no-build-isolation; it would end in a traceback below
    sys.exit(f"modelcenter: setuptools {setuptools.__version__}; 77 or newer: pip install -U setuptools, or use build isolation")

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
COMPILERS = ("g++", "c++", "clang++")  # where CXX names none, the first that is there
ARCHITECTURES = "75 80 90 100 120"  # 86 and 89 run the machine code of 80, as 103 and 121 that of 100 and 120
LEVELS = {  # MC_LEVEL: the flags of an instruction set; module.cpp asks the processor for the same ones
    0: [],  # where a compiler knows no other, or where asked for
    1: ["-mavx2", "-mfma", "-mf16c"],
    2: ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"],
}
# Of what -O3 adds, the kernels, whose vectors are written out, gain by this alone; all of it takes up to twice as long to compile.
FAST = ["-O2", "-funswitch-loops", "-Wno-ignored-optimization-argument"]
FLAGS = [*FAST, "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wall",
         "-Wno-psabi", "-Wno-unknown-warning-option", "-Wno-maybe-uninitialized", "-Wno-uninitialized",
         f"-ffile-prefix-map={ROOT}=."]  # fmt: skip
WARPGROUPS = ("attention", "attention_backward")  # have code for sm_90a, whose instructions no other chip has, in place of sm_90
TEXT: dict[str, Any] = {"text": True, "errors": "replace"}  # whatever bytes a compiler, or a wrapper of one, prints
REASON = "not_built.txt"  # beside the kernels, or where they would be: why some or all were not built
EXACT = {"adamw": (["-ffp-contract=off"], ["-fmad=false"])}  # agree with their reference to the last bit: no a * b + c in one


def output(*command: str) -> str:
    """What a command prints, or nothing if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=True, **TEXT).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def accepts(cxx: list[str], flags: list[str]) -> bool:
    """Whether a compiler knows these flags."""
    command = [*cxx, *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return not subprocess.run(command, capture_output=True, timeout=60).returncode
    except (OSError, subprocess.SubprocessError):
        return False


def find_nvcc() -> str | None:
    """An nvcc that answers; on the PATH it may be a wrapper script, so it is asked and not looked at."""
    said = os.environ.get("MODELCENTER_CUDA") or "1"
    if said == "0":
        return None
    if said != "1":
        note(f"MODELCENTER_CUDA: {said}; 0 or 1")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/opt/cuda"]
    found = [str(Path(home, "bin", "nvcc")) for home in homes if home]
    found.insert(2, shutil.which("nvcc") or "")
    return next((nvcc for nvcc in found if nvcc and "release" in output(nvcc, "--version")), None)


def architectures(nvcc: str) -> list[str]:
    """Those wanted that this nvcc knows, rising."""
    known = set(re.findall(r"compute_(\d+)", output(nvcc, "--list-gpu-arch")))
    wanted = os.environ.get("MODELCENTER_CUDA_ARCHS", "").strip() or " ".join(present() & known) or "all"
    found = sorted(known.intersection(re.split(r"[ ,;]+", ARCHITECTURES if wanted == "all" else wanted)), key=int)
    if not found:
        numbers = " ".join(sorted(known, key=int)) or "no architecture by number, being too old"
        raise OSError(f"MODELCENTER_CUDA_ARCHS: {wanted}: {nvcc} knows {numbers}")
    return found


def jobs() -> int:
    """How many compilers run at a time."""
    said = os.environ.get("MAX_JOBS", "").strip() or "0"
    if not said.isdecimal():
        note(f"MAX_JOBS: {said}; a number")
    return (int(said) if said.isdecimal() else 0) or os.cpu_count() or 1


def note(text: str) -> None:
    print(f"modelcenter: {text}", file=sys.stderr)


def present() -> set[str]:
    """The architectures of this machine's GPUs, as the driver tells them: "90"."""
    said = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return {line.strip().replace(".", "") for line in said.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())}


def gencode(archs: list[str], warpgroups: bool = False) -> list[str]:
    """Machine code for each architecture, out of two translations to PTX: one before and one from sm_80 on, which the kernels tell
    apart. Translating for each alone takes three times as long; `warpgroups`: sm_90 has one. Later chips compile the last PTX."""
    targets = []
    for virtual, group in (("75", [a for a in archs if int(a) < 80]), ("80", [a for a in archs if int(a) >= 80])):
        codes = [f"sm_{arch}" for arch in group if not (warpgroups and arch == "90")]
        if group and group[-1] == archs[-1]:
            codes.append(f"compute_{virtual}")
        if codes:
            targets.append(f"-gencode=arch=compute_{virtual},code=[{','.join(codes)}]")
    if warpgroups and "90" in archs:
        targets.append("-gencode=arch=compute_90a,code=sm_90a")
    return targets


def libraries(nvcc: str) -> Path | None:
    """The folder of libcudart_static.a, from where this nvcc says its own files are."""
    steps = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull], capture_output=True, **TEXT)
    tops = [Path(top) for top in re.findall(r"^#\$ TOP=(.*)$", steps.stderr, re.M)]
    for top in [*tops, Path(nvcc).resolve().parent.parent]:
        for folder in (top / "lib64", top / "targets" / f"{platform.machine()}-linux" / "lib", top / "lib"):
            if (folder / "libcudart_static.a").exists():
                return folder
    return None


class BuildExtension(build_ext):
    """Compile each kernel file once for each instruction set, the .cu files for all architectures, and link."""

    def run(self) -> None:
        """As setuptools does it, which asks for a compiler of its own first, by the same variables, and ends where one is wrong."""
        name = Path(self.get_ext_filename(self.extensions[0].name))
        files = (name, name.with_name(REASON))
        for file in files:  # what an earlier build, perhaps of other sources, has left would be taken for this one's
            gone(Path(self.build_lib, file))
        self.build_or_not(*(Path(self.build_lib, file) for file in files))
        for file in files if self.inplace else ():
            gone(ROOT / file)
            if Path(self.build_lib, file).exists():
                try:
                    shutil.copy(Path(self.build_lib, file), ROOT / file)
                except OSError as error:
                    gone(ROOT / file)
                    note(f"{file} is not in the source folder: {error}")

    def build_or_not(self, target: Path, reason: Path) -> None:
        """The kernels, or as many as can be built; what cannot is said, and for the doctor in a file beside them."""
        nvcc = find_nvcc()
        try:
            try:
                self.build(target, nvcc)
            except (OSError, ValueError) as error:
                if nvcc is None:
                    raise
                note(f"the CPU's kernels alone, for CUDA's were not built: {error}")
                self.make_room()
                self.build(target, None)
                leave(reason, error)
        except Exception as error:  # whatever it is: the package works without
            gone(target)
            note(f"no compiled kernels, the references will do the work: {error}")
            self.make_room()
            leave(reason, error)

    def make_room(self) -> None:
        """Objects on a full disk would leave no room for the package itself."""
        with suppress(OSError):
            full = shutil.disk_usage(self.objects()).free < 32 << 20
            for made in self.objects().glob("*.o") if full else ():
                gone(made)

    def objects(self) -> Path:
        """The folder of what is compiled."""
        return Path(os.environ.get("MODELCENTER_OBJECTS") or self.build_temp).resolve()

    def build(self, target: Path, nvcc: str | None) -> None:
        import pybind11

        cxx = words("CXX") or [next(filter(None, map(shutil.which, COMPILERS)), COMPILERS[0])]
        if not output(*cxx, "--version"):
            raise OSError(f"no C++ compiler: {cxx[0]} does not run")
        archs = architectures(nvcc) if nvcc else []
        runtime = libraries(nvcc) if nvcc else None
        if nvcc and not runtime:
            raise OSError(f"{nvcc}: its libcudart_static.a is not found")
        temp = self.objects()
        temp.mkdir(parents=True, exist_ok=True)
        extra = words("CFLAGS")
        version = f'-DMC_VERSION="{self.distribution.get_version()}"'
        headers = ["-I", self.get_python_include(), "-I", pybind11.get_include(), f"-ffile-prefix-map={pybind11.get_include()}=."]
        cuda = ["-DMC_CUDA"] if runtime else []

        steps: list[tuple[Path, list[str], Path]] = []  # source, command, object
        module = temp / "module.o"
        steps.append((CSRC / "module.cpp", [*cxx, *FLAGS, *cuda, version, *headers, *extra, "-c"], module))
        levels = LEVELS if platform.machine() in ("x86_64", "AMD64") else {0: []}
        wanted = os.environ.get("MODELCENTER_LEVELS", "").split() or ["1", "2"]
        if unknown := {*wanted} - {*map(str, LEVELS)}:
            note(f"MODELCENTER_LEVELS: {' '.join(sorted(unknown))}; 0, 1 and 2 are known")
        levels = {level: flags for level, flags in levels.items() if str(level) in wanted and accepts(cxx, flags)} or {0: []}
        for source in sorted(CSRC.glob("*.cpp")):
            if source.name != "module.cpp":
                for level, flags in levels.items():
                    exact = EXACT.get(source.stem, ([], []))[0]
                    command = [*cxx, *FLAGS, *flags, *exact, f"-DMC_LEVEL={level}", *extra, "-c"]
                    steps.append((source, command, temp / f"{source.stem}.{level}.o"))
        if nvcc and runtime:
            names = f'-DMC_ARCHITECTURES="{" ".join(archs)}"'
            # -O1 is the processor's half, which checks and launches; the GPU's is always compiled with all there is
            flags = ["-O1", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-DMC_LEVEL=100"]
            command = [nvcc, *flags, names, *words("NVCCFLAGS")]
            for source in sorted(CSRC.glob("*.cu")):
                exact = EXACT.get(source.stem, ([], []))[1]
                # nvcc puts a number of the process into file names and a digest of the source's folder into symbols
                fixed = ["-objtemp", "-Xcudafe", f"--orig_src_path_name,csrc/{source.name}"]
                same = fixed if "SOURCE_DATE_EPOCH" in os.environ else []
                groups = source.stem in WARPGROUPS
                targets = [*gencode(archs, groups), *(["-DMC_HOPPER"] if groups and "90" in archs else [])]
                steps.append((source, [*command, *targets, *exact, *same, "-c"], temp / f"{source.stem}.cu.o"))

        steps.sort(key=lambda step: (step[0].suffix != ".cu", -step[0].stat().st_size))  # the longest are not left for the end
        with ThreadPoolExecutor(jobs()) as pool:
            list(pool.map(lambda step: compile_one(*step), steps))
        shared = ["-shared", "-s", "-Wl,--build-id=none"]
        if sys.platform == "darwin":
            shared = ["-bundle", "-undefined", "dynamic_lookup"]
        link = [*cxx, *shared, *(str(made) for _, _, made in steps), *extra, *words("LDFLAGS")]
        if runtime:
            link += [f"-L{runtime}", "-lcudart_static", "-lpthread", "-lrt"]
        target.parent.mkdir(parents=True, exist_ok=True)
        run([*link, "-ldl", "-o", str(target)])

    def get_python_include(self) -> str:
        import sysconfig

        return sysconfig.get_paths()["include"]


class BuildPython(build_py):
    """Begins with an empty folder: what an earlier build has left of files that are gone would be installed with the others."""

    def run(self) -> None:
        if (old := Path(self.build_lib, "modelcenter").resolve()) != ROOT / "modelcenter":
            shutil.rmtree(old, ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """With SOURCE_DATE_EPOCH the modes of its files are no more those of a checkout than their times are."""

    def write_wheelfile(self, *args: Any, **named: Any) -> None:
        super().write_wheelfile(*args, **named)  # what is written last
        for file in Path(self.bdist_dir).rglob("*") if "SOURCE_DATE_EPOCH" in os.environ else ():
            if file.is_file():
                file.chmod(0o755 if file.suffix == ".so" else 0o644)


def gone(file: Path) -> None:
    """Not there, if it can be removed."""
    with suppress(OSError):
        file.unlink(missing_ok=True)


def words(variable: str) -> list[str]:
    """What a variable of the environment says, as a shell would split it."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise OSError(f"{variable}: {text}: {error}") from None


def leave(reason: Path, error: Exception) -> None:
    """Of an error what fits into a line, for the doctor: its first one, and the first in which a compiler complains."""
    first, *rest = [line.strip() for line in str(error).split("\n")]
    complaint = next((line for line in rest if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), "")
    with suppress(OSError):
        reason.parent.mkdir(parents=True, exist_ok=True)
        reason.write_text(": ".join(filter(None, (first, complaint)))[:300], encoding="utf-8", errors="backslashreplace")


def compile_one(source: Path, command: list[str], made: Path) -> None:
    """Compile, unless the object was made of the same bytes by the same command, wherever that was."""
    digest = hashlib.sha256(os.fsencode(shlex.join(command).replace(str(ROOT), "")))
    for part in sorted(included(source)):
        digest.update(part.name.encode() + part.read_bytes())
    said = made.with_suffix(".txt")
    if made.exists() and said.exists() and said.read_text() == digest.hexdigest():
        return
    gone(said)
    gone(made)
    run([*command, str(source.relative_to(ROOT)), "-o", str(made)])
    said.write_text(digest.hexdigest())


def included(source: Path) -> set[Path]:
    """A file of csrc and those that it includes, directly or not."""
    found, new = {source}, {source}
    while new:
        names = {name for file in new for name in re.findall(r'^#include "(.+)"$', file.read_text(), re.M)}
        new = {CSRC / name for name in names} - found
        found |= new
    return found


def run(command: list[str]) -> None:
    """Run a compiler, whose last argument is the file to be made."""
    done, made = subprocess.run(command, capture_output=True, cwd=ROOT, **TEXT), Path(command[-1])
    if done.returncode or not made.exists():
        status = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise OSError(f"{command[0]} made no {made.name}: {status}\n{done.stderr[-4000:]}\n{shlex.join(command)}")
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)


def elsewhere() -> dict[str, dict[str, str]]:
    """Options that build in a folder which goes with this process, where the source is read-only."""
    if os.access(ROOT, os.W_OK):
        return {}
    folder = tempfile.mkdtemp(prefix="modelcenter-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}


setup(
    options=elsewhere(),
    ext_modules=[Extension("modelcenter._C", [], optional=True)],
    cmdclass={"build_py": BuildPython, "build_ext": BuildExtension, "bdist_wheel": Wheel},
)
