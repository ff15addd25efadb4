"""The recipe and the machine that a command line names. Torch-free."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config import COMMAND_LINE, bind, override, to_dict
from .arguments import Arguments, take

if TYPE_CHECKING:
    from ..parallel.machine import Machine
    from ..train.recipe import Recipe


def run_of(args: Arguments) -> "tuple[Recipe, Machine]":
    """The recipe and the machine that a command line names, `machine.key=value` put over the latter."""
    from ..train.recipe import load_recipe

    own = [setting for setting in args.settings if setting.startswith("machine.")]
    (name,) = take(replace(args, settings=[], machine=None), ["RECIPE"])
    recipe = load_recipe(name, [setting for setting in args.settings if setting not in own])
    return recipe, machine_of(args, own)


def machine_of(args: Arguments, own: Sequence[str]) -> "Machine":
    """The machine that a command line names, with the settings `own`, machine.key=value, put over it."""
    from ..parallel.machine import Machine, load_machine

    machine = to_dict(load_machine(args.machine) if args.machine is not None else Machine())
    over = override(machine, [setting.removeprefix("machine.") for setting in own])
    return bind(Machine, over, COMMAND_LINE, "machine.")
