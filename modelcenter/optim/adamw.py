"""AdamW in one pass over memory: unscale, clip, update and cast, or nothing at all if a gradient is not finite.

Loshchilov and Hutter, 2017, as torch.optim.AdamW computes it. At step t, for a gradient g that was unscaled and clipped:

    p = p (1 - lr decay)
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The state of a parameter has torch's names: `step`, `exp_avg`, `exp_avg_sq`. `moments` says how the moments are stored:

    fp32   8 bytes per parameter
    bf16   4 bytes, rounded stochastically, so that they are right on average: rounded to nearest (`stochastic` False), v would not
           decay, because a step of 1 - beta2 = 0.001 is less than half a unit in bf16's last place
    int8   2 bytes, and for every 128 elements a scale, their largest magnitude: m = scale sign(c) (c / 127)^2 with c from -127 to
           127, v = scale (c / 255)^4 with c from 0 to 255, both rounded stochastically. A v above 0 has a code of at least 2, whose
           root is the smallest m above 0: so no element is divided by zero, however small it is beside its neighbours. But the
           codes are coarse: if the gradients of a block differ by a factor of 100, the longest step is up to 1.5 times that of
           fp32, at 10,000 up to 11 times (600 steps of normal noise). A magnitude that is not finite becomes the block's scale,
                  and all codes are then 0: no m of the block is ever a number again

A parameter in bf16 is rounded stochastically as well; with `master`, and always in fp16, an fp32 copy of it is kept (`master`) and
the parameter is that copy, rounded. The random bits are a function of (seed, step, place of the parameter, element): csrc/philox.h.

The kernels (csrc/adamw.cpp, csrc/adamw.cu) and `reference` agree to the last bit; the reference is used for float64, and where
there is no kernel.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.shards import zeros_like
from ..errors import refuse
from ..ops._kernels import FLOATS, call, served
from ..ops._mode import PLAIN, fake
from ..ops.dropout import bits

CHUNK, PIECE, BLOCK, WORDS = 8192, 32768, 128, 12  # csrc/adamw.h
MASK = 2**64 - 1
ROUNDED = 1e-12  # what torch's schedules may end at in place of 0, by rounding, is below
Job = tuple[Tensor, Callable[[], None]]  # a parameter, and what updates it
Later = Callable[[list[Job]], object]
KINDS = {"fp32": (torch.float32, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16), "int8": (torch.int8, torch.uint8)}


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure returns, its gradients formed; torch's optimizers take one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Plain(Optimizer):
    """torch's optimizer, without its calls to the compiler: torch asks the compiler to skip these methods, and would import it just
    for that, which delays the first step by more than a second. Groups that no step can handle are refused when they are added or
    loaded, and changes made to them since are checked at each step."""

    limits: Mapping[str, float] = {"lr": math.inf, "weight_decay": math.inf, "betas": 1.0}  # settings are from 0 to below that
    fixed: Mapping[str, Any] = {"amsgrad": False, "maximize": False}  # settings that torch's optimizers have and these do not

    zero_grad: Any = unwrap(Optimizer.zero_grad)
    state_dict: Any = unwrap(Optimizer.state_dict)

    def __init__(self, params: Any, defaults: dict[str, Any]):
        super().__init__(params, {**self.fixed, **defaults})  # torch's ask a state dict for them

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        unwrap(Optimizer.add_param_group)(self, param_group)
        group = self.param_groups.pop()
        self.checked(group)
        for p in group["params"]:
            if p.is_complex() and p.requires_grad:
                refuse(type(self).__name__, "params", f"{p.dtype} of shape {list(p.shape)}", "real numbers: torch.view_as_real")
            if p.requires_grad and type(p) not in PLAIN and not hasattr(p, "to_local") and not fake(p):
                found = f"a {type(p).__name__} of shape {list(p.shape)}, a subclass that may have no memory of its own"
                refuse(type(self).__name__, "params", found, "torch's own Parameters, or DTensors")
        twice = shared(p for given in (*self.param_groups, group) for p in given["params"] if p.requires_grad)
        if twice is not None:
            found = f"two in the same memory, of shape {list(twice.shape)}"
            refuse(type(self).__name__, "params", found, "one Parameter for all that use it, given once")
        self.param_groups.append(group)

    def checked(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with its numbers as floats, if a step can use them and they ask for nothing that a step does not do."""
        name, found = type(self).__name__, dict(group)
        for key, value in self.fixed.items():
            if group.get(key, value) != value:
                refuse(name, key, repr(group[key]), f"{value!r}: no other is offered, and a group without {key!r} has it")
        for key, limit in self.limits.items():
            if key in group:
                pair = key == "betas"
                given = group[key] if pair else (group[key],)
                sound = isinstance(given, tuple | list) and len(given) == 1 + pair and all(hasattr(x, "__float__") for x in given)
                values = [0.0 if -ROUNDED < x < 0 else x for x in map(float, given)] if sound else []
                if not values or not all(0 <= x < limit for x in values):
                    wanted = "two numbers from 0" if pair else "a number from 0"
                    refuse(name, key, repr(group[key]), f"{wanted}, below {limit:g}" if limit < math.inf else wanted)
                found[key] = tuple(values) if pair else values[0]
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, whose own state dicts are accepted too; but moments keep the dtype in which they were saved, and settings
        that were not saved stay."""
        before, saved = self.param_groups, dict[str, Any]()

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            for group in given["param_groups"]:
                self.checked({**self.defaults, **group, "params": []})
                if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
                    found = f"{group['weight_decay']}, which torch.optim.Adam adds to gradients"
                    refuse(type(self).__name__, "weight_decay", found, "a state of torch.optim.AdamW, or one without decay")
            saved.update(given)
            params = {i for group in given["param_groups"] for i in group["params"]}
            # of parameters torch would make all of it of their dtype: of int8 four times as much
            return {**given, "state": {i: state for i, state in given["state"].items() if i not in params}}

        hooks = [self.register_load_state_dict_pre_hook(take),  # after those of others, and `put` before theirs
                 self.register_load_state_dict_post_hook(lambda _: self.put(saved, before), prepend=True)]  # fmt: skip
        try:
            unwrap(Optimizer.load_state_dict)(self, state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def put(self, saved: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> None:
        """Complete groups that were loaded by what they were `before`, and take the `saved` state as it is."""
        fused = "fused" in self.defaults  # steps are on the parameters' device, whatever torch's have been
        for group, mine in zip(self.param_groups, before, strict=True):
            group.update({key: value for key, value in {**self.defaults, **mine}.items() if key not in group})
            group.update({"fused": True} if fused else {})
        theirs = [i for group in saved["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(theirs, params, strict=True):
            layout = torch.contiguous_format if p.is_contiguous() else torch.preserve_format  # kernels ask for the first
            for name, value in saved["state"].get(i, {}).items():
                if name == "step":  # a number, in torch up to 1.11
                    value = torch.tensor(float(value), dtype=torch.float32, device=p.device if fused else "cpu")
                elif isinstance(value, Tensor):
                    value = value.detach().to(p.device, copy=True, memory_format=layout)
                self.state[p][name] = value


class AdamW(Plain):
    """`clip` returns the gradients' norm and the factor for them, on their device; `step` does the rest in one pass.

        clip = optimizer.clip(max_norm)
        optimizer.step(clip=clip)
        norm = float(clip[0])        # the host waits for the device here, and nowhere before

    Without `clip`, gradients are used as they are, as in torch. State dicts are torch's. A DTensor is updated by its local
    part; its moments are DTensors too, and so are the scales of 8-bit moments if a row of each part consists of whole blocks.
    """

    limits: Mapping[str, float] = {**Plain.limits, "eps": math.inf}
    own: Mapping[str, Any] = {}  # what a subclass has beside these settings

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, moments: Literal["fp32", "bf16", "int8"] = "fp32", master: bool = False,
                 stochastic: bool = True, seed: int = 0) -> None:
        fused = True  # what torch, and checkpoint/state.py, know a step by that is kept on the parameter's device
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "moments": moments,
                                  "master": master, "stochastic": stochastic, "seed": seed, "fused": fused, **self.own})

    def checked(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["moments"] not in KINDS:
            refuse(type(self).__name__, "moments", repr(group["moments"]), " or ".join(KINDS))
        return super().checked(group)

    def squares(self, copies: Callable[[Tensor], int] = lambda p: 1) -> Tensor:
        """The sum of all squared gradients of this process (float64, 1). Each is divided by the number of processes that hold the
        same part of its parameter, so that in a sum over the mesh every element counts once."""
        lists: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if (g := gradient(p)) is not None:
                    lists.setdefault((g.get_device(), g.dtype, copies(p)), []).append(local(g).contiguous())
        if not lists:
            home = next((p.device for group in self.param_groups for p in group["params"]), "cpu")
            return torch.zeros(1, dtype=torch.float64, device=home)
        found = [squares(grads) if n == 1 else squares(grads) / n for (_, _, n), grads in lists.items()]
        return found[0] if len(found) == 1 else torch.cat([total.to(found[0].device) for total in found]).sum(0, True)

    def clip(self, max_norm: float = 0.0, scale: Tensor | float | None = None, squares: Tensor | None = None) -> Tensor:
        """(norm, factor), float32. The norm is that of the gradients times `scale` (1 / loss scale, a number on the device or not).
        The factor unscales them and clips them to `max_norm` (0 or inf: never); it is NaN if the norm is not finite, and `step`
        then changes nothing."""
        limit = float(max_norm)
        if not limit >= 0:
            refuse(type(self).__name__, "max_norm", repr(max_norm), "a number from 0; 0 or inf: nothing is clipped")
        limit = 0.0 if limit == math.inf else limit
        totals = self.squares() if squares is None else squares
        if scale is not None and not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=torch.float32, device=totals.device)
        if usable(totals):
            clip = torch.empty(2, dtype=torch.float32, device=totals.device)
            call("adamw_clip", clip, totals, scale if scale is None else scale.detach().float().view(1), limit)
            return clip
        return reference_clip(totals, scale, limit)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None,
             later: Later | None = None) -> Any:
        """Update every parameter that has a gradient. `clip` is the result of the method of that name. `later`, if given, is
        called with (parameter, function that updates it) for each, and runs it; the bits are the same in any order."""
        loss, jobs = evaluated(closure), list[Job]()
        number = 0  # of parameters before
        for group in map(self.checked, self.param_groups):
            batches: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}  # rows that are alike; what follows runs once a parameter
            kind = KINDS[group["moments"]][0]
            for p in group["params"]:
                grad = gradient(p)
                if grad is None:
                    continue
                state, main = self.state[p], self.state[p].get("master")
                fits = (m := state.get("exp_avg")) is not None and m.dtype is (kind if p.dtype != torch.float64 else p.dtype)
                if not fits or (main is not None and p.dtype.itemsize > 2):
                    self.prepare(p, group)
                    main = state.get("master")
                row: tuple[Any, ...]
                row = (p if main is None else main, grad, state["exp_avg"], state["exp_avg_sq"], state.get("exp_avg_scale"),
                       state.get("exp_avg_sq_scale"), None if main is None else p, state["step"])
                if type(p) not in PLAIN or type(grad) not in PLAIN:
                    row = tuple(t if t is None else local(t) for t in row)
                key = p.get_device(), p.dtype, grad.dtype, main is None
                batches.setdefault(key, []).append((*row, p))
            for rows in batches.values():
                if later is None:
                    update([list(column) for column in zip(*rows, strict=True)][:-1], group, number, clip)
                else:
                    for k, row in enumerate(rows, number):
                        jobs.append((row[-1], partial(update, [[x] for x in row[:-1]], group, k, clip)))
                number += len(rows)
        if later is not None:
            later(jobs)
        return loss

    def prepare(self, p: Tensor, group: dict[str, Any]) -> None:
        """Make the state of a parameter, or convert one made by another kind of AdamW."""
        state = self.state[p]
        step = state.get("step", 0.0)
        kept = isinstance(step, Tensor)
        state["step"] = step.to(p.device, torch.float32) if kept else torch.full((), step, dtype=torch.float32, device=p.device)
        if p.dtype.itemsize > 2:
            state.pop("master", None)  # of when it was in half precision; it needs none now
        elif "master" not in state and (p.dtype == torch.float16 or group["master"]):
            state["master"] = p.detach().float()
        kinds = (torch.float64, torch.float64) if p.dtype == torch.float64 else KINDS[group["moments"]]
        for name, kind in zip(("exp_avg", "exp_avg_sq"), kinds, strict=True):
            old = widened(state, name) if name in state else None
            state[name] = torch.zeros_like(p, dtype=kind)
            state.pop(f"{name}_scale", None)
            if not kind.is_floating_point:
                state[f"{name}_scale"] = scales_of(p)
            if old is not None:
                narrow(state, name, old)


def scales_of(p: Tensor) -> Tensor:
    """A zero for each block of `p`: where rows are whole blocks in rows too, cut as `p` is, and the blocks of one process."""
    part = local(p)
    if p.dim() < 2 or p.shape[-1] % BLOCK or part.shape[-1] % BLOCK:
        return torch.zeros(-(-part.numel() // BLOCK), dtype=torch.float32, device=part.device)
    return zeros_like(p, torch.float32, BLOCK)


def local(x: Tensor) -> Tensor:
    """The part of a tensor that is in this process's memory."""
    while type(x) not in PLAIN and not fake(x):
        x = x.wait() if hasattr(x, "wait") else x.to_local()  # type: ignore[attr-defined]  # a DTensor's
    return x


def gradient(p: Tensor) -> Tensor | None:
    """The gradient of `p`, sharded like `p`. If a parameter is used in several ways, it may come whole, or as a sum that is still
    to be made. A sparse gradient is refused."""
    grad, placements = p.grad, getattr(p, "placements", None)
    if grad is not None and grad.layout is not torch.strided:
        refuse(None, "gradient", f"a sparse one, of a parameter of shape {list(p.shape)}", "a dense one: Embedding(sparse=False)")
    # ignored: a DTensor has placements
    if grad is not None and placements is not None and grad.placements != placements:  # type: ignore[attr-defined]
        p.grad = grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]  # a DTensor's
    return grad


def shared(params: Iterable[Tensor]) -> Tensor | None:
    """A parameter that shares its memory's start with an earlier one, if there is any."""
    known = set[int]()
    for p in params:
        x = local(p) if hasattr(p, "placements") else p
        if type(x) in PLAIN and x.numel() and (at := x.data_ptr()):  # 0: memory that is not there, or not yet
            if at in known:
                return p
            known.add(at)
    return None


def usable(x: Tensor) -> bool:
    """Whether there is a kernel for tensors like `x`."""
    return x.device.type in ("cpu", "cuda") and served(x)


def squares(grads: list[Tensor]) -> Tensor:
    """The sum of the squares of contiguous tensors of one device and dtype, float64; the same however many threads there are."""
    if grads[0].dtype not in FLOATS or not usable(grads[0]):
        return torch.stack([g.double().square().sum() for g in grads]).sum(0, True)
    device, pieces = grads[0].device, sum(-(-g.numel() // PIECE) for g in grads)
    total, partial = (torch.empty(n, dtype=torch.float64, device=device) for n in (1, pieces))
    call("adamw_squares", total, grads, partial, torch.empty(WORDS * len(grads), dtype=torch.int64, device=device))
    return total


def reference_clip(totals: Tensor, scale: Tensor | None, max_norm: float) -> Tensor:
    unscale = torch.ones((), dtype=torch.float32, device=totals.device) if scale is None else scale.float().view(())
    norm = totals.sum().sqrt().float() * unscale.abs()
    factor = unscale * (max_norm / (norm + 1e-6)).clamp(max=1) if max_norm else unscale
    return torch.stack((norm, torch.where(norm.isfinite() & factor.isfinite(), factor, math.nan)))


def update(columns: list[list[Any]], group: dict[str, Any], number: int, clip: Tensor | None) -> None:
    """One step of parameters of the same kind, by the kernel if possible. `columns`: for each the parameter, its gradient, m, v,
    their scales or None, its copy in half precision or None, and its step."""
    params, grads = columns[:2]
    one = params[0]
    factor = torch.ones(2, dtype=torch.float32, device=one.device) if clip is None else clip.to(one.device)
    dtypes = one.dtype == torch.float32 and grads[0].dtype in FLOATS
    dtypes = dtypes or (one.dtype == torch.bfloat16 and grads[0].dtype in (torch.float32, torch.bfloat16))
    if not (dtypes and usable(one)) or not all(t.is_contiguous() for t in params):
        if not factor[1].isnan():
            for index, row in enumerate(zip(*columns, strict=True)):
                reference(row, factor[1], group, number + index)
        return
    table = torch.empty(WORDS * len(params), dtype=torch.int64, device=one.device)
    columns = [params, [g.contiguous() for g in grads], *columns[2:]]
    call("adamw", factor, *([t for t in column if t is not None] for column in columns), table, group["lr"], *group["betas"],
         group["eps"], group["weight_decay"], group["seed"], number, group["stochastic"])


def reference(row: tuple[Any, ...], factor: Tensor, group: dict[str, Any], number: int) -> None:
    """One step of one parameter in plain torch, in place: the meaning of the kernels, operation by operation."""
    p, g, m, v, m_scale, v_scale, copy, step = row
    step += 1
    t, (beta1, beta2), lr = float(step), group["betas"], group["lr"]
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    of_m = of_p = of_v = None
    if group["stochastic"] and (torch.bfloat16 in (p.dtype, m.dtype) or m_scale is not None):
        key = mix(group["seed"], number, int(t))
        of_m, of_v = bits(2 * p.numel(), signed(key, p.device)).view(-1, 2).to(torch.int32).unbind(1)
        of_p = of_m >> 8 | (of_v & 0xFF) << 8  # csrc/adamw.h
    moments = {"exp_avg": m, "exp_avg_sq": v, "exp_avg_scale": m_scale, "exp_avg_sq_scale": v_scale}
    g = g.to(wide) * factor.to(wide)
    x = p.to(wide) * (1 - lr * group["weight_decay"])
    y, z = (widened(moments, name).to(wide) for name in ("exp_avg", "exp_avg_sq"))
    y = y + (g - y) * (1 - beta1)
    z = z * beta2 + (g * g) * (1 - beta2)
    size, root = (torch.tensor(n, dtype=wide, device=p.device) for n in (lr / (1 - beta1**t), 1 / math.sqrt(1 - beta2**t)))
    x = x - (y * size) / (exact_root(z) * root + group["eps"])
    store(p, x, of_p)
    narrow(moments, "exp_avg", y, of_m)
    narrow(moments, "exp_avg_sq", z, of_v)
    if copy is not None:
        copy.copy_(x)


def mix(seed: int, number: int, step: int) -> int:
    """The key of a parameter's random bits in one step: SplitMix64 (Steele et al., 2014) of the three."""
    z = (seed + 0x9E3779B97F4A7C15 * (number + 1) + 0xD1B54A32D192ED03 * step) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def signed(key: int, device: torch.device) -> Tensor:
    return torch.tensor([key - 2**64 if key >> 63 else key], device=device)


def store(into: Tensor, x: Tensor, random: Tensor | None) -> None:
    """x in the dtype of `into`: rounded to nearest, or, in bf16 with 16 random bits per element, up or down, so as to be right on
    average."""
    if random is None or into.dtype != torch.bfloat16:
        into.copy_(x)
        return
    raised = (x.contiguous().view(torch.int32) + random.view(x.shape)) & -0x10000  # truncation of what was raised
    into.copy_(torch.where(x.isnan(), x, raised.view(torch.float32)))


def exact_root(x: Tensor) -> Tensor:
    """The exactly rounded square root; for large float32 tensors torch uses MKL's, which is not."""
    return x.double().sqrt().to(x.dtype)


def widened(state: dict[str, Any], name: str) -> Tensor:
    """A moment as floating-point numbers."""
    codes = local(state[name])
    if codes.dtype.is_floating_point:
        return codes
    scale = local(state[f"{name}_scale"]).flatten()
    x = decoded(codes.float().abs().flatten(), codes.dtype == torch.uint8)
    x = x * scale.repeat_interleave(BLOCK)[: x.numel()]
    return torch.where(codes.flatten() < 0, -x, x).view(codes.shape)


def decoded(c: Tensor, fourth: bool) -> Tensor:
    """From a code's magnitude to a number between 0 and 1."""
    x = c * (1 / 255) if fourth else c * (1 / 127)
    x = x * x
    return x * x if fourth else x


def narrow(state: dict[str, Any], name: str, x: Tensor, random: Tensor | None = None) -> None:
    """Store `x` as the moment `name`; without random bits rounded to nearest."""
    codes = local(state[name])
    if codes.dtype.is_floating_point:
        store(codes, x, random)
        return
    fourth, n = codes.dtype == torch.uint8, codes.numel()
    scale = local(state[f"{name}_scale"]).view(-1)
    size = torch.nn.functional.pad(x.abs().flatten(), (0, -n % BLOCK)).view(-1, BLOCK)
    scale.copy_(size.amax(1))
    part = torch.where(((scale > 0) & scale.isfinite())[:, None], size / scale[:, None], 0.0).flatten()[:n]
    low = (exact_root(exact_root(part)) * 255 if fourth else exact_root(part) * 127).floor()
    below, above = decoded(low, fourth), decoded(low + 1, fourth)
    chance = 32768.0 if random is None else random.flatten().float() + 0.5
    code = low + ((part - below) * 65536 > (above - below) * chance)
    code = code.clamp(max=255 if fourth else 127)
    code = torch.where(x.flatten() > 0, code.clamp(min=2), code) if fourth else torch.where(x.flatten() < 0, -code, code)
    codes.copy_(code.view(codes.shape))
