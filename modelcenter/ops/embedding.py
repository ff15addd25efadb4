"""Rows of a table by number: out[i] = table[ids[i]].

`pad` is an id whose row gets no gradient from being read. The gradient of a row is the sum over its tokens in order, in fp32: the
same bits every time, on CUDA too, where torch adds in whatever order the threads come. An id outside the table is a ValueError on
the CPU; on CUDA, where the host does not wait to check, its row is NaN and trains nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import DIMS, call, expect
from ._mode import fake
from ._op import Kernel, op, raw
from ._tied import of_rows, summed_to_whole

RUN = 32  # tokens, sorted by row, that a block adds up; csrc/embedding.cu


def reference(ids: Tensor, table: Tensor, pad: int | None) -> Tensor:
    expect("embedding", "table", table)
    try:
        return untrained(F.embedding(ids, table), ids, pad)
    except (IndexError, RuntimeError) as error:
        if (found := first_outside(ids, len(table))) is None:
            raise
        raise ValueError(f"embedding: id {found[1]}; the table has {len(table)} rows") from error


def first_outside(ids: Tensor, count: int, *others: int) -> tuple[int, int] | None:
    """Which of the integers is the first that is neither from 0 to below `count` nor among `others`, and what it is. On the CPU
    alone: elsewhere the host does not wait to check."""
    if not ids.is_cpu or fake(ids) or ids.is_floating_point():
        return None
    flat, known = ids.reshape(-1), torch.tensor(others, dtype=torch.int64)
    odd = (((flat < 0) | (flat >= count)) & ~torch.isin(flat, known)).nonzero()
    return (int(odd[0]), int(flat[odd[0]])) if len(odd) else None


def untrained(out: Tensor, ids: Tensor, pad: int | None) -> Tensor:
    """`out`, the rows at `ids`, without a gradient where the id is `pad`."""
    if pad is None or not torch.is_grad_enabled():
        return out
    # not F.embedding's padding_idx: of a table sharded by rows it would silence that row of every shard
    return torch.where((ids == pad)[..., None], out.detach(), out)


@raw("(Tensor ids, Tensor table, int? pad) -> Tensor")
def embedding_forward(ids: Tensor, table: Tensor, pad: int | None) -> Tensor:
    out = table.new_empty((*ids.shape, table.size(1)))
    call("embedding", ids.contiguous(), table.contiguous(), out.view(-1, table.size(1)))
    return out


@raw("(Tensor grad, Tensor ids, SymInt vocab, int? pad) -> Tensor")
def embedding_backward(grad: Tensor, ids: Tensor, vocab: int, pad: int | None) -> Tensor:
    """The gradient of a table of `vocab` rows, of which those at `ids` have the gradients `grad` (.. dim)."""
    dim, ids = grad.size(-1), ids.reshape(-1)
    grad, dtable = grad.reshape(-1, dim).contiguous(), grad.new_empty((vocab, dim))
    none = -1 if pad is None else pad
    if ids.is_cuda:
        small, order, start = by_row(ids, vocab)
        partial = grad.new_empty((2 * -(-ids.numel() // RUN), dim), dtype=torch.float32)
        call("embedding_backward", small, order, start, grad, none, partial, dtable)
    else:
        call("embedding_backward", ids.contiguous(), dtable, grad, none, ids.new_empty(vocab + 1), torch.empty_like(ids))
    return dtable


def by_row(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ids in rising order (int32: half the digits to sort by), the tokens in the order of their ids, and where those of each
    row begin. An id outside the table is clamped to its ends, not wrapped around."""
    small, order = torch.sort(ids.clamp(-1, vocab).int(), stable=True)
    return small, order, torch.searchsorted(small, torch.arange(vocab + 1, dtype=torch.int32, device=ids.device))


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    ids, table, pad = args
    return ids, table.size(0), pad


def backward(grad: Tensor, ids: Tensor, vocab: int, pad: int | None) -> Sequence[Tensor | None]:
    if ids.is_cpu and not fake(ids) and summed_to_whole(1):
        read, place = torch.unique(ids, return_inverse=True)
        rows = embedding_backward(grad, place, len(read), None)
        if pad is not None:
            rows.masked_fill_((read == pad)[:, None], 0)
        return None, of_rows(read, rows, vocab), None
    return None, embedding_backward(grad, ids, vocab, pad), None


def takes(ids: Tensor, table: Tensor, pad: int | None) -> bool:
    fits = ids.dtype == torch.int64 and ids.dim() < DIMS  # the rows have one more
    return fits and table.dim() == 2 and table.size(0) < 2**31 and table.size(1) > 0


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    sizes = (((1, 1), 1, 1), ((2, 5), 7, 3), ((2, 0), 4, 3), ((3, 50), 2, 33), ((300,), 20, 8), ((4, 128), 1000, 600))
    for shape, vocab, dim in sizes:
        ids, table = torch.randint(vocab, shape, device=device), torch.randn(vocab, dim, device=device, dtype=dtype)
        yield ids, table, None
        if ids.numel() > 100:
            yield ids, table, vocab // 2


embedding = op("embedding", reference, cases, Kernel(embedding_forward, saved, backward, takes=takes))
