"""What is trained, and what a step of it costs in one layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from ..parallel.machine import LAYOUT, Machine
from .rehearse import Arguments, Conditions
from .tally import Kind, Moments, highest


@dataclass(frozen=True)
class Job:
    """What is trained, whatever the layout."""

    model: Any  # on the meta device
    batch: Callable[[int], Arguments]  # makes a micro-batch of so many rows
    how: Conditions
    precision: str
    rows: int  # of a step, over all ranks
    tokens: int  # of a row

    def sizes(self, most: int) -> list[int]:
        """The possible numbers of rows in a micro-batch, up to a maximum: they divide the step's. The largest comes first."""
        return [n for n in range(most, 0, -1) if self.rows % n == 0]


@dataclass(frozen=True)
class Estimate:
    """What a step costs in a layout: the memory of one rank, and time."""

    machine: Machine
    rows: int  # of a micro-batch
    forwards: int  # micro-batches of a step on a rank
    moments: Moments  # bytes of a rank at the moments of a step
    limit: float  # bytes that a rank has
    seconds: float  # of a step
    spent: Mapping[str, float]  # the same divided by what a rank waits for: compute, memory, link, host, offload
    host: float  # seconds in which the host is busy, whether or not the device waits for it
    flops: float  # of a step on a rank, without what is computed again
    tokens: int  # of a step, on all ranks
    peak: float  # FLOP/s of the chip
    batch: int  # rows of a step, on all ranks
    aside: int = 0  # bytes of a rank that the host keeps
    room: float = inf  # bytes that the host has for a rank

    @cached_property
    def parts(self) -> Mapping[Kind, int]:
        """Bytes at a rank's peak."""
        return highest(self.moments)

    @property
    def need(self) -> int:
        """Bytes at a rank's peak."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.need <= self.limit and self.aside <= self.room

    @property
    def rate(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.seconds / self.machine.ranks

    @property
    def share(self) -> float:
        """The share that is reached of the chip's rate of large matrix products."""
        return self.flops / self.seconds / self.peak

    @property
    def micro_batch(self) -> int:
        """The value of the recipe's `micro_batch` that gives such micro-batches. It divides the batch, and may exceed a rank's
        share of it."""
        return next(n for n in range(self.rows, self.batch + 1) if self.batch % n == 0)

    @property
    def bottleneck(self) -> str:
        """What takes most of the time."""
        return max(self.spent, key=lambda what: self.spent[what])

    @property
    def settings(self) -> dict[str, Any]:
        """The machine's settings that differ from the defaults."""
        m, plain = self.machine, Machine()
        return {key: getattr(m, key) for key in LAYOUT if getattr(m, key) != getattr(plain, key)}

    def data(self) -> dict[str, Any]:
        """The estimate as `--json` prints it."""
        return {**{key: getattr(self.machine, key) for key in LAYOUT}, "micro_batch": self.micro_batch, "forwards": self.forwards,
                "fits": self.fits,
                "bytes": dict(self.parts), "peak": self.need, "host_bytes": self.aside,
                "seconds": self.seconds, "tokens_per_second": self.rate,
                "share_of_peak": self.share, "bottleneck": self.bottleneck, "spent": dict(self.spent)}  # fmt: skip
