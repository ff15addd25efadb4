"""How a command is asked to end. After the first SIGTERM, Ctrl-C, SIGUSR1 (from a queue whose time is up) or end of the terminal, a
run finishes its step, or stops its evaluation between two batches, and saves. A command that has nothing to save, or nothing yet,
ends with an exception, which also removes what is half done. A second signal ends the process at once. With several ranks, the
process that started them says which signal is the second (train/launch.py; torchrun passes none on). A download is not waited for:
it may take an hour. Torch-free.
"""

import os
import signal
from contextlib import AbstractContextManager, suppress
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

from ..checkpoint import download
from ..parallel.watch import PARENT, TORCHRUN, outwards, speaks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def heeded() -> list[signal.Signals]:
    """`SIGNALS`, without SIGHUP if it is ignored: nohup has said that the end of the terminal must not end the run."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def imports(frame: FrameType | None) -> bool:
    """Whether a module is being read in that frame, or in one that it was called from."""
    return any("importlib._bootstrap" in f.f_code.co_filename for f in outwards(frame))


class Stop(Exception):
    """A rank of a run was asked to stop, and all ranks know: there is no further step, nor batch of an evaluation."""


class Interrupt(AbstractContextManager["Interrupt"]):
    """True once a signal has asked for the end. Outside the main thread, where Python does not allow handlers, it stays false and
    signals do what they did before. One inside another hears in its place, and what it has heard the other has heard, too."""

    innermost: "Interrupt | None" = None

    def __init__(self) -> None:
        self.asked = self.begun = False
        self.outer: Interrupt | None = None
        self.before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> "Interrupt":
        if current_thread() is main_thread():
            self.before = {number: signal.getsignal(number) for number in heeded()}
            self.outer, Interrupt.innermost = Interrupt.innermost, self
            try:
                for number in self.before:
                    signal.signal(number, self.hear)
            except BaseException:  # one of these was heard at once: it would listen for ever
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.before:
            Interrupt.innermost = self.outer
            if self.outer is not None:
                self.outer.asked |= self.asked
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def begin(self) -> None:
        """Note that from now on there is something to save."""
        self.begun = True

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked and (number == signal.SIGHUP or PARENT in os.environ or TORCHRUN in os.environ):
            return  # a terminal that ends sends several; to a rank comes what its whole job was sent, and its launcher's word too
        if self.asked:
            os._exit(128 + number)  # no clean-up: saves are atomic, and whoever asks twice does not want to wait
        self.asked, fetches = True, download.downloading()
        then = "finishing the step and saving" if self.begun else "ending"
        then = "the download ends, what came whole is kept" if fetches else then
        # Not print: the handler may run inside a print of the main program, whose buffer refuses to be entered twice.
        if speaks():
            again = "" if TORCHRUN in os.environ else "; once more ends it now"  # it passes on one
            with suppress(OSError):  # a log whose reader is gone, a terminal that is closed
                os.write(2, f"\n{signal.Signals(number).name}: {then}{again}\n".encode())
        if fetches or not self.begun:
            if imports(frame):
                os._exit(128 + number)  # nothing is half done, and some modules pass over what is raised while they are read
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
