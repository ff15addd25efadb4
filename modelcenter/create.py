"""How to get a model out of a name: `build` with random weights, `load` with those of a checkpoint."""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapter.attach import LABELLED, choose, fill_all, first_values, insert, measure
from .adapter.config import AdapterConfig
from .adapter.folder import Saved, is_adapter, read_adapter
from .checkpoint import hub
from .checkpoint.config import changed, told
from .checkpoint.exchange import open_roads, set_out
from .checkpoint.files import no_collection
from .checkpoint.folder import Folder
from .checkpoint.group import Group, neighbours
from .checkpoint.intake import Intake
from .checkpoint.load import fill, local
from .checkpoint.match import Keys, LoadReport, bare, match, same
from .checkpoint.save import companions
from .checkpoint.sentence import read_modules, settle
from .errors import nearest, refuse
from .layers import EmbedHead
from .layers.initial import initial
from .layers.linear import Linear
from .model import Model, Preset, check_task, resize, skeleton
from .names import Lazy, Names
from .parallel.blocks import fit_blocks
from .parallel.check import check
from .parallel.device import check_device, device_of
from .parallel.machine import Machine, load_machine
from .registry import families, hubs, presets
from .theirs import LOAD, arguments

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@arguments(LOAD)
def build(
    name: str,
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
    """Build a preset with random weights, which depend only on `seed` and on the parameters' names, not on the machine.

    `config`: fields of the config to change, {"layers": 2}. `task="auto"` is what the preset was published for. The other options
    are those of `load`. Errors: `InputError`.
    """
    known = presets()
    if name not in known:
        refuse(None, "model", repr(name), f"a preset; {nearest(name, known)}")
    family, preset = known[name]
    full = changed(replace(family.Config(), **preset.changes), config or {})
    if id2label is not None or num_labels is not None:
        full = replace(full, labels=labels_of(num_labels, id2label))
    task = (preset.task or family.default_task or next(iter(family.tasks))) if task == "auto" else task
    check_labels(family, task, num_labels, id2label)
    model = skeleton(family, full, task, as_dtype(dtype))
    if is_meta(device):
        return model
    place(model, device, as_machine(machine), precision)
    fill(model, initial(model, model.shapes, seed, model.init_std))
    model.load_report = LoadReport(new=sorted(model.shapes))
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
    """Load a pretrained model, in evaluation mode, from a folder, a preset or a hub id. config.json names its family.

    `task`: lm, mlm, seq2seq, classify, tag, qa, embed, backbone, or auto: the checkpoint's own head. A head that the checkpoint
    does not have gets random weights from `seed`, and `load_report` names them. `num_labels` or `id2label` sets a classifier's
    labels.
    `dtype`: fp32, bf16, fp16, a torch dtype, or auto: that of the weights.
    `device`: where the weights go; "meta" allocates nothing.
    `machine`: a profile or its name; the model is sharded, and each process reads only its own part. `precision`: see
    `parallelize`.
    `adapter`: put on the model. A folder that holds an adapter in peft's format gives its base with the adapter on it.
    `config`: fields of the config to change, {"dropout": 0.0}. `revision`, `local_files_only`: as for huggingface_hub.
    `family`: refuse a checkpoint of another class. `put_off`: called with a function that reads the weights, to be called later;
    it has no effect where several ranks read or an adapter is put on.

    Errors: `InputError` for a file, a key or an argument that does not fit, in one line that says what to do.
    """
    source = find(name, revision, local_files_only, adapter)
    saved, path = source.saved, source.path
    adapter = adapter if saved is None else saved.config
    with ExitStack() as stack:
        stack.enter_context(no_collection())
        folder = stack.enter_context(Folder(path))
        cls = family_of(folder, family)
        full, task = described(cls, folder, source, task, config, num_labels, id2label)
        asked, task = task, task_of(cls, folder) if task == "auto" else task
        check_task(cls, task)
        check_labels(cls, task, num_labels, id2label)
        full, untied = untie(cls, full, folder, task)
        kind = dtype_of(folder, cls.ignored) if dtype == "auto" else as_dtype(dtype)
        with told(path / "config.json"):
            model = skeleton(cls, full, task, kind)
        weights = matched(model, folder, untied, seed)
        machine, adapters = as_machine(machine), dict[str, Lazy]()
        if adapter is not None:
            check_adapter(model, adapter, machine)
            adapters = put_on(model, adapter, saved, weights, device, seed)
        if asked == "auto" and not model.bare and (drawn := model.load_report.new):  # nobody said that it is to be trained
            noise = f"not there, and drawn at random; what task={task} says is noise"
            warnings.warn(f"{path}: {', '.join(drawn)}: {noise}", stacklevel=3)
        if is_meta(device):
            return model.eval()
        size, begun = sum(p.nbytes for p in model.parameters()), list[Intake]()

        def beside(home: torch.device) -> None:  # reading begins while FSDP wraps the model
            if machine is not None and adapter is None:
                intake = set_out(weights, home, size // (machine.tensor_parallel * machine.fsdp))
                begun.extend([stack.enter_context(intake)] if intake is not None else [])
            if not begun or begun[0].mapped is None:
                open_roads(home)

        place(model, device, machine, precision, beside)
        group = group_of(machine)
        if put_off is not None and adapter is None and group is None:
            left = stack.pop_all()  # the folder stays open until it is read

            def read() -> None:
                with left:
                    fill_all(model, weights, adapters)

            put_off(read)
        else:
            fill_all(model, weights, adapters, group, *begun)
        if saved is None:
            measure(model)
        model.companions = companions(path if saved is None else saved.folder)
        model.revision = source.revision
        model.source = source.told
    return model.eval()


@dataclass(frozen=True)
class Source:
    """Where a model's weights are. Where the folder asked for holds an adapter, all but `saved` is about its base."""

    name: str | PathLike[str]  # a folder, a preset or a hub id
    path: Path  # the folder that it resolved to
    revision: str | None
    preset: Preset | None  # the one of that name
    saved: Saved | None

    @property
    def told(self) -> str | None:
        """The hub id, or a folder's whole path."""
        if Path(self.name).expanduser() == self.path:
            return str(self.path.resolve())
        return self.preset.hub if self.preset is not None else str(self.name)


def find(name: str | PathLike[str], revision: str | None, local_files_only: bool, adapter: AdapterConfig | None) -> Source:
    """Resolve a name, and the name of its base where that is a folder with an adapter; `adapter` is what the caller asked for."""
    resolve = partial(hub.resolve, local_files_only=local_files_only, presets=hubs())
    path, saved = resolve(name, revision=revision), None
    if adapter is not None and not isinstance(adapter, AdapterConfig):
        refuse(None, "adapter", repr(adapter), "mc.AdapterConfig(name='lora', ...)")
    if is_adapter(path):
        saved = read_adapter(path)
        if adapter is not None:
            refuse(path, "adapter", "the folder holds one", "merge it first (modelcenter merge), or load it as it is")
        name, revision = saved.base, saved.revision
        path = resolve(name, revision=revision)
    return Source(name, path, revision, presets().get(str(name), (None, None))[1], saved)


def described(cls: type[Model], folder: Folder, source: Source, task: str, config: Mapping[str, Any] | None,
              num_labels: int | None, id2label: Mapping[int, str] | None) -> tuple[Any, str]:
    """The config and the task by all that says something of them: the preset, config.json, the adapter's folder, the caller."""
    saved = source.saved
    if task == "auto" and source.preset is not None and source.path != Path(source.name):
        task = source.preset.task or task
    full = changed(cls.Config.from_dict(folder.config, source.path / "config.json"), config or {})
    if saved is not None:
        if task == "auto":
            task = saved.task({t: head.architecture for t, head in cls.tasks.items()}) or task
        if id2label is None and num_labels is None and task in LABELLED:
            id2label = saved.labels([row[0] for row in cls.tasks[task].rows])
        full = replace(full, file={**full.file, **saved.settled})
    if id2label is not None or num_labels is not None:
        full = replace(full, labels=labels_of(num_labels, id2label))
    return full, task


def matched(model: Model, folder: Folder, untied: Sequence[str], seed: int) -> dict[str, Lazy]:
    """A value for each parameter, none of them read yet: the folder's, or drawn from `seed`. Writes the model's `load_report`."""
    dense: dict[str, Tensor] = {}
    if isinstance(model.head, EmbedHead):
        path = Path(folder.path)
        said = read_modules(path)
        for unread in said.unread:
            warnings.warn(f"{path}: {unread}", stacklevel=4)
        dense = settle(path, said, model.head, model.config.dim, next(model.parameters()).dtype)
    # tensors of the heads that the file has and this model has not
    other = [f"{row[0].replace('{}', '*')}*" for t, head in model.tasks.items() if t != model.task for row in head.rows]
    without = model.tasks[model.task].without
    other += [f"{row[0].replace('{}', '*')}*" for row in model.names(model.config) if part_of(row[1]) in without]
    found, model.load_report = match(
        folder, spoken(model, Keys(folder)), model.shapes, head=[n for n in model.shapes if n.startswith("head.")],
        aliases=model.aliases, ignored=[*model.ignored, *other, *(o.removeprefix(model.prefix) for o in other)], untied=untied,
    )  # fmt: skip
    new = {n: s for n, s in model.shapes.items() if n in set(model.load_report.new)}
    return {**found, **dense, **initial(model, new, seed, model.init_std)}


def put_on(model: Model, adapter: AdapterConfig, saved: Saved | None, weights: dict[str, Lazy],
           device: str | torch.device | None, seed: int) -> dict[str, Lazy]:
    """Put a new adapter, or a saved one, on the model; returns the values of its parameters. What a saved one replaces whole is
    replaced in `weights`."""

    def ready(name: str, layer: Linear) -> None:  # a layer is whole for as long as its codes of 4 or 8 bits are made
        if is_meta(device):
            return
        layer.to_empty(device=device or "cpu")
        fill(layer, {leaf: weights[f"{name}.{leaf}"] for leaf, _ in layer.named_parameters()})

    if saved is None:
        insert(model, adapter, choose(model, adapter), None, ready)
        return first_values(model, seed)
    if (words := saved.vocab(model)) not in (None, model.config.vocab):
        resize(model, words, seed)
    places, wholes = saved.places(model), saved.wholes(model)
    weights |= wholes
    model.load_report = replace(model.load_report, new=[n for n in model.shapes if n in model.load_report.new and n not in wholes])
    insert(model, adapter, places, saved.trained(model), ready)
    return saved.values(model, places)


def family_of(folder: Folder, wanted: type[Model] | tuple[type[Model], ...]) -> type[Model]:
    """The family of config.json's model_type, or `wanted` where that is a class of one's own made of it; refused where it is not
    `wanted`."""
    kind = folder.config.get("model_type")
    file = Path(folder.path) / "config.json"
    known = families()
    if not isinstance(kind, str) or kind not in known:
        refuse(file, "model_type", repr(kind), f"one of the families that are here: {', '.join(sorted(known))}")
    if isinstance(wanted, type) and issubclass(wanted, known[kind]) and wanted.Config is known[kind].Config:
        return wanted
    if not issubclass(known[kind], wanted):
        names = [w.Config.hf.model_type for w in (wanted if isinstance(wanted, tuple) else (wanted,))]
        refuse(file, "model_type", repr(kind), f"{' or '.join(map(repr, names))}; modelcenter.load takes any family")
    return known[kind]


def task_of(family: type[Model], folder: Folder) -> str:
    """The task of the checkpoint's head: what `architectures` says, else the first task whose head is all there."""
    named = {task.architecture: name for name, task in reversed(list(family.tasks.items()))}
    said = folder.config.get("architectures") or []
    if not isinstance(said, list) and family.default_task is None:
        refuse(Path(folder.path) / "config.json", "architectures", repr(said), f"a list; known: {', '.join(named)}")
    found = [named[name] for name in said if isinstance(name, str) and name in named] if isinstance(said, list) else []
    if family.default_task is not None:  # a bare backbone, whose head may be tied, is the default too
        return next((task for task in found if family.tasks[task].rows or family.tasks[task].without), family.default_task)
    if found:
        return found[0]
    keys = Keys(folder)
    there = {key.rpartition(".")[0] for key in keys.real} | set(keys.real)
    for name, task in family.tasks.items():
        if task.rows and all(row[0] in there or row[0].removeprefix(family.prefix) in there for row in task.rows):
            return name
    if said:
        wanted = f"known: {', '.join(named)}; or give the task"
        refuse(Path(folder.path) / "config.json", "architectures", repr(said[0]), wanted)
    return "backbone"


def untie(family: type[Model], config: Any, folder: Folder, task: str) -> tuple[Any, list[str]]:
    """The tensors decide what is tied, not the config: a copy that differs from its source is a parameter of its own."""
    heads = {row[0]: row[1] for row in family.tasks[task].rows}
    tied = family.tied(config)
    keys = Keys(folder)
    for alias, source in family.aliases.items():
        ours = heads.get(alias.removesuffix(".weight"))
        copies = [other for other, of in family.aliases.items() if of == source and other != alias]
        where = next((s for s in (source, source.removeprefix(family.prefix), *copies) if s in keys), None)
        if f"{ours}.weight" in tied and alias in keys and where and not same(keys[alias], keys[where]):
            return replace(config, tie=False), [alias]
    return config, []


def spoken(model: Model, keys: Keys) -> Names:
    """The model's names with the prefix that this file has, which may be that of another task's class."""
    table = model.table
    prefixes = (table.prefix, model.prefix, *(task.prefix for task in model.tasks.values()))
    return next((t for t in (table.under(p) for p in prefixes if p) if not bare(keys, t, model.shapes)), table)


def part_of(ours: str | tuple[str, ...]) -> str:
    """The module of the model that a row of names is of."""
    return (ours if isinstance(ours, str) else ours[0]).partition(".")[0]


def check_adapter(model: Model, adapter: AdapterConfig, machine: Machine | None) -> None:
    """Refuse codes of 4 or 8 bits that the machine's ranks cannot share out, before any weight is read."""
    if machine is not None and machine.tensor_parallel > 1 and adapter.quantize != "none":
        from .parallel.adapted import check_codes

        check_codes(model, adapter.quantize, machine.tensor_parallel)


def place(model: Model, device: str | torch.device | None, machine: Machine | None, precision: str | None = None,
          beside: Callable[[torch.device], object] = lambda home: None) -> None:
    """Give the parameters storage, sharded as the machine says. Where there are several ranks a thread does `beside` meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        jobs: list[Future[object]] = []
        if machine is not None:
            where = partial(device_of, machine)
            if machine.ranks > 1:
                from .parallel.apply import parallelize  # FSDP and DTensor take seconds to import

                parallelize(model, machine, precision, quiet=lambda: jobs.append(thread.submit(beside, where())))
            else:
                check(machine)
                fit_blocks(model, machine)
            device = device or where()
        check_memory(model, torch.device(device or "cpu"))
        home = torch.device(device or "cpu")

        def stored(t: Tensor) -> Tensor:
            if not t.is_meta:  # quantised layers have their values already
                return t.to(home)
            # `empty_like` of what has no storage imports torch's compiler first, and of a DTensor takes a thousandth of a second
            whole: Any = t
            out = torch.empty(local(t)[1].shape, dtype=t.dtype, device=home)
            if not hasattr(whole, "placements"):
                return out
            from torch.distributed.tensor import DTensor

            return DTensor.from_local(out, whole.device_mesh, whole.placements, run_check=False, shape=t.shape, stride=t.stride())

        model._apply(stored)  # type: ignore[no-untyped-call]  # torch has no types there
        model.tie()
    for job in jobs:
        job.result()


def check_memory(model: Model, device: torch.device) -> None:
    """Refuse a model whose weights alone exceed the memory there, before any of it is allocated."""
    if device.type == "cuda":
        have = torch.cuda.mem_get_info(device)[1]
    elif device.type == "cpu":
        have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    need = sum(math.prod(r.stop - r.start for r in local(p)[0]) * p.itemsize for p in model.parameters())
    if need > have:
        room, ways = f"at most {have / 1e9:,.0f} GB, the memory of {device}", "bf16, an adapter on nf4, or more ranks (fsdp)"
        refuse(None, "model", f"{need / 1e9:,.0f} GB of weights", f"{room}: {ways}")


def group_of(machine: Machine | None) -> Group | None:
    """The ranks that read the files together; None for a process of its own."""
    return neighbours() if machine is not None and machine.ranks > 1 else None


def as_machine(machine: str | Machine | None) -> Machine | None:
    """The machine profile of that name or path, or the machine itself."""
    return load_machine(machine) if isinstance(machine, str) else machine


def is_meta(device: str | torch.device | None) -> bool:
    """Whether nothing is to be allocated; a device that is not here is refused."""
    if device is None:
        return False
    check_device(device)
    return torch.device(device).type == "meta"


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = DTYPES.get(dtype) or getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        refuse(None, "dtype", repr(dtype), nearest(dtype, ["auto", *DTYPES, "float32", "bfloat16", "float16"]))
    return found


def dtype_of(folder: Folder, ignored: Sequence[str]) -> torch.dtype:
    """The dtype of the folder's floating-point tensors but those of `ignored` patterns, as are masks and frequencies: the widest,
    where they differ."""
    keys = [key for key in folder.keys() if not any(fnmatchcase(key, pattern) for pattern in ignored)]  # noqa: SIM118  # no dict
    kinds = {folder.dtype(key) for key in keys}
    floating = [k for k in kinds if k.is_floating_point and k.itemsize > 1]
    return max(floating, key=lambda k: (k.itemsize, k == torch.bfloat16), default=torch.float32)


def check_labels(family: type[Model], task: str, count: int | None, names: Mapping[int, str] | None) -> None:
    """Refuse labels for a head that has none."""
    if (count, names) == (None, None) or task in (labelled := ("classify", "tag")):
        return
    key, wanted = "num_labels" if count is not None else "id2label", [name for name in labelled if name in family.tasks]
    refuse(None, key, f"given with the task {task!r}, which has no labels", f"task={' or task='.join(wanted) or 'another'}")


def labels_of(count: int | None, names: Mapping[int, str] | None) -> tuple[str, ...]:
    if count is not None and (type(count) is not int or count < 1):
        refuse(None, "num_labels", repr(count), "a whole number, 1 or more")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(count or 0))
    names = {int(key) if isinstance(key, str) and key.isdecimal() else key: name for key, name in names.items()}  # as in a file
    if {*names} != {*range(len(names))} or count not in (None, len(names)):
        refuse(None, "id2label", f"keys {list(names)[:5]}", "a name for each of 0 to num_labels - 1")
    return tuple(names[i] for i in range(len(names)))
