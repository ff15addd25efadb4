"""SuperGLUE's MultiRC, ReCoRD and WSC: their files as they are published, and the numbers that they are judged by."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelcenter.data.config import DataConfig
from modelcenter.data.loader import Loader
from modelcenter.data.objective import make_examples, texts_of
from modelcenter.data.objectives.choice import Choices
from modelcenter.data.objectives.coreference import Marked
from modelcenter.data.read import read_records
from modelcenter.data.record import Record
from modelcenter.data.tokenizer import Tokenizer
from modelcenter.data.tokenizer_open import open_tokenizer
from modelcenter.errors import InputError
from modelcenter.layers.output import Output
from modelcenter.metrics import labels, texts
from modelcenter.train.evaluate import Evaluation

PARTY = "Susan wanted to have a birthday party. She called all of her friends. Her first friend could not go as she was sick."
MULTIRC = {  # the forms of the benchmark's files, with examples like those of its paper's table 2
    "idx": 0, "version": 1.1,
    "passage": {"text": PARTY, "questions": [
        {"question": "Did Susan's sick friend recover?", "idx": 0, "answers": [
            {"text": "Yes, she recovered", "idx": 0, "label": 1}, {"text": "No", "idx": 1, "label": 0},
            {"text": "Yes", "idx": 2, "label": 1}]},
        {"question": "Who was called?", "idx": 1, "answers": [
            {"text": "all friends", "idx": 3, "label": 1}, {"text": "nobody", "idx": 4, "label": 0}]},
    ]},
}  # fmt: skip
VOTE = "Puerto Rico voted for statehood. Only Congress decides, in the US.\n@highlight\nPuerto Rico voted on Sunday"
ENTITIES = [(0, 10), (38, 45), (63, 64), (78, 88)]
RECORD = {
    "source": "CNN", "idx": 7,
    "passage": {"text": VOTE, "entities": [{"start": a, "end": b} for a, b in ENTITIES]},
    "qas": [
        {"query": "They did not vote in the @placeholder for a president", "idx": 70,
         "answers": [{"start": 63, "end": 64, "text": "US"}]},
        {"query": "@placeholder is to be a state", "idx": 71, "answers": [
            {"start": 0, "end": 10, "text": "Puerto Rico"}, {"start": 78, "end": 88, "text": "Puerto Rico"}]},
    ],
}  # fmt: skip
WSC = {
    "text": "Mark told Pete many lies about himself, which Pete included in his book. He should have been more truthful.",
    "idx": 4, "label": False, "target": {"span1_index": 0, "span1_text": "Mark", "span2_index": 13, "span2_text": "He"},
}  # fmt: skip
DATA = DataConfig(path="x", seq_len=256)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    records = [Record(fields, "f", 1) for fields in (MULTIRC, RECORD)]
    marked = texts_of("coreference", [Record(WSC, "f", 1)], DATA)
    return open_tokenizer("roberta:300", [*texts_of("choice", records, DATA), *marked])


def of(fields: dict[str, Any], tokenizer: Tokenizer, folder: Path, objective: str = "choice") -> Any:
    (folder / "val.jsonl").write_text(json.dumps(fields) + "\n")
    return make_examples(objective, read_records(str(folder / "val.jsonl")), tokenizer, DATA, train=False)


def shown(examples: Any, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    return [(tokenizer.decode(ids), label) for ids, _, label in (examples.at(0, k) for k in range(len(examples)))]


def test_multirc(tokenizer: Tokenizer, tmp_path: Path) -> None:
    examples = of(MULTIRC, tokenizer, tmp_path)
    sick, called = "Did Susan's sick friend recover?", "Who was called?"
    assert shown(examples, tokenizer) == [
        (f"{PARTY}{sick} Yes, she recovered", 1), (f"{PARTY}{sick} No", 0), (f"{PARTY}{sick} Yes", 1),
        (f"{PARTY}{called} all friends", 1), (f"{PARTY}{called} nobody", 0)]  # fmt: skip
    assert examples.names == ("wrong", "right") and examples.of == [0, 0, 0, 1, 1]
    flat = [{"context": PARTY, **question} for question in MULTIRC["passage"]["questions"]]
    flat[1]["answers"] = json.dumps(flat[1]["answers"])  # as a table holds them
    plain = make_examples("choice", [Record(fields, "f", 1) for fields in flat], tokenizer, DATA)
    assert shown(plain, tokenizer) == shown(examples, tokenizer) and plain.questions == examples.questions


def test_record(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """An entity's end is its last character; one that is named twice is one candidate."""
    examples = of(RECORD, tokenizer, tmp_path)
    assert [q.choices for q in examples.questions] == [["Puerto Rico", "Congress", "US"]] * 2
    assert shown(examples, tokenizer)[:3] == [
        (f"{VOTE}They did not vote in the {who} for a president", right)
        for who, right in (("Puerto Rico", 0), ("Congress", 0), ("US", 1))]  # fmt: skip
    assert [label for _, label in shown(examples, tokenizer)[3:]] == [1, 0, 0]
    assert examples.references == [["US"], ["Puerto Rico", "Puerto Rico"]]


@pytest.mark.parametrize("fields", [MULTIRC, RECORD], ids=["multirc", "record"])
def test_a_vocabulary_is_made_of_all_that_is_read(fields: dict[str, Any]) -> None:
    """Of each passage as of the answers: by characters nothing else could be told."""
    records = [Record(fields, "f", 1)]
    made = open_tokenizer("char", texts_of("choice", records, DATA))
    assert make_examples("choice", records, made, DATA).at(0, 0)[0].tolist()


class Told(nn.Module):
    """A model that says these scores, one row an example."""

    def __init__(self, scores: list[tuple[float, float]]) -> None:
        super().__init__()
        self.rows, self.weight = iter(torch.tensor(scores)), nn.Parameter(torch.zeros(1))

    def forward(self, labels: torch.Tensor, **_: Any) -> Output:
        return Output(loss=self.weight.sum(), logits=torch.stack([next(self.rows) for _ in labels]))


def judge(examples: Choices, scores: list[tuple[float, float]], *metrics: str) -> dict[str, float]:
    evaluation = Evaluation(Loader(examples, examples.collate, 2), "choice", metrics)
    assert evaluation.size == {"eval_examples": len(scores), "eval_questions": 2}
    return evaluation(Told(scores))


def test_multirc_is_judged_by_question(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of five answers four rightly: 2 found of 3 right ones, and one question of two whole."""
    said = [(0.0, 1.0), (1.0, 0.0), (1.0, 0.5), (0.1, 0.2), (0.9, 0.1)]
    found = judge(of(MULTIRC, tokenizer, tmp_path), said, "f1", "question_em")
    assert found["eval_f1"] == pytest.approx(0.8) and found["eval_question_em"] == 0.5 and found["eval_accuracy"] == 0.8


def test_record_is_judged_by_the_likeliest_entity(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """However likely all are: the third of the first query, though its score is not the highest, and one that is wrong."""
    said = [(3.0, 2.0), (5.0, 4.5), (1.0, 0.9), (0.0, 1.0), (0.0, 1.5), (1.0, 0.0)]
    examples = of(RECORD, tokenizer, tmp_path)
    found = judge(examples, said, "squad_f1", "squad_em")
    assert examples.answers(np.array(said)[:, None]) == ["US", "Congress"]
    assert found["eval_squad_em"] == 0.5 == found["eval_squad_f1"]


def test_numbers_of_multirc_as_scikit_learn() -> None:
    """F1a: of all answers; EM: the subset accuracy of questions that have as many answers each."""
    sklearn = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for n in (1, 3, 6):
        wanted = random.integers(0, 2, (50, n))
        found = np.where(random.random((50, n)) < 0.8, wanted, 1 - wanted)
        assert labels.question_em(found.tolist(), wanted.tolist()) == pytest.approx(sklearn.accuracy_score(wanted, found))
        assert labels.f1(found.ravel(), wanted.ravel()) == pytest.approx(sklearn.f1_score(wanted.ravel(), found.ravel()))


def test_numbers_of_record() -> None:
    """By hand: of words, articles, case and punctuation aside, against the answer that suits best."""
    found, wanted = ["the U.S. Congress", "Rico", "Paris"], [["US Congress"], ["Puerto Rico", "Puerto"], ["Rome"]]
    assert texts.squad_em(found, wanted) == pytest.approx(1 / 3)
    assert texts.squad_f1(found, wanted) == pytest.approx((1 + 2 / 3 + 0) / 3)


CLUE = "这时候放在床上枕头旁边的手机响了，我感到奇怪，因为欠费已被停机两个月，现在它突然响了。"
SPANS = {
    "as published": (WSC, WSC["text"].replace("Mark", "* Mark *").replace("He", "# He #")),
    "pronoun first": ({"text": "As he left, Tom's boy ate.", "target": {
        "span1_index": 3, "span1_text": "Tom's boy", "span2_index": 1, "span2_text": "he"}}, "As # he # left, * Tom's boy * ate."),
    "punctuation": ({"text": 'He said "it" to her.', "target": {
        "span1_index": 4, "span1_text": "her", "span2_index": 2, "span2_text": "it"}}, 'He said "# it #" to * her *.'),
    "another case": ({"text": "The boy saw it.", "target": {
        "span1_index": 0, "span1_text": "the boy", "span2_index": 3, "span2_text": "it."}}, "* The boy * saw # it #."),
    "one too low": ({"text": "The boy, said Tom, saw him.", "target": {
        "span1_index": 2, "span1_text": "Tom", "span2_index": 5, "span2_text": "him"}}, "The boy, said * Tom *, saw # him #."),
    "spaces": ({"text": "It is when they scold him.", "target": {
        "span1_index": 5, "span1_text": "him", "span2_index": 3, "span2_text": "theyscold"}}, "It is when # they scold # * him *."),
    "words between": ({"text": "Both Lev Kamenev and Grigory Zinoviev said it.", "target": {"span1_index": 1,
        "span1_text": "Kamenev and Zinoviev", "span2_index": 7, "span2_text": "it"}},
        "Both * Lev Kamenev and * Grigory Zinoviev said # it #."),
    "not there": ({"text": "Then the man saw him.", "target": {
        "span1_index": 0, "span1_text": "the man", "span2_index": 1, "span2_text": "he"}}, None),
    "the beginning of a word": ({"text": "Then the man saw him.", "target": {
        "span1_index": 0, "span1_text": "the", "span2_index": 4, "span2_text": "hi"}}, None),
    "another": ({"text": "Then the man saw him.", "target": {
        "span1_index": 1, "span1_text": "the dog", "span2_index": 4, "span2_text": "him"}}, None),
    "inside a word": ({"text": "Then the man saw him.", "target": {
        "span1_index": 0, "span1_text": "he", "span2_index": 3, "span2_text": "him"}}, None),
    "no letter": ({"text": "Then the man saw him.", "target": {
        "span1_index": 0, "span1_text": "...", "span2_index": 4, "span2_text": "him"}}, None),
    "other words": ({"text": "They scold him.", "target": {
        "span1_index": 2, "span1_text": "the man", "span2_index": 0, "span2_text": "theyscold"}}, None),
    "characters": ({"text": CLUE, "target": {"span1_index": 5, "span1_text": "床", "span2_index": 37, "span2_text": "它"}},
                   CLUE.replace("床", "* 床 *").replace("它", "# 它 #")),
    "characters and spaces": ({"text": "小明 说 他 会 来，小红 不 信。", "target": {
        "span1_index": 0, "span1_text": "小明", "span2_index": 5, "span2_text": "他"}}, "* 小明 * 说 # 他 # 会 来，小红 不 信。"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPANS)
def test_wsc_marks_both_spans(what: str) -> None:
    fields, wanted = SPANS[what]
    if wanted is None:
        with pytest.raises(InputError, match=r"f: line 3: span. is '.*' at \d, where it does not stand; words of the text"):
            list(texts_of("coreference", [Record(fields, "f", 3)], DATA))
    else:
        assert list(texts_of("coreference", [Record(fields, "f", 1)], DATA)) == [wanted]


def test_wsc(tokenizer: Tokenizer) -> None:
    examples = make_examples("coreference", [Record(WSC | {"label": label}, "f", 1) for label in (False, True)], tokenizer, DATA)
    assert isinstance(examples, Marked) and [label for _, label in shown(examples, tokenizer)] == [0, 1]
    assert shown(examples, tokenizer)[0][0].startswith("* Mark * told") and "# He #" in shown(examples, tokenizer)[0][0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"passage": {"text": PARTY}}, "passage is"),
     ({"passage": {"text": PARTY, "questions": [{"answers": []}]}}, "a question is None"),
     ({"passage": {"text": PARTY, "questions": []}}, None),
     ({"passage": {"text": PARTY, "questions": [7]}}, "a question is None; text, in an object with its answers"),
     (RECORD | {"passage": {"text": PARTY, "entities": [{"start": float("inf"), "end": 2}]}}, "entities or answers are missing"),
     (MULTIRC | {"passage": {"text": PARTY, "questions": [{"question": "q"}]}}, "answers is None; a list of {text, label}"),
     (RECORD | {"passage": {"text": VOTE, "entities": []}}, "0 entities for the query 'They did not vote"),
     (RECORD | {"qas": [{"query": "@placeholder"}]}, "entities or answers are missing"),
     (RECORD | {"qas": [{"query": "who?", "answers": []}]}, "3 entities for the query 'who\\?'"),
     ({"context": PARTY, "question": "q", "answers": [{"text": "a", "label": 2}]}, "answers is"),
     ({"context": PARTY, "question": "q"}, "no field 'answers'")],
    ids=["questions", "question", "none", "number", "infinity", "labels", "entities", "answers", "place", "label", "key"],
)  # fmt: skip
def test_refusals(tokenizer: Tokenizer, fields: dict[str, Any], words: str | None) -> None:
    with pytest.raises(InputError, match=f"f: line 1: .*{words}" if words else "f: objective: choice finds no example in 1 record"):
        make_examples("choice", [Record(fields, "f", 1)], tokenizer, DATA)
