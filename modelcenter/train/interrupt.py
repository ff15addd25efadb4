"""Asking a run to stop. The first SIGTERM, Ctrl-C or end of its terminal lets it finish its step and save; a second one ends it at
once. With several ranks, the process that started them says which is the second (train/launch.py). A download is not waited for: it
may take an hour, and leaves nothing to save."""

import os
import signal
from contextlib import AbstractContextManager, suppress
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

from ..checkpoint import download
from ..parallel.watch import PARENT

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """`SIGNALS`, without SIGHUP if it is ignored: nohup has said that the end of the terminal must not end the run."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class Interrupt(AbstractContextManager["Interrupt"]):
    """True once a signal has asked for the end. Outside the main thread, where Python does not allow handlers, it stays false and
    signals do what they did before."""

    def __init__(self) -> None:
        self.asked = False
        self.then = "ending when data and model are ready, with nothing done"  # what is said: there are no steps yet
        self.before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> "Interrupt":
        if current_thread() is main_thread():
            self.before = {number: signal.signal(number, self.hear) for number in heeded()}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def begin(self) -> None:
        """Say that from now on there is something to save."""
        self.then = "finishing the step and saving"

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked and (number == signal.SIGHUP or PARENT in os.environ):
            return  # a terminal that ends sends several; to a rank comes what its whole job was sent, and its launcher's word too
        if self.asked:
            os._exit(128 + number)  # no clean-up: saves are atomic, and whoever asks twice does not want to wait
        self.asked = True
        then = "the download ends, what came whole is kept" if download.downloading() else f"{self.then}; once more ends it now"
        # Not print: the handler may run inside a print of the main program, whose buffer refuses to be entered twice.
        with suppress(OSError):  # a log whose reader is gone, a terminal that is closed
            os.write(2, f"\n{signal.Signals(number).name}: {then}\n".encode())
        if download.downloading():  # by an exception, on whose way the client removes the half of a file that it has
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
