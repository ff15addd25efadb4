"""Which families and presets there are."""

import importlib
import pkgutil

from .model import FAMILIES, Model, Preset


def families() -> dict[str, type[Model]]:
    """Every family: each file of `models/` is imported, and registers its own."""
    from . import models

    for module in pkgutil.iter_modules(models.__path__):
        importlib.import_module(f"{models.__name__}.{module.name}")
    return FAMILIES


def presets() -> dict[str, tuple[type[Model], Preset]]:
    """Every preset by name."""
    return {name: (family, preset) for family in families().values() for name, preset in family.presets.items()}


def hubs() -> dict[str, str | None]:
    """Preset -> its hub id; None if no weights are published."""
    return {name: preset.hub for name, (_, preset) in presets().items()}
