"""Files and folders that appear whole or not at all, whatever kills the process or fills the disk.

One order everywhere: write under a hidden name on the same file system, flush the bytes, rename, flush the name.
Plain files only, no torch.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR

from ..errors import InputError, refuse
from ..errors import size as in_words
from ..parallel.watch import beat

Bytes = bytes | memoryview
EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2): two names swap in one step
AT_FDCWD = -100
HIDDEN = re.compile(r"\.tmp-.+-[0-9a-f]{8}", re.DOTALL)  # names that `hidden` gives
UNABLE = (errno.EINVAL, errno.EOPNOTSUPP)  # what fsync(2) says of a folder where the file system has no such thing
UNFLUSHED = 4 * 2**30  # bytes that may wait for the disk: a flush of many more would be taken for standing still


def write_new(path: str | os.PathLike[str], chunks: Iterable[Bytes]) -> int:
    """Create `path`, which must not exist, write every chunk and flush it to the disk; the number of bytes written."""
    total = flushed = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # the umask decides the mode
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            while len(rest):  # a write may be short, and Linux writes at most 2 GiB a call
                done = os.write(fd, rest)
                if done == 0:
                    raise OSError(errno.EIO, "the disk took no bytes", os.fspath(path))
                rest, total = rest[done:], total + done
                if total - flushed > UNFLUSHED:
                    os.fsync(fd)
                    flushed = total
                beat()
            del chunk, rest  # let this one go before the next is made: they are as large as a model's largest tensor
        os.fsync(fd)
    finally:
        os.close(fd)
    return total


def atomic_write(path: str | os.PathLike[str], data: Bytes) -> None:
    """Replace the content of `path` by `data`: a reader, or a crash, sees the old content or the new and nothing in between.

    A symbolic link is followed. Errors: `InputError` with the system's reason; the old file is then unchanged.
    """
    path = Path(path).resolve()
    temp = hidden(path)
    with disk_errors(path):
        try:
            write_new(temp, [data])
            os.replace(temp, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
        sync(path.parent)


def sweep_files(folder: str | os.PathLike[str]) -> None:
    """Remove what killed calls of `atomic_write` left in `folder`. Only for the sole writer there: it would remove a live writer's
    file."""
    for path in Path(folder).glob(".tmp-*"):
        if HIDDEN.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            with suppress(OSError):
                path.unlink()


@contextmanager
def staging(final: str | os.PathLike[str]) -> Iterator[Path]:
    """A new empty folder `.tmp-<name>-<nonce>` beside `final`, to be committed inside the `with`.

    Whatever is left under its name at the end is removed, on success and on any error; so are parents created for it, if it fails.
    What a killed process left for the same name is removed first: a live process holds a lock on its folder.
    Errors: `InputError` instead of `OSError`.
    """
    final = Path(final).resolve()
    with disk_errors(final):
        missing = [p for p in (final.parent, *final.parent.parents) if not p.exists()]
        final.parent.mkdir(parents=True, exist_ok=True)
        sweep(final.parent, final.name)
        temp, lock = _locked_folder(final)
        try:
            yield temp
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            with suppress(OSError):  # stops at the first parent that somebody else uses by now
                for folder in missing:
                    folder.rmdir()
            raise
        else:
            shutil.rmtree(temp, ignore_errors=True)
        finally:
            os.close(lock)


def commit_folder(temp: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Flush everything under `temp`, then rename it to `final`, which must be absent or an empty folder."""
    temp, final = Path(temp), Path(final).resolve()
    with disk_errors(final):
        if final.is_dir():
            shutil.copymode(final, temp)
        sync_tree(temp)
        os.rename(temp, final)  # replaces an empty folder; a folder with anything in it is ENOTEMPTY
        sync(final.parent)


def replace_folder(temp: str | os.PathLike[str], final: str | os.PathLike[str], drop: Callable[[str], bool]) -> None:
    """Swap the folder `temp` for the existing `final` in one step; afterwards `temp` holds the old files.

    Entries of `final` that `temp` lacks are kept (hard links), except those whose name `drop` picks. Replacing file by
    file would not do: a kill between two shards leaves half of each model, and nothing to tell it by.
    """
    temp, final = Path(temp), Path(final).resolve()
    with disk_errors(final):
        ours = set(os.listdir(temp))

        def left(folder: str, names: list[str]) -> set[str]:
            return {n for n in names if n in ours or drop(n)} if os.path.samefile(folder, final) else set()

        shutil.copytree(final, temp, symlinks=True, ignore=left, copy_function=_link, dirs_exist_ok=True)
        sync_tree(temp)
        if not _exchange(temp, final):
            aside = hidden(final)
            try:
                os.rename(final, aside)
                os.rename(temp, final)
            except BaseException:
                with suppress(OSError):  # it was not yet aside, or the new one has its place
                    os.rename(aside, final)
                raise
            os.rename(aside, temp)
        sync(final.parent)


def check_space(folder: str | os.PathLike[str], size: int) -> None:
    """Refuse when the file system that holds `folder` (or will, once it is made) has fewer than `size` bytes free."""
    free = free_at(Path(folder).resolve())
    if free < size:
        refuse(folder, None, f"{in_words(free)} free, {in_words(size)} needed", "free space or another disk")


def free_at(path: Path) -> int:
    """The free bytes of the file system that holds `path`, or will, once it is made."""
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file's bytes, or a folder's names, to the disk; a file system that cannot flush a folder has it as safe as it can."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        beat()
    except OSError as error:
        if error.errno not in UNABLE or not S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)


def sync_tree(folder: str | os.PathLike[str]) -> None:
    """Flush every file and folder under `folder`, and itself last."""
    for here, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = os.path.join(here, name)
            if os.path.isfile(path) and not os.path.islink(path):
                sync(path)
        sync(here)


@contextmanager
def disk_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` of the block into the one line a user needs: which file, and the system's reason."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        refuse(path, None, error.strerror or str(error), "nothing was changed")


def hidden(final: Path) -> Path:
    """A name beside `final` that nobody has, for what is not whole yet or about to go."""
    return final.with_name(f".tmp-{short(final.name)}-{secrets.token_hex(4)}")


def short(name: str) -> str:
    """As much of a name as leaves room in the 255 bytes that a file system has for one."""
    return os.fsdecode(os.fsencode(name)[:200])


def _locked_folder(final: Path) -> tuple[Path, int]:
    """A new hidden folder and the descriptor whose lock says that its writer lives."""
    while True:
        temp = hidden(final)
        temp.mkdir()
        try:
            lock = _lock(temp)
        except OSError:  # a file system without locks: nobody sweeps there either
            return temp, os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
        if lock is not None:
            return temp, lock


def _lock(folder: Path) -> int | None:
    """An exclusive lock on `folder`, or None when somebody else holds it or it went away meanwhile."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():  # no: a sweep removed it between our open and our lock
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def sweep(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove the hidden folders that dead processes left in `folder`, or only those for `name`; a living maker holds a lock."""
    pattern = HIDDEN if name is None else re.compile(re.escape(f".tmp-{short(name)}-") + r"[0-9a-f]{8}")
    for path in Path(folder).iterdir():
        if pattern.fullmatch(path.name) and not path.is_symlink() and path.is_dir():
            with suppress(OSError):
                if (lock := _lock(path)) is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False if the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
