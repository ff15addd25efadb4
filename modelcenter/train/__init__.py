"""Training. The package is callable: `modelcenter.train(recipe, machine, overrides)` is `train.loop.train`.

The function and this folder share a name, and importing a module of the folder puts the folder in the function's place. So the
folder itself can be called.
"""

import sys
from types import ModuleType
from typing import Any


class Train(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Train as a recipe says: see `train.loop.train`."""
        from .loop import train

        return train(*args, **options)


sys.modules[__name__].__class__ = Train
