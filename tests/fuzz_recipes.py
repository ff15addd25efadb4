"""Random recipes: a packaged one with a few settings drawn at random, of any family.

    python tests/fuzz_recipes.py [--cases 20] [--seed 0] [--first 0] [--ranks 0.3] [--device cuda]

Each is trained for four steps on a CPU or a GPU, and must end or be refused in one line. Then it is trained once more: from its
state at step 2, which must give the same weights bit for bit; and in another way that must not matter but for rounding (other
micro-batches, recompute; of a CPU, for a share `--ranks`, two to four ranks, which a process with a GPU cannot fork, and perhaps
others from step 2 on; of a GPU a CPU or no CUDA graphs), with the same losses, norms, evaluations and weights. A case is a function
of the seed and its own number, which is said of one that goes wrong: --first N --cases 1 is that case again.
"""

import argparse
import io
import json
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # once, and not in each rank
from mesh import spawn
from safetensors.torch import load_file
from test_recipes import DATA, SHAPES, sentence, tiny

import modelcenter as mc
from modelcenter.data.objective import find_objective
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.parallel.machine import Machine
from modelcenter.train.loop import train
from modelcenter.train.recipe import Recipe

STEPS, MIDDLE = 4, 2
BODIES: dict[str, dict[str, int]] = {  # `more`: rows of the vocabulary for which there is no token
    "even": {"layers": 2, "dim": 64, "heads": 4, "head_dim": 16, "hidden": 128, "positions": 64, "kv_heads": 2, "prompt_length": 4},
    "odd": {"layers": 3, "dim": 60, "heads": 6, "head_dim": 10, "hidden": 102, "positions": 65, "kv_heads": 2, "prompt_length": 3,
            "more": 3},
}  # fmt: skip
PRESETS = {"gpt": ("gpt2", "llama-3.2-1b", "llama-2-7b", "bloom-560m"), "bert": ("bert-base-cased", "all-minilm-l6-v2"),
           "t5": ("t5-small", "t5-v1_1-small", "mt5-small"), "cpm": ("cpm-ant-10b",)}  # fmt: skip
OTHERS: tuple[list[str], ...] = (  # objectives that no recipe has, and what few have, as settings of a recipe
    ["pretrain", "objective=fim"], ["pretrain", "objective=prefix_lm"], ["finetune", "objective=prefix_lm"],
    ["finetune", "data.packing=true"], ["instruct", "data.packing=true"], ["instruct", "data.padding_free=true"],
    ["pretrain-cpm", "objective=lm"], ["pretrain-t5", "data.span_length=1.5"], ["seq2seq", "data.padding_free=true"],
    ["mlm", "data.whole_words=true"], ["mlm", "data.padding_free=true"], ["tag", "data.packing=true"],
    ["classify", "objective=multilabel"], ["classify", "data.padding_free=true"], ["embed/pairs", "loss.symmetric=true"],
    ["embed/pairs", "data.negative_key=positive"],
)  # fmt: skip
BATCHES = ((4, None), (5, None), (7, None), (4, 1), (4, 2), (5, 1), (6, 2), (6, 3), (9, 3))  # and micro-batches
TEXTS = ("text", "source", "target", "article", "highlights", "anchor", "positive", "sentence", "sentence1", "sentence2",
         "question1", "question2", "premise", "hypothesis")  # fmt: skip  # of records: words may follow
SETTINGS = (  # of which a case has a few; what does not go together is refused
    ("data.packing=true",), ("data.padding_free=true",), ("data.group_by_length=true",), ("data.shuffle=false",),
    ("optimizer.name=lion",), ("optimizer.name=muon",), ("optimizer.name=adafactor",), ("optimizer.moments=bf16",),
    ("optimizer.moments=int8",), ("optimizer.layer_decay=0.5",), ("optimizer.weight_decay=0.1",),
    ("schedule.name=cosine",), ("schedule.name=wsd",), ("schedule.name=noam",), ("schedule.name=polynomial", "schedule.power=2"),
    ("loss.label_smoothing=0.1",), ("loss.z_loss=1e-3",), ("loss.r_drop=2",), ("ema=0.5",), ("max_grad_norm=0.1",),
    ("batch_tokens=24",), ("batch_tokens=200",), ("precision=bf16",), ("best=loss",),
    ("adapter.name=lora",), ("adapter.name=dora", "adapter.rslora=true"), ("adapter.name=lora", "adapter.quantize=int8"),
    ("adapter.name=lora", "adapter.targets=[attn.q,ffn.down]"), ("freeze=[decoder.blocks.0]",), ("freeze=[encoder.blocks.0]",),
    ("adapter.name=lora", "adapter.dropout=0.1", "adapter.quantize=nf4"), ("data.eval_fraction=0.2", "data.eval_path=null"),
    ("eval_steps=1", "patience=9", "best=loss"), ("num_epochs=1", "max_steps=null"), ("init=random",), ("on_spike=rollback",),
    ("schedule.name=inverse_sqrt",), ("schedule.name=exponential",), ("max_grad_norm=0",),
)  # fmt: skip
MACHINES: tuple[dict[str, Any], ...] = (
    {"fsdp": 2}, {"fsdp": 2, "zero": 2}, {"fsdp": 2, "zero": 1}, {"replicate": 2}, {"tensor_parallel": 2}, {"fsdp": 3},
    {"tensor_parallel": 2, "sequence_parallel": True}, {"fsdp": 2, "tensor_parallel": 2}, {"fsdp": 2, "replicate": 2},
    {"fsdp": 2, "offload": True}, {"tensor_parallel": 2, "offload": True}, {"replicate": 2, "offload": True, "zero": 2},
    {"fsdp": 2, "recompute": "full", "async_save": True}, {"tensor_parallel": 2, "recompute": "selective"}, {"replicate": 3},
    {"replicate": 2, "tensor_parallel": 2}, {"replicate": 2, "tensor_parallel": 2, "sequence_parallel": True},
    {"replicate": 2, "recompute": "full", "async_save": True},
)  # fmt: skip
CPU = Machine(device="cpu", threads=1)
ALONE = {"cpu": CPU, "cuda": Machine(device="cuda", threads=1, deterministic=True)}  # else a GPU's bits differ
FAR = 0.1  # of what all steps together can be: a weight that is elsewhere
COARSE = ("lion", "muon")  # whose updates go by signs, or by a product in bf16: a rounding more is a step more


def make(zoo: Path) -> None:
    """Tiny models of every preset, under zoo/SIZES/PRESET."""
    for shape, presets in PRESETS.items():
        tokenizer = train_tokenizer((sentence(n, 20) for n in range(40)), 400, SHAPES[shape][1])
        for preset, (sizes, body) in product(presets, BODIES.items()):
            known = vars(mc.build(preset, device="meta").config)
            config = {key: value for key, value in body.items() if key in known} | {"vocab": len(tokenizer) + body.get("more", 0)}
            mc.build(preset, config=config, seed=2).save_pretrained(zoo / sizes / preset)
            tokenizer.save(zoo / sizes / preset)


@cache
def rates(model: str) -> tuple[str, ...]:
    """The fields of a preset's config, or of one in the zoo, that are rates of dropout."""
    return tuple(key for key in vars(mc.build(Path(model).name, device="meta").config) if "dropout" in key)


def draw(rng: random.Random, zoo: Path, here: Path) -> Recipe:
    """A recipe and its data, which are written to `here`."""
    name, *over = rng.choice((*([name] for name in sorted(DATA)), *OTHERS))
    shape, record = DATA[name]
    preset = rng.choice(PRESETS[shape])
    over.append("schedule.warmup_steps=1")  # within four steps
    for setting in rng.sample(SETTINGS, rng.randint(0, 9)):
        try:
            tiny(name, shape, record, zoo, here, [*over, *setting])
            over += setting
        except mc.InputError as refusal:  # it does not go with the others
            assert "\n" not in str(refusal), f"not one line: {refusal}"
    recipe = tiny(name, shape, record, zoo, here, over)
    if recipe.optimizer.name == "adamw":  # else a gradient that is 0 but for rounding is a whole step
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, eps=1e-4))
    for file, most in {"train.jsonl": 40, "dev.jsonl": 9}.items():
        rows = [longer(record(n), rng) for n in range(rng.randint(7, most))]
        (here / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch, micro = rng.choice(BATCHES)
    data = replace(recipe.data, seq_len=recipe.data.seq_len + rng.choice((0, 0, 1, 5, 13)))
    if rng.random() < 0.1 and not data.group_by_length:
        data = replace(data, path={str(here / "train.jsonl"): 2.0, str(here / "dev.jsonl"): 1.0})
    recipe = replace(recipe, batch=batch, micro_batch=micro, data=data)
    if recipe.objective == "fim":
        recipe = replace(recipe, tokenizer="fim:400")
    if recipe.init == "pretrained":
        recipe = replace(recipe, model=str(zoo / rng.choice(list(BODIES)) / preset))
    if rng.random() < 0.8:
        recipe = replace(recipe, config=recipe.config | dict.fromkeys(rates(recipe.model), 0.0))
        recipe = replace(recipe, adapter=replace(recipe.adapter, dropout=0.0))
    if recipe.precision == "auto":  # which a CPU and a GPU resolve to different ones
        recipe = replace(recipe, precision="fp32")
    return replace(recipe, max_steps=STEPS, save_steps=MIDDLE, logging_steps=1, seed=rng.randint(0, 99), output_dir=str(here / "a"))


def longer(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A record with words behind its texts, if any."""
    added = {key: rng.choice((0, rng.randint(1, 25))) for key in TEXTS if isinstance(row.get(key), str)}
    return row | {key: " ".join([row[key], *sentence(rng.randint(0, 99), n).split()]) for key, n in added.items()}


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """The numbers of a run at each step that must not depend on where it runs."""
    found: dict[str, dict[int, float]] = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        for key, value in row.items():
            if key in ("loss", "lr", "grad_norm") or (key.startswith("eval_") and not key.endswith("second")):
                found.setdefault(key, {})[row["step"]] = value
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted((folder / "model").glob("*.safetensors")) for k, v in load_file(file).items()}


def forget(folder: Path) -> None:
    """Leave of a run's states the one in the middle."""
    for state in folder.glob("step-*"):
        shutil.rmtree(state) if state.name != f"step-{MIDDLE}" else None


def run_on(machine: Machine, recipe: Recipe) -> None:
    train(recipe, machine) if machine.ranks == 1 else spawn(machine.ranks, on_a_rank, recipe, machine)


def on_a_rank(rank: int, recipe: Recipe, machine: Machine) -> None:
    train(recipe, machine)


def try_one(number: int, seed: int, share: float, alone: Machine, zoo: Path, here: Path) -> str:
    """What came of a case: `refused`, or in which other way it was the same. Errors: whatever goes wrong; AssertionError for a
    difference."""
    rng = random.Random(f"{seed}/{number}")
    try:
        recipe = draw(rng, zoo, here)
        train(recipe, alone)
    except mc.InputError as refusal:
        assert "\n" not in str(refusal), f"not one line: {refusal}"
        return "refused"
    folder = here / "a"
    first, made = logged(folder), weights(folder)
    assert all(map(torch.isfinite, map(torch.tensor, first["loss"].values()))), first
    halved = max(first["loss"]) > MIDDLE
    if halved:
        forget(folder)
        train(recipe, alone)
        again = weights(folder)
        assert logged(folder) == first and again.keys() == made.keys(), "resumed: other losses or names"
        assert all(torch.equal(again[name], made[name]) for name in made), "resumed: other weights"
    still = all(recipe.config.get(key) == 0.0 for key in rates(recipe.model)) and recipe.adapter.dropout == 0.0
    together = find_objective(recipe.objective).together  # its texts are compared with those of their forward
    other, machine, then, how = replace(recipe, output_dir=str(here / "b")), alone, None, "recompute"
    if still and alone is CPU and rng.random() < share and not (together and (recipe.batch_tokens or recipe.micro_batch)):
        machine, how = replace(CPU, **rng.choice(MACHINES)), "ranks"
        if halved and rng.random() < 0.4:
            then, how = replace(CPU, **rng.choice((*MACHINES, {}))), "ranks, then others"
    elif alone is not CPU and rng.random() < 0.5:
        machine, how = (CPU, "a CPU") if still else (replace(alone, cuda_graphs=False), "no graphs")
    elif still and not together and recipe.batch_tokens is None and rng.random() < 0.5:
        other, how = replace(other, micro_batch=1 if recipe.micro_batch != 1 else None), "micro-batches"
    elif rng.random() < 0.3:
        machine, how = replace(alone, offload=True, async_save=True), "offload"
    else:
        machine = replace(alone, recompute=rng.choice(("selective", "full")))
    try:
        run_on(machine, other)
        if then is not None:
            forget(here / "b")
            run_on(then, other)
    except (mc.InputError, AssertionError) as error:
        if "InputError" in f"{type(error).__name__} {error}":
            return f"{how}, refused"
        raise
    finally:
        if dist.is_initialized():  # of offload; processes that are forked would have it too
            dist.destroy_process_group()
    coarse = recipe.optimizer.name in COARSE or recipe.optimizer.moments != "fp32" or recipe.adapter.quantize != "none"
    tolerance = 3e-2 if recipe.precision == "bf16" else 5e-3 if coarse else 1e-3
    found, what = logged(here / "b"), f"{how} ({machine}, {then})"
    assert found.keys() == first.keys(), f"{what}: {found.keys() ^ first.keys()}"
    for key, wanted in first.items():
        if recipe.precision == "bf16" and key.startswith("eval_") and key != "eval_loss":
            continue  # a metric of equal numbers, or of equal but for rounding, is another
        wide = tolerance * (10 if key == "grad_norm" else 1)
        near = found[key].keys() == wanted.keys() and all(
            abs(found[key][k] - wanted[k]) <= wide * max(1e-2, abs(wanted[k])) for k in wanted)  # fmt: skip
        assert near, f"{what}: {key} {found[key]}, wanted {wanted}"
    if not coarse and recipe.precision == "fp32":
        theirs, way = weights(here / "b"), sum(first["lr"].values())
        assert theirs.keys() == made.keys(), f"{what}: {theirs.keys() ^ made.keys()}"
        off = {name: float((theirs[name].float() - made[name].float()).abs().max()) / way for name in made}
        assert max(off.values()) < FAR, f"{what}: { {name: part for name, part in off.items() if part >= FAR} }"
    return how


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--ranks", type=float, default=0.3, help="the share of cases that are tried on several ranks")
    parser.add_argument("--device", default="cpu", choices=ALONE)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    came, wrong = Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        zoo = Path(name) / "zoo"
        make(zoo)
        for number in range(chosen.first, chosen.first + chosen.cases):
            here = Path(name) / str(number)
            here.mkdir()
            said = io.StringIO()
            try:
                with redirect_stdout(said), redirect_stderr(said):
                    came[try_one(number, chosen.seed, chosen.ranks, ALONE[chosen.device], zoo, here)] += 1
            except Exception:
                wrong.append(number)
                told = f"{said.getvalue()}case {number}, --seed {chosen.seed}:\n{traceback.format_exc()}"
                print(told, file=sys.stderr, flush=True)
            shutil.rmtree(here, ignore_errors=True)  # of one that went wrong a rank may be at work in it
    print(f"{chosen.cases} recipes, {len(wrong)} wrong {wrong or ''}: {dict(came)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
