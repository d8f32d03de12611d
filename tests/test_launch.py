"""Check that a failure of a rank fails its test, and that training leaks nothing."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from tests.ranks import on_ranks
from tests.software_gpu.ranks import software_process_group
from tests.software_gpu.training.endurance_ranks import grown


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
    (found,) = on_ranks(1, grown, 1, steps, leak, group=software_process_group, timeout_s=600 + 2 * steps)
    assert found.keys() == grows, found
