"""The training loop, in the order in which things happen: prepare, resume, step, evaluate, save, write the model out.

    output_dir/recipe.yaml     the recipe as resolved: nothing in it is `auto` or derived any more
    output_dir/metrics.jsonl   what happened (train/metrics.py), drawn in loss.png
    output_dir/environment.json, summary.md   where, from what and with what result: for other people (train/journal.py)
    output_dir/step-N/         training states (checkpoint/state.py)
    output_dir/model/          the trained model with its tokenizer, a Hugging Face folder: of the last step, or the best so far
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.state import SaveError
from ..config import to_dict
from ..data.prefetch import prefetch
from ..errors import InputError, refuse
from ..metrics.table import METRICS
from ..optim.adamw import AdamW
from ..optim.clipped import Clipped
from ..optim.ema import EMA
from ..optim.loss_scale import FIRST, LossScale
from ..optim.optimizers import build_optimizer, set_lr
from ..optim.schedules import lr_factor
from ..parallel.machine import Machine, load_machine
from ..parallel.ranks import ALONE, Ranks, Silent
from .evaluate import Arguments, count_targets, count_tokens, on_device
from .fit import verdict
from .folder import claim, find_start, flat, write_recipe
from .guard import give_up, go_back, in_trouble
from .interrupt import Interrupt
from .journal import Journal
from .launch import launch, to_launch
from .memory import Memory
from .metrics import Metrics, read_rows
from .plot import plot_loss
from .prepare import enter, prepare, resolve, write_model
from .progress import Progress, peak_memory_gb
from .recipe import Recipe, load_recipe
from .report import About, Reports, check_installed
from .state import Position, restore, save


@dataclass
class Run:
    """A run that ended, at its last step or (`stopped`) because a signal asked; `metrics`: the last value of each. `model` is None
    where the run had ranks of its own: the model is in output_dir/model."""

    output_dir: Path
    step: int
    metrics: dict[str, Any]
    model: nn.Module | None
    stopped: bool


def train(recipe: Recipe | str | Path, machine: Machine | str | Path | None = None,
          overrides: Iterable[str] | Mapping[str, Any] | None = None) -> Run:
    """Train as `recipe` (a packaged name, a file, or a `Recipe`) says with `overrides` put over it, on `machine`.

    The first SIGTERM or Ctrl-C ends the run after its step and saves; `resume: auto` goes on from there, or from the
    newest valid state after a kill, bit for bit as if nothing had happened. Where the machine has several ranks and no
    launcher has started them, they are started here, and this process waits for them. Errors: `InputError` for what a user can
    mend, a run whose gradients stay other than finite among it.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides or ())
    elif overrides:
        raise TypeError("overrides go with a recipe's name or file; use dataclasses.replace on a Recipe")
    if not isinstance(machine, Machine):
        machine = load_machine(machine) if machine is not None else Machine()
    if to_launch(machine):
        told = launch(recipe, machine)
        return Run(Path(told["output_dir"]), told["step"], told["metrics"], None, told["stopped"])
    torch.set_flush_denormal(True)  # before any thread pool starts: denormals made a loss 12 times slower on a CPU
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    check_installed(recipe.report_to)
    recipe, device = resolve(recipe, machine)
    ranks = enter(recipe, machine)
    folder, task, compute = Path(recipe.output_dir), recipe.objective, partial(autocast, recipe.precision, device)

    with (claim(folder, recipe, ranks), Interrupt() as interrupt, Journal(folder, recipe, silent=not ranks.first) as journal,
          Memory(recipe, machine) as memory):
        start = find_start(recipe.resume, folder, ranks)
        setup = prepare(recipe, machine, device, ranks)
        setup.lines.append(str(verdict(recipe, machine, device, setup, compute)))
        model, total, metric = setup.model, setup.steps, recipe.best or "loss"
        optimizer = build_optimizer(model, recipe.optimizer)
        ema = EMA(model, recipe.ema) if recipe.ema is not None else None
        averaged = ema.in_place if ema is not None else nullcontext
        torch.manual_seed(ranks.seed(recipe.seed))
        random.seed(recipe.seed)
        at = restore(start, model, optimizer, ema, ranks) if start is not None else Position()
        if recipe.precision == "fp16" and start is None:
            at.scale = LossScale(FIRST)
        progress = Progress(total, {"evaluation": recipe.eval_steps, "saving": recipe.save_steps}, silent=not ranks.first)
        journal.begin(setup.environment, at.step, progress.say)
        metrics: Any = Silent()
        if ranks.first:
            write_recipe(folder, recipe)
            about = About(folder, journal.id, at.step, flat(to_dict(recipe)))
            metrics = Metrics(folder, setup.environment, at.step, Reports(recipe.report_to, about, progress.say), progress.say)
        for line in setup.lines:
            progress.say(line)
        if start is not None:
            progress.say(f"resumed from {start}: step {at.step} of {total}")

        saved, asked = at.step, False
        seconds, tokens = 0.0, 0  # the time and the tokens since the last row
        store = partial(keep, folder, model, optimizer, ema, recipe.save_total_limit, metrics, progress, journal, ranks)
        steps = prefetch(setup.loader.steps(at.sample, micro_batch=recipe.micro_batch))
        model.train()
        try:
            while at.step < total and not tired(at, recipe):
                began, memory.at = time.perf_counter(), f"in step {at.step + 1}"
                after, batches = next(steps)
                counts = (sum(count(batch, task) for batch in batches) for count in (count_targets, count_tokens))
                targets, read, asked = ranks.sum(*counts, bool(interrupt))
                if asked:  # one rank, and so all
                    break
                loss, _ = accumulate(model, batches, task, compute, at.scale.value, targets, ranks)
                squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
                lr = recipe.optimizer.lr * lr_factor(recipe.schedule, at.step, total)
                norm = update(model, optimizer, loss, lr, recipe.max_grad_norm, at.scale.value, squares)
                overflow = recipe.precision == "fp16" and at.scale.judge(loss, norm)
                if ema is not None and math.isfinite(norm):
                    ema.update()
                at.advance(after, read, loss, targets, math.isfinite(norm), overflow)
                leap = at.watch(loss) if targets and not at.streak and recipe.on_spike != "off" else None
                seconds, tokens = seconds + time.perf_counter() - began, tokens + read

                row = {"step": at.step, "loss": at.loss(), "lr": lr, "grad_norm": norm, "tokens": at.tokens,
                       "skipped": at.skipped, "spikes": at.spikes, "rollbacks": at.rollbacks,
                       "tokens_per_second": tokens / seconds, "memory_gb": peak_memory_gb(device.type)}
                if recipe.precision == "fp16":
                    row["loss_scale"] = at.scale.value
                logged = at.step % recipe.logging_steps == 0 or at.step == total
                progress.show(row, stays=logged)
                if logged:
                    metrics.write(row)
                    at.window_loss, at.window_targets, seconds, tokens = 0.0, 0, 0.0, 0
                if overflow:
                    fall = f"the loss scale falls to {at.scale.value:g}"
                    progress.say(f"step {at.step}: a gradient overflows fp16; no update, and {fall}")
                elif at.streak:
                    progress.say(f"step {at.step}: the gradient is not finite; no update ({at.streak} in a row)")
                if leap is not None and at.losses.high == 1:
                    journal.tell(f"step {at.step}: the loss leaps to {loss:.4f}, {leap:.1f} times what is usual")
                if in_trouble(at, recipe.on_spike):
                    then = go_back(folder, at, model, optimizer, ema, journal.tell, ranks)
                    if then is not None:
                        at, saved = then, then.step
                        metrics.rewind(at.step)
                        continue
                    if at.streak:
                        give_up(at)
                memory.at = f"after step {at.step}, in evaluating or saving"
                if setup.evaluation is not None and (at.step == total or due(at.step, recipe.eval_steps)):
                    with averaged(), progress.aside("evaluation", at.step):
                        with compute():
                            results = setup.evaluation(model)
                        before = at.best, at.best_step
                        if at.judge(results[f"eval_{metric}"], METRICS[metric].more) and recipe.best is not None:
                            try:
                                write_model(folder, setup)
                            except InputError as error:
                                at.best, at.best_step = before  # model/ is of that one still
                                journal.tell(f"step {at.step}: the best model is not written: {error}")
                    best = {f"best_eval_{metric}": at.best, "best_step": at.best_step}
                    metrics.write({"step": at.step, **results, **best})
                    progress.say(f"step {at.step}: " + ", ".join(f"{key} {v:.6g}" for key, v in results.items()))
                    if tired(at, recipe):
                        progress.say(f"step {at.step}: eval_{metric} is no better than at step {at.best_step}; the run ends")
                if due(at.step, recipe.save_steps) or ((at.step == total or tired(at, recipe)) and recipe.save_steps):
                    saved = store(at) or saved
            if asked and at.step != saved:
                saved = store(at) or saved
                if at.step != saved:
                    refuse(folder, None, f"stopped after step {at.step}, not saved", f"resume=auto goes on after step {saved}")
        finally:
            steps.close()
            metrics.close()
            if ranks.first:
                progress.say(plot_loss(folder))
        ended = at.step >= total or tired(at, recipe)
        journal.end(at.step, "finished" if ended else "stopped")
        if not ended:
            progress.say(f"stopped after step {at.step} of {total}; resume=auto goes on")
        elif recipe.best is not None and at.best_step is not None:
            progress.say(f"model: {folder / 'model'}, of step {at.best_step}")
        else:
            if ema is not None:
                ema.swap()
            progress.say(f"model{' (averaged weights)' if ema is not None else ''}: {write_model(folder, setup)}")
        last = {key: value for row in read_rows(folder / "metrics.jsonl") for key, value in row.items()}
        last.pop("environment", None)
        return Run(folder, at.step, last, model, stopped=not ended)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Where a forward runs: bf16 and fp16 compute over fp32 weights, whose copies live as long as the forward."""
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, low) if low is not None else nullcontext()


def accumulate(model: nn.Module, batches: Sequence[Arguments], task: str,
               compute: Callable[[], AbstractContextManager[Any]] = nullcontext, scale: float = 1.0, targets: int | None = None,
               ranks: Ranks = ALONE) -> tuple[float, int]:
    """Add to the gradients those of the mean loss over all target tokens of `batches`, times `scale`, whichever way these are
    cut; the loss and the number of targets. Without any target the loss is 0 and the gradients are zeros.

    On several ranks `batches` are this one's share and `targets` those of all; the gradients are formed when it returns, and the
    loss is the mean over the ranks of what each returns."""
    device = next(model.parameters()).device
    targets = sum(count_targets(batch, task) for batch in batches) if targets is None else targets
    each = max(1, targets) / ranks.shares  # of a share, in the mean: gradients are means over the shares too
    losses = []
    for number, batch in enumerate(batches, 1):
        ranks.reduce(model, number == len(batches))
        with compute():
            loss = model(**on_device(batch, device), num_items_in_batch=each).loss
        (loss if scale == 1 else loss * scale).backward()
        losses.append(loss.detach())  # read at the end: each read waits for the device
    return sum(map(float, losses)), targets


def update(model: nn.Module, optimizer: AdamW | Clipped, loss: float, lr: float, max_norm: float,
           scale: float = 1.0, squares: Tensor | None = None) -> float:
    """Divide the gradients by `scale`, clip them to `max_norm` (0: never), step at the rate `lr` and drop them; their norm before
    clipping. Where it or the loss is not finite NaN is returned, and neither a weight nor a moment has changed. `squares`: the sum
    of the squared gradients of all ranks, where there are several."""
    norm = math.nan
    if math.isfinite(loss):
        set_lr(optimizer, lr)
        unscale = None if scale == 1 else torch.tensor(1 / scale, device=next(model.parameters()).device)
        clip = optimizer.clip(max_norm, unscale, squares)
        optimizer.step(clip=clip)  # nothing, if the norm is not finite: the device finds out by itself
        norm = float(clip[0])
    optimizer.zero_grad(set_to_none=True)
    return norm if math.isfinite(norm) else math.nan


def tired(at: Position, recipe: Recipe) -> bool:
    """Whether no evaluation has been better for `patience` of them."""
    return recipe.patience is not None and at.waited >= recipe.patience


def due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def keep(folder: Path, model: nn.Module, optimizer: Optimizer, ema: EMA | None, limit: int | None, metrics: Metrics,
         progress: Progress, journal: Journal, ranks: Ranks, at: Position) -> int | None:
    """Save a state, its metrics first; a disk that refuses costs a line and not the run. Returns the step, None if not saved."""
    metrics.sync()
    try:
        with progress.aside("saving", at.step):
            path = save(folder, at, model, optimizer, limit, ema, ranks)
        progress.say(f"saved: {path}")
    except (SaveError, InputError) as error:
        journal.tell(str(error))
        return None
    return at.step
