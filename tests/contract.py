"""What an op with a kernel promises, as functions of an op and a device: test_kernels.py asks it of the CPU's kernels and
test_ops_gpu.py of CUDA's.

The reference in double precision is the truth (test_ops.py holds it to the formulas); the reference in the same dtype, and torch's
own op where there is one, are the peers that a kernel's error is measured by.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelcenter.ops import OPS, Op, _kernels

LOW = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *LOW)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths_q: Any, lengths_k: Any, scale: float, causal: bool, *rest: Any) -> Any:
    """torch's own attention, where it means the same."""
    if mask is not None or lengths_q is not None or rest[0] is not None or (causal and q.shape[1] != k.shape[1]):
        return OPS["attention"].reference(q, k, v, mask, lengths_q, lengths_k, scale, causal, *rest)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)


PEERS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps),
    "layer_norm": lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps),
    "attention": sdpa,
    "gelu": lambda x, bias=None: F.gelu(x if bias is None else x + bias),
    "gelu_tanh": lambda x, bias=None: F.gelu(x if bias is None else x + bias, approximate="tanh"),
    "silu": lambda x, bias=None: F.silu(x if bias is None else x + bias),
    "relu": lambda x, bias=None: F.relu(x if bias is None else x + bias),
}  # fmt: skip


def kernel_backed(device: str) -> list[str]:
    """The ops whose kernel is taken on this kind of device."""
    return [name for name, op in OPS.items() if op.kernel is not None and device in op.kernel.devices]


def cases(name: str, device: str, dtype: torch.dtype, most: int = 1 << 30, least: int = 0) -> list[tuple[Any, ...]]:
    """The op's own that its kernel takes, of at least `least` and at most `most` elements; where it takes none in fp32, in bf16."""
    torch.manual_seed(0)
    kernel = OPS[name].kernel
    taken = kernel.takes if kernel is not None and kernel.takes is not None else lambda *args: True
    found = [args for args in OPS[name].cases(device, dtype) if taken(*args)]
    if not found and dtype == torch.float32:
        return cases(name, device, torch.bfloat16, most, least)
    return [args for args in found if least <= size(args) <= most]


def some(tried: list[tuple[Any, ...]], count: int = 2) -> list[tuple[Any, ...]]:
    """A few that differ in which arguments are there; of those alike the largest."""
    kinds: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for args in tried:
        kind = tuple(type(a) for a in args)
        if kind not in kinds or size(kinds[kind]) < size(args):
            kinds[kind] = args
    return list(kinds.values())[:count]


def size(args: Sequence[Any]) -> int:
    return sum(a.numel() for a in args if isinstance(a, Tensor))


def floating(args: Sequence[Any]) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]


def each(args: Sequence[Any], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """The arguments with every tensor changed."""
    return tuple(change(a) if isinstance(a, Tensor) else a for a in args)


def leaves(args: Sequence[Any], dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """The arguments anew, every floating one a leaf that wants a gradient, and in `dtype` if one is given."""
    return each(args, lambda a: a.detach().to(dtype or a.dtype, copy=True).requires_grad_() if a.is_floating_point() else a)


def results(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def run(
    function: Callable[..., Any], args: Sequence[Any], seed: int = 1, lay: Callable[[Tensor], Tensor] | None = None,
    like: Sequence[Tensor] = (),
) -> list[Tensor]:  # fmt: skip
    """The values, then the gradients of the leaves for a random direction that depends on the seed alone; `lay` puts it into
    memory in another way. Results that are `like` others have their directions, as rounded for those."""
    wanted = [a for a in floating(args) if a.requires_grad]
    for a in wanted:
        a.grad = None
    outs = results(function(*args))
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outs]
    directions = [d.to(like[i] if like else out).to(out) for i, (d, out) in enumerate(zip(directions, outs, strict=True))]
    directions = [lay(d) for d in directions] if lay else directions
    if wanted:
        torch.autograd.backward(*zip(*[pair for pair in zip(outs, directions, strict=True) if pair[0].requires_grad], strict=True))
    return [*(out.detach() for out in outs), *(torch.zeros_like(a) if a.grad is None else a.grad for a in wanted)]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: Any = "") -> None:
    """Bit for bit, layout included."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: result {i}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        equal = torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))
        assert equal, f"{what}: result {i} differs by {(a.double() - b.double()).abs().max()}"


def close(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: Any = "") -> None:
    """Equal but for the order of a sum."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: result {i}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        if a.numel():
            off, most = float((a.double() - b.double()).abs().max()), float(b.abs().max())
            assert off <= 8 * torch.finfo(a.dtype).eps * max(most, 1), f"{what}: result {i} differs by {off:.1e} of {most:.1e}"


def shown(args: Sequence[Any]) -> list[Any]:
    return [(a.dtype, tuple(a.shape)) if isinstance(a, Tensor) else a for a in args]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max()) if exact.numel() else 0.0


def is_as_exact(name: str, args: Sequence[Any]) -> None:
    """The worst error of each result and gradient is at most the worst peer's plus four roundings of the largest value or of 1, in
    the coarsest dtype among them: of the result, of what is kept in that dtype for the backward, and of an exponential formed there
    again and its argument."""
    op = OPS[name]
    found = run(op, leaves(args))
    exact = run(op.reference, leaves(args, torch.float64), like=found)
    peers = [run(op.reference, leaves(args))]
    if name in PEERS and len(floating(args)) == len([a for a in args if isinstance(a, Tensor)]):
        peers.append(run(PEERS[name], leaves(args)))
    most = max((float(truth.abs().max()) for truth in exact if truth.numel()), default=0.0)
    most = max(most, 1.0)  # what goes in is of that size
    eps = max(torch.finfo(ours.dtype).eps for ours in found)
    for i, (ours, truth) in enumerate(zip(found, exact, strict=True)):
        what = f"{name} {shown(args)}: result {i}"
        assert ours.shape == truth.shape and ours.dtype == peers[0][i].dtype, what
        assert ours.isfinite().all(), f"{what} is not finite"
        rounding = 4 * eps * most
        if size(args) <= 8:
            rounding += 1e-4  # a norm of one element is 1 / sqrt(eps) times a difference that cancels
        worst = max(error(peer[i], truth) for peer in peers)
        assert error(ours, truth) <= worst + rounding, f"{what}: {error(ours, truth):.2e}, peers {worst:.2e}"


def misaligned(a: Tensor) -> Tensor:
    """The same values one element after a 64-byte boundary."""
    out = a.new_empty(a.numel() + 1)[1:].view(a.shape)
    out.copy_(a.detach())
    return out.requires_grad_(a.requires_grad)


def spread(a: Tensor) -> Tensor:
    """The same values with a stranger after each."""
    out = torch.full((*a.shape, 2), 77, dtype=a.dtype, device=a.device)[..., 0]
    out.copy_(a.detach())
    return out.requires_grad_(a.requires_grad)


def turned(a: Tensor) -> Tensor:
    """The same values, the axes in memory the other way round."""
    out = a.detach().permute(*reversed(range(a.dim()))).contiguous().permute(*reversed(range(a.dim())))
    return out.requires_grad_(a.requires_grad)


LAYOUTS = {"misaligned": misaligned, "spread": spread, "turned": turned}


class Calls(TorchDispatchMode):
    """Records the calls of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "modelcenter":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def operators(name: str, args: Sequence[Any]) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operators that an op calls forward and backward, with what it calls them on."""
    with Calls() as calls:
        run(OPS[name], leaves(args))
    return [(func, each(inputs, lambda a: a.detach().clone())) for func, inputs in calls.seen]


@contextmanager
def kernels_called() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """A list that fills with the name and the arguments of every call of a compiled kernel."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    class Spy:
        def __init__(self, module: Any) -> None:
            self.module = module

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.module, name)
            if name in ("cpu", "cuda"):
                return Spy(found)
            if not callable(found):
                return found

            def spied(*args: Any) -> None:
                seen.append((name, args))
                found(*args)

            return spied

    real = _kernels._C
    _kernels._C = Spy(real)
    try:
        yield seen
    finally:
        _kernels._C = real


def through_operator(op: Op) -> Callable[..., Any]:
    """The op by its registered operator, whatever `compiled` says."""
    kernel = op.kernel
    assert kernel is not None
    return lambda *args: kernel.of(kernel.forward.operator(*args))
