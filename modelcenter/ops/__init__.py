"""The operations that have kernels: one file per op.

A result has the dtype that its op states (usually that of its first argument; a loss is fp32), under autocast too, which only
chooses the dtype of products: torch's own attention would round its inputs, and its norms would return fp32 on a GPU.
"""

from . import _flops
from ._op import OPS, Op, op, wide
from .activation import geglu, geglu_tanh, gelu, gelu_cut, gelu_tanh, reglu, relu, silu, swiglu
from .attention import attention
from .cross_entropy import cross_entropy
from .dropout import draw, dropout
from .embedding import embedding
from .layer_norm import add_layer_norm, layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .quantize import dequantize_int8, dequantize_nf4, linear_int8, linear_nf4, quantize_int8, quantize_nf4
from .relative_attention import relative_attention
from .rms_norm import add_rms_norm, rms_norm
from .rotary import rotary
from .vocab_parallel import split, vocab_parallel_cross_entropy

__all__ = [
    "OPS", "Op", "add_layer_norm", "add_rms_norm", "attention", "cross_entropy", "dequantize_int8",
    "dequantize_nf4", "draw", "dropout", "embedding", "geglu", "geglu_tanh", "gelu", "gelu_cut", "gelu_tanh",
    "layer_norm", "linear_cross_entropy", "linear_int8", "linear_nf4", "op", "quantize_int8", "quantize_nf4",
    "reglu", "relative_attention", "relu", "rms_norm", "rotary", "silu", "split", "swiglu", "vocab_parallel_cross_entropy", "wide",
]  # fmt: skip

_flops.tell_when_imported()
