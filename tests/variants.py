"""What a family wants tried beyond its default form: field changes by name (`default` changes the default form itself), and
the generic tests it is excused from, each with the reason that README repeats."""

from modelcenter import ops
from modelcenter.layers.rope import Dynamic, Linear, Llama3, LongRope, Plain, Yarn

VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "bert": {"default": {"act": ops.gelu_tanh}, "erf-gelu": {"act": ops.gelu}, "relu": {"act": ops.relu}},
    "bloom": {
        "default": {},
        "untied": {"tie": False},
        "six-heads": {"dim": 48, "heads": 6},  # no power of two: the last slopes lie between the others
    },
    "gpt2": {
        "default": {},
        "by-layer": {"scale_by_layer": True, "hidden": None},
        "unscaled": {"scale_by_head": False},
        "erf-gelu": {"act": ops.gelu},
        "untied": {"tie": False},
    },
    "llama": {
        "default": {"rope": Plain(theta=500.0), "attn_bias": True, "ffn_bias": True, "tie": True, "act": ops.geglu},
        "llama3": {"rope": Llama3(theta=90.0, factor=4.0, low=1.5, high=3.0, original=32), "tie": False},
        "yarn": {"rope": Yarn(theta=90.0, factor=4.0, original=16, beta_fast=5.0, beta_slow=1.5), "act": ops.swiglu},
        "linear": {"rope": Linear(factor=2.5), "act": ops.geglu_tanh},
        "dynamic": {"rope": Dynamic(factor=2.5, positions=64), "act": ops.reglu},
        "longrope": {"rope": LongRope(short=(1.0, 1.5, 2.0, 2.5, 3.0, 4.0), long=(9.0,) * 6, original=48, positions=64)},
    },
    "t5": {
        "default": {"start": 3, "layers": 3, "decoder_layers": 2},  # their cache is as deep as the encoder
        "gated-untied": {"act": ops.geglu_tanh, "scale": False, "tie": False},
        "gated-silu": {"act": ops.swiglu},
    },
    "mt5": {
        "default": {"start": 3, "layers": 3, "decoder_layers": 2, "tie": True},
        "relu-untied": {"act": ops.relu, "tie": False},
    },
}
EXCEPTIONS: dict[str, dict[str, str]] = {
    "cpmant": {
        "padding-right": "transformers reads its padding off id 0 and takes it to stand on the left",
        "losses": "transformers neither shifts the labels nor hides the future",
    },
}
