"""Span corruption: which tokens are dropped, and what replaces them. Raffel et al., 2019, section 3.1.4; n tokens, k spans."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import refuse
from ..config import DataConfig
from ..indexed import Tokens
from ..objective import Frame, Objective, register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import Sequences, documents, filler, pieces

if TYPE_CHECKING:
    from ..encode import Reader
    from ..tokenizer import Tokenizer


@register
class Span(Objective):
    name, task = "span", "seq2seq"
    keys = ("text_key", "mlm_probability", "span_length")
    metrics = ("perplexity",)

    def verify(self, data: DataConfig) -> None:
        if data.mlm_probability == 1:  # no number of tokens would fill a source
            refuse(None, "data.mlm_probability", "1.0, which leaves a source nothing but sentinels", "a share below 1")
        if data.seq_len < 3:
            refuse(None, "data.seq_len", str(data.seq_len), "3 at least: a token, a sentinel and the end of text")

    def frame(self, read: "Reader") -> Frame:
        """The end of text behind a document."""
        return [], read.eos

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        return Spans(documents(records, read, data, self.frame(read)), read, data)


class Spans(Sequences):
    """The stream of all documents, cut so that a source has at most seq_len tokens once spans of it are dropped; anew each epoch.

    `mlm_probability` of the tokens are dropped, in spans of `span_length` on average. Each span is a sentinel in the source, and
    behind each sentinel the target has what it stands for. Both end with the end of text.
    """

    def __init__(self, tokens: Ragged | Tokens, read: "Reader", data: DataConfig) -> None:
        if not read.eos:
            refuse(read.tokenizer.name, "objective", "span with a tokenizer without an end of text", "one that has it")
        self.tokens, self.seed, self.eos, self.fill = tokens, read.seed, read.eos[0], filler(read.tokenizer)
        self.density, self.mean = data.mlm_probability, data.span_length
        raw = longest(data.seq_len, self.density, self.mean)
        self.starts, self.stops = pieces(np.array([0, tokens.total]), raw)
        if self.stops[-1] - self.starts[-1] < 2:  # nothing is left of one token without a span
            self.starts, self.stops = self.starts[:-1], self.stops[:-1]
        if not len(self.starts):
            refuse(None, "data.path", f"{tokens.total} tokens in all", "at least two")
        counts = [spans_of(int(n), self.density, self.mean) for n in self.stops - self.starts]
        self.sentinels = sentinels(read.tokenizer, max(k for _, k in counts), read.vocab)
        self.lengths = self.stops - self.starts + np.array([2 * k + 2 for _, k in counts])  # of source and target together
        self.size = int(self.lengths.max())

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(source ids, target ids)."""
        ids = self.tokens.flat(int(self.starts[index]), int(self.stops[index]))
        noise = span_mask(len(ids), self.density, self.mean, np.random.default_rng((self.seed, epoch, index, 3)))
        source, target = corrupt(ids, noise, self.sentinels)
        end = np.array([self.eos], np.int32)
        return np.concatenate([source, end]), np.concatenate([target, end])


def spans_of(n: int, density: float, mean: float) -> tuple[int, int]:
    """How many of n tokens are dropped, and in how many spans: a token at least on either side, and no more spans than tokens."""
    noise = min(max(round(n * density), 1), n - 1)
    return noise, min(max(round(noise / mean), 1), noise, n - noise)


def longest(size: int, density: float, mean: float) -> int:
    """The most tokens whose source has at most `size`, including its sentinels and the end of text."""
    n = 2
    while n + 1 - spans_of(n + 1, density, mean)[0] + spans_of(n + 1, density, mean)[1] + 1 <= size:
        n += 1
    return n


def span_mask(n: int, density: float, mean: float, random: np.random.Generator) -> NDArray[np.bool_]:
    """Which of n tokens are dropped: kept and dropped spans take turns, a kept one first; all ways to cut are equally likely."""
    noise, k = spans_of(n, density, mean)

    def parts(total: int) -> NDArray[np.int64]:
        """`total` as a sum of k numbers from 1 on."""
        cuts = np.sort(random.choice(total - 1, k - 1, replace=False)) + 1
        return np.diff(np.concatenate([[0], cuts, [total]]))

    lengths = np.stack([parts(n - noise), parts(noise)], 1).flatten()
    mask: NDArray[np.bool_] = np.repeat(np.arange(2 * k) % 2 == 1, lengths)
    return mask


def corrupt(ids: Ids, noise: NDArray[np.bool_], marks: Sequence[int]) -> tuple[Ids, Ids]:
    """(source, target): in the source each dropped span is a sentinel of its own, in the target each kept one; both count their
    sentinels from the first on."""
    return masked(ids, noise, marks), masked(ids, ~noise, marks)


def masked(ids: Ids, hidden: NDArray[np.bool_], marks: Sequence[int]) -> Ids:
    first = hidden & ~np.concatenate([[False], hidden[:-1]])
    named = np.where(first, np.array(marks, np.int32)[np.maximum(first.cumsum() - 1, 0)], ids)
    out: Ids = named[~hidden | first].astype(np.int32)
    return out


def sentinels(tokenizer: "Tokenizer", count: int, vocab: int | None) -> list[int]:
    """The ids of <extra_id_0> and so on."""
    found = [tokenizer.token_to_id(f"<extra_id_{k}>") for k in range(count)]
    unknown = tokenizer.token_to_id("<unk>")
    good = [i for i in found if i is not None and i != unknown and (vocab is None or i < vocab)]
    if len(good) < count:
        wanted = "a shorter data.seq_len, a longer data.span_length, or another tokenizer"
        lack = f"span needs {count} sentinels (<extra_id_0> ...), the tokenizer has {len(good)}"
        refuse(tokenizer.name, "objective", lack, wanted)
    return good
