"""Span corruption against the paper's own example and counts; whole words."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_data_tokenizer import spaced

from modelcenter.data.config import DataConfig
from modelcenter.data.draws import keys_of
from modelcenter.data.encode import Reader
from modelcenter.data.objective import make_examples
from modelcenter.data.objectives.mlm import continuing
from modelcenter.data.objectives.span import Spans, corrupt, longest, span_masks, spans_of
from modelcenter.data.ragged import Ragged
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_open import load_tokenizer, open_tokenizer
from modelcenter.data.tokenizer_train import train_tokenizer
from modelcenter.errors import InputError

WORDS = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]


def test_the_example_of_the_paper() -> None:
    """Raffel et al., 2019, figure 2: `for inviting` and `last` are dropped."""
    marks = [100, 101, 102]
    names = dict(enumerate(WORDS)) | dict(zip(marks, ("<X>", "<Y>", "<Z>"), strict=True))
    noise = np.isin(WORDS, ["for", "inviting", "last"])
    (source,), (target,) = corrupt(np.arange(len(WORDS), dtype=np.int32)[None], noise[None], marks)
    assert " ".join(names[i] for i in source.tolist()) == "Thank you <X> me to your party <Y> week ."
    # the figure's target; what the source keeps at its beginning is told by the first sentinel
    assert " ".join(names[i] for i in target.tolist()) == "<X> for inviting <Y> last <Z>"


def test_the_published_lengths() -> None:
    """T5's own pre-training: 512 tokens of input are made of 568, whose target has 114 (with 15 % in spans of 3)."""
    assert longest(512, 0.15, 3.0) == 568
    noise, k = spans_of(568, 0.15, 3.0)
    assert (noise, k) == (85, 28) and 568 - noise + k + 1 == 512 and noise + k + 1 == 114


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 2.0), (0.3, 1.0), (0.9, 8.0)])
def test_a_source_is_as_long_as_it_may_be(density: float, mean: float) -> None:
    def source(n: int) -> int:
        noise, spans = spans_of(n, density, mean)
        return n - noise + spans + 1

    for size in range(3, 80):
        n = longest(size, density, mean)
        assert source(n) <= size < source(n + 1)


@pytest.mark.parametrize("n", [2, 3, 7, 50, 568])
def test_every_mask_has_its_counts(n: int) -> None:
    masks = span_masks(n, 0.15, 3.0, keys_of(0, np.arange(50)))
    assert masks.shape == (50, n)
    for mask in masks:
        starts = (mask & ~np.concatenate([[False], mask[:-1]])).sum()
        assert (mask.sum(), starts) == spans_of(n, 0.15, 3.0) and not mask[0] and mask[-1]
    assert len({mask.tobytes() for mask in masks}) > (40 if n >= 50 else 0)


def test_all_ways_to_cut_are_as_likely() -> None:
    """7 tokens, 4 of them dropped in 2 spans: 2 ways to cut what stays, 3 what goes."""
    assert spans_of(7, 0.5, 2.0) == (4, 2)
    masks = span_masks(7, 0.5, 2.0, keys_of(0, np.arange(6000)))
    _, times = np.unique(masks, axis=0, return_counts=True)
    assert len(times) == 6 and ((times - 1000) ** 2 / 1000).sum() < 20.5  # chi-squared with 5 degrees of freedom: 1 in 1000


def tokenizer(count: int = 20) -> object:
    raw = train_tokenizer(["the cat sat on the mat. a dog ran. " * 30], 300, "roberta")
    raw.raw.add_special_tokens([f"<extra_id_{k}>" for k in range(count)])
    return raw


def test_examples_hold_all_that_was_there() -> None:
    made, data = tokenizer(), DataConfig(path="x", seq_len=32)
    records = [Record({"text": "the cat sat on the mat. " * 9}, "f", 1), Record({"text": "a dog ran. " * 5}, "f", 2)]
    examples = make_examples("span", records, made, data)
    marks = [made.token_to_id(f"<extra_id_{k}>") for k in range(20)]
    stream = [i for r in records for i in [*made.encode(r.fields["text"], special=False), made.eos_id]]
    whole, epochs = [], []
    for index in range(len(examples)):
        source, target = (x.tolist() for x in examples.at(0, index))
        assert len(source) <= 32 and len(source) + len(target) == examples.lengths[index]
        assert source.pop() == target.pop() == made.eos_id
        for k, mark in enumerate(marks):
            if mark not in source:
                break
            at, begin = source.index(mark), target.index(mark)
            stop = target.index(marks[k + 1]) if marks[k + 1] in target else len(target)
            source[at : at + 1] = target[begin + 1 : stop]
        assert k > 0
        whole += source
        epochs.append(examples.at(0, index)[0].tolist() == examples.at(1, index)[0].tolist())
        assert examples.at(0, index)[0].tolist() == examples.at(0, index)[0].tolist()
    assert whole == stream[: len(whole)] and len(stream) - len(whole) <= 1 and not all(epochs)
    batch = examples.collate([examples.at(0, k) for k in range(2)])
    assert batch["input_ids"].shape[1] <= 32 and batch["labels"].shape[0] == 2


def test_lengths_of_a_large_corpus_take_little_memory() -> None:
    """They were counted one by one: 18 GB of Python's numbers, and four minutes, for 100 billion tokens."""
    read, data = Reader(train_tokenizer(["a"], 400, "span"), None), DataConfig(seq_len=32)
    raw = longest(32, data.mlm_probability, data.span_length)
    tracemalloc.start()
    try:
        examples = Spans(SimpleNamespace(total=100_000 * raw + 2), read, data)  # type: ignore[arg-type]  # none of them is read yet
        assert tracemalloc.get_traced_memory()[1] < 60 * 100_000
    finally:
        tracemalloc.stop()
    counts = [spans_of(int(n), data.mlm_probability, data.span_length)[1] for n in examples.stops - examples.starts]
    assert examples.lengths.tolist() == [n + 2 * k + 2 for n, k in zip(examples.stops - examples.starts, counts, strict=True)]
    assert (len(examples), counts[0], counts[-1]) == (100_001, 2, 1)


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_a_last_token_alone_is_left_out(rest: int) -> None:
    """Nothing would be left of it without a span."""
    read, data = Reader(train_tokenizer(["a"], 400, "span"), None), DataConfig(seq_len=32)
    raw = longest(32, data.mlm_probability, data.span_length)
    examples = Spans(Ragged([[5] * (3 * raw + rest)]), read, data)
    assert (examples.stops - examples.starts).tolist() == [raw] * 3 + [2] * (rest == 2)
    assert len(examples) == len(examples.lengths)


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    made = train_tokenizer(["a"], 400, "span")
    with pytest.raises(InputError, match="objective: span with a tokenizer without an end of text; one that has it"):
        make_examples("span", [Record({"text": "a"}, "f", 1)], Tokenizer(made.raw, {"pad": "<pad>"}), DataConfig(path="x"))


def test_a_tokenizer_without_sentinels_is_refused() -> None:
    records = [Record({"text": "the cat sat on the mat. " * 30}, "f", 1)]
    with pytest.raises(InputError, match=r"the tokenizer has 1; a shorter data\.seq_len"):
        make_examples("span", records, tokenizer(1), DataConfig(path="x", seq_len=64))


@pytest.mark.parametrize("spec", ["roberta:290", "roberta:294", "wordpiece"])
def test_whole_words_are_masked(spec: str, tmp_path: Path) -> None:
    """All tokens of a word or none, and of the words as many as of the tokens otherwise."""
    text = "unbelievable cats were sitting everywhere without complaining about anything " * 40
    if spec == "wordpiece":
        pieces = ["un", "##believ", "##able", "cat", "##s", "were", "sit", "##ting", "every", "##where", "with", "##out",
                  "complain", "##ing", "about", "any", "##thing"]  # fmt: skip
        vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
        (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
        made = load_tokenizer(tmp_path)
    else:
        made = train_tokenizer([text, " ##" * 400 * (spec == "roberta:294")], int(spec[-3:]), "roberta")
    assert ("##" in made.vocabulary) == (spec == "roberta:294")  # as in RoBERTa's own, where it is a word
    data = DataConfig(path="x", seq_len=48, whole_words=True)
    examples = make_examples("mlm", [Record({"text": text}, "f", 1)], made, data)
    whole, split, chosen, tokens = 0, 0, 0, 0
    for epoch in range(8):
        for index in range(len(examples)):
            seen, labels = examples.at(epoch, index)
            ids = np.where(labels == -100, seen, labels)
            names = [made.raw.id_to_token(int(i)) for i in ids]
            inside = [n.startswith("##") if spec == "wordpiece" else not n.startswith("Ġ") for n in names]
            starts = [k for k in range(len(ids)) if ids[k] in made.special_ids or not inside[k]]
            for a, b in zip(starts, [*starts[1:], len(ids)], strict=True):
                part = [label != -100 for k, label in enumerate(labels[a:b], a) if ids[k] not in made.special_ids]
                whole, split = whole + (len(part) > 1 and all(part)), split + (any(part) and not all(part))
                chosen, tokens = chosen + sum(part), tokens + len(part)
    assert whole > 20 and split == 0 and 0.1 < chosen / tokens < 0.2
    with pytest.raises(InputError, match=r"data\.whole_words: true with a tokenizer that marks no words"):
        continuing(open_tokenizer("char", ["ab"]))
    maltese = spaced("first", ["the cat Ġan"])
    ids = maltese.encode("a Ġ", special=False)  # a space, a, a space, Ġ
    assert continuing(maltese)[ids].tolist() == [False, True, False, True]


def test_the_rest_of_a_word_at_a_blocks_beginning_is_a_word_of_its_own() -> None:
    """Where no [CLS] stands before it, and where the word fills the whole block too."""
    made = train_tokenizer(["abc"], 270, "roberta")
    bare = Tokenizer(made.raw, {role: token for role, token in made.special.items() if role not in ("cls", "sep")})
    data = DataConfig(seq_len=8, whole_words=True, mlm_probability=0.5)
    examples = make_examples("mlm", [Record({"text": "bcd efgh" * 20}, "f", 1)], bare, data)
    same = []
    for epoch in range(20):
        for index in range(len(examples) - 1):
            ids, labels = examples.at(epoch, index)
            hidden = (labels != -100).tolist()
            assert len(ids) == 8 and any(hidden) and len(set(hidden[:3])) == len(set(hidden[3:])) == 1
            same.append(hidden[0] == hidden[-1])
    assert 0.15 < np.mean(same) < 0.35  # both are chosen in a quarter of all blocks, and none never
    examples = make_examples("mlm", [Record({"text": "abcdefgh" * 20}, "f", 1)], bare, data)
    assert (examples.at(0, 0)[1] != -100).all()


def test_a_character_without_spaces_around_it_is_a_word() -> None:
    """Chinese in a byte-level vocabulary: all bytes of a character or none, and no whole sentence at once."""
    text = "我们在北京看见三只小猫，它们都很可爱。"
    made = train_tokenizer(["abc"], 270, "roberta")  # knows no Chinese: three tokens a character
    assert len(made.encode(text, special=False)) == 3 * len(text)
    examples = make_examples("mlm", [Record({"text": text * 20}, "f", 1)], made, DataConfig(seq_len=62, whole_words=True))
    shares = []
    for epoch in range(20):
        for index in range(len(examples) - 1):
            _, labels = examples.at(epoch, index)
            parts = (labels[1:-1] != -100).reshape(-1, 3)  # 60 tokens: a block begins with a character
            assert (parts.all(1) == parts.any(1)).all()
            shares.append(parts.mean())
    assert 0.12 < np.mean(shares) < 0.18 and max(shares) < 0.6
    inside = continuing(made)
    spaced = made.encode("ab 中", special=False)
    assert [bool(inside[i]) for i in spaced] == [True, False, False, True, True]  # ab, a space, and three bytes
