"""ops/_kernels.py: for which GPUs a build's kernels are taken, machine by machine as torch would describe it, and tensors."""

import ctypes
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from modelcenter import ops
from modelcenter.ops import Op, _kernels, _op
from modelcenter.ops._norm import beside
from modelcenter.ops.relative_attention import takes

FEW = torch.version.cuda is not None and torch.cuda.device_count() < 2  # torch with CUDA makes no tensor on a GPU that is not here
TWO = pytest.mark.skipif(FEW, reason="torch for CPUs, or two GPUs")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with one GPU of 2018 and one of 2022, and kernels from sm_80 to sm_90. A list of those asked about."""
    asked: list[int] = []

    def capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return ((7, 5), (8, 9))[index]

    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(cuda_architectures="80 90"))
    monkeypatch.setattr(_kernels, "COVERED", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    return asked


def test_a_gpu_that_the_build_does_not_cover(cards: list[int]) -> None:
    """It is said once, with where to read more, and asked once."""
    with pytest.warns(UserWarning, match=r"for sm_80, sm_90; GPU 0 is sm_75 .* `modelcenter doctor`"):
        assert not _kernels.available("cuda", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _kernels.available("cuda", 0) and _kernels.available("cuda", 1) and _kernels.available("cuda", 1)
    assert cards == [0, 1]


@TWO
@pytest.mark.parametrize("index", [0, 1])
def test_the_reference_computes_where_no_kernel_would_run(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call looks at the tensor's own GPU and not at the current one."""
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(cuda_architectures="80 90"))
    monkeypatch.setattr(_kernels, "COVERED", {0: False, 1: True})
    silu = object.__new__(Op)
    silu.__dict__.update(vars(ops.silu), reference=lambda *args: "reference")
    with FakeTensorMode():
        x, bias = torch.empty(4, 8, device=f"cuda:{index}"), torch.empty(8, device=f"cuda:{index}")
        assert silu.fast(x) is bool(index) and _kernels.served(x) is bool(index)
        assert (silu(x, bias) == "reference") if index == 0 else isinstance(silu(x, bias), torch.Tensor)


@TWO
@pytest.mark.parametrize("index", [0, 1])
def test_before_ampere_ops_in_bf16_have_no_kernel(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one in fp16; what is to be computed in bf16 counts like what is in it. Weights and moments may be in it."""
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(cuda_architectures="75 80"))
    monkeypatch.setattr(_kernels, "COVERED", {0: True, 1: True})
    monkeypatch.setattr(_kernels, "GENERATIONS", {0: (7, 5), 1: (8, 9)})
    monkeypatch.setattr(_kernels, "CODES", {})
    silu = object.__new__(Op)
    silu.__dict__.update(vars(ops.silu), reference=lambda *args: "reference")
    with FakeTensorMode():
        for dtype, fits in ((torch.bfloat16, bool(index)), (torch.float16, True)):
            x, bias = (torch.empty(shape, device=f"cuda:{index}", dtype=dtype) for shape in ((4, 8), (8,)))
            assert silu.fast(x) is fits and _kernels.served(x, dtype) is fits and _kernels.served(x)
            assert isinstance(silu(x, bias), torch.Tensor) is fits
            assert _op.look((x.float(), None, dtype))[2] is fits


@TWO
@pytest.mark.parametrize(("built", "bf16", "hopper"), [
    ("75", False, False), ("75 80", True, False), ("80", True, False), ("75 90", True, True), ("75 80 90 100", True, True),
])  # fmt: skip
def test_a_build_for_older_gpus_on_a_newer_one(built: str, bf16: bool, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU can do is what the newest code can do that it runs. Before sm_80 there is none in bf16, which is said once."""
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(cuda_architectures=built))
    for known in ("COVERED", "GENERATIONS", "CODES"):
        monkeypatch.setattr(_kernels, known, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    silu = object.__new__(Op)
    silu.__dict__.update(vars(ops.silu), reference=lambda *args: "reference")
    with FakeTensorMode(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for dtype, fits in ((torch.bfloat16, bf16), (torch.float16, True), (torch.bfloat16, bf16)):
            x, bias = (torch.empty(shape, device="cuda:0", dtype=dtype) for shape in ((4, 8), (8,)))
            assert silu.fast(x) is fits and isinstance(silu(x, bias), torch.Tensor) is fits
            q = torch.empty(1, 4, 2, 64, device="cuda:0", dtype=dtype)
            assert takes(q, q, q, torch.empty(2, 7, device="cuda:0")) is fits
    assert _kernels.modern(0) and _kernels.hopper(0) is hopper
    said = ["modelcenter's kernels are for sm_75; GPU 0 is sm_90 and computes in bf16 with the references: `modelcenter doctor`"]
    assert [str(w.message) for w in seen] == ([] if bf16 else said)


@TWO
@pytest.mark.parametrize("dim", [40, 64, 80, 96, 128])
def test_before_ampere_attention_has_kernels_in_fp16(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For heads of every width; bf16 begins with Ampere."""
    monkeypatch.setattr(_kernels, "GENERATIONS", {0: (7, 5), 1: (8, 9)})
    monkeypatch.setattr(_kernels, "CODES", {})
    with FakeTensorMode():
        for index, dtype, fits in ((0, torch.float16, True), (0, torch.bfloat16, False), (1, torch.bfloat16, True)):
            q = torch.empty(1, 4, 2, dim, device=f"cuda:{index}", dtype=dtype)
            assert takes(q, q, q, torch.empty(2, 7, device=f"cuda:{index}")) is fits


@pytest.mark.skipif(not _kernels.available("cpu") or not hasattr(ctypes.CDLL(None), "omp_get_max_threads"), reason="no kernels")
def test_a_new_thread_has_as_many_threads_as_torch_was_told() -> None:
    """OpenMP keeps a number for each; torch's own ops see to theirs."""
    x, seed, before, found = torch.ones(64), torch.tensor([3]), torch.get_num_threads(), list[int]()

    def work() -> None:
        ops.dropout(x, None, seed, 0.5)
        found.append(ctypes.CDLL(None).omp_get_max_threads())

    try:
        for threads in (before + 2, before + 1):
            torch.set_num_threads(threads)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert found.pop() == threads
    finally:
        torch.set_num_threads(before)


def test_more_dimensions_than_kernels_take() -> None:
    """The reference takes any."""
    flat, many = torch.randn(6, 8), (1, 2, 1, 1, 1, 1, 1, 3, 8)
    x, w, b = flat.view(many).requires_grad_(), torch.rand(8).requires_grad_(), torch.rand(8).requires_grad_()
    ids, codes = torch.arange(6), ops.quantize_nf4(flat)
    table = {
        ops.gelu: ((x, b), (flat, b)),
        ops.layer_norm: ((x, w, b, 1e-5), (flat, w, b, 1e-5)),
        ops.embedding: ((ids.view(many[:-1]), flat, None), (ids, flat, None)),
    }  # fmt: skip
    for op, (deep, plain) in table.items():
        torch.testing.assert_close(op(*deep), op(*plain).view(many), rtol=1e-5, atol=1e-5)
    assert not ops.gelu.fast(x) and torch.equal(ops.quantize_nf4(x)[0], codes[0].view(*many[:-1], 4))
    out, same = beside(ops.layer_norm, x, w, b, 1e-5, None)
    assert same is x and torch.equal(out, ops.layer_norm(x, w, b, 1e-5))


def test_without_cuda_kernels_nothing_is_asked(cards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(cuda_architectures=""))
    assert not _kernels.available("cuda", 0) and not cards


class Asked(dict[int, bool]):
    """What a compiler cannot trace, as little as it could the driver."""

    def __contains__(self, index: object) -> bool:
        torch._dynamo.graph_break()
        return super().__contains__(index)


def test_the_answer_is_a_constant_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it sees no more: the driver is asked, and perhaps a warning given, while it compiles."""
    monkeypatch.setattr(_kernels, "_C", SimpleNamespace(cuda_architectures="80 90"))
    monkeypatch.setattr(_kernels, "COVERED", Asked({0: False}))

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if _kernels.covered(0) else x - 1

    assert torch.compile(f, fullgraph=True, backend="eager")(torch.zeros(())) == -1
