"""The recipe and the machine that a command line names. Torch-free."""

from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..checkpoint.files import ADAPTER
from ..config import COMMAND_LINE, assignments, bind, flow, merge, override, to_dict
from ..errors import printable, refuse, tell
from ..theirs import RECIPE
from .arguments import Arguments, take

if TYPE_CHECKING:
    from ..parallel.machine import Machine
    from ..train.recipe import Recipe

T = TypeVar("T")


def run_of(args: Arguments) -> "tuple[Recipe, Machine]":
    """The recipe and the machine that a command line names, `machine.key=value` put over the latter."""
    from ..parallel.machine import Machine
    from ..train.read import load_recipe
    from ..train.recipe import Recipe

    if whole := [setting for setting in args.settings if setting.startswith("machine=")]:
        refuse(COMMAND_LINE, whole[0], "a machine is no part of a recipe", f"--machine {whole[0].partition('=')[2]}")
    if there := [name for name in args.names[1:] if Path(name).exists()]:
        of_model = any((Path(there[0]) / file).is_file() for file in ("config.json", ADAPTER[0]))
        what, key = ("a folder", "model") if of_model else ("a file", "data.path")
        refuse(COMMAND_LINE, there[0], f"{what} without its key", f"{key}={there[0]}")
    if args.names and Path(args.names[0]).is_file() and Path(args.names[0]).suffix not in (".yaml", ".yml"):
        refuse(COMMAND_LINE, args.names[0], "a file, and no recipe", f"a recipe first, such as finetune data.path={args.names[0]}")
    known, places = ["machine", *(field.name for field in fields(Recipe))], {field.name for field in fields(Machine)}
    made: list[tuple[str, Any]] = [(field.name, field.default_factory) for field in fields(Recipe)]
    sections = {"machine": places, **{name: {field.name for field in fields(of)} for name, of in made if is_dataclass(of)}}
    for setting in args.settings:
        section, _, rest = setting.partition("=")[0].partition(".")
        if not rest and section in places:
            refuse(COMMAND_LINE, section, "unknown key", f"did you mean 'machine.{section}'?")
        close = get_close_matches(section, known, n=1)
        if rest and section not in (*known, *RECIPE) and close and rest in sections.get(close[0], ()):
            refuse(COMMAND_LINE, f"{section}.{rest}", "unknown key", f"did you mean '{close[0]}.{rest}'?")
    (name,) = take(replace(args, settings=[], machine=None), ["RECIPE"])
    recipe = load_recipe(name, [setting for setting in args.settings if not setting.startswith("machine.")])
    return recipe, machine_of(args)


def tell_shape(recipe: "Recipe", args: Arguments) -> None:
    """Say that the recipe's own `config` shapes the model that the command line names without one."""
    from ..parallel.watch import speaks

    over = given(args)
    if recipe.init == "random" and recipe.config and "model" in over and "config" not in over and speaks():
        shape = " ".join(f"config.{key}={flow(value)}" for key, value in recipe.config.items())
        tell(printable(f"{shape} ({args.names[0]}'s) shape {recipe.model}; config={{}} for its own shape"))


def given(args: Arguments) -> dict[str, Any]:
    """What the command line says of the recipe, in the recipe's spelling."""
    from ..train.read import settle

    own = [setting for setting in args.settings if not setting.startswith("machine.")]
    return settle({}, assignments(own), COMMAND_LINE)[0]


def take_own(cls: type[T], args: Arguments) -> tuple[T, Arguments]:
    """The keys that a verb takes besides a recipe's, as the dataclass `cls`, and the command line without them. A key that is
    nearer to one of these than to any of a recipe's is refused."""
    from ..train.read import ALIASES, PARTIAL
    from ..train.recipe import Recipe

    own = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # cls is a dataclass
    mine = [setting for setting in args.settings if setting.partition("=")[0] in own]
    taken, rest = bind(cls, override({}, mine), COMMAND_LINE), [setting for setting in args.settings if setting not in mine]
    known = [*(field.name for field in fields(Recipe)), *ALIASES, *PARTIAL]
    for key in (setting.partition("=")[0] for setting in rest):
        if "." not in key and (close := get_close_matches(key, [*known, *own], n=1)) and close[0] not in known:
            refuse(COMMAND_LINE, key, "unknown key", f"did you mean {close[0]!r}?")
    return taken, replace(args, settings=rest)


def machine_of(args: Arguments) -> "Machine":
    """The machine that a command line names, with its settings machine.key=value put over it."""
    from ..parallel.machine import Machine, load_machine, read_machine

    own = [setting for setting in args.settings if setting.startswith("machine.")]
    for number in (setting.partition(":")[2] for setting in own if setting.startswith("machine.device=cuda:")):
        refuse(COMMAND_LINE, "machine.device", f"cuda:{number}", f"CUDA_VISIBLE_DEVICES={number} before the command")
    machine = to_dict(load_machine(args.machine) if args.machine is not None else Machine())
    if args.machine is not None:
        machine |= read_machine(args.machine)[1]  # as it is written there: what is auto is found when all else is known
    return bind(Machine, merge(machine, assignments(own).get("machine", {})), COMMAND_LINE, "machine.")
