"""The training loop, in the order in which things happen: prepare, resume, step, evaluate, save, write the model out.

    output_dir/recipe.yaml     the resolved recipe, in which nothing is `auto` or derived any more; machine.yaml, where it last ran
    output_dir/metrics.jsonl   what happened (train/metrics.py), drawn in loss.png
    output_dir/environment.json, summary.md   where, from what and with what result: for other people (train/journal.py)
    output_dir/step-N/         training states (checkpoint/state.py)
    output_dir/model/          the trained model with its tokenizer, a Hugging Face folder: of the last step, or the best so far
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import to_dict
from ..data.prefetch import prefetch
from ..metrics.table import check_packages
from ..optim.adamw import BLOCK
from ..optim.ema import EMA
from ..optim.loss_scale import FIRST, LossScale
from ..optim.optimizers import build_optimizer
from ..optim.schedules import lr_factor
from ..parallel.machine import Machine, as_machine
from ..parallel.ranks import Ranks, Silent
from ..parallel.replicas import check_replicas
from ..parallel.watch import Watch
from .agree import agree, agree_on_copies, agree_on_state, check_output
from .background import Background
from .choose import choose
from .compiled import varied
from .environment import check_data
from .fit import Verdict, verdict
from .folder import check_steps, claim, find_start, flat, write_recipe
from .graphs import graphs_of
from .heap import kept
from .interrupt import Interrupt, Stop
from .journal import Journal
from .launch import launch, to_launch
from .memory import Memory
from .metrics import Metrics
from .plot import plot_loss
from .prepare import enter, prepare
from .progress import Progress
from .read import load_recipe
from .recipe import Recipe
from .repeatable import repeatable
from .report import About, Reports, check_installed
from .resolve import check_heads, resolve
from .session import Session
from .state import Position, check_order, restore
from .step import autocast


@dataclass
class Run:
    """A run that has ended: at its last step, or (`stopped`) on a signal.

    `metrics` holds the last value of each. `model` is None if this process started ranks for the run; output_dir/model holds it.
    Beneath an adapter it has its frozen matrices as the run had them, rounded to its precision; the folder has their source."""

    output_dir: Path
    step: int
    metrics: dict[str, Any]
    model: nn.Module | None = field(repr=False)  # whose text is pages long
    stopped: bool


def train(recipe: Recipe | str | Path, machine: Machine | str | Path | None = None,
          overrides: Iterable[str] | Mapping[str, Any] | None = None) -> Run:
    """Train as `recipe` (a packaged name, a file, or a `Recipe`) says, on `machine` (a profile, its name, or a file).

    `overrides` change keys of a recipe that is given by name or file: {"model": "gpt2", "optimizer.lr": 1e-4}, or
    ["optimizer.lr=1e-4"]. The first SIGTERM or Ctrl-C saves and ends the run after the current step (on several GPUs perhaps one
    later), or within an evaluation. Calling `train` again resumes there, repeating that evaluation, or after a kill from the newest
    valid state, with the same bits as an uninterrupted run. If the machine has several ranks and no launcher has started them,
    `train` starts them and waits for them.

    Errors: `InputError` for what a user can correct, including a run whose gradients stay non-finite.
    """
    machine = as_machine(machine) if machine is not None else Machine()
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides or (), "overrides")
    elif overrides:
        raise TypeError("overrides go with a recipe's name or file; use dataclasses.replace on a Recipe")
    recipe, machine = choose(recipe, machine)
    check_heads(recipe, machine)
    if to_launch(machine):
        told = launch(recipe, machine)
        return Run(Path(told["output_dir"]), told["step"], told["metrics"], None, told["stopped"])
    torch.set_flush_denormal(True)  # before any thread pool starts: denormals made a loss 12 times slower on a CPU
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    check_installed(recipe.report_to)
    check_packages(filter(None, (*recipe.metrics, recipe.best)))
    recipe, device = resolve(recipe, machine)
    ranks = enter(recipe, machine)
    folder = Path(recipe.output_dir)

    with (claim(folder, recipe, ranks), Interrupt() as interrupt, Journal(folder, recipe, silent=not ranks.first) as journal,
          Memory(recipe, machine) as memory, Watch(folder / "ranks", ranks, machine.timeout), repeatable(machine), kept(device),
          varied(machine)):
        session = begin(recipe, machine, device, ranks, journal, memory)
        steps = prefetch(session.batches())
        session.model.train()
        interrupt.begin()
        try:
            if session.finished and session.judged():
                session.at.owed = False  # by its state: that was written before, and none is written over
            elif session.at.owed or session.finished:  # stopped in it, or at what is its last step now
                session.evaluate(interrupt)
            while not session.ended:
                step = session.step(steps, interrupt)
                session.log(step)
                if session.went_back():
                    continue
                if session.due(machine.check_steps):
                    check_replicas(session.model, ranks, session.at.step)
                memory.at = f"after step {session.at.step}, in evaluating or saving"
                if session.setup.evaluation is not None and (session.finished or session.due(recipe.eval_steps)):
                    session.evaluate(interrupt)
                if recipe.save_steps is not None and (session.ended or session.due(recipe.save_steps)):
                    session.save()
        except Stop:
            session.stop()
        finally:
            steps.close()
            if session.graphs is not None:
                session.graphs.end()  # NCCL would wait for graphs of its calls when ranks part
            session.settle()
            session.metrics.close()
            if ranks.first:
                session.progress.say(plot_loss(folder))
        last = session.finish()
        return Run(session.folder, session.at.step, last, session.model, stopped=not session.ended)


def begin(recipe: Recipe, machine: Machine, device: torch.device, ranks: Ranks, journal: Journal, memory: Memory) -> Session:
    """Prepare a run (`recipe` is resolved) or restore it where it was, and tell how it will go."""
    folder = Path(recipe.output_dir)
    agree(recipe, machine, ranks)
    check_output(folder, ranks)
    start = find_start(recipe.resume, folder, ranks)
    if start is not None:
        agree_on_state(start, ranks)
        if ranks.first:
            check_data(start.parent, recipe.data)
    setup = prepare(recipe, machine, device, ranks)
    agree_on_copies(recipe, setup.tokenizer, ranks)
    if start is not None:
        check_steps(start, recipe, setup.steps)
        check_order(start, setup.loader.order)
    lr_factor(recipe.schedule, setup.steps - 1, setup.steps)  # a decay too long is refused here, and not where it would begin
    found = verdict(recipe, machine, device, setup, partial(autocast, recipe.precision, device))
    setup.lines.append(str(found))
    setup.foreseen = found.foreseen if isinstance(found, Verdict) else None
    optimizer = build_optimizer(setup.model, recipe.optimizer, ranks)
    if recipe.optimizer.moments == "int8" and all(g["moments"] != "int8" or g.get("muon") for g in optimizer.param_groups):
        setup.lines.append(f"optimizer.moments: int8, but for no matrix: rows are no multiples of {BLOCK} numbers; bf16 is for any")
    ema = EMA(setup.model, recipe.ema) if recipe.ema is not None else None
    torch.manual_seed(ranks.seed(recipe.seed))
    random.seed(recipe.seed)
    at = restore(start, setup.model, optimizer, ema, ranks) if start is not None else Position()
    at.owed = at.owed and setup.evaluation is not None
    if recipe.precision == "fp16" and start is None:
        at.scale = LossScale(FIRST)
    progress = Progress(setup.steps, {"evaluation": recipe.eval_steps, "saving": recipe.save_steps}, silent=not ranks.first)
    journal.begin({**setup.environment, "foreseen": setup.foreseen}, at.step, progress.say)
    metrics: Any = Silent()
    if ranks.first:
        write_recipe(folder, recipe, machine)
        reports = Reports(recipe.report_to, About(folder, journal.id, at.step, flat(to_dict(recipe))), progress.say)
        metrics = Metrics(folder, setup.environment, at.step, reports, progress.say)
    for line in setup.lines:
        progress.say(line)
    if start is not None:
        tired = recipe.patience is not None and at.waited >= recipe.patience and not at.owed
        why = ", the last" if at.step == setup.steps else f", where patience={recipe.patience} has ended it" if tired else ""
        end = f"{why}: no training is left to do" if why else ""
        progress.say(f"resumed from {start}: step {at.step} of {setup.steps}{end}")
    elif (folder / "model").is_dir():
        progress.say(f"no state in {folder}: trained anew from step 0, over {folder / 'model'}; save_steps=500 keeps some")
    if recipe.best is not None and at.best_step is not None and not ranks.tell("there" * (folder / "model").is_dir()):
        progress.say(f"{folder / 'model'}: missing; it held the best model so far, of step {at.best_step}; the search starts again")
        at.best = at.best_step = None
    background = Background(ranks) if machine.async_save else None
    graphs = graphs_of(setup.model, machine, device, progress.say)
    return Session(recipe, device, setup, ranks, optimizer, ema, at, metrics, progress, journal, memory, graphs, background)
