"""The host's work for FSDP2 and tensor parallelism besides a model's own calls: Python in their hooks and in DTensor's dispatch.

It is counted in equivalent torch calls, as a rehearsal counts those of a model, so that `Chip.call` gives its time as well. The
counts depend on neither sizes nor ranks. `python benchmarks/host.py` measures them on tensors of a few elements; the counts are
rounded from a CPU's and an H200's host, torch 2.13 and 2.11, which differ by 20 %.
"""

from typing import NamedTuple

from torch import nn

from ..parallel.blocks import blocks, units
from ..parallel.machine import Machine
from .twin import tables

# A block, its forward and backward: the hooks, each time that its weights come, that its gradients go, that copies add theirs up.
HOOKS, GATHER, SCATTER, SUM = 75, 45, 75, 30
# A layer that tensor parallelism cuts, forward and backward, and each of its parameters.
CUT, OPERAND = 43, 39
AGAIN = 0.4  # of that is the forward's, which a block that is computed again does twice
SEQUENCE = 1.3  # times as much, where sums over ranks are in parts of the sequence
RECOMPUTED = {"none": 0, "selective": 510, "full": 180}  # a block that is computed again; of selective each call is asked about
AVERAGED = 2.2  # a trained parameter of a copy: its hook, once a step; 1.8 and 2.6 on a busy CPU, not measured beside a GPU
UPDATED, SHARDED = 1.2, 3.1  # a parameter in an update: its gradient found, told what to do, and dropped; the same of DTensors


class Exchanges(NamedTuple):
    """How often in a step the weights of a block and those of the outermost layers are gathered, and how often a unit's gradients
    are scattered and summed over copies."""

    blocks: int
    outermost: int
    scatters: int
    sums: int


def exchanges(machine: Machine, forwards: int) -> Exchanges:
    """The exchanges in a step of `forwards` micro-batches. The outermost layers' weights are still there when the backward
    begins."""
    three = machine.zero == 3
    return Exchanges(2 * forwards if three else 1, forwards if three else 1, 1 if machine.zero == 1 else forwards,
                     int(machine.replicate > 1))


class Parts(NamedTuple):
    """Counts of the parts of a model on which the host's work depends."""

    blocks: int
    units: int  # that ranks send each other separately, what is left to the root among them
    cut: int  # calls for the layers that tensor parallelism cuts
    trained: int  # parameters


def parts_of(model: nn.Module) -> Parts:
    layers = [getattr(module, child) for module, child, _ in tables(model)]
    cut = sum(CUT + OPERAND * len(list(layer.parameters(recurse=False))) for layer in layers if isinstance(layer, nn.Module))
    return Parts(len(blocks(model)), len(units(model)) + 1, cut, sum(p.requires_grad for p in model.parameters()))


def hooked(parts: Parts, machine: Machine, forwards: int) -> float:
    """Calls that FSDP, or the mean over copies, adds to a step of `forwards` micro-batches."""
    if not machine.wrapped:
        return AVERAGED * parts.trained if machine.replicate > 1 else 0.0
    times = exchanges(machine, forwards)
    gathers = parts.blocks * times.blocks + (parts.units - parts.blocks) * times.outermost
    return parts.units * (forwards * HOOKS + times.scatters * SCATTER + times.sums * SUM) + gathers * GATHER


def copied(parts: Parts, machine: Machine, forwards: int) -> float:
    """Calls that weights kept on the host add to a step: each comes and is rounded, and its gradient goes."""
    times = exchanges(machine, forwards)
    return parts.trained * (2 * times.blocks + times.scatters)


def recomputed(parts: Parts, machine: Machine) -> float:
    """Calls that recompute adds to a micro-batch, besides the repeated ones."""
    return parts.blocks * RECOMPUTED[str(machine.recompute)]


def cut(parts: Parts, machine: Machine) -> float:
    """Calls that tensor parallelism adds to a micro-batch."""
    if machine.tensor_parallel == 1:
        return 0.0
    return parts.cut * (SEQUENCE if machine.sequence_parallel else 1) * (1 + AGAIN * (machine.recompute != "none"))


def updated(parts: Parts, machine: Machine) -> float:
    """Calls of an update, besides those of its kernels."""
    return parts.trained * (SHARDED if machine.wrapped or machine.tensor_parallel > 1 else UPDATED)
