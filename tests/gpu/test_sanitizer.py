"""compute-sanitizer finds no access out of bounds, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.launch import REPOSITORY, environment

TIMEOUT_S = 45


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer in PATH")
def test_compute_sanitizer_finds_nothing() -> None:
    # PyTorch asks CUDA for things that it may refuse: failing calls say nothing about us.
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    try:
        # PyTorch's caching allocator would hide what is out of bounds.
        done = subprocess.run(
            [*sanitizer, sys.executable, "-m", "tests.gpu.small"],
            cwd=REPOSITORY,
            env=environment(DS_ACCELERATOR="cuda", PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"not done in {TIMEOUT_S} s: says nothing about the kernel")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "same bits" in done.stdout
