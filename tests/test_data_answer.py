"""Question answering: windows, labels and answers as transformers' tokenizers and SQuAD's files have them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers.processors import RobertaProcessing

from modelcenter.data.config import DataConfig
from modelcenter.data.objective import find_objective, make_examples, texts_of
from modelcenter.data.objectives import qa
from modelcenter.data.objectives.qa import Questions
from modelcenter.data.read import read_records
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.errors import InputError

CONTEXT = "The cat sat on the mat in Paris. A dog ran to Rome, and then it slept. The bird flew from Oslo to Bergen."
ASKED = [("Where did the cat sit?", "Paris"), ("Where did the dog run?", "Rome"), ("Where to did the bird fly?", "Bergen")]
DATA = DataConfig(path="x", seq_len=48, stride=8)


def records(*, none: bool = False) -> list[Record]:
    fields = [{"context": CONTEXT, "question": q, "answers": {"text": [a], "answer_start": [CONTEXT.index(a)]}} for q, a in ASKED]
    fields += [{"context": CONTEXT, "question": "Where is the fox?", "answers": {"text": [], "answer_start": []}}] if none else []
    return [Record(f, "f", n) for n, f in enumerate(fields, 1)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer("roberta:290", [*texts_of("qa", records(), DATA)] * 2)


def test_windows_show_all_of_the_text(tokenizer: Tokenizer) -> None:
    """Each begins `stride` tokens before the end of the one before it, and the last ends where the text does."""
    for question, _ in ASKED:
        shown = [[span for span in zip(starts, stops, strict=True) if span[0] >= 0]
                 for _, _, starts, stops in tokenizer.windows(question, CONTEXT, 48, 8)]  # fmt: skip
        assert len(shown) > 1 and all(after[:8] == before[-8:] for before, after in pairwise(shown))
        assert (shown[0][0][0], shown[-1][-1][1]) == (0, len(CONTEXT))


def test_a_word_has_all_its_letters_where_ranges_leave_spaces_out() -> None:
    """As those of RoBERTa's own tokenizer do, which put the same letters into each range as stand in the token."""
    made = open_tokenizer("roberta:400", [*texts_of("qa", records(), DATA)] * 9)
    ends = ((made.special[role], made.id(role)) for role in ("sep", "cls"))
    made.raw.post_processor = RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    data = DataConfig(path="x", seq_len=24, stride=5)
    examples = make_examples("qa", records(), made, data)
    assert isinstance(examples, Questions) and len(examples) > 6
    for k in range(len(examples)):
        for i, a, b in zip(examples.ids[k].tolist(), examples.starts[k], examples.stops[k], strict=True):
            assert a < 0 or CONTEXT[a:b] == made.decode([i]).strip()
    assert examples.answers(scores(examples, 5.0)) == [a for _, a in ASKED]


@pytest.mark.skipif(tokenizers.__version__ == "0.23.2", reason="this release of tokenizers loses what is beyond the first windows")
def test_windows_are_those_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for question, _ in ASKED:
        found = list(tokenizer.windows(question, CONTEXT, 48, 8))
        wanted = theirs(question, CONTEXT, truncation="only_second", max_length=48, stride=8, return_overflowing_tokens=True,
                        return_offsets_mapping=True)  # fmt: skip
        assert [ids for ids, *_ in found] == wanted["input_ids"] and len(found) > 1
        for k, (_, _, starts, stops) in enumerate(found):
            places = [o if s == 1 else (-1, -1) for o, s in zip(wanted["offset_mapping"][k], wanted.sequence_ids(k), strict=True)]
            assert list(zip(starts, stops, strict=True)) == places


def test_a_table_holds_the_json_of_answers(tokenizer: Tokenizer) -> None:
    plain = records(none=True)
    told = [replace(record, fields={**record.fields, "answers": json.dumps(record.fields["answers"])}) for record in plain[:3]]
    told += [replace(plain[3], fields={**plain[3].fields, "answers": ""})]
    found, wanted = (make_examples("qa", some, tokenizer, DATA) for some in (told, plain))
    assert isinstance(found, Questions) and isinstance(wanted, Questions) and found.questions == wanted.questions
    pandas = "{'text': array(['Paris'], dtype=object), 'answer_start': array([27])}"  # as to_csv writes them
    with pytest.raises(InputError, match=r"f: line 1: answers is \{'text': .*, text that is not JSON .*; a list of \{text, "):
        make_examples("qa", [replace(plain[0], fields={**plain[0].fields, "answers": pandas})], tokenizer, DATA)


@pytest.mark.parametrize("size", [48, 50, 51])  # of 50 tokens a window ends within an answer, and of 51 one begins in it
def test_labels_are_the_answer_where_a_window_holds_it_whole(size: int, tokenizer: Tokenizer) -> None:
    examples = make_examples("qa", records(none=True), tokenizer, replace(DATA, seq_len=size))
    assert isinstance(examples, Questions)
    held = []
    for index, number in enumerate(examples.of):
        ids, _, (first, last) = examples.at(0, index)
        text = tokenizer.decode(ids[first : last + 1]).strip()
        starts = examples.starts[index]
        begin = examples.questions[number].start
        whole = begin >= 0 and begin >= min(s for s in starts if s >= 0) and (
            begin + len(examples.questions[number].answers[0]) <= max(examples.stops[index]))  # fmt: skip
        assert (text == examples.questions[number].answers[0]) if whole else (first, last) == (0, 0)
        held += [number] if whole else []
    assert set(held) == {0, 1, 2} and len(examples) > len(held)
    batch = examples.collate([examples.at(0, 0)])
    assert batch["labels"].shape == (1, 2) and "[[" in find_objective("qa").sample(batch, tokenizer, None)


@pytest.mark.parametrize("answer", ["国", "龘国"], ids=["one", "two"])
def test_a_character_of_several_tokens_is_an_answer(answer: str) -> None:
    """Bytes of a character all stand at its place: the label began with the last of them and ended with the first, which no
    answer does."""
    made, context = open_tokenizer("roberta:270", ["ab"]), "a龘国b"
    fields = {"context": context, "question": "a", "answers": {"text": [answer], "answer_start": [context.index(answer)]}}
    examples = make_examples("qa", [Record(fields, "f", 1)], made, DATA)
    ids, _, (first, last) = examples.at(0, 0)
    assert isinstance(examples, Questions) and made.decode(ids[first : last + 1]) == answer
    assert examples.answers(scores(examples, 9.0)) == [answer]


@pytest.mark.parametrize(("answer", "answers"), [(" ", []), ("\u200b", ["\u200b"])], ids=["space", "no width"])
def test_an_answer_of_no_token_is_none(answer: str, answers: list[str]) -> None:
    """Its label began behind its end."""
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = tokenizers.normalizers.BertNormalizer(), tokenizers.pre_tokenizers.Whitespace()
    fields = {"context": "a \u200b a", "question": "a", "answers": {"text": [answer], "answer_start": [1 + (answer != " ")]}}
    examples = make_examples("qa", [Record(fields, "f", 1)], Tokenizer(raw, {}), DataConfig(path="x", seq_len=9, stride=1))
    assert isinstance(examples, Questions) and examples.labels == [(0, 0)] and examples.references == [answers]


def scores(examples: Questions, right: float, none: float = 0.0) -> list[np.ndarray]:
    """High where the labels are, and higher where an end is before its start, and in the question."""
    out = []
    for index in range(len(examples)):
        _, _, (first, last) = examples.at(0, index)
        start, end = np.zeros(60), np.zeros(60)
        start[first], end[last] = (none, none) if (first, last) == (0, 0) else (right, right)
        start[2], end[2] = 99, 99  # the question
        places = np.flatnonzero(examples.starts[index] >= 0)
        start[places[-1]] += 8
        end[places[0]] += 8
        out.append(np.stack((start, end), 1))
    return out


def test_the_best_answer_of_all_windows(tokenizer: Tokenizer) -> None:
    examples = make_examples("qa", records(), tokenizer, DATA)
    assert [a.strip() for a in examples.answers(scores(examples, 5.0))] == [a for _, a in ASKED]
    assert [a.strip() for a in examples.answers(scores(examples, 5.0, none=50.0))] == [a for _, a in ASKED]  # all have one
    examples = make_examples("qa", records(none=True), tokenizer, DATA)
    assert [a.strip() for a in examples.answers(scores(examples, 5.0, none=4.5))] == [*(a for _, a in ASKED), ""]


@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_answer_is_that_of_all_pairs(seed: int, none: bool, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores drawn at random, some of which are highest at the context's own first token."""
    monkeypatch.setattr(qa, "BEST", 1000)
    monkeypatch.setattr(qa, "LONGEST", 5)
    examples, random = make_examples("qa", records(none=none), tokenizer, DATA), np.random.default_rng(seed)
    assert isinstance(examples, Questions)
    told = [random.normal(0, 2, (60, 2)) for _ in range(len(examples))]
    firsts = [k for k in range(len(examples)) if 0 in examples.starts[k]]
    for k in firsts[: len(firsts) // 2 + 1]:
        told[k][examples.starts[k].tolist().index(0), 0] += 9
    wanted = []
    for number, question in enumerate(examples.questions):
        pairs, nulls = [], []
        for index in (k for k, of in enumerate(examples.of) if of == number):
            starts, stops, both = examples.starts[index], examples.stops[index], told[index]
            nulls.append(both[0].sum())
            places = np.flatnonzero(starts >= 0)
            pairs += [(both[a, 0] + both[b, 1], question.context[starts[a] : stops[b]])
                      for a in places for b in places if a <= b < a + qa.LONGEST]
        best, text = max(pairs)
        wanted.append("" if none and min(nulls) > best else text)
    assert examples.answers(told) == wanted and any(CONTEXT.startswith(text) for text in wanted if text)


def test_files_of_squad(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = [{"id": q, "question": q, "answers": [{"text": a, "answer_start": CONTEXT.index(a)}]} for q, a in ASKED]
    whole = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": asked}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(whole))
    examples = make_examples("qa", read_records(str(tmp_path / "dev.json")), tokenizer, DATA)
    flat = make_examples("qa", records(), tokenizer, DATA)
    assert examples.questions == flat.questions and examples.labels == flat.labels


@pytest.mark.parametrize("start", [-1, 0, CONTEXT.index("Paris")])
def test_an_empty_answer_is_none(start: int, tokenizer: Tokenizer) -> None:
    """As some tools write what cannot be answered: the token where it is said to start was taught."""
    fields = records()[0].fields | {"answers": {"text": [""], "answer_start": [start]}}
    examples = make_examples("qa", [Record(fields, "f", 1)], tokenizer, DATA)
    assert {*examples.labels} == {(0, 0)} and examples.may_be_none and examples.references == [[]]


def test_a_file_without_questions(tokenizer: Tokenizer) -> None:
    for nested in ({"paragraphs": []}, {"paragraphs": [{"context": CONTEXT, "qas": []}]}):
        with pytest.raises(InputError, match=r"^f: objective: qa finds no example in 1 record; one at least"):
            make_examples("qa", [Record(nested, "f", 1)], tokenizer, DATA)


def test_a_field_that_is_called_data_is_no_file_of_squads(tokenizer: Tokenizer) -> None:
    record = Record(records()[0].fields | {"data": [1, 2]}, "f", 1)
    assert make_examples("qa", [record], tokenizer, DATA).questions == make_examples("qa", records()[:1], tokenizer, DATA).questions


@pytest.mark.parametrize("key", ["question", "answers", "context"])
def test_a_field_under_another_name_is_not_taken_for_an_empty_one(key: str, tokenizer: Tokenizer) -> None:
    """Without a word a file of `answer` would have trained a model that finds none."""
    fields = dict(records()[0].fields)
    fields[f"{key}_"] = fields.pop(key)
    said = rf"f: line 1: no field '{key}'; did you mean '{key}_'\? \(data\.{key}_key names the field\)"
    with pytest.raises(InputError, match=said):
        make_examples("qa", [Record(fields, "f", 1)], tokenizer, DATA)
    if key != "context":
        asked = {name: value for name, value in fields.items() if name != "context"}
        nested = {"paragraphs": [{"context": fields["context"], "qas": [asked]}]}
        with pytest.raises(InputError, match=rf"no field '{key}'; did you mean '{key}_'\?"):
            make_examples("qa", [Record(nested, "f", 1)], tokenizer, DATA)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"answers": {"text": ["Rome"], "answer_start": [3]}}, "'Rome' does not stand at character 3"),
     ({"answers": {"text": ["Oslo"], "answer_start": [CONTEXT.index("Oslo") - len(CONTEXT)]}}, "'Oslo' does not stand at "),
     ({"answers": {"text": ["Rome"]}}, "answers is"), ({"question": 3}, "question is 3"), ({"context": None}, "context is null"),
     ({"paragraphs": 3}, "paragraphs is 3; as SQuAD's"), ({"paragraphs": [{"context": "a"}]}, "qas is None"),
     ({"paragraphs": ["a"]}, "qas is None"), ({"paragraphs": [{"context": "a", "qas": [1]}]}, "a paragraph is"),
     ({"paragraphs": [{"qas": [{}]}]}, "a paragraph is"),
     ({"answers": {"text": ["Rome"], "answer_start": [float("inf")]}}, "answers is")],
    ids=["place", "below 0", "starts", "question", "context", "paragraphs", "qas", "words", "numbers", "no context", "infinity"],
)  # fmt: skip
def test_refusals(tokenizer: Tokenizer, fields: dict[str, object], words: str) -> None:
    record = Record(records()[0].fields | fields, "f", 1)
    with pytest.raises(InputError, match=f"f: line 1: .*{words}"):
        make_examples("qa", [record], tokenizer, DATA)
    with pytest.raises(InputError, match=r"f: line 1: data\.seq_len 20 with a question of \d+ tokens; more than \d+, or a smaller"):
        make_examples("qa", records(), tokenizer, DataConfig(path="x", seq_len=20, stride=8))
