"""Masked language modelling. Devlin et al., 2018."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import refuse
from ..collate import IGNORED
from ..config import DataConfig
from ..draws import keys_of, uniform
from ..indexed import Tokens
from ..objective import Frame, Objective, register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import Sequences, behind, documents, filler, pieces

if TYPE_CHECKING:
    from ..encode import Reader
    from ..tokenizer import Tokenizer


CJK = {  # U+3000 to U+9FFF at a token's beginning: as it is, or by its first byte as the byte-level alphabet writes it
    "▁": re.compile("[\u3000-\u9fff]"), "Ġ": re.compile("[\u00e3-\u00e9]"),
}  # fmt: skip


@register
class MLM(Objective):
    name = task = "mlm"
    keys = ("text_key", "mlm_probability", "whole_words")
    metrics = ("accuracy",)
    of = ("loss", "classes")

    def frame(self, read: "Reader") -> Frame:
        """[SEP] behind a document."""
        return [], read.sep

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        return Masked(documents(records, read, data, self.frame(read)), read, data)


class Masked(Sequences):
    """The stream of all documents in blocks of seq_len between [CLS] and [SEP], with [SEP] between documents, or, to
    be packed, each document for itself.

    Devlin et al. 2018, 3.1: of the tokens chosen (15 %) 80 % are masked, 10 % replaced, 10 % kept; anew each epoch. With
    `whole_words` words are chosen, and all their tokens with them, as in BERT's release of May 2019.
    """

    def __init__(self, tokens: Ragged | Tokens, read: "Reader", data: DataConfig) -> None:
        tokenizer = read.tokenizer
        if tokenizer.mask_id is None:
            wanted = "one that has it: tokenizer=roberta:8000 trains one"
            refuse(tokenizer.name, "objective", "mlm with a tokenizer that has no mask token", wanted)
        self.mask, self.fill = tokenizer.mask_id, filler(tokenizer)
        self.seed, self.probability = read.seed, data.mlm_probability
        self.head = np.array([] if tokenizer.cls_id is None else [tokenizer.cls_id], np.int32)
        self.tail = np.array(read.sep, np.int32)
        room = data.seq_len - len(self.head) - len(self.tail)
        if room < 1:
            refuse(None, "data.seq_len", str(data.seq_len), "room for a token between [CLS] and [SEP]")
        special = tokenizer.special_ids
        top = min(tokenizer.vocab_size, read.vocab or tokenizer.vocab_size)
        self.open = np.ones(max((tokenizer.vocab_size, *special)) + 2, np.bool_)  # the last is for all ids that are no token's
        self.open[list(special)] = False
        self.ordinary = np.array([i for i in range(top) if i not in special], np.int32)
        self.inside = continuing(tokenizer) if data.whole_words else None
        self.tokens, self.size = tokens, data.seq_len
        bounds = tokens.bounds if data.packing else np.array([0, tokens.total])
        self.starts, self.stops = pieces(bounds, room, drop=behind(tokens, int(bounds[1]), read.sep))
        self.lengths = self.stops - self.starts + len(self.head) + len(self.tail)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels): at least one token is to be predicted wherever one is not special."""
        return self.several([(epoch, index)])[0]

    def several(self, places: Sequence[tuple[int, int]]) -> list[tuple[Ids, Ids]]:
        """Their tokens are drawn for all at once, end to end."""
        epochs, index = np.array(places).T
        blocks = map(self.tokens.flat, self.starts[index].tolist(), self.stops[index].tolist())
        ids = np.concatenate([part for block in blocks for part in (self.head, block, self.tail)], dtype=np.int32)
        lengths = self.lengths[index]
        ends = lengths.cumsum()
        firsts = ends - lengths
        keys, place = keys_of(self.seed, epochs, index, 2), np.arange(len(ids)) - firsts.repeat(lengths)

        def drawn(which: int) -> NDArray[np.float64]:
            """A number for each token, of three."""
            return uniform(keys.repeat(lengths), 3 * place + which)

        open_ = self.open.take(ids, mode="clip")  # np.isin would be a fifth to nearly half of the time
        begins = np.ones(len(ids), np.bool_) if self.inside is None else ~self.inside[ids] | ~open_
        begins[firsts] = True  # without [CLS] a block may begin within a word
        word = begins.cumsum() - 1
        chosen = open_ & (drawn(0)[begins] < self.probability)[word]
        for k in np.flatnonzero(np.logical_or.reduceat(open_, firsts) & ~np.logical_or.reduceat(chosen, firsts)).tolist():
            row = slice(firsts[k], ends[k])
            could = word[row][open_[row]]
            (one,) = uniform(keys[k : k + 1], 3 * lengths[k : k + 1])  # behind those of its tokens
            chosen[row] = open_[row] & (word[row] == could[int(one * len(could))])
        fate = drawn(1)
        other = self.ordinary[(drawn(2) * len(self.ordinary)).astype(np.int64)] if len(self.ordinary) else ids
        seen = np.where(chosen & (fate < 0.8), self.mask, np.where(chosen & (fate >= 0.9), other, ids)).astype(np.int32)
        labels = np.where(chosen, ids, np.int32(IGNORED))
        return [(seen[a:b], labels[a:b]) for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)]


def continuing(tokenizer: "Tokenizer") -> NDArray[np.bool_]:
    """Which ids continue the word of the token before: those with ## in WordPiece, otherwise those without a mark of a space at
    their beginning.

    Chinese and Japanese have no spaces: each of their characters counts as a word, as in WordPiece, and not a whole sentence as
    one.
    """
    vocab = tokenizer.vocabulary if hasattr(tokenizer, "raw") else {}  # what transformers alone can read marks no words
    often = {mark: sum(token.startswith(mark) for token in vocab) for mark in ("##", "Ġ", "▁")}
    mark = max(often, key=lambda mark: often[mark])  # RoBERTa's has words of "##" too, and XLM-R's Maltese ones of "Ġ"
    if not often[mark]:
        refuse(tokenizer.name, "data.whole_words", "true with a tokenizer that marks no words", "false, or another tokenizer")
    inside = np.zeros(tokenizer.vocab_size, np.bool_)
    for token, number in vocab.items():
        inside[number] = token.startswith(mark) if mark == "##" else not (token.startswith(mark) or CJK[mark].match(token))
    return inside
