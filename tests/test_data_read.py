"""Records: every format, gzipped or not, and a refusal by file and line for what is not one."""

import gzip
import json
from pathlib import Path

import pytest

from modelcenter.data.config import DataConfig
from modelcenter.data.read import LONGEST_LINE, find_files, read_records, read_split, split
from modelcenter.errors import InputError, MissingError

ROWS = [{"text": "one, two\t3", "label": "a"}, {"text": 'say "hé"', "label": "b"}]


def write(file: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", "\n".join(json.dumps(r) for r in ROWS) + "\n\n"),
    ("a.jsonl", "\r\n".join(json.dumps(r) for r in ROWS)),
    ("a.csv", 'text,label\n"one, two\t3",a\n"say ""hé""",b\n'),
    ("a.csv", '\ufefftext,label\r\n"one, two\t3",a\r\n\r\n"say ""hé""",b'),
])
@pytest.mark.parametrize("zipped", ["", ".gz"])
def test_rows(tmp_path: Path, name: str, content: str, zipped: str) -> None:
    file = write(tmp_path / (name + zipped), content)
    assert [r.fields for r in read_records(str(file))] == ROWS


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    file = write(tmp_path / "dev.tsv", 'sentence\tlabel\n"half a quote \t1\na b\t0\r\n')
    assert [r.fields for r in read_records(str(file))] == [
        {"sentence": '"half a quote ', "label": "1"}, {"sentence": "a b", "label": "0"}]
    assert [r.line for r in read_records(str(file))] == [2, 3]


def test_a_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    text = "a\r\n\n b\u2028c\t"
    file = write(tmp_path / "x.py", text)
    [record] = read_records(str(file))
    assert record.fields == {"text": text} and record.line is None


def test_csv_fields_may_span_lines_and_be_long(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", 'text\n"a\nb"\n"' + "c" * 200_000 + '"\n')
    assert [len(r.fields["text"]) for r in read_records(str(file))] == [3, 200_000]


def test_folder_and_glob(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", ".git/x.txt", "b/.hidden"):
        write(tmp_path / name, name)
    names = [str(f.relative_to(tmp_path)) for f in find_files(str(tmp_path))]
    assert names == ["a.txt", "b/2.txt"]
    assert [f.name for f in find_files(f"{tmp_path}/**/*.txt")] == ["a.txt", "2.txt"]
    write(tmp_path / "c.jsonl", '{"text": "x"}')
    assert [f.name for f in find_files(str(tmp_path), "jsonl")] == ["c.jsonl"]
    with pytest.raises(InputError, match=r"folder of jsonl and text files; data\.format or a glob"):
        find_files(str(tmp_path))


def test_the_last_tenth(tmp_path: Path) -> None:
    """As nanoGPT splits: int(n * 0.9) characters, over one file or over many."""
    text = "".join(chr(97 + k % 26) for k in range(1234))
    for cuts in ([1234], [5, 1000, 1234], [1200, 1234]):
        parts = [text[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
        for k, part in enumerate(parts):
            write(tmp_path / str(len(cuts)) / f"{k}.txt", part)
        train, held = read_split(DataConfig(path=str(tmp_path / str(len(cuts))), eval_fraction=0.1))
        assert "".join(r.fields["text"] for r in train) == text[: int(1234 * 0.9)]
        assert "".join(r.fields["text"] for r in held) == text[int(1234 * 0.9) :]
    assert held[0].start == 1110
    rows = list(read_records(str(write(tmp_path / "r.jsonl", '{"text": "x"}\n' * 10))))
    assert [len(part) for part in split(rows, 0.3)] == [7, 3]
    with pytest.raises(InputError, match="eval_fraction"):
        split(rows[:1], 0.5)


def test_eval_path_wins(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "aaaa"), write(tmp_path / "b.txt", "bb")
    train, held = read_split(DataConfig(path=str(a), eval_path=str(b), eval_fraction=0.5))
    assert train[0].fields["text"] == "aaaa" and held[0].fields["text"] == "bb"


@pytest.mark.parametrize("name, content, said", [
    ("a.txt", b"fine\nbad \xff\n", r"a.txt: line 2: byte 4 \(0xff\) is not UTF-8"),
    ("a.txt", b"ok\n" + b"x" * (LONGEST_LINE + 1), "line 2: longer than 16 MiB"),
    ("a.txt", b"", "no record"),
    ("a.jsonl", b"\n\n", "no record"),
    ("a.jsonl", b'{"text": "a"}\n{"text": }\n', r"a.jsonl: line 2: not JSON \(Expecting value\)"),
    ("a.jsonl", b"[" * 100_000, "line 1: not JSON .nested too deeply"),
    ("a.jsonl", b'["a"]', "line 1: a JSON list; one JSON object a line"),
    ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "line 1: not JSON"),
    ("a.csv", b"a,b\n1\n", "line 2: 1 fields where the header has 2"),
    ("a.csv", b'a,b\n1,"2\n3', "not CSV"),
    ("a.csv", b"a,a\n1,2\n", "names a field twice"),
    ("a.tsv", b"a\tb\n1\t2\t3\n", "line 2: 3 fields where the header has 2"),
    ("a.tsv", b"a\tb\n", "no record"),
    ("a.txt.gz", b"x" * (20 << 20), "longer than 16 MiB"),
    ("b.txt.gz", b"0123456\n" * (5 << 20), "grew over 100-fold"),
])
def test_refusals(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(InputError, match=said) as error:
        list(read_records(str(file)))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt.gz", "some text\n" * 1000)
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(InputError, match="damaged gzip"):
        list(read_records(str(file)))
    file.write_bytes(b"not gzip")
    with pytest.raises(InputError, match="damaged gzip"):
        list(read_records(str(file)))


def test_what_is_not_there(tmp_path: Path) -> None:
    for path, said in (("none.txt", "no such file"), ("*.none", "no such file"), ("", "no data file in it")):
        with pytest.raises(MissingError, match=said):
            find_files(f"{tmp_path}/{path}")
    with pytest.raises(MissingError, match=r"data\.path: absent"):
        read_split(DataConfig())
    with pytest.raises(MissingError, match=r"data\.eval_path"):
        read_split(DataConfig(path=str(write(tmp_path / "a.txt", "a")), eval_path=f"{tmp_path}/no"))


def test_fields(tmp_path: Path) -> None:
    [record] = read_records(str(write(tmp_path / "a.jsonl", '{"txt": "a", "n": 3, "half": "\\ud800"}')))
    with pytest.raises(InputError, match=r"line 1: no field 'text'; did you mean 'txt'\? \(data.text_key"):
        record.text("text", "data.text_key")
    with pytest.raises(InputError, match="line 1: n is 3; text is wanted"):
        record.text("n", "data.text_key")
    with pytest.raises(InputError, match="half a surrogate pair at character 0"):
        record.text("half", "data.text_key")
