"""The `adapter` section of a recipe; torch-free, so that a recipe is checked first."""

from dataclasses import dataclass, field, fields
from typing import Literal

from ..config import checked, documented, says
from ..errors import refuse
from ..theirs import made_by_name, within

ALL = "all-linear"


@made_by_name(within("adapter"))
@documented
@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """An adapter on a frozen model: LoRA (Hu et al., 2021) or DoRA (Liu et al., 2024), in peft's terms. Errors: `InputError`."""

    name: Literal["none", "lora", "dora"] = field(
        default="none", metadata=says("the kind of adapter; none: train the model itself")
    )
    rank: int = field(default=8, metadata=says("rank of each addition (peft: r)", min=1, max=65536))
    alpha: float = field(default=16.0, metadata=says("an addition is scaled by alpha / rank (peft: lora_alpha)", above=0))
    dropout: float = field(default=0.0, metadata=says("on the input of the addition (lora_dropout)", min=0, below=1))
    rslora: bool = field(default=False, metadata=says("scale by alpha / sqrt(rank) (Kalajdzievski, 2023)"))
    targets: tuple[str, ...] = field(
        default=(ALL,), metadata=says("layers, by our names (attn.q) or Hugging Face's (c_attn); all-linear: all but the head")
    )
    quantize: Literal["none", "nf4", "int8"] = field(
        default="none", metadata=says("hold the frozen linear layers in 4 or 8 bits (QLoRA: nf4)")
    )
    modules_to_save: tuple[str, ...] = field(
        default=(), metadata=says("modules trained and saved whole; a new head and a classifier's always are")
    )

    def __post_init__(self) -> None:
        checked(self)
        if self.name != "none" and not self.targets:
            refuse(None, "targets", "empty", f"names of layers, or {ALL}")
        if changed := [f.name for f in fields(self) if f.name in self.unread(self.name) and getattr(self, f.name) != f.default]:
            refuse(None, changed[0], "set, but adapter.name is none", "adapter.name=lora or dora")

    @classmethod
    def unread(cls, name: str) -> list[str]:
        """The keys that mean nothing to this kind."""
        return [f.name for f in fields(cls) if f.name != "name"] if name == "none" else []

    @property
    def scale(self) -> float:
        return self.scaled(self.alpha, self.rank)

    def scaled(self, alpha: float, rank: int) -> float:
        """The factor of the addition of a layer with this alpha and rank."""
        return alpha / (rank**0.5 if self.rslora else rank)

    def alpha_of(self, scale: float, rank: int) -> float:
        """The alpha that gives a layer of this rank this scale."""
        return scale * (rank**0.5 if self.rslora else rank)


def check_config(adapter: object) -> None:
    """Refuse anything but a config when a new adapter is requested."""
    if hasattr(adapter, "peft_type"):
        found = f"peft's {type(adapter).__name__}"
        refuse(None, "adapter", found, "mc.AdapterConfig(name='lora', ...): of peft's kinds LoRA and DoRA are here")
    if not isinstance(adapter, AdapterConfig):
        refuse(None, "adapter", repr(adapter), "mc.AdapterConfig(name='lora', ...)")
