"""Whether a run will fit into memory, said before its first step, and which key makes it fit where it does not."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import printable, refuse
from ..optim.ema import EMA
from ..optim.optimizers import build_optimizer
from ..parallel.device import memory_of
from ..parallel.machine import Machine, Recompute
from ..parallel.plan import Plan, rehearse, size
from .evaluate import count_targets
from .prepare import Setup, most_of
from .recipe import Recipe

Compute = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Verdict:
    """A plan, the batch that it is for (sequences x tokens), and what would need less: (settings, bytes)."""

    plan: Plan
    batch: str
    ways: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        advice = " or ".join(f"{setting} ({size(need)})" for setting, need in self.ways)
        return f"memory: {self.plan} (batches of {self.batch})" + (f"; set {advice}" if advice else "")


def verdict(recipe: Recipe, machine: Machine, device: torch.device, setup: Setup, compute: Compute, *,
            refuses: bool = True) -> Verdict | str:
    """What the memory of `device` says to a run; a line that says why, where that is not known.

    The batch is the largest that can come: a micro-batch of sequences of `data.seq_len`. Refused is only what no batch could be
    small enough for: weights, gradients and optimizer beyond all the memory there is.
    """
    there = memory_of(device)
    if there is None:
        return f"memory: not known of {device.type}"
    free, total = there
    model: Any = setup.model
    if machine.ranks > 1:
        return "memory: not estimated for several processes"
    if device.type == "cpu":
        free += sum(p.nbytes for p in model.parameters() if not p.is_meta)  # in the plan, and taken already
    now = recipe.micro_batch or most_of(recipe, device)
    _, batches = next(setup.loader.steps(micro_batch=recipe.micro_batch))

    def plan(rows: int, recompute: Recompute) -> Plan:
        parts = rehearse(model, widest(batches[0], rows, recipe, model.encoder_decoder), keeper(recipe), compute, device,
                         forwards=len(batches) * now // rows, share=share(batches[0], recipe), recompute=recompute,
                         evaluates=setup.evaluation is not None)  # fmt: skip
        if device.type != "cpu":
            parts["fragments"] = int(FRAGMENTS * parts.total())
        return Plan(parts, min(free, total), total)

    log = logging.getLogger("torch._subclasses.fake_tensor")  # which prints the traceback of what is raised in it
    quiet, log.disabled = log.disabled, True
    try:
        found = plan(now, machine.recompute)
        ways = [] if found.fits or found.hopeless else list(better(plan, now, recipe, machine))
    except Exception as error:  # what cannot be rehearsed can be run
        return f"memory: not estimated: {type(error).__name__}: {printable(' '.join(str(error).split()))[:100]}"
    finally:
        log.disabled = quiet
    if found.hopeless and refuses:
        what = f"{size(found.lasting)} of weights, gradients and optimizer, {size(total)} there"
        refuse(None, "memory", what, FEWER)
    return Verdict(found, f"{now} x {recipe.data.seq_len} tokens", tuple(ways))


FRAGMENTS = 0.1  # of what an accelerator's caching allocator holds; 8 % for LoRA on LLaMA on one H200
FEWER = "an adapter (adapter.name=lora), optimizer.moments=bf16, optimizer.name=adafactor or a smaller model"


def better(plan: Callable[[int, Recompute], Plan], now: int, recipe: Recipe, machine: Machine) -> Iterator[tuple[str, int]]:
    """Settings that fit: the largest micro-batch, recompute, or both, each found by a rehearsal; or the least of all."""
    halves = [n for n in range(now // 2, 0, -1) if now % n == 0]
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in modes[modes.index(machine.recompute) :]:
        more = recompute != machine.recompute
        settings = f"machine.recompute={recompute}" if more else ""
        for rows in [now] * more + halves * (recompute != "selective" or not more):
            found = plan(rows, recompute)
            if found.fits:
                yield " ".join(filter(None, (f"micro_batch={rows}" if rows != now else "", settings))), found.need
                break


def keeper(recipe: Recipe) -> Callable[[nn.Module], tuple[Any, Any]]:
    """What is kept beside the weights."""
    return lambda model: (build_optimizer(model, recipe.optimizer), EMA(model, recipe.ema) if recipe.ema is not None else None)


def share(batch: Mapping[str, Any], recipe: Recipe) -> float:
    """The part of the labels that are targets."""
    return count_targets(batch, recipe.objective) / max(1, int(batch["labels"].numel()))


def widest(batch: Mapping[str, Any], rows: int, recipe: Recipe, pairs: bool) -> dict[str, Any]:
    """A batch of the kind of `batch` with `rows` examples of the greatest length. `pairs`: the labels are texts of their own."""
    source, target = recipe.data.seq_len, (recipe.data.target_len or recipe.data.seq_len) if pairs else recipe.data.seq_len
    packed, labels, width = "cu_seq_lens_k" in batch, batch["labels"], batch["input_ids"].size(1)
    sequences = len(batch["cu_seq_lens_k"]) - 1 if packed else len(batch["input_ids"])
    many = rows * (sequences // len(labels) if labels.dim() == 1 else 1)  # an example may have several

    def wide(key: str, value: Tensor) -> Tensor:
        if value.dim() == 1 and key == "labels":
            return value.new_zeros(rows)
        if key.startswith("cu_seq_lens"):
            return torch.arange(many + 1, dtype=value.dtype) * (target if key.endswith("q") else source)
        length = target if key == "labels" and pairs else source if value.size(1) == width else value.size(1)
        return value.new_zeros((1, many * length) if packed else (many, length, *value.shape[2:]))

    lengths = {"max_length_q": target, "max_length_k": source}
    return {key: wide(key, value) if isinstance(value, Tensor) else lengths.get(key, value) for key, value in batch.items()}
