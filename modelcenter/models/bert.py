"""BERT: a bidirectional encoder with learned positions and segments, post-norm blocks and a norm on the embeddings.
Devlin et al., 2018.

The masked-word head is a dense layer, the activation, a norm and the embedding's own table, with a bias of its own. The pooler
(tanh of a projection of the first token) belongs to the tasks that use it: classify, and the backbone as transformers saves it.
MiniLM (Wang et al., 2020) and the sentence encoders made of it are the same layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .. import ops
from ..checkpoint.config import Config, Table, choice
from ..layers import FFN, Attention, Batch, ClassifyHead, EmbedHead, Embedding, LayerNorm, LMHead, PoolHead, PostNorm
from ..layers import SpanHead, Stack, TagHead, Transform, first_token
from ..names import Row
from ..ops import Op
from ..registry import Model, Preset, Task, register

TANH = {"gelu_new": ops.gelu_tanh, "gelu_pytorch_tanh": ops.gelu_tanh}
ACTIVATIONS = {"gelu": ops.gelu, **TANH, "relu": ops.relu, "silu": ops.silu}


@dataclass(frozen=True, kw_only=True)
class BERTConfig(Config):
    vocab: int = 30522
    positions: int = 512
    segments: int = 2
    dim: int = 768
    hidden: int = 3072
    heads: int = 12
    layers: int = 12
    eps: float = 1e-12
    act: Op = ops.gelu
    dropout: float = 0.1
    attn_dropout: float = 0.1
    head_dropout: float | None = None  # of classify and tag; None: as dropout

    hf = Table(
        "bert",
        {
            "vocab_size": "vocab", "max_position_embeddings": "positions", "type_vocab_size": "segments",
            "hidden_size": "dim", "intermediate_size": "hidden", "num_attention_heads": "heads", "num_hidden_layers": "layers",
            "layer_norm_eps": "eps", **choice("hidden_act", "act", ACTIVATIONS), "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attn_dropout", "classifier_dropout": "head_dropout",
        },
        fixed={
            "is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
        },
    )  # fmt: skip


def head_dropout(c: BERTConfig) -> float:
    return c.dropout if c.head_dropout is None else c.head_dropout


@register
class BERT(Model):
    Config = BERTConfig

    def __init__(self, c: BERTConfig):
        super().__init__(c)
        norm = partial(LayerNorm, c.dim, c.eps)

        def block() -> PostNorm:
            attn = Attention(c.dim, c.heads, dropout=c.attn_dropout)
            return PostNorm(norm, attn, FFN(c.dim, c.hidden, c.act), dropout=c.dropout)

        self.embed = Embedding(
            c.vocab, c.dim, positions=c.positions, segments=c.segments, norm=norm(), dropout=c.dropout,
            pad=c.get("pad_token_id", 0),
        )  # fmt: skip
        self.encoder = Stack(block() for _ in range(c.layers))

    def body(self, batch: Batch) -> Tensor:
        segments = torch.zeros_like(batch.at) if batch.segments is None else batch.segments
        out: Tensor = self.encoder(self.embed(batch.x, batch.at, segments), batch.view())
        return out

    # parameters of the masked-word model: the pooler, which it does not use, is not counted
    presets = {
        "bert-base-uncased": Preset("google-bert/bert-base-uncased", 109_514_298),
        "bert-base-cased": Preset("google-bert/bert-base-cased", 108_340_804, dict(vocab=28996)),
        "bert-large-uncased": Preset(
            "google-bert/bert-large-uncased", 335_174_458, dict(dim=1024, hidden=4096, heads=16, layers=24)
        ),
        "bert-large-cased": Preset(
            "google-bert/bert-large-cased", 333_610_308, dict(vocab=28996, dim=1024, hidden=4096, heads=16, layers=24)
        ),
        "bert-base-chinese": Preset("google-bert/bert-base-chinese", 102_290_312, dict(vocab=21128)),
        "bert-base-multilingual-cased": Preset("google-bert/bert-base-multilingual-cased", 177_974_523, dict(vocab=119547)),
        "all-minilm-l6-v2": Preset(
            "sentence-transformers/all-MiniLM-L6-v2", 22_713_216, dict(dim=384, hidden=1536, layers=6), task="embed"
        ),
    }  # fmt: skip

    tasks = {
        "mlm": Task(
            "BertForMaskedLM",
            lambda c: LMHead(c.dim, c.vocab, shift=False, bias=True, transform=Transform(c.dim, c.act, LayerNorm(c.dim, c.eps))),
            (
                ("cls.predictions.transform.dense", "head.transform.dense"),
                ("cls.predictions.transform.LayerNorm", "head.transform.norm"),
                ("cls.predictions.bias", "head.out.bias"),
            ),
        ),
        "classify": Task(
            "BertForSequenceClassification",
            lambda c: ClassifyHead(c.dim, len(c.labels), first_token, pooler=True, dropout=head_dropout(c)),
            (("bert.pooler.dense", "head.pooler"), ("classifier", "head.out")),
        ),
        "tag": Task(
            "BertForTokenClassification",
            lambda c: TagHead(c.dim, len(c.labels), dropout=head_dropout(c)),
            (("classifier", "head.out"),),
        ),
        "qa": Task("BertForQuestionAnswering", lambda c: SpanHead(c.dim), (("qa_outputs", "head.out"),)),
        "backbone": Task("BertModel", lambda c: PoolHead(c.dim), (("bert.pooler.dense", "head.pooler"),)),
        "embed": Task("BertModel", lambda c: EmbedHead(nn.Linear(c.dim, c.dim)), (("bert.pooler.dense", "head.pooler"),)),
    }

    prefix = "bert."
    aliases = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    ignored = ("*embeddings.position_ids", "cls.seq_relationship.*")

    @staticmethod
    def tied(c: BERTConfig) -> Mapping[str, str]:
        return {"head.out.weight": "embed.tokens.weight"}

    @staticmethod
    def names(c: BERTConfig) -> Iterator[Row]:
        yield "bert.embeddings.word_embeddings", "embed.tokens"
        yield "bert.embeddings.position_embeddings", "embed.positions"
        yield "bert.embeddings.token_type_embeddings", "embed.segments"
        yield "bert.embeddings.LayerNorm", "embed.norm"
        for theirs, ours in (
            ("attention.self.query", "attn.q"), ("attention.self.key", "attn.k"), ("attention.self.value", "attn.v"),
            ("attention.output.dense", "attn.o"), ("attention.output.LayerNorm", "attn_norm"),
            ("intermediate.dense", "ffn.up"), ("output.dense", "ffn.down"), ("output.LayerNorm", "ffn_norm"),
        ):  # fmt: skip
            yield f"bert.encoder.layer.{{}}.{theirs}", f"encoder.blocks.{{}}.{ours}"
