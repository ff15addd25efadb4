"""Starts the ranks of a run on this machine and stands by them: what it is told they are told, and none outlives another's failure.

They find each other through a file in a private folder and talk over the loopback interface alone. The first rank has the terminal;
what the others say is shown only if it was one of them that failed first. Torch-free.
"""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn

from ..config import dump_yaml, to_dict
from ..errors import LIMIT, printable
from ..parallel.machine import Machine
from .interrupt import SIGNALS
from .recipe import Recipe

STORE, PARENT = "MODELCENTER_STORE", "MODELCENTER_LAUNCHER"  # where ranks find each other, and who has started them
PR_SET_PDEATHSIG = 1  # of prctl(2)
GRACE = 1.0  # seconds in which the rank that failed first may end after those that miss it
LOST = 75  # the exit status of a rank that has lost another
WORDS = re.compile(r"gloo|nccl|connection|broken pipe|process ?group|store", re.IGNORECASE)


class RankError(RuntimeError):
    """A rank failed; what it said is on stderr. `status`: what a command exits with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def to_launch(machine: Machine) -> bool:
    """Whether the ranks are still to be started: nobody has told this process which of them it is."""
    return machine.ranks > 1 and "RANK" not in os.environ


def launch(recipe: Recipe, machine: Machine, verb: str = "train") -> dict[str, Any]:
    """Run `modelcenter VERB` on every rank to its end, and return what the first one answers. Errors: `RankError`."""
    with tempfile.TemporaryDirectory(prefix="modelcenter-") as name:
        place = Path(name)
        files = place / "recipe.yaml", place / "machine.yaml"
        for file, values in zip(files, (recipe, machine), strict=True):
            file.write_text(dump_yaml(to_dict(values)), encoding="utf-8")
        command = [sys.executable, "-m", "modelcenter", verb, str(files[0]), "--machine", str(files[1]), "--json"]
        command += ["--debug"] if "--debug" in sys.argv else []
        ranks: list[subprocess.Popen[bytes]] = []
        with forwarding(ranks):
            try:
                for rank in range(machine.ranks):
                    ranks.append(start(command, rank, machine.ranks, place))
                status = wait(ranks)
            finally:
                for process in ranks:  # those that are left
                    process.kill()
                    process.wait()
        if (first := culprit(status)) is not None:
            fail(first, status[first] or 0, place / f"{first}.err")
        answer: dict[str, Any] = json.loads((place / "0.out").read_text(encoding="utf-8"))
        return answer


def start(command: Sequence[str], rank: int, ranks: int, place: Path) -> "subprocess.Popen[bytes]":
    """One rank, in a session of its own: Ctrl-C reaches it through `forwarding`, and once."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    known = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usual = {**known, "OMP_NUM_THREADS": str(max(1, cores // ranks))}
    mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, STORE: place / "store",
            PARENT: os.getpid()}  # fmt: skip
    environment = {**usual, **os.environ, **{key: str(value) for key, value in mine.items()}}
    with (place / f"{rank}.out").open("wb") as out, (place / f"{rank}.err" if rank else Path(os.devnull)).open("wb") as err:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err if rank else None,
                                start_new_session=True)


def wait(ranks: "Sequence[subprocess.Popen[bytes]]") -> list[int | None]:
    """How each has ended, when all have or one has failed; None: not yet."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            time.sleep(GRACE)
            break
        time.sleep(0.02)
    return [process.poll() for process in ranks]


def culprit(status: Sequence[int | None]) -> int | None:
    """Of the ranks that failed the first that has not merely lost another; None: they have all ended well."""
    failed = [rank for rank, code in enumerate(status) if code]
    return min(failed, key=lambda rank: (status[rank] == LOST, rank), default=None)


def fail(rank: int, status: int, said: Path) -> NoReturn:
    """Say what the rank said, unless everybody has heard it, and how it ended."""
    how = f"rank {rank} was ended by signal {-status}" if status < 0 else f"rank {rank} ended with status {status}"
    if rank:
        sys.stderr.write(said.read_text(encoding="utf-8", errors="replace"))
    if rank or status < 0:
        print(f"modelcenter: error: {how}", file=sys.stderr, flush=True)
    raise RankError(how, 128 - status if status < 0 else status)


@contextmanager
def forwarding(ranks: "Sequence[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Send each rank what asks this process for its end; from outside the main thread, where Python lets nobody listen, nothing."""

    def hear(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            process.send_signal(signal.SIGTERM)

    if current_thread() is not main_thread():
        yield
        return
    before = {number: signal.signal(number, hear) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow() -> None:
    """Have this rank asked for its end, as by `forwarding`, when the process that started it ends in whatever way (Linux)."""
    if PARENT in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != os.environ[PARENT]:  # it has ended before
            os.kill(os.getpid(), signal.SIGTERM)


def status_of(error: RuntimeError) -> int | None:
    """What a command exits with: `RankError`'s own, and `LOST` for a rank of `launch` that fails because another has."""
    if isinstance(error, RankError):
        return error.status
    if STORE not in os.environ or WORDS.search(str(error)) is None:
        return None
    print(f"modelcenter: another rank has ended: {printable(str(error))[:LIMIT]}", file=sys.stderr)
    return LOST
