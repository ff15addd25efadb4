"""Typed settings: strict YAML and dotted overrides in, frozen dataclasses out, and back."""

from .binding import bind, checked, convert, to_dict
from .document import DEPTH, NODES, dump_yaml, flow, parse
from .files import SIZE, find, names, packaged, read_recipe
from .keys import describe, documented, says
from .overrides import COMMAND_LINE, KEY, Layers, Whole, assignments, merge, override

__all__ = [
    "COMMAND_LINE", "DEPTH", "KEY", "NODES", "SIZE", "Layers", "Whole", "assignments", "bind", "checked", "convert", "describe",
    "documented", "dump_yaml", "find", "flow", "merge", "names", "override", "packaged", "parse", "read_recipe", "says", "to_dict",
]  # fmt: skip
