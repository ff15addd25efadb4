"""One way to refuse: bad input is one line that names the file, the key, what was found and what is wanted."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from os import PathLike
from typing import Any, NoReturn

LIMIT = 300  # characters of a message; a hostile file must not fill the terminal


class InputError(ValueError):
    """An error in the input, which the user can correct. The text is `<file>: <key or byte>: <found>; <wanted>`; `status` is the
    exit status of a command."""

    status = 2


class LateError(InputError):
    """Another process did not connect in time. The user may have to correct something, or only to start all processes again."""

    status = 75  # sysexits.h: a temporary failure


class MissingError(InputError, FileNotFoundError):
    """A file or a name that does not exist."""


def refuse(file: str | PathLike[str] | None, key: str | None, found: str, wanted: str) -> NoReturn:
    """Raise `InputError` with one line for the user; parts that do not apply are None. `wanted` names a thing, or what to do."""
    raise InputError(message(file, key, found, wanted))


def refuse_missing(file: str | PathLike[str] | None, key: str | None, found: str, wanted: str) -> NoReturn:
    """`refuse`, for something that does not exist: the error is also a `FileNotFoundError`."""
    raise MissingError(message(file, key, found, wanted))


def message(file: str | PathLike[str] | None, key: str | None, found: str, wanted: str) -> str:
    """The line itself: control characters escaped, at most `LIMIT` characters, half of them for the remedy, cut between words."""
    parts = [printable(str(part)) for part in (file, key, found) if part is not None]
    tail = printable(wanted)
    if len(tail) > LIMIT // 2:
        cut = tail[: LIMIT // 2 - 4]
        tail = f"{cut.rpartition(' ')[0] or cut} ..."
    room = LIMIT - len(tail) - 2
    while (over := len(": ".join(parts)) - room) > 0:  # the longest part gives way, so that the others stay readable
        longest = max(range(len(parts)), key=lambda i: len(parts[i]))
        parts[longest] = parts[longest][: max(len(parts[longest]) - over - 3, 20)] + "..."
    return f"{': '.join(parts)}; {tail}"


def tell(text: str) -> None:
    """Print a line on stderr, if there is one: a terminal or a pipe that is gone ends no run."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` with control and other unprintable characters escaped, so that a name cannot move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def size(count: int) -> str:
    """Bytes for people, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.{1 if count < 100 * unit else 0}f} {name}"
    return f"{count} B"


def counted(count: int, what: str) -> str:
    """A number of things in words: 1 thread, 2 threads."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def nearest(word: Any, known: Iterable[str]) -> str:
    """`did you mean X?`, or the list of what is known. The same word in other letters (`BF16`) comes first, then those that begin
    with it, then one that looks like it."""
    names = {str(k): str(k).casefold() for k in known}
    sought = str(word).casefold()
    begin = sought if len(sought) > 2 else f"{sought}-"
    close = [name for name, plain in names.items() if plain == sought]
    close = close or [name for name, plain in names.items() if plain.startswith(begin)][:4]
    if not close and (like := get_close_matches(sought, names.values(), n=1, cutoff=0.6)):
        close = [name for name, plain in names.items() if plain == like[0]]
    return f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(sorted(names))}"
