"""The loss of ops/linear_cross_entropy if each process has some rows of the weight: no logits leave the process that computed them.

For each row of logits, processes exchange its largest, then three sums: of exp(logit - largest), of the label's logit, which one of
them has, and, with smoothing, of all logits (Shoeybi et al., 2019, "Megatron-LM", section 3). As in that file, logits are computed
a chunk of rows at a time, and turned at once into the gradients of x and of this process's rows; that of x is summed over the
processes at the end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._mode import autocast_dtype, on_gpu, once, part
from ._op import wide
from .cross_entropy import IGNORE
from .linear import formed_in
from .linear_cross_entropy import rows_of_a_chunk


def split(weight: Tensor) -> bool:
    """Whether each process has rows of `weight`, all of them the same number."""
    if part(weight):
        return True
    cut: Any = weight
    places: Any = getattr(cut, "placements", ())
    return len(places) == 1 and places[0].is_shard(0) and len(cut) % cut.device_mesh.size() == 0


def vocab_parallel_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, vocab: int, scale: float = 1.0,
                                 smoothing: float = 0.0, z: float = 0.0) -> Tensor:
    """The sum over labels (n) that are not `IGNORE` of the cross entropy of x @ weight^T * scale + bias. x (n dim) is the same on
    all processes; weight (rows dim) and bias (rows) are DTensors that are `split`; their rows from `vocab` on are not words.
    Otherwise as linear_cross_entropy: a label that is neither a word nor `IGNORE` is a ValueError on the CPU and makes the loss NaN
    elsewhere."""
    parts: Any = weight, bias
    alone = part(weight)
    own, shift = (p if p is None or alone else p.to_local(grad_placements=p.placements) for p in parts)
    assert own is not None
    mesh = None if alone else parts[0].device_mesh
    kind = x.dtype if x.dtype == torch.float64 else formed_in(x, autocast_dtype(x.device))
    if not on_gpu(x):
        unknown = (labels != IGNORE) & ((labels < 0) | (labels >= vocab))
        if bool(unknown.any()):
            raise ValueError(f"linear_cross_entropy: label {int(labels[unknown][0])} of a vocabulary of {vocab}")
    group, first = (None, 0) if mesh is None else (mesh.get_group(), mesh.get_local_rank() * len(own))
    options = (group, first, vocab, scale, smoothing, z, kind, torch.is_grad_enabled())
    loss: Tensor = Split.apply(x, own, shift, labels, options)  # type: ignore[no-untyped-call]  # torch has no types there
    return loss


class Split(torch.autograd.Function):
    """The loss on plain tensors: this process's rows of the weight begin at word `first`. Without a `group` nothing is exchanged:
    in a rehearsal there is one process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: tuple[Any, ...]) -> Tensor:
        import torch.distributed as dist

        group, first, vocab, scale, smoothing, z, kind, wanted = options
        reduce: Callable[..., Any] = partial(dist.all_reduce, group=group) if group is not None else lambda *_: None
        words = min(max(vocab - first, 0), len(weight))  # the other rows pad the vocabulary
        of_x, of_weight, of_bias = (wanted and needed for needed in ctx.needs_input_grad[:3])
        total = wide(x.new_zeros(()))
        dx = torch.zeros_like(x, dtype=total.dtype) if of_x else None
        dweight = torch.zeros_like(weight, dtype=total.dtype) if of_weight else None
        dbias = torch.zeros_like(bias, dtype=total.dtype) if of_bias and bias is not None else None
        w, up = weight.to(kind), 256.0 if kind == torch.float16 else 1.0  # as linear_cross_entropy, for small probabilities
        chunk, _ = rows_of_a_chunk(x, len(weight), total.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                some, label = x[rows].to(kind), labels[rows]
                logits = F.linear(some, w).to(total.dtype) * scale
                if bias is not None:
                    logits += bias
                logits[:, words:] = float("-inf")
                top = logits.amax(1)
                reduce(top, dist.ReduceOp.MAX)
                at = label - first
                mine = (at >= 0) & (at < words)
                at = torch.where(mine, at, 0)[:, None]
                hit = torch.where(mine, logits.gather(1, at)[:, 0], 0)
                whole = logits[:, :words].sum(1) if smoothing else torch.zeros_like(top)
                sums = torch.stack(((logits - top[:, None]).exp_().sum(1), hit, whole))
                reduce(sums)
                lse = top + sums[0].log()
                loss = lse - (1 - smoothing) * sums[1] - smoothing / vocab * sums[2] + z * lse.square()
                loss = loss.masked_fill((label < 0) | (label >= vocab), float("nan")).masked_fill(label == IGNORE, 0)
                total += loss.sum()
                if not (of_x or of_weight or of_bias):
                    continue
                grad = logits.sub_(lse[:, None]).exp_().mul_((1 + 2 * z * lse)[:, None])
                grad[:, :words] -= smoothing / vocab
                grad.scatter_add_(1, at, mine[:, None].to(grad.dtype) * (smoothing - 1))
                grad = grad.masked_fill_((label == IGNORE)[:, None], 0).mul_(up)
                low = grad.to(kind)
                if dx is not None:
                    dx[rows] = (low @ w).to(dx.dtype) * (scale / up)
                if dweight is not None:
                    dweight.add_((low.t() @ some).to(dweight.dtype), alpha=scale / up)
                if dbias is not None:
                    dbias.add_(grad.sum(0), alpha=1 / up)
            if dx is not None:
                reduce(dx)
        ctx.save_for_backward(dx, dweight, dbias)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if g is None else (g * grad).to(kind) for g, kind in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return *found, None, None
