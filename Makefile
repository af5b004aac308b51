# `make demo` and `make test` need nothing but Python 3.11, gcc and make: they build .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test check bench study-smoke clean

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

# Two processes, a test file whole in one of them: many tests start programs, which takes one core.
test: setup check
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# About 13 minutes on two idle cores; nothing else may run. JSON lines; docs/benchmarks.md holds the last figures.
bench: setup
	$(BIN)/python -W ignore benchmarks/generator.py
	$(BIN)/python -W ignore benchmarks/step.py --precision bf16
	$(BIN)/python -W ignore benchmarks/peer.py --precision bf16 --micro_batch_size 4
	$(BIN)/python -W ignore benchmarks/head.py --dtype bf16
	$(BIN)/python -W ignore benchmarks/head.py --dtype bf16 --tensor_parallel 2
	$(BIN)/python -W ignore benchmarks/checkpoint.py
	$(BIN)/python -W ignore benchmarks/scale.py

# The machinery of studies (docs/studies.md) on the sample corpus, 105 s of CPU time; its numbers mean nothing.
STUDY_RUNS ?= runs/studies
study-smoke: setup
	rm -rf $(STUDY_RUNS)/smoke
	$(BIN)/python launchers/study.py run studies/smoke.yaml --runs_dir $(STUDY_RUNS)
	$(BIN)/python launchers/study.py collect studies/smoke.yaml --runs_dir $(STUDY_RUNS) \
		--results $(STUDY_RUNS)/smoke/results
	$(BIN)/python launchers/study.py report studies/smoke.yaml --results $(STUDY_RUNS)/smoke/results \
		--page $(STUDY_RUNS)/smoke/results.md

clean:
	rm -rf .venv runs data hf
