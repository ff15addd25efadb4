"""Fill a model from a folder of tensors, part by part, and say what happened to every name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refuse
from ..names import Lazy, Names, Region, Shape, everything
from ..parallel.watch import beat
from .exchange import read, stored
from .folder import BinSlice, Folder
from .group import Group
from .intake import Intake

ROWS = 4096  # rows compared at a time


@dataclass(frozen=True)
class LoadReport:
    """Names (theirs, except `new`: ours) by what loading did with them."""

    loaded: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)  # not in the file: initialised afresh
    ignored: list[str] = field(default_factory=list)  # in the file, of no use to this task
    aliased: list[str] = field(default_factory=list)  # equal copies of a tied tensor
    renamed: list[str] = field(default_factory=list)  # older spellings
    untied: list[str] = field(default_factory=list)  # said to be tied, but the file holds another tensor

    @property
    def missing(self) -> list[str]:
        """As `new`: what the file lacks and this task needs."""
        return self.new

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for title in ("new", "ignored", "aliased", "renamed", "untied"):
            names = getattr(self, title)
            if names:
                parts.append(f"{len(names)} {title} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
        return "; ".join(parts)


class Keys:
    """The folder's tensors under their modern names."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.real = {modern(key): key for key in sorted(folder.keys())}
        if len(self.real) < len(folder):
            twice = next(key for key in sorted(folder.keys()) if self.real[modern(key)] != key)
            refuse(folder.file(twice), twice, f"{modern(twice)} is there too", "each tensor under one name")
        self.renamed = [key for name, key in self.real.items() if name != key]

    def __contains__(self, key: str) -> bool:
        return key in self.real

    def __getitem__(self, key: str) -> Lazy:
        return self.folder.slice(self.real[key])


def modern(key: str) -> str:
    """TensorFlow's names of a layer norm's parameters, which BERT files of 2018 and 2019 still carry, under torch's."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def same(a: Lazy, b: Lazy) -> bool:
    """Whether two tensors hold equal values; read a few rows at a time."""
    if a.shape != b.shape:
        return False
    if isinstance(a, BinSlice) and isinstance(b, BinSlice) and (a.place, a.dtype) == (b.place, b.dtype):
        return True  # one storage under two names, as torch.save keeps tied weights: the next gigabyte need not be read
    rest = everything(a.shape)[1:]
    steps = (slice(i, min(i + ROWS, a.shape[0])) for i in range(0, a.shape[0], ROWS))
    return all(torch.equal(a[(rows, *rest)], b[(rows, *rest)]) for rows in steps)


def bare(keys: Keys, names: Names, shapes: Mapping[str, Shape]) -> bool:
    """Whether the file names the backbone's tensors without its prefix."""
    theirs = [e.theirs for e in names.entries(shapes) if e.theirs.startswith(names.prefix)]
    return bool(names.prefix) and not any(key in keys for key in theirs)


def match(
    folder: Folder,
    names: Names,
    shapes: Mapping[str, Shape],
    *,
    head: Iterable[str],
    aliases: Mapping[str, str],
    ignored: Iterable[str],
    untied: Iterable[str] = (),
) -> tuple[dict[str, Lazy], LoadReport]:
    """Where each parameter of ours (`shapes`) comes from. Strict on both sides: a tensor that is missing, misshapen or unknown
    refuses the folder; only a whole absent `head` (our names) is new, and what a head shares with the backbone (BERT's pooler,
    which bears the prefix) may be there without the rest. `ignored` are patterns of theirs that no task needs."""
    keys, ignored = Keys(folder), tuple(ignored)
    plain = bare(keys, names, shapes)
    aliases = {plain_name(k, names, plain): plain_name(v, names, plain) for k, v in aliases.items()}
    copies = {source: alias for alias, source in reversed(aliases.items()) if alias in keys}  # of several, the first declared
    report = LoadReport(renamed=keys.renamed, untied=list(untied))

    entries = list(names.entries(shapes, bare=plain))
    found = {e.theirs: e.theirs if e.theirs in keys else copies.get(e.theirs) for e in entries}
    absent = [e for e in entries if found[e.theirs] is None]
    headed = set(head)
    fresh = {name for e in absent for name in e.ours}
    shared = {n for e in names.entries(shapes) if names.prefix and e.theirs.startswith(names.prefix) for n in e.ours} & headed
    if fresh not in (set(), headed, headed - shared):
        wanted = f"the model needs these {len(absent)} tensors"
        theirs = [key for key in keys.real if not any(fnmatchcase(key, pattern) for pattern in ignored)]
        if odd := [key for key in theirs if key not in (*found, *aliases)]:  # under a wrapper's prefix, say
            wanted += f"; of {len(odd)} others the first is {odd[0]}"
        refuse(folder.path, absent[0].theirs, others("missing", [e.theirs for e in absent]), wanted)
    report.new.extend(sorted(fresh))

    present = [e for e in entries if found[e.theirs] is not None]
    table = names.load(
        lambda key: keys[found[key] or key],
        {name: shapes[name] for e in present for name in e.ours},
        bare=plain,
    )
    wrong = [
        (e, keys[found[e.theirs] or e.theirs].shape, shape)
        for e in present
        if keys[found[e.theirs] or e.theirs].shape != (shape := e.verb.shape([shapes[n] for n in e.ours]))
    ]
    if wrong:
        entry, there, here = wrong[0]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        wanted = f"config.json gives {list(here)}"
        if all(headed.issuperset(e.ours) for e, _, _ in wrong):  # of as many labels as somebody else had
            wanted = f"the labels here need {list(here)}; modelcenter convert FOLDER OUT task=backbone leaves this head out"
        refuse(folder.path, f"{entry.theirs}{more}", f"has shape {list(there)}", wanted)

    used = {found[e.theirs] or e.theirs for e in present}
    for key in used & keys.real.keys():
        kind = folder.dtype(keys.real[key])
        if not kind.is_floating_point or kind.itemsize == 1:  # weights quantised without a word in config.json
            refuse(folder.file(keys.real[key]), key, str(kind).removeprefix("torch."), "weights in fp16, bf16, fp32 or fp64")
    for key in keys.real:
        if key in used:
            report.loaded.append(key)
        elif (source := found.get(aliases.get(key, "")) or aliases.get(key, "")) in keys and same(keys[key], keys[source]):
            report.aliased.append(key)
        elif aliases.get(key, key) not in (key, *found) or any(fnmatchcase(key, pattern) for pattern in ignored):
            report.ignored.append(key)
    known = {*report.loaded, *report.aliased, *report.ignored}
    strange = [key for key in keys.real if key not in known]
    if strange:
        what = "differs from the tensor it must equal" if strange[0] in aliases else "unexpected"
        refuse(folder.path, strange[0], others(what, strange), "config.json describes a model without")
    return table, report


def plain_name(key: str, names: Names, plain: bool) -> str:
    return key.removeprefix(names.prefix) if plain else key


def others(kind: str, names: list[str]) -> str:
    """`kind` of the first name, and the next four with the count of all."""
    return kind if len(names) == 1 else f"{kind}, {len(names)} in all: {', '.join(names[1:5])}{', ...' if len(names) > 5 else ''}"


def fill(model: nn.Module, sources: Mapping[str, Lazy], group: Group | None = None, begun: Intake | None = None) -> None:
    """Copy into every parameter its own part of its source, casting to the parameter's dtype. What is stored in files the ranks of
    `group` read together, each a share of the bytes, and have perhaps `begun` to; what is drawn each draws for itself, its part of
    one tensor at a time."""
    held = {name: local(parameter) for name, parameter in model.named_parameters()}
    files = {name: part for name, part in held.items() if stored(sources[name])}
    if files:
        read(files, sources, group or Group(), begun)
    for name, parameter in model.named_parameters():
        if name not in files:
            put(parameter, sources[name])


@torch.no_grad()
def put(parameter: Tensor, source: Lazy) -> None:
    """Copy into `parameter` its own part of `source`; rows beyond it are zero."""
    region, target = local(parameter)
    if target.numel():
        clipped = tuple(slice(r.start, max(r.start, min(r.stop, n))) for r, n in zip(region, source.shape, strict=True))
        part = source[clipped]
        if part.shape != target.shape:  # rows that pad the vocabulary: nobody's values
            target.zero_()
            target = target[tuple(slice(0, n) for n in part.shape)]
        target.copy_(part)
        beat()


@torch.no_grad()
def local(parameter: Tensor) -> tuple[Region, Tensor]:
    """The region of the whole parameter that this process holds, and the tensor that holds it."""
    sharded: Any = parameter
    if not hasattr(sharded, "placements"):  # it would be a DTensor, whose module takes a second to import
        return everything(tuple(parameter.shape)), parameter
    mesh = sharded.device_mesh
    return region_of(tuple(sharded.shape), mesh, tuple(mesh.get_coordinate()), sharded.placements), sharded.to_local()


@lru_cache(maxsize=4096)
def region_of(shape: Shape, mesh: Any, here: tuple[int, ...], placements: Any) -> Region:
    """The region that the rank at `here` in a mesh holds of a tensor; a model has few shapes, and torch takes its time."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))
