"""What a benchmark leaves: a page that names its day, machine and command, printed, and in a folder beside the rows behind it."""

import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelcenter.ops import _kernels


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine(device: str) -> str:
    """What computes, `device` being cuda or cpu, and with which torch."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpuinfo = Path("/proc/cpuinfo")
    said = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":")[1].strip() for line in said if line.startswith("model name")), platform.machine())
    level = getattr(_kernels._C, "cpu_level", "no kernels")
    return f"{name}, {torch.get_num_threads()} threads, {level}, torch {torch.__version__}"


def stamp(device: str) -> dict[str, str]:
    """Where and when a row comes from."""
    return {"date": today(), "machine": machine(device)}


def leave(title: str, device: str, lines: Sequence[str], rows: Sequence[Mapping[str, Any]], out: Path | None) -> None:
    """Print the page; in the folder `out`, if any, it is NAME.md, as the benchmark's file is called, and the rows NAME.jsonl."""
    name = Path(sys.argv[0]).stem
    command = " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]])
    page = "\n".join([f"# {title}, {today()}, {machine(device)}", "", f"`{command}`", "", *lines, ""])
    print(page)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(page)
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
