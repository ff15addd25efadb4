"""Tokens a second of the same ragged sequences padded, grouped by length, padding-free and packed: one step each, in turn.

    python benchmarks/packing.py [--model gpt2] [--data rows.jsonl] [--threads N] [--rounds 5] [--task mlm]
                                 [--device cuda --whole --batch 64]

Lengths are those of `--data` (its `instruction` and `output` fields under a byte-level tokenizer), or drawn: log-normal, as
documents have them. Each way runs the same number of real tokens a round; a round takes every way once, in another order;
what is reported is each way's best round, for other work on the machine only adds time. `--whole` takes the model's own sizes and
bf16, and `--batch` rows a step: as many padded ones, or packed ones of 512 tokens.
"""

import argparse
import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

import modelcenter as mc
from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Loader
from modelcenter.data.objective import make_examples
from modelcenter.data.order import Grouped
from modelcenter.data.read import read_records
from modelcenter.data.record import Record
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.train.evaluate import count_tokens
from modelcenter.train.step import accumulate, autocast

SHAPE = {"layers": 4, "dim": 256, "heads": 4, "positions": 512, "vocab": 8192}
KEYS = {"prompt_key": "instruction", "response_key": "output"}


def rows(path: str | None) -> Any:
    """Records of a prompt and a response."""
    if path is not None:
        return read_records(path)
    lengths = np.random.default_rng(0).lognormal(4.3, 0.9, 3000).astype(int).clip(4, 500)
    return [Record({"instruction": "a" * int(n // 3), "output": "b" * int(n - n // 3)}, "drawn", k) for k, n in enumerate(lengths)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="gpt2")
    options.add_argument("--data")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=32768, help="real tokens of a round")
    options.add_argument("--task", default="lm", choices=("lm", "mlm"))
    options.add_argument("--device", default="cpu")
    options.add_argument("--whole", action="store_true", help="the model's own sizes, bf16 over fp32 weights")
    options.add_argument("--batch", type=int, default=16)
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    records = rows(asked.data)
    kind = "roberta" if asked.task == "mlm" else "bpe"
    texts = [] if asked.data is None else (r.fields[key] for r in records for key in KEYS.values())
    tokenizer = train_tokenizer(texts, 270 if asked.data is None else SHAPE["vocab"], kind)
    device = torch.device(asked.device)
    model = mc.build(asked.model, task=asked.task, config={} if asked.whole else SHAPE, device=device).train()
    compute = partial(autocast, "bf16" if asked.whole else "fp32", device)
    if asked.task == "mlm":
        records = [Record({"text": r.fields["instruction"] + r.fields["output"]}, r.file, r.line) for r in records]
    keys = KEYS if asked.task == "lm" else {"text_key": "text"}

    def steps(**data: Any) -> Iterator[Any]:
        examples = make_examples(asked.task, records, tokenizer, DataConfig(seq_len=512, **keys, **data))
        order = Grouped(examples.lengths, 0, asked.batch) if data.get("group_by_length") else None
        batch = asked.batch if asked.whole or not data.get("packing") else asked.batch // 4
        return (pieces[0] for _, pieces in Loader(examples, examples.collate, batch, order=order).steps())

    ways = {"padded": steps(), "grouped by length": steps(group_by_length=True), "padding-free": steps(padding_free=True),
            "packed": steps(packing=True)}  # fmt: skip
    best: dict[str, float] = {}
    for number in range(asked.rounds + 1):
        for way in random.sample(list(ways), len(ways)):
            done, began = 0, time.perf_counter()
            for batch in islice(ways[way], 10**6):
                accumulate(model, [batch], asked.task, compute)
                model.zero_grad()
                done += count_tokens(batch, asked.task)
                if done >= asked.tokens:
                    break
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first only warms up
                best[way] = max(best.get(way, 0.0), done / (time.perf_counter() - began))
    for way, rate in best.items():
        print(f"{way:20} {rate:10,.0f} tokens/s  {rate / best['padded']:.2f} x")


if __name__ == "__main__":
    main()
