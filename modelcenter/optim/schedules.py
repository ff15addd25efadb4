"""Learning-rate schedules: pure functions from a step to the factor that multiplies the peak rate.

Step 0 is the first update, so with a warm-up it runs at rate zero: the tables are those of transformers'
`get_{linear,cosine,constant}_schedule_with_warmup`, number for number (`transformers/optimization.py`).
"""

from collections.abc import Callable
from math import cos, pi

from ..errors import nearest, refuse
from .config import ScheduleConfig


def linear(step: int, warmup: int, total: int) -> float:
    """Down from 1 at the end of the warm-up to 0 at `total`, in a straight line."""
    return max(0.0, float(total - step) / float(max(1, total - warmup)))


def cosine(step: int, warmup: int, total: int) -> float:
    """Down from 1 at the end of the warm-up to 0 at `total`, along half a cosine (Loshchilov and Hutter, 2016)."""
    progress = float(step - warmup) / float(max(1, total - warmup))
    return max(0.0, 0.5 * (1.0 + cos(pi * progress))) if progress < 1 else 0.0


def constant(step: int, warmup: int, total: int) -> float:
    """1 from the end of the warm-up on."""
    return 1.0


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {"linear": linear, "cosine": cosine, "constant": constant}


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """The factor at `step` (from 0) of `total` updates: a linear warm-up from 0, then `config.name`'s curve from 1 down
    to `config.min_lr_ratio` (transformers' `cosine_with_min_lr` scales in the same way)."""
    if config.name not in SCHEDULES:
        refuse(None, "schedule.name", repr(config.name), nearest(config.name, SCHEDULES))
    if step < config.warmup_steps:
        return float(step) / float(max(1, config.warmup_steps))
    factor = SCHEDULES[config.name](step, config.warmup_steps, total)
    return factor * (1 - config.min_lr_ratio) + config.min_lr_ratio
