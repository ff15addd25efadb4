"""Decides what a recipe leaves open: the device, the precision, the micro-batch, the length of a sequence."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..checkpoint.files import weighs
from ..create import build, load
from ..data.config import DataConfig
from ..data.objective import find_objective
from ..errors import refuse
from ..ops.linear import has_low_units
from ..parallel.device import device_of, memory_of
from ..parallel.machine import Machine
from ..registry import presets
from .launch import check_ranks
from .recipe import Recipe

FORWARD = 8192  # tokens of a forward at most, where a recipe gives no micro-batch
BASE = 768  # width of a model below which a forward has more, of as many numbers: with so few a GPU would wait for the host
LARGE = 4  # times as many where there is memory: a step of fewer forwards adds up fewer gradients
KEPT = 36  # bytes that a forward keeps of each token, layer and channel, in 16 bits: BERT 32, T5 31, GPT-2 33, LLaMA-3B 25
SHARE = 3  # of a GPU's memory they may have one of so many parts
WIDE = 256  # of hidden states, from which on bf16 is what a CPU with units for it computes in
FORWARD_CPU = 1024  # on a CPU, which is no faster with more: GPT-2 takes 5 s for these on two cores


def resolve(recipe: Recipe, machine: Machine) -> tuple[Recipe, torch.device]:
    """`recipe` with nothing left open, and the device. `precision: auto` is bf16 on an accelerator that supports it, fp16 on an
    older GPU, and on a CPU bf16 if it has units for it and the model is not tiny; otherwise fp32. The micro-batch is the largest
    divisor of the batch that keeps a forward within `forward_tokens`. `data.seq_len` defaults to the model's number of positions if
    that is smaller than the usual default."""
    check_ranks(recipe, machine)
    sizes = sizes_of(recipe)
    if recipe.data.seq_len == DataConfig.seq_len and (most := sizes.get("positions")) and most < recipe.data.seq_len:
        recipe = replace(recipe, data=replace(recipe.data, seq_len=most))
    check_length(recipe, sizes)
    device = device_of(machine)
    precision = recipe.precision
    if precision == "auto":
        precision = automatic_precision(device, sizes.get("dim"))
    recipe = replace(recipe, precision=precision)
    most, micro = most_of(recipe, device, sizes), recipe.micro_batch
    if micro is None and recipe.batch_tokens is None:
        together = find_objective(recipe.objective).together
        micro = recipe.batch if together else divisor(recipe.batch, most)
    return replace(recipe, micro_batch=micro, task=recipe.head), device


def divisor(batch: int, most: int) -> int:
    """The largest divisor of a batch that is at most so much."""
    return max(n for n in range(1, min(most, batch) + 1) if batch % n == 0)


def check_heads(recipe: Recipe, machine: Machine) -> None:
    """Refuse attention heads that cannot be divided among the tensor-parallel ranks, before any rank is started."""
    many = machine.tensor_parallel
    sizes = sizes_of(recipe) if many > 1 else {}
    for key in ("heads", "kv_heads"):
        if (heads := sizes.get(key)) and heads % many:
            refuse(None, "machine.tensor_parallel", f"{many}, and {recipe.model} has {heads} {key}", "a divisor of the heads")


def check_length(recipe: Recipe, sizes: Mapping[str, Any]) -> None:
    """Refuse examples longer than the positions of a model of such `sizes`, if these are learned."""
    if (most := sizes.get("positions")) is not None and recipe.data.seq_len > most:
        refuse(None, "data.seq_len", str(recipe.data.seq_len), f"at most {most}, the model's positions")


def sizes_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of the config of the recipe's model; empty if a hub id would have to be fetched to know them."""
    known, local, found = recipe.model in presets(), Path(os.path.expanduser(recipe.model)).is_dir(), None
    if recipe.init == "random" and local and not known:
        if weighs(recipe.model):
            wanted = "init=pretrained config={} tokenizer=null for these, or a folder with a config.json alone, or a preset"
            refuse(None, "model", f"{recipe.model}, a folder with weights, and init is random", wanted)
        if recipe.config:
            beside = f"{', '.join(recipe.config)} beside the config.json of {recipe.model}"
            refuse(None, "config", beside, "config={}, for the shape that the file gives")
    if recipe.init == "random" or (known and not local):
        found = build(recipe.model, task=recipe.head, config=recipe.config, device="meta")
    elif local:
        found = load(recipe.model, task=recipe.head, config=recipe.config, device="meta")
    return dict(vars(found.config)) if found is not None else {}


def automatic_precision(device: torch.device, width: int | None = None) -> Literal["bf16", "fp16", "fp32"]:
    """The value of `precision: auto` on a device, for a model of that width (if absent, a wide one). On NVIDIA's GPUs before Ampere
    torch emulates bf16, slower than fp32. A CPU with units for bf16 (AVX512-BF16, AMX) takes half the time of fp32 from 512 wide
    on, 0.55 of it at 256, and 0.7 to 0.8 at 64, where a model that learns in minutes is not worth rounding (steps of GPT, BERT, T5
    with two layers, 512 and 1,024 tokens, one thread of an EPYC, torch 2.13, 2026-11-22)."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "cpu":
        return "bf16" if has_low_units(torch.bfloat16) and (width is None or width >= WIDE) else "fp32"
    able: Callable[[], bool] = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: False)
    return "bf16" if able() else "fp32"


def may_pack(recipe: Recipe, gpu: bool) -> bool:
    """Whether batches may come without padding where the recipe leaves that open. Not with a loss that computes each row twice; nor
    on a GPU where only padded ones are filled up to shapes that recur (shapes.py): without these there are no CUDA graphs."""
    objective = find_objective(recipe.objective)
    recur = recipe.precision != "fp32" and not objective.together
    return recipe.data.padding_free is None and objective.packs and not recipe.loss.r_drop and (recur or not gpu)


def forward_tokens(device: torch.device, sizes: Mapping[str, Any], low: bool) -> int:
    """The maximum number of tokens per forward, if a recipe does not give the number of sequences, for a model whose config has
    these `sizes`. `low`: it computes in 16 bits."""
    if device.type == "cpu":
        return FORWARD_CPU
    width, layers = sizes.get("dim"), sizes.get("layers", 0)
    if width is None:
        return FORWARD
    if "decoder_layers" in sizes:
        layers += sizes["decoder_layers"] or layers
    most, there = int(FORWARD * max(1.0, BASE / width)), memory_of(device)
    while low and there is not None and 2 * most <= LARGE * FORWARD and 2 * most * KEPT * layers * width <= there[1] / SHARE:
        most *= 2
    return most


def most_of(recipe: Recipe, device: torch.device, sizes: Mapping[str, Any]) -> int:
    """The number of sequences of maximum length that a forward may have, of a resolved recipe; if a step must be one forward, as
    many as its tokens fill."""
    if recipe.batch_tokens is not None and find_objective(recipe.objective).together:
        return -(-recipe.batch_tokens // recipe.data.seq_len)
    return max(1, forward_tokens(device, sizes, recipe.precision != "fp32") // recipe.data.seq_len)
