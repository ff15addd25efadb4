"""The tests that hold ranks to one process, on GPUs: a rank each, connected by NCCL (CUDA_VISIBLE_DEVICES=0,1 make gpu)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
EQUAL = {  # what two ranks can show
    "meshes": [*(f"test_parallel.py::test_a_mesh_equals_one_process[{name}]" for name in ("tp2", "fsdp2", "copies2")),
               "test_parallel.py::test_a_vocabulary_that_does_not_divide"],
    "steps": ["test_apply.py", "-k", "steps_equal and 2 and not 4"],
    "cases": ["test_ranks.py", "-k", "steps_equal and (fsdp2 or tp2) and not fsdp2xtp2"],
    "pairs": ["test_pairs.py"],
    "long saves": ["test_watch.py", "-k", "whose_saves_are_long"],
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", EQUAL)
def test_the_same_on_gpus(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs")
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # nothing of who runs this
    environment = {**mine, "MODELCENTER_TEST_DEVICE": "cuda", "PYTHONPATH": str(TESTS.parent)}
    without = [word for plugin in ("cacheprovider", "benchmark", "xdist") for word in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-v", "-x", *without, "--tb=short", *EQUAL[name]]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
