"""The memory that a plan foresees against the memory that a step takes, counted by torch's profiler, allocation by allocation."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import modelcenter as mc
from modelcenter.adapter.config import AdapterConfig
from modelcenter.checkpoint.match import LoadReport
from modelcenter.cli import plan as cli
from modelcenter.cli.arguments import Arguments
from modelcenter.cli.plan import BARE
from modelcenter.config import bind
from modelcenter.data.objective import objectives
from modelcenter.errors import InputError, size
from modelcenter.ops._kernels import available
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.ema import EMA
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel import device
from modelcenter.parallel.blocks import recompute as recompute_blocks
from modelcenter.parallel.machine import Machine
from modelcenter.plan import chips
from modelcenter.plan.costs import Costs
from modelcenter.plan.deep import Deep
from modelcenter.plan.estimate import Job
from modelcenter.plan.need import Plan
from modelcenter.plan.rehearse import Conditions, rehearse
from modelcenter.plan.survey import settings
from modelcenter.plan.tally import highest
from modelcenter.train import choose, fit, paper
from modelcenter.train.fit import Verdict, verdict, widest
from modelcenter.train.prepare import prepare
from modelcenter.train.read import load_recipe
from modelcenter.train.recipe import Recipe
from modelcenter.train.resolve import resolve
from modelcenter.train.step import autocast

CPU = torch.device("cpu")
MACHINE = Machine(device="cpu", threads=1)
LLAMA = {"layers": 3, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "vocab": 3000}
GPT = {"layers": 3, "dim": 64, "heads": 4, "vocab": 3000, "positions": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt2", GPT),
    "bert": ("bert-base-uncased", {**GPT, "hidden": 256}),
    "t5": ("t5-small", {"layers": 2, "decoder_layers": 2, "dim": 64, "heads": 4, "head_dim": 16, "hidden": 128, "vocab": 3000}),
    "llama": ("llama-3.2-1b", LLAMA),
    "bloom": ("bloom-560m", {"layers": 3, "dim": 64, "heads": 4, "vocab": 3000}),
    "cpm-ant": ("cpm-ant-10b", {"layers": 3, "dim": 64, "heads": 4, "head_dim": 16, "hidden": 128, "vocab": 3000}),
}
CASES: list[dict[str, Any]] = [
    *({"family": family} for family in FAMILIES), *({"family": family, "recompute": "full"} for family in FAMILIES),
    {"family": "gpt", "amp": True}, {"family": "bert", "amp": True, "recompute": "full"}, {"family": "gpt", "forwards": 3},
    {"family": "gpt", "optimizer": {"name": "adafactor"}}, {"family": "bert", "optimizer": {"name": "lion"}},
    {"family": "llama", "optimizer": {"name": "muon"}}, {"family": "gpt", "optimizer": {"moments": "bf16"}},
    {"family": "gpt", "ema": True}, {"family": "llama", "adapter": {"name": "lora"}}, {"family": "gpt", "packed": True},
    {"family": "llama", "adapter": {"name": "lora", "quantize": "nf4"}}, {"family": "t5", "packed": True},
    {"family": "bert", "sparse": True}, {"family": "gpt", "sparse": True},
    {"family": "gpt", "evaluates": True, "recompute": "full"},
    *({"family": family, "recompute": "selective"} for family in ("gpt", "bert", "llama")),
    {"family": "gpt", "optimizer": {"moments": "int8"}, "layers": 1},
]  # fmt: skip


def case_name(case: dict[str, Any]) -> str:
    return " ".join(str(v) if isinstance(v, str) else k if v is True else f"{k} {v}" for k, v in case.items())


def model_of(case: dict[str, Any]) -> Any:
    name, config = FAMILIES[case["family"]]
    model = mc.build(name, config={**config, **({"layers": case["layers"]} if "layers" in case else {})}).train()
    if "adapter" in case:
        model.load_report = LoadReport()  # nothing is new in it
        mc.add_adapter(model, AdapterConfig(**case["adapter"]))
    return model.train()


def batch_of(case: dict[str, Any]) -> dict[str, Any]:
    ids = torch.randint(10, 3000, (4, 64), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    if case.get("sparse"):
        labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)) > 0.2] = -100
    if not case.get("packed"):
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    bounds = torch.arange(5, dtype=torch.int32) * 64
    positions = torch.arange(64).repeat(4)[None]
    return {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "position_ids": positions, "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds, "max_length_q": 64, "max_length_k": 64}  # fmt: skip


def measured(model: Any, batch: dict[str, Any], case: dict[str, Any], compute: Callable[[], AbstractContextManager[Any]]) -> int:
    """The peak of a second step, evaluation included, in the profiler's record of allocations. Without oneDNN, whose products in
    bf16 pack their operands on some processors and not on others."""
    optimizer = build_optimizer(model, OptimizerConfig(**case.get("optimizer", {})))
    ema = EMA(model, 0.9) if case.get("ema") else None

    @torch.backends.mkldnn.flags(enabled=False)
    def step() -> None:
        for _ in range(case.get("forwards", 1)):
            with compute():
                loss = model(**batch, num_items_in_batch=1).loss
            loss.backward()
            del loss
        optimizer.step(clip=optimizer.clip(1.0))
        optimizer.zero_grad(set_to_none=True)
        if case.get("evaluates"):
            model.eval()
            with torch.no_grad(), compute():
                model(**batch, num_items_in_batch=1)
            model.train()

    step()
    there = {id(t): t for t in (*model.parameters(), *model.buffers(), *batch.values(), *(ema.averages.values() if ema else ()),
                                *(v for s in optimizer.state.values() for v in s.values())) if isinstance(t, torch.Tensor)}
    now = most = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there.values()}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    assert len(events) > 50, "the measurement sees nothing"
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.filterwarnings("ignore")  # the profiler's
@pytest.mark.parametrize("case", CASES, ids=map(case_name, CASES))
def test_the_peak_is_foreseen(case: dict[str, Any]) -> None:
    """Within half a percent: what is not seen are states of random generators, and what the measurement begins with."""
    model, batch = model_of(case), batch_of(case)
    compute = partial(torch.autocast, "cpu", torch.bfloat16) if case.get("amp") else nullcontext
    targets = batch["labels"][..., 1:] if case["family"] not in ("bert", "t5") else batch["labels"]
    if case.get("packed") and case["family"] == "gpt":
        targets = batch["labels"][..., 1:]
    share = int((targets != -100).sum()) / batch["labels"].numel()

    def build(twin: Any) -> tuple[Any, Any]:
        return build_optimizer(twin, OptimizerConfig(**case.get("optimizer", {}))), EMA(twin, 0.9) if case.get("ema") else None

    before = torch.get_rng_state(), {name: p.data_ptr() for name, p in model.named_parameters()}
    how = Conditions(build, compute, CPU, share, case.get("evaluates", False))
    step = rehearse(model, batch, how, forwards=case.get("forwards", 1), recompute=case.get("recompute", "none"))
    parts = highest(Deep([(1, step)]).moments())
    assert torch.equal(before[0], torch.get_rng_state())  # and nothing was drawn
    assert before[1] == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert all(p.grad is None and not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())
    weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    assert parts["weights"] == sum(weights.values())
    if case.get("recompute"):
        recompute_blocks(model, case["recompute"])
    real = measured(model, batch, case, compute)
    assert abs(parts.total() / real - 1) < 0.005, f"{parts.total()} foreseen, {real} measured: {dict(parts)}"


def peak_with(model: Any, batch: dict[str, Any], config: OptimizerConfig) -> Any:
    how = Conditions(lambda m: (build_optimizer(m, config), None), nullcontext, CPU)
    return highest(Deep([(1, rehearse(model, batch, how))]).moments())


def test_packed_sequences_see_themselves_alone() -> None:
    """Whose attention is that of as many rows; without a kernel it is products of matrices."""
    found = []
    for packed in (False, True):
        batch = batch_of({"packed": packed})
        batch.pop("attention_mask", None)
        model = model_of({"family": "gpt"})
        step = rehearse(model, batch, Conditions(lambda m: (build_optimizer(m, OptimizerConfig()), None), nullcontext, CPU))
        found.append([sum(w.flops * n for w, n in step.work.items() if w.kind == kind) for kind in ("attention", "matmul")])
    assert found[0] == found[1] and (found[0][0] > 0) is available("cpu")


def test_labels_of_one_a_sequence_go_to_the_device_too() -> None:
    """A classifier's loss has one device, be it by a kernel or by the reference."""
    sizes = {"layers": 1, "dim": 16, "heads": 2, "hidden": 32, "positions": 16, "vocab": 99}
    model = mc.build("bert-base-uncased", config=sizes, task="classify", id2label={0: "no", 1: "yes"})
    batch = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "attention_mask": torch.ones(4, 8, dtype=torch.long),
             "labels": torch.zeros(4, dtype=torch.long)}  # fmt: skip
    build = partial(lambda config, m: (build_optimizer(m, config), None), OptimizerConfig())
    where = [Conditions(build, nullcontext, torch.device(device), evaluates=True) for device in ("cpu", "meta")]
    steps = [rehearse(model, batch, how) for how in where]
    assert all(sum(step.work.values()) > 0 for step in steps)


def test_moments_are_what_arithmetic_says() -> None:
    """Two numbers a weight, and a step's; a row and a column of a matrix."""
    case = {"family": "gpt"}
    model, batch = model_of(case), batch_of(case)
    count = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    parts = peak_with(model, batch, OptimizerConfig())
    assert parts["optimizer"] == 8 * count + 4 * tensors and parts["weights"] == 4 * count
    parts = peak_with(model, batch, OptimizerConfig(moments="bf16"))
    assert parts["optimizer"] == 4 * count + 4 * tensors
    parts = peak_with(model, batch, OptimizerConfig(name="adafactor"))
    assert 0 < parts["optimizer"] < 0.1 * 4 * count


# ------------------------------------------------------------------------------------------------------------- verdicts

TINY = {"layers": 2, "dim": 32, "heads": 2, "positions": 64}
PROBED = cache(chips.probe)


@pytest.fixture(autouse=True)
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second for each verdict, and no verdict here depends on how fast this CPU is."""
    monkeypatch.setattr(chips, "probe", PROBED)


@pytest.fixture
def rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts on one recipe share their rehearsals: what they are told of the memory there is, is no part of them."""
    known: dict[Any, Deep] = {}

    class Shared(Costs):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.known = known

    monkeypatch.setattr(fit, "Costs", Shared)


TINY_T5 = {"dim": 32, "hidden": 64, "heads": 2, "head_dim": 16, "layers": 2, "decoder_layers": 2}
ROWS = {
    "lm": {"text": "f of x is y and more of it"}, "mlm": {"text": "f of x is y"}, "classify": {"text": "f(x)", "label": "yes"},
    "seq2seq": {"source": "f of x", "target": "y"}, "regress": {"text": "f of x", "label": 0.5},
    "tag": {"tokens": ["f", "of", "x"], "tags": ["B-F", "O", "B-X"]}, "contrastive": {"text": "f of x", "pair": "y of f"},
    "qa": {"question": "x?", "context": "f of x, y.", "answers": {"text": ["y"], "answer_start": [8]}},
}  # fmt: skip
OWN = {"contrastive": {"data.pair_key": "pair"}, "qa": {"data.stride": 2}}
MODELS = {"lm": ("gpt2", TINY), "seq2seq": ("t5-small", TINY_T5)}


def recipe_of(folder: Path, objective: str = "lm", **changes: Any) -> Any:
    rows = [{**row, **({"text": f"{n} {row['text']}"} if "text" in row else {})} for n, row in enumerate([ROWS[objective]] * 40)]
    if objective == "classify":
        rows = [{**row, "label": "yes" if n % 2 else "no"} for n, row in enumerate(rows)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "base.yaml").write_text("{}\n")
    model, config = MODELS.get(objective, ("bert-base-uncased", TINY))
    return load_recipe(folder / "base.yaml", {
        "model": model, "init": "random", "config": config, "tokenizer": "roberta:300", "objective": objective,
        "data.path": str(folder / "data.jsonl"), "data.seq_len": 32, "data.eval_fraction": 0.2, "batch": 8, "micro_batch": 4,
        "precision": "fp32", "max_steps": 4, "output_dir": str(folder / "out"),
        **OWN.get(objective, {}), **changes,
    })  # fmt: skip


def asked(recipe: Any, machine: Machine = MACHINE, **options: Any) -> tuple[Any, Any]:
    recipe, device = resolve(recipe, machine)
    setup = prepare(recipe, machine, device, meta=True)
    return verdict(recipe, machine, device, setup, partial(autocast, recipe.precision, device), **options), setup


@pytest.mark.filterwarnings("ignore:.* pairs have a text of another:UserWarning")
@pytest.mark.parametrize(("objective", "packing"), [
    *(pytest.param(objective, "padded", id=f"{objective}-padded") for objective in ROWS),
    *(pytest.param(objective, "padding_free", id=f"{objective}-padding_free",  # the labels of some are of the same shape
                   marks=pytest.mark.slow if objective in ("regress", "tag") else ()) for objective in ROWS if objective != "qa"),
])  # fmt: skip
def test_every_objective_has_a_verdict(tmp_path: Path, objective: str, packing: str) -> None:
    """For the largest batch that can come, which the model really takes."""
    _, config = MODELS.get(objective, ("", TINY))
    one = {**config, **{key: 1 for key in config if key.endswith("layers")}}
    recipe = recipe_of(tmp_path, objective, config=one, **({"data.padding_free": True} if packing == "padding_free" else {}))
    found, setup = asked(recipe)
    assert isinstance(found, Verdict) and found.plan.fits and found.batch == "4 x 32 tokens", found
    assert all(p.is_meta for p in setup.model.parameters())
    _, batches = next(setup.loader.steps(micro_batch=4))
    wide = widest(batches[0], 4, recipe, setup.model.encoder_decoder)
    assert wide.keys() == batches[0].keys()
    tokens = wide["input_ids"].numel()
    assert tokens == 4 * 32 * (2 if objective == "contrastive" else 1) >= batches[0]["input_ids"].numel()
    real = prepare(*resolve_all(recipe)).model
    out = real(**wide, num_items_in_batch=1)
    assert out.loss is not None and all(wide[k].dtype == v.dtype for k, v in batches[0].items() if isinstance(v, torch.Tensor))


CODES = {"adapter.name": "dora", "adapter.quantize": "nf4"}


@pytest.mark.parametrize(("change", "degrees"), [
    (CODES, {"tensor_parallel": 2}), ({"objective": "classify"}, {"fsdp": 2}),
], ids=["codes", "head"])  # fmt: skip
def test_ranks_have_a_verdict_on_an_adapter(tmp_path: Path, change: dict[str, str], degrees: dict[str, int]) -> None:
    """From a folder, of whose model a rank has a part: it is rehearsed whole, with a head that is new and trained."""
    mc.build("bert-base-uncased", config={**TINY, "dim": 128, "vocab": 300}).save_pretrained(tmp_path / "model")
    there = {"init": "pretrained", "model": str(tmp_path / "model"), "config": {}, "objective": "mlm"}
    recipe = recipe_of(tmp_path, **{**there, "adapter.name": "lora", "adapter.targets": ["all-linear"], **change})
    setup = prepare(*resolve_all(recipe), meta=True)
    models = fit.whole(setup.model, recipe), setup.model
    found, wanted = ([(n, p.shape, p.requires_grad) for n, p in model.named_parameters()] for model in models)
    assert found == wanted
    said = verdict(recipe, replace(MACHINE, **degrees), CPU, setup, nullcontext)
    assert isinstance(said, Verdict) and said.plan.fits, said


def resolve_all(recipe: Any) -> tuple[Any, Machine, torch.device]:
    recipe, device = resolve(recipe, MACHINE)
    return recipe, MACHINE, device


@pytest.mark.usefixtures("rehearsed_once")
def test_what_does_not_fit_is_told_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways are rehearsed themselves: each says a setting that fits, and with it the verdict is that it fits. Selective
    recompute is one where there are no kernels, which keep little else than it does."""
    recipe = recipe_of(tmp_path, **{"data.seq_len": 64, "eval_steps": None, "data.eval_fraction": 0.0})
    need = asked(recipe)[0].plan.need
    monkeypatch.setattr(fit, "memory_of", lambda device: (int(0.8 * need), 10 * need))
    found, _ = asked(recipe)
    selective = [] if available("cpu") else ["machine.recompute=selective"]
    assert not found.plan.fits and [s for s, _ in found.ways] == ["micro_batch=2", *selective, "machine.recompute=full"]
    assert "does not fit (batches of 4 x 64 tokens); set micro_batch=2 (" in str(found)
    assert "or machine.recompute=full (" in str(found)
    assert asked(replace(recipe, micro_batch=2))[0].plan.fits
    for how in ("full", *(["selective"] if selective else [])):
        assert asked(recipe, replace(MACHINE, recompute=how))[0].plan.fits
    assert all(asked_need < 0.8 * need for _, asked_need in found.ways)


def of_rows(rows: int) -> Any:
    none: Any = None
    return Job(none, none, none, "fp32", rows, 1)


def test_where_copies_do_not_fit_shards_may() -> None:
    def exact(machine: Machine, rows: int) -> Any:
        return SimpleNamespace(fits=machine.fsdp == 2 and machine.replicate == 1, need=7)

    for machine, ways in ((Machine(replicate=2), [("machine.fsdp=2 machine.replicate=1", 7)]), (Machine(fsdp=4), [])):
        now: Any = SimpleNamespace(machine=machine, rows=4)
        costs: Any = SimpleNamespace(exact=exact, job=of_rows(8), apart=False)
        assert list(fit.better(costs, now)) == ways


def test_where_copies_fit_and_are_quicker_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    settings = "machine.fsdp=1 machine.replicate=8"

    def asked_of(seconds: float, fits: bool = True, **degrees: int) -> Any:
        """What is said of shards that take a second, where copies take so many."""
        def exact(machine: Machine, rows: int) -> Any:
            assert (machine.fsdp, machine.replicate, rows) == (1, 8, 4)
            return SimpleNamespace(fits=fits, seconds=seconds)

        now: Any = SimpleNamespace(machine=Machine(device="cpu", **degrees), rows=4, seconds=1.0)
        costs: Any = SimpleNamespace(exact=exact)
        return fit.quicker(costs, now, recipe)

    settings_of, copies = asked_of(0.8, fsdp=8)
    assert settings_of == settings == asked_of(0.8, fsdp=4, replicate=2)[0] and copies.seconds == 0.8
    assert asked_of(0.9, fsdp=8) is asked_of(0.8, fsdp=8, fits=False) is asked_of(0.8, replicate=8) is None
    found, _ = asked(recipe)
    told = str(replace(found, quicker=(settings, copies)))
    assert found.quicker is None and told.count(f"; {settings} fits as well and takes about 0.8 s") == 1

    def refused(recipe: Any, machine: Machine) -> None:
        raise InputError("machine.replicate: not of these")

    monkeypatch.setattr(fit, "check_ranks", refused)
    assert asked_of(0.8, fsdp=8) is None


@pytest.mark.usefixtures("rehearsed_once")
def test_only_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    lasting = asked(recipe)[0].plan.lasting
    monkeypatch.setattr(fit, "memory_of", lambda device: (0, lasting))
    assert "does not fit" in str(asked(recipe)[0])  # and nothing more: other programs may end
    monkeypatch.setattr(fit, "memory_of", lambda device: (0, lasting - 1))
    with pytest.raises(InputError, match=r"memory: .* of weights, gradients and optimizer, .* there; an adapter"):
        asked(recipe)
    assert "does not fit" in str(asked(recipe, refuses=False)[0])  # asked alone, it answers


def test_what_cannot_be_rehearsed_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no\nidea")

    monkeypatch.setattr(fit, "job_of", fail)
    assert asked(recipe_of(tmp_path))[0] == "memory: not estimated: RuntimeError: no idea"
    with pytest.raises(RuntimeError, match="no\nidea"):  # nothing is to be run
        asked(recipe_of(tmp_path), refuses=False)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a preset that is not here nothing is fetched, of a folder no weight is read; a run says the same line."""
    from modelcenter.__main__ import main

    recipe_of(tmp_path)
    changes = [f"data.path={tmp_path}/data.jsonl", "data.seq_len=32", "batch=4", f"output_dir={tmp_path}/out", "precision=fp32"]
    small = [f"config.{key}={value}" for key, value in TINY.items()]
    start = ["pretrain", *changes, "tokenizer=char", *small, "max_steps=1", "schedule.warmup_steps=0", "--machine", "cpu"]
    assert main(["plan", *start, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak"] == sum(found["bytes"].values()) and not (tmp_path / "out").exists()
    assert main(["train", *start]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memory:")]
    assert said[0].split(",")[0] == found["verdict"].split(",")[0] and len(said) == 1
    assert "\nspeed: about " in found["verdict"] and found["estimate"]["seconds"] > 0
    told = json.loads((tmp_path / "out" / "environment.json").read_text())[0]["foreseen"]
    assert round(told["memory_gb"] * 1e9) == found["peak"] and "| predicted | " in (tmp_path / "out" / "summary.md").read_text()
    assert "foreseen" not in (tmp_path / "out" / "metrics.jsonl").read_text()  # it differs from one time to the next

    (weights,) = (tmp_path / "out" / "model").glob("*.safetensors")
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    weights.write_bytes(weights.read_bytes()[:header] + bytes(weights.stat().st_size - header))  # any weights do
    assert main(["plan", "lora", *changes, f"model={tmp_path}/out/model", "adapter.quantize=nf4", "--machine", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "weights and buffers" in text and "memory: about" in text and not (tmp_path / "out2").exists()


def test_what_is_said_of_devices_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose rates they are, a small model's size, and no hours of what cannot be."""
    from modelcenter.__main__ import main

    words = ["plan", "model=gpt2", *(f"config.{key}={value}" for key, value in TINY.items()), "data.seq_len=32",
             "--gpus", "1", "--tokens", "1e9", "--price", "2", "--device", str(tmp_path / "mine.yaml")]  # fmt: skip
    for memory, fits in (("1e9", True), ("1e3", False)):
        rates = "name: mine\nfp32: 1e13\nbandwidth: 1e12\nlink: 1e11\nwire: 1e10\nhost_memory: 1e3\n"
        (tmp_path / "mine.yaml").write_text(f"{rates}memory: {memory}\n")
        assert main(words) == 0
        text = capsys.readouterr().out
        assert f"rates: {tmp_path}/mine.yaml\n" in text and " M parameters, fp32" in text
        assert ("choice: " in text) == ("1e+09 tokens: " in text) == fits and ("nothing fits" in text) != fits
    assert [cli.few(n, 1) for n in (0.0123, 9.96, 77.25, 2945.46)] == ["0.0123", "9.96", "77.2", "2,945.5"]
    assert [cli.few(n) for n in (0.5, 188510.2)] == ["0.5", "188,510"]


@pytest.mark.parametrize("degree", ["fsdp", "tensor_parallel", "replicate"])
def test_the_verb_of_a_random_model_on_ranks(degree: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from modelcenter.__main__ import main

    (tmp_path / "text.txt").write_text("a few words of text\n" * 40)
    small = [f"config.{key}={value}" for key, value in TINY.items()]
    run = [f"data.path={tmp_path}/text.txt", "data.seq_len=16", "batch=4", f"output_dir={tmp_path}/out", "tokenizer=char"]
    assert main(["plan", "pretrain", *run, *small, f"machine.{degree}=2", "machine.device=cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["verdict"].startswith("memory a rank: about ") and found["estimate"][degree] == 2
    assert main(["plan", "pretrain", *run, *small, "machine.tensor_parallel=4", "machine.device=cpu"]) == 2
    assert "machine.tensor_parallel: 2 heads over 4 ranks" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- ranks that share a host


@pytest.mark.usefixtures("rehearsed_once")
def test_ranks_of_one_host_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, machine = recipe_of(tmp_path), replace(MACHINE, replicate=4)
    need = asked(recipe, machine)[0].plan.need

    def fits(ranks: float) -> bool:
        """Where the host has memory for so many."""
        monkeypatch.setattr(fit, "memory_of", lambda device: (int(ranks * need), int(ranks * need)))
        return bool(asked(recipe, machine)[0].plan.fits)

    assert not fits(3.9) and fits(4.1)
    monkeypatch.setenv("NNODES", "2")
    assert not fits(1.9) and fits(2.1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of those that a launcher has started
    assert not fits(0.9) and fits(1.1)


def test_layouts_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = bare(model="gpt2", config={**TINY, "vocab": 99}, batch=4)
    chip = replace(chips.CHIPS["4090"], memory=8e9)
    monkeypatch.setattr(paper, "chip_here", lambda device: chip)
    monkeypatch.setattr(paper, "chip_named", lambda name: chip)
    monkeypatch.setattr(paper, "survey", lambda costs, *_: costs)
    found: list[Any] = [paper.on_paper(recipe, MACHINE, 2, device, True)[0] for device in (None, "4090")]
    assert [costs.limit for costs in found] == [4e9, 8e9]


@pytest.mark.parametrize(("told", "keys", "ranks", "threads"), [
    ({}, {}, 4, 3), ({}, {}, 1, 2), ({}, {"threads": 5}, 1, 5), ({}, {"threads": 5}, 4, 5), ({"NNODES": "2"}, {}, 4, 6),
    ({"OMP_NUM_THREADS": "7"}, {}, 4, 2), ({"RANK": "0"}, {}, 4, 2),
])  # fmt: skip
def test_a_host_is_timed_with_the_threads_of_one_of_its_ranks(told: dict[str, str], keys: dict[str, int], ranks: int, threads: int,
                                                              tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of twelve, or those that torch has in a process that somebody has told how many: not with all, which would make each rank as
    fast as the whole host."""
    for key in ("OMP_NUM_THREADS", "RANK", "NNODES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    timed: list[int] = []
    chip = replace(chips.CHIPS["4090"], name="CPU")
    for module in (fit, paper, choose):
        monkeypatch.setattr(module, "chip_here", lambda device: timed.append(torch.get_num_threads()) or chip)
    monkeypatch.setattr(fit, "host_rate", lambda: timed.append(torch.get_num_threads()) or 1e9)
    for module in (paper, choose):
        monkeypatch.setattr(module, "survey", lambda *_, **__: SimpleNamespace())
    recipe, machine = bare(model="gpt2", config={**TINY, "vocab": 99}, batch=4), replace(MACHINE, **{"threads": None, **keys})
    now = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        asked(recipe_of(tmp_path), replace(machine, replicate=ranks))
        paper.on_paper(recipe, machine, ranks, None, True)
        choose.surveyed(recipe_of(tmp_path), machine, CPU, ranks, None)
        fit.beside(chip, machine, ranks)
        assert timed == [threads] * 4 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(now)


# ------------------------------------------------------------------------------------------- a model without a recipe


def bare(**changes: Any) -> Any:
    data = {"path": "none", "seq_len": 16, **changes.pop("data", {})}
    return bind(Recipe, {**BARE, "data": data, "precision": "fp32", **changes}, None)


@pytest.mark.filterwarnings("ignore:.* pairs have a text of another:UserWarning")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("objective", objectives())
def test_a_model_alone_is_trained_on_what_its_objective_takes(tmp_path: Path, objective: str, packing: bool) -> None:
    """On batches as they are made of data, where there is some of that objective; the model itself takes them all."""
    declared = objectives()[objective]
    model, config = {"lm": ("gpt2", TINY), "seq2seq": ("t5-small", TINY_T5)}.get(declared.task, ("bert-base-uncased", TINY))
    keys = {"padding_free": packing and declared.packs, **({"pair_key": "pair"} if declared.task == "embed" else {})}
    recipe = bare(model=model, config={**config, "vocab": 300}, objective=objective, data=keys, batch=6)
    job = paper.job_alone(recipe, CPU, False)
    made = job.batch(4)
    pairs, texts = bool(job.model.encoder_decoder), 2 if declared.task == "embed" else 1
    targets = declared.target_len(recipe.data) if pairs else 0  # of spans fewer
    assert (job.rows, job.tokens) == (6, 16 * texts + targets) and made["input_ids"].numel() == 4 * 16 * texts
    real = mc.build(model, config=dict(recipe.config), task=declared.task, num_labels=1 if objective == "regress" else None)
    assert bool(real(**made, num_items_in_batch=1).loss.isfinite())
    if objective in ROWS:
        there = recipe_of(tmp_path, objective, **{f"data.{key}": value for key, value in keys.items()}, **{"data.seq_len": 16})
        setup = prepare(*resolve_all(there), meta=True)
        read = widest(next(setup.loader.steps(micro_batch=4))[1][0], 4, there, pairs)

        def shapes(batch: Any) -> dict[str, Any]:
            return {key: (value.shape, value.dtype) for key, value in batch.items() if isinstance(value, torch.Tensor)}

        assert shapes(made) == shapes(read)


def test_a_model_alone_has_its_adapter_and_its_tokens() -> None:
    recipe = bare(model="gpt2", init="pretrained", batch=4)
    adapted = replace(recipe, adapter=AdapterConfig(name="lora"))
    whole, lora = (paper.job_alone(one, CPU, False).model for one in (recipe, adapted))
    trained = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (whole, lora)]
    assert trained[1] < 0.01 * trained[0] and lora.adapter.name == "lora" and not lora.load_report.new
    for narrow, kinds in (("fp32", {torch.float32}), ("bf16", {torch.float32, torch.bfloat16})):
        one = replace(adapted, precision=narrow)
        for model in (paper.job_alone(one, CPU, False).model, fit.whole(whole, one)):
            assert {p.dtype for p in model.parameters()} == kinds, "as the run will hold them"
    jobs = [paper.job_alone(replace(recipe, batch_tokens=n), CPU, False) for n in (None, 16 * 32 + 15, 3)]
    assert [job.rows for job in jobs] == [4, 32, 1]
    fours = replace(recipe, batch_tokens=25 * jobs[0].tokens, micro_batch=4)
    assert paper.job_alone(fours, CPU, False).rows == 28, "seven forwards"


@pytest.mark.parametrize(("words", "length", "init"), [
    (["model=bert-base-uncased"], 512, "random"), (["model=gpt2"], 1024, "random"), (["model=t5-small"], 1024, "random"),
    (["model=gpt2", "data.seq_len=64", "adapter.name=lora"], 64, "pretrained"),
    (["model=gpt2", "config.positions=32"], 32, "random")])  # fmt: skip
def test_a_model_alone_is_asked_for_by_its_name(words: list[str], length: int, init: str) -> None:
    """With as long texts as it has positions for, and pretrained where an adapter is put on it."""
    recipe, _, alone = cli.recipe_of(Arguments(settings=words))
    assert (recipe.data.seq_len, recipe.init, alone) == (length, init, True)


def test_a_model_alone_is_a_folder_or_its_config(tmp_path: Path) -> None:
    mc.build("gpt2", config={**GPT, "positions": 32}, task="classify").save_pretrained(tmp_path)
    for weights in (True, False):
        recipe, _, alone = cli.recipe_of(Arguments(settings=[f"model={tmp_path}"]))
        assert (recipe.data.seq_len, recipe.objective, alone) == (32, "lm", True)
        assert paper.job_alone(recipe, CPU, False).model.config.positions == 32
        if weights:
            (tmp_path / "model.safetensors").unlink()


# ------------------------------------------------------------------------------------------- what a run would refuse


@pytest.mark.parametrize("micro", [None, 9])
def test_a_batch_that_ranks_cannot_halve(micro: int | None) -> None:
    """Each micro-batch that is advised divides the batch, be it larger than a rank's share of it."""
    recipe = bare(model="gpt2", config={**TINY, "heads": 1, "vocab": 99}, batch=9, micro_batch=micro)
    found, _ = paper.on_paper(recipe, MACHINE, 2, "4090", True)
    for e in found.estimates:
        assert replace(recipe, micro_batch=e.micro_batch) and e.rows == min(e.micro_batch, 5)
        assert e.data()["micro_batch"] == e.micro_batch and settings(e).endswith(f"micro_batch={e.micro_batch}")
    others = [name.partition("=")[2] for name, _ in found.remedies if name.startswith("micro_batch=")]
    assert {e.micro_batch for e in found.estimates} == {9} and others == ["1"]


def test_fewer_rows_divide_the_batch_too() -> None:
    now: Any = SimpleNamespace(machine=Machine(fsdp=2, recompute="full"), rows=8)
    costs: Any = SimpleNamespace(exact=lambda machine, rows: SimpleNamespace(fits=rows < 8, need=7), job=of_rows(15), apart=False)
    assert list(fit.better(costs, now)) == [("micro_batch=3", 7)]


def test_what_is_advised_can_be_run() -> None:
    """torch's compiler does not take whole blocks that are computed again, of tensor-parallel ranks."""
    recipe = bare(model="gpt2", config={**TINY, "vocab": 99, "layers": 6}, batch=1, data={"seq_len": 64})
    machine = replace(MACHINE, compile=True)
    found, _ = paper.on_paper(recipe, machine, 2, "4090", True)
    assert found.choice.machine.tensor_parallel == 2
    told = [name for name, _ in found.remedies if name.startswith("machine.recompute")]
    assert told == ["machine.recompute=selective"]
    shared: Any = SimpleNamespace(machine=replace(machine, tensor_parallel=2), rows=1)
    costs: Any = SimpleNamespace(exact=lambda machine, rows: SimpleNamespace(fits=True, need=7), job=of_rows(1), apart=False)
    assert [name for name, _ in fit.better(costs, shared)] == told


def test_texts_that_are_compared_are_one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where fewer would need less."""
    monkeypatch.setattr(paper, "chip_named", lambda name: replace(chips.CHIPS["4090"], memory=4e5))
    keys = {"model": "bert-base-uncased", "config": {**TINY, "vocab": 99}, "objective": "contrastive", "data": {"pair_key": "pair"}}
    found, _ = paper.on_paper(bare(**keys, batch=8), MACHINE, 1, "4090", True)
    assert {e.rows for e in found.estimates} == {8}


@pytest.mark.parametrize(("change", "device", "found"), [
    ({"model": "t5-small", "objective": "seq2seq", "config": TINY_T5, "precision": "auto"}, "v100", "precision: fp16 with T5"),
    ({"model": "gpt2", "config": TINY, "freeze": ["embed", "decoder"]}, "4090", "freeze: all parameters of the model"),
], ids=["fp16", "frozen"])  # fmt: skip
def test_what_cannot_be_trained_is_not_planned(change: dict[str, Any], device: str, found: str) -> None:
    """Of a model alone too; fp16 is what `auto` means on a GPU before Ampere."""
    with pytest.raises(InputError, match=f"^{found}"):
        paper.on_paper(bare(**change), MACHINE, 1, device, True)


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_what_is_frozen_is_planned(init: str) -> None:
    """Of a model whose weights are not read, which lacks none of them."""
    found, _ = paper.on_paper(bare(model="gpt2", config=TINY, freeze=["embed"], init=init), MACHINE, 1, "4090", True)
    assert found.choice.fits


@pytest.mark.parametrize(("key", "value"), [("tensor_parallel", 2), ("zero", 1), ("recompute", "full")])
def test_a_layout_beside_what_chooses_it_is_refused(key: str, value: Any) -> None:
    recipe = bare(model="gpt2")
    with pytest.raises(InputError, match=rf"^machine\.{key}: given beside gpus=2, which chooses it; one of the two"):
        paper.on_paper(recipe, replace(MACHINE, **{key: value}), 2, "4090", True)
    with pytest.raises(InputError, match=rf"^machine\.{key}: given beside devices=2, which chooses it"):
        paper.on_paper(recipe, replace(MACHINE, devices=2, **{key: value}), None, "4090", True)


def test_a_machine_that_gives_the_number_of_devices_has_all_its_layouts() -> None:
    recipe = bare(model="gpt2", config={**TINY, "vocab": 99}, batch=4)
    found, _ = paper.on_paper(recipe, replace(MACHINE, fsdp=2, zero=1), None, "4090", True)
    assert {e.machine.ranks for e in found.estimates} == {2} and {e.machine.zero for e in found.estimates} == {1, 2, 3}


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (1.234e11, "123 GB")])
def test_size(count: float, text: str) -> None:
    assert size(int(count)) == text


def test_a_plan_adds_up() -> None:
    plan = Plan({"weights": 5, "gradients": 2, "loss": 4}, 10, 20)
    assert (plan.need, plan.lasting, plan.fits, plan.hopeless) == (11, 7, False, False)
    assert Plan({"weights": 5}, 5, 5).fits and math.isclose(plan.need, 11)


def test_a_share_above_one_is_not_said() -> None:
    """The device's rate was measured beside other work then: no step is faster than the device."""
    for share, said in ((0.5, ", 50% of the device's rate of matrix products"), (1.11, "")):
        of: Any = SimpleNamespace(seconds=0.5, rate=1024.0, share=share, bottleneck="compute", machine=Machine())
        assert fit.speed(of) == f"about 0.5 s a step of full sequences, 1,024 tokens a second{said}; mostly bound by arithmetic"


@pytest.mark.parametrize(("version", "line", "files"), [
    (1, "4:cpu,memory:/job/step",
     {"memory.limit_in_bytes": "{}", "memory.usage_in_bytes": "600", "memory.stat": "total_inactive_file 100\n"}),
    (2, "0::/job/step", {"memory.max": "{}", "memory.current": "600", "memory.stat": "anon 9\ninactive_file 100\n"})],
    ids=["v1", "v2"])
def test_a_groups_limit_is_all_the_memory_there_is(version: int, line: str, files: dict[str, str], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Of a container or a job, and of those that it is in; what is kept of files is given back."""
    top = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    limited = {"": str(2**63 - 4096) if version == 1 else "max", "job": "1000", "job/step": "2000"}
    for group, limit in limited.items():
        (top / group).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (top / group / name).write_text(text.format(limit))
    (tmp_path / "own").write_text(f"9:pids:/x\n{line}\n")
    found = list(device.limits(tmp_path / "own", tmp_path / "cgroup"))
    assert found[:2] == [(1500, 2000), (500, 1000)] and len(found) == (3 if version == 1 else 2)
    (tmp_path / "own").write_text(f"{line.partition('/')[0]}/of/the/host\n")  # of which a container sees its own alone, as the top
    assert list(device.limits(tmp_path / "own", tmp_path / "cgroup")) == found[2:]
    assert list(device.limits(tmp_path / "none", tmp_path / "cgroup")) == []
    monkeypatch.setattr(device, "limits", lambda: found)
    assert device.memory_of(torch.device("cpu")) == (500, 1000)


def test_the_driver_of_plans_predicts_a_point(tmp_path: Path) -> None:
    """With an adapter: what is frozen is then held as a run holds it."""
    driver = Path(__file__).parents[1] / "benchmarks" / "plan.py"
    how = ["--tiny", "--predict", "--points", "341", "--jobs", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(driver), *how], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "here-341.json").read_text())["fits"]
