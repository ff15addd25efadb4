"""Tagging: labels stand at the first tokens of words, in tokenizers of every kind."""

import pytest
import torch
import transformers

from modelcenter.data.collate import IGNORED
from modelcenter.data.config import DataConfig
from modelcenter.data.objective import find_objective, make_examples, texts_of
from modelcenter.data.objectives.tag import sentence
from modelcenter.data.record import Record
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.errors import InputError

SENTENCES = [(["Angela", "Merkel", "visited", "Paris", "."], ["B-PER", "I-PER", "O", "B-LOC", "O"]), (["No", "names"], ["O", "O"])]
DATA = DataConfig(path="x", seq_len=40)


def records() -> list[Record]:
    return [Record({"tokens": words, "tags": tags}, "f", n) for n, (words, tags) in enumerate(SENTENCES, 1)]


@pytest.mark.parametrize("spec", ["roberta:280", "bpe:280", "char"])
def test_the_first_token_of_a_word_has_its_label(spec: str) -> None:
    tokenizer = open_tokenizer(spec, [*texts_of("tag", records(), DATA)] * 3)
    examples = make_examples("tag", records(), tokenizer, DATA)
    names = ("B-LOC", "B-PER", "I-PER", "O")
    assert find_objective("tag").names(records(), DATA) == names
    for index, (words, tags) in enumerate(SENTENCES):
        ids, labels = (x.tolist() for x in examples.at(0, index))
        spans = [i for i, label in enumerate(labels) if label != IGNORED]
        assert [names[labels[i]] for i in spans] == tags
        ends = [*spans[1:], len(ids)]
        assert [tokenizer.decode(ids[a:b]).strip() for a, b in zip(spans, ends, strict=True)] == words
    batch = examples.collate([examples.at(0, 0), examples.at(0, 1)])
    assert batch["labels"].shape == batch["input_ids"].shape and (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
    shown = find_objective("tag").sample(batch, tokenizer, names)
    assert "/ B-PER]]" in shown and shown.count("[[") == 5
    packed = examples.pack([examples.at(0, 0), examples.at(0, 1)])
    assert (packed["labels"] != IGNORED).sum() == 7


def test_words_are_cut_as_transformers_cuts_them(tmp_path: object) -> None:
    """GPT-2's tokenizer with add_prefix_space but for the first word, which stands at the beginning of a text."""
    tokenizer = open_tokenizer("roberta:280", [" ".join(words) for words, _ in SENTENCES] * 3)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for words, _ in SENTENCES:
        given = [words[0], *(f" {w}" for w in words[1:])]
        ids, where = tokenizer.encode_words(words, 100)
        wanted = theirs(given, is_split_into_words=True)
        assert ids == wanted["input_ids"] and where == wanted.word_ids()
        assert ids == tokenizer.encode(" ".join(words))
        short = theirs(given, is_split_into_words=True, truncation=True, max_length=4)["input_ids"]
        assert tokenizer.encode_words(words, 4)[0] == short


@pytest.mark.parametrize("tags", [[0, 2], "0 2"], ids=["list", "text"])
def test_text_and_numbers_will_do(tags: object) -> None:
    some = [Record({"tokens": "a b", "tags": tags}, "f", 1)]
    with pytest.warns(UserWarning, match="tags by number: span_f1 takes each for a span of one word"):
        assert find_objective("tag").names(some, DATA) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert find_objective("tag").names(some, DATA, ("O", "B-X", "I-X")) == ("O", "B-X", "I-X")  # of a model that says what they are
    examples = make_examples("tag", some, open_tokenizer("char", ["ab"]), DATA, names=("O", "B-X", "I-X"))
    assert examples.at(0, 0)[1].tolist() == [0, 2] and torch.is_tensor(examples.collate([examples.at(0, 0)])["labels"])


def test_lists_in_a_table_are_json() -> None:
    """Their brackets and quotes were parts of words and of tags."""
    both = '["a", "b"]', '["O", "B-X"]'
    for words, tags in (both, ("a b", both[1]), (both[0], ["O", "B-X"]), (["a", "b"], "O B-X")):
        assert sentence(Record({"tokens": words, "tags": tags}, "f", 1), DATA) == (["a", "b"], ["O", "B-X"])
    assert sentence(Record({"tokens": '["a", "b"]', "tags": "[0, 1]"}, "f", 1), DATA) == (["a", "b"], [0, 1])
    assert sentence(Record({"tokens": "[ 1 ]", "tags": "O O O"}, "f", 1), DATA)[0] == ["[", "1", "]"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"tokens": ["a"], "tags": ["O", "O"]}, "1 words and 2 tags"), ({"tokens": [], "tags": []}, "tokens is"),
     ({"tokens": 3, "tags": 3}, "tokens is '3'; a list that is not empty"),
     ({"tokens": ["a", 1], "tags": ["O", "O"]}, "the word 1"), ({"tokens": ["a"]}, "no field 'tags'"),
     ({"tokens": ["a", "zb"], "tags": ["O", "O"]}, "character 0, 'z' is not in the vocabulary"),
     ({"tokens": ["a"], "tags": ["B-X"]}, "tags: 'B-X' is no label"),
     ({"tokens": ["a"], "tags": [["O"]]}, r"tags has \['O'\]; the name or"),
     ({"tokens": "['a']", "tags": "['O']"}, r"tags is \['O'\], text that is not JSON .*; its JSON, as json.dumps"),
     ({"tokens": "['a']", "tags": ["O"]}, r"tokens is \['a'\], text that is not JSON"),
     ({"tokens": r'["\ud800"]', "tags": ["O"]}, "tokens is .*, text that is not JSON")],
    ids=["lengths", "empty", "no list", "number", "absent", "character", "unknown", "list", "Python", "words", "half a pair"],
)  # fmt: skip
def test_refusals(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=f"f: line 1: {words}"):
        make_examples("tag", [Record(fields, "f", 1)], open_tokenizer("char", ["ab"]), DATA, names=("O", "B-PER"))


@pytest.mark.parametrize(("train", "use"), [(True, "learned"), (False, "judged")])
def test_words_that_are_cut_off_are_told_of(train: bool, use: str) -> None:
    """Or a span_f1 of the beginnings of sentences would be taken for that of all."""
    tokenizer = open_tokenizer("char", ["".join(words) for words, _ in SENTENCES])
    with pytest.warns(UserWarning, match=rf"3 of 7 words have no token within data\.seq_len 12: their tags are not {use}"):
        examples = make_examples("tag", records(), tokenizer, DataConfig(path="x", seq_len=12), train=train)
    assert (examples.at(0, 0)[1] != IGNORED).sum() == 2


@pytest.mark.parametrize("tag", ["O", 0])
def test_one_tag_alone_teaches_nothing(tag: object) -> None:
    some = [Record({"tokens": ["a", "b"], "tags": [tag, tag]}, "f", 1)]
    with pytest.raises(InputError, match=r"f: tags: only the label (O|LABEL_0); two labels at least"):
        find_objective("tag").names(some, DATA)
    assert find_objective("tag").names(some, DATA, ("O", "LABEL_1")) == ("O", "LABEL_1")  # of a model that knows more


def test_a_list_is_no_tag() -> None:
    with pytest.raises(InputError, match="f: line 1: tags has"):
        find_objective("tag").names([Record({"tokens": ["a"], "tags": [["O"]]}, "f", 1)], DATA)
