"""Read an adapter's folder in peft's format (`folder.py`)."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoint.files import adapter_weights
from ..checkpoint.folder import read_bin
from ..checkpoint.header import read_header
from ..checkpoint.sentence import embeds
from ..checkpoint.strict_json import read_json
from ..errors import refuse, refuse_missing
from ..names import Entry, Lazy
from .attach import Place, ends, sites
from .config import ALL, AdapterConfig
from .folder import CONFIG, PREFIX, TASK_TYPES, WEIGHTS, A, B, M, copies

if TYPE_CHECKING:
    from ..model import Model

OURS = re.compile(re.escape(PREFIX) + r"((en|de)coder\.blocks\.\d|embed\.tokens\.|head\.out\.)")  # a name of this package's
SETTLED = ("prefix_lm", "pad_token_id")  # keys of config.json by which a model reads, and which training may have changed
PLAIN = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}  # others change the base, or more
READ = {"peft_type", "task_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "lora_dropout", "use_rslora",
        "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", *PLAIN}  # fmt: skip
IDLE = {  # keys of theirs that do not change what an adapter computes, or repeat what its tensors say
    "auto_mapping", "inference_mode", "peft_version", "exclude_modules", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out", "megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying", "target_modules", "loftq_config",
    "runtime_config",
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """An adapter's folder as it was read: tensors by their names without the prefix."""

    folder: Path
    config: AdapterConfig
    base: str
    task_type: str | None
    tensors: Mapping[str, Tensor]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    revision: str | None = None  # of the base
    named: Sequence[str] = ()  # the modules that were trained whole
    frozen: frozenset[str] = frozenset()  # the tensors of the base that peft holds again beneath an adapter on a head
    made_for: str | None = None  # the class that peft put it on, which it notes where nobody has told it the task
    written: Mapping[str, str] = field(default_factory=dict)  # a layer's name, where it has another here -> in the folder

    @property
    def file(self) -> Path:
        """Where the tensors are."""
        return adapter_weights(self.folder)

    @property
    def beside_it(self) -> dict[str, Any]:
        """The config.json beside the adapter; empty if there is none. How its base was stored in training does not matter here."""
        file = self.folder / "config.json"
        said = read_json(file) if file.is_file() else {}
        if not isinstance(said, dict):
            refuse(file, None, f"a {type(said).__name__}", "a JSON object")
        return said

    def size(self, layer: str) -> tuple[int, float]:
        """Rank and scale of an adapter, by peft's patterns."""
        layer = self.written.get(layer, layer)
        rank = next((r for key, r in self.rank_pattern.items() if fits(key, layer)), self.config.rank)
        alpha = next((a for key, a in self.alpha_pattern.items() if fits(key, layer)), self.config.alpha)
        return rank, self.config.scaled(alpha, rank)

    def tasks(self, architectures: Mapping[str, str]) -> list[str]:
        """The tasks that it may be for, by the files beside the adapter, by peft's type, or by the class that peft put it on; none:
        the base's own task."""
        if "embed" in architectures and embeds(self.folder):
            return ["embed"]
        if self.beside_it:
            said = self.beside_it.get("architectures")
            return [task for task, name in architectures.items() if said == [name]]
        if self.task_type is None:
            return [task for task, name in architectures.items() if name == self.made_for]
        return [task for task, name in TASK_TYPES.items() if name == self.task_type and task in architectures]

    def labels(self, heads: list[str]) -> dict[int, str] | None:
        """The names of the classes, or as many unnamed ones as the head among `heads` has rows."""
        said = self.beside_it.get("id2label")
        if isinstance(said, dict) and all(str(i) in said and isinstance(said[str(i)], str | int) for i in range(len(said))):
            return {i: str(said[str(i)]) for i in range(len(said))}
        rows = next((len(self.tensors[f"{h}.weight"]) for h in reversed(heads) if f"{h}.weight" in self.tensors), None)
        return None if rows is None else {i: f"LABEL_{i}" for i in range(rows)}

    @property
    def settled(self) -> dict[str, Any]:
        """What the config.json beside the adapter says about how the model reads, whatever the base's says."""
        return {key: self.beside_it[key] for key in SETTLED if key in self.beside_it}

    def spoken(self, model: "Model") -> "Saved":
        """The same with the names of the model's task: those of a backbone have another prefix, or none, in another class."""
        prefixes = tuple(p for p in (model.prefix, *(task.prefix for task in model.tasks.values())) if p)
        known = {e.theirs.rpartition(".")[0] for e in model.entries}
        written, names = dict[str, str](), dict[str, str]()
        for key in self.tensors:
            layer = next((key.removesuffix(k) for k in (A, B, M) if key.endswith(k)), key.rpartition(".")[0])
            plain = next((layer.removeprefix(p) for p in prefixes if layer.startswith(p)), layer)
            here = plain if model.bare else model.table.prefix + plain
            here = here if here in known else layer
            written[here], names[key] = layer, here + key.removeprefix(layer)
        tensors = {names[key]: tensor for key, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, frozen=frozenset(names[key] for key in self.frozen), written=written)

    def places(self, model: "Model") -> list[Place]:
        """Where the tensors belong on the model. Errors: `InputError` for one without a place, or of another shape."""
        by_name = {site.theirs: site for site in sites(model)}
        whole_names = {e.theirs for e in self.entries(model)}
        out, dora = [], self.config.name == "dora"
        for key in self.tensors:
            layer, kind = next(((key.removesuffix(k), k) for k in (A, B, M) if key.endswith(k)), (key, None))
            if kind is None and key not in whole_names and not self.repeats(model, key):
                refuse(self.file, key, "no tensor of this model", "an adapter of LoRA or DoRA on linear layers")
            if kind is None:
                continue
            if layer not in by_name:
                refuse(self.file, key, "not for a linear layer of this model", "an adapter of this model")
            site = by_name[layer]
            rank, scale = self.size(layer)
            rows = sum(model.shapes[f"{name}.weight"][0] for name in site.ours)
            wanted = {A: (rank, model.shapes[f"{site.ours[0]}.weight"][1]), B: (rows, rank), **({M: (rows,)} if dora else {})}
            for other in wanted:
                if f"{layer}{other}" not in self.tensors:
                    refuse(self.file, f"{layer}{other}", "missing", "beside the other parts of its adapter")
            if kind not in wanted or tuple(self.tensors[key].shape) != wanted[kind]:
                found = f"has shape {list(self.tensors[key].shape)}"
                refuse(self.file, key, found, f"{list(wanted.get(kind, ()))}, as {CONFIG} and the model say")
            if kind == A:
                out.append(Place(site, site.ours, rank, scale, shared=True))
        return out

    def repeats(self, model: "Model", key: str) -> bool:
        """Whether a tensor duplicates one that the model shares: peft writes a tied embedding and head twice."""
        source = self.tensors.get(model.aliases.get(key, ""))
        return key in self.tensors and source is not None and torch.equal(self.tensors[key], source)

    def entries(self, model: "Model") -> list[Entry]:
        """The rows of names whose tensors the folder holds whole."""
        return [e for e in model.entries if e.theirs in self.tensors]

    def vocab(self, model: "Model") -> int | None:
        """How many words the folder's embedding has; None if it has no embedding."""
        for e in self.entries(model):
            if "embed.tokens.weight" in e.ours:
                return len(self.tensors[e.theirs]) - sum(model.shapes[n][0] for n in e.ours if n != "embed.tokens.weight")
        return None

    def beside(self, model: "Model", e: Entry) -> bool:
        """Whether a tensor is in the folder only because the base's vocabulary differs or an adapter is on it, and is not
        trained."""
        resized = not model.resized.isdisjoint(e.ours) and not any(ends(e.theirs.rpartition(".")[0], name) for name in self.named)
        return resized or e.theirs in self.frozen

    def trained(self, model: "Model") -> list[str]:
        """The model's parameters that are trained whole."""
        return [name for e in self.entries(model) if not self.beside(model, e) for name in e.ours]

    def wholes(self, model: "Model") -> dict[str, Lazy]:
        """The parameters of the model that the folder replaces."""
        shapes = {name: model.shapes[name] for e in self.entries(model) for name in e.ours}
        if absent := sorted(model.resized - shapes.keys()):
            found = f"missing, though the embedding has {self.vocab(model)} rows and not the base's"
            refuse(self.file, absent[0], found, "all that has a row for every word")
        for e in self.entries(model):
            lacking = [alias for alias in copies(model, e) if not self.repeats(model, alias)]
            if lacking and not self.beside(model, e):  # or else it is in place of the base's, and so of all that share it
                found = f"alone, and not {lacking[0]}, which is the same matrix in the base"  # peft's goes on with that
                refuse(self.file, e.theirs, found, "both (peft: ensure_weight_tying), or a base that does not tie them")
            if tuple(self.tensors[e.theirs].shape) != (shape := e.verb.shape([shapes[name] for name in e.ours])):
                refuse(self.file, e.theirs, f"has shape {list(self.tensors[e.theirs].shape)}", f"{list(shape)}")
        return model.table.load(lambda key: self.tensors[key], shapes, bare=model.bare)

    def values(self, model: "Model", places: list[Place]) -> dict[str, Lazy]:
        """The adapters' parameters, by their names in the model."""
        out: dict[str, Any] = {}
        for place in places:
            theirs, outs = place.site.theirs, [model.shapes[f"{name}.weight"][0] for name in place.ours]
            out |= {f"{name}.a.weight": self.tensors[f"{theirs}{A}"] for name in place.ours}
            b = place.site.rows.parts(self.tensors[f"{theirs}{B}"], [(n, place.rank) for n in outs])
            out |= zip((f"{name}.b.weight" for name in place.ours), b, strict=True)
            if self.config.name == "dora":
                m = place.site.rows.parts(self.tensors[f"{theirs}{M}"], [(n,) for n in outs])
                out |= zip((f"{name}.magnitude" for name in place.ours), m, strict=True)
        return out


def fits(pattern: str, layer: str) -> bool:
    """As peft compares them; its keys are regular expressions, of which the ones for whole names are taken here, and those that
    are a layer's whole name (`^model.layers.0.self_attn.q_proj`)."""
    name = pattern.removesuffix("$").replace("\\.", ".")
    return layer == name[1:] if name.startswith("^") else ends(layer, name)


def read_adapter(folder: str | os.PathLike[str]) -> Saved:
    """Read an adapter's folder. Errors: `InputError` for one that is broken, or of a kind that is not supported."""
    from safetensors.torch import load_file

    folder = Path(folder)
    filled = read_settings(folder / CONFIG)
    file = adapter_weights(folder)
    if not file.is_file():
        refuse_missing(file, None, "missing", f"beside {CONFIG}, as safetensors")
    safe = file.name == WEIGHTS
    metadata = read_header(file).metadata if safe else {}
    tensors, frozen = {}, set()
    for name, tensor in (load_file(file) if safe else read_bin(file)).items():
        if not name.startswith(PREFIX):
            refuse(file, name, "no tensor of an adapter", f"{PREFIX}...")
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        frozen |= {plain} if ".base_layer." in name else set()
        tensors[plain] = tensor
    quantize: Any = metadata.get("quantize", "none")
    if quantize not in ("none", "nf4", "int8"):
        refuse(file, "quantize", repr(quantize), "nf4, int8 or nothing")
    config = AdapterConfig(
        name="dora" if filled.get("use_dora") else "lora", rank=filled["r"], alpha=float(filled["lora_alpha"]),
        dropout=float(filled["lora_dropout"]), rslora=bool(filled.get("use_rslora")), quantize=quantize,
        targets=tuple(sorted({n.removesuffix(A) for n in tensors if n.endswith(A)})) or (ALL,),
    )  # fmt: skip
    base, task_type = filled["base_model_name_or_path"], filled.get("task_type")
    patterns = filled["rank_pattern"], filled["alpha_pattern"]
    named = filled.get("modules_to_save") or ()
    if isinstance(named, str) or not all(isinstance(name, str) for name in named):
        refuse(folder / CONFIG, "modules_to_save", repr(named), "a list of modules' names")
    known = filled.get("auto_mapping")
    made_for = known.get("base_model_class") if isinstance(known, dict) else None
    revision = filled["revision"] or None
    return Saved(folder, config, base, task_type, tensors, *patterns, revision, named, frozenset(frozen), made_for)


def names_in(folder: Path) -> Iterable[str]:
    """The names of the tensors of an adapter's folder; none if they are in a `.bin`, or missing."""
    file = adapter_weights(folder)
    return read_header(file).tensors if file.name == WEIGHTS and file.is_file() else ()


def read_settings(file: Path) -> dict[str, Any]:
    """The content of adapter_config.json, checked, with peft's defaults for what it leaves out."""
    said = read_json(file)
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        wanted = "LORA (or DoRA, rsLoRA); others are for peft, on a model of transformers"
        refuse(file, "peft_type", repr(said.get("peft_type") if isinstance(said, dict) else said), wanted)
    made_for = said.get("auto_mapping")  # which peft writes only where nobody has told it the task
    known = isinstance(made_for, dict) and str(made_for.get("parent_library")).startswith("modelcenter.")
    if known or any(map(OURS.match, names_in(file.parent))):
        way = f"peft.PeftModel.from_pretrained(mc.load(BASE), {str(file.parent)!r})"
        refuse(file, None, "trained by peft on a model of this package, by its names", way)
    for key, value in said.items():
        if (key in PLAIN and value not in PLAIN[key]) or (key not in READ | IDLE and value):
            refuse(file, key, repr(value), "an adapter of LoRA, DoRA or rsLoRA without this")
    number = (int, float)
    types: dict[str, Any] = {"r": int, "lora_alpha": number, "lora_dropout": number, "base_model_name_or_path": str,
                             "revision": str, "rank_pattern": dict, "alpha_pattern": dict}  # fmt: skip
    filled: dict[str, Any] = {"lora_dropout": 0.0, "revision": "", "rank_pattern": {}, "alpha_pattern": {}}
    filled |= {k: v for k, v in said.items() if v is not None}
    for key, kind in types.items():
        if not isinstance(filled.get(key), kind) or isinstance(filled[key], bool):
            refuse(file, key, repr(filled.get(key)), "what peft writes there")
    for key in ("rank_pattern", "alpha_pattern"):
        for name, value in filled[key].items():
            if not isinstance(value, number) or isinstance(value, bool) or not re.fullmatch(r"\^?(\w|\\?\.|-)+\$?", name):
                refuse(file, f"{key}.{name}", repr(value), "a layer's name and a number")
    for key, rank in {"r": filled["r"], **{f"rank_pattern.{name}": r for name, r in filled["rank_pattern"].items()}}.items():
        if not isinstance(rank, int) or rank < 1:
            refuse(file, key, repr(rank), "a whole number, 1 or more")
    if not 0 <= filled["lora_dropout"] < 1:
        refuse(file, "lora_dropout", repr(filled["lora_dropout"]), "a rate from 0 to below 1")
    return filled
