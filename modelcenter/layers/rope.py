"""The frequencies of rotary channels, and the ways to stretch positions beyond the length that a model was trained on.

A scaling is a frozen value. Called with (r rotated channels, length in tokens) it returns r/2 inverse frequencies in fp32, in
radians per token, and the factor on cos and sin. The order of operations is that of transformers' `modeling_rope_utils`, so the
frequencies are equal bit for bit. But here a call depends only on its arguments, whereas transformers keeps state from a longer
input.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

Wrong = tuple[str, Any, str]  # field, what it holds, what is wanted


def powers(theta: float, channels: int) -> Tensor:
    """theta^(2i / r) for each pair i; always on the CPU, a model being built on the meta device too."""
    out: Tensor = theta ** (torch.arange(0, channels, 2, dtype=torch.float, device="cpu") / channels)
    return out


@dataclass(frozen=True)
class Plain:
    """1 / theta^(2i / r). Su et al., 2021 (RoFormer), section 3.2.2."""

    theta: float = 10000.0
    by_length: ClassVar[bool] = False  # whether the length of the input changes the frequencies

    def __call__(self, channels: int, length: int) -> tuple[Tensor, float]:
        return 1.0 / powers(self.theta, channels), 1.0

    def wrong(self, channels: int) -> Iterator[Wrong]:
        """What is wrong with the fields, for a head with `channels` rotated channels."""
        if not self.theta > 1:
            yield "theta", self.theta, "a number above 1"
        factor = getattr(self, "factor", None)
        if factor is not None and not factor >= 1:
            yield "factor", factor, "a number from 1"
        if getattr(self, "attention_factor", None) == 0:
            yield "attention_factor", 0, "a number above 0"


PLAIN = Plain()


@dataclass(frozen=True)
class Linear(Plain):
    """Every frequency divided by `factor`. Chen et al., 2023 (position interpolation)."""

    factor: float = 1.0

    def __call__(self, channels: int, length: int) -> tuple[Tensor, float]:
        return 1.0 / powers(self.theta, channels) / self.factor, 1.0


@dataclass(frozen=True)
class Dynamic(Plain):
    """A theta that grows once the input is longer than `positions`. Peng et al., 2023 (YaRN), section 3.3."""

    factor: float = 1.0
    positions: int = 2048
    by_length: ClassVar[bool] = True

    def __call__(self, channels: int, length: int) -> tuple[Tensor, float]:
        length = max(length, self.positions)
        grown = (self.factor * length / self.positions) - (self.factor - 1)
        return 1.0 / powers(self.theta * grown ** (channels / (channels - 2)), channels), 1.0

    def wrong(self, channels: int) -> Iterator[Wrong]:
        yield from super().wrong(channels)
        if channels <= 2:
            yield "factor", self.factor, f"more than {channels} channels a head: the exponent is r / (r - 2)"


@dataclass(frozen=True)
class Yarn(Plain):
    """Fast channels as trained, slow ones divided by `factor`, a ramp between, and a temperature on the scores. Fast
    are those that turn `beta_fast` times within `original` tokens, slow below `beta_slow`. Peng et al., 2023 (YaRN)."""

    factor: float = 1.0
    original: int = 2048
    attention_factor: float | None = None
    beta_fast: float | None = None  # 32
    beta_slow: float | None = None  # 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ramp's ends to whole channels

    def __call__(self, channels: int, length: int) -> tuple[Tensor, float]:
        powered = powers(self.theta, channels)
        low, high = self.bend(channels, self.beta_fast or 32), self.bend(channels, self.beta_slow or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        ramp = (torch.arange(channels // 2, dtype=torch.float, device="cpu") - low) / ((high - low) or 0.001)
        trained = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * powered) * (1 - trained) + 1.0 / powered * trained, self.temperature

    def bend(self, channels: int, turns: float) -> float:
        """The pair (a fraction) that turns this often within the original length."""
        return (channels * math.log(self.original / (turns * 2 * math.pi))) / (2 * math.log(self.theta))

    @property
    def temperature(self) -> float:
        """The factor on cos and sin: given, or 0.1 ln(factor) + 1, or DeepSeek's quotient of two such."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.warmth(self.mscale) / self.warmth(self.mscale_all_dim)
        return self.warmth(1.0)

    def warmth(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def wrong(self, channels: int) -> Iterator[Wrong]:
        yield from super().wrong(channels)
        if (self.beta_fast or 32) < (self.beta_slow or 1):
            yield "beta_fast", self.beta_fast, f"at least beta_slow, which is {self.beta_slow or 1}"


@dataclass(frozen=True)
class Llama3(Plain):
    """Waves longer than original / `low` are slowed by `factor`, those shorter than original / `high` stay as trained, a ramp
    between. Llama team, 2024 ("The Llama 3 herd of models") and Meta's reference code."""

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __call__(self, channels: int, length: int) -> tuple[Tensor, float]:
        plain = 1.0 / powers(self.theta, channels)
        wave = 2 * math.pi / plain
        slowed = torch.where(wave > self.original / self.low, plain / self.factor, plain)
        smooth = (self.original / wave - self.low) / (self.high - self.low)
        ramp = (1 - smooth) * slowed / self.factor + smooth * slowed
        between = ~(wave < self.original / self.high) * ~(wave > self.original / self.low)
        return torch.where(between, ramp, slowed), 1.0

    def wrong(self, channels: int) -> Iterator[Wrong]:
        yield from super().wrong(channels)
        if not self.low > 0:
            yield "low", self.low, "a number above 0"
        if not self.high > self.low:
            yield "high", self.high, f"a number above low_freq_factor, which is {self.low}"


@dataclass(frozen=True)
class LongRope(Plain):
    """Every frequency divided by a searched number of its own: `short` up to `original` tokens, `long` beyond. `factor`
    (None: positions / original) sets the factor on cos and sin. Ding et al., 2024 (LongRoPE)."""

    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    original: int = 2048
    positions: int = 2048
    factor: float | None = None
    attention_factor: float | None = None
    by_length: ClassVar[bool] = True

    def __call__(self, channels: int, length: int) -> tuple[Tensor, float]:
        divisors = torch.tensor((self.short, self.long), dtype=torch.float, device="cpu")
        divisors = divisors[min(max(length - self.original, 0), 1)]  # a compiler knows no length, and takes no branch by it
        return 1.0 / (divisors * powers(self.theta, channels)), self.temperature

    @property
    def temperature(self) -> float:
        """The factor on cos and sin: given, or sqrt(1 + ln(factor) / ln(original))."""
        factor = self.positions / self.original if self.factor is None else self.factor
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original))

    def wrong(self, channels: int) -> Iterator[Wrong]:
        yield from super().wrong(channels)
        for name in ("short", "long"):
            values = getattr(self, name)
            if len(values) != channels // 2:
                yield name, f"{len(values)} numbers", f"{channels // 2}, one a pair of channels"
            elif not all(v > 0 for v in values):
                yield name, f"{min(values)} among them", "numbers above 0"
        if self.original < 2:
            yield "original", self.original, "a length from 2"
