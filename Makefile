# Everything works from a fresh clone: each target makes the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help venv demo test test-slow test-all lint bench docs clean

help:
	@echo "make demo       plan a mixed lab, train on this machine by a plan made for it, compare"
	@echo "make test       the quick tests"
	@echo "make test-all   all tests"
	@echo "make lint       ruff, mypy --strict"
	@echo "make bench      the figures of docs/performance.md"
	@echo "make docs       current output and picture in the README"
	@echo "make venv       the development environment in $(VENV)"

$(VENV)/.run: requirements/run.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "error: $(PYTHON) is older than 3.11; run make PYTHON=python3.11 (or newer)" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -r requirements/run.txt
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	$(BIN)/pip install -q --disable-pip-version-check -r requirements/dev.txt
	@touch $@

venv: $(VENV)/.dev

demo: $(VENV)/.run
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 -m "not slow and not root"

test-slow: $(VENV)/.dev
	$(BIN)/pytest -m "slow or root"

test-all: test test-slow

lint: $(VENV)/.dev
	$(BIN)/ruff check --no-cache .  # a cached verdict does not see that an imported module is gone
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

docs: $(VENV)/.dev
	$(BIN)/python tests/test_docs.py
	$(BIN)/mixfleet plan examples/jobs/llama-3-8b.yaml examples/clusters/mixed-lab.yaml -o out/lab-plan.yaml > /dev/null
	$(BIN)/python examples/picture.py out/lab-plan.yaml docs/timeline.svg

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache
