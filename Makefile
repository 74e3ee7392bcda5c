# `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
AIRFLOW := .venv-airflow

# Some images set this to remain small. Each of the many processes of the tests would then compile all its imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: browser bundle engine help venv airflow-venv test drawn check kernels archives lint demo bench bench-report fuzz crash hostile mutants soak versions image release reference golden clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

# The packages of the commands, without those of the tests, so that a demo does not wait for them.
$(VENV)/.commands: pyproject.toml conf/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c conf/constraints.txt -e .
	touch $@

$(VENV)/.installed: $(VENV)/.commands
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c conf/constraints.txt -e '.[test]'
	touch $@

venv: $(VENV)/.installed  ## build .venv, with .venv/bin/keytail

# A separate environment, because Airflow and keytail need different versions of the same packages.
$(AIRFLOW)/.installed: airflow_dags/requirements.txt conf/constraints-airflow.txt
	$(PYTHON) -m venv --clear $(AIRFLOW)
	$(AIRFLOW)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c conf/constraints-airflow.txt \
		-r airflow_dags/requirements.txt
	touch $@

airflow-venv: $(AIRFLOW)/.installed  ## build .venv-airflow, in which the DAGs are tested

browser:  ## install the browser in which tests open pages (Debian's chromium, as root)
	command -v chromium >/dev/null || { apt-get -o Acquire::Retries=3 update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

lint: venv  ## run ruff, mypy, import-linter and the check of terms
	$(BIN)/ruff check lib jobs tests airflow_dags
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.terms

# Tests wait for JVMs and brokers, so twice as many processes as there are cores keep these busy.
# `make test TESTS=tests/log` and `make test TESTS="tests/log -k lock"` run some of the tests.
JOBS ?= $(shell expr $$(nproc) \* 2)
TESTS ?= tests
test: airflow-venv  ## run lint and all tests (needs Java and Maven Central), or some: make test TESTS=tests/log
	$(MAKE) --no-print-directory -j2 lint kernels archives
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

drawn: airflow-venv  ## run all the tests of which each run draws one (half an hour), after a change that many depend on
	$(MAKE) --no-print-directory -j2 kernels archives
	KEYTAIL_ONE_OF=all $(BIN)/python -m pytest -n $(JOBS) -m one_of $(TESTS)

# These tests wait less, and each process takes 4 s to collect all tests.
check: JOBS = $(shell expr $$(nproc) + 1)
check: venv  ## run lint and the fast tests that need no JVM, before each commit
	$(MAKE) --no-print-directory -j2 lint kernels
	KEYTAIL_DRAWS=0 $(BIN)/python -m pytest -n $(JOBS) -m "not spark and not interop and not long" $(TESTS)

kernels: venv  ## compile the kernels that most tests need, once, before several test processes start
	$(BIN)/keytail doctor --warm >/dev/null

archives: venv  ## create class data archives of Spark and Kafka, which halve the start time of JVMs in tests
	$(BIN)/python -m tests.class_archives

demo: $(VENV)/.commands  ## compact a copy of the golden logs and print the result
	$(BIN)/python -m tests.demo

bench: venv  ## compare the speed of keytail and Kafka on the same data (needs Java and Maven Central)
	$(BIN)/python -m tests.bench.shapes
	$(BIN)/python -m tests.bench.run
	$(BIN)/python -m tests.bench.recover
	$(BIN)/python -m tests.bench.recover --stages
	$(BIN)/python -m tests.bench.dump
	$(BIN)/python -m tests.bench.import_
	$(BIN)/python -m tests.bench.export

bench-report: venv  ## measure the growth of the cost, with that of Kafka, as build/growth.html; about ten minutes without other load
	mkdir -p build
	$(BIN)/python -m tests.bench.growth --json build/growth.json
	$(BIN)/python -m tests.bench.growth_report build/growth.json build/growth.html

N ?= 1000
fuzz: venv  ## clean N random logs with Kafka's Cleaner and with keytail: make fuzz N=1000
	KEYTAIL_FUZZ_LOGS=$(N) $(BIN)/python -m pytest -s tests/interop/test_differential.py

crash: venv  ## interrupt every operation of every protocol, and make it fail in every way; prints the number of tries
	KEYTAIL_FAULTS=all $(BIN)/python -m pytest tests/crash tests/log/test_checkpoint.py

hostile: venv  ## try N damaged inputs and N/100 damaged log dirs, with guard pages and bounds checks: make hostile N=1000000
	$(BIN)/python -m tests.hostile.fuzz --inputs $(N) --directories $$(( $(N) / 100 ))
	NUMBA_BOUNDSCHECK=1 KEYTAIL_CACHE_DIR=$$(mktemp -d) $(BIN)/python -m tests.hostile.fuzz --inputs $$(( $(N) / 10 ))

mutants: N = 200
mutants: JOBS = $(shell nproc)
mutants: venv  ## try N changes of the core, each of which must make a test fail; hours; JOBS=2, KEYTAIL_SEED; tests/MUTATION.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c conf/constraints.txt -e '.[mutation]'
	$(BIN)/python -m tests.mutation --n $(N) --jobs $(JOBS)

soak: venv  ## run the tests that take too long for CI, for hours: kills, faults, hostile input, random logs; tests/SOAK.md
	$(BIN)/python -m tests.soak

versions: venv  ## test the wheel on each supported Python and Java that is installed; minutes; make versions PYTHONS="python3.13"
	$(BIN)/python -m tests.versions $(PYTHONS)

ENGINE ?= docker
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' lib/keytail/__init__.py)
image:  ## build an image for executors; ENGINE=podman or buildah; ARGS='--build-arg UID=1001' and others of conf/Dockerfile
	$(ENGINE) build -f conf/Dockerfile -t keytail:$(VERSION) --build-arg VERSION=$(VERSION) $(ARGS) .

engine:  ## install buildah and debootstrap, by which the image is tested without a daemon or a registry (Debian, as root)
	apt-get -o Acquire::Retries=3 update -qq && DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -y -qq \
		--no-install-recommends buildah debootstrap >/dev/null

release: venv  ## build and check the wheel, the sdist and the image of this commit, in build/; refuses uncommitted files
	$(BIN)/python -m tests.release

ARCH ?= $(shell uname -m)
FOR_PYTHON ?= $(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
EXTRAS ?=
BUNDLE = build/keytail-$(VERSION)-python$(FOR_PYTHON)-linux-$(ARCH)
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check
# pip accepts only the given tags, and wheels have different ones. Debian 10 and RHEL 8 have glibc 2.28.
TAGS = $(foreach tag,manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014,--platform $(tag)_$(ARCH))
bundle: $(VENV)/.commands  ## build a .tar of wheels for hosts without a network; make bundle ARCH=aarch64 FOR_PYTHON=3.12 EXTRAS=[report]
	rm -rf $(BUNDLE) && mkdir -p $(BUNDLE)/wheels
	$(PIP) wheel --no-deps --wheel-dir $(BUNDLE)/wheels .
	case "$(EXTRAS)" in *spark*|*delta*|*all*) \
		$(PIP) wheel --no-deps --wheel-dir $(BUNDLE)/wheels "$$(grep ^pyspark== conf/constraints.txt)";; esac  # has no wheel
	$(PIP) download --dest $(BUNDLE)/wheels --find-links $(BUNDLE)/wheels --only-binary=:all: $(TAGS) \
		--implementation cp --python-version $(FOR_PYTHON) -c conf/constraints.txt \
		"$$(echo $(BUNDLE)/wheels/keytail-*.whl)$(EXTRAS)"
	cp conf/install-bundle.sh $(BUNDLE)/install.sh
	echo "$(FOR_PYTHON)" > $(BUNDLE)/python-version
	echo "$(EXTRAS)" > $(BUNDLE)/extras
	tar -C build -cf $(BUNDLE).tar $(notdir $(BUNDLE)) && rm -r $(BUNDLE)
	@echo "$(BUNDLE).tar: unpack it on the host, and there: sh $(notdir $(BUNDLE))/install.sh /opt/keytail"

reference: venv  ## generate the pages REFERENCE, ERRORS and ROWS, and the JSON Schemas of rows, from the program
	$(BIN)/python -m tests.main.reference > lib/keytail/main/REFERENCE.md
	$(BIN)/python -m tests.main.reference_errors > lib/keytail/main/ERRORS.md
	$(BIN)/python -m tests.main.reference_rows > lib/keytail/cli/ROWS.md
	$(BIN)/python -m tests.main.reference_schemas

golden: venv  ## generate the golden logs again with a real broker (only if they must change: they are committed)
	$(BIN)/python -m tests.golden.generate --overwrite

clean:  ## remove everything that make built
	rm -rf $(VENV) $(AIRFLOW) tests/interop/target .pytest_cache .mypy_cache .ruff_cache .hypothesis
