"""Adapters against peft on transformers' models: the same numbers, gradients and files, whatever each side holds as one matrix."""

import copy
import gc
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import zoo
from mesh import full, spawn
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import Case, cases, inputs, scores, theirs_only, weighted, wide

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.adapter.attach import sites
from modelcenter.adapter.folder import CONFIG, TASK_TYPES, WEIGHTS
from modelcenter.checkpoint.files import ADAPTER_BIN, check_folder
from modelcenter.checkpoint.load import put
from modelcenter.data.tokenizer import CharTokenizer
from modelcenter.layers import Linear, NF4Linear
from modelcenter.layers.adapter import adapted
from modelcenter.layers.quantized import QuantizedLinear
from modelcenter.ops import linear as products
from modelcenter.train.read import load_recipe

CASES = cases(all_variants=False)
FIRST = cases(all_tasks=False, all_variants=False)
GPT, BERT, LLAMA, BLOOM, T5 = (
    Case(kind, "default", task)
    for kind, task in (("gpt2", "lm"), ("bert", "classify"), ("llama", "lm"), ("bloom", "lm"), ("t5", "seq2seq"))
)


def lora(**changes: Any) -> mc.AdapterConfig:
    return mc.AdapterConfig(**{"name": "lora", "rank": 3, "alpha": 5.0, **changes})


def disturb(model: mc.Model) -> mc.Model:
    """Random values, exact in fp32, for everything that is trained."""
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += (torch.randn(p.shape, generator=source) * (0.5 if p.dim() == 1 else 1.5 * p.shape[-1] ** -0.5)).to(p)
                p.copy_(p.float())
    return model


def loaded(case: Case, config: mc.AdapterConfig, dtype: torch.dtype = torch.float64) -> mc.Model:
    return disturb(mc.load(zoo.reference(case)[1], task=case.task, dtype=dtype, adapter=config))


def in_peft(case: Case, folder: Path) -> Any:
    """The folder's adapter on transformers' model, as peft puts it there."""
    base = copy.deepcopy(zoo.reference(case)[0]).float()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks transformers for it
        model = peft.PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    return model.double().eval()


def peft_scores(case: Case, model: Any) -> Tensor:
    with wide(torch.float64):
        return scores(model(**theirs_only(case, model.base_model.model, inputs(case))))


def our_gradients(model: mc.Model) -> dict[str, Tensor]:
    """Of adapters whose `a` is shared, and of what is trained whole, in peft's layout."""
    layers, out = adapted(model), {}
    for site in (s for s in sites(model) if s.ours[0] in layers):
        mine = [layers[name] for name in site.ours]
        out[f"{site.theirs}.lora_A"] = mine[0].a.weight.grad
        out[f"{site.theirs}.lora_B"] = site.rows.whole([layer.b.weight.grad for layer in mine])
        if mine[0].magnitude is not None:
            out[f"{site.theirs}.lora_magnitude_vector"] = site.rows.whole([layer.magnitude.grad for layer in mine])
    kept = {n: model.get_parameter(n).grad for n in model.shapes if n.startswith("head.out.") and model.adapter is not None
            and n in dict(model.named_parameters()) and model.get_parameter(n).requires_grad}
    out |= {name: make() for name, _, make in model.table.save({n: lambda g=g: g for n, g in kept.items()}, model.shapes | {},
                                                               bare=model.bare)} if kept else {}  # fmt: skip
    return out


@pytest.mark.parametrize("name", ["lora", "dora"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_peft_computes_the_same(case: Case, name: str, tmp_path: Path) -> None:
    ours = loaded(case, lora(name=name, rslora=name == "dora"))
    ours.save_pretrained(tmp_path / "adapter")
    theirs = in_peft(case, tmp_path / "adapter")
    wanted, found = peft_scores(case, theirs), scores(ours(**inputs(case)))
    plain = scores(mc.load(zoo.reference(case)[1], task=case.task, dtype=torch.float64)(**inputs(case)))
    assert wanted.std() > 0.02 and (found - plain).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    everything = torch.ones(wanted.shape[:1], dtype=torch.bool)
    weighted(wanted, everything).backward()
    weighted(found, everything).backward()
    grads = {n.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", ""): p.grad
             for n, p in theirs.named_parameters() if p.requires_grad}  # fmt: skip
    mine = our_gradients(ours)
    missing = {n.removesuffix(".weight") for n in grads} ^ {n.removesuffix(".weight") for n in mine}
    assert not missing
    largest = max(g.abs().max() for g in grads.values() if g is not None)
    for key, grad in grads.items():
        g = mine.get(key, mine.get(key.removesuffix(".weight")))
        if grad is None:  # a head that this output does not pass through
            assert g is None or not g.any()
            continue
        torch.testing.assert_close(g, grad, rtol=1e-8, atol=1e-9 * float(largest), msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["lora", "dora"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_adapter_comes_back_to_the_bit(case: Case, name: str, tmp_path: Path) -> None:
    ours = loaded(case, lora(name=name), torch.float32)
    ours.save_pretrained(tmp_path / "a")
    again = mc.load(tmp_path / "a")
    assert again.task == ours.task
    before, after = dict(ours.named_parameters()), dict(again.named_parameters())
    assert before.keys() == after.keys()
    for key, p in before.items():
        assert torch.equal(p, after[key]) and p.requires_grad == after[key].requires_grad, key
    again.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert (tmp_path / "a" / CONFIG).read_bytes() == (tmp_path / "b" / CONFIG).read_bytes()


def make_in_peft(case: Case, out: Path, dtype: torch.dtype = torch.float64, **config: Any) -> Tensor:
    """An adapter that peft made, random, saved to `out`; what it computes."""
    base = copy.deepcopy(zoo.reference(case)[0]).float()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        model = peft.get_peft_model(base, peft.LoraConfig(**config))
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += torch.randn(p.shape, generator=source) * 0.3
    model.save_pretrained(str(out))
    written = json.loads((out / CONFIG).read_text())
    written["base_model_name_or_path"] = zoo.reference(case)[1]
    (out / CONFIG).write_text(json.dumps(written))
    return peft_scores(case, model.double().eval())


PEFT = [
    (GPT, dict(target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")),
    (GPT, dict(target_modules="all-linear", fan_in_fan_out=True, use_dora=True)),
    (GPT, dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, rank_pattern={"h.1.attn.c_attn": 6, "c_fc": 2},
               alpha_pattern={"c_attn": 9})),
    (LLAMA, dict(target_modules=["q_proj"], rank_pattern={"^model.layers.0.self_attn.q_proj": 2, "^q_proj": 3},
                 alpha_pattern={r"model\.layers\.1\.self_attn\.q_proj$": 9})),
    (BLOOM, dict(target_modules=["query_key_value"], use_rslora=True)),
    (BERT, dict(target_modules=["query", "value", "dense"], task_type="SEQ_CLS")),
    (BERT, dict(target_modules="all-linear")),  # the classifier's matrix too
    (BERT, dict(target_modules=["query"], use_rslora=True)),
    (LLAMA, dict(target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])),
    (LLAMA, dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    (T5, dict(target_modules=["q", "wo"], layers_to_transform=[1], layers_pattern="block")),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")  # nor do they here
@pytest.mark.parametrize(("case", "config"), PEFT, ids=lambda v: str(v) if isinstance(v, Case) else "-".join(v))
def test_what_peft_wrote_is_read(case: Case, config: dict[str, Any], tmp_path: Path) -> None:
    wanted = make_in_peft(case, tmp_path, r=4, lora_alpha=6, **config)
    ours = mc.load(tmp_path, task=case.task, dtype=torch.float64)
    torch.testing.assert_close(scores(ours(**inputs(case))), wanted, rtol=1e-9, atol=1e-9)
    ours.save_pretrained(tmp_path / "again")
    theirs, mine = load_file(tmp_path / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(mine[key].to(t), t) for key, t in theirs.items())
    torch.testing.assert_close(peft_scores(case, in_peft(case, tmp_path / "again")), wanted, rtol=1e-9, atol=1e-9)


def test_an_adapter_of_2023(tmp_path: Path) -> None:
    """A `.bin`, and beside it the config.json of a base that was held in 4 bits, which is no matter of the adapter's."""
    wanted = make_in_peft(GPT, tmp_path, r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    torch.save(load_file(tmp_path / WEIGHTS), tmp_path / ADAPTER_BIN)
    (tmp_path / WEIGHTS).unlink()
    base = json.loads(Path(zoo.reference(GPT)[1], "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**base, "quantization_config": {"load_in_4bit": True}}))
    check_folder(tmp_path)
    ours = mc.load(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(scores(ours(**inputs(GPT))), wanted, rtol=1e-9, atol=1e-9)
    ours.save_pretrained(tmp_path)  # what is written in its place is not read beside it
    assert not (tmp_path / ADAPTER_BIN).exists()
    torch.testing.assert_close(scores(mc.load(tmp_path, dtype=torch.float64)(**inputs(GPT))), wanted, rtol=1e-5, atol=1e-5)
    (tmp_path / WEIGHTS).unlink()
    torch.save({"x": torch.ones(1)}, tmp_path / ADAPTER_BIN)
    with pytest.raises(mc.InputError, match=rf"{ADAPTER_BIN}: x: no tensor of an adapter"):
        mc.load(tmp_path)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(("kind", "dora"), [("gpt2-untied", True), ("llama-llama3", False)])
def test_an_adapter_of_peft_s_on_a_head_is_read(kind: str, dora: bool, tmp_path: Path) -> None:
    """peft writes the head's own matrix beside it, which is not trained."""
    case = Case(*kind.split("-"), "lm")
    targets = ["lm_head"] if dora else ["lm_head", "q_proj"]
    wanted = make_in_peft(case, tmp_path, r=4, target_modules=targets, use_dora=dora)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / WEIGHTS)
    ours = mc.load(tmp_path, dtype=torch.float64)
    assert not ours.head.out.base.weight.requires_grad and ours.head.out.a.weight.requires_grad
    torch.testing.assert_close(scores(ours(**inputs(case))), wanted, rtol=1e-9, atol=1e-9)
    ours.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(peft_scores(case, in_peft(case, tmp_path / "again")), wanted, rtol=1e-9, atol=1e-9)
    mc.merge_adapter(ours)
    torch.testing.assert_close(scores(ours(**inputs(case))), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", [c for c in CASES if c.task in ("classify", "tag", "qa")], ids=str)
def test_who_has_not_told_peft_the_task_is_understood(case: Case, tmp_path: Path) -> None:
    """peft notes the class then, which says what the head is; the base is a language model and has none."""
    head = next(row[0] for row in case.family.tasks[case.task].rows if row[1] == "head.out")
    wanted = make_in_peft(case, tmp_path, r=4, target_modules="all-linear", exclude_modules=[head], modules_to_save=[head],
                          fan_in_fan_out=case.kind == "gpt2")
    settings, first = json.loads((tmp_path / CONFIG).read_text()), next(iter(case.family.tasks.values()))
    without = lambda tensors: [tensors.pop(f"{head}.{part}", None) for part in ("weight", "bias")]  # noqa: E731
    base = zoo.rewritten(case, tmp_path / "base", without, architectures=[first.architecture])
    assert settings["task_type"] is None
    (tmp_path / CONFIG).write_text(json.dumps({**settings, "base_model_name_or_path": str(base)}))
    ours = mc.load(tmp_path, dtype=torch.float64)
    assert ours.task == case.task
    torch.testing.assert_close(scores(ours(**inputs(case))), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("case", "table", "copy"), [
    (LLAMA, "model.embed_tokens", "lm_head"), (T5, "shared", "encoder.embed_tokens"),
])  # fmt: skip
def test_an_embedding_without_what_it_is_too_is_refused(case: Case, table: str, copy: str, tmp_path: Path) -> None:
    """peft's head, and T5's stacks, go on with the base's matrix; ours would have the new one."""
    make_in_peft(case, tmp_path, r=4, target_modules="all-linear", modules_to_save=[table])
    with pytest.raises(mc.InputError, match=rf"{table}\.weight: alone, and not {copy}\.weight, which is .*; both \(peft: ensure"):
        mc.load(tmp_path)


@pytest.mark.parametrize("case", [GPT, Case("llama", "llama3", "lm"), T5, Case("bert", "default", "mlm")], ids=str)
def test_new_words_go_with_the_adapter(case: Case, tmp_path: Path) -> None:
    """Of a model that was resized before, or after, its adapter was put on: the base lacks their rows."""
    wide_, ids = zoo.reference(case)[1], torch.arange(100, 140)[None]
    args = {"input_ids": ids, **({"decoder_input_ids": ids} if case.seq2seq else {})}
    first = mc.load(wide_, task=case.task)
    first.resize_token_embeddings(140)
    second = mc.load(wide_, task=case.task, adapter=lora())
    second.resize_token_embeddings(140)
    for n, ours in enumerate((mc.add_adapter(first, lora()), second)):
        disturb(ours).save_pretrained(tmp_path / f"{n}")
        again = mc.load(tmp_path / f"{n}")
        assert torch.equal(scores(again(**args)), scores(ours(**args))) and again.config.vocab == 140
        trained = {name: p.requires_grad for name, p in ours.named_parameters()}
        assert trained == {name: p.requires_grad for name, p in again.named_parameters()}
        again.save_pretrained(tmp_path / f"{n}-again")
        for file in (WEIGHTS, CONFIG):
            assert (tmp_path / f"{n}" / file).read_bytes() == (tmp_path / f"{n}-again" / file).read_bytes()
        base = copy.deepcopy(zoo.reference(case)[0]).float()
        base.resize_token_embeddings(140)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / f"{n}")).double().eval()
        exact = mc.load(tmp_path / f"{n}", dtype=torch.float64)
        with torch.no_grad(), wide(torch.float64):
            assert (scores(theirs(**args)) - scores(exact(**args))).abs().max() < 1e-5
    tensors = load_file(tmp_path / "0" / WEIGHTS)
    gone = next(name for name, t in tensors.items() if "lora" not in name and len(t) == 140)
    save_file({name: t[:130] if name == gone else t for name, t in tensors.items()}, tmp_path / "0" / WEIGHTS)
    with pytest.raises(mc.InputError):
        mc.load(tmp_path / "0")


def test_new_words_in_a_table_that_holds_more(tmp_path: Path) -> None:
    """CPM-Ant's, whose last rows are the soft prompts."""
    case = Case("cpmant", "default", "lm")
    ours = mc.load(zoo.reference(case)[1])
    ours.resize_token_embeddings(140)
    disturb(mc.add_adapter(ours, lora(targets=("project_q",)))).save_pretrained(tmp_path)
    again = mc.load(tmp_path)
    assert torch.equal(scores(again(**inputs(case))), scores(ours(**inputs(case)))) and again.config.vocab == 140
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [n for n, p in ours.named_parameters() if p.requires_grad]


def test_as_many_words_as_before_are_the_bases(tmp_path: Path) -> None:
    ours = mc.load(zoo.reference(LLAMA)[1])
    ours.resize_token_embeddings(ours.config.vocab)
    mc.add_adapter(ours, lora(targets=("q_proj",))).save_pretrained(tmp_path)
    assert {name.split(".")[-2] for name in load_file(tmp_path / WEIGHTS)} == {"lora_A", "lora_B"}
    assert not mc.load(tmp_path).embed.tokens.weight.requires_grad


@pytest.mark.parametrize("case", [GPT, Case("llama", "llama3", "lm"), T5], ids=str)
def test_new_words_that_peft_saved(case: Case, tmp_path: Path) -> None:
    base = copy.deepcopy(zoo.reference(case)[0]).float()
    base.resize_token_embeddings(140)
    base.name_or_path = base.config._name_or_path = zoo.reference(case)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own: that it saves the embeddings, and how transposed matrices are stored
        theirs = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear", task_type=TASK_TYPES[case.task]))
        theirs.save_pretrained(tmp_path)
    ids = torch.arange(100, 140)[None]
    args = {"input_ids": ids, **({"decoder_input_ids": ids} if case.seq2seq else {})}
    exact, theirs = mc.load(tmp_path, dtype=torch.float64), theirs.double().eval()
    with torch.no_grad(), wide(torch.float64):
        assert (scores(theirs(**args)) - scores(exact(**args))).abs().max() < 1e-5


def test_an_adapter_whose_base_was_moved_says_where_it_is_looked_for(tmp_path: Path) -> None:
    base = zoo.rewritten(GPT, tmp_path / "base")
    mc.load(base, adapter=lora()).save_pretrained(tmp_path / "a")
    with pytest.raises(mc.InputError, match=r"a: adapter: the folder holds one; adapter\.name=none, to go on with that one, or "):
        mc.load(tmp_path / "a", adapter=lora())
    base.rename(tmp_path / "moved")
    with pytest.raises(mc.InputError) as refused:
        mc.load(tmp_path / "a")
    assert str(refused.value).startswith(f"{tmp_path}/a/{CONFIG}: base_model_name_or_path: {base}, which is not there; the folder ")


def test_an_adapter_on_merged_weights_names_no_base(tmp_path: Path) -> None:
    """The folder that the first one's base came from has not the first one in it: what would load there is another model."""
    ours = mc.add_adapter(mc.merge_adapter(loaded(GPT, lora(), torch.float32)), lora())
    with pytest.warns(UserWarning, match="another was merged"):
        ours.save_pretrained(tmp_path / "a")
    with pytest.raises(mc.InputError, match="base_model_name_or_path: None"):
        mc.load(tmp_path / "a")


def test_what_has_an_adapter_is_not_resized() -> None:
    ours = mc.load(zoo.reference(Case("llama", "llama3", "lm"))[1], adapter=lora(targets=("lm_head",)))
    with pytest.raises(mc.InputError, match=r"an adapter on head\.out;.*resize first"):
        ours.resize_token_embeddings(140)


@pytest.mark.parametrize("name", ["lora", "dora"])
@pytest.mark.parametrize("targets", [("attn.q", "attn.v"), ("q", "k", "v"), ("k", "ffn.up"), ("v",)], ids="+".join)
@pytest.mark.parametrize("case", [GPT, BLOOM, LLAMA], ids=str)
def test_parts_of_a_matrix_that_others_hold_as_one(case: Case, targets: tuple[str, ...], name: str, tmp_path: Path) -> None:
    """Each part has its own `a`; theirs stacks them. Magnitudes of rows without an adapter are new, and rounded to fp32 in peft."""
    near = dict(rtol=1e-9, atol=1e-9) if name == "lora" else dict(rtol=1e-5, atol=1e-5)
    ours = loaded(case, lora(name=name, targets=targets, rslora=case is BLOOM))
    ours.save_pretrained(tmp_path)
    wanted = scores(ours(**inputs(case)))
    torch.testing.assert_close(peft_scores(case, in_peft(case, tmp_path)), wanted, **near)
    again = mc.load(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(scores(again(**inputs(case))), wanted, rtol=1e-9, atol=1e-9)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()
    assert (tmp_path / "again" / CONFIG).read_bytes() == (tmp_path / CONFIG).read_bytes()


@pytest.mark.parametrize("name", ["lora", "dora"])
@pytest.mark.parametrize("quantize", ["none", "nf4", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_merged_is_adapted(case: Case, quantize: str, name: str, tmp_path: Path) -> None:
    ours = loaded(case, lora(name=name, quantize=quantize))
    near = dict(rtol=1e-9, atol=1e-9) if quantize == "none" else dict(rtol=1e-5, atol=1e-5)  # whose weights are made in fp32
    with torch.no_grad():
        wanted = scores(ours(**inputs(case)))
        ours.save_pretrained(tmp_path / "adapter")
        assert torch.equal(scores(mc.load(tmp_path / "adapter", dtype="fp64")(**inputs(case))), wanted)
        mc.merge_adapter(ours).save_pretrained(tmp_path / "merged")
        assert ours.adapter is None and not adapted(ours)
        merged = mc.load(tmp_path / "merged", task=case.task)
        torch.testing.assert_close(scores(merged(**inputs(case))), wanted, **near)
        theirs = type(zoo.reference(case)[0]).from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
        with wide(torch.float64):
            torch.testing.assert_close(scores(theirs(**theirs_only(case, theirs, inputs(case)))), wanted, **near)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_merge_in_low_precision_is_the_merge_rounded(quantize: str, tmp_path: Path) -> None:
    """The base is held in the codes that the adapter was trained on, and all is rounded once."""
    mc.load(zoo.reference(BERT)[1], dtype="fp32").save_pretrained(tmp_path / "base")
    model = mc.load(tmp_path / "base", adapter=lora(quantize=quantize))
    with torch.no_grad():
        for layer in adapted(model).values():
            layer.b.weight.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    for out, more in (("wide", ()), ("low", ("dtype=bf16",))):
        assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / out), *more]) == 0
    wide, low = (mc.load(tmp_path / out) for out in ("wide", "low"))
    for name, p in low.named_parameters():
        assert torch.equal(p, wide.get_parameter(name).bfloat16()), name


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("new", [True, False], ids=["new", "saved"])
def test_codes_are_of_what_the_file_holds(new: bool, quantize: str, tmp_path: Path) -> None:
    """Whatever dtype is asked for: an adapter that was trained on them meets the same again."""
    wide = mc.load(zoo.reference(BERT)[1], dtype="fp32", adapter=lora(quantize=quantize))
    wide.save_pretrained(tmp_path / "adapter")
    low = mc.load(zoo.reference(BERT)[1], dtype="bf16", adapter=lora(quantize=quantize))
    low = low if new else mc.load(tmp_path / "adapter", dtype="bf16")
    layers = {name: layer for name, layer in wide.named_modules() if isinstance(layer, QuantizedLinear)}
    assert layers and low.dtype == torch.bfloat16
    for name, layer in layers.items():
        other: Any = low.get_submodule(name)
        assert torch.equal(other.codes, layer.codes) and torch.equal(other.scales, layer.scales), name
        assert other.weight.dtype == other.dtype == other.bias.dtype == torch.bfloat16


@pytest.mark.parametrize(("of", "task"), [("tag", "classify"), ("classify", "tag")])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_head_beside_an_adapter_is_not_another_tasks(kind: str, of: str, task: str, tmp_path: Path) -> None:
    """Though in these families' files both have one name. Merged, it is passed over as any other task's."""
    loaded(Case(kind, "default", of), lora(), torch.float32).save_pretrained(tmp_path / "adapter")
    assert mc.load(tmp_path / "adapter", task=of).task == of
    with pytest.raises(mc.InputError, match=rf"task: {task}, and the head beside the adapter is one of {of}; {of}; or task="):
        mc.load(tmp_path / "adapter", task=task)
    mc.merge_adapter(mc.load(tmp_path / "adapter")).save_pretrained(tmp_path / "merged")
    assert "head.out.weight" in mc.load(tmp_path / "merged", task=task).load_report.new


@pytest.mark.parametrize(("kind", "of", "task"), [
    ("gpt2", "lm", "embed"), ("gpt2", "embed", "lm"), ("llama", "lm", "qa"), ("llama", "lm", "backbone"), ("bert", "mlm", "embed"),
    ("cpmant", "lm", "embed"), ("bloom", "backbone", "tag"),
])  # fmt: skip
def test_an_adapter_of_one_task_is_the_base_of_another(kind: str, of: str, task: str, tmp_path: Path) -> None:
    """As what it is merged into would be; in these families' classes the same layers have another prefix, or none."""
    loaded(Case(kind, "default", of), lora(), torch.float32).save_pretrained(tmp_path / "adapter")
    first = min(load_file(tmp_path / "adapter" / WEIGHTS)).removeprefix("base_model.model.").partition(".lora_")[0]
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(said | {"alpha_pattern": {f"^{first}": 64}}))
    found = mc.load(tmp_path / "adapter", task=task)
    mc.merge_adapter(mc.load(tmp_path / "adapter", task=of)).save_pretrained(tmp_path / "merged")
    wanted, args = mc.load(tmp_path / "merged", task=task), inputs(Case(kind, "default", task))
    torch.testing.assert_close(found(**args).last_hidden_state, wanted(**args).last_hidden_state, rtol=1e-4, atol=1e-4)
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(mc.load(tmp_path / "again", task=task)(**args).last_hidden_state, found(**args).last_hidden_state)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_doras_lengths_are_those_of_the_codes(quantize: str) -> None:
    """As peft measures the weight that the codes stand for, in fp32, whatever dtype is asked for: in bf16 all weights of a level
    are rounded one way, and a row is longer or shorter by some thousandths."""
    model = mc.load(zoo.reference(LLAMA)[1], dtype="bf16", adapter=lora(name="dora", quantize=quantize))
    for layer in adapted(model).values():
        assert isinstance(layer.base, QuantizedLinear) and layer.magnitude is not None
        weight, norm = layer.base.double().weight, peft.tuners.lora.dora.DoraLinearLayer(fan_in_fan_out=False).get_weight_norm
        near: Any = dict(rtol=1e-6, atol=0, check_dtype=False)
        torch.testing.assert_close(layer.magnitude, norm(weight, torch.zeros_like(weight), 1.0), **near)
        layer.base.bfloat16()
        layer.b.weight.data.normal_(0, 0.1)
        torch.testing.assert_close(layer.lengths(), norm(weight, (layer.b.weight @ layer.a.weight).double(), layer.scale), **near)


# ---- what is trained, and on how many processes -----------------------------------------------------------------------


def test_only_the_adapter_and_a_classifiers_head_are_trained() -> None:
    model = mc.load(zoo.reference(BERT)[1], task="classify", adapter=lora(targets=("query",)))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"head.out.weight", "head.out.bias"} | {
        f"encoder.blocks.{i}.attn.q.{part}.weight" for i in range(2) for part in "ab"
    }  # fmt: skip


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed() -> None:
    folder = zoo.reference(GPT)[1]
    plain, args = mc.load(folder), inputs(GPT)
    for name in ("lora", "dora"):
        first, again, other = (mc.load(folder, adapter=lora(name=name), seed=seed) for seed in (1, 1, 2))
        torch.testing.assert_close(scores(first(**args)), scores(plain(**args)), rtol=1e-5, atol=2e-5)
        a, b, c = (adapted(m)["decoder.blocks.1.ffn.up"].a.weight for m in (first, again, other))
        assert torch.equal(a, b) and not torch.equal(a, c) and 0.9 / 32**0.5 < a.abs().max() < 1 / 32**0.5
    direct, beside = mc.add_adapter(plain, lora(name="dora"), seed=1), mc.load(folder, adapter=lora(name="dora"), seed=1)
    assert all(torch.equal(p, q) for p, q in zip(direct.parameters(), beside.parameters(), strict=True))


def test_one_layer_at_a_time_is_whole_while_a_base_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a model that fits in 4 bits would have to fit in 32 first."""
    whole: list[int] = []
    plain = NF4Linear.of

    def of(layer: Any) -> NF4Linear:
        gc.collect()
        whole.append(sum(1 for o in gc.get_objects() if type(o) is Linear and o.in_features == 66 and not o.weight.is_meta))
        return plain(layer)

    monkeypatch.setattr(NF4Linear, "of", of)
    gc.freeze()  # the objects of other tests, hundreds of thousands, which would be looked through for each layer
    with tempfile.TemporaryDirectory() as folder:
        mc.build("llama-7b", config={"vocab": 16, "dim": 66, "hidden": 48, "heads": 3, "layers": 2}).save_pretrained(folder)
        model = mc.load(folder, adapter=lora(quantize="nf4"))
    gc.unfreeze()
    assert len(whole) == 2 * 7 and max(whole) == 1
    assert sum(isinstance(m, NF4Linear) for m in model.modules()) == 14 and type(model.head.out) is Linear


def test_dropout_is_on_the_addition_alone() -> None:
    for name in ("lora", "dora"):
        model = loaded(LLAMA, lora(name=name, dropout=0.5)).train()
        layer = adapted(model)["decoder.blocks.0.ffn.up"]
        x = torch.ones(1, 32, dtype=torch.float64)
        assert (layer(x) - layer(x)).abs().max() > 0.01
        with torch.no_grad():
            layer.b.weight.zero_()
            if layer.magnitude is not None:
                layer.magnitude.copy_(layer.lengths())
        torch.testing.assert_close(layer(x), layer.base(x), rtol=1e-12, atol=1e-12)


def test_another_module_in_the_place_of_its_dropout_is_called() -> None:
    """nn.Identity, which peft has there without a rate, drops nothing; of half of what comes in, half comes out."""
    model = loaded(GPT, lora(name="dora", dropout=0.5)).train()
    layer, x = adapted(model)["decoder.blocks.0.ffn.up"], torch.randn(3, 32, dtype=torch.float64)
    layer.dropout = torch.nn.Identity()
    torch.testing.assert_close(layer(x), layer.eval()(x))
    change, layer.dropout = layer(x) - layer.base(x), torch.nn.Dropout(0.0)
    layer.dropout.register_forward_hook(lambda dropout, args, out: out / 2)
    torch.testing.assert_close(layer(x) - layer.base(x), change / 2)


def test_frozen_weights_in_half_precision_have_adapters_in_single(tmp_path: Path) -> None:
    folder = zoo.reference(LLAMA)[1]
    model = mc.load(folder, dtype="bf16", adapter=lora())
    layer = adapted(model)["decoder.blocks.0.attn.q"]
    assert layer.base.weight.dtype == torch.bfloat16 and layer.a.weight.dtype == layer.b.weight.dtype == torch.float32
    out = model.train()(**inputs(LLAMA), labels=inputs(LLAMA)["input_ids"])
    out.loss.backward()
    assert layer.b.weight.grad.abs().max() > 0 and layer.b.weight.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler looks
@pytest.mark.parametrize(
    "changes", [pytest.param({"name": "dora"}, id="dora"), pytest.param({"quantize": "nf4"}, id="nf4", marks=pytest.mark.slow)]
)
def test_compiled_and_recomputed_blocks_are_the_eager_ones(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    grads = []
    for options in ({}, {"compile": True}, {"recompute": True}):
        machine = mc.Machine(device="cpu", **options)
        model = disturb(mc.load(zoo.reference(LLAMA)[1], dtype="fp32", adapter=lora(**changes), machine=machine))
        weighted(scores(model(**inputs(LLAMA))), torch.ones(2, dtype=torch.bool)).backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    torch._dynamo.reset()
    for other in grads[1:]:
        for wanted, found in zip(grads[0], other, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


MESHES: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": 2}, "tp2": {"tensor_parallel": 2}, "sequence2": {"tensor_parallel": 2, "sequence_parallel": True},
    "fsdp2xtp2": {"fsdp": 2, "tensor_parallel": 2, "recompute": True},
}  # fmt: skip
FEW = {"sequence2": (GPT, T5), "fsdp2xtp2": (GPT,)}


def spread(rank: int, machine: mc.Machine, folders: dict[Case, str], out: Path) -> None:
    """An adapter made before the model is sharded: the same weights, outputs, gradients and files as in one process."""
    for case, folder in folders.items():
        for name in ("lora", "dora") if machine.tensor_parallel == 1 or case in (GPT, T5) else ("lora",):
            config = lora(name=name)
            alone = disturb(mc.load(folder, task=case.task, dtype="fp64", adapter=config))
            alone.save_pretrained(out / f"{case}-{name}")
            many = mc.load(out / f"{case}-{name}", dtype="fp64", machine=machine)
            args = inputs(case)
            wanted, found = scores(alone(**args)), scores(many(**args))
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, case=case: f"{case}: {m}")
            everything = torch.ones(wanted.shape[:2], dtype=torch.bool)
            weighted(wanted, everything).backward()
            weighted(found, everything).backward()
            grads = {n: p.grad for n, p in many.named_parameters() if p.requires_grad}
            for n, p in alone.named_parameters():
                if p.requires_grad:
                    what = f"{case} {n}"
                    torch.testing.assert_close(full(grads[n]), p.grad, rtol=1e-8, atol=1e-9, msg=lambda m, w=what: f"{w}: {m}")
            many.save_pretrained(out / f"{case}-{name}-again")
            if rank == 0:
                files = [(out / f"{case}-{name}{end}" / WEIGHTS).read_bytes() for end in ("", "-again")]
                assert files[0] == files[1], f"{case}: not bit for bit"
            new = mc.load(folder, task=case.task, dtype="fp64", machine=machine, adapter=config, seed=4)
            one = mc.load(folder, task=case.task, dtype="fp64", adapter=config, seed=4)
            for (n, p), q in zip(new.named_parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(full(p, q.shape), q, rtol=1e-12, atol=0, msg=n)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.slow if m in ("fsdp2", "tp2") else ()) for m in MESHES])
def test_adapters_on_a_mesh_equal_one_process(mesh: str, tmp_path: Path) -> None:
    machine = mc.Machine(device="cpu", **MESHES[mesh])
    folders = {case: zoo.reference(case)[1] for case in FEW.get(mesh, (GPT, BERT, BLOOM, T5))}
    spawn(machine.ranks, spread, machine, folders, tmp_path)


def partly(rank: int, folder: str, out: Path) -> None:
    """An adapter on parts of matrices that others hold as one: DoRA writes the lengths of the other parts' rows, too."""
    where = ({"fsdp": 2, "tensor_parallel": 2}, {"fsdp": 2, "replicate": 2}, {"replicate": 2, "tensor_parallel": 2}, {"fsdp": 4})
    for quantize in ("none", "nf4", "int8"):
        config = lora(name="dora", quantize=quantize, targets=("attn.q",))
        mc.load(folder, dtype="fp32", adapter=config, seed=4).save_pretrained(alone := out / quantize)
        for number, degrees in enumerate(where):
            many = mc.load(folder, dtype="fp32", machine=mc.Machine(device="cpu", **degrees), adapter=config, seed=4)
            many.save_pretrained(there := out / f"{quantize}-{number}")
            found, wanted = (load_file(place / WEIGHTS) for place in (there, alone))
            assert found.keys() == wanted.keys(), f"{quantize} {degrees}"
            for name, tensor in wanted.items():
                what = f"{quantize} {degrees} {name}"
                torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=0, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_parts_of_a_matrix_are_saved_on_a_mesh(tmp_path: Path) -> None:
    mc.build("gpt2", config=WIDE, seed=3).save_pretrained(tmp_path / "model")
    spawn(4, partly, str(tmp_path / "model"), tmp_path)


def worded(rank: int, folders: dict[Case, str], out: Path) -> None:
    """New words come with an adapter onto a mesh, whose ranks each have a part of their rows, and are trained and saved there."""
    ids = torch.arange(100, 140).view(2, 20)
    for case, folder in folders.items():
        first = mc.load(folder, task=case.task)
        first.resize_token_embeddings(141)
        disturb(mc.add_adapter(first, lora())).save_pretrained(out / f"{case}")
        args = {"input_ids": ids, "labels": ids, **({"decoder_input_ids": ids} if case.seq2seq else {})}
        alone = mc.load(out / f"{case}", dtype="fp64")
        wanted = alone(**args).loss
        wanted.backward()
        for where in ({"fsdp": 2}, {"tensor_parallel": 2}):
            many, what = mc.load(out / f"{case}", dtype="fp64", machine=mc.Machine(device="cpu", **where)), f"{case} {where}"
            found = many(**args).loss
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0, msg=lambda m, w=what: f"{w}: {m}")
            found.backward()
            for n, p in many.named_parameters():
                of = alone.get_parameter(n)
                assert p.requires_grad == of.requires_grad, f"{what} {n}"
                if p.requires_grad:
                    grad = full(p.grad, of.shape)
                    torch.testing.assert_close(grad, of.grad, rtol=1e-8, atol=1e-12, msg=lambda m, n=f"{what} {n}": f"{n}: {m}")
            again = mc.load(out / f"{case}", machine=mc.Machine(device="cpu", **where))
            again.save_pretrained(out / f"{case}-{next(iter(where))}")
            if rank == 0:
                files = [(folder / WEIGHTS).read_bytes() for folder in (out / f"{case}", out / f"{case}-{next(iter(where))}")]
                assert files[0] == files[1], f"{what}: not bit for bit"


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_new_words_of_an_adapter_on_a_mesh(tmp_path: Path) -> None:
    spawn(2, worded, {case: zoo.reference(case)[1] for case in (GPT, Case("llama", "default", "lm"), T5)}, tmp_path)


def held(rank: int, folder: str) -> None:
    """Codes are whole on every rank, and what is trained begins as in one process. Training is among the pairs of test_pairs.py."""
    for quantize, name in (("nf4", "lora"), ("int8", "lora"), ("nf4", "dora")):
        config = lora(name=name, quantize=quantize)
        one = mc.load(folder, dtype="fp32", adapter=config, seed=4)
        for machine in (mc.Machine(device="cpu", fsdp=2), mc.Machine(device="cpu", replicate=2)):
            many = mc.load(folder, dtype="fp32", machine=machine, adapter=config, seed=4)
            buffers = dict(one.named_buffers())
            assert any(n.endswith(".codes") for n in buffers)
            for n, b in many.named_buffers():
                assert torch.equal(b, buffers[n]), f"{n} {machine}"
            for (n, p), q in zip(many.named_parameters(), one.parameters(), strict=True):
                assert torch.equal(full(p), q), f"{n} {machine}"


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_codes_are_whole_on_every_rank() -> None:
    spawn(2, held, zoo.reference(GPT)[1])


def rounded(rank: int, folders: dict[Case, str]) -> None:
    """Frozen weights that are held in bf16, beside a trained adapter in fp32: the bits of fp32 weights that each forward rounds."""
    for case, folder in folders.items():
        for where in ({"fsdp": 2}, {"fsdp": 2, "zero": 2}, {"tensor_parallel": 2}, {"replicate": 2}):
            machine, what, found = mc.Machine(device="cpu", **where), f"{case} {where}", []
            wide = mc.parallelize(mc.load(folder, adapter=lora()), machine, "bf16")
            held = mc.load(folder, adapter=lora(), precision="bf16", machine=machine)
            assert {p.dtype for p in held.parameters()} == {torch.float32, torch.bfloat16}, what
            for model in (wide.eval(), held.eval()):
                for layer in adapted(model).values():
                    put(layer.b.weight, torch.randn(layer.out_features, 3, generator=torch.Generator().manual_seed(1)))
                with torch.autocast("cpu", torch.bfloat16):
                    loss = scores(model(**inputs(case))).float().square().mean()
                loss.backward()
                found.append({"loss": loss} | {n: full(p.grad) for n, p in model.named_parameters() if p.requires_grad})
            assert len(found[0]) > 10 and all(torch.equal(found[1][n], value) for n, value in found[0].items()), what


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_frozen_matrices_of_a_run_on_a_mesh() -> None:
    spawn(2, rounded, {case: zoo.reference(case)[1] for case in (GPT, LLAMA)})


WIDE = {"layers": 1, "dim": 128, "heads": 2, "hidden": 256, "positions": 16, "vocab": 64, "dropout": 0.0, "embed_dropout": 0.0,
        "attn_dropout": 0.0}  # fmt: skip


def coded(rank: int, folder: str) -> None:
    """Of codes each rank has its rows or columns, those that one process has; outputs and gradients are the same, too."""
    ids = torch.arange(12).view(2, 6) % 64
    for quantize, name in (("nf4", "lora"), ("int8", "lora"), ("nf4", "dora"), ("int8", "dora")):
        config = lora(name=name, quantize=quantize)
        for changes in ({}, {"sequence_parallel": True}):
            machine, what = mc.Machine(device="cpu", tensor_parallel=2, **changes), f"{quantize} {name} {changes}"
            alone, many = (mc.load(folder, dtype="fp64", machine=where, adapter=config, seed=4) for where in (None, machine))
            for n, p in many.named_parameters():
                torch.testing.assert_close(full(p, alone.get_parameter(n).shape), alone.get_parameter(n))
            disturb(alone)
            for n, p in alone.named_parameters():
                if n.endswith("bias"):
                    p.data.normal_(generator=torch.Generator().manual_seed(5))
            for n, p in many.named_parameters():
                put(p, alone.get_parameter(n).detach())
            sizes = [sum(b.numel() for n, b in m.named_buffers() if n.endswith(".codes")) for m in (alone, many)]
            assert sizes[0] == 2 * sizes[1] > 0, f"{what}: {sizes}"
            wanted, found = alone(ids, labels=ids).loss, many(ids, labels=ids).loss
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0, msg=lambda m, w=what: f"{w}: {m}")
            wanted.backward()
            found.backward()
            for n, p in many.named_parameters():
                if p.requires_grad:
                    grad, other = full(p.grad), alone.get_parameter(n).grad
                    torch.testing.assert_close(grad, other, rtol=1e-8, atol=1e-12, msg=lambda m, n=f"{what} {n}": f"{n}: {m}")


def test_codes_are_shared_out_among_tensor_parallel_ranks(tmp_path: Path) -> None:
    mc.build("gpt2", config=WIDE, seed=3).save_pretrained(tmp_path / "model")
    spawn(2, coded, str(tmp_path / "model"))


def too_late(rank: int, folder: str) -> None:
    """An adapter on a model that is sharded already would be a copy of its own on every process, and train there."""
    for machine in (mc.Machine(device="cpu", fsdp=2), mc.Machine(device="cpu", tensor_parallel=2)):
        with pytest.raises(mc.InputError, match="sharded already; add_adapter before parallelize"):
            mc.add_adapter(mc.load(folder, machine=machine), lora())
    with pytest.raises(mc.InputError, match=r"nf4 with tensor_parallel=2, for 32 columns in groups of 64 of .*attn\.o; a "):
        mc.load(folder, machine=mc.Machine(device="cpu", tensor_parallel=2), adapter=lora(quantize="nf4"))
    with pytest.raises(mc.InputError, match="merge in one process"):
        mc.merge_adapter(mc.load(folder, machine=mc.Machine(device="cpu", fsdp=2), adapter=lora()))
    early = mc.parallelize(mc.add_adapter(mc.load(folder), lora(), seed=7), mc.Machine(device="cpu", fsdp=2))
    wanted = dict(mc.load(folder, adapter=lora(), seed=7).named_parameters())
    assert all(torch.equal(p.full_tensor(), wanted[n]) for n, p in early.named_parameters())


def test_an_adapter_comes_before_sharding() -> None:
    spawn(2, too_late, zoo.reference(GPT)[1])


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_peft_itself_works_on_our_models(case: Case) -> None:
    ours = mc.load(zoo.reference(case)[1], task=case.task, dtype=torch.float64)
    wanted = scores(ours(**inputs(case)))
    model = peft.get_peft_model(ours, peft.LoraConfig(r=2, target_modules=["q", "up"]))
    torch.testing.assert_close(scores(model(**inputs(case))), wanted)
    weighted(scores(model(**inputs(case))), torch.ones(2, dtype=torch.bool)).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert len(grads) >= 8 and all(g.abs().max() > 0 for n, g in grads.items() if "lora_B" in n)


# ---- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "found"), [
    (dict(targets=("c_attm",)), r"adapter\.targets: 'c_attm' names no linear layer; did you mean 'c_attn'\?"),
    (dict(targets=("embed.tokens",)), r"adapter\.targets: 'embed\.tokens' names no linear layer"),
    (dict(targets=("wte",)), r"adapter\.targets: 'wte' names no linear layer"),
    (dict(targets=("lm_head",)), r"adapter\.targets: 'lm_head' names no linear layer"),  # it is the embedding's matrix
    (dict(targets=()), r"^targets: empty"),
    (dict(modules_to_save=("wte",)), r"adapter\.modules_to_save: wte: embed\.tokens\.weight is the head's matrix too"),
    (dict(modules_to_save=("ln_g",)), r"adapter\.modules_to_save: 'ln_g' names no module; did you mean"),
    (dict(modules_to_save=("c_attn",)), r"adapter\.modules_to_save: decoder.* is among the targets too"),
    (dict(name="none", rank=4), r"^rank: set, but adapter\.name is none"),
])  # fmt: skip
def test_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(mc.InputError, match=found):
        mc.load(zoo.reference(GPT)[1], adapter=lora(**changes))


@pytest.mark.parametrize(("theirs", "said"), [
    ("q_proj", "here it is q"), ("query_key_value", "here it is q and k and v"), ("gate_proj", "did you mean"),  # GPT has no gate
], ids=["one", "three", "none"])  # fmt: skip
def test_a_layer_of_another_family_is_called_otherwise_here(theirs: str, said: str) -> None:
    with pytest.raises(mc.InputError, match=rf"^adapter\.targets: '{theirs}' names no linear layer; {said}"):
        mc.load(zoo.reference(GPT)[1], adapter=lora(targets=(theirs,)))


def test_what_is_no_config_and_a_model_without_an_adapter_are_refused() -> None:
    model = mc.load(zoo.reference(GPT)[1])
    model.freeze("embed.*")
    with pytest.raises(mc.InputError, match=r"^adapter: {'rank': 4}; mc\.AdapterConfig\("):
        mc.add_adapter(model, {"rank": 4})  # type: ignore[arg-type]  # what is refused
    for kind in (peft.LoraConfig, peft.PrefixTuningConfig):
        with pytest.raises(mc.InputError, match=rf"^adapter: peft's {kind.__name__}; mc\.AdapterConfig\("):
            mc.add_adapter(model, kind())
    with pytest.raises(mc.InputError, match=r"^adapter\.name: none, which is no adapter; lora or dora"):
        mc.add_adapter(model, mc.AdapterConfig())
    with pytest.raises(mc.InputError, match=r"^adapter: the model has none; "):
        mc.merge_adapter(model)
    assert not model.merged and not model.embed.tokens.weight.requires_grad


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(said | changes))

    return change


def change_tensors(work: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors = {name: t.clone() for name, t in tensors.items()}
        work(tensors)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return change


FIRST_A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.mark.parametrize(("spoil", "found"), [
    (change_config(peft_type="PREFIX_TUNING"), r"peft_type: 'PREFIX_TUNING'; LORA \(or DoRA, rsLoRA\); others are for peft"),
    (change_config(bias="all"), r"bias: 'all'; an adapter of LoRA"),
    (change_config(lora_bias=True), r"lora_bias: True"),
    (change_config(init_lora_weights="pissa"), r"init_lora_weights: 'pissa'"),
    (change_config(layer_replication=[[0, 1]]), r"layer_replication: \[\[0, 1\]\]"),
    (change_config(something_new={"a": 1}), r"something_new: "),
    (change_config(r="8"), r"r: '8'"),
    (change_config(r=4), r"lora_A\.weight: has shape \[3, 32\]; \[4, 32\]"),
    (change_config(r=0), r"r: 0; a whole number, 1 or more"),
    (change_config(rank_pattern={"c_attn": 0}), r"rank_pattern\.c_attn: 0; a whole number, 1 or more"),
    (change_config(lora_dropout=2), r"lora_dropout: 2; a rate from 0 to below 1"),
    (change_config(use_dora=True), r"lora_magnitude_vector: missing"),
    (change_config(rank_pattern={"a|b": 2}), r"rank_pattern\.a\|b"),
    (change_tensors(lambda t: t.pop(FIRST_A)), r"c_attn\.lora_A\.weight: missing"),
    (change_tensors(lambda t: t.update({FIRST_A.replace("h.0", "h.7"): t[FIRST_A].clone()})), r"h\.7.*: not for a linear layer"),
    (change_tensors(lambda t: t.update({"base_model.model.wte.lora_embedding_A": t[FIRST_A].clone()})), r"embedding_A: no tensor"),
    (change_tensors(lambda t: t.update({"x": t[FIRST_A].clone()})), r"x: no tensor of an adapter"),
    (lambda folder: (folder / WEIGHTS).unlink(), r"adapter_model\.safetensors: missing"),
])  # fmt: skip
def test_a_spoilt_folder_is_refused(spoil: Callable[[Path], None], found: str, tmp_path: Path) -> None:
    loaded(GPT, lora(), torch.float32).save_pretrained(tmp_path)
    mc.load(tmp_path)
    spoil(tmp_path)
    with pytest.raises(mc.InputError, match=found):
        mc.load(tmp_path)


def test_an_adapter_is_not_written_over_a_model(tmp_path: Path) -> None:
    mc.load(zoo.reference(GPT)[1]).save_pretrained(tmp_path / "model")
    with pytest.raises(mc.InputError, match="no adapter's folder"):
        loaded(GPT, lora(), torch.float32).save_pretrained(tmp_path / "model")
    with pytest.raises(mc.InputError, match="the model has one"):
        mc.add_adapter(loaded(GPT, lora()), lora())


# ---- training ---------------------------------------------------------------------------------------------------------


def run_of(folder: Path, base: str, **changes: Any) -> Any:
    """12 steps on a little text from a pretrained folder, states every 4."""
    (folder / "text.txt").write_text("\n".join(f"def f{n}(x):\n    return x * {n} + {n * n}" for n in range(60)))
    (folder / "base.yaml").write_text("{}\n")
    keys = {
        "model": base, "tokenizer": "char", "data.path": str(folder / "text.txt"), "data.seq_len": 16, "data.eval_fraction": 0.1,
        "optimizer.lr": 1e-2, "batch": 4, "micro_batch": 2, "precision": "fp32", "max_steps": 12, "save_steps": 4,
        "adapter.name": "lora", "adapter.rank": 2, "adapter.dropout": 0.1, "output_dir": str(folder / "out"),
    }  # fmt: skip
    return load_recipe(folder / "base.yaml", {**keys, **changes})


RUNS = {"lora": {}, "dora": {"adapter.name": "dora"}, "nf4": {"adapter.quantize": "nf4"}, "bf16": {"precision": "bf16"}}


@pytest.mark.parametrize("changes", RUNS.values(), ids=list(RUNS))
def test_a_run_trains_saves_and_resumes_the_adapter_alone(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, machine = zoo.reference(GPT)[1], mc.Machine(device="cpu", threads=1)
    run = mc.train(run_of(tmp_path, base, **changes), machine)
    size, told = sum(p.numel() for p in zoo.reference(GPT)[0].parameters()), "".join(capsys.readouterr())
    wanted = load_file(tmp_path / "out" / "model" / WEIGHTS)
    added = sum(value.numel() for value in wanted.values())
    assert json.loads((tmp_path / "out" / "environment.json").read_text())[0]["parameters"] == size + added
    assert f"{(size + added) / 1e6:.2f} M parameters" in told and "of rank 2 on 12 layers" in told
    assert ("weights held in nf4" in told) == ("adapter.quantize" in changes)
    state = load_file(tmp_path / "out" / "step-8" / "model.safetensors")
    assert run.step == 12 and state.keys() == {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert all(".a." in n or ".b." in n or n.endswith(".magnitude") for n in state)
    moments = load_file(tmp_path / "out" / "step-8" / "optimizer.safetensors")
    assert {n.partition("/")[2] for n in moments} == state.keys()
    assert not (tmp_path / "out" / "model" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "out" / "step-12")
    shutil.rmtree(tmp_path / "out" / "model")
    mc.train(run_of(tmp_path, base, **changes), machine)
    again = load_file(tmp_path / "out" / "model" / WEIGHTS)
    assert again.keys() == wanted.keys() and all(torch.equal(again[n], wanted[n]) for n in wanted)
    args, low = inputs(GPT), changes.get("precision") == "bf16"
    run.model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert torch.equal(scores(mc.load(tmp_path / "out" / "model", dtype="fp32")(**args)), scores(run.model(**args)))
    assert main(["evaluate", str(tmp_path / "out"), "--machine", "cpu"]) == 0
    assert main(["merge", str(tmp_path / "out"), str(tmp_path / "merged")]) == 2
    assert f"no adapter_config.json; what was trained there is {tmp_path / 'out' / 'model'}" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "out" / "model"), str(tmp_path / "merged")]) == 0
    off = 2e-2 if low else 1e-3  # the run's frozen weights are rounded to bf16
    torch.testing.assert_close(scores(mc.load(tmp_path / "merged")(**args)), scores(run.model(**args)), rtol=off, atol=off)
    if low:
        with pytest.raises(mc.InputError, match="adapter: merged into weights that were rounded for a run; save it, and merge"):
            mc.merge_adapter(run.model)


@pytest.mark.parametrize("case", [GPT, Case("gpt2", "untied", "lm"), LLAMA, T5], ids=str)
@pytest.mark.parametrize(("precision", "low"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_frozen_matrices_are_held_in_the_precision_of_the_run(case: Case, precision: str, low: torch.dtype,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """But for the head's, and those that an embedding shares. Forwards under autocast are the same, and others are in fp32."""
    monkeypatch.setattr(products, "has_low_units", lambda dtype: True)  # without them nothing was rounded
    folder, config = zoo.reference(case)[1], lora(targets=["q", "down"])
    whole, held = (mc.load(folder, adapter=config, precision=kind).eval() for kind in ("fp32", precision))
    linear = {name for name, layer in held.named_modules() if type(layer) is Linear and not name.startswith("head.")}
    inside = {name.rpartition(".")[0] for name, p in held.named_parameters() if p.dtype == low}
    assert inside == {name for name in linear if not name.endswith((".a", ".b"))} and len(inside) > 6
    assert {p.dtype for p in whole.parameters()} == {p.dtype for p in held.parameters() if p.requires_grad} == {torch.float32}
    for model in (whole, held):
        for layer in adapted(model).values():
            torch.nn.init.normal_(layer.b.weight, generator=torch.Generator().manual_seed(1))
    args = inputs(case)
    with torch.autocast("cpu", low):
        assert torch.equal(scores(held(**args)), scores(whole(**args)))
    for name in inside:
        weight = whole.get_parameter(f"{name}.weight")
        weight.data = weight.to(low).float()
    torch.testing.assert_close(scores(held(**args)), scores(whole(**args)), rtol=1e-5, atol=1e-5)


def test_an_adapter_is_not_trained_on_random_weights(tmp_path: Path) -> None:
    with pytest.raises(mc.InputError, match=r"adapter\.name: lora with init random"):
        run_of(tmp_path, "gpt2", init="random")


def test_an_adapter_is_not_trained_on_a_base_that_is_changed(tmp_path: Path) -> None:
    """Its folder names the base, whose config.json has the other value: loaded, it would compute something else."""
    for key, value in (("act", "relu"), ("eps", 0.1), ("tie", False)):
        with pytest.raises(mc.InputError, match=rf"config\.{key}: {value!r} with adapter\.name lora; leave it out"):
            run_of(tmp_path, "gpt2", config={key: value})
    assert run_of(tmp_path, "gpt2", config={"dropout": 0.0, "attn_dropout": 0.0}).config


@pytest.mark.parametrize("change", [{"act": "relu"}, {"scale_by_head": False}, {"heads": 2}], ids=str)
def test_an_adapter_stands_on_its_base_as_it_is(change: dict[str, Any], tmp_path: Path) -> None:
    """In Python as in a recipe: a new one, one that is put on later, and a saved one."""
    folder = zoo.reference(GPT)[1]
    mc.load(folder, adapter=lora()).save_pretrained(tmp_path)
    for make in (lambda **a: mc.load(folder, adapter=lora(), **a), lambda **a: mc.add_adapter(mc.load(folder, **a), lora()),
                 lambda **a: mc.load(tmp_path, **a)):  # fmt: skip
        with pytest.raises(mc.InputError, match=rf"config\.{next(iter(change))}: .*; leave it out: who loads the adapter has"):
            make(config=change)
        same = {"heads": mc.load(folder).config.heads, "dropout": 0.0}
        assert make(config=same).config.dropout == 0
    with pytest.raises(mc.InputError, match=r"config\.tie: .*; leave it out"):
        mc.load(folder, adapter=lora(), config={"tie": False})


def test_a_base_of_a_revision_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another revision of a base is other weights under the same adapter."""
    asked = []

    def resolve(name: str, *, revision: str | None = None, **options: Any) -> Path:
        asked.append((str(name), revision))
        return Path(zoo.reference(LLAMA)[1]) if name == "someone/base" else Path(name)

    monkeypatch.setattr("modelcenter.identify.hub.resolve", resolve)
    mc.load("someone/base", revision="v1", adapter=lora()).save_pretrained(tmp_path / "a")
    again = mc.load(tmp_path / "a")
    assert asked == [("someone/base", "v1"), (str(tmp_path / "a"), None), ("someone/base", "v1")]
    assert (again.source, again.revision) == ("someone/base", "v1")


def test_what_peft_leaves_with_the_base_is_found_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer and options of generation; a tokenizer beside the adapter counts alone."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(zoo.reference(GPT)[1], base)
    ours = CharTokenizer.train(["the fox"])
    ours.save(base)
    (base / "vocab.txt").write_text("of another\n")
    (base / "generation_config.json").write_text('{"max_new_tokens": 3}')
    make_in_peft(GPT, adapter, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    (adapter / CONFIG).write_text(json.dumps(json.loads((adapter / CONFIG).read_text()) | {"base_model_name_or_path": str(base)}))
    found = mc.load_tokenizer(adapter)
    assert found.encode("fox the") == ours.encode("fox the")
    assert main(["generate", str(adapter), "the"]) == 0 and len(capsys.readouterr().out.strip()) <= 6
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    assert mc.load_tokenizer(tmp_path / "merged").encode("fox the") == ours.encode("fox the")
    assert (tmp_path / "merged" / "generation_config.json").exists()
    CharTokenizer.train(["another one"]).save(adapter)
    mc.merge_adapter(mc.load(adapter)).save_pretrained(tmp_path / "own")
    assert mc.load_tokenizer(tmp_path / "own").vocab_size == mc.load_tokenizer(adapter).vocab_size != ours.vocab_size
    assert not (tmp_path / "own" / "vocab.txt").exists() and (tmp_path / "own" / "generation_config.json").exists()


def test_the_tokenizer_of_a_base_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(mc.InputError, match=r"base_model_name_or_path: .*gone, which is not there; the folder where"):
        mc.load_tokenizer(tmp_path)
