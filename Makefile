# Every target sets up what it needs: .venv holds all distributions of this checkout, editable.
#   make PYTHON=/path/to/python                 another interpreter
#   make VENV_FLAGS=--system-site-packages      see the system's PyTorch
#   make TORCH=torch==2.12.1 TORCH_FLAGS=...    another PyTorch, or pip's flags for where to get it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

DISTS := ./registry ./core ./backends ./quant ./moe ./models ./plugins/deepgemm ./plugins/executors ./plugins/gguf ./plugins/server ./plugins/tools ./plugins/xgrammar
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
READY := $(VENV)/.ready

PYTHON := python3 python3.13 python3.12 python3.11
VENV_FLAGS :=
# Without a GPU a pinned release goes in first and alone, so that no dependency pulls a CUDA build in its place.
TORCH = $(shell nvidia-smi > /dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
TORCH_FLAGS :=

.PHONY: help demo test test-slow test-gpu lint format wheels clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Ask a small real model one question on this machine
	$(BIN)/rackmount run smollm2-135m "What is the capital of France?" --chat --temperature 0

test: $(READY) ## Run the tests that need no GPU and little time
	$(BIN)/pytest -n 2 --dist loadfile

test-slow: $(READY) ## Run the slow tests
	$(BIN)/pytest -m "slow and not gpu" --timeout 1200

test-gpu: $(READY) ## Run the tests that need a GPU
	$(BIN)/pytest -m gpu --timeout 1200

lint: $(READY) ## Check style, types, import rules and size budgets
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/budgets.py

format: $(READY) ## Format the code and apply safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheels: $(READY) ## Build a wheel of every distribution into dist/
	rm -rf dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(DISTS)
	@ls dist/*.whl

clean: ## Delete wheels and caches, but not .venv
	rm -rf dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last into a new environment, so an interrupted one is made again.
$(BIN)/pip:
	@for python in $(PYTHON); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
	    echo "Creating $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv $(VENV_FLAGS) $(VENV); \
	  fi; \
	done; \
	echo "rackmount needs Python 3.11 or newer, and found none as: $(PYTHON)." >&2; \
	echo "Install one, or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

# The tools bring hatchling, so the editable installs need no build environment each.
$(READY): pyproject.toml $(DISTS:%=%/pyproject.toml) | $(BIN)/pip
	@echo "Setting up $(VENV); the first time takes some minutes"
	$(PIP) install --quiet 'pip>=25.1'
	$(PIP) install --quiet '$(TORCH)' $(TORCH_FLAGS)
	$(PIP) install --quiet --group dev
	$(PIP) install --quiet --no-build-isolation $(addprefix -e ,$(DISTS))
	@touch $@
