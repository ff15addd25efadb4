"""What a forward is given: arguments that do not fit are refused by their names, before anything deep inside meets them; a cache is
copied and belongs to one model; and torch's defaults of dtype and device change nothing."""

import copy
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

import modelcenter as mc

SIZES = {"layers": 2, "vocab": 64, "dim": 32, "heads": 2}
IDS = torch.randint(1, 60, (1, 7), generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 3, 7])
FAMILIES = {"gpt2": {"positions": 64}, "llama-3.2-1b": {"kv_heads": 2, "hidden": 64}, "bloom-560m": {}, "t5-small": {"hidden": 64}}


def built(name: str = "gpt2", **more: Any) -> Any:
    return mc.build(name, config=SIZES | FAMILIES[name], **more).eval()


@pytest.mark.parametrize(("args", "said"), [
    ({"cu_seq_lens_q": [0, 3, 7]}, r"cu_seq_lens_q: \[0, 3, 7\]; a tensor of n \+ 1"),
    ({"cu_seq_lens_q": ENDS.float()}, "cu_seq_lens_q: tensor"), ({"cu_seq_lens_q": ENDS[:0]}, "cu_seq_lens_q: tensor"),
    ({"cu_seq_lens_q": ENDS, "attention_mask": torch.ones(1, 7)}, "attention_mask: beside cu_seq_lens_q; leave it out"),
    ({"cu_seq_lens_q": ENDS, "use_cache": True}, "use_cache: beside cu_seq_lens_q; leave it out"),
    ({"position_ids": torch.arange(7)}, r"position_ids: shape \[7\]"), ({"position_ids": [0, 1]}, "position_ids: a list"),
    ({"position_ids": torch.arange(8)[None]}, r"position_ids: shape \[1, 8\]; \[1, 7\], one for each token"),
    ({"token_type_ids": IDS[:, :3]}, r"token_type_ids: shape \[1, 3\]; \[1, 7\]"),
    ({"input_ids": None, "inputs_embeds": torch.ones(7, 32)}, r"inputs_embeds: shape \[7, 32\]; \(batch, tokens, 32\)"),
    ({"input_ids": None, "inputs_embeds": torch.ones(1, 7, 31)}, r"inputs_embeds: shape \[1, 7, 31\]"),
    ({"input_ids": None, "inputs_embeds": torch.ones(1, 7, 32).double()}, "inputs_embeds: torch.float64; torch.float32, the dtype"),
    ({"input_ids": None, "inputs_embeds": torch.ones(1, 7, 32).long()}, "inputs_embeds: torch.int64; torch.float32"),
    ({"labels": IDS, "num_items_in_batch": "7"}, "num_items_in_batch: '7'; a number above 0"),
    ({"labels": IDS, "num_items_in_batch": 0}, "num_items_in_batch: 0"),
    ({"labels": IDS, "num_items_in_batch": torch.ones(2)}, "num_items_in_batch: tensor"),
    ({"labels": IDS, "logits_to_keep": 2}, "logits_to_keep: beside labels"),
    ({"decoder_input_ids": IDS}, "decoder_input_ids: given to a model without an encoder; input_ids"),
    ({"decoder_attention_mask": IDS}, "decoder_attention_mask: given to a model without an encoder; attention_mask"),
    ({"input_ids": IDS + 60}, "token ids: .*; 0 to 63, the model's vocabulary; is this its tokenizer"),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else "")  # fmt: skip
def test_what_does_not_fit_is_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(mc.InputError, match=f"^{said}"):
        built()(**{"input_ids": IDS, **args})


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "bloom-560m"])
def test_vectors_in_a_lower_dtype_leave_the_forward_in_that_of_the_weights(name: str) -> None:
    model, x = built(name), torch.randn(2, 5, 32).bfloat16()
    torch.testing.assert_close(model(inputs_embeds=x).logits, model(inputs_embeds=x.float()).logits, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs_embeds=x)
    with pytest.raises(mc.InputError, match=r"^inputs_embeds: torch.float16; torch.bfloat16, the dtype of the model's embeddings"):
        model.bfloat16()(inputs_embeds=x.half())


@pytest.mark.parametrize("index", [1, slice(2), slice(1, None)], ids=str)
def test_what_is_behind_a_loss_without_logits_is_asked_for_by_name(index: Any) -> None:
    """Else hidden states would be taken for the logits that stand there in evaluation."""
    model = built()
    assert model(IDS, labels=IDS)[1].shape == (1, 7, 64)
    out = model.train()(IDS, labels=IDS)
    assert out[0] is out.loss and out[:1] == (out.loss,) and out[-1] is out.last_hidden_state
    with pytest.raises(mc.InputError, match=r"^output: an index above 0 in training with labels, .*; model.eval\(\), or a key"):
        out[index]


@pytest.mark.parametrize("given", [{"labels": IDS + 60}, {"decoder_input_ids": IDS + 60}], ids=str)
def test_what_a_decoder_reads_is_named_for_what_it_is_made_of(given: dict[str, Any]) -> None:
    with pytest.raises(mc.InputError, match=r"^labels or decoder_input_ids: [0-9]+; 0 to 63, the model's vocabulary; "):
        built("t5-small")(IDS, **given)


def test_an_encoder_reads_something() -> None:
    with pytest.raises(mc.InputError, match="input_ids: no tokens"):
        built("t5-small")(IDS[:, :0], decoder_input_ids=IDS)


def test_numbers_of_targets_are_any_numbers() -> None:
    model = built()
    wanted = model(IDS, labels=IDS, num_items_in_batch=5).loss
    for items in (np.int64(5), np.float64(5), 5.0, torch.tensor(5)):
        assert torch.equal(model(IDS, labels=IDS, num_items_in_batch=items).loss, wanted)


def test_which_tokens_get_logits() -> None:
    model = built().double()
    whole = model(IDS).logits
    for kept, wanted in ((2, whole[:, -2:]), (torch.tensor([0, 3]), whole[:, [0, 3]]), (0, whole), (None, whole)):
        assert (model(IDS, logits_to_keep=kept).logits - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("ahead", [0, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_copied_cache_is_gone_on_with(name: str, ahead: int) -> None:
    """As often as one likes, each copy as if it were the only one."""
    model, cache = built(name), mc.Cache(ahead=ahead)
    target = {"decoder_input_ids": IDS} if name.startswith("t5") else {}
    model(IDS, **target, past_key_values=cache)
    copies, found = [copy.deepcopy(cache) for _ in range(2)], []
    for one in (*copies, cache):
        for word in (5, 9):
            ids = torch.tensor([[word if one is not cache else 3]])
            out = model(**({"decoder_input_ids": ids} if target else {"input_ids": ids}), past_key_values=one)
        found.append(out.logits)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert copies[0].length == cache.length == 9
    whole, last = torch.cat((IDS, torch.tensor([[5, 9, 4]])), 1), torch.tensor([[4]])
    for one in (cache, copies[0]):  # in the copy's memory is what it has read, whatever the other has written since
        out = model(**({"decoder_input_ids": last} if target else {"input_ids": last}), past_key_values=one)
    wanted = model(IDS, decoder_input_ids=whole) if target else model(whole)
    assert (out.logits[:, -1] - wanted.logits[:, -1]).abs().max() < 1e-5


def test_a_cache_belongs_to_one_model_and_its_rows() -> None:
    model, cache = built(), mc.Cache()
    model(IDS, past_key_values=cache)
    with pytest.raises(mc.InputError, match="past_key_values: another model's; "):
        copy.deepcopy(model)(IDS[:, :1], past_key_values=cache)
    both = copy.deepcopy((model, cache))
    found = both[0](IDS[:, :1], past_key_values=both[1]).logits
    assert torch.equal(found, model(IDS[:, :1], past_key_values=copy.deepcopy(cache)).logits)
    with pytest.raises(mc.InputError, match="past_key_values: 1 rows; 2, as the input has"):
        model(IDS[:, :1].repeat(2, 1), past_key_values=cache)


def test_no_cache_where_blocks_run_again() -> None:
    model = built().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(mc.InputError, match="use_cache: true where the backward runs blocks anew"):
        model(IDS, labels=IDS, use_cache=True)
    with torch.no_grad():
        model(IDS, use_cache=True)
    model.eval()(IDS, use_cache=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=str)
def test_weights_do_not_follow_a_default_dtype(name: str, kind: torch.dtype) -> None:
    wanted = built(name)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(kind)
        found = built(name)
    finally:
        torch.set_default_dtype(before)
    for p, q in zip(wanted.parameters(), found.parameters(), strict=True):
        assert torch.equal(p, q)
    target = {"decoder_input_ids": IDS} if name.startswith("t5") else {}
    assert torch.equal(wanted(IDS, **target).logits, found(IDS, **target).logits)


def test_weights_do_not_follow_a_default_device(tmp_path: Path) -> None:
    """`meta` stands for a GPU here: what is made there by mistake has no values."""
    wanted = built()
    with torch.device("meta"):
        made = built()
        made.save_pretrained(tmp_path / "x")
        read = mc.load(tmp_path / "x")
        packed = read(IDS, cu_seq_lens_q=ENDS).logits
        text = read.generate(IDS, max_new_tokens=3)
    for model in (made, read):
        for p, q in zip(wanted.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
    assert torch.equal(packed, wanted(IDS, cu_seq_lens_q=ENDS).logits)
    assert torch.equal(text, wanted.generate(IDS, max_new_tokens=3))


def test_a_model_whose_blocks_were_taken_out_is_saved_under_a_config_that_says_so(tmp_path: Path) -> None:
    model = built()
    model.decoder.blocks = model.decoder.blocks[1:]
    with pytest.raises(mc.InputError, match=r"^decoder\.blocks\.1: taken out of the model, and the config has it; mc\.build "):
        model.save_pretrained(tmp_path / "out")
    fewer = mc.build("gpt2", config={**SIZES, **FAMILIES["gpt2"], "layers": 1})
    fewer.load_state_dict(model.state_dict())
    fewer.save_pretrained(tmp_path / "out")
    assert torch.equal(mc.load(tmp_path / "out").eval()(IDS).logits, model.eval()(IDS).logits)


def test_names_of_precisions_and_labels() -> None:
    with pytest.raises(mc.InputError, match="precision: 'fp7'; known: bf16, fp16, fp32"):
        built(precision="fp7")
    for given, line in (({"id2label": ["no", "yes"]}, "id2label: a list; a mapping"), ({"id2label": {}}, "id2label: 0 names; a"),
                        ({"id2label": {0: "no", 1: None}}, "id2label.1: None; the name of a class"),
                        ({"num_labels": 2**40}, "num_labels: 1099511627776; a size from 1 to 1048576")):  # fmt: skip
        with pytest.raises(mc.InputError, match=f"^{line}"):
            built(task="classify", **given)
    assert built(task="classify", id2label={0: 5, 1: "x"}).config.labels == ("5", "x")


def test_an_adapter_on_a_model_of_random_weights() -> None:
    model = mc.add_adapter(built(), mc.AdapterConfig(name="lora"))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(name.split(".")[-2] in ("a", "b") for name in trained), trained


@pytest.mark.parametrize("late", [False, True])
def test_weights_that_fp16_cannot_hold_are_named_once_they_are_read(tmp_path: Path, late: bool) -> None:
    model, later = built(), list[Any]()
    with torch.no_grad():
        model.embed.tokens.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mc.load(tmp_path, dtype="fp16", put_off=later.append if late else None)
        assert bool(seen) is not late
        for read in later:
            read()
    assert [str(w.message).partition(": ")[2].partition(":")[0] for w in seen] == ["embed.tokens.weight"]


@pytest.mark.parametrize("name", ["gpt2", "llama-3.2-1b", "t5-small"])
def test_a_head_without_values_gives_no_scores(name: str) -> None:
    model = built(name)
    model.head.to("meta")
    with pytest.raises(ValueError, match=r"^a product's tensors are on cpu and meta; all have values, or none has"):
        model(IDS, **({"decoder_input_ids": IDS} if name == "t5-small" else {}))


def test_hidden_states_are_of_their_own_call() -> None:
    """Of no other that another thread makes meanwhile."""
    model, others = built(), list[Thread]()

    def between(*_: object) -> None:
        if not others:
            others.append(Thread(target=model, args=(IDS,)))
            others[0].start()
            others[0].join()

    model.decoder.blocks[1].attn.register_forward_pre_hook(between)
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 3 and others
