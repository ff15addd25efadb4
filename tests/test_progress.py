"""What a run says while it works: on a terminal, in a log, and how long it still takes."""

import fcntl
import io
import math
import os
import pty
import struct
import termios
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from modelcenter.train import progress as module
from modelcenter.train.progress import Pace, Progress, clock

ROW = {"step": 5, "loss": 2.5, "lr": 1e-3, "grad_norm": math.nan, "skipped": 2, "tokens_per_second": 12345.6, "memory_gb": 1.25}


class Clock:
    """A time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module.time, "perf_counter", found)
    return found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A real terminal of 40 columns: what reads from it, and the stream that writes to it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")  # of another terminal
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


class Live(io.StringIO):
    """A terminal without a size."""

    def isatty(self) -> bool:
        return True


def test_a_log_has_plain_lines(time: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.show(lambda: ROW, stays=False)
    assert stream.getvalue().count("\n") == 1  # the first step is always said
    progress.show(lambda: ROW, stays=False)
    with progress.aside("evaluation", 5):
        pass
    stream.truncate(0), stream.seek(0)
    progress.show(lambda: ROW, stays=True)
    progress.say("two\nlines")
    text = stream.getvalue()
    assert text.count("\n") == 3 and "\r" not in text and "\x1b" not in text and text.endswith("\ntwo\nlines\n")
    parts = "step 5/10 | loss 2.5000 | lr 1.00e-03 | norm not finite | 12,346 tok/s | 1.2 GB | 0:00 left | 2 skipped\n"
    assert text.startswith(parts)
    assert " | 12.3 MB | " in progress.line({**ROW, "memory_gb": 0.0123})


def test_a_terminal_has_one_line(terminal: tuple[Any, Any], time: Clock) -> None:
    """It is redrawn in place, fits the terminal, and drops what matters least; the steps' loss and the time to the end stay."""
    reader, stream = terminal
    progress = Progress(10, stream=stream)
    progress.show(lambda: ROW, stays=False)
    text = os.read(reader, 4096).decode()
    assert text == "\r\x1b[Kstep 5/10 | loss 2.5000 | 0:00 left"
    time.now += 0.01
    progress.show(lambda: ROW, stays=False)  # too soon to be drawn again
    time.now += 0.2
    progress.show(lambda: ROW, stays=False)
    text = os.read(reader, 4096).decode()
    assert text.count("\r") == 1
    progress.say("a line")
    assert os.read(reader, 4096).decode() == "\r\x1b[Ka line\r\n"  # the terminal's own end of line
    with progress.aside("evaluation", 5):
        assert os.read(reader, 4096).decode() == "\r\x1b[Kstep 5/10 | evaluation ..."


def test_how_far_one_piece_of_work_is(terminal: tuple[Any, Any], time: Clock) -> None:
    """Writing a thousand texts takes long: drawn on a terminal, in a log a line a minute."""
    reader, stream = terminal
    live, log = Progress(10, stream=stream), io.StringIO()
    plain = Progress(10, stream=log)
    with live.aside("evaluation", 5), plain.aside("evaluation", 5):
        os.read(reader, 4096)
        for done in range(0, 1500, 8):
            time.now += 1
            for progress in (live, plain):
                progress.part("texts written", done, 1500)
            assert os.read(reader, 4096).decode() == f"\r\x1b[K{done:,} of 1,500 texts written"
    assert log.getvalue() == "480 of 1,500 texts written\n968 of 1,500 texts written\n1,456 of 1,500 texts written\n"


@pytest.mark.parametrize("width", range(1, 120))
def test_a_line_fits(width: int) -> None:
    progress = Progress(10, stream=io.StringIO())
    line = progress.line(ROW, width)
    assert len(line) <= width and line.startswith("step 5/10"[:width])
    if width >= 13:
        assert not line.endswith(" ") and " | |" not in line


def test_a_dumb_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Live()
    Progress(10, stream=stream).show(lambda: ROW, stays=True)
    assert "\r" not in stream.getvalue() and stream.getvalue().endswith("\n")


def test_data_cannot_move_the_cursor() -> None:
    stream = io.StringIO()
    Progress(10, stream=stream).say("sample: \x1b[2J\rgone\n  next")
    assert stream.getvalue() == "sample: \\x1b[2J\\rgone\n  next\n"


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    progress = Progress(10, stream=Gone())
    progress.say("a")
    progress.show(lambda: ROW, stays=True)
    closed = io.StringIO()
    progress = Progress(10, stream=closed)
    closed.close()
    progress.say("a")


@pytest.mark.parametrize(("seconds", "of", "lines"), [
    (5.2, 8, ["the first of a step's 8 forwards took 5 s, loss 2.1250"]),  # and nothing of the other seven
    (5.2, 1, []),  # the step's own line comes at once
    (1.0, 8, []),
])  # fmt: skip
def test_a_slow_first_step_says_how_far_it_is(time: Clock, seconds: float, of: int, lines: list[str]) -> None:
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    for number in range(1, of + 1):
        time.now += seconds
        progress.forward(number, of, torch.tensor(2.125))
    assert stream.getvalue().splitlines() == lines
    progress.show(lambda: ROW, stays=False)
    progress.forward(1, of, torch.tensor(2.125))
    assert len(stream.getvalue().splitlines()) == len(lines) + 1


def test_a_silent_one_says_nothing() -> None:
    for stream in (io.StringIO(), Live()):
        progress = Progress(10, stream=stream, silent=True)
        progress.say("a")
        progress.show(lambda: ROW, stays=True)
        with progress.aside("saving", 3):
            pass
        assert stream.getvalue() == ""


# ------------------------------------------------------------------------------------------------------ time to the end


def walk(pace: Pace, time: Clock, start: int, stop: int, step: float, others: dict[str, tuple[int, float]], slow: float = 0.0
         ) -> list[tuple[float, float]]:
    """(left, as predicted; moment) after each step of a run whose other work is {kind: (every, seconds)}."""
    out = []
    for k in range(start + 1, stop + 1):
        time.now += step + (slow if k == start + 1 else 0.0)
        pace.step()
        out.append((pace.left(k), time.now))
        for kind, (every, seconds) in others.items():
            if k % every == 0 or k == pace.total:
                time.now += seconds
                pace.other(kind, seconds)
    return out


@pytest.mark.parametrize("start", [0, 700])
def test_the_time_left_is_right(time: Clock, start: int) -> None:
    """From the beginning or resumed, in the middle of anything, once each kind of work was met; the first step was slow."""
    others = {"evaluation": (25, 30.0), "saving": (40, 5.0)}
    pace = Pace(1010, {kind: every for kind, (every, _) in others.items()})
    found = walk(pace, time, start, 1010, 0.5, others, slow=60.0)
    for left, moment in found[45:]:
        assert left == pytest.approx(time.now - moment, rel=1e-6)
    assert found[-1][0] == 35.0  # of the evaluation and the state after the last step


def test_the_pace_is_a_recent_one(time: Clock) -> None:
    pace = Pace(1000, {})
    walk(pace, time, 0, 200, 1.0, {})
    walk(pace, time, 200, 400, 3.0, {})
    assert pace.left(400) == pytest.approx(600 * 3.0)


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.9, "1:00:00"), (3661, "1:01:01"), (90061, "1d 1:01:01"),
])  # fmt: skip
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
