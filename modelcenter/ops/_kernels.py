"""The compiled kernels of this installation: which ones exist, for which devices, and how they are called.

MODELCENTER_KERNELS=0 disables the kernels, and with a file there, that is loaded in place of the installed ones;
MODELCENTER_CPU=base, avx2 or avx512, the last without units for bf16, limits those for the CPU. Any other value is an InputError.
"""

import importlib.util
import math
import os
import struct
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..errors import refuse
from ._mode import PRETENCE, fake

FILE = os.environ.get("MODELCENTER_KERNELS") or "1"
WANTED = FILE != "0"
DIMS = 8  # of a tensor, at most: csrc/module.cpp
LEVELS = ("base", "avx2", "avx512")  # instruction sets, of MODELCENTER_CPU
LEVEL = os.environ.get("MODELCENTER_CPU") or LEVELS[-1]


def load() -> Any:
    """The compiled kernels, or None."""
    if LEVEL not in LEVELS:
        refuse("environment", "MODELCENTER_CPU", LEVEL, ", ".join(LEVELS))
    if not WANTED or FILE == "1":
        if not WANTED or cut():
            return None
        try:
            return importlib.import_module("modelcenter._C")
        except ImportError:
            return None
    spec = importlib.util.spec_from_file_location("modelcenter._C", FILE)
    if spec is None or spec.loader is None:
        refuse("environment", "MODELCENTER_KERNELS", FILE, "0, 1 or the file of an extension")
    if said := lack(FILE):
        refuse("environment", "MODELCENTER_KERNELS", f"{FILE}: {said}", "the whole file: build it again")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        refuse("environment", "MODELCENTER_KERNELS", f"{FILE}: {error}", "0, 1 or the file of an extension")
    return module


def cut() -> str:
    """What the installed extension's file lacks."""
    if "modelcenter._C" in sys.modules:  # it is loaded
        return ""
    spec = importlib.util.find_spec("modelcenter._C")
    return lack(spec.origin) if spec is not None and spec.origin is not None else ""


def lack(file: str) -> str:
    """How much of an extension's file there is, if its end is missing: loading it would end Python (SIGBUS) without a word. The
    table of sections is the last part of an ELF file."""
    with suppress(OSError), open(file, "rb") as stream:
        head, size = stream.read(64), os.fstat(stream.fileno()).st_size
        if len(head) == 64 and head.startswith(b"\x7fELF\x02\x01"):
            whole = int.from_bytes(head[40:48], "little") + math.prod(struct.unpack_from("<HH", head, 58))
            return f"{size:,} of {whole:,} bytes, a copy that broke off" if size < whole else ""
    return ""


_C = load()
if _C is not None and _C.version != __version__:
    warnings.warn(f"modelcenter's kernels were built for {_C.version} and not for {__version__}: install it again", stacklevel=1)
    _C = None
if _C is not None:
    _C.connect(torch, getattr(torch._C, "_cuda_getCurrentRawStream", None))


def call(name: str, *args: Any) -> None:
    """Run the compiled kernel `name` on the device of the first argument, a tensor. Tensors must be contiguous; a mismatch is a
    ValueError that names the argument. Fake tensors have no memory and are not touched, so a function that allocates its results
    and calls kernels is its own fake kernel."""
    tensor = args[0]
    if tensor.is_meta or fake(tensor):
        if PRETENCE.observer is not None:
            PRETENCE.observer(name, args)
        return
    if not tensor.is_cuda:
        torch.get_num_threads()  # in a thread that is new to torch this tells OpenMP how many: else all, whatever torch was told
    getattr(_C.cuda if tensor.is_cuda else _C.cpu, name)(*args)


FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
SEED: tuple[torch.dtype, ...] = (torch.int64,)


def shown(shape: Sequence[int]) -> str:
    """A shape as the kernels' messages have it."""
    return f"({', '.join(map(str, shape))})"


def expect(kernel: str, name: str, x: Tensor, shape: Sequence[int] | None = None, kinds: Sequence[torch.dtype] = FLOATS) -> None:
    """A ValueError in the words of a kernel unless it takes `x`, of this shape, or if it is float64 in place of a float: for a
    reference, whose functions of torch would broadcast another shape, and round where integers are."""
    if x.dtype not in kinds and not (x.dtype == torch.float64 and torch.float32 in kinds):
        raise ValueError(f"{kernel}: {name}: {x.dtype}; wanted {' or '.join(str(kind).removeprefix('torch.') for kind in kinds)}")
    if shape is not None and x.shape != torch.Size(shape):
        raise ValueError(f"{kernel}: {name}: shape {shown(x.shape)}; wanted {shown(shape)}")


def finite(kernel: str, name: str, number: float) -> None:
    """The same for a number."""
    if not abs(number) < math.inf:  # a compiler knows no isfinite of a number that it does not know
        raise ValueError(f"{kernel}: {name}: {number:f}; wanted a finite number")


def available(device: str, index: int = 0) -> bool:
    """Whether this installation has kernels for a kind of device, and for the GPU with that number; warns once if it has none."""
    if PRETENCE.gpu:  # of a GPU that is not here, beside which there will be an installation of its own
        return True
    if _C is None:
        if WANTED:
            warn_once()
        return False
    if device == "cpu":
        return bool(_C.cpu_level != "none")
    return device == "cuda" and bool(_C.cuda_architectures) and covered(index)


_warned = False


def warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn("modelcenter has no compiled kernels and computes with its references: `modelcenter doctor`", stacklevel=4)


def warned(device: str) -> bool:
    """Whether `available` has warned of having none for a device: if nothing is built, or not for this very GPU."""
    return _C is None or (device == "cuda" and bool(_C.cuda_architectures))


NOT = "no kernels"
AMPERE = (8, 0)


def newest(capability: tuple[int, int], architectures: str) -> int:
    """Of the `architectures` that kernels were built for the one whose code a GPU runs, 0 if none: machine code runs on later chips
    of its generation, and the PTX of the last is compiled by the driver for all later ones."""
    numbers = [int(a) for a in architectures.split()]
    mine = capability[0] * 10 + capability[1]
    own = [a for a in numbers if a // 10 == capability[0] and a <= mine]
    return max(own or [a for a in numbers if mine > max(numbers)], default=0)


def older(capability: tuple[int, int], architectures: str) -> bool:
    """Whether the kernels that a GPU of the Ampere generation or later runs were built for earlier ones alone: none is in bf16."""
    return capability >= AMPERE and 0 < newest(capability, architectures) < 80


def reach(capability: tuple[int, int], architectures: str) -> str:
    """Whether kernels built for `architectures` run on a GPU."""
    found = newest(capability, architectures)
    if found // 10 == capability[0]:
        return "kernels built for it"
    without = ", none in bf16 (they were built for GPUs before sm_80)" if older(capability, architectures) else ""
    return f"kernels compiled by the driver at their first use{without}" if found else NOT


COVERED: dict[int, bool] = {}  # by the number of a GPU


def covered(index: int) -> bool:
    """Whether this build's code runs on GPU `index`. Tensors are there already, so asking creates no new CUDA context; a fake
    tensor on a machine without GPUs counts as being on a suitable one."""
    if index not in COVERED:
        if not torch.cuda.is_available():
            return True
        chip, built = torch.cuda.get_device_capability(index), _C.cuda_architectures
        COVERED[index] = bool(newest(chip, built))
        if not COVERED[index] or older(chip, built):
            names = ", ".join(f"sm_{arch}" for arch in built.split())
            which = "in bf16 with" if COVERED[index] else "with"
            warnings.warn(f"modelcenter's kernels are for {names}; GPU {index} is sm_{chip[0]}{chip[1]} and computes {which} the "
                          "references: `modelcenter doctor`", stacklevel=4)  # fmt: skip
    return COVERED[index]


# To the compiler a constant, as by torch.compiler.assume_constant_result, which would import the compiler.
covered._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function has none


def served(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there are kernels for the device and the dimensions of `x` that compute in `dtype`."""
    index = x.get_device()
    return available(x.device.type, index) and x.dim() <= DIMS and (dtype != torch.bfloat16 or not x.is_cuda or in_bf16(index))


GENERATIONS: dict[int, tuple[int, int]] = {}  # by the number of a GPU
CODES: dict[int, int] = {}  # the same


def generation(index: int) -> tuple[int, int]:
    """The compute capability of GPU `index`; Ampere's if there is no GPU to ask, or for the CPU (-1) that stands in for one in a
    rehearsal."""
    if index not in GENERATIONS:
        if index < 0 or not torch.cuda.is_available():
            return AMPERE
        GENERATIONS[index] = torch.cuda.get_device_capability(index)
    return GENERATIONS[index]


def code(index: int) -> int:
    """The architecture for which the kernels that GPU `index` runs were built: 80 on a later chip if the build has no newer ones.
    Without kernels for GPUs it is the chip's own."""
    if index not in CODES:
        chip, built = generation(index), _C.cuda_architectures if _C is not None else ""
        if index not in GENERATIONS or not built:
            return 10 * chip[0] + chip[1]
        CODES[index] = newest(chip, built)
    return CODES[index]


def modern(index: int) -> bool:
    """Whether GPU `index` is of the Ampere generation or later."""
    return generation(index) >= AMPERE


def in_bf16(index: int) -> bool:
    """Whether there are kernels for ops in bf16: earlier generations have none, nor has a build for them alone on a later GPU."""
    return code(index) >= 80


def hopper(index: int) -> bool:
    """Whether GPU `index` runs what was built for Hopper."""
    return code(index) == 90


# Truths, for the compiler of torch 2.11 does not compare pairs of numbers.
modern._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as `covered`
in_bf16._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the same
hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the same
