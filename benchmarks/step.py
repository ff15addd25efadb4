"""A whole training step on one GPU at published sizes: ours beside transformers', each alone on the card.

    python benchmarks/step.py [--cases bert-large,gpt2-xl,t5-large,llama-3b,llama-8b,cpm-ant-2b,gpt2,gpt2-medium,bert-base]
                              [--contenders ours,...] [--batch 0] [--steps 6] [--layers N] [--limit SECONDS] [--out DIR]
    python benchmarks/step.py --cases llama-8b-lora,llama-8b-qlora,gpt2-lora
    python benchmarks/step.py --cases bert-large-texts --data FILE --fields question,passage --tokenizer FOLDER

A step is forward, backward, clip and update on random ids, without dropout but in gpt2, gpt2-medium and bert-base. Contenders:
`ours` is what `precision=bf16` of modelcenter.train does (fp32 weights and moments), `ours bf16` has weights and moments in bf16,
`eager` is without CUDA graphs; theirs are transformers with torch's fused AdamW, `amp` autocast over fp32 weights, `bf16` weights
and moments in bf16, each with its torch.compile, `reduce` that of mode="reduce-overhead", which makes CUDA graphs, and with
liger-kernel's patches where it has them. Each case names the batch of each; `--batch` sets one for all. `flex`, `cudnn`,
`efficient` and `math` are ours with another's attention in place of that with a bias by distance (benchmarks/attention.py); of
FlexAttention `lean` and `small` have a backward that stages less, and in smaller tiles.

In llama-8b-lora, llama-8b-qlora and gpt2-lora an adapter is trained, of rank 16 on all layers but the head, with dropout of 0.05,
over weights that are frozen, in bf16 or NF4. Theirs is peft's, in fp32 under autocast (`amp`) or in bf16; 4 bits are bitsandbytes'.

In bert-large-texts every step has another batch of real texts, or pairs, of as many lengths as they have, up to 512 tokens: a
classifier is fine-tuned, with dropout, and real tokens are counted. Ours are without padding, a step in one forward, `tokens` what
`data.padding_free=true batch_tokens=N` does, with N of so many texts on average, in forwards of as many tokens as it allows, and
`padded` a text a row. Theirs are padded to the longest of a batch and a multiple of 8, in random order or `grouped` by length as
transformers.Trainer does. A thread makes the batches and copies them to the card, ours and theirs; whole epochs are timed.

FLOPs are the model's: 6 for a weight of a matrix and token, 4 for a frozen one, and 12 x layers x width x length a token for
attention, half of it where that is causal; the share is of a product of 8192^3 in bf16, measured before each case. Energy and
clock are what the card's driver tells of the timed steps: at the limit of its power a step takes its energy over that limit.
"""

import argparse
import ctypes
import gc
import math
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attention  # benchmarks/attention.py: what others do in place of our attention
import torch
from page import leave, stamp
from torch import Tensor, nn
from train import Step, batch_of, our_step, their_step

import modelcenter as mc
from modelcenter.adapter.attach import choose, insert
from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Budget, Loader
from modelcenter.data.objective import make_examples
from modelcenter.data.packing import Unpadded
from modelcenter.data.prefetch import prefetch
from modelcenter.data.read import read_records
from modelcenter.data.record import Record
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.layers import Block
from modelcenter.layers.position import Distances
from modelcenter.layers.view import View
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.machine import Machine
from modelcenter.place import place
from modelcenter.train.evaluate import on_device
from modelcenter.train.graphs import graphs_of
from modelcenter.train.resolve import forward_tokens
from modelcenter.train.shapes import TEXT, wider
from modelcenter.train.step import Ready, accumulate, autocast, ready, soon, update

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its sizes; `batches`: of each contender, those at which it is at its best or that compare."""

    preset: str
    task: str
    auto: str  # transformers' class
    length: int
    batches: dict[str, tuple[int, ...]]
    config: dict[str, Any] = field(default_factory=dict)
    texts: bool = False  # real ones, of any length up to `length`
    quantize: str = ""  # an adapter is trained, and the weights are frozen: as they are ("none") or in 4 bits ("nf4")


EPOCHS = 2  # of texts that are timed, after one, or as many in which compilers see all shapes and graphs are recorded
WARM = 4.0  # seconds, beside the first steps, after which compilers are done and the card is as hot as it gets
ADAPTER: dict[str, Any] = {"rank": 16, "alpha": 32.0, "dropout": 0.05}  # as in recipes/lora.yaml and qlora.yaml
STILL = {"dropout": 0.0, "attn_dropout": 0.0, "embed_dropout": 0.0}
SMALL = ("ours", "ours eager", "hf amp", "hf amp compile", "hf amp reduce")
CASES = {
    "bert-large": Case(
        "bert-large-uncased", "mlm", "AutoModelForMaskedLM", 512,
        {"ours": (64, 256), "ours bf16": (256,), "hf amp": (64,), "hf bf16": (256,), "hf bf16 compile": (128,)},
        {"dropout": 0.0, "attn_dropout": 0.0},
    ),
    "gpt2-xl": Case(
        "gpt2-xl", "lm", "AutoModelForCausalLM", 1024,
        {"ours": (16, 32), "ours bf16": (16,), "hf amp compile": (16,), "hf bf16 compile": (16,)}, STILL,
    ),
    "t5-large": Case(
        "t5-large", "seq2seq", "AutoModelForSeq2SeqLM", 512,
        {"ours": (32, 128)} | dict.fromkeys(("ours eager", "ours bf16", "hf amp compile", "hf bf16 compile"), (32,))
        | dict.fromkeys(("ours efficient", "ours math", "ours cudnn", "ours flex", "ours flex lean", "ours flex small"), (32,)),
        {"dropout": 0.0},
    ),
    "llama-3b": Case(
        "llama-3.2-3b", "lm", "AutoModelForCausalLM", 4096,
        {"ours": (2,), "ours bf16": (8, 12), "hf bf16 compile": (4,), "hf bf16 liger": (8,)},
    ),
    "llama-8b": Case(
        "llama-3.1-8b", "lm", "AutoModelForCausalLM", 4096,
        {"ours bf16": (2, 4, 6), "hf bf16 compile": (2,), "hf bf16 liger": (4,)},
    ),
    # Transformers' class lets all tokens see all, those that they are to predict too. Ours hides what follows, as the model's own
    # training does: half of the scores, 3 % of a step's FLOPs. Both have a prompt of 32 positions beside the text.
    "cpm-ant-2b": Case(
        "cpm-ant-10b", "lm", "AutoModelForCausalLM", 1024,
        {"ours": (8, 16), "ours bf16": (8, 16), "hf amp": (8,), "hf bf16": (8, 16)},
        {"dim": 2560, "head_dim": 80, "hidden": 6400, "layers": 24},
    ),
    "bert-large-texts": Case(
        "bert-large-uncased", "classify", "AutoModelForSequenceClassification", 512,
        {"ours": (64, 128, 256), "ours tokens": (128,), "ours padded": (64, 256), "ours bf16": (256,),
         "hf amp": (64, 256), "hf amp grouped": (64, 128, 256), "hf bf16": (64, 256), "hf bf16 grouped": (64, 128, 256),
         "hf bf16 grouped compile": (128,), "hf amp grouped compile": (128,), "hf bf16 compile": (128,)},
        texts=True,
    ),
    # Small ones, as they are fine-tuned: with their dropout, and few tokens a step.
    "gpt2": Case("gpt2", "lm", "AutoModelForCausalLM", 1024, dict.fromkeys(SMALL, (4,))),
    "gpt2-medium": Case("gpt2-medium", "lm", "AutoModelForCausalLM", 1024, dict.fromkeys(SMALL, (4,))),
    "bert-base": Case("bert-base-uncased", "mlm", "AutoModelForMaskedLM", 128, dict.fromkeys(SMALL, (32,))),
    # Adapters, as recipes/lora.yaml and qlora.yaml put them on all layers but the head.
    "llama-8b-lora": Case(
        "llama-3.1-8b", "lm", "AutoModelForCausalLM", 2048,
        {"ours": (4, 8), "hf amp liger": (4, 8), "hf bf16 liger": (4, 8), "hf bf16 compile": (4,)}, quantize="none",
    ),
    "llama-8b-qlora": Case(
        "llama-3.1-8b", "lm", "AutoModelForCausalLM", 2048,
        {"ours": (4, 8), "hf amp liger": (4, 8), "hf bf16 liger": (4, 8)}, quantize="nf4",
    ),
    "gpt2-lora": Case(
        "gpt2", "lm", "AutoModelForCausalLM", 1024, dict.fromkeys(("ours", "ours eager", "hf amp"), (4,)), quantize="none",
    ),
}  # fmt: skip


def build(case: Case, dtype: torch.dtype, layers: int | None, device: Any = "meta") -> Any:
    """Our model with random weights; `layers` cuts it for a trial."""
    fields = ("layers", "decoder_layers") if case.task == "seq2seq" else ("layers",)
    config = dict(case.config) | (dict.fromkeys(fields, layers) if layers else {})
    return mc.build(case.preset, task=case.task, dtype=dtype, config=config, device=device)


def ours(case: Case, device: torch.device, kind: str, layers: int | None) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and how it is to compute: arguments of `our_step`."""
    low, graphed = "bf16" in kind.split(), "eager" not in kind.split()
    if case.quantize:
        return adapted(case, device, layers), {"precision": "bf16", "graphed": graphed}
    model = build(case, torch.bfloat16 if low else torch.float32, layers, device)
    return model, {"precision": "fp32" if low else "bf16", "moments": "bf16" if low else "fp32", "graphed": graphed}


def adapted(case: Case, device: torch.device, layers: int | None) -> nn.Module:
    """Our model with an adapter, as `load` makes it for a run, with random weights."""
    config = mc.AdapterConfig(name="lora", quantize=case.quantize, **ADAPTER)  # type: ignore[arg-type]  # a name it knows
    model = build(case, torch.float32, layers)

    def ready(name: str, layer: nn.Module) -> None:
        layer.to_empty(device=device)
        nn.init.normal_(layer.get_parameter("weight"), std=0.02)

    insert(model, config, choose(model, config), None, ready, "bf16")
    place(model, device, None)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.02) if p.dim() > 1 else p.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def theirs(case: Case, device: torch.device, kind: str, layers: int | None) -> tuple[nn.Module, Callable[[], Any]]:
    """The model, and the context of its forward."""
    import transformers

    config = transformers.AutoConfig.for_model(**build_config(case, layers))
    config.use_cache = False
    words = kind.split()
    if "liger" in words:
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(config.model_type)
    dtype = torch.float32 if "amp" in words and not case.quantize else torch.bfloat16
    with device:
        model = getattr(transformers, case.auto).from_config(config, dtype=dtype)
    if case.quantize:
        model = in_peft(model, case.quantize, "amp" in words)
    if "compile" in words:
        model.compile(dynamic=case.texts or None)
    if "reduce" in words:
        model.compile(mode="reduce-overhead")
    return model, partial(autocast, "bf16" if "amp" in words else "fp32", device)


def in_peft(model: Any, quantize: str, wide: bool) -> Any:
    """Transformers' model with the same adapter of peft's, in fp32 if `wide`; with 4 bits of bitsandbytes'."""
    import peft

    if quantize == "nf4":
        import bitsandbytes as bnb  # type: ignore[import-not-found]  # only where there is a GPU

        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and name != "lm_head":
                sizes = layer.in_features, layer.out_features, layer.bias is not None
                coded: Any = bnb.nn.Linear4bit(*sizes, torch.bfloat16, quant_type="nf4")
                coded.weight = bnb.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                model.set_submodule(name, coded.to(layer.weight.device))
        model.is_loaded_in_4bit = True
    sizes = {"r": ADAPTER["rank"], "lora_alpha": ADAPTER["alpha"], "lora_dropout": ADAPTER["dropout"]}
    config = peft.LoraConfig(**sizes, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=wide)


def build_config(case: Case, layers: int | None) -> dict[str, Any]:
    """Transformers' configuration of the same model."""
    found: dict[str, Any] = build(case, torch.float32, layers).config.to_dict()
    return found


# --- the attention of others in ours

OTHERS = {"flex": "flex", "cudnn": "cudnn", "efficient": "efficient", "math": "eager"}  # by a contender's word, in attention.py
TILES = dict.fromkeys((f"bwd_BLOCK_{side}" for side in ("M1", "N1", "M2", "N2")), 64)
LEAN = {"bwd_num_stages": 1}  # of FlexAttention's backward, whose usual tiles want more shared memory than there is
FLEX = {"lean": LEAN, "small": TILES | LEAN | {"bwd_num_warps": 4}}


def attention_of(kind: str) -> AbstractContextManager[Any]:
    """A context in which our models attend with a bias by distance as `kind` says; its gradient reaches the table through what the
    other takes: the numbers of the distances, or the mask that all layers of a stack share."""
    name = next((OTHERS[word] for word in kind.split() if word in OTHERS), None)
    if name is None:
        return nullcontext()
    attend, masked = attention.CONTENDERS[name]
    settings = next((FLEX[word] for word in kind.split() if word in FLEX), None)
    contexts = ExitStack()

    def by_distance(view: View, bias: Distances, q: Tensor, k: Tensor, v: Tensor, scale: float | None, dropout: float) -> Tensor:
        if dropout or bias.prompt or any(x is not None for x in (view.seen, view.context, view.packing)):
            raise ValueError(f"{kind}: written for whole rows without dropout")
        dim = q.size(3) if scale is None else round(scale**-2)  # there the scale is its root's inverse
        shape = attention.Shape("", q.size(0), bias.queries, bias.keys, q.size(1), dim, True, view.causal)
        given = mask_of(shape, bias, q) if masked else bias.vector
        return attend(shape, *(x.transpose(1, 2) for x in (q, k, v)), given).transpose(1, 2)

    contexts.enter_context(patch.object(View, "by_distance", by_distance))
    if settings is not None:
        from torch.nn.attention import flex_attention as module

        contexts.enter_context(patch.object(module, "flex_attention", partial(module.flex_attention, kernel_options=settings)))
    return contexts


def mask_of(shape: attention.Shape, bias: Distances, like: Tensor) -> Tensor:
    """The bias as a mask (1 h s t) in the dtype of `like`, made once in a forward."""
    kept = vars(bias)
    if "mask" not in kept:
        mask = bias.spread().to(like.dtype)
        kept["mask"] = mask.masked_fill(attention.hidden(shape, like.device), float("-inf")) if shape.causal else mask
    return kept["mask"]


# --- texts of any length


@cache
def examples_of(data: str, fields: str, tokenizer: str, length: int, most: int | None) -> Any:
    """The first `most` of the texts of `data`, encoded; of two `fields`, pairs. Classes are drawn: no more than lengths matter."""
    records = list(read_records(data))[:most]
    keys = fields.split(",")
    rows = [Record({str(i): r.text(key, "--fields") for i, key in enumerate(keys)} | {"label": n % 2}, r.file, r.line)
            for n, r in enumerate(records)]  # fmt: skip
    words = open_tokenizer(tokenizer, (text for row in rows for text in row.fields.values() if isinstance(text, str)))
    return make_examples("classify", rows, words, DataConfig(seq_len=length, text_key="0", pair_key="1" if len(keys) > 1 else None))


Counts = list[tuple[int, int]]  # of each step, how many examples and real tokens it had


def our_texts(model: Any, case: Case, kind: str, size: int, examples: Any, device: torch.device, done: Counts, *, precision: str,
              moments: Any, graphed: bool) -> tuple[Step, Callable[[], int]]:  # fmt: skip
    """A step on the next texts, as a run makes them and steps (train/session.py); and how many graphs there are."""
    model.train()
    words, optimizer = kind.split(), build_optimizer(model, OptimizerConfig(moments=moments))
    graphs = graphs_of(model, Machine(cuda_graphs=graphed), device, lambda line: None)
    made = examples if "padded" in words else Unpadded(examples)
    most = forward_tokens(device, vars(model.config), True)
    budget = Budget(int(size * examples.lengths.mean()), most, False) if "tokens" in words else None
    steps = Loader(made, made.collate, size, budget=budget).steps()
    fill = graphs is not None and graphs.fills
    batches = prefetch([ready(model, batch, case.task, device, fill) for batch in pieces] for _, pieces in steps)
    coming: list[Ready] = []

    def fetch() -> None:
        coming[:] = [batch.on(device) for batch in next(batches)]

    def step() -> float:
        if not coming:
            fetch()
        done.append((sum(batch.targets for batch in coming), sum(batch.tokens for batch in coming)))
        loss, _ = accumulate(model, coming, case.task, partial(autocast, precision, device), graphs=graphs)
        known = soon(loss)
        update(model, optimizer, loss, 2e-5, 1.0, meanwhile=fetch, graphs=graphs)
        return known()

    return step, lambda: sum(len(shapes.records) for shapes in graphs.shapes.values()) if graphs is not None else 0


def their_texts(model: Any, kind: str, size: int, examples: Any, device: torch.device, done: Counts,
                compute: Callable[[], Any]) -> tuple[Step, Callable[[], int]]:  # fmt: skip
    """The same of theirs; and how many graphs a compiler has made."""
    batches, batch = prefetch(their_batches(examples, size, "grouped" in kind.split(), device)), dict[str, Any]()
    one = their_step(model, batch, compute)

    def step() -> Any:
        given, counts = next(batches)
        batch.clear()
        batch.update(given)
        done.append(counts)
        return one()

    return step, lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


def their_batches(examples: Any, size: int, grouped: bool, device: torch.device) -> Iterator[tuple[Batch, tuple[int, int]]]:
    """Batches on the device, and how many examples and real tokens each has, in Trainer's orders; an epoch's last is smaller."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = examples.lengths.tolist()
    for epoch in count():
        drawn = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(lengths), generator=drawn).tolist()
        if grouped:
            order = get_length_grouped_indices(lengths, size, generator=drawn)
        for k in range(0, len(lengths), size):
            batch = examples.collate(examples.several([(epoch, index) for index in order[k : k + size]]))
            counts = len(batch["labels"]), int(batch["attention_mask"].sum())
            width = -(-batch["input_ids"].size(1) // 8) * 8
            yield on_device(batch | {name: wider(batch[name], width, 0) for name in TEXT if name in batch}, device), counts


def run_texts(name: str, kind: str, size: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One contender at one batch on real texts: `seconds` are those of `size` examples, by the mean of each epoch."""
    case = CASES[name]
    length = options.length or case.length
    examples = examples_of(str(options.data), options.fields, options.tokenizer, length, options.examples)
    torch.manual_seed(0)
    done, meter = Counts(), Meter(device)
    if kind.startswith("ours"):
        model, how = ours(case, device, kind, options.layers)
        step, built = our_texts(model, case, kind, size, examples, device, done, **how)
    else:
        model, compute = theirs(case, device, kind, options.layers)
        step, built = their_texts(model, kind, size, examples, device, done, compute)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, clocks, times, first = list[float](), list[float](), list[float](), 0

    def epoch() -> float:
        """Seconds of so many examples as there are, or a few more, which are then in `done`."""
        done.clear()
        began = time.perf_counter()
        while sum(n for n, _ in done) < len(examples):
            losses.append(step())
            clocks.append(meter.clock())
        return time.perf_counter() - began

    warm, least = time.perf_counter(), EPOCHS if kind.startswith("ours") or "compile" in kind.split() else 1
    while first < least or (device.type == "cuda" and time.perf_counter() - warm < WARM):
        epoch()
        first += 1
    before, known, seen, tokens, steps = meter.joules(), built(), 0, 0, 0
    clocks.clear()
    for _ in range(EPOCHS):
        taken = epoch()
        here = sum(n for n, _ in done)
        times.append(taken * size / here)
        seen, tokens, steps = seen + here, tokens + sum(t for _, t in done), steps + len(done)
    joules, rate = (meter.joules() - before) / steps, size / statistics.mean(times)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    lengths = examples.lengths.tolist()
    work = work_of(build(case, torch.float32, options.layers), case, lengths, len(lengths) / sum(lengths)) / len(lengths)
    if options.profile:
        print(f"\n{name} {kind} B{size}\n{profile(step)}", file=sys.stderr, flush=True)
    print(f"{rate:.1f} texts/s; {steps} steps; graphs {known}, in the end {built()}", file=sys.stderr, flush=True)
    return {"case": name, "contender": kind, "batch": size, "length": length, "seconds": times, "tokens": rate * tokens / seen,
            "samples": rate, "flops": rate * work, "peak": peak, "loss": losses[0], "last": losses[-1], "graphs": [known, built()],
            "joules": joules, "clock": statistics.mean(clocks), "texts": len(lengths), "mean": sum(lengths) / len(lengths),
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


def flops(model: Any, case: Case, batch: Batch) -> float:
    """Of a step of the model on this batch, in which all sequences have one length."""
    size, length = batch["input_ids"].shape
    labelled = int((batch["labels"] != -100).sum()) / (size * length) if case.task == "mlm" else 1.0
    return work_of(model, case, [length] * size, labelled)


def work_of(model: Any, case: Case, lengths: Sequence[int], labelled: float) -> float:
    """FLOPs of a step of the model on sequences of these lengths: of an encoder's last block, but for keys and values, of the
    share of tokens that is labelled."""
    sizes, tokens = model.config, sum(lengths)
    matrices = sum(p.numel() for m in model.modules() if isinstance(m, Block) for p in m.parameters() if p.dim() == 2)
    last = [m for m in model.modules() if isinstance(m, Block)][-1]
    behind = sum(p.numel() for part in (last.attn.q, last.attn.o, last.ffn) for p in part.parameters() if p.dim() == 2)
    matrices -= (1 - labelled) * behind
    width = sizes.heads * (getattr(sizes, "head_dim", None) or sizes.dim // sizes.heads)
    # of an encoder, of a decoder on itself and on the other
    seen = 2.5 if case.task == "seq2seq" else 0.5 if case.task == "lm" else 1.0
    scores = 12 * (sizes.layers - (1 - labelled)) * width * seen * sum(length * length for length in lengths)
    head = 0 if case.task == "classify" else labelled * sizes.vocab * sizes.dim
    return tokens * (4 if case.quantize else 6) * (matrices + head) + scores  # what is frozen has no gradient


def ceiling(device: torch.device) -> float:
    """FLOP/s of a large product in bf16 on random numbers."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(8):
        times.append(seconds(lambda: [a @ b for _ in range(10)], device) / 10)
    return 2 * 8192**3 / statistics.median(times)


def seconds(f: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    f()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def run(name: str, kind: str, size: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One contender at one batch: tokens a second, seconds, memory."""
    case = CASES[name]
    torch.manual_seed(0)
    plain = build(case, torch.float32, options.layers)
    length = options.length or case.length
    batch = batch_of(case.task, size, length, plain.config.vocab, "cpu")
    if kind.startswith("ours"):
        model, how = ours(case, device, kind, options.layers)
        step = our_step(model, batch, case.task, device=device, **how)
    else:
        model, compute = theirs(case, device, kind, options.layers)
        step = their_step(model, on_device(batch, device), compute)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, began = [step() for _ in range(3)], time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - began < WARM:
        step()
    meter, times, clocks = Meter(device), list[float](), list[float]()
    step()
    before, mark = meter.joules(), time.perf_counter()
    for _ in range(options.steps):  # each from the end of the one before, as in training: nothing but its loss is waited for
        step()
        mark, before_it = time.perf_counter(), mark
        times.append(mark - before_it)
        clocks.append(meter.clock())
    joules = (meter.joules() - before) / options.steps
    work, taken = flops(plain, case, batch), statistics.median(times)
    tokens = batch["input_ids"].numel() * (2 if case.task == "seq2seq" else 1)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    if options.profile:
        print(f"\n{name} {kind} B{size}\n{profile(step)}", file=sys.stderr, flush=True)
    return {"case": name, "contender": kind, "batch": size, "length": length, "seconds": times, "tokens": tokens / taken,
            "samples": size / taken, "flops": work / taken, "peak": peak, "loss": losses[0],
            "joules": joules, "clock": statistics.mean(clocks),
            "parameters": sum(p.numel() for p in model.parameters())}  # fmt: skip


# Of kernels by words in their names; ours that are called `forward` and `backward` are among the others, by their types.
KINDS = {"attention": "fmha|flash|sdpa|cudnn|of_keys|of_queries", "products": "nvjet|gemm|gemv|cutlass|splitK", "norms": "norm",
         "activations": "gated|gelu|threshold", "optimizer": "update_all|squares", "rotary": "rotate",
         "embeddings": "embedding|gather", "copies": "[Cc]opy|Memcpy|Memset", "additions": "[Aa]dd"}  # fmt: skip


def profile(step: Step, steps: int = 3) -> str:
    """The kernels that a step spends its time in, and where the GPU has none."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # torch.autograd has it, and does not say so
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    found.sort(key=lambda e: e.time_range.start)
    kinds, names, gaps, end = Counter[str](), Counter[str](), list[tuple[float, int]](), found[0].time_range.start
    for i, e in enumerate(found):
        if e.time_range.start > end:
            gaps.append((e.time_range.start - end, i))
        end = max(end, e.time_range.end)
        kinds[next((kind for kind, words in KINDS.items() if re.search(words, e.name)), "others")] += e.time_range.elapsed_us()
        names[short(e.name)] += e.time_range.elapsed_us()
    calls, each = Counter(short(e.name) for e in found), 1e3 * steps
    taken, idle, near = (end - found[0].time_range.start, sum(gap for gap, _ in gaps), sum(gap for gap, _ in gaps if gap < 3))
    by_kind = ", ".join(f"{kind} {us / each:.1f}" for kind, us in kinds.most_common())
    lines = [f"{taken / each:9.2f} ms a step, of which kernels {kinds.total() / each:.2f}: {by_kind}",
             f"{idle / each:9.2f} ms between {len(found) // steps} kernels, {near / each:.2f} by less than 3 us; the longest:"]
    for gap, i in sorted(gaps)[-6:]:
        lines.append(f"{gap / 1e3:9.2f} ms before {short(found[i].name, 56)} after {short(found[i - 1].name, 56)}")
    lines += [f"{us / each:9.2f} ms {calls[name] / steps:5.0f} x {name}" for name, us in names.most_common(40)]
    return "\n".join(lines)


def short(name: str, most: int = 100) -> str:
    """A kernel's name without what all have, and without its arguments' types."""
    for part in ("(anonymous namespace)::", "at::native::", "void "):
        name = name.replace(part, "")
    return re.sub(r"\(.*", "", name)[:most]


class Meter:
    """The energy that the GPU has taken, in joules, and its clock, in MHz, as its driver tells them; NaN where it does not."""

    def __init__(self, device: torch.device) -> None:
        self.library, self.card = None, ctypes.c_void_p()
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            identity = str(torch.cuda.get_device_properties(device).uuid)
            name = identity if identity.startswith("GPU-") else f"GPU-{identity}"
            found = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self.card))
        except (OSError, AttributeError):
            return
        self.library = None if found else library

    def joules(self) -> float:
        taken = ctypes.c_ulonglong()
        known = self.library is not None and not self.library.nvmlDeviceGetTotalEnergyConsumption(self.card, ctypes.byref(taken))
        return taken.value / 1e3 if known else math.nan

    def clock(self) -> float:
        found = ctypes.c_uint()
        known = self.library is not None and not self.library.nvmlDeviceGetClockInfo(self.card, 1, ctypes.byref(found))
        return float(found.value) if known else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--contenders", default="", help="with commas; all of a case")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a trial")
    parser.add_argument("--length", type=int, help="shorter than the case's, for a trial")
    parser.add_argument("--data", type=Path, help="real texts, for the cases that want them")
    parser.add_argument("--fields", default="text", help="that of a text, or two of a pair, with a comma")
    parser.add_argument("--tokenizer", default="roberta:8000", help="a folder, or one that is made of the texts")
    parser.add_argument("--examples", type=int, help="fewer texts than there are, for a trial")
    parser.add_argument("--profile", action="store_true", help="the kernels of each, too")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="the folder for step.md and step.jsonl")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device, began = torch.device(options.device), time.monotonic()
    rows = []
    for name in options.cases.split(","):
        if CASES[name].texts and options.data is None:
            print(f"{name}: left out, for it needs --data", file=sys.stderr)
            continue
        top = ceiling(device) if device.type == "cuda" else float("nan")
        for kind, sizes in CASES[name].batches.items():
            if options.contenders and kind not in options.contenders.split(","):
                continue
            for size in (options.batch,) if options.batch else sizes:
                if time.monotonic() - began > options.limit:
                    print(f"{name} {kind} B{size}: no time left", file=sys.stderr)
                    continue
                try:
                    with attention_of(kind):
                        found = (run_texts if CASES[name].texts else run)(name, kind, size, options, device)
                    row = found | {"ceiling": top, **stamp(device.type)}
                except Exception as error:
                    print(f"{name} {kind} B{size}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
                    continue
                finally:
                    gc.collect()
                    if device.type == "cuda":
                        torch._dynamo.reset()
                        attention.compiled_flex.cache_clear()
                        torch.cuda.empty_cache()
                rows.append(row)
                said = f"{row['tokens']:.0f} tok/s, {row['flops'] / 1e12:.0f} TFLOP/s, {row['peak']:.1f} GiB"
                print(f"{name} {kind} B{size}: {said}", file=sys.stderr, flush=True)
    text = ["| case | contender | batch | tok/s | samples/s | TFLOP/s | of the product's | peak GiB | J a step | MHz |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        spread = (max(row["seconds"]) - min(row["seconds"])) / 2 / statistics.median(row["seconds"])
        rates = f"{row['tokens']:.0f} ±{spread:.0%} | {row['samples']:.1f} | {row['flops'] / 1e12:.0f}"
        share = f"{row['flops'] / row['ceiling']:.0%} | {row['peak']:.1f} | {row['joules']:.0f} | {row['clock']:.0f}"
        text.append(f"| {row['case']} S{row['length']} | {row['contender']} | {row['batch']} | {rates} | {share} |")
    leave("Training steps", device.type, text, rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
