"""One transformer block in its three arrangements, and a stack of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..ops._mode import on_gpu, plain
from .attention import Attention
from .dropout import Dropout, added
from .linear import rounding
from .norm import Norm, add, beside, factors, normed, twice
from .view import View

Twice = Tensor | tuple[Tensor, Tensor]  # b s dim; two: the same for a layer and for the stream, whose gradients come apart


def pair(x: Twice) -> tuple[Tensor, Tensor]:
    return x if isinstance(x, tuple) else (x, x)


def ahead(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward, during which its layers find their weights already rounded to the dtype that autocast multiplies in. The
    rounding is part of what is computed again, because selective recompute needs the same calls both times."""

    @wraps(forward)
    def found(self: "Block", x: Twice, *views: View | None) -> Twice:
        with rounding(self, pair(x)[0]):
            out: Twice = forward(self, x, *views)
        return out

    return found


class Block(nn.Module, ABC):
    """Attention, optional cross-attention and feed-forward around a residual stream. This is the unit that is sharded, recomputed
    and compiled. Subclasses place the norms. Dropout acts on what is added to the stream. A norm and the addition before it are one
    op."""

    def __init__(
        self,
        norm: Callable[[], Norm],
        attn: Attention,
        ffn: nn.Module,
        *,
        cross: Attention | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.attn, self.attn_norm = attn, norm()
        self.cross, self.cross_norm = cross, norm() if cross is not None else None
        self.ffn, self.ffn_norm = ffn, norm()
        self.dropout = Dropout(dropout)

    @abstractmethod
    def forward(self, x: Any, view: View, cross: View | None = None) -> Twice:
        """x and the result: b s dim; `view` for self-attention, `cross` for cross-attention."""


class PreNorm(Block):
    """x + layer(norm(x)) for each layer."""

    def first(self, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """The first norm of x, and x for the stream. On a GPU the norm's kernel also adds the stream's gradient, which spares a
        pass over memory. On a CPU that spares little, and without it every mode of recompute gives the same gradients to the
        bit."""
        return beside(self.attn_norm, x, dtype) if on_gpu(x) else (normed(self.attn_norm, x, dtype), x)

    @ahead
    def forward(self, x: Tensor, view: View, cross: View | None = None) -> Tensor:
        dtype = factors(x)
        h, x = self.first(x, dtype)
        h, x = self.attn(h, view), view.chosen(x)
        if self.cross is not None and self.cross_norm is not None:
            h, x = add(self.cross_norm, h, x, self.dropout, dtype)
            h = self.cross(h, cross)
        h, x = add(self.ffn_norm, h, x, self.dropout, dtype)
        return added(self.dropout, self.ffn(h), x)


class PostNorm(Block):
    """norm(x + layer(x)) for each layer, as in the original transformer."""

    def after(self, norm: Norm, h: Tensor, x: Tensor) -> Twice:
        """The norm of x + h, for the next layer and for the stream. On a GPU its kernel adds the gradients of both; see `first`."""
        if not on_gpu(x):
            return add(norm, h, x, self.dropout)[0]
        one, other = twice(norm, h, x, self.dropout)
        return one if one is other else (one, other)

    @ahead
    def forward(self, x: Twice, view: View, cross: View | None = None) -> Twice:
        h, x = pair(x)
        h, x = pair(self.after(self.attn_norm, self.attn(h, view), view.chosen(x)))
        if self.cross is not None and self.cross_norm is not None:
            h, x = pair(self.after(self.cross_norm, self.cross(h, cross), x))
        return self.after(self.ffn_norm, self.ffn(h), x)


class Parallel(PreNorm):
    """x + attn(norm(x)) + ffn(norm(x)), with one norm."""

    def __init__(self, norm: Callable[[], Norm], attn: Attention, ffn: nn.Module, *, dropout: float = 0.0):
        super().__init__(norm, attn, ffn, dropout=dropout)
        del self.ffn_norm

    @ahead
    def forward(self, x: Tensor, view: View, cross: View | None = None) -> Tensor:
        h, x = self.first(x, factors(x))
        return added(self.dropout, self.ffn(view.chosen(h)), added(self.dropout, self.attn(h, view), view.chosen(x)))


class Stack(nn.Module):
    """Blocks in order, then an optional final norm."""

    def __init__(self, blocks: Iterable[Block], *, norm: nn.Module | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm

    def forward(self, x: Tensor, view: View, cross: View | None = None, wanted: Tensor | None = None) -> Tensor:
        """b s dim. If only some positions are `wanted` (n indices into the flattened b s), only these (1 n dim): after its
        attention the last block computes no others."""
        out: Twice = x
        few = wanted is not None and plain(x) and len(wanted) < x.size(0) * x.size(1)
        for number, block in enumerate(self.blocks, 1):
            last = few and number == len(self.blocks)
            out = block(out, replace(view, wanted=wanted) if last else view, cross)
        x, _ = pair(out)
        return x if self.norm is None else self.norm(x)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, after which each module is in the mode that it was in: a part may be frozen, or drop while the rest does
    not."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def block_inputs(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """A list that fills, while the context lasts, with the input of each block in order; of an encoder-decoder the decoder's."""
    trace: list[Tensor] = []
    stack = getattr(model, "decoder", None) or getattr(model, "encoder", None)
    blocks = [m for m in (stack.modules() if isinstance(stack, nn.Module) else []) if isinstance(m, Block)] if wanted else []

    def see(block: nn.Module, args: tuple[Any, ...]) -> None:
        if mine is not None and not torch.compiler.is_compiling() and get_ident() != mine:
            return  # another forward of the same model
        x, _ = pair(args[0])
        trace.append(x.full_tensor() if hasattr(x, "full_tensor") else x)  # ranks may have parts

    mine = None if torch.compiler.is_compiling() else get_ident()  # a graph is of no thread
    hooks = [b.register_forward_pre_hook(see) for b in blocks]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()
