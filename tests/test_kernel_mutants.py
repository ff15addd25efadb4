"""Bugs planted in the CPU's kernels. Each changes a line of a copy of csrc, is compiled for the instruction set that is used here,
and the test that it names must then fail; on an unchanged copy all of them pass. AMX is by hand (tests/emulate/amx.h).
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from plant import Plant

from modelcenter.ops import _kernels

HERE = Path(__file__).parent
LEVELS = {"base": 0, "avx2": 1, "avx512": 2}


@dataclass(frozen=True)
class Mutant(Plant):
    """Planted in csrc; `test` must then fail."""

    test: str
    error: str = "(AssertionError|assert )"
    tiles: bool = False  # by tests/emulate/amx.h


def exact(op: str, dtype: str = "float32") -> str:
    return f"test_kernels.py::test_no_less_exact_than_the_peers[torch.{dtype}-{op}]"


def bitwise(dtype: str, options: str, moments: str = "bf16") -> str:
    return f"test_adamw.py::test_the_kernel_is_the_reference_bit_for_bit[torch.{dtype}-{options}-{moments}-aligned-cpu]"


ALONE = "test_rounding.py::test_attention_in_16_bits_rounds_its_results_alone[torch.bfloat16]"
DECAY = "    p = p * c.keep;\n"
MOMENTS = "    m = m + (g - m) * c.rise1;\n    v = v * c.keep2 + (g * g) * c.rise2;\n"
STEP = "    p = p - exact.ratio(m * item.size, exact.root(v) * item.root + c.eps);\n"
# e^x of what is hidden: as each instruction set has it
BELOW = "_mm512_set1_ps(-87.0f), _CMP_NLT_UQ" if _kernels._C and _kernels._C.cpu_level == "avx512" else "return x < -87.0f; });"

MUTANTS = (
    Mutant("norm-forgets-the-mean-of-the-gradient", "norm.cpp", "level = dbias ? sum(found.second) / n : 0.0f;",
           "level = 0.0f;", exact("layer_norm")),
    Mutant("second-gradient-half-read", "norm.cpp", "const vf d = given(i, lanes), g", "const vf d = load_n(grad + i, lanes), g",
           "test_norm.py::test_two_read_a_norm[both-0.0-torch.float32-cpu-LayerNorm]"),
    Mutant("partial-sum-of-one-chunk-lost", "norm.cpp", "for (int64_t chunk = 0; chunk < chunks; chunk++) total",
           "for (int64_t chunk = 0; chunk + 1 < chunks; chunk++) total", exact("rms_norm")),
    Mutant("what-a-sum-rounds-off-lost", "simd.h", "choose<pf>(rest - rest, sum + rest, sum,", "choose<pf>(rest - rest, sum, sum,",
           "test_rounding.py::test_an_activation_errs_by_about_a_rounding[gelu-cpu]"),
    Mutant("branch-of-what-was-rounded", "norm.cpp", "        return all;\n", "        return load_n(stream + i, lanes);\n",
           "test_rounding.py::test_the_gradient_of_a_branch_is_rounded_once[add_rms_norm-cpu]"),
    Mutant("sum-normed-as-it-was-rounded", "norm.cpp", "whole ? normed(whole) : normed(", "normed(",
           "test_rounding.py::test_the_norm_of_a_sum_is_rounded_once[768-torch.bfloat16-add_layer_norm-cpu]"),
    Mutant("what-is-but-rounding-normed", "norm.cpp", "if (whole && found.far())", "if (false)",
           "test_ops.py::test_values_and_gradients_are_the_formulas[torch.bfloat16-add_layer_norm]"),
    Mutant("one-sum-of-many", "product.h", "SUM = TURNED || add ? 64 : 32;", "SUM = TURNED || add ? 1 << 20 : 32;",
           "test_rounding.py::test_attention_adds_up_sums_of_few"),
    Mutant("scores-summed-at-once", "product.h", "int64_t SUM = TURNED || add ? 64 : 32;", "int64_t SUM = 64;",
           "test_rounding.py::test_attention_adds_up_sums_of_few"),
    Mutant("probabilities-of-a-rounded-logarithm", "attention.cpp", "below(score - top) * share,",
           "below(score - (top - std::log(share))),", "test_rounding.py::test_attention_adds_up_sums_of_few"),
    Mutant("a-digit-of-gelu's-tail-lost", "activation.h", "0.45921970561316305f", "0.4592f",
           "test_rounding.py::test_an_activation_errs_by_about_a_rounding[gelu-cpu]"),
    Mutant("last-part-of-a-bias-lost", "activation.cpp", "for (int64_t part = 0; part * height < rows; part++)",
           "for (int64_t part = 0; (part + 1) * height < rows; part++)", exact("gelu")),
    Mutant("odd-half-of-a-byte-lost", "quantize.cpp", "memcpy(some, p, (n + 1) / 2);", "memcpy(some, p, n / 2);",
           "test_quantize.py::test_kernels_and_references_agree_to_the_bit[torch.float32-nf4-cpu]"),
    Mutant("truncated-not-rounded", "adamw.cpp", "nan : (u + random) >> 16", "nan : u >> 16", bitwise("bfloat16", "plain")),
    Mutant("decay-after-the-update", "adamw.h", DECAY + MOMENTS + STEP, MOMENTS + STEP + DECAY, bitwise("float32", "nearest")),
    Mutant("bits-of-m-for-the-parameter", "adamw.h", "(word >> 8) & 0xFFFFu", "word & 0xFFFFu", bitwise("bfloat16", "plain")),
    Mutant("scale-of-the-last-sixteen", "adamw.cpp", "top = higher(top, there(y)),", "top = there(y),",
           bitwise("float32", "plain", "int8")),
    Mutant("nan-is-no-magnitude", "simd.h", "return by_parts<pi, pi>(a, b, [](pi x, pi y) { return x > y ? x : y; });",
           "return as<vi>(vmax(as<vf>(a), as<vf>(b)));",
           "test_adamw.py::test_they_agree_about_strange_gradients_too[nan-int8-cpu]"),
    Mutant("elements-that-are-not-there", "adamw.cpp", "there(z));", "as<vi>(vabs(z)));",
           "test_adamw.py::test_they_agree_about_strange_gradients_too[inf-int8-cpu]"),
    Mutant("wrong-lane-of-philox", "dropout.cpp", "random + i, threshold", "random + (i ^ 16), threshold", exact("dropout")),
    Mutant("one-past-the-table", "embedding.cpp", "id >= vocab", "id > vocab",
           "test_embedding.py::test_an_id_outside_is_refused_on_the_cpu[40]", "Failed"),
    Mutant("no-label-is-ignored", "cross_entropy.h", "constexpr int64_t IGNORE = -100;", "constexpr int64_t IGNORE = -1;",
           exact("cross_entropy"), "ValueError"),
    Mutant("gradient-over-the-logits-unscaled", "cross_entropy.h", 'if (PASS == BOTH) scale = static_cast<F>(call.real("scale"));',
           'if (PASS == BOTH) call.real("scale");', "test_head.py::test_autocast[op-True-torch.float16]"),
    Mutant("half-of-the-z-loss", "cross_entropy.cpp", "grad * (1 + 2 * loss.z * lse[i])", "grad * (1 + loss.z * lse[i])",
           exact("cross_entropy")),
    Mutant("inner-product-of-the-last-keys", "attention.cpp", "inner[r] += sum(total);", "inner[r] = sum(total);",
           ALONE),
    Mutant("what-was-dropped-weighs", "attention.cpp", "kept = drop ? vmax(vf{}, e) : e;", "kept = drop ? vabs(e) : e;",
           ALONE),
    Mutant("what-was-dropped-has-no-gradient", "attention.cpp", "- vabs(e) * mean", "- kept * mean",
           ALONE),
    Mutant("hidden-keys-weigh-something", "attention.cpp", BELOW, BELOW.replace("-87.0f", "-INFINITY"),
           "test_rounding.py::test_hidden_keys_weigh_nothing[-92.0]"),
    Mutant("sum-of-earlier-keys-not-rescaled", "attention.cpp", "                total[r] *= less;\n", "", exact("attention")),
    Mutant("a-mask-of-nan-hides", "attention.cpp", "return x == -INFINITY; }", "return ~(x > -INFINITY); }",
           "test_kernels.py::test_no_nan_is_lost[torch.float32-attention]"),
    Mutant("what-a-probability-cuts-off-lost", "product.h", "if constexpr (LEFT) { MC_LEFT(left + a.low) MC_MULTIPLY }", "",
           ALONE, tiles=True),
    Mutant("what-is-turned-cuts-nothing-off", "product.h", "if constexpr (RIGHT) { MC_RIGHT(right + b.low) MC_MULTIPLY }", "",
           ALONE, tiles=True),
    Mutant("scale-of-tiles-lost", "attention.cpp", "if (scale != 1)", "if (false)", exact("attention", "bfloat16"), tiles=True),
    Mutant("keys-past-the-last-pair-unwritten", "attention.cpp", "split_columns(spare, x, rows, LINE, up(keys, 32));",
           "split_columns(spare, x, rows, LINE, keys);", ALONE, tiles=True),
    Mutant("no-shape-said", "attention.cpp", "    [[maybe_unused]] const Shaped<U> shape;\n    const B", "    const B",
           ALONE, "Fatal", tiles=True),
    Mutant("turned-forth-again", "rotary.h", "? -1.0f : 1.0f", "? 1.0f : 1.0f", exact("rotary")),
)
# elsewhere the line does not run
if torch.cpu._is_avx512_bf16_supported() and "GenuineIntel" not in Path("/proc/cpuinfo").read_text():
    MUTANTS += (
        Mutant("scale-of-pairs-lost", "product.h", "sums[i][j], _mm512_set1_ps(times)", "sums[i][j], _mm512_set1_ps(1)",
               exact("attention", "bfloat16")),
    )  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not _kernels.available("cpu") or not shutil.which("g++"), reason="no compiled kernels"),
]


def build(source: Path, temp: Path, tiles: bool) -> Path:
    """The extension at one level of optimisation and one instruction set: what is wrong is so with any."""
    flags = f"-O1 -w -include {HERE / 'emulate' / 'amx.h'}" if tiles else "-O1 -w"
    env = {**os.environ, "MODELCENTER_CUDA": "0", "CFLAGS": flags, "MODELCENTER_LEVELS": str(LEVELS[_kernels._C.cpu_level])}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(temp), "--build-lib", str(temp)]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=500)
    made = list((temp / "modelcenter").glob("_C*"))
    assert made and not done.stderr, done.stderr
    return made[0]


def verdict(kernels: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    dirty = {"MALLOC_PERTURB_": "1"}  # memory that nothing was written to is nothing like 0
    env = {**os.environ, "MODELCENTER_KERNELS": str(kernels), "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "2", **dirty}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *(str(HERE / test) for test in tests)]
    return subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=500)


Built = dict[bool, tuple[Path, Path]]  # by hand or not: the objects, the extension


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    source = tmp_path_factory.mktemp("kernels") / "source"
    for part in ("csrc", "modelcenter", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        place = HERE.parent / part
        skip = shutil.ignore_patterns("_C*", "__pycache__")
        shutil.copytree(place, source / part, ignore=skip) if place.is_dir() else shutil.copy2(place, source / part)
    return source


@pytest.fixture(scope="module")
def unchanged(source: Path) -> Built:
    temps = {tiles: source.parent / ("tiles" if tiles else "temp") for tiles in (False, True)}
    return {tiles: (temp, build(source, temp, tiles)) for tiles, temp in temps.items()}


@pytest.mark.parametrize("tiles", [False, True], ids=["here", "tiles"])
def test_unchanged_all_pass(unchanged: Built, tiles: bool) -> None:
    done = verdict(unchanged[tiles][1], *dict.fromkeys(mutant.test for mutant in MUTANTS if mutant.tiles is tiles))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_mutant(mutant: Mutant, source: Path, unchanged: Built, tmp_path: Path) -> None:
    shutil.copytree(unchanged[mutant.tiles][0], tmp_path / "temp")
    file = source / "csrc" / mutant.file
    before = file.read_text()
    try:
        mutant.into(source / "csrc")
        done = verdict(build(source, tmp_path / "temp", mutant.tiles), mutant.test)
    finally:
        file.write_text(before)
    if mutant.error == "Fatal":  # the process ended
        assert done.returncode < 0, done.stdout[-2000:]
    else:
        assert done.returncode == 1 and re.search(f"^E   {mutant.error}", done.stdout, re.M), done.stdout[-2000:]
