"""The rehearsal of a deep model, inferred from rehearsals of a few of its blocks.

The blocks of a stack are alike, so the memory at each moment, and the work, are linear functions of their number.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..layers import Stack
from .rehearse import Rehearsal
from .tally import SEEN, Kind, Moments, Work

LAST = SEEN.index("temporary")
AHEAD = 2  # blocks of a stack that are rehearsed: the first and the last, and then one between


@dataclass(frozen=True, eq=False)
class Deep:
    """A weighted sum of rehearsals, which stands for the rehearsal of a deeper model."""

    parts: Sequence[tuple[int, Rehearsal]]

    def moments(self, factors: Mapping[Kind, float] | None = None, gathered: Callable[[str], float] = lambda phase: 0.0
                ) -> Moments:
        """The bytes of each kind at the moments of each phase. Each kind counts `factors` times (once if it is not named), and the
        bytes `gathered` in that phase are added."""
        of = [(factors or {}).get(kind, 1.0) for kind in SEEN]

        def rows(phase: str, parts: Sequence[Rehearsal]) -> list[list[list[float]]]:
            """The moments of each part, which are those of the others, or if they have another number of them the highest alone."""
            scaled = [[[x * f for x, f in zip(moment, of, strict=True)] for moment in part.moments[phase]] for part in parts]
            alike = len({len(moments) for moments in scaled}) == 1
            return scaled if alike else [[max(moments, key=sum)] for moments in scaled]

        times, parts = [count for count, _ in self.parts], [part for _, part in self.parts]
        found: dict[str, list[list[float]]] = {}
        for phase in parts[0].moments:
            if len(parts) > 1 and phase.endswith("between"):
                continue  # linear from the first to the last but one
            each = rows(phase, parts)
            whole = [[sum(n * x for n, x in zip(times, kind, strict=True)) for kind in zip(*same, strict=True)]
                     for same in zip(*each, strict=True)]  # fmt: skip
            if phase == "update":  # what takes no more than so much in a shallow model takes no more in a deep one
                for row, same in zip(whole, zip(*each, strict=True), strict=True):
                    row[LAST] = min(row[LAST], max(parts[0].scratch, *(moment[LAST] for moment in same)))
            found[phase] = whole
            if phase.startswith("backward") and phase.endswith("last"):
                for i, part in enumerate(parts[1:], 1):
                    if (then := phase.replace("last", "between")) in part.moments:  # the last but one, when what was last is done
                        before = zip(whole[0], each[i][0], strict=True)
                        behind = [x - less for x, less in before]
                        found[then] = [[x + y for x, y in zip(behind, row, strict=True)] for row in rows(then, [part])[0]]
        kinds: tuple[Kind, ...] = (*SEEN, "gathered")

        def counted(phase: str, row: Sequence[float]) -> Counter[Kind]:
            return Counter({kind: round(x) for kind, x in zip(kinds, (*row, gathered(phase)), strict=True) if x})

        return {phase: [counted(phase, row) for row in some] for phase, some in found.items()}

    def work(self, update: bool = False) -> Counter[Work]:
        total: Counter[Work] = Counter()
        for times, part in self.parts:
            for work, count in (part.update if update else part.work).items():
                total[work] += times * count
        return total

    def calls(self, update: bool = False) -> int:
        return sum(times * (part.update_calls if update else part.calls) for times, part in self.parts)


def rehearse_deep(model: nn.Module, how: Callable[..., Rehearsal]) -> Deep:
    """The result of `how(model, keep=...)`, inferred from a few blocks of each stack whose blocks are alike."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    deep = [i for i, stack in enumerate(stacks) if len(stack.blocks) > AHEAD + 1 and alike(list(stack.blocks)[1:-1])]
    if not deep:
        return Deep([(1, how(model, keep={}))])
    keep = dict.fromkeys(deep, AHEAD)
    more = {i: len(stacks[i].blocks) - AHEAD for i in deep}
    parts = [(1 - sum(more.values()), how(model, keep=keep))]
    return Deep([*parts, *((times, how(model, keep={**keep, i: AHEAD + 1})) for i, times in more.items())])


def alike(some: Sequence[nn.Module]) -> bool:
    """Whether blocks have the same parts with the same shapes, trained or not."""

    def signature(block: nn.Module) -> Any:
        tensors = (*block.named_parameters(), *block.named_buffers())
        parts = [(name, type(module)) for name, module in block.named_modules()]
        return parts, [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]

    return all(signature(block) == signature(some[0]) for block in some[1:])
