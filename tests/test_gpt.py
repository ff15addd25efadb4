"""GPT-2's files as they are found: what transformers' own round trip never shows."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from zoo import Case

import modelcenter as mc
from modelcenter.checkpoint.config import changed
from modelcenter.registry import families

CASE = Case("gpt2", "default", "lm")


def same_logits(folder: Path) -> mc.Model:
    theirs, _ = zoo.pair(CASE)
    ours = mc.load(folder, dtype="fp64")
    args = zoo.inputs(CASE)
    assert (ours(**args).logits - theirs(**args).logits).abs().max() < 1e-10
    return ours


def test_a_file_without_the_prefix_and_with_masks(tmp_path: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        for name in list(t):
            t[name.removeprefix("transformer.")] = t.pop(name)
        for i in range(2):
            t[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
            t[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)

    ours = same_logits(zoo.rewritten(CASE, tmp_path / "bare", change, architectures=["GPT2Model"]))
    assert ours.task == "lm" and len(ours.load_report.ignored) == 4 and not ours.load_report.new


def test_a_second_head_is_left_out(tmp_path: Path) -> None:
    """As BERT's for the next sentence is: GPT2DoubleHeadsModel's, which chooses among texts."""
    extra = {"multiple_choice_head.summary.weight": torch.ones(1, 32), "multiple_choice_head.summary.bias": torch.ones(1)}
    ours = same_logits(zoo.rewritten(CASE, tmp_path / "x", lambda t: t.update(extra), architectures=["GPT2DoubleHeadsModel"]))
    assert ours.task == "lm" and set(ours.load_report.ignored) == extra.keys() and not ours.load_report.new


def test_a_file_that_names_no_family_is_read_by_its_class(tmp_path: Path) -> None:
    """As transformers' classes read it: files of 2019 have no model_type."""
    folder = zoo.rewritten(CASE, tmp_path / "x", model_type=None)
    ours = mc.GPT.from_pretrained(folder)
    assert type(ours) is mc.GPT and ours.config.to_dict()["model_type"] == "gpt2"
    with pytest.raises(mc.InputError, match=r"model_type: None; one of .*; the from_pretrained of its class reads a file without"):
        mc.load(folder)
    with pytest.raises(mc.InputError, match=r"model_type: 'gpt2'; 'bert'; modelcenter\.load takes any family"):
        mc.BERT.from_pretrained(zoo.rewritten(CASE, tmp_path / "y"))


def test_a_tied_head_may_be_there_equal(tmp_path: Path) -> None:
    folder = zoo.rewritten(CASE, tmp_path / "twice", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    ours = same_logits(folder)
    assert ours.load_report.aliased == ["lm_head.weight"] and ours.config.tie


def test_a_tied_head_may_stand_alone(tmp_path: Path) -> None:
    same_logits(zoo.rewritten(CASE, tmp_path / "alone", lambda t: t.update({"lm_head.weight": t.pop("transformer.wte.weight")})))


def test_a_head_that_differs_is_not_tied(tmp_path: Path) -> None:
    folder = zoo.rewritten(CASE, tmp_path / "other", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] * 2}))
    ours = mc.load(folder)
    assert ours.load_report.untied == ["lm_head.weight"] and not ours.config.tie
    assert torch.equal(ours.head.out.weight, ours.embed.tokens.weight * 2)
    ours.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] is False


def test_old_bin_shards_with_a_layer_cut_in_two(tmp_path: Path) -> None:
    source = Path(zoo.reference(CASE)[1])
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, held in parts.items():
        torch.save({n: tensors[n] for n in held}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {n: f for f, held in parts.items() for n in held}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    same_logits(tmp_path)


def test_optional_keys_may_be_absent(tmp_path: Path) -> None:
    absent = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings", "classifier_dropout", "dtype")
    folder = zoo.rewritten(CASE, tmp_path / "old", **dict.fromkeys(absent), torch_dtype="float32")
    ours = same_logits(folder)
    ours.to(torch.float32).save_pretrained(tmp_path / "again")
    after = json.loads((tmp_path / "again" / "config.json").read_text())
    assert after["torch_dtype"] == "float32" and "dtype" not in after


REFUSED = {
    "a layer too many": (lambda t: t.update({n.replace(".h.0.", ".h.2."): v + 1 for n, v in t.items() if ".h.0." in n}),
                         "h.2.*unexpected"),
    "a layer too few": (lambda t: [t.pop(n) for n in list(t) if ".h.1." in n], "h.1.*missing"),
    "a tensor missing": (lambda t: t.pop("transformer.ln_f.bias"), "transformer.ln_f.bias.*missing"),
    "a wrong shape": (lambda t: t.update({"transformer.wpe.weight": torch.zeros(63, 32)}), r"wpe.weight.*\[63, 32\].*\[64, 32\]"),
    "a stranger": (lambda t: t.update({"transformer.h.0.ln_3.weight": torch.zeros(32)}), "ln_3.weight.*unexpected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, wanted = REFUSED[name]
    with pytest.raises(mc.InputError, match=wanted):
        mc.load(zoo.rewritten(CASE, tmp_path / "x", change))


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"add_cross_attention": True}, "add_cross_attention: True; only False"),
        ({"activation_function": "swish2"}, "activation_function: 'swish2'"),
        ({"n_layer": 2.0}, "n_layer: 2.0"),
        ({"n_head": True}, "n_head: True"),
        ({"n_embd": 0}, "n_embd: 0"),
        ({"vocab_size": 2**40}, "vocab_size: 1099511627776"),
        ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon: -1.0"),
        ({"model_type": "gpt3"}, "model_type: 'gpt3'; one of the families that are here: .*gpt2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_config_that_means_something_else_is_refused(values: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(mc.InputError, match=wanted) as refusal:
        mc.load(zoo.rewritten(CASE, tmp_path / "x", **values))
    assert "config.json" in str(refusal.value)


def test_fields_that_do_not_fit_are_called_as_they_were_typed() -> None:
    """By a preset's and by a folder's names of ours: nobody has typed a key of config.json."""
    folder = zoo.reference(CASE)[1]
    heads = json.loads((Path(folder) / "config.json").read_text())["n_head"]
    for make, dim, by in ((lambda **a: mc.build("gpt2", **a), 63, 12), (lambda **a: mc.load(folder, **a), 31, heads)):
        with pytest.raises(mc.InputError) as refused:
            make(config={"dim": dim})
        assert str(refused.value) == f"config.dim: {dim}; a multiple of config.heads, which is {by}"


def test_pretrained_weights_keep_their_shape() -> None:
    with pytest.raises(mc.InputError, match=r"h.1.*unexpected|layers"):
        mc.load(zoo.reference(CASE)[1], config={"layers": 1})


def test_a_bare_backbone_gets_a_new_classifier(tmp_path: Path) -> None:
    folder = zoo.rewritten(CASE, tmp_path / "x")
    first, second = (mc.load(folder, task="classify", num_labels=3, seed=s) for s in (1, 2))
    assert first.load_report.new == ["head.out.weight"] and first.config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert not torch.equal(first.head.out.weight, second.head.out.weight)
    assert torch.equal(first.head.out.weight, mc.load(folder, task="classify", num_labels=3, seed=1).head.out.weight)


def test_token_types_are_words(tmp_path: Path) -> None:
    theirs, ours = zoo.pair(CASE)
    args = zoo.inputs(CASE) | {"token_type_ids": torch.randint(0, 128, (2, 11))}
    assert (ours(**args).logits - theirs(**args).logits).abs().max() < 1e-10
    args["inputs_embeds"] = ours.get_input_embeddings()(args.pop("input_ids")) * 2
    assert (ours(**args).logits - theirs(**args).logits).abs().max() < 1e-10
    with pytest.raises(mc.InputError, match=r"^token_type_ids: 128; 0 to 127: "):
        ours(**args | {"token_type_ids": torch.full((2, 11), 128)})


@pytest.mark.parametrize(
    ("said", "names"),
    [({"id2label": {"0": 3, "1": 1, "2": 2}}, ("3", "1", "2")),
     ({"id2label": {"0": "no", "1": "yes"}, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"))],
)  # fmt: skip
def test_labels_that_are_numbers_or_fewer_than_there_are(said: dict[str, Any], names: tuple[str, ...], tmp_path: Path) -> None:
    case = zoo.Case("bert", "default", "classify")
    where = zoo.rewritten(case, tmp_path / "x", lambda t: t.update({k: torch.rand(3, *v.shape[1:]) for k, v in t.items()
                                                                    if k.startswith("classifier.")}), **said)  # fmt: skip
    ours, args = mc.load(where), zoo.inputs(case)
    theirs = type(zoo.reference(case)[0]).from_pretrained(where).eval()
    assert ours.config.labels == names and ours.config.num_labels == theirs.config.num_labels == 3
    zoo.near(ours(**args).logits, theirs(**args).logits)
    ours.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((where / "config.json").read_text())
    mc.load(tmp_path / "out")


def test_a_name_that_is_none_is_told_by_its_number() -> None:
    with pytest.raises(mc.InputError, match=r"^config.json: id2label.1: None; the name of a class$"):
        mc.GPT.Config.from_dict({"id2label": {"0": "no", "1": None}})


def test_many_labels_are_read_as_few() -> None:
    """In time that does not grow with their square: these took a quarter of an hour."""
    names = {str(i): f"n{i}" for i in reversed(range(60_000))}
    assert mc.GPT.Config.from_dict({"id2label": names}).labels == tuple(f"n{i}" for i in range(60_000))


def test_of_two_halves_each_value_is_kept(tmp_path: Path) -> None:
    """fp32 holds what fp16 and bf16 do; bf16 would round the fp16 weights."""
    folder = zoo.rewritten(CASE, tmp_path)
    whole = load_file(folder / "model.safetensors")
    table = {name: t.to(torch.bfloat16 if "ln_f" in name else torch.float16) for name, t in whole.items()}
    save_file(table, folder / "model.safetensors", {"format": "pt"})
    model = mc.load(folder)
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out/model.safetensors")
    assert model.dtype == torch.float32 and all(torch.equal(t, table[name].float()) for name, t in saved.items())


def test_what_fp16_cannot_hold_is_said(tmp_path: Path) -> None:
    def grown(tensors: dict[str, Tensor]) -> None:
        tensors["transformer.h.0.ln_1.weight"][3] = 1e5

    folder = zoo.rewritten(CASE, tmp_path, grown)
    with pytest.warns(UserWarning, match=r"decoder\.blocks\.0\.attn_norm\.weight: beyond 65504, the most that fp16 holds"):
        mc.load(folder, dtype="fp16")
    assert mc.load(folder, dtype="bf16").decoder.blocks[0].attn_norm.weight[3] > 9e4  # without a word


def test_every_key_that_names_the_dtype_is_written(tmp_path: Path) -> None:
    folder = zoo.rewritten(CASE, tmp_path, dtype="float32", torch_dtype="float32")
    mc.load(folder, dtype="bf16").save_pretrained(tmp_path / "out")
    said = json.loads((tmp_path / "out/config.json").read_text())
    assert said["dtype"] == said["torch_dtype"] == "bfloat16"


def test_a_tokenizer_that_is_a_link_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    """Or what it leads to would be copied to wherever the model goes."""
    folder = zoo.rewritten(CASE, tmp_path)
    (tmp_path.parent / "secret").write_text("{}")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").symlink_to(tmp_path.parent / "secret")
    with pytest.raises(mc.InputError, match=r"tokenizer.json: a link out of its folder, to .*/secret; a file inside it"):
        mc.load(folder)


def test_freezing(tmp_path: Path) -> None:
    _, ours = zoo.pair(CASE)
    frozen = ours.freeze("embed", "decoder.blocks.0")
    assert {n.split(".")[0] for n in frozen} == {"embed", "decoder"} and not ours.embed.tokens.weight.requires_grad
    with pytest.raises(mc.InputError, match=r"'decoder\.block' matches no parameter"):
        ours.freeze("decoder.block")


def test_freezing_beside_codes() -> None:
    ours = mc.load(zoo.reference(CASE)[1], adapter=mc.AdapterConfig(name="lora", quantize="int8", modules_to_save=("ln_f",)))
    assert "decoder.blocks.0.attn.q.weight" in ours.freeze("decoder.blocks.0", "transformer.ln_f")
    assert not ours.decoder.norm.weight.requires_grad and ours.decoder.blocks[0].attn.q.a.weight.requires_grad


def test_sampling_is_a_function_of_the_seed() -> None:
    _, ours = zoo.pair(CASE)
    ids = zoo.inputs(CASE)["input_ids"]

    def draw(**options: Any) -> list[list[int]]:
        return ours.generate(ids, max_new_tokens=12, do_sample=True, eos_token_id=[], **options).tolist()

    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    greedy = ours.generate(ids, max_new_tokens=12, eos_token_id=[]).tolist()
    assert draw(seed=3, top_k=1) == greedy == draw(seed=5, top_p=1e-9) == draw(seed=6, temperature=1e-6)


def test_the_generation_config_beside_the_weights_counts(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    folder = zoo.rewritten(CASE, tmp_path / "x")
    ids = zoo.inputs(CASE)["input_ids"][:1]
    third = mc.load(folder).generate(ids, max_new_tokens=3, eos_token_id=[])[0, -1].item()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": third, "pad_token_id": 0, "max_new_tokens": 9}))
    wanted = GPT2LMHeadModel.from_pretrained(folder).generate(ids).tolist()
    assert mc.load(folder).generate(ids).tolist() == wanted and len(wanted[0]) < ids.size(1) + 9


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({"num_beams": 0}, "num_beams"), ({"temperature": 0.0}, "temperature"), ({"max_new_token": 3}, "max_new_tokens"),
     ({"top_p": 1.5}, "top_p")],
)  # fmt: skip
def test_generation_options_are_checked(options: dict[str, Any], wanted: str) -> None:
    _, ours = zoo.pair(CASE)
    with pytest.raises(mc.InputError, match=wanted):
        ours.generate(zoo.inputs(CASE)["input_ids"], do_sample=True, **options)


def test_the_names_that_other_families_give_the_sizes(tmp_path: Path) -> None:
    """transformers reads them through GPT2Config.attribute_map. As many heads as another's are the same tensors."""
    sizes = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
             "n_positions": "max_position_embeddings"}  # fmt: skip
    said = json.loads(Path(zoo.reference(CASE)[1], "config.json").read_text())
    respelled = {old: said[new] for new, old in sizes.items()}
    ours = same_logits(zoo.rewritten(CASE, tmp_path / "respelled", **dict.fromkeys(sizes), **respelled))
    assert ours.config.heads == 4
    folder = zoo.rewritten(CASE, tmp_path / "both", num_attention_heads=2)
    with pytest.raises(ValueError, match=r"n_head and num_attention_heads: \[4, 2\]; one value, for they are one key"):
        mc.load(folder)


@pytest.mark.parametrize("word", ["swish", "gelu_fast", "gelu_python"])
@pytest.mark.parametrize(("kind", "key"), [("gpt2", "activation_function"), ("bert", "hidden_act")])
def test_an_activation_has_the_names_that_transformers_gives_it(kind: str, key: str, word: str, tmp_path: Path) -> None:
    case = Case(kind, "default", next(iter(families()[kind].tasks)))
    folder = zoo.rewritten(case, tmp_path / "x", **{key: word})
    theirs = type(zoo.reference(case)[0]).from_pretrained(folder, dtype=torch.float64).eval()
    ours, args = mc.load(folder, dtype="fp64"), zoo.inputs(case)
    assert (ours(**args).logits - theirs(**args).logits).abs().max() < 1e-10
    ours.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == word


def test_both_spellings_of_a_size_follow_a_change() -> None:
    file = {"n_head": 4, "num_attention_heads": 4, "n_embd": 32, "classifier_dropout": None, "hidden_dropout": 0.25}
    config = mc.GPT.Config.from_dict(file)
    assert config.head_dropout == 0.25  # as transformers' GPT2ForTokenClassification takes it
    written = changed(config, {"heads": 8}).to_dict()
    assert written == file | {"n_head": 8, "num_attention_heads": 8, "model_type": "gpt2", "tie_word_embeddings": True}


def test_a_class_of_ones_own_loads_what_its_family_wrote(tmp_path: Path) -> None:
    """And computes its own; another family's, and one made of that, is refused still."""

    class Double(mc.GPT):
        def body(self, batch: Any) -> Tensor:
            return 2 * super().body(batch)

    plain = mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 40, "positions": 16}, seed=1).eval()
    plain.save_pretrained(tmp_path / "a")
    mine = Double.from_pretrained(tmp_path / "a").eval()
    ids = torch.arange(8)[None]
    assert type(mine) is Double and torch.equal(mine(ids).logits, 2 * plain(ids).logits)
    mine.save_pretrained(tmp_path / "b")
    assert (tmp_path / "b" / "config.json").read_text() == (tmp_path / "a" / "config.json").read_text()
    small = {"layers": 1, "decoder_layers": 1, "dim": 32, "vocab": 40, "heads": 2}
    mc.build("t5-small", config=small).save_pretrained(tmp_path / "t")
    for family in (Double, mc.MT5):
        with pytest.raises(mc.InputError, match=r"modelcenter\.load takes any family"):
            family.from_pretrained(tmp_path / "t")

    class More(mc.GPT):
        def __init__(self, c: Any) -> None:
            super().__init__(c)
            self.extra = nn.Linear(c.dim, c.dim)

    with pytest.raises(mc.InputError, match=r"More\.names: no row for extra\.weight, which no file could hold; a row for it; or "):
        More.from_pretrained(tmp_path / "a")


def test_what_was_put_into_a_model_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    def small(**more: Any) -> Any:
        return mc.build("gpt2", config={"layers": 1, "dim": 32, "heads": 2, "vocab": 40, "positions": 16}, **more)

    deeper, headed, tuned, wider = small(), small(task="backbone"), small(), small()
    deeper.decoder.blocks.append(copy.deepcopy(deeper.decoder.blocks[0]))
    headed.head = nn.Linear(32, 3)
    mc.add_adapter(tuned, mc.AdapterConfig(name="lora")).extra = nn.Linear(4, 4)
    tuned.source = "a/base"
    said = [(deeper, r"decoder\.blocks\.1\.attn\.k\.bias and 15"), (headed, r"head\.bias and 1"), (tuned, r"extra\.bias and 1")]
    for model, name in said:
        with pytest.warns(UserWarning, match=rf"without {name} more, for which such a folder has no place"):
            model.save_pretrained(tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
    wider.embed.tokens.weight = nn.Parameter(torch.ones(50, 32))
    wider.tie()
    with pytest.raises(mc.InputError, match=r"^embed\.tokens\.weight: has shape \[50, 32\]; \[40, 32\], as .*resize_token"):
        wider.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
