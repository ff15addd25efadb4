"""Memory of a rank that holds a part of the state, from a rehearsal of a model whose weights have come in the low precision.

Of n ranks each holds 1 / n of weights, gradients and optimizer. What other ranks have sent is added to each moment:

* weights of the outermost layers, as long as a pass lasts;
* weights of two blocks while blocks are at work: one computes, the next is on its way; in the backward none follows the first;
* gradients of one block as they are formed, of which the rank's part is among those that grow, and of the one before as they are
  sent. A head that is a unit of its own (`blocks.py: units`) sends its gradients before all blocks;
* what a unit came in, laid end to end, until the next one has come: that of the last one stands beside the head's logits;
* what the outermost layers of a micro-batch sent, until the next micro-batch sends.

ZeRO (Rajbhandari et al., 2020) 1 and 2 keep all weights that came until the step ends. ZeRO 1 also keeps its gradients whole, if
there are several micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

from torch import nn

from ..layers import Stack
from ..parallel.blocks import blocks, units
from ..parallel.machine import Machine
from .deep import Deep
from .tally import Kind, Moments
from .twin import shards


class Sizes(NamedTuple):
    """Bytes of the parameters of one tensor-parallel rank."""

    whole: int
    outside: int  # of the blocks
    block: int  # of the largest one
    head: int  # of those outside, what is sent by itself


def sizes_of(model: nn.Module, tp: int, trained: bool = False) -> Sizes:
    """The sizes for one of `tp` tensor-parallel ranks; if `trained`, without the parameters that are not."""
    cut = cuts(model, tp)
    some = [size(block, cut, trained) for block in blocks(model)]
    whole = size(model, cut, trained)
    return Sizes(whole, whole - sum(some), max(some, default=0), sum(size(one, cut, trained) for one in units(model)) - sum(some))


def cuts(model: nn.Module, tp: int) -> Mapping[int, Any]:
    """Shapes of a rank's parts of the parameters that tensor parallelism cuts, by id."""
    return dict(shards(model, tp)) if tp > 1 else {}


def size(module: nn.Module, cut: Mapping[int, Any], trained: bool = False) -> int:
    """Bytes of a rank's parameters of a module; if `trained`, of those that are."""
    return sum(cut.get(id(p), p.shape).numel() * p.itemsize for p in module.parameters() if p.requires_grad or not trained)


@dataclass(frozen=True)
class Sharded:
    """What a rank holds in a step of `forwards` micro-batches. Bytes are those of its own tensor-parallel part."""

    model: nn.Module
    machine: Machine
    forwards: int
    sizes: Sizes
    formed: Sizes  # of what gradients are formed for
    lasting: Mapping[Kind, int]  # weights, gradients, optimizer, if they were not shared out
    ratio: float  # of the low precision's bytes to those of the dtype that weights are held in
    sums_itself: bool  # gradients are sent in the low precision, and each rank adds up its part (peers.py)
    gpu: bool
    aside: bool = False  # the host keeps weights, gradients and optimizer
    graphed: bool = False  # micro-batches are a CUDA graph, at whose end nothing is under way

    def memory(self, step: Deep) -> Moments:
        """Bytes at the moments of a rehearsed step with weights that other ranks send."""
        n, last = self.machine.fsdp, self.lasting
        factors: dict[Kind, float] = {"weights": 0.0, "optimizer": 0.0, "gradients": self.grows}
        moments = step.moments(factors, self.gathered)
        for parts in chain(*moments.values()):
            if self.kept:
                parts["gradients"] = last["gradients"]
            elif self.forwards > 1 and (not self.aside or self.machine.replicate > 1):
                parts["gradients"] = ceil(last["gradients"] / n)  # those of the micro-batches before
            elif self.aside:
                parts["gradients"] = 0
            parts["weights"] = self.stays + (0 if self.aside else ceil((last["weights"] - self.stays) / n))
            parts["optimizer"] = 0 if self.aside else ceil(last["optimizer"] / n)
        return moments

    @property
    def stays(self) -> int:
        """Bytes of what is no parameter, such as the codes of quantised weights: FSDP leaves it whole, and on the device."""
        return max(0, self.lasting["weights"] - self.sizes.whole)

    @property
    def beside(self) -> int:
        """Bytes in the host's memory, if it keeps them. Each gradient is in pinned memory of torch's, which comes in powers of two;
        those of a micro-batch stand beside the sums of those before. Copies of a model keep sums where they compute, until these
        are brought together."""
        last, n, cut = self.lasting, self.machine.fsdp, cuts(self.model, self.machine.tensor_parallel)
        trained = [ceil(cut.get(id(p), p.shape).numel() * p.itemsize / n) for p in self.model.parameters() if p.requires_grad]
        gradients: int = sum(1 << (size - 1).bit_length() for size in trained if size)
        twice = self.forwards > 1 and not self.kept and self.machine.replicate == 1
        return ceil((last["weights"] - self.stays + last["optimizer"]) / n) + gradients * (1 + twice)

    def gathered(self, phase: str) -> float:
        """Bytes of weights that others sent and of gradients for them, in a phase of the rehearsal."""
        _, outside, block, head = self.formed
        kind, _, of_a_block = phase.partition(" ")
        if kind in ("before", "head"):
            return self.there + self.late + (self.laid if kind == "head" else 0.0)
        if kind == "end":  # gradients of the outermost layers wait, whole, until those of all blocks are exchanged
            blocks_done = self.ratio * (self.sizes.whole - self.sizes.outside) if self.back else 0
            leaving = (outside - head) / self.machine.fsdp if self.aside else 0.0  # the sum, when what it is of has been laid out
            formed = max(self.waits(outside - head), leaving)
            return self.there - self.given - blocks_done + self.sent(outside - head) + formed
        if kind != "backward":
            return self.come() + self.late
        if not of_a_block:
            return self.come() + max(self.sent(head), self.late) + self.waits(head)
        left = self.come(of_a_block) - self.given - (self.ratio * self.behind(of_a_block) if self.back else 0.0)
        before = self.sent(block) if of_a_block != self.last_block else self.sent(head) if head else self.late
        return left + before + self.waits(block + self.own)

    @property
    def kept(self) -> bool:
        """Whether gradients are kept whole from one micro-batch to the next."""
        return self.machine.zero == 1 and self.forwards > 1

    @property
    def grows(self) -> float:
        """The part of the rehearsed gradients that grows during the backward; those of earlier micro-batches are there already."""
        return 1 / self.ratio / self.machine.fsdp if self.forwards == 1 and not self.aside else 0.0

    @property
    def there(self) -> float:
        """Weights that are there during a whole pass."""
        return self.mapped(self.sizes.whole if self.machine.zero < 3 else self.sizes.outside)

    def come(self, of_a_block: str = "") -> float:
        """The same and those of the blocks at work."""
        whole, outside, block, _ = self.sizes
        coming = self.coming / self.machine.fsdp if self.aside else 0.0
        work = block if of_a_block == "0 first" else min(2 * block, whole - outside)  # in the backward it is the last
        return coming + (self.there if self.machine.zero < 3 else self.mapped(outside + work))

    @cached_property
    def coming(self) -> float:
        """From the host: a parameter as it is, and of several ranks a block's as they are sent."""
        cut = cuts(self.model, self.machine.tensor_parallel)
        inside = (p for block in blocks(self.model) for p in block.parameters())
        longest = max((cut.get(id(p), p.shape).numel() * p.itemsize for p in inside), default=0)
        return longest + (self.ratio * self.sizes.block if self.machine.fsdp > 1 else 0.0)

    def mapped(self, weights: float) -> float:
        """Bytes of weights that have come, with what ranks map of each other: a part of the longest unit's weights, and its
        gradients."""
        part, whole = (max(some.block, some.outside - some.head, some.head) for some in (self.sizes, self.formed))
        return self.ratio * (weights + (part / self.machine.fsdp + whole if self.maps else 0.0))

    @property
    def maps(self) -> bool:
        return self.sums_itself and self.gpu

    def sent(self, gradients: float) -> float:
        """Bytes of gradients as they are sent, which is as they are summed unless this rank sums them itself: then those of the
        others have come beside them, or into what ranks map."""
        return gradients * (self.ratio * (1 if self.maps else 2) if self.sums_itself else 1.0)

    def waits(self, gradients: float) -> float:
        """Bytes of gradients as they are formed, less what is among those that grow."""
        return gradients * self.ratio * max(0.0, 1 - self.grows)

    @property
    def back(self) -> bool:
        """Whether blocks give their weights back when their backward is done."""
        return self.machine.zero < 3 and self.forwards == 1

    @property
    def given(self) -> float:
        """What a head that is sent by itself gives back when its backward is done."""
        return self.ratio * self.sizes.head if self.back or self.machine.zero == 3 else 0.0

    @property
    def laid(self) -> float:
        """The buffer, laid end to end, that the last unit to come has come in."""
        return self.ratio * (self.sizes.head or self.sizes.block)

    @property
    def late(self) -> float:
        """What the outermost layers of the micro-batch before sent: FSDP waits for it when the next one's first unit sends, but for
        what the host adds up, at the end of each."""
        if self.forwards == 1 or self.kept or self.graphed or self.aside:
            return 0.0
        return (self.formed.outside - self.formed.head) * (self.ratio if self.sums_itself else 1.0)

    @cached_property
    def own(self) -> int:
        """Bytes of gradients that are formed before those of blocks, and sent behind them: of a head that is no unit and has a
        table of its own. (Those of a table that is the embedding's too are not whole before, and the rehearsal has them.)"""
        model: Any = self.model
        apart = {id(p) for one in (model.embed, *units(model)) for p in one.parameters()}
        cut = cuts(model, self.machine.tensor_parallel)
        mine = [p for p in model.head.parameters() if p.requires_grad and id(p) not in apart]
        return sum(cut.get(id(p), p.shape).numel() * p.itemsize for p in mine)

    @cached_property
    def stacks(self) -> list[list[nn.Module]]:
        return [list(m.blocks) for m in self.model.modules() if isinstance(m, Stack)]

    @property
    def last_block(self) -> str:
        """The phase of the block whose backward comes first."""
        return f"{len(self.stacks) - 1} last"

    def behind(self, of_a_block: str) -> int:
        """Bytes of the blocks whose backward is done when that `of_a_block` begins: `1 first` is the first of the second stack,
        `1 between` the last but one."""
        stack, place = of_a_block.split()
        done = [block for later in self.stacks[int(stack) + 1 :] for block in later]
        done += self.stacks[int(stack)][{"first": 1, "between": -1}[place] :] if place != "last" else []
        cut = cuts(self.model, self.machine.tensor_parallel)
        return sum(size(block, cut) for block in done)
