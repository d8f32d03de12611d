# Everything runs in .venv of this checkout. The first target that needs it installs it, with the versions pinned by
# constraints.txt.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
# Python compiles the modules that it imports. If pip compiled all of PyTorch's, the installation would take a minute longer.
PIP := $(VENV)/bin/python -m pip install --quiet --quiet --no-compile --disable-pip-version-check \
    --constraint constraints.txt

# DeepSpeed compiles its kernels at first use. They are kept in this checkout, so that this happens once.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
# The demo and the tests run on the CPU, even on a machine with a GPU.
export DS_ACCELERATOR ?= cpu
# PyTorch compiles the kernels with Ninja, which it finds only in PATH.
WITH_NINJA := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help demo test test-all test-oldest stress compat test-frameworks release-check gpu-check gpu-measure gpu-bench gpu-bits lint wheel clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

# names.py has the version, which the metadata of the installed package repeat.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt deep_opt_states/names.py
	@echo "Installing PyTorch, DeepSpeed and this package into $(VENV) (once; takes half a minute, and the download of PyTorch)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools wheel ninja numpy torch
	@# DeepSpeed's setup.py imports torch, which an isolated build would install a second time.
	@$(PIP) --no-build-isolation deepspeed
	@$(PIP) --no-build-isolation --editable .[test]
	@touch $@

demo: $(INSTALLED)  ## Compare every bit with stock DeepSpeed, and time an EMULATED update
	@$(WITH_NINJA) $(VENV)/bin/python examples/demo.py

test: tier = -m "not thorough" --hypothesis-profile=quick
test: test-all  ## Run the tests except those marked thorough

test-all: $(INSTALLED)  ## Run all tests
	@# Two tests run at a time, since they often wait for processes to start. The kernels and the software GPU are
	@# compiled before, so that no two compile them at the same time.
	@$(WITH_NINJA) $(VENV)/bin/python -c \
	    'from deep_opt_states.device.kernels.choice import known_arithmetic; print(known_arithmetic())'
	@$(WITH_NINJA) $(VENV)/bin/python -c \
	    'from tests.software_gpu.library import compile_library; print(compile_library())'
	@$(WITH_NINJA) $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder \
	    $(tier) $(PYTEST_OPTIONS)

test-oldest: $(INSTALLED)  ## Train a few golden cases with the oldest supported release of DeepSpeed
	@$(WITH_NINJA) $(VENV)/bin/python -m pytest tests/compat

MINUTES ?= 10

stress: $(INSTALLED)  ## Search for races with new seeds for MINUTES=10; SEED=... sets the first seed
	@$(WITH_NINJA) $(VENV)/bin/python -m tests.stress --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

compat: $(INSTALLED)  ## Try releases of DeepSpeed and PyTorch with the golden cases, and update the tables in docs/
	@$(WITH_NINJA) $(VENV)/bin/python -m tests.compat $(RELEASES)
	@$(VENV)/bin/python tools/generate_docs.py

test-frameworks: $(INSTALLED)  ## Train with FRAMEWORKS="LLaMA-Factory ..." by their own commands, and update the table in docs/
	@$(WITH_NINJA) $(VENV)/bin/python -m tests.compat.frameworks $(FRAMEWORKS)
	@$(VENV)/bin/python tools/generate_docs.py

gpu-check:  ## Run tests/gpu and the profile on a machine with a GPU, with PYTHON=python3; 9 minutes
	@$(PYTHON) -m tests.gpu.run_parts check

gpu-measure:  ## Run small benchmarks of copies and Adam on a machine with a GPU; 4 minutes
	@$(PYTHON) -m tests.gpu.run_parts measure

GPU_BENCH := env -u DS_ACCELERATOR $(PYTHON) -m benchmarks
SIZE := $(if $(BILLIONS),--set billions=$(BILLIONS))

gpu-bench:  ## Compare all ways to train BILLIONS=1.7 or 4 of parameters on a machine with a GPU; 9 minutes
	@$(GPU_BENCH) gpu $(SIZE) --output $(or $(OUT),.cache/gpu-bench)

gpu-bits:  ## Compare the bits of one rank, and of two on one GPU, with stock's; 9 minutes
	@$(GPU_BENCH) gpu_bits $(SIZE) --output $(or $(OUT),.cache/gpu-bench)

lint: $(INSTALLED)  ## Check style, prose and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python tools/lint_prose.py
	$(VENV)/bin/mypy

WHEEL := .cache/wheel

wheel: $(INSTALLED)  ## Build a source distribution and from it a wheel, and check that the wheel is complete
	rm -rf $(WHEEL)
	$(VENV)/bin/python -c 'from setuptools import build_meta; build_meta.build_sdist("$(WHEEL)")' >/dev/null
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEEL) $(WHEEL)/*.tar.gz
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps $(WHEEL)/*.whl
	for package in perf_model deep_opt_states; do \
	    diff -r -x __pycache__ $$package $(WHEEL)/venv/lib/python*/site-packages/$$package || exit 1; done
	test -x $(WHEEL)/venv/bin/deep-opt-states
	$(WHEEL)/venv/bin/python -I -c \
	    'from importlib.metadata import entry_points; entry_points(group="torch.backends")["deep_opt_states"]'
	@ls $(WHEEL)/*.whl $(WHEEL)/*.tar.gz

INTERPRETER ?= $(PYTHON)

release-check: wheel  ## Install what `wheel` builds outside the checkout and train with it, with INTERPRETER=python3.12
	@$(VENV)/bin/python -m tests.compat.installed $(WHEEL) $(INTERPRETER)
	@$(VENV)/bin/python tools/generate_docs.py

clean:  ## Remove everything that make and the tools created, including the virtual environment
	rm -rf $(VENV) .cache build demo-output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
