"""Reads and writes config.json by one table of keys.

Keys that a family does not model are kept and written back unchanged; values that it cannot honour are refused by name.
"""

import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import LIMIT, InputError, nearest, refuse
from ..theirs import FIELDS

C = TypeVar("C", bound="Config")
BIGGEST = 2**31 - 1  # a size beyond this is a mistake or an attack; refused before anything is allocated
DEEPEST = 1024  # layers, each of which is made, if only on the meta device; the deepest published model has 126
TRANSFORMERS = {  # keys without a field that scripts set on a config of transformers', and what does the same
    "use_cache": "give it to a forward: model(ids, use_cache=True)",
    "output_hidden_states": "give it to a forward: model(ids, output_hidden_states=True)",
    "output_attentions": "leave it out: attention here keeps no weights",
    "gradient_checkpointing": "mc.parallelize(model, mc.Machine(recompute='full'))",
    "problem_type": "leave it out: labels that are numbers are a regression or several labels, whole numbers are classes",
}  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
EVERYWHERE = {"hidden_size": "dim", "num_hidden_layers": "layers", "num_attention_heads": "heads"}  # as attribute_map of theirs
LABELS = 2**20  # each has a name


@dataclass(frozen=True)
class Key:
    """How a key of config.json that is not a plain number becomes a field. `read(value, whole file)` may raise KeyError for a value
    that it does not know; `known` lists those that it does. `write(field)` gives the keys to write."""

    field: str
    read: Callable[[Any, Mapping[str, Any]], Any]
    write: Callable[[Any], dict[str, Any]]
    known: tuple[str, ...] = ()
    always: bool = False  # read even where the key is absent


def choice(name: str, field: str, values: Mapping[str, Any], **also: Mapping[str, Any]) -> dict[str, Key]:
    """A key whose value is one of a few words, each of which selects one of our mechanisms. If several words mean the same
    mechanism, the first is written.

    `also` names further keys whose values follow from the word; a file in which they differ is refused.
    """
    words = {id(value): word for word, value in reversed(list(values.items()))}

    def read(word: Any, whole: Mapping[str, Any]) -> Any:
        mechanism = values[word]
        for key, by in also.items():
            if whole.get(key, by[word]) != by[word]:
                refuse(None, key, repr(whole[key]), f"{by[word]!r}, as {name} {word!r} has it")
        return mechanism

    def write(mechanism: Any) -> dict[str, Any]:
        word = words[id(mechanism)]
        return {name: word} | {key: by[word] for key, by in also.items()}

    return {name: Key(field, read, write, tuple(values))}


def token(name: str, field: str) -> dict[str, Key]:
    """A key whose value is the id of a token, which may be 0."""

    def read(value: Any, _: Mapping[str, Any]) -> int:
        if type(value) is not int or not 0 <= value < BIGGEST:
            refuse(None, name, repr(value), "the id of a token")
        return value

    return {name: Key(field, read, lambda now: {name: now})}


@dataclass(frozen=True)
class Table:
    """A family's config.json: `keys` maps each key to a field (`new|old` where it has had two names), `fixed` holds the only
    values of other keys under which this family computes what transformers would (absent is fine), and `refused` those of keys that
    no config declares, and so none is written with, under which it does not."""

    model_type: str
    keys: Mapping[str, str | Key]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every family's frozen config has in addition to its own fields."""

    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")  # of a classification or tagging head
    file: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)  # the config.json it came from
    hf: ClassVar[Table]
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "last_hidden_state", "hidden_states"]  # by Trainer
    _commit_hash: ClassVar[None] = None  # of a file of the hub: pipelines ask every config, in transformers 5.17

    def verify(self) -> None:
        """Refuse fields that contradict each other; families override it. The caller that reads a file adds its name."""

    def divisible(self, field: str, by: str) -> None:
        """Refuse a field that is not a multiple of another (None: the family's default)."""
        a, b = getattr(self, field), getattr(self, by)
        if a and b and a % b:
            keys = {now: key.split("|")[0] for key, now in rows(self)}
            refuse(None, keys[field], str(a), f"a multiple of {keys[by]}, which is {b}")

    def known(self, token: str, vocab: str) -> None:
        """Refuse the id of a token that the vocabulary does not have."""
        if (found := getattr(self, token)) >= (most := getattr(self, vocab)):
            key = {now: key for key, now in rows(self)}[token]
            refuse(None, key, str(found), f"an id below {most}, the vocabulary")

    def agreed(self, *names: str) -> None:
        """Refuse a file that has both spellings of a field's key, with different values."""
        for spelled, now in rows(self):
            found = {key: self.file[key] for key in spelled.split("|") if self.file.get(key) is not None}
            values = list(found.values())
            if now in names and any(value != values[0] for value in values):
                refuse(None, " and ".join(found), str(values), "one value, for they are one key")

    def single_label(self) -> None:
        """Refuse to train a classifier whose loss is not the cross entropy of one label among several."""
        kind = self.file.get("problem_type")
        if kind not in (None, "single_label_classification"):
            wanted = "classes are trained as single_label_classification; in a recipe objective=multilabel or objective=regress"
            refuse("config.json", "problem_type", repr(kind), wanted)
        if kind is None and self.num_labels == 1:
            wanted = "labels that are numbers (labels.float()), or num_labels from 2"
            refuse("config.json", "num_labels", "1, which means a regression", wanted)

    def numbers(self) -> None:
        """Refuse to train a classifier on labels that are numbers if transformers would compute a different loss for them."""
        kind, several = self.file.get("problem_type"), self.num_labels > 1
        if kind not in (None, "multi_label_classification" if several else "regression"):
            found = f"{kind!r} with {self.num_labels} labels, each a number"
            refuse("config.json", "problem_type", found, "regression of one label, or multi_label_classification of several")

    def to_dict(self) -> dict[str, Any]:
        """The Hugging Face config. It says whether the head is tied, which a file may leave to the class, because peft looks
        there."""
        out, tied = write(self), vars(self).get("tie", self.hf.fixed.get("tie_word_embeddings"))
        if tied is not None:
            out.setdefault("tie_word_embeddings", tied)
        return out

    def to_json_string(self, use_diff: bool = True) -> str:
        """The same as text, which Trainer writes into a log of tensorboard."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the Hugging Face config."""
        return self.to_dict().get(key, default)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Self:
        """Itself. transformers asks for this because models of texts and pictures have one config for each."""
        return self

    def __getattr__(self, name: str) -> Any:  # asked for what is no field: a key of config.json, which others' programs read
        if not name.startswith("_"):
            values = self.to_dict()
            if name in ("id2label", "label2id"):  # by numbers, which JSON has as texts
                names = dict(enumerate(self.labels))
                return names if name == "id2label" else {label: i for i, label in names.items()}
            if name in values or name in (*TOKENS, "problem_type"):
                return values.get(name)
            spellings = next((key.split("|") for key, _ in rows(self) if name in key.split("|")), [])  # of one key
            if other := [key for key in spellings if key in values]:
                return values[other[0]]
            if name == "is_encoder_decoder":  # only that of T5's encoder alone is told
                return values.get("decoder_start_token_id") is not None
            if name in EVERYWHERE:
                return getattr(self, EVERYWHERE[name])
        more = "; a reference model for trl is a copy: ref_model=copy.deepcopy(model)" if name == "_attn_implementation" else ""
        if name in FIELDS and FIELDS[name] in {f.name for f in fields(self)}:
            more = f"; here it is {FIELDS[name]}"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}", name=name, obj=self)

    @property
    def model_type(self) -> str:
        return self.hf.model_type

    @property
    def num_labels(self) -> int:
        return len(self.labels)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], file: Any = "config.json") -> Self:
        """The config of a Hugging Face config; `file` is named in errors."""
        return read(cls, values, file)


def unchanging(config: Config, name: str, value: Any) -> None:
    """Called when a field of a config, or a key of config.json, is assigned: raises an error that says what to do instead, which
    dataclasses' own does not.

    Ids of special tokens may be assigned, because they do not change what is computed and come from the tokenizer: they are then
    read and saved as if the file had them. So may `use_cache = False`, which Trainer sets, and any value that a key already has
    (peft sets `pretraining_tp = 1`).
    """
    if name in TOKENS:
        check_common({name: value}, None)
        object.__setattr__(config, "file", {**config.file, name: value})
        return
    values = config.to_dict()
    if (name == "use_cache" and not value) or (name in values and type(value) is type(values[name]) and value == values[name]):
        return
    field = meant(type(config), name)
    how = TRANSFORMERS.get(name, f"give it where the model is made: mc.load(name, config={{{field!r}: {value!r}}})")
    if field in ("labels", "num_labels"):
        how = "give num_labels or id2label where the model is made: mc.load(name, task='classify', num_labels=3)"
    elif name not in TRANSFORMERS and field not in {f.name for f in fields(config)}:
        how = f"no field of it; {nearest(field, [f.name for f in fields(config) if f.name != 'file'])}"
    raise FrozenInstanceError(f"{type(config).__name__}.{name}: a config does not change; {how}"[:LIMIT])


def read(cls: type[C], values: Mapping[str, Any], file: Any) -> C:
    """See `Config.from_dict`."""
    found = values.get("model_type", cls.hf.model_type)
    if found != cls.hf.model_type:
        refuse(file, "model_type", repr(found), f"{cls.__name__} reads {cls.hf.model_type!r}")
    for name, wanted in cls.hf.fixed.items():
        if name in values and values[name] != wanted:
            refuse(file, name, repr(values[name]), f"only {wanted!r} is implemented here")
    for name, others in cls.hf.refused.items():
        if values.get(name) in others:
            refuse(file, name, repr(values[name]), "a file without it: what it asks of transformers is not implemented here")
    check_common(values, file)
    out: dict[str, Any] = {"file": dict(values), "labels": read_labels(values, file)}
    hints = get_type_hints(cls)
    for spelled, target in cls.hf.keys.items():
        there = [k for k in spelled.split("|") if k in values]
        key = next((k for k in there if values[k] is not None), there[0] if there else None)
        if isinstance(target, Key):
            if key is not None or target.always:
                try:
                    with told(file):
                        out[target.field] = target.read(values.get(key) if key else None, values)
                except (KeyError, TypeError):
                    refuse(file, key or spelled, repr(values.get(key or "")), nearest(values.get(key or ""), target.known))
        elif key is not None and (values[key] is not None or hints[target] is not float):
            out[target] = check(values[key], hints[target], file, key, target)  # a rate of null is one that was never set
    config = cls(**out)
    with told(file):
        config.verify()
    return config


@contextmanager
def told(file: Any) -> Iterator[None]:
    """A context that adds the file's name to a refusal that does not know it."""
    try:
        yield
    except InputError as problem:
        found, wanted = str(problem).rsplit("; ", 1)
        refuse(file, None, found, wanted)


def check_common(values: Mapping[str, Any], file: Any) -> None:
    """Check the keys that every family reads as they are."""
    for key in ("initializer_range", "initializer_factor", "init_std"):
        if key in values:
            check(values[key], float, file, key)
    for key in TOKENS:
        ids = values.get(key)
        for one in ids if isinstance(ids, list) and key == "eos_token_id" else [ids]:
            if one is not None and not (type(one) is int and -1 <= one < BIGGEST):  # -1: none, in old files
                refuse(file, key, repr(one), "the id of a token, or null")


def read_labels(values: Mapping[str, Any], file: Any) -> tuple[str, ...]:
    """The names of the labels. Where `num_labels` is another number, it counts and they have none, as in transformers: a file of
    2019 may name two, whatever there are."""
    names, count = values.get("id2label") or {}, values.get("num_labels")
    if not isinstance(names, dict):
        refuse(file, "id2label", repr(names), "a name for each number from 0 on")
    if names and count in (None, len(names)):
        wanted = {str(i) for i in range(len(names))}
        if {str(k) for k in names} != wanted:
            refuse(file, "id2label", f"keys {list(names)[:5]}", f"a name for each of 0 to {len(names) - 1}")
        for key, name in names.items():
            if not isinstance(name, str | int):  # numbers, where a table's own values became the names
                refuse(file, f"id2label.{key}", repr(name), "the name of a class")
        by_number = {int(k): str(v) for k, v in names.items()}
        return tuple(by_number[i] for i in range(len(names)))
    count = check(2 if count is None else count, int, file, "num_labels", "labels")
    return tuple(f"LABEL_{i}" for i in range(count))


def check(value: Any, hint: Any, file: Any, key: str, field: str = "") -> Any:
    """`value` as the field's type, or a refusal: a bool is not a number, a float is not a size, a size is 1 to `BIGGEST` (less for
    layers and labels, by the field's name), and a dropout is at most 1."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    if bool in options and isinstance(value, bool):
        return value
    if int in options and type(value) is int:
        most = DEEPEST if field.endswith("layers") else LABELS if field == "labels" else BIGGEST
        if not 1 <= value <= most:
            refuse(file, key, str(value), f"a size from 1 to {most}")
        return value
    if float in options and type(value) in (int, float):
        if not 0 <= value <= sys.float_info.max:  # which a whole number may pass, and is no float then
            refuse(file, key, str(value), "a finite number, not negative")
        if field.endswith("dropout") and value > 1:
            refuse(file, key, str(value), "a rate from 0 to 1")
        return float(value)
    names = " or ".join("null" if o is type(None) else {int: "whole number", float: "number"}.get(o, o.__name__) for o in options)
    refuse(file, key, f"{value!r} ({type(value).__name__})", f"a {names}")


def write(config: Config) -> dict[str, Any]:
    """The config.json of `config`: what it came with, changed only where a field no longer says the same."""
    cls, out = type(config), dict(config.file)
    try:
        before = read(cls, config.file, "config.json") if config.file else None
    except ValueError:
        before = None
    out.setdefault("model_type", cls.hf.model_type)
    for key, now in rows(config):
        spelled = key.split("|")  # all that are there, for they are one key
        names = [k for k in spelled if out.get(k) is not None] or [k for k in spelled if k in out][:1] or spelled[:1]
        target = cls.hf.keys[key]
        same = before is not None and getattr(before, now) == getattr(config, now)
        if same:
            continue
        out |= target.write(getattr(config, now)) if isinstance(target, Key) else dict.fromkeys(names, getattr(config, now))
    for key, target in cls.hf.keys.items():  # what is written may change what an absent key means
        if isinstance(target, Key) and target.always and not any(k in out for k in key.split("|")):
            now = getattr(config, target.field)
            if target.read(None, out) != now:
                out |= target.write(now)
    if not config.file:  # a file that came without them goes without them
        out |= cls.hf.fixed
    if config.labels != (before.labels if before is not None else Config.labels):
        out["id2label"] = {str(i): name for i, name in enumerate(config.labels)}
        out["label2id"] = {name: i for i, name in enumerate(config.labels)}
        out.pop("num_labels", None)
    return out


def rows(config: Config | type[Config]) -> Iterator[tuple[str, str]]:
    """(key as spelled in the table, field)."""
    for key, target in config.hf.keys.items():
        yield key, target.field if isinstance(target, Key) else target


def meant(cls: type[Config], name: str) -> str:
    """Our field for a key of config.json, or for a field of ModelCenter's configs; `name` itself if there is none."""
    keys = {key: now for spelled, now in rows(cls) for key in spelled.split("|")}
    return keys.get(name) or FIELDS.get(name, name)


def changed(config: C, changes: Mapping[str, Any]) -> C:
    """`config` with fields replaced, each of them checked as if it came from a file."""
    if not isinstance(changes, Mapping):
        refuse(None, "config", f"a {type(changes).__name__}", "a mapping of what is to be changed, such as {'layers': 2}")
    hints = get_type_hints(type(config))
    known = [f.name for f in fields(config) if f.name not in ("file", "labels")]
    new: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in known:
            ours = meant(type(config), name)
            refuse(None, f"config.{name}", "unknown field", f"here it is {ours}" if ours in known else nearest(name, known))
        options = get_args(hints[name]) or (hints[name],)
        if {int, float, bool} & set(options):
            new[name] = check(value, hints[name], None, f"config.{name}", name)
        elif value is None or isinstance(value, str | int | float | list | Mapping):  # no mechanism, but perhaps its name
            new[name] = spoken(config, name, value)
    out = replace(config, **{**changes, **new})
    try:
        out.verify()
    except InputError as problem:  # `config` itself is sound: what is wrong was typed as fields, and no key of a config.json
        typed = {key: f"config.{now}" for spelled, now in rows(out) for key in spelled.split("|")}
        found, wanted = re.sub(rf"\b({'|'.join(typed)})\b", lambda key: typed[key[0]], str(problem)).rsplit("; ", 1)
        refuse(None, None, found, wanted)
    return out


def spoken(config: Config, field: str, value: Any) -> Any:
    """The mechanism that `value` means in this family's config.json (`config.act=gelu`); an unknown value is refused."""
    for key, target in config.hf.keys.items():
        if isinstance(target, Key) and target.field == field and target.known:
            if isinstance(value, str) and value in target.known:
                return target.read(value, {key: value})
            refuse(None, f"config.{field}", repr(value), nearest(value, target.known))
    refuse(None, f"config.{field}", repr(value), "give it in the model's config.json, or as an object in Python")
