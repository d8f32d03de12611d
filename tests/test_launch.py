"""Check the apparatus: a forked rank is as a fresh one, and the search for leaks finds a fault."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_opt_states.waiting import THREAD
from tests.fork_server import import_all
from tests.launch import answer, is_running, run_ranks
from tests.ranks import on_ranks


def describe() -> dict[str, Any]:
    forked = "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
    import_all()
    return {
        "forked": forked,
        "random": [random.random(), torch.rand(()).item()],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "leads a session": os.getsid(0) == os.getpid(),
        # The thread that watches for a long build may outlive a short one by a moment.
        "threads": [thread.name for thread in threading.enumerate() if thread.name != THREAD],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "signals": [str(signal.getsignal(name)) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "affinity": sorted(os.sched_getaffinity(0)),
        "defaults": [str(torch.get_default_dtype()), torch.is_grad_enabled(), dist.is_initialized()],
    }


def test_a_forked_rank_has_the_environment_and_threads_of_a_fresh_rank_and_its_own_random_numbers(
    tmp_path: Path,
) -> None:
    forked, other = on_ranks(2, describe, group=nullcontext, XDG_CACHE_HOME=str(tmp_path))
    # A variable that imports read needs a fresh interpreter, too.
    (fresh,) = on_ranks(1, describe, group=nullcontext, XDG_CACHE_HOME=str(tmp_path), SET_BY_A_TEST="1", WORLD_SIZE="2")
    assert (forked.pop("forked"), fresh.pop("forked")) == (True, False)
    assert len({*forked.pop("random"), *other["random"], *fresh.pop("random")}) == 6
    # Each call of run_ranks has its own port.
    for name in ("MASTER_PORT", "LOCAL_SIZE"):
        assert forked["environment"].pop(name) != fresh["environment"].pop(name)
    assert fresh["environment"].pop("SET_BY_A_TEST") == "1"
    assert forked == fresh
    assert (other["environment"]["RANK"], other["environment"]["XDG_CACHE_HOME"]) == ("1", str(tmp_path))


def test_a_forked_rank_that_outlives_its_timeout_is_killed_with_its_children_and_its_output_stays() -> None:
    (finished,) = run_ranks(1, ["-m", "tests.test_launch"], timeout_s=5)
    assert finished.returncode == -signal.SIGKILL
    assert "written to stderr" in finished.output
    (children,) = finished.answers()
    assert not any(map(is_running, children))


def main() -> None:
    """Start two children, one of them in another session, and hang."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    answer([subprocess.Popen(command, start_new_session=other).pid for other in (False, True)])
    print("written to stderr", file=sys.stderr, flush=True)
    time.sleep(1000)


def fail_on_rank_1(numbers: list[int]) -> None:
    rank = int(os.environ["RANK"])
    assert numbers[rank] == 10


def test_a_failure_names_the_rank_and_the_values_of_the_assertion() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2 ended with 1:[^$]*assert 11 == 10") as caught:
        on_ranks(2, fail_on_rank_1, [10, 11], group=nullcontext)
    assert "rank 0" not in str(caught.value)


@pytest.mark.P6
@pytest.mark.parametrize(
    ("steps", "leak", "grows"),
    [
        (160, "none", set()),
        (160, "every", {"accelerator memory, bytes", "tensors", "open files", "temporary files"}),
        # Host memory grows only in thousands of steps by more than the allocator's own.
        pytest.param(4_000, "none", set(), marks=pytest.mark.thorough),
        pytest.param(4_000, "host", {"host memory, bytes", "tensors"}, marks=pytest.mark.thorough),
    ],
)
def test_training_keeps_no_memory_and_no_files_unless_something_leaks(steps: int, leak: str, grows: set[str]) -> None:
    """Train while units move, steps are skipped, and the model is evaluated, saved and loaded; the seed is 1."""
    script = ["-m", "tests.software_gpu.training.endurance_ranks", "1", str(steps), leak]
    (finished,) = run_ranks(1, script, timeout_s=600 + 2 * steps)
    assert finished.returncode == 0, finished.output[-4000:]
    (found,) = finished.answers()
    assert found["steps"] == steps
    assert set(found["grown"]) == grows, found["growth"]


if __name__ == "__main__":
    main()
