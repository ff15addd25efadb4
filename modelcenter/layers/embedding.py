"""Token, position and segment embeddings."""

import torch
from torch import Tensor, nn

from .. import ops
from ..errors import refuse
from ..ops._mode import autocast_dtype
from ..ops._op import wide
from ..ops.embedding import untrained
from .dropout import Dropout
from .linear import alone
from .norm import Norm, normed, stream


class Embedding(nn.Module):
    """Sum of a token table and optional position and segment tables, then an optional norm and dropout."""

    tp = {"tokens": "vocab"}

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        positions: int = 0,
        segments: int = 0,
        norm: Norm | None = None,
        dropout: float = 0.0,
        pad: int | None = None,
    ):
        """`pad`: a token whose row gets no gradient from being read; -1, as in LLaMA's first files, is the last, as in torch."""
        super().__init__()
        self.pad = vocab + pad if pad is not None and pad < 0 else pad
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(positions, dim) if positions else None
        self.segments = nn.Embedding(segments, dim) if segments else None
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None, segments: Tensor | None = None,
                written: bool = False) -> Tensor:
        """`x`: token ids (b s) or vectors (b s dim); `positions` and `segments` (1|b s). `written`: the ids are made of labels, and
        an error says so. Returns b s dim."""
        if x.dim() == 2:
            x = named("labels or decoder_input_ids" if written else "token ids", self.tokens, x, self.pad)
        else:
            x = vectors(x, self.tokens.weight.dtype)
        if self.positions is not None:
            assert positions is not None
            x = x + named("position_ids", self.positions, positions)
        if self.segments is not None:
            assert segments is not None
            x = x + named("token_type_ids", self.segments, segments)
        low = stream(x)
        if self.norm is not None:
            x = normed(self.norm, x, low)
        elif low is not None:
            x = x.to(low)
        out: Tensor = self.dropout(x)
        return out


def vectors(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is given in place of the rows of a table of that dtype. Weights are cast to the dtype of what they meet, so that vectors
    in a lower one would make the whole forward one in low precision."""
    same = x.is_floating_point() and autocast_dtype(x.device) is not None
    if not same and not (x.is_floating_point() and torch.promote_types(x.dtype, dtype) == dtype):
        refuse(None, "inputs_embeds", str(x.dtype), f"{dtype}, the dtype of the model's embeddings")
    return x if same else x.to(dtype)


def named(what: str, table: nn.Embedding, ids: Tensor, pad: int | None = None) -> Tensor:
    """`read`, where an id that the table does not have is refused under the name that a forward has for it; on a GPU, which would
    have to be waited for, it ends the process."""
    try:
        return read(table, ids, pad)
    except (ValueError, IndexError):
        wrong = ids[(ids < 0) | (ids >= table.num_embeddings)]
        if not len(wrong):
            raise
        others = what in ("position_ids", "token_type_ids")
        tokens = ": the model has no others" if others else ", the model's vocabulary; is this its tokenizer?"
        refuse(None, what, str(int(wrong[0])), f"0 to {table.num_embeddings - 1}{tokens}")


def read(table: nn.Embedding, ids: Tensor, pad: int | None = None) -> Tensor:
    """The rows of `table` at `ids`; reading `pad` does not train its row. If the table is not a plain module (a hook of tensor
    parallelism, a sharded weight), the module itself is called. Under autocast the rows are fp32 even if the table is a copy in low
    precision that other ranks sent: they are added up before the residual stream gets its dtype."""
    plain = alone(table, nn.Embedding) and table.padding_idx is None and table.max_norm is None and not table.sparse
    out: Tensor = ops.embedding(ids, table.weight, pad) if plain else untrained(table(ids), ids, pad)
    return out if autocast_dtype(out.device) is None else wide(out)
