"""modelcenter._C out of csrc/*.cu and module.cpp alone, by g++ and the headers of this folder.

    python tests/emulate/build.py FOLDER [--checked] [--source csrc] [--only norm,adamw] [flags of the compiler ...]

prints the extension's file. What is compiled is a copy of csrc with the three things changed that C++ has no words for; what was
made of the same bytes by the same command is taken over. --checked: under sanitizers, whose libraries a process has to load first:
--preload prints them.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).parent.resolve()
CSRC = HERE.parent.parent / "csrc"
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-w",
         "-ftrivial-auto-var-init=pattern"]  # a variable without a value has a strange one  # fmt: skip
CHECKED = ("-O0", "-g1", "-fsanitize=address,alignment,bounds", "-fno-sanitize-recover=all")
DEFINES = ["-DMC_EMULATED", "-DMC_CUDA", "-DMC_HOPPER", "-DMC_LEVEL=100", '-DMC_VERSION="0"']
ARCHS = "75 80 90"  # of every chip that is emulated
SHARED = re.compile(r"(extern )?__shared__ ([^;]+);")


def declared(match: re.Match[str]) -> str:
    """Shared memory: `T a[8], b;` or `extern T c[];`."""
    dynamic, text = match.groups()
    if dynamic:
        kind, name = text.removesuffix("[]").rsplit(" ", 1)
        return f"{kind}* const {name} = emulate::dynamic<{kind}>();"
    flat = text
    while "<" in flat:
        flat = re.sub(r"<[^<>]*>", "", flat)
    names = re.findall(r"(\w+)(?:\[[^]]*\])*(?:,|$)", flat)
    return f"static {text};" + "".join(f" emulate::fresh({name});" for name in names)


def plain(text: str) -> str:
    """CUDA as C++ has it; lines stay where they are."""
    return SHARED.sub(declared, text).replace("<<<", " ->* emulate::Grid(").replace(">>>", ")")


def version() -> str:
    text = (HERE.parent.parent / "modelcenter" / "__init__.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    assert found
    return found[1]


def included(source: Path) -> set[Path]:
    """A file of csrc and those that it includes, directly or not."""
    found, new = {source}, {source}
    while new:
        names = {name for file in new for name in re.findall(r'^#include "(.+)"$', file.read_text(), re.M)}
        new = {source.parent / name for name in names} - found
        found |= new
    return found


def compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or "c++"


def preload() -> str:
    """What LD_PRELOAD names where an extension was built with CHECKED: Python itself knows nothing of it."""
    names = ("libasan.so", "libstdc++.so")
    return " ".join(subprocess.check_output([compiler(), f"-print-file-name={name}"], text=True).strip() for name in names)


def build(folder: Path, source: Path = CSRC, flags: Sequence[str] = ("-O1",), only: Sequence[str] = (), archs: str = ARCHS) -> Path:
    """`only`: of these .cu files, the others being left out. `archs`: what the build says that it is for."""
    copy = folder / "csrc"
    copy.mkdir(parents=True, exist_ok=True)
    kernels = {f"{name}.cu" for name in only} or {f.name for f in source.glob("*.cu")}
    files = [f for f in sorted(source.iterdir()) if f.suffix == ".h" or f.name in {"module.cpp", "device.cu", *kernels}]
    for file in files:
        (copy / file.name).write_text(plain(file.read_text()))
    cxx = compiler()
    defines = [d.replace('MC_VERSION="0"', f'MC_VERSION="{version()}"') for d in DEFINES]
    defines += [f'-DMC_ARCHITECTURES="{archs}"', "-D__CUDA_ARCH_LIST__=" + ",".join(f"{arch}0" for arch in archs.split())]
    places = ["-I", str(HERE), "-include", "cuda_runtime.h", "-D__CUDACC__"]
    python = ["-I", sysconfig.get_paths()["include"], "-I", pybind11.get_include()]
    ours = b"".join(f.read_bytes() for f in sorted(HERE.glob("*.h")))

    def compile_one(file: Path) -> Path:
        if file.name == "module.cpp":  # which the other build has checked
            command = [cxx, *FLAGS, "-O0", *defines, *python]
        else:
            command = [cxx, *FLAGS, *flags, *defines, *(places if file.suffix == ".cu" else ["-O2"])]
        command += ["-x", "c++", "-c", str(file)]
        made = folder / f"{file.stem}.o"
        parts = b"".join(f.read_bytes() for f in sorted(included(file)))
        digest = hashlib.sha256(" ".join([*command[:-1], file.name]).encode() + ours + parts).hexdigest()
        said = made.with_suffix(".txt")
        if not (made.exists() and said.exists() and said.read_text() == digest):
            said.unlink(missing_ok=True)
            subprocess.run([*command, "-o", str(made)], check=True)
            said.write_text(digest)
        return made

    units = [copy / f.name for f in files if f.suffix != ".h"] + sorted(HERE.glob("*.cpp"))
    units.sort(key=lambda f: -f.stat().st_size)
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1) as pool:
        made = list(pool.map(compile_one, units))
    target = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([cxx, "-shared", *(str(m) for m in made), *flags, "-o", str(target)], check=True)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--source", type=Path, default=CSRC)
    parser.add_argument("--only", default="")
    parser.add_argument("--checked", action="store_true")
    parser.add_argument("--preload", action="store_true")
    o, flags = parser.parse_known_args()
    if o.preload:
        print(preload())
    else:
        flags = flags or (CHECKED if o.checked else ["-O1"])
        print(build(o.folder.resolve(), o.source, flags, [name for name in o.only.split(",") if name]))
