"""Normalisation over the last axis."""

import torch
from torch import Tensor, nn

from .. import ops


class LayerNorm(nn.Module):
    """Centre, scale by the standard deviation, then weight and bias. Ba et al., 2016."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = ops.layer_norm(x, self.weight, self.bias, self.eps)
        return out


class RMSNorm(nn.Module):
    """Scale by the root mean square, then weight; no centring, no bias. Zhang & Sennrich, 2019."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = ops.rms_norm(x, self.weight, self.eps)
        return out
