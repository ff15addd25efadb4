"""Pads micro-batches to shapes that recur, because a record (graphs.py) has a fixed shape.

Padded batches are made a little longer. Packed ones get additional sequences: one that holds the missing tokens, then empty ones;
and the length of the longest sequence is replaced by an upper bound. What is added is masked or a sequence of its own, and has no
label. So it only costs time: for at most a sixteenth more tokens or seven per row, and of packed ones an eighth or 255 in all.
Dropout is numbered by the shape, and so differs from that of the original batch.

b sequences, s tokens of the longest, n packed sequences, t tokens of all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..layers import Head, Rotary
from ..ops.cross_entropy import IGNORE, ignored

Arguments = Mapping[str, Any]
TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # a number a token; what fills up is 0
LENGTHS = 8, 16  # padded: multiples of 8, of which there are 16 from a power of two to the next
# Packed sequences have three numbers, and each combination is a record of its own, so there are few of each: of 150 steps of 4
# instructions 16 % find no record yet; by multiples of 64 and up to 16 between powers of two 47 %, each ten times as long.
TOKENS = 256, 8  # all together
SEQUENCES = 8, 1  # how many: an empty one is no more than a block of threads that ends at once
LONGEST = 128, 1  # and their bound: attention's tiles are of so many


def up(n: int, least: int, parts: int) -> int:
    """The next multiple of `least` that is at least n and one of at most `parts` numbers between two powers of two."""
    step = max(least, (1 << (n - 1).bit_length()) // (2 * parts))
    return -(-n // step) * step


def fills(model: nn.Module) -> bool:
    """Whether a model's micro-batches may be filled up: not where the longest sequence, filled up or not, says what positions
    mean."""
    by_length = any(isinstance(m, Rotary) and m.frequencies.by_length for m in model.modules())
    return isinstance(getattr(model, "head", None), Head) and not by_length


def filled(model: Any, batch: Arguments) -> Arguments:
    """`batch`, on the host, as the model, of which `fills` is true, is to compute it: with the same loss and gradients, except for
    rounding and dropout."""
    head = model.head
    return packed(model, batch) if "cu_seq_lens_q" in batch else padded(model, batch, head.by_token)


def padded(model: Any, batch: Arguments, by_token: bool) -> Arguments:
    """Rows of up to s tokens (b s), with a mask that says which are real."""
    if "attention_mask" not in batch:
        return batch
    own, labels = batch["input_ids"].size(1), batch["labels"]
    most: int | None = vars(model.config).get("positions")
    s = max(own, min(up(own, *LENGTHS), most or up(own, *LENGTHS)))
    found = {name: wider(batch[name], s, 0) for name in TEXT if name in batch}
    if by_token:
        found["labels"] = wider(labels, up(labels.size(1), *LENGTHS) if model.encoder_decoder else s, IGNORE)
    return {**batch, **found}


def packed(model: Any, batch: Arguments) -> Arguments:
    """One row of n sequences (1 t). If not every sequence has a label, their vectors are compared with one another, and no sequence
    may be added."""
    if model.prefixed or "max_length_q" not in batch:
        return batch
    labels, ends = batch["labels"], {side: batch[f"cu_seq_lens_{side}"] for side in "qk"}
    n, by_token = len(ends["q"]) - 1, labels.dim() == 2 and not labels.is_floating_point()
    if not by_token and len(labels) != n:
        return batch
    tokens = {side: up(int(x[-1]), *TOKENS) for side, x in ends.items()}
    longest = {side: min(up(batch[f"max_length_{side}"], *LONGEST), tokens[side]) for side in ends}
    more = max(-(-(tokens[side] - int(x[-1])) // max(1, longest[side])) for side, x in ends.items())
    many = up(n + more, *SEQUENCES)
    found: dict[str, Any] = {name: wider(batch[name], tokens["k"], 0) for name in TEXT if name in batch}
    for side, x in ends.items():
        behind = (x[-1] + longest[side] * torch.arange(1, many - n + 1)).clamp(max=tokens[side])
        found[f"cu_seq_lens_{side}"], found[f"max_length_{side}"] = torch.cat((x, behind.to(x.dtype))), longest[side]
    found["labels"] = wider(labels, tokens["q"], IGNORE) if by_token else longer(labels, many, ignored(labels))
    return {**batch, **found}


def wider(x: Tensor, size: int, value: int) -> Tensor:
    """x (b s) with `size` columns."""
    return pad(x, (0, size - x.size(1)), value=value)


def longer(x: Tensor, size: int, value: float) -> Tensor:
    """x (n ...) with `size` rows."""
    return torch.cat((x, x.new_full((size - len(x), *x.shape[1:]), value)))
