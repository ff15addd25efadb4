"""A table whose rows are read by number and which is also multiplied as a whole has two gradients: one for the rows read, and one
as large as the table. The second is computed first; so the first need not be that large, and is only added to the rows that were
read.
"""

from typing import Any

import torch
from torch import Tensor

from ._mode import kept_graph, unseen

MARK = "modelcenter: where and when a gradient of the whole was formed"


def whole(argument: int) -> None:
    """In a backward: mark that it returns a gradient with all elements of that tensor argument."""
    if unseen():
        node, which, task = summand(argument)
        if node is not None:  # frozen since a compiler, torch 2.11's, has traced the forward
            node.metadata[MARK] = which, task


def summed_to_whole(argument: int) -> bool:
    """In a backward: whether torch adds the gradient of that tensor argument to one with all its elements."""
    if not unseen() or kept_graph():
        return False
    node, which, task = summand(argument)
    return bool(node.metadata.get(MARK) == (which, task))


def summand(argument: int) -> tuple[Any, int, int]:
    """In a running backward: the node to which a tensor argument's gradient goes, the index of its input there, and the graph
    task."""
    node, which = torch._C._current_autograd_node().next_functions[argument]
    return node, which, torch._C._current_graph_task_id()


def of_rows(numbers: Tensor, rows: Tensor, count: int) -> Tensor:
    """The gradient of a table of `count` rows that is zero but at `numbers` (each once, in order), where it is `rows`."""
    size, made = (count, rows.size(1)), torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors
    how = {"dtype": rows.dtype, "layout": torch.sparse_coo, "device": rows.device}
    # not torch.sparse_coo_tensor: torch 2.11 warns there of checks left out, also of those left out on purpose
    sparse: Tensor = made(1, 1, size, numbers[None], rows, **how, is_coalesced=True)
    return sparse
