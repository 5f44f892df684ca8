# Chores of this repository. Needs make and Python 3.11 or newer; brings everything else into .venv.

VENV   := .venv
BIN    := $(VENV)/bin
UV     := $(VENV)/tools/bin/uv
STAMP  := $(VENV)/.ready
# The same with Google's clients, which only a few tests need: one gigabyte more.
GOOGLE := $(VENV)/.ready-with-google
GOOGLE_TESTS := tests/unit/hooks/test_google_clusters.py tests/unit/hooks/test_google_accounts.py
# Python that makes the environment: the first that is new enough, or the one that is given here.
PYTHON ?=
# More arguments for the command behind a target: make test ARGS="-k provider -x"
ARGS   ?=

# Neither make nor Ray, which starts its processes through a shell without quotes, can work there.
ifneq ($(words $(CURDIR)),1)
$(error The path of this folder has a space in it ("$(CURDIR)"): move it to one without, Ray cannot start from here)
endif

# Every Ray process imports ray afresh; without byte code on disk each of them compiles it again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo ui test test-google testbed test-cluster lint format bench constraints clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make or renew .venv (the other targets do it by themselves)
	@echo "$(VENV) is ready"

demo: $(STAMP)  ## provision, label, train, serve, evaluate and release, on this machine
	@$(BIN)/raytpu demo $(ARGS)

ui: $(STAMP)  ## an Airflow with the example DAGs, up until Ctrl-C
	@$(BIN)/raytpu ui $(ARGS)

# Three at a time of the ways that tests/conftest.py tells apart; ARGS="-n 0" for one, with -s or a debugger.
test: $(STAMP)  ## every test, real Ray and real Airflow too
	@$(BIN)/python -m pytest -n 3 $(ARGS)

# PARTS="--if-possible" builds no Kueue, and nothing where this machine can't.
PARTS ?= --kueue
testbed: $(STAMP)  ## build the Kubernetes that test-cluster starts; half an hour or more, once
	@$(BIN)/python -m tests.testbed build $(PARTS)

# What only needs more time than `make test` should take, and Google's clients.
test-google: $(GOOGLE)  ## Google's APIs and machines played: random lives, TPU VMs with real Ray
	@$(BIN)/python -m pytest -n 2 tests/cluster $(GOOGLE_TESTS) -m "not testbed" $(ARGS)

# Another cluster that RAYTPU_TEST_KUBECONFIG names needs nothing built. Where nothing can be, tests are skipped by name.
test-cluster: $(GOOGLE)  ## the same, and a whole Kubernetes with KubeRay and TPU nodes
	@$(if $(RAYTPU_TEST_KUBECONFIG),,$(BIN)/python -m tests.testbed build $(PARTS) --if-possible)
	@$(BIN)/python -m pytest -n 2 tests/cluster $(GOOGLE_TESTS) $(ARGS)

lint: $(STAMP)  ## style, format, types, and which layer may import which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=. $(BIN)/lint-imports

format: $(STAMP)  ## let ruff put the code into shape
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP)  ## what importing the operators costs; where the testbed is built, acquiring slices too
	@$(BIN)/python -m tests.benchmarks.imports
	@$(BIN)/python -m tests.benchmarks.testbed --if-built $(ARGS)

constraints: $(UV)  ## renew constraints.txt (ARGS=--upgrade takes newer versions)
	@$(UV) pip compile --quiet --python-version 3.11 --universal --all-extras --no-annotate --no-header \
		$(ARGS) pyproject.toml --output-file constraints.txt
	@echo "constraints.txt is renewed; run the tests before it is committed"

clean:  ## remove .venv, caches and the Airflow of `make ui`
	@rm -rf $(VENV) .airflow build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(UV)
	@echo "Installing into $(VENV): Airflow, Ray and JAX; about 2 GB, a few minutes the first time"
	@$(UV) pip install --python $(BIN)/python --constraint constraints.txt --compile-bytecode \
		--editable '.[local,gke,dev]'
	@touch $@

$(GOOGLE): $(STAMP)
	@echo "Adding Google's clients to $(VENV); one gigabyte more"
	@$(UV) pip install --python $(BIN)/python --constraint constraints.txt --compile-bytecode \
		--editable '.[local,gke,google,dev]'
	@touch $@

# uv installs the 200 packages several times faster than pip and compiles them side by side.
$(UV): | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade >/dev/null
	@echo "Fetching uv"
	@$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/tools 'uv>=0.8'
	@test -x $@ && touch $@

$(BIN)/python:
	@python=$$(sh scripts/find-python $(PYTHON)) && echo "Making $(VENV) with $$python" && \
		{ "$$python" -m venv $(VENV) || { \
			rm -rf $(VENV); \
			echo "raytpu-ops: $$python cannot make a virtual environment;" \
				"on Debian and Ubuntu: apt-get install python3-venv" >&2; \
			exit 1; }; }
