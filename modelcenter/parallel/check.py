"""Combinations of settings that a machine profile must not have: refused by name, before anything is allocated."""

from ..errors import refuse
from .machine import Machine


def check(machine: Machine) -> None:
    """Refuse settings that do not go together, and `devices` for which no layout has been chosen yet."""
    if machine.devices is not None:
        refuse(None, "machine.devices", f"{machine.devices}, where nothing is trained", "machine.fsdp=N, or leave it out")
    if machine.sequence_parallel and machine.tensor_parallel == 1:
        found = "true with tensor_parallel=1, which cuts nothing"
        refuse(None, "machine.sequence_parallel", found, "tensor_parallel=2 or more, or false")
    if not compiles(machine):
        found = "full, with compile and tensor_parallel: torch's compiler then fails in the backward"
        refuse(None, "machine.recompute", found, "selective or none, or no compile")
    if machine.zero != 3 and not machine.wrapped:
        refuse(None, "machine.zero", f"{machine.zero} with fsdp=1, which shards nothing", "fsdp=2 or more, offload, or zero=3")


def compiles(machine: Machine) -> bool:
    """Whether torch's compiler supports the settings: it cannot recompute whole blocks of DTensors (torch 2.13)."""
    return not (machine.compile and machine.tensor_parallel > 1 and machine.recompute == "full")
