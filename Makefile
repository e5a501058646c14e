# The project's verbs; `make help` lists them. Each works from a bare checkout: .venv is made first.
SHELL := bash
.DEFAULT_GOAL := help
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# mypy refuses a folder without Python files.
# The end-to-end tests mostly wait for processes.
TEST_WORKERS ?= 2
SOURCES := $(shell for d in services clients benchmarks examples tests; do \
  find $$d -name '*.py' -printf "$$d\n" -quit 2>/dev/null; done)
# Tests start some thousand processes. Without bytecode each of them would compile what it imports,
# which is a third of its start.
unexport PYTHONDONTWRITEBYTECODE
# The steps of check run in order, under -j too, so that it stops at the first that fails.
.NOTPARALLEL:

.PHONY: help setup gen gen-check fmt lint type test check demo bench soak clean

help: ## List these verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 14

setup: $(STAMP) ## Make .venv and install the project with its tools

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	tools/setup.sh
	@touch $@

gen: setup ## Regenerate protos/gen from protos/
	tools/generate.sh

gen-check: setup ## Fail when protos/gen is stale
	@tools/check_generated.sh

fmt: setup ## Format the code and the protos, and fix what ruff can
	$(PYTHON) -m ruff format
	$(PYTHON) -m ruff check --fix
	$(VENV)/bin/buf format -w

lint: setup ## Style, the contract (lint, format, breaking changes), and the direction of imports
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf format -d --exit-code
	@test -f protos/baseline.binpb || { echo "lint: protos/baseline.binpb is missing, so breaking changes" \
	  "cannot be seen; restore it from the repository's history" >&2; exit 1; }
	$(VENV)/bin/buf breaking --against protos/baseline.binpb
	$(VENV)/bin/lint-imports --no-logo

type: setup ## mypy --strict
	$(PYTHON) -m mypy $(SOURCES)

test: setup ## Run the tests, except those marked soak or gpu (ARGS="-k name" to choose)
	$(PYTHON) -m pytest -n $(TEST_WORKERS) --dist worksteal $(ARGS)

check: gen-check lint type test ## What CI runs: gen-check, lint, type, test

demo: setup ## Kill the supervisor and the agents of a live model under load, and count what failed
	$(PYTHON) -m examples.semantic_search.demo

bench: setup ## Measure, with the bare ceiling beside each number
	$(PYTHON) -m benchmarks

soak: setup ## Run the long tests
	$(PYTHON) -m pytest -m soak $(ARGS)

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
