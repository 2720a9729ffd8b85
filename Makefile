# Two commands do everything on a machine with Python 3.11+: `make demo` and `make test`.
#
# TORCH chooses the build of torch; it is installed first, so that nothing else pulls another one. With a GPU, or to
# pick a wheel index: make TORCH="torch==2.13.0 --index-url URL" demo
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
CONFIG ?= examples/demo.toml
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
NODE := .tools/node/node_modules/.bin
export OMP_NUM_THREADS ?= 1
# Hundreds of tests kill real processes on a busy machine: one that fails is run once more, and the summary names it.
RETRY := --reruns 1 -r R

.PHONY: help demo up test test-slow check format proto proto-baseline vllm sglang worlds clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

demo: $(VENV)/.farm ## Set everything up and watch the farm learn FrozenLake (about one minute)
	@$(BIN)/rollfarm up examples/demo.toml --up.fresh finished

up: $(VENV)/.farm ## Run a farm: make up CONFIG=examples/demo.toml ARGS="--run.alpha 0"
	@$(BIN)/rollfarm up $(CONFIG) $(ARGS)

test: $(VENV)/.dev $(NODE) ## The fast tests (under ten minutes)
	$(BIN)/python -m pytest -m "not slow" $(RETRY)

test-slow: $(VENV)/.dev $(NODE) vllm sglang worlds ## The tests that run whole farms, real vLLM and real SGLang
	$(BIN)/python -m pytest -m slow $(RETRY)

check: $(VENV)/.dev $(NODE) ## Linters, types, import rules, contract and stub drift
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	cd proto && ../$(NODE)/buf lint && ../$(NODE)/buf breaking --against baseline.binpb
	tools/check-stubs.sh
	PATH="$(abspath $(BIN)):$$PATH" $(NODE)/pyright

format: $(VENV)/.dev ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: ## Regenerate the stubs from proto/
	PYTHON=$(PYTHON) tools/proto.sh

proto-baseline: $(NODE) ## At a release: what later contracts must stay compatible with
	cd proto && ../$(NODE)/buf build --exclude-source-info -o baseline.binpb

vllm: ## An environment of its own for real vLLM on CPU (3.5 GB)
	PYTHON=$(PYTHON) TORCH="$(TORCH)" tools/install-vllm.sh .venv-vllm

sglang: ## An environment of its own for real SGLang on CPU (2.6 GB)
	PYTHON=$(PYTHON) TORCH="$(TORCH)" tools/install-sglang.sh .venv-sglang

worlds: ## An environment of its own for other people's worlds that fit nowhere else (1.1 GB)
	PYTHON=$(PYTHON) tools/install-worlds.sh .venv-worlds

clean: ## Remove what the other targets made, runs and models excepted
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-worlds .tools build *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rollfarm needs Python 3.11 or newer, and $(PYTHON) is older. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV): torch, then rollfarm. This takes a few minutes the first time." >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --progress-bar off $(TORCH) >&2
	@touch $@

$(VENV)/.farm: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing the farm ..." >&2
	@$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[all]' >&2
	@touch $@

$(VENV)/.dev: $(VENV)/.farm
	@echo "Installing the tools for developers ..." >&2
	@$(PIP) install --quiet --progress-bar off -c constraints.txt -e '.[all,dev]' >&2
	@touch $@

$(NODE): $(VENV)/.dev Makefile
	@echo "Installing buf, pyright and gRPC for Node ..." >&2
	@PATH="$(abspath $(BIN)):$$PATH" npm install --silent --no-audit --no-fund --no-save --prefix .tools/node @bufbuild/buf@1.75.0 pyright@1.1.414 @grpc/grpc-js@1.14.7 @grpc/proto-loader@0.8.1 >&2
	@touch $@
