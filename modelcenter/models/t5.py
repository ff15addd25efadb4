"""T5: an encoder-decoder with relative position biases and unscaled attention. Raffel et al., 2019.

v1.1 and FLAN (Shazeer, 2020; Chung et al., 2022) gate the feed-forward layer and do not tie the head to the embedding. With the
published weights the feed-forward layer overflows in fp16: use bf16 or fp32."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .. import ops
from ..checkpoint.config import Config, Key, Table, choice, token
from ..layers import FFN, Attention, Batch, Dropout, Embedding, EmbedHead, GatedFFN, LMHead, PreNorm, RelativeBias, RMSNorm, Stack
from ..layers.pick import mean_token
from ..model import Model, Preset, Task, register
from ..names import Row, Shape
from ..ops import Op

ACTS = {"relu": ops.relu, "gated-gelu": ops.geglu_tanh, "gated-silu": ops.swiglu}
SCALE, TIE = "scale_decoder_outputs", "tie_word_embeddings"  # a null does not scale; before transformers 5 the other said it
WIDE, GATED = dict(dim=1024, head_dim=128, layers=24), dict(act=ops.geglu_tanh, scale=False, tie=False)
V1_1 = {  # FLAN has the same sizes
    "small": (76_961_152, dict(hidden=1024, heads=6, layers=8)),
    "base": (247_577_856, dict(dim=768, hidden=2048, heads=12, layers=12)),
    "large": (783_150_080, dict(dim=1024, hidden=2816, heads=16, layers=24)),
    "xl": (2_849_757_184, dict(dim=2048, hidden=5120, heads=32, layers=24)),
    "xxl": (11_135_332_352, dict(dim=4096, hidden=10240, heads=64, layers=24)),
}


@dataclass(frozen=True, kw_only=True)
class T5Config(Config):
    vocab: int = 32128
    dim: int = 512
    head_dim: int = 64
    hidden: int = 2048
    heads: int = 8
    layers: int = 6
    decoder_layers: int | None = None  # as many as the encoder
    buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6
    act: Op = ops.relu
    dropout: float = 0.1
    start: int = 0  # the token that the decoder reads first
    scale: bool = True  # the head reads its input over sqrt(dim)
    tie: bool = True

    hf = Table(
        "t5",
        {
            "vocab_size": "vocab", "d_model|hidden_size": "dim", "d_kv|head_dim": "head_dim", "d_ff": "hidden",
            "num_heads|num_attention_heads": "heads", "num_layers|num_hidden_layers": "layers", "layer_norm_epsilon": "eps",
            "num_decoder_layers": "decoder_layers", "relative_attention_num_buckets": "buckets", "dropout_rate": "dropout",
            "relative_attention_max_distance": "max_distance", **token("decoder_start_token_id", "start"),
            **choice("feed_forward_proj", "act", ACTS,  # `gated-gelu` has always meant the tanh one
                     dense_act_fn={"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"},
                     is_gated_act={"relu": False, "gated-gelu": True, "gated-silu": True}),
            SCALE: Key(
                "scale", lambda v, c: {True: True, False: False, None: SCALE not in c and c.get(TIE) is not False}[v],
                lambda v: {SCALE: v}, always=True),
            TIE: Key("tie", lambda v, c: True, lambda v: {TIE: v}, always=True),
        },
        fixed={"is_decoder": False},
        refused={"is_causal": (True, False)},  # of the encoder and of the decoder
    )  # fmt: skip

    def verify(self) -> None:
        self.agreed("dim", "head_dim", "heads", "layers")
        self.known("start", "vocab")


@register
class T5(Model):
    Config = T5Config
    default_task = "seq2seq"
    encoder_decoder = wide = True

    def __init__(self, c: T5Config):
        super().__init__(c)
        norm = partial(RMSNorm, c.dim, c.eps)
        attn = partial(Attention, c.dim, c.heads, head_dim=c.head_dim, bias=False, scale=1.0, dropout=c.dropout)
        ffn = partial(FFN if c.act is ops.relu else GatedFFN, c.dim, c.hidden, c.act, bias=False, dropout=c.dropout)
        block = partial(PreNorm, norm, dropout=c.dropout)
        bias = partial(RelativeBias, c.heads, c.buckets, c.max_distance)
        self.embed = Embedding(c.vocab, c.dim, dropout=c.dropout)
        self.encoder_bias = bias(bidirectional=True)
        self.encoder = Stack((block(attn(), ffn()) for _ in range(c.layers)), norm=norm())
        self.decoder_bias = bias(bidirectional=False)
        self.decoder = Stack((block(attn(), ffn(), cross=attn()) for _ in range(c.decoder_layers or c.layers)), norm=norm())
        self.dropout = Dropout(c.dropout)

    def body(self, batch: Batch) -> Tensor:
        memory = batch.decoder.memory if self.encoder_decoder else None
        if memory is None:
            memory = self.dropout(self.encoder(self.embed(batch.x), batch.view(bias=self.encoder_bias(*batch.span))))
        if not self.encoder_decoder:
            return memory
        target, memory = batch.decoder, batch.decoder.remember(memory)
        view = target.view(causal=True, bias=self.decoder_bias(*target.span))
        out: Tensor = self.dropout(self.decoder(self.embed(target.x, written=True), view, target.across(memory, batch)))
        return out

    presets = {
        "t5-small": Preset("google-t5/t5-small", 60_506_624),
        "t5-base": Preset("google-t5/t5-base", 222_903_552, dict(dim=768, hidden=3072, heads=12, layers=12)),
        "t5-large": Preset("google-t5/t5-large", 737_668_096, dict(dim=1024, hidden=4096, heads=16, layers=24)),
        "t5-3b": Preset("google-t5/t5-3b", 2_851_598_336, WIDE | dict(hidden=16384, heads=32)),
        "t5-11b": Preset("google-t5/t5-11b", 11_307_321_344, WIDE | dict(hidden=65536, heads=128)),
        **{
            f"{name}-{size}": Preset(f"google/{name}-{size}", count, {**sizes, **GATED})
            for name in ("t5-v1_1", "flan-t5") for size, (count, sizes) in V1_1.items()
        },
    }  # fmt: skip

    tasks = {
        "seq2seq": Task(
            "T5ForConditionalGeneration",
            lambda c: LMHead(c.dim, c.vocab, shift=False, scale=c.dim**-0.5 if c.scale else 1.0), (("lm_head", "head.out"),),
        ),
        "backbone": Task("T5Model"),
        "embed": Task("T5EncoderModel", lambda c: EmbedHead(mean_token), without=("decoder", "decoder_bias")),  # Ni et al., 2021
    }
    # a file without `shared` holds a copy of it, first an embedding: its head may be another matrix
    aliases = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight")
    ignored = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)  # in old files; never used

    def init_std(self, name: str, shape: Shape) -> float:
        # as the authors': what attention does not scale, its queries do
        c, factor = self.config, float(self.config.get("initializer_factor", 1.0))
        fan = 1 if name == "embed.tokens.weight" else c.dim if name.endswith("table.weight") else shape[-1]
        return float(factor * (fan * c.head_dim if name.endswith(".q.weight") else fan) ** -0.5)

    @staticmethod
    def names(c: T5Config) -> Iterator[Row]:
        yield "shared", "embed.tokens"
        ffn = {"wi": "up", "wo": "down"} if c.act is ops.relu else {"wi_0": "gate", "wi_1": "up", "wo": "down"}
        layers = (("SelfAttention", "attn"), ("EncDecAttention", "cross"), ("DenseReluDense", "ffn"))
        for stack, parts in (("encoder", layers[::2]), ("decoder", layers)):
            yield f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{stack}_bias.table"
            yield f"{stack}.final_layer_norm", f"{stack}.norm"
            for i, (theirs, ours) in enumerate(parts):
                yield f"{stack}.block.{{}}.layer.{i}.layer_norm", f"{stack}.blocks.{{}}.{ours}_norm"
                for their, our in ffn.items() if ours == "ffn" else zip("qkvo", "qkvo", strict=True):
                    yield f"{stack}.block.{{}}.layer.{i}.{theirs}.{their}", f"{stack}.blocks.{{}}.{ours}.{our}"
