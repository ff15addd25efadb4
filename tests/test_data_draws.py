"""Numbers drawn for many rows at once."""

from itertools import product

import numpy as np
import pytest

from modelcenter.data.config import DataConfig
from modelcenter.data.draws import keys_of, uniform
from modelcenter.data.objective import make_examples
from modelcenter.data.record import Mixture, Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer


def test_the_stream_is_splitmix64() -> None:
    """The numbers that Vigna's splitmix64.c and Java's SplittableRandom give for the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    found = uniform(np.array([1234567], np.uint64), np.arange(5))
    assert found.tolist() == [(n >> 11) * 2.0**-53 for n in known]


def test_a_key_is_hashed_name_by_name() -> None:
    """In Python's own numbers: a run that is continued by a later version masks what it would have masked."""
    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    for names in product((0, -1, 2**63 + 5), (0, 7), (3,)):
        key = 0
        for name in names:
            key = mixed(((key ^ name % 2**64) + 0x9E3779B97F4A7C15) % 2**64)
        assert keys_of(*names).tolist() == [key]


def test_each_name_and_its_place_make_a_key() -> None:
    names = list(product((0, 1, 2**64 - 1), range(3), range(50), (2, 3)))
    keys = [int(keys_of(seed, np.array([epoch]), np.array([index]), kind)[0]) for seed, epoch, index, kind in names]
    assert len(set(keys)) == len(names)
    assert keys_of(5, np.array([1, 2]), np.array([2, 1]), 3).tolist() == [keys_of(5, a, b, 3)[0] for a, b in ((1, 2), (2, 1))]


def test_the_numbers_are_even_and_no_two_streams_alike() -> None:
    drawn = uniform(keys_of(7, np.arange(400))[:, None], np.arange(500))
    counts, _ = np.histogram(drawn, 100, (0, 1))
    assert drawn.min() >= 0 and drawn.max() < 1 and ((counts - 2000) ** 2 / 2000).sum() < 149  # chi-squared with 99: 1 in 1000
    near = np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1], np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]
    assert max(map(abs, near)) < 4 / 200_000**0.5  # four standard deviations


TEXTS = ["the cat sat on the mat. " * 9, "a dog ran. " * 5, "to be or not to be, that is the question. " * 7]


def spanned() -> Tokenizer:
    made = train_tokenizer([" ".join(TEXTS)], 300, "roberta")
    made.raw.add_special_tokens([f"<extra_id_{k}>" for k in range(20)])
    return made


@pytest.mark.parametrize(("name", "how"), [
    *product(("mlm", "span", "lm", "prefix_lm"), ("", "padding_free")),
    ("mlm", "packing"), ("lm", "packing"), ("mlm", "whole_words"),
])  # fmt: skip
def test_together_as_alone(name: str, how: str) -> None:
    """An example depends on (epoch, index) alone, whatever is made beside it; of a blend of sources too."""
    data = DataConfig(path="x", seq_len=64 if name == "span" else 24, **{how: True for how in [how] if how})
    sources = [[Record({"text": text}, "f", 1) for text in some] for some in (TEXTS, TEXTS[::-1], TEXTS[:1])]
    for records in (sources[0], Mixture(sources)):
        examples = make_examples(name, records, spanned(), data)
        draw = np.random.default_rng(0)
        places = [(int(draw.integers(5)), int(draw.integers(len(examples)))) for _ in range(40)]
        alone = [examples.collate([examples.at(*place)]) for place in places]
        together = [examples.collate([example]) for example in examples.several(places)]
        for one, other in zip(alone, together, strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[key], other[key]) for key in one)
        assert len({str(batch["input_ids"].tolist()) for batch in alone}) > 5  # of so few texts
        if name in ("mlm", "span"):  # is drawn anew in each epoch
            assert len({str(examples.collate([examples.at(epoch, 0)])["input_ids"].tolist()) for epoch in range(5)}) > 2
        if name == "span":
            assert len(set(examples.lengths.tolist())) > 1  # the last is shorter
