"""Reads JSON strictly: ambiguous input is refused."""

import gc
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..errors import InputError, refuse
from .regular import open_regular

JSON_LIMIT = 16 * 2**20  # bytes of a JSON file or of a safetensors header
DEPTH_LIMIT = 32


def read_json(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> Any:
    """The content of a JSON file, read strictly.

    Refused: larger than `limit` bytes, not UTF-8, a byte-order mark, duplicate keys, NaN and infinities, depth over 32,
    half surrogates, anything but a regular file. Errors: `InputError`, `MissingError`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            refuse(path, None, f"{size} bytes", f"at most {limit}")
        data = file.read(limit + 1)
    return parse_json(path, data)


def parse_json(path: str | os.PathLike[str], data: bytes) -> Any:
    """`data` as JSON, as strictly as `read_json`; `path` is named in errors."""
    value = parse(path, data)
    level, depth = [value], 0
    while level := [c for v in level if isinstance(v, dict | list) for c in (v.values() if isinstance(v, dict) else v)]:
        depth += 1
        if depth > DEPTH_LIMIT:
            refuse(path, None, "nested too deeply", f"at most {DEPTH_LIMIT} levels")
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            refuse(path, None, "half of a surrogate pair", "characters that UTF-8 can write")
    return value


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector off. It finds nothing in a table of 200,000 rows, and costs as much as parsing it (1 s).
    While a model is made it finds nothing either, and looks at every object that torch has."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def parse(path: str | os.PathLike[str], data: bytes) -> Any:
    """`data` as JSON: keys once, numbers finite. Depth and surrogates are left to `parse_json`."""
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    refuse(path, key, "a duplicate key", "each key once")
                seen.add(key)
        return found

    def fraction(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text)

    def constant(text: str) -> NoReturn:
        refuse(path, None, f"the number {text}", "finite numbers")

    whole = (lambda text: -0.0 if text == "-0" else int(text)) if b"-0" in data else None  # no size, as in the format
    try:
        return json.loads(
            data.decode(), object_pairs_hook=once, parse_int=whole, parse_float=fraction, parse_constant=constant
        )
    except InputError:
        raise
    except UnicodeDecodeError as error:
        refuse(path, f"byte {error.start}", f"0x{data[error.start]:02x}, not UTF-8", "JSON in UTF-8")
    except json.JSONDecodeError as error:
        refuse(path, f"line {error.lineno} column {error.colno}", error.msg, "valid JSON")
    except RecursionError:
        refuse(path, None, "nested too deeply", f"at most {DEPTH_LIMIT} levels")
    except ValueError:
        refuse(path, None, "an integer of thousands of digits", "numbers that a machine can hold")
