"""What an op is: a reference that gives its meaning, and the cases on which anything faster is held against it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OPS: dict[str, "Op"] = {}

Cases = Callable[[str, torch.dtype], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True)
class Op:
    """A callable. Layers call it and never ask which implementation runs; today that is the reference."""

    name: str
    reference: Callable[..., Tensor]
    cases: Cases

    def __call__(self, *args: Any) -> Tensor:
        return self.reference(*args)


def op(name: str, reference: Callable[..., Tensor], cases: Cases) -> Op:
    """Register `reference` under `name`; `cases(device, dtype)` yields argument tuples to test and time it on."""
    OPS[name] = Op(name, reference, cases)
    return OPS[name]


def wide(x: Tensor) -> Tensor:
    """`x` in at least fp32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
