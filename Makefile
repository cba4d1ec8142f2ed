# pipert's commands. `make train` and `make test` are all the set-up there is: each makes .venv first.

PYTHON ?= python3
VENV   ?= .venv
RANKS  ?= 4
CONFIG ?= examples/configs/tiny.toml
# Tests at a time, where they start no MPI ranks.
WORKERS ?= 2
# More arguments for pytest, such as PYTEST_ARGS="tests/scheduler -x".
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

# First the tests that stay in one process, WORKERS at a time; then those that start MPI ranks, which need the cores for
# themselves. Exit code 5 says that PYTEST_ARGS left nothing to run; it may do so for one of the two.
test: install  ## the whole test suite
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not mpi" $(PYTEST_ARGS); local=$$?; \
	$(BIN)/python -m pytest -m mpi $(PYTEST_ARGS); ranks=$$?; \
	case $$local,$$ranks in 0,0 | 0,5 | 5,0) ;; *) exit 1 ;; esac

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
