"""Makes batches in another thread while the model works. Order and content are the loader's; no state is kept here."""

from collections.abc import Generator, Iterator
from queue import Empty, Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")
DEPTH = 2  # what may wait: more than one, so that a slow batch after a quick one costs nothing


def prefetch(items: Iterator[T], depth: int = DEPTH) -> Generator[T, None, None]:
    """The same items, up to `depth` of them made before they are asked for. An error is raised where its item would stand;
    `close` ends the thread."""
    waiting: Queue[tuple[T] | BaseException | None] = Queue(depth)
    ended = Event()

    def work() -> None:
        try:
            for item in items:
                waiting.put((item,))
                if ended.is_set():
                    return
            waiting.put(None)
        except BaseException as error:  # whatever it is, it is the reader's
            waiting.put(error)

    thread = Thread(target=work, name="prefetch", daemon=True)  # a daemon: nobody waits for it when the process ends
    thread.start()
    try:
        while (found := waiting.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found[0]
    finally:
        ended.set()
        while thread.is_alive():  # it may be waiting for room, more than once
            try:
                waiting.get(timeout=0.01)
            except Empty:
                thread.join(0.01)
