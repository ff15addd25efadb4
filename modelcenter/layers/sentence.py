"""The head for sentence embeddings, trained by comparing texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import refuse
from ..ops._mode import without_autocast
from ..ops.cross_entropy import IGNORE, ignored
from .batch import Batch
from .head import Head
from .linear import Linear
from .losses import mean, sequences
from .output import Output
from .pick import first_token, places

ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU, "Sigmoid": nn.Sigmoid}


class Dense(nn.Module):
    """sentence-transformers' layer after the pooling: act(linear(x)), from n dim to n out."""

    def __init__(self, dim: int, out: int, bias: bool, act: str):
        super().__init__()
        self.linear = Linear(dim, out, bias=bias)
        self.act = ACTIVATIONS[act]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x))
        return out


class EmbedHead(Head):
    """A sentence's vector, scaled to length one. `pick` takes it from the tokens' vectors: their mean (Reimers & Gurevych, 2019),
    the first, or, in a causal model, the last (Wang et al., 2023, "Improving text embeddings with large language models"). `dense`
    are the layers that it passes through before it is scaled, if the checkpoint has such layers, with the `files` that describe
    them and the `places` of their weights (checkpoint/sentence.py).

    A `pooler` with which the family's backbone is saved does not affect the vector; it is kept, and its output is returned as well.

    If the labels (n) are numbers, the rows are n texts followed by their n partners, and the labels are the cosines that the pairs
    should have (squared error). If the labels are positions, the first n rows are followed by the texts among which each one's
    partner must be found, by cosines times `scale`. These are the logits (n, rows - n). If `symmetric`, the partner must find the
    first text as well. There is one loss for each pair. Henderson et al., 2017.

    If a batch is divided among ranks, in training `gather` returns the rows (m ...) of all of them, this rank's first, so that each
    text must be found among those of all ranks.
    """

    scale = 20.0
    symmetric = False
    gather: Callable[[Tensor], Tensor] | None = None
    files: Mapping[str, bytes] = {}
    places: Sequence[str] = ()

    def __init__(self, pick: Callable[[Tensor, Batch], Tensor], pooler: nn.Linear | None = None):
        super().__init__()
        self.pick, self.pooler = pick, pooler
        self.dense: nn.Sequential | None = None

    def check(self, labels: Tensor, batch: Batch) -> None:
        n, rows = labels.numel(), sequences(batch)
        if labels.dim() != 1 or not n or rows < 2 * n or rows % n:
            wanted = "one for each pair: the rows are the first texts of all pairs, then the second ones"
            refuse(None, "labels", f"shape {list(labels.shape)} of {rows} texts", wanted)

    def prepared(self, batch: Batch) -> Batch:
        trains = self.training and batch.labels is not None and self.pooler is None  # which would read the first token
        return replace(batch, wanted=places(self.pick, batch)) if trains else batch

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        whole = batch.whole(x)
        vector = x[0] if whole is None else self.pick(whole, batch)
        if self.dense is not None:
            vector = self.dense(vector)
        out = Output(embeddings=nn.functional.normalize(vector, dim=-1), last_hidden_state=whole)
        if self.pooler is not None:
            out["pooler_output"] = torch.tanh(self.pooler(first_token(x, batch)))
        if batch.labels is not None:
            with without_autocast(x.device):  # 20 times a cosine in bf16 is off by a tenth
                e = out["embeddings"].to(torch.promote_types(x.dtype, torch.float32))
                loss, out["logits"] = self.judged(e, batch.labels)
            out = Output(loss=mean(loss, batch.labels, items), **out)
        return out

    def judged(self, e: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(summed loss, logits) of embeddings."""
        n = len(labels)
        if labels.is_floating_point():
            near, none = (e[:n] * e[n:]).sum(-1), labels == ignored(labels)
            return (near - labels.to(e.dtype).masked_fill(none, 0)).square().masked_fill(none, 0).sum(), near
        every = e.unflatten(0, (-1, n)).transpose(0, 1)  # n, texts of a row, dim
        if self.gather is not None and self.training:
            every = self.gather(every[labels != IGNORE])  # what only fills a share up is not to be found
        scores = e[:n] @ every[:, 1:].transpose(0, 1).flatten(0, 1).T * self.scale
        loss = ops.cross_entropy(scores, labels)
        if self.symmetric:
            loss = (loss + ops.cross_entropy(e[n : 2 * n] @ every[:, 0].T * self.scale, labels)) / 2
        return loss, scores
