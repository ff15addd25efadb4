"""Recording calls into a CUDA graph."""

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
    """Whether this thread's calls on its GPU are being recorded: then none of them runs, and no number can be read from a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def taping() -> bool:
    """Whether recompute in a backward reuses the random numbers that were drawn: in a record, whose generator cannot be rewound,
    and in the rehearsal of one."""
    return PRETENCE.records or recording()


def recorded(work: Callable[[], T], device: torch.device, pool: Any = None, watched: bool | None = None
             ) -> tuple[Callable[[], object], T]:
    """Record the calls of `work` on a GPU without running them. Returns a function that runs all of them at once, and the tensors
    that hold the result each time. The memory belongs to this record, or to all records of a `pool`, which run one after another.
    Every library must have been called before with the same shapes. If something cannot be recorded, a RuntimeError is raised.
    `watched`: as of `undisturbed`."""
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
    """The stream on which this thread records. There is only one, because libraries keep a workspace for each stream that they have
    seen."""
    if not hasattr(STREAMS, str(device)):
        setattr(STREAMS, str(device), torch.cuda.Stream(device))
    found: torch.cuda.Stream = getattr(STREAMS, str(device))
    return found


def watch(mode: str | int) -> None:
    """Set whether waiting for the device is an error. torch warns that it does not detect every case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def undisturbed(watched: bool) -> Iterator[None]:
    """If `watched`, waiting for the device, in any thread, is an error before it happens, while the record is still intact; and
    garbage is not collected, because some objects must not be destroyed meanwhile."""
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
    """For torch's checkpoint, in a record, whose generator cannot be rewound: the contexts of a forward, which keeps what is
    `drawn`, and of the same forward repeated, which reuses that. Nothing else is intercepted, so ops run as they do without a
    record, with the same bits."""
    later: deque[AbstractContextManager[Any]] = deque()

    def first() -> AbstractContextManager[Any]:
        now: AbstractContextManager[Any]
        now, again = create_selective_checkpoint_contexts(drawing)
        later.append(again)
        return now

    return taped(first), taped(later.popleft)


@contextmanager
def taped(each: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Every random draw of this thread is made in a context of `each`."""
    before = getattr(TAPES, "each", None)
    TAPES.each = each
    try:
        yield
    finally:
        TAPES.each = before


def drawing(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Keeps the results of ops that draw from a generator; in a rehearsal our attention stands for torch's attention on a GPU,
    which draws."""
    draws = torch.Tag.nondeterministic_seeded in op.tags
    stands = op._schema.name == "modelcenter::attention_forward" and on_gpu(args[0])
    return CheckpointPolicy.MUST_SAVE if draws or stands else CheckpointPolicy.PREFER_RECOMPUTE


def drawn(make: Callable[[], T]) -> T:
    """What `make` draws from a generator; in the recompute of a record, what was drawn before."""
    each = None if torch.compiler.is_compiling() else getattr(TAPES, "each", None)
    if each is None:
        return make()
    with each():
        return make()
