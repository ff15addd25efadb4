"""The language-model head's loss: the fused op in chunks against whole logits in double precision, and when the head uses it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import modelcenter as mc
from modelcenter import ops
from modelcenter.layers import Batch, Linear, LMHead
from modelcenter.layers.losses import value_loss
from modelcenter.layers.view import View
from modelcenter.ops import linear
from modelcenter.ops import linear_cross_entropy as op
from modelcenter.ops._kernels import available
from modelcenter.ops._mode import rehearsal
from modelcenter.ops.cross_entropy import IGNORE, ignored

module = __import__("modelcenter.ops.linear_cross_entropy", fromlist=["op"])
compiled = pytest.mark.skipif(not available("cpu"), reason="no compiled kernels here")
HOW = {"plain": (1.0, 0.0, 0.0), "all": (0.3, 0.1, 1e-2)}


def made(n: int, dim: int, vocab: int, dtype: torch.dtype = torch.float32, every: int = 4) -> list[Any]:
    """x, weight, bias and labels, each `every`-th of which is none."""
    torch.manual_seed(n + vocab)
    x, weight, bias = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((n, dim), (vocab, dim), (vocab,)))
    labels = torch.randint(vocab, (n,))
    labels[::every] = IGNORE
    return [x, weight, bias, labels]


def exact(args: list[Any], how: tuple[float, ...] = HOW["plain"], factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    """The loss from whole logits in double precision by torch, and the gradients of its product with `factor`."""
    x, weight, bias = (a.detach().double().requires_grad_() for a in args[:3])
    logits = F.linear(x * how[0], weight, bias)
    loss = F.cross_entropy(logits, args[3], ignore_index=IGNORE, label_smoothing=how[1], reduction="sum")
    loss = loss + how[2] * (logits.logsumexp(1) ** 2 * (args[3] != IGNORE)).sum()
    return loss.detach(), list(torch.autograd.grad(loss * factor, (x, weight, bias)))


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("size", [(50, 16, 37), (9, 8, 1), (129, 24, 65), (1, 1, 1030)], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunks_are_whole_logits(monkeypatch: pytest.MonkeyPatch, rows: int, size: tuple[int, int, int], how: str) -> None:
    monkeypatch.setattr(module, "rows_of_a_chunk", lambda x, vocab, kind: (rows, vocab + 3))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        args = made(*size, dtype)
        loss = op(*args, *HOW[how])
        wanted, grads = exact(args, HOW[how], 3.7)
        (loss * 3.7).backward()
        assert loss.dtype == torch.float32
        close(loss.detach(), wanted, tolerance)
        for a, grad in zip(args[:3], grads, strict=True):
            assert a.grad.dtype == dtype
            close(a.grad, grad, tolerance)


@pytest.mark.parametrize("n", [0, 5])
def test_no_label_is_no_loss(n: int) -> None:
    args = made(n, 4, 7, every=1)
    loss = op(*args)
    loss.backward()
    assert loss.item() == 0 and all(torch.equal(a.grad, torch.zeros_like(a)) for a in args[:3])


@compiled
def test_only_gradients_that_are_wanted_are_formed() -> None:
    x, weight, bias, labels = made(6, 4, 7)
    whole = exact([x, weight, bias, labels])[1]
    for wanted in range(1, 8):
        for i, a in enumerate((x, weight, bias)):
            a.requires_grad_(bool(wanted >> i & 1)).grad = None
        with torch.no_grad():
            outs = module.linear_cross_entropy_forward(x, weight, bias, labels, 1.0, 0.0, 0.0, wanted, None)
        assert [out.numel() > 0 for out in outs[1:]] == [bool(wanted >> i & 1) for i in range(3)]
        op(x, weight, bias, labels).backward()
        for i, a in enumerate((x, weight, bias)):
            assert (a.grad is not None) == a.requires_grad
            if a.grad is not None:
                close(a.grad, whole[i])
    with torch.no_grad():
        assert not op(x, weight, bias, labels).requires_grad


def test_backward_twice_and_accumulated() -> None:
    args = made(12, 5, 9)
    _, grads = exact(args)
    loss = op(*args)
    loss.backward(torch.tensor(3.0), retain_graph=True)
    kept = [a.grad for a in args[:3]]
    loss.backward(torch.tensor(2.0))  # adds to the gradients that the first one handed over
    op(*args).backward(torch.tensor(0.5))
    for a, first, grad in zip(args[:3], kept, grads, strict=True):
        assert a.grad is first
        close(a.grad, 5.5 * grad)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_a_row_of_logits_is_zero(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's product in bf16 reads it if the vocabulary is odd: gradients were NaN where memory was."""
    multiply, behind = module.multiply, list[Tensor]()

    def watched(out: Tensor, a: Tensor, b: Tensor, *rest: float) -> None:
        behind.extend(t._base[:, t.size(1) :] for t in (out, a) if t._base is not None and t.size(1) == 7 < t._base.size(1))
        multiply(out, a, b, *rest)

    monkeypatch.setattr(module, "multiply", watched)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        x, weight, _, labels = made(12, 5, 7, dtype)
        grads = torch.autograd.grad(op(x, weight, None, labels), (x, weight))
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(behind) == 2 and not any(t.count_nonzero() for t in behind) and all(g.isfinite().all() for g in grads)


@compiled
def test_the_gradient_of_the_weight_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    args, scaled, call = made(12, 5, 9), [], module.call

    def watched(name: str, *rest: Any) -> None:
        call(name, *rest)
        if name == "scale":
            scaled.append(rest[0].data_ptr())

    monkeypatch.setattr(module, "call", watched)
    op(*args).backward()
    assert [a.grad.data_ptr() for a in args[:3]] == scaled


def test_a_tied_table_gets_both_gradients() -> None:
    _, table, bias, labels = made(10, 6, 11)
    ids = torch.arange(10) % 11
    op(F.embedding(ids, table), table, bias, labels).backward()
    wide = table.detach().double().requires_grad_()
    F.cross_entropy(F.linear(wide[ids], wide, bias.detach().double()), labels, reduction="sum").backward()
    close(table.grad, wide.grad)


@compiled
@pytest.mark.parametrize("label", [-1, 7, 2**40])
def test_a_label_out_of_the_vocabulary(label: int) -> None:
    x, weight, bias, labels = made(6, 4, 7)
    labels[3] = label
    for call in (lambda: op(x, weight, bias, labels), lambda: ops.cross_entropy(F.linear(x, weight), labels)):
        with pytest.raises(ValueError, match=rf"labels\[\d\] is {label}; wanted 0 to 6"):
            call()


@compiled
def test_the_kernel_itself_ignores_rows_and_columns() -> None:
    """On a CPU it is never given a row without a label; on CUDA it is."""
    logits, labels, losses = torch.randn(3, 16), torch.tensor([2, IGNORE, 0]), torch.empty(3)
    before = logits.clone()
    module.call("cross_entropy_both", logits, labels, 13, 0.0, 0.0, 1.0, losses)
    assert losses[1] == 0 and logits[1, :13].eq(0).all() and torch.equal(logits[:, 13:], before[:, 13:])
    close(logits[::2, :13], before[::2, :13].softmax(1) - F.one_hot(labels[::2], 13))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("road", ["op", "reference"])
def test_autocast(monkeypatch: pytest.MonkeyPatch, low: torch.dtype, units: bool, road: str) -> None:
    monkeypatch.setattr(linear, "has_low_units", lambda dtype: units)
    for kind in (torch.float32, low):
        args = made(40, 16, 37)
        args[0] = args[0].detach().to(kind).requires_grad_()
        with torch.autocast("cpu", low):
            loss = op(*args) if road == "op" else op.reference(*args, *HOW["plain"], 7, low)
        loss.backward()
        wanted, grads = exact(args)
        close(loss.detach(), wanted, 1e-2)
        for a, grad in zip(args[:3], grads, strict=True):
            assert a.grad.dtype == a.dtype
            close(a.grad, grad, 1e-2)
        if not units:  # then nothing but x was rounded
            close(args[1].grad, grads[1], 1e-2 if kind == torch.float32 else 1e-5)


@pytest.mark.parametrize("low", [False, True])
def test_one_operator_in_a_graph(low: bool) -> None:
    from torch._dynamo.testing import CompileCounter

    args = made(12, 5, 9)
    counter = CompileCounter()

    def loss(*args: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            return op(*args, 0.5, 0.1, 1e-3)  # type: ignore[no-any-return]

    wanted = torch.autograd.grad(loss(*args), args[:3])
    torch._dynamo.reset()
    torch.compile(loss, backend=counter, fullgraph=True)(*args)
    assert counter.frame_count == 1
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*args), args[:3])
    exactly = not low or linear.has_low_units(torch.bfloat16)  # else torch may form a product in bf16 on another road when traced
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) if exactly else (a - b).norm() < 1e-2 * b.norm()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_operators_are_what_they_say(dtype: torch.dtype) -> None:
    for args in (a for a in op.cases("cpu", dtype) if dtype == torch.bfloat16 or len(a[0]) == 3):  # each kind of arguments
        floating = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        torch.library.opcheck(op.kernel.forward.operator, floating)


@compiled
def test_threads_change_nothing() -> None:
    before, seen = torch.get_num_threads(), []
    torch.manual_seed(0)
    logits, labels = torch.randn(300, 513), torch.randint(513, (300,))
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            logits.requires_grad_().grad = None
            loss = ops.cross_entropy(logits, labels, 0.1, 1e-3)
            loss.backward()
            seen.append((loss.detach(), logits.grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_the_reference_computes_high() -> None:
    logits, labels = torch.randn(8, 99, dtype=torch.bfloat16), torch.arange(8)
    loss = ops.OPS["cross_entropy"].reference(logits, labels)
    assert loss.dtype == torch.float32
    close(loss, F.cross_entropy(logits.double(), labels, reduction="sum"), 1e-6)


# ---- the head


def head(shift: bool = True, **options: Any) -> LMHead:
    torch.manual_seed(0)
    return LMHead(8, 31, shift=shift, **options).train()


def batch(labels: Tensor) -> Batch:
    return Batch(labels, labels=labels)


def changed(out: Linear) -> dict[str, Callable[[], Any]]:
    """Ways in which a layer is more than its weight."""
    return {
        "a hook": lambda: out.register_forward_hook(lambda module, args, y: 2 * y),
        "a hook before": lambda: out.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        "a forward of its own": lambda: setattr(out, "forward", lambda x: 2 * F.linear(x, out.weight)),
    }


@pytest.mark.parametrize("way", ["a hook", "a hook before", "a forward of its own", "another class"])
@pytest.mark.parametrize("shift", [False, True])
def test_a_changed_layer_is_called(way: str, shift: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    lm, x, labels = head(shift), torch.randn(3, 5, 8, requires_grad=True), torch.randint(31, (3, 5))
    labels[0, 1:4] = IGNORE
    if way == "another class":
        class Doubled(Linear):
            def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
                return 2 * super().forward(x, bias=bias)

        doubled = Doubled(8, 31, bias=False)
        doubled.load_state_dict(lm.out.state_dict())
        lm.out = doubled
    else:
        changed(lm.out)[way]()
    found = lm(x, batch(labels)).loss
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE) if shift else labels
    wanted = F.cross_entropy(2 * F.linear(x, lm.out.weight).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*(torch.autograd.grad(l, (x, lm.out.weight)) for l in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shift", [False, True])
def test_smoothing_and_z_are_applied(shift: bool) -> None:
    lm, x, labels = head(shift, bias=True, scale=0.7), torch.randn(3, 5, 8), torch.randint(31, (3, 5))
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE) if shift else labels
    logits = F.linear(x * 0.7, lm.out.weight, lm.out.bias).flatten(0, 1)
    seen = set()
    for smoothing, z in ((0.0, 0.0), (0.2, 0.0), (0.0, 0.01)):
        lm.smoothing, lm.z = smoothing, z
        wanted = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
        wanted = wanted + z * (logits.logsumexp(1) ** 2)[targets.flatten() != IGNORE].mean()
        found = lm(x, batch(labels)).loss
        torch.testing.assert_close(found, wanted)
        seen.add(round(found.item(), 4))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("preset", "task", "before"), [("bert-base-uncased", "mlm", 1), ("t5-small", "seq2seq", 1), ("gpt2", "lm", 0)]
)
def test_labelled_positions_are_asked_for_before_the_body(
    preset: str, task: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has a whole body before it would have to end that first."""
    model = mc.build(preset, task=task, dtype=torch.float32, config={"layers": 1, "dim": 16, "heads": 2, "vocab": 50}).train()
    ids = torch.randint(1, 50, (2, 6))
    labels = ids.masked_fill(ids % 2 == 0, IGNORE)
    order: list[str] = []
    seen: dict[str, Any] = {}
    nonzero, body = Tensor.nonzero, type(model).body
    monkeypatch.setattr(Tensor, "nonzero", lambda x: order.append("asked") or nonzero(x))
    monkeypatch.setattr(type(model), "body", lambda self, batch: order.append("body") or body(self, batch))
    model.head.register_forward_pre_hook(lambda head, args: seen.update(x=args[0], batch=args[1]))
    loss = model(ids, labels=labels).loss
    assert order.index("body") == before
    torch.testing.assert_close(loss, model.head(seen["x"], replace(seen["batch"], labelled=None)).loss)


def test_masked_language_modelling_transforms_labelled_positions_alone() -> None:
    class Counted(nn.Identity):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows += len(x)
            return x

    lm, labels = head(False, transform=Counted()), torch.full((3, 50), IGNORE)
    labels[:, ::10] = 1
    lm(torch.randn(3, 50, 8, requires_grad=True), batch(labels)).loss.backward()
    assert lm.transform.rows == 15


READ = (("bert-base-uncased", "mlm"), ("bert-base-uncased", "classify"), ("gpt2", "classify"), ("llama-3.2-1b", "classify"),
        ("bloom-560m", "embed"))  # fmt: skip


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("how", ["dense", "padded", "packed", "vectors"])
@pytest.mark.parametrize(("preset", "task"), READ)
def test_the_last_block_works_for_what_the_head_reads(
    preset: str, task: str, how: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its attention, and where a kernel takes packed queries and these see all of a sequence, from its queries on: for those
    positions alone, with the loss and the gradients of all of them."""
    asked, by_lengths = list[int](), View.by_lengths
    monkeypatch.setattr("modelcenter.layers.view.covers", lambda q: served and bool(q.size(3)))
    monkeypatch.setattr(View, "by_lengths", lambda view, q, *rest: asked.append(q.size(2)) or by_lengths(view, q, *rest))
    sizes = {"layers": 2, "dim": 16, "heads": 2, "vocab": 50} | ({"kv_heads": 1, "head_dim": 8} if "llama" in preset else {})
    model = mc.build(preset, task=task, dtype=torch.float64, config=sizes).train()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (4, 6))
    given: dict[str, Any] = {"input_ids": ids}
    if how == "padded":
        given["attention_mask"] = torch.arange(6) < torch.tensor([[6], [3], [1], [4]])
    if how == "packed":
        given = {"input_ids": ids.view(1, -1), "cu_seq_lens_q": torch.tensor([0, 9, 10, 18, 24], dtype=torch.int32)}
    if task == "mlm":
        given["labels"] = given["input_ids"].masked_fill(given["input_ids"] % 4 > 0, IGNORE)
    else:
        given["labels"] = torch.tensor([0, 1, 1, 0]) if task == "classify" else torch.tensor([0.1, 0.9])
    if how == "vectors":
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids")).detach()
    read = int((given["labels"] != IGNORE).sum()) if task == "mlm" else 4
    rows = list[int]()
    stack = getattr(model, "encoder", None) or model.decoder
    stack.blocks[-1].ffn.register_forward_pre_hook(lambda layer, args: rows.append(args[0].shape[:2].numel()))

    def found(**more: Any) -> tuple[Any, dict[str, Tensor]]:
        out = model(**given, **more)
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return out, gradients

    (few, of_few), (every, of_every) = found(), found(output_hidden_states=True)
    assert rows == [read, 24] and read < 12
    assert asked == ([read] if served and preset.startswith("bert") else [])
    assert few.last_hidden_state is None and every.last_hidden_state.shape == every.hidden_states[-1].shape
    torch.testing.assert_close(few.loss, every.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_few, of_every, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        model(**{name: value for name, value in given.items() if name != "labels"})
        model.eval()(**given)
    assert rows[2:] == [24, 24], "where nothing is trained hidden states are a result too"


def test_labelled_places_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last block makes queries of these alone, which lie by their sequences; some places may have no label."""
    monkeypatch.setattr("modelcenter.layers.view.covers", lambda q: True)
    sizes = {"layers": 2, "dim": 16, "heads": 2, "vocab": 50, "dropout": 0.0, "attn_dropout": 0.0}
    model = mc.build("bert-base-uncased", task="mlm", dtype=torch.float64, config=sizes).train()
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (4, 6))
    labels = ids.masked_fill(ids % 3 > 0, IGNORE)
    places = torch.cat(((labels.flatten() != IGNORE).nonzero().squeeze(1), (labels.flatten() == IGNORE).nonzero()[:5, 0])).flip(0)

    def found(**more: Tensor) -> tuple[Tensor, ...]:
        loss = model(ids, labels=labels, **more).loss
        return loss.detach(), *torch.autograd.grad(loss, [p for name, p in model.named_parameters() if "k.bias" not in name])

    torch.testing.assert_close(found(target_places=places), found(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_last_block_of_which_nothing_is_read(device: str) -> None:
    """A micro-batch without a masked word: no loss, and zeros for gradients."""
    if not available(device):
        pytest.skip("no kernels for this device here")
    sizes = {"layers": 2, "dim": 16, "heads": 2, "vocab": 50}
    model = mc.build("bert-base-uncased", task="mlm", dtype=torch.float32, config=sizes, device=device).train()
    ids = torch.randint(5, 50, (2, 6), device=device)
    loss = model(ids, labels=torch.full_like(ids, IGNORE), num_items_in_batch=1).loss
    loss.backward()
    assert loss.item() == 0
    for name, p in model.named_parameters():
        assert p.grad is None or not p.grad.any(), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [1031, 1032, 2049])
def test_a_vocabulary_in_two_pieces(monkeypatch: pytest.MonkeyPatch, vocab: int, device: str) -> None:
    """A GPU multiplies what goes beyond a multiple of 8 apart; labels lie in both pieces."""
    if not available(device):
        pytest.skip("no kernels for this device here")
    pieces = module.even_pieces(vocab)
    assert sorted(i for piece in pieces for i in range(vocab)[piece]) == list(range(vocab))
    assert len(pieces) == (2 if vocab % 8 else 1)
    monkeypatch.setattr(module, "BYTES", {device: 4 * vocab * 16})  # several chunks
    monkeypatch.setattr(module, "FEWEST", 1)
    args = made(50, 24, vocab)
    args[3][1::5] = vocab - 1
    wanted, gradients = exact(args, HOW["all"])
    there = [a.detach().to(device).requires_grad_(a.is_floating_point()) for a in args]
    loss = op(*there, *HOW["all"])
    close(loss.detach().cpu(), wanted)
    for found, one in zip(torch.autograd.grad(loss, there[:3]), gradients, strict=True):
        close(found.cpu(), one)


def test_a_rehearsal_has_no_addresses() -> None:
    """Nor may it be asked for one: torch warns of it."""
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda")
    assert module.aligned(x) is x


def test_rows_of_a_chunk_on_a_gpu() -> None:
    """256 MiB of logits in 16 bits, but no fewer than 1024 rows: of a vocabulary of 250880 there would be 512, and the sum of the
    weight's gradient, which each chunk reads and writes, would take as long as the products."""
    x = torch.empty(1, 8)
    with rehearsal(gpu=True):
        rows = {vocab: module.rows_of_a_chunk(x, vocab, torch.bfloat16)[0] for vocab in (30522, 50257, 131072, 250880, 2**21)}
    assert rows == {30522: 4352, 50257: 2560, 131072: 1024, 250880: 1024, 2**21: 1024}
    assert module.rows_of_a_chunk(x, 2**25, torch.float32)[0] == 1, "on a CPU nothing asks for more"


@pytest.mark.parametrize("outputs", [1, 3])
def test_of_labels_that_are_numbers_only_what_fills_up_is_none(outputs: int) -> None:
    """-100 is a number; a row of what fills up changes neither the loss nor a gradient."""
    torch.manual_seed(0)
    logits, labels = torch.randn(5, outputs, requires_grad=True), torch.rand(5, outputs).round()
    labels[0] = IGNORE
    full = value_loss(logits, labels.squeeze(1), None)
    theirs = F.mse_loss if outputs == 1 else F.binary_cross_entropy_with_logits
    torch.testing.assert_close(full, theirs(logits, labels))
    (wanted,) = torch.autograd.grad(value_loss(logits[:3], labels[:3].squeeze(1), None), logits)
    labels[3:] = ignored(labels)
    (found,) = torch.autograd.grad(value_loss(logits, labels.squeeze(1), None), logits)
    torch.testing.assert_close(found, wanted)


def test_what_holds_the_gradient_of_the_weight() -> None:
    """On a GPU bf16 where there is one product to round, or an fp32 sum would take more than a chunk's logits do."""
    def held(rows: int, dtype: torch.dtype, kind: torch.dtype, several: bool, cuda: bool = True) -> torch.dtype:
        weight = SimpleNamespace(is_cuda=cuda, dtype=dtype, numel=lambda: rows * 4096)
        return module.summed_in(weight, kind, several)  # type: ignore[no-any-return]

    half, full = torch.bfloat16, torch.float32
    assert [held(16384, half, half, True), held(16385, half, half, True), held(16384, half, half, False)] == [full, half, half]
    assert {held(99999, half, half, True, cuda=False), held(99999, full, half, True)} == {full}


@pytest.mark.gpu
def test_chunks_add_no_error_to_the_gradient_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bf16 head in eight chunks: as exact as torch's one product of whole logits."""
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((4096, 256), (1024, 256)))
    labels = torch.randint(1024, (4096,), device="cuda")
    wanted = exact([x, weight, torch.zeros(1024, device="cuda"), labels])[1][1]
    eager = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), labels, reduction="sum"), weight)[0]
    monkeypatch.setitem(module.BYTES, "cuda", 1 << 20)
    monkeypatch.setattr(module, "FEWEST", 1)
    ours = torch.autograd.grad(op(x, weight, None, labels), weight)[0]
    monkeypatch.setitem(module.BYTES, "cuda", 1 << 19)  # and no room for the sum either
    rounded = torch.autograd.grad(op(x, weight, None, labels), weight)[0]
    errors = [float((found.double() - wanted).norm() / wanted.norm()) for found in (ours, eager, rounded)]
    assert errors[0] < 1.1 * errors[1] and errors[2] > 1.02 * errors[0], errors
