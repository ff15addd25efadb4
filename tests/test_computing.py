"""Where `generate` and `evaluate --lm-eval` compute, and what is said where memory runs out."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import modelcenter as mc
from modelcenter.__main__ import main as command
from modelcenter.cli import generate
from modelcenter.cli.computing import Computing
from modelcenter.errors import InputError


@pytest.mark.parametrize(("found", "named", "place"), [
    (None, "auto", "cpu"), ("cuda", "auto", "cuda:0"), ("cuda", "cpu", "cpu"), ("cuda", "cuda:1", "cuda:1"),
])  # fmt: skip
def test_an_accelerator_is_taken_where_there_is_one(found: str | None, named: str, place: str,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    here = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: here)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert Computing(device=named).place() == place


@pytest.mark.parametrize(("asked", "said"), [
    (Computing(batch=8, device="cuda"), "batch: 8: out of memory; batch=4 or dtype=bf16 or device=cpu"),
    (Computing(batch=1, device="cuda"), "dtype: auto: out of memory; dtype=bf16 or device=cpu"),
    (Computing(batch=1, device="cpu", dtype="bf16"), "device: cpu: out of memory; a smaller model, or more memory"),
])  # fmt: skip
def test_what_to_change_is_named(asked: Computing, said: str) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        with pytest.raises(InputError) as refusal, asked.room():
            raise error
        assert str(refusal.value) == said
    with pytest.raises(RuntimeError, match="another"), asked.room():
        raise RuntimeError("another")


def test_both_commands_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    mc.build("gpt2", config={"layers": 1, "dim": 8, "heads": 2, "vocab": 9}).save_pretrained(tmp_path)
    monkeypatch.setattr(generate, "answered", full)
    monkeypatch.setitem(sys.modules, "modelcenter.train.harness", SimpleNamespace(examine=full))  # which needs lm-eval
    for verb, *rest in (("generate", str(tmp_path), "a"), ("evaluate", str(tmp_path), "--lm-eval", "piqa")):
        capfd.readouterr()
        assert command([verb, *rest, "device=cpu"]) == 2
        assert capfd.readouterr().err == "modelcenter: error: batch: 8: out of memory; batch=4 or dtype=bf16\n"
