"""Bad input from outside: every case is one line on stderr, status 2, at most 300 characters, nothing left behind.

What a module's own tests hold row by row (headers, indexes, YAML, records, tokenizers, training states) is sampled here through
the command line; what they have no row for has one here.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.checkpoint.lock import lock
from modelcenter.data.tokenizer import CharTokenizer
from modelcenter.errors import InputError
from modelcenter.parallel.machine import Machine
from modelcenter.registry import families
from modelcenter.train.memory import Memory
from modelcenter.train.read import load_recipe

TEXT = "the cat sat on the mat. " * 40
TINY = {"layers": 1, "dim": 16, "heads": 2}
PRESETS = {
    "gpt2": ("gpt2", {"positions": 32}), "bert": ("bert-base-uncased", {"positions": 32, "hidden": 16}),
    "llama": ("llama-7b", {"positions": 32, "hidden": 16}), "t5": ("t5-small", {"hidden": 16, "head_dim": 8}),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each of four families, with a tokenizer of characters."""
    root, tokenizer = tmp_path_factory.mktemp("models"), CharTokenizer.train([TEXT])
    for kind, (preset, fields) in PRESETS.items():
        model = mc.build(preset, config={**TINY, **fields, "vocab": len(tokenizer)})
        model.save_pretrained(root / kind)
        tokenizer.save(root / kind)
    return root


@pytest.fixture
def here(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: the models, a text, and a hub that is not to be asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for kind in PRESETS:
        shutil.copytree(made / kind, tmp_path / kind)
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def refused(argv: list[str], found: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`argv` is refused in one line that holds `found`, and changes nothing."""
    before = everything(here)
    capfd.readouterr()
    assert main(argv) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("modelcenter: error: ") and err.count("\n") == 1, err
    assert found in err and "; " in err and len(err) <= len("modelcenter: error: \n") + 300
    assert err[:-1].isprintable()
    assert everything(here) == before


def config(kind: str = "gpt2", *gone: str, **values: Any) -> Callable[[Path], None]:
    """Change a model's config.json."""

    def make(here: Path) -> None:
        file = here / kind / "config.json"
        merged = json.loads(file.read_text()) | values
        file.write_text(json.dumps({k: v for k, v in merged.items() if k not in gone}))

    return make


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change the tensors of GPT-2."""

    def make(here: Path) -> None:
        table = load_file(here / "gpt2" / "model.safetensors")
        change(table)
        save_file(table, here / "gpt2" / "model.safetensors")

    return make


def file(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda here: (here / name).write_bytes(content) and None


def cast(kind: torch.dtype) -> Callable[[Path], None]:
    return weights(lambda t: t.update({"transformer.wpe.weight": t["transformer.wpe.weight"].to(kind)}))


# ---------------------------------------------------------------------------------------------------- folders of models

LN = "transformer.ln_f.weight"
WTE = "transformer.wte.weight"
FOLDERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {  # case: family, how it is made, what is said
    "header of 7 bytes": ("gpt2", file("gpt2/model.safetensors", b"\1" * 7), "byte 0: a file of 7 bytes"),
    "git-lfs pointer": ("gpt2", file("gpt2/model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
    "control characters": ("gpt2", weights(lambda t: t.update({"a\x1b[2J": torch.ones(1)})), r"'a\x1b[2J': a control character"),
    "tensor missing": ("gpt2", weights(lambda t: t.pop(LN)), f"gpt2: {LN}: missing; the model needs these 1 tensors"),
    "names behind a wrapper's": (
        "gpt2", weights(lambda t: [t.update({f"module.{k}": t.pop(k)}) for k in list(t)]), "first is module.transformer.h.0",
    ),
    "tensor unexpected": ("gpt2", weights(lambda t: t.update(extra=torch.ones(1))), "gpt2: extra: unexpected"),
    "tensor misshapen": ("gpt2", weights(lambda t: t.update({LN: torch.ones(3)})), f"{LN}: has shape [3]; config.json"),
    "weights quantised to int8": ("gpt2", cast(torch.int8), "wpe.weight: int8; weights in fp16"),
    "weights quantised to fp8": ("gpt2", cast(torch.float8_e4m3fn), "wpe.weight: float8_e4m3fn; weights in fp16"),
    "weights are complex": ("gpt2", cast(torch.complex64), "wpe.weight: complex64; weights in fp16"),
    "weights are flags": ("gpt2", cast(torch.bool), "wpe.weight: bool; weights in fp16"),
    "no config.json": ("gpt2", lambda here: (here / "gpt2/config.json").unlink(), "config.json: no such file"),
    "duplicate key": ("gpt2", file("gpt2/config.json", b'{"n_embd": 1, "n_embd": 2}'), "n_embd: a duplicate key"),
    "NaN": ("gpt2", file("gpt2/config.json", b'{"n_embd": NaN}'), "config.json: the number NaN"),
    "depth over 32": ("gpt2", file("gpt2/config.json", b"[" * 99 + b"]" * 99), "config.json: nested too deeply"),
    "unknown model_type": ("gpt2", config(model_type="gtp"), "'gtp'; one of the families that are here: bert, bloom, cpm"),
    "model_type that only sounds known": ("gpt2", config(model_type="gpt3"), "'gpt3'; one of the families that are here"),
    "model_type missing": ("gpt2", config("gpt2", "model_type"), "model_type: None; "),
    "model_type is a list": ("gpt2", config(model_type=["gpt2"]), "model_type: ['gpt2']; one of"),
    "unknown architecture": (
        "bert", lambda here: (config("bert", architectures=["BertForX"])(here), strip(here)),
        "architectures: 'BertForX'; known: BertModel, BertForQuestionAnswering",
    ),
    "architectures is a number": ("bert", config("bert", architectures=3), "architectures: 3; a list; known: BertM"),
    "auto_map": ("gpt2", config(auto_map={"AutoModel": "x.Y"}), "auto_map: a model with code of its own, which is never"),
    "quantised": ("gpt2", config(quantization_config={"bits": 4}), "quantization_config: a quantised save"),
    "unknown activation": ("gpt2", config(activation_function="maxout"), "activation_function: 'maxout'; known: gelu"),
    "unknown rope scaling": ("llama", config("llama", rope_scaling={"type": "xpos"}), "rope_scaling.rope_type: 'xpos'"),
    "size not divisible": ("gpt2", config(n_head=3), "config.json: n_embd: 16; a multiple of n_head, which is 3"),
    "more heads than channels": ("gpt2", config(n_head=10**6), "n_embd: 16; a multiple of n_head, which is 1000000"),
    "a million layers": ("gpt2", config(n_layer=10**6), "n_layer: 1000000; a size from 1 to 1024"),
    "a billion labels": ("gpt2", config(num_labels=10**9), "num_labels: 1000000000; a size from 1 to 1048576"),
    "product beyond 64 bits": ("gpt2", config(n_embd=2**31 - 2), "config: sizes whose product does not fit 64 bits"),
    "absurd vocabulary": ("gpt2", config(vocab_size=2**31 - 1), "config.json gives [2147483647, 16]"),
    "dropout above 1": ("gpt2", config(resid_pdrop=1.5), "resid_pdrop: 1.5; a rate from 0 to 1"),
    "id2label is text": ("gpt2", config(id2label="no, yes"), "id2label: 'no, yes'; a name for each number"),
    "id2label with a gap": ("gpt2", config(id2label={"0": "a", "2": "b"}), "id2label: keys ['0', '2']; a name for each of"),
    "number beyond a float": ("gpt2", config(layer_norm_epsilon=10**400), "layer_norm_epsilon: 1000"),
    "tied scalars": (
        "gpt2", weights(lambda t: t.update({name: torch.ones(()) for name in ("lm_head.weight", WTE)})), f"{WTE}: has shape []",
    ),
    "start outside the vocabulary": (
        "t5", config("t5", decoder_start_token_id=5000), "config.json: decoder_start_token_id: 5000; an id below",
    ),
    "token id is text": ("gpt2", config(pad_token_id="<pad>"), "pad_token_id: '<pad>'; the id of a token"),
    "token id below -1": ("gpt2", config(eos_token_id=[3, -2]), "eos_token_id: -2; the id of a token"),
    "initializer_range negative": ("gpt2", config(initializer_range=-1), "initializer_range: -1; a finite number"),
    "another computation": ("gpt2", config(add_cross_attention=True), "add_cross_attention: True; only False"),
    "causal BERT": ("bert", config("bert", is_decoder=True), "is_decoder: True; only False"),
    "all distances exact": (
        "t5", config("t5", relative_attention_max_distance=16), "t5/config.json: max_distance: 16 in 32 buckets; more than 16",
    ),
    "hardly any buckets": ("t5", config("t5", relative_attention_num_buckets=3), "max_distance: 128 in 3 buckets; 4 buckets at"),
    "T5 of two minds": (
        "t5", config("t5", feed_forward_proj="gated-gelu", dense_act_fn="relu", is_gated_act=True),
        "t5/config.json: dense_act_fn: 'relu'; 'gelu_new', as feed_forward_proj 'gated-gelu' has it",
    ),
    "T5 that decodes alone": ("t5", config("t5", is_decoder=True), "is_decoder: True; only False"),
}  # fmt: skip


def strip(here: Path) -> None:
    """Take BERT's head away, so that nothing but `architectures` says what it is."""
    table = load_file(here / "bert" / "model.safetensors")
    save_file({k: v for k, v in table.items() if not k.startswith("cls.")}, here / "bert" / "model.safetensors")


@pytest.mark.parametrize("case", FOLDERS)
def test_a_model(case: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kind, make, found = FOLDERS[case]
    make(here)
    refused(["convert", kind, "out"], found, here, capfd)
    with pytest.raises(InputError) as error:  # from Python: the same text
        mc.load(kind)
    assert found in str(error.value)


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("value", [0, -1, True, "3", 2.5, 2**31, 10**30, [1], {}])
def test_no_size_is_taken_amiss(kind: str, value: object, made: Path) -> None:
    """Every size of every family: zero, negative, a bool, text, a float, beyond 2**31, a list, a mapping."""
    content = json.loads((made / kind / "config.json").read_text())
    cls = families()[kind].Config
    sizes = [key for key, v in content.items() if type(v) is int and any(key in k.split("|") for k in cls.hf.keys)]
    assert len(sizes) >= 4
    for key in set(sizes) - {"decoder_start_token_id"}:
        with pytest.raises(InputError, match=f"^config.json: {key}: "):
            cls.from_dict({**content, key: value})


# --------------------------------------------------------------------------------------------------------- command line

RUN = {"data.path": "a.txt", "tokenizer": "char", "config.layers": "1", "config.dim": "16", "config.heads": "2",
       "data.seq_len": "16", "batch": "4", "max_steps": "1", "output_dir": "out"}  # fmt: skip
TRAIN: dict[str, tuple[dict[str, str], str]] = {  # case: settings, what is said
    "head size not divisible": ({"config.dim": "15"}, "config.dim: 15; a multiple of config.heads, which is 2"),
    "zero heads": ({"config.heads": "0"}, "config.heads: 0; a size"),
    "bool for int": ({"config.layers": "true"}, "config.layers: True (bool); a whole number"),
    "float for int": ({"config.layers": "2.0"}, "config.layers: 2.0 (float); a whole number"),
    "null for int": ({"config.layers": "null"}, "config.layers: None (NoneType)"),
    "absurd depth": ({"config.layers": "1000000000"}, "config.layers: 1000000000; a size from 1 to 1024"),
    "beyond the memory": ({"config.vocab": "2147483647", "config.dim": "1024"}, "cpu: bf16, an adapter on nf4, or more ranks"),
    "activation": ({"config.act": "maxout"}, "config.act: 'maxout'; known: gelu, gelu_fast, gelu_new"),
    "mechanism by number": ({"config.act": "3"}, "config.act: 3; known: gelu"),
    "rope by name": ({"model": "llama-7b", "config.rope": "linear"}, "config.rope: 'linear'; give it in the model's"),
    "rate above 1": ({"config.dropout": "2"}, "config.dropout: 2; a rate from 0 to 1"),
    "field nearly right": ({"config.layres": "2"}, "config.layres: unknown field; did you mean 'layers'?"),
    "no such preset": ({"model": "gpt3"}, "model: 'gpt3'; a preset, or a folder with a config.json; did you mean 'gpt2'?"),
    "fewer segments than are in use": ({"model": "cpm-ant-10b", "config.segments": "2"}, "config.segments: 2; at least 3"),
    "fewer prompts than are in use": ({"model": "cpm-ant-10b", "config.prompts": "2"}, "config.prompts: 2; at least 3"),
    "a family without that head": ({"model": "t5-small"}, "task: 'lm' is none of T5's"),
    "longer than the positions": ({"data.seq_len": "64", "config.positions": "32"}, "data.seq_len: 64; at most 32"),
    "batch beyond reason": ({"batch": "1000000000"}, "batch: 1000000000; at most 1048576 sequences"),
    "half precision": ({"precision": "fp8"}, "precision: 'fp8'; auto | bf16 | "),
    "tokenizer with a scheme": ({"tokenizer": "https://h/x"}, "https://h/x"),
    "tokenizer with a port": ({"tokenizer": "h:80/x"}, "h:80/x: a scheme or a port in a name"),
    "tokenizer size beyond reason": ({"tokenizer": "bpe:" + "9" * 30}, "a size: bpe:8000"),
    "tokenizer not in the cache": ({"tokenizer": "no/body"}, "no/body: offline, and no/body is neither a folder nor cached"),
    "empty set": ({"data.path": "empty.txt"}, "empty.txt: data.path: no record"),
    "bad UTF-8": ({"data.path": "bad.txt"}, "bad.txt: line 2: byte 3 (0xff) is not UTF-8"),
    "line over 16 MiB": ({"data.path": "long.txt"}, "long.txt: line 1: longer than 16 MiB"),
    "broken JSON line": ({"data.path": "bad.jsonl"}, "bad.jsonl: line 2: not JSON"),
    "a device for data": ({"data.path": "/dev/zero"}, "/dev/zero: data.path: not a regular file"),
    "a character of the evaluation data": ({"data.eval_path": "z.txt"}, "z.txt: character 8: 'Z' of the evaluation data is"),
    "output_dir is the root": ({"output_dir": "/"}, "output_dir: /, the root of all files; a folder for this run alone"),
    "output_dir is the root, spelt out": ({"output_dir": "/.././"}, "output_dir: /.././, the root of all files"),
    "output_dir is a file": ({"output_dir": "a.txt"}, "a.txt: "),
    "output_dir under a file": ({"output_dir": "a.txt/x"}, "a.txt/x: output_dir: Not a directory"),
    "output_dir holds a model": ({"output_dir": "theirs"}, "theirs: output_dir: holds a model that no run of it made"),
    "output_dir is the model's": ({"model": "gpt2", "output_dir": "./gpt2"}, "gpt2: output_dir: model names it, too; a folder "),
    "output_dir holds a run": ({"output_dir": "ran", "resume": "never"}, "ran: output_dir: holds a run already"),
    "another recipe": ({"output_dir": "ran", "resume": "auto", "seed": "7"}, "recipe.yaml: "),
    "a checkpoint of Trainer to go on from": ({"resume": "checkpoint-4"}, "checkpoint-4: resume: a checkpoint of Trainer; model"),
    "no state to go on from": ({"resume": "gpt2"}, "gpt2: resume: no valid training state"),
}  # fmt: skip
TRAINING_FILES = {"empty.txt": b"", "bad.txt": b"fine\nbad\xff\n", "long.txt": b"x" * (2**24 + 1), "z.txt": b"the cat Z",
                  "bad.jsonl": b'{"text": "abc"}\n{"text": }\n'}  # fmt: skip


def command(**changes: str) -> list[str]:
    return ["train", "pretrain", "--machine", "cpu", *(f"{k}={v}" for k, v in {**RUN, **changes}.items())]


@pytest.mark.parametrize("case", TRAIN)
def test_training(case: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes, found = TRAIN[case]
    if changes.get("data.path", changes.get("data.eval_path")) in TRAINING_FILES:
        name = changes.get("data.path", changes.get("data.eval_path", ""))
        (here / name).write_bytes(TRAINING_FILES[name])
    shutil.copytree(here / "gpt2", here / "theirs" / "model")
    if changes.get("output_dir") == "ran":
        (here / "ran" / "step-3").mkdir(parents=True)
        (here / "ran" / "recipe.yaml").write_text("model: gpt2\noutput_dir: ran\nmax_steps: 1\ndata: {path: a.txt}\n")
    (here / "checkpoint-4").mkdir()
    (here / "checkpoint-4" / "trainer_state.json").write_text("{}")
    refused(command(**changes), found, here, capfd)


@pytest.mark.filterwarnings("default")
def test_token_id_outside_the_vocabulary(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A warning, then the refusal of data that holds such an id: file, record, offset."""
    assert main(command(**{"config.vocab": "3"})) == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first == "modelcenter: warning: char: 11 tokens where the model has 3; data that holds such an id is refused"
    assert second.startswith("modelcenter: error: a.txt: character 0: token 0 ('t') has id 10, the model 3 tokens; ")
    assert not (here / "out").exists()


def test_a_live_run_keeps_its_folder(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as held:
        held.enter_context(lock(here / "out"))
        refused(command(), "in use by a live run (process", here, capfd)


COMMANDS: dict[str, tuple[list[str], str]] = {  # case: command, what is said
    "repo id with a scheme": (["convert", "https://huggingface.co/gpt2", "out"], "a scheme or a port in a name"),
    "repo id with a port": (["convert", "hub:8080/gpt2", "out"], "a scheme or a port in a name"),
    "repo id with ..": (["convert", "a/../b", "out"], "a/../b: no such folder"),
    "control characters in a name": (["convert", "\x1b[2J", "out"], r"\x1b[2J: not a folder, a preset or a hub id"),
    "a name of 5,000 letters": (["convert", "x" * 5000, "out"], "not a folder, a preset or a hub id"),
    "unknown task": (["convert", "gpt2", "out", "task=speak"], "task: 'speak' is none of GPT's"),
    "unknown dtype": (["convert", "gpt2", "out", "dtype=fp12"], "dtype: 'fp12'; did you mean 'fp32'?"),
    "shard size of nothing": (["convert", "gpt2", "out", "max_shard_size=0"], "max_shard_size: '0'; at least 1 byte"),
    "onto a folder of others": (["convert", "gpt2", "bert"], "bert: exists; a new folder, or an empty one"),
    "onto a file": (["convert", "gpt2", "a.txt"], "a.txt: exists; a new folder, or an empty one"),
    "a revision of a folder": (["convert", "gpt2", "out", "revision=x"], "gpt2: revision: 'x' of a local folder"),
    "beyond the positions": (["generate", "gpt2", "the cat", "max_new_tokens=26"], "26 after a prompt of 7 tokens; at most 25"),
    "a prompt beyond them": (["generate", "gpt2", "a" * 40], "after a prompt of 40 tokens; a shorter prompt: the model has 32 pos"),
    "a character unknown": (["generate", "gpt2", "Zebra"], "character 0: 'Z' is not in the vocabulary"),
    "a model that fills gaps": (["generate", "bert", "the"], "a model with the task 'mlm'; one that predicts the next"),
    "a ban of nothing": (["generate", "gpt2", "a", "bad_words_ids=[[3], []]"], "bad_words_ids: an empty sequence, which is every"),
    "no values at all": (["generate", "gpt2", "a", "device=meta"], "device: meta, where weights have no values; "),
    "texts into no folder": (["generate", "gpt2", "a", "out=no/a.jsonl"], "no/a.jsonl: No such file or directory; a new file, "),
    "texts that are not made": (["generate", "gpt2", "Zebra", "out=b.jsonl"], "character 0: 'Z' is not in the vocabulary"),
    "hardly any temperature": (["generate", "gpt2", "a", "--do-sample", "temperature=1e-300"], "temperature: 1e-300; "),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands(case: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv, found = COMMANDS[case]
    refused(argv, found, here, capfd)


@pytest.mark.parametrize("content", ["", "[]", '{"model": 3}', '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_malformed_tokenizer(content: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "gpt2" / "tokenizer.json").write_text(content)
    refused(["generate", "gpt2", "the"], "tokenizer.json: ", here, capfd)


@pytest.mark.parametrize(("content", "said"), [("{", "line 1 column 2: "), ("null", "a NoneType; an object with")])
def test_malformed_generation_config(content: str, said: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "gpt2" / "generation_config.json").write_text(content)
    refused(["generate", "gpt2", "the"], f"gpt2/generation_config.json: {said}", here, capfd)


def test_texts_are_written_as_they_come(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "p.txt").write_text("the\ncat\n" + "a" * 30 + "\n")
    assert main(["generate", "gpt2", "prompts=p.txt", "out=b.jsonl", "batch=2", "max_new_tokens=3"]) == 2
    assert "3 after a prompt of 30 tokens" in capfd.readouterr().err
    assert [json.loads(line)["prompt"] for line in (here / "b.jsonl").read_text().splitlines()] == ["the", "cat"]


def test_ids_that_are_no_words_of_the_model() -> None:
    model = mc.build("gpt2", config={**TINY, "vocab": 11, "positions": 32})
    for odd in (11, -1):
        with pytest.raises(InputError, match=f"input_ids: {odd}; ids below 11"):
            model.generate(torch.tensor([[3, odd]]))


# ---------------------------------------------------------------------------------------------------------- environment

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [(name, None, "missing") for name in RANKS]
    + [(name, odd, repr(odd)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") for odd in ("", "x", "-1", "1.0", "²", "9" * 30)]
    + [("RANK", "2", "'2'; a number from 0 to 1;"), ("WORLD_SIZE", "0", "'0'"),
       ("MASTER_PORT", "65536", "'65536'; a number from 1"),
       ("MASTER_PORT", "0", "'0'")],
)  # fmt: skip
def test_launchers_numbers(name: str, value: str | None, said: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, good in RANKS.items():
        monkeypatch.setenv(key, good)
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(InputError) as error:
        mc.load(made / "gpt2", machine=Machine(fsdp=2, device="cpu"))
    wanted = "free on the first" if name == "MASTER_PORT" else "torchrun"
    assert str(error.value).startswith(f"environment: {name}: {said}") and wanted in str(error.value)


@pytest.mark.parametrize("argv", [["convert", "no/body", "out"], command(tokenizer="no/body")], ids=["convert", "train"])
def test_token_with_a_newline(argv: list[str], here: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary\nx")
    refused(argv, "environment: HF_TOKEN: a space, a newline or another stray character (not shown)", here, capfd)
    with pytest.raises(InputError) as error:
        mc.load("no/body")
    assert "canary" not in str(error.value)


# ------------------------------------------------------------------------------------------- losses, precision, memory


@pytest.mark.parametrize(
    ("labels", "file", "said"),
    [(1, {}, "num_labels: 1, which means a regression"), (3, {"problem_type": "regression"}, "problem_type: 'regression'"),
     (3, {"problem_type": "multi_label_classification"}, "problem_type: 'multi_label_classification'")],
)  # fmt: skip
def test_a_loss_that_is_not_ours(labels: int, file: dict[str, str], said: str, here: Path) -> None:
    """Scores are given; only training is refused, for transformers would take another loss."""
    config(**file)(here)
    model = mc.load("gpt2", task="classify", num_labels=labels)
    ids = torch.tensor([[1, 2, 3]])
    assert model(ids).logits.shape == (1, labels)
    with pytest.raises(InputError, match=said):
        model(ids, labels=torch.tensor([0]))


def test_a_regression_is_not_trained(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config(problem_type="regression")(here)
    (here / "c.csv").write_text("text,label\nthe cat,0\nthe mat,1\n")
    argv = ["train", "classify", "model=gpt2", "data.path=c.csv", "data.seq_len=16", "max_steps=1", "batch=2",
            "output_dir=out", "data.eval_fraction=0"]  # fmt: skip
    refused(argv, "config.json: problem_type: 'regression'; classes are trained as single_label", here, capfd)


def test_t5_in_half_precision_is_warned_of(here: Path) -> None:
    with pytest.warns(UserWarning, match="T5 in fp16: activations of the published weights overflow; use bf16 or fp32"):
        mc.load("t5", dtype="fp16")


OUT = {
    "host": MemoryError(), "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "mmap": OSError(errno.ENOMEM, "Cannot allocate memory"),
}
PLACES = {  # where memory ends: what is said of it
    "prepare.find_model": "config: {'layers': 1, 'dim': 16, 'heads': 2}: out of memory when the model was loaded; a smaller ",
    "session.accumulate": "micro_batch: 4: out of memory in step 1; micro_batch=2 or machine.recompute=full or data.seq_len=8",
    "session.update": "micro_batch: 4: out of memory in step 1; micro_batch=2 or ",
    "evaluate.evaluate": "micro_batch: 4: out of memory after step 1, in evaluating or saving; micro_batch=2 or ",
    "session.save": "micro_batch: 4: out of memory after step 1, in evaluating or saving; micro_batch=2 or ",
}


OFTEN = "session.accumulate"  # where each kind of lack is tried


@pytest.mark.parametrize(("place", "kind"), [*((place, "host") for place in PLACES), *((OFTEN, kind) for kind in OUT)])
def test_out_of_memory_names_the_key_and_a_value(place: str, kind: str, here: Path, capfd: Any, monkeypatch: Any) -> None:
    """The loop itself may not know of it: the same line comes of each kind and place."""

    def fail(*_: Any, **__: Any) -> None:
        raise OUT[kind]

    more = {"data.eval_fraction": "0.2", "save_steps": "1"}
    with monkeypatch.context() as patch:  # and not `undo`, which would undo conftest.py's too
        patch.setattr(f"modelcenter.train.{place}", fail)
        assert main(command(**more)) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("modelcenter: error: " + PLACES[place]) and len(line) < 320
    if place.startswith("session"):
        assert main(command(**more, micro_batch="2")) == 0  # the advice can be followed in the same folder


def advice(changes: list[str], at: str = "in step 1", **machine: Any) -> str:
    recipe = load_recipe("finetune", ["data.path=a", *changes])
    with pytest.raises(InputError) as refused, Memory(recipe, Machine(**machine)) as memory:
        memory.at = at
        raise MemoryError
    return str(refused.value)


def test_advice_is_what_is_left_to_change() -> None:
    assert advice(["batch=12", "micro_batch=6"]).startswith("micro_batch: 6: out of memory in step 1; micro_batch=3 or ")
    assert advice(["batch=7", "micro_batch=7"]).partition("; ")[2].startswith("micro_batch=1 or machine.recompute=full or ")
    assert advice(["micro_batch=1"]).startswith("machine.recompute: none: out of memory in step 1; machine.recompute=full or ")
    last = advice(["micro_batch=1", "data.seq_len=64"], recompute=True)
    assert last == "data.seq_len: 64: out of memory in step 1; data.seq_len=32 or optimizer.moments=int8"
    assert advice(["adapter.name=lora"], at="").partition("; ")[2].startswith("adapter.quantize=nf4 or ")


@pytest.mark.parametrize(("changes", "machine", "way"), [
    ([], {}, "adapter.name=lora with adapter.quantize=nf4 or a smaller model"),
    ([], {"fsdp": 2}, "adapter.name=lora with adapter.quantize=nf4 or a larger machine.fsdp or a smaller model"),
    ([], {"replicate": 2}, "adapter.name=lora with adapter.quantize=nf4 or machine.fsdp=2 machine.replicate=1 or a smaller model"),
    ([], {"fsdp": 4}, "adapter.name=lora or a larger machine.fsdp or a smaller model"),  # whose shares are smaller than all codes
    (["adapter.name=lora"], {"fsdp": 4}, "a larger machine.fsdp or a smaller model"),
    (["freeze=[embed]"], {"tensor_parallel": 2}, "a smaller model"),
    ([], {"tensor_parallel": 2}, "adapter.name=lora with adapter.quantize=nf4 or a smaller model"),
    ([], {"tensor_parallel": 8}, "adapter.name=lora or a smaller model"),  # of 768 columns no eighth is whole groups of codes
])  # fmt: skip
def test_advice_for_weights_is_what_the_run_would_accept(changes: list[str], machine: dict[str, int], way: str) -> None:
    assert advice(changes, at="", **machine).partition("; ")[2] == way


def test_advice_for_a_step_is_what_the_run_would_accept() -> None:
    assert "data.seq_len=" not in advice(["data.seq_len=3"])  # one token is no sequence
    assert advice([], replicate=4).endswith(" or machine.fsdp=4 machine.replicate=1")
    assert "fsdp" not in advice([], replicate=2, fsdp=2)


def test_other_errors_are_not_hidden() -> None:
    for error in (RuntimeError("shapes do not fit"), OSError(errno.EIO, "I/O error"), KeyError("out of memory")):
        with pytest.raises(type(error)), Memory(load_recipe("pretrain", ["data.path=a"]), Machine()):
            raise error


SMALL = """
import resource, sys
import modelcenter.train.loop
from modelcenter.__main__ import main
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (600 << 20),) * 2)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts pages as Linux does")
def test_memory_that_really_ends(here: Path) -> None:
    argv = command(**{"batch": "8192", "micro_batch": "8192", "config.dim": "256", "machine.threads": "1"})
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SMALL, *argv], capture_output=True, text=True, cwd=here, env=env)
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("modelcenter: error: micro_batch: 8192: out of memory in step 1; micro_batch=4096 or")
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------------ as a process

CHECK = "import sys; from modelcenter.__main__ import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"


def process(*argv: str, cwd: Path, code: str = CHECK) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=cwd, env=env)


@pytest.mark.parametrize("argv", [["convert", "gpt2", "out"], ["generate", "gpt2", "a"], ["train", "finetune", "model=gpt2",
                                  "data.path=a.txt"], ["evaluate", "finetune", "model=gpt2", "data.path=a.txt",
                                  "data.eval_path=a.txt"]], ids=lambda argv: argv[0])  # fmt: skip
@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_headers_and_json_are_checked_before_torch(argv: list[str], broken: str, here: Path) -> None:
    (here / "gpt2" / broken).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    done = process(*argv, cwd=here)
    assert done.stdout == "2 False\n" and done.stderr.startswith(f"modelcenter: error: gpt2/{broken}: "), done.stderr
    assert done.stderr.count("\n") == 1


TWO = """
import sys
from modelcenter.__main__ import main
main(["convert", "t5", "out", "dtype=fp16"])
print("done", file=sys.stderr)
main(["convert", "gpt2", "other", "--debug"])
"""


def test_debug_shows_the_traceback_and_warnings_are_a_line(here: Path) -> None:
    config(n_head=3)(here)
    warned, _, debugged = process(cwd=here, code=TWO).stderr.partition("done\n")
    assert warned.startswith("modelcenter: warning: T5 in fp16: ") and warned.count("\n") == 1
    assert "Traceback" in debugged and debugged.rstrip().endswith("n_embd: 16; a multiple of n_head, which is 3")
