"""The error when memory runs out: one line that names the key to change and a value to try, on any device and in any phase."""

import errno
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from ..config import bind, override, to_dict
from ..create import build
from ..data.objective import find_objective
from ..errors import InputError, refuse
from ..parallel.device import device_of
from ..parallel.machine import Machine, in_shards
from ..place import check_adapter
from .folder import check
from .launch import check_ranks
from .recipe import Recipe

WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "alloc_failed")


class Memory:
    """A context that turns an out-of-memory error into a refusal; `at` is what was being done."""

    def __init__(self, recipe: Recipe, machine: Machine) -> None:
        self.recipe, self.machine, self.at = recipe, machine, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or not ran_out(error):
            return
        if self.at:
            key, value, ways = of_work(self.recipe, self.machine)
        else:
            key, value, ways = of_weights(self.recipe, self.machine)
        refuse(None, key, f"{value}: out of memory {self.at or 'when the model was loaded'}", " or ".join(ways))


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out. torch has a class for that on accelerators, and none on the host."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)


def of_work(recipe: Recipe, machine: Machine) -> tuple[str, object, list[str]]:
    """The key that helps most against the memory of a step or an evaluation, its value, and settings to try, the best first."""
    found: list[tuple[str, object, object]] = []
    micro = recipe.micro_batch
    if micro is None or micro > 1:
        fitting = [n for n in range(1, (micro or 2) // 2 + 1) if recipe.batch % n == 0 or recipe.batch_tokens is not None]
        found.append(("micro_batch", micro, fitting[-1]))
    if machine.recompute != "full":
        found.append(("machine.recompute", machine.recompute, "full"))
    if spares(machine):
        found.append(("machine.offload", machine.offload, "true"))
    found.append(("data.seq_len", recipe.data.seq_len, recipe.data.seq_len // 2))
    if recipe.optimizer.name == "adamw" and recipe.optimizer.moments != "int8":
        found.append(("optimizer.moments", recipe.optimizer.moments, "int8"))
    found = [(key, value, other) for key, value, other in found if accepted(recipe, machine, f"{key}={other}")]
    shared = [settings for settings in shards(machine) if accepted(recipe, machine, *settings.split())]
    if not found:
        return "model", recipe.model, [*shared, "a smaller model"]
    return found[0][0], found[0][1], [*(f"{key}={other}" for key, _, other in found), *shared]


def spares(machine: Machine) -> bool:
    """Whether offload could help: the host has separate memory that could hold weights and state, and does not yet."""
    return not machine.offload and device_of(machine).type != "cpu"


def shards(machine: Machine) -> list[str]:
    shared = in_shards(machine)
    return [shared[0]] if shared else []


def of_weights(recipe: Recipe, machine: Machine) -> tuple[str, object, list[str]]:
    """The same for weights that do not fit by themselves."""
    aside = ["machine.offload=true"] if spares(machine) else []
    if recipe.init == "random":
        return "config", recipe.config or recipe.model, [*aside, "a smaller config.layers", "config.dim"]
    lora = ["adapter.name=lora"] if recipe.adapter.name == "none" else []
    # Codes are whole on each fsdp rank: of four and more a share of the weights is smaller.
    nf4 = [*lora, "adapter.quantize=nf4"] if machine.fsdp < 4 and divides(recipe, machine) else []
    ways = [settings for settings in (nf4, lora)
            if settings and recipe.adapter.quantize != "nf4" and accepted(recipe, machine, *settings)]
    key, value = ("model", recipe.model) if lora or not ways else ("adapter.quantize", recipe.adapter.quantize)
    more = ["a larger machine.fsdp"] if machine.fsdp > 1 else shards(machine)
    return key, value, [*(" with ".join(settings) for settings in ways[:1]), *aside, *more, "a smaller model"]


def divides(recipe: Recipe, machine: Machine) -> bool:
    """Whether the model's codes of 4 bits can be divided among the ranks of `machine`."""
    if machine.tensor_parallel == 1:
        return True
    try:
        model = build(recipe.model, task=find_objective(recipe.objective).task, config=recipe.config, device="meta")
        check_adapter(model, replace(recipe.adapter, name="lora", quantize="nf4"), machine)
    except InputError:
        return False
    return True


def accepted(recipe: Recipe, machine: Machine, *settings: str) -> bool:
    """Whether the run would accept `settings`: advice that is then refused is no advice."""
    try:
        wanted = override({**to_dict(recipe), "machine": to_dict(machine)}, settings)
        other = bind(Machine, wanted.pop("machine"), section="machine.")
        made = bind(Recipe, wanted)
        check_ranks(made, other)
        check(Path(made.output_dir), replace(made, resume="auto"))
    except InputError:
        return False
    return True
