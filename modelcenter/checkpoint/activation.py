"""The activations in config.json, by transformers' names. If an activation has several names, the first is written."""

from .. import ops
from ..ops import Op

ACTS: dict[str, Op] = {
    "gelu_new": ops.gelu_tanh, "gelu_pytorch_tanh": ops.gelu_tanh, "gelu_fast": ops.gelu_tanh,  # as Megatron's are converted
    "gelu": ops.gelu, "gelu_python": ops.gelu, "relu": ops.relu, "silu": ops.silu, "swish": ops.silu,
}  # fmt: skip
