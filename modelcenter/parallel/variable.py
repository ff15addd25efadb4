"""What a launcher says through the environment. Torch-free."""

import os
import re

from ..errors import counted, refuse

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # by which torch is told how to manage a GPU's memory; the newer first
GROWING = "expandable_segments:True"  # said there, segments grow, as more pieces of memory are added at the next address


def variable(name: str, low: int, high: int, default: int | None = None) -> int:
    """A number that the launcher put into the environment."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        wanted = f"a number from {low} to {high}; start with torchrun, one process a rank"
        refuse("environment", name, "missing" if text is None else repr(text), wanted)
    return int(text)


def check_world(ranks: int) -> None:
    """Refuse a launcher that has started another number of processes than the machine has ranks."""
    size = variable("WORLD_SIZE", 1, 2**20)
    if size != ranks:
        refuse("environment", "WORLD_SIZE", f"{size}, for a machine of {counted(ranks, 'rank')}",
               "start as many, or machine.fsdp=auto, which takes those that there are")
