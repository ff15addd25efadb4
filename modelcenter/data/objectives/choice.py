"""Answers to a question about a text, each right or wrong: which of them are right, and which is the best.

A record is one question (`context`, `question`, `answers` with `text` and `label`), or a nested record of SuperGLUE's own files:
MultiRC's passage with its questions (Khashabi et al., 2018), or ReCoRD's passage with its entities and its queries, in which an
entity replaces @placeholder (Zhang et al., 2018). Each answer is judged separately, as in the baselines of Wang et al., 2019.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config import DataConfig
from ..objective import Asked, Names, Objective, register
from ..record import Record
from .classify import Labelled

if TYPE_CHECKING:
    from ..encode import Reader

PLACE = "@placeholder"


@register
class Choice(Objective):
    name = "choice"
    task = "classify"
    keys = ("context_key", "question_key", "answers_key")
    metrics = ("accuracy",)
    of = ("loss", "classes", "questions", "answers")

    def names(self, records: Sequence[Record], data: DataConfig, known: Names = ()) -> Names | None:
        return ("wrong", "right")

    def settle(self, config: Any) -> Mapping[str, Any]:
        config.single_label()
        return {}

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        for asked in questions(record, data):
            yield asked.context
            yield from map(asked.filled, asked.choices)

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Choices":
        return Choices(records, read, data)


class Question(NamedTuple):
    context: str
    text: str
    choices: list[str]
    right: list[bool]  # of each of them
    answers: list[str]  # what counts as right, as it is written elsewhere too

    def filled(self, choice: str) -> str:
        """The question with an answer: in place of the placeholder, or behind the question."""
        return self.text.replace(PLACE, choice) if PLACE in self.text else f"{self.text} {choice}"


class Choices(Labelled, Asked):
    """The context and the question with one of its answers; class 1 is a right one. The answers to a question stand side by
    side."""

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        self.questions: list[Question] = []
        self.of: list[int] = []
        super().__init__(records, read, data)

    def rows(self, record: Record, data: DataConfig) -> Iterator[tuple[str, str | None, int]]:
        for question in questions(record, data):
            for choice, right in zip(question.choices, question.right, strict=True):
                self.of.append(len(self.questions))
                yield question.context, question.filled(choice), int(right)
            self.questions.append(question)

    @property
    def references(self) -> list[list[str]]:
        return [question.answers for question in self.questions]

    def answers(self, scores: Sequence[NDArray[np.float64]]) -> list[str]:
        """The answer to each question that is the likeliest to be right, of the scores (1, 2) of every example in order."""
        chosen = [int(np.argmax([right - wrong for ((wrong, right),) in some])) for some in self.parted(scores)]
        return [question.choices[k] for question, k in zip(self.questions, chosen, strict=True)]


def questions(record: Record, data: DataConfig) -> Iterator[Question]:
    """The questions of a record, which is one question, or a passage with several."""
    passage = record.fields.get("passage")
    if not isinstance(passage, dict):
        context, text = record.text(data.context_key, "data.context_key"), record.text(data.question_key, "data.question_key")
        yield judged(record, context, text, record.get(data.answers_key, "data.answers_key"), data.answers_key)
        return
    queries = passage.get("questions", record.fields.get("qas"))
    if not isinstance(passage.get("text"), str) or not isinstance(queries, list):
        record.refuse(f"passage is {str(passage)[:60]}", "MultiRC's text and questions, or ReCoRD's text and entities, with qas")
    for asked in queries:
        said = asked.get("question" if "questions" in passage else "query") if isinstance(asked, dict) else None
        if not isinstance(said, str):
            record.refuse(f"a question is {str(said)[:60]}", "text, in an object with its answers")
        if "questions" in passage:
            yield judged(record, passage["text"], said, asked.get("answers"), "answers")
        else:
            yield filled_in(record, passage, said, asked.get("answers"))


def judged(record: Record, context: str, text: str, answers: Any, key: str) -> Question:
    """A question whose answers each say whether they are right."""
    answers = record.loaded(key, answers, "a list of {text, label}, or its JSON")
    try:
        choices, right = [a["text"] for a in answers], [{0: False, 1: True}[a["label"]] for a in answers]
    except (KeyError, TypeError):
        record.refuse(f"{key} is {str(answers)[:60]}", "a list of {text, label}, each label 0 or 1")
    if not choices or not all(isinstance(choice, str) for choice in choices):
        record.refuse(f"{key} is {str(answers)[:60]}", "one answer at least, each with its text")
    return Question(context, text, choices, right, [choice for choice, is_right in zip(choices, right, strict=True) if is_right])


def filled_in(record: Record, passage: Mapping[str, Any], text: str, answers: Any) -> Question:
    """A query whose possible answers are the entities of the passage, each tried once, however often it is named."""
    try:
        ends = [(int(entity["start"]), int(entity["end"]) + 1) for entity in passage["entities"]]  # the end belongs to it
        wanted = [str(a["text"]) for a in answers]
    except (KeyError, TypeError, ValueError, OverflowError):
        record.refuse("entities or answers are missing", "ReCoRD's entities {start, end} and answers {text}")
    choices = list(dict.fromkeys(passage["text"][start:end] for start, end in ends))
    if not choices or PLACE not in text:
        record.refuse(f"{len(choices)} entities for the query {text[:40]!r}", f"one entity at least, and {PLACE} in the query")
    return Question(passage["text"], text, choices, [choice in wanted for choice in choices], wanted)
