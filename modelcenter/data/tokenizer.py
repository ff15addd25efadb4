"""Text to token ids and back: Hugging Face tokenizer folders, and two kinds that need no folder.

tokenizer.json is read by the tokenizers library; vocab.txt (BERT) and vocab.json with merges.txt (GPT-2) are built on
it; what is left (sentencepiece, CPM-Ant) goes through transformers, imported there. `train_tokenizer` and
`CharTokenizer` make one from the training text. `save` writes a folder that transformers.AutoTokenizer opens, with
equal ids.
"""

import copy
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ..checkpoint.files import read_json
from ..checkpoint.hub import fetch
from ..errors import InputError, message, nearest, refuse, refuse_missing
from ..theirs import TOKENIZER

T = TypeVar("T")
ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
# Old folders name no special tokens: transformers' classes know them by heart. Among the special tokens of a file these
# spellings have one meaning in every family.
USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<|endoftext|>"), "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>", "<|endoftext|>"), "cls": ("[CLS]",), "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}  # fmt: skip
# WordPiece is not trained: the library numbers its pieces in an order that differs by run.
SPECIAL = {
    "bpe": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
    "roberta": {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "cls": "<s>", "sep": "</s>",
                "mask": "<mask>"},
    "span": {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"},
    "fim": dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"),
}  # fmt: skip
SENTINELS = {  # what stands for a span that is to be predicted, or before each part of a text that is rearranged
    "span": tuple(f"<extra_id_{k}>" for k in range(100)), "fim": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
}  # fmt: skip
HABITS = ("model_max_length", "padding_side", "truncation_side")  # of transformers' tokenizer, which ours has no use for
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
GPT2_CLASSES = ("GPT2Tokenizer",)
JSON_SIZE = 256 << 20  # bytes of a tokenizer.json: the largest public ones take 35 MB
FILES = ["tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
         "chat_template.jinja", "config.json"]

Window = tuple[list[int], list[int], list[int], list[int]]  # ids, segments, and the characters from and to which a token stands


class Tokenizer:
    """A tokenizers.Tokenizer (`raw`) with the ids of its special tokens (`eos_id` and so on), None where absent.

        ids = torch.tensor([tokenizer.encode("Hello")])
        text = tokenizer.decode(model.generate(ids)[0])

    `encode` one text, `encode_pair` two, `encode_all` many; `decode` ids; `save` a folder. It does not pad: what goes on in batches
    through a model of one's own loop takes transformers.AutoTokenizer of the same folder, whose ids are the same.
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
    def special_ids(self) -> set[int]:
        """The ids of every token that stands for no text."""
        named = {i for i in map(self.id, ROLES) if i is not None}
        return named | {i for i, token in self.raw.get_added_tokens_decoder().items() if token.special}

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: which token has which id."""
        return sha256(json.dumps(sorted(self.vocabulary.items())).encode()).hexdigest()

    @property
    def behaviour(self) -> str:
        """All that decides how a text is cut, where the tokenizer can say it."""
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

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`; `special` adds what the tokenizer's own template adds ([CLS] ... [SEP], <s>, </s>)."""
        ids: list[int] = self.raw.encode(text, add_special_tokens=special).ids
        return ids

    def begin(self, text: str) -> list[int]:
        """The ids of a text that is to be gone on with: in the template, without the end of text that this may put behind."""
        ids, plain = self.encode(text), self.encode(text, special=False)
        ended = ids[-1:] == [self.eos_id] and ids[len(ids) - len(plain) :] != plain
        return ids[:-1] if ended else ids

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The ids of each text without the template: the same as one by one, and made by all cores."""
        for encoding in self.raw.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids

    def encode_pair(self, first: str, second: str | None = None, limit: int | None = None
                    ) -> tuple[list[int], list[int]]:
        """The ids and the segment ids of one text or of two, with the template's special tokens, `limit` at most.

        The longer of the two loses its end first, as with transformers' truncation=True.
        """
        return next(self.encode_pairs([(first, second)], limit))

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]], limit: int | None = None
                     ) -> Iterator[tuple[list[int], list[int]]]:
        """The same of each pair. All cores cut the texts, and each text once: a passage may stand in hundreds of pairs."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair if text is not None))
        cut = dict(zip(texts, self.raw.encode_batch_fast(texts, add_special_tokens=False), strict=True))
        if limit is not None:
            self.raw.enable_truncation(limit)
        try:
            found = [self.raw.post_process(cut[first], None if second is None else cut[second]) for first, second in pairs]
        finally:
            self.raw.no_truncation()
        for encoding in found:
            yield encoding.ids, encoding.type_ids

    def encode_words(self, words: Sequence[str], limit: int) -> tuple[list[int], list[int | None]]:
        """The ids of words with the template's special tokens, `limit` at most, and of each the number of its word (None: of none).

        A tokenizer that keeps spaces with the words that follow them (GPT-2's) is given these spaces.
        """
        self.raw.enable_truncation(limit)
        try:
            both, first, second = (self.raw.encode(text, add_special_tokens=False).tokens for text in ("a b", "a", "b"))
            spaced = both != first + second
            given = [word if k == 0 or not spaced else f" {word}" for k, word in enumerate(words)]
            encoding = self.raw.encode(given, is_pretokenized=True)
        finally:
            self.raw.no_truncation()
        return encoding.ids, encoding.word_ids

    def windows(self, first: str, second: str, limit: int, stride: int) -> Iterator[Window]:
        """Windows of `limit` tokens: `first` whole and as much of `second`, each beginning `stride` tokens before the end of the
        one before it."""
        lone = len(self.encode_pair(first, "")[0])
        if limit <= lone + stride:
            found = f"{limit} with a question of {lone} tokens"
            refuse(None, "data.seq_len", found, f"more than {lone + stride}: data.stride is {stride}")
        # cut into tokens whole: tokenizers 0.23.2 drops what of `second` is beyond `limit` where it is to do both at once. What was
        # cut alone does not know that it is the second.
        one, two = self.raw.encode_batch([first, second], add_special_tokens=False)
        pair = self.raw.encode("a", "a")
        kind = next((t for t, s in zip(pair.type_ids, pair.sequence_ids, strict=True) if s == 1), 0)
        self.raw.enable_truncation(limit, stride=stride, strategy="only_second")
        try:
            encoding = self.raw.post_process(one, two)
        finally:
            self.raw.no_truncation()
        for part in (encoding, *encoding.overflowing):
            sides = part.sequence_ids
            places = [o if s == 1 else (-1, -1) for o, s in zip(part.offsets, sides, strict=True)]
            kinds = [kind if s == 1 else t for t, s in zip(part.type_ids, sides, strict=True)]
            yield part.ids, kinds, [a for a, _ in places], [b for _, b in places]

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `text` without the template, and of each the characters from and to which it stands."""
        encoding = self.raw.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def offset(self, text: str, token: int) -> int:
        """The character of `text` at which its `token`-th id starts, for messages."""
        return int(self.raw.encode(text, add_special_tokens=False).offsets[token][0])

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `special`."""
        text: str = self.raw.decode([int(i) for i in ids], skip_special_tokens=not special)
        return text

    @property
    def segmented(self) -> bool:
        """Whether the second of two texts has another segment than the first."""
        return any(self.encode_pair("a", "a")[1])

    def save(self, folder: str | os.PathLike[str], segments: bool = True) -> None:
        """Write tokenizer.json and tokenizer_config.json into `folder`, made if it is absent. `segments`: whether the model there
        reads them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # said, because each release of transformers thinks otherwise of a tokenizer without a class of its own: without segments a
        # model of pairs answers wrongly, and to GPT-2 they are words
        inputs = ["input_ids", *(["token_type_ids"] if segments and self.segmented else []), "attention_mask"]
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {"model_input_names": inputs, **self.habits}
        config |= {f"{role}_token": token for role, token in self.special.items()}
        config |= {} if self.chat_template is None else {"chat_template": self.chat_template}
        (folder / "tokenizer.json").write_text(self.raw.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class UnknownCharacter(InputError):
    """A character that a `CharTokenizer` has not seen, and its place in the text."""

    def __init__(self, character: str, offset: int) -> None:
        found = f"{character!r} is not in the vocabulary"
        super().__init__(message(None, f"character {offset}", found, "one of the training text is wanted"))
        self.character, self.offset = character, offset


class CharTokenizer(Tokenizer):
    """One id a character, in sorted order, without special tokens: lossless, and it refuses what it has not seen."""

    def __init__(self, raw: tokenizers.Tokenizer, special: dict[str, str], name: str = "char") -> None:
        super().__init__(raw, special, name)
        self.table: dict[str, int] = raw.get_vocab(with_added_tokens=False)

    @classmethod
    def train(cls, texts: Iterable[str]) -> "CharTokenizer":
        """The characters of `texts`; as nanoGPT's data/shakespeare_char/prepare.py numbers them."""
        characters = sorted(set().union(*texts))
        if not characters:
            refuse(None, "tokenizer", "char over an empty text", "training text is wanted")
        raw = tokenizers.Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}))
        raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        raw.decoder = decoders.Fuse()
        return cls(raw, {})

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`, by a table: the library takes 2 s and 500 MB for a megabyte of characters."""
        try:
            return [self.table[c] for c in text]
        except KeyError as e:
            raise UnknownCharacter(e.args[0], text.index(e.args[0])) from None

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        return map(self.encode, texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]], limit: int | None = None
                     ) -> Iterator[tuple[list[int], list[int]]]:
        for first, second in pairs:
            ids = (self.encode(first) + self.encode(second or ""))[:limit]
            yield ids, [0] * len(ids)

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

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self.foreign(text, add_special_tokens=special)["input_ids"]
        return ids

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        return (self.encode(text, special=False) for text in texts)

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]], limit: int | None = None
                     ) -> Iterator[tuple[list[int], list[int]]]:
        for first, second in pairs:
            out = self.foreign(first, second, return_token_type_ids=True, truncation=limit is not None, max_length=limit)
            yield out["input_ids"], out["token_type_ids"]

    def encode_words(self, words: Sequence[str], limit: int) -> tuple[list[int], list[int | None]]:
        refuse(self.name, "objective", "tag with a tokenizer that does not say which word a token is of", "another tokenizer")

    def windows(self, first: str, second: str, limit: int, stride: int) -> Iterator[Window]:
        refuse(self.name, "objective", "qa with a tokenizer that does not say where a token stands", "another tokenizer")

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        refuse(self.name, "objective", "chat with a tokenizer that does not say where a token stands", "another tokenizer")

    def offset(self, text: str, token: int) -> int:
        return len(self.foreign.decode(self.encode(text, special=False)[:token]))

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        text: str = self.foreign.decode([int(i) for i in ids], skip_special_tokens=not special)
        return text

    def save(self, folder: str | os.PathLike[str], segments: bool = True) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        copy.deepcopy(self.foreign).save_pretrained(folder)  # CPM-Ant's deletes entries of its own table as it saves


def open_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """What a recipe's `tokenizer` says: `char`, `bpe:8000`, `roberta:8000`, `span:8000`, `fim:8000`, made of `texts`; a folder,
    a preset or a hub id."""
    kind, _, size = spec.partition(":")
    if spec == "char":
        return CharTokenizer.train(texts)
    if made_here(spec):
        if not (size.isascii() and size.isdigit() and len(size) < 10):
            refuse(None, "tokenizer", repr(spec), f"a size is wanted: {kind}:8000")
        return train_tokenizer(texts, int(size), kind)
    return load_tokenizer(spec)


def made_here(spec: str) -> bool:
    """Whether what a recipe's `tokenizer` says is made of the run's own texts."""
    return spec == "char" or (spec.partition(":")[0] in SPECIAL and not Path(spec).exists())


def train_tokenizer(texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> Tokenizer:
    """Train byte-level BPE on `texts`: `bpe` with GPT-2's <|endoftext|>, `roberta` with RoBERTa's special tokens, `span` with
    padding as number 0 and a hundred sentinels, for span corruption, `fim` as bpe with the three marks of fill-in-the-middle.

    The special tokens have the first ids. `vocab_size` is an upper bound: a small text has fewer merges.
    """
    if kind not in SPECIAL:
        refuse(None, "tokenizer", repr(kind), nearest(kind, SPECIAL))
    special = SPECIAL[kind]
    tokens = [*dict.fromkeys(special.values()), *SENTINELS.get(kind, ())]
    if vocab_size < 256 + len(tokens):
        refuse(None, "tokenizer", f"{kind}:{vocab_size}", f"at least {256 + len(tokens)} tokens are wanted")
    raw = _byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the library gives a set, whose order differs by run
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(texts, trainer)
    if "cls" in special:
        cls, sep = ((special[role], tokens.index(special[role])) for role in ("cls", "sep"))
        raw.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=False, add_prefix_space=False)
    return Tokenizer(raw, special, f"{kind}:{vocab_size}")


def load_tokenizer(name: str | os.PathLike[str], presets: Mapping[str, str | None] | None = None) -> Tokenizer:
    """Load the tokenizer of a folder, a preset or a hub id, of which only the tokenizer's files are downloaded. `presets`: names
    that stand for hub ids; absent, those of the families. Errors: `InputError`."""
    folder = Path(name).expanduser()  # which wins over a preset of its name, as for the weights
    if not folder.is_dir():
        folder = _fetch(str(name), presets)
    config = _optional(folder / "tokenizer_config.json")
    found = _found(folder, config)
    found.chat_template = _chat_template(folder, config)
    found.habits = {key: config[key] for key in HABITS if key in config}
    return found


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a folder: a file of its own, which wins, or the one called default of those in tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        return "\n".join(_lines(folder / "chat_template.jinja"))
    said = config.get("chat_template")
    if isinstance(said, list):
        said = {one.get("name"): one.get("template") for one in said if isinstance(one, dict)}.get("default")
    return said if isinstance(said, str) else None


def _found(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a folder, by what files there are."""
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder, config)
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if (folder / "vocab.txt").is_file() and kind in ("", *BERT_CLASSES):
        vocab = {t: i for i, t in enumerate(_lines(folder / "vocab.txt"))}
        if {"[UNK]", "[CLS]", "[SEP]"} <= set(vocab):
            return _from_wordpiece(folder, config, vocab)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and kind in ("", *GPT2_CLASSES):
        vocab = read_json(folder / "vocab.json", JSON_SIZE)
        if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
            refuse(folder / "vocab.json", None, "not a vocabulary", "an object of tokens and their ids is wanted")
        if "<|endoftext|>" in vocab:
            return _from_bpe(folder, config, vocab)
    return _from_transformers(folder)


def _from_json(folder: Path, config: dict[str, Any]) -> Tokenizer:
    file = folder / "tokenizer.json"
    content = read_json(file, JSON_SIZE)
    raw = _guarded(file, lambda: _tried(tokenizers.Tokenizer.from_str(json.dumps(content))))
    special = _special(folder, config, raw)  # the config's add_bos_token counts for less than the file's template
    by_character = raw.pre_tokenizer is not None and content["model"].get("type") == "WordLevel" and not special
    if by_character and all(len(token) == 1 for token in raw.get_vocab()):
        return CharTokenizer(raw, special, str(file))
    return Tokenizer(raw, special, str(file))


def _from_wordpiece(folder: Path, config: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    file = folder / "vocab.txt"
    raw = _guarded(file, lambda: tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]")))
    raw.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"), lowercase=bool(config.get("do_lower_case", True)))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##")
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")])
    special = {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    return Tokenizer(raw, special | _named(folder, config), str(file))


def _from_bpe(folder: Path, config: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    file = folder / "merges.txt"
    lines = [line for line in _lines(file) if line and not line.startswith("#version")]
    if bad := [line for line in lines if line.count(" ") != 1]:
        refuse(file, None, repr(bad[0]), "two tokens a line are wanted")
    pairs = [(first, second) for first, _, second in (line.partition(" ") for line in lines)]
    raw = _guarded(file, lambda: _byte_level(models.BPE(vocab, pairs), bool(config.get("add_prefix_space"))))
    added = _optional(folder / "added_tokens.json")
    raw.add_tokens(sorted(added, key=lambda token: added[token]))
    special = SPECIAL["bpe"] | _named(folder, config)
    if config.get("add_bos_token"):
        bos = special["bos"]
        raw.add_special_tokens([AddedToken(bos, special=True)])
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, raw.token_to_id(bos))])
    return Tokenizer(raw, special, str(folder / "vocab.json"))


def _from_transformers(folder: Path) -> Tokenizer:
    if not any(f.is_file() and fnmatchcase(f.name, kind) for f in folder.iterdir() for kind in FILES[:-1]):
        refuse_missing(folder, None, "no tokenizer file in it", "a folder with tokenizer.json is wanted")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        refuse_missing(folder, None, "no tokenizer.json", "transformers, which reads other kinds, must be installed")
    try:
        with _quiet():  # it says on standard error what it will then raise
            found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as e:  # every kind of error reaches us: a missing package, a broken file, an unknown class
        said = str(e).strip().split("\n")[0] or type(e).__name__
        refuse(folder, "tokenizer", f"transformers cannot read it ({said})", "a folder with tokenizer.json is wanted")
    if not hasattr(found, "backend_tokenizer"):
        return ForeignTokenizer(found, str(folder))
    named = {role: getattr(found, f"{role}_token", None) for role in ROLES}
    special = {role: str(token) for role, token in named.items() if token is not None}
    return Tokenizer(found.backend_tokenizer, special, str(folder))


def _fetch(name: str, presets: Mapping[str, str | None] | None) -> Path:
    """The folder of a hub id's tokenizer files."""
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if presets:  # it is the model's
            refuse_missing(name, "model", "no such folder", "an existing folder, a preset or a hub id is wanted")
        refuse_missing(name, "tokenizer", "no such folder", "a folder, a hub id, char or bpe:8000 is wanted")
    if presets is None:
        from ..registry import hubs  # every family, and torch

        presets = hubs()
    return fetch(name, FILES, presets)


def _special(folder: Path, config: dict[str, Any], raw: tokenizers.Tokenizer) -> dict[str, str]:
    """The special tokens by role: as the files name them, else by their usual spelling in tokenizer.json."""
    if named := _named(folder, config):
        return named
    present = {token.content for token in raw.get_added_tokens_decoder().values() if token.special}
    found = {role: next((t for t in usual if t in present), None) for role, usual in USUAL.items()}
    return {role: token for role, token in found.items() if token is not None}


def _named(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Roles that tokenizer_config.json or special_tokens_map.json name; the former wins."""
    named = {}
    for source in (_optional(folder / "special_tokens_map.json"), config):
        for key, token in source.items():  # in the file's order, which numbers the tokens that the vocabulary lacks
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and key.removesuffix("_token") in ROLES:
                named[key.removesuffix("_token")] = token
    return named


def _optional(file: Path) -> dict[str, Any]:
    """A JSON object that need not be there."""
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        refuse(file, None, f"a JSON {type(content).__name__}", "an object is wanted")
    return content


def _lines(file: Path) -> list[str]:
    """The lines of a vocabulary; only the newline ends one, since other separators are tokens of BERT's."""
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as e:
        refuse(file, f"byte {e.start}", "not UTF-8", "a UTF-8 vocabulary is wanted")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _byte_level(model: Any, prefix_space: bool = False) -> tokenizers.Tokenizer:
    raw = tokenizers.Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    return raw


def _tried(raw: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`raw` after it has encoded and decoded: some broken files are only found out then."""
    for arguments in (("a",), ("a", "b")):
        try:
            raw.decode(raw.encode(*arguments).ids)
        except Exception as e:  # a tokenizer without <unk> may well refuse the letter a
            if "unk" not in str(e).lower():
                raise
    return raw


def _guarded(file: Path, build: Callable[[], T]) -> T:
    """`build()`, with whatever the Rust library throws at a broken file turned into a refusal."""
    try:
        with _quiet():
            return build()
    except (KeyboardInterrupt, SystemExit, InputError):
        raise
    except BaseException as e:  # a Rust panic is a BaseException
        refuse(file, None, f"not a tokenizer ({str(e).strip()})", "a file that tokenizers can read is wanted")


@contextmanager
def _quiet() -> Iterator[None]:
    """Standard error closed: Rust prints a panic's backtrace there before Python sees the exception."""
    with suppress(OSError):  # of a pipe that nobody reads any more
        sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
