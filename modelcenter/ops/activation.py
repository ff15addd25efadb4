"""Activations of a feed-forward layer: act(x + bias), and gated ones, act(gate) * up; in at least fp32, rounded once.

gelu(x) = x * Phi(x) (Hendrycks & Gimpel, 2016); gelu_tanh is the same paper's tanh approximation, which GPT-2 and T5
v1.1 use, and gelu_cut is Megatron-LM's spelling of that, which BLOOM uses. A gated activation is act(gate) * up
(Shazeer, 2020: "GLU Variants Improve Transformer").

The bias, along the last axis, is added first, so a linear layer can leave out its own, and nothing but x is saved, not even x +
bias. The backward recomputes the activation from x and sums the gradient of the bias, in fp32 and in an order that depends on the
shape alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import call, expect
from ._mode import on_gpu
from ._op import Kernel, Op, Raw, op, raw, wide

GATED: dict[str, int] = {}  # the kind of each gated activation's act
KINDS = {"gelu": 0, "gelu_tanh": 1, "gelu_cut": 1, "silu": 2, "relu": 3}  # csrc/activation.h; below fp64 the cut shows in no digit


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def tanh_gelu_cut(x: Tensor) -> Tensor:
    """tanh_gelu with sqrt(2 / pi) truncated to eight digits: differs by up to 3e-10; in fp32 the same number and kernel."""
    if x.dtype != torch.float64:
        return tanh_gelu(x)
    return x * 0.5 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def parts(rows: int, most: int) -> int:
    """Into how many runs of rows the sum for the bias's gradient is split."""
    return max(min(rows // 16, most), 1)


@raw("(Tensor grad, Tensor x, Tensor? bias, Tensor? like, int kind) -> (Tensor, Tensor)")
def activation_backward(grad: Tensor, x: Tensor, bias: Tensor | None, like: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and, if `like` is given, of the bias, with the shape and dtype of `like`; otherwise the latter is
    empty."""
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous() if bias is not None else None
    dx = torch.empty_like(x)
    if like is None:
        call("activation_backward", grad, x, bias, kind, 1, dx, None, None)
        return dx, x.new_empty(0)
    cut = parts(x.numel() // max(x.size(-1), 1), 128 if x.is_cuda else 64)
    partial = x.new_empty((cut, x.size(-1)), dtype=torch.float32)
    dbias = torch.empty_like(like, memory_format=torch.contiguous_format)
    call("activation_backward", grad, x, bias, kind, cut, dx, partial, dbias)
    return dx, dbias


def plain(name: str, act: Callable[[Tensor], Tensor]) -> Op:
    """The op and the kernel of one activation."""
    kind = KINDS[name]

    def reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
        expect("activation", "x", x)
        return act(x) if bias is None else act(wide(x) + bias).to(x.dtype)

    def forward(x: Tensor, bias: Tensor | None = None) -> Tensor:
        x, bias = x.contiguous(), bias.contiguous() if bias is not None else None
        y = torch.empty_like(x)
        call("activation", x, bias, kind, y)
        return y

    def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
        x, bias = args if len(args) == 2 else (*args, None)
        # relu's slope is read off its result, which the next layer keeps anyway
        return (outs[0], None, bias) if name == "relu" else (x, bias, bias)

    def backward(grad: Tensor, x: Tensor, bias: Tensor | None, like: Tensor | None) -> Sequence[Tensor | None]:
        dx, dbias = activation_backward(grad, x, bias, like, kind)
        return dx, None if like is None else dbias

    def takes(x: Tensor, bias: Tensor | None = None) -> bool:
        if bias is None:  # torch's own is one pass too, and on a GPU as fast but for this
            return name == "gelu" and x.dtype != torch.float32 if on_gpu(x) else name != "relu"
        fits = bias.dim() == 1 and x.dim() > 0 and bias.size(0) == x.size(-1)
        return fits and bias.dtype in (x.dtype, torch.float32)

    kernel = named(f"{name}_forward", "(Tensor x, Tensor? bias=None) -> Tensor", forward)
    return op(name, reference, cases, Kernel(kernel, saved, backward, takes=takes))


def named(name: str, schema: str, function: Callable[..., Any]) -> Raw:
    function.__name__ = name
    return raw(schema)(function)


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (0, 8), (70, 33), (4, 4096)):
        x = torch.randn(shape, device=device, dtype=dtype) * 2
        yield x, None
        yield x, torch.randn(shape[-1], device=device, dtype=dtype)


@raw("(Tensor grad, Tensor gate, Tensor up, int kind, Tensor? seed=None, float p=0.0) -> (Tensor, Tensor)")
def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: int, seed: Tensor | None = None, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    call("gated_backward", dgate, dup, None, grad, gate, up, kind, seed, p)
    return dgate, dup


def gated(name: str, act: Op) -> Op:
    """The op and the kernel of one gated activation."""
    kind = KINDS[act.name]

    def reference(gate: Tensor, up: Tensor) -> Tensor:
        expect("gated", "gate", gate)
        out: Tensor = act.reference(wide(gate)) * up
        return out.to(gate.dtype)

    def forward(gate: Tensor, up: Tensor, seed: Tensor | None = None, p: float = 0.0) -> Tensor:
        """With a seed, followed by dropout (gated_linear): rounded once."""
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        call("gated", gate, up, kind, seed, p, y)
        return y

    def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
        return args

    def backward(grad: Tensor, gate: Tensor, up: Tensor, *drop: Any) -> Sequence[Tensor | None]:
        return *gated_backward(grad, gate, up, kind, *drop), *([None] * len(drop))

    def takes(gate: Tensor, up: Tensor) -> bool:
        return gate.dtype == up.dtype and gate.shape == up.shape

    kernel = named(f"{name}_forward", "(Tensor gate, Tensor up, Tensor? seed=None, float p=0.0) -> Tensor", forward)
    GATED[name] = kind
    return op(name, reference, gated_cases, Kernel(kernel, saved, backward, takes=takes, compiled=("cpu",)))


def gated_cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for shape in ((1, 1), (3, 7), (2, 5, 64), (0, 8), (4, 4096)):
        gate, up = (torch.randn(shape, device=device, dtype=dtype) * 2 for _ in range(2))
        yield gate, up


gelu = plain("gelu", F.gelu)
gelu_tanh = plain("gelu_tanh", tanh_gelu)
gelu_cut = plain("gelu_cut", tanh_gelu_cut)
relu = plain("relu", F.relu)
silu = plain("silu", F.silu)
geglu = gated("geglu", gelu)
geglu_tanh = gated("geglu_tanh", gelu_tanh)
reglu = gated("reglu", relu)
swiglu = gated("swiglu", silu)
