"""Writes modelcenter/__init__.pyi, what type checkers read of the public names, which are only found when they are used.

    python tests/stub.py
"""

import ast
from pathlib import Path

import modelcenter

FILE = Path(modelcenter.__file__).with_suffix(".pyi")
HEAD = '"""The public names, for type checkers; written by tests/stub.py."""\n\n'


def classes() -> dict[str, str]:
    """What `modelcenter.NAME` finds in models/: a class or an alias with its file's name, whatever the case. Name -> module."""
    found = {}
    for file in sorted(FILE.parent.glob("models/*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            named = [node.name] if isinstance(node, ast.ClassDef) else []
            named += [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
            found.update({name: f"models.{file.stem}" for name in named if name.lower() == file.stem.replace("_", "")})
    return found


def names() -> dict[str, str]:
    return {**modelcenter.PUBLIC, "train": "train.loop", **classes()}


def text() -> str:
    lines = sorted(f"from .{module} import {name} as {name}\n" for name, module in names().items())
    return f"{HEAD}{''.join(lines)}\nPUBLIC: dict[str, str]\n__version__: str\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
    print(FILE)
