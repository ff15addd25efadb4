"""Names the ranks that are stopped or gone while ranks connect to each other: without this the others would wait in torch for
minutes, and then get an error that names nobody. Each rank keeps its own time, and one whose time is up asks in the store which
ranks are still there.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn

from ..errors import LateError, message, tell
from .ranks import named

CALL = "call"  # the key under which ranks hear that they are called
PAUSE = 0.5  # seconds between two looks
PATIENCE = 3.0  # seconds in which a rank answers that is there


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """What is done inside ends within `seconds`, or the process does. A store that is a file has a lock, for which it waits without
    a limit, and a rank may be stopped while it holds that."""
    found = f"the store in which the ranks meet has not answered for {seconds:g} s"
    last = threading.Timer(seconds, leave, [found, "start all of them again"])
    last.daemon = True
    last.start()
    try:
        yield
    finally:
        last.cancel()


def leave(found: str, wanted: str) -> NoReturn:
    """End the process, which has waited for others in vain."""
    tell(f"modelcenter: error: {message('environment', 'WORLD_SIZE', found, wanted)}")
    os._exit(LateError.status)


class RollCall(AbstractContextManager["RollCall"]):
    """Rank `rank` of `size`, which have met in `store`, connects to the others inside. After `seconds`, or when one of them fails
    in it, the process ends with `LateError`'s status and a line that names the ranks that do not answer."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        self.store = store
        self.keys, self.mine, self.seconds = [f"there/{n}" for n in range(size)], f"there/{rank}", seconds
        self.first, self.began, self.why = rank == 0, time.monotonic(), ""
        self.done = threading.Event()
        self.listens = threading.Thread(target=self.listen, name="roll call", daemon=True)
        # a store whose host is stopped answers no question, not even too late
        self.last = threading.Timer(seconds + 3 * PATIENCE, self.end, ["the store in which the ranks have met does not answer"])
        self.last.daemon = True

    def __enter__(self) -> "RollCall":
        self.last.start()
        self.listens.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError):  # torch's own
            self.why = f" ({' '.join(str(error).split())})"
            self.listens.join()  # for ever, but where the store has gone
            self.end(f"the store in which the ranks have met has gone{self.why}")
        if error is None:
            self.store.set(self.mine, "")
        self.done.set()
        self.last.cancel()

    def listen(self) -> None:
        """Call the roll when the time is up, or another rank does."""
        with suppress(RuntimeError):  # the store has gone with its host
            store = self.store.clone()  # a connection of its own: on that one torch waits
            while not self.done.wait(PAUSE):
                if self.why or time.monotonic() - self.began > self.seconds or store.check([CALL]):
                    self.call(store)

    def call(self, store: Any) -> NoReturn:
        """End, having heard who is there."""
        store.set(CALL, "")
        store.set(self.mine, "")
        until = time.monotonic() + PATIENCE
        while not store.check(self.keys) and time.monotonic() < until:
            time.sleep(PAUSE)
        silent = [rank for rank, key in enumerate(self.keys) if not store.check([key])]
        time.sleep(2 * PAUSE * self.first)  # the store goes with the first rank: the others may ask it so long
        if silent:
            self.end(f"{len(self.keys)}, but {named(silent)} {'does' if len(silent) == 1 else 'do'} not answer")
        self.end(f"{len(self.keys)}, who have met, but do not reach each other{self.why}",
                 "GLOO_SOCKET_IFNAME: an interface that reaches the other machines, and ports open between them")

    def end(self, found: str, wanted: str = "") -> NoReturn:
        waited = time.monotonic() - self.began
        wanted = wanted or f"start all of them again; they have machine.timeout, {self.seconds:g} s"
        leave(f"{found}, {waited:.0f} s after all had come", wanted)
