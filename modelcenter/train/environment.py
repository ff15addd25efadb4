"""environment.json: the environment in which a run was made, one object for each process that worked on it, in order.

It has what a colleague needs to repeat the run: versions, the commit of the folder in which it was started, the command, the
machine, and the data files. Environment variables are not written, and if the name of one says that it is secret, its value is
removed wherever it occurs.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.atomic import atomic_write
from ..data.config import DataConfig
from ..data.read import find_files
from ..data.table import PREFIX, is_saved
from ..errors import refuse

FILE = "environment.json"
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "transformers", "tensorboard", "matplotlib")
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
HASHED = 64 << 20  # bytes of data that are read for their hash: a tenth of a second
LISTED = 100  # files


def versions() -> dict[str, str]:
    """The versions of the packages that a run may use."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def surroundings(data: DataConfig) -> dict[str, Any]:
    """The surroundings of this process."""
    return {
        "started": now(), "command": sys.argv, "folder": os.getcwd(), "commit": commit(), "host": platform.node(),
        "cores": os.cpu_count(), "cpu": torch.backends.cpu.get_cpu_capability(), "gpus": gpus(), "cuda": torch.version.cuda,
        "packages": versions(), "data": {path: describe_data(path, data) for path in paths(data)},
    }  # fmt: skip


def now() -> str:
    """The time to the second, with its zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def gpus() -> list[str]:
    """The names and sizes of the GPUs that torch sees."""
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{card.name}, {card.total_memory / 2**30:.0f} GiB" for card in cards]


def commit() -> str | None:
    """The commit of the repository around the current folder, with `-dirty` if a tracked file has changed; None if there is
    none."""
    said = git("rev-parse", "HEAD")
    return None if not said else f"{said}-dirty" if git("status", "--porcelain", "--untracked-files=no") else said


def git(*arguments: str) -> str | None:
    """What git prints in the current folder; None if it is missing, refuses, or takes too long. It runs no program of the
    repository's own configuration, and asks no questions."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, stdin=subprocess.DEVNULL,
                              env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0"})  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def paths(data: DataConfig) -> list[str]:
    """The data sources that a recipe names."""
    return [name for path in (data.path, data.eval_path) for name in ([path] if isinstance(path, str) else path or ())]


def describe_data(path: str, data: DataConfig) -> dict[str, Any]:
    """The number of files of a source, their bytes, and a hash: of their contents if these are small, otherwise of their names,
    sizes and times of change. A few files are listed one by one."""
    if path.startswith(PREFIX):
        return {"name": path.removeprefix(PREFIX)}
    here = Path(os.path.expanduser(path))
    files = sorted(f for f in here.rglob("*") if f.is_file()) if is_saved(here) else find_files(path, data.format)
    files = sorted({*files, *(other for f in files if f.suffix == ".bin" and (other := f.with_suffix(".idx")).is_file())})
    stats = [(file, file.stat()) for file in files]
    size = sum(stat.st_size for _, stat in stats)
    out: dict[str, Any] = {"files": len(files), "bytes": size}
    if size <= HASHED:
        whole = sha256()
        for file in files:
            whole.update(file.read_bytes())
        out["sha256_of_contents"] = whole.hexdigest()
    else:
        listing = "\n".join(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)
        out["sha256_of_names_sizes_times"] = sha256(listing.encode(errors="surrogateescape")).hexdigest()
    if len(files) <= LISTED:
        out["list"] = [{"name": str(file), "bytes": stat.st_size, "changed": stat.st_mtime} for file, stat in stats]
    return out


def check_data(folder: Path, data: DataConfig) -> None:
    """Refuse data that differ from those with which the run in `folder` began, because a state's position in them would mean
    nothing. Files too large to be hashed are compared by number and size, so that a copy of them counts as the same."""
    known = found_data(folder)
    for path in paths(data):
        if not (then := described(known, path)):
            continue
        here = describe_data(path, data)
        for key in ("files", "bytes", "sha256_of_contents"):
            if key in then and key in here and then[key] != here[key]:
                found = f"not what it was when the run began ({key} {str(then[key])[:12]} then, {str(here[key])[:12]} now)"
                refuse(path, "data", found, "the data as they were, or another output_dir")


def found_data(folder: Path) -> dict[str, Any]:
    """What `describe_data` returned for each source when the run in `folder` first read it."""
    out: dict[str, Any] = {}
    for entry in read_processes(folder):
        out = {**entry["data"], **out} if isinstance(entry.get("data"), dict) else out
    return out


def described(known: dict[str, Any], path: str) -> dict[str, Any]:
    """What `found_data` holds of a source, whose path may have had a secret in it when it was written; empty if nothing."""
    found: dict[str, Any] = known.get(path, known.get(redacted(path), {}))
    return found


def same_bytes(folder: Path, then: str, here: str, data: DataConfig) -> bool:
    """Whether `here` holds what the run in `folder` read from `then`: as many files of the same kinds, with the same contents.
    False if they are too large to be hashed, because that is not known."""
    known, there = described(found_data(folder), then), Path(os.path.expanduser(here))
    if "sha256_of_contents" not in known or "list" not in known or here.startswith(PREFIX) or not there.exists():
        return False
    found = describe_data(here, data)
    kinds = [[Path(row["name"]).suffix for row in one.get("list", ())] for one in (known, found)]
    return kinds[0] == kinds[1] and all(known[key] == found.get(key) for key in ("files", "bytes", "sha256_of_contents"))


def redacted(text: str) -> str:
    """`text` without the values of environment variables whose names say that they are secret, and without passwords in URLs."""
    hidden = {value: name for name, value in os.environ.items() if SECRET.search(name) and len(value) > 5}
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, f"${hidden[value]}").replace(json.dumps(value)[1:-1], f"${hidden[value]}")
    return re.sub(r"://[^/\s@\"]+@", "://***@", text)


def read_processes(folder: Path) -> list[dict[str, Any]]:
    """What `write_processes` wrote; empty if there is no such file, or it holds something else."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    processes = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    return [entry for entry in processes if {"started", "from_step"} <= entry.keys()]  # without them there is nothing to tell


def write_processes(folder: Path, processes: list[dict[str, Any]]) -> None:
    """Write all processes of a run. Errors: `InputError` if the disk refuses."""
    atomic_write(folder / FILE, (json.dumps(hushed(processes), indent=1, default=str) + "\n").encode())


def hushed(value: Any) -> Any:
    """`value` with all its texts `redacted`. No number is: the file would be none that can be read if digits of it were a secret's,
    as those of MAX_TOKENS may be."""
    if isinstance(value, dict):
        return {redacted(key): hushed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [hushed(one) for one in value]
    return redacted(value) if isinstance(value, str) else value
