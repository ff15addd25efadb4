"""CPM-Ant: soft prompts before the text, distances within a segment and one bias for each pair of segments. OpenBMB, 2022.

Without labels tokens see one another in both directions, as in transformers' class. With labels, the tokens before the first label
are context that all tokens see, and the tokens after it see only earlier ones, as in the model's own training (OpenBMB/CPM-Live).
Id 0 is padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from .. import ops
from ..checkpoint.config import Config, Table
from ..errors import refuse
from ..layers import Attention, Batch, Embedding, EmbedHead, GatedFFN, LMHead, Packing, PreNorm, RMSNorm, SegmentBias, Stack
from ..layers.batch import context_of
from ..layers.pick import mean_token
from ..model import Model, Preset, Task, register
from ..names import Row, Shape

PROMPT, TEXT = 0, 2  # segments; the prompt used is the third of the table, as in transformers


@dataclass(frozen=True, kw_only=True)
class CPMAntConfig(Config):
    vocab: int = 30720
    dim: int = 4096
    head_dim: int = 128
    hidden: int = 10240
    heads: int = 32
    layers: int = 48
    buckets: int = 512
    max_distance: int = 2048
    segments: int = 32
    prompts: int = 32
    prompt_length: int = 32
    eps: float = 1e-6
    dropout: float = 0.0

    hf = Table(
        "cpmant",
        {
            "vocab_size": "vocab", "hidden_size": "dim", "dim_head": "head_dim", "dim_ff": "hidden",
            "num_attention_heads": "heads", "num_hidden_layers": "layers", "position_bias_num_buckets": "buckets",
            "position_bias_max_distance": "max_distance", "segment_types": "segments", "prompt_types": "prompts",
            "prompt_length": "prompt_length", "eps": "eps", "dropout_p": "dropout",
        },
    )  # fmt: skip

    def verify(self) -> None:
        for key, size in (("segment_types", self.segments), ("prompt_types", self.prompts)):
            if size <= TEXT:
                refuse(None, key, str(size), f"at least {TEXT + 1}: number {TEXT} is in use")


@register
class CPMAnt(Model):
    Config = CPMAntConfig
    default_task = "lm"
    prefixed = True

    def __init__(self, c: CPMAntConfig):
        super().__init__(c)
        norm = partial(RMSNorm, c.dim, c.eps)

        def block() -> PreNorm:
            attn = Attention(c.dim, c.heads, head_dim=c.head_dim, bias=False, dropout=c.dropout)
            return PreNorm(norm, attn, GatedFFN(c.dim, c.hidden, ops.geglu, dropout=c.dropout), dropout=c.dropout)

        self.embed = Embedding(c.vocab, c.dim, segments=c.segments)
        self.prompt = nn.Embedding(c.prompts * c.prompt_length, c.dim)
        self.bias = SegmentBias(c.heads, c.buckets, c.max_distance, segments=c.segments)
        self.decoder = Stack((block() for _ in range(c.layers)), norm=norm())

    def body(self, batch: Batch) -> Tensor:
        text = batch.x.ne(0) if batch.x.dim() == 2 else batch.x.new_ones(batch.x.shape[:2], dtype=torch.bool)
        x, prompt = self.embed(batch.x, segments=text * TEXT), self.prompts()
        labels = None if self.task == "embed" else batch.labels  # for a text's vector both directions are read
        n, packing = len(prompt), batch.packing
        bounds = (0, x.size(1)) if packing is None else packing.q.here
        if not batch.past:  # each sequence behind its own prompt
            before = prompt.to(x.dtype).expand(x.size(0), -1, -1)
            x = torch.cat([part for a, b in pairwise(bounds) for part in (before, x[:, a:b])], 1)
        mask = None
        if packing is None:
            real = text if batch.mask is None else batch.mask
            if batch.past and batch.mask is None:
                real = text.new_ones(text.size(0), batch.keys)
            mask = nn.functional.pad(real, (n, 0), value=True)
        else:
            ends = [end + n * i for i, end in enumerate(bounds)]
            packing = Packing.of(ends, ends, x.device)
        context = None if labels is None else context_of(labels, batch.packing) + n
        whole = replace(batch, x=x, mask=mask, packing=packing, context=context, prompt=n)
        bias = self.bias(*whole.span, prompt=n, pair=(PROMPT, TEXT))
        out: Tensor = self.decoder(x, whole.view(causal=labels is not None, bias=bias))
        if packing is None:
            return out[:, out.size(1) - batch.queries :]
        return torch.cat([out[:, a + n * (i + 1) : b + n * (i + 1)] for i, (a, b) in enumerate(pairwise(bounds))], 1)

    def prompts(self) -> Tensor:
        """The soft prompt (n dim)."""
        n = self.config.prompt_length
        at = torch.arange(2 * n, 3 * n, device=self.prompt.weight.device)
        out: Tensor = self.prompt(at) + self.embed.segments(torch.full_like(at, PROMPT))  # type: ignore[misc]  # they are there
        return out

    presets = {"cpm-ant-10b": Preset("openbmb/cpm-ant-10b", 9_517_453_312)}

    tasks = {
        "lm": Task("CpmAntForCausalLM", lambda c: LMHead(c.dim, c.vocab, shift=True), (("lm_head", "head.out"),)),
        "backbone": Task("CpmAntModel"),
        "embed": Task("CpmAntModel", lambda c: EmbedHead(mean_token)),
    }
    prefix = "cpmant."

    def init_std(self, name: str, shape: Shape) -> float:
        return float(self.config.get("init_std", 1.0)) if name == "bias.table.weight" else super().init_std(name, shape)

    @staticmethod
    def names(c: CPMAntConfig) -> Iterator[Row]:
        layer, block = "cpmant.encoder.layers.{}", "decoder.blocks.{}"
        yield "cpmant.input_embedding", ("embed.tokens", "prompt")
        yield "cpmant.segment_embedding", "embed.segments"
        yield "cpmant.position_bias.relative_attention_bias", "bias.table.weight"
        yield "cpmant.encoder.output_layernorm", "decoder.norm"
        yield f"{layer}.self_att.layernorm_before_attention", f"{block}.attn_norm"
        for p in "qkv":
            yield f"{layer}.self_att.self_attention.project_{p}", f"{block}.attn.{p}"
        yield f"{layer}.self_att.self_attention.attention_out", f"{block}.attn.o"
        yield f"{layer}.ffn.layernorm_before_ffn", f"{block}.ffn_norm"
        yield f"{layer}.ffn.ffn.w_in.w_0", f"{block}.ffn.gate"
        yield f"{layer}.ffn.ffn.w_in.w_1", f"{block}.ffn.up"
        yield f"{layer}.ffn.ffn.w_out", f"{block}.ffn.down"
