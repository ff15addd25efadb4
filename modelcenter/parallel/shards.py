"""FSDP within CUDA graphs: what it needs when a micro-batch is recorded as a graph (train/graphs.py).

FSDP gathers weights and scatters gradients on its own streams. A graph holds the calls on its own stream, and those on other
streams that wait for it and for which it waits in the end. So all of FSDP's streams do; and no call in a graph waits for one
outside it, or the other way round. FSDP's hooks run once, during recording. They leave the model as they found it, provided that a
micro-batch begins and ends with sharded weights, and ends with gradients that were sent (machine.py: whole).
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from .peers import Gather, Sum

STREAMS = "all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"
ONE = "all_gather_state", "reduce_scatter_state", "_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event", \
      "_partial_reduce_output", "_all_reduce_state"  # fmt: skip
MANY = "post_forward_order", "reduce_scatter_states", "_last_post_reduce_events", "_post_forward_indices", "_modules_to_run_forward"
T = TypeVar("T")
KNOWN: "WeakKeyDictionary[nn.Module, Sequence[Gather | Sum]]" = WeakKeyDictionary()  # no copy that is made of a model is in it


def within(model: nn.Module, work: Callable[[], T]) -> T:
    """What `work` gives, whose calls are being recorded, those on FSDP's streams too."""
    if model not in KNOWN:
        return work()
    anew(model)
    sharded: Any = model
    context = sharded._get_fsdp_state()._comm_ctx
    here, others = context.device_handle.current_stream(), [getattr(context, name) for name in STREAMS]
    for stream in others:
        stream.wait_stream(here)
    try:
        out = work()
        for stream in others:
            here.wait_stream(stream)
    except BaseException:
        forget(model)
        raise
    finally:
        anew(model)
    return out


def anew(model: nn.Module) -> None:
    """No call waits for an earlier one on account of the memory in which both send something."""
    for way in KNOWN[model]:
        way.anew()


def replayed(model: nn.Module) -> None:
    """FSDP notes each block of a forward, of an evaluation too, until a backward that it sees has ended. A replay is none of these;
    without this a run that generates texts between replays would note them all."""
    if model not in KNOWN:
        return
    sharded: Any = model
    root = sharded._get_fsdp_state()
    if root._comm_ctx.post_forward_order:
        root._comm_ctx.post_forward_order.clear()
        for group in chain.from_iterable(map(groups_of, root._state_ctx.all_states)):
            group._post_forward_indices.clear()


def forget(model: nn.Module) -> None:
    """FSDP is where it is between two steps, after a recorded one that has broken off. Nothing of that was done, and so there is
    nothing to wait for, which torch's own `reset_iter_state` does."""
    sharded: Any = model
    root = sharded._get_fsdp_state()
    whole = root._state_ctx
    whole.iter_forward_root, whole.post_backward_final_callback_queued = None, False
    blank(root._comm_ctx)
    for state in whole.all_states:
        groups = groups_of(state)
        for each in (state, *groups):
            each._training_state = type(each._training_state).IDLE
            blank(each)
        for group in groups:
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None
            group._to_sharded()


def groups_of(state: Any) -> list[Any]:
    """The parameters of a module that are gathered together; torch 2.11 has one such group."""
    several = hasattr(state, "_fsdp_param_groups")
    return [group for group in (state._fsdp_param_groups if several else [state._fsdp_param_group]) if group is not None]


def blank(what: Any) -> None:
    """Let go of what is under way; each release of torch has some of these."""
    for name in ONE:
        if hasattr(what, name):
            setattr(what, name, None)
    for name in MANY:
        if hasattr(what, name):
            getattr(what, name).clear()
