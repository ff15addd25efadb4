"""What a query may see: one object, built once per forward and passed down to every attention layer.

Shapes: b batch, h heads, s queries, t keys (earlier ones in the cache included), d head dim, n packed sequences.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops
from ..ops import Op
from ..ops._graph import drawn
from ..ops._mode import exporting, forwards, functional, on_gpu
from ..ops.relative_attention import covers, packed_by, sooner
from .cache import Cache, Fixed
from .onto import onto
from .position import Angles, Distances


@dataclass(frozen=True)
class Ends:
    """Where n sequences end that are laid end to end. `there`: their n + 1 cumulative lengths (int32) on the device; `known`: the
    same on the host, if known there. No sequence is longer than `longest`."""

    there: Tensor
    longest: int
    known: Sequence[int] | None = None

    @classmethod
    def of(cls, known: Sequence[int], device: torch.device, longest: int | None = None) -> "Ends":
        there = onto(torch.tensor(known, dtype=torch.int32, device="cpu"), device)
        return cls(there, max((b - a for a, b in pairwise(known)), default=0) if longest is None else longest, known)

    @cached_property
    def here(self) -> Sequence[int]:
        """The cumulative lengths on the host. If they are not known there, this waits for the GPU, and there can be no CUDA
        graph."""
        return self.there.tolist() if self.known is None else self.known


@dataclass(frozen=True)
class Packing:
    """Sequences laid end to end: where those of the queries end, and those of the keys."""

    q: Ends
    k: Ends

    @classmethod
    def of(cls, q: Sequence[int], k: Sequence[int], device: torch.device) -> "Packing":
        """From n + 1 cumulative lengths of each."""
        return cls(Ends.of(q, device), Ends.of(k, device))

    def spans(self) -> list[tuple[slice, slice]]:
        """The queries and the keys of each sequence."""
        q, k = self.q.here, self.k.here
        return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Both cumulative lengths, on their device."""
        return self.q.there, self.k.there

    @property
    def span(self) -> tuple[int, int]:
        """The largest numbers of queries and of keys in a sequence."""
        return self.q.longest, self.k.longest


class Once:
    """A view that is made when a layer first asks for it, and then kept."""

    def __init__(self, make: "Callable[[], View]"):
        self.make = make
        self.made: View | None = None

    def __call__(self) -> "View":
        if self.made is None:
            self.made = self.make()
        return self.made


@dataclass(frozen=True)
class View:
    """What queries may see: a `mask` (1|b 1|h s t; bool, or an additive bias with -inf where nothing is seen), where keys are
    found, and rotary angles.

    With `packing` each sequence sees only itself. An additive `mask` is then indexed by the position within a sequence, or there is
    one mask for each sequence.
    """

    mask: Tensor | Sequence[Tensor | None] | None = None
    causal: bool = False  # by the kernel's own rule; never together with a mask
    packing: Packing | None = None
    angles: Angles | None = None
    memory: Tensor | None = None  # b t d: cross-attention reads its keys and values here
    cache: Cache | None = None
    distances: Distances | None = None  # a bias in place of a mask, for a kernel of its own
    seen: Tensor | None = None  # b t: with it, the keys that are there
    context: Tensor | None = None  # with `causal`, and `distances` or `masked`: see Batch.context
    masked: Once | None = None  # the same with a mask, where no kernel takes the context as it is
    wanted: Tensor | None = None  # n: the places of b s, counted through, that are read of what the block makes; None: all

    def asked(self, x: Tensor, dtype: torch.dtype, head_dim: int) -> "View | None":
        """The view of only the `wanted` positions of x (b s dim, laid end to end as 1 (b s) dim), n of them in order, as packed
        queries. None if that is impossible: nothing is wanted, what a query sees depends on its position, or no kernel takes such
        heads."""
        seen, placed = self.seen, self.causal or self.distances is not None or self.angles is not None or self.cache is not None
        if self.wanted is None or placed or not covers(x.new_empty((0, 1, 0, head_dim), dtype=dtype)):
            return None
        if self.mask is not None:
            if not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool or self.mask.shape[1:3] != (1, 1):
                return None
            seen = self.mask[:, 0, 0]
        b, s = x.shape[:2]
        if self.packing is None:
            keys, most = Ends(torch.arange(0, b * s + 1, s, dtype=torch.int32, device=x.device), s), s
        else:  # of an empty sequence a head may want the token before it, which is another's
            keys = self.packing.k
            most = keys.longest + len(keys.there)
        ends = torch.searchsorted(self.wanted.contiguous(), keys.there.long(), out_int32=True)
        packing = Packing(Ends(ends, min(most, len(self.wanted))), keys)
        return View(packing=packing, seen=None if seen is None else seen.reshape(1, -1), masked=Once(lambda: self))

    def chosen(self, x: Tensor) -> Tensor:
        """The wanted positions (1 n dim) of x (b s dim). After the last attention no token sees another, so the others can be
        dropped there."""
        return x if self.wanted is None else x.flatten(0, 1).index_select(0, self.wanted)[None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float) -> Tensor:
        """softmax(q k^T scale + mask) v, each of shape b h s|t d. Rows that see nothing give zero. Vaswani et al., 2017."""
        if self.distances is not None:
            return self.by_distance(self.distances, q, k, v, scale, dropout)
        if self.masked is not None:
            if not covers(q) or not q.dtype == k.dtype == v.dtype:
                return self.masked().attend(q, k, v, scale, dropout)
            each = q.size(1) // k.size(1)
            k, v = (x.repeat_interleave(each, 1) if each > 1 else x for x in (k, v))
            return self.by_lengths(q, k, v, scale, dropout)
        mask = self.mask
        if not isinstance(mask, Sequence):
            if self.tiles_pay(q, k, v, dropout):
                return self.tiled(q, k, v, scale, dropout)
            if mask is not None and mask.dtype not in (torch.bool, q.dtype):
                mask = mask.to(q.dtype)
        if self.packing is None and isinstance(self.cache, Fixed) and self.memory is None:
            return self.step(self.cache, q, k, v, scale)
        grouped = bool(q.size(1) != k.size(1))  # to torch.jit's tracer sizes are tensors
        if grouped and q.dtype == torch.float32 and on_gpu(q):  # torch's kernel takes no groups there: all scores would be kept
            k, v, grouped = *(x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v)), False
        if self.packing is None:
            assert not isinstance(mask, Sequence)
            if mask is None and sooner(q, k, v, self.causal, dropout):
                return self.by_lengths(q, k, v, scale, dropout)
            return by_torch(q, k, v, mask, dropout, self.causal, scale, grouped)
        if mask is None:
            road = packed_by(q, k, v, dropout)
            if road == "ours":
                return self.by_lengths(q, k, v, scale, dropout)
            if road == "flash":
                return self.by_flash(q, k, v, scale)
        run = uncompiled if "torch._dynamo" in sys.modules else View.one_by_one
        return run(self, q, k, v, mask, scale, dropout, grouped)

    def one_by_one(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Sequence[Tensor | None] | None, scale: float | None, dropout: float,
        grouped: bool,
    ) -> Tensor:
        """`attend` for the sequences of a packed row one after the other, where no kernel takes them all."""
        assert self.packing is not None
        parts = []
        for i, (at, seen) in enumerate(self.packing.spans()):
            part = mask[i] if isinstance(mask, Sequence) else mask
            if part is not None:
                part = part if part.dtype in (torch.bool, q.dtype) else part.to(q.dtype)
                part = part[..., : at.stop - at.start, : seen.stop - seen.start]
            q_, k_, v_ = q[:, :, at], k[:, :, seen], v[:, :, seen]
            parts.append(by_torch(q_, k_, v_, part, dropout, self.causal, scale, grouped))
        return torch.cat(parts, 2)

    def shown(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, drop: Callable[[Tensor], Tensor]) -> Tensor:
        """`attend`, where `drop` is called with the probabilities (b h s t). No kernel returns them, but attending to a unit matrix
        does, to as many of its columns at a time as a head has."""
        (heads, t, d), each = k.shape[1:], q.size(1) // k.size(1)
        unit = torch.eye(t, -(-t // d) * d, dtype=v.dtype, device=v.device).expand(len(v), heads, -1, -1)
        parts = [self.attend(q, k, columns, scale, 0.0) for columns in unit.split(d, -1)]
        return drop(torch.cat(parts, -1)[..., :t]) @ v.repeat_interleave(each, 1)

    @property
    def lengths(self) -> tuple[Tensor | None, Tensor | None]:
        """The cumulative lengths of the packing, on the device; None without one."""
        return (None, None) if self.packing is None else self.packing.ends

    def by_ours(self, op: Op, given: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float) -> Tensor:
        """`attend` with one of our ops, which takes b s h d as the projections leave it, and after the values the `given`
        arguments."""
        seed = ops.draw(q.device) if dropout else None
        scale = q.size(-1) ** -0.5 if scale is None else scale
        out: Tensor = op(*(x.transpose(1, 2) for x in (q, k, v)), *given, scale, self.causal, seed, dropout)
        return out.transpose(1, 2)

    def by_distance(self, bias: Distances, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float) -> Tensor:
        """`attend` with a bias by distance, without expanding it into a mask."""
        given = (bias.vector, self.seen, *self.lengths, self.context, bias.queries, bias.keys, bias.prompt, bias.reach)
        return self.by_ours(ops.relative_attention, given, q, k, v, scale, dropout)

    def by_lengths(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float) -> Tensor:
        """`attend` for all sequences of a packed row, or for a context that all tokens see, in one of our kernels."""
        span = (q.size(2), k.size(2)) if self.packing is None else self.packing.span
        given = (None, self.seen, *self.lengths, self.context, *span, 0, 0)
        return self.by_ours(ops.relative_attention, given, q, k, v, scale, dropout)

    def by_flash(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """`attend` by torch's flash attention, without dropout. If there are fewer heads of keys than of queries, nothing is
        copied."""
        assert self.packing is not None
        turned = (x[0].transpose(0, 1) for x in (q, k, v))
        given = (*self.packing.ends, *self.packing.span)
        found = torch.ops.aten._flash_attention_forward(*turned, *given, 0.0, self.causal, False, scale=scale)
        out: Tensor = found[0]
        return out[None].transpose(1, 2)

    def step(self, cache: Fixed, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """`attend` of one query (b h 1 d) for each row to a cache of fixed shape: to the keys that it counts, or to those that the
        mask shows. Heads that share their keys become queries of one head, which every kernel can do."""
        if self.mask is None:
            flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            counted = (cache.rows, cache.bounds, 1, cache.span, 0.0, False, False)
            found = torch.ops.aten._flash_attention_forward(*flat, *counted, scale=scale, seqused_k=cache.used)
            out: Tensor = found[0]
            return out[:, None].transpose(1, 2)
        assert isinstance(self.mask, Tensor)
        b, h, _, d = q.shape
        heads = k.size(1)
        mask = self.mask if self.mask.size(1) == 1 else self.mask.view(-1, heads, h // heads, cache.span)
        q, k, v = q.reshape(b, heads, h // heads, d), k[:, :, : cache.span], v[:, :, : cache.span]
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).reshape(b, h, 1, d)

    def tiled(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float) -> Tensor:
        """`attend` by our own CPU kernel, which takes the mask. At a rehearsal it stands for torch's, which draws by itself."""
        make = partial(self.by_ours, ops.attention, (self.mask, *self.lengths), q, k, v, scale, dropout)
        return drawn(make) if dropout and on_gpu(q) else make()

    def tiles_pay(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
        """Whether our CPU kernel is there and beats torch's attention. With dropout, or with a gradient in half precision, for
        which torch has no CPU kernel, it takes a quarter of the time or less. Otherwise it pays only if the queries fill a tile;
        what is exported must not ask how many there are."""
        trains = torch.is_grad_enabled() and q.requires_grad
        pays = dropout > 0 or (not exporting() and q.size(2) >= 64) or (trains and q.dtype != torch.float32)
        return pays and q.dtype == k.dtype == v.dtype and ops.attention.fast(q)


# To torch's compiler a call: each batch has sequences of other lengths, and for each it would compile the loop anew. That of
# torch.compiler would import the compiler here, and this one at its first call.
uncompiled = _disable_dynamo(View.one_by_one)


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """torch's attention. If it drops something, a CUDA graph that computes it again must draw the same. Its fused kernels have no
    forward derivatives, and under vmap torch takes them without asking whether the mask, a learned bias, wants a gradient."""
    make = partial(F.scaled_dot_product_attention, q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    biased = mask is not None and mask.is_floating_point()
    if forwards() or (biased and functional()):
        with sdpa_kernel(SDPBackend.MATH):
            return make()
    return drawn(make) if dropout else make()


def merge(
    queries: int, keys: int, device: torch.device, *, causal: bool, real: Tensor | None, bias: Tensor | None,
    context: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """One mask out of causality, the `real` keys (b t), the `context` (b 1: how many first keys of each row are seen despite
    causality) and an additive `bias`; and whether causality is left to the kernel's own rule.

    Queries are the last `queries` of the `keys` positions. If there is nothing to hide there is no mask, so that the fastest kernel
    applies.
    """
    if real is None and bias is None and context is None:
        if queries == keys or not causal:
            return None, causal
        if queries == 1:
            return None, False
    seen: Tensor | None = None
    if causal and queries > 1:
        at = torch.arange(keys, device=device)
        seen = at[None, :] <= at[keys - queries :, None]
        seen = seen[None, None]
        if context is not None:
            seen = seen | (at < context[:, :, None, None])
    if real is not None:
        seen = real[:, None, None, :] if seen is None else seen & real[:, None, None, :]
    if bias is None or seen is None:
        return (seen if bias is None else bias), False
    return torch.where(seen, bias, float("-inf")), False
