"""What every test file shares."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Training flushes denormals to zero for the whole process, and hypothesis rightly refuses to draw floats there."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)
