"""`machine.compile`: lets torch compile a block for as many kinds of batches as a run has."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..parallel.machine import Machine

# Kinds that torch compiles one function for; it has 8, and would run others uncompiled. Blocks of all layers share one function: of
# an encoder and of a decoder, in training and in an evaluation, padded or not, for all positions or those that the head reads. Each
# is compiled for the first shape and then for any, or for a few ranges of it.
KINDS = 32


@contextmanager
def varied(machine: Machine) -> Iterator[None]:
    """While this lasts torch compiles that many. With tensor parallelism they stay 8: there each shape is a kind (`fit_blocks`)."""
    if not machine.compile or machine.tensor_parallel > 1:
        yield
        return
    from torch._dynamo import config  # takes two seconds, for those who compile

    with config.patch(recompile_limit=KINDS):
        yield
