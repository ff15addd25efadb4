"""modelcenter: a model zoo for training.

    import modelcenter as mc
    model = mc.GPT.from_pretrained("gpt2")

Names are imported when they are first used, so that `import modelcenter` is fast.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

PUBLIC = {
    "load": "registry", "build": "registry", "Model": "registry", "parallelize": "parallel.apply",
    "Machine": "parallel.machine", "train": "train.loop", "Recipe": "train.recipe", "load_tokenizer": "data.tokenizer",
    "InputError": "errors", "Cache": "layers", "Output": "layers",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    if not name.startswith("_") and name.lower() in {f.stem.replace("_", "") for f in Path(__file__).parent.glob("models/*.py")}:
        for file in Path(__file__).parent.glob("models/*.py"):
            if file.stem.replace("_", "") == name.lower():
                found = getattr(import_module(f"{__name__}.models.{file.stem}"), name, None)
                if found is not None:
                    return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
