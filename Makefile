# make help says what there is. Variables: PYTHON (the interpreter to start from), VENV,
# ACCEL (cpu, cuda12, cuda13 or tpu), ARGS (more `jrl train` overrides, or pytest arguments).
PYTHON ?= python3
VENV ?= .venv
ACCEL ?= cpu
ARGS ?=
EXTRAS ?=
TESTS ?=
JAX ?=
WORKERS ?= logical

ifeq ($(filter $(ACCEL),cpu cuda12 cuda13 tpu),)
$(error ACCEL = $(ACCEL); choose from cpu, cuda12, cuda13, tpu)
endif

BIN := $(VENV)/bin
comma := ,
EXTRA := $(if $(filter cpu,$(ACCEL)),,$(ACCEL))
# One stamp for each set of packages, newer than pyproject.toml when the set is installed.
RUN_STAMP := $(VENV)/.installed-run-$(ACCEL)
DEV_STAMP := $(VENV)/.installed-dev-$(ACCEL)
SITE_VENV := build/site-venv
SITE_STAMP := $(SITE_VENV)/.installed
# On CPU say so to JAX, or it complains about an accelerator that it was not installed for.
ON := $(if $(filter cpu,$(ACCEL)),JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu},)
# pip compiles every module it installs, a third of its time; Python compiles those it imports.
PIP_INSTALL := -m pip --disable-pip-version-check --no-input install -qq --no-compile

.DEFAULT_GOAL := help
.PHONY: help address notebooks pictures links site install dev demo test test-all soak extras-test lint format types wheel-test lowest-test newest-test ci clean

help: ## this list
	@echo "make TARGET [ACCEL=cpu|cuda12|cuda13|tpu] [PYTHON=python3.12]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1  \2/p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "JRL needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1)." >&2; \
	  echo "Name one that is: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing JRL for $(ACCEL) into $(VENV): about a minute and 700 MB the first time ..."
	@$(BIN)/python $(PIP_INSTALL) -e '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing JRL for $(ACCEL) and its development tools into $(VENV) ..."
	@$(BIN)/python $(PIP_INSTALL) -e '.[dev$(if $(EXTRA),$(comma)$(EXTRA))]'
	@touch $@ $(RUN_STAMP)

install: $(RUN_STAMP) ## the library and the jrl command, in .venv

dev: $(DEV_STAMP) ## the same with everything the tests need

demo: $(RUN_STAMP) ## train configs/tiny.toml in a fresh directory under runs/
	@$(ON) $(BIN)/jrl train configs/tiny.toml run.dir=runs/tiny-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: $(DEV_STAMP) ## what a contributor waits for: tests and doctests, a worker a core up to four
	$(ON) $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(ARGS)

# A test that skips for want of an extra that dev has is a failure here.
test-all: $(DEV_STAMP) ## everything, an hour on two cores; writes tests/last_full_run.md
	$(ON) $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal -m '' \
	  --extras=dev --record=tests/last_full_run.md $(ARGS)

soak: $(DEV_STAMP) ## thousands of steps with kills, half an hour; writes tests/last_soak.md
	JRL_SOAK_STEPS=10000 JRL_SOAK_KILLS=30 $(ON) $(BIN)/python -m pytest -n0 -m '' tests/test_soak.py

extras-test: $(BIN)/python ## each extra in an environment of its own: EXTRAS="mcp docs" for some
	$(BIN)/python .ci/extras.py $(EXTRAS) $(ARGS)

lint: $(DEV_STAMP) ## ruff, both the rules and the format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_STAMP) ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_STAMP) ## mypy over the library
	$(BIN)/mypy

# A checkout hides what a wheel lacks, so the wheel is tried alone, from an empty directory.
wheel-test: $(BIN)/python ## build the wheel, install it in a new environment and use it
	@rm -rf build/lib build/wheel build/wheel-venv build/empty
	@mkdir -p build/empty
	$(BIN)/python -m pip --disable-pip-version-check wheel -qq --no-deps -w build/wheel .
	@$(BIN)/python -m venv build/wheel-venv
	build/wheel-venv/bin/python $(PIP_INSTALL) build/wheel/jrl_lm-*.whl
	cd build/empty && JAX_PLATFORMS=cpu ../wheel-venv/bin/python $(CURDIR)/.ci/try_wheel.py
	cd build/empty && ../wheel-venv/bin/jrl --help >/dev/null
	cd build/empty && ../wheel-venv/bin/jrl methods --json >/dev/null
	build/wheel-venv/bin/python -m pip check
	@rm -rf build/wheel-venv build/lib build/empty

# Python 3.11 or 3.12: some of these releases have no wheels for later ones.
lowest-test: $(BIN)/python ## train with the lowest versions that pyproject.toml allows
	@rm -rf build/lowest && mkdir -p build/lowest
	$(BIN)/python .ci/lowest.py > build/lowest/constraints.txt
	@$(BIN)/python -m venv build/lowest/venv
	build/lowest/venv/bin/python $(PIP_INSTALL) --only-binary=:all: -c build/lowest/constraints.txt -e .
	build/lowest/venv/bin/python -m pip check
	JAX_PLATFORMS=cpu build/lowest/venv/bin/jrl train configs/tiny.toml train.steps=3 \
	  run.dir=build/lowest/run
	JAX_PLATFORMS=cpu build/lowest/venv/bin/jrl sample build/lowest/run --prompt 3142 >/dev/null
	@rm -rf build/lowest

# PYTHON if it is 3.12 or newer, else one that .ci/newest.py finds or unpacks.
newest-test: ## make test with newer Python and JAX: JAX=0.12 TESTS=tests/models for some
	$(PYTHON) .ci/newest.py $(if $(JAX),--jax $(JAX)) --workers $(WORKERS) $(TESTS) $(ARGS)

ci: ## everything a commit must pass
	.ci/run

# An environment of its own: neither PyTorch nor the tools of dev are needed to write HTML.
$(SITE_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing what builds the site into $(SITE_VENV) ..."
	@rm -rf $(SITE_VENV)
	@$(BIN)/python -m venv $(SITE_VENV)
	@$(SITE_VENV)/bin/python $(PIP_INSTALL) -e '.[docs]'
	@touch $@

site: $(SITE_STAMP) ## the documentation as a site, in build/docs/site
	JAX_PLATFORMS=cpu $(SITE_VENV)/bin/python .ci/site.py

notebooks: $(DEV_STAMP) ## execute the notebooks and keep their outputs: ARGS="3 5" for some
	$(BIN)/python .ci/notebooks.py $(ARGS)

pictures: $(DEV_STAMP) ## the report's pictures in docs/, of RUN=runs/tiny-...; needs a Chromium
	$(BIN)/python $(PIP_INSTALL) playwright
	$(BIN)/python .ci/pictures.py "$(RUN)"

links: $(DEV_STAMP) ## fetch every address that a page names, to see that it is still there
	JRL_LINKS=1 $(BIN)/python -m pytest -m '' tests/test_links.py $(ARGS)

address: ## write the repository's address where it is needed: make address URL=https://...
	$(PYTHON) .ci/address.py "$(URL)"

clean: ## remove what make and the tests made, runs/ and .venv excepted
	rm -rf build dist *.egg-info .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
