"""Which model is meant by a name and the options beside it: its folder, family, config, task, labels and dtype.

What the caller says comes first, then the preset, an adapter's folder, config.json, and the tensors themselves.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial, reduce
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from .adapter.attach import LABELLED
from .adapter.config import AdapterConfig, check_config
from .adapter.folder import is_adapter
from .adapter.read import Saved, read_adapter
from .checkpoint import hub
from .checkpoint.config import changed, read_labels
from .checkpoint.files import check_base, read_config
from .checkpoint.folder import Folder
from .checkpoint.match import Keys, same
from .checkpoint.sentence import embeds
from .errors import nearest, refuse
from .model import Model, Preset, Task
from .registry import families, hubs, presets
from .theirs import no_family

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Source:
    """Where a model's weights are. If the requested folder holds an adapter, everything but `saved` is about its base."""

    name: str | PathLike[str]  # a folder, a preset or a hub id
    path: Path  # the folder that it resolved to
    revision: str | None
    preset: Preset | None  # the one of that name
    saved: Saved | None

    @property
    def told(self) -> str | None:
        """The hub id, or a folder's whole path."""
        if Path(os.path.expanduser(self.name)) == self.path:
            return str(self.path.resolve())
        return self.preset.hub if self.preset is not None else str(self.name)


def find(name: str | PathLike[str], revision: str | None, local_files_only: bool, adapter: AdapterConfig | None) -> Source:
    """The folder that `name` means, and its base's if it holds an adapter; `adapter` is the one that the caller gave."""
    if not isinstance(name, str | PathLike):
        wanted = "a folder, a preset or a hub id; values for a model that is there: its load_state_dict"
        refuse(None, "name", f"a {type(name).__name__}", wanted)
    resolve = partial(hub.resolve, local_files_only=local_files_only, presets=hubs())
    path, saved = resolve(name, revision=revision), None
    if adapter is not None:
        check_config(adapter)
    if is_adapter(path):
        saved = read_adapter(path)
        if adapter is not None:
            wanted = "adapter.name=none, to go on with that one, or merge it first (modelcenter merge)"
            refuse(path, "adapter", "the folder holds one", wanted)
        name, revision = saved.base, saved.revision
        check_base(path, name)
        path = resolve(name, revision=revision)
    return Source(name, path, revision, presets().get(str(name), (None, None))[1], saved)


def described(cls: type[Model], folder: Folder, source: Source, task: str, config: Mapping[str, Any] | None,
              num_labels: int | None, id2label: Mapping[int, str] | None) -> tuple[Any, str]:
    """The config and the task, which the preset, config.json, the adapter's folder and the caller all influence."""
    saved = source.saved
    if task == "auto" and source.preset is not None and source.path != Path(source.name):
        task = source.preset.task or task
    plain = cls.Config.from_dict(folder.config, source.path / "config.json")
    full = changed(plain, config or {})
    folder.over = {key: now for key in config or () if isinstance(now := getattr(full, key), int) and now != getattr(plain, key)}
    if saved is not None:
        fits = saved.tasks({t: head.architecture for t, head in cls.tasks.items()})
        own = fits[0] if fits else None
        if len(fits) > 1 and task == "auto" and (usual := task_of(cls, folder, plain)) in fits:  # backbone and embed look alike
            own = usual
        task = (own or task) if task == "auto" else task
        if own in LABELLED and task in LABELLED and own != task:  # whose heads may have one name
            refuse(saved.folder, "task", f"{task}, and the head beside the adapter is one of {own}",
                   f"{own}; or task={task} of what modelcenter merge makes of it")
        if id2label is None and num_labels is None and task in LABELLED:
            id2label = saved.labels([row[0] for row in cls.tasks[task].rows])
        full = replace(full, file={**full.file, **saved.settled})
    if id2label is not None or num_labels is not None:
        full = replace(full, labels=labels_of(num_labels, id2label))
    return full, task


def shape_of(name: str) -> tuple[type[Model], Any, str]:
    """The family, the config and the task of a folder's config.json, or of a preset, which yields to a folder of its name, as where
    a model is loaded; the family's first task if none is given."""
    known, folder = presets(), Path(os.path.expanduser(name))
    if (folder / "config.json").is_file():
        said = read_config(folder)
        family = family_of(said, folder / "config.json", Model)
        plain = family.Config.from_dict(said, folder / "config.json")
        task = next((task for task, head in family.tasks.items() if head.architecture in listed(said)), None)
    elif name in known:
        family, preset = known[name]
        plain, task = replace(family.Config(), **preset.changes), preset.task
    else:
        whole = name.removesuffix("-base")  # ModelCenter says it of the smallest of a family
        near = no_family(name) or nearest(whole if whole in known else name, known)
        refuse(None, "model", repr(name), f"a preset, or a folder with a config.json; {near}")
    return family, plain, task or family.default_task or next(iter(family.tasks))


def family_of(config: Mapping[str, Any], file: Path, wanted: type[Model] | tuple[type[Model], ...]) -> type[Model]:
    """The family that the model_type of config.json (`file`) names, or `wanted` if that is the caller's own subclass of it. One
    that is not among those `wanted` is refused."""
    known = families()
    kind = config.get("model_type", wanted.Config.hf.model_type if isinstance(wanted, type) and wanted is not Model else None)
    if not isinstance(kind, str) or kind not in known:
        more = "" if "model_type" in config else "; the from_pretrained of its class reads a file without it"
        refuse(file, "model_type", repr(kind), f"one of the families that are here: {', '.join(sorted(known))}{more}")
    if isinstance(wanted, type) and issubclass(wanted, known[kind]) and wanted.Config is known[kind].Config:
        return wanted
    if not issubclass(known[kind], wanted):
        names = [w.Config.hf.model_type for w in (wanted if isinstance(wanted, tuple) else (wanted,))]
        refuse(file, "model_type", repr(kind), f"{' or '.join(map(repr, names))}; modelcenter.load takes any family")
    return known[kind]


def classes(folder: Folder) -> list[Any]:
    """transformers' classes to which, according to config.json, the weights belong."""
    return listed(folder.config)


def listed(config: Mapping[str, Any]) -> list[Any]:
    said = config.get("architectures")
    return said if isinstance(said, list) else []


def task_of(family: type[Model], folder: Folder, config: Any) -> str:
    """The task of the checkpoint's head: embeddings if sentence-transformers' files are beside it, else what `architectures` says,
    else the first task whose head is complete."""
    if "embed" in family.tasks and embeds(Path(folder.path)):
        return "embed"
    named = {task.architecture: name for name, task in reversed(list(family.tasks.items()))}
    said = folder.config.get("architectures") or []
    if not isinstance(said, list) and family.default_task is None:
        refuse(Path(folder.path) / "config.json", "architectures", repr(said), f"a list; known: {', '.join(named)}")
    found = [named[name] for name in said if isinstance(name, str) and name in named] if isinstance(said, list) else []
    keys = Keys(folder)
    there = {key.rpartition(".")[0] for key in keys.real} | set(keys.real)

    def whole(task: Task) -> bool:
        return all(row[0] in there or row[0].removeprefix(family.prefix) in there for row in task.rows)

    if family.default_task is not None:  # a bare backbone whose head is tied is the default too
        headed = next((task for task in found if family.tasks[task].rows or family.tasks[task].without), None)
        if headed or "backbone" not in found or family.tied(config) or whole(family.tasks[family.default_task]):
            return headed or family.default_task
    if found:
        return found[0]
    for name, task in family.tasks.items():
        if task.rows and whole(task):
            return name
    if said:
        wanted = f"known: {', '.join(named)}; or give the task"
        refuse(Path(folder.path) / "config.json", "architectures", repr(said[0]), wanted)
    return "backbone"


def untie(family: type[Model], config: Any, folder: Folder, task: str) -> tuple[Any, list[str]]:
    """The config, and the names of copies to load, with tied weights untied where the file's two tensors differ: the tensors decide
    what is tied, not the config."""
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


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name: ours (bf16), or torch's with or without its prefix (torch.bfloat16). Weights have no other than
    one of real numbers, of 16 bits at least."""
    found = DTYPES.get(str(dtype)) or getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize == 1:
        refuse(None, "dtype", repr(dtype), nearest(dtype, ["auto", *DTYPES, "float32", "bfloat16", "float16"]))
    return found


def asked_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The same, or None for "auto": as stored."""
    return None if dtype == "auto" else as_dtype(dtype)


def dtype_of(folder: Folder, ignored: Sequence[str]) -> torch.dtype:
    """The dtype that can hold all of the folder's floating-point tensors exactly: for fp16 together with bf16 that is fp32. Tensors
    whose names match `ignored` do not count: masks and frequencies may be stored wider than the weights."""
    keys = [key for key in folder.keys() if not any(fnmatchcase(key, pattern) for pattern in ignored)]  # noqa: SIM118  # no dict
    kinds = {folder.dtype(key) for key in keys}
    floating = [k for k in kinds if k.is_floating_point and k.itemsize > 1]
    return reduce(torch.promote_types, floating) if floating else torch.float32


def check_labels(family: type[Model], task: str, count: int | None, names: Mapping[int, str] | None) -> None:
    """Refuse labels for a head that has none."""
    if (count, names) == (None, None) or task in (labelled := ("classify", "tag")):
        return
    key, wanted = "num_labels" if count is not None else "id2label", [name for name in labelled if name in family.tasks]
    refuse(None, key, f"given with the task {task!r}, which has no labels", f"task={' or task='.join(wanted) or 'another'}")


def labels_of(count: int | None, names: Mapping[int, str] | None) -> tuple[str, ...]:
    """The names of a classifier's labels: `names`, or LABEL_0, LABEL_1 ... for `count` of them."""
    if names is None:
        return read_labels({"num_labels": count}, None)
    if not isinstance(names, Mapping):
        refuse(None, "id2label", f"a {type(names).__name__}", 'a mapping of each class to its name, such as {0: "no", 1: "yes"}')
    if not names or count not in (None, len(names)):
        refuse(None, "id2label", f"{len(names)} names", "a name for each of 0 to num_labels - 1")
    return read_labels({"id2label": dict(names)}, None)
