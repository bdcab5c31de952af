SHELL := /bin/bash
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
ARGS ?=
# A worker per core. Files stay together, since their tests share what their fixtures made.
WORKERS := -n logical --maxprocesses 8 --dist loadfile

# Else each process compiles the sources that it imports, and pytest rewrites every test file in each worker.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test world slow long stutter soak chaos kills cluster agents lint type warm bench attack decoders gpu vllm sglang router lm-eval wheels mutants docs clean

help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: ## make .venv with everything millrace needs; instant when nothing changed
	@bash scripts/setup.sh

train: setup ## train the quickstart recipe (more words: make train ARGS="steps=50")
	@.venv/bin/millrace train quickstart $(ARGS)

test: setup ## run the tests that need no other process, port or clock: some minutes on two cores
	@.venv/bin/millrace warm
	@$(PYTEST) $(WORKERS) -m "not world and not slow" $(ARGS)

world: setup ## run the tests of processes and ports; one that fails is repeated alone
	@$(PYTHON) scripts/retry.py $(WORKERS) -m "world and not slow" $(ARGS)

long: setup ## the tests of `world` and of `slow` in one go, as the gate runs them
	@$(PYTHON) scripts/retry.py $(WORKERS) -m "world or slow" $(ARGS)

slow: setup ## run the tests marked slow, twenty minutes on two cores
	@$(PYTHON) scripts/retry.py $(WORKERS) -m "slow" $(ARGS)

stutter: setup ## run the tests of processes while they are stopped for 0.1 to 0.5 s at random
	@$(PYTHON) scripts/stutter.py -- $(PYTEST) $(WORKERS) -m "world and not slow" $(ARGS)

soak: setup ## ten minutes of random requests and faults against the server; nothing may be left over
	@$(PYTHON) scripts/soak.py --seconds 600 $(ARGS)

chaos: setup ## 24,000 fault schedules of the controller on a virtual clock, some minutes on two cores
	@$(PYTHON) scripts/chaos.py --schedules 24000 --workers 2 $(ARGS)

kills: setup ## 16 processes of a Ray run of the quickstart killed, some ten minutes on two cores
	@$(PYTHON) scripts/kills.py $(ARGS)

cluster: setup ## torchrun, Ray, lost hosts and links on three hosts of network namespaces; a table, half an hour; as root
	@$(PYTHON) scripts/cluster.py $(ARGS)

agents: setup ## the recipes with environments in every arrangement, an hour or two on two cores; with ARGS=--quick some minutes
	@$(PYTHON) scripts/agents.py $(ARGS)

attack: setup ## try what a model, a client or a damaged file could do, and print a table
	@$(PYTHON) scripts/attack.py $(WORKERS) $(ARGS)

decoders: setup ## try every causal decoder of transformers, and write docs/models.md
	@$(PYTHON) scripts/decoders.py $(ARGS)

gpu: setup ## run the tests that need a CUDA device, a minute or two
	@$(PYTEST) -n 4 -m gpu tests/gpu $(ARGS)

vllm: setup ## run vLLM as the engine: parity, planted faults, the quickstart; a table, an hour on two cores
	@$(PYTHON) scripts/servers.py vllm $(ARGS)

sglang: setup ## the same with SGLang: make sglang ARGS="--python /opt/sglang/bin/python"
	@$(PYTHON) scripts/servers.py sglang $(ARGS)

router: setup ## sglang-router in front of two servers of a model; a table, two minutes
	@$(PYTHON) scripts/router.py $(ARGS)

lm-eval: setup ## compare lm-eval-harness through millrace serve with its own backend; some minutes on two cores
	@$(PYTHON) scripts/lm_eval_harness.py $(ARGS)

lint: setup ## check style and formatting
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .

type: setup ## check types
	@$(PYTHON) -m mypy

warm: setup ## compile all kernels, which a first run would do otherwise
	@.venv/bin/millrace warm $(ARGS)

bench: setup ## run every script in benchmarks/ and examples/, hours; with ARGS=--quick some minutes
	@$(PYTHON) scripts/bench.py $(ARGS)

wheels: setup ## check that everything installs without a compiler, after a change of constraints.txt
	@$(PYTHON) scripts/wheels.py

mutants: setup ## break the arithmetic on purpose and demand a red test each time
	@$(PYTHON) scripts/mutants.py $(ARGS)

docs: setup ## build the documentation into site/, run its code, check its commands and links
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs --quiet build
	@$(PYTEST) tests/house/test_documents.py tests/house/test_site.py $(ARGS)
	@echo "open site/index.html"

clean: ## remove caches and builds (.venv and runs stay)
	@rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
