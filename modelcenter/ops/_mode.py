"""The conditions of a call: what intercepts it, which tensors have values, autocast; and the rehearsal, which pretends
otherwise."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)  # what has memory of its own; a subclass may not
Observer = Callable[[str, tuple[Any, ...]], None]
Backward = TypeVar("Backward", bound=Callable[..., Any])
TWICE = "second derivatives: in fp32, MODELCENTER_KERNELS=0, under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
MANY = "many at once: torch.func.jacrev, or jacobian's vectorize=False"


@dataclass
class Pretence:
    """What calls assume during a rehearsal."""

    lasts: bool = False
    watchers: int = 0  # dispatch modes that are not to be noticed
    observer: Observer | None = None  # is told of kernels that are called
    gpu: bool = False
    records: bool = False  # calls are part of a CUDA graph


PRETENCE = Pretence()


@contextmanager
def rehearsal(observer: Observer | None = None, gpu: bool = False, records: bool = False) -> Iterator[None]:
    """A context in which calls are made as in eager mode on plain tensors, although the tensors are fake and dispatch modes already
    active intercept them: the memory that those see is then what the real calls take. `observer` is called for each kernel; `gpu`:
    tensors of the CPU are treated as if on a GPU that is not here and has kernels, whether or not this installation has any;
    `records`: recompute in a backward does what it does in a CUDA graph."""
    before = vars(PRETENCE).copy()
    vars(PRETENCE).update(lasts=True, watchers=torch._C._len_torch_dispatch_stack(), observer=observer, gpu=gpu,
                          records=records)
    try:
        yield
    finally:
        vars(PRETENCE).update(before)


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or treated as if it were."""
    return x.is_cuda or PRETENCE.gpu


def real(x: Tensor) -> bool:
    """Whether `x` has values, or is treated as if it had."""
    return PRETENCE.lasts or not (x.is_meta or fake(x))


def fake(x: Tensor) -> bool:
    """Whether `x` is a tensor without values."""
    return type(x) not in PLAIN and isinstance(x, torch._subclasses.FakeTensor)


def plain(x: object) -> bool:
    """Whether `x` has memory of its own, or is treated as if it had."""
    return type(x) in PLAIN or (PRETENCE.lasts and not part(x))


def part(x: object) -> bool:
    """Whether `x` is, in a rehearsal, one rank's part of a tensor that is a DTensor in the real step."""
    return PRETENCE.lasts and getattr(x, "part", False)


def exporting() -> bool:
    """Whether torch.export asks. torch 2.11's compiler takes torch.compiler.is_exporting() for true whenever it traces."""
    return torch.compiler._is_exporting_flag


def unseen() -> bool:
    """Whether nothing intercepts calls: no compiler, no dispatch mode."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() <= PRETENCE.watchers


def kept_graph() -> bool:
    """During a backward: whether there may be another one through the same calls, which reads what they saved."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def functional() -> bool:
    """Whether a transform of torch.func is active: vmap, grad, jvp and those built from them."""
    return bool(torch._C._are_functorch_transforms_active())


def forwards() -> bool:
    """Whether derivatives are computed along with values, in forward mode."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether a call must be made of torch's own functions: under vmap, forward-mode differentiation, torch.jit's tracer."""
    return (
        functional()
        or forwards()
        or (not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None)
    )


def batched(x: Tensor | None) -> bool:
    """Whether `x` stands for many tensors: under vmap, or autograd's own."""
    kinds = torch._C._functorch
    return x is not None and (kinds.is_legacy_batchedtensor(x) or kinds.is_batchedtensor(x))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast computes products on this kind of device; None without autocast. `meta` has none, and torch
    refuses to be asked."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off on this kind of device, `meta` included."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def one_by_one(backward: Backward) -> Backward:
    """The backward of an autograd.Function that reads the memory of its gradients. Batched gradients have no memory, so an error is
    raised for them. (The reference cannot take over: too little was saved for it.)"""

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except Exception as error:
            if not any(map(batched, grads)):
                raise
            raise RuntimeError(f"is_grads_batched=True, and a kernel's gradient is of one at a time; {MANY}") from error

    return cast(Backward, call)


def once(backward: Backward) -> Backward:
    """The backward of an autograd.Function that cannot be differentiated again. A request for a graph of the gradients is refused
    at once: torch's once_differentiable puts an error into that graph, which torch.autograd.grad can bypass, as it goes only where
    it is asked to; the second derivative would then be a wrong number."""
    backward = one_by_one(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True, and a kernel's gradient has no gradient; {TWICE}")
        return backward(ctx, *grads)

    return cast(Backward, call)
