"""Extractive question answering: windows over a context, and the answer that their scores indicate. w windows, s tokens.

A record is one question (`context`, `question`, `answers` with `text` and `answer_start`, as in the data set squad), or a nested
record of SQuAD's own files: an article with `paragraphs`, or a whole file with `data`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..collate import Batch, nth, runs, stack, stack_mask, tensor
from ..config import DataConfig
from ..examples import Examples
from ..objective import Asked, Objective, register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import filler

if TYPE_CHECKING:
    from torch import Tensor

    from ..encode import Reader
    from ..tokenizer import Tokenizer

BEST = 20  # starts and ends of a window that are tried with one another, as in transformers' example
LONGEST = 30  # tokens of an answer


@register
class QA(Objective):
    name = task = "qa"
    keys = ("context_key", "question_key", "answers_key", "stride")
    metrics = ("squad_em", "squad_f1")
    of = ("loss", "answers")
    packs = False

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        return (text for question in questions(record, data) for text in (question.text, question.context))

    def targets(self, labels: "Tensor") -> "Tensor":
        return labels[..., 0]  # a start and an end are one answer

    def sample(self, batch: Batch, tokenizer: "Tokenizer", names: Sequence[str] | None) -> str:
        """The answer stands in [[ ]]."""
        ids, (start, end) = nth(batch, 0), batch["labels"][0].tolist()
        return runs(ids, [start <= k <= end for k in range(len(ids))], tokenizer)

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> "Questions":
        return Questions(records, read, data)


class Question(NamedTuple):
    text: str
    context: str
    answers: list[str]
    start: int  # of the first answer, in characters; -1: there is none


class Questions(Asked, Examples):
    """Windows of seq_len tokens: the question first, then as much of the context as fits. The next window goes back by `stride`.

    A label is the (first, last) token of the answer; both are the first token of the window if the answer is not whole in it.
    """

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        tokenizer = read.tokenizer
        self.size, self.fill, self.ids, self.segments = data.seq_len, filler(tokenizer), Ragged(), Ragged()
        self.starts, self.stops = Ragged(), Ragged()  # characters of each token in the context; -1 where it is none of it
        self.questions: list[Question] = []
        self.of: list[int] = []  # which question a window is of
        self.labels: list[tuple[int, int]] = []
        for record in records:
            for question in questions(record, data):
                with read.naming(record):
                    lone = len(tokenizer.encode_pair(question.text, "")[0])
                    if data.seq_len <= lone + data.stride:
                        wanted = f"more than {lone + data.stride}, or a smaller data.stride than {data.stride}"
                        record.refuse(f"data.seq_len {data.seq_len} with a question of {lone} tokens", wanted)
                    windows = list(tokenizer.windows(question.text, question.context, data.seq_len, data.stride))
                for ids, segments, starts, stops in windows:
                    if not read.holds(ids):
                        read.refuse(record, ids)
                    for rows, row in ((self.ids, ids), (self.segments, segments), (self.starts, starts), (self.stops, stops)):
                        rows.append(row)
                    self.of.append(len(self.questions))
                    self.labels.append(span(question, starts, stops))
                self.questions.append(question)
        self.lengths: NDArray[np.int64] = np.diff(self.ids.bounds)
        self.segmented = read.segmented
        self.may_be_none = any(question.start < 0 for question in self.questions)

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids, tuple[int, int]]:
        """(ids, segments, label) of a window."""
        return self.ids[index], self.segments[index], self.labels[index]

    def collate(self, examples: list[tuple[Ids, Ids, tuple[int, int]]]) -> Batch:
        """input_ids, attention_mask and, where the tokenizer has them, token_type_ids (b, s); labels (b, 2)."""
        ids, segments, labels = zip(*examples, strict=True)
        batch = {"input_ids": stack(ids, self.fill), "attention_mask": stack_mask(ids), "labels": tensor(labels)}
        return batch | ({"token_type_ids": stack(segments, 0)} if self.segmented else {})

    @property
    def references(self) -> list[list[str]]:
        return [question.answers for question in self.questions]

    def answers(self, scores: Sequence[NDArray[np.float64]]) -> list[str]:
        """The answer to each question, of the scores (s, 2) of start and end of every window in order.

        The best sum of a start and an end in the context, the end not before it nor `LONGEST` tokens on; where some questions have
        no answer, none if the first token's sum is higher in every window.
        """
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(self.questions)
        none = [np.inf] * len(self.questions)
        for index, both in enumerate(scores):
            start, end = both.T
            number, starts, stops = self.of[index], self.starts[index], self.stops[index]
            start, end = start[: len(starts)], end[: len(starts)]
            none[number] = min(none[number], float(start[0] + end[0]))
            first, last = (np.where(starts >= 0, side, -np.inf) for side in (start, end))
            for a in np.argsort(-first)[:BEST]:
                for b in np.argsort(-last)[:BEST]:
                    value = float(first[a] + last[b])
                    if a <= b < a + LONGEST and value > best[number][0]:
                        best[number] = (value, self.questions[number].context[starts[a] : stops[b]])
        return ["" if self.may_be_none and none[n] > value else text for n, (value, text) in enumerate(best)]


def span(question: Question, starts: Sequence[int], stops: Sequence[int]) -> tuple[int, int]:
    """The (first, last) tokens that hold the answer, or (0, 0) if the window does not hold it whole."""
    if question.start < 0:
        return 0, 0
    begin, end = question.start, question.start + len(question.answers[0])
    if not any(0 <= at <= begin for at in starts) or max(stops) < end:
        return 0, 0
    if not any(start < end and stop > begin for start, stop in zip(starts, stops, strict=True)):
        return 0, 0  # nothing but what the tokenizer leaves out, such as characters without width
    # a character may be several tokens, bytes of it, which all stand at its place: the answer is from the first to the last of them
    return next(k for k, at in enumerate(stops) if at > begin), max(k for k, at in enumerate(starts) if 0 <= at < end)


def questions(record: Record, data: DataConfig) -> Iterator[Question]:
    """Those of a record, which is one, or articles with paragraphs."""
    nested = record.fields.get("data")
    articles = nested if isinstance(nested, list) and nested else [record.fields]
    if not isinstance(articles[0], dict) or "paragraphs" not in articles[0]:
        yield question_of(record, record.fields, record.text(data.context_key, "data.context_key"), data)
        return
    for article in articles:
        for paragraph in within(record, article, "paragraphs"):
            for asked in within(record, paragraph, "qas"):
                if not isinstance(context := paragraph.get("context"), str) or not isinstance(asked, dict):
                    record.refuse(f"a paragraph is {str(paragraph)[:60]}", "a context, and qas that are objects")
                yield question_of(record, asked, context, data)


def within(record: Record, part: Any, key: str) -> list[Any]:
    """What stands under `key` in a part of SQuAD's nesting."""
    found = part.get(key) if isinstance(part, dict) else None
    if not isinstance(found, list):
        record.refuse(f"{key} is {str(found)[:60]}", "as SQuAD's files nest them: data, paragraphs, qas")
    return found


def question_of(record: Record, fields: dict[str, Any], context: str, data: DataConfig) -> Question:
    """Its answers are a list of {text, answer_start}, or one such object of two lists; or the JSON of either."""
    asked = replace(record, fields=fields)
    text, answers = asked.get(data.question_key, "data.question_key"), asked.get(data.answers_key, "data.answers_key")
    answers = record.loaded(data.answers_key, answers, "a list of {text, answer_start}, or its JSON")
    try:
        if isinstance(answers, dict):
            answers = [{"text": t, "answer_start": s} for t, s in zip(answers["text"], answers["answer_start"], strict=True)]
        found = [(str(a["text"]), int(a["answer_start"])) for a in answers or ()]
    except (KeyError, TypeError, ValueError, OverflowError):
        record.refuse(f"{data.answers_key} is {str(answers)[:60]}", "a list of {text, answer_start}")
    if not isinstance(text, str):
        record.refuse(f"{data.question_key} is {str(text)[:60]}", "text (data.question_key names the field)")
    found = [(said, at) for said, at in found if said.strip()]  # an empty text is how some data say that there is none
    if found and (found[0][1] < 0 or context[found[0][1] : found[0][1] + len(found[0][0])] != found[0][0]):
        record.refuse(f"the answer {found[0][0][:40]!r} does not stand at character {found[0][1]}", "its answer_start")
    return Question(text, context, [t for t, _ in found], found[0][1] if found else -1)
