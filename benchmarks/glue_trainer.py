"""A recipe of classification by transformers.Trainer, and by modelcenter beside it: what the model reaches under either.

    python benchmarks/glue_trainer.py FOLDER RECIPE [key=value ...] [--seeds 0,1,2] [--only ours|theirs] [--device auto|cpu|cuda]

FOLDER is a model with its tokenizer that transformers opens. The recipe (glue/mrpc, glue/rte, glue/cola ...) says the rest: rate,
schedule, decay, betas, clipping, batch, epochs, length, precision, label smoothing, when to evaluate, which metric decides. Theirs:
transformers' tokenizer, padding, model, Trainer and AdamW on the same rows in the same order; their metrics are scikit-learn's.
What Trainer does not have (ema, layer_decay, adapters ...) is refused. A line for each seed: the last evaluation, and the best one.

    python benchmarks/glue_trainer.py minilm glue/mrpc data.path=train.tsv data.eval_path=dev.tsv data.text_key='#1 String' \
        data.pair_key='#2 String' data.label_key=Quality num_epochs=6 eval_steps=50
"""

import argparse
import tempfile
import warnings
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

import modelcenter as mc
from modelcenter.data.objective import find_objective
from modelcenter.data.order import Shuffled
from modelcenter.data.read import read_split
from modelcenter.data.record import Record
from modelcenter.errors import refuse
from modelcenter.metrics.table import METRICS
from modelcenter.train.metrics import read_rows
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.resolve import resolve

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}
SCORES = {"accuracy": accuracy_score, "f1": f1_score, "mcc": matthews_corrcoef}
USUAL = {  # keys that Trainer has no like of, and what they must be
    "objective": "classify", "micro_batch": None, "batch_tokens": None, "ema": None, "freeze": (), "config": {}, "max_steps": None,
    "patience": None, "init": "pretrained",
}  # fmt: skip


class Ordered(transformers.Trainer):  # type: ignore[misc]  # transformers has no types for mypy
    """In the order in which the rows are given."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def check(recipe: Recipe) -> None:
    """Refuse a recipe that Trainer cannot do the same."""
    given = {**{key: getattr(recipe, key) for key in USUAL}, "adapter.name": recipe.adapter.name,
             "optimizer.name": recipe.optimizer.name, "optimizer.moments": recipe.optimizer.moments,
             "optimizer.layer_decay": recipe.optimizer.layer_decay, "schedule.name": recipe.schedule.name in SCHEDULES,
             "schedule.min_lr_ratio": recipe.schedule.min_lr_ratio, "data.packing": recipe.data.packing,
             "data.group_by_length": recipe.data.group_by_length, "data.shuffle": recipe.data.shuffle}  # fmt: skip
    usual = {**USUAL, "adapter.name": "none", "optimizer.name": "adamw", "optimizer.moments": "fp32", "optimizer.layer_decay": 1.0,
             "schedule.name": True, "schedule.min_lr_ratio": 0.0, "data.packing": False, "data.group_by_length": False,
             "data.shuffle": True}  # fmt: skip
    for key, value in given.items():
        if value != usual[key]:
            refuse(None, key, repr(value), "what Trainer has too: leave it out")


def theirs(folder: str, recipe: Recipe, device: str) -> list[dict[str, float]]:
    """The evaluations of a run by Trainer, in order."""
    data, metrics = recipe.data, list(dict.fromkeys(["accuracy", *recipe.metrics, recipe.best or "accuracy"]))
    records, held_out = read_split(data)
    names = find_objective("classify").names(records, data) or ()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def row(record: Record) -> dict[str, Any]:
        first = record.text(data.text_key, "data.text_key")
        second = None if data.pair_key is None else record.text(data.pair_key, "data.pair_key")
        label = str(record.get(data.label_key, "data.label_key"))
        number = names.index(label) if label in names else int(label)
        return {**tokenizer(first, second, truncation=True, max_length=data.seq_len), "label": number}

    rows, judged = [row(record) for record in records], [row(record) for record in held_out]
    steps = ceil((recipe.num_epochs or 0) * len(rows) / recipe.batch)
    order = Shuffled(len(rows), recipe.seed)
    ordered = [rows[order.place(position)[1]] for position in range(steps * recipe.batch)]
    transformers.set_seed(recipe.seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(names))

    def score(found: Any) -> dict[str, float]:
        told = np.argmax(found.predictions, -1)
        return {name: float(SCORES[name](found.label_ids, told)) for name in metrics}

    with tempfile.TemporaryDirectory() as place:
        arguments = transformers.TrainingArguments(
            output_dir=place, use_cpu=device == "cpu", report_to="none", save_strategy="no", disable_tqdm=True, seed=recipe.seed,
            per_device_train_batch_size=recipe.batch, per_device_eval_batch_size=64, max_steps=steps,
            learning_rate=recipe.optimizer.lr, weight_decay=recipe.optimizer.weight_decay, adam_beta1=recipe.optimizer.betas[0],
            adam_beta2=recipe.optimizer.betas[1], adam_epsilon=recipe.optimizer.eps, max_grad_norm=recipe.max_grad_norm,
            lr_scheduler_type=SCHEDULES[recipe.schedule.name], warmup_steps=recipe.schedule.of(steps).warmup_steps,
            label_smoothing_factor=recipe.loss.label_smoothing, bf16=recipe.precision == "bf16", fp16=recipe.precision == "fp16",
            eval_strategy="steps" if recipe.eval_steps else "no", eval_steps=recipe.eval_steps, logging_steps=10**9,
            dataloader_pin_memory=False,
        )  # fmt: skip
        collate = transformers.DataCollatorWithPadding(tokenizer)
        trainer = Ordered(model=model, args=arguments, train_dataset=ordered, eval_dataset=judged, data_collator=collate,
                          compute_metrics=score)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        found = [row for row in trainer.state.log_history if "eval_loss" in row]
        if not found or found[-1]["step"] != steps:
            found.append({**trainer.evaluate(), "step": steps})
    return found


def ours(folder: str, recipe: Recipe, device: str) -> list[dict[str, float]]:
    """The evaluations of a run by modelcenter."""
    with tempfile.TemporaryDirectory() as place:
        recipe = replace(recipe, model=folder, output_dir=str(Path(place) / "out"), save_steps=None, report_to=())
        run = mc.train(recipe, mc.Machine(device=device))  # type: ignore[arg-type]  # argparse has checked it
        return [row for row in read_rows(run.output_dir / "metrics.jsonl") if "eval_loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", choices=["ours", "theirs"])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    args = parser.parse_intermixed_args()
    warnings.filterwarnings("ignore")
    recipe = load_recipe(args.recipe, args.settings)
    check(recipe)
    recipe = replace(recipe, precision=resolve(recipe, mc.Machine(device=args.device))[0].precision)
    metric, keys = recipe.best or "accuracy", list(dict.fromkeys(["accuracy", *recipe.metrics, recipe.best or "accuracy"]))
    more = METRICS[metric].more
    for seed in map(int, args.seeds.split(",")):
        for name, run in (("theirs", theirs), ("ours", ours)):
            if args.only in (None, name):
                rows = run(args.folder, replace(recipe, seed=seed), args.device)
                best = (max if more else min)(rows, key=lambda row: row[f"eval_{metric}"])
                for what, row in (("last", rows[-1]), ("best", best)):
                    said = ", ".join(f"{key} {row[f'eval_{key}']:.4f}" for key in keys)
                    print(f"seed {seed} {name:<6} {what} (step {row['step']:.0f}): {said}, loss {row['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
