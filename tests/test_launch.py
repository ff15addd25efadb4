"""A command starts its own ranks: one answer, one error, one end for all of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_connect import free_port
from test_ranks import run_of
from torch.distributed import DistStoreError

from modelcenter.__main__ import main
from modelcenter.cli.arguments import Arguments
from modelcenter.cli.recipe import machine_of
from modelcenter.config import dump_yaml, to_dict
from modelcenter.errors import InputError
from modelcenter.parallel.device import device_of
from modelcenter.parallel.machine import Machine
from modelcenter.parallel.watch import LOST, PARENT, TORCHRUN
from modelcenter.train import launch
from modelcenter.train.interrupt import Interrupt
from modelcenter.train.loop import train
from modelcenter.train.metrics import read_rows

ROOT = Path(__file__).parents[1]
MACHINE = Machine(device="cpu", threads=1, fsdp=2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def command(folder: Path, **changes: Any) -> list[str]:
    file = folder / "r.yaml"
    file.write_text(dump_yaml(to_dict(run_of(folder, **changes))))
    return ["train", str(file), "machine.fsdp=2", "machine.device=cpu", "machine.threads=1"]


def once_it_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[list[Any]], None]) -> None:
    """Call `act` with the processes of the ranks when the run in `folder` has done a step."""
    ranks: list[Any] = []
    real = launch.start

    def start(*rest: Any) -> Any:
        ranks.append(real(*rest))
        return ranks[-1]

    def watch() -> None:
        while not any("loss" in row for row in read_rows(folder / "metrics.jsonl")):
            time.sleep(0.05)
        act(ranks)

    monkeypatch.setattr(launch, "start", start)
    Thread(target=watch, daemon=True).start()


ENDLESS = {"max_steps": 10**6, "logging_steps": 1, "eval_steps": None, "save_steps": None}


@pytest.mark.slow
def test_a_signal_is_for_all_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    with monkeypatch.context() as patch:
        once_it_steps(tmp_path / "out", patch, lambda ranks: os.kill(os.getpid(), signal.SIGINT))
        assert main([*command(tmp_path, **ENDLESS, **{"schedule.name": "constant"}), "--json"]) == 0
    found = capfd.readouterr()
    answer = json.loads(found.out)
    (state,) = (tmp_path / "out").glob("step-*")
    assert answer["stopped"] and answer["step"] == int(state.name[5:])
    assert f"stopped after step {answer['step']}" in found.err
    steps = answer["step"] + 2
    recipe = run_of(tmp_path, **{**ENDLESS, "schedule.name": "constant", "max_steps": steps})
    run = train(recipe, MACHINE)  # from Python, and to its end
    assert (run.step, run.stopped, run.model, run.metrics["step"]) == (steps, False, None, steps)
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_ends_the_others(victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def act(ranks: list[Any]) -> None:
        processes.extend(ranks)
        ranks[victim].kill()

    once_it_steps(tmp_path / "out", monkeypatch, act)
    assert main(command(tmp_path, **ENDLESS)) == 128 + signal.SIGKILL
    assert all(process.poll() is not None for process in processes)
    said = capfd.readouterr().err
    assert said.count("modelcenter: error:") == 1 and f"modelcenter: error: rank {victim} was ended by signal 9" in said
    assert "Traceback" not in said


def saved(folder: Path) -> None:
    """Wait until the run in `folder` has saved a state."""
    while not list(folder.glob("step-*")):
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_run_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """From its last state, to the end, as often as the machine says."""
    out = tmp_path / "out"
    once_it_steps(out, monkeypatch, lambda ranks: (saved(out), ranks[1].kill()))
    changes = {**ENDLESS, "max_steps": 60, "save_steps": 10, "save_total_limit": 2}
    assert main([*command(tmp_path, **changes), "resume=never", "machine.restarts=1", "--json"]) == 0
    found = capfd.readouterr()
    assert json.loads(found.out)["step"] == 60
    assert "modelcenter: rank 1 was ended by signal 9; the run is restarted (0 more restarts allowed)" in found.err
    assert found.err.count("resumed from ") == 1 and "modelcenter: error" not in found.err


def test_what_a_user_has_to_mend_is_said_once_and_not_tried_again(tmp_path: Path, capfd: Any) -> None:
    assert main([*command(tmp_path, **{"data.path": str(tmp_path / "nothing.txt")}), "machine.restarts=9"]) == 2
    said = capfd.readouterr().err
    assert said.count("modelcenter: error:") == said.count("nothing.txt") == 1 and "again" not in said


def test_ranks_without_a_sequence_are_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert main([*command(tmp_path), "machine.replicate=50"]) == 2
    assert "batch: 6 sequences for 100 ranks" in capfd.readouterr().err


def test_heads_that_ranks_cannot_share_are_refused_before_any_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "once", None)
    for name, heads, found in (("gpt2", {"heads": 2}, "4, and gpt2 has 2 heads"),
                               ("llama-7b", {"heads": 4, "kv_heads": 2}, "4, and llama-7b has 2 kv_heads")):  # fmt: skip
        recipe = run_of(tmp_path, model=name, config={"layers": 1, "dim": 16, **heads})
        with pytest.raises(InputError, match=rf"^machine.tensor_parallel: {found}; a divisor of the heads"):
            train(recipe, Machine(device="cpu", threads=1, tensor_parallel=4))


@pytest.mark.parametrize("verb", ["generate", "convert", "merge", "average", "tokenize", "copy"])
def test_what_one_process_does_is_refused_to_ranks(verb: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Each of them would write the same files."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([verb, "nowhere", "out"]) == 2
    said = f"environment: WORLD_SIZE: 2, and {verb} is one process; modelcenter without a launcher, once"
    assert said in capfd.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "1")
    main([verb, "nowhere", "out"])
    assert "WORLD_SIZE" not in capfd.readouterr().err


def test_more_processes_than_the_machine_has_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """torchrun in front of the command, and a machine of one rank: each of them would do the whole run in the one folder."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([part for part in command(tmp_path) if part != "machine.fsdp=2"]) == 2
    assert "environment: WORLD_SIZE: 2, for a machine of 1 rank; start as many, or machine.fsdp=auto" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("status", "asked", "runs"), [
    (137, False, 3), (76, False, 3), (2, False, 1), (143, False, 1), (137, True, 1),
])  # fmt: skip
def test_how_often_a_run_is_started(status: int, asked: bool, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again where a user has to mend something or has asked for the end; from the second time on where it stands."""
    seen: list[str] = []

    def once(recipe: Any, *rest: Any) -> Any:
        seen.append(recipe.resume)
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
        raise launch.RankError("ended", status)

    monkeypatch.setattr(launch, "once", once)
    with pytest.raises(launch.RankError):
        launch.launch(run_of(tmp_path, resume="never"), Machine(restarts=2))
    assert seen == ["never", "auto", "auto"][:runs] and launch.to_launch(Machine(restarts=1))


@pytest.mark.parametrize(("given", "saves", "then"), [
    ("PATH", False, "PATH"), ("PATH", True, "auto"), ("never", False, "auto"), ("auto", False, "auto"),
])  # fmt: skip
def test_a_given_state_counts_until_there_is_another(given: str, saves: bool, then: str, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of its own yet a resumed run would begin anew, with random weights."""
    seen: list[str] = []

    def once(recipe: Any, *rest: Any) -> Any:
        seen.append(recipe.resume)
        if saves:
            (Path(recipe.output_dir) / "step-4").mkdir(parents=True, exist_ok=True)
        raise launch.RankError("ended", 137)

    monkeypatch.setattr(launch, "once", once)
    with pytest.raises(launch.RankError):
        launch.launch(run_of(tmp_path, resume=given), Machine(restarts=1))
    assert seen == [given, then]


@pytest.mark.slow
def test_two_launchers_make_one_run(tmp_path: Path) -> None:
    """As on two machines: each starts its half of the ranks, which meet at an address; a killed one brings both back."""
    arguments = [*command(tmp_path, **{**ENDLESS, "max_steps": 60, "save_steps": 10, "save_total_limit": 2}), "machine.restarts=2"]
    nodes = []
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    for node in range(2):
        environment = {**os.environ, **place, "NODE_RANK": str(node)}
        nodes.append(subprocess.Popen([sys.executable, "-m", "modelcenter", *arguments], env=environment, stderr=subprocess.PIPE,
                                      stdout=subprocess.DEVNULL, text=True))  # fmt: skip
    saved(tmp_path / "out")
    (rank,) = [int(pid) for pid in Path(f"/proc/{nodes[1].pid}/task/{nodes[1].pid}/children").read_text().split()]
    os.kill(rank, signal.SIGKILL)
    said = [node.communicate(timeout=250)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "resumed from" in said[0] and "the run is restarted" in said[0], said
    assert "rank 1 was ended by signal 9; the run is restarted" in said[1], said
    assert max(row["step"] for row in read_rows(tmp_path / "out" / "metrics.jsonl") if "loss" in row) == 60


@pytest.mark.parametrize(("environment", "text"), [
    ({"NNODES": "3", "NODE_RANK": "0"}, "environment: NNODES: 3, for a machine of 2 ranks"),
    ({"NNODES": "0"}, "environment: NNODES: '0'; a number from 1 to 1048576; how many machines there are\n"),
    ({"NNODES": "2"}, "environment: NODE_RANK: missing; a number from 0 to 1; which of the NNODES machines this is"),
    ({"NNODES": "2", "NODE_RANK": "2"}, "environment: NODE_RANK: '2'; a number from 0 to 1"),
    ({"NNODES": "2", "NODE_RANK": "0"}, "environment: MASTER_ADDR: missing; the first machine's name or address, on every one\n"),
    ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "environment: MASTER_PORT: missing; a number from 1 to 65535; "),
])  # fmt: skip
def test_nodes_that_cannot_be(environment: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capfd: Any) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(command(tmp_path)) == 2
    assert text in capfd.readouterr().err


def test_several_machines_for_one_rank_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A forgotten profile: each machine would do the whole run."""
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([part for part in command(tmp_path) if part != "machine.fsdp=2"]) == 2
    assert "environment: NNODES: 2, for a machine of 1 rank; a divisor of its ranks; none, for what is " in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("degrees", "environment", "text"), [
    ({"fsdp": 2}, {"LOCAL_RANK": "1"}, "machine.fsdp: 2 ranks on a host with 1 GPU; fewer ranks, or more hosts (NNODES)"),
    ({"fsdp": 2, "tensor_parallel": 4}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, "machine.tensor_parallel: 8 ranks on a host"),
    ({}, {"LOCAL_RANK": "1"}, "environment: LOCAL_RANK: '1'; a number from 0 to 0; start with torchrun, one process a rank"),
    ({"fsdp": 8}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, ""),  # whoever starts it shows each rank a GPU of its own
])  # fmt: skip
def test_more_ranks_than_gpus(degrees: dict[str, int], environment: dict[str, str], text: str,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = ""
    try:
        assert device_of(Machine(**degrees)) == torch.device("cuda", 0)  # type: ignore[arg-type]  # all of them are degrees
    except InputError as error:
        said = str(error)
    assert said.startswith(text) and bool(said) == bool(text)


@pytest.mark.slow  # tests/test_ranks.py holds evaluations of ranks to one process; here they are started by the command
def test_an_evaluation_on_ranks_is_that_of_one_process(tmp_path: Path, capfd: Any) -> None:
    train(run_of(tmp_path, max_steps=1, eval_steps=None, save_steps=None), Machine(device="cpu", threads=1))
    found = []
    for ranks in (1, 2):
        capfd.readouterr()
        assert main(["evaluate", str(tmp_path / "out"), f"machine.fsdp={ranks}", "machine.device=cpu", "--json"]) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[1] == pytest.approx(found[0], rel=1e-13) and found[0]["eval_targets"] == found[1]["eval_targets"] > 20


@pytest.mark.usefixtures("terminal")
def test_a_terminal_that_ends_asks_the_ranks_once() -> None:
    """Its second SIGHUP would be a second signal, on which they are ended without saving."""
    heard: list[int] = []
    with launch.forwarding([SimpleNamespace(send_signal=heard.append)]):  # type: ignore[list-item]  # all that is asked of a process
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(("asked", "ended"), [
    ((signal.SIGTERM, signal.SIGINT), signal.SIGKILL), ((signal.SIGINT,), signal.SIGTERM),
])  # fmt: skip
def test_who_asked_is_told_nothing_new(asked: tuple[int, ...], ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, or before a rank has begun: the status is that of one process, and that ranks were then killed is no news."""

    def once(*rest: Any) -> Any:
        for number in asked:
            os.kill(os.getpid(), number)
        raise launch.RankError(f"rank 0 was ended by signal {ended}", 128 + ended)

    monkeypatch.setattr(launch, "once", once)
    with pytest.raises(launch.RankError) as caught:
        launch.launch(run_of(tmp_path), Machine(restarts=2))
    assert caught.value.status == 128 + signal.SIGINT and caught.value.heard


def test_what_is_being_started_when_the_end_is_asked_for_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal would be lost: it comes when no rank is known yet."""
    told: list[tuple[int, int]] = []

    def start(command: Any, rank: int, mine: Any, ranks: int, place: Path, alone: bool) -> Any:
        (place / f"{rank}.json").write_text("{}")
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(poll=lambda: 0, kill=bool, wait=bool, send_signal=lambda number: told.append((rank, number)))

    monkeypatch.setattr(launch, "start", start)
    assert launch.launch(run_of(tmp_path), MACHINE) == {} and told == [(0, signal.SIGTERM), (1, signal.SIGTERM)]


@pytest.mark.parametrize(("error", "status"), [
    (DistStoreError("failed to recv, got 0 bytes"), LOST), (RuntimeError("Wait timeout"), LOST),
    (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), LOST), (RuntimeError("shapes differ"), None),
    (RuntimeError("TCPStore is gone"), LOST), (RuntimeError("cannot restore what is stored"), None),
], ids=["store", "file", "pair", "other", "named", "restored"])  # fmt: skip
def test_who_has_lost_another_says_so_in_a_line(error: RuntimeError, status: int | None, monkeypatch: pytest.MonkeyPatch,
                                                capsys: Any) -> None:
    """One of several; the launcher knows which, and of any other error the traceback is wanted."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.status_of(error) is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.status_of(error) == status
    assert capsys.readouterr().err == (f"modelcenter: another rank has ended or hangs: {error}\n" if status else "")


@pytest.mark.parametrize(("words", "heard"), [("modelcenter: error: why\n", True), ("modelcenter: another rank has gone\n", False)],
                         ids=["mistake", "loss"])
def test_what_a_rank_without_a_terminal_has_said_is_said_once(words: str, heard: bool, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "1.err").write_text(words)
    with pytest.raises(launch.RankError) as caught:
        launch.fail(1, 75, tmp_path / "1.err")
    assert caught.value.heard == heard and launch.status_of(caught.value) == 75
    assert capsys.readouterr().err == words + ("" if heard else "modelcenter: error: rank 1 ended with status 75\n")


@pytest.mark.parametrize(
    ("status", "rank"), [([0, 0], None), ([75, 1], 1), ([None, -9], 1), ([75, None], 0), ([2, 2], 0), ([75, 75, 2], 2)]
)
def test_who_failed_first(status: list[int | None], rank: int | None) -> None:
    assert launch.culprit(status) == rank


@pytest.mark.parametrize(("status", "late", "found"), [
    (2, 3.0, [2, 2]), (2, 9.0, [None, 2]), (1, 3.0, [None, 1]), (1, 0.5, [1, 1]),
])  # fmt: skip
def test_who_has_said_what_is_to_be_mended_may_end(status: int, late: float, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has the terminal: ended by force it would have said its line, and the launcher another's again."""
    clock = [0.0]
    passed = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda s: clock.append(clock.pop() + s))
    monkeypatch.setattr(launch, "time", passed)
    ranks: Any = [SimpleNamespace(poll=lambda at=at: status if clock[0] >= at else None) for at in (late, 0.0)]
    assert launch.wait(ranks) == found


def test_as_many_ranks_as_a_launcher_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`machine.fsdp=auto`, on the command line and in a profile, whose other degrees the command line may change."""
    file = tmp_path / "m.yaml"
    file.write_text("fsdp: auto\nreplicate: 2\n")

    def made(*words: str, profile: Path | None = file) -> Machine:
        return machine_of(Arguments(settings=[f"machine.{word}" for word in words], machine=str(profile) if profile else None))

    with pytest.raises(InputError, match="fsdp: auto, and no launcher has said how many"):
        made()
    for ranks, fsdp in ((2, 1), (12, 6)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert made().fsdp == fsdp and made("fsdp=auto", profile=None).fsdp == ranks
    found = made("tensor_parallel=3")
    assert (found.fsdp, found.ranks) == (2, 12)
    with pytest.raises(InputError, match=r"fsdp: auto, of 12 ranks with tensor_parallel=5 replicate=2; a multiple of 10 ranks"):
        made("tensor_parallel=5")


def agent(node: int, port: int, folder: Path, arguments: list[str], nodes: str = "2") -> subprocess.Popen[bytes]:
    """torchrun on one of two nodes, which has one rank; a session of its own, so that what it leaves can be ended."""
    how = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "20", "--monitor-interval", "0.1",
           "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "1", "--rdzv-conf",
           f"is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"]  # fmt: skip
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
    with (folder / f"{node}.err").open("ab") as err:
        command = [sys.executable, "-m", "torch.distributed.run", *how, "-m", "modelcenter", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)


def worker(node: subprocess.Popen[bytes]) -> int:
    """The rank that an agent has started, by its process number."""
    while not (children := Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()):
        time.sleep(0.02)
    return int(children[0])


STARTER = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[2:]], env={**os.environ, sys.argv[1]: str(os.getpid())})
"""
RANK = """
import signal, sys, time
from modelcenter.train.launch import follow

def asked(*_):
    print("asked", flush=True)
    sys.exit()

signal.signal(signal.SIGTERM, asked)
if sys.argv[1] == "follows":
    follow()
print("ready", flush=True)
sys.stdin.readline()
follow()
time.sleep(20)
print("lives", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process that its parent has ended")
@pytest.mark.parametrize(("launcher", "said"), [(PARENT, "asked\n"), (TORCHRUN, "")], ids=["ours", "torchrun"])
@pytest.mark.parametrize("stands", ["follows", "begins"])
def test_a_rank_ends_when_who_has_started_it_is_killed(stands: str, launcher: str, said: str,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """One of ours is asked, and would save; one of torchrun's is killed: others are to go on without it. Also where the rank had
    not looked yet."""
    for name in (PARENT, TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", STARTER, launcher, RANK, stands], text=True, **pipes) as starter:
        assert starter.stdin is not None and starter.stdout is not None and starter.stdout.readline() == "ready\n"
        starter.kill()
        starter.wait()
        starter.stdin.close()
        assert starter.stdout.read() == said  # to its end: the rank, which has it open, has ended


@pytest.mark.parametrize(("launcher", "asked", "fails"), [
    (TORCHRUN, False, True), (TORCHRUN, True, False), (PARENT, False, False),
], ids=["other", "asked", "ours"])  # fmt: skip
def test_a_run_that_others_have_stopped_is_not_done(launcher: str, asked: bool, fails: bool, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: Any) -> None:
    """To an agent of torchrun whose ranks end well the run is, and it is another that was to leave."""
    for name in (PARENT, TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(launcher, "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with Interrupt() as interrupt:
        interrupt.begin()
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            launch.check_asked()
            ended = 0
        except launch.RankError as error:
            ended = launch.status_of(error) or 0
    assert ended == (LOST if fails else 0)
    assert ("the run goes on with those that are left" in capsys.readouterr().err) == fails


KILLS = 4  # of ranks, the first before any step; every other one after that is an agent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_elastic_agents_and_their_ranks_are_killed(tmp_path: Path) -> None:
    """Under torchrun a run whose ranks are killed, on either node, before the first step and after new states, and one of whose
    agents is killed and started again, ends with the weights of a run that nobody touched, to the bit."""
    places = [tmp_path / name for name in ("alone", "elastic")]
    changes = {**ENDLESS, "max_steps": 120, "save_steps": 15, "save_total_limit": 2, "schedule.name": "constant"}
    for place in places:
        place.mkdir()
    assert main(command(places[0], **changes)) == 0
    arguments, port, out = command(places[1], **changes), free_port(), places[1] / "out"
    nodes = [agent(node, port, places[1], arguments) for node in range(2)]
    try:
        os.kill(worker(nodes[1]), signal.SIGKILL)
        killed = 1
        for moment in range(1, KILLS):
            newest = max((int(path.name[5:]) for path in out.glob("step-*")), default=0)
            while max((int(path.name[5:]) for path in out.glob("step-*")), default=0) <= newest:  # what came before is not lost
                assert all(node.poll() is None for node in nodes), (places[1] / "0.err").read_text()[-3000:]
                time.sleep(0.01)
            if moment % 2:
                victim = worker(nodes[moment // 2 % 2])
            else:
                victim = nodes[1].pid
            os.kill(victim, signal.SIGKILL)
            killed += 1
            if moment % 2 == 0:
                nodes[1].wait()
                nodes[1] = agent(1, port, places[1], arguments)
        assert [node.wait(300) for node in nodes] == [0, 0], (places[1] / "0.err").read_text()[-3000:]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert killed == KILLS and "resumed from" in (places[1] / "0.err").read_text()
    for name in ("model.safetensors", "config.json"):
        assert (out / "model" / name).read_bytes() == (places[0] / "out" / "model" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "asked to leave"])
def test_a_node_leaves_for_good_and_another_comes(number: int, tmp_path: Path) -> None:
    """Under torchrun with one to two nodes and `machine.fsdp=auto`: the agent of one is told to leave, and does not return. Its
    rank, which nobody else tells, ends, and the run goes on with the ranks that are left; another agent comes, and it goes on with
    both. Its losses, one of each step, are those of one process to rounding: not to the bit, since sums are formed in another
    order."""
    places = [tmp_path / name for name in ("alone", "elastic")]
    for place in places:
        place.mkdir()
    changes = {**ENDLESS, "save_steps": 20, "save_total_limit": 2, "schedule.name": "constant"}
    arguments, port, out = command(places[1], **changes), free_port(), places[1] / "out"
    arguments[arguments.index("machine.fsdp=2")] = "machine.fsdp=auto"
    nodes = [agent(node, port, places[1], arguments, "1:2") for node in range(2)]
    seen = []

    def newest() -> int:
        return max((int(path.name[5:]) for path in out.glob("step-*")), default=0)

    def goes_on(ranks: int) -> None:
        """Wait until so many have written two states."""
        until, found = time.monotonic() + 200, -1
        while True:
            assert time.monotonic() < until and nodes[0].poll() is None, (ranks, (places[1] / "0.err").read_text()[-3000:])
            file = out / "machine.yaml"
            if not file.exists() or f"fsdp: {ranks}\n" not in file.read_text():
                found = -1
            elif found < 0:
                found = newest()
            elif newest() > found + changes["save_steps"]:
                seen.append(ranks)
                return
            time.sleep(0.02)

    try:
        goes_on(2)
        nodes[1].send_signal(number)
        nodes[1].wait(100)
        goes_on(1)
        nodes[1] = agent(1, port, places[1], arguments, "1:2")
        goes_on(2)
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(100)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert seen == [2, 1, 2] and (places[1] / "0.err").read_text().count("resumed from") >= 2
    last, arguments = newest(), command(places[0], **{**changes, "max_steps": newest(), "save_steps": None})
    arguments[arguments.index("machine.fsdp=2")] = "machine.fsdp=1"
    assert main(arguments) == 0
    losses = [{row["step"]: row["loss"] for row in read_rows(place / "out" / "metrics.jsonl") if "loss" in row} for place in places]
    assert losses[1].keys() == losses[0].keys() == set(range(1, last + 1))
    assert list(losses[1].values()) == pytest.approx([losses[0][step] for step in losses[1]], rel=2e-3)


@pytest.mark.parametrize(("ranks", "told", "wanted"), [
    (2, {}, "expandable_segments:True"), (1, {}, "None"), (2, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None"),
    (2, {"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
])  # fmt: skip
def test_memory_of_several_ranks_grows_where_nobody_said_how(ranks: int, told: dict[str, str], wanted: str, tmp_path: Path,
                                                            capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    words = [sys.executable, "-c", "import os; print(os.environ.get('PYTORCH_ALLOC_CONF'))"]
    assert launch.start(words, 0, range(ranks), ranks, tmp_path, True).wait(250) == 0
    assert capfd.readouterr().err == f"{wanted}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_libraries_print_is_no_part_of_an_answer(rank: int, tmp_path: Path, capfd: Any,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL prints to standard output if NCCL_DEBUG says so, until the process ends. It is shown as whatever else the rank says."""
    noise = "import atexit; print('NCCL INFO begins'); atexit.register(print, 'NCCL INFO ends')\n"
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    words = [sys.executable, "-m", "modelcenter", "list", "machines", "--json"]
    assert launch.start(words, rank, range(2), 2, tmp_path, True).wait(250) == 0
    assert "node8" in str(json.loads((tmp_path / f"{rank}.json").read_text()))
    told = capfd.readouterr()
    said = told.err if rank == 0 else (tmp_path / "1.err").read_text()
    assert said.split("\n") == ["NCCL INFO begins", "NCCL INFO ends", ""] and told.out == ""
