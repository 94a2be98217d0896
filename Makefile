# `make demo` and `make test` are enough for most users: both run setup first, which skips finished steps.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
export VENV PYTHON

BENCH ?= penstock-bench
VERIFIERS ?= .venv-verifiers
export VERIFIERS

.PHONY: help setup demo demo-kill test test-unit test-all test-gpu verifiers-environment lint docs up bench bench-gpu clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## create .venv with all dependencies, for CPU or CUDA
	@configs/environment/setup.sh

demo: setup  ## train a tiny model: convert, SFT, eval, GRPO, eval, export
	@$(BIN)/penstock demo

demo-kill: setup  ## the demo, while engine, trainer and driver are killed; ends with a replay of every round
	@$(BIN)/penstock demo --kill --fresh

test: test-unit  ## the tests for every change: unit tests, then integration tests with real engines, including kills
	$(BIN)/python -m pytest -m "integration and not gpu and not full" -n 2 --dist loadfile

test-unit: setup  ## only the tests without engines
	$(BIN)/python -m pytest -m "not integration and not gpu and not full" -n 2 --dist loadfile

test-all: test verifiers-environment  ## `make test`, then the long tests: all parallel layouts, all kills, pairs of kills, S3, all bad inputs
	$(BIN)/python -m pytest -m "full and not gpu" -n 2 --dist worksteal

test-gpu: setup  ## on a GPU machine: the tests that need CUDA
	$(BIN)/python -m pytest -m gpu

verifiers-environment:  ## .venv-verifiers for examples/verifiers: the package needs a newer openai than SGLang
	@$(VERIFIERS)/bin/python -c "import verifiers" 2> /dev/null || \
		($(PYTHON) -m venv $(VERIFIERS) && $(VERIFIERS)/bin/pip install --quiet -r examples/verifiers/requirements.txt)

lint: setup  ## formatter, linter, import boundaries, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests/test_boundaries.py
	$(BIN)/mypy

docs: setup  ## build the documentation site in site/; a dead link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

up: setup  ## start Prefect server, worker and MLflow UI on loopback; prints the links
	@$(BIN)/penstock up $(if $(STORE),--store $(STORE))

bench: setup  ## measure the time of each stage of a round, and the throughput of the rollout stage against the bare engine
	@$(BIN)/python benchmarks/run.py

bench-gpu: setup  ## on a GPU machine: rollout stage, parts of a round and cold start, as JSON in penstock-bench
	@mkdir -p $(BENCH)
	@for name in rollout round cold_start; do \
		$(BIN)/python benchmarks/gpu/$$name.py $(BENCH) --output $(BENCH)/$$name.json -- $(PENSTOCK_TRAIN_OPTIONS) || exit 1; \
	done
	@$(BIN)/python benchmarks/gpu/host_syncs.py --output $(BENCH)/host_syncs.json

clean:  ## remove the virtual environment and the demos' stores
	rm -rf $(VENV) $(VERIFIERS) penstock-demo penstock-demo-kill site
