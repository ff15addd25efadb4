"""Steps of generation that are all the same calls, as a CUDA graph needs them: tokens, calls, ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Case

from modelcenter.generate import run, state, steps
from modelcenter.generate.stop import Over
from modelcenter.layers import Rotary, cache
from modelcenter.ops._graph import recorded

GENERATES = [c for c in zoo.cases() if c.task in ("lm", "seq2seq")]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 2, "repetition_penalty": 1.3},
    "drawn": {"do_sample": True, "seed": 1, "num_return_sequences": 2},
}  # fmt: skip


@contextmanager
def by_steps(patch: pytest.MonkeyPatch, record: bool = False) -> Iterator[None]:
    """Steps as on a GPU, on any device; their length has to double, and memory that was not written holds no numbers."""

    def taken(x: torch.Tensor, ahead: int) -> torch.Tensor:
        return make(x, ahead).fill_(float("nan"))

    make = cache.taken
    with patch.context() as m:
        m.setattr(cache, "taken", taken)
        m.setattr(steps, "SPAN", 16)
        m.setattr(state, "suits", lambda state: state.ids.size(1) - state.length > 2)
        m.setattr(state, "Steps", partial(steps.Steps, record=record))
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", GENERATES, ids=str)
def test_the_tokens_are_those_of_steps_that_grow(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = zoo.pair(case)
    if any(isinstance(m, Rotary) and m.frequencies.by_length for m in ours.modules()):  # the host reads how long the text is
        assert any(map(steps.odd, ours.modules()))
        return
    assert not any(map(steps.odd, ours.modules()))
    for side in ("none", "left"):
        args = {k: v for k, v in zoo.inputs(case, side).items() if k in ("input_ids", "attention_mask")}
        grown = ours.generate(**args, max_new_tokens=24, eos_token_id=[], pad_token_id=0, **WAYS[way])
        with by_steps(monkeypatch):
            found = ours.generate(**args, max_new_tokens=24, eos_token_id=[], pad_token_id=0, **WAYS[way])
        assert found.tolist() == grown.tolist()


class Calls(TorchDispatchMode):
    """What is called, with every shape and every number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))
        self.seen.append((str(func), *((a.shape, a.stride()) if isinstance(a, torch.Tensor) else str(a) for a in given)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("case", [c for c in GENERATES if c.variant == "default"], ids=str)
def test_every_step_is_the_same_calls_and_waits_for_nothing(case: Case, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = zoo.pair(case)
    logs: list[list[tuple[Any, ...]]] = []
    made = steps.Steps.step

    def logged(self: steps.Steps) -> torch.Tensor:
        with Calls() as calls:
            out = made(self)
        logs.append(calls.seen)
        return out

    args = {k: v for k, v in zoo.inputs(case, side).items() if k in ("input_ids", "attention_mask")}
    with by_steps(monkeypatch):
        monkeypatch.setattr(steps.Steps, "step", logged)
        ours.generate(**args, max_new_tokens=14, eos_token_id=[], pad_token_id=0)
    same = [log for log in logs if len(log) == len(logs[-1])]
    assert len(logs[-1]) > 20 and len(logs) > 8
    assert len({str(log) for log in same}) <= 2 and logs[-1] == logs[-2] == logs[-3]
    assert not any("_local_scalar_dense" in call[0] or "nonzero" in call[0] for call in logs[-1])


def test_what_ends_early_is_cut_though_it_is_known_late(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = zoo.pair(Case("gpt2", "default", "lm"))
    ids = zoo.inputs(Case("gpt2", "default", "lm"))["input_ids"]
    free = ours.generate(ids, max_new_tokens=12, eos_token_id=[])[:, 11:]
    for ends in ([], [int(t) for t in free[:, 3]], [int(t) for t in free[:, 10]], [int(t) for t in free[:, 11]]):
        wanted = ours.generate(ids, max_new_tokens=12, eos_token_id=ends, pad_token_id=0)
        with monkeypatch.context() as m:
            m.setattr(run, "Over", lambda late: Over(late=True))
            found = ours.generate(ids, max_new_tokens=12, eos_token_id=ends, pad_token_id=0)
        assert found.tolist() == wanted.tolist()
    late = Over(late=True)
    assert [late(torch.tensor(flags)) for flags in ([False, True], [True, True], [True, True])] == [False, False, True]


def test_what_cannot_be_recorded_goes_on_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(work: Any, device: torch.device) -> None:
        raise RuntimeError("called a synchronizing operation\nand so on")

    case = Case("llama", "default", "lm")
    _, ours = zoo.pair(case)
    ids = zoo.inputs(case)["input_ids"]
    wanted = ours.generate(ids, max_new_tokens=30, eos_token_id=[])
    monkeypatch.setattr(steps, "recorded", refused)
    with by_steps(monkeypatch, record=True), pytest.warns(UserWarning, match="CUDA graph: called a sync") as told:
        found = ours.generate(ids, max_new_tokens=30, eos_token_id=[])
    assert found.tolist() == wanted.tolist() and len(told) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in GENERATES if c.variant == "default"], ids=str)
def test_a_graph_writes_what_calls_write(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 what steps that grow write; in lower precision, where attention rounds elsewhere, what the same steps do by calls."""
    _, ours = zoo.pair(case, dtype)
    ours.cuda()
    made = []

    def counted(work: Any, device: torch.device) -> Any:
        made.append(work)
        return recorded(work, device)

    monkeypatch.setattr(steps, "recorded", counted)
    for side, way in (("none", "greedy"), ("left", "greedy"), ("none", "beams"), ("left", "drawn")):
        args = {k: v.cuda() for k, v in zoo.inputs(case, side).items() if k in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": 40, "eos_token_id": [], "pad_token_id": 0, **WAYS[way]}
        with monkeypatch.context() as m:
            if dtype == torch.float32:
                m.setattr(state, "suits", lambda state: False)
            else:
                m.setattr(state, "Steps", partial(steps.Steps, record=False))
            wanted = ours.generate(**args, **options)
        assert ours.generate(**args, **options).tolist() == wanted.tolist()
    assert len(made) == 4
