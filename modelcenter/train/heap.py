"""On a CPU, keeps the memory that one step frees for the next step.

Each step allocates gigabytes and frees them. glibc returns freed memory at the top of its heap to the system, which must then clear
every page again for the next step.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# parameters of mallopt(3). Larger blocks stay the system's own, or a heap of ragged batches would be full of holes that fit none
TRIM_THRESHOLD, MMAP_THRESHOLD, LARGE = -1, -3, 32 << 20
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """While this lasts, freed memory of the host is kept, if `device` is the CPU; afterwards it is returned. Without glibc, or if
    the environment already sets how it does this, nothing happens."""
    libc = ctypes.CDLL(None)
    told = any(name in os.environ for name in VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if device.type != "cpu" or told or not hasattr(libc, "gnu_get_libc_version"):
        yield
        return
    libc.mallopt(MMAP_THRESHOLD, LARGE)
    libc.mallopt(TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        libc.mallopt(TRIM_THRESHOLD, 2 * LARGE)  # as glibc itself sets it in a process that frees blocks of this size
        libc.malloc_trim(0)
