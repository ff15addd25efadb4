"""What attention keeps between the forwards of one text. b batch, h heads, t tokens so far, d head dim."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import refuse

Pair = tuple[Tensor, Tensor]  # keys and values, b h t d


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, one pair an attention layer.

    `ahead` is the number of tokens that may follow the first forward: with it each layer's memory is taken once and filled in
    place. Without it pairs grow by copying, for whoever cannot know the number or wants gradients.
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
        """Make n rows of every row."""
        self.room = {layer: repeated(pair, n) for layer, pair in self.room.items()}
        self.across = {layer: repeated(pair, n) for layer, pair in self.across.items()}
        self.memory = None if self.memory is None else self.memory.repeat_interleave(n, 0)
        for layer, pair in self.pairs.items():
            long = pair[0].size(2)
            k, v = self.room[layer] if layer in self.room else repeated(pair, n)
            self.pairs[layer] = (k[:, :, :long], v[:, :, :long])

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was. Rows trade places within one source: an encoder's output stays where it is."""
        for k, v in self.pairs.values():
            k.copy_(k.index_select(0, rows))
            v.copy_(v.index_select(0, rows))


def taken(x: Tensor, ahead: int) -> Tensor:
    """Memory for x (b h s d) and `ahead` further tokens."""
    return x.new_empty(x.size(0), x.size(1), x.size(2) + ahead, x.size(3))


def repeated(pair: Pair, n: int) -> Pair:
    return pair[0].repeat_interleave(n, 0), pair[1].repeat_interleave(n, 0)
