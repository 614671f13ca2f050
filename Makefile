# The commands that a developer needs. `make` lists them with their help; CONTRIBUTING.md says when to run which.
# Each command is one line, so that you can also copy it.

UV := uv run --no-sync
PART ?= tests/engine
REPORTS ?= old.json new.json

.DEFAULT_GOAL := help
.PHONY: help test part full lint types docs screens bench compare clean

help: # not one of the ten: `make` runs it
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: ## run the tests of a change: minutes
	$(UV) pytest

part: ## run the tests of one folder or file: make part PART=tests/sona
	$(UV) pytest $(PART)

full: ## run every text, seed, compiler and combination: hours
	$(UV) pytest --full

lint: ## check style, format and layers
	$(UV) ruff check && $(UV) ruff format --check && $(UV) lint-imports

types: ## check the types
	$(UV) mypy

docs: ## write the figures and the table of systems again, then build the site into build/docs
	$(UV) python -m tests.docs.figures && $(UV) python -m tests.docs.systems && uv run --group docs sphinx-build -W docs build/docs

screens: ## write the chat's screens and the transcripts of the commands again
	$(UV) pytest tests/chat/test_screens.py --write-screens && $(UV) python -m tests.cli.write_transcripts plain

bench: ## measure speed, memory and learning on this machine: ten minutes
	$(UV) ruvmlx bench --json

compare: ## say what became faster or slower: make compare REPORTS="old.json new.json"
	$(UV) ruvmlx bench compare $(REPORTS)

clean: ## delete what the tools write: builds, caches, the site
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
