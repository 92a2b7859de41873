# One command each: every target sets .venv up first, and skips that when nothing about it has changed.

PYTHON ?= python3
VENV ?= .venv
# pytest processes: a number, or auto for one per core.
WORKERS ?= auto
# Further arguments: make test ARGS="-k ema", make bench ARGS=--json
ARGS ?=

# One thread a process: parallel tests would fight over the cores, small models are slower on several, and the
# benchmark counts the time of one.
export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --constraint constraints.txt

.PHONY: help install test coverage demo bench lint format clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

install: $(READY) ## create .venv with everything, in the tested versions

test: $(READY) ## run the tests
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# Counting slows the tests down, so `make test` leaves it out.
coverage: $(READY) ## run them and count which branches of ops and modules they take: at least 95%
	$(BIN)/python -m pytest -n $(WORKERS) \
	  --cov=mega_fairseq.ops --cov=mega_fairseq.modules --cov-branch --cov-fail-under=95 $(ARGS)

demo: $(READY) ## translate, model language, beside a Transformer: 11 minutes on two cores
	$(BIN)/python examples/demo/demo.py $(ARGS)

bench: $(READY) ## check, then time the layers
	$(BIN)/python benchmarks/layer.py $(ARGS)

lint: $(READY) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# fairseq-fixed (Python 3.11 on) compiles against torch: torch comes first and the build is not isolated, or pip
# would fetch a second torch, of another version, for it. The sources of fairseq 0.12.2 build only where there is
# no torch, because files of its torch extensions are missing: in isolation.
ISOLATION := $$($(BIN)/python -c 'import sys; print("--no-build-isolation" * (sys.version_info >= (3, 11)))')

$(READY): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || { echo \
	  "mega_fairseq needs Python 3.8 or newer, and '$(PYTHON)' is not one: name one with make PYTHON=..." >&2; exit 1; }
	@command -v $(CXX) >/dev/null || { echo \
	  "fairseq needs a C++ compiler, and '$(CXX)' is not there: install one, or name it with make CXX=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
	$(PIP) Cython numpy torch
	$(PIP) $(ISOLATION) --editable '.[dev,plot]'
	@touch $@
