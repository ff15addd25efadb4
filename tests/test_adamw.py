"""AdamW: torch's where torch has it, the kernel the reference to the last bit, and every moment's format right in the mean."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mesh import full, spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelcenter.errors import InputError
from modelcenter.ops._kernels import available
from modelcenter.optim import adamw
from modelcenter.optim.adamw import AdamW
from modelcenter.optim.clipped import Lion

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1,), (7,), (0,), (64,), (65,), (3, 43), (adamw.CHUNK,), (adamw.CHUNK + 1,), (2 * adamw.CHUNK + 100,)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
kernels = pytest.mark.skipif(not available("cpu"), reason="no compiled kernels")


def make(device: str = "cpu", dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] | None = None,
         **options: Any) -> tuple[list[nn.Parameter], AdamW]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in shapes or SHAPES]
    return params, AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "seed": 5, **options})


def gradients(params: list[nn.Parameter], seed: int, dtype: torch.dtype | None = None, misaligned: bool = False) -> None:
    torch.manual_seed(seed)
    for p in params:
        p.grad_dtype = None  # a gradient may be of another dtype
        flat = torch.randn(p.numel() + misaligned).to(p.device, dtype or p.dtype)
        p.grad = flat[int(misaligned):].view(p.shape)


def content(params: list[nn.Parameter], optimizer: AdamW) -> list[Tensor]:
    return [p.detach().clone() for p in params] + [t.clone() for p in params for t in optimizer.state[p].values()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "usable", lambda x: False)


# ------------------------------------------------------------------------------------------------------------ the update


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["kernel", "reference"])
def test_fifty_steps_are_torchs(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "reference":
        by_reference(monkeypatch)
    ours, optimizer = make(device)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    peer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(50):
        gradients(ours, step)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone()
        for o in (optimizer, peer):
            o.param_groups[0]["lr"] = 1e-2 * (step + 1) / 50
            o.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=5e-7, atol=5e-7)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[p][name], peer.state[q][name], rtol=1e-5, atol=1e-7)
        assert optimizer.state[p]["step"] == 50


@pytest.mark.parametrize("way", ["kernel", "reference"])
def test_bf16_to_nearest_is_torchs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and moments, but for one in a thousand that lies between two: torch's sums are in another order."""
    if way == "reference":
        by_reference(monkeypatch)
    ours, optimizer = make(dtype=torch.bfloat16, moments="bf16", stochastic=False)
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    peer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(30):
        gradients(ours, step)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        peer.step()
    pairs = [*zip(ours, theirs, strict=True)]
    for name in ("exp_avg", "exp_avg_sq"):
        pairs += [(optimizer.state[p][name], peer.state[q][name]) for p, q in zip(ours, theirs, strict=True)]
    different = [int((a != b).sum()) for a, b in pairs]
    assert sum(different) < 1e-3 * sum(a.numel() for a, _ in pairs), different
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)


@kernels
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("misaligned", [False, True], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("kind", adamw.KINDS)
@pytest.mark.parametrize("options", [{}, {"master": True}, {"stochastic": False}], ids=["plain", "master", "nearest"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_kernel_is_the_reference_bit_for_bit(device: str, dtype: torch.dtype, options: dict[str, Any], kind: str,
                                                 misaligned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in FLOATS:
        results = []
        for way in ("kernel", "reference"):
            params, optimizer = make(device, dtype, moments=kind, weight_decay=0.3, **options)
            for step in range(3):
                gradients(params, step, given, misaligned)
                clip = torch.tensor([1.0, 0.37], device=device)
                with monkeypatch.context() as patch:
                    if way == "reference":
                        by_reference(patch)
                    optimizer.step(clip=clip)
            results.append(content(params, optimizer))
        assert same(*results), given


@kernels
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", adamw.KINDS)
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 3e38, 1e-30])
def test_they_agree_about_strange_gradients_too(strange: float, kind: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element alone, first, within and last of its block, and a block of nothing else, where no clip leaves a step out."""
    results = []
    for way in ("kernel", "reference"):
        if way == "reference":
            by_reference(monkeypatch)
        params, optimizer = make(device, shapes=[(1000,)], moments=kind)
        for step in range(3):
            gradients(params, step)
            if step == 1:
                for place in (0, 128 + 77, 2 * 128 + 127, slice(3 * 128, 4 * 128), -1):
                    params[0].grad[place] = strange
            optimizer.step()
        results.append(content(params, optimizer))
    state = dict(zip(["p", *optimizer.state[params[0]]], results[1], strict=True))
    if kind == "int8" and not math.isfinite(strange):
        assert not state["exp_avg_scale"][[0, 1, 2, 3, 7]].isfinite().any() and state["p"][:512].isnan().all()
        assert not state["exp_avg"][:512].any() and state["exp_avg_scale"][4:7].isfinite().all()
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@kernels
def test_threads_change_nothing() -> None:
    results, threads = [], torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        params, optimizer = make(moments="bf16")
        gradients(params, 1)
        clip = optimizer.clip(1.0)
        optimizer.step(clip=clip)
        results.append([*content(params, optimizer), clip])
    torch.set_num_threads(threads)
    assert same(*results)


def test_groups_have_their_own_numbers() -> None:
    params, _ = make(shapes=[(5,), (6,)])
    optimizer = AdamW([{"params": params[:1], "lr": 0.0}, {"params": params[1:], "weight_decay": 0.5}], lr=1.0, weight_decay=0.0)
    before = [p.detach().clone() for p in params]
    gradients(params, 0)
    optimizer.step()
    assert torch.equal(params[0], before[0])
    torch.testing.assert_close(params[1].detach(), before[1] * 0.5 - params[1].grad.sign(), rtol=0, atol=1e-4)


def test_what_does_not_train_keeps_its_state() -> None:
    params, optimizer = make(shapes=[(5,), (6,)])
    gradients(params[:1], 0)
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before) and params[1] not in optimizer.state


def test_a_strided_parameter() -> None:
    base = torch.arange(12.0).view(3, 4)
    results = []
    for p in (nn.Parameter(base.t()), nn.Parameter(base.t().contiguous())):
        p.grad = torch.arange(12.0).view(4, 3).cos().t().contiguous().t()
        AdamW([p]).step()
        results.append(p.detach().contiguous())
    assert same(results[:1], results[1:])


# --------------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [None, 0.125])
def test_the_norm_and_the_factor(device: str, dtype: torch.dtype, scale: float | None) -> None:
    params, optimizer = make(device)
    gradients(params, 0, dtype, misaligned=True)
    if dtype == torch.float32:
        gradients(params[:3], 0, torch.bfloat16)  # several dtypes make one norm
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm() * (scale or 1)
    for limit, wanted in ((0.0, 1.0), (1e9, 1.0), (2.5, 2.5 / float(exact))):
        norm, factor = optimizer.clip(limit, None if scale is None else torch.tensor(scale, device=device)).tolist()
        assert norm == pytest.approx(float(exact), rel=3e-7)
        assert factor == pytest.approx(wanted * (scale or 1), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_gradient_the_norm_is_nought(device: str) -> None:
    """Of a group without a parameter too, whose device is then the host."""
    params, optimizer = make(device)
    before = [p.detach().clone() for p in params]
    assert optimizer.squares().tolist() == [0.0] and optimizer.squares().device == params[0].device
    assert optimizer.clip(1.0).tolist() == [0.0, 1.0]
    optimizer.step(clip=optimizer.clip(1.0))
    assert same(params, before) and not optimizer.state
    assert AdamW([{"params": []}]).clip(1.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_square_that_overflows_leaves_no_step_out(device: str) -> None:
    params, optimizer = make(device)
    gradients(params, 0)
    params[4].grad[3] = 1e30
    norm, factor = optimizer.clip(1.0).tolist()
    assert norm == pytest.approx(1e30, rel=1e-6) and factor == pytest.approx(1e-30, rel=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_clipping_happens_in_the_step(device: str) -> None:
    results = []
    for way in ("fused", "before"):
        params, optimizer = make(device)
        gradients(params, 0)
        if way == "fused":
            optimizer.step(clip=optimizer.clip(0.5, torch.tensor(0.25, device=device)))
        else:
            for p in params:
                p.grad *= 0.25
            nn.utils.clip_grad_norm_(params, 0.5)
            optimizer.step()
        results.append(content(params, optimizer))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["kernel", "reference"])
@pytest.mark.parametrize("kind", adamw.KINDS)
def test_what_is_not_finite_changes_nothing(kind: str, way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "reference":
        by_reference(monkeypatch)
    params, optimizer = make(device, moments=kind)
    gradients(params, 0)
    optimizer.step()
    before = content(params, optimizer)
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, -1):
            gradients(params, 1)
            params[-1].grad[place] = bad
            clip = optimizer.clip(1.0)
            assert not clip[0].isfinite() and clip[1].isnan()
            optimizer.step(clip=clip)
            assert same(content(params, optimizer), before)
    gradients(params, 1)
    optimizer.step(clip=optimizer.clip(1.0, torch.tensor(math.inf, device=device)))  # a loss scale of 0
    assert same(content(params, optimizer), before)


# ---------------------------------------------------------------------------------------------------- low-precision state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["kernel", "reference"])
def test_rounding_at_random_is_right_in_the_mean(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor truncated: 2.7e-3 too small, step after step. Rounded to the nearest, v never decays."""
    if way == "reference":
        by_reference(monkeypatch)
    params, optimizer = make(device, shapes=[(40000,)], moments="bf16", weight_decay=0.0)
    state = optimizer.state[params[0]]
    params[0].grad = torch.ones_like(params[0])
    for _ in range(5):
        optimizer.step()
    for name, wanted in (("exp_avg", 1 - 0.9**5), ("exp_avg_sq", 1 - 0.999**5)):
        assert float(state[name].double().mean()) == pytest.approx(wanted, rel=1e-4), name
    start = float(state["exp_avg_sq"].double().mean())
    params[0].grad = torch.zeros_like(params[0])
    for _ in range(100):
        optimizer.step()
    assert float(state["exp_avg_sq"].double().mean()) == pytest.approx(start * 0.999**100, rel=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bf16_parameter_moves_by_less_than_its_last_place(device: str) -> None:
    p = nn.Parameter(torch.ones(40000, device=device, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-4, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    for _ in range(10):
        optimizer.step()
    assert 1 - float(p.detach().double().mean()) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_low_precision_moments_train_as_well(kind: str) -> None:
    """A regression: the weights end as near to the solution as with fp32 moments."""
    torch.manual_seed(0)
    x, solution = torch.randn(256, 40), torch.randn(40, 8) * torch.logspace(-2, 0, 8)
    left = {}
    for moments in ("fp32", kind):
        w = nn.Parameter(torch.zeros(40, 8))
        optimizer = AdamW([w], lr=2e-2, weight_decay=0.0, moments=moments)
        for step in range(400):
            optimizer.param_groups[0]["lr"] = 2e-2 * (1 - step / 400)
            optimizer.zero_grad()
            (x @ (w - solution)).square().mean().backward()
            optimizer.step()
        left[moments] = float((w.detach() - solution).norm() / solution.norm())
    assert left[kind] < max(2 * left["fp32"], 2e-3), left


def test_eight_bits_are_as_documented() -> None:
    """The formula for each code, and to the nearest a number is off by no more than half a step."""
    codes = torch.arange(256)
    state = {"exp_avg": (codes % 255 - 127).to(torch.int8), "exp_avg_scale": torch.tensor([2.0, 3.0]),
             "exp_avg_sq": codes.to(torch.uint8), "exp_avg_sq_scale": torch.tensor([2.0, 3.0])}
    scale = torch.tensor([2.0] * 128 + [3.0] * 128)
    m, v = adamw.widened(state, "exp_avg"), adamw.widened(state, "exp_avg_sq")
    c = state["exp_avg"].double()
    torch.testing.assert_close(m.double(), scale * c.sign() * (c / 127) ** 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(v.double(), scale * (codes.double() / 255) ** 4, rtol=1e-6, atol=0)
    x = torch.randn(1000)
    for name, given, kind, part in (("exp_avg", x, torch.int8, 127), ("exp_avg_sq", x.square(), torch.uint8, 255)):
        state = {name: torch.zeros(1000, dtype=kind), f"{name}_scale": torch.zeros(8)}
        adamw.narrow(state, name, given)
        top = torch.nn.functional.pad(given.abs(), (0, 24)).view(8, 128).amax(1)
        assert torch.equal(state[f"{name}_scale"], top)
        off = (adamw.widened(state, name) - given).abs() / top.repeat_interleave(128)[:1000]
        power = 2 if name == "exp_avg" else 4
        share = (given.abs() / top.repeat_interleave(128)[:1000]) ** (1 / power)
        assert (off <= 0.51 * ((share + 1 / part) ** power - share**power) + 2.0 ** (-8 * power) * 8).all()


def test_eight_bits_are_right_in_the_mean() -> None:
    params, optimizer = make(shapes=[(1024,)] * 40, moments="int8", weight_decay=0.0)
    torch.manual_seed(1)
    g = torch.randn(1024)
    for p in params:
        p.grad = g.clone()
    optimizer.step()
    for name, exact in (("exp_avg", 0.1 * g), ("exp_avg_sq", 0.001 * g * g)):
        seen = torch.stack([adamw.widened(optimizer.state[p], name) for p in params]).double()
        assert not torch.equal(seen[0], seen[1]), "each parameter has random bits of its own"
        assert float((seen.mean(0) - exact).sum().abs() / exact.abs().sum()) < 2e-3


@pytest.mark.parametrize("way", ["kernel", "reference"])
def test_a_small_second_moment_is_not_stored_as_zero(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "reference":
        by_reference(monkeypatch)
    params, optimizer = make(shapes=[(128,)], moments="int8", weight_decay=0.0)
    g = torch.full((128,), 1e-4)
    g[0], g[1] = 1e3, 0.0
    for _ in range(5):
        before = params[0].detach().clone()
        params[0].grad = g.clone()
        optimizer.step()
    state = optimizer.state[params[0]]
    assert (state["exp_avg_sq"][2:] >= 2).all() and state["exp_avg_sq"][1] == 0
    assert float((params[0].detach() - before).abs().max()) < 0.0105  # the rate


@pytest.mark.parametrize(("least", "longer"), [(1e-2, 1.5), (1e-4, 11.0)])
def test_elements_of_a_block_that_differ_much_step_as_far_as_documented(least: float, longer: float) -> None:
    """The last of 128 columns has gradients of 1, the first of `least`."""
    row, longest = torch.logspace(math.log10(least), 0, 128), {}
    for kind in ("fp32", "int8"):
        (w,), optimizer = make(shapes=[(32, 128)], moments=kind, weight_decay=0.0, lr=1.0)
        source, longest[kind] = torch.Generator().manual_seed(0), 0.0
        for _ in range(600):
            before, w.grad = w.detach().clone(), row * (torch.randn(32, 128, generator=source) + 0.5)
            optimizer.step()
            longest[kind] = max(longest[kind], float((w.detach() - before).abs().max()))
    assert 1.0 < longest["int8"] / longest["fp32"] <= longer


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_bytes_a_parameter(kind: str) -> None:
    params, optimizer = make(shapes=[(128, 100)], moments=kind)
    gradients(params, 0)
    optimizer.step()
    held = sum(t.nbytes for name, t in optimizer.state[params[0]].items() if name != "step")
    assert held / params[0].numel() == {"fp32": 8, "bf16": 4, "int8": 2 + 8 / 128}[kind]


# ------------------------------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_a_state_dict_goes_on_bitwise(kind: str) -> None:
    results = []
    for stop in (False, True):
        params, optimizer = make(moments=kind)
        for step in range(4):
            if stop and step == 2:
                saved = optimizer.state_dict()
                params = [nn.Parameter(p.detach().clone()) for p in params]
                optimizer = AdamW(params, moments=kind)
                optimizer.load_state_dict(saved)
            gradients(params, step)
            optimizer.step()
        results.append(content(params, optimizer))
    assert same(*results)


def test_torchs_state_goes_on() -> None:
    for kind, off in (("fp32", 1e-6), ("bf16", 3e-2), ("int8", 0.1)):
        ours, optimizer = make(moments=kind)
        theirs = [nn.Parameter(p.detach().clone()) for p in ours]
        peer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
        for step in range(3):
            if step == 2:
                optimizer.load_state_dict(peer.state_dict())
                for p, q in zip(ours, theirs, strict=True):
                    p.data.copy_(q.data)
            gradients(theirs, step)
            for p, q in zip(ours, theirs, strict=True):
                p.grad = q.grad.clone()
            peer.step()
        before = [p.detach().clone() for p in ours]
        optimizer.step()
        for p, q, start in zip(ours, theirs, before, strict=True):
            assert optimizer.state[p]["step"] == 3
            if p.numel():
                assert (p - q).norm() <= off * (q - start).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{"moments": "bf16"}, {"moments": "int8"}, {"master": True}], ids=str)
def test_a_state_of_half_precision_goes_on_in_more(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Moments of a parameter in fp64 are in fp64, whatever is asked for; and only what is in half precision has a copy."""
    halves, optimizer = make(dtype=torch.bfloat16, **options)
    wide = [nn.Parameter(p.detach().to(dtype)) for p in halves]
    again = AdamW(wide, lr=1e-2, weight_decay=0.1, **options)
    for step in range(4):
        if step == 3:
            again.load_state_dict(optimizer.state_dict())
            before = [p.detach().clone() for p in wide]
        gradients(halves, step)
        for p, q in zip(halves, wide, strict=True):
            q.grad = p.grad.to(dtype)
        optimizer.step()
    again.step()
    for q, start in zip(wide, before, strict=True):
        state = again.state[q]
        assert "master" not in state and state["step"] == 4
        if dtype == torch.float64:
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype and "exp_avg_scale" not in state
        m, v = (adamw.widened(state, name).double() for name in ("exp_avg", "exp_avg_sq"))
        moved = start.double() * (1 - 1e-3) - 1e-2 * (m / (1 - 0.9**4)) / ((v / (1 - 0.999**4)).sqrt() + 1e-8)
        if q.numel():
            assert (q - moved).norm() <= 0.05 * (q - start).norm()


def test_a_state_of_another_time_or_place_goes_on() -> None:
    """A count of steps that is an int, as torch had it up to 1.11, or of another dtype; moments laid out as their parameter was."""
    results = []
    for change in (lambda x: x, int, lambda x: x.double()):
        q = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        q.grad = torch.ones(4, 3).cos()
        peer = torch.optim.AdamW([q])
        peer.step()
        saved = peer.state_dict()
        saved["state"][0]["step"] = change(saved["state"][0]["step"])
        assert not saved["state"][0]["exp_avg"].is_contiguous()
        p = nn.Parameter(q.detach().contiguous())
        optimizer = AdamW([p])
        optimizer.load_state_dict(saved)
        p.grad = torch.ones(4, 3).sin()
        optimizer.step()
        results.append(content([p], optimizer))
        assert optimizer.state[p]["step"].dtype == torch.float32 and optimizer.state[p]["step"] == 2
    assert same(*results[:2]) and same(*results[1:])


def test_a_decay_of_another_kind_is_refused() -> None:
    """torch.optim.Adam's is part of the gradient, and so of the moments; without one its steps are AdamW's."""
    p = torch.nn.Parameter(torch.ones(3))
    for decay in (0.0, 0.1):
        peer, mine = torch.optim.Adam([p], weight_decay=decay), AdamW([p], weight_decay=0.0)
        p.grad = torch.ones(3)
        peer.step()
        if not decay:
            mine.load_state_dict(peer.state_dict())
            assert mine.state[p]["step"] == 1
            continue
        with pytest.raises(InputError, match=r"^AdamW: weight_decay: 0.1, which torch.optim.Adam adds to gradients; a state"):
            mine.load_state_dict(peer.state_dict())
        assert not mine.state


def test_what_torchs_state_does_not_say_stays() -> None:
    params, _ = make(shapes=[(5,), (6,)])
    optimizer = AdamW([{"params": params[:1], "moments": "bf16", "lr_scale": 0.5}, {"params": params[1:]}], moments="int8")
    peer = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=0.5)
    optimizer.load_state_dict(peer.state_dict())
    first, second = optimizer.param_groups
    assert (first["moments"], first["lr_scale"], first["lr"], second["moments"]) == ("bf16", 0.5, 0.5, "int8")
    assert first["fused"] and second["fused"]  # steps are on the device, now


class Made(TorchDispatchMode):
    """The bytes of what calls return."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += out.nbytes if isinstance(out, Tensor) and out.numel() > 1 and "detach" not in str(func) else 0
        return out


def test_a_state_that_is_loaded_is_copied_once() -> None:
    """torch's `load_state_dict` makes fp32 of 8 bits, for all parameters before the first of them is put right."""
    params, optimizer = make(shapes=[(64, 128)], moments="int8")
    gradients(params, 0)
    optimizer.step()
    saved, seen = optimizer.state_dict(), []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.extend(o.state[params[0]]))
    with Made() as made:
        optimizer.load_state_dict(saved)
    assert made.bytes == sum(value.nbytes for value in saved["state"][0].values() if value.numel() > 1)
    assert seen == list(saved["state"][0])  # as a hook of torch's optimizers does


def test_the_same_bits_again_and_others_with_another_seed() -> None:
    results = []
    for seed in (1, 1, 2):
        params, optimizer = make(moments="bf16", seed=seed)
        gradients(params, 0)
        optimizer.step()
        results.append(content(params, optimizer))
    assert same(results[0], results[1]) and not same(results[0], results[2])


@pytest.mark.parametrize("way", ["kernel", "reference"])
def test_no_two_parameters_are_rounded_alike(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are in each group, of either dtype: what is rounded at random is then right in the mean of them all."""
    if way == "reference":
        by_reference(monkeypatch)
    kinds = [[torch.bfloat16], [torch.bfloat16, torch.float16], [torch.bfloat16] * 3]
    groups = [[nn.Parameter(torch.linspace(1, 2, 64).to(kind)) for kind in some] for some in kinds]
    for p in (p for some in groups for p in some):
        p.grad = torch.ones_like(p)
    AdamW([{"params": some} for some in groups], lr=1e-3, moments="bf16", weight_decay=0.0, seed=5).step()
    found = [tuple(p.tolist()) for some in groups for p in some if p.dtype == torch.bfloat16]
    assert len(set(found)) == len(found)


# ------------------------------------------------------------------------------------------------------------- the mesh


def two_steps(model: nn.Module, kind: str) -> AdamW:
    optimizer = AdamW(model.parameters(), lr=1e-2, moments=kind, seed=3)  # type: ignore[arg-type]
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().sum().backward()
        squares = optimizer.squares()
        if dist.is_initialized():
            dist.all_reduce(squares)
        clip = optimizer.clip(0.5, squares=squares)
        optimizer.step(clip=clip)
        optimizer.zero_grad()
    return optimizer


def shards(rank: int, kind: str, wanted: dict[str, Tensor]) -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))  # 5 rows on 2 ranks; and 1 row: one rank has nothing
    fully_shard(model)
    optimizer = two_steps(model, kind)
    for name, p in model.named_parameters():
        assert isinstance(optimizer.state[p]["exp_avg"], DTensor)
        torch.testing.assert_close(full(p.detach()), wanted[name], rtol=1e-5, atol=1e-6 if kind == "fp32" else 1e-3)


@pytest.mark.parametrize("kind", adamw.KINDS)
def test_shards_are_updated_where_they_are(kind: str) -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    two_steps(model, kind)
    spawn(2, shards, kind, {name: p.detach() for name, p in model.named_parameters()})


# -------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("options", [{"lr": -1}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"moments": "fp8"}])
def test_settings_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        AdamW([nn.Parameter(torch.ones(1))], **options)


class Marked(nn.Parameter):
    """As other libraries have: its memory may be elsewhere."""


def test_a_parameter_of_a_subclass_is_refused() -> None:
    """At once, and not in the first step; one that does not train is not looked at."""
    for made in (AdamW, Lion):
        with pytest.raises(InputError, match=rf"^{made.__name__}: params: a Marked of shape \[2, 3\], .*; torch's own Parameters"):
            made([nn.Parameter(torch.ones(1)), Marked(torch.ones(2, 3))])
        made([nn.Parameter(torch.ones(1)), Marked(torch.ones(2, 3), requires_grad=False)])


@kernels
def test_the_boundary_refuses_lists_that_do_not_fit() -> None:
    kernel = adamw.call
    clip, table = torch.ones(2), torch.empty(adamw.WORDS, dtype=torch.int64)
    x = torch.zeros(6, 4)
    rest = (table, 1e-3, 0.9, 0.99, 1e-8, 0.0, 0, 0, True)
    step = torch.zeros(())

    def lists(**changes: Any) -> list[Any]:
        row = {name: [torch.zeros(4)] for name in ("params", "grads", "m", "v")}
        row |= {"m_scale": [], "v_scale": [], "copies": [], "steps": [step]} | changes
        return list(row.values())

    kernel("adamw", clip, *lists(), *rest)
    for changes, message in (
        ({"grads": [torch.zeros(5)]}, "grads: another number of elements"),
        ({"grads": []}, "grads: another number of tensors"),
        ({"m": [torch.zeros(5)]}, "exp_avgs: another number of elements"),
        ({"v": [torch.zeros(3)]}, "exp_avg_sqs: another number of elements"),
        ({"m": [x[0]], "v": [x[0]]}, "is written and overlaps"),
        ({"params": [x.flatten()[:4]], "grads": [x.flatten()[2:6]]}, "is written and overlaps"),
        ({"m": [x.t()[0][:4]]}, "not contiguous"),
        ({"m": [torch.zeros(4).double()]}, "float64"),
        ({"v": [torch.zeros(4).bfloat16()]}, "bfloat16"),
        ({"params": [None]}, "NoneType"),
        ({"params": (torch.zeros(4),)}, "tuple; wanted a list"),
        ({"copies": [torch.zeros(3).bfloat16()]}, "copies"),
        ({"steps": [torch.zeros(2)]}, "steps"),
        ({"m_scale": [torch.zeros(1)]}, "lists of different lengths"),
        ({"params": [torch.zeros(2), torch.zeros(2)]}, "table"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kernel("adamw", clip, *lists(**changes), *rest)
    with pytest.raises(ValueError, match="partial"):
        kernel("adamw_squares", torch.empty(1).double(), [x], torch.empty(0).double(), table)
    assert not x.any()
