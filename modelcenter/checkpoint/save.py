"""Writes a model as a Hugging Face folder."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from itertools import accumulate
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, refuse, tell
from .atomic import disk_errors, write_new
from .config import write as keys_of
from .exchange import Slot, write
from .files import TOKENIZER
from .group import Group
from .load import local, whole
from .regular import check_inside
from .sentence import files_of
from .write import Item, arranged, layout, parse_size, save_folder

if TYPE_CHECKING:
    from ..model import Model

COMPANIONS = (*TOKENIZER, GENERATION := "generation_config.json")
PATIENCE = 30.0  # seconds after which a process that waits for the others says so


def companions(folder: Path, base: Path | None = None) -> dict[str, bytes]:
    """The tokenizer and generation files of a folder, which travel with the weights. What an adapter's folder lacks comes from its
    base: the generation options, and the tokenizer, whose files all come from the same folder."""
    own = {}
    for file in (folder / name for name in COMPANIONS if (folder / name).is_file()):
        check_inside(file)  # or what a link leads to would be copied to wherever the model goes
        own[file.name] = file.read_bytes()
    under = companions(base) if base is not None else {}
    return {name: data for name, data in under.items() if name == GENERATION or own.keys() <= {GENERATION}} | own


def carried(model: "Model", folder: Path) -> dict[str, bytes]:
    """The companions to be written to `folder`. A tokenizer that is there stays: it may have more words than the one that came with
    the weights. One that the model was given since, as a run gives it its own, is written all the same."""
    stays = any((folder / name).is_file() for name in TOKENIZER)
    return {name: data for name, data in model.companions.items()
            if not (stays and name in TOKENIZER and data is model.brought.get(name))}  # fmt: skip


def save_model(model: "Model", folder: Path, max_shard_size: str | int) -> None:
    """Write weights, config.json and companions. With several ranks each writes a part of the files, and none gathers a tensor; all
    return when the folder is complete. Errors: `InputError`, on all ranks if on one."""
    parameters, names = dict(model.named_parameters()), model.table
    check_parameters(model, parameters)
    warn_of_left(folder, parameters.keys() - model.shapes.keys())
    kind = next(p.dtype for p in parameters.values())
    kinds = {e.theirs: reduce(torch.promote_types, (parameters[name].dtype for name in e.ours)) for e in model.entries}
    wholes = {name: partial(whole, parameters[name], shape) for name, shape in model.shapes.items()}
    saved = names.save(wholes, model.shapes, bare=model.bare)
    items = [Item(theirs, shape, kinds[theirs], make) for theirs, shape, make in saved]
    extra = {**carried(model, folder), **files_of(model.head, model.config.dim, kind), "config.json": config_json(model, kind)}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        save_folder(folder, items, max_shard_size=max_shard_size, extra_files=extra)
        return
    if other := [name for name in model.shapes if parameters[name].dtype != kind]:
        refuse(folder, other[0], str(parameters[other[0]].dtype), f"{kind}, as the first of the weights")
    held = {name: local(parameters[name]) for name in model.shapes}

    def write_all(temp: Path, files: Mapping[str, Sequence[Item]]) -> None:
        slots = {item.name: Slot(item.shape, item.dtype, temp / name, starts[item.name])
                 for name, _, starts, _ in layout(files) for item in files[name]}  # fmt: skip
        write(held, names.load(slots.__getitem__, model.shapes, bare=model.bare), group)

    group, device = Group(dist.group.WORLD), next(iter(held.values()))[1].device
    if group.rank == 0:
        lead(group, device, write_all, partial(save_folder, folder, items, max_shard_size=max_shard_size, extra_files=extra))
        return
    with disk_errors(folder):
        temp = word(group, device)
        write_all(Path(temp), arranged(items, parse_size(max_shard_size)))
        word(group, device)


def check_parameters(model: "Model", parameters: Mapping[str, Tensor]) -> None:
    """Refuse a model whose parameters are no longer those that its config describes."""
    if missing := sorted(model.shapes.keys() - parameters.keys()):
        modules, path = dict(model.named_modules()), missing[0].split(".")[:-1]
        gone = next((name for name in accumulate(path, "{}.{}".format) if name not in modules), None)
        if gone is not None and gone.rpartition(".")[2].isdecimal():
            wanted = "mc.build with a config of what is left ({'layers': 6}), whose load_state_dict takes this one's state_dict()"
            refuse(None, gone, "taken out of the model, and the config has it", wanted)
        wanted = "a model with whole weights: a quantised layer's linear(), prune.remove or remove_parametrizations gives them back"
        refuse(None, missing[0], "not a parameter", wanted)
    for name, shape in model.shapes.items():
        if not hasattr(parameters[name], "placements") and parameters[name].shape != shape:  # a sharded one may be padded
            wanted = f"{list(shape)}, as the config says; resize_token_embeddings gives a vocabulary another size"
            refuse(None, name, f"has shape {list(parameters[name].shape)}", wanted)


def warn_of_left(folder: Path, names: Iterable[str]) -> None:
    """Warn of parameters for which a Hugging Face folder of the model has no place, because somebody added them to it."""
    if left := sorted(name for name in names if not name.startswith("head.dense.")):  # which have files of their own
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        held = "for which such a folder has no place; torch.save of the state_dict holds all"
        warnings.warn(f"{folder}: without {left[0]}{more}, {held}", stacklevel=5)


def lead(group: Group, device: torch.device, write_all: Callable[[Path, Mapping[str, Sequence[Item]]], None],
         save: Callable[..., None]) -> None:
    """Run `save` on the first rank, while all fill its files in `write_all`; the others are told where, and whether it went
    well."""
    waited_for = True

    def begin(temp: Path, files: Mapping[str, Sequence[Item]]) -> None:
        nonlocal waited_for
        for name, header, _, size in layout(files):
            write_new(temp / name, [header])
            os.truncate(temp / name, size)
        with awaited():
            group.tell(f"+{temp}", device)
        waited_for = False  # an error is everybody's by itself
        write_all(temp, files)
        waited_for = True

    try:
        save(write=begin)
    except Exception as error:
        if waited_for:
            group.tell(f"-{error}", device)
        raise
    group.tell("+", device)


@contextmanager
def awaited() -> Iterator[None]:
    """Say what the rank waits for if that takes long: behind `if rank == 0`, as other libraries want it, it would wait for ever."""
    said = Timer(PATIENCE, tell, ["modelcenter: warning: save_pretrained waits for the other processes; each of them calls it"])
    said.daemon = True
    said.start()
    try:
        yield
    finally:
        said.cancel()


def word(group: Group, device: torch.device) -> str:
    """The first rank's text. Errors: `InputError` with its message if it failed."""
    said = group.tell("", device)[0]
    if said.startswith("-"):
        raise InputError(f"rank 0: {said[1:]}")
    return said[1:]


def config_json(model: "Model", kind: torch.dtype) -> bytes:
    """config.json: the one that the model came with, with what has changed, its class and its dtype."""
    values = keys_of(model.config)
    values["architectures"] = [model.tasks[model.task].architecture]
    if type(model).encoder_decoder and (not model.config.file or values.get("is_encoder_decoder", True) != model.encoder_decoder):
        values["is_encoder_decoder"] = model.encoder_decoder  # generate of transformers asks for it
    for key in {"dtype", "torch_dtype"} & values.keys() or {"dtype"}:
        values[key] = str(kind).removeprefix("torch.")
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
