# Everything runs in .venv at the project's root. `make demo` and `make test` set it up themselves;
# the set-up is skipped when nothing it depends on has changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
MODEL := .cache/models/smollm2-135m
READY := .venv/.moonstep-ready

# The model lies on disk; nothing may ask a hub for it.
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo test drill bench lint format check clean

help: ## Show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) $(MODEL)/config.json ## Set up .venv and the demo's model (the other targets do it when needed)

$(READY): pyproject.toml scripts/setup.sh scripts/vllm-name/pyproject.toml
	@bash scripts/setup.sh $(READY)

$(MODEL)/config.json: | $(READY)
	@$(BIN)/python scripts/fetch_model.py $(MODEL)

demo: setup ## Show what Moonstep does on a real engine (four to six minutes); writes out/demo.json
	@$(BIN)/moonstep demo

test: setup ## Run the tests, as CI does
	@$(BIN)/python -m pytest -m 'not drill' -n 2 --dist loadfile --durations=25

drill: setup ## Run the long fault drills (up to an hour); writes out/drill.log
	@mkdir -p out
	@$(BIN)/python -m pytest -m drill 2>&1 | tee out/drill.log

bench: setup ## Run the measurements (about an hour)
	@$(BIN)/moonstep bench schedule --json out/bench-schedule.json
	@$(BIN)/moonstep bench copy --json out/bench-copy.json
	@$(BIN)/moonstep bench multiturn --json out/bench-multiturn.json
	@$(BIN)/moonstep bench engine --json out/bench-engine.json
	@$(BIN)/moonstep bench gap --json out/bench-gap.json

lint: $(READY) ## Check form, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(READY) ## Rewrite the code in the project's form
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check: lint test ## Lint and test

clean: ## Remove what was set up and built, the model included
	@rm -rf .venv .cache out build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
