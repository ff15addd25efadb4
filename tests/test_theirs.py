"""What transformers has and we have not is refused by name, with what does the same."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo

import modelcenter as mc
from modelcenter import theirs

SIZES = {"layers": 2, "dim": 32, "heads": 2, "vocab": 50, "positions": 32}
BERT = {**SIZES, "hidden": 64}


def gpt() -> mc.Model:
    return mc.build("gpt2", config=SIZES)


def test_every_name_is_theirs_and_not_ours() -> None:
    """A name that we come to answer to, or that they never had, is no longer told of."""
    source = inspect.getsource(transformers.modeling_utils)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    ours, older = dir(gpt()), {"add_adapter", "generation_config", "init_weights", "can_generate"}
    for name in theirs.MODEL:
        assert name not in ours and (hasattr(model, name) or name in older), name
    taken = {"load": set(inspect.signature(mc.load).parameters), "save": set(inspect.signature(mc.GPT.save_pretrained).parameters),
             "forward": set(inspect.signature(mc.GPT.forward).parameters)}  # fmt: skip
    for what, table in (("load", theirs.LOAD), ("save", theirs.SAVE), ("forward", theirs.FORWARD)):
        assert not taken[what] & table.keys()
    gone = {"ignore_mismatched_sizes", "label2id", "load_in_4bit", "load_in_8bit", "low_cpu_mem_usage", "proxies", "subfolder",
            "use_auth_token", "safe_serialization"}  # said elsewhere than in that file, or in older releases
    assert all(name in source or name in gone for name in {**theirs.LOAD, **theirs.SAVE})
    for name in theirs.MODULE:
        assert hasattr(transformers, name) and not hasattr(mc, name)


def test_what_is_advised_is_there() -> None:
    tables = theirs.FORWARD, theirs.LOAD, theirs.SAVE, theirs.MODEL, theirs.MODULE
    advice = [text for table in tables for text in table.values()]
    for text in advice:
        for name in re.findall(r"\bmc\.(\w+)", text):
            assert hasattr(mc, name), text
    model = gpt()
    for text in theirs.MODEL.values():
        for path in re.findall(r"\bmodel\.([\w.]+)", text):
            part: Any = model
            for leaf in path.split("."):
                part = getattr(part, leaf)
    assert mc.Machine(recompute="full").recompute == "full"
    assert mc.AdapterConfig(name="lora", quantize="nf4").quantize == "nf4"
    for table, ours in ((theirs.LOAD, mc.load), (theirs.FORWARD, mc.GPT.forward)):
        known = inspect.signature(ours).parameters
        for text in table.values():
            if re.fullmatch(r"\w+", text):
                assert text in known, text


@pytest.mark.parametrize(("asked", "line"), [
    ({"head_mask": torch.ones(1)}, r"^forward\(head_mask\): no such argument; leave it out: no head is masked here$"),
    ({"atention_mask": None}, r"^forward\(atention_mask\): no such argument; did you mean 'attention_mask'\?$"),
    ({"past_key_values": ((torch.zeros(1),) * 2,)}, r"^past_key_values: a tuple; mc.Cache\(\), or use_cache=True for the first$"),
    ({"start_positions": torch.tensor([1])}, r"^start_positions, end_positions: with the task 'lm'; both, of a model with task="),
], ids=["theirs", "typo", "cache", "answer"])
def test_a_forward_refuses(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(mc.InputError, match=line):
        gpt()(torch.ones(1, 3, dtype=torch.long), **asked)


def test_none_is_no_argument() -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    model = gpt().eval()
    assert torch.equal(model(ids, head_mask=None, cache_position=None).logits, model(ids).logits)


def test_functions_refuse(tmp_path: Path) -> None:
    with pytest.raises(mc.InputError, match=r"^load\(torch_dtype\): no such argument; dtype$"):
        mc.GPT.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    with pytest.raises(mc.InputError, match=r"^load\(num_label\): no such argument; did you mean 'num_labels'\?$"):
        mc.load("gpt2", num_label=3)  # type: ignore[call-arg]  # what is refused
    with pytest.raises(mc.InputError, match=r"^save_pretrained\(safe_serialization\): no such argument; leave it out"):
        gpt().save_pretrained(tmp_path / "out", safe_serialization=True)  # type: ignore[call-arg]  # what is refused
    assert not (tmp_path / "out").exists()


def test_attributes_say_what_does_the_same() -> None:
    model = gpt()
    said = {(model, name): f"GPT has no {name}; {advice}" for name, advice in theirs.MODEL.items()}
    said |= {(model.config, "vocab_size"): "GPTConfig has no vocab_size; config.vocab, or config.get('vocab_size')",
             (model.config, "nothing"): "'GPTConfig' object has no attribute 'nothing'",
             (model, "nothing"): "'GPT' object has no attribute 'nothing'",
             (mc, "AutoModelForCausalLM"): "no AutoModelForCausalLM; mc.load(name)"}  # fmt: skip
    for (what, name), line in said.items():
        assert not hasattr(what, name)
        with pytest.raises(AttributeError, match=re.escape(line)):
            getattr(what, name)


def test_answers_are_given_as_in_transformers(tmp_path: Path) -> None:
    """Two tensors or one, and the loss is theirs where nothing pads."""
    model = mc.build("bert-base-uncased", config=BERT, task="qa", dtype="fp64").eval()
    zoo.loud(model)
    ids = torch.arange(12).view(2, 6) % 50
    start, end = torch.tensor([1, 4]), torch.tensor([3, 5])
    loss = model(ids, start_positions=start, end_positions=end).loss
    assert torch.equal(loss, model(ids, labels=torch.stack((start, end), 1)).loss)
    assert torch.equal(loss, model(ids, start_positions=start[:, None], end_positions=end[:, None]).loss)
    assert loss != model(ids, start_positions=end, end_positions=start).loss
    model.save_pretrained(tmp_path)
    reference = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loss, reference(ids, start_positions=start, end_positions=end).loss, rtol=1e-10, atol=0)
    for asked in ({"start_positions": start}, {"start_positions": start, "end_positions": end, "labels": ids[:, :2]}):
        with pytest.raises(mc.InputError, match=r"^start_positions, end_positions: (one alone|beside labels); both"):
            model(ids, **asked)
    with pytest.raises(mc.InputError, match=r"^labels: shape \[2\]; \[2, 2\], an answer's first and last token$"):
        model(ids, labels=start)


def test_a_whole_model_compiles_in_one_graph() -> None:
    model = gpt().eval()
    ids = torch.arange(6)[None]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
