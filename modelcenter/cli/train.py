"""`modelcenter train`."""

import gc

from .arguments import Answer, Arguments, check_model
from .recipe import run_of


def train(args: Arguments) -> Answer:
    """Train a model as a recipe says; the same command resumes.

    modelcenter train RECIPE [--machine M] [key=value ...] [machine.key=value ...]

    RECIPE is a bare name (modelcenter list recipes) or a path; modelcenter list keys says what can be set, and
    modelcenter copy RECIPE puts the file here to be edited.
    """
    recipe, machine = run_of(args)
    if recipe.init == "pretrained":
        check_model(recipe.model)
    from ..parallel.watch import speaks
    from ..train.launch import launch, to_launch

    if machine.devices is not None:
        from ..train.choose import choose

        recipe, machine = choose(recipe, machine)
    if to_launch(machine):
        data = launch(recipe, machine)
    else:
        gc.disable()  # what is imported stays: to look for garbage in it again and again takes a quarter of a second
        from ..train.loop import train

        gc.freeze()
        gc.enable()
        run = train(recipe, machine)
        data = {"output_dir": str(run.output_dir), "step": run.step, "stopped": run.stopped, "metrics": run.metrics}
    last = "".join(f", {key} {value:.6g}" for key, value in data["metrics"].items() if isinstance(value, float))
    return Answer(f"{data['output_dir']}: step {data['step']}{last}" if machine.ranks == 1 or speaks() else None, data)
