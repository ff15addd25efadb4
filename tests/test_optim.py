"""Optimizers and schedules: transformers' tables exactly, weight decay where it belongs."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from contract import kernels_called
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import modelcenter as mc
from modelcenter.checkpoint.optimizer import flatten_optimizer, restore_optimizer
from modelcenter.errors import InputError
from modelcenter.ops import _kernels
from modelcenter.optim import adamw, stacks
from modelcenter.optim.adafactor import Adafactor
from modelcenter.optim.adamw import AdamW
from modelcenter.optim.clipped import Lion
from modelcenter.optim.config import OptimizerConfig, ScheduleConfig
from modelcenter.optim.ema import EMA
from modelcenter.optim.muon import Muon
from modelcenter.optim.optimizers import build_optimizer, set_lr
from modelcenter.optim.schedules import lr_factor
from modelcenter.parallel.ranks import ALONE


def peer_table(scheduler, total: int) -> list[float]:
    """The factors transformers' scheduler gives at steps 0..total."""
    return [scheduler.lr_lambdas[0](step) for step in range(total + 1)]


def sgd(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def table(total: int, **settings) -> list[float]:
    """Our factors at steps 0..total."""
    return [lr_factor(ScheduleConfig(**settings), step, total) for step in range(total + 1)]


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 17), (1, 17), (5, 17), (16, 17), (17, 17), (0, 100), (10, 100)])
def test_schedules_equal_transformers(warmup: int, total: int) -> None:
    peers = {
        "linear": transformers.get_linear_schedule_with_warmup(sgd(), warmup, total),
        "cosine": transformers.get_cosine_schedule_with_warmup(sgd(), warmup, total),
        "constant": transformers.get_constant_schedule_with_warmup(sgd(), warmup),
        "inverse_sqrt": transformers.get_inverse_sqrt_schedule(sgd(), warmup),
    }
    for name, peer in peers.items():
        assert table(total, name=name, warmup_steps=warmup) == peer_table(peer, total), name


@pytest.mark.parametrize(("share", "total"), [(0.1, 100), (0.06, 17), (0.5, 3), (0.999, 10)])
def test_a_share_of_the_run_equals_transformers(share: float, total: int) -> None:
    arguments = transformers.TrainingArguments(output_dir="unused", warmup_steps=share)
    peer = transformers.get_cosine_schedule_with_warmup(sgd(), arguments.get_warmup_steps(total), total)
    assert table(total, name="cosine", warmup_steps=share) == peer_table(peer, total)


def test_which_schedules_may_be_prolonged() -> None:
    assert ScheduleConfig(name="constant", warmup_steps=5).timeless and not ScheduleConfig(name="linear").timeless
    assert not ScheduleConfig(name="constant", warmup_steps=0.1).timeless


@pytest.mark.parametrize("power", [1.0, 0.5, 2.0])
@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (10, 0.0), (10, 0.05)])
def test_polynomial_equals_transformers(warmup: int, floor: float, power: float) -> None:
    peer = transformers.get_polynomial_decay_schedule_with_warmup(sgd(0.25), warmup, 100, lr_end=0.25 * floor, power=power)
    found = table(100, name="polynomial", warmup_steps=warmup, min_lr_ratio=floor, power=power)
    assert found == pytest.approx(peer_table(peer, 100), rel=0, abs=1e-12)


@pytest.mark.parametrize("decay", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize(("warmup", "steps", "floor"), [(0, 20, 0.0), (10, 30, 0.0), (10, 90, 0.1), (7, None, 0.2)])
def test_wsd_equals_transformers(warmup: int, steps: int | None, floor: float, decay: str) -> None:
    peer = transformers.get_wsd_schedule(sgd(), warmup, steps or 10, 100, decay_type=decay, min_lr_ratio=floor)
    wanted = peer_table(peer, 100)
    wanted[:warmup] = [step / warmup for step in range(warmup)]  # theirs begins at the floor, all of ours at 0
    found = table(100, name="wsd", warmup_steps=warmup, decay_steps=steps, min_lr_ratio=floor, decay=decay)
    assert found == pytest.approx(wanted, rel=0, abs=1e-12)


@pytest.mark.parametrize("dim", [512])
@pytest.mark.parametrize("warmup", [1, 4, 40])
def test_noam_is_as_published(warmup: int, dim: int) -> None:
    """Attention Is All You Need, equation 3, whose steps count from 1; here the rate is that of the peak."""
    published = [dim**-0.5 * min(n**-0.5, n * warmup**-1.5) for n in range(1, 102)]
    peak = dim**-0.5 * warmup**-0.5
    assert table(100, name="noam", warmup_steps=warmup) == pytest.approx([p / peak for p in published], rel=0, abs=1e-12)
    assert max(table(100, name="noam", warmup_steps=warmup)) == 1.0


def test_exponential_equals_torch() -> None:
    optimizer = sgd()
    peer = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    wanted = []
    for _ in range(101):
        wanted.append(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    assert table(100, name="exponential", gamma=0.97) == pytest.approx(wanted, rel=0, abs=1e-12)
    late = table(100, name="exponential", gamma=0.97, warmup_steps=8, min_lr_ratio=0.1)
    assert late == pytest.approx([n / 8 for n in range(8)] + [0.1 + 0.9 * w for w in wanted[:93]], rel=0, abs=1e-12)


def test_min_lr_equals_transformers() -> None:
    peer = transformers.get_cosine_with_min_lr_schedule_with_warmup(sgd(), 4, 30, min_lr_rate=0.1)
    assert table(30, name="cosine", warmup_steps=4, min_lr_ratio=0.1) == peer_table(peer, 30)


@pytest.mark.parametrize(("settings", "found"), [
    (dict(name="noam"), r"^warmup_steps: 0 with name noam"),
    (dict(name="linear", gamma=0.9), r"^gamma: 0\.9 with name linear, which has none"),
    (dict(name="cosine", decay_steps=3), r"^decay_steps: 3 with name cosine"),
    (dict(name="wsd", power=2.0), r"^power"),
])  # fmt: skip
def test_settings_of_another_schedule_are_refused(settings: dict, found: str) -> None:
    with pytest.raises(InputError, match=found):
        ScheduleConfig(**settings)


def test_a_decay_longer_than_the_run_is_refused() -> None:
    with pytest.raises(InputError, match=r"schedule\.decay_steps: 8 after 3 of warm-up, in a run of 10"):
        table(10, name="wsd", warmup_steps=3, decay_steps=8)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd", "polynomial"])
def test_past_the_end_the_rate_stays_at_its_floor(name: str) -> None:
    config = ScheduleConfig(name=name, warmup_steps=2, min_lr_ratio=0.25)
    assert [lr_factor(config, step, 10) for step in (10, 15, 20)] == [0.25] * 3


def test_an_unknown_schedule_is_refused() -> None:
    config = ScheduleConfig()
    object.__setattr__(config, "name", "cosin")
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        lr_factor(config, 0, 10)


class ScaleNorm(nn.Module):
    """A norm of no known class, whose parameter is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


class Net(nn.Module):
    """One of each: embedding tied to a head, frozen, norm, bias, a bias that is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.odd = ScaleNorm()
        self.mlp = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.table = nn.Module()
        self.table.bias = nn.Parameter(torch.ones(3, 3))


def test_weight_decay_is_for_matrices() -> None:
    decayed, plain = build_optimizer(Net(), OptimizerConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decayed["param_names"] == ["embed.weight", "mlp.weight"]  # the tied head once, the frozen layer never
    assert plain["param_names"] == ["norm.weight", "norm.bias", "odd.weight", "mlp.bias", "table.bias"]


def test_settings_reach_the_optimizer() -> None:
    config = OptimizerConfig(lr=0.25, betas=(0.5, 0.75), eps=0.125, weight_decay=0.1)
    for group in build_optimizer(Net(), config).param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.25, (0.5, 0.75), 0.125, True)


def test_the_update_is_adamw() -> None:
    """Against the formula in float64: decay is decoupled, both moments are corrected for their start at zero."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False).double()
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    optimizer, x = build_optimizer(layer, config), torch.randn(4, 3, dtype=torch.float64)
    w = layer.weight.detach().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 6):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        g = layer.weight.grad.clone()
        optimizer.step()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        w = w - 0.1 * 0.2 * w - 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-3)
        torch.testing.assert_close(layer.weight.detach(), w, rtol=0, atol=1e-12)


def test_a_model_in_which_nothing_trains_is_refused() -> None:
    with pytest.raises(InputError, match="frozen"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerConfig())


# ---- other optimizers -------------------------------------------------------------------------------------------------


def lion(w: Tensor, g: Tensor, state: dict[str, Any], step: int) -> Tensor:
    """Chen et al., 2023, algorithm 2: rate 0.01, betas 0.8 and 0.9, decay 0.2."""
    m = state.get("m", torch.zeros_like(w))
    update = (0.8 * m + 0.2 * g).sign()
    state["m"] = 0.9 * m + 0.1 * g
    return w - 0.01 * (update + 0.2 * w)


def adafactor(w: Tensor, g: Tensor, state: dict[str, Any], step: int) -> Tensor:
    """Shazeer and Stern, 2018, algorithms 4 and 5, decay 1 - t^-0.8, relative steps of min(0.01, 1 / sqrt(t)); decoupled decay."""
    beta, rho = 1 - step**-0.8, min(0.01, step**-0.5)
    alpha = max(1e-3, float(w.square().mean().sqrt())) * rho
    if w.dim() == 2:
        row = state["row"] = beta * state.get("row", 0) + (1 - beta) * g.square().mean(1)
        col = state["col"] = beta * state.get("col", 0) + (1 - beta) * g.square().mean(0)
        v = torch.outer(row, col) / row.mean()
    else:
        v = state["v"] = beta * state.get("v", 0) + (1 - beta) * g.square()
    u = g / v.sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt()))
    return w * (1 - 0.01 * (0.2 if w.dim() > 1 else 0.0)) - alpha * u


def muon(w: Tensor, g: Tensor, state: dict[str, Any], step: int) -> Tensor:
    """Jordan et al., 2024: Nesterov's momentum 0.95, five steps of a quintic iteration in bf16; their size by Liu et al., 2025."""
    m = state["m"] = 0.95 * state.get("m", torch.zeros_like(w)) + 0.05 * g  # an average, as torch has it: the direction is the same
    x = (0.05 * g + 0.95 * m).bfloat16()
    x = x.mT if w.size(0) > w.size(1) else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.mT if w.size(0) > w.size(1) else x
    return w * (1 - 0.01 * 0.2) - 0.01 * 0.2 * max(w.shape) ** 0.5 * x.to(w)


def small(dtype: torch.dtype = torch.float64) -> mc.Model:
    model = mc.build("gpt2", config={"vocab": 31, "positions": 16, "dim": 16, "heads": 2, "layers": 2}, dtype=dtype).train()
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(dtype) * 0.3
    return model


def noise(model: nn.Module, step: int, size: float = 1.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=source).to(p) * size for name, p in model.named_parameters()}


def steps(model: nn.Module, optimizer: Any, of: range, max_norm: float = 0.0) -> None:
    for step in of:
        for (_, p), g in zip(model.named_parameters(), noise(model, step).values(), strict=True):
            p.grad = g.clone()
        optimizer.step(clip=optimizer.clip(max_norm))
        optimizer.zero_grad()


NEAR = {"lion": 1e-12, "adafactor": 1e-12, "muon": 2e-3}  # bf16 in Newton and Schulz'


@pytest.mark.parametrize(("name", "formula"), [("lion", lion), ("adafactor", adafactor), ("muon", muon)])
def test_ten_steps_are_as_published(name: str, formula: Callable[..., Tensor]) -> None:
    model = small()
    betas = {"betas": (0.8, 0.9)} if name == "lion" else {}
    optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.01, weight_decay=0.2, **betas))
    wanted, states = {n: p.detach().clone() for n, p in model.named_parameters()}, {n: {} for n, _ in model.named_parameters()}
    chosen = [n for n in wanted if name != "muon" or (n.startswith("decoder.blocks") and wanted[n].dim() == 2)]
    assert len(chosen) == (8 + 4 if name == "muon" else len(wanted))  # q, k, v, o, up, down of two blocks
    for step in range(1, 11):
        for n in chosen:
            wanted[n] = without_decay(formula, wanted[n], noise(model, step)[n], states[n], step)
        steps(model, optimizer, range(step, step + 1))
    for n in chosen:
        found = model.get_parameter(n).detach()
        assert (found - wanted[n]).norm() <= NEAR[name] * wanted[n].norm(), n


def without_decay(formula: Callable[..., Tensor], w: Tensor, g: Tensor, state: dict[str, Any], step: int) -> Tensor:
    """A vector has no decay: the formula's is taken back (Adafactor's knows)."""
    out = formula(w, g, state, step)
    return out + 0.01 * 0.2 * w if w.dim() == 1 and formula is lion else out


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-8])
def test_adafactor_equals_transformers(size: float) -> None:
    """Of gradients of any size: those of a model with ten million weights are of 1e-4. Of some rows there is none."""
    ours, theirs = small(torch.float32), small(torch.float32)
    optimizer = build_optimizer(ours, OptimizerConfig(name="adafactor", lr=1e-3, weight_decay=0.0))
    peer = transformers.Adafactor(theirs.parameters(), lr=1e-3, relative_step=False, scale_parameter=True, warmup_init=False)
    for step in range(10):
        for model, one in ((ours, optimizer), (theirs, peer)):
            for (_, p), g in zip(model.named_parameters(), noise(model, step, size * 3**-step).values(), strict=True):
                p.grad = g
                p.grad[0] *= step > 4
            one.step()
    for p, q, start in zip(ours.parameters(), theirs.parameters(), small(torch.float32).parameters(), strict=True):
        assert (p - q).norm() <= 1e-4 * (q - start).norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_ten_steps_are_torchs(name: str, dtype: torch.dtype) -> None:
    ours, theirs = small(dtype), small(dtype)
    optimizer = build_optimizer(ours, OptimizerConfig(name=name, lr=0.01, weight_decay=0.2))
    if name == "adafactor":
        decays = {g["weight_decay"]: [theirs.get_parameter(n) for n in g["param_names"]] for g in optimizer.param_groups}
        groups = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
        peer = torch.optim.Adafactor(groups, lr=0.01, eps=(1e-30, 1e-3))
        chosen = [n for n, _ in ours.named_parameters()]
    else:
        chosen = [n for g in optimizer.param_groups if g["muon"] for n in g["param_names"]]
        matrices = [theirs.get_parameter(n) for n in chosen]
        peer = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for step in range(10):
        if step == 5 and name == "adafactor":  # which can go on with ours
            peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(ours, optimizer, range(step, step + 1))
        for (n, p), g in zip(theirs.named_parameters(), noise(theirs, step).values(), strict=True):
            p.grad = g if n in chosen else None
        peer.step()
    assert len(chosen) >= 12
    for n in chosen:
        p, q = ours.get_parameter(n), theirs.get_parameter(n)
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14 if dtype is torch.float64 else 1e-6, msg=lambda m, n=n: f"{n}: {m}")


class Calls(TorchDispatchMode):
    """Counts the calls of a step, and the numbers that it reads of tensors other than the count of steps."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.optimizer, self.calls, self.read = optimizer, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if func is torch.ops.aten._local_scalar_dense.default:
            steps = {state["step"].data_ptr() for state in self.optimizer.state.values() if "step" in state}
            self.read += args[0].data_ptr() not in steps
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_parameters_of_one_shape_step_together(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By few calls; but for the rounding of products of batches as they do alone. Of a device one number is read, whether to step
    at all: what is read has to be waited for."""
    if name == "muon" and not _kernels.available("cpu"):
        pytest.skip("what is no matrix is stepped by AdamW's reference, one by one")
    found, calls = [], []
    for room in (0, 2**24):
        monkeypatch.setitem(stacks.PRODUCTS if name == "muon" else stacks.SCRATCH, False, room)
        model = small(torch.float32)
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=0.01))
        steps(model, optimizer, range(3))
        for (_, p), g in zip(model.named_parameters(), noise(model, 3).values(), strict=True):
            p.grad = g
        clip = optimizer.clip(1.0)
        with Calls(optimizer) as seen:
            optimizer.step(clip=clip)
        assert seen.read == 1
        found.append([p.detach() for p in model.parameters()])
        calls.append(seen.calls)
    assert calls[1] < calls[0] / 2, calls
    for p, q in zip(*found, strict=True):
        assert torch.equal(p, q) if name == "adafactor" else (p - q).norm() <= NEAR[name] * p.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [Adafactor, Lion])
def test_on_a_cpu_small_ones_step_together(monkeypatch: pytest.MonkeyPatch, kind: Any, dtype: torch.dtype) -> None:
    """By a fraction of the calls, and to the bits of each alone."""
    found, calls = [], []
    for room in (0, stacks.SCRATCH[False]):
        monkeypatch.setitem(stacks.SCRATCH, False, room)
        source = torch.Generator().manual_seed(0)
        shapes = 20 * [(32,), (7, 33), (2, 3, 5)]
        params = [nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for shape in shapes]
        optimizer = kind(params, lr=0.01, weight_decay=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=source).to(dtype)
            with Calls(optimizer) as seen:
                optimizer.step()
        found.append(params)
        calls.append(seen.calls)
    assert calls[1] < calls[0] / 2 and all(map(torch.equal, *found)), calls


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adafactor_takes_any_shape(device: str) -> None:
    """As torch's; by kernels, where there are some."""
    source = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (1,), (5,), (1, 1), (3, 4), (3, 4), (2, 3, 4), (130, 1001), (300, 520)]
    ours = [nn.Parameter(torch.randn(shape, generator=source).to(device)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    both = Adafactor(ours, lr=0.01, weight_decay=0.1), torch.optim.Adafactor(theirs, lr=0.01, weight_decay=0.1, eps=(1e-30, 1e-3))
    with kernels_called() as seen:
        for _ in range(3):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape, generator=source).to(device)
                q.grad = p.grad.clone()
            both[0].step(clip=both[0].clip(1.0))
            nn.utils.clip_grad_norm_(theirs, 1.0)
            both[1].step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in seen].count("adafactor_step") == 3 * 4 * ours[0].is_cuda


@pytest.mark.parametrize("kind", [AdamW, Adafactor, Lion, Muon])
def test_a_copy_goes_on_as_the_optimizer_does(kind: Any) -> None:
    """The copy of a model with its optimizer, as torch's optimizers allow."""
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 4))]
    told = {"shapes": {params[0]: (5, 4)}} if kind is Adafactor else {}  # a row of padding
    both = (params, kind(params, lr=0.1, weight_decay=0.1, **told))

    def step(params: list[nn.Parameter], optimizer: Any) -> None:
        for p in params:
            p.grad = torch.arange(float(p.numel())).view_as(p)
        optimizer.step(clip=optimizer.clip(1.0))

    step(*both)
    peer = copy.deepcopy(both)
    step(*both), step(*peer)
    assert all(map(torch.equal, params, peer[0]))
    assert peer[1].state_dict()["state"].keys() == both[1].state_dict()["state"].keys() == {0, 1}


def test_a_stack_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes; what is larger is alone, and what is of another shape, dtype or kind is elsewhere."""
    monkeypatch.setitem(stacks.SCRATCH, False, 3 * stacks.EACH * 16)
    params = [*(torch.ones(4, 4) for _ in range(9)), torch.ones(4, 4).bfloat16(), torch.ones(30, 30), torch.ones(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    odd = params[4]
    places = {id(p): n for n, p in enumerate(params)}
    found = [[places[id(p)] for p in some] for some in stacks.stacks(params, ALONE, lambda p: p is odd)]
    assert found == [[0, 1, 2], [3, 5, 6], [7, 8], [4], [9], [10], [11]]


def test_muon_leaves_what_is_not_a_hidden_matrix_to_adamw() -> None:
    ours, theirs = small(), small()
    optimizer = build_optimizer(ours, OptimizerConfig(name="muon", lr=0.01, weight_decay=0.2))
    steps(ours, optimizer, range(10))
    steps(theirs, build_optimizer(theirs, OptimizerConfig(lr=0.01, weight_decay=0.2)), range(10))
    for name, p in ours.named_parameters():
        same = not (name.startswith("decoder.blocks") and p.dim() == 2)
        assert torch.equal(p, theirs.get_parameter(name)) == same, name
        assert optimizer.state[p].keys() == ({"step", "exp_avg", "exp_avg_sq"} if same else {"momentum_buffer"})


def test_the_moments_of_muon_s_matrices_have_the_precision_of_the_weights() -> None:
    """As the help of `optimizer.moments` says."""
    model = small().float()
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", moments="bf16"))
    steps(model, optimizer, range(1))
    kinds = {(key, value.dtype) for p in model.parameters() for key, value in optimizer.state[p].items() if key != "step"}
    assert kinds == {("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.bfloat16), ("momentum_buffer", torch.float32)}


def test_a_state_dict_that_is_loaded_leaves_no_group_behind() -> None:
    model = small()
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", lr=0.01))
    steps(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


KINDS: dict[str, Callable[..., Any]] = {
    "adamw": AdamW, "adafactor": Adafactor, "lion": Lion, "int8": partial(AdamW, moments="int8"),
    "muon": lambda params, **options: Muon([{"params": params[:1]}, {"params": params[1:], "muon": False}], **options),
}  # fmt: skip


def three_steps(kind: str) -> list[Tensor]:
    """Of a matrix and a vector, whose state is loaded anew after each: these, and their state."""
    source = torch.Generator(device="cpu").manual_seed(0)
    some = [torch.randn(shape, generator=source, dtype=torch.float32, device="cpu") for shape in 3 * [(4, 256), (7,)]]
    params = [nn.Parameter(x) for x in some[:2]]
    optimizer = KINDS[kind](params, lr=0.01, weight_decay=0.1)
    for step in range(3):
        for k, p in enumerate(params):
            p.grad = some[2 * step + k] + 1
        optimizer.step(clip=optimizer.clip(0.5, 0.5) if step else None)
        optimizer.load_state_dict(optimizer.state_dict())
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values())]


@pytest.mark.parametrize("way", ["kernel", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_defaults_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, way: str) -> None:
    """Neither that of dtypes nor that of devices."""
    if way == "reference":
        monkeypatch.setattr(adamw, "usable", lambda x: False)
    wanted, found = three_steps(kind), []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(three_steps(kind))
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        found.append(three_steps(kind))
    for some in found:
        for a, b in zip(some, wanted, strict=True):
            assert a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def test_the_steps_of_adafactor_are_counted_on_the_host() -> None:
    """Each is read before an update: of a device it would have to be waited for."""
    p, q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2, device="meta"))
    ours, theirs = Adafactor([q]), torch.optim.Adafactor([p], eps=(1e-30, 1e-3))
    p.grad = torch.ones(3, 2)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[q]["step"].device.type == "cpu" and ours.state[q]["row_var"].is_meta


def test_a_state_of_torchs_adafactor_is_taken_without_its_eps() -> None:
    """As the refusal of it says. Where torch was not given any, its eps is not ours."""
    p, q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    ours, theirs = Adafactor([q]), torch.optim.Adafactor([p], lr=0.5)
    p.grad, q.grad = torch.full((3, 2), 2.0), torch.ones(3, 2)
    theirs.step()
    state = theirs.state_dict()
    for group in state["param_groups"]:
        del group["eps"]
    ours.load_state_dict(state)
    assert ours.param_groups[0]["eps"] == (1e-30, 1e-3) and ours.param_groups[0]["lr"] == 0.5
    ours.step()
    assert ours.state[q]["step"] == 2 and torch.all(ours.state[q]["row_var"] > 2)


def test_muon_is_torchs() -> None:
    """Without a word about groups; torch's state goes on here, and ours there; what it can do otherwise is refused."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 4))
    q = nn.Parameter(p.detach().clone())
    ours, theirs = Muon([p], lr=0.02, weight_decay=0.1), torch.optim.Muon([q], lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(6):
        if step == 2:
            theirs = torch.optim.Muon([q])
            theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch would take the tensors themselves
        if step == 4:
            ours = Muon([p], lr=0.1)
            ours.load_state_dict(theirs.state_dict())
        p.grad = torch.randn(8, 4)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(p, q)
    with pytest.raises(InputError, match=r"^Muon: adjust_lr_fn: None; 'match_rms_adamw'"):
        ours.load_state_dict(torch.optim.Muon([q]).state_dict())
    with pytest.raises(InputError, match=r"^Muon: params: one of shape \[4\]; matrices"):
        ours.add_param_group({"params": [nn.Parameter(torch.ones(4))]})
    assert len(ours.param_groups) == 1


def test_a_step_of_muon_calls_a_hook_once() -> None:
    AdamW([nn.Parameter(torch.ones(1))])  # torch makes the step of a class call hooks when it is first used
    called: list[int] = []
    optimizer = Muon([nn.Parameter(torch.ones(2, 2))])
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    assert called == [1]


def muons_adamw(params: list[Any], **options: Any) -> Muon:
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    return Muon([{"muon": False, **group} for group in groups], **options)


def vector(**options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, **options))


def sparse() -> nn.Parameter:
    p = vector()
    p.grad = torch.ones(4).to_sparse()
    return p


def asked(optimizer: Any, **settings: Any) -> Any:
    optimizer.param_groups[0].update(settings)
    return optimizer


@pytest.mark.parametrize("kind", [AdamW, Adafactor, Lion, muons_adamw])
@pytest.mark.parametrize(("act", "words"), [
    (lambda kind: kind([vector()], lr=-1.0), r": lr: -1\.0; a number from 0$"),
    (lambda kind: kind([vector()], lr=math.nan), r": lr: nan; a number from 0$"),
    (lambda kind: kind([{"params": [vector()], "weight_decay": -0.5}]), r": weight_decay: -0\.5; a number from 0$"),
    (lambda kind: kind([vector(dtype=torch.complex64)]), r": params: torch\.complex64 of shape \[4\]; real"),
    (lambda kind: kind([p := vector(), nn.Parameter(p.detach())]), r": params: two in the same memory, of shape \[4\]; one"),
    (lambda kind: kind([sparse()]).step(), r"^gradient: a sparse one, of a parameter of shape \[4\]; a dense one"),
    (lambda kind: kind([sparse()]).clip(), r"^gradient: a sparse one, of a parameter of shape \[4\]; a dense one"),
    (lambda kind: kind([vector()]).clip(-1.0), r": max_norm: -1\.0; a number from 0"),
    (lambda kind: asked(kind([vector()]), maximize=True).step(), r": maximize: True; False: no other is offered"),
    (lambda kind: kind([vector()]).load_state_dict(asked(kind([vector()]), maximize=True).state_dict()), r": maximize: True; F"),
    (lambda kind: asked(kind([vector()]), weight_decay=-1).step(), r": weight_decay: -1; a number from 0$"),
], ids=["lr", "nan", "decay", "complex", "shared", "sparse", "sparse-norm", "norm", "maximize", "maximize-loaded", "later"])
def test_what_no_step_can_take_is_refused(kind: Any, act: Callable[..., Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        act(kind)


@pytest.mark.parametrize("kind", [AdamW, Adafactor, Lion, muons_adamw])
def test_what_a_step_can_take(kind: Any) -> None:
    """A group without parameters, none with a gradient, numbers that are tensors, a norm that is only told, nothing to update."""
    p, empty, numbers = vector(), nn.Parameter(torch.ones(0, 3)), {"lr": torch.tensor(0.5), "weight_decay": torch.tensor(0.5)}
    if kind is not Adafactor:
        numbers["betas"] = tuple(torch.tensor([0.5, 0.75]))
    optimizer = kind([{"params": []}, {"params": [empty, p], **numbers}])
    assert optimizer.clip().tolist() == [0, 1]
    optimizer.step(clip=optimizer.clip())
    p.grad, empty.grad = torch.ones(4), torch.ones(0, 3)
    clip = optimizer.clip(math.inf, 0.5)
    assert clip.tolist() == [1, 0.5]
    optimizer.step(clip=clip)
    assert torch.equal(p, torch.full((4,), 0.25))


@pytest.mark.parametrize(("act", "words"), [
    (lambda: Lion([vector()], betas=(0.9, 1.5)), r"^Lion: betas: \(0\.9, 1\.5\); two numbers from 0, below 1$"),
    (lambda: AdamW([vector()], betas=(0.9,)), r"^AdamW: betas: \(0\.9,\); two numbers"),  # type: ignore[arg-type]
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], momentum=1.0), r"^Muon: momentum: 1\.0; a number from 0, below 1$"),
    (lambda: AdamW([vector()]).add_param_group({"params": [vector()], "moments": "fp8"}), r"^AdamW: moments: 'fp8'; fp32 or bf16"),
    (lambda: asked(AdamW([vector()]), moments="fp8").step(), r"^AdamW: moments: 'fp8'"),
    (lambda: asked(Adafactor([vector()]), d=2.0).step(), r"^Adafactor: d: 2\.0; 1\.0: no other is offered"),
    (lambda: Adafactor([{"params": [vector()], "eps": (1e-8, 1e-3)}]), "^Adafactor: eps: .1e-08, 0.001.; .1e-30, 0.001.: no"),
    (lambda: Adafactor([vector()]).load_state_dict(torch.optim.Adafactor([vector()]).state_dict()),
     r"^Adafactor: eps: \(None, 0\.001\); \(1e-30, 0\.001\): no other is offered, and a group without 'eps' has it$"),
    (lambda: EMA(nn.Linear(1, 1), 1.5), r"^EMA: decay: 1\.5; a number from 0 to 1$"),
    (lambda: EMA(nn.Linear(1, 1), math.nan), r"^EMA: decay: nan; a number from 0 to 1$"),
])  # fmt: skip
def test_settings_beyond_their_limits_are_refused(act: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        act()


OTHERS = ["adafactor", "lion", "muon"]


@pytest.mark.parametrize("name", ["adamw", *OTHERS])
def test_the_state_comes_back_to_the_bit(name: str) -> None:
    config = OptimizerConfig(name=name, lr=0.01, layer_decay=0.8)
    whole, again = small(torch.float32), small(torch.float32)
    optimizer = build_optimizer(whole, config)
    steps(whole, optimizer, range(5))
    half = {n: p.detach().clone() for n, p in whole.named_parameters()}
    tensors, content = flatten_optimizer(optimizer, whole)
    tensors = {n: t.clone() for n, t in tensors.items()}
    steps(whole, optimizer, range(5, 10))
    second = build_optimizer(again, config)
    with torch.no_grad():
        for n, p in again.named_parameters():
            p.copy_(half[n])
    restore_optimizer(second, again, tensors, content)
    steps(again, second, range(5, 10))
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    other = build_optimizer(again, replace(config, lr=0.02, weight_decay=0.3))
    with pytest.raises(InputError, match=r"weight_decay: saved with 0.01, this run has 0.3"):  # which would be without effect
        restore_optimizer(other, again, tensors, content)


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_dict_of_bf16_weights_goes_on_to_the_bit(name: str) -> None:
    """Moments may have more bits than the weights; torch's own `load_state_dict` would round them."""
    whole, again = small(torch.bfloat16), small(torch.bfloat16)
    one, two = (build_optimizer(m, OptimizerConfig(name=name, lr=0.01)) for m in (whole, again))
    steps(whole, one, range(3))
    again.load_state_dict(whole.state_dict())
    two.load_state_dict(one.state_dict())
    for model, optimizer in ((whole, one), (again, two)):
        steps(model, optimizer, range(3, 6))
    for p, q in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("cast", [False, True], ids=["loaded", "cast"])
@pytest.mark.parametrize(("before", "dtype", "off"), [(torch.float32, torch.float64, 0.02), (torch.float32, torch.bfloat16, 0.6),
                                                      (torch.bfloat16, torch.float32, 0.6), (torch.float64, torch.float16, 0.1)])
@pytest.mark.parametrize("name", ["adamw", *OTHERS])
def test_a_state_goes_on_in_another_dtype(name: str, before: torch.dtype, dtype: torch.dtype, off: float, cast: bool) -> None:
    whole, again = small(before), small(before)
    one, two = (build_optimizer(m, OptimizerConfig(name=name, lr=0.01)) for m in (whole, again))
    steps(whole, one, range(3))
    if cast:
        steps(again, two, range(3))
        again.to(dtype)
    else:
        again.load_state_dict(whole.state_dict())
        two = build_optimizer(again.to(dtype), OptimizerConfig(name=name, lr=0.01))
        two.load_state_dict(one.state_dict())
    start = [p.detach().clone() for p in whole.parameters()]
    for model, optimizer in ((whole, one), (again, two)):
        steps(model, optimizer, range(3, 6))
    for p, q, at in zip(whole.parameters(), again.parameters(), start, strict=True):
        assert q.dtype == dtype and (p.double() - q.double()).norm() <= off * (p - at).double().norm()
        kinds = {x.dtype for k, x in two.state[q].items() if k not in ("step", "master")}
        assert kinds <= {dtype, torch.promote_types(dtype, torch.float32)}


@pytest.mark.parametrize("name", OTHERS)
def test_clipping_and_bad_gradients(name: str) -> None:
    clipped, scaled = small(torch.float32), small(torch.float32)
    one, two = (build_optimizer(m, OptimizerConfig(name=name, lr=0.01)) for m in (clipped, scaled))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in noise(clipped, 1).values()))
    for m, size in ((clipped, 1.0), (scaled, 0.5 / norm)):
        for (_, p), g in zip(m.named_parameters(), noise(m, 1, size).values(), strict=True):
            p.grad = g
    clip = one.clip(0.5)
    assert float(clip[0]) == pytest.approx(norm, rel=1e-5)
    one.step(clip=clip)
    two.step()
    for p, q in zip(clipped.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
    before = [p.detach().clone() for p in clipped.parameters()]
    kept = {k: t.clone() for k, t in flatten_optimizer(one, clipped)[0].items()}
    for p in clipped.parameters():
        p.grad = torch.ones_like(p)
    next(clipped.parameters()).grad[0, 0] = math.nan
    one.step(clip=one.clip(1.0))
    assert all(torch.equal(p, q) for p, q in zip(clipped.parameters(), before, strict=True))
    assert all(torch.equal(t, kept[k]) for k, t in flatten_optimizer(one, clipped)[0].items())


@pytest.mark.parametrize(("settings", "found"), [
    (dict(name="lion", moments="int8"), r"^moments: 'int8' with name lion"),
    (dict(name="adafactor", betas=(0.5, 0.9)), r"^betas"),
    (dict(name="adamw", momentum=0.9), r"^momentum: 0\.9 with name adamw"),
])  # fmt: skip
def test_settings_of_another_optimizer_are_refused(settings: dict, found: str) -> None:
    with pytest.raises(InputError, match=found):
        OptimizerConfig(**settings)


# ---- which rate, and what is left alone -------------------------------------------------------------------------------


def test_layer_decay_is_by_depth() -> None:
    """transformers' ElectraConfig and BEiT count alike: the embeddings are under the first block, the head over the last."""
    model = mc.build("bert-base-uncased", config={"vocab": 20, "dim": 8, "hidden": 8, "heads": 2, "layers": 3, "positions": 8})
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0, layer_decay=0.5))
    set_lr(optimizer, 2.0)
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rates["embed.tokens.weight"] == rates["embed.norm.bias"] == 2 * 0.5**4
    assert [rates[f"encoder.blocks.{i}.attn.q.weight"] for i in range(3)] == [2 * 0.5**3, 2 * 0.5**2, 2 * 0.5]
    assert rates["head.transform.dense.weight"] == 2.0 and rates["encoder.blocks.2.ffn_norm.bias"] == 1.0
    sizes = {"vocab": 20, "dim": 8, "hidden": 8, "heads": 2, "head_dim": 4, "layers": 2, "decoder_layers": 2}
    optimizer = build_optimizer(mc.build("t5-small", config=sizes), OptimizerConfig(lr=1.0, layer_decay=0.5))
    rates = {n: g["lr"] for g in optimizer.param_groups for n in g["param_names"]}
    assert rates["embed.tokens.weight"] == 0.5**5
    assert rates["encoder.blocks.1.ffn.up.weight"] == rates["encoder.norm.weight"] == 0.5**3
    assert rates["decoder.blocks.0.attn.q.weight"] == 0.5**2 and rates["decoder.norm.weight"] == 1.0
    assert rates["encoder_bias.table.weight"] == 0.5**5 and rates["decoder_bias.table.weight"] == 0.5**3  # added in first blocks
    with pytest.raises(InputError, match=r"optimizer\.layer_decay: 0\.5, and the model has no blocks"):
        build_optimizer(nn.Linear(2, 2), OptimizerConfig(layer_decay=0.5))


@pytest.mark.parametrize("patterns", [("embed", "decoder.blocks.0"), ("transformer.wte", "transformer.wpe", "transformer.h.0")])
def test_what_is_frozen_has_no_state_and_does_not_move(patterns: tuple[str, ...]) -> None:
    model = small()
    frozen = model.freeze(*patterns)
    assert {n.split(".")[0] for n in frozen} == {"embed", "decoder"} and not any("blocks.1" in n for n in frozen)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen) == (p not in optimizer.state), name
    with pytest.raises(InputError, match=r"freeze: 'transformer\.wtf' matches no parameter; did you mean 'transformer\.wte'\?"):
        model.freeze("transformer.wtf")


# ---- averages ---------------------------------------------------------------------------------------------------------


def test_averages_equal_torch() -> None:
    model = small(torch.float32)
    peer = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    peer.update_parameters(model)  # the first one copies
    ema, optimizer = EMA(model, 0.9), build_optimizer(model, OptimizerConfig(lr=0.1))
    for step in range(10):
        steps(model, optimizer, range(step, step + 1))
        ema.update()
        peer.update_parameters(model)
    before = [p.detach().clone() for p in model.parameters()]
    with ema.in_place():
        for p, q, raw in zip(model.parameters(), peer.module.parameters(), before, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
            assert not torch.equal(p, raw)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_what_torch_s_schedules_end_at_is_no_rate_below_0() -> None:
    p = nn.Parameter(torch.ones(3))
    for make in (AdamW, Lion):
        optimizer = make([p], lr=3e-4)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, 0.0, 100)
        for _ in range(101):
            p.grad = torch.ones_like(p)
            optimizer.step()
            schedule.step()
        before = p.detach().clone()
        assert optimizer.param_groups[0]["lr"] < 0, "a rounding"
        optimizer.step()
        assert torch.equal(p, before)


def test_what_is_frozen_may_share_and_be_complex() -> None:
    a = nn.Parameter(torch.ones(3))
    shared = nn.Parameter(a.data, requires_grad=False)
    AdamW([a, shared, nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)])


def test_state_of_no_parameter_is_kept() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(3))])
    optimizer.state["extra"] = torch.ones(1)
    other = AdamW([nn.Parameter(torch.ones(3))])
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(other.state["extra"], torch.ones(1))
    with pytest.raises(InputError, match="AdamW: lr: '1e-3'; a number from 0"):
        AdamW([nn.Parameter(torch.ones(3))], lr="1e-3")  # type: ignore[arg-type]  # what is refused
