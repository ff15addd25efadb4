"""Downloads from the hub: the size is announced first, and files that differ from what the hub lists are removed.

It takes one copy of the weights (safetensors before .bin, never both) with the tokenizer and configuration files. The weights are
fetched last, so that a cache that holds all the weights holds everything.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError, refuse, refuse_missing, tell
from ..errors import size as in_words
from ..parallel.watch import beat
from .atomic import atomic_write, free_at
from .files import ADAPTER, ADAPTER_BIN, PLACE
from .manifest import sha256_of
from .strict_json import read_json

COMPANIONS = re.compile(
    r"(tokenizer|vocab|special_tokens|added_tokens|generation_config|chat_template|merges|sentencepiece)"
    r"[\w.-]*\.(json|txt|model|jinja|vocab)|spiece\.model|source\.spm|target\.spm|bpe\.codes")
CONFIGS = ("config.json", ADAPTER[0])  # of a model, or an adapter, which may have both
# The files of those modules that checkpoint/sentence.py reads.
MODULES = {"Pooling": ("config.json",), "Dense": ("config.json", "model.safetensors", "pytorch_model.bin")}
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PATIENCE = 10.0  # seconds to wait for the hub's first answer
STALE = 3600.0  # seconds after which nobody writes a file of a download any more

_downloads = 0  # under way in this process


@dataclass(frozen=True)
class Listing:
    """The files of a model on the hub that are needed here."""

    name: str  # as the user gave it
    repo: str
    revision: str | None
    folder: Path  # the cache's, which bears the commit's name
    sizes: Mapping[str, int | None]  # bytes by file
    hashes: Mapping[str, str]  # sha256 of the large ones
    weights: list[str]
    companions: list[str]
    total: object  # the hub's own count of parameters, if it has one

    @property
    def todo(self) -> list[str]:
        """The files that the cache lacks, weights last."""
        return [f for f in (*self.companions, *self.weights) if not whole(self.folder / f, self.sizes[f])]

    def __str__(self) -> str:
        known = f"hub id {self.repo}, " if self.repo != self.name else ""
        return f"{self.name}: {known}revision {self.revision or 'main'} (commit {self.folder.name[:7]})"


def download(name: str, repo: str, revision: str | None) -> Path:
    """Ask the hub, announce the size of the download, then fetch what the cache lacks."""
    from huggingface_hub import constants

    listing = look_up(name, repo, revision)
    if todo := listing.todo:
        announce(listing, todo)
        with under_way():
            for file in todo:
                bring(listing, file)
    else:
        say(f"{listing}, already complete in {constants.HF_HUB_CACHE}")
    remember(listing)
    return listing.folder


def remember(listing: Listing) -> None:
    """Record in the cache which commit the branch is, so that a run without the hub finds it. This happens only when the download
    is complete, because until then the previous copy is the one to use."""
    revision = listing.revision or "main"
    if revision != listing.folder.name:
        file = listing.folder.parent.parent / "refs" / revision
        with suppress(OSError, InputError):  # a cache that others keep may not be written, and has all that was asked for
            if not file.is_file() or file.read_text() != listing.folder.name:
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(file, listing.folder.name.encode())


def look_up(name: str, repo: str, revision: str | None) -> Listing:
    """What the hub lists for `repo`. Refused if there are no weights that we read, or not all of them."""
    from huggingface_hub import HfApi, hf_hub_download

    # The listing comes first: it fails at once where a file's HEAD request would be retried for half a minute.
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=PATIENCE)
    told = [file for file in CONFIGS if any(s.rfilename == file for s in info.siblings or ())]
    if not told:
        refuse_missing(name, "config.json", f"{repo} has none", "a transformers model repository, or an adapter of peft's")
    folder = Path(hf_hub_download(repo, told[0], revision=info.sha)).parent  # of this commit, wherever the branch is by now
    commit = folder.name
    hashes = {s.rfilename: s.lfs.sha256 for s in info.siblings or () if s.lfs is not None}
    sizes: dict[str, int | None] = {s.rfilename: s.size for s in info.siblings or ()
                                    if re.fullmatch(rf"({PLACE.pattern}/)?[\w-][\w.-]*", s.rfilename, re.ASCII)}

    def read(file: str) -> Any:
        return read_json(Path(hf_hub_download(repo, file, revision=commit)))

    weights = pick_weights(sizes, read)
    if not weights:
        seen = [f for f in sizes if f.endswith((".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".bin", ".safetensors"))]
        refuse_missing(name, None, f"{repo} has no weights that we read{' but ' + ', '.join(seen) if seen else ''}",
                       "model.safetensors or pytorch_model.bin, whole or with an index.json")
    lacking = [f for f in weights if f not in sizes]
    if lacking:
        refuse_missing(name, weights[0], f"it lists {lacking[0]!r}, which {repo} lacks", "another revision")
    vectors = {"modules.json", *(sizes.keys() & of_modules(read("modules.json")))} if "modules.json" in sizes else set()
    adapts = weights[0] in (ADAPTER[1], ADAPTER_BIN)
    companions = sorted({*(told if adapts else told[:1]), *vectors, *filter(COMPANIONS.fullmatch, sizes)})
    total = getattr(getattr(info, "safetensors", None), "total", None)
    return Listing(name, repo, revision, folder, sizes, hashes, weights, companions, total)


def of_modules(content: Any) -> set[str]:
    """The files that the modules in modules.json may have; none if it is not a list of modules, which loading then refuses."""
    rows = [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []
    found = [(str(row.get("type")).rpartition(".")[2], str(row.get("path"))) for row in rows]
    return {f"{place}/{file}" for kind, place in found for file in MODULES.get(kind, ())}


def announce(listing: Listing, todo: Collection[str]) -> None:
    """Say how large the files `todo` and the model are. Refused if the disk has no room."""
    from huggingface_hub import constants

    volume, heavy = (sum(listing.sizes[f] or 0 for f in some) for some in (todo, listing.weights))
    free = free_at(Path(constants.HF_HUB_CACHE))
    left, lies = left_over(listing.folder)
    config = next(filter(Path.is_file, map(listing.folder.joinpath, CONFIGS)))
    count = parameters(listing.total, read_json(config), heavy)
    say(f"{listing}\n"
        f"  download: {in_words(volume)} in {len(todo)} files to {constants.HF_HUB_CACHE} (disk free: {in_words(free)})\n"
        f"  memory: {in_words(heavy)} to load; {in_words(16 * count)} to fine-tune with AdamW in fp32 "
        f"(16 bytes x {count / 1e6:,.1f} M parameters)"
        + (f"\n  downloads that were killed left {in_words(left)}, which nothing reads: {lies} may be removed" if left else ""))
    if volume > free:
        refuse(listing.name, None, f"{in_words(volume)} to download, {in_words(free)} free in {constants.HF_HUB_CACHE}",
               "make room, or point HF_HOME at a larger disk")


def bring(listing: Listing, file: str) -> None:
    """Fetch one file. If it is not what the hub lists, it is removed and refused."""
    from huggingface_hub import hf_hub_download

    path = listing.folder / file
    # A file that is there with the wrong size is damage that the hub's client would trust.
    hf_hub_download(listing.repo, file, revision=listing.folder.name, force_download=path.exists(), tqdm_class=bar())
    if wrong := damage(path, listing.sizes[file], listing.hashes.get(file)):
        for place in (path.resolve(), path):  # or a run without the hub would take it
            place.unlink(missing_ok=True)
        refuse(listing.name, file, f"{wrong}; removed", "try again")


def pick_weights(names: Collection[str], read: Callable[[str], Any]) -> list[str]:
    """The weight files to use out of `names`, the index first, or an adapter's, if any. `read` gives an index's JSON.

    Shards that the index lists are returned whether or not `names` has them: the caller says what a gap means.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        if single in names:
            return [single]
        table = f"{single}.index.json"
        if table in names:
            content = read(table)
            rows = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(rows, dict) or not rows:
                refuse(table, "weight_map", type(rows).__name__, "a table from tensor to shard")
            for shard in rows.values():
                if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*", shard, re.ASCII):
                    refuse(table, "weight_map", repr(shard), "the plain name of a shard")
            return [table, *sorted(set(rows.values()))]
    return [file for file in (ADAPTER[1], ADAPTER_BIN) if ADAPTER[0] in names and file in names][:1]


def damage(path: Path, size: int | None, sha256: str | None) -> str:
    """What is wrong with a file that has just been fetched; empty if it is what the hub lists."""
    if not whole(path, size):
        return f"{path.stat().st_size} bytes came, the hub lists {size}"
    known = sha256 is None or sha256_of(path) == sha256
    return "" if known else "other bytes came than the hub lists, by their sha256"


def whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def parameters(total: object, config: Any, heavy: int) -> int:
    """How many parameters: the hub's own count, `total`, where it has one, else bytes over the width that config.json names."""
    if isinstance(total, int) and total > 0:
        return total
    kind = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return heavy // WIDTHS.get(kind, 4)


def left_over(folder: Path) -> tuple[int, Path]:
    """The bytes, and the names, of downloads to this cache that were killed. None of them is resumed, because each has a unique
    name."""
    blobs = folder.parent.parent / "blobs"
    size = 0
    for path in blobs.glob("*.????????.incomplete"):
        with suppress(OSError):  # it has just become whole
            stat = path.stat()
            size += stat.st_size if time.time() - stat.st_mtime > STALE else 0
    return size, blobs / "*.incomplete"


def bar(**fixed: Any) -> Any:
    """The client's progress bar. Each move counts as progress for the watchdog of the ranks. `fixed` are options that override the
    client's: for a few small files, which may all be cached already, no bar is drawn."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # its module has the same name, and mypy sees that

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, **fixed})  # type: ignore[no-untyped-call]  # tqdm has no types

        def update(self, n: float | None = 1) -> Any:
            beat()
            return super().update(n)

    return Bar


def downloading() -> bool:
    """Whether weights are being fetched: a process that is asked to end then need not wait for them."""
    return _downloads > 0


@contextmanager
def under_way() -> Iterator[None]:
    global _downloads
    _downloads += 1
    try:
        yield
    finally:
        _downloads -= 1


def say(line: str) -> None:
    """One line to stderr, from the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        tell(f"modelcenter: {line}")
