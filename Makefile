# Set-up, dashboard, tests and benches of Poda; needs only make and Python 3.11 to 3.13.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
PEER := .venv-llmcompressor
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup setup-dev run test test-slow browser-test lint bench bench-llmcompressor clean

setup: $(VENV)/installed
setup-dev: $(VENV)/installed-dev

$(VENV)/installed: requirements.txt assets/offline-packages.txt
	@test -n "$(PYTHON)" || { echo "Poda needs Python 3.11, 3.12 or 3.13 on the PATH; set PYTHON=/path/to/python to name one." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -r assets/offline-packages.txt
	$(BIN)/python -m pruning.kernels.build
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

run: setup
	$(BIN)/python -m streamlit run app/main.py

test: setup-dev
	$(BIN)/python -m pytest -m "not slow and not browser" tests

test-slow: setup-dev
	$(BIN)/python -m pytest -m "slow and not browser" tests

browser-test: setup-dev
	$(BIN)/python -m pytest -m browser tests/browser

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup-dev
	$(BIN)/python -m tests.bench.compress
	$(BIN)/python -m tests.bench.evaluate
	$(BIN)/python -m tests.bench.pages

# llmcompressor pins its own transformers, so it lives in an environment of its own.
$(PEER)/installed: | $(VENV)/installed
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet torch==2.13.0 llmcompressor==0.14.0.1
	@touch $@

bench-llmcompressor: setup-dev $(PEER)/installed
	$(BIN)/python -m tests.bench.against_llmcompressor $(PEER)/bin/python

clean:
	rm -rf $(VENV) $(PEER) .pytest_cache .mypy_cache .ruff_cache
