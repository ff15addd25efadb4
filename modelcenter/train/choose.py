"""Chooses the layout that is predicted to be fastest, for a machine profile that gives only a number of devices."""

import os
from dataclasses import replace

import torch

from ..data.objective import find_objective
from ..errors import printable, refuse, tell
from ..parallel.device import count_of, device_of, memory_of
from ..parallel.machine import LAYOUT, Machine
from ..plan.chips import CHIPS, Chip, chip_here
from ..plan.costs import Costs
from ..plan.layout import check_open
from ..plan.survey import Survey, settings, survey
from .calibrate import learn
from .fit import as_a_rank, beside, ranks_here
from .folder import ran
from .launch import nodes_told
from .paper import job_there, runnable
from .recipe import Recipe
from .resolve import most_of, resolve, sizes_of


def choose(recipe: Recipe, machine: Machine) -> tuple[Recipe, Machine]:
    """`machine` with a layout in place of `devices`, and `recipe` with the micro-batch that goes with it; one line tells the
    choice.

    A resumed run keeps its micro-batch, and on the same number of devices its layout. For one CPU there is nothing to choose;
    several ranks of a CPU compute the same micro-batches as one would. Errors: `InputError` if nothing fits.
    """
    if machine.devices is None:
        return recipe, machine
    check_open(machine, f"devices={machine.devices}")
    if (ranked := "RANK" in os.environ) or nodes_told() > 1:  # what other machines have is not here to be counted
        where = "in a process that a launcher has started" if ranked else f"on one of {nodes_told()} machines (NNODES)"
        wrong = f"{machine.devices}, {where}"
        refuse(None, "machine.devices", wrong, "the command alone, or the degrees: modelcenter plan says them")
    device, ranks, machine = device_of(machine), count_of(machine), replace(machine, devices=None)
    if ranks == 1 and device.type == "cpu":
        return recipe, machine
    if (before := ran(recipe)) is not None:
        recipe = replace(recipe, micro_batch=recipe.micro_batch or before[0].micro_batch)
        if before[1].ranks == ranks:
            say(f"{ranks} x {device.type}, as before")
            return recipe, replace(machine, **{key: getattr(before[1], key) for key in LAYOUT})

    resolved, _ = resolve(recipe, replace(machine, sequence_parallel=False))  # which is for some of the layouts
    free = device.type != "cpu" and recipe.micro_batch is None and recipe.batch_tokens is None and not together(recipe)
    rows = None if free else resolved.micro_batch or most_of(resolved, device, sizes_of(recipe))
    found = surveyed(replace(recipe, precision=resolved.precision), machine, device, ranks, rows)
    best, name = found.choice, found.costs.chip.name
    if not best.fits:
        refuse(None, "machine.devices", f"nothing fits {ranks} x {name}: {found.least()}", found.help())
    fitting = [e for e in found.estimates[1:] if e.fits]
    after = f"; next {settings(fitting[0])}, {fitting[0].seconds:.3g} s" if fitting else ""
    say(f"{ranks} x {name}: {settings(best)}, the fastest of {1 + len(fitting)} layouts that fit: {best.seconds:.3g} s a step, "
        f"predicted, bound by {best.bottleneck}{after}")  # fmt: skip
    return replace(recipe, micro_batch=best.micro_batch) if free else recipe, best.machine


def surveyed(recipe: Recipe, machine: Machine, device: torch.device, ranks: int, rows: int | None) -> Survey:
    """All layouts of a recipe on devices that are here. A GPU's step is rehearsed on the CPU, because a rehearsal there would take
    its memory."""
    gpu = device.type != "cpu"
    job = job_there(recipe, machine, torch.device("cpu"), gpu)
    with as_a_rank(machine, ranks):
        chip = chip_of(device)
    chip = learn(chip, recipe.precision, ranks > 1).of(beside(chip, machine, ranks) if gpu else chip)
    limit = chip.memory if gpu else chip.memory / ranks_here(ranks)
    return survey(Costs(job, chip, limit), ranks, machine, rows, allowed=runnable(recipe, job.model))


def chip_of(device: torch.device) -> Chip:
    """What a device can do. A GPU that is not known is taken to have its own memory and the proportions of one that is."""
    if (chip := chip_here(device)) is not None:
        return chip
    if (there := memory_of(device)) is None:
        refuse(None, "machine.devices", f"nothing is known of {device.type}", "the degrees: machine.fsdp=N")
    return replace(CHIPS["h200"], name=f"a {device.type} that is not known", memory=float(there[1]))


def together(recipe: Recipe) -> bool:
    """Whether the objective needs its whole batch in one forward."""
    return find_objective(recipe.objective).together


def say(text: str) -> None:
    tell(f"machine: {printable(text)}")
