"""The whole road in one go, on text that every machine already has: Python's own standard library.

    python examples/quickstart.py [folder]

Trains a tokenizer and a small GPT on the library's source code, loads the result back, fine-tunes it on the library's
docstrings, opens what came out with transformers and compares the logits, and prints a sample. The folder (quickstart-run) then
holds both runs with their checkpoints and metrics, and curves.png with both losses.
"""

import argparse
import ast
import json
import sys
import sysconfig
import time
from pathlib import Path

BYTES = 3_000_000  # of source code, enough for the minutes this takes


def sources() -> list[Path]:
    """The library's modules, without its tests and without what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "pydoc_data"}
    return [f for f in sorted(root.rglob("*.py")) if not skip & set(f.relative_to(root).parts)]


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
    print(f"{len(code)} modules ({size / 1e6:.1f} MB) and {len(docs)} docstrings of Python {sys.version.split()[0]}")
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
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each of the two runs")
    args = parser.parse_args()
    began = time.monotonic()

    import torch

    import modelcenter as mc

    args.folder.mkdir(parents=True, exist_ok=True)
    code, docs = corpus(args.folder)
    shape = {"config.layers": 4, "config.dim": 192, "config.heads": 6, "config.positions": 128}
    common = {
        "data.seq_len": 128, "data.eval_fraction": 0.02, "batch": 16, "max_steps": args.steps, "resume": "auto",
        "schedule.warmup_steps": max(1, args.steps // 10), "save_steps": max(1, args.steps // 2), "eval_steps": max(1, args.steps // 3),
    }  # fmt: skip

    print("\n== 1. pretrain: a tokenizer and a GPT on source code")
    first = {"data.path": str(code), "output_dir": str(args.folder / "pretrain"), "tokenizer": "bpe:4096", **shape, **common}
    mc.train("pretrain", overrides=first)

    print("\n== 2. load it back: a Hugging Face folder")
    trained = args.folder / "pretrain" / "model"
    model = mc.GPT.from_pretrained(trained)
    print(f"GPT.from_pretrained({str(trained)!r}): {model.load_report}")

    print("\n== 3. fine-tune it on docstrings")
    second = {"model": str(trained), "data.path": str(docs), "output_dir": str(args.folder / "finetune"), "optimizer.lr": 5e-4}
    mc.train("finetune", overrides={**second, **common})

    print("\n== 4. open the result with transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = args.folder / "finetune" / "model"
    ours, theirs = mc.load(result), AutoModelForCausalLM.from_pretrained(result).eval()
    tokenizer = AutoTokenizer.from_pretrained(result)
    ids = torch.tensor([tokenizer.encode("Return the number of items in the list")])
    with torch.no_grad():
        off = (ours(ids).logits - theirs(ids).logits).abs().max().item()
    print(f"largest difference of a logit: {off:.1e}")
    if not off < 1e-4:
        sys.exit("the logits differ: this is a bug, please report it")

    print("\n== 5. a sample")
    text = ours.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.8, top_k=40, seed=0)
    print(tokenizer.decode(text[0].tolist()))

    picture({"pretrain: source code": args.folder / "pretrain", "fine-tune: docstrings": args.folder / "finetune"},
            args.folder / "curves.png")  # fmt: skip
    print(f"\n{args.folder}: pretrain/ and finetune/ (step-N/, model/, metrics.jsonl), curves.png; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
