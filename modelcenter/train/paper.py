"""A plan for devices that need not be here: the job that a recipe, or a model alone, makes for them, and its layouts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..create import build
from ..data.objective import find_objective
from ..errors import InputError, nearest, printable, refuse, tell
from ..layers import Adapted
from ..parallel.adapted import check_adapted
from ..parallel.chips import Chip, chip_here, chip_named
from ..parallel.costs import Costs
from ..parallel.device import count_of, device_of
from ..parallel.estimate import Job
from ..parallel.machine import Machine
from ..parallel.rehearse import Conditions
from ..parallel.survey import Survey, survey
from ..place import check_adapter
from ..registry import presets
from .calibrate import NOTHING, learn
from .fit import job_of, keeper
from .launch import check_ranks
from .prepare import prepare
from .recipe import Recipe
from .resolve import automatic_precision, check_length, resolve, sizes_of
from .step import autocast

MASKED = 0.15  # of the tokens are targets, in masked language modelling


def objective_of(model: str) -> str:
    """The objective that trains a preset's own head."""
    known = presets()
    if model not in known:
        refuse(None, "model", repr(model), f"a preset, or a recipe; {nearest(model, known)}")
    family, preset = known[model]
    task = preset.task or family.default_task or next(iter(family.tasks))
    return task if task in ("lm", "mlm", "seq2seq") else "lm" if "lm" in family.tasks else "mlm"


def on_paper(recipe: Recipe, machine: Machine, ranks: int | None, device: str | None, bare: bool) -> tuple[Survey, list[str]]:
    """The layouts of a run on `ranks` devices (those of `machine`) of the named kind (None: the one here), and lines that describe
    it."""
    found = device_of(replace(machine, device="auto" if device is None else machine.device if torch.cuda.is_available() else "cpu"))
    chip = chip_named(device) if device is not None else chip_here(found)
    if chip is None:
        refuse(None, "device", f"{found.type} is not known", "give device=NAME")
    ranks = ranks or (machine.ranks if machine.devices is None else count_of(machine))
    machine = replace(machine, devices=None, tensor_parallel=1, fsdp=1, replicate=1)
    gpu = device is not None and found.type == "cpu"
    asked = recipe.micro_batch
    if recipe.precision == "auto":
        here = automatic_precision(found, sizes_of(recipe).get("dim"))
        recipe = replace(recipe, precision=here if device is None else automatic(chip))
    learned = learn(chip, recipe.precision, ranks > 1) if device is None else NOTHING
    chip = learned.of(chip)
    job = job_alone(recipe, found, gpu) if bare else job_there(recipe, machine, found, gpu)
    costs = Costs(job, chip)
    others = {}
    if recipe.optimizer.name == "adamw" and recipe.optimizer.moments == "fp32":
        less = replace(recipe, optimizer=replace(recipe.optimizer, moments="bf16"))
        others["optimizer.moments=bf16"] = Costs(replace(job, how=replace(job.how, build=keeper(less))), chip)

    tell(f"plan: steps of {printable(recipe.model)} are rehearsed in every layout of {ranks} x {chip.name}, which takes a while")
    result = survey(costs, ranks, machine, asked, others, runnable(recipe, job.model))
    weights = sum(p.numel() for p in job.model.parameters())
    lines = [
        f"{recipe.model}: {weights / 1e9:,.2f} G parameters, {recipe.precision}, steps of {job.rows:,} x {job.tokens:,} tokens on "
        f"{ranks} x {chip.name}",
        f"predicted, not measured; rates: {chip.source}",
        f"the host takes {chip.call * 1e6:.3g} µs for a call of torch's, {chip.host}",
        *([str(learned)] if learned.runs else []),
    ]
    return result, lines


def runnable(recipe: Recipe, model: Any) -> Callable[[Machine], bool]:
    """Whether a machine's ranks can do with the model as one process does."""
    parts = [(getattr(m, child, None), style) for m in model.modules() for child, style in getattr(m, "tp", {}).items()]
    cut = [(part, style) for part, style in parts if isinstance(part, Adapted)]

    def allowed(machine: Machine) -> bool:
        try:
            check_ranks(recipe, machine)
            if recipe.adapter.name != "none":
                check_adapter(model, recipe.adapter, machine)
            for part, style in cut if machine.tensor_parallel > 1 else ():
                check_adapted(part, style)
        except InputError:
            return False
        return True

    return allowed


def automatic(chip: Chip) -> Any:
    """The value of `precision: auto` on a chip that is not here."""
    return "bf16" if chip.bf16 else "fp16" if chip.fp16 else "fp32"


def job_there(recipe: Recipe, machine: Machine, device: torch.device, gpu: bool) -> Job:
    """What a recipe trains, with its data read."""
    kind: Any = device.type
    recipe, _ = resolve(recipe, replace(machine, device=kind))
    setup = prepare(recipe, machine, device, meta=True)
    return job_of(recipe, device, setup, partial(autocast, recipe.precision, device), machine, gpu)


def job_alone(recipe: Recipe, device: torch.device, gpu: bool) -> Job:
    """What a model is trained on without data: sequences of data.seq_len, of which all tokens are targets, or those that are
    masked."""
    model = build(recipe.model, task=find_objective(recipe.objective).task, config=recipe.config, device="meta")
    model.freeze(*recipe.freeze)
    length, pairs = recipe.data.seq_len, bool(model.encoder_decoder)
    check_length(recipe, vars(model.config))
    target = (recipe.data.target_len or length) if pairs else length

    def batch(rows: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(rows, length, dtype=torch.long), "labels": torch.zeros(rows, target, dtype=torch.long)}

    share = MASKED if recipe.objective == "mlm" else 1.0
    how = Conditions(keeper(recipe), partial(autocast, recipe.precision, device), device, share, gpu=gpu)
    return Job(model, batch, how, recipe.precision, recipe.batch, length + target if pairs else length)
