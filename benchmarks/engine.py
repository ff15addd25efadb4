"""A training step on several GPUs: ours beside transformers under FSDP2 with compiled blocks, each alone, one after the other.

    torchrun --nproc-per-node 4 benchmarks/engine.py [--preset gpt2-13b] [--length 512] [--batch 16] [--contenders ours,hf]
             [--recompute none] [--zero 3] [--steps 6] [--layers N] [--profile] [--limit SECONDS] [--out DIR]

Both hold fp32 weights and moments in parts, compute in bf16, exchange weights in bf16 and gradients in fp32 (ours in bf16, summed
in fp32, where ranks reach each other), without dropout, on random ids; a step is forward, backward, clip and update. `ours compile`
compiles our blocks too, `ours calls` has no CUDA graph, `ours moments` keeps moments in bf16, `hf eager` compiles no block,
`selective` and `full` recompute, `offload` keeps weights, gradients and moments on the host; `hf@16` is theirs with 16 sequences a
rank, whatever --batch says. Memory that does not suffice ends the run, and loses the contenders behind it: name them by what they
need.
FLOPs and the product that they are a share of: step.py. One more step is traced: `exposed` is the share of it in which the stream
that computes stands still while another one sends or waits for a rank (nan of a CUDA graph, whose kernels a trace puts on other
streams), `idle` that in which nothing runs. `retries`: how often memory was so full that the allocator gave back what it kept, for
which the device stands still.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from page import stamp
from plan import mapped, noisy
from step import Case, ceiling, flops, profile, seconds
from torch import nn
from train import Step, batch_of, their_step

import modelcenter as mc
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.train.graphs import WARM, graphs_of
from modelcenter.train.step import accumulate, autocast, update

STILL = {"dropout": 0.0, "attn_dropout": 0.0, "embed_dropout": 0.0}
Batch = dict[str, torch.Tensor]


def recompute_of(kind: str, options: argparse.Namespace) -> Any:
    return next((word for word in kind.split() if word in ("selective", "full")), options.recompute)


def ours(preset: str, config: dict[str, Any], batch: Batch, options: argparse.Namespace, kind: str) -> tuple[nn.Module, Step]:
    split = options.tensor_parallel
    where = mc.Machine(
        device=options.device,
        fsdp=dist.get_world_size() // split,
        tensor_parallel=split,
        recompute=recompute_of(kind, options),
        zero=options.zero,
        compile="compile" in kind,
        offload="offload" in kind,
        cuda_graphs="calls" not in kind,
    )
    model: Any = noisy(mc.build(preset, task="lm", config=config, device="meta"), where, "bf16", batch["labels"].device)
    ranks, optimizer = join(where), build_optimizer(model, OptimizerConfig(moments="bf16" if "moments" in kind else "fp32"))
    compute, targets = partial(autocast, "bf16", batch["labels"].device), batch["labels"].numel() * ranks.shares
    graphs = graphs_of(model, where, batch["labels"].device, lambda line: print(line, file=sys.stderr) if ranks.first else None)

    def step() -> float:
        loss, _ = accumulate(model, [batch], "lm", compute, targets=targets, ranks=ranks, graphs=graphs)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-4, 1.0, squares=squares, graphs=graphs)
        return float(loss)

    return model, step


def theirs(preset: str, config: dict[str, Any], batch: Batch, options: argparse.Namespace, kind: str) -> tuple[nn.Module, Step]:
    import transformers
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    sizes = transformers.AutoConfig.for_model(**mc.build(preset, task="lm", config=config, device="meta").config.to_dict())
    sizes.use_cache = False
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(sizes, dtype=torch.float32)
    if recompute_of(kind, options) == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    aside = "offload" in kind
    home = CPUOffloadPolicy(options.device == "cuda") if aside else OffloadPolicy()
    how: dict[str, Any] = {"mp_policy": policy, "offload_policy": home}
    for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        if "eager" not in kind:
            block.compile()
        fully_shard(block, **how)
    fully_shard(model, **how)
    model.to_empty(device="cpu" if aside else options.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(options.device))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.02) if p.dim() > 1 else p.fill_(1.0)
        for name, buffer in model.named_buffers():  # of rotary, which to_empty has emptied
            if "inv_freq" in name:
                width = sizes.hidden_size // sizes.num_attention_heads
                buffer.copy_(sizes.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2, device=options.device) / width))
    return model, their_step(model, batch)


def retried(device: torch.device) -> int:
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) if device.type == "cuda" else 0


def waits(step: Step) -> tuple[float, float]:
    """Shares of a step's time in which the stream that computes most stands still: beside another stream, and beside none."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    streams: dict[int, list[tuple[int, int]]] = {}
    graph = False
    for e in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]  # it has been
        graph |= "GraphLaunch" in e.name()
        if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation():  # type: ignore[attr-defined]  # torch.autograd has it
            streams.setdefault(e.device_resource_id(), []).append((e.start_ns(), e.start_ns() + e.duration_ns()))
    most = max(streams.values(), key=lambda spans: covered(spans))
    every = [span for spans in streams.values() for span in spans]
    whole = max(end for _, end in every) - min(start for start, _ in every)
    return float("nan") if graph else (covered(every) - covered(most)) / whole, 1 - covered(every) / whole


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of the union of some spans."""
    total = last = 0
    for start, end in sorted(spans):
        total, last = total + max(0, end - max(start, last)), max(end, last)
    return total


def run(kind: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    config = dict(STILL if options.preset.startswith("gpt") else {}) | ({"layers": options.layers} if options.layers else {})
    case = Case(options.preset, "lm", "AutoModelForCausalLM", options.length, {}, config)
    plain = mc.build(options.preset, task="lm", config=config, device="meta")
    torch.manual_seed(dist.get_rank())
    kind, _, rows = kind.partition("@")
    rows = int(rows or options.batch)
    batch = batch_of("lm", rows, options.length, plain.config.vocab, str(device))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = retried(device)
    _, step = (ours if kind.startswith("ours") else theirs)(options.preset, config, batch, options, kind)
    losses = [step() for _ in range(WARM + 2)]  # behind what is recorded its first replay
    times = [seconds(step, device) for _ in range(options.steps)]
    taken = statistics.median(times)
    peak = (torch.cuda.max_memory_allocated() + mapped()) / 2**30 if device.type == "cuda" else 0.0
    retries = retried(device) - before
    exposed, idle = waits(step) if device.type == "cuda" else (0.0, 0.0)
    if options.profile:
        text = profile(step)
        if dist.get_rank() == 0:
            print(f"\n{kind}\n{text}", file=sys.stderr, flush=True)
    split = options.tensor_parallel if kind.startswith("ours") else 1  # ranks with one batch
    return {"contender": kind, "preset": options.preset, "length": options.length, "batch": rows, "seconds": times,
            "ranks": dist.get_world_size(), "tokens": batch["input_ids"].numel() / taken / split, "peak": peak, "loss": losses[0],
            "retries": retries, "exposed": exposed, "idle": idle, "flops": flops(plain, case, batch) / taken / split}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="gpt2-13b")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a rank")
    parser.add_argument("--contenders", default="ours,hf")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="of ours")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, help="fewer than the model has, for a trial")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cap", type=float, help="GiB of a GPU's memory that may be used")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device, began = torch.device(options.device), time.monotonic()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        if options.cap:
            torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / torch.cuda.get_device_properties(device).total_memory)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    first = dist.get_rank() == 0
    top = ceiling(device) if device.type == "cuda" else float("nan")
    for kind in options.contenders.split(","):
        late = torch.tensor(float(time.monotonic() - began > options.limit))
        dist.all_reduce(late)  # all go on, or none
        if late:
            print(f"{kind}: no time left", file=sys.stderr, flush=True)
            continue
        if first:
            print(f"{kind}: begun after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        try:
            row = run(kind, options, device) | {"ceiling": top, **stamp(device.type)}
        except torch.OutOfMemoryError as error:
            print(f"{kind}: {str(error)[:200]}", file=sys.stderr, flush=True)
            os._exit(1)  # the others wait for this rank in the middle of a step, for ever: the launcher ends them
        finally:
            gc.collect()
            torch._dynamo.reset()  # another batch is compiled anew, not for any batch
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if first and options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "engine.jsonl").open("a") as out:
                out.write(json.dumps(row) + "\n")
        if first:
            print(f"{row['contender']}, {row['batch']} x {row['length']}: {row['tokens']:.0f} tok/s a GPU, "
                  f"{row['flops'] / 1e12:.0f} TFLOP/s, {row['flops'] / top:.0%} of {top / 1e12:.0f}, peak {row['peak']:.1f} GiB "
                  f"({row['retries']} retries), steps {min(row['seconds']):.3f} to "
                  f"{max(row['seconds']):.3f} s, exposed {row['exposed']:.1%}, idle {row['idle']:.1%}, "
                  f"loss {row['loss']:.3f}", flush=True)  # fmt: skip
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
