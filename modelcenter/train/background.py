"""Writes training states in the background while the run goes on.

The contents of a state are copied to the host before the next update (to pinned memory, if they come from an accelerator). A thread
then writes the copies just as a run that waits would write the tensors (`checkpoint/state.py: save_state`); its communication
between ranks uses separate connections. A thread is enough, because hashing, writing and flushing release Python's GIL. One state
is written at a time, and none is called saved before its folder has its final name.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.shards import Piece
from ..checkpoint.state import save_state, tensor_of
from ..parallel.ranks import Ranks
from ..parallel.watch import Pulse, apart, beat, wait_for


class Background:
    """The writer of one run's states. All ranks have one, and make it at the same time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks.apart()
        self.pool = ThreadPoolExecutor(1, "saving")
        self.copies: dict[str, Tensor] = {}  # kept from save to save: pinning memory takes longer than filling it
        self.pending: Future[Path] | None = None
        self.pulse = Pulse()  # of the thread that writes
        self.stall = self.took = 0.0  # seconds that the run has waited for the state in question, and that it took to write

    def write(self, folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor | Piece]], state: Mapping[str, Any],
              keep: int | None, ranks: Ranks) -> None:
        """Copy what `save_state` would write, and begin to write it. The state before must be settled."""
        assert self.pending is None
        began = time.perf_counter()
        copied = {group: {name: self.copy(f"{group}/{name}", entry) for name, entry in table.items()}
                  for group, table in tensors.items()}  # fmt: skip
        if any(tensor_of(entry).device.type != "cpu" for table in tensors.values() for entry in table.values()):
            torch.accelerator.synchronize()
        self.pending = self.pool.submit(self.work, folder, step, copied, state, keep)
        self.stall = time.perf_counter() - began

    def copy(self, key: str, entry: Tensor | Piece) -> Tensor | Piece:
        """The same on the host, in memory that no update reaches; on its way there, if it comes from an accelerator."""
        tensor = tensor_of(entry).detach()
        host = self.copies.get(key)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            host = self.copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=True)
        beat()
        return entry._replace(tensor=host) if isinstance(entry, Piece) else host

    def work(self, folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor | Piece]], state: Mapping[str, Any],
             keep: int | None) -> Path:
        began = time.perf_counter()
        try:
            with apart(self.pulse):
                return save_state(folder, step, tensors, state, keep, self.ranks)
        finally:
            self.took = time.perf_counter() - began

    def settled(self, wait: bool) -> Path | None:
        """The state that was begun, once it is on the disk. None if there is none, or if it is not finished and the caller does not
        wait. Errors: those of `save_state`, once."""
        if self.pending is None or not (wait or self.pending.done()):
            return None
        began, pending, self.pending = time.perf_counter(), self.pending, None
        try:
            wait_for(pending, self.pulse)
            return pending.result()
        finally:
            self.stall += time.perf_counter() - began

    def __str__(self) -> str:
        return f"stall {self.stall:.2f} s, written in {self.took:.1f} s"
