"""Rotary position: rotate pairs of channels by the position's angles. Su et al., 2021 (RoFormer), section 3.4.

`cos` and `sin` hold one angle a pair (b 1 s r/2, at least fp32); the first r of d channels rotate, the rest pass. Pairs are
(i, i + r/2) in the half layout (LLaMA) and (2i, 2i + 1) in the interleaved one (GPT-J).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._op import op, wide


def reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.size(-1)
    turn, rest = wide(x[..., : 2 * pairs]), x[..., 2 * pairs :]
    if interleaved:
        a, b = turn[..., 0::2], turn[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turn[..., :pairs], turn[..., pairs:]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.size(-1) else turned


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for (b, h, s, d), pairs in (((1, 1, 1, 2), 1), ((2, 3, 5, 8), 4), ((2, 3, 5, 8), 2), ((1, 4, 33, 128), 64)):
        angle = torch.rand(b, 1, s, pairs, device=device) * 6
        for interleaved in (False, True):
            yield torch.randn(b, h, s, d, device=device, dtype=dtype), angle.cos(), angle.sin(), interleaved


rotary = op("rotary", reference, cases)
