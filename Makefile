# Everything a checkout needs, with nothing but python3 (3.11 or newer). `make` alone lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOG    := $(VENV)/install.log
UV     := .cache/uv

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench schemas lock clean
.DELETE_ON_ERROR:

help: ## list these targets
	@echo "Durable Timer: make TARGET, one of"
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'

install: $(STAMP) ## set up .venv (every other target does so by itself)
	@echo "$(VENV) is up to date."

demo: $(STAMP) ## the whole story on a broker of its own: start, kill, restart, fire once
	@$(BIN)/durable-timer demo

test: $(STAMP) ## all tests; narrow them with ARGS="-m unit"
	@$(BIN)/python -m pytest $(or $(ARGS),-n 4 --dist loadfile)

check: $(STAMP) ## lint, format, types, architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy .
	@$(BIN)/lint-imports --no-logo

bench: $(STAMP) ## measure throughput and lateness on this machine
	@$(BIN)/python -m benchmarks.run $(ARGS)

schemas: $(STAMP) ## write the JSON schemas of all messages to docs/schemas
	@$(BIN)/python -m timer_service.wire.schemas docs/schemas

# Two files from one resolution: requirements.lock is a checkout (all extras), requirements-runtime.lock is the
# part of it that the container image needs, with the drivers of every outbox store.
lock: ## resolve the dependencies anew (UPGRADE=1 takes the newest versions)
	@echo "Locking…"
	@test -x $(UV)/bin/uv || { $(PYTHON) -m venv $(UV) && $(UV)/bin/pip install --quiet --disable-pip-version-check uv 2>/dev/null; }
	@$(UV)/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --custom-compile-command "make lock" --all-extras \
	    $(if $(UPGRADE),--upgrade) --output-file requirements.lock
	@$(UV)/bin/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --custom-compile-command "make lock" --extra postgres --extra mongodb \
	    --constraint requirements.lock --output-file requirements-runtime.lock

clean: ## remove .venv, caches and build results
	rm -rf $(VENV) .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is older than pyproject.toml or the lock after a change of either: then it is installed anew.
# The log is only shown when something went wrong.
$(STAMP): pyproject.toml requirements.lock
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: this Python has no venv module (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV) (once, about a minute)…"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@{ $(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock && \
	   $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e . ; } >$(LOG) 2>&1 \
	  || { cat $(LOG); echo "make: the installation failed, see above ($(LOG))"; exit 1; }
	@touch $(STAMP)
