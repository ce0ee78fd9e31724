# Everything a fresh machine needs: `make demo` to see it work, `make test` to trust it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint bench clean results results-run docs

demo: .venv/installed
	$(BIN)/fewlabel compare experiments/demo.toml --methods rscfed,fedirm,cbafed,isofed,fedmatch,tutor --out runs/demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs -m "not slow"

test-all: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs

docs: .venv/installed-docs  # what the pages have from code and results, then the manual, in docs/_build/html
	$(BIN)/python docs/generated.py
	$(BIN)/python docs/pictures.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

results: .venv/installed  # the tables of docs/RESULTS.md, from docs/results/
	$(BIN)/python -m experiments.study render

results-run: .venv/installed-dev  # the runs behind them: a day, one run per core; again, it goes on; SET="--set a.data.path=pbc32.npz"
	nice -n 10 $(BIN)/python -m experiments.study run $(TABLES) $(SET)

bench: .venv/installed-dev .venv-bench/installed  # speed beside plain PyTorch, Flower and pfl: half an hour on a machine that is left alone
	$(BIN)/python -m benchmarks.table

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("FewLabel needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.venv-bench/installed:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet 'flwr[simulation]==1.41.0' pfl==0.6.0 torch==2.13.0 psutil==7.2.2
	touch $@

clean:
	rm -rf .venv .venv-bench
