"""What is computed again in the backward, and what is kept: the same gradients, products done once, memory in between."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy
from zoo import Case, cases, tiny

import modelcenter as mc
from modelcenter.ops import _graph, draw, dropout
from modelcenter.ops._kernels import available
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel.blocks import KEPT, keep, recompute, selected, whole
from modelcenter.plan.deep import Deep
from modelcenter.plan.rehearse import Conditions, rehearse
from modelcenter.plan.tally import highest
from modelcenter.skeleton import skeleton

CASES = cases(all_tasks=False, all_variants=False)
SIZES = {"layers": 3, "dim": 64, "heads": 4, "vocab": 300, "positions": 64, "dropout": 0.1, "attn_dropout": 0.1}


class Calls(TorchDispatchMode):
    """How often each operator is run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def skeleton_of(case: Case) -> mc.Model:
    return skeleton(case.family, tiny(case.kind), case.task, torch.float32)


def gradients(case: Case, how: Any, watched: bool = False, device: str = "cpu") -> tuple[dict[str, Tensor], Counter[str]]:
    torch.manual_seed(5)
    model = skeleton_of(case)
    model.to_empty(device=device)
    model.tie()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, p.shape[-1] ** -0.5)
    recompute(model, how)
    ids = torch.randint(2, 128, (2, 70)).to(device)  # long enough for our own attention
    labels = torch.randint(2, 128, (2, 70)).to(device)
    kwargs = {"position_ids": torch.arange(70, device=device)[None].clamp(max=63)} if case.kind in ("bert", "gpt2") else {}
    torch.manual_seed(6)
    with Calls() if watched else nullcontext() as calls:  # type: ignore[attr-defined]
        model.train()(ids, labels=labels, **kwargs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, calls.names if calls else Counter()  # type: ignore[misc]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mode_has_the_same_gradients(case: Case) -> None:
    """To the bit, dropout being on everywhere."""
    wanted, _ = gradients(case, "none")
    assert any(g.abs().max() > 0 for g in wanted.values())
    for how in ("selective", "full"):
        found, _ = gradients(case, how)
        for name, grad in wanted.items():
            assert torch.equal(found[name], grad), f"{how}: {name}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mode_has_the_same_gradients_on_a_gpu(case: Case) -> None:
    """To the bit, but for one thing: a norm that hands on its input, or that two read, adds their gradients in its own backward, in
    one rounding, and under selective recompute, where a dispatch mode watches, in two. A key's bias has no gradient but roundings:
    a billionth of the greatest is nothing."""
    with sdpa_kernel(SDPBackend.MATH):  # the others' backward adds up in no order
        wanted, _ = gradients(case, "none", device="cuda")
        greatest = max(g.norm() for g in wanted.values())
        assert greatest > 0
        for how, exact in (("full", True), ("selective", False)):
            found, _ = gradients(case, how, device="cuda")
            for name, grad in wanted.items():
                assert (found[name] - grad).norm() <= (0.0 if exact else 1e-5 * grad.norm() + 1e-9 * greatest), f"{how}: {name}"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_is_kept_is_not_done_again(kind: str) -> None:
    case = next(c for c in CASES if c.kind == kind)
    calls = {how: gradients(case, how, watched=True)[1] for how in ("none", "selective", "full")}
    ours = [("modelcenter::attention_forward",)] if available("cpu") else []  # torch's attention is products that draw
    for names in (("aten::mm", "aten::addmm"), *ours):
        times = {how: sum(found[name] for name in names) for how, found in calls.items()}
        assert times["none"] == times["selective"] < times["full"], f"{names}: {times}"
    ran = ("norm_forward", "native_layer_norm", "rsqrt")  # a kernel of ours, or what the references call
    norms = {how: sum(n for name, n in found.items() if name.endswith(ran)) for how, found in calls.items()}
    assert norms["none"] < norms["selective"] == norms["full"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler looks
def test_compiled_blocks_keep_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    sizes = {**SIZES, "dropout": 0.0, "attn_dropout": 0.0, "embed_dropout": 0.0}
    machines = [mc.Machine(device="cpu", recompute=how, compile=how != "none") for how in ("none", "selective", "full")]
    models = [mc.build("gpt2", config=sizes, machine=machine) for machine in machines]
    ids = torch.arange(2 * 20).view(2, 20)
    for model in models:
        model.train()(ids, labels=ids).loss.backward()
        if model is models[0]:
            continue
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        torch._dynamo.utils.counters.clear()
        for (name, a), (_, b) in zip(models[0].named_parameters(), model.named_parameters(), strict=True):
            assert (a.grad - b.grad).abs().max() <= 2e-5 * a.grad.abs().max() + 1e-9, name
    torch._dynamo.reset()


def test_memory_is_in_between() -> None:
    """Of a rehearsed step, which test_plan.py holds against a real one."""
    found = {}
    for how in ("none", "selective", "full"):
        model = mc.build("gpt2", config=SIZES).train()
        batch = {"input_ids": torch.ones(4, 64, dtype=torch.int64), "labels": torch.ones(4, 64, dtype=torch.int64)}
        conditions = Conditions(lambda m: (build_optimizer(m, OptimizerConfig()), None), nullcontext, torch.device("cpu"))
        step = rehearse(model, batch, conditions, recompute=how)
        found[how] = highest(Deep([(1, step)]).moments())["activations"]
    assert 1.3 * found["full"] < found["selective"] < 0.8 * found["none"], found


def test_attention_that_draws_is_done_again() -> None:
    """What torch's attention drops on a GPU it draws from the generator: left out, what follows would draw something else."""
    x = torch.empty(1, 2, 4, 8, device="meta")
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    for call, wanted in (((flash, x, x, x, 0.1), False), ((flash, x, x, x, 0.0, True), True), ((flash, x, x, x), True),
                         ((efficient, x, x, x, None, True, 0.1), False), ((efficient, x, x, x, None, True), True)):  # fmt: skip
        assert (keep(None, *call) is CheckpointPolicy.MUST_SAVE) is wanted, call
    assert keep(None, flash, x, x, x, dropout_p=0.2) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keep(None, torch.ops.aten.bmm.default, x[0], x[0]) is CheckpointPolicy.PREFER_RECOMPUTE


def test_what_is_kept_exists() -> None:
    """A name that no operator has would keep nothing."""
    for name in KEPT:
        space, _, op = name.partition("::")
        assert hasattr(getattr(torch.ops, space), op), name


def test_true_and_false_are_full_and_none() -> None:
    assert [mc.Machine(recompute=how).recompute for how in (True, False)] == ["full", "none"]
    assert mc.Machine(recompute=True) == mc.Machine(recompute="full")


class Dropping(torch.nn.Module):
    """A block that draws by itself, as torch's attention does on a GPU, and by a seed, as our ops do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.modes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(_get_current_dispatch_mode())
        x = _graph.drawn(lambda: torch.native_dropout(self.a(x), 0.5, True)[0])
        x = dropout(x.sin(), None, draw(x.device), 0.5)
        return _graph.drawn(lambda: torch.native_dropout(self.b(x), 0.5, True)[0]).cos()


@pytest.mark.parametrize("how", [whole, selected])
def test_what_a_record_draws_is_kept(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """The second time nothing is taken from the generator, which a record has moved on by as much as the calls would; and of what
    is recomputed whole no dispatch mode watches the rest, under which a norm would add up its gradients otherwise than by calls."""
    torch.manual_seed(0)
    block, x, found, stands = Dropping(), torch.randn(4, 8, requires_grad=True), [], []
    for run in (block, partial(how, block), partial(how, block)):
        if found:
            monkeypatch.setattr(_graph, "recording", lambda: True)
        torch.manual_seed(3)
        out = run(x)
        stands.append(torch.get_rng_state())
        torch.rand(5)  # what other blocks draw meanwhile
        drawn = torch.get_rng_state()
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
        assert torch.equal(torch.get_rng_state(), drawn)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    assert len({bytes(s.numpy().tobytes()) for s in stands}) == 1 and (how is selected or block.modes == [None] * 5)
    assert getattr(_graph.TAPES, "each", None) is None
