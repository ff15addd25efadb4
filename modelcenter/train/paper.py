"""A plan for devices that need not be present: the job that a recipe, or a model alone, makes for them, and its layouts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ..adapter.attach import choose, insert
from ..checkpoint.match import LoadReport
from ..create import build
from ..data.collate import Batch, pack, pad
from ..data.objective import find_objective
from ..errors import InputError, printable, refuse, tell
from ..identify import shape_of
from ..layers import Adapted, ClassifyHead
from ..model import Model
from ..parallel.adapted import check_adapted
from ..parallel.device import count_of, device_of
from ..parallel.machine import LAYOUT, Machine
from ..place import check_adapter
from ..plan.chips import Chip, chip_here, chip_named
from ..plan.costs import Costs
from ..plan.estimate import Job
from ..plan.layout import check_open
from ..plan.rehearse import Conditions
from ..plan.survey import Survey, survey
from .calibrate import NOTHING, learn
from .fit import as_a_rank, beside, job_of, keeper, ranks_here, share, widest
from .launch import check_ranks
from .prepare import prepare, restrict
from .recipe import Recipe
from .resolve import automatic_precision, check_length, may_pack, most_of, resolve, sizes_of
from .step import autocast

MASKED = 0.15  # of the tokens are targets, in masked language modelling


def objective_of(model: str) -> str:
    """The objective that trains the own head of a preset, or of a folder's model."""
    family, _, task = shape_of(model)
    return task if task in ("lm", "mlm", "seq2seq") else "lm" if "lm" in family.tasks else "mlm"


def on_paper(recipe: Recipe, machine: Machine, ranks: int | None, device: str | None, bare: bool) -> tuple[Survey, list[str]]:
    """The layouts of a run on `ranks` devices (those of `machine`) of the named kind (None: the one here), and lines that say what
    is planned, and then of what the prediction is made."""
    found = device_of(replace(machine, device="auto" if device is None else machine.device if torch.cuda.is_available() else "cpu"))
    if ranks is not None or machine.devices is not None:
        check_open(machine, f"devices={machine.devices}" if ranks is None else f"gpus={ranks}")
    ranks = ranks or (machine.ranks if machine.devices is None else count_of(machine))
    with as_a_rank(machine, ranks):
        chip = chip_named(device) if device is not None else chip_here(found)
    if chip is None:
        refuse(None, "device", f"{found.type} is not known", "give device=NAME")
    machine = replace(machine, devices=None, **{key: getattr(Machine(), key) for key in LAYOUT})
    gpu = device is not None and found.type == "cpu"
    asked = recipe.micro_batch
    if asked is None and find_objective(recipe.objective).together:
        asked = recipe.batch if recipe.batch_tokens is None else most_of(recipe, found, {})
    if recipe.precision == "auto":
        here = automatic_precision(found, sizes_of(recipe).get("dim"))
        recipe = replace(recipe, precision=here if device is None else automatic(chip))
    learned = learn(chip, recipe.precision, ranks > 1) if device is None else NOTHING
    chip = learned.of(beside(chip, machine, ranks) if device is None and found.type != "cpu" else chip)
    job = job_alone(recipe, found, gpu) if bare else job_there(recipe, machine, found, gpu)
    limit = chip.memory / (ranks_here(ranks) if device is None and found.type == "cpu" else 1)
    costs = Costs(job, chip, limit)
    others = {}
    if recipe.optimizer.name == "adamw" and recipe.optimizer.moments == "fp32":
        less = replace(recipe, optimizer=replace(recipe.optimizer, moments="bf16"))
        others["optimizer.moments=bf16"] = Costs(replace(job, how=replace(job.how, build=keeper(less))), chip, limit)

    tell(f"plan: a step of {printable(recipe.model)} is rehearsed in every layout of {ranks} x {chip.name}, which takes a while")
    result = survey(costs, ranks, machine, asked, others, runnable(recipe, job.model))
    weights = sum(prod(shape) for shape in job.model.shapes.values())  # however they are stored, and without adapters
    many = f"{weights / 1e9:,.2f} G" if weights >= 1e9 else f"{weights / 1e6:,.2f} M"
    lines = [
        f"{recipe.model}: {many} parameters, {recipe.precision}, steps of {job.rows:,} x {job.tokens:,} tokens on "
        f"{ranks} x {chip.name}; predicted, not measured",
        f"rates: {chip.source or device}",
        f"host: {chip.call * 1e6:.3g} µs for each call of torch, {chip.host}",
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
    machine = replace(machine, sequence_parallel=False)  # which is for layouts that cut tensors, and this one has one rank
    recipe, _ = resolve(recipe, replace(machine, device=kind))
    if gpu and not may_pack(recipe, gpu):  # which the rehearsal is not on
        recipe = replace(recipe, data=replace(recipe.data, padding_free=bool(recipe.data.padding_free)))
    setup = prepare(recipe, machine, device, meta=True)
    return job_of(recipe, device, setup, partial(autocast, recipe.precision, device), machine, gpu)


def job_alone(recipe: Recipe, device: torch.device, gpu: bool) -> Job:
    """What a model is trained on without data: examples of the greatest length, of which all tokens are targets, or those that are
    masked, and with adapters on it if the recipe says so. Labels have the default names."""
    objective = find_objective(recipe.objective)
    labels = 1 if recipe.objective == "regress" else None
    model = build(recipe.model, task=objective.task, config=recipe.config, device="meta", num_labels=labels)
    if recipe.init == "pretrained":
        model.load_report = LoadReport()  # weights are read for it, and nothing is new
    check_length(recipe, vars(model.config))
    restrict(model, recipe)
    if recipe.adapter.name != "none":
        insert(model, recipe.adapter, choose(model, recipe.adapter), precision=recipe.precision)
    if isinstance(model.head, ClassifyHead):
        model.head.r_drop = recipe.loss.r_drop
    first, pairs = example(recipe, model), bool(model.encoder_decoder)
    tokens = int(first["input_ids"].numel()) + (int(first["labels"].numel()) if pairs else 0)
    rows = recipe.batch if recipe.batch_tokens is None else max(1, recipe.batch_tokens // tokens)
    each = recipe.micro_batch or 1  # need not divide a number of tokens: the last forward counts as a full one, as with data
    rows = -(-rows // each) * each
    targets = MASKED if recipe.objective == "mlm" else share(first, recipe)
    how = Conditions(keeper(recipe), partial(autocast, recipe.precision, device), device, targets, gpu=gpu)
    return Job(model, lambda rows: widest(first, rows, recipe, pairs), how, recipe.precision, rows, tokens)


def example(recipe: Recipe, model: Model) -> Batch:
    """A batch of one example of the greatest length, whose tensors are as those that the objective makes of data."""
    data, task, objective = recipe.data, recipe.head, find_objective(recipe.objective)
    texts = 1 if task != "embed" else 2 if data.negative_key is None else 3
    ids = [[0] * data.seq_len] * texts
    wanted = [[0] * (objective.target_len(data) if model.encoder_decoder else data.seq_len)]
    batch = pack(ids, wanted * texts) if data.packing or data.padding_free else pad(ids, wanted * texts, 0)
    if task == "lm":
        batch.pop("attention_mask", None)  # its texts fill their sequences
    numbers = torch.float32 if "values" in objective.of or "sets" in objective.of else torch.long
    config: Any = model.config
    if shape := {"classify": (1, config.num_labels) if "sets" in objective.of else (1,), "embed": (1,), "qa": (1, 2)}.get(task):
        batch["labels"] = torch.zeros(shape, dtype=numbers)
    return batch
