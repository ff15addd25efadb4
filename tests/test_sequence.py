"""Sequence parallelism: who has what between layers, sequences that ranks do not divide, generation and refusals. Training steps
are in test_apply.py."""

from typing import Any

import pytest
import torch
from mesh import spawn
from test_apply import CASES, machine_of, model_of
from zoo import inputs, scores

import modelcenter as mc
from modelcenter.layers import Block
from modelcenter.parallel.apply import join

SPREAD = {"tensor_parallel": 2, "sequence_parallel": True}
FEW = [case for case in CASES if case.kind in ("gpt2", "t5", "bert")]


def parts(rank: int) -> None:
    for case in FEW:
        model = model_of(case, machine_of(**SPREAD))
        seen: list[Any] = []
        for block in model.modules():
            if isinstance(block, Block):
                block.register_forward_hook(lambda block, args, out, seen=seen: seen.append((out.to_local().shape, out.shape)))
        for length, own in ((8, 4), (7, 7)):
            seen.clear()
            ids = torch.arange(2 * length).view(2, length) + 2
            model(ids, labels=ids).loss.backward()
            assert {(local[1], whole[1]) for local, whole in seen} == {(own, length)}, f"{case}: {seen}"
            for name, p in model.named_parameters():  # an optimizer reads what a rank has, and full_tensor() would sum it up
                assert not any(place.is_partial() for place in getattr(p.grad, "placements", ())), f"{case}: {name}"


def test_between_layers_ranks_have_parts() -> None:
    spawn(2, parts)


def heard(rank: int) -> None:
    """A hook of one's own on a norm's weight, from before the first forward."""
    model = model_of(FEW[0], machine_of(**SPREAD))
    norms: dict[str, Any] = {name: p for name, p in model.named_parameters() if "norm" in name and hasattr(p, "placements")}
    seen: list[Any] = []
    for p in norms.values():
        p.register_hook(seen.append)
    ids = torch.arange(16).view(2, 8) + 2
    model(ids, labels=ids).loss.backward()
    assert len(seen) == len(norms) > 0, f"{len(seen)} of {len(norms)}"
    for name, p in norms.items():
        assert not any(place.is_partial() for place in p.grad.placements), name


def test_norms_gradients_are_sums_beside_hooks_of_ones_own() -> None:
    spawn(2, heard)


def whole(rank: int) -> None:
    join(machine_of(**SPREAD))
    for case in FEW:
        alone, spread = (model_of(case, machine).eval() for machine in (None, machine_of(**SPREAD)))
        for length in (6, 5, 1):
            args = {key: value[:, :length] for key, value in inputs(case).items()}
            wanted, found = alone(**args, output_hidden_states=True), spread(**args, output_hidden_states=True)
            torch.testing.assert_close(scores(found), scores(wanted), rtol=1e-10, atol=1e-10)
            assert len(wanted.hidden_states) == len(found.hidden_states) > 1
            for a, b in zip(wanted.hidden_states, found.hidden_states, strict=True):
                assert a.shape == b.shape and float((a - b).detach().abs().max()) < 1e-9, f"{case}: hidden states"
        if case.task != "mlm":
            ids = inputs(case)["input_ids"][:1, :5]
            texts = [model.generate(ids, max_new_tokens=4, do_sample=False) for model in (alone, spread)]
            assert torch.equal(*texts), f"{case}: {texts}"


def test_outputs_and_generation_are_those_of_one_process() -> None:
    spawn(2, whole)


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(mc.InputError, match=r"sequence_parallel: true with tensor_parallel=1, which cuts nothing"):
        mc.build("gpt2", config={"layers": 1}, machine=machine_of(sequence_parallel=True))
