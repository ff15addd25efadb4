"""modelcenter: a model zoo for training.

    import modelcenter as mc
    model = mc.GPT.from_pretrained("gpt2")

Public names are imported on first use, so that `import modelcenter` is fast.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

PUBLIC = {
    "load": "create", "build": "create", "Model": "model", "parallelize": "parallel.apply",
    "Machine": "parallel.machine", "Recipe": "train.recipe", "load_tokenizer": "data.tokenizer_open",
    "AdapterConfig": "adapter.config", "add_adapter": "adapter.attach", "merge_adapter": "adapter.attach",
    "clip_grad_norm_": "optim.norm", "InputError": "errors", "Cache": "layers", "Output": "layers",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module(f"{__name__}.train")
    if name in PUBLIC:
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    for file in Path(__file__).parent.glob("models/*.py"):  # a family's class has its file's name, whatever the case
        if file.stem.replace("_", "") == name.lower():
            family = getattr(import_module(f"{__name__}.models.{file.stem}"), name, None)
            if family is not None:
                return family
    said = _spoken_of(name) or f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(said, name=name, obj=sys.modules[__name__])


def _spoken_of(name: str) -> str | None:
    """What to say of a name from another package."""
    ours = None if name.startswith("_") else import_module(f"{__name__}.theirs").spoken_of(name)
    if ours is None:
        return None
    family = next((one for one in __dir__() if one.lower() == name.lower().rstrip("0123456789")), None)  # Bert, GPT2
    ours = f"mc.{family}" if family and not ours.startswith("no such") else ours  # CPM1 is none of CPM
    return f"module {__name__!r} has no {name}; {ours}"


class _Theirs:
    """Says the same where such a name is imported, from here, from a package in here or as a module: Python asks it last, and would
    drop what an `AttributeError` says."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package.partition(".")[0] == __name__ and (said := _spoken_of(name)):
            raise ImportError(said, name=fullname)


sys.meta_path.append(_Theirs)


def __dir__() -> list[str]:
    """All names to complete and to suggest, including those that have not been used yet."""
    stub = Path(__file__).with_suffix(".pyi").read_text("utf-8")
    here = {name for name, of in globals().items() if name.startswith("__") or getattr(of, "__name__", "").startswith(__name__)}
    return sorted({*here, *re.findall(r" as (\w+)$", stub, re.MULTILINE)})  # without what this file needs for itself
