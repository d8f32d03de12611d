"""Check the memory of the device, page-locked host memory, and that the host cannot access the device's."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launch import REPOSITORY, run_ranks
from tests.software_gpu import host_memory_checks, memory_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(memory_checks, host_memory_checks)
pytestmark = on_one_worker("software_gpu_memory", 1)


@pytest.mark.parametrize("check", checks_of(memory_checks))
def test_memory_of_the_software_gpu_behaves_as_that_of_cuda(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)


@pytest.mark.parametrize("check", checks_of(host_memory_checks))
def test_page_locked_memory_behaves_as_that_of_cuda(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)


def test_an_access_of_the_host_to_memory_of_the_device_ends_with_a_traceback() -> None:
    (ended,) = run_ranks(1, ["-m", "tests.software_gpu.host_access"], timeout_s=120)
    assert ended.returncode == -signal.SIGSEGV, ended.output
    lines = (REPOSITORY / "tests/software_gpu/host_access.py").read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, start=1) if "this line is in the traceback" in line)
    assert f'host_access.py", line {number} in read_on_the_host' in ended.output


def test_without_a_compiler_the_error_says_what_is_needed(tmp_path: Path) -> None:
    (ended,) = run_ranks(
        1,
        ["-c", "from tests.software_gpu.library import library; library()"],
        timeout_s=120,
        TORCH_EXTENSIONS_DIR=str(tmp_path),
        CXX="no-such-compiler",
    )
    assert ended.returncode == 1, ended.output
    assert "RuntimeError: The software GPU cannot be compiled" in ended.output
    assert "no-such-compiler" in ended.output
    assert "apt-get install g++" in ended.output
