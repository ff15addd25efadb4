"""What a device can do: its memory, and how fast it computes, moves bytes and communicates.

Rates are those that a training step reaches, not those of a data sheet. The H200's were measured. For other GPUs, arithmetic is
taken as 0.8 and memory as 0.9 of the vendor's figure, the shares that the H200 reaches of its own. A file with the same keys
describes any other device: `device=FILE.yaml`. Torch-free except `probe`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import bind, read_recipe, says
from ..errors import nearest, refuse_missing

GB, TB, TERA = 10**9, 10**12, 10**12


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of a machine whose devices are all the same, in bytes, FLOP/s, bytes/s and seconds."""

    name: str = field(metadata=says("what it is", min=1))
    memory: float = field(metadata=says("bytes for tensors", above=0))
    fp32: float = field(metadata=says("FLOP/s of large matrix products in fp32, as torch forms them by default", above=0))
    bf16: float | None = field(default=None, metadata=says("the same in bf16; null: it has none", above=0))
    fp16: float | None = field(default=None, metadata=says("the same in fp16; null: it has none", above=0))
    attention: float = field(
        default=1.0, metadata=says("attention's share of the products' rate, what is no product left out", above=0, max=1)
    )
    shapes: float = field(default=0.9, metadata=says("the share of it that a layer's products reach; in fp32: all", above=0, max=1))
    bandwidth: float = field(metadata=says("bytes/s read and written", above=0))
    moves: float = field(default=0.87, metadata=says("the share of it that kernels reach", above=0, max=1))
    launch: float = field(default=3e-6, metadata=says("seconds that the smallest kernel takes", min=0))
    gap: float = field(default=1.4e-6, metadata=says("seconds between a kernel and the next", min=0))
    call: float = field(default=8.5e-6, metadata=says("seconds of the host for a call of torch's", min=0))
    host: str = field(default="as on an H200's host", metadata=says("whose seconds those are", min=1))
    apart: bool = field(default=True, metadata=says("the host runs ahead of the device"))
    link: float = field(metadata=says("bus bytes/s of a collective inside a node", above=0))
    node: int = field(default=8, metadata=says("devices of a node", min=1))
    wire: float = field(metadata=says("bytes/s of a device to other nodes", above=0))
    bring: float = field(default=24 * GB, metadata=says("bytes/s between the host's memory and a device, each way", above=0))
    host_memory: float = field(default=64 * GB, metadata=says("bytes of the host's memory for a device", above=0))
    host_bandwidth: float = field(default=40 * GB, metadata=says("bytes/s that an update there reads and writes", above=0))
    latency: float = field(default=33e-6, metadata=says("seconds of the smallest collective", min=0))
    hidden: float = field(default=0.3, metadata=says("share of a collective beside computing that costs no time", min=0, max=1))
    slower: float = field(default=1.0, metadata=says("times as long as these rates say a step's work takes on the device", above=0))
    source: str = field(default="", metadata=says("where the numbers are from"))

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in fp32, bf16 or fp16. A dtype for which the chip has no units counts as fp32."""
        return {"bf16": self.bf16, "fp16": self.fp16}.get(dtype) or self.fp32

    def bus(self, ranks: int, stride: int) -> float:
        """Bus bytes/s of a collective of `ranks` devices that are `stride` apart. Traffic leaves a node through as many wires as it
        has ranks in the collective."""
        inside = max(1, min(ranks, self.node // stride))
        return self.link if ranks <= inside else min(self.link, self.wire * inside)


UNEVEN = 4.0  # benchmarks/plans.md: of the hosts that were measured all but one alone choose 3.5 to 5 for the one left out


def together(device: float, host: float, apart: bool) -> float:
    """Seconds of a step that needs the given seconds of the device and of the host. If the host runs ahead (`apart`), the longer
    time hides the shorter, but not evenly: when both are about as long, each waits for the other now and then, for up to a fifth of
    a step. If the host does not run ahead, the times add up."""
    if not apart:
        return device + host
    most = max(device, host)
    return most * ((device / most) ** UNEVEN + (host / most) ** UNEVEN) ** (1 / UNEVEN) if most else 0.0


# A host of eight with 2 TB; one of 16 cores updated at 121 GB/s. The others' are a workstation's, assumed.
PCIE5: Mapping[str, Any] = {"bring": 50 * GB, "host_memory": 250 * GB, "host_bandwidth": 110 * GB}
NVLINK, INFINIBAND = "NCCL over NVLink at 0.75 of its one direction", "InfiniBand of {} Gb/s a GPU, assumed"
CHIPS: Mapping[str, Chip] = {
    "h200": Chip(
        name="NVIDIA H200", memory=139 * 2**30, bf16=770 * TERA, fp16=740 * TERA, fp32=50 * TERA, bandwidth=4.25 * TB,
        link=347 * GB, wire=50 * GB, **PCIE5,
        source="measured: 8192^3 products 750 to 800 TFLOP/s, 0.96 of it in fp16, 0.9 in models, copy 4.25 TB/s, 0.87 of it in "
               "kernels, all-gather on 8 GPUs 340 GB/s at 640 MiB and 290 at 64 MiB; of a 13B's collectives 0.7 "
               "showed in its step; products in fp32, of models' shapes too, 49.5 to 51.3 TFLOP/s; " + INFINIBAND.format(400),
    ),
    "h100": Chip(
        name="NVIDIA H100 80GB HBM3", memory=79 * 2**30, bf16=770 * TERA, fp16=740 * TERA, fp32=50 * TERA, bandwidth=3.0 * TB,
        link=347 * GB, wire=50 * GB, **PCIE5, source="arithmetic and link of the H200, the same chip; vendor: memory 3.35 TB/s; "
        + INFINIBAND.format(400),
    ),
    "a100-80": Chip(
        name="NVIDIA A100-SXM4-80GB", memory=79 * 2**30, bf16=250 * TERA, fp16=250 * TERA, fp32=15.6 * TERA, bandwidth=1.83 * TB,
        link=225 * GB, wire=25 * GB,
        source="vendor: 312 TFLOP/s, 19.5 in fp32, 2.04 TB/s; " + NVLINK + "; " + INFINIBAND.format(200),
    ),
    "a100-40": Chip(
        name="NVIDIA A100-SXM4-40GB", memory=39 * 2**30, bf16=250 * TERA, fp16=250 * TERA, fp32=15.6 * TERA, bandwidth=1.40 * TB,
        link=225 * GB, wire=25 * GB,
        source="vendor: 312 TFLOP/s, 19.5 in fp32, 1.56 TB/s; " + NVLINK + "; " + INFINIBAND.format(200),
    ),
    "v100": Chip(
        name="Tesla V100-SXM2-32GB", memory=31.5 * 2**30, fp16=100 * TERA, fp32=12.6 * TERA, bandwidth=0.81 * TB,
        bring=12 * GB, link=112 * GB, wire=12.5 * GB,
        source="vendor: 125 TFLOP/s, 15.7 in fp32, 0.9 TB/s; " + NVLINK + "; " + INFINIBAND.format(100),
    ),
    "4090": Chip(
        name="NVIDIA GeForce RTX 4090", memory=23.5 * 2**30, bf16=132 * TERA, fp16=132 * TERA, fp32=66 * TERA, bandwidth=0.91 * TB,
        link=12 * GB, wire=3 * GB, source="vendor: 165 TFLOP/s into fp32, 82.6 in fp32, 1.01 TB/s; PCIe 4 through the host and "
        "Ethernet of 25 Gb/s, assumed",
    ),
    "3090": Chip(
        name="NVIDIA GeForce RTX 3090", memory=23.5 * 2**30, bf16=57 * TERA, fp16=57 * TERA, fp32=28 * TERA, bandwidth=0.84 * TB,
        link=12 * GB, wire=3 * GB, source="vendor: 71 TFLOP/s into fp32, 35.6 in fp32, 0.94 TB/s; PCIe 4 through the host and "
        "Ethernet of 25 Gb/s, assumed",
    ),
    "2080ti": Chip(
        name="NVIDIA GeForce RTX 2080 Ti", memory=10.7 * 2**30, fp16=43 * TERA, fp32=10.7 * TERA, bandwidth=0.55 * TB,
        bring=12 * GB, link=6 * GB, wire=3 * GB,
        source="vendor: 54 TFLOP/s into fp32, 13.4 in fp32, 0.62 TB/s; PCIe 3 through the host and "
        "Ethernet of 25 Gb/s, assumed",
    ),
}  # fmt: skip


def chip_named(name: str) -> Chip:
    """The chip with that short name, or the one described by the file at that path."""
    if name in CHIPS:
        return CHIPS[name]
    if Path(name).suffix in (".yaml", ".yml"):
        said = read_recipe(Path(name))
        return bind(Chip, {**({"host": f"from {name}"} if "call" in said else {}), **said}, name)
    refuse_missing(None, f"device={name}", "no such device", f"{nearest(name, CHIPS)} (or a path ending in .yaml)")


def chip_here(device: Any) -> Chip | None:
    """The chip of a torch device. A CPU is probed. A GPU is recognised by its name; its memory is queried, and its host is timed.
    None if it is unknown."""
    if device.type == "cpu":
        return probe()
    if device.type != "cuda":
        return None
    from dataclasses import replace

    import torch

    card = torch.cuda.get_device_properties(device)
    whole = not any(word in card.name for word in LESS)
    known = [chip for chip in CHIPS.values() if whole and card.name.startswith(chip.name.removesuffix(" 80GB HBM3"))]
    near = min(known, key=lambda chip: abs(chip.memory - card.total_memory), default=None)
    if near is None:
        return None
    return replace(near, memory=float(card.total_memory), call=near.call * host_call() / HOST, host=TIMED)


LESS = ("Laptop", "Max-Q", "MIG")  # a GPU of the same name that has fewer units, or a part of one
TIMED = "timed on this host"
HOST = 1.9e-6  # seconds of `host_call` on a host whose calls in a step take the 8.5 µs of `Chip.call`: benchmarks/plans.md
LINKS, CALLS = 25, 10  # of a chain of small calls, and of torch in each of its links


def host_call() -> float:
    """Seconds that this thread takes for a small call of torch, forward and backward, timed for about a fiftieth of a second. It is
    timed on CPU tensors: a GPU's context would take half a gigabyte of its memory, and other work on the GPU should not count. The
    call must not be one that a library spreads over all cores: gelu of eight elements wakes 64 threads, and took a thousandth of a
    second."""
    import torch
    from torch.nn import functional as F

    x, scale = (torch.ones(8, requires_grad=True) for _ in range(2))

    def act() -> None:
        y = x
        for _ in range(LINKS):
            y = torch.tanh(F.layer_norm(y, (8,))) * scale + y
        torch.autograd.grad(y.sum(), (x, scale))

    act()
    found = []
    for _ in range(8):
        began = time.thread_time()
        act()
        found.append(time.thread_time() - began)
    return min(found) / (LINKS * CALLS)


def host_rate() -> float:
    """Bytes/s at which this process's threads read and write the host's memory."""
    import torch

    x, y, found = torch.ones(1 << 24), torch.ones(1 << 24), []
    for _ in range(4):
        began = time.perf_counter()
        y.copy_(x)
        found.append(time.perf_counter() - began)
    return 2 * x.nbytes / min(found)


def probe() -> Chip:
    """This CPU, timed for about a tenth of a second with torch's current number of threads: the best of a few tries."""
    import torch

    from ..parallel.device import memory_of

    def best(act: Any, times: int) -> float:
        act()
        found = []
        for _ in range(times):
            began = time.perf_counter()
            act()
            found.append(time.perf_counter() - began)
        return min(found)

    def products(dtype: torch.dtype) -> float:
        a, b = (torch.randn(512, 512).to(dtype) for _ in range(2))
        return 2 * 512**3 / best(lambda: a @ b, 5)

    with torch.no_grad():
        x, y = torch.ones(1 << 23), torch.ones(1 << 23)
        bandwidth = 2 * x.nbytes / best(lambda: y.copy_(x), 3)
        fp32, bf16 = products(torch.float32), products(torch.bfloat16)
    small = torch.ones(8, requires_grad=True)
    call = best(lambda: [small * 2.0 for _ in range(200)], 3) / 200
    memory = memory_of(torch.device("cpu"))
    assert memory is not None
    return Chip(name="CPU", memory=memory[1], fp32=fp32, bf16=max(bf16, fp32), bandwidth=bandwidth, launch=0.0, gap=0.0, call=call,
                host=TIMED, apart=False, moves=1.0, link=bandwidth / 4, wire=bandwidth / 4, node=1024, latency=200e-6, hidden=0.0,
                source="timed here")  # fmt: skip
