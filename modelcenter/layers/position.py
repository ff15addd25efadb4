"""The ways in which attention knows about positions: rotary angles, learned distance buckets, segments, and linear slopes.

Shapes: b batch, s queries, t keys, h heads, d head dim, r rotated channels.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import refuse
from ..ops._graph import recording
from ..ops._mode import autocast_dtype, plain
from ..ops._op import wide
from ..ops.relative_attention import relative_attention, spread
from ..ops.rotary import rotary_
from .embedding import read
from .onto import kept, onto
from .rope import Plain


@dataclass(frozen=True)
class Angles:
    """The rotation of every position: `cos`, `sin` of shape 1|b s 1 r/2."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rotate(self, x: Tensor, *, spare: bool = False) -> Tensor:
        """Rotate the first r channels of x (b s h d). `spare`: x is not used again, so the result may reuse its memory."""
        turned: Tensor = (rotary_ if spare else ops.rotary)(x, self.cos, self.sin, self.interleaved)
        return turned


class Rotary(nn.Module):
    """Rotary positions (Su et al., 2021). `frequencies` gives the frequency of each pair of channels; a scaling of the positions is
    another such function."""

    def __init__(self, channels: int, frequencies: Plain, *, interleaved: bool = False):
        super().__init__()
        self.channels, self.frequencies, self.interleaved = channels, frequencies, interleaved
        self.known: dict[tuple[torch.device, torch.dtype], tuple[Tensor, float]] = {}  # no buffer: it is no part of a checkpoint

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """The angles at `positions` (1|b s); at least fp32, whatever the model's `dtype`."""
        kind = torch.promote_types(dtype, torch.float32)
        frequencies, factor = self.turning(positions, kind)
        angle = positions[:, :, None, None].to(kind) * frequencies
        return Angles(angle.cos() * factor, angle.sin() * factor, self.interleaved)

    def turning(self, positions: Tensor, kind: torch.dtype) -> tuple[Tensor, float]:
        """The frequencies in `kind` on the device of the positions, and the factor. Frequencies that do not depend on the length
        are copied there once, so that a forward, above all one of a single token, does not wait for a copy."""
        by_length, place = self.frequencies.by_length, (positions.device, kind)
        # what a compiler or a dispatch mode sees is not what others may have, nor the other way round
        kept = not by_length and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
        if kept and place in self.known:
            return self.known[place]
        # real tokens, for padding does not lengthen a text; read only where it counts, because a device must be waited for
        length = int(positions.max()) + 1 if by_length and not positions.is_meta else 0
        frequencies, factor = self.frequencies(self.channels, length)
        found = onto(frequencies.to(kind), positions.device), factor
        if kept:
            self.known[place] = found
        return found


@dataclass(frozen=True)
class Distances:
    """A bias that depends only on key - query. `vector` (h by queries + keys - 1) starts with the key furthest behind, and is at
    least fp32. `served`: there is a kernel that takes it in this form. With a `prompt`, the number of positions of a first segment,
    `vector` has two more entries: for a query in the prompt and a key in the rest, and the other way round. From the distance
    `reach` on, in either direction, all entries are equal (0: no such distance)."""

    vector: Tensor
    queries: int
    keys: int
    served: bool
    prompt: int = 0
    reach: int = 0

    def spread(self) -> Tensor:
        """The bias (1 h s t) of the last `queries` of `keys` positions as a mask, made once for all layers."""
        return spread(self.vector, self.queries, self.keys, self.keys, self.prompt)[None].contiguous()

    def row(self, at: Tensor) -> Tensor:
        """The bias (1 h 1 t) of one query at the position `at` (1, on the device), after the prompt. Its values for keys beyond the
        query are meaningless."""
        key = torch.arange(self.keys, device=at.device)
        found = self.vector[:, (key - at + self.keys - 1).clamp(max=self.keys - 1)]
        if self.prompt:
            found = torch.where(key < self.prompt, self.vector[:, -1:], found)
        return found[None, :, None]


def served(vector: Tensor, kind: torch.dtype) -> bool:
    """Whether there is a kernel for attention with distances in the dtype `kind`, or in autocast's, on the device of `vector`.
    Under tensor parallelism there is none for a table that is a DTensor."""
    low = (autocast_dtype(vector.device) or kind) in (torch.float16, torch.bfloat16)
    return low and plain(vector) and relative_attention.fast(vector)


class RelativeBias(nn.Module):
    """T5's learned bias per head over log-spaced buckets of the key-query distance. Raffel et al., 2019, section 2.1."""

    tp = {"table": "heads"}

    def __init__(self, heads: int, buckets: int, max_distance: int, *, bidirectional: bool):
        super().__init__()
        exact = buckets // (4 if bidirectional else 2)  # distances with a bucket of their own
        if not 0 < exact < max_distance:
            wanted = f"more than {exact}, which have a bucket each" if exact else "4 buckets at least"
            refuse(None, "max_distance", f"{max_distance} in {buckets} buckets", wanted)
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.table = nn.Embedding(buckets, heads)

    def forward(self, queries: int, keys: int) -> Distances:
        """The bias of the last `queries` of `keys` positions."""
        return self.of(self.bucket(torch.arange(1 - keys, queries, device=self.table.weight.device)), queries, keys)

    def of(self, rows: Tensor, queries: int, keys: int, prompt: int = 0) -> Distances:
        """Those rows of the table, one for each distance and, with a prompt, two more."""
        vector = wide(read(self.table, rows).t()).contiguous()
        return Distances(vector, queries, keys, served(vector, self.table.weight.dtype), prompt, self.max_distance)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each key - query distance: half of them exact, the others growing with the logarithm."""
        n, base = self.buckets, torch.zeros_like(distance)
        if self.bidirectional:
            n //= 2
            base, distance = (distance > 0) * n, distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = n // 2
        log = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        return base + torch.where(distance < exact, distance, (exact + (log * (n - exact)).long()).clamp(max=n - 1))


class SegmentBias(RelativeBias):
    """CPM-Ant's relative bias: distance buckets within a segment, and one learned bias for each ordered pair of segments."""

    def __init__(self, heads: int, buckets: int, max_distance: int, *, segments: int):
        super().__init__(heads, buckets, max_distance, bidirectional=True)
        self.segments = segments
        self.table = nn.Embedding(segments * segments + buckets, heads)

    def forward(self, queries: int, keys: int, *, prompt: int, pair: tuple[int, int]) -> Distances:  # type: ignore[override]  # segments
        """The bias of the last `queries` of `keys` positions, of which the first `prompt` are one segment of `pair`, the rest the
        other."""
        distance = torch.arange(1 - keys, queries, device=self.table.weight.device)
        a, b = pair
        there, back = self.buckets + a * self.segments + b, self.buckets + b * self.segments + a
        across = torch.arange(2, device=distance.device) * (back - there) + there  # made there: nothing is brought from the host
        return self.of(torch.cat((self.bucket(distance), across)), queries, keys, prompt)


class ALiBi(nn.Module):
    """A fixed slope per head times the distance. Press et al., 2021. As a mask it is the slope times the key's position: a softmax
    does not see what is constant along a row, so one row is enough in place of s."""

    tp = {"slopes": "heads"}

    def __init__(self, heads: int):
        super().__init__()
        self.slopes = self.geometric(heads)  # no buffer: a model built on the meta device would lose its values
        self.known: dict[Any, Tensor] = {}  # the same on a GPU

    @staticmethod
    def geometric(heads: int) -> Tensor:
        """2^(-8 i / n) for the nearest power of two n below; the other heads take every second slope of 2n (the authors' code)."""
        n = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
        slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
        return torch.tensor(slopes, dtype=torch.float32, device="cpu")

    def forward(self, queries: int, keys: int, like: Tensor, real: Tensor | None = None) -> Tensor | Distances:
        """The bias of the last `queries` of `keys` positions, on the device of `like`: as a mask (1|b h 1 t) in its dtype. What
        is hidden between `real` keys (b t) is no distance, as in transformers; see `gaps`."""
        kind = torch.promote_types(like.dtype, torch.float32)
        slopes = kept(self.known, self.slopes.shape, lambda: self.slopes, like.device, kind)[:, None]
        if served(like, like.dtype) and (real is None or (queries > 1 and not gaps(real))):  # one query's mask is a row
            return Distances(slopes * torch.arange(1 - keys, queries, device=like.device, dtype=kind), queries, keys, True)
        at = torch.arange(keys, device=like.device)[None] if real is None else real.cumsum(1) - 1
        return (slopes * at[:, None].to(kind))[:, :, None].to(like.dtype)


def gaps(real: Tensor) -> bool:
    """Whether a row of `real` (b t) has padding between tokens. Finding out means waiting for the device, so in training, and where
    values cannot be read, no gaps are assumed."""
    known = type(real) is Tensor and not (real.is_meta or torch.compiler.is_compiling() or recording())
    if not known or torch.is_grad_enabled():
        return False
    begins = real[:, 1:] & ~real[:, :-1]
    return bool((begins.sum(1) + real[:, 0] > 1).any())
