"""What transformers has and we have not is refused by name, with what does the same."""

import copy
import fnmatch
import inspect
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import zoo

import modelcenter as mc
from modelcenter import theirs
from modelcenter.__main__ import VERBS
from modelcenter.config import describe
from modelcenter.data.tokenizer import CharTokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.generate.options import Options
from modelcenter.parallel.machine import Machine
from modelcenter.registry import families
from modelcenter.train.read import ALIASES, PARTIAL, PLACES
from modelcenter.train.recipe import Recipe

SIZES = {"layers": 2, "dim": 32, "heads": 2, "vocab": 50, "positions": 32}
BERT = {**SIZES, "hidden": 64}
MODELCENTER = {  # ModelCenter's and BMTrain's, which are not among what is installed
    "forward": {"length", "decoder_length", "mems", "output_logits", "output_pooler_output", "output_decoder_attentions",
                "output_decoder_hidden_states"},
    "generate": {"beam_size", "generate_length", "repetition_window"},
    "model": {"cls_projection", "input_embedding", "output_projection", "pooler", "position_embedding", "token_type_embedding"},
    "module": {  # of bmtrain, model_center.model, .tokenizer, .dataset, .layer, .utils and .generation
        "init_distributed", "init_parameters", "DistributedModule", "DistributedParameter", "BMTrainModelWrapper", "Block",
        "TransformerBlockList", "PipelineTransformerBlockList", "CheckpointBlock", "rank", "world_size", "synchronize", "sum_loss",
        "gather_result", "distributed", "nccl", "print_rank", "print_dict", "print_block", "see_memory", "inspect", "save", "optim",
        "lr_scheduler", "loss", "nn", "OptimManager", "FusedCrossEntropy", "Bert", "GPT2", "Roberta", "GPTj", "OPT", "GLM",
        "Longformer", "ViT", "CPM1", "CPM2", "CPM3", "BertConfig", "T5Tokenizer", "CPM1Tokenizer", "get_args", "print_inspect",
        "DATASET", "MMapIndexedDataset", "DistributedMMapIndexedDataset", "DistributedDataLoader", "dataset", "layer", "Linear",
        "T5BeamSearch", "T5RandomSampling", "LlamaRandomSampling", "generation", "grouped_parameters", "wait_loader",
        "ParameterInitializer", "tokenizer", "arguments", "AdamOffloadOptimizer",
    },
}  # fmt: skip


def gpt() -> mc.Model:
    return mc.build("gpt2", config=SIZES)


def test_every_name_is_theirs_and_not_ours() -> None:
    """A name that we come to answer to, or that they never had, is no longer told of."""
    source = inspect.getsource(transformers.modeling_utils)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    ours, older = dir(gpt()), {"add_adapter", "generation_config", "init_weights", "can_generate"}
    for name in theirs.MODEL:
        assert name not in ours and (hasattr(model, name) or name in older | MODELCENTER["model"]), name
    taken = {"load": set(inspect.signature(mc.load).parameters), "save": set(inspect.signature(mc.GPT.save_pretrained).parameters),
             "forward": set(inspect.signature(mc.GPT.forward).parameters)}  # fmt: skip
    for what, table in (("load", theirs.LOAD), ("save", theirs.SAVE), ("forward", theirs.FORWARD)):
        assert not taken[what] & table.keys()
    gone = {"ignore_mismatched_sizes", "label2id", "load_in_4bit", "load_in_8bit", "low_cpu_mem_usage", "proxies", "subfolder",
            "use_auth_token", "safe_serialization", "save_function", "resume_download"}  # said elsewhere, or in older releases
    configs = [config().to_dict() for config in (transformers.GPT2Config, transformers.BertConfig, transformers.T5Config,
                                                 transformers.BloomConfig, transformers.LlamaConfig)]  # fmt: skip
    keys = {*chain(*configs)}
    assert all(name in source or name in gone | keys for name in {**theirs.LOAD, **theirs.SAVE})
    resize = inspect.signature(transformers.PreTrainedModel.resize_token_embeddings).parameters
    assert theirs.RESIZE.keys() <= resize.keys() and "new_num_tokens" in resize
    arguments, ours = inspect.signature(transformers.GenerationMixin.generate).parameters, [f.name for f in fields(Options)]
    models = (transformers.T5ForConditionalGeneration, transformers.GPT2LMHeadModel)
    forwards = {name for model in models for name in inspect.signature(model.forward).parameters}
    prepared = {"cache_position", "decoder_attention_mask", "decoder_input_ids", "logits_warper", "token_type_ids", "inputs_embeds"}
    prepared |= MODELCENTER["generate"]
    for name in theirs.GENERATE:
        assert name not in ours and (name in arguments or name in forwards or name in prepared), name
    tokenizer = CharTokenizer.train(["abc"])
    gone = {"batch_encode_plus", "encode_plus", "padding_side"}  # of older releases, or made with the object
    for name in theirs.TOKENIZER.keys() - {"__call__"}:
        there = hasattr(transformers.PreTrainedTokenizerFast, name) or re.fullmatch(r"[a-z]+_token(_id)?", name)
        assert not hasattr(tokenizer, name) and (there or name in gone), name
    names = {*dir(transformers), *dir(peft), *MODELCENTER["module"]}
    for pattern in theirs.MODULE:
        assert fnmatch.filter(names, pattern), pattern
    for name in MODELCENTER["module"] - {"optim"}:  # that is a package, once something has imported it
        assert theirs.spoken_of(name) and not hasattr(mc, name), name
    assert MODELCENTER["forward"] <= theirs.FORWARD.keys()


def test_what_is_advised_is_there() -> None:
    tables = theirs.FORWARD, theirs.GENERATE, theirs.LOAD, theirs.SAVE, theirs.RESIZE, theirs.MODEL, theirs.MODULE
    advice = [text for table in tables for text in table.values()]
    for text in advice:
        for name in re.findall(r"\bmc\.(\w+)", text):
            assert hasattr(mc, name), text
    model = gpt()
    t5 = mc.build("t5-small", config={"layers": 1, "decoder_layers": 1, "dim": 32, "heads": 2, "head_dim": 16, "vocab": 50})
    tokenizer = CharTokenizer.train(["abc"])
    for text in theirs.TOKENIZER.values():
        for path in re.findall(r"^(\w+)\(|tokenizer\.(\w+)", text):
            assert hasattr(tokenizer, "".join(path)), text
    assert {layer for ours in theirs.LAYERS.values() for layer in ours.split()} == {"q", "k", "v", "o", "gate", "up", "down"}
    for text in theirs.MODEL.values():
        for path in re.findall(r"\bmodel\.([\w.]+)", text):
            part: Any = t5 if path == "encoder" else model
            for leaf in path.split("."):
                part = getattr(part, leaf)
    assert mc.Machine(recompute="full").recompute == "full"
    assert mc.AdapterConfig(name="lora", quantize="nf4").quantize == "nf4"
    for table, ours in ((theirs.LOAD, mc.load), (theirs.FORWARD, mc.GPT.forward)):
        known = inspect.signature(ours).parameters
        for text in table.values():
            if re.fullmatch(r"\w+", text):
                assert text in known, text


def test_what_a_recipe_is_told_is_there() -> None:
    """A remedy begins with a key, a verb or a recipe of ours; no name is a key of ours already, or an alias."""
    recipe = {key.name for key in describe(Recipe)}
    keys = recipe | {key.name for key in describe(Machine, "machine.")} | {f"generation.{f.name}" for f in fields(Options)}
    keys |= {f"config.{f.name}" for f in fields(mc.GPT.Config)}  # type: ignore[arg-type]  # a dataclass
    assert len(theirs.RECIPE) > 100
    assert not theirs.RECIPE.keys() & {*ALIASES, *PARTIAL, *(key.partition(".")[0] for key in recipe)}
    for name, text in theirs.RECIPE.items():
        words = re.findall(r"[a-z_]+(?:\.[a-z_]+)?", text)
        assert words[0] in keys or text.startswith(("leave it out: ", "the verb ", "the recipe ", "hf upload ")), name
        assert {word for word in words if "." in word} <= keys | {"translation.en", "translation.de"}, name
        if text.startswith("the verb "):
            assert words[2] in VERBS
    arguments = {f.name for f in fields(transformers.TrainingArguments)}
    told = {"optim", "eval_strategy", "save_strategy", "metric_for_best_model", "torch_compile", "gradient_checkpointing"}
    told |= {"dataloader_pin_memory", "ddp_timeout", "full_determinism", "hub_token", "lr_scheduler_kwargs"}
    assert told <= theirs.RECIPE.keys() & arguments
    known = {*theirs.RECIPE, *ALIASES, *PARTIAL, *PLACES, *(key.partition(".")[0] for key in recipe)}
    arguments |= {f.name for f in fields(transformers.Seq2SeqTrainingArguments)}
    assert arguments <= known | {"debug"}  # which looks into Trainer's own steps


@pytest.mark.parametrize(("asked", "line"), [
    ({"head_mask": torch.ones(1)}, r"^forward\(head_mask\): no such argument; leave it out: no head is masked here$"),
    ({"length": torch.ones(1)}, r"^forward\(length\): no such argument; attention_mask, 1 where a token is$"),
    ({"atention_mask": None}, r"^forward\(atention_mask\): no such argument; did you mean 'attention_mask'\?$"),
    ({"past_key_values": ((torch.zeros(1),) * 2,)}, r"^past_key_values: a tuple; mc.Cache\(\), or use_cache=True for the f"),
    ({"start_positions": torch.tensor([1])}, r"^start_positions, end_positions: with the task 'lm'; both, of a model with task="),
], ids=["theirs", "modelcenters", "typo", "cache", "answer"])
def test_a_forward_refuses(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(mc.InputError, match=line):
        gpt()(torch.ones(1, 3, dtype=torch.long), **asked)


@pytest.mark.parametrize(("asked", "line"), [
    ({"past_key_values": [1]}, r"^generate\(past_key_values\): no such argument; leave it out: every call begins with the prompt"),
    ({"token_type_ids": torch.ones(1, 3)}, r"^generate\(token_type_ids\): no such argument; leave it out: return_token_type_ids"),
    ({"max_lenght": 5}, r"^generate\(max_lenght\): no such argument; did you mean 'max_length'\?$"),
    ({"inputs_embeds": torch.ones(1, 3, 4), "input_ids": None}, r"^input_ids: inputs_embeds in its place; the prompt's ids"),
    ({"input_ids": None}, r"^input_ids: missing; the prompt's ids \(batch, tokens\)$"),
    ({"streamer": 1}, r"^streamer: a int; an object with a method put, as transformers' have$"),
    ({"tokenizer": "gpt2"}, r"^tokenizer: a str; an object with a method decode"),
], ids=["cache", "segments", "typo", "embeds", "missing", "streamer", "tokenizer"])
def test_generate_refuses(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(mc.InputError, match=line):
        gpt().generate(**{"input_ids": torch.ones(1, 3, dtype=torch.long), **asked})


def test_generate_takes_none_for_an_argument_of_theirs() -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    assert gpt().generate(ids, past_key_values=None, stopping_criteria=None, max_new_tokens=1).shape == (1, 4)
    empty = {"logits_processor": transformers.LogitsProcessorList(), "stopping_criteria": transformers.StoppingCriteriaList()}
    assert gpt().generate(ids, **empty, max_new_tokens=1).shape == (1, 4)
    with pytest.raises(mc.InputError, match=r"^generate\(nobody\): no such argument"):
        gpt().generate(ids, nobody=[])
    assert gpt().generate(ids, logits_warper=[], max_new_tokens=1).shape == (1, 4)
    with pytest.raises(mc.InputError, match=r"^generate\(logits_warper\)"):
        gpt().generate(ids, logits_warper=[transformers.TemperatureLogitsWarper(0.5)])


def test_a_config_of_modelcenter_is_understood() -> None:
    """The field that is meant is named, where this family has it: when it is read, when it is set, when a model is made."""
    config, all_ours = gpt().config, {f.name for family in families().values() for f in fields(family.Config)}  # type: ignore[arg-type]
    assert set(theirs.FIELDS.values()) <= all_ours and not theirs.FIELDS.keys() & all_ours
    with pytest.raises(AttributeError, match=r"no attribute 'dim_model'; here it is dim$"):
        _ = config.dim_model
    with pytest.raises(AttributeError, match=r"no attribute 'dim_head'$"):  # BERT and GPT have no such field
        _ = config.dim_head
    with pytest.raises(FrozenInstanceError, match=r"mc.load\(name, config=\{'dropout': 0\}\)$"):
        config.dropout_p = 0
    for name, line in {"dim_model": "here it is dim", "num_layers": "here it is layers", "n_embd": "here it is dim",
                       "buckets": "known: act, attn_dropout", "position_bias_num_buckets": "known: act"}.items():  # fmt: skip
        with pytest.raises(mc.InputError, match=rf"^config\.{name}: unknown field; {line}"):
            mc.build("gpt2", config={name: 2})
    with pytest.raises(mc.InputError, match=r"; did you mean the preset 'gpt2'\?$"):
        mc.load("gpt2-base", local_files_only=True)


def test_lengths_are_no_mask() -> None:
    """ModelCenter's forward takes them second, and of T5 what its decoder reads behind them."""
    ids, lengths = torch.ones(2, 4, dtype=torch.long), torch.tensor([4, 2])
    t5 = mc.build("t5-small", config={"layers": 1, "decoder_layers": 1, "dim": 32, "heads": 2, "head_dim": 16, "vocab": 50})
    line = r"^attention_mask: 1 dimensions; .*; of lengths torch.arange\(tokens\) < length\[:, None\]$"
    for model, asked in ((gpt(), (ids, lengths)), (t5, (ids, lengths, ids, lengths))):
        with pytest.raises(mc.InputError, match=line):
            model(*asked)
    assert gpt()(ids, torch.arange(4) < lengths[:, None]).logits.shape == (2, 4, 50)


def test_a_config_says_how_it_is_changed() -> None:
    config = gpt().config
    for name, said in {
        "dropout": "GPTConfig.dropout: a config does not change; give it where the model is made: mc.load(name, config={",
        "n_layer": "config={'layers': 7})", "labels": "num_labels or id2label",
        "use_cache": "model(ids, use_cache=True)", "nothing": "no field of it",
    }.items():  # fmt: skip
        with pytest.raises(FrozenInstanceError, match=re.escape(said)):
            setattr(config, name, 7)
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("given", [{"layers": 2}, {"c": 3}, {}], ids=str)
def test_a_family_called_itself_says_what_makes_a_model(given: dict[str, Any]) -> None:
    """As a layer of torch is made; with a subclass of one's own, too."""

    class Mine(mc.BERT):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)

    for cls in (mc.BERT, Mine):
        with pytest.raises(mc.InputError) as refused:
            cls(**given)
        wanted = f"mc.build('bert-base-uncased', config={given or '{...}'}), its weights random, or mc."
        assert str(refused.value).startswith(f"mc.{cls.__name__}: called itself, which gives it no head and no weights; {wanted}")


@pytest.mark.parametrize("strict", [True, False])
def test_weights_by_their_names_are_refused_in_a_line(strict: bool) -> None:
    """Without `strict` torch would load nothing, and say so in what it returns alone."""
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=32))
    line = r"^state_dict: transformer\.h\.0\.attn\.c_attn\.bias: transformers' names, where ours are embed\..* mc.load of it$"
    with pytest.raises(mc.InputError, match=line):
        gpt().load_state_dict(reference.state_dict(), strict)
    with pytest.raises(RuntimeError, match="Missing key"):
        gpt().load_state_dict({"nobody": torch.ones(1)})
    with pytest.raises(mc.InputError, match=r"^state_dict: a str; what state_dict\(\) gives; a folder is for mc"):
        gpt().load_state_dict("model.pt", strict)
    gpt().load_state_dict(gpt().state_dict())
    for prefix in ("_orig_mod.", "module.model."):
        line = rf"^state_dict: names that begin with '{prefix}', which a wrapper put there; {{name.removeprefix\('{prefix}'\): x"
        with pytest.raises(mc.InputError, match=line):
            gpt().load_state_dict({prefix + name: x for name, x in gpt().state_dict().items()}, strict)


def test_a_vocabulary_is_resized_by_their_names_too() -> None:
    model, same = gpt(), gpt()
    model.resize_token_embeddings(new_num_tokens=60, mean_resizing=False)
    assert torch.equal(model.get_input_embeddings().weight, same.resize_token_embeddings(60).weight)
    with pytest.raises(mc.InputError, match=r"mean_resizing\): no such argument; leave it out: new rows are drawn as"):
        model.resize_token_embeddings(70, mean_resizing=True)


def test_a_tokenizer_says_what_does_the_same() -> None:
    tokenizer = CharTokenizer.train(["abc"])
    assert repr(tokenizer) == "CharTokenizer('char', 3 tokens, special {})"
    with pytest.raises(TypeError, match=r"^a tokenizer is not called; encode\(text\), and torch.tensor"):
        tokenizer("abc", return_tensors="pt")
    for name, advice in theirs.TOKENIZER.items():
        if name != "__call__":
            with pytest.raises(AttributeError, match=re.escape(f"CharTokenizer has no {name}; {advice}")):
                getattr(tokenizer, name)
    with pytest.raises(AttributeError, match=r"CharTokenizer has no nothing$"):
        _ = tokenizer.nothing


def test_an_output_has_no_attribute_of_another_name() -> None:
    out = gpt().eval()(torch.ones(1, 3, dtype=torch.long))
    assert out.loss is None and out.pooler_output is None and out.logits.shape == (1, 3, 50)
    with pytest.raises(AttributeError, match=r"^Output has no last_hidden_states; did you mean 'last_hidden_state'\?$"):
        _ = out.last_hidden_states
    for name, advice in theirs.OUTPUT.items():
        with pytest.raises(AttributeError, match=re.escape(f"Output has no {name}; {advice}")):
            getattr(out, name)


def test_an_encoders_output_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    sizes = {"layers": 1, "decoder_layers": 1, "dim": 32, "heads": 2, "head_dim": 16, "vocab": 50}
    model = mc.build("t5-small", config=sizes, dtype="fp64").eval()
    model.save_pretrained(tmp_path)
    reference = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = torch.arange(12).view(2, 6) + 2
    theirs_ = reference(ids, decoder_input_ids=ids, output_hidden_states=True)
    ours = model(ids, decoder_input_ids=ids, output_hidden_states=True, use_cache=True)
    assert theirs.OUTPUT.keys() - {"attentions"} <= {f.name for f in fields(theirs_)}
    torch.testing.assert_close(ours.past_key_values.memory, theirs_.encoder_last_hidden_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.hidden_states, theirs_.decoder_hidden_states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("task", "count", "labels", "line"), [
    ("classify", 3, [0], r"shape \[1\]; \[2\], one for each sequence"),
    ("classify", 3, [[0, 1], [1, 0]], r"shape \[2, 2\]; \[2\], one for each sequence"),
    ("classify", 3, [0.1, 0.2], r"numbers of shape \[2\]; \[2, 3\], each 0 or 1; or classes \(int64\)"),
    ("classify", 3, [True, False], r"of bool; classes, of int64 \(labels.long\(\)\), one for each sequence"),
    ("classify", 1, [0.1, 0.2, 0.3], r"numbers of shape \[3\]; \[2\]"),
    ("tag", 3, [[0] * 3] * 2, r"shape \[2, 3\]; \[2, 4\], one for each token"),
    ("tag", 3, [[0] * 2] * 4, r"shape \[4, 2\]; \[2, 4\], one for each token"),
    ("tag", 3, [[0.5] * 4] * 2, r"of float32; classes, of int64"),
    ("embed", None, [0, 1], r"shape \[2\] of 2 texts; one for each pair"),
    ("backbone", None, [0, 1], r"with the task 'backbone', which has no loss; another task: "),
], ids=str)
def test_labels_that_do_not_fit_are_refused(task: str, count: int | None, labels: list[Any], line: str) -> None:
    model = mc.build("bert-base-uncased", config=BERT, task=task, num_labels=count)
    for training in (True, False):
        with pytest.raises(mc.InputError, match=f"^labels: {line}"):
            model.train(training)(torch.ones(2, 4, dtype=torch.long), labels=torch.tensor(labels))
    with pytest.raises(mc.InputError, match=r"^labels: a list; a tensor$"):
        model(torch.ones(2, 4, dtype=torch.long), labels=labels)


def test_labels_for_a_head_without_any() -> None:
    for given in ({"num_labels": 3}, {"id2label": {0: "a"}}):
        line = rf"^{next(iter(given))}: given with the task 'mlm', which has no labels; task=classify or task=tag$"
        with pytest.raises(mc.InputError, match=line):
            mc.build("bert-base-uncased", config=BERT, **given)  # type: ignore[arg-type]  # one of the two
    model = mc.build("bert-base-uncased", config=BERT, task="classify", id2label={"0": "no", "1": "yes"})  # type: ignore[dict-item]  # as in a file
    assert model.config.labels == ("no", "yes")


def test_none_is_no_argument() -> None:
    ids = torch.ones(1, 3, dtype=torch.long)
    model = gpt().eval()
    assert torch.equal(model(ids, head_mask=None, cache_position=None, output_pooler_output=False).logits, model(ids).logits)


def test_functions_refuse(tmp_path: Path) -> None:
    gpt().save_pretrained(tmp_path / "saved")
    with pytest.raises(mc.InputError, match=r"^load\(torch_dtype\): no such argument; dtype$"):
        mc.GPT.from_pretrained("gpt2", torch_dtype=torch.bfloat16)
    with pytest.raises(mc.InputError, match=r"^load: 2 arguments without a name; name alone, and the others by name$"):
        mc.load(gpt(), "model.pt")  # type: ignore[call-arg]  # as BMTrain's
    with pytest.raises(mc.InputError, match=r"^name: a GPT; a folder, a preset or a hub id; .*load_state_dict$"):
        mc.load(gpt())  # type: ignore[arg-type]  # what is refused
    with pytest.raises(mc.InputError, match=r"^load\(strict\): .*load_report says"):
        mc.load("gpt2", strict=False)  # type: ignore[call-arg]  # what is refused
    with pytest.raises(mc.InputError, match=r"^load\(num_label\): no such argument; did you mean 'num_labels'\?$"):
        mc.load("gpt2", num_label=3)  # type: ignore[call-arg]  # what is refused
    with pytest.raises(mc.InputError, match=r"^load\(attn_pdrop\): no such argument; config=\{'attn_dropout': \.\.\.\}$"):
        mc.load("gpt2", attn_pdrop=0.0)  # type: ignore[call-arg]  # what is refused
    with pytest.raises(mc.InputError, match=r"^name: a dict; a preset, or a folder with a config\.json; config= changes"):
        mc.build({"layers": 2})  # type: ignore[arg-type]  # what is refused
    for dtype in (torch.int8, torch.complex64, "int8", torch.float8_e5m2):
        for make in (mc.build, mc.load, mc.GPT.from_pretrained):
            with pytest.raises(mc.InputError, match=rf"^dtype: '?{dtype}'?; known: auto, bf16, "):
                make("gpt2" if make is mc.build else tmp_path / "saved", dtype=dtype)
    with pytest.raises(mc.InputError, match=r"^name: a NoneType; a folder, a preset or a hub id"):
        mc.load_tokenizer(None)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(mc.InputError, match=r"^folder: a NoneType; the name of the folder"):
        gpt().save_pretrained(None)  # type: ignore[arg-type]  # what is refused
    for asked in ({"safe_serialization": False}, {"is_main_process": False}, {"state_dict": {}}):
        with pytest.raises(mc.InputError, match=rf"^save_pretrained\({min(asked)}\): no such argument; leave it out"):
            gpt().save_pretrained(tmp_path / "out", **asked)  # type: ignore[arg-type]  # what is refused
    assert not (tmp_path / "out").exists()


def test_what_asks_for_nothing_is_no_argument(tmp_path: Path) -> None:
    """As callers of many models write it: what they leave as it is, and what is always so."""
    asked: Any = {"safe_serialization": True, "is_main_process": True, "push_to_hub": False, "token": None}
    gpt().save_pretrained(tmp_path, **asked)
    asked = {"device_map": None, "trust_remote_code": False, "low_cpu_mem_usage": True, "load_in_4bit": False, "variant": None}
    assert isinstance(mc.GPT.from_pretrained(tmp_path, **asked), mc.GPT)
    with pytest.raises(mc.InputError, match=r"^load\(low_cpu_mem_usage\): no such argument"):
        mc.load(tmp_path, low_cpu_mem_usage=False)  # type: ignore[call-arg]  # what is refused
    with pytest.raises(mc.InputError, match=r"^load\(nobodys\): no such argument"):
        mc.load(tmp_path, nobodys=None)  # type: ignore[call-arg]  # what is refused


def test_a_name_of_theirs_for_what_is_the_same(tmp_path: Path) -> None:
    """transformers' names of what is loaded and saved, accelerate's idiom, and what a tokenizer is asked for."""
    asked: Any = {"save_directory": tmp_path / "saved", "is_main_process": True, "save_function": torch.save}
    gpt().save_pretrained(**asked)
    named: Any = {"pretrained_model_name_or_path": tmp_path / "saved"}
    assert isinstance(mc.GPT.from_pretrained(**named), mc.GPT) and isinstance(mc.load(**named), mc.GPT)
    tokenizer, plain = train_tokenizer(["abc"], 300, "roberta"), {"add_special_tokens": False}
    assert tokenizer.encode("abc", **plain) == tokenizer.encode("abc", special=False) != tokenizer.encode("abc")
    keeps: Any = {"skip_special_tokens": True}
    assert tokenizer.decode(tokenizer.encode("abc"), **keeps) == "abc"


@pytest.mark.parametrize(("ask", "line"), [
    (lambda: gpt().save_pretrained(), r"^save_pretrained\(folder\): missing; give it: save_pretrained\(folder=\.\.\.\)$"),
    (lambda: gpt().save_pretrained("a", "b"), r"^save_pretrained: 2 arguments without a name; folder alone"),
    (lambda: gpt().save_pretrained("a", save_directory="b"), r"^save_pretrained\(save_directory\): given, and so is folder; "),
    (lambda: gpt().save_pretrained("a", shard_size=1), r"^save_pretrained\(shard_size\): no such argument; did you mean 'max_sh"),
    (lambda: mc.GPT.from_pretrained(), r"^from_pretrained\(name\): missing; "),
    (lambda: mc.GPT.from_pretrained(strict=False), r"^from_pretrained\(name\): missing; "),
    (lambda: mc.AdapterConfig(name="lora", r=4), r"^AdapterConfig\(r\): no such argument; rank$"),
    (lambda: mc.AdapterConfig(name="lora", target_modules=["c_attn"]), r"^AdapterConfig\(target_modules\): .*; targets$"),
    (lambda: mc.AdapterConfig(name="lora", use_dora=True), r"^AdapterConfig\(use_dora\): .*; name=dora$"),
    (lambda: mc.AdapterConfig("lora"), r"^AdapterConfig: 1 argument without a name; all of them by name$"),
    (lambda: replace(mc.AdapterConfig(name="lora"), r=4), r"^AdapterConfig\(r\): no such argument; rank$"),
    (lambda: mc.Machine(tp_size=2), r"^Machine\(tp_size\): no such argument; tensor_parallel$"),
    (lambda: mc.Machine(foo=2), r"^Machine\(foo\): no such argument; known: async_save"),
    (lambda: mc.Recipe(foo=2), r"^Recipe\(foo\): no such argument; known: adapter"),
    (lambda: mc.Recipe(lora_r=2), r"^Recipe\(lora_r\): no such argument; adapter.rank$"),
    (lambda: mc.train("finetune", model="gpt2"), r"^train\(model\): .*: overrides=\{'model': 'gpt2'\}$"),
    (lambda: mc.train("finetune", overides={}), r"^train\(overides\): no such argument; did you mean 'overrides'\?$"),
    (lambda: mc.train("finetune", overrides="max_steps=1"), r"^overrides: max_steps=1: one text; a list of them, or a mapping"),
    (lambda: CharTokenizer.train(["a"]).encode("a", return_tensors="pt"), r"^encode\(return_tensors\): .*torch.tensor\(\["),
    (lambda: CharTokenizer.train(["a"]).decode([0], skip_special_tokens=False), r"^decode\(skip_special_tokens\): .*special=True$"),
], ids=["none", "more", "two", "typo", "no-name", "no-name-but-more", "rank", "targets", "dora", "placed", "replaced",
        "ranks", "machine", "recipe", "lora", "train", "train-typo", "overrides", "tensors", "special"])  # fmt: skip
def test_python_is_answered_as_the_command_line_is(ask: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mc.InputError, match=line):
        ask()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("made", [mc.AdapterConfig(name="lora", rank=4), mc.Machine(fsdp=2)], ids=["adapter", "machine"])
def test_a_dataclass_that_refuses_is_one_all_the_same(made: Any) -> None:
    assert pickle.loads(pickle.dumps(made)) == made == replace(made) == copy.deepcopy(made)  # noqa: S301  # made here
    assert list(inspect.signature(type(made)).parameters) == [f.name for f in fields(made)]


def test_train_says_what_it_takes() -> None:
    """To who asks the function itself, and with the same arguments; help has the module's text, which shows the call."""
    from modelcenter.train.loop import train

    ours, whole = inspect.signature(mc.train).parameters, inspect.signature(train).parameters
    assert [*ours][:-1] == [*whole] and [p.default for p in ours.values()][:-1] == [p.default for p in whole.values()]
    assert (mc.train.__doc__ or "").startswith("modelcenter.train(recipe, machine=None, overrides=None)")
    assert {name for name in dir(mc) if not name.startswith("__")} >= {"GPT", "train"}
    assert not {"Any", "Path", "re", "sys", "import_module", "PUBLIC"} & {*dir(mc)}


def test_attributes_say_what_does_the_same() -> None:
    model = gpt()
    said = {(model, name): f"GPT has no {name}; {advice}" for name, advice in theirs.MODEL.items()}
    said |= {(model.config, "nothing"): "'GPTConfig' object has no attribute 'nothing'",
             (model, "nothing"): "'GPT' object has no attribute 'nothing'",
             (mc, "GPT2"): "no GPT2; mc.GPT", (mc, "Bert"): "no Bert; mc.BERT",
             (mc, "pipeline"): "no pipeline; model.generate", (mc, "CPM1"): "no CPM1; no such family yet",
             (mc, "BMTrainModelWrapper"): "no BMTrainModelWrapper; mc.load(folder)",
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
