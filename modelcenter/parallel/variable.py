"""The environment variables that a launcher sets. Torch-free."""

import os
import re

from ..errors import counted, refuse

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # by which torch is told how to manage a GPU's memory; the newer first
GROWING = "expandable_segments:True"  # said there, segments grow, as more pieces of memory are added at the next address

WANTED = {  # of what is said to one `modelcenter train` a machine; the others torchrun says
    "NNODES": "how many machines there are",
    "NODE_RANK": "which of the NNODES machines this is, the first one 0",
    "MASTER_PORT": "the same on every machine, free on the first",
}


def variable(name: str, low: int, high: int, default: int | None = None) -> int:
    """A number that the launcher put into the environment."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        wanted = f"a number from {low} to {high}; {WANTED.get(name, 'start with torchrun, one process a rank')}"
        refuse("environment", name, "missing" if text is None else repr(text), wanted)
    return int(text)


def check_address() -> None:
    """Refuse a machine of several that is not told where the first rank is."""
    if not os.environ.get("MASTER_ADDR"):
        refuse("environment", "MASTER_ADDR", "missing", "the first machine's name or address, on every one")
    variable("MASTER_PORT", 1, 2**16 - 1)


def check_world(ranks: int) -> None:
    """Refuse a launcher that has started another number of processes than the machine has ranks."""
    size = variable("WORLD_SIZE", 1, 2**20)
    if size != ranks:
        refuse("environment", "WORLD_SIZE", f"{size}, for a machine of {counted(ranks, 'rank')}",
               "start as many, or machine.fsdp=auto, which takes those that there are")
