"""Dropout with an optional residual: residual + x * kept / (1 - p). Srivastava et al., 2014.

Which elements are kept depends only on the seed and the element's number, and is the same on every device (csrc/philox.h):
Philox4x32 with 7 rounds (Salmon et al., 2011), 16 bits per element. So no mask is ever stored, and recompute repeats it with the
same seed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._graph import drawn
from ._kernels import SEED, call, expect
from ._op import Kernel, op, raw, wide

LOW = 0xFFFFFFFF


def draw(device: torch.device) -> Tensor:
    """A seed for one use of dropout (int64, 1), from the device's default generator."""
    return drawn(lambda: torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device))


def bits(n: int, seed: Tensor) -> Tensor:
    """16 random bits for each of n elements, as int64."""
    a = torch.arange(-(-n // 8), device=seed.device)
    a, b, c, d = a & LOW, a >> 32, torch.zeros_like(a), torch.zeros_like(a)
    k, l = seed & LOW, (seed >> 32) & LOW
    for _ in range(7):
        p, q = multiply(0xD2511F53, a), multiply(0xCD9E8D57, c)
        a, b, c, d = q[0] ^ b ^ k, q[1], p[0] ^ d ^ l, p[1]
        k, l = (k + 0x9E3779B9) & LOW, (l + 0xBB67AE85) & LOW
    words = torch.stack((a, b, c, d), 1)
    return torch.stack((words & 0xFFFF, words >> 16), 2).flatten()[:n]


def multiply(m: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of m * x, in halves, because int64 is signed."""
    low, high = (x & 0xFFFF) * m, (x >> 16) * m
    high += low >> 16
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def kept(shape: torch.Size, seed: Tensor, p: float, kernel: str = "dropout") -> Tensor:
    """The mask itself (bool). `kernel`: of which a wrong seed is told."""
    expect(kernel, "seed", seed, (1,), SEED)
    return bits(shape.numel(), seed).view(shape) >= threshold(p)


def share(p: float) -> bool:
    """Whether `p` is a probability: kernels take nothing else, and `threshold` refuses it."""
    return 0 <= p <= 1


def threshold(p: float) -> int:
    """How many of 65536 values are dropped."""
    if not share(p):
        raise ValueError(f"dropout of {p}: wanted 0 to 1")
    return int(p * 65536 + 0.5)


def factor(p: float) -> float:
    """The factor for elements that are kept."""
    left = 65536 - threshold(p)
    return 65536 / left if left else 0.0


def dropped(x: Tensor, seed: Tensor, p: float, kernel: str = "dropout") -> Tensor:
    """Dropout alone, in at least fp32."""
    return torch.where(kept(x.shape, seed, p, kernel), wide(x) * factor(p), 0)


def reference(x: Tensor, residual: Tensor | None, seed: Tensor, p: float, kernel: str = "dropout") -> Tensor:
    expect(kernel, "x", x)
    if residual is not None:
        expect(kernel, "residual", residual, x.shape)
    out = dropped(x, seed, p, kernel)
    return out.to(x.dtype) if residual is None else (out + wide(residual)).to(residual.dtype)


@raw("(Tensor x, Tensor? residual, Tensor seed, float p) -> Tensor")
def dropout_forward(x: Tensor, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    x = x.contiguous()
    residual = residual.contiguous() if residual is not None else None
    out = torch.empty_like(x if residual is None else residual)
    call("dropout", x, residual, seed, p, out)
    return out


@raw("(Tensor grad, Tensor seed, float p, ScalarType dtype) -> Tensor")
def dropout_backward(grad: Tensor, seed: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """The gradient of x, in its dtype."""
    out = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
    call("dropout", grad.contiguous(), None, seed, p, out)
    return out


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    x, residual, seed, p = args
    return seed, p, x.dtype, residual is not None


def backward(grad: Tensor, seed: Tensor, p: float, dtype: torch.dtype, residual: bool) -> Sequence[Tensor | None]:
    return dropout_backward(grad, seed, p, dtype), grad if residual else None, None, None


def takes(x: Tensor, residual: Tensor | None, seed: Tensor, p: float) -> bool:
    return share(p)


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (0, 3), (3, 7), (2, 5, 64), (4, 4096)):
        x, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        for p in (0.0, 0.1, 1.0):
            yield x, residual, draw(x.device), p
            yield x, None, draw(x.device), p


dropout = op("dropout", reference, cases, Kernel(dropout_forward, saved, backward, takes=takes))
