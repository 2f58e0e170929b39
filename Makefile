# `make train` and `make test` do everything from a fresh checkout; see `make help`.
SHELL := /bin/bash
VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.quintain
SGLANG := .sglang
PIP   := $(BIN)/python -m pip --disable-pip-version-check

# Another build of torch: make train TORCH="torch==2.13.0" TORCH_INDEX=https://download.pytorch.org/whl/cu130
TORCH_CHOSEN := $(if $(filter undefined,$(origin TORCH)),,yes)
INDEX_CHOSEN := $(if $(filter undefined,$(origin TORCH_INDEX)),,yes)
TORCH        ?= torch==2.13.0+cpu
TORCH_INDEX  ?= https://download.pytorch.org/whl/cpu
# Passed to `quintain train`: make train ARGS="seed=7 --out runs/seed7"
ARGS        ?=
# Passed to pytest: make test PYTEST_ARGS="tests/sandbox -k reset"
PYTEST_ARGS ?=

.PHONY: help train sglang test lint format system-packages clean FORCE

help: ## Say what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 28

train: $(STAMP)/run ## Set up .venv if need be, then train the calculator recipe (ARGS="seed=7 --out DIR")
	$(BIN)/quintain train recipes/calculator.yaml $(ARGS)

sglang: | $(BIN)/python ## SGLang for CPUs in an environment of its own, .sglang (recipes/calculator_sglang.yaml)
	@if [ -n "$$QUINTAIN_SGLANG_PYTHON" ]; then echo "using QUINTAIN_SGLANG_PYTHON=$$QUINTAIN_SGLANG_PYTHON"; \
	else recipes/sglang_cpu/install.sh $(SGLANG) $(BIN)/python; fi

test: $(STAMP)/test sglang system-packages lint ## Set up what the tests need, lint, then run all tests (PYTEST_ARGS="-k name")
	@tests/run_tests.sh $(PYTEST_ARGS)

lint: $(STAMP)/test ## ruff, type checks, layer contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --level error
	PYTHONPATH=.typing $(BIN)/lint-imports

format: $(STAMP)/test ## Let ruff format and fix what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# What pip can't bring. Left alone where it is there already, or where this is not a root-owned Debian.
system-packages:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium and chromium-driver"; \
	  (apt-get update -qq || true) >/dev/null 2>&1; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; \
	else echo "note: chromium and chromedriver are missing; the browser tests will say so"; fi
	@if command -v ssh >/dev/null && [ -x /usr/sbin/sshd ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing openssh-client and openssh-server"; \
	  (apt-get update -qq || true) >/dev/null 2>&1; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-client openssh-server >/dev/null; \
	else echo "note: ssh and sshd are missing; the tests of engines behind ssh will say so"; fi

clean: ## Remove .venv, .sglang and caches; runs/ stays
	rm -rf $(VENV) $(SGLANG) .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist quintain.egg-info

$(BIN)/python:
	@for python in python3.11 python3.12 python3; do \
	  $$python -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || continue; \
	  echo "making $(VENV) with $$($$python --version)"; \
	  exec $$python -m venv $(VENV); \
	done; \
	echo "error: no Python 3.11 or 3.12 with venv found; on Debian or Ubuntu: apt-get install python3.11-venv" >&2; exit 2

# torch first and by itself: asked for by the package alone, pip would take a CUDA build of several GB. The sources that
# pip is set up with are tried before the index, unless the index was chosen.
$(STAMP)/torch: FORCE | $(BIN)/python
	@if [ -e $@ ] && { [ -z '$(TORCH_CHOSEN)' ] || [ "$$(cat $@)" = '$(TORCH)' ]; }; then exit 0; fi; \
	echo 'installing $(TORCH) $(if $(TORCH_CHOSEN),into $(VENV),(about 2 GB into $(VENV) with all it needs, a minute or two))'; \
	if [ -e $@ ]; then rm $@; $(PIP) uninstall -q -y torch; fi; \
	{ [ -z '$(INDEX_CHOSEN)' ] && $(PIP) install -q '$(TORCH)' 2>/dev/null; } \
	|| $(PIP) install -q --index-url '$(TORCH_INDEX)' '$(TORCH)' || exit 2; \
	mkdir -p $(STAMP) && echo '$(TORCH)' > $@

$(STAMP)/run: pyproject.toml $(STAMP)/torch
	@echo 'installing quintain and what it needs (less than a minute)'
	$(PIP) install -q -e .
	@touch $@

$(STAMP)/test: $(STAMP)/run
	$(PIP) install -q -e '.[test]'
	@touch $@
