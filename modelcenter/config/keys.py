"""The keys of a dataclass of settings: their types in words, their defaults, and suggestions for mistyped ones."""

import dataclasses
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import nearest
from .document import flow

T = TypeVar("T")


class Key(NamedTuple):
    """A setting as documentation shows it; `default` is YAML, None if the key is required."""

    name: str
    type: str
    default: str | None
    help: str


def says(help: str, *, beyond: str = "", **bounds: float) -> dict[str, Any]:
    """The metadata of a field: what it means, its bounds (`min`, `max`, `above`, `below`), for a text those of its length, and what
    says the same as a number `beyond` them that many write."""
    return {"help": help, "beyond": beyond, **bounds}


def describe(cls: type, section: str = "") -> Iterator[Key]:
    """Every key of the dataclass `cls`, nested ones dotted, in the order of declaration."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], section + field.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from describe(hint, f"{name}.")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = None if default is dataclasses.MISSING else flow(default)
        yield Key(name, wanted(hint, field.metadata), shown, field.metadata.get("help", ""))


def documented(cls: type[T]) -> type[T]:
    """Add the keys of a dataclass and what they mean to its docstring, for `help`."""
    keys = "".join(f"\n    {f.name}: {f.metadata['help']}." for f in dataclasses.fields(cls) if "help" in f.metadata)  # type: ignore[arg-type]  # T is a dataclass
    cls.__doc__ = f"{cls.__doc__}\n{keys}"
    return cls


def near(key: str, cls: type, section: str) -> str:
    """`did you mean data.path?`: the full name of a similar key in this section or one below; otherwise the known keys."""
    known = {f.name: f.name for f in dataclasses.fields(cls) if f.init}
    within = {name.rpartition(".")[2]: name for name, *_ in describe(cls) if "." in name}
    if key in within.values():  # as on the command line
        outer, _, inner = key.partition(".")
        return f"in a file it is {outer}: {{{inner}: ...}}"
    if key.rpartition(".")[2] in known:  # `machine.fsdp` in a machine profile
        return f"did you mean {section + key.rpartition('.')[2]!r}?"
    if key in within:  # `lr` for optimizer.lr
        return f"did you mean {section + within[key]!r}?"
    for names, cutoff in ((known, 0.6), (within, 0.7)):  # of these there are many, one for any word
        if close := get_close_matches(key, names, n=1, cutoff=cutoff):
            return f"did you mean {section + names[close[0]]!r}?"
    return nearest(key, known)


def wanted(hint: Any, bounds: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The type and its bounds in words: `an integer, at least 1, or null`."""
    return " or ".join(_words(kind, bounds) for kind in kinds(hint))


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
    words = {"min": "at least", "above": "above", "max": "at most", "below": "below"}
    return " ".join([_PLAIN[kind], " and ".join(f"{words[b]} {bounds[b]}" for b in words if b in bounds)]).strip()


def kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a value may have: those of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
