"""Span corruption: which tokens are dropped, and what stands for them. Raffel et al., 2019, section 3.1.4; n tokens, k spans."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from modelcenter.data.ragged import Ids
from modelcenter.errors import refuse

if TYPE_CHECKING:
    from modelcenter.data.tokenizer import Tokenizer


def spans_of(n: int, density: float, mean: float) -> tuple[int, int]:
    """How many of n tokens are dropped, and in how many spans: a token at least on either side, and no more spans than tokens."""
    noise = min(max(round(n * density), 1), n - 1)
    return noise, min(max(round(noise / mean), 1), noise, n - noise)


def longest(size: int, density: float, mean: float) -> int:
    """The most tokens whose source has `size` at most, its sentinels and the end of text counted."""
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
