"""Starts the ranks of a run on this machine and supervises them: it passes on signals, and if a rank fails it ends the others.

On one machine the ranks find each other through a file in a private folder, and communicate over the loopback interface only. If
the environment gives NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, one such process on each machine starts its part of the ranks.
The first rank of a machine has the terminal; the output of another is shown only if it failed first. Torch-free.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn

from ..checkpoint.atomic import staging
from ..checkpoint.state import steps
from ..config import dump_yaml, to_dict
from ..errors import LIMIT, counted, printable, refuse, tell
from ..parallel.check import check
from ..parallel.machine import Machine
from ..parallel.ranks import named
from ..parallel.variable import ALLOCATOR, GROWING, check_address, variable
from ..parallel.watch import ANSWER, LOST, PARENT, STALLED, STARTER, TORCHRUN
from .interrupt import SIGNALS, Interrupt, heeded
from .recipe import Recipe

STORE = "MODELCENTER_STORE"  # where ranks find each other
PLACE = "modelcenter-ranks"  # what the folder for that is called, between what makes it hidden and its own
THREADS = "OMP_NUM_THREADS"  # who sets it says how many threads a rank has
STDERR = 2  # this process's standard error, by its number
PR_SET_PDEATHSIG = 1  # of prctl(2)
BAD_INPUT = 2  # the exit status of a rank that found what a user has to mend
GRACE = 1.0  # seconds in which the rank that failed first may end after those that miss it
HEARD = 4.0  # seconds in which all end of what one has found to be mended: the first, which has the terminal, may have said it
SILENT = "says nothing, it is stopped or its machine is gone"
WORDS = re.compile(r"gloo|nccl|connection|broken pipe|process ?group|\b(tcp|file|hash|prefix)?store\b|wait timeout", re.IGNORECASE)


class RankError(RuntimeError):
    """A rank failed; its message is on stderr. `status`: the exit status of the command. `heard`: the rank has printed why
    itself."""

    def __init__(self, text: str, status: int, heard: bool = False) -> None:
        super().__init__(text)
        self.status, self.heard = status, heard

    @property
    def passing(self) -> bool:
        """Whether the same command may succeed later: the user need not correct anything, and nobody asked for the end."""
        return self.status not in (BAD_INPUT, *(128 + number for number in SIGNALS))


def to_launch(machine: Machine) -> bool:
    """Whether the ranks have yet to be started: no launcher has told this process which rank it is. NNODES machines for one rank
    are refused where they would be (`share_of`): each would do the whole run."""
    return "RANK" not in os.environ and (machine.ranks > 1 or machine.restarts > 0 or nodes_told() > 1)


def nodes_told() -> int:
    """How many machines there are, as the environment says."""
    return variable("NNODES", 1, 2**20, default=1)


def check_ranks(recipe: Recipe, machine: Machine) -> None:
    """Refuse what the ranks of `machine` cannot do in the same way as one process, and forwards that teach or tell nothing."""
    check(machine)
    judged = recipe.data.eval_path is not None or recipe.data.eval_fraction
    if recipe.micro_batch == 1 and (machine.shares == 1 or judged):  # training compares with other ranks' pairs too
        recipe.check_compared("micro_batch")
    if machine.ranks == 1:
        return
    if machine.shares > recipe.batch and recipe.batch_tokens is None:
        found = f"{counted(recipe.batch, 'sequence')} for {machine.shares} ranks"
        refuse(None, "batch", found, "one for each at least, or a smaller machine.fsdp or machine.replicate")


def launch(recipe: Recipe, machine: Machine, verb: str = "train") -> dict[str, Any]:
    """Run `modelcenter VERB` on every rank to its end, and return the first one's answer. If a rank fails, the run is restarted up
    to `machine.restarts` times, and continues from its last state; before it has one, from where it began. Errors: `RankError`."""
    check_ranks(recipe, machine)
    ranks: list[subprocess.Popen[bytes]] = []
    left = machine.restarts
    with forwarding(ranks) as asked:
        while True:
            try:
                return once(recipe, machine, ranks, asked, verb)
            except RankError as error:
                if len(asked) > 1 or (asked and error.status == 128 + signal.SIGTERM):  # at once, or before a rank had begun
                    raise RankError(str(error), 128 + asked[-1], heard=True) from None
                if not left or asked or not error.passing:
                    raise
                tell(f"modelcenter: {error}; the run is restarted ({counted(left - 1, 'more restart')} allowed)")
            left -= 1
            if recipe.resume == "never" or steps(Path(recipe.output_dir)):
                recipe = replace(recipe, resume="auto")


def share_of(machine: Machine) -> tuple[range, bool]:
    """The ranks that this process starts, and whether these are all."""
    nodes = nodes_told()
    node = variable("NODE_RANK", 0, nodes - 1, default=0 if nodes == 1 else None)
    if machine.ranks % nodes:
        refuse("environment", "NNODES", f"{nodes}, for a machine of {counted(machine.ranks, 'rank')}",
               "a divisor of its ranks; none, for what is this host's alone")
    if nodes > 1:
        check_address()
    here = machine.ranks // nodes
    return range(node * here, (node + 1) * here), nodes == 1


def once(recipe: Recipe, machine: Machine, ranks: "list[subprocess.Popen[bytes]]", asked: Sequence[int],
         verb: str) -> dict[str, Any]:
    """Run to the end from where the run stands; `ranks` holds its processes meanwhile. Processes that start after the end was
    `asked` for are told as well."""
    mine, alone = share_of(machine)
    stacks = Path(recipe.output_dir) / "ranks"
    before = stamps(stacks)
    with staging(Path(tempfile.gettempdir()) / PLACE) as place:  # what a launcher that was killed has left is swept
        place.chmod(0o700)
        files = place / "recipe.yaml", place / "machine.yaml"
        for file, values in zip(files, (recipe, machine), strict=True):
            file.write_text(dump_yaml(to_dict(values)), encoding="utf-8")
        command = [sys.executable, "-m", "modelcenter", verb, str(files[0]), "--machine", str(files[1]), "--json"]
        command += ["--debug"] if "--debug" in sys.argv else []
        try:
            for rank in mine:
                ranks.append(start(command, rank, mine, machine.ranks, place, alone))
                if asked:
                    ranks[-1].send_signal(word(asked))
            status = wait(ranks)
        finally:
            for process in ranks:  # those that are left
                process.kill()
                process.wait()
            ranks.clear()
        if STALLED in status:
            stalled(stacks, mine, machine.timeout, before)
        if (first := culprit(status)) is not None:
            fail(mine[first], status[first] or 0, place / f"{mine[first]}.err")
        answer: dict[str, Any] = json.loads((place / f"{mine[0]}.json").read_text(encoding="utf-8"))
        return answer


def threads_of(ranks: int) -> int:
    """How many of this machine's CPU threads each of the ranks that are started on it has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def start(command: Sequence[str], rank: int, mine: range, ranks: int, place: Path, alone: bool) -> "subprocess.Popen[bytes]":
    """Start one rank of `mine`, in a session of its own, so that Ctrl-C reaches it only through `forwarding`, and once."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    known = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback and alone else {}
    usual = {**known, THREADS: str(threads_of(len(mine)))}
    if ranks > 1 and not any(name in os.environ for name in ALLOCATOR):
        usual[ALLOCATOR[0]] = GROWING  # 10 to 22 GiB less are kept for no use of 13B's on an H200
    local = rank - mine[0]
    told = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": len(mine), PARENT: os.getpid(),
            ANSWER: place / f"{rank}.json", **({STORE: place / "store"} if alone else {})}  # fmt: skip
    environment = {**usual, **os.environ, **{key: str(value) for key, value in told.items()}}
    with (place / f"{rank}.err" if local else Path(os.devnull)).open("wb") as said:
        out = said if local else STDERR
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def wait(ranks: "Sequence[subprocess.Popen[bytes]]") -> list[int | None]:
    """How each rank ended, once all have ended or one has failed; None: not yet."""
    while any(process.poll() is None for process in ranks):
        if failed := {process.poll() for process in ranks} - {None, 0}:
            until = time.monotonic() + (HEARD if BAD_INPUT in failed else GRACE)
            while any(process.poll() is None for process in ranks) and time.monotonic() < until:
                time.sleep(0.02)
            break
        time.sleep(0.02)
    return [process.poll() for process in ranks]


def culprit(status: Sequence[int | None]) -> int | None:
    """The first failed rank that has not merely lost another one; None if all have ended well."""
    failed = [rank for rank, code in enumerate(status) if code]
    return min(failed, key=lambda rank: (status[rank] == LOST, rank), default=None)


def fail(rank: int, status: int, said: Path) -> NoReturn:
    """Print what the rank printed, if it does not have the terminal, and raise how it ended."""
    how = f"rank {rank} was ended by signal {-status}" if status < 0 else f"rank {rank} ended with status {status}"
    words = said.read_text(encoding="utf-8", errors="replace").rstrip("\n") if said.exists() else ""
    if words:
        tell(words)
    heard = status > 0 and (not said.exists() or "modelcenter: error: " in words)
    raise RankError(how, 128 - status if status < 0 else status, heard)


def stamps(folder: Path) -> dict[str, int]:
    """When each file there was written. By this a file of an earlier run is recognised, and not by the clock, which may be set
    back."""
    return {file.name: file.stat().st_mtime_ns for file in folder.glob("*.txt")}


def stalled(folder: Path, mine: range, seconds: float, before: Mapping[str, int]) -> NoReturn:
    """Raise an error that says where each rank stands: first those at fault, then those that wait for others. Files that existed
    `before` are ignored."""
    now = stamps(folder)
    places: dict[str, list[int]] = {}
    for rank in mine:
        file = folder / f"{rank}.txt"
        fresh = file.name in now and now[file.name] != before.get(file.name)
        where = file.read_text(encoding="utf-8").partition("\n")[0].partition(": ")[2] if fresh else SILENT
        places.setdefault(where, []).append(rank)
    order = sorted(places, key=lambda where: (where != SILENT, where.startswith("waits")))
    text = ", ".join(f"{named(places[where])}: {where}" for where in order)
    raise RankError(f"no progress for {seconds:g} s: {printable(text)}; {folder} has every stack", STALLED)


@contextmanager
def forwarding(ranks: "Sequence[subprocess.Popen[bytes]]") -> Iterator[list[int]]:
    """While this lasts, pass the first signal on to each rank, and note it; at the second end them. The ranks themselves heed
    SIGTERM only once (`Interrupt`), because whoever ends a job may have sent it to all its processes. Outside the main thread,
    where Python does not allow handlers, nothing happens."""
    asked: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGHUP:
            return  # a terminal that ends sends several
        asked.append(number)
        for process in ranks:
            process.send_signal(word(asked))

    if current_thread() is not main_thread():
        yield asked
        return
    before = {number: signal.signal(number, hear) for number in heeded()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def word(asked: Sequence[int]) -> signal.Signals:
    """What ranks are told of the signals that have come."""
    return signal.SIGTERM if len(asked) == 1 else signal.SIGKILL


def follow() -> None:
    """Let this rank end when the process that started it ends, in whatever way (Linux). A rank of ours is asked for its end, as by
    `forwarding`, so that the run saves. One of torchrun's is killed: the other agents notice only by this that ranks are lost, and
    begin anew with those that are left. If it lived on, or had all ranks save and end, nobody would."""
    ours = PARENT in os.environ
    if sys.platform == "linux" and (ours or TORCHRUN in os.environ):
        number = signal.SIGTERM if ours else signal.SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if str(os.getppid()) != os.environ.get(PARENT, str(STARTER)):  # it has ended before
            os.kill(os.getpid(), number)


def check_asked() -> None:
    """Called by a rank whose run has stopped and saved. Under torchrun one that was not asked itself fails: the agent of those that
    were is leaving, and its own begins anew with who is left. Ended well, it would make the run seem done."""
    if TORCHRUN in os.environ and not Interrupt.innermost:
        if os.environ.get("LOCAL_RANK") == "0":
            tell("modelcenter: ranks of another node were asked to stop, and have saved; the run goes on with those that are left")
        raise RankError("another rank was asked to stop", LOST, heard=True)


def status_of(error: RuntimeError) -> int | None:
    """The exit status of a command: `RankError`'s own, and `LOST` for one of several ranks, whoever has started them, that fails
    because another one has."""
    if isinstance(error, RankError):
        if not error.heard:
            tell(f"modelcenter: error: {error}")
        return error.status
    torchs = any(kind.__module__ == "torch.distributed" for kind in type(error).__mro__)
    if os.environ.get("WORLD_SIZE", "1") == "1" or not (torchs or WORDS.search(str(error))):
        return None
    tell(f"modelcenter: another rank has ended or hangs: {printable(str(error))[:LIMIT]}")
    return LOST
