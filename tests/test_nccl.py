"""The tests that hold ranks to one process, on GPUs: a rank each, connected by NCCL (CUDA_VISIBLE_DEVICES=0,1 make gpu).

The ranks are started once and stay for all of them (mesh.py), as do the two agents that stand for two nodes. To try this file where
there is no GPU: MODELCENTER_TEST_DEVICE=cpu MODELCENTER_TEST_RANKS=stay pytest tests/test_nccl.py, on gloo.
"""

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
DEVICE = os.environ.get("MODELCENTER_TEST_DEVICE", "cuda")
LIMIT = 240 if DEVICE == "cuda" else 1200  # seconds for all that two ranks do
EQUAL = {  # what two ranks can show, by the file that asks for it on CPUs
    "test_pairs": "every_pair",
    "test_averaging": "records_of_copies or updates_of_copies",
    "test_apply": "(steps_equal and 2 and not 4) or (low_precision and bf16)",
    "test_exchange": "load_as_one_process",
    "test_parallel": "(one_process and (tp2 or fsdp2 or copies2) and not fsdp2xtp2 and not copies2xtp2) or vocabulary_that",
    "test_offload": "does",
    "test_peers": "gpus_reach or not_known or fp16_loses",
    "test_ranks": "steps_equal and (fsdp2 or tp2) and not fsdp2xtp2",
    "test_shards": "one_process or of_the_calls",
    "test_watch": "saves_are_long",
}

pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the ranks


def devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES would say of each that is there."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if DEVICE == "cuda" else 4
    return named.split(",")[:count] if named else [str(n) for n in range(count)]


def usual() -> dict[str, str]:
    """The environment, with nothing of who runs this."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**mine, "PYTHONPATH": str(TESTS.parent), **({"OMP_NUM_THREADS": "1"} if DEVICE == "cpu" else {})}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, nodes: "Nodes", request: pytest.FixtureRequest) -> str:
    """What pytest says of all of `EQUAL`; what it had said until then, if the time is up. The two nodes of as many ranks, if they
    are to be asked for too, run meanwhile: starting is most of what either does."""
    if any(item.name.startswith("test_two_agents") for item in request.session.items):
        nodes.begin(2)
    environment = {**usual(), "MODELCENTER_TEST_DEVICE": DEVICE}
    if DEVICE == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices()[:2])
    without = [word for plugin in ("cacheprovider", "benchmark", "xdist") for word in ("-p", f"no:{plugin}")]
    chosen = " or ".join(f"({file} and ({which}))" for file, which in EQUAL.items())
    how = ["-v", *without, "-o", "addopts=", "-o", f"timeout={LIMIT}", "--tb=short", "--durations=12", "--color=no"]
    command = [sys.executable, "-u", "-m", "pytest", *how, "-m", "not gpu", "-k", chosen, *(f"{file}.py" for file in EQUAL)]
    file = tmp_path_factory.mktemp("said") / "all.txt"
    with file.open("w") as out, subprocess.Popen(command, cwd=TESTS, env=environment, stdout=out, stderr=out) as run:
        try:
            run.wait(LIMIT)
        except subprocess.TimeoutExpired:
            run.kill()
    return file.read_text()


def of_file(said: str, name: str) -> tuple[dict[str, str], str]:
    """How each test of a file ended, and what is said of those that failed."""
    rows = re.findall(rf"^{name}\.py::(.+?)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*| *)$", said, re.M)
    parts = re.split(r"^_{3,} (.+?) _{3,}$", said.partition("= FAILURES =")[2].partition("= slowest")[0], flags=re.M)
    ends = dict(rows)
    told = [f"{title}{text}" for title, text in zip(parts[1::2], parts[2::2], strict=True) if title.strip() in ends]
    return ends, "\n".join(text[-3000:] for text in told)


SAID = """\
test_a.py::test_x[2 ranks, t5] PASSED    [ 10%]
test_a.py::test_x[2 ranks] FAILED        [ 20%]
test_ab.py::test_y SKIPPED (by somebody) [ 30%]
test_b.py::test_z[1] PASSED              [ 40%]
test_b.py::test_z[2] """
WHY = """

=================================== FAILURES ===================================
____________________________ test_x[2 ranks] _____________________________
test_a.py:3: in test_x
E   AssertionError: rank 1
============================= slowest 12 durations =============================
"""


def test_what_is_read_of_what_pytest_says() -> None:
    """By file; of a test that has not ended, that it has not."""
    passed, failed = {"test_x[2 ranks, t5]": "PASSED"}, {"test_x[2 ranks]": "FAILED"}
    assert of_file(SAID, "test_a") == (passed | failed, "") and of_file(SAID, "test_ab")[0] == {"test_y": "SKIPPED"}
    assert of_file(SAID, "test_b") == ({"test_z[1]": "PASSED", "test_z[2]": ""}, "") and of_file(SAID, "test_c") == ({}, "")
    assert "AssertionError: rank 1" in of_file(SAID + WHY, "test_a")[1] and of_file(SAID + WHY, "test_b")[1] == ""


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("name", EQUAL)
def test_the_same_on_gpus(name: str, request: pytest.FixtureRequest) -> None:
    if len(devices()) < 2:
        pytest.skip("two GPUs")
    said: str = request.getfixturevalue("said")
    ends, why = of_file(said, name)
    assert "PASSED" in ends.values(), said[-1500:]
    assert set(ends.values()) <= {"PASSED", "SKIPPED"}, f"{ends}\n{why or said[-1500:]}"


APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # NCCL then goes from GPU to GPU as from machine to machine: by sockets
TINY = ["tokenizer=char", "config.layers=3", "config.dim=128", "config.heads=4", "config.dropout=0", "config.attn_dropout=0",
        "config.embed_dropout=0", "data.seq_len=64", "data.eval_fraction=0.0", "eval_steps=null", "save_steps=null",
        "logging_steps=1", "batch=16", "max_steps=10", "schedule.warmup_steps=2", "precision=fp32"]  # fmt: skip
DEGREES = [{"tensor_parallel": 2}, {"fsdp": 2}, {"replicate": 2},
           {"tensor_parallel": 2, "fsdp": 2}, {"fsdp": 2, "replicate": 2}, {"fsdp": 4}]  # fmt: skip
RUNS = """\
import json, sys
from modelcenter.__main__ import main
for command in json.load(open(sys.argv[1])):
    if status := main(command):
        sys.exit(status)
"""  # what one process after another would do, with one start


def written(folder: Path) -> Path:
    """A file of 3,000 lines."""
    draw, text = random.Random(0), folder / "text.txt"
    text.write_text("".join(f"{n} and {n * n % 997} make {draw.choice(['one', 'two', 'three'])}\n" for n in range(3000)))
    return text


def said_of(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


class Nodes:
    """Runs of two torchrun agents, between whose ranks, and inside of which, neither peer access nor shared memory is to be had:
    each of `DEGREES` of a number of ranks in a folder of its own, beside `one` of one process."""

    def __init__(self, place: Callable[[str], Path]) -> None:
        self.place = place
        self.begun: dict[int, tuple[Path, float, list[subprocess.Popen[bytes]]]] = {}

    def begin(self, ranks: int) -> None:
        if ranks in self.begun:
            return
        folder, each = self.place(f"nodes{ranks}"), ranks // 2
        text = written(folder)
        (folder / "runs.py").write_text(RUNS)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        jobs: list[subprocess.Popen[bytes]] = []
        self.begun[ranks] = folder, time.monotonic() + LIMIT, jobs

        def start(name: str, how: list[str], machines: list[dict[str, int]], **more: str) -> None:
            wanted = [*TINY, f"data.path={text}", f"machine.device={DEVICE}", "machine.timeout=60"]
            commands = [["train", "pretrain", *wanted, f"output_dir={folder / (name_of(machine) or 'one')}",
                         *(f"machine.{key}={n}" for key, n in machine.items())] for machine in machines]  # fmt: skip
            (folder / f"{name}.json").write_text(json.dumps(commands))
            command = [sys.executable, *how, str(folder / "runs.py"), str(folder / f"{name}.json")]
            with (folder / f"{name}.txt").open("wb") as said:
                jobs.append(subprocess.Popen(command, env={**usual(), **more}, stdout=said, stderr=said))

        start("one", [], [{}])
        for node in range(2):
            agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(each), "--rdzv-id", "1",
                     "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                     "--rdzv-conf", f"is_host={int(node == 0)}"]  # fmt: skip
            visible = ",".join(devices()[each * node : each * (node + 1)]) if DEVICE == "cuda" else ""
            machines = [machine for machine in DEGREES if math.prod(machine.values()) == ranks]
            start(f"node{node}", agent, machines, **APART, NCCL_HOSTID=f"node-{node}", CUDA_VISIBLE_DEVICES=visible)

    def end(self, ranks: int) -> Path:
        """The folder, when all is done or the time is up: a run that is missing there is one that failed."""
        self.begin(ranks)
        folder, until, jobs = self.begun[ranks]
        while any(job.poll() is None for job in jobs) and time.monotonic() < until:
            time.sleep(0.1)
        for job in jobs:
            job.kill()
            job.wait()
        return folder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    found = Nodes(tmp_path_factory.mktemp)
    yield found
    for ranks in found.begun:
        found.end(ranks)


def name_of(machine: dict[str, int]) -> str:
    return "-".join(f"{key}{n}" for key, n in machine.items())


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("degrees", DEGREES, ids=name_of)
def test_two_agents_are_two_nodes(degrees: dict[str, int], nodes: Nodes) -> None:
    """Losses and norms of ten steps are those of one process."""
    ranks = math.prod(degrees.values())
    if len(devices()) < ranks:
        pytest.skip(f"{ranks} GPUs")
    folder = nodes.end(ranks)
    heard = "\n".join(f"{file.stem}: {file.read_text()[-1500:]}" for file in sorted(folder.glob("*.txt")) if file.stem != "text")
    for name in ("one", name_of(degrees)):
        assert (folder / name / "metrics.jsonl").exists(), f"no run in {name}\n{heard}"
    alone, apart = said_of(folder / "one"), said_of(folder / name_of(degrees))
    assert len(alone) == len(apart) == 10, heard
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in apart] == pytest.approx([row[key] for row in alone], rel=2e-5), key


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT)
def test_what_a_graph_sends_may_lie_in_two_pieces_of_memory(tmp_path: Path) -> None:
    """Matrices of GPT-2 base, which Muon's copies send each other in a graph. Their memory grows piece by piece; NCCL takes it for
    one, unless told otherwise (parallel/connect.py), and the fourth update stands still."""
    if len(devices()) < 2:
        pytest.skip("two GPUs")
    small = [key for key in TINY if not key.startswith(("config.", "precision"))]
    wanted = [*small, "config={}", "precision=bf16", "optimizer.name=muon", f"data.path={written(tmp_path)}",
              f"machine.device={DEVICE}", "machine.replicate=2", "machine.timeout=40"]  # fmt: skip
    jobs = {}
    for graphs in ("true", "false"):
        command = [sys.executable, "-m", "modelcenter", "train", "pretrain", *wanted, f"machine.cuda_graphs={graphs}",
                   f"output_dir={tmp_path / graphs}"]  # fmt: skip
        with (tmp_path / f"{graphs}.txt").open("wb") as said:
            environment = {**usual(), "CUDA_VISIBLE_DEVICES": ",".join(devices()[:2])}
            jobs[graphs] = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
    ends = {graphs: job.wait(LIMIT - 20) for graphs, job in jobs.items()}
    assert set(ends.values()) == {0}, "\n".join((tmp_path / f"{graphs}.txt").read_text()[-2000:] for graphs in ends)
    recorded, called = ([row["loss"] for row in said_of(tmp_path / graphs)] for graphs in jobs)
    assert len(recorded) == 10 and recorded == pytest.approx(called, rel=1e-2)
