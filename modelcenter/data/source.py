"""The bytes of a file by their offsets. A file of any size needs only a few megabytes of memory.

Bytes are read, not memory-mapped: a mapped file that shrinks kills the process, whereas here it is refused.
"""

import errno
import gzip
import os
import resource
import shutil
import stat
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import refuse, refuse_missing
from ..parallel.watch import beat

CHUNK = 4 << 20  # bytes read at once where a file is gone through
LONGEST_LINE = 16 << 20  # bytes; beyond it a file is binary or hostile
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\3\4": "zip",
          b"PAR1": "parquet", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\xff\xff\xff\xff": "Arrow"}  # fmt: skip
REMEDIES = {"UTF-16": "UTF-8 text, which iconv -f utf-16 -t utf-8 makes of it", "Arrow": "the folder that save_to_disk has written"}
TAR = 257, (b"ustar\x0000", b"ustar  \0")  # where an archive of uncompressed text, which is UTF-8 too, says what it is
EXPANSION = 100  # a .gz that grows by more is a bomb: text rarely compresses by more than ten


class Source:
    """One file; of a .gz the unpacked bytes, in a temporary file that has no name."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.fd = unpack(file) if file.name.endswith(".gz") else opened(file)
            weakref.finalize(self, os.close, self.fd)
            make_room(self.fd)
            self.size = os.fstat(self.fd).st_size
        except OSError as e:
            wanted = "fewer files, or a higher limit (ulimit -Hn)" if e.errno == errno.EMFILE else "a readable file"
            refuse_missing(file, None, f"cannot be read ({e.strerror})", wanted)
        if self.size > TAR[0] and self.read(TAR[0], min(TAR[0] + 8, self.size)) in TAR[1]:
            refuse(file, f"byte {TAR[0]}", "a tar archive", "the files in it: tar -xf unpacks them")

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of [start, stop), which must be there."""
        parts = []
        while start < stop:  # Linux reads at most 2 GiB a call
            try:
                part = os.pread(self.fd, stop - start, start)
            except OSError as e:
                refuse(self.file, f"byte {start}", f"cannot be read ({e.strerror})", "a readable file")
            if not part:
                refuse(self.file, f"byte {start}", "the file ends here, and did not when it was opened", "leave it as it is")
            beat()
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) from the beginning to the end."""
        for offset in range(0, self.size, CHUNK):
            yield offset, self.read(offset, min(offset + CHUNK, self.size))

    def lines(self) -> NDArray[np.int64]:
        """Where each line starts, and after them where the last one ends. A line too long to be text is refused. In a file without
        a newline each carriage return ends one: so spreadsheets on a Mac may write."""
        bounds = self.after(b"\n")
        bounds = self.after(b"\r") if len(bounds) == 1 else bounds
        if bounds[-1] != self.size:
            bounds = np.append(bounds, self.size)
        if len(long := np.flatnonzero(np.diff(bounds) > LONGEST_LINE)):
            refuse(self.file, f"line {long[0] + 1}", "longer than 16 MiB", "text in lines")
        return bounds

    def after(self, end: bytes) -> NDArray[np.int64]:
        """0, and the places after each byte `end`."""
        found = [np.flatnonzero(np.frombuffer(chunk, np.uint8) == end[0]) + (offset + 1) for offset, chunk in self.chunks()]
        return np.concatenate([np.zeros(1, np.int64), *found])

    def text(self, start: int, stop: int, line: int | None = None) -> str:
        """The bytes as text, decoded strictly: a zero byte, of which UTF-16 is full, is no text either. A byte-order mark at the
        file's beginning is dropped. `line`: the number of their line, which is counted if it is not given."""
        data = self.read(start, stop)
        try:
            text = data.decode()
            if 0 in data:
                raise UnicodeDecodeError("utf-8", data, data.index(0), data.index(0) + 1, "zero")
        except UnicodeDecodeError as e:
            if start == 0 and (kinds := [kind for mark, kind in PACKED.items() if data.startswith(mark)]):
                wanted = REMEDIES.get(kinds[0], "UTF-8 text (or .gz, or .parquet, under these names)")
                refuse(self.file, "byte 0", f"{kinds[0]} data", wanted)
            zero = data.find(0, 0, e.end)
            place = e.start if zero < 0 else zero
            first = data.rfind(b"\n", 0, place) + 1
            if line is None:
                line = 1 + data.count(b"\n", 0, place) + sum(
                    chunk[: max(0, start - offset)].count(b"\n") for offset, chunk in self.chunks() if offset < start)
            found = f"byte {place - first} (0x{data[place]:02x}) is {'not UTF-8' if zero < 0 else 'in no text but UTF-16'}"
            wanted = "UTF-8 text: iconv -f gb18030 -t utf-8 makes it of GBK, -f cp1252 of Latin letters"
            if zero >= 0:
                order = "le" if (start + zero) % 2 else "be"
                wanted = f"UTF-8 text: iconv -f utf-16{order} -t utf-8 makes it of that, tr -d '\\0' leaves such bytes out"
            refuse(self.file, f"line {line}", found, wanted)
        return text.removeprefix("\ufeff") if start == 0 else text


def make_room(number: int) -> None:
    """Where half of the files that the process may have open are, let it have as many as it is ever allowed: a corpus may have
    thousands, and who reads it needs some for other things. `number`: the descriptor of the last, which tells about how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if number > soft // 2 and soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def opened(file: Path) -> int:
    """A descriptor of a file; of a pipe, which can be read only once, of a copy without a name."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return fd
    with open(fd, "rb") as pipe, tempfile.TemporaryFile() as out:
        shutil.copyfileobj(pipe, out)
        out.flush()
        return os.dup(out.fileno())


def scratch() -> int:
    """A descriptor of a new file without a name, which disappears when it is closed."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def unpack(file: Path) -> int:
    """A descriptor of the unpacked content of a .gz file."""
    limit, total = max(EXPANSION * file.stat().st_size, LONGEST_LINE), 0
    with tempfile.TemporaryFile() as out:
        try:
            with gzip.open(file, "rb") as packed:
                while chunk := packed.read(CHUNK):
                    total += len(chunk)
                    if total > limit:
                        refuse(file, f"byte {limit}", f"grew over {EXPANSION}-fold", "if that is right, unpack it first")
                    out.write(chunk)
                    beat()
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            refuse(file, f"byte {total}", f"damaged gzip data ({e})", "a whole .gz file")
        out.flush()
        return os.dup(out.fileno())
