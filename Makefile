# Everything a fresh machine needs: `make demo` to see it work, `make test` to trust it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint clean

demo: .venv/installed
	$(BIN)/fewlabel compare experiments/demo.toml --methods fedprox --out runs/demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -m "not slow"

test-all: .venv/installed-dev
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("FewLabel needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
