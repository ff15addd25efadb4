"""Lists of examples into tensors under the names of the model's arguments, and one of them shown as text.

b: sequences of the batch, s: the longest of them. Ids and labels are int64, masks int64 of 0 and 1.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from modelcenter.data.tokenizer import Tokenizer

IGNORED = -100  # the label of a token that is not trained on, as in transformers
SHOWN = 600  # characters of the sample that is shown before training
Row = Sequence[int]
Batch = dict[str, Any]  # tensors (and, packed, two ints) under the names of the model's arguments


def stack(rows: Sequence[Row], value: int) -> Tensor:
    """Rows of different lengths as (b, s), filled up on the right with `value`."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64)


def stack_mask(rows: Sequence[Row]) -> Tensor:
    """(b, s): 1 where `stack` has a token, 0 where it fills up."""
    return stack([[1] * len(row) for row in rows], 0)


def pack(sequences: Sequence[tuple[Row, Row]]) -> Batch:
    """(ids, labels) of whole sequences side by side: (1, total), bounds in cu_seq_lens, positions that restart.

    The model shifts labels inside: the first of a sequence would be predicted by the one before, so it is ignored.
    """
    lengths = [len(ids) for ids, _ in sequences]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    labels = torch.tensor([[label for _, row in sequences for label in (IGNORED, *row[1:])]])
    return {
        "input_ids": torch.tensor([[i for ids, _ in sequences for i in ids]]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": labels,
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def describe_sample(batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None = None) -> str:
    """The first sample of `batch` as text, with [[ ]] around what is trained on; `names` are the classes'.

    A masked token stands as [[seen -> wanted]]; of a pair of sequences the source and the target are shown.
    """
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    if isinstance(labels, int):
        return f"{_text(_unpadded(batch), tokenizer)}\n  label: {names[labels] if names else labels}"
    if "cu_seq_lens_q" in batch:
        end = int(batch["cu_seq_lens_q"][1])
        ids, labels = ids[:end], labels[:end]
    elif "attention_mask" in batch:
        ids = _unpadded(batch)
    trained = [label != IGNORED for label in labels]
    if trained[0]:  # only a decoder has something to predict its first token from
        wanted = [label for label in labels if label != IGNORED]
        return f"{_text(ids, tokenizer)}\n  target: [[{_text(wanted, tokenizer)}]]"
    if all(i == l for i, l, t in zip(ids, labels, trained, strict=False) if t):
        return _runs(ids, trained[: len(ids)], tokenizer)
    pieces = []
    for seen, wanted, hidden in zip(ids, labels, trained, strict=False):
        text = tokenizer.decode([seen], special=True)
        pieces.append(f"[[{text} -> {tokenizer.decode([wanted], special=True)}]]" if hidden else text)
    return _shortened(" ".join(pieces))


def _unpadded(batch: Batch) -> list[int]:
    """The ids of the first sample without its padding."""
    ids: list[int] = batch["input_ids"][0].tolist()
    mask: Any = batch.get("attention_mask")
    return ids if mask is None else ids[: int(mask[0].sum())]


def _runs(ids: list[int], trained: list[bool], tokenizer: "Tokenizer") -> str:
    """The text of `ids`, decoded by runs of tokens that are all trained on or all not."""
    text, start = "", 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or trained[stop] != trained[start]:
            run = tokenizer.decode(ids[start:stop], special=True)
            text, start = text + (f"[[{run}]]" if trained[start] else run), stop
    return _shortened(text)


def _text(ids: list[int], tokenizer: "Tokenizer") -> str:
    return _shortened(tokenizer.decode(ids, special=True))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
