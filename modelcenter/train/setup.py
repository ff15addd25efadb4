"""The parts that a run works with, and how its model is written with its tokenizer."""

import tempfile
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import disk_errors
from ..data.loader import Loader
from ..data.tokenizer import Tokenizer
from ..errors import InputError
from ..generate.options import FILE
from ..layers.adapter import current_names
from ..model import Model
from ..parallel.ranks import ALONE, OtherRankError, Ranks
from .evaluate import Evaluation


@dataclass(frozen=True)
class Labels:
    """The names of the classes in the order of the model's outputs (None if the objective has none), and the names that the weights
    were trained with, if they tell."""

    names: tuple[str, ...] | None
    learned: tuple[str, ...]


@dataclass
class Setup:
    """What a run works with. `steps` is its length; `lines` tell the user about it, those in `idle` of settings that do nothing."""

    model: Model
    tokenizer: Tokenizer
    labels: Labels
    loader: Loader
    evaluation: Evaluation | None
    steps: int
    environment: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    foreseen: dict[str, Any] | None = None  # memory and speed, if they were

    @property
    def parameters(self) -> int:
        """How many numbers the model has, however they are stored, and its adapter."""
        added = (self.model.get_parameter(now) for name, now in current_names(self.model).items() if name not in self.model.shapes)
        return sum(prod(shape) for shape in self.model.shapes.values()) + sum(p.numel() for p in added)

    @property
    def trained(self) -> int:
        """How many of them are trained; of a model divided among ranks, on all ranks."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def segmented(model: Model) -> bool:
    """Whether the model tells the second of two texts from the first by segment ids. Other models would read these as words, or not
    at all."""
    embed: Any = model.embed
    return embed.segments is not None


def write_model(folder: Path, setup: Setup, ranks: Ranks = ALONE, **how: Any) -> Path:
    """Write `folder`: weights and config in Hugging Face's format, or an adapter in peft's, with the run's tokenizer. All `ranks`
    call it. `how`: options of `save_pretrained`. Errors: `InputError`, on all ranks if on one."""
    files: dict[str, bytes] = {}

    def spell() -> str:
        if ranks.first:  # the files beside the weights are its to write
            with disk_errors(folder), tempfile.TemporaryDirectory() as place:
                setup.tokenizer.save(place, segments=segmented(setup.model))
                files.update((file.name, file.read_bytes()) for file in Path(place).iterdir() if file.is_file())
        return ""

    try:
        ranks.together(spell, (InputError,))
    except OtherRankError as error:
        raise InputError(str(error)) from None
    kept = {name: data for name, data in setup.model.companions.items() if name == FILE}
    setup.model.companions = {**kept, **files}
    setup.model.save_pretrained(folder, **how)
    return folder
