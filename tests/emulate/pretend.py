"""Tensors of the CPU as those of a GPU, for an extension that build.py made: what is tried is modelcenter's whole way to its CUDA
kernels.

    MODELCENTER_KERNELS=FILE python tests/emulate/pretend.py tests/fuzz_ops.py --cases 1000
    MODELCENTER_KERNELS=FILE pytest -p emulate.pretend tests/test_kernels.py        (with tests on the PYTHONPATH)

Every call of a kernel is made once in each of three orders of threads (block.h), and all of them must leave the same bits.
"""

import ctypes
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ORDERS = (1, 2, 0)


def pretend() -> None:
    """To be called before modelcenter is imported."""
    for name, value in (("is_cuda", True), ("is_cpu", False)):
        setattr(Tensor, name, property(lambda self, value=value: value))
    Tensor.get_device = lambda self: 0  # type: ignore[method-assign]
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]

    from modelcenter.ops import _kernels

    assert _kernels._C is not None, "MODELCENTER_KERNELS names no extension that can be loaded"
    _kernels._C = Emulated(_kernels._C)
    _kernels.GENERATIONS[0] = divmod(ctypes.CDLL(_kernels._C.extension.__file__).emulate_chip(), 10)
    for name in ("linear", "linear_cross_entropy"):
        importlib.import_module(f"modelcenter.ops.{name}").multiply = multiply  # type: ignore[attr-defined]

    import contract

    backed = contract.kernel_backed
    contract.kernel_backed = lambda device: backed("cuda")


def multiply(out: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float = 1.0) -> None:
    """ops/linear.py's: torch has a product into a wider dtype on GPUs alone."""
    whole = a.float() @ b.float() * alpha
    out.copy_(whole if beta == 0 else out * beta + whole)


class Emulated:
    """The extension, which says of itself that it has kernels for tensors that torch.device calls "cpu"."""

    cpu_level = "emulated"

    def __init__(self, extension: Any) -> None:
        self.extension = extension
        self.cuda = self.cpu = Orders(extension)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.extension, name)


class Orders:
    """Kernels that run in several orders of their threads."""

    def __init__(self, extension: Any) -> None:
        self.kernels = extension.cuda
        self.order = ctypes.CDLL(extension.__file__).emulate_order

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.kernels, name)

        @torch.autocast("cpu", enabled=False)
        def call(*args: Any) -> None:
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
            before = [t.detach().clone() for t in tensors]
            found: list[Tensor] = []
            for order in ORDERS:
                if found:
                    restore(tensors, before)
                self.order(order)
                kernel(*args)
                after = [bits(t) for t in tensors]
                for i, (a, b) in enumerate(zip(found, after, strict=True) if found else ()):
                    assert torch.equal(a, b), f"{name}: tensor {i} depends on the order of threads"
                found = after

        setattr(self, name, call)
        return call


def bits(t: Tensor) -> Tensor:
    return torch.cat([t.detach().reshape(-1)]).view(torch.uint8)  # one element may have any stride


def restore(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for t, b in zip(tensors, before, strict=True):
        t.data.copy_(b)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    pretend()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
elif "pytest" in sys.modules:
    pretend()
