"""The cache of keys and values that attention keeps between forwards. b batch, h heads, t tokens so far, d head dim."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refuse
from ..ops._kernels import modern

Pair = tuple[Tensor, Tensor]  # keys and values, b h t d


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, one pair for each attention layer.

    `ahead` is the number of tokens that may follow the first forward. If it is given, each layer's memory is allocated once and
    filled in place. If not, pairs grow by copying, which suits callers that do not know the number or want gradients. `length`: the
    tokens that the model has read so far. `copy.deepcopy` gives a cache with its own tensors, for the same model: so a prompt that
    was read once can be continued in several ways. Errors: `InputError` for more tokens than `ahead`, other rows, or another model.
    """

    length: int = 0
    ahead: int = 0
    pairs: dict[nn.Module, Pair] = field(default_factory=dict)
    across: dict[nn.Module, Pair] = field(default_factory=dict)  # of an encoder's output
    memory: Tensor | None = None  # an encoder's output, kept so that it runs once
    room: dict[nn.Module, Pair] = field(default_factory=dict)  # what `pairs` are the beginnings of

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> Pair:
        """Append `k` and `v` (b h s d) to the layer's pair and return the whole pair (b h t d)."""
        past = self.pairs.get(layer)
        if past is None and self.length:
            refuse(None, "past_key_values", "another model's", "what this very model gave: a copy of a model has layers of its own")
        if past is not None and past[0].size(0) != k.size(0):
            refuse(None, "past_key_values", f"{past[0].size(0)} rows", f"{k.size(0)}, as the input has")
        if not self.ahead:
            self.pairs[layer] = (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
            return self.pairs[layer]
        start = 0 if past is None else past[0].size(2)
        stop = start + k.size(2)
        if past is None:
            self.room[layer] = (taken(k, self.ahead), taken(v, self.ahead))
        room_k, room_v = self.room[layer]
        if stop > room_k.size(2):
            refuse(None, "past_key_values", f"{stop} tokens", f"at most {room_k.size(2)}: the cache has room for no more")
        room_k[:, :, start:stop], room_v[:, :, start:stop] = k, v
        self.pairs[layer] = (room_k[:, :, :stop], room_v[:, :, :stop])
        return self.pairs[layer]

    def repeat(self, n: int) -> None:
        """Repeat every row n times."""
        self.room = {layer: repeated(pair, n) for layer, pair in self.room.items()}
        self.across = {layer: repeated(pair, n) for layer, pair in self.across.items()}
        self.memory = None if self.memory is None else self.memory.repeat_interleave(n, 0)
        for layer, pair in self.pairs.items():
            long = pair[0].size(2)
            k, v = self.room[layer] if layer in self.room else repeated(pair, n)
            self.pairs[layer] = (k[:, :, :long], v[:, :, :long])

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        other = copy(self)
        for name in ("pairs", "across", "room"):  # of a model that is copied beside it they are the copy's
            setattr(other, name, {memo.get(id(layer), layer): pair for layer, pair in getattr(self, name).items()})
        other.repeat(1)
        return other

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was. Rows only change places with rows of the same source, so an encoder's output stays
        where it is."""
        for k, v in self.pairs.values():
            k.copy_(k.index_select(0, rows))
            v.copy_(v.index_select(0, rows))


class Fixed(Cache):
    """A cache with which every step is the same sequence of calls: one token is written to the place `at` (1, on the device) of
    each layer's memory, and the first `span` places are read. So a step can be recorded once and replayed without the host.

    To callers it seems to hold `span` - 1 tokens; places that are not filled yet are hidden (`there`). `used` (b int32) counts the
    keys that are filled, for a kernel that then needs no mask (`counted`). It takes over the memory of `cache`, of which `full`
    places are filled.
    """

    def __init__(self, cache: Cache, full: int, span: int):
        super().__init__(0, 0, cache.pairs, cache.across, cache.memory, cache.room)
        k, _ = next(iter(self.room.values()))
        self.before, self.span, self.dtype = full - cache.length, span, k.dtype
        self.places = torch.arange(span, device=k.device)
        self.at = torch.full((1,), full, device=k.device)
        self.used = torch.full((len(k),), full + 1, dtype=torch.int32, device=k.device)
        self.rows = torch.arange(len(k) + 1, dtype=torch.int32, device=k.device)
        self.bounds = self.rows * k.size(2)  # where a row's keys begin, all rooms being one row
        for pair in self.room.values():
            for x in pair:
                x[:, :, full:] = 0  # hidden is what counts nothing, and nothing times what memory happens to hold may be no number
        self.counted = counts(k)
        self.begin()

    def begin(self) -> None:
        """Before a step: as many tokens as ever."""
        self.length = self.span - 1 - self.before

    def advance(self) -> None:
        """Called after a step: the next one has one more key."""
        self.at += 1
        self.used += 1

    @property
    def there(self) -> Tensor:
        """Which places are filled, including the new token's (1 span)."""
        return (self.places <= self.at)[None]

    def additive(self, mask: Tensor) -> Tensor:
        """`mask` as numbers to add to scores, made once and not in every layer."""
        if mask.dtype != torch.bool:
            return mask.to(self.dtype)
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, float("-inf"))

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> Pair:
        room_k, room_v = self.room[layer]
        room_k.index_copy_(2, self.at, k)
        room_v.index_copy_(2, self.at, v)
        return room_k, room_v

    def reorder(self, rows: Tensor) -> None:
        for pair in self.room.values():
            for x in pair:
                x[:, :, : self.span] = x[:, :, : self.span].index_select(0, rows)


def counts(room: Tensor) -> bool:
    """Whether torch's flash attention takes memory like this (b h t d) and a number of keys that is on the device."""
    if not room.is_cuda or room.dtype not in (torch.float16, torch.bfloat16) or not room.transpose(1, 2).is_contiguous():
        return False
    flash = torch.backends.cuda.is_flash_attention_available() and modern(room.get_device())
    return flash and room.size(3) % 8 == 0 and room.size(3) <= 256


def taken(x: Tensor, ahead: int) -> Tensor:
    """Memory for x (b s h d) and for `ahead` more tokens; the heads of a token lie side by side."""
    return x.new_empty(x.size(0), x.size(2) + ahead, x.size(1), x.size(3)).transpose(1, 2)


def repeated(pair: Pair, n: int) -> Pair:
    """x with every row repeated n times, in the same memory layout."""
    k, v = (x.transpose(1, 2).repeat_interleave(n, 0).transpose(1, 2) for x in pair)
    return k, v
