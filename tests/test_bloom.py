"""What only BLOOM has: published names and numbers, two spellings of its sizes, keys that change nothing, its own GELU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from transformers.models.bloom.modeling_bloom import GeLUFunction, build_alibi_tensor

import modelcenter as mc
from modelcenter import ops
from modelcenter.layers import ALiBi

BLOCK = (
    "input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm",
    "mlp.dense_h_to_4h", "mlp.dense_4h_to_h",
)  # fmt: skip
SIZES = {"vocab_size": 96, "hidden_size": 32, "n_head": 4, "n_layer": 2, "pad_token_id": 0}


def made(folder: Path, architecture: str = "BloomForCausalLM", **changes: Any) -> Any:
    """A loud model of transformers, saved to `folder`."""
    model = getattr(transformers, architecture)(transformers.BloomConfig.from_dict({**SIZES, **changes})).eval()
    zoo.loud(model)
    model.save_pretrained(folder)
    return model


def text() -> torch.Tensor:
    return torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(5))


def test_the_names_of_the_published_176b() -> None:
    model = mc.build("bloom-176b", device="meta", dtype="bf16")
    names = [name for name, _, _ in model.table.save(dict.fromkeys(model.shapes), model.shapes, bare=True)]
    modules = ["word_embeddings_layernorm", "ln_f", *(f"h.{i}.{part}" for i in range(70) for part in BLOCK)]
    leaves = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
    assert sorted(names) == sorted(["word_embeddings.weight", *leaves])
    sizes = [torch.Size(shape).numel() for _, shape, _ in model.table.save(dict.fromkeys(model.shapes), model.shapes)]
    assert 2 * sum(sizes) == 352_494_542_848  # total_size of its index


def test_a_causal_model_whose_file_has_no_prefix(tmp_path: Path) -> None:
    theirs = made(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    ours = mc.load(tmp_path)
    assert ours.task == "lm" and not ours.load_report.new and not ours.load_report.ignored
    zoo.near(ours(text()).logits, theirs(text()).logits)
    ours.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == theirs.state_dict().keys() - {"lm_head.weight"}


def test_the_old_spelling_of_the_sizes_and_keys_that_change_nothing(tmp_path: Path) -> None:
    theirs = made(tmp_path)
    carried = {
        "n_embed": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "seq_length": 2048, "pretraining_tp": 4,
        "slow_but_exact": False, "attention_softmax_in_fp32": True,
    }  # fmt: skip
    zoo.edit(tmp_path, hidden_size=None, n_head=None, n_layer=None, **carried)
    ours = mc.load(tmp_path)
    zoo.near(ours(text()).logits, theirs(text()).logits)
    ours.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())
    again = transformers.BloomForCausalLM.from_pretrained(tmp_path / "out")
    zoo.near(ours(text()).logits, again(text()).logits)


def test_heads_that_no_key_tells_are_eight(tmp_path: Path) -> None:
    """As transformers has it; the tensors are the same with any number of heads."""
    made(tmp_path, n_head=8)
    zoo.edit(tmp_path, n_head=None)
    ours, theirs = mc.load(tmp_path), transformers.BloomForCausalLM.from_pretrained(tmp_path)
    zoo.near(ours(text()).logits, theirs(text()).logits)
    ours.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm: True"),
        ({"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact: True"),
        ({"n_embed": 64}, r"hidden_size and n_embed: \[32, 64\]"),
        ({"num_attention_heads": 8}, r"n_head and num_attention_heads: \[4, 8\]"),
        ({"n_head": 5}, "a multiple of n_head, which is 5"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_refusals(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    made(tmp_path)
    zoo.edit(tmp_path, **changes)
    with pytest.raises(mc.InputError, match=words):
        mc.load(tmp_path)


def test_slow_but_exact_is_refused_because_it_leaves_biases_out(tmp_path: Path) -> None:
    plain = made(tmp_path)
    slow = transformers.BloomForCausalLM.from_pretrained(tmp_path, slow_but_exact=True, pretraining_tp=2)
    assert (plain(text()).logits - slow(text()).logits).abs().max() > 0.1
    zoo.edit(tmp_path, slow_but_exact=True)  # with pretraining_tp 1 it changes nothing
    zoo.near(mc.load(tmp_path)(text()).logits, plain(text()).logits)


def test_a_tagger_without_its_own_dropout_has_the_hidden_one(tmp_path: Path) -> None:
    theirs = made(tmp_path, "BloomForTokenClassification", hidden_dropout=0.35)
    assert "classifier_dropout" not in json.loads((tmp_path / "config.json").read_text())
    assert mc.load(tmp_path, task="tag").head.dropout.p == theirs.dropout.p == 0.35


def test_its_gelu() -> None:
    x = torch.linspace(-8, 8, 20001, dtype=torch.float64, requires_grad=True)
    ours, theirs = ops.gelu_cut(x), GeLUFunction.apply(x)
    assert (ours - theirs).abs().max() < 1e-15
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-11
    assert 1e-10 < (ops.gelu_tanh(x) - theirs).abs().max() < 1e-9  # why there are two
    single = x.detach().float()
    assert (ops.gelu_cut(single) - theirs.float()).abs().max() < 1e-6


@pytest.mark.parametrize("heads", [1, 6, 16, 32, 112])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_of_every_published_size(heads: int, dtype: torch.dtype) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 300, dtype=torch.long), heads, dtype)
    # their powers in fp32 are off by the last bits, which may round to the next bf16
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ALiBi(heads)(1, 300, torch.zeros((), dtype=dtype))[0], theirs, rtol=rtol, atol=0)


@pytest.mark.parametrize("by_distance", [False, True])
def test_what_is_hidden_between_tokens_is_no_distance(by_distance: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that are padded each, say; transformers counts the tokens that are real."""
    if by_distance:  # as on a GPU
        monkeypatch.setattr("modelcenter.layers.position.served", lambda vector, kind: True)
    case = zoo.Case("bloom", "default", "lm")
    theirs, ours = zoo.pair(case, torch.float64)
    ids = zoo.inputs(case)["input_ids"]
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([2, 3, 6]), 0)
    with torch.no_grad():
        wanted = theirs(ids, attention_mask=mask).logits
        assert ((ours(ids, mask).logits - wanted).abs() * mask[..., None]).max() < 1e-5  # their slopes are fp32
        first = ours(ids[:, :5], mask[:, :5], use_cache=True)
        rest = [ours(ids[:, i : i + 1], mask[:, : i + 1], past_key_values=first.past_key_values) for i in range(5, ids.size(1))]
        steps = torch.cat([first.logits, *(out.logits for out in rest)], 1)
    assert ((steps - wanted).abs() * mask[..., None]).max() < 1e-5  # their slopes are fp32
