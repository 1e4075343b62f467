# Two commands need nothing but python3 >= 3.11, its venv module, make and a package index: make demo, make test.
# TORCH_INDEX=URL takes torch from another index, such as the one with CPU builds on PyTorch's "Get Started" page.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test check fix bench soak

demo: .venv/installed
	$(BIN)/quatrain demo

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

test: check
	$(BIN)/python -m pytest -m "not soak"

soak: .venv/installed-dev
	$(BIN)/python -m pytest -m soak
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m "not soak" tests/text tests/tokens

fix: .venv/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python tools/settings_table.py

bench: .venv/installed-dev
	for script in bench/*.py; do $(BIN)/python $$script || exit 1; done

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quatrain needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt .venv/bin/python
	@$(BIN)/python tools/which_torch.py $(INDEX)
	$(PIP) install -q -c constraints.txt $(INDEX) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) install -q -c constraints.txt $(INDEX) -e '.[dev]'
	@touch $@
