# pipert's commands. `make train` and `make test` are all the set-up there is: each makes .venv first.

PYTHON ?= python3
VENV   ?= .venv
RANKS  ?= 4
CONFIG ?= examples/configs/tiny.toml
# Tests at a time; those that start MPI ranks run one after another all the same.
WORKERS ?= 2
# More arguments for pytest, such as PYTEST_ARGS="-k scheduler -x".
PYTEST_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install train test lint style types layers format bench clean

help:  ## this list
	@grep -E '^[a-z]+: .*##|^[a-z]+:  ##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## make .venv and install pipert into it (nothing to do when setup.cfg and constraints.txt are unchanged)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pipert needs Python 3.11 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "installing pipert and what it needs into $(VENV): the first time this takes some minutes"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mpich,dev]'
	@touch $@

train: install  ## train a small GPT over 4 MPI ranks and draw its pipeline
	$(BIN)/pipert launch -n $(RANKS) examples/train_gpt.py $(CONFIG)

test: install  ## the whole test suite
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

lint: style types layers  ## style, types and layering (make -k lint goes on after a failure)

style: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet || { echo "some files are not laid out as ruff does: make format"; exit 1; }

types: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

format: install  ## sort the imports and lay the code out
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

bench: install  ## every benchmark, one after another
	$(BIN)/python benchmarks

clean:  ## remove what builds and tests left (keeps .venv and runs/)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.* htmlcov
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
