"""Batches made ahead are the same in the same order, errors come where they belong, and no thread stays behind."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelcenter.data.prefetch import prefetch
from modelcenter.errors import InputError


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "prefetch"]


@given(size=st.integers(0, 30), depth=st.integers(1, 4), taken=st.integers(0, 30))
def test_the_same_in_the_same_order(size: int, depth: int, taken: int) -> None:
    assert list(prefetch(iter(range(size)), depth)) == list(range(size)) and not threads()
    some = prefetch(iter(range(size)), depth)
    assert [next(some) for _ in range(min(taken, size))] == list(range(min(taken, size)))
    some.close()
    assert not threads(), "the thread outlives its reader"


def test_an_error_stands_where_its_item_would() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise InputError("a.bin: byte 4: odd")

    found = prefetch(broken())
    assert (next(found), next(found)) == (1, 2)
    with pytest.raises(InputError, match="byte 4"):
        next(found)
    assert not threads()


def test_work_goes_on_while_the_reader_does_something_else() -> None:
    made: list[int] = []

    def slow() -> Iterator[int]:
        for k in range(9):
            made.append(k)
            yield k

    found = prefetch(slow(), 2)
    assert next(found) == 0
    until = time.monotonic() + 200
    while len(made) < 4 and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3], "two wait, the next is made and finds no room"
    found.close()
    assert not threads()
