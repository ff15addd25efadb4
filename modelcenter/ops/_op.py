"""What an op is: a reference that gives its meaning, a kernel that does it faster, and the cases on which the two are compared.

A layer calls the op and never asks what runs. The kernel does, where there is one for the device and the dtypes: in eager through
a plain autograd.Function (the cheapest road: benchmarks/README.md has the figures), and through an operator registered with
torch.library under torch.compile and under a dispatch mode (selective recompute, fake tensors). The reference does everything
else: float64, other devices, functorch's transforms, subclasses of Tensor that only torch's functions know, an installation without
compiled kernels. On DTensors an op is done by each process on its own shards (_shard.py).

MODELCENTER_KERNELS=0 leaves the kernels out, and a file there is loaded in place of the installed ones; MODELCENTER_CPU=base or
avx2 keeps those for the CPU to an older instruction set. Anything else there is an InputError.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .. import __version__
from ..errors import refuse
from ._shard import on_shards

FILE = os.environ.get("MODELCENTER_KERNELS") or "1"
WANTED = FILE != "0"
LEVELS = ("base", "avx2", "avx512")  # instruction sets, of MODELCENTER_CPU
LEVEL = os.environ.get("MODELCENTER_CPU") or LEVELS[-1]


def load() -> Any:
    """The compiled kernels, or None."""
    if LEVEL not in LEVELS:
        refuse("environment", "MODELCENTER_CPU", LEVEL, ", ".join(LEVELS))
    if not WANTED or FILE == "1":
        try:
            return importlib.import_module("modelcenter._C") if WANTED else None
        except ImportError:
            return None
    spec = importlib.util.spec_from_file_location("modelcenter._C", FILE)
    if spec is None or spec.loader is None:
        refuse("environment", "MODELCENTER_KERNELS", FILE, "0, 1 or the file of an extension")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        refuse("environment", "MODELCENTER_KERNELS", f"{FILE}: {error}", "0, 1 or the file of an extension")
    return module


_C = load()
if _C is not None and _C.version != __version__:
    warnings.warn(f"modelcenter's kernels were built for {_C.version} and not for {__version__}: install it again", stacklevel=1)
    _C = None
if _C is not None:
    _C.connect(torch, getattr(torch._C, "_cuda_getCurrentRawStream", None))

OPS: dict[str, "Op"] = {}
RAWS: dict[str, "Raw"] = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = frozenset((*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8, torch.bool))  # what kernels may take
PLAIN = (Tensor, Parameter)  # what has memory of its own; a subclass may not
LIBRARY = torch.library.Library("modelcenter", "DEF")
HOLE = object()  # stands for a tensor that autograd keeps

Cases = Callable[[str, torch.dtype], Iterable[tuple[Any, ...]]]


def call(name: str, *args: Any) -> None:
    """Run the compiled kernel `name` on the device of the first argument, a tensor. Tensors must be contiguous; anything that does
    not fit is a ValueError that names the argument. Fake tensors have no memory and are left alone: so a function that allocates
    its results and calls kernels is its own fake kernel."""
    tensor = args[0]
    if tensor.is_meta or fake(tensor):
        if _observer is not None:
            _observer(name, args)
        return
    getattr(_C.cuda if tensor.is_cuda else _C.cpu, name)(*args)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast forms products on this kind of device; None outside it. `meta` has none, and torch refuses the
    question."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast off on this kind of device, `meta` included."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


@dataclass(frozen=True)
class Raw:
    """A function of plain tensors on kernels, without a gradient, and the same as an operator of torch.ops.modelcenter."""

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


_rehearsing = False
_watching = 0  # dispatch modes that are not to be noticed
_observer: Callable[[str, tuple[Any, ...]], None] | None = None  # is told of kernels that are called
_as_gpu = False


@contextmanager
def rehearsal(observer: Callable[[str, tuple[Any, ...]], None] | None = None, gpu: bool = False) -> Iterator[None]:
    """While it lasts, calls are made as in eager on plain tensors, though these are fake and dispatch modes that are there already
    watch: what those see of memory is then what the real calls take. `observer` is told of each kernel; `gpu`: tensors of the CPU
    are treated as on a GPU that is not here, which has kernels, be there any in this installation or not."""
    global _rehearsing, _watching, _observer, _as_gpu
    before = _rehearsing, _watching, _observer, _as_gpu
    _rehearsing, _watching, _observer, _as_gpu = True, torch._C._len_torch_dispatch_stack(), observer, gpu
    try:
        yield
    finally:
        _rehearsing, _watching, _observer, _as_gpu = before


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or is to be treated as if it were."""
    return x.is_cuda or _as_gpu


def real(x: Tensor) -> bool:
    """Whether `x` has values, or is to be treated as if it had."""
    return _rehearsing or not (x.is_meta or fake(x))


def fake(x: Tensor) -> bool:
    """Whether `x` is a tensor without values."""
    return type(x) not in PLAIN and isinstance(x, torch._subclasses.FakeTensor)


def plain(x: object) -> bool:
    """Whether `x` has memory of its own, or is to be treated as if it had."""
    return type(x) in PLAIN or (_rehearsing and not part(x))


def part(x: object) -> bool:
    """Whether `x` is, at a rehearsal, what one rank has of a tensor that is a DTensor in the step itself."""
    return _rehearsing and getattr(x, "part", False)


def unseen() -> bool:
    """Whether nothing watches what is called: no compiler, no dispatch mode."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() <= _watching


def kept_graph() -> bool:
    """Of a backward that runs: whether there may be another one through the same calls, which reads what they have kept."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def transformed() -> bool:
    """Whether a call must be made of torch's own functions: under vmap, forward-mode differentiation, torch.jit's tracer."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None)
    )


def look(args: Sequence[Any]) -> tuple[str, bool, bool, bool, int]:
    """What decides how a call is done, read in one pass: the kind of device of the first tensor; whether no tensor is of a
    subclass, none of a dtype that no kernel has there; whether one of them wants a gradient; the number of the first one's GPU.
    A ValueError where one has values and another has none, on meta: torch's products and lookups give what lay in memory then."""
    device, plain, known, grad, index, low, empty = "", True, True, False, -1, False, False
    for a in args:
        kind = type(a)
        if kind is not Tensor and kind is not Parameter:
            if not isinstance(a, Tensor):
                low |= a is torch.bfloat16  # what is to be computed in
                continue
            plain = _rehearsing
        if not device:
            device = "cpu" if a.is_cpu else "cuda" if a.is_cuda else a.device.type
            index = a.get_device() if device == "cuda" else -1
            empty = device == "meta"
        elif a.is_meta is not empty:
            raise ValueError(f"an op's tensors are on {device} and on {a.device.type}; all of them have values, or none has")
        if a.dtype not in DTYPES:
            known = False
        if a.dtype is torch.bfloat16:
            low = True
        if a.requires_grad:
            grad = True
    if low and index >= 0 and not modern(index):
        known = False
    return device, plain, known, grad, index


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
    takes: Callable[..., bool] | None = None
    devices: Sequence[str] = ("cpu", "cuda")
    compiled: Sequence[str] = ("cpu", "cuda")

    def of(self, outs: Any) -> Any:
        """The op's own results."""
        return outs if isinstance(outs, Tensor) else outs[0] if self.results == 1 else outs[: self.results]


@dataclass(frozen=True)
class Op:
    """A callable with the arguments of its reference, by position."""

    name: str
    reference: Callable[..., Any]
    cases: Cases
    kernel: Kernel | None = None
    straight: Any = field(init=False, default=None)  # an autograd.Function's `apply`: to the kernel and never to the dispatcher

    def __post_init__(self) -> None:
        if self.kernel is not None:
            object.__setattr__(self, "straight", differentiable(self.name, self.kernel))

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
        there = (device in kernel.devices and available(device, index)) or (_as_gpu and "cuda" in kernel.devices)
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
        here = (x.device.type in devices and served(x, x.dtype)) or (_as_gpu and "cuda" in devices)
        return here and x.dtype in FLOATS and not transformed()


def sharded(args: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor. Who has any has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(a, module.DTensor) for a in args)


def unknown(a: object) -> bool:
    """Whether `a` is of a subclass that only torch's functions know: the dispatcher would pass it on to a kernel as it is."""
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

    def gradients(ctx: Any, *grads: Tensor) -> Any:
        tensors = iter(ctx.saved_tensors)
        return tuple(kernel.backward(*grads[: kernel.results], *[next(tensors) if a is HOLE else a for a in ctx.rest]))

    def forward(ctx: Any, *args: Any) -> Any:
        outs = kernel.forward.direct(*args)
        keep(ctx, args, outs)
        return kernel.of(outs)

    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return gradients(ctx, *grads)
        with torch.no_grad():  # a graph of the gradient is wanted: one whose use is an error, rather than a wrong number
            found = gradients(ctx, *grads)
        stop: Any = torch._C._functions.DelayedError(f"{name}: the kernel's gradient has no gradient".encode(), len(found))
        return stop(*(None if g is None else g.detach().requires_grad_() for g in found))

    operator = kernel.forward.operator
    torch.library.register_autograd(operator.name(), backward, setup_context=keep, lib=LIBRARY)
    function = type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    # The apply beneath Function.apply, which would look for functorch's transforms once more.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]  # of its class, no instance


def available(device: str, index: int = 0) -> bool:
    """Whether this installation has kernels for a kind of device, and for the GPU of that number; says once that it has none."""
    if _as_gpu:  # of a GPU that is not here, beside which there will be an installation of its own
        return True
    if _C is None:
        if WANTED:
            warn_once()
        return False
    if device == "cpu":
        return bool(_C.cpu_level != "none")
    return device == "cuda" and bool(_C.cuda_architectures) and covered(index)


def served(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there are kernels for the device of `x` that compute in `dtype`."""
    index = x.get_device()
    return available(x.device.type, index) and (dtype != torch.bfloat16 or not x.is_cuda or modern(index))


AMPERE = (8, 0)
GENERATIONS: dict[int, tuple[int, int]] = {}  # by the number of a GPU


def generation(index: int) -> tuple[int, int]:
    """The compute capability of GPU `index`; Ampere's where there is no GPU to ask."""
    if index not in GENERATIONS:
        if not torch.cuda.is_available():
            return AMPERE
        GENERATIONS[index] = torch.cuda.get_device_capability(index)
    return GENERATIONS[index]


def modern(index: int) -> bool:
    """Whether GPU `index` is of Ampere's generation or later: before it ops in bf16 have no kernels."""
    return generation(index) >= AMPERE


def hopper(index: int) -> bool:
    return generation(index) == (9, 0)


# To the compiler a constant, as by torch.compiler.assume_constant_result, which would import the compiler; a truth, for that of
# torch 2.11 does not compare pairs of numbers.
modern._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function has none
hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the same


NOT = "no kernels"


def reach(capability: tuple[int, int], architectures: str) -> str:
    """Whether kernels built for `architectures` run on a GPU: machine code runs on later chips of its generation, and the PTX of
    the last architecture is compiled by the driver for all later ones."""
    numbers = [int(a) for a in architectures.split()]
    mine = capability[0] * 10 + capability[1]
    if any(a // 10 == capability[0] and a <= mine for a in numbers):
        return "kernels built for it"
    return "kernels compiled by the driver at their first use" if mine > max(numbers) else NOT


COVERED: dict[int, bool] = {}  # by the number of a GPU


def covered(index: int) -> bool:
    """Whether this build's code runs on GPU `index`. Its tensors being there, asking makes no CUDA context that was not; a fake one
    of a machine without GPUs is thought to be on one that fits."""
    if index not in COVERED:
        if not torch.cuda.is_available():
            return True
        chip, built = torch.cuda.get_device_capability(index), _C.cuda_architectures
        COVERED[index] = reach(chip, built) != NOT
        if not COVERED[index]:
            names = ", ".join(f"sm_{arch}" for arch in built.split())
            warnings.warn(f"modelcenter's kernels are for {names}; GPU {index} is sm_{chip[0]}{chip[1]} and computes with the "
                          "references: `modelcenter doctor`", stacklevel=4)  # fmt: skip
    return COVERED[index]


covered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `modern`


_warned = False


def warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn("modelcenter has no compiled kernels and computes with its references: `modelcenter doctor`", stacklevel=4)


def wide(x: Tensor) -> Tensor:
    """`x` in at least fp32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
