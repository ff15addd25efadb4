"""Layers that no family uses yet, against transformers' own."""

from dataclasses import replace

import pytest
import torch
import transformers
from zoo import loud

from modelcenter import ops
from modelcenter.layers import FFN, Attention, Batch, GatedFFN, LayerNorm, Parallel, RelativeBias, Rotary, Stack
from modelcenter.layers.rope import PLAIN
from modelcenter.layers.view import Packing, View


def test_parallel_block_with_partial_interleaved_rotary_is_gptj() -> None:
    from transformers.models.gptj.modeling_gptj import GPTJBlock

    config = transformers.GPTJConfig(n_embd=32, n_head=4, n_layer=1, rotary_dim=4, n_positions=32, layer_norm_epsilon=0.05)
    config._attn_implementation = "eager"
    theirs = GPTJBlock(config, layer_idx=0).eval()
    loud(theirs)
    attn = Attention(32, 4, bias=False)
    ours = Parallel(lambda: LayerNorm(32, 0.05), attn, FFN(32, 128, ops.gelu_tanh)).eval()
    pairs = {"attn_norm": "ln_1", "attn.q": "attn.q_proj", "attn.k": "attn.k_proj", "attn.v": "attn.v_proj",
             "attn.o": "attn.out_proj", "ffn.up": "mlp.fc_in", "ffn.down": "mlp.fc_out"}  # fmt: skip
    for mine, other in pairs.items():
        ours.get_submodule(mine).load_state_dict(theirs.get_submodule(other).state_dict())
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    batch = Batch(x)
    found = ours(x, batch.view(causal=True, angles=Rotary(4, PLAIN, interleaved=True)(batch.at, x.dtype)))
    mask = torch.full((1, 1, 9, 9), float("-inf")).triu(1)
    wanted = theirs(x, attention_mask=mask, position_ids=torch.arange(9)[None])
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert wanted.std() > 0.5 and (found - wanted).abs().max() <= 1e-5 * wanted.std()


def test_a_parallel_block_makes_what_is_wanted_alone() -> None:
    torch.manual_seed(0)
    stack = Stack(Parallel(lambda: LayerNorm(16, 0.05), Attention(16, 2), FFN(16, 32, ops.gelu_tanh)) for _ in range(2)).double()
    x, wanted = torch.randn(2, 5, 16, dtype=torch.float64), torch.tensor([8, 1, 4])
    view = Batch(x).view(causal=True)
    torch.testing.assert_close(stack(x, view, wanted=wanted), stack(x, view).flatten(0, 1)[wanted][None], rtol=0, atol=1e-14)
    assert torch.equal(stack(x, view, wanted=torch.arange(10)), stack(x, view)), "all of them are no copy"


@pytest.mark.parametrize("kv", [2, 1])
@pytest.mark.parametrize("how", ["whole", "padded", "seen", "packed"])
def test_attention_is_asked_by_wanted_queries_alone(how: str, kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences of which several places are wanted, one, none and all, and an empty one whose head wants the token before it."""
    torch.manual_seed(0)
    attn, asked, by_lengths = Attention(16, 2, kv_heads=kv).double(), list[int](), View.by_lengths
    x, wanted = torch.randn(4, 5, 16, dtype=torch.float64), torch.tensor([0, 3, 8, 15, 16, 17, 18, 19])
    mask = torch.arange(5) >= torch.tensor([[0], [4], [2], [1]])
    if how == "packed":
        ends = [0, 7, 7, 8, 20, 20]
        x, wanted, packing = x.view(1, 20, 16), torch.cat((wanted, wanted[-1:])), Packing.of(ends, ends, x.device)
        view = Batch(x, packing=packing).view()
    else:
        monkeypatch.setattr("modelcenter.layers.batch.repeats", lambda x: how == "seen")
        view = Batch(x, None if how == "whole" else mask).view()
    every = attn(x, view).flatten(0, 1)[wanted][None]
    monkeypatch.setattr(View, "by_lengths", lambda view, q, *rest: asked.append(q.size(2)) or by_lengths(view, q, *rest))
    monkeypatch.setattr("modelcenter.layers.view.covers", lambda q: q.dtype == torch.float64 and q.shape[3] == 8)
    torch.testing.assert_close(attn(x, replace(view, wanted=wanted)), every, rtol=0, atol=1e-14)
    assert asked == [len(wanted)]
    placed = Batch(x).view(causal=True), View(torch.randn(1, 1, 1, x.size(1)).to(x)), View(mask.new_ones(1, 1, *x.shape[1:2] * 2))
    assert all(attn.asked(x, replace(other, wanted=wanted)) is None for other in placed) and attn.asked(x, view) is None
    attn.k.register_forward_hook(lambda layer, args, out: None)
    assert attn.asked(x, replace(view, wanted=wanted)) is None, "who has a hook on the queries is shown all of them"


@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("how", ["whole", "causal", "padded", "packed", "distances", "wanted"])
def test_who_watches_the_dropout_sees_probabilities(how: str, kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """b h s t of them, in evaluation too; the result is the same whatever hides keys, and what the hook makes of them counts."""
    torch.manual_seed(0)
    attn, x, seen = Attention(16, 4, kv_heads=kv).double().eval(), torch.randn(2, 9, 16, dtype=torch.float64), list[torch.Tensor]()
    mask, bias = torch.arange(9) >= torch.tensor([[0], [4]]), RelativeBias(4, 8, 20, bidirectional=True).double()(9, 9)
    view = {
        "whole": lambda: Batch(x).view(), "causal": lambda: Batch(x).view(causal=True), "padded": lambda: Batch(x, mask).view(),
        "packed": lambda: Batch(x, packing=Packing.of([0, 4, 9], [0, 4, 9], x.device)).view(causal=True),
        "distances": lambda: View(distances=bias, seen=mask),
        "wanted": lambda: replace(Batch(x).view(), wanted=torch.tensor([3, 11])),
    }  # fmt: skip
    x = x[:1] if how == "packed" else x
    monkeypatch.setattr("modelcenter.layers.view.covers", lambda q: q.dtype == torch.float64 and q.shape[3] == 4)
    wanted = attn(x, view[how]())
    hook = attn.dropout.register_forward_hook(lambda layer, args, out: seen.append(out))
    torch.testing.assert_close(attn(x, view[how]()), wanted, rtol=0, atol=1e-14)
    assert [p.shape for p in seen] == [(len(x), 4, 9, 9)]
    torch.testing.assert_close(seen[0].sum(-1), torch.ones_like(seen[0][..., 0]), rtol=0, atol=1e-14)
    hook.remove()
    attn.dropout.register_forward_hook(lambda layer, args, out: 0 * out)
    assert (attn(x, view[how]()) == attn.o.bias).all()


@pytest.mark.parametrize("training", [False, True])
def test_who_watches_the_dropout_of_a_gated_layer_sees_what_is_hidden(training: bool) -> None:
    ffn, x, seen = GatedFFN(16, 24, ops.geglu).train(training), torch.randn(3, 16), list[torch.Tensor]()
    wanted = ffn(x)
    ffn.dropout.register_forward_hook(lambda layer, args, out: seen.append(out))
    torch.testing.assert_close(ffn(x), wanted)
    torch.testing.assert_close(ffn.down(seen[0]), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("how", ["whole", "padded", "packed"])
def test_wanted_queries_on_a_gpu(how: str, p: float) -> None:
    """By the kernel: as near to fp64 as attention of all queries, so its gradients, and with the same bits again."""
    torch.manual_seed(0)
    x = torch.randn(6, 300, 128, device="cuda")
    mask = torch.arange(300, device="cuda") < torch.tensor([[300], [1], [130], [299], [128], [7]], device="cuda")
    batch = Batch(x, None if how == "whole" else mask)
    if how == "packed":
        ends = [0, 700, 700, 701, 1500, 1800, 1800]
        x = x.view(1, 1800, 128)
        batch = Batch(x, packing=Packing.of(ends, ends, x.device))
    chosen = torch.rand(1800, device="cuda") < 0.15
    chosen[:300] = True
    wanted = torch.cat((chosen.nonzero().squeeze(1), *([chosen.new_full((1,), 1799, dtype=torch.long)] * (how == "packed"))))
    attn, g = Attention(128, 2, dropout=p).cuda(), torch.randn(1, len(wanted), 128, device="cuda")

    def found(dtype: torch.dtype, alone: bool) -> list[torch.Tensor]:
        attn.to(dtype)
        given = x.to(dtype).requires_grad_()
        torch.manual_seed(3)
        out = attn(given, replace(batch.view(), wanted=wanted)) if alone else attn(given, batch.view()).flatten(0, 1)[wanted][None]
        return [t.double() for t in (out, *torch.autograd.grad(out, (given, *attn.parameters()), g.to(dtype)))]

    assert attn.bfloat16().asked(x.bfloat16(), replace(batch.view(), wanted=wanted)) is not None
    first, again = found(torch.bfloat16, True), found(torch.bfloat16, True)
    assert all(map(torch.equal, first, again))
    attn.dropout.p = 0.0
    whole, exact = found(torch.bfloat16, False), found(torch.float64, False)
    for few, every, true in zip(found(torch.bfloat16, True), whole, exact, strict=True):
        assert (few - true).norm() <= 2 * (every - true).norm() + 1e-3 * true.norm()
