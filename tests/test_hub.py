"""Names to folders, against a small hub on 127.0.0.1 that speaks what huggingface_hub asks for."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

import modelcenter
from modelcenter.__main__ import main
from modelcenter.checkpoint import download, hub, manifest
from modelcenter.checkpoint.regular import check_inside
from modelcenter.data.tokenizer_open import load_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import LIMIT, InputError, MissingError

CANARY = "hf_canaryCANARYcanary0123456789"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = json.dumps({"model_type": "gpt2", "torch_dtype": "float16"}).encode()
PRESETS = {"tiny": "someone/tiny", "tiny-xl": "someone/tiny-xl", "unpublished": None}


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = COMMIT
    status: int = 200
    code: str = ""  # X-Error-Code
    cut: str = ""  # a file whose body breaks off
    flipped: str = ""  # a file of which other bytes are sent
    safetensors: dict | None = None


@dataclass
class Hub:
    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    fetched: Counter = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    downloading: dict[str, bool] = field(default_factory=dict)  # what `downloading` said as a file was sent


def lfs(file: str, body: bytes) -> dict[str, dict]:
    """What the hub lists of a large file."""
    if not file.endswith((".safetensors", ".bin")):
        return {}
    digest = hashlib.sha256(body).hexdigest()
    return {"lfs": {"sha256": digest, "oid": digest, "size": len(body), "pointerSize": 130}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            parts = [unquote(p) for p in url.path.strip("/").split("/")]
            state.requests.append(f"{self.command} {self.path}")
            token = self.headers.get("Authorization", "")
            state.tokens.add(token)
            api = parts[:2] == ["api", "models"]
            parts = parts[2:] if api else parts
            mark = next((m for m in ("revision", "tree") if m in parts), "revision") if api else "resolve"
            at = parts.index(mark) if mark in parts else len(parts)
            name, rest = "/".join(parts[:at]), parts[at + 1 :]
            repo = state.repos.get(name)
            # What an unfriendly server might do: say the token back, wherever a client may print it.
            loud = {"X-Error-Message": f"you sent {token}", "X-Request-Id": token or "none"}
            if repo is None:
                return self.answer(401 if not token else 404, f'{{"error": "{token}"}}'.encode(),
                                   {"X-Error-Code": "RepoNotFound", **loud})
            if repo.status != 200:
                code = {"X-Error-Code": repo.code} if repo.code else {}
                return self.answer(repo.status, f'{{"error": "{token}"}}'.encode(), {**code, **loud})
            if rest and rest[0] not in ("main", repo.commit):
                return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound", **loud})
            if api and mark == "tree":
                rows = [{"type": "file", "oid": "0" * 40, "size": len(b), "path": f, **lfs(f, b)} for f, b in repo.files.items()]
                return self.answer(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
            if api:
                blobs = "blobs" in parse_qs(url.query)
                listing = [{"rfilename": f, **({"size": len(b), **lfs(f, b)} if blobs else {})} for f, b in repo.files.items()]
                info = {"id": name, "modelId": name, "sha": repo.commit, "siblings": listing, "tags": []}
                if repo.safetensors:
                    info["safetensors"] = repo.safetensors
                return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            file = "/".join(rest[1:])
            if file not in repo.files:
                return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit, **loud})
            body = repo.files[file]
            tag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": repo.commit}
            status = 200
            if self.command == "GET":
                state.fetched[file] += 1
                state.downloading[file] = download.downloading()
                body = body[:-1] + b"?" if file == repo.flipped else body
                if span := self.headers.get("Range"):
                    start = int(span.removeprefix("bytes=").partition("-")[0])
                    tag["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                    body, status = body[start:], 206
            self.answer(status, body, tag, cut=file == repo.cut)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    state = Hub(f"http://127.0.0.1:{httpd.server_port}")
    # huggingface_hub reads its environment at import; here it is imported already.
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", state.url)
    template = state.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.chdir(tmp_path)
    yield state
    httpd.shutdown()
    httpd.server_close()


def resolve(name: str, **options: object) -> Path:
    return hub.resolve(name, presets=PRESETS, **options)  # type: ignore[arg-type]


def refused(name: str, kind: type[InputError] = InputError, **options: object) -> str:
    """The message, after checking that it is one line and that the token is nowhere in it or its traceback."""
    with pytest.raises(kind) as caught:
        resolve(name, **options)
    text = str(caught.value)
    assert "\n" not in text and len(text) <= LIMIT and "; " in text
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    return text


def single(**more: bytes) -> Repo:
    extra = {k.replace("__", "."): v for k, v in more.items()}
    return Repo({
        "config.json": CONFIG, "model.safetensors": b"weights " * 100, "pytorch_model.bin": b"no", "README.md": b"#",
        "tokenizer.json": b"{}", "tokenizer_config.json": b"{ }", "vocab.txt": b"a\nb", "spiece.model": b"\0s",
        "generation_config.json": b"{  }", "tokenizer.py": b"import os", "flax_model.msgpack": b"flax",
        "onnx/model.onnx": b"onnx", "1_Pooling/config.json": b"pool", **extra})  # fmt: skip


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {ONE: b"one" * 50, TWO: b"two" * 60}
INDEX = json.dumps({"metadata": {}, "weight_map": {"a": ONE, "b": TWO, "c": ONE}}).encode()


def sharded() -> Repo:
    other = {"model-fp16.safetensors": b"other", "pytorch_model.bin.index.json": b"{}", "pytorch_model-1.bin": b"no"}
    return Repo({"config.json": CONFIG, "model.safetensors.index.json": INDEX, **SHARDS, **other})


def here(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_preset_to_folder(server: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    repo = server.repos["someone/tiny"] = single()
    folder = resolve("tiny")
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
              "spiece.model", "generation_config.json"}  # fmt: skip
    assert here(folder) == {name: repo.files[name] for name in wanted}
    assert set(server.fetched) == wanted and set(server.fetched.values()) == {1}
    assert f"Bearer {CANARY}" in server.tokens  # HF_TOKEN is used, and so the canary can be seen if it leaks
    said = capfd.readouterr().err
    assert CANARY not in said
    block = said[said.index("modelcenter: tiny: hub id someone/tiny, revision main (commit 0123456)") :].splitlines()
    assert block[1].startswith("  download: 814 B in 6 files to ") and "disk free" in block[1]
    assert "800 B to load; 6.4 kB to fine-tune with AdamW in fp32 (16 bytes x 0.0 M" in block[2]  # of fp16


def test_what_is_said_of_vectors_comes_too(server: Hub) -> None:
    """sentence-transformers' files, by which a model is loaded that forms its vectors otherwise (checkpoint/sentence.py)."""
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": place} for kind, place in
               (("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "dense-1"), ("Pooling", "../out"), ("LayerNorm", "norm"))]
    repo = server.repos["someone/tiny"] = single(modules__json=json.dumps(modules).encode())
    repo.files |= dict.fromkeys((f"{place}/config.json" for place in ("dense-1", "norm", "other")), b"{}")
    repo.files["dense-1/model.safetensors"] = b"dense"
    folder = resolve("tiny")
    assert json.loads((folder / "modules.json").read_text()) == modules
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"pool"
    fetched = {file for file in server.fetched if "/" in file}
    assert fetched == {"1_Pooling/config.json", "dense-1/config.json", "dense-1/model.safetensors"}
    check_inside(folder / "dense-1" / "model.safetensors")  # a link into the cache, as those of the folder above
    repo.files["modules.json"] = b"{}"  # no list: refused where it is read
    repo.commit = COMMIT[::-1]
    assert (resolve("tiny") / "modules.json").read_bytes() == b"{}"


def test_figures(server: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    server.repos["someone/tiny"] = repo = single(model__safetensors=bytes(6_000_000))
    resolve("tiny")  # torch_dtype float16: 3 M parameters
    said = capfd.readouterr().err
    assert "6.0 MB to load; 48.0 MB to fine-tune with AdamW in fp32 (16 bytes x 3.0 M parameters)" in said
    repo.safetensors = {"parameters": {"F32": 1_500_000}, "total": 1_500_000}
    repo.commit = COMMIT[::-1]  # the branch moved: the new commit is fetched, and the hub's own count believed
    assert resolve("tiny").name == COMMIT[::-1]
    assert "24.0 MB to fine-tune with AdamW in fp32 (16 bytes x 1.5 M parameters)" in capfd.readouterr().err


def test_second_time(server: Hub, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["someone/tiny"] = single()
    first = resolve("tiny")
    server.fetched.clear(), server.requests.clear(), capfd.readouterr()
    assert resolve("tiny") == first and not server.fetched
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "already complete in" in lines[0]
    server.requests.clear()
    assert resolve("tiny", local_files_only=True) == first
    assert resolve("someone/tiny", local_files_only=True, revision=COMMIT) == first
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("tiny") == first and not server.requests


def test_sharded(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = server.repos["someone/big"] = sharded()
    folder = resolve("someone/big")
    assert here(folder) == {name: repo.files[name] for name in ["config.json", "model.safetensors.index.json", *SHARDS]}
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors" in refused("someone/big", MissingError, local_files_only=True)
    server.fetched.clear()
    assert resolve("someone/big") == folder and len(here(folder)) == 4
    assert not server.fetched  # the blob is still in the cache


def test_bin_only(server: Hub) -> None:
    files = {"config.json": CONFIG, "pytorch_model.bin": b"PK", "merges.txt": b"m", "vocab.json": b"{}"}
    server.repos["gpt"] = Repo(dict(files))
    assert here(resolve("gpt")) == files


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter(server: Hub, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, as peft leaves it, or beside the config.json of its base; a model in the same place comes without it."""
    files = {"adapter_config.json": b"{}", weights: b"low rank", "tokenizer.json": b"{}"}
    both = {**files, "config.json": CONFIG}
    server.repos["a/lora"] = Repo({**files, "README.md": b"#", "optimizer.bin": b"no"})
    server.repos["a/both"] = Repo(both)
    model = server.repos["a/model"] = Repo({**both, "model.safetensors": b"weights"})
    assert [here(resolve(name)) for name in ("a/lora", "a/both")] == [files, both]
    assert here(resolve("a/model")) == {k: v for k, v in model.files.items() if "adapter" not in k}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert here(resolve("a/lora")) == files


def test_an_adapter_comes_with_its_base(server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = modelcenter.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 40, "positions": 16})
    base.save_pretrained(tmp_path / "base")
    made = modelcenter.load(tmp_path / "base", adapter=modelcenter.AdapterConfig(name="lora", rank=2))
    made.source = "a/base"
    made.save_pretrained(tmp_path / "lora")
    for name in ("base", "lora"):
        server.repos[f"a/{name}"] = Repo(here(tmp_path / name))
    found = modelcenter.load("a/lora")
    assert found.source == "a/base" and found.adapter.rank == 2
    for (name, p), q in zip(made.named_parameters(), found.parameters(), strict=True):
        assert p.equal(q), name
    assert main(["merge", "a/lora", str(tmp_path / "merged"), "revision=v2"]) == 2
    assert main(["merge", "a/lora", str(tmp_path / "merged"), "revision=main"]) == 0
    merged = modelcenter.load(tmp_path / "merged")
    assert all(p.equal(q) for p, q in zip(base.parameters(), merged.parameters(), strict=True)) and merged.adapter is None
    assert main(["merge", "a/base", str(tmp_path / "out")]) == 2
    assert "a/base: no adapter_config.json; the hub id of an adapter" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_existing_folder_wins(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == Path("tiny") and not server.requests
    assert resolve(str(tmp_path / "tiny"), revision="main") == tmp_path / "tiny"
    assert "revision" in refused("tiny", revision="v2")


def test_damaged_file_is_fetched_again(server: Hub) -> None:
    repo = server.repos["someone/tiny"] = single()
    folder = resolve("tiny")
    (folder / "model.safetensors").resolve().write_bytes(b"half")
    assert (resolve("tiny") / "model.safetensors").read_bytes() == repo.files["model.safetensors"]


def test_truncated_download(server: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's pauses between its tries
    repo = server.repos["someone/tiny"] = single(model__safetensors=b"w" * 200_000)
    repo.cut = "model.safetensors"
    text = refused("tiny")
    assert "broke off" in text or "no answer" in text
    refused("tiny", MissingError, local_files_only=True)  # nothing that looks complete was left
    repo.cut = ""
    assert (resolve("tiny") / "model.safetensors").read_bytes() == b"w" * 200_000
    assert CANARY not in capfd.readouterr().err


def test_other_bytes_of_the_same_size_are_found_and_do_not_stay(server: Hub) -> None:
    repo = server.repos["someone/tiny"] = single()
    repo.flipped = "model.safetensors"
    assert "model.safetensors: other bytes came than the hub lists, by their sha256; removed; try again" in refused("tiny")
    refused("tiny", MissingError, local_files_only=True)
    repo.flipped = ""
    assert (resolve("tiny") / "model.safetensors").read_bytes() == repo.files["model.safetensors"]


def test_a_file_that_came_too_short_does_not_stay(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a mirror that serves another file than it lists."""
    repo = server.repos["someone/tiny"] = single()
    listed = repo.files["model.safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(download, "pick_weights", lambda names, read: repo.files.update({"model.safetensors": b"short"}) or [
            "model.safetensors"])
        assert f"5 bytes came, the hub lists {len(listed)}; removed" in refused("tiny")
    refused("tiny", MissingError, local_files_only=True)


def test_a_download_moves_a_run_and_is_known_to_be_one(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several ranks that see no progress all end; and who is asked for his end does not wait for a download."""
    beats: list[int] = []
    for module in (download, manifest):
        monkeypatch.setattr(module, "beat", lambda: beats.append(1))
    server.repos["someone/big"] = sharded()
    resolve("someone/big")
    assert len(beats) >= 2 * len(SHARDS), "as each comes, and as it is hashed"
    assert all(server.downloading[shard] for shard in SHARDS) and not download.downloading()
    server.repos["someone/big"].cut = ONE
    server.repos["someone/big"].commit = COMMIT[::-1]
    server.repos["someone/big"].files[ONE] = b"other" * 50
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for offline in (False, True):  # an update that broke off leaves the copy before it the one to take
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert resolve("someone/big").name == COMMIT and not download.downloading()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server.repos["someone/big"].cut = ""
    assert resolve("someone/big").name == COMMIT[::-1]


def test_a_cache_that_may_not_be_written_is_read(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch may then be behind: that of whoever keeps it."""
    server.repos["someone/tiny"] = single()
    folder = resolve("tiny")
    (folder.parent.parent / "refs" / "main").write_text("0" * 40)

    def fails(*args: object) -> None:
        raise InputError("refs/main: Read-only file system; nothing was changed")

    monkeypatch.setattr(download, "atomic_write", fails)
    assert resolve("tiny") == folder


def test_what_killed_downloads_left_is_said(server: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """The client gives each download a name of its own: after a kill nothing goes on with it, and nothing removes it."""
    server.repos["someone/tiny"] = repo = single()
    folder = resolve("tiny")
    assert "downloads that were" not in capfd.readouterr().err
    blobs = folder.parent.parent / "blobs"
    for name, age in (("old.0123abcd", 7200), ("of-one-that-lives.0123abcd", 0)):
        (blobs / f"{name}.incomplete").write_bytes(bytes(3_000_000))
        os.utime(blobs / f"{name}.incomplete", (time.time() - age,) * 2)
    (folder / "tokenizer.json").resolve().unlink()
    (folder / "tokenizer.json").unlink()
    assert (resolve("tiny") / "tokenizer.json").read_bytes() == repo.files["tokenizer.json"]
    said = f"downloads that were killed left 3.0 MB, which nothing reads: {blobs}/*.incomplete may be removed"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(("status", "code", "kind", "says"), [
    (404, "RepoNotFound", MissingError, "check the name"), (401, "", InputError, "HF_TOKEN"),
    (403, "GatedRepo", InputError, "accept its terms"), (401, "GatedRepo", InputError, "gated"),
    (403, "", InputError, "HF_TOKEN"), (500, "", InputError, "answered 500"), (429, "", InputError, "answered 429"),
])  # fmt: skip
def test_refusals_of_the_hub(server: Hub, capfd: pytest.CaptureFixture[str], status: int, code: str,
                             kind: type[InputError], says: str) -> None:
    server.repos["someone/tiny"] = Repo({}, status=status, code=code)
    assert says in refused("tiny", kind)
    assert CANARY not in capfd.readouterr().err


def test_hub_down_with_cache(server: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    server.repos["someone/tiny"] = single()
    folder = resolve("tiny")
    capfd.readouterr()
    server.repos["someone/tiny"].status = 503
    assert resolve("tiny") == folder
    said = capfd.readouterr().err
    assert "modelcenter: tiny: 127.0.0.1 answered 503; using the cached copy in" in said


def test_unknown_names(server: Hub) -> None:
    assert "did you mean the preset 'tiny-xl'?" in refused("tiny-lx", MissingError)
    assert refused("roberta-base", MissingError).endswith("; no such family yet: modelcenter list models")
    assert "did you mean" not in refused("quite/else", MissingError)
    assert "did you mean" not in refused("someone/tiny", MissingError), "the hub id of a preset is no mistake"
    assert "without public weights" in refused("unpublished", MissingError)
    assert "did you mean the preset 'tiny'?" in refused("tinny", MissingError, local_files_only=True)
    assert not server.fetched


def test_missing_parts(server: Hub) -> None:
    server.repos["a/none"] = Repo({"README.md": b""})
    assert "config.json" in refused("a/none", MissingError)
    server.repos["a/h5"] = Repo({"config.json": CONFIG, "tf_model.h5": b"x"})
    assert "tf_model.h5" in refused("a/h5", MissingError)
    server.repos["a/gap"] = Repo({k: v for k, v in sharded().files.items() if "00002-of" not in k})
    assert "model-00002-of-00002.safetensors" in refused("a/gap", MissingError)
    evil = json.dumps({"weight_map": {"a": "../../../x"}}).encode()
    server.repos["a/evil"] = Repo({"config.json": CONFIG, "model.safetensors.index.json": evil, "../../../x": b""})
    assert "'../../../x'" in refused("a/evil")
    server.repos["a/rev"] = single()
    assert "no revision 'v9'" in refused("a/rev", MissingError, revision="v9")


def test_disk_too_small(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repos["someone/tiny"] = single()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 500})())
    assert " to download, 500 B free in " in refused("tiny")
    assert set(server.fetched) == {"config.json"}


@pytest.mark.parametrize("name", [
    "https://huggingface.co/gpt2", "http:gpt2", "host:8080/gpt2", "../gpt2", "a/../b", "./gone", "/gone", "~/gone",
    "a/b/c", "a\\b", "", "a b", "a\nb", "a/..b", "-a/b", "a--b/c", "a" * 97, "a/b?x=1", "a/b#c", "a@b", "a/b\x00",
])  # fmt: skip
def test_bad_names(server: Hub, name: str) -> None:
    refused(name)
    assert not server.requests


@pytest.mark.parametrize("revision", ["../x", "", "a b", "a\nb", "/etc", "x" * 300, "-x", "a?b"])
def test_bad_revisions(server: Hub, revision: str) -> None:
    refused("tiny", revision=revision)
    assert not server.requests


def test_bad_environment(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in (CANARY + "\n", CANARY + "\r\nX: y", "a b" + CANARY, CANARY + "é"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert "HF_TOKEN" in refused("tiny")
    monkeypatch.setenv("HF_TOKEN", CANARY)
    for url in ("", "ftp://x", "huggingface.co", f"https://user:{CANARY}@host", "http://host:99999"):
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert "HF_ENDPOINT" in refused("tiny")
    assert not server.requests


def test_variables_in_a_fresh_process(server: Hub, tmp_path: Path) -> None:
    """The variables as a user sets them; torch is not imported."""
    server.repos["someone/tiny"] = single()
    program = ("import sys; from modelcenter.checkpoint import hub; from modelcenter.errors import InputError\n"
               "try: print(hub.resolve('tiny', presets={'tiny': 'someone/tiny'}))\n"
               "except InputError as error: print('refused:', error)\n"
               "assert 'torch' not in sys.modules and 'transformers' not in sys.modules")

    def run(**more: str) -> tuple[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        env |= {"HF_HOME": str(tmp_path / "other"), "HF_TOKEN": CANARY, "HF_ENDPOINT": server.url, **more}
        env["PYTHONPATH"] = str(Path(modelcenter.__file__).parents[1])
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=True)
        assert CANARY not in done.stdout + done.stderr
        return done.stdout.strip(), done.stderr

    assert run(HF_HUB_OFFLINE="1")[0].startswith("refused: tiny: offline, and someone/tiny (revision main) is neither a folder")
    folder, _ = run()
    assert Path(folder).is_relative_to(tmp_path / "other" / "hub") and (Path(folder) / "model.safetensors").is_file()
    server.requests.clear()
    assert run(HF_HUB_OFFLINE="1")[0] == folder and not server.requests
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    found, said = run(**nobody)
    assert found == folder and "using the cached copy" in said
    assert "no answer from 127.0.0.1" in run(**nobody, HF_HUB_CACHE=str(tmp_path / "empty"))[0]


def tokenizer(folder: Path) -> dict[str, bytes]:
    """The files of one, beside those of a model that are not its."""
    train_tokenizer(["the cat sat on the mat"] * 3, 300, "bpe").save(folder)
    return {**here(folder), "config.json": CONFIG, "model.safetensors": b"weights", "README.md": b"#"}


def test_a_tokenizer_comes_without_weights(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hub id or a preset; the second time from the cache, also where there is no network."""
    (tmp_path / "made").mkdir()
    repo = server.repos["someone/tiny"] = Repo(tokenizer(tmp_path / "made"))
    ids = modelcenter.load_tokenizer(tmp_path / "made").encode("the cat sat")
    assert modelcenter.load_tokenizer("someone/tiny").encode("the cat sat") == ids
    assert set(server.fetched) == set(repo.files) - {"model.safetensors", "README.md"}
    server.fetched.clear()
    assert load_tokenizer("tiny", PRESETS).encode("the cat sat") == ids and not server.fetched
    repo.status = 503
    assert load_tokenizer("tiny", PRESETS).encode("the cat sat") == ids
    server.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_tokenizer("tiny", PRESETS).encode("the cat sat") == ids and not server.requests


def test_a_tokenizer_does_not_move_a_branch_from_a_whole_copy(server: Hub, tmp_path: Path) -> None:
    """Its weights may never come; then the copy before, with its tokenizer, is the one to use."""
    (tmp_path / "made").mkdir()
    repo = server.repos["someone/tiny"] = Repo(tokenizer(tmp_path / "made"))
    first = resolve("tiny")
    repo.commit = COMMIT[::-1]
    repo.files["tokenizer_config.json"] = json.dumps({**json.loads(repo.files["tokenizer_config.json"]), "new": 1}).encode()
    assert hub.fetch("tiny", ["tokenizer*"], PRESETS).name == repo.commit  # what it has by now
    repo.status = 503
    assert resolve("tiny") == first and hub.fetch("tiny", ["tokenizer*"], PRESETS) == first
    repo.status = 200
    assert resolve("tiny").name == hub.fetch("tiny", ["tokenizer*"], PRESETS).name == repo.commit
    repo.status = 503
    assert resolve("tiny").name == repo.commit


def test_a_tokenizer_from_a_mirror_in_a_fresh_process(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    server.repos["someone/tiny"] = Repo(tokenizer(tmp_path / "made"))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_HOME": str(tmp_path / "other"), "HF_ENDPOINT": server.url, "PYTHONPATH": str(Path(modelcenter.__file__).parents[1])}
    program = "import modelcenter as mc; print(mc.load_tokenizer('someone/tiny').encode('the cat sat'))"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=250, check=True)
    assert json.loads(done.stdout) == modelcenter.load_tokenizer(tmp_path / "made").encode("the cat sat") and not done.stderr
    assert server.tokens == {""} and "model.safetensors" not in server.fetched


def test_few_files_come_without_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The client draws one for three small files, though they may all be here already."""

    def download(repo: str, tqdm_class: Any, **asked: object) -> str:
        assert list(tqdm_class(range(3), desc="Fetching 3 files")) == [0, 1, 2]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.fetch("someone/tiny", ["tokenizer*"], PRESETS) == tmp_path
    assert capfd.readouterr() == ("", "")
