"""Task heads: from hidden states to predictions, each with its loss.

A head takes hidden states (b s dim), the batch, and `items`, the number of targets that the loss is divided by (None: the number in
this batch, so that the loss is a mean). It returns an `Output`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import refuse
from ..ops._mode import transformed
from ..ops.cross_entropy import IGNORE
from ..ops.linear_cross_entropy import chunked
from .batch import Batch
from .dropout import Dropout
from .linear import Linear, alone
from .losses import classes, drift_loss, label_loss, mean, place_loss, sequences, value_loss
from .output import Output
from .pick import first_token, places


class Head(nn.Module):
    """No head: the output is the backbone's own. Subclasses add theirs. `smoothing` of labels is set on the head and used in
    training only. `by_token`: there is a label for each token."""

    smoothing = 0.0
    by_token = False

    @property
    def smooth(self) -> float:
        """The smoothing to use now: none outside training."""
        return self.smoothing if self.training else 0.0

    def labelled_of(self, labels: Tensor) -> Tensor | None:
        """The indices that `prepared` would otherwise look for on the device in training, computed from labels on the host and
        padded with indices of ignored labels to a recurring length; None if the head needs none. The prefetch thread calls this, so
        it does not matter whether the head is in training mode at that moment."""
        return None

    def prepared(self, batch: Batch) -> Batch:
        """`batch` with what the head needs from the device, requested before the body keeps the device busy. In training with
        labels it also holds the positions that are `wanted`, if the head reads no others, so that the last block computes only
        these."""
        return batch

    def check(self, labels: Tensor, batch: Batch) -> None:
        """Refuse labels that the loss cannot use: of a wrong shape, or numbers where it wants classes."""

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        return Output(last_hidden_state=x)


class LMHead(Head):
    """Scores over the vocabulary: out(transform(x) * scale). `shift`: position i predicts token i + 1.

    In training with labels the logits of all tokens are never materialised (ops.linear_cross_entropy). The factor `z` of the z-loss
    is set on the head and used in training only, as `smoothing` is.
    """

    tp = {"out": "logits"}
    by_token = True
    z = 0.0

    def __init__(
        self,
        dim: int,
        vocab: int,
        *,
        shift: bool,
        bias: bool = False,
        scale: float = 1.0,
        transform: nn.Module | None = None,
    ):
        super().__init__()
        self.vocab, self.shift, self.scale = vocab, shift, scale
        self.transform = transform
        self.out = Linear(dim, vocab, bias=bias)

    def labelled_of(self, labels: Tensor) -> Tensor | None:
        if self.shift:
            return None
        known = (labels.flatten() != IGNORE).nonzero().squeeze(1)
        step = max(64, -(-labels.numel() // 32))  # a CUDA graph is of a number that comes again; a few rows more cost little
        more = min(-(-len(known) // step) * step, labels.numel()) - len(known)
        none = (labels.flatten() == IGNORE).nonzero().squeeze(1)
        return torch.cat((known, none[:more]))  # each place once: a GPU would add up the gradients of one place one by one

    def prepared(self, batch: Batch) -> Batch:
        """If few positions have a label, the others are left out. Finding them means waiting for the device, unless the batch says
        which they are. Labels on `meta` have no values, those of a graph (torch.compile) none yet, and those under vmap several:
        then all positions count."""
        if batch.labels is None or self.shift or not self.training or batch.labels.is_meta:
            return batch
        given = batch.labelled
        if given is None and (torch.compiler.is_compiling() or transformed()):
            return batch
        found = (batch.labels.flatten() != IGNORE).nonzero().squeeze(1) if given is None else given.sort().values  # see `wanted`
        return replace(batch, labelled=found, wanted=found)

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        labels = batch.labels
        if labels is None:
            return Output(logits=self.logits(x), last_hidden_state=x)
        if self.shift:
            labels = nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE)
        if self.training:
            total = self.total(x, labels, self.prepared(batch).labelled if batch.labelled is None else batch.labelled)
            return Output(loss=mean(total, labels, items), logits=None, last_hidden_state=batch.whole(x))
        logits = self.logits(x)
        total = ops.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=mean(total, labels, items), logits=logits, last_hidden_state=x)

    def check(self, labels: Tensor, batch: Batch) -> None:
        classes(labels, (batch.target or batch).x.shape[:2], "one for each token")

    def logits(self, x: Tensor) -> Tensor:
        """The scores (.. vocab) of hidden states (.. dim)."""
        if self.transform is not None:
            x = self.transform(x)
        scores: Tensor = self.out(x if self.scale == 1.0 else x * self.scale)
        if scores.size(-1) == self.vocab:
            return scores
        return scores[..., : self.vocab].clone()  # rows that only pad the vocabulary are no words; FSDP wants no view

    def total(self, x: Tensor, labels: Tensor, rows: Tensor | None) -> Tensor:
        """The summed loss of x (b s dim) against labels (b s). If `rows` (n) are given, only these count, and x may hold just them
        (1 n dim)."""
        x, labels = x.flatten(0, -2), labels.flatten()
        if rows is not None:
            x, labels = x if len(x) < len(labels) else x.index_select(0, rows), labels[rows]
        apart = type(self.out) is Linear and ops.split(self.out.weight)  # on several devices
        if not apart and not alone(self.out) and not alone(self.out, nn.Linear):  # something is added to it
            return chunked(self.logits, x, labels, self.smoothing, self.z)
        if self.transform is not None:
            x = self.transform(x)
        matrix, options = (self.out.weight, self.out.bias, labels), (self.scale, self.smoothing, self.z)
        if apart:
            return ops.vocab_parallel_cross_entropy(x, *matrix, self.vocab, *options)
        loss: Tensor = ops.linear_cross_entropy(x, *matrix, *options)
        return loss


class Transform(nn.Module):
    """norm(act(dense(x))), which stands before the table of the vocabulary in masked language models."""

    def __init__(self, dim: int, act: ops.Op, norm: nn.Module):
        super().__init__()
        self.act = act
        self.dense = Linear(dim, dim)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.act(self.dense(x)))
        return out


class ClassifyHead(Head):
    """One label for each sequence, from one vector: out(dropout(tanh(pooler(x)))), with the pooler only if the family has one.
    Labels that are not integers make it a regression, or, with several outputs, a choice of any number of labels.

    `r_drop`: set on the head. In training every row is then computed twice with different dropout, and `r_drop` times the
    divergence of the two is added to the mean of their losses (R-Drop; Liang et al., 2021, who add it to the sum, so that their
    alpha is twice this).

    `pick` chooses the vector (b dim) out of the hidden states (b s dim). Without a mask, padding is recognised by its id, as in
    transformers.
    """

    r_drop = 0.0

    def __init__(
        self,
        dim: int,
        labels: int,
        pick: Callable[[Tensor, Batch], Tensor],
        *,
        bias: bool = True,
        pooler: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.pick = pick
        self.pooler = Linear(dim, dim) if pooler else None
        self.dropout = Dropout(dropout)
        self.out = Linear(dim, labels, bias=bias)
        self.labels = labels

    def check(self, labels: Tensor, batch: Batch) -> None:
        rows, several = sequences(batch), self.labels > 1
        if not labels.is_floating_point():
            classes(labels, (rows,), "one for each sequence")
        elif labels.numel() != (rows * self.labels if several else rows):
            wanted = f"{[rows, self.labels]}, each 0 or 1; or classes (int64), one for each sequence" if several else f"{[rows]}"
            refuse(None, "labels", f"numbers of shape {list(labels.shape)}", wanted)

    def prepared(self, batch: Batch) -> Batch:
        if not self.training or batch.labels is None:
            return batch
        if self.compares(batch.labels):
            batch = batch.twice()
        return replace(batch, wanted=places(self.pick, self.seen(batch)))

    def compares(self, labels: Tensor) -> bool:
        """Whether two passes of every row are compared (R-Drop)."""
        return self.training and self.r_drop > 0 and not labels.is_floating_point()

    def seen(self, batch: Batch) -> Batch:
        """`batch` with a mask of its padding, if the ids tell where it is."""
        if batch.mask is None and batch.pad is not None and batch.x.dim() == 2:
            return replace(batch, mask=batch.x != batch.pad)
        return batch

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        whole = batch.whole(x)
        h = x[0] if whole is None else self.pick(whole, self.seen(batch))
        if self.pooler is not None:
            h = torch.tanh(self.pooler(h))
        logits = self.out(self.dropout(h))
        if batch.labels is None:
            return Output(logits=logits, last_hidden_state=whole)
        if batch.labels.is_floating_point():
            return Output(loss=value_loss(logits, batch.labels, items), logits=logits, last_hidden_state=whole)
        if self.compares(batch.labels):
            loss = label_loss(logits, batch.labels, None if items is None else 2 * items, self.smooth)
            loss = loss + self.r_drop * drift_loss(logits, batch.labels, items)
            return Output(loss=loss, logits=logits.chunk(2)[0], last_hidden_state=None if whole is None else whole.chunk(2)[0])
        return Output(loss=label_loss(logits, batch.labels, items, self.smooth), logits=logits, last_hidden_state=whole)


class TagHead(Head):
    """One label for each token."""

    by_token = True

    def __init__(self, dim: int, labels: int, *, dropout: float = 0.0):
        super().__init__()
        self.dropout = Dropout(dropout)
        self.out = Linear(dim, labels)

    def check(self, labels: Tensor, batch: Batch) -> None:
        classes(labels, batch.x.shape[:2], "one for each token")

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        logits = self.out(self.dropout(x))
        if batch.labels is None:
            return Output(logits=logits, last_hidden_state=x)
        return Output(loss=label_loss(logits, batch.labels, items, self.smooth), logits=logits, last_hidden_state=x)


class SpanHead(Head):
    """Question answering: where the answer starts and ends. Logits are b s 2. Labels are b 2 (start, end): IGNORE, or a place
    beyond the sequence's end, if there is no answer."""

    def __init__(self, dim: int):
        super().__init__()
        self.out = Linear(dim, 2)

    def check(self, labels: Tensor, batch: Batch) -> None:
        if labels.shape != (wanted := (batch.x.size(0), 2)):
            refuse(None, "labels", f"shape {list(labels.shape)}", f"{list(wanted)}, an answer's first and last token")

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        logits = self.out(x)
        out = Output(start_logits=logits[..., 0].clone(), end_logits=logits[..., 1].clone(), last_hidden_state=x)
        if batch.labels is not None:
            labels = batch.labels.masked_fill((batch.labels < 0) | (batch.labels >= x.size(1)), IGNORE)
            # the mean of the two means, each over its own labels, as transformers
            sides = ((logits[..., i], labels[:, i]) for i in (0, 1))
            parts = [mean(place_loss(scores, batch.mask, side, self.smooth), side, items) for scores, side in sides]
            out = Output(loss=(parts[0] + parts[1]) / 2, **out)
        return out


class PoolHead(Head):
    """The pooler: tanh of a projection of the first token, returned beside the hidden states."""

    def __init__(self, dim: int):
        super().__init__()
        self.pooler = Linear(dim, dim)

    def forward(self, x: Tensor, batch: Batch, items: int | Tensor | None = None) -> Output:
        return Output(last_hidden_state=x, pooler_output=torch.tanh(self.pooler(first_token(x, batch))))
