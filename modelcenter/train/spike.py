"""Detects when a step's loss spikes above those of the steps before it.

This is Hampel's filter (Davies and Gather, 1993; Pearson, 2002), one-sided and on logarithms: the running median is the usual
value, and the median absolute deviation from it says how far losses stray. It uses logarithms because the noise of a loss is
proportional to it, whether it is 11 at the beginning or 0.02 at the end. The median covers only a few steps, because the loss keeps
falling.
"""

import math
from dataclasses import dataclass
from statistics import median

SHORT, LONG, FEW = 9, 128, 32  # losses of the running median; deviations remembered; those that make a judgement possible
SIGMAS = 7.0  # of a normal distribution with this MAD; a loss so far off is no noise
BEYOND = 2.0  # times the largest deviation remembered, for noise whose tail is heavier, or data of several kinds
LEAST = math.log(1.2)  # and a fifth above the usual at least: very large batches have very little noise
NEW = 16  # leaps in a row after which the level is a new one, and what was usual is forgotten


@dataclass
class Losses:
    """The last steps' losses. Leaps are kept out of it; so must be what is not finite."""

    recent: tuple[float, ...] = ()  # logarithms of the last SHORT
    strays: tuple[float, ...] = ()  # the last LONG distances from the running median
    high: int = 0  # leaps in a row up to now

    def see(self, loss: float) -> float | None:
        """By what factor this step's finite loss exceeds the usual one, if that is a leap; None if it is not. A loss of 0, which
        has no logarithm, is no leap."""
        if loss <= 0:
            return None
        value = math.log(loss)
        stray = value - median(self.recent) if len(self.recent) == SHORT else None
        if stray is not None and len(self.strays) >= FEW:
            sigma = 1.4826 * median(map(abs, self.strays))
            if stray > max(SIGMAS * sigma, BEYOND * max(self.strays), LEAST):
                self.high += 1
                if self.high == NEW:
                    self.recent, self.strays = (), ()
                return math.exp(stray)
        self.high = 0
        self.recent = (*self.recent, value)[-SHORT:]
        if stray is not None:
            self.strays = (*self.strays, stray)[-LONG:]
        return None
