"""What a step costs in a layout: memory by kind on each rank, seconds, and what they are spent on.

Memory. On one rank the rehearsed step is all there is. With weights shared out, of n ranks each holds 1 / n of weights, gradients
and optimizer; the rehearsal is of a model whose weights have come in the low precision, and what has come is added to each moment:
the outermost layers' weights for as long as a pass lasts, while blocks are at work two blocks (one computes, the next is on its
way) and in their backward one block's gradients, in the low precision and as they are summed. A head that is a unit of its own
(`blocks.py: units`) has sent its gradients by then. What a unit came in, laid end to end, is there until the next one has come, so
that of the last one beside the head's logits; and what the outermost layers of a micro-batch sent until the next one sends. ZeRO
(Rajbhandari et al., 2020) 1 and 2 keep all that came until the step ends, and ZeRO 1 its gradients, if there are several
micro-batches.

Time. Every call takes the longer of its arithmetic and its bytes at the chip's rates; the host's calls are summed over a step
beside that, those of FSDP and DTensor among them (`host.py`), and the slower of the two counts most, for a host runs ahead
(`chips.py: together`).
Collectives of weights and gradients cost what of them is not hidden behind computing, sums over tensor-parallel ranks, which
nothing can hide, all; a collective of B bytes takes (n - 1) / n B / bus, and twice that if it is all-reduce. The update reads and
writes this rank's part.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import ceil, log2
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..layers import Attention, Stack
from . import host
from .blocks import blocks, units
from .chips import Chip, together
from .deep import Deep, rehearse_deep
from .machine import Machine, Recompute
from .rehearse import Arguments, Build, Compute, rehearse, rehearse_update
from .tally import Kind
from .twin import shards

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
POINT = 4096  # tokens: their logits fill a chunk, whatever the vocabulary that is worth mention
GRAPHED = 0.04  # of the calls' time is left where a CUDA graph makes them: an H200's host, of 33 ms 0.9, of 105 ms 3.9
COMPILED = 0.3  # of the calls are left to the host of compiled blocks
# Of what an accelerator's caching allocator holds: 8 % for LoRA on LLaMA on one H200; of several ranks, whose segments can grow
# (train/launch.py), 1.0 to 1.9 % of a whole 13B on two, and plans of them were up to 2 % short.
FRAGMENTS, GROWN = 0.1, 0.05


@dataclass(frozen=True)
class Job:
    """What is to be trained, wherever: `model` on the meta device, `batch` makes a micro-batch of so many rows of `tokens` each,
    `rows` are those of a step over all ranks."""

    model: Any
    batch: Callable[[int], Arguments]
    build: Build
    compute: Compute
    device: torch.device  # on which a rehearsal is made
    precision: str
    rows: int
    tokens: int
    share: float = 1.0
    evaluates: bool = False
    gpu: bool = False  # the rehearsal's device stands for one


@dataclass(frozen=True)
class Estimate:
    """A layout with `rows` a micro-batch, `forwards` of them a step: a rank's bytes by kind, seconds of a step and of its parts."""

    machine: Machine
    rows: int
    forwards: int
    parts: Mapping[Kind, int]
    limit: float
    seconds: float
    spent: Mapping[str, float]  # compute, memory, link, host: seconds in which nothing else was in the way
    host: float  # seconds of all that the host does, beside the device or in its way
    flops: float  # of the model in a step on a rank, nothing counted twice
    tokens: int  # of a step, on all ranks
    peak: float  # FLOP/s of the chip

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.need <= self.limit

    @property
    def rate(self) -> float:
        """Tokens a second and device."""
        return self.tokens / self.seconds / self.machine.ranks

    @property
    def share(self) -> float:
        """Of the rate of large matrix products."""
        return self.flops / self.seconds / self.peak

    @property
    def bottleneck(self) -> str:
        return max(self.spent, key=lambda what: self.spent[what])

    @property
    def settings(self) -> dict[str, Any]:
        """What to set, and leave as it is otherwise."""
        m, plain = self.machine, Machine()
        keys = ("tensor_parallel", "fsdp", "replicate", "zero", "recompute")
        return {key: getattr(m, key) for key in keys if getattr(m, key) != getattr(plain, key)}

    def data(self) -> dict[str, Any]:
        m = self.machine
        return {"tensor_parallel": m.tensor_parallel, "fsdp": m.fsdp, "replicate": m.replicate, "zero": m.zero,
                "recompute": m.recompute, "micro_batch": self.rows, "forwards": self.forwards, "fits": self.fits,
                "bytes": dict(self.parts), "peak": self.need, "seconds": self.seconds, "tokens_per_second": self.rate,
                "share_of_peak": self.share, "bottleneck": self.bottleneck, "spent": dict(self.spent)}  # fmt: skip


class Costs:
    """The costs of layouts of one job on one kind of chip; what was rehearsed once is not rehearsed again."""

    def __init__(self, job: Job, chip: Chip, limit: float | None = None) -> None:
        self.job, self.chip, self.limit = job, chip, chip.memory if limit is None else limit
        self.known: dict[Any, Deep] = {}
        self.peak, self.timed, self.last = cache(self.peak_of), cache(self.seconds_of), cache(self.lasting_of)
        self.weights, self.flops = cache(self.weights_of), cache(self.flops_of)
        self.low = LOW.get(job.precision)

    def rehearsed(self, tp: int, recompute: Recompute, rows: int, forwards: int, shared: bool) -> Deep:
        """A step of `forwards` micro-batches, or one micro-batch with weights that other ranks send. Errors: `InputError` where
        tensor-parallel ranks would have parts of heads."""
        if odd := next((heads for heads in heads_of(self.job.model) if heads % tp), None):
            refuse(None, "tensor_parallel", f"{odd} heads over {tp} ranks", "a divisor of the heads")
        key = tp, recompute, rows, shared or forwards > 1, shared
        if key not in self.known:
            job = self.job
            dtype = (self.low or self.own) if shared else None
            how = partial(rehearse, batch=job.batch(rows), build=job.build, compute=job.compute, device=job.device, ranks=tp,
                          forwards=forwards, share=job.share, recompute=recompute, evaluates=job.evaluates, dtype=dtype,
                          gpu=job.gpu)
            self.known[key] = rehearse_deep(job.model, how)
        return self.known[key]

    @cached_property
    def own(self) -> torch.dtype:
        """The dtype in which weights are held and updated."""
        kinds = Counter[torch.dtype]()
        for p in self.job.model.parameters():
            if p.is_floating_point():
                kinds[p.dtype] += p.numel()
        return kinds.most_common(1)[0][0]

    def weights_of(self, tp: int) -> tuple[int, int, int, int]:
        """Bytes of one tensor-parallel rank's parameters: all, those outside blocks, those of the largest block, and those outside
        that are sent by themselves, a head's."""
        cut = dict(shards(self.job.model, tp)) if tp > 1 else {}

        def size(module: nn.Module) -> int:
            return sum(cut.get(id(p), p.shape).numel() * p.itemsize for p in module.parameters())

        some = [size(block) for block in blocks(self.job.model)]
        whole = size(self.job.model)
        return whole, whole - sum(some), max(some, default=0), sum(size(unit) for unit in units(self.job.model)) - sum(some)

    def behind(self, tp: int, of_a_block: str) -> int:
        """Bytes of the blocks whose backward is done, and whose weights are given back, when that `of_a_block` begins: `1 first` is
        the first one of the second stack."""
        cut = dict(shards(self.job.model, tp)) if tp > 1 else {}
        stacks, (stack, place) = [list(m.blocks) for m in self.job.model.modules() if isinstance(m, Stack)], of_a_block.split()
        done = [*(stacks[int(stack)][1:] if place == "first" else ()), *(b for more in stacks[int(stack) + 1 :] for b in more)]
        return sum(cut.get(id(p), p.shape).numel() * p.itemsize for block in done for p in block.parameters())

    def estimate(self, machine: Machine, rows: int) -> Estimate:
        """Of `rows` a micro-batch. Memory and time are straight lines over the rows; rehearsals give two points of each, with
        tokens enough that the logits are formed in chunks of their greatest size."""
        few = ceil(POINT / self.job.tokens)
        forwards, at = ceil(ceil(self.job.rows / machine.shares) / rows), (rows - few) / few
        low, high = self.exact(machine, few, forwards), self.exact(machine, 2 * few, forwards)

        def along(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[Any, float]:
            keys = (*a, *(key for key in b if key not in a))
            return {key: max(0.0, a.get(key, 0) + (b.get(key, 0) - a.get(key, 0)) * at) for key in keys}

        parts, busy = along(low.parts, high.parts), max(0.0, low.host + (high.host - low.host) * at)
        spent = self.waited(along(low.spent, high.spent), busy)
        return replace(low, rows=rows, parts={kind: round(n) for kind, n in parts.items()}, spent=spent,
                       seconds=sum(spent.values()), host=busy, flops=low.flops + (high.flops - low.flops) * at)

    def waited(self, spent: dict[str, float], busy: float) -> dict[str, float]:
        """The same with the seconds for which a device waits for a host that is `busy` for so many."""
        device = sum(seconds for what, seconds in spent.items() if what != "host")
        return spent | {"host": together(device, busy, self.chip.apart) - device}

    def exact(self, machine: Machine, rows: int, forwards: int | None = None) -> Estimate:
        """The same from a rehearsal of just that micro-batch; of another number of them a step, if that is given."""
        job, chip, tp = self.job, self.chip, machine.tensor_parallel
        mine = ceil(job.rows / machine.shares)
        forwards = ceil(mine / rows) if forwards is None else forwards
        shared = machine.shares > 1
        step = self.rehearsed(tp, machine.recompute, rows, forwards, shared)
        parts = self.shared_memory(machine, step, forwards) if shared else self.peak(step).copy()
        if job.gpu or job.device.type != "cpu":
            parts["fragments"] = int((FRAGMENTS if machine.ranks == 1 else GROWN) * sum(parts.values()))
        spent = dict(self.update(machine) if shared else self.timed(step, tp, update=True))  # which was rehearsed with its step
        one = dict(self.timed(step, tp, machine.compile))
        one["host"] += self.called(host.cut(job.model, machine) + host.recomputed(job.model, machine), machine.compile)
        if self.graphed(machine, rows):
            one["host"] *= GRAPHED
        for what, seconds in one.items():
            spent[what] += forwards * seconds
        spent["host"] += self.called(host.hooked(job.model, machine, forwards) + host.updated(job.model, machine))
        if shared:
            beside = max(one["compute"] + one["memory"], one["host"])
            for what, seconds in self.exchanged(machine, beside, forwards).items():
                spent[what] += seconds
        spent = {what: seconds * (1 if what == "host" else chip.slower) for what, seconds in spent.items()}
        busy = spent["host"]
        spent = self.waited(spent, busy)
        flops = forwards * self.flops(self.rehearsed(tp, "none", rows, forwards, shared))
        return Estimate(machine, rows, forwards, dict(parts), self.limit, sum(spent.values()), dict(spent), busy, flops,
                        job.rows * job.tokens, chip.rate(job.precision))

    def graphed(self, machine: Machine, rows: int) -> bool:
        """Whether forward and backward are a CUDA graph (train/graphs.py): of packed sequences in low precision alone."""
        there = self.job.gpu or self.job.device.type == "cuda"
        packed = any(name.startswith("cu_seq_lens") for name in self.job.batch(rows))
        return machine.graphs and there and not (packed and (self.low is None or getattr(self.job.model, "prefixed", False)))

    def shared_memory(self, machine: Machine, step: Deep, forwards: int) -> Counter[Kind]:
        """Bytes of a rank that holds a part of the state."""
        n, tp = machine.fsdp, machine.tensor_parallel
        last = self.lasting(tp)
        whole, outside, block, head = self.weights(tp)
        ratio = (self.low or self.own).itemsize / self.own.itemsize
        kept = machine.zero == 1 and forwards > 1
        grows = 1 / ratio / n if forwards == 1 else 0.0  # those of micro-batches before are there all the while
        there = (whole if machine.zero < 3 else outside) * ratio
        come = there if machine.zero < 3 else (outside + min(2 * block, whole - outside)) * ratio
        # as they were formed and as they are sent, which is as they are summed, unless the sum is this rank's (peers.py): that is
        # among the gradients that grow
        trained = last["gradients"] / max(1, whole)
        sent = trained * (2 * ratio if self.short(machine) else ratio + 1)
        waits = trained * (outside - head) * ratio * max(0.0, 1 - grows)  # what of it is not among the gradients that grow
        if self.short(machine) and self.job.gpu:  # what ranks map of each other
            there, come = (size + max(block, outside - head, head) * ratio * (1 + 1 / n) for size in (there, come))

        back = machine.zero < 3 and forwards == 1  # blocks give back what came when their backward is done
        given = ratio * head if back or machine.zero == 3 else 0.0  # and so does a head that is sent by itself
        last_stack = sum(isinstance(m, Stack) for m in self.job.model.modules()) - 1
        laid = ratio * (head or block) if n > 1 else 0.0
        # of the micro-batch before: FSDP waits for it when the first of the next one's units sends
        late = trained * (outside - head) * (ratio if self.short(machine) else 1.0) if forwards > 1 and not kept else 0.0

        def gathered(phase: str) -> float:
            """Bytes of others' weights and of gradients for them: a head has the outermost weights, blocks bring their own."""
            kind, _, of_a_block = phase.partition(" ")
            if kind in ("before", "head"):
                return there + late + (laid if kind == "head" else 0.0)
            if kind == "end":  # gradients of the outermost layers wait, whole, until those of all blocks are exchanged
                return there - given - ratio * (whole - outside if back else 0) + sent * (outside - head)
            if kind != "backward":
                return come + late
            if not of_a_block:
                return come + max(sent * head, late + trained * ratio * head)
            left = come - given - (ratio * self.behind(tp, of_a_block) if back else 0.0)
            # what a head sends, or the outermost layers have sent, is there until the next unit's gradients are formed
            first = trained * ratio * (head + block) + (0.0 if head else late) if of_a_block == f"{last_stack} last" else 0.0
            return left + max(sent * block, first) + waits

        factors: dict[Kind, float] = {"weights": 0.0, "optimizer": 0.0, "gradients": grows}
        parts = step.peak(factors, gathered)
        if forwards > 1 and not kept:
            parts["gradients"] = ceil(last["gradients"] / n)  # those of the micro-batches before
        if kept:
            parts["gradients"] = last["gradients"]
        parts["weights"] = ceil(last["weights"] / n)
        parts["optimizer"] = ceil(last["optimizer"] / n)
        return parts

    def lasting(self, tp: int) -> Counter[Kind]:
        """Weights, gradients and optimizer of one tensor-parallel rank that holds them whole."""
        return self.last(self.update_of(tp))

    @staticmethod
    def lasting_of(deep: Deep) -> Counter[Kind]:
        found = Counter[Kind]()
        for times, part in deep.parts:
            moment = max(part.moments["update"], key=sum)
            for kind, size in zip(("weights", "optimizer", "gradients"), moment[:3], strict=True):
                found[kind] += times * size  # type: ignore[index]  # the names of Kind
        return found

    def update_of(self, tp: int) -> Deep:
        """An update alone, gradients whole."""
        key = "update", tp
        if key not in self.known:
            job = self.job
            how = partial(rehearse_update, build=job.build, device=job.device, ranks=tp, gpu=job.gpu)
            self.known[key] = rehearse_deep(job.model, how)
        return self.known[key]

    @staticmethod
    def flops_of(step: Deep) -> int:
        return sum(work.flops * count for work, count in step.work().items())

    @staticmethod
    def peak_of(step: Deep) -> Counter[Kind]:
        return step.peak()

    def seconds_of(self, step: Deep, tp: int, compiled: bool = False, update: bool = False) -> dict[str, float]:
        """Seconds of calls: of arithmetic, of bytes, of sums over tensor-parallel ranks, and of the host."""
        chip, work, calls = self.chip, step.work(update), step.calls(update)
        spent = {"compute": 0.0, "memory": 0.0, "link": 0.0, "host": 0.0}
        for one, count in work.items():
            if one.kind == "sum":
                spent["link"] += count * self.collective(2 * one.bytes, tp, 1)
                continue
            share = chip.attention if one.kind != "matmul" else chip.shapes if one.dtype != "fp32" else 1.0
            arithmetic, moved = one.flops * one.times / (chip.rate(one.dtype) * share), one.bytes / (chip.bandwidth * chip.moves)
            spent["compute" if arithmetic > moved else "memory"] += count * (max(arithmetic, moved, chip.launch) + chip.gap)
        spent["host"] = self.called(calls, compiled)
        return spent

    def called(self, calls: float, compiled: bool = False) -> float:
        """Seconds of the host for so many calls."""
        return calls * self.chip.call * (COMPILED if compiled else 1)

    def short(self, machine: Machine) -> bool:
        """Whether ranks send each other gradients in the low precision and add them up themselves (peers.py)."""
        near = machine.fsdp * machine.tensor_parallel <= self.chip.node
        return (self.low or self.own) == torch.bfloat16 and machine.zero > 1 and machine.fsdp > 1 and near

    def collective(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size` bytes, the whole."""
        if ranks == 1:
            return 0.0
        return size * (ranks - 1) / ranks / self.chip.bus(ranks, stride) + self.chip.latency * max(1.0, log2(ranks) / 3)

    def exchanged(self, machine: Machine, beside: float, forwards: int) -> dict[str, float]:
        """Seconds of a step's exchange of weights and gradients, beside micro-batches that take `beside` each, and of the copies
        that it takes."""
        n, tp, copies = machine.fsdp, machine.tensor_parallel, machine.replicate
        whole, outside, _, _ = self.weights(tp)
        gradients = self.lasting(tp)["gradients"]
        ratio = (self.low or self.own).itemsize / self.own.itemsize
        inner, parts = len(blocks(self.job.model)), len(units(self.job.model)) + 1
        times = host.exchanges(machine, forwards)
        gathers = ((whole - outside, inner, times.blocks), (outside, parts - inner, times.outermost))  # bytes, in parts, so often
        short = self.short(machine)
        bits = ratio if short else 1.0
        link = sum(of * often * self.collective(size * ratio / of, n, tp) for size, of, often in gathers if of)
        link += parts * times.scatters * self.collective(gradients * bits / parts, n, tp)
        link += parts * times.sums * self.collective(2 * gradients / n / parts, copies, n * tp)
        moved = sum(2 * size * ratio * often for size, _, often in gathers)
        moved += times.scatters * gradients * (3 * ratio + 1 / n if short else 1 + ratio)
        within = min(link, beside * forwards)
        return {"link": link - self.chip.hidden * within, "memory": moved / self.chip.bandwidth}

    def update(self, machine: Machine) -> dict[str, float]:
        """Seconds of an update of this rank's part."""
        deep = self.update_of(machine.tensor_parallel)
        spent = self.timed(deep, machine.tensor_parallel, update=True)
        return {what: seconds / (machine.fsdp if what in ("compute", "memory") else 1) for what, seconds in spent.items()}


def heads_of(model: nn.Module) -> list[int]:
    """How many heads of queries and of keys each attention has."""
    return [p.out_features // m.head_dim for m in model.modules() if isinstance(m, Attention) for p in (m.q, m.k)]


def layouts(job: Job, ranks: int, node: int, machine: Machine) -> Iterator[Machine]:
    """The ways to share out the job among `ranks`: tensor parallel inside a node, as far as it divides the heads; copies of the
    rest a node each, or of each rank, or none; every stage of ZeRO."""
    heads = heads_of(job.model)
    for tp in (n for n in (1, 2, 4, 8) if n <= min(ranks, node) and ranks % n == 0 and not any(h % n for h in heads)):
        rest = ranks // tp
        for copies in sorted({1, rest, max(1, ranks // node) if rest % max(1, ranks // node) == 0 else 1}):
            fsdp = rest // copies
            if fsdp * copies > job.rows:
                continue
            for zero in (3, 2, 1) if fsdp > 1 else (3,):
                yield replace(machine, tensor_parallel=tp, fsdp=fsdp, replicate=copies, zero=zero)


def best_of(costs: Costs, machine: Machine, rows: int | None = None, recompute: Recompute | None = None) -> Estimate:
    """The fastest estimate that fits, over micro-batches and what is recomputed; if none does, the one that needs least."""
    mine = ceil(costs.job.rows / machine.shares)
    sizes = [min(rows, mine)] if rows is not None else [n for n in range(mine, 0, -1) if mine % n == 0]
    ask = costs.estimate if len(sizes) > 1 else costs.exact
    tried: list[Estimate] = []
    for how in RECOMPUTES if recompute is None else (recompute,):
        found = [ask(replace(machine, recompute=how), n) for n in sizes]
        tried += found
        if found[0].fits:
            break  # to compute anything again could only be slower
    fitting = [e for e in tried if e.fits]
    return min(fitting, key=lambda e: e.seconds) if fitting else min(tried, key=lambda e: e.need)
