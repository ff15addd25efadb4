"""What the kernels mean: one file an op."""

from ._op import OPS, Op, op, wide
from .activation import geglu, geglu_tanh, gelu, gelu_cut, gelu_tanh, reglu, relu, silu, swiglu
from .cross_entropy import cross_entropy
from .dropout import draw, dropout
from .layer_norm import add_layer_norm, layer_norm
from .rms_norm import add_rms_norm, rms_norm
from .rotary import rotary

__all__ = [
    "OPS", "Op", "add_layer_norm", "add_rms_norm", "cross_entropy", "draw", "dropout",
    "geglu", "geglu_tanh", "gelu", "gelu_cut", "gelu_tanh", "layer_norm", "op", "reglu",
    "relu", "rms_norm", "rotary", "silu", "swiglu", "wide",
]  # fmt: skip
