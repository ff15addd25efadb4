"""Parameters of one shape, updated together. On a GPU an update then takes a few calls for all of them instead of a few for each,
which take the host longer than the GPU. On a CPU, where a call returns when it is done, this pays only for small parameters; the
results have the same bits as if each were updated alone, which are torch's."""

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..ops._mode import on_gpu
from ..parallel.ranks import Ranks

SCRATCH = {True: 2**28, False: 2**18}  # bytes that an update takes beside its state, on a GPU or not; what needs more is alone
PRODUCTS = ChainMap({False: 0}, SCRATCH)  # for one that multiplies matrices: a CPU rounds products of batches in another way
EACH = 10  # of them for an element that is updated


def stacks(params: Iterable[Tensor], ranks: Ranks, alike: Callable[[Tensor], Hashable] = lambda p: None,
           room: Mapping[bool, int] = SCRATCH, dealt: bool = False) -> Iterator[list[Tensor]]:
    """The parameters, which have gradients, in lists of those that are of one shape and kind, cut alike and of one `alike`, as many
    as there is scratch for. They are the same lists on all ranks. `dealt`: ranks compute the members of a list in turn."""
    lists: dict[Hashable, list[Tensor]] = {}
    for p in params:
        spread: Any = p  # a DTensor, perhaps
        cut = (spread.device_mesh, tuple(spread.placements)) if hasattr(p, "placements") else None
        # ignored: each has a gradient
        lists.setdefault((p.shape, p.dtype, p.device, p.grad.dtype, cut, alike(p)), []).append(p)  # type: ignore[union-attr]
    for some in lists.values():
        one = some[0]
        most = max(1, room[on_gpu(one)] // (EACH * max(1, one.numel())))
        if dealt or (ranks.size > 1 and ranks.cuts(one)):  # a part of each is here, or of the work on them
            most = max(ranks.size, most * ranks.size // ranks.copies(one))
        yield from (some[i : i + most] for i in range(0, len(some), most))
