# `make demo`: from a fresh clone to a verdict. `make bench`: the same on a GPU, against dense attention and the peers.
# `make test`: the whole CPU test suite. Needs Python >= 3.11 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two stamps: running jobs needs less than developing.
RUN    := $(VENV)/.run
DEV    := $(VENV)/.dev

# The environment or a .env, where `nsa` looks too, must not lead a job elsewhere than the commands below look.
in_env = $(shell test -f .env && sed -nE 's/^(export +)?$1 *= *["'"'"']?([^"'"'"' \#]*).*/\2/p' .env 2>/dev/null | tail -n 1)
RAY_DASHBOARD  := $(or $(NSA_RAY_DASHBOARD),$(call in_env,NSA_RAY_DASHBOARD),http://127.0.0.1:8265)
DASHBOARD_PORT := $(or $(NSA_DASHBOARD_PORT),$(call in_env,NSA_DASHBOARD_PORT),8501)

.DEFAULT_GOAL := help
.PHONY: help env demo bench bench-system results wheel up down test test-thorough test-chaos test-gpu aot lint format check clean

# Fails on a host without a usable GPU, before anything is started, and says what does not fit.
NEED_GPU = $(BIN)/python -m jobs.hardware.driver

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-13s %s\n", $$1, $$2 }'

env: $(DEV)  ## make the environment in .venv; with an NVIDIA driver, of the versions that ran on GPUs

# $(call install,EXTRAS)
define install
@echo "installing into $(VENV)"
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make env PYTHON=python3.12")'
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@bash docker/install.sh $(BIN)/python $1
endef

PINS := pyproject.toml $(wildcard constraints*.txt) docker/install.sh

$(RUN): $(PINS)
	$(call install)
	@touch $@

$(DEV): $(PINS)
	$(call install,dev)
	@touch $(RUN) $@

demo: $(RUN)  ## local Ray, the demo benchmark as a Ray job, our GPU runs and others' figures beside it, verdict, dashboard
	@$(BIN)/nsa up
	@$(BIN)/ray job submit --address $(RAY_DASHBOARD) --working-dir . -- python -m jobs jobs/configs/demo.yaml
	@$(BIN)/nsa import --reference
	@$(BIN)/nsa report last --out var/demo-report.html
	@echo
	@$(BIN)/nsa gate linear-scaling --on cpu --run last --why || test $$? -ne 2
	@echo
	@echo "Verdicts:  nsa gate (of all targets, on our GPU runs, too)"
	@echo "Report:    var/demo-report.html"
	@echo "Dashboard: http://127.0.0.1:$(DASHBOARD_PORT)/$(STREAMLIT_SERVER_BASE_URL_PATH)   (stop everything: make down)"

bench: $(RUN)  ## on a GPU: the operator beside dense attention and the recorded peers, by length and stage
	@$(NEED_GPU)
	@$(BIN)/nsa up
	@$(BIN)/nsa import --reference
	@job=bench-$$(date -u +%Y%m%d-%H%M%S); status=0; \
	  $(BIN)/ray job submit --address $(RAY_DASHBOARD) --submission-id $$job --working-dir . \
	    -- python -m jobs jobs/configs/bench.yaml || status=$$?; \
	  $(BIN)/nsa report $$job --out var/bench.md || exit $$?; \
	  echo "Dashboard: http://127.0.0.1:$(DASHBOARD_PORT)/$(STREAMLIT_SERVER_BASE_URL_PATH)   (stop everything: make down)"; \
	  exit $$status

specs: $(RUN)  ## write the tables of docs/specs.md again, from the fields of the kinds
	@$(BIN)/python -m jobs.specs.reference docs/specs.md

# After a change of templates or gates, or with JOURNALS="PATH ..." to take journals of new runs in.
results: $(RUN)  ## write the pages of docs/results again, from the journals in docs/results/data
	@$(BIN)/python -m orchestrator.store.publish $(JOURNALS)
	@home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT && \
	  export NSA_HOME=$$home NSA_DATABASE_URL=sqlite:///$$home/nsa.db NSA_GATES=orchestrator/judge/gates.yaml && \
	  $(BIN)/nsa import --reference && \
	  $(BIN)/nsa report --template docs/results/templates --out docs/results && \
	  $(BIN)/nsa report --template orchestrator/judge/durations.csv.j2 --out orchestrator/judge/durations.csv

# setuptools packs whatever an earlier build left in build/, modules that are gone included.
wheel: $(RUN)  ## build the wheels in dist/: all, and the operator by itself
	@rm -rf build
	@$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps -w dist . ./nsa_core
	@ls dist/*.whl

up: $(RUN)  ## start the local Ray cluster and the dashboard
	@$(BIN)/nsa up

down:  ## stop what demo, bench or up started
	@if test -x $(BIN)/nsa; then $(BIN)/nsa down; else echo "nothing was running"; fi

# Two processes for two cores; tests/conftest.py says what stays together and what comes first.
test: env  ## the whole test suite (CPU), in two processes
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test-thorough: env  ## bad input of any sort: 10,000 specs, tables, journals and settings
	$(BIN)/python -m pytest tests/test_bad_input.py --hypothesis-profile=thorough --timeout 0

# The same seed has the same faults: make test-chaos SEED=7 MINUTES=10
test-chaos: env  ## two sweeps while drivers, nodes, Postgres and the disk fail, as SEED says, for MINUTES
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/support $(BIN)/python -m chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

# What it makes, 400 MB, it makes once: ARGS="--home FOLDER --only commands".
bench-system: env  ## how fast storing, commands and pages are with 1,000 runs of 200 points
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/support $(BIN)/python -m system_load $(ARGS)

test-gpu: env  ## the kernels' tests on this host's GPU, six at a time; those that need tens of GiB, one after another
	@$(NEED_GPU)
	$(BIN)/python -m pytest tests/gpu -n 6 --dist loadscope --no-loadscope-reorder

aot: env  ## compile the kernels that changed for sm80 and sm90, without a GPU, and keep what they take
	$(BIN)/python -m nsa_core.kernels.aot --table tests/nsa_core/kernels/compiled_kernels.csv

lint: env  ## format, lint, types, import rules, structure
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python .ci/structure.py

format: env  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test  ## all that CI runs

clean: down  ## remove the environment; results in var/ stay
	rm -rf $(VENV)
