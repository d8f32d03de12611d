"""Check that training on a machine with too little of something has the bits of stock, or an error with the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.drills.interrupted_commands import CALLS, commands
from tests.launch import run_ranks
from tests.tiers import thorough

NOT_CACHED = {
    "no home": "this user has no home folder, and XDG_CACHE_HOME is not set",
    "a read-only home": "Set XDG_CACHE_HOME to a folder that can be written",
    "a shared home": "Set XDG_CACHE_HOME to a folder that can be written",
}
SAME_BITS = ("ulimit -l 64", "one core", "/sys is unreadable", "host memory is exhausted")
SHARED_MEMORY, FULL = "64 MB of /dev/shm", "the disk is full"

NEEDS_MOUNT = pytest.mark.skipif(os.geteuid() != 0, reason="needs a user who may mount file systems")
pytestmark = pytest.mark.promise("P6")


def outputs_of(folder: Path, *drills: str) -> dict[str, list[str]]:
    """Return the outputs of the ranks by drill. None may have hung, or found other bits than stock's."""
    (finished,) = run_ranks(1, ["-m", "tests.drills.drill_ranks", str(folder), *drills], timeout_s=400)
    assert finished.returncode == 0, finished.output[-4000:]
    answers = finished.answers()
    for found in answers:
        ends = "\n".join(output[-4000:] for output in found["outputs"])
        assert set(found["codes"]) == {0}, f"{found['drill']}: {found['codes']}\n{ends}"
    assert [found["drill"] for found in answers] == list(drills)
    return {found["drill"]: found["outputs"] for found in answers}


def test_training_with_too_little_of_something_has_the_bits_of_stock(tmp_path: Path) -> None:
    outputs_of(tmp_path, *SAME_BITS)


@NEEDS_MOUNT
def test_training_with_64_mb_of_shared_memory_has_the_bits_of_stock(tmp_path: Path) -> None:
    outputs_of(tmp_path, SHARED_MEMORY)


def test_a_profile_that_this_user_cannot_cache_is_one_line_of_the_log_per_start(tmp_path: Path) -> None:
    for drill, (output,) in outputs_of(tmp_path, *NOT_CACHED).items():
        (line,) = (line for line in output.splitlines() if "The hardware profile is not cached" in line)
        assert NOT_CACHED[drill] in line


@NEEDS_MOUNT
def test_a_full_disk_is_an_error_of_all_ranks_with_the_file_and_the_space_and_latest_stays(tmp_path: Path) -> None:
    for output in outputs_of(tmp_path, FULL)[FULL]:
        _, refused = output.split("REFUSED ")
        assert "global_step2" in refused
        assert "with 0 kB and " in refused
        assert "Free space there, or save to another folder" in refused


@pytest.mark.parametrize("threads", ["0", thorough("1000")])
def test_the_number_of_omp_threads_does_not_change_the_bits(threads: str) -> None:
    (finished,) = run_ranks(1, ["-m", "tests.drills.omp_ranks"], timeout_s=200, OMP_NUM_THREADS=threads)
    assert finished.returncode == 0, finished.output[-4000:]


def test_ctrl_c_ends_every_command_with_one_line_and_code_130(tmp_path: Path) -> None:
    (finished,) = run_ranks(1, ["-m", "tests.drills.interrupted_commands", str(tmp_path)], timeout_s=200)
    assert finished.returncode == 0, finished.output[-4000:]
    answers = finished.answers()
    assert len(answers) == len(commands(tmp_path)) * len(CALLS)
    for found in answers:
        assert found["code"] == 130, found
        assert found["output"].endswith("\nInterrupted by Ctrl-C.\n"), found
        assert "Traceback" not in found["output"], found
