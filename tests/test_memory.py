"""Loading and saving hold one tensor beside the model itself, measured by the operating system in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

SHAPE = {"vocab": 24000, "dim": 512, "heads": 8, "layers": 10, "positions": 64}
MEASURE = """
import re, sys, torch, modelcenter as mc
def peak():  # not ru_maxrss, which a child takes over from its parent
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
mc.load(sys.argv[1])            # a small folder: everything that is imported on the way
before = peak()
model = mc.load(sys.argv[2])
loaded = peak()
model.save_pretrained(sys.argv[3], max_shard_size="50MB")
size = sum(p.numel() * p.element_size() for p in model.parameters())
largest = max(p.numel() * p.element_size() for p in model.parameters())
print(size, largest, loaded - before, peak() - loaded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_tensor_beside_the_model(tmp_path: Path) -> None:
    import modelcenter as mc

    mc.build("gpt2", config={**SHAPE, "layers": 1, "dim": 64, "vocab": 100}).save_pretrained(tmp_path / "small")
    mc.build("gpt2", config=SHAPE).save_pretrained(tmp_path / "large")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    size, largest, load, save = map(int, run.stdout.split())
    assert size > 150e6 and largest > 45e6
    slack = 15e6  # the allocator's
    assert load > 0.9 * size, "the measurement sees nothing"
    assert load <= size + largest + slack, f"loading took {load - size} bytes beside the model; its largest tensor has {largest}"
    assert save <= largest + slack, f"saving took {save} bytes; the largest tensor has {largest}"
