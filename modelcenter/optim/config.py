"""The `optimizer`, `schedule` and `loss` sections of a recipe; torch-free, so that a recipe is checked first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import Any, Literal

from ..config import checked, says
from ..errors import refuse

TIMELESS = ("constant", "noam", "inverse_sqrt", "exponential")  # schedules in which no step depends on how many there are


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, 2019) or another; decay is decoupled and kept off norms and biases."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = field(
        default="adamw", metadata=says("the optimizer; muon: of the blocks' matrices, adamw for the rest")
    )
    lr: float = field(default=5e-5, metadata=says("peak learning rate; adafactor: relative to a weight's size", above=0, max=100))
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), metadata=says("decay of the two moments; Lion's authors: [0.9, 0.99]", min=0, below=1)
    )
    eps: float = field(  # below it fp32 has denormals alone, which are zero to a run
        default=1e-8, metadata=says("added to the root of the second moment", min=1e-37)
    )
    weight_decay: float = field(default=0.01, metadata=says("decoupled decay; norms and biases have none", min=0))
    moments: Literal["fp32", "bf16", "int8"] = field(
        default="fp32",
        metadata=says("precision of adamw's two moments: 8, 4 or 2 bytes per parameter in total; muon's has that of the weights"),
    )
    momentum: float = field(default=0.95, metadata=says("muon's momentum", min=0, below=1))
    layer_decay: float = field(
        default=1.0, metadata=says("a block's rate / that of the block above; the head has the full rate", above=0, max=1)
    )

    def __post_init__(self) -> None:
        checked(self)
        refuse_changed(self, self.unread(self.name), f"with name {self.name}, which has none")
        if self.weight_decay * self.lr >= 1:
            found = f"{self.weight_decay:g} with lr {self.lr:g}, which leaves a step nothing of the weights"
            refuse(None, "weight_decay", found, "a product below 1")

    @staticmethod
    def unread(name: str) -> list[str]:
        """The keys that mean nothing to this optimizer."""
        of_lion = ["eps", "moments", "momentum"]
        return {"adamw": ["momentum"], "adafactor": ["betas", *of_lion], "lion": of_lion}.get(name, [])


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over steps: a linear warm-up, then the shape that `name` says."""

    name: Literal["linear", "cosine", "constant", "wsd", "noam", "inverse_sqrt", "exponential", "polynomial"] = field(
        default="linear", metadata=says("shape of the decay after the warm-up")
    )
    warmup_steps: int | float = field(
        default=0, metadata=says("optimizer steps from 0 to the peak; below 1: a share of the run", min=0)
    )
    min_lr_ratio: float = field(default=0.0, metadata=says("last rate / peak rate; not for constant", min=0, max=1))
    decay_steps: int | None = field(
        default=None, metadata=says("wsd: steps of the decay at the end; null: a tenth of the run", min=1)
    )
    decay: Literal["cosine", "linear", "1-sqrt"] = field(default="cosine", metadata=says("wsd: the shape of the last part"))
    power: float = field(default=1.0, metadata=says("polynomial: the exponent", above=0))
    gamma: float = field(default=0.999, metadata=says("exponential: factor by which the rate changes each step", above=0, max=1))

    def __post_init__(self) -> None:
        checked(self)
        refuse_changed(self, self.unread(self.name), f"with name {self.name}, which has none")
        if self.name == "noam" and not self.warmup_steps:
            refuse(None, "warmup_steps", "0 with name noam", "1 at least: its peak is at the end of the warm-up")
        if self.warmup_steps >= 1 and self.warmup_steps % 1:
            refuse(None, "warmup_steps", str(self.warmup_steps), "whole steps, or a share below 1")

    @staticmethod
    def unread(name: str) -> list[str]:
        """The keys that mean nothing to this schedule."""
        own = {"wsd": ["decay_steps", "decay"], "polynomial": ["power"], "exponential": ["gamma"]}
        others = [key for other, keys in own.items() if other != name for key in keys]
        return [*others, "min_lr_ratio"] if name == "constant" else others

    @property
    def timeless(self) -> bool:
        """Whether no step's rate depends on how many steps there are."""
        return self.name in TIMELESS and not 0 < self.warmup_steps < 1

    def of(self, total: int) -> "ScheduleConfig":
        """The schedule of a run of `total` steps: the warm-up in steps, a share of the run rounded up as in transformers."""
        return replace(self, warmup_steps=ceil(self.warmup_steps * total)) if 0 < self.warmup_steps < 1 else self


@dataclass(frozen=True)
class LossConfig:
    """What is added to the cross entropy in training (not in evaluation), and what the loss of sentence embeddings is."""

    label_smoothing: float = field(
        default=0.0, metadata=says("part of a target spread over all classes (Szegedy et al., 2016)", min=0, below=1)
    )
    z_loss: float = field(default=0.0, metadata=says("factor of the squared log of the normaliser (PaLM: 1e-4)", min=0))
    r_drop: float = field(
        default=0.0,
        metadata=says("classify: factor of the divergence of two passes with different dropout (Liang et al., 2021)", min=0),
    )
    scale: float = field(default=20.0, metadata=says("contrastive: factor of the cosines, 1 / temperature", above=0))
    symmetric: bool = field(default=False, metadata=says("contrastive: also find the first text by the second"))

    def __post_init__(self) -> None:
        checked(self)


def refuse_changed(config: Any, keys: Sequence[str], why: str, section: str = "") -> None:
    """Refuse a key among `keys` of a `section` that is not at its default."""
    for f in fields(config):
        if f.name in keys and getattr(config, f.name) != f.default:
            usual = list(f.default) if isinstance(f.default, tuple) else f.default
            refuse(None, section + f.name, f"{getattr(config, f.name)!r} {why}", f"leave it out, or {usual}")
