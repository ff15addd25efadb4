"""Language modelling: a stream of tokens in blocks, whole documents, or responses to prompts."""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...errors import refuse
from ..collate import IGNORED, Batch, stack
from ..config import DataConfig
from ..indexed import Tokens
from ..objective import Objective, register
from ..ragged import Ids, Ragged
from ..record import Record
from ..sequence import Sequences, behind, documents, filler, pieces

if TYPE_CHECKING:
    from torch import Tensor

    from ..encode import Reader


class Causal(Objective):
    """Position i predicts label i + 1, so nothing predicts the first label of a row."""

    task = "lm"
    metrics = ("perplexity",)

    def targets(self, labels: "Tensor") -> "Tensor":
        return labels[..., 1:]


@register
class LM(Causal):
    name = "lm"
    keys = ("text_key", "prompt_key", "response_key")

    def verify(self, data: DataConfig) -> None:
        if (data.prompt_key is None) != (data.response_key is None):
            key = "data.prompt_key" if data.prompt_key is None else "data.response_key"
            refuse(None, key, "absent", "prompt_key and response_key go together")

    def texts(self, record: Record, data: DataConfig) -> Iterator[str]:
        if data.response_key is None:
            yield record.text(data.text_key, "data.text_key")
        else:
            yield prompt_of(record, data)
            yield response_of(record, data)

    def examples(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> Sequences:
        if data.prompt_key is not None or data.response_key is not None:
            return Rows(records, read, data)
        found = documents(records, read, data, self.frame(read))
        return Documents(found, read, data) if data.packing else Blocks(found, read, data)


class Blocks(Sequences):
    """One stream of tokens, cut into blocks of seq_len.

    A block starts with the last token of the one before, so that each token except the stream's first is predicted once an epoch.
    In training the cuts move by an offset that is drawn for each epoch, in a ring over the stream's end, so that a token is seen in
    different contexts. The stream's first token, and what is past one turn of the ring, is ignored; so is, where the last block
    comes out full, the token at the first cut, another each epoch: for it alone there would be one more block.
    """

    def __init__(self, tokens: Ragged | Tokens, read: "Reader", data: DataConfig) -> None:
        self.tokens, self.total = tokens, tokens.total - behind(tokens, tokens.total, read.eos)  # what parts documents ends none
        if self.total < 2:
            whose = "" if read.train else " of the evaluation data"
            refuse(None, "data.path", f"{self.total} tokens in all{whose}", "at least two")
        self.size, self.seed, self.moving = data.seq_len, read.seed, read.train
        self.lengths = np.full(-(-(self.total - 1) // (self.size - 1)), self.size)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels), both (seq_len)."""
        stride = self.size - 1
        offset = cut(self.seed, epoch, stride) if self.moving else 0
        turn = index * stride + np.arange(self.size)
        place = (turn + offset) % self.total
        ids = self.around(int(place[0]))
        known = (place == 0) | (turn > self.total) | (turn == index * stride)
        return ids, np.where(known, IGNORED, ids)

    def collate(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """input_ids and labels, both (b, seq_len): nothing to fill up."""
        ids, labels = zip(*examples, strict=True)
        return {"input_ids": stack(ids, 0), "labels": stack(labels, IGNORED)}

    def around(self, start: int) -> Ids:
        """A block from `start` on in the ring."""
        found: list[Ids] = []
        while (missing := self.size - sum(map(len, found))) > 0:
            found.append(self.tokens.flat(start, min(start + missing, self.total)))
            start = 0
        return np.concatenate(found)


@lru_cache(maxsize=4)
def cut(seed: int, epoch: int, stride: int) -> int:
    """Where the first block of an epoch starts; a generator costs more than the block itself."""
    return int(np.random.default_rng((seed, epoch, 1)).integers(stride))


class Documents(Sequences):
    """Documents apart from one another; a longer one is cut into sequences of seq_len."""

    def __init__(self, tokens: Ragged | Tokens, read: "Reader", data: DataConfig) -> None:
        self.tokens, self.size, self.fill = tokens, data.seq_len, filler(read.tokenizer)
        self.starts, self.stops = pieces(tokens.bounds, self.size)
        self.lengths = self.stops - self.starts

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of a sequence."""
        ids = self.tokens.flat(int(self.starts[index]), int(self.stops[index]))
        return ids, np.where(np.arange(len(ids)) == 0, IGNORED, ids)


class Rows(Sequences):
    """A prompt and its response, of which only the response is trained on.

    If a row is too long, the prompt first loses its beginning, except for a beginning of text, and then the response its end.
    """

    def __init__(self, records: Sequence[Record], read: "Reader", data: DataConfig) -> None:
        self.fill, self.size, self.ids, self.known = filler(read.tokenizer), data.seq_len, Ragged(), array("q")
        short = cut = 0
        for prompt, response in prompted(records, read, data):
            ids, known = fit(prompt, response, data.seq_len, len(read.bos))
            self.ids.append(ids)
            self.known.append(known)
            short += known < len(prompt)
            cut += len(ids) < min(known, len(prompt)) + len(response)
        lost = "the beginning of the prompt"
        read.tell_long(short, len(records), "prompts with their responses", "data.seq_len", self.size, lost, "read")
        read.tell_long(cut, len(records), f"responses ({data.response_key})", "data.seq_len", self.size)
        self.lengths = np.diff(self.ids.bounds)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of one row."""
        ids = self.ids[index]
        return ids, np.where(np.arange(len(ids)) < self.known[index], IGNORED, ids)


def prompted(records: Sequence[Record], read: "Reader", data: DataConfig) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each record, the response with its end of text. It goes on where the prompt ends."""
    prompts = read.encode_all((record, prompt_of(record, data)) for record in records)
    responses = read.inside.encode_all((record, response_of(record, data)) for record in records)
    for (record, prompt), (_, response) in zip(prompts, responses, strict=True):
        response = response if prompt else read.encode(record, response_of(record, data))  # which begins the text
        if not response:
            record.refuse(f"{data.response_key} has no token", "a response to train on")
        yield read.bos + prompt, response + read.eos


def fit(prompt: list[int], response: list[int], size: int, head: int = 0) -> tuple[list[int], int]:
    """At most `size` ids, and how many of them are not trained on. The prompt is cut at its beginning, but keeps its first `head`
    ids, the beginning of text, and one token to predict from."""
    room = min(len(prompt), max(size - len(response), head, 1))
    prompt = prompt[:head] + prompt[len(prompt) - room + head :]
    return prompt + response[: size - len(prompt)], max(len(prompt), 1)


def prompt_of(record: Record, data: DataConfig) -> str:
    return record.text(str(data.prompt_key), "data.prompt_key")


def response_of(record: Record, data: DataConfig) -> str:
    return record.text(str(data.response_key), "data.response_key")
