"""Numbers on their way to a device."""

import torch
from torch import Tensor


def onto(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. From the host to a GPU it goes by itself: what the GPU still has to do is not waited for."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
