"""Recording calls as a CUDA graph."""

import gc
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ._mode import PRETENCE, on_gpu

T = TypeVar("T")
STREAMS = threading.local()
TAPES = threading.local()  # `each`: what gives a thread the context of its next draw


def recording() -> bool:
    """Whether the calls of this thread on its GPU are recorded: then none is done, and no number of a GPU can be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def taping() -> bool:
    """Whether what is computed again in a backward is given what was drawn: in a record, whose generator cannot be put back, and at
    the rehearsal of one."""
    return PRETENCE.records or recording()


def recorded(work: Callable[[], T], device: torch.device, pool: Any = None, watched: bool | None = None
             ) -> tuple[Callable[[], object], T]:
    """The calls of `work` on a GPU, none of which is done: a function that does them all at once, and where the result will be each
    time. Its memory is the record's own, or that of all records of a `pool`, which are done one after the other. Every library must
    have been called before with the same shapes. What cannot be recorded is a RuntimeError. `watched`: as of `undisturbed`."""
    graph, before, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device), stream(device)
    aside.wait_stream(before)
    # other threads of a server may rightly wait for the device meanwhile, and the mode that would tell is theirs too
    with torch.cuda.stream(aside), undisturbed(threading.active_count() == 1 if watched is None else watched):
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may pin memory meanwhile
        try:
            out = work()
        finally:
            graph.capture_end()
    before.wait_stream(aside)

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay, out


def stream(device: torch.device) -> torch.cuda.Stream:
    """Where this thread records. There is one, for libraries keep a workspace for each that they have met."""
    if not hasattr(STREAMS, str(device)):
        setattr(STREAMS, str(device), torch.cuda.Stream(device))
    found: torch.cuda.Stream = getattr(STREAMS, str(device))
    return found


def watch(mode: str | int) -> None:
    """Whether what waits for the device is an error. torch warns that it does not notice everything."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def undisturbed(watched: bool = True) -> Iterator[None]:
    """If `watched`, what would wait for the device, in any thread, is an error before it is tried, when the record is still whole;
    and nothing is collected, for some things may not be destroyed meanwhile."""
    collects, mode = gc.isenabled(), torch.cuda.get_sync_debug_mode()
    gc.disable()
    watch("error" if watched else mode)
    try:
        yield
    finally:
        watch(mode)
        if collects:
            gc.enable()


def tape() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch's checkpoint, in a record, whose generator cannot be put back: the contexts of a forward, which keeps what is
    `drawn`, and of the same forward done again, which is given that. Nothing else of it is watched, so that ops take the road
    that they take by calls, and have its bits."""
    later: deque[AbstractContextManager[Any]] = deque()

    def first() -> AbstractContextManager[Any]:
        now: AbstractContextManager[Any]
        now, again = create_selective_checkpoint_contexts(drawing)
        later.append(again)
        return now

    return taped(first), taped(later.popleft)


@contextmanager
def taped(each: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """What is drawn in this thread is drawn in a context of `each`."""
    before = getattr(TAPES, "each", None)
    TAPES.each = each
    try:
        yield
    finally:
        TAPES.each = before


def drawing(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Kept is what takes its numbers from a generator; at a rehearsal our attention stands for torch's on a GPU, which does."""
    draws = torch.Tag.nondeterministic_seeded in op.tags
    stands = op._schema.name == "modelcenter::attention_forward" and on_gpu(args[0])
    return CheckpointPolicy.MUST_SAVE if draws or stands else CheckpointPolicy.PREFER_RECOMPUTE


def drawn(make: Callable[[], T]) -> T:
    """What `make` draws from a generator: where a record computes it again, what it was."""
    each = None if torch.compiler.is_compiling() else getattr(TAPES, "each", None)
    if each is None:
        return make()
    with each():
        return make()
