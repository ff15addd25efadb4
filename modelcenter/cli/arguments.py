"""A command line taken apart, and an answer: what every verb gets and gives. Torch-free."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from ..checkpoint.files import check_folder, refuse_unended
from ..config import COMMAND_LINE, KEY, bind, override
from ..errors import refuse

T = TypeVar("T")


class Answer(NamedTuple):
    """What a verb says: `text` for people, `data` for `--json`."""

    text: str | None
    data: Any


@dataclass
class Arguments:
    """A command line taken apart, nothing interpreted yet."""

    names: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  # key=value
    machine: str | None = None
    json: bool = False
    debug: bool = False
    help: bool = False
    version: bool = False


def take_apart(argv: Sequence[str]) -> Arguments:
    """Names, settings and the few options that are not settings, in any order; `--key` alone is `key=true`."""
    args, rest = Arguments(), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if is_setting(word):
                key, _, value = word.partition("=")
                args.settings.append(f"{key.replace('-', '_')}={value}")
            else:
                args.names.append(word)
            continue
        key, equals, value = word.lstrip("-").partition("=")
        key = {"h": "help"}.get(key, key.replace("-", "_"))
        if key in ("json", "debug", "help", "version"):
            if equals:
                refuse(COMMAND_LINE, word, "takes no value", f"write --{key}")
            setattr(args, key, True)
            continue
        if not word.startswith("--"):
            refuse(COMMAND_LINE, word, "unknown option", "write key=value or --key value")
        if not equals:
            alone = not rest or rest[0].startswith("--") or is_setting(rest[0])
            if alone and key == "machine":
                refuse(COMMAND_LINE, word, "no value", "the name of a machine profile (modelcenter list machines), or a path")
            value = ("auto" if key == "resume" else "true") if alone else rest.pop(0)
        if key == "machine":
            if args.machine is not None:
                refuse(COMMAND_LINE, "--machine", "given twice", "keep one of them")
            args.machine = value
        else:
            args.settings.append(f"{key}={value}")
    return args


def is_setting(word: str) -> bool:
    """Whether `word` reads key=value; `./a=b` is a path."""
    key, equals, _ = word.partition("=")
    return bool(equals and KEY.fullmatch(key))


def take(args: Arguments, wanted: Sequence[str]) -> list[str]:
    """Exactly these names and nothing else, for a verb without settings."""
    unwanted = [*args.names[len(wanted) :], *args.settings]
    if unwanted or args.machine is not None:
        apart = any(word.startswith("=") for word in unwanted)
        plus = unwanted and is_setting(unwanted[0].lstrip("+"))  # as Hydra adds a key
        remedy = unwanted[0].lstrip("+") if plus else "see --help after the verb"
        remedy = "key=value is written without spaces" if apart else remedy
        refuse(COMMAND_LINE, unwanted[0] if unwanted else "--machine", "not wanted here", remedy)
    if len(args.names) < len(wanted):
        lacks = wanted[len(args.names)]
        named = "modelcenter list recipes has them; or a path" if lacks == "RECIPE" else "see --help after the verb"
        refuse(COMMAND_LINE, lacks, "missing", named)
    return args.names


def settings(cls: type[T], args: Arguments, positions: Sequence[str]) -> T:
    """The dataclass `cls` from settings, the first ones also by position."""
    if len(args.names) > len(positions) or args.machine is not None:
        extra = args.names[len(positions)] if len(args.names) > len(positions) else "--machine"
        text = extra != "--machine" and positions[-1] == "prompt"
        refuse(COMMAND_LINE, extra, "not wanted here", 'one "PROMPT", in quotes' if text else "see --help after the verb")
    by_position = [f"{key}={value}" for key, value in zip(positions, args.names, strict=False)]
    return bind(cls, override({}, [*by_position, *args.settings]), COMMAND_LINE)


def check_model(name: str) -> None:
    """Refuse a broken local folder at once: its headers and JSON need no torch."""
    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        check_folder(folder)
    elif os.path.isfile(folder):
        refuse(name, "model", "a file", f"the folder that holds it: {os.path.dirname(name) or '.'}")
    elif Path(folder).name == "model" and ((run := Path(folder).parent) / "recipe.yaml").is_file():
        refuse_unended(run)


@contextmanager
def new_file(path: str) -> Iterator[TextIO]:
    """A file to write that was not there: opened before the work whose results it takes, and gone again if it took none. A disk
    that runs full leaves the lines that came whole."""
    try:
        file = open(path, "x", encoding="utf-8")  # noqa: SIM115  # closed below, where its faults are told from those of the work
    except FileExistsError:
        refuse(path, None, "exists", "a new file, or this one moved away: a command that was ended leaves its lines")
    except OSError as error:
        refuse(path, None, error.strerror or str(error), "a new file, in a folder that can be written")
    try:
        with file:
            yield file
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO) or error.filename is not None:
            raise
        os.truncate(path, Path(path).read_bytes().rfind(b"\n") + 1)
        refuse(path, None, error.strerror or str(error), "a place with room; it holds what came before")
    finally:
        if not os.path.getsize(path):
            os.unlink(path)


def check_new(out: Path) -> None:
    """Refuse a folder that holds something."""
    try:
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            refuse(out, None, "exists", "a new folder, or an empty one")
    except OSError as error:
        refuse(out, None, error.strerror or str(error), "a folder that can be written")
