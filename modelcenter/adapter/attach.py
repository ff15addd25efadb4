"""Put an adapter on a model: which layers get one, what is frozen, and where the first values come from.

Layers are selected by the end of their name, as in peft, either by our name (attn.q) or by that of Hugging Face's class (c_attn);
the table of names relates the two. Hugging Face may hold several of our layers (q, k and v) as one matrix. If that matrix is named,
these layers share one `a`, so that in training, too, the adapter equals peft's. If our layers are named, each has its own `a`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint.group import Group
from ..checkpoint.intake import Intake
from ..checkpoint.load import fill, put
from ..errors import nearest, refuse
from ..layers.adapter import Adapted, adapted, current_names
from ..layers.initial import Constant, Uniform
from ..layers.linear import Linear
from ..layers.quantized import Int8Linear, NF4Linear, QuantizedLinear
from ..names import Lazy, Shape, Split
from ..ops._mode import PLAIN
from ..parallel.averaging import watch
from ..parallel.device import LOW
from ..theirs import LAYERS
from .config import ALL, AdapterConfig, check_config

if TYPE_CHECKING:
    from ..model import Model

QUANTIZED: dict[str, type[QuantizedLinear]] = {"nf4": NF4Linear, "int8": Int8Linear}
LABELLED = ("classify", "tag", "qa")  # tasks whose head no checkpoint of the family shares


@dataclass(frozen=True)
class Site:
    """A matrix that can have an adapter: the name of Hugging Face's layer, the names of our layers that it holds, and how its rows
    are divided among them."""

    theirs: str
    ours: tuple[str, ...]
    rows: Split
    transposed: bool  # stored (in, out)


@dataclass(frozen=True)
class Place:
    """An adapter for the layers `ours` of a site; `shared`: with one `a` for all of them."""

    site: Site
    ours: tuple[str, ...]
    rank: int
    scale: float
    shared: bool


def add_adapter(model: "Model", config: AdapterConfig, *, seed: int = 0) -> "Model":
    """Freeze `model`, put a new adapter on it in place, and return it. A new adapter changes no output.

    Its weights are drawn from `seed` and their names. Errors: `InputError` for anything but an `AdapterConfig`, for targets that
    match no layer, and for a model that is already sharded, because each process would draw a different adapter.
    """
    check_config(config)
    if config.name == "none":
        refuse(None, "adapter.name", "none, which is no adapter", "lora or dora")
    if any(type(p) not in PLAIN for p in model.parameters()):
        refuse(None, "adapter", "the model is sharded already", "add_adapter before parallelize, or load(..., machine=, adapter=)")
    insert(model, config, choose(model, config))
    with torch.no_grad():
        for name, source in first_values(model, seed).items():
            parameter = model.get_parameter(name)
            parameter.copy_(source[tuple(slice(0, n) for n in parameter.shape)])
    measure(model)
    watch(model)
    return model


def sites(model: "Model") -> list[Site]:
    """Every linear layer of the model, as sites."""
    found = []
    for entry in model.entries:
        ours = tuple(name.removesuffix(".weight") for name in entry.ours)
        if all(name.endswith(".weight") for name in entry.ours) and all(isinstance(model.get_submodule(n), LINEAR) for n in ours):
            found.append(Site(entry.theirs.removesuffix(".weight"), ours, entry.verb.rows, entry.verb.rows is not entry.verb))
    return found


LINEAR = (Linear, QuantizedLinear, Adapted)


def choose(model: "Model", config: AdapterConfig) -> list[Place]:
    """The places that the config's targets name. Errors: `InputError` for a target that names nothing."""
    all_sites = sites(model)
    chosen: dict[Site, set[str]] = {}
    shared: set[Site] = set()
    for target in config.targets:
        whole = [s for s in all_sites if ends(s.theirs, target) or (target == ALL and not s.ours[0].startswith("head."))]
        parts = [(s, name) for s in all_sites for name in s.ours if ends(name, target)]
        if not whole and not parts:
            known = {".".join(n.split(".")[-k:]) for s in all_sites for n in (s.theirs, *s.ours) for k in (1, 2)}
            ours = LAYERS.get(target, "").split()
            wanted = f"here it is {' and '.join(ours)}" if ours and known.issuperset(ours) else nearest(target, {*known, ALL})
            refuse(None, "adapter.targets", f"{target!r} names no linear layer", wanted)
        for site in whole:
            chosen[site] = set(site.ours)
            shared.add(site)
        for site, name in parts:
            chosen.setdefault(site, set()).add(name)
    there = [s for s in all_sites if s in chosen]
    return [Place(s, tuple(n for n in s.ours if n in chosen[s]), config.rank, config.scale, s in shared) for s in there]


def ends(name: str, target: str) -> bool:
    """Whether `target` is the name, or the last parts of it."""
    return name == target or name.endswith(f".{target}")


def insert(model: "Model", config: AdapterConfig, places: Iterable[Place], saved: Iterable[str] | None = None,
           ready: Callable[[str, Linear], None] = lambda name, layer: None, precision: str | None = None) -> None:
    """Freeze the model, quantise what the config says, and wrap the layers of `places`. The adapters have no values yet.

    `saved`: the parameters that stay trained; None: those that the config names. `ready` is called with each layer before it is
    quantised, and may make it wider for that. `precision`: bf16 or fp16, if forwards will run under torch.autocast with it, which
    rounds what they multiply by. Frozen matrices but the head's are then rounded once and held so: half of the memory of fp32.
    """
    if model.adapter is not None:
        refuse(None, "adapter", "the model has one", "a model without, or merge it first")
    check_base(model)
    trained = list(trained_whole(model, config) if saved is None else saved)
    layers = {name for place in places for name in place.ours}
    if both := sorted(layers & {name.rpartition(".")[0] for name in trained}):
        refuse(None, "adapter.modules_to_save", f"{both[0]} is among the targets too", "one of the two")
    model.requires_grad_(False)
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    if config.quantize != "none":
        kind = QUANTIZED[config.quantize]
        plain = [name for name, layer in model.named_modules() if type(layer) is Linear and not name.startswith("head.")]
        for name in plain:  # by name: a list of layers would hold every whole weight until the last is in codes
            if f"{name}.weight" not in trained:
                layer: Any = model.get_submodule(name)
                dtype = layer.weight.dtype
                ready(name, layer)
                model.set_submodule(name, kind.of(layer).to(dtype))
    for place in places:
        a = None
        for name in place.ours:
            base = model.get_submodule(name)
            assert isinstance(base, Linear | QuantizedLinear)
            layer = Adapted(base, place.rank, place.scale, a=a, dropout=config.dropout, dora=config.name == "dora")
            a = layer.a if place.shared else None
            model.set_submodule(name, layer.train(base.training))
    for name, layer in model.named_modules() if precision in LOW else ():
        inside = type(layer) is Linear and not name.startswith("head.")  # whose weight may be an embedding's
        if inside and not layer.weight.requires_grad and layer.weight.dtype == torch.float32:
            layer.weight = nn.Parameter(layer.weight.to(LOW[str(precision)]), requires_grad=False)
            model.narrowed = True
    model.adapter = config


def check_base(model: "Model") -> None:
    """Refuse a base that computes something else than its config.json says: an adapter's folder names its base, but records no
    changes to it. Dropout rates are allowed to differ, because they matter only in training."""
    config: Any = model.config
    before = type(config).from_dict(config.file) if config.file else config
    # what an adapter's folder holds, or the tensors of the base say
    other = {"file", "labels", "vocab", *(["tie"] if model.load_report.untied else [])}
    for name in (f.name for f in fields(config) if f.name not in other and not f.name.endswith("dropout")):
        if getattr(config, name) != getattr(before, name):
            refuse(None, f"config.{name}", "not what the config.json of the adapter's base says",
                   "leave it out: who loads the adapter has the base as it is")


def trained_whole(model: "Model", config: AdapterConfig) -> Iterator[str]:
    """The parameters that are trained and saved in full besides the adapter: those of the modules that the config names, of a new
    head, and of a classifier."""
    tied, new = set(model.shared.values()), set(model.load_report.new)
    new = new if len(new) < len(model.shapes) else set()  # of a model built at random no part is newer than another
    head = [n for n in model.shapes if n in new or (model.task in LABELLED and n.startswith("head.out."))]
    entries = model.entries
    modules = {name.split(".")[-2] for e in entries for name in (e.theirs, *e.ours)}
    for wanted in config.modules_to_save:
        hits = [e for e in entries if any(ends(name.rpartition(".")[0], wanted) for name in (e.theirs, *e.ours))]
        if not hits:
            refuse(None, "adapter.modules_to_save", f"{wanted!r} names no module", nearest(wanted, modules))
        for name in (name for e in hits for name in e.ours):
            if name in tied:
                refuse(None, "adapter.modules_to_save", f"{wanted}: {name} is the head's matrix too", "one that shares nothing")
            head.append(name)
    yield from dict.fromkeys(head)


def first_values(model: nn.Module, seed: int) -> dict[str, Lazy]:
    """The sources of the adapters' first values, by name: `a` uniform within 1 / sqrt(in), as in peft; magnitudes over quantised
    weights, which are whole at this point, the lengths of their rows; the rest zero."""
    layers = adapted(model)
    mine = {f"{name}." for name in layers}
    out: dict[str, Lazy] = {}
    for name, p in model.named_parameters():
        shape: Shape = tuple(p.shape)
        if name.endswith(".a.weight") and name.removesuffix("a.weight") in mine:
            out[name] = Uniform(shape, shape[1] ** -0.5, seed, name)
        elif name.removesuffix("b.weight") in mine or name.removesuffix("magnitude") in mine:
            out[name] = Constant(shape, 0.0)
    for name, layer in layers.items():
        if layer.magnitude is not None and isinstance(layer.base, QuantizedLinear):
            out[f"{name}.magnitude"] = torch.linalg.vector_norm(layer.base.dequantized(layer.magnitude.dtype), dim=1)
    return out


@torch.no_grad()
def measure(model: nn.Module) -> None:
    """Set every magnitude to the lengths of the base's rows, from which DoRA starts. Magnitudes over quantised weights get theirs
    from `first_values`."""
    for layer in adapted(model).values():
        if layer.magnitude is not None and isinstance(layer.base, Linear):
            lengths: Any = torch.linalg.vector_norm(layer.base.weight.to(layer.magnitude.dtype), dim=1)
            put(layer.magnitude, lengths.full_tensor() if hasattr(lengths, "full_tensor") else lengths)


def fill_all(model: nn.Module, base: dict[str, Lazy], own: dict[str, Lazy], group: Group | None = None,
             begun: Intake | None = None) -> None:
    """`fill`, with `base` under the names that the model's parameters had before the adapter."""
    fill(model, {**{now: base[name] for name, now in current_names(model).items() if name in base}, **own}, group, begun)


def merge_adapter(model: "Model") -> "Model":
    """Merge every adapter into the weights beneath it, in place and in their dtype, and return `model`. Quantised layers become
    plain ones first. Errors: `InputError` for a model that has no adapter, is sharded, or was loaded with a `precision`, for which
    its weights were rounded."""
    if model.adapter is None:
        refuse(None, "adapter", "the model has none", "a model with one: mc.load of the adapter's folder")
    if any(type(p) not in PLAIN for p in model.parameters()):
        refuse(None, "adapter", "merged where the model is sharded", "merge in one process")
    if model.narrowed:
        refuse(None, "adapter", "merged into weights that were rounded for a run", "save it, and merge mc.load(its folder)")
    for name, layer in adapted(model).items():
        model.set_submodule(name, layer.merged())
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear):
            model.set_submodule(name, layer.linear())
    model.adapter, model.merged = None, True
    return model.requires_grad_(True)
