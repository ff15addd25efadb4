"""A model as a Hugging Face folder."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import refuse
from ..names import Names
from .write import reading_order, save_folder

if TYPE_CHECKING:
    from ..registry import Model

COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def companions(folder: Path) -> dict[str, bytes]:
    """The tokenizer and generation files of a folder, which travel with the weights."""
    return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}


def save_model(model: "Model", folder: Path, names: Names, max_shard_size: str | int) -> None:
    """Write weights, config.json and companions. On a mesh every rank gathers and the first one writes; all return when it has."""
    parameters = dict(model.named_parameters())
    if missing := sorted(model.shapes.keys() - parameters.keys()):
        refuse(None, missing[0], "not a parameter", "a model with whole weights: a quantised layer's linear() gives them back")
    kind = next(p.dtype for p in parameters.values())
    tensors = [
        (theirs, shape, kind, make)
        for theirs, shape, make in names.save(
            {name: partial(whole, parameters[name], shape) for name, shape in model.shapes.items()},
            model.shapes,
            bare=model.bare,
        )
    ]
    extra = {**model.companions, "config.json": config_json(model, kind)}
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_folder(folder, tensors, max_shard_size=max_shard_size, extra_files=extra)
    else:
        for item in reading_order(tensors, max_shard_size):
            item.read()
    if dist.is_initialized():
        dist.barrier()


def whole(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The whole of a parameter without the rows that only pad it."""
    full = parameter.detach()
    full = full.full_tensor() if hasattr(full, "full_tensor") else full  # a DTensor, whose module takes a second to import
    return full if full.shape == shape else full[tuple(slice(0, n) for n in shape)]


def config_json(model: "Model", kind: torch.dtype) -> bytes:
    """config.json: what the model came with, what has changed, its class and its dtype."""
    values: dict[str, Any] = dict(model.config.to_dict())
    values["architectures"] = [model.tasks[model.task].architecture]
    values["torch_dtype" if "torch_dtype" in values else "dtype"] = str(kind).removeprefix("torch.")
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
