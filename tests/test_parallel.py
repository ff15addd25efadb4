"""Every family on every mesh equals one process: outputs, gradients, weights read from and written to Hugging Face folders,
initial weights. One spawn a mesh carries all families."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from mesh import DEVICE, full, spawn
from torch import Tensor
from zoo import Case, cases, inputs, scores, tiny, weighted

import modelcenter as mc
from modelcenter.checkpoint.load import fill
from modelcenter.layers.initial import initial
from modelcenter.place import place
from modelcenter.skeleton import skeleton

CASES = cases(all_tasks=False, all_variants=False)
MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2}, "fsdp2": {"fsdp": 2}, "fsdp2xtp2": {"fsdp": 2, "tensor_parallel": 2, "recompute": "full"},
    "copies2": {"replicate": 2}, "hybrid": {"replicate": 2, "fsdp": 2, "recompute": "selective"},
    "copies2xtp2": {"replicate": 2, "tensor_parallel": 2}, "host": {"offload": True},
}  # fmt: skip


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of weights read while the context lasts."""
    done, before = [], os.preadv  # type: ignore[var-annotated]

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        size = before(fd, buffers, at)
        done.append(size)  # from several threads
        return size

    os.preadv = preadv
    try:
        yield done
    finally:
        os.preadv = before


def there(args: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(DEVICE) for name, value in args.items()}


def draw(case: Case, machine: mc.Machine | None) -> mc.Model:
    """A model with initial weights, loud enough to compare."""
    config = tiny(case.kind)
    model = skeleton(case.family, config, case.task, torch.float64)
    place(model, None, machine)
    fill(model, initial(model, model.shapes, 7, lambda name, shape: 1.5 * shape[-1] ** -0.5))
    return model.eval()


# torch warns of in-place changes to a model's output under FSDP; nothing here makes any
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")


def work(rank: int, changes: dict[str, Any], folders: dict[Case, str], out: Path) -> None:
    machine = mc.Machine(device=DEVICE, **changes)
    for case in folders:
        alone, spread = draw(case, None), draw(case, machine)
        for name in alone.shapes:
            whole = full(spread.get_parameter(name).detach(), alone.shapes[name])
            assert torch.equal(whole, alone.get_parameter(name)), f"{case} {name}: initial weights depend on the mesh"
        args = inputs(case)
        wanted, found = scores(alone(**args)), scores(spread(**there(args))).cpu()
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, case=case: f"{case}: {m}")
        everything = torch.ones(wanted.shape[:2], dtype=torch.bool)
        weighted(wanted, everything).backward()
        weighted(found, everything).backward()
        for name in alone.shapes:
            grad, reference = spread.get_parameter(name).grad, alone.get_parameter(name).grad
            assert grad is not None, f"{case} {name}: no gradient"
            grad = full(grad, alone.shapes[name])
            torch.testing.assert_close(grad, reference, rtol=1e-9, atol=1e-10, msg=lambda m, n=f"{case} {name}": f"{n}: {m}")
        with counted() as done:
            read = mc.load(folders[case], machine=machine)
        whole, ranks = sum(math.prod(s) for s in read.shapes.values()) * 4, dist.get_world_size()
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(parts, torch.tensor([sum(done)]))
        assert sum(map(int, parts)) == whole, f"{case}: not each byte once: {parts} of {whole}"
        assert max(map(int, parts)) < whole / ranks + 4000, f"{case}: not a share each: {parts} of {whole}"
        read.save_pretrained(out / str(case), max_shard_size="20KB")
        if rank == 0:
            again, before = mc.load(out / str(case)), mc.load(folders[case])
            for name in before.shapes:
                assert torch.equal(again.get_parameter(name), before.get_parameter(name)), f"{case} {name}: not bit for bit"
        dist.barrier()


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if k == 2 else pytest.mark.slow) for k, m in enumerate(MESHES)])
def test_a_mesh_equals_one_process(mesh: str, tmp_path: Path) -> None:
    quick = mesh == "fsdp2xtp2"  # mT5 is T5 with other sizes
    folders = {case: zoo.reference(case)[1] for case in CASES if not (quick and case.kind == "mt5")}
    spawn(mc.Machine(**MESHES[mesh]).ranks, work, MESHES[mesh], folders, tmp_path)


def odd(rank: int) -> None:
    case = next(c for c in CASES if c.kind == "gpt2")
    config = {"vocab": 101, "positions": 32, "dim": 32, "heads": 4, "layers": 1}
    alone = mc.build("gpt2", config=config, dtype="fp64").eval()
    spread = mc.build("gpt2", config=config, dtype="fp64", machine=mc.Machine(device=DEVICE, tensor_parallel=2)).eval()
    ids = inputs(case)["input_ids"] % 101
    here = ids.to(DEVICE)
    assert spread.get_input_embeddings().weight.shape[0] == 102 and spread(here).logits.shape[-1] == 101
    torch.testing.assert_close(spread(here).logits.cpu(), alone(ids).logits, rtol=1e-10, atol=1e-10)
    spread.train()
    spread(here, labels=here).loss.backward()
    grad = full(spread.get_input_embeddings().weight.grad)
    assert not grad[101:].any(), "the row that pads the vocabulary learns"
    with pytest.raises(mc.InputError, match="1 heads"):
        mc.build("gpt2", config={**config, "heads": 1}, machine=mc.Machine(device="cpu", tensor_parallel=2))


def few_keys(rank: int) -> None:
    """Query heads that divide are not enough where several share a key head."""
    config = {"vocab": 16, "dim": 16, "hidden": 16, "heads": 4, "kv_heads": 1, "layers": 1}
    with pytest.raises(mc.InputError, match=r"^machine\.tensor_parallel: 1 heads.*over 2 ranks"):
        mc.build("llama-7b", config=config, machine=mc.Machine(device="cpu", tensor_parallel=2))


def test_key_heads_must_divide_too() -> None:
    spawn(2, few_keys)


def test_a_vocabulary_that_does_not_divide() -> None:
    spawn(2, odd)


def handed(rank: int) -> None:
    config = {"vocab": 101, "positions": 32, "dim": 32, "heads": 4, "layers": 1}
    alone = mc.build("gpt2", config=config, seed=5)
    for changes in ({"fsdp": 2}, {"tensor_parallel": 2}):
        for assign in (False, True):
            spread = mc.build("gpt2", config=config, seed=1, machine=mc.Machine(device=DEVICE, **changes))
            cut = [hasattr(p, "placements") for p in spread.parameters()]
            spread.load_state_dict(alone.state_dict(), assign=assign)
            assert any(cut) and cut == [hasattr(p, "placements") for p in spread.parameters()]
            for name, p in spread.named_parameters():
                assert torch.equal(full(p.detach(), alone.shapes[name]).cpu(), alone.get_parameter(name)), name
        with pytest.raises(RuntimeError, match=r"size mismatch for embed\.positions\.weight"):
            spread.load_state_dict(alone.state_dict() | {"embed.positions.weight": torch.ones(16, 32)})
        with pytest.raises(mc.InputError, match=r"^state_dict: embed\.tokens\.weight: of a sharded model, .*full_tensor"):
            alone.load_state_dict(spread.state_dict())
        with pytest.raises(mc.InputError, match=r"^resize_token_embeddings: the model is sharded already; resize"):
            spread.resize_token_embeddings(110)


def test_whole_weights_are_handed_to_a_sharded_model() -> None:
    spawn(2, handed)


def cut_by_rows(rank: int) -> None:
    """Of a table that is tied to a head, and of one that is not."""
    for tie in (True, False):
        config = {"vocab": 24, "dim": 8, "hidden": 16, "heads": 2, "kv_heads": 2, "layers": 1, "tie": tie}
        machine = mc.Machine(device=DEVICE, tensor_parallel=2)
        spread = mc.build("llama-7b", config=config, machine=machine, seed=3, dtype="fp64").train()
        alone = mc.build("llama-7b", config=config, seed=3, dtype="fp64").train()
        ids = torch.tensor([[3, 11, 12, 23, 3, 0]])
        for model, given in ((spread, ids.to(DEVICE)), (alone, ids)):
            model(given, labels=given).loss.backward()
        table: Any = spread.get_input_embeddings().weight
        wanted = alone.get_input_embeddings().weight.grad
        assert table.grad.placements == table.placements and table.grad.to_local().shape == (12, 8)
        torch.testing.assert_close(full(table.grad), wanted, rtol=1e-10, atol=1e-12)


def test_a_table_s_gradient_is_cut_as_the_table_is() -> None:
    spawn(2, cut_by_rows)


def wrong_size(rank: int) -> None:
    with pytest.raises(mc.InputError, match="2 running"):
        mc.build("gpt2", config={"layers": 1}, machine=mc.Machine(device="cpu", fsdp=3))


def test_degrees_must_match_the_ranks() -> None:
    spawn(2, wrong_size)


def test_recompute_replays_dropout() -> None:
    """What is computed again in the backward draws what the forward drew."""
    grads, runs = [], []
    for again in (False, True):
        machine = mc.Machine(device="cpu", recompute=again)
        sizes = {"vocab": 30, "positions": 16, "dim": 16, "heads": 2, "layers": 2, "dropout": 0.5, "attn_dropout": 0.5}
        model = mc.build("gpt2", config=sizes, dtype="fp64", machine=machine).train()
        torch.manual_seed(1)
        ids = torch.arange(12)[None]
        model.decoder.blocks[0].attn.register_forward_hook(lambda *_, again=again: runs.append(again))
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert runs == [False, True, True], "once, and twice where it is recomputed"
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


FEW = ["gpt2", "bert", "t5", "llama", "bloom"]  # of whose parts the others' blocks are made


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler looks
@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("aot_eager", FEW),
        pytest.param("aot_eager", [c.kind for c in CASES if c.kind not in FEW], marks=pytest.mark.slow),
        pytest.param("inductor", ["gpt2", "t5"], marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")]),
    ],
)
def test_compiled_blocks_equal_eager(backend: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    for case in (c for c in CASES if c.kind in kinds):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        folder, args = zoo.reference(case)[1], inputs(case)
        eager, compiled = mc.load(folder), mc.load(folder, machine=mc.Machine(device="cpu", compile=True))
        wanted, found = scores(eager(**args)), scores(compiled(**args))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        assert (found - wanted).abs().max() <= 2e-5 * wanted.std(), case
        everything = torch.ones(wanted.shape[:2], dtype=torch.bool)
        weighted(wanted, everything).backward()
        weighted(found, everything).backward()
        largest = max(p.grad.abs().max() for p in eager.parameters())
        for name in eager.shapes:
            gap = (eager.get_parameter(name).grad - compiled.get_parameter(name).grad).abs().max()
            assert gap <= 2e-5 * largest, f"{case} {name}"
    torch._dynamo.reset()


def compiled(rank: int, kinds: list[str]) -> None:
    torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    for case in (c for c in CASES if c.kind in kinds):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        eager, blocks = (draw(case, mc.Machine(device=DEVICE, tensor_parallel=2, compile=c)) for c in (False, True))
        for cut in (0, 2):  # another length in the second batch
            args = {name: value[:, cut:] for name, value in there(inputs(case)).items()}
            wanted, found = scores(eager(**args)), scores(blocks(**args))
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, case=case: f"{case}: {m}")
            for out in (wanted, found):
                weighted(out, torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)).backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
        for name in eager.shapes:
            grad, reference = (full(m.get_parameter(name).grad) for m in (blocks, eager))
            torch.testing.assert_close(grad, reference, rtol=1e-9, atol=1e-10, msg=lambda m, n=f"{case} {name}": f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler looks
@pytest.mark.parametrize("kinds", [
    ["llama"], pytest.param([c.kind for c in CASES if c.kind != "llama"], marks=pytest.mark.slow),
], ids=["llama", "others"])  # fmt: skip
def test_compiled_blocks_of_ranks_equal_eager(kinds: list[str]) -> None:
    """Also where what a block is given comes straight from a table that ranks have in parts, and with batches of other lengths."""
    spawn(2, compiled, kinds)
