"""Records: every format, gzipped or not, and a refusal by file and line for what is not one."""

import csv
import gzip
import io
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from test_data_indexed import write as tokens

from modelcenter.data.config import DataConfig
from modelcenter.data.formats import DOCUMENT
from modelcenter.data.objective import find_objective, make_examples
from modelcenter.data.objectives.lm import Blocks
from modelcenter.data.read import find_files, has_tables, held_of_one, in_both, read_records, read_split, split, splits_in
from modelcenter.data.record import Record, Records
from modelcenter.data.source import CHUNK, LONGEST_LINE
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.errors import InputError, MissingError

ROWS = [{"text": "one, two\t3", "label": "a"}, {"text": 'say "hé"', "label": "b"}]


def write(file: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    return file


def tarred(kind: int) -> bytes:
    """An archive of a text, which is UTF-8 as a whole."""
    with io.BytesIO() as out:
        with tarfile.open(fileobj=out, mode="w", format=kind) as archive:
            archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
        return out.getvalue()


@pytest.mark.parametrize("name, kind", [("a.tar", tarfile.GNU_FORMAT), ("a.tar.gz", tarfile.PAX_FORMAT)])
def test_an_archive_is_no_text(tmp_path: Path, name: str, kind: int) -> None:
    with pytest.raises(InputError, match="byte 257: a tar archive; the files in it: tar -xf unpacks them"):
        read_records(str(write(tmp_path / name, tarred(kind))))


def test_a_text_that_is_no_archive(tmp_path: Path) -> None:
    """Mustard where an archive says that it is one, and a text that ends there."""
    for text in (f"{'m' * 257}ustard is a plant", "m" * 257 + "u", "m" * 257):
        assert [r.fields["text"] for r in read_records(str(write(tmp_path / "a.txt", text)))] == [text]


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


WRITTEN = [('say "hé"', "0"), ("a tab\t", "1"), ("two\nlines", "1"), ('"whole"', "1"), ("", "0"), ('"', "0"), ("\r\n", "1")]


@pytest.mark.parametrize("rows", [WRITTEN, WRITTEN[:1], WRITTEN[1:2], WRITTEN[2:3]], ids=["all", "quotes", "tab", "lines"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("header", [True, False])
def test_a_tsv_that_a_program_has_quoted(rows: list[tuple[str, str]], quoting: Any, header: bool, tmp_path: Path) -> None:
    """As pandas' to_csv and csv.writer do it: the quotes, and the fields' ends within them, were taken as they stood."""
    with open(tmp_path / "a.tsv", "w", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows([("text", "label")] * header + rows)
    found = read_records(str(tmp_path / "a.tsv"), header=header)
    assert [tuple(r.fields.values()) for r in found] == rows and has_tables(found)


def test_a_tsv_whose_names_are_quoted_too(tmp_path: Path) -> None:
    [row] = read_records(str(write(tmp_path / "a.tsv", '"text"\t"label"\n"a"\t0\n')))
    assert row.fields == {"text": "a", "label": "0"} and row.line == 2


@pytest.mark.parametrize("rows", [
    ['"I came.\t0', 'I saw."\t1'], ['"Great"\t1', "a\t0"], ['say "x"\t1'], ['5" of it\t1', '"a ""b"\t0'], ['"\t1', 'a ""b"\t0'],
    ['"Oh" he said, "no"\t1', '"so ""it"""\t0'], ['""\t1'],
], ids=["sentences", "whole", "inside", "inch", "alone", "twice", "empty"])  # fmt: skip
def test_quotes_that_a_text_has(rows: list[str], tmp_path: Path) -> None:
    found = read_records(str(write(tmp_path / "a.tsv", "\n".join(["text\tlabel", *rows]))))
    assert ["\t".join(r.fields.values()) for r in found] == rows


def test_a_text_file_is_one_document_as_it_stands(tmp_path: Path) -> None:
    text = "a\n\n b\u2028c\r\t"
    file = write(tmp_path / "x.py", text)
    [record] = read_records(str(file))
    assert record.fields == {"text": text} and record.line is None


def test_lines_that_end_as_on_windows_end_as_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelcenter.data.formats.DOCUMENT", 8)
    records = read_records(str(write(tmp_path / "a.txt", "\ufeffa\r\nb é\r\n\r\nc")))
    assert [(r.fields["text"], r.start) for r in records] == [("a\n", 0), ("b é\n\n", 2), ("c", 7)]
    with pytest.raises(InputError, match="character 7: 'c' is not"):
        make_examples("lm", records, open_tokenizer("char", "ab é\n"), DataConfig(seq_len=2))


@pytest.mark.parametrize("text", ["{x}", "{", "{}", '["a"]\n', '{"a": ' * 4000, 'x = {"a": 1}', '{"a": 1} + 2'])
def test_text_with_braces_is_text(tmp_path: Path, text: str) -> None:
    assert read_records(str(write(tmp_path / "x.txt", text)))[0].fields == {"text": text}
    rows = write(tmp_path / "y.txt", '{"text": "a"}')
    assert read_records(str(rows), "text")[0].fields == {"text": '{"text": "a"}'}
    assert read_records(str(rows), "jsonl")[0].fields == {"text": "a"}


def test_csv_fields_may_span_lines_and_be_long(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", 'text\n"a\nb"\n"' + "c" * 200_000 + '"\n')
    assert [len(r.fields["text"]) for r in read_records(str(file))] == [3, 200_000]


@pytest.mark.parametrize("name, content", [
    ("a.csv", 'text,label\n"one, two\t3",a\n"say ""hé""",b'), ("a.csv.gz", 'text,label\n"one, two\t3",a\n\n"say ""hé""",b\n'),
    ("a.tsv", 'label\ttext\na\tone, two 3\n\nb\tsay "hé"\n'), ("a.jsonl", "\n".join(json.dumps(r) for r in ROWS)),
])  # fmt: skip
def test_rows_whose_lines_end_as_on_old_macs(tmp_path: Path, name: str, content: str) -> None:
    """As spreadsheets there write them, with no newline at all."""
    there, here = (read_records(str(write(tmp_path / end / name, content.replace("\n", "\r" * (end == "mac") or "\n"))))
                   for end in ("mac", "unix"))  # fmt: skip
    assert [(record.fields, record.line) for record in there] == [(record.fields, record.line) for record in here]
    assert len(there) == 2
    quoted = read_records(str(write(tmp_path / "b.csv", b'text,label\r"a\rb",1\r')))
    assert [(record.fields["text"], record.line) for record in quoted] == [("a\rb", 3)]


def test_the_places_of_rows_take_little_memory(tmp_path: Path) -> None:
    """Which those of a file of millions did not: a list of tuples has 170 bytes a row."""
    file = write(tmp_path / "a.csv", "text\n" + "a b\n" * 200_000)
    tracemalloc.start()
    try:
        assert len(read_records(str(file))) == 200_000
        assert tracemalloc.get_traced_memory()[1] < 80 * 200_000
    finally:
        tracemalloc.stop()


MANY = """
import resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), hard if sys.argv[3] == "more" else int(sys.argv[2])))
from modelcenter.data.read import read_records
from modelcenter.errors import InputError
try:
    records = read_records(sys.argv[1])
    print(len(records), open(sys.argv[0]).readline() == "", sum(len(r.fields) for r in records))
except InputError as e:
    print(e)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.bin"])
def test_more_files_than_a_process_may_have_open_by_default(name: str, tmp_path: Path) -> None:
    """Which are 1024 as a rule."""
    (tmp_path / "read.py").write_text(MANY)  # which opens a file beside them, too
    for k in range(60):
        place = tmp_path / "in" / f"{k:02}"
        place.mkdir(parents=True)
        if name == "a.parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").table({"text": ["x"]}), place / name)
        elif name == "a.bin":
            tokens(place / "a", [[1, 2]])
        else:
            write(place / name, '{"text": "x"}')

    def run(*words: str) -> str:
        done = subprocess.run([sys.executable, tmp_path / "read.py", tmp_path / "in", *words], capture_output=True, text=True,
                              check=True)
        return done.stdout.strip()

    assert run("50", "more") == "60 False 60"
    if name == "a.jsonl":
        assert run("50", "none").endswith("cannot be read (Too many open files); fewer files, or a higher limit (ulimit -Hn)")


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
    for key, wanted in {"path": "format or a glob", "prompts": "a glob"}.items():  # as `tokenize` and `generate` call it
        with pytest.raises(InputError, match=rf"{key}: a folder of jsonl and text files; {wanted}$"):
            find_files(str(tmp_path), key=key)


def test_a_glob_of_token_files_and_of_texts_is_refused(tmp_path: Path) -> None:
    tokens(tmp_path / "b", [[1, 2], [3]])
    write(tmp_path / "b.json", "{}")  # what `tokenize` says of them
    assert len(read_records(f"{tmp_path}/*")) == 2
    for name in ("a.jsonl", "c.jsonl"):
        file = write(tmp_path / name, '{"text": "x"}')
        with pytest.raises(InputError, match=rf"data\.path: token files, and {name}; one kind, or a mapping of each to its weight"):
            read_records(f"{tmp_path}/*")
        file.unlink()


def test_links_in_a_folder(tmp_path: Path) -> None:
    """Those to folders were passed by, and those to what nobody has fetched yet: a part of the data was missing without a word."""
    for name in ("all/a.txt", "else/b.txt", "else/.c/d.txt"):
        write(tmp_path / name, name)
    for name, to in (("shard", tmp_path / "else"), ("same", tmp_path / "else"), ("round", tmp_path / "all"),
                     (".not", tmp_path / "gone")):  # fmt: skip
        (tmp_path / "all" / name).symlink_to(to)
    assert [str(f.relative_to(tmp_path)) for f in find_files(str(tmp_path / "all"))] == ["all/a.txt", "all/same/b.txt"]
    (tmp_path / "all" / "z.txt").symlink_to(tmp_path / "gone")
    for path in ("all", "all/*.txt", "all/z.txt"):
        with pytest.raises(InputError, match=r"all/z\.txt: data\.path: a link to what is not there; the data that it stands for"):
            find_files(str(tmp_path / path))


def test_a_folder_that_is_closed_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for place in (tmp_path, tmp_path / "in"):
        (place / "a.txt").write_text("a cat\n")
    assert len(find_files(str(tmp_path))) == 2
    look = os.scandir

    def closed(path: str) -> Any:
        if str(path).endswith("in"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", closed)  # the tests may run as root, to whom all is open
    with pytest.raises(InputError, match=r"/in: data\.path: Permission denied; a folder that can be read"):
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
    rows = read_records(str(write(tmp_path / "r.jsonl", '{"text": "x"}\n' * 10)))
    assert [len(part) for part in split(rows, 0.3)] == [7, 3]
    assert [[len(part) for part in split(rows, tenths / 10)] for tenths in (8, 9)] == [[2, 8], [1, 9]]
    with pytest.raises(InputError, match="eval_fraction"):
        split(Records([rows[:1]]), 0.5)
    text = str(write(tmp_path / "t.txt", "abcd"))
    assert [r.fields["text"] for part in read_split(DataConfig(path=text, eval_fraction=1e-45)) for r in part] == ["abc", "d"]
    with pytest.raises(InputError, match="eval_fraction: of 1 record none is left on one side"):
        read_split(DataConfig(path=str(write(tmp_path / "mark.txt", b"\xef\xbb\xbf")), eval_fraction=0.1))
    around = write(tmp_path / "around.json", json.dumps({"version": 1, "rows": ROWS}))
    with pytest.raises(InputError, match="of 1 record, whose fields are version, rows, none is left on one side"):
        read_split(DataConfig(path=str(around), eval_fraction=0.1))


@pytest.mark.parametrize(("names", "wanted"), [
    (["train-00000-of-00001", "test-00000-of-00001", "validation-00000-of-00001"], 3), (["train", "dev"], 2),
    (["squad.train", "squad_test"], 2), (["trained_dogs", "testament"], 0), (["train-0", "train-1"], 0), (["a", "test"], 0),
], ids=lambda names: "-".join(names) if isinstance(names, list) else "")  # fmt: skip
def test_files_of_several_splits_are_known_by_their_names(names: list[str], wanted: int, tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / f"{name}.jsonl", '{"text": "x"}\n')
    for path in (tmp_path, tmp_path / "*.jsonl"):
        found = splits_in(DataConfig(path=str(path)))
        assert len(found) == wanted and all("train" in name for name in found[:1])
    assert splits_in(DataConfig(path=tuple(str(tmp_path / f"{name}.jsonl") for name in names))) == []


@pytest.mark.parametrize("kind", ["txt", "jsonl", "tokens"])
def test_what_is_held_out_of_the_last_file_alone(tmp_path: Path, kind: str) -> None:
    """Of a list of files the end may be one, which is known; a folder is cut where it happens to be."""
    files: list[Path] = []
    (tmp_path / "in").mkdir()
    for name in "abc":
        text = {"txt": "xyz " * 10, "jsonl": '{"text": "x"}\n' * 20}.get(kind)
        files.append(tokens(tmp_path / "in" / name, [[1] * 10]) if text is None else write(tmp_path / f"in/{name}.{kind}", text))
    paths = tuple(map(str, files))
    for path, fraction, wanted in ((paths, 0.2, paths[-1]), (paths, 0.5, ""), (paths[:1], 0.2, ""), (str(tmp_path / "in"), 0.2, ""),
                                   (paths, 0.0, ""), (dict.fromkeys(paths, 1.0), 0.2, "")):  # fmt: skip
        data = DataConfig(path=path, eval_fraction=fraction)
        assert Path(held_of_one(data, read_split(data)[1])).stem == Path(wanted).stem


@pytest.mark.parametrize("ending", ["tsv", "csv"])
def test_rows_without_a_header(tmp_path: Path, ending: str) -> None:
    """CoLA's files: source, label, mark, sentence."""
    mark = "\t" if ending == "tsv" else ","
    lines = [mark.join(row) for row in (("gj04", "1", "", "They laughed."), ("gj04", "0", "*", "Them laughed."))]
    file = write(tmp_path / f"a.{ending}", "\n".join(lines) + "\n")
    rows, named = (read_records(str(file), header=header) for header in (False, True))
    assert [(row.fields["3"], row.fields["1"], row.line) for row in rows] == [("They laughed.", "1", 1), ("Them laughed.", "0", 2)]
    assert [row.fields for row in named] == [{"gj04": "gj04", "1": "0", "": "*", "They laughed.": "Them laughed."}]
    with pytest.raises(InputError, match=r"no field 'sentence'; data\.header=false, if the first row is a record: '1' is no name"):
        named[0].text("sentence", "data.text_key")
    with pytest.raises(InputError, match="no field 'sentence'; known: 0, 1, 2, 3 "):
        rows[0].text("sentence", "data.text_key")
    for kind, marks in {"csv": ";|\t", "tsv": ",;"}.items():
        for apart in marks:
            file_b = str(write(tmp_path / f"b.{kind}", f"text{apart}label\na{apart}0\n"))
            row, other = read_records(file_b)[0], {"\t": "tsv", ",": "csv"}.get(apart)
            said = f"{'tabs' if kind == 'tsv' else 'commas'} between fields, and not {apart!r} "
            with pytest.raises(InputError, match=re.escape(f"no field 'text'; {said}(prompt_key")):
                row.text("text", "prompt_key")
            said = f"data.format={other}, as {apart!r} is between its fields " if other else said
            with pytest.raises(InputError, match=re.escape(f"no field 'text'; {said}(data.text_key")):
                row.text("text", "data.text_key")
            assert other is None or read_records(file_b, other)[0].fields == {"text": "a", "label": "0"}  # type: ignore[arg-type]
    held = read_split(DataConfig(path=str(file), eval_path=(str(file), str(file)), header=False))
    assert [len(part) for part in held] == [2, 4]
    file.write_text(lines[0] + "\n" + lines[1] + mark + "more\n")
    with pytest.raises(InputError, match="line 2: 5 fields where the header has 4"):
        list(read_records(str(file), header=False))


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_header_that_comes_again_is_no_row(tmp_path: Path, ending: str) -> None:
    apart = "," if ending == "csv" else "\t"
    file = write(tmp_path / f"a.{ending}", "".join(apart.join(row) + "\n" for row in ("ab", "12", "ab", "34")))
    with pytest.raises(InputError, match="line 3: the header once more, as of files that were joined"):
        list(read_records(str(file)))
    alone = write(tmp_path / f"b.{ending}", "text\na\ntext\n")
    assert [record.fields["text"] for record in read_records(str(alone))] == ["a", "text"]


def test_a_header_is_of_csv_and_tsv_alone(tmp_path: Path) -> None:
    """Without a table among the data nothing reads the key."""
    lines, table = str(write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 4)), str(write(tmp_path / "a.tsv", "a\tb\n" * 2))
    for path, held in (({lines: 1.0, table: 1.0}, None), ((lines, table), None), (table, lines), (lines, table)):
        parts = read_split(DataConfig(path=path, eval_path=held, header=False))
        assert sum(map(len, parts)) == 6 and any(map(has_tables, parts))
    for path in (lines, (lines, lines), {lines: 1.0}):
        assert not any(map(has_tables, read_split(DataConfig(path=path, eval_fraction=0.25, header=False))))
    for fraction in (0.0, 0.25):
        assert has_tables(read_split(DataConfig(path=lines, format="csv", eval_fraction=fraction, header=False))[0])


def test_evaluation_data_come_in_all_forms(tmp_path: Path) -> None:
    a, b = (write(tmp_path / f"{name}.jsonl", f'{{"text": "{name}"}}\n' * n) for name, n in (("a", 2), ("b", 3)))
    for form in ((str(a), str(b)), {str(a): 1.0, str(b): 9.0}):
        _, held = read_split(DataConfig(path=str(a), eval_path=form))
        assert [record.fields["text"] for record in held] == ["a", "a", "b", "b", "b"]
        examples = make_examples("lm", held, open_tokenizer("char", "ab"), DataConfig(seq_len=2), train=False)
        assert isinstance(examples, Blocks) and examples.total == 5
    with pytest.raises(MissingError, match=r"data\.eval_path\.1: no such file"):
        read_split(DataConfig(path=str(a), eval_path=(str(a), f"{tmp_path}/no")))


def test_files_that_are_trained_and_evaluated_on_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever name."""
    monkeypatch.chdir(tmp_path)
    files = [str(write(tmp_path / "data" / f"{name}.jsonl", '{"text": "a"}')) for name in "abc"]
    (tmp_path / "link.jsonl").symlink_to(files[0])
    for path, held, same in (
        ("data", "data/a.jsonl", ["data/a.jsonl"]), (files[0], "./data/../data/a.jsonl", ["data/../data/a.jsonl"]),
        (files[0], "link.jsonl", ["link.jsonl"]), ((files[0], files[1]), "data/*.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ({files[0]: 1.0, files[1]: 2.0}, ("data/c.jsonl", "data/b.jsonl"), ["data/b.jsonl"]), (files[0], files[1], []),
        ("datasets:a:train", "datasets:a:train", ["datasets:a:train"]), ("datasets:a", "datasets:a:test", []), (files[0], None, []),
    ):  # fmt: skip
        assert in_both(DataConfig(path=path, eval_path=held)) == same


def test_eval_path_wins(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "aaaa"), write(tmp_path / "b.txt", "bb")
    train, held = read_split(DataConfig(path=str(a), eval_path=str(b), eval_fraction=0.5))
    assert train[0].fields["text"] == "aaaa" and held[0].fields["text"] == "bb"


@pytest.mark.parametrize("name, content, said", [
    ("a.txt", b"fine\nbad \xff\n", r"a.txt: line 2: byte 4 \(0xff\) is not UTF-8"),
    ("a.csv", b"text,label\ncaf\xe9,0\n", r"line 2: byte 3 \(0xe9\) is not UTF-8; .* of GBK, -f cp1252 of Latin letters"),
    ("a.txt", b"ok\n" + b"x" * (LONGEST_LINE + 1), "line 2: longer than 16 MiB"),
    ("a.txt", b"", "no record"),
    ("a.jsonl", b"\n\n", "no record"),
    ("a.jsonl", b'{"text": "a"}\n{"text": }\n', r"a.jsonl: line 2: not JSON \(Expecting value\)"),
    ("a.jsonl", b"[" * 100_000, "line 1: not JSON .nested too deeply"),
    ("a.jsonl", b'["a"]', "line 1: a JSON list; one JSON object a line; data.format=json reads a list"),
    ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "line 1: not JSON"),
    ("a.csv", b"a,b\n1\n", "line 2: 1 fields where the header has 2"),
    ("a.csv", b'a,b\n1,2\n\n3,"4\n5,6\n7', r"line 4: not CSV \(unexpected end of data in line 6\); .* closed quotes"),
    ("a.csv", b'a,b\n1,2\n3,"4"5\n6,7\n', r"line 3: not CSV \(',' expected after '\"'\)"),
    ("a.csv", b"a,a\n1,2\n", "names a field twice"),
    ("a.tsv", b"a\tb\n1\t2\t3\n", "line 2: 3 fields where the header has 2"),
    ("a.tsv", b"a\tb\n", "no record"),
    ("a.dat", b'\n{"text": "a"}\n{"text": "b"}\n', "data.format: its first line is a JSON object; data.format=jsonl, or text if"),
    ("a.txt.gz", b"x" * (20 << 20), "grew over 100-fold"),
    ("b.txt.gz", b"0123456\n" * (5 << 20), "grew over 100-fold"),
    ("a.jsonl", gzip.compress(b'{"text": "a"}\n', mtime=0), r"a\.jsonl: byte 0: gzip data; UTF-8 text \(or \.gz"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x00\x41", "byte 0: zstd data"),
    ("a.csv", "a,b\n1,2\n".encode("utf-16"), "byte 0: UTF-16 data; UTF-8 text, which iconv -f utf-16 -t utf-8 makes of it"),
    ("a.arrow", b"\xff\xff\xff\xff\x10\0\0\0", "byte 0: Arrow data; the folder that save_to_disk has written"),
])
def test_refusals(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = write(tmp_path / name, content)
    with pytest.raises(InputError, match=said) as error:
        list(read_records(str(file)))
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "content", "place", "order"), [
    ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), "line 1: byte 1", "le"),
    ("a.txt", "é\n".encode("utf-16-be"), "line 1: byte 0", "be"),
    ("a.txt", b"one\ntwo\0\0\n\xff", "line 2: byte 3", "le"), ("a.txt", b"one\n" * 9 + b"\0" * 9, "line 10: byte 0", "be"),
], ids=["le", "be", "both", "filled"])  # fmt: skip
def test_no_text_has_a_zero_byte(name: str, content: bytes, place: str, order: str, tmp_path: Path) -> None:
    """As UTF-16 without a mark, and the end of a file after a crash."""
    said = rf"{place} \(0x00\) is in no text but UTF-16; UTF-8 text: iconv -f utf-16{order} -t utf-8 makes it of that, tr -d "
    with pytest.raises(InputError, match=said):
        list(read_records(str(write(tmp_path / name, content))))


def test_a_damaged_gzip_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt.gz", "some text\n" * 1000)
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(InputError, match="damaged gzip"):
        list(read_records(str(file)))
    file.write_bytes(b"not gzip")
    with pytest.raises(InputError, match="damaged gzip"):
        list(read_records(str(file)))


@pytest.mark.parametrize("path", ["https://someone:canary@host/a,b.jsonl?c=d", "s3://bucket/*.txt"])
def test_an_address_is_no_file(path: str) -> None:
    with pytest.raises(MissingError, match=r"^data\.path: an address \((https|s3)://\.\.\.\), .*; download it, ") as missing:
        find_files(path)
    assert "canary" not in str(missing.value)


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, said in (("none.txt", "no such file"), ("*.none", "no such file"), ("", "no data file in it")):
        with pytest.raises(MissingError, match=said):
            find_files(f"{tmp_path}/{path}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingError) as missing:
        find_files("data/none.txt")
    assert str(missing.value).startswith(f"data/none.txt: data.path: no such file, seen from {tmp_path}; ")
    (tmp_path / "none.bin").touch()
    with pytest.raises(MissingError, match=r"no such file, .*; none\.bin$"):  # the name that `modelcenter tokenize` was given
        find_files("none")
    with pytest.raises(InputError, match=r"data\.path: ''; a file, a folder or a glob"):  # of a shell's variable that is not set
        find_files("")
    with pytest.raises(MissingError, match=r"data\.path: absent"):
        read_split(DataConfig())
    with pytest.raises(MissingError, match=r"data\.eval_path"):
        read_split(DataConfig(path=str(write(tmp_path / "a.txt", "a")), eval_path=f"{tmp_path}/no"))


def test_fields(tmp_path: Path) -> None:
    [record] = read_records(str(write(tmp_path / "a.jsonl", '{"txt": "a", "n": 3}')))
    with pytest.raises(InputError, match=r"line 1: no field 'text'; did you mean 'txt'\? \(data.text_key"):
        record.text("text", "data.text_key")
    with pytest.raises(InputError, match="line 1: n is 3; text "):
        record.text("n", "data.text_key")
    with pytest.raises(InputError, match="half a surrogate pair at character 0"):
        Record({"half": "\ud800"}, "f", 1).text("half", "data.text_key")


@pytest.mark.parametrize(("name", "place"), [("a.jsonl", "line 2: "), ("a.json", "")])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(name: str, place: str, tmp_path: Path) -> None:
    """A tokenizer ends in an error of its own there, which names no record; whole pairs, and a backslash before a u, are text."""
    rows = ['{"text": ["\\ud83d\\ude00", "\\\\ud800"]}', '{"text": "a", "far": [{"in": "x\\uD83d"}]}']
    text = "\n".join(rows) if name.endswith("l") else f"[{','.join(rows)}]"
    with pytest.raises(InputError, match=rf"{name}: {place}holds half a surrogate pair \(\\ud83d\); valid Unicode"):
        list(read_records(str(write(tmp_path / name, text))))
    [record] = read_records(str(write(tmp_path / "b.jsonl", rows[0])))
    assert record.fields["text"] == ["😀", "\\ud800"]


def test_parquet_that_names_a_column_twice(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: schema: the columns \['text', 'text'\] name a field twice"):
        read_records(str(tmp_path / "a.parquet"))


# ------------------------------------------------------------------------------------------------- large files, lazily


def test_a_text_of_several_fields() -> None:
    record = Record({"a": "x {b}", "b": "y", "n": 1, "{a}": "itself"}, "file.jsonl", 3)
    assert record.text("{b}: {a}.", "data.text_key") == "y: x {b}." and record.text("{a}", "data.text_key") == "itself"
    with pytest.raises(InputError, match=r"file.jsonl: line 3: no field 'c'; .*\(data.text_key names the field\)"):
        record.text("{b} {c}", "data.text_key")
    assert record.text("{n} of {b}", "data.text_key") == "1 of y"
    for key in ("{a", "{}"):  # would be the text of every record
        with pytest.raises(InputError, match=rf"file.jsonl: line 3: no field '{re.escape(key)}'; .*\(data.text_key names"):
            record.text(key, "data.text_key")


def test_a_number_in_a_text_of_several_fields() -> None:
    """As a table has it; what is true, or empty, is no text there either."""
    record = Record({"stars": 4, "price": 2.5, "text": "good", "sold": True, "none": None}, "f", 1)
    assert record.text("{stars} of 5, {price}: {text}", "data.text_key") == "4 of 5, 2.5: good"
    for key in ("stars", "{sold}", "{none} {text}"):
        with pytest.raises(InputError, match=r"^f: line 1: \w+ is (4|true|null); text \(data.text_key names the field\)"):
            record.text(key, "data.text_key")


def test_what_begins_as_a_list_is_soon_known_to_be_none() -> None:
    """A text of 30,000 spaces behind a bracket took a minute."""
    begun = process_time()
    for text in (f"[{' ' * 30_000}words", f"[{'1 , ' * 9_000}words", f"['{' ' * 30_000}words"):
        assert Record({}, "f", 1).unfolded("text", text) == text
    assert process_time() - begun < 2
    for text, value in (("[ ]", []), (" [ 1, 2 ]", [1, 2]), ('[\n"a", "]" ] ', ["a", "]"])):
        assert Record({}, "f", 1).unfolded("text", text) == value


def test_a_dot_goes_into_a_field() -> None:
    """Translation rows, as transformers' examples read them; a field whose name has a dot comes first."""
    row = Record({"translation": {"en": "a cat", "de": "eine Katze"}, "a.b": "whole", "a": {"b": "part"}, "n": 1}, "f", 3)
    assert row.text("translation.de", "o") == "eine Katze" and row.text("a.b", "o") == "whole"
    assert row.text("{translation.en} = {translation.de}", "o") == "a cat = eine Katze"
    for key, said in {
        "source": r"f: line 3: no field 'source'; known: a.b, n, translation.de, translation.en \(o names the field\)",
        "translation.fr": "no field 'translation.fr'; did you mean 'translation",
        "n.x": "no field 'n.x'; known: ",
        "translation": r"translation is {\"en\".*; text, such as translation.en \(o names the field\)",
    }.items():
        with pytest.raises(InputError, match=said):
            row.text(key, "o")


def test_dots_go_into_fields_of_fields() -> None:
    row = Record({"doc": {"body": {"text": "deep"}, "a.b": {"c": "dotted"}, "n": [1]}}, "f", 3)
    assert row.text("doc.body.text", "o") == "deep" and row.text("{doc.a.b.c}", "o") == "dotted"
    for key, said in {
        "text": r"no field 'text'; known: doc.a.b.c, doc.body.text, doc.n \(o",
        "doc": r"; text, such as doc.body.text \(o names",
        "doc.body": r"; text, such as doc.body.text \(o names",
        "doc.body.text.x": "no field 'doc.body.text.x'; did you mean 'doc.body.text'",
    }.items():
        with pytest.raises(InputError, match=said):
            row.text(key, "o")


def test_a_long_text_is_documents_that_end_with_a_line(tmp_path: Path) -> None:
    lines = [f"{k} é {'x' * (k % 5000)}\n" for k in range(4500)]
    file = write(tmp_path / "long.txt", text := "\ufeff" + "".join(lines))
    records = read_records(str(file))
    assert len(records) == 3 and len(text.encode()) > 2 * DOCUMENT
    texts = [r.fields["text"] for r in records]
    assert "".join(texts) == text[1:] and all(t.endswith("\n") and len(t.encode()) <= DOCUMENT for t in texts)
    assert [r.start for r in records] == [0, len(texts[0]), len(texts[0] + texts[1])]
    head, tail = split(records, 0.1)
    assert "".join(r.fields["text"] for r in (*head, *tail)) == text[1:]
    assert sum(len(r.fields["text"]) for r in head) == int((len(text) - 1) * 0.9)


@pytest.mark.parametrize("before", range(3))
def test_a_long_first_line_is_whole_text(tmp_path: Path, before: int) -> None:
    """Whichever byte of a character stands where a document might have ended. A later document keeps a mark that stands in it."""
    lines = ["x" * before + "中" * (DOCUMENT // 3 + 9) + "\n", "\ufeffthe next", "\n"]
    records = read_records(str(write(tmp_path / "long.txt", "\ufeff" + "".join(lines) + "y" * DOCUMENT + "\n\ufeffz")))
    texts = [r.fields["text"] for r in records]
    assert texts[0] == lines[0] and "".join(texts) == "".join(lines) + "y" * DOCUMENT + "\n\ufeffz"
    assert [r.start for r in records] == [len("".join(texts[:k])) for k in range(len(texts))]
    with pytest.raises(InputError, match="its first line is a JSON object"):
        read_records(str(write(tmp_path / "rows.dat", json.dumps({"text": "x" * DOCUMENT}) + "\n{}")))


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "jsonl.gz"])
def test_rows_over_the_borders_of_what_is_read_at_once(tmp_path: Path, ending: str) -> None:
    texts = [f"{k} " + "é" * (k * 7919 % 3000) for k in range(2500)]
    if ending.startswith("jsonl"):
        rows = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
        content = "\n".join(("\n \n" if k % 3 == 0 else "") + row for k, row in enumerate(rows))
    else:
        content = "text\n" + "\n".join(f'"{t}\n"' if ending == "csv" and k % 3 == 0 else t for k, t in enumerate(texts))
    assert len(content.encode()) > CHUNK
    file = write(tmp_path / f"a.{ending}", content)
    records = read_records(str(file))
    assert [r.fields["text"].strip("\n") for r in records] == texts
    lines = content.split("\n")
    assert all(texts[k] in lines[(records[k].line or 0) - 1 - (ending == "csv" and k % 3 == 0)] for k in range(0, 2500, 97))
    assert records[-1] == list(records)[-1] and [r.fields for r in records[5:9:2]] == [records[5].fields, records[7].fields]


def test_a_json_list_of_objects(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", json.dumps(ROWS, indent=1))
    assert [(r.fields, r.line) for r in read_records(str(file))] == [(ROWS[0], 1), (ROWS[1], 2)]
    assert [r.fields for r in read_records(str(tmp_path), "json")] == ROWS
    file = write(tmp_path / "b.json", "\n".join(json.dumps(r) for r in ROWS))
    assert [r.fields for r in read_records(str(file))] == ROWS
    with pytest.raises(InputError, match=r"c.json: item 2: a JSON int"):
        read_records(str(write(tmp_path / "c.json", '[{"text": "a"}, 3]')))
    with pytest.raises(InputError, match=r"d.json: line 2: not JSON"):
        read_records(str(write(tmp_path / "d.json", '[{"text": "a"},\n {]')))


def test_an_object_may_stand_over_several_lines_and_articles_are_records(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", "\ufeff" + json.dumps(ROWS[0], indent=2))
    assert [r.fields for r in read_records(str(one))] == ROWS[:1]
    articles = [{"title": t, "paragraphs": [{"context": "c", "qas": []}]} for t in "abc"]
    for indent in (None, 2):  # as SQuAD is published, and as XQuAD is
        file = write(tmp_path / f"{indent}.json", json.dumps({"version": "1.1", "data": articles}, indent=indent) + "\n")
        assert [r.fields for r in read_records(str(file))] == articles
        train, held = read_split(DataConfig(path=str(file), eval_fraction=0.4))
        assert [len(train), len(held)] == [1, 2] and held[1].fields == articles[2]
    for row in ({"data": [1, 2]}, {"data": [{"x": 1}]}):  # rows like any other
        assert [r.fields for r in read_records(str(write(tmp_path / "other.json", json.dumps(row))))] == [row]
    with pytest.raises(InputError, match=r"bad.json: line 3: not JSON"):
        read_records(str(write(tmp_path / "bad.json", '{\n "text": "a",\n}')))


def test_an_object_in_a_line_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SQuAD's own file is, of 30 MB; a line of several is still one that no text has."""
    for module in ("source", "formats"):
        monkeypatch.setattr(f"modelcenter.data.{module}.LONGEST_LINE", 4096)
    long = {"title": "a", "paragraphs": [{"context": "c " * 4096, "qas": []}]}
    for row, wanted in (({"data": [long, long], "version": "1.1"}, [long, long]), (long, [long])):
        file = write(tmp_path / "one.json", "\ufeff" + json.dumps(row))
        assert [r.fields for r in read_records(str(file))] == wanted
    for end in "\n\r":  # many lines are as many objects
        assert len(read_records(str(write(tmp_path / "lines.json", f'{{"text": "a"}}{end}' * 999)))) == 999
    for content in (b'{"text": "a"}\n' + file.read_bytes()[3:], file.read_bytes() + b"\n{}", b"{" * 4097):
        with pytest.raises(InputError, match=r"more\.json: line \d: (longer than 16 MiB|not JSON)"):
            read_records(str(write(tmp_path / "more.json", content)))


def test_a_file_that_shrinks_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 9)
    records = read_records(str(file))
    file.write_text("")
    with pytest.raises(InputError, match=r"a.jsonl: byte 56: the file ends here"):
        records[4]


# --------------------------------------------------------------------------------------------------------------- tables


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"text {k}", "label": k % 3, "more": [k]} for k in range(10)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    records = read_records(str(tmp_path / "a.parquet"))
    assert [r.fields for r in records] == rows and [records[k].fields for k in (9, 0, 5)] == [rows[9], rows[0], rows[5]]
    with pytest.raises(InputError, match=r"a.parquet: row 3: no field 'txt'; did you mean 'text'"):
        records[2].text("txt", "data.text_key")
    with pytest.raises(InputError, match="row 3: label is 2; text"):
        records[2].text("label", "data.text_key")
    train, held = split(records, 0.2)
    assert [r.fields for r in held] == rows[8:] and len(train) == 8
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(InputError, match=r"b.parquet: not a parquet file"):
        read_records(str(tmp_path / "b.parquet"))
    parquet.write_table(pa.Table.from_pylist(rows[:0]), tmp_path / "c.parquet")
    with pytest.raises(InputError, match="no record"):
        read_records(str(tmp_path / "c.parquet"))


def test_columns_that_nobody_asks_for(tmp_path: Path) -> None:
    """Dates that Python has none for, broken images and sounds: each ended a run that reads the texts beside them."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    day, second = pa.array([5, 10**7], pa.int32()).cast(pa.date32()), pa.array([5, 10**15], pa.int64()).cast(pa.timestamp("s"))
    within = pa.array([{"day": 5}, {"day": 10**7}], pa.struct([("day", pa.int32())])).cast(pa.struct([("day", pa.date32())]))
    table = pa.table({"text": ["a", "b"], "day": day, "second": second, "within": within})
    parquet.write_table(table, tmp_path / "a.parquet")
    broken = {"bytes": b"no picture", "path": "a.png"}
    held = datasets.Dataset.from_dict({"image": [broken] * 2, "sounds": [[broken]] * 2})
    held = held.cast_column("image", datasets.Image()).cast_column("sounds", datasets.List(datasets.Audio()))
    held = datasets.concatenate_datasets([datasets.Dataset(table), held, datasets.Dataset.from_dict(
        {"any": [{"a": 1}, [2]]}, features=datasets.Features({"any": datasets.Json()}))], axis=1)  # fmt: skip
    held.save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        rows = list(read_records(str(tmp_path / name)))
        assert [row.text("text", "data.text_key") for row in rows] == ["a", "b"] and str(rows[0].fields["day"]) == "1970-01-06"
        assert str(rows[0].fields["within"]["day"]) == "1970-01-06"
        for key in ("day", "second", "within"):
            with pytest.raises(InputError, match=rf"{name}: row 2: {key} is \".*(out of range|too large).*\"; text"):
                rows[1].text(key, "data.text_key")
    assert [row.fields["any"] for row in rows] == [{"a": 1}, [2]]
    assert rows[0].fields["image"] == broken and rows[0].fields["sounds"] == [broken]


def test_the_hub_s_parquet_names_its_classes(tmp_path: Path) -> None:
    """Its metadata do: rows are those of the data set it was written from, and so are the classes that are learned."""
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    tag = datasets.ClassLabel(names=["O", "B", "I"])
    kinds = datasets.Features({"text": datasets.Value("string"), "tags": datasets.Sequence(tag), "n": datasets.Value("int64"),
                               "label": datasets.ClassLabel(names=["yes", "no", "perhaps"])})  # fmt: skip
    rows = {"text": ["a", "b", "c"], "tags": [[1, 2, 0], [0], []], "n": [0, 1, 2], "label": [1, 0, -1]}
    data = datasets.Dataset.from_dict(rows, features=kinds)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "saved")
    found = read_records(str(tmp_path / "a.parquet"))
    assert [r.fields for r in found] == [r.fields for r in read_records(str(tmp_path / "saved"))]
    assert [r.fields["label"] for r in found] == ["no", "yes", -1] and found[0].fields["tags"] == ["B", "I", "O"]
    assert found[1].fields["n"] == 1
    config = DataConfig(label_key="label")
    assert find_objective("classify").names(found[:2], config) == ("yes", "no", "perhaps")
    letters = open_tokenizer("char", ["abc"])
    valued = make_examples("regress", found[:2], letters, config)
    assert [float(valued.at(0, k)[-1]) for k in range(2)] == [1, 0]  # its stars, say, are values as well
    table = parquet.read_table(tmp_path / "a.parquet")
    old = json.loads(table.schema.metadata[b"huggingface"])
    old["info"]["features"]["tags"] = [{"names": tag.names, "_type": "ClassLabel"}]  # as before datasets 4
    for name, told in (("old", json.dumps(old)), ("odd", '{"info": 3}'), ("broken", "{")):
        parquet.write_table(table.drop(["label"]).replace_schema_metadata({"huggingface": told}), tmp_path / f"{name}.parquet")
    assert read_records(str(tmp_path / "old.parquet"))[0].fields == {"text": "a", "tags": ["B", "I", "O"], "n": 0}
    for name in ("odd", "broken"):
        with pytest.raises(InputError, match=rf"{name}\.parquet: schema: its metadata of datasets cannot be read"):
            read_records(str(tmp_path / f"{name}.parquet"))


def test_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=kinds)
    wanted = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}, {"text": "c", "label": -1}]
    data.save_to_disk(tmp_path / "saved")
    assert [r.fields for r in read_records(str(tmp_path / "saved"))] == wanted
    for how in ("numpy", "torch"):  # such as a program leaves them that has trained on some columns
        data.with_format(how, columns=["text"]).save_to_disk(tmp_path / how)
        assert [r.fields for r in read_records(str(tmp_path / how))] == wanted
    datasets.DatasetDict({"train": data, "test": data.select([2])}).save_to_disk(tmp_path / "dict")
    assert [r.fields for r in read_records(str(tmp_path / "dict" / "test"))] == wanted[2:]
    with pytest.raises(InputError, match=r"a dataset of the splits test, train; one of them: .*dict/test"):
        read_records(str(tmp_path / "dict"))
    data.select([]).save_to_disk(tmp_path / "none")
    with pytest.raises(InputError, match=r"none: data\.path: no record; data with at least one record"):
        read_records(str(tmp_path / "none"))
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"saved: data.path: cannot be read"):
        read_records(str(tmp_path / "saved"))

    for name, texts in (("train", "ab"), ("test", "c")):
        write(tmp_path / "named" / f"{name}.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in texts))
    for spelled, texts in (("", ["a", "b"]), (":train", ["a", "b"]), (":test", ["c"])):
        records = read_records(f"datasets:{tmp_path}/named{spelled}")
        assert [r.fields["text"] for r in records] == texts
    with pytest.raises(InputError, match=r"datasets:.*named:tset has no split 'tset'; did you mean 'test'"):
        read_records(f"datasets:{tmp_path}/named:tset")
    with pytest.raises(InputError, match=r"data.path: datasets:.*nowhere cannot be loaded"):
        read_records(f"datasets:{tmp_path}/nowhere")
    with pytest.raises(InputError, match="NAME"):
        read_records("datasets:")


def test_an_unreachable_hub_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before each of the times that its client tries again."""
    datasets, client, heard = pytest.importorskip("datasets"), logging.getLogger("huggingface_hub.utils._http"), []

    def load(*_: Any) -> None:
        heard.append(client.isEnabledFor(logging.WARNING))
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(InputError, match=r"datasets:somebody/nothing cannot be loaded \(Couldn't reach it\); "):
        read_records("datasets:somebody/nothing")
    assert heard == [False] and client.isEnabledFor(logging.WARNING)
