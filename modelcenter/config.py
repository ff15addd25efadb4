"""Typed settings: strict YAML and dotted overrides in, frozen dataclasses out, and back.

YAML is read from PyYAML's event stream in pure Python, never through a loader: nothing is constructed, nothing recurses
deeper than `DEPTH`, and what a recipe has no use for (tags, anchors, aliases, merge keys, several documents, tabs) is
refused by name. Plain scalars mean what YAML 1.2's core schema says, so `3e-4` is a number and `no` is text.

A value from the command line stays `Text` until `bind` knows the wanted type: `model=2024` is a name, `max_steps=2024`
a number. Its type is also its origin, which errors name.
"""

import dataclasses
import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from .errors import InputError, message, nearest, refuse, refuse_missing

SIZE = 256 * 1024  # bytes of a recipe
DEPTH = 32  # levels of nesting; libyaml overflows the stack far beyond, Python's recursion somewhat before
NODES = 10_000  # values of a recipe: keeps the refusal of a hostile file under a second
COMMAND_LINE = "command line"

T = TypeVar("T")


class Text(str):
    """A value as it was typed on the command line, not yet read."""


# ---------------------------------------------------------------------------------------------------------------- YAML


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds. `InputError` names the file and the line of what a recipe may not hold."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):  # before opening: opening a FIFO waits for its writer
            refuse(path, None, "not a regular file", "a recipe is a YAML file")
        with open(path, "rb") as f:
            raw = f.read(SIZE + 1)
    except FileNotFoundError:
        refuse_missing(path, None, "no such file", "name an existing YAML file")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, InputError):
            raise
        refuse(path, None, str(getattr(error, "strerror", None) or error), "a readable YAML file")
    if len(raw) > SIZE:
        refuse(path, None, f"more than {SIZE} bytes", f"a recipe has at most {SIZE}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(path, f"byte {error.start}", "not UTF-8", "save the recipe as UTF-8 text")
    value = parse(text, path)
    if not isinstance(value, dict):
        refuse(path, None, "empty" if value is None else _short(value), "a recipe is a mapping of `key: value` lines")
    return value


def packaged(*folders: str) -> Traversable:
    """The recipes that come with the package, or a folder among them."""
    return files("modelcenter").joinpath("recipes", *folders)


def find(name: str | Path, what: str, folder: Traversable) -> Path:
    """The file of a bare name in a packaged `folder`, or the path itself if it looks like one."""
    known = names(folder)
    if str(name) in known:
        return Path(str(folder / f"{name}.yaml"))
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    refuse_missing(None, str(name) or "''", f"no such {what}", f"{nearest(name, known)} (or a path ending in .yaml)")


def names(folder: Traversable) -> list[str]:
    """The bare names of the YAML files there, in order."""
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def parse(text: str, file: str | Path | None = None) -> Any:
    """One strict YAML document as dicts (with text keys), lists, text, finite numbers, booleans and None."""
    if "\t" in text:
        refuse(file, f"line {text[: text.index(chr(9))].count(chr(10)) + 1}", "a tab", "indent with spaces")
    try:
        return _Composer(text, file).document()
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else None
        refuse(file, where, error.problem or error.context or "cannot be read", "mend the YAML")
    except yaml.reader.ReaderError as error:
        refuse(file, f"character {error.position}", f"U+{error.character:04X}", "remove the control character")
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:  # PyYAML on `"\UFFFFFFFF"`, `%YAML 1.` ...
        refuse(file, None, f"cannot be read ({error})", "mend the YAML")


class _Composer:
    """Python values from YAML events, refusing on the way."""

    def __init__(self, text: str, file: str | Path | None) -> None:
        self.file = file
        self.events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self.nodes = 0

    def refuse(self, event: yaml.Event, found: str, wanted: str) -> NoReturn:
        refuse(self.file, f"line {_line(event)}", found, wanted)

    def document(self) -> Any:
        value: Any = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.refuse(event, "a second document", "one document in a file")
                if event.version or event.tags:
                    self.refuse(event, "a % directive", "leave it out")
                value = self.value(next(self.events), 0)
        return value

    def value(self, event: yaml.Event, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > NODES:
            self.refuse(event, f"more than {NODES} values", f"a recipe has at most {NODES}")
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"the alias *{event.anchor}", "write the value out")
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        if event.anchor is not None:
            self.refuse(event, f"the anchor &{event.anchor}", "write the value out where it is used")
        if event.tag is not None:
            self.refuse(event, f"the tag {event.tag}", "plain values only")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if depth >= DEPTH:
            self.refuse(event, f"nested more than {DEPTH} deep", "a flatter recipe")
        if isinstance(event, yaml.MappingStartEvent):
            return self.mapping(depth)
        values = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self.value(event, depth + 1))
        return values

    def mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.value(event, depth + 1)  # an alias, anchor or tag is refused under its own name
                self.refuse(event, "a key that is not a word", "a key is plain text")
            if event.value == "<<" and event.style is None:
                self.refuse(event, "the merge key <<", "write the values out")
            self.value(event, depth + 1)
            key, line = event.value, _line(event)
            if key in lines:
                refuse(self.file, key, f"given on line {lines[key]} and on line {line}", "keep one of them")
            lines[key] = line
            values[key] = self.value(next(self.events), depth + 1)
        return values

    def scalar(self, event: yaml.ScalarEvent) -> Any:
        text = event.value
        if "\0" in text or not _encodable(text):
            self.refuse(event, f"{_short(text)} with a NUL or half a surrogate pair", "text that UTF-8 can hold")
        if event.style is not None:
            return text
        try:
            return resolve(text)
        except ValueError as error:
            self.refuse(event, _short(text), str(error))


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")  # 010 is eight to some: text
_NOT_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
          "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}  # fmt: skip


def resolve(text: str) -> Any:
    """What a plain scalar means: None, a boolean, an integer, a finite number, or itself. ValueError says what is
    wanted instead of nan, an infinity or an integer beyond 64 bits."""
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("a finite number; text goes in quotes")
    if _INT.fullmatch(text):
        if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
            raise ValueError("an integer of at most 64 bits; text goes in quotes")
        return int(text)
    if _FLOAT.fullmatch(text):
        if math.isinf(number := float(text)):
            raise ValueError("a finite number; text goes in quotes")
        return number
    return text


# ----------------------------------------------------------------------------------------------------------- overrides

KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def override(mapping: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with `["a.b=v", ...]` (or `{"a.b": v}` from Python) put over it; an override wins over the file."""
    return merge(mapping, assignments(overrides))


def assignments(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted assignments as one nested mapping whose strings from a command line are still `Text`."""
    tree: dict[str, Any] = {}
    pairs = overrides.items() if isinstance(overrides, Mapping) else [_split(o) for o in overrides]
    for dotted, value in pairs:
        if not KEY.fullmatch(dotted) or dotted.count(".") >= DEPTH:
            refuse(COMMAND_LINE, dotted, "not a key", "write key=value or section.key=value")
        *sections, key = dotted.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                refuse(COMMAND_LINE, dotted, f"{section!r} is given as a whole too", "keep one of them")
        if key in at:
            refuse(COMMAND_LINE, dotted, "given twice", "keep one of them")
        at[key] = value
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `over` replaced, section by section; neither argument changes."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict):
            value = merge(below if isinstance(below, dict) else {}, value)
        merged[key] = value
    return merged


def _split(assignment: str) -> tuple[str, Text]:
    key, equals, value = assignment.partition("=")
    if not equals:
        refuse(COMMAND_LINE, assignment, "no value", "write key=value")
    if "\0" in value or not _encodable(value):
        refuse(COMMAND_LINE, key, "not UTF-8", "text that UTF-8 can hold")
    return key, Text(value)


# -------------------------------------------------------------------------------------------------------------- binding


def bind(cls: type[T], mapping: Mapping[str, Any], file: str | Path | None = None, section: str = "") -> T:
    """`mapping` as the dataclass `cls`, checked: unknown keys, missing keys, types, and the bounds in each field's
    metadata (`min` and `max` inclusive, `above` and `below` exclusive; of a text, `min` is its length). What
    `cls.__post_init__` refuses gets the file, or the command line, that says so, and the section put before it."""
    hints = get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]  # cls is a dataclass
    for key, value in mapping.items():
        if key not in known:
            refuse(_origin(value, file), section + key, "unknown key", near(key, cls, section))
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in mapping:
            values[name] = convert(mapping[name], hints[name], file, section + name, field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            refuse_missing(file, section + name, "missing", f"give {wanted(hints[name], field.metadata)}")
    try:
        return cls(**values)
    except InputError as error:
        head, _, tail = str(error).rpartition("; ")
        said: Any = mapping
        for part in head.partition(": ")[0].split("."):
            said = said.get(part) if isinstance(said, Mapping) else None
        raise type(error)(message(_origin(said, file), None, section + head, tail)) from None


_HINTS: dict[type, dict[str, Any]] = {}  # of the classes that `checked` has seen: to find them takes longer than all else there


def checked(said: Any) -> None:
    """Refuse, in a dataclass made in Python, the values that `bind` would not have let in. What may be written otherwise, a list
    for a tuple, becomes what the field's type says."""
    if (cls := type(said)) not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    for f in dataclasses.fields(said):
        value = getattr(said, f.name)
        if not dataclasses.is_dataclass(value):
            object.__setattr__(said, f.name, convert(value, _HINTS[cls][f.name], None, f.name, f.metadata))


def near(key: str, cls: type, section: str) -> str:
    """`did you mean data.path?`: a key as it is written in whole, of this section or of one within; or what is known here."""
    known = {f.name: f.name for f in dataclasses.fields(cls) if f.init}
    within = {name.rpartition(".")[2]: name for name, *_ in describe(cls) if "." in name}
    if key in within:  # `lr` for optimizer.lr
        return f"did you mean {section + within[key]!r}?"
    for names in (known, within):
        if close := get_close_matches(key, names, n=1, cutoff=0.6):
            return f"did you mean {section + names[close[0]]!r}?"
    return nearest(key, known)


def convert(
    value: Any, hint: Any, file: str | Path | None, key: str, bounds: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """`value` as the type `hint`, within `bounds`; refuses with the dotted `key`. An integer will do for a float, a
    boolean for neither."""
    file, kinds = _origin(value, file), _kinds(hint)
    if isinstance(value, Text):
        value = _read(value, kinds)
    for kind in kinds:
        if (match := _match(value, kind, file, key, bounds)) is not _NO:
            return match
    refuse(file, key, _short(value), wanted(hint, bounds))


_NO = object()


def _match(value: Any, kind: Any, file: str | Path | None, key: str, bounds: Mapping[str, Any]) -> Any:
    """`value` as `kind`, else `_NO`; what is of the kind but out of bounds, or wrong inside, is refused here."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is NoneType:
        return None if value is None else _NO
    if kind is bool:
        return value if isinstance(value, bool) else _NO
    if kind in (int, float):
        fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
        return _bounded(value, kind, file, key, bounds) if fits else _NO
    if kind is str:
        value = str(value) if isinstance(value, PurePath) else value  # from Python
        fits = isinstance(value, str) and len(value) >= bounds.get("min", 0)
        return value if fits else _NO
    if origin is Literal:
        return value if any(type(value) is type(choice) and value == choice for choice in args) else _NO
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return bind(kind, value, file, f"{key}.") if isinstance(value, Mapping) else _NO
    if origin is dict:
        if not isinstance(value, Mapping):
            return _NO
        return {k: convert(v, args[1], file, f"{key}.{k}", bounds) for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _NO
        hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(hints) != len(value):
            return _NO
        return tuple(convert(v, hints[i], file, f"{key}.{i}", bounds) for i, v in enumerate(value))
    raise TypeError(f"{key}: no rule to read {kind!r}")  # a mistake in a dataclass of ours, not in anyone's input


def _bounded(value: Any, kind: Any, file: str | Path | None, key: str, bounds: Mapping[str, Any]) -> Any:
    # what Python callers pass has not been through `resolve`
    finite = -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)
    low = value < bounds.get("min", value) or ("above" in bounds and value <= bounds["above"])
    high = value > bounds.get("max", value) or ("below" in bounds and value >= bounds["below"])
    if not finite or low or high:
        refuse(file, key, _short(value), wanted(kind, bounds))
    return kind(value)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _read(text: Text, kinds: tuple[Any, ...]) -> Any:
    """A command-line value for one of `kinds`. Where text is wanted it is taken as it stands: the shell has already
    had its quotes; a list or a mapping is read where one will do as well. `null` is None where that is allowed."""
    plain = str(text)
    if str in kinds and (set(kinds) <= {str, NoneType} or plain[:1] not in ("[", "{")):
        return None if NoneType in kinds and plain in ("null", "~") else plain
    try:
        return parse(plain) if plain[:1] in ("[", "{", '"', "'") else resolve(plain)
    except ValueError:  # the caller refuses it as the wrong type, which says more than where YAML gave up
        return plain


def _origin(value: Any, file: str | Path | None) -> str | Path | None:
    """The command line if `value` holds nothing else, otherwise the file."""
    if isinstance(value, dict) and value:
        return COMMAND_LINE if all(_origin(v, file) == COMMAND_LINE for v in value.values()) else file
    return COMMAND_LINE if isinstance(value, Text) else file


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    text = _constant(value) or repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _constant(value: Any) -> str | None:
    return next((word for known, word in ((None, "null"), (True, "true"), (False, "false")) if value is known), None)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------ and back


def wanted(hint: Any, bounds: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The type and its bounds in words: `an integer, at least 1, or null`."""
    return " or ".join(_words(kind, bounds) for kind in _kinds(hint))


_PLAIN = {Any: "any value", NoneType: "null", bool: "true or false", int: "an integer", float: "a number", str: "text"}


def _words(kind: Any, bounds: Mapping[str, Any]) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " | ".join(str(choice) for choice in args)
    if origin is tuple:
        many = args[-1] is Ellipsis
        return f"a list of {_words(args[0], bounds)}" if many else f"[{', '.join(_words(a, bounds) for a in args)}]"
    if origin is dict and args[1] in (int, float):
        return f"a mapping to {_words(args[1], bounds)}"
    if kind is str:
        return "text that is not empty" if bounds.get("min") else "text"
    if kind not in (int, float):
        return _PLAIN.get(kind, "a mapping")
    says = {"min": "at least", "above": "above", "max": "at most", "below": "below"}
    return " ".join([_PLAIN[kind], " and ".join(f"{says[b]} {bounds[b]}" for b in says if b in bounds)]).strip()


class Key(NamedTuple):
    """A setting as documentation shows it; `default` is YAML, None where the key is required."""

    name: str
    type: str
    default: str | None
    help: str


def describe(cls: type, section: str = "") -> Iterator[Key]:
    """Every key of the dataclass `cls`, nested ones dotted, in the order of declaration."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], section + field.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from describe(hint, f"{name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = None if default is dataclasses.MISSING else flow(_plain(default))
        yield Key(name, wanted(hint, field.metadata), shown, field.metadata.get("help", ""))


def documented(cls: type[T]) -> type[T]:
    """Add the keys of a dataclass and what they mean to its docstring, for `help`."""
    keys = "".join(f"\n    {f.name}: {f.metadata['help']}." for f in dataclasses.fields(cls) if "help" in f.metadata)  # type: ignore[arg-type]  # T is a dataclass
    cls.__doc__ = f"{cls.__doc__}\n{keys}"
    return cls


def to_dict(settings: Any) -> dict[str, Any]:
    """A dataclass as nested dicts and lists of plain values; `bind` is its inverse."""
    return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def dump_yaml(mapping: Mapping[str, Any], indent: str = "") -> str:
    """YAML text that `parse` reads back exactly: text is quoted wherever it would mean something else."""
    lines = []
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{flow(str(key))}:\n{dump_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{flow(str(key))}: {flow(value)}\n")
    return "".join(lines) or "{}\n"


_SAFE = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)


def flow(value: Any) -> str:
    """`value` on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(k))}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(v) for v in value) + "]"
    if isinstance(value, str):
        is_plain = _SAFE.fullmatch(value) and value not in _WORDS and not _NOT_FINITE.fullmatch(value)
        return value if is_plain else '"' + "".join(_escaped(c) for c in value) + '"'
    return _constant(value) or repr(value)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"
