"""What this installation can do and what would make it do more: the answer of `modelcenter doctor`. Asks nothing of a network."""

import ctypes
import importlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .errors import counted, size
from .ops import _kernels
from .ops._kernels import NOT, older, reach
from .ops.dropout import draw, dropout
from .ops.linear import has_low_units
from .train.environment import versions
from .train.resolve import automatic_precision

COMPILERS = ("g++", "c++", "clang++")  # as setup.py looks for them
REASON = "not_built.txt"  # as setup.py leaves it
AGAIN = "pip install -v --force-reinstall --no-deps --no-cache-dir . (in the source folder; -v shows what a compiler says)"


def examine() -> dict[str, Any]:
    """Everything found, in the order in which it is said; under `advice` what would make it more."""
    from huggingface_hub import constants

    found: dict[str, Any] = {"modelcenter": __version__, "python": platform.python_version()}
    found |= versions()
    found["torch_cuda"] = torch.version.cuda or "none: this build of torch is for the CPU only"
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [f"{card.name}, sm_{card.major}{card.minor}, {card.total_memory / 2**30:.0f} GiB" for card in cards]
    found["devices"] = gpus or ["CPU only"]
    found["threads"] = torch.get_num_threads()

    built, why, advice = extension()
    found["extension"] = why
    if built is not None:
        if built.cpu_level == "none" and _kernels.LEVEL == "base":
            found["cpu_kernels"] = "none without AVX2, which MODELCENTER_CPU=base leaves out: references"
            advice.append("kernels for the CPU: unset MODELCENTER_CPU")
        elif built.cpu_level == "none":
            found["cpu_kernels"] = "none for this processor, which lacks AVX2: references"
            advice.append(f"kernels for this processor: MODELCENTER_LEVELS=0 {AGAIN}")
        else:
            kept = f" by MODELCENTER_CPU={_kernels.LEVEL}" if built.cpu_level == _kernels.LEVEL != _kernels.LEVELS[-1] else ""
            found["cpu_kernels"] = f"{built.cpu_level}{kept}, {threads()}: {runs(torch.device('cpu'))}"
        names = ", ".join(f"sm_{arch}" for arch in built.cuda_architectures.split())
        failed = f" (they were not built: {said})" if (said := reason()) else ""
        found["cuda_kernels"] = f"{names}, later chips of their generations, and by PTX all after" if names else f"none{failed}"
        if cards and built.cuda_architectures:
            found["gpu_kernels"] = [f"{card.name}: {on_gpu(i, card, built.cuda_architectures)}" for i, card in enumerate(cards)]
        if not built.cuda_architectures and torch.version.cuda:
            advice.append(without_cuda())
        if cards and built.cuda_architectures:
            chips, archs = {(card.major, card.minor) for card in cards}, built.cuda_architectures
            lacking = [f"{a}{b}" for a, b in sorted(chips) if reach((a, b), archs) == NOT or older((a, b), archs)]
            if lacking:
                advice.append(f"kernels for this GPU: MODELCENTER_CUDA_ARCHS='{' '.join(lacking)}' {AGAIN}")
        if "one thread" in found["cpu_kernels"]:
            advice.append("kernels on every core: a torch that is built with libgomp, as its Linux wheels are")
    if not cards and (hidden := unseen_gpus()):
        advice.append(hidden)
    units = has_low_units(torch.bfloat16)
    found["bf16_on_cpu"] = "in hardware" if units else "no units for it (AMX, AVX512-BF16): products are computed in fp32"
    found["precision_auto"] = {kind: automatic_precision(torch.device(kind)) for kind in ("cpu", *(["cuda"] if cards else []))}
    found["disk_free"] = f"{size(shutil.disk_usage('.').free)} here"
    found["hub_cache"] = str(constants.HF_HUB_CACHE)
    found["hub_offline"] = bool(constants.HF_HUB_OFFLINE)
    found["advice"] = advice
    return found


def extension() -> tuple[Any, str, list[str]]:
    """The compiled module if it is in use, what there is to say of it, and how there would be one."""
    if not _kernels.WANTED:
        return None, "switched off by MODELCENTER_KERNELS=0: references only", ["kernels: unset MODELCENTER_KERNELS"]
    if (built := vars(_kernels)["_C"]) is not None:
        place = Path(getattr(built, "__file__", __file__))  # an editable installation lends its own to who has none
        return built, "built" if place.parent == Path(__file__).parent else f"built, from {place}", []
    asked = os.environ.get("CXX", "").split()[:1]  # setup.py then looks for no other
    there, steps = any(map(shutil.which, asked or COMPILERS)), []
    if not any(map(shutil.which, (*asked, *COMPILERS))):
        steps.append(f"install a C++ compiler ({', '.join(COMPILERS)}: none is on the PATH)")
    if asked and not there:
        steps.append(f"unset CXX, which names one that is not there ({asked[0]})")
    advice = [f"kernels: {' and '.join(steps)}, then {AGAIN}" if steps else f"kernels: {AGAIN}"]
    if said := _kernels.cut():
        return None, f"does not load: {said}: references only", advice
    try:
        other = importlib.import_module("modelcenter._C")
    except ModuleNotFoundError:
        files = [file.name for file in Path(__file__).parent.glob("_C.*")]
        if files:
            return None, f"built for another Python ({', '.join(files)}): references only", advice
        why = reason() or ("there was no compiler, or it failed" if there else "no C++ compiler")
        return None, f"not built ({why}): references only", advice
    except ImportError as error:
        return None, f"does not load: {error}: references only", advice
    return None, f"built for modelcenter {other.version}: references only", advice


def reason() -> str:
    """Why some kernels or all were not built; nothing if they were, or if that could not be left."""
    try:
        return Path(__file__).with_name(REASON).read_text("utf-8", "replace")
    except OSError:
        return ""


def unseen_gpus() -> str | None:
    """How torch, which sees no GPU, would see those that the driver lists; None if that lists none."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=10,
                              stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    if done.returncode or not count:
        return None
    here = f"the {counted(count, 'GPU')} that nvidia-smi lists"
    if torch.version.cuda is None:
        return f"{here}: a build of torch for CUDA (pytorch.org), as this one is for the CPU only"
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"{here}: unset CUDA_VISIBLE_DEVICES, which is {visible!r} and shows torch none"
    return f"{here}: a driver for CUDA {torch.version.cuda} or newer, or a build of torch for an older CUDA: this one sees none"


def without_cuda() -> str:
    """How a build with the CPU's kernels alone would get the GPU's."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda", "/opt/cuda"]
    nvcc = shutil.which("nvcc") or next((f"{home}/bin/nvcc" for home in homes if home and Path(home, "bin/nvcc").exists()), None)
    if nvcc is None:
        return f"kernels for GPUs: install CUDA's compiler, nvcc, or say where it is (CUDA_HOME), then {AGAIN}"
    return f"kernels for GPUs: {f'{nvcc} is there now' if not reason() else 'mend why they were not built'}: {AGAIN}"


def on_gpu(index: int, card: Any, architectures: str) -> str:
    """Whether there are kernels for a GPU, and whether they run on it."""
    found = reach((card.major, card.minor), architectures)
    return f"{found}, the references compute" if found == NOT else f"{found}: {runs(torch.device('cuda', index))}"


def runs(device: torch.device) -> str:
    """Whether a kernel runs there and gives what its reference gives; the two agree to the last bit."""
    assert dropout.kernel is not None
    try:
        x, seed = torch.randn(3, 1000, device=device), draw(device)
        same = torch.equal(dropout.kernel.forward.direct(x, None, seed, 0.5), dropout.reference(x, None, seed, 0.5))
    except Exception as error:
        return f"they do not run: {' '.join(str(error).split())[:200]}"
    return "they run" if same else "THEY DIFFER from their references"


def threads() -> str:
    """How many threads the CPU's kernels use: torch's, if its pool is libgomp's."""
    try:
        found = hasattr(ctypes.CDLL(None), "GOMP_parallel")
    except (OSError, TypeError):
        found = False
    return counted(torch.get_num_threads(), "thread") if found else "one thread (no libgomp)"


def report(found: dict[str, Any]) -> str:
    """The same for people."""
    lines = []
    for key, value in found.items():
        if key != "advice":
            value = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else value
            lines.append(f"{key:<16}{', '.join(value) if isinstance(value, list) else value}")
    return "\n".join([*lines, *(f"for more: {line}" for line in found["advice"])])
