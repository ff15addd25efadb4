"""CUDA's kernels without a GPU (emulate/cuda_runtime.h): each op by its kernel, against its reference, under AddressSanitizer, in
three orders of threads; and bugs planted in them, each of which must be noticed."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulate.build import CHECKED, CSRC, build, preload
from plant import Plant

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mutant(Plant):
    """Planted in csrc; of random cases of the op `only` one must then fail, saying `error`."""

    only: str
    error: str
    most: int = 600  # elements of a tensor
    cases: int = 100


@dataclass(frozen=True)
class Far(Plant):
    """Planted in csrc's attention; of REACH's cases one must then fail, saying `error`."""

    error: str
    chip: int = 228


@dataclass(frozen=True)
class Old(Plant):
    """Planted in csrc's attention; one of OLD's cases must then fail, saying `error`."""

    error: str


ORDER = "depends on the order of threads"
WRONG = r"AssertionError: (result|dequantised|tensor)"
LONG_ENOUGH = 12_000  # for sequences of several tiles
BOUNDS = "AddressSanitizer|runtime error: index"

MUTANTS = (
    Mutant("sums-read-before-all-are-written", "activation.cu",
           "[column(j)] = sums[j];\n    __syncthreads();", "[column(j)] = sums[j];", "silu", ORDER),
    Mutant("one-board-for-all-sums", "norm_rows.h", "    turn ^= 1;\n    return across", "    return across", "layer_norm", ORDER),
    Mutant("a-row-used-while-it-is-on-its-way", "norm_ring.h",
           "wait(p.stages - 2);", "wait(p.stages - 1);", "rms_norm", f"{ORDER}|{WRONG}"),
    Mutant("a-barrier-for-one-lane", "cross_entropy.cu", "    if (t % 32 == 0) parts[t / 32] = row;\n    __syncthreads();",
           "    if (t % 32 == 0) {\n        parts[t / 32] = row;\n        __syncthreads();\n    }", "cross_entropy", "in vain: "),
    Mutant("a-label-written-before-its-row", "cross_entropy.cu", "share);\n            __syncthreads();\n            if (known &&",
           "share);\n            if (known &&", "linear_cross_entropy", f"{ORDER}|{WRONG}"),
    Mutant("wrong-lane", "norm.cu", "s.mean = from_lane(found, 1);", "s.mean = from_lane(found, 2);", "layer_norm", WRONG),
    Mutant("a-column-too-many", "embedding.cu",
           "if (column + u * 32 < dim) to[", "if (column + u * 32 <= dim) to[", "embedding", BOUNDS),
    Mutant("words-of-odd-heads", "rotary.cu", "whole(FEW)) run", "aligned) run", "rotary", "misaligned address|AddressSanitizer"),
    Mutant("the-other-half's-nan", "embedding.cu", "0x7FC07FC0u : 0x7E007E00u", "0x7E007E00u : 0x7FC07FC0u", "embedding", WRONG),
    Mutant("a-frequent-row-that-there-is-not", "embedding.cu", "if (row < 0 || row >= vocab) return;", "", "embedding", BOUNDS,
           2100, 200),
    Mutant("a-label-that-there-is-not-written", "cross_entropy.cu", "if (known && threadIdx.x == 0)", "if (threadIdx.x == 0)",
           "linear_cross_entropy", BOUNDS),
    Mutant("its-gradient-written-too", "cross_entropy.cu", "if (label >= 0 && label < vocab && threadIdx.x == 0)",
           "if (threadIdx.x == 0)", "cross_entropy", BOUNDS),
    Mutant("the-next-rows'-sums-before-these-are-read", "quantize.cu",
           "        __syncthreads();  // all has been read before the next rows are written\n", "", "linear_nf4", ORDER),
    Mutant("the-next-row's-numbers-behind-a-row", "resize.cu", "col + EACH > width ||", "", "resize", WRONG),
    Mutant("numbers-behind-the-last-row", "resize.cu", "(shift[u] ? 2 : 1) * EACH <= end", "EACH <= end", "resize", BOUNDS, 600,
           300),
    Mutant("bytes-a-word-apart", "cuda.h", "if (SIZE == 1 && shift & 8)", "if (SIZE == 1 && shift & 16)", "resize", WRONG),
    Mutant("rows-of-no-band", "adafactor.cu", "height = (rows + bands - 1) / bands;", "height = rows / bands;", "adafactor",
           WRONG),
    Mutant("columns-added-up-too-early", "adafactor.cu", "+ i % SPAN<T>] = sums[i];\n    __syncthreads();",
           "+ i % SPAN<T>] = sums[i];", "adafactor", f"{ORDER}|{WRONG}"),
    Mutant("warps-that-have-not-been-added", "adafactor.cu", "warps[threadIdx.x / 32] = x;\n    __syncthreads();",
           "warps[threadIdx.x / 32] = x;", "adafactor", f"{ORDER}|{WRONG}"),
    Mutant("a-length-that-is-not-clipped", "adafactor.cu", "const float step = x[i] * by * mine", "const float step = x[i] * mine",
           "adafactor", WRONG),
    Mutant("steps-without-decay", "adafactor.cu", "rate, y[i] * keep)", "rate, y[i])", "adafactor", WRONG),
    Mutant("packs-that-are-not-whole", "adafactor.cu", "bool vector = m.columns % 8 == 0;", "bool vector = m.columns % 2 == 0;",
           "adafactor", f"{BOUNDS}|{WRONG}|misaligned"),
    Mutant("matrices-of-the-second-launch-as-the-first", "adafactor.cu", "sums.as<float>() + first * sums.shape.last()",
           "sums.as<float>()", "adafactor", WRONG),
    Mutant("weights-of-the-first-tile-alone", "adafactor.cu", "m.tiles(), 1, 0, out);", "1, 1, 0, out);", "adafactor", WRONG),
    Mutant("a-column-after-the-last", "adafactor.cu", "if (column < m.columns) of_columns", "if (column <= m.columns) of_columns",
           "adafactor", f"{BOUNDS}|{WRONG}|{ORDER}"),
    Mutant("a-pack-beyond-the-last-word", "embedding.cu", "if (at < count) __stcs", "if (at <= count) __stcs", "embedding", BOUNDS),
    Mutant("a-block-of-one-word", "embedding.cu", "ids[row + further]", "ids[row]", "embedding", WRONG, 2100),
    Mutant("columns-of-the-last-warp-miscounted", "norm.cu", "min(dim - warp * FOURS * 128, FOURS * 128)", "FOURS * 128",
           "layer_norm", WRONG),
    Mutant("a-four-of-the-next-row", "norm.cu", "first + j * 128 < dim;", "first + j * 128 <= dim;", "rms_norm",
           f"{BOUNDS}|{WRONG}"),
    Mutant("diagonals-added-up-too-early", "attention_backward.cu",
           "    __syncthreads();  // as in the forward\n            diagonals(", "    diagonals(", "relative_attention", ORDER),
    Mutant("edge-of-the-prompt-moved", "attention.h", "key = p.prompt - j;", "key = p.prompt - j + 1;", "relative_attention",
           WRONG, LONG_ENOUGH),
    Mutant("constants-without-a-gradient", "attention_backward.cu", "vector.at[own == 0 ? 0 : numbers + own - 2] = sum;",
           "vector.at[own == 0 ? 0 : numbers + own - 2] = own < 2 ? sum : 0.0f;", "relative_attention", WRONG, LONG_ENOUGH),
    Mutant("what-lies-across-left-to-its-distance", "attention_backward.cu", "x[m][n][e] = across ? 0.0f : x[m][n][e];", "",
           "relative_attention", WRONG, LONG_ENOUGH),
    Mutant("context-without-a-gradient-of-early-queries", "attention.h", "return j < open || j < t - s ? 0", "return j < t - s ? 0",
           "relative_attention", WRONG, LONG_ENOUGH),
    Mutant("second-part-of-a-row-one-off", "attention.h", "rest = (WIDE + at", "rest = (WIDE - 1 + at", "relative_attention",
           WRONG, LONG_ENOUGH),
    Mutant("the-first-group's-queries-twice", "attention.cu", "q + S::elements(64 * group));", "q);", "relative_attention",
           f"{ORDER}|{WRONG}", LONG_ENOUGH),
    Mutant("shared-memory-too-small", "cuda.h",
           "__shared__ float sums[16][33], rests", "__shared__ float sums[15][33], rests", "rms_norm", BOUNDS),
    Mutant("one-pack-of-two", "activation.cu", "bring<PASSING>(from + (shift ? 1 : 0))", "bring<PASSING>(from)", "swiglu", WRONG),
    Mutant("what-a-slope-lacks-added", "activation.cu", "fmaf(-both, below, both)", "fmaf(both, below, both)", "geglu",
           WRONG),
    Mutant("a-pack-beyond-the-end", "activation.cu",
           "at >= N && at + 2 * N <= count", "at >= N && at + N <= count", "swiglu", BOUNDS),
    Mutant("second-gradient-not-brought", "norm_backward.cu", "if (adds || two) other.copy(", "if (adds) other.copy(",
           "norm_twice", f"{WRONG}|{ORDER}"),
    Mutant("sums-of-the-last-group-lost", "norm_backward.cu", "i < static_cast<int>(blockDim.y); i++) total.add(",
           "i < static_cast<int>(blockDim.y) - 1; i++) total.add(", "layer_norm", WRONG),
    Mutant("sums-written-over-rows-in-use", "norm_backward.cu", "    const int width = SUMS * dim;\n    __syncthreads();",
           "    const int width = SUMS * dim;", "layer_norm", f"{ORDER}|{WRONG}"),
    Mutant("sums-read-before-the-groups-have-them", "norm_backward.cu", "dim, db[j]);\n    }\n    __syncthreads();",
           "dim, db[j]);\n    }", "layer_norm", f"{ORDER}|{WRONG}"),
    Mutant("a-four-of-sums-beyond-the-row", "norm_rows.h", "            if (has(four))\n", "            if (valid)\n", "layer_norm",
           f"{BOUNDS}|{WRONG}|{ORDER}"),
    Mutant("the-total's-gradient-in-the-branch's-dtype", "norm_backward.cu", "mine[j].template store<TOTAL>(p.total, at, d);",
           "mine[j].template store<D>(p.total, at, d);", "add_layer_norm", f"{BOUNDS}|{WRONG}"),
    Mutant("the-neighbour's-four-dropped", "activation.cu", "kept(words, j + 4, rate.threshold)", "kept(words, j, rate.threshold)",
           "gated_over", r"AssertionError: \w+: result"),
    Mutant("a-gradient-that-is-not-dropped", "activation.cu",
           "        drop(given, place<T>(first + u * TILE<T>));\n#pragma", "#pragma", "gated_over", r"AssertionError: \w+: result"),
    Mutant("a-four-beyond-the-row", "norm_rows.h",
           "(at + GAP < dim ? 0xF0 : 0)", "(at < dim ? 0xF0 : 0)", "layer_norm", f"{BOUNDS}|{WRONG}"),
    Mutant("a-four-copied-from-beyond-the-row", "norm_ring.h", "GAP == 4 || first(j) + GAP < dim", "true", "rms_norm", BOUNDS),
    Mutant("the-neighbour's-random-bits", "norm_rows.h", "odd ? other >> 4 | (mine & 0xF0u)", "odd ? other >> 4 | (other & 0xF0u)",
           "add_layer_norm", WRONG, 4000),
    Mutant("eight-columns-in-a-row", "norm_rows.h", "first + k + (k < 4 ? 0 : GAP - 4)", "first + k", "rms_norm",
           f"{ORDER}|{WRONG}"),
    Mutant("a-result-beyond-its-gradient's-end", "activation.cu",
           "put<false>(y, rounded<T>(given), place<T>(first + u * TILE<T>), count);",
           "put<false>(y, rounded<T>(given), place<T>(first + u * TILE<T>), count + 1);", "gated_over", BOUNDS),
    Mutant("dS-written-before-it-was-read", "attention_backward.cu", "if (stored) wait_until(m.empty + group, (stored - 1) % 2);",
           "", "relative_attention_in_crowds", "in vain: ", cases=1),
    Mutant("the-next-tile-from-the-other-end", "attention.cu", "tiles_of_one - 1 - after % tiles_of_one", "after % tiles_of_one",
           "relative_attention_in_crowds", WRONG, cases=1),
    Mutant("a-weight-from-beyond-the-row", "norm.cu", "p.dim <= 2048 && p.dim % 256 == 0)", "p.dim <= 2048)", "rms_norm", BOUNDS),
    Mutant("a-row-dequantised-twice", "quantize.cu", "first + r < rows ? first + r : first;", "first;", "quantize_int8", WRONG),
    Mutant("a-row-beyond-the-last", "quantize.cu", "if (first + r >= rows) continue;", "", "quantize_int8", BOUNDS),
    Mutant("the-first-of-a-pair-twice", "rotary.cu", "found[APART - 1][INTERLEAVED", "found[0][INTERLEAVED", "rotary", WRONG),
)

# Where a bias is one number: each way, by each kernel's tiles. What is wrongly taken for far is a tile with one score that is not.
FAR = (
    Far("far-behind-by-all-but-a-score", "attention.h", ": p.high - first;", ": p.high - 1 - first;", "out"),
    Far("far-before-by-all-but-a-score", "attention.h", ": p.low - first - COUNT + 1,", ": p.low - first - COUNT + 2,", "out"),
    Far("keys-far-behind-by-all-but-a-score", "attention.h", "? first - p.high :", "? first - p.high + 1 :", "d[kv]"),
    Far("keys-far-before-by-all-but-a-score", "attention.h", "? first + COUNT - 1 -", "? first + COUNT - 2 -", "d[kv]"),
    Far("a-pair's-tiles-counted-from-the-next-key", "attention.cu", "number<64>(p, of, first, 0)", "number<64>(p, of, first, 1)",
        "out"),
    Far("a-pair's-tiles-counted-from-the-key-before", "attention.cu", "number<64>(p, of, first, 0)", "number<64>(p, of, first, -1)",
        "out"),
    Far("tiles-counted-from-the-next-key", "attention.cu", "near(p, bias.first);", "near(p, bias.first + 1);", "out"),
    Far("tiles-counted-from-the-key-before", "attention.cu", "near(p, bias.first);", "near(p, bias.first - 1);", "out", 164),
    Far("the-other-end's-number", "attention.cu", "step < near.begin ? -2 : -1", "step < near.begin ? -1 : -2", "out"),
    Far("dQ's-tiles-counted-from-the-next-key", "attention_backward.cu", "near(p, begins);", "near(p, begins + 1);", "dq"),
    Far("dQ's-tiles-counted-from-the-key-before", "attention_backward.cu", "near(p, begins);", "near(p, begins - 1);", "dq", 164),
    Far("the-sum-of-the-far-to-the-other-end", "attention_backward.cu", "vector.add(step < first, x);",
        "vector.add(step >= last, x);", "dbias"),
    Far("near-sums-of-the-first-number-lost", "attention_backward.cu", "return number > p.low &&", "return number >= p.low &&",
        "dbias"),
    Far("near-sums-of-the-last-number-lost", "attention_backward.cu", "&& number < p.high;", "&& number <= p.high;", "dbias", 164),
)

# Heads of more than 64 channels on Turing.
WIDE = (
    Old("as-many-rows-as-on-ampere", "attention.h", "chip < 80 && dim > 64", "chip < 70 && dim > 64", "bytes of shared memory"),
    Old("as-many-rows-of-128-channels-as-of-96", "attention.h", "CHANNELS <= 96 ? 32 : 16", "32", "bytes of shared memory"),
    Old("no-channel-after-the-96th", "attention.h", "        if (dim <= 96)", "        if (dim <= 128)", "AssertionError: out: "),
)

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
slow = pytest.mark.slow
pytestmark = [needs_compiler, pytest.mark.timeout(900)]


HOPPER, AMPERE, TURING = 228, 164, 64  # KB of shared memory, by which the emulator knows the chip


def python(kernels: Path, *arguments: str, loaded: str = "", chip: int = HOPPER) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MODELCENTER_KERNELS": str(kernels), "PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": "1",
           "LD_PRELOAD": loaded, "MODELCENTER_EMULATE": f"1 {chip}", "ASAN_OPTIONS": "detect_leaks=0"}  # fmt: skip
    return subprocess.run([sys.executable, *arguments], cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=800)


def fuzzed(kernels: Path, only: str, cases: int, loaded: str = "", chip: int = HOPPER,
           most: int = 600) -> subprocess.CompletedProcess[str]:  # fmt: skip
    return python(kernels, "tests/emulate/pretend.py", "tests/fuzz_ops.py", "--only", only, "--cases", str(cases), "--compare", "1",
                  "--most", str(most), loaded=loaded, chip=chip)  # fmt: skip


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all kernels were built, under sanitizers."""
    folder = tmp_path_factory.mktemp("emulated")
    build(folder, CSRC, CHECKED)
    return folder


def made(folder: Path) -> Path:
    return next(folder.glob("_C*"))


FREQUENT = """
from modelcenter.ops.embedding import embedding_backward
torch.manual_seed(0)
for n, vocab, dim, pad in ((300, 1, 33, None), (513, 2, 520, None), (1500, 5, 40, 2), (1025, 3, 129, None)):
    ids, grad = torch.randint(vocab, (n,)), torch.randn(n, dim)
    ids[: n // 2] = vocab - 1
    wanted = torch.zeros(vocab, dim, dtype=torch.float64).index_add_(0, ids, grad.double())
    if pad is not None:
        wanted[pad] = 0
    torch.testing.assert_close(embedding_backward(grad, ids, vocab, pad).double(), wanted, rtol=1e-5, atol=1e-4)
"""


SHARED = """
from emulate.pretend import pretend
pretend()
import torch
from modelcenter.ops import _norm
torch.manual_seed(0)
for rows, dim in ((1, 1600), (2, 1600), (23, 1600), (14, 1288), (14, 1704)):
    for centred in (True, False):
        grad, x = (torch.randn(rows, dim).bfloat16() for _ in range(2))
        weight = torch.rand(dim) + 0.5
        bias = torch.rand(dim) if centred else None
        stats = _norm.forward(x, None, weight, bias, 1e-5, None, 0.0, None)[2]
        dx, _, dweight, dbias = _norm.norm_backward(grad, None, x, None, weight, stats, centred, None, 0.0, None)
        x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
        mean = x.mean(-1, keepdim=True) if centred else 0
        h = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt()
        wanted = torch.autograd.grad(h * weight, (x, weight), grad.double())
        torch.testing.assert_close(dx.double(), wanted[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(dweight.double(), wanted[1], rtol=1e-3, atol=1e-3)
        if centred:
            torch.testing.assert_close(dbias.double(), grad.double().sum(0), rtol=1e-3, atol=1e-3)
"""


NORMS = ("norm", "norm_backward", "embedding")
ATTENTION = ("attention", "attention_backward")
SOME = ("-Og",)  # compiled in a third of the time of -O1, running in a third more of it


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which some kernels are built, now these and now those: most of it is the same and is taken over."""
    return tmp_path_factory.mktemp("parts")


def passes(kernels: Path, *what: str) -> None:
    done = python(kernels, "-m", "pytest", "-q", "-p", "emulate.pretend", "-p", "no:cacheprovider", "-m", "not gpu", *what)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# Each width, dtype and norm once or more: `test_norms_round_once` has all of them.
ROUNDED = [f"tests/test_rounding.py::test_the_norm_of_a_sum_is_rounded_once[{case}-cpu]" for case in (
    "768-torch.float16-add_rms_norm", "771-torch.bfloat16-add_layer_norm", "1600-torch.bfloat16-add_rms_norm")]  # fmt: skip


def test_norms_and_embeddings(parts: Path) -> None:
    """What takes a few seconds to build and waits for other threads in every way there is; and rows of frequent words."""
    kernels = build(parts, CSRC, ("-O0",), NORMS)
    done = fuzzed(kernels, "layer_norm,add_rms_norm,norm_twice,embedding", 40)
    assert done.returncode == 0 and "none wrong" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    done = python(kernels, "-c", SHARED + FREQUENT)  # groups of threads that share warps; and frequent words
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    passes(kernels, *ROUNDED, "tests/test_rounding.py::test_the_gradient_of_the_norm_of_a_sum_is_rounded_with_what_is_added",
           "tests/test_norm.py::test_the_gradient_of_a_row_of_equal_numbers_is_that_of_zeros")  # fmt: skip


@slow
def test_norms_round_once(parts: Path) -> None:
    """The norm of a sum, of every width, dtype and kind."""
    passes(build(parts, CSRC, ("-O0",), NORMS), "tests/test_rounding.py", "-k", "norm_of_a_sum")


@slow
def test_every_kernel(checked: Path) -> None:
    done = fuzzed(made(checked), "", 400, preload())
    assert done.returncode == 0 and "none wrong" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


LONG = """
from emulate import pretend
pretend.pretend()
import importlib, sys
import torch
kind, dim, packed = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
attention = importlib.import_module("modelcenter.ops.relative_attention")
torch.manual_seed(0)
# where nothing is padding or a prompt there is a kernel of its own; 66: of some tiles all but one number are further
cases = (150, False, 0), (350, True, 0), (350, True, 66), (230, False, 66)
if dim > 64:  # all of them would take too long
    cases, pretend.ORDERS = cases[::2], (0,)
for length, plain, reach in cases:
    q, k, v, grad = (torch.randn(3, length, 2, dim).to(kind) for _ in range(4))
    seen = None if plain else torch.arange(length).expand(3, -1) != 100  # in the second half of a tile of keys
    context = torch.tensor([[0], [70], [150]], dtype=torch.int32)
    bias = torch.randn(2, 2 * length - 1 + 2 * (not plain)) * (8 if plain else 1)
    args = q, k, v, bias, seen, None, None, context, length, length, 0 if plain else 40, reach, dim**-0.5, True, None, 0.0
    out, lse = attention.relative_attention_forward(*args)
    found = []
    for attention.PARTS in (1, 4, 256):
        found.append(attention.relative_attention_backward(*args, out, lse, grad, True, attention.PARTS == 4))  # side by side
    leaves = [a.double().requires_grad_() for a in args[:4]]
    wanted = attention.reference(*leaves, *args[4:])
    torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.02)
    (of_bias,) = torch.autograd.grad(wanted, leaves[3:], grad.double())
    assert (found[-1][3] - of_bias).norm() < 0.01 * of_bias.norm()
    for some in found[:-1]:
        assert all(torch.equal(a, b) for a, b in zip(some[:3], found[-1]))
        torch.testing.assert_close(some[3], found[-1][3], rtol=1e-4, atol=1e-4)
for length, ends in ((330, [0, 130, 200, 330]), (730, [0, 330, 400, 730])):  # the second: backward a block does a head
    q, k, v, grad = (torch.randn(1, length, 2, packed).half() for _ in range(4))
    lengths, longest = torch.tensor(ends, dtype=torch.int32), ends[1]
    bias = torch.ones(2, 2 * longest - 1) if longest < 200 else None
    found = []
    for _ in range(2):
        args = q, k, v, bias, None, lengths, lengths, None, longest, longest, 0, 0, packed**-0.5, False, None, 0.0
        out, lse = attention.relative_attention_forward(*args)
        found.append([out, *attention.relative_attention_backward(*args, out, lse, grad, True, bool(found))[:3]])
        if len(found) == 1 and bias is None:
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            wanted = torch.autograd.grad(attention.reference(*leaves, *args[3:]), leaves, grad.double())
            for one, other in zip(found[0][1:], wanted):
                assert (one - other).norm() < 1e-3 * other.norm()
        for x in (q, k, v, grad):
            x[:, ends[1] : ends[2]] = float("nan")
    for one, other in zip(*found):
        for rows in (slice(ends[1]), slice(ends[2], length)):
            assert torch.equal(one[:, rows], other[:, rows]), "neighbours of a sequence of nan"
"""


@slow
def test_attention_over_several_tiles(tmp_path: Path) -> None:
    """Of keys, and a block adds up the bias' gradient of several of queries, where those are more than PARTS: random cases are too
    small for either. By warpgroups and by warps; random cases of the latter, which `test_every_kernel` has only of large heads."""
    kernels = build(tmp_path, CSRC, only=ATTENTION)
    narrow = ("bfloat16", "16", "64")
    for chip, sizes in ((HOPPER, narrow), (AMPERE, narrow), (TURING, ("float16", "128", "96"))):
        done = python(kernels, "-c", LONG, *sizes, chip=chip)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for chip in (AMPERE, TURING):
        done = fuzzed(kernels, "relative_attention", 40, chip=chip)
        assert done.returncode == 0 and "none wrong" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


REACH = """
from emulate import pretend
pretend.pretend()
import importlib
import torch
attention = importlib.import_module("modelcenter.ops.relative_attention")
torch.manual_seed(0)
length, both = 200, (False, True)
distance = torch.arange(1 - length, length)
every, edges = (63, 64, 65, 66, 127, 128, 129, 130), (66, 130)  # edges: of a tile all but the score of a corner are further
for dim, padded, reaches in ((16, False, every), (16, True, edges), (104, False, edges)):
    seen = torch.arange(length)[None] != 100 if padded else None
    q, k, v, grad = (torch.randn(1, length, 1, dim).half() for _ in range(4))
    for reach, causal in ((reach, causal) for reach in reaches for causal in both if reach in edges or not causal):
        pretend.ORDERS = (1, 2, 0) if reach == 66 and causal == padded else (0,)  # where a tile is far matters to no order
        bias = torch.where(distance < 0, 4.0, 3.0)[None].masked_fill(distance.abs() < reach, 0.0)
        bias[0, distance.abs() == reach - 1] = 7.0  # the last that is not far: a score of it has most of what its row has
        bias[0, distance.abs() > reach] = float("nan")  # never read
        args = q, k, v, bias, seen, None, None, None, length, length, 0, reach, dim**-0.5, causal, None, 0.0
        out, lse = attention.relative_attention_forward(*args)
        found = out, *attention.relative_attention_backward(*args, out, lse, grad, True)
        leaves = [a.double().requires_grad_() for a in args[:4]]
        result = attention.reference(*leaves, *args[4:])
        wanted = result, *torch.autograd.grad(result, leaves, grad.double())
        for what, one, other in zip(("out", "dq", "dk", "dv", "dbias"), found, wanted):
            error = (one - other).abs().max().item() / other.abs().max().item()
            assert error < 0.005, f"{what}: {error:.2g}, {dim=} {padded=} {reach=} {causal=}"
"""


@pytest.fixture(scope="module")
def attention(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which attention alone was built, with the module as the norms have it."""
    folder = tmp_path_factory.mktemp("attention")
    for file in parts.glob("module.*"):
        shutil.copy(file, folder)
    build(folder, CSRC, SOME, ATTENTION)
    return folder


def with_a_bug(mutant: Plant, attention: Path, tmp_path: Path) -> Path:
    """The extension of attention alone with the bug in it."""
    source, folder = tmp_path / "csrc", tmp_path / "made"
    shutil.copytree(CSRC, source)
    shutil.copytree(attention, folder)
    mutant.into(source)
    return build(folder, source, SOME, ATTENTION)


@pytest.mark.parametrize("chip", [HOPPER, *(pytest.param(chip, marks=slow) for chip in (AMPERE, TURING))])
def test_the_distance_from_which_a_bias_is_one_number(attention: Path, chip: int) -> None:
    done = python(made(attention), "-c", REACH, chip=chip)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


OLD = """
from emulate import pretend
pretend.pretend()
import torch
from contract import kernels_called
from modelcenter.ops.dropout import draw
from modelcenter.ops.relative_attention import relative_attention
torch.manual_seed(0)
length, seed = 140, draw(torch.device("cpu"))
heads = (40, 40, "half"), (64, 0, "half"), (80, 40, "half"), (96, 0, "half"), (128, 40, "half"), (80, 0, "bfloat16")
for dim, prompt, dtype in heads:
    pretend.ORDERS = (1, 2, 0) if prompt and dim > 64 else (0,)
    q, k, v, grad = (getattr(torch.randn(1, length, 1, dim), dtype)() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(1, 2 * length - 1 + 2 * (prompt > 0)))]
    seen, rate = (torch.arange(length)[None] != 100, 0.1) if prompt else (None, 0.0)
    rest = seen, None, None, None, length, length, prompt, 70, dim**-0.5, not prompt, seed if prompt else None, rate
    with kernels_called() as called:
        out = relative_attention(*leaves, *rest)
        found = out, *torch.autograd.grad(out, leaves, grad)
    kernels = ["relative_attention", "relative_attention_backward"] if dtype == "half" else []
    names = [name for name, _ in called]
    assert names == kernels, f"{dim=} {dtype=}: {names}"
    exact = [x.detach().double().requires_grad_() for x in leaves]
    result = relative_attention.reference(*exact, *rest)
    wanted = result, *torch.autograd.grad(result, exact, grad.double())
    for what, one, other in zip(("out", "dq", "dk", "dv", "dbias"), found, wanted):
        error = (one - other).abs().max().item() / other.abs().max().item()
        assert error < (0.002 if kernels else 0.02), f"{what}: {error:.2g}, {dim=} {prompt=}"
"""


def test_heads_of_every_width_before_ampere(attention: Path) -> None:
    """In fp16, by tiles that 64 KB hold, forward and backward with the bias' gradient; bf16 has no kernels there."""
    done = python(made(attention), "-c", OLD, chip=TURING)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


OLDER = """
from emulate import pretend
pretend.pretend()
import torch
from contract import kernels_called
from modelcenter import ops
x, seed = torch.ones(64), torch.tensor([3])
for dtype, kernels in ((torch.float16, ["dropout"]), (torch.bfloat16, [])):
    with kernels_called() as called:
        out = ops.dropout(x.to(dtype), None, seed, 0.5)
    assert [name for name, _ in called] == kernels, f"{dtype}: {called}"
    assert torch.equal(out, ops.dropout.reference(x.to(dtype), None, seed, 0.5))
try:
    ops.dropout.kernel.forward.direct(x.bfloat16(), None, seed, 0.5)
except ValueError as error:
    print(error)
"""
BEFORE_AMPERE = "dropout: no kernels in bf16, as this build is for compute capabilities before 8.0 alone; the GPU's is {}"


def test_a_build_for_turing_alone_on_a_later_gpu(tmp_path: Path) -> None:
    """Runs what was compiled for sm_75, where kernels for bf16 are empty: the references compute, and a kernel refuses."""
    kernels = build(tmp_path, CSRC, ("-O0",), ("dropout",), "75")
    for chip, name in ((HOPPER, "9.0"), (AMPERE, "8.0")):
        done = python(kernels, "-c", OLDER, chip=chip)
        assert done.returncode == 0 and done.stdout.strip() == BEFORE_AMPERE.format(name), done.stdout + done.stderr[-3000:]


TILES = """
from emulate import pretend
pretend.pretend()
import hashlib
import torch
from modelcenter.ops.relative_attention import relative_attention
torch.manual_seed(0)
pretend.ORDERS = (0,)
q, k, v = (torch.randn(1, 200, 1, 96).half() for _ in range(3))
out = relative_attention(q, k, v, None, None, None, None, None, 200, 200, 0, 0, 0.5, False, None, 0.0)
print(hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


@slow
def test_attention_of_a_build_for_turing_alone(tmp_path: Path) -> None:
    """Has the tiles of that chip on any later one, bit by bit, as there is no code for others; a build for both does not."""
    found = {archs: [python(build(tmp_path / archs, CSRC, ("-O0",), ("attention",), archs), "-c", TILES, chip=chip).stdout
                     for chip in (TURING, AMPERE, HOPPER)] for archs in ("75", "75 80 90")}  # fmt: skip
    assert found["75"][0] and found["75"] == [found["75"][0]] * 3
    assert len({*found["75 80 90"]}) > 1 and found["75 80 90"][0] == found["75"][0]


@slow
@pytest.mark.parametrize("mutant", FAR, ids=[mutant.name for mutant in FAR])
def test_mutant_of_far_tiles(mutant: Far, attention: Path, tmp_path: Path) -> None:
    done = python(with_a_bug(mutant, attention, tmp_path), "-c", REACH, chip=mutant.chip)
    assert done.returncode != 0 and re.search(f"AssertionError: {mutant.error}: ", done.stderr), done.stdout + done.stderr[-3000:]


@slow
@pytest.mark.parametrize("mutant", WIDE, ids=[mutant.name for mutant in WIDE])
def test_mutant_of_wide_heads(mutant: Old, attention: Path, tmp_path: Path) -> None:
    done = python(with_a_bug(mutant, attention, tmp_path), "-c", OLD, chip=TURING)
    assert done.returncode != 0 and re.search(mutant.error, done.stderr), done.stdout + done.stderr[-3000:]


@slow
def test_the_contract(checked: Path) -> None:
    done = python(made(checked), "-m", "pytest", "-q", "-p", "emulate.pretend", "-p", "no:cacheprovider", "tests/test_kernels.py",
                  "-k", "no_less_exact or wanted_alone or strange_gradients or (layout and misaligned and lu)",
                  loaded=preload())  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_mutant(mutant: Mutant, checked: Path, tmp_path: Path) -> None:
    source, folder = tmp_path / "csrc", tmp_path / "made"
    shutil.copytree(CSRC, source)
    shutil.copytree(checked, folder)
    mutant.into(source)
    done = fuzzed(build(folder, source, CHECKED), mutant.only, mutant.cases, preload(), most=mutant.most)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and re.search(mutant.error, said), said[-3000:]
