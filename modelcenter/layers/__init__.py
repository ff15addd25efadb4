"""The parts from which every model is assembled."""

from .adapter import Adapted
from .attention import Attention
from .batch import Batch
from .block import Block, Parallel, PostNorm, PreNorm, Stack
from .cache import Cache
from .dropout import Dropout
from .embedding import Embedding
from .ffn import FFN, GatedFFN
from .head import ClassifyHead, Head, LMHead, PoolHead, SpanHead, TagHead, Transform
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .output import Output
from .pick import first_token, last_token, mean_token
from .position import ALiBi, Angles, RelativeBias, Rotary, SegmentBias
from .quantized import Int8Linear, NF4Linear, QuantizedLinear
from .sentence import EmbedHead
from .view import Packing, View

__all__ = [
    "FFN", "ALiBi", "Adapted", "Angles", "Attention", "Batch", "Block", "Cache", "ClassifyHead", "Dropout", "EmbedHead",
    "Embedding", "GatedFFN", "Head", "Int8Linear", "LMHead", "LayerNorm", "Linear", "NF4Linear", "Output", "Packing", "Parallel",
    "PoolHead", "PostNorm", "PreNorm", "QuantizedLinear", "RMSNorm", "RelativeBias", "Rotary", "SegmentBias", "SpanHead",
    "Stack", "TagHead", "Transform", "View", "first_token", "last_token", "mean_token",
]  # fmt: skip
