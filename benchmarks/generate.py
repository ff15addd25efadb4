"""Tokens a second of generation, ours beside transformers': the same weights and prompts, one token after another.

    python benchmarks/generate.py [--cases gpt2,llama-3b,t5-base] [--contenders ours,...] [--batches 1,8] [--modes greedy,sample]
                                  [--prompt 128] [--new 256] [--rounds 3] [--dtype bf16] [--device cpu] [--quick] [--profile]
                                  [--limit SECONDS] [--out DIR]

Timed is the whole call of `generate`: the prompt, the tokens, and what ends a row. `ours calls` is ours without CUDA graphs, `hf
dynamic` transformers as it comes, `hf static` their cache of fixed size, which they compile by themselves on a GPU (the first
calls, with the compiler, are not timed). Drawn are all tokens of top_k 50 at temperature 0.8 from one seed. Weights are random; the
row of the token that ends a text is zero, so that it never does.

Before anything is timed every contender writes 24 tokens in fp32 from the same prompts: they must be the same tokens. In lower
precision near ties are decided by rounding; `same` is then the share of tokens before the first that differs from `ours`.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from page import leave
from train import profile

import modelcenter as mc
from modelcenter.generate import state

SMALL = {"layers": 2, "dim": 128, "heads": 4, "vocab": 2000}
CASES = {  # preset, task, transformers' class, fields of a small one
    "gpt2": ("gpt2", "lm", "AutoModelForCausalLM", SMALL),
    "llama-3b": ("llama-3.2-3b", "lm", "AutoModelForCausalLM", SMALL | {"kv_heads": 2, "head_dim": 32, "hidden": 512}),
    "t5-base": ("t5-base", "seq2seq", "AutoModelForSeq2SeqLM", SMALL | {"hidden": 512}),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTENDERS = ("ours", "ours calls", "hf dynamic", "hf static")
END = 1  # ends a text
DRAWN = {"do_sample": True, "top_k": 50, "temperature": 0.8}
CHECKED = 24  # tokens
Write = Callable[..., torch.Tensor]


def models(case: str, dtype: torch.dtype, device: torch.device, quick: bool) -> tuple[Any, Any]:
    """Ours and transformers' model, with the same weights."""
    import transformers

    preset, task, auto, small = CASES[case]
    ours = mc.build(preset, task=task, dtype=dtype, device="meta", config=small if quick else None).to_empty(device=device)
    ours.tie()
    with torch.no_grad():  # drawn where they will be: sooner than weights that are the same on every machine
        for p in ours.parameters():
            p.normal_(0, 0.02) if p.dim() > 1 else p.fill_(1)
        ours.head.out.weight[END] = 0
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        theirs = getattr(transformers, auto).from_pretrained(folder, dtype=dtype).to(device)
    theirs.generation_config = transformers.GenerationConfig(eos_token_id=END, pad_token_id=END, decoder_start_token_id=0)
    return ours.eval(), theirs.eval()


def writers(case: str, dtype: torch.dtype, device: torch.device, quick: bool, wanted: list[str]) -> tuple[dict[str, Write], int]:
    """By name a function (ids, new, draw) that writes `new` tokens behind ids; and the size of the vocabulary."""
    model, theirs = models(case, dtype, device, quick)
    common = {"eos_token_id": END, "pad_token_id": END}

    def ours(ids: torch.Tensor, new: int, draw: bool, **options: Any) -> torch.Tensor:
        drawn = DRAWN | {"seed": 0} if draw else {}
        found: torch.Tensor = model.generate(ids, max_new_tokens=new, **common, **drawn, **options)
        return found[:, -new:]

    def calls(*args: Any) -> torch.Tensor:
        with patch.object(state, "suits", lambda _: False):
            return ours(*args)

    def hf(ids: torch.Tensor, new: int, draw: bool, **options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        drawn = DRAWN if draw else {"do_sample": False}
        mask = torch.ones_like(ids)
        found: torch.Tensor = theirs.generate(ids, attention_mask=mask, max_new_tokens=new, **drawn, **options)
        return found[:, -new:]

    static = {"cache_implementation": "static"}
    made: dict[str, Write] = {"ours": ours, "ours calls": calls, "hf dynamic": hf, "hf static": partial(hf, **static)}
    return {name: write for name, write in made.items() if name in wanted}, model.config.vocab


def check(case: str, device: torch.device, options: argparse.Namespace) -> None:
    """In fp32 all contenders write the same tokens."""
    wanted = [name for name in options.contenders if name != "hf static" or device.type == "cpu"]  # theirs compiles for minutes
    found, vocab = writers(case, torch.float32, device, options.quick, wanted)
    ids = prompts(2, options.prompt, vocab, device)
    for draw in (False, True):
        written = {name: write(ids, CHECKED, draw) for name, write in found.items()}
        first = next(iter(written))
        for name, tokens in written.items():
            if not torch.equal(tokens, written[first]):
                raise SystemExit(f"{case}: {name} and {first} write different tokens (draw={draw})")
    print(f"{case}: {', '.join(found)} write the same {CHECKED} tokens in fp32, the likeliest and drawn", file=sys.stderr)


def prompts(size: int, length: int, vocab: int, device: torch.device) -> torch.Tensor:
    return torch.randint(5, vocab, (size, length), generator=torch.Generator().manual_seed(0)).to(device)


def seconds(write: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, torch.Tensor]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    tokens = write()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, tokens


def measure(case: str, options: argparse.Namespace, device: torch.device, over: Callable[[], bool]) -> list[dict[str, Any]]:
    """A row for every batch, mode and contender; the contenders of one batch and mode in turn."""
    found, vocab = writers(case, DTYPES[options.dtype], device, options.quick, options.contenders)
    rows = []
    for size in options.batches:
        ids = prompts(size, options.prompt, vocab, device)
        for mode in options.modes:
            times: dict[str, list[float]] = {name: [] for name in found}
            written: dict[str, torch.Tensor] = {}
            for name, write in found.items():  # what is made at a first call is there; a compiler takes two
                for _ in range(2 if name == "hf static" and device.type == "cuda" else 1):
                    write(ids, 256 if name == "hf static" else 8, mode == "sample")
            for turn in range(options.rounds):
                for name, write in list(found.items())[:: -1 if turn % 2 else 1]:
                    if not (over() and times[name]):
                        taken, written[name] = seconds(partial(write, ids, options.new, mode == "sample"), device)
                        times[name].append(taken)
            if options.profile and "ours" in found:
                print(profile(partial(found["ours"], ids, options.new, mode == "sample")), file=sys.stderr)
            base = next(iter(written.values()))
            for name, tokens in written.items():
                differ = (tokens != base).any(0).nonzero()
                same = (int(differ[0]) if len(differ) else options.new) / options.new
                median = statistics.median(times[name])
                row = {"case": case, "contender": name, "batch": size, "mode": mode, "seconds": times[name], "same": same,
                       "tokens": size * options.new / median, "step": 1e3 * median / options.new}  # fmt: skip
                rows.append(row)
                said = f"{row['tokens']:.0f} tok/s, {row['step']:.2f} ms a step, same {same:.0%}"
                print(f"{case} B{size} {mode} {name}: {said}", file=sys.stderr, flush=True)
            if over():
                return rows
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commas = lambda text: text.split(",")  # noqa: E731  # a converter of argparse
    parser.add_argument("--cases", type=commas, default=list(CASES))
    parser.add_argument("--contenders", type=commas, default=list(CONTENDERS))
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")], default=[1, 8])
    parser.add_argument("--modes", type=commas, default=["greedy", "sample"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small models of the same kinds")
    parser.add_argument("--profile", action="store_true", help="the top operators of ours, too")
    parser.add_argument("--unchecked", action="store_true", help="do not compare the tokens in fp32 first")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument("--out", type=Path, help="the folder for generate.md and generate.jsonl")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    device, began, rows = torch.device(options.device), time.monotonic(), []
    over = lambda: time.monotonic() - began > options.limit  # noqa: E731  # asked for in several places
    for case in options.cases:
        if over():
            print(f"{case}: no time left", file=sys.stderr)
            continue
        if not options.unchecked:
            check(case, device, options)
        rows += measure(case, options, device, over)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    text = ["| case | batch | mode | contender | tok/s | ms a step | same |", "|---|---:|---|---|---:|---:|---:|"]
    for row in rows:
        spread = (max(row["seconds"]) - min(row["seconds"])) / 2 / statistics.median(row["seconds"])
        text.append(f"| {row['case']} | {row['batch']} | {row['mode']} | {row['contender']} | {row['tokens']:.0f} ±{spread:.0%} "
                    f"| {row['step']:.2f} | {row['same']:.0%} |")  # fmt: skip
    leave("Generation", device.type, text, rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
