"""What the host does for a step: seconds of a call of torch's as a rehearsal counts them, and how many of these FSDP and tensor
parallelism cost besides, of a block and of a parameter.

    python benchmarks/host.py                                          # one process; collectives do nothing
    torchrun --nproc-per-node 2 benchmarks/host.py --device cuda       # with NCCL's calls

Steps of models so narrow that a device waits for the host all the time; each number is the slope from few blocks to many, the least
of some rounds. On a CPU it is this thread's time on a processor, tensors of a few elements in it, without those of gloo's own.
`plan/host.py` has what came of it.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import modelcenter as mc
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join, parallelize
from modelcenter.parallel.blocks import blocks
from modelcenter.parallel.machine import Machine
from modelcenter.plan.rehearse import Conditions, rehearse
from modelcenter.plan.twin import tables
from modelcenter.train.step import accumulate, autocast, update

FEW, MANY = 4, 12  # blocks
NARROW = {"dim": 64, "heads": 2, "vocab": 64}
MODELS = {"gpt2": {**NARROW, "hidden": 64}, "llama-3.2-1b": {**NARROW, "kv_heads": 2, "hidden": 64},
          "bert-base-uncased": {**NARROW, "hidden": 64}, "t5-small": {**NARROW, "hidden": 64, "head_dim": 32}}  # fmt: skip
TENSOR = {"tensor_parallel": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "zero 3": {"fsdp": 2}, "zero 2": {"fsdp": 2, "zero": 2}, "zero 1": {"fsdp": 2, "zero": 1},
    "copies": {"replicate": 2}, "tensor": TENSOR, "sequence": {**TENSOR, "sequence_parallel": True},
    "selective": {"recompute": "selective"}, "full": {"recompute": "full"}, "tensor full": {**TENSOR, "recompute": "full"},
}  # fmt: skip


def step_of(name: str, layers: int, machine: Machine, precision: str, device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of the host for a micro-batch and for an update, the least of some rounds; counts of what there is."""
    config = {**MODELS[name], "layers": layers, **({"decoder_layers": layers} if name.startswith("t5") else {})}
    task = {"bert": "mlm", "t5": "seq2seq"}.get(name.partition("-")[0], "lm")
    model = mc.build(name, task=task, config=config, device="meta")
    ids = torch.randint(5, 60, (2, 8))
    batch = {"input_ids": ids, "labels": ids.clone()}
    compute = partial(autocast, precision, device)

    def build(model: Any) -> tuple[Any, None]:
        return build_optimizer(model, OptimizerConfig()), None

    tp = machine.tensor_parallel
    cpu = torch.device("cpu")
    how = Conditions(build, partial(autocast, precision, cpu), cpu, gpu=device.type == "cuda")
    counted = rehearse(model, batch, how, ranks=tp, recompute=machine.recompute)
    count = {"blocks": len(blocks(model)), "parameters": sum(1 for _ in model.parameters()), "calls": counted.calls,
             "update calls": counted.update_calls, "styled": sum(1 for _ in tables(model))}
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    ranks = join(machine)
    model = parallelize(model, machine, precision).train()
    optimizer: Any = build_optimizer(model, OptimizerConfig())
    here = {key: value.to(device) for key, value in batch.items()}

    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    found: dict[str, list[float]] = {"micro-batch": [], "update": [], "another": []}
    for number in range(2 * (rounds + 2)):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = clock()
        batches = [here] * (1 + number % 2)
        loss, _ = accumulate(model, batches, task, compute, targets=16 * len(batches), ranks=ranks)
        middle = clock()
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-5, 1.0, 1.0, squares)
        found["update"].append(clock() - middle)
        found["another" if number % 2 else "micro-batch"].append(middle - began)
    least = {what: min(times[2:]) for what, times in found.items()}
    return {**count, **least, "another": least["another"] - least["micro-batch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    first = os.environ.get("RANK", "0") == "0"
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    say: Callable[[str], None] = partial(print, flush=True) if first else lambda text: None
    say("| model | | a call, µs | block: micro-batch, calls | not counted | of a micro-batch before | parameters of a block "
        "| layers that are cut | update: calls a parameter |")
    say("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.models.split(","):
        call = 0.0
        for way in options.ways.split(","):
            machine = Machine(device=device.type, **WAYS[way])
            few, many = (step_of(name, n, machine, options.precision, device, options.rounds) for n in (FEW, MANY))
            slope = {key: (many[key] - few[key]) / (many["blocks"] - few["blocks"]) for key in few}
            if way == "plain":
                call = slope["micro-batch"] / slope["calls"]
            each = slope["micro-batch"] / call
            more, another = each - slope["calls"], slope["another"] / call - slope["calls"]
            rest = slope["update"] / call / slope["parameters"]
            say(f"| {name} | {way} | {1e6 * call:.2f} | {each:.0f} | {more:+.0f} | {another:+.0f} | {slope['parameters']:.0f} | "
                f"{slope['styled']:.0f} | {rest:.2f} |")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
