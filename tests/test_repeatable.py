"""Attention where torch.use_deterministic_algorithms asks for the same bits each time: by our kernel, padded or packed too; and
`machine.deterministic`, which asks for a run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_train import TEXT, bytes_of, recipe_of, rows
from torch.utils import deterministic

import modelcenter as mc
from modelcenter.errors import InputError
from modelcenter.layers import batch as batching
from modelcenter.layers import view
from modelcenter.layers.batch import Batch
from modelcenter.parallel.machine import Machine
from modelcenter.train import loop
from modelcenter.train.loop import train
from modelcenter.train.read import load_recipe
from modelcenter.train.repeatable import VARIABLE
from modelcenter.train.session import Session

REAL = (11, 7, 11)  # tokens of the rows
LAYERS = 2  # T5's own attention is by distance: these are its decoder's across
KINDS = [("gpt2", False), ("gpt2", True), ("llama", False), ("llama", True), ("bert", False), ("t5", False)]
MODELS = {"gpt2": "lm", "bert-base-uncased": "mlm", "llama-3.2-1b": "lm", "t5-v1_1-base": "seq2seq"}


@pytest.fixture
def asked() -> Iterator[Any]:
    yield lambda warn: torch.use_deterministic_algorithms(True, warn_only=warn)
    torch.use_deterministic_algorithms(False)


def judged(kind: str, model: Any, packed: bool, device: str = "cpu") -> list[torch.Tensor]:
    """The loss and all gradients."""
    ids = torch.randint(3, 90, (3, 11), generator=torch.Generator().manual_seed(0)).to(device)
    real = (torch.arange(11) < torch.tensor(REAL)[:, None]).to(device)
    labels = ids.masked_fill(~real, -100)
    args: dict[str, Any] = {"input_ids": ids, "attention_mask": real.long(), "labels": labels}
    if packed:
        ends = torch.tensor([0, *REAL], dtype=torch.int32).cumsum(0).int().to(device)
        where = torch.cat([torch.arange(n) for n in REAL])[None].to(device)
        args = {"input_ids": ids[real][None], "labels": labels[real][None], "position_ids": where, "cu_seq_lens_q": ends,
                "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}  # fmt: skip
    model.zero_grad()
    loss = model(**args).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("warn", [False, True])
@pytest.mark.parametrize(("kind", "packed"), KINDS)
def test_it_is_our_kernel_that_is_asked(kind: str, packed: bool, warn: bool, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here its reference. Unasked nothing changes, and where the kernel does not take the heads the mask is there."""
    model = zoo.pair(zoo.Case(kind, "default", {"bert": "mlm", "t5": "seq2seq"}.get(kind, "lm")))[1]
    calls: list[str] = []
    real, masked = view.View.by_lengths, Batch.masked
    monkeypatch.setattr(batching, "on_gpu", lambda x: True)
    monkeypatch.setattr(view, "covers", lambda q: True)
    monkeypatch.setattr(view.View, "by_lengths", lambda *args: calls.append("ours") or real(*args))
    monkeypatch.setattr(Batch, "masked", lambda *args: calls.append("mask") or masked(*args))
    wanted = judged(kind, model, packed)
    assert "ours" not in calls
    asked(warn)
    calls.clear()
    found = judged(kind, model, packed)
    assert calls.count("ours") == LAYERS and (kind == "t5" or "mask" not in calls)
    monkeypatch.setattr(view, "covers", lambda q: False)
    calls.clear()
    for one, other, same in zip(found, wanted, judged(kind, model, packed), strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max().clamp(min=1e-3) and torch.equal(same, other)
    assert "ours" not in calls and (kind == "t5" or "mask" in calls)


@pytest.mark.gpu
@pytest.mark.parametrize("warn", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_steps_on_a_gpu_have_the_same_bits(name: str, warn: bool, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences so long that torch's attention adds up in another order each time, some of them padded, with dropout."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products
    asked(warn)
    model = mc.build(name, task=MODELS[name], config={"layers": 2}, device="cuda", dtype=torch.float32).train()
    n = 512 if name.startswith("bert") else 1024
    ids = torch.randint(5, 30000, (4, n), generator=torch.Generator().manual_seed(0)).cuda()
    real = torch.arange(n, device="cuda") < torch.tensor([[n], [n - 300], [n], [n - 1]], device="cuda")
    found = []
    for _ in range(3):
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=real.long(), labels=ids.masked_fill(~real, -100)).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# ------------------------------------------------------------------------------------------------ machine.deterministic


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is drawn, and the variable is put back, which a run sets for its process."""
    monkeypatch.setattr(loop, "plot_loss", lambda folder: "not drawn")
    monkeypatch.setenv(VARIABLE, ":16:8")
    monkeypatch.delenv(VARIABLE)
    return monkeypatch


def flags() -> tuple[bool, bool, bool]:
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *asked, deterministic.fill_uninitialized_memory


def long(folder: Path, **changes: Any) -> Any:
    """A recipe whose sequences are so long, on a GPU, that torch's attention adds up in another order each time."""
    folder.mkdir()
    size = {"data.seq_len": 1024, "config": {"layers": 2, "dim": 64, "heads": 2, "positions": 1024}, "precision": "bf16"}
    recipe = recipe_of(folder, **(size | {"data.packing": False} | changes))
    (folder / "text.txt").write_text((TEXT * (200_000 // len(TEXT) + 1))[:200_000])
    return recipe


def told(folder: Path) -> list[tuple[Any, ...]]:
    """What a run's states and metrics hold from its 11th step on."""
    state = {name: digest for name, digest in bytes_of(folder / "step-20").items() if name.endswith("safetensors")}
    return [state, *(row for row in rows(folder)[1:] if row["step"] > 10)]


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_asks_for_the_same_bits(asked: bool, tmp_path: Path, still: pytest.MonkeyPatch) -> None:
    """In its steps alone: then torch is as it was."""
    before, seen, step = flags(), [], Session.step
    still.setattr(Session, "step", lambda *args: seen.append(flags()) or step(*args))
    train(recipe_of(tmp_path, max_steps=2), Machine(device="cpu", deterministic=asked))
    assert seen == [(True, False, False) if asked else before] * 2 and flags() == before


def test_what_has_no_such_kernel_is_refused_by_name(tmp_path: Path, still: pytest.MonkeyPatch) -> None:
    before = flags()
    at, what = torch.tensor([0]), torch.tensor([1.0])
    still.setattr(Session, "log", lambda *args: torch.zeros(2).put_(at, what))
    wanted = "machine.deterministic: true, and put_ has no kernel that adds up in one order; machine.deterministic=false"
    with pytest.raises(InputError) as refused:
        train(recipe_of(tmp_path, max_steps=2), Machine(device="cpu", deterministic=True))
    assert str(refused.value) == wanted and flags() == before
    still.setattr(Session, "log", lambda *args: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent"):
        train(recipe_of(tmp_path, max_steps=2, output_dir=str(tmp_path / "other")), Machine(device="cpu", deterministic=True))


def test_what_does_not_go_with_it(tmp_path: Path, still: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="deterministic: true, with compile"):
        Machine(compile=True, deterministic=True)
    still.setenv(VARIABLE, ":0:0")
    with pytest.raises(InputError, match=f"^{VARIABLE}: ':0:0', with machine.deterministic; :4096:8 or :16:8, or nothing$"):
        train(recipe_of(tmp_path, max_steps=2), Machine(device="cpu", deterministic=True))


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"data.packing": True}, {"machine.recompute": "full"}], ids=["dense", "packed", "recomputed"])
def test_runs_on_a_gpu_have_the_same_bits(more: dict[str, Any], tmp_path: Path, still: pytest.MonkeyPatch) -> None:
    """Two of them, one of which makes all calls by itself, and one that is resumed, dropout on."""
    how: Any = more.pop("machine.recompute", "none")
    found = []
    for name in ("one", "two", "resumed"):
        recipe = long(tmp_path / name, **more)
        if name == "resumed":
            folder = tmp_path / "one" / "out"
            recipe = replace(recipe, data=load_recipe(folder / "recipe.yaml").data, resume=str(folder / "step-10"))
        train(recipe, Machine(device="cuda", deterministic=True, recompute=how, cuda_graphs=name != "two"))
        found.append(told(tmp_path / name / "out"))
    assert found[0] == found[1] == found[2]
