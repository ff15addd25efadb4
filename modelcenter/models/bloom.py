"""BLOOM: a causal decoder that encodes positions with ALiBi and normalises its embeddings. BigScience Workshop, 2022.

Queries, keys and values are one matrix whose rows are interleaved head by head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .. import ops
from ..checkpoint.config import Config, Table
from ..errors import refuse
from ..layers import FFN, ALiBi, Attention, Batch, Embedding, EmbedHead, LayerNorm, PreNorm, Stack, last_token
from ..layers.head import ClassifyHead, LMHead, SpanHead, TagHead
from ..model import Model, Preset, Task, register
from ..names import PerHead, Row


@dataclass(frozen=True, kw_only=True)
class BLOOMConfig(Config):
    vocab: int = 250880
    dim: int = 1024
    heads: int = 8  # what transformers takes a file without the key to say, whose tensors do not tell; no preset has so few
    layers: int = 24
    eps: float = 1e-5
    dropout: float = 0.0
    attn_dropout: float = 0.0
    head_dropout: float | None = None  # dropout
    tie: bool = True

    hf = Table(
        "bloom",
        {
            "vocab_size": "vocab", "hidden_size|n_embed": "dim", "n_head|num_attention_heads": "heads",
            "n_layer|num_hidden_layers": "layers", "layer_norm_epsilon": "eps", "hidden_dropout": "dropout",
            "attention_dropout": "attn_dropout", "classifier_dropout": "head_dropout", "tie_word_embeddings": "tie",
        },
        fixed={"apply_residual_connection_post_layernorm": False},
        refused={"is_causal": (False,)},
    )  # fmt: skip

    def verify(self) -> None:
        self.divisible("dim", "heads")
        if self.file.get("slow_but_exact") and self.file.get("pretraining_tp") not in (None, 1):
            refuse(None, "slow_but_exact", "True", "False: with pretraining_tp above 1 transformers leaves biases out")
        self.agreed("dim", "heads", "layers")


@register
class BLOOM(Model):
    Config = BLOOMConfig
    default_task = "lm"

    def __init__(self, c: BLOOMConfig):
        super().__init__(c)
        norm = partial(LayerNorm, c.dim, c.eps)

        def block() -> PreNorm:
            attn = Attention(c.dim, c.heads, dropout=c.attn_dropout)
            return PreNorm(norm, attn, FFN(c.dim, 4 * c.dim, ops.gelu_cut), dropout=c.dropout)

        self.embed = Embedding(c.vocab, c.dim, norm=norm())
        self.alibi = ALiBi(c.heads)
        self.decoder = Stack((block() for _ in range(c.layers)), norm=norm())

    def body(self, batch: Batch) -> Tensor:
        x = self.embed(batch.x)
        view = batch.view(causal=True, bias=self.alibi(*batch.span, like=x, real=batch.mask))
        out: Tensor = self.decoder(x, view, wanted=batch.wanted)
        return out

    presets = {
        "bloom-560m": Preset("bigscience/bloom-560m", 559_214_592, {"heads": 16}),
        "bloom-1b1": Preset("bigscience/bloom-1b1", 1_065_314_304, {"dim": 1536, "heads": 16}),
        "bloom-1b7": Preset("bigscience/bloom-1b7", 1_722_408_960, {"dim": 2048, "heads": 16}),
        "bloom-3b": Preset("bigscience/bloom-3b", 3_002_557_440, {"dim": 2560, "heads": 32, "layers": 30}),
        "bloom-7b1": Preset("bigscience/bloom-7b1", 7_069_016_064, {"dim": 4096, "heads": 32, "layers": 30}),
        "bloom-176b": Preset("bigscience/bloom", 176_247_271_424, {"dim": 14336, "heads": 112, "layers": 70}),
    }  # fmt: skip

    tasks = {
        "lm": Task("BloomForCausalLM", lambda c: LMHead(c.dim, c.vocab, shift=True), (("lm_head", "head.out"),)),
        "classify": Task(
            "BloomForSequenceClassification",
            lambda c: ClassifyHead(c.dim, len(c.labels), last_token, bias=False),
            (("score", "head.out"),),
        ),
        "tag": Task(
            "BloomForTokenClassification",
            lambda c: TagHead(c.dim, len(c.labels), dropout=c.dropout if c.head_dropout is None else c.head_dropout),
            (("classifier", "head.out"),),
        ),
        "qa": Task("BloomForQuestionAnswering", lambda c: SpanHead(c.dim), (("qa_outputs", "head.out"),)),
        "backbone": Task("BloomModel"),
        "embed": Task("BloomModel", lambda c: EmbedHead(last_token)),
    }

    prefix = "transformer."
    aliases = {"lm_head.weight": "transformer.word_embeddings.weight"}

    @staticmethod
    def names(c: BLOOMConfig) -> Iterator[Row]:
        block, ours = "transformer.h.{}.", "decoder.blocks.{}."
        yield "transformer.word_embeddings", "embed.tokens"
        yield "transformer.word_embeddings_layernorm", "embed.norm"
        yield "transformer.ln_f", "decoder.norm"
        yield block + "input_layernorm", ours + "attn_norm"
        yield block + "self_attention.query_key_value", tuple(f"{ours}attn.{p}" for p in "qkv"), PerHead(c.heads)
        yield block + "self_attention.dense", ours + "attn.o"
        yield block + "post_attention_layernorm", ours + "ffn_norm"
        yield block + "mlp.dense_h_to_4h", ours + "ffn.up"
        yield block + "mlp.dense_4h_to_h", ours + "ffn.down"
