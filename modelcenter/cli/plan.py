"""`modelcenter plan`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import COMMAND_LINE, bind, merge, says
from ..errors import InputError, refuse
from ..parallel.machine import MOST
from .arguments import Answer, Arguments, check_model
from .recipe import given, machine_of, run_of, take_own, tell_shape

if TYPE_CHECKING:
    from ..parallel.machine import Machine
    from ..train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Question:
    """What `plan` takes besides what `train` takes."""

    gpus: int | None = field(default=None, metadata=says("devices; null: those of the machine", min=1, max=MOST))
    device: str | None = field(default=None, metadata=says("a device by name, or a file; null: the one here", min=1))
    tokens: float | None = field(default=None, metadata=says("tokens of the whole training, to predict its hours", above=0))
    price: float | None = field(default=None, metadata=says("per device and hour, to predict the cost", above=0))


BARE: Mapping[str, Any] = {"data": {"path": "none", "seq_len": 1024}, "output_dir": "none", "max_steps": 1, "init": "random"}


def plan(args: Arguments) -> Answer:
    """Predict the memory and time of a run, layout by layout, and what would make it fit; nothing is trained or allocated.

    modelcenter plan RECIPE [--machine M] [key=value ...] [machine.key=value ...]
    modelcenter plan RECIPE|model=PRESET --gpus 8 --device h200 [--tokens 1e12 [--price 2.5]] [key=value ...]

    Takes the arguments of train; with a model instead of a recipe, batch=, data.seq_len= and the like. One step is rehearsed on
    tensors without storage, and no weights are downloaded. The second form plans for devices that are not on this machine: h200,
    h100, a100-80, a100-40, v100, 4090, 3090, 2080ti, or a file with their rates.

    A row of the table is a layout, given by the keys machine.tensor_parallel, fsdp and replicate (tensor x fsdp x copies), zero and
    recompute. "4 x 2" under micro-batch means two micro-batches of four sequences per step on each rank; "a rank" is the memory of
    one rank; "of peak" the achieved share of the device's rate of matrix products; "bound by" what takes most of the time.

    Keys of the second form:
    """
    asked, args = take_own(Question, args)
    if asked.price is not None and asked.tokens is None:
        refuse(COMMAND_LINE, "price", "given without tokens", "--tokens N: how many the training reads")
    recipe, machine, bare = recipe_of(args)
    if recipe.init == "pretrained":
        check_model(recipe.model)
    if not bare:
        tell_shape(recipe, args)
    if not bare and machine.devices is None and asked.gpus is None and asked.device is None and asked.tokens is None:
        return here(recipe, machine)
    return elsewhere(recipe, machine, asked, bare)


def recipe_of(args: Arguments) -> "tuple[Recipe, Machine, bool]":
    """The recipe and the machine; of a model alone what is known of it, and True."""
    if args.names:
        try:
            return *run_of(args), False
        except InputError as error:
            if "data.path: missing" in str(error):
                refuse(COMMAND_LINE, "data.path", "missing", f"data.path=FILE; or, without data, {form_without_data(args)}")
            raise
    from ..checkpoint.files import ADAPTER, weighs
    from ..train.recipe import Recipe

    over = given(args)
    if "model" not in over:
        bind(Recipe, merge(BARE, {"model": "none"} | over), COMMAND_LINE)  # what it does not know may be the model's key, misspelt
        refuse(COMMAND_LINE, "RECIPE", "missing", "a recipe, or model=PRESET")
    if (Path(os.path.expanduser(str(over["model"]))) / ADAPTER[0]).is_file():
        wanted = f"model=BASE adapter.name=lora; or, with data, a recipe: plan finetune model={over['model']} data.path=FILE"
        refuse(COMMAND_LINE, "model", f"{over['model']}, an adapter", wanted)
    if "objective" not in over:
        from ..train.paper import objective_of

        over["objective"] = objective_of(str(over["model"]))
    there = "adapter" in over or weighs(str(over["model"]))  # an adapter is put on no random weights
    recipe = bind(Recipe, merge(BARE, ({"init": "pretrained"} if there else {}) | over), COMMAND_LINE)
    if "seq_len" not in over.get("data", {}):
        from ..train.resolve import sizes_of

        most = sizes_of(recipe).get("positions") or recipe.data.seq_len
        recipe = replace(recipe, data=replace(recipe.data, seq_len=min(most, recipe.data.seq_len)))
    return recipe, machine_of(args), True


def form_without_data(args: Arguments) -> str:
    """The command that plans what a recipe does to a model, of any data."""
    from ..train.read import open_recipe

    adapter = open_recipe(args.names[0])[1].get("adapter") or {}
    own = "".join(f" adapter.{key}={adapter[key]}" for key in ("name", "quantize") if key in adapter)
    return f"plan model={given(args).get('model', 'PRESET')}{own} in place of the recipe"


def here(recipe: "Recipe", machine: "Machine") -> Answer:
    """On what is here, as `train` would do it."""
    from ..train.fit import Verdict, verdict
    from ..train.prepare import prepare
    from ..train.resolve import resolve
    from ..train.step import autocast

    recipe, device = resolve(recipe, machine)
    setup = prepare(recipe, machine, device, meta=True)
    found = verdict(recipe, machine, device, setup, partial(autocast, recipe.precision, device), refuses=False)
    if not isinstance(found, Verdict):
        return Answer(found, {"verdict": found})
    data = {"verdict": str(found), "fits": found.plan.fits, "device": str(device), "bytes": dict(found.plan.parts),
            "peak": found.plan.need, "free": found.plan.free, "total": found.plan.total, "batch": found.batch, "ways": found.ways}
    if found.estimate is not None:
        data["estimate"] = found.estimate.data()
    return Answer("\n".join([*setup.idle, found.plan.table(), str(found)]), data)


def elsewhere(recipe: "Recipe", machine: "Machine", asked: Question, bare: bool) -> Answer:
    """On devices that are named, layout by layout."""
    from ..train.paper import on_paper

    found, (what, *sources) = on_paper(recipe, machine, asked.gpus, asked.device, bare)
    text, data = [what, "", found.table(), "", found.memory(), found.verdict()], found.data()
    if found.remedies:
        text += ["with less memory:", found.worth()]
    if asked.tokens is not None and found.choice.fits:
        e = found.choice
        hours = asked.tokens / (e.rate * e.machine.ranks) / 3600
        data["hours"] = hours
        line = f"{asked.tokens:.3g} tokens: {few(hours, 1)} hours, {few(hours * e.machine.ranks)} device-hours"
        if asked.price is not None:
            data["cost"] = hours * e.machine.ranks * asked.price
            line += f", {few(data['cost'])} at {asked.price:g} each"
        text.append(line)
    return Answer("\n".join([*text, "", *sources, "what the columns mean: modelcenter plan --help"]), data)


def few(number: float, digits: int = 0) -> str:
    """A number with so many digits behind its point, a small one with three in all: half an hour is not none."""
    return f"{number:,.{digits}f}" if number >= 10 else f"{number:.3g}"
