# One command each: `make demo` runs the product, `make test` passes the tests. Both set up what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --no-input
# with the libraries of docs/recipes.md: some of them want other versions than Sluice has
RECIPES := .venv-recipes
# and clients whose own versions exclude each other, an environment for each file of tests/clients/requirements
CLIENTS := .venv-clients
# in two processes, whose threads do not spin while others compute; files whole, since a file's tests share what they ran
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
SOURCES := pyproject.toml client/pyproject.toml constraints.txt
# where torch for CPUs is, if pip's own index has none; empty: at the index of torch's makers
export TORCH_INDEX_URL ?=
# a script that starts a container engine and a compose file, runs a command, and takes all down again
COMPOSE_CHECK := ../shared/tools/compose-check.sh

# of `make test-pauses`
KIND ?= all
SEED ?= 0
ABOUT ?= migration
COUNT ?= 2000

# with a torch that has CUDA, which `make install` does not bring
GPU_PYTHON ?= $(BIN)/python
GPU_MODEL ?= /tmp/sluice-llama3-8b

# many processes start here, and each would compile all that it imports
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-faults test-long test-pauses test-torch-kernels test-browser test-recipes test-clients clients test-compose chromium gpu-check gpu-figures campaign mutation check format clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "sluice: no python3 found. Install Python 3.11 or 3.12." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "sluice: $$($(PYTHON) --version) is not supported. Install Python 3.11 or 3.12, or run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# torch before all that needs it: pip by itself would take the build for CUDA
$(VENV)/.torch: constraints.txt docker/cpu_torch.sh | $(BIN)/python
	sh docker/cpu_torch.sh $(PIP)
	@touch $@

# what runs the product on this machine
$(VENV)/.demo: $(SOURCES) $(VENV)/.torch | $(BIN)/python
	$(PIP) install -c constraints.txt -e client -e '.[demo]'
	@touch $@

# and what checks and tests it
$(VENV)/.dev: $(SOURCES) $(VENV)/.torch | $(BIN)/python
	$(PIP) install -c constraints.txt -e client -e '.[dev]'
	@touch $(VENV)/.demo $@

# the worker's CPU kernels; without a compiler this says so, and workers run on torch's operators
$(VENV)/.native: $(wildcard services/worker/native/src/*) services/worker/native/build.py | $(BIN)/python
	$(BIN)/python -m services.worker.native.build --compiler "$(CXX)"
	@touch $@

install: $(VENV)/.dev $(VENV)/.native ## make .venv with sluice and its development tools, and compile the CPU kernels

demo: $(VENV)/.demo ## start a cluster here and stream one answer at reading speed
	$(BIN)/sluice demo

test: $(VENV)/.dev $(VENV)/.native ## run the tests that need no GPU and little time, in two processes
	$(PYTEST) -p tests.support.cpu_time -m "not gpu and not faults and not compose and not browser and not recipes and not slow and not long"

test-slow: $(VENV)/.dev $(VENV)/.native ## run those that take more than a CPU second, and campaigns' other seeds
	$(PYTEST) -m "slow and not long and not gpu and not faults and not compose and not browser"

test-faults: $(VENV)/.dev $(VENV)/.native ## kill, freeze and cut off real processes under load
	$(PYTEST) -m "faults and not long" tests/faults

test-long: $(VENV)/.dev $(VENV)/.native ## run the further cases for which CI has no time: an hour and more
	$(PYTEST) -m "long and not gpu"
	SLUICE_WORKER_KERNELS=torch $(PYTEST) -m "kernels and (slow or long) and not gpu and not faults"

test-pauses: $(VENV)/.dev $(VENV)/.native ## look for tests that fail when the machine stands still: KIND=all|one|tests, SEED=n
	$(BIN)/python -m tests.support.pauses --kind $(KIND) --seed $(SEED) -- \
	  $(BIN)/python -m pytest -m "not long and not gpu and not compose and not browser" tests/integration tests/contract tests/faults

test-torch-kernels: $(VENV)/.dev ## run what computes with a model, and takes little time, once more without the CPU kernels
	SLUICE_WORKER_KERNELS=torch $(PYTEST) -m "kernels and not slow and not long and not gpu and not faults"

chromium:
	@if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; }; then \
	  [ "$$(id -u)" != 0 ] || { apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null \
	    || echo "chromium: apt could not install it"; \
	fi

test-browser: $(VENV)/.dev chromium ## use the API from pages in a real Chromium, which apt installs where it may
	$(BIN)/python -m pytest -m browser tests/integration/test_real_browser.py

$(RECIPES)/.made: $(addprefix tests/recipes/,requirements.txt package.json package-lock.json) | $(BIN)/python
	$(BIN)/python -m venv $(RECIPES)
	$(RECIPES)/bin/pip --disable-pip-version-check --no-input install -r tests/recipes/requirements.txt
	cp tests/recipes/package.json tests/recipes/package-lock.json $(RECIPES)
	cd $(RECIPES) && PATH="$$PWD/bin:$$PATH" npm ci --no-audit --no-fund
	@touch $@

test-recipes: $(VENV)/.dev $(VENV)/.native $(RECIPES)/.made chromium ## run docs/recipes.md as it stands, with other people's libraries, and check the types of client/js
	$(BIN)/python -m pytest -m recipes tests/recipes

$(CLIENTS)/%/.made: tests/clients/requirements/%.txt | $(BIN)/python
	$(BIN)/python -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/pip --disable-pip-version-check --no-input install -r $<
	@touch $@

test-clients: $(VENV)/.dev $(VENV)/.native $(RECIPES)/.made $(CLIENTS)/agents/.made $(CLIENTS)/instructor/.made ## try what other people's clients do with Sluice, but for LiteLLM's proxy
	$(BIN)/python -m pytest -m recipes tests/clients

clients: $(VENV)/.dev $(VENV)/.native $(RECIPES)/.made $(CLIENTS)/agents/.made $(CLIENTS)/instructor/.made $(CLIENTS)/proxy/.made ## try all of them, and write the table of docs/results/clients.md
	$(BIN)/python -m tests.clients --record

test-compose: $(VENV)/.dev ## build and run the compose file on a real engine, and disturb it
	@if [ -x $(COMPOSE_CHECK) ]; then \
	  SLUICE_DETERMINISTIC=true PATH="$$PATH:$(CURDIR)/$(BIN)" $(COMPOSE_CHECK) docker-compose.yml \
	    $(BIN)/python -m pytest -m compose tests/compose; \
	else \
	  echo "test-compose: skipped, there is no $(COMPOSE_CHECK). With an engine: docker-compose up -d --build," \
	    "then $(BIN)/python -m pytest -m compose tests/compose"; \
	fi

gpu-check: ## run every test that needs a GPU, and measure what pages cost there; installs nothing
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	  || { echo "sluice: $(GPU_PYTHON) has no torch that sees a CUDA device. Give one: make gpu-check GPU_PYTHON=python3" >&2; exit 2; }
	$(GPU_PYTHON) -m pytest -m gpu -p no:xdist -rs tests/gpu
	$(GPU_PYTHON) -m benchmarks.remap --device cuda

gpu-figures: ## what docs/results/gpu.md asks for, on a model of 8 G parameters that is made in GPU_MODEL; installs nothing
	$(GPU_PYTHON) -m benchmarks.gpu_margin $(GPU_MODEL)
	$(GPU_PYTHON) -m benchmarks.gpu_step --model $(GPU_MODEL) --transformers --profile llama-3-8b-tp1-h200
	$(GPU_PYTHON) -m benchmarks.gpu_step --model $(GPU_MODEL) --no-graphs
	$(GPU_PYTHON) -m benchmarks.gpu_step --model $(GPU_MODEL) --no-fused
	$(GPU_PYTHON) -m benchmarks.fused_kernels --model $(GPU_MODEL)
	$(GPU_PYTHON) -m benchmarks.overlap --model $(GPU_MODEL)
	$(GPU_PYTHON) -m benchmarks.group_change --model $(GPU_MODEL) --device cuda --memory 36GiB --exchange-memory 4GiB --stages 2
	$(GPU_PYTHON) -m benchmarks.remap --device cuda

campaign: $(VENV)/.dev ## run COUNT seeds of random faults on the virtual clock: ABOUT=all|groups|migration|prefixes
	$(BIN)/python -m sim.faults --about $(ABOUT) --count $(COUNT)

mutation: $(VENV)/.dev $(VENV)/.native ## make 200 small faults in the code, one at a time, and count those that tests notice
	$(BIN)/python -m tests.mutation

check: $(VENV)/.dev ## format, lint, types, import rules, sizes, what nothing reaches
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.import_circles
	$(BIN)/python -m tools.sizes --check
	$(BIN)/python -m tools.unreached

format: $(VENV)/.dev ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and every cache
	rm -rf $(VENV) $(RECIPES) $(CLIENTS) services/worker/native/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info client/*.egg-info .schema-suite
