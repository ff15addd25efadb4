"""Every pair of what a machine may ask for, and of what it meets in a recipe: tried on ranks, and written down in docs/parallel.md.

    python tests/pairs.py        # tries all pairs and writes the table
"""

import json
import logging
import sys
import tempfile
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mesh import DEVICE, full, spawn
from test_averaging import Silent
from torch import Tensor

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.machine import LAYOUT, Machine
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train import step as stepping
from modelcenter.train.evaluate import count_targets
from modelcenter.train.graphs import GPU, WARM, Graphs
from modelcenter.train.repeatable import repeatable
from modelcenter.train.step import accumulate, autocast, update

DOC = Path(__file__).resolve().parent.parent / "docs" / "parallel.md"
EQUAL = "="

# A feature is what it sets: of the machine, or (in `with`) of what is trained on it.
FEATURES: dict[str, dict[str, Any]] = {
    "tensor_parallel=2": {"tensor_parallel": 2},
    "sequence_parallel": {"sequence_parallel": True, "tensor_parallel": 2},
    "fsdp=2": {"fsdp": 2},
    "replicate=2": {"replicate": 2},
    "zero=1": {"zero": 1, "fsdp": 2},
    "zero=2": {"zero": 2, "fsdp": 2},
    "offload": {"offload": True},
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
    "compile": {"compile": True},
    "cuda_graphs": {"with": {"graphs": True}},
    "deterministic": {"deterministic": True},
    "bf16": {"with": {"precision": "bf16"}},
    "fp16": {"with": {"precision": "fp16"}},
    "accumulation": {"with": {"micro": 1}},
    "LoRA": {"with": {"adapter": AdapterConfig(name="lora", rank=2, targets=("all-linear",))}},
    "DoRA": {"with": {"adapter": AdapterConfig(name="dora", rank=2, targets=("all-linear",))}},
    "QLoRA": {"with": {"adapter": AdapterConfig(name="lora", rank=2, targets=("all-linear",), quantize="nf4")}},
    "muon": {"with": {"optimizer": {"name": "muon"}}},
    "adafactor": {"with": {"optimizer": {"name": "adafactor"}}},
}
STILL = {"dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0}
WIDE = {"layers": 1, "dim": 128, "heads": 2, "positions": 16, "vocab": 41, **STILL}  # groups of codes for two ranks
SIZES = {"layers": 2, "dim": 16, "heads": 2, "positions": 16, "vocab": 41, **STILL}


def merged(names: tuple[str, str]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What a pair sets, of the machine and beside it; None where both set one key."""
    machine: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    for name in names:
        own = {key: value for key, value in FEATURES[name].items() if key != "with"}
        for into, part in ((machine, own), (beside, FEATURES[name].get("with", {}))):
            if any(into.get(key, value) != value for key, value in part.items()):
                return None
            into |= part
    return machine, beside


def written() -> dict[str, str]:
    """What the page says of each pair."""
    head, _, notes = DOC.read_text(encoding="utf-8").rpartition("|\n\n")
    texts = [line.partition("`")[2].rstrip("`") for line in notes.splitlines()]
    columns, *rows = ([c.strip() for c in line.split("|")[1:]] for line in f"{head}|".splitlines() if line.startswith("| "))
    said = {f"{row[0]} x {column}": cell for row in rows for column, cell in zip(columns[1:], row[1:], strict=True) if cell}
    return {pair: texts[int(cell) - 1] if cell.isdigit() else cell for pair, cell in said.items()}


def pairs() -> list[tuple[str, str]]:
    """Those whose parts are about different keys."""
    return [pair for pair in combinations(FEATURES, 2) if merged(pair) is not None]


def machine_of(changes: dict[str, Any]) -> Machine:
    return Machine(device=DEVICE, threads=1, **changes)


def ranks_of(pair: tuple[str, str]) -> int:
    changes, _ = merged(pair) or ({}, {})
    return machine_of({key: value for key, value in changes.items() if key in LAYOUT}).ranks


def here(some: list[tuple[str, str]], devices: int | None = None) -> list[tuple[str, str]]:
    """Those of `some` for which there are `devices` enough, a rank each: those of this machine; CPUs take any number."""
    if devices is None:
        devices = torch.accelerator.device_count() if DEVICE != "cpu" else 2**20
    return [pair for pair in some if ranks_of(pair) <= devices]


def train(folder: str, sizes: dict[str, Any], machine: Machine | None, ranks: Ranks,
          beside: dict[str, Any], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the steps and the weights after them."""
    precision, adapter = beside.get("precision", "fp32"), beside.get("adapter")
    exact = precision == "fp32" and (adapter is None or adapter.quantize == "none")
    model = mc.load(folder, dtype="fp64" if exact else "fp32", machine=machine, precision=precision, adapter=adapter, config=sizes)
    optimizer = build_optimizer(model.train(), OptimizerConfig(lr=1e-2, **beside.get("optimizer", {})), ranks)
    device = torch.device("cpu" if machine is None else DEVICE)
    graphs = None
    if machine is not None and machine.graphs and "graphs" in beside:
        graphs = Graphs(model, Silent(model, optimizer) if DEVICE == "cpu" else GPU(device), repeats=machine.ranks == 1)
    ids = torch.randint(41, (4, 10), generator=torch.Generator().manual_seed(3)).to(device)
    rows = [ids[k : k + 1] for k in range(4)][ranks.share :: ranks.shares]
    micro = beside.get("micro", len(rows))
    parts = [torch.cat(rows[k : k + micro]) for k in range(0, len(rows), micro)]
    batches = [{"input_ids": part, "labels": part} for part in parts]
    (targets,) = ranks.sum(sum(count_targets(batch, "lm") for batch in batches))
    losses, scale = [], 2.0**10 if precision == "fp16" else 1.0
    for _ in range(steps):
        loss, _ = accumulate(model, batches, "lm", partial(autocast, precision, device), scale, int(targets), ranks, graphs=graphs)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-2, 0.1, scale, squares, graphs=graphs)
        losses.append(float(loss))
    if graphs is not None and machine is not None:
        recorded = any(shapes.records for shapes in graphs.shapes.values()) and not graphs.ended
        assert recorded == machine.records(len(batches)), "what is recorded"
        graphs.end()  # NCCL would wait for them
    return losses, {n: full(p.detach()).double() for n, p in model.named_parameters() if p.requires_grad}


alone: dict[str, tuple[list[float], dict[str, Tensor]]] = {}  # what one process finds, of this one's pairs
APART = 0.01  # root mean square of what a weight may be apart, which has moved by at most 0.03


def verdict(folders: tuple[str, str], pair: tuple[str, str]) -> str:
    """`EQUAL`, or the text of the refusal; an AssertionError says what differs."""
    changes, beside = merged(pair) or ({}, {})
    which = (folders[1], WIDE) if "QLoRA" in pair else (folders[0], SIZES)
    usual = {key: value for key, value in beside.items() if key not in ("micro", "graphs")}
    steps = 3 if "graphs" not in beside else WARM + 3
    if (known := f"{which[1]} {usual} {steps}") not in alone:
        alone[known] = train(*which, None, ALONE, usual, steps)
    wanted, weights = alone[known]
    try:
        machine = machine_of(changes)
        with repeatable(machine):
            losses, found = train(*which, machine, join(machine), beside, steps)
    except mc.InputError as refusal:
        return str(refusal)
    assert not machine.compile or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, f"{pair}: nothing was compiled"
    low = "precision" in beside
    single = "optimizer" in beside or beside.get("adapter", AdapterConfig()).quantize != "none"
    tolerance = 2e-2 if low else 1e-5 if single else 1e-8
    assert wanted[0] - wanted[-1] > 1e-5, f"{pair}: nothing is learned: {wanted}"
    for a, b in zip(wanted, losses, strict=True):
        assert abs(a - b) <= tolerance * a, f"{pair}: losses {losses}, alone {wanted}"
    for name, weight in weights.items():
        apart = found[name][tuple(slice(0, n) for n in weight.shape)] - weight
        # AdamW's three steps go by the signs of gradients, and low precision turns a few: of those that turn, not of one
        gap = float(apart.square().mean().sqrt() if low else apart.abs().max())
        if low and name.endswith("attn.k.bias"):
            continue  # no score's softmax feels it: its gradient is nothing but roundings
        assert gap <= (APART if low else 0.03 if "muon" in pair else 1e-5), f"{pair}: {name} is {gap} apart"
    return EQUAL


def work(rank: int, folders: tuple[str, str], some: list[tuple[str, str]], out: Path) -> None:
    stepping.number_on = lambda value, device: torch.full((), value, device=device)  # type: ignore[attr-defined]  # as on a GPU
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]  # inductor has tests elsewhere
    logging.getLogger("torch._logging").setLevel(logging.ERROR)  # its advice for who writes what is computed again
    said = {}
    size = dist.get_world_size()
    for k, pair in enumerate(some):
        if ranks_of(pair) == 1 and k % size != rank:
            continue  # each rank tries some of these
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        said[" x ".join(pair)] = verdict(folders, pair)
    (out / f"{rank}.json").write_text(json.dumps(said))


def tried(some: list[tuple[str, str]]) -> dict[str, str]:
    """What came of each pair, each on as many ranks as it has."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folders, out = (str(Path(name) / "model"), str(Path(name) / "wide")), Path(name)
        for folder, config in zip(folders, (SIZES, WIDE), strict=True):
            mc.build("gpt2", config=config, seed=3).save_pretrained(folder)
        # two at a time of what runs in one process; offload has a group of its own there
        sizes = {pair: ranks_of(pair) if "offload" in pair else max(2, ranks_of(pair)) for pair in some}
        for ranks in sorted(set(sizes.values())):
            mine = [pair for pair in some if sizes[pair] == ranks]
            size = 8  # a spawn has a time in which to end
            for k in range(0, len(mine), size):
                spawn(ranks, work, folders, mine[k : k + size], out)
                for rank in range(ranks):
                    found |= json.loads((out / f"{rank}.json").read_text())
    return found


HEAD = """# What combines on several ranks

`=`: with both, a tiny GPT has the losses and weights of one process, up to rounding. Blank: both set the same key.
`python tests/pairs.py` writes this table; tests try every pair again with gloo, and with NCCL (on four H200s, 2026-11-28; those of
cuda_graphs and deterministic with gloo only). With gloo a stand-in records and replays in the place of CUDA graphs; with offload or
compile nothing is recorded. async_save has no row: it copies what a save writes, and changes nothing of what ranks compute.

Sizes that do not divide are refused by name: attention heads must be divisible by tensor_parallel, and the columns of QLoRA's 4-bit
weights by 64 times the ranks that split them. One combination of three is refused: compile with recompute=full under
tensor_parallel, because torch's compiler fails on its backward. It fails on batches of varying shapes there too, so blocks are
compiled for each shape of batch anew; after eight shapes they run uncompiled.

"""
NUMBERS = "A number: refused before a weight is allocated, with the text below.\n\n"


def table(found: dict[str, str]) -> str:
    """The page, of what came of every pair."""
    notes: list[str] = []
    names = list(FEATURES)
    lines = ["| | " + " | ".join(names[1:]) + " |", "|---" * len(names) + "|"]
    for row in names[:-1]:
        cells = []
        for column in names[1:]:
            said = found.get(f"{row} x {column}", "")
            if said not in ("", EQUAL):
                notes += [said] if said not in notes else []
                said = str(notes.index(said) + 1)
            cells.append(said)
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    told = "\n".join(f"{k}. `{note}`" for k, note in enumerate(notes, 1)) or "None of these is refused."
    return HEAD + (NUMBERS if notes else "") + "\n".join(lines) + "\n\n" + told + "\n"


if __name__ == "__main__":
    text = table(tried(pairs()))
    DOC.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
