"""A character GPT in nanoGPT's CPU shape, trained by our loop and by a plain loop around transformers' GPT-2: the same initial
weights, batches, optimizer and schedule. Prints both losses on the whole held-out tenth.

    python benchmarks/shakespeare.py input.txt [--steps 2000] [--device auto]
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import modelcenter as mc
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.optim.schedules import lr_factor
from modelcenter.train.prepare import prepare
from modelcenter.train.read import load_recipe
from modelcenter.train.resolve import resolve


def recipe_for(file: str, out: str, steps: int) -> mc.Recipe:
    overrides = {
        "data.path": file, "data.format": "text", "data.eval_fraction": 0.1, "data.seq_len": 64, "tokenizer": "char",
        "config.layers": 4, "config.dim": 128, "config.heads": 4, "config.positions": 64,
        "config.dropout": 0.0, "config.embed_dropout": 0.0, "config.attn_dropout": 0.0,
        "batch": 12, "max_steps": steps, "seed": 1337, "precision": "fp32", "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.99],
        "schedule.warmup_steps": min(100, steps // 10), "eval_steps": 500, "save_steps": None, "save_total_limit": None,
        "output_dir": out, "logging_steps": 100,
    }  # fmt: skip
    return load_recipe("pretrain", overrides)


def theirs(recipe: mc.Recipe, machine: mc.Machine) -> float:
    """The same run with transformers' model in a plain loop; the held-out loss."""
    from transformers import GPT2LMHeadModel

    recipe, device = resolve(recipe, machine)
    setup = prepare(recipe, machine, device)
    with tempfile.TemporaryDirectory() as folder:
        setup.model.save_pretrained(folder)
        model = GPT2LMHeadModel.from_pretrained(folder).to(device).train()
    optimizer = build_optimizer(model, recipe.optimizer)
    steps = setup.loader.steps(0, micro_batch=recipe.micro_batch)
    for step in range(setup.steps):
        _, batches = next(steps)
        for group in optimizer.param_groups:
            group["lr"] = recipe.optimizer.lr * lr_factor(recipe.schedule, step, setup.steps)
        for batch in batches:
            (model(**{k: v.to(device) for k, v in batch.items()}).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert setup.evaluation is not None
    total = count = 0.0
    with torch.no_grad():
        for batch in setup.evaluation.loader.once():
            batch = {k: v.to(device) for k, v in batch.items()}
            n = int((batch["labels"][:, 1:] != -100).sum())
            total, count = total + float(model(**batch).loss) * n, count + n
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    machine = mc.Machine(device=args.device)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_for(args.file, str(Path(folder) / "ours"), args.steps)
        began = time.perf_counter()
        run = mc.train(recipe, machine)
        ours, middle = run.metrics["eval_loss"], time.perf_counter()
        reference = theirs(replace(recipe, output_dir=str(Path(folder) / "theirs")), machine)
    print(f"held-out loss after {args.steps} steps: modelcenter {ours:.4f} ({middle - began:.0f} s), "
          f"transformers {reference:.4f} ({time.perf_counter() - middle:.0f} s), "
          f"difference {abs(ours - reference):.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
