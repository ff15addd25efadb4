"""BERT: a bidirectional encoder with learned positions and segments, post-norm blocks and a norm on the embeddings.
Devlin et al., 2018.

The masked-word head is a dense layer, the activation, a norm and the embedding's own table, with a bias of its own. The
pooler (tanh of a projection of the first token) belongs to the tasks that use it: classify, and the backbone as
transformers saves it. MiniLM (Wang et al., 2020) and the sentence encoders built on it have the same layout.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import ops
from ..checkpoint.activation import ACTS
from ..checkpoint.config import Config, Table, choice
from ..layers import FFN, Attention, Batch, Embedding, EmbedHead, LayerNorm, Linear, PostNorm, Stack, first_token, mean_token
from ..layers.head import ClassifyHead, LMHead, PoolHead, SpanHead, TagHead, Transform
from ..model import Model, Preset, Task, register
from ..names import Row
from ..ops import Op

LARGE = {"dim": 1024, "hidden": 4096, "heads": 16, "layers": 24}


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
            "hidden_size": "dim", "intermediate_size": "hidden", "num_attention_heads": "heads",
            "num_hidden_layers": "layers", "layer_norm_eps": "eps", **choice("hidden_act", "act", ACTS),
            "hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attn_dropout",
            "classifier_dropout": "head_dropout",
        },
        fixed={"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True,
               "position_embedding_type": "absolute"},
        refused={"is_causal": (True,)},
    )  # fmt: skip

    def verify(self) -> None:
        self.divisible("dim", by="heads")


POOLER, LABELS = ("bert.pooler.dense", "head.pooler"), ("classifier", "head.out")


def rate(c: BERTConfig) -> float:
    return c.dropout if c.head_dropout is None else c.head_dropout


def mlm_head(c: BERTConfig) -> LMHead:
    return LMHead(c.dim, c.vocab, shift=False, bias=True, transform=Transform(c.dim, c.act, LayerNorm(c.dim, c.eps)))


@register
class BERT(Model):
    Config = BERTConfig

    def __init__(self, c: BERTConfig):
        super().__init__(c)
        norm = partial(LayerNorm, c.dim, c.eps)

        def block() -> PostNorm:
            attn = Attention(c.dim, c.heads, dropout=c.attn_dropout)
            return PostNorm(norm, attn, FFN(c.dim, c.hidden, c.act), dropout=c.dropout)

        pad = c.get("pad_token_id", 0)
        self.embed = Embedding(
            c.vocab, c.dim, positions=c.positions, segments=c.segments, norm=norm(), dropout=c.dropout, pad=pad
        )
        self.encoder = Stack(block() for _ in range(c.layers))

    def body(self, batch: Batch) -> Tensor:
        segments = torch.zeros_like(batch.at) if batch.segments is None else batch.segments
        h: Tensor = self.encoder(self.embed(batch.x, batch.at, segments), batch.view(), wanted=batch.wanted)
        return h

    # parameters of the masked-word model: the pooler, which it does not use, is not counted
    presets = {
        "bert-base-uncased": Preset("google-bert/bert-base-uncased", 109_514_298),
        "bert-base-cased": Preset("google-bert/bert-base-cased", 108_340_804, {"vocab": 28996}),
        "bert-large-uncased": Preset("google-bert/bert-large-uncased", 335_174_458, LARGE),
        "bert-large-cased": Preset("google-bert/bert-large-cased", 333_610_308, LARGE | {"vocab": 28996}),
        "bert-base-chinese": Preset("google-bert/bert-base-chinese", 102_290_312, {"vocab": 21128}),
        "bert-base-multilingual-cased": Preset(
            "google-bert/bert-base-multilingual-cased", 177_974_523, {"vocab": 119547}
        ),
        "all-minilm-l6-v2": Preset(  # the encoder with its pooler
            "sentence-transformers/all-MiniLM-L6-v2", 22_713_216, {"dim": 384, "hidden": 1536, "layers": 6}, "embed"
        ),
    }

    tasks = {
        "mlm": Task("BertForMaskedLM", mlm_head, (
            ("cls.predictions.transform.dense", "head.transform.dense"),
            ("cls.predictions.transform.LayerNorm", "head.transform.norm"),
            ("cls.predictions.bias", "head.out.bias"),
        )),
        "classify": Task(
            "BertForSequenceClassification",
            lambda c: ClassifyHead(c.dim, c.num_labels, first_token, pooler=True, dropout=rate(c)),
            (POOLER, LABELS),
        ),
        "tag": Task("BertForTokenClassification", lambda c: TagHead(c.dim, c.num_labels, dropout=rate(c)), (LABELS,)),
        "qa": Task("BertForQuestionAnswering", lambda c: SpanHead(c.dim), (("qa_outputs", "head.out"),)),
        "backbone": Task("BertModel", lambda c: PoolHead(c.dim), (POOLER,)),
        "embed": Task("BertModel", lambda c: EmbedHead(mean_token, Linear(c.dim, c.dim)), (POOLER,)),
    }  # fmt: skip

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
