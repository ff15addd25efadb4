"""`modelcenter train` and `plan`."""

import os
from functools import partial

from .arguments import Answer, Arguments, check_model
from .recipe import run_of


def train(args: Arguments) -> Answer:
    """Train as a recipe says.

    modelcenter train RECIPE [--machine M] [key=value ...] [machine.key=value ...]

    RECIPE is a bare name (modelcenter list recipes) or a path; modelcenter list keys says what can be set, and
    modelcenter copy RECIPE puts the file here to be edited.
    """
    recipe, machine = run_of(args)
    if recipe.init == "pretrained":
        check_model(recipe.model)
    from ..train.launch import PARENT, launch, to_launch

    if to_launch(machine):
        data = launch(recipe, machine)
    else:
        from ..train.loop import train

        run = train(recipe, machine)
        data = {"output_dir": str(run.output_dir), "step": run.step, "stopped": run.stopped, "metrics": run.metrics}
    last = ", ".join(f"{key} {value:.6g}" for key, value in data["metrics"].items() if isinstance(value, float))
    speaks = machine.ranks == 1 or os.environ.get("LOCAL_RANK" if PARENT in os.environ else "RANK", "0") == "0"
    return Answer(f"{data['output_dir']}: step {data['step']}, {last}" if speaks else None, data)


def plan(args: Arguments) -> Answer:
    """Say how much memory a run needs, part by part, and what would make it fit; nothing is trained or allocated.

    modelcenter plan RECIPE [--machine M] [key=value ...] [machine.key=value ...]

    Takes what train takes. A step is rehearsed on tensors without storage; of a preset that is not here no weights are fetched.
    """
    recipe, machine = run_of(args)
    if recipe.init == "pretrained":
        check_model(recipe.model)
    from ..train.fit import Verdict, verdict
    from ..train.prepare import prepare, resolve
    from ..train.step import autocast

    recipe, device = resolve(recipe, machine)
    setup = prepare(recipe, machine, device, meta=True)
    found = verdict(recipe, machine, device, setup, partial(autocast, recipe.precision, device), refuses=False)
    if not isinstance(found, Verdict):
        return Answer(found, {"verdict": found})
    data = {"verdict": str(found), "fits": found.plan.fits, "device": str(device), "bytes": dict(found.plan.parts),
            "peak": found.plan.need, "free": found.plan.free, "total": found.plan.total, "batch": found.batch, "ways": found.ways}
    return Answer(f"{found.plan.table()}\n{found}", data)
