"""Test that compute-sanitizer, if it is installed, finds no access out of bounds."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.gpu.time_left import seconds_left
from tests.launch import REPOSITORY, environment


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer in PATH")
def test_compute_sanitizer_finds_no_access_out_of_bounds() -> None:
    # PyTorch makes CUDA calls that may fail, so failed calls are not reported.
    sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    timeout_s = seconds_left()
    try:
        # PyTorch's caching allocator would hide accesses out of bounds.
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
        pytest.skip(f"compute-sanitizer did not finish in {timeout_s:.0f} s: this says nothing about the kernel")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "same bits" in done.stdout
