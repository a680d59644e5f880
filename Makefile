# One command each: `make demo` runs the product, `make test` passes the tests. Both set up what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --no-input
SOURCES := pyproject.toml client/pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test check format clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "sluice: no python3 found. Install Python 3.11 or 3.12." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "sluice: $$($(PYTHON) --version) is not supported. Install Python 3.11 or 3.12, or run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# what runs the product on this machine
$(VENV)/.demo: $(SOURCES) | $(BIN)/python
	$(PIP) install -c constraints.txt -e client -e '.[demo]'
	@touch $@

# and what checks and tests it
$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	$(PIP) install -c constraints.txt -e client -e '.[dev]'
	@touch $(VENV)/.demo $@

install: $(VENV)/.dev ## make .venv with sluice and its development tools

demo: $(VENV)/.demo ## start a cluster here and stream one answer at reading speed
	$(BIN)/sluice demo

test: $(VENV)/.dev ## run every test that needs no GPU
	$(BIN)/python -m pytest -m "not gpu"

check: $(VENV)/.dev ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info client/*.egg-info
