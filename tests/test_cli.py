"""The command line from outside: status, streams, what is left behind, and that it answers at once."""

import gzip
import json
import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import modelcenter as mc
from modelcenter.__main__ import NEEDED, VERBS, main
from modelcenter.checkpoint.atomic import staging
from modelcenter.cli.arguments import Answer, take_apart
from modelcenter.cli.generate import read_prompts
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelcenter", *argv]
    path = str(Path(__file__).parents[1])
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | {"PYTHONPATH": path} | env)


# ------------------------------------------------------------------------------------------------------------- refusals

DATA = ("data.path=a.txt",)
REFUSED = [  # the command, how its one line goes on
    (("--json",), "command line: no verb; "),
    (("trian", "--help"), "command line: trian: unknown verb; did you mean 'train'?"),
    (("help", "trian"), "command line: trian: unknown verb; did you mean 'train'?"),
    (("trian",), "command line: trian: unknown verb; did you mean 'train'?"),
    (("finetune", *DATA), "command line: finetune: unknown verb; modelcenter train finetune ..."),
    (("train", "classify", *DATA, "best=acc"), "command line: best: 'acc'; did you mean 'accuracy'?"),
    (("-v",), "command line: -v: unknown option; "),
    (("--json=1", "list"), "command line: --json=1: takes no value; "),
    (("list",), "command line: models|recipes|machines|keys: missing; "),
    (("list", "recipe"), "command line: list recipe: unknown; did you mean 'recipes'?"),
    (("list", "recipes", "keys"), "command line: keys: not wanted here; "),
    (("list", "keys", "lora"), "command line: lora: not wanted here; modelcenter list keys, which are any recipe's; "),
    (("list", "recipes", "a=b"), "command line: a=b: not wanted here; "),
    (("doctor", "--machine", "cpu"), "command line: --machine: not wanted here; "),
    (("copy", "finetun"), "finetun: no such recipe; did you mean 'finetune'?"),
    (("compare", "a"), "command line: RUN: 1 given; "),
    (("plan", "model=gpt2", "--gpu", "8"), "command line: gpu: unknown key; did you mean 'gpus'?"),
    (("plan", "finetune", *DATA, "machine.device=cpu", "packing=true", "fsdp=2"), "command line: fsdp: unknown key; "),
    (("plan", "finetune", *DATA, "batch=0"), "command line: batch: 0; an integer at least 1"),
    (("launch", "finetune", *DATA, "--slurm", "nodes=0"), "command line: nodes: 0; an integer at least 1"),
    (("evaluate", "."), ".: no weights; "),
    (("copy", "absent.yaml"), "absent.yaml: no such file; "),
    (("convert",), "command line: source: missing; "),
    (("merge",), "command line: adapter: missing; "),
    (("merge", "no/such/folder", "out"), "no/such/folder: no such folder; "),
    (("average", "a", "dtype=fp32"), "command line: MODEL MODEL ... OUT: 1 given; two models, or more, and then the"),
    (("tokenize", "a.txt", "out"), "command line: tokenizer: missing; "),
    (("tokenize", "absent.txt", "out", "--tokenizer", "."), "absent.txt: path: no such file, seen from "),
    (("convert", "a"), "command line: out: missing; "),
    (("convert", "a", "b", "c"), "command line: c: not wanted here; "),
    (("convert", "a", "b", "--dtyp", "bf16"), "command line: dtyp: unknown key; did you mean 'dtype'?"),
    (("convert", "a", "b", "source=c"), "command line: source: given twice; "),
    (("generate",), "command line: model: missing; a folder, a preset or a hub id"),
    (("generate", "m"), "command line: prompt: missing; "),
    (("generate", "m", "x=1, so what is x?"), "command line: x=1, so what is x?: reads as a setting, and there is none of this "),
    (("generate", "m", "p", "prompts=a.txt"), "command line: prompt: given, and so is prompts; "),
    (("generate", "m", "prompts=a.txt", "--stream"), "command line: stream: true with several texts; "),
    (("generate", "m", "p", "num_beams=3", "num_beam_groups=2"), "command line: num_beam_groups: 2 for 3 beams; "),
    (("generate", "m", "p", "out=good.jsonl"), "good.jsonl: exists; a new file, or this one moved away"),
    (("generate", "m", "p", "out=o.csv"), "command line: out: o.csv; a name that ends in .jsonl, the format that is written"),
    (("generate", "m", "prompts=absent.txt"), "absent.txt: prompts: no such file, seen from "),
    (("generate", "m", "p", "temperature=0"), "command line: temperature: 0; a number at least 1e-06, or none and do_sample=false"),
    (("generate", "m", "p", "--temperature", "0.0"), "command line: temperature: 0.0; a number at least 1e-06, or none and do_"),
    (("generate", "m", "p", "temperature=-1"), "command line: temperature: -1; a number at least 1e-06"),
    (("generate", "m", "p", "top_p=1.5"), "command line: top_p: 1.5; a number above 0 and at most 1"),
    (("generate", "m", "p", "--max-new-tokens", "0"), "command line: max_new_tokens: 0; an integer at least 1"),
    (("train",), "command line: RECIPE: missing; modelcenter list recipes has them"),
    (("train", "finetun"), "finetun: no such recipe; did you mean 'finetune'?"),
    (("train", "absent.yaml"), "absent.yaml: no such file; "),
    (("train", "finetune", "mlm", *DATA), "command line: mlm: not wanted here; "),
    (("train", "finetune", *DATA, "optimizer.lr=-1"), "command line: optimizer.lr: -1; a number above 0"),
    (("train", "finetune", *DATA, "--optimizer.lr", "nan"), "command line: optimizer.lr: 'nan'; a number above 0"),
    (("train", "finetune", *DATA, "--lr=1"), "command line: lr: unknown key; did you mean 'optimizer.lr'?"),
    (("train", "finetune", *DATA, "batch=1", "batch=2"), "command line: batch: given twice; "),
    (("train", "finetune", *DATA, "learning_rate=1", "optimizer.lr=1"), "command line: learning_rate: given, and so "),
    (("train", "finetune", *DATA, "--machine", "cpuu"), "cpuu: no such machine profile; did you mean 'cpu'?"),
    (("train", "finetune", *DATA, "machine.fsdp=0"), "command line: machine.fsdp: 0; an integer at least 1"),
    (("train", "finetune", *DATA, "machine.timeout=1e7"), "command line: machine.timeout: 10000000.0; a number at least 1 and "),
    (("train", "finetune", *DATA, "batch_tokens=600000000"), "command line: batch_tokens: 600000000; at most 1048576 sequences "),
    (("train", "finetune", *DATA, "machine.thread=2"), "command line: machine.thread: unknown key; "),
    (("train", "bad.yaml"), "bad.yaml: line 2: the anchor &x; "),
    (("train", "twice.yaml"), "twice.yaml: model: given on line 1 and on line 2; "),
    (("train", "deep.yaml"), "deep.yaml: line 1: nested more than 32 deep; "),
    (("train", "good.yaml", "batch=0"), "command line: batch: 0; an integer at least 1"),
    (("train", "none.yaml"), "none.yaml: max_steps: missing, and so is num_epochs; "),
    (("evaluate", "good.yaml"), "data.eval_path: missing; "),
    (("evaluate", "m", "--lm-eval", "piqa", "--machine", "node8"), "lm_eval: with a machine, or under torchrun; one process"),
    (("evaluate", "runs/absent"), "runs/absent: no such folder, and no recipe; a run's output_dir, "),
    (("train", "finetune", "data.pth=a.txt"), "command line: data.pth: unknown key; did you mean 'data.path'?"),
    (("train", "finetune", *DATA, "leraning_rate=1"), "command line: leraning_rate: unknown key; did you mean 'learning_rate'?"),
    (("train", "finetune", "pth=a.txt"), "command line: pth: unknown key; did you mean 'data.path'?"),
    (("train", "finetune", *DATA, "machinq.fsdp=2"), "command line: machinq.fsdp: unknown key; did you mean 'machine.fsdp'?"),
    (("train", "finetune", *DATA, "fsdp=2"), "command line: fsdp: unknown key; did you mean 'machine.fsdp'?"),
    (("train", "finetune", *DATA, "optimiser.lr=2"), "command line: optimiser.lr: unknown key; did you mean 'optimizer.lr'?"),
    (("train", "translate", *DATA, "metrics=[]", "generation.num_beams=2"), "command line: generation.num_beams: given with no"),
    (("train", "pretrain", *DATA, "schedule.name=constant", "schedule.min_lr_ratio=0.2"),
     "command line: schedule.min_lr_ratio: 0.2 with name constant, which has none; leave it out, or 0.0"),
    (("train", "finetune", *DATA, "batch=4", "batch_tokens=100"), "command line: batch: 4 beside batch_tokens 100, which counts "),
    (("train", "finetune", *DATA, "modle.lr=2"), "command line: modle: unknown key; did you mean 'model'?"),
    (("train", "finetune", *DATA, "optim.lr=2"), "command line: optim: unknown key; here it is optimizer.name and "),
    (("train", "finetune", *DATA, "machine.fsdp=1", "machine.fsdp=2"), "command line: machine.fsdp: given twice; keep one of "),
    (("train", "finetune", *DATA, "machine.fdsp=2"), "command line: machine.fdsp: unknown key; did you mean 'machine.fsdp'?"),
    (("train", "finetune", *DATA, "machine=gpu24"), "command line: machine=gpu24: a machine is no part of a recipe; --mach"),
    (("train", "finetune", "good.yaml"), "command line: good.yaml: a file without its key; data.path=good.yaml"),
    (("train", "good.txt"), "command line: good.txt: a file, and no recipe; a recipe first, such as finetune data.path=good.txt"),
    (("train", "finetune", *DATA, "batch", "=", "4"), "command line: batch: not wanted here; key=value is written without spaces"),
    (("train", "good.yaml", "data=a.txt"), "command line: data: 'a.txt'; a mapping, such as data.path"),
    (("train", "finetune", *DATA, "--batch-size", "8"), "command line: batch_size: unknown key; here it is micro_batch per GPU; "),
    (("train", "finetune", *DATA, "--overwrite_output_dir=true"),
     "command line: overwrite_output_dir: unknown key; leave it out: no run is overwritten: remove its folder, or give another "),
    (("plan", "model=gpt2-base"), "model: 'gpt2-base'; a preset, or a folder with a config.json; did you mean 'gpt2'?"),
    *((("plan", f"model={name}"), f"model: '{name}'; a preset, or a folder with a config.json; no such family yet: ")
      for name in ("roberta-base", "gptj-6b", "cpm1-large", "CPM2-large")),
    (("train", "finetune", *DATA, "freeze=head"), "command line: freeze: 'head'; a list of text: freeze=[head]"),
    (("train", "finetune", *DATA, "freeze=[*.0]"), "command line: freeze: '[*.0]'; a list of text: with quotes around what "),
    (("train", "finetune", *DATA, "layers=2"), "command line: layers: unknown key; here it is config.layers"),
    (("train", "lora", *DATA, "adapter.r=2"), "command line: adapter.r: unknown key; here it is adapter.rank"),
    (("evaluate",), "command line: RUN: missing; a run's output_dir, "),
    (("generate", "m", "once", "upon"), 'command line: upon: not wanted here; one "PROMPT", in quotes'),
    (("tokenize", "a.txt,b.txt", "out", "--tokenizer", "."), "a.txt,b.txt: path: no such file; of several files a list: "),
    (("train", "glue/sst"), "glue/sst: no such recipe; did you mean 'glue/sst2'?"),
    (("train", "finetune", *DATA, "gpus=2"), "command line: gpus: unknown key; here it is machine.devices, or CUDA_VIS"),
    (("train", "finetune", *DATA, "machine.device=cuda:2"), "command line: machine.device: cuda:2; CUDA_VISIBLE_DEVICES=2 before "),
    (("train", "finetune", *DATA, "model=" + "m" * 300), f"{'m' * 100}: File name too long; "),
    (("train", "finetune", *DATA, "model=good.yaml"), "good.yaml: model: a file; the folder that holds it: ."),
    (("train", "finetune"), "command line: data.path: missing; give data.path=FILE"),
    (("train", "finetune", *DATA, "data.prompt_key=p"), "command line: data.response_key: absent; prompt_key and response_key go "),
    (("train", "gpt2"), "gpt2: no such recipe; a model is given after one: finetune model=gpt2; known: "),
    (("plan", "gpt2"), "gpt2: no such recipe; a model is given after one: finetune model=gpt2; known: "),
    (("plan", "qlora", "model=llama-2-7b"), "command line: data.path: missing; data.path=FILE; or, without data, plan "
                                            "model=llama-2-7b adapter.name=lora adapter.quantize=nf4 in place of the recipe"),
    (("plan", "finetune"), "command line: data.path: missing; data.path=FILE; or, without data, plan model=PRESET in place"),
    (("plan", "lora", "batch=0"), "command line: batch: 0; an integer at least 1"),
    (("evaluate", "gpt2"), "data.path: missing; give data.path=FILE"),
    (("evaluate", "me/mine"), "me/mine: no such folder, and no recipe; a run's output_dir, a model's folder, or a recipe; a "),
    (("evaluate", "finetun", *DATA), "finetun: no such folder, and no recipe; a run's output_dir, "),  # nor asked of the hub
    (("evaluate", "finetun", *DATA, "model=m"), "finetun: no such recipe; did you mean 'finetune'?"),
    (("train", "finetune", *DATA, "--machine"), "command line: --machine: no value; the name of a machine profile"),
    (("train", "finetune", *DATA, "--machine", "cpu", "--machine=node8"), "command line: --machine: given twice; keep one of them"),
    (("train", "finetune", "+data.path=a.txt"), "command line: +data.path=a.txt: not wanted here; data.path=a.txt"),
    (("launch", "--slurm", "pretrain", *DATA), "command line: slurm: 'pretrain'; true or false; what is not for --slurm goes bef"),
    (("generate", "m", "--stream", "Once"), "command line: stream: 'Once'; true or false; what is not for --stream goes before it"),
    (("plan", "modle=gpt2", "--gpus", "8"), "command line: modle: unknown key; did you mean 'model'?"),
    (("plan", "--gpus", "8"), "command line: RECIPE: missing; a recipe, or model=PRESET"),
    (("train", "finetune", *DATA, "base=1"), "command line: base: unknown key; known: adapter, "),
    (("train", "good.yaml", "data.prompt_key=p"), "good.yaml: data.response_key: absent; prompt_key and response_key go "),
]
GOOD = "model: gpt2\noutput_dir: out\nmax_steps: 1\ndata: {path: a.txt}\n"
FILES = {
    "bad.yaml": "model: gpt2\nbatch: &x 1\n",
    "twice.yaml": "model: gpt2\nmodel: gpt2\n",
    "deep.yaml": "[" * 100_000,
    "good.yaml": GOOD,
    "good.txt": "text",
    "good.jsonl": "{}",
    "none.yaml": GOOD.replace("max_steps: 1\n", ""),
}


@pytest.mark.parametrize(("argv", "found"), REFUSED, ids=[" ".join(argv) or "nothing" for argv, _ in REFUSED])
def test_refused(argv: tuple[str, ...], found: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES.items():
        (here / name).write_text(text)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    where, _, key = found.partition(": ")  # `none.yaml: ` or, with its full path, a packaged file
    assert out == "" and err.startswith(f"modelcenter: error: {where}") and key in err
    assert err.count("\n") == 1 and len(err) <= len("modelcenter: error: ") + 300 + 1
    assert sorted(p.name for p in here.iterdir()) == sorted(FILES)


def test_a_model_without_its_key_is_named_by_that(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, key in ((here / "corpus", "data.path"), (here / "m", "model"), (here / "a", "model")):
        folder.mkdir()
        if key == "model":
            (folder / ("config.json" if folder.name == "m" else "adapter_config.json")).write_text("{}")
        assert main(["train", "finetune", folder.name, *DATA]) == 2
        assert capsys.readouterr().err.endswith(f" without its key; {key}={folder.name}\n")
    assert main(["plan", "model=a"]) == 2  # its base alone is no plan of it
    assert "command line: model: a, an adapter; model=BASE adapter.name=lora; or, " in capsys.readouterr().err


def test_a_shape_that_is_not_the_model_s_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the command line names a model, and the recipe's own config shapes it."""
    said = "config.layers=6 config.dim=384 config.heads=6 (pretrain's) shape gpt2-xl; config={} for its own shape\n"
    assert main(["train", "pretrain", "data.path=none.txt", "model=gpt2-xl"]) == 2
    assert said in capsys.readouterr().err
    for more in (["model=gpt2-xl", "config={}"], ["model=gpt2-xl", "config.layers=2"], []):
        assert main(["train", "pretrain", "data.path=none.txt", *more]) == 2
        assert " shape gpt2" not in capsys.readouterr().err


def test_a_folder_that_is_gone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "gone").mkdir()
    os.chdir(here / "gone")
    (here / "gone").rmdir()
    try:
        assert main(["train", "finetune", *DATA]) == 2
    finally:
        os.chdir(here)
    assert capsys.readouterr().err == "modelcenter: error: .: No such file or directory; a folder that is there: cd to it again\n"


def test_a_run_that_was_moved_is_not_begun_anew(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own recipe names the old place, or one below another folder; which of the two is meant is for the user to say."""
    moved = here / "moved" / "recipe.yaml"
    moved.parent.mkdir()
    moved.write_text(GOOD.replace("a.txt", "gone.txt"))
    (moved.parent / "environment.json").write_text("[]")
    assert main(["train", "moved/recipe.yaml"]) == 2
    said = capsys.readouterr().err
    assert "moved/recipe.yaml: output_dir: out, which is not there; output_dir=moved goes on with the run of that folder, " in said
    for settings in (["--output-dir", "moved"], ["output_dir=out"]):  # said: only the data are missed
        assert main(["train", "moved/recipe.yaml", *settings]) == 2
        assert "gone.txt: data.path: no such file" in capsys.readouterr().err
    (moved.parent / "environment.json").rename(here / "environment.json")  # a recipe that somebody has sent
    assert main(["train", "moved/recipe.yaml"]) == 2 and "gone.txt" in capsys.readouterr().err
    (here / "environment.json").rename(moved.parent / "environment.json")
    (here / "out").mkdir()  # a run of that name, which says itself whether it is this one
    assert main(["train", "moved/recipe.yaml"]) == 2 and "gone.txt" in capsys.readouterr().err


def test_refused_as_a_process(tmp_path: Path) -> None:
    """Status and streams as a shell sees them, at once: torch, whose import takes longer than all the rest, would end them."""
    (tmp_path / "r.yaml").write_text("a: 1\x1b[2J")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = cli("train", "r.yaml", cwd=tmp_path, PYTHONPATH=f"{tmp_path / 'bare'}:{Path(__file__).parents[1]}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "modelcenter: error: r.yaml: character 4: U+001B; remove the control character\n"
    done = cli("train", "finetune", "data.path=\x1b[2J", "b\x07tch=1", cwd=tmp_path)
    assert done.stderr == "modelcenter: error: command line: b\\x07tch=1: not wanted here; see --help after the verb\n"
    done = cli("train", "finetune", "--debug", "batch=0", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "batch: 0; an integer" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bare", "r.yaml"]


def test_every_verb_is_refused_somewhere() -> None:
    assert {argv[0] for argv, _ in REFUSED if argv} >= set(VERBS)


# -------------------------------------------------------------------------------------------------------------- answers


def test_help_needs_no_torch_and_answers_at_once(tmp_path: Path) -> None:
    code = ("import sys; before = {*sys.modules}; from modelcenter.__main__ import main; main(['--help'])\n"
            "found = {name.partition('.')[0] for name in {*sys.modules} - before} - sys.stdlib_module_names\n"
            "print(sorted(name for name in found if 'cython' not in name))")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.startswith("usage: modelcenter VERB") and done.stdout.endswith("\n['modelcenter', 'yaml']\n")
    for verb in VERBS:
        assert verb in done.stdout


def test_a_command_line_that_says_nothing_asks_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["help"], ["--help"], ["-h"]):
        assert main(argv) == 0 and capsys.readouterr().out.startswith("usage: modelcenter VERB")


def test_help_without_docstrings() -> None:
    """As of an interpreter with PYTHONOPTIMIZE=2."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for argv in ([], ["train", "--help"]):
        done = subprocess.run([sys.executable, "-OO", "-m", "modelcenter", *argv], capture_output=True, text=True, env=env)
        assert (done.returncode, done.stderr) == (0, "") and "modelcenter" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"modelcenter {verb}" in said
    assert main(["help", verb]) == 0 and capsys.readouterr().out == said
    commands = said.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert commands and all(line.startswith("modelcenter ") for line in commands), "a line is a command"
    assert ('max_shard_size="5GB"' in said) == (verb in ("convert", "merge", "average"))


def test_list(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, first in {"recipes": "classify", "machines": "auto", "keys": "model"}.items():
        assert main(["list", kind]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0].startswith(first)
        if kind == "keys":  # a column is as wide as most of its cells, not as the widest
            assert next(line for line in said if line.startswith("seed ")).index("of weights, dropout") < 100
        assert main(["list", kind, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["name"] == first


def test_list_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "models", "--json"]) == 0
    models = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert models["gpt2"]["parameters"] == "124,439,808" and models["gpt2"]["hub"] == "openai-community/gpt2"


def test_copy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["copy", "finetune"]) == 0
    assert (here / "finetune.yaml").read_text().startswith("# Fine-tune")
    (here / "finetune.yaml").write_text("mine")
    capsys.readouterr()
    assert main(["copy", "finetune"]) == 2
    assert capsys.readouterr().err == (
        "modelcenter: error: finetune.yaml: exists; move it away, or go to another folder\n"
    )
    assert (here / "finetune.yaml").read_text() == "mine"


def test_lm_eval_is_an_extra(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "modelcenter.train.harness", raising=False)
    assert main(["evaluate", "m", "--lm-eval", "hellaswag"]) == 2
    assert capsys.readouterr().err.endswith("; pip install modelcenter[lm-eval]\n")
    assert main(["evaluate", "m", "--lm-eval", "hellaswag", "limits=3"]) == 2
    assert "limits: unknown key; did you mean 'limit'?" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["python"] == ".".join(map(str, sys.version_info[:3])) and said["threads"] >= 1 and said["devices"]
    assert {"torch", "transformers", "extension", "disk_free", "hub_cache", "hub_offline"} <= set(said)


@pytest.mark.parametrize(("lacking", "status", "said"), [
    ("torch", 2, "modelcenter: error: torch: not installed; pip install torch, the build that fits your machine\n"),
    ("huggingface_hub", 2, "modelcenter: error: huggingface_hub: not installed; pip install huggingface_hub\n"),
    ("yaml", 2, "modelcenter: error: PyYAML: not installed; pip install PyYAML\n"),
    ("modelcenter.doctor", 1, "Traceback"),
], ids=["torch", "hub", "yaml", "ours"])
def test_what_is_needed_and_not_installed_is_a_line(lacking: str, status: int, said: str) -> None:
    program = f"import sys; sys.modules[{lacking!r}] = None; from modelcenter.__main__ import main; sys.exit(main(['doctor']))"
    env = os.environ | {"PYTHONPATH": str(Path(mc.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (status, "") and done.stderr.startswith(said)
    assert status == 1 or done.stderr == said


def test_what_may_lack_is_what_the_package_needs() -> None:
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        asked = tomllib.load(file)["project"]["dependencies"]
    assert {*NEEDED, "PyYAML"} == {one.partition(">")[0] for one in asked}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("modelcenter 0.")


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(VERBS, "doctor", stop)  # type: ignore[misc]
    assert main(["doctor"]) == 130


EARLY = """
import os, runpy, signal, sys
def press(event, given):
    if event == "import" and given[0] == "modelcenter.cli.arguments":
        os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.addaudithook(press)
sys.argv[0] = sys.argv[1]
try:
    runpy.run_module("modelcenter", run_name="__main__") if sys.argv[1] == "-m" else __import__("modelcenter.__main__")
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize(("program", "ended"), [("-m", (-signal.SIGINT, "")), ("/usr/bin/modelcenter", (-signal.SIGINT, "")),
                                                ("mine.py", (0, "raised\n"))])
def test_ctrl_c_before_the_command_listens(program: str, ended: tuple[int, str]) -> None:
    """While its modules are imported it ends without a traceback of that; of another program it stays that program's matter."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", EARLY, program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (*ended, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_removes_what_is_half_done(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capfd: Any) -> None:
    def write(_: object) -> Answer:
        with staging(tmp_path / "out") as place:
            (place / "half").write_text("")
            os.kill(os.getpid(), number)
            raise AssertionError("it goes on")

    monkeypatch.setitem(VERBS, "doctor", write)
    assert main(["doctor"]) == 128 + number and not list(tmp_path.iterdir())
    assert capfd.readouterr().err == f"\n{number.name}: ending; once more ends it now\n"


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m modelcenter list keys | true; echo ${{PIPESTATUS[0]}}"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0\n", "")


SMALL = """
import resource, sys
from modelcenter.__main__ import main
from modelcenter.cli.arguments import new_file
from modelcenter.errors import InputError
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
assert main(["copy", "finetune"]) == 2
assert main(["launch", "finetune", "--slurm", "data.path=datasets:a"]) == 2
try:
    with new_file("texts.jsonl") as out:
        for n in range(10, 50):
            print(f"line {n}", file=out)
except InputError as error:
    print(error, file=sys.stderr)
"""


def test_a_small_disk_takes_whole_lines_and_no_half_a_file(tmp_path: Path) -> None:
    """Every file may have 100 bytes: what there is of a list is kept, a recipe or a job is there as a whole or not at all."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", SMALL], cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]
    assert (tmp_path / "texts.jsonl").read_text().splitlines() == [f"line {n}" for n in range(10, 22)]
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all("File too large; " in line for line in lines)
    assert lines[2] == "texts.jsonl: File too large; a place with room; it holds what came before"


CLOSED = """
import os, sys
from modelcenter.__main__ import main
main(["--version"])
assert os.open("mine", os.O_WRONLY | os.O_CREAT) > 2
print("lost", file=sys.stderr, flush=True)
os.system("echo lost too >&2")
"""


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(tmp_path: Path, closed: str) -> None:
    """A file that is opened where standard error was would have in it what is said there."""
    (tmp_path / "it.py").write_text(CLOSED)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(["bash", "-c", f"{sys.executable} it.py {closed}"], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "mine").read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's")
def test_an_answer_that_finds_no_room(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "modelcenter", "list", "keys"], stdout=full, stderr=subprocess.PIPE, text=True,
                              env=env, cwd=tmp_path)
    wanted = "modelcenter: error: standard output: No space left on device; a place that has room for the answer\n"
    assert (done.returncode, done.stderr) == (2, wanted)


def test_an_answer_in_a_terminal_of_few_letters(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "\N{LATIN SMALL LETTER E WITH ACUTE}.yaml").write_text(GOOD)
    done = cli("copy", "in/\N{LATIN SMALL LETTER E WITH ACUTE}.yaml", cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9.yaml written; next: modelcenter train \\xe9.yaml\n", "")


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("argv", "names", "settings"),
    [
        (["train", "r", "a.b=1", "--c", "2"], ["train", "r"], ["a.b=1", "c=2"]),
        (["--c=2", "train", "r"], ["train", "r"], ["c=2"]),
        (["train", "--a-b", "-1", "c-d.e=1"], ["train"], ["a_b=-1", "c_d.e=1"]),
        (["train", "--packing", "--seed", "3"], ["train"], ["packing=true", "seed=3"]),
        (["train", "r", "--resume"], ["train", "r"], ["resume=auto"]),
        (["train", "r", "--resume", "--seed=1"], ["train", "r"], ["resume=auto", "seed=1"]),
        (["convert", "./a=b", "out/c=d"], ["convert", "./a=b", "out/c=d"], []),
        (["generate", "m", "prompt=a=b c"], ["generate", "m"], ["prompt=a=b c"]),
        (["generate", "--do-sample", "seed=3"], ["generate"], ["do_sample=true", "seed=3"]),
        (["train", "--k", ""], ["train"], ["k="]),
    ],
)
def test_take_apart(argv: list[str], names: list[str], settings: list[str]) -> None:
    args = take_apart([*argv, "--machine", "m.yaml", "--json"])
    assert (args.names, args.settings, args.machine, args.json) == (names, settings, "m.yaml", True)


def test_take_apart_refuses() -> None:
    with pytest.raises(InputError, match="-k: unknown option"):
        take_apart(["-k"])


# ------------------------------------------------------------------------------------------------------------ the work


def test_evaluate_asks_the_model_what_a_folder_is_for(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its head and its positions, where they are fewer than data.seq_len is by default; an adapter's are its base's."""
    (here / "a.txt").write_text("the cat sat on the mat.\n" * 60)
    rest = ["data.path=a.txt", "data.seq_len=16", "max_steps=1", "schedule.warmup_steps=0", "data.eval_fraction=0.1"]
    sizes = [f"config.{key}" for key in ("layers=1", "dim=16", "heads=2", "positions=16")]
    assert main(["train", "pretrain", *rest, *sizes, "tokenizer=char", "--output-dir", "out"]) == 0
    assert main(["train", "lora", *rest, "model=out/model", "--output-dir", "lora"]) == 0
    for folder in ("out/model", "lora/model"):
        capsys.readouterr()
        assert main(["evaluate", folder, "data.path=a.txt"]) == 0
        found = capsys.readouterr().out.splitlines()
        assert found[0] == "data.seq_len: 16, as many as the model has positions" and found[1].startswith("examples ")
        assert main(["evaluate", folder, "data.path=a.txt", "data.seq_len=16"]) == 0
        assert capsys.readouterr().out.splitlines() == found[1:]
    assert main(["generate", "out/model", "the cat", "--json"]) == 0  # nobody says how many tokens: as many as there is room for
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 16


@pytest.mark.filterwarnings("always:machine.offload:UserWarning")
def test_an_evaluation_and_a_plan_say_what_is_set_for_nothing(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As training does, in whose first lines it stands; ranks too, of which one speaks."""
    (here / "a.jsonl").write_text('{"text": "the cat sat on the mat."}\n' * 60)
    tokenizer = train_tokenizer(["the cat sat on the mat."], 270, "bpe")
    mc.build("gpt2", config={"layers": 1, "dim": 16, "heads": 2, "positions": 16, "vocab": len(tokenizer)}).save_pretrained("m")
    tokenizer.save("m")
    idle = ["data.header: false, but no data are csv or tsv; leave it out, or say data.format=csv or tsv",
            "machine.offload: true, but on a CPU the host's memory holds everything already; leave it out"]  # fmt: skip
    for command in (["evaluate", "m"], ["plan", "finetune", "model=m"]):
        told = []
        for more in ([], ["data.header=false", "machine.offload=true"]):
            assert main([*command, "data.path=a.jsonl", "data.seq_len=16", "machine.device=cpu", *more]) == 0
            both = capfd.readouterr()
            told.append(both.out.splitlines())
            assert "machine.offload" not in both.err
            if dist.is_initialized():  # offload has a group, of this rank alone
                dist.destroy_process_group()
        assert told[1][:2] == idle and not {*told[0]} & {*idle} and len(told[1]) >= len(told[0]) + 2
    ranks = ["machine.device=cpu", "machine.fsdp=2", "machine.threads=1"]
    assert main(["evaluate", "m", "data.path=a.jsonl", "data.seq_len=16", *ranks, "data.header=false"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith("examples 32, ") and said.err.splitlines() == idle[:1]


def test_evaluate_takes_a_preset_and_a_hub_id(here: Path, capsys: pytest.CaptureFixture[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """As generate and convert do; the hub's cache has it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (here / "a.txt").write_text("the cat sat on the mat.\n" * 60)
    repo = here / "hub" / "models--openai-community--gpt2"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    tokenizer = train_tokenizer(["the cat sat on the mat."], 270, "bpe")
    sizes = {"layers": 1, "dim": 16, "heads": 2, "positions": 16, "vocab": len(tokenizer)}
    mc.build("gpt2", config=sizes).save_pretrained(repo / "snapshots" / ("0" * 40))
    tokenizer.save(repo / "snapshots" / ("0" * 40))
    for name in ("gpt2", "openai-community/gpt2"):
        assert main(["evaluate", name, "data.path=a.txt", "data.seq_len=16", "machine.device=cpu"]) == 0
        assert " loss 5.5" in capsys.readouterr().out
    assert main(["evaluate", "me/mine", "data.path=a.txt"]) == 2
    assert "me/mine: offline, and me/mine (revision main) is neither a folder nor cached; " in capsys.readouterr().err


def test_a_line_of_a_file_is_one_prompt(here: Path) -> None:
    """Whatever else Python ends lines at."""
    (here / "p.txt").write_text("the\u2028cat\na\x0cmat\x85\n\n")
    assert [record.fields["q"] for record in read_prompts("p.txt", "q")] == ["the\u2028cat", "a\x0cmat\x85"]


def test_prompts_come_through_a_pipe(here: Path) -> None:
    os.mkfifo("pipe")
    with ThreadPoolExecutor(1) as writer:
        writer.submit((here / "pipe").write_text, "the cat\n\nsat\n")
        found = [(record.fields["q"], record.place()) for record in read_prompts("pipe", "q")]
    assert found == [("the cat", "line 1"), ("sat", "line 3")]


def test_a_model_that_writes_nothing_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"layers": 1, "dim": 16, "heads": 2, "hidden": 32, "vocab": 300}
    mc.build("bert-base-uncased", config=sizes, task="classify", num_labels=2).save_pretrained("judge")
    train_tokenizer(["some text"], 300, "roberta").save("judge")
    assert main(["generate", "judge", "some"]) == 2
    assert "judge: generate: a model with the task 'classify'; one that predicts the next token; " in capsys.readouterr().err


def test_train_evaluate_generate_convert(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One small run through every verb that does work; the numbers of one verb agree with those of another."""
    (here / "a.txt").write_text("the cat sat on the mat. " * 60)
    tiny = ["config.layers=1", "config.dim=16", "config.heads=2", "data.seq_len=16", "batch=4", "max_steps=4"]
    saving = ["eval_steps=4", "save_steps=4", "schedule.warmup_steps=1", "--machine", "cpu", "machine.threads=1"]
    command = ["train", "pretrain", "data.path=a.txt", "tokenizer=char", *tiny, *saving, "--output-dir", "out"]
    assert main([*command, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert (run["output_dir"], run["step"], run["stopped"]) == ("out", 4, False)
    assert main([*command, "resume=never"]) == 2  # an output folder that exists
    assert "holds a run already" in capsys.readouterr().err

    assert main(["evaluate", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_loss"] == pytest.approx(run["metrics"]["eval_loss"], rel=1e-5)

    for own in ("model=gpt2", "config.layers=2", "tokenizer=byte", "init=random"):
        assert main(["evaluate", "out", own]) == 2
        assert f"{own.split('=')[0].split('.')[0]}: given, where the model of out is judged as it is; " in capsys.readouterr().err

    (here / "b.txt").write_text("the mat sat on a cat. " * 40)  # evaluated on whole: what training would hold out is no matter
    found = []
    for words in (["out", "data.path=b.txt"], ["out", "data.eval_path=b.txt"],
                  ["out/model", "data.path=b.txt", "data.seq_len=16"], ["out", "data.path=b.txt", "data.eval_fraction=0.5"],
                  ["out/model", "data.path=b.txt", "data.eval_fraction=0.5", "data.seq_len=16"]):
        assert main(["evaluate", *words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for other in found[1:3]:  # sums of torch's products can depend on where in memory weights lie
        assert other == pytest.approx(found[0], rel=1e-6)
    assert found[3]["eval_targets"] < 0.6 * found[0]["eval_targets"] and found[4] == pytest.approx(found[3], rel=1e-6)

    assert main(["convert", "out/model", "copy", "--max-shard-size", "8KB", "--dtype", "fp32"]) == 0
    assert (here / "copy" / "model.safetensors.index.json").exists() and (here / "copy" / "tokenizer.json").exists()
    capsys.readouterr()
    said = []
    for model in ("out/model", "copy"):
        assert main(["generate", model, "the cat", "--do-sample", "seed=1", "max_new_tokens=8", "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert main(["generate", "copy", "the cat", "--do-sample", "seed=1", "max_new_tokens=8", "--stream"]) == 0
    assert capsys.readouterr().out == said[0]["text"] + "\n"
    (here / "p.txt").write_text("the cat\r\n\r\na mat. the cat\r\nthe\r\n", encoding="utf-8-sig")  # as Windows writes it
    (here / "z.txt.gz").write_bytes(gzip.compress((here / "p.txt").read_bytes()))
    (here / "mac.txt").write_bytes(b"the cat\ra mat. the cat\r\rthe")
    (here / "p.jsonl").write_text('{"q": "the cat"}\n{"q": "a mat. the cat"}\n{"q": "the"}\n')
    beams = ["num_beams=3", "num_return_sequences=2", "max_new_tokens=4", "stop_strings=zz"]
    for prompts in (["prompts=p.txt"], ["prompts=z.txt.gz"], ["prompts=mac.txt"],
                    ["prompts=p.jsonl", "prompt_key=q", "batch=2", "out=o.jsonl"]):
        assert main(["generate", "copy", *prompts, *beams, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        said_of = ["the cat", "a mat. the cat", "the"]
        assert rows == {"out": "o.jsonl", "texts": 6} or [row["prompt"] for row in rows[::2]] == said_of
    (here / "n.jsonl").write_text('{"a": {"b": "the"}, "c": "cat"}\n')
    for key, text in {"a.b": "the", "{a.b} {c}": "the cat"}.items():  # a field inside another, and several
        assert main(["generate", "copy", "prompts=n.jsonl", f"prompt_key={key}", "max_new_tokens=1", "--json"]) == 0
        assert [row["prompt"] for row in json.loads(capsys.readouterr().out)] == [text]
    (here / "none.jsonl").write_text('{"q": "the cat"}\n{"q": ""}\n')
    assert main(["generate", "copy", "prompts=none.jsonl", "prompt_key=q", *beams]) == 2
    assert "error: none.jsonl: line 2: q has no token; a text to go on with" in capsys.readouterr().err
    (here / "long.txt").write_text(f"the cat\n{'the cat ' * 128}\n")
    assert main(["generate", "copy", "prompts=long.txt"]) == 2  # where nobody said how many tokens are to be new
    assert "error: long.txt: line 2: a prompt of 1024 tokens; fewer than 1024, as many as the" in capsys.readouterr().err
    capsys.readouterr()
    rows = [json.loads(line) for line in (here / "o.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["the cat"] * 2 + ["a mat. the cat"] * 2 + ["the"] * 2
    for row in rows:
        assert main(["generate", "copy", row["prompt"], *beams, "--json"]) == 0
        assert row in json.loads(capsys.readouterr().out)
    assert said[0] == said[1] and said[0]["text"].startswith("the cat") and len(said[0]["ids"]) == len("the cat") + 8

    assert main(["generate", "copy", "the cat", "chat=true"]) == 2
    assert "copy: chat_template: none, for messages to go through; " in capsys.readouterr().err
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}the {% endif %}"
    (here / "copy" / "chat_template.jinja").write_text(template)
    (here / "m.jsonl").write_text('{"messages": [{"role": "user", "content": "the cat"}]}\n')
    answers = []
    for prompt in (["the cat", "chat=true"], ["prompts=m.jsonl"], ["the cat the "]):
        assert main(["generate", "copy", *prompt, "max_new_tokens=8", "--json"]) == 0
        answers += [json.loads(capsys.readouterr().out)]
    talk, plain = answers[0], answers[2]
    assert answers[1] == [talk] and talk["prompt"] == [{"role": "user", "content": "the cat"}]
    assert talk["ids"] == plain["ids"] and plain["text"] == "the cat the " + talk["text"] and len(talk["text"]) == 8
    assert main(["generate", "copy", "the cat", "chat=true", "max_new_tokens=8", "--stream"]) == 0
    assert capsys.readouterr().out == talk["text"] + "\n"
