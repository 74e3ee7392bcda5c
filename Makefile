# `make help` lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv test lint demo bench fuzz golden clean

help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml conf/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c conf/constraints.txt -e '.[test]'
	touch $@

venv: $(VENV)/.installed  ## build .venv, with .venv/bin/keytail

lint: venv  ## ruff, mypy, import-linter
	$(BIN)/ruff check lib jobs tests
	$(BIN)/mypy
	$(BIN)/lint-imports
