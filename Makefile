# What people and CI run. Every target sets up $(VENV) by itself, and at once when that was done before.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# Tests and checks never ask a model hub.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help setup demo model test test-all lint format types clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make the virtual environment (VENV=.venv, PYTHON=python3)
	@sh scripts/setup.sh $(VENV)

demo: setup ## one answer, plain and then speculative, on a small real model
	@$(BIN)/slipstream demo

model: setup
	@test "$(SLIPSTREAM_SKIP_REAL_WEIGHTS)" = 1 || $(BIN)/slipstream models fetch smollm2-135m

test: model ## every test but the slow ones (PYTEST_ARGS='-k name')
	$(OFFLINE) $(BIN)/python -m pytest -n auto -m "not slow" $(PYTEST_ARGS)

test-all: model ## every test
	$(OFFLINE) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## ruff: mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy, strict, on src
	$(BIN)/mypy

clean: ## remove the environment, builds and caches of this folder (not the model cache)
	rm -rf $(VENV) .ci/venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
