"""Write an adapter's folder in peft's format (`folder.py`)."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.atomic import check_space, commit_folder, disk_errors, replace_folder, staging, write_new
from ..checkpoint.files import ADAPTER_BIN, only_words
from ..checkpoint.load import whole
from ..checkpoint.save import awaited, carried, config_json, warn_of_left
from ..checkpoint.sentence import files_of
from ..checkpoint.write import MODULES, Item, write_shard
from ..errors import refuse
from ..layers.adapter import Adapted, adapted, current_names
from .attach import LABELLED, Site, ends, sites
from .config import AdapterConfig
from .folder import CONFIG, PREFIX, TASK_TYPES, WEIGHTS, A, B, M, copies, is_adapter

if TYPE_CHECKING:
    from ..model import Model


def save_adapter(model: "Model", folder: Path) -> None:
    """Write the model's adapter, what is trained besides it, and the companions; peft opens the folder on transformers' model.

    On a mesh every rank gathers and the first one writes; all return when it is done. Errors: `InputError`.
    """
    config = model.adapter
    assert config is not None
    tensors, sizes = low_rank(model)
    inside = tuple(f"{name}." for name in adapted(model))
    trained = (name for name, now in current_names(model).items() if model.get_parameter(now).requires_grad)
    warn_of_left(folder, (name for name in trained if name not in model.shapes and not name.startswith(inside)))
    beside, modules = whole_tensors(model)
    tensors |= beside
    if model.merged:
        lost = "is weights into which another was merged, and in no folder: merge this one too and save the whole model"
        warnings.warn(f"{folder}: the adapter's base {lost}", stacklevel=3)
    content = content_of(model, config, sizes) | {"modules_to_save": modules or None}
    head = next((row[0] for row in model.tasks[model.task].rows if row[1] == "head.out"), None)
    if model.task in LABELLED and head not in modules:  # which peft would look for in the folder
        content["task_type"] = None
    kind = next(iter(model.parameters())).dtype
    files = {**carried(model, folder), **files_of(model.head, model.config.dim, kind), "config.json": config_json(model, kind)}
    files[CONFIG] = (json.dumps(content, indent=2) + "\n").encode()
    if not dist.is_initialized() or dist.get_rank() == 0:
        write(folder, tensors, files, {"format": "pt"} | ({"quantize": config.quantize} if config.quantize != "none" else {}))
    if dist.is_initialized():
        with awaited():
            dist.barrier()


def low_rank(model: "Model") -> tuple[dict[str, Tensor], dict[str, tuple[int, float]]]:
    """The adapter's own tensors by their names, and rank and scale of each of their layers."""
    layers, tensors = adapted(model), dict[str, Tensor]()
    sizes: dict[str, tuple[int, float]] = {}
    for site in sites(model):
        if any(name in layers for name in site.ours):
            a, b, m, scale = joined(model, site, layers)
            sizes[site.theirs] = (len(a), scale)
            tensors |= {f"{PREFIX}{site.theirs}{A}": a, f"{PREFIX}{site.theirs}{B}": b}
            if m is not None:
                tensors[f"{PREFIX}{site.theirs}{M}"] = m
    return tensors, sizes


def whole_tensors(model: "Model") -> tuple[dict[str, Tensor], list[str]]:
    """What is trained in full, or has another vocabulary than the base: its tensors by Hugging Face's names, and the trained
    modules."""
    now = current_names(model)
    here = {name: model.get_parameter(now[name]) for name in model.shapes if name in now}
    changed = {name for name, p in here.items() if p.requires_grad or name in model.resized}
    entries = [e for e in model.entries if not changed.isdisjoint(e.ours)]
    trained = {name: here[name] for e in entries for name in e.ours}  # theirs may hold more than what has changed
    gathered = {name: whole(p, model.shapes[name]) for name, p in trained.items()}
    shapes = {name: model.shapes[name] for name in gathered}
    made = model.table.save({n: partial(gathered.__getitem__, n) for n in gathered}, shapes, bare=model.bare)
    tensors = {theirs: make() for theirs, _, make in made}
    for entry in entries:
        for alias in copies(model, entry):  # peft's have the base's matrix if the folder does not hold them too
            tensors[alias] = tensors[entry.theirs]
    # as in peft's own folders, embeddings of other words are there even if nothing trains them
    idle = {e.theirs for e in entries if not any(trained[name].requires_grad for name in e.ours)}
    idle |= {alias for alias in tensors if model.aliases.get(alias) in idle}
    modules = sorted({theirs.rpartition(".")[0] for theirs in tensors.keys() - idle})
    return {f"{PREFIX}{theirs}": tensor for theirs, tensor in tensors.items()}, modules


def content_of(model: "Model", config: AdapterConfig, sizes: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """adapter_config.json, for layers with these ranks and scales. The most frequent pair is the rule, the others are patterns."""
    all_sites = sites(model)
    (rank, scale), _ = Counter(sizes.values()).most_common(1)[0]
    odd = {name: size for name, size in sizes.items() if size != (rank, scale)}
    return {
        "peft_type": "LORA", "task_type": TASK_TYPES.get(model.task),
        "base_model_name_or_path": None if model.merged else model.source, "revision": None if model.merged else model.revision,
        "r": rank, "lora_alpha": plain(config.alpha_of(scale, rank)), "lora_dropout": config.dropout,
        "use_rslora": config.rslora, "use_dora": config.name == "dora", "target_modules": short(list(sizes), all_sites),
        "modules_to_save": None,
        "rank_pattern": {name: size[0] for name, size in odd.items() if size[0] != rank},
        "alpha_pattern": {name: plain(config.alpha_of(s, r)) for name, (r, s) in odd.items()},
        "bias": "none", "fan_in_fan_out": any(site.transposed for site in all_sites if site.theirs in sizes),
        "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip


def joined(model: "Model", site: Site, layers: Mapping[str, Adapted]) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Their a (rank in), b (out rank) and magnitude (out), and the scale, of our layers in a site."""
    mine = [layers.get(name) for name in site.ours]
    there = [layer for layer in mine if layer is not None]
    alone = {id(layer.a): whole(layer.a.weight) for layer in there}  # once, if it is shared
    a = torch.cat(list(alone.values()))
    starts = dict(zip(alone, torch.tensor([0, *(len(t) for t in alone.values())]).cumsum(0).tolist(), strict=False))
    parts = []
    for name, layer in zip(site.ours, mine, strict=True):
        b = a.new_zeros(model.shapes[f"{name}.weight"][0], len(a))
        if layer is not None:
            start = starts[id(layer.a)]
            b[:, start : start + layer.a.out_features] = whole(layer.b.weight)
        parts.append(b)
    magnitude = None
    if there[0].magnitude is not None:
        magnitude = site.rows.whole([
            lengths(model.get_submodule(name).weight.to(a.dtype), model.shapes[f"{name}.weight"][0])
            if layer is None or layer.magnitude is None else whole(layer.magnitude)
            for name, layer in zip(site.ours, mine, strict=True)
        ])  # fmt: skip
    return a, site.rows.whole(parts), magnitude, there[0].scale


def lengths(weight: Any, rows: int) -> Tensor:
    """The lengths (rows) of all rows of a weight, of which this rank may hold only some: of codes, which are split in the order of
    the tensor-parallel ranks, or of a DTensor."""
    found = whole(torch.linalg.vector_norm(weight, dim=1))
    if len(found) == rows:
        return found
    parts = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, found)
    return torch.cat(parts[: rows // len(found)])  # the first of a mesh differ along its last dimension, tensor_parallel


def short(names: list[str], all_sites: list[Site]) -> list[str]:
    """The layers' names for peft's config, without their numbers if all layers with the same ending are meant."""
    tails = {name: re.sub(r"^.*\.\d+\.", "", name) for name in names}
    unmeant = [s.theirs for s in all_sites if s.theirs not in tails]
    return sorted({name if any(ends(other, tail) for other in unmeant) else tail for name, tail in tails.items()})


def plain(x: float) -> float:
    return int(x) if x == int(x) else x


def write(folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes], metadata: Mapping[str, str]) -> None:
    """Write all files in one step. `folder` may be absent, empty, a tokenizer's, a new repository or an adapter's."""
    with disk_errors(folder):
        target = folder.resolve()
        there = target.is_dir() and any(target.iterdir())
        if target.exists() and (not target.is_dir() or (there and not is_adapter(target) and not only_words(target))):
            refuse(target, None, "exists and is no adapter's folder", "an empty folder, an adapter's or a new name")
        items = [Item(name, tuple(t.shape), t.dtype, partial(tensors.__getitem__, name)) for name, t in tensors.items()]
        check_space(target, 2**20 + sum(item.size for item in items) + sum(map(len, files.values())))
        with staging(target) as temp:
            write_shard(temp / WEIGHTS, items, metadata)
            for name, data in files.items():
                (temp / name).parent.mkdir(exist_ok=True)
                write_new(temp / name, [data])
            if there:
                replace_folder(temp, target, drop=lambda name: name in (ADAPTER_BIN, MODULES))
            else:
                commit_folder(temp, target)
