"""The arguments of a forward, in one form.

Shapes: b batch, s tokens of this forward, t tokens with those already in the cache, n packed sequences.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import refuse
from ..ops._mode import fake, on_gpu
from ..ops.cross_entropy import IGNORE
from .cache import Cache, Fixed
from .position import Angles, Distances
from .view import Ends, Once, Packing, View, merge


def repeats(x: Tensor) -> bool:
    """Whether attention must be deterministic (torch.use_deterministic_algorithms). Our kernels are; some of torch's are not."""
    return on_gpu(x) and torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward, brought into one form."""

    x: Tensor  # ids (b s) or vectors ready made (b s dim)
    mask: Tensor | None = None  # b t bool: which tokens are real
    positions: Tensor | None = None  # 1|b s, where the caller gave them; read `at` instead, which is never None
    segments: Tensor | None = None  # b s
    packing: Packing | None = None
    cache: Cache | None = None
    labels: Tensor | None = None
    target: "Batch | None" = None  # the decoder's side of an encoder-decoder
    context: Tensor | None = None  # b 1|n int32: of a prefix LM, how many first tokens of each sequence all its tokens see
    labelled: Tensor | None = None  # indices into the flattened labels of those that are not ignored; None: not known yet
    wanted: Tensor | None = None  # n: ascending indices into the flattened b s of the places the head reads; None: all
    prompt: int = 0  # positions before the text that the cache's length does not count
    pad: int | None = None  # the id of padding, for a classifier that is given no mask

    def prefixed(self, words: Tensor | None) -> "Batch":
        """The batch as a prefix LM reads it: tokens before the first label in `words` (b s) see each other in both directions.
        Without `words` all tokens do. Tokens that follow a filled cache are read causally, as in any model."""
        if self.cache is not None and self.cache.length:
            return self
        words = torch.full(self.x.shape[:2], IGNORE, device=self.x.device) if words is None else words
        return replace(self, context=context_of(words, self.packing))

    @property
    def past(self) -> int:
        """Positions before this forward's first token."""
        return self.cache.length + self.prompt if self.cache is not None and self.cache.length else 0

    def twice(self) -> "Batch":
        """The batch with all its rows repeated behind them."""
        if self.packing is not None or self.cache is not None:
            refuse(None, "loss.r_drop", "packed sequences, or a cache", "a sequence a row: data.padding_free=false")
        rows = {name: getattr(self, name) for name in ("x", "mask", "positions", "segments", "labels", "context")}
        whole = {name: value for name, value in rows.items() if value is not None and value.size(0) == self.x.size(0)}
        doubled: dict[str, Any] = {name: torch.cat((value, value)) for name, value in whole.items()}
        return replace(self, **doubled)

    def whole(self, x: Tensor) -> Tensor | None:
        """`x` if it holds the hidden states of every position (b s dim); None if only those of the `wanted` ones (1 n dim)."""
        every = (self.target or self).x
        return None if self.wanted is not None and x.size(0) * x.size(1) < every.size(0) * every.size(1) else x

    @property
    def queries(self) -> int:
        """Tokens of this forward."""
        return self.x.size(1)

    @property
    def keys(self) -> int:
        """Tokens of this forward and those before it."""
        return self.past + self.queries

    @property
    def decoder(self) -> "Batch":
        """The decoder's side, which every batch of an encoder-decoder has."""
        assert self.target is not None
        return self.target

    @property
    def memory(self) -> Tensor | None:
        """The encoder's output, if an earlier step has left it in the cache."""
        return None if self.cache is None else self.cache.memory

    def remember(self, memory: Tensor) -> Tensor:
        """Leave the encoder's output in the cache, if there is one."""
        if self.cache is not None:
            self.cache.memory = memory
        return memory

    @property
    def span(self) -> tuple[int, int]:
        """The numbers of queries and keys that a bias must cover: those of the longest sequence."""
        if self.packing is None:
            return self.queries, self.keys
        longest = self.packing.k.longest
        return longest, longest

    @property
    def at(self) -> Tensor:
        """The position of every token within its sequence (1|b s)."""
        if self.positions is not None:
            return self.positions
        if self.packing is None:
            return torch.arange(self.past, self.keys, device=self.x.device)[None]
        ends, at = self.packing.q.there, torch.arange(self.queries, device=self.x.device, dtype=torch.int32)
        return (at - ends[torch.searchsorted(ends, at, right=True) - 1])[None].long()

    def view(self, *, causal: bool = False, bias: Tensor | Distances | None = None, angles: Angles | None = None) -> View:
        """What self-attention over these tokens may see. `bias` (1|b h s|1 t): that of the longest sequence, if packed."""
        if isinstance(self.cache, Fixed):
            return self.step(self.cache, bias, angles)
        if causal and (packing := self.restarts()) is not None:
            return replace(self, packing=packing).view(causal=True, bias=bias, angles=angles)
        context = self.context if causal else None
        view = partial(View, None, causal, self.packing, angles, cache=self.cache, seen=self.mask, context=context)
        if isinstance(bias, Distances):
            if bias.served:
                return view(distances=bias)
            bias = bias.spread()
        if bias is None and (repeats(self.x) or (context is not None and on_gpu(self.x))):
            return view(masked=Once(partial(self.masked, causal, bias, angles)))
        return self.masked(causal, bias, angles)

    def restarts(self) -> Packing | None:
        """The sequences of a row in which positions restart at 0, if nothing else says what the row holds. In training
        transformers' models read such rows in this way, and DataCollatorWithFlattening gives no other information. This waits for
        the device; in compiled code positions are not looked at."""
        at = self.positions
        if at is None or at.is_meta or fake(at) or torch.compiler.is_compiling():
            return None
        told = self.mask is not None or self.packing is not None or self.cache is not None or self.prompt > 0
        begins = [] if told else (at[:, 1:] == 0).nonzero()[:, 1].tolist()
        if not begins:
            return None
        if self.x.size(0) > 1:
            found = f"begin anew within rows of a batch of {self.x.size(0)}"
            refuse(None, "position_ids", found, "all sequences in one row, or an attention_mask, which says that a row is one")
        bounds = [0, *(place + 1 for place in begins), self.queries]
        ends = Ends.of(bounds, self.x.device, self.queries)  # as long as a bias, which was made for the row
        return Packing(ends, ends)

    def masked(self, causal: bool, bias: Tensor | None, angles: Angles | None) -> View:
        """The same as an explicit mask, if something must be hidden for which the kernels have no rule."""
        merged = partial(merge, *self.span, self.x.device, causal=causal, bias=bias)
        if self.packing is None:
            mask, rule = merged(real=self.mask, context=self.context if causal else None)
        elif self.context is None or not causal:
            mask, rule = merged(real=None)
        else:
            known = self.context[0].tolist()
            masks = {n: merged(real=None, context=torch.full((1, 1), n, device=self.x.device))[0] for n in set(known)}
            return View([masks[n] for n in known], packing=self.packing, angles=angles, cache=self.cache)
        return View(mask, rule, self.packing, angles, cache=self.cache)

    def step(self, cache: Fixed, bias: Tensor | Distances | None, angles: Angles | None) -> View:
        """What one token may see of a cache of fixed shape: the places that are filled. If nothing else is hidden, and the kernel
        counts the keys itself, no mask is made."""
        if bias is None and self.mask is None and cache.counted:
            return View(angles=angles, cache=cache)
        if isinstance(bias, Distances):
            bias = bias.row(cache.at)
        real = cache.there if self.mask is None else self.mask & cache.there
        mask, _ = merge(1, self.keys, self.x.device, causal=False, real=real, bias=bias)
        assert mask is not None
        return View(cache.additive(mask), angles=angles, cache=cache)

    def across(self, memory: Tensor, source: "Batch") -> View:
        """Cross-attention from these tokens to `memory` (b t dim), the encoder's output for `source`."""
        packing = None
        if self.packing is not None and source.packing is not None:
            packing = Packing(self.packing.q, source.packing.k)
        mask = None if source.mask is None else source.mask[:, None, None, :]
        view = View(mask, packing=packing, memory=memory, cache=self.cache)
        if not repeats(memory) or isinstance(self.cache, Fixed):
            return view
        return View(packing=packing, memory=memory, cache=self.cache, seen=source.mask, masked=Once(lambda: view))


def context_of(labels: Tensor, packing: Packing | None = None) -> Tensor:
    """How many tokens stand before the first label of each sequence: (b 1) int32, or (1 n) of packed sequences. A sequence's very
    first label is ignored, since no token predicts it."""
    ends = torch.arange(2, device=labels.device) * labels.size(1) if packing is None else packing.q.there.long()
    found = torch.nn.functional.pad(labels != IGNORE, (1, 1)).index_fill(1, ends[:-1] + 1, False).cumsum(1)
    first = torch.searchsorted(found, found[:, ends[:-1]].contiguous(), right=True) - 1
    return (torch.minimum(first, ends[1:]) - ends[:-1]).to(torch.int32)
