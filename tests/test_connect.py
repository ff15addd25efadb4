"""What is wrong between ranks is said by name, in a line, before anything waits for ever."""

import fcntl
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import modelcenter as mc
from modelcenter.__main__ import main
from modelcenter.parallel import connect
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.rollcall import CALL, RollCall
from modelcenter.train import loop
from modelcenter.train.session import Session

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
LATE = 250.0  # seconds: longer than ranks that are there need to find each other on however busy a machine
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MODELCENTER_STORE",
         "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip


PORTS = count()


def free_port() -> int:
    """One that is given to nobody who asks for any, as other tests do meanwhile, nor to another process of these tests."""
    while True:
        port = 20000 + (101 * os.getpid() + next(PORTS)) % 12000
        if not connect.occupied(port):
            return port


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a launcher's words into the environment: those of rank 1 of 2, and changes."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def tell(**changes: str | None) -> None:
        usual = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for name, value in {**usual, **changes}.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)

    return tell


def machine(timeout: float = 1) -> Machine:
    return Machine(device="cpu", threads=1, fsdp=2, timeout=timeout)


@pytest.mark.parametrize(("changes", "text"), [
    ({"RANK": None}, r"environment: RANK: missing; a number from 0 to 1"),
    ({"RANK": "2"}, r"environment: RANK: '2'; a number from 0 to 1"),
    ({"RANK": "one"}, r"environment: RANK: 'one'"),
    ({"WORLD_SIZE": None}, r"environment: WORLD_SIZE: missing"),
    ({"WORLD_SIZE": "4"}, r"environment: WORLD_SIZE: 4, for a machine of 2 ranks"),
    ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"environment: LOCAL_RANK: '2'; a number from 0 to 1"),
    ({"LOCAL_RANK": "-1"}, r"environment: LOCAL_RANK: '-1'"),
    ({"MASTER_ADDR": None}, r"environment: MASTER_ADDR: missing"),
    ({"MASTER_ADDR": "no.such.host.invalid"}, r"environment: MASTER_ADDR: 'no\.such\.host\.invalid', a name unknown here"),
    ({"MASTER_PORT": None}, r"environment: MASTER_PORT: missing"),
    ({"MASTER_PORT": "70000"}, r"environment: MASTER_PORT: '70000'; a number from 1 to 65535"),
    ({"GLOO_SOCKET_IFNAME": "eth77"}, r"environment: GLOO_SOCKET_IFNAME: 'eth77'; an interface of this machine: .*\blo\b"),
    ({"NCCL_SOCKET_IFNAME": "=l"}, r"environment: NCCL_SOCKET_IFNAME: '=l'; an interface of this machine"),
    ({}, r"environment: MASTER_ADDR: nobody answers at 127\.0\.0\.1:\d+ within 1 s \(Connection refused\)"),
])  # fmt: skip
def test_what_is_wrong_is_named(changes: dict[str, str | None], text: str, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told(**changes)
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any) -> Any:
        """Nobody out there is asked."""
        if host.endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(mc.InputError, match=text):
        connect.connected(CPU, machine()).__enter__()
    assert not dist.is_initialized()


@pytest.mark.parametrize("value", ["l", "=lo", "^docker,eth", "nothing,lo"])
def test_interfaces_as_nccl_reads_them(value: str, told: Any) -> None:
    told(NCCL_SOCKET_IFNAME=value)
    connect.check_interfaces()


def test_what_a_graph_sends_is_registered_where_that_is_wanted_and_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is told not to by default, and what is known to stand still is refused."""
    for name in ("NCCL_GRAPH_REGISTER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    connect.check_registration()
    assert os.environ.get("NCCL_GRAPH_REGISTER") == "0"
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    wanted = "NCCL_GRAPH_REGISTER: '1' beside expandable_segments:True; 0, or PYTORCH_ALLOC_CONF=expandable_segments:False"
    with pytest.raises(mc.InputError, match=wanted):
        connect.check_registration()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")  # the newer name has the last word
    connect.check_registration()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


def test_a_port_that_another_program_has(told: Any) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        told(RANK="0", MASTER_PORT=str(other.getsockname()[1]))
        with pytest.raises(mc.InputError, match=rf"MASTER_PORT: {other.getsockname()[1]}, which is in use on this machine"):
            connect.connected(CPU, machine()).__enter__()


def test_another_program_that_answers(told: Any) -> None:
    """It takes the connection and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        told(MASTER_PORT=str(other.getsockname()[1]))
        with pytest.raises(mc.InputError, match=r"MASTER_ADDR: what answers at 127\.0\.0\.1:\d+ is not the first"):
            connect.connected(CPU, machine()).__enter__()


# ------------------------------------------------------------------------------------------------------ what ranks say


def rank_of(rank: int, size: int, port: int, pipe: Any, act: Callable[[int], None]) -> None:
    connect.PATIENCE = LATE  # of the first rank, until the others have heard: as soon as they are given a processor
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("MODELCENTER_STORE", None)
    try:
        act(rank)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        degrees = dict.fromkeys(connect.DEGREES, 1) | {"fsdp": int(os.environ.get("FSDP", "1"))}
        store = connect.meet(rank, size, LATE, os.environ.get("DEVICE", "cpu"), degrees)
        store.add("left", 1)
        while rank == 0 and store.add("left", 0) < size:  # the first rank has the store
            time.sleep(0.02)
        pipe.send("met")
    except mc.InputError as error:
        pipe.send(f"{error}{'; once more' * (error.status == 75)}")
    except BaseException as error:
        pipe.send(f"not a line: {error!r}")
    os._exit(0)


def meeting(ranks: int, act: Callable[[int], None] = lambda rank: None, only: Any = None) -> list[str]:
    """What each of `ranks`, or of those in `only`, says about meeting the others."""
    context, port = get_context("fork"), free_port()
    pipes, jobs = [], []
    for rank in only or range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        jobs.append(context.Process(target=rank_of, args=(rank, ranks, port, theirs, act), daemon=True))
        jobs[-1].start()
        pipes.append(ours)
    said = [pipe.recv() if pipe.poll(LATE) else "nothing" for pipe in pipes]
    for job in jobs:
        job.kill()
    return said


def test_ranks_meet() -> None:
    assert meeting(3) == ["met"] * 3


@pytest.mark.parametrize("what", ["torch", "modelcenter"])
def test_versions_that_differ(what: str) -> None:
    def act(rank: int) -> None:
        if rank == 1:
            (torch if what == "torch" else connect).__version__ = "0.0.7"  # type: ignore[attr-defined]

    said = meeting(3, act)
    assert len(set(said)) == 1 and re.match(rf"environment: {what}: \S+ on rank 0 \(.*\) and 0\.0\.7 on rank 1 ", said[0]), said


def test_sizes_that_differ() -> None:
    def act(rank: int) -> None:
        if rank == 1:
            os.environ["WORLD_SIZE"] = "4"

    said = meeting(2, act)
    assert len(set(said)) == 1 and re.match(r"environment: WORLD_SIZE: 2 on rank 0 \(.*\) and 4 on rank 1 ", said[0]), said
    assert said[0].endswith("the same everywhere"), said


def test_a_machine_whose_gpus_are_not_found() -> None:
    """One rank would compute on its processor, and the others wait for it in a backend that it lacks."""

    def act(rank: int) -> None:
        os.environ["DEVICE"] = "cpu" if rank == 1 else "cuda"

    said = meeting(3, act)
    assert len(set(said)) == 1 and re.match(r"environment: device: cuda on rank 0 \(.*\) and cpu on rank 1 ", said[0]), said


def test_degrees_that_differ() -> None:
    """Each has as many ranks, who would wait for each other in groups that the others do not make."""

    def act(rank: int) -> None:
        os.environ["FSDP"] = "2" if rank == 2 else "4"

    said = meeting(4, act)
    assert len(set(said)) == 1 and re.match(r"environment: machine\.fsdp: 4 on rank 0 \(.*\) and 2 on rank 2 ", said[0]), said
    assert said[0].endswith("the same everywhere"), said


def waits_no_longer(rank: int, than: Callable[[Any], None]) -> None:
    """The first of the ranks: its time is up when `than`, called with their store, returns."""
    real = connect.verdict

    def verdict(store: Any, size: int, until: float, seconds: float) -> Any:
        than(store)
        return real(store, size, time.monotonic(), seconds)

    if rank == 0:
        connect.verdict = verdict


def there(store: Any, key: str) -> None:
    store.wait([key], timedelta(seconds=LATE))


def test_a_rank_that_does_not_come() -> None:
    said = meeting(3, lambda rank: waits_no_longer(rank, lambda store: there(store, "rank/2")), only=(0, 2))
    assert len(set(said)) == 1 and said[0].startswith("environment: WORLD_SIZE: 3, but rank 1 did not come within 250 s"), said
    assert said[0].endswith("one MASTER_PORT; once more"), said


def test_a_rank_that_is_there_twice() -> None:
    came, slept = get_context("fork").Event(), [0.0]

    def seen(store: Any) -> None:
        there(store, "rank/1")
        came.set()
        there(store, connect.AGAIN)

    def act(rank: int) -> None:
        waits_no_longer(rank, seen)
        if rank == 2:
            assert came.wait(LATE)
            os.environ["RANK"] = "1"
            # a module, as far as it is asked: the first pause takes all the time that the rank has
            connect.time = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(slept), sleep=lambda _: slept.append(2 * LATE))  # type: ignore[assignment]

    said = meeting(3, act)
    assert re.match(r"environment: RANK: 1, which process \d+ on .* has too; each rank once", said[2]), said
    assert said[0].startswith("environment: WORLD_SIZE: 3, but rank 2 did not come"), said


class Called(RollCall):
    """However late a rank hears the call, it answers; `silent` has been stopped. The first, with whom their store goes, ends behind
    all others, who say in `folder` why they do. Where it is stopped itself, the store's silence is timed."""

    def __init__(self, folder: Path, silent: int | None, *who: Any) -> None:
        super().__init__(*who)
        self.silent = silent
        self.others = [folder / str(rank) for rank in range(1, len(self.keys)) if rank != silent]
        if silent != 0:
            self.last.interval = LATE

    def call(self, store: Any) -> NoReturn:
        store.set(CALL, "")
        store.set(self.mine, "")
        store.wait([key for rank, key in enumerate(self.keys) if rank != self.silent], timedelta(seconds=LATE))
        super().call(store)

    def end(self, found: str, wanted: str = "") -> NoReturn:
        while self.first and not all(file.exists() and file.stat().st_size for file in self.others):
            time.sleep(0.02)
        super().end(found, wanted)


def connecting(rank: int, port: int, folder: Path, how: str) -> None:
    """One of three ranks that are to connect within a second, where one is stopped or comes to no end; or one fails at once."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("MODELCENTER_STORE", None)
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)
    silent = {"stopped": 1, "first": 0}.get(how)
    connect.RollCall = lambda *who: Called(folder, silent, *who[:3], LATE if how == "lost" else 1.0)  # type: ignore[assignment,misc]
    real = dist.init_process_group

    def init_process_group(*rest: Any, **options: Any) -> None:
        if how == "apart" and rank == 1:
            time.sleep(LATE)
        if how == "lost" and rank == 1:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        (folder / f"{rank} is there").touch()
        while how == "first" and rank == 0 and len(list(folder.glob("* is there"))) < 3:
            time.sleep(0.02)
        if rank == silent:
            os.kill(os.getpid(), signal.SIGSTOP)
        real(*rest, **options)

    dist.init_process_group = init_process_group
    sys.stderr = os.fdopen(2, "w", buffering=1)
    with connect.connected(CPU, Machine(device="cpu", threads=1, fsdp=3, timeout=LATE)):
        os._exit(1)


REACH = r"3, who have met, but do not reach each other{} s after all had come; GLOO_SOCKET_IFNAME: an interface that .*"


LOCKED = """
import sys, torch
from modelcenter.parallel import connect
from modelcenter.parallel.machine import Machine
real, connect.LOCKED = connect.open_store, 0.5

def opened(*rest):
    store = real(*rest)
    print("open", flush=True)
    sys.stdin.readline()
    return store

connect.open_store = opened
with connect.connected(torch.device("cpu"), Machine(fsdp=2, device="cpu", timeout=1)):
    pass
"""


def test_a_file_whose_lock_a_stopped_rank_holds_is_given_up(tmp_path: Path) -> None:
    """torch waits for it without a limit."""
    store = tmp_path / "store"
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT),
                        "MODELCENTER_STORE": str(store)}  # fmt: skip
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LOCKED], env=env, text=True, **pipes) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "open\n"
        with store.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _, said = rank.communicate("\n", LATE)
    line = "modelcenter: error: environment: WORLD_SIZE: the store in which the ranks meet has not answered for 1.5 s; start all of"
    assert rank.returncode == 75 and said.startswith(line), said


@pytest.mark.parametrize(("how", "stopped", "text"), [
    ("stopped", [1], r"3, but rank 1 does not answer, \d+ s after all had come; start all .*; they have machine\.timeout, 1 s"),
    ("first", [0], r"the store in which the ranks have met does not answer, \d+ s after all had come; start all .*"),
    ("lost", [], REACH.format(r"( \(Connection closed by peer \[127\.0\.0\.1\]:1\))?, \d+")),
    ("apart", [], REACH.format(r", \d+")),
], ids=["stopped", "first", "lost", "apart"])  # fmt: skip
def test_a_rank_that_is_lost_while_they_connect(how: str, stopped: list[int], text: str, tmp_path: Path) -> None:
    """Through a store that the first rank has: the others end, each with a line that says who it was as far as they can know."""
    context, port = get_context("fork"), free_port()
    jobs = [context.Process(target=connecting, args=(rank, port, tmp_path, how), daemon=True) for rank in range(3)]
    for job in jobs:
        job.start()
    until = time.monotonic() + 100
    for rank in {0, 1, 2} - set(stopped):
        jobs[rank].join(max(0.0, until - time.monotonic()))
    for job in jobs:
        job.kill()
        job.join()
    assert [job.exitcode for job in jobs] == [-signal.SIGKILL if rank in stopped else 75 for rank in range(3)]
    for rank in {0, 1, 2} - set(stopped):
        said = (tmp_path / str(rank)).read_text()
        assert re.fullmatch(f"modelcenter: error: environment: WORLD_SIZE: {text}\n", said), (rank, said)
    assert how != "lost" or "(Connection closed by peer [127.0.0.1]:1)" in (tmp_path / "1").read_text()


def losing(rank: int, port: int, folder: Path, victim: int) -> None:
    """One of two ranks as torchrun starts them; `victim` is killed after two steps."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.pop("MODELCENTER_STORE", None)
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    loop.plot_loss = lambda folder: "not drawn"
    loop.verdict = lambda *rest, **options: "memory: not asked"  # by each rank anew, which is forked from who has not
    real = Session.step

    def step(self: Session, *rest: Any) -> Any:
        if rank == victim and self.at.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *rest)

    Session.step = step  # type: ignore[method-assign]
    os._exit(main(["train", str(folder / "r.yaml"), "machine.fsdp=2", "machine.device=cpu", "machine.threads=1"]))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_lost_later_is_a_line_too(victim: int, tmp_path: Path) -> None:
    """With no launcher of ours to say it, and the status that this one would give."""
    import torch._dynamo  # here once, and not in each rank
    import torch.distributed.fsdp  # noqa: F401
    from test_ranks import run_of

    from modelcenter.config import dump_yaml, to_dict
    from modelcenter.registry import families

    families()
    (tmp_path / "r.yaml").write_text(dump_yaml(to_dict(run_of(tmp_path, batch=4))))
    context, port = get_context("fork"), free_port()
    jobs = [context.Process(target=losing, args=(rank, port, tmp_path, victim), daemon=True) for rank in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(LATE)
        job.kill()
        job.join()
    assert [jobs[victim].exitcode, jobs[1 - victim].exitcode] == [-signal.SIGKILL, 75]
    said = (tmp_path / str(1 - victim)).read_text()
    assert said.count("modelcenter: another rank has ended or hangs: ") == 1 and "Traceback" not in said, said


def kept_in_memory(pipe: Any) -> None:
    """Two models in host memory, one after the other gone; then another."""
    small = {"layers": 1, "dim": 8, "heads": 2, "vocab": 11, "positions": 8}
    models = [mc.build("gpt2", config=small, machine=Machine(device="cpu", offload=True)) for _ in range(2)]
    said = []
    for _ in range(2):
        models[0].generate(torch.tensor([[1, 2]]), max_new_tokens=1)
        said.append(dist.is_initialized())
        del models[0]
        gc.collect()
    said.append(dist.is_initialized())
    model = mc.build("gpt2", config=small, machine=Machine(device="cpu", offload=True))
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=1)
    pipe.send([*said, dist.is_initialized()])
    os._exit(0)


def test_the_group_of_one_process_goes_with_its_last_model() -> None:
    """What comes after that in the process would take itself for one of several ranks."""
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    job = context.Process(target=kept_in_memory, args=(theirs,), daemon=True)
    job.start()
    theirs.close()
    assert ours.poll(LATE) and ours.recv() == [True, True, False, True]
    job.join()


def test_the_command_says_it_in_a_line(tmp_path: Path, told: Any) -> None:
    """As torchrun would start it, with a first rank that is not there."""
    from test_ranks import run_of

    from modelcenter.config import dump_yaml, to_dict

    (tmp_path / "r.yaml").write_text(dump_yaml(to_dict(run_of(tmp_path))))
    told()
    command = [sys.executable, "-m", "modelcenter", "train", str(tmp_path / "r.yaml"), "machine.fsdp=2", "machine.device=cpu",
               "machine.timeout=1"]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=250)
    assert done.returncode == 75 and done.stderr.count("\n") == 1, done.stderr  # to be tried again
    assert re.match(r"modelcenter: error: environment: MASTER_ADDR: nobody answers at ", done.stderr), done.stderr
