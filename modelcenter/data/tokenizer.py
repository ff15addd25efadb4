"""Text to token ids and back: a tokenizer of the tokenizers library, a table of characters, or a tokenizer of transformers.

`tokenizer_open.py` reads one from a folder, `tokenizer_train.py` trains one on the training text. `save` writes a folder that
transformers.AutoTokenizer opens, with equal ids.
"""

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from ..config.document import short
from ..errors import InputError, message, refuse
from ..theirs import ENCODE, TOKENIZER, arguments

ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
HABITS = (  # of transformers' tokenizer, which ours has no use for: special tokens without a role are those that it tells of
    "model_max_length", "model_input_names", "padding_side", "truncation_side", "do_lower_case",
    "additional_special_tokens", "extra_special_tokens",
)
Window = tuple[list[int], list[int], list[int], list[int]]  # ids, segments, and the characters from and to which a token stands


class Tokenizer:
    """A tokenizers.Tokenizer (`raw`) with the ids of its special tokens (`eos_id` and so on), None where absent.

        ids = torch.tensor([tokenizer.encode("Hello")])
        text = tokenizer.decode(model.generate(ids)[0])

    `encode` one text, `encode_pair` two, `encode_all` many; `decode` ids; `save` a folder. It does not pad: for batches in your own
    loop use transformers.AutoTokenizer with the same folder, which gives the same ids.
    """

    chat_template: str | None = None  # jinja2's text
    habits: Mapping[str, Any] = MappingProxyType({})  # what of `HABITS` the folder said

    def __init__(self, raw: tokenizers.Tokenizer, special: dict[str, str], name: str = "tokenizer") -> None:
        """`special` maps roles (`eos`) to tokens (`</s>`), which `raw` keeps whole, or is given."""
        raw.no_truncation()  # files carry the lengths of their training: an example would be cut without a word
        raw.no_padding()
        marked = {token.content for token in raw.get_added_tokens_decoder().values()}
        raw.add_special_tokens(
            [AddedToken(t, special=True) for t in dict.fromkeys(special.values()) if t not in marked])
        self.raw, self.special, self.name = raw, dict(special), name

    def __len__(self) -> int:
        return self.vocab_size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self):,} tokens, special {self.special})"

    def __call__(self, *texts: Any, **options: Any) -> NoReturn:
        """Refused: what transformers' tokenizers do when they are called is `encode` here."""
        raise TypeError(f"a tokenizer is not called; {TOKENIZER['__call__']}")

    def __getattr__(self, name: str) -> Any:
        advice = f"; {TOKENIZER[name]}" if name in TOKENIZER else ""
        raise AttributeError(f"{type(self).__name__} has no {name}{advice}", name=name, obj=self)

    @property
    def vocab_size(self) -> int:
        """The highest id and one: what a model's embedding must hold, added tokens included."""
        return max(self.vocabulary.values(), default=-1) + 1

    def id(self, role: str) -> int | None:
        """The id of the special token in `role`."""
        token = self.special.get(role)
        return None if token is None else self.token_to_id(token)

    bos_id = property(lambda self: self.id("bos"))
    eos_id = property(lambda self: self.id("eos"))
    pad_id = property(lambda self: self.id("pad"))
    unk_id = property(lambda self: self.id("unk"))
    cls_id = property(lambda self: self.id("cls"))
    sep_id = property(lambda self: self.id("sep"))
    mask_id = property(lambda self: self.id("mask"))

    @property
    def puts_bos(self) -> bool:
        """Whether its template puts the beginning-of-text token before a text. This is tried with a word, because around an empty
        text the same token may be the end."""
        bos, special = self.bos_id, self.special_ids
        if bos is None or self.encode("")[:1] != [bos] or bos != self.eos_id:
            return bos is not None and self.encode("")[:1] == [bos]
        for number in range(min(self.vocab_size, 1000)):
            try:
                word = self.decode([number])
                alone = self.encode(word, special=False) if number not in special else []
            except InputError:  # no text by itself
                continue
            if alone and bos not in alone:
                return self.encode(word)[:1] == [bos]
        return True

    @property
    def special_ids(self) -> set[int]:
        """The ids of all tokens that stand for no text."""
        named = {i for i in map(self.id, ROLES) if i is not None}
        return named | {i for i, token in self.raw.get_added_tokens_decoder().items() if token.special}

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: which token has which id."""
        return sha256(json.dumps(sorted(self.vocabulary.items())).encode()).hexdigest()

    @property
    def behaviour(self) -> str:
        """Everything that decides how a text is split, as far as the tokenizer can say it."""
        said: str = self.raw.to_str()
        return said

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token with its id."""
        found: dict[str, int] = self.raw.get_vocab(with_added_tokens=True)
        return found

    def token_to_id(self, token: str) -> int | None:
        """The id of one token as the vocabulary spells it; None for an unknown one."""
        found: int | None = self.raw.token_to_id(token)
        return found

    @arguments(ENCODE)
    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`; `special` adds what the tokenizer's own template adds ([CLS] ... [SEP], <s>, </s>). Errors:
        `InputError` for what is no text."""
        check_text(text)
        with self.cutting([text]):
            ids: list[int] = self.raw.encode(text, add_special_tokens=special).ids
        return ids

    @contextmanager
    def cutting(self, texts: Sequence[str]) -> Iterator[None]:
        """A context in which the library splits `texts`: the first one that it cannot split is refused."""
        try:
            yield
        except Exception as e:
            if type(e) is not Exception:  # the library's own have no other class
                raise
            for text in texts:
                try:
                    self.raw.encode(text)
                except Exception:
                    raise Uncut(self.name, text, str(e)) from None
            raise

    def begin(self, text: str) -> list[int]:
        """The ids of a text that is to be continued: in the template, without the end-of-text token that this may add."""
        ids, plain = self.encode(text), self.encode(text, special=False)
        ended = ids[-1:] == [self.eos_id] and ids[len(ids) - len(plain) :] != plain
        return ids[:-1] if ended else ids

    def end_texts(self) -> None:
        """Make the template end every text with the end-of-text token, as T5's does, unless it does so already: so an encoder that
        was trained on ended sources also gets ended ones in use, here and in transformers."""
        token, end = self.special["eos"], self.eos_id
        if self.encode("")[-1:] == [end]:
            return
        added = processors.TemplateProcessing(single=["$A", token], pair=["$A", token, "$B", token], special_tokens=[(token, end)])
        before = self.raw.post_processor
        self.raw.post_processor = added if before is None else processors.Sequence([before, added])

    @cached_property
    def inside(self) -> "Tokenizer":
        """The same for texts that continue others: without the space that some tokenizers (LLaMA's) put before every text."""
        said = json.loads(self.raw.to_str())
        bare = said | {part: unspaced(said[part]) for part in ("normalizer", "pre_tokenizer")}
        return self if bare == said else Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(bare)), self.special, self.name)

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The ids of each text without the template: the same as one by one, but computed on all cores."""
        with self.cutting(texts):
            found = self.raw.encode_batch_fast(texts, add_special_tokens=False)
        for encoding in found:
            yield encoding.ids

    def encode_pair(self, first: str, second: str | None = None, limit: int | None = None
                    ) -> tuple[list[int], list[int]]:
        """The ids and the segment ids of one text or of two, with the template's special tokens, `limit` at most.

        The longer of the two loses its end first, as with transformers' truncation=True.
        """
        ids, segments, _ = next(self.encode_pairs([(first, second)], limit))
        return ids, segments

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]], limit: int | None = None
                     ) -> Iterator[tuple[list[int], list[int], bool]]:
        """The same for each pair, and whether it has lost an end. All cores split the texts, and each text only once: a passage may
        occur in hundreds of pairs."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair if text is not None))
        with self.cutting(texts):
            cut = dict(zip(texts, self.raw.encode_batch_fast(texts, add_special_tokens=False), strict=True))
        if limit is not None:
            self.raw.enable_truncation(limit)
        try:
            found = [self.raw.post_process(cut[first], None if second is None else cut[second]) for first, second in pairs]
        finally:
            self.raw.no_truncation()
        for encoding in found:
            yield encoding.ids, encoding.type_ids, bool(encoding.overflowing)

    def encode_words(self, words: Sequence[str], limit: int) -> tuple[list[int], list[int | None]]:
        """The ids of words with the template's special tokens, `limit` at most, and for each id the number of its word (None: no
        word).

        A tokenizer that keeps spaces with the words that follow them (GPT-2's) is given these spaces.
        """
        self.raw.enable_truncation(limit)
        try:
            with self.cutting([*words, "a", "b"]):
                both, first, second = (self.raw.encode(text, add_special_tokens=False).tokens for text in ("a b", "a", "b"))
                spaced = both != first + second
                given = [word if k == 0 or not spaced else f" {word}" for k, word in enumerate(words)]
                encoding = self.raw.encode(given, is_pretokenized=True)
        finally:
            self.raw.no_truncation()
        return encoding.ids, encoding.word_ids

    def windows(self, first: str, second: str, limit: int, stride: int) -> Iterator[Window]:
        """Windows of `limit` tokens: `first` whole and as much of `second`, each beginning `stride` tokens before the end of the
        one before it. `limit` has room for `first`, `stride` tokens and one more."""
        # cut into tokens whole: tokenizers 0.23.2 drops what of `second` is beyond `limit` where it is to do both at once. What was
        # cut alone does not know that it is the second.
        with self.cutting([first, second, "a"]):
            one, two = self.raw.encode_batch([first, second], add_special_tokens=False)
            pair = self.raw.encode("a", "a")
        kind = next((t for t, s in zip(pair.type_ids, pair.sequence_ids, strict=True) if s == 1), 0)
        self.raw.enable_truncation(limit, stride=stride, strategy="only_second")
        try:
            encoding = self.raw.post_process(one, two)
        finally:
            self.raw.no_truncation()
        begin = 0
        for part in (encoding, *encoding.overflowing):
            sides = part.sequence_ids
            shown = iter(two.offsets[begin:])  # as they were: to process them again is to take a word's space from its letters
            places = [next(shown) if s == 1 else (-1, -1) for s in sides]
            kinds = [kind if s == 1 else t for t, s in zip(part.type_ids, sides, strict=True)]
            yield part.ids, kinds, [a for a, _ in places], [b for _, b in places]
            begin += sides.count(1) - stride

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text` without the template, and for each id the range of characters that it covers."""
        with self.cutting([text]):
            encoding = self.raw.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def offset(self, text: str, token: int) -> int:
        """The character of `text` at which its `token`-th id starts, for messages."""
        return int(self.raw.encode(text, add_special_tokens=False).offsets[token][0])

    @arguments(ENCODE)
    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `special`. Errors: `InputError` for what is not the ids of
        one text."""
        text: str = self.raw.decode(numbers(ids), skip_special_tokens=not special)
        return text

    @property
    def segmented(self) -> bool:
        """Whether the second of two texts has another segment than the first."""
        return any(self.encode_pair("a", "a")[1])

    def save(self, folder: str | os.PathLike[str], segments: bool | None = None) -> None:
        """Write tokenizer.json and tokenizer_config.json into `folder`, made if it is absent. `segments`: whether the model there
        reads them; None: what the folder said from which it was loaded, or if there is a classification token, as BERT's have."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # said, because each release of transformers thinks otherwise of a tokenizer without a class of its own: without segments a
        # model of pairs answers wrongly, and to GPT-2 they are words
        said = self.habits.get("model_input_names")
        if segments is None:
            segments = "token_type_ids" in said if isinstance(said, list) else "cls" in self.special
        inputs = ["input_ids", *(["token_type_ids"] if segments and self.segmented else []), "attention_mask"]
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {**self.habits, "model_input_names": inputs}
        config |= {f"{role}_token": token for role, token in self.special.items()}
        config |= {} if self.chat_template is None else {"chat_template": self.chat_template}
        (folder / "tokenizer.json").write_text(self.raw.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_text(text: object) -> None:
    if not isinstance(text, str):
        refuse(None, "text", f"a {type(text).__name__}", "one text, as a str; encode_all takes several")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        refuse(None, "text", f"half a surrogate pair at character {e.start}", "valid Unicode")


def numbers(ids: Iterable[int]) -> list[int]:
    """`ids` as whole numbers; refused where they are those of several texts, or -100 among them."""
    try:
        found = [index(i) for i in ids]
    except (TypeError, ValueError):
        refuse(None, "ids", short(ids), "whole numbers, those of one text: decode each of several by itself")
    if (least := min(found, default=0)) < 0:
        refuse(None, "ids", str(least), "0 or more: leave out what stands for no token")
    return found


def unspaced(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """The normalizer or the pre_tokenizer of a tokenizer.json without what puts a space before a text; None if nothing is left. Of
    several pre_tokenizers all stay: T5's cut a text at its spaces, and then put one before each word."""
    if step is None or step["type"] == "Prepend":
        return None
    steps = {"normalizers": [one for one in map(unspaced, step["normalizers"]) if one]} if "normalizers" in step else {}
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**step, **steps, **{key: value for key, value in never.items() if key in step}}


class Uncut(InputError):
    """A text that the library cannot split: usually its vocabulary lacks a word, and has no token for unknown ones."""

    wanted = "a tokenizer with a token for unknown words"

    def __init__(self, name: str, text: str, said: str) -> None:
        self.text, self.found = text, f"{short(text)} cannot be encoded ({said})"
        super().__init__(message(name, None, self.found, self.wanted))


class UnknownCharacter(InputError):
    """A character that a `CharTokenizer` has not seen, and its place in the text."""

    def __init__(self, character: str, offset: int) -> None:
        found = f"{character!r} is not in the vocabulary"
        super().__init__(message(None, f"character {offset}", found, "one of the training text"))
        self.character, self.offset = character, offset


class CharTokenizer(Tokenizer):
    """One id for each character, in sorted order, without special tokens. It is lossless, and refuses characters that it has not
    seen."""

    def __init__(self, raw: tokenizers.Tokenizer, special: dict[str, str], name: str = "char") -> None:
        super().__init__(raw, special, name)
        self.table: dict[str, int] = raw.get_vocab(with_added_tokens=False)

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharTokenizer":
        """The characters of `texts`; as nanoGPT's data/shakespeare_char/prepare.py numbers them."""
        found = set[str]()
        for text in texts:  # one at a time: a corpus need not fit into memory
            found.update(text)
        if not (characters := sorted(found)):
            refuse(None, "tokenizer", "char over an empty text", "training text")
        raw = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}))
        raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        raw.decoder = decoders.Fuse()
        return cls(raw, {})

    @arguments(ENCODE)
    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`, by a table: the library takes 2 s and 500 MB for a megabyte of characters."""
        check_text(text)
        try:
            return [self.table[c] for c in text]
        except KeyError as e:
            raise UnknownCharacter(e.args[0], text.index(e.args[0])) from None

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        return map(self.encode, texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]], limit: int | None = None
                     ) -> Iterator[tuple[list[int], list[int], bool]]:
        for first, second in pairs:
            whole = self.encode(first) + self.encode(second or "")
            ids = whole[:limit]
            yield ids, [0] * len(ids), len(ids) < len(whole)

    @property
    def segmented(self) -> bool:
        return False

    def encode_words(self, words: Sequence[str], limit: int) -> tuple[list[int], list[int | None]]:
        ids = [(i, n) for n, word in enumerate(words) for i in self.encode(word)][:limit]
        return [i for i, _ in ids], [n for _, n in ids]

    def windows(self, first: str, second: str, limit: int, stride: int) -> Iterator[Window]:
        refuse(self.name, "objective", "qa with a tokenizer of characters", "another tokenizer")

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode(text), [(k, k + 1) for k in range(len(text))]

    def offset(self, text: str, token: int) -> int:
        return token


class ForeignTokenizer(Tokenizer):
    """A tokenizer of transformers that has no tokenizers backend (CPM-Ant)."""

    def __init__(self, foreign: Any, name: str) -> None:
        self.foreign, self.name = foreign, name
        named = {role: getattr(foreign, f"{role}_token", None) for role in ROLES}
        self.special = {role: str(token) for role, token in named.items() if token is not None}

    @property
    def inside(self) -> Tokenizer:
        return self

    def end_texts(self) -> None:
        """Its template is its own."""

    @property
    def behaviour(self) -> str:
        return f"{type(self.foreign).__name__} {self.name}"  # it cannot say it: what has its name counts as the same

    @property
    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self.foreign.get_vocab()
        return found

    @property
    def special_ids(self) -> set[int]:
        return set(self.foreign.all_special_ids)

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self.foreign.convert_tokens_to_ids(token)
        return found

    @arguments(ENCODE)
    def encode(self, text: str, special: bool = True) -> list[int]:
        check_text(text)
        ids: list[int] = self.foreign(text, add_special_tokens=special)["input_ids"]
        return ids

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        return (self.encode(text, special=False) for text in texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]], limit: int | None = None
                     ) -> Iterator[tuple[list[int], list[int], bool]]:
        for first, second in pairs:
            out = self.foreign(first, second, return_token_type_ids=True, truncation=limit is not None, max_length=limit)
            ids = out["input_ids"]
            yield ids, out["token_type_ids"], len(ids) == limit and len(self.foreign(first, second)["input_ids"]) > limit

    def encode_words(self, words: Sequence[str], limit: int) -> tuple[list[int], list[int | None]]:
        refuse(self.name, "objective", "tag with a tokenizer that does not say which word a token is of", "another tokenizer")

    def windows(self, first: str, second: str, limit: int, stride: int) -> Iterator[Window]:
        refuse(self.name, "objective", "qa with a tokenizer that does not say where a token stands", "another tokenizer")

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        refuse(self.name, "objective", "chat with a tokenizer that does not say where a token stands", "another tokenizer")

    def offset(self, text: str, token: int) -> int:
        return len(self.foreign.decode(self.encode(text, special=False)[:token]))

    @arguments(ENCODE)
    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        text: str = self.foreign.decode(numbers(ids), skip_special_tokens=not special)
        return text

    def save(self, folder: str | os.PathLike[str], segments: bool | None = None) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        copy.deepcopy(self.foreign).save_pretrained(folder)  # CPM-Ant's deletes entries of its own table as it saves
