# Everything sets itself up first: see scripts/setup.

SHELL := /bin/bash
CONFIG ?= examples/voice.yaml
EVENTS ?= 3000000
VENV := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-test run test test-lerobot simulate simulate-coverage simulate-mutations train-robots lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20
	@echo
	@echo "CONFIG=FILE chooses the config of 'make run' (now $(CONFIG)),"
	@echo "ANTIPHON_PORT=N its port (default: the config's)."
	@echo "EVENTS=N is the length of 'make simulate' (now $(EVENTS))."

setup: ## install what 'make run' needs
	@scripts/setup run

setup-test: ## install what the tests need as well
	@scripts/setup test

run: ## serve examples/voice.yaml and print the address of the page
	@scripts/setup run
	@exec $(VENV)/antiphon serve -c $(CONFIG)

test: ## lint and all tests: fast, with models, with a browser
	@scripts/setup test
	@exec scripts/test

test-lerobot: ## LeRobot's policies behind the gateway, in an environment of 2 GB
	@scripts/setup test
	@scripts/setup lerobot
	@exec scripts/test lerobot

simulate: ## the simulation, EVENTS events of it
	@scripts/setup test
	@exec $(VENV)/python -m tests.simulation --events $(EVENTS)

simulate-coverage: ## what of the machines the simulation reaches, held against its bars
	@scripts/setup test
	@exec $(VENV)/python -m tests.simulation.coverage

simulate-mutations: ## break the machines in small ways, and see that each is caught
	@scripts/setup test
	@exec $(VENV)/python -m tests.simulation.mutations.catch

train-robots: ## make the table-top policy anew, in build/tabletop (an hour at most)
	@scripts/setup test
	@exec $(VENV)/python -m training.robots.train --out build/tabletop

lint: ## ruff and mypy
	@scripts/setup test
	@exec scripts/test lint

format: ## let ruff format the code
	@scripts/setup test
	@$(VENV)/ruff check --fix . && $(VENV)/ruff format .

clean: ## remove the virtual environments and everything that was built
	rm -rf .venv .venv-client .venv-openpi .venv-lerobot build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
