"""Optimizers other than AdamW with the same interface: `clip` returns norm and factor on the device, and `step(clip=)` applies
them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .adamw import AdamW, Plain, evaluated, gradient, local


class Clipped(Plain):
    """Scales the gradients by what `clip` returned and steps. If the norm was not finite, nothing changes."""

    squares: Any = AdamW.squares  # which ask for nothing but groups
    clip: Any = AdamW.clip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None) -> Any:
        if clip is not None and not scaled(self.param_groups, clip):
            return None
        return super().step(closure)


def scaled(groups: list[dict[str, Any]], clip: Tensor) -> bool:
    """Multiply the gradients by what `clip` returned. If that is NaN, do nothing and return False."""
    if bool(clip[1].isnan()):  # a rehearsal, whose conditions are all false, goes on
        return False
    grads = [local(g) for group in groups for p in group["params"] if (g := gradient(p)) is not None]
    if grads:
        torch._foreach_mul_(grads, clip[1].to(grads[0].device))
    return True


class Lion(Clipped):
    """The sign of an interpolated momentum. Chen et al., 2023, algorithm 2:

        p = p (1 - lr decay) - lr sign(beta1 m + (1 - beta1) g)
        m = beta2 m + (1 - beta2) g
    """

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip: Tensor | None = None) -> Any:
        loss = evaluated(closure)
        if clip is not None and not scaled(self.param_groups, clip):
            return loss
        for group in self.param_groups:
            params = [p for p in group["params"] if gradient(p) is not None]
            if not params:
                continue
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            weights, moments = [local(p) for p in params], [local(self.state[p]["exp_avg"]) for p in params]
            grads, (beta1, beta2) = [local(p.grad).to(p.dtype) for p in params], group["betas"]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            directions = torch._foreach_lerp(moments, grads, 1 - beta1)
            torch._foreach_sign_(directions)
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, grads, 1 - beta2)
        return loss
