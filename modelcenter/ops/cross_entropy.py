"""Cross entropy of logits against labels, summed over the labels that are not `IGNORE`; in at least fp32.

loss_i = lse_i - (1 - smoothing) * logits_i[label_i] - smoothing * mean_j(logits_ij) + z * lse_i^2, lse_i = logsumexp(logits_i):
label smoothing is torch's (Szegedy et al., 2016), the z-loss PaLM's (Chowdhery et al., 2022, section 5). Without any label the loss
and the gradient are zero, never NaN. A label that is neither in the vocabulary nor `IGNORE` is an error on the CPU, before anything
is written; on CUDA, where the host does not wait to check, it makes the loss NaN.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._kernels import call, expect, finite
from ._op import Kernel, op, raw, wide
from .embedding import first_outside

IGNORE = -100  # as torch and transformers


def ignored(labels: Tensor) -> float:
    """The value that marks a missing label: `IGNORE`, or -inf if labels are real numbers, since -100 may be one of them."""
    return -math.inf if labels.is_floating_point() else IGNORE


def reference(logits: Tensor, labels: Tensor, smoothing: float = 0.0, z: float = 0.0) -> Tensor:
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label smoothing of {smoothing}: wanted 0 to 1")
    expect("cross_entropy", "logits", logits)
    finite("cross_entropy", "z", z)
    logits = wide(logits)
    try:
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    except IndexError as error:
        last = logits.shape[-1] - 1
        if logits.dim() != 2 or (found := first_outside(labels, last + 1, IGNORE)) is None:
            raise
        wanted = f"wanted 0 to {last}, or {IGNORE} to ignore it"
        raise ValueError(f"cross_entropy: labels[{found[0]}] is {found[1]}; {wanted}") from error
    if z:
        loss = loss + z * logits.logsumexp(1).square().masked_fill(labels == IGNORE, 0).sum()
    return loss


@raw("(Tensor logits, Tensor labels, float smoothing=0.0, float z=0.0) -> (Tensor, Tensor)")
def cross_entropy_forward(logits: Tensor, labels: Tensor, smoothing: float = 0.0, z: float = 0.0) -> tuple[Tensor, Tensor]:
    """The loss, and the logsumexp of every row."""
    losses, lse = (torch.empty(logits.size(0), dtype=torch.float32, device=logits.device) for _ in range(2))
    call("cross_entropy", logits.contiguous(), labels.contiguous(), logits.size(1), smoothing, z, losses, lse)
    return summed(losses), lse


@raw("(Tensor grad, Tensor logits, Tensor labels, Tensor lse, float smoothing, float z) -> Tensor")
def cross_entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, smoothing: float, z: float) -> Tensor:
    """The gradient of the logits (n vocab), from that of the loss and the logsumexp of every row."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    call("cross_entropy_backward", logits, labels.contiguous(), lse, grad, smoothing, z, out)
    return out


def summed(losses: Tensor) -> Tensor:
    """The sum (fp32, no dimensions), in an order that depends on neither threads nor launch."""
    loss = torch.empty((), dtype=torch.float32, device=losses.device)
    call("total", losses, loss)
    return loss


def saved(args: Sequence[Any], outs: Sequence[Tensor]) -> Sequence[Any]:
    logits, labels, smoothing, z, *_ = (*args, 0.0, 0.0)
    return logits, labels, outs[1], smoothing, z


def backward(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, smoothing: float, z: float) -> Sequence[Tensor | None]:
    return cross_entropy_backward(grad, logits, labels, lse, smoothing, z), None, None, None


def takes(logits: Tensor, labels: Tensor, smoothing: float = 0.0, z: float = 0.0) -> bool:
    """Other calls go to torch's function, which runs or refuses them."""
    fits = logits.dim() == 2 and labels.shape == logits.shape[:1] and logits.size(1) > 0
    return fits and labels.dtype == torch.int64 and 0 <= smoothing <= 1


def cases(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for n, vocab in ((1, 1), (0, 3), (3, 7), (5, 129), (64, 1000)):
        labels = torch.randint(vocab, (n,), device=device)
        logits = torch.randn(n, vocab, device=device, dtype=dtype)
        yield logits, labels
        yield logits, labels.masked_fill(labels % 2 == 0, IGNORE)
        yield logits, labels, 0.1, 1e-3
    yield torch.randn(33, 40, device=device, dtype=dtype)[:, 3:], torch.randint(37, (33,), device=device), 0.0, 1e-2


cross_entropy = op("cross_entropy", reference, cases, Kernel(cross_entropy_forward, saved, backward, takes=takes))
