# Everything runs in .venv of this checkout: the first target that needs it installs it, pinned by constraints.txt.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
PIP := $(VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

# DeepSpeed compiles kernels when they are first used: once for this checkout.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
# The demo and the tests run on the CPU, also where there is a GPU.
export DS_ACCELERATOR ?= cpu
# Ninja, which compiles the kernels, is looked for in PATH only.
WITH_NINJA := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help demo test test-all stress gpu-check gpu-measure gpu-bench lint wheel clean

help:  ## Say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@echo "Installing PyTorch, DeepSpeed and this package into $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools wheel ninja numpy torch
	@# Its setup.py imports torch; an isolated build would install that a second time.
	@$(PIP) --no-build-isolation deepspeed
	@$(PIP) --no-build-isolation --editable .[test]
	@touch $@

demo: $(INSTALLED)  ## Train with stock DeepSpeed and with the plugin, and compare every bit
	@$(WITH_NINJA) $(VENV)/bin/python examples/demo.py

test: tier = -m "not thorough"
test: test-all  ## Run the tests, without those marked thorough

test-all: $(INSTALLED)  ## Run all tests
	@# Two at a time: much of it is waiting for processes that start. Kernels are compiled before, not by both.
	@$(WITH_NINJA) $(VENV)/bin/python -c \
	    'from deep_opt_states.device.kernels.probe_arithmetic import find_arithmetic; print(find_arithmetic())'
	@$(WITH_NINJA) $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup $(tier)

MINUTES ?= 10

stress: $(INSTALLED)  ## Look for races with fresh seeds for MINUTES=10; SEED=... begins with that one
	@$(WITH_NINJA) $(VENV)/bin/python -m tests.stress --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

gpu-check:  ## On a machine with a GPU, by its PYTHON=python3: tests/gpu and the profile; 9 minutes
	@$(PYTHON) -m tests.gpu.check check

gpu-measure:  ## There, too: small benchmarks, of copies, Adam and overlap; 7 minutes
	@$(PYTHON) -m tests.gpu.check measure

gpu-bench:  ## There, too: predictions and training steps with billions of parameters; 9 minutes
	@$(PYTHON) -m tests.gpu.check bench

lint: $(INSTALLED)  ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

WHEEL := .cache/wheel

wheel: $(INSTALLED)  ## Build a wheel, and check that installing it installs everything
	rm -rf $(WHEEL) build
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEEL) .
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps $(WHEEL)/*.whl
	for package in perf_model deep_opt_states; do \
	    diff -r -x __pycache__ $$package $(WHEEL)/venv/lib/python*/site-packages/$$package || exit 1; done
	test -x $(WHEEL)/venv/bin/deep-opt-states
	$(WHEEL)/venv/bin/python -I -c \
	    'from importlib.metadata import entry_points; entry_points(group="torch.backends")["deep_opt_states"]'
	@ls $(WHEEL)/*.whl

clean:  ## Remove all that make and the tools have made, the virtual environment included
	rm -rf $(VENV) .cache build demo-output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
