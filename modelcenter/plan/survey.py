"""All layouts of a job on a number of devices, side by side: which fit, how fast they are, which to choose, and what remedies
gain."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from ..errors import counted, refuse, size
from ..parallel.machine import MOST, Machine, in_shards
from .costs import Costs
from .estimate import Estimate
from .layout import RECOMPUTES, best_of, layouts
from .tally import KINDS

HEAD = ("", "tensor x fsdp x copies", "zero", "recompute", "micro-batch", "a rank", "s/step", "tok/s/device", "of peak", "bound by")
SHOWN = 12


@dataclass(frozen=True)
class Survey:
    """Layouts: those that fit come first, the fastest first, then the others, the smallest first. `others`: costs of the job with
    another setting; `allowed`: which layouts can be run."""

    costs: Costs
    estimates: Sequence[Estimate]
    others: Mapping[str, Costs] = field(default_factory=dict)
    allowed: Callable[[Machine], bool] = lambda machine: True

    @property
    def choice(self) -> Estimate:
        return self.estimates[0]

    @cached_property
    def remedies(self) -> Sequence[tuple[str, Estimate]]:
        """(setting, estimate) for each setting that needs less memory than the choice."""
        return [(name, e) for name, e in remedies(self.costs, self.choice, self.others) if self.allowed(e.machine)]

    def table(self) -> str:
        """The layouts as a table with aligned columns."""
        rows = [HEAD]
        for e in self.estimates[:SHOWN]:
            m = e.machine
            degrees = f"{m.tensor_parallel} x {m.fsdp} x {m.replicate}"
            rows.append((
                "fits" if e.fits else "too big", degrees, f"{m.zero if m.wrapped else '-'}{' host' * m.offload}", str(m.recompute),
                f"{e.rows} x {e.forwards}", size(e.need), f"{e.seconds:.3g}", f"{e.rate:,.0f}", f"{e.share:.0%}", e.bottleneck,
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        left = len(self.estimates) - SHOWN
        return "\n".join([*lines, *([f"and {left} more (--json has all)"] if left > 0 else [])])

    def memory(self) -> str:
        """The first layout's bytes, a line for each kind."""
        e = self.choice
        rows = [(KINDS[kind], e.parts[kind]) for kind in KINDS if e.parts.get(kind)]
        rows.append((f"on a rank, of {size(int(e.limit))}", e.need))
        rows += [(f"in the host's memory, of {size(int(e.room))}", e.aside)] if e.aside else []
        return "\n".join(f"{name:<36}{size(n):>10}" for name, n in rows)

    def verdict(self) -> str:
        """Which layout to choose, or what would help."""
        e = self.choice
        if e.fits:
            return f"choice: {settings(e)}: {e.seconds:.3g} s a step, bound by {e.bottleneck}"
        return f"nothing fits: {self.least()}; {self.help()}"

    def least(self) -> str:
        """How much memory the choice lacks."""
        e = self.choice
        host = f", with {size(e.aside)} of {size(int(e.room))} in the host's memory" if e.aside > e.room else ""
        return f"{settings(e)} needs least, {size(e.need)} of {size(int(e.limit))} a rank{host}"

    def help(self) -> str:
        """What to change if nothing fits."""
        fitting = [(name, other) for name, other in self.remedies if other.fits]
        return f"{fitting[0][0]} ({size(fitting[0][1].need)})" if fitting else "more devices, an adapter or a smaller model"

    def worth(self) -> str:
        """A line for each remedy: memory and time against the choice."""
        e = self.choice
        return "\n".join(
            f"  {name:<34}{size(other.need):>10} a rank ({other.need / e.need - 1:+.0%}), {other.rate:>9,.0f} tok/s/device "
            f"({other.rate / e.rate - 1:+.0%})" for name, other in self.remedies
        )  # fmt: skip

    def data(self) -> dict[str, Any]:
        chip = self.costs.chip
        return {"device": chip.name, "memory": self.costs.limit, "source": chip.source, "call": chip.call,
                "host": chip.host, "choice": self.choice.data(),
                "layouts": [e.data() for e in self.estimates],
                "remedies": {name: e.data() for name, e in self.remedies}}  # fmt: skip


def settings(e: Estimate) -> str:
    """The keys that describe a layout, without those at their defaults."""
    words = [f"machine.{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in e.settings.items()]
    return " ".join([*words, f"micro_batch={e.micro_batch}"])


def survey(costs: Costs, ranks: int, machine: Machine, rows: int | None = None, others: dict[str, Costs] | None = None,
           allowed: Callable[[Machine], bool] = lambda machine: True) -> Survey:
    """Every layout on `ranks` devices, otherwise like `machine`, with its best micro-batch (or `rows`) and recompute. `others`:
    costs of the job with another setting, to be shown as remedies; `allowed`: which layouts can be run. Errors: `InputError` if
    none can."""
    found = [best_of(costs, m, rows) for m in layouts(costs.job, ranks, costs.chip.node, machine) if allowed(m)]
    if costs.apart and not any(e.fits for e in found):
        other = layouts(costs.job, ranks, costs.chip.node, replace(machine, offload=True))
        found += [best_of(costs, m, rows) for m in other if allowed(m)]
    if not found and machine.sequence_parallel:
        none = f"true, and no layout of {counted(ranks, 'device')} that can be run cuts tensors"
        refuse(None, "machine.sequence_parallel", none, "false, or devices among which the heads can be shared out")
    if not found:
        refuse(None, "batch", f"{costs.job.rows} sequences for {ranks} devices", "a multiple of the devices, or fewer of them")
    sort(found)
    known: set[Machine] = set()
    while (choice := found[0]).machine not in known:
        # What was interpolated is rehearsed as it is before it is promised; then another may be faster.
        exact = costs.exact(choice.machine, choice.rows)
        while choice.fits and not exact.fits and exact.rows > 1:
            fewer = costs.job.sizes(exact.rows - 1)[0]
            exact = costs.exact(choice.machine, fewer)
        found[0] = exact
        known.add(exact.machine)
        sort(found)
    return Survey(costs, found, others or {}, allowed)


def sort(found: list[Estimate]) -> None:
    """Sort: those that fit come first, the fastest first, then the others, the smallest first."""
    found.sort(key=lambda e: (not e.fits, e.seconds if e.fits else e.need))


def remedies(costs: Costs, e: Estimate, others: Mapping[str, Costs]) -> Iterator[tuple[str, Estimate]]:
    """The changes that need less memory than `e`, with their estimates. Half a micro-batch may need more, because sums of gradients
    are then kept."""
    lacks = e.aside > e.room  # what the host has
    return ((name, other) for name, other in changes(costs, e, others)
            if other.need < e.need or (lacks and other.aside < e.aside))  # fmt: skip


def changes(costs: Costs, e: Estimate, others: Mapping[str, Costs]) -> Iterator[tuple[str, Estimate]]:
    """The changes that usually need less memory."""
    if e.rows > 1:
        rows = costs.job.sizes(e.rows // 2)[0]
        yield f"micro_batch={rows}", costs.exact(e.machine, rows)
    for how in RECOMPUTES[RECOMPUTES.index(e.machine.recompute) + 1 :]:
        yield f"machine.recompute={how}", costs.exact(replace(e.machine, recompute=how), e.rows)
    m = e.machine
    if shared := in_shards(m):
        yield shared[0], costs.exact(shared[1], e.rows)
    if not m.offload and costs.apart:
        yield "machine.offload=true", costs.exact(replace(m, offload=True), e.rows)
    if m.wrapped and m.zero < 3:
        yield "machine.zero=3", costs.exact(replace(m, zero=3), e.rows)
    for name, other in others.items():
        yield name, other.exact(m, e.rows)
    if 2 * m.shares <= costs.job.rows and 2 * m.ranks <= MOST:
        double = replace(m, fsdp=2 * m.fsdp)
        rows = min(e.rows, ceil(costs.job.rows / double.shares))
        yield f"twice the devices, machine.fsdp={double.fsdp}", costs.exact(double, rows)
