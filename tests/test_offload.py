"""A model whose weights the host keeps: gradients added up aside, updates while the next forward begins, and what plans say of it.

That it trains as one on its device is asked in test_parallel.py, test_pairs.py and test_runs.py.
"""

import io
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh import DEVICE, full, spawn
from test_layout import built_by, costs_of, job_of
from test_plan import recipe_of
from torch import Tensor

import modelcenter as mc
from modelcenter import place
from modelcenter.adapter.config import AdapterConfig
from modelcenter.errors import InputError
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel import offload
from modelcenter.parallel.ahead import Ahead
from modelcenter.parallel.blocks import blocks
from modelcenter.parallel.device import home_of
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.offload import ALIGN, Aside, Room, aside_of
from modelcenter.parallel.ranks import ALONE, settle
from modelcenter.plan.chips import CHIPS
from modelcenter.plan.survey import remedies, survey
from modelcenter.train import fit, memory
from modelcenter.train.loop import train
from modelcenter.train.step import accumulate, autocast, update

STILL = {"dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0}
SIZES = {"layers": 3, "dim": 16, "heads": 2, "positions": 16, "vocab": 41, **STILL}

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def made(precision: str | None = None, **changes: Any) -> tuple[mc.Model, Aside]:
    machine = Machine(device=DEVICE, offload=True, **changes)
    model = mc.build("gpt2", config=SIZES, machine=machine, precision=precision, seed=3).train()
    aside = aside_of(model)
    assert aside is not None
    return model, aside


def rows(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(41, (count, 9), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": ids[k : k + 1].to(DEVICE), "labels": ids[k : k + 1].to(DEVICE)} for k in range(count)]


def adds(rank: int, zero: Any = 3) -> None:
    """Gradients of micro-batches are added up where no backward sees them, and are complete at the end."""
    model, aside = made(zero=zero)
    kept, ranks = list(model.parameters()), replace(ALONE, zero=zero)

    def without_gradients(_: mc.Model, args: Any) -> None:
        assert all(p.grad is None for p in kept), "FSDP would wait for each copy, and add it up by itself"

    alone = mc.build("gpt2", config=SIZES, seed=3, device=DEVICE).train()
    for count in (3, 1, 2):  # the second of one micro-batch adds to nothing
        for p in (*kept, *alone.parameters()):
            p.grad = None
        hook = model.register_forward_pre_hook(without_gradients)
        mine, _ = accumulate(model, rows(count), "lm", ranks=ranks)
        hook.remove()
        theirs, _ = accumulate(alone, rows(count), "lm")
        torch.testing.assert_close(mine, theirs)
        assert not aside.sums and aside.adding is None
        for name, p in alone.named_parameters():
            grad = model.get_parameter(name).grad
            assert grad is not None and grad.device.type == "cpu"
            torch.testing.assert_close(full(grad), full(p.grad), rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    before = {n: full(p.grad).clone() for n, p in model.named_parameters()}
    accumulate(model, rows(2), "lm", ranks=ranks)  # to what is there
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p.grad), 2 * before[name], rtol=1e-4, atol=1e-6)


def complete(rank: int) -> None:
    """FSDP waits for gradients on their way to the host after every backward, and not after the last of a step alone."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    model, aside = made()
    seen: list[str] = []
    finalize, take = FSDPParamGroup.finalize_backward, aside.take

    def finalized(group: FSDPParamGroup) -> None:
        seen.append("complete")
        finalize(group)

    FSDPParamGroup.finalize_backward = finalized  # type: ignore[method-assign]
    aside.take = lambda: (seen.append("taken"), take())[1]  # type: ignore[method-assign, func-returns-value]
    accumulate(model, rows(3), "lm")
    units = 1 + len(list(blocks(model)))
    assert seen == [*(["taken"] + ["complete"] * units) * 3, "taken"]


def broken_off(rank: int) -> None:
    """Of a step that breaks off nothing is in the next one."""
    model, _ = made()
    optimizer = build_optimizer(model, OptimizerConfig())
    accumulate(model, rows(2), "lm")
    wanted = {n: full(p.grad).clone() for n, p in model.named_parameters()}

    def stop(number: int, of: int, loss: Tensor) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accumulate(model, rows(3), "lm", told=stop)
    optimizer.zero_grad()
    accumulate(model, rows(2), "lm")
    for name, p in model.named_parameters():
        assert torch.equal(full(p.grad), wanted[name]), name


def as_files(rank: int) -> None:
    """Weights are saved by torch too, none with what lies beside it; a model without storage says so."""
    model, _ = made()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 4 * sum(p.nbytes for p in model.parameters())
    file.seek(0)
    for name, tensor in torch.load(file, weights_only=False).items():
        assert torch.equal(full(tensor), full(model.state_dict()[name])), name
    assert mc.parallelize(mc.build("gpt2", config=SIZES, device="meta"), Machine(device=DEVICE, offload=True)).device.type == "meta"


def in_order(rank: int) -> None:
    """The outermost layers first, then the blocks; the forward of each waits for its own."""
    model, aside = made()
    of = {"embed": model.embed.tokens.weight, **{str(k): block.attn.q.weight for k, block in enumerate(blocks(model))}}
    done: list[str] = []
    seen: list[str] = []
    gate, late = threading.Event(), threading.Event()

    def work(name: str) -> None:
        if name == "2":
            assert gate.wait(60)
        done.append(name)

    for k, block in enumerate(blocks(model)):
        block.register_forward_hook(lambda *_, k=k: seen.append(str(k)) or late.set() if k == 1 else seen.append(str(k)))
    aside.later([(of[name], partial(work, name)) for name in ("2", "0", "embed", "1")])
    passed = threading.Thread(target=partial(model, **rows(1)[0]))
    passed.start()
    assert late.wait(60) and seen == ["0", "1"] and done == ["embed", "0", "1"], (seen, done)
    passed.join(0.2)
    assert passed.is_alive() and seen == ["0", "1"], "the forward of a block has not waited for its update"
    gate.set()
    passed.join(60)
    assert seen == ["0", "1", "2"] and done[-1] == "2" and not aside.updates

    gate.clear()
    aside.later([(of["2"], partial(work, "2"))])
    threading.Timer(0.1, gate.set).start()
    settle(model)
    assert done[-2:] == ["2", "2"] and not aside.updates, "whoever reads weights must find them updated"

    def fails() -> None:
        raise ValueError("of the update")

    aside.later([(of["1"], fails)])
    with pytest.raises(ValueError, match="of the update"):
        model(**rows(1)[0])


def the_same_bits(rank: int) -> None:
    """An update that is finished late is the one that is waited for, whichever way numbers are rounded."""
    found = []
    for late in (False, True):
        model, _ = made(recompute="full")
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2, moments="bf16", weight_decay=0.1))
        for k in range(3):
            loss, _ = accumulate(model, rows(3)[k:], "lm")
            assert update(model, optimizer, loss, 1e-2, 0.1, late=late) > 0.1
        settle(model)
        states = {f"{n} {k}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
        found.append({n: full(t.detach()).clone() for n, t in (*model.named_parameters(), *states.items())})
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name
    loss = torch.tensor(float("nan"))  # nothing changes then, now or later
    accumulate(model, rows(1), "lm")
    assert update(model, optimizer, loss, 1e-2, 0.1, late=True) != 0
    settle(model)
    assert all(torch.equal(full(p.detach()), found[1][n]) for n, p in model.named_parameters())


def comes_ahead(rank: int) -> None:
    """The weights of a block are on their way while the one before is at work, rounded as those that are fetched when they are
    wanted; none of a block that is being updated."""
    begun, found, plain = list[tuple[str, int]](), [], offload.Ahead

    class Seen(Ahead):
        """`at` the block at work, or a backward."""

        at = "-"

        def begin(self, number: int, *args: Any) -> None:
            before = self.begun.get(number)
            super().begin(number, *args)
            if self.begun.get(number) is not before:
                begun.append((self.at, number))

    class Never(Ahead):
        def begin(self, number: int, group: Any, unshard: Any, async_op: bool = False) -> None:
            unshard(async_op)

    for kind in (Never, Seen):
        offload.Ahead = kind  # type: ignore[misc]  # in this process alone
        model, aside = made(recompute="full", precision="bf16")
        offload.Ahead = plain  # type: ignore[misc]
        compute, optimizer = partial(autocast, "bf16", torch.device(DEVICE)), build_optimizer(model, OptimizerConfig(lr=1e-2))
        for k, block in enumerate(blocks(model)):
            block.register_forward_hook(lambda *_, k=k: setattr(Seen, "at", str(k)))
        for _ in range(3):
            accumulate(model, rows(2), "lm", compute)
            update(model, optimizer, 0.0, 1e-2, 0.1, late=True)
        settle(model)
        found.append({n: full(p.detach()).clone() for n, p in model.named_parameters()})
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    assert aside.ahead is not None and not aside.ahead.begun
    begun.clear()
    accumulate(model, rows(1), "lm", compute)
    assert [number for _, number in begun] == [0, 1, 2, 3, 3, 2, 1] and [at for at, _ in begun[2:4]] == ["2", "0"], begun

    begun.clear()
    gate = threading.Event()
    aside.later([(list(blocks(model))[1].attn.q.weight, lambda: gate.wait(60))])
    threading.Timer(0.2, gate.set).start()
    with torch.no_grad():
        model(**rows(1)[0])
    assert [number for _, number in begun] == [0, 1, 3], "what is being updated is fetched when it is wanted"

    def stops(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = next(iter(blocks(model))).register_forward_hook(stops)
    with pytest.raises(KeyboardInterrupt):
        accumulate(model, rows(1), "lm", compute)
    hook.remove()
    assert not aside.ahead.begun, "weights may change before they are wanted"


def not_taken(rank: int) -> None:
    """What a forward that broke off has left on its way, or one that leaves blocks out, as T5's decoder alone, is in no later one:
    weights may have changed since."""
    ids = torch.arange(1, 9, device=DEVICE)[None]
    batch, machine = {"input_ids": ids, "labels": ids[:, :5]}, Machine(device=DEVICE, offload=True)

    def stops(*args: Any) -> None:
        raise KeyboardInterrupt

    def loss_of(way: str) -> Tensor:
        sizes = {"layers": 2, "dim": 16, "heads": 2, "vocab": 41, "dropout": 0.0}
        model = mc.build("t5-small", config=sizes, machine=machine, precision="bf16", seed=3).train()
        first, aside = next(iter(blocks(model))), aside_of(model)
        assert aside is not None and aside.ahead is not None
        if way == "broke off":
            hook = first.register_forward_hook(stops)
            with pytest.raises(KeyboardInterrupt):
                model(**batch)
            hook.remove()
        elif way == "left out":
            model.generate(ids, max_new_tokens=4)
        settle(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        with autocast("bf16", torch.device(DEVICE)):
            loss: Tensor = model(**batch).loss
        return loss.detach()

    wanted = loss_of("-")
    assert loss_of("broke off") == wanted and loss_of("left out") == wanted


def compiled(rank: int) -> None:
    """Hooks of what is compiled cannot wait: all is updated before the forward begins."""
    torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    model, aside = made(compile=True)
    done: list[int] = []

    def work(k: int) -> None:
        time.sleep(0.2)
        done.append(k)

    aside.later([(block.attn.q.weight, partial(work, k)) for k, block in enumerate(blocks(model))])
    model.register_forward_pre_hook(lambda *_: done.append(-1))
    with torch.no_grad():
        model(**rows(1)[0])
    assert done == [0, 1, 2, -1]


def on_the_host(rank: int) -> None:
    """Where weights, gradients and moments are; inputs go where the model computes."""
    model, _ = made()
    optimizer = build_optimizer(model, OptimizerConfig())
    loss, _ = accumulate(model, rows(1), "lm")
    update(model, optimizer, loss, 1e-2, 1.0)
    there = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    assert {t.device.type for t in there} == {"cpu"} and len(there) > 40
    assert home_of(model).type == model.device.type == DEVICE
    assert DEVICE != "cuda" or all(p.to_local().is_pinned() for p in model.parameters())  # type: ignore[attr-defined]  # DTensors


WORK = {"adds": adds, "adds, zero 2": partial(adds, zero=2), "adds, zero 1": partial(adds, zero=1),
        "complete": complete, "broken off": broken_off, "as files": as_files, "in order": in_order,
        "the same bits": the_same_bits, "compiled": compiled, "on the host": on_the_host, "comes ahead": comes_ahead,
        "not taken": not_taken}


def unneeded(rank: int, way: str) -> None:
    with pytest.warns(UserWarning, match="machine.offload: true, but on a CPU the host's memory holds everything already; leave"):
        if way == "build":
            mc.build("gpt2", config=SIZES, machine=Machine(device=DEVICE, offload=True))
        else:
            mc.parallelize(mc.build("gpt2", config=SIZES, device="meta"), Machine(device=DEVICE, offload=True))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU it does something")
@pytest.mark.parametrize("way", ["build", "parallelize"])
def test_on_a_cpu_it_does_nothing_and_says_so(way: str) -> None:
    """From Python as in a run, whose first lines have this one."""
    spawn(1, unneeded, way)


@pytest.mark.parametrize("name", WORK)
def test_what_the_host_does(name: str) -> None:
    spawn(1, WORK[name])


RUN = """\
import sys
from modelcenter.__main__ import main
sys.exit(main(["train", sys.argv[1], "--machine", sys.argv[2], "resume=auto", "machine.offload=true"]))
"""


def test_a_run_by_itself(tmp_path: Path) -> None:
    """One process, which no launcher has started, goes on bit for bit from a run without, and says what the host keeps."""
    recipe = replace(recipe_of(tmp_path), max_steps=4, save_steps=2, eval_steps=None, batch=8, micro_batch=4)
    ended = train(recipe, Machine(device="cpu", threads=1))
    wanted = (ended.output_dir / "model" / "model.safetensors").read_bytes()
    for gone in ("model", "step-4"):
        (ended.output_dir / gone).rename(tmp_path / gone)
    files = [str(ended.output_dir / name) for name in ("recipe.yaml", "machine.yaml")]
    run = subprocess.run([sys.executable, "-c", RUN, *files], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "resumed from" in run.stderr + run.stdout
    assert (ended.output_dir / "model" / "model.safetensors").read_bytes() == wanted


def test_threads_are_left_to_who_issues_the_devices_calls() -> None:
    """As OpenMP itself says in the thread; others have what the process was told."""
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    try:
        with offload.beside() as pool:
            assert "omp_get_max_threads() : 14\n" in pool.submit(torch.__config__.parallel_info).result()
        with ThreadPoolExecutor(1) as pool:
            assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == 16
    finally:
        torch.set_num_threads(before)


def test_rooms_hold_tensors_beside_each_other() -> None:
    sizes = [((3,), torch.float32), ((), torch.float32), ((5, 7), torch.bfloat16), ((0, 2), torch.float64), ((129,), torch.int8)]
    room = Room(sum(4 * 35 + ALIGN for _ in sizes), torch.device("cpu"))
    found = [room.empty(shape, dtype) for shape, dtype in sizes]
    assert [(tuple(t.shape), t.dtype) for t in found] == sizes
    for k, tensor in enumerate(found):
        tensor.fill_(k)
    assert all((t == k).all() for k, t in enumerate(found))
    starts = [t.data_ptr() - room.memory.ctypes.data for t in found if t.numel()]
    assert all(n % ALIGN == 0 for n in starts) and len(set(starts)) == len(starts)


def test_memory_that_cannot_be_registered_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells its error to whoever launches a kernel next, which is not the model."""
    launched: list[torch.device] = []

    def launch(size: Any, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 712, cudaHostUnregister=None))
    monkeypatch.setattr(torch, "ones", launch)
    room = Room(1000, torch.device("cuda"))
    assert room.empty((5,), torch.float32).fill_(3).sum() == 15 and launched == [torch.device("cuda")]


def test_weights_that_a_device_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mc.build("gpt2", config=SIZES, device="meta")
    monkeypatch.setattr(place, "memory_of", lambda device: (1000, 1000))
    with pytest.raises(InputError, match=r"1.0 kB, the memory of cuda: bf16, an adapter on nf4, machine.offload, or more ranks"):
        place.check_memory(model, torch.device("cuda"))
    with pytest.raises(InputError, match=r"the memory of cpu: bf16, an adapter on nf4, or more ranks \(fsdp\)"):
        place.check_memory(model, torch.device("cpu"))


def test_what_a_machine_allows() -> None:
    kept = Machine(offload=True)
    assert kept.meshed and kept.wrapped and not kept.graphs and kept.ranks == 1
    assert not Machine().meshed and not Machine().wrapped and Machine().graphs
    with pytest.raises(InputError, match=r"machine.zero: 2 with fsdp=1, which shards nothing; fsdp=2 or more, offload, or zero=3"):
        mc.build("gpt2", config=SIZES, machine=Machine(device="cpu", zero=2))


# ------------------------------------------------------------------------------------------------------------- plans

GPT = {"layers": 6, "dim": 192, "heads": 4, "vocab": 512, "positions": 256}


@pytest.fixture(scope="module")
def job() -> Iterator[Any]:
    yield job_of(mc.build("gpt2", config=GPT, device="meta"), 8)


def test_a_plan_of_what_the_host_keeps(job: Any) -> None:
    """12 bytes of a parameter and its gradient in a power of two, twice with the sums of several micro-batches; of the device no
    more than what is at work."""
    costs, plain = costs_of(job), Machine()
    count = sum(p.numel() for p in job.model.parameters())
    without, one, four = costs.exact(plain, 8), costs.exact(Machine(offload=True), 8), costs.exact(Machine(offload=True), 2)
    rounded = sum(2 ** math.ceil(math.log2(4 * p.numel())) for p in job.model.parameters())
    assert without.aside == 0 and rounded > 4.1 * count
    assert one.aside == pytest.approx(12 * count + rounded, rel=1e-3)
    assert four.aside == pytest.approx(12 * count + 2 * rounded, rel=1e-3)
    halves = costs.exact(Machine(offload=True, fsdp=2), 4)
    assert halves.aside == pytest.approx(one.aside / 2, rel=0.05)
    assert all(four.parts[kind] == one.parts[kind] == 0 for kind in ("weights", "optimizer", "gradients"))
    assert without.need - one.need > 11 * count
    copies = costs.exact(Machine(offload=True, replicate=2), 2)  # of two micro-batches, whose sums wait for those of the other copy
    assert copies.parts["gradients"] == pytest.approx(4 * count, rel=1e-3) and copies.aside == one.aside
    first = costs.exact(Machine(offload=True, zero=1), 2)  # whole sums on the device
    assert first.parts["gradients"] == pytest.approx(4 * count, rel=1e-3) and first.aside == one.aside
    assert one.spent["offload"] > 0 and "offload" not in without.spent
    fast = replace(CHIPS["h200"], call=1e-12, bring=1e18, host_bandwidth=1e18)
    slow = costs_of(job, replace(fast, bring=1e9)).exact(Machine(offload=True), 2)
    inside = sum(p.numel() for n, p in job.model.named_parameters() if "blocks" in n)
    come = 4 * (2 * 4 * inside + 4 * (count - inside))  # twice a micro-batch, the outermost once; gradients go meanwhile, once
    assert slow.spent["offload"] == pytest.approx(come / 1e9, rel=0.1)
    second = costs_of(job, replace(fast, bring=1e9)).exact(Machine(offload=True, zero=2), 2)
    assert second.spent["offload"] < 0.6 * slow.spent["offload"], "weights come once a step"
    host = replace(fast, host_bandwidth=1e9)
    updated = 28 + 4 + 4 / 0.55  # bytes a parameter: of fp32's update, of the weights that come, and of the norm, at its rate
    for moments, rows, bytes_moved in (("fp32", 8, updated), ("int8", 8, updated), ("fp32", 2, updated + 12)):
        build = built_by("adamw", moments)  # a sum of several micro-batches is read twice and written
        spent = costs_of(replace(job, how=replace(job.how, build=build)), host).exact(Machine(offload=True), rows).spent
        assert spent["offload"] == pytest.approx(bytes_moved * count / 1e9, rel=0.02)
    late = costs_of(replace(job, rows=3000), replace(host, call=1e-4))  # who issues calls waits for norm and update
    drawn, exact = late.estimate(Machine(offload=True), 1000), late.exact(Machine(offload=True), 1000)
    assert exact.seconds >= exact.host + exact.spent["offload"] and drawn.seconds == pytest.approx(exact.seconds, rel=0.02)


def test_a_plan_of_what_comes_and_goes(job: Any) -> None:
    """A block comes parameter by parameter, of several ranks to be laid end to end as well; FSDP waits at the end of each
    micro-batch for what leaves, and lets go of a block's sums when they are on their way."""
    costs, block = costs_of(job), next(iter(blocks(job.model)))
    longest, whole = max(p.nbytes for p in block.parameters()), sum(p.nbytes for p in block.parameters())
    alone, halves = costs.sharded(Machine(offload=True), 2), costs.sharded(Machine(offload=True, fsdp=2), 2)
    assert alone.coming == longest and halves.coming == longest + whole / 2
    assert alone.come() - replace(alone, aside=False).come() == longest
    assert alone.late == 0 < replace(alone, aside=False).late
    one = replace(alone, forwards=1)
    here, table = replace(one, aside=False).gathered("backward 0 between"), one.formed.outside
    assert one.gathered("backward 0 between") == here + longest + whole / 2  # none of the gradients is among those that grow here
    assert one.gathered("end") == table / 2 + 2 * table  # as summed, and as it leaves


def test_a_plan_of_what_stays_on_the_device(tmp_path: Path) -> None:
    """The codes of quantised weights, whole on each rank."""
    mc.build("gpt2", config=GPT).save_pretrained(tmp_path)
    model = mc.load(tmp_path, adapter=AdapterConfig(name="lora", quantize="nf4"), device=None).to("meta")
    codes, weights = (sum(t.nbytes for t in some) for some in (model.buffers(), model.parameters()))
    assert codes > 10**6
    costs = costs_of(job_of(model, 8))
    kept, shared = costs.exact(Machine(offload=True), 8), costs.exact(Machine(fsdp=2), 4)
    assert kept.parts["weights"] == codes and shared.parts["weights"] == codes + weights // 2
    trained = [p.nbytes for p in model.parameters() if p.requires_grad]
    assert kept.aside == pytest.approx(weights + sum(2 * n + 2 ** math.ceil(math.log2(n)) for n in trained), rel=1e-3)


def test_a_cpu_has_no_memory_beside_its_own(job: Any) -> None:
    costs = costs_of(replace(job, how=replace(job.how, gpu=False)))
    kept = costs.exact(Machine(offload=True), 8)
    assert kept.aside == 0 and kept.parts["optimizer"] > 0 and not costs.apart


@pytest.mark.usefixtures("tensors_alone")
def test_the_host_is_asked_where_nothing_else_fits(job: Any) -> None:
    """And not before; a host that has no room either does not help."""
    count = sum(p.numel() for p in job.model.parameters())
    found = survey(costs_of(job), 1, Machine())
    assert found.choice.fits and not found.choice.machine.offload and not any(e.machine.offload for e in found.estimates)
    least = min(costs_of(job).exact(Machine(offload=True, recompute="full"), 1).need * 1.2, 12 * count)
    small = survey(costs_of(job, limit=least), 1, Machine())
    assert small.choice.fits and small.choice.machine.offload and "machine.offload=true" in small.verdict()
    assert {e.machine.zero for e in small.estimates if e.machine.offload} == {1, 2, 3}
    assert "host" in small.table() and "in the host's memory, of 250 GB" in small.memory()
    assert "in the host's memory" not in found.memory()
    none = survey(costs_of(job, replace(CHIPS["h200"], host_memory=15 * count), least), 1, Machine())
    assert not none.choice.fits and "in the host's memory" in none.verdict()
    told = dict(remedies(costs_of(job), found.choice, {}))
    assert told["machine.offload=true"].need < found.choice.need


@pytest.mark.usefixtures("tensors_alone")
def test_what_is_said_of_it(job: Any) -> None:
    costs = costs_of(job, limit=25 * sum(p.numel() for p in job.model.parameters()))
    now = costs.exact(Machine(), 8)
    assert "machine.offload=true" in dict(fit.better(costs, now))
    kept = costs.exact(Machine(offload=True), 8)
    said = str(fit.Verdict(fit.Plan(kept.parts, 10**12, 10**12), "8 x 64", (), kept))
    assert f"and {kept.aside / 1e6:.1f} MB of the host's memory, 250 GB free" in said and "does not fit" not in said
    assert ": does not fit" in str(fit.Verdict(fit.Plan(kept.parts, 10**12, 10**12), "8", (), replace(kept, room=1e6)))
    assert fit.Verdict(fit.Plan(kept.parts, 1, 1), "8", (), kept).foreseen == pytest.approx(
        {**(fit.Verdict(fit.Plan(kept.parts, 1, 1), "8", (), kept).foreseen or {}), "offload": True})  # fmt: skip


def test_the_key_is_named_where_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, micro_batch=1)
    assert not any("offload" in way for way in memory.of_work(recipe, Machine(device="cpu", recompute="full"))[2])
    monkeypatch.setattr(memory, "device_of", lambda machine: torch.device("cuda"))
    key, value, ways = memory.of_work(recipe, Machine(recompute="full"))
    assert (key, value, ways[0]) == ("machine.offload", False, "machine.offload=true")
    assert "machine.offload=true" in memory.of_weights(recipe, Machine())[2]
    assert not any("offload" in way for way in memory.of_work(recipe, Machine(recompute="full", offload=True))[2])


def test_a_host_without_room_is_refused(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step; and where a device has none, the key is named that helps."""
    there = {"cuda": 10**12, "cpu": 10**12}
    for name, said in {"job_of": lambda *_: job, "chip_here": lambda device: CHIPS["h200"], "host_rate": lambda: 1e11,
                       "memory_of": lambda device: (there[device.type],) * 2}.items():  # fmt: skip
        monkeypatch.setattr(fit, name, said)
    monkeypatch.setenv("MODELCENTER_CALIBRATION", "0")
    ask: Any = partial(fit.verdict, recipe_of(tmp_path), device=torch.device("cuda"), setup=SimpleNamespace(model=job.model),
                       compute=None)  # fmt: skip
    found = ask(Machine(offload=True))
    assert found.estimate.fits and found.estimate.room == 10**12 and found.estimate.aside > 10**7
    taken = SimpleNamespace(model=mc.build("gpt2", config=GPT))  # weights that are there already, and in the plan
    assert ask(Machine(offload=True), setup=taken).estimate.room == 10**12 + sum(p.nbytes for p in taken.model.parameters())
    there["cuda"] = 10**6
    helps = "machine.offload=true, which keeps them in the host's memory, an adapter"
    with pytest.raises(InputError, match=rf"^memory: .* MB of weights, gradients and optimizer, 1.0 MB there; {helps}"):
        ask(Machine())
    there |= {"cuda": 10**12, "cpu": 10**7}
    with pytest.raises(InputError, match=r"^memory: .* MB of weights, gradients and optimizer, 10.0 MB in the host's; an adapter"):
        ask(Machine(offload=True))
