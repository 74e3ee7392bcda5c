# `make help` lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help venv test lint demo bench bench-report fuzz crash hostile soak golden clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml conf/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c conf/constraints.txt -e '.[test]'
	touch $@

venv: $(VENV)/.installed  ## build .venv, with .venv/bin/keytail

lint: venv  ## ruff, mypy, import-linter
	$(BIN)/ruff check lib jobs tests
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## lint and all tests (Java and Maven Central for the interop ones)
	$(BIN)/python -m tests.in_two

demo: venv  ## compact a copy of the golden logs and say what happened
	$(BIN)/python -m tests.demo

bench: venv  ## compaction, index rebuild, dump and import against Kafka's own on the same data (needs Java and Maven Central)
	$(BIN)/python -m tests.bench.shapes
	$(BIN)/python -m tests.bench.run
	$(BIN)/python -m tests.bench.recover
	$(BIN)/python -m tests.bench.recover --stages
	$(BIN)/python -m tests.bench.dump
	$(BIN)/python -m tests.bench.import_
	$(BIN)/python -m tests.bench.export

bench-report: venv  ## how the cost grows, Kafka's beside it, as build/growth.html; about ten quiet minutes
	mkdir -p build
	$(BIN)/python -m tests.bench.growth --json build/growth.json
	$(BIN)/python -m tests.bench.growth_report build/growth.json build/growth.html

N ?= 1000
fuzz: venv  ## N random logs through Kafka's Cleaner and keytail: make fuzz N=1000
	KEYTAIL_FUZZ_LOGS=$(N) $(BIN)/python -m pytest -s tests/interop/test_differential.py

crash: venv  ## every operation of every protocol stopped, and failed in every way; prints what was tried
	KEYTAIL_FAULTS=all $(BIN)/python -m pytest tests/crash tests/log/test_checkpoint.py

hostile: venv  ## N spoiled inputs, N/100 spoiled log dirs, with guard pages and bounds checks: make hostile N=1000000
	$(BIN)/python -m tests.hostile.fuzz --inputs $(N) --directories $$(( $(N) / 100 ))
	NUMBA_BOUNDSCHECK=1 KEYTAIL_CACHE_DIR=$$(mktemp -d) $(BIN)/python -m tests.hostile.fuzz --inputs $$(( $(N) / 10 ))

soak: venv  ## what does not fit into CI, for hours: kills, faults, hostile input, random logs; tests/SOAK.md
	$(BIN)/python -m tests.soak

golden: venv  ## make the golden logs anew with a real broker (the bytes are committed: only on purpose)
	$(BIN)/python -m tests.golden.generate --overwrite

clean:  ## remove what make built
	rm -rf $(VENV) tests/interop/target .pytest_cache .mypy_cache .ruff_cache .hypothesis
