"""Span corruption: which tokens are dropped, and what replaces them. Raffel et al., 2019, section 3.1.4; n tokens, k spans."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import refuse
from ..config import DataConfig
from ..draws import Keys, keys_of, uniform
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

    def target_len(self, data: DataConfig) -> int:
        noise, k = spans_of(longest(data.seq_len, data.mlm_probability, data.span_length), data.mlm_probability, data.span_length)
        return noise + k + 1

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
        read.tokenizer.end_texts()
        self.tokens, self.seed, self.eos, self.fill = tokens, read.seed, read.eos[0], filler(read.tokenizer)
        self.density, self.mean = data.mlm_probability, data.span_length
        raw = longest(data.seq_len, self.density, self.mean)
        self.starts, self.stops = pieces(np.array([0, tokens.total]), raw)
        if self.stops[-1] - self.starts[-1] < 2:  # nothing is left of one token without a span
            self.starts, self.stops = self.starts[:-1], self.stops[:-1]
        if not len(self.starts):
            refuse(None, "data.path", f"{tokens.total} tokens in all", "at least two")
        raws = self.stops - self.starts  # all the same, but for the last: there may be many millions
        first, last = (spans_of(int(n), self.density, self.mean)[1] for n in raws[[0, -1]])
        self.sentinels = sentinels(read.tokenizer, max(first, last), read.vocab)
        self.lengths = raws + 2 * first + 2  # of source and target together
        self.lengths[-1] = raws[-1] + 2 * last + 2
        self.size = int(self.lengths.max())

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(source ids, target ids)."""
        return self.several([(epoch, index)])[0]

    def several(self, places: Sequence[tuple[int, int]]) -> list[tuple[Ids, Ids]]:
        """Those of one length at once: all, but the last of the stream."""
        epochs, index = np.array(places).T
        starts, lengths = self.starts[index], self.stops[index] - self.starts[index]
        keys, found = keys_of(self.seed, epochs, index, 3), dict[int, tuple[Ids, Ids]]()
        for n in np.unique(lengths).tolist():
            here = np.flatnonzero(lengths == n)
            ids = np.stack([self.tokens.flat(start, start + n) for start in starts[here].tolist()])
            both = corrupt(ids, span_masks(n, self.density, self.mean, keys[here]), self.sentinels)
            ended = (np.pad(side, ((0, 0), (0, 1)), constant_values=self.eos) for side in both)
            found.update(zip(here.tolist(), zip(*ended, strict=True), strict=True))
        return [found[k] for k in range(len(places))]


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


def span_masks(n: int, density: float, mean: float, keys: Keys) -> NDArray[np.bool_]:
    """(rows, n): which tokens are dropped, of a row for each of `keys`. Kept and dropped spans take turns, a kept one first; all
    ways to cut are equally likely."""
    noise, k = spans_of(n, density, mean)

    def parts(total: int, first: int) -> NDArray[np.int64]:
        """(rows, k): `total` as a sum of k numbers from 1 on, by the numbers drawn from the `first` on."""
        drawn = uniform(keys[:, None], np.arange(first, first + total - 1))
        cuts = np.sort(drawn.argsort(1)[:, : k - 1], 1) + 1  # the places of the least: each set of so many is as likely
        return np.diff(cuts, axis=1, prepend=0, append=total)

    lengths = np.stack([parts(n - noise, 0), parts(noise, n)], 2)  # (rows, k, 2)
    turns = np.tile([False, True], lengths.size // 2)
    return turns.repeat(lengths.reshape(-1)).reshape(len(keys), n)


def corrupt(ids: Ids, noise: NDArray[np.bool_], marks: Sequence[int]) -> tuple[Ids, Ids]:
    """(sources, targets) of rows (rows, n) that drop as many tokens in as many spans: in a source each dropped span is a sentinel
    of its own, in a target each kept one; both count their sentinels from the first on."""
    return masked(ids, noise, marks), masked(ids, ~noise, marks)


def masked(ids: Ids, hidden: NDArray[np.bool_], marks: Sequence[int]) -> Ids:
    first = hidden.copy()
    first[:, 1:] &= ~hidden[:, :-1]
    named = np.where(first, np.array(marks, np.int32)[np.maximum(first.cumsum(1) - 1, 0)], ids)
    return named[~hidden | first].reshape(len(ids), -1)


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
