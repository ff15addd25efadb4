"""All-gather and reduce-scatter for the FSDP ranks of a node, without kernels that compete with matrix products.

NCCL's collectives run on multiprocessors that concurrent matrix products could use. Copies need none. If every rank can map the
others' memory (torch's symmetric memory), the GPU's copy engines fetch the parts of weights, and bring gradients to the rank that
sums them. Gradients are sent as they were computed, in 16 bits, and the rank that holds their part sums them in fp32, in the order
of the ranks. That is half the bytes of a reduce-scatter in fp32, and nothing is rounded before the sum. CPUs, and GPUs that cannot
reach each other, do the same with one all-to-all.

FSDP calls Gather and Sum in place of its own collectives (`set_custom_all_gather`, `set_custom_reduce_scatter`).
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops._graph import recording
from .variable import variable

PATIENCE = 60  # seconds in which ranks that map each other's memory for the first time hear of each other


class Mapped:
    """A buffer on each rank of a group that every rank can reach, used for one thing after another. It grows on all ranks at once,
    when more is asked for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, 0
        self.buffer: Tensor | None = None
        self.anew()

    def anew(self) -> None:
        """Wait for no earlier use: whoever comes next is behind it anyway."""
        self.used = torch.cuda.Event()

    def of(self, size: int) -> Any:
        """What reaches `size` bytes on each rank, from the stream that is current."""
        if size > self.size:
            from torch.distributed import _symmetric_memory as symmetric

            torch.cuda.synchronize()
            buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
            self.handle = symmetric.rendezvous(buffer, self.group)  # all have come: nobody reads the old one
            self.buffer, self.size = buffer, size
        torch.cuda.current_stream().wait_event(self.used)  # FSDP has more than one stream for the same
        return self.handle


class Gather:
    """FSDP's all-gather: each rank lays out its part, and fetches those of the others."""

    def __init__(self, mapped: Mapped) -> None:
        self.mapped = mapped

    def anew(self) -> None:
        self.mapped.anew()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> None:
        part, me, parts = input_tensor, group.rank(), output_tensor.chunk(group.size())
        memory = self.mapped.of(part.nbytes)
        memory.get_buffer(me, part.shape, part.dtype).copy_(part)
        memory.barrier()
        for k in range(len(parts)):
            peer = (me + k) % len(parts)  # so that no two fetch from one
            if parts[peer].data_ptr() != part.data_ptr():
                parts[peer].copy_(memory.get_buffer(peer, part.shape, part.dtype))
        memory.barrier()
        self.mapped.used.record()


class Own:
    """Both, of a rank whose part is the whole: FSDP lays out its part where the whole is wanted, and nothing is left to send."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any = None,
                 async_op: bool = False) -> None:
        if output_tensor.data_ptr() != input_tensor.data_ptr():
            output_tensor.copy_(input_tensor)


class Sum:
    """FSDP's reduce-scatter, of gradients in low precision into fp32."""

    def __init__(self, mapped: Mapped | None = None) -> None:
        self.mapped = mapped
        self.home: Any = None  # the stream that computes, if it has asked
        self.over = 1  # by what sums are divided, which FSDP then does not do

    def anew(self) -> None:
        self.home = None
        if self.mapped is not None:
            self.mapped.anew()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """First of all gradients, then of the sums that this rank holds."""
        home, self.home = self.home, torch.get_device_module(device).current_stream(device) if self.home is None else None
        return torch.empty(size, dtype=dtype, device=device) if home is None else lasting(size, torch.float32, device, home)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any,
                 async_op: bool = False) -> None:
        ranks = group.size()
        if output_tensor.dtype != torch.float32 or output_tensor.numel() * ranks != input_tensor.numel():
            raise RuntimeError("this release of torch asks FSDP's reduce-scatter for memory in an order that is not known here")
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(f"gradients are summed or averaged over ranks, and {op} was asked for")
        come = self.copied(input_tensor, group) if self.mapped is not None else exchanged(input_tensor, group)
        form = torch.mean if op == dist.ReduceOp.AVG else torch.sum
        form(come.view(ranks, -1), 0, dtype=torch.float32, out=output_tensor)
        if self.over > 1:
            output_tensor.div_(self.over)
        if self.mapped is not None:
            self.mapped.used.record()

    def copied(self, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The parts (one for each rank) are brought there; those that have come, by rank."""
        assert self.mapped is not None
        memory, me, size = self.mapped.of(parts.nbytes), group.rank(), parts.numel() // group.size()
        memory.barrier()  # the sums of what came before are formed
        for k in range(group.size()):
            peer = (me + k) % group.size()
            memory.get_buffer(peer, (size,), parts.dtype, me * size).copy_(parts[peer * size : (peer + 1) * size])
        memory.barrier()
        come: Tensor = memory.get_buffer(me, parts.shape, parts.dtype)
        return come


def lasting(size: Any, dtype: torch.dtype, device: torch.device, home: Any) -> Tensor:
    """Memory for what one stream writes and the update frees, taken from `home`, the stream that computes. torch's allocator keeps
    memory that was freed on one stream from all others, and FSDP asks for sums on a stream of its own. Gradients and activations
    could then never take each other's place, and when memory is full it would go back to the driver and be asked for again, twice a
    step. The stream that writes waits for all earlier work of the other; the next user of this memory waits for it; nobody reads
    a sum earlier. A record has memory of its own, of which nothing that two streams use is free again before it ends."""
    if device.type != "cuda" or recording():
        return torch.empty(size, dtype=dtype, device=device)
    here = torch.cuda.current_stream(device)
    here.wait_stream(home)  # who had this memory before has done with it
    with torch.cuda.stream(home):
        out = torch.empty(size, dtype=dtype, device=device)
    out.record_stream(here)
    return out


def exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    come = torch.empty_like(parts)
    dist.all_to_all_single(come.view(torch.uint8), parts.view(torch.uint8), group=group)  # gloo lacks bf16
    return come


def ways(group: dist.ProcessGroup, kind: str) -> tuple[Gather | Own | None, Sum | Own | None]:
    """What replaces FSDP's collectives among the ranks of `group`, whose devices are of `kind`; None: nothing does. A collective.
    Across machines there is no all-to-all, because each gradient would travel as often as there are ranks elsewhere."""
    if not agreed(on_one_node(group), group, kind):
        return None, None
    if reach(group, kind, 4096) is None:
        return None, Sum()
    return Gather(Mapped(group)), Sum(Mapped(group))


def reach(group: dist.ProcessGroup, kind: str, size: int) -> Mapped | None:
    """`size` bytes of each rank of a node, all of which the others can reach; None if they cannot. A collective."""
    return mapped(group, kind, size) if kind == "cuda" and agreed(near(group), group, kind) else None


def agreed(able: bool, group: dist.ProcessGroup, kind: str) -> bool:
    """Whether all ranks can."""
    least = torch.tensor(float(able), device=kind)
    dist.all_reduce(least, dist.ReduceOp.MIN, group)
    return bool(least)


def places(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """The node of each rank and its number there, by the launcher's LOCAL_WORLD_SIZE; a single node without it."""
    local = variable("LOCAL_WORLD_SIZE", 1, dist.get_world_size(), default=dist.get_world_size())
    return [divmod(rank, local) for rank in dist.get_process_group_ranks(group)]


def on_one_node(group: dist.ProcessGroup) -> bool:
    return len({node for node, _ in places(group)}) == 1


def near(group: dist.ProcessGroup) -> bool:
    """Whether all GPUs of the group are visible here and can reach each other."""
    devices = [device for _, device in places(group)]
    seen = torch.cuda.device_count() > max(devices) and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    return seen and all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b)


def mapped(group: dist.ProcessGroup, kind: str, size: int) -> Mapped | None:
    """Mapped buffers, if mapping works, which is tried: a container can forbid it, and perhaps only one rank is told so. The others
    then wait for it in the group's store, for `PATIENCE` seconds and not for the store's own half an hour."""
    store = dist.distributed_c10d._get_process_group_store(group)
    usual = store.timeout  # type: ignore[attr-defined]  # it is there, and not in torch's types
    store.set_timeout(timedelta(seconds=PATIENCE))
    found, able = Mapped(group), True
    try:
        found.of(size)
    except (RuntimeError, ImportError):
        able = False
    store.set_timeout(usual)
    return found if agreed(able, group, kind) else None
