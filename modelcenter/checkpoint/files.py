"""The files of a Hugging Face folder, and what its index.json and config.json say, checked before a byte of weights is read.

No torch here, nor in `header.py`: a hostile or broken file is refused in well under a second.
"""

import os
import re
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import refuse, refuse_missing
from .header import TENSOR_LIMIT, Header, check_name, read_header
from .regular import check_inside
from .state import steps
from .strict_json import read_json

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER_BIN = "adapter_model.bin"  # as peft wrote it in its first year
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
REPOSITORY = (".git", ".gitattributes", ".gitignore", "LICENSE", "README.md")  # what a new one of the hub is cloned with
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
PLACE = re.compile(r"[\w-][\w.-]{0,63}", re.ASCII)  # the folder of a module of sentence-transformers'

FOREIGN = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz")


@dataclass(frozen=True)
class Index:
    """A checked index.json: tensor name -> file name, the names by file, and for safetensors the header of each file."""

    file: Path
    weight_map: Mapping[str, str]
    promised: Mapping[str, Set[str]]
    headers: Mapping[str, Header]

    def check(self, file: str, held: Set[str]) -> None:
        """Refuse a file that holds (`held`) others than the tensors that the index places there."""
        here = self.file.parent / file
        for name in sorted(self.promised[file] - held):
            refuse(here, name, f"no such tensor, though {self.file.name} places it here", "the files of one save only")
        for name in sorted(held - self.promised[file]):
            other = self.weight_map.get(name)
            found = f"held here and in {other}" if other else f"a tensor that {self.file.name} does not list"
            refuse(here, name, found, "each tensor once")


def read_index(path: str | os.PathLike[str]) -> Index:
    """An index.json, checked against the files beside it.

    Refused: a file name that leads to another folder; a file that is missing, not listed, lacks a tensor, or holds one that another
    file holds too. Files of `.bin` are checked by name only, because their keys cost unpickling (see `folder.py`). A wrong
    `total_size` is a warning. Errors: `InputError`, `MissingError`.
    """
    path = Path(path)
    table = read_json(path)
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(path, "weight_map", "absent or empty", "a table of tensor name: file name")
    if len(weight_map) > TENSOR_LIMIT:
        refuse(path, "weight_map", f"{len(weight_map)} tensors", f"at most {TENSOR_LIMIT}")
    safe = path.name.endswith(".safetensors.index.json")
    suffix = ".safetensors" if safe else ".bin"
    promised: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        check_name(path, name)
        if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*", file) or ".." in file:
            refuse(path, name, f"the file name {file!r}", "a plain name of a file in the same folder")
        if not file.endswith(suffix):
            refuse(path, name, f"the file name {file!r}", f"a name that ends in {suffix}")
        promised.setdefault(file, set()).add(name)
    for file in sorted(promised):
        check_inside(path.parent / file)
    pattern = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?" + re.escape(suffix))
    for file in sorted(os.listdir(path.parent)):
        if pattern.fullmatch(file) and file not in promised:
            refuse(path.parent / file, None, f"a file that {path.name} does not list", "the files of one save only")
    headers = {file: read_header(path.parent / file) for file in sorted(promised)} if safe else {}
    index = Index(path, weight_map, promised, headers)
    for file, header in headers.items():
        index.check(file, header.tensors.keys())
    size, said = sum(h.size for h in headers.values()), table.get("metadata")
    said = said.get("total_size") if isinstance(said, dict) else None
    if headers and said is not None and said != size:
        warnings.warn(f"{path}: total_size: {said}; the tensors hold {size} bytes", stacklevel=2)
    return index


def only_words(folder: str | os.PathLike[str]) -> bool:
    """Whether all in `folder` is a tokenizer's, which was saved before its model, or a repository's that waits for one."""
    return set(os.listdir(folder)) <= {*TOKENIZER, *REPOSITORY}


def weighs(folder: str | os.PathLike[str]) -> bool:
    """Whether there are weights in `folder`, an adapter's too, beside what says their shapes."""
    return any(os.path.lexists(Path(os.path.expanduser(folder)) / name) for name in (*WEIGHTS, ADAPTER[0]))


def find_weights(folder: str | os.PathLike[str]) -> Path:
    """The file or index to read the weights of `folder` from, safetensors before `.bin`. Errors: `MissingError`, `InputError`."""
    folder = Path(folder)
    if not folder.is_dir():
        refuse_missing(folder, None, "no such folder", "a folder with config.json and weights")
    if not os.access(folder, os.R_OK | os.X_OK):
        refuse(folder, None, "a folder that may not be read", "chmod u+rx, by its owner")
    for name in WEIGHTS:
        if os.path.lexists(folder / name):
            check_inside(folder / name)
            return folder / name
    if (folder / "pytorch_model.pt").is_file():
        wanted = "examples/from_modelcenter.py FOLDER OUT, in this package's repository, makes a folder of it"
        refuse_missing(folder / "pytorch_model.pt", None, "weights of OpenBMB's ModelCenter", wanted)
    others = [n for n in sorted(os.listdir(folder)) if n.endswith(FOREIGN)][:3]
    found = f"no weights, only {', '.join(others)}" if others else "no weights"
    if (folder / "model" / "config.json").is_file() or (folder / "model" / ADAPTER[0]).is_file():  # a run's
        refuse_missing(folder, None, found, f"what was trained there is {folder / 'model'}")
    if (folder / "recipe.yaml").is_file():
        refuse_unended(folder)
    inside = {file.parent for name in ("config.json", ADAPTER[0]) for file in folder.glob(f"*/{name}")}
    if states := [s for s in inside if s.name.startswith("checkpoint-") and s.name[11:].isdecimal()]:
        newest = max(states, key=lambda state: int(state.name[11:]))
        refuse_missing(folder, None, found, f"the newest model that Trainer has left there is {newest}")
    if adapters := sorted(s.name for s in inside if (s / ADAPTER[0]).is_file()):
        refuse_missing(folder, None, found, f"the adapters there have folders of their own: {', '.join(adapters[:5])}")
    refuse_missing(folder, None, found, " or ".join(WEIGHTS))


def adapter_weights(folder: str | os.PathLike[str]) -> Path:
    """The file of an adapter's tensors: safetensors, unless there is only a `.bin`."""
    safe, old = (Path(folder) / name for name in (ADAPTER[1], ADAPTER_BIN))
    return safe if os.path.lexists(safe) or not old.is_file() else old


def refuse_unended(run: Path) -> NoReturn:
    """Refuse the model of a run that has not written it yet, and say how to continue the run, or make a model from its state."""
    state = next(iter(steps(run)), None)
    now = f"; modelcenter convert {state} OUT makes a model of what is there" if state is not None else ""
    refuse_missing(run / "model", None, "not there: the run has not ended", f"the command that began it goes on{now}")


def check_base(adapter: Path, base: str) -> None:
    """Refuse a base that an adapter's folder names by a path that does not exist."""
    if Path(base).is_absolute() and not Path(base).is_dir():
        wanted = "the folder where its base is now, written there, or a hub id"
        refuse_missing(adapter / ADAPTER[0], "base_model_name_or_path", f"{base}, which is not there", wanted)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of config.json. A model with code of its own, or saved quantised, is refused. Errors: `InputError`."""
    path = Path(folder) / "config.json"
    if not os.path.lexists(path) and (path.parent / "manifest.json").is_file():
        wanted = f"modelcenter convert {folder} OUT makes one of it; the run's own, model/, is written when it ends"
        refuse_missing(folder, None, "a training state, and no model", wanted)
    if not os.path.lexists(path) and (path.parent / "training_args.bin").is_file():
        wanted = "model.load_state_dict(safetensors.torch.load_file(...)) of the model that was trained, then its save_pretrained"
        refuse_missing(folder, None, "Trainer's weights, by names of ours; no config.json", wanted)
    if not os.path.lexists(path):  # as accelerate saves weights
        refuse_missing(path, None, "no such file", "the model's config.json, which its save_pretrained writes beside the weights")
    check_inside(path)
    config = read_json(path)
    if not isinstance(config, dict):
        refuse(path, None, f"a {type(config).__name__}", "a JSON object")
    if config.get("quantization_config"):
        refuse(path, "quantization_config", "a quantised save", "a save in fp32, fp16 or bf16")
    if config.get("auto_map"):
        refuse(path, "auto_map", "a model with code of its own, which is never run here", "a known architecture")
    return config


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a model's or an adapter's folder as far as its headers and JSON alone tell, before torch is imported."""
    if os.path.isfile(Path(folder) / ADAPTER[0]):
        read_json(Path(folder) / ADAPTER[0])
        if (file := adapter_weights(folder)).name == ADAPTER[1]:
            read_header(file)
        return
    weights = find_weights(folder)
    read_config(folder)
    if weights.name.endswith(".safetensors"):
        read_header(weights)
    elif weights.name.endswith(".json"):
        read_index(weights)
