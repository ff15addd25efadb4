"""The device and the precision in which a rank computes."""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from ..errors import counted, nearest, refuse
from .machine import Machine
from .variable import variable

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: object) -> None:
    """Refuse anything but the name of a precision in which forwards run."""
    if precision is not None and precision not in (known := ("fp32", *LOW)):
        refuse(None, "precision", repr(precision), nearest(str(precision), known))


def device_of(machine: Machine) -> torch.device:
    """The device of this rank: the one in `machine.device`, or the accelerator that torch finds; LOCAL_RANK gives its number."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if machine.device == "cpu" or (machine.device == "auto" and found is None):
        return torch.device("cpu")
    if found is None or machine.device not in ("auto", found.type):
        absent = f"{machine.device}, which torch does not find here"
        refuse(None, "machine.device", absent, "machine.device=auto or machine.device=cpu")
    count = torch.accelerator.device_count()
    if machine.ranks > 1 and (local := variable("LOCAL_RANK", 0, 2**20, default=0)) >= count:
        key = max(("fsdp", "tensor_parallel", "replicate"), key=partial(getattr, machine))
        ranks = counted(max(local + 1, variable("LOCAL_WORLD_SIZE", 1, 2**20, default=1)), "rank")
        refuse(None, f"machine.{key}", f"{ranks} on a host with {counted(count, 'GPU')}", "fewer ranks, or more hosts (NNODES)")
    return torch.device(found.type, variable("LOCAL_RANK", 0, count - 1, default=0))


def home_of(model: nn.Module) -> torch.device:
    """The device on which a model computes. Its weights may be kept on the host."""
    first: Any = next(model.parameters())
    if not hasattr(first, "placements") or first.device.type in (first.device_mesh.device_type, "meta"):
        return torch.device(first.device)
    return torch.device(first.device_mesh.device_type, torch.accelerator.current_device_index())


def check_device(device: str | torch.device) -> None:
    """Refuse a name that does not name a device, and a device that this machine does not have."""
    try:
        named = torch.device(device)
    except (RuntimeError, TypeError):
        refuse(None, "device", repr(device), "cpu, cuda, cuda:1, mps, xpu or meta")
    if named.type in ("cpu", "meta"):
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != named.type:
        refuse(None, "device", f"{str(device)!r}, which torch does not find here", f"cpu{f' or {found.type}' if found else ''}")
    count = torch.accelerator.device_count()
    if (named.index or 0) >= count:
        refuse(None, "device", repr(str(device)), f"a number below {count}: so many are here")


def count_of(machine: Machine) -> int:
    """The number of devices that `machine.devices` means, on all NNODES machines, which are assumed to be alike."""
    kind, nodes = device_of(machine).type, variable("NNODES", 1, 2**20, default=1)
    here = torch.accelerator.device_count() if kind != "cpu" else 1
    if not isinstance(machine.devices, int):
        return here * nodes
    if kind != "cpu" and machine.devices > here * nodes:
        refuse(None, "machine.devices", f"{machine.devices}, and {here * nodes} here", "all, or fewer")
    return machine.devices


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """(bytes free for this process, bytes in all) of a device; None if torch cannot tell. On a CPU this needs psutil."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), total
    if device.type != "cpu":
        return None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = total
    if find_spec("psutil") is not None:
        import psutil

        free = int(psutil.virtual_memory().available)
    there = [(free, total), *limits()]
    return min(free for free, _ in there), min(total for _, total in there)


# Linux's control groups of version 1 and 2: the folder, the files of a group's limit and of what it has, the row of files kept
FIRST_GROUPS = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
SECOND_GROUPS = ("", "memory.max", "memory.current", "inactive_file")


def limits(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> Iterator[tuple[int, int]]:
    """(bytes free, bytes in all) of each control group with a memory limit to which this process belongs: a container's, or a
    job's. The page cache counts as free. Both versions of Linux's control groups; other systems have none."""
    with suppress(OSError):
        for line in proc.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            folder, most, taken, kept = FIRST_GROUPS if kinds else SECOND_GROUPS
            top, own = groups / folder, PurePosixPath(path.lstrip("/"))
            for group in (top / own, *(top / above for above in own.parents)):  # of which a container may see the last alone
                with suppress(OSError, ValueError):  # ValueError: "max"
                    total, used = int((group / most).read_text()), int((group / taken).read_text())
                    stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                    yield max(0, total - used + int(stat.get(kept, 0))), total
