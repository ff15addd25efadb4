"""The loss over a vocabulary of which each rank has a part, against the one over all of it; and what ranks send for it."""

from typing import Any

import pytest
import torch
from mesh import full, spawn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import modelcenter as mc
from modelcenter import ops
from modelcenter.ops.cross_entropy import IGNORE
from modelcenter.ops.linear_cross_entropy import BYTES

CASES: list[dict[str, Any]] = [
    {}, {"bias": True, "smoothing": 0.1}, {"z": 1e-2, "scale": 0.3, "bias": True}, {"vocab": 9}, {"vocab": 3, "smoothing": 0.2},
    {"n": 0}, {"ignored": True}, {"n": 300, "vocab": 41, "smoothing": 0.1, "z": 1e-3},
]  # fmt: skip
KINDS = ((torch.float64, None, 1e-12), (torch.float32, None, 3e-6), (torch.float32, torch.bfloat16, 3e-2))


class Sent(TorchDispatchMode):
    """The most numbers that one collective is given while it lasts, and how many are called."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.sizes += [sum(t.numel() for t in args[0])]
        return func(*args, **(kwargs or {}))


def loss_of(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, case: dict[str, Any], *extra: Any) -> list[Tensor]:
    leaves = [t if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    call = ops.vocab_parallel_cross_entropy if extra else ops.linear_cross_entropy
    loss = call(*leaves, labels, *extra, case.get("scale", 1.0), case.get("smoothing", 0.0), case.get("z", 0.0))
    (loss * 0.5).backward()
    return [loss.detach(), *[t.grad for t in leaves if t is not None]]


def compare(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    BYTES["cpu"] = 50_000  # several chunks
    for case in CASES:
        for dtype, low, tolerance in KINDS:
            torch.manual_seed(2)
            n, vocab, dim = case.get("n", 7), case.get("vocab", 40), 8
            x, weight = torch.randn(n, dim, dtype=dtype) * 3, torch.randn(vocab, dim, dtype=dtype)
            bias = torch.randn(vocab, dtype=dtype) if case.get("bias") else None
            labels = torch.randint(vocab, (n,))
            labels[::3] = IGNORE
            if case.get("ignored"):
                labels[:] = IGNORE
            rows = -vocab % ranks
            padded = [None if t is None else torch.cat((t, t.new_zeros(rows, *t.shape[1:]))) for t in (weight, bias)]
            shards = [None if t is None else distribute_tensor(t, mesh, [Shard(0)]) for t in padded]
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                wanted = loss_of(x, weight, bias, labels, case)
                with Sent() as sent:
                    found = loss_of(x, *shards, labels, case, vocab)  # type: ignore[arg-type]
            assert max(sent.sizes, default=0) <= max(3 * n, n * dim), f"{case}: {sent.sizes}"
            for what, a, b in zip(("loss", "x", "weight", "bias"), wanted, found, strict=False):
                b = full(b, a.shape) if hasattr(b, "full_tensor") else b
                assert a.dtype == b.dtype and a.shape == b.shape
                gap, size = (a - b).abs().max() if a.numel() else 0, a.abs().max() if a.numel() else 0
                assert gap <= tolerance * max(1, float(size)), f"{case} {dtype} {low} {what}: {gap} apart of {size}"
    x, weight = torch.randn(3, 8), distribute_tensor(torch.randn(4 * ranks, 8), mesh, [Shard(0)])
    for label in (4 * ranks, -1):
        with pytest.raises(ValueError, match=f"label {label} of a vocabulary of {4 * ranks}"):
            ops.vocab_parallel_cross_entropy(x, weight, None, torch.tensor([0, label, IGNORE]), 4 * ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_loss_of_parts_is_that_of_the_whole(ranks: int) -> None:
    spawn(ranks, compare, ranks)


def trains(rank: int) -> None:
    """A model's loss in training sends nothing of the size of logits."""
    config = {"layers": 1, "dim": 8, "heads": 2, "vocab": 2003, "positions": 16}
    model = mc.build("gpt2", config=config, machine=mc.Machine(device="cpu", tensor_parallel=2)).train()
    assert model.get_input_embeddings().weight.shape[0] == 2016, "parts of 8 n rows"
    ids = torch.arange(32).view(2, 16)
    with Sent() as sent:
        model(ids, labels=ids).loss.backward()
    assert sent.sizes and max(sent.sizes) <= 32 * 8, sent.sizes
    assert model.eval()(ids).logits.shape == (2, 16, 2003)


def test_a_model_in_training_gathers_no_logits() -> None:
    spawn(2, trains)
