"""Seconds to load a checkpoint from a warm page cache: ours into several ranks beside transformers in one process, and beside
transformers' `from_pretrained` in each of as many ranks, which FSDP then shards, in turn.

    python benchmarks/load.py [--gb 1] [--family gpt2|llama] [--ranks 1,2,4] [--layout fsdp|tp] [--rounds 3] [--peer]
                              [--memory] [--parts] [--device cpu|cuda] [--shard 5GB] [--folder DIR] [--threads N] [--out DIR]

The folder holds random bf16 weights in the family's own names and layouts, in DIR or in a temporary one. A contender is a process,
or several, that has imported what it needs and joined its group, and is then told to begin; its time ends when every rank's weights
are on its device and a byte of every page was looked at. Host memory is the sum of the processes' proportional set sizes (psutil)
above what they had before, with the pages of the files that are mapped; `read` is what the processes read in all, and `CPU` what
they computed, which on a machine that does other things too is the better measure. `--parts` says which seconds of ours were
spent where, of the rank that spent most there; an accelerator goes on with what it was told meanwhile.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial, wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from page import leave, stamp

import modelcenter as mc
from modelcenter.checkpoint.save import config_json
from modelcenter.checkpoint.write import Item, save_folder

FAMILIES = {  # preset, transformers' class, fields that all sizes share
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"vocab": 50257, "positions": 2048}),
    "llama": ("llama-7b", "LlamaForCausalLM", {"vocab": 32000}),
}
WIDTHS = ((2, 1024), (8, 2048), (20, 4096), (1000, 5120))  # below so many GB a model is so wide
PERIOD = 0.02  # seconds between two looks at the memory


def write_folder(folder: Path, family: str, gb: float, shard: str) -> int:
    """A folder of about `gb` GB; the bytes of its weights."""
    preset, _, fields = FAMILIES[family]
    width = next(dim for below, dim in WIDTHS if gb < below)
    hidden = {"hidden": width * 8 // 3 // 128 * 128} if family == "llama" else {}
    config = {**fields, **hidden, "dim": width, "heads": width // 128} | ({"kv_heads": width // 128} if family == "llama" else {})
    one, two = (built(preset, {**config, "layers": n}) for n in (1, 2))
    layers = max(1, round((gb * 1e9 - 2 * (2 * size_of(one) - size_of(two))) / (2 * (size_of(two) - size_of(one)))))
    model = built(preset, {**config, "layers": layers})
    # ignored: names stand where tensors would
    named: Any = {n: n for n in model.shapes}  # in place of tensors: which one of ours each of theirs is
    shapes = {name: (theirs, shape) for theirs, shape, name in model.table.save(named, model.shapes)}
    noise = torch.randn(2**20).mul_(0.02).bfloat16()

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        flat = torch.empty(shape, dtype=torch.bfloat16).view(-1)
        for at in range(0, len(flat), len(noise)):
            flat[at : at + len(noise)] = noise[: len(flat) - at]
        return flat.view(shape)

    items = [Item(name, shape, torch.bfloat16, partial(draw, shape)) for name, shape in shapes.values()]
    save_folder(folder, items, max_shard_size=shard, extra_files={"config.json": config_json(model, torch.bfloat16)})
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def built(preset: str, config: dict[str, Any]) -> mc.Model:
    return mc.build(preset, config=config, device="meta", dtype="bf16")


def size_of(model: mc.Model) -> int:
    return sum(p.numel() for p in model.parameters())


def warm(folder: Path) -> None:
    """Bring every byte of the files into the page cache."""
    buffer = bytearray(2**24)
    for file in folder.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


class Parts:
    """Seconds spent inside of functions, from the first call of each apart."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def see(self, owner: Any, name: str) -> None:
        """Have the calls of `owner.name` timed."""
        inner = getattr(owner, name)

        @wraps(inner)
        def outer(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                label = f"first {name}" if name not in self.seconds else name
                self.seconds[label] += time.perf_counter() - began
                self.seconds[name] += 0.0

        setattr(owner, name, outer)

    def ours(self) -> None:
        """Those of loading."""
        from modelcenter import create
        from modelcenter.checkpoint import exchange, group, intake
        from modelcenter.parallel import apply, peers

        for owner, name in ((create, "skeleton"), (create, "match"), (create, "place"), (create, "fill_all"),
                            (exchange, "planned"), (group.Group, "regions"), (group.Group, "trade"),
                            (group.Group, "collect"), (exchange, "reach"),
                            (intake.Intake, "next"), (create, "set_out"), (intake.Intake, "fetch"), (intake, "begin"),
                            (intake.Buffer, "take"), (intake.Reading, "wait"), (intake.Intake, "__exit__"),
                            (create, "open_roads"), (peers, "ways"), (apply, "shard")):  # fmt: skip
            self.see(owner, name)


def contend(pipe: Connection, kind: str, rank: int, ranks: int, store: str, options: argparse.Namespace, folder: str) -> None:
    """One process: get ready, say so, wait for the word, load, say how long it took."""
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MODELCENTER_STORE=store, TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // ranks))
    cuda, parts = options.device == "cuda", Parts()
    if cuda:
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
    if kind == "ours":
        profile = mc.Machine(device=options.device, **{"fsdp" if options.layout == "fsdp" else "tensor_parallel": ranks})
        if ranks > 1:
            from torch import _dynamo  # noqa: F401  # imports are nobody's reading, and this one takes two seconds
            from torch.distributed import fsdp  # noqa: F401  # likewise
            from torch.distributed.tensor import parallel  # noqa: F401  # likewise

            from modelcenter.parallel.apply import join

            join(profile)
            dist.all_reduce(torch.zeros(1, device=options.device))

        def load() -> Any:
            return mc.load(folder, machine=profile)

        if options.parts:
            parts.ours()
    else:
        import transformers

        cls, home = getattr(transformers, FAMILIES[options.family][1]), f"cuda:{rank}" if cuda else "cpu"
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard

            dist.init_process_group(
                "nccl" if cuda else "gloo", init_method=f"file://{store}-theirs", rank=rank, world_size=ranks,
                device_id=torch.device(home) if cuda else None,
            )  # fmt: skip
            dist.all_reduce(torch.zeros(1, device=home))

        def load() -> Any:
            model = cls.from_pretrained(folder, dtype=torch.bfloat16, device_map=home, local_files_only=True)
            if ranks > 1:
                for part in [m for m in model.modules() if type(m).__name__ in model._no_split_modules]:
                    fully_shard(part)
                fully_shard(model)
            return model

    gc.collect()
    me = psutil.Process()
    pipe.send("ready")
    pipe.recv()
    before, worked, began = me.io_counters().read_chars, time.process_time(), time.perf_counter()
    model = load()
    parts.seconds["load"] = time.perf_counter() - began
    with torch.no_grad():
        for p in model.parameters():  # mapped and not yet read is not loaded
            getattr(p, "_local_tensor", p).view(-1).view(torch.uint8)[::512].count_nonzero()
    if cuda:
        torch.cuda.synchronize()
    seconds, read = time.perf_counter() - began, me.io_counters().read_chars - before
    pipe.send((seconds, read, time.process_time() - worked, dict(parts.seconds)))
    pipe.recv()  # the memory is looked at until all are done
    del model
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)


class Watch(threading.Thread):
    """The most memory that some processes hold between them, until it is told to stop."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        super().__init__(daemon=True)
        self.processes, self.over, self.peak = processes, threading.Event(), 0

    def look(self) -> int:
        return sum(process.memory_full_info().pss for process in self.processes)

    def run(self) -> None:
        while not self.over.wait(PERIOD):
            self.peak = max(self.peak, self.look())


def measure(kind: str, ranks: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of the slowest rank, bytes read by all, peak host memory of all above what they began with."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        pipes, jobs = [], []
        for rank in range(ranks):
            mine, other = context.Pipe()
            arguments = other, kind, rank, ranks, f"{place}/store", options, str(folder)
            job = context.Process(target=contend, args=arguments, daemon=True)
            job.start()
            other.close()
            pipes.append(mine)
            jobs.append(job)
        answers(pipes)
        watch = Watch([psutil.Process(job.pid) for job in jobs])
        base = watch.look()
        if options.memory:
            watch.start()
        for pipe in pipes:
            pipe.send("go")
        found = answers(pipes)
        watch.over.set()
        if options.memory:
            watch.join()
        peak = max(watch.peak, watch.look())
        for pipe in pipes:
            pipe.send("end")
        for job in jobs:
            job.join(60)
    seconds, read, cpu, parts = zip(*found, strict=True)
    if options.parts and kind == "ours":
        most = {name: max(one.get(name, 0.0) for one in parts) for name in parts[0]}
        print(", ".join(f"{name} {s:.3f}" for name, s in most.items() if s >= 0.001), file=sys.stderr)
    return {"seconds": max(seconds), "read": sum(read), "cpu": sum(cpu), "host": peak - base}


def answers(pipes: list[Connection]) -> list[Any]:
    for pipe in pipes:
        if not wait([pipe], 1800):
            raise TimeoutError("a process said nothing for half an hour")
    return [pipe.recv() for pipe in pipes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--family", default="gpt2", choices=FAMILIES)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layout", default="fsdp", choices=("fsdp", "tp"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="transformers' from_pretrained, too, in one process and in as many")
    parser.add_argument("--memory", action="store_true", help="watch the memory all the while: the times suffer")
    parser.add_argument("--parts", action="store_true", help="where ours spend their seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shard", default="5GB")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", type=Path, help="where to keep the checkpoint; the next run finds it there")
    parser.add_argument("--out", type=Path, help="the folder for load.md and load.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place) / "model"
        if not (folder / "config.json").exists():
            write_folder(folder, options.family, options.gb, options.shard)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        ranks = [int(n) for n in options.ranks.split(",")]
        contenders = [("ours", n) for n in ranks] + [("transformers", n) for n in dict.fromkeys((1, *ranks)) if options.peer]
        found: dict[tuple[str, int], list[dict[str, float]]] = {one: [] for one in contenders}
        for _ in range(options.rounds):
            for one in contenders:
                warm(folder)
                found[one].append(measure(*one, options, folder))
                print(f"{one[0]} x {one[1]}: {found[one][-1]}", file=sys.stderr, flush=True)
    text = ["| | ranks | seconds: least | median | GB/s | CPU s | read / file | host memory / file |", "|---|" + "---:|" * 7]
    rows = []
    for (kind, ranks), runs in found.items():
        least, median = min(r["seconds"] for r in runs), statistics.median(r["seconds"] for r in runs)
        cpu, read, host = (statistics.median(r[key] for r in runs) for key in ("cpu", "read", "host"))
        text.append(f"| {kind} | {ranks} | {least:.2f} | {median:.2f} | {size / 1e9 / least:.1f} | {cpu:.1f} | {read / size:.2f} | "
                    f"{host / size:.2f} |")  # fmt: skip
        rows.append({"kind": kind, "ranks": ranks, "size": size, "runs": runs, **stamp(options.device),
                     "family": options.family, "layout": options.layout, "device": options.device})  # fmt: skip
    leave(f"Loading {size / 1e9:.2f} GB, {options.family}, {options.layout}", options.device, text, rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
