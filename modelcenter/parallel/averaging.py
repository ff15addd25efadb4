"""Copies of a model, each with its share of a batch: their gradients become the mean of all, while the backward still runs.

Gradients are sent in buckets, each as soon as its last gradient is formed, and always in the same order, so that all ranks send the
same at the same time (Li et al., 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2).
torch's DistributedDataParallel does this too, but wraps the model and keeps gradients in buffers of its own. Here they stay where
the backward has formed them, so that backward and sums together can be a CUDA graph (train/graphs.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .device import LOW

BUCKET = 64 * 2**20  # bytes; 340 GB/s for all of a 13B's gradients at once on eight H200s are 290 for parts of this size


@contextmanager
def averaged(model: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Gradients that a backward forms meanwhile are afterwards the mean over the ranks of `group`, each of which has a copy of
    `model`. Those in low precision are summed in fp32."""
    buckets = buckets_of([p for p in model.parameters() if p.requires_grad])
    bucket_of = {p: number for number, bucket in enumerate(buckets) for p in bucket}
    missing, sent = [len(bucket) for bucket in buckets], list[Callable[[], None]]()

    def formed(p: Tensor) -> None:
        missing[bucket_of[p]] -= 1
        while len(sent) < len(buckets) and not missing[len(sent)]:
            sent.append(send(buckets[len(sent)], group))

    hooks = [p.register_post_accumulate_grad_hook(formed) for p in bucket_of]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for bucket in buckets[len(sent) :]:  # those with a parameter that had no part in this
        sent.append(send([p for p in bucket if p.grad is not None], group))
    for finish in sent:
        finish()


def buckets_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters of one dtype that are sent together. A backward begins with the last."""
    buckets: list[list[nn.Parameter]] = []
    size = BUCKET
    for p in reversed(parameters):
        if size >= BUCKET or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += local(p).nbytes
    return buckets


def send(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to sum the gradients of `parameters`. The result waits for that and leaves the means in their place."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    wide = [g.float() if g.dtype in LOW.values() else g for g in gradients]
    if not wide:
        return lambda: None
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.SUM
    work = group.allreduce_coalesced(wide, options)

    def finish() -> None:
        work.wait()
        torch._foreach_div_(wide, group.size())
        for g, w in zip(gradients, wide, strict=True):
            if g is not w:
                g.copy_(w)

    return finish


def local(tensor: Tensor) -> Tensor:
    """This rank's part of what tensor parallelism has cut."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()
