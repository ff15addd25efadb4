"""Opens the tokenizers of Hugging Face folders.

The tokenizers library reads tokenizer.json; tokenizers for vocab.txt (BERT) and vocab.json with merges.txt (GPT-2) are built with
it; all others (sentencepiece, CPM-Ant) go through transformers, which is imported only then. LLaMA's tokenizer.json is used as it
is, as in transformers 4; transformers 5 builds a new tokenizer from its vocabulary, which splits texts that begin with a space, or
contain special tokens, differently.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ..checkpoint.files import ADAPTER, check_base
from ..checkpoint.hub import fetch
from ..checkpoint.state import check_there
from ..checkpoint.strict_json import read_json
from ..errors import InputError, refuse, refuse_missing
from .tokenizer import HABITS, ROLES, CharTokenizer, ForeignTokenizer, Tokenizer
from .tokenizer_train import SPECIAL, byte_level, least, made_here, train_tokenizer

T = TypeVar("T")
# Old folders name no special tokens: transformers' classes know them by heart. Among the special tokens of a file these
# spellings have one meaning in every family.
USUAL = {
    "bos": ("<s>", "<|begin_of_text|>", "<|endoftext|>"), "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>", "<|endoftext|>"), "cls": ("[CLS]",), "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}  # fmt: skip
BERT_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
GPT2_CLASSES = ("GPT2Tokenizer",)
UNSEGMENTED = ("DistilBertTokenizer", "MPNetTokenizer")  # whose models do not take the segments that the template gives
JSON_SIZE = 256 << 20  # bytes of a tokenizer.json: the largest public ones take 35 MB
FILES = ["tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model",
         "chat_template.jinja"]


def open_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that a recipe's `tokenizer` names: `char`, `bpe:8000`, `roberta:8000`, `span:8000`, `fim:8000`, trained on
    `texts`; or a folder, a preset or a hub id."""
    kind, _, size = spec.partition(":")
    if spec == "char":
        return CharTokenizer.train(texts)
    if made_here(spec):
        if not (size.isascii() and size.isdigit() and len(size) < 10):
            refuse(None, "tokenizer", repr(spec), f"a size: {kind}:8000")
        return train_tokenizer(texts, int(size), kind)
    if size.isascii() and size.isdigit() and len(size) < 10 and not Path(spec).exists():
        from ..registry import hubs  # every family, and torch

        made = ", ".join(f"{name}:{max(int(size), least(name))}" for name in SPECIAL)
        there = Path(kind).is_dir() or "/" in kind
        named = kind if there else next((name for name in hubs() if name.startswith(kind)), "a preset's name")
        refuse(None, "tokenizer", repr(spec), f"one that is made of your text ({made}); or {named}, with the size that it has")
    return load_tokenizer(spec)


def load_tokenizer(name: str | os.PathLike[str], presets: Mapping[str, str | None] | None = None) -> Tokenizer:
    """Load the tokenizer of a folder, a preset or a hub id; for the latter two only the tokenizer's files are downloaded.

    An adapter without a tokenizer gives that of its base. `presets`: names that stand for hub ids; by default those of the
    families. Errors: `InputError` for an unknown name, and for a tokenizer whose files are missing, broken or of an unknown kind.
    """
    if not isinstance(name, str | os.PathLike):
        refuse(None, "name", f"a {type(name).__name__}", "a folder, a preset or a hub id")
    folder = Path(os.path.expanduser(name))  # which wins over a preset of its name, as for the weights
    if not folder.is_dir():
        folder = _fetch(str(name), presets)
    folder = _of_base(folder, presets)
    config = _optional(folder / "tokenizer_config.json")
    found = _found(folder, config)
    _check_vocabulary(folder, found)
    found.chat_template = _chat_template(folder, config)
    older = {} if config.get("added_tokens_decoder") is not None else _optional(folder / "special_tokens_map.json")
    inputs = {"model_input_names": ["input_ids", "attention_mask"]} if _class_of(folder, config) in UNSEGMENTED else {}
    said = inputs | older | config  # as in `_keep_whole`: what it has not added is no token
    found.habits = {key: _content(said[key]) for key in HABITS if key in said}
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
    """The tokenizer of a folder, depending on its files."""
    if (folder / "tokenizer.json").is_file():
        return _from_json(folder, config)
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if (folder / "vocab.txt").is_file() and kind in ("", *BERT_CLASSES):
        vocab = {t: i for i, t in enumerate(_lines(folder / "vocab.txt"))}
        special = {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")} | _named(folder, config)
        if {special[role] for role in ("unk", "cls", "sep")} <= set(vocab):
            return _from_wordpiece(folder, config, vocab, special)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and kind in ("", *GPT2_CLASSES):
        vocab = read_json(folder / "vocab.json", JSON_SIZE)
        if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
            refuse(folder / "vocab.json", None, "not a vocabulary", "an object of tokens and their ids")
        if "<|endoftext|>" in vocab:
            return _from_bpe(folder, config, vocab)
    return _from_transformers(folder)


def _check_vocabulary(folder: Path, found: Tokenizer) -> None:
    """Refuse a tokenizer with nothing but special tokens, such as transformers makes from a folder without a vocabulary: no text
    would have a token, and the error would blame the data."""
    if not isinstance(found, ForeignTokenizer) and found.raw.get_vocab_size(with_added_tokens=False) > len(found.special_ids) + 1:
        return  # without a list of them all
    own = isinstance(found, ForeignTokenizer) or (folder / "tokenizer.json").is_file()  # words may all be added ones
    tokens = found.vocabulary if own else found.raw.get_vocab(with_added_tokens=False)
    if {i for token, i in tokens.items() if token != "▁"} <= found.special_ids:  # a space, which T5's class knows by itself
        wanted = "tokenizer.json in it, or vocab.json and merges.txt, or vocab.txt, or sentencepiece's .model"
        refuse_missing(folder, "tokenizer", "no vocabulary, only special tokens", wanted)


def _from_json(folder: Path, config: dict[str, Any]) -> Tokenizer:
    file = folder / "tokenizer.json"
    content = read_json(file, JSON_SIZE)
    raw = _guarded(file, lambda: _tried(tokenizers.Tokenizer.from_str(json.dumps(content))))
    _as_its_class(folder, config, raw)
    _keep_whole(folder, config, raw)
    special = _special(folder, config, raw)  # the config's add_bos_token counts for less than the file's template
    by_character = raw.pre_tokenizer is not None and content["model"].get("type") == "WordLevel" and not special
    if by_character and all(len(token) == 1 for token in raw.get_vocab()):
        return CharTokenizer(raw, special, str(file))
    return Tokenizer(raw, special, str(file))


def _from_wordpiece(folder: Path, config: dict[str, Any], vocab: dict[str, int], special: dict[str, str]) -> Tokenizer:
    file, (cls, sep) = folder / "vocab.txt", (special["cls"], special["sep"])
    raw = _guarded(file, lambda: tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=special["unk"])))
    raw.normalizer = _bert_normalizer(config)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##")
    raw.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0", pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, vocab[token]) for token in (cls, sep)])
    _keep_whole(folder, config, raw)
    return Tokenizer(raw, special, str(file))


def _bert_normalizer(config: dict[str, Any]) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"), lowercase=bool(config.get("do_lower_case", True)))


def _from_bpe(folder: Path, config: dict[str, Any], vocab: dict[str, int]) -> Tokenizer:
    file = folder / "merges.txt"
    lines = [line for line in _lines(file) if line and not line.startswith("#version")]
    if bad := [line for line in lines if line.count(" ") != 1]:
        refuse(file, None, repr(bad[0]), "two tokens a line")
    pairs = [(first, second) for first, _, second in (line.partition(" ") for line in lines)]
    raw = _guarded(file, lambda: byte_level(models.BPE(vocab, pairs), bool(config.get("add_prefix_space"))))
    _keep_whole(folder, config, raw)
    special = SPECIAL["bpe"] | _named(folder, config)
    if config.get("add_bos_token"):
        bos = special["bos"]
        raw.add_special_tokens([AddedToken(bos, special=True)])
        raw.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, raw.token_to_id(bos))])
    return Tokenizer(raw, special, str(folder / "vocab.json"))


def _from_transformers(folder: Path) -> Tokenizer:
    if not _held(folder):
        wanted = "a folder with tokenizer.json; a recipe takes another's by tokenizer=NAME"
        refuse_missing(folder, None, "no tokenizer file in it", wanted)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        refuse_missing(folder, None, "no tokenizer.json", "transformers, which reads other kinds, must be installed")
    try:
        with _quiet():  # it says on standard error what it will then raise
            found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as e:  # every kind of error reaches us: a missing package, a broken file, an unknown class
        said = str(e).strip().split("\n")[0] or type(e).__name__
        refuse(folder, "tokenizer", f"transformers cannot read it ({said})", "a folder with tokenizer.json")
    if not hasattr(found, "backend_tokenizer"):
        return ForeignTokenizer(found, str(folder))
    named = {role: getattr(found, f"{role}_token", None) for role in ROLES}
    special = {role: str(token) for role, token in named.items() if token is not None}
    return Tokenizer(_by_score(Path(str(getattr(found, "vocab_file", ""))), found.backend_tokenizer), special, str(folder))


def _by_score(file: Path, raw: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """`raw`, made of a sentencepiece `file`, with its merges in the order of the pieces' scores, as sentencepiece makes them, and
    not of their numbers, as transformers 5.23 does. LLaMA's runs of spaces, whose numbers are low, have the lowest scores."""
    content = json.loads(raw.to_str())
    if file.suffix != ".model" or not file.is_file() or content["model"]["type"] != "BPE":
        return raw
    from sentencepiece import SentencePieceProcessor  # transformers has read the file with it

    try:
        pieces = SentencePieceProcessor(model_file=str(file))
    except RuntimeError:  # LLaMA 3's is no sentencepiece file
        return raw
    scores = {pieces.id_to_piece(k): pieces.get_score(k) for k in range(pieces.get_piece_size())}
    content["model"]["merges"].sort(key=lambda pair: -scores.get("".join(pair), -math.inf))
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _class_of(folder: Path, config: dict[str, Any]) -> str:
    """Transformers' class for a folder, as tokenizer_config.json names it, or else, of some, by the model in config.json."""
    usual = {name.removesuffix("Tokenizer").lower(): name for name in (*BERT_CLASSES, *GPT2_CLASSES, *UNSEGMENTED)}
    of_model = usual.get(str(_optional(folder / "config.json").get("model_type")))
    return str(config.get("tokenizer_class") or of_model).removesuffix("Fast")


def _as_its_class(folder: Path, config: dict[str, Any], raw: tokenizers.Tokenizer) -> None:
    """Set what transformers' class for a folder takes from tokenizer_config.json, or else by its own default, and not from
    tokenizer.json: what BERT's makes of letters, and whether GPT-2's puts a space before a text."""
    kind = _class_of(folder, config)
    if kind in BERT_CLASSES and isinstance(raw.normalizer, normalizers.BertNormalizer):
        raw.normalizer = _bert_normalizer(config)
    if kind in GPT2_CLASSES and isinstance(raw.pre_tokenizer, pre_tokenizers.ByteLevel):
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))


def _keep_whole(folder: Path, config: dict[str, Any], raw: tokenizers.Tokenizer) -> None:
    """Add the tokens that the files beside the vocabulary name and that it does not: those with an id, in added_tokens_decoder or
    added_tokens.json, then special ones, of a role or of none. A text that holds one would be cut into other ids."""
    marked = {token.content for token in raw.get_added_tokens_decoder().values()}
    decoder, sources = config.get("added_tokens_decoder"), [config]
    if decoder is None:
        sources.insert(0, _optional(folder / "special_tokens_map.json"))
    others = [source.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens") for source in sources]
    plain = [token for found in others for token in (found.values() if isinstance(found, dict) else found)]
    special = [*_named(folder, config).values(), *map(_content, plain)]
    if decoder is None:
        file = folder / "added_tokens.json"
        flags: list[tuple[Any, dict[str, Any]]] = [
            (i, {"content": t, "special": t in special, "normalized": t not in special}) for t, i in _optional(file).items()]
    else:
        file, table = folder / "tokenizer_config.json", decoder if isinstance(decoder, dict) else {"": None}
        flags = [(int(i) if i.isdecimal() else -1, token if isinstance(token, dict) else {}) for i, token in table.items()]
    if not all(type(i) is int and i >= 0 and isinstance(token.get("content"), str) for i, token in flags):
        refuse(file, None, "added tokens without a text and an id each", "a table of them, as transformers writes it")
    if odd := [token for token in special if not isinstance(token, str)]:
        refuse(folder, "additional_special_tokens", repr(odd[0]), "tokens, as text")
    new = sorted(((i, token) for i, token in flags if token["content"] not in marked), key=lambda pair: pair[0])
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    made = _guarded(file, lambda: [AddedToken(**{key: token[key] for key in known if key in token}) for _, token in new])
    raw.add_tokens(made)
    for i, token in new:
        if (number := raw.token_to_id(token["content"])) != i:
            found = f"id {i} for {token['content']!r}, which becomes number {number}"
            refuse(file, None, found, "ids behind those of the vocabulary, without a gap")
    marked |= {token["content"] for _, token in new}
    raw.add_special_tokens([AddedToken(token, special=True) for token in dict.fromkeys(special) if token not in marked])


def _fetch(name: str, presets: Mapping[str, str | None] | None) -> Path:
    """The folder of a hub id's tokenizer files."""
    check_there(name)
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if presets:  # it is the model's
            refuse_missing(name, "model", "no such folder", "an existing folder, a preset or a hub id")
        if Path(name).is_file():
            refuse(name, "tokenizer", "a file", f"the folder that holds it: {Path(name).parent}")
        refuse_missing(name, "tokenizer", "no such folder", "a folder, a hub id, char or bpe:8000")
    if presets is None:
        from ..registry import hubs  # every family, and torch

        presets = hubs()
    return fetch(name, [*FILES, "config.json", ADAPTER[0]], presets)


def _of_base(folder: Path, presets: Mapping[str, str | None] | None) -> Path:
    """The folder of the base, if this one holds an adapter and no tokenizer, as written by peft; otherwise the folder itself."""
    if _held(folder) or not (folder / ADAPTER[0]).is_file():
        return folder
    said = read_json(folder / ADAPTER[0])
    base = said.get("base_model_name_or_path") if isinstance(said, dict) else None
    if not isinstance(base, str) or not base:
        return folder  # which is refused as the model, or as a folder without a tokenizer
    check_base(folder, base)
    there = Path(os.path.expanduser(base))
    return there if there.is_dir() else _fetch(base, presets)


def _held(folder: Path) -> bool:
    """Whether a folder holds any file of a tokenizer."""
    return any(f.is_file() and fnmatchcase(f.name, kind) for f in folder.iterdir() for kind in FILES)


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
            token = _content(token)
            if isinstance(token, str) and key.removesuffix("_token") in ROLES:
                named[key.removesuffix("_token")] = token
    return named


def _content(token: Any) -> Any:
    """The text of a token that a file may have with its flags; of each in a list. Anything else as it is."""
    if isinstance(token, list):
        return [_content(one) for one in token]
    return token["content"] if isinstance(token, dict) and "content" in token else token


def _optional(file: Path) -> dict[str, Any]:
    """A JSON object that need not be there."""
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        refuse(file, None, f"a JSON {type(content).__name__}", "an object")
    return content


def _lines(file: Path) -> list[str]:
    """The lines of a vocabulary; only the newline ends one, since other separators are tokens of BERT's."""
    try:
        text = file.read_bytes().decode()
    except UnicodeDecodeError as e:
        refuse(file, f"byte {e.start}", "not UTF-8", "a UTF-8 vocabulary")
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


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
        refuse(file, None, f"not a tokenizer ({str(e).strip()})", "a file that tokenizers can read")


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
