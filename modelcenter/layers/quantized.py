"""Linear layers with a frozen weight in 4 or 8 bits (ops/quantize.py), on which an adapter is trained."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..ops import dequantize_int8, dequantize_nf4, linear_int8, linear_nf4, quantize_int8, quantize_nf4
from ..ops._mode import autocast_dtype
from .linear import Linear


class QuantizedLinear(nn.Module, ABC):
    """A linear layer whose frozen weight is stored as codes. It is made from a plain layer, replaces it, and can be turned back
    into one.

    The state is codes, scales and the bias; `weight` is a property, dequantised at each access. A Hugging Face folder holds whole
    weights, so saving a model with such layers is refused: call `linear()` on each first, which returns the plain layer. The scales
    stay fp32 whatever dtype the module is cast to, because rounding a scale would change the weight.
    """

    kind: ClassVar[str]  # among those of ops/low_rank.py
    codes: Tensor
    scales: Tensor
    given: Callable[[Tensor], Tensor] | None = None  # what becomes of an input (parallel/adapted.py)
    summed: Callable[[Tensor], Tensor] | None = None  # and of a product that is a part of a sum

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, in_features: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.in_features = in_features
        self.dtype = dtype  # of the weight, where one is asked for

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """The quantised form of a layer, on its device; the two share the bias, which is frozen."""
        codes, scales = cls.quantize(layer.weight)
        return cls(codes, scales, layer.bias, layer.in_features, layer.weight.dtype)

    @staticmethod
    @abstractmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight (out in)."""

    @abstractmethod
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (.. in) times the weight that the codes stand for: .. out."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight (out in) that the codes stand for, rounded once to `dtype`."""

    @property
    def weight(self) -> Tensor:
        """The same in the weight's own dtype."""
        return self.dequantized(self.dtype)

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def linear(self) -> Linear:
        """A plain layer with this one's weight, to be trained or saved."""
        layer = Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().to(self.dtype, copy=True))
        return layer

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        """x (.. in) to .. out, in the dtype of x, or autocast's."""
        if (low := autocast_dtype(x.device)) is not None and x.dtype != torch.float64:
            x = x.to(low)
        x = x if self.given is None else self.given(x)
        own: Any = self.bias if bias else None
        if self.summed is None:
            return self.product(x, own.to_local() if hasattr(own, "to_local") else own)
        out = self.summed(self.product(x, None))
        if own is not None:
            own = own.to(out.dtype)
            out = out + (own if hasattr(out, "to_local") else own.to_local())
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types there
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=scales.device)).dtype
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.dtype}"


class NF4Linear(QuantizedLinear):
    """The weight in 16 levels, with a scale for every 64 elements of a row: 4.5 bits per weight. Dettmers et al., 2023."""

    kind = "nf4"

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_nf4(weight)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = linear_nf4(x, self.codes, self.scales, bias)
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_nf4(self.codes, self.scales, self.in_features, dtype)


class Int8Linear(QuantizedLinear):
    """The weight in 255 levels, with a scale for every row: 8 bits per weight and 32 per row. Dettmers et al., 2022."""

    kind = "int8"

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_int8(weight)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = linear_int8(x, self.codes, self.scales, bias)
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return dequantize_int8(self.codes, self.scales, dtype)
