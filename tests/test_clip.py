"""mc.clip_grad_norm_ is torch's of one process, on every mesh."""

import math
from typing import Any

import pytest
import torch
from mesh import DEVICE, full, spawn

import modelcenter as mc
from modelcenter.parallel.apply import join
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.ranks import ALONE
from modelcenter.train.step import accumulate

SIZES = {"layers": 2, "dim": 16, "heads": 2, "positions": 16, "vocab": 41}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel": 2}, "sequence": {"tensor_parallel": 2, "sequence_parallel": True}, "host": {"offload": True},
    "host x tp": {"tensor_parallel": 2, "offload": True}, "copies": {"replicate": 2}, "fsdp": {"fsdp": 2},
    "fsdp x tp": {"fsdp": 2, "tensor_parallel": 2}, "hybrid": {"fsdp": 2, "replicate": 2},
}  # fmt: skip

# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def clipped(rank: int, meshes: list[str]) -> None:
    ids = torch.randint(41, (4, 9), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    for name in meshes:
        machine = Machine(device=DEVICE, **MESHES[name])
        alone = mc.build("gpt2", config=SIZES, dtype="fp64", seed=3, device=DEVICE).eval()
        model, ranks = mc.build("gpt2", config=SIZES, dtype="fp64", seed=3, machine=machine).eval(), join(machine)
        for one, rows, of in ((alone, ids, ALONE), (model, ids[ranks.share :: ranks.shares], ranks)):
            accumulate(one, [{"input_ids": rows, "labels": rows}], "lm", targets=4 * 8, ranks=of)
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), math.inf)
        assert mc.clip_grad_norm_(model, math.inf) == pytest.approx(float(wanted), rel=1e-6), name
        limit = 0.3 * float(wanted)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), limit)
        mc.clip_grad_norm_(model.parameters(), limit)
        for key, p in alone.named_parameters():
            mine = full(model.get_parameter(key).grad, p.shape).to(p.device)
            torch.testing.assert_close(mine, p.grad, rtol=1e-5, atol=1e-9, msg=lambda m, n=f"{name} {key}": f"{n}: {m}")
        for most in (2 * limit, math.inf):  # below the limit nothing is scaled
            assert mc.clip_grad_norm_(model, most) == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_a_mesh_it_is_that_of_one_process(ranks: int) -> None:
    spawn(ranks, clipped, [name for name, machine in MESHES.items() if Machine(**machine).ranks == ranks])


def test_tensors_of_several_kinds() -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(3, dtype=kind)) for kind in (torch.float32, torch.bfloat16, torch.float32))
    a.grad, b.grad = torch.tensor([3.0, 0, 0]), torch.tensor([0, 4.0, 0], dtype=torch.bfloat16)
    assert mc.clip_grad_norm_(iter([a, b, c]), 1.0) == 5.0
    assert torch.allclose(a.grad, torch.tensor([0.6, 0, 0])) and b.grad[1] == torch.tensor(0.8).bfloat16()
    assert mc.clip_grad_norm_(c, 1.0) == 0 and mc.clip_grad_norm_([], 1.0) == 0
    a.grad = torch.tensor([math.inf, 1.0, 0])
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf; nothing was scaled"):
        mc.clip_grad_norm_([a], 1.0, error_if_nonfinite=True)
    assert a.grad[1] == 1
    assert mc.clip_grad_norm_([a], 1.0) == math.inf and a.grad[1] == 0
    a.grad = torch.tensor([3.0, 0, 4.0])
    assert mc.clip_grad_norm_(a, 0.0) == 5.0 and not a.grad.any()
    with pytest.raises(mc.InputError, match=r"^clip_grad_norm_: norm_type: 1; 2: no other is offered"):
        mc.clip_grad_norm_([a], 1.0, 1)
    with pytest.raises(mc.InputError, match=r"^clip_grad_norm_: max_norm: -1; a number from 0; inf: nothing is clipped"):
        mc.clip_grad_norm_([a], -1)
