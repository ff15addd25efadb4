"""Plain values as frozen dataclasses, checked key by key, and back."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path, PurePath
from types import MappingProxyType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..errors import InputError, message, refuse, refuse_missing
from .document import encodable, parse, resolve, short
from .keys import kinds, near, wanted
from .overrides import COMMAND_LINE, Layers, Text

T = TypeVar("T")
Source = str | Path | Layers | None


def bind(cls: type[T], mapping: Mapping[str, Any], file: Source = None, section: str = "") -> T:
    """Bind `mapping` to the dataclass `cls`, checking for unknown keys, missing keys, types, and the bounds in each field's
    metadata (`min` and `max` inclusive, `above` and `below` exclusive; of a text, `min` is its length). An error of
    `cls.__post_init__` is prefixed with the `file`, or the layer of it, that holds the value, and with the section."""
    hints = get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]  # cls is a dataclass
    for key in mapping:
        if key not in known:
            refuse(_origin(section + key, file), section + key, "unknown key", near(key, cls, section))
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in mapping:
            values[name] = convert(mapping[name], hints[name], file, section + name, field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            what = field.metadata.get("help") or f"give {wanted(hints[name], field.metadata)}"
            refuse_missing(_origin(section + name, file), section + name, "missing", what)
    try:
        return cls(**values)
    except InputError as error:
        head, _, tail = str(error).rpartition("; ")
        raise type(error)(message(_origin(section + head.partition(": ")[0], file), None, section + head, tail)) from None


_HINTS: dict[type, dict[str, Any]] = {}  # of the classes that `checked` has seen: to find them takes longer than all else there


def checked(said: Any) -> None:
    """Refuse the values of a dataclass made in Python that `bind` would not have accepted. Other accepted forms, such as a list for
    a tuple, are converted to the field's type."""
    if (cls := type(said)) not in _HINTS:
        _HINTS[cls] = get_type_hints(cls)
    for f in dataclasses.fields(said):
        value = getattr(said, f.name)
        if not dataclasses.is_dataclass(value):
            object.__setattr__(said, f.name, convert(value, _HINTS[cls][f.name], None, f.name, f.metadata))


def convert(value: Any, hint: Any, file: Source, key: str, bounds: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """`value` as the type `hint`, within `bounds`; refuses with the dotted `key`. An integer is accepted for a float, a boolean for
    neither."""
    allowed, origin = kinds(hint), _origin(key, file)
    if isinstance(value, Text):
        value = _read(value, allowed)
    for kind in allowed:
        if (match := _match(value, kind, file, key, bounds)) is not _NO:
            return match
    section = next((kind for kind in allowed if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
    lists = [get_args(kind)[0] for kind in allowed if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis]
    if isinstance(value, str) and lists:
        items, choices = value.replace("none", ""), get_args(lists[0])
        if get_origin(lists[0]) is Literal and not {*items.replace(" ", "").split(",")} <= {"", *choices}:  # report_to=all
            items = choices[0]
        listed = f"{key}=[{items}]"
        one = "with quotes around what begins with * or &" if value.startswith("[") else listed
        refuse(origin, key, short(value), f"{wanted(hint, bounds)}: {one}")
    one = "" if section is None else f", such as {key}.{dataclasses.fields(section)[0].name}"  # which `data=FILE` means
    if str in allowed and isinstance(value, int | float):  # `text_key: 3` in a file
        one = f': "{short(value)}"'
    named = isinstance(value, str) and value.lower() not in ("yes", "no", "on", "off")
    if allowed == (bool,) and origin == COMMAND_LINE and named:  # `launch --slurm pretrain`, `generate m --stream "Once upon"`
        one = f"; what is not for --{key} goes before it"
    refuse(origin, key, short(value), wanted(hint, bounds) + one)


_NO = object()


def _match(value: Any, kind: Any, file: Source, key: str, bounds: Mapping[str, Any]) -> Any:
    """`value` as `kind`, otherwise `_NO`; a value of the kind that is out of bounds, or wrong inside, is refused here."""
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
        if isinstance(value, str) and not encodable(value):  # from Python: the name of a file in another encoding
            refuse(_origin(key, file), key, short(value), "text that UTF-8 can hold")
        fits = isinstance(value, str) and len(value) >= bounds.get("min", 0)
        return value if fits else _NO
    if origin is Literal:
        return value if any(type(value) is type(choice) and value == choice for choice in args) else _NO
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return bind(kind, value, file, f"{key}.") if isinstance(value, Mapping) else _NO
    if origin is dict:
        if not isinstance(value, Mapping):
            return _NO
        return {convert(k, str, file, f"{key}.{k}"): convert(v, args[1], file, f"{key}.{k}", bounds) for k, v in value.items()}
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _NO
        hints = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(hints) != len(value):
            return _NO
        return tuple(convert(v, hints[i], file, f"{key}.{i}", bounds) for i, v in enumerate(value))
    raise TypeError(f"{key}: no rule to read {kind!r}")  # a mistake in a dataclass of ours, not in anyone's input


def _bounded(value: Any, kind: Any, file: Source, key: str, bounds: Mapping[str, Any]) -> Any:
    # what Python callers pass has not been through `resolve`
    finite = -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)
    low = value < bounds.get("min", value) or ("above" in bounds and value <= bounds["above"])
    high = value > bounds.get("max", value) or ("below" in bounds and value >= bounds["below"])
    if not finite or low or high:
        instead = f", or {beyond}" if (beyond := bounds.get("beyond")) else ""
        refuse(_origin(key, file), key, short(value), wanted(kind, bounds) + instead)
    return kind(value)


def _read(text: Text, allowed: tuple[Any, ...]) -> Any:
    """A command-line value for one of the `allowed` types. Where text is allowed, the value is taken literally, since the shell has
    already removed its quotes; but a list or a mapping is parsed where one is allowed as well. `null` is None where that is
    allowed."""
    plain = str(text)
    if str in allowed and (set(allowed) <= {str, NoneType} or plain[:1] not in ("[", "{")):
        return None if NoneType in allowed and plain in ("null", "~") else plain
    try:
        return parse(plain) if plain[:1] in ("[", "{", '"', "'") else resolve(plain)
    except ValueError:  # the caller refuses it as the wrong type, which says more than where YAML gave up
        return plain


def _origin(key: str, file: Source) -> str | Path | None:
    return file.of(key) if isinstance(file, Layers) else file


def to_dict(settings: Any) -> dict[str, Any]:
    """A dataclass as nested dicts and lists of plain values; `bind` is its inverse."""
    return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings) if f.init}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
