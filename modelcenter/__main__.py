"""The command line: `modelcenter VERB [NAME ...] [--machine M] [key=value ...]`.

Torch-free until a verb needs it, so that help and refusals are immediate. A setting is `key=value`, `--key=value` or
`--key value`, dashes or underscores alike. Input that the user can mend is one line on stderr and exit status 2.
"""

import os
import signal
import sys

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "modelcenter":  # a process of its own: until it listens, which is
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # once all below is imported, Ctrl-C ends it without a traceback of that

import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import __version__
from .errors import LIMIT, InputError, message, nearest, printable, refuse, tell

try:
    import yaml  # noqa: F401  # by what is imported below, before `main` could say that it is missing
except ModuleNotFoundError:
    tell(f"modelcenter: error: {message(None, 'PyYAML', 'not installed', 'pip install PyYAML')}")
    sys.exit(2)

from .cli.arguments import Answer, Arguments, take_apart
from .cli.catalog import copy, list_
from .cli.convert import Averaging, Conversion, Merger, average, convert, merge
from .cli.evaluate import Examination, evaluate
from .cli.generate import Generation, generate
from .cli.launch import launch
from .cli.look import compare, doctor
from .cli.plan import Question, plan
from .cli.tokenize import tokenize
from .cli.train import train
from .config import COMMAND_LINE, describe, names, packaged
from .data.config import Tokenization
from .parallel.variable import variable
from .parallel.watch import ANSWER
from .train.cluster import Job
from .train.interrupt import Interrupt

VERBS: dict[str, Callable[[Arguments], Answer]] = {
    "train": train,
    "plan": plan,
    "launch": launch,
    "evaluate": evaluate,
    "generate": generate,
    "convert": convert,
    "merge": merge,
    "average": average,
    "compare": compare,
    "tokenize": tokenize,
    "list": list_,
    "copy": copy,
    "doctor": doctor,
}
KEYS: dict[str, type] = {  # what `--help` lists
    "plan": Question, "launch": Job, "evaluate": Examination, "generate": Generation, "convert": Conversion, "merge": Merger,
    "average": Averaging, "tokenize": Tokenization,
}  # fmt: skip

SINGLE = ("generate", "convert", "merge", "average", "tokenize", "copy")  # or each rank would write the same files
NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "tqdm")  # pip's --no-deps leaves them out


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 2 for bad input, 75 if another process did not come in time, 128 plus the
    number of the signal that ended it; of ranks, the first failure's."""
    if argv is None:  # of a process of its own: behind what listens, where the interpreter waits for threads, Ctrl-C ends it
        argv = sys.argv[1:]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks is escaped
    try:
        with Interrupt(), warnings_in_a_line():
            answer = run(take_apart(argv))
        if answer.text is not None:  # of several ranks one has something to say
            say(answer.text if "--json" not in argv else json.dumps(answer.data, indent=2))
        return 0
    except InputError as error:
        if "--debug" in argv:
            raise
        tell(f"modelcenter: error: {error}")
        return error.status
    except RuntimeError as error:
        from .train.launch import status_of

        status = status_of(error)
        if status is None or "--debug" in argv:
            raise
        return status
    except (KeyboardInterrupt, SystemExit) as ended:  # by a signal, which `Interrupt` has told
        if "--debug" in argv:
            raise
        return ended.code if isinstance(ended, SystemExit) and isinstance(ended.code, int) else 130
    except BrokenPipeError:  # `modelcenter list keys | head`
        hush()
        return 0
    except ModuleNotFoundError as error:
        if error.name not in NEEDED or "--debug" in argv:
            raise
        fits = ", the build that fits your machine" * (error.name == "torch")
        tell(f"modelcenter: error: {message(None, error.name, 'not installed', f'pip install {error.name}{fits}')}")
        return 2
    except OSError as error:  # a name that is too long, a folder that nobody but its owner may look into
        if error.filename is None or "--debug" in argv:
            raise
        said = message(str(error.filename), None, error.strerror or str(error), "a name that can be read or written")
        tell(f"modelcenter: error: {said}")
        return 2


def open_streams() -> None:
    """Standard streams that are closed, as `2>&-` and some daemons leave them, become the null device: the next file to be opened
    would get the number of one, and with it what is printed there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def say(text: str) -> None:
    """Print an answer; as a rank, leave it where the process that has started this one looks for it."""
    try:
        if place := os.environ.get(ANSWER):
            Path(place).write_text(text, encoding="utf-8")
        else:
            print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        hush()
        refuse("standard output", None, error.strerror or str(error), "a place that has room for the answer")


def hush() -> None:
    """Let nothing more go to standard output: the interpreter would try again when it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Each warning once, as one line without the source that raised it."""
    said: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = printable(str(message))[:LIMIT]
        if text not in said:
            said.add(text)
            tell(f"modelcenter: warning: {text}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def run(args: Arguments) -> Answer:
    """Find the verb and let it answer."""
    if args.version:
        return Answer(f"modelcenter {__version__}", {"modelcenter": __version__})
    if args == Arguments() or args.names[:1] == ["help"]:  # `modelcenter`, `modelcenter help train`
        args.names, args.help = args.names[1:], True
    verb = args.names[0] if args.names else None
    if verb is None:
        if args.help:
            return Answer(usage(), {"verbs": sorted(VERBS)})
        refuse(COMMAND_LINE, None, "no verb", f"{', '.join(VERBS)} (modelcenter --help)")
    if verb not in VERBS:
        recipe = verb in names(packaged())
        refuse(COMMAND_LINE, verb, "unknown verb", f"modelcenter train {verb} ..." if recipe else nearest(verb, VERBS))
    if args.help:
        return Answer(manual(verb), {"verb": verb, "help": VERBS[verb].__doc__})
    try:
        os.getcwd()
    except OSError as error:  # a shell stands in a folder that was deleted, and perhaps made anew
        refuse(".", None, error.strerror or str(error), "a folder that is there: cd to it again")
    if verb in SINGLE and "RANK" in os.environ and (size := variable("WORLD_SIZE", 1, 2**20, default=1)) > 1:
        refuse("environment", "WORLD_SIZE", f"{size}, and {verb} is one process", "modelcenter without a launcher, once")
    return VERBS[verb](Arguments(args.names[1:], args.settings, args.machine))


def lines_of(verb: str) -> list[str]:
    """What a verb's function says of itself: an empty line under `python -OO`."""
    return [line.strip() for line in (VERBS[verb].__doc__ or "").strip().split("\n")]


def usage() -> str:
    """What `modelcenter --help` prints."""
    verbs = "\n".join(f"  {name:<10}{lines_of(name)[0]}" for name in VERBS)
    return (
        "usage: modelcenter VERB [NAME ...] [--machine M] [key=value ...]\n\n"
        f"{verbs}\n\n"
        "  --machine M  a machine profile: a bare name (modelcenter list machines) or a path\n"
        "  --json       answer in JSON\n"
        "  --debug      show the traceback of an error\n"
        "  --help       after a verb: its arguments"
    )


def manual(verb: str) -> str:
    """What `modelcenter VERB --help` prints."""
    lines = lines_of(verb)
    keys = [f"  {key.name}={key.default or '...'}  {key.help} ({key.type})" for key in describe(KEYS[verb])] if verb in KEYS else []
    return "\n".join([f"modelcenter {verb}: {lines[0]}", *lines[1:], *(["", *keys] if keys else [])])


if __name__ == "__main__":
    sys.exit(main())
