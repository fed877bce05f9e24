# `make help` lists the targets. Everything installs into .venv by itself.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
PYTEST := $(BIN)/pytest -q --durations 12 --durations-min 10
# Suites that wait more than they compute run in two processes (tests/conftest.py: what must not run side by side).
PARALLEL := -n 2 --dist loadgroup
SIZE ?= small
ONLY ?= all
SEED ?= 1
AGAINST ?= .git\#branch=main

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: setup
setup: ## Install everything into .venv and build the launcher
	@scripts/setup
	@scripts/build-launcher --optional

.PHONY: rewards
rewards: setup ## From example attempts to rewards, credit, groups and training files, with a scripted judge
	@ORCHARD_JUDGES_FILE=examples/rewards/judges.json $(BIN)/orchard with-platform -- $(BIN)/python examples/rewards/whole_path.py build/rewards

.PHONY: demo
demo: setup ## Evaluate candidate patches on example tasks, each in its own sandbox
	@$(BIN)/orchard demo

.PHONY: up
up: setup ## Run the whole platform in the foreground until Ctrl-C
	@$(BIN)/orchard up

.PHONY: test
test: lint unit integration cluster e2e ## Lint, types, unit, integration, cluster and end-to-end tests

.PHONY: lint
lint: setup ## Style, types, import rules, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/buf breaking --against '$(AGAINST)'
	scripts/generate --check
	$(BIN)/python scripts/api_reference --check

.PHONY: unit
unit: setup ## Fast tests without I/O
	$(PYTEST) $(PARALLEL) tests/unit

.PHONY: integration
integration: setup payload ## One service against real PostgreSQL, Valkey, gRPC and processes
	$(PYTEST) $(PARALLEL) tests/integration

.PHONY: cluster
cluster: setup payload images ## Against a real Kubernetes, built once in 16 minutes (tests/cluster/README.md)
	@tests/cluster/testbed/build >/dev/null
	$(PYTEST) tests/cluster

.PHONY: e2e
e2e: setup ## The client against the whole platform, kills included (3 each)
	$(PYTEST) tests/e2e

.PHONY: chaos
chaos: setup payload ## Kill loops at full length, hours of them, on one machine and on a cluster: make chaos SEED=7
	ORCHARD_CHAOS_SEED=$(SEED) ORCHARD_CHAOS_ROUNDS=20 $(PYTEST) tests/e2e -m chaos --timeout 3600
	ORCHARD_CHAOS_SEED=$(SEED) ORCHARD_CHAOS_ROUNDS=50 $(PYTEST) tests/integration/judge -m chaos
	ORCHARD_CHAOS_SEED=$(SEED) ORCHARD_CHAOS_ROUNDS=20 $(PYTEST) tests/integration/exec_agent tests/integration/exec_agent_files -m chaos --timeout 3600
	ORCHARD_CHAOS_SEED=$(SEED) ORCHARD_CHAOS_ROUNDS=20 $(PYTEST) tests/cluster/watcher tests/cluster/pods -m chaos -s

.PHONY: conformance
conformance: setup ## The real harnesses and trainers check our files, in 6 GB of environments of their own (tests/conformance)
	$(PYTEST) tests/conformance -o python_files='check_*.py' --timeout 3600

.PHONY: bench
bench: setup ## Measure: make bench ONLY=exec,lifecycle SIZE=full; writes build/bench.json
	$(BIN)/python -m tests.bench --size $(SIZE) --only $(ONLY)

.PHONY: payload
payload: setup ## Build what Pods run the agent from: build/payload/ARCH and its archive (make payload ARCH=aarch64)
	@$(BIN)/python scripts/build-payload $(if $(ARCH),--arch $(ARCH))

.PHONY: images
images: setup ## Build the images of all services and of the agent: build/images-ARCH.tar (make images PREFIX=registry/path TAG=1)
	@$(BIN)/python scripts/build-images $(if $(PREFIX),--prefix $(PREFIX)) $(if $(TAG),--tag $(TAG))

.PHONY: format
format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: generate
generate: setup ## Regenerate stubs and the API reference from protos/
	scripts/generate
	$(BIN)/python scripts/api_reference

.PHONY: lock
lock: setup ## Renew requirements.lock
	scripts/lock

.PHONY: clean
clean: ## Remove what was built and installed
	rm -rf .venv build
