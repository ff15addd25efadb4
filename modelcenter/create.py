"""Models from names: `build` gives a model random weights, `load` reads those of a checkpoint."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapter.attach import choose, fill_all, first_values, insert, measure
from .adapter.config import AdapterConfig
from .adapter.read import Saved
from .checkpoint.config import changed, told
from .checkpoint.exchange import open_roads, set_out
from .checkpoint.folder import Folder
from .checkpoint.group import Group, neighbours
from .checkpoint.intake import Intake
from .checkpoint.load import fill, local
from .checkpoint.match import Keys, LoadReport, bare, match
from .checkpoint.save import companions
from .checkpoint.sentence import embeds, read_modules, settle
from .checkpoint.strict_json import no_collection
from .errors import refuse
from .identify import (
    as_dtype,
    asked_dtype,
    check_labels,
    classes,
    described,
    dtype_of,
    family_of,
    find,
    labels_of,
    shape_of,
    task_of,
    untie,
)  # fmt: skip
from .layers import EmbedHead
from .layers.initial import initial
from .layers.linear import Linear
from .model import Model
from .names import Lazy, Names
from .parallel.machine import Machine, as_machine
from .place import check_adapter, is_meta, place
from .resize import resize
from .skeleton import check_task, skeleton
from .theirs import LOAD, arguments


@arguments(LOAD)
def build(
    name: str | PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    task: str = "auto",
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    machine: str | Machine | None = None,
    precision: str | None = None,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | None = None,
    seed: int = 0,
) -> Model:
    """Build a model with random weights. The weights depend only on `seed` and the parameters' names, so every machine gives the
    same ones.

    `name`: a folder whose config.json gives the shape, or a preset; its weights, if it has any, are not read. `config`: fields of
    the config to change, such as {"layers": 2}. `task="auto"` is the task that the preset was published for, or that of the class
    in config.json. The other options are those of `load`. Errors: `InputError` for an unknown name, or options that do not fit the
    family.
    """
    if not isinstance(name, str | PathLike):
        refuse(None, "name", f"a {type(name).__name__}", "a preset, or a folder with a config.json; config= changes its fields")
    family, plain, own = shape_of(str(name))
    full = changed(plain, config or {})
    if id2label is not None or num_labels is not None:
        full = replace(full, labels=labels_of(num_labels, id2label))
    task = own if task == "auto" else task
    check_labels(family, task, num_labels, id2label)
    model = skeleton(family, full, task, as_dtype(dtype))
    model.load_report = LoadReport(new=sorted(model.shapes))
    if is_meta(device):
        return model
    place(model, device, machine if machine is None else as_machine(machine), precision)
    fill(model, initial(model, model.shapes, seed, model.init_std))
    return model


@arguments(LOAD)
def load(
    name: str | PathLike[str],
    *,
    task: str = "auto",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    machine: str | Machine | None = None,
    precision: str | None = None,
    adapter: AdapterConfig | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    config: Mapping[str, Any] | None = None,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | None = None,
    seed: int = 0,
    family: type[Model] | tuple[type[Model], ...] = Model,
    put_off: Callable[[Callable[[], None]], object] | None = None,
) -> Model:
    """Load a pretrained model, in evaluation mode.

    `name`: a folder, a preset or a hub id. config.json says which family it is. If it holds an adapter in peft's format, the result
    is the adapter's base model with the adapter on it.
    `task`: lm, mlm, seq2seq, classify, tag, qa, embed or backbone; auto is the task of the checkpoint's own head. A head that the
    checkpoint does not have gets random weights drawn from `seed`, and `load_report` names them.
    `num_labels`, `id2label`: how many labels a classifier has, or what they are called.
    `dtype`: fp32, bf16, fp16 or a torch dtype; auto keeps the dtype of the checkpoint's weights.
    `device`: where the weights go; "meta" allocates nothing and reads no weights.
    `machine`: a machine profile or its name. The model is sharded accordingly, and each process reads only its own part.
    `precision`: see `parallelize`. Frozen matrices beneath an adapter are then held in it.
    `adapter`: a new adapter to put on the model.
    `config`: fields of the config to change, such as {"dropout": 0.0}.
    `revision`, `local_files_only`: as in huggingface_hub.
    `family`: the classes that the model may have; a checkpoint of any other is refused.
    `put_off`: if given, the weights are not read yet: `put_off` is called with a function that reads them, to be run later. It has
    no effect if several ranks read together, or if an adapter is put on.

    Errors: `InputError`, one line that names the file, key or argument that does not fit, and says what to do.
    """
    source = find(name, revision, local_files_only, adapter)
    saved, path = source.saved, source.path
    adapter = adapter if saved is None else saved.config
    with ExitStack() as stack:
        stack.enter_context(no_collection())
        folder = stack.enter_context(Folder(path))
        cls = family_of(folder.config, path / "config.json", family)
        full, task = described(cls, folder, source, task, config, num_labels, id2label)
        asked, task = task, task_of(cls, folder, full) if task == "auto" else task
        check_task(cls, task)
        check_labels(cls, task, num_labels, id2label)
        if task == "qa" and full.num_labels != 2 and cls.tasks[task].architecture not in classes(folder):
            # a classifier's; transformers gives some heads as many scores as there are labels
            full = replace(full, labels=labels_of(2, None))
        full, untied = untie(cls, full, folder, task)
        kind = asked_dtype(dtype) or dtype_of(folder, cls.ignored)
        with told(path / "config.json"):
            model = skeleton(cls, full, task, kind)
        weights = matched(model, folder, untied, seed, saved.folder if saved is not None and embeds(saved.folder) else path)
        machine, adapters = machine if machine is None else as_machine(machine), dict[str, Lazy]()
        if adapter is not None:
            check_adapter(model, adapter, machine)
            adapters = put_on(model, adapter, saved, weights, device, seed, precision)
        if asked == "auto" and not model.bare and (drawn := model.load_report.new):  # nobody said that it is to be trained
            noise = f"not there, and drawn at random; what task={task} says is noise"
            warnings.warn(f"{path}: {', '.join(drawn)}: {noise}", stacklevel=3)
        if is_meta(device):
            return model.eval()
        size, begun = sum(p.nbytes for p in model.parameters()), list[Intake]()

        def begin_reading(home: torch.device) -> None:  # while FSDP still wraps the model
            if machine is not None and machine.ranks > 1 and adapter is None:
                intake = set_out(weights, home, size // (machine.tensor_parallel * machine.fsdp))
                begun.extend([stack.enter_context(intake)] if intake is not None else [])
            if not begun or begun[0].mapped is None:
                open_roads(home)

        place(model, device, machine, precision, begin_reading)
        group = group_of(machine)
        if put_off is not None and adapter is None and group is None:
            left = stack.pop_all()  # the folder stays open until it is read

            def read() -> None:
                with left:
                    fill_all(model, weights, adapters)
                    warn_of_infinite(model, folder)

            put_off(read)
        else:
            fill_all(model, weights, adapters, group, *begun)
            warn_of_infinite(model, folder)
        if saved is None:
            measure(model)
        model.companions = model.brought = companions(path) if saved is None else companions(saved.folder, path)
        model.revision = source.revision
        model.source = source.told
    return model.eval()


def warn_of_infinite(model: Model, folder: Folder) -> None:
    """Warn of weights (in this rank's part) that were stored in a wider dtype than fp16 and became infinite in fp16."""
    if model.dtype != torch.float16 or dtype_of(folder, type(model).ignored) == torch.float16:
        return
    held = {name: local(p)[1] for name, p in model.named_parameters()}
    with torch.no_grad():
        found = torch.stack([part.isinf().any() for part in held.values()]).tolist()
    if lost := [name for name, infinite in zip(held, found, strict=True) if infinite]:
        most = "beyond 65504, the most that fp16 holds, and infinite now; bf16 and fp32 hold it"
        warnings.warn(f"{folder.path}: {', '.join(lost[:5])}: {most}", stacklevel=4)


def matched(model: Model, folder: Folder, untied: Sequence[str], seed: int, path: Path) -> dict[str, Lazy]:
    """The value of each parameter, to be read from the folder or drawn from `seed` later. Sets the model's `load_report`. `path` is
    the folder that says how texts become vectors."""
    dense: dict[str, Tensor] = {}
    if isinstance(model.head, EmbedHead):
        said = read_modules(path)
        for unread in said.unread:
            warnings.warn(f"{path}: {unread}", stacklevel=4)
        dense = settle(path, said, model.head, model.config.dim, next(model.parameters()).dtype)
    # names of the heads and parts that this task does not have; the file may hold them all the same
    other = [f"{row[0].replace('{}', '*')}*" for t, head in model.tasks.items() if t != model.task for row in head.rows]
    without = model.tasks[model.task].without
    other += [f"{row[0].replace('{}', '*')}*" for row in model.names(model.config) if part_of(row[1]) in without]
    found, model.load_report = match(
        folder, spoken(model, Keys(folder)), model.shapes, head=[n for n in model.shapes if n.startswith("head.")],
        aliases=model.aliases, ignored=[*model.ignored, *other, *(o.removeprefix(model.prefix) for o in other)], untied=untied,
        foreign=foreign(model, folder),
    )  # fmt: skip
    new = {name: model.shapes[name] for name in model.load_report.new}
    return {**found, **dense, **initial(model, new, seed, model.init_std)}


def foreign(model: Model, folder: Folder) -> set[str]:
    """transformers' modules that a head of this task has but that belong to another task in this folder, as `architectures` says: a
    tagger's and a classifier's modules may have the same name."""
    mine, names = model.tasks[model.task], classes(folder)
    if mine.architecture in names:
        return set()
    others = {row[0] for task in model.tasks.values() if task.architecture in names for row in task.rows}
    return {row[0] for row in mine.rows if row[0] in others and not (model.prefix and row[0].startswith(model.prefix))}


def put_on(model: Model, adapter: AdapterConfig, saved: Saved | None, weights: dict[str, Lazy],
           device: str | torch.device | None, seed: int, precision: str | None) -> dict[str, Lazy]:
    """Put a new adapter, or a saved one, on the model, and return the values of the adapter's parameters. Parameters of the model
    that a saved adapter holds whole replace those in `weights`."""

    def ready(name: str, layer: Linear) -> None:  # a layer is whole for as long as its codes of 4 or 8 bits are made
        if is_meta(device):
            return
        if layer.weight.dtype.itemsize < 4:
            layer.float()  # an adapter is trained on the codes of what the file holds, and goes with no others
        layer.to_empty(device=device or "cpu")
        fill(layer, {leaf: weights[f"{name}.{leaf}"] for leaf, _ in layer.named_parameters()})

    if saved is None:
        insert(model, adapter, choose(model, adapter), None, ready, precision)
        return first_values(model, seed)
    saved = saved.spoken(model)
    if (words := saved.vocab(model)) not in (None, model.config.vocab):
        resize(model, words, seed)
    places, wholes = saved.places(model), saved.wholes(model)
    weights |= wholes
    model.load_report = replace(model.load_report, new=[n for n in model.shapes if n in model.load_report.new and n not in wholes])
    insert(model, adapter, places, saved.trained(model), ready, precision)
    return saved.values(model, places)


def spoken(model: Model, keys: Keys) -> Names:
    """The model's names with the prefix of this file, which may be that of another task's class."""
    table = model.table
    prefixes = (table.prefix, model.prefix, *(task.prefix for task in model.tasks.values()))
    return next((t for t in (table.under(p) for p in prefixes if p) if not bare(keys, t, model.shapes)), table)


def part_of(ours: str | tuple[str, ...]) -> str:
    """The top-level module of ours that a row of names belongs to."""
    return (ours if isinstance(ours, str) else ours[0]).partition(".")[0]


def group_of(machine: Machine | None) -> Group | None:
    """The ranks that read the files together; None for a process of its own."""
    return neighbours() if machine is not None and machine.ranks > 1 else None
