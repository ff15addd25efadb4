"""A micro-batch that is recorded once and done again: the bits are those of the calls themselves, whatever comes between.

On a CPU `Played` stands for CUDA's graphs: it makes the recorded calls again and leaves their results where the first ones were.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train import bytes_of, recipe_of, rows
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.data.collate import pack
from modelcenter.layers.onto import kept, onto
from modelcenter.layers.view import Ends
from modelcenter.ops import _graph
from modelcenter.ops._kernels import available
from modelcenter.ops.cross_entropy import IGNORE
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.blocks import recompute
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.ranks import Ranks
from modelcenter.train import graphs as module
from modelcenter.train import step as stepping
from modelcenter.train.graphs import GPU, WARM, Graphs, graphs_of
from modelcenter.train.loop import train
from modelcenter.train.read import load_recipe
from modelcenter.train.step import accumulate, autocast, update

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TINY = {"layers": 2, "dim": 32, "heads": 2, "vocab": 64}
Batch = dict[str, Any]


class Played:
    """Nothing is done while it is recorded; memory then holds no numbers, and gradients are in no parameter's hands. `updates` are
    those that were played of `optimizer`."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model, self.memory, self.little, self.made, self.played, self.closed = model, True, False, 0, 0, 0
        self.optimizer, self.updates, self.asked, self.waited = optimizer, 0, list[float](), 0

    def room(self) -> bool:
        return self.memory

    def tight(self) -> bool:
        return self.little

    def lacks(self, times: float) -> bool:
        self.asked.append(times)
        return self.little

    def drawn(self) -> Tensor:
        return torch.get_rng_state()

    def wait(self) -> None:
        self.waited += 1

    def rewind(self, drawn: Tensor) -> None:
        torch.set_rng_state(drawn)

    def close(self) -> None:
        self.closed += 1

    def update(self, work: Callable[[], None]) -> tuple[Callable[[], object], None]:
        self.made += 1
        kept = [*self.model.parameters(), *(g for p in self.model.parameters() if (g := p.grad) is not None)]
        kept += [value for state in self.optimizer.state.values() for value in state.values()]
        values = [value.detach().clone() for value in kept]
        with blind():
            work()
        with torch.no_grad():
            for value, old in zip(kept, values, strict=True):
                value.copy_(old)

        def play() -> None:
            self.updates += 1
            with blind():
                work()

        return play, None

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        if not torch.is_grad_enabled():
            return self.update(work)
        before = {p: p.grad for p in self.model.parameters()}
        values, drawn = {p: g.clone() for p, g in before.items() if g is not None}, torch.get_rng_state()
        try:
            with blind():
                loss = work()
        finally:
            torch.set_rng_state(drawn)
        self.made += 1
        after = {p: p.grad for p in before if p.grad is not None}
        for p, g in after.items():
            g.copy_(values[p]) if p in values else g.fill_(torch.nan)
        loss.fill_(torch.nan)

        def play() -> None:
            self.played += 1
            for p, g in before.items():
                p.grad = g
            with blind():
                loss.copy_(work())
            for p, g in after.items():
                assert p.grad is not None
                g.copy_(p.grad)
                p.grad = None

        return play, loss


@contextmanager
def blind() -> Iterator[None]:
    """What is recorded on a GPU cannot ask where packed sequences end."""

    def ask(self: Any) -> Any:
        raise RuntimeError("asked for numbers of the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_graph, "recording", lambda: True)
        patch.setattr(Ends, "here", property(ask))
        patch.setattr(Tensor, "tolist", ask)
        patch.setattr(torch, "get_rng_state", ask)
        yield


def recorder_of(model: nn.Module, device: torch.device, optimizer: Any = None) -> Any:
    return Played(model, optimizer) if device.type == "cpu" else GPU(device)


@pytest.fixture(autouse=True)
def numbers_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too the device computes with numbers that it reads."""
    monkeypatch.setattr(stepping, "number_on", lambda value, device: torch.full((), value, device=device))


def gpt(folder: Path) -> Any:
    return mc.build("gpt2", config=TINY | {"positions": 64})


def t5(folder: Path) -> Any:
    return mc.build("t5-small", config=TINY | {"decoder_layers": 2, "head_dim": 16, "hidden": 64})


def bert(task: str, folder: Path) -> Any:
    return mc.build("bert-base-uncased", task=task, config=TINY | {"hidden": 64, "positions": 64})


def lora(folder: Path) -> Any:
    config = TINY | {"kv_heads": 1, "hidden": 64, "head_dim": 16}
    mc.build("llama-3.2-1b", config=config).save_pretrained(folder)
    model = mc.load(folder, adapter=AdapterConfig(name="lora", rank=2, dropout=0.1, targets=("all-linear",)))
    torch.manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.05)
    return model


def packed_of(task: str, generator: torch.Generator) -> Batch:
    """Three to six sequences side by side, of other lengths each time."""
    many = int(torch.randint(3, 7, (), generator=generator))
    lengths = torch.randint(2, 11, (2, many), generator=generator)
    ids, others = ([torch.randint(5, TINY["vocab"], (n,), generator=generator).numpy() for n in row] for row in lengths.tolist())
    labels = others if task == "seq2seq" else [np.where(np.arange(len(row)) % 4 == 1, row, IGNORE) for row in ids]
    found = pack(ids, labels)
    return found | {"labels": torch.randint(2, (many,), generator=generator)} if task == "classify" else found


def batch_of(task: str, rows: int, length: int, generator: torch.Generator) -> Batch:
    """Random; how many of the labels count differs from batch to batch."""
    ids = torch.randint(5, TINY["vocab"], (rows, length), generator=generator)
    ends = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < ends
    if task == "classify":
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.randint(2, (rows,), generator=generator)}
    labels = torch.randint(5, TINY["vocab"], ids.shape, generator=generator) if task == "seq2seq" else ids
    if task == "mlm":
        mask = torch.rand(ids.shape, generator=generator) < 0.2
    return {"input_ids": ids, "labels": labels.masked_fill(~mask, IGNORE)}


PACKED = {"packed": True, "precision": "bf16"}  # a GPU has kernels for them in low precision alone
SELECTIVE, FULL = ({"recompute": how, "precision": "bf16"} for how in ("selective", "full"))
OVERFLOWS = {"precision": "bf16", "scales": (1024.0,) * 9 + (3e38,) + (512.0,) * 10}
CASES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "gpt": (gpt, "lm", {}), "gpt in thirds": (gpt, "lm", {"parts": 3}), "gpt of three lengths": (gpt, "lm", {"short": (0, 8, 16)}),
    "gpt in thirds of two lengths": (gpt, "lm", {"parts": 3, "short": (0, 8)}), "gpt bf16": (gpt, "lm", {"precision": "bf16"}),
    "gpt overflows": (gpt, "lm", OVERFLOWS),
    "t5": (t5, "seq2seq", {"parts": 2}), "bert": (partial(bert, "classify"), "classify", {}),
    "bert of words": (partial(bert, "mlm"), "mlm", {}), "lora": (lora, "lm", {"precision": "bf16"}),
    "gpt packed": (gpt, "lm", PACKED), "gpt packed in thirds": (gpt, "lm", {"parts": 3} | PACKED),
    "t5 packed": (t5, "seq2seq", PACKED),
    "bert packed": (partial(bert, "classify"), "classify", PACKED), "bert of words packed": (partial(bert, "mlm"), "mlm", PACKED),
    "gpt selective": (gpt, "lm", SELECTIVE), "t5 selective": (t5, "seq2seq", SELECTIVE),
    "gpt packed selective": (gpt, "lm", PACKED | SELECTIVE), "gpt full": (gpt, "lm", FULL), "t5 full": (t5, "seq2seq", FULL),
    "gpt in thirds full": (gpt, "lm", FULL | {"parts": 3}), "gpt full fp32": (gpt, "lm", FULL | {"precision": "fp32"}),
    "gpt packed full": (gpt, "lm", PACKED | FULL), "lora full": (lora, "lm", FULL),
    **{f"t5 {name}": (t5, "seq2seq", {"optimizer": name, "parts": 2}) for name in ("adafactor", "lion", "muon")},
    "gpt adafactor of two lengths": (gpt, "lm", {"optimizer": "adafactor", "short": (0, 8)}),
    "gpt muon overflows": (gpt, "lm", OVERFLOWS | {"optimizer": "muon"}),
    "lora packed": (lora, "lm", PACKED), "bert of all lengths": (partial(bert, "classify"), "classify", {"short": range(8)}),
}  # fmt: skip


class Run:
    """Steps of a model: what they gave, and where it stands."""

    def __init__(self, folder: Path, case: str, graphed: bool, device: torch.device, still: bool = False) -> None:
        make, self.task, options = CASES[case]
        self.parts, self.short = options.get("parts", 1), options.get("short", (0,))
        self.scales, self.device = options.get("scales", (1.0,)), device
        torch.manual_seed(0)
        self.model = make(folder).to(device).train()
        recompute(self.model, options.get("recompute", "none"))
        self.optimizer = build_optimizer(self.model, OptimizerConfig(name=options.get("optimizer", "adamw")))
        self.said: list[str] = []
        self.recorder = recorder_of(self.model, device, self.optimizer)
        self.graphs = Graphs(self.model, self.recorder, self.said.append)
        self.packed = options.get("packed", False)
        if not graphed:
            self.graphs.end()
        self.compute, self.still = partial(autocast, options.get("precision", "fp32"), device), still
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        some = [packed_of(self.task, generator) if self.packed else
                batch_of(self.task, 3, 24 - self.short[(number + k) % len(self.short)], generator) for k in range(self.parts)]
        scale = self.scales[number % len(self.scales)]
        loss, _ = accumulate(self.model, some, self.task, self.compute, scale, graphs=self.graphs)
        rate = 0.0 if self.still else 1e-2 / (1 + number)
        norm = update(self.model, self.optimizer, loss, rate, 1.0, scale, graphs=self.graphs)
        self.losses += [float(loss), norm]

    def through(self, *numbers: int) -> "Run":
        for number in range(*numbers):
            self.step(number)
        return self

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Run)
        weights = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return repr(self.losses) == repr(other.losses) and all(torch.equal(a, b) for a, b in weights)

    __hash__ = None  # type: ignore[assignment]  # compared, never counted

    @property
    def records(self) -> int:
        assert self.graphs is not None
        return sum(len(shapes.records) for shapes in self.graphs.shapes.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_calls(tmp_path: Path, case: str, device: str) -> None:
    """Dropout's among them, for 13 steps, or 20 where there are more lengths; then the generators stand in one place too. torch's
    attention on a CPU, that of an installation without kernels, cuts packed sequences apart and draws in place: what cannot be
    recorded has the bits of the calls as well."""
    there = torch.device(device)
    steps = 20 if len(CASES[case][2].get("short", ())) > 2 else 13
    wanted = Run(tmp_path, case, False, there).through(steps)
    after = torch.rand(3, device=there)
    found = Run(tmp_path, case, True, there).through(steps)
    assert found == wanted and torch.equal(torch.rand(3, device=there), after)
    options = CASES[case][2]
    never = options.get("packed") or ("recompute" in options and "lora" not in case)
    if device == "cpu" and not available("cpu") and never:
        assert not found.records and found.said and all("cannot be a CUDA graph and run without one" in line for line in found.said)
        return
    shapes = len(found.graphs.shapes) if device == "cpu" else 1  # a GPU is told of labels, too
    assert found.records >= shapes * min(2, found.parts)
    assert len(found.said) == 1 and "CUDA graph from here on" in found.said[0]
    assert (found.graphs.updates.launch is not None) == ("optimizer" in options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_is_resumed(tmp_path: Path, device: str) -> None:
    """The first steps of the second half are made of calls where the whole run had its records."""
    there = torch.device(device)
    whole = Run(tmp_path, "gpt in thirds", True, there).through(10)
    weights = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    drawn, moments = whole.recorder.drawn(), whole.optimizer.state_dict()
    other = Run(tmp_path, "gpt in thirds", True, there)
    other.optimizer.load_state_dict(moments)
    other.model.load_state_dict(weights, strict=False)
    for run in (whole, other):
        run.recorder.rewind(drawn)
        run.through(10, 20)
    whole.losses = whole.losses[20:]
    assert whole == other and other.records == 2


@pytest.mark.parametrize("device", DEVICES)
def test_no_two_steps_drop_the_same(tmp_path: Path, device: str) -> None:
    """Nothing is learned, the batch is one and the same, and every loss is another."""
    run = Run(tmp_path, "gpt", True, torch.device(device), still=True)
    for _ in range(10):
        run.step(1)
    assert run.records == 1 and len(set(run.losses[::2])) == 10


def test_a_record_is_made_after_a_few_calls_and_then_used(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpt", True, torch.device("cpu"))
    for number in range(9):
        run.step(number)
        assert run.recorder.played == max(0, number + 1 - WARM)
    assert run.graphs is not None and all(p.grad is None for p in run.model.parameters())


def test_records_of_other_shapes_are_made_sooner(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpt", True, torch.device("cpu")).through(WARM + 1)
    run.short = (8,)
    for number, played in ((4, 1), (5, 2)):
        run.step(number)
        assert run.recorder.played == played


def test_gradients_that_are_not_the_records_are_added_to_by_calls(tmp_path: Path) -> None:
    """The first of a step is packed, and runs without; so does what follows it in that step."""
    runs = [Run(tmp_path, "gpt", graphed, torch.device("cpu")).through(6) for graphed in (False, True)]
    for run in runs:
        torch.manual_seed(7)
        generator = torch.Generator().manual_seed(3)
        part = batch_of("lm", 1, 24, generator)
        bounds = torch.tensor([0, 24], dtype=torch.int32)
        odd = {**part, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": torch.arange(24)[None]}
        loss, _ = accumulate(run.model, [odd, batch_of("lm", 3, 24, generator)], "lm", graphs=run.graphs)
        update(run.model, run.optimizer, loss, 1e-2, 1.0)
        torch.manual_seed(8)
        run.through(8, 12)
    assert runs[0] == runs[1] and runs[1].recorder.played == 3 + 4


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_an_update_is_a_record_where_gradients_are(tmp_path: Path, name: str) -> None:
    """Not the first of them, in which something may be called that never was, nor one of gradients or of a state that are
    elsewhere. It is made once more for a state that was loaded."""
    runs = []
    for graphed in (False, True):
        run = Run(tmp_path, f"t5 {name}", graphed, torch.device("cpu"))
        runs.append(run)
        for number, updates, made in ((0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 2), (4, 1, 3), (5, 2, 3)):
            run.step(number)
            assert not graphed or (run.recorder.updates, run.recorder.made) == (updates, made)
        run.short = (4,)
        run.step(6)  # the first of its shapes
        run.short = (0,)
        run.step(7)
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.through(8, 11)
    assert (runs[1].recorder.updates, runs[1].recorder.made) == (3 + 3, 4) and runs[0] == runs[1]


@pytest.mark.parametrize("why", ["fails", "there is little memory"])
def test_updates_that_cannot_be_recorded_run_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def fails(work: Callable[[], None]) -> Any:
        raise RuntimeError("called a synchronizing CUDA operation")

    wanted = Run(tmp_path, "t5 adafactor", False, torch.device("cpu")).through(12)
    run = Run(tmp_path, "t5 adafactor", True, torch.device("cpu")).through(WARM + 1)
    if why == "fails":
        monkeypatch.setattr(run.recorder, "update", fails)
    else:
        run.recorder.memory = False
    assert run.through(WARM + 1, 12) == wanted
    assert run.recorder.updates == 0 and run.records == 2 and run.recorder.closed == (why == "fails")
    said = "updates cannot be a CUDA graph and run without one" if why == "fails" else "there is too little memory for a CUDA graph"
    assert len(run.said) == 2 and run.said[1].startswith(said)


def test_packed_batches_whose_longest_is_not_said_are_never_recorded(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpt", True, torch.device("cpu"))
    bounds = torch.tensor([0, 10, 24], dtype=torch.int32)
    for number in range(8):
        part = batch_of("lm", 1, 24, torch.Generator().manual_seed(number))
        odd = {**part, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "position_ids": torch.arange(24)[None]}
        accumulate(run.model, [odd], "lm", graphs=run.graphs)
        run.optimizer.zero_grad()
    assert run.recorder.played == 0 and not run.said


class Broken(Played):
    """Fails in the middle of the backward, gradients half formed; `error` says how."""

    error: Exception = RuntimeError("called a synchronizing\nCUDA operation")

    def __call__(self, work: Callable[[], Tensor]) -> Any:
        drawn = torch.get_rng_state()
        work()
        torch.set_rng_state(drawn)
        for p in list(self.model.parameters())[:3]:
            p.grad = torch.full_like(p, torch.nan)
        raise self.error


@pytest.mark.parametrize("case", ["gpt", "gpt in thirds"])
def test_what_cannot_be_recorded_runs_as_before(tmp_path: Path, case: str) -> None:
    wanted, found = (Run(tmp_path, case, graphed, torch.device("cpu")) for graphed in (False, True))
    assert found.graphs is not None
    found.graphs.recorder = broken = Broken(found.model)
    torch.manual_seed(3)
    wanted.through(12)
    torch.manual_seed(3)
    assert found.through(12) == wanted and broken.closed == 1
    why = "RuntimeError: called a synchronizing CUDA operation"
    assert found.said == [f"batches of 3 x 24 tokens cannot be a CUDA graph and run without one: {why}"]  # it is not tried again


def test_three_failures_are_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpt of three lengths", True, torch.device("cpu"))
    assert run.graphs is not None
    run.graphs.recorder = broken = Broken(run.model)
    run.short = tuple(range(6))
    run.through(60)
    assert broken.closed == 3 == len(run.said)


def test_a_failure_does_not_cost_other_shapes_their_records(tmp_path: Path) -> None:
    """What was recorded before is recorded again, for the generator is another one."""
    wanted, found = (Run(tmp_path, "gpt", graphed, torch.device("cpu")) for graphed in (False, True))
    assert found.graphs is not None
    for run in (wanted, found):
        torch.manual_seed(3)
        run.through(5)
        if run is found:
            found.graphs.recorder = Broken(run.model)
        run.short = (8,)
        run.through(5, 10)
        if run is found:
            assert found.records == 0
            found.graphs.recorder = run.recorder
        run.short = (0,)
        run.through(10, 15)
    assert found == wanted and found.records == 1 and len(found.said) == 2


@pytest.mark.parametrize("before", [3, 8])
def test_out_of_memory_beside_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
    """In the second micro-batch of a step, be it that of the first record: all of the step is done again, on gradients that were
    none, with the same dropout."""
    wanted, found = (Run(tmp_path, "gpt in thirds", graphed, torch.device("cpu")) for graphed in (False, True))
    torch.manual_seed(3)
    wanted.through(12)
    torch.manual_seed(3)
    found.through(before)
    assert found.graphs is not None and found.records == (2 if before == 8 else 0)
    run, calls = Graphs.run, list[int]()

    def short(self: Any, work: Any, arguments: Any, scale: Any, averaging: bool) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return run(self, work, arguments, scale, averaging)

    monkeypatch.setattr(Graphs, "run", short)
    found.through(before, 12)
    assert found == wanted and len(calls) == 2 + (12 - before) * 3 and found.records == 0
    assert found.said[-1].startswith("out of memory beside CUDA graphs") and not found.graphs.gradients


def test_out_of_memory_without_records_is_the_runs(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpt", True, torch.device("cpu"))
    run.compute = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory"))  # type: ignore[assignment]  # raises
    with pytest.raises(torch.OutOfMemoryError):
        run.step(0)


def test_few_shapes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was not used for longest makes room, for shapes that have come often."""
    monkeypatch.setattr(module, "MOST", 2)
    monkeypatch.setattr(module, "WORTH", 6)
    monkeypatch.setattr(module, "SEEN", 3)
    wanted, found = (Run(tmp_path, "gpt", graphed, torch.device("cpu")) for graphed in (False, True))
    for run in (wanted, found):
        torch.manual_seed(3)
        for short in (0, 1, 0, 2):
            run.short = (short,)
            run.through(6)
    recorded = [key[2][1][0] for key, shapes in found.graphs.shapes.items() if shapes.records]  # type: ignore[union-attr]  # it has
    assert [shape[1] for shape in recorded] == [23, 24]  # the third is new
    found.short = wanted.short = (2,)
    drawn = torch.get_rng_state()
    wanted.through(6)
    torch.set_rng_state(drawn)
    found.through(6)
    recorded = [key[2][1][0] for key, shapes in found.graphs.shapes.items() if shapes.records]  # type: ignore[union-attr]  # it has
    assert [shape[1] for shape in recorded] == [24, 22]
    for short in range(10):
        found.short = (short,)
        found.through(WARM + 1)
    assert len(found.graphs.shapes) <= 3 + 2  # type: ignore[union-attr]  # it has graphs
    assert repr(found.losses[: len(wanted.losses)]) == repr(wanted.losses)


def test_no_record_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and asked for again after a while."""
    run = Run(tmp_path, "gpt", True, torch.device("cpu"))
    run.recorder.memory = False
    asked: list[int] = []
    monkeypatch.setattr(Played, "room", lambda self: bool(asked.append(1)) or self.memory)
    monkeypatch.setattr(module, "WORTH", 2)
    run.through(12)
    assert run.recorder.played == 0 and len(asked) == 2
    assert run.said == ["there is too little memory for a CUDA graph of batches of 3 x 24 tokens"]
    run.recorder.memory = True
    run.through(12, 20)
    assert run.recorder.played == 5 and len(asked) == 3


def test_work_of_another_kind_is_given_the_memory(tmp_path: Path) -> None:
    """Where there is little: what comes after it is recorded again, at once."""
    wanted, run = (Run(tmp_path, "gpt", graphed, torch.device("cpu")) for graphed in (False, True))
    torch.manual_seed(3)
    wanted.through(9)
    torch.manual_seed(3)
    run.through(6)
    assert run.graphs is not None
    run.graphs.make_room()
    assert run.records == 1
    run.recorder.little = True
    run.graphs.make_room()
    assert run.records == 0 and not run.graphs.gradients and run.recorder.waited == 1
    assert run.through(6, 9) == wanted and run.records == 1 and run.recorder.played == 6


@pytest.mark.parametrize("repeats", [False, True])
def test_calls_are_given_the_memory_where_no_step_can_be_repeated(tmp_path: Path, repeats: bool) -> None:
    """Others wait for this rank, and would for ever if it ran out of memory."""
    wanted, run = (Run(tmp_path, "gpt", graphed, torch.device("cpu")) for graphed in (False, True))
    run.graphs.repeats, run.recorder.little = repeats, True
    for each in (wanted, run):
        torch.manual_seed(3)
        each.short = (8,)
        each.through(6)
        each.short = (0,)
        each.through(6, 12)
    assert run == wanted and run.recorder.played > 0 and run.graphs.ended == (not repeats)
    assert run.recorder.asked == ([] if repeats else [pytest.approx(24 / 16, rel=0.02)])  # of longer ones, once
    assert run.recorder.waited == (not repeats), "what replays is still in the memory that goes"
    assert run.said[1:] == ([] if repeats else ["there is too little memory beside CUDA graphs: the run continues without them"])


def test_a_gpu_says_whether_calls_may_lack_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After other work has given back what it has left."""
    said = list[str]()
    for name, value in (("mem_get_info", (1, 4)), ("max_memory_allocated", 3), ("memory_allocated", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append("waited"))
    gpu = GPU.__new__(GPU)
    gpu.device = torch.device("cuda")
    assert not gpu.lacks(0.5) and not said
    assert gpu.lacks(1.0) and gpu.tight() and said == ["emptied"]
    gpu.wait()
    assert said == ["emptied", "waited"]


def test_calls_of_steps_that_are_never_recorded_are_given_the_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As steps of several micro-batches are, where FSDP keeps something between these, beside records of steps of one."""
    run = Run(tmp_path, "gpt", True, torch.device("cpu"))
    run.graphs.repeats, run.recorder.little = False, True
    run.through(6)
    assert run.records == 1 and not run.graphs.ended
    monkeypatch.setattr(Ranks, "whole", lambda ranks, forwards: False)
    run.through(6, 7)
    assert run.graphs.ended and not run.records and run.recorder.asked


def test_parameters_that_are_elsewhere_are_recorded_anew(tmp_path: Path) -> None:
    wanted, found = (Run(tmp_path, "gpt", graphed, torch.device("cpu")) for graphed in (False, True))
    for run in (wanted, found):
        torch.manual_seed(3)
        run.through(6)
        table = run.model.embed.positions.weight
        table.data = table.data.clone()
        run.through(6, 9)
    assert found == wanted and found.recorder.made == 2


class Two(nn.Module):
    """Of whose layers the second is used for batches of an even length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any) -> Any:
        x = self.a(input_ids.float()[..., None])
        x = self.b(x) if input_ids.size(1) % 2 == 0 else x
        return mc.layers.Output(loss=x.square().sum() / num_items_in_batch)


@pytest.mark.parametrize("lengths", [(4, 5), (5, 4)])
def test_shapes_that_train_other_parameters_have_no_record(lengths: tuple[int, int]) -> None:
    """A gradient that is not there is not one of zeros."""
    model, said = Two(), list[str]()
    graphs = Graphs(model, Played(model), said.append)
    for length in lengths:
        for _ in range(6):
            batch = {"input_ids": torch.ones(2, length, dtype=torch.long), "labels": torch.ones(2, length, dtype=torch.long)}
            accumulate(model, [batch], "lm", graphs=graphs)
            assert (model.b.weight.grad is None) == (length == 5)
            model.zero_grad()
    assert len(said) == 2 and "gradients of other parameters" in said[1]


def test_evaluation_and_training_are_different_keys(tmp_path: Path) -> None:
    run = Run(tmp_path, "gpt", True, torch.device("cpu")).through(6)
    run.model.eval()
    run.through(6, 7)
    assert run.recorder.played == 3


@pytest.mark.parametrize("machine", [
    {"cuda_graphs": False}, {"compile": True}, {"offload": True}, {"fsdp": 2, "offload": True},
])  # fmt: skip
def test_where_a_run_has_none(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GPU", lambda device: None)
    model, cuda = nn.Linear(1, 1), torch.device("cuda")
    found = graphs_of(model, Machine(**({"cuda_graphs": True} | machine)), cuda, print)
    assert found is None if machine != {"cuda_graphs": False} else found is not None and found.ended
    assert graphs_of(model, Machine(cuda_graphs=True), torch.device("cpu"), print) is None
    for how in ("none", "selective", "full"):
        assert graphs_of(model, Machine(cuda_graphs=True, recompute=how), cuda, print) is not None


# ------------------------------------------------------------------------------------- what a forward must not do meanwhile


@pytest.mark.parametrize("share", [0.0, 0.01, 0.15, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 63, 64, 8192])
def test_labelled_places_are_few_numbers_and_all_of_them(share: float, count: int) -> None:
    """Those that only fill up have no label; so the loss is the same."""
    head = mc.layers.LMHead(8, 16, shift=False).train()
    labels = torch.full((1, count), IGNORE)
    labels[:, : round(share * count)] = 3
    labels = labels[:, torch.randperm(count)]
    found = head.labelled_of(labels)
    assert found is not None
    known = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    assert torch.equal(found[: len(known)], known) and (labels.flatten()[found[len(known) :]] == IGNORE).all()
    step = max(64, count // 32)
    assert len(found) in (0, count) or len(found) % step == 0
    assert len(found) - len(known) < step and len(found.unique()) == len(found)
    ahead = head.eval().labelled_of(labels)  # of the next step, while the model is evaluated
    assert ahead is not None and torch.equal(ahead, found) and mc.layers.LMHead(8, 16, shift=True).labelled_of(labels) is None


def test_labelled_places_that_are_given_are_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mc.build("bert-base-uncased", task="mlm", config=TINY | {"hidden": 64, "dropout": 0.0, "attn_dropout": 0.0})
    batch = batch_of("mlm", 4, 40, torch.Generator().manual_seed(0))
    model.train()
    places = model.head.labelled_of(batch["labels"])
    wanted = model(**batch)
    wanted.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    monkeypatch.setattr(type(model.head), "prepared", lambda self, batch: batch if batch.labelled is not None else 1 / 0)
    found = model(**batch, target_places=places)
    found.loss.backward()
    torch.testing.assert_close(found.loss, wanted.loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name])


def test_a_gpu_is_told_which_labels_there_are(tmp_path: Path) -> None:
    model, batch = bert("mlm", tmp_path).train(), batch_of("mlm", 4, 40, torch.Generator().manual_seed(0))
    assert "target_places" not in stepping.ready(model, batch, "mlm", torch.device("cpu"), True)
    found = stepping.ready(model, batch, "mlm", torch.device("cuda"), True)
    assert torch.equal(found["target_places"], model.head.labelled_of(batch["labels"]))
    assert stepping.ready(model, found, "mlm", torch.device("cuda"), True) is found


def test_numbers_of_the_host_are_refused_in_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory holds something else when the copy is made again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="numbers of the host"):
        onto(torch.ones(3), torch.device("cuda"))


def test_a_rehearsal_pins_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors have none: a run on a GPU whose sequences are packed was told that its memory was not estimated."""
    there = []
    monkeypatch.setattr(Tensor, "to", lambda x, device, **how: there.append((device.type, how)) or x)
    with FakeTensorMode():
        onto(torch.ones(3), torch.device("cuda"))
    assert there == [("cuda", {})]


def test_constants_stay_on_a_gpu() -> None:
    made: list[int] = []

    class There(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            made.append(1)
            return torch.ones(2)

    known: dict[Any, Tensor] = {}
    x = torch.ones(2).as_subclass(There)
    cuda = torch.device("cuda")
    for _ in range(3):
        kept(known, "x", lambda: x, cuda, torch.float32)
    kept(known, "y", lambda: x, cuda, torch.float32)
    kept(known, "x", lambda: x, cuda, torch.float64)
    assert len(made) == 3 and len(known) == 3
    kept(known, "x", lambda: torch.ones(2), torch.device("cpu"), torch.float32)
    with torch._subclasses.FakeTensorMode():
        kept(known, "z", lambda: x, cuda, torch.float32)
    assert len(known) == 3


def test_a_head_with_a_bound_length_reads_no_old_frequencies() -> None:
    """Where frequencies follow the length they are not kept."""
    from modelcenter.layers.position import Rotary
    from modelcenter.layers.rope import Dynamic

    rotary = Rotary(8, Dynamic(factor=2.0, positions=4))
    short, long = (rotary(torch.arange(n)[None], torch.float32) for n in (4, 16))
    assert not torch.equal(short.cos, long.cos[:, :4]) and not rotary.known


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["mlm"])
def test_what_waits_for_the_device_is_found_and_runs_without(tmp_path: Path, task: str) -> None:
    """Labels that are on the device already: which there are is asked for in the forward. Torch is whole after it."""
    there = torch.device("cuda")
    run = Run(tmp_path, "bert of words", True, there)
    for number in range(8):
        batch = {key: value.to(there) for key, value in batch_of("mlm", 3, 24, torch.Generator().manual_seed(number)).items()}
        accumulate(run.model, [batch], "mlm", graphs=run.graphs)
        run.optimizer.zero_grad()
    assert run.records == 0 and len(run.said) == 1 and "synchronizing" in run.said[0]
    torch.cuda.empty_cache()
    assert Run(tmp_path, "gpt", True, there).through(8).records == 1


@pytest.mark.gpu
def test_memory_beside_a_record(tmp_path: Path) -> None:
    """What a run with records holds is little more than what one without does; dropped records give it back."""
    there = torch.device("cuda")
    held = []
    for graphed in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_reserved()  # of tests before this one
        torch.cuda.reset_peak_memory_stats()
        run = Run(tmp_path, "gpt", graphed, there)
        run.model = mc.build("gpt2", config={"layers": 4}, device=there).train()
        run.optimizer = build_optimizer(run.model, OptimizerConfig())
        run.graphs = Graphs(run.model, GPU(there), run.said.append) if graphed else None
        for number in range(8):
            batch = batch_of("lm", 4, 512, torch.Generator().manual_seed(number))
            loss, _ = accumulate(run.model, [batch], "lm", partial(autocast, "bf16", there), graphs=run.graphs)
            update(run.model, run.optimizer, loss, 1e-4, 1.0)
        assert not graphed or run.records == 1
        held.append(torch.cuda.memory_reserved())
        if run.graphs is not None:
            run.graphs.drop()
        lasting = sum(p.nbytes for p in run.model.parameters()) * 3
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < lasting * 1.2 + 100e6 + others
        del run, loss
    assert held[1] < 1.25 * held[0]


@pytest.mark.gpu
def test_a_training_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs, without, and resumed from the middle: the same metrics and states, evaluations between steps too."""
    runs = {}
    for name, graphed in (("calls", False), ("graphs", True), ("resumed", True)):
        (tmp_path / name).mkdir()
        recipe = recipe_of(tmp_path / name, **{"data.packing": False, "precision": "bf16"})
        if name == "resumed":
            data = load_recipe(runs["graphs"] / "recipe.yaml").data
            recipe = replace(recipe, data=data, resume=str(runs["graphs"] / "step-10"))
        train(recipe, Machine(device="cuda", cuda_graphs=graphed))
        runs[name] = tmp_path / name / "out"
        assert ("run as a CUDA graph from here on" in capsys.readouterr().err) == graphed
    states = [bytes_of(folder / "step-20") for folder in runs.values()]
    for state in states[1:]:
        assert {k: v for k, v in state.items() if k.endswith("safetensors")} == {
            k: v for k, v in states[0].items() if k.endswith("safetensors")
        }
    said = [rows(folder)[1:] for folder in runs.values()]
    assert said[0] == said[1] and said[2] == [row for row in said[0] if row["step"] > 10]
