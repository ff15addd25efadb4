"""How much work something is, by the functions that it calls: that is the same on every machine, however busy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    """This thread calls no more functions in here, of Python's and of C's; the one too many is an error at once."""
    made, before = 0, sys.getprofile()

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")
        assert made <= calls, f"more than {calls:,} calls"

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)
    assert made <= calls, f"more than {calls:,} calls"  # where the first word of it was lost
