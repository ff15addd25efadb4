"""modelcenter.train(recipe, machine=None, overrides=None): train a model as a recipe says.

    run = modelcenter.train("finetune", overrides={"model": "gpt2", "data.path": "my.jsonl"})

`help(modelcenter.train.__call__)` says more, and `modelcenter list recipes` lists the recipes.

The package is callable: `train.loop.train` and this folder share a name, and importing a module of the folder puts the folder in
the function's place.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import nearest, refuse

if TYPE_CHECKING:
    from ..parallel.machine import Machine
    from .loop import Run
    from .recipe import Recipe


class Train(ModuleType):
    def __call__(self, recipe: "Recipe | str | Path", machine: "Machine | str | Path | None" = None,
                 overrides: Iterable[str] | Mapping[str, Any] | None = None, **keys: Any) -> "Run":
        """Train as `recipe` (a packaged name, a file, or a `Recipe`) says, on `machine` (a profile, its name, or a file).

        `overrides` change keys of a recipe that is given by name or file: {"model": "gpt2", "optimizer.lr": 1e-4}, or
        ["optimizer.lr=1e-4"]. See `modelcenter.train.loop.train`, which this is. Errors: `InputError`.
        """
        for key, value in keys.items():
            near = nearest(key, ("recipe", "machine", "overrides"))
            wanted = near if near.startswith("did") else f"a key of the recipe: overrides={{{key!r}: {value!r}}}"
            refuse(None, f"train({key})", "no such argument", wanted)
        from .loop import train

        return train(recipe, machine, overrides)


sys.modules[__name__].__class__ = Train
