"""What a kernel does with arguments that it was never meant to get: an exception that names the argument, never a signal.

Every kernel of the extension is found by walking it, and what a good call of it looks like by watching the ops at work; then one
argument after another is replaced. All in a process of its own, in which a signal would be seen for what it is.
"""

import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import OPS, cases, kernel_backed, kernels_called, leaves, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from modelcenter.ops import _kernels, _op
from modelcenter.ops.quantize import resized
from modelcenter.optim.adamw import AdamW

LARGEST = 2**63


class Sub(torch.nn.Parameter):
    """A subclass with memory of its own is still a subclass."""


class Shy(Tensor):
    """A subclass whose attributes lie."""

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no dtype")


class Odd(float):
    pass


Calls = dict[str, list[tuple[Any, ...]]]


def good_calls() -> Calls:
    """For every kernel some calls that succeed, with different kinds of arguments."""
    found: dict[str, dict[Any, tuple[Any, ...]]] = {}
    with kernels_called() as seen:
        for name in kernel_backed("cpu"):
            for dtype in (torch.float32, torch.bfloat16):
                for args in cases(name, "cpu", dtype, 3000, 2):
                    run(OPS[name], leaves(args))
        for dtype in (torch.float32, torch.bfloat16):
            parameters = [torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in (3, 40)]
            optimizer = AdamW(parameters, master=True, moments="bf16")
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step(clip=optimizer.clip(1.0))
            resized(torch.randn(3, 5, dtype=dtype), 8, 4)
    for name, args in seen:
        kind = tuple(a.dtype if isinstance(a, Tensor) else type(a) for a in args)
        found.setdefault(name, {})[kind] = args
    return {name: list(kinds.values()) for name, kinds in found.items()}


def wrong_tensors(a: Tensor) -> dict[str, Any]:
    """What is never right in the place of a tensor."""
    wrong: dict[str, Any] = {
        "a list": [1.0], "a string": "x", "a number": 3, "a NumPy array": a.detach().float().numpy(), "a type": Tensor,
        "a parameter's subclass": a.detach().as_subclass(Sub), "a liar": a.detach().as_subclass(Shy),
        "on meta": a.detach().to("meta"), "complex": a.detach().to(torch.complex64),
        "sparse": a.detach().float().to_sparse(), "nine axes": a.detach().reshape(*(1,) * (9 - min(a.dim(), 9)), *a.shape),
        "one axis more": a.detach().unsqueeze(0).unsqueeze(0).unsqueeze(0).unsqueeze(0).unsqueeze(0).unsqueeze(0),
        "fake": FakeTensorMode().from_tensor(a.detach().clone()),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "under vmap": torch._C._functorch._add_batch_dim(a.detach()[None], 0, 1),
        "of another library": torch.ones(3).to_mkldnn(), "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        "nested, jagged": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
    }  # fmt: skip
    if a.is_floating_point():
        wrong["negated"] = torch._neg_view(a.detach().clone())
    if a.numel():
        wrong["zeros without memory"] = torch._efficientzerotensor(a.shape, dtype=a.dtype)
        wrong["functional"] = torch._to_functional_tensor(a.detach().clone())
    if (size := a.numel() * a.element_size()) > 1:
        shorter, further = a.detach().clone(), torch.cat((a.detach().reshape(-1), a.detach().reshape(-1)[:1]))[1:].view(a.shape)
        shorter.untyped_storage().resize_(size - 1)
        further.untyped_storage().resize_(size)
        wrong |= {"in a shortened storage": shorter, "past the end of a storage": further}
    if a.numel() > 1:
        wrong["spread"] = torch.empty((*a.shape, 2), dtype=a.dtype)[..., 0]
        wrong["expanded"] = torch.empty((), dtype=a.dtype).expand(a.shape)
        freed = a.detach().clone()
        freed.untyped_storage().resize_(0)
        wrong["without memory"] = freed
    if a.element_size() > 1:
        odd = torch.empty(a.numel() * a.element_size() + 1, dtype=torch.uint8)
        out = torch.empty(0, dtype=a.dtype)
        try:
            out.set_(odd.untyped_storage()[1:], 0, a.shape, a.contiguous().stride())  # type: ignore[arg-type, call-overload]
        except Exception:
            out = None  # type: ignore[assignment]
        if out is not None and out.data_ptr() % a.element_size():
            wrong["between elements"] = out
    return wrong


def wrong_lists(a: list[Tensor]) -> dict[str, Any]:
    wrong = {"None": None, "a tuple": tuple(a), "a number": 3, "a tensor": torch.ones(3)}
    for what, bad in wrong_tensors(torch.ones(3)).items():
        if "axes" not in what and "axis" not in what and what != "nested":  # elements are counted, and those of a nested one adjoin
            wrong[f"a list of {what}"] = [*a, bad]
    return wrong | {"a list of two dtypes": [torch.ones(2), torch.ones(2).half()], "a list of None": [None]}


def wrong_numbers(a: Any) -> dict[str, Any]:
    if a is None:
        return {"an int": 1, "a string": "1"}
    wrong = {"None": None, "a string": "1", "a tensor": torch.tensor(1), "a list": [], "complex": 1j, "a type": int}
    if isinstance(a, bool):
        return wrong | {"a number": 1}
    if isinstance(a, int):
        return wrong | {"2^63": LARGEST, "-2^200": -(2**200), "a float": 1.5, "True": True}
    return wrong | {"NaN": math.nan, "infinity": math.inf, "2^2000": 2**2000}


def named(kernel: Callable[..., Any], args: tuple[Any, ...], i: int) -> str:
    """The kernel's own name of argument i, as it says when an object is put there."""
    try:
        kernel(*args[:i], object(), *args[i + 1 :])
    except ValueError as error:
        match = re.fullmatch(r"(\w+): (\w+): a[n]? object; .*", str(error))
        assert match, f"{kernel}: argument {i}: {error}"
        return match[2]
    raise AssertionError(f"{kernel} took an object as argument {i}")


def refused(kernel: Callable[..., Any], args: tuple[Any, ...], name: str, what: str) -> None:
    try:
        kernel(*args)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        own = str(error).startswith(f"{kernel.__name__}: {name}")
        known = own or what == "a liar" or (what == "one axis more" and str(error).startswith(f"{kernel.__name__}: "))
        assert known, f"{kernel.__name__}: {name}: {what}: {error}"
    else:
        assert what == "one axis more", f"{kernel.__name__} took {what} as {name}"  # a kernel may count elements alone


def check_every_argument(calls: Calls) -> int:
    """Each argument of each kernel in turn replaced by all that it must refuse."""
    tried = 0
    for name, found in calls.items():
        kernel = getattr(_kernels._C.cpu, name)
        for args in found:
            for i, a in enumerate(args):
                own = named(kernel, args, i)
                wrong = wrong_lists(a) if isinstance(a, list) else wrong_tensors(a) if isinstance(a, Tensor) else wrong_numbers(a)
                for what, bad in wrong.items():
                    refused(kernel, (*args[:i], bad, *args[i + 1 :]), own, what)
                    tried += 1
            own = named(kernel, args, len(args) - 1)
            refused(kernel, args[:-1], own, "nothing")
            refused(kernel, (*args, None), "arguments", "one more")
            tried += 2
            tried += check_overlap(kernel, args)
    return tried


def written(kernel: Callable[..., Any], args: tuple[Any, ...], i: int) -> bool:
    """Whether the kernel writes argument i: other bytes there do not survive the call."""
    copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in args]
    copies[i] = (~copies[i].view(torch.uint8)).view(copies[i].dtype) if copies[i].dim() else copies[i] + 1
    before = copies[i].clone()
    try:
        kernel(*copies)
    except ValueError:  # a label or a length out of range: it was read
        return False
    return not torch.equal(before.reshape(-1).view(torch.uint8), copies[i].reshape(-1).view(torch.uint8))


def check_overlap(kernel: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """A tensor that is written may not lie upon another argument."""
    tried = 0
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel() and a.dtype != torch.bool]
    for i in (i for i in tensors if written(kernel, args, i)):
        for j in tensors:
            if i != j and args[i].dtype == args[j].dtype and args[i].shape == args[j].shape:
                try:
                    kernel(*args[:i], args[j], *args[i + 1 :])
                except ValueError as error:
                    assert "overlaps" in str(error), error
                else:
                    raise AssertionError(f"{kernel.__name__}: argument {i} may lie upon argument {j}")
                tried += 1
    return tried


def check_random(calls: Calls, examples: int) -> None:
    """Whatever the arguments are: success or a ValueError of this kernel, from values that good calls are mixed with."""
    pool = [a for found in calls.values() for args in found for a in args]
    shapes = st.lists(st.integers(0, 70), max_size=4).filter(lambda s: math.prod(s) < 5000)
    dtypes = st.sampled_from([*_op.DTYPES, torch.float64])
    tensors = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), shapes, dtypes)
    numbers = st.one_of(st.integers(), st.integers(-3, 300), st.floats(), st.booleans(), st.none(), st.text(max_size=2))
    anything = st.one_of(st.sampled_from(pool), tensors, numbers)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(calls)))
        args = list(data.draw(st.sampled_from(calls[name])))
        for _ in range(data.draw(st.integers(1, 3))):
            args[data.draw(st.integers(0, len(args) - 1))] = data.draw(anything)
        args = [a.clone() if isinstance(a, Tensor) else a for a in args]
        try:
            getattr(_kernels._C.cpu, name)(*args)
        except ValueError as error:
            assert str(error).startswith(f"{name}: "), error

    one()


def check(examples: int) -> None:
    calls = good_calls()
    assert set(calls) == {name for name in dir(_kernels._C.cpu) if not name.startswith("_")}
    assert check_every_argument(calls) > 500
    check_random(calls, examples)


def in_another_process(code: str, **environment: str) -> str:
    import os

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", f"import test_boundary as t; {code}"], capture_output=True,
                          text=True, timeout=550, cwd=__file__.rpartition("/")[0], env=os.environ | environment)  # fmt: skip
    if done.returncode < 0:
        raise AssertionError(f"{signal.Signals(-done.returncode).name}\n{done.stderr[-2000:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


needs_kernels = pytest.mark.skipif(not _kernels.available("cpu"), reason="no compiled kernels")


@needs_kernels
@pytest.mark.parametrize("examples", [400, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_argument_is_checked(examples: int) -> None:
    """One by one, and any of them at random, of every kernel that there is."""
    in_another_process(f"t.check({examples})")


@needs_kernels
def test_kernels_before_torch_are_refused() -> None:
    code = "from modelcenter import _C\ntry:\n    _C.cpu.dropout(1)\nexcept ValueError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert "import modelcenter.ops" in done.stdout, done.stderr
