"""`modelcenter train`."""

import gc
from pathlib import Path

from ..errors import refuse
from .arguments import Answer, Arguments, check_model
from .recipe import run_of, tell_shape


def train(args: Arguments) -> Answer:
    """Train a model as a recipe says; the same command resumes.

    modelcenter train RECIPE [--machine M] [key=value ...] [machine.key=value ...]

    modelcenter train finetune model=gpt2 data.path=my.jsonl output_dir=runs/first       # for example

    RECIPE is a bare name (modelcenter list recipes) or a path; modelcenter list keys says what can be set, and
    modelcenter copy RECIPE puts the file here to be edited. M is a bare name (modelcenter list machines) or a path.
    """
    recipe, machine = run_of(args)
    if not any(setting.startswith("output_dir=") for setting in args.settings):
        check_moved(Path(args.names[0]), Path(recipe.output_dir))
    if recipe.init == "pretrained":
        check_model(recipe.model)
    tell_shape(recipe, args)
    from ..parallel.watch import speaks
    from ..train.launch import check_asked, launch, to_launch

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
        if run.stopped:
            check_asked()
        data = {"output_dir": str(run.output_dir), "step": run.step, "stopped": run.stopped, "metrics": run.metrics}
    last = "".join(f", {key} {value:.6g}" for key, value in data["metrics"].items() if isinstance(value, float))
    return Answer(f"{data['output_dir']}: step {data['step']}{last}" if machine.ranks == 1 or speaks() else None, data)


def check_moved(file: Path, output: Path) -> None:
    """Refuse the recipe in a run's folder that was moved, or is named from elsewhere: the run would begin anew in another place,
    and nobody had said so."""
    if file.name == "recipe.yaml" and (file.parent / "environment.json").is_file() and not output.exists():
        wanted = f"output_dir={file.parent} goes on with the run of that folder, output_dir={output} begins another"
        refuse(file, "output_dir", f"{output}, which is not there", wanted)
