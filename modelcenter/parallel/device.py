"""Where a rank computes."""

import os

import torch

from ..errors import refuse
from .machine import Machine


def device_of(machine: Machine) -> torch.device:
    """The device of this rank: `machine.device`, or the accelerator that torch finds, by the launcher's LOCAL_RANK."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if machine.device == "cpu" or (machine.device == "auto" and found is None):
        return torch.device("cpu")
    if found is None or machine.device not in ("auto", found.type):
        refuse(None, "machine.device", f"{machine.device}, which torch does not find here", "device=auto or device=cpu")
    return torch.device(found.type, int(os.environ.get("LOCAL_RANK", 0)))
