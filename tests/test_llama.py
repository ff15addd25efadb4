"""What only LLaMA has: texts beyond the original length, its question answering's own prefix, old and partial files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import modelcenter as mc
from modelcenter.layers.rope import Dynamic, Linear, Llama3, LongRope, Plain, Yarn
from modelcenter.registry import presets

TOKENS = 24  # of every text here, beyond the 8 to 16 that the scalings call original
ROPES: dict[str, Plain] = {
    "plain": Plain(theta=200.0),
    "linear": Linear(theta=200.0, factor=3.0),
    "dynamic": Dynamic(theta=200.0, factor=3.0, positions=8),
    "yarn": Yarn(theta=200.0, factor=4.0, original=8, beta_fast=2.0, beta_slow=0.2),
    "llama3": Llama3(theta=200.0, factor=4.0, low=1.0, high=3.0, original=16),
    "longrope": LongRope(theta=200.0, short=(1.0,) * 4, long=(1.0, 1.7, 3.0, 5.0), original=8, positions=8, factor=3.0),
}
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip


def made(folder: Path, task: str = "lm", **changes: Any) -> Any:
    """A loud model of transformers, saved to `folder`."""
    cls = getattr(transformers, mc.LLaMA.tasks[task].architecture)
    config = LlamaConfig.from_dict({**SIZES, **changes}, attn_implementation="sdpa")
    model = cls(config).eval()
    zoo.loud(model)
    if task == "lm":
        model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def rope(name: str) -> dict[str, Any]:
    return mc.LLaMA.Config(positions=8, head_dim=8, rope=ROPES[name]).to_dict()


def text(rows: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, 96, (rows, tokens), generator=torch.Generator().manual_seed(5))


def fresh(model: Any) -> Any:
    """Their model without the frequencies that an earlier, longer input left in it."""
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@pytest.mark.parametrize("name", ROPES)
def test_beyond_the_original_length(name: str, tmp_path: Path) -> None:
    theirs = made(tmp_path, **{k: v for k, v in rope(name).items() if k.startswith("rope")})
    ours = mc.load(tmp_path)
    assert ours.config.rope == ROPES[name]
    ids = text()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    args = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    labels = ids.masked_fill(mask == 0, -100)
    wanted, found = fresh(theirs)(**args, labels=labels), ours(**args, labels=labels)
    zoo.near(found.logits[mask.bool()], wanted.logits[mask.bool()])
    assert abs(found.loss - wanted.loss) < 1e-5
    wanted.loss.backward()
    found.loss.backward()
    grads = zoo.gradients_like_theirs(ours)
    largest = max(p.grad.abs().max() for p in theirs.parameters())
    for key, parameter in theirs.named_parameters():
        assert (grads[key] - parameter.grad).abs().max() <= 1e-5 * largest, key
    if name != "plain":  # the scaling is felt at all
        plain = mc.load(tmp_path, config={"rope": Plain(theta=200.0)})
        assert (plain(**args).logits - found.logits)[mask.bool()].abs().max() > 0.1


@pytest.mark.parametrize("name", ROPES)
def test_greedy_beyond_the_original_length(name: str, tmp_path: Path) -> None:
    """The prompt ends before the original length, the text far beyond it; cached keys keep the angles they got."""
    theirs = made(tmp_path, **{k: v for k, v in rope(name).items() if k.startswith("rope")}).double()
    ours = mc.load(tmp_path, dtype="fp64")
    ids, mask = text(3, 6), torch.ones(3, 6, dtype=torch.long)
    mask[1, :2] = 0
    wanted = fresh(theirs).double().generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    found = ours.generate(ids, mask, max_new_tokens=24, eos_token_id=[], pad_token_id=0)
    assert found.tolist() == wanted.tolist()
    assert len(set(found[:, -24:].flatten().tolist())) > 5


def test_packed_texts_are_each_themselves_beyond_the_original_length(tmp_path: Path) -> None:
    """All beyond it, or all within: the longest text of a batch decides, as in transformers."""
    made(tmp_path, **{k: v for k, v in rope("longrope").items() if k.startswith("rope")})
    ours = mc.load(tmp_path, dtype="fp64")
    for lengths in ((9, 12, 10), (3, 8, 5)):
        texts = [text(1, n) for n in lengths]
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        together = ours(torch.cat(texts, 1), cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
        zoo.near(together, torch.cat([ours(t).logits for t in texts], 1), 1e-12)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_one_graph_serves_texts_within_the_original_length_and_beyond(name: str) -> None:
    """Its length decides over the frequencies, and no compiler knows it."""
    if name == "dynamic" and torch.__version__ < "2.13":
        pytest.skip("this torch's compiler does not take a power of a length")
    config = {"vocab": 96, "dim": 32, "hidden": 32, "heads": 4, "layers": 1, "positions": 8, "rope": ROPES[name]}
    model = mc.build("llama-7b", config=config).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (6, 20):
        torch.testing.assert_close(compiled(text(2, tokens)).logits, model(text(2, tokens)).logits)


ABSENT: dict[str, dict[str, Any]] = {
    "llama-1": {"num_key_value_heads": None, "head_dim": None, "rope_parameters": None, "attention_bias": None},
    "one-key": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 20},
    "narrow-heads": {"head_dim": 4, "num_key_value_heads": 4},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "pretraining-tp": {"pretraining_tp": 2},
    **{act: {"hidden_act": act} for act in ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")},
}


@pytest.mark.parametrize("name", ABSENT)
def test_forms_of_the_config(name: str, tmp_path: Path) -> None:
    theirs = made(tmp_path, **{k: v for k, v in ABSENT[name].items() if v is not None})
    if name == "llama-1":
        theirs = made(tmp_path, num_key_value_heads=4)
        zoo.edit(tmp_path, **ABSENT[name])
    ours = mc.load(tmp_path)
    zoo.near(ours(text()).logits, theirs(text()).logits)
    ours.save_pretrained(tmp_path / "again")
    before, after = (json.loads((f / "config.json").read_text()) for f in (tmp_path, tmp_path / "again"))
    assert before == after
    zoo.near(LlamaForCausalLM.from_pretrained(tmp_path / "again")(text()).logits, theirs(text()).logits)


@pytest.mark.parametrize("task", mc.LLaMA.tasks)
@pytest.mark.parametrize("of", mc.LLaMA.tasks)
def test_any_task_from_the_file_of_any_other(of: str, task: str, tmp_path: Path) -> None:
    """Question answering calls the backbone `transformer`, a bare backbone has no prefix: either fills every class."""
    theirs = made(tmp_path / "a", of)
    ours = mc.load(tmp_path / "a", task=task)
    assert ours.load_report.new == ([] if of == task else sorted(n for n in ours.shapes if n.startswith("head.")))
    backbone = getattr(theirs, theirs.base_model_prefix, theirs)
    zoo.near(ours(text()).last_hidden_state, backbone(text()).last_hidden_state)
    ours.save_pretrained(tmp_path / "b")
    cls = getattr(transformers, mc.LLaMA.tasks[task].architecture)
    _, report = cls.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


def test_old_files(tmp_path: Path) -> None:
    """Files of 2023 hold each layer's frequencies, and a tied head twice."""
    theirs = made(tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    ours = mc.load(tmp_path)
    zoo.near(ours(text()).logits, theirs(text()).logits)
    assert ours.load_report.aliased == ["lm_head.weight"] and len(ours.load_report.ignored) == 2
    half = {name: value if name.endswith("inv_freq") else value.half() for name, value in tensors.items()}
    save_file(half, file, metadata={"format": "pt"})
    assert mc.load(tmp_path).dtype == torch.float16  # whatever that of frequencies, which are not read

    tensors["lm_head.weight"] *= -1  # said to be tied, but it is another tensor
    save_file(tensors, file, metadata={"format": "pt"})
    ours = mc.load(tmp_path)
    zoo.near(ours(text()).logits, -theirs(text()).logits)
    assert ours.load_report.untied == ["lm_head.weight"] and not ours.config.tie


@pytest.mark.parametrize(("pad", "tied"), [(7, False), (7, True), (-1, False)])
def test_a_pad_token_is_not_trained_by_being_read(pad: int, tied: bool, tmp_path: Path) -> None:
    """Where a checkpoint pads with its end token, transformers leaves that row to a tied head alone; where it says -1, as the first
    ones did, that is the last row, and the file is written as it came."""
    made(tmp_path / "a", tie_word_embeddings=tied)
    zoo.edit(tmp_path / "a", pad_token_id=pad)  # which transformers reads, and does not write
    theirs, ours = LlamaForCausalLM.from_pretrained(tmp_path / "a"), mc.load(tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    a, b = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert a == b and a["pad_token_id"] == pad
    ids = text().clone()
    ids[:, 3:9:2] = pad % ours.config.vocab
    for model in (theirs, ours):
        model(ids, labels=ids).loss.backward()
    wanted, found = theirs.model.embed_tokens.weight.grad, ours.embed.tokens.weight.grad
    assert (wanted[pad] == 0).all() != tied
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


REFUSED = {
    "act": ({"hidden_act": "relu2"}, "hidden_act: 'relu2'; did you mean 'relu'"),
    "heads": ({"num_attention_heads": 5}, "hidden_size: 32; a multiple of num_attention_heads, which is 5"),
    "kv": ({"num_key_value_heads": 3}, "num_attention_heads: 4; a multiple of num_key_value_heads, which is 3"),
    "float": ({"num_hidden_layers": 2.0}, "num_hidden_layers: 2.0"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "code": ({"auto_map": {"AutoModel": "x.y"}}, "auto_map"),
    "rope": ({"rope_scaling": {"type": "xpos", "factor": 2}}, "rope_scaling.rope_type: 'xpos'; known: default, dyn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    made(tmp_path)
    zoo.edit(tmp_path, **REFUSED[name][0])
    with pytest.raises(mc.InputError, match=REFUSED[name][1]) as caught:
        mc.load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_bf16_is_as_near_as_theirs(tmp_path: Path) -> None:
    theirs = made(tmp_path)
    exact = theirs(text()).logits
    error = (theirs.bfloat16()(text()).logits - exact).abs().mean()
    ours = mc.load(tmp_path, dtype="bf16")(text()).logits
    assert ours.dtype == torch.bfloat16 and (ours - exact).abs().mean() <= 2 * error


@pytest.mark.parametrize("name", [n for n, (cls, _) in presets().items() if cls is mc.LLaMA])
def test_presets_say_the_same_to_transformers(name: str) -> None:
    """The config that a preset writes has its size and its frequencies there too."""
    config = mc.build(name, device="meta").config
    theirs = LlamaConfig.from_dict(config.to_dict())
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs)
    model.tie_weights()
    assert sum(p.numel() for p in model.parameters()) == presets()[name][1].parameters
    rotary = type(model.model.rotary_emb)(theirs)
    frequencies, factor = config.rope(config.channels, 1)
    assert torch.equal(rotary.inv_freq, frequencies) and rotary.attention_scaling == factor
    assert theirs.rms_norm_eps == (1e-6 if name in ("llama-7b", "llama-13b", "llama-30b") else 1e-5)


def test_both_spellings_of_the_name() -> None:
    assert mc.Llama is mc.LLaMA


def trained(folder: Path) -> None:
    """A tiny model that has learned to count, saved by transformers: sure of itself, unlike a random model."""
    torch.manual_seed(0)
    sizes = {**SIZES, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig.from_dict(sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(60):
        start, step = torch.randint(90, (16, 1)), torch.randint(1, 8, (16, 1))
        ids = (start + step * torch.arange(32)) % 90 + 3
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def test_a_trained_model_continues_as_it_does_in_transformers(tmp_path: Path) -> None:
    """MODELCENTER_STORIES names a folder with a trained LLaMA; without it one is trained here."""
    folder = os.environ.get("MODELCENTER_STORIES")
    if not folder:
        folder = str(tmp_path)
        trained(tmp_path)
    theirs, ours = LlamaForCausalLM.from_pretrained(folder).eval(), mc.LLaMA.from_pretrained(folder)
    ids = torch.tensor([[0, 0, 0, 4, 7], [4, 9, 14, 19, 24]])
    mask = (ids > 0).long()
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    wanted = theirs.generate(ids, attention_mask=mask, max_new_tokens=100, do_sample=False, pad_token_id=0)
    found = ours.generate(ids, mask, max_new_tokens=100, eos_token_id=[], pad_token_id=0)
    assert found.tolist() == wanted.tolist() and found.shape == (2, 105)
    zoo.near(ours(found).logits, theirs(found).logits)


def test_a_body_without_a_head_is_a_body_and_a_head_that_no_file_has_is_told_of(tmp_path: Path) -> None:
    """A folder whose config.json names the bare class is that of a language model only where the head is tied, or there."""
    zoo.pair(zoo.Case("llama", "default", "lm"))[1].save_pretrained(tmp_path / "lm")
    mc.load(tmp_path / "lm", task="backbone", config={"tie": False}).save_pretrained(tmp_path / "body")
    assert mc.load(tmp_path / "body").task == "backbone"
    assert mc.load(tmp_path / "body", task="lm").load_report.new == ["head.out.weight"]  # as training asks for it
    mc.load(tmp_path / "lm", task="backbone", config={"tie": True}).save_pretrained(tmp_path / "tied")
    assert mc.load(tmp_path / "tied").task == "lm"
    config = json.loads((tmp_path / "body/config.json").read_text())
    (tmp_path / "body/config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.warns(UserWarning, match=r"body: head\.out\.weight: not there, and drawn at random; what task=lm says is noise"):
        mc.load(tmp_path / "body")
