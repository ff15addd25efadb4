"""Optimizers other than AdamW, with the same interface: `clip` returns norm and factor on the device, and `step(clip=)` applies
them.

A step has two parts. The host's part comes first, while the device still computes the gradients: it collects the parameters and
the numbers of this step, rates and decays. Then it waits for the norm, which decides whether there is a step. The device's part is
`work`, some hundred calls. It reads the numbers from device memory and changes nothing but gradients, parameters and state, so it
can be recorded once and replayed (train/graphs.py): then the device need not wait for many short calls.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops._mode import on_gpu
from ..parallel.ranks import ALONE
from .adamw import AdamW, Plain, evaluated, gradient, local
from .stacks import SCRATCH, stacks

Some = tuple[list[Tensor], dict[str, Any]]  # parameters of one shape, updated together, and their group
Work = Callable[..., None]
Run = Callable[[Work, Sequence[Tensor], Iterable[dict[str, Any]]], None]


def at_once(work: Work, given: Sequence[Tensor], state: Iterable[dict[str, Any]]) -> None:
    """Do `work`, which reads the tensors `given` and changes those of `state`, beside gradients and parameters."""
    work(*given)


class Clipped(Plain):
    """If the norm was not finite, nothing changes. A subclass says how many numbers a step of parameters has and what is done with
    them; `ranks`: the ranks over which the parameters are spread."""

    squares: Any = AdamW.squares  # which ask for nothing but groups
    clip: Any = AdamW.clip
    ranks = ALONE
    room: Mapping[bool, int] = SCRATCH
    beside: Sequence[str] = ()  # what a subclass has for its steps, but groups, state and ranks

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle: torch's has groups and state alone."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in ("ranks", *self.beside)}}

    @property
    def scratch(self) -> int:
        """Bytes that a step needs in addition to state and gradients, unless a single parameter needs more."""
        return next((self.room[on_gpu(p)] for group in self.param_groups for p in group["params"]), 0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None, run: Run = at_once) -> Any:
        """Update every parameter that has a gradient. `clip` is the result of the method of that name. `run` does the device's
        part."""
        loss = evaluated(closure)
        each = [(some, group) for group in map(self.checked, self.groups()) for some in self.together(group["params"])]
        if not each:
            return loss
        rows = [self.numbers(some, group) for some, group in each]
        given = [numbers_on([n for row in rows for n in row], each[0][0][0].device)]
        if clip is not None:
            if bool(clip[1].isnan()):  # a rehearsal, whose conditions are all false, goes on
                return loss
            given.append(clip[1].to(given[0].device))
        run(partial(self.apply, each, [len(row) for row in rows]), given, self.state.values())
        for some, _ in each:
            self.stepped(some)
        return loss

    def groups(self) -> list[dict[str, Any]]:
        return self.param_groups

    def together(self, params: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        """Parameters of one shape; for new ones there is a state then. Those without elements are none."""
        some = [p for p in params if gradient(p) is not None and p.numel()]
        for p in some:
            if not (state := self.state[p]):
                self.make(p)
            kind = self.kind(p)
            state.update({name: x.to(kind) for name, x in state.items() if name != "step" and x.dtype is not kind})
        return self.stacks(some)

    def kind(self, p: Tensor) -> torch.dtype:
        """That of a parameter's state; what was loaded, or was there before the parameter was cast, may be of another."""
        return p.dtype

    def stacks(self, some: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        """The parameters that are updated together."""
        return stacks(some, self.ranks)

    def apply(self, each: list[Some], lengths: list[int], numbers: Tensor, factor: Tensor | None = None) -> None:
        """The device's part: gradients are multiplied by `factor`, and each parameter is updated with its own numbers."""
        if factor is not None:
            torch._foreach_mul_([grad for some, _ in each for grad in gradients(some)], factor)
        self.work(each, list(numbers.split(lengths)))

    def make(self, p: Tensor) -> None:
        """Make the state of a parameter."""
        raise NotImplementedError

    def numbers(self, some: list[Tensor], group: dict[str, Any]) -> list[float]:
        """The numbers of this step that `work` needs, on the host."""
        raise NotImplementedError

    def work(self, each: list[Some], numbers: list[Tensor]) -> None:
        raise NotImplementedError

    def stepped(self, some: list[Tensor]) -> None:
        """Note on the host that these have been updated."""


def numbers_on(numbers: list[float], device: torch.device) -> Tensor:
    """Numbers (n, float64) in a device's memory, copied there without waiting."""
    found = torch.tensor(numbers, dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
    return found.to(device, non_blocking=True)


def gradients(some: Iterable[Tensor]) -> list[Tensor]:
    """This process's parts of the gradients of parameters that have one."""
    return [local(p.grad) for p in some if p.grad is not None]


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which an update computes: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def shifted(weights: list[Tensor], steps: Sequence[Tensor], group: dict[str, Any], decay: Tensor, by: Sequence[Tensor] = ()
            ) -> None:
    """Add to weights their steps (times `by`), which are at least fp32, after weight decay if their group has it; weights of fewer
    bits are rounded once."""
    new = [w.to(steps[0].dtype) for w in weights]
    if group["weight_decay"]:
        torch._foreach_mul_(new, decay)
    if by:
        torch._foreach_addcmul_(new, list(steps), list(by))
    else:
        torch._foreach_add_(new, list(steps))
    if new[0] is not weights[0]:
        torch._foreach_copy_(weights, new)


class Lion(Clipped):
    """The sign of an interpolated momentum. Chen et al., 2023, algorithm 2:

        p = p (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)
        m = beta2 m + (1 - beta2) g
    """

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def make(self, p: Tensor) -> None:
        self.state[p]["exp_avg"] = torch.zeros_like(p)

    def numbers(self, some: list[Tensor], group: dict[str, Any]) -> list[float]:
        return [1 - group["lr"] * group["weight_decay"], -group["lr"]]

    def work(self, each: list[Some], numbers: list[Tensor]) -> None:
        for (some, group), mine in zip(each, numbers, strict=True):
            weights, moments = [local(p) for p in some], [local(self.state[p]["exp_avg"]) for p in some]
            grads, (beta1, beta2) = [g.to(weights[0].dtype) for g in gradients(some)], group["betas"]
            decay, rate = mine.to(wide(weights[0])).unbind()
            steps = [x.to(rate.dtype) for x in torch._foreach_lerp(moments, grads, 1 - beta1)]
            torch._foreach_sign_(steps)
            torch._foreach_mul_(steps, rate)
            shifted(weights, steps, group, decay)
            torch._foreach_lerp_(moments, grads, 1 - beta2)
