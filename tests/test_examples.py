"""What stands in examples/ does what it says; quickstart.py is `make quickstart`."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from zoo import loud

import modelcenter as mc
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError

Weights = dict[str, torch.Tensor]

COUNT = ("one", "two", "three", "four", "five", "six", "seven", "eight")
TEXT = [" ".join(COUNT[(n + k) % 8] for k in range(8)) for n in range(8)] * 8  # a word that is replaced is known by its neighbours


def example(name: str) -> ModuleType:
    file = Path(__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("packing", ["true", "false"])
def test_replaced_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str) -> None:
    """It learns to tell by the words around. What it writes is an encoder with all weights, its pooler as before."""
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    sizes = {"layers": 1, "dim": 64, "heads": 2, "hidden": 128, "positions": 64, "vocab": 300, "dropout": 0.0, "attn_dropout": 0.0}
    bert = mc.build("bert-base-uncased", config=sizes, task="backbone", seed=1)
    bert.save_pretrained(tmp_path / "bert")
    train_tokenizer(TEXT, 300, "roberta").save(tmp_path / "bert")
    files = [f"model={tmp_path}/bert", f"data.path={tmp_path}/text.txt", f"output_dir={tmp_path}/run"]
    settings = [*files, "data.seq_len=10", f"data.packing={packing}", "batch=64", "max_steps=60", "num_epochs=null",
                "schedule.warmup_steps=4", "optimizer.lr=1e-3", "precision=fp32"]  # fmt: skip
    assert example("replaced_tokens").main(settings) == 0
    said = [re.findall(r"([0-9.]+)% ", line + " ") for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    wrong, share = (sum(x) for x in zip(*((100 - float(right), float(share)) for right, share in said[-3:]), strict=True))
    assert wrong < 0.6 * share, said  # to take all for the text's would be as often wrong as there are replaced ones
    theirs, info = transformers.BertModel.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    old = transformers.BertModel.from_pretrained(tmp_path / "bert").state_dict()
    same = {name for name, value in theirs.state_dict().items() if torch.equal(value, old[name])}
    assert {name for name in same if "position_ids" not in name} == {"pooler.dense.weight", "pooler.dense.bias"}


@pytest.mark.parametrize("masked", [(), (1,), (0, 3)])
def test_only_masked_tokens_are_drawn_anew(masked: tuple[int, ...]) -> None:
    """The rest is the text, where the input was another word too."""
    text, chosen = torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 4, dtype=torch.bool)
    chosen[0, list(masked)] = True
    labels = text.masked_fill(~chosen, -100)
    batch = example("replaced_tokens").known({"input_ids": text.masked_fill(chosen, 1), "labels": labels})

    class Sure:
        """Scores that leave a draw no choice: the id 9."""

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x), 10), -1e4).index_fill(1, torch.tensor([9]), 0.0)

    ids, wrong = example("replaced_tokens").replaced(Sure(), torch.randn(1, 4, 2), batch)
    assert torch.equal(ids, text.masked_fill(chosen, 9)) and torch.equal(wrong, chosen)



COMMON = {"vocab_size": 100, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 100, "n_positions": 40, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48}, "bert": COMMON,
    "t5": {"vocab_size": 100, "d_model": 32, "num_heads": 4, "d_kv": 8, "num_layers": 2, "d_ff": 48, "layer_norm_epsilon": 1e-12},
    "llama": {**COMMON, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5},
}  # fmt: skip
SELF = ("project_q", "project_k", "project_v", "attention_out")
FFN_IN, FFN_OUT = "ffn.ffn.w_in.w", "ffn.ffn.w_out"
NORM_1, NORM_2 = "self_att.layernorm_before_attention", "ffn.layernorm_before_ffn"


def gpt2_of(sd: Weights) -> Weights:
    out = {"input_embedding.weight": sd["transformer.wte.weight"], "position_embedding.weight": sd["transformer.wpe.weight"]}
    for leaf in ("weight", "bias"):
        out[f"encoder.output_layernorm.{leaf}"] = sd[f"transformer.ln_f.{leaf}"]
        for i in range(2):
            h, rows = f"transformer.h.{i}.", dict(zip(SELF, sd[f"transformer.h.{i}.attn.c_attn.{leaf}"].chunk(3, -1), strict=False))
            rows = {f"self_att.self_attention.{p}": value for p, value in rows.items()}
            rows |= {ours: sd[f"{h}{theirs}.{leaf}"] for ours, theirs in {
                NORM_1: "ln_1", "self_att.self_attention.attention_out": "attn.c_proj", NORM_2: "ln_2", FFN_IN: "mlp.c_fc",
                FFN_OUT: "mlp.c_proj"}.items()}  # fmt: skip
            out |= {f"encoder.layers.{i}.{ours}.{leaf}": value.mT if value.dim() == 2 else value for ours, value in rows.items()}
    return out


def bert_of(sd: Weights) -> Weights:
    """A block's first norm is the one that ends the block before."""
    out = {"lm_head.decoder.bias": sd["cls.predictions.bias"], "lm_head.decoder.weight": torch.zeros(0)}
    for ours, theirs in {"input": "word", "position": "position", "token_type": "token_type"}.items():
        out[f"{ours}_embedding.weight"] = sd[f"bert.embeddings.{theirs}_embeddings.weight"]
    for leaf in ("weight", "bias"):
        norms = "embeddings.LayerNorm", "encoder.layer.0.output.LayerNorm", "encoder.layer.1.output.LayerNorm"
        ends = [f"bert.{name}.{leaf}" for name in norms]
        out[f"encoder.output_layernorm.{leaf}"] = sd[ends[2]]
        out |= {f"lm_head.{ours}.{leaf}": sd[f"cls.predictions.transform.{theirs}.{leaf}"]
                for ours, theirs in {"dense": "dense", "layer_norm": "LayerNorm"}.items()}  # fmt: skip
        for i in range(2):
            names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
            rows = {f"self_att.self_attention.{p}": name for p, name in zip(SELF, names, strict=True)}
            rows |= {NORM_2: "attention.output.LayerNorm", FFN_IN: "intermediate.dense", FFN_OUT: "output.dense"}
            out |= {f"encoder.layers.{i}.{ours}.{leaf}": sd[f"bert.encoder.layer.{i}.{name}.{leaf}"] for ours, name in rows.items()}
            out[f"encoder.layers.{i}.{NORM_1}.{leaf}"] = sd[ends[i]]
    return out


def t5_of(sd: Weights) -> Weights:
    """Words and all that is added to them are a hundredth, as in the files that were published."""
    out = {"input_embedding.weight": sd["shared.weight"] / 100}
    for stack, kinds in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
        block, last = f"{stack}.block", len(kinds)
        out[f"{stack}.output_layernorm.weight"] = sd[f"{stack}.final_layer_norm.weight"]
        table = f"{block}.0.layer.0.SelfAttention.relative_attention_bias.weight"
        out[f"position_bias_{stack[:3]}.relative_attention_bias"] = sd[table]
        for i in range(2):
            e = f"{stack}.layers.{i}"
            for k, (kind, ours) in enumerate(zip(kinds, ("self_att", "cross_att"), strict=False)):
                out[f"{e}.{ours}.layernorm_before_attention.weight"] = sd[f"{block}.{i}.layer.{k}.layer_norm.weight"]
                for p, o in zip(SELF, "qkvo", strict=True):
                    value = sd[f"{block}.{i}.layer.{k}.{kind}.{o}.weight"]
                    out[f"{e}.{ours}.self_attention.{p}.weight"] = value / 100 if o == "o" else value
            out[f"{e}.{NORM_2}.weight"] = sd[f"{block}.{i}.layer.{last}.layer_norm.weight"]
            for ours, theirs in {FFN_IN: "wi", FFN_OUT: "wo"}.items():
                out[f"{e}.{ours}.weight"] = sd[f"{block}.{i}.layer.{last}.DenseReluDense.{theirs}.weight"] / 10
    return out


def llama_of(sd: Weights) -> Weights:
    out = {"input_embedding": "model.embed_tokens", "encoder.output_layernorm": "model.norm", "output_projection": "lm_head"}
    for i in range(2):
        rows = {f"self_att.self_attention.{p}": f"self_attn.{o}_proj" for p, o in zip(SELF, "qkvo", strict=True)}
        rows |= {NORM_1: "input_layernorm", NORM_2: "post_attention_layernorm", FFN_OUT: "mlp.down_proj",
                 "ffn.ffn.w_in.w_0": "mlp.gate_proj", "ffn.ffn.w_in.w_1": "mlp.up_proj"}  # fmt: skip
        out |= {f"encoder.layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in rows.items()}
    return {f"{ours}.weight": sd[f"{theirs}.weight"] for ours, theirs in out.items()}


@pytest.mark.parametrize(("kind", "of", "config"), [
    ("gpt2", gpt2_of, {"num_heads": 4, "ffn_activate_fn": "gelu_new"}), ("bert", bert_of, {"num_heads": 4}),
    ("t5", t5_of, {"scale": True, "dim_head": 8, "norm_eps": 1e-12}),
    ("llama", llama_of, {"num_heads": 4, "dim_head": 8, "norm_eps": 1e-5}),
])  # fmt: skip
def test_a_checkpoint_of_openbmb_answers_as_its_source(tmp_path: Path, kind: str, of: Any, config: dict[str, Any]) -> None:
    """`of` writes what the published files of ModelCenter are to transformers' on the hub."""
    made = {"gpt2": transformers.GPT2LMHeadModel, "bert": transformers.BertForMaskedLM, "llama": transformers.LlamaForCausalLM,
            "t5": transformers.T5ForConditionalGeneration}[kind]  # fmt: skip
    loud(model := made(transformers.AutoConfig.for_model(kind, **SMALL[kind])).eval())
    theirs = {name: value.contiguous() for name, value in of(model.state_dict()).items()}
    (source := tmp_path / "there").mkdir()
    (source / "config.json").write_text(json.dumps(config))
    torch.save(theirs, source / "pytorch_model.pt")
    convert = example("from_modelcenter")
    convert.main(str(source), str(tmp_path / "out"))
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"decoder_input_ids": ids[:, :5]} if kind == "t5" else {}
    with torch.no_grad():
        wanted = model(input_ids=ids, **given).logits
        found = mc.load(tmp_path / "out").eval()(ids, **given).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()

    torch.save({**theirs, "odd.weight": torch.zeros(1)}, source / "pytorch_model.pt")
    with pytest.raises(InputError, match=r"odd\.weight: a tensor that this family has not"):
        convert.main(str(source), str(tmp_path / "again"))
    lost = "encoder.layers.1.self_att.self_attention.attention_out.weight"
    torch.save({name: value for name, value in theirs.items() if name != lost}, source / "pytorch_model.pt")
    with pytest.raises(InputError, match="again"):  # by what reads the folder
        convert.main(str(source), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()
    torch.save(theirs, source / "pytorch_model.pt")
    others = [{"length_scale": True}, {"post_layer_norm": kind != "bert"}, {"ffn_activate_fn": "gated_tanh"}]
    others += {"gpt2": [], "bert": [{"attn_scale": False}, {"tied": False}]}.get(kind, [{"attn_scale": kind == "t5"}])
    for other in others:  # what is computed there and not here
        (source / "config.json").write_text(json.dumps({**config, **other}))
        with pytest.raises(InputError, match=next(iter(other))):
            convert.main(str(source), str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


def test_a_model_of_openbmb_inside_another_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As their own quick start trains it: a prefix, and a layer beside it."""
    loud(model := transformers.BertForMaskedLM(transformers.BertConfig(**SMALL["bert"])).eval())
    theirs = {f"bert.{name}": value.contiguous() for name, value in bert_of(model.state_dict()).items()}
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 4}))
    torch.save({"dense.weight": torch.zeros(2, 32), **theirs}, tmp_path / "pytorch_model.pt")
    example("from_modelcenter").main(str(tmp_path), str(tmp_path / "out"))
    assert "dense.weight: left out, beside the model in bert\n" in capsys.readouterr().out
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(mc.load(tmp_path / "out").eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("config", "weights", "said"), [
    ("{", {"a": torch.zeros(1)}, r"config\.json: "), ("[]", {"a": torch.zeros(1)}, r"config\.json: no mapping; "),
    ("{}", {}, r"pytorch_model\.pt: dict '{}'; a table of tensors"), ("{}", None, r"pytorch_model\.pt: cut off, at \d+ "),
    ("{}", {"dense.weight": torch.zeros(1)}, r"pytorch_model\.pt: dense\.weight: no model that is known by its tensors; GPT2, "),
    ("{}", {"encoder.layers.0.ffn.ffn.w_in.w_0.weight": torch.zeros(1)}, r"pytorch_model\.pt: model\.embed_tokens\.weight: missi"),
])
def test_a_broken_checkpoint_of_openbmb_is_refused(tmp_path: Path, config: str, weights: Any, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    torch.save({"a": torch.zeros(99)} if weights is None else weights, file := tmp_path / "pytorch_model.pt")
    if weights is None:
        file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(InputError, match=said):
        example("from_modelcenter").main(str(tmp_path), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["disturbed", "from_modelcenter", "replaced_tokens"])
def test_help_says_what_a_script_is_for(name: str) -> None:
    file = Path(__file__).parent.parent / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, str(file), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"python examples/{name}.py " in done.stdout


def test_disturbed_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every sentence stands beside one that differs from it, by a word or two, and pairs that are given as they are."""
    good = [f"The {a} has never seen the {b} that it wanted to find." for a in ("dog", "man", "girl") for b in ("house", "river")]
    (tmp_path / "text.txt").write_text(" ".join(good) + "\n\nToo short.\nno sentence of any kind at all\n" + good[0])
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"sentence_good": "He left.", "sentence_bad": "Him left."}))
    module, out = example("disturbed"), str(tmp_path / "rows.jsonl")
    assert module.main(out, str(tmp_path / "text.txt"), str(tmp_path / "pairs.jsonl")) == 0
    rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert "14 rows" in capsys.readouterr().out and sum(row["label"] for row in rows) == 7
    assert {row["text"] for row in rows if row["label"]} == {*good, "He left."}
    bad = {row["text"] for row in rows if not row["label"]}
    assert "Him left." in bad and not bad & {" ".join(module.WORD.findall(text)).lower() for text in good}
    assert module.main(out, str(tmp_path / "text.txt"), str(tmp_path / "pairs.jsonl")) == 0  # the same faults again
    assert rows == [json.loads(line) for line in Path(out).read_text().splitlines()]
    (tmp_path / "judged.jsonl").write_text('{"text": "him left"}\n' + json.dumps({"text": good[1]}))
    judged = ["--without", str(tmp_path / "judged.jsonl")]
    assert module.main(out, str(tmp_path / "text.txt"), str(tmp_path / "pairs.jsonl"), *judged) == 0
    assert "12 rows; 2 left out" in capsys.readouterr().out
    assert [row for row in rows if row["text"] not in ("Him left.", good[1])] == sorted(
        (json.loads(line) for line in Path(out).read_text().splitlines()), key=rows.index)
    draw = module.random.Random(1)
    many = [module.disturbed(good[0], draw) for _ in range(300)]
    words = [word.lower() for word in module.WORD.findall(good[0])]
    assert all(text and text.endswith(" .") and text.split() != words for text in many)
    assert all(abs(len(text.split()) - len(words)) <= 6 for text in many) and len(set(many)) > 60
    for fault in ("the dog have never", "the dog has ever", "to finding", "never has seen", "dog has never seen"):
        assert any(fault in text for text in many), fault
    assert module.disturbed("Yes.", draw) is None
