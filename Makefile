# `make demo` and `make test` are all a fresh machine needs: both build .venv when it is missing.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test
PYTEST_ARGS ?= -m "not slow" --numprocesses=auto --maxprocesses=4
BIN := $(VENV)/bin

.PHONY: demo test lint

demo: $(VENV)/.installed
	$(BIN)/python -m experiments.generate --target=smollm2 --drafter=ngram --compare --transcript \
	  --prompt="Repeat this text word for word: The drafter proposes a few tokens, and the target checks them all in one forward pass. Tokens that the target agrees with are kept. The first wrong token is replaced by the target's own." \
	  --prompt="Write HTML for a table with 5 rows and 3 columns." \
	  --prompt="Why is the sky blue?"

test: $(VENV)/.installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

$(VENV)/.installed: setup.py
	$(PYTHON) -c 'import sys; sys.exit("specjax needs Python 3.11 or newer; set PYTHON=python3.x") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	touch $@
