"""docs/parallel.md says of every pair of what a machine may ask for what comes of it."""

import pairs
import pytest
from pairs import EQUAL

PARTS = 4  # one after another they are minutes

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def test_the_page_has_every_pair_and_no_other() -> None:
    said = pairs.written()
    assert list(said) == [" x ".join(pair) for pair in pairs.pairs()]
    assert pairs.table(said) == pairs.DOC.read_text(encoding="utf-8")


def test_where_devices_are_few_the_others_pairs_are_left_out() -> None:
    """Two GPUs try what two ranks can show, and that is most of the page; no pair is for more than four."""
    some = pairs.pairs()
    assert {pairs.ranks_of(pair) for pair in some} == {1, 2, 4}
    assert pairs.here(some, 2) == [pair for pair in some if pairs.ranks_of(pair) < 4] and len(pairs.here(some, 2)) > len(some) / 2
    assert pairs.here(some, 4) == pairs.here(some) == some


def test_what_is_refused_is_refused_with_that_text() -> None:
    """If anything is, and a few that are not."""
    said = pairs.written()
    adapted = [("fsdp=2", "QLoRA"), ("tensor_parallel=2", "QLoRA"), ("sequence_parallel", "QLoRA"), ("tensor_parallel=2", "DoRA")]
    others = (0, 5, 40, *map(pairs.pairs().index, adapted))
    some = [pair for k, pair in enumerate(pairs.pairs()) if said[" x ".join(pair)] != EQUAL or k in others]
    assert pairs.tried(some) == {" x ".join(pair): said[" x ".join(pair)] for pair in some}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler has many to give
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_is_what_the_page_says(part: int) -> None:
    said, some = pairs.written(), pairs.here(pairs.pairs())[part::PARTS]
    assert pairs.tried(some) == {" x ".join(pair): said[" x ".join(pair)] for pair in some}
