# make alone lists the targets. VENV=… puts the virtual environment elsewhere, PYTHON=… chooses the interpreter.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
LESSONS = $(wildcard notebooks/[0-9]*.ipynb)
NOTEBOOKS ?= $(LESSONS) $(wildcard notebooks/reports/[0-9]*.ipynb)
LAB ?=
DEMO ?=
SERVE ?=
STORE ?= .adapters
DIST ?= dist
CONSTRAINTS ?= constraints.txt
PARALLEL ?= -n 3
NBVAL ?= --nbval
NBVAL_OPTIONS = --nbval-current-env --nbval-sanitize-with tests/nbval.cfg --nbval-cell-timeout 1200 -p no:cacheprovider -p no:schemathesis -p notebook_memory
EXECUTE = --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False

.DEFAULT_GOAL := help
.PHONY: help install lab demo serve test check reports ui-test lint notebooks docs student bench claims clients checksums wheel

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(VENV)/installed ## a virtual environment with everything, exactly as pinned

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs,notebooks,scale,serve,test]' && touch $@
	@$(BIN)/plpkg fetch || echo "The two published models were not fetched: all but what speaks with them works. $(BIN)/plpkg fetch tries again."

lab: install ## open JupyterLab on the first notebook
	@echo "If no browser opens, open the address below. On another machine: ssh -L 8888:localhost:8888 THIS_MACHINE, then open it there."
	$(BIN)/jupyter lab $(LAB) notebooks/00_start_here.ipynb

demo: install ## the explorers' sliders as a page without code; DEMO="--no-browser --port=…" adds options
	@echo "If no browser opens, open the address below. On another machine: ssh -L 8866:localhost:8866 THIS_MACHINE, then open it there."
	$(BIN)/voila --Voila.config_file_paths=notebooks/demo $(DEMO) notebooks/demo/explorers.ipynb

serve: install ## serve SmolLM2 with three people's adapters; STORE=… keeps them elsewhere, SERVE="--replicas 2" adds options
	$(BIN)/plpkg serve --model smollm2 --store $(STORE) $(patsubst %,--adapter data/people/%,ann bob cem) $(SERVE)

test: lint check ## lint, unit tests, notebook hygiene, and every lesson re-run and compared

check: export OMP_NUM_THREADS = $(or $(PLPKG_TEST_THREADS),1)
check: install # the notebooks run also where a unit test failed; the corpora are read first, not by two at once
	@$(BIN)/python -c 'from plpkg import corpora; corpora.public("test")'
	@$(BIN)/python -m pytest $(PARALLEL) --dist loadfile -p no:nbval -m 'not browser'; tests=$$?; \
	PYTHONPATH=tests $(BIN)/python -m pytest -n 2 --dist loadscope $(NBVAL) $(NBVAL_OPTIONS) $(LESSONS) notebooks/demo; notebooks=$$?; \
	echo "exit status: $$tests of the unit tests, $$notebooks of the notebooks"; \
	exit $$((tests > notebooks ? tests : notebooks))

reports: export OMP_NUM_THREADS = $(or $(PLPKG_TEST_THREADS),1)
reports: install ## every report re-run and compared, as the lessons by `make test`
	PYTHONPATH=tests $(BIN)/python -m pytest -n 2 --dist loadscope $(NBVAL) $(NBVAL_OPTIONS) notebooks/reports

ui-test: install ## drive every widget in a real JupyterLab
	$(BIN)/python -m pytest -m browser tests/ui

lint: $(VENV)/linters ## ruff (code and notebooks), the import contracts, pyright on the package
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/linters: $(VENV)/installed # node comes with pyright: only who changes the code needs them
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[lint]' && touch $@

notebooks: install ## re-execute the notebooks in order and write their outputs back
	$(BIN)/jupyter nbconvert $(EXECUTE) $(NOTEBOOKS)
	$(BIN)/python notebooks/figures/draw.py

docs: install ## the documentation site, offline, into docs/_build/html
	rm -rf docs/_build && mkdir -p docs/_build/source
	@echo "Sphinx reads the pages, then writes them: four minutes of CPU time. In a terminal it says where it is."
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky $(if $(MAKE_TERMOUT),,--quiet) --jobs 2 -c docs -d docs/_build/doctrees docs/_build/source docs/_build/html

student: install ## the lessons without outputs and solutions, for a class, into student/
	$(BIN)/python notebooks/student.py student $(LESSONS)

bench: install ## measure, and write data/measured: what takes minutes, not what takes an hour
	$(BIN)/python -m benchmarks

claims: install ## compute every figure of data/claims.csv again, and say which recorded run has the others
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.claims

clients: install ## OpenAI's clients of other versions and makers, in an environment of their own, against plpkg serve
	OMP_NUM_THREADS=1 $(BIN)/python tests/clients.py

checksums: ## rewrite data/SHA256SUMS after data/ has changed
	cd data && find . -type f ! -name SHA256SUMS | sed 's|^\./||' | LC_ALL=C sort | xargs sha256sum > SHA256SUMS

wheel: install ## build the wheel, data included, into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(DIST) .
