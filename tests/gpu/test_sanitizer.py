"""compute-sanitizer finds no access out of bounds, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.gpu.time_left import seconds_left
from tests.launch import REPOSITORY, environment


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer in PATH")
def test_compute_sanitizer_finds_nothing() -> None:
    # PyTorch asks CUDA for things that it may refuse: failing calls say nothing about us.
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    timeout_s = seconds_left()
    try:
        # PyTorch's caching allocator would hide what is out of bounds.
        done = subprocess.run(
            [*sanitizer, sys.executable, "-m", "tests.gpu.small"],
            cwd=REPOSITORY,
            env=environment(DS_ACCELERATOR="cuda", PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"not done in {timeout_s:.0f} s: says nothing about the kernel")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "same bits" in done.stdout
