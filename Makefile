# Everything that is done more than once with this repository. `make` lists the targets.

PYTHON ?= python3
SHELL_FILES = $(shell git ls-files '*.sh' .ci/run)

.DEFAULT_GOAL := help
.PHONY: help fetch check demo test lint

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

fetch: ## download the wheel of every pin into the cache, verified
	$(PYTHON) tools/series.py fetch

check: ## does every patch series apply to its release, and compile?
	$(PYTHON) tools/series.py check

demo: ## real vLLM without a GPU, experts in other memory: are the tokens equal? (ARGS=--compile)
	$(PYTHON) tools/demo.py $(ARGS)

test: ## every test that needs no GPU
	$(PYTHON) tools/test.py $(ARGS)

lint: ## ruff, mypy and shellcheck
	ruff check
	ruff format --check
	mypy
	$(if $(SHELL_FILES),shellcheck $(SHELL_FILES),@echo "no shell scripts")
