"""Several processes on gloo in under a second: forked from a parent that has imported torch, joined through a file.

With MODELCENTER_TEST_DEVICE=cuda the same tests run on GPUs and NCCL, a rank each. A process in which CUDA may have started cannot
be forked, and to start a GPU and its connections takes longer than most tests: these ranks are forked from a server that has
imported much and done nothing else, and stay for one test after the other (MODELCENTER_TEST_RANKS=stay: on CPUs too).
"""

import atexit
import faulthandler
import multiprocessing
import multiprocessing.reduction
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DEVICE: Any = os.environ.get("MODELCENTER_TEST_DEVICE", "cpu")
STAY = DEVICE != "cpu" or os.environ.get("MODELCENTER_TEST_RANKS") == "stay"
TIMEOUT = 100 if DEVICE != "cpu" else 500  # seconds: before pytest gives up, and after what the longest takes on a busy machine
STACKS = 20  # seconds in which ranks have written their stacks
KNOWN = ["zoo", "transformers", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]  # to the server

if DEVICE == "cpu":
    # A process whose autograd has threads cannot be forked for a backward. It starts them once, at the first backward, for the
    # devices there are: none now, eight once FakeTensorMode has shown a torch built for CUDA its guard of GPUs that are not there.
    torch.ones(1, requires_grad=True).sum().backward()


def spawn(ranks: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(rank, *args)` in `ranks` processes; the first error of any rank, with its traceback, is raised here."""
    if STAY:
        stay(ranks, work, args)
        return
    context: Any = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(ranks)]
        jobs = [
            context.Process(target=enter, args=(rank, ranks, folder, ends[rank][1], work, args), daemon=True)
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        error = first_error([end for end, _ in ends], jobs, Path(folder))
        for job in jobs:
            job.terminate() if error else job.join(TIMEOUT)
        assert error is None, error


def first_error(pipes: list[Any], jobs: list[Any], folder: Path, limit: float = TIMEOUT) -> str | None:
    """What the first rank that failed has said; of ranks that say nothing, where they stand."""
    left = {pipe: rank for rank, pipe in enumerate(pipes)}
    while left:
        ready = wait(list(left), limit)
        if not ready:
            return f"ranks {sorted(left.values())} said nothing for {limit} s\n" + stacks(jobs, folder)
        for pipe in ready:
            rank = left.pop(pipe)  # type: ignore[call-overload]
            try:
                error = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                jobs[rank].join(TIMEOUT)
                error = f"rank {rank} has ended, with {jobs[rank].exitcode}"
            if error is not None:
                return str(error)
    return None


def full(x: Any, shape: Sequence[int] | None = None) -> Tensor:
    """What the ranks hold of `x` together, on the CPU; with a `shape`, without the rows that only pad it."""
    whole: Tensor = (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu()
    return whole if shape is None else whole[tuple(slice(0, n) for n in shape)]


def stacks(jobs: list[Any], folder: Path) -> str:
    """Where each rank stands that still can say so: all of it was written when nothing comes any more for a second."""
    said = {rank: folder / f"{rank}.txt" for rank in range(len(jobs))}
    asked = [said[rank] for rank, job in enumerate(jobs) if job.is_alive()]
    for job in jobs:
        if job.is_alive():
            os.kill(job.pid, signal.SIGUSR1)
    before, until = None, time.monotonic() + STACKS
    while (there := [file.stat().st_size if file.exists() else 0 for file in asked]) != before or not all(there):
        if time.monotonic() > until:
            break
        before = there
        time.sleep(1)
    return "\n".join(f"rank {rank}:\n{file.read_text()[-6000:]}" for rank, file in said.items() if file.exists())


def connect(rank: int, ranks: int, folder: str) -> None:
    """Be one of the ranks that meet in `folder`."""
    faulthandler.register(signal.SIGUSR1, (Path(folder) / f"{rank}.txt").open("w"))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="localhost", MASTER_PORT="0")  # fmt: skip
    if DEVICE != "cpu":
        torch.accelerator.set_device_index(rank)
    backend = "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:{dist.get_default_backend_for_device(DEVICE)}"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)


def enter(rank: int, ranks: int, folder: str, pipe: Any, work: Callable[..., None], args: Any) -> None:
    try:
        connect(rank, ranks, folder)
        work(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(None)
    except BaseException:
        pipe.send(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(0)  # a forked child must not run the parent's clean-up


# --------------------------------------------------------------------------------------------------- ranks that stay


class Staying:
    """Ranks that do one thing after the other."""

    def __init__(self, ranks: int) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(KNOWN)
        self.folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pipes]
        self.jobs = [context.Process(target=serve, args=(rank, ranks, self.folder.name, theirs), daemon=True)
                     for rank, (_, theirs) in enumerate(pipes)]  # fmt: skip
        for job, (_, theirs) in zip(self.jobs, pipes, strict=True):
            job.start()
            theirs.close()

    def do(self, work: Callable[..., None], args: Any, limit: float) -> str | None:
        """The first error of any rank, if there is one."""
        asked = {name: value for name, value in os.environ.items() if name.startswith("MODELCENTER_TEST_")}
        for pipe in self.pipes:
            pipe.send((asked, work, args))
        return first_error(self.pipes, self.jobs, Path(self.folder.name), limit)

    def end(self) -> None:
        for job in self.jobs:
            job.kill()  # a rank whose collective waits hears nothing else
            job.join()
        self.folder.cleanup()


staying: dict[int, Staying] = {}  # by their number


def stay(ranks: int, work: Callable[..., None], args: Any, limit: float = TIMEOUT) -> None:
    """`spawn` for ranks that are there already, or that are started and stay. Those of which one has failed, or says nothing for
    `limit` seconds, are ended: others would wait for it, and what comes next begins with new ones."""
    if ranks not in staying:
        staying[ranks] = Staying(ranks)
        atexit.register(lambda: ranks in staying and staying.pop(ranks).end())
    error: str | None = "interrupted"
    try:
        error = staying[ranks].do(work, args, limit)
    finally:
        if error is not None:
            staying.pop(ranks).end()
    assert error is None, error


def serve(rank: int, ranks: int, folder: str, pipe: Any) -> None:
    """Do what is asked for, until nobody is there to ask."""
    error = None
    try:
        connect(rank, ranks, folder)
    except BaseException:
        error = f"rank {rank}:\n{traceback.format_exc()}"
    while True:
        try:
            asked = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            if error is None:
                with kept():
                    environment, work, args = multiprocessing.reduction.ForkingPickler.loads(asked)
                    os.environ.update(environment)  # what the test has told its ranks by that
                    work(rank, *args)
                    dist.barrier()
        except BaseException:
            error = f"rank {rank}:\n{traceback.format_exc()}"
        pipe.send(error)


@contextmanager
def kept() -> Iterator[None]:
    """What is changed meanwhile of modules, of the environment and of how torch computes is then as it was before."""
    ours = {name: module for name, module in sys.modules.items() if name == "torch" or name.partition(".")[0] == "modelcenter"}
    modules = [(vars(module), dict(vars(module))) for module in ours.values()]
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    for now, before in modules:
        now.update(before)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    if DEVICE != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
