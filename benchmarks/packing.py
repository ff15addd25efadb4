"""Tokens a second of the same ragged sequences padded, grouped by length, padding-free and packed: one step each, in turn.

    python benchmarks/packing.py [--model gpt2] [--data rows.jsonl] [--threads N] [--rounds 5]

Lengths are those of `--data` (its `instruction` and `output` fields under a byte-level tokenizer), or drawn: log-normal, as
documents have them. Each way runs the same number of real tokens a round; a round takes every way once, in another order;
what is reported is each way's best round, for other work on the machine only adds time.
"""

import argparse
import random
import time
from collections.abc import Iterator
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
from modelcenter.data.tokenizer import train_tokenizer
from modelcenter.train.evaluate import count_tokens
from modelcenter.train.loop import accumulate

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
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    records = rows(asked.data)
    tokenizer = train_tokenizer([], 257) if asked.data is None else train_tokenizer(
        (r.fields[key] for r in records for key in KEYS.values()), SHAPE["vocab"])
    model = mc.build(asked.model, config=SHAPE).train()

    def steps(**data: Any) -> Iterator[Any]:
        examples = make_examples("lm", records, tokenizer, DataConfig(seq_len=512, **KEYS, **data))
        order = Grouped(examples.lengths, 0, 16) if data.get("group_by_length") else None
        batch = 4 if data.get("packing") else 16
        return (pieces[0] for _, pieces in Loader(examples, examples.collate, batch, order=order).steps())

    ways = {"padded": steps(), "grouped by length": steps(group_by_length=True), "padding-free": steps(padding_free=True),
            "packed": steps(packing=True)}  # fmt: skip
    best: dict[str, float] = {}
    for number in range(asked.rounds + 1):
        for way in random.sample(list(ways), len(ways)):
            done, began = 0, time.perf_counter()
            for batch in islice(ways[way], 10**6):
                accumulate(model, [batch], "lm")
                model.zero_grad()
                done += count_tokens(batch, "lm")
                if done >= asked.tokens:
                    break
            if number:  # the first only warms up
                best[way] = max(best.get(way, 0.0), done / (time.perf_counter() - began))
    for way, rate in best.items():
        print(f"{way:20} {rate:10,.0f} tokens/s  {rate / best['padded']:.2f} x")


if __name__ == "__main__":
    main()
