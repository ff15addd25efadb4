"""Models whose bias is a function of the distance, by the op that makes no mask of it: the logits and gradients of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from mesh import full, spawn
from test_zoo import FIRST, compare
from torch import Tensor
from zoo import Case, inputs, pair

import modelcenter as mc
from modelcenter.layers import position
from modelcenter.layers.view import View
from modelcenter.ops.relative_attention import within

CASES = [case for case in FIRST if str(case).split("-")[0] in ("t5", "mt5", "bloom", "cpmant")]


def counted(calls: list[Any]) -> Callable[..., Tensor]:
    """`View.by_distance`, which leaves a word of each call."""
    real = View.by_distance
    return lambda *args: calls.append(args) or real(*args)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_distance(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(View, "by_distance", counted(calls))
    monkeypatch.setattr(position, "served", lambda *_: True)
    for side in ("none", "right", "left"):
        if not case.excused(f"padding-{side}"):
            compare(case, torch.float64, side)
    assert calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of the road that makes a mask."""
    _, ours = pair(case)
    ids, ends = torch.randint(3, 30, (1, 12)), torch.tensor([0, 5, 12])
    args = {"input_ids": ids, "cu_seq_lens_q": ends, **({"decoder_input_ids": ids.flip(1)} if case.seq2seq else {})}
    wanted = ours(**args)
    monkeypatch.setattr(position, "served", lambda *_: True)
    found = ours(**args)
    key = "logits" if "logits" in wanted else "last_hidden_state"
    torch.testing.assert_close(found[key], wanted[key], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case.task in ("lm", "seq2seq")], ids=str)
def test_generated(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query at a time over a cache, beams among them: the tokens of the road that makes a mask."""
    _, ours = pair(case)
    args = {k: v for k, v in inputs(case, "left").items() if k in ("input_ids", "attention_mask")}
    how = {"max_new_tokens": 12, "eos_token_id": [], "pad_token_id": 0}
    wanted = [ours.generate(**args, **how, num_beams=beams) for beams in (1, 3)]
    monkeypatch.setattr(position, "served", lambda *_: True)
    assert all(torch.equal(ours.generate(**args, **how, num_beams=beams), ids) for beams, ids in zip((1, 3), wanted, strict=True))


@pytest.mark.parametrize(("buckets", "furthest", "both"), [(32, 128, True), (32, 128, False), (10, 14, True), (512, 2048, True)])
def test_what_is_beyond_reach_is_one_number(buckets: int, furthest: int, both: bool) -> None:
    """A kernel asks for no other: the bias that it is given is the same then, and so is the table's gradient."""
    layer = position.RelativeBias(3, buckets, furthest, bidirectional=both)
    found = layer(2 * furthest, 3 * furthest)
    read = within(found.vector, found.queries, found.keys, found.reach)
    assert 0 < found.reach < 2 * furthest and torch.equal(read, found.vector)
    weights, table = torch.randn_like(read), layer.table.weight
    (one,), (other,) = (torch.autograd.grad((x * weights).sum(), table, retain_graph=True) for x in (read, found.vector))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def cut(rank: int, folders: list[tuple[str, str]]) -> None:
    """Ranks that share the heads hand their own rows of a table to the kernel, though the table is a DTensor."""
    calls: list[Any] = []
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(3))

    def trained(folder: str, machine: mc.Machine | None) -> dict[str, Tensor]:
        model = mc.load(folder, dtype="fp64", machine=machine)
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": out.loss.detach()} | {n: full(g, model.shapes[n]) for n, g in grads.items()}

    wanted = {name: trained(folder, None) for name, folder in folders}
    View.by_distance = counted(calls)  # type: ignore[method-assign]  # to see that it is taken
    # what a GPU has: autocast in low precision, and a kernel
    position.autocast_dtype = lambda device: torch.bfloat16  # type: ignore[assignment]  # of any device
    object.__setattr__(position.relative_attention, "fast", lambda x: type(x) in (Tensor, torch.nn.Parameter))
    for name, folder in folders:
        calls.clear()
        found = trained(folder, mc.Machine(device="cpu", tensor_parallel=2))
        assert calls, f"{name}: a mask was made"
        assert found.keys() == wanted[name].keys()
        for n, x in found.items():
            torch.testing.assert_close(x, wanted[name][n], rtol=1e-9, atol=1e-9, msg=f"{name}: {n}")


def test_ranks_that_share_the_heads_make_no_mask() -> None:
    spawn(2, cut, [(str(case), zoo.reference(case)[1]) for case in CASES if case.task in ("lm", "seq2seq")])
