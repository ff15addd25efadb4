"""Matches the tensors of a folder with a table of names: where each parameter comes from, and what happens to every tensor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NoReturn

import torch

from ..errors import refuse
from ..names import Entry, Lazy, Names, Shape, everything
from .folder import BinSlice, Folder

ROWS = 4096  # rows compared at a time


@dataclass(frozen=True)
class LoadReport:
    """What loading did with each name (transformers' names, except in `new`: ours)."""

    loaded: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)  # not in the file: initialised afresh
    ignored: list[str] = field(default_factory=list)  # in the file, of no use to this task
    aliased: list[str] = field(default_factory=list)  # equal copies of a tied tensor
    renamed: list[str] = field(default_factory=list)  # older spellings
    untied: list[str] = field(default_factory=list)  # said to be tied, but the file holds another tensor

    @property
    def missing(self) -> list[str]:
        """The same as `new`: what the file lacks and this task needs."""
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
    """The name of a layer norm's parameter in torch, for TensorFlow's name, which BERT files of 2018 and 2019 still have."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def same(a: Lazy, b: Lazy) -> bool:
    """Whether two tensors hold equal values; read a few rows at a time."""
    if a.shape != b.shape:
        return False
    if not a.shape:
        return torch.equal(a[()], b[()])
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
    foreign: Iterable[str] = (),
) -> tuple[dict[str, Lazy], LoadReport]:
    """Where each of our parameters (`shapes`) comes from. Strict on both sides: a tensor that is missing, unknown or of a wrong
    shape refuses the folder. Only a `head` (our names) that is absent as a whole is new; parts of it that belong to the backbone in
    files (BERT's pooler, which has the prefix) may be present without the rest. `ignored`: patterns of their names that no task
    needs. `foreign`: their modules that do not belong to this head, although its own have these names."""
    keys, headed, ignored, foreign = Keys(folder), set(head), tuple(ignored), set(foreign)
    plain = bare(keys, names, shapes)
    aliases = {plain_name(k, names, plain): plain_name(v, names, plain) for k, v in aliases.items()}
    copies = {source: alias for alias, source in reversed(aliases.items()) if alias in keys}  # of several, the first declared
    idle = {key for key in keys.real if any(fnmatchcase(key, pattern) for pattern in ignored)}
    entries = list(names.entries(shapes, bare=plain))
    theirs = {e.theirs for e in entries}
    own = [e for e in entries if e.theirs.rpartition(".")[0] not in foreign]
    found = {e.theirs: key for e in own if (key := e.theirs if e.theirs in keys else copies.get(e.theirs)) is not None}

    absent = [e for e in entries if e.theirs not in found]
    fresh = {name for e in absent for name in e.ours}
    shared = {n for e in names.entries(shapes) if names.prefix and e.theirs.startswith(names.prefix) for n in e.ours} & headed
    if fresh not in (set(), headed, headed - shared):
        refuse_absent(folder, absent, [key for key in keys.real if not (key in theirs or key in aliases or key in idle)])

    present = [e for e in entries if e.theirs in found]
    table = names.load(lambda name: keys[found[name]], {name: shapes[name] for e in present for name in e.ours}, bare=plain)
    shaped = [(e, keys[found[e.theirs]].shape, e.verb.shape([shapes[n] for n in e.ours])) for e in present]
    if wrong := [row for row in shaped if row[1] != row[2]]:
        refuse_shapes(folder, wrong, headed)
    for e in present:
        refuse_code(folder, keys.real[found[e.theirs]])

    used = set(found.values())
    report, strange = LoadReport(new=sorted(fresh), renamed=keys.renamed, untied=list(untied)), []
    for key in keys.real:
        original = aliases.get(key, key)
        source = found.get(original, original)
        if key in used:
            report.loaded.append(key)
        elif key in aliases and source in keys and same(keys[key], keys[source]):
            report.aliased.append(key)
        elif key in idle or (key in aliases and original not in theirs):
            report.ignored.append(key)
        else:
            strange.append(key)
    if strange:
        what = "differs from the tensor it must equal" if strange[0] in aliases else "unexpected"
        given, remedy = over(folder)
        wanted = f"the model that config.json{given} describes has no such tensor{remedy}"
        refuse(folder.path, strange[0], others(what, strange), wanted)
    return table, report


def refuse_absent(folder: Folder, absent: Sequence[Entry], odd: Sequence[str]) -> NoReturn:
    """`odd`: what the folder holds instead, under a wrapper's prefix, say."""
    wanted = "".join((f"the model needs these {len(absent)} tensors", *over(folder)))
    if odd:
        wanted += f"; of {len(odd)} others the first is {odd[0]}"
    refuse(folder.path, absent[0].theirs, others("missing", [e.theirs for e in absent]), wanted)


def refuse_shapes(folder: Folder, wrong: Sequence[tuple[Entry, Shape, Shape]], headed: set[str]) -> NoReturn:
    """`wrong`: entries, each with its tensor's shape in the folder and in the model."""
    entry, there, here = wrong[0]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    given, remedy = over(folder)
    wanted = f"config.json{given} gives {list(here)}{remedy}"
    if all(headed.issuperset(e.ours) for e, _, _ in wrong):  # of as many labels as somebody else had
        wanted = f"the labels here need {list(here)}; modelcenter convert FOLDER OUT task=backbone leaves this head out"
    refuse(folder.path, f"{entry.theirs}{more}", f"has shape {list(there)}", wanted)


def over(folder: Folder) -> tuple[str, str]:
    """The sizes that the caller has put over config.json's, and what to do then; empty if there are none."""
    given = [f"config.{key}={value}" for key, value in folder.over.items()]
    if not given:
        return "", ""
    said = f" with {' '.join(given[:2])}{' ...' if len(given) > 2 else ''}"
    return said, "; leave that out, or begin anew (init=random, mc.build)"


def refuse_code(folder: Folder, key: str) -> None:
    """Refuse a weight that is quantised although config.json does not say so."""
    kind = folder.dtype(key)
    if not kind.is_floating_point or kind.itemsize == 1:
        refuse(folder.file(key), key, str(kind).removeprefix("torch."), "weights in fp16, bf16, fp32 or fp64")


def plain_name(key: str, names: Names, plain: bool) -> str:
    return key.removeprefix(names.prefix) if plain else key


def others(kind: str, names: list[str]) -> str:
    """`kind` of the first name, and the next four with the count of all."""
    return kind if len(names) == 1 else f"{kind}, {len(names)} in all: {', '.join(names[1:5])}{', ...' if len(names) > 5 else ''}"
