"""Says before the first step whether a run will fit into memory, what would make it fit, and how long a step will take."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter.attach import choose, insert
from ..checkpoint.load import local
from ..data.objective import find_objective
from ..errors import InputError, printable, refuse, size
from ..layers import ClassifyHead
from ..model import Model
from ..optim.ema import EMA
from ..optim.optimizers import build_optimizer
from ..parallel.check import compiles
from ..parallel.device import memory_of
from ..parallel.machine import Machine, in_copies, in_shards
from ..parallel.variable import variable
from ..plan.chips import CHIPS, Chip, chip_here, host_rate
from ..plan.costs import Costs
from ..plan.estimate import Estimate, Job
from ..plan.layout import RECOMPUTES
from ..plan.need import Plan
from ..plan.rehearse import Conditions
from ..registry import families
from ..skeleton import skeleton
from .calibrate import NOTHING, Learned, learn
from .evaluate import count_targets
from .launch import THREADS, check_ranks, threads_of
from .recipe import Recipe
from .resolve import most_of
from .setup import Setup

Compute = Callable[[], AbstractContextManager[Any]]
CLEARLY = 1.15  # times as long; a prediction may be as far off


@dataclass(frozen=True)
class Verdict:
    """A plan, the batch that it is for (sequences x tokens), and settings that need less: (settings, bytes). `estimate`: the same
    with the time of a step, if the device's rates are known."""

    plan: Plan
    batch: str
    ways: tuple[tuple[str, int], ...] = ()
    estimate: Estimate | None = None
    ranks: int = 1
    learned: Learned = NOTHING  # from runs on such a device, of which the time takes account
    chip: str = ""
    precision: str = ""
    quicker: tuple[str, Estimate] | None = None  # settings that fit too, and what they take

    def __str__(self) -> str:
        advice = " or ".join(f"{setting} ({size(need)})" for setting, need in self.ways)
        each = " a rank" if self.ranks > 1 else ""
        memory = f"memory{each}: {self.plan} (batches of {self.batch})"
        if self.estimate is not None and self.estimate.aside:
            e = self.estimate
            enough = "" if e.aside <= e.room else ": does not fit"
            memory += f", and {size(e.aside)} of the host's memory, {size(int(e.room))} free{enough}"
        memory += f"; set {advice}" if advice else ""
        if self.estimate is None:
            return memory
        told = [speed(self.estimate)]
        if self.quicker is not None:
            settings, other = self.quicker
            told.append(f"{settings} fits as well and takes about {other.seconds:.3g} s")
        return f"{memory}\nspeed: {'; '.join([*told, *([str(self.learned)] if self.learned.runs else [])])}"

    @property
    def foreseen(self) -> dict[str, Any] | None:
        """What the run will be compared with when it has ended."""
        e = self.estimate
        if e is None:
            return None
        device, host = self.learned.plain(e)
        told = {"memory_gb": (e.need - e.parts.get("fragments", 0)) / 1e9, "seconds": e.seconds, "tokens": e.tokens,
                "tokens_per_second": e.rate * e.machine.ranks, "chip": self.chip, "precision": self.precision,
                "several": self.ranks > 1, "device": device, "host": host, "runs": self.learned.runs}  # fmt: skip
        return told | ({"offload": True} if e.machine.offload else {})


def speed(e: Estimate) -> str:
    """An estimate's time in words."""
    each = " and device" if e.machine.ranks > 1 else ""
    # a rate that was measured beside other work may be less than the runs' that the time is calibrated by
    share = f", {e.share:.0%} of the device's rate of matrix products" if e.share <= 1 else ""
    rate = f"about {e.seconds:.3g} s a step of full sequences, {e.rate:,.0f} tokens a second{each}"
    return f"{rate}{share}; mostly bound by {WHAT[e.bottleneck]}"


WHAT = {"compute": "arithmetic", "memory": "memory bandwidth", "link": "communication between ranks",
        "host": "calls on the host", "offload": "the host's memory"}  # fmt: skip


def verdict(recipe: Recipe, machine: Machine, device: torch.device, setup: Setup, compute: Compute, *,
            refuses: bool = True) -> Verdict | str:
    """The memory that a run will need and the time that it will take on `device`; or one line that says why this is not known.

    The plan is for the largest possible batch: a micro-batch of sequences of `data.seq_len`. A run is refused only if no batch is
    small enough: if weights, gradients and optimizer exceed all the memory there is. Without `refuses` nothing is to be run, and an
    error of the rehearsal is raised.
    """
    there = memory_of(device)
    if there is None:
        return f"memory: not known of {device.type}"
    free, total = there
    if device.type == "cpu":
        here = ranks_here(machine.ranks)
        free, total = free // here, total // here
        free += sum(p.nbytes for p in setup.model.parameters() if not p.is_meta)  # in the plan, and taken already
    with as_a_rank(machine, machine.ranks):
        chip, learned = chip_here(device), NOTHING
    if chip is not None:
        learned = learn(chip, recipe.precision, machine.ranks > 1)
        chip = learned.of(chip)
    if chip is not None and machine.offload and device.type != "cpu":
        chip = beside(chip, machine, machine.ranks)
        kept = sum(local(p)[1].nbytes for p in setup.model.parameters() if not p.is_meta)  # in the plan, and taken already
        chip = replace(chip, host_memory=chip.host_memory + kept)
    now = recipe.micro_batch or most_of(recipe, device, vars(setup.model.config))
    try:
        job = job_of(recipe, device, setup, compute, machine)
        costs = Costs(job, chip or CHIPS["h200"], min(free, total))
        found = costs.exact(machine, min(now, ceil(job.rows / machine.shares)))
        plan = Plan(found.parts, min(free, total), total)
        ways = [] if plan.fits or plan.hopeless else list(better(costs, found))
        copies = quicker(costs, found, recipe) if chip is not None else None
    except Exception as error:
        if not refuses:
            raise
        # what cannot be rehearsed can be run
        return f"memory: not estimated: {type(error).__name__}: {printable(' '.join(str(error).split()))[:100]}"
    if plan.hopeless and refuses:
        what = f"{size(plan.lasting)} of weights, gradients and optimizer, {size(total)} there"
        aside = "machine.offload=true, which keeps them in the host's memory, " if costs.apart and not machine.offload else ""
        refuse(None, "memory", what, aside + FEWER)
    if found.aside > found.room and chip is not None and refuses:
        what = f"{size(found.aside)} of weights, gradients and optimizer, {size(int(found.room))} in the host's"
        refuse(None, "memory", what, FEWER)
    batch = f"{found.rows} x {recipe.data.seq_len} tokens"
    if chip is None:
        return Verdict(plan, batch, tuple(ways), None, machine.ranks)
    return Verdict(plan, batch, tuple(ways), found, machine.ranks, learned, chip.name, recipe.precision, copies)


def beside(chip: Chip, machine: Machine, ranks: int) -> Chip:
    """The chip with the share that one of `ranks` has of this host's memory, and of its bandwidth for the update."""
    there = memory_of(torch.device("cpu"))
    assert there is not None
    with as_a_rank(machine, ranks):
        return replace(chip, host_memory=there[0] / ranks_here(ranks), host_bandwidth=host_rate())


@contextmanager
def as_a_rank(machine: Machine, ranks: int) -> Iterator[None]:
    """While this lasts torch has the CPU threads that one of `ranks` has, or will have when it is started: by them a host is
    timed."""
    now = torch.get_num_threads()
    told = ranks == 1 or "RANK" in os.environ or THREADS in os.environ
    wanted = machine.threads or (now if told else threads_of(ranks_here(ranks)))
    if wanted == now:  # in a run always, whose threads are left alone
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(now)


def ranks_here(ranks: int) -> int:
    """How many of `ranks` share this host and its memory: as many as a launcher says, or as each of NNODES hosts would start."""
    nodes = variable("NNODES", 1, 2**20, default=1)
    return variable("LOCAL_WORLD_SIZE", 1, 2**20, default=max(1, ranks // nodes))


FEWER = "an adapter (adapter.name=lora), optimizer.moments=bf16, optimizer.name=adafactor or a smaller model"


def better(costs: Costs, now: Estimate) -> Iterator[tuple[str, int]]:
    """Settings that fit: the largest micro-batch, more recompute, or both; or shards instead of replicas."""
    halves = costs.job.sizes(now.rows // 2)
    for how in RECOMPUTES[RECOMPUTES.index(now.machine.recompute) :]:
        if not compiles(replace(now.machine, recompute=how)):
            continue
        more = how != now.machine.recompute
        settings = f"machine.recompute={how}" if more else ""
        for rows in [now.rows] * more + halves * (how != "selective" or not more):
            found = costs.exact(replace(now.machine, recompute=how), rows)
            if found.fits:
                yield " ".join(filter(None, (f"micro_batch={rows}" if rows != now.rows else "", settings))), found.need
                break
    others = [("machine.offload=true", replace(now.machine, offload=True))] if costs.apart and not now.machine.offload else []
    for settings, other in (*others, *filter(None, [in_shards(now.machine)])):
        found = costs.exact(other, now.rows)
        if found.fits:
            yield settings, found.need


def quicker(costs: Costs, now: Estimate, recipe: Recipe) -> tuple[str, Estimate] | None:
    """Replicas instead of shards, if there is room and they are clearly faster: profiles of a node are made for large models."""
    if (whole := in_copies(now.machine)) is None:
        return None
    try:
        check_ranks(recipe, whole[1])
    except InputError:
        return None
    found = costs.exact(whole[1], now.rows)
    return (whole[0], found) if found.fits and found.seconds < now.seconds / CLEARLY else None


def job_of(recipe: Recipe, device: torch.device, setup: Setup, compute: Compute, machine: Machine, gpu: bool = False) -> Job:
    """What a recipe trains, with the largest batches that can occur."""
    model: Any = whole(setup.model, recipe) if machine.meshed else setup.model
    _, batches = next(setup.loader.steps(micro_batch=recipe.micro_batch))
    first, pairs = batches[0], bool(model.encoder_decoder)
    most = recipe.micro_batch or most_of(recipe, device, vars(model.config))
    rows = recipe.batch if recipe.batch_tokens is None else len(batches) * most * machine.shares
    one = widest(first, 1, recipe, pairs)
    tokens = int(one["input_ids"].numel()) + (int(one["labels"].numel()) if pairs else 0)
    how = Conditions(keeper(recipe), compute, device, share(first, recipe), setup.evaluation is not None, gpu)
    examples = setup.loader.examples
    written = examples.written / examples.lengths.sum()
    return Job(model, lambda rows: widest(first, rows, recipe, pairs, written), how, recipe.precision, rows, tokens)


def whole(model: Model, recipe: Recipe) -> Model:
    """The model without storage, as it was before it was spread over ranks."""
    config: Any = model.config
    family = next(family for family in families().values() if family.Config is type(config))
    out = skeleton(family, config, model.task, torch.float32)
    out.load_report = model.load_report  # whose new parameters are trained beside an adapter
    out.freeze(*recipe.freeze)
    if isinstance(out.head, ClassifyHead):
        out.head.r_drop = recipe.loss.r_drop
    if recipe.adapter.name != "none":
        insert(out, recipe.adapter, choose(out, recipe.adapter), precision=recipe.precision)
    return out


def keeper(recipe: Recipe) -> Callable[[nn.Module], tuple[Any, Any]]:
    """A function that makes what is kept beside the weights: the optimizer, and averages if there are any."""
    return lambda model: (build_optimizer(model, recipe.optimizer), EMA(model, recipe.ema) if recipe.ema is not None else None)


def share(batch: Mapping[str, Any], recipe: Recipe) -> float:
    """The part of the labels that are targets."""
    return count_targets(batch, recipe.objective) / max(1, int(batch["labels"].numel()))


def widest(batch: Mapping[str, Any], rows: int, recipe: Recipe, pairs: bool, written: float = 0.0) -> dict[str, Any]:
    """A batch of the kind of `batch` with `rows` examples of the greatest length. `pairs`: the labels are texts of their own;
    `written`: their part of all tokens of the data. If that is more than of the longest pairs, an unpadded batch of as many tokens
    holds more of them, which take more memory than those of sources."""
    source, target = recipe.data.seq_len, find_objective(recipe.objective).target_len(recipe.data) if pairs else recipe.data.seq_len
    packed, labels, width = "cu_seq_lens_k" in batch, batch["labels"], batch["input_ids"].size(1)
    sequences = len(batch["cu_seq_lens_k"]) - 1 if packed else len(batch["input_ids"])
    many = rows * (sequences // len(labels) if labels.dim() == 1 else 1)  # an example may have several
    long = {"q": many * target, "k": many * source}
    if packed and pairs and (more := round(written * sum(long.values()))) > long["q"]:
        long = {"q": more, "k": sum(long.values()) - more}
        many = max(-(-more // target), many)

    def wide(key: str, value: Tensor) -> Tensor:
        if value.dim() == 1 and key == "labels":
            return value.new_zeros(rows)
        if key.startswith("cu_seq_lens"):
            return (torch.arange(many + 1) * long[key[-1]] // many).to(value.dtype)
        if packed and key == "labels" and pairs:
            return value.new_zeros((1, long["q"]))
        if packed and value.size(1) == width:
            return value.new_zeros((1, long["k"]))
        length = target if key == "labels" and pairs else source if value.size(1) == width else value.size(1)
        return value.new_zeros((1, many * length) if packed else (many, length, *value.shape[2:]))

    lengths = {"max_length_q": target, "max_length_k": source}
    return {key: wide(key, value) if isinstance(value, Tensor) else lengths.get(key, value) for key, value in batch.items()}
