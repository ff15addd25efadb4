"""Ends a run of several ranks that hangs, and has every rank report where it stands.

A rank that waits for another cannot tell whether that one is working or stuck, and would wait for ever. So whatever makes progress
calls `beat`, and ranks count the beats in their store. If there was none for long, a thread writes the stacks of all threads and
ends the process, after telling the other ranks to do the same. The culprit is the rank that is not waiting for others. Torch-free
until there are several ranks.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..errors import printable, tell
from .ranks import Ranks

PARENT = "MODELCENTER_LAUNCHER"  # of the environment: the process that has started this rank, and speaks for all (train/launch.py)
TORCHRUN = "TORCHELASTIC_RUN_ID"  # likewise, if it is torchrun
STARTER = os.getppid()  # the process that has started this one, unless it has ended since
ANSWER = "MODELCENTER_ANSWER"  # of the environment: the file for what this rank answers; libraries print to its standard output
STALLED = 76  # the exit status of a rank of a run that stood still
LOST = 75  # that of a rank that has lost another
FIRST = 3  # times as long as between any two beats it may take to the first one: data is read, kernels are compiled
PAUSE = 0.2  # seconds between two looks at another thread
GRACE = 2.0  # seconds from the word to the end, in which the others write their stacks too
STILL, AGAIN = "still", "again"  # keys under which ranks hear that all stands still, and that one of them has been started anew
MOVED = "moved"  # that under which they count their progress
PACKAGE = str(Path(__file__).resolve().parent.parent)
MEETING = f"{os.sep}torch{os.sep}distributed{os.sep}"  # in the paths of what makes ranks wait for each other


class Pulse:
    """When progress was last made, and whether a first step is still to come."""

    def __init__(self) -> None:
        self.last, self.first = time.monotonic(), True
        self.wanted = True  # whether what is being done is still to be finished


class Unwanted(Exception):
    """Ends, at its next beat, what another thread does and nobody waits for any more."""


_run = Pulse()  # of this process
_own = threading.local()  # of a thread of which `apart` keeps a pulse


def beat(step: bool = False) -> None:
    """Note progress: bytes of a file, a record read, a token generated; or a `step`, which is a forward with its backward, or a
    batch evaluated. Errors: `Unwanted`."""
    pulse: Pulse = getattr(_own, "pulse", _run)
    if not pulse.wanted:
        raise Unwanted
    pulse.last = time.monotonic()
    pulse.first = pulse.first and not step


@contextmanager
def apart(pulse: Pulse) -> Iterator[None]:
    """Let progress of this thread count for `pulse`, and for the process only while it waits for that (`wait_for`): a run that
    stands still while a state is written in the background does stand still."""
    _own.pulse = pulse
    try:
        yield
    finally:
        del _own.pulse


def wait_for(job: "Future[Any]", pulse: Pulse) -> None:
    """Wait for what another thread does; meanwhile its progress counts as this process's."""
    while not wait([job], timeout=PAUSE).done:
        _run.last = max(_run.last, pulse.last)


class Watch(AbstractContextManager["Watch"]):
    """Watches over this process, which is one of `ranks`. After `seconds` without progress its stacks are written to
    `folder`/RANK.txt."""

    def __init__(self, folder: Path, ranks: Ranks, seconds: float) -> None:
        self.file, self.ranks, self.seconds = folder / f"{ranks.rank}.txt", ranks, seconds
        self.pause = min(1.0, seconds / 10)
        self.moved, self.heard = 0, 0.0  # how often ranks have moved, and when this one heard so
        self.ended, self.told = threading.Event(), ""
        self.store: Any = None
        self.looks = threading.Thread(target=self.look, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        global _run
        if self.ranks.size > 1:
            _run = Pulse()
            with suppress(OSError):
                self.file.unlink()  # of a run before
            self.store = own_store()
            self.store.set_timeout(timedelta(seconds=self.seconds))
            for thread in (self.looks, threading.Thread(target=self.listen, name="watch", daemon=True)):
                thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.ended.set()
        if self.ranks.size > 1:
            self.looks.join()  # for ever where it has given up: that another rank has ended meanwhile is no error of this one
            faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """Give up when nothing has moved for long or another rank says so. If this thread itself cannot run, because some code
        keeps the interpreter to itself, faulthandler's thread, which needs none, ends the process."""
        while not self.ended.wait(self.pause):
            faulthandler.dump_traceback_later(self.limit + GRACE + 2 * self.pause, exit=True, file=sys.__stderr__ or 2)
            if self.told:
                self.give_up(self.told)
            if time.monotonic() - max(_run.last, self.heard) > self.limit:
                self.give_up(f"no progress for {self.limit:g} s")

    def listen(self) -> None:
        """Hear from the others; in a thread of its own, because a store whose host is gone may not answer. Who has written a share
        of a state waits for who has a larger one to write: as long as one of them moves the run does. A store in a file keeps all
        that it is ever told, so it is told only of progress, and of that now and then."""
        told, due = _run.last, 0.0
        while not self.ended.wait(self.pause):
            with suppress(RuntimeError):  # the first rank has gone, and its store with it: whoever needs it will find out
                if self.store.check([AGAIN]):
                    os._exit(LOST)
                if self.store.check([STILL]):
                    self.told = self.store.get(STILL).decode(errors="replace")
                    return
                last, now = _run.last, time.monotonic()
                if mine := last > told and now >= due:
                    told, due, moved = last, now + self.seconds / 10, self.store.add(MOVED, 1)
                else:
                    moved = int(self.store.get(MOVED)) if self.store.check([MOVED]) else 0
                if moved != self.moved + mine:  # others have
                    self.heard = now
                self.moved = moved

    @property
    def limit(self) -> float:
        return self.seconds * (FIRST if _run.first else 1)

    def give_up(self, why: str) -> None:
        """Write down where every thread stands, tell the others, and end."""
        where, text = stacks()
        rank = self.ranks.rank
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(f"rank {rank}: {where}\n{why}\n\n{text}", encoding="utf-8")
        if PARENT not in os.environ:
            tell(f"modelcenter: error: {printable(why)}: rank {rank} {where}; {self.file} has its stacks")
        threading.Thread(target=self.tell, args=(why,), daemon=True).start()
        time.sleep(GRACE)
        os._exit(STALLED)

    def tell(self, why: str) -> None:
        with suppress(RuntimeError):
            if not self.told:
                self.store.set(STILL, why)


def speaks() -> bool:
    """Whether this process is the one of its ranks, or of those of this machine that another one has started, that says things."""
    return os.environ.get("LOCAL_RANK" if PARENT in os.environ else "RANK", "0") == "0"


def own_store() -> Any:
    """A second connection to the store in which the ranks met: while a thread waits on a connection nobody else can use it."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    store: Any = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.clone()


def stacks() -> tuple[str, str]:
    """Where the main thread stands, as a clause, and the stacks of all threads but the watch's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {names.get(ident, str(ident)): frame for ident, frame in sys._current_frames().items()}
    frames.pop("watch", None)
    main = threading.main_thread().name
    where = clause(frames[main]) if main in frames else "has no main thread"
    others = [f"{name} {clause(frame)}" for name, frame in frames.items() if name == "prefetch" and "waits" not in where]
    parts = [f"thread {name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in frames.items()]
    return "; its thread ".join([where, *others]), "\n".join(parts)


def clause(frame: FrameType) -> str:
    """`stands at data/prefetch.py:36 (prefetch)`, or `waits for others at parallel/ranks.py:113 (sum)`."""
    verb, imports = "stands", False
    for f in outwards(frame):
        path = f.f_code.co_filename
        imports = imports or "importlib" in path  # a module of torch's that is being read waits for nobody
        if MEETING in path and not imports:
            verb = "waits for others"
        if path.startswith(PACKAGE):
            return f"{verb} at {os.path.relpath(path, PACKAGE)}:{f.f_lineno} ({f.f_code.co_name})"
    return f"{verb} at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
