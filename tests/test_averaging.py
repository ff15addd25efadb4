"""Copies of a model on several ranks: what they send each other, when, and what their gradients are afterwards."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from mesh import DEVICE, full, spawn
from test_graphs import TINY, Played, batch_of
from torch import Tensor, nn

import modelcenter as mc
from modelcenter.optim.config import OptimizerConfig
from modelcenter.optim.optimizers import build_optimizer
from modelcenter.parallel import averaging
from modelcenter.parallel.apply import join
from modelcenter.parallel.averaging import buckets_of
from modelcenter.parallel.gather import Gather
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.ranks import ALONE, Ranks
from modelcenter.train import graphs as graphs_module
from modelcenter.train import step as stepping
from modelcenter.train.evaluate import on_device
from modelcenter.train.graphs import GPU, WARM, Graphs, graphs_of
from modelcenter.train.step import accumulate, autocast, update

STILL = {"dropout": 0.0, "embed_dropout": 0.0, "attn_dropout": 0.0}
COPIES = Machine(device=DEVICE, threads=1, replicate=2)
TENSORS, SEQUENCES, BOTH = (replace(COPIES, replicate=n, tensor_parallel=2, sequence_parallel=s) for n, s in
                            ((1, False), (1, True), (2, False)))  # fmt: skip


def sizes(buckets: list[list[Tensor]]) -> list[list[int]]:
    return [[p.numel() for p in bucket] for bucket in buckets]


def test_buckets_are_cut_where_they_are_full_and_where_the_dtype_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "BUCKET", 40)
    low = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    some = [*(nn.Parameter(torch.zeros(n)) for n in (1, 2, 3)), low, *(nn.Parameter(torch.zeros(n)) for n in (4, 5, 6))]
    assert sizes(buckets_of(some)) == [[6, 5], [4], [7], [3, 2, 1]] and buckets_of([]) == []


class Branches(nn.Module):
    """Three layers, the order of whose gradients is the caller's; some may have no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for k in order:
            x = x @ self.layers[k].weight.T
        return x.sum()

    @property
    def grads(self) -> list[Tensor | None]:
        return [layer.weight.grad for layer in self.layers]


class Noted:
    """The numbers of the layers in each bucket that a rank sends, and how many gradients there were then."""

    def __init__(self, model: Branches) -> None:
        averaging.BUCKET = 4  # one for each
        self.model, self.send, averaging.send = model, averaging.send, self
        self.sent: list[tuple[str, int]] = []
        averaging.average(model, dist.group.WORLD)

    def __call__(self, gradients: Any, group: Any) -> Any:
        grads = self.model.grads
        names = "".join(str(k) for k, grad in enumerate(grads) if any(grad is one for one in gradients))
        if names:
            self.sent.append((names, sum(grad is not None for grad in grads)))
        return self.send(gradients, group)

    def since(self) -> list[tuple[str, int]]:
        said, self.sent = self.sent, []
        return said


def drawn(seed: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def grads_of(seed: int, order: tuple[int, ...]) -> list[Tensor]:
    """What one process has."""
    model = Branches()
    model(drawn(seed), order).backward()
    return [torch.zeros(4, 4) if grad is None else grad for grad in model.grads]


def means(rank: int) -> None:
    orders = ((0, 1, 2), (2, 0, 1))
    model = Branches()
    noted = Noted(model)
    one, two = (grads_of(seed, order) for seed, order in enumerate(orders))
    model(drawn(rank), orders[rank]).backward()
    wanted = [("2", 1), ("1", 2), ("0", 3)] if rank == 0 else [("2", 3), ("1", 3), ("0", 3)]
    assert noted.since() == wanted, f"rank {rank}: in one order, whichever way its backward went"
    for grad, a, b in zip(model.grads, one, two, strict=True):
        torch.testing.assert_close(grad, (a + b) / 2)
    model(drawn(rank), orders[rank]).backward()  # in a loop of one's own gradients add up
    for grad, a, b in zip(model.grads, one, two, strict=True):
        torch.testing.assert_close(grad, a + b)
    noted.since()
    averaging.wait(model, True)
    model.zero_grad()
    model(drawn(rank), orders[rank]).backward()
    for grad, a in zip(model.grads, (one, two)[rank], strict=True):
        torch.testing.assert_close(grad, a)
    assert not noted.since(), "a backward that is not the last of its step"
    averaging.wait(model, False)
    model(drawn(rank), orders[rank]).backward()
    for grad, a, b in zip(model.grads, one, two, strict=True):
        torch.testing.assert_close(grad, a + b)


def test_gradients_are_means_sent_in_one_order_while_the_backward_runs() -> None:
    spawn(2, means)


def parts(rank: int) -> None:
    model = Branches()
    noted = Noted(model)
    for number in range(3):
        model.zero_grad()
        model(drawn(rank), (0, 1)).backward()
        assert model.grads[2] is None
        torch.testing.assert_close(model.grads[0], sum(grads_of(seed, (0, 1))[0] for seed in range(2)) / 2)
        # the first time it is waited for, and nobody knows better
        assert noted.since() == ([("1", 1), ("0", 2)] if number else [("1", 2), ("0", 2)])
    model.zero_grad()
    averaging.wait(model, True)
    model(drawn(rank), (2, 0)).backward()
    averaging.wait(model, False)
    model(drawn(rank), (0, 1)).backward()  # the last of this step has no part in layer 2, and an earlier one had
    torch.testing.assert_close(model.grads[2], sum(grads_of(seed, (2, 0))[2] for seed in range(2)) / 2)
    assert noted.since()[-1][0] == "2"
    model.zero_grad()
    model(drawn(rank), (0, 1, 2)).backward()  # which comes back
    torch.testing.assert_close(model.grads[2], sum(grads_of(seed, (0, 1, 2))[2] for seed in range(2)) / 2)


def test_a_parameter_without_a_part_in_the_loss_has_no_gradient_and_holds_nobody_up() -> None:
    spawn(2, parts)


def changes(rank: int) -> None:
    """Layers that are frozen, and parameters that come later; a backward that failed."""
    model = Branches()
    noted = Noted(model)
    model.layers[1].requires_grad_(False)
    model.layers[2].weight = nn.Parameter(torch.ones(4, 4))
    model(drawn(rank), (0, 1, 2)).backward()
    want = [grads_of(seed, (0, 1, 2)) for seed in range(2)]
    assert model.grads[1] is None and [name for name, _ in noted.since()] == ["2", "0"]
    for k in (0, 2):
        torch.testing.assert_close(model.grads[k], (want[0][k] + want[1][k]) / 2)
    model.zero_grad()
    model.layers[1].requires_grad_(True)
    hook = model.layers[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(drawn(rank), (0, 1, 2)).backward()
    hook.remove()
    model.zero_grad()
    model(drawn(rank), (0, 1, 2)).backward()
    for grad, a, b in zip(model.grads, *want, strict=True):
        torch.testing.assert_close(grad, (a + b) / 2)


def test_what_is_trained_may_change_and_a_backward_may_fail() -> None:
    spawn(2, changes)


class Low(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return (self.p * x).float().sum()


def low(rank: int) -> None:
    """256 + 1 + 1 is 256 in bf16, and 2048 + 1 + 1 is 2048 in fp16."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        model = Low(dtype)
        averaging.average(model, dist.group.WORLD)
        model(large if rank == 0 else 1.0).backward()
        wanted, grad = torch.tensor((large + 2) / 3).to(dtype), model.p.grad
        assert grad is not None and grad.dtype == dtype and torch.equal(grad, wanted.expand(3)), f"{dtype}: {grad}"


def test_gradients_in_low_precision_are_summed_in_fp32() -> None:
    spawn(3, low)


def goes(rank: int) -> None:
    model = mc.build("gpt2", config=TINY | {"positions": 64}, machine=COPIES)
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    left = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert not any(p() is not None for p in left) and not averaging.KNOWN


def test_a_model_that_nobody_has_leaves_no_memory() -> None:
    spawn(2, goes)


def ones_own(rank: int) -> None:
    """A loop that knows of no ranks: FSDP's is the same."""
    ids = torch.arange(24).view(2, 12)[rank : rank + 1]
    norms = []
    for machine in (COPIES, replace(COPIES, replicate=1, fsdp=2)):
        model = mc.build("gpt2", config=TINY | {"positions": 64, **STILL}, machine=machine)
        model(ids, labels=ids).loss.backward()
        norms.append(torch.stack([full(p.grad).norm() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*norms)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_a_loop_of_ones_own_has_means_too() -> None:
    spawn(2, ones_own)


def copied(rank: int) -> None:
    """Copies by deepcopy and by torch's average of weights, compiled before they have run; a pickle is for a process of its own."""
    whole, ids = mc.build("gpt2", config=TINY | {"positions": 64, **STILL}), torch.arange(24).view(2, 12)
    whole(ids, labels=ids).loss.backward()
    model = mc.build("gpt2", config=TINY | {"positions": 64, **STILL}, machine=COPIES)
    mine = ids[rank : rank + 1].to(model.device)
    model(mine, labels=mine).loss.backward()  # it has been trained already
    for made in (copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module):
        run = made if rank == 0 else torch.compile(made, backend="eager")
        for _ in range(2):
            made.zero_grad()
            run(mine, labels=mine).loss.backward()
        torch.testing.assert_close([full(p.grad) for p in made.parameters()], [p.grad for p in whole.parameters()])
    assert copy.deepcopy(copy.copy(model)) not in averaging.KNOWN
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    if rank == 0:
        torch.load(file, weights_only=False)(mine, labels=mine).loss.backward()


def test_a_copy_that_is_made_of_a_model_has_means_too() -> None:
    spawn(2, copied)


def compiled(rank: int, change: Callable[[mc.Model], object]) -> None:
    """A compiled model has parameters that came after it was loaded."""
    ids, grads = torch.arange(24).view(2, 12), []
    for machine in (None, COPIES):
        model = mc.build("gpt2", config=TINY | {"positions": 64, **STILL}, machine=machine)
        change(model)
        x = (ids if machine is None else ids[rank : rank + 1]).to(model.device)
        torch.compile(model, backend="eager")(x, labels=x).loss.backward()
        grads.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("change", [
    lambda model: mc.add_adapter(model, mc.AdapterConfig(name="lora", rank=2)), lambda model: model.resize_token_embeddings(90)
], ids=["adapter", "words"])  # fmt: skip
def test_parameters_that_come_before_a_model_is_compiled_have_means(change: Callable[[mc.Model], object]) -> None:
    spawn(2, compiled, change)


def thawed(rank: int, change: Callable[[mc.Model], object], whole: bool) -> None:
    """Of a compiled model, already trained with two blocks frozen, other parameters are trained now."""
    ids, grads = torch.arange(24).view(2, 12), []
    for machine in (None, COPIES):
        model = mc.build("gpt2", config=TINY | {"positions": 64, **STILL}, machine=machine)
        x = (ids if machine is None else ids[rank : rank + 1]).to(model.device)
        run = torch.compile(model, backend="eager", fullgraph=whole)
        model.decoder.requires_grad_(False)
        model(x, labels=x).loss.backward()
        run(x, labels=x).loss.backward()
        change(model)
        for _ in range(2):
            model.zero_grad()
            run(x, labels=x).loss.backward()
        grads.append([full(p.grad) for p in model.parameters() if p.grad is not None])
        torch.compiler.reset()
    torch.testing.assert_close(*grads)


def only_blocks(model: mc.Model) -> None:
    """Train what nobody has trained before, and nothing else: no gradient is formed that was known."""
    model.requires_grad_(False)
    model.decoder.requires_grad_(True)


def other_positions(model: mc.Model) -> None:
    model.embed.positions = torch.nn.Embedding(64, TINY["dim"])
    torch.nn.init.constant_(model.embed.positions.weight, 0.1)


def positions_alone(model: mc.Model) -> None:
    """Train what was not there before, and nothing else."""
    model.requires_grad_(False)
    other_positions(model)


TRACES_AGAIN = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch 2.11 does not trace again")


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
@pytest.mark.parametrize("change", [only_blocks, other_positions, pytest.param(positions_alone, marks=TRACES_AGAIN)])
def test_what_a_compiled_model_trains_may_change(change: Callable[[mc.Model], object], whole: bool) -> None:
    spawn(2, thawed, change, whole)


def unannounced(rank: int, change: Callable[[mc.Model], object]) -> None:
    """What torch 2.11 does not trace again for: `thawed`, by calls, where nothing is looked at after the first forward."""
    ids, grads = torch.arange(24).view(2, 12), []
    for machine in (None, COPIES):
        model = mc.build("gpt2", config=TINY | {"positions": 64, **STILL}, machine=machine)
        x = (ids if machine is None else ids[rank : rank + 1]).to(model.device)
        model.decoder.requires_grad_(False)
        with pytest.MonkeyPatch.context() as patch:
            if machine is not None:
                averaging.looked(averaging.KNOWN[model].name)
                assert not any(p.requires_grad for p in model.decoder.parameters())
                patch.setattr(averaging.Averaging, "watch", lambda self: None)
            change(model)
            for _ in range(2):
                model.zero_grad()
                model(x, labels=x).loss.backward()
        grads.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("change", [only_blocks, other_positions])
def test_what_a_compiled_model_trains_may_change_unseen(change: Callable[[mc.Model], object]) -> None:
    spawn(2, unannounced, change)


# ------------------------------------------------------------------------------------------------------------ as records


class Silent(Played):
    """As a GPU's: what is recorded sends nothing until it is done."""

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(averaging, "send", lambda gradients, group: lambda: None)
            patch.setattr(Ranks, "exchanged", lambda self, parts, sizes: [parts[0].new_zeros(n) for n in sizes])
            for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):  # FSDP's
                patch.setattr(dist, name, lambda *args, **options: None)
            return super().__call__(work)


def steps(machine: Machine | None, lengths: tuple[int, ...], parts: int, recorder: Any, name: str = "adamw",
          precision: str = "fp64") -> tuple[list[float], list[Tensor], Any]:
    """Losses of twelve steps of this rank's part of the batches, and the weights after them. Nothing is dropped in fp64."""
    ranks, exact = join(machine) if machine is not None else ALONE, precision == "fp64"
    torch.manual_seed(0)
    config, dtype, low = TINY | {"positions": 64, **(STILL if exact else {})}, *(("fp64", None) if exact else ("fp32", precision))
    model = mc.build("gpt2", config=config, machine=machine, dtype=dtype, precision=low)
    optimizer: Any = build_optimizer(model, OptimizerConfig(name=name), ranks)
    graphs = Graphs(model.train(), recorder(model, optimizer), repeats=False) if recorder is not None else None
    device = next(model.parameters()).device
    losses = []
    for number in range(12):
        generator = torch.Generator().manual_seed(number)
        batches = [on_device(batch_of("lm", 2, lengths[(number + k) % len(lengths)], generator), device) for k in range(2 * parts)]
        mine = batches[ranks.share :: ranks.shares]
        (targets,) = ranks.sum(sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in mine))
        compute = partial(autocast, precision, device)
        loss, _ = accumulate(model, mine, "lm", compute, targets=targets, ranks=ranks, graphs=graphs)
        squares, loss = ranks.verdict(optimizer.squares(ranks.copies), loss)
        update(model, optimizer, loss, 1e-2, 1.0, squares=squares, graphs=graphs)
        losses.append(float(loss))
    return losses, [full(p.detach()) for p in model.parameters()], graphs


def records(rank: int, machine: Machine, lengths: tuple[int, ...], parts: int, name: str = "adamw") -> None:
    stepping.number_on = lambda value, device: torch.full((), value, device=device)  # as on a device
    on_gpu = DEVICE != "cpu"
    wanted, weights, _ = steps(machine if on_gpu else None, lengths, parts, None, name)  # a GPU rounds Muon's products elsewhere
    losses, found, graphs = steps(machine, lengths, parts, (lambda *_: GPU(torch.device(DEVICE))) if on_gpu else Silent, name)
    assert (graphs.updates.launch is not None) == (name != "adamw") and not graphs.ended
    assert on_gpu or (graphs.recorder.played > 0 and (graphs.recorder.updates > 0) == (name != "adamw"))
    kinds, averages = {kind for shapes in graphs.shapes.values() for kind in shapes.records}, join(machine).averages
    one = 2 * parts == machine.shares
    assert kinds == ({("first", averages)} if one else {("first", False), ("later", averages)}), kinds
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-9, atol=0)
    for a, b in zip(found, weights, strict=True):
        torch.testing.assert_close(a[: len(b)], b, rtol=1e-7, atol=1e-9)  # a vocabulary's table may be longer among ranks
    graphs.end()  # NCCL would wait for them


@pytest.mark.parametrize(("lengths", "parts"), [
    pytest.param((24,), 1, id="one length"), pytest.param((24,), 2, id="micro-batches"),
    # of three lengths in turn the ranks meet them at different times: one replays what the other still calls, or records
    pytest.param((24, 20, 16), 1, id="three lengths"), pytest.param((24, 24, 24, 20, 16), 1, id="other lengths here and there"),
    pytest.param((24, 20, 16), 2, id="three lengths, micro-batches"),
])  # fmt: skip
def test_records_of_copies_train_as_one_process(lengths: tuple[int, ...], parts: int) -> None:
    assert WARM < 6
    spawn(2, records, COPIES, lengths, parts)


@pytest.mark.parametrize(("machine", "parts"), [
    pytest.param(TENSORS, 1, id="tensors"), pytest.param(SEQUENCES, 1, id="sequences"),
    pytest.param(BOTH, 2, id="copies of tensors", marks=pytest.mark.slow),
])  # fmt: skip
def test_records_of_tensor_parallel_ranks_train_as_one_process(machine: Machine, parts: int) -> None:
    spawn(machine.ranks, records, machine, (24, 20) if machine.replicate == 1 else (24,), parts)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_updates_of_copies_train_as_one_process(name: str) -> None:
    """One copy may replay what the other still calls. Muon's send each other matrices."""
    spawn(2, records, COPIES, (24, 20, 16), 1, name)


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


def test_gradients_are_brought_to_their_place_before_they_are_sent() -> None:
    """On a GPU both are recorded, one after the other."""
    model, order = nn.Linear(1, 1), list[str]()
    averaging.KNOWN[model] = averaging.Averaging(model, cast(Any, None))
    averaging.watch(model)

    class Looks(Played):
        def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
            hooks = cast(Any, model.weight)._post_accumulate_grad_hooks.values()
            order.extend(hook.__name__ for hook in hooks)
            raise RuntimeError("enough")

    graphs = Graphs(model, Looks(model))
    graphs.gradients = {p: torch.zeros_like(p) for p in model.parameters()}
    assert graphs.record(graphs_module.Shapes(), ("first", True), lambda given, scale: torch.ones(()), {}, None) is None
    assert order == ["bring", "formed"]


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


SPREAD = {"layers": 1, "dim": 16, "hidden": 24, "heads": 2, "kv_heads": 2, "positions": 16, "vocab": 40}


def spread(rank: int) -> None:
    """Where tensor and sequence parallelism make a DTensor of every parameter, which has storage only after the model is spread."""
    model = mc.build("llama-2-7b", config=SPREAD, machine=replace(BOTH, sequence_parallel=True)).train()
    sent: list[int] = []
    real, averaging.send = averaging.send, lambda some, group: (sent.append(len(some)), real(some, group))[1]
    ids = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(rank // 2)).to(DEVICE)
    model(ids, labels=ids).loss.backward()
    parameters: list[Any] = list(model.parameters())
    assert all(hasattr(p, "placements") for p in parameters) and sent == [len(parameters), 0], f"sent: {sent}"
    for p in parameters:
        mine = p.grad.to_local().contiguous()
        parts = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(parts, mine)
        assert mine.any() and torch.equal(parts[rank % 2], parts[rank % 2 + 2]), f"{p.shape}: not the mean of both"


def test_parameters_that_get_storage_later_are_averaged() -> None:
    spawn(4, spread)


def cast_later(rank: int, machine: Machine) -> None:
    """Before the first forward or after a step; also a cast that changes nothing. Each time torch swaps all parameters."""
    ids = torch.randint(40, (4, 8), generator=torch.Generator().manual_seed(3))
    changes: list[tuple[str, Callable[[Any], Any]]] = [("fp64", lambda model: model.to(model.device)), ("fp32", nn.Module.double)]
    for (dtype, change), early in product(changes, (True, False)):
        grads = []
        for where in (None, machine):
            model = mc.build("llama-2-7b", config=SPREAD, dtype=dtype, seed=3, machine=where).train()
            mine = (ids if where is None else ids.chunk(machine.shares)[rank // 2]).to(model.device)
            if not early:
                model(mine, labels=mine).loss.backward()
                model.zero_grad()
            change(model)(mine, labels=mine).loss.backward()
            assert not any(place.is_partial() for p in model.parameters() for place in getattr(p.grad, "placements", ()))
            grads.append({name: full(p.grad) for name, p in model.named_parameters()})
        for name, wanted in grads[0].items():
            torch.testing.assert_close(grads[1][name], wanted, rtol=1e-10, atol=1e-12, msg=f"{dtype}, {early}: {name}")


@pytest.mark.parametrize("machine", [SEQUENCES, replace(BOTH, sequence_parallel=True)], ids=["sequences", "copies"])
def test_a_model_that_is_cast_after_it_was_spread_has_means_and_sums(machine: Machine) -> None:
    spawn(machine.ranks, cast_later, machine)
