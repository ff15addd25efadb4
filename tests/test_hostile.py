"""What an op does with arguments that nobody means well: what its reference does with them, or an exception; never other numbers.

test_boundary.py asks the compiled kernels themselves; this asks the functions that a user calls.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import OPS, cases, kernel_backed, results, shown, some
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from modelcenter import ops
from modelcenter.ops import _kernels


class Function(Tensor):
    """A subclass of which torch says what it does by __torch_function__."""


def inference(a: Tensor) -> Tensor:
    with torch.inference_mode():
        return a.clone()


Way = Callable[[Tensor], Any]
OF_ANY: dict[str, Way] = {
    "float64": Tensor.double, "float16": Tensor.half, "int32": Tensor.int, "uint8": Tensor.byte, "bool": Tensor.bool,
    "complex": lambda a: a.to(torch.complex64), "on meta": lambda a: a.to("meta"),
    "one element": lambda a: a.reshape(-1)[:1], "an axis more": lambda a: a[None], "an axis more, last": lambda a: a[..., None],
    "a parameter": lambda a: torch.nn.Parameter(a.clone(), a.is_floating_point()), "a subclass": lambda a: a.as_subclass(Function),
    "two in one": lambda a: TwoTensor(a.clone(), a.clone()), "of inference": inference, "None": lambda a: None,
    "a number": lambda a: 3,
}  # fmt: skip
OF_AXES: dict[str, Way] = {
    "expanded, last": lambda a: a[..., :1].expand(a.shape), "expanded, first": lambda a: a[:1].expand(a.shape),
    "turned": lambda a: a.transpose(0, -1).contiguous().transpose(0, -1), "without axes": lambda a: a.reshape(-1)[0],
    "an axis less": lambda a: a[0], "of one": lambda a: a.reshape(-1)[:1].reshape((1,) * a.dim()),
    "of one, last": lambda a: a[..., :1], "of one, first": lambda a: a[:1], "shorter": lambda a: a[..., :-1],
    "fewer": lambda a: a[:-1], "longer": lambda a: torch.cat((a, a[..., :1]), -1), "more": lambda a: torch.cat((a, a[:1])),
    "empty, last": lambda a: a[..., :0], "empty, first": lambda a: a[:0], "sparse": Tensor.to_sparse,
}  # fmt: skip
OF_FLOATS: dict[str, Way] = {
    "integers": Tensor.long, "negated": lambda a: torch._neg_view(a.clone()), "of another library": lambda a: a.float().to_mkldnn(),
    "zeros without memory": lambda a: torch._efficientzerotensor(a.shape, dtype=a.dtype),
}  # fmt: skip


def ways(a: Tensor) -> dict[str, Way]:
    return OF_ANY | (OF_AXES if a.dim() and a.numel() else {}) | (OF_FLOATS if a.is_floating_point() else {"floats": Tensor.float})


def attempt(function: Callable[..., Any], args: tuple[Any, ...], learns: bool) -> list[Tensor | None] | Exception:
    """Values and gradients of a sum of squares, smooth where a rounding may change a sign; or what was raised."""
    given = [
        a.detach().requires_grad_() if learns and type(a) is Tensor and a.is_floating_point() and not a.is_inference() else a
        for a in args
    ]
    try:
        outs = results(function(*given))
        wanted = [a for a in given if isinstance(a, Tensor) and a.requires_grad]
        if not learns or not any(out.requires_grad for out in outs):
            return list(outs)
        return [*outs, *torch.autograd.grad([o.abs().square().sum() for o in outs if o.requires_grad], wanted, allow_unused=True)]
    except Exception as error:
        return error


def bare(a: Tensor) -> Tensor:
    a = a.a if isinstance(a, TwoTensor) else a
    return (a if a.layout == torch.strided else a.to_dense()).detach().as_subclass(Tensor)


def agrees(ours: Tensor | None, theirs: Tensor | None, rough: float) -> bool:
    if ours is None or theirs is None:  # no gradient, or one of zeros
        return all(a is None or not bare(a).any() for a in (ours, theirs))
    ours, theirs = bare(ours), bare(theirs)
    if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
        return False
    if ours.is_meta or not ours.numel():
        return True
    ours, theirs = ours.to(torch.complex128), theirs.to(torch.complex128)
    size = float(theirs.abs().nan_to_num(1, 1).max().clamp(min=1))
    return torch.allclose(ours, theirs, rtol=rough, atol=rough * size, equal_nan=True)


# whose values the reference alone reads in the backward, or which only the reference's last function refuses
MILDER = ("of inference", "a subclass", "two in one", "a parameter")


@pytest.mark.skipif(not _kernels.available("cpu"), reason="no compiled kernels")
@pytest.mark.parametrize("name", kernel_backed("cpu"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_refused_is_the_reference_s(name: str, dtype: torch.dtype) -> None:
    """Each tensor in turn, replaced by all that it should not be, with and without gradients."""
    agreed = refused = 0
    for args in some(cases(name, "cpu", dtype, 2000, 2), 3):
        for i, a in enumerate(args):
            for what, way in ways(a).items() if isinstance(a, Tensor) else ():
                mixed = (*args[:i], way(a.detach()), *args[i + 1 :])
                for learns in (False, True):
                    said = f"{name} {shown(args)}: argument {i}: {what}{', with gradients' * learns}"
                    ours, theirs = attempt(OPS[name], mixed, learns), attempt(OPS[name].reference, mixed, learns)
                    if isinstance(ours, Exception):
                        refused += 1
                    elif isinstance(theirs, Exception):
                        assert what in MILDER, f"{said}: done, where the reference says {theirs}"
                    else:
                        low = {dtype, *(t.dtype for t in (*ours, *theirs) if t is not None)} & {torch.float16, torch.bfloat16}
                        sums = dtype == torch.bfloat16 and name == "embedding"  # which ours adds up in fp32
                        rough = (0.2 if sums else 3e-2) if low or what == "float16" else 2e-4
                        assert len(ours) == len(theirs) and all(map(agrees, ours, theirs, [rough] * len(ours))), said
                        agreed += 1
    assert agreed > 20 and refused > 20


def test_a_norm_without_a_bias_has_a_mean_still() -> None:
    """The kernel takes no bias to be RMS norm's sign."""
    x, residual, weight = torch.randn(3, 64) + 2, torch.randn(3, 64), torch.rand(64)
    wanted = torch.nn.functional.layer_norm(x, (64,), weight, None, 1e-5)
    torch.testing.assert_close(ops.layer_norm(x, weight, None, 1e-5), wanted)
    out, total = ops.add_layer_norm(x, residual, weight, None, 1e-5, None, 0.0)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(total, (64,), weight, None, 1e-5))


@pytest.mark.parametrize("at", [0, 1])
def test_values_and_none_are_not_mixed(at: int) -> None:
    """A head that is on meta still: torch's product of it is what lay in memory."""
    x, weight, labels = torch.randn(3, 5), torch.randn(7, 5), torch.tensor([1, 2, 3])
    args = [a.to("meta") if i == at else a for i, a in enumerate((x, weight))]
    with pytest.raises(ValueError, match=r"an op's tensors are on (cpu and on meta|meta and on cpu)"):
        ops.linear_cross_entropy(*args, None, labels)
    with pytest.raises(ValueError, match="an op's tensors are on"):
        ops.embedding(labels.to("meta") if at == 0 else labels, weight.to("meta") if at == 1 else weight, None)
