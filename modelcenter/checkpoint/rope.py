"""The rotary keys of config.json, in both of their spellings.

Old: `rope_theta` and `rope_scaling` (null: none). New, from transformers 5 on: `rope_parameters`, which holds everything. A file
keeps its own spelling; a config made here is written in both, which every version reads alike.
"""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, get_type_hints

from ..errors import refuse
from ..layers.rope import Dynamic, Linear, Llama3, LongRope, Plain, Yarn
from .config import Key, check

KINDS: dict[str, type[Plain]] = {
    "default": Plain, "linear": Linear, "dynamic": Dynamic, "yarn": Yarn, "longrope": LongRope, "llama3": Llama3,
}  # fmt: skip
SPELLED = {
    "theta": "rope_theta", "original": "original_max_position_embeddings", "low": "low_freq_factor",
    "high": "high_freq_factor", "short": "short_factor", "long": "long_factor",
}  # fmt: skip
REQUIRED = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "longrope": ("short", "long"),
            "llama3": ("factor", "low", "high")}  # fmt: skip


def place(values: Mapping[str, Any]) -> str:
    """The key that holds the scaling: transformers takes `rope_scaling` over `rope_parameters` unless it is empty."""
    return "rope_scaling" if values.get("rope_scaling") else "rope_parameters"


def read(values: Mapping[str, Any], positions: int) -> Plain:
    """The scaling that transformers reads off this config.json; `positions` stands in for max_position_embeddings."""
    key = place(values)
    given = values.get(key) or {}
    if not isinstance(given, Mapping):
        refuse(None, key, f"{given!r} ({type(given).__name__})", "a mapping or null")
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        refuse(None, f"{key}.rope_type", repr(kind), f"known: {', '.join(sorted(KINDS))}")
    if any(isinstance(v, Mapping) for v in given.values()):
        refuse(None, key, "a mapping for each kind of layer", "one for all layers")
    for where, found in ((f"{key}.partial_rotary_factor", given), ("partial_rotary_factor", values)):
        if found.get("partial_rotary_factor") not in (None, 1):
            refuse(None, where, repr(found["partial_rotary_factor"]), "only 1.0: here whole heads are rotated")

    positions = check(values.get("max_position_embeddings", positions), int, None, "max_position_embeddings")
    outside = {
        "rope_theta": values.get("rope_theta", Plain.theta),
        "original_max_position_embeddings": values.get("original_max_position_embeddings") or positions,
    }
    if values.get("original_max_position_embeddings"):  # Phi-3 keeps it there, and there it comes first
        given = {**given, "original_max_position_embeddings": outside["original_max_position_embeddings"]}
    out: dict[str, Any] = {}
    for field in fields(KINDS[kind]):
        if field.name == "positions":
            out["positions"] = positions
            continue
        name = SPELLED.get(field.name, field.name)
        value = given.get(name, outside.get(name))
        if value is None and field.name in REQUIRED.get(kind, ()):
            refuse(None, f"{key}.{name}", "missing", f"rope type {kind!r} needs it")
        if value is not None or field.name == "theta":
            out[field.name] = typed(value, KINDS[kind], field, f"{key}.{name}" if name in given else name)
    return KINDS[kind](**out)


def typed(value: Any, kind: type[Plain], field: Field[Any], key: str) -> Any:
    """`value` as what the field holds, or refused."""
    hint = get_type_hints(kind)[field.name]
    if hint == tuple[float, ...]:
        if not isinstance(value, list | tuple):
            refuse(None, key, repr(value), "a list of numbers")
        return tuple(check(v, float, None, key) for v in value)
    return check(value, hint, None, key)


def verify_rope(rope: Plain, channels: int, positions: int, values: Mapping[str, Any]) -> None:
    """Refuse a scaling that cannot be, for heads of so many channels; `values` is the config.json it came from."""
    if channels % 2:
        refuse(None, "head_dim", str(channels), "an even number: channels are rotated in pairs")
    for field, found, wanted in rope.wrong(channels):
        name = SPELLED.get(field, field)
        refuse(None, name if name in values else f"{place(values)}.{name}", str(found), wanted)
    own = getattr(rope, "positions", positions)
    if own != positions:
        wanted = f"{own}, as {type(rope).__name__} has it: they are one number"
        refuse(None, "max_position_embeddings", str(positions), wanted)


def write(rope: Plain) -> dict[str, Any]:
    """Both spellings."""
    kind = next(name for name, cls in KINDS.items() if cls is type(rope))
    held = {f.name: getattr(rope, f.name) for f in fields(rope) if f.name not in ("theta", "positions")}
    own: dict[str, Any] = {"rope_type": kind}
    own |= {SPELLED.get(k, k): list(v) if isinstance(v, tuple) else v for k, v in held.items() if v is not None}
    out = {"rope_theta": rope.theta, "rope_scaling": None if kind == "default" else own}
    original = getattr(rope, "original", None)
    if original is not None and original != getattr(rope, "positions", None):
        # transformers 4 reads longrope's here alone, and then puts positions / original for its factor
        out["original_max_position_embeddings"] = original
    return {**out, "rope_parameters": {**own, "rope_theta": rope.theta}}


def rope_keys(field: str, positions: int) -> dict[str, Key]:
    """The row of a `Table` for a family whose files may lack max_position_embeddings and then mean `positions`."""
    row = Key(field, lambda _, values: read(values, positions), write, always=True)
    return {"rope_parameters|rope_scaling|rope_theta": row}
