"""Learning-rate schedules: pure functions from a step to the factor that multiplies the peak rate.

Step 0 is the first update, so with a warm-up it runs at rate zero. The values are those of transformers' `get_*_schedule*`, number
for number (`transformers/optimization.py`), except that their wsd warms up from `min_lr_ratio` and ours, like all others, from 0.
Only Noam's counts from 1, as published.
"""

from collections.abc import Callable
from math import cos, pi, sqrt

from ..errors import nearest, refuse
from .config import ScheduleConfig

Shape = Callable[[ScheduleConfig, int, int], float]  # (config, step from the end of the warm-up on, steps in all)


def linear(config: ScheduleConfig, step: int, total: int) -> float:
    """From 1 at the end of the warm-up down to 0 at `total`, in a straight line."""
    return max(0.0, float(total - step) / float(max(1, total - config.warmup_steps)))


def cosine(config: ScheduleConfig, step: int, total: int) -> float:
    """From 1 at the end of the warm-up down to 0 at `total`, along half a cosine (Loshchilov and Hutter, 2016)."""
    progress = float(step - config.warmup_steps) / float(max(1, total - config.warmup_steps))
    return max(0.0, 0.5 * (1.0 + cos(pi * progress))) if progress < 1 else 0.0


def constant(config: ScheduleConfig, step: int, total: int) -> float:
    """1 from the end of the warm-up on."""
    return 1.0


def polynomial(config: ScheduleConfig, step: int, total: int) -> float:
    """The straight line to a power."""
    return float(linear(config, step, total) ** config.power)


def wsd(config: ScheduleConfig, step: int, total: int) -> float:
    """1, and down to 0 in the last `decay_steps` (Hu et al., 2024: "MiniCPM"; 1-sqrt: Hägele et al., 2024)."""
    length = decay_steps(config, total)
    if config.warmup_steps + length > total:
        found = f"{length} after {config.warmup_steps} of warm-up, in a run of {total}"
        refuse(None, "schedule.decay_steps", found, "fewer, or a longer run")
    progress = float(step - (total - length)) / float(max(1, length))
    if progress < 0:
        return 1.0
    shapes = {"linear": 1.0 - progress, "cosine": 0.5 * (1.0 + cos(pi * progress)), "1-sqrt": 1.0 - sqrt(progress)}
    return max(0.0, shapes[config.decay]) if progress < 1 else 0.0


def decay_steps(config: ScheduleConfig, total: int) -> int:
    return max(1, total // 10) if config.decay_steps is None else config.decay_steps


def inverse_sqrt(config: ScheduleConfig, step: int, total: int) -> float:
    """The root of (warm-up / step); without a warm-up, of (10,000 / (step + 10,000)). Raffel et al., 2019; Zhai et al., 2022."""
    scale = config.warmup_steps or 10_000
    return 1.0 / sqrt((step + scale - config.warmup_steps) / scale)


def noam(config: ScheduleConfig, step: int, total: int) -> float:
    """The root of (warm-up / step) with steps from 1: Vaswani et al., 2017, section 5.3, over its peak."""
    return sqrt(config.warmup_steps / (step + 1))


def exponential(config: ScheduleConfig, step: int, total: int) -> float:
    """`gamma` for every step after the warm-up."""
    return float(config.gamma ** (step - config.warmup_steps))


SCHEDULES: dict[str, Shape] = {
    "linear": linear, "cosine": cosine, "constant": constant, "wsd": wsd, "noam": noam, "inverse_sqrt": inverse_sqrt,
    "exponential": exponential, "polynomial": polynomial,
}  # fmt: skip


def lr_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """The factor at `step` (from 0) of `total` updates: a linear warm-up from 0, then `config.name`'s curve from 1 down, scaled to
    end at `config.min_lr_ratio` instead of 0 (transformers' `cosine_with_min_lr` scales in the same way)."""
    if config.name not in SCHEDULES:
        refuse(None, "schedule.name", repr(config.name), nearest(config.name, SCHEDULES))
    config = config.of(total)
    done = step + (config.name == "noam")
    if done < config.warmup_steps:
        return float(done) / float(max(1, config.warmup_steps))
    factor = SCHEDULES[config.name](config, step, total)
    return factor * (1 - config.min_lr_ratio) + config.min_lr_ratio
