# Two commands on a fresh machine with Python 3.11 to 3.13: `make encode`, `make test`.

PYTHON ?= python3
# A release, or the path or address of a wheel.
VLLM ?= 0.33.0
# One for each vLLM, since packages of another one would stay behind in it.
VENV ?= .venv-$(notdir $(VLLM))
# Versions of the whole stack; a vLLM without a file takes what its own pins allow.
CONSTRAINTS ?= $(or $(wildcard constraints/vllm-$(VLLM).txt),constraints/other.txt)
# Versions that replace what a package asks for, where that is not to be had.
OVERRIDES ?= $(wildcard constraints/vllm-$(VLLM)-overrides.txt)
PYTHONS := 3.11 3.12 3.13

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(notdir $(VLLM))
VLLM_SPEC := $(if $(findstring /,$(VLLM)),$(VLLM),vllm==$(VLLM))
CANARY_VENV := .venv-canary-$(notdir $(VLLM))
# Without vLLM: a build does not need it.
PACKAGE_VENV := .venv-package
DOCS_VENV := .venv-docs
AUDIT_VENV := .venv-audit
# docs/security.md gives the reasons.
ACCEPTED := GHSA-6q48-6c7w-9gw2

# Without bytecode each process compiles all of vLLM again, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

# One thread for each of two processes: with more, they wait for each other on two
# cores. An environment variable, since tests start processes of their own, too.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests of a file mostly run in one process, which keeps the towers it has built.
IN_PARALLEL ?= -n 2 --dist worksteal
FAST := -m "not extended and not gpu"

.PHONY: help setup resolve encode doctor test test-all test-gpu canary fingerprints \
  lint types package docs audit clean

help:
	@echo "make encode   install, then encode the example images"
	@echo "make test     install, then run the fast tests, some seven minutes on two cores"
	@echo "make test-all all tests that need no GPU; on a GPU: make test-gpu"
	@echo "make canary VLLM=...   what works with another vLLM: a release, or a wheel"
	@echo "make fingerprints RELEASES=...   note a release of vLLM that was read"
	@echo "make doctor   install, then report what this machine can run"
	@echo "make lint types   ruff, the order of folders, mypy"
	@echo "make package  build wheel and sdist in dist/, and check both"
	@echo "make docs     build the site in out/site, and check its links"
	@echo "make audit    look for published advisories on the versions of constraints/"

VERSIONS = $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(OVERRIDES),--override $(OVERRIDES))

$(STAMP): pyproject.toml $(CONSTRAINTS) $(OVERRIDES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(VERSIONS) \
	  "$(VLLM_SPEC)" -e ".[dev]"
	@touch $@

setup: $(STAMP)

# Nothing is installed: it says whether there is a set of versions for each Python.
resolve: $(STAMP)
	@set -e; for python in $(PYTHONS); do \
	  echo "$(VLLM_SPEC)" | $(BIN)/uv pip compile --quiet --no-header \
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
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(IN_PARALLEL) $(FAST)

test-all: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -q $(IN_PARALLEL) -m "not gpu"

canary:
	@$(MAKE) --no-print-directory setup VENV=$(CANARY_VENV)
	FUZZ=random $(ONE_THREAD) $(CANARY_VENV)/bin/python tools/canary.py --record \
	  $(IN_PARALLEL) $(FAST)

# Read what changed in a new release before: the file says that patches serve it.
fingerprints: $(STAMP)
	$(BIN)/python tools/fingerprints.py $(RELEASES)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m "gpu or not extended"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

package:
	$(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip install --quiet --upgrade uv
	$(PACKAGE_VENV)/bin/uv pip install --quiet --python $(PACKAGE_VENV)/bin/python \
	  --group package
	rm -rf dist
	$(PACKAGE_VENV)/bin/python -m build
	$(PACKAGE_VENV)/bin/twine check --strict dist/*
	$(PACKAGE_VENV)/bin/python tools/check_package.py dist

docs:
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade uv
	$(DOCS_VENV)/bin/uv pip install --quiet --python $(DOCS_VENV)/bin/python --group docs
	$(DOCS_VENV)/bin/mkdocs build --strict

audit:
	$(PYTHON) -m venv $(AUDIT_VENV)
	$(AUDIT_VENV)/bin/python -m pip install --quiet --upgrade uv
	$(AUDIT_VENV)/bin/uv pip install --quiet --python $(AUDIT_VENV)/bin/python --group audit
	$(AUDIT_VENV)/bin/pip-audit --vulnerability-service osv --no-deps --disable-pip \
	  $(ACCEPTED:%=--ignore-vuln %) --requirement $(CONSTRAINTS)

clean:
	rm -rf .venv-* dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
