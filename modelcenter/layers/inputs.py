"""Checks a model's arguments and turns them into a `Batch`.

Shapes: b batch, s tokens of this forward, t tokens with those already in the cache, n packed sequences.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..config.document import short
from ..errors import refuse
from ..ops import _graph
from ..ops.cross_entropy import IGNORE
from .batch import Batch
from .cache import Cache
from .view import Ends, Packing


def batch_of(
    x: Tensor | None,
    *,
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
    """A model's arguments as a `Batch`; `Model.forward` says what each is. `target` is what a decoder reads. Errors: `InputError`
    for arguments that are missing or do not fit each other."""
    if lengths_q is None and lengths_k is not None:
        refuse(None, "cu_seq_lens_k", "given without cu_seq_lens_q", "both, or cu_seq_lens_q alone")
    if encoder_decoder and target is None:
        refuse(None, "decoder_input_ids", "missing", "decoder_input_ids (b s), or labels to make them of")
    read = x if x is not None else cache.memory if cache is not None and encoder_decoder else None
    if read is None:
        refuse(None, "input_ids", "missing", "token ids (b s), or inputs_embeds (b s dim)")
    if not encoder_decoder:
        for name, given in (("decoder_input_ids", target), ("decoder_attention_mask", target_mask)):
            if given is not None:
                refuse(None, name, "given to a model without an encoder", f"{name.removeprefix('decoder_')}")
    elif read.size(1) == 0:
        refuse(None, "input_ids", "no tokens", "at least one for each row")
    if lengths_q is not None:
        for name, there in (("attention_mask", mask is not None), ("use_cache", cache is not None)):
            if there:
                refuse(None, name, "beside cu_seq_lens_q", "leave it out: packed sequences have no padding, and no cache")
    check_places(positions, read, "position_ids")
    check_places(segments, read, "token_type_ids")
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


def shift_right(labels: Tensor, lengths: Tensor | None, start: int, pad: int) -> Tensor:
    """The decoder's input for `labels` (b s): the labels shifted one to the right, `start` first, `pad` in place of -100.

    `lengths`: n + 1 cumulative lengths, if sequences are packed into one row; each then begins with `start`.
    """
    ids = torch.nn.functional.pad(labels, (1, 0), value=start)
    if lengths is not None:  # where one ends the next begins
        ids.index_fill_(1, lengths.to(labels.device).long().clamp(0, labels.size(1)), start)
    ids = ids[:, :-1]
    return ids.masked_fill(ids == IGNORE, pad)


def check_tokens(ids: Any, name: str) -> None:
    """Refuse anything but ids (b s). Whether the vocabulary holds them is not checked: that would wait for the GPU."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        found = f"of {str(ids.dtype).removeprefix('torch.')}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        refuse(None, name, found, "a tensor of whole numbers (batch, tokens), as a tokenizer gives")
    if ids.dim() != 2:
        refuse(None, name, f"shape {list(ids.shape)}", "(batch, tokens)")


def check_mask(mask: Any, name: str) -> None:
    """Refuse anything but None and a tensor (b t)."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return
    wanted = "a tensor of 2 (batch, tokens): 1 where a token is real, 0 where it pads"
    if not isinstance(mask, Tensor):
        refuse(None, name, f"a {type(mask).__name__}", wanted)
    more = "; of lengths torch.arange(tokens) < length[:, None]" if mask.dim() == 1 else ""
    refuse(None, name, f"{mask.dim()} dimensions", wanted + more)


def check_items(items: Any) -> None:
    """Refuse anything but None and a number of targets."""
    if isinstance(items, Tensor):
        sound = items.numel() == 1
    else:
        sound = items is None or ((isinstance(items, float) or hasattr(items, "__index__")) and items > 0)  # numpy's, too
    if not sound:
        refuse(None, "num_items_in_batch", short(items), "a number above 0, or a tensor of one: what the summed loss is divided by")


def check_places(ids: Any, x: Tensor, name: str) -> None:
    """Refuse anything but None and a whole number (1|b s) for each token of `x` (b s, b s dim)."""
    if ids is None:
        return
    check_tokens(ids, name)
    if ids.size(1) != x.size(1) or ids.size(0) not in (1, x.size(0)):
        refuse(None, name, f"shape {list(ids.shape)}", f"[{x.size(0)}, {x.size(1)}], one for each token")


def boolean(mask: Tensor | None, x: Tensor, past: int, name: str) -> Tensor | None:
    """The mask (b t) for `x` (b s, b s dim) after `past` tokens, as bools. Any other shape is refused, because it would be
    broadcast."""
    if mask is None:
        return None
    check_mask(mask, name)
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
    """Where the sequences of `x` (1 s) end, from their n + 1 cumulative lengths; `longest`, if given, is an upper bound of their
    lengths. `side` (q or k) is for the message. While a CUDA graph is recorded nothing is checked, as values are not known."""
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.is_floating_point() or lengths.numel() < 2:
        refuse(None, f"cu_seq_lens_{side}", short(lengths), "a tensor of n + 1 whole numbers: where sequences begin, and the end")
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
    """Refuse cumulative lengths that do not describe the one row `x`."""
    if len(x) != 1 or lengths[0] != 0 or lengths[-1] != x.size(1) or any(a > b for a, b in pairwise(lengths)):
        found = f"{list(lengths[:4])}... for input of shape {list(x.shape)}"
        refuse(None, name, found, "one row, and cumulative lengths from 0 to its number of tokens")
