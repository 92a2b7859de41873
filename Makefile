# Every target but try and page creates or updates .venv first; that is skipped while the files it depends on are
# unchanged.

PYTHON ?= python3
VENV ?= .venv
# Test processes: a number, or auto for one per core.
WORKERS ?= auto
# One more index where pip looks for torch.
TORCH_INDEX ?=
# Where `make page` serves; without it, 8000 or any free port.
PORT ?=
# More arguments: make test ARGS="-k ema", make bench ARGS=--quick
ARGS ?=

# One thread per process: parallel tests would compete for the cores, small models are slower on several threads, and
# the benchmarks measure one.
export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRY := .try
FOR_TESTS := $(VENV)/.for-tests
FOR_DOCS := $(VENV)/.for-docs
PIP := $(BIN)/python -m pip install --constraint constraints.txt
TORCH := $(PIP)$(TORCH_INDEX:%= --extra-index-url %) Cython numpy torch

.PHONY: help try page install test test-fast coverage demo bench gpu docs lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

try: $(TRY)/.ready ## use trained models: a minute, with Python alone, in an environment of 185 MB
	@$(TRY)/bin/python examples/try/try.py

install: $(READY) ## create .venv with all packages in the tested versions: 4 minutes, most of it compiling fairseq

test: $(READY) $(FOR_TESTS) ## run all tests: 10 minutes on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-fast: $(READY) $(FOR_TESTS) ## run the fast tests, with fewer examples of each property: 3 minutes on two cores
	HYPOTHESIS_PROFILE=fast $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow' $(ARGS)

# Counting slows the tests down, so `make test` does not do it.
coverage: $(READY) $(FOR_TESTS) ## run all tests and require 95% of the branches in ops and modules: an hour on two cores
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
	  --cov=mega_fairseq.ops --cov=mega_fairseq.modules --cov-branch --cov-fail-under=95 $(ARGS)

demo: $(READY) ## train a translator, a language model and a classifier next to Transformers: 14 minutes on two cores
	$(BIN)/python examples/demo/demo.py $(ARGS)

# Needs Python and, the first time, npm, but not .venv.
page: ## serve a page that runs exported models in the browser, on PORT (needs npm, the first time)
	@$(PYTHON) examples/page/bring.py
	@$(PYTHON) examples/page/serve.py $(PORT:%=--port %)

bench: $(READY) ## check the layers against naive implementations, then time them: 40 minutes
	$(BIN)/python benchmarks/layer.py $(ARGS)

gpu: $(READY) ## compare everything with the CPU on a CUDA GPU, then time it, into docs/gpu.json: at most 10 minutes
	$(BIN)/python benchmarks/gpu.py $(ARGS)

docs: $(FOR_DOCS) ## build a site of all pages and a reference of the Python interface, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build output, but not .venv and .try
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -path ./$(VENV) -prune -o -path ./$(TRY) -prune -o -name __pycache__ -type d -exec rm -rf {} +

PYTHON_RUNS := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || { echo \
  "'$(PYTHON)' does not run or is older than Python 3.8: choose another one with make PYTHON=..." >&2; exit 1; }

# The three packages of mega_runtime; nothing is compiled.
$(TRY)/.ready: runtime/setup.py
	@$(PYTHON_RUNS)
	$(PYTHON) -m venv $(TRY)
	$(TRY)/bin/python -m pip install --quiet --disable-pip-version-check --editable ./runtime
	@touch $@

# fairseq-fixed (Python 3.11 and newer) compiles against torch, so torch is installed first and the build is not
# isolated; otherwise pip would download another torch for it. The sources of fairseq 0.12.2 only build without torch,
# since files of its torch extensions are missing, so there the build is isolated.
ISOLATION := $$($(BIN)/python -c 'import sys; print("--no-build-isolation" * (sys.version_info >= (3, 11)))')

CPU_INDEX := https://download.pytorch.org/whl/cpu

# fastBPE is optional, so its build may fail. It contains C++ code generated for old Pythons, and only generates it
# again if Cython is already installed, so its build is not isolated either.
FASTBPE_LOG := $(VENV)/fastBPE.log

$(READY): setup.py pyproject.toml constraints.txt runtime/setup.py
	@$(PYTHON_RUNS)
	@command -v $(CXX) >/dev/null || { echo \
	  "the C++ compiler '$(CXX)', which fairseq needs, was not found: install it, or choose another one with make CXX=..." >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
	@nvidia-smi >/dev/null 2>&1 || ! $(TORCH) --dry-run --quiet --report - 2>/dev/null | grep '"name": "nvidia-' >/dev/null || \
	  echo "pip's torch contains CUDA, 2.8 GB to download and 5.3 GB installed, but here is no NVIDIA GPU: for one without" \
	  "CUDA, 1.5 GB installed, interrupt this and add TORCH_INDEX=$(CPU_INDEX) to your make command" >&2
	$(TORCH)
	$(PIP) $(ISOLATION) --editable '.[dev,plot]' --editable ./runtime
	@echo "installing fastBPE"
	@$(PIP) --no-deps --no-build-isolation fastBPE >$(FASTBPE_LOG) 2>&1 || echo \
	  "fastBPE does not build here: BPE=fastbpe and --bpe fastbpe are not available; see $(FASTBPE_LOG)" >&2
	@touch $@
	@echo "$(VENV) is ready: run source $(BIN)/activate, then mega-fairseq doctor"

# What only tests need; those of what pip does not have here are skipped. Triton, 1 GB, is for the GPU kernels, which run
# in its interpreter without a GPU; torch for CUDA brings its own. PEFT brings transformers, 110 MB.
$(FOR_TESTS): $(READY)
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install triton==3.9.0 || \
	  echo "pip has no Triton for this platform: its kernels are not tested" >&2
	@$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton-oldest triton==3.0.0 numpy==1.26.4 || \
	  echo "pip has no Triton 3.0 for this Python: the kernels are tested with the newest one only" >&2
	@$(PIP) --quiet peft torchao || \
	  echo "pip has no PEFT or torchao for this Python: adapters and quantised weights are not tested" >&2
	@touch $@

$(FOR_DOCS): $(READY)
	@$(PIP) --quiet 'mkdocs>=1.6,<2'
	@touch $@
