"""The layouts in which a job can be split among ranks, and the best way to run it in each."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ..errors import refuse
from ..parallel.check import compiles
from ..parallel.machine import LAYOUT, Machine, Recompute
from .costs import Costs, heads_of
from .estimate import Estimate, Job

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def layouts(job: Job, ranks: int, node: int, machine: Machine) -> Iterator[Machine]:
    """The ways to split the job among `ranks`, `node` of which are in one node: tensor parallel inside a node, with degrees that
    divide the heads and the node (with nodes of six, every second group of four would span two); the rest as one FSDP group, with
    one copy of the model per node, or with one per rank; every stage of ZeRO."""
    heads = heads_of(job.model)
    for tp in (n for n in (1, 2, 4, 8) if ranks % n == min(ranks, node) % n == 0 and not any(h % n for h in heads)):
        rest = ranks // tp
        for copies in sorted({1, rest, max(1, ranks // node) if rest % max(1, ranks // node) == 0 else 1}):
            fsdp = rest // copies
            if fsdp * copies > job.rows:
                continue
            for zero in (3, 2, 1) if fsdp > 1 or machine.offload else (3,):
                yield replace(machine, tensor_parallel=tp, fsdp=fsdp, replicate=copies, zero=zero)


def check_open(machine: Machine, beside: str) -> None:
    """Refuse a part of a layout that is given together with a setting (`beside`) that chooses it."""
    for key in LAYOUT:
        if getattr(machine, key) != getattr(Machine(), key):
            refuse(None, f"machine.{key}", f"given beside {beside}, which chooses it", "one of the two")


def best_of(costs: Costs, machine: Machine, rows: int | None = None) -> Estimate:
    """The fastest estimate that fits, over micro-batch sizes and kinds of recompute; if none fits, the one that needs the least
    memory. A size is a rank's whole share, or divides the batch as a recipe's does. The smallest sizes, each of which is rehearsed,
    are tried if no larger one fits and the smallest does. `rows`: if given, only this size is tried."""
    mine = ceil(costs.job.rows / machine.shares)
    whole = [mine] if any(costs.job.rows % n == 0 for n in range(mine, 2 * mine)) else []
    sizes = [min(rows, mine)] if rows is not None else sorted({*whole, *costs.job.sizes(mine)}, reverse=True)
    ask = costs.estimate if len(sizes) > 1 else costs.exact
    tried: list[Estimate] = []
    for layout in filter(compiles, (replace(machine, recompute=how) for how in RECOMPUTES)):
        found = [ask(layout, n) for n in sizes if len(sizes) == 1 or n >= costs.few(machine.tensor_parallel)]
        if len(found) < len(sizes) and not any(e.fits for e in found):
            *others, least = sizes[len(found) :]
            last = ask(layout, least)
            found += [*(ask(layout, n) for n in others if last.fits), last]
        tried += found
        if layout.recompute == "none" and found[0].fits and costs.settled(found[0]):
            break  # to compute anything again could only be slower
    fitting = [e for e in tried if e.fits]
    return min(fitting, key=lambda e: e.seconds) if fitting else min(tried, key=lambda e: e.need)
