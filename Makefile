# Every command a contributor needs; CI calls the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Newer releases of megatron-core need a newer Python.
PYTHON_LATEST ?= python3.12
LATEST := .venv-megatron-latest
# The oldest torch that pyproject.toml takes; any other by `make test-torch TORCH_VERSION=…`.
TORCH_VERSION ?= 2.11.0
OTHER_TORCH := .venv-torch
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install lint test test-all test-megatron-latest test-torch golden readme tables screenshot demo demo-short bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

install: $(STAMP) ## make .venv with everything that training and development need

$(STAMP): pyproject.toml constraints.txt
	@echo 'installing into $(VENV): torch is large, so this takes minutes and shows nothing meanwhile'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[train,megatron,hf,dev]'
	@touch $@

lint: $(STAMP) ## formatting, lint, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP) ## the test suite (25 minutes on two cores)
	$(BIN)/pytest -m "not slow and not gpu"

test-all: $(STAMP) ## also the long forms of tests
	$(BIN)/pytest -m "not gpu"

test-megatron-latest: ## all Megatron tests with the newest megatron-core, in an environment of its own
	$(PYTHON_LATEST) -m venv $(LATEST)
	$(LATEST)/bin/pip install --quiet --upgrade -e '.[train,megatron,dev]' $(TORCH) triton
	$(LATEST)/bin/pip list 2>/dev/null | grep -i -E '^(megatron-core|torch|numpy) '
	$(LATEST)/bin/pytest tests/megatron -m "not gpu"

test-torch: ## the test suite with another torch (TORCH_VERSION), in an environment of its own
	$(PYTHON) -m venv --clear $(OTHER_TORCH)
	grep -v '^torch==' constraints.txt > $(OTHER_TORCH)/constraints.txt
	$(OTHER_TORCH)/bin/pip install --quiet -c $(OTHER_TORCH)/constraints.txt -e '.[train,megatron,hf,dev]' torch==$(TORCH_VERSION)
	$(OTHER_TORCH)/bin/pytest -m "not slow and not gpu"

golden: $(STAMP) ## rewrite the agreed flags that tests compare with; read the difference
	$(BIN)/python tests/unit/test_cli.py

readme: $(STAMP) ## bring the README's picture, output and file tree up to date
	$(BIN)/python docs/make_figures.py
	$(BIN)/python docs/make_tree.py

tables: $(STAMP) ## bring the tables of docs/reproducing.md up to date (a few minutes)
	$(BIN)/python docs/make_tables.py

screenshot: $(STAMP) ## the picture of a report in docs (needs chromium)
	$(BIN)/python docs/make_screenshot.py

demo: $(STAMP) ## train a small model on 4 CPU ranks, on the Python sources of this interpreter
	rm -rf runs/demo
	$(BIN)/flexcp train examples/demo.toml

demo-short: $(STAMP) ## the same for a few steps
	rm -rf runs/demo-short
	$(BIN)/flexcp train examples/demo.toml --set run.steps=3 --set run.folder=runs/demo-short

bench: $(STAMP) ## planning, and what it gains: emulated, replayed, computed; writes benchmarks/results (an hour and a half)
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/megatron.py
	$(BIN)/python benchmarks/emulated.py
	$(BIN)/python benchmarks/replay.py
	$(BIN)/python benchmarks/real.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/calibration.py

clean: ## remove the environment, build outputs, caches and runs
	rm -rf $(VENV) $(LATEST) $(OTHER_TORCH) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
