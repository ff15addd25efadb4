"""Allows one live run per output folder: who holds it, and what dead processes have left there."""

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import printable, refuse, tell
from .atomic import disk_errors, sweep

_held: set[int] = set()  # descriptors of the locks that this process holds


@contextmanager
def lock(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Lock `output_dir` for this run, or refuse and name the run that holds it; one process per run takes the lock.

    The kernel releases it however the process ends, and forked children do not inherit it. On entry the temporary
    folders that dead processes left are removed.
    """
    folder = Path(output_dir)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(held)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(held, 100, 0).decode(errors="replace").strip() or "unknown"
            refuse(folder, None, f"in use by a live run ({owner})", "stop it, wait for it or give another output_dir")
        except OSError as error:  # some network file systems have none: then a name must do, as far as it can
            owner = os.pread(held, 100, 0).decode(errors="replace").strip()
            if _lives(owner):
                refuse(folder, None, f"in use by a live run ({owner})", f"stop it or, if it is not one, remove {folder / '.lock'}")
            last = f"; the last one did not end by itself: {owner}" if owner else ""
            alone = "make sure that no second run writes here"
            tell(f"modelcenter: {printable(f'{folder}: this file system has no locks ({error.strerror}); {alone}{last}')}")
        with suppress(OSError):  # on a full disk the lock still holds, only nameless
            os.ftruncate(held, 0)
            os.pwrite(held, f"{_me()} since {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n".encode(), 0)
        sweep(folder)
        yield
        with suppress(OSError):
            os.ftruncate(held, 0)
    finally:
        if held in _held:
            _held.discard(held)
            os.close(held)


def _me(process: int | None = None) -> str:
    return f"process {os.getpid() if process is None else process} on {platform.node()}"


def _lives(owner: str) -> bool:
    """Whether the process that a lock file names runs on this machine; of another machine this cannot be known."""
    found = re.match(r"process ([1-9][0-9]{0,9}) on ", owner)
    if found is None or not owner.startswith(_me(int(found[1])) + " since ") or int(found[1]) == os.getpid():
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        pass
    return True


def _let_go() -> None:
    """In a forked child: close the parent's lock, else a loader's worker that outlives a killed run would hold it."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
