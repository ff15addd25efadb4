"""Ranks that should hold the same weights and do not are found at the next check."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here once, and not in each rank
from mesh import spawn
from test_ranks import run_of

import modelcenter as mc
from modelcenter.parallel import replicas
from modelcenter.parallel.apply import join
from modelcenter.train import loop
from modelcenter.train.loop import train

MESHES = {"tp2": {"tensor_parallel": 2}, "hsdp": {"replicate": 2, "fsdp": 2}, "fsdp2xtp2": {"fsdp": 2, "tensor_parallel": 2}}
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
    pytest.mark.foreseen("what_is_wrong[False]"),
]



def machine_of(mesh: str, **more: Any) -> mc.Machine:
    return mc.Machine(device="cpu", threads=1, **MESHES[mesh], **more)


def flip(parameter: torch.Tensor, element: int, bit: int) -> None:
    """One bit of one element of this rank's part."""
    part: Any = parameter.detach()
    part = part.to_local() if hasattr(part, "to_local") else part
    flat = part.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
    flat[element] ^= torch.tensor(1, dtype=flat.dtype) << bit


def flips(rank: int, mesh: str, dtype: str) -> None:
    """Every fifth tensor that several ranks hold alike, first and last element, lowest and highest bit, on one rank."""
    machine = machine_of(mesh)
    ranks = join(machine)
    model = mc.build("gpt2", config={"layers": 2, "dim": 16, "heads": 2, "positions": 8, "vocab": 12}, dtype=dtype, machine=machine)
    held = [(name, p, cuts) for cuts, tensors in replicas.held_alike(model, ranks).items() for name, p in tensors]
    assert held
    replicas.check_replicas(model, ranks, 0)
    found = 0
    for k, (name, p, cuts) in enumerate(held):
        if k % 5:
            continue
        for element, bit in ((0, 0), (-1, torch.empty(0, dtype=p.dtype).element_size() * 8 - 2)):
            victim = (k + bit) % ranks.size
            empty = replicas.bits(p).new_zeros(1) + (p.to_local().numel() if hasattr(p, "to_local") else p.numel())
            if not int(ranks.gathered(empty)[victim]):
                continue
            if rank == victim:
                flip(p, element, bit)
            with pytest.raises(mc.InputError) as caught:
                replicas.check_replicas(model, ranks, 7)
            group = next(group for group in ranks.alike(set(cuts)) if victim in group)
            text = str(caught.value)
            assert text.startswith(f"step 7: {name}: "), text
            either = f"ranks {', '.join(map(str, group))} have different bits", f"rank {victim} has other bits"
            assert any(words in text for words in either), text
            if rank == victim:
                flip(p, element, bit)
            replicas.check_replicas(model, ranks, 8)
            found += 1
    assert found >= 4


@pytest.mark.parametrize("mesh", ["tp2", "hsdp", pytest.param("fsdp2xtp2", marks=pytest.mark.slow)])
def test_one_flipped_bit_is_found(mesh: str) -> None:
    spawn(2 if mesh == "tp2" else 4, flips, mesh, "bf16" if mesh == "tp2" else "fp32")


def diverges(rank: int, recipe: Any, wrong: bool) -> None:
    """A step after which rank 1 alone has another bit in a norm: the check after it says so, and nothing is saved."""
    loop.plot_loss = lambda folder: "not drawn"
    real, count = replicas.check_replicas, [0]

    def check(model: Any, ranks: Any, step: int) -> None:
        count[0] += 1
        if wrong and rank == 1 and step == 4:
            flip(dict(model.named_parameters())["decoder.norm.weight"], 3, 5)
        real(model, ranks, step)

    loop.check_replicas = check
    machine = machine_of("tp2", check_steps=2)
    if not wrong:
        assert train(recipe, machine).step == 8 and count[0] == 4
        return
    said = r"step 4: decoder\.norm\.weight: ranks 0, 1 have different bits; an earlier state to resume from"
    with pytest.raises(mc.InputError, match=said):
        train(recipe, machine)


@pytest.mark.parametrize("wrong", [True, False])
def test_a_run_stops_before_it_saves_what_is_wrong(wrong: bool, tmp_path: Path) -> None:
    spawn(2, diverges, run_of(tmp_path), wrong)
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == ([] if wrong else ["step-4", "step-8"])


def test_who_is_odd() -> None:
    assert replicas.who([0, 1, 2, 3], [5, 5, 7, 5]) == "rank 2 has other bits than ranks 0, 1, 3"
    assert replicas.who([0, 2], [5, 1, 7]) == "ranks 0, 2 have different bits"
    assert replicas.who([0, 1, 2, 3, 4], [1, 9, 9, 9, 2]) == "ranks 0, 4 have other bits than ranks 1, 2, 3"


def test_sums_of_bits_do_not_cancel() -> None:
    a = torch.tensor([3, 5, -8])
    assert int(replicas.folded(a)) != int(replicas.folded(a.flip(0))) and torch._dynamo
    assert int(replicas.bits(torch.tensor([1.0, -0.0]))) != int(replicas.bits(torch.tensor([1.0, 0.0])))
    whole = torch.randn(7)
    assert int(replicas.bits(whole[1:])) == int(replicas.bits(whole[1:].clone())), "where it lies is no matter"
    assert int(replicas.bits(whole[:5])) != int(replicas.bits(whole[1:6]))
