"""Turns lists of examples into tensors, named like the model's arguments; and shows one example as text.

b: sequences of the batch, s: the longest of them. Ids and labels are int64, masks int64 of 0 and 1. torch is imported only where a
batch is made, because a recipe is checked without it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from .tokenizer import Tokenizer

IGNORED = -100  # the label of a token that is not trained on, as in transformers
SHOWN = 600  # characters of the sample that is shown before training
Row = Sequence[int] | NDArray[np.int32]
Batch = dict[str, Any]  # tensors (and, packed, two ints) under the names of the model's arguments


def tensor(values: Sequence[Any]) -> "Tensor":
    """Labels that are not sequences: numbers, or rows with as many each, as int64 or fp32."""
    import torch

    return torch.tensor(values)


def stack(rows: Sequence[Row], value: int) -> "Tensor":
    """Rows of different lengths as (b, s), padded on the right with `value`."""
    import torch

    out = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for k, row in enumerate(rows):
        out[k, : len(row)] = row
    return torch.from_numpy(out)


def stack_mask(rows: Sequence[Row]) -> "Tensor":
    """(b, s): 1 where `stack` has a token, 0 where it pads."""
    import torch

    lengths = torch.tensor([len(row) for row in rows])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()


def join(rows: Sequence[Row]) -> "Tensor":
    """Rows side by side: (1, total)."""
    import torch

    return torch.from_numpy(np.concatenate(rows, dtype=np.int64))[None]


def pad(ids: Sequence[Row], labels: Sequence[Row], value: int) -> Batch:
    """input_ids padded with `value`, attention_mask and labels, all (b, s). Labels of another length than the ids are (b, t)."""
    return {"input_ids": stack(ids, value), "attention_mask": stack_mask(ids), "labels": stack(labels, IGNORED)}


def pack(ids: Sequence[Row], labels: Sequence[Row] | None = None) -> Batch:
    """Whole sequences side by side: (1, total), their n + 1 bounds in cu_seq_lens, positions that restart.

    A causal model shifts labels: the first label of a sequence would be predicted from the previous sequence, so the caller must
    have set it to IGNORED. `labels` may be targets of another length; q then counts the targets, k the sources.
    """
    import torch

    labels = ids if labels is None else labels
    q, k = (torch.tensor([0, *map(len, rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32) for rows in (labels, ids))
    return {
        "input_ids": join(ids), "position_ids": torch.cat([torch.arange(len(row)) for row in ids])[None],
        "labels": join(labels), "cu_seq_lens_q": q, "cu_seq_lens_k": k,
        "max_length_q": max(map(len, labels)), "max_length_k": max(map(len, ids)),
    }  # fmt: skip


def describe_sample(batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None = None) -> str:
    """The first sample of `batch` as text, with [[ ]] around what is trained on; `names` are those of the classes.

    A masked token is shown as [[seen -> wanted]]; of a pair of sequences both source and target are shown.
    """
    ids, labels = nth(batch, 0), batch["labels"][0].tolist()
    if not isinstance(labels, list):
        return f"{_text(ids, tokenizer)}\n  label: {names[labels] if names and isinstance(labels, int) else f'{labels:g}'}"
    if batch["labels"].is_floating_point():  # one of each class: whether it is there
        there = [names[k] if names else str(k) for k, known in enumerate(labels) if known == 1]
        return f"{_text(ids, tokenizer)}\n  labels: {', '.join(there) or 'none'}"
    if "cu_seq_lens_q" in batch:
        labels = labels[: int(batch["cu_seq_lens_q"][1])]
    trained = [label != IGNORED for label in labels]
    if trained[0]:  # only a decoder has something to predict its first token from
        wanted = [label for label in labels if label != IGNORED]
        return f"{_text(ids, tokenizer)}\n  target: [[{_text(wanted, tokenizer)}]]"
    if all(i == l for i, l, t in zip(ids, labels, trained, strict=False) if t):
        return runs(ids, trained[: len(ids)], tokenizer)
    said = []
    for text, wanted, hidden in zip(parts(ids, range(len(ids) + 1), tokenizer), labels, trained, strict=False):
        seen = text.lstrip(" ")
        told = f"[[{seen} -> {tokenizer.decode([wanted], special=True).lstrip(' ')}]]" if hidden else seen
        said.append(text.removesuffix(seen) + told)
    return shortened("".join(said))


def nth(batch: Batch, k: int) -> list[int]:
    """The ids of one sequence, without padding and without the sequences packed beside it."""
    if "cu_seq_lens_k" in batch:
        ids: list[int] = batch["input_ids"][0, slice(*batch["cu_seq_lens_k"][k : k + 2].tolist())].tolist()
        return ids
    ids = batch["input_ids"][k].tolist()
    mask: Any = batch.get("attention_mask")
    return ids if mask is None else ids[: int(mask[k].sum())]


def runs(ids: list[int], trained: list[bool], tokenizer: "Tokenizer") -> str:
    """The text of `ids`, decoded in runs of tokens that are all trained on, or all not."""
    bounds = [0, *(k for k in range(1, len(ids)) if trained[k] != trained[k - 1]), len(ids)]
    room = max(SHOWN // max(len(bounds) - 1, 1), 40)  # each run is shortened by itself, so that all of their ends are seen
    said = [f"[[{shortened(text, room)}]]" if trained[at] else shortened(text, room)
            for text, at in zip(parts(ids, bounds, tokenizer), bounds[:-1], strict=True) if text]  # fmt: skip
    return shortened("".join(said), 2 * SHOWN)


def parts(ids: list[int], bounds: Sequence[int], tokenizer: "Tokenizer") -> list[str]:
    """The texts of the parts of `ids`, each with the space that stands before it in the text of all: by itself it has none."""
    out = []
    for a, b in pairwise(bounds):
        before = tokenizer.decode(ids[max(a - 1, 0) : a], special=True)
        text = tokenizer.decode(ids[max(a - 1, 0) : b], special=True)
        whole = text.startswith(before)  # half a character is not
        out.append(text.removeprefix(before) if whole else tokenizer.decode(ids[a:b], special=True))
    return out


def _text(ids: list[int], tokenizer: "Tokenizer") -> str:
    return shortened(tokenizer.decode(ids, special=True))


def shortened(text: str, room: int = SHOWN) -> str:
    return text if len(text) <= room else f"{text[: room // 2]} ... {text[-room // 2 :]}"
