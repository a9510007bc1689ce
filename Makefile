# `make demo` and `make test` are each complete by themselves on a fresh machine.
# PYTHON=python3.11 names the interpreter for .venv; by default the first supported one that runs.
PYTHON ?= python3 python3.12 python3.11 python3.10
VENV := .venv/bin

.PHONY: setup demo test lint

setup:
	@for python in $(PYTHON); do \
	  if PYTHONPATH=tools $$python -B -c 'import sys, bootstrap; \
	      sys.exit(not bootstrap.python_is_supported())' 2>/dev/null; then \
	    exec $$python tools/bootstrap.py; \
	  fi; \
	done; \
	echo 'set-up: Python 3.10 to 3.12 is needed; none of these runs as one: $(PYTHON)' >&2; exit 1

demo: setup
	$(VENV)/python tools/demo.py

test: setup
	$(VENV)/python -m pytest

lint: setup
	$(VENV)/ruff check
	$(VENV)/ruff format --check
	$(VENV)/python -m mypy
