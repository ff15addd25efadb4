"""Checks that files are what they seem: regular files, inside their folder."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import refuse, refuse_missing


def check_inside(path: str | os.PathLike[str], folder: Path | None = None) -> None:
    """Refuse what is missing, is no regular file, or leads out of `folder`, by default its own, by a link.

    The hub cache's own layout is fine: snapshots/<revision>/<file>, or a file in a folder there, is a link into blobs, beside
    snapshots.
    """
    path = Path(path)
    here = (folder or path.parent).resolve()
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError:
        refuse_missing(path, None, "a link to nothing" if path.is_symlink() else "no such file", "the file")
    except (OSError, RuntimeError) as error:
        refuse(path, None, getattr(error, "strerror", None) or "a loop of links", "a readable file")
    if not stat.S_ISREG(mode):
        refuse(path, None, kind_of(mode), "a regular file")
    cache = any(top.parent.name == "snapshots" and real.parent == top.parent.parent / "blobs" for top in (here, here.parent))
    if not real.is_relative_to(here) and not cache:
        refuse(path, None, f"a link out of its folder, to {real}", "a file inside it")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; a folder, FIFO, socket or device is refused without waiting on it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        refuse_missing(path, None, "no such file", "an existing file")
    except (OSError, ValueError) as error:
        refuse(path, None, getattr(error, "strerror", None) or str(error), "a readable file")
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        refuse(path, None, kind_of(mode), "a regular file")
    return os.fdopen(fd, "rb")


def kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
