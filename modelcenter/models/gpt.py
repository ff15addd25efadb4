"""GPT-2: a causal decoder with learned positions and pre-norm blocks. Radford et al., 2019.

Cerebras-GPT (Dey et al., 2023) has the same layout in other sizes; its 13B is `gpt2-13b`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .. import ops
from ..checkpoint.activation import ACTS
from ..checkpoint.config import Config, Table, choice
from ..layers import FFN, Attention, Batch, Embedding, EmbedHead, LayerNorm, PreNorm, Stack, last_token
from ..layers.embedding import named
from ..layers.head import ClassifyHead, LMHead, SpanHead, TagHead
from ..model import Model, Preset, Task, register
from ..names import Row, Shape, T
from ..ops import Op


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Config):
    vocab: int = 50257
    positions: int = 1024
    dim: int = 768
    hidden: int | None = None  # 4 x dim
    heads: int = 12
    layers: int = 12
    eps: float = 1e-5
    act: Op = ops.gelu_tanh
    scale_by_head: bool = True  # scores over sqrt(head_dim)
    scale_by_layer: bool = False  # and over the layer's number, from 1
    dropout: float = 0.1
    embed_dropout: float = 0.1
    attn_dropout: float = 0.1
    head_dropout: float = 0.1
    tie: bool = True

    hf = Table(
        "gpt2",
        {
            "vocab_size": "vocab", "n_positions|max_position_embeddings": "positions", "n_embd|hidden_size": "dim",
            "n_inner": "hidden", "n_head|num_attention_heads": "heads", "n_layer|num_hidden_layers": "layers",
            "layer_norm_epsilon": "eps", **choice("activation_function", "act", ACTS),
            "scale_attn_weights": "scale_by_head", "scale_attn_by_inverse_layer_idx": "scale_by_layer",
            "resid_pdrop": "dropout", "embd_pdrop": "embed_dropout", "attn_pdrop": "attn_dropout",
            "classifier_dropout|hidden_dropout": "head_dropout", "tie_word_embeddings": "tie",
        },
        fixed={"add_cross_attention": False},
        refused={"is_causal": (False,)},
    )  # fmt: skip

    def verify(self) -> None:
        self.divisible("dim", "heads")
        self.agreed("positions", "dim", "heads", "layers")


@register
class GPT(Model):
    Config = GPTConfig
    default_task = "lm"

    def __init__(self, c: GPTConfig):
        super().__init__(c)
        norm = partial(LayerNorm, c.dim, c.eps)

        def block(i: int) -> PreNorm:
            scale = ((c.dim // c.heads) ** -0.5 if c.scale_by_head else 1.0) / (i + 1 if c.scale_by_layer else 1)
            attn = Attention(c.dim, c.heads, scale=scale, dropout=c.attn_dropout)
            return PreNorm(norm, attn, FFN(c.dim, c.hidden or 4 * c.dim, c.act), dropout=c.dropout)

        self.embed = Embedding(c.vocab, c.dim, positions=c.positions, dropout=c.embed_dropout)
        self.decoder = Stack((block(i) for i in range(c.layers)), norm=norm())

    def body(self, batch: Batch) -> Tensor:
        x = batch.x
        if batch.segments is not None:
            x = (self.embed.tokens(x) if x.dim() == 2 else x) + named("token_type_ids", self.embed.tokens, batch.segments)
        out: Tensor = self.decoder(self.embed(x, batch.at), batch.view(causal=True), wanted=batch.wanted)
        return out

    presets = {
        "gpt2": Preset("openai-community/gpt2", 124_439_808),
        "gpt2-medium": Preset("openai-community/gpt2-medium", 354_823_168, dict(dim=1024, heads=16, layers=24)),
        "gpt2-large": Preset("openai-community/gpt2-large", 774_030_080, dict(dim=1280, heads=20, layers=36)),
        "gpt2-xl": Preset("openai-community/gpt2-xl", 1_557_611_200, dict(dim=1600, heads=25, layers=48)),
        "gpt2-13b": Preset(
            "cerebras/Cerebras-GPT-13B", 12_853_386_240,
            dict(positions=2048, dim=5120, hidden=20480, heads=40, layers=40, act=ops.gelu),
        ),
        "gpt2-13b-bmtrain": Preset(None, 12_853_386_240, dict(positions=2048, dim=5120, heads=128, layers=40)),
    }  # fmt: skip

    tasks = {
        "lm": Task("GPT2LMHeadModel", lambda c: LMHead(c.dim, c.vocab, shift=True), (("lm_head", "head.out"),)),
        "classify": Task(
            "GPT2ForSequenceClassification",
            lambda c: ClassifyHead(c.dim, len(c.labels), last_token, bias=False),
            (("score", "head.out"),),
        ),
        "tag": Task(
            "GPT2ForTokenClassification",
            lambda c: TagHead(c.dim, len(c.labels), dropout=c.head_dropout),
            (("classifier", "head.out"),),
        ),
        "qa": Task("GPT2ForQuestionAnswering", lambda c: SpanHead(c.dim), (("qa_outputs", "head.out"),)),
        "backbone": Task("GPT2Model"),
        "embed": Task("GPT2Model", lambda c: EmbedHead(last_token)),
    }

    prefix = "transformer."
    aliases = {"lm_head.weight": "transformer.wte.weight"}
    ignored = ("*h.*.attn.bias", "*h.*.attn.masked_bias", "multiple_choice_head.*")

    def init_std(self, name: str, shape: Shape) -> float:
        # what writes into the residual stream is scaled by 1 / sqrt(number of residual layers): section 2.3
        residual = name.endswith(("attn.o.weight", "ffn.down.weight"))
        return super().init_std(name, shape) / ((2 * self.config.layers) ** 0.5 if residual else 1)

    @staticmethod
    def names(c: GPTConfig) -> Iterator[Row]:
        yield "transformer.wte", "embed.tokens"
        yield "transformer.wpe", "embed.positions"
        yield "transformer.ln_f", "decoder.norm"
        yield "transformer.h.{}.ln_1", "decoder.blocks.{}.attn_norm"
        yield "transformer.h.{}.attn.c_attn", tuple(f"decoder.blocks.{{}}.attn.{p}" for p in "qkv"), T
        yield "transformer.h.{}.attn.c_proj", "decoder.blocks.{}.attn.o", T
        yield "transformer.h.{}.ln_2", "decoder.blocks.{}.ffn_norm"
        yield "transformer.h.{}.mlp.c_fc", "decoder.blocks.{}.ffn.up", T
        yield "transformer.h.{}.mlp.c_proj", "decoder.blocks.{}.ffn.down", T
