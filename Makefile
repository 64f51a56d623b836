# Two commands on a fresh machine with Python 3.11 to 3.13: `make encode`, `make test`.

PYTHON ?= python3
VLLM ?= 0.25.1
VENV ?= .venv
# Versions of the whole stack; a vLLM without a file here takes what its own pins allow.
CONSTRAINTS ?= $(wildcard constraints/vllm-$(VLLM).txt)
# Versions that replace what a package asks for, where that is not to be had.
OVERRIDES ?= $(wildcard constraints/vllm-$(VLLM)-overrides.txt)
PYTHONS := 3.11 3.12 3.13

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(VLLM)

# One thread for each of two processes: with more, they wait for each other on two
# cores. An environment variable, since tests start processes of their own, too.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests of a file mostly run in one process, which keeps the towers it has built.
IN_PARALLEL ?= -n 2 --dist worksteal

.PHONY: help setup resolve encode doctor test test-all test-gpu lint types check clean

help:
	@echo "make encode   install, then encode the example images"
	@echo "make test     install, then run the tests of the fast tier, in five minutes"
	@echo "make test-all all tests that need no GPU; on a GPU: make test-gpu"
	@echo "make doctor   install, then report what this machine can run"
	@echo "make lint types   ruff, the order of folders, mypy"

VERSIONS = $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(OVERRIDES),--override $(OVERRIDES))

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(VERSIONS) \
	  "vllm==$(VLLM)" -e ".[dev]"
	@touch $@

setup: $(STAMP)

# Nothing is installed: it says whether there is a set of versions for each Python.
resolve: $(STAMP)
	@set -e; for python in $(PYTHONS); do \
	  echo "vllm==$(VLLM)" | $(BIN)/uv pip compile --quiet --no-header \
	    --python-version $$python $(VERSIONS) --extra dev pyproject.toml - >/dev/null; \
	  echo "vLLM $(VLLM) resolves on Python $$python"; \
	done

encode: $(STAMP)
	@mkdir -p out
	$(BIN)/vllm-flashinfer-vit encode examples/images \
	  --model Qwen/Qwen2.5-VL-7B-Instruct --random-weights \
	  --backend FLASHINFER --output out/embeddings.safetensors

doctor: $(STAMP)
	$(BIN)/vllm-flashinfer-vit doctor

test: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(IN_PARALLEL) -m "not extended and not gpu"

test-all: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(IN_PARALLEL) -m "not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m "gpu or not extended"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
