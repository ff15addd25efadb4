"""`modelcenter evaluate`."""

import math
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING

from ..adapter.config import AdapterConfig
from ..checkpoint.files import ADAPTER
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.state import check_there
from ..config import COMMAND_LINE, bind, names, packaged, says
from ..errors import refuse, refuse_missing, tell
from ..parallel.variable import variable
from ..parallel.watch import PARENT, Watch
from .arguments import Answer, Arguments, check_model, settings, take
from .computing import Computing
from .recipe import given, machine_of, run_of

if TYPE_CHECKING:
    from ..model import Model
    from ..parallel.machine import Machine
    from ..train.recipe import Recipe


# Keys of a recipe that an evaluation does not read; output_dir and max_steps, which a recipe must have, may be given all the same.
TRAINING = {
    "optimizer", "schedule", "freeze", "ema", "num_epochs", "max_grad_norm", "on_spike", "logging_steps", "eval_steps", "best",
    "patience", "save_steps", "save_total_limit", "report_to", "resume",
}  # fmt: skip


def evaluate(args: Arguments) -> Answer:
    """Evaluate a model with the usual metrics of its task.

    modelcenter evaluate RUN [metrics=[...]] [key=value ...]
    modelcenter evaluate RUN/step-500 [metrics=[...]] [key=value ...]
    modelcenter evaluate MODEL data.path=FILE [objective=...] [metrics=[...]] [key=value ...]
    modelcenter evaluate RECIPE model=FOLDER [key=value ...]
    modelcenter evaluate FOLDER --suite glue|superglue
    modelcenter evaluate MODEL --lm-eval TASK,TASK... [few_shot=N] [limit=N] [lm_eval_path=FOLDER] [key=value ...]

    RUN is the output folder of a run: its recipe, its model (or that of a training state) and its evaluation data are used. MODEL
    is a folder that transformers, peft or this package has saved, a preset or a hub id. RECIPE gives all other settings; if it
    starts from random weights, model= names the trained ones. FOLDER holds a run for each task of the benchmark. TASK is one of
    lm-eval's, or of the files in lm_eval_path, and is evaluated by one process; the other forms also run on the ranks of --machine
    M, with the same numbers. Nothing is written, except for the stacks of ranks that hang, which go to a temporary folder. All of
    data.path=FILE is used; with data.eval_fraction=0.1 only the part that training would hold out. The number of examples, and of
    the questions to which they belong, is printed before the metrics. Keys for --lm-eval only:
    """
    if any(setting.startswith("lm_eval=") for setting in args.settings):
        if args.machine is not None or variable("WORLD_SIZE", 1, 2**20, default=1) > 1:  # each would answer every question
            refuse(None, "lm_eval", "with a machine, or under torchrun", "one process")
        return examined(settings(Examination, args, ["model"]))
    if suite := [setting.partition("=")[2] for setting in args.settings if setting.startswith("suite=")]:
        (folder_name,) = take(replace(args, settings=[s for s in args.settings if not s.startswith("suite=")]), ["FOLDER"])
        from ..metrics.suites import average

        found = average(suite[0], Path(folder_name))
        lines = [f"{task} {score:.1f}" for task, score in found["tasks"].items()]
        lack = f" (the mean of what is there; missing: {', '.join(found['missing'])})" if found["missing"] else ""
        return Answer(f"{suite[0]} {found['score']:.1f}{lack}: {', '.join(lines)}", found)
    if not args.names:
        refuse(COMMAND_LINE, "RUN", "missing", "a run's output_dir, a model's folder, or a recipe")
    if unread := TRAINING & given(args).keys():
        refuse(COMMAND_LINE, min(unread), "given, where nothing is trained", "leave it out")
    folder = Path(args.names[0])
    if (folder / MANIFEST).is_file():
        from ..train.export import export

        with TemporaryDirectory() as place:  # the model as it was then, for as long as it is judged
            export(str(folder), f"{place}/model", "auto")
            return judged(*of_run(folder.parent, Path(place) / "model", args), args)
    if (folder / "recipe.yaml").is_file():
        recipe, machine = of_run(folder, folder / "model", args)
    elif any((folder / name).is_file() for name in ("config.json", ADAPTER[0])) or is_published(folder, args):
        recipe, machine = recipe_of(folder, args)
    else:
        if folder.is_dir() and not {*folder.parts[:1]} & {*names(packaged())}:
            check_model(str(folder))  # which says what a folder lacks
        recipe, machine = run_of(args)
        if recipe.init == "random":
            recipe = trained(recipe, args)
    return judged(recipe, machine, args)


def is_published(name: Path, args: Arguments) -> bool:
    """Whether a name that is no folder and no recipe is a preset's, or, with data, a hub id. Without these it is that of a run, and
    refused."""
    if name.exists() or {*name.parts[:1]} & {*names(packaged())} or name.suffix in (".yaml", ".yml") or "model" in given(args):
        return False
    check_there(name)
    from ..registry import hubs

    of_hub = "data" in given(args) and len(name.parts) == 2 and not name.parent.is_dir()  # and no run that is not there
    if str(name) not in hubs() and not of_hub:
        wanted = "a run's output_dir, a model's folder, or a recipe; a hub id goes with data.path=FILE"
        refuse_missing(name, None, "no such folder, and no recipe", wanted)
    return True


def of_run(run: Path, model: Path, args: Arguments) -> "tuple[Recipe, Machine]":
    """The recipe of the run in a folder, for the model that it has trained, and the machine."""
    whole = [str(run / "recipe.yaml"), *args.names[1:]]
    if asked := given(args).get("objective"):  # first: of the head, which that recipe has resolved, nobody has said anything
        check_objective(asked, run_of(replace(args, names=whole, settings=[]))[0].objective)
        args = replace(args, settings=[*args.settings, "best=null"])  # which the other may not know
    recipe, machine = run_of(replace(args, names=whole))
    if own := {"model", "init", "config", "adapter", "tokenizer"} & given(args).keys():
        wanted = "leave it out, or name the other model's folder in place of the run's"
        refuse(None, min(own), f"given, where the model of {run} is judged as it is", wanted)
    return replace(recipe, model=str(model), tokenizer=None, init="pretrained", config={}, adapter=AdapterConfig()), machine


def check_objective(asked: str, trained: str) -> None:
    """Refuse an objective by which the head of a run says nothing: another head's, or labels of another kind. Vectors of texts are
    compared in any way."""
    from ..data.objective import find_objective

    one, other = (find_objective(name) for name in (asked, trained))
    other_kind = {"sets", "values"} & set(one.of) != {"sets", "values"} & set(other.of)
    if one.task != other.task or (one.task != "embed" and other_kind):
        refuse(None, "objective", f"{asked}, where the run has trained for {trained}", "leave it out")


def trained(recipe: "Recipe", args: Arguments) -> "Recipe":
    """A recipe that begins with random weights, for the model that the command line names: its shape and tokenizer are its own, but
    for what is given there too."""
    over = given(args)
    if "model" not in over or "init" in over:
        wanted = "model=FOLDER, of a model that has been trained, or a run's output_dir instead of the recipe"
        refuse(None, "init", "random, where training begins, and nothing to judge", wanted)
    shape = over.get("config", {})
    config = {key: value for key, value in recipe.config.items() if not isinstance(shape, dict) or key in shape}
    return replace(recipe, init="pretrained", config=config, tokenizer=recipe.tokenizer if "tokenizer" in over else None)


def judged(recipe: "Recipe", machine: "Machine", args: Arguments) -> Answer:
    """The metrics of the recipe's model on its evaluation data, or on all of those that the command line names alone."""
    if given(args).get("data", {}).keys() & {"path", "eval_path", "eval_fraction"} == {"path"}:
        recipe = replace(recipe, data=replace(recipe.data, eval_path=recipe.data.path))  # and no part for training
    if recipe.data.eval_path is None and not recipe.data.eval_fraction:
        refuse(None, "data.eval_path", "missing", "give data.eval_path=FILE")
    if recipe.init == "pretrained":
        check_model(recipe.model)
    if PARENT not in os.environ:  # a rank has been told by its launcher: stacks go there, since the run's folder is only read
        recipe = replace(recipe, output_dir=f"{gettempdir()}/modelcenter-evaluate-{token_hex(8)}")
    from ..train.launch import launch, to_launch
    from ..train.metrics import finite

    said, speaks = "", True
    if to_launch(machine):
        results = {key: math.nan if value is None else value for key, value in launch(recipe, machine, "evaluate").items()}
    else:
        said, results, speaks = evaluated(recipe, machine)
        if said and speaks and PARENT in os.environ:  # whoever has started this rank reads the numbers alone
            tell(said.rstrip("\n"))
    told = ", ".join(f"{key.removeprefix('eval_')} {f'{value:,}' if isinstance(value, int) else f'{value:.6g}'}"
                     for key, value in results.items())  # fmt: skip
    if not results["eval_targets"]:
        from ..train.evaluate import NOTHING

        said += f"{NOTHING}\n"
    return Answer(said + told if speaks else None, finite(results))


def evaluated(recipe: "Recipe", machine: "Machine") -> tuple[str, dict[str, float], bool]:
    """Lines if texts are cut sooner than the recipe says, settings do nothing, or labels leave a metric undefined; the results, and
    whether this is the process that says them."""
    from ..metrics.table import check_packages
    from ..train.agree import agree, agree_on_copies
    from ..train.heap import kept
    from ..train.prepare import enter, prepare_to_judge
    from ..train.progress import Progress
    from ..train.resolve import resolve
    from ..train.step import autocast

    asked, (recipe, device) = recipe.data.seq_len, resolve(recipe, machine)
    said = f"data.seq_len: {recipe.data.seq_len}, as many as the model has positions\n" if recipe.data.seq_len < asked else ""
    check_packages(recipe.metrics)
    ranks = enter(recipe, machine)
    with Watch(Path(recipe.output_dir) / "ranks", ranks, machine.timeout), kept(device):
        agree(recipe, machine, ranks, free=("output_dir", "model"))  # where each has put its own; what is in the model's counts
        made, judge = prepare_to_judge(recipe, machine, device, ranks)
        agree_on_copies(recipe, made.tokenizer, ranks)
        said += "".join(f"{line}\n" for line in (*made.idle, *judge.undefined()))
        count = partial(Progress(1, silent=not ranks.first).part, "texts written")
        with autocast(recipe.precision, device):
            return said, judge.size | judge(made.model, count), ranks.first


@dataclass(frozen=True, kw_only=True)
class Examination(Computing):
    """What `evaluate --lm-eval` takes."""

    model: str = field(metadata=says("a folder, a preset or a hub id", min=1))
    lm_eval: str = field(metadata=says("tasks, with commas between them", min=1))
    lm_eval_path: str | None = field(default=None, metadata=says("a folder with your own task files", min=1))
    few_shot: int | None = field(default=None, metadata=says("examples before each question; null: the task's", min=0))
    limit: int | None = field(default=None, metadata=says("examples of each task; null: all", min=1))


def examined(asked: Examination) -> Answer:
    """A model judged by tasks of lm-eval."""
    check_model(asked.model)
    try:
        from ..train.harness import examine
    except ImportError as error:
        refuse_missing(None, "lm_eval", str(error), "pip install modelcenter[lm-eval]")
    with asked.room():
        found = examine(asked.model, asked.lm_eval.split(","), asked.lm_eval_path, asked.few_shot, asked.limit, asked.batch,
                        asked.place(), asked.dtype)
    lines = [f"{task}: {', '.join(f'{key} {value:.6g}' for key, value in row.items())}" for task, row in found.items()]
    return Answer("\n".join(lines), found)


def purpose(model: "Model") -> str:
    """The objective of a model's head: its task, or for a classifier whose labels are numbers what config.json says of these."""
    task, config = str(model.task), model.config
    kind = config.file.get("problem_type") or ("regression" if config.num_labels == 1 else None)
    numbered = {"regression": "regress", "multi_label_classification": "multilabel"}
    return numbered.get(kind, task) if task == "classify" and kind is not None else task


def recipe_of(folder: Path, args: Arguments) -> "tuple[Recipe, Machine]":
    """The recipe that evaluates the model in `folder`, or of that name, on data.path, its objective that of the model's head, and
    the machine."""
    from ..train.read import check_given
    from ..train.recipe import Recipe

    if len(args.names) > 1 and Path(args.names[1]).exists():
        refuse(COMMAND_LINE, args.names[1], "a file without its key", f"data.path={args.names[1]}")
    take(replace(args, settings=[], machine=None), ["MODEL"])
    over = given(args)
    data = dict(over.get("data", {}))
    if "eval_fraction" not in data:
        data["eval_path"] = data.get("eval_path", data.get("path"))
    data["path"] = data.get("path", data.get("eval_path"))
    if data["path"] is None:
        refuse(None, "data.path", "missing", "give data.path=FILE")
    if not (place := folder).is_dir():
        from ..checkpoint.hub import resolve
        from ..registry import hubs

        place = resolve(folder, presets=hubs())
    if "objective" not in over and not (place / "config.json").is_file():
        refuse(None, "objective", "missing", "an adapter does not say what it is for: give objective=...")
    if "objective" not in over:
        from ..create import load
        from ..data.objective import objectives

        task = over["objective"] = purpose(load(folder, device="meta"))
        if task not in objectives():
            several = " or ".join(name for name, objective in objectives().items() if objective.task == task)
            refuse(folder, "objective", f"missing, of a model with the task {task!r}", f"give objective={several or 'NAME'}")
    base = {"model": str(folder), "output_dir": "unused", "max_steps": 1, **over, "data": data}
    recipe = bind(Recipe, base, COMMAND_LINE)
    check_given(recipe, over, COMMAND_LINE)
    return recipe, machine_of(args)
