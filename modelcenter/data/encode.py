"""Encodes texts into token ids. A text that cannot be encoded for the model is refused by its record. Nothing here imports
torch."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import NoReturn, TypeVar

from ..errors import refuse
from .record import Record
from .tokenizer import Tokenizer, Uncut, UnknownCharacter

Row = TypeVar("Row", tuple[Record, str], tuple[Record, str, str | None])
PORTION = 1 << 20  # characters that are encoded at a time: enough for all cores, little beside what a process holds anyway

OTHER = "the tokenizer of this model, or a model that resize_token_embeddings has made larger"


class Reader:
    """How records are read for a model: by a tokenizer that names the record if a text cannot be encoded; to train on or not; with
    which seed of what is drawn, and which names of labels."""

    def __init__(self, tokenizer: Tokenizer, vocab: int | None, train: bool = True, segments: bool = True, seed: int = 0,
                 names: tuple[str, ...] = ()) -> None:
        """`segments`: whether the model tells the second of two texts from the first by segment ids."""
        self.tokenizer, self.vocab, self.train, self.segments = tokenizer, vocab, train, segments
        self.seed, self.names = seed, names
        self.bos = [tokenizer.bos_id] if tokenizer.puts_bos else []
        self.eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.sep = [] if tokenizer.sep_id is None else [tokenizer.sep_id]
        size, top = tokenizer.vocab_size, max(self.bos + self.eos, default=-1)
        if vocab is not None and top >= vocab:
            found = f"a special token has id {top}, the model {vocab} tokens"
            refuse(tokenizer.name, "tokenizer", found, OTHER)
        if vocab is not None and size > vocab:
            said = f"{tokenizer.name}: {size} tokens where the model has {vocab}; data that holds such an id is refused"
            warnings.warn(said, stacklevel=3)

    @property
    def inside(self) -> "Reader":
        """The same for texts that go on where others end, as `Tokenizer.inside`."""
        found = copy(self)
        found.tokenizer = self.tokenizer.inside
        return found

    @property
    def segmented(self) -> bool:
        """Whether examples of two texts have segment ids."""
        return self.segments and self.tokenizer.segmented

    def encode(self, record: Record, text: str) -> list[int]:
        """The ids of `text` without the tokenizer's template."""
        with self.naming(record):
            return self.check(record, text, self.tokenizer.encode(text, special=False))

    def encode_places(self, record: Record, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text` without the template, and for each id the range of characters that it stands for."""
        with self.naming(record):
            ids, places = self.tokenizer.encode_places(text)
            return self.check(record, text, ids), places

    @contextmanager
    def naming(self, record: Record, others: Sequence[Row] = ()) -> Iterator[None]:
        """A context that refuses a record for what the tokenizer does not know; or one of the `others` that are cut with it."""
        try:
            yield
        except Uncut as e:
            odd = next((row[0] for row in others if e.text in row[1:]), record)
            odd.refuse(e.found, e.wanted)
        except UnknownCharacter as e:
            where = f"character {e.offset}, " if record.line is not None else ""
            found = f"{where}{e.character!r}{'' if self.train else ' of the evaluation data'} is not in the vocabulary"
            record.refuse(found, "a character of the training text", e.offset)

    def encode_pairs(self, pairs: Iterable[tuple[Record, str, str | None]], limit: int, what: str = "texts"
                     ) -> Iterator[tuple[list[int], list[int]]]:
        """The ids and the segments of each text or pair of texts, with the template, at most `limit` ids; a megabyte at a time. How
        many are empty is said, and how many are longer, as `what` they are."""
        first_empty, empty, total, long = None, 0, 0, 0
        for some in portions(pairs):
            found = self.tokenizer.encode_pairs([(first, second) for _, first, second in some], limit)
            for record, first, second in some:
                with self.naming(record, some):
                    ids, segments, cut = next(found)
                if not self.holds(ids):
                    self.encode(record, first)
                    self.encode(record, second or "")
                    self.refuse(record, ids)  # a token of the template
                if not ids:
                    record.refuse("no token in its text", "a text")
                if len(ids) > limit:  # the library gives up on a limit that the template's own tokens exceed
                    refuse(None, "data.seq_len", str(limit), "room for a token beside the tokenizer's special ones")
                total, long = total + 1, long + cut
                if not (first.strip() or (second or "").strip()):
                    first_empty, empty = first_empty or record, empty + 1
                yield ids, segments
        self.tell_empty(empty, total, what, first_empty)
        self.tell_long(long, total, what, "data.seq_len", limit)

    def tell_empty(self, empty: int, total: int, what: str, first: Record | None) -> None:
        """Warn of examples that hold no text, the first of them in the record `first`."""
        if first is not None:
            where, use = f"{first.file}, {first.place()}", "trained on" if self.train else "judged"
            warnings.warn(f"{empty:,} of {total:,} {what} are empty (first: {where}): {use} as they are", stacklevel=3)

    def tell_long(self, long: int, total: int, what: str, key: str, size: int, lost: str = "what lies beyond",
                  use: str = "") -> None:
        """Warn of examples that were cut to `size` tokens, which the key `key` says. `use`: for what the rest is `lost`; by default
        for training or evaluation."""
        if long:
            use = use or ("trained on" if self.train else "judged")
            warnings.warn(f"{long:,} of {total:,} {what} are longer than {key} {size}: {lost} is not {use}", stacklevel=3)

    def holds(self, ids: list[int]) -> bool:
        """Whether the model's vocabulary has all of `ids`."""
        return self.vocab is None or max(ids, default=-1) < self.vocab

    def refuse(self, record: Record, ids: list[int]) -> NoReturn:
        """Refuse a record for an id that the model lacks, when its place in a text is not known."""
        record.refuse(f"a token has id {max(ids)}, the model {self.vocab} tokens", OTHER)

    def check(self, record: Record, text: str, ids: list[int]) -> list[int]:
        """`ids`, if the model has them all; the first that it lacks is refused with its place."""
        if self.vocab is None or self.holds(ids):
            return ids
        place = next(k for k, i in enumerate(ids) if i >= self.vocab)
        offset = self.tokenizer.offset(text, place)
        piece = self.tokenizer.decode(ids[place : place + 1], special=True)
        where = f"character {offset}, " if record.line is not None else ""
        found = f"{where}token {place} ({piece!r}) has id {ids[place]}, the model {self.vocab} tokens"
        record.refuse(found, OTHER, offset)

    def encode_all(self, texts: Iterable[tuple[Record, str]]) -> Iterator[tuple[Record, list[int]]]:
        """The same of each text, a megabyte of them at a time."""
        for some in portions(texts):
            found = self.tokenizer.encode_all([text for _, text in some])
            for record, text in some:
                with self.naming(record, some):
                    ids = next(found)
                yield record, self.check(record, text, ids)

    def documents(self, records: Iterable[Record], key: str, around: tuple[list[int], list[int]]) -> Iterator[list[int]]:
        """The ids of every document that is not empty, between the ids `around` it."""
        for _, ids in self.encode_all((record, record.text(key, "data.text_key")) for record in records):
            if ids:
                yield [*around[0], *ids, *around[1]]


def portions(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows in lists of about `PORTION` characters."""
    some, size = list[Row](), 0
    for row in rows:
        some.append(row)
        size += sum(len(text) for text in row[1:] if text is not None)
        if size >= PORTION:
            yield some
            some, size = [], 0
    if some:
        yield some
