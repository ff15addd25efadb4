"""The op contract (contract.py), asked of every op that has a kernel on CUDA: `make gpu`."""

import pytest
import torch
from contract import (
    DTYPES,
    LAYOUTS,
    OPS,
    cases,
    close,
    each,
    is_as_exact,
    kernel_backed,
    kernels_called,
    leaves,
    operators,
    results,
    run,
    same,
    shown,
    some,
    through_operator,
)
from torch import Tensor

from modelcenter.ops import _kernels

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler recommends a coarser product of fp32, which nobody here wants
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    # what torch says where a product is the first that autograd's own thread does on a GPU
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
SMALL = 1500
each_op = pytest.mark.parametrize("name", kernel_backed("cuda"))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def card() -> None:
    if not torch.cuda.is_available() or not _kernels.available("cuda"):
        pytest.skip("no GPU, or no kernels for one")


@each_op
@each_dtype
def test_no_less_exact_than_the_peers(name: str, dtype: torch.dtype) -> None:
    for args in cases(name, "cuda", dtype):
        is_as_exact(name, args)


def test_a_tensor_s_own_gpu_is_where_its_kernel_runs() -> None:
    """On its stream, whichever GPU is current, and which stays so; tensors of two GPUs are refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, bias = torch.randn(64, 256, device="cuda:0"), torch.randn(256, device="cuda:0")
    wanted = OPS["gelu"](x, bias)
    with torch.cuda.device(0):
        found = OPS["gelu"](x.to("cuda:1"), bias.to("cuda:1"))
        assert found.device.index == 1 and torch.cuda.current_device() == 0
    same([found.cpu()], [wanted.cpu()])
    with pytest.raises(ValueError, match="on another device"):
        OPS["gelu"](x, bias.to("cuda:1"))


@each_op
def test_the_kernel_is_what_runs(name: str) -> None:
    with kernels_called() as seen:
        run(OPS[name], leaves(cases(name, "cuda", torch.float32)[-1]))
    assert len(seen) >= 2, "once forward and once backward"


@each_op
@each_dtype
def test_two_runs_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    for args in cases(name, "cuda", dtype):
        first = run(OPS[name], leaves(args))
        for _ in range(3):
            same(run(OPS[name], leaves(args)), first, (name, shown(args)))


@each_op
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_changes_nothing(name: str, layout: str, dtype: torch.dtype) -> None:
    for args in cases(name, "cuda", dtype):
        strange = each(leaves(args), LAYOUTS[layout])
        strange = each(strange, lambda a: a.detach().requires_grad_(a.requires_grad))
        close(run(OPS[name], strange), run(OPS[name], leaves(args)), (name, shown(args)))


@each_op
def test_on_another_stream(name: str) -> None:
    """The caller's current stream is the one that kernels are launched on: what it still has to do comes first."""
    for args in some(cases(name, "cuda", torch.float32), 2):
        wanted = run(OPS[name], leaves(args))
        inputs = each(args, torch.zeros_like)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for a, b in zip(inputs, args, strict=True):
                if isinstance(a, Tensor):
                    a.copy_(b)
            found = run(OPS[name], leaves(inputs))
        torch.cuda.current_stream().wait_stream(stream)
        same(found, wanted, name)


@each_op
def test_in_a_cuda_graph(name: str) -> None:
    """Captured, and replayed on other values."""
    for args in some(cases(name, "cuda", torch.float32, least=2), 1):
        wanted = run(OPS[name], leaves(args))
        static = leaves(each(args, torch.clone))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                OPS[name](*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = results(OPS[name](*static))
        with torch.no_grad():
            for a in static:
                if isinstance(a, Tensor) and a.is_floating_point():
                    a.zero_()
            graph.replay()
            for a, b in zip(static, args, strict=True):
                if isinstance(a, Tensor):
                    a.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        same([out.detach() for out in outs], wanted[: len(outs)], name)


@each_op
def test_registered_operators_are_sound(name: str) -> None:
    for args in some(cases(name, "cuda", torch.bfloat16, 300, 2), 2):
        for func, inputs in operators(name, args):
            torch.library.opcheck(func, inputs, test_utils=("test_schema", "test_faketensor"))


@each_op
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_break(name: str, backend: str) -> None:
    function = through_operator(OPS[name])
    for args in some(cases(name, "cuda", torch.float32, SMALL, 2), 1):
        torch.compiler.reset()
        compiled = torch.compile(lambda *args: function(*args), fullgraph=True, backend=backend)
        close(run(compiled, leaves(args)), run(function, leaves(args)), (name, shown(args)))
