"""What an op is: a reference that gives its meaning, a kernel that does it faster, and the cases on which the two are compared.

A layer calls the op and never asks what runs. The kernel does, where there is one for the device and the dtypes: in eager through
a plain autograd.Function (the cheapest road: benchmarks/README.md has the figures), and through an operator registered with
torch.library under torch.compile, under a dispatch mode (selective recompute, fake tensors) and for DTensors. The reference does
everything else: float64, other devices, functorch's transforms, an installation without compiled kernels.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import __version__

try:
    import modelcenter._C as _C
except ImportError:
    _C = None
if _C is not None and _C.version != __version__:
    warnings.warn(f"modelcenter's kernels were built for {_C.version} and not for {__version__}: install it again", stacklevel=1)
    _C = None
if _C is not None:
    _C.connect(torch, getattr(torch._C, "_cuda_getCurrentRawStream", None))

OPS: dict[str, "Op"] = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PLAIN = (Tensor, torch.nn.Parameter)  # what has memory of its own; a subclass may not
LIBRARY = torch.library.Library("modelcenter", "DEF")

Cases = Callable[[str, torch.dtype], Iterable[tuple[Any, ...]]]


def call(name: str, *args: Any) -> None:
    """Run the compiled kernel `name` on the device of the first argument, a tensor. Tensors must be contiguous; anything that does
    not fit is a ValueError that names the argument. Fake tensors have no memory and are left alone: so a function that allocates
    its results and calls kernels is its own fake kernel."""
    tensor = args[0]
    if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta:
        return
    getattr(_C.cuda if tensor.is_cuda else _C.cpu, name)(*args)


@dataclass(frozen=True)
class Raw:
    """A function of plain tensors on kernels, without a gradient, and the same as an operator of torch.ops.modelcenter."""

    name: str
    direct: Callable[..., Any]
    operator: Any

    def __call__(self, *args: Any) -> Any:
        return (self.direct if straight(args) else self.operator)(*args)


def raw(schema: str, devices: Sequence[str] = ("cpu", "cuda")) -> Callable[[Callable[..., Any]], Raw]:
    """Make a `Raw` of a function that allocates results and fills them by `call`. `schema`: torch.library's, without the name."""

    def wrap(function: Callable[..., Any]) -> Raw:
        name = function.__name__
        LIBRARY.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
        for device in devices:
            LIBRARY.impl(name, function, device.upper())
        torch.library.register_fake(f"modelcenter::{name}", function, lib=LIBRARY)
        return Raw(name, function, getattr(torch.ops.modelcenter, name).default)

    return wrap


def straight(args: Sequence[Any]) -> bool:
    """Whether nothing wants to see the call: no compiler, no dispatch mode, no tensor subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(type(a) in PLAIN for a in args if isinstance(a, Tensor))


@dataclass(frozen=True)
class Kernel:
    """The fast way to an op's values and gradients.

    `forward`'s first `results` tensors are the op's, any further ones are for the backward. `saved(args, outs)` is what the
    backward reads, tensors or not; `backward(*grads, *saved)` returns a gradient or None for each argument, and of several results
    those not used have a gradient of None. `takes(*args)`: whether the kernel can do this call, beyond devices and floating
    dtypes. `devices`: where it beats the reference; `compiled`: where it also beats what torch.compile makes of the reference.
    """

    forward: Raw
    saved: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Any]]
    backward: Callable[..., Sequence[Tensor | None]]
    results: int = 1
    takes: Callable[..., bool] = lambda *args: True
    devices: Sequence[str] = ("cpu", "cuda")
    compiled: Sequence[str] = ("cpu", "cuda")


@dataclass(frozen=True)
class Op:
    """A callable with the arguments of its reference, by position."""

    name: str
    reference: Callable[..., Any]
    cases: Cases
    kernel: Kernel | None = None
    function: Any = field(init=False, default=None)  # the autograd.Function straight to the kernel

    def __post_init__(self) -> None:
        if self.kernel is not None:
            object.__setattr__(self, "function", differentiable(self.name, self.kernel))

    def __call__(self, *args: Any) -> Any:
        kernel = self.kernel
        if kernel is None or not self.fits(args):
            return self.reference(*args)
        if straight(args):
            return self.function.apply(*args)
        if torch.compiler.is_compiling() and device_of(args) not in kernel.compiled:
            return self.reference(*args)
        outs = kernel.forward.operator(*args)
        return outs if isinstance(outs, Tensor) else outs[0] if kernel.results == 1 else outs[: kernel.results]

    def fits(self, args: Sequence[Any]) -> bool:
        """Whether the kernel can do this call."""
        assert self.kernel is not None
        device = device_of(args)
        if device not in self.kernel.devices or not available(device) or torch._C._are_functorch_transforms_active():
            return False
        if any(isinstance(a, Tensor) and a.is_floating_point() and a.dtype not in FLOATS for a in args):
            return False
        return self.kernel.takes(*args)


def op(name: str, reference: Callable[..., Any], cases: Cases, kernel: Kernel | None = None) -> Op:
    """Register `reference` under `name`; `cases(device, dtype)` yields argument tuples to test and time it on."""
    OPS[name] = Op(name, reference, cases, kernel)
    return OPS[name]


def differentiable(name: str, kernel: Kernel) -> type[torch.autograd.Function]:
    """Give the kernel's operator its gradient, and return the same as an autograd.Function that the dispatcher never sees."""

    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        saved = kernel.saved(inputs, (output,) if isinstance(output, Tensor) else output)
        ctx.save_for_backward(*(a for a in saved if isinstance(a, Tensor)))
        ctx.rest = [None if isinstance(a, Tensor) else (a,) for a in saved]
        ctx.set_materialize_grads(False)  # a result that is not used has no gradient, rather than one of zeros

    def gradients(ctx: Any, *grads: Tensor) -> Any:
        tensors = iter(ctx.saved_tensors)
        return tuple(kernel.backward(*grads[: kernel.results], *(next(tensors) if a is None else a[0] for a in ctx.rest)))

    def forward(ctx: Any, *args: Any) -> Any:
        outs = kernel.forward.direct(*args)
        keep(ctx, args, outs)
        return outs if isinstance(outs, Tensor) else outs[0] if kernel.results == 1 else outs[: kernel.results]

    operator = kernel.forward.operator
    torch.library.register_autograd(operator.name(), gradients, setup_context=keep, lib=LIBRARY)
    once = torch.autograd.function.once_differentiable(gradients)
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(once)})


def device_of(args: Sequence[Any]) -> str:
    """The kind of device that an op's first tensor is on."""
    return str(next(a for a in args if isinstance(a, Tensor)).device.type)


def available(device: str) -> bool:
    """Whether this installation has kernels for a kind of device; says so once where it has none at all."""
    if _C is None:
        warn_once()
        return False
    return device == "cpu" or (device == "cuda" and bool(_C.cuda_architectures))


_warned = False


def warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn("modelcenter has no compiled kernels and computes with its references: `modelcenter doctor`", stacklevel=4)


def wide(x: Tensor) -> Tensor:
    """`x` in at least fp32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
