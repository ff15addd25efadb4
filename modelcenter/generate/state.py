"""The rows that generation continues. b rows, s prompt, t tokens so far."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layers import Cache
from ..parallel.watch import beat
from .steps import Steps, last, suits

if TYPE_CHECKING:
    from ..model import Model


ROOM = 64  # the cache's places are a multiple of it, which kernels like in a mask


class State:
    """The token ids so far, which of them are real, and the cache. Memory for all `new` tokens is allocated at once.

    An encoder-decoder reads `prompt` as its source and writes its target, which begins with `start`.
    """

    def __init__(self, model: "Model", prompt: Tensor, mask: Tensor | None, new: int, pad: int, start: int | None):
        self.model, self.source = model, None if start is None else prompt
        begin = prompt if start is None else prompt.new_full((len(prompt), 1), start)
        self.ids = torch.cat((begin, begin.new_full((len(begin), new), pad)), 1)
        self.prompt = self.length = begin.size(1)
        self.mask = None if mask is None or bool(mask.all()) else mask.bool()  # without one the fastest attention applies
        if self.mask is not None and start is None:
            self.mask = torch.cat((self.mask, self.mask.new_ones(len(begin), new)), 1)
        self.cache: Cache = Cache(ahead=-(-self.ids.size(1) // ROOM) * ROOM - self.length)
        self.steps: Steps | None = None

    @property
    def seen(self) -> Tensor:
        """The ids so far (b t)."""
        return self.ids[:, : self.length]

    def positions(self, start: int) -> Tensor:
        """The positions of the tokens from `start` on (1|b s): a row's first real token has 0, whatever pads the row."""
        if self.mask is None or self.source is not None:
            return torch.arange(start, self.length, device=self.ids.device)[None]
        return (self.mask[:, : self.length].cumsum(1) - 1).clamp(min=0)[:, start:]

    def scores(self) -> Tensor:
        """The scores of the next token (b vocab), at least fp32. Only tokens that the cache lacks are run."""
        if self.steps is None and self.cache.length and suits(self):
            self.steps = Steps(self)
        if self.steps is not None:
            return self.steps(self)
        cache, mask, ids = self.cache, self.mask, self.seen
        new = ids[:, cache.length :]
        if self.source is not None:
            first = {"input_ids": self.source} if cache.memory is None else {}
            return last(self.model(**first, attention_mask=mask, decoder_input_ids=new, past_key_values=cache, logits_to_keep=1))
        given = (None, None) if mask is None else (mask[:, : self.length], self.positions(cache.length))
        return last(self.model(new, *given, past_key_values=cache, logits_to_keep=1))

    def append(self, new: Tensor) -> None:
        """Write the next token of every row (b)."""
        self.ids[:, self.length] = new
        self.length += 1
        beat()

    def repeat(self, n: int) -> None:
        """Repeat every row n times."""
        if n == 1:
            return
        self.ids = self.ids.repeat_interleave(n, 0)
        self.mask = None if self.mask is None else self.mask.repeat_interleave(n, 0)
        self.cache.repeat(n)

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]`, of the same prompt, was."""
        self.ids = self.ids.index_select(0, rows)
        self.cache.reorder(rows)
