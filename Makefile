# make alone lists the targets. VENV=… puts the virtual environment elsewhere, PYTHON=… chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
NOTEBOOKS ?= $(wildcard notebooks/[0-9]*.ipynb)
LAB ?=
DIST ?= dist
EXECUTE = --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False

.DEFAULT_GOAL := help
.PHONY: help install lab test ui-test lint notebooks bench checksums wheel

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(VENV)/installed ## a virtual environment with everything, exactly as pinned

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[notebooks,test]' && touch $@

lab: install ## open JupyterLab on the first notebook
	$(BIN)/jupyter lab $(LAB) notebooks/00_start_here.ipynb

test: lint ## lint, unit tests, notebook hygiene, and every notebook re-run and compared
	$(BIN)/python -m pytest -m 'not browser'
	$(BIN)/python -m pytest --nbval --nbval-current-env --nbval-sanitize-with tests/nbval.cfg --nbval-cell-timeout 120 -p no:cacheprovider notebooks

ui-test: install ## drive every widget in a real JupyterLab
	$(BIN)/python -m pytest -m browser tests/ui

lint: install ## ruff (code and notebooks) and the import contract
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-cache

notebooks: install ## re-execute the notebooks in order and write their outputs back
	$(BIN)/jupyter nbconvert $(EXECUTE) $(NOTEBOOKS)
	$(BIN)/python notebooks/figures/draw.py

bench: install ## measure, and write data/measured
	for room in communication residual throughput clipping corpora backbones; do $(BIN)/python benchmarks/$$room.py || exit 1; done

checksums: ## rewrite data/SHA256SUMS after data/ has changed
	cd data && find . -type f ! -name SHA256SUMS | sed 's|^\./||' | LC_ALL=C sort | xargs sha256sum > SHA256SUMS

wheel: install ## build the wheel, data included, into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(DIST) .
