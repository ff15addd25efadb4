"""The op contract (contract.py), asked of every op that has a kernel on the CPU."""

import copy
import pickle
from typing import Any

import pytest
import torch
from contract import (
    DTYPES,
    LAYOUTS,
    LOW,
    Calls,
    cases,
    close,
    each,
    floating,
    is_as_exact,
    kernel_backed,
    kernels_called,
    leaves,
    operators,
    results,
    run,
    same,
    shown,
    some,
    through_operator,
)  # fmt: skip
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from modelcenter.ops import OPS, _kernels
from modelcenter.ops.cross_entropy import IGNORE

KERNELS = kernel_backed("cpu")
SMALL = 1500  # elements of a case where size does not matter
pytestmark = pytest.mark.skipif(not _kernels.available("cpu"), reason="no compiled kernels: test_ops.py tests the references")
each_op = pytest.mark.parametrize("name", KERNELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_op
@each_dtype
def test_no_less_exact_than_the_peers(name: str, dtype: torch.dtype) -> None:
    for args in cases(name, "cpu", dtype):
        is_as_exact(name, args)


@each_op
def test_the_kernel_is_what_runs(name: str) -> None:
    args = cases(name, "cpu", torch.float32)[-1]
    with kernels_called() as seen:
        run(OPS[name], leaves(args))
    assert len(seen) >= 2, "once forward and once backward"


@each_op
@each_dtype
def test_twice_and_with_two_threads_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """A product in an op is torch's: without AVX-512 MKL cuts its sums for as many threads as there are."""
    before = torch.get_num_threads()
    try:
        for args in cases(name, "cpu", dtype):
            found = []
            for threads in (1, 1, 2, 3):
                torch.set_num_threads(threads)
                found.append(run(OPS[name], leaves(args)))
            same(found[1], found[0], (name, shown(args)))
            for other in found[2:]:
                (close if name.startswith("linear_") else same)(other, found[0], (name, shown(args)))
    finally:
        torch.set_num_threads(before)


@each_op
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_changes_nothing(name: str, layout: str, dtype: torch.dtype) -> None:
    for args in cases(name, "cpu", dtype):
        strange = each(leaves(args), LAYOUTS[layout])
        strange = tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in strange)
        close(run(OPS[name], strange), run(OPS[name], leaves(args)), (name, shown(args)))


@each_op
def test_strange_gradients_change_nothing(name: str) -> None:
    """What arrives from above may be broadcast (of a sum), spread, or in another order."""
    for args in cases(name, "cpu", torch.float32, most=SMALL):
        given = leaves(args)
        outs = results(OPS[name](*given))
        if not any(out.requires_grad for out in outs):
            continue
        inputs = floating(given)
        plain = torch.autograd.grad(outs, inputs, [torch.ones_like(out) for out in outs], retain_graph=True, allow_unused=True)
        wide = torch.autograd.grad(outs, inputs, [torch.ones((), dtype=out.dtype).expand(out.shape) for out in outs],
                                   retain_graph=True, allow_unused=True)  # fmt: skip
        apart = torch.autograd.grad(outs, inputs, [LAYOUTS["spread"](torch.ones_like(out)) for out in outs], allow_unused=True)
        for a, b, c in zip(plain, wide, apart, strict=True):
            assert (a is None) == (b is None) == (c is None)
            if a is not None:
                close([b, c], [a, a], (name, shown(args)))


@each_op
def test_nothing_and_one(name: str) -> None:
    """Among the op's own cases is an empty one, and one of a single element; the first test ran them."""
    tried = [args for dtype in DTYPES for args in cases(name, "cpu", dtype)]
    assert any(a.numel() == 0 for args in tried for a in args if isinstance(a, Tensor)), "an empty case"
    assert any(a.numel() == 1 for args in tried for a in floating(args)), "a case of one element"


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_nan_is_lost(name: str, dtype: torch.dtype) -> None:
    """Of one argument one number or all are NaN: a result of which the reference says so has one."""
    for args in cases(name, "cpu", dtype, most=SMALL, least=2):
        if name in ("cross_entropy", "linear_cross_entropy") and IGNORE in args[1 if name == "cross_entropy" else 3]:
            continue  # what has no label is not read
        for i, a in enumerate(args):
            if not isinstance(a, Tensor) or not a.is_floating_point() or not a.numel():
                continue
            for at in (slice(None), 0, -1):
                given = leaves(args)
                given[i].data.view(-1)[at] = float("nan")
                ours, theirs = run(OPS[name], given), run(OPS[name].reference, leaves(given))
                for j, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
                    kept = found.isnan().any() or not wanted.isnan().any()
                    assert kept, f"{name} {shown(args)}: argument {i} at {at}: result {j}"


@each_op
def test_inputs_stay_as_they_are(name: str) -> None:
    for args in cases(name, "cpu", torch.float32):
        given = leaves(args)
        versions = [a._version for a in given if isinstance(a, Tensor)]
        run(OPS[name], given)
        assert versions == [a._version for a in given if isinstance(a, Tensor)]
        for a, b in zip(given, args, strict=True):
            if isinstance(a, Tensor):
                same([a], [b], f"{name} {shown(args)}")


@each_op
def test_without_gradients_the_same_values_and_nothing_kept(name: str) -> None:
    for args in cases(name, "cpu", torch.float32, most=SMALL):
        given = leaves(args)
        kept: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            kept.append(t)  # noqa: B023
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            outs = results(OPS[name](*given))
            assert all(out.requires_grad for out in outs if out.is_floating_point())
            count = len(kept)
            with torch.no_grad():
                quiet = results(OPS[name](*given))
            plain = results(OPS[name](*args))
            with torch.inference_mode():
                inferred = results(OPS[name](*args))
        assert len(kept) == count
        for found in (quiet, plain, inferred):
            assert not any(out.requires_grad for out in found)
            same([out.clone() for out in found], [out.detach() for out in outs])


@each_op
def test_one_gradient_may_be_wanted_alone(name: str) -> None:
    """A frozen weight, an input that is data: what is asked for is what it would be among all."""
    for args in some(cases(name, "cpu", torch.float32, most=SMALL), 3):
        whole = run(OPS[name], leaves(args))
        count = len(whole) - len(floating(args))
        for i in range(len(floating(args))):
            given = leaves(args)
            for j, a in enumerate(floating(given)):
                a.requires_grad_(i == j)
            found = run(OPS[name], given)
            same(found, [*whole[:count], whole[count + i]], name)


@each_op
def test_registered_operators_are_sound(name: str) -> None:
    """torch.library.opcheck: the schema tells the truth, fake results fit the real ones, gradients are registered, AOT agrees."""
    checked = set()
    for args in [*some(cases(name, "cpu", torch.float32, 300, 2), 3), *some(cases(name, "cpu", torch.bfloat16, 300, 2), 1)]:
        for func, inputs in operators(name, args):
            kind = (func, tuple(a.dtype if isinstance(a, Tensor) else type(a) for a in inputs))
            if kind in checked:
                continue
            checked.add(kind)
            torch.library.opcheck(func, inputs, test_utils=("test_schema", "test_faketensor"))
            if func is OPS[name].kernel.forward.operator:  # type: ignore[union-attr]
                torch.library.opcheck(func, leaves(inputs), test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic"))
    assert checked


@each_op
@pytest.mark.parametrize("road", ["op", "operator"])
def test_compiled_without_a_break(name: str, road: str) -> None:
    """The whole graph, by the operator too where the compiler would rather have the reference."""
    function = OPS[name] if road == "op" else through_operator(OPS[name])
    for args in some(cases(name, "cpu", torch.float32, SMALL, 2), 1 + (road == "operator")):
        torch.compiler.reset()
        compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend="aot_eager")
        found, wanted = run(compiled, leaves(args)), run(function, leaves(args))
        if road == "operator" or "cpu" in OPS[name].kernel.compiled:  # type: ignore[union-attr]
            same(found, wanted, (name, shown(args)))
        else:
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@each_op
@each_dtype
def test_fake_results_have_the_shape_of_real_ones(name: str, dtype: torch.dtype) -> None:
    for args in cases(name, "cpu", dtype, most=SMALL):
        real = results(OPS[name](*args))
        with FakeTensorMode() as mode:
            fake = results(OPS[name](*each(args, mode.from_tensor)))
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@each_op
@pytest.mark.parametrize("transform", ["vmap", "jvp", "dual", "grad", "trace"])
def test_transforms_go_to_the_reference(name: str, transform: str) -> None:
    """What only torch's own functions can do is done with them, and answers as the reference does."""

    def transformed(function: Any, args: tuple[Any, ...]) -> Any:
        at = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())
        x = args[at]

        def f(x: Tensor) -> Tensor:
            return results(function(*args[:at], x, *args[at + 1 :]))[0]

        if transform == "vmap":
            return torch.func.vmap(f, randomness="same")(torch.stack((x, x + 1)))
        if transform == "jvp":
            return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
        if transform == "grad":
            return torch.func.grad(lambda x: f(x).double().square().sum())(x)
        if transform == "trace":
            return torch.jit.trace(f, (x,), check_trace=False)(x + 1)
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    args = some(cases(name, "cpu", torch.float32, SMALL, 2), 1)[0]
    try:
        wanted = transformed(OPS[name].reference, args)
    except Exception as error:
        with pytest.raises(type(error)):
            transformed(OPS[name], args)
        return
    same(results(transformed(OPS[name], args)), results(wanted), name)


class Sub(Tensor):
    """Known to torch's functions alone."""


class SubParameter(torch.nn.Parameter):
    """The same, as quantised weights and lazy ones of other libraries are."""


@each_op
def test_a_subclass_is_left_to_the_reference(name: str) -> None:
    """A tensor that may not have the memory a kernel would look for, whichever argument it is."""
    for args in some(cases(name, "cpu", torch.float32, SMALL, 2), 3):
        wanted = results(OPS[name].reference(*args))
        for i, a in enumerate(args):
            for kind in (Sub, SubParameter) if isinstance(a, Tensor) and a.is_floating_point() else (Sub,) * isinstance(a, Tensor):
                given = (*args[:i], a.detach().as_subclass(kind), *args[i + 1 :])
                with kernels_called() as seen:
                    found = results(OPS[name](*given))
                for x, y in zip(found, wanted, strict=True):
                    torch.testing.assert_close(x.as_subclass(Tensor), y)
                assert name.startswith("linear_") or not seen, (name, i)  # some references are made of other ops


@pytest.mark.parametrize("name", ["dropout", "add_layer_norm", "add_rms_norm", "attention", "relative_attention"])
@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(name: str, p: float) -> None:
    def seeds(args: tuple[Any, ...]) -> list[int]:
        return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype == torch.int64 and a.shape == (1,)]

    args = next(args for args in OPS[name].cases("cpu", torch.float32) if seeds(args))
    at = seeds(args)[-1] + 1
    with pytest.raises(ValueError, match=f"dropout of {p}: wanted 0 to 1"):
        OPS[name](*args[:at], p, *args[at + 1 :])


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_a_smoothing_that_is_none_is_refused(smoothing: float) -> None:
    x, weight, labels = torch.randn(3, 5), torch.randn(7, 5), torch.tensor([1, 2, 3])
    for loss in (lambda: OPS["cross_entropy"](x, labels, smoothing, 0.0),
                 lambda: OPS["linear_cross_entropy"](x, weight, None, labels, 1.0, smoothing)):  # fmt: skip
        with pytest.raises(ValueError, match=f"label smoothing of {smoothing}: wanted 0 to 1"):
            loss()


@each_op
@pytest.mark.parametrize("low", LOW, ids=str)
def test_mixed_precision(name: str, low: torch.dtype) -> None:
    """What autocast leaves behind: arguments of two dtypes. Result and gradients have the reference's dtypes and values."""
    for args in some(cases(name, "cpu", torch.float32, SMALL, 2), 3):
        for rounded in range(len(floating(args)) + 1):  # whatever the kernel does not take, the reference does
            mixed = list(leaves(args))
            at = [i for i, a in enumerate(mixed) if isinstance(a, Tensor) and a.is_floating_point()]
            for i in at[:rounded]:
                mixed[i] = mixed[i].detach().to(low).requires_grad_()
            with torch.autocast("cpu", low):
                found, wanted = run(OPS[name], leaves(mixed)), run(OPS[name].reference, leaves(mixed))
            for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
                assert a.dtype == b.dtype, f"{name} {shown(mixed)}: result {i}: {a.dtype} and not {b.dtype}"
                assert (a.double() - b.double()).abs().max() <= 2 * torch.finfo(low).eps * max(1.0, float(b.abs().max()))
            if name != "linear_cross_entropy":  # whose arguments autocast brings into one dtype
                outside = results(OPS[name](*leaves(mixed)))
                assert [a.dtype for a in found[: len(outside)]] == [a.dtype for a in outside], "autocast changes no result's dtype"


@each_op
def test_selective_recompute_sees_it(name: str) -> None:
    """A policy may name the op, and computing it again gives the same gradients."""
    operator = OPS[name].kernel.forward.operator  # type: ignore[union-attr]
    for args in some(cases(name, "cpu", torch.float32, SMALL, 2), 2):
        for keep in (True, False):
            seen = []

            def policy(_: Any, func: Any, *args: Any, **options: Any) -> CheckpointPolicy:
                seen.append(func)  # noqa: B023
                return CheckpointPolicy.MUST_SAVE if keep and func is operator else CheckpointPolicy.MUST_RECOMPUTE  # noqa: B023

            def again(*args: Any) -> Any:
                return checkpoint(OPS[name], *args, use_reentrant=False,
                                  context_fn=lambda: create_selective_checkpoint_contexts(policy))  # fmt: skip

            same(run(again, leaves(args)), run(OPS[name], leaves(args)), name)
            assert operator in seen


@each_op
def test_recompute_gives_the_same(name: str) -> None:
    for reentrant in (False, True):
        for args in cases(name, "cpu", torch.float32, SMALL):

            def again(*args: Any) -> Any:
                return checkpoint(OPS[name], *args, use_reentrant=reentrant)  # noqa: B023

            same(run(again, leaves(args)), run(OPS[name], leaves(args)), name)


@each_op
def test_copied_and_pickled_an_op_is_itself(name: str) -> None:
    op = OPS[name]
    assert copy.deepcopy(op) is op and copy.copy(op) is op and pickle.loads(pickle.dumps(op)) is op  # noqa: S301
    holder = torch.nn.Identity()
    holder.act = op
    assert copy.deepcopy(holder).act is op


@each_op
def test_a_second_derivative_is_refused(name: str) -> None:
    """A kernel's gradient has no gradient: asking for one is an error and not a wrong number, by either road."""
    for way in (OPS[name], through_operator(OPS[name])):
        args = leaves(some(cases(name, "cpu", torch.float32, SMALL, 2), 1)[0])
        out = results(way(*args))[0]
        with pytest.raises(RuntimeError, match=r"^create_graph=True, and a kernel's gradient has no gradient"):
            torch.autograd.grad(out.sum(), floating(args), create_graph=True, allow_unused=True)


@each_op
def test_many_gradients_at_once_are_refused_or_right(name: str) -> None:
    """By either road: in one line that says how else."""
    for way in (OPS[name], through_operator(OPS[name])):
        args = leaves(some(cases(name, "cpu", torch.float32, SMALL, 2), 1)[0])
        out = results(way(*args))[0]
        wanted, many = floating(args), torch.randn(3, *out.shape)
        if name == "linear_int8":  # a product of torch's
            found = torch.autograd.grad(out, wanted, many, retain_graph=True, is_grads_batched=True)
            each = zip(*[torch.autograd.grad(out, wanted, one, retain_graph=True) for one in many], strict=True)
            close(found, [torch.stack(of_one) for of_one in each])
            continue
        with pytest.raises(RuntimeError, match=r"^is_grads_batched=True, and .*; many at once: torch.func.jacrev, or .*=False$"):
            torch.autograd.grad(out, wanted, many, is_grads_batched=True, allow_unused=True)


@each_op
def test_the_operator_does_what_the_op_does(name: str) -> None:
    """Eager and the dispatcher's road: the same bits, values and gradients."""
    for dtype in DTYPES:
        for args in cases(name, "cpu", dtype):
            same(run(through_operator(OPS[name]), leaves(args)), run(OPS[name], leaves(args)), (name, shown(args)))
            with Calls() as calls:
                run(OPS[name], leaves(args))
            assert len(calls.seen) >= 2
