"""Several processes on gloo in under a second: forked from a parent that has imported torch, joined through a file.

With MODELCENTER_TEST_DEVICE=cuda the same tests run on GPUs and NCCL, a rank each; a process in which CUDA may have started cannot
be forked, so these are forked from a server that has imported the test's file and done nothing else.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

DEVICE: Any = os.environ.get("MODELCENTER_TEST_DEVICE", "cpu")
TIMEOUT = 240  # seconds: before pytest gives up, and after what the longest takes on a machine with ten times its work

if DEVICE == "cpu":
    # A process whose autograd has threads cannot be forked for a backward. It starts them once, at the first backward, for the
    # devices there are: none now, eight once FakeTensorMode has shown a torch built for CUDA its guard of GPUs that are not there.
    torch.ones(1, requires_grad=True).sum().backward()


def spawn(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(rank, *args)` in `ranks` processes; the first error of any rank, with its traceback, is raised here."""
    context: Any = multiprocessing.get_context("fork" if DEVICE == "cpu" else "forkserver")
    if DEVICE != "cpu":
        context.set_forkserver_preload([work.__module__])  # for the first: it serves this process as long as that lives
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(ranks)]
        jobs = [
            context.Process(target=enter, args=(rank, ranks, folder, ends[rank][1], work, args), daemon=True)
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        left = {end[0]: rank for rank, end in enumerate(ends)}
        error = None
        while left and error is None:
            ready = wait(list(left), TIMEOUT)
            if not ready:
                error = f"ranks {sorted(left.values())} said nothing for {TIMEOUT} s"
            for pipe in ready:
                error = error or pipe.recv()  # type: ignore[union-attr]
                left.pop(pipe)  # type: ignore[call-overload]
        for job in jobs:
            job.terminate() if error else job.join(TIMEOUT)
        assert error is None, error


def enter(rank: int, ranks: int, folder: str, pipe: Any, work: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="localhost", MASTER_PORT="0")  # fmt: skip
    try:
        if DEVICE != "cpu":
            torch.accelerator.set_device_index(rank)
        backend = "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:{dist.get_default_backend_for_device(DEVICE)}"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        work(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(None)
    except BaseException:
        pipe.send(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(0)  # a forked child must not run the parent's clean-up
