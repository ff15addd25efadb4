"""Optimizers and schedules: transformers' tables exactly, weight decay where it belongs."""

import pytest
import torch
import transformers
from torch import nn

from modelcenter.errors import InputError
from modelcenter.optim.config import OptimizerConfig, ScheduleConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.optim.schedules import lr_factor


def peer_table(scheduler, total: int) -> list[float]:
    """The factors transformers' scheduler gives at steps 0..total."""
    return [scheduler.lr_lambdas[0](step) for step in range(total + 1)]


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 17), (1, 17), (5, 17), (16, 17), (17, 17)])
def test_schedules_equal_transformers(warmup: int, total: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    peers = {
        "linear": transformers.get_linear_schedule_with_warmup(optimizer, warmup, total),
        "cosine": transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total),
        "constant": transformers.get_constant_schedule_with_warmup(optimizer, warmup),
    }
    for name, peer in peers.items():
        config = ScheduleConfig(name=name, warmup_steps=warmup, min_lr_ratio=0.0)
        assert [lr_factor(config, step, total) for step in range(total + 1)] == peer_table(peer, total), name


def test_min_lr_equals_transformers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    peer = transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 4, 30, min_lr_rate=0.1)
    config = ScheduleConfig(name="cosine", warmup_steps=4, min_lr_ratio=0.1)
    assert [lr_factor(config, step, 30) for step in range(31)] == peer_table(peer, 30)


@pytest.mark.parametrize("name", ["linear", "cosine"])
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
