"""Spikes of the loss: found at once in what has one, and never in what has none."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest

from modelcenter.config import bind
from modelcenter.train.spike import FEW, NEW, SHORT, Losses

STEPS = 10_000


def clean(seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """10,000 losses without a spike, of every kind that training has."""
    rng = np.random.default_rng(seed)
    steps, noise = np.arange(STEPS), rng.normal(size=STEPS)
    descent = 2 + 9 * np.exp(-steps / 300)
    yield "noise in proportion", descent * (1 + 0.02 * noise)
    yield "noise of one size", descent + 0.05 * noise
    yield "a fast beginning", 2 + 9 * np.exp(-steps / 10) + 0.05 * noise
    yield "flat and coarse", 2 + 0.1 * noise
    yield "hardly any noise", 2 + 1e-4 * noise
    yield "constant", np.full(STEPS, 0.7)
    yield "waves", 2.5 + 0.5 * np.sin(steps / 100) + 0.02 * noise
    yield "skewed", 0.5 * np.exp(0.5 * noise)
    yield "exponential", 0.1 * rng.exponential(size=STEPS) + 0.01
    yield "learned by heart", np.exp(-steps / 500) * np.exp(noise)
    yield "few right or wrong", rng.binomial(8, 0.05, STEPS) / 8 * 3 + 0.02 * np.exp(0.3 * noise)
    slow = np.zeros(STEPS)
    for i in range(1, STEPS):
        slow[i] = 0.95 * slow[i - 1] + 0.04 * noise[i]
    yield "noise with memory", descent + slow
    yield "two kinds of data", np.where(rng.random(STEPS) < 0.2, 4.0, 2.0) * (1 + 0.02 * noise)
    yield "epochs", 2 - 0.2 * (steps // 1000) + 0.05 * noise


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_no_false_alarm_in_ten_thousand_clean_steps(seed: int) -> None:
    for name, losses in clean(seed):
        seen = Losses()
        alarms = [step for step, loss in enumerate(losses) if seen.see(float(loss)) is not None]
        assert not alarms, f"{name}: {alarms[:5]}"


@pytest.mark.parametrize("factor", [2, 3, 10])
def test_a_spike_is_found_at_its_first_step(factor: float) -> None:
    """At any step past the first few dozens, the fast descent of the beginning among them."""
    rng, streams = random.Random(0), dict(clean(5))
    for name in ("noise in proportion", "noise of one size", "a fast beginning", "flat and coarse", "waves"):
        for _ in range(8):
            seen, at = Losses(), rng.randrange(SHORT + FEW, 2000)
            for loss in streams[name][:at]:
                assert seen.see(float(loss)) is None
            leap = seen.see(factor * float(streams[name][at]))
            assert leap is not None and leap == pytest.approx(factor, rel=0.4), f"{name}: {factor} times at step {at}"


def test_a_spike_does_not_hide_the_next_and_a_new_level_is_accepted() -> None:
    rng, seen = np.random.default_rng(0), Losses()
    quiet = iter((2 + 0.05 * rng.normal(size=1000)).tolist())
    for _ in range(200):
        assert seen.see(next(quiet)) is None
    for _ in range(20):
        for loss in (6.0, 7.0, 6.5):
            assert seen.see(loss) is not None
        assert seen.high == 3
        before = seen.strays
        assert seen.see(next(quiet)) is None and seen.high == 0
        assert len(seen.strays) == len(before) and max(seen.strays) < 0.3  # nothing of the spike is in it
    told = [seen.see(5 + 0.05 * float(rng.normal())) is not None for _ in range(200)]
    assert told == [True] * NEW + [False] * (200 - NEW)
    assert seen.see(10.0) is not None


def test_the_first_41_steps_are_not_judged() -> None:
    for at in (20, 41, 42):
        seen = Losses()
        assert [step for step in range(1, at + 1) if seen.see(9.0 if step == at else 1 + step % 3 / 10)] == [42] * (at == 42)


def test_a_loss_of_nothing_says_nothing() -> None:
    seen = Losses()
    for step in range(200):
        assert seen.see(1.0 if step % 2 else 0.0) is None
    assert seen.see(0.0) is None and seen.see(2.0) == pytest.approx(2)


def test_what_was_usual_survives_json() -> None:
    rng, seen = random.Random(1), Losses()
    for _ in range(300):
        seen.see(2 + rng.gauss(0, 0.1))
    back = bind(Losses, json.loads(json.dumps(asdict(seen))))
    assert back == seen and all(map(math.isfinite, back.strays))
