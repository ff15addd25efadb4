"""Every way in which a header, an index or a folder can be wrong is one refused row, and nothing else ever escapes."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from effort import at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from modelcenter.checkpoint.files import find_weights, read_index
from modelcenter.checkpoint.header import Entry, read_header
from modelcenter.checkpoint.regular import check_inside, open_regular
from modelcenter.checkpoint.strict_json import read_json
from modelcenter.errors import LIMIT, InputError, MissingError


def pack(table, data=b"", length=None):
    """A safetensors file: `table` as JSON (or as the bytes given), then `data`."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype="F32", shape=(1,), offsets=(0, 4), **more):
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}


def named(name):
    return {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}


def pair(first, second):
    return {k: {"dtype": "U8", "shape": [o[1] - o[0]], "data_offsets": o} for k, o in (("a", first), ("b", second))}


four = bytes(4)
EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HEADERS = {
    "empty": (b"", "byte 0: a file of 0 bytes"),
    "seven bytes": (b"\1" * 7, "byte 0: a file of 7 bytes"),
    "length zero": (bytes(16), "byte 0: a header of 0 bytes"),
    "length beyond the file": (pack({}, length=99), "byte 0: a header of 99 bytes in a file of 10"),
    "length over the limit": (pack(b"{}" + b" " * 2**24), "byte 0: a header of 16777218 bytes; 1 to 16777216"),
    "length of 2**64 - 1": (pack({}, length=2**64 - 1), "byte 0: a header of 18446744073709551615 bytes"),
    "not UTF-8": (pack(b'{"\xff":1}'), "byte 2: 0xff, not UTF-8"),
    "not JSON": (pack(b'{"a" 1}'), "line 1 column 6: Expecting ':' delimiter"),
    "a list": (pack(b"[]"), "byte 8: a header that begins with b'[]'"),
    "leading space": (pack(b" {}"), "byte 8: a header that begins with b' {}'"),
    "byte-order mark": (pack(b"\xef\xbb\xbf{}"), "byte 8"),
    "two values": (pack(b"{}{}"), "line 1 column 3: Extra data"),
    "deep": (pack(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "duplicate tensor": (pack(b'{"a":%s,"a":1}' % EMPTY), "a: a duplicate key"),
    "duplicate field": (pack(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "dtype: a duplicate key"),
    "NaN": (pack(b'{"a":NaN}'), "the number NaN"),
    "digits": (pack(b'{"a":' + b"1" * 5000 + b"}"), "an integer of thousands of digits"),
    "unknown field": (pack(one(extra=1), four), "a: {'dtype': 'F32'"),
    "missing field": (pack({"a": {"dtype": "F32", "shape": [1]}}, four), "a: {'dtype': 'F32'"),
    "entry is a list": (pack({"a": [1, 2, 3]}), "a: [1, 2, 3]; dtype, shape and data_offsets"),
    "metadata is a list": (pack({"__metadata__": []}), "__metadata__: not a table of strings"),
    "metadata holds a number": (pack({"__metadata__": {"a": 1}}), "__metadata__: not a table of strings"),
    "unknown dtype": (pack(one("F33"), four), "a: dtype 'F33'; one of BOOL"),
    "dtype is a list": (pack(one(["F32"]), four), "a: dtype ['F32']"),
    "negative dimension": (pack(one(shape=[-1]), four), "a: shape [-1]; whole numbers"),
    "float dimension": (pack(one(shape=[1.0]), four), "a: shape [1.0]; whole numbers"),
    "bool dimension": (pack(one(shape=[True]), four), "a: shape [True]; whole numbers"),
    "string dimension": (pack(one(shape=["1"]), four), "a: shape ['1']; whole numbers"),
    "minus zero": (pack(b'{"a":%s}' % EMPTY.replace(b"[0]", b"[-0]")), "a: shape [-0.0]; whole numbers"),
    "minus zero offset": (pack(b'{"a":%s}' % EMPTY.replace(b"[0,", b"[-0,")), "a: data_offsets [-0.0, 0]; two whole"),
    "shape is a number": (pack(one(shape=1), four), "a: shape 1; a list"),
    "shape is null": (pack(one(shape=None), four), "a: shape None; a list"),
    "overflow": (pack(one(shape=[2**32, 2**32]), four), "a: shape [4294967296, 4294967296]; a size that fits"),
    "overflow, then zero": (pack(one(shape=[2**40, 2**40, 0], offsets=[0, 0])), "a size that fits 64 bits"),
    "zero, then overflow": (pack(one(shape=[0, 2**70], offsets=[0, 0])), "a size that fits 64 bits"),
    "rank 9": (pack(one(shape=[1] * 9), four), "a: shape [1, 1, 1, 1, 1, 1, 1, 1, 1]; a list of at most 8 sizes"),
    "too few bytes": (pack(one(shape=[2]), four), "a: 4 bytes; 8 bytes for F32 [2]"),
    "half a byte": (pack(one("F4", [1], [0, 0])), "a: 0 bytes; 0.5 bytes for F4 [1]"),
    "offsets of one": (pack(one(offsets=[0]), four), "a: data_offsets [0]; two whole numbers"),
    "offsets of floats": (pack(one(offsets=[0.0, 4.0]), four), "a: data_offsets [0.0, 4.0]; two whole numbers"),
    "offsets of bools": (pack(one("U8", offsets=[False, True]), b"1"), "a: data_offsets [False, True]"),
    "offset negative": (pack(one(offsets=[-4, 0]), four), "a: data_offsets [-4, 0]; 0 <= begin <= end"),
    "reversed": (pack(one(offsets=[4, 0]), four), "a: data_offsets [4, 0]; 0 <= begin <= end"),
    "beyond the end": (pack(one(offsets=[4, 8]), four), "a: data_offsets [4, 8]; the whole file; it holds 4 bytes"),
    "truncated": (pack(one(shape=[2], offsets=[0, 8]), four), "a: data_offsets [0, 8]; the whole file"),
    "hole": (pack(pair([0, 1], [2, 4]), four), "b: a hole before byte"),
    "hole at the start": (pack(pair([1, 2], [2, 4]), four), "a: a hole before byte"),
    "overlap": (pack(pair([0, 3], [2, 4]), four), "b: an overlap before byte"),
    "same bytes twice": (pack(pair([0, 4], [0, 4]), four), "b: an overlap before byte"),
    "trailing data": (pack(one(), bytes(9)), ": 5 bytes after the last tensor; the end of the file"),
    "data without tensors": (pack({}, b"x"), "byte 10: 1 bytes after the last tensor"),
    "name empty": (pack(named(""), four), "'': an empty tensor name"),
    "name of 513 bytes": (pack(named("é" * 256 + "e"), four), "a name of 513 bytes; at most 512"),
    "name with newline": (pack(named("a\nb"), four), "'a\\nb': a control character"),
    "name with escape": (pack(named("a\x1b[2J"), four), "a control character"),
    "name with C1 control": (pack(named("a\x9b2J"), four), "a control character"),
    "name with ..": (pack(named("a/../b"), four), "a/../b: a name that looks like a path"),
    "name from the root": (pack(named("/etc"), four), "/etc: a name that looks like a path"),
    "name with half a pair": (pack(b'{"\\ud800":%s}' % EMPTY), "half of a surrogate"),
    "200,001 tensors": (pack(dict.fromkeys(map(str, range(200_001)))), "200001 tensors; at most 200000"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "byte 0: a git-lfs pointer; "),
    "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "byte 0: an HTML or XML page"),
    "zip": (b"PK\x03\x04" + bytes(90), "byte 0: a zip file, probably a PyTorch .bin"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(50), "byte 0: a Python pickle"),
    "gzip": (b"\x1f\x8b\x08\x00" + b"\1" * 40, "byte 0: a gzip file"),
    "GGUF": (b"GGUF\x03\0\0\0" + b"\1" * 40, "byte 0: a GGUF file"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "byte 0: an HDF5 file"),
    "JSON": (b'{"metadata": {}}', "byte 0: a JSON text"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_refused(tmp_path, case):
    content, found = HEADERS[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError) as error, at_most(10_000):  # 479 on Python 3.11
        read_header(file)
    text = str(error.value)
    assert text.startswith(f"{file}: ") and found in text and "; " in text
    assert "\n" not in text and "\x1b" not in text and len(text) <= LIMIT


def test_header_accepted(tmp_path):
    file = tmp_path / "model.safetensors"
    tensors = {"s": torch.tensor(2.0), "z": torch.zeros(3, 0).double(), "m": torch.ones(2, 3).bfloat16()}
    save_file(tensors | {"é": torch.ones(1)}, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"} and header.size == 12 + 4 + 4
    assert {k: (e.dtype, e.shape) for k, e in header.tensors.items()} == {
        "s": ("F32", ()), "z": ("F64", (3, 0)), "m": ("BF16", (2, 3)), "é": ("F32", (1,))
    }  # fmt: skip
    data = file.read_bytes()
    assert data[header.tensors["s"].start : header.tensors["s"].stop] == struct.pack("<f", 2.0)
    assert list(header.tensors) == sorted(header.tensors, key=lambda k: header.tensors[k][2:])
    file.write_bytes(pack(b"{}   "))  # no tensors, padded: legal
    assert not read_header(file).tensors
    file.write_bytes(pack(pair([2, 4], [0, 2]), four))  # data in another order than the names: legal
    end = file.stat().st_size
    assert read_header(file).tensors == {"b": Entry("U8", (2,), end - 4, end - 2), "a": Entry("U8", (2,), end - 2, end)}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    file = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    tensors = {"w": torch.ones(2, 3), "b": torch.zeros(3, dtype=torch.int8), "s": torch.tensor(1.0)}
    save_file(tensors | {"z": torch.zeros(0, 2)}, file, metadata={"format": "pt"})
    return file, file.read_bytes()


places, verbs = st.floats(0, 1, exclude_max=True), st.sampled_from(["set", "cut", "insert"])


@settings(max_examples=600)
@given(st.lists(st.tuples(places, verbs, st.binary(min_size=1, max_size=3)), min_size=1, max_size=4))
def test_header_agrees_with_safetensors(fuzzed, mutations):
    """Mutated bytes: either refused, or read exactly as safetensors reads them; no other exception."""
    file, data = fuzzed
    for place, how, chunk in mutations:
        at = int(place * len(data))
        if how == "set":
            data = data[:at] + chunk + data[at + len(chunk) :]
        else:
            data = data[:at] + (chunk if how == "insert" else b"") + data[at + (how == "cut") :]
    file.write_bytes(data)
    try:
        header = read_header(file)
    except InputError as error:
        assert len(str(error)) <= LIMIT
        return
    with safe_open(file, "pt") as peer:
        assert set(peer.keys()) == set(header.tensors)
        assert (peer.metadata() or {}) == header.metadata
        for name, entry in header.tensors.items():
            part = peer.get_slice(name)
            assert (part.get_shape(), part.get_dtype()) == (list(entry.shape), entry.dtype)


VALUES = (
    *("-0", "0", "1", "1e0", "1.0", "01", "+1", "true", "null", "{}", '"F16"', '"I32"', '"f32"', '"\\ud800"', "[]"),
    *("[0]", '"\\u0046\\u0033\\u0032"', "[6]", "[3,2]", "[2,3]", "[02,3]", "[2,-3]", "[-0,3]", "[2,3,1]"),
    *("[6,1,1,1]", "[2,3.0]", "[2,3e0]", "[0,24]", "[4,28]", "[-0,24]", "[0,24,0]", "[18446744073709551616,0]"),
)


@pytest.mark.parametrize("field", ["shape", "data_offsets", "dtype", "name"])
@pytest.mark.parametrize("value", VALUES)
def test_header_values_agree_with_safetensors(fuzzed, field, value):
    """As above, with mutations that stay close to JSON."""
    value = value.encode()
    file, data = fuzzed
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    at = text.index(b'"w":')
    pattern = rb'"w"' if field == "name" else rb'(?<="%s":)("\w+"|\[[\d,]*\])' % field.encode()
    new = text[:at] + re.sub(pattern, lambda _: value, text[at:], count=1)
    assert new != text or value in text
    file.write_bytes(pack(new, data[8 + len(text) :]))
    try:
        header = read_header(file)
    except InputError:
        return
    with safe_open(file, "pt") as peer:
        assert {n: (peer.get_slice(n).get_shape(), peer.get_slice(n).get_dtype()) for n in peer.keys()} == {  # noqa: SIM118
            n: (list(e.shape), e.dtype) for n, e in header.tensors.items()
        }


JSONS = {
    "NaN": (b'{"a": NaN}', "the number NaN"),
    "infinity": (b'{"a": -Infinity}', "the number -Infinity"),
    "overflow": (b'{"a": 1e999}', "the number 1e999"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "an integer of thousands of digits"),
    "duplicate": (b'{"a": {"b": 1, "c": 2, "b": 1}}', "b: a duplicate key"),
    "duplicate behind many": (b'{"a": {%s"0": 1}}' % b"".join(b'"%d":1,' % i for i in range(400_000)), "0: a duplicate key"),
    "not UTF-8": (b'{"a": "\xe9"}', "byte 7: 0xe9, not UTF-8"),
    "mark": (b"\xef\xbb\xbf{}", "byte-order mark"),
    "cut": (b'{"a": [1,\n 2', "line 2 column 3: Expecting ',' delimiter"),
    "empty": (b"", "line 1 column 1: Expecting value"),
    "deep": (b"[" * 40 + b"]" * 40, "nested too deeply; at most 32 levels"),
    "very deep": (b'{"a":' * 100_000, "nested too deeply"),
    "half a pair": (b'{"a": "\\udfff"}', "half of a surrogate pair"),
    "large": (b'{"a": "' + b"x" * 1000 + b'"}', "1009 bytes; at most 1000"),
}


@pytest.mark.parametrize("case", JSONS)
def test_json_refused(tmp_path, case):
    content, found = JSONS[case]
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_json(file, **({"limit": 1000} if case == "large" else {}))
    text = str(error.value).replace("(byte-order mark)", "")
    if case == "mark":
        assert "BOM" in text
    else:
        assert text.startswith(f"{file}: ") and found in text and len(text) <= LIMIT


def test_json_accepted(tmp_path):
    file = tmp_path / "config.json"
    text = '{"a": [1, 2.5, null, true, "é \\ud83d\\ude00"], "b": ' + "[" * 31 + "]" * 31 + "}"
    file.write_text(text, encoding="utf-8")
    value = read_json(file)
    assert value["a"] == [1, 2.5, None, True, "é 😀"] and type(value["a"][0]) is int


def fifo(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is at most 108 bytes
        s.bind(path.name)
        os.chdir(here)


SPECIAL = {
    "folder": (lambda p: p.mkdir(), "a folder"),
    "FIFO": (fifo, "a FIFO"),
    "socket": (unix_socket, None),
    "device": (lambda p: p.symlink_to("/dev/zero"), "a device"),
    "link to nothing": (lambda p: p.symlink_to("gone"), "a link to nothing"),
    "loop": (lambda p: p.symlink_to(p.name), "loop|levels of symbolic"),
    "link out": (lambda p: p.symlink_to("../outside"), "a link out of its folder, to .*outside"),
    "absolute link out": (lambda p: p.symlink_to("/etc/passwd"), "a link out of its folder, to /etc/passwd"),
    "missing": (lambda p: None, "no such file"),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_files_refused(tmp_path, case):
    make, found = SPECIAL[case]
    (tmp_path / "outside").write_bytes(pack({}))
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "model.safetensors"
    make(file)
    with pytest.raises(InputError, match=f"^{re.escape(str(file))}: .*{found or 'socket'}"):
        check_inside(file)
    if "out" not in case:
        with pytest.raises(InputError, match=f"^{re.escape(str(file))}: "):  # and at once: a FIFO is not waited on
            open_regular(file)
    if case == "missing":
        with pytest.raises(MissingError):
            find_weights(file.parent)
    else:
        with pytest.raises(InputError):
            find_weights(file.parent)


def test_a_folder_that_may_not_be_read_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: os.fspath(path) != str(tmp_path))
    with pytest.raises(InputError, match="a folder that may not be read; chmod u"):
        find_weights(tmp_path)



def test_links_of_the_hub_cache_are_fine(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(pack({}))
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert find_weights(snapshot).name == "model.safetensors"
    (tmp_path / "alias").symlink_to(snapshot)  # the folder itself may be a link
    assert find_weights(tmp_path / "alias").name == "model.safetensors"
    (snapshot / "inside.json").symlink_to("model.safetensors")
    check_inside(snapshot / "inside.json")
    (tmp_path / "models--a--b/secret").write_bytes(b"")
    (snapshot / "config.json").symlink_to("../../secret")  # beside the blobs is not in them
    with pytest.raises(InputError, match=r"config.json: a link out of its folder"):
        check_inside(snapshot / "config.json")


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / A)
    save_file({"b": torch.ones(3)}, tmp_path / B)
    write_index(tmp_path, {"a": A, "b": B})
    return tmp_path


def write_index(folder, weight_map, **more):
    content = {"metadata": {"total_size": 20}, "weight_map": weight_map, **more}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def missing_shard(folder):
    (folder / B).unlink()


def unlisted_shard(folder):
    save_file({"c": torch.ones(1)}, folder / "model-00003-of-00003.safetensors")


def both_hold(folder):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / A)


def link_out(folder):
    (folder / B).rename(folder.parent / "elsewhere")
    (folder / B).symlink_to("../elsewhere")


def shard_is_folder(folder):
    (folder / B).unlink()
    (folder / B).mkdir()


def shard_is_fifo(folder):
    (folder / B).unlink()
    os.mkfifo(folder / B)


def names(file):
    return lambda folder: write_index(folder, {"a": A, "b": file})


INDEXES = {
    "up": (names("../" + B), "index.json: b: the file name '../"),
    "dots": (names("a..safetensors"), "index.json: b: the file name"),
    "root": (names("/etc/passwd"), "index.json: b: the file name '/etc/passwd'"),
    "slash": (names("sub/" + B), "index.json: b: the file name 'sub/"),
    "backslash": (names("sub\\" + B), "index.json: b: the file name 'sub"),
    "NUL": (names("a\0.safetensors"), "index.json: b: the file name 'a"),
    "newline": (names(B + "\n"), "index.json: b: the file name"),
    "percent": (names("%2e%2e%2fa.safetensors"), "index.json: b: the file name '%2e"),
    "hidden": (names(".safetensors"), "index.json: b: the file name '.safetensors'"),
    "number": (names(3), "index.json: b: the file name 3"),
    "null": (names(None), "index.json: b: the file name None"),
    "empty name": (names(""), "index.json: b: the file name ''"),
    "pickle": (names("b.bin"), "index.json: b: the file name 'b.bin'; a name that ends in .safetensors"),
    "tensor name": (lambda f: write_index(f, {"a": A, "../b": B}), "index.json: ../b: a name that looks like a path"),
    "missing shard": (missing_shard, f"{B}: no such file"),
    "unlisted shard": (unlisted_shard, "model-00003-of-00003.safetensors: a file that model.saf"),
    "lacks a tensor": (lambda f: write_index(f, {"a": A, "b": B, "c": B}), f"{B}: c: no such tensor, though"),
    "wrong shard": (lambda f: write_index(f, {"a": B, "b": B}), f"{A}: a file that model.safetensors.index.json"),
    "unlisted tensor": (lambda f: save_file({"b": torch.ones(3), "c": torch.ones(1)}, f / B), f"{B}: c: a tensor that"),
    "held twice": (both_hold, f"{A}: b: held here and in {B}"),
    "link out": (link_out, f"{B}: a link out of its folder"),
    "folder": (shard_is_folder, f"{B}: a folder; a regular file"),
    "FIFO": (shard_is_fifo, f"{B}: a FIFO; a regular file"),
    "no map": (lambda f: write_index(f, {}), "index.json: weight_map: absent or empty"),
    "map is a list": (lambda f: write_index(f, [A]), "index.json: weight_map: absent or empty"),
    "index is a list": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "weight_map: absent or empty"),
    "key twice": (
        lambda f: (f / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{A}", "a": "{B}"}}}}'),
        "index.json: a: a duplicate key",
    ),
    "broken shard": (lambda f: (f / B).write_bytes(b"GGUF" + bytes(60)), f"{B}: byte 0: a GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_index_refused(sharded, case):
    spoil, found = INDEXES[case]
    spoil(sharded)
    with pytest.raises(InputError) as error:
        read_index(sharded / "model.safetensors.index.json")
    text = str(error.value)
    assert text.startswith(str(sharded)) and found in text and "\n" not in text and len(text) <= LIMIT


def test_index_accepted(sharded):
    index = read_index(sharded / "model.safetensors.index.json")
    assert index.weight_map == {"a": A, "b": B} and index.headers[B].tensors["b"].shape == (3,)
    (sharded / "consolidated.safetensors").write_bytes(b"some other tool's file")
    write_index(sharded, {"a": A, "b": B}, metadata={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_index(sharded / "model.safetensors.index.json").headers.keys() == {A, B}
    write_index(sharded, {"a": A, "b": B}, metadata={"total_size": 21})
    with pytest.warns(UserWarning, match="total_size: 21; the tensors hold 20 bytes"):
        read_index(sharded / "model.safetensors.index.json")


def test_reads_without_torch(sharded):
    code = (
        "import sys; from modelcenter.checkpoint.files import *; "
        f"read_index({str(sharded / 'model.safetensors.index.json')!r}); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250, env=os.environ | {"PYTHONPATH": str(root)})


def test_many_tensors_are_read_fast(tmp_path):
    file = tmp_path / "model.safetensors"
    table = {f"layers.{i}.w": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(50_000)}
    file.write_bytes(pack(table, bytes(200_000)))
    with at_most(50 * 50_000):  # 14 a tensor on Python 3.11
        found = read_header(file).tensors
    assert len(found) == 50_000
