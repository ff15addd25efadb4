"""A run in progress. Each method is one thing that the loop does: a step, its line, a rollback, an evaluation, a save, the end."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.state import SaveError, step_of
from ..errors import InputError, refuse
from ..metrics.table import METRICS
from ..optim.adamw import AdamW
from ..optim.clipped import Clipped
from ..optim.ema import EMA
from ..optim.schedules import lr_factor
from ..parallel.ranks import Ranks, settle
from .background import Background
from .calibrate import remember
from .evaluate import NOTHING
from .graphs import Graphs
from .guard import give_up, go_back, in_trouble
from .interrupt import Interrupt, Stop
from .journal import Journal
from .memory import Memory
from .metrics import Metrics, read_rows
from .progress import Progress, peak_memory_gb
from .recipe import Recipe
from .setup import Setup, write_model
from .state import Position, save
from .step import Ready, accumulate, autocast, ready, soon, update

AT_ONCE = ("cpu",)  # devices whose work is done when its call returns


@dataclass
class Step:
    """The outcome of an update."""

    loss: float
    lr: float
    norm: float  # NaN: there was no update
    overflow: bool  # of fp16, whose scale has fallen
    leap: float | None  # how many times the usual the loss is, if it leaps


@dataclass
class Coming:
    """The batch of a step: this rank's micro-batches, or why there are none, the position after it, how many targets and tokens all
    ranks have, and how many ranks were asked to stop."""

    after: int
    batches: Sequence[Ready]
    wrong: Exception | None
    targets: int
    tokens: int
    asked: int


@dataclass
class Session:
    """What a run trains, where it stands (`at`; `saved` is the step of its newest state, `start` the step from which this process
    continued), and where it reports."""

    recipe: Recipe
    device: torch.device
    setup: Setup
    ranks: Ranks
    optimizer: AdamW | Clipped
    ema: EMA | None
    at: Position
    metrics: Metrics
    progress: Progress
    journal: Journal
    memory: Memory
    graphs: Graphs | None = None  # None: the host calls every kernel by itself
    background: Background | None = None  # None: the run waits while a state is written
    saved: int = field(init=False)
    start: int = field(init=False)
    coming: Coming | None = None  # of the next step, if it was read ahead
    seconds: float = 0.0  # since the last row of metrics
    tokens: int = 0  # since then
    unwritten: Step | None = None  # the last step, if no row is of it yet

    def __post_init__(self) -> None:
        self.saved, self.start, self.folder = self.at.step, self.at.step, Path(self.recipe.output_dir)
        self.compute = partial(autocast, self.recipe.precision, self.device)

    @property
    def model(self) -> nn.Module:
        return self.setup.model

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return self.at.step >= self.setup.steps

    @property
    def tired(self) -> bool:
        """Whether `patience` evaluations in a row have not been better than the best."""
        return self.recipe.patience is not None and self.at.waited >= self.recipe.patience

    @property
    def ended(self) -> bool:
        return (self.finished or self.tired) and not self.at.owed

    @property
    def again(self) -> str:
        """The command that continues the run: its `resume` may name the state from which it was to begin, which is refused once the
        run has a state of its own."""
        begun = self.recipe.resume == "never" or (self.recipe.resume != "auto" and self.saved != self.start)
        return f"the same command{' with resume=auto' if begun else ''}"

    def due(self, every: int | None) -> bool:
        """Whether something that is done every so many steps is due now."""
        return every is not None and self.at.step % every == 0

    def batches(self) -> Iterator[tuple[int, list[Ready]]]:
        """From where the run stands: (position after, micro-batches) of each step. The host's work on them is done; no device is
        involved."""
        fill = self.graphs is not None and self.graphs.fills
        made = partial(ready, self.model, task=self.recipe.objective, device=self.device, fill=fill)
        for after, batches in self.setup.loader.steps(self.at.sample, micro_batch=self.recipe.micro_batch):
            yield after, [made(batch) for batch in batches]

    def step(self, steps: Iterator[tuple[int, Sequence[Ready]]], interrupt: Interrupt) -> Step:
        """Read the next batch and update on it. If a rank was asked to stop, nothing is updated. Errors: `Stop`."""
        at, recipe, ranks, task = self.at, self.recipe, self.ranks, self.recipe.objective
        began, self.memory.at = time.perf_counter(), f"in step {at.step + 1}"
        coming, self.coming = self.coming or self.fetch(steps, interrupt), None
        if coming.wrong is not None:
            raise coming.wrong
        if coming.asked or (ranks.size == 1 and interrupt):  # one rank, and so all
            raise Stop
        targets = coming.targets
        told = self.progress.forward if not self.progress.steps else None
        # gradients are a mean over the shares, and each one's would be so much larger than in one process, and overflow sooner
        scale = at.scale.value / ranks.shares if recipe.precision == "fp16" else 1.0
        found, _ = accumulate(self.model, coming.batches, task, self.compute, scale, targets, ranks, told, self.graphs)
        squares, found = ranks.verdict(self.optimizer.squares(ranks.copies), found)
        lr = recipe.optimizer.lr * lr_factor(recipe.schedule, at.step, self.setup.steps)
        known = soon(found)
        ahead = partial(self.look_ahead, steps, interrupt)
        norm = update(self.model, self.optimizer, found, lr, recipe.max_grad_norm, scale, squares, ahead, self.graphs, True)
        loss = known()
        overflow = recipe.precision == "fp16" and at.scale.judge(loss, norm)
        if self.ema is not None and math.isfinite(norm):
            settle(self.model)
            self.ema.update()
        leap = at.advance(coming.after, coming.tokens, loss, targets, math.isfinite(norm), overflow, recipe.on_spike != "off")
        self.seconds, self.tokens = self.seconds + time.perf_counter() - began, self.tokens + coming.tokens
        return Step(loss, lr, norm, overflow, leap)

    def fetch(self, steps: Iterator[tuple[int, Sequence[Ready]]], interrupt: Interrupt) -> Coming:
        """The next batch, on the device, and what all ranks say of it. An error is kept for the batch's step: before that there may
        be other things that ranks do together."""
        after, batches, wrong = 0, [], None
        try:
            after, read = next(steps)
            batches = [batch.on(self.device) for batch in read]
        except Exception as error:
            wrong = error
        counts = sum(batch.targets for batch in batches), sum(batch.tokens for batch in batches)
        return Coming(after, batches, wrong, *self.ranks.sum(*counts, bool(interrupt)))

    def look_ahead(self, steps: Iterator[tuple[int, Sequence[Ready]]], interrupt: Interrupt) -> None:
        """Read the batch of the next step while the device computes, so that the device need not wait for it. On a CPU this would
        gain nothing, and without it the ranks hear of a signal one step sooner."""
        if self.device.type not in AT_ONCE and self.at.step + 1 < self.setup.steps:
            self.coming = self.fetch(steps, interrupt)

    def log(self, step: Step) -> None:
        """Print how the step went, and every `logging_steps` write a row."""
        at = self.at
        self.settle(wait=False)
        logged = self.due(self.recipe.logging_steps) or self.finished
        self.progress.show(partial(self.row, step), stays=logged)
        self.unwritten = step
        if logged:
            self.note()
        if step.overflow:
            fall = f"the loss scale falls to {at.scale.value:g}"
            self.progress.say(f"step {at.step}: a gradient overflows fp16; no update, and {fall}")
        elif at.streak:
            self.progress.say(f"step {at.step}: the gradient is not finite; no update ({at.streak} in a row)")
        if step.leap is not None and at.losses.high == 1:
            self.journal.tell(f"step {at.step}: the loss leaps to {step.loss:.4f}, {step.leap:.1f} times the usual")

    def note(self) -> None:
        """Write a row for the steps since the last one, if there are any."""
        if self.unwritten is not None:
            self.metrics.write(self.row(self.unwritten))
            self.at.window_loss, self.at.window_targets, self.seconds, self.tokens, self.unwritten = 0.0, 0, 0.0, 0, None

    def row(self, step: Step) -> dict[str, Any]:
        """The values that a row reports for the steps since the last one."""
        at = self.at
        scale = {"loss_scale": at.scale.value} if self.recipe.precision == "fp16" else {}
        return {"step": at.step, "loss": at.loss(), "lr": step.lr, "grad_norm": step.norm, "tokens": at.tokens,
                "skipped": at.skipped, "spikes": at.spikes, "rollbacks": at.rollbacks,
                "tokens_per_second": self.tokens / self.seconds, "memory_gb": peak_memory_gb(self.device.type), **scale}

    def went_back(self) -> bool:
        """Whether the run is in trouble and has returned to an earlier state. Errors: `InputError` if it cannot continue."""
        if not in_trouble(self.at, self.recipe.on_spike):
            return False
        self.settle()
        then = go_back(self.folder, self.at, self.model, self.optimizer, self.ema, self.journal.tell, self.ranks)
        if then is None:
            if self.at.streak:
                give_up(self.at)
            return False
        was, self.at, self.saved = self.at, then, then.step
        if self.recipe.best is not None and was.best_step is not None and was.best_step >= then.step:  # of it is what model/ holds
            then.best, then.best_step, then.waited = was.best, was.best_step, was.waited
            if was.best_step > then.step:
                kept = f"{self.folder / 'model'} is of step {was.best_step} from before going back, by {self.recipe.best}"
                self.journal.tell(f"step {then.step}: {kept} {was.best:g}; it stays until a better one comes")
        self.metrics.rewind(then.step)
        return True

    def judged(self) -> bool:
        """Whether the model as it is has been evaluated, or there is no data for that."""
        if self.setup.evaluation is None:
            return True
        rows = read_rows(self.folder / "metrics.jsonl") if self.ranks.first else ()
        return bool(self.ranks.tell("yes" * any(row.get("step") == self.at.step and "eval_loss" in row for row in rows)))

    def heed(self, interrupt: Interrupt) -> None:
        """Errors: `Stop`, on all ranks if one was asked to stop."""
        if self.ranks.sum(bool(interrupt))[0]:
            raise Stop

    def evaluate(self, interrupt: Interrupt) -> None:
        """Evaluate the model, or its average. The best so far is written out if the recipe asks for it. If a rank is asked to stop
        meanwhile, the evaluation is owed. Errors: `Stop`."""
        assert self.setup.evaluation is not None
        at, metric = self.at, self.recipe.best or "loss"
        again = at.owed and self.judged()  # by a run that was killed before it saved another state
        at.owed = True
        if self.graphs is not None:
            self.graphs.make_room()
        settle(self.model)
        with self.ema.in_place() if self.ema is not None else nullcontext(), self.progress.aside("evaluation", at.step):
            with self.compute():
                tell, heed = partial(self.progress.part, "texts written"), partial(self.heed, interrupt)
                results = self.setup.evaluation(self.model, tell, heed)
            at.owed = False
            before = at.best, at.best_step
            value = float(self.ranks.tell(repr(float(results[f"eval_{metric}"]))))  # each has written texts: they may differ
            if at.judge(value, METRICS[metric].more) and self.recipe.best is not None:
                self.check_place()
                try:
                    write_model(self.folder / "model", self.setup, self.ranks)
                except InputError as error:
                    at.best, at.best_step = before  # model/ is of that one still
                    self.journal.tell(f"step {at.step}: the best model is not written: {error}")
        if self.tired:  # no row of a later step would tell of the last ones
            self.note()
        if not again:
            self.metrics.write({"step": at.step, **results, f"best_eval_{metric}": at.best, "best_step": at.best_step})
        self.progress.say(f"step {at.step}: " + ", ".join(f"{key} {v:.6g}" for key, v in results.items()))
        if not results["eval_targets"]:
            self.progress.say(f"step {at.step}: {NOTHING}")
        if self.tired:
            why = f"no better than at step {at.best_step}" if at.best_step is not None else "not finite"
            self.progress.say(f"step {at.step}: eval_{metric} is {why}; the run ends")

    def save(self) -> None:
        """Save a state, or begin to, its metrics first. If the disk refuses, the run prints a line and continues.
        Errors: `InputError` if the folder is no longer there."""
        at = self.at
        self.settle()
        self.check_place()
        self.metrics.sync()
        later = () if self.background is None else (self.background.write,)
        limit = None if at.trouble else self.recipe.save_total_limit  # in trouble nothing to go back to is removed
        try:
            with self.progress.aside("saving", at.step):
                path = save(self.folder, at, self.model, self.optimizer, limit, self.ema, self.ranks, *later)
            if path is not None:
                self.progress.say(f"saved: {path}")
                self.saved = at.step
        except (SaveError, InputError) as error:
            self.journal.tell(str(error))

    def check_place(self) -> None:
        """Refuse to write into another folder than the one in which the run began: half of the run would be in each."""
        if not self.ranks.tell("yes" * bool(self.metrics.at_home())):
            found = f"moved or removed before step {self.at.step}, as the run went on"
            refuse(self.folder, "output_dir", found, f"where it is now, output_dir=FOLDER goes on after step {self.saved}")

    def settle(self, wait: bool = True) -> None:
        """Wait for the state that is being written in the background, or only look whether it is finished, and report the
        result."""
        if self.background is None:
            return
        try:
            path = self.background.settled(wait)
            if path is not None:
                self.progress.say(f"saved: {path} ({self.background})")
                self.saved = step_of(path)
        except (SaveError, InputError) as error:
            self.journal.tell(str(error))

    def stop(self) -> None:
        """Save before the requested end. Errors: `InputError` if the disk refuses."""
        self.settle()
        if self.at.step != self.saved:
            self.save()
            self.settle()
        if self.at.step != self.saved:
            found = f"stopped after step {self.at.step}, not saved"
            refuse(self.folder, None, found, f"{self.again} goes on after step {self.saved}")

    def finish(self) -> dict[str, Any]:
        """Write the model out if the run has ended, and return the last value of each metric. A folder that was moved gets it where
        it is now."""
        at, total = self.at, self.setup.steps
        settle(self.model)
        if now := self.ranks.tell(str(self.metrics.left or "")):
            self.folder = self.journal.folder = Path(now)
        else:
            self.check_place()
        rows = list(read_rows(self.folder / "metrics.jsonl"))
        last = {key: value for row in rows for key, value in row.items()}
        last.pop("environment", None)
        self.journal.end(at.step, "finished" if self.ended else "stopped")
        if not self.ended:
            self.progress.say(f"stopped after step {at.step} of {total}; {self.again} continues")
        elif self.recipe.best is not None and at.best_step is not None:
            self.progress.say(f"model: {self.folder / 'model'}, of step {last.get('best_step', at.best_step)}")
        else:
            if self.ema is not None:
                self.ema.swap()
            which = " (averaged weights)" if self.ema is not None else ""
            self.progress.say(f"model{which}: {write_model(self.folder / 'model', self.setup, self.ranks)}")
        if self.ranks.first:
            mine = [row for row in rows if row.get("step", 0) > self.start]  # those before may be of another machine
            remember(self.setup.foreseen, mine)
        return last
