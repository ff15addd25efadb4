"""Every packaged recipe trains: a few steps of a tiny model on a few records of the kind that it is for."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh import spawn
from test_graphs import Played

import modelcenter as mc
from modelcenter.config import names, packaged
from modelcenter.data.objective import find_objective
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.metrics.suites import SUITES, average
from modelcenter.ops._graph import watch
from modelcenter.parallel.machine import Machine, load_machine
from modelcenter.train import graphs, loop, session
from modelcenter.train import step as stepping
from modelcenter.train.catalog import listing
from modelcenter.train.graphs import Graphs
from modelcenter.train.loop import Run, train
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe

NAMES = [row["name"] for row in listing()]
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "ate", "one", "red", "apple", "while", "it", "rained", "in", "old", "towns")
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {  # a preset, a kind of tokenizer, and what makes the preset tiny
    "gpt": ("gpt2", "bpe", {"layers": 1, "dim": 64, "heads": 2, "positions": 64}),
    "bert": ("bert-base-cased", "roberta", {"layers": 1, "dim": 64, "heads": 2, "hidden": 64, "positions": 64}),
    "t5": ("t5-small", "span", {"layers": 1, "dim": 64, "heads": 2, "head_dim": 32, "hidden": 64}),
    "cpm": ("cpm-ant-10b", "span", {"layers": 1, "dim": 64, "heads": 2, "head_dim": 32, "hidden": 64, "prompt_length": 4}),
}


def sentence(n: int, length: int = 6) -> str:
    return " ".join(WORDS[(n * 7 + k * (n % 3 + 1)) % len(WORDS)] for k in range(length))


def text(n: int) -> dict[str, Any]:
    return {"text": sentence(n, 40)}


def labelled(*keys: str, labels: tuple[Any, ...] = (0, 1), label: str = "label") -> Callable[[int], dict[str, Any]]:
    return lambda n: {key: sentence(n + k) for k, key in enumerate(keys)} | {label: labels[n % len(labels)]}


def pairs(source: str, target: str) -> Callable[[int], dict[str, Any]]:
    return lambda n: {source: sentence(n), target: sentence(n + 1, 4)}


def chat(n: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": sentence(n)}, {"role": "assistant", "content": sentence(n + 1, 4)}]}


def tagged(n: int) -> dict[str, Any]:
    words = sentence(n).split()
    return {"tokens": words, "tags": ["B-ANIMAL" if word == "cat" else "O" for word in words]}


def asked(n: int, none: bool = False) -> dict[str, Any]:
    context, answer = sentence(n, 12), sentence(n, 12).split()[3]
    found = [] if none and n % 2 else [answer]
    return {"id": str(n), "title": "t", "context": context, "question": f"what {sentence(n, 2)}?",
            "answers": {"text": found, "answer_start": [context.index(a) for a in found]}}  # fmt: skip


def multirc(n: int) -> dict[str, Any]:
    answers = [{"text": sentence(n + k, 2), "idx": k, "label": (n + k) % 2} for k in range(3)]
    asked = [{"question": f"what {sentence(n + q, 2)}?", "answers": answers[q:], "idx": q} for q in range(2)]
    return {"idx": n, "version": 1.1, "passage": {"text": sentence(n, 12), "questions": asked}}


def cloze(n: int) -> dict[str, Any]:
    text, places, at = sentence(n, 10), [], 0
    for word in text.split():
        places, at = [*places, {"start": at, "end": at + len(word) - 1}], at + len(word) + 1
    answer = {"start": 0, "end": places[0]["end"], "text": text.split()[0]}
    return {"source": "test", "passage": {"text": text, "entities": places[:4]}, "idx": n,
            "qas": [{"query": f"@placeholder {sentence(n + 1, 3)}", "answers": [answer], "idx": n}]}  # fmt: skip


def coreferent(n: int) -> dict[str, Any]:
    words = sentence(n, 10).split()
    target = {"span1_index": 1, "span1_text": " ".join(words[1:3]), "span2_index": 6, "span2_text": words[6]}
    return {"text": " ".join(words), "target": target, "idx": n, "label": n % 2 == 0}


ONE, TWO = ("sentence",), ("sentence1", "sentence2")
DATA: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {  # the shape that a recipe trains, and its records
    "pretrain": ("gpt", text), "pretrain-bert": ("bert", text), "pretrain-t5": ("t5", text), "pretrain-cpm": ("cpm", text),
    "finetune": ("gpt", text), "lora": ("gpt", text), "qlora": ("gpt", text), "mlm": ("bert", text),
    "seq2seq": ("t5", pairs("source", "target")), "translate": ("t5", pairs("source", "target")),
    "summarize": ("t5", pairs("article", "highlights")),
    "instruct": ("gpt", chat), "embed/pairs": ("bert", pairs("anchor", "positive")),
    "embed/scores": ("bert", labelled(*TWO, labels=(0.0, 2.5, 5.0), label="score")),
    "classify": ("bert", labelled("text", labels=("no", "yes"))), "tag": ("bert", tagged),
    "classify-zh": ("bert", labelled("sentence", labels=("news_car", "news_story", "news_house"), label="label_desc")),
    "squad/v1": ("bert", asked), "squad/v2": ("bert", lambda n: asked(n, none=True)),
    "glue/cola": ("bert", labelled(*ONE)), "glue/sst2": ("bert", labelled(*ONE)), "glue/mrpc": ("bert", labelled(*TWO)),
    "glue/qqp": ("bert", labelled("question1", "question2")), "glue/stsb": ("bert", labelled(*TWO, labels=(0.0, 2.5, 5.0))),
    "glue/mnli": ("bert", labelled("premise", "hypothesis", labels=(0, 1, 2))),
    "glue/qnli": ("bert", labelled("question", "sentence")),
    "glue/rte": ("bert", labelled(*TWO)), "glue/wnli": ("bert", labelled(*TWO)),
    "superglue/boolq": ("bert", labelled("question", "passage", labels=(True, False))),
    "superglue/cb": ("bert", labelled("premise", "hypothesis", labels=("entailment", "contradiction", "neutral"))),
    "superglue/copa": ("bert", labelled("premise", "question", "choice1", "choice2")),
    "superglue/multirc": ("bert", multirc), "superglue/record": ("bert", cloze), "superglue/wsc": ("bert", coreferent),
    "superglue/rte": ("bert", labelled("premise", "hypothesis", labels=("entailment", "not_entailment"))),
    "superglue/wic": ("bert", labelled("word", "sentence1", "sentence2", labels=(True, False))),
}  # fmt: skip
SEQ2SEQ, CLASSIFY = ["objective=seq2seq"], ["objective=classify"]
SCORERS = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}  # the packages of metrics, which are extras
OTHERS = [  # the same recipes, of other families, by overrides that recipes/README.md names
    ("finetune", "cpm", text, []), ("lora", "cpm", text, []), ("qlora", "cpm", text, []),
    ("lora", "t5", DATA["seq2seq"][1], SEQ2SEQ), ("qlora", "t5", DATA["seq2seq"][1], SEQ2SEQ),
    ("embed/pairs", "t5", DATA["embed/pairs"][1], []),
    ("lora", "bert", DATA["classify"][1], CLASSIFY), ("qlora", "bert", DATA["classify"][1], CLASSIFY),
]  # fmt: skip


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model of each shape and its tokenizer."""
    here = tmp_path_factory.mktemp("zoo")
    for name, (preset, kind, config) in SHAPES.items():
        tokenizer = train_tokenizer((sentence(n, 20) for n in range(40)), 400, kind)
        mc.build(preset, config={**config, "vocab": len(tokenizer)}).save_pretrained(here / name)
        tokenizer.save(here / name)
    return here


def files(here: Path) -> list[str]:
    return [f"data.path={here}/train.jsonl", f"data.eval_path={here}/dev.jsonl"]


def tiny(name: str, shape: str, record: Callable[[int], dict[str, Any]], zoo: Path, here: Path, over: list[str]) -> Recipe:
    """Three steps of a recipe: of its model there is a tiny one, of its data a few."""
    for file, numbers in {"train.jsonl": range(24), "dev.jsonl": range(24, 32)}.items():
        (here / file).write_text("".join(json.dumps(record(n)) + "\n" for n in numbers))
    recipe = load_recipe(name, [*files(here), *over])
    small = {"batch": 4, "max_steps": 3, "num_epochs": None, "eval_steps": 3, "output_dir": str(here / name)}
    read = {key: 8 for key in ("target_len", "stride") if key in find_objective(recipe.objective).keys}
    data = replace(recipe.data, seq_len=40 if recipe.objective == "qa" else 32, **read)
    if recipe.init == "random":
        small |= {"config": recipe.config | SHAPES[shape][2] | {"layers": 1}, "tokenizer": f"{SHAPES[shape][1]}:400"}
    else:
        small |= {"model": str(zoo / shape)}
    return replace(recipe, **small, data=data)


def run(name: str, shape: str, record: Callable[[int], dict[str, Any]], zoo: Path, here: Path, over: list[str]) -> Run:
    return train(tiny(name, shape, record, zoo, here, over), replace(load_machine("cpu"), threads=1))


def test_every_recipe_has_its_data() -> None:
    assert set(DATA) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_runs(name: str, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are recorded, as a GPU's are (test_graphs.py), from the second of their shapes on: few, as they are filled up."""
    found: list[Graphs] = []
    built: list[Any] = []
    build = loop.build_optimizer
    monkeypatch.setattr(loop, "build_optimizer", lambda *args: built.append(build(*args)) or built[0])
    monkeypatch.setattr(loop, "graphs_of", lambda model, *_: found.append(Graphs(model, Played(model, built[0]))) or found[0])
    monkeypatch.setattr(graphs, "WARM", 1)
    monkeypatch.setattr(stepping, "number_on", lambda value, device: torch.full((), value, device=device))
    recipe = load_recipe(name, files(tmp_path))
    for metric, module in SCORERS.items():
        if any(said.startswith(metric) for said in recipe.metrics):
            pytest.importorskip(module)
    shape, record = DATA[name]
    ended = run(name, shape, record, zoo, tmp_path, [])
    judged(ended, recipe.metrics if recipe.best is None else (*recipe.metrics, recipe.best))
    assert not found[0].failures and found[0].recorder.made and found[0].recorder.played  # type: ignore[attr-defined]  # it is Played
    if recipe.adapter.name != "none":
        assert (ended.output_dir / "model" / "adapter_config.json").is_file()


def judged(ended: Run, metrics: tuple[str, ...]) -> None:
    """It has taken its steps, learned something, told its metrics and written a model that loads."""
    assert (ended.step, ended.stopped) == (3, False) and ended.metrics["skipped"] == 0
    assert 0 < ended.metrics["grad_norm"] < math.inf and math.isfinite(ended.metrics["loss"])
    assert all(math.isfinite(ended.metrics[f"eval_{metric}"]) for metric in metrics)
    assert mc.load(ended.output_dir / "model").load_report.new == []


@pytest.mark.parametrize(("name", "shape", "record", "over"), OTHERS, ids=[f"{name}-{shape}" for name, shape, *_ in OTHERS])
def test_tuning_another_family(name: str, shape: str, record: Any, over: list[str], zoo: Path, tmp_path: Path) -> None:
    ended = run(name, shape, record, zoo, tmp_path, over)
    judged(ended, ())
    if name == "qlora":
        assert ended.model.adapter.quantize == "nf4"


def test_runs_of_a_benchmark_are_averaged(zoo: Path, tmp_path: Path) -> None:
    for task in ("cola", "stsb"):
        run(f"glue/{task}", *DATA[f"glue/{task}"], zoo, tmp_path, [])
    found = average("glue", tmp_path / "glue")
    assert list(found["tasks"]) == ["cola", "stsb"] and len(found["missing"]) == len(SUITES["glue"]) - 2


def test_a_recipe_that_names_a_dataset_reads_it(zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the hub's name and form stands in for the hub."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    here = tmp_path / "nyu-mll" / "glue"
    (here / "mrpc").mkdir(parents=True)
    for split, numbers in {"train": range(24), "validation": range(24, 32)}.items():
        rows = (DATA["glue/mrpc"][1](n) for n in numbers)
        (here / "mrpc" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = "".join(f"  - {{split: {split}, path: mrpc/{split}.jsonl}}\n" for split in ("train", "validation"))
    classes = "{class_label: {names: {'0': not_equivalent, '1': equivalent}}}"
    types = {"sentence1": "string", "sentence2": "string", "label": classes}
    features = "  features:\n" + "".join(f"  - {{name: {name}, dtype: {kind}}}\n" for name, kind in types.items())
    (here / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}"
                                    f"dataset_info:\n- config_name: mrpc\n{features}---\n")  # fmt: skip
    recipe = load_recipe("glue/mrpc", [f"model={zoo}/bert", "batch=4", "max_steps=2", "data.seq_len=32"])
    ended = train(recipe, replace(load_machine("cpu"), threads=1))
    assert {"eval_f1", "eval_accuracy"} <= set(ended.metrics)
    assert mc.load(ended.output_dir / "model").config.to_dict()["id2label"] == {"0": "not_equivalent", "1": "equivalent"}


# ------------------------------------------------------------------------------------------------------------- machines


def trains(rank: int, recipe: Recipe, machine: Machine) -> None:
    ended = train(recipe, machine)
    assert ended.step == 3 and math.isfinite(ended.metrics["loss"]) and math.isfinite(ended.metrics["eval_loss"])


@pytest.mark.parametrize("name", names(packaged("machines")))
def test_machine_trains(name: str, zoo: Path, tmp_path: Path) -> None:
    """What a profile says beside its device: on two processes where it is for several."""
    recipe = tiny("finetune", *DATA["finetune"], zoo, tmp_path, [])
    profile = load_machine(name)
    machine = replace(profile, device="cpu", threads=1, fsdp=min(profile.fsdp, 2))
    if machine.fsdp > 1:
        spawn(machine.fsdp, trains, recipe, machine)
    else:
        trains(0, recipe, machine)
    assert mc.load(Path(recipe.output_dir) / "model").load_report.new == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in names(packaged("machines")) if load_machine(name).fsdp == 1])
def test_machine_trains_on_its_gpu(name: str, zoo: Path, tmp_path: Path) -> None:
    trains(0, tiny("finetune", *DATA["finetune"], zoo, tmp_path, []), load_machine(name))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "over"), [("pretrain", ["precision=fp16"]), *((name, ["optimizer.name=adamw"]) for name in (
    "pretrain", "pretrain-bert", "pretrain-t5", "pretrain-cpm", "finetune", "lora", "qlora", "mlm", "seq2seq", "instruct",
    "embed/pairs", "embed/scores", "classify", "tag", "squad/v2", "glue/stsb"))])  # fmt: skip
def test_a_step_waits_for_no_more_than_its_norm(name: str, over: list[str], zoo: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the GPU is an error, once what is made once has been made. AdamW's update is called before the norm is known;
    other optimizers wait for that."""
    step, watched = session.Session.step, []

    def watching(self: session.Session, *args: Any) -> Any:
        if self.at.step < 12:
            return step(self, *args)
        watched.append(self.at.step)
        try:
            watch("error")
            return step(self, *args)
        finally:
            watch("default")

    monkeypatch.setattr(session.Session, "step", watching)
    recipe = tiny(name, *DATA[name], zoo, tmp_path, ["best=null", "on_spike=off", *over])
    train(replace(recipe, max_steps=24, eval_steps=None, save_steps=None), Machine(device="cuda"))
    assert watched == list(range(12, 24))
