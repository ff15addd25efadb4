"""sentence-transformers' files: which tokens of a text form its vector, which layers follow, and how they are written back.

modules.json lists modules with their folders. Supported are Transformer; Pooling (the mean, the last token or the first);
Normalize; and Dense layers after the pooling, which LaBSE and sentence-t5 have: N_Dense/config.json (in_features, out_features,
bias, activation_function) and weights (linear.weight, linear.bias). Any other module would change the vectors, and is reported.
A model that was trained from a folder without these files gets its own; otherwise sentence-transformers would take the mean of all
tokens.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import nearest, refuse
from ..layers.pick import POOLINGS
from ..layers.sentence import ACTIVATIONS, Dense, EmbedHead
from .config import check
from .files import PLACE
from .folder import Folder
from .load import whole
from .match import refuse_code
from .regular import check_inside
from .strict_json import read_json
from .write import Item, shard_chunks

PREFIX, NAMES = "pooling_mode_", {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "cls"}
BESIDE = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")


def embeds(folder: Path) -> bool:
    """Whether a folder says that its model computes embeddings of texts."""
    return (folder / BESIDE[0]).is_file()


@dataclass
class Said:
    """What a folder says: the pooling, the folders of its dense layers, what is not supported (one sentence each), and the small
    files themselves, by name."""

    pooling: str | None = None
    dense: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)


def read_modules(folder: Path) -> Said:
    """modules.json and what it names, without weights. Modules after one that is not supported are not read either."""
    said, behind, scaled = Said(), False, False
    if not embeds(folder):
        return said
    modules: Any = read_json(folder / BESIDE[0])
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        refuse(folder / BESIDE[0], None, "not a list of modules", "what sentence-transformers writes, or no such file")
    kept = list(BESIDE)
    for module in modules:
        kind, place = str(module.get("type")).rpartition(".")[2], str(module.get("path"))
        if kind in ("Pooling", "Dense") and not PLACE.fullmatch(place):
            refuse(folder / BESIDE[0], "path", repr(place), "the plain name of a folder")
        if kind == "Pooling":
            behind = True
            pooled(folder, f"{place}/config.json", said)
        elif kind == "Dense" and behind and not (scaled or said.unread):
            said.dense.append(place)
        elif kind == "Normalize":  # a vector's length is no matter of cosines, but to a bias or a tanh behind it
            scaled = behind
        elif kind != "Transformer":
            said.unread.append(f"{place} ({kind}) is not read: vectors are those before it")
        if PLACE.fullmatch(place):
            kept.append(f"{place}/config.json")
    if not said.unread:
        for name in (name for name in kept if (folder / name).is_file()):
            check_inside(folder / name, folder)
            said.files[name] = (folder / name).read_bytes()
    return said


def pooled(folder: Path, file: str, said: Said) -> None:
    """Add what the file of a pooling says."""
    found = object_of(folder, file)
    used = [key.removeprefix(PREFIX) for key, value in found.items() if key.startswith(PREFIX) and value is True]
    if found.get("pooling_mode") is not None:  # which wins over the others
        used = [str(found["pooling_mode"])]
    names = [NAMES.get(name, name) for name in used]
    if len(names) == 1 and names[0] in POOLINGS:
        said.pooling = names[0]
    elif names:
        said.unread.append(f"{file} says {' and '.join(used)}, which is not there: {', '.join(POOLINGS)} of the tokens' are")


def object_of(folder: Path, file: str) -> dict[str, Any]:
    check_inside(folder / file, folder)
    found = read_json(folder / file)
    if not isinstance(found, dict):
        refuse(folder / file, None, f"a JSON {type(found).__name__}", "an object")
    return found


def settle(folder: Path, said: Said, head: EmbedHead, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Set the head up as the folder says: its pooling, and dense layers on the meta device for vectors of `width`. Returns the
    values of their parameters, by their names in the model."""
    if said.pooling is not None:
        head.pick = POOLINGS[said.pooling]
    head.files, head.places = said.files, said.dense
    layers, values = [], dict[str, Tensor]()
    for number, place in enumerate(said.dense):
        file = folder / place / "config.json"
        usual: dict[str, Any] = {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
        config = usual | object_of(folder, f"{place}/config.json")
        act = str(config["activation_function"])
        kind = act.rpartition(".")[2]
        if kind not in ACTIVATIONS or not act.startswith("torch.nn."):
            refuse(file, "activation_function", act, f"{nearest(kind, ACTIVATIONS)} of torch.nn")
        if type(config["bias"]) is not bool:
            refuse(file, "bias", repr(config["bias"]), "true or false")
        if config.get("in_features") != width:
            refuse(file, "in_features", repr(config.get("in_features")), f"{width}, as wide as what it is given")
        width = check(config.get("out_features"), int, file, "out_features")
        with torch.device("meta"):
            layers.append(Dense(config["in_features"], width, config["bias"], kind).to(dtype))
        with Folder(folder / place) as weights:
            for name, p in layers[-1].named_parameters():
                refuse_code(weights, name)
                if weights.shape(name) != tuple(p.shape):
                    refuse(folder / place, name, f"has shape {list(weights.shape(name))}", f"config.json gives {list(p.shape)}")
                values[f"head.dense.{number}.{name}"] = weights.slice(name)[...].clone()
            if more := sorted(weights.keys() - dict(layers[-1].named_parameters()).keys()):
                refuse(folder / place, more[0], "unexpected", "the layer that config.json describes has no such tensor")
    head.dense = nn.Sequential(*layers) if layers else None
    return values


def made(head: EmbedHead, width: int) -> dict[str, bytes]:
    """The files that say what the head does, in the words that every version of sentence-transformers reads."""
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"idx": n, "name": str(n), "path": place, "type": f"sentence_transformers.models.{kind}"}
               for n, (kind, place) in enumerate(places.items())]  # fmt: skip
    pooling = {PREFIX + theirs: POOLINGS[ours] is head.pick for theirs, ours in NAMES.items()}
    files = {BESIDE[0]: modules, "1_Pooling/config.json": {"word_embedding_dimension": width, **pooling}}
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in files.items()}


def files_of(head: nn.Module, width: int, dtype: torch.dtype) -> dict[str, bytes]:
    """The files to write beside a model, so that it gives the same vectors again, of `width` before dense layers. Every rank calls
    it."""
    if not isinstance(head, EmbedHead):
        return {}
    if not head.files:
        return made(head, width) if head.dense is None else {}
    out = dict(head.files)
    for place, layer in zip(head.places, head.dense or (), strict=True):
        items = []
        for name, p in layer.named_parameters():
            full = whole(p)
            items.append(Item(name, tuple(full.shape), dtype, partial(full.to, dtype)))
        out[f"{place}/model.safetensors"] = b"".join(shard_chunks(place, items))
    return out
