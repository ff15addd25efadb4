"""From a name to a local folder: an existing folder, a preset (which names a hub id), or a hub id.

A download says first what the name stands for and what it costs, takes one copy of the weights (safetensors before
.bin, never both) with the tokenizer and configuration files, and fetches the weights last, so that a cache which holds
all the weights holds everything. What came is compared with the size and the hash that the hub lists, and a file that differs does
not stay. huggingface_hub does the transfers and reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE,
HF_ENDPOINT and HF_TOKEN; none of its messages reaches the user, because a server may put what it likes into them.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError, MissingError, message, refuse, refuse_missing, tell
from ..errors import size as in_words
from ..parallel.watch import beat
from .files import read_json

PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
COMPANIONS = re.compile(
    r"(tokenizer|vocab|special_tokens|added_tokens|generation_config|chat_template|merges|sentencepiece)"
    r"[\w.-]*\.(json|txt|model|jinja|vocab)|spiece\.model|source\.spm|target\.spm|bpe\.codes")
MODULE = re.compile(  # with modules.json: checkpoint/sentence.py
    r"\d{1,3}_(Pooling|Dense)/config\.json|\d{1,3}_Dense/(model\.safetensors|pytorch_model\.bin)", re.ASCII)
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PATIENCE = 10.0  # seconds to wait for the hub's first answer
STALE = 3600.0  # seconds after which nobody writes a file of a download any more
CHUNK = 16 << 20  # bytes hashed at once

_downloads = 0  # under way in this process


def resolve(name: str | os.PathLike[str], *, revision: str | None = None, local_files_only: bool = False,
            presets: Mapping[str, str | None]) -> Path:
    """The local folder that `name` stands for, downloaded if need be.

    `presets` maps a preset's name to its hub id, or to None where no public weights exist. `revision` is a branch, tag
    or commit of a hub id. Raises `InputError` (`MissingError` for what is not there), one line with what to do.
    """
    name = os.fspath(name)
    if os.path.isdir(os.path.expanduser(name)):
        if revision not in (None, "main"):
            refuse(name, "revision", f"{revision!r} of a local folder", "a revision belongs to a hub id; drop it")
        return Path(name).expanduser()
    repo = presets.get(name, name)
    if repo is None:
        refuse_missing(name, None, "a preset without public weights",
                       "give a folder, another preset or a hub id, or start from random weights (init=random)")
    if name not in presets:
        _check_id(name, presets)
    _check_revision(name, revision)
    _check_environment()
    from huggingface_hub import constants

    if local_files_only or constants.HF_HUB_OFFLINE:
        folder, lack = _cached(repo, revision)
        if folder is None:
            how = "drop local_files_only" if local_files_only else "unset HF_HUB_OFFLINE"
            refuse_missing(name, None, f"offline, and {lack}",
                           f"{how} to download it, or give a folder{_near(name, presets)}")
        return folder
    try:
        return _online(name, repo, revision)
    except InputError:
        raise
    except Exception as error:
        reason = _explain(error, name, repo, revision, presets)
        if reason is None:
            raise
        folder, _ = _cached(repo, revision)
        if folder is None:
            raise reason from None  # the hub's own text may quote a header: it stays out of the traceback
        say(f"{name}: {_story(error, repo, revision)[0]}; using the cached copy in {folder}")
        return folder


def fetch(name: str, patterns: list[str], presets: Mapping[str, str | None]) -> Path:
    """The folder with the files that match `patterns` of `name`, a hub id or what in `presets` stands for one; from the cache
    where the hub is not to be had."""
    repo = presets.get(name) or name
    if name not in presets:
        _check_id(name, presets)
    _check_environment()
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, tqdm_class=_bar(disable=True)))
    except Exception as error:
        if constants.HF_HUB_OFFLINE:
            how = f"unset HF_HUB_OFFLINE, or give a folder{_near(name, presets)}"
            reason: InputError | None = MissingError(message(name, None, f"offline, and {repo} is not in the cache", how))
        else:
            reason = _explain(error, name, repo, None, presets)
        if reason is None:
            raise
        raise reason from None


def say(line: str) -> None:
    """One line to stderr, from the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        tell(f"modelcenter: {line}")


def pick_weights(names: Collection[str], read: Callable[[str], Any]) -> list[str]:
    """The weight files to use out of `names`, index first; empty when there are none. `read` gives an index's JSON.

    Shards that the index lists come back whether or not `names` has them: the caller says what a gap means.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        if single in names:
            return [single]
        table = f"{single}.index.json"
        if table in names:
            content = read(table)
            rows = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(rows, dict) or not rows:
                refuse(table, "weight_map", type(rows).__name__, "a table from tensor to shard is wanted")
            for shard in rows.values():
                if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*", shard, re.ASCII):
                    refuse(table, "weight_map", repr(shard), "the plain name of a shard is wanted")
            return [table, *sorted(set(rows.values()))]
    return []


def _online(name: str, repo: str, revision: str | None) -> Path:
    """Ask the hub, say what a download costs, then fetch what the cache lacks."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    # The listing comes first: it fails at once where a file's HEAD request would be retried for half a minute.
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=PATIENCE)
    if not any(s.rfilename == "config.json" for s in info.siblings or ()):
        refuse_missing(name, "config.json", f"{repo} has none", "a transformers model repository is wanted")
    # Asked for by branch, so that the cache learns which commit the branch is and an offline run finds it.
    folder = Path(hf_hub_download(repo, "config.json", revision=revision)).parent
    commit = folder.name
    if info.sha != commit:  # the branch moved between the two answers
        info = HfApi().model_info(repo, revision=commit, files_metadata=True, timeout=PATIENCE)
    hashes = {s.rfilename: s.lfs.sha256 for s in info.siblings or () if s.lfs is not None}
    sizes: dict[str, int | None] = {s.rfilename: s.size for s in info.siblings or ()
                                    if re.fullmatch(r"[\w-][\w.-]*", s.rfilename, re.ASCII) or MODULE.fullmatch(s.rfilename)}

    weights = pick_weights(sizes, lambda file: read_json(Path(hf_hub_download(repo, file, revision=commit))))
    if not weights:
        seen = [f for f in sizes if f.endswith((".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".bin", ".safetensors"))]
        refuse_missing(name, None, f"{repo} has no weights that we read{' but ' + ', '.join(seen) if seen else ''}",
                       "model.safetensors or pytorch_model.bin, whole or with an index.json, is wanted")
    lacking = [f for f in weights if f not in sizes]
    if lacking:
        refuse_missing(name, weights[0], f"it lists {lacking[0]!r}, which {repo} lacks", "another revision is wanted")

    vectors = ("modules.json", *filter(MODULE.fullmatch, sizes)) if "modules.json" in sizes else ()
    companions = sorted({*vectors, *filter(COMPANIONS.fullmatch, sizes)})
    todo = [f for f in ("config.json", *companions, *weights) if not _whole(folder / f, sizes[f])]
    where = f"{name}: {f'hub id {repo}, ' if repo != name else ''}revision {revision or 'main'} (commit {commit[:7]})"
    if not todo:
        say(f"{where}, already complete in {constants.HF_HUB_CACHE}")
        return folder
    volume = sum(sizes[f] or 0 for f in todo)
    free = shutil.disk_usage(_existing(Path(constants.HF_HUB_CACHE))).free
    heavy = sum(sizes[f] or 0 for f in weights)
    left, lies = _left_over(folder)
    count = _parameters(info, read_json(folder / "config.json"), heavy)
    say(f"{where}\n"
        f"  download: {in_words(volume)} in {len(todo)} files to {constants.HF_HUB_CACHE} (disk free: {in_words(free)})\n"
        f"  memory: {in_words(heavy)} to load; {in_words(16 * count)} to fine-tune with AdamW in fp32 "
        f"(16 bytes x {count / 1e6:,.1f} M parameters)"
        + (f"\n  downloads that were killed left {in_words(left)}, which nothing reads: {lies} may be removed" if left else ""))
    if volume > free:
        refuse(name, None, f"{in_words(volume)} to download, {in_words(free)} free in {constants.HF_HUB_CACHE}",
               "make room, or point HF_HOME at a larger disk")
    with _download():
        for file in todo:
            # A file that is there with the wrong size is damage that the hub's client would trust.
            hf_hub_download(repo, file, revision=commit, force_download=(folder / file).exists(), tqdm_class=_bar())
            if wrong := _damage(folder / file, sizes[file], hashes.get(file)):
                for path in ((folder / file).resolve(), folder / file):  # or a run without the hub would take it
                    path.unlink(missing_ok=True)
                refuse(name, file, f"{wrong}; removed", "try again")
    return folder


def downloading() -> bool:
    """Whether weights are on their way: what asks this process for its end then need not wait for them."""
    return _downloads > 0


@contextmanager
def _download() -> Iterator[None]:
    global _downloads
    _downloads += 1
    try:
        yield
    finally:
        _downloads -= 1


def _bar(**fixed: Any) -> Any:
    """The client's bar, of which each move is progress: ranks that see none for long take the run to stand still. `fixed` are
    options that the client does not decide: of a few small files, which may all be here already, none is drawn."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # its module has the same name, and mypy sees that

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, **fixed})  # type: ignore[no-untyped-call]  # tqdm has no types

        def update(self, n: float | None = 1) -> Any:
            beat()
            return super().update(n)

    return Bar


def _damage(path: Path, size: int | None, sha256: str | None) -> str:
    """What is wrong with a file that has just come; nothing, if it is what the hub lists."""
    if not _whole(path, size):
        return f"{path.stat().st_size} bytes came, the hub lists {size}"
    if sha256 is None:
        return ""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
            beat()
    return "" if found.hexdigest() == sha256 else "other bytes came than the hub lists, by their sha256"


def _left_over(folder: Path) -> tuple[int, Path]:
    """The bytes of downloads to this cache that a kill ended, and their names. Each has one of its own: none is gone on with."""
    blobs = folder.parent.parent / "blobs"
    size = 0
    for path in blobs.glob("*.????????.incomplete"):
        with suppress(OSError):  # it has just become whole
            stat = path.stat()
            size += stat.st_size if time.time() - stat.st_mtime > STALE else 0
    return size, blobs / "*.incomplete"


def _cached(repo: str, revision: str | None) -> tuple[Path | None, str]:
    """The complete cached copy, or None and what is lacking."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(config, str):
        return None, f"{repo} (revision {revision or 'main'}) is not in the cache"
    folder = Path(config).parent
    here = {path.name for path in folder.iterdir() if path.is_file()}
    weights = pick_weights(here, lambda file: read_json(folder / file))
    if not weights:
        return None, f"the cached copy of {repo} has no weights"
    lacking = [file for file in weights if file not in here]
    return (None, f"the cached copy of {repo} lacks {lacking[0]}") if lacking else (folder, "")


def _whole(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that is there: its disk is the one that will be filled."""
    return next(p for p in (path, *path.absolute().parents) if p.is_dir())


def _parameters(info: Any, config: Any, heavy: int) -> int:
    """How many parameters: the hub's own count where it has one, else bytes over the width that config.json names."""
    total = getattr(getattr(info, "safetensors", None), "total", None)
    if isinstance(total, int) and total > 0:
        return total
    kind = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return heavy // WIDTHS.get(kind, 4)


def _check_id(name: str, presets: Mapping[str, str | None]) -> None:
    """Refuse what cannot be a hub id, saying which kind of mistake it looks like."""
    if os.path.isfile(name):
        refuse(name, None, "a file", "the folder that holds it is wanted")
    if "://" in name or ":" in name:
        refuse(name, None, "a scheme or a port in a name", "a hub id is `owner/name`; a mirror is set by HF_ENDPOINT")
    parts = name.split("/")
    if name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or ".." in parts or len(parts) > 2:
        refuse_missing(name, None, "no such folder", "an existing folder, a preset or a hub id `owner/name` is wanted")
    if len(name) > 96 or not all(PART.fullmatch(p) and ".." not in p and "--" not in p for p in parts):
        refuse(name, None, "not a folder, a preset or a hub id",
               f"letters, digits, '-', '_' and '.' make a hub id `owner/name`{_near(name, presets)}")


def _check_revision(name: str, revision: str | None) -> None:
    if revision is not None and (".." in revision or not re.fullmatch(r"\w[\w./+-]{0,199}", revision, re.ASCII)):
        refuse(name, "revision", repr(revision), "a branch, a tag or a commit is wanted")


def _check_environment() -> None:
    for key in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        token = os.environ.get(key, "")
        if not (token.isascii() and token.isprintable()) or " " in token:
            refuse("environment", key, "a space, a newline or another stray character (not shown)", "the token alone")
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint:
        try:
            parts = urlsplit(endpoint)
            good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
        except ValueError:
            good = False
        if not good:
            refuse("environment", "HF_ENDPOINT", "not a plain http(s) address (not shown)",
                   "an address such as https://huggingface.co, without user or password, is wanted")


def _near(name: str, presets: Mapping[str, str | None]) -> str:
    """A hint at the preset that was meant, perhaps; nothing for one, nor for the hub id of one."""
    if name in presets or name in presets.values():
        return ""
    close = get_close_matches(name, presets, n=1, cutoff=0.6)
    return f"; did you mean the preset {close[0]!r}?" if close else ""


def _explain(error: Exception, name: str, repo: str, revision: str | None,
             presets: Mapping[str, str | None]) -> InputError | None:
    """The refusal for what the hub's client raised; None for what is a bug and should be seen whole."""
    found, wanted, absent = _story(error, repo, revision)
    if not found:
        return None
    return (MissingError if absent else InputError)(message(name, None, found, wanted + _near(name, presets)))


def _story(error: Exception, repo: str, revision: str | None) -> tuple[str, str, bool]:
    """What was found, what to do, and whether it is a thing that is not there."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    host = urlsplit(constants.ENDPOINT).hostname or "the hub"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return (f"{repo} is gated ({status})",
                f"accept its terms at {host}/{repo} in a browser, then set HF_TOKEN to a token of that account", False)
    if isinstance(error, errors.RepositoryNotFoundError):
        return (f"{host} has no {repo}, or it is private ({status})",
                "check the name; for a private one set HF_TOKEN; `modelcenter list models` shows the presets", True)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}", "give a branch, a tag or a commit of it", True
    if isinstance(error, errors.EntryNotFoundError) and status is not None:
        return f"{repo} lists a file that {host} does not have ({status})", "try again later, or another revision", True
    if status == 401:
        return f"{host} does not accept the token (401)", "renew HF_TOKEN, or unset it for a public model", False
    if status == 403:
        return f"{host} forbids access to {repo} (403)", "use a token that may read it (HF_TOKEN)", False
    if status is not None:
        return f"{host} answered {status}", "try again later, or set HF_ENDPOINT to a mirror", False
    # The transport is httpx2, httpx or requests by the client's version: HfHubHTTPError derives from its root error.
    transport = errors.HfHubHTTPError.__bases__[0]
    if isinstance(error, (transport, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)):
        return (f"no answer from {host} ({type(error).__name__})",
                "check the network, set HF_ENDPOINT to a mirror, or give a folder", True)
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror} in {constants.HF_HUB_CACHE}", "mend that, or point HF_HOME elsewhere", False
    if isinstance(error, OSError):
        return f"the download from {host} broke off", "run it again: files that came whole are kept", False
    return "", "", False
