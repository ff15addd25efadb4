"""What a call is made under: who watches it, which tensors have values, autocast; and the rehearsal, which pretends otherwise."""

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
    """What calls take for true while a rehearsal lasts."""

    lasts: bool = False
    watchers: int = 0  # dispatch modes that are not to be noticed
    observer: Observer | None = None  # is told of kernels that are called
    gpu: bool = False
    records: bool = False  # calls are part of a CUDA graph


PRETENCE = Pretence()


@contextmanager
def rehearsal(observer: Observer | None = None, gpu: bool = False, records: bool = False) -> Iterator[None]:
    """While it lasts, calls are made as in eager on plain tensors, though these are fake and dispatch modes that are there already
    watch: what those see of memory is then what the real calls take. `observer` is told of each kernel; `gpu`: tensors of the CPU
    are treated as on a GPU that is not here, which has kernels, be there any in this installation or not; `records`: what is
    computed again in a backward is what it is in a CUDA graph."""
    before = vars(PRETENCE).copy()
    vars(PRETENCE).update(lasts=True, watchers=torch._C._len_torch_dispatch_stack(), observer=observer, gpu=gpu,
                          records=records)
    try:
        yield
    finally:
        vars(PRETENCE).update(before)


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or is to be treated as if it were."""
    return x.is_cuda or PRETENCE.gpu


def real(x: Tensor) -> bool:
    """Whether `x` has values, or is to be treated as if it had."""
    return PRETENCE.lasts or not (x.is_meta or fake(x))


def fake(x: Tensor) -> bool:
    """Whether `x` is a tensor without values."""
    return type(x) not in PLAIN and isinstance(x, torch._subclasses.FakeTensor)


def plain(x: object) -> bool:
    """Whether `x` has memory of its own, or is to be treated as if it had."""
    return type(x) in PLAIN or (PRETENCE.lasts and not part(x))


def part(x: object) -> bool:
    """Whether `x` is, at a rehearsal, what one rank has of a tensor that is a DTensor in the step itself."""
    return PRETENCE.lasts and getattr(x, "part", False)


def unseen() -> bool:
    """Whether nothing watches what is called: no compiler, no dispatch mode."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() <= PRETENCE.watchers


def kept_graph() -> bool:
    """Of a backward that runs: whether there may be another one through the same calls, which reads what they have kept."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def functional() -> bool:
    """Whether a transform of torch.func is at work: vmap, grad, jvp and those made of them."""
    return bool(torch._C._are_functorch_transforms_active())


def forwards() -> bool:
    """Whether derivatives are formed beside values, in forward mode."""
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
    """The dtype in which autocast forms products on this kind of device; None outside it. `meta` has none, and torch refuses the
    question."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off on this kind of device, `meta` included."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def one_by_one(backward: Backward) -> Backward:
    """The backward of an autograd.Function that reads the memory of its gradients. Many at once have none: what is raised there
    says so. (The reference cannot do instead: for it too little is kept.)"""

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
    """The backward of an autograd.Function that nobody can differentiate again. A graph of the gradients is refused where it is
    asked for: torch's once_differentiable puts an error into it, which torch.autograd.grad, going only where it is asked to, passes
    by, and the second derivative is a wrong number."""
    backward = one_by_one(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True, and a kernel's gradient has no gradient; {TWICE}")
        return backward(ctx, *grads)

    return cast(Backward, call)
