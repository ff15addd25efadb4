"""Recording calls as a CUDA graph."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def recorded(work: Callable[[], T]) -> tuple[Callable[[], object], T]:
    """The calls of `work`, none of which is done: a function that does them all at once, and where the result will be each time.
    Its memory is the record's own. Every library must have been called before with the same shapes. What cannot be recorded is a
    RuntimeError."""
    graph, before, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(before)
    with torch.cuda.stream(aside), undisturbed():
        graph.capture_begin(capture_error_mode="thread_local")  # other threads may pin memory meanwhile
        try:
            out = work()
        finally:
            graph.capture_end()
    before.wait_stream(aside)
    return graph.replay, out


def watch(mode: str | int) -> None:
    """Whether what waits for the device is an error. torch warns that it does not notice everything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What would wait for the device is an error before it is tried, when the record is still whole; and nothing is collected, for
    some things may not be destroyed meanwhile."""
    collects, mode = gc.isenabled(), torch.cuda.get_sync_debug_mode()
    gc.disable()
    watch("error")
    try:
        yield
    finally:
        watch(mode)
        if collects:
            gc.enable()
