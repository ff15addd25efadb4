"""What a step costs in a layout: how long it takes, of what, and how much memory a rank needs.

Memory of one rank alone is that of the rehearsed step. Memory of a rank that holds a part of the state is in `sharded.py`.

Time. Each call takes as long as its arithmetic or its bytes at the chip's rates, whichever is longer. Beside that stands the time
in which the host makes a step's calls, FSDP's and DTensor's included (`host.py`). The host runs ahead, so the slower of the two
counts most (`chips.py: together`). Collectives of weights and gradients cost what computing does not hide of them. The sums over
tensor-parallel ranks cannot be hidden, and cost their whole time. A collective of B bytes takes (n - 1) / n B / bus, an all-reduce
twice that. The update reads and writes this rank's part.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import chain
from math import ceil, log2
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..layers import Attention
from ..ops._mode import rehearsal
from ..ops.linear_cross_entropy import rows_of_a_chunk
from ..parallel.averaging import BUCKET
from ..parallel.device import LOW
from ..parallel.machine import ROOM, Machine, Recompute
from . import host
from .chips import Chip, together
from .deep import Deep, rehearse_deep
from .estimate import Estimate, Job
from .rehearse import rehearse, rehearse_update
from .sharded import Sharded, Sizes, sizes_of
from .tally import Kind, Moments, highest

POINT = 8192  # labels with which a line begins: with fewer, more kernels take no longer than the smallest
MOST = 36864  # with which it does however few words a vocabulary has
GRAPHED = 0.04  # of the host's time is left where a CUDA graph makes the calls: on an H200, 0.9 of 33 ms and 3.9 of 105 ms
COMPILED = 0.3  # of the host's calls are left where blocks are compiled
READ = 0.55  # of the rate of an update is that of a sum, which reads alone: 61 and 106 GB/s by 16 threads of an H200's host
LEAST = 7  # times the bytes of its gradients an update there moves, or takes as long: moments of 16 and 8 bits are arithmetic
# Of what an accelerator's caching allocator holds: 8 % for LoRA on LLaMA on one H200; of several ranks, whose segments can grow
# (train/launch.py), 1.0 to 1.9 % of a whole 13B on two, and plans of them were up to 2 % short.
FRAGMENTS, GROWN = 0.1, 0.05
# Of cuBLAS and cuBLASLt, each for the stream of calls and for that of records, 32 MiB on Hopper (torch's default; less on others).
WORKSPACES = 4 << 25


class Costs:
    """The costs of layouts of one job on one kind of chip with `limit` bytes for a rank. Each rehearsal is made once, and kept."""

    def __init__(self, job: Job, chip: Chip, limit: float | None = None) -> None:
        self.job, self.chip, self.limit = job, chip, chip.memory if limit is None else limit
        self.known: dict[Any, Deep] = {}
        self.moments, self.timed, self.last = cache(self.moments_of), cache(self.seconds_of), cache(self.lasting_of)
        self.sizes, self.flops, self.few = cache(self.sizes_of), cache(self.flops_of), cache(self.few_of)
        self.low = LOW.get(job.precision)

    def rehearsed(self, tp: int, recompute: Recompute, rows: int, forwards: int, shared: bool, records: bool = False,
                  sequence: bool = False) -> Deep:
        """A rehearsed step of `forwards` micro-batches, which are a CUDA graph if it `records`; if `shared`, one micro-batch with
        weights that other ranks send; with `sequence`, ranks hold parts of sequences. Errors: `InputError` if tensor parallelism
        would cut heads in two."""
        if odd := next((heads for heads in self.heads if heads % tp), None):
            refuse(None, "machine.tensor_parallel", f"{odd} heads over {tp} ranks", "a divisor of the heads")
        key = tp, recompute, rows, shared or forwards > 1, shared, records, sequence
        if key not in self.known:
            job = self.job
            dtype = (self.low or self.own) if shared else None
            some = partial(rehearse, batch=job.batch(rows), how=job.how, forwards=forwards, recompute=recompute, ranks=tp,
                           dtype=dtype, records=records, sequence=sequence)
            self.known[key] = rehearse_deep(job.model, some)
        return self.known[key]

    @cached_property
    def apart(self) -> bool:
        """Whether the device has memory of its own."""
        return self.job.how.gpu or self.job.how.device.type != "cpu"

    @cached_property
    def cuda(self) -> bool:
        """Whether the device is a GPU that CUDA knows, here or elsewhere."""
        return self.job.how.gpu or self.job.how.device.type == "cuda"

    def few_of(self, tp: int) -> int:
        """Rows of a micro-batch with which a line begins. Their logits are more than one chunk; where ranks have parts of the
        vocabulary more than two, as the first is still there when the second is formed; as far as `MOST` labels go."""
        labels = self.job.batch(1)["labels"]
        with rehearsal(gpu=self.cuda):
            chunk, _ = rows_of_a_chunk(labels, ceil(self.job.model.config.vocab / tp), torch.bfloat16)
        enough = min(max(POINT, chunk * (1 if tp == 1 else 2) + 1), MOST)
        return ceil(enough / (labels.numel() if labels.dim() > 1 else self.job.tokens))

    @cached_property
    def own(self) -> torch.dtype:
        """The dtype in which weights are held and updated."""
        kinds = Counter[torch.dtype]()
        for p in self.job.model.parameters():
            if p.is_floating_point():
                kinds[p.dtype] += p.numel()
        return kinds.most_common(1)[0][0]

    @cached_property
    def heads(self) -> list[int]:
        return heads_of(self.job.model)

    @cached_property
    def parts(self) -> host.Parts:
        return host.parts_of(self.job.model)

    def sizes_of(self, tp: int, trained: bool = False) -> Sizes:
        return sizes_of(self.job.model, tp, trained)

    def estimate(self, machine: Machine, rows: int) -> Estimate:
        """The costs with `rows` a micro-batch, interpolated where a line can be drawn. A step that has no room as a CUDA graph runs
        by calls."""
        found = self.drawn(machine, rows)
        forwards = found.forwards
        if not self.records(machine, rows, forwards) or self.graphed(machine, rows, found.parts, forwards):
            return found
        calls = self.drawn(replace(machine, cuda_graphs=False), rows)
        room = self.graphed(machine, rows, calls.parts, forwards)  # of a step that recomputes, whose graph takes more than calls do
        return found if room and found.fits else replace(calls, machine=machine)

    def drawn(self, machine: Machine, rows: int) -> Estimate:
        """The costs on straight lines over the rows: two rehearsals give two points of each, with enough labels that the logits are
        formed in chunks of their greatest size (`few_of`). With fewer lines are others."""
        few, many = self.few(machine.tensor_parallel), self.shared_out(machine, rows)
        forwards = ceil(many)
        if rows < few:
            return self.exact(machine, rows, many)
        low, high, at = self.exact(machine, few, many), self.exact(machine, 2 * few, many), (rows - few) / few
        graphs = [self.graphed(machine, k * few, point.parts, forwards) for k, point in ((1, low), (2, high))]
        if at < 1 and graphs == [True, False]:  # between a graph and calls is no line
            return self.exact(machine, rows, many)

        def along(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[Any, float]:
            keys = (*a, *(key for key in b if key not in a))
            return {key: max(0.0, a.get(key, 0) + (b.get(key, 0) - a.get(key, 0)) * at) for key in keys}

        def later(a: Sequence[Counter[Kind]], b: Sequence[Counter[Kind]]) -> list[Counter[Kind]]:
            same = zip(a, b, strict=True) if len(a) == len(b) else [(highest({"": a}), highest({"": b}))]
            return [Counter({kind: round(n) for kind, n in along(*pair).items()}) for pair in same]

        # each moment has a line of its own: with more rows another needs the most
        moments = {phase: later(some, high.moments[phase]) for phase, some in low.moments.items() if phase in high.moments}
        busy = max(0.0, low.host + (high.host - low.host) * at)
        spent = self.waited(along(low.spent, high.spent), busy)
        return replace(low, rows=rows, moments=moments, spent=spent, seconds=sum(spent.values()), host=busy,
                       flops=low.flops + (high.flops - low.flops) * at)

    def waited(self, spent: dict[str, float], busy: float) -> dict[str, float]:
        """`spent` with the seconds for which the device waits for the host, which is `busy` for so many."""
        device = sum(seconds for what, seconds in spent.items() if what not in ("host", "offload"))
        return spent | {"host": together(device, busy, self.chip.apart) - device}

    def shared_out(self, machine: Machine, rows: int) -> float:
        """How many micro-batches of `rows` a rank's share is. The last one has what is left: two and a half are three forwards."""
        return ceil(self.job.rows / machine.shares) / rows

    def exact(self, machine: Machine, rows: int, many: float | None = None) -> Estimate:
        """The costs with `rows` a micro-batch, from a rehearsal of just that; with `many` of them a step, if that is given."""
        job, chip, tp = self.job, self.chip, machine.tensor_parallel
        many = self.shared_out(machine, rows) if many is None else many
        forwards = ceil(many)
        shared = machine.wrapped  # copies hold what one process would
        aside = machine.offload and self.apart
        step, moments, graphed = self.step_of(machine, rows, forwards)
        spent = dict(self.update(machine) if shared else self.timed(step, tp, update=True))  # which was rehearsed with its step
        one = dict(self.timed(step, tp, machine.compile))
        one["host"] += self.called(host.cut(self.parts, machine) + host.recomputed(self.parts, machine), machine.compile)
        if graphed:
            one["host"] *= GRAPHED
        if graphed and tp == 1:
            spent["host"] *= GRAPHED  # AdamW makes few calls, what others make is recorded
        if aside:
            spent |= {"compute": 0.0, "memory": 0.0}
        for what, seconds in one.items():
            spent[what] += (forwards if what == "host" else many) * seconds
        spent["host"] += self.called(host.updated(self.parts, machine))
        if not graphed:
            spent["host"] += self.called(host.hooked(self.parts, machine, forwards))
        if aside:
            spent["host"] += self.called(host.copied(self.parts, machine, forwards))
        if machine.shares > 1:
            beside = max(one["compute"] + one["memory"], one["host"])
            for what, seconds in self.exchanged(machine, beside, forwards).items():
                spent[what] += seconds
        spent = {what: seconds * (1 if what == "host" else chip.slower) for what, seconds in spent.items()}
        busy = spent["host"]
        spent = self.waited(spent, busy)
        if aside:
            spent["offload"] = self.aside(machine, sum(spent.values()), forwards)
        flops = many * self.flops(self.rehearsed(tp, "none", rows, forwards, shared, sequence=machine.sequence_parallel))
        kept = self.sharded(machine, forwards).beside if aside else 0
        return Estimate(machine, rows, forwards, moments, self.limit, sum(spent.values()), dict(spent), busy, flops,
                        job.rows * job.tokens, chip.rate(job.precision), job.rows, kept, chip.host_memory)

    def step_of(self, machine: Machine, rows: int, forwards: int) -> tuple[Deep, Moments, bool]:
        """A rehearsed step, a rank's memory in it, and whether forward and backward are a CUDA graph. One that recomputes keeps
        what it cannot draw again, and is a graph if that fits. If it has room the step by calls has, and is not rehearsed."""

        def rehearsed(recompute: Recompute, records: bool = False) -> tuple[Deep, Counter[Kind]]:
            shared = machine.wrapped  # copies hold what one process would
            step = self.rehearsed(machine.tensor_parallel, recompute, rows, forwards, shared, records, machine.sequence_parallel)
            return step, highest(self.memory(step, machine, forwards))

        again = machine.recompute != "none" and self.records(machine, rows, forwards)
        # the step that recomputes nothing, which takes more, is rehearsed for its arithmetic anyway
        if again and self.graphed(machine, rows, rehearsed("none")[1], forwards):
            recorded = rehearsed(machine.recompute, True)
            if self.graphed(machine, rows, recorded[1], forwards) and recorded[1].total() <= self.limit:
                return recorded[0], self.memory(recorded[0], machine, forwards, True), True
        found = rehearsed(machine.recompute)
        graphed = self.graphed(machine, rows, found[1], forwards)
        if again and graphed:
            recorded = rehearsed(machine.recompute, True)
            graphed = recorded[1].total() <= self.limit
            found = recorded if graphed else found
        return found[0], self.memory(found[0], machine, forwards, graphed), graphed

    def memory(self, step: Deep, machine: Machine, forwards: int, graphed: bool = False) -> Moments:
        """A rank's memory at the moments of a rehearsed step."""
        found = self.sharded(machine, forwards, graphed).memory(step) if machine.wrapped else self.moments(step)
        moments = {phase: [parts.copy() for parts in some] for phase, some in found.items()}
        if self.apart:
            for parts in chain(*moments.values()):
                parts["workspaces"] = WORKSPACES
                parts["fragments"] = int((FRAGMENTS if machine.ranks == 1 else GROWN) * parts.total())
        return moments

    def records(self, machine: Machine, rows: int, forwards: int) -> bool:
        """Whether forward and backward may be a CUDA graph (train/graphs.py): packed sequences are in low precision only."""
        without = self.low is None or getattr(self.job.model, "prefixed", False)  # packed sequences
        packed = without and any(name.startswith("cu_seq_lens") for name in self.job.batch(rows))
        return machine.records(forwards) and self.cuda and not packed

    def graphed(self, machine: Machine, rows: int, parts: Mapping[Kind, int], forwards: int = 1) -> bool:
        """Whether they are: what a micro-batch takes at the peak, of which `parts` are, must be free beside what lasts."""
        lasts = parts["weights"] + parts.get("optimizer", 0)
        taken = sum(size for kind, size in parts.items() if kind != "fragments") - lasts
        return self.records(machine, rows, forwards) and lasts + ROOM * taken <= self.limit

    def settled(self, e: Estimate) -> bool:
        """Whether nothing that takes less memory could have a CUDA graph in place of the calls of `e`."""
        return not self.records(e.machine, e.rows, e.forwards) or self.graphed(e.machine, e.rows, e.parts, e.forwards)

    def sharded(self, machine: Machine, forwards: int, graphed: bool = False) -> Sharded:
        """The memory of a rank that holds a part of the state."""
        job, tp, ratio = self.job, machine.tensor_parallel, (self.low or self.own).itemsize / self.own.itemsize
        itself = self.sums_itself(machine)
        return Sharded(job.model, machine, forwards, self.sizes(tp), self.sizes(tp, True), self.lasting(tp), ratio, itself,
                       self.cuda, machine.offload and self.apart, graphed)

    def lasting(self, tp: int) -> Counter[Kind]:
        """Bytes of weights, gradients and optimizer of one tensor-parallel rank that shares them with no other."""
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
        """A rehearsed update alone, of a rank that holds all gradients."""
        key = "update", tp
        if key not in self.known:
            self.known[key] = rehearse_deep(self.job.model, partial(rehearse_update, how=self.job.how, ranks=tp))
        return self.known[key]

    @staticmethod
    def flops_of(step: Deep) -> int:
        return sum(work.flops * count for work, count in step.work().items())

    @staticmethod
    def moments_of(step: Deep) -> Moments:
        return step.moments()

    def seconds_of(self, step: Deep, tp: int, compiled: bool = False, update: bool = False) -> dict[str, float]:
        """Seconds of a step's calls, or of its update's: of arithmetic, bytes, sums over tensor-parallel ranks, and the host."""
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

    def sums_itself(self, machine: Machine) -> bool:
        """Whether ranks send each other gradients in the low precision, and each adds up its part itself (peers.py)."""
        near = machine.fsdp * machine.tensor_parallel <= self.chip.node
        return (self.low or self.own) in LOW.values() and machine.zero > 1 and machine.fsdp > 1 and near

    def collective(self, size: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of a tensor of `size` bytes."""
        if ranks == 1:
            return 0.0
        return size * (ranks - 1) / ranks / self.chip.bus(ranks, stride) + self.chip.latency * max(1.0, log2(ranks) / 3)

    def exchanged(self, machine: Machine, beside: float, forwards: int) -> dict[str, float]:
        """Seconds in which a step waits for the exchange of weights and gradients, beside micro-batches that take `beside` seconds
        each, and those of the copies that the exchange makes."""
        n, tp, copies = machine.fsdp, machine.tensor_parallel, machine.replicate
        if n == 1:
            return {"link": self.averaged(machine, beside)}
        whole, outside, _, _ = self.sizes(tp)
        gradients = self.lasting(tp)["gradients"]
        ratio = (self.low or self.own).itemsize / self.own.itemsize
        inner, parts = self.parts.blocks, self.parts.units
        times = host.exchanges(machine, forwards)
        gathers = ((whole - outside, inner, times.blocks), (outside, parts - inner, times.outermost))  # bytes, in parts, so often
        itself = self.sums_itself(machine)
        bits = ratio if itself else 1.0
        link = sum(of * often * self.collective(size * ratio / of, n, tp) for size, of, often in gathers if of)
        link += parts * times.scatters * self.collective(gradients * bits / parts, n, tp)
        link += parts * times.sums * self.collective(2 * gradients / n / parts, copies, n * tp)
        moved = sum(2 * size * ratio * often for size, _, often in gathers)
        moved += times.scatters * gradients * (3 * ratio + 1 / n if itself else 1 + ratio)
        within = min(link, beside * forwards)
        return {"link": link - self.chip.hidden * within, "memory": moved / self.chip.bandwidth}

    def averaged(self, machine: Machine, beside: float) -> float:
        """Seconds in which copies of a model wait for the mean of their gradients. Two thirds of the last micro-batch, which takes
        `beside`, are its backward. The outermost layers' gradients come last, when nothing is left to hide theirs."""
        tp = machine.tensor_parallel
        whole, outside, _, _ = self.sizes(tp)
        gradients = self.lasting(tp)["gradients"]
        buckets = ceil(gradients / BUCKET)
        link = buckets * self.collective(2 * gradients / max(1, buckets), machine.replicate, tp)
        return link - self.chip.hidden * min(link * (1 - outside / max(1, whole)), 2 / 3 * beside)

    def update(self, machine: Machine) -> dict[str, float]:
        """Seconds of the update of a rank's part."""
        deep = self.update_of(machine.tensor_parallel)
        spent = self.timed(deep, machine.tensor_parallel, update=True)
        return {what: seconds / (machine.fsdp if what in ("compute", "memory") else 1) for what, seconds in spent.items()}


    def aside(self, machine: Machine, busy: float, forwards: int) -> float:
        """Seconds in which all waits for the host's memory: for weights that come and gradients that go, at once, as far as they
        take longer than the `busy` seconds of forward and backward; for the last gradients to be added, if there are several
        micro-batches; for the norm; and for what of the update the next forward, a third of a micro-batch, does not hide."""
        n, tp, chip = machine.fsdp, machine.tensor_parallel, self.chip
        whole, outside, _, _ = self.sizes(tp)
        gradients, times = self.lasting(tp)["gradients"], host.exchanges(machine, forwards)
        come = ((whole - outside) * times.blocks + outside * times.outermost) / n / chip.bring
        go = gradients * times.scatters / n / chip.bring
        waits = max(0.0, come - busy, go - busy)
        moved = sum(count * work.bytes for work, count in self.update_of(tp).work(True).items())
        updated = max(moved - gradients, LEAST * gradients) + whole  # which come meanwhile, out of the same memory
        after = (3 * gradients if forwards > 1 else 0) + gradients / READ
        forward = busy / forwards / 3
        return waits + after / n / chip.host_bandwidth + max(0.0, updated / n / chip.host_bandwidth - forward)


def heads_of(model: nn.Module) -> list[int]:
    """The numbers of heads of queries and of keys in each attention."""
    return [p.out_features // m.head_dim for m in model.modules() if isinstance(m, Attention) for p in (m.q, m.k)]
