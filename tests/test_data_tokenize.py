"""`tokenize`: the files are Megatron's to the byte, train as their text does, and outlive a kill at any moment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import workers
from test_data_indexed import write

from modelcenter.__main__ import main
from modelcenter.data import tokenize as module
from modelcenter.data.config import DataConfig, Tokenization
from modelcenter.data.objective import make_examples
from modelcenter.data.read import read_records
from modelcenter.data.tokenize import tokenize
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError
from modelcenter.parallel.watch import outwards
from modelcenter.train.loop import train
from modelcenter.train.read import load_recipe

TEXTS = ["a bcd", "", *(f"{'efg ' * (k % 7)}{k} é" for k in range(60))]


@pytest.fixture
def asked(tmp_path: Path) -> Tokenization:
    train_tokenizer(["a bcd efg"], 280, "roberta").save(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return Tokenization(path=str(tmp_path / "a.jsonl"), out=str(tmp_path / "new" / "a"), tokenizer=str(tmp_path / "tokenizer"),
                        processes=1)


def files(out: str) -> dict[str, bytes]:
    return {ending: Path(f"{out}.{ending}").read_bytes() for ending in ("bin", "idx")}


def left(out: str) -> list[str]:
    return sorted(f.name for f in Path(out).parent.iterdir())


@pytest.mark.filterwarnings("ignore:.* are empty. left out")
@pytest.mark.parametrize("objective", ["lm", "mlm"])
def test_the_files_are_megatrons_and_train_as_the_text_does(asked: Tokenization, objective: Any, monkeypatch: pytest.MonkeyPatch,
                                                           tmp_path: Path) -> None:
    monkeypatch.setattr(module, "PART", 150)
    said = tokenize(replace(asked, objective=objective))
    assert left(asked.out) == ["a.bin", "a.idx", "a.json"]
    tokenizer = module.load_tokenizer(asked.tokenizer)
    frame = ([0], [2]) if objective == "lm" else ([], [2])  # <s> and </s>
    rows = [[*frame[0], *tokenizer.encode(t, special=False), *frame[1]] for t in TEXTS if t]
    write(tmp_path / "theirs", rows)
    assert files(asked.out) == files(str(tmp_path / "theirs"))
    assert (said["documents"], said["tokens"], said["type"], said["made"]) == (61, sum(map(len, rows)), "uint16", True)

    for options in ({}, {"packing": True}):
        data = DataConfig(seq_len=16, **options)
        paths = asked.path, f"{asked.out}.bin"
        text, ids = (make_examples(objective, read_records(path), tokenizer, data, seed=3) for path in paths)
        assert len(text) == len(ids) > 5 and text.lengths.tolist() == ids.lengths.tolist()
        for epoch, index in ((0, 0), (1, 2), (2, len(text) - 1)):
            ours, theirs = (e.collate([e.at(epoch, index)]) for e in (text, ids))
            assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_the_same_again_is_there_already_and_another_is_refused(asked: Tokenization) -> None:
    tokenize(asked)
    before = Path(f"{asked.out}.bin").stat().st_mtime_ns
    assert not tokenize(asked)["made"] and Path(f"{asked.out}.bin").stat().st_mtime_ns == before
    copy = Path(asked.path).with_name("b.jsonl")
    copy.write_text('{"text": "a"}')
    for other in (replace(asked, objective="mlm"), replace(asked, path=str(copy))):
        with pytest.raises(InputError, match=r"a\.bin: exists, and is made of other files or options"):
            tokenize(other)
    assert left(asked.out) == ["a.bin", "a.idx", "a.json"]
    Path(f"{asked.out}.json").unlink()
    with pytest.raises(InputError, match=r"a\.bin: exists"):
        tokenize(other)


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file is read for its hash."""

    def digest(row: Any, over: Any) -> str:
        raise AssertionError(row)

    monkeypatch.setattr(module, "digest", digest)


def test_what_was_touched_moved_or_copied_is_the_same(asked: Tokenization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenize(asked)
    before = Path(f"{asked.out}.bin").stat().st_mtime_ns
    os.utime(asked.path, (1, 1))
    (tmp_path / "other").mkdir()
    copy = replace(asked, path=str(tmp_path / "other" / "z.jsonl"))
    Path(copy.path).write_bytes(Path(asked.path).read_bytes())
    for again in (asked, copy):
        said = tokenize(again)
        assert not said["made"] and said["key"] == made["key"] and Path(f"{asked.out}.bin").stat().st_mtime_ns == before
        assert json.loads(Path(f"{asked.out}.json").read_text()) == {k: v for k, v in said.items() if k != "made"}
        assert said["files"][0][0] == again.path, "and stands there by the name, size and time that it has now"
        with monkeypatch.context() as patch:
            unread(patch)
            assert not tokenize(again)["made"]


def test_other_contents_or_another_end_of_text_are_not_the_same(asked: Tokenization, tmp_path: Path) -> None:
    tokenize(asked)
    source, settings = Path(asked.path), tmp_path / "tokenizer" / "tokenizer_config.json"
    was = source.read_bytes()
    source.write_bytes(was.replace(b"efg", b"gfe"))
    with pytest.raises(InputError, match=r"a\.bin: exists, and is made of other files"):
        tokenize(asked)
    source.write_bytes(was)
    assert not tokenize(asked)["made"]
    settings.write_text(settings.read_text().replace('"eos_token": "</s>"', '"eos_token": "<s>"'))
    with pytest.raises(InputError, match=r"a\.bin: exists, and is made of other files"):
        tokenize(asked)


def test_the_same_bytes_read_as_another_format_are_not_the_same(asked: Tokenization) -> None:
    lines, rows = Path(asked.path).with_suffix(".txt"), Path(asked.path).with_suffix(".tsv")
    for file in (lines, rows):
        file.write_text("text\na bcd\n")
    assert tokenize(replace(asked, path=str(lines)))["made"]
    with pytest.raises(InputError, match=r"a\.bin: exists, and is made of other files"):
        tokenize(replace(asked, path=str(rows)))


def test_who_goes_on_does_not_hash_again(asked: Tokenization, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*rest: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "PART", 150)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_index", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(asked)
    with monkeypatch.context() as patch:
        unread(patch)
        assert tokenize(asked)["made"]
    whole = replace(asked, out=str(tmp_path / "whole"))
    tokenize(whole)
    assert files(asked.out) == files(whole.out)


def test_contents_that_change_meanwhile_are_refused(asked: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    real, source = module.write_parts, Path(asked.path)

    def write_parts(*rest: Any) -> None:
        real(*rest)
        source.write_bytes(source.read_bytes().replace(b"efg", b"gfe"))

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_parts", write_parts)
        with pytest.raises(InputError, match="its contents changed while they were read"):
            tokenize(asked)
    assert not Path(f"{asked.out}.bin").exists()
    assert tokenize(asked)["made"] and left(asked.out) == ["a.bin", "a.idx", "a.json"]
    stat = source.stat()
    with pytest.raises(InputError, match="changes while it is read"):
        module.digest((asked.path, stat.st_size, stat.st_mtime_ns - 1), threading.Event())


KILLED = """
import json, os, signal, sys
from modelcenter.data import tokenize as module
def replace(source, target, real=os.replace, journals=[]):
    journals.append(target)
    if len(journals) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)
if __name__ == "__main__":
    module.PART, os.replace = 60, replace
    module.tokenize(module.Tokenization(**json.loads(sys.argv[1])))
"""


def test_a_kill_costs_a_part_at_most(asked: Tokenization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third is on the disk, and the journal does not say so yet."""
    Path(asked.path).write_text("".join(json.dumps({"text": t * 40}) + "\n" for t in TEXTS * 5))
    script = tmp_path / "run.py"
    script.write_text(KILLED)
    journal = Path(asked.out).parent / ".a.json"
    arguments = {"path": asked.path, "out": asked.out, "tokenizer": asked.tokenizer, "processes": 1}
    done = subprocess.run([sys.executable, str(script), json.dumps(arguments)], start_new_session=True, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    parts = json.loads(journal.read_text())["parts"]
    assert parts == 2 and not Path(f"{asked.out}.bin").exists()
    with open(journal.parent / ".a.bin", "ab") as file:
        file.write(b"half a part")
    done: list[int] = []
    monkeypatch.setattr(module, "PART", 60)
    monkeypatch.setattr(module, "resumed", lambda *a, real=module.resumed: done.append((found := real(*a)).parts) or found)
    tokenize(asked)
    assert done == [parts] and left(asked.out) == ["a.bin", "a.idx", "a.json"]
    whole = tokenize(replace(asked, out=str(tmp_path / "whole"), processes=2))
    assert files(asked.out) == files(str(tmp_path / "whole")) and done == [parts, 0]
    assert whole["tokens"] == json.loads(Path(f"{asked.out}.json").read_text())["tokens"]


def test_a_kill_while_the_files_take_their_names(asked: Tokenization, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokenize(replace(asked, out=str(tmp_path / "whole")))
    for moment in (1, 2):
        with monkeypatch.context() as patch:
            calls = []

            def stop(source: Any, target: Any, calls: list[Any] = calls, moment: int = moment, real: Any = os.replace) -> None:
                if Path(target).suffix in (".bin", ".idx"):
                    calls.append(target)
                    if len(calls) == moment:
                        raise KeyboardInterrupt
                real(source, target)

            patch.setattr(module.os, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                tokenize(asked)
        tokenize(asked)
        assert files(asked.out) == files(str(tmp_path / "whole")) and left(asked.out) == ["a.bin", "a.idx", "a.json"]
        for ending in ("bin", "idx", "json"):
            Path(f"{asked.out}.{ending}").unlink()


def test_what_another_process_has_just_made_is_there(asked: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for it and the claim."""
    claimed = module.claimed

    def late(out: Path) -> Any:
        monkeypatch.setattr(module, "claimed", claimed)
        assert tokenize(asked)["made"]
        return claimed(out)

    monkeypatch.setattr(module, "claimed", late)
    assert not tokenize(asked)["made"] and left(asked.out) == ["a.bin", "a.idx", "a.json"]


@pytest.mark.parametrize("key", ["{a}: {b.c}", "b.c"])
def test_a_text_of_several_fields_or_inside_another(asked: Tokenization, key: str, tmp_path: Path) -> None:
    """Of which the fields were given away empty: of each record the letters between its fields were left."""
    rows = [{"a": f"a{k}", "b": {"c": f"b{k}"}} for k in range(3)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize(replace(asked, path=str(tmp_path / "b.jsonl"), text_key=key))
    ids, tokenizer = read_records(f"{asked.out}.bin"), module.load_tokenizer(asked.tokenizer)
    told = [tokenizer.decode(record.fields["ids"]) for record in ids]
    assert told == [f"{row['a']}: {row['b']['c']}" if "{" in key else row["b"]["c"] for row in rows]


def test_the_files_are_named_as_they_are(asked: Tokenization, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (asked.out, f"{asked.out}.bin"):
        assert main(["tokenize", asked.path, out, "--tokenizer", asked.tokenizer, "processes=1"]) == 0
        assert capsys.readouterr().out.startswith(f"{asked.out}.bin: ")


def test_a_claim_that_was_given_up_is_none(asked: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened while another process held it, which has removed it since: a third may have claimed anew."""
    lock = Path(asked.out).parent / ".a.lock"
    flock = module.fcntl.flock

    def late(file: Any, how: int) -> None:
        lock.unlink()
        flock(file, how)

    with monkeypatch.context() as patch, pytest.raises(InputError, match="a: out: another process is writing it"):
        patch.setattr(module.fcntl, "flock", late)
        tokenize(asked)
    assert tokenize(asked)["made"]


def test_refusals(asked: Tokenization, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl: line 1: no field 'body'; known: text"):
        tokenize(replace(asked, text_key="body"))
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(InputError, match=r"e\.jsonl: text_key: no token in all texts"):
        tokenize(replace(asked, path=str(tmp_path / "e.jsonl")))
    assert left(asked.out) == []  # there is nothing to go on with
    (tmp_path / "n.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(InputError, match=r"n\.jsonl: line 2: text is 3; text "):
        tokenize(replace(asked, path=str(tmp_path / "n.jsonl")))
    assert left(asked.out) == []
    with module.claimed(Path(asked.out)), pytest.raises(InputError, match="a: out: another process is writing it"):
        tokenize(asked)


SLOW = """
import os, signal, sys, threading, time
from multiprocessing import util
from modelcenter.data import tokenize as module

def encode(records):
    time.sleep(3600)

begun = threading.Event()
pressed = threading.Event()

def press():
    begun.wait()
    time.sleep(float(sys.argv[2]))
    os.killpg(0, signal.SIGINT)
    pressed.set()

def spawn(path, args, *rest, spawn=util.spawnv_passfds):
    process = spawn(path, args, *rest)
    if any("spawn_main" in str(arg) for arg in args):
        begun.set()
        if sys.argv[2] == "0":  # before the worker is told its task
            pressed.wait()
    return process

if __name__ == "__main__":
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as from a terminal, whatever the tests were started from
    module.encode = encode
    util.spawnv_passfds = spawn
    threading.Thread(target=press, daemon=True).start()
    try:
        module.tokenize(module.Tokenization(path=sys.argv[1], out=sys.argv[1] + ".out", tokenizer=sys.argv[3], processes=2))
    except KeyboardInterrupt:
        print("ended", flush=True)
"""


@pytest.mark.parametrize("seconds", [0, 3])
def test_ctrl_c_waits_for_no_worker(asked: Tokenization, seconds: int, tmp_path: Path) -> None:
    """A terminal sends it to all of them, perhaps before they have begun; none says a word, and none is waited for."""
    (tmp_path / "slow.py").write_text(SLOW)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "slow.py", asked.path, str(seconds), asked.tokenizer], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_is_told_its_task_before_the_end_is_heard(number: int) -> None:
    """Whichever thread the signal comes to: here one that was there before, and has the signals of before."""
    done, before, starting = [], signal.signal(number, signal.default_int_handler), threading.Event()
    thread = threading.Thread(target=lambda: (starting.wait(), signal.pthread_kill(threading.get_ident(), number)))
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), module.deaf():
            starting.set()
            thread.join()
            done.append("told")
        assert done == ["told"] and signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_ctrl_c_waits_for_no_hash(asked: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large file, which takes minutes: not a byte more is read once the pool is waited for."""
    read, main, before = [], threading.main_thread().ident or 0, signal.signal(signal.SIGINT, signal.default_int_handler)

    def is_in(name: str) -> bool:
        return any(frame.f_code.co_name == name for frame in outwards(sys._current_frames()[main]))

    def update(data: bytes) -> None:
        read.append(data)
        tries = 0
        while len(read) == 1 and not is_in("shutdown"):
            if is_in("result") and tries % 500 == 0:  # again in half a second: what it raises within a destructor is lost
                signal.pthread_kill(main, signal.SIGINT)
            tries += is_in("result")
            time.sleep(0.001)

    monkeypatch.setattr(module, "sha256", lambda: SimpleNamespace(update=update, hexdigest=str))
    monkeypatch.setattr(module, "CHUNK", 10)
    try:
        with pytest.raises(KeyboardInterrupt):
            module.identity(asked, [])
        assert len(read) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_workers_do_not_hear_ctrl_c(asked: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays pending in each, for ever."""
    monkeypatch.setattr(module, "encode", workers.pressed)
    assert tokenize(asked)["documents"] == 1


def test_a_worker_that_dies_is_one_line(asked: Tokenization, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "encode", workers.die)
    with pytest.raises(InputError, match="processes: one of 1 died"):
        tokenize(asked)


def test_the_command(asked: Tokenization, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tokenize", asked.path, asked.out, "--tokenizer", asked.tokenizer, "processes=1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"{asked.out}.bin: ")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] is False
    assert main([*arguments[:-1], "processes=0"]) == 2


def test_a_mixture_of_token_files_trains(asked: Tokenization, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tokenize(replace(asked, out=str(tmp_path / name)))
    path = "{" + f"{tmp_path}/a.bin: 2, {tmp_path}/b.bin: 1" + "}"
    sizes = ["config.layers=1", "config.dim=16", "config.heads=2", "data.seq_len=12", "max_steps=2", "num_epochs=null"]
    run = load_recipe("pretrain", [f"data.path={path}", f"tokenizer={asked.tokenizer}", "data.eval_fraction=0.2", *sizes,
                                   f"output_dir={tmp_path}/run"])  # fmt: skip
    assert train(run).metrics["eval_loss"] > 0
