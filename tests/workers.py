"""What workers of `tokenize` do in the place of `encode` (test_data_tokenize.py): of its own, because who imports that file imports
torch, for seconds."""

import os
import signal
from typing import Any


def pressed(records: Any) -> tuple[bytes, bytes]:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.SIGINT in signal.sigpending()
    except KeyboardInterrupt:
        raise AssertionError("heard") from None
    return bytes(2), bytes([1, 0, 0, 0])


def die(records: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
