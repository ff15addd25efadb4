"""Finds the local folder for a name: an existing folder, a preset (which names a hub id), or a hub id.

Files that the cache lacks are downloaded (`download.py`). huggingface_hub does the transfers and reads HF_HOME, HF_HUB_CACHE,
HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN; its messages never reach the user, because a server may put anything into them.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import InputError, MissingError, message, refuse, refuse_missing
from ..theirs import no_family
from .download import CONFIGS, PATIENCE, bar, download, pick_weights, say
from .state import check_there
from .strict_json import read_json

NOWHERE = "neither a folder nor cached"
PART = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")


def resolve(name: str | os.PathLike[str], *, revision: str | None = None, local_files_only: bool = False,
            presets: Mapping[str, str | None]) -> Path:
    """The local folder that `name` stands for, downloaded if need be.

    `presets` maps a preset's name to its hub id, or to None if there are no public weights. `revision` is a branch, tag or commit
    of a hub id. Raises `InputError` (`MissingError` for what does not exist), one line that says what to do.
    """
    name = os.fspath(name)
    if os.path.isdir(os.path.expanduser(name)):
        if revision not in (None, "main"):
            refuse(name, "revision", f"{revision!r} of a local folder", "a revision belongs to a hub id; drop it")
        return Path(name).expanduser()
    check_there(name)
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
        return download(name, repo, revision)
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
    """The folder with the files of `name` that match `patterns`; `name` is a hub id, or stands for one in `presets`. If the hub
    cannot be reached, the files come from the cache. A complete copy there stays the branch's until the weights of the next have
    come too (`remember`)."""
    repo = presets.get(name) or name
    if name not in presets:
        _check_id(name, presets)
    _check_environment()
    from huggingface_hub import HfApi, constants, snapshot_download

    kept = None
    with suppress(InputError):  # a broken copy is none
        kept = None if constants.HF_HUB_OFFLINE else _cached(repo, None)[0]
    try:
        commit = HfApi().model_info(repo, timeout=PATIENCE).sha if kept is not None else None
        return Path(snapshot_download(repo, revision=commit, allow_patterns=patterns, tqdm_class=bar(disable=True)))
    except Exception as error:
        if constants.HF_HUB_OFFLINE:
            how = f"unset HF_HUB_OFFLINE, or give a folder{_near(name, presets)}"
            reason: InputError | None = MissingError(message(name, None, f"offline, and {repo} is {NOWHERE}", how))
        else:
            reason = _explain(error, name, repo, None, presets)
        if reason is None:
            raise
        if kept is not None:
            return kept
        raise reason from None


def _cached(repo: str, revision: str | None) -> tuple[Path | None, str]:
    """The complete cached copy, or None and what is lacking."""
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repo, file, revision=revision) for file in CONFIGS)
    config = next((file for file in found if isinstance(file, str)), None)
    if config is None:
        return None, f"{repo} (revision {revision or 'main'}) is {NOWHERE}"
    folder = Path(config).parent
    here = {path.name for path in folder.iterdir() if path.is_file()}
    weights = pick_weights(here, lambda file: read_json(folder / file))
    if not weights:
        return None, f"the cached copy of {repo} has no weights"
    lacking = [file for file in weights if file not in here]
    return (None, f"the cached copy of {repo} lacks {lacking[0]}") if lacking else (folder, "")


def _check_id(name: str, presets: Mapping[str, str | None]) -> None:
    """Refuse what cannot be a hub id, saying which kind of mistake it looks like."""
    if os.path.isfile(name):
        refuse(name, None, "a file", "the folder that holds it")
    if "://" in name or ":" in name:
        refuse(name, None, "a scheme or a port in a name", "a hub id is `owner/name`; a mirror is set by HF_ENDPOINT")
    parts = name.split("/")
    if name.startswith((".", "/", "~")) or name.endswith("/") or "\\" in name or ".." in parts or len(parts) > 2:
        refuse_missing(name, None, "no such folder", "an existing folder, a preset or a hub id `owner/name`")
    if len(name) > 96 or not all(PART.fullmatch(p) and ".." not in p and "--" not in p for p in parts):
        refuse(name, None, "not a folder, a preset or a hub id",
               f"letters, digits, '-', '_' and '.' make a hub id `owner/name`{_near(name, presets)}")


def _check_revision(name: str, revision: str | None) -> None:
    if revision is not None and (".." in revision or not re.fullmatch(r"\w[\w./+-]{0,199}", revision, re.ASCII)):
        refuse(name, "revision", repr(revision), "a branch, a tag or a commit")


def _check_environment() -> None:
    for key in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        token = os.environ.get(key, "")
        if not (token.isascii() and token.isprintable()) or " " in token:
            refuse("environment", key, "a space, a newline or another stray character (not shown)", "the token alone")
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint is not None:  # an empty one is an address to huggingface_hub
        try:
            parts = urlsplit(endpoint)
            good = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc and parts.port != 0
        except ValueError:
            good = False
        if not good:
            refuse("environment", "HF_ENDPOINT", "not a plain http(s) address (not shown)",
                   "an address such as https://huggingface.co, without user or password, or unset it")


def _near(name: str, presets: Mapping[str, str | None]) -> str:
    """A hint at the preset that was meant, perhaps; nothing for one, nor for the hub id of one."""
    if name in presets or name in presets.values():
        return ""
    if absent := no_family(name):
        return f"; {absent}"
    whole = name.removesuffix("-base")  # ModelCenter says it of the smallest of a family
    close = [whole] if whole in presets else get_close_matches(name, presets, n=1, cutoff=0.6)
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
        return f"{error.strerror} in {constants.HF_HUB_CACHE}", "fix that, or point HF_HOME elsewhere", False
    if isinstance(error, OSError):
        return f"the download from {host} broke off", "run it again: files that came whole are kept", False
    return "", "", False
