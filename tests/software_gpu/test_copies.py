"""Check copies between host and device, and how our device divides large ones."""

from __future__ import annotations

import pytest

from tests.software_gpu import chunk_checks, copy_checks
from tests.software_gpu.checks import assert_passed, checks_of, ranks_of
from tests.zero.training_once import TrainingOnce, on_one_worker

RANKS = ranks_of(copy_checks, chunk_checks)
pytestmark = on_one_worker("software_gpu_copies", 1)


@pytest.mark.parametrize("check", checks_of(copy_checks))
def test_copies_of_the_software_gpu_behave_as_those_of_cuda(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)


@pytest.mark.parametrize("check", checks_of(chunk_checks))
def test_large_copies_are_divided_into_chunks_that_small_copies_overtake(check: str, trained: TrainingOnce) -> None:
    assert_passed(trained, check)
