"""Checks that ranks which should hold the same weights still do. A flipped bit or a missed sum would spread silently and ruin the
run.

Each rank sums the bits of every such tensor, as integers, on its device. That takes one pass over memory, and any single flipped
bit changes the sum. For each way in which tensors are sharded, ranks compare one number; only if it differs do they compare the
sums of all tensors.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refuse
from .ranks import Ranks, named, settle

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
Held = Mapping[tuple[str, ...], list[tuple[str, Tensor]]]  # tensors with their names, by the dimensions along which they are cut


def check_replicas(model: nn.Module, ranks: Ranks, step: int) -> None:
    """Refuse to go on if ranks differ in weights that they should hold alike, and name the tensor and the ranks. A collective."""
    settle(model)
    held = held_alike(model, ranks)
    if not held:
        return
    sums = [torch.stack([bits(tensor) for _, tensor in tensors]) for tensors in held.values()]
    said = ranks.gathered(torch.stack([folded(each) for each in sums]))
    for number, (cuts, tensors) in enumerate(held.items()):
        groups = ranks.alike(set(cuts))
        if any(len({int(said[rank][number]) for rank in group}) > 1 for group in groups):
            table = torch.stack(ranks.gathered(sums[number]))
            different = [(k, group) for k in range(len(tensors)) for group in groups if len(set(table[group, k].tolist())) > 1]
            k, group = different[0]
            more = len({k for k, _ in different}) - 1
            found = f"{who(group, table[:, k].tolist())}{f'; so in {more} other tensors' if more else ''}"
            refuse(f"step {step}", tensors[k][0], found, "an earlier state to resume from; suspect memory, links or a missed sum")


def held_alike(model: nn.Module, ranks: Ranks) -> Held:
    """The parameters of which several ranks have the same part."""
    held: dict[tuple[str, ...], list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if ranks.copies(parameter) > 1:
            held.setdefault(tuple(sorted(ranks.cuts(parameter))), []).append((name, parameter))
    return held


def bits(tensor: Tensor) -> Tensor:
    """The sum (int64, wrapping) of the bits of this rank's part. They are taken as words of 8 bytes if they fill such words,
    because sums of smaller ones are slow on a CPU."""
    part: Any = tensor.detach()
    part = part.to_local() if hasattr(part, "to_local") else part
    part = part.contiguous().view(-1)
    size = 8 if part.nbytes % 8 == 0 else part.element_size()
    part = part.clone() if part.storage_offset() * part.element_size() % size else part
    total: Tensor = part.view(INTEGERS[size]).sum(dtype=torch.int64)
    return total


def folded(sums: Tensor) -> Tensor:
    """Many numbers as one, each with a factor of its own, so that two changes do not cancel."""
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def who(group: list[int], sums: list[int]) -> str:
    """`rank 2 has other bits than ranks 0, 1, 3`, or, without a majority, only that they differ."""
    by_sum: dict[int, list[int]] = {}
    for rank in group:
        by_sum.setdefault(sums[rank], []).append(rank)
    most = max(by_sum.values(), key=len)
    odd = [rank for rank in group if rank not in most]
    if len(most) > len(odd):
        return f"{named(odd)} {'have' if len(odd) > 1 else 'has'} other bits than {named(most)}"
    return f"{named(group)} have different bits"
