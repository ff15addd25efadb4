"""Prefix language modelling: a prompt is read in both directions, and what follows is predicted. Raffel et al., 2019, section
3.2.1."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collate import IGNORED
from ..config import DataConfig
from ..indexed import Tokens
from ..objective import register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import Sequences, documents
from .lm import LM, Documents, Rows

if TYPE_CHECKING:
    from ..encode import Reader


@register
class PrefixLM(LM):
    """Rows of a prompt and its response, or documents, each cut in two at random. The model's config.json records this, because the
    weights are of no use to a model that reads its prompt in one direction."""

    name = "prefix_lm"

    def settle(self, config: Any) -> Mapping[str, Any]:
        return {"prefix_lm": True}

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        if data.prompt_key is not None or data.response_key is not None:
            return Rows(records, read, data)
        return Halves(documents(records, read, data, self.frame(read)), read, data)


class Halves(Documents):
    """Documents whose beginning is given; its length is drawn anew each epoch, and is at least one token."""

    def __init__(self, tokens: Ragged | Tokens, read: "Reader", data: DataConfig) -> None:
        super().__init__(tokens, read, data)
        self.seed = read.seed

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of a sequence; one token alone has nothing to predict."""
        ids, labels = super().at(epoch, index)
        given = np.random.default_rng((self.seed, epoch, index, 4)).integers(1, max(len(ids), 2))
        return ids, np.where(np.arange(len(ids)) < given, IGNORED, labels)
