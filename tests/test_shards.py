"""FSDP's micro-batches as records: what its ranks send each other is in them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh import DEVICE, spawn
from test_averaging import Silent, records, steps
from test_graphs import TINY, Played, batch_of
from torch import Tensor, nn

import modelcenter as mc
from modelcenter.parallel.blocks import units
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.peers import Gather, Mapped, Sum
from modelcenter.parallel.ranks import Ranks
from modelcenter.parallel.shards import KNOWN, STREAMS, anew, groups_of, within
from modelcenter.train import step as stepping
from modelcenter.train.graphs import GPU, Graphs, Record, key_of

SHARDS = Machine(device=DEVICE, threads=1, fsdp=2)
BOTH, HYBRID = replace(SHARDS, tensor_parallel=2), replace(SHARDS, replicate=2)


def enough(machine: Machine) -> None:
    if DEVICE != "cpu" and machine.ranks > torch.accelerator.device_count():
        pytest.skip(f"{machine.ranks} GPUs")


@pytest.mark.parametrize(("machine", "lengths", "parts", "name"), [
    pytest.param(SHARDS, (24,), 1, "adamw", id="one length"), pytest.param(SHARDS, (24,), 2, "adamw", id="micro-batches"),
    pytest.param(SHARDS, (24, 20, 16), 2, "adamw", id="three lengths, micro-batches"),
    pytest.param(replace(SHARDS, zero=2), (24, 20), 1, "adamw", id="zero 2"),
    pytest.param(replace(SHARDS, zero=1, recompute="full"), (24, 20), 1, "adamw", id="zero 1, recompute"),
    pytest.param(SHARDS, (24, 20), 1, "adafactor", id="adafactor"), pytest.param(SHARDS, (24, 20), 1, "muon", id="muon"),
    pytest.param(BOTH, (24,), 2, "adamw", id="tensors"), pytest.param(HYBRID, (24, 20), 2, "adamw", id="copies"),
])  # fmt: skip
def test_records_of_shards_train_as_one_process(machine: Machine, lengths: tuple[int, ...], parts: int, name: str) -> None:
    """One rank may replay what the other still calls."""
    enough(machine)
    spawn(machine.ranks, records, machine, lengths, parts, name)


def recorder(kind: type[Silent]) -> Callable[..., Any]:
    return kind if DEVICE == "cpu" else lambda *_: GPU(torch.device(DEVICE))


def bits(rank: int, machine: Machine, lengths: tuple[int, ...], parts: int, recorded: bool) -> None:
    """Weights are sent in bf16, gradients are dropped and summed as without a record."""
    stepping.number_on = lambda value, device: torch.full((), value, device=device)  # as on a device
    losses, weights, _ = steps(machine, lengths, parts, None, precision="bf16")
    again, found, graphs = steps(machine, lengths, parts, recorder(Silent), precision="bf16")
    assert losses == again and all(map(torch.equal, weights, found)) and not graphs.failures
    assert any(shapes.records for shapes in graphs.shapes.values()) == recorded
    graphs.end()  # NCCL would wait for them


@pytest.mark.parametrize(("machine", "parts", "recorded"), [
    pytest.param(SHARDS, 1, True, id="zero 3"), pytest.param(SHARDS, 2, True, id="zero 3, micro-batches"),
    pytest.param(replace(SHARDS, zero=2), 1, True, id="zero 2"),
    pytest.param(replace(SHARDS, zero=2), 2, False, id="zero 2, micro-batches"),
    pytest.param(replace(SHARDS, zero=1), 2, False, id="zero 1, micro-batches"),
    pytest.param(HYBRID, 4, False, id="copies, micro-batches"),
])  # fmt: skip
def test_the_bits_are_those_of_the_calls(machine: Machine, parts: int, recorded: bool) -> None:
    """What FSDP keeps from one micro-batch to the next is in no record."""
    enough(machine)
    spawn(machine.ranks, bits, replace(machine, deterministic=DEVICE != "cpu"), (24, 20), parts, recorded)


class Breaks(Silent):
    """The first record breaks off in a block, `backwards` or on the way there."""

    backwards = False

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        def fail(*args: Any) -> None:
            raise RuntimeError("no record")

        block, hooks = units(self.model)[0], []
        if not self.closed:
            def meet(block: Any, args: Any, out: Tensor) -> None:
                hooks.append(out.register_hook(fail))

            hooks.append(block.register_forward_hook(meet if self.backwards else fail))
        try:
            return super().__call__(work)
        finally:
            for hook in hooks:
                hook.remove()


def broken(rank: int, machine: Machine, backwards: bool) -> None:
    stepping.number_on = lambda value, device: torch.full((), value, device=device)  # as on a device
    kind = type("Breaks", (Breaks,), {"backwards": backwards})
    losses, weights, _ = steps(machine, (24,), 1, None, precision="bf16")
    again, found, graphs = steps(machine, (24,), 1, partial(kind), precision="bf16")
    assert graphs.failures == graphs.recorder.closed == 1 and graphs.recorder.played == 0  # its shapes are not tried again
    assert losses == again and all(map(torch.equal, weights, found))


@pytest.mark.skipif(DEVICE != "cpu", reason="what plays records is for CPUs")
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("zero", [2, 3])
def test_a_record_that_breaks_off_leaves_fsdp_as_it_was(zero: int, backwards: bool) -> None:
    """The run goes on by calls, with the same bits."""
    spawn(2, broken, replace(SHARDS, zero=zero), backwards)


def noted(rank: int) -> None:
    model = mc.build("gpt2", config=TINY, machine=SHARDS).train()
    batch, graphs = batch_of("lm", 2, 8, torch.Generator()), Graphs(model, Played(model), repeats=False)
    with torch.no_grad():
        model(**batch)
    sharded: Any = model
    root = sharded._get_fsdp_state()
    groups = [group for state in root._state_ctx.all_states for group in groups_of(state)]
    assert root._comm_ctx.post_forward_order and all(group._post_forward_indices for group in groups)
    graphs.known(key_of(model, {}, None)).records["first", False] = Record(lambda: None, torch.ones(()))
    assert graphs.run(lambda given, scale: pytest.fail("it is recorded"), {}, None) == 1
    assert not root._comm_ctx.post_forward_order and not any(group._post_forward_indices for group in groups)


@pytest.mark.skipif(DEVICE != "cpu", reason="what plays records is for CPUs")
def test_replays_leave_no_forward_noted_for_a_backward() -> None:
    """A run that generates texts and replays its steps would need more memory with each text."""
    spawn(2, noted)


class Stream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, other: "Stream") -> None:
        self.said.append(f"{self.name} waits for {other.name}")


def test_fsdps_streams_are_in_the_record() -> None:
    """They wait for the one that is recorded, and it for them: all that they do is between."""
    said = list[str]()
    here, others = Stream("here", said), {name: Stream(name, said) for name in STREAMS}
    device = SimpleNamespace(current_stream=lambda: here)
    model: Any = nn.Linear(1, 1)
    model._get_fsdp_state = lambda: SimpleNamespace(_comm_ctx=SimpleNamespace(device_handle=device, **others))
    assert within(model, lambda: len(said)) == 0 and not said
    KNOWN[model] = []
    assert within(model, lambda: len(said)) == len(STREAMS)
    assert said == [f"{name} waits for here" for name in STREAMS] + [f"here waits for {name}" for name in STREAMS]


def test_a_record_begins_with_memory_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it end with a sum that is asked for half."""
    monkeypatch.setattr(torch.cuda, "Event", object)
    two, cpu = [Mapped(None), Mapped(None)], torch.device("cpu")  # type: ignore[arg-type]  # groups that are not asked
    model, sums = nn.Linear(1, 1), Sum(two[1])
    KNOWN[model] = [Gather(two[0]), sums]
    used, first = [mapped.used for mapped in two], sums.allocate(4, dtype=torch.bfloat16, device=cpu)
    anew(model)
    assert all(mapped.used is not old for mapped, old in zip(two, used, strict=True)) and first.dtype == torch.bfloat16
    kinds = [sums.allocate(4, dtype=torch.bfloat16, device=cpu).dtype for _ in range(3)]
    assert kinds == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_micro_batch_ends_with_its_backward_where_it_may_be_recorded() -> None:
    """FSDP would otherwise leave it to the next one to wait for what was sent."""
    said = dict[str, bool]()
    model: Any = nn.Linear(1, 1)
    for name in ("is_last_backward", "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward"):
        setattr(model, f"set_{name}", partial(said.__setitem__, name))
    for last, alone in ((False, False), (False, True), (True, False)):
        Ranks().reduce(model, last, alone)
        assert said == {"is_last_backward": last or alone, "requires_gradient_sync": True, "requires_all_reduce": last,
                        "reshard_after_backward": True}  # fmt: skip
