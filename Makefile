# `make help` lists the targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: setup
setup: ## Install everything into .venv
	@scripts/setup

.PHONY: generate
generate: setup ## Regenerate the stubs from protos/
	scripts/generate

.PHONY: lock
lock: setup ## Renew requirements.lock
	scripts/lock
