"""LLaMA: a causal decoder with rotary positions, RMS norms, a gated feed-forward and no biases. Touvron et al., 2023.

LLaMA 2 shares keys and values between heads in its largest size, LLaMA 3 in all sizes, and LLaMA 3.1 stretches its rotary
frequencies to 131072 positions (Llama team, 2024). Rotation covers whole heads, channel i together with i + head_dim / 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .. import ops
from ..checkpoint.config import Config, Table, choice
from ..checkpoint.rope import rope_keys, verify_rope
from ..layers import Attention, Batch, Embedding, EmbedHead, GatedFFN, PreNorm, RMSNorm, Rotary, Stack, last_token
from ..layers.head import ClassifyHead, LMHead, SpanHead, TagHead
from ..layers.rope import PLAIN, Llama3, Plain
from ..model import Model, Preset, Task, register
from ..names import Row
from ..ops import Op

GATES = {
    "silu": ops.swiglu, "swish": ops.swiglu, "gelu": ops.geglu, "gelu_pytorch_tanh": ops.geglu_tanh,
    "gelu_new": ops.geglu_tanh, "relu": ops.reglu,
}  # fmt: skip
B13 = {"dim": 5120, "hidden": 13824, "heads": 40, "layers": 40}
B30 = {"dim": 6656, "hidden": 17920, "heads": 52, "layers": 60}
B70 = {"dim": 8192, "hidden": 28672, "heads": 64, "kv_heads": 8, "layers": 80}
B65 = B70 | {"hidden": 22016, "kv_heads": None, "eps": 1e-5}
B405 = B70 | {"dim": 16384, "hidden": 53248, "heads": 128, "layers": 126}
TWO = {"positions": 4096, "eps": 1e-5}
THREE = {"vocab": 128256, "hidden": 14336, "kv_heads": 8, "positions": 8192, "eps": 1e-5, "rope": Plain(theta=5e5)}
LONG = THREE | {"positions": 131072, "rope": Llama3(theta=5e5)}
B1 = LONG | {"dim": 2048, "hidden": 8192, "layers": 16, "tie": True, "rope": Llama3(theta=5e5, factor=32.0)}
B3 = B1 | {"dim": 3072, "heads": 24, "layers": 28}
OUT, SPAN = (("score", "head.out"),), (("qa_outputs", "head.out"),)


@dataclass(frozen=True, kw_only=True)
class LLaMAConfig(Config):
    vocab: int = 32000
    positions: int = 2048
    dim: int = 4096
    hidden: int = 11008
    heads: int = 32
    kv_heads: int | None = None  # heads
    head_dim: int | None = None  # dim / heads
    layers: int = 32
    eps: float = 1e-6
    act: Op = ops.swiglu
    rope: Plain = PLAIN
    attn_bias: bool = False
    ffn_bias: bool = False
    attn_dropout: float = 0.0
    head_dropout: float = 0.1
    tie: bool = False

    hf = Table("llama", {
        "vocab_size": "vocab", "max_position_embeddings": "positions", "hidden_size": "dim",
        "intermediate_size": "hidden", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim", "num_hidden_layers": "layers", "rms_norm_eps": "eps",
        **choice("hidden_act", "act", GATES), **rope_keys("rope", positions=2048), "attention_bias": "attn_bias",
        "mlp_bias": "ffn_bias", "attention_dropout": "attn_dropout",
        "classifier_dropout|hidden_dropout": "head_dropout", "tie_word_embeddings": "tie",
    }, refused={"is_causal": (False,)})  # fmt: skip

    def verify(self) -> None:
        self.divisible("dim", "heads")
        self.divisible("heads", "kv_heads")
        verify_rope(self.rope, self.channels, self.positions, self.file)

    @property
    def channels(self) -> int:
        return self.head_dim or self.dim // self.heads


@register
class LLaMA(Model):
    Config = LLaMAConfig
    default_task = "lm"

    def __init__(self, c: LLaMAConfig):
        super().__init__(c)
        norm = partial(RMSNorm, c.dim, c.eps)
        attn = partial(Attention, head_dim=c.channels, kv_heads=c.kv_heads, bias=c.attn_bias, dropout=c.attn_dropout)
        ffn = partial(GatedFFN, c.dim, c.hidden, c.act, bias=c.ffn_bias)
        self.embed = Embedding(c.vocab, c.dim, pad=c.get("pad_token_id"))
        self.rotary = Rotary(c.channels, c.rope)
        self.decoder = Stack((PreNorm(norm, attn(c.dim, c.heads), ffn()) for _ in range(c.layers)), norm=norm())

    def body(self, batch: Batch) -> Tensor:
        angles = self.rotary(batch.at, self.embed.tokens.weight.dtype)
        out: Tensor = self.decoder(self.embed(batch.x), batch.view(causal=True, angles=angles), wanted=batch.wanted)
        return out

    presets = {
        "llama-7b": Preset("huggyllama/llama-7b", 6_738_415_616),
        "llama-13b": Preset("huggyllama/llama-13b", 13_015_864_320, B13),
        "llama-30b": Preset("huggyllama/llama-30b", 32_528_943_616, B30),
        "llama-65b": Preset("huggyllama/llama-65b", 65_285_660_672, B65),
        "llama-2-7b": Preset("meta-llama/Llama-2-7b-hf", 6_738_415_616, TWO),
        "llama-2-13b": Preset("meta-llama/Llama-2-13b-hf", 13_015_864_320, B13 | TWO),
        "llama-2-70b": Preset("meta-llama/Llama-2-70b-hf", 68_976_648_192, B70 | TWO),
        "llama-2-7b-chat": Preset("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616, TWO),
        "llama-2-13b-chat": Preset("meta-llama/Llama-2-13b-chat-hf", 13_015_864_320, B13 | TWO),
        "llama-2-70b-chat": Preset("meta-llama/Llama-2-70b-chat-hf", 68_976_648_192, B70 | TWO),
        "llama-3-8b": Preset("meta-llama/Meta-Llama-3-8B", 8_030_261_248, THREE),
        "llama-3-70b": Preset("meta-llama/Meta-Llama-3-70B", 70_553_706_496, THREE | B70),
        "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B", 8_030_261_248, LONG),
        "llama-3.1-70b": Preset("meta-llama/Llama-3.1-70B", 70_553_706_496, LONG | B70),
        "llama-3.1-405b": Preset("meta-llama/Llama-3.1-405B", 405_853_388_800, LONG | B405),
        "llama-3.2-1b": Preset("meta-llama/Llama-3.2-1B", 1_235_814_400, B1),
        "llama-3.2-3b": Preset("meta-llama/Llama-3.2-3B", 3_212_749_824, B3),
    }

    tasks = {
        "lm": Task("LlamaForCausalLM", lambda c: LMHead(c.dim, c.vocab, shift=True), (("lm_head", "head.out"),)),
        "classify": Task(
            "LlamaForSequenceClassification", lambda c: ClassifyHead(c.dim, c.num_labels, last_token, bias=False), OUT
        ),
        "tag": Task("LlamaForTokenClassification", lambda c: TagHead(c.dim, c.num_labels, dropout=c.head_dropout), OUT),
        "qa": Task("LlamaForQuestionAnswering", lambda c: SpanHead(c.dim), SPAN, prefix="transformer."),
        "backbone": Task("LlamaModel"),
        "embed": Task("LlamaModel", lambda c: EmbedHead(last_token)),
    }

    prefix = "model."
    aliases = {"lm_head.weight": "model.embed_tokens.weight"}
    ignored = ("*rotary_emb.inv_freq",)

    @staticmethod
    def names(c: LLaMAConfig) -> Iterator[Row]:
        yield "model.embed_tokens", "embed.tokens"
        yield "model.norm", "decoder.norm"
        layer, block = "model.layers.{}", "decoder.blocks.{}"
        yield f"{layer}.input_layernorm", f"{block}.attn_norm"
        yield f"{layer}.post_attention_layernorm", f"{block}.ffn_norm"
        for p in "qkvo":
            yield f"{layer}.self_attn.{p}_proj", f"{block}.attn.{p}"
        for part in ("gate", "up", "down"):
            yield f"{layer}.mlp.{part}_proj", f"{block}.ffn.{part}"


Llama = LLaMA
