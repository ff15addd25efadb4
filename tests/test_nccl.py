"""The tests that hold ranks to one process, on GPUs: a rank each, connected by NCCL (CUDA_VISIBLE_DEVICES=0,1 make gpu).

Each is on two GPUs; where more are visible, as many at a time as there are pairs of them and workers (JOBS=8 make gpu).
"""

import json
import math
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
STEPS = "steps_equal and 2 and not 4"
EQUAL = {  # what two ranks can show, in parts of about a minute
    **{f"pairs {part}": ["test_pairs.py", "-k", f"says and {part}"] for part in range(4)},
    "steps": ["test_apply.py", "-k", f"{STEPS} and not llama and not t5"],
    "more steps": ["test_apply.py", "-k", f"{STEPS} and (llama or t5)"],
    "meshes": [*(f"test_parallel.py::test_a_mesh_equals_one_process[{name}]" for name in ("tp2", "fsdp2", "copies2")),
               "test_parallel.py::test_a_vocabulary_that_does_not_divide"],
    "peers": ["test_peers.py", "test_apply.py::test_low_precision_follows_one_process[bf16-1.0]"],
    "cases": ["test_ranks.py", "-k", "steps_equal and (fsdp2 or tp2) and not fsdp2xtp2"],
    "long saves": ["test_watch.py", "-k", "whose_saves_are_long"],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", EQUAL)
def test_the_same_on_gpus(name: str) -> None:
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip("two GPUs")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",")[:count] if named else [str(n) for n in range(count)]
    first = 2 * (list(EQUAL).index(name) % (count // 2))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # nothing of who runs this
    environment = {**mine, "MODELCENTER_TEST_DEVICE": "cuda", "PYTHONPATH": str(TESTS.parent),
                   "CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + 2])}  # fmt: skip
    without = [word for plugin in ("cacheprovider", "benchmark", "xdist") for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-v", "-x", *without, "--tb=short", *EQUAL[name]]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # NCCL then goes from GPU to GPU as from machine to machine: by sockets
TINY = ["tokenizer=char", "config.layers=3", "config.dim=128", "config.heads=4", "config.dropout=0", "config.attn_dropout=0",
        "config.embed_dropout=0", "data.seq_len=64", "data.eval_fraction=0.0", "eval_steps=null", "save_steps=null",
        "logging_steps=1", "batch=16", "max_steps=10", "schedule.warmup_steps=2", "precision=fp32"]  # fmt: skip


def said_of(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


@pytest.mark.gpu
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2, "fsdp": 2}, {"fsdp": 2, "replicate": 2}, {"fsdp": 4},
                                     {"tensor_parallel": 2}, {"fsdp": 2}, {"replicate": 2}], ids=str)  # fmt: skip
def test_two_agents_are_two_nodes(degrees: dict[str, int], tmp_path: Path) -> None:
    """Two torchrun agents with one or two GPUs each, between which, and inside of which, neither peer access nor shared memory is
    to be had: losses and norms of ten steps are those of one process."""
    ranks = math.prod(degrees.values())
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} GPUs")
    draw = random.Random(0)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n * n % 997} make {draw.choice(['one', 'two', 'three'])}\n" for n in range(3000)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cards, each = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(","), ranks // 2
    usual = {**os.environ, "PYTHONPATH": str(TESTS.parent)}

    def train(name: str, machine: dict[str, int]) -> list[str]:
        wanted = [*TINY, f"data.path={text}", f"output_dir={tmp_path / name}", "machine.device=cuda"]
        return ["modelcenter", "train", "pretrain", *wanted, *(f"machine.{key}={n}" for key, n in machine.items())]

    def agent(node: int) -> "subprocess.Popen[bytes]":
        how = ["--nnodes", "2", "--nproc-per-node", str(each), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
               "--rdzv-id", "1", "--rdzv-conf", f"is_host={int(node == 0)}"]  # fmt: skip
        mine = ",".join(cards[each * node : each * (node + 1)])
        place = {**usual, **APART, "NCCL_HOSTID": f"node-{node}", "CUDA_VISIBLE_DEVICES": mine}
        with (tmp_path / f"{node}.txt").open("wb") as said:
            command = [sys.executable, "-m", "torch.distributed.run", *how, "-m", *train("two", degrees)]
            return subprocess.Popen(command, env=place, stdout=said, stderr=said)

    nodes = [agent(node) for node in range(2)]
    try:
        one = subprocess.run([sys.executable, "-m", *train("one", {})], env=usual, capture_output=True, text=True, timeout=200)
        assert one.returncode == 0, one.stderr[-3000:]
        assert [node.wait(200) for node in nodes] == [0, 0], (tmp_path / "0.txt").read_text()[-4000:]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    alone, apart = said_of(tmp_path / "one"), said_of(tmp_path / "two")
    assert len(alone) == len(apart) == 10
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in apart] == pytest.approx([row[key] for row in alone], rel=2e-5), key
