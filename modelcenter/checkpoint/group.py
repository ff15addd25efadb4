"""The ranks that read or write a folder together: what each holds, the messages between them, and the blocks that they exchange."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError
from ..names import Region
from ..parallel.variable import variable
from .copy_plan import Block, aligned

SAID = 1024  # bytes of what a rank says


class Group:
    """Some ranks that exchange blocks; alone, one that does not."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0

    def regions(self, mine: Mapping[str, Region], device: torch.device) -> list[dict[str, Region]]:
        """What each rank holds of each parameter."""
        if self.group is None:
            return [dict(mine)]
        flat = torch.tensor([n for region in mine.values() for r in region for n in (r.start, r.stop)], device=device)
        told = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(told, flat, group=self.group)
        out: list[dict[str, Region]] = []
        for row in told:
            numbers = iter(row.tolist())
            out.append({name: tuple(slice(next(numbers), next(numbers)) for _ in region) for name, region in mine.items()})
        return out

    def trade(self, give: Sequence[Sequence[Block]], take: Sequence[Sequence[Block]], load: Callable[[Block], Tensor],
              store: Callable[[Block, Tensor], object], device: torch.device) -> None:
        """Send each rank its blocks, which `load` returns in the layout of the file, and `store` those that arrive."""
        for block in give[self.rank]:
            store(block, load(block))
        if self.group is None:
            return
        out, into = ([0 if r == self.rank else sum(aligned(b.size) for b in blocks) for r, blocks in enumerate(side)]
                     for side in (give, take))  # fmt: skip
        sent, found = (torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (out, into))
        for block, place in self.letters(give, sent):
            place.copy_(load(block))
        dist.all_to_all_single(found, sent, into, out, group=self.group)
        for block, place in self.letters(take, found):
            store(block, place)

    def collect(self, take: Sequence[Sequence[Block]], load: Callable[[Block], Tensor], store: Callable[[Block, Tensor], object],
              memory: Any) -> None:
        """`store` the blocks of each rank, which `load` finds in that rank's memory. All ranks have their data when fetching
        begins, and nothing is overwritten before all have fetched."""
        memory.barrier()
        for k in range(self.size):  # so that no two fetch from one
            for block in take[(self.rank + k) % self.size]:
                values = load(block)
                # what is to be transposed would come in pieces of two bytes
                store(block, values.clone(memory_format=torch.contiguous_format) if k and block.turned else values)
        memory.barrier()

    def least(self, number: int, device: torch.device) -> int:
        """The least of the numbers that ranks have."""
        told = torch.tensor(number, device=device)
        if self.group is not None:
            dist.all_reduce(told, dist.ReduceOp.MIN, self.group)
        return int(told)

    def letters(self, side: Sequence[Sequence[Block]], bytes_: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Each block of others with its place in the bytes that are sent or have come."""
        at = 0
        for rank, blocks in enumerate(side):
            for block in blocks if rank != self.rank else ():
                yield block, typed(bytes_, at, block.size, block.run.source.dtype).view(block.shape)
                at += aligned(block.size)

    def tell(self, text: str, device: torch.device) -> list[str]:
        """What each rank says, in `SAID` bytes at most."""
        if self.group is None:
            return [text]
        row = torch.tensor(list(text.encode()[:SAID].ljust(SAID, b"\0")), dtype=torch.uint8, device=device)
        told = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(told, row, group=self.group)
        return [bytes(said.tolist()).rstrip(b"\0").decode(errors="replace") for said in told]

    def agree(self, error: Exception | None, device: torch.device) -> None:
        """Raise `error` on the rank that has one, and an `InputError` that says so on the others."""
        told = self.tell(f"{error or type(error).__name__}" if error is not None else "", device)
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text:
                raise InputError(f"rank {rank}: {text}")


def typed(bytes_: Tensor, at: int, size: int, dtype: torch.dtype) -> Tensor:
    return bytes_[at : at + size].view(dtype)


def neighbours() -> Group:
    """The ranks of this node, by the launcher's LOCAL_WORLD_SIZE; all, where there is none."""
    size = dist.get_world_size()
    local = variable("LOCAL_WORLD_SIZE", 1, size, default=size)
    return Group(of_node(local, dist.group.WORLD) if local < size and size % local == 0 else dist.group.WORLD)


@cache
def of_node(size: int, group: Any) -> Any:
    """The ranks of `group` that share a node of `size`; made once."""
    return dist.new_subgroups(size)[0]
