"""Rows of a table: what an id outside of it does on each device."""

import pytest
import torch

from modelcenter import ops
from modelcenter.ops import _kernels
from modelcenter.ops.embedding import by_row

VOCAB, DIM = 40, 24
OUTSIDE = (-1, VOCAB, 2**31 - 1, 2**31, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("id", OUTSIDE)
def test_an_id_outside_is_refused_on_the_cpu(id: int) -> None:
    table = torch.randn(VOCAB, DIM, requires_grad=True)
    with pytest.raises((ValueError, IndexError)):
        ops.embedding(torch.tensor([3, id]), table, None)


def test_an_id_outside_is_sorted_to_no_row() -> None:
    """In 32 bits 2^32 + 3 would be 3."""
    ids = torch.tensor([3, *OUTSIDE, 0, 3, VOCAB - 1])
    small, order, start = by_row(ids, VOCAB)
    counts = torch.bincount(ids[(ids >= 0) & (ids < VOCAB)], minlength=VOCAB)
    assert torch.equal(start.diff(), counts)
    for row in range(VOCAB):
        tokens = order[start[row] : start[row + 1]]
        assert (ids[tokens] == row).all() and (tokens.diff() > 0).all() and (small[start[row] : start[row + 1]] == row).all()


@pytest.mark.gpu
@pytest.mark.parametrize("id", OUTSIDE)
def test_an_id_outside_trains_nothing_on_a_gpu(id: int) -> None:
    if not torch.cuda.is_available() or not _kernels.available("cuda"):
        pytest.skip("no GPU, or no kernels for one")
    ids = torch.tensor([3, 7, 3, 0], device="cuda")
    table = torch.randn(VOCAB, DIM, device="cuda", requires_grad=True)
    good = ops.embedding(ids, table, None)
    (wanted,) = torch.autograd.grad(good, table, torch.ones_like(good))
    wild = torch.cat((ids[:2], torch.tensor([id], device="cuda"), ids[2:]))
    out = ops.embedding(wild, table, None)
    assert out[2].isnan().all() and torch.equal(out[[0, 1, 3, 4]], good)
    (found,) = torch.autograd.grad(out, table, torch.ones_like(out))
    assert torch.equal(found, wanted)
