"""Recipes and machine profiles: the packaged ones, every alias, every refusal by file and key, and the way back."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.config import bind, describe, dump_yaml, parse, to_dict
from modelcenter.data.config import DataConfig
from modelcenter.data.objective import COMMON, objectives
from modelcenter.errors import InputError, MissingError
from modelcenter.optim.config import OptimizerConfig
from modelcenter.parallel.machine import Machine, load_machine
from modelcenter.train.folder import same_recipe
from modelcenter.train.launch import check_ranks
from modelcenter.train.read import ALIASES, PARTIAL, load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.report import SERVICES

BASE = "model: gpt2\noutput_dir: out\nmax_steps: 10\ndata: {path: a.txt}\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "r.yaml"
    file.write_text(text)
    return file


# ------------------------------------------------------------------------------------------------------------------ names


def test_names_and_paths(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, BASE)) == load_recipe(str(write(tmp_path, BASE)))
    for name, found in {
        "finetun": "finetun: no such recipe; did you mean 'finetune'?",
        "": "'': no such recipe",
        "none/there": "none/there: no such file",
        "absent.yaml": "absent.yaml: no such file",
        "../finetune": "../finetune: no such file",
    }.items():
        with pytest.raises(MissingError) as missing:
            load_recipe(name)
        assert str(missing.value).startswith(found)
    with pytest.raises(MissingError, match="cpuu: no such machine profile; did you mean 'cpu'"):
        load_machine("cpuu")


def test_a_run_may_be_named_like_a_packaged_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends in .yaml is a file, and no variant of that recipe."""
    monkeypatch.chdir(tmp_path)
    for folder in ("lora", "glue"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "recipe.yaml").write_text(BASE)
        assert load_recipe(f"{folder}/recipe.yaml") == load_recipe(write(tmp_path, BASE))


def test_a_key_says_which_objectives_read_it_and_others_refuse_it(tmp_path: Path) -> None:
    for key in fields(DataConfig):
        readers = [name for name, objective in objectives().items() if key.name in objective.keys]
        said = re.search(r"\(([a-z0-9_, ]+)\)$", key.metadata["help"])
        if key.name in COMMON:
            assert not readers, key.name
        else:
            assert said is not None and said[1].split(", ") == readers, key.name
    known = {key.name for key in fields(DataConfig)}
    assert known == {*COMMON, *(key for objective in objectives().values() for key in objective.keys)}
    with pytest.raises(InputError) as refused:
        load_recipe(write(tmp_path, BASE), ["data.whole_words=true"])
    found = "data.whole_words: True with objective lm, which does not read it; leave it out; it is for mlm"
    assert str(refused.value).endswith(found)
    assert load_recipe(write(tmp_path, BASE), ["data.whole_words=true", "objective=mlm"]).data.whole_words


# -------------------------------------------------------------------------------------------------------------- aliases

SPELLED = {
    "model_name_or_path": "x", "tokenizer_name": "x", "train_file": "x", "validation_file": "x", "max_seq_length": 77,
    "packing": True, "group_by_length": True,
    "learning_rate": 3e-4, "weight_decay": 0.5, "adam_epsilon": 1e-6, "lr_scheduler_type": "cosine",
    "warmup_steps": 5, "warmup_ratio": 0.06, "per_device_train_batch_size": 4,
    "num_train_epochs": 2, "resume_from_checkpoint": "auto",
    "label_smoothing_factor": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(("given", "meant"), [("True", "auto"), ("false", "never"), ("runs/a", "runs/a")])
def test_resuming_may_be_a_boolean_as_there(given: str, meant: str, tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, BASE), [f"resume_from_checkpoint={given}"]).resume == meant
    assert load_recipe(write(tmp_path, BASE + f"resume_from_checkpoint: {given.lower()}")).resume == meant


def test_every_alias_has_a_case() -> None:
    assert set(SPELLED) == set(ALIASES) and not set(ALIASES) & {key.name for key in describe(Recipe)}


@pytest.mark.parametrize("alias", SPELLED)
@pytest.mark.parametrize("place", ["file", "command line"])
def test_alias(alias: str, place: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": "gpt2", "output_dir": "out", "max_steps": 10, "data": {"path": "a"}}
    value = SPELLED[alias]
    if place == "file":
        section, _, leaf = ALIASES[alias].rpartition(".")
        tree.get(section, tree).pop(leaf, None)
        recipe = load_recipe(write(tmp_path, dump_yaml(tree | {alias: value})))
    else:  # where our spelling in the file does not count as giving both
        recipe = load_recipe(write(tmp_path, dump_yaml(tree)), [f"{alias}={value}".lower()])
    at: Any = recipe
    for part in ALIASES[alias].split("."):
        at = getattr(at, part)
    assert at == value


@pytest.mark.parametrize("alias", SPELLED)
def test_both_spellings_are_refused(alias: str, tmp_path: Path) -> None:
    file = write(tmp_path, BASE)
    with pytest.raises(InputError) as refused:
        load_recipe(file, [f"{spelling}={SPELLED[alias]}" for spelling in (alias, ALIASES[alias])])
    assert str(refused.value).startswith(f"command line: {alias}: given, and so is {ALIASES[alias]}; ")


def test_both_spellings_in_a_file(tmp_path: Path) -> None:
    for text, found in {
        "learning_rate: 1\noptimizer: {lr: 1}": "learning_rate: given, and so is optimizer.lr",
        "learning_rate: 1\noptimizer: 3": "learning_rate: given, and so is optimizer as a whole",
        "bf16: true\nprecision: fp32": "bf16: given, and so is precision",
        "adam_beta1: 0.8\noptimizer: {betas: [0.8, 0.9]}": "adam_beta1: given, and so is optimizer.betas",
    }.items():
        file = write(tmp_path, BASE + text)
        with pytest.raises(InputError) as refused:
            load_recipe(file)
        assert str(refused.value).startswith(f"{file}: {found}")


def test_partial_aliases(tmp_path: Path) -> None:
    assert set(PARTIAL) == {"gradient_accumulation_steps", "bf16", "fp16", "adam_beta1", "adam_beta2"}
    file = write(tmp_path, BASE + "optimizer: {betas: [0.5, 0.6]}")
    assert load_recipe(file, ["adam_beta2=0.95"]).optimizer.betas == (0.5, 0.95)
    assert load_recipe(file, ["adam_beta1=0.8", "adam_beta2=0.9"]).optimizer.betas == (0.8, 0.9)
    assert load_recipe(write(tmp_path, BASE), ["adam_beta1=0.8"]).optimizer.betas == (0.8, 0.999)
    assert load_recipe(file, ["bf16=true"]).precision == "bf16"
    assert load_recipe(file, ["bf16=false"]).precision == "fp32"
    assert load_recipe(file, ["bf16=false", "fp16=true"]).precision == "fp16"


OTHERS = {  # what was given: what it is called here
    "train_iters=5": "train_iters: unknown key; here it is max_steps",
    "load=x": "load: unknown key; here it is resume, or model for weights alone",
    "global_batch_size=8": "global_batch_size: unknown key; here it is batch",
    "gradient_checkpointing=true": "gradient_checkpointing: unknown key; here it is machine.recompute",
    "use_flash_attn=true": "use_flash_attn: unknown key; leave it out: the fastest of those that compute the same is taken",
    "data.max_length=64": "data.max_length: unknown key; here it is data.seq_len",  # and not span_length
    "adapter.lora_alpha=3": "adapter.lora_alpha: unknown key; here it is adapter.alpha",
    "optimizer.learning_rate=1": "optimizer.learning_rate: unknown key; here it is optimizer.lr",
    "data.seq_lenn=64": "data.seq_lenn: unknown key; did you mean 'data.seq_len'?",
    "lr_scheduler_type=constant_with_warmup": "lr_scheduler_type: constant_with_warmup; "
                                              "here it is constant, with schedule.warmup_steps",
    "schedule.name=cosine_with_restarts": "schedule.name: cosine_with_restarts; here it is cosine: nothing restarts here",
    "schedule.name=warmup_stable_decay": "schedule.name: warmup_stable_decay; here it is wsd, with schedule.warmup_steps and "
                                         "schedule.decay_steps",
    "learning_rat=1": "learning_rat: unknown key; did you mean 'learning_rate'?",
}  # fmt: skip


@pytest.mark.parametrize("asked", OTHERS)
def test_names_of_other_programs_say_ours(asked: str, tmp_path: Path) -> None:
    said = OTHERS[asked]
    with pytest.raises(InputError) as refused:
        load_recipe(write(tmp_path, BASE), [asked])
    assert str(refused.value) == f"command line: {said}"
    key, _, value = asked.partition("=")
    section, _, leaf = key.rpartition(".")
    tree: dict[str, Any] = {"model": "gpt2", "output_dir": "out", "max_steps": 10, "data": {"path": "a"}}
    (tree.setdefault(section, {}) if section else tree)[leaf] = value
    file = write(tmp_path, dump_yaml(tree))
    with pytest.raises(InputError) as refused:
        load_recipe(file)
    assert str(refused.value) == f"{file}: {said}"


@pytest.mark.parametrize(("name", "choice", "found"), [
    ("pretrain", "schedule.name=constant", "schedule.min_lr_ratio 0.1"),
    ("pretrain", "optimizer.name=adafactor", "optimizer.betas [0.9, 0.95]"),
    ("pretrain-bert", "optimizer.name=lion", "optimizer.eps 1e-06"),
    ("lora", "adapter.name=none", "adapter.rank 16, adapter.alpha 32.0, adapter.dropout 0.05"),
])
def test_a_choice_leaves_out_what_it_does_not_read(name: str, choice: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the file's values, and says so; one that is given beside the choice is refused. A resolved recipe names every key, and
    those at their defaults are nothing to be told of."""
    key, _, word = choice.partition("=")
    section, value = key.partition(".")[0], found.partition(" ")[2].partition(",")[0]
    changed = to_dict(load_recipe(name, ["data.path=a", "model=m", choice]))[section]
    default = to_dict(load_recipe("finetune", ["data.path=a", "model=m"]))[section]
    asked = found.partition(" ")[0]
    assert changed["name"] == word and changed[asked.partition(".")[2]] == default[asked.partition(".")[2]]
    assert capsys.readouterr().err.endswith(f"{name}.yaml: {found}: left out, with {choice}, which has none\n")
    with pytest.raises(InputError, match=f"^command line: {asked}: "):
        load_recipe(name, ["data.path=a", "model=m", choice, f"{asked}={value if '[' not in found else '[0.8, 0.9]'}"])


@pytest.mark.parametrize("name", ["finetune", "lora"])
def test_a_key_of_no_adapter_is_refused_at_its_usual_value_too(name: str, tmp_path: Path) -> None:
    """Whoever gives it wants an adapter; a file that a run has written names every key."""
    given = ["data.path=a", "model=m", "adapter.name=none"][: 2 + (name == "lora")]
    for setting in ("adapter.rank=8", "adapter.quantize=none"):
        said = rf"^command line: {setting.partition('=')[0]}: set, but adapter\.name is none; adapter\.name=lora or dora$"
        with pytest.raises(InputError, match=said):
            load_recipe(name, [*given, setting])
    own = write(tmp_path, dump_yaml(to_dict(load_recipe(name, given))))
    assert load_recipe(own, ["adapter.name=none"]).adapter == AdapterConfig()


def test_a_packaged_limit_of_states_belongs_to_its_save_steps(tmp_path: Path) -> None:
    """Without these nobody has asked for the limit, and nothing is said of it; a limit that a user gives stays."""
    none: dict[str, Any] = {"save_steps": None}
    for more, limit in (({}, 2), ({"save_steps": 7}, 2), (none, None), ({**none, "save_total_limit": 3}, 3)):
        assert load_recipe("finetune", {"data.path": "a", "model": "m", **more}, "overrides").save_total_limit == limit
        said = [f"{key}={'null' if value is None else value}" for key, value in more.items()]
        assert load_recipe("finetune", ["data.path=a", "model=m", *said]).save_total_limit == limit
    own = write(tmp_path, f"{BASE}save_steps: 5\nsave_total_limit: 4\n")
    assert load_recipe(own, ["save_steps=null"]).save_total_limit == 4
    with pytest.raises(InputError, match=r"^command line: save_steps: 'never'; an integer at least 1 or null$"):
        load_recipe("finetune", ["data.path=a", "model=m", "save_steps=never"])


@pytest.mark.parametrize("wrong", ["schedule.name=constnt", "optimizer.lr=-1", "generation.top_k=3"])
def test_what_is_refused_is_said_alone(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And not after what a choice beside it leaves out."""
    choices = {"schedule.name": "constant", "optimizer.name": "adafactor"}
    others = [f"{key}={value}" for key, value in choices.items() if not wrong.startswith(f"{key}=")]
    with pytest.raises(InputError, match=f"^command line: {wrong.partition('=')[0]}: "):
        load_recipe("pretrain", ["data.path=a", "model=m", wrong, *others])
    assert not capsys.readouterr().err


def test_a_part_of_the_data_is_not_asked_for_beside_the_recipe_s_file(tmp_path: Path) -> None:
    """Where both are given together, what `eval_path` says of itself holds."""
    file = write(tmp_path, BASE.replace("{path: a.txt}", "{path: a.txt, eval_path: b.txt, eval_fraction: 0.2}"))
    said = r"^command line: data\.eval_fraction: 0\.1 beside the recipe's data\.eval_path, which counts instead; one of the two"
    with pytest.raises(InputError, match=said):
        load_recipe(file, ["data.eval_fraction=0.1"])
    for more in ([], ["data.eval_fraction=0"], ["data.eval_fraction=0.1", "data.eval_path=c"]):
        assert load_recipe(file, more).data.eval_path in ("b.txt", "c")
    assert load_recipe(file, ["data.eval_fraction=0.1", "data.eval_path=null"]).data.eval_path is None
    assert load_recipe("finetune", ["model=m", "data.path=a", "data.eval_path=b"]).data.eval_path == "b"


def test_pairs_alone_in_a_forward_are_refused_where_no_rank_has_others() -> None:
    """In training each is told from the other ranks' pairs; an evaluation is of a rank's own."""
    pairs = DataConfig(path="a", pair_key="b")
    recipe = Recipe(model="m", objective="contrastive", data=pairs, output_dir="o", max_steps=1, micro_batch=1)
    for ranks in ({"fsdp": 2}, {"replicate": 2, "tensor_parallel": 2}):
        check_ranks(recipe, Machine(**ranks))
    check_ranks(replace(recipe, data=replace(pairs, negative_key="c")), Machine())
    for data, machine in ((pairs, Machine()), (pairs, Machine(tensor_parallel=2)), (replace(pairs, eval_path="c"), Machine(fsdp=2)),
                          (replace(pairs, eval_fraction=0.1), Machine(fsdp=2))):
        with pytest.raises(InputError, match=r"^micro_batch: 1 with objective contrastive: a pair alone has none to be told"):
            check_ranks(replace(recipe, data=data), machine)


def test_a_run_of_a_constant_rate_may_say_its_least_rate(tmp_path: Path) -> None:
    """Which runs did that began before it was refused: their models are evaluated and converted, and they go on."""
    section = "schedule: {name: constant, min_lr_ratio: 0.1}\n"
    file = write(tmp_path, f"model: m\nmax_steps: 1\noutput_dir: o\ndata: {{path: a}}\n{section}")
    with pytest.raises(InputError, match=r"schedule\.min_lr_ratio: 0\.1 with name constant"):
        load_recipe(file)
    (tmp_path / "environment.json").write_text("{}")
    assert load_recipe(file).schedule.min_lr_ratio == 0
    same_recipe(file, load_recipe(file))  # with which it goes on


def test_a_resolved_recipe_takes_another_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = to_dict(load_recipe("finetune", ["data.path=a", "model=m"]))
    file = write(tmp_path, dump_yaml(whole))
    assert load_recipe(file, ["schedule.name=constant", "optimizer.name=lion"]).schedule.name == "constant"
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "line", "batch", "micro"),
    [
        ("micro_batch: 4\ngradient_accumulation_steps: 3", [], 12, 4),
        ("batch: 12\ngradient_accumulation_steps: 3", [], 12, 4),
        ("batch: 12\nmicro_batch: 4\ngradient_accumulation_steps: 3", [], 12, 4),
        ("per_device_train_batch_size: 4\ngradient_accumulation_steps: 3", ["micro_batch=2"], 12, 2),
        ("per_device_train_batch_size: 4\ngradient_accumulation_steps: 3", ["batch=16"], 16, 4),
        ("batch: 12\nmicro_batch: 4", ["gradient_accumulation_steps=2"], 8, 4),
        ("batch: 12", ["gradient_accumulation_steps=2"], 12, 6),
        ("batch: 12\nmicro_batch: 4", ["batch=6", "gradient_accumulation_steps=2"], 6, 3),
        ("batch: 12", ["per_device_train_batch_size=5", "gradient_accumulation_steps=2"], 10, 5),
    ],
)
def test_accumulation(file: str, line: list[str], batch: int, micro: int, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, BASE + file), line)
    assert (recipe.batch, recipe.micro_batch) == (batch, micro)


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSED = {  # what is added to a good recipe: what is said of it
    "layers: 2": "layers: unknown key",
    "lr: 1": "lr: unknown key; did you mean 'optimizer.lr'?",
    "optimzer: {lr: 1}": "optimzer: unknown key; did you mean 'optimizer'?",
    "adapter: {rank: 3}": "adapter.rank: set, but adapter.name is none; ",
    "adapter: {name: lora, targets: []}": "adapter.targets: empty; names of layers, or all-linear",
    "optimizer: {name: lion, moments: int8}": "optimizer.moments: 'int8' with name lion, which has none; leave it out, or fp32",
    "schedule: {warmup_steps: 1.5}": "schedule.warmup_steps: 1.5; whole steps, or a share below 1",
    "schedule: {name: wsd, warmup_steps: 0.8, decay_steps: 3}": "schedule.decay_steps: 3 after 8 of warm-up, in 10 steps; ",
    "schedule: {name: noam}": "schedule.warmup_steps: 0 with name noam; 1 at least",
    "schedule: {gamma: 0.9}": "schedule.gamma: 0.9 with name linear, which has none; leave it out, or 0.999",
    "optimizer: {name: lyon}": "optimizer.name: 'lyon'; adamw | adafactor",
    "optimizer: {lr: 0}": "optimizer.lr: 0; a number above 0 and at most 100",
    "optimizer: {lr: .nan}": "line 5: '.nan'; a finite number",
    "optimizer: {betas: [0.9, 1.0]}": "optimizer.betas.1: 1.0; a number at least 0 and below 1",
    "optimizer: {eps: 0}": "optimizer.eps: 0; a number at least 1e-37",
    "optimizer: {eps: 1e-45}": "optimizer.eps: 1e-45; a number at least 1e-37",
    "optimizer: {lr: 3e4}": "optimizer.lr: 30000.0; a number above 0 and at most 100",
    "optimizer: {lr: 0.1, weight_decay: 10}": "optimizer.weight_decay: 10 with lr 0.1, which leaves a step nothing of the weights",
    "objective: similarity": "data.pair_key: absent with objective similarity; the field of the second text",
    "optimizer: {weight_decay: -0.1}": "optimizer.weight_decay: -0.1; a number at least 0",
    "schedule: {name: step}": "schedule.name: 'step'; linear | cosine | constant",
    "schedule: {warmup_steps: -1}": "schedule.warmup_steps: -1; an integer at least 0",
    "schedule: {min_lr_ratio: 2}": "schedule.min_lr_ratio: 2; a number at least 0 and at most 1",
    "batch: 0": "batch: 0; an integer at least 1",
    "batch: 8.0": "batch: 8.0; an integer at least 1",
    "batch: true": "batch: true; an integer at least 1",
    "micro_batch: 3": "batch: 8 is no multiple of micro_batch 3",
    "micro_batch: 16": "batch: 8 is no multiple of micro_batch 16",
    "gradient_accumulation_steps: 3": "gradient_accumulation_steps: 3 without batch or micro_batch",
    "batch: 8\ngradient_accumulation_steps: 3": "gradient_accumulation_steps: batch 8 is no multiple of 3",
    "batch: 8\nmicro_batch: 2\ngradient_accumulation_steps: 3": "gradient_accumulation_steps: 3 x micro_batch 2 is not",
    "gradient_accumulation_steps: 0": "gradient_accumulation_steps: 0; an integer at least 1",
    "bf16: 1": "bf16: 1; true or false",
    "adam_beta1: 1": "adam_beta1: 1; a number at least 0 and below 1",
    "precision: fp8": "precision: 'fp8'; auto | bf16 | fp16 | fp32",
    "bf16: true\nfp16: true": "fp16: true, and so is bf16",
    "num_epochs: 0": "num_epochs: 0; a number above 0",
    "max_grad_norm: -1": "max_grad_norm: -1; a number at least 0",
    "seed: -1": "seed: -1; an integer at least 0",
    "seed: 4294967296": "seed: 4294967296; an integer at least 0 and at most 4294967295",
    "logging_steps: 0": "logging_steps: 0; an integer at least 1",
    "eval_steps: 0": "eval_steps: 0; an integer at least 1",
    "save_steps: 0": "save_steps: 0; an integer at least 1",
    "save_steps: 5\nsave_total_limit: 0": "save_total_limit: 0; an integer at least 1",
    "report_to: wandb": "report_to: 'wandb'; a list of tensorboard | wandb | mlflow | trackio",
    "report_to: [neptune]": "report_to.0: 'neptune'; tensorboard",
    "resume: true": "resume: true; text that is not empty",
    "resume: ''": "resume: ''; text that is not empty",
    "init: zero": "init: 'zero'; pretrained | random",
    "objective: tags": "objective: 'tags'; chat | choice | classify | contrastive | coreference | fim | lm | mlm | multilabel",
    "task: mlm": "task: mlm with objective lm",
    "config: [2]": "config: [2]; a mapping",
    "model: other": "model: given on line 1 and on line 5",
}
REPLACED = {  # whole recipes
    BASE.replace("max_steps: 10\n", ""): "max_steps: missing, and so is num_epochs",
    BASE.replace("10", "0"): "max_steps: 0; an integer at least 1",
    BASE.replace("10", "-1"): "max_steps: -1; an integer at least 1",
    BASE.replace("10", "1e3"): "max_steps: 1000.0; an integer at least 1",
    BASE.replace("gpt2", "''"): "model: ''; text that is not empty",
    BASE.replace("gpt2", "2"): "model: 2; text that is not empty",
    BASE.replace("model: gpt2\n", ""): "model: missing",
    BASE.replace("output_dir: out\n", ""): "output_dir: missing",
    BASE.replace("{path: a.txt}", "{}"): "data.path: missing",
    BASE.replace("{path: a.txt}", "a.txt"): "data: 'a.txt'; a mapping",
    BASE.replace("{path: a.txt}", "{path: a, seq_len: 1}"): "data.seq_len: 1; an integer at least 2",
}
CASES = {BASE + text: found for text, found in REFUSED.items()} | REPLACED


@pytest.mark.parametrize("text", CASES, ids=[f"{i}" for i in CASES.values()])
def test_refused(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InputError) as refused:
        load_recipe(file)
    assert str(refused.value).startswith(f"{file}: {CASES[text]}")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("optimizer.lr=-1", "command line: optimizer.lr: -1; a number above 0"),
        ("learning_rate=fast", "command line: optimizer.lr: 'fast'; a number above 0"),
        ("gradient_accumulation_steps=x", "command line: gradient_accumulation_steps: 'x'; an integer"),
        ("batch=1e3", "command line: batch: 1000.0; an integer"),
        ("optimiser.lr=1", "command line: optimiser: unknown key; did you mean 'optimizer'?"),
        ("report_to=[neptune]", "command line: report_to.0: 'neptune'; tensorboard"),
        ("report_to=all", f"command line: report_to: 'all'; a list of {' | '.join(SERVICES)}: report_to=[tensorboard]"),
        ("report_to=wandb,mlflow", f"command line: report_to: 'wandb,mlflow'; a list of {' | '.join(SERVICES)}: report_to=[wandb"),
        ("data.seqlen=4", "command line: data.seqlen: unknown key; did you mean 'data.seq_len'?"),
        ("metrics=[acc]", "command line: metrics: 'acc'; did you mean 'accuracy'?"),
        ("best=bleu", "command line: best: bleu with objective lm; one of loss"),
        ("output_dir=a\x1b[31m", "command line: output_dir: 'a\\x1b[31m'; a name without control characters"),
        ("data.prompt_key=p", "{file}: data.response_key: absent; prompt_key and response_key go together"),
        ("data.response_key=r", "{file}: data.prompt_key: absent; prompt_key and response_key go together"),
    ],
)
def test_refused_on_the_command_line(line: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load_recipe(file := write(tmp_path, BASE), [line])
    assert str(refused.value).startswith(found.replace("{file}", str(file)))


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"optimizer.lrr": 1e-4}, "optimizer.lrr: unknown key"),
        ({"optimizer.lr": -1}, "optimizer.lr: -1"),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr: 'fast'"),
        ({"optimizer.betas": [0.9, 2]}, "optimizer.betas.1: 2"),
        ({"learning_rate": -1}, "optimizer.lr: -1"),
        ({"max_step": 3}, "max_step: unknown key"),
        ({"data.path": {"a.jsonl": 0.5, "b.jsonl": -1}}, "data.path.b.jsonl: -1"),
        ({"best": "bleu"}, "best: bleu with objective lm"),
        ({"max steps": 3}, "max steps: not a key"),
        ({"machine": "gpu24"}, "machine: no part of a recipe"),
        (["max_steps=x"], "max_steps: 'x'"),
        (["max_steps"], "max_steps: no value"),
    ],
)
def test_refused_among_the_overrides(overrides: Any, found: str, tmp_path: Path) -> None:
    """From Python neither the file nor a command line has said it."""
    with pytest.raises(InputError) as refused:
        mc.train(write(tmp_path, BASE), overrides=overrides)
    assert str(refused.value).startswith(f"overrides: {found}; ")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fsdp: 0", "fsdp: 0; an integer at least 1"),
        ("tensor_parallel: 1.5", "tensor_parallel: 1.5; an integer at least 1"),
        ("tensor_parallel: 99999", "tensor_parallel: 99999; an integer at least 1 and at most 1024"),
        ("recompute: 1", "recompute: 1; none | selective | full or true or false"),
        ("device: tpu", "device: 'tpu'; auto | cpu | cuda"),
        ("threads: 0", "threads: 0; an integer at least 1"),
        ("pipeline: 2", "pipeline: unknown key"),
        ("machine.fsdp: 2", "machine.fsdp: unknown key; did you mean 'fsdp'?"),
        ("# nothing yet", "empty; a mapping of `key: value` lines"),
    ],
)
def test_machine_refused(text: str, found: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InputError) as refused:
        load_machine(file)
    assert str(refused.value).startswith(f"{file}: {found}")


# ---------------------------------------------------------------------------------------------------- and the way back


def test_overrides_win(tmp_path: Path) -> None:
    file = write(tmp_path, BASE + "optimizer: {lr: 1.0, eps: 1e-6}\nconfig: {layers: 2}\n")
    recipe = load_recipe(file, ["optimizer.lr=3e-4", "config.dim=8", "resume=auto", "output_dir=2024"])
    assert (recipe.optimizer.lr, recipe.optimizer.eps) == (3e-4, 1e-6)
    assert recipe.config == {"layers": 2, "dim": 8} and (recipe.resume, recipe.output_dir) == ("auto", "2024")
    assert load_recipe(file, {"optimizer.lr": 3e-4}).optimizer.lr == 3e-4


def test_a_home_is_found_in_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load_recipe(write(tmp_path, BASE.replace("out\n", "~/runs/a\nresume: ~/runs/b\n")))
    assert (recipe.output_dir, recipe.resume) == (str(tmp_path / "runs/a"), str(tmp_path / "runs/b"))


@cache
def finetune() -> Recipe:
    return load_recipe("finetune", ["data.path=a.txt", "max_steps=7"])


@given(
    lr=st.floats(0, 1, exclude_min=True),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    epochs=st.none() | st.floats(0, 1e9, exclude_min=True),
    model=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    report=st.sampled_from([(), ("tensorboard",)]),
)
@settings(max_examples=50)
def test_a_recipe_survives_its_file(lr: float, betas: Any, epochs: Any, model: str, report: Any) -> None:
    recipe = finetune()
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=lr, betas=betas), report_to=report, model=model)
    recipe = replace(recipe, num_epochs=epochs, config={"rope": {"kind": "yarn", "factor": 2.0}, "act": None})
    assert bind(Recipe, parse(dump_yaml(to_dict(recipe)))) == recipe


@pytest.mark.parametrize(("make", "found"), [
    (lambda: Machine(recompute="all"), r"^recompute: 'all'; none | selective | full"),  # type: ignore[arg-type]  # what is refused
    (lambda: Machine(fsdp=0), r"^fsdp: 0; "),
    (lambda: AdapterConfig(name="lorra"), r"^name: 'lorra'; none | lora | dora$"),  # type: ignore[arg-type]  # what is refused
    (lambda: AdapterConfig(name="lora", rank=0), r"^rank: 0; an integer at least 1"),
    (lambda: AdapterConfig(name="lora", quantize="fp4"), r"^quantize: 'fp4'; none | nf4 | int8$"),  # type: ignore[arg-type]  # likewise
    (lambda: AdapterConfig(name="lora", targets="c_attn"), r"^targets: 'c_attn'; a list of text: targets=\[c_attn\]$"),  # type: ignore[arg-type]  # likewise
    (lambda: OptimizerConfig(lr=-1), r"^lr: -1; a number above 0"),
    (lambda: Recipe(model="gpt2", data=DataConfig(path="a"), output_dir="o", max_steps=0), r"^max_steps: 0; an integer at least 1"),
    (lambda: Recipe(model="~no-one/m", data=DataConfig(path="a"), output_dir="o", max_steps=1), r"^model: ~no-one/m"),
    (lambda: DataConfig(path="\udcff.txt"), r"^path: '\\udcff.txt'; text that UTF-8 can hold$"),
    (lambda: DataConfig(path={1: 1.0}), r'^path.1: 1; text: "1"$'),  # type: ignore[dict-item]  # what is refused
    (lambda: Recipe(model="m", objective="contrastive", data=DataConfig(path="a", pair_key="b"), output_dir="o", max_steps=1,
                    batch=1),
     "^batch: 1 with objective contrastive: a pair alone has none to be told from"),
])  # fmt: skip
def test_values_from_python_are_checked_as_those_of_a_file(make: Callable[[], object], found: str) -> None:
    with pytest.raises(InputError, match=found):
        make()


def test_a_list_or_a_path_from_python_is_what_a_file_would_say() -> None:
    assert AdapterConfig(name="lora", targets=["c_attn"]).targets == ("c_attn",)  # type: ignore[arg-type]  # what is understood
    recipe = load_recipe("finetune", {"model": "gpt2", "data.path": Path("a") / "b.jsonl", "optimizer.lr": 1})
    assert recipe.data.path == "a/b.jsonl" and isinstance(recipe.optimizer.lr, float)
    assert DataConfig(path={Path("a") / "b.jsonl": 1}).path == {"a/b.jsonl": 1.0}  # type: ignore[dict-item]  # what is understood


def test_a_mixture_takes_the_place_of_another(tmp_path: Path) -> None:
    """From Python as on the command line: no source of the file's is mixed in. A weight alone may be given, too."""
    file = write(tmp_path, BASE.replace("path: a.txt", "path: {a: 1, b: 2}, eval_path: {d: 1, e: 1}"))
    given: Any
    for given in ({"data.path": {"c": 3}}, {"data": {"path": {"c": 3}}}, ["data.path={c: 3}"]):
        data = load_recipe(file, given).data
        assert data.path == {"c": 3.0} and data.eval_path == {"d": 1.0, "e": 1.0}, given
    assert load_recipe(file, ["data.path.b=5"]).data.path == {"a": 1.0, "b": 5.0}


def test_a_machine_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    """As a section or as a key of its own, in a file or from Python."""
    (tmp_path / "mine.yaml").write_text("machine: {fsdp: 2}\n")
    (tmp_path / "own.yaml").write_text("model: gpt2\nzero: 2\n")
    mine, own = tmp_path / "mine.yaml", tmp_path / "own.yaml"
    wanted = r"no part of a recipe; --machine M, machine\.KEY=VALUE, or mc\.train\(recipe, machine=mc\.Machine\(KEY=VALUE\)\)$"
    for name, over, found in (("finetune", {"machine.fsdp": 2}, "machine"), (mine, {}, f"{mine}: machine"),
                              ("finetune", {"fsdp": 2}, "fsdp"), (own, {}, f"{own}: zero")):  # fmt: skip
        with pytest.raises(InputError, match=rf"{found}: {wanted}"):
            load_recipe(name, over)
