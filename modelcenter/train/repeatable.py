"""`machine.deterministic`: on a GPU a run has the same bits as another run of the same recipe, and a resumed run the same as an
uninterrupted one. On a CPU this is always so."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic as memory

from ..errors import refuse
from ..parallel.machine import Machine

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS' products are those of every other run with one of these workspaces, says torch
WORKSPACES = ":4096:8", ":16:8"
NONE_FOR = re.compile(r"^(\S+) does not have a deterministic implementation")  # torch's words


@contextmanager
def repeatable(machine: Machine) -> Iterator[None]:
    """If the machine asks for it, torch uses only kernels that add up in a fixed order while this lasts, and attention is ours.
    Errors: `InputError` for an operator without such a kernel, and for a workspace setting with which matrix products have none."""
    if not machine.deterministic:
        yield
        return
    found = os.environ.setdefault(VARIABLE, WORKSPACES[0])
    if found not in WORKSPACES:
        refuse(None, VARIABLE, f"{found!r}, with machine.deterministic", f"{' or '.join(WORKSPACES)}, or nothing")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled: bool = memory.fill_uninitialized_memory  # type: ignore[attr-defined]  # a property of the module
    torch.use_deterministic_algorithms(True)
    # nothing is read before it is written, and to fill it would take a pass
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # as above
    try:
        yield
    except RuntimeError as error:
        if named := NONE_FOR.match(str(error)):
            none = f"true, and {named[1]} has no kernel that adds up in one order"
            refuse(None, "machine.deterministic", none, "machine.deterministic=false")
        raise
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]  # as above
