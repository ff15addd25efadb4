"""What torch.utils.flop_counter should count for ops that it cannot look into, by its own rules: two operations for each term of a
product's sums, whatever a mask or a missing label saves, and in the backward of attention the scores once more.

The counter gets the formulas when somebody imports it, and not before: it imports triton, which takes a sixth of a second (triton
3.9 and torch 2.13, python -X importtime, 2026-11-27).
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch import Tensor

from ._mode import fake
from .linear_cross_entropy import WEIGHT, X

COUNTER = "torch.utils.flop_counter"


def pairs(q: Tensor, k: Tensor, lengths: Sequence[Tensor | None]) -> int:
    """The number of pairs of a query and a key of its sequence, in all heads. Lengths are read, on a GPU too, as torch does for its
    own ops; lengths without values count as one sequence."""
    ends_q, ends_k = lengths
    if ends_q is None or ends_k is None or any(fake(n) or n.is_meta for n in (ends_q, ends_k)):
        each = q.size(1) * k.size(1)
    else:
        each = int((ends_q.long().diff() * ends_k.diff()).sum())
    return q.size(0) * q.size(2) * each


def attention(at: int, products: int, q: Tensor, k: Tensor, *rest: Any, **_: Any) -> int:
    """`at`: the position of the lengths in `rest`."""
    return 2 * products * pairs(q, k, rest[at : at + 2]) * k.size(3)


def dense(products: int, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """Attention of queries to keys (b h s d), which may have fewer heads."""
    return 2 * products * q.numel() * k.size(2)


def dense_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    return dense(5, q, k)


def losses(x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> int:
    """The logits and, in the same call, the requested gradients."""
    grads = rest[5] if len(rest) > 5 else X | WEIGHT
    return 2 * x.numel() * weight.size(0) * (1 + bool(grads & X) + bool(grads & WEIGHT))


def quantized(x: Tensor, codes: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * codes.size(0)


def quantized_backward(grad: Tensor, codes: Tensor, scales: Tensor, cols: int, **_: Any) -> int:
    return 2 * grad.numel() * cols


FORMULAS: dict[str, Callable[..., int]] = {
    "attention_forward": partial(attention, 2, 2),
    "attention_backward": partial(attention, 2, 5),
    "relative_attention_forward": partial(attention, 3, 2),
    "relative_attention_backward": partial(attention, 3, 5),
    "linear_cross_entropy_forward": losses,
    "linear_nf4_forward": quantized,
    "linear_nf4_backward": quantized_backward,
    "linear_int8_forward": quantized,
    "linear_int8_backward": quantized_backward,
}
TORCHS: dict[str, Callable[..., int]] = {  # torch's own ops that layers call, where its counter does not know them
    "_addmm_activation": lambda bias, x, w, **_: 2 * x.numel() * w.size(1),
    "_scaled_dot_product_flash_attention_for_cpu": partial(dense, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": dense_backward,
}


class Importer(MetaPathFinder):
    """Finds torch's counter as Python would without it, and passes it the formulas once it is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == COUNTER else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_tell(module: Any) -> None:
            run(module)
            tell(module)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]  # of this loader alone
        return spec


def tell(counter: Any) -> None:
    """Give torch's counter the formulas."""
    for name, formula in FORMULAS.items():
        counter.register_flop_formula(getattr(torch.ops.modelcenter, name), get_raw=True)(formula)
    for name, formula in TORCHS.items():
        if (op := getattr(torch.ops.aten, name)) not in counter.flop_registry:
            counter.register_flop_formula(op, get_raw=True)(formula)


def tell_when_imported() -> None:
    if COUNTER in sys.modules:
        tell(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, Importer())
