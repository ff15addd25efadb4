"""Copies of a model on several ranks: what they send each other, when, and what their gradients are afterwards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh import spawn
from test_graphs import TINY, Played, batch_of
from torch import Tensor, nn

import modelcenter as mc
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel import averaging
from modelcenter.parallel.apply import join
from modelcenter.parallel.averaging import averaged, buckets_of
from modelcenter.parallel.gather import Gather
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train import graphs as graphs_module
from modelcenter.train import step as stepping
from modelcenter.train.graphs import WARM, Graphs, graphs_of
from modelcenter.train.step import accumulate, update

COPIES = Machine(device="cpu", threads=1, replicate=2)


def sizes(buckets: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[p.numel() for p in bucket] for bucket in buckets]


def test_buckets_are_cut_where_they_are_full_and_where_the_dtype_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "BUCKET", 40)
    low = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    some = [*(nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)), low, *(nn.Parameter(torch.zeros(n)) for n in (4, 5, 6))]
    assert sizes(buckets_of(some)) == [[6, 5], [4], [7], [3, 2, 1]] and buckets_of([]) == []


class Branches(nn.Module):
    """Three layers, the order of whose gradients is the caller's; the last may have no part in the loss."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in dtypes)
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for k in order:
            x = x.to(self.layers[k].weight.dtype) @ self.layers[k].weight.T
        return x.float().sum()


def means(rank: int) -> None:
    averaging.BUCKET = 4  # one for each
    orders = ((0, 1, 2), (2, 0, 1))
    model, sent = Branches(*[torch.float32] * 3), list[str]()
    send, formed = averaging.send, list[int]()

    def noted(parameters: Any, group: Any) -> Any:
        sent.append("".join(str(k) for k, layer in enumerate(model.layers) if layer.weight is parameters[0]))
        formed.append(sum(p.grad is not None for p in model.parameters()))
        return send(parameters, group)

    averaging.send = noted
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    alone = []
    for other in range(2):
        y = torch.randn(2, 4, generator=torch.Generator().manual_seed(other))
        alone.append(torch.autograd.grad(model(y, orders[other]), list(model.parameters())))
    with averaged(model, dist.group.WORLD):
        model(x, orders[rank]).backward()
    assert sent == ["2", "1", "0"], f"rank {rank}: {sent}, whichever way its backward went"
    assert formed == ([1, 2, 3] if rank == 0 else [3, 3, 3]), f"rank {rank}: sent when {formed} were formed"
    for p, a, b in zip(model.parameters(), *alone, strict=True):
        torch.testing.assert_close(p.grad, (a + b) / 2)
    before = [p.grad.clone() for p in model.parameters()]
    model(x, orders[rank]).backward()  # which is not the last of its step
    assert len(sent) == 3 and not torch.equal(before[0], model.layers[0].weight.grad)


def test_gradients_are_means_sent_in_one_order_while_the_backward_runs() -> None:
    spawn(2, means)


def parts(rank: int) -> None:
    """What no loss depends on has no gradient afterwards, either; the others are sent."""
    model = Branches(*[torch.float32] * 3)
    with averaged(model, dist.group.WORLD):
        model(torch.full((1, 4), float(rank + 1)), (0, 2)).backward()
    assert model.layers[1].weight.grad is None
    assert torch.equal(model.layers[0].weight.grad, torch.full((4, 4), 4 * 1.5))


def test_a_parameter_without_a_part_in_the_loss_has_no_gradient() -> None:
    spawn(2, parts)


def low(rank: int) -> None:
    """256 + 1 + 1 is 256 in bf16, and 2048 + 1 + 1 is 2048 in fp16."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        model = nn.Module()
        model.p = nn.Parameter(torch.zeros(3, dtype=dtype))
        with averaged(model, dist.group.WORLD):
            (model.p * (large if rank == 0 else 1)).float().sum().backward()
        wanted, grad = torch.tensor((large + 2) / 3).to(dtype), model.p.grad
        assert grad is not None and grad.dtype == dtype and torch.equal(grad, wanted.expand(3)), f"{dtype}: {grad}"


def test_gradients_in_low_precision_are_summed_in_fp32() -> None:
    spawn(3, low)


def fails(rank: int) -> None:
    """An error of one backward leaves no hook behind, and the next one sends nothing that nobody asked for."""
    model = Branches(*[torch.float32] * 3)
    sent = list[int]()
    averaging.send = lambda parameters, group: sent.append(1) or (lambda: None)  # type: ignore[func-returns-value]
    with pytest.raises(RuntimeError, match="no sum"), averaged(model, dist.group.WORLD):
        raise RuntimeError("no sum")
    model(torch.ones(1, 4), (0, 1, 2)).backward()
    assert not sent


def test_a_backward_that_fails_leaves_no_hooks() -> None:
    spawn(2, fails)


# ------------------------------------------------------------------------------------------------------------ as records


class Silent(Played):
    """As a GPU's: what is recorded sends nothing until it is done."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(averaging, "send", lambda parameters, group: lambda: None)
            return super().__call__(work)


def steps(rank: int, ranks: Ranks, lengths: tuple[int, ...], parts: int, recorder: Any) -> tuple[list[float], list[Tensor], Any]:
    """Losses of twelve steps of this rank's part of the batches, and the weights after them."""
    torch.manual_seed(0)
    still = {"dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0}
    model = mc.build("gpt2", config=TINY | {"positions": 64, **still}, machine=COPIES if ranks.size > 1 else None, dtype="fp64")
    graphs = Graphs(model.train(), recorder(model), repeats=False) if recorder is not None else None
    optimizer: Any = build_optimizer(model, OptimizerConfig(), ranks)
    losses = []
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        batches = [batch_of("lm", 2, lengths[(number + k) % len(lengths)], generator) for k in range(2 * parts)]
        mine = batches[ranks.share :: ranks.shares]
        (targets,) = ranks.sum(sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in mine))
        loss, _ = accumulate(model, mine, "lm", targets=targets, ranks=ranks, graphs=graphs)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-2, 1.0, squares=squares)
        losses.append(float(loss))
    return losses, [p.detach() for p in model.parameters()], graphs


def records(rank: int, lengths: tuple[int, ...], parts: int) -> None:
    stepping.number_on = lambda value, device: torch.full((), value, device=device)  # as on a device
    wanted, weights, _ = steps(rank, ALONE, lengths, parts, None)
    losses, found, graphs = steps(rank, join(COPIES), lengths, parts, Silent)
    assert graphs.recorder.played > 0 and not graphs.ended
    kinds = {kind for shapes in graphs.shapes.values() for kind in shapes.records}
    assert kinds == ({("first", True)} if parts == 1 else {("first", False), ("later", True)}), kinds
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-9, atol=0)
    for a, b in zip(found, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("lengths", "parts"), [
    pytest.param((24,), 1, id="one length"), pytest.param((24,), 2, id="micro-batches"),
    # of three lengths in turn the ranks meet them at different times: one replays what the other still calls, or records
    pytest.param((24, 20, 16), 1, id="three lengths"), pytest.param((24, 24, 24, 20, 16), 1, id="other lengths here and there"),
    pytest.param((24, 20, 16), 2, id="three lengths, micro-batches"),
])  # fmt: skip
def test_records_of_copies_train_as_one_process(lengths: tuple[int, ...], parts: int) -> None:
    assert WARM < 6
    spawn(2, records, lengths, parts)


def test_a_loss_that_needs_other_ranks_texts_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that records alone would wait for their number for ever."""
    monkeypatch.setattr(graphs_module, "GPU", lambda device: None)
    model = mc.build("bert-base-uncased", task="embed", config=TINY | {"hidden": 64, "positions": 64})
    cuda = torch.device("cuda")
    found = graphs_of(model, COPIES, cuda, print)
    assert found is not None and not found.ended and not found.repeats
    alone = graphs_of(model, Machine(), cuda, print)
    assert alone is not None and alone.repeats
    model.head.gather = Gather(ALONE)
    assert graphs_of(model, COPIES, cuda, print) is None


def test_a_step_that_others_wait_for_is_not_done_again() -> None:
    """What it has sent is sent; the others would add it to their next."""
    model = nn.Linear(1, 1)
    done = list[int]()

    def short() -> None:
        done.append(1)
        raise torch.OutOfMemoryError("out of memory")

    graphs = Graphs(model, Played(model), repeats=False)
    graphs.gradients = {model.weight: torch.zeros(1, 1)}
    with pytest.raises(torch.OutOfMemoryError):
        graphs.attempt(short)
    assert len(done) == 1
    graphs.repeats = True
    with pytest.raises(torch.OutOfMemoryError):
        graphs.attempt(partial(short))
    assert len(done) == 3
