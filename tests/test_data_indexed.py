"""Token files: Megatron's indexed datasets in, byte for byte, and what is damaged refused by its byte."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelcenter.data.config import DataConfig
from modelcenter.data.indexed import TokenFile, Tokens
from modelcenter.data.objective import make_examples
from modelcenter.data.read import find_files, read_records, read_split
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError, MissingError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 4]]
CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8, "f4": 7}


def write(prefix: Path, sequences: Sequence[Sequence[int]], kind: str = "u2", documents: Sequence[int] | None = None) -> Path:
    """The format as its authors describe it, in struct's words alone."""
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(s, f"<{kind}").tobytes() for s in sequences))
    size, at, starts = int(kind[1]), 0, []
    for sequence in sequences:
        starts.append(at)
        at += len(sequence) * size
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[kind])
    index += struct.pack("<QQ", len(sequences), len(documents))
    index += b"".join(struct.pack("<i", len(s)) for s in sequences) + b"".join(struct.pack("<q", s) for s in starts)
    prefix.with_suffix(".idx").write_bytes(index + b"".join(struct.pack("<q", d) for d in documents))
    return prefix.with_suffix(".bin")


@pytest.mark.parametrize("kind", ["u1", "i2", "i4", "i8", "u2"])
def test_what_others_wrote_is_read(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / "a", DOCUMENTS, kind)
    for name in (file, file.with_suffix(".idx"), tmp_path):
        found = read_records(str(name))
        assert isinstance(found, Tokens) and len(found) == 3
        assert [r.fields["ids"].tolist() for r in found] == DOCUMENTS
        assert found.flat(2, 6).tolist() == [7, 8, 9, 10] and found.flat(3, 3).tolist() == [] and found.flat(0, 9).dtype == np.int32
    write(tmp_path / "a", [[5, 6], [7], [8], [9, 10, 11, 12, 4]], kind, documents=[0, 2, 3, 4])  # a document of two sentences
    assert [r.fields["ids"].tolist() for r in read_records(str(file))] == DOCUMENTS


def test_where_no_document_was_ended_each_sequence_is_one(tmp_path: Path) -> None:
    """As the builder of ModelCenter's model_center/tools/indexed_dataset.py leaves an index: its bounds are a 0 alone."""
    write(tmp_path / "a", [[5, 6], [7], [8, 9]], "i4", documents=[0])
    assert TokenFile(tmp_path / "a.idx").bounds.tolist() == [0, 2, 3, 5]


def test_where_documents_begin_is_not_sorted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To count those of 20 million took 24 s, three times before a run began."""
    write(tmp_path / "a", [[1, 2], [], [3]], documents=[0, 1, 2, 2, 3])
    write(tmp_path / "b", [[4], [5, 6]])
    monkeypatch.setattr(np, "unique", None)
    both = read_records(f"{tmp_path}/*.bin")
    assert isinstance(both, Tokens) and both.bounds.tolist() == [0, 2, 3, 4, 6]
    assert [part.bounds.tolist() for part in both.split(0.5)] == [[0, 2, 3], [0, 1, 3]]


def test_no_token_at_all_is_refused_by_the_file(tmp_path: Path) -> None:
    for sequences in ([], [[], []]):
        file = write(tmp_path / "a", sequences)
        with pytest.raises(InputError, match=r"a\.bin: data\.path: no token; data with at least one document"):
            read_records(str(file))


def test_folders_and_splits(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "b", [[1, 2], [3]], "i4")
    (tmp_path / "a.json").write_text("{}")
    assert [f.name for f in find_files(str(tmp_path))] == ["a.bin", "b.bin"]
    every = read_records(str(tmp_path))
    assert isinstance(every, Tokens) and every.bounds.tolist() == [0, 3, 4, 9, 11, 12]
    assert every.flat(0, 12).tolist() == [i for d in DOCUMENTS for i in d] + [1, 2, 3] and every.flat(8, 10).tolist() == [4, 1]
    train, held = read_split(DataConfig(path=str(tmp_path), eval_fraction=0.5))
    assert isinstance(train, Tokens) and isinstance(held, Tokens)
    assert train.flat(0, train.total).tolist() == [5, 6, 7, 8, 9, 10] and train.bounds.tolist() == [0, 3, 4, 6]
    assert held.flat(0, held.total).tolist() == [11, 12, 4, 1, 2, 3] and held.bounds.tolist() == [0, 3, 5, 6]
    write(tmp_path / "b", [[1]])
    with pytest.raises(InputError, match=r"b\.bin: data\.eval_fraction: of 1 token none is left on one side"):
        read_split(DataConfig(path=str(tmp_path / "b.bin"), eval_fraction=0.01))


def broken(tmp_path: Path, ending: str, change: Any) -> Path:
    file = write(tmp_path / "a", DOCUMENTS)
    part = file.with_suffix(ending)
    part.write_bytes(change(part.read_bytes()))
    return file


INDEX = 34  # bytes of the header


@pytest.mark.parametrize("ending, change, said", [
    (".bin", lambda b: b[:-1], r"a\.bin: byte 17: the file ends here, and its index says 9 ids; 18 bytes"),
    (".bin", lambda b: b + b"\0\0", r"a\.bin: byte 20: "),
    (".idx", lambda b: b[:20], r"a\.idx: byte 20: the file ends in its header"),
    (".idx", lambda b: b[:-3], r"a\.idx: byte 99: 99 bytes for 3 sequences and 4 bounds; 102 bytes"),
    (".idx", lambda b: b + b"\1\1\1", r"a\.idx: byte 102: 105 bytes for 3 sequences"),
    (".idx", lambda b: b"X" + b[1:], r"a\.idx: byte 0: b'XMIDIDX"),
    (".idx", lambda b: b[:9] + b"\2" + b[10:], r"a\.idx: byte 9: version 2"),
    (".idx", lambda b: b[:17] + b"\7" + b[18:], r"a\.idx: byte 17: ids of type 7"),
    (".idx", lambda b: b[:17] + b"\x63" + b[18:], r"a\.idx: byte 17: ids of type 99"),
    (".idx", lambda b: b[: INDEX + 4] + struct.pack("<i", 2) + b[INDEX + 8 :], r"a\.idx: byte 62: sequence 2: 5 ids from byte 8"),
    (".idx", lambda b: b[: INDEX + 4] + struct.pack("<i", -1) + b[INDEX + 8 :], r"a\.idx: byte 54: sequence 1: -1 ids"),
    (".idx", lambda b: b[:-8] + struct.pack("<q", 2), r"a\.idx: byte 70: the bounds of documents; numbers that rise from 0 to 3"),
    (".idx", lambda b: b[:70] + struct.pack("<q", 1) + b[78:], r"a\.idx: byte 70: the bounds of documents"),
    (".idx", lambda b: b[:78] + struct.pack("<q", 9) + b[86:], r"a\.idx: byte 70: the bounds of documents"),
])  # fmt: skip
def test_what_is_damaged_is_refused(tmp_path: Path, ending: str, change: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        TokenFile(broken(tmp_path, ending, change))


def test_more_refusals(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([], 257)
    file = write(tmp_path / "a", [[5, 300], [-1, 7]], "i4")
    blocks = make_examples("lm", read_records(str(file)), tokenizer, DataConfig(seq_len=2), vocab=257, train=False)
    with pytest.raises(InputError, match=r"a\.bin: byte 4: token 1 has id 300, the model 257 tokens"):
        blocks.at(0, 0)
    with pytest.raises(InputError, match=r"a\.bin: byte 8: token 2 has id -1"):
        read_records(str(file))[1]
    with pytest.raises(InputError, match=r"a\.bin: document 1: ids of tokens, and no field 'source'; an objective that reads them"):
        make_examples("seq2seq", read_records(str(write(tmp_path / "a", DOCUMENTS))), tokenizer, DataConfig())
    asked, (record, *_) = r"a\.bin: document 1: ids of tokens, and no field 'text'; tokenizer=", read_records(str(file))
    for made, named in {"": "NAME", '{"tokenizer": "gpt2"}': "gpt2", f'{{"tokenizer": "{tmp_path}/a.idx"}}': f"{tmp_path}"}.items():
        (tmp_path / "a.json").write_text(made)
        with pytest.raises(InputError, match=f"{asked}{named}, which has made them; "):  # of which one was to be made
            record.text("text", "data.text_key")
    (tmp_path / "a.json").write_text('{"vocabulary": "0123456789abcdef", "tokenizer": "gpt2"}')
    with pytest.raises(InputError, match=r"a\.bin: tokenizer: made by gpt2, and this is bpe:257, another vocabulary \(01234567\)"):
        make_examples("lm", read_records(str(file)), tokenizer, DataConfig())
    (tmp_path / "a.idx").unlink()
    with pytest.raises(MissingError, match=r"a\.idx: no such file"):
        read_records(str(file))
