# `make demo` and `make test` need nothing but Python 3.11, gcc and make: they build .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test check clean

setup: $(STAMP)

$(STAMP): setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11) and "leviathan_ds needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/python launchers/demo.py

test: setup check
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

clean:
	rm -rf .venv runs data hf
