"""CPM: the Chinese pretrained models of Tsinghua and OpenBMB. Each has its own class; this one only finds the right one."""

from os import PathLike
from typing import Any

from ..create import load
from ..model import Model
from .cpm_ant import CPMAnt


class CPM:
    """The CPM models: `CPM.from_pretrained(name)` gives the class that config.json names; options as for `modelcenter.load`."""

    families: tuple[type[Model], ...] = (CPMAnt,)

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str], **options: Any) -> Model:
        """Load a model; the options are those of `modelcenter.load`. Errors: `InputError`, also for a checkpoint that is no CPM."""
        return load(name, family=cls.families, **options)
