"""How a process joins the others of its run. Every problem is reported by name, and nobody waits for ever.

The launcher sets environment variables for each process: RANK, WORLD_SIZE, LOCAL_RANK, and where to find the first rank:
MASTER_ADDR and MASTER_PORT, or a file on a single machine. There each process writes its name and its versions, and the first rank
compares them. Only then do they connect to each other, because a connection between mismatched processes would hang or fail with an
obscure message.
"""

import atexit
import json
import os
import platform
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .. import __version__
from ..errors import InputError, LateError, message, refuse, tell
from .machine import Machine
from .ranks import named
from .rollcall import RollCall, limited
from .variable import ALLOCATOR, GROWING, check_world, variable
from .watch import AGAIN, FIRST

stores: Any = dist  # whose annotations do not name them
RESOLVE = 60.0  # seconds in which a host's name may become known: those of containers appear with them
PATIENCE = 3.0  # seconds after which a process says for what it waits
RETRY = 0.5  # seconds between two looks
DEGREES = "replicate", "fsdp", "tensor_parallel"  # which ranks must have in common, or they would make other groups
LOCKED = 30.0  # seconds beyond those in which all are to come, after which a store is given up that answers nobody


@contextmanager
def connected(device: torch.device, machine: Machine) -> Iterator[None]:
    """Join the ranks of `machine`: with the device's backend for its tensors, and gloo for messages from host to host. The group is
    left when the process ends. Errors: `InputError` if not all ranks have reported, and match, after `machine.timeout` seconds;
    they then have the same time to connect, and to make the groups that are made inside (`RollCall`)."""
    size = variable("WORLD_SIZE", 1, 2**20)
    rank, backend = variable("RANK", 0, size - 1), dist.get_default_backend_for_device(device.type)
    variable("LOCAL_RANK", 0, variable("LOCAL_WORLD_SIZE", 1, 2**20, default=2**20) - 1, default=0)
    check_world(machine.ranks)
    check_interfaces()
    if device.type == "cuda":
        check_registration()
    with limited(machine.timeout + LOCKED):
        store = meet(rank, size, machine.timeout, device.type, {key: getattr(machine, key) for key in DEGREES})
    both = backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    # Whoever watches over the steps speaks first; this limit is for what nobody watches.
    limit = timedelta(seconds=FIRST * machine.timeout + 60)
    with RollCall(store, rank, size, machine.timeout):
        dist.init_process_group(both, store=store, rank=rank, world_size=size, timeout=limit)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        yield


@contextmanager
def by_itself() -> Iterator[None]:
    """Make the process group of a single process, through which it sends nothing. It is left when the last model that is `kept_by`
    goes, or the process ends."""
    global _own
    dist.init_process_group("gloo", store=stores.HashStore(), rank=0, world_size=1)
    _own = dist.group.WORLD
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    yield


_own: Any = None  # the group that `by_itself` has made
_models = 0  # that need it


def kept_by(model: nn.Module) -> None:
    """Keep the group of `by_itself` for as long as `model` is there: whatever else the process then does would take itself for one
    of several ranks."""
    global _models
    if _own is not None and _own is dist.group.WORLD:
        _models += 1
        weakref.finalize(model, part)


def part() -> None:
    """A model that needed the group of `by_itself` has gone."""
    global _own, _models
    _models -= 1
    if not _models:
        if _own is dist.group.WORLD:
            dist.destroy_process_group()
        _own = None


def check_interfaces() -> None:
    """Refuse the name of a network interface that this machine does not have."""
    there = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in there:
            refuse("environment", "GLOO_SOCKET_IFNAME", repr(name), f"an interface of this machine: {', '.join(there)}")
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")  # names begin so; `=`: are so; `^`: do not
    exact, names = wanted.startswith("="), wanted.removeprefix("=").split(",")
    if wanted and wanted[0] != "^" and not any(name == n if exact else n.startswith(name) for name in names for n in there):
        refuse("environment", "NCCL_SOCKET_IFNAME", repr(wanted), f"an interface of this machine: {', '.join(there)}")


def check_registration() -> None:
    """NCCL would register the buffers that a CUDA graph sends, and assumes that each lies in one piece of memory. With expandable
    segments a buffer may lie in two, and ranks then wait for each other for ever (pytorch/pytorch#165419). So registration is
    turned off, unless the environment asks for it, which is refused in that case."""
    name = "NCCL_GRAPH_REGISTER"
    found, memory = os.environ.setdefault(name, "0"), next(filter(None, map(os.environ.get, ALLOCATOR)), "")
    if found != "0" and GROWING in memory:
        refuse("environment", name, f"{found!r} beside {GROWING}", f"0, or {ALLOCATOR[0]}={GROWING.replace('True', 'False')}")


def meet(rank: int, size: int, seconds: float, device: str, degrees: Mapping[str, int]) -> Any:
    """The store through which the ranks have found each other; when it is returned all of them are there, and match."""
    until = time.monotonic() + seconds
    me = {"host": platform.node(), "pid": os.getpid(),
          "WORLD_SIZE": size, "modelcenter": __version__, "torch": torch.__version__, "device": device,
          **{f"machine.{key}": n for key, n in degrees.items()}}  # fmt: skip
    mine = json.dumps(me)
    found = ""
    while True:
        try:
            store = open_store(rank, size, until - time.monotonic(), seconds)
            found = store.compare_set(f"rank/{rank}", "", mine).decode()
            if found == mine:
                break
            # A process of this rank has been here: of a run that is ending, whose ranks may not know it, or one started twice.
            store.set(AGAIN, str(rank))
        except (InputError, RuntimeError):
            if not found:
                raise
        if time.monotonic() > until:
            other = json.loads(found)
            refuse("environment", "RANK", f"{rank}, which process {other['pid']} on {other['host']} has too", "each rank once")
        time.sleep(RETRY)
    key = "verdict"
    if rank == 0:
        said = verdict(store, size, until, seconds)
        store.set(key, json.dumps(said))
        if said:
            linger(store, size)
    else:
        try:
            store.wait([key], timedelta(seconds=max(RETRY, until - time.monotonic()) + PATIENCE))
        except RuntimeError:
            late("RANK", f"0 has not come within {seconds:g} s", "start all ranks; one of them is the first")
        said = json.loads(store.get(key))
        store.add("heard", 1)
    if said:
        raise (LateError if said[0] else InputError)(message("environment", *said[1:]))
    return store


def late(key: str, found: str, wanted: str) -> NoReturn:
    """`refuse`, for a process that did not report in time."""
    raise LateError(message("environment", key, found, wanted))


def verdict(store: Any, size: int, until: float, seconds: float) -> tuple[bool, str, str, str] | tuple[()]:
    """What the first rank finds wrong with the others: whether one is late, then key, found and wanted."""
    keys = [f"rank/{rank}" for rank in range(size)]
    began = time.monotonic()
    said = False
    while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        if time.monotonic() > until:
            found = f"{size}, but {named(missing)} did not come within {seconds:g} s"
            return True, "WORLD_SIZE", found, "start them all, with one MASTER_ADDR and one MASTER_PORT"
        if not said and time.monotonic() - began > PATIENCE:
            tell(f"modelcenter: waiting for {named(missing)} of {size}, {seconds:g} s at most")
            said = True
        time.sleep(0.02 if time.monotonic() - began < PATIENCE else RETRY)
    all_of_them = [json.loads(store.get(key)) for key in keys]
    for key in ("WORLD_SIZE", "modelcenter", "torch", "device", *(f"machine.{key}" for key in DEGREES)):
        odd = next((rank for rank, one in enumerate(all_of_them) if one[key] != all_of_them[0][key]), None)
        if odd is not None:
            two = [f"{all_of_them[rank][key]} on rank {rank} ({all_of_them[rank]['host']})" for rank in (0, odd)]
            return False, key, " and ".join(two), "the same everywhere"
    return ()


def linger(store: Any, size: int) -> None:
    """Keep the first rank, whose end would end the store, until the others have read why the run is refused."""
    until = time.monotonic() + PATIENCE
    came = sum(store.check([f"rank/{rank}"]) for rank in range(1, size))
    while store.add("heard", 0) < came and time.monotonic() < until:
        time.sleep(0.05)


def open_store(rank: int, size: int, left: float, seconds: float) -> Any:
    """The store in which the ranks meet. `left` of `seconds` remain."""
    path = os.environ.get("MODELCENTER_STORE")
    if path is not None:
        return stores.FileStore(path, size)
    host, port = os.environ.get("MASTER_ADDR", ""), variable("MASTER_PORT", 1, 2**16 - 1)
    if not host:
        refuse("environment", "MASTER_ADDR", "missing", "start with torchrun, one process a rank")
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    resolve(host, port, min(left, RESOLVE))
    if not serves:
        knock(host, port, rank, left, seconds)
    elif occupied(port):
        refuse("environment", "MASTER_PORT", f"{port}, which is in use on this machine ({platform.node()})", "another port")
    wait = max(RETRY, min(left, RESOLVE))
    made: list[Any] = []

    def make() -> None:
        with suppress(RuntimeError):
            made.append(stores.TCPStore(host, port, size, serves, timedelta(seconds=wait), wait_for_workers=False))

    # In a thread of its own: it would wait without limit for the words of another program.
    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    maker.join(wait + PATIENCE)
    if not made:
        what = "not this machine, which is to serve there" if serves else "not the first rank of this run"
        refuse("environment", "MASTER_ADDR", f"what answers at {host}:{port} is {what}", "the first rank's address, a free port")
    return made[0]


def resolve(host: str, port: int, seconds: float) -> None:
    """Refuse a host name that cannot be resolved in time."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until or not isinstance(error, OSError):
                refuse("environment", "MASTER_ADDR", f"{host!r}, a name unknown here ({error})", "the first rank's machine")
        time.sleep(RETRY)


def occupied(port: int) -> bool:
    """Whether another process listens at that address already."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what a run before has left half closed is free
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def knock(host: str, port: int, rank: int, left: float, seconds: float) -> None:
    """Wait until a process answers at the first rank's address."""
    began, said = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=max(RETRY, min(PATIENCE, left))).close()
            return
        except OSError as error:
            waited, why = time.monotonic() - began, error.strerror or str(error)
        if waited > left:
            late("MASTER_ADDR", f"nobody answers at {host}:{port} within {seconds:g} s ({why})",
                 "the first rank's address, started, its port open")
        if not said and waited > PATIENCE:
            tell(f"modelcenter: rank {rank} waits for the first one at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why}; "
                 f"{seconds:g} s at most")
            said = True
        time.sleep(RETRY)
