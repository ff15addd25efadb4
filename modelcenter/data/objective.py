"""What is learned from records: language modelling, masked language modelling, sequence to sequence, classification.

Each objective is one class: `len` examples of `lengths` tokens, `at(epoch, index)` gives one by these two numbers (and the
seed) alone, `collate` makes a batch of a list of them and `pack` one without padding. Labels are IGNORED where nothing is
predicted. Causal models shift them inside, so the first of a sequence is IGNORED too: the labels that are not are exactly the
predictions.
"""

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from modelcenter.data.answer import Questions, questions
from modelcenter.data.collate import IGNORED, Batch, join, pack, pad, stack, stack_mask
from modelcenter.data.config import DataConfig
from modelcenter.data.encode import Objective, Reader
from modelcenter.data.indexed import Tokens
from modelcenter.data.loader import Chain, Examples
from modelcenter.data.packing import Packed, Unpadded
from modelcenter.data.ragged import Ids, Ragged
from modelcenter.data.record import Mixture, Record
from modelcenter.data.span import corrupt, longest, sentinels, span_mask, spans_of
from modelcenter.data.tag import Tagged, sentence, tag_names
from modelcenter.data.tokenizer import ForeignTokenizer, Tokenizer
from modelcenter.errors import nearest, refuse

Lengths = NDArray[np.int64]


def make_examples(objective: Objective, records: Sequence[Record], tokenizer: Tokenizer, data: DataConfig, *,
                  vocab: int | None = None, seed: int = 0, train: bool = True,
                  names: Sequence[str] | None = None) -> Examples:
    """The examples of `records` for `objective`; those to train on packed, or their batches without padding, where `data` says so.

    `vocab` is the model's vocabulary (an id outside it is refused by file and line), `names` the classes' (by default
    those of `records`). Without `train` the blocks of a stream do not move from epoch to epoch.
    """
    if objective not in get_args(Objective):
        refuse(None, "objective", repr(objective), nearest(objective, get_args(Objective)))
    if not len(records):
        refuse(None, "data.path", "no record", "data with at least one record is wanted")
    if objective == "classify":
        names = names or label_names(records, data)
    if objective == "tag":
        names = names or tag_names(records, data)
    if isinstance(records, Mixture):
        sources = [source for source in records.sources if len(source)]
        return Chain([make_examples(objective, source, tokenizer, data, vocab=vocab, seed=seed, train=train, names=names)
                      for source in sources])
    read = Reader(tokenizer, vocab, train)
    if objective == "mlm":
        found: Sequences | Labelled | Tagged = Masked(documents(objective, records, read, data), read, data, seed)
    elif objective == "seq2seq":
        found = Pairs(records, read, data)
    elif objective == "classify":
        found = Labelled(records, read, data, names or ())
    elif objective == "regress":
        found = Valued(records, read, data, ())
    elif objective == "tag":
        found = Tagged(records, tokenizer, vocab, data, names or (), _pad(tokenizer))
    elif objective == "qa":
        return Questions(records, tokenizer, vocab, data, _pad(tokenizer))
    elif objective == "span":
        found = Spans(documents(objective, records, read, data), read, data, seed)
    elif data.prompt_key is not None or data.response_key is not None:
        found = Rows(records, read, data)
    elif data.packing:
        found = Documents(documents(objective, records, read, data), read, data)
    else:
        found = Blocks(documents(objective, records, read, data), read, data, seed, train)
    if not train:
        return found  # as they come and padded: a metric compares them one by one
    return Packed(found) if data.packing else Unpadded(found) if data.padding_free else found


def texts_of(objective: Objective, records: Sequence[Record], data: DataConfig) -> Iterator[str]:
    """Every text that `objective` reads, to train a tokenizer on."""
    keys = [("text_key", data.text_key), ("pair_key", data.pair_key)]
    if objective == "seq2seq":
        keys = [("source_key", data.source_key), ("target_key", data.target_key)]
    elif objective == "lm" and data.response_key is not None:
        keys = [("prompt_key", data.prompt_key), ("response_key", data.response_key)]
    elif objective not in ("classify", "regress"):
        keys = keys[:1]
    for record in records:
        if objective == "tag":
            yield " ".join(sentence(record, data)[0])
        if objective == "qa":
            yield from (text for question in questions(record, data) for text in (question.text, question.context))
        for option, key in keys if objective not in ("tag", "qa") else ():
            if key is not None:
                yield record.text(key, f"data.{option}")


def documents(objective: Objective, records: Sequence[Record], read: Reader, data: DataConfig) -> Ragged | Tokens:
    """The ids of every document that is not empty: read, or found as `modelcenter tokenize` has left them."""
    if isinstance(records, Tokens):
        return records.checked(read.tokenizer, read.vocab)
    rows = Ragged(filter(None, (read.document(objective, record, data.text_key) for record in records)))
    if not rows.total:
        refuse(records[0].file, data.text_key, "no token in all texts", "a text is wanted")
    return rows


def behind(tokens: Ragged | Tokens, stop: int, tail: list[int]) -> int:
    """The length of `tail` if it stands before `stop`: token files of other tools may lack it."""
    return len(tail) if stop > len(tail) and tokens.flat(stop - len(tail), stop).tolist() == tail else 0


def pieces(bounds: Lengths, size: int, drop: int = 0) -> tuple[Lengths, Lengths]:
    """(starts, stops) of rows cut into pieces of `size`, each row without its last `drop`."""
    lengths = np.diff(bounds) - drop
    counts = -(-lengths // size)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of the piece within its row
    starts = np.repeat(bounds[:-1], counts) + size * number
    return starts, np.minimum(starts + size, np.repeat(bounds[:-1] + lengths, counts))


class Sequences(ABC):
    """Examples that are (ids, labels) of one sequence, or of a source and its target."""

    lengths: Lengths
    size: int  # tokens of the longest at most
    fill: int

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]: ...

    def collate(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """input_ids and attention_mask (b, s), labels (b, s), those of targets (b, t): filled up on the right."""
        ids, labels = zip(*examples, strict=True)
        return pad(ids, labels, self.fill)

    def pack(self, examples: list[tuple[Ids, Ids]]) -> Batch:
        """One row, as `collate.pack` says."""
        ids, labels = zip(*examples, strict=True)
        return pack(ids, labels)


class Blocks(Sequences):
    """lm: one stream of tokens, cut into blocks of seq_len.

    A block starts on the last token of the one before, so each token but the stream's first is predicted once an epoch.
    In training the cuts move by an offset drawn each epoch, in a ring over the stream's end: a token is seen with
    different contexts. The stream's first token, and what is past one turn of the ring, is ignored.
    """

    def __init__(self, tokens: Ragged | Tokens, read: Reader, data: DataConfig, seed: int, moving: bool) -> None:
        self.tokens, self.total = tokens, tokens.total - behind(tokens, tokens.total, read.eos)  # what parts documents ends none
        if self.total < 2:
            refuse(None, "data.path", f"{self.total} tokens in all", "at least two are wanted")
        self.size, self.seed, self.moving = data.seq_len, seed, moving
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


class Rows(Sequences):
    """lm over prompt and response: only the response is trained on.

    Of a row that is too long the prompt loses its beginning first, then the response its end.
    """

    def __init__(self, records: Sequence[Record], read: Reader, data: DataConfig) -> None:
        self.fill, self.size, self.ids, self.known = _pad(read.tokenizer), data.seq_len, Ragged(), array("q")
        for prompt, response in prompted(records, read, data):
            ids, known = fit(prompt, response, data.seq_len)
            self.ids.append(ids)
            self.known.append(known)
        self.lengths = np.diff(self.ids.bounds)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of one row."""
        ids = self.ids[index]
        return ids, np.where(np.arange(len(ids)) < self.known[index], IGNORED, ids)


class Documents(Sequences):
    """lm over documents apart from one another; one that is longer is cut into sequences of seq_len."""

    def __init__(self, tokens: Ragged | Tokens, read: Reader, data: DataConfig) -> None:
        self.tokens, self.size, self.fill = tokens, data.seq_len, _pad(read.tokenizer)
        self.starts, self.stops = pieces(tokens.bounds, self.size)
        self.lengths = self.stops - self.starts

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels) of a sequence."""
        ids = self.tokens.flat(int(self.starts[index]), int(self.stops[index]))
        return ids, np.where(np.arange(len(ids)) == 0, IGNORED, ids)


class Masked(Sequences):
    """mlm: the stream of all documents in blocks of seq_len between [CLS] and [SEP], with [SEP] between documents, or, to
    be packed, each document for itself.

    Devlin et al. 2018, 3.1: of the tokens chosen (15 %) 80 % are masked, 10 % replaced, 10 % kept; anew each epoch. With
    `whole_words` words are chosen, and all their tokens with them, as in BERT's release of May 2019.
    """

    def __init__(self, tokens: Ragged | Tokens, read: Reader, data: DataConfig, seed: int) -> None:
        tokenizer = read.tokenizer
        if tokenizer.mask_id is None:
            refuse(tokenizer.name, "objective", "mlm with a tokenizer that has no mask token", "one with it is wanted")
        self.mask, self.fill = tokenizer.mask_id, _pad(tokenizer)
        self.seed, self.probability = seed, data.mlm_probability
        self.head = [] if tokenizer.cls_id is None else [tokenizer.cls_id]
        self.tail = read.sep
        room = data.seq_len - len(self.head) - len(self.tail)
        if room < 1:
            refuse(None, "data.seq_len", str(data.seq_len), "room for a token between [CLS] and [SEP] is wanted")
        special = tokenizer.special_ids
        top = min(tokenizer.vocab_size, read.vocab or tokenizer.vocab_size)
        self.special = np.array(sorted(special), np.int32)
        self.ordinary = np.array([i for i in range(top) if i not in special], np.int32)
        self.inside = continuing(tokenizer) if data.whole_words else None
        self.tokens, self.size = tokens, data.seq_len
        bounds = tokens.bounds if data.packing else np.array([0, tokens.total])
        self.starts, self.stops = pieces(bounds, room, drop=behind(tokens, int(bounds[1]), self.tail))
        self.lengths = self.stops - self.starts + len(self.head) + len(self.tail)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(ids, labels): at least one token is to be predicted wherever one is not special."""
        block = self.tokens.flat(int(self.starts[index]), int(self.stops[index]))
        ids = np.concatenate([self.head, block, self.tail]).astype(np.int32)
        random = np.random.default_rng((self.seed, epoch, index, 2))
        open_ = ~np.isin(ids, self.special)
        word = np.arange(len(ids)) if self.inside is None else np.cumsum(~self.inside[ids] | ~open_) - 1
        chosen = open_ & (random.random(word[-1] + 1) < self.probability)[word]
        if not chosen.any() and open_.any():
            chosen = open_ & (word == word[random.choice(np.flatnonzero(open_))])
        fate = random.random(len(ids))
        other = random.choice(self.ordinary, len(ids)) if len(self.ordinary) else ids
        seen = np.where(chosen & (fate < 0.8), self.mask, np.where(chosen & (fate >= 0.9), other, ids))
        return seen.astype(np.int32), np.where(chosen, ids, IGNORED).astype(np.int32)


def continuing(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Which ids go on with the word of the token before: by ## in WordPiece, else by no mark of a space at their beginning."""
    vocab = {} if isinstance(tokenizer, ForeignTokenizer) else tokenizer.raw.get_vocab(with_added_tokens=True)
    mark = next((m for m in ("##", "Ġ", "▁") if any(token.startswith(m) for token in vocab)), None)
    if mark is None:
        refuse(tokenizer.name, "data.whole_words", "true with a tokenizer that marks no words", "false, or another tokenizer")
    inside = np.zeros(tokenizer.vocab_size, np.bool_)
    for token, number in vocab.items():
        inside[number] = token.startswith(mark) == (mark == "##")
    return inside


class Pairs(Sequences):
    """seq2seq: a source and a target, each ending in the end of text; the model makes the decoder's input of labels.

    The length of a pair is that of both together, and so is the room of a packed row.
    """

    def __init__(self, records: Sequence[Record], read: Reader, data: DataConfig) -> None:
        if not read.eos:
            refuse(read.tokenizer.name, "objective", "seq2seq with a tokenizer without an end of text", "one is wanted")
        self.fill, self.sources, self.targets = _pad(read.tokenizer), Ragged(), Ragged()
        wide, long = data.seq_len, data.target_len or data.seq_len
        for record in records:
            source = data.source_prefix + record.text(data.source_key, "data.source_key")
            target = read.encode(record, record.text(data.target_key, "data.target_key"))
            ids, _ = read.encode_pair(record, source, None, wide)
            if ids[-1:] != read.eos:
                ids = ids[: wide - 1] + read.eos
            self.sources.append(ids)
            self.targets.append(target[: long - 1] + read.eos)
        self.size, self.lengths = wide + long, np.diff(self.sources.bounds) + np.diff(self.targets.bounds)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(source ids, target ids)."""
        return self.sources[index], self.targets[index]


class Labelled:
    """classify: one text or two and a class; `names` are the classes in order."""

    kind = "q"  # of array that holds the labels

    def __init__(self, records: Sequence[Record], read: Reader, data: DataConfig, names: Sequence[str]) -> None:
        self.names, self.fill, self.size = tuple(names), _pad(read.tokenizer), data.seq_len
        self.ids, self.segments, self.labels = Ragged(), Ragged(), array(self.kind)
        for record in records:
            first = record.text(data.text_key, "data.text_key")
            second = None if data.pair_key is None else record.text(data.pair_key, "data.pair_key")
            ids, segments = read.encode_pair(record, first, second, data.seq_len)
            self.ids.append(ids)
            self.segments.append(segments)
            self.labels.append(self.label(record, data.label_key))
        self.lengths = np.diff(self.ids.bounds)
        # Decided once, so that every batch has the same keys; families without segments get none to refuse.
        self.segmented = data.pair_key is not None and any(read.tokenizer.encode_pair("a", "a")[1])

    def label(self, record: Record, key: str) -> Any:
        """The number of a record's class."""
        value = record.get(key, "data.label_key")
        if value in self.names:
            return self.names.index(value)
        number = _number(value)
        if number is None or not 0 <= number < len(self.names):
            known = nearest(value, self.names) if number is None else f"0 to {len(self.names) - 1} are known"
            record.refuse(f"{key} is {value!r}", known)
        return number

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids, int]:
        """(ids, segments, class)."""
        return self.ids[index], self.segments[index], self.labels[index]

    def collate(self, examples: list[tuple[Ids, Ids, int]]) -> Batch:
        """input_ids, attention_mask and, for pairs, token_type_ids: (b, s); labels: (b)."""
        ids, segments, labels = zip(*examples, strict=True)
        batch = {"input_ids": stack(ids, self.fill), "attention_mask": stack_mask(ids), "labels": torch.tensor(labels)}
        return batch | ({"token_type_ids": stack(segments, 0)} if self.segmented else {})

    def pack(self, examples: list[tuple[Ids, Ids, int]]) -> Batch:
        """As `pack`; labels: (n), one a sequence."""
        ids, segments, labels = zip(*examples, strict=True)
        batch = pack(ids) | {"labels": torch.tensor(labels)}
        return batch | ({"token_type_ids": join(segments)} if self.segmented else {})


class Valued(Labelled):
    """regress: one text or two and a number; labels are fp32."""

    kind = "d"

    def label(self, record: Record, key: str) -> float:
        """The number that is wanted."""
        value = record.get(key, "data.label_key")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number == IGNORED:
            record.refuse(f"{key} is {value!r}", f"a number other than {IGNORED} is wanted")
        return number


class Spans(Sequences):
    """span: the stream of all documents, cut so that a source is of seq_len at most when spans of it are masked; anew each epoch.

    Raffel et al., 2019, section 3.1.4: `mlm_probability` of the tokens are dropped in spans of `span_length` on average; each
    is a sentinel in the source, and the target says behind each sentinel what it stands for. Both end in the end of text.
    """

    def __init__(self, tokens: Ragged | Tokens, read: Reader, data: DataConfig, seed: int) -> None:
        if not read.eos:
            refuse(read.tokenizer.name, "objective", "span with a tokenizer without an end of text", "one is wanted")
        self.tokens, self.seed, self.eos, self.fill = tokens, seed, read.eos[0], _pad(read.tokenizer)
        self.density, self.mean = data.mlm_probability, data.span_length
        raw = longest(data.seq_len, self.density, self.mean)
        self.starts, self.stops = pieces(np.array([0, tokens.total]), raw)
        if self.stops[-1] - self.starts[-1] < 2:  # nothing is left of one token without a span
            self.starts, self.stops = self.starts[:-1], self.stops[:-1]
        if not len(self.starts):
            refuse(None, "data.path", f"{tokens.total} tokens in all", "at least two are wanted")
        counts = [spans_of(int(n), self.density, self.mean) for n in self.stops - self.starts]
        self.sentinels = sentinels(read.tokenizer, max(k for _, k in counts), read.vocab)
        self.lengths = self.stops - self.starts + np.array([2 * k + 2 for _, k in counts])  # of source and target together
        self.size = int(self.lengths.max())

    def at(self, epoch: int, index: int) -> tuple[Ids, Ids]:
        """(source ids, target ids)."""
        ids = self.tokens.flat(int(self.starts[index]), int(self.stops[index]))
        noise = span_mask(len(ids), self.density, self.mean, np.random.default_rng((self.seed, epoch, index, 3)))
        source, target = corrupt(ids, noise, self.sentinels)
        end = np.array([self.eos], np.int32)
        return np.concatenate([source, end]), np.concatenate([target, end])


def label_names(records: Sequence[Record], data: DataConfig) -> tuple[str, ...]:
    """The classes of `records`: names in sorted order, or LABEL_0 ... for numbers, which must run from 0 on."""
    values = [record.get(data.label_key, "data.label_key") for record in records]
    numbers = {_number(value) for value in values}
    if None not in numbers:
        known = sorted(n for n in numbers if n is not None)
        if known != list(range(len(known))):
            found = f"the labels {str(known)[:80]}"
            refuse(records[0].file, data.label_key, found, "numbers from 0 on without a gap are wanted")
        names = [f"LABEL_{n}" for n in known]
    else:
        for record, value in zip(records, values, strict=True):
            if not isinstance(value, str):
                record.refuse(f"{data.label_key} is {value!r}", "a name, as elsewhere in the data, is wanted")
        names = sorted(set(values))
    if len(names) < 2:
        refuse(records[0].file, data.label_key, f"only the class {names[0]}", "two classes at least are wanted")
    return tuple(names)


def prompted(records: Sequence[Record], read: Reader, data: DataConfig) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each record, the response with its end of text."""
    for option, key in (("prompt_key", data.prompt_key), ("response_key", data.response_key)):
        if key is None:
            refuse(None, f"data.{option}", "absent", "prompt_key and response_key go together")
    for record in records:
        prompt = read.encode(record, record.text(str(data.prompt_key), "data.prompt_key"))
        response = read.encode(record, record.text(str(data.response_key), "data.response_key"))
        if not response:
            record.refuse(f"{data.response_key} has no token", "a response to train on is wanted")
        yield read.bos + prompt, response + read.eos


def fit(prompt: list[int], response: list[int], size: int) -> tuple[list[int], int]:
    """At most `size` ids, and how many of them are not trained on: the prompt gives way from its beginning, but one token
    stays to predict from."""
    room = max(size - len(response), min(len(prompt), 1))
    prompt = prompt[len(prompt) - min(room, len(prompt)) :]
    return prompt + response[: size - len(prompt)], max(len(prompt), 1)


def _pad(tokenizer: Tokenizer) -> int:
    """What fills up a row; never seen nor trained on, so any id will do where the tokenizer has none."""
    return next((i for i in (tokenizer.pad_id, tokenizer.eos_id) if i is not None), 0)


def _number(value: Any) -> int | None:
    """A class given by number, in CSV and TSV as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = value.removeprefix("-") if isinstance(value, str) else ""
    return int(value) if text.isascii() and text.isdigit() and len(text) < 10 else None
