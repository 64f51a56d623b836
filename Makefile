# Two commands on a fresh machine with Python 3.11 to 3.13: `make encode`, `make test`.

PYTHON ?= python3
VLLM ?= 0.25.1
VENV ?= .venv
# Versions of the whole stack; empty lets vLLM's own pins decide.
CONSTRAINTS ?= constraints.txt
# A file of versions that replace what a package asks for, where that is not to be had.
OVERRIDES ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(VLLM)

.PHONY: help setup encode doctor test test-gpu lint types check ci clean

help:
	@echo "make encode   install, then encode the example images"
	@echo "make test     install, then run the tests"
	@echo "make doctor   install, then report what this machine can run"
	@echo "make lint types   ruff and mypy"

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python \
	  $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(OVERRIDES),--override $(OVERRIDES)) \
	  "vllm==$(VLLM)" -e ".[dev]"
	@touch $@

setup: $(STAMP)

encode: $(STAMP)
	@mkdir -p out
	$(BIN)/vllm-flashinfer-vit encode examples/images \
	  --model Qwen/Qwen2.5-VL-7B-Instruct --random-weights \
	  --backend FLASHINFER --output out/embeddings.safetensors

doctor: $(STAMP)
	$(BIN)/vllm-flashinfer-vit doctor

test: $(STAMP)
	$(BIN)/python -m pytest -q

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
