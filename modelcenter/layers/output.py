"""What a forward was given and what it returns.

Shapes: b batch, s tokens of this forward, t tokens with those already in the cache, n packed sequences.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ..errors import nearest, refuse
from ..ops import _graph
from ..ops._mode import fake
from ..ops.cross_entropy import IGNORE
from .block import Block, pair
from .cache import Cache, Fixed
from .position import Angles, Distances
from .view import Ends, Once, Packing, View, merge


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel may know by itself what a prefix LM's prompt sees."""
    return x.is_cuda


def repeats(x: Tensor) -> bool:
    """Whether attention is asked for by torch.use_deterministic_algorithms: ours is, where torch has kernels that are not."""
    return on_gpu(x) and torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward, brought into one form."""

    x: Tensor  # ids (b s) or vectors ready made (b s dim)
    mask: Tensor | None = None  # b t bool: which tokens are real
    positions: Tensor | None = None  # 1|b s; read `at`, which is never None
    segments: Tensor | None = None  # b s
    packing: Packing | None = None
    cache: Cache | None = None
    labels: Tensor | None = None
    target: "Batch | None" = None  # the decoder's side of an encoder-decoder
    context: Tensor | None = None  # b 1|n int32: so many first tokens of each sequence are seen by all of it, in a prefix LM
    labelled: Tensor | None = None  # which of the labels, counted through, are any; None: not asked
    wanted: Tensor | None = None  # n: the places of b s, counted through, in order, that the head reads, if it reads no others
    prompt: int = 0  # positions before the text, of which the cache's length says nothing
    pad: int | None = None  # the id that pads, for a classifier of texts without a mask

    def prefixed(self, words: Tensor | None) -> "Batch":
        """As a prefix LM reads it: in both directions what stands before the first of the `words` to be predicted (b s), all where
        there are none. What follows a cache is read as ever."""
        if self.cache is not None and self.cache.length:
            return self
        words = torch.full(self.x.shape[:2], IGNORE, device=self.x.device) if words is None else words
        return replace(self, context=context_of(words, None if self.packing is None else self.packing.q.there))

    @property
    def past(self) -> int:
        return self.cache.length + self.prompt if self.cache is not None and self.cache.length else 0

    def twice(self) -> "Batch":
        """Every row once more, behind them all."""
        if self.packing is not None or self.cache is not None:
            refuse(None, "loss.r_drop", "packed sequences, or a cache", "a sequence a row: data.padding_free=false")
        rows = {name: getattr(self, name) for name in ("x", "mask", "positions", "segments", "labels", "context")}
        whole = {name: value for name, value in rows.items() if value is not None and value.size(0) == self.x.size(0)}
        doubled: dict[str, Any] = {name: torch.cat((value, value)) for name, value in whole.items()}
        return replace(self, **doubled)

    def whole(self, x: Tensor) -> Tensor | None:
        """Hidden states of every place (b s dim); None for those of what is `wanted` alone (1 n dim)."""
        every = (self.target or self).x
        return None if self.wanted is not None and x.size(0) * x.size(1) < every.size(0) * every.size(1) else x

    @property
    def queries(self) -> int:
        return self.x.size(1)

    @property
    def keys(self) -> int:
        return self.past + self.queries

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.packing.longest if self.packing is not None else self.keys

    @property
    def decoder(self) -> "Batch":
        """The decoder's side, which every batch of an encoder-decoder has."""
        assert self.target is not None
        return self.target

    @property
    def memory(self) -> Tensor | None:
        """The encoder's output, where an earlier step has left it in the cache."""
        return None if self.cache is None else self.cache.memory

    def remember(self, memory: Tensor) -> Tensor:
        """Leave the encoder's output in the cache, if there is one."""
        if self.cache is not None:
            self.cache.memory = memory
        return memory

    @property
    def span(self) -> tuple[int, int]:
        """Queries and keys of the longest sequence, which a bias covers."""
        return (self.queries, self.keys) if self.packing is None else (self.longest, self.longest)

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
        """Self-attention over these tokens; `bias` (1|b h s|1 t) of the longest sequence where they are packed."""
        if isinstance(self.cache, Fixed):
            return self.step(self.cache, bias, angles)
        if causal and (packing := self.restarts()) is not None:
            return replace(self, packing=packing).view(causal=True, bias=bias, angles=angles)
        if isinstance(bias, Distances):
            if bias.served:
                open_ = self.context if causal else None
                return View(None, causal, self.packing, angles, None, self.cache, bias, self.mask, open_)
            bias = bias.spread()
        context = self.context if causal else None
        if bias is None and (repeats(self.x) or (context is not None and on_gpu(self.x))):
            masked = Once(partial(self.masked, causal, bias, angles))
            return View(None, causal, self.packing, angles, None, self.cache, None, self.mask, context, masked)
        return self.masked(causal, bias, angles)

    def restarts(self) -> Packing | None:
        """The sequences of a row whose positions begin anew at 0, where nothing else says what it holds: transformers' models read
        them so in training, and DataCollatorWithFlattening says no more. A device is waited for; what is compiled is not asked."""
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
        """The same by a mask, where there is anything to hide that a kernel has no rule for."""
        merged = partial(merge, *self.span, self.x.device, causal=causal, bias=bias)
        if self.packing is None:
            mask, rule = merged(real=self.mask, context=self.context if causal else None)
        elif self.context is None or not causal:
            mask, rule = merged(real=None)
        else:
            known = self.context[0].tolist()
            masks = {n: merged(real=None, context=torch.full((1, 1), n, device=self.x.device))[0] for n in set(known)}
            return View([masks[n] for n in known], False, self.packing, angles, cache=self.cache)
        return View(mask, rule, self.packing, angles, cache=self.cache)

    def step(self, cache: Fixed, bias: Tensor | Distances | None, angles: Angles | None) -> View:
        """Self-attention of one token to what is there in a cache of fixed shape. Where nothing but that is hidden a kernel that
        counts the keys needs no mask."""
        if bias is None and self.mask is None and cache.counted:
            return View(None, False, None, angles, cache=cache)
        if isinstance(bias, Distances):
            bias = bias.row(cache.at)
        real = cache.there if self.mask is None else self.mask & cache.there
        mask, _ = merge(1, self.keys, self.x.device, causal=False, real=real, bias=bias)
        assert mask is not None
        return View(cache.additive(mask), False, None, angles, cache=cache)

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


KEYS = ("loss", "logits", "last_hidden_state", "hidden_states", "past_key_values", "pooler_output", "embeddings", "start_logits",
        "end_logits")  # fmt: skip


class Output(dict[Any, Any]):
    """What a forward returns: a mapping whose keys are attributes too and, as in transformers, an index counts what is not None.

    Keys: loss, logits, last_hidden_state, hidden_states, past_key_values, and what a head adds: pooler_output, embeddings,
    start_logits, end_logits. One that this forward does not have is not among the items, and None when asked for by name. An
    attribute of any other name is an `AttributeError`. `Model.forward` gives the shapes.
    """

    def __init__(self, *found: Any, **more: Any):
        super().__init__({key: value for key, value in dict(*found, **more).items() if value is not None})

    def __missing__(self, key: str) -> None:
        if key not in KEYS:
            raise KeyError(key)

    def __getattr__(self, name: str) -> Any:
        if name not in KEYS and name not in self:
            raise AttributeError(f"Output has no {name}; {nearest(name, KEYS)}", name=name, obj=self)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.keys()))

    def to_tuple(self) -> tuple[Any, ...]:
        """What is not None, in order."""
        return tuple(self.values())


def put_back(values: Any, keys: Any) -> Output:
    """What torch has taken apart, with whatever it has put in place of the values."""
    out = Output()
    out.update(zip(keys, values, strict=True))
    return out


# FSDP and DDP look for the tensors inside what a module returns.
_pytree.register_pytree_node(
    Output,
    lambda out: (list(out.values()), list(out.keys())),
    put_back,
    serialized_type_name="modelcenter.Output",
)


def batch_of(
    x: Tensor | None,
    mask: Tensor | None,
    positions: Tensor | None,
    segments: Tensor | None,
    labels: Tensor | None,
    target: Tensor | None,
    target_mask: Tensor | None,
    lengths_q: Tensor | None,
    lengths_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    cache: Cache | None,
    encoder_decoder: bool,
) -> Batch:
    """A model's arguments as a `Batch`; see `Model.forward`."""
    if lengths_q is None and lengths_k is not None:
        refuse(None, "cu_seq_lens_k", "given without cu_seq_lens_q", "both, or cu_seq_lens_q alone")
    if encoder_decoder and target is None:
        refuse(None, "decoder_input_ids", "missing", "decoder_input_ids (b s), or labels to make them of")
    read = x if x is not None else cache.memory if cache is not None and encoder_decoder else None
    if read is None:
        refuse(None, "input_ids", "missing", "token ids (b s), or inputs_embeds (b s dim)")
    q = ends_of(lengths_q, longest_q, read if target is None or not encoder_decoder else target, "q")
    if lengths_k is None:
        lengths_k, longest_k = lengths_q, longest_q
    k = ends_of(lengths_k, longest_k, read, "k")
    packing, side = None if q is None or k is None else Packing(k if encoder_decoder else q, k), None
    if encoder_decoder and target is not None:
        mask_of_target = boolean(target_mask, target, 0 if cache is None else cache.length, "decoder_attention_mask")
        side = Batch(target, mask_of_target, packing=None if q is None else Packing(q, q), cache=cache)
        cache = None  # the decoder's alone
    x = torch.empty(0, 0) if x is None else x
    real = boolean(mask, read, 0 if cache is None else cache.length, "attention_mask")
    return Batch(x, real, positions, segments, packing, cache, labels, side)


def context_of(labels: Tensor, ends: Tensor | None = None) -> Tensor:
    """How many tokens stand before the first label of each sequence (b 1 int32), or of packed ones, by their `ends` (1 n). The very
    first label is nobody's target: whether it is set says nothing."""
    ends = torch.arange(2, device=labels.device) * labels.size(1) if ends is None else ends.long()
    found = torch.nn.functional.pad(labels != IGNORE, (1, 1)).index_fill(1, ends[:-1] + 1, False).cumsum(1)
    first = torch.searchsorted(found, found[:, ends[:-1]].contiguous(), right=True) - 1
    return (torch.minimum(first, ends[1:]) - ends[:-1]).to(torch.int32)


def shift_right(labels: Tensor, lengths: Tensor | None, start: int, pad: int) -> Tensor:
    """What a decoder reads to write `labels` (b s): these one to the right, `start` first in each sequence, `pad` for -100.

    `lengths`: n + 1 cumulative lengths where sequences are packed into one row.
    """
    ids = torch.nn.functional.pad(labels, (1, 0), value=start)
    if lengths is not None:  # where one ends the next begins
        ids.index_fill_(1, lengths.to(labels.device).long().clamp(0, labels.size(1)), start)
    ids = ids[:, :-1]
    return ids.masked_fill(ids == IGNORE, pad)


def check_tokens(ids: Any, name: str) -> None:
    """Refuse what are no ids (b s); that a table holds them is not looked at, which would wait for a GPU."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        found = f"of {str(ids.dtype).removeprefix('torch.')}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        refuse(None, name, found, "a tensor of whole numbers (batch, tokens), as a tokenizer gives")
    if ids.dim() != 2:
        refuse(None, name, f"shape {list(ids.shape)}", "(batch, tokens)")


def boolean(mask: Tensor | None, x: Tensor, past: int, name: str) -> Tensor | None:
    """A mask (b t) of `x` (b s, b s dim) behind `past` tokens, as bools. Of another shape it might be broadcast: refused."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        found = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        refuse(None, name, found, "a tensor of 2 (batch, tokens): 1 where a token is real, 0 where it pads")
    if mask.shape != (x.size(0), past + x.size(1)):  # not `len`, which an exported program would keep as a number
        after = f" behind {past} in the cache, which count too" if past else ""
        wanted = f"{[len(x), past + x.size(1)]}, as {x.size(1)} tokens a row are there{after}"
        refuse(None, name, f"shape {list(mask.shape)}", wanted)
    known = type(mask) is Tensor and not (mask.is_meta or torch.compiler.is_compiling() or _graph.recording())
    if known and mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        # one that is made to be added to scores has 0 where a token is real: it would hide those and show the others
        refuse(None, name, "numbers other than 0 and 1", "1 where a token is real, 0 where it pads")
    return mask.bool()


def ends_of(lengths: Tensor | None, longest: int | None, x: Tensor, side: str) -> Ends | None:
    """Where the sequences of `side` (q or k) end that x (1 s) holds, by their n + 1 cumulative lengths; none is longer than
    `longest`, if that is given. What is recorded as a CUDA graph is taken as it is said."""
    if lengths is None:
        return None
    most = None if longest is None else min(longest, x.size(1))
    if most is not None and _graph.recording():
        return Ends(lengths, most)
    known = lengths.tolist()
    check_packing(known, x, f"cu_seq_lens_{side}")
    ends = Ends.of(known, x.device)
    if most is not None and most < ends.longest:
        refuse(None, f"max_length_{side}", str(most), f"at least the longest sequence of cu_seq_lens_{side}, {ends.longest}")
    return ends if most is None else replace(ends, longest=most)


def check_packing(lengths: Sequence[int], x: Tensor, name: str) -> None:
    if len(x) != 1 or lengths[0] != 0 or lengths[-1] != x.size(1) or any(a > b for a, b in pairwise(lengths)):
        found = f"{list(lengths[:4])}... for input of shape {list(x.shape)}"
        refuse(None, name, found, "one row, and cumulative lengths from 0 to its number of tokens")


@contextmanager
def recorded(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """The input of every block, in order, while the context lasts (an encoder-decoder's decoder only)."""
    trace: list[Tensor] = []
    stack = getattr(model, "decoder", None) or getattr(model, "encoder", None)
    blocks = [m for m in (stack.modules() if isinstance(stack, nn.Module) else []) if isinstance(m, Block)] if wanted else []

    def see(block: nn.Module, args: tuple[Any, ...]) -> None:
        x, _ = pair(args[0])
        trace.append(x.full_tensor() if hasattr(x, "full_tensor") else x)  # ranks may have parts

    hooks = [b.register_forward_pre_hook(see) for b in blocks]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
