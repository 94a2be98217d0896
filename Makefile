# `make demo` and `make test` are the only two commands anybody needs: both set up first, and setup skips what is done.
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= python3
export VENV PYTHON

.PHONY: help setup demo test test-unit test-all lint up bench clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make .venv with everything, on CPU and on CUDA machines
	@configs/environment/setup.sh

demo: setup  ## make a tiny model and watch it learn: convert, SFT, eval, GRPO, eval, export
	@$(BIN)/penstock demo

test: test-unit  ## the tests of every change: unit first, then one run and one kill per mode with real engines
	$(BIN)/python -m pytest -m "integration and not gpu and not full" -n 2 --dist loadfile

test-unit: setup  ## only the tests that need no engine
	$(BIN)/python -m pytest -m "not integration and not gpu and not full" -n 2 --dist loadfile

test-all: test  ## `make test`, then the long ones: full matrices, pairs of faults, S3, all bad inputs
	$(BIN)/python -m pytest -m "full and not gpu" -n 2 --dist load

lint: setup  ## ruff, formatter, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up: setup  ## Prefect server, a worker and the MLflow UI on loopback; prints the links
	@$(BIN)/python -m flows.services up $(if $(STORE),--store $(STORE))

bench: setup  ## where the time of a round goes; the rollout stage against the bare engine
	@$(BIN)/python benchmarks/run.py

clean:  ## remove the virtual environment and the demo's store
	rm -rf $(VENV) penstock-demo
