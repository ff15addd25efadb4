"""A folder gives every part of every tensor as it was written, reads no more than that, and refuses the rest."""

import collections
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from modelcenter.checkpoint import files, match
from modelcenter.checkpoint import folder as folder_file
from modelcenter.checkpoint.exchange import position
from modelcenter.checkpoint.folder import DTYPES, BinSlice, Folder, raw, read_bin
from modelcenter.create import build, load
from modelcenter.errors import LIMIT, InputError, MissingError

BIN_A, BIN_B = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


def sample(dtype, shape=(3, 4)):
    """Random values of any dtype, by their bytes where torch cannot draw them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 60, (count,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes(raw(a.contiguous())) == bytes(raw(b.contiguous()))


def tensors():
    table = {f"t.{name}": sample(dtype) for name, dtype in DTYPES.items()}
    return table | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "cube": torch.randn(5, 4, 3, 2)}


def write(folder, layout, table):
    if layout == "single":
        save_file(table, folder / "model.safetensors", metadata={"format": "pt"})
    elif layout == "sharded":
        names = {k: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, k in enumerate(table)}
        for file in set(names.values()):
            save_file({k: v for k, v in table.items() if names[k] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    elif layout == "bin":
        torch.save(table, folder / "pytorch_model.bin")
    elif layout == "legacy bin":
        torch.save(table, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        names = {k: (BIN_A, BIN_B)[i % 2] for i, k in enumerate(table)}
        for file in (BIN_A, BIN_B):
            torch.save({k: v for k, v in table.items() if names[k] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


LAYOUTS = ["single", "sharded", "bin", "legacy bin", "sharded bin"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(tmp_path, layout):
    table = tensors()
    if layout == "legacy bin":  # dtypes of torch before 1.6
        old = ["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "C64"]
        table = {k: v for k, v in table.items() if v.dtype in [DTYPES[d] for d in old]}
    write(tmp_path, layout, table)
    with Folder(tmp_path) as folder:
        assert folder.keys() == table.keys() and len(folder) == len(table)
        for key, value in table.items():
            assert folder.shape(key) == tuple(value.shape) and folder.dtype(key) == value.dtype
            assert same(folder.slice(key)[...], value) and same(folder.slice(key)[()], value)
            assert os.path.dirname(folder.file(key)) == str(tmp_path) and os.path.exists(folder.file(key))
        part, cube = folder.slice("cube"), table["cube"]
        for index in (
            (slice(1, 3),), (slice(None), slice(1, 2)), (slice(0, 0),), (..., slice(1, 2)), slice(4, 99),
            (slice(2, 4), ..., slice(1)), (slice(-2, None), slice(3, 1), slice(None, -1)),
            (slice(1, 4), slice(1, 3), slice(2), slice(1)),
        ):  # fmt: skip
            got = part[index]
            assert same(got, cube[index]) and got.is_contiguous()
        got = part[...]
        got.zero_()  # what is handed out is the caller's own
        assert same(part[...], cube)
        for index in (0, (slice(0, 4, 2),), (slice(None),) * 5, None, (slice(None, None, -1),)):
            with pytest.raises(IndexError, match="slices of step 1 only"):
                part[index]
        with pytest.raises(InputError, match=re.escape(f"{tmp_path}: gone: no such tensor")):
            folder.slice("gone")


bounds = st.one_of(st.none(), st.integers(-6, 6))


@settings(max_examples=200)
@given(st.lists(st.builds(slice, bounds, bounds), max_size=4))
def test_slices_are_torch_slices(cube, index):
    folder, value = cube
    assert same(folder.slice("x")[tuple(index)], value[tuple(index)])


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    path, value = tmp_path_factory.mktemp("cube"), torch.randn(4, 3, 5, 2).bfloat16()
    save_file({"odd": torch.ones(3, dtype=torch.bool), "x": value}, path / "model.safetensors")
    with Folder(path) as folder:
        yield folder, value


def test_reads_only_the_bytes_asked_for(tmp_path, monkeypatch):
    value = torch.arange(64 * 32.0).reshape(64, 32)
    save_file({"w": value, "other": torch.ones(10_000)}, tmp_path / "model.safetensors")
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: calls.append(sum(map(len, parts))) or real(fd, parts, at))
    with Folder(tmp_path) as folder:
        assert not calls  # opening reads headers only
        assert same(folder.slice("w")[8:16], value[8:16]) and calls == [8 * 32 * 4]
        calls.clear()
        assert same(folder.slice("w")[...], value) and calls == [64 * 32 * 4]
        calls.clear()
        assert same(folder.slice("w")[:, 8:16], value[:, 8:16]) and calls == [8 * 4] * 64


def test_short_reads_and_a_file_cut_while_open(tmp_path, monkeypatch):
    value = torch.arange(1000.0)
    save_file({"w": value}, tmp_path / "model.safetensors")
    real = os.preadv
    with Folder(tmp_path) as folder:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda fd, parts, at: real(fd, [parts[0][:7]], at))
            assert same(folder.slice("w")[...], value)
        os.truncate(tmp_path / "model.safetensors", 1000)
        with pytest.raises(InputError, match=r"model.safetensors: w: the file ends at byte 1000"):
            folder.slice("w")[...]


def test_names_data_that_is_not_aligned(tmp_path):
    """Writers before the format aligned headers and sorted by dtype."""
    table = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    table["b"] = {"dtype": "F64", "shape": [2], "data_offsets": [1, 17]}
    text, value = json.dumps(table).encode(), torch.tensor([1.5, -2.0], dtype=torch.float64)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\7" + bytes(raw(value)))
    with Folder(tmp_path) as folder:
        assert same(folder.slice("b")[...], value) and folder.slice("a")[...].item() == 7


def test_safetensors_wins(tmp_path):
    for layout, number in (("sharded bin", 4), ("bin", 3), ("sharded", 2), ("single", 1)):
        write(tmp_path, layout, {"w": torch.tensor([number]), "v": torch.tensor([number])})
        with Folder(tmp_path) as folder:
            assert folder.slice("w")[...].item() == number


@pytest.mark.parametrize("layout", ["sharded", "single"])
def test_a_save_that_takes_the_folders_place_is_read_whole(tmp_path, monkeypatch, layout):
    """One whose second file has the old one's header, and one whose files are others than the old index lists."""
    for name, kind, number in (("new", layout, 1), ("now", "sharded", 0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, kind, {"w": torch.tensor([number]), "v": torch.tensor([number])})
        (tmp_path / name / "config.json").write_text(json.dumps({"number": number}))
    before = len(os.listdir("/proc/self/fd"))
    module, reader = (folder_file, "open_regular") if layout == "sharded" else (files, "read_header")
    read = getattr(module, reader)

    def swapped(path):
        found = read(path)
        if (tmp_path / "new").exists():
            (tmp_path / "now").rename(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "now")
        return found

    monkeypatch.setattr(module, reader, swapped)
    with Folder(tmp_path / "now") as folder:
        assert [folder.slice(name)[...].item() for name in "wv"] == [1, 1] and folder.config == {"number": 1}
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_is_left_open(tmp_path):
    write(tmp_path, "sharded", {"w": torch.ones(2), "v": torch.ones(3)})
    before = len(os.listdir("/proc/self/fd"))
    with Folder(tmp_path) as folder:
        assert len(os.listdir("/proc/self/fd")) == before + 2
        folder.slice("w")[...]
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"GGUF")
    with pytest.raises(InputError):
        Folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_bin_views_and_aliases(tmp_path):
    base = torch.randn(4, 6)
    table = collections.OrderedDict(w=torch.nn.Parameter(base), t=base.t(), row=base[1], tied=base)
    torch.save(table, tmp_path / "pytorch_model.bin")
    with Folder(tmp_path) as folder:
        for key, value in table.items():
            got = folder.slice(key)[...]
            assert same(got, value.detach()) and not got.requires_grad and got.is_contiguous()


@pytest.mark.parametrize("modern", [True, False])
def test_tensors_of_a_bin_are_in_the_order_of_the_file(tmp_path, modern):
    """Whatever addresses they have: those of a file of an old torch, which is read, differ from rank to rank."""
    names = [f"w{(7 * i) % 20}" for i in range(20)]
    table = {name: torch.randn(1 + 3000 * (i % 5)) for i, name in enumerate(names)}
    torch.save(table, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=modern)
    with Folder(tmp_path) as folder:
        assert sorted(names, key=lambda name: position(folder.slice(name))) == names


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def test_tied_weights_of_a_bin_are_the_same_unread(tmp_path, monkeypatch):
    value = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": value, "tied": value, "copy": value.clone(), "other": value + 1}, tmp_path / "pytorch_model.bin")
    with Folder(tmp_path) as folder:
        a, tied, copy, other = (folder.slice(name) for name in ("a", "tied", "copy", "other"))
        assert match.same(a, copy) and not match.same(a, other)
        square = torch.arange(9.0).view(3, 3)
        assert not match.same(BinSlice(square, tmp_path, 0), BinSlice(square.t(), tmp_path, 1))  # one storage, read in two ways
        monkeypatch.setattr(BinSlice, "__getitem__", lambda *_: pytest.fail("read"))
        assert match.same(a, tied)


def recompressed(path):
    torch.save({"w": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as old:
        entries = {item: old.read(item) for item in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in entries.items():
            new.writestr(name, data)


def cut(path):
    torch.save({"w": torch.zeros(1000)}, path)
    os.truncate(path, 2000)


def cut_legacy(path):
    torch.save({"w": torch.zeros(1000)}, path, _use_new_zipfile_serialization=False)
    os.truncate(path, 2000)


BINS = {
    "runs code": (lambda p: torch.save({"w": Evil()}, p), "as tensors only (unsupported GLOBAL posix.mkdir"),
    "runs code, legacy": (
        lambda p: torch.save({"w": Evil()}, p, _use_new_zipfile_serialization=False), "not readable as tensors only"
    ),
    "bare pickle": (lambda p: p.write_bytes(pickle.dumps({"w": Evil()})), "not readable as tensors only"),
    "a list": (lambda p: torch.save([torch.ones(1)], p), "list '[tensor([1.])]'; a table of tensors"),
    "a tensor": (lambda p: torch.save(torch.ones(1), p), "; a table of tensors"),
    "no entries": (lambda p: torch.save({}, p), "dict '{}'; a table of tensors"),
    "nested": (lambda p: torch.save({"state_dict": {"w": torch.ones(1)}}, p), "state_dict: a dict; tensors only"),
    "a number": (lambda p: torch.save({"w": torch.ones(1), "epoch": 3}, p), "epoch: a int; tensors only"),
    "number as name": (lambda p: torch.save({3: torch.ones(1)}, p), "3: a name that is not a string"),
    "bad name": (lambda p: torch.save({"a\nb": torch.ones(1)}, p), "a control character in a name"),
    "sparse": (lambda p: torch.save({"w": torch.ones(2, 2).to_sparse()}, p), "w: a torch.sparse_coo tensor"),
    "expanded": (lambda p: torch.save({"w": torch.ones(1).expand(10**9)}, p), "w: shape (1000000000,) from 4 bytes"),
    "compressed": (recompressed, "compressed entries"),
    "cut": (cut, "bin: cut off, at 2000 bytes, or damaged; the whole file: fetch it, or save it, again"),
    "cut, legacy": (cut_legacy, "bin: cut off, at 2000 bytes, or damaged; the whole file"),
    "empty file": (lambda p: p.write_bytes(b""), "bin: cut off, at 0 bytes, or damaged; the whole file"),
    "text": (lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "a git-lfs pointer"),
    "HTML": (lambda p: p.write_bytes(b"<html></html>"), "an HTML or XML page"),
    "meta": (lambda p: torch.save({"w": torch.ones(2, device="meta")}, p), "w: a torch.strided tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BINS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, while the file is made
def test_bin_refused(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    make, found = BINS[case]
    file = tmp_path / "pytorch_model.bin"
    make(file)
    with pytest.raises(InputError) as error:
        Folder(tmp_path)
    text = str(error.value)
    assert text.startswith(f"{file}: ") and found in text and "\n" not in text and len(text) <= LIMIT
    assert os.listdir(tmp_path) == ["pytorch_model.bin"]


@settings(max_examples=60)
@given(st.booleans(), st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=3))
def test_broken_bin_is_refused_or_read(tmp_path, legacy, mutations):
    file = tmp_path / "x.bin"
    torch.save({"w": torch.ones(2, 3), "b": torch.zeros(3)}, file, _use_new_zipfile_serialization=not legacy)
    data = bytearray(file.read_bytes())
    for place, value in mutations:
        data[int(place * len(data))] = value
    file.write_bytes(data)
    try:
        table = read_bin(file)
    except InputError:
        return
    assert all(isinstance(v, torch.Tensor) and v.clone().numel() <= len(data) for v in table.values())


def spoil_lacking(folder):
    torch.save({"c": torch.ones(1)}, folder / BIN_B)


def spoil_twice(folder):
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, folder / BIN_B)


def spoil_unlisted(folder):
    torch.save({"b": torch.ones(1), "c": torch.ones(1)}, folder / BIN_B)


SHARDED_BINS = {
    "missing": (lambda f: (f / BIN_B).unlink(), f"{BIN_B}: no such file"),
    "lacks a tensor": (spoil_lacking, f"{BIN_B}: b: no such tensor, though pytorch_model.bin.index"),
    "held twice": (spoil_twice, f"{BIN_B}: a: held here and in {BIN_A}"),
    "unlisted tensor": (spoil_unlisted, f"{BIN_B}: c: a tensor that pytorch_model.bin.index.json does not list"),
    "unlisted shard": (
        lambda f: torch.save({}, f / "pytorch_model-00003-of-00003.bin"), "model-00003-of-00003.bin: a file that"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARDED_BINS)
def test_sharded_bin_refused(tmp_path, case):
    write(tmp_path, "sharded bin", {"a": torch.ones(1), "b": torch.ones(1)})
    spoil, found = SHARDED_BINS[case]
    spoil(tmp_path)
    with pytest.raises(InputError) as error:
        Folder(tmp_path)
    assert str(error.value).startswith(str(tmp_path)) and found in str(error.value)


CONFIGS = {
    "quantised": ('{"quantization_config": {"bits": 4}}', "quantization_config: a quantised save"),
    "code": ('{"auto_map": {"AutoModel": "x.Y"}}', "auto_map: a model with code of its own"),
    "list": ("[]", "a list; a JSON object"),
    "broken": ("{", "line 1 column 2"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config_refused(tmp_path, case):
    text, found = CONFIGS[case]
    write(tmp_path, "single", {"w": torch.ones(1)})
    (tmp_path / "config.json").write_text(text)
    with Folder(tmp_path) as folder, pytest.raises(InputError) as error:
        folder.config  # noqa: B018
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: {found}")


def test_config(tmp_path):
    write(tmp_path, "single", {"w": torch.ones(1)})
    with Folder(tmp_path) as folder, pytest.raises(MissingError, match=r"config.json: no such file"):
        folder.config  # noqa: B018
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "quantization_config": null}')
    with Folder(tmp_path) as folder:
        assert folder.config["model_type"] == "gpt2"


def test_folder_refused(tmp_path):
    with pytest.raises(MissingError, match=r"gone: no such folder"):
        Folder(tmp_path / "gone")
    with pytest.raises(MissingError, match=r": no weights; model.safetensors or"):
        Folder(tmp_path)
    (tmp_path / "tf_model.h5").write_bytes(b"")
    with pytest.raises(MissingError, match=r": no weights, only tf_model.h5; model.safetensors or"):
        Folder(tmp_path)
    (tmp_path / "pytorch_model.pt").write_bytes(b"")
    with pytest.raises(MissingError, match=r"pytorch_model.pt: weights of OpenBMB's ModelCenter; examples/from_modelcenter.py"):
        Folder(tmp_path)
    (tmp_path / "pytorch_model.pt").unlink()
    header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    with pytest.raises(InputError, match=r"model.safetensors: w: dtype F4; one of BOOL"):
        Folder(tmp_path)


def test_the_folder_of_trainer_says_which_model_is_its_newest(tmp_path):
    for name in ("900", "1000", "1500", "last"):
        (tmp_path / f"checkpoint-{name}").mkdir()
        if name != "1500":
            (tmp_path / f"checkpoint-{name}" / "config.json").write_text("{}")
    with pytest.raises(MissingError, match=r": no weights; the newest model that Trainer has left there is \S+/checkpoint-1000$"):
        Folder(tmp_path)
    (tmp_path / "checkpoint-1500" / "adapter_config.json").write_text("{}")  # of peft's
    with pytest.raises(MissingError, match=r": no weights; the newest model that Trainer has left there is \S+/checkpoint-1500$"):
        Folder(tmp_path)


def test_the_folder_of_several_adapters_says_where_they_are(tmp_path):
    for name in ("german", "english", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("notes.txt" if name == "other" else "adapter_config.json")).write_text("{}")
    with pytest.raises(MissingError, match=r": no weights; the adapters there have folders of their own: english, german$"):
        Folder(tmp_path)


def test_weights_without_a_config(tmp_path):
    write(tmp_path, "single", {"w": torch.ones(1)})
    with Folder(tmp_path) as folder, pytest.raises(MissingError, match=r"config.json: no such file; the model's config.json"):
        folder.config  # noqa: B018


def test_a_training_state_is_no_model(tmp_path):
    write(tmp_path, "single", {"w": torch.ones(1)})
    (tmp_path / "manifest.json").write_text("{}")
    with Folder(tmp_path) as folder, pytest.raises(MissingError, match=r"state, and no model; modelcenter convert \S+ OUT"):
        folder.config  # noqa: B018


def test_the_folder_of_a_run_says_where_its_model_is(tmp_path):
    for name in ("config.json", "adapter_config.json"):
        run = tmp_path / f"run-{name}"
        (run / "model").mkdir(parents=True)
        (run / "model" / name).write_text("{}")
        with pytest.raises(MissingError, match=r": no weights; what was trained there is .*run-.*model$"):
            Folder(run)


@pytest.mark.parametrize("make", [load, build], ids=["load", "build"])
def test_a_home_that_nobody_has_is_no_folder(make: Callable[[str], object]) -> None:
    with pytest.raises(InputError, match=r"~nobody-of-that-name/x.*a preset"):
        make("~nobody-of-that-name/x")


def test_a_folder_in_ones_home_is_written_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 50, "positions": 8}).save_pretrained("~/model")
    assert load("~/model").source == str(tmp_path / "model")
