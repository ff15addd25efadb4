"""The memory that a run needs at the peak of a step, by kind, compared with what is available."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import size
from .tally import KINDS, LASTING, Kind


@dataclass(frozen=True)
class Plan:
    """The bytes at the peak of a step, by kind, on a device with `total` bytes, of which `free` are left for this process."""

    parts: Mapping[Kind, int]
    free: int
    total: int

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.need <= self.free

    @property
    def lasting(self) -> int:
        """The bytes needed whatever the batch."""
        return sum(self.parts.get(kind, 0) for kind in LASTING)

    @property
    def hopeless(self) -> bool:
        """Whether no batch is small enough to fit."""
        return self.lasting > self.total

    def table(self) -> str:
        """A line for each kind."""
        rows = [(KINDS[kind], self.parts[kind]) for kind in KINDS if self.parts.get(kind)] + [("at the peak of a step", self.need)]
        return "\n".join(f"{name:<36}{size(count):>10}" for name, count in rows)

    def __str__(self) -> str:
        there = f"{size(self.free)} of {size(self.total)}" if self.free < self.total else size(self.total)
        return f"about {size(self.need)} at the peak, {there} free: {'fits' if self.fits else 'does not fit'}"
