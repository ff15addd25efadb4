"""What the `optimizer` and `schedule` sections of a recipe say; torch-free, so that a recipe is checked first."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled decay, kept off norms and biases (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"] = field(default="adamw", metadata={"help": "the optimizer"})
    lr: float = field(default=5e-5, metadata={"above": 0, "help": "peak learning rate"})
    betas: tuple[float, float] = field(
        default=(0.9, 0.999), metadata={"min": 0, "below": 1, "help": "decay of the two moments"}
    )
    eps: float = field(default=1e-8, metadata={"above": 0, "help": "added to the root of the second moment"})
    weight_decay: float = field(default=0.01, metadata={"min": 0, "help": "decoupled decay; norms and biases have none"})
    moments: Literal["fp32", "bf16", "int8"] = field(
        default="fp32", metadata={"help": "how the two moments are kept: 8, 4 or 2 bytes a parameter"}
    )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over steps: a linear warm-up, then the shape that `name` says."""

    name: Literal["linear", "cosine", "constant"] = field(
        default="linear", metadata={"help": "shape of the decay after the warm-up"}
    )
    warmup_steps: int = field(default=0, metadata={"min": 0, "help": "optimizer steps from 0 to the peak"})
    min_lr_ratio: float = field(default=0.0, metadata={"min": 0, "max": 1, "help": "last rate / peak rate"})
