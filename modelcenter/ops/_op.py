"""What an op is: a reference that defines it, a kernel that does the same faster, and the cases on which the two are compared.

A layer calls the op and never asks what runs. The kernel runs if there is one for the device and the dtypes: in eager mode through
a plain autograd.Function (the cheapest way: benchmarks/README.md has the figures), and through an operator registered with
torch.library under torch.compile or a dispatch mode (selective recompute, fake tensors). The reference handles everything else:
float64, other devices, functorch's transforms, subclasses of Tensor that only torch's functions know, an installation without
compiled kernels. On DTensors an op is done by each process on its own shards (_shard.py).
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._kernels import DIMS, FLOATS, available, in_bf16, served
from ._mode import PLAIN, PRETENCE, once, transformed, unseen
from ._shard import on_shards

OPS: dict[str, "Op"] = {}
RAWS: dict[str, "Raw"] = {}
DTYPES = frozenset((*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool))  # what kernels may take
LIBRARY = torch.library.Library("modelcenter", "DEF")
HOLE = object()  # stands for a tensor that autograd keeps

Cases = Callable[[str, torch.dtype], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True)
class Raw:
    """A function of plain tensors that calls kernels, without a gradient, and the same function as an operator of
    torch.ops.modelcenter."""

    name: str
    direct: Callable[..., Any]
    operator: Any

    def __call__(self, *args: Any) -> Any:
        return (self.direct if unseen() and look(args)[1] else self.operator)(*args)


def raw(schema: str, devices: Sequence[str] = ("cpu", "cuda")) -> Callable[[Callable[..., Any]], Raw]:
    """Make a `Raw` of a function that allocates results and fills them by `call`. `schema`: torch.library's, without the name."""

    def wrap(function: Callable[..., Any]) -> Raw:
        name = function.__name__
        LIBRARY.define(name + schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
        for device in devices:
            LIBRARY.impl(name, function, device.upper())
        torch.library.register_fake(f"modelcenter::{name}", function, lib=LIBRARY)
        RAWS[name] = Raw(name, function, getattr(torch.ops.modelcenter, name).default)
        return RAWS[name]

    return wrap


def look(args: Sequence[Any]) -> tuple[str, bool, bool, bool, int]:
    """What decides how a call is run, determined in one pass: the kind of device of the first tensor; whether no tensor is of a
    subclass; whether none has a dtype, and the first no dimensions, that no kernel takes; whether one needs a gradient; the number
    of the first one's GPU. A ValueError if one has values and another, on meta, has none: torch's products and lookups would return
    whatever was in memory."""
    device, plain, known, grad, index, low, empty = "", True, True, False, -1, False, False
    for a in args:
        kind = type(a)
        if kind is not Tensor and kind is not Parameter:
            if not isinstance(a, Tensor):
                low |= a is torch.bfloat16  # what is to be computed in
                continue
            plain = PRETENCE.lasts
        if not device:
            device = "cpu" if a.is_cpu else "cuda" if a.is_cuda else a.device.type
            index = a.get_device() if device == "cuda" else -1
            empty = device == "meta"
            known = a.dim() <= DIMS
        elif a.is_meta is not empty:
            raise ValueError(f"an op's tensors are on {device} and on {a.device.type}; all of them have values, or none has"
                             " (accelerate's offload takes weights away that no call brings back here)")
        if a.dtype not in DTYPES:
            known = False
        if a.dtype is torch.bfloat16:
            low = True
        if a.requires_grad:
            grad = True
    if low and index >= 0 and not in_bf16(index):
        known = False
    return device, plain, known, grad, index


@dataclass(frozen=True)
class Kernel:
    """The fast implementation of an op's values and gradients.

    `forward`'s first `results` tensors are the op's, any further ones are for the backward. `saved(args, outs)` is what the
    backward reads, tensors or not; `backward(*grads, *saved)` returns a gradient or None for each argument, and of several results
    those not used have a gradient of None. `streams`: from so many first arguments alone the results behind the first are made (0:
    from any). `takes(*args)`: whether the kernel can do this call, beyond devices and floating dtypes. `devices`: where it beats
    the reference; `compiled`: where it also beats what torch.compile makes of the reference.
    """

    forward: Raw
    saved: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Any]]
    backward: Callable[..., Sequence[Tensor | None]]
    results: int = 1
    streams: int = 0
    takes: Callable[..., bool] | None = None
    devices: Sequence[str] = ("cpu", "cuda")
    compiled: Sequence[str] = ("cpu", "cuda")

    def of(self, outs: Any) -> Any:
        """The op's own results."""
        return outs if isinstance(outs, Tensor) else outs[0] if self.results == 1 else outs[: self.results]


@dataclass(frozen=True)
class Op:
    """A callable that takes the arguments of its reference, by position."""

    name: str
    reference: Callable[..., Any]
    cases: Cases
    kernel: Kernel | None = None
    straight: Any = field(init=False, default=None)  # an autograd.Function's `apply`: to the kernel and never to the dispatcher

    def __post_init__(self) -> None:
        if self.kernel is not None:
            object.__setattr__(self, "straight", differentiable(self.name, self.kernel))

    def __repr__(self) -> str:  # a config that holds an op is read by people
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:  # a module that holds an op is copied and pickled with the op's name
        return find, (self.name,)

    def __call__(self, *args: Any) -> Any:
        kernel = self.kernel
        if kernel is None:
            return self.reference(*args)
        device, plain, known, grad, index = look(args)
        if not plain and sharded(args):
            out = on_shards(self.name, args, partial(Op.__call__, self))
            return self.reference(*args) if out is NotImplemented else out
        if not plain and any(map(unknown, args)):
            return self.reference(*args)
        there = (device in kernel.devices and available(device, index)) or (PRETENCE.gpu and "cuda" in kernel.devices)
        fits = known and there and not transformed()
        if not fits or (kernel.takes is not None and not kernel.takes(*args)):
            return self.reference(*args)
        if plain and unseen():
            if grad and torch.is_grad_enabled():
                return self.straight(*args)
            return kernel.of(kernel.forward.direct(*args))
        if torch.compiler.is_compiling() and device not in kernel.compiled:
            return self.reference(*args)
        return kernel.of(kernel.forward.operator(*args))

    def fast(self, x: Tensor) -> bool:
        """Whether there is a kernel for a tensor like `x`: for a layer that would otherwise share out the work differently."""
        devices = self.kernel.devices if self.kernel is not None else ()
        here = (x.device.type in devices and served(x, x.dtype)) or (PRETENCE.gpu and "cuda" in devices)
        return here and x.dtype in FLOATS and not transformed()


def sharded(args: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor. Code that has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(a, module.DTensor) for a in args)


def unknown(a: object) -> bool:
    """Whether `a` is of a subclass that only torch's functions understand: the dispatcher would pass it to a kernel unchanged."""
    return isinstance(a, Tensor) and type(a) not in PLAIN and type(a).__torch_dispatch__ is Tensor.__torch_dispatch__


def op(name: str, reference: Callable[..., Any], cases: Cases, kernel: Kernel | None = None) -> Op:
    """Register `reference` under `name`; `cases(device, dtype)` yields argument tuples to test and time it on."""
    OPS[name] = Op(name, reference, cases, kernel)
    return OPS[name]


def find(name: str) -> Op:
    return OPS[name]


def differentiable(name: str, kernel: Kernel) -> Callable[..., Any]:
    """Give the kernel's operator its gradient, and return the same as an autograd.Function that the dispatcher never sees."""

    def keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        saved = kernel.saved(inputs, (output,) if isinstance(output, Tensor) else output)
        ctx.save_for_backward(*[a for a in saved if isinstance(a, Tensor)])
        ctx.rest = [HOLE if isinstance(a, Tensor) else a for a in saved]
        ctx.set_materialize_grads(False)  # a result that is not used has no gradient, rather than one of zeros
        if kernel.streams and not any(ctx.needs_input_grad[: kernel.streams]):
            ctx.mark_non_differentiable(*output[1 : kernel.results])

    @once
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors = iter(ctx.saved_tensors)
        return tuple(kernel.backward(*grads[: kernel.results], *[next(tensors) if a is HOLE else a for a in ctx.rest]))

    def forward(ctx: Any, *args: Any) -> Any:
        outs = kernel.forward.direct(*args)
        keep(ctx, args, outs)
        return kernel.of(outs)

    operator = kernel.forward.operator
    torch.library.register_autograd(operator.name(), backward, setup_context=keep, lib=LIBRARY)
    function = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    # The apply beneath Function.apply, which would look for functorch's transforms once more.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]  # of its class, no instance


def wide(x: Tensor) -> Tensor:
    """`x` in at least fp32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
