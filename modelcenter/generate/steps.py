"""Decoding steps of one token as CUDA graphs, each launched by a single call of the host. b rows, t tokens so far.

A step of a small model has hundreds of kernels, and the host takes longer to launch them than the GPU to run them. All steps make
the same calls if no shape changes. So the cache is read to a fixed length, and places that are not filled yet are masked
(`layers.cache.Fixed`). The first step runs as ordinary calls, the second is recorded as a CUDA graph, and later ones replay it.
When that length is full it doubles, and a new graph is recorded.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layers import Rotary
from ..layers.cache import Fixed
from ..ops import wide
from ..ops._graph import recorded, recording
from ..ops._mode import PLAIN

if TYPE_CHECKING:
    from .state import State

FEWEST = 8  # steps for which a record is worth its making
SPAN = 256  # places that are read at least


def suits(state: "State") -> bool:
    """Whether all steps of `state` make the same calls, so that recording them pays."""
    model = state.model
    if not state.ids.is_cuda or state.ids.size(1) - state.length < FEWEST or recording():
        return False
    return bool(state.cache.room) and all(type(p) in PLAIN for p in model.parameters()) and not any(map(odd, model.modules()))


def odd(module: torch.nn.Module) -> bool:
    """Whether a module does something that a record would leave out, or waits for the device."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or module._compiled_call_impl is not None or (isinstance(module, Rotary) and module.frequencies.by_length)


class Steps:
    """The further steps of `state`: with `record` as a CUDA graph, otherwise by calls."""

    def __init__(self, state: "State", record: bool = True):
        self.model, self.record, self.cache, self.source = state.model, record, state.cache, state.source is not None
        self.before = next(iter(self.cache.pairs.values()))[0].size(2) - self.cache.length  # what a model puts before the text
        self.fixed: Fixed | None = None
        self.replay: Callable[[], object] | None = None
        self.mask: Tensor | None = None
        self.ids = state.ids[:, :1].clone()
        self.positions = state.positions(state.length - 1)
        self.out = torch.empty(0)

    def __call__(self, state: "State") -> Tensor:
        """Scores of the next token (b vocab); the state's last one is new to the cache."""
        full, left = state.length - 1 + self.before, state.ids.size(1) - state.length
        self.ids.copy_(state.ids[:, state.length - 1 : state.length])
        if self.fixed is None or full >= self.fixed.span:
            self.widen(state, full)
            self.out = self.step()
        elif self.replay is not None:
            self.replay()
        elif self.record and left >= FEWEST:
            self.begin()
        else:
            self.out = self.step()
        return self.out

    def begin(self) -> None:
        """Record and do the second step of a length."""
        try:
            self.replay, self.out = recorded(self.step, self.ids.device)
            self.replay()
        except RuntimeError as error:
            warnings.warn(f"generation goes on without a CUDA graph: {str(error).splitlines()[0][:160]}", stacklevel=5)
            self.record, self.replay, self.out = False, None, self.step()

    def widen(self, state: "State", full: int) -> None:
        """Read further than before; `full` places are filled."""
        span, room = SPAN, next(iter(self.cache.room.values()))[0].size(2)
        while span <= full:
            span *= 2
        span, self.replay = min(span, room), None
        self.cache.length = full - self.before
        state.cache = self.fixed = Fixed(self.cache, full, span)
        mask = state.mask
        if mask is not None and not self.source:
            text = span - self.before
            mask = pad(mask[:, :text], (0, max(0, text - mask.size(1))), value=True)  # what is not there is hidden anyway
        self.mask = mask

    def step(self) -> Tensor:
        """One token by calls."""
        fixed, model = self.fixed, self.model
        assert fixed is not None
        fixed.begin()
        if self.source:
            out = model(attention_mask=self.mask, decoder_input_ids=self.ids, past_key_values=fixed, logits_to_keep=1)
        else:
            out = model(self.ids, self.mask, self.positions, past_key_values=fixed, logits_to_keep=1)
        fixed.advance()
        self.positions += 1
        return last(out)


def last(out: Any) -> Tensor:
    """The scores of the last token (b vocab), in at least fp32."""
    return wide(out.logits[:, -1])
