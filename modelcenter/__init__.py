"""modelcenter: a model zoo for training."""

__version__ = "0.1.0"
