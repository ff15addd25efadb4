"""A checkpoint of OpenBMB's ModelCenter as a Hugging Face folder, which this package and transformers open: GPT2, Bert, T5 (mT5 and
v1.1 too) and Llama.

    python examples/from_modelcenter.py FOLDER OUT

FOLDER holds what ModelCenter's from_pretrained reads, config.json and pytorch_model.pt, or what bmtrain.save of such a model wrote,
under that name. OUT answers as the model did there. Copy its tokenizer's files into OUT yourself.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import modelcenter as mc
from modelcenter.checkpoint.folder import read_bin
from modelcenter.checkpoint.strict_json import read_json
from modelcenter.errors import InputError, refuse

Weights = dict[str, Tensor]
WORDS = "input_embedding.weight"
ACTS = {"gelu": "gelu", "gelu_new": "gelu_new", "relu": "relu"}
GATED = {"relu": "relu", "gated_gelu_new": "gated-gelu", "gated_silu": "gated-silu", "gated_gelu": "gated-gelu"}
SILU = {"gated_silu": "silu"}
ATTENTION = {"project_q": "q", "project_k": "k", "project_v": "v", "attention_out": "o"}


def main(folder: str, out: str) -> None:
    """Write `out`, a folder that is new. `InputError`: what the model there computes has no form here, or the file lacks it; there
    is no `out` then."""
    file, source = Path(folder) / "config.json", Path(folder) / "pytorch_model.pt"
    c: dict[str, Any] = read_json(file)
    if not isinstance(c, dict):
        refuse(file, None, "no mapping", "the config of a model of ModelCenter")
    w = unwrapped(read_bin(source))
    family = next((f for key, f in FAMILIES.items() if key in w), None)
    if family is None:
        refuse(source, next(iter(w)), "no model that is known by its tensors", "GPT2, Bert, T5 or Llama of ModelCenter")
    for key, value in FIXED[family].items():
        if c.get(key) not in (None, value):
            refuse(file, key, json.dumps(c[key]), f"{json.dumps(value)}: this family computes nothing else here")
    if w.pop("cls_projection.weight", None) is not None:
        print("cls_projection is left out: name the labels and train it anew, modelcenter train classify")
        w.pop("cls_projection.bias", None)
    try:
        config, tensors = family(c, w)
    except KeyError as lost:
        refuse(source, str(lost.args[0]), "missing", "all tensors of the model")
    Path(out).mkdir(parents=True)
    half = {"torch_dtype": "float16"} if next(iter(tensors.values())).dtype == torch.float16 else {}
    try:
        (Path(out) / "config.json").write_text(json.dumps({**config, **half}, indent=2) + "\n", encoding="utf-8")
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, Path(out) / "model.safetensors", {"format": "pt"})
        print(f"{out}: {mc.load(out).load_report}")  # refuses a tensor that is missing or too many
    except BaseException:
        shutil.rmtree(out)
        raise


def unwrapped(w: Weights) -> Weights:
    """The tensors of the model alone, if it is part of another module."""
    before = next((name.removesuffix(WORDS) for name in w if name.endswith(f".{WORDS}")), "") if WORDS not in w else ""
    if rest := [name for name in w if not name.startswith(before)]:
        print(f"{', '.join(rest)}: left out, beside the model in {before.rstrip('.')}")
    return {name.removeprefix(before): value for name, value in w.items() if name not in rest}


def renamed(w: Weights, table: dict[str, str]) -> Weights:
    """`w` under other names: `table` maps a pattern of a whole name to what it becomes."""
    out: Weights = {}
    for name, value in w.items():
        found = next((m.expand(new) for old, new in table.items() if (m := re.fullmatch(old, name))), None)
        if found is None:
            refuse("pytorch_model.pt", name, "a tensor that this family has not", "GPT2, Bert, T5 or Llama of ModelCenter")
        out[found] = value
    return out


def gpt2(c: dict[str, Any], w: Weights) -> tuple[dict[str, Any], Weights]:
    many = layers(w, "encoder.layers")
    rows = {f"encoder.layers.{i}.self_att.self_attention": f"transformer.h.{i}.attn.c_attn" for i in range(many)}
    joined = {f"{ours}.{leaf}": torch.cat([w.pop(f"{theirs}.project_{p}.{leaf}") for p in "qkv"])
              for theirs, ours in rows.items() for leaf in ("weight", "bias")}  # fmt: skip
    found = joined | renamed(w, {
        r"input_embedding\.(.*)": r"transformer.wte.\1", r"position_embedding\.(.*)": r"transformer.wpe.\1",
        r"encoder\.output_layernorm\.(.*)": r"transformer.ln_f.\1", r"output_projection\.(.*)": r"lm_head.\1",
        r"encoder\.layers\.(\d+)\.self_att\.layernorm_before_attention\.(.*)": r"transformer.h.\1.ln_1.\2",
        r"encoder\.layers\.(\d+)\.self_att\.self_attention\.attention_out\.(.*)": r"transformer.h.\1.attn.c_proj.\2",
        r"encoder\.layers\.(\d+)\.ffn\.layernorm_before_ffn\.(.*)": r"transformer.h.\1.ln_2.\2",
        r"encoder\.layers\.(\d+)\.ffn\.ffn\.w_in\.w\.(.*)": r"transformer.h.\1.mlp.c_fc.\2",
        r"encoder\.layers\.(\d+)\.ffn\.ffn\.w_out\.(.*)": r"transformer.h.\1.mlp.c_proj.\2",
    })  # fmt: skip
    tensors = {k: v.mT if re.search(r"c_(attn|proj|fc)\.weight", k) else v for k, v in found.items()}
    vocab, dim = found["transformer.wte.weight"].shape
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": vocab, "n_embd": dim,
        "n_positions": len(found["transformer.wpe.weight"]), "n_head": c.get("num_heads", 16), "n_layer": many,
        "n_inner": len(found["transformer.h.0.mlp.c_fc.weight"]), "layer_norm_epsilon": c.get("norm_eps", 1e-5),
        "activation_function": act(c, "gelu", ACTS), "scale_attn_weights": c.get("attn_scale", True),
        "tie_word_embeddings": "lm_head.weight" not in found,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout(c)),
    }, tensors  # fmt: skip


def bert(c: dict[str, Any], w: Weights) -> tuple[dict[str, Any], Weights]:
    """Its blocks begin with the norm that ends the one before: the embeddings', then each block's."""
    many = layers(w, "encoder.layers")
    for leaf in ("weight", "bias"):
        norms = [w.pop(f"encoder.layers.{i}.self_att.layernorm_before_attention.{leaf}") for i in range(many)]
        norms.append(w.pop(f"encoder.output_layernorm.{leaf}"))
        w |= {f"norm.{i}.{leaf}": norm for i, norm in enumerate(norms)}
    w.pop("lm_head.decoder.weight", None)  # tied to the words
    attention = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "o": "attention.output.dense"}
    block = r"encoder\.layers\.(\d+)"
    tensors = renamed(w, {
        r"input_embedding\.(.*)": r"bert.embeddings.word_embeddings.\1",
        r"position_embedding\.(.*)": r"bert.embeddings.position_embeddings.\1",
        r"token_type_embedding\.(.*)": r"bert.embeddings.token_type_embeddings.\1",
        r"norm\.0\.(.*)": r"bert.embeddings.LayerNorm.\1",
        **{rf"norm\.{i + 1}\.(.*)": rf"bert.encoder.layer.{i}.output.LayerNorm.\1" for i in range(many)},
        **{rf"{block}\.self_att\.self_attention\.{theirs}\.(.*)": rf"bert.encoder.layer.\1.{attention[ours]}.\2"
           for theirs, ours in ATTENTION.items()},
        rf"{block}\.ffn\.layernorm_before_ffn\.(.*)": r"bert.encoder.layer.\1.attention.output.LayerNorm.\2",
        rf"{block}\.ffn\.ffn\.w_in\.w\.(.*)": r"bert.encoder.layer.\1.intermediate.dense.\2",
        rf"{block}\.ffn\.ffn\.w_out\.(.*)": r"bert.encoder.layer.\1.output.dense.\2",
        r"lm_head\.dense\.(.*)": r"cls.predictions.transform.dense.\1", r"pooler\.dense\.(.*)": r"bert.pooler.dense.\1",
        r"lm_head\.layer_norm\.(.*)": r"cls.predictions.transform.LayerNorm.\1", r"lm_head\.decoder\.bias": "cls.predictions.bias",
    })  # fmt: skip
    vocab, dim = tensors["bert.embeddings.word_embeddings.weight"].shape
    return {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": vocab, "hidden_size": dim,
        "max_position_embeddings": len(tensors["bert.embeddings.position_embeddings.weight"]), "num_hidden_layers": many,
        "type_vocab_size": len(tensors["bert.embeddings.token_type_embeddings.weight"]),
        "intermediate_size": len(tensors["bert.encoder.layer.0.intermediate.dense.weight"]),
        "num_attention_heads": c.get("num_heads", 12), "layer_norm_eps": c.get("norm_eps", 1e-12),
        "hidden_act": act(c, "gelu", ACTS), "hidden_dropout_prob": dropout(c),
        "attention_probs_dropout_prob": dropout(c),
    }, tensors  # fmt: skip


def t5(c: dict[str, Any], w: Weights) -> tuple[dict[str, Any], Weights]:
    """Its scores of tied words have no factor, or 100 / sqrt(width) with `scale`; here they have 1 / sqrt(width), so the rest of it
    goes into the last norm. Words and what is added to them stay a hundredth of the published sizes: norms take no notice."""
    if c.get("ffn_activate_fn") == "gated_gelu":
        print("gated_gelu: by tanh, as transformers' T5 has it; there by erf: activations differ by 5e-4 at most")
    table = {r"input_embedding\.(.*)": r"shared.\1", r"output_projection\.(.*)": r"lm_head.\1"}
    for stack, short in (("encoder", "enc"), ("decoder", "dec")):
        block, new = rf"{stack}\.layers\.(\d+)", rf"{stack}.block.\1.layer"
        last = 2 if stack == "decoder" else 1
        table |= {
            rf"{stack}\.output_layernorm\.weight": f"{stack}.final_layer_norm.weight",
            rf"position_bias_{short}\.relative_attention_bias":
                f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            rf"{block}\.self_att\.layernorm_before_attention\.(.*)": rf"{new}.0.layer_norm.\2",
            rf"{block}\.cross_att\.layernorm_before_attention\.(.*)": rf"{new}.1.layer_norm.\2",
            rf"{block}\.ffn\.layernorm_before_ffn\.(.*)": rf"{new}.{last}.layer_norm.\2",
            rf"{block}\.ffn\.ffn\.w_in\.w\.(.*)": rf"{new}.{last}.DenseReluDense.wi.\2",
            rf"{block}\.ffn\.ffn\.w_in\.w_(\d)\.(.*)": rf"{new}.{last}.DenseReluDense.wi_\2.\3",
            rf"{block}\.ffn\.ffn\.w_out\.(.*)": rf"{new}.{last}.DenseReluDense.wo.\2",
        }  # fmt: skip
        for k, (old, kind) in enumerate((("self_att", "SelfAttention"), ("cross_att", "EncDecAttention"))):
            table |= {rf"{block}\.{old}\.self_attention\.{theirs}\.(.*)": rf"{new}.{k}.{kind}.{ours}.\2"
                      for theirs, ours in ATTENTION.items()}  # fmt: skip
    tensors = renamed(w, table)
    vocab, dim = tensors["shared.weight"].shape
    if (tied := "lm_head.weight" not in tensors) or c.get("scale"):
        factor = 100 * (1 if tied else dim**-0.5) if c.get("scale") else dim**0.5
        tensors["decoder.final_layer_norm.weight"] = tensors["decoder.final_layer_norm.weight"] * factor
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    buckets, heads = tensors[name].shape
    return {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": vocab, "d_model": dim,
        "num_heads": heads, "d_kv": c.get("dim_head", 64),
        "d_ff": tensors["encoder.block.0.layer.1.DenseReluDense.wo.weight"].shape[1],
        "num_layers": layers(tensors, "encoder.block"), "num_decoder_layers": layers(tensors, "decoder.block"),
        "relative_attention_num_buckets": buckets, "relative_attention_max_distance": c.get("position_bias_max_distance", 128),
        "layer_norm_epsilon": c.get("norm_eps", 1e-6), "dropout_rate": dropout(c), "feed_forward_proj": act(c, "relu", GATED),
        "tie_word_embeddings": tied, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    }, tensors  # fmt: skip


def llama(c: dict[str, Any], w: Weights) -> tuple[dict[str, Any], Weights]:
    block, new = r"encoder\.layers\.(\d+)", r"model.layers.\1"
    w = {name: value for name, value in w.items() if not name.startswith("position_bias.")}  # rotary frequencies, made anew
    tensors = renamed(w, {
        r"input_embedding\.(.*)": r"model.embed_tokens.\1", r"encoder\.output_layernorm\.(.*)": r"model.norm.\1",
        r"output_projection\.(.*)": r"lm_head.\1",
        rf"{block}\.self_att\.layernorm_before_attention\.(.*)": rf"{new}.input_layernorm.\2",
        **{rf"{block}\.self_att\.self_attention\.{theirs}\.(.*)": rf"{new}.self_attn.{ours}_proj.\2"
           for theirs, ours in ATTENTION.items()},
        rf"{block}\.ffn\.layernorm_before_ffn\.(.*)": rf"{new}.post_attention_layernorm.\2",
        rf"{block}\.ffn\.ffn\.w_in\.w_0\.(.*)": rf"{new}.mlp.gate_proj.\2",
        rf"{block}\.ffn\.ffn\.w_in\.w_1\.(.*)": rf"{new}.mlp.up_proj.\2",
        rf"{block}\.ffn\.ffn\.w_out\.(.*)": rf"{new}.mlp.down_proj.\2",
    })  # fmt: skip
    vocab, dim = tensors["model.embed_tokens.weight"].shape
    head = c.get("dim_head", 128)
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": dim, "head_dim": head,
        "intermediate_size": len(tensors["model.layers.0.mlp.up_proj.weight"]),
        "num_hidden_layers": layers(tensors, "model.layers"),
        "num_attention_heads": c.get("num_heads", 32), "rms_norm_eps": c.get("norm_eps", 1e-6),
        "hidden_act": act(c, "gated_silu", SILU),
        "num_key_value_heads": len(tensors["model.layers.0.self_attn.k_proj.weight"]) // head,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }, tensors  # fmt: skip


def layers(w: Weights, before: str) -> int:
    """How many blocks have a tensor whose name begins with `before`."""
    return len({m[1] for name in w if (m := re.match(re.escape(before) + r"\.(\d+)\.", name))})


def act(c: dict[str, Any], usual: str, known: dict[str, str]) -> str:
    found = c.get("ffn_activate_fn", usual)
    if found not in known:
        refuse("config.json", "ffn_activate_fn", str(found), " or ".join(known))
    return known[found]


def dropout(c: dict[str, Any]) -> float:
    return float(c.get("dropout_p", 0.0))


FAMILIES: dict[str, Callable[[dict[str, Any], Weights], tuple[dict[str, Any], Weights]]] = {
    "position_bias_enc.relative_attention_bias": t5, "token_type_embedding.weight": bert, "position_embedding.weight": gpt2,
    "encoder.layers.0.ffn.ffn.w_in.w_0.weight": llama,
}  # fmt: skip
# what each computes in one way alone here, by the config there
PRE = {"length_scale": False, "post_layer_norm": False}
FIXED = {gpt2: PRE, bert: {"length_scale": False, "post_layer_norm": True, "attn_scale": True, "tied": True},
         t5: {**PRE, "attn_scale": False}, llama: {**PRE, "attn_scale": True}}  # fmt: skip

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        sys.exit()
    if len(sys.argv) != 3:
        sys.exit("usage: from_modelcenter.py FOLDER OUT")
    try:
        main(*sys.argv[1:])
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
