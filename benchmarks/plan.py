"""Predictions against measurements: memory at the peak and seconds of a step, written down before any of it is measured.

    python benchmarks/plan.py --list                                    # the points
    python benchmarks/plan.py --predict [--gpus 1,2] [--device h200] --out DIR      # on any machine
    python benchmarks/plan.py [--gpus 1,2] [--minutes 9] --out DIR      # those that are not measured yet, on the GPUs here
    python benchmarks/plan.py --report --out DIR                        # what came of the predictions

The points below were written down before they were run, and nothing is fitted to them. A prediction, once in DIR/said-K.json (for
the device that is named) or DIR/here-K.json (by the machine itself, whose host is timed), is never made again, and DIR/point-K.json
is what its point took. Points of one GPU run side by side, on each GPU one after the other; those of several follow, on groups of
GPUs side by side, started anew with the rest if one brings its processes down. Each point is a recipe, and what runs is what
`modelcenter train` runs of its step: batches made ready by a thread that reads ahead, forward and backward as a CUDA graph where a
run has one, clip, update, average, on random ids. No calibration from past runs is used. Memory is the most that any rank's
allocator held, and what ranks map of each other (on a CPU the profiler's record of allocations), beside what is foreseen without
the allowance for fragments; time is the median of the steps after those that warm up, from the end of one to the end of the next.
`--tiny`: the points with tiny models, on CPU ranks.
"""

import argparse
import datetime
import gc
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import modelcenter as mc
from modelcenter.adapter.attach import choose, fill_all, first_values, insert
from modelcenter.adapter.config import AdapterConfig
from modelcenter.checkpoint.match import LoadReport
from modelcenter.config import bind, merge
from modelcenter.data.collate import IGNORED, pack, pad
from modelcenter.data.prefetch import prefetch
from modelcenter.layers.initial import Constant, Normal, initial
from modelcenter.optim.ema import EMA
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.device import memory_of
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.peers import Mapped
from modelcenter.parallel.ranks import settle
from modelcenter.place import place
from modelcenter.plan.chips import CHIPS, Chip, chip_here, chip_named
from modelcenter.plan.costs import Costs
from modelcenter.train.fit import job_of
from modelcenter.train.graphs import WARM, graphs_of
from modelcenter.train.launch import THREADS, threads_of
from modelcenter.train.recipe import Recipe
from modelcenter.train.step import Ready, accumulate, autocast, ready, soon, update

MEMORY, TIME, CHOICE = 0.08, 0.15, 0.05  # how far off a prediction may be; how much slower than the best one tried the choice
START = 2  # points that could be measured while processes start
SILENCE = 60  # seconds after which a process that has not finished a point is ended


class Job(NamedTuple):
    """What is trained: `batch` sequences of `length` a step over all ranks. Points of one job differ in their layout alone."""

    name: str
    task: str
    batch: int
    length: int
    config: dict[str, Any] = {}
    precision: str = "bf16"
    more: dict[str, Any] = {}  # keys of its recipe


class Point(NamedTuple):
    number: int
    gpus: int
    job: Job
    rows: int  # of a micro-batch
    degrees: dict[str, Any]  # of the machine, and recompute


def tp(n: int, fsdp: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel": n, **({"fsdp": fsdp} if fsdp > 1 else {}), **more}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"fsdp": 2, "zero": stage, **more}


FULL, SELECTIVE, COPIES, HOST = {"recompute": "full"}, {"recompute": "selective"}, {"replicate": 2}, {"offload": True}
TENTH = {"layers": 10}  # a quarter of the 13B, of the same blocks
PROMPTS = {"data": {"prompt_key": "prompt", "response_key": "response"}}
PACKED, UNPADDED = {"data": {"packing": True}}, {"data": {"padding_free": True}}
LORA = {"adapter": {"name": "lora", "rank": 16, "dropout": 0.05}}
QLORA = merge(LORA, {"adapter": {"quantize": "nf4"}})


def optimizer(**keys: Any) -> dict[str, Any]:
    return {"optimizer": keys}


def target(length: int) -> dict[str, Any]:
    return {"data": {"target_len": length}}


WANTED: list[tuple[int, list[tuple[Job, list[tuple[int, dict[str, Any]]]]]]] = [  # in the order in which they were thought of
    (1, [
        (Job("gpt2-xl", "lm", 16, 1024), [(16, {}), (8, {}), (4, {}), (16, FULL), (16, SELECTIVE)]),
        (Job("gpt2-medium", "lm", 32, 1024), [(32, {}), (8, {})]),
        (Job("gpt2-medium", "lm", 8, 1024, precision="fp32"), [(8, {})]),
        (Job("gpt2-large", "lm", 32, 512), [(32, {}), (16, {})]),
        (Job("bert-large-uncased", "mlm", 64, 512), [(64, {}), (32, SELECTIVE), (64, FULL)]),
        (Job("t5-large", "seq2seq", 16, 512), [(16, {}), (16, FULL)]),
        (Job("t5-v1_1-base", "seq2seq", 32, 512), [(32, {})]),
        (Job("llama-3.2-1b", "lm", 8, 2048), [(4, {}), (8, FULL), (8, SELECTIVE)]),
        (Job("llama-3.2-3b", "lm", 2, 4096), [(2, SELECTIVE), (1, {})]),
        (Job("bloom-560m", "lm", 8, 1024), [(8, {})]),
        (Job("bloom-1b7", "lm", 8, 1024), [(8, {})]),
        (Job("cpm-ant-10b", "lm", 8, 512, {"layers": 12}), [(8, {})]),
        (Job("gpt2-13b", "lm", 2, 512, {"layers": 24}), [(2, FULL)]),  # 7.8 G parameters: about all there is
        (Job("gpt2", "lm", 64, 1024), [(64, {}), (8, {})]),
        (Job("bert-base-uncased", "mlm", 128, 512), [(128, {}), (32, SELECTIVE)]),
        (Job("llama-3.2-1b", "lm", 4, 4096), [(4, {}), (2, FULL)]),
        (Job("t5-v1_1-large", "seq2seq", 32, 512), [(32, {})]),
        (Job("bloom-1b1", "lm", 16, 1024), [(16, {})]),
        (Job("gpt2-large", "lm", 16, 1024), [(16, SELECTIVE)]),
        (Job("gpt2-13b", "lm", 16, 1024, {"layers": 6}), [(16, {})]),
        (Job("t5-large", "seq2seq", 32, 512), [(32, {}), (32, SELECTIVE), (32, FULL)]),
        (Job("t5-v1_1-base", "seq2seq", 64, 512), [(64, SELECTIVE), (64, FULL)]),
        (Job("bert-large-uncased", "mlm", 128, 512), [(128, {}), (128, SELECTIVE), (128, FULL)]),
    ]),
    (2, [
        (Job("gpt2-13b", "lm", 32, 512, TENTH),
         [(16, zero(3)), (16, zero(2)), (8, zero(1)), (32, tp(2)), (8, zero(3)), (8, zero(2)), (16, zero(3, **FULL)), (16, tp(2))]),
        (Job("gpt2-xl", "lm", 16, 1024), [(8, COPIES), (8, zero(3)), (4, zero(1))]),
        (Job("gpt2-large", "lm", 32, 512), [(16, COPIES), (32, tp(2))]),
        (Job("llama-3.2-1b", "lm", 8, 2048), [(4, zero(3, **SELECTIVE)), (8, tp(2)), (4, COPIES)]),
        (Job("t5-large", "seq2seq", 32, 512), [(16, zero(3)), (16, COPIES)]),
        (Job("bert-large-uncased", "mlm", 128, 512), [(64, COPIES), (64, zero(3))]),
        (Job("llama-3.2-3b", "lm", 4, 2048), [(2, zero(3)), (4, tp(2))]),
        (Job("bloom-560m", "lm", 16, 1024), [(8, COPIES)]),
        (Job("gpt2-medium", "lm", 64, 1024), [(32, COPIES), (32, zero(3))]),
        (Job("bert-base-uncased", "mlm", 256, 512), [(128, COPIES), (256, tp(2))]),
        (Job("llama-3.2-3b", "lm", 4, 4096), [(2, zero(3)), (2, zero(2, **FULL))]),
        (Job("bloom-1b7", "lm", 16, 1024), [(8, zero(2)), (8, COPIES)]),
        (Job("t5-large", "seq2seq", 64, 512), [(32, COPIES), (32, zero(3, **SELECTIVE)), (32, zero(3, **FULL))]),
    ]),
    (4, [
        (Job("gpt2-13b", "lm", 64, 512, {"layers": 20}),
         [(16, {"fsdp": 4}), (8, {"fsdp": 4}), (8, {"fsdp": 4, "zero": 2}), (16, {"fsdp": 4, **FULL}), (16, tp(2, 2)),
          (16, tp(4))]),
        (Job("llama-3.2-3b", "lm", 16, 2048), [(4, {"fsdp": 4}), (2, {"replicate": 2, "fsdp": 2}), (4, tp(2, 2))]),
        (Job("bloom-7b1", "lm", 16, 1024), [(4, {"fsdp": 4})]),
        (Job("llama-3.1-8b", "lm", 8, 4096), [(2, {"fsdp": 4}), (4, tp(2, 2))]),
        (Job("gpt2-xl", "lm", 64, 1024), [(16, {"fsdp": 4}), (16, {"replicate": 4})]),
        (Job("bert-large-uncased", "mlm", 256, 512), [(64, {"replicate": 4}), (64, {"fsdp": 4, "zero": 2})]),
        (Job("gpt2-13b", "lm", 96, 512), [(24, {"fsdp": 4, **SELECTIVE}), (24, {"fsdp": 4, **FULL})]),
        (Job("llama-3.1-8b", "lm", 8, 8192),
         [(2, {"fsdp": 4, "zero": 2}), (2, {"fsdp": 4, **SELECTIVE}), (2, {"fsdp": 4, **FULL})]),
        (Job("t5-large", "seq2seq", 128, 512), [(32, {"replicate": 4}), (32, {"fsdp": 4}), (32, {"fsdp": 4, **FULL})]),
        (Job("cpm-ant-10b", "lm", 32, 512), [(8, {"fsdp": 4}), (8, {"fsdp": 4, **FULL}), (8, tp(2, 2))]),
        (Job("bloom-7b1", "lm", 32, 1024), [(8, {"fsdp": 4, **SELECTIVE}), (8, {"fsdp": 4, **FULL}), (8, {"fsdp": 4, "zero": 2})]),
        (Job("gpt2-13b", "lm", 24, 2048), [(6, {"fsdp": 4})]),
    ]),
    (8, [
        (Job("gpt2-13b", "lm", 256, 512), [(32, {"fsdp": 8, **SELECTIVE}), (16, {"fsdp": 8, "zero": 2}), (16, tp(2, 4))]),
        (Job("llama-3.1-8b", "lm", 16, 8192), [(1, {"fsdp": 8}), (2, {"fsdp": 8, **FULL})]),
    ]),
    (1, [  # as recipes are run today: a CUDA graph, kinds of data, optimizers, adapters
        (Job("gpt2", "lm", 4, 512), [(4, {})]),
        (Job("gpt2", "lm", 32, 256, more={"ema": 0.999}), [(8, {})]),
        (Job("gpt2-medium", "lm", 152, 1024), [(152, {})]),
        (Job("gpt2-medium", "lm", 4, 512, precision="fp32"), [(4, SELECTIVE)]),
        (Job("gpt2-medium", "lm", 16, 512, precision="fp16"), [(16, {})]),
        (Job("gpt2-medium", "lm", 16, 512, more=optimizer(name="muon")), [(16, {})]),
        (Job("gpt2-large", "lm", 8, 1024, more={"ema": 0.999, **optimizer(moments="bf16")}), [(4, {})]),
        (Job("gpt2-large", "lm", 48, 1024), [(48, FULL)]),
        (Job("gpt2-13b", "lm", 24, 512, {"layers": 8}, more=optimizer(moments="int8")), [(24, {})]),
        (Job("gpt2-13b", "lm", 4, 2048, {"layers": 4}), [(4, {})]),
        (Job("bert-base-uncased", "mlm", 32, 128), [(32, {})]),
        (Job("bert-large-uncased", "mlm", 64, 512, more=PACKED), [(64, {})]),
        (Job("bert-large-uncased", "mlm", 256, 128), [(128, SELECTIVE)]),
        (Job("bert-large-uncased", "mlm", 320, 512), [(320, {})]),
        (Job("t5-base", "seq2seq", 32, 512, more=target(64)), [(32, {}), (8, {})]),
        (Job("t5-v1_1-base", "seq2seq", 64, 256, more={**target(128), **optimizer(name="adafactor")}), [(64, {})]),
        (Job("t5-large", "seq2seq", 64, 1024, more=target(128)), [(64, {}), (64, FULL)]),
        (Job("t5-3b", "seq2seq", 8, 512, more=target(128)), [(8, {})]),
        (Job("llama-3.2-1b", "lm", 2, 8192), [(1, {})]),
        (Job("llama-3.2-1b", "lm", 32, 512, more=PROMPTS), [(16, {})]),
        (Job("llama-3.2-1b", "lm", 16, 256), [(2, {})]),
        (Job("llama-3.2-3b", "lm", 8, 1024, more=UNPADDED), [(8, {})]),
        (Job("llama-3.2-3b", "lm", 2, 8192), [(2, FULL)]),
        (Job("llama-3.2-3b", "lm", 6, 4096), [(6, {})]),
        (Job("llama-3.1-8b", "lm", 4, 2048, more=LORA), [(4, {})]),
        (Job("llama-3.1-8b", "lm", 8, 1024, more=QLORA), [(8, FULL), (1, {})]),
        (Job("llama-3.1-8b", "lm", 2, 2048, more=optimizer(moments="int8")), [(2, SELECTIVE)]),
        (Job("bloom-560m", "lm", 8, 2048), [(2, {})]),
        (Job("bloom-560m", "lm", 16, 512, more=PACKED), [(16, {})]),
        (Job("bloom-3b", "lm", 4, 1024), [(4, SELECTIVE)]),
        (Job("bloom-7b1", "lm", 4, 1024, more=optimizer(moments="int8")), [(4, FULL)]),
        (Job("cpm-ant-10b", "lm", 4, 1024, {"layers": 24}), [(4, {})]),
        (Job("cpm-ant-10b", "lm", 32, 256, {"layers": 6}, more=optimizer(moments="bf16")), [(32, {}), (4, {})]),
        # too big for 139 GiB
        (Job("bert-large-uncased", "mlm", 384, 512), [(384, {})]),
        (Job("llama-3.2-3b", "lm", 16, 4096), [(16, {})]),
        (Job("gpt2-medium", "lm", 192, 1024), [(192, {})]),
        (Job("gpt2-13b", "lm", 1, 512), [(1, FULL)]),
        (Job("t5-3b", "seq2seq", 64, 512), [(64, {})]),
    ]),
    (2, [  # copies, whose micro-batches are CUDA graphs too, beside shards
        (Job("gpt2", "lm", 8, 1024), [(4, COPIES), (4, zero(3))]),
        (Job("gpt2", "lm", 32, 512), [(4, COPIES)]),
        (Job("bert-base-uncased", "mlm", 64, 128), [(32, COPIES), (32, zero(1))]),
        (Job("gpt2-medium", "lm", 16, 1024), [(8, COPIES), (8, zero(3))]),
        (Job("gpt2-large", "lm", 16, 1024), [(8, {**COPIES, **FULL})]),
        (Job("gpt2-large", "lm", 32, 1024, more={"ema": 0.999}), [(4, COPIES)]),
        (Job("gpt2-xl", "lm", 32, 1024), [(16, COPIES), (16, zero(3)), (16, zero(1))]),
        (Job("bert-large-uncased", "mlm", 64, 512), [(32, COPIES), (32, zero(2))]),
        (Job("t5-base", "seq2seq", 64, 512, more=target(64)), [(32, COPIES), (32, zero(3))]),
        (Job("t5-v1_1-base", "seq2seq", 64, 256, more={**target(128), **optimizer(name="adafactor")}), [(32, COPIES)]),
        (Job("llama-3.2-1b", "lm", 16, 2048), [(8, COPIES), (8, zero(2))]),
        (Job("llama-3.2-1b", "lm", 32, 512, more=LORA), [(16, COPIES), (16, zero(3))]),
        (Job("llama-3.1-8b", "lm", 8, 1024, more=QLORA), [(4, COPIES)]),
        (Job("bloom-560m", "lm", 32, 512, more=PACKED), [(16, COPIES)]),
        (Job("cpm-ant-10b", "lm", 16, 512, {"layers": 6}), [(8, COPIES), (8, zero(3))]),
        (Job("gpt2-medium", "lm", 32, 512, more=optimizer(name="muon")), [(16, COPIES)]),
    ]),
    (4, [  # likewise, and copies of what tensor parallelism has cut
        (Job("gpt2", "lm", 32, 1024), [(8, {"replicate": 4})]),
        (Job("bert-base-uncased", "mlm", 128, 128), [(32, {"replicate": 4}), (32, {"fsdp": 4})]),
        (Job("gpt2-medium", "lm", 64, 1024), [(16, {"replicate": 4}), (32, tp(2, replicate=2)), (16, {"fsdp": 4})]),
        (Job("gpt2-large", "lm", 32, 1024), [(8, {"replicate": 4}), (32, tp(4))]),
        (Job("t5-base", "seq2seq", 128, 512, more=target(64)), [(32, {"replicate": 4})]),
        (Job("llama-3.2-1b", "lm", 32, 2048), [(8, {"replicate": 4}), (16, tp(2, replicate=2)), (8, {"replicate": 2, "fsdp": 2})]),
        (Job("llama-3.2-3b", "lm", 16, 2048), [(8, tp(2, replicate=2, **FULL)), (16, tp(4))]),
        (Job("bloom-560m", "lm", 64, 512, more=PACKED), [(16, {"replicate": 4})]),
        (Job("cpm-ant-10b", "lm", 32, 512, {"layers": 6}), [(8, {"replicate": 4}), (16, tp(2, replicate=2))]),
    ]),
    (2, [  # shards, whose micro-batches are CUDA graphs too, beside copies
        (Job("gpt2", "lm", 16, 1024), [(8, zero(3)), (8, zero(2))]),
        (Job("gpt2-medium", "lm", 32, 512), [(8, zero(3)), (16, COPIES)]),
        (Job("gpt2-large", "lm", 16, 1024), [(8, zero(1)), (8, zero(3, **FULL)), (8, COPIES)]),
        (Job("bert-base-uncased", "mlm", 128, 512), [(64, zero(3))]),
        (Job("bert-large-uncased", "mlm", 256, 128), [(128, zero(3)), (128, COPIES)]),
        (Job("t5-large", "seq2seq", 32, 512, more=target(128)), [(16, zero(3)), (16, COPIES)]),
        (Job("t5-v1_1-base", "seq2seq", 64, 256, more={**target(128), **optimizer(name="adafactor")}), [(32, zero(2))]),
        (Job("llama-3.2-1b", "lm", 16, 1024), [(8, zero(3, **SELECTIVE)), (4, zero(3))]),
        (Job("llama-3.2-3b", "lm", 8, 1024), [(4, zero(3)), (4, zero(2))]),
        (Job("llama-3.2-1b", "lm", 32, 512, more=merge(LORA, PACKED)), [(16, zero(3))]),
        (Job("llama-3.1-8b", "lm", 8, 1024, more=QLORA), [(4, zero(3))]),
        (Job("bloom-1b1", "lm", 16, 512), [(8, zero(3)), (8, COPIES)]),
        (Job("cpm-ant-10b", "lm", 16, 1024, {"layers": 6}), [(8, zero(2))]),
        (Job("gpt2-medium", "lm", 32, 512, more=optimizer(name="muon")), [(16, zero(3))]),
        (Job("gpt2-medium", "lm", 32, 512, precision="fp16"), [(16, zero(3))]),
    ]),
    (4, [
        (Job("gpt2-medium", "lm", 64, 512), [(16, {"fsdp": 4}), (16, {"replicate": 2, "fsdp": 2})]),
        (Job("bert-large-uncased", "mlm", 128, 512), [(32, {"fsdp": 4, "zero": 2}), (32, {"replicate": 4})]),
        (Job("gpt2-xl", "lm", 32, 1024), [(8, {"fsdp": 4}), (8, {"replicate": 2, "fsdp": 2})]),
        (Job("llama-3.2-3b", "lm", 16, 1024), [(4, {"fsdp": 4}), (8, tp(2, 2))]),
        (Job("t5-large", "seq2seq", 64, 512, more=target(128)), [(16, {"fsdp": 4})]),
        (Job("bloom-1b7", "lm", 16, 1024), [(4, {"fsdp": 4})]),
        (Job("gpt2-13b", "lm", 32, 512), [(8, {"fsdp": 4, **FULL})]),
    ]),
    (1, [  # models, precisions, lengths and optimizers that had no point yet, on any card of 80 GB
        (Job("gpt2", "lm", 16, 512), [(16, {}), (16, FULL)]),
        (Job("gpt2", "lm", 64, 128, precision="fp16"), [(64, {})]),
        (Job("gpt2", "lm", 8, 1024, more=LORA), [(8, {})]),
        (Job("gpt2-medium", "lm", 16, 512), [(16, {}), (16, SELECTIVE)]),
        (Job("gpt2-medium", "lm", 8, 1024, precision="fp16"), [(8, {})]),
        (Job("gpt2-medium", "lm", 8, 1024, more=optimizer(name="lion")), [(8, {})]),
        (Job("gpt2-large", "lm", 16, 512, more=PACKED), [(16, {})]),
        (Job("gpt2-large", "lm", 8, 512, precision="fp32"), [(8, {})]),
        (Job("gpt2-large", "lm", 8, 2048, {"positions": 2048}), [(4, {})]),
        (Job("gpt2-xl", "lm", 8, 512), [(8, {}), (8, FULL)]),
        (Job("gpt2-xl", "lm", 8, 512, more=optimizer(moments="int8")), [(8, {})]),
        (Job("gpt2-13b", "lm", 8, 512, {"layers": 5}), [(8, {}), (8, FULL)]),
        (Job("bert-base-uncased", "mlm", 64, 128), [(64, {})]),
        (Job("bert-base-uncased", "mlm", 16, 512, more=PACKED), [(16, {})]),
        (Job("bert-base-uncased", "mlm", 32, 256, precision="fp16"), [(32, {})]),
        (Job("bert-base-chinese", "mlm", 32, 512, more=UNPADDED), [(32, {})]),
        (Job("bert-large-uncased", "mlm", 32, 512), [(32, {}), (8, {})]),
        (Job("bert-large-uncased", "mlm", 32, 384, more={"ema": 0.999}), [(32, {})]),
        (Job("t5-small", "seq2seq", 64, 512), [(64, {})]),
        (Job("t5-base", "seq2seq", 16, 512), [(16, {}), (16, FULL)]),
        (Job("t5-large", "seq2seq", 16, 512, more=merge(target(128), optimizer(name="adafactor"))), [(16, {}), (16, SELECTIVE)]),
        (Job("t5-v1_1-base", "seq2seq", 16, 512, precision="fp16"), [(16, {})]),
        (Job("t5-v1_1-large", "seq2seq", 16, 512, more=target(64)), [(16, {})]),
        (Job("t5-v1_1-xl", "seq2seq", 4, 512, more=merge(target(64), optimizer(moments="bf16"))), [(4, FULL)]),
        (Job("mt5-base", "seq2seq", 16, 512, more=target(128)), [(16, {})]),
        (Job("mt5-small", "seq2seq", 32, 256), [(32, {})]),
        (Job("llama-3.2-1b", "lm", 8, 1024), [(8, {}), (8, FULL)]),
        (Job("llama-3.2-1b", "lm", 8, 1024, precision="fp16"), [(8, {})]),
        (Job("llama-3.2-1b", "lm", 16, 1024, more=QLORA), [(16, {})]),
        (Job("llama-3.2-3b", "lm", 4, 1024, more=optimizer(moments="bf16")), [(4, {})]),
        (Job("llama-2-7b", "lm", 4, 1024, more=LORA), [(4, {})]),
        (Job("bloom-560m", "lm", 16, 1024), [(16, {}), (16, FULL)]),
        (Job("bloom-1b1", "lm", 8, 1024, more=UNPADDED), [(8, {})]),
        (Job("bloom-1b7", "lm", 4, 2048), [(4, SELECTIVE)]),
        (Job("cpm-ant-10b", "lm", 8, 512, {"layers": 8}), [(8, {}), (8, FULL)]),
        (Job("cpm-ant-10b", "lm", 8, 512, {"layers": 6}, precision="fp16"), [(8, {})]),
    ]),
    (2, [  # precisions, optimizers, adapters and layouts of which two GPUs had no point yet, on any cards of 80 GB
        (Job("gpt2", "lm", 32, 512, more=optimizer(name="lion")), [(16, COPIES), (16, zero(1))]),
        (Job("gpt2-medium", "lm", 16, 1024, precision="fp16"), [(8, COPIES), (8, zero(2)), (16, tp(2))]),
        (Job("gpt2-large", "lm", 16, 512, precision="fp32"), [(8, COPIES), (8, zero(3))]),
        (Job("gpt2-xl", "lm", 8, 1024, more=optimizer(moments="int8")), [(4, zero(3, **SELECTIVE)), (4, zero(3, offload=True))]),
        (Job("bert-large-uncased", "mlm", 64, 256), [(32, zero(2)), (8, COPIES), (64, tp(2, sequence_parallel=True))]),
        (Job("bert-base-chinese", "mlm", 64, 512, more=PACKED), [(32, zero(3))]),
        (Job("t5-base", "seq2seq", 32, 512), [(16, COPIES), (16, zero(3)), (8, zero(1))]),
        (Job("t5-v1_1-large", "seq2seq", 16, 512, more=merge(target(64), optimizer(moments="bf16"))), [(8, zero(3, **FULL))]),
        (Job("mt5-base", "seq2seq", 32, 256, more=target(128)), [(16, zero(2)), (16, COPIES)]),
        (Job("mt5-small", "seq2seq", 64, 256, precision="fp16"), [(64, tp(2))]),
        (Job("llama-3.2-1b", "lm", 16, 1024, more=optimizer(moments="bf16")),
         [(8, zero(2, **FULL)), (8, COPIES), (16, tp(2, **SELECTIVE))]),
        (Job("llama-3.2-1b", "lm", 16, 1024, more=merge(LORA, UNPADDED)), [(8, zero(2))]),
        (Job("llama-3.2-3b", "lm", 8, 1024, more=QLORA), [(8, tp(2)), (4, zero(3, **FULL))]),
        (Job("llama-2-7b", "lm", 4, 1024, more=LORA), [(2, zero(2))]),
        (Job("bloom-560m", "lm", 16, 1024, precision="fp16"), [(8, zero(3)), (16, tp(2))]),
        (Job("bloom-1b7", "lm", 8, 1024, more=optimizer(moments="int8")), [(4, zero(2))]),
        (Job("cpm-ant-10b", "lm", 16, 512, {"layers": 6}, more=optimizer(moments="int8")), [(8, zero(3, **FULL)), (8, COPIES)]),
    ]),
    (2, [  # parts of sequences, frozen and tied tables, gradients on their way, few labels, weights on the host, Adafactor
        (Job("gpt2-medium", "lm", 16, 1024), [(4, zero(3)), (16, tp(2, sequence_parallel=True))]),
        (Job("gpt2-large", "lm", 16, 512, more=LORA), [(8, zero(2))]),
        (Job("gpt2-large", "lm", 8, 1024), [(4, zero(3, offload=True))]),
        (Job("bert-base-uncased", "mlm", 64, 512), [(32, zero(3, **FULL)), (64, tp(2, sequence_parallel=True))]),
        (Job("t5-large", "seq2seq", 32, 512, more=merge(target(128), optimizer(name="adafactor"))), [(16, COPIES), (16, zero(2))]),
        (Job("mt5-base", "seq2seq", 32, 512, more=target(32)), [(16, zero(3))]),
        (Job("llama-3.2-1b", "lm", 8, 1024, precision="fp32"), [(4, zero(3)), (8, tp(2, sequence_parallel=True))]),
        (Job("llama-3.2-1b", "lm", 16, 1024, more=QLORA), [(4, zero(3))]),
        (Job("bloom-560m", "lm", 16, 1024, more=QLORA), [(8, zero(3))]),
        (Job("cpm-ant-10b", "lm", 16, 512, {"layers": 8}), [(8, zero(2))]),
    ]),
    (1, [  # more and fewer rows than before of each family, several micro-batches, long and short sequences, any card of 80 GB
        (Job("gpt2", "lm", 32, 1024), [(32, {}), (8, {})]),
        (Job("gpt2", "lm", 128, 256, more=optimizer(name="lion")), [(128, {})]),
        (Job("gpt2-medium", "lm", 32, 512, more=optimizer(name="muon")), [(32, {})]),
        (Job("gpt2-large", "lm", 16, 1024), [(16, {}), (16, FULL)]),
        (Job("gpt2-xl", "lm", 16, 512, more=LORA), [(16, {})]),
        (Job("gpt2-13b", "lm", 16, 1024, {"layers": 3}), [(16, {})]),
        (Job("bert-base-uncased", "mlm", 128, 128), [(128, {}), (32, {})]),
        (Job("bert-large-uncased", "mlm", 64, 512, precision="fp16"), [(64, {})]),
        (Job("t5-base", "seq2seq", 64, 256, more=merge(target(64), optimizer(name="adafactor"))), [(64, {})]),
        (Job("mt5-base", "seq2seq", 32, 128, more=target(128)), [(32, {})]),
        (Job("llama-3.2-1b", "lm", 4, 4096), [(4, {}), (4, FULL)]),
        (Job("llama-3.2-1b", "lm", 32, 512, more=merge(LORA, PACKED)), [(32, {})]),
        (Job("llama-3.2-3b", "lm", 8, 1024, more=QLORA), [(8, FULL)]),
        (Job("llama-2-7b", "lm", 2, 2048, more=QLORA), [(2, {})]),
        (Job("bloom-560m", "lm", 8, 2048), [(8, {})]),
        (Job("bloom-1b1", "lm", 16, 512, more=optimizer(name="adafactor")), [(16, {})]),
        (Job("cpm-ant-10b", "lm", 16, 512, {"layers": 8}), [(16, {}), (16, SELECTIVE)]),
    ]),
    (2, [  # likewise
        (Job("gpt2", "lm", 64, 512), [(32, COPIES), (32, zero(3)), (32, zero(2))]),
        (Job("gpt2-large", "lm", 16, 1024), [(8, zero(3)), (8, COPIES), (16, tp(2))]),
        (Job("gpt2-xl", "lm", 16, 1024), [(8, zero(2)), (8, zero(3, **FULL))]),
        (Job("gpt2-13b", "lm", 16, 512, {"layers": 6}), [(8, zero(3)), (16, tp(2, sequence_parallel=True))]),
        (Job("bert-large-uncased", "mlm", 128, 256), [(64, COPIES), (64, zero(3))]),
        (Job("bert-base-uncased", "mlm", 64, 512, more=optimizer(name="lion")), [(32, zero(1))]),
        (Job("t5-large", "seq2seq", 32, 512, more=target(64)), [(16, COPIES), (16, zero(3, **SELECTIVE))]),
        (Job("t5-base", "seq2seq", 64, 256, more=merge(target(64), optimizer(name="adafactor"))), [(32, zero(2))]),
        (Job("mt5-base", "seq2seq", 64, 128, more=target(64)), [(32, zero(3))]),
        (Job("llama-3.2-1b", "lm", 8, 4096), [(4, zero(3)), (8, tp(2))]),
        (Job("llama-3.2-3b", "lm", 4, 2048, more=optimizer(moments="bf16")), [(2, zero(2)), (2, zero(3, **FULL))]),
        (Job("llama-3.1-8b", "lm", 4, 1024, more=LORA), [(2, zero(3))]),
        (Job("bloom-1b1", "lm", 16, 1024), [(8, zero(2)), (16, tp(2))]),
        (Job("cpm-ant-10b", "lm", 32, 512, {"layers": 8}), [(16, zero(3)), (16, COPIES)]),
    ]),
    (1, [  # weights on the host
        (Job("gpt2-medium", "lm", 16, 1024), [(16, HOST), (4, HOST)]),
        (Job("gpt2-xl", "lm", 16, 512, more=optimizer(moments="int8")), [(16, HOST | SELECTIVE)]),
        (Job("bert-large-uncased", "mlm", 64, 512), [(32, HOST)]),
        (Job("t5-large", "seq2seq", 32, 512, more=target(64)), [(16, HOST)]),
        (Job("llama-3.2-1b", "lm", 4, 4096), [(2, HOST), (4, HOST | FULL)]),
        (Job("bloom-1b1", "lm", 8, 1024), [(8, HOST)]),
        (Job("cpm-ant-10b", "lm", 16, 512, {"layers": 6}), [(16, HOST)]),
    ]),
    (2, [  # likewise
        (Job("gpt2-large", "lm", 16, 1024), [(8, zero(3, **HOST))]),
        (Job("gpt2-xl", "lm", 16, 1024, more=optimizer(moments="bf16")), [(4, zero(3, **HOST))]),
        (Job("bert-large-uncased", "mlm", 64, 512), [(32, zero(3, **HOST))]),
        (Job("t5-large", "seq2seq", 32, 512, more=target(64)), [(16, zero(3, **HOST))]),
        (Job("llama-3.2-1b", "lm", 8, 2048), [(4, zero(3, **HOST)), (2, zero(2, **HOST))]),
        (Job("bloom-1b1", "lm", 16, 512), [(8, zero(3, **HOST))]),
        (Job("cpm-ant-10b", "lm", 16, 512, {"layers": 6}), [(8, zero(2, **HOST))]),
    ]),
]  # fmt: skip
SMALL = {"layers": 4, "dim": 128, "heads": 4, "vocab": 2000}
WIDE = {**SMALL, "hidden": 512}
TINY = {  # of each family, for CPU ranks
    "gpt": WIDE, "bert": WIDE, "t5": {**SMALL, "decoder_layers": 4, "head_dim": 32, "hidden": 256},
    "llama": {**SMALL, "kv_heads": 4, "hidden": 256}, "bloom": SMALL, "cpm": {**SMALL, "head_dim": 32, "hidden": 256},
}  # fmt: skip


def points(tiny: bool) -> list[Point]:
    found: list[Point] = []
    for gpus, jobs in WANTED:
        for job, layouts in jobs:
            if tiny:
                family = next(family for family in TINY if family in job.name)
                more = merge(job.more, target(32)) if job.task == "seq2seq" else job.more
                job = job._replace(config=TINY[family], batch=min(job.batch, 8 * gpus), length=64, more=more)
            for rows, degrees in layouts:
                found.append(Point(len(found) + 1, gpus, job, math.gcd(rows, job.batch // shares(degrees)), degrees))
    return found


def shares(degrees: dict[str, Any]) -> int:
    return int(degrees.get("fsdp", 1) * degrees.get("replicate", 1))


def words(point: Point) -> str:
    layout = ", ".join(f"{key} {value}" for key, value in point.degrees.items()) or "-"
    deep = f" of {point.job.config['layers']} layers" if "layers" in point.job.config else ""
    more = "".join(f", {setting}" for setting in leaves(point.job.more))
    return (f"| {point.number} | {point.gpus} | {point.job.name}{deep}{more} | {layout} | {point.rows} of {point.job.batch} x "
            f"{point.job.length} {point.job.precision} |")  # fmt: skip


def leaves(keys: dict[str, Any]) -> Iterator[str]:
    """`key value` of each key, whatever its section."""
    for key, value in keys.items():
        yield from leaves(value) if isinstance(value, dict) else [f"{key} {value}"]


def recipe_of(point: Point) -> Recipe:
    """What `modelcenter train` would be given."""
    job = point.job
    config = {} if "adapter" in job.more else job.config  # a recipe's adapter has the base as it is, not tiny
    keys = {"model": job.name, "config": config, "objective": job.task, "precision": job.precision,
            "data": {"path": "none", "seq_len": job.length}, "batch": job.batch, "micro_batch": point.rows, "max_steps": 1,
            "output_dir": "none"}  # fmt: skip
    return bind(Recipe, merge(keys, job.more))


def batch_of(recipe: Recipe, rows: int, vocab: int) -> dict[str, Any]:
    """Random ids as the recipe's data come: a text in blocks; documents of which two fill a row, where they are packed; pairs, and
    prompts with their responses, of the greatest length to nine tenths of it. Of masked models 15 % are targets."""
    data, task = recipe.data, recipe.objective
    blocks = task == "mlm" or (task == "lm" and data.prompt_key is None)

    def text(most: int) -> list[Any]:
        many = 2 * rows if data.packing else rows
        longest, least = (most // 2, most // 2) if data.packing else (most, most if blocks else most - most // 10)
        return [torch.randint(5, vocab, (longest - (longest - least) * i // many,)).numpy() for i in range(many)]

    ids = text(data.seq_len)
    labels = text(data.target_len or data.seq_len) if task == "seq2seq" else [row.copy() for row in ids]
    for row in labels:
        if task == "mlm":
            row[torch.rand(len(row)).numpy() >= data.mlm_probability] = IGNORED
        elif task == "lm":
            row[: len(row) // 2 if data.prompt_key else 1] = IGNORED
    if data.packing or data.padding_free:
        return pack(ids, labels)
    found = pad(ids, labels, 0)
    if task == "lm" and blocks:
        del found["attention_mask"]  # blocks have none
    return found


def made(point: Point, recipe: Recipe) -> Any:
    """The point's model on the meta device; without its adapter."""
    model = mc.build(recipe.model, task=recipe.head, config=point.job.config, device="meta")
    model.load_report = LoadReport()  # an adapter trains no new head
    return model


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()


# ------------------------------------------------------------------------------------------------------------ foreseen


HERE = "here"


def device_of(name: str) -> torch.device:
    """Where a prediction for the device of that name is made."""
    return torch.device("cuda" if torch.cuda.is_available() and name == HERE else "cpu")


def predict(point: Point, name: str, chip: Chip, out: Path) -> None:
    """What is foreseen on the device here, or on that of that name."""
    here, device = name == HERE, device_of(name)
    # ignored: degrees are numbers, by the names of Machine
    recipe, machine = recipe_of(point), Machine(device=device.type, **point.degrees)  # type: ignore[arg-type]  # whole numbers
    model = made(point, recipe)
    if recipe.adapter.name != "none":
        insert(model, recipe.adapter, choose(model, recipe.adapter), precision=recipe.precision)
    batch = batch_of(recipe, min(point.rows, 4), int(model.config.vocab))  # a plan makes the widest of it
    alike = SimpleNamespace(written=0, lengths=torch.ones(1))  # all as the batch: no text has more than its share of targets
    loader = SimpleNamespace(steps=lambda micro_batch: iter([(0, [batch])]), examples=alike)
    setup: Any = SimpleNamespace(model=model, loader=loader, evaluation=None)
    planned = job_of(recipe, device, setup, partial(autocast, recipe.precision, device), machine, gpu=not here)
    there = memory_of(device) if here else None
    e = Costs(planned, chip, min(there) if there is not None else None).exact(machine, point.rows)
    said = {"device": chip.name, "bytes": e.need - e.parts.get("fragments", 0), "fits": e.fits, "seconds": e.seconds,
            "parts": dict(e.parts), "spent": dict(e.spent), "host": e.host, "call": chip.call, "bottleneck": e.bottleneck,
            "made": now()}  # fmt: skip
    file_of(out, point, name).write_text(json.dumps(said))


def file_of(out: Path, point: Point, name: str) -> Path:
    """Where a prediction for that device is."""
    return out / f"{'here' if name == HERE else 'said'}-{point.number}.json"


def foresee(some: Sequence[Point], out: Path, name: str, jobs: int) -> None:
    """Have a prediction of each point in `out`."""
    new = [point for point in some if not file_of(out, point, name).exists()]
    chip = (chip_here(device_of(name)) if name == HERE else chip_named(name)) or CHIPS["h200"]
    if jobs == 1:
        for point in new:
            predict(point, name, chip, out)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(predict, new, repeat(name), repeat(chip), repeat(out)):
            pass


# ------------------------------------------------------------------------------------------------------------ measured


@dataclass(frozen=True)
class Noise(Normal):
    """As loud, and drawn where it is wanted: what is timed depends on no value."""

    device: torch.device

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        return torch.empty([r.stop - r.start for r in region], device=self.device).normal_(0.0, self.std)


def noisy(model: Any, machine: Machine, precision: str, device: torch.device, adapter: AdapterConfig | None = None) -> Any:
    """A model of the meta device, placed, with first values that no recipe would draw so fast."""

    def loud(values: dict[str, Any]) -> dict[str, Any]:
        return {n: v if isinstance(v, Constant | torch.Tensor) else Noise(v.shape, 0.02, 0, n, device) for n, v in values.items()}

    def whole(name: str, layer: Any) -> None:  # for as long as its codes are made
        layer.to_empty(device=device)
        for p in layer.parameters():
            torch.nn.init.normal_(p, 0.0, 0.02)

    first = loud(initial(model, model.shapes, 0, model.init_std))
    if adapter is not None and adapter.name != "none":
        insert(model, adapter, choose(model, adapter), None, whole, precision)
    place(model, device, machine, precision)
    fill_all(model, first, loud(first_values(model, 0)))
    return model.train()


def measure(point: Point, steps: int, device: torch.device) -> dict[str, Any]:
    """Bytes at the peak of the fullest rank, seconds of a step."""
    cuda = device.type == "cuda"
    # ignored: degrees are numbers, by the names of Machine
    recipe, machine = recipe_of(point), Machine(device=device.type, **point.degrees)  # type: ignore[arg-type]  # whole numbers
    ranks = join(machine)
    model = noisy(made(point, recipe), machine, recipe.precision, device, recipe.adapter)
    optimizer: Any = build_optimizer(model, recipe.optimizer, ranks)
    ema = EMA(model, recipe.ema) if recipe.ema is not None else None
    told: list[str] = []
    graphs = graphs_of(model, machine, device, told.append)
    torch.manual_seed(ranks.share)  # ranks that share layers have one batch, and as many labels in it
    forwards = -(-recipe.batch // (point.rows * machine.shares))
    batches = [batch_of(recipe, point.rows, int(model.config.vocab)) for _ in range(forwards)]
    prepared = partial(ready, model, task=recipe.objective, device=device, fill=graphs is not None and graphs.fills)
    ahead = prefetch([prepared(batch) for batch in some] for some in repeat(batches))
    compute, scale, norms = partial(autocast, recipe.precision, device), 1024.0 if recipe.precision == "fp16" else 1.0, []

    coming: list[tuple[list[Ready], int]] = []

    def fetch() -> None:
        some = next(ahead)
        (targets,) = ranks.sum(sum(batch.targets for batch in some))
        coming.append(([batch.on(device) for batch in some], targets))

    def step() -> None:
        some, targets = coming.pop()
        loss, _ = accumulate(model, some, recipe.objective, compute, scale, targets, ranks, graphs=graphs)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        known = soon(loss)
        norms.append(update(model, optimizer, loss, 1e-5, recipe.max_grad_norm, scale, squares, fetch, graphs, late=True))
        known()
        if ema is not None:
            settle(model)
            ema.update()

    fetch()
    warm, ends = 2 if graphs is None else WARM + 2, []  # behind what is recorded its first replay
    for number in range(warm + steps):
        if cuda and number == 1:  # the first step of all makes what lasts
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step()
        ends.append(time.perf_counter())
    times = [end - began for began, end in pairwise(ends[warm - 1 :])]
    most = torch.cuda.max_memory_allocated() + mapped() if cuda else recorded(step, model, optimizer, ema, batches)
    most = max(int(said) for said in ranks.agree(str(most)))
    ahead.close()
    if not all(map(math.isfinite, norms)):
        return {"error": f"no update: norms {norms}"}
    return {"bytes": most, "seconds": statistics.median(times), "times": times, "torch": torch.__version__, "at": now(),
            "device": torch.cuda.get_device_name() if cuda else "CPU", "graphs": graphs is not None and bool(graphs.gradients),
            "told": told, "reserved": torch.cuda.memory_reserved() if cuda else 0}  # fmt: skip


def mapped() -> int:
    """Bytes that other ranks reach, of which the allocator does not know."""
    return sum(one.size for one in gc.get_objects() if type(one) is Mapped)


def recorded(step: Any, model: Any, optimizer: Any, ema: EMA | None, batches: list[Any]) -> int:
    """The peak of a step on a CPU."""
    kept = [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values()),
            *(ema.averages.values() if ema is not None else ()), *(t for one in batches for t in one.values())]  # fmt: skip
    storages = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in kept if isinstance(t, torch.Tensor)]
    held = most = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events: Any = found.profiler
    for event in sorted((e for e in events.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def work(some: Sequence[Point], out: Path, steps: int) -> None:
    """Measure points, in each of their processes. Whatever ends one, a file says that it was begun."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    first = os.environ.get("RANK", "0") == "0"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for point in some:
        file = out / f"point-{point.number}.json"
        if first:
            file.write_text(json.dumps({"error": "its process ended"}))
        try:
            found = measure(point, steps, device)
        except mc.InputError as error:
            found = {"error": str(error)}
        except torch.OutOfMemoryError:
            found = {"error": "out of memory"}
            if point.gpus > 1:  # the others wait for this rank: their launcher ends them
                file.write_text(json.dumps(found))
                os._exit(1)
        if first:
            file.write_text(json.dumps(found))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def lane(some: Sequence[Point], out: Path, until: float, more: Sequence[str], place: dict[str, str]) -> None:
    """Have points measured by one process, or one a rank, started again with those left as often as it ends."""
    while left := [point for point in some if not (out / f"point-{point.number}.json").exists()]:
        if time.monotonic() > until:
            return
        gpus, numbers = left[0].gpus, ",".join(str(point.number) for point in left)
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)] if gpus > 1 else []
        words_ = [sys.executable, *run, __file__, "--here", "--points", numbers, "--out", str(out), *more]
        threads = {THREADS: str(threads_of(max(gpus, torch.cuda.device_count())))} if gpus > 1 else {}  # a run's, not torchrun's
        with (out / f"log-{left[0].number}.txt").open("wb") as log:
            process = subprocess.Popen(words_, stdout=log, stderr=log, env={**threads, **os.environ, **place})
        files, seen, moved = [out / f"point-{point.number}.json" for point in left], 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            stamps = sum(file.stat().st_mtime_ns for file in files if file.exists())
            if stamps != seen:
                seen, moved = stamps, time.monotonic()
            if time.monotonic() > min(until, moved + SILENCE):
                process.terminate()  # which a launcher hands on to its ranks
                try:
                    process.wait(40)
                except subprocess.TimeoutExpired:
                    process.kill()
        begun = [file for file in files if file.exists()]
        if time.monotonic() > until:  # what was under way is for the next time
            for file in begun:
                if "process ended" in file.read_text():
                    file.unlink()
        elif not begun:
            files[0].write_text(json.dumps({"error": f"not begun: {log.name}"}))


def each(some: Sequence[Point], out: Path, until: float, more: Sequence[str]) -> None:
    """Measure the points: of one GPU on all of them at once, then of more on as many groups of them as there are; each number of
    GPUs has its share of the time. What is said not to fit comes last."""
    here = max(1, torch.cuda.device_count())
    counts = sorted({point.gpus for point in some})
    turns = {gpus: START + sum(point.gpus == gpus for point in some) / max(1, here // gpus) for gpus in counts}
    for k, gpus in enumerate(counts):
        end = time.monotonic() + (until - time.monotonic()) * turns[gpus] / sum(turns[n] for n in counts[k:])
        mine = sorted((p for p in some if p.gpus == gpus), key=lambda p: not said_of(out, p)["fits"])
        many = max(1, here // gpus)
        cards = [",".join(str(n) for n in range(here)[gpus * i : gpus * (i + 1)]) for i in range(many)]
        places = [{"CUDA_VISIBLE_DEVICES": one} if many > 1 else {} for one in cards]
        lanes = [threading.Thread(target=lane, args=(mine[i::many], out, end, more, places[i])) for i in range(many)]
        for one in lanes:
            one.start()
        for one in lanes:
            one.join()


# ------------------------------------------------------------------------------------------------------------ compared


def said_of(out: Path, point: Point) -> dict[str, Any]:
    """What was foreseen: for the device that was named, if one was."""
    named = file_of(out, point, "")
    found: dict[str, Any] = json.loads((named if named.exists() else file_of(out, point, HERE)).read_text())
    return found


def read(out: Path, point: Point) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any] | None]:
    """What was foreseen, what by the machine itself, and what was found; None where there is nothing."""
    files = file_of(out, point, HERE), out / f"point-{point.number}.json"
    here, real = (json.loads(file.read_text()) if file.exists() else None for file in files)
    return said_of(out, point) if here is not None or file_of(out, point, "").exists() else None, here, real


def table(some: Sequence[Point], out: Path) -> Iterator[str]:
    yield ("| point | GPUs | model | layout | batch | fits | GB said | measured | error | s said | measured | error | here | error "
           "| bound by |")  # fmt: skip
    yield "|---:|---:|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    for point in some:
        said, here, real = read(out, point)
        if said is None:
            continue
        foreseen, timed = f"{words(point)} {'yes' if said['fits'] else 'no'} | {said['bytes'] / 1e9:.3g}", here or said
        if real is None or "error" in real:
            yield (f"{foreseen} | {real['error'] if real else '-'} | | {said['seconds']:.3g} | | | {timed['seconds']:.3g} | | "
                   f"{said['bottleneck']} |")  # fmt: skip
            continue
        memory, speed, again = (a / b - 1 for a, b in ((said["bytes"], real["bytes"]), (said["seconds"], real["seconds"]),
                                                       (timed["seconds"], real["seconds"])))  # fmt: skip
        yield (f"{foreseen} | {real['bytes'] / 1e9:.3g} | {memory:+.1%} | {said['seconds']:.3g} | {real['seconds']:.3g} | "
               f"{speed:+.1%} | {timed['seconds']:.3g} | {again:+.1%} | {said['bottleneck']} |")  # fmt: skip


def compare(some: Sequence[Point], out: Path) -> Iterator[str]:
    """What was asked of the predictions, and how many keep it."""
    pairs = [(point, *read(out, point)) for point in some]
    ran = [(point, said, here or said, real) for point, said, here, real in pairs if said is not None and real is not None]
    ended = [(point, said, here, real) for point, said, here, real in ran if "error" not in real]
    late = sum(max(said["made"], here["made"]) > real["at"] for _, said, here, real in ended)
    yield f"{len(some)} points, {len(ran)} tried, {len(ended)} measured" + (f", {late} PREDICTED AFTER IT" if late else "")
    short = [(said, point) for point, said, _, real in ran if real.get("error") == "out of memory"]
    false = [point.number for said, point in short if said["fits"]]
    wary = [point.number for point, said, _, _ in ended if not said["fits"]]
    yield f"false `fits`: {len(false)} {false or ''}; rightly too big: {len(short) - len(false)}; said too big and ran: {wary or 0}"
    asked = ("bytes", "bytes", 0, MEMORY), ("seconds", "seconds", 0, TIME), ("seconds said here", "seconds", 1, TIME)
    for what, key, at, bound in asked:
        off = {point.number: both[at][key] / real[key] - 1 for point, *both, real in ended}
        bad = {number: f"{x:+.0%}" for number, x in off.items() if abs(x) > bound}
        yield f"{what} within {bound:.0%}: {len(off) - len(bad)} of {len(off)} {bad or ''}"
    groups: dict[Any, list[tuple[float, float]]] = {}
    for point, said, _, real in ended:
        job = f"{point.job.name}, {point.job.batch} x {point.job.length}, on {point.gpus}"
        groups.setdefault((job, str(point.job)), []).append((said["seconds"], real["seconds"]))
    several = {key: found for key, found in groups.items() if len(found) > 1}
    lost = {key: min(found)[1] / min(real for _, real in found) - 1 for key, found in several.items()}
    bad_ = {job: f"{x:+.0%}" for (job, _), x in lost.items() if x > CHOICE}
    yield f"chosen within {CHOICE:.0%} of the best tried: {len(lost) - len(bad_)} of {len(lost)} jobs {bad_ or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="the points")
    parser.add_argument("--predict", action="store_true", help="write predictions down and measure nothing")
    parser.add_argument("--report", action="store_true", help="compare what there is")
    parser.add_argument("--gpus", default="", help="points of so many alone: 1,2; default: what the GPUs here suffice for")
    parser.add_argument("--device", default=HERE, help="predict for a device that need not be here: h200, h100 ...")
    parser.add_argument("--jobs", type=int, default=1, help="processes that predict")
    parser.add_argument("--minutes", type=float, default=9.0, help="in which to end")
    parser.add_argument("--steps", type=int, default=4, help="that are timed, after those that warm up")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--points", default="", help="these alone")
    parser.add_argument("--here", action="store_true", help="measure in this process, one of as many as the points have ranks")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    gpus = {int(n) for n in options.gpus.split(",") if n} or set(range(1, 1 + max(1, torch.cuda.device_count())))
    numbers = {int(n) for n in options.points.split(",") if n}
    everything = points(options.tiny)
    some = [p for p in everything if p.number in numbers or (not numbers and p.gpus in gpus)]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.list:
        print("\n".join(words(point) for point in everything))
    elif options.predict:
        foresee(some, options.out, options.device, options.jobs)
        print(f"{len(some)} predictions in {options.out}", flush=True)
    elif options.here:
        order = [int(n) for n in options.points.split(",")]
        work(sorted(some, key=lambda point: order.index(point.number)), options.out, options.steps)
    else:
        if not options.report:
            for name in dict.fromkeys((options.device, HERE)):
                # predictions are a process of their own: they take memory of a GPU while it lasts
                subprocess.run([sys.executable, __file__, "--predict", *sys.argv[1:], "--device", name], check=True)
            more = ["--steps", str(options.steps), *(["--tiny"] if options.tiny else [])]
            each(some, options.out, until, more)
        text = "\n".join([*table(some, options.out), "", *compare(some, options.out), ""])
        (options.out / "plan.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
