"""Training steps of every family on every mesh against one process: losses, gradients and weights after five steps, by stage of
ZeRO, with copies of the shards, recompute and accumulation; and what is sent, when, in which dtype."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh import DEVICE, full, spawn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Case, cases, tiny

import modelcenter as mc
from modelcenter.checkpoint.load import fill
from modelcenter.layers import Block
from modelcenter.layers.initial import initial
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.apply import join
from modelcenter.parallel.blocks import blocks, units
from modelcenter.parallel.check import check
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.place import place
from modelcenter.plan.layout import best_of
from modelcenter.skeleton import skeleton
from modelcenter.train.evaluate import count_targets
from modelcenter.train.step import accumulate, autocast, update

CASES = cases(all_tasks=False, all_variants=False)
GPT2, LLAMA = (next(case for case in CASES if case.kind == kind) for kind in ("gpt2", "llama"))
STEPS, CPU = 5, torch.device("cpu")
BROAD = 800  # words: a head of so many is larger than a block

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def machine_of(**changes: Any) -> mc.Machine:
    return mc.Machine(device=DEVICE, threads=1, **changes)


def model_of(case: Case, machine: mc.Machine | None, dtype: torch.dtype = torch.float64, precision: str | None = None,
             dropout: bool = False, vocab: int = 0) -> Any:
    """A loud model without dropout; with a `vocab` of its own length, whose head is tied to nothing."""
    config = tiny(case.kind)
    if vocab:
        config = replace(config, vocab=vocab, tie=False)
    if not dropout:
        config = replace(config, **{f.name: 0.0 for f in fields(config) if f.name.endswith("dropout")})
    model = skeleton(case.family, config, case.task, dtype)
    place(model, None, machine, precision)
    fill(model, initial(model, model.shapes, 7, lambda name, shape: 1.5 * shape[-1] ** -0.5))
    return model.train()


def batches_of(case: Case, share: int, shares: int, micro: int) -> list[dict[str, Tensor]]:
    """This share of eight rows with very different numbers of targets, in micro-batches."""
    source = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(2, 128, (8, 10), generator=source), torch.randint(2, 128, (8, 10), generator=source)
    kept = torch.arange(10)[None] >= torch.tensor([1, 4, 9, 2, 8, 3, 7, 5])[:, None]
    rows = {"input_ids": ids, "labels": (labels if case.seq2seq else ids).masked_fill(~kept, -100)}
    mine = {key: value[share::shares] for key, value in rows.items()}
    return [dict(zip(mine, part, strict=True)) for part in zip(*(v.split(micro) for v in mine.values()), strict=True)]


def steps_of(model: Any, case: Case, ranks: Ranks, micro: int, precision: str = "fp32", scale: float = 1.0) -> Iterator[Any]:
    """The loss and, of the first step, all gradients; at the end all weights."""
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.1))
    task = "seq2seq" if case.seq2seq else "lm"
    device = torch.device("cpu" if ranks is ALONE else DEVICE)
    batches = [{key: value.to(device) for key, value in b.items()} for b in batches_of(case, ranks.share, ranks.shares, micro)]
    (targets,) = ranks.sum(sum(count_targets(b, task) for b in batches))
    for _ in range(STEPS):
        loss, _ = accumulate(model, batches, task, lambda: autocast(precision, device), scale, int(targets), ranks)
        grads = {name: full(p.grad.detach()).clone() / scale for name, p in model.named_parameters()}
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        norm = update(model, optimizer, loss, 1e-2, 0.1, scale, squares)
        yield float(loss), norm, grads
    yield {name: full(p.detach()) for name, p in model.named_parameters()}


@cache  # in the parent, whose memory the ranks share
def alone(case: Case, dtype: torch.dtype = torch.float64, precision: str = "fp32", scale: float = 1.0, vocab: int = 0) -> list[Any]:
    return list(steps_of(model_of(case, None, dtype, vocab=vocab), case, ALONE, 8, precision, scale))


def cut(x: Tensor, like: Tensor) -> Tensor:
    """Without the rows that only pad a vocabulary."""
    return x[tuple(slice(0, n) for n in like.shape)]


def equal(rank: int, machines: dict[str, tuple[dict[str, Any], int]], case: Case, vocab: int = 0) -> None:
    for name, (changes, micro) in machines.items():
        machine = machine_of(**changes)
        ranks = join(machine)
        *steps, weights = alone(case, vocab=vocab)
        *found, after = steps_of(model_of(case, machine, vocab=vocab), case, ranks, micro)
        assert len(steps) == len(found) == STEPS
        for (loss, norm, grads), (other, size, many) in zip(steps, found, strict=True):
            assert abs(loss - other) < 1e-9 * loss and loss > 1, f"{name} {case}: loss {other}, alone {loss}"
            assert abs(norm - size) < 2e-6 * norm, f"{name} {case}: norm {size}, alone {norm}"  # it is a float32
            largest = max(float(g.abs().max()) for g in grads.values())
            assert grads.keys() == many.keys()
            for key, grad in grads.items():
                gap = float((cut(many[key], grad) - grad).abs().max())
                assert gap < 1e-7 * largest, f"{name} {case} {key}: gradients {gap} apart of {largest}"
        first, same = steps[0][2], found[0][2]
        largest = max(float(g.abs().max()) for g in first.values())
        for key, grad in first.items():
            assert float((cut(same[key], grad) - grad).abs().max()) < 1e-10 * largest, f"{name} {case} {key}"
        for key, weight in weights.items():
            torch.testing.assert_close(cut(after[key], weight), weight, rtol=1e-7, atol=1e-8,
                                       msg=lambda m, w=f"{name} {case} {key}": f"{w}: {m}")  # fmt: skip


# of 2 and of 4 ranks: the changes to a machine, and the rows of a micro-batch
PAIRS: dict[str, tuple[dict[str, Any], int]] = {
    "zero1": ({"fsdp": 2, "zero": 1}, 1),
    "zero2": ({"fsdp": 2, "zero": 2}, 2),
    "zero3": ({"fsdp": 2, "recompute": "selective"}, 2),
    "copies": ({"replicate": 2}, 2),
    "tp": ({"tensor_parallel": 2, "recompute": "selective"}, 4),
    "sequence": ({"tensor_parallel": 2, "sequence_parallel": True}, 4),
}
QUADS: dict[str, tuple[dict[str, Any], int]] = {
    "hybrid": ({"replicate": 2, "fsdp": 2}, 1),
    "hybrid zero1": ({"replicate": 2, "fsdp": 2, "zero": 1}, 1),
    "hybrid zero2": ({"replicate": 2, "fsdp": 2, "zero": 2, "recompute": True}, 1),
    "fsdp x tp": ({"fsdp": 2, "tensor_parallel": 2, "recompute": "full"}, 2),
    "zero1 x tp": ({"fsdp": 2, "tensor_parallel": 2, "zero": 1}, 2),
    "copies x tp": ({"replicate": 2, "tensor_parallel": 2}, 2),
    "copies x sequence": ({"replicate": 2, "tensor_parallel": 2, "sequence_parallel": True}, 2),
    "sequence x fsdp": ({"tensor_parallel": 2, "sequence_parallel": True, "fsdp": 2, "recompute": "selective"}, 2),
    "fsdp4": ({"fsdp": 4}, 1),
}


@pytest.mark.parametrize(("machines", "case"), [
    pytest.param(PAIRS, GPT2, id="2 ranks"),
    pytest.param({"hybrid": QUADS["hybrid"]}, GPT2, id="4 ranks"),
    # between micro-batches the device has weights whose gradients are not summed yet, all of them parts
    pytest.param({"host": ({"tensor_parallel": 2, "sequence_parallel": True, "offload": True, "zero": 1}, 4)}, LLAMA, id="host"),
    *(pytest.param(PAIRS, case, id=f"2 ranks, {case.kind}", marks=pytest.mark.slow) for case in CASES if case != GPT2),
    *(pytest.param(QUADS, case, id=f"4 ranks, {case.kind}", marks=pytest.mark.slow) for case in CASES),
])  # fmt: skip
def test_steps_equal_one_process(machines: dict[str, tuple[dict[str, Any], int]], case: Case) -> None:
    alone(case)
    spawn(4 if machines.keys() <= QUADS.keys() else 2, equal, machines, case)


@pytest.mark.parametrize("kind", ["llama", pytest.param("mt5", marks=pytest.mark.slow)])
def test_steps_with_a_large_head_equal_one_process(kind: str) -> None:
    """A head that is sent by itself, for its table is its own and as large as a block."""
    case = next(case for case in CASES if case.kind == kind)
    broad, plain = model_of(case, None, vocab=BROAD), model_of(case, None)
    assert units(broad) == [*blocks(broad), broad.head] and units(plain) == blocks(plain)
    alone(case, vocab=BROAD)
    spawn(2, equal, {name: PAIRS[name] for name in ("zero1", "zero2", "zero3", "copies", "tp")}, case, BROAD)


# ------------------------------------------------------------------------------------------------------- what is sent


class Collectives(TorchDispatchMode):
    """How often each collective is called while it lasts, and the dtypes of what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.replace("reduce_scatter", "scatter")
            kind = next(k for k in ("gather", "scatter", "alltoall", "reduce") if k in name)
            self.calls["scatter" if kind == "alltoall" else kind] += 1
            sent = args[1] if kind != "reduce" else args[0]
            for tensor in sent if isinstance(sent, list | tuple) else [sent]:
                self.dtypes.setdefault(kind, set()).add(tensor.dtype)
        return func(*args, **(kwargs or {}))


GROUPS, MICROS = 3, 4  # two blocks and the rest; micro-batches of a step
SENT = {  # (gathers, reduce-scatters, sums over copies) of a step, by machine
    "zero3": ({"fsdp": 2}, ((2 * GROUPS - 1) * MICROS, GROUPS * MICROS, 0)),  # what is outermost stays for the backward
    "head, zero3": ({"fsdp": 2}, (2 * GROUPS * MICROS, (GROUPS + 1) * MICROS, 0)),  # of its own, which stays as well
    "zero2": ({"fsdp": 2, "zero": 2}, (GROUPS, GROUPS * MICROS, 0)),
    "zero1": ({"fsdp": 2, "zero": 1}, (GROUPS, GROUPS, 0)),
    "copies": ({"replicate": 2}, (0, 0, 1)),  # all of so small a model at once
    "fp16, zero2": ({"fsdp": 2, "zero": 2}, (GROUPS, GROUPS * MICROS, 0)),
}
SENT_BY_FOUR = {
    "hybrid": ({"replicate": 2, "fsdp": 2}, ((2 * GROUPS - 1) * MICROS, GROUPS * MICROS, GROUPS)),
    "hybrid zero1": ({"replicate": 2, "fsdp": 2, "zero": 1}, (GROUPS, GROUPS, GROUPS)),
}


def sends(rank: int, machines: dict[str, Any]) -> None:
    for name, (changes, wanted) in machines.items():
        machine, case = machine_of(**changes), LLAMA if "head" in name else GPT2
        precision, low = ("fp16", torch.float16) if "fp16" in name else ("bf16", torch.bfloat16)
        ranks, model = join(machine), model_of(case, machine, torch.float32, precision, vocab=BROAD * ("head" in name))
        batch = batches_of(case, 0, 1, 1)[:MICROS]
        for _ in range(2):  # the first step of all has more to say
            with Collectives() as seen:
                accumulate(model, batch, "lm", lambda: autocast(precision, CPU), targets=9, ranks=ranks)  # noqa: B023  # called here
        found = tuple(seen.calls[kind] for kind in ("gather", "scatter", "reduce"))
        assert found == wanted, f"{name}: {found} and not {wanted}"
        assert seen.dtypes.get("gather", {low}) == {low}, f"{name}: weights are sent as {seen.dtypes}"
        sums = [seen.dtypes.get(kind, {torch.float32}) for kind in ("scatter", "reduce")]
        assert sums == [{torch.float32}] * 2 and ("alltoall" in seen.dtypes) is name.endswith(("zero2", "zero3", "hybrid")), name
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_what_a_step_sends() -> None:
    """As often as its stage says, weights in the low precision; gradients are never summed in it: the receiver does, if they are
    sent in it."""
    spawn(2, sends, SENT)


@pytest.mark.slow
def test_what_a_step_of_copies_of_shards_sends() -> None:
    spawn(4, sends, SENT_BY_FOUR)


def holds(rank: int) -> None:
    for zero in (1, 2, 3):
        machine = machine_of(fsdp=2, zero=zero)
        ranks, model = join(machine), model_of(GPT2, machine)
        for number, batch in enumerate(batches_of(GPT2, 0, 1, 4), 1):
            ranks.reduce(model, number == 2)
            model(**batch).loss.backward()
            parts = {type(p) is not DTensor and not isinstance(p, DTensor) for p in model.parameters()}
            assert parts == {zero < 3 and number == 1}, f"zero {zero}, micro-batch {number}: whole weights {parts}"
        model.eval()
        with torch.no_grad():
            model(**batch)
        assert all(isinstance(p, DTensor) for p in model.parameters()), f"zero {zero}: whole after an evaluation"


def test_what_is_whole_and_for_how_long() -> None:
    """Weights between micro-batches up to stage 2; nothing once a step or an evaluation has ended."""
    spawn(2, holds)


def left_alone(rank: int, folder: str) -> None:
    for zero in (1, 2, 3):
        model = model_of(GPT2, machine_of(fsdp=2, zero=zero), torch.float32, "bf16")
        batch = batches_of(GPT2, 0, 1, 8)[0]
        for what in ("saved", "trained"):
            with autocast("bf16", CPU):
                loss = model(**batch).loss
            if what == "saved":
                model.save_pretrained(f"{folder}/{zero}")
            else:
                build_optimizer(model, OptimizerConfig())
            parts = [name for name, p in model.named_parameters() if not isinstance(p, DTensor) or p.dtype != torch.float32]
            assert not parts, f"zero {zero}, {what}: {parts}"
        loss.backward()  # which may come still
        assert all(p.grad is not None for p in model.parameters())


def test_a_forward_without_its_backward_rounds_no_weights(tmp_path: Path) -> None:
    """What others have sent for it, in low precision, is neither saved nor trained."""
    spawn(2, left_alone, str(tmp_path))
    want = dict(model_of(GPT2, None, torch.float32).named_parameters())
    for zero in (1, 2, 3):
        found = dict(mc.load(tmp_path / str(zero)).named_parameters())
        assert want.keys() == found.keys() and all(torch.equal(found[name], want[name]) for name in want), f"zero {zero}"


def test_stages_of_nothing_are_refused() -> None:
    for zero in (1, 2):
        with pytest.raises(mc.InputError, match=rf"machine\.zero: {zero} with fsdp=1, which shards nothing; fsdp=2 or more"):
            mc.build("gpt2", config={"layers": 1}, machine=machine_of(replicate=2, zero=zero))


def again(rank: int) -> None:
    for spread in ({"fsdp": 2}, {"replicate": 2}, {"tensor_parallel": 2}):
        model = model_of(GPT2, machine_of(**spread))
        with pytest.raises(mc.InputError, match=r"^parallelize: model: spread over ranks already; one call; mc\.load "):
            mc.parallelize(model, machine_of(**spread))
        assert mc.parallelize(model, machine_of()) is model  # which spreads nothing


def test_a_model_is_spread_once() -> None:
    """torch would say so too, behind a page of layers, or average copies twice."""
    spawn(2, again)


def test_what_the_compiler_cannot_do_is_refused_and_not_planned() -> None:
    """torch 2.13: "expected all tensors_saved_with_vc_check to be Tensors", after minutes of compiling."""
    three = {"compile": True, "tensor_parallel": 2, "recompute": "full"}
    with pytest.raises(mc.InputError, match=r"machine\.recompute: full, with compile and tensor_parallel: .*; selective or none"):
        mc.build("gpt2", config={"layers": 1}, machine=machine_of(**three))
    for key in three:
        check(machine_of(**{name: value for name, value in three.items() if name != key}))
    asked = list[Any]()

    def exact(machine: mc.Machine, rows: int) -> Any:
        asked.append(machine.recompute)
        return SimpleNamespace(fits=False, need=1.0)

    costs: Any = SimpleNamespace(job=SimpleNamespace(rows=1), exact=exact)
    best_of(costs, machine_of(compile=True, tensor_parallel=2), 1)
    assert asked == ["none", "selective"]


@pytest.mark.parametrize("call", [
    lambda: mc.parallelize(mc.build("gpt2", config={"layers": 1}), {"fsdp": 2}),  # type: ignore[arg-type]
    lambda: mc.build("gpt2", config={"layers": 1}, machine={"fsdp": 2}),  # type: ignore[arg-type]
    lambda: mc.train("pretrain", {"data.path": "a.txt"}),  # overrides in the machine's place
], ids=["parallelize", "build", "train"])  # fmt: skip
def test_a_mapping_is_no_machine(call: Any) -> None:
    with pytest.raises(mc.InputError, match=r"^machine: a dict; mc\.Machine\(fsdp=2\), or the name of a profile$"):
        call()


# ------------------------------------------------------------------------------------------------------ low precision


def follows(rank: int, precision: str, scale: float, machines: list[dict[str, Any]]) -> None:
    """The same losses, to the rounding that low precision has against fp32."""
    exact, one = alone(GPT2, torch.float32), alone(GPT2, torch.float32, precision, scale)
    for changes in machines:
        machine = machine_of(**changes)
        *found, after = steps_of(model_of(GPT2, machine, torch.float32, precision), GPT2, join(machine), 2, precision, scale)
        for (_, _, a), (_, _, b), (_, _, c) in list(zip(exact, one, found, strict=False))[:1]:
            for key, grad in a.items():
                size, apart = float(grad.norm()), float((cut(c[key], grad) - b[key]).norm())
                least = 2e-3 if key.endswith(".k.bias") else 1e-4  # softmax takes no notice of it: what it has is rounding alone
                assert apart <= max(2 * float((b[key] - grad).norm()), 0.05 * size, least), f"{changes} {key}: {apart} of {size}"
        rounding = max(abs(a[0] - b[0]) for a, b in zip(exact[:STEPS], one[:STEPS], strict=True))
        for (loss, *_), (other, *_) in zip(one[:STEPS], found, strict=True):
            assert abs(loss - other) < max(3 * rounding, 0.01 * loss), f"{changes}: loss {other}, alone {loss}"
        assert all(weight.dtype == torch.float32 for weight in after.values())


@pytest.mark.parametrize(("precision", "scale"), [("bf16", 1.0), pytest.param("fp16", 2.0**10, marks=pytest.mark.slow)])
def test_low_precision_follows_one_process(precision: str, scale: float) -> None:
    alone(GPT2, torch.float32)
    alone(GPT2, torch.float32, precision, scale)
    spawn(2, follows, precision, scale, [{"fsdp": 2}, {"fsdp": 2, "zero": 1}, {"replicate": 2}, {"tensor_parallel": 2}])


def streams(rank: int) -> None:
    """Blocks compute with weights in low precision, as in one process; the residual stream is in bf16 too, and not in fp16, whose
    range it would leave."""
    for precision, weights, stream in (("bf16", torch.bfloat16, torch.bfloat16), ("fp16", torch.float16, torch.float32)):
        for case in CASES:
            for machine in (None, machine_of(fsdp=2)):
                model = model_of(case, machine, torch.float32, precision)
                seen: set[tuple[torch.dtype, torch.dtype]] = set()

                def look(block: Any, args: Any, seen: set[Any] = seen) -> None:
                    seen.add((block.attn.q.weight.dtype, args[0].dtype))

                for block in model.modules():
                    if isinstance(block, Block):
                        block.register_forward_pre_hook(look)
                with autocast(precision, CPU):
                    model(**batches_of(case, 0, 1, 8)[0])
                expected = weights if machine else torch.float32  # in one process autocast casts them at each product
                assert seen == {(expected, stream)}, f"{case} {precision}: {seen}"


def test_the_precision_of_the_stream() -> None:
    spawn(2, streams)
