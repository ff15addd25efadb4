"""What is written is what safetensors and transformers would write, and it appears whole or not at all."""

import errno
import json
import os
import random
import re
import resource
import signal
import time
import warnings
import weakref
from threading import Event

import numpy
import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_folder import sample

from modelcenter.checkpoint import atomic
from modelcenter.checkpoint import save as whole
from modelcenter.checkpoint.atomic import atomic_write, check_space, commit_folder, staging
from modelcenter.checkpoint.folder import DTYPES, Folder, raw
from modelcenter.checkpoint.strict_json import read_json
from modelcenter.checkpoint.write import Item, arranged, parse_size, save_folder, write_shard
from modelcenter.errors import LIMIT, InputError


def items(table):
    return [Item(name, value.shape, value.dtype, lambda value=value: value) for name, value in table.items()]


def save(path, table, size="5GB", **extra):
    save_folder(path, items(table), max_shard_size=size, extra_files={"config.json": b"{}"} | extra)


def content(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def every_dtype():
    table = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        table |= {f"b.{name}": sample(dtype, (i % 3 + 1, 5)), f"a.{name}": sample(dtype, ())}
    return table | {"é \"quoted\" \\ 中": torch.ones(2), "empty": torch.zeros(3, 0, dtype=torch.float16)}


def test_bytes_equal_save_file(tmp_path):
    table = every_dtype()
    save_file(table, tmp_path / "peer.safetensors", metadata={"format": "pt"})
    save(tmp_path / "out", table)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "peer.safetensors").read_bytes()
    assert os.listdir(tmp_path / "out") != [] and set(os.listdir(tmp_path)) == {"out", "peer.safetensors"}


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 3), max_size=3)
tables = st.dictionaries(
    names.filter(lambda n: ".." not in n and n[0] != "/"),
    st.tuples(st.sampled_from(list(DTYPES.values())), shapes),
    min_size=1,
)


@settings(max_examples=60)
@given(tables)
def test_bytes_equal_save_file_for_any_table(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("any")
    table = {name: sample(dtype, shape) for name, (dtype, shape) in table.items()}
    save_file(table, folder / "peer", metadata={"format": "pt"})
    write_shard(folder / "ours", [Item(n, tuple(v.shape), v.dtype, lambda v=v: v) for n, v in table.items()])
    assert (folder / "ours").read_bytes() == (folder / "peer").read_bytes()


@pytest.mark.parametrize("size", [1, 40, 100, "1KB", "1GB"])
def test_folder_equals_the_peers(tmp_path, size):
    """Split, names and index as huggingface_hub (and with it transformers) makes them; and every tensor comes back."""
    table = {k: v for k, v in every_dtype().items() if v.numel()}
    save(tmp_path / "out", table, size)
    plan = split_torch_state_dict_into_shards(table, max_shard_size=size)
    for file, keys in plan.filename_to_tensors.items():
        save_file({k: table[k] for k in keys}, tmp_path / "peer", metadata={"format": "pt"})
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "peer").read_bytes()
    if plan.is_sharded:
        count = sum(v.numel() for v in table.values())
        index = {"metadata": {"total_parameters": count, **plan.metadata}, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        assert (tmp_path / "out/model.safetensors.index.json").read_text(encoding="utf-8") == text
    assert len(os.listdir(tmp_path / "out")) == len(plan.filename_to_tensors) + 1 + plan.is_sharded
    with Folder(tmp_path / "out") as folder:
        assert folder.keys() == table.keys()
        for key, value in table.items():
            assert bytes(raw(folder.slice(key)[...])) == bytes(raw(value)) and folder.dtype(key) == value.dtype


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1), st.integers(1, 40))  # the peer takes all empty tensors for one
def test_plan_equals_the_peers(sizes, limit):
    table = {str(i): torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
    peer = split_torch_state_dict_into_shards(table, max_shard_size=limit)
    plan = arranged(items(table), limit)
    assert {file: [item.name for item in part] for file, part in plan.items()} == peer.filename_to_tensors


def test_any_tensor_is_written(tmp_path):
    base = torch.randn(4, 6, dtype=torch.complex64)
    table = {
        "t": base.real.t(), "conj": base.conj(), "neg": base.conj().imag, "row": base.real[1],
        "expand": torch.ones(1).expand(3), "param": torch.nn.Parameter(torch.ones(2)), "step": torch.arange(9)[::2],
    }  # fmt: skip
    save(tmp_path / "out", table)
    with Folder(tmp_path / "out") as folder:
        for key, value in table.items():
            assert torch.equal(folder.slice(key)[...], value.detach())


@pytest.mark.parametrize("size", ["5GB", 300])
def test_one_tensor_in_memory_at_a_time(tmp_path, size):
    """Each is made when its turn comes, once, and gone before the next."""
    made: list[weakref.ref] = []

    def make(value):
        assert not [r for r in made if r() is not None]
        array = numpy.full(100, value, dtype=numpy.float32)  # lives as long as the storage, not as the Python tensor
        made.append(weakref.ref(array))
        return torch.from_numpy(array)

    table = [Item(f"w{i}", (100,), torch.float32, lambda i=i: make(i)) for i in range(6)]
    save_folder(tmp_path / "out", table, max_shard_size=size, extra_files={})
    assert len(made) == 6


def test_modes_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        save(tmp_path / "out", {"w": torch.ones(2), "v": torch.ones(2)}, 8)
        atomic_write(tmp_path / "x.json", b"{}")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in [*(tmp_path / "out").iterdir(), tmp_path / "x.json"]} == {0o640}


def test_an_empty_folder_keeps_its_mode(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    save(tmp_path / "out", {"w": torch.ones(2)})
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    """It could be swapped for a new one, and the old one then not be removed."""
    save(tmp_path / "out", {"w": torch.ones(2)})
    before = content(tmp_path / "out")
    monkeypatch.setattr("os.access", lambda path, mode: os.fspath(path) != str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"out: a folder that may not be written; another folder, or chmod u\+w$"):
        save(tmp_path / "out", {"w": torch.zeros(2)})
    assert content(tmp_path / "out") == before and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("name", ["模" * 84, "m" * 255])
def test_a_name_as_long_as_names_may_be(tmp_path, name):
    for _ in range(2):
        save(tmp_path / name, {"w": torch.ones(2)})
    atomic_write(tmp_path / name / name, b"x")
    assert os.listdir(tmp_path) == [name] and (tmp_path / name / name).read_bytes() == b"x"


SIZES = {5: 5, "5": 5, "5B": 5, "5KB": 5000, "2.5 MB": 2_500_000, "5gb": 5 * 10**9, " 1TB ": 10**12, "1GiB": 2**30}


def test_sizes():
    assert [parse_size(text) for text in SIZES] == list(SIZES.values())


NONSENSE = ["", "GB", "5 XB", "-5GB", "0", "0GB", -1, 0, True, 5.5e300, "nan", "inf", "1e9", "5GB5", "٥GB", None]


@pytest.mark.parametrize("size", [*NONSENSE, "9" * 40, "0.0001KB"])
def test_size_refused(tmp_path, size):
    with pytest.raises(InputError, match=f"^max_shard_size: {re.escape(repr(size))[:40]}"):
        save(tmp_path / "out", {"w": torch.ones(1)}, size)
    assert not os.listdir(tmp_path)


def test_replaces_a_model_and_keeps_the_rest(tmp_path):
    out = tmp_path / "out"
    old = {"tokenizer.json": b"old", "generation_config.json": b"old"}
    save(out, {"w": torch.ones(3), "v": torch.ones(3)}, 12, **old)
    (out / "README.md").write_text("mine")
    (out / "pytorch_model.bin").write_bytes(b"stale")
    (out / "pytorch_model-00001-of-00002.bin").write_bytes(b"stale")
    (out / "step-1").mkdir()
    (out / "step-1" / "model.safetensors").write_text("not a weight of this folder")
    (out / "link").symlink_to("README.md")
    save(out, {"w": torch.zeros(3)}, **{"tokenizer.json": b"new"})
    assert sorted(os.listdir(out)) == [
        "README.md", "config.json", "generation_config.json", "link", "model.safetensors", "step-1", "tokenizer.json"
    ]  # fmt: skip
    assert (out / "tokenizer.json").read_text() == "new" and (out / "generation_config.json").read_text() == "old"
    assert os.readlink(out / "link") == "README.md" and (out / "README.md").read_text() == "mine"
    assert (out / "step-1/model.safetensors").read_text() == "not a weight of this folder"
    with Folder(out) as folder:
        assert folder.keys() == {"w"} and not folder.slice("w")[...].any()
    assert os.listdir(tmp_path) == ["out"]


def test_saves_into_the_folder_that_it_reads(tmp_path):
    out = tmp_path / "out"
    table = {f"w{i}": torch.randn(5) for i in range(4)}
    save(out, table, 20)
    with Folder(out) as folder:
        lazy = [Item(k, folder.shape(k), folder.dtype(k), lambda k=k: folder.slice(k)[...] + 1) for k in sorted(folder.keys())]
        save_folder(out, lazy, max_shard_size=40, extra_files={})
    with Folder(out) as folder:
        assert all(torch.equal(folder.slice(k)[...], v + 1) for k, v in table.items())


def test_targets(tmp_path):
    table = {"w": torch.ones(1)}
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", table)
    save(tmp_path / "a/b/c", table)
    (tmp_path / "link").symlink_to("a/b/c")
    save(tmp_path / "link", {"w": torch.zeros(1)})
    assert (tmp_path / "link").is_symlink()
    for name, number in (("empty", 1), ("a/b/c", 0)):
        with Folder(tmp_path / name) as folder:
            assert folder.slice("w")[...].item() == number


def test_a_cloned_repository_takes_a_model(tmp_path):
    """A new one of the hub has a README.md, and git's files, all of which stay; a folder with more may be no model's."""
    out = tmp_path / "out"
    (out / ".git/objects").mkdir(parents=True)
    mine = {name: name.encode() for name in (".git/HEAD", ".gitattributes", "README.md")}
    for name, data in mine.items():
        (out / name).write_bytes(data)
    save(out, {"w": torch.ones(1)})
    assert sorted(os.listdir(out)) == [".git", ".gitattributes", "README.md", "config.json", "model.safetensors"]
    assert {name: (out / name).read_bytes() for name in mine} == mine and (out / ".git/objects").is_dir()
    for name in ("config.json", "model.safetensors"):
        (out / name).unlink()
    (out / "photo.jpg").write_text("mine")
    with pytest.raises(InputError, match="a folder with other files and no config"):
        save(out, {"w": torch.ones(1)})


def make_file(folder):
    (folder / "out").write_text("a file")


def make_full(folder):
    (folder / "out").mkdir()
    (folder / "out/photo.jpg").write_text("mine")


def make_adapter(folder):
    (folder / "out").mkdir()
    for name in ("config.json", "adapter_config.json"):
        (folder / "out" / name).write_text("{}")


def lie(tensor):
    return {"items": [Item("w", (1,), torch.float32, lambda: tensor)]}


ok = [Item("w", (1,), torch.float32, lambda: torch.ones(1))]
lies = "torch.float32 (1,), as announced"
REFUSED = {
    "a file": (make_file, {}, "out: a file; a folder"),
    "a full folder": (make_full, {}, "out: a folder with other files and no config.json"),
    "an adapter": (make_adapter, {}, "out: an adapter's folder; an empty folder, a model's or a new name"),
    "parent is a file": (lambda f: (f / "deep").write_text(""), {"path": "deep/out"}, "deep/out: "),
    "no tensors": (None, {"items": []}, "out: 0 tensors to save"),
    "twice": (None, {"items": ok + ok}, "out: w: a name that is taken"),
    "reserved": (None, {"items": [ok[0]._replace(name="__metadata__")]}, "out: __metadata__: a name that is taken"),
    "bad name": (None, {"items": [ok[0]._replace(name="a\nb")]}, "'a\\nb': a control character"),
    "dtype": (None, {"items": [Item("w", (1,), torch.quint8, None)]}, "out: w: torch.quint8; one of torch.bool"),
    "rank": (None, {"items": [Item("w", (1,) * 9, torch.float32, None)]}, "out: w: shape (1, 1, 1, 1, 1, 1, 1, 1, 1)"),
    "wrong shape": (None, lie(torch.ones(2)), f"w: torch.float32 (2,) torch.strided; {lies}"),
    "wrong dtype": (None, lie(torch.ones(1).half()), f"w: torch.float16 (1,) torch.strided; {lies}"),
    "sparse": (None, lie(torch.ones(1).to_sparse()), f"w: torch.float32 (1,) torch.sparse_coo; {lies}"),
    "meta": (None, lie(torch.ones(1, device="meta")), "w: a meta tensor"),
    "extra path": (None, {"extra_files": {"../x": b""}}, "'../x': the name of an extra file"),
    "extra dots": (None, {"extra_files": {"..": b""}}, "'..': the name of an extra file"),
    "extra weight": (None, {"extra_files": {"model.safetensors": b""}}, "'model.safetensors': the name of an extra"),
    "space": (None, {"items": [Item("w", (10**15,), torch.float32, None)]}, "4000000 GB needed; free space or"),
    "too long": (None, {"path": "x" * 300}, "...: File name too long; nothing was changed"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_left(tmp_path, case):
    make, changed, found = REFUSED[case]
    if make:
        make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    options = {"path": "out", "items": ok, "extra_files": {"config.json": b"{}"}} | changed
    with pytest.raises(InputError) as error:
        save_folder(tmp_path / options.pop("path"), options.pop("items"), **options)
    text = str(error.value)
    assert text.startswith(str(tmp_path)) and found in text and "\n" not in text and len(text) <= LIMIT
    assert sorted(tmp_path.rglob("*")) == before


def test_current_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the current folder, or a mount point"):
        save(".", {"w": torch.ones(1)})


def boom():
    raise KeyboardInterrupt


@pytest.mark.parametrize("path", ["out", "new/deep/out"])
@pytest.mark.parametrize("how", ["read", "disk full", "fsync", "rename", "exchange", "interrupt"])
def test_failures_leave_the_old_model_and_no_temp(tmp_path, monkeypatch, how, path):
    save(tmp_path / "out", {"w": torch.ones(3)}, **{"a.txt": b"a"})
    before, tree = content(tmp_path / "out"), sorted(tmp_path.rglob("*"))
    table = [Item(f"w{n}", (n,), torch.float32, lambda n=n: torch.zeros(n)) for n in (3, 2**20)]
    expected: type[BaseException] = InputError

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    def full(fd, data, real=os.write):
        if len(data) < 5000:
            return real(fd, data)
        if len(data) < 2**21:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        if how == "read":
            table[1] = table[1]._replace(read=lambda: torch.zeros(0).max())
            expected = RuntimeError
        elif how == "interrupt":
            table[1] = table[1]._replace(read=boom)
            expected = KeyboardInterrupt
        elif how == "disk full":
            patch.setattr(os, "write", full)
        elif how == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(os, "rename", fail)
            patch.setattr(atomic, "_exchange", fail if how == "exchange" else lambda a, b: False)
        with pytest.raises(expected) as error:
            save_folder(tmp_path / path, table, extra_files={"config.json": b"{}"})
    if expected is InputError:
        reason = "No space left on device" if how == "disk full" else "Input/output error"
        assert str(error.value) == f"{tmp_path / path}: {reason}; nothing was changed"
    assert content(tmp_path / "out") == before and sorted(tmp_path.rglob("*")) == tree


def in_child(work):
    """Fork, run `work` there, and return its process id; the child never comes back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: torch has threads, the child needs none
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def test_a_file_size_limit(tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(tmp_path / "out", {"w": torch.zeros(100_000)})
        except InputError as error:
            assert "File too large; nothing was changed" in str(error)
            assert not os.listdir(tmp_path)
            return
        raise AssertionError("saved past the limit")

    assert os.waitpid(in_child(work), 0)[1] == 0


def test_short_writes(tmp_path, monkeypatch):
    table = {"w": torch.randn(50), "v": torch.randn(3).half()}
    save(tmp_path / "a", table)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:13]))
    save(tmp_path / "b", table)
    assert content(tmp_path / "a") == content(tmp_path / "b")


@pytest.mark.parametrize("exchange", [True, False])
def test_order_of_system_calls(tmp_path, monkeypatch, exchange):
    """Nothing is renamed before every byte and name under it is flushed, and the rename itself is flushed after."""
    save(tmp_path / "out", {"w": torch.ones(3)})
    calls, swap = [], atomic._exchange  # (call, last part of the path)

    def note(name):
        real = getattr(os, name)

        def call(first, *rest, **options):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else os.fspath(first)
            calls.append((name, os.path.basename(path)))
            return real(first, *rest, **options)

        monkeypatch.setattr(os, name, call)

    def noted_swap(a, b):
        calls.append(("exchange", a.name))
        return swap(a, b)

    for name in ("write", "fsync", "rename", "replace"):
        note(name)
    monkeypatch.setattr(atomic, "_exchange", noted_swap if exchange else lambda a, b: False)
    for target in ("out", "new"):
        calls.clear()
        save(tmp_path / target, {"w": torch.zeros(3)})
        turns = [i for i, (call, _) in enumerate(calls) if call in ("rename", "exchange")]
        written = {name for call, name in calls if call == "write"}
        flushed = [name for call, name in calls[: turns[0]] if call == "fsync"]
        assert written == {"model.safetensors", "config.json"} and "write" not in dict(calls[turns[0] :])
        assert written <= set(flushed) and flushed[-1].startswith(".tmp-")
        assert calls[-1] == ("fsync", tmp_path.name) and turns[-1] == len(calls) - 2
    calls.clear()
    atomic_write(tmp_path / "f", b"x")
    assert [call for call, _ in calls] == ["write", "fsync", "replace", "fsync"] and calls[-1][1] == tmp_path.name


def test_kill_9_leaves_one_whole_model(tmp_path):
    """A child saves version after version; killed at any moment, the folder is all of one version that it began."""
    out, draw = tmp_path / "out", random.Random(0)

    def save_version(version):
        table = [Item(f"w{i}", (50,), torch.int64, lambda: torch.full((50,), version)) for i in range(6)]
        save_folder(out, table, max_shard_size=800, extra_files={"config.json": b'{"version": %d}' % version})

    save_version(0)
    (out / "README.md").write_text("mine")
    version = 0
    for turn in range(40):
        reader, writer = os.pipe()

        def work(start=version + 1, writer=writer):
            for v in range(start, start + 1000):
                save_version(v)
                os.write(writer, v.to_bytes(4, "little"))

        child = in_child(work)
        os.close(writer)
        acknowledged = os.read(reader, 4) if turn % 2 else b""
        time.sleep(draw.uniform(0.001, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        while part := os.read(reader, 4096):
            acknowledged += part
        os.close(reader)
        said = int.from_bytes(acknowledged[-4:], "little") if acknowledged else version
        with Folder(out) as folder:
            found = {folder.slice(f"w{i}")[...].unique().item() for i in range(6)}
            assert folder.keys() == {f"w{i}" for i in range(6)} and found == {folder.config["version"]}
        assert said <= folder.config["version"] <= said + 1 and (out / "README.md").read_text() == "mine"
        version = folder.config["version"]
    assert version >= 20
    save_version(0)
    assert os.listdir(tmp_path) == ["out"]  # what the killed ones left was swept


def test_sweep_spares_a_living_save(tmp_path):
    with staging(tmp_path / "out") as mine:
        (mine / "x").write_text("")
        dead = tmp_path / ".tmp-out-00000000"
        dead.mkdir()
        other = tmp_path / ".tmp-output-00000000"
        other.mkdir()
        with staging(tmp_path / "out") as second:
            assert mine.exists() and second.exists() and not dead.exists() and other.exists()
        assert mine.exists() and not second.exists()
        commit_folder(mine, tmp_path / "out")
    assert (tmp_path / "out/x").exists() and sorted(os.listdir(tmp_path)) == [".tmp-output-00000000", "out"]


def test_commit_folder_never_overwrites(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x").write_text("old")
    refused = pytest.raises(InputError, match="out: Directory not empty; nothing was changed")
    with refused, staging(tmp_path / "out") as temp:
        (temp / "x").write_text("new")
        commit_folder(temp, tmp_path / "out")
    assert (tmp_path / "out/x").read_text() == "old" and os.listdir(tmp_path) == ["out"]


def test_without_renameat2(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    save(tmp_path / "out", {"w": torch.ones(3)}, **{"keep.txt": b"k"})
    save(tmp_path / "out", {"v": torch.ones(3)})
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "keep.txt", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("at", "left"), [(1, "w"), (2, "v"), (3, "v")])
def test_a_signal_between_two_renames_leaves_a_model(at, left, tmp_path, monkeypatch):
    """As Ctrl-C does it, whose exception comes behind what has been done: the old one, or the new."""
    save(tmp_path / "out", {"w": torch.ones(3)})
    real, calls = os.rename, []

    def rename(source, target):
        real(source, target)
        calls.append(source)
        if len(calls) == at:
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "out", {"v": torch.ones(3)})
    assert (tmp_path / "out").is_dir()
    with Folder(tmp_path / "out") as folder:
        assert folder.keys() == {left}


def test_without_hard_links(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    save(tmp_path / "out", {"w": torch.ones(3)}, **{"keep.txt": b"k"})
    save(tmp_path / "out", {"v": torch.ones(3)})
    assert (tmp_path / "out/keep.txt").read_bytes() == b"k"


def test_atomic_write(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    atomic_write(file, b'{"a": 1}')
    (tmp_path / "link").symlink_to("a.json")
    atomic_write(tmp_path / "link", memoryview(b'{"a": 2}'))
    assert read_json(file) == {"a": 2} and (tmp_path / "link").is_symlink()
    with pytest.raises(InputError, match="No such file or directory; nothing was changed"):
        atomic_write(tmp_path / "gone/a.json", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: Is a directory; nothing was changed"):
        atomic_write(tmp_path / "folder", b"")
    assert sorted(os.listdir(tmp_path)) == ["a.json", "folder", "link"]


def test_check_space(tmp_path):
    check_space(tmp_path / "not/yet/there", 1)
    with pytest.raises(InputError, match=r"there: .*B free, 1000000000 GB needed"):
        check_space(tmp_path / "there", 10**18)


def test_one_process_that_saves_alone_says_that_it_waits(tmp_path, monkeypatch):
    """As behind `if rank == 0`: the others never come to the first exchange."""
    told, here = Event(), []
    monkeypatch.setattr(whole, "PATIENCE", 0.0)
    monkeypatch.setattr(whole, "tell", lambda text: (here.append(text), told.set()))

    class Alone:
        def tell(self, text, device):
            assert told.wait(30) or text == "+", text

    whole.lead(Alone(), torch.device("cpu"), lambda temp, files: None, lambda write: write(tmp_path, {}))
    assert here == ["modelcenter: warning: save_pretrained waits for the other processes; each of them calls it"]
