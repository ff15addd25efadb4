"""A table that is read by number and multiplied by as a whole: what its lookups add to the gradient is of the rows that were read,
with the bits of a gradient as large as the table; everywhere else that is what is formed."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelcenter import ops
from modelcenter.ops._kernels import available

pytestmark = pytest.mark.skipif(not available("cpu"), reason="no compiled kernels")

lookup = importlib.import_module("modelcenter.ops.embedding")
VOCAB, DIM, PAD = 50, 24, 7
Loss = Callable[[Tensor, Tensor], Tensor]  # of ids and a table


def head(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.linear_cross_entropy(x, weight, None, torch.arange(len(x)) * 3 % VOCAB)
    return out


def tied(ids: Tensor, table: Tensor, pad: int | None = None) -> Tensor:
    return head(ops.embedding(ids, table, pad), table)


def twice(ids: Tensor, table: Tensor) -> Tensor:
    """As an encoder and its decoder."""
    return head(ops.embedding(ids, table, None) + ops.embedding(ids.flip(0), table, PAD), table)


def gradient(loss: Loss, dtype: torch.dtype, **backward: Any) -> Tensor:
    torch.manual_seed(0)
    table = torch.randn(VOCAB, DIM, dtype=dtype, requires_grad=True)
    ids = torch.randint(5, 20, (30,))
    loss(ids, table).backward(**backward)
    assert table.grad is not None
    return table.grad


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each gradient that a lookup has formed."""
    real, found = lookup.embedding_backward, []

    def watched(grad: Tensor, ids: Tensor, vocab: int, pad: int | None) -> Tensor:
        found.append(vocab)
        return real(grad, ids, vocab, pad)

    monkeypatch.setattr(lookup, "embedding_backward", watched)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pad", [None, PAD, 30], ids=["none", "read", "unread"])
@pytest.mark.parametrize("times", [1, 2])
def test_the_bits_of_two_gradients_of_the_whole(
    times: int, pad: int | None, dtype: torch.dtype, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = twice if times == 2 else lambda ids, table: tied(ids, table, pad)
    found = gradient(loss, dtype)
    assert len(sizes) == times and max(sizes) <= 15, "no row that was not read"
    monkeypatch.setattr(lookup, "summed_to_whole", lambda argument: False)
    wanted = gradient(loss, dtype)
    assert sizes[times:] == [VOCAB] * times
    assert found.layout == wanted.layout == torch.strided and torch.equal(found, wanted)


def alone(ids: Tensor, table: Tensor) -> Tensor:
    out: Tensor = ops.embedding(ids, table, None).square().sum()
    return out


def untied(ids: Tensor, table: Tensor) -> Tensor:
    return head(ops.embedding(ids, table, None), torch.randn(VOCAB, DIM, dtype=table.dtype, requires_grad=True))


def halves(ids: Tensor, table: Tensor) -> Tensor:
    """Two tables of one tensor: their gradients meet behind the same operation, and are not added up."""
    rows, weight = torch.stack((table, table * 2)).unbind()
    return head(ops.embedding(ids, rows, None), weight)


def one_by_one(ids: Tensor, table: Tensor) -> Tensor:
    x = ops.embedding(ids, table, None)
    head(x.detach(), table).backward()
    table.grad = None
    out: Tensor = x.square().sum()
    return out


@pytest.mark.parametrize("loss", [alone, untied, halves, one_by_one])
def test_a_gradient_of_the_whole_where_there_is_no_other(loss: Loss, sizes: list[int]) -> None:
    found = gradient(loss, torch.float32)
    assert sizes == [VOCAB] and found.layout == torch.strided


def test_a_graph_that_is_kept_has_it_too(sizes: list[int]) -> None:
    first = gradient(tied, torch.float32, retain_graph=True)
    assert sizes == [VOCAB] and torch.equal(first, gradient(tied, torch.float32))


def test_hooks_and_grad_see_a_whole_one(sizes: list[int]) -> None:
    table = torch.randn(VOCAB, DIM, requires_grad=True)
    seen: list[torch.layout] = []
    table.register_hook(lambda grad: seen.append(grad.layout))
    (found,) = torch.autograd.grad(tied(torch.arange(30), table), table)
    assert seen == [torch.strided] == [found.layout] and sizes == [30]
