"""Turns text into token files, with several processes; after a kill the work continues.

During the work, hidden files beside the result hold the ids and lengths written so far, and a journal says up to where they are
valid. Parts of the records are encoded in any process and appended in order. The journal advances when a part is on disk; anything
beyond its mark is cut off when work continues. At the end the files get their names, NAME.json last. A hash in it identifies the
contents, the tokenizer and the options, so repeating the same command does nothing. Contents are hashed once: each hash is stored
with the name, size and time of the file, and a file for which these are unchanged is not read again. A file that was touched, moved
or copied is read; if its contents are the same, NAME.json gets the new name and time.
"""

import fcntl
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..checkpoint.atomic import atomic_write, disk_errors, sync, write_new
from ..errors import InputError, refuse
from .config import Tokenization
from .encode import Reader
from .indexed import TokenFile, dtype_of, index_head
from .objective import find_objective
from .read import find_files, format_of, read_records
from .record import Part, Record
from .source import CHUNK
from .table import PREFIX, is_saved
from .tokenizer_open import load_tokenizer

PART = 8 << 20  # bytes of text that are encoded at a time, about
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # which ask for the end (train/interrupt.py)
ROWS = 4096  # records of a part, where their size is not known


@dataclass
class Journal:
    """How far the files are good."""

    key: str
    parts: int = 0
    documents: int = 0
    tokens: int = 0
    files: list[Any] = field(default_factory=list)  # as NAME.json has them, so that who goes on need not hash them again


def tokenize(asked: Tokenization) -> dict[str, Any]:
    """Write OUT.bin, OUT.idx and OUT.json; what OUT.json says. `tokenizer` is a folder or a hub id by now."""
    out = Path(os.path.expanduser(asked.out.removesuffix(".bin")))
    records, tokenizer = read_records(asked.path, asked.format, "path"), load_tokenizer(asked.tokenizer, {})
    if not len(records):
        refuse(asked.path, "path", "no record", "text")
    dtype, name = dtype_of(tokenizer.vocab_size), tokenizer.name
    options = {"objective": asked.objective, "text_key": asked.text_key, "format": asked.format, "type": dtype.name}
    final = {ending: out.parent / f"{out.name}.{ending}" for ending in ("bin", "idx", "json")}
    files = identity(asked, [*hashed(final["json"]), *hashed(out.parent / f".{out.name}.json")])
    what = {"files": files, "tokenizer": name, "vocabulary": tokenizer.fingerprint, **options}
    frame = find_objective(asked.objective).frame(Reader(tokenizer, None))
    contents = [entry if isinstance(entry, str) else [format_of(Path(entry[0])), entry[3]] for entry in files]
    key = sha256(json.dumps([contents, tokenizer.fingerprint, tokenizer.behaviour, frame, options]).encode()).hexdigest()
    if (done := finished(final, key)) is not None:
        if done["files"] != files:
            done["files"] = files
            with suppress(InputError):  # files in a folder that others share, say: the hash is formed again each time
                record(final["json"], done)
        return {**done, "made": False}
    with disk_errors(out), claimed(out) as hidden:
        if (done := finished(final, key)) is not None:  # by another process, since it was looked for
            return {**done, "made": False}
        take_back(hidden, final, key)
        if there := [file for file in final.values() if file.exists()]:
            found = "exists, and is made of other files or options, or by another tool"
            refuse(there[0], None, found, "another name, or remove it")
        journal = resumed(hidden, key, dtype.itemsize)
        journal.files = files
        cuts = parts_of(records, files)
        write_parts(asked, records, cuts, journal, hidden, dtype)
        if not journal.documents:
            discard(hidden)
            refuse(asked.path, "text_key", "no token in all texts", "a text")
        what["files"] = identity(asked, files)  # not read again, unless it was touched in the hours that this may have taken
        if [entry[3:] for entry in what["files"]] != [entry[3:] for entry in files]:
            refuse(asked.path, "path", "its contents changed while they were read", "leave them; the same command begins anew")
        write_index(hidden["len"], hidden["idx"], dtype, journal)
        for ending in ("bin", "idx"):
            os.replace(hidden[ending], final[ending])
        said = {"key": key, **what, "documents": journal.documents, "tokens": journal.tokens}
        record(final["json"], said)
        for ending in ("len", "json", "new"):
            hidden[ending].unlink(missing_ok=True)
        sync(out.parent)
    return {**said, "made": True}


def identity(asked: Tokenization, known: Sequence[Any]) -> list[Any]:
    """[name, size, time of the last change, sha256] of each file; a dataset of the hub by its name. The hash of a file that is in
    `known` with the same name, size and time is the one that stands there."""
    if asked.path.startswith(PREFIX):
        return [asked.path]
    folder = Path(os.path.expanduser(asked.path))
    found = folder.rglob("*") if is_saved(folder) else find_files(asked.path, asked.format, "path")
    files = sorted(file for file in found if file.is_file())
    before = {tuple(entry[:3]): entry[3] for entry in known}
    rows = [(str(file.resolve()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    over = threading.Event()
    with ThreadPoolExecutor(asked.processes) as pool:  # forming a hash lets other threads run
        try:
            return list(pool.map(lambda row: [*row, before.get(row) or digest(row, over)], rows))
        except BaseException:  # asked to end: a large file would be waited for, for minutes
            over.set()
            raise


def digest(row: tuple[str, int, int], over: threading.Event) -> str:
    """The sha256 of a file of that name, size and time. One that changes meanwhile is refused. Nobody reads on when it is
    `over`."""
    found = sha256()
    with open(row[0], "rb") as file:
        while not over.is_set() and (some := file.read(CHUNK)):
            found.update(some)
        stat = os.fstat(file.fileno())
    if (stat.st_size, stat.st_mtime_ns) != row[1:]:
        refuse(row[0], None, "changes while it is read", "leave it as it is")
    return found.hexdigest()


def hashed(file: Path) -> list[Any]:
    """The files that NAME.json, or a journal, has hashes of; none where there is no such file, or another."""
    try:
        said = json.loads(file.read_text("utf-8"))["files"]
        return [entry for entry in said if isinstance(entry, list) and [type(part) for part in entry] == [str, int, int, str]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def record(file: Path, said: Mapping[str, Any]) -> None:
    """Write NAME.json."""
    atomic_write(file, (json.dumps(dict(said), indent=1, ensure_ascii=False) + "\n").encode())


def finished(final: dict[str, Path], key: str) -> dict[str, Any] | None:
    """What the files that are there say of themselves, if they are those wanted."""
    try:
        said = json.loads(final["json"].read_text("utf-8"))
        if said["key"] != key:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    TokenFile(final["bin"])  # refuses what is damaged
    return dict(said)


def take_back(hidden: dict[str, Path], final: dict[str, Path], key: str) -> None:
    """Hide again files that a killed run of the same work had already named: its journal is there, and NAME.json is not."""
    if not final["json"].exists() and journal_of(hidden["json"], key).parts:
        for ending in ("bin", "idx"):
            if final[ending].exists() and not hidden[ending].exists():
                os.replace(final[ending], hidden[ending])


def journal_of(file: Path, key: str) -> Journal:
    """The journal of that work; a new one where there is none."""
    try:
        journal = Journal(**json.loads(file.read_text("utf-8")))
        return journal if journal.key == key else Journal(key)
    except (OSError, ValueError, TypeError):
        return Journal(key)


@contextmanager
def claimed(out: Path) -> Iterator[dict[str, Path]]:
    """The hidden files beside `out`, held for this process alone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = {ending: out.parent / f".{out.name}.{ending}" for ending in ("bin", "len", "idx", "json", "new", "lock")}
    with open(hidden["lock"], "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(lock.fileno()).st_nlink:  # who held it has just ended, and a third may hold the next one
                raise BlockingIOError
        except BlockingIOError:
            refuse(out, "out", "another process is writing it", "wait for it, or write elsewhere")
        try:
            yield hidden
        finally:
            hidden["lock"].unlink(missing_ok=True)


def resumed(hidden: dict[str, Path], key: str, size: int) -> Journal:
    """Where an interrupted run of the same work stands, with its files cut to that; or a new beginning."""
    journal = journal_of(hidden["json"], key)
    lengths = {"bin": journal.tokens * size, "len": journal.documents * 4}
    if any(not hidden[ending].is_file() or hidden[ending].stat().st_size < length for ending, length in lengths.items()):
        journal, lengths = Journal(key), dict.fromkeys(lengths, 0)
    for ending, length in lengths.items():
        with open(hidden[ending], "ab") as file:
            file.truncate(length)
    hidden["idx"].unlink(missing_ok=True)
    return journal


def discard(hidden: Mapping[str, Path]) -> None:
    """Remove what there is to go on with, where nothing was done or nothing is worth it."""
    for ending in ("bin", "len", "json", "new"):
        hidden[ending].unlink(missing_ok=True)


def parts_of(records: Part, files: Sequence[Any]) -> range:
    """Where each part of the records starts: a part does not depend on the number of processes."""
    sizes = [entry[1] for entry in files if isinstance(entry, list)]
    rows = max(1, PART * len(records) // max(1, sum(sizes))) if sizes else ROWS
    return range(0, len(records), min(rows, 16 * ROWS))


def write_parts(asked: Tokenization, records: Part, cuts: range, journal: Journal, hidden: dict[str, Path],
                dtype: np.dtype[Any]) -> None:
    """Append what is missing, part by part."""
    processes = asked.processes or os.cpu_count() or 1
    waiting: deque[Future[tuple[bytes, bytes]]] = deque()
    left = iter(cuts[journal.parts :])
    bar = tqdm(total=len(cuts), initial=journal.parts, unit="part", disable=None)
    work = (asked.tokenizer, asked.objective, asked.text_key, dtype.str)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), start, work)
    with open(hidden["bin"], "ab") as ids, open(hidden["len"], "ab") as lengths, bar:
        try:
            while True:
                while len(waiting) < 2 * processes and (first := next(left, None)) is not None:
                    some = list(records[first : first + cuts.step])
                    with deaf():
                        waiting.append(pool.submit(encode, [only(record, asked.text_key) for record in some]))
                if not waiting:
                    break
                flat, sizes = waiting.popleft().result()
                for file, data in ((ids, flat), (lengths, sizes)):
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                journal.parts += 1
                journal.documents += len(sizes) // 4
                journal.tokens += len(flat) // dtype.itemsize
                hidden["new"].unlink(missing_ok=True)
                write_new(hidden["new"], [json.dumps(asdict(journal)).encode()])
                os.replace(hidden["new"], hidden["json"])
                bar.update()
        except BrokenProcessPool:
            refuse(asked.out, "processes", f"one of {processes} died", "fewer of them, if memory ran out; the same command goes on")
        except BaseException as e:  # asked to end: what they are at is not waited for
            for worker in list((pool._processes or {}).values()):
                worker.kill()
            if isinstance(e, InputError) and not journal.parts:
                discard(hidden)
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def deaf() -> Iterator[None]:
    """What asks for the end is heard when this is left: a worker whose parent is gone before it was told its task would complain.
    Processes that are started meanwhile never hear Ctrl-C, which a terminal sends to them too: it is the parent's matter."""
    heard: list[int] = []
    numbers = [number for number in SIGNALS if callable(signal.getsignal(number))]
    main = threading.current_thread() is threading.main_thread()  # which alone may set handlers, and runs them
    handlers = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers if main}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for one in heard:
            signal.raise_signal(one)


def only(record: Record, key: str) -> Record:
    """The record with its text alone, under `key`, which may name several fields, or one inside another."""
    return Record({key: record.text(key, "data.text_key")}, record.file, record.line, record.start, record.unit)


def write_index(lengths: Path, index: Path, dtype: np.dtype[Any], journal: Journal) -> None:
    """The index over documents of these lengths, in little memory."""
    count = journal.documents

    def chunks() -> Iterator[bytes]:
        yield index_head(dtype, count)
        every = np.fromfile(lengths, "<i4")
        yield every.tobytes()
        at = 0
        for start in range(0, count, CHUNK):
            some = every[start : start + CHUNK].astype(np.int64) * dtype.itemsize
            ends = at + some.cumsum()
            yield (ends - some).astype("<i8").tobytes()
            at = int(ends[-1])
        for start in range(0, count + 1, CHUNK):
            yield np.arange(start, min(start + CHUNK, count + 1), dtype="<i8").tobytes()

    write_new(index, chunks())


# -------------------------------------------------------------------------------------------------- in another process

WORK: dict[str, Any] = {}


def start(tokenizer: str, objective: str, text_key: str, dtype: str) -> None:
    """Open the tokenizer. Without a parent there is nothing to do."""
    threading.Thread(target=follow, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    read = Reader(load_tokenizer(tokenizer, {}), None)  # to ask for the presets is to import torch, in every process
    WORK.update(read=read, frame=find_objective(objective).frame(read), key=text_key, dtype=dtype)


def follow() -> None:
    """End when the parent process ends, however it ends."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def encode(records: list[Record]) -> tuple[bytes, bytes]:
    """The ids of all documents that are not empty, and their lengths."""
    found = list(WORK["read"].documents(records, WORK["key"], WORK["frame"]))
    flat = np.array([i for row in found for i in row], WORK["dtype"])
    return flat.tobytes(), np.array([len(row) for row in found], "<i4").tobytes()
