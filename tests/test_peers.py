"""What takes the place of FSDP's collectives among the ranks of a node: gradients in bf16 are summed in fp32, weights fetched."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh import DEVICE, full, spawn
from torch import Tensor, nn

from modelcenter.parallel import peers
from modelcenter.parallel.apply import mesh_of, shard
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.peers import Gather, Mapped, Sum, ways

SIZE = 6  # of a rank's part


def whole(rank: int, turn: int, ranks: int) -> Tensor:
    """The gradients of a rank, in which bf16 has no bit left for the sum."""
    big = torch.arange(ranks * SIZE, device=DEVICE).float() + 2.0 ** (7 + turn)
    return (big if rank == 0 else torch.full_like(big, 2.0**-9 * rank)).bfloat16()


def check_sum(add: Sum, rank: int, ranks: int, op: Any = dist.ReduceOp.AVG) -> None:
    for turn in range(3):  # with nothing between them that would wait for the others
        given = add.allocate((ranks * SIZE,), dtype=torch.bfloat16, device=torch.device(DEVICE)).copy_(whole(rank, turn, ranks))
        summed = add.allocate((SIZE,), dtype=torch.bfloat16, device=torch.device(DEVICE))
        add(output_tensor=summed, input_tensor=given, group=dist.group.WORLD, op=op)
        wanted = sum(whole(r, turn, ranks).double() for r in range(ranks)) / (ranks if op == dist.ReduceOp.AVG else 1)
        assert summed.dtype == torch.float32 and torch.equal(summed.double(), wanted[rank * SIZE : (rank + 1) * SIZE])


def check_gather(gather: Gather, rank: int, ranks: int) -> None:
    for turn in range(3):
        out = gather.allocate((ranks * SIZE,), dtype=torch.bfloat16, device=torch.device(DEVICE)).fill_(torch.nan)
        part = out[rank * SIZE : (rank + 1) * SIZE].copy_(torch.arange(SIZE) + 10 * rank + 100 * turn)
        gather(output_tensor=out, input_tensor=part, group=dist.group.WORLD)
        wanted = torch.cat([torch.arange(SIZE) + 10 * r + 100 * turn for r in range(ranks)])
        assert torch.equal(out.cpu(), wanted.bfloat16()), f"turn {turn}, rank {rank}: {out}"


class Files(Mapped):
    """Memory of several processes without a GPU: a file each, which all of them map."""

    def __init__(self, folder: str) -> None:
        self.folder, self.group, self.used, self.size = Path(folder), dist.group.WORLD, self, 1024

    def record(self) -> None: ...

    def of(self, size: int) -> "Files":
        return self

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, at: int = 0) -> Tensor:
        there = torch.from_file(str(self.folder / str(rank)), shared=True, size=self.size, dtype=torch.uint8).view(dtype)
        return there[at : at + int(torch.Size(shape).numel())].view(shape)

    def barrier(self) -> None:
        dist.barrier()


def on_cpus(rank: int, folder: str) -> None:
    ranks = dist.get_world_size()
    found = ways(dist.group.WORLD, "cpu")
    assert found[0] is None and found[1].mapped is None
    check_sum(found[1], rank, ranks)
    check_sum(found[1], rank, ranks, dist.ReduceOp.SUM)
    check_sum(Sum(Files(folder)), rank, ranks)
    check_gather(Gather(Files(folder)), rank, ranks)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes
    assert ways(dist.group.WORLD, "cpu") == (None, None)


class Alone(Mapped):
    """What one rank may not map, and the others wait for."""

    def __init__(self, group: Any) -> None:
        self.store = dist.distributed_c10d._get_process_group_store(group)

    def of(self, size: int) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no")
        self.store.get("what rank 1 would have said")


def on_ranks_of_which_one_may_not(rank: int) -> None:
    usual = dist.distributed_c10d._get_process_group_store(dist.group.WORLD).timeout
    with pytest.MonkeyPatch.context() as m:
        m.setattr(peers, "Mapped", Alone)
        m.setattr(peers, "PATIENCE", 1)
        assert peers.mapped(dist.group.WORLD, "cpu", 4096) is None
    assert dist.distributed_c10d._get_process_group_store(dist.group.WORLD).timeout == usual


def test_one_that_may_not_map_keeps_nobody() -> None:
    if DEVICE != "cpu":
        pytest.skip("of processes")
    spawn(3, on_ranks_of_which_one_may_not)


def test_sums_lose_nothing_and_weights_arrive(tmp_path: Path) -> None:
    if DEVICE != "cpu":
        pytest.skip("on_gpus does it there")
    spawn(4, on_cpus, str(tmp_path))


class Times(nn.Module):
    """The gradient of its weights is what they are multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def halves(rank: int, machine: Machine) -> None:
    mesh = mesh_of(machine)
    assert mesh is not None
    model = Times().to(DEVICE)
    shard(model, mesh if machine.replicate > 1 else mesh["fsdp"], machine.zero, "fp16", lambda: None)
    numbers = torch.randint(1, 9, (machine.shares, SIZE), generator=torch.Generator().manual_seed(0))
    each = numbers.float() * 2.0**-24  # of fp16 the least
    for number in range(2):  # added to those before
        model(each[rank].half().to(DEVICE)).backward()
        wanted = (number + 1) * each.double().mean(0)
        assert model.weight.grad is not None and torch.equal(full(model.weight.grad).double(), wanted), f"{model.weight.grad}"


@pytest.mark.parametrize("machine", [Machine(device=DEVICE, fsdp=2), Machine(device=DEVICE, fsdp=2, replicate=2)],
                         ids=["shards", "copies of shards"])  # fmt: skip
def test_fp16_loses_nothing_before_it_is_summed(machine: Machine) -> None:
    """torch divides by the square root of the number of ranks first, where the least have no bit for it."""
    if DEVICE != "cpu" and machine.ranks > torch.accelerator.device_count():
        pytest.skip(f"{machine.ranks} GPUs")
    spawn(machine.ranks, halves, machine)


class Mixed(Times):
    """Beside what is trained are frozen weights, of which there are more, in fp16."""

    def __init__(self) -> None:
        super().__init__()
        trained = self.weight
        del self.weight
        self.frozen = nn.Parameter(torch.ones(SIZE, dtype=torch.float16), requires_grad=False)
        self.weight = trained

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.frozen[0].float()


def adapters(rank: int) -> None:
    machine = Machine(device=DEVICE, fsdp=2)
    mesh = mesh_of(machine)
    assert mesh is not None
    model = Mixed().to(DEVICE)
    shard(model, mesh["fsdp"], machine.zero, None, lambda: None)
    model(torch.full((SIZE,), 1.0 + 2 * rank, device=DEVICE)).backward()
    assert model.weight.grad is not None and torch.equal(full(model.weight.grad), torch.full((SIZE,), 2.0))


def test_adapters_in_fp32_of_a_model_in_fp16_are_averaged() -> None:
    if DEVICE != "cpu" and torch.accelerator.device_count() < 2:
        pytest.skip("2 GPUs")
    spawn(2, adapters)


def on_gpus(rank: int) -> None:
    ranks = dist.get_world_size()
    gather, add = ways(dist.group.WORLD, "cuda")
    assert gather is not None and add is not None and add.mapped is not None, "these GPUs do not reach each other"
    check_sum(add, rank, ranks)
    check_gather(gather, rank, ranks)
    check_sum(Sum(), rank, ranks)


def test_gpus_reach_each_other() -> None:
    if DEVICE != "cuda":
        pytest.skip("by test_nccl.py")
    spawn(torch.cuda.device_count(), on_gpus)


def test_what_is_not_known_is_not_summed() -> None:
    add = Sum()
    parts, part = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)
    group: Any = type("Two", (), {"size": lambda self: 2, "rank": lambda self: 0})()
    with pytest.raises(RuntimeError, match="in an order that is not known here"):
        add(output_tensor=part, input_tensor=parts, group=group, op=dist.ReduceOp.AVG)
    with pytest.raises(RuntimeError, match="summed or averaged"):
        add(output_tensor=part.float(), input_tensor=parts, group=group, op=dist.ReduceOp.MAX)


def test_where_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    for local, ranks, one in (("4", [0, 1, 2, 3], True), ("4", [2, 4], False), ("2", [4, 5], True), (None, [0, 7], True)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False) if local is None else monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert peers.on_one_node(ranks) is one


def test_sums_in_a_record_are_in_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two streams use is free again when a record ends, and no sooner: one of several micro-batches held all units' sums."""
    asked = []
    monkeypatch.setattr(torch, "empty", lambda size, **how: asked.append((size, how)))
    monkeypatch.setattr(torch.cuda, "stream", None)
    monkeypatch.setattr(peers, "recording", lambda: True)
    device = torch.device("cuda", 0)
    peers.lasting((3,), torch.float32, device, None)
    assert asked == [((3,), {"dtype": torch.float32, "device": device})]


@pytest.mark.gpu
def test_sums_and_activations_take_each_other_s_place() -> None:
    """On one GPU: what the update frees is had by the stream that computes, and not before the sums' stream has done with it."""
    device, size = torch.device("cuda", torch.cuda.current_device()), 2**26
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    side, home, before = torch.cuda.Stream(device), torch.cuda.current_stream(device), torch.cuda.memory_reserved()
    with torch.cuda.stream(side):
        grown = peers.lasting((size,), torch.float32, device, home).fill_(1.0)
        torch.cuda._sleep(2**28)  # type: ignore[no-untyped-call]  # torch has no types there
        grown.fill_(2.0)
        seen = grown.clone()  # of the side stream's own memory
    there = torch.cuda.memory_reserved()
    del grown
    early = torch.zeros(size, device=device)  # while the other stream writes
    torch.cuda.synchronize()
    assert not early.any() and (seen == 2.0).all()
    del early
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    again = torch.zeros(size, device=device)
    assert torch.cuda.memory_reserved() == held >= there > before and not again.any()
