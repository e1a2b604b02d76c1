# Every target that needs the virtual environment sets it up itself; a second call starts at once.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help
python := .venv/bin/python

.PHONY: help setup demo test lint types unit slow chaos nightly clean

help:
	@echo 'make setup   virtual environment, pinned packages, default model and encoder'
	@echo 'make demo    the whole loop on a small synthetic world, ends with a table and a report'
	@echo 'make test    lint, types, then all tests, the quick ones first'
	@echo 'make lint    ruff          make types   mypy --strict'
	@echo 'make unit    quick tests   make slow    tests with Ray, vLLM and whole jobs'
	@echo 'make chaos   a run whose engines, shards, workers, node and driver are killed: docs/simulation.md'
	@echo 'make nightly 10,000 simulated runs, others every day: docs/simulation.md'
	@echo 'make clean   removes the virtual environment and the tools'"'"' caches and demo/; other runs and models stay'

setup:
	@scripts/setup.sh

demo: setup
	@.venv/bin/pastcast demo

test: lint types unit slow

lint: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

types: setup
	@$(python) -m mypy

unit: setup
	@$(python) -m pytest -q -n 2 --dist worksteal -m 'not ray and not vllm and not e2e'

slow: setup
	@$(python) -m pytest -q -m 'ray or vllm or e2e'

# `test` holds it as well, among the slow ones.
chaos: setup
	@$(python) -m pytest -q -m chaos

# Ten thousand seeds for every day of the year.
nightly: setup
	@$(python) -m scripts.simulate --seeds 10000 --first $$(( 10#$$(date +%j) * 10000 )) --keep-going --json simulation.json

clean:
	rm -rf demo .venv *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
