"""Rolls a run back when updates stay non-finite or the loss spikes: it returns to an earlier state, and continues after the data
that caused the trouble.

PaLM was trained in this way (Chowdhery et al., 2022, section 5.1): the same weights without the batches of the spike had no spike.
A run returns to each state only once, so a run with persistent trouble comes to an end.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import nn
from torch.optim import Optimizer

from ..checkpoint.state import find_state, remove_states, step_of
from ..errors import refuse
from ..optim.ema import EMA
from ..parallel.ranks import Ranks
from .state import Position, restore

PATIENCE = 5  # updates in a row that may be left out because a loss or a gradient is not finite


def in_trouble(at: Position, on_spike: str) -> bool:
    """Whether to return after this step: it is the fifth in a row that was not finite, or the first of a spike."""
    return at.streak == PATIENCE or (on_spike == "rollback" and at.losses.high == 1)


def go_back(folder: Path, at: Position, model: nn.Module, optimizer: Optimizer, ema: EMA | None,
            say: Callable[[str], None], ranks: Ranks) -> Position | None:
    """Restore the newest valid state of `folder` from before the trouble at `at`, and remove those after it; returns where the run
    then stands. Without such a state, or if the run has already returned to it once, nothing changes and None is returned. A line
    tells what happened.

    Weights, moments, averages, random generators, the schedule and the best so far are those of the state; the data continue at the
    current position. The update just before a bad loss may have caused it, so the state must be older than that update: older than
    the last update before all steps that had none, including those in which the loss scale fell.
    """
    seen = find_state(folder, before=at.step - at.trouble) if ranks.first else None
    found = ranks.tell("" if seen is None else str(seen[0]))
    if not found or step_of(Path(found)) <= at.returned:
        why = f"the run has already returned to step {at.returned}" if found else "none was saved before the trouble began"
        say(f"step {at.step}: no state to go back to: {why}")
        return None
    then = restore(Path(found), model, optimizer, ema, ranks)
    if ranks.first:
        remove_states(folder, after=then.step)
    say(f"step {at.step}: back to step {then.step}; the data read since, samples {then.sample} to {at.sample - 1}, is skipped")
    return replace(then, sample=at.sample, tokens=at.tokens, skipped=at.skipped, spikes=at.spikes, owed=False,
                   rollbacks=at.rollbacks + 1, returned=then.step)


def give_up(at: Position) -> NoReturn:
    """Refuse to continue: updates stay non-finite, and there is no state to return to."""
    again = f", after going back to step {at.returned} too" if at.rollbacks else ", and no state from before them is saved"
    refuse(None, f"step {at.step}", f"{PATIENCE} gradients in a row were not finite{again}",
           "a lower optimizer.lr, precision=fp32 or other data")
