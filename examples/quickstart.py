"""The whole road in one go, on text that every machine already has: Python's own standard library.

    python examples/quickstart.py [folder] [--steps 600]

Trains a tokenizer and a small GPT on the library's source code, saves it as a sharded Hugging Face folder and loads that back,
fine-tunes it on the library's docstrings, opens what came out with transformers and compares the logits, and prints a sample.
The folder (quickstart-run) then holds both runs with their checkpoints and metrics, and curves.png with both losses.
"""

import argparse
import ast
import json
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from modelcenter.errors import InputError

BYTES = 3_000_000  # of source code, enough for the minutes this takes


def sources() -> list[Path]:
    """The library's modules in an order of no meaning, without its tests and without what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "pydoc_data"}
    files = [f for f in sorted(root.rglob("*.py")) if not skip & set(f.relative_to(root).parts)]
    random.Random(0).shuffle(files)  # what is held out for evaluation is the end, and shall be like the rest
    return files


def corpus(folder: Path) -> tuple[Path, Path]:
    """Two files of one JSON record a line: source code without its docstrings, and the docstrings."""
    code, docs, size = [], [], 0
    for file in sources():
        try:
            text = file.read_text("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                docs.append(ast.get_docstring(node))
                at = node.body[0]
                lines[at.lineno - 1 : at.end_lineno] = [""] * ((at.end_lineno or at.lineno) - at.lineno + 1)
        if size < BYTES:
            code.append("".join(lines))
            size += len(code[-1])
    out = folder / "code.jsonl", folder / "docstrings.jsonl"
    for path, texts in zip(out, (code, docs), strict=True):
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts if t.strip()), "utf-8")
    print(f"{len(code)} modules ({size / 1e6:.1f} MB) and {len(docs)} docstrings of Python {sys.version.split()[0]}", flush=True)
    return out


def picture(runs: dict[str, Path], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(runs), figsize=(5 * len(runs), 3.5), squeeze=False)
    for ax, (title, run) in zip(axes[0], runs.items(), strict=True):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for key, style in (("loss", "-"), ("eval_loss", "o-")):
            points = [(r["step"], r[key]) for r in rows if key in r]
            ax.plot(*zip(*points, strict=True), style, label=key)
        ax.set(title=title, xlabel="step", ylabel="loss")
        ax.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, fine-tune and check a small GPT on the standard library's text.")
    parser.add_argument("folder", nargs="?", default="quickstart-run", type=Path)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of the first run; the second has half as many")
    args = parser.parse_args()
    began = time.monotonic()

    def section(title: str) -> None:
        print(f"\n== {title} ({time.monotonic() - began:.0f} s)", flush=True)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import modelcenter as mc

    logging.disable_progress_bar()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    section("1. read the standard library")
    code, docs = corpus(folder)

    def common(steps: int) -> dict[str, Any]:
        return {
            "data.seq_len": 128, "data.eval_fraction": 0.01, "batch": 8, "max_steps": steps, "resume": "auto",
            "schedule.warmup_steps": max(1, steps // 10), "logging_steps": max(1, steps // 30),
            "eval_steps": max(1, steps // 5), "save_steps": max(1, steps // 2),
        }  # fmt: skip

    section("2. pretrain: a tokenizer and a GPT on source code")
    shape = {"layers": 4, "dim": 192, "heads": 6, "positions": 128, "dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0}
    first = mc.train("pretrain", overrides={
        "data.path": str(code), "output_dir": str(folder / "pretrain"), "tokenizer": "bpe:2048", "optimizer.lr": 2e-3,
        **{f"config.{field}": value for field, value in shape.items()}, **common(args.steps),
    })  # fmt: skip

    section("3. save it in shards, as Hugging Face does, and load it back")
    shards = folder / "sharded"
    first.model.save_pretrained(shards, max_shard_size="4MB")
    model = mc.GPT.from_pretrained(shards)
    print(f"{sorted(f.name for f in shards.glob('*.safetensors'))}: {model.load_report}")

    section("4. fine-tune it on docstrings")
    mc.train("finetune", overrides={
        "model": str(shards), "data.path": str(docs), "output_dir": str(folder / "finetune"), "optimizer.lr": 1e-3,
        **common(max(1, args.steps // 2)),
    })  # fmt: skip

    section("5. open the result with transformers")
    result = folder / "finetune" / "model"
    ours, theirs = mc.load(result), AutoModelForCausalLM.from_pretrained(result).eval()
    tokenizer = AutoTokenizer.from_pretrained(result)
    ids = torch.tensor([tokenizer.encode("Return the number of")])
    with torch.no_grad():
        off = (ours(ids).logits - theirs(ids).logits).abs().max().item()
    print(f"largest difference of a logit: {off:.1e}")
    if not off < 1e-4:
        sys.exit("the logits differ: this is a bug, please report it")

    section("6. a sample")
    text = ours.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.8, top_k=40, seed=0)
    print(tokenizer.decode(text[0].tolist()))

    picture({"pretrain: source code": folder / "pretrain", "fine-tune: docstrings": folder / "finetune"}, folder / "curves.png")
    section("done")
    print(f"{folder}/ holds pretrain/ and finetune/ (step-N/, model/, metrics.jsonl, loss.png), sharded/ and curves.png")


if __name__ == "__main__":
    try:
        main()
    except InputError as problem:  # such as a folder that holds a run of other --steps
        sys.exit(f"quickstart: {problem}")
